// The host twin of device/sm90.cuh in src/fastconv/kernels: the same functions, on a CPU.
#pragma once
#include "device/sm80.cuh"
#include "sm90.h"

namespace fastconv {

using Barrier = unsigned long long;

inline void barrier_init(Barrier* barrier, int arrivals) {
  emulator::barrier_init(barrier, arrivals);
}

inline void barrier_init_fence() {}

inline void barrier_arrive(Barrier* barrier) { emulator::barrier_arrive(barrier, 0); }

inline void barrier_arrive_expect(Barrier* barrier, int bytes) {
  emulator::barrier_arrive(barrier, bytes);
}

inline void barrier_expect(Barrier* barrier, int bytes) {
  emulator::barrier_expect(barrier, bytes);
}

inline void barrier_expect_copies(Barrier* barrier,
                                  emulator::Site site = emulator::here("barrier_expect_copies")) {
  emulator::barrier_expect_copies(site, barrier);
}

inline void barrier_arrive_after_copies(
    Barrier* barrier, emulator::Site site = emulator::here("barrier_arrive_after_copies")) {
  emulator::barrier_arrive_after_copies(site, barrier);
}

inline bool is_elected(emulator::Site site = emulator::here("is_elected")) {
  emulator::exchange(site, ~0u, 0, 0);
  return emulator::lane() == 0;
}

inline void barrier_wait(Barrier* barrier, unsigned parity,
                         emulator::Site site = emulator::here("barrier_wait")) {
  emulator::barrier_wait(site, barrier, parity);
}

inline void bulk_load(void* shared, const void* global, int bytes, Barrier* barrier,
                      emulator::Site site = emulator::here("bulk_load")) {
  emulator::bulk_load(site, shared, global, bytes, barrier);
}

inline void bulk_store(void* global, const void* shared, int bytes,
                       emulator::Site site = emulator::here("bulk_store")) {
  emulator::bulk_store(site, global, shared, bytes);
}

inline void bulk_store_commit() { emulator::bulk_store_commit(); }

template <int kPending>
inline void bulk_store_wait_read(emulator::Site site = emulator::here("bulk_store_wait_read")) {
  emulator::bulk_store_wait_read(site, kPending);
}

inline void bulk_store_wait(emulator::Site site = emulator::here("bulk_store_wait")) {
  emulator::bulk_store_wait(site);
}

inline void fence_async_shared() {}

using TensorMap = emulator::TensorMap;

inline void tensor_map_prefetch(const TensorMap&) {}

template <int kRank>
inline void tensor_load(void* shared, const TensorMap& map, const int (&at)[kRank],
                        Barrier* barrier, emulator::Site site = emulator::here("tensor_load")) {
  static_assert(kRank >= 2 && kRank <= 5, "kernels use ranks 2 to 5");
  emulator::tensor_load(site, shared, {site.function, &map, false, kRank, at, nullptr}, barrier);
}

template <int kRank>
inline void im2col_load(void* shared, const TensorMap& map, const int (&at)[kRank],
                        const int (&offset)[kRank - 2], Barrier* barrier,
                        emulator::Site site = emulator::here("im2col_load")) {
  static_assert(kRank == 4 || kRank == 5, "kernels use ranks 4 and 5");
  emulator::tensor_load(site, shared, {site.function, &map, true, kRank, at, offset}, barrier);
}

template <int kRank>
inline void tensor_store(const TensorMap& map, const int (&at)[kRank], const void* shared,
                         emulator::Site site = emulator::here("tensor_store")) {
  static_assert(kRank >= 2 && kRank <= 5, "kernels use ranks 2 to 5");
  emulator::tensor_store(site, {site.function, &map, false, kRank, at, nullptr}, shared);
}

template <int kRegisters>
inline void give_back_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0,
                "setmaxnreg takes multiples of 8 from 24 to 256");
  emulator::in_unison(kRegisters);
}
template <int kRegisters>
inline void take_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0,
                "setmaxnreg takes multiples of 8 from 24 to 256");
  emulator::in_unison(kRegisters);
}

inline void warpgroup_sync(int number, emulator::Site site = emulator::here("warpgroup_sync")) {
  emulator::warpgroup_barrier(site, number);
}

template <int kWarpgroups>
inline void warpgroups_sync(int number, emulator::Site site = emulator::here("warpgroups_sync")) {
  emulator::warpgroups_barrier(site, number, kWarpgroups);
}

inline void store_transposed(void* column, const unsigned (&rows)[4],
                             emulator::Site site = emulator::here("store_transposed")) {
  emulator::store_matrices(site, column, rows, true);
}

inline void store_rows(void* row, const unsigned (&rows)[4],
                       emulator::Site site = emulator::here("store_rows")) {
  emulator::store_matrices(site, row, rows, false);
}

inline void wgmma_fence() { emulator::wgmma_fence(); }

inline void wgmma_commit() { emulator::wgmma_commit(); }

template <int kPending>
inline void wgmma_wait(emulator::Site site = emulator::here("wgmma_wait")) {
  emulator::wgmma_wait(site, kPending);
}

template <int kCount>
inline void hold_registers(float (&)[kCount]) {}
template <int kCount>
inline void hold_registers(unsigned (&)[kCount]) {}
template <class T>
inline void hold_address(const T*&) {}

using Matrix = unsigned long long;

inline Matrix matrix(const void* start, int leading, int stride) {
  const unsigned address = shared_address(start);
  constexpr int kLimit = 1 << 18;  // a field has 14 bits for a multiple of 16
  if (address % 16 || leading % 16 || stride % 16 || leading < 0 || leading >= kLimit ||
      stride < 0 || stride >= kLimit) {
    emulator::fail("a matrix cannot start at byte %u with offsets %d and %d", address, leading,
                   stride);
  }
  return static_cast<Matrix>(address >> 4) | static_cast<Matrix>(leading >> 4) << 16 |
         static_cast<Matrix>(stride >> 4) << 32;
}

template <int kSpan = 128>
inline Matrix swizzled_matrix(const void* start, int leading, int stride) {
  static_assert(kSpan == 32 || kSpan == 64 || kSpan == 128, "spans of wgmma's swizzles");
  return matrix(start, leading, stride) | (kSpan == 128 ? 1ull : kSpan == 64 ? 2ull : 3ull) << 62;
}

inline int cluster_rank() { return emulator::cluster_rank; }

inline void cluster_sync(emulator::Site site = emulator::here("cluster_sync")) {
  emulator::cluster_barrier(site);
}

inline float4 load_from_block(const float4* shared, int rank,
                              emulator::Site site = emulator::here("load_from_block")) {
  return *static_cast<const float4*>(emulator::in_block(site, shared, rank));
}

inline void wait_for_earlier_launch(
    emulator::Site site = emulator::here("wait_for_earlier_launch")) {
  emulator::wait_for_earlier_launch(site);
}

inline void go_beside_earlier_launch(
    emulator::Site site = emulator::here("go_beside_earlier_launch")) {
  emulator::go_beside_earlier_launch(site);
}

inline void allow_later_launch() {}

}  // namespace fastconv
