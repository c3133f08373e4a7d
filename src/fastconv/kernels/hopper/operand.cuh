// What a kernel's tensors have for elements, and which of the tensor core's types that is.
#pragma once
#include "include/scalar.cuh"
#include "include/wgmma.cuh"

namespace fastconv {
namespace hopper {

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

using C = Config;
using Scalar = C::Scalar;
using Operand = OperandOf<Scalar>::type;

constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr int kVector = 16 / kScalarBytes;  // elements in 16 bytes

// The bits of an element, or zero.
__device__ __forceinline__ unsigned load_bits(const float* element, bool valid) {
  return __float_as_uint(load_or_zero(element, valid));
}
template <class Half>
__device__ __forceinline__ unsigned load_bits(const Half* element, bool valid) {
  return load_or_zero(reinterpret_cast<const unsigned short*>(element), valid);
}

}  // namespace hopper
}  // namespace fastconv
