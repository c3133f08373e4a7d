// The producer: one thread issues TMA copies of input positions and weights into a ring of stages.
#pragma once
#include "hopper/implicit_gemm_nhwc/tile.cuh"

namespace fastconv {
namespace hopper {

struct Maps {
  const TensorMap& input;
  const TensorMap& weight;
};

// The first position of a tile.
struct Position {
  int flat, column, row, image;

  __device__ __forceinline__ explicit Position(int flat) : flat(flat) {
    image = flat / kPositions;
    const int in_image = flat - image * kPositions;
    row = in_image / C::position_columns;
    column = in_image - row * C::position_columns;
  }
};

// Loads kDepth channels of what all positions of a tile read at the tap with these offsets. TMA
// writes zeros for pixels outside the image and beyond the last image, and rounds float32 to TF32.
__device__ __forceinline__ void load_rows(const Shared& shared, const Maps& maps, int stage,
                                          int channel, const Position& at, int column_offset,
                                          int row_offset) {
  if constexpr (C::flat) {
    tensor_load(shared.rows(stage), maps.input, {channel, at.flat}, shared.full(stage));
  } else {
    im2col_load(shared.rows(stage), maps.input,
                {channel, at.column * C::input_step_width + C::lower_width,
                 at.row * C::input_step_height + C::lower_height, at.image},
                {column_offset, row_offset}, shared.full(stage));
  }
}

// Loads the weights of the tile's output channels for kDepth channels of K. Neighbours in memory
// are neighbours along K, or with kNMajor along N, kBoxColumns to a TMA box (wgmma's
// kRightMnMajor).
__device__ __forceinline__ void load_weights(unsigned char* target, const TensorMap& map,
                                             int channel, int tap_column, int tap_row, int column,
                                             Barrier* full) {
  if constexpr (kNMajor) {
#pragma unroll
    for (int i = 0; i < kTileColumns; i += kBoxColumns) {
      tensor_load(target + i * kSpan, map, {column + i, tap_column, tap_row, channel}, full);
    }
  } else {
    tensor_load(target, map, {channel, tap_column, tap_row, column}, full);
  }
}

__device__ __forceinline__ void load_resident(const Shared& shared, const TensorMap& map) {
  barrier_arrive_expect(shared.resident(), kResidentBytes);
  for (int step = 0; step < kSteps; ++step) {
    const int tap = step / kChunks;
    load_weights(shared.weights(0, step), map, step % kChunks * kDepth, tap % C::kernel_width,
                 tap / C::kernel_width, 0, shared.resident());
  }
}

__device__ __forceinline__ void load_tiles(const Shared& shared, const Maps& maps,
                                           const Walk& walk) {
  Ring ring(1);
  if constexpr (C::resident) load_resident(shared, maps.weight);
  for (int number = static_cast<int>(blockIdx.x); number < walk.tiles;
       number += static_cast<int>(gridDim.x)) {
    const Tile tile = walk.tile(number);
    const Position at(tile.row);
    const Axis height = tile.height(), width = tile.width();
    for (int tap_row = 0; tap_row < C::kernel_height; ++tap_row) {
      if (!height.has(tap_row)) continue;
      for (int tap_column = 0; tap_column < C::kernel_width; ++tap_column) {
        if (!width.has(tap_column)) continue;
        const int row_offset = height.offset(tap_row), column_offset = width.offset(tap_column);
        for (int chunk = 0; chunk < kChunks; ++chunk, ring.advance()) {
          const int stage = ring.stage, channel = chunk * kDepth;
          barrier_wait(shared.empty(stage), ring.parity);
          barrier_arrive_expect(shared.full(stage), kStageBytes);
          load_rows(shared, maps, stage, channel, at, column_offset, row_offset);
          if constexpr (!C::resident) {
            load_weights(shared.weights(stage, 0), maps.weight, channel, tap_column, tap_row,
                         tile.column, shared.full(stage));
          }
        }
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
