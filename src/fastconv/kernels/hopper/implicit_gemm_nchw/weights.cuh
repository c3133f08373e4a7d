// Weights, rounded to TF32 and packed in wgmma's layout without a swizzle:
//   [column tile, of all groups][chunk][tap, by units][step][2][column][4 channels]
#pragma once
#include "hopper/implicit_gemm_nchw/tile.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ float rounded(float value) {
  return C::ties_to_even ? round_to_even_tf32(value) : round_operand_to_tf32(value);
}

constexpr int kQuads = 2 * kSteps;
constexpr int kTapVectors = kQuads * kColumns;  // vectors of 16 bytes
constexpr int kTileWeights = kChunks * kTaps * kTapBytes;

// A thread packs four channels of a tap. Neighbouring threads read neighbours in memory: taps, then
// the layer's input channels.
__device__ __forceinline__ void pack_weights(const float* weight, float4* packed) {
  constexpr int kVectors = kColumnTiles * kChunks * kTaps * kTapVectors;
  for (int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); index < kVectors;
       index += static_cast<int>(gridDim.x * blockDim.x)) {
    const int tap = index % kTaps;
    const int inside = index / kTaps % kTapVectors;
    const int chunk = index / kTaps / kTapVectors;  // chunk, counted over all column tiles
    const int quad = C::transposed ? inside / kColumns : inside % kQuads;
    const int column = C::transposed ? inside % kColumns : inside / kQuads;
    const int tile = chunk / kChunks;
    const int group = C::groups == 1 ? 0 : tile / kGroupTiles;
    const int out = (tile - group * kGroupTiles) * kColumns + column;
    const int in = chunk % kChunks * C::chunk + quad * 4;
    const int row = tap / C::kernel_width;
    const long long at = 1LL * row * C::weight_stride_height +
                         1LL * (tap % C::kernel_width) * C::weight_stride_width;
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const long long first =
          C::transposed ? group * C::group_in + in + i : group * C::group_out + out;
      const long long second = C::transposed ? out : in + i;
      values[i] = rounded(
          load_or_zero(weight + at + first * C::weight_stride_out + second * C::weight_stride_in,
                       out < C::group_out && in + i < C::group_in));
    }
    packed[(chunk * kTaps + place_of(row, tap % C::kernel_width)) * kTapVectors + quad * kColumns +
           column] = make_float4(values[0], values[1], values[2], values[3]);
  }
}

}  // namespace hopper
}  // namespace fastconv
