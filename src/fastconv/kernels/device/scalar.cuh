// The element types of tensors, and the type that each is accumulated in.
#pragma once
#include "device/ptx.cuh"

namespace fastconv {

struct float16 {
  unsigned short bits;
};

struct bfloat16 {
  unsigned short bits;
};

// The accumulator's type: products are computed and added in it.
template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};

__device__ __forceinline__ float widen(float16 value) { return half_to_float(value.bits); }
__device__ __forceinline__ float widen(bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }

template <class T>
__device__ __forceinline__ T narrow(typename AccOf<T>::type value) {
  return value;
}
template <>
__device__ __forceinline__ float16 narrow<float16>(float value) {
  return {float_to_half(value)};
}
template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16>(float value) {
  return {float_to_bfloat(value)};
}

// The type whose loads and stores move kBytes at once.
template <int kBytes>
struct Bits;
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<4> {
  using type = unsigned;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<16> {
  using type = uint4;
};

}  // namespace fastconv
