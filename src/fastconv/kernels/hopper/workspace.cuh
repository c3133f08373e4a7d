// What wgmma's sums need on their way to the workspace.
#pragma once
#include "device/sm90.cuh"
#include "device/tensor/workspace.cuh"

namespace fastconv {
namespace hopper {

template <int kRows, int kSums>
__device__ __forceinline__ void hold_sums(float (&sums)[kRows][kSums]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) hold_registers(sums[i]);
}

// Adds a thread's sums to its slots, or sets those; a warpgroup's lie side by side.
template <int kRows, int kSums>
__device__ __forceinline__ void flush(float (&sums)[kRows][kSums], float4* slots, bool set) {
  hold_sums(sums);
  tensor::flush<128>(sums, slots, set);
}

}  // namespace hopper
}  // namespace fastconv
