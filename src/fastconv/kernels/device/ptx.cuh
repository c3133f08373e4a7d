// PTX that every supported GPU has, one function for each instruction, with a fallback where sm_80
// added one. sm80.cuh, sm90.cuh, mma.cuh and wgmma.cuh wrap the instructions of newer GPUs in the
// same way. All inline assembly of the kernels is in these five files. The CPU emulator
// (tests/emulator) replaces them by host versions, so it runs the kernels' own sources.
#pragma once

namespace fastconv {

// Tags for the element types of an MMA's operands: float with TF32's mantissa, or a 16-bit type.
struct Tf32 {};
struct Float16 {};
struct Bfloat16 {};

// The thread block's dynamic shared memory.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes (4, 8 or 16) from global to shared memory with cp.async, or writes zeros if not
// `valid` (then `global` is not read). Both addresses are multiples of kBytes. The copy is complete
// after copy_async_wait. GPUs before sm_80 copy synchronously, through registers.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async can copy");
#if __CUDA_ARCH__ >= 800
  // cp.async fills what its source size leaves with zeros.
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
               "l"(global), "n"(kBytes), "r"(valid ? kBytes : 0)
               : "memory");
#else
  unsigned words[kBytes / 4];
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    words[i] = valid ? static_cast<const unsigned*>(global)[i] : 0u;
  }
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) static_cast<unsigned*>(shared)[i] = words[i];
#endif
}

// Commits this thread's copies since the last commit as one group.
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Stores an element if it is `valid`. Stores of 8 or 16 bytes are one predicated instruction,
// without a branch.
template <class T>
__device__ __forceinline__ void store_if(T* global, const T& value, bool valid) {
  if (valid) *global = value;
}
__device__ __forceinline__ void store_if(uint4* global, const uint4& value, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(global),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(valid))
      : "memory");
}
__device__ __forceinline__ void store_if(uint2* global, const uint2& value, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p st.global.v2.b32 [%0], {%1, %2};\n"
      "}" ::"l"(global),
      "r"(value.x), "r"(value.y), "r"(static_cast<int>(valid))
      : "memory");
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Rounds to nearest, ties to even; GPUs before sm_80 have no instruction for it. NaN stays NaN.
__device__ __forceinline__ unsigned short float_to_bfloat(float value) {
#if __CUDA_ARCH__ >= 800
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// Converts two floats to a pair of 16-bit floats, to nearest, ties to even, with `first` in the
// lower 16 bits. Needs sm_80.
__device__ __forceinline__ unsigned floats_to_halves(float first, float second) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
__device__ __forceinline__ unsigned floats_to_bfloats(float first, float second) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// 2^x and 1 / x, with an error of about 2^-22; subnormal numbers count as zero. One instruction
// each: expf and a division take some eight.
__device__ __forceinline__ float exp2_approximately(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float inverse_approximately(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Returns `number` as a value that the compiler cannot relate to the argument. Expressions that
// depend on it are recomputed instead of being kept in registers.
__device__ __forceinline__ int once_more(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Returns `number` as a value that the compiler cannot recompute, so that it stays in a register.
__device__ __forceinline__ float kept(float number) {
  asm volatile("" : "+f"(number));
  return number;
}
__device__ __forceinline__ double kept(double number) {
  asm volatile("" : "+d"(number));
  return number;
}

// --- Named barriers (bar.sync, bar.arrive) -------------------------------------------------------
// A named barrier has a number from 1 to 15 and an expected number of threads, which are whole
// warps. Threads that only signal use bar.arrive; threads that wait for all of them use bar.sync,
// and then see what every participant wrote before.

__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void come_to(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fastconv
