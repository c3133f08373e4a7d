// Decoding steps of a causal depthwise convolution, whose state is written in place.
//
// A thread has one channel of one sequence. It reads the last width - 1 inputs from the state,
// keeps them in registers, and walks over the new inputs. The state is shifted, or is a circular
// buffer.
#pragma once
#include "causal/config.cuh"

namespace fastconv {
namespace causal {

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ double silu(double x) { return x / (1.0 + exp(-x)); }

// A channel's elements along one axis.
struct Line {
  Scalar* from;
  long long stride;

  __device__ __forceinline__ Scalar& operator[](int i) const { return from[i * stride]; }
};

// The output of the newest input; the window then has room for the next one.
__device__ __forceinline__ Scalar step(Acc (&window)[kWidth], const Acc (&taps)[kWidth], Acc bias) {
  Acc sum = bias;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sum = fma(taps[j], window[j], sum);
#pragma unroll
  for (int j = 0; j < kStates; ++j) window[j] = window[j + 1];
  return narrow<Scalar>(C::silu ? silu(sum) : sum);
}

// Shifts the state by `steps` new inputs.
__device__ __forceinline__ void shift(const Line& state, const Line& x, int states, int steps) {
  for (int i = 0; i < states; ++i) {
    const int from = i + steps;
    state[i] = from < states ? state[from] : x[from - states];
  }
}

}  // namespace causal
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::causal::kThreads)
    causal_update(Config::Scalar* x, Config::Scalar* conv_state,
                  const Config::WeightScalar* __restrict__ weight,
                  const Config::WeightScalar* __restrict__ bias,
                  const int* __restrict__ cache_seqlens, const int* __restrict__ conv_state_indices,
                  Config::Scalar* y, int dim, int steps, int states, int x_batch_low,
                  int x_batch_high, int x_channel_low, int x_channel_high, int x_step_low,
                  int x_step_high, int state_batch_low, int state_batch_high, int state_channel_low,
                  int state_channel_high, int state_step_low, int state_step_high) {
  using namespace fastconv::causal;
  const int blocks = fastconv::ceil_div(dim, kThreads);
  const int number = static_cast<int>(blockIdx.x);
  const int batch = number / blocks;
  const int channel = number % blocks * kThreads + static_cast<int>(threadIdx.x);
  if (channel >= dim) return;
  Scalar* const out = y + (1ll * batch * dim + channel) * steps;
  const int entry = conv_state_indices == nullptr ? batch : conv_state_indices[batch];
  if (entry < 0) {  // padding: the output is zero, and there is no state
    for (int t = 0; t < steps; ++t) out[t] = Scalar{};
    return;
  }
  const Line in = {
      x + batch * wide(x_batch_low, x_batch_high) + channel * wide(x_channel_low, x_channel_high),
      wide(x_step_low, x_step_high)};
  const Line state = {conv_state + entry * wide(state_batch_low, state_batch_high) +
                          channel * wide(state_channel_low, state_channel_high),
                      wide(state_step_low, state_step_high)};
  Acc taps[kWidth], window[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) taps[j] = fastconv::widen(weight[1ll * channel * kWidth + j]);
  const Acc first = bias == nullptr ? Acc(0) : fastconv::widen(bias[channel]);

  int place = states - kStates;  // where the oldest input of the window is
  if constexpr (C::circular) {
    place = (cache_seqlens[batch] % states - kStates) % states;
    if (place < 0) place += states;
  }
#pragma unroll
  for (int j = 0; j < kStates; ++j) {
    window[j] = fastconv::widen(state[place]);
    place = C::circular && place + 1 == states ? 0 : place + 1;
  }
  for (int t = 0; t < steps; ++t) {
    const Scalar newest = in[t];
    window[kStates] = fastconv::widen(newest);
    out[t] = step(window, taps, first);
    if constexpr (C::circular) {
      state[place] = newest;
      place = place + 1 == states ? 0 : place + 1;
    }
  }
  if constexpr (!C::circular) shift(state, in, states, steps);
}
