// PTX of sm_90a, one function for each instruction; wgmma.cuh has wgmma itself. The CPU emulator
// has a host version of this file.
#pragma once
#include "device/sm80.cuh"

namespace fastconv {

// --- mbarrier: barriers in shared memory ---------------------------------------------------------
// An mbarrier's phase is complete when the arrivals that it was initialised for have happened and
// the bytes that it expects have been copied; then the next phase begins. Phases count from 0.

using Barrier = unsigned long long;

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Goes between barrier_init and __syncthreads: makes the barriers visible to asynchronous copies.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives. The arrival may overtake this thread's loads from shared memory unless their results
// have been used; an asynchronous copy that waits for the barrier would then overwrite what they
// read.
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and makes the phase wait for this many bytes of bulk or TMA copies.
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Makes the phase wait for this many bytes, some of which may have been copied already. The phase
// must still lack an arrival that comes after this.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Makes the phase wait for all cp.async of this thread so far. The phase must still lack an arrival
// that comes after this.
__device__ __forceinline__ void barrier_expect_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives when all cp.async of this thread so far are complete. Threads that wait for the phase see
// what was copied, but not this thread's own stores.
__device__ __forceinline__ void barrier_arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Waits until the phase with this parity (its number modulo 2) is complete. The barrier is in that
// phase or in the one after it.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
  unsigned complete;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!complete);
}

// True for one lane of the warp; all lanes must call it. With elect.sync, the compiler emits one
// bulk copy whose operands come from that lane. A condition such as lane == 0 makes it emit a loop.
__device__ __forceinline__ bool is_elected() {
  unsigned elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// --- Bulk copies: one thread moves many contiguous bytes -----------------------------------------
// Addresses and sizes are multiples of 16.

// Copies from global to shared memory and counts the bytes at `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Copies from shared to global memory. It sees ordinary stores to shared memory only if
// fence_async_shared comes between.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Commits this thread's bulk stores since the last commit as one group.
__device__ __forceinline__ void bulk_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this thread's latest kPending groups have read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's bulk stores are complete.
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes this thread's ordinary accesses of shared memory visible to wgmma and bulk copies (the
// async proxy).
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- TMA: one thread moves a box of a tensor -----------------------------------------------------
// Coordinates come innermost first, and the innermost is a multiple of 16 bytes. They may lie
// outside of the tensor: loads give zeros there, and stores write nothing. Coordinates of a store
// may not be negative, and its rows are whole multiples of 16 bytes (an H200 reports an illegal
// instruction for others). A box is dense in shared memory, at a multiple of 128 bytes, or of 8 n
// bytes if its swizzle spans n bytes.

// A tensor map that the CUDA driver has encoded. It is a kernel parameter of type `const
// __grid_constant__ TensorMap`.
struct __align__(64) TensorMap {
  unsigned long long words[16];
};

// Prefetches the tensor map before the first copy needs it.
__device__ __forceinline__ void tensor_map_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads a box to shared memory and counts its bytes at `barrier`, those outside of the tensor
// included.
template <int kRank>
__device__ __forceinline__ void tensor_load(void* shared, const TensorMap& map,
                                            const int (&at)[kRank], Barrier* barrier) {
  static_assert(kRank >= 2 && kRank <= 5, "what kernels use");
  if constexpr (kRank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1])
        : "memory");
  } else if constexpr (kRank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2])
        : "memory");
  } else if constexpr (kRank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
        "r"(at[4])
        : "memory");
  }
}

// Loads a box of an im2col tensor map. `at` is the first pixel (channel, column, row, image),
// within the bounding box; `offset` (column, row; 0 to 255) is added to every pixel, and may lead
// out of it. Volumes have planes after rows, and offsets from 0 to 31.
__device__ __forceinline__ void im2col_load(void* shared, const TensorMap& map, const int (&at)[4],
                                            const int (&offset)[2], Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
      "h"(static_cast<short>(offset[0])), "h"(static_cast<short>(offset[1]))
      : "memory");
}
__device__ __forceinline__ void im2col_load(void* shared, const TensorMap& map, const int (&at)[5],
                                            const int (&offset)[3], Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
      "r"(at[4]), "h"(static_cast<short>(offset[0])), "h"(static_cast<short>(offset[1])),
      "h"(static_cast<short>(offset[2]))
      : "memory");
}

// Stores a box from shared memory. It needs the same fence, commit and wait as bulk_store.
template <int kRank>
__device__ __forceinline__ void tensor_store(const TensorMap& map, const int (&at)[kRank],
                                             const void* shared) {
  static_assert(kRank >= 2 && kRank <= 5, "what kernels use");
  if constexpr (kRank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
        "r"(shared_address(shared)), "r"(at[0]), "r"(at[1])
        : "memory");
  } else if constexpr (kRank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            &map),
        "r"(shared_address(shared)), "r"(at[0]), "r"(at[1]), "r"(at[2])
        : "memory");
  } else if constexpr (kRank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            &map),
        "r"(shared_address(shared)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group "
        "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
        "r"(shared_address(shared)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
        : "memory");
  }
}

// --- Warpgroups ----------------------------------------------------------------------------------

// Sets how many registers each thread of the calling warpgroup has (setmaxnreg). If a block's
// threads together exceed the number it was launched with, the kernel hangs.
template <int kRegisters>
__device__ __forceinline__ void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Synchronises the threads of one warpgroup. `number` is the warpgroup's own within its block.
__device__ __forceinline__ void warpgroup_sync(int number) {
  asm volatile("bar.sync %0, 128;" ::"r"(number + 1) : "memory");
}

// Synchronises kWarpgroups warpgroups, for which `number` is one that no other group of them uses.
template <int kWarpgroups>
__device__ __forceinline__ void warpgroups_sync(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "n"(128 * kWarpgroups) : "memory");
}

// Writes four 8 by 8 matrices of 16-bit elements to shared memory, transposed (stmatrix.trans).
// Lane l holds elements (l / 4, 2 (l % 4) + {0, 1}) of matrix k in `rows[k]`, and lane 8 k + i
// passes the address of 16 bytes for column i of matrix k.
__device__ __forceinline__ void store_transposed(void* column, const unsigned (&rows)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(column)),
               "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
               : "memory");
}

// Writes four such matrices without transposing them: lane 8 k + i passes the address of 16 bytes
// for row i of matrix k.
__device__ __forceinline__ void store_rows(void* row, const unsigned (&rows)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
      : "memory");
}

// Orders accesses of registers and shared memory before the warpgroup's next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits the warpgroup's wgmma since the last commit as one group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the warpgroup's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading accumulators before the preceding wgmma_wait.
template <int kCount>
__device__ __forceinline__ void hold_registers(float (&accs)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accs[i])::"memory");
}
// Keeps the compiler from reusing the registers of wgmma's operands before the preceding
// wgmma_wait.
template <int kCount>
__device__ __forceinline__ void hold_registers(unsigned (&operands)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(operands[i])::"memory");
}

// Keeps the compiler from splitting an address, so that later offsets become immediates of the
// loads instead of registers of their own.
template <class T>
__device__ __forceinline__ void hold_address(const T*& address) {
  asm volatile("" : "+l"(address));
}

// A wgmma matrix descriptor without swizzle. Core matrices of 8 rows by 16 bytes are 128 contiguous
// bytes each; `leading` bytes lie between core matrices that are neighbours along K, `stride` bytes
// between neighbours along M or N. Adding bytes / 16 to a descriptor moves its start.
using Matrix = unsigned long long;

__device__ __forceinline__ Matrix matrix(const void* start, int leading, int stride) {
  // In a cluster, the highest bits of a shared address hold the block's rank; the descriptor has
  // other fields there.
  const unsigned address = shared_address(start) & 0x3ffffu;
  return static_cast<Matrix>(address >> 4) | static_cast<Matrix>(leading >> 4) << 16 |
         static_cast<Matrix>(stride >> 4) << 32;
}

// A descriptor with a swizzle of kSpan (32, 64 or 128) bytes, for TMA boxes at multiples of 8 kSpan
// bytes. K-major operand: 8 rows of kSpan bytes are contiguous, `stride` bytes lie between such
// groups, and `leading` is unused; adding bytes / 16 moves along K within a row. MN-major operand
// (see wgmma): 8 places along K by kSpan bytes are contiguous, `stride` bytes lie between
// neighbours along K, and `leading` bytes between neighbours along M or N. The swizzle is a
// function of the address in shared memory, so an MN-major operand may begin at any row of a box,
// and `stride` and `leading` may be any number of rows.
template <int kSpan = 128>
__device__ __forceinline__ Matrix swizzled_matrix(const void* start, int leading, int stride) {
  static_assert(kSpan == 32 || kSpan == 64 || kSpan == 128, "spans of wgmma's swizzles");
  constexpr unsigned long long kCode = kSpan == 128 ? 1 : kSpan == 64 ? 2 : 3;
  return matrix(start, leading, stride) | kCode << 62;
}

// --- Clusters: thread blocks that share their shared memory (DSMEM) ------------------------------
// These are for kernels with __cluster_dims__. In any other kernel each block is a cluster of one.

// The rank of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Synchronises all threads of the cluster's blocks that have not exited; after it, each sees what
// all of them wrote before. It is due before the first access of another block's shared memory,
// since that block may not have started, and after the last, since that block must not have ended.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// Loads four floats from the shared memory of the block with this rank, at the offset that `shared`
// has in this block.
__device__ __forceinline__ float4 load_from_block(const float4* shared, int rank) {
  float4 value;
  asm volatile(
      "{\n"
      ".reg .u32 address;\n"
      "mapa.shared::cluster.u32 address, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [address];\n"
      "}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(shared_address(shared)), "r"(rank)
      : "memory");
  return value;
}

// --- Programmatic dependent launch (PDL) ---------------------------------------------------------
// Blocks of a launch that is `early` may begin while the launch before it is still running.

// Waits until earlier launches are complete and their writes are visible. Every thread that
// accesses a tensor calls it before its first access.
__device__ __forceinline__ void wait_for_earlier_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Says that a block accesses no tensor that the launch before writes, and writes none that it
// reads, and so need not wait for it. Some block of the grid waits, so that later launches come
// after both.
__device__ __forceinline__ void go_beside_earlier_launch() {}

// Lets the blocks of the next launch begin where there is room for them, once all blocks of this
// one have called it or ended.
__device__ __forceinline__ void allow_later_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fastconv
