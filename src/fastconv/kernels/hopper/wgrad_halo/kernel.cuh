// Weight gradient with halo tiles on Hopper's tensor cores.
//
// grad[m, i, tap] = sum over images and output pixels of
//   grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// M is 64 output channels for each warpgroup, N is input channels and taps, and K is pixels. wgmma
// reads 16 contiguous bytes along K. If these were neighbouring pixels, every tap would need the
// input shifted by a different number of bytes. So a K vector interleaves the same pixel of 4
// images, or of 4 strips of rows of one image (8 for 16-bit types). These images or strips are its
// members. In shared memory lie
//
//   input       [kernel row][plane][column][octet][8 channels][members]
//   grad_output [64 channels][members][columns]      copied as it is, or
//               [members][column][64 channels]       if it is channels-last
//
// 8 channels of one column are 128 bytes, a core matrix, and another tap is merely another start
// address. One wgmma takes two neighbouring columns of all members, for mma_taps taps of one kernel
// row and mma_octets octets of channels. grad_output goes through registers, where it is rounded or
// split.
//
// A block walks down the image in steps: one output row of every member, over a strip of columns.
// Consecutive steps share input rows (with dilation, a walk takes every dilation-th output row), so
// input rows are in a ring, and each is loaded once for a walk.
//
// A segment is a kernel row of a plane of channels: the N of one wgmma. A warpgroup accumulates
// `segments` of them. The block's two consumer warpgroups have different segments, or, with
// channel_groups = 2, the same segments of different output channels.
//
// There is one block for each SM, with three warpgroups that work at the same time:
//   producers  Warps 0 and 1 copy grad_output to a ring of stages of a few columns, by bulk copies
//              of a row's columns. Warps 2 and 3 load input rows to registers, transpose, round or
//              split them, and write them to their ring. Padding is part of the copy. Where a TMA
//              box can describe a stage (`grad_boxes`), warp 0 issues one for each stage, and three
//              warps load input, or two if boxes must be cleared beyond a row's ends.
//   consumers  Two warpgroups multiply.
//
// The tensor core truncates as it accumulates, so errors grow with the number of MMAs. After every
// flush_steps steps, accumulators are added to the block's own slots of a workspace. With 3xTF32
// (`parts` = 2), they are first added to totals in registers, after every few columns. A second
// kernel reduces the slots of all blocks in a fixed order, so results are the same bits every time.
//
// Where numbers are in float16's range, float32 is multiplied as scaled fp16 (`scaled_fp16`), and
// filters for which they are not are computed again in TF32 (`repairs`): see scale.cuh.
//
// With `bias`, consumers also add up what they load of grad_output, before it is rounded: the
// gradient of the bias. All of them do, since a condition would cost them time; the second kernel
// takes the result of one of the consumers that load the same channels.
#pragma once
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/load.cuh"
#include "hopper/wgrad_halo/multiply.cuh"
#include "hopper/wgrad_halo/reduce.cuh"
#include "hopper/wgrad_halo/scale.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ void weight_grad(const Grad& grad_output, const Scalar* input,
                                            const Tables& tables, const Partition& partition) {
  if constexpr (C::repairs) {
    if (!is_marked(tables, partition.tile())) return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::input_stages; ++i) {
      barrier_init(&barriers().input_full[i], kInputWarps);
      barrier_init(&barriers().input_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::grad_stages; ++i) {
      barrier_init(&barriers().grad_full[i], kGradArrivals);
      barrier_init(&barriers().grad_empty[i], kConsumerWarps);
      barrier_init(&barriers().box_full[i], 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    give_back_registers<C::producer_registers>();
    if (warp < kGradWarps) {
      load_grad(grad_output, partition);
    } else {
      load_input(input, tables, partition);
    }
  } else {
    take_registers<C::consumer_registers>();
    consume(grad_output, tables, partition);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(384, 1)
    weight_grad(const __grid_constant__ fastconv::hopper::Grad grad_output,
                const Config::Scalar* input, float4* scratch, int first_tile, int tiles,
                int workers, int batch) {
  fastconv::hopper::weight_grad(grad_output, input, {scratch}, {first_tile, tiles, workers, batch});
}

extern "C" __global__ void __launch_bounds__(256)
    reduce(float4* scratch, Config::Scalar* grad, Config::Scalar* bias_grad, int first_tile,
           int tiles, int workers) {
  const fastconv::hopper::Tables tables{scratch};
  fastconv::hopper::reduce(tables, grad, first_tile, tiles, workers);
  if constexpr (Config::bias) {
    fastconv::hopper::reduce_bias(tables.workspace(), bias_grad, first_tile, tiles, workers);
  }
}

extern "C" __global__ void __launch_bounds__(1024)
    scale(const Config::Scalar* grad_output, const Config::Scalar* input, float4* scratch,
          int batch) {
  if constexpr (Config::scaled_fp16) {
    fastconv::hopper::find_powers(grad_output, input, {scratch}, batch);
  }
}
