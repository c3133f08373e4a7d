// The element type of a kernel's tensors, and the MMA operand type that it becomes.
#pragma once
#include "device/scalar.cuh"
#include "device/sm80.cuh"

namespace fastconv {
namespace tensor {

template <class T>
struct OperandOf;
template <>
struct OperandOf<float> {
  using type = Tf32;
};
template <>
struct OperandOf<float16> {
  using type = Float16;
};
template <>
struct OperandOf<bfloat16> {
  using type = Bfloat16;
};

template <bool kFirst, class First, class Second>
struct Either {
  using type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
  using type = Second;
};

using C = Config;
using Scalar = C::Scalar;
using Operand = OperandOf<Scalar>::type;

constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr int kVector = 16 / kScalarBytes;  // elements in 16 bytes

// The number of elements of a tensor of these sizes. Plans are made only for images of fewer than
// kMostElements, so offsets within an image are 32-bit numbers (planning/limits.py). Offsets of
// places outside of it, in padding or where tiles overhang, may be larger: see IndexTo.
constexpr long long kMostElements = 1LL << 30;
template <class... Sizes>
__host__ __device__ constexpr long long elements_of(Sizes... sizes) {
  return (1LL * ... * sizes);
}

// 3xTF32: splits a number into two parts with TF32's mantissa. For infinity and NaN, the low part
// is the number itself and the high part is TF32's largest number with its sign. So of the three
// products
//
//   low_x high_y + high_x low_y + high_x high_y,
//
// the first is infinite if x is, with the sign of x y, or NaN if y = 0; the others are finite, or
// overflow with the same sign. If x and y are both infinite, all three products equal x y.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
  constexpr unsigned kLargest = 0x7f7fe000u;
  const float rounded = round_to_even_tf32(limited(value, __uint_as_float(kLargest)));
  high = __float_as_uint(rounded);
  low = __float_as_uint(round_to_even_tf32(value - rounded));
}

// Splits an operand of an MMA with ties away from zero. Before sm_90 this takes half as many
// instructions as rounding ties to even.
__device__ __forceinline__ void split_away(float value, unsigned& high, unsigned& low) {
  // Stays finite when half of its last TF32 bit is added.
  constexpr unsigned kLargest = 0x7f7fe000u;
  high = (__float_as_uint(limited(value, __uint_as_float(kLargest))) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(round_operand_to_tf32(value - __uint_as_float(high)));
}

__device__ __forceinline__ bool is_finite(float value) {
  return fabsf(value) < __uint_as_float(0x7f800000u);
}

// Replaces infinities and NaN by zero.
template <int kCount>
__device__ __forceinline__ void drop_infinite(float (&accs)[kCount]) {
#pragma unroll
  for (float& acc : accs) acc = is_finite(acc) ? acc : 0.0f;
}

// The bits of an element, or zero if not `valid`.
__device__ __forceinline__ unsigned load_bits(const float* element, bool valid) {
  return __float_as_uint(load_or_zero(element, valid));
}
template <class Half>
__device__ __forceinline__ unsigned load_bits(const Half* element, bool valid) {
  return load_or_zero(reinterpret_cast<const unsigned short*>(element), valid);
}

}  // namespace tensor
}  // namespace fastconv
