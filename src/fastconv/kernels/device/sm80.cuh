// PTX of sm_80 and later, one function for each instruction (ptx.cuh has those of every GPU). The
// CPU emulator has a host version of this file.
#pragma once
#include "device/ptx.cuh"

namespace fastconv {

// --- Loads, stores and conversions ---------------------------------------------------------------

// Loads 2, 4, 8 or 16 bytes that no thread writes while the kernel runs (ld.global.nc), or gives
// zeros if not `valid` (then nothing is read). The load is issued where it is called: the compiler
// does not move volatile assembly. Two bytes are loaded to a 32-bit register of their own: the
// compiler would pack two 16-bit registers into one as soon as the second load is issued, and the
// thread would stall for it.
__device__ __forceinline__ unsigned load_or_zero(const unsigned short* global, bool valid) {
  unsigned value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@p ld.global.nc.u16 %0, [%1];\n"
      "}"
      : "=r"(value)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}
__device__ __forceinline__ float load_or_zero(const float* global, bool valid) {
  float value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.f32 %0, 0f00000000;\n"
      "@p ld.global.nc.f32 %0, [%1];\n"
      "}"
      : "=f"(value)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}
__device__ __forceinline__ uint4 load_or_zero(const uint4* global, bool valid) {
  uint4 value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}

__device__ __forceinline__ uint2 load_or_zero(const uint2* global, bool valid) {
  uint2 value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n"
      "}"
      : "=r"(value.x), "=r"(value.y)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}

// Loads without a predicate. The 16-byte load also prefetches 256 bytes to L2.
__device__ __forceinline__ unsigned short load(const unsigned short* global) {
  unsigned short value;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(value) : "l"(global));
  return value;
}
__device__ __forceinline__ float load(const float* global) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(global));
  return value;
}

__device__ __forceinline__ uint4 load(const uint4* global) {
  uint4 value;
  asm volatile("ld.global.nc.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global));
  return value;
}

// Adds to four consecutive floats in global memory, without a result to wait for. Additions of one
// thread to one address are performed in program order.
__device__ __forceinline__ void add_to_memory(float4* global, float4 values) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global),
               "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
               : "memory");
#else
  asm volatile(
      "red.relaxed.gpu.global.add.f32 [%0], %1;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 4], %2;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 8], %3;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 12], %4;" ::"l"(global),
      "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
      : "memory");
#endif
}

// Adds to a counter in global memory that threads of several blocks may add to.
__device__ __forceinline__ void add_to_memory(unsigned* global, unsigned value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// Prepares an operand of a TF32 MMA, which ignores the last 13 bits of its mantissa: the result
// makes that truncation a rounding to nearest, ties away from zero.
__device__ __forceinline__ float round_operand_to_tf32(float value) {
  float result;
  asm("{\n"
      ".reg .pred finite;\n"
      ".reg .f32 magnitude;\n"
      ".reg .b32 bits;\n"
      "abs.f32 magnitude, %1;\n"
      "setp.lt.f32 finite, magnitude, 0f7f800000;\n"
      "mov.b32 bits, %1;\n"
      "@finite add.u32 bits, bits, 0x1000;\n"  // the addition would turn some NaNs into numbers
      "mov.b32 %0, bits;\n"
      "}"
      : "=f"(result)
      : "f"(value));
  return result;
}

// Rounds to TF32's 10-bit mantissa, to nearest, ties to even. sm_90 has an instruction for it;
// rounding ties away from zero takes three.
__device__ __forceinline__ float round_to_even_tf32(float value) {
#if __CUDA_ARCH__ >= 900
  unsigned bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
#else
  const unsigned bits = __float_as_uint(value);
  const unsigned rounded = (bits + 0x0fffu + (bits >> 13 & 1u)) & 0xffffe000u;
  return fabsf(value) < __uint_as_float(0x7f800000u) ? __uint_as_float(rounded) : value;
#endif
}

// Converts two numbers that are not NaN to float16, to nearest, ties away from zero, with `first`
// in the lower 16 bits.
__device__ __forceinline__ unsigned round_to_halves(float first, float second) {
  unsigned bits;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;"
      : "=r"(bits)
      : "f"(__uint_as_float(__float_as_uint(second) + 0x1000u)),
        "f"(__uint_as_float(__float_as_uint(first) + 0x1000u)));
  return bits;
}

// Multiplies two float16 numbers by 2^-11, to nearest, ties to even.
__device__ __forceinline__ unsigned halves_by_2048th(unsigned halves) {
  unsigned result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(halves), "r"(0x10001000u));
  return result;
}

// The larger of two numbers, or NaN if either is NaN.
__device__ __forceinline__ float larger(float first, float second) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(first), "f"(second));
  return result;
}

// `number`, or `most` with its sign if its magnitude is larger or it is NaN.
__device__ __forceinline__ float limited(float number, float most) {
#if __CUDA_ARCH__ >= 860
  float result;
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(result) : "f"(number), "f"(most));
  return result;
#else
  return copysignf(fminf(fabsf(number), most), number);
#endif
}

// --- ldmatrix: matrices of 8 rows of 16 bytes in shared memory -----------------------------------
// Of each matrix, lane 4 g + t gets a fragment of 4 bytes: bytes 4 t to 4 t + 3 of row g. These are
// two 16-bit elements, or one TF32 element.

// Loads four matrices from shared memory. Lane i passes the address of row i % 8 of matrix i / 8, a
// multiple of 16 bytes.
__device__ __forceinline__ void load_matrices(unsigned (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

// Loads four matrices of 8 by 8 16-bit elements, each of them transposed.
__device__ __forceinline__ void load_transposed(unsigned (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace fastconv
