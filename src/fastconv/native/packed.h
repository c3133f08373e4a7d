// Packed weights that are kept: fastconv.frozen_weights.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "launch.h"

namespace fastconv::host {

// Whoever uses it vouches that weights stay what they are, but for changes that their version
// counters tell. These alone would not do: what is written by way of `.data`, by a CUDA graph, by
// all-gathers of FSDP or by others' kernels changes no counter.

struct Packed {
  std::shared_ptr<const Entry> entry;  // so that no other has its address
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint32_t version;
  at::DataPtr memory;
};

// By entry, address and stream: on another stream, nothing says that it has been packed by now.
using Place = std::tuple<const Entry*, uintptr_t, void*>;

struct Store {
  static constexpr int64_t kMostBytes = int64_t(2) << 30;
  std::map<Place, std::shared_ptr<const Packed>> kept;
  std::mutex mutex;
  std::atomic<int64_t> period = 0;  // the number of a time in which weights are frozen, or 0
  int64_t periods = 0;

  void freeze(bool is_so) {
    decltype(kept) dropped;  // entries may need the interpreter to go: not in the lock
    const std::lock_guard lock(mutex);
    kept.swap(dropped);
    period = is_so ? ++periods : 0;
  }

  std::shared_ptr<const Packed> find(const Place& place, const Tensor& weight, uint32_t version) {
    const std::lock_guard lock(mutex);
    const auto found = kept.find(place);
    if (found == kept.end()) return nullptr;
    const Packed& packed = *found->second;
    const bool same = packed.storage.lock().get() == weight.storage().unsafeGetStorageImpl();
    return same && packed.version == version ? found->second : nullptr;
  }

  // What has been packed, with nothing left to be launched for it.
  void keep(const Place& place, std::shared_ptr<const Packed> packed, int64_t since) {
    decltype(kept) others, all;
    const std::lock_guard lock(mutex);
    if (period != since) return;
    int64_t bytes = packed->entry->scratch_bytes;
    for (const auto& [where, one] : kept) {
      if (where == place || one->storage.expired()) continue;
      others.emplace(where, one);
      bytes += one->entry->scratch_bytes;
    }
    if (bytes <= kMostBytes) others.emplace(place, std::move(packed));
    all.swap(kept);  // to go after the lock
    kept.swap(others);
  }

  static uint32_t version_of(const Tensor& tensor) {
    return tensor.is_inference() ? 0 : uint32_t(tensor._version());
  }
};

inline auto& store = *new Store;  // never destroyed: the driver may be gone by then

inline bool is_captured(void* stream) {
  using IsCapturing = int(void*, int*);
  static const auto is_capturing = driver<IsCapturing>("cuStreamIsCapturing");
  int status = 0;
  return is_capturing(stream, &status) != 0 || status != 0;
}

}  // namespace fastconv::host
