// The host twin of device/sm80.cuh in src/fastconv/kernels: the same functions, on a CPU.
#pragma once
#include "device/ptx.cuh"
#include "mma.h"

namespace fastconv {

inline unsigned load_or_zero(const unsigned short* global, bool valid) {
  return valid ? *global : 0u;
}
inline float load_or_zero(const float* global, bool valid) { return valid ? *global : 0.0f; }
inline uint4 load_or_zero(const uint4* global, bool valid) {
  return valid ? *global : make_uint4(0, 0, 0, 0);
}
inline uint2 load_or_zero(const uint2* global, bool valid) {
  return valid ? *global : make_uint2(0, 0);
}

inline unsigned short load(const unsigned short* global) { return *global; }
inline float load(const float* global) { return *global; }
inline uint4 load(const uint4* global) { return *global; }

inline void add_to_memory(float4* global, float4 values) {
  global->x += values.x;
  global->y += values.y;
  global->z += values.z;
  global->w += values.w;
}

inline void add_to_memory(unsigned* global, unsigned value) { *global += value; }

inline float round_operand_to_tf32(float value) {
  const unsigned bits = __float_as_uint(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? value : __uint_as_float(bits + 0x1000u);
}

inline float round_to_tf32(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return value;  // infinite, or NaN
  return __uint_as_float((bits + 0x1000u) & 0xffffe000u);
}

inline float round_to_even_tf32(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return value;  // infinite, or NaN
  return __uint_as_float((bits + 0x0fffu + (bits >> 13 & 1u)) & 0xffffe000u);
}

// Rounds numbers that are normal in float16, and truncates those that are subnormal.
inline unsigned short round_to_half(float value) {
  const float rounded = round_to_tf32(value);
  const unsigned magnitude = __float_as_uint(fabsf(rounded));
  if (magnitude >= 0x38800000u) return float_to_half(rounded);
  const auto bits = static_cast<unsigned>(__uint_as_float(magnitude) * 0x1p24f);
  return static_cast<unsigned short>((__float_as_uint(value) >> 16 & 0x8000u) | bits);
}

inline unsigned round_to_halves(float first, float second) {
  return round_to_half(first) | static_cast<unsigned>(round_to_half(second)) << 16;
}

inline unsigned halves_by_2048th(unsigned halves) {
  return floats_to_halves(half_to_float(static_cast<unsigned short>(halves)) / 2048.0f,
                          half_to_float(static_cast<unsigned short>(halves >> 16)) / 2048.0f);
}

inline float larger(float first, float second) {
  return first != first || second != second ? __uint_as_float(0x7fffffffu) : max(first, second);
}

inline float limited(float number, float most) {
  const float magnitude = fabsf(number) < most ? fabsf(number) : most;
  return __uint_as_float((__float_as_uint(number) & 0x80000000u) | __float_as_uint(magnitude));
}

inline void load_matrices(unsigned (&fragments)[4], const void* row,
                          emulator::Site site = emulator::here("load_matrices")) {
  emulator::load_matrices(site, fragments, row, false);
}

inline void load_transposed(unsigned (&fragments)[4], const void* row,
                            emulator::Site site = emulator::here("load_transposed")) {
  emulator::load_matrices(site, fragments, row, true);
}

}  // namespace fastconv
