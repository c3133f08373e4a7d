// Helpers for the asynchronous instructions of sm_90a (sm90.cc, wgmma.cc).
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "runtime.h"

namespace emulator {

constexpr int kWarpgroup = 128;

// Whether nothing was written to poisoned memory.
inline bool is_poison(const void* memory, size_t bytes) {
  const auto* const begin = static_cast<const unsigned char*>(memory);
  return std::all_of(begin, begin + bytes, [](unsigned char byte) { return byte == kPoison; });
}

// How many of a thread's operations, in the order of their groups, are complete when at most
// `pending` groups are in flight.
template <class Operation>
size_t count_done(const std::vector<Operation>& operations, int groups, int pending) {
  size_t done = 0;
  while (done < operations.size() && operations[done].group < groups - pending) ++done;
  return done;
}

// sm90.cc calls these when a block begins, when a thread exits, and when the block ends.
void wgmma_begin_block();
void wgmma_exit_thread();
void wgmma_end_block();

}  // namespace emulator
