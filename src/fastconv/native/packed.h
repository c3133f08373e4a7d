// The cache of packed weights: fastconv.frozen_weights.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "launch.h"

namespace fastconv::host {

// The user guarantees that weights do not change except by operations that their version counters
// record. The counters alone would not suffice: writes to `.data`, and those by CUDA graphs, FSDP's
// all-gathers or other libraries' kernels, change no counter.

struct Packed {
  std::shared_ptr<const Entry> entry;  // held so that no other entry gets its address
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint32_t version;
  at::DataPtr memory;  // the workspace with the packed weight
};

// The key of a packed weight: entry, address and stream. On another stream, the kernel that packs
// the weight might not have run yet.
using Place = std::tuple<const Entry*, uintptr_t, void*>;

struct Store {
  static constexpr int64_t kMostBytes = int64_t(2) << 30;  // bound on the memory of all of them
  std::map<Place, std::shared_ptr<const Packed>> kept;
  std::mutex mutex;
  std::atomic<int64_t> period = 0;  // the number of the current frozen_weights context, or 0
  int64_t periods = 0;              // the number of contexts so far

  void freeze(bool is_so) {
    decltype(kept) dropped;  // destroyed after the lock is released: entries may need the GIL
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

  // Caches a weight for which all packing launches have been made, if the period is the same.
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
    all.swap(kept);  // destroyed after the lock is released
    kept.swap(others);
  }

  static uint32_t version_of(const Tensor& tensor) {
    return tensor.is_inference() ? 0 : uint32_t(tensor._version());
  }
};

inline auto& store = *new Store;  // never destroyed: the driver may be unloaded at exit

inline bool is_captured(void* stream) {
  using IsCapturing = int(void*, int*);
  static const auto is_capturing = driver<IsCapturing>("cuStreamIsCapturing");
  int status = 0;
  return is_capturing(stream, &status) != 0 || status != 0;
}

}  // namespace fastconv::host
