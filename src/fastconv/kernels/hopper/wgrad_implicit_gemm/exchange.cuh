// The end of a cluster's tile: its blocks, each of which has a share of the tile's steps, add up
// their sums through each other's shared memory.
#pragma once
#include "hopper/wgrad_implicit_gemm/store.cuh"

namespace fastconv {
namespace hopper {

// A block's sums lie where its stages were: the tile's rows, then those of the bias. Rows are an
// odd number of 32 bytes apart, so that what a warp writes, 32 bytes of each of 8 rows, takes two
// turns of all banks.
constexpr int kSumPitch = kTileColumns / 16 * 16 + 8;
constexpr int kBiasAt = kTileRows * kSumPitch;
constexpr int kExchangedBytes = 4 * (kBiasAt + (C::bias ? kTileRows : 0));
static_assert(C::cluster == 1 || kExchangedBytes <= C::stages * kStageBytes, "they fit");

__device__ __forceinline__ float* sums_of_row(const Shared& shared, int row) {
  return reinterpret_cast<float*>(shared.start) + row * kSumPitch;
}
__device__ __forceinline__ float* sums_of_bias(const Shared& shared) {
  return reinterpret_cast<float*>(shared.start) + kBiasAt;
}

// Four neighbours of all blocks, added in the order of the blocks.
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

// One in so many of the tile's rows, in vectors of four columns: neighbouring threads have
// neighbours. A thread loads some before it stores any, for it waits long for each.
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
      totals[i] = total_of_blocks(sums_of_row(shared, row(vector)) + column(vector));
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
  store_biases(bias_grad, tile, first, total_of_blocks(sums_of_bias(shared) + first));
}

// By all threads, once the consumers have put their sums there.
__device__ __forceinline__ void exchange(const Shared& shared, Scalar* grad, Scalar* bias_grad) {
  const Tile tile(static_cast<int>(blockIdx.x) / C::cluster);
  cluster_sync();
  add_weights(shared, grad, tile, cluster_rank());
  add_biases(shared, bias_grad, tile, cluster_rank());
  cluster_sync();  // no block ends while others read what it has
}

}  // namespace hopper
}  // namespace fastconv
