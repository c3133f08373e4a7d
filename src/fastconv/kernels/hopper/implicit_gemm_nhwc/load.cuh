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
  int flat, column, row, plane, image;

  __device__ __forceinline__ explicit Position(int flat) : flat(flat) {
    image = flat / kPositions;
    const int in_image = flat - image * kPositions;
    plane = Depth::exists ? in_image / kPlanePositions : 0;
    const int in_plane = in_image - plane * kPlanePositions;
    row = in_plane / C::position_columns;
    column = in_plane - row * C::position_columns;
  }
};

// A tap of the kernel, or how far from a position it reads.
struct Tap {
  int column, row, plane;
};

// Loads kDepth channels of what all positions of a tile read at the tap with these offsets. TMA
// writes zeros for pixels outside the image and beyond the last image, and rounds float32 to TF32.
__device__ __forceinline__ void load_rows(const Shared& shared, const Maps& maps, int stage,
                                          int channel, const Position& at, const Tap& offset) {
  const int column = at.column * C::input_step_width + C::lower_width;
  const int row = at.row * C::input_step_height + C::lower_height;
  if constexpr (C::flat) {
    tensor_load(shared.rows(stage), maps.input, {channel, at.flat}, shared.full(stage));
  } else if constexpr (Depth::exists) {
    constexpr int kStep = C::transposed ? 1 : Depth::stride;
    im2col_load(shared.rows(stage), maps.input,
                {channel, column, row, at.plane * kStep + kLowerPlane, at.image},
                {offset.column, offset.row, offset.plane}, shared.full(stage));
  } else {
    im2col_load(shared.rows(stage), maps.input, {channel, column, row, at.image},
                {offset.column, offset.row}, shared.full(stage));
  }
}

// Loads a box of weights from this place of their tensor map.
__device__ __forceinline__ void load_weight_box(unsigned char* target, const TensorMap& map,
                                                int inner, const Tap& tap, int outer,
                                                Barrier* full) {
  if constexpr (Depth::exists) {
    tensor_load(target, map, {inner, tap.column, tap.row, tap.plane, outer}, full);
  } else {
    tensor_load(target, map, {inner, tap.column, tap.row, outer}, full);
  }
}

// Loads the weights of the tile's output channels for kDepth channels of K. Neighbours in memory
// are neighbours along K, or with kNMajor along N, kBoxColumns to a TMA box (wgmma's
// kRightMnMajor).
__device__ __forceinline__ void load_weights(unsigned char* target, const TensorMap& map,
                                             int channel, const Tap& tap, int column,
                                             Barrier* full) {
  if constexpr (kNMajor) {
#pragma unroll
    for (int i = 0; i < kTileColumns; i += kBoxColumns) {
      load_weight_box(target + i * kSpan, map, column + i, tap, channel, full);
    }
  } else {
    load_weight_box(target, map, channel, tap, column, full);
  }
}

__device__ __forceinline__ void load_resident(const Shared& shared, const TensorMap& map) {
  barrier_arrive_expect(shared.resident(), kResidentBytes);
  for (int step = 0; step < kSteps; ++step) {
    const int tap = step / kChunks, row = tap / C::kernel_width;
    const int plane = Depth::exists ? row / C::kernel_height : 0;
    load_weights(shared.weights(0, step), map, step % kChunks * kDepth,
                 {tap % C::kernel_width, row - plane * C::kernel_height, plane}, 0,
                 shared.resident());
  }
}

// Loads the stages of a tap: its input and weights, kDepth channels after the other.
__device__ __forceinline__ void load_tap(const Shared& shared, const Maps& maps, Ring& ring,
                                         const Position& at, const Tap& tap, const Tap& offset,
                                         int column) {
  for (int chunk = 0; chunk < kChunks; ++chunk, ring.advance()) {
    const int stage = ring.stage, channel = chunk * kDepth;
    barrier_wait(shared.empty(stage), ring.parity);
    barrier_arrive_expect(shared.full(stage), kStageBytes);
    load_rows(shared, maps, stage, channel, at, offset);
    if constexpr (!C::resident) {
      load_weights(shared.weights(stage, 0), maps.weight, channel, tap, column, shared.full(stage));
    }
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
    const Axis depth = tile.depth(), height = tile.height(), width = tile.width();
    for (int plane = 0; plane < Depth::kernel; ++plane) {
      if (!depth.has(plane)) continue;
      for (int row = 0; row < C::kernel_height; ++row) {
        if (!height.has(row)) continue;
        for (int column = 0; column < C::kernel_width; ++column) {
          if (!width.has(column)) continue;
          const Tap offset{width.offset(column), height.offset(row), depth.offset(plane)};
          load_tap(shared, maps, ring, at, {column, row, plane}, offset, tile.column);
        }
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
