// One lane's work: tensor copies of both operands into a ring of stages.
#pragma once
#include "hopper/gemm_weights/tile.cuh"

namespace fastconv {
namespace hopper {

struct Maps {
  const TensorMap& grad_output;
  const TensorMap& input;
};

// Channels-last: 128 bytes of channels of kDepth positions, one box after the other. Channels and
// positions beyond the last are zeros.
__device__ __forceinline__ void load_pixels(const Shared& shared, const Maps& maps, int stage,
                                            const Tile& tile, int step) {
  const int flat = step * kDepth;
#pragma unroll
  for (int i = 0; i < C::row_groups; ++i) {
    tensor_load(shared.rows(stage) + i * kBoxBytes, maps.grad_output, {tile.row + i * 64, flat},
                shared.full(stage));
  }
  const int image = flat / kPositions, in_image = flat - image * kPositions;
  const int row = in_image / C::out_width, column = in_image - row * C::out_width;
#pragma unroll
  for (int i = 0; i < kTileColumns / kSpanElements; ++i) {
    unsigned char* const target = shared.columns(stage) + i * kBoxBytes;
    const int first = tile.column + i * kSpanElements;
    // Beyond the last tap, no channel exists.
    const int tap = first / kTapColumns < kTaps ? first / kTapColumns : 0;
    const int channel = first - tap * kTapColumns;
    if constexpr (C::flat) {
      tensor_load(target, maps.input, {channel, flat}, shared.full(stage));
    } else {
      im2col_load(
          target, maps.input,
          {channel, column * C::stride_width - C::padding_left,
           row * C::stride_height - C::padding_top, image},
          {tap % C::kernel_width * C::dilation_width, tap / C::kernel_width * C::dilation_height},
          shared.full(stage));
    }
  }
}

// Planes: 128 bytes of an image of each channel.
__device__ __forceinline__ void load_planes(const Shared& shared, const Maps& maps, int stage,
                                            const Tile& tile, int step) {
  const int image = step / kImageSteps, position = (step - image * kImageSteps) * kDepth;
  tensor_load(shared.rows(stage), maps.grad_output, {position, tile.row, image},
              shared.full(stage));
#pragma unroll
  for (int i = 0; i < C::column_groups; ++i) {
    tensor_load(shared.columns(stage) + i * C::product_columns * kSpan, maps.input,
                {position, tile.column + i * C::product_columns, image}, shared.full(stage));
  }
}

__device__ __forceinline__ void load_steps(const Shared& shared, const Maps& maps,
                                           const Share& share) {
  Ring ring(1);
  for_runs(share, static_cast<int>(blockIdx.x), [&](const Run& run, int) {
    const Tile tile(run.tile);
    for (int step = run.first; step < run.end; ++step, ring.advance()) {
      barrier_wait(shared.empty(ring.stage), ring.parity);
      barrier_arrive_expect(shared.full(ring.stage), kStageBytes);
      if constexpr (kPixels) {
        load_pixels(shared, maps, ring.stage, tile, step);
      } else {
        load_planes(shared, maps, ring.stage, tile, step);
      }
    }
  });
}

}  // namespace hopper
}  // namespace fastconv
