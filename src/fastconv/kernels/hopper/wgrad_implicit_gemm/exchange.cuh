// Split-K within a cluster: each block of the cluster has a share of a tile's steps, and they
// reduce their accumulators through distributed shared memory (DSMEM).
#pragma once
#include "hopper/wgrad_implicit_gemm/store.cuh"

namespace fastconv {
namespace hopper {

// A block's accumulators overwrite its stages: the tile's rows, then those of the bias. Rows are an
// odd multiple of 32 bytes apart, so that a warp's store, 32 bytes of each of 8 rows, takes only
// two passes over the banks.
constexpr int kAccPitch = kTileColumns / 16 * 16 + 8;
constexpr int kBiasAt = kTileRows * kAccPitch;
constexpr int kExchangedBytes = 4 * (kBiasAt + (C::bias ? kTileRows : 0));
static_assert(C::cluster == 1 || kExchangedBytes <= C::stages * kStageBytes,
              "accumulators fit the stages");

__device__ __forceinline__ float* accumulators_of_row(const Shared& shared, int row) {
  return reinterpret_cast<float*>(shared.start) + row * kAccPitch;
}
__device__ __forceinline__ float* accumulators_of_bias(const Shared& shared) {
  return reinterpret_cast<float*>(shared.start) + kBiasAt;
}

// Reduces four consecutive accumulators over the cluster's blocks, in the order of their ranks.
__device__ __forceinline__ float4 total_of_blocks(const float* shared) {
  float4 values[C::cluster];
#pragma unroll
  for (int rank = 0; rank < C::cluster; ++rank) {
    values[rank] = load_from_block(reinterpret_cast<const float4*>(shared), rank);
  }
#pragma unroll
  for (int rank = 1; rank < C::cluster; ++rank) tensor::add(values[0], values[rank]);
  return values[0];
}

// Reduces the rows of the tile that belong to this block, every cluster-th, in vectors of four
// columns; neighbouring threads have neighbouring vectors. A thread issues several loads before it
// stores any, since DSMEM has a long latency.
__device__ __forceinline__ void add_weights(const Shared& shared, Scalar* grad, const Tile& tile,
                                            int rank) {
  constexpr int kRowVectors = kTileColumns / 4;
  constexpr int kVectors = kTileRows / C::cluster * kRowVectors;
  constexpr int kAtOnce = 8 / C::cluster;
  const auto row = [&](int vector) { return vector / kRowVectors * C::cluster + rank; };
  const auto column = [](int vector) { return vector % kRowVectors * 4; };
  for (int first = static_cast<int>(threadIdx.x); first < kVectors; first += kAtOnce * kThreads) {
    float4 totals[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int vector = min(first + i * kThreads, kVectors - 1);
      totals[i] = total_of_blocks(accumulators_of_row(shared, row(vector)) + column(vector));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int vector = first + i * kThreads;
      if (vector >= kVectors) break;
      store_four(grad, tile, tile.row + row(vector), column(vector), totals[i]);
    }
  }
}

__device__ __forceinline__ void add_biases(const Shared& shared, Scalar* bias_grad,
                                           const Tile& tile, int rank) {
  const int first = (static_cast<int>(threadIdx.x) * C::cluster + rank) * 4;
  if (!tile.has_bias() || first >= kTileRows) return;
  store_biases(bias_grad, tile, first, total_of_blocks(accumulators_of_bias(shared) + first));
}

// Called by all threads, once the consumers have written their accumulators to shared memory.
__device__ __forceinline__ void exchange(const Shared& shared, Scalar* grad, Scalar* bias_grad) {
  const Tile tile(static_cast<int>(blockIdx.x) / C::cluster);
  cluster_sync();
  add_weights(shared, grad, tile, cluster_rank());
  add_biases(shared, bias_grad, tile, cluster_rank());
  cluster_sync();  // no block may end while others read its shared memory
}

}  // namespace hopper
}  // namespace fastconv
