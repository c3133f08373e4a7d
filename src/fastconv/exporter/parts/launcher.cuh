// Starting a kernel from Python: sizes, and arguments as 64-bit numbers (addresses, or integers).
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using Numbers = std::vector<int64_t>;

inline void check(cudaError_t status, const std::string& kernel) {
  if (status == cudaSuccess) return;
  throw std::runtime_error("CUDA error at the launch of " + kernel + ": " +
                           cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

template <class T>
T as_argument(int64_t number) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(number);
  } else {
    return static_cast<T>(number);
  }
}

template <class... Parameters, std::size_t... kIndex>
void start(const std::string& name, void (*kernel)(Parameters...), const Numbers& sizes,
           const Numbers& arguments, int64_t stream, std::index_sequence<kIndex...>) {
  const auto blocks = static_cast<unsigned>(sizes.at(0));
  const auto threads = static_cast<unsigned>(sizes.at(1));
  const int shared_bytes = static_cast<int>(sizes.at(2));
  if (arguments.size() != sizeof...(Parameters)) {
    throw std::invalid_argument(name + " has " + std::to_string(sizeof...(Parameters)) +
                                " arguments, not " + std::to_string(arguments.size()));
  }
  // More than 48 KiB have to be asked for, on each device; asking takes well under a microsecond.
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          name);
  }
  kernel<<<blocks, threads, shared_bytes, reinterpret_cast<cudaStream_t>(stream)>>>(
      as_argument<Parameters>(arguments[kIndex])...);
  check(cudaGetLastError(), name);
}

// `sizes` are blocks, threads of a block, and bytes of its shared memory.
template <class... Parameters>
void start(const std::string& name, void (*kernel)(Parameters...), const Numbers& sizes,
           const Numbers& arguments, int64_t stream) {
  start(name, kernel, sizes, arguments, stream, std::index_sequence_for<Parameters...>());
}
