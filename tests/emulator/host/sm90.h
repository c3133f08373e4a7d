// The instructions of sm_90a, for their host twins (sm90.cc, wgmma.cc), and hooks for the
// scheduler. Like runtime.h, this header includes no standard headers.
#pragma once
#include "runtime.h"
#include "thread_mma.h"

namespace emulator {

// mbarriers. The emulator keeps their state elsewhere, and reports any other access of their bytes
// in shared memory.
void barrier_init(void* barrier, int arrivals);
void barrier_arrive(void* barrier, int expected_bytes);
void barrier_wait(Site site, const void* barrier, unsigned parity);
void barrier_expect(void* barrier, int bytes);

// Takes over the thread's asynchronous copies. They land, and the thread arrives, when a thread
// waits for the barrier and no other thread can proceed.
void barrier_arrive_after_copies(Site site, void* barrier);
// Also raises the number of arrivals that the phase waits for by one: the arrival of the copies.
void barrier_expect_copies(Site site, void* barrier);

// The copy lands when a thread waits for the barrier and no other thread can proceed. Until then
// the target is poisoned.
void bulk_load(Site site, void* shared, const void* global, int bytes, void* barrier);

// The target is poisoned until bulk_store_wait or the end of the block, and the source must not
// change until bulk_store_wait_read.
void bulk_store(Site site, void* global, const void* shared, int bytes);
// TMA copies of boxes. Elements outside of the tensor are loaded as zeros, and not stored.
void tensor_load(Site site, void* shared, const Box& box, void* barrier);
void tensor_store(Site site, const Box& box, const void* shared);

void bulk_store_commit();
void bulk_store_wait_read(Site site, int pending);
void bulk_store_wait(Site site);

// Between wgmma and the wgmma_wait that retires it, the matrices must not change, and the
// accumulators are poisoned.
struct Matrix {
  unsigned long long descriptor;
  bool mn_major;  // contiguous along M or N, not along K
};
void wgmma(Site site, Scalar scalar, float* accumulators, int columns, Matrix left, Matrix right,
           bool accumulate);
// The left matrix in registers: the registers of the thread's own part, which must not change
// during the wgmma, what they held when it began, and the thread's two rows.
struct Rows {
  const unsigned* registers;
  unsigned held[4];
  unsigned words[2][kRowBytes / 4];
};
void wgmma(Site site, Scalar scalar, float* accumulators, int columns, const Rows& left,
           Matrix right, bool accumulate);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(Site site, int pending);

// Waits for the 128 threads of a warpgroup at barrier `number`, which no other warpgroup may use.
void warpgroup_barrier(Site site, int number);
// Waits for so many warpgroups together.
void warpgroups_barrier(Site site, int number, int warpgroups);

// Records an instruction that all threads of a warpgroup must execute together.
void in_unison(unsigned long long what);

// The scheduler calls these when a block begins, when none of its threads can proceed (it returns
// whether one can after that), when a thread exits, and when the block ends.
void sm90_begin_block();
bool sm90_advance();
void sm90_exit_thread();
void sm90_end_block();

// One line for each barrier, with the arrivals and bytes that it lacks.
const char* sm90_describe_barriers();

}  // namespace emulator
