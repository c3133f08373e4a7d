// Weight gradient on the tensor cores that all GPUs since Ampere have (mma.sync).
//
// grad[m, i, tap] = sum over images and output pixels of
// grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// A warp multiplies output channels (rows) by input channels of some taps (columns), and sums over
// pixels. Each lane says where it finds its part of a product in shared memory, so taps, strides
// and dilations are nothing but addresses:
//
//   16-bit types   matrices of 8 pixels by 8 channels, 16 bytes of each pixel, are transposed as
//                  they are loaded (ldmatrix); pixels may lie anywhere.
//   float32        lanes load single elements. These have been rounded, or split, in shared memory,
//                  by the threads that copied them there; of two parts, the input's are split here.
//
// The output's gradient lies in shared memory as it does in memory, pixels or channels being
// neighbours. The input does so, too, but for contiguous 16-bit tensors, which are transposed on
// their way there.
//
// A block's weights are a box: some output channels, some octets of input channels, some taps. It
// walks down the image in steps, of some output rows of a strip of columns. While a step is
// multiplied, the next one is loaded. Steps share input rows (dilated rows: a walk takes every
// dilation-th output row): with `rolling`, rows are in a ring, and each is loaded once for a walk.
//
// The tensor core truncates as it accumulates, so that errors grow with the length of its sums.
// After every flush_steps steps sums are added to the block's own slots of a workspace. float32
// with `parts` = 2 (x = high + low, both with TF32's mantissa, and three products): they are added
// to totals in registers first, after every slice of a few products. A second kernel adds the slots
// of all blocks in a fixed order: the same bits every time.
//
// With `bias`, the blocks of the first weights also add up the output's gradient, as it is in
// shared memory before it is rounded.
#pragma once
#include "ampere/wgrad_halo/reduce.cuh"

namespace fastconv {
namespace ampere {

// Sums since the last flush.
struct State {
  Sums totals;
  float bias = 0.0f;
  float bias_total = 0.0f;
  int steps = 0;
  bool flushed = false;

  __device__ State() { clear(totals); }

  __device__ __forceinline__ void flush_to(float4* slots) {
    flush<kThreads>(totals, slots, !flushed);
    clear(totals);
    flushed = true;
    steps = 0;
    bias_total += bias;
    bias = 0.0f;
  }
};

__device__ __forceinline__ void multiply_slice(State& state, const Multiplier& multiplier,
                                               const StepPlace& step, int slice) {
  if constexpr (C::parts == 1) {
    multiplier.multiply_slice(state.totals, step, slice);
  } else {
    Sums sums;
    clear(sums);
    multiplier.multiply_slice(sums, step, slice);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.totals[i][j] += sums[i][j];
    }
  }
}

// Makes a step ready that has been copied, of its lines from `first_line` on: the next barrier
// shows it to all. The bias's gradient is of numbers as they were, which other threads have copied.
__device__ __forceinline__ void finish(State& state, const Loader& loader, const StepPlace& step,
                                       int first_line, bool has_bias) {
  if (kConvertsGrad && has_bias) {
    copy_async_wait<0>();
    __syncthreads();
    state.bias += bias_of_step(step);
    __syncthreads();
  }
  loader.convert_copied(step, first_line);
}

__device__ __forceinline__ void weight_grad(const Scalar* grad_output, const Scalar* input,
                                            float4* workspace, const Work& work) {
  const int thread = static_cast<int>(threadIdx.x);
  const int worker = static_cast<int>(blockIdx.x) / work.tiles;
  const Tile tile = work.tile();
  const bool has_bias = C::bias && tile.has_bias();
  fill_unit_table();
  Loader loader(grad_output, input, tile);
  const Multiplier multiplier(tile, thread / 32, thread % 32);
  float4* const slots =
      workspace + static_cast<long long>(blockIdx.x) * (kSlots * kThreads) + thread;
  const long long first = work.first_step(worker);
  const int steps = static_cast<int>(work.first_step(worker + 1) - first);
  // After which slice a warp makes the next step ready: half of them do while others multiply.
  const int last =
      kWarpSlices == 1 || has_bias || thread >= kThreads / 2 ? kWarpSlices - 1 : kWarpSlices - 2;
  Cursor at(first);
  StepPlace step;
  State state;
  if (steps > 0) {
    loader.move_to(at);
    loader.load_all(step);
    finish(state, loader, step, 0, has_bias);
  }
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    // The step is there, and nobody reads what comes before it.
    __syncthreads();
    at.advance();
    const bool more = i + 1 < steps;
    // A new walk's lines are not the next ones of this walk, for which there is room.
    const bool ahead = more && (!C::rolling || at.step > 0);
    StepPlace next = step.next();
    if (ahead) {
      loader.move_to(at);
      loader.copy(next, kOldLines);
    }
#pragma unroll 1
    for (int slice = 0; slice < kWarpSlices; ++slice) {
      if (ahead) loader.load_slice(next, slice);
      multiply_slice(state, multiplier, step, slice);
      if (ahead) loader.store_slice(next, slice);
      if (ahead && slice == last) finish(state, loader, next, kOldLines, has_bias);
    }
    if (!kConvertsGrad && has_bias) state.bias += bias_of_step(step);
    if (++state.steps == C::flush_steps) state.flush_to(slots);
    if (C::rolling && more && !ahead) {
      __syncthreads();
      next.position = 0;
      loader.move_to(at);
      loader.load_all(next);
      finish(state, loader, next, 0, has_bias);
    }
    step = next;
  }
  if (state.steps > 0 || !state.flushed) state.flush_to(slots);
  if (has_bias) {
    reinterpret_cast<float*>(
        workspace)[bias_slots(work.tiles * work.workers, blockIdx.x) + thread] = state.bias_total;
  }
}

}  // namespace ampere
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::ampere::kThreads, 1)
    weight_grad(const Config::Scalar* grad_output, const Config::Scalar* input, float4* workspace,
                int first_tile, int tiles, int workers, int batch) {
  fastconv::ampere::weight_grad(grad_output, input, workspace, {first_tile, tiles, workers, batch});
}

extern "C" __global__ void __launch_bounds__(256)
    reduce(const float4* workspace, Config::Scalar* grad, Config::Scalar* bias_grad, int first_tile,
           int tiles, int workers) {
  fastconv::ampere::reduce(workspace, grad, first_tile, tiles, workers);
  if constexpr (Config::bias) {
    fastconv::ampere::reduce_bias(workspace, bias_grad, first_tile, tiles, workers);
  }
}
