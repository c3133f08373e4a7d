// Tiles of the NCHW implicit GEMM: their taps, what they need of the planes, and a block's shared
// memory.
//
// M is positions of a grid: output pixels, or, for the input gradient of a strided layer, groups of
// stride * stride pixels, one for each residue. A tile has consecutive positions, which may go on
// from one image to the next.
#pragma once
#include "device/tile.cuh"
#include "device/wgmma.cuh"
#include "device/tensor/operand.cuh"
#include "device/tensor/ring.cuh"

namespace fastconv {
namespace hopper {

using namespace tensor;

constexpr int kConsumers = 2;  // warpgroups
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kStep = 8;  // K of a TF32 wgmma

// --- Taps ----------------------------------------------------------------------------------------

// Along an axis, position p reads the image at p * step + offset for each tap. For an input
// gradient, taps with the same offset are neighbours and multiply the same input, each for another
// residue: together they are a unit.
struct Axis {
  int kernel, stride, dilation, padding;

  __host__ __device__ constexpr int reach(int tap) const { return tap * dilation - padding; }
  __host__ __device__ constexpr int offset(int tap) const {
    return C::transposed ? -floor_div(reach(tap), stride) : reach(tap);
  }
  __host__ __device__ constexpr int residue(int tap) const {
    return C::transposed ? reach(tap) - floor_div(reach(tap), stride) * stride : 0;
  }
  __host__ __device__ constexpr int residues() const { return C::transposed ? stride : 1; }

  // The first tap of a tap's unit, and the one after the unit's last.
  __host__ __device__ constexpr int begin(int tap) const {
    int first = tap;
    while (first > 0 && offset(first - 1) == offset(tap)) --first;
    return first;
  }
  __host__ __device__ constexpr int end(int tap) const {
    int last = tap;
    while (last + 1 < kernel && offset(last + 1) == offset(tap)) ++last;
    return last + 1;
  }

  // Only residues with taps have accumulators; index_of counts those before a residue.
  __host__ __device__ constexpr bool has_taps(int residue) const {
    for (int tap = 0; tap < kernel; ++tap) {
      if (this->residue(tap) == residue) return true;
    }
    return false;
  }
  __host__ __device__ constexpr int index_of(int residue) const {
    int count = 0;
    for (int i = 0; i < residue; ++i) count += has_taps(i);
    return count;
  }
  __host__ __device__ constexpr int reached() const { return index_of(residues()); }

  __host__ __device__ constexpr int lowest() const { return min_of(offset(0), offset(kernel - 1)); }
  __host__ __device__ constexpr int highest() const {
    return max_of(offset(0), offset(kernel - 1));
  }
};

__host__ __device__ constexpr Axis row_axis() {
  return {C::kernel_height, C::stride_height, C::dilation_height, C::padding_top};
}
__host__ __device__ constexpr Axis column_axis() {
  return {C::kernel_width, C::stride_width, C::dilation_width, C::padding_left};
}

constexpr int kTaps = C::kernel_height * C::kernel_width;
constexpr int kRowResidues = row_axis().residues();
constexpr int kColumnResidues = column_axis().residues();
constexpr int kReachedColumns = column_axis().reached();
constexpr int kReachedResidues = row_axis().reached() * kReachedColumns;

// The number of taps of a unit, given any of them.
__host__ __device__ constexpr int unit_taps(int row, int column) {
  return (row_axis().end(row) - row_axis().begin(row)) *
         (column_axis().end(column) - column_axis().begin(column));
}

// A tap's place in the order in which a chunk's taps are multiplied: unit by unit.
__host__ __device__ constexpr int place_of(int row, int column) {
  const int first_row = row_axis().begin(row);
  const int first_column = column_axis().begin(column);
  const int rows = row_axis().end(row) - first_row;
  const int columns = column_axis().end(column) - first_column;
  return first_row * C::kernel_width + rows * first_column + (row - first_row) * columns + column -
         first_column;
}

__host__ __device__ constexpr int most_unit_taps() {
  int most = 0;
  for (int row = 0; row < C::kernel_height; ++row) {
    for (int column = 0; column < C::kernel_width; ++column) {
      most = max_of(most, unit_taps(row, column));
    }
  }
  return most;
}

__host__ __device__ constexpr int count_units() {
  int count = 0;
  for (int row = 0; row < C::kernel_height; row = row_axis().end(row)) {
    for (int column = 0; column < C::kernel_width; column = column_axis().end(column)) ++count;
  }
  return count;
}
constexpr int kUnits = count_units();

// --- MMA -----------------------------------------------------------------------------------------

constexpr int kRowTiles = C::row_tiles;  // M of a warpgroup, in units of 64
constexpr int kRows = 2 * kRowTiles;     // rows of M of a thread
constexpr int kColumns = C::columns;     // N: output channels
constexpr int kSteps = C::chunk / kStep;
constexpr int kChunks = ceil_div(C::group_in, C::chunk);
constexpr int kGroupTiles = ceil_div(C::group_out, kColumns);  // column tiles of a group
constexpr int kColumnTiles = C::groups * kGroupTiles;
static_assert(C::groups == 1 || C::group_in % C::chunk == 0, "no channels of the next group");
static_assert(C::tile_pixels <= kConsumers * 64 * kRowTiles, "rows of the MMAs");
static_assert(kReachedResidues * kRowTiles * kColumns <= 256, "accumulators of a thread");

// --- Pieces of planes in shared memory -----------------------------------------------------------
// What a tile needs of a chunk of channels is cut into pieces: [channel][pitch]. A piece has
// `piece` rows, counted from the first one that the tile needs of an image; or `piece` pixels,
// where a plane is taken for one row (`flat`); or it is a `whole` plane.

constexpr int kGridPixels = C::grid_height * C::grid_width;
constexpr int kPieceFloats = C::chunk * C::pitch;
constexpr int kPieceBytes = kPieceFloats * 4;
constexpr int kInputBytes = C::pieces * kPieceBytes;
constexpr int kTapBytes = C::chunk * kColumns * 4;  // weights of a tap and a chunk
constexpr int kWeightBytes = most_unit_taps() * kTapBytes;
constexpr int kWeightRing = C::input_stages * kInputBytes;
constexpr int kBarriers = kWeightRing + C::weight_stages * kWeightBytes;
static_assert(kBarriers + 16 * (C::input_stages + C::weight_stages) <= C::shared_bytes, "");
static_assert(kPieceBytes % (C::bulk ? 16 : 128) == 0, "as copies need them aligned");
static_assert(kWeightBytes % 128 == 0, "as copies need them aligned");

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier weights_full[C::weight_stages];
  Barrier weights_empty[C::weight_stages];
};

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}

// The rows, or pixels if `flat`, that positions `first` to `last` need of an image.
struct Span {
  int begin, end;  // rows, or pixels

  __device__ Span(int first, int last) {
    if constexpr (C::whole) {
      begin = 0;
      end = C::piece;
    } else if constexpr (C::flat) {
      begin = first;
      end = last + 1;
    } else {
      begin = max(first / C::grid_width * C::step_height + row_axis().lowest(), 0);
      end = min(last / C::grid_width * C::step_height + row_axis().highest() + 1, C::in_height);
    }
  }
  __device__ int pieces() const { return max(end - begin + C::piece - 1, 0) / C::piece; }
};

// A tile: positions from `image`, `pixel` on, and output channels of a group from `column` on.
// Tiles of the same positions follow each other, so that their input is still in the cache.
struct Tile {
  int image, pixel, group, column;

  __device__ explicit Tile(int index) {
    const int first = index / kColumnTiles * C::tile_pixels;
    group = index / kGroupTiles % C::groups;
    column = index % kGroupTiles * kColumns;
    image = first / C::image_pixels;
    pixel = first % C::image_pixels;
  }
};

// The number of tiles. Blocks take every gridDim.x-th.
__device__ __forceinline__ int tile_count(int batch) {
  return ceil_div(batch * C::image_pixels, C::tile_pixels) * kColumnTiles;
}

}  // namespace hopper
}  // namespace fastconv
