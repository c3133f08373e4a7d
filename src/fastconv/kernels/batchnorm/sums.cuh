// Adds up two numbers for each channel of a block, in a fixed order.
//
//   narrow   [number][element of a vector][thread] in shared memory: first the rows of each column,
//            then, by a warp for each channel, the columns of a channel. Threads are padded, so
//            that neighbouring columns lie in different banks.
//   wide     shuffles, then [warp][number] in shared memory
#pragma once
#include "batchnorm/walk.cuh"

namespace fastconv {
namespace batchnorm {

constexpr int kSums = 2;
constexpr int kPadding = 32 / kVector;
using Sums = Acc[kSums][kColumns];

// Adds a number up over the lanes of a warp; all of them get the sum.
__device__ __forceinline__ Acc sum_of_warp(Acc number) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    number += __shfl_xor_sync(~0u, number, distance);
  }
  return number;
}

// Calls `emit` with each channel of the block, counted from its first one, and the channel's sums.
template <class Emit>
__device__ __forceinline__ void add_up_planes(const Sums& sums, const Emit& emit) {
  Acc* const shared = reinterpret_cast<Acc*>(shared_memory());
  const int thread = static_cast<int>(threadIdx.x);
  const int warps = static_cast<int>(blockDim.x) / 32;
  Acc totals[kSums];
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    totals[s] = sum_of_warp(sums[s][0]);
    if (thread % 32 == 0) shared[thread / 32 * kSums + s] = totals[s];
  }
  __syncthreads();
  if (thread > 0) return;
  for (int warp = 1; warp < warps; ++warp) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) totals[s] += shared[warp * kSums + s];
  }
  emit(0, totals[0], totals[1]);
}

template <class Emit>
__device__ __forceinline__ void add_up_columns(const Sums& sums, const Sizes& sizes,
                                               const Part& part, const Emit& emit) {
  Acc* const shared = reinterpret_cast<Acc*>(shared_memory());
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int pitch = threads + kPadding;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) shared[(s * kVector + e) * pitch + thread] = sums[s][e];
  }
  __syncthreads();
  const int columns = part.channels * sizes.plane;
  for (int column = thread; column < columns; column += threads) {
    Acc totals[kSums];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      Acc* const first = shared + (s * kVector + column % kVector) * pitch + column / kVector;
      totals[s] = *first;
      for (int row = 1; row < sizes.at_once; ++row) totals[s] += first[row * sizes.lanes];
      *first = totals[s];
    }
    if (sizes.plane == 1) emit(column, totals[0], totals[1]);
  }
  if (sizes.plane == 1) return;
  __syncthreads();
  for (int channel = thread / 32; channel < part.channels; channel += threads / 32) {
    Acc totals[kSums] = {};
    for (int i = thread % 32; i < sizes.plane; i += 32) {
      const int column = channel * sizes.plane + i;
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        totals[s] += shared[(s * kVector + column % kVector) * pitch + column / kVector];
      }
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) totals[s] = sum_of_warp(totals[s]);
    if (thread % 32 == 0) emit(channel, totals[0], totals[1]);
  }
}

template <class Emit>
__device__ __forceinline__ void add_up(const Sums& sums, const Sizes& sizes, const Part& part,
                                       const Emit& emit) {
  if constexpr (kWide) {
    add_up_planes(sums, emit);
  } else {
    add_up_columns(sums, sizes, part, emit);
  }
}

}  // namespace batchnorm
}  // namespace fastconv
