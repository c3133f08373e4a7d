// The instructions of sm_90a, one function each. The emulator has a twin of this file too.
#pragma once
#include "device/sm80.cuh"

namespace fastconv {

// --- Barriers in shared memory (mbarrier) --------------------------------------------------------
// A phase of a barrier is complete when the arrivals it was made for have happened and the bytes it
// expects have been copied; then the next phase begins. Phases count from 0.

using Barrier = unsigned long long;

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// After barrier_init, before __syncthreads: shows the barriers to asynchronous copies as well.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// It may overtake this thread's loads from shared memory, unless something has used what they
// loaded: an asynchronous copy that waits for the barrier would write under them.
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and has the phase wait for so many bytes of bulk_load.
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Has the phase wait for so many bytes, some of which may have been copied already. The phase lacks
// an arrival that comes after this.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Has the phase wait for all of this thread's copy_async so far. The phase lacks an arrival that
// comes after this.
__device__ __forceinline__ void barrier_expect_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives when all of this thread's copy_async so far are complete. Who waits for the phase sees
// what they copied, but not what the thread has written itself.
__device__ __forceinline__ void barrier_arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Waits for a phase with this parity (its number modulo 2) to be complete. The barrier is in that
// phase or the one after it.
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

// True for one lane of the warp, all of which call it. The compiler knows that it is one, and takes
// a bulk copy's operands from it; of any other single lane's it would make a loop.
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

// --- Bulk copies: one thread moves many bytes ----------------------------------------------------
// Addresses and sizes are multiples of 16.

// From global to shared memory; `barrier` counts the bytes.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// From shared to global memory. What ordinary stores wrote to shared memory is seen only if
// fence_async_shared came between.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Closes a group of this thread's bulk stores since the last commit.
__device__ __forceinline__ void bulk_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but kPending of this thread's latest groups have read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's bulk stores are complete.
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Shows this thread's ordinary accesses of shared memory to the tensor cores and bulk copies.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- Tensor copies: one thread moves a box of a tensor -------------------------------------------
// Coordinates come innermost first, that one a multiple of 16 bytes. They may lie outside of the
// tensor: zeros are loaded, nothing is stored; but stores have no negative ones, and rows of whole
// 16 bytes. (An H200 takes other coordinates for illegal instructions.) A box lies in shared memory
// densely, at a multiple of 128 bytes, or where it is swizzled in spans of n bytes, of 8 n.

// A descriptor that the CUDA driver has made of a map among the launch's arguments: a kernel's
// parameter, `const __grid_constant__ TensorMap`.
struct __align__(64) TensorMap {
  unsigned long long words[16];
};

// Fetches the descriptor before the first copy needs it.
__device__ __forceinline__ void tensor_map_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// From global to shared memory; `barrier` counts the bytes, those outside of the tensor included.
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

// The same of an im2col map. `at` is the first pixel (channel, column, row, image), within the
// bounding box; `offset` (column, row; 0 to 255) is added to every pixel, and may lead out of it.
__device__ __forceinline__ void im2col_load(void* shared, const TensorMap& map, const int (&at)[4],
                                            const int (&offset)[2], Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
      "h"(static_cast<short>(offset[0])), "h"(static_cast<short>(offset[1]))
      : "memory");
}

// From shared to global memory, as bulk_store: the same fence, commit and wait.
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

// Sets the registers of each thread of the calling warpgroup. All of a block's together must not
// exceed what it was launched with, or it hangs.
template <int kRegisters>
__device__ __forceinline__ void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits for all threads of a warpgroup; every warpgroup of a block has a number of its own.
__device__ __forceinline__ void warpgroup_sync(int number) {
  asm volatile("bar.sync %0, 128;" ::"r"(number + 1) : "memory");
}

// The same for two warpgroups, which have a number of their own for it.
__device__ __forceinline__ void two_warpgroups_sync(int number) {
  asm volatile("bar.sync %0, 256;" ::"r"(number + 1) : "memory");
}

// Writes four 8 by 8 matrices of 16-bit elements to shared memory, transposed: of matrix k, lane l
// holds elements (l / 4, 2 (l % 4) + {0, 1}) in `rows[k]`, and lane 8 k + i has the address of 16
// bytes for column i.
__device__ __forceinline__ void store_transposed(void* column, const unsigned (&rows)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(column)),
               "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
               : "memory");
}

// The same, not transposed: lane 8 k + i has the address of 16 bytes for row i.
__device__ __forceinline__ void store_rows(void* row, const unsigned (&rows)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
      : "memory");
}

// Orders registers and shared memory before the warpgroup's next products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of the warpgroup's products since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the warpgroup's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from using sums before the wgmma_wait above.
template <int kCount>
__device__ __forceinline__ void hold_registers(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
// Keeps the compiler from giving the registers of products' operands away before it.
template <int kCount>
__device__ __forceinline__ void hold_registers(unsigned (&operands)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(operands[i])::"memory");
}

// Keeps the compiler from taking an address apart, so that what is added to it later is part of the
// loads, and not kept in registers of its own.
template <class T>
__device__ __forceinline__ void hold_address(const T*& address) {
  asm volatile("" : "+l"(address));
}

// A matrix in shared memory for the tensor cores, without swizzle: cores of 8 rows by 16 bytes,
// each 128 bytes in one piece. `leading` bytes lie between cores that neighbour along the sum,
// `stride` bytes between those that neighbour across it. To move the start, add bytes / 16.
using Matrix = unsigned long long;

__device__ __forceinline__ Matrix matrix(const void* start, int leading, int stride) {
  // In a cluster, an address has the block's rank in its highest bits, where other fields are.
  const unsigned address = shared_address(start) & 0x3ffffu;
  return static_cast<Matrix>(address >> 4) | static_cast<Matrix>(leading >> 4) << 16 |
         static_cast<Matrix>(stride >> 4) << 32;
}

// The same of boxes that tensor copies have swizzled in spans of 128 bytes, from a multiple of 1024
// bytes on. Rows along the sum: 8 rows of 128 bytes lie in one piece, `stride` bytes between such
// pieces; `leading` is not used. To move along the sum, within the 128 bytes, add bytes / 16.
// Across the sum (see wgmma): 8 places of the sum by 128 bytes lie in one piece, `stride` bytes
// between pieces that neighbour along the sum, `leading` bytes between those across it.
__device__ __forceinline__ Matrix swizzled_matrix(const void* start, int leading, int stride) {
  return matrix(start, leading, stride) | 1ull << 62;
}

// --- Clusters: blocks that run at the same time and read each other's shared memory --------------
// Of a kernel with __cluster_dims__; the others' blocks are clusters by themselves.

// Which of the cluster's blocks this is.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster's blocks, but for those that have exited. Who waits sees
// what all of them wrote before. One is due before the first access of another block's shared
// memory, which may not have begun, and one after the last, before that block ends.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// Four floats of another block of the cluster: what its shared memory has where `shared` lies in
// this one's.
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

// --- Launches that follow each other -------------------------------------------------------------
// Of a launch that is `early`, blocks may begin while the launch before it is still under way.

// Waits until earlier launches are complete and what they wrote can be seen: before the first
// access of any tensor. All threads that access one call it.
__device__ __forceinline__ void wait_for_earlier_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the blocks of the next launch begin, where there is room for them, once all blocks have
// called this or ended.
__device__ __forceinline__ void allow_later_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fastconv
