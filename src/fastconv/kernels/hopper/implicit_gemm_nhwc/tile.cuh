// Tiles of the NHWC implicit GEMM: their order, their taps, and a block's shared memory.
#pragma once
#include "device/depth.cuh"
#include "device/tile.cuh"
#include "device/wgmma.cuh"
#include "device/tensor/operand.cuh"
#include "device/tensor/ring.cuh"

namespace fastconv {
namespace hopper {

using tensor::C;
using tensor::kScalarBytes;
using tensor::kVector;
using tensor::Operand;
using Ring = tensor::Ring<C::stages>;
using tensor::Scalar;

using Depth = DepthOf<C>;

// M is positions, of all images one after the other: output pixels; or for an input gradient with a
// stride, groups of stride by stride pixels, one pixel for each residue. Volumes have planes of
// them.
constexpr int kPlaneResidues = C::transposed ? Depth::stride : 1;
constexpr int kPlanePositions = C::position_rows * C::position_columns;
constexpr int kPositions = ceil_div(Depth::out, kPlaneResidues) * kPlanePositions;  // in an image
constexpr int kConsumers = C::consumers;  // warpgroups, each with 64 positions
constexpr int kTileRows = 64 * kConsumers;
constexpr int kTileColumns = C::tile_columns;
constexpr int kColumnTiles = ceil_div(C::out_channels, kTileColumns);
static_assert(kTileColumns % 16 == 0 && (kTileColumns % 64 == 0 || kColumnTiles == 1),
              "a tile that is not made of boxes ends beyond the last channel");
constexpr int kThreads = 128 * kConsumers + 32;
constexpr int kConsumerWarps = 4 * kConsumers;

// A step of K: 128 bytes of channels at one tap.
constexpr int kSpan = 128;
constexpr int kDepth = kSpan / kScalarBytes;
constexpr int kChunks = ceil_div(C::in_channels, kDepth);
constexpr int kMmaSpan = 32;  // bytes of K of an MMA
constexpr int kMmaDepth = kMmaSpan / kScalarBytes;
constexpr int kLastMmas = ceil_div(C::in_channels - (kChunks - 1) * kDepth, kMmaDepth);

// An input gradient's weights are N-major: the layer's input channels, which are its columns, are
// neighbours in memory. wgmma reads TF32 operands only K-major, so weights of float32 are packed.
constexpr bool kNMajor = C::transposed && kScalarBytes == 2;

constexpr int kRowBytes = kTileRows * kSpan;
// Columns of a TMA box: of N-major weights, and of what is stored.
constexpr int kBoxColumns = kSpan / kScalarBytes;
constexpr int kBoxes = ceil_div(kTileColumns, kBoxColumns);
constexpr int kWeightBytes = (kNMajor ? kBoxes * kBoxColumns : kTileColumns) * kSpan;
constexpr int kStageBytes = kRowBytes + (C::resident ? 0 : kWeightBytes);
constexpr int kStagedBytes = 16 * C::joined * kSpan;  // a warp's 16 positions

// With `resident`, the weights of all steps stay in shared memory: all tiles read the same ones.
constexpr int kSteps = Depth::kernel * C::kernel_height * C::kernel_width * kChunks;
constexpr int kResidentBytes = C::resident ? kSteps * kWeightBytes : 0;

// Shared memory: resident weights, stages, staging buffers of the epilogue, barriers.
struct Shared {
  unsigned char* const start = shared_memory();

  __device__ __forceinline__ unsigned char* rows(int stage) const {
    return start + kResidentBytes + stage * kStageBytes;
  }
  __device__ __forceinline__ unsigned char* weights(int stage, int step) const {
    return C::resident ? start + step * kWeightBytes : rows(stage) + kRowBytes;
  }
  __device__ __forceinline__ unsigned char* staged(int warp, int buffer) const {
    return rows(C::stages) + (warp * C::buffers + buffer) * kStagedBytes;
  }
  __device__ __forceinline__ Barrier* full(int stage) const {
    return reinterpret_cast<Barrier*>(staged(kConsumerWarps, 0)) + stage;
  }
  __device__ __forceinline__ Barrier* empty(int stage) const { return full(C::stages) + stage; }
  __device__ __forceinline__ Barrier* resident() const { return empty(C::stages); }
};

// Along an axis, the taps of a residue: all of them, or for an input gradient with a stride only
// those that reach the residue. `offset` is the distance from a position to what its tap reads.
struct Axis {
  int kernel, stride, dilation, padding, lower, residue;

  __device__ __forceinline__ bool has(int tap) const {
    return !C::transposed || (residue + padding - dilation * tap) % stride == 0;
  }
  __device__ __forceinline__ int offset(int tap) const {
    return C::transposed ? (residue + padding - dilation * tap) / stride - lower : dilation * tap;
  }
  __device__ __forceinline__ int taps() const {
    int count = 0;
    for (int tap = 0; tap < kernel; ++tap) count += has(tap);
    return count;
  }
};

constexpr int kRowResidues = C::transposed ? C::stride_height : 1;
constexpr int kColumnResidues = C::transposed ? C::stride_width : 1;
constexpr int kResidues = kPlaneResidues * kRowResidues * kColumnResidues;
static_assert(!C::resident || kResidues * kColumnTiles == 1, "tiles have different weights");

// The plane where the first position reads its first tap. A residue without taps counts as reading
// its own position, as in the tensor map's corners (`lower` of im2col.py).
__host__ __device__ constexpr int lower_plane() {
  if (!C::transposed) return -Depth::padding;
  int lower = 0;
  for (int residue = 0; residue < Depth::stride; ++residue) {
    int least = 0;
    bool found = false;
    for (int tap = 0; tap < Depth::kernel; ++tap) {
      const int reach = residue + Depth::padding - Depth::dilation * tap;
      if (reach % Depth::stride) continue;
      if (!found || reach / Depth::stride < least) least = reach / Depth::stride;
      found = true;
    }
    if (residue == 0 || least < lower) lower = least;
  }
  return lower;
}
constexpr int kLowerPlane = lower_plane();

// A block's tile: positions from `row` on and output channels from `column` on, of one residue.
struct Tile {
  int row, column, plane_residue, row_residue, column_residue;

  __device__ __forceinline__ Axis depth() const {
    return {Depth::kernel,  Depth::stride, Depth::dilation,
            Depth::padding, kLowerPlane,   plane_residue};
  }
  __device__ __forceinline__ Axis height() const {
    return {C::kernel_height, C::stride_height, C::dilation_height,
            C::padding_top,   C::lower_height,  row_residue};
  }
  __device__ __forceinline__ Axis width() const {
    return {C::kernel_width, C::stride_width, C::dilation_width,
            C::padding_left, C::lower_width,  column_residue};
  }
  __device__ __forceinline__ int steps() const {
    return depth().taps() * height().taps() * width().taps() * kChunks;
  }
};

// The order of tiles. Residues with more taps come first, so that the last tiles are short. Tiles
// of the same positions follow each other, because they read the same input.
struct Walk {
  int positions, row_tiles, tiles;

  __device__ __forceinline__ explicit Walk(int batch)
      : positions(batch * kPositions),
        row_tiles(ceil_div(positions, kTileRows)),
        tiles(kResidues * row_tiles * kColumnTiles) {}

  __device__ __forceinline__ Tile tile(int number) const {
    const int column = number % kColumnTiles, row = number / kColumnTiles % row_tiles;
    const int turn = number / kColumnTiles / row_tiles;
    const int residue = C::last_residue_first ? kResidues - 1 - turn : turn;
    const int rows = residue / kColumnResidues, columns = residue % kColumnResidues;
    const int planes = kPlaneResidues > 1 ? rows / kRowResidues : 0;
    return {row * kTileRows, column * kTileColumns, planes, rows - planes * kRowResidues, columns};
  }
};

}  // namespace hopper
}  // namespace fastconv
