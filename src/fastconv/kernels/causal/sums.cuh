// The gradients of taps and biases: sums of a thread, and how a block adds them up, in a fixed
// order.
#pragma once
#include "causal/tile.cuh"

namespace fastconv {
namespace causal {

constexpr int kRound = min_of(kWidth + 1, 8);  // sums of a thread in shared memory at once

// A thread's sums: the gradients of its channels' taps, and of their biases.
struct Sums {
  Taps taps;
  Acc biases[kGroup];

  __device__ __forceinline__ Acc& of(int g, int number) {
    return number < kWidth ? taps[g][number < kWidth ? number : 0] : biases[g];
  }
};

// Contiguous: all threads have the same channel. Warps add up by shuffles.
__device__ __forceinline__ void store_channel(Sums& sums, Acc* shared, Acc* partials, int dim) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j <= kWidth; ++j) {
    Acc sum = sums.of(0, j);
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) sum += __shfl_xor_sync(~0u, sum, flip);
    if (thread % 32 == 0) shared[thread / 32 * (kWidth + 1) + j] = sum;
  }
  __syncthreads();
  for (int j = thread; j <= kWidth; j += kThreads) {
    Acc sum = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += shared[warp * (kWidth + 1) + j];
    partials[1ll * j * dim] = sum;
  }
}

// Channels-last: segments add up through shared memory, [sum][segment][channel].
__device__ __forceinline__ void store_channels(Sums& sums, Acc* shared, Acc* partials, int dim,
                                               const Place& at, const Part& part) {
#pragma unroll
  for (int base = 0; base <= kWidth; base += kRound) {
#pragma unroll
    for (int j = 0; j < kRound; ++j) {
      if (base + j > kWidth) break;
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        shared[(j * kSegments + part.segment) * kChannels + part.channel + g] =
            sums.of(g, base + j);
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kRound * kChannels; i += kThreads) {
      const int j = i / kChannels, channel = i % kChannels;
      if (base + j > kWidth || channel >= at.channels) continue;
      Acc sum = 0;
      for (int segment = 0; segment < kSegments; ++segment) {
        sum += shared[(j * kSegments + segment) * kChannels + channel];
      }
      partials[1ll * (base + j) * dim + channel] = sum;
    }
    __syncthreads();
  }
}

}  // namespace causal
}  // namespace fastconv
