// Weight gradient on Hopper's tensor cores.
//
// grad[m, i, tap] = sum over images and output pixels of
// grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// A warpgroup multiplies 64 output channels (rows of wgmma) by input channels and taps (columns),
// and sums over pixels. wgmma wants 16 bytes of the sum's index side by side. Were they
// neighbouring pixels, every tap would need the input shifted by another number of bytes. So they
// are the same pixel of 4 images, or of 4 strips of rows of one image (8 for 16-bit types): the
// phases.
//
//   input       [kernel row][plane][column][octet][8 channels][phases]       in shared memory
//   grad_output [64 channels][phases][columns]                               there as it is, or
//               [phases][column][64 channels]                                if it is channels-last
//
// One tap of 8 channels in one column is 128 bytes, a core matrix, and a tap is nothing but another
// start address. A product takes two neighbouring columns of all phases, for product_taps taps of
// one kernel row and product_octets octets of channels. The output's gradient goes through
// registers, where it is rounded or split.
//
// A block walks down the image, in steps: one output row of every phase, over a strip of columns.
// Steps that follow each other share input rows (dilated rows: a walk takes every dilation-th
// output row), so input rows are in a ring, and each is loaded once for a walk.
//
// A segment is a kernel row of a plane of channels: one product wide. A warpgroup has the sums of
// `segments` of them. The block's two warpgroups either have different segments, or, with
// channel_groups = 2, the same of different output channels.
//
// One block per processor and three warpgroups, that work at the same time:
//   producers  warps 0 and 1 copy grad_output to a ring of stages of a few columns, by bulk copies
//              of a row's columns; warps 2 and 3 load input rows to registers, transpose and round
//              or split them, and write them to theirs. Padding is part of the copy. Where tensor
//              copies can describe a stage (`grad_boxes`), warp 0 issues one for each, and three
//              warps load input.
//   consumers  two warpgroups multiply.
//
// The tensor core truncates as it accumulates, so that errors grow with the length of its sums.
// After every flush_steps steps sums are added to the block's own slots of a workspace. float32
// with `parts` = 2 (x = high + low, both with TF32's mantissa, and three products): they are added
// to totals in registers first, after every few columns. A second kernel adds the slots of all
// blocks in a fixed order: the same bits every time.
//
// Where float16 has the range, float32 is multiplied as such (`halves`), and filters for which it
// has not are computed once more by a kernel without (`repairs`): see scale.cuh.
//
// With `bias`, consumers also add up what they load of grad_output, as it is before it is rounded:
// the gradient of the bias. All of them do, since they have no time for conditions; the second
// kernel takes the sums of one of those that see the same channels.
#pragma once
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/load.cuh"
#include "hopper/wgrad_halo/multiply.cuh"
#include "hopper/wgrad_halo/reduce.cuh"
#include "hopper/wgrad_halo/scale.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ void weight_grad(const Grad& grad_output, const Scalar* input,
                                            const Tables& tables, const Work& work) {
  if constexpr (C::repairs) {
    if (!is_marked(tables, work.tile())) return;
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
      load_grad(grad_output, work);
    } else {
      load_input(input, tables, work);
    }
  } else {
    take_registers<C::consumer_registers>();
    consume(grad_output, tables, work);
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
  if constexpr (Config::halves) {
    fastconv::hopper::find_powers(grad_output, input, {scratch}, batch);
  }
}
