// mbarriers, bulk copies and TMA copies of sm_90a. Each takes as long as hardware might take: it
// completes when no thread can proceed without it. It is an error if its operands change before
// that.
#include "sm90.h"

#include <sanitizer/asan_interface.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "in_flight.h"

namespace emulator {

namespace {

constexpr int kBarrierBytes = 8;
constexpr int kMaxCount = (1 << 20) - 1;  // an mbarrier's limit, for arrivals and for bytes

// A contiguous piece of global memory, copied to or from an operation's data at `offset`.
struct Piece {
  unsigned char* global;
  size_t offset;
  size_t bytes;
};

struct Load {
  Site site;
  unsigned char* target;
  std::vector<Piece> sources;  // empty for cp.async, whose sources are not recorded
  std::vector<unsigned char> data;
  bool rounds = false;  // rounds to TF32 when it lands
};

// An arrival at an mbarrier that happens when a thread's cp.async copies have landed.
struct Arrival {
  Site site;
  std::vector<Load> copies;
};

struct Barrier {
  int arrivals;  // of each phase
  int missing;   // arrivals that this phase lacks
  int expected_bytes = 0;
  unsigned phase = 0;
  int waiting = 0;
  std::vector<Load> loads = {};
  std::vector<Arrival> late = {};
};

struct WarpgroupBarrier {
  int warpgroup;
  int arrived = 0;
  unsigned generation = 0;
};

struct Store {
  Site site;
  std::vector<Piece> targets;
  const unsigned char* source;
  std::vector<unsigned char> data;
  int group;
  bool has_read = false;
};

struct Thread {
  std::vector<Store> stores;
  int store_groups = 0;
};

struct Block {
  std::map<unsigned, Barrier> barriers;  // by address in shared memory
  std::map<int, WarpgroupBarrier> warpgroup_barriers;
  std::vector<Thread> threads;
};
Block cluster[kMostClusterBlocks];

// The running block and thread.
Block& block() { return cluster[cluster_rank]; }
Thread& self() { return block().threads[threadIdx.x]; }

bool is_multiple(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Makes ASan report if any of the memory must not be accessed.
void touch(const void* memory, int bytes) {
  const void* const bad = __asan_region_is_poisoned(const_cast<void*>(memory), bytes);
  if (bad) static_cast<void>(*static_cast<const volatile unsigned char*>(bad));
}

unsigned shared_offset(const char* what, const void* address) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(address) - shared.begin;
  if (offset < 0 || offset >= ptrdiff_t(shared.bytes)) {
    fail("%s %p does not lie in shared memory", what, address);
  }
  return static_cast<unsigned>(offset);
}

Barrier& find_barrier(const void* address) {
  const unsigned offset = shared_offset("the barrier", address);
  const auto found = block().barriers.find(offset);
  if (found == block().barriers.end()) {
    fail("the barrier at byte %u of shared memory is not initialised", offset);
  }
  return found->second;
}

int bytes_under_way(const Barrier& barrier) {
  int bytes = 0;
  for (const Load& load : barrier.loads) bytes += static_cast<int>(load.data.size());
  return bytes;
}

// Completes the phase, if nothing is missing.
void settle(Barrier& barrier) {
  if (barrier.missing > 0) return;
  if (bytes_under_way(barrier) > barrier.expected_bytes) {
    fail("bulk copies of %d bytes, but the barrier expects only %d", bytes_under_way(barrier),
         barrier.expected_bytes);
  }
  if (barrier.expected_bytes > 0) return;
  barrier.missing = barrier.arrivals;
  ++barrier.phase;
}

// Rounds to nearest, ties to even, denormals included, and maps every NaN to one, as an H200 does.
void round_to_tf32(unsigned char* data, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 4) {
    uint32_t bits;
    memcpy(&bits, &data[i], 4);
    bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fffe000
                                            : (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&data[i], &bits, 4);
  }
}

void land(Barrier& barrier, const Load& load) {
  const Site& site = load.site;
  for (const Piece& piece : load.sources) {
    if (memcmp(piece.global, load.data.data() + piece.offset, piece.bytes)) {
      fail("global memory changed during a %s, %s:%d", site.function, site.file, site.line);
    }
  }
  if (!is_poison(load.target, load.data.size())) {
    fail("shared memory was written during a %s, %s:%d", site.function, site.file, site.line);
  }
  memcpy(load.target, load.data.data(), load.data.size());
  if (load.rounds) round_to_tf32(load.target, load.data.size());
  barrier.expected_bytes -= static_cast<int>(load.data.size());
}

// The pieces of a TMA box that lie in the tensor.
std::vector<Piece> checked_pieces(const Box& box, const void* shared, int bytes) {
  const int alignment = box_alignment(*box.map);
  if (!is_multiple(shared, alignment)) {
    fail("%s: address in shared memory, not a multiple of %d", box.function, alignment);
  }
  shared_offset(box.function, shared);
  touch(shared, bytes);
  std::vector<Piece> pieces;
  visit_pieces(
      box,
      [](void* context, unsigned char* global, int offset, int bytes) {
        touch(global, bytes);
        static_cast<std::vector<Piece>*>(context)->push_back(
            {global, size_t(offset), size_t(bytes)});
      },
      &pieces);
  return pieces;
}

std::vector<unsigned char> checked_copy(const char* what, const void* shared, const void* global,
                                        const void* source, int bytes) {
  if (bytes <= 0 || bytes % 16) fail("%s of %d bytes, not a multiple of 16", what, bytes);
  if (!is_multiple(shared, 16)) fail("%s: misaligned address in shared memory", what);
  if (!is_multiple(global, 16)) fail("%s: misaligned address in global memory", what);
  if (!is_near_tensor(global)) fail("%s: %p does not lie in a tensor", what, global);
  shared_offset(what, shared);
  touch(shared, bytes);
  touch(global, bytes);
  const auto* const begin = static_cast<const unsigned char*>(source);
  return {begin, begin + bytes};
}

void finish_reading(Store& store) {
  if (store.has_read) return;
  if (memcmp(store.source, store.data.data(), store.data.size())) {
    fail("shared memory changed during a %s, %s:%d", store.site.function, store.site.file,
         store.site.line);
  }
  store.has_read = true;
}

void finish_writing(const Store& store) {
  for (const Piece& piece : store.targets) {
    memcpy(piece.global, store.data.data() + piece.offset, piece.bytes);
  }
}

// Poisons the targets until finish_writing.
void start_writing(Store store) {
  for (const Piece& piece : store.targets) memset(piece.global, kPoison, piece.bytes);
  self().stores.push_back(std::move(store));
}

// Poisons the target until sm90_advance.
void start_loading(Barrier& barrier, Load load) {
  memset(load.target, kPoison, load.data.size());
  barrier.loads.push_back(std::move(load));
  settle(barrier);
}

}  // namespace

void barrier_init(void* barrier, int arrivals) {
  const unsigned offset = shared_offset("the barrier", barrier);
  if (!is_multiple(barrier, kBarrierBytes)) fail("misaligned barrier at byte %u", offset);
  if (arrivals < 1 || arrivals > kMaxCount) fail("a barrier for %d arrivals", arrivals);
  if (block().barriers.count(offset)) fail("the barrier at byte %u is initialised twice", offset);
  touch(barrier, kBarrierBytes);
  __asan_poison_memory_region(barrier, kBarrierBytes);
  block().barriers[offset] = {arrivals, arrivals};
}

void barrier_arrive(void* address, int expected_bytes) {
  Barrier& barrier = find_barrier(address);
  if (barrier.missing == 0) fail("more than the barrier's %d arrivals", barrier.arrivals);
  if (expected_bytes < 0 || expected_bytes > kMaxCount - barrier.expected_bytes) {
    fail("a barrier cannot expect %d bytes more", expected_bytes);
  }
  --barrier.missing;
  barrier.expected_bytes += expected_bytes;
  settle(barrier);
}

void barrier_expect(void* address, int bytes) {
  Barrier& barrier = find_barrier(address);
  if (barrier.missing == 0) fail("the barrier has all arrivals: it cannot expect %d bytes", bytes);
  if (bytes < 0 || bytes > kMaxCount - barrier.expected_bytes) {
    fail("a barrier cannot expect %d bytes more", bytes);
  }
  barrier.expected_bytes += bytes;
}

void barrier_expect_copies(Site site, void* address) {
  Barrier& barrier = find_barrier(address);
  if (barrier.missing == 0) fail("the barrier has all arrivals: it cannot wait for copies");
  ++barrier.missing;  // the arrival of the copies
  barrier_arrive_after_copies(site, address);
}

void barrier_arrive_after_copies(Site site, void* address) {
  Barrier& barrier = find_barrier(address);
  Arrival arrival = {site, {}};
  take_copies(
      [](void* context, void* shared, const void* data, int bytes) {
        auto& taken = *static_cast<Arrival*>(context);
        const auto* const begin = static_cast<const unsigned char*>(data);
        auto* const target = static_cast<unsigned char*>(shared);
        taken.copies.push_back({taken.site, target, {}, {begin, begin + bytes}});
      },
      &arrival);
  if (arrival.copies.empty()) {
    barrier_arrive(address, 0);
  } else {
    barrier.late.push_back(arrival);
  }
}

void barrier_wait(Site site, const void* address, unsigned parity) {
  Barrier& barrier = find_barrier(address);
  if (parity > 1) fail("%u is not a parity", parity);
  ++barrier.waiting;
  wait(site, [&] { return barrier.phase % 2 != parity; });
  --barrier.waiting;
}

void bulk_load(Site site, void* shared, const void* global, int bytes, void* address) {
  Barrier& barrier = find_barrier(address);
  auto* const source = static_cast<unsigned char*>(const_cast<void*>(global));
  std::vector<unsigned char> data = checked_copy("bulk_load", shared, global, global, bytes);
  auto* const target = static_cast<unsigned char*>(shared);
  start_loading(barrier, {site, target, {{source, 0, data.size()}}, std::move(data)});
}

void tensor_load(Site site, void* shared, const Box& box, void* address) {
  Barrier& barrier = find_barrier(address);
  std::vector<unsigned char> data(box_bytes(box));
  std::vector<Piece> pieces = checked_pieces(box, shared, static_cast<int>(data.size()));
  for (const Piece& piece : pieces) memcpy(&data[piece.offset], piece.global, piece.bytes);
  auto* const target = static_cast<unsigned char*>(shared);
  start_loading(barrier, {site, target, std::move(pieces), std::move(data), box.map->rounds});
}

void bulk_store(Site site, void* global, const void* shared, int bytes) {
  auto* const target = static_cast<unsigned char*>(global);
  const auto* const source = static_cast<const unsigned char*>(shared);
  std::vector<unsigned char> data = checked_copy("bulk_store", shared, global, shared, bytes);
  start_writing({site, {{target, 0, data.size()}}, source, std::move(data), self().store_groups});
}

void tensor_store(Site site, const Box& box, const void* shared) {
  const TensorMap& map = *box.map;
  for (int i = 0; i < map.rank; ++i) {
    if (map.steps[i] != 1) fail("tensor_store by a map with element strides");
    if (box.at[i] < 0) fail("tensor_store: coordinate %d is %d: illegal instruction", i, box.at[i]);
  }
  if (map.sizes[0] * map.element_bytes % 16) {
    fail(
        "tensor_store to rows of %lld bytes: how hardware stores an end within 16 bytes is not "
        "documented",
        map.sizes[0] * map.element_bytes);
  }
  const int bytes = box_bytes(box);
  std::vector<Piece> pieces = checked_pieces(box, shared, bytes);
  const auto* const source = static_cast<const unsigned char*>(shared);
  start_writing({site, std::move(pieces), source, {source, source + bytes}, self().store_groups});
}

void bulk_store_commit() { ++self().store_groups; }

void bulk_store_wait_read(Site site, int pending) {
  Thread& thread = self();
  const size_t done = count_done(thread.stores, thread.store_groups, pending);
  if (done > 0 && !thread.stores[done - 1].has_read) wait_long(site);
  for (size_t i = 0; i < done; ++i) finish_reading(thread.stores[i]);
}

void bulk_store_wait(Site site) {
  bulk_store_wait_read(site, 0);
  Thread& thread = self();
  const size_t done = count_done(thread.stores, thread.store_groups, 0);
  for (size_t i = 0; i < done; ++i) finish_writing(thread.stores[i]);
  thread.stores.erase(thread.stores.begin(), thread.stores.begin() + done);
}

namespace {

void arrive_and_wait(Site site, WarpgroupBarrier& barrier, int threads) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  wait(site, [&barrier, generation] { return barrier.generation != generation; });
}

}  // namespace

void warpgroup_barrier(Site site, int number) {
  WarpgroupBarrier& barrier = block().warpgroup_barriers[number];
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (barrier.arrived == 0) barrier.warpgroup = warpgroup;
  if (barrier.warpgroup != warpgroup) {
    fail("warpgroup %d waits at barrier %d of warpgroup %d", warpgroup, number, barrier.warpgroup);
  }
  arrive_and_wait(site, barrier, kWarpgroup);
}

void warpgroups_barrier(Site site, int number, int warpgroups) {
  arrive_and_wait(site, block().warpgroup_barriers[number], warpgroups * kWarpgroup);
}

void sm90_begin_block() {
  for (const auto& entry : block().barriers) {
    __asan_unpoison_memory_region(shared.begin + entry.first, kBarrierBytes);
  }
  block() = {};
  block().threads.resize(blockDim.x);
  wgmma_begin_block();
}

// Lands the copies that late arrivals wait for, and arrives.
static void arrive_late(unsigned address, Barrier& barrier) {
  std::vector<Arrival> arrivals;
  arrivals.swap(barrier.late);
  for (const Arrival& arrival : arrivals) {
    for (const Load& copy : arrival.copies) {
      if (!is_poison(copy.target, copy.data.size())) {
        fail("shared memory was written during a copy_async, %s:%d", copy.site.file,
             copy.site.line);
      }
      memcpy(copy.target, copy.data.data(), copy.data.size());
    }
    barrier_arrive(shared.begin + address, 0);
  }
}

bool sm90_advance() {
  bool any = false;
  for (auto& entry : block().barriers) {
    Barrier& barrier = entry.second;
    if (barrier.waiting && !barrier.late.empty()) {
      arrive_late(entry.first, barrier);
      any = true;
    }
    if (!barrier.waiting || barrier.missing || barrier.loads.empty()) continue;
    for (const Load& load : barrier.loads) land(barrier, load);
    barrier.loads.clear();
    settle(barrier);
    any = true;
  }
  return any;
}

void sm90_exit_thread() {
  wgmma_exit_thread();
  const Thread& thread = self();
  for (const Store& store : thread.stores) {
    if (!store.has_read) fail("the thread exits without waiting for its bulk stores");
  }
}

void sm90_end_block() {
  for (const auto& entry : block().barriers) {
    for (const Load& load : entry.second.loads) {
      fail("the block ends without waiting for %s, %s:%d", load.site.function, load.site.file,
           load.site.line);
    }
    for (const Arrival& arrival : entry.second.late) {
      fail("the block ends before the copies of %s, %s:%d", arrival.site.function,
           arrival.site.file, arrival.site.line);
    }
  }
  for (const Thread& thread : block().threads) {
    for (const Store& store : thread.stores) finish_writing(store);
  }
  wgmma_end_block();
}

const char* sm90_describe_barriers() {
  static std::string text;
  text.clear();
  for (const auto& entry : block().barriers) {
    const Barrier& barrier = entry.second;
    text += "\n  barrier at byte " + std::to_string(entry.first) + " of shared memory: phase " +
            std::to_string(barrier.phase) + " lacks " + std::to_string(barrier.missing) + " of " +
            std::to_string(barrier.arrivals) + " arrivals and " +
            std::to_string(barrier.expected_bytes) + " bytes";
  }
  return text.c_str();
}

}  // namespace emulator
