// What a block of gemm_pixels has: its place among tiles, its stages in shared memory.
#pragma once
#include "device/tile.cuh"
#include "device/wgmma.cuh"
#include "device/tensor/operand.cuh"
#include "device/tensor/ring.cuh"

namespace fastconv {
namespace hopper {

using tensor::C;
using tensor::Operand;
using Ring = tensor::Ring<C::stages>;
using tensor::Scalar;

// Rows of the product are positions, of all images one after the other: output pixels, or of a
// gradient with a stride, the base of stride by stride pixels, of which each phase computes one.
constexpr int kPositions = C::position_rows * C::position_columns;  // of an image
constexpr int kConsumers = C::consumers;                            // warpgroups, each with 64 rows
constexpr int kTileRows = 64 * kConsumers;
constexpr int kTileColumns = C::tile_columns;
constexpr int kColumnTiles = ceil_div(C::out_channels, kTileColumns);
static_assert(kTileColumns % 16 == 0 && (kTileColumns % 64 == 0 || kColumnTiles == 1),
              "a tile that is not made of boxes ends beyond the last channel");
constexpr int kThreads = 128 * kConsumers + 32;
constexpr int kConsumerWarps = 4 * kConsumers;

// A step of the sum: 128 bytes of channels at one tap.
constexpr int kDepth = 64;
constexpr int kSpan = 128;  // bytes
constexpr int kChunks = ceil_div(C::in_channels, kDepth);
constexpr int kProductDepth = 16;
constexpr int kLastProducts = ceil_div(C::in_channels - (kChunks - 1) * kDepth, kProductDepth);

constexpr int kRowBytes = kTileRows * kSpan;
// Columns that one copy has: of weights that are read across, and of what is stored.
constexpr int kBoxColumns = 64;
constexpr int kBoxes = ceil_div(kTileColumns, kBoxColumns);
constexpr int kWeightBytes = (C::transposed ? kBoxes * kBoxColumns : kTileColumns) * kSpan;
constexpr int kStageBytes = kRowBytes + (C::resident ? 0 : kWeightBytes);
constexpr int kStagedBytes = 16 * C::joined * kBoxColumns * 2;  // of 16 rows, a warp's

// Weights of all steps may stay, where all tiles have the same.
constexpr int kSteps = C::kernel_height * C::kernel_width * kChunks;
constexpr int kResidentBytes = C::resident ? kSteps * kWeightBytes : 0;

// Shared memory: weights that stay, stages, sums on their way out, barriers.
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

// Along an axis, the taps that a phase has: all of them, or of a gradient with a stride every
// so many-th. `offset` is how far from its position a tap reads.
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

constexpr int kRowPhases = C::transposed ? C::stride_height : 1;
constexpr int kColumnPhases = C::transposed ? C::stride_width : 1;
constexpr int kPhases = kRowPhases * kColumnPhases;
static_assert(!C::resident || kPhases * kColumnTiles == 1, "tiles have different weights");

// A block's tile: positions from `row` on, output channels from `column` on, of one phase.
struct Tile {
  int row, column, row_residue, column_residue;

  __device__ __forceinline__ Axis height() const {
    return {C::kernel_height, C::stride_height, C::dilation_height,
            C::padding_top,   C::lower_height,  row_residue};
  }
  __device__ __forceinline__ Axis width() const {
    return {C::kernel_width, C::stride_width, C::dilation_width,
            C::padding_left, C::lower_width,  column_residue};
  }
  __device__ __forceinline__ int steps() const {
    return height().taps() * width().taps() * kChunks;
  }
};

// The tiles of a block, in order. Phases with more taps come first, so that what is left at the end
// is short; then tiles of the same rows, which read the same input.
struct Walk {
  int positions, row_tiles, tiles;

  __device__ __forceinline__ explicit Walk(int batch)
      : positions(batch * kPositions),
        row_tiles(ceil_div(positions, kTileRows)),
        tiles(kPhases * row_tiles * kColumnTiles) {}

  __device__ __forceinline__ Tile tile(int number) const {
    const int column = number % kColumnTiles, row = number / kColumnTiles % row_tiles;
    const int turn = number / kColumnTiles / row_tiles;
    const int phase = C::last_phase_first ? kPhases - 1 - turn : turn;
    return {row * kTileRows, column * kTileColumns, phase / kColumnPhases, phase % kColumnPhases};
  }
};

}  // namespace hopper
}  // namespace fastconv
