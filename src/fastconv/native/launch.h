// Kernel launches by the CUDA driver API, on PyTorch's current stream.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/Stream.h>
#include <dlfcn.h>

#include <span>

#include "entry.h"

namespace fastconv::host {

// Looks a function up in a library that PyTorch has loaded: the build does not need CUDA.
inline void* loaded(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  void* found = handle ? dlsym(handle, name) : nullptr;
  TORCH_CHECK(found, "fastconv cannot find ", name, " in ", library, ", which should be loaded");
  return found;
}

template <class Function>
Function* driver(const char* name) {
  return reinterpret_cast<Function*>(loaded("libcuda.so.1", name));
}

// Returns PyTorch's current stream. PyTorch's header for CUDAStream needs the CUDA toolkit, but a
// CUDAStream has the layout of a Stream.
inline void* stream_of(const at::Device& device) {
  if (!device.is_cuda()) return nullptr;
  static const auto handle = reinterpret_cast<void* (*)(const c10::Stream*)>(
      loaded("libc10_cuda.so", "_ZNK3c104cuda10CUDAStream6streamEv"));
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return handle(&stream);
}

using Addresses = std::span<const uintptr_t>;

// The driver requires an alignment of 64 bytes for a CUtensorMap.
struct alignas(128) Map {
  std::array<char, kMapBytes> bytes;
};

struct Status {
  int code;
  int64_t mapped = -1;    // the index of the argument whose tensor map could not be made, or -1
  uintptr_t address = 0;  // the address in that tensor map
};

// The driver's CUlaunchAttribute, whose value may have 64 bytes, and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  alignas(8) int value;
  char rest[60];
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// Launches with programmatic dependent launch (PDL).
inline int start_early(const Launch& launch, void** arguments, void* stream) {
  using LaunchKernelEx = int(const LaunchConfig*, void*, void**, void**);
  static const auto launch_kernel = driver<LaunchKernelEx>("cuLaunchKernelEx");
  const LaunchAttribute attribute{6, 1, {}};  // allows programmatic stream serialization
  const auto [x, y, z] = launch.grid;
  const LaunchConfig config{{x, y, z}, {launch.block, 1, 1}, launch.shared_bytes,
                            stream,    &attribute,           1};
  return launch_kernel(&config, launch.function, arguments, nullptr);
}

inline int start(const Launch& launch, void** arguments, void* stream) {
  using LaunchKernel = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, void*, void**, void**);
  static const auto launch_kernel = driver<LaunchKernel>("cuLaunchKernel");
  if (launch.early) return start_early(launch, arguments, stream);
  const auto [x, y, z] = launch.grid;
  return launch_kernel(launch.function, x, y, z, launch.block, 1, 1, launch.shared_bytes, stream,
                       arguments, nullptr);
}

inline Status start(const Launch& launch, Addresses addresses, void* stream) {
  using ReplaceAddress = int(void*, void*);
  std::vector<Map> maps;
  maps.reserve(launch.maps);  // the arguments point to them, so they must not move
  c10::SmallVector<void*, 16> arguments;
  for (const Argument& argument : launch.arguments) {
    const void* at = &argument.value;
    if (argument.kind == Argument::kTensor) at = &addresses[argument.value];
    if (argument.kind == Argument::kMap) {
      static const auto replace = driver<ReplaceAddress>("cuTensorMapReplaceAddress");
      at = &maps.emplace_back(Map{argument.map});
      const uintptr_t address = addresses[argument.value];
      if (const int code = replace(&maps.back(), reinterpret_cast<void*>(address))) {
        return {code, &argument - launch.arguments.data(), address};
      }
    }
    arguments.push_back(const_cast<void*>(at));
  }
  return {start(launch, arguments.data(), stream)};
}

// Launches all kernels of an entry from `first` on.
inline void start_all(const Launches& entry, size_t first, Addresses addresses, void* stream) {
  for (size_t i = first; i < entry.launches.size(); ++i) {
    for (bool again = false;; again = true) {
      const Status status = start(entry.launches[i], addresses, stream);
      if (status.code == 0) break;
      entry.trouble(i, status.mapped, status.address, status.code, again);
    }
  }
}

}  // namespace fastconv::host
