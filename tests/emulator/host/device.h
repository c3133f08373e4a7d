// CUDA C++ for a host compiler: the built-ins of NVRTC that kernels use. The driver includes it
// before the kernel. Hardware instructions are in device/ptx.cuh.
#pragma once
#include "runtime.h"

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// There is no __shared__: kernels call fastconv::shared_memory().

using size_t = decltype(sizeof 0);

#define EMULATOR_VECTORS(T, name)                            \
  struct __align__(2 * sizeof(T)) name##2 { T x, y; };       \
  struct __align__(16) name##4 { T x, y, z, w; };            \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(unsigned, uint)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)
#undef EMULATOR_VECTORS

extern "C" {
float fmaf(float, float, float) noexcept;
double fma(double, double, double) noexcept;
float fminf(float, float) noexcept;
double fmin(double, double) noexcept;
float fmaxf(float, float) noexcept;
float fabsf(float) noexcept;
double fmax(double, double) noexcept;
float sqrtf(float) noexcept;
double sqrt(double) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
double exp(double) noexcept;
float erff(float) noexcept;
double erf(double) noexcept;
float tanhf(float) noexcept;
double tanh(double) noexcept;
}
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }

// If one operand is NaN, these return the other one, as CUDA does.
inline float min(float a, float b) { return fminf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
template <class A, class B>
auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
template <class A, class B>
auto max(A a, B b) -> decltype(a + b) {
  return a < b ? b : a;
}

namespace emulator {

template <class To, class From>
To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of the same size");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}

inline int lane() { return static_cast<int>(threadIdx.x % 32); }

template <class T>
T shuffle(Site site, unsigned mask, T value, int source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 or 8 bytes");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = exchange(site, mask, bits, source).value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace emulator

inline unsigned __float_as_uint(float value) { return emulator::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return emulator::bit_cast<int>(value); }
inline float __uint_as_float(unsigned bits) { return emulator::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return emulator::bit_cast<float>(bits); }
inline long long __double_as_longlong(double value) { return emulator::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return emulator::bit_cast<double>(bits); }

// Each hexadecimal digit of the selector picks one of the eight bytes of a and b for the result.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline void __syncthreads(emulator::Site site = emulator::here("__syncthreads")) {
  emulator::barrier(site);
}

inline void __syncwarp(unsigned mask = ~0u, emulator::Site site = emulator::here("__syncwarp")) {
  emulator::exchange(site, mask, 0, 0);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

inline unsigned __ballot_sync(unsigned mask, bool predicate,
                              emulator::Site site = emulator::here("__ballot_sync")) {
  return emulator::exchange(site, mask, predicate, 0).ballot;
}

inline int __any_sync(unsigned mask, bool predicate,
                      emulator::Site site = emulator::here("__any_sync")) {
  return emulator::exchange(site, mask, predicate, 0).ballot != 0;
}

inline int __all_sync(unsigned mask, bool predicate,
                      emulator::Site site = emulator::here("__all_sync")) {
  return emulator::exchange(site, mask, predicate, 0).ballot == mask;
}

// Shuffles work in segments of `width` lanes; a lane whose source lies outside keeps its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              emulator::Site site = emulator::here("__shfl_sync")) {
  const int first = emulator::lane() & -width;
  return emulator::shuffle(site, mask, value, first | (source & (width - 1)));
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 emulator::Site site = emulator::here("__shfl_up_sync")) {
  const int lane = emulator::lane();
  const int source = lane - static_cast<int>(delta);
  return emulator::shuffle(site, mask, value, source < (lane & -width) ? lane : source);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emulator::Site site = emulator::here("__shfl_down_sync")) {
  const int lane = emulator::lane();
  const int source = lane + static_cast<int>(delta);
  return emulator::shuffle(site, mask, value, source > (lane | (width - 1)) ? lane : source);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32,
                  emulator::Site site = emulator::here("__shfl_xor_sync")) {
  const int lane = emulator::lane();
  const int source = lane ^ flip;
  return emulator::shuffle(site, mask, value, source > (lane | (width - 1)) ? lane : source);
}
