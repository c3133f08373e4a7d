// Scaled fp16: powers of two that bring numbers into float16's range, and the block-wide reductions
// that find them.
#pragma once
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace tensor {

// The exponent that the largest number of a sample is scaled to: numbers outside of the sample may
// be 2^4 times as large.
constexpr int kSampleExponent = 11;
// Bounds the exponents of numbers that are scaled, so that the product of two scales is a normal
// number.
constexpr int kMostExponent = 50;

// In two-part scaled fp16, the low part is stored this many times larger than it counts, so that it
// has the high part's range.
constexpr float kLowFactor = 2048.0f;

// The low parts of two numbers whose float16 is `high`: what is left of them, times `factor`.
__device__ __forceinline__ unsigned low_halves(float first, float second, unsigned high,
                                               float factor) {
  const float first_high = half_to_float(static_cast<unsigned short>(high));
  const float second_high = half_to_float(static_cast<unsigned short>(high >> 16));
  return floats_to_halves((first - first_high) * factor, (second - second_high) * factor);
}

// Reduces a value over the lanes of a warp, in a fixed order.
template <class Value, class Combine>
__device__ __forceinline__ Value warp_combined(Value value, Combine combine) {
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, flip));
  }
  return value;
}

// Reduces a value over the threads of a block of whole warps.
template <class Value, class Combine>
__device__ __forceinline__ Value block_combined(Value value, Combine combine) {
  auto* const of_warps = reinterpret_cast<Value*>(shared_memory());
  value = warp_combined(value, combine);
  __syncthreads();  // values of the last call have been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
  for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) value = combine(value, of_warps[i]);
  return value;
}
__device__ __forceinline__ float block_largest(float number) {
  return block_combined(number, larger);
}
template <class Value>
__device__ __forceinline__ Value sum_of(Value first, Value second) {
  return first + second;
}

// The bit patterns of 2^-100 and 2^100.
constexpr unsigned kLeastBits = 27u << 23, kMostBits = 227u << 23;

// The power of two at the mean exponent of `count` numbers, whose biased exponents add up to
// `exponents`; 1 if there are no numbers.
__device__ __forceinline__ float mean_power(int exponents, int count) {
  if (count == 0) return 1.0f;
  const unsigned bits = static_cast<unsigned>((exponents + count / 2) / count) << 23;
  return __uint_as_float(min(max(bits, kLeastBits), kMostBits));
}
// The inverse of a power of two.
__device__ __forceinline__ float inverse(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// The power of two that scales a number to this exponent. It is 1 for zero, and 0 if the number is
// too large, too small or NaN.
__device__ __forceinline__ float scale_to(float number, int exponent) {
  if (number == 0.0f) return 1.0f;
  const int its = static_cast<int>(__float_as_uint(number) >> 23 & 255u) - 127;
  if (its < -kMostExponent || its > kMostExponent) return 0.0f;
  return __uint_as_float(static_cast<unsigned>(127 + exponent - its) << 23);
}

}  // namespace tensor
}  // namespace fastconv
