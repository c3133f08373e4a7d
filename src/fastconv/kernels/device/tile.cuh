// Integer arithmetic, index types and vectors that all kernels share.
#pragma once
#include "device/scalar.cuh"

namespace fastconv {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
// Division that rounds down, also for negative a.
__host__ __device__ constexpr int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

template <class T>
__host__ __device__ constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

template <class T>
__host__ __device__ constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

// The index type for numbers up to kEnd: 32 bits where they suffice, since 64-bit address
// arithmetic takes several times as many instructions.
template <bool kWide>
struct IndexOf {
  using type = int;
};
template <>
struct IndexOf<true> {
  using type = long long;
};
template <long long kEnd>
using IndexTo = typename IndexOf<(kEnd >= 1ll << 31)>::type;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T element[kCount];
};
// 16 bytes are the widest access of one instruction: a wider vector is read by several, and needs
// no more than their alignment.
template <>
struct alignas(16) Vector<double, 4> {
  double element[4];
};

// Loads four consecutive elements and widens them to the accumulator's type.
template <class T>
__device__ __forceinline__ void load4(const T* source, typename AccOf<T>::type (&target)[4]) {
  const Vector<T, 4> four = *reinterpret_cast<const Vector<T, 4>*>(source);
#pragma unroll
  for (int i = 0; i < 4; ++i) target[i] = widen(four.element[i]);
}

// Copies kCount consecutive elements to shared memory, or writes zeros. cp.async copies 4 bytes or
// more; fewer are copied synchronously.
template <int kCount, class T>
__device__ __forceinline__ void copy_elements(T* shared, const T* global, bool valid) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  if constexpr (kBytes >= 4) {
    copy_async<kBytes>(shared, global, valid);
  } else {
    *shared = valid ? *global : T{};
  }
}

}  // namespace fastconv
