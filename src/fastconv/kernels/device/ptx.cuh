// Every hardware instruction we use, one function each. Nothing else in the kernels is assembly, so
// that a host twin of this one file (tests/emulator) lets the same kernels run on a CPU.
#pragma once

namespace fastconv {

// What tensor cores multiply: float with TF32's precision, or one of the 16-bit types.
struct Tf32 {};
struct Float16 {};
struct Bfloat16 {};

// The block's dynamic shared memory.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes (4, 8 or 16) from global to shared memory, or writes zeros if not `valid` (then
// `global` is not read). Both addresses are multiples of kBytes. Complete after
// copy_async_wait; GPUs before sm_80 copy at once, through registers.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async can copy");
#if __CUDA_ARCH__ >= 800
  // A source size of 0 fills with zeros.
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

// Closes a group of this thread's copies since the last commit.
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Stores an element if it is `valid`; or 8 or 16 bytes, at once and without a branch.
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

// To nearest, ties to even; before sm_80 by hand. A NaN stays one.
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

// Two floats to 16-bit types, to nearest, ties to even; `first` in the lower half. From sm_80 on.
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

// The same number, of which the compiler does not know that: what follows from it is computed again
// rather than kept in registers.
__device__ __forceinline__ int once_more(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// The same number, computed once: the compiler keeps it, where it would rather compute it again.
__device__ __forceinline__ float kept(float number) {
  asm volatile("" : "+f"(number));
  return number;
}
__device__ __forceinline__ double kept(double number) {
  asm volatile("" : "+d"(number));
  return number;
}

// --- Barriers that some threads of a block have among themselves ---------------------------------
// Each has a number, from 1 to 15, and so many threads, whole warps: of a round, some wait for all
// of them to have come, the others only come. Who waits sees what all of them wrote before.

__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void come_to(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fastconv
