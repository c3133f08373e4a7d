// Loads the entries of bundles onto a GPU: modules, functions and tensor maps, by the CUDA driver.
#pragma once

#include <c10/util/ScopeExit.h>

#include "bundle.h"
#include "launch.h"

namespace fastconv::host {

inline std::string status_words(int status) {
  const char* words = nullptr;
  driver<int(int, const char**)>("cuGetErrorString")(status, &words);
  return c10::str("CUDA error ", status, ", ", words ? words : "which is unknown");
}

// Calls a function of the driver, which returns a status.
template <class... Arguments>
void ask_driver(const std::string& action, const char* name, Arguments... arguments) {
  const int status = driver<int(Arguments...)>(name)(arguments...);
  TORCH_CHECK(status == 0, action, " (", name, "): ", status_words(status));
}

inline Gpu gpu_of(int index) {
  constexpr int kMajor = 75, kMinor = 76, kSms = 16;  // numbers of the driver's attributes
  const std::string action = c10::str("asking for the properties of cuda:", index);
  int device = 0;
  ask_driver(action, "cuDeviceGet", &device, index);
  const auto attribute = [&](int number) {
    int value = 0;
    ask_driver(action, "cuDeviceGetAttribute", &value, number, device);
    return int64_t(value);
  };
  return {attribute(kMajor), attribute(kMinor), attribute(kSms)};
}

// The device's primary context, which PyTorch uses as well. It is never released.
inline void* context_of(int index) {
  static auto& contexts = *new std::map<int, void*>;
  static auto& mutex = *new std::mutex;
  const std::lock_guard lock(mutex);
  void*& context = contexts[index];
  if (!context) {
    const std::string action = c10::str("looking for the CUDA context of cuda:", index);
    int device = 0;
    ask_driver(action, "cuDeviceGet", &device, index);
    ask_driver(action, "cuDevicePrimaryCtxRetain", &context, device);
  }
  return context;
}

// Calls a function within the device's context. It may load modules while a CUDA graph is captured:
// loading is no part of the graph.
template <class Function>
auto in_context(int index, const Function& function) {
  const std::string action = c10::str("entering the CUDA context of cuda:", index);
  ask_driver(action, "cuCtxPushCurrent_v2", context_of(index));
  const auto leave = c10::make_scope_exit([] {
    void* left = nullptr;
    driver<int(void**)>("cuCtxPopCurrent_v2")(&left);
  });
  int mode = 2;  // relaxed; the driver exchanges it for the mode before
  ask_driver(action, "cuThreadExchangeStreamCaptureMode", &mode);
  const auto restore =
      c10::make_scope_exit([&] { driver<int(int*)>("cuThreadExchangeStreamCaptureMode")(&mode); });
  return function();
}

// The handle of a bundle's kernel on a device. Modules are never unloaded. The caller is in the
// device's context, and the only thread that loads.
inline void* function_of(const Bundle& bundle, size_t number, int index) {
  constexpr int kMostDynamicBytes = 8, kStaticBytes = 1;  // the driver's attributes of functions
  constexpr int64_t kDefaultBytes = 48 * 1024;            // shared memory that needs no permission
  static auto& modules = *new std::map<std::pair<const char*, int>, void*>;
  static auto& functions = *new std::map<std::pair<const BundledKernel*, int>, void*>;
  const BundledKernel& kernel = bundle.kernels[number];
  void*& known = functions[{&kernel, index}];
  if (known) return known;
  const std::string action = c10::str("loading ", kernel.name, " onto cuda:", index);
  const std::string_view cubin = bundle.cubins[kernel.cubin];
  void*& module = modules[{cubin.data(), index}];
  if (!module) {
    const std::string copy(cubin);  // aligned, as it is not within the bundle
    ask_driver(action, "cuModuleLoadData", &module, copy.c_str());
  }
  void* function = nullptr;
  ask_driver(action, "cuModuleGetFunction", &function, module, kernel.name.c_str());
  int fixed = 0;
  ask_driver(action, "cuFuncGetAttribute", &fixed, kStaticBytes, function);
  if (kernel.shared_bytes + fixed > kDefaultBytes) {
    ask_driver(action, "cuFuncSetAttribute", function, kMostDynamicBytes, int(kernel.shared_bytes));
  }
  return known = function;
}

// Encodes a tensor map, with a placeholder for the tensor's address.
inline std::array<char, kMapBytes> encoded(const MapParameters& of) {
  const auto placeholder = reinterpret_cast<void*>(uintptr_t(1) << 20);
  constexpr int kNone = 0;  // neither interleaving nor NaNs out of bounds
  const std::string action = "encoding a tensor map";
  const auto rank = uint32_t(of.sizes.size());
  Map map{};
  void* at = &map;
  if (of.is_im2col) {
    ask_driver(action, "cuTensorMapEncodeIm2col", at, of.type, rank, placeholder, of.sizes.data(),
               of.strides.data(), of.lower.data(), of.upper.data(), of.box[0], of.box[1],
               of.element_strides.data(), kNone, of.swizzle, of.promotion, kNone);
  } else {
    ask_driver(action, "cuTensorMapEncodeTiled", at, of.type, rank, placeholder, of.sizes.data(),
               of.strides.data(), of.box.data(), of.element_strides.data(), kNone, of.swizzle,
               of.promotion, kNone);
  }
  return map.bytes;
}

inline Launch loaded_launch(const Bundle& bundle, const BundledLaunch& from, int index) {
  Launch launch{function_of(bundle, from.kernel, index), from.grid, from.block, from.shared_bytes,
                from.early};
  for (const BundledArgument& argument : from.arguments) {
    Argument made{decltype(Argument::kind)(argument.kind), argument.value, {}};
    if (made.kind == Argument::kMap) {
      made.map = encoded(argument.map);
      ++launch.maps;
    }
    launch.arguments.push_back(made);
  }
  return launch;
}

// Raises the error of a launch, unless the thread only lacks the device's context: PyTorch may make
// none in a thread whose memory comes from its cache.
inline void handle_trouble(const std::string& name, int index, int status, bool again) {
  constexpr int kInvalidContext = 201;
  TORCH_CHECK(status == kInvalidContext && !again, "launching ", name, " on cuda:", index, ": ",
              status_words(status));
  ask_driver("entering the CUDA context", "cuCtxSetCurrent", context_of(index));
}

// The entry with its launches, ready on a device.
inline std::shared_ptr<Entry> loaded_entry(const Bundle& bundle, const BundledEntry& from,
                                           int index) {
  static auto& mutex = *new std::mutex;
  const std::lock_guard lock(mutex);
  const auto entry = std::make_shared<Entry>(from.entry);
  if (from.launches.empty()) return entry;
  in_context(index, [&] {
    for (const BundledLaunch& launch : from.launches) {
      entry->launches.push_back(loaded_launch(bundle, launch, index));
    }
  });
  entry->trouble = [&bundle, &from, index](size_t number, int64_t, uintptr_t, int status,
                                           bool again) {
    handle_trouble(bundle.kernels[from.launches[number].kernel].name, index, status, again);
  };
  return entry;
}

}  // namespace fastconv::host
