// What the host twins of sm_90a's instructions ask of the runtime (sm90.cc), and what the scheduler
// asks of them. As runtime.h, it includes no standard headers.
#pragma once
#include "product.h"
#include "runtime.h"

namespace emulator {

// Barriers in shared memory. The emulator keeps their state elsewhere: what lies at the address may
// not be touched by anything else.
void barrier_init(void* barrier, int arrivals);
void barrier_arrive(void* barrier, int expected_bytes);
void barrier_wait(Site site, const void* barrier, unsigned parity);
void barrier_expect(void* barrier, int bytes);

// Takes over the thread's asynchronous copies. They land, and the thread arrives, when a thread
// waits for the barrier and no thread can go on without.
void barrier_arrive_after_copies(Site site, void* barrier);
// The same with one more arrival for the phase to wait for, which is that of the copies.
void barrier_expect_copies(Site site, void* barrier);

// Lands when a thread waits for the barrier and no thread can go on without; until then the target
// is poisoned.
void bulk_load(Site site, void* shared, const void* global, int bytes, void* barrier);

// The target is poisoned until bulk_store_wait or the end of the block, and the source must not
// change until bulk_store_wait_read.
void bulk_store(Site site, void* global, const void* shared, int bytes);
// The same of boxes of tensors. What of a box lies outside of the tensor is zeros, or not stored.
void tensor_load(Site site, void* shared, const Box& box, void* barrier);
void tensor_store(Site site, const Box& box, const void* shared);

void bulk_store_commit();
void bulk_store_wait_read(Site site, int pending);
void bulk_store_wait(Site site);

// Between wgmma and the wgmma_wait that retires it, the matrices must not change; the sums are
// poisoned.
struct Matrix {
  unsigned long long descriptor;
  bool across;  // neighbours in memory are neighbouring rows
};
void wgmma(Site site, Scalar scalar, float* sums, int columns, Matrix left, Matrix right,
           bool accumulate);
// The same with the left matrix in registers: a thread's two rows of it, the registers that hold
// the thread's own part, and what was in them. Those must not change either.
struct Rows {
  const unsigned* registers;
  unsigned held[4];
  unsigned words[2][kRowBytes / 4];
};
void wgmma(Site site, Scalar scalar, float* sums, int columns, const Rows& left, Matrix right,
           bool accumulate);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(Site site, int pending);

// Waits for the 128 threads of a warpgroup. `number` is that of the barrier, which no other
// warpgroup may use.
void warpgroup_barrier(Site site, int number);
// The same for two warpgroups together.
void two_warpgroups_barrier(Site site, int number);

// Notes that the thread has executed an instruction that its warpgroup has to execute in unison.
void in_unison(unsigned long long what);

// For the scheduler: as a block begins, when none of its threads can go on (true: one can now), as
// a thread exits, as the block ends.
void sm90_begin_block();
bool sm90_advance();
void sm90_exit_thread();
void sm90_end_block();

// The barriers and what each lacks, a line each.
const char* sm90_describe_barriers();

}  // namespace emulator
