// Partial accumulators of weight gradients. Each thread has its own slots in the workspace, of four
// accumulators each, side by side with its neighbours' slots; a second kernel reduces them in a
// fixed order.
#pragma once
#include "device/tensor/depth.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace tensor {

template <int kRows, int kAccs>
__device__ __forceinline__ void clear(float (&acc)[kRows][kAccs]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kAccs; ++j) acc[i][j] = 0.0f;
  }
}

// Adds a thread's accumulators to its slots of the workspace, or overwrites the slots (kSet). The
// slots of kThreads threads are interleaved.
template <int kThreads, bool kSet, int kRows, int kAccs>
__device__ __forceinline__ void flush(const float (&acc)[kRows][kAccs], float4* slots) {
#pragma unroll
  for (int i = 0; i < kRows * kAccs / 4; ++i) {
    const float* const four = &acc[i * 4 / kAccs][i * 4 % kAccs];
    const float4 values = make_float4(four[0], four[1], four[2], four[3]);
    if constexpr (kSet) {
      slots[i * kThreads] = values;
    } else {
      add_to_memory(slots + i * kThreads, values);
    }
  }
}
template <int kThreads, int kRows, int kAccs>
__device__ __forceinline__ void flush(const float (&acc)[kRows][kAccs], float4* slots, bool set) {
  if (set) {
    flush<kThreads, true>(acc, slots);
  } else {
    flush<kThreads, false>(acc, slots);
  }
}

// Sums over four neighbouring lanes, which hold pixels of the same channels.
__device__ __forceinline__ float sum_of_four_lanes(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  value += __shfl_xor_sync(~0u, value, 2);
  return value;
}

__device__ __forceinline__ void add(float4& total, const float4& value) {
  total.x += value.x;
  total.y += value.y;
  total.z += value.z;
  total.w += value.w;
}

// Reduces one slot over all workers, in order; `distance` slots lie between two workers' slots.
__device__ __forceinline__ float4 total_of(const float4* first, long long distance, int workers) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int worker = 0; worker < workers; ++worker) {
    add(total, first[worker * distance]);
  }
  return total;
}

// The offset of a weight in its tensor; `output` counts the channels of all groups.
__device__ __forceinline__ long long weight_offset(int output, int input, int row, int column) {
  return static_cast<long long>(output) * C::weight_stride_out +
         static_cast<long long>(input) * C::weight_stride_in +
         static_cast<long long>(row) * C::weight_stride_height +
         static_cast<long long>(column) * C::weight_stride_width;
}
// The same in volumes, where an input channel is at a tap of the depth.
template <int kChannels>
__device__ __forceinline__ long long weight_offset(int output, const DepthChannel<kChannels>& input,
                                                   int row, int column) {
  return weight_offset(output, input.channel, row, column) +
         static_cast<long long>(input.tap) * Depth::weight_stride;
}

}  // namespace tensor
}  // namespace fastconv
