// The producer warp of weights: cp.async from the packed weights to a ring of stages.
#pragma once
#include "ampere/halo/tile.cuh"
#include "device/tensor/scale.cuh"

namespace fastconv {
namespace ampere {

// Starts to copy a stage of weights.
__device__ __forceinline__ void copy_weights(int stage, const unsigned char* source, int lane) {
  constexpr int kVectors = kWeightBytes / 16;
  constexpr int kAtOnce = 8;
  unsigned char* const target = shared_memory() + kWeightRing + stage * kWeightBytes;
#pragma unroll kAtOnce
  for (int i = lane; i < kVectors; i += 32) copy_async<16>(target + i * 16, source + i * 16, true);
  copy_async_commit();
}

// Streams every tile's weights through the ring; or copies all weights once, if they fit.
__device__ __forceinline__ void stream_weights(const unsigned char* packed, const Items& items) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (C::resident) {
    static_assert(!C::resident || C::weight_stages == kTileStages, "all of them fit");
    for (int i = 0; i < kTileStages; ++i) copy_weights(i, packed + i * kWeightBytes, lane);
    copy_async_wait<0>();
    WeightStages::fill(0);
    return;
  }
  // Copies in flight beside the one that is waited for. It is one stage less than there could be,
  // because consumers read one while the next is announced.
  constexpr int kAhead = C::resident ? 0 : C::weight_stages - 2;
  Ring<C::weight_stages> at(0), landed(0);
  int under_way = 0;
  for (int index = items.first(); index < items.count(); index = items.after(index)) {
    const Item item(index);
    const int part = item.group * kOutputGroups + item.outputs / (C::channel_groups * kOutputs);
    const unsigned char* source =
        packed + static_cast<long long>(part) * kTileStages * kWeightBytes;
#pragma unroll 1
    for (int i = 0; i < kTileStages; ++i) {
      WeightStages::wait_empty(at.stage);
      copy_weights(at.stage, source, lane);
      source += kWeightBytes;
      at.advance();
      if (++under_way > kAhead) {
        copy_async_wait<kAhead>();
        WeightStages::fill(landed.stage);
        landed.advance();
        --under_way;
      }
    }
  }
  copy_async_wait<0>();
  for (; under_way > 0; --under_way) {
    WeightStages::fill(landed.stage);
    landed.advance();
  }
  WeightStages::wait_all_empty();
}

}  // namespace ampere
}  // namespace fastconv
