// Kernels in which each block copies one TMA box: tests/kernels/tensor_maps.py.
#include "device/sm90.cuh"

namespace fastconv {

constexpr int kNumbers = 8;  // numbers per box: its coordinates, then offsets of an im2col copy

__device__ __forceinline__ void load_box(void* shared, const TensorMap& map, const int* at,
                                         Barrier* barrier) {
  if constexpr (Config::im2col && Config::rank == 5) {
    im2col_load(shared, map, {at[0], at[1], at[2], at[3], at[4]}, {at[5], at[6], at[7]}, barrier);
  } else if constexpr (Config::im2col) {
    im2col_load(shared, map, {at[0], at[1], at[2], at[3]}, {at[4], at[5]}, barrier);
  } else if constexpr (Config::rank == 2) {
    tensor_load(shared, map, {at[0], at[1]}, barrier);
  } else if constexpr (Config::rank == 3) {
    tensor_load(shared, map, {at[0], at[1], at[2]}, barrier);
  } else if constexpr (Config::rank == 4) {
    tensor_load(shared, map, {at[0], at[1], at[2], at[3]}, barrier);
  } else {
    tensor_load(shared, map, {at[0], at[1], at[2], at[3], at[4]}, barrier);
  }
}

__device__ __forceinline__ void store_box(const TensorMap& map, const int* at, const void* shared) {
  if constexpr (Config::rank == 2) {
    tensor_store(map, {at[0], at[1]}, shared);
  } else if constexpr (Config::rank == 3) {
    tensor_store(map, {at[0], at[1], at[2]}, shared);
  } else if constexpr (Config::rank == 4) {
    tensor_store(map, {at[0], at[1], at[2], at[3]}, shared);
  } else {
    tensor_store(map, {at[0], at[1], at[2], at[3], at[4]}, shared);
  }
}

}  // namespace fastconv

// Writes each box, as it lies in shared memory, to `boxes`.
extern "C" __global__ void __launch_bounds__(128)
    load_boxes(const __grid_constant__ fastconv::TensorMap map, const int* coordinates, int* boxes,
               int bytes) {
  unsigned char* const tile = fastconv::shared_memory();
  auto* const loaded = reinterpret_cast<fastconv::Barrier*>(tile + bytes);
  if (threadIdx.x == 0) {
    fastconv::tensor_map_prefetch(map);
    fastconv::barrier_init(loaded, 1);
    fastconv::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    fastconv::barrier_arrive_expect(loaded, bytes);
    fastconv::load_box(tile, map, coordinates + blockIdx.x * fastconv::kNumbers, loaded);
  }
  fastconv::barrier_wait(loaded, 0);
  for (int i = static_cast<int>(threadIdx.x); i < bytes / 4; i += 128) {
    boxes[blockIdx.x * (bytes / 4) + i] = reinterpret_cast<const int*>(tile)[i];
  }
}

// Reads each box from `boxes`, as it is to lie in shared memory, and stores it in the tensor.
extern "C" __global__ void __launch_bounds__(128)
    store_boxes(const __grid_constant__ fastconv::TensorMap map, const int* coordinates,
                const int* boxes, int bytes) {
  unsigned char* const tile = fastconv::shared_memory();
  for (int i = static_cast<int>(threadIdx.x); i < bytes / 4; i += 128) {
    reinterpret_cast<int*>(tile)[i] = boxes[blockIdx.x * (bytes / 4) + i];
  }
  fastconv::fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    fastconv::store_box(map, coordinates + blockIdx.x * fastconv::kNumbers, tile);
    fastconv::bulk_store_commit();
    fastconv::bulk_store_wait();
  }
}
