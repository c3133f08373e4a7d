// The table of entries: how calls of one form are computed. Python makes each entry, once.
#pragma once

#include <pthread.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <bit>
#include <memory>
#include <shared_mutex>
#include <unordered_map>

#include "call.h"

namespace fastconv::host {

namespace py = pybind11;

constexpr size_t kMapBytes = 128;  // the size of a CUtensorMap

struct Argument {
  enum { kTensor, kInteger, kMap } kind;
  int64_t value;  // the integer itself, or the index of the tensor
  std::array<char, kMapBytes> map;
};

struct Launch {
  void* function;
  std::array<unsigned, 3> grid;
  unsigned block, shared_bytes;
  bool early;  // programmatic dependent launch: it may begin before the previous one has ended
  std::vector<Argument> arguments{};
  size_t maps = 0;  // the number of tensor maps among the arguments
};

struct Entry {
  std::vector<int64_t> shape;
  at::MemoryFormat format;
  int64_t bias_elements;       // elements of the bias's gradient
  std::array<bool, 2> copied;  // which of the two tensors have to be made contiguous first
  int64_t scratch_bytes;
  std::vector<Launch> launches;
  size_t packs;  // the first launches, which pack the weight into a workspace that the others read
  py::object fill;     // computes the call if it needs more than launches, otherwise None
  py::object trouble;  // raises an error for a launch that failed, or removes its cause
};

using Key = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Key& key) const {
    size_t hash = 14695981039346656037ull;
    for (const int64_t number : key) hash = (hash ^ size_t(number)) * 1099511628211ull;
    return hash ^ (hash >> 32);
  }
};

inline void append(Key& key, const Tensor& tensor) {
  if (!tensor.defined()) {
    key.push_back(-1);
    return;
  }
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
  key.push_back(int64_t(tensor.scalar_type()));
  key.push_back(int64_t(tensor.device().type()) << 32 | uint8_t(tensor.device().index()));
}

inline uintptr_t address_of(const Tensor& tensor) {
  return tensor.defined() ? uintptr_t(tensor.const_data_ptr()) : 0;
}

// The alignment that plans may assume: see Operands in kernels/family.py.
inline bool aligned(const Tensor& tensor) { return address_of(tensor) % 16 == 0; }
inline bool aligned_bias(const Tensor& bias) { return address_of(bias) % 4 == 0; }

inline Key key_of(const Call& call, Precision precision) {
  const Geometry& g = call.geometry;
  Key key;
  key.reserve(64);
  // The key has the alignment of each tensor, because that of a tensor to be copied is irrelevant.
  key.insert(key.end(), {call.pass, precision, aligned(call.first), aligned(call.second),
                         aligned_bias(call.third), call.bias_grad, call.size[0], call.size[1],
                         call.format ? int64_t(*call.format) : -1, g.groups});
  key.insert(key.end(), g.stride.begin(), g.stride.end());
  key.insert(key.end(), g.padding.begin(), g.padding.end());
  key.insert(key.end(), g.dilation.begin(), g.dilation.end());
  append(key, call.first);
  append(key, call.second);
  append(key, call.third);
  if (call.pass == kFused) {
    key.insert(key.end(),
               {call.activation, std::bit_cast<int64_t>(call.slope), aligned(call.residual)});
    append(key, call.residual);
  }
  return key;
}

inline PyObject* make_entry = nullptr;  // the function of ops/entries.py, never released

// Calls Python from any thread. A Python error is rethrown in a form that threads of autograd can
// pass on.
template <class Function>
auto in_python(const Function& function) {
  py::gil_scoped_acquire gil;
  try {
    return function();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error persistent;
    persistent.persist();
    throw persistent;
  }
}

inline py::object wrapped(const Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

inline Argument argument_of(const py::tuple& description) {
  Argument argument{Argument::kTensor, 0, {}};
  const auto kind = description[0].cast<std::string>();
  if (kind == "map") {
    argument.kind = Argument::kMap;
    const auto bytes = description[1].cast<std::string>();
    TORCH_INTERNAL_ASSERT(bytes.size() == kMapBytes);
    std::copy(bytes.begin(), bytes.end(), argument.map.begin());
    argument.value = description[2].cast<int64_t>();
    return argument;
  }
  if (kind == "int") argument.kind = Argument::kInteger;
  argument.value = description[1].cast<int64_t>();
  return argument;
}

inline Launch launch_of(const py::tuple& description) {
  Launch launch{reinterpret_cast<void*>(description[0].cast<uintptr_t>()),
                description[1].cast<std::array<unsigned, 3>>(), description[2].cast<unsigned>(),
                description[3].cast<unsigned>(), description[4].cast<bool>()};
  for (const auto& argument : description[5]) {
    launch.arguments.push_back(argument_of(py::reinterpret_borrow<py::tuple>(argument)));
    launch.maps += launch.arguments.back().kind == Argument::kMap;
  }
  return launch;
}

inline std::shared_ptr<const Entry> entry_of(const py::object& made) {
  const auto entry = std::shared_ptr<Entry>(new Entry, [](Entry* entry) {
    py::gil_scoped_acquire gil;  // an entry holds Python objects
    delete entry;
  });
  entry->shape = made.attr("shape").cast<std::vector<int64_t>>();
  entry->format = made.attr("channels_last").cast<bool>() ? at::MemoryFormat::ChannelsLast
                                                          : at::MemoryFormat::Contiguous;
  entry->bias_elements = made.attr("bias_elements").cast<int64_t>();
  entry->copied = made.attr("copied").cast<std::array<bool, 2>>();
  entry->scratch_bytes = made.attr("scratch_bytes").cast<int64_t>();
  for (const auto& launch : made.attr("launches")) {
    entry->launches.push_back(launch_of(py::reinterpret_borrow<py::tuple>(launch)));
  }
  entry->packs = made.attr("packs").cast<size_t>();
  entry->fill = made.attr("fill");
  entry->trouble = made.attr("trouble");
  return entry;
}

// The operator's arguments, in the order of its schema.
inline py::tuple arguments_of(const Call& call, const py::object& precision) {
  const Geometry& g = call.geometry;
  const auto geometry = py::make_tuple(g.stride, g.padding, g.dilation, g.groups, precision);
  const auto both = py::make_tuple(wrapped(call.first), wrapped(call.second));
  const auto format = call.format ? py::cast(*call.format) : py::none();
  if (call.pass == kForward) return both + py::make_tuple(wrapped(call.third)) + geometry;
  if (call.pass == kFused) {
    return both + py::make_tuple(wrapped(call.third), wrapped(call.residual)) + geometry +
           py::make_tuple(kActivations[call.activation], call.slope);
  }
  const auto common = both + py::make_tuple(call.size) + geometry;
  if (call.pass == kInputGrad) return common + py::make_tuple(format);
  return common + py::make_tuple(call.bias_grad, format);
}

inline std::shared_ptr<const Entry> new_entry(const Call& call, Precision precision) {
  return in_python([&] {
    const py::object answer = py::handle(make_entry)(
        kOperators[call.pass], *arguments_of(call, py::str(kPrecisions[precision])));
    return entry_of(answer);
  });
}

inline std::shared_ptr<const Entry> find(const Call& call, Precision precision) {
  using Table = std::unordered_map<Key, std::shared_ptr<const Entry>, Hash>;
  constexpr size_t kMost = 4096;  // entries, after which the table is cleared
  static auto& table = *new Table;
  static auto& mutex = *new std::shared_mutex;  // never destroyed: threads may outlive main
  // The lock is held across a fork: another thread, which the child lacks, might hold it otherwise.
  static const int forks [[maybe_unused]] = pthread_atfork(
      [] { mutex.lock(); }, [] { mutex.unlock(); }, [] { new (&mutex) std::shared_mutex; });
  Key key = key_of(call, precision);
  {
    const std::shared_lock lock(mutex);
    if (const auto found = table.find(key); found != table.end()) return found->second;
  }
  auto entry = new_entry(call, precision);
  Table dropped;  // destroyed after the lock is released, because its entries need the GIL
  const std::unique_lock lock(mutex);
  if (table.size() >= kMost) table.swap(dropped);
  table.emplace(std::move(key), entry);
  return entry;
}

}  // namespace fastconv::host
