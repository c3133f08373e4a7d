// Sums of weight gradients on their way out: each thread has slots of its own in a workspace, four
// sums each and a warpgroup's side by side, which a second kernel adds up in a fixed order.
#pragma once
#include "include/sm90.cuh"

namespace fastconv {
namespace hopper {

template <int kRows, int kSums>
__device__ __forceinline__ void hold_sums(float (&sums)[kRows][kSums]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) hold_registers(sums[i]);
}

template <int kRows, int kSums>
__device__ __forceinline__ void clear(float (&sums)[kRows][kSums]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[i][j] = 0.0f;
  }
}

// Adds a thread's sums to its slots of the workspace, or sets those.
template <bool kSet, int kRows, int kSums>
__device__ __forceinline__ void flush(const float (&sums)[kRows][kSums], float4* slots) {
#pragma unroll
  for (int i = 0; i < kRows * kSums / 4; ++i) {
    const float* const four = &sums[i * 4 / kSums][i * 4 % kSums];
    const float4 values = make_float4(four[0], four[1], four[2], four[3]);
    if constexpr (kSet) {
      slots[i * 128] = values;
    } else {
      add_to_memory(slots + i * 128, values);
    }
  }
}
template <int kRows, int kSums>
__device__ __forceinline__ void flush(float (&sums)[kRows][kSums], float4* slots, bool set) {
  hold_sums(sums);
  if (set) {
    flush<true>(sums, slots);
  } else {
    flush<false>(sums, slots);
  }
}

// Of four neighbouring lanes, which have pixels of the same channels.
__device__ __forceinline__ float sum_of_four_lanes(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  value += __shfl_xor_sync(~0u, value, 2);
  return value;
}

// Adds up a slot of all workers, in order; `distance` slots lie between one's and the next's.
__device__ __forceinline__ float4 total_of(const float4* first, long long distance, int workers) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int worker = 0; worker < workers; ++worker) {
    const float4 partial = first[worker * distance];
    total.x += partial.x;
    total.y += partial.y;
    total.z += partial.z;
    total.w += partial.w;
  }
  return total;
}

}  // namespace hopper
}  // namespace fastconv
