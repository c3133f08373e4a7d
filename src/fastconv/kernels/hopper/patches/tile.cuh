// Patches of contiguous volumes: where they lie in memory, and their tiles in shared memory.
//
// A patch is what one position of the patches' tensor reads or writes: `kernel` planes, rows and
// columns of each channel. Patches touch each other, so each element belongs to one. Four columns
// of a row are a piece, contiguous in memory; `piece` q of a patch counts pieces of a row first,
// then rows, planes and channels.
#pragma once
#include "device/epilogue.cuh"
#include "device/mma.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace patches {

using C = Config;
using Scalar = C::Scalar;
using Operand = tensor::OperandOf<Scalar>::type;

constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr bool kTf32 = kScalarBytes == 4;
constexpr int kVector = 16 / kScalarBytes;  // elements in 16 bytes
constexpr int kPiece = 4;
constexpr int kPieceBytes = kPiece * kScalarBytes;

// Pieces and channels, rounded up to what MMAs multiply at a time. What is beyond is zero.
constexpr int kRowPieces = C::kernel_width / kPiece;
constexpr int kPlanePieces = C::kernel_height * kRowPieces;
constexpr int kChannelPieces = C::kernel_depth * kPlanePieces;
constexpr int kPieces = C::channels * kChannelPieces;
constexpr int kAllPieces = round_up(kPieces, 4);
constexpr int kFilters = round_up(C::filters, 16);

// The volume that has patches, and the positions of the patches' tensor.
constexpr int kRow = C::width;
constexpr int kPlane = C::height * kRow;
constexpr int kChannel = C::depth * kPlane;
constexpr int kVolume = C::channels * kChannel;
constexpr int kPositions = C::patches_deep * C::patches_down * C::patches_across;
static_assert(kPositions % kVector == 0, "filters begin at multiples of 16 bytes");

// --- Tiles ---------------------------------------------------------------------------------------

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 64;                            // positions of a tile
constexpr int kTiles = ceil_div(kPositions, kTile);  // of a volume

// The distance of two rows of `bytes` in shared memory, `apart` from a multiple of all banks.
__host__ __device__ constexpr int pitch(int bytes, int apart) {
  return round_up(bytes - apart, 128) + apart;
}

// Where a piece lies in its patch: a channel, and in it a plane, a row and the first column.
struct PiecePlace {
  int channel, plane, row, column;

  __device__ __forceinline__ explicit PiecePlace(int piece)
      : channel(piece / kChannelPieces),
        plane(piece % kChannelPieces / kPlanePieces),
        row(piece % kPlanePieces / kRowPieces),
        column(piece % kRowPieces * kPiece) {}
};

// The offset of a piece from the first element of its patch.
__device__ __forceinline__ int piece_offset(int piece) {
  const PiecePlace at(piece);
  return at.channel * kChannel + at.plane * kPlane + at.row * kRow + at.column;
}

// The offset of a position's patch from the first element of the volume.
__device__ __forceinline__ int patch_offset(int position) {
  const int across = position % C::patches_across, line = position / C::patches_across;
  const int down = line % C::patches_down, deep = line / C::patches_down;
  return deep * C::kernel_depth * kPlane + down * C::kernel_height * kRow +
         across * C::kernel_width;
}

// The weight's element of a filter at a column of a piece; zero beyond the last filter or piece.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int filter, int piece,
                                            int column) {
  if (filter >= C::filters || piece >= kPieces) return Scalar{};
  const PiecePlace at(piece);
  return weight[1ll * filter * C::weight_stride_out + 1ll * at.channel * C::weight_stride_in +
                1ll * at.plane * C::weight_stride_depth + 1ll * at.row * C::weight_stride_height +
                1ll * (at.column + column) * C::weight_stride_width];
}

// --- Operands ------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned rounded(unsigned bits) {
  return __float_as_uint(round_operand_to_tf32(__uint_as_float(bits)));
}

// A register of an operand from weights that are neighbours along K: one in TF32, two in 16 bits.
__device__ __forceinline__ unsigned word_of(float first, float) {
  return __float_as_uint(round_operand_to_tf32(first));
}
template <class Half>
__device__ __forceinline__ unsigned word_of(Half first, Half second) {
  return first.bits | static_cast<unsigned>(second.bits) << 16;
}

// --- A block -------------------------------------------------------------------------------------

// Walks over the tiles of all volumes, with the next one's copies under way. `Pass` copies a tile,
// and multiplies and stores it.
template <class Pass>
__device__ __forceinline__ void walk(const Pass& pass, int volumes) {
  const int tiles = volumes * kTiles, step = static_cast<int>(gridDim.x);
  int tile = static_cast<int>(blockIdx.x);
  int stage = 0;
  pass.copy(tile / kTiles, tile % kTiles * kTile, stage);
  copy_async_commit();
  for (; tile < tiles; tile += step, stage ^= 1) {
    const int next = tile + step;
    if (next < tiles) pass.copy(next / kTiles, next % kTiles * kTile, stage ^ 1);
    copy_async_commit();  // may be empty: waits count groups
    copy_async_wait<1>();
    __syncthreads();  // all threads' copies have arrived
    pass.compute(tile / kTiles, tile % kTiles * kTile, stage);
    __syncthreads();  // no thread reads the stage that the next copies overwrite
  }
  copy_async_wait<0>();
}

}  // namespace patches
}  // namespace fastconv
