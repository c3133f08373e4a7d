// The reduction kernel of stream-K: adds up the accumulators that runs have left in the workspace.
#pragma once
#include "hopper/wgrad_implicit_gemm/store.cuh"

namespace fastconv {
namespace hopper {

constexpr int kReduceThreads = 256;
constexpr int kReduceSlots = kReduceThreads / C::reduce_parts;  // slots of a block

// The blocks that have steps of a tile. The first of them may have begun with another tile.
struct Blocks {
  int first, last, first_run;

  __device__ __forceinline__ Blocks(const Share& share, int tile)
      : first(share.block_of(tile * share.steps)),
        last(share.block_of((tile + 1) * share.steps - 1)),
        first_run(tile - share.first(first) / share.steps) {}
};

// Adds up one slot over every reduce_parts-th of the tile's runs, from `part` on.
__device__ __forceinline__ float4 part_of(const float4* workspace, const Share& share,
                                          const Blocks& blocks, int slot, int part) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
  for (int block = blocks.first + part; block <= blocks.last; block += C::reduce_parts) {
    const int run = block == blocks.first ? blocks.first_run : 0;
    tensor::add(total, workspace[share.slots(block, run) + slot]);
  }
  return total;
}

// Stores the weights of the four accumulators in a slot: two columns of two rows.
__device__ __forceinline__ void store_accumulators(Scalar* grad, const Tile& tile, int slot,
                                                   const float4& acc) {
  const int thread = slot % 128, consumer = slot / 128 / kSlots;
  const int row = tile.row + consumer / C::column_groups * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int column = tile.column + consumer % C::column_groups * kGroupColumns +
                     slot / 128 % kSlots * 8 + thread % 4 * 2;
  store_two(grad, tile, row, column, acc.x, acc.y);
  store_two(grad, tile, row + 8, column, acc.z, acc.w);
}

__device__ __forceinline__ void store_slot(Scalar* grad, Scalar* bias_grad, const Tile& tile,
                                           int slot, const float4& total) {
  if (slot >= kAccSlots) {
    if (tile.has_bias()) store_biases(bias_grad, tile, (slot - kAccSlots) * 4, total);
    return;
  }
  store_accumulators(grad, tile, slot, total);
}

// Reduces a block's slots. Several threads share a slot, each with a part of the runs; their
// results are added in order.
__device__ __forceinline__ void reduce(const float4* workspace, Scalar* grad, Scalar* bias_grad,
                                       const Share& share) {
  auto* const parts = reinterpret_cast<float4*>(shared_memory());
  const int index = static_cast<int>(threadIdx.x) % kReduceSlots;
  const int part = static_cast<int>(threadIdx.x) / kReduceSlots;
  const int at = static_cast<int>(blockIdx.x) * kReduceSlots + index;
  const int tile = min(at / kRunSlots, kTiles - 1), slot = at - tile * kRunSlots;
  const Blocks blocks(share, tile);
  const bool exists = slot < (Tile(tile).has_bias() ? kRunSlots : kAccSlots);
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (exists) total = part_of(workspace, share, blocks, slot, part);
  if constexpr (C::reduce_parts > 1) {
    parts[threadIdx.x] = total;
    __syncthreads();
    if (part > 0) return;
#pragma unroll
    for (int i = 1; i < C::reduce_parts; ++i) tensor::add(total, parts[i * kReduceSlots + index]);
  }
  if (exists) store_slot(grad, bias_grad, Tile(tile), slot, total);
}

}  // namespace hopper
}  // namespace fastconv
