// As much of CUDA's runtime as exported files' launcher uses: prints what it is told. A test says
// which CUDART_VERSION it is.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
using cudaStream_t = void*;
struct dim3 {
  unsigned x;
  dim3(unsigned x = 1) : x(x) {}
};
enum {
  cudaEnableDefault,
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
inline cudaError_t last = cudaSuccess;
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidValue"; }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
inline cudaError_t cudaGetLastError() { return last; }
template <class T>
void print(const T* numbers, int count) {
  for (int i = 0; i < count; ++i) printf(" %lld", static_cast<long long>(numbers[i]));
}
inline int tiled(void* map, int type, unsigned rank, void* tensor, const uint64_t* sizes,
                 const uint64_t* strides, const unsigned* box, const unsigned* steps,
                 int interleave, int swizzle, int promotion, int fill) {
  const long long numbers[] = {
      reinterpret_cast<long long>(tensor), 1, type, swizzle, promotion, rank};
  print(numbers, 6), print(sizes, rank), print(strides, rank - 1), print(steps, rank);
  print(box, rank), printf("\n");
  memset(map, 0, 128);
  static_cast<char*>(map)[0] = 1;
  return interleave || fill || reinterpret_cast<uintptr_t>(map) % 128 || !tensor;
}
inline int im2col(void* map, int type, unsigned rank, void* tensor, const uint64_t* sizes,
                  const uint64_t* strides, const int* lower, const int* upper, unsigned channels,
                  unsigned pixels, const unsigned* steps, int interleave, int swizzle,
                  int promotion, int fill) {
  const long long numbers[] = {
      reinterpret_cast<long long>(tensor), 0, type, swizzle, promotion, rank};
  print(numbers, 6), print(sizes, rank), print(strides, rank - 1), print(steps, rank);
  print(lower, rank - 2), print(upper, rank - 2), print(&channels, 1), print(&pixels, 1);
  printf("\n");
  memset(map, 0, 128);
  static_cast<char*>(map)[0] = 2;
  return interleave || fill || reinterpret_cast<uintptr_t>(map) % 128 || !tensor;
}
inline cudaError_t entry(const char* name, void** found) {
  const bool first = !strcmp(name, "cuTensorMapEncodeTiled");
  *found = first ? reinterpret_cast<void*>(tiled) : reinterpret_cast<void*>(im2col);
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found,
                                                    unsigned version, unsigned long long) {
  return version == 12000 ? entry(name, found) : cudaErrorInvalidValue;
}
#else
inline cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned long long) {
  return entry(name, found);
}
#endif
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, int, int bytes) {
  printf(" allow %d\n", bytes);
  return cudaSuccess;
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const bool early = config->numAttrs == 1 &&
                     config->attrs->val.programmaticStreamSerializationAllowed &&
                     config->attrs->id == cudaLaunchAttributeProgrammaticStreamSerialization;
  printf(" launch %u %u %zu %d %lld", config->gridDim.x, config->blockDim.x,
         config->dynamicSmemBytes, early, reinterpret_cast<long long>(config->stream));
  kernel(static_cast<Arguments&&>(arguments)...);
  return last;
}
