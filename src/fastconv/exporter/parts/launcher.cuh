// Launches a kernel from Python, which passes its sizes and arguments as 64-bit numbers. An address
// or an integer is one number, a tensor map several.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using Numbers = std::vector<int64_t>;
using Arguments = std::vector<Numbers>;

inline void check(cudaError_t status, const std::string& kernel) {
  if (status == cudaSuccess) return;
  throw std::runtime_error("CUDA error at the launch of " + kernel + ": " +
                           cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

// A driver function that exists since CUDA 12. It is looked up at run time, because linking it
// would need the driver's library.
template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
#if CUDART_VERSION >= 13000
  const auto status = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault);
#else
  const auto status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault);
#endif
  if (status != cudaSuccess || found == nullptr) {
    throw std::runtime_error(std::string("the NVIDIA driver is too old: it has no ") + name);
  }
  return reinterpret_cast<Function*>(found);
}

// Copies numbers to an array, and advances past them.
template <class T>
void take(const int64_t*& numbers, T* target, int count) {
  for (int i = 0; i < count; ++i) target[i] = static_cast<T>(*numbers++);
}

// Encodes a tensor map, given its tensor's address and the numbers that map_numbers returns.
inline cudaError_t encode(void* map, const Numbers& numbers) {
  using Tiled = int(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*,
                    const unsigned*, int, int, int, int);
  using Im2col = int(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const int*,
                     const int*, unsigned, unsigned, const unsigned*, int, int, int, int);
  const int64_t* next = numbers.data();
  void* const tensor = reinterpret_cast<void*>(*next++);
  int head[5];
  take(next, head, 5);
  const auto [tiled, type, swizzle, promotion, rank] = head;
  uint64_t sizes[5], strides[5];
  unsigned steps[5];
  take(next, sizes, rank);
  take(next, strides, rank - 1);
  take(next, steps, rank);
  int status;
  if (tiled) {
    static const auto encode = driver_function<Tiled>("cuTensorMapEncodeTiled");
    unsigned box[5];
    take(next, box, rank);
    status = encode(map, type, rank, tensor, sizes, strides, box, steps, 0, swizzle, promotion, 0);
  } else {
    static const auto encode = driver_function<Im2col>("cuTensorMapEncodeIm2col");
    int lower[3], upper[3];
    unsigned box[2];  // channels, pixels
    take(next, lower, rank - 2);
    take(next, upper, rank - 2);
    take(next, box, 2);
    status = encode(map, type, rank, tensor, sizes, strides, lower, upper, box[0], box[1], steps, 0,
                    swizzle, promotion, 0);
  }
  return static_cast<cudaError_t>(status);  // driver and runtime have the same error numbers
}

template <class T>
T as_argument(const std::string& kernel, const Numbers& numbers) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(numbers.at(0));
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(numbers.at(0));
  } else {
    static_assert(sizeof(T) == 128, "the size of an encoded tensor map");
    alignas(128) T map;
    check(encode(&map, numbers), kernel);
    return map;
  }
}

// Converts the arguments to the kernel's parameters, and launches it.
template <class... Parameters, std::size_t... kIndex>
void start(const std::string& name, void (*kernel)(Parameters...), const Numbers& sizes,
           const Arguments& arguments, int64_t stream, std::index_sequence<kIndex...>) {
  if (arguments.size() != sizeof...(Parameters)) {
    throw std::invalid_argument(name + " has " + std::to_string(sizeof...(Parameters)) +
                                " arguments, not " + std::to_string(arguments.size()));
  }
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(sizes.at(0)));
  config.blockDim = dim3(static_cast<unsigned>(sizes.at(1)));
  config.dynamicSmemBytes = static_cast<std::size_t>(sizes.at(2));
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &dependent;
  config.numAttrs = sizes.at(3) != 0 ? 1 : 0;
  // More than 48 KiB of shared memory need an attribute, on each device; setting it takes well
  // under a microsecond. It also gives the thread a context, which encoding tensor maps needs.
  if (config.dynamicSmemBytes > 48 * 1024 || (std::is_class_v<Parameters> || ...)) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.dynamicSmemBytes)),
          name);
  }
  cudaLaunchKernelEx(&config, kernel, as_argument<Parameters>(name, arguments[kIndex])...);
  check(cudaGetLastError(), name);  // this also clears the error
}

// `sizes` are the number of blocks, threads of a block, bytes of its dynamic shared memory, and
// whether this is a programmatic dependent launch.
template <class... Parameters>
void start(const std::string& name, void (*kernel)(Parameters...), const Numbers& sizes,
           const Arguments& arguments, int64_t stream) {
  start(name, kernel, sizes, arguments, stream, std::index_sequence_for<Parameters...>());
}
