// The host twin of device/ptx.cuh in src/fastconv/kernels: the same functions, on a CPU.
#pragma once

namespace fastconv {

struct Tf32 {};
struct Float16 {};
struct Bfloat16 {};

inline unsigned char* shared_memory() { return emulator::shared.begin; }

inline unsigned shared_address(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - emulator::shared.begin;
  if (offset < 0 || offset > emulator::shared.bytes) {
    emulator::fail("%p does not lie in shared memory", pointer);
  }
  return static_cast<unsigned>(offset);
}

template <int kBytes>
inline void copy_async(void* shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  shared_address(shared);
  emulator::copy_async(shared, global, kBytes, valid);
}

inline void copy_async_commit() { emulator::copy_async_commit(); }

template <int kPending>
inline void copy_async_wait() {
  emulator::copy_async_wait(kPending);
}

template <class T>
inline void store_if(T* global, const T& value, bool valid) {
  if (valid) *global = value;
}

inline float half_to_float(unsigned short bits) {
  const unsigned sign = (bits & 0x8000u) << 16;
  const unsigned magnitude = (bits & 0x7fffu)
                             << 13;  // as a float's bits, with an exponent that is 112 too small
  if (magnitude >= 0x0f800000u) return __uint_as_float(sign | 0x70000000u | magnitude);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude) * 0x1p112f));
}

// Rounds to nearest, ties to even.
inline unsigned short float_to_half(float value) {
  const unsigned bits = __float_as_uint(value);
  const unsigned sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) return 0x7fff;  // the only NaN that GPUs make
  if (magnitude >= 0x477ff000u) {              // 65520 and more
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {  // subnormal: the last bit of 0.5 + x is 2^-24, as a half's
    half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<unsigned short>(sign | half);
}

inline unsigned floats_to_halves(float first, float second) {
  return float_to_half(first) | static_cast<unsigned>(float_to_half(second)) << 16;
}

inline unsigned short float_to_bfloat(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline unsigned floats_to_bfloats(float first, float second) {
  return float_to_bfloat(first) | static_cast<unsigned>(float_to_bfloat(second)) << 16;
}

// The GPU's have an error of about 2^-22.
inline float exp2_approximately(float x) { return exp2f(x); }
inline float inverse_approximately(float x) { return 1.0f / x; }

inline int once_more(int number) { return number; }

template <class T>
inline T kept(T number) {
  return number;
}

inline void wait_at(int barrier, int threads, emulator::Site site = emulator::here("wait_at")) {
  emulator::named_barrier(site, barrier, threads, true);
}
inline void come_to(int barrier, int threads, emulator::Site site = emulator::here("come_to")) {
  emulator::named_barrier(site, barrier, threads, false);
}

}  // namespace fastconv
