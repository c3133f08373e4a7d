// Moves wgmma's accumulators to the workspace.
#pragma once
#include "device/sm90.cuh"
#include "device/tensor/workspace.cuh"

namespace fastconv {
namespace hopper {

template <int kRows, int kAccs>
__device__ __forceinline__ void hold_accumulators(float (&acc)[kRows][kAccs]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) hold_registers(acc[i]);
}

// Adds a thread's accumulators to its slots, or overwrites these (`set`). The slots of a
// warpgroup's threads are interleaved.
template <int kRows, int kAccs>
__device__ __forceinline__ void flush(float (&acc)[kRows][kAccs], float4* slots, bool set) {
  hold_accumulators(acc);
  tensor::flush<128>(acc, slots, set);
}

}  // namespace hopper
}  // namespace fastconv
