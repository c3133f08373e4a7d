// What the kernels for grouped convolutions share: how outputs read inputs along an axis, a block's
// tile of positions, and the halo tile in shared memory.
//
// Tensors are channels-last and have 16-bit elements. A block's tile has `chunk` channels, which
// are whole groups, and of `slots` images tile_rows by tile_columns positions. An MMA takes 16
// pixels: 8 neighbours of two rows. All numbers of 8 neighbours that one tap reads lie in shared
// memory in 8 rows of 16 bytes at equal distances, as ldmatrix reads them:
//
//   halo   [slot][row][column residue][column][channel]
//
// Columns are sorted by their residue of the stride. Pixels are an odd number of 16 bytes apart, so
// that 8 neighbours hit all banks.
#pragma once
#include "device/mma.cuh"
#include "device/tensor/operand.cuh"
#include "device/tile.cuh"

namespace fastconv {
namespace grouped {

using C = Config;
using Scalar = C::Scalar;
using Factor = tensor::OperandOf<Scalar>::type;

constexpr int kScalarBytes = 2;
static_assert(sizeof(Scalar) == kScalarBytes, "16-bit types");
constexpr int kOctet = 8;    // channels of 16 bytes, and neighbouring pixels of half an MMA
constexpr int kBundle = 16;  // channels that a warp computes at once
constexpr int kWidth = C::group_in;
static_assert(C::group_in == C::group_out, "groups of as many outputs as inputs");
static_assert(kWidth == 4 || kWidth == 8 || kWidth == 16 || kWidth == 32, "");

// Along one axis, the pass computes output kOver * position + residue from inputs
// kTimes * position + kOrigin + offset. Forward, an output reads the inputs of all taps. An input
// gradient of a stride has a residue for each phase of the stride, which reads some of the taps.
template <bool kTransposed, int kKernel, int kStride, int kDilation, int kPadding>
struct Axis {
  static constexpr bool kFractional = kTransposed && kStride > 1;
  static_assert(!kFractional || kDilation == 1, "fractional strides are not dilated");
  static constexpr int kOver = kFractional ? kStride : 1;
  static constexpr int kTimes = kTransposed ? 1 : kStride;
  static constexpr int kOrigin =
      kTransposed ? floor_div(kPadding - (kKernel - 1) * kDilation, kStride) : -kPadding;
  // The largest offset of any tap.
  static constexpr int kReach = kFractional ? floor_div(kStride - 1 + kPadding, kStride) - kOrigin
                                            : (kKernel - 1) * kDilation;

  // Returns the first tap of a residue, its number of taps, and its t-th tap.
  __host__ __device__ static constexpr int first(int residue) {
    return kFractional ? (residue + kPadding) % kStride : 0;
  }
  __host__ __device__ static constexpr int taps(int residue) {
    return kFractional ? ceil_div(max_of(kKernel - first(residue), 0), kStride) : kKernel;
  }
  __host__ __device__ static constexpr int tap(int residue, int t) {
    return first(residue) + t * kOver;
  }
  // Returns the offset of a residue's t-th tap: kStep more than that of the tap before.
  static constexpr int kStep = kFractional ? -1 : kTransposed ? -kDilation : kDilation;
  __host__ __device__ static constexpr int offset(int residue, int t) {
    return (kFractional   ? (residue + kPadding) / kStride - kOrigin
            : kTransposed ? (kKernel - 1) * kDilation
                          : 0) +
           t * kStep;
  }
  // Returns how many inputs some neighbouring positions span.
  __host__ __device__ static constexpr int halo(int positions) {
    return (positions - 1) * kTimes + kReach + 1;
  }
};

using Rows =
    Axis<C::transposed, C::kernel_height, C::stride_height, C::dilation_height, C::padding_top>;
using Columns =
    Axis<C::transposed, C::kernel_width, C::stride_width, C::dilation_width, C::padding_left>;

// --- The tile ------------------------------------------------------------------------------------

constexpr int kChannels = C::groups * kWidth;
constexpr int kChunks = kChannels / C::chunk;
constexpr int kBundles = C::chunk / kBundle;
static_assert(kChannels % C::chunk == 0 && C::chunk % kBundle == 0 && C::chunk % kWidth == 0,
              "chunks are whole groups");

constexpr int kTilesX = ceil_div(ceil_div(C::out_width, Columns::kOver), C::tile_columns);
constexpr int kTilesY = ceil_div(ceil_div(C::out_height, Rows::kOver), C::tile_rows);
constexpr int kRowPairs = C::tile_rows / 2;
constexpr int kSegments = C::tile_columns / kOctet;  // of 8 columns
static_assert(C::tile_rows % 2 == 0 && C::tile_columns % kOctet == 0, "whole MMAs");

constexpr int kThreads = 32 * C::warps;

// A tile by its first position.
struct Tile {
  int x, y;
  int image;

  __device__ explicit Tile(int index) {
    x = index % kTilesX * C::tile_columns;
    index /= kTilesX;
    y = index % kTilesY * C::tile_rows;
    image = index / kTilesY * C::slots;
  }
};

// Returns the offset of an image's first element.
template <int kHeight, int kWidth>
__device__ __forceinline__ long long image_at(int image) {
  return 1ll * image * (kHeight * kWidth * kChannels);
}

// --- The halo tile -------------------------------------------------------------------------------

constexpr int kPixelBytes = C::chunk * kScalarBytes + 16;
constexpr int kHaloRows = Rows::halo(C::tile_rows);
constexpr int kHaloColumns = Columns::halo(C::tile_columns);
constexpr int kResidueColumns = ceil_div(kHaloColumns, Columns::kTimes);
constexpr int kRowBytes = Columns::kTimes * kResidueColumns * kPixelBytes;
constexpr int kSlotBytes = kHaloRows * kRowBytes;
constexpr int kHaloBytes = C::slots * kSlotBytes;

// Returns where a column of the halo tile lies within its row, in pixels.
__host__ __device__ constexpr int place(int column) {
  return column % Columns::kTimes * kResidueColumns + column / Columns::kTimes;
}

// Copies part of `slots` images, kRows by kColumns pixels from (y, x) on, each to the place that
// `target` returns for its slot, row and column; what lies outside of the images becomes zeros.
template <int kRows, int kColumns, int kHeight, int kWidth, class Target>
__device__ __forceinline__ void copy_pixels(const Scalar* source, int first_channel, int image,
                                            int images, int y, int x, const Target& target) {
  constexpr int kVectors = C::chunk / kOctet;  // vectors of a pixel
  constexpr int kTasks = C::slots * kRows * kColumns * kVectors;
  source += image_at<kHeight, kWidth>(image) + first_channel;
#pragma unroll 4
  for (int task = static_cast<int>(threadIdx.x); task < kTasks; task += kThreads) {
    const int vector = task % kVectors;
    const int column = task / kVectors % kColumns;
    const int row = task / (kVectors * kColumns) % kRows;
    const int slot = C::slots == 1 ? 0 : task / (kVectors * kColumns * kRows);
    const bool exists = image + slot < images && static_cast<unsigned>(y + row) < kHeight &&
                        static_cast<unsigned>(x + column) < kWidth;
    const Scalar* const pixel = exists ? source + image_at<kHeight, kWidth>(slot) +
                                             ((y + row) * kWidth + x + column) * kChannels
                                       : source;
    copy_async<16>(target(slot, row, column) + vector * 16, pixel + vector * kOctet, exists);
  }
}

// Copies the halo tile of a tile.
__device__ __forceinline__ void copy_halo(unsigned char* halo, const Scalar* input, int chunk,
                                          const Tile& tile, int images) {
  copy_pixels<kHaloRows, kHaloColumns, C::in_height, C::in_width>(
      input, chunk * C::chunk, tile.image, images, tile.y * Rows::kTimes + Rows::kOrigin,
      tile.x * Columns::kTimes + Columns::kOrigin, [&](int slot, int row, int column) {
        return halo + slot * kSlotBytes + row * kRowBytes + place(column) * kPixelBytes;
      });
}

}  // namespace grouped
}  // namespace fastconv
