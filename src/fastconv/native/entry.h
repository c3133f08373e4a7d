// The table of entries: how calls of one form are computed. Each entry is made once.
#pragma once

#include <pthread.h>

#include <bit>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <unordered_map>

#include "call.h"

namespace fastconv::host {

constexpr size_t kMapBytes = 128;  // the size of a CUtensorMap
constexpr size_t kTensors = 9;     // the most tensors of a convolution's pass, with workspace

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

// The launches of an entry, and the workspace that they share.
struct Launches {
  int64_t scratch_bytes = 0;
  std::vector<Launch> launches{};
  // Raises an error for a launch that failed, or removes its cause. Arguments: the launch's index,
  // that of the argument whose tensor map could not be made (or -1) and its address, the driver's
  // error code, and whether the launch has been repeated.
  std::function<void(size_t, int64_t, uintptr_t, int, bool)> trouble{};
};

struct Entry : Launches {
  std::vector<int64_t> shape;
  at::MemoryFormat format;
  int64_t bias_elements;             // elements of the bias's gradient
  std::array<bool, 2> copied;        // which of the two tensors have to be made contiguous first
  std::array<int64_t, 2> regions{};  // where regions of the workspace, which are tensors, begin
  size_t packs;  // the first launches, which pack the weight into a workspace that the others read
  int64_t shares = 0;  // of statistics that the launches leave: see Plan in kernels/family.py
  // Computes the call if it needs more than launches; otherwise empty. Arguments: the call, its
  // precision, the result, and the bias's gradient.
  std::function<void(const Call&, Precision, const Tensor&, const Tensor&)> fill;
};

using Key = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Key& key) const {
    size_t hash = 14695981039346656037ull;
    for (const int64_t number : key) hash = (hash ^ size_t(number)) * 1099511628211ull;
    return hash ^ (hash >> 32);
  }
};

// A portable key says nothing of a GPU's index: bundles (bundle.h) have such keys.
inline void append(Key& key, const Tensor& tensor, bool portable) {
  if (!tensor.defined()) {
    key.push_back(-1);
    return;
  }
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
  key.push_back(int64_t(tensor.scalar_type()));
  const auto device = tensor.device();
  key.push_back(int64_t(device.type()) << 32 | (portable ? 0 : uint8_t(device.index())));
}

inline uintptr_t address_of(const Tensor& tensor) {
  return tensor.defined() ? uintptr_t(tensor.const_data_ptr()) : 0;
}

// The alignment that plans may assume: see Operands in kernels/family.py.
inline bool aligned(const Tensor& tensor) { return address_of(tensor) % 16 == 0; }
inline bool aligned_bias(const Tensor& bias) { return address_of(bias) % 4 == 0; }

inline Key key_of(const Call& call, Precision precision, bool portable = false) {
  const Geometry& g = call.geometry;
  Key key;
  key.reserve(64);
  // The key has the alignment of each tensor, because that of a tensor to be copied is irrelevant.
  key.insert(key.end(), {call.pass, precision, aligned(call.first), aligned(call.second),
                         aligned_bias(call.third), call.bias_grad,
                         call.format ? int64_t(*call.format) : -1, g.groups, int64_t(g.axes())});
  key.insert(key.end(), call.size.begin(), call.size.end());
  key.insert(key.end(), g.stride.begin(), g.stride.end());
  key.insert(key.end(), g.padding.begin(), g.padding.end());
  key.insert(key.end(), g.dilation.begin(), g.dilation.end());
  append(key, call.first, portable);
  append(key, call.second, portable);
  append(key, call.third, portable);
  if (call.statistics) key.push_back(call.statistics);  // no other key has this length
  if (has_epilogue(call.pass)) {
    key.insert(key.end(),
               {call.activation, std::bit_cast<int64_t>(call.slope), aligned(call.residual)});
    append(key, call.residual, portable);
  }
  return key;
}

// The entries of one kind of call.
template <class Made>
struct Table {
  static constexpr size_t kMost = 4096;  // entries, after which the table is cleared
  using Entries = std::unordered_map<Key, std::shared_ptr<const Made>, Hash>;
  Entries entries;
  std::shared_mutex mutex;

  // Returns the entry of a key, which `make` makes if the table has none.
  template <class Make>
  std::shared_ptr<const Made> find(Key key, const Make& make);

  // Drops all entries: the next call of each form makes its entry anew.
  void forget() {
    Entries dropped;  // destroyed after the lock is released: an entry may hold Python objects
    const std::unique_lock lock(mutex);
    entries.swap(dropped);
  }
};

template <class Made>
inline auto& table = *new Table<Made>;  // never destroyed: threads may outlive main

template <class Made>
template <class Make>
std::shared_ptr<const Made> Table<Made>::find(Key key, const Make& make) {
  // The lock is held across a fork: another thread, which the child lacks, might hold it otherwise.
  static const int forks [[maybe_unused]] =
      pthread_atfork([] { table<Made>.mutex.lock(); }, [] { table<Made>.mutex.unlock(); },
                     [] { new (&table<Made>.mutex) std::shared_mutex; });
  {
    const std::shared_lock lock(mutex);
    if (const auto found = entries.find(key); found != entries.end()) return found->second;
  }
  auto entry = make();
  Entries dropped;
  const std::unique_lock lock(mutex);
  if (entries.size() >= kMost) entries.swap(dropped);
  entries.emplace(std::move(key), entry);
  return entry;
}

// Makes the entry for all calls of a call's form.
inline std::function<std::shared_ptr<const Entry>(const Call&, Precision)> make_entry;

inline std::shared_ptr<const Entry> find(const Call& call, Precision precision) {
  return table<Entry>.find(key_of(call, precision), [&] { return make_entry(call, precision); });
}

}  // namespace fastconv::host
