// Weight gradient on tensor cores (mma.sync), from sm_80 on.
//
// grad[m, i, tap] = sum over images and output pixels of
// grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// A warp multiplies output channels (M) by input channels of some taps (N), and accumulates over
// pixels (K). Each lane computes where its part of an operand lies in shared memory, so taps,
// strides and dilations are just addresses:
//
//   16-bit types   matrices of 8 pixels by 8 channels, 16 bytes of each pixel, are transposed as
//                  they are loaded (ldmatrix.trans); pixels may lie anywhere.
//   float32        lanes load single elements. The threads that copied them to shared memory have
//                  rounded or split them there; with 3xTF32, the input is split here instead.
//
// The output's gradient has the same layout in shared memory as in global memory, with pixels or
// channels as neighbours. So has the input, except contiguous 16-bit tensors, which are transposed
// on their way.
//
// A block computes a weight tile: some output channels, some octets of input channels, some taps.
// It walks down the image in steps, each of some output rows of a strip of columns, and loads the
// next step while it multiplies one. Steps share input rows (with a dilation, a walk takes every
// dilation-th output row): with `rolling`, rows are in a ring, and each is loaded once for a walk.
//
// The tensor core truncates as it accumulates, so errors grow with the length of a chain of MMAs.
// After every flush_steps steps, accumulators are added to the block's own slots of a workspace.
// With 3xTF32 (`parts` = 2) they are first added to a second level in registers, after every slice
// of a few MMAs. A second kernel reduces the slots of all blocks in a fixed order (split-K), so
// that the bits are the same every time.
//
// With `bias`, the blocks of the first weights also add up the output's gradient, as it is in
// shared memory before it is rounded.
#pragma once
#include "ampere/wgrad_halo/reduce.cuh"

namespace fastconv {
namespace ampere {

// A thread's accumulators since the last flush.
struct State {
  RegisterTile acc;
  float bias = 0.0f;
  float bias_total = 0.0f;
  int steps = 0;
  bool flushed = false;

  __device__ State() { clear(acc); }

  __device__ __forceinline__ void flush_to(float4* slots) {
    flush<kThreads>(acc, slots, !flushed);
    clear(acc);
    flushed = true;
    steps = 0;
    bias_total += bias;
    bias = 0.0f;
  }
};

// Multiplies a slice; with 3xTF32 in accumulators of its own, which are then added to the state's.
__device__ __forceinline__ void multiply_slice(State& state, const Multiplier& multiplier,
                                               const StepPlace& step, int slice) {
  if constexpr (C::parts == 1) {
    multiplier.multiply_slice(state.acc, step, slice);
  } else {
    RegisterTile slice_acc;
    clear(slice_acc);
    multiplier.multiply_slice(slice_acc, step, slice);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.acc[i][j] += slice_acc[i][j];
    }
  }
}

// Converts a step that has been copied, its lines from `first_line` on; the next barrier makes it
// visible to all threads. The bias's gradient is added up before, from numbers that other threads
// have copied, hence the barriers.
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
                                            float4* workspace, const LaunchRange& range) {
  const int thread = static_cast<int>(threadIdx.x);
  const int worker = static_cast<int>(blockIdx.x) / range.tiles;
  const WeightTile tile = range.tile();
  const bool has_bias = C::bias && tile.has_bias();
  fill_unit_table();
  Loader loader(grad_output, input, tile);
  const Multiplier multiplier(tile, thread / 32, thread % 32);
  float4* const slots =
      workspace + static_cast<long long>(blockIdx.x) * (kSlots * kThreads) + thread;
  const long long first = range.first_step(worker);
  const int steps = static_cast<int>(range.first_step(worker + 1) - first);
  // The slice after which a warp converts the next step: half of the warps convert while the others
  // multiply.
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
    // The step has arrived, and no thread reads the one before any longer.
    __syncthreads();
    at.advance();
    const bool more = i + 1 < steps;
    // The ring has room for this walk's next lines, not for those of a new walk.
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
        workspace)[bias_slots(range.tiles * range.workers, blockIdx.x) + thread] = state.bias_total;
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
