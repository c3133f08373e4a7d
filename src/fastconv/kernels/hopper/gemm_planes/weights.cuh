// Weights, rounded to TF32 and packed as the products want them:
//   [column tile][chunk][tap, by units][step][2][column][4 channels]
#pragma once
#include "hopper/gemm_planes/tile.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ float rounded(float value) {
  return C::ties_to_even ? round_to_even_tf32(value) : round_operand_to_tf32(value);
}

constexpr int kTapVectors = kSteps * 2 * kColumns;  // of 16 bytes
constexpr int kTileWeights = kChunks * kTaps * kProductBytes;

// A thread has the same four channels of all taps: those of a channel are neighbours in memory.
__device__ __forceinline__ void pack_weights(const float* weight, float4* packed) {
  constexpr int kThreads = kColumnTiles * kChunks * kTapVectors;
  for (int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); index < kThreads;
       index += static_cast<int>(gridDim.x * blockDim.x)) {
    const int half = index % 2;
    const int column = index / 2 % kColumns;
    const int step = index / (2 * kColumns) % kSteps;
    const int chunk = index / kTapVectors;  // of all column tiles
    const int out = chunk / kChunks * kColumns + column;
    const int in = (chunk % kChunks * kSteps + step) * kStep + half * 4;
    float4* const target = packed + static_cast<long long>(chunk) * kTaps * kTapVectors +
                           (step * 2 + half) * kColumns + column;
#pragma unroll 3
    for (int row = 0; row < C::kernel_height; ++row) {
#pragma unroll 3
      for (int tap = 0; tap < C::kernel_width; ++tap) {
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const long long first = C::transposed ? in + i : out;
          const long long second = C::transposed ? out : in + i;
          const float* const source = weight + first * C::weight_stride_out +
                                      second * C::weight_stride_in +
                                      static_cast<long long>(row) * C::weight_stride_height +
                                      static_cast<long long>(tap) * C::weight_stride_width;
          values[i] = rounded(load_or_zero(source, out < C::group_out && in + i < C::group_in));
        }
        target[place_of(row, tap) * kTapVectors] =
            make_float4(values[0], values[1], values[2], values[3]);
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
