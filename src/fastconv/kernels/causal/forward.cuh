// Forward pass of a causal depthwise convolution, for sequences in either layout.
//
// A block has a tile (tile.cuh). It stages the tile and the halo before it in shared memory, by
// cp.async, and each thread computes runs of it from there. Memory's rate bounds the kernel: there
// is no pipeline within a block, since other blocks of the SM compute while this one loads.
//
//   shared memory   [halo + tile][channel] inputs, [halo + tile] sequences, [tile] outputs
#pragma once
#include "causal/tile.cuh"

namespace fastconv {
namespace causal {

constexpr int kStaged = kHalo + kTile;
constexpr int kInputBytes = round_up(kStaged * kChannels * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kSequenceBytes = C::sequences ? round_up(kStaged * 4, 16) : 0;

// In contiguous tensors, tiles of a channel are neighbours in the grid; in channels-last ones,
// channels of a tile. So blocks that run at the same time share the cache lines of their halos.
__device__ __forceinline__ Place place_of_block(int dim, int tiles) {
  const int number = static_cast<int>(blockIdx.x);
  const int across = kLast ? ceil_div(dim, kChannels) : tiles;
  const int inner = number % across, outer = number / across;
  const int along = kLast ? tiles : dim;
  const int tile = kLast ? outer % along : inner;
  const int channel = kLast ? inner * kChannels : outer % along;
  return {outer / along, channel, min_of(kChannels, dim - channel), tile * kTile};
}

}  // namespace causal
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::causal::kThreads)
    causal_forward(const Config::Scalar* __restrict__ x,
                   const Config::WeightScalar* __restrict__ weight,
                   const Config::WeightScalar* __restrict__ bias, const int* __restrict__ seq_idx,
                   const Config::Scalar* __restrict__ initial_states,
                   Config::Scalar* __restrict__ y, int dim, int length, int tiles, int batch_low,
                   int batch_high, int row_low, int row_high) {
  using namespace fastconv::causal;
  unsigned char* const memory = fastconv::shared_memory();
  Scalar* const inputs = reinterpret_cast<Scalar*>(memory);
  int* const ids = reinterpret_cast<int*>(memory + kInputBytes);
  Scalar* const outputs = reinterpret_cast<Scalar*>(memory + kInputBytes + kSequenceBytes);

  const Place at = place_of_block(dim, tiles);
  const Part part = part_of_thread();
  const long long row = wide(row_low, row_high);
  const long long before = 1ll * at.batch * dim + at.channel;  // channels before this one
  const Scalar* const states =
      initial_states == nullptr ? nullptr : initial_states + before * kStates;
  const int staged_from = at.first - kHalo;
  stage<kStaged, C::load_vector>(inputs, sequence(x, at, wide(batch_low, batch_high), row), row,
                                 staged_from, length, at.channels, states);
  if constexpr (C::sequences) {
    stage_sequences<kStaged>(ids, seq_idx + 1ll * at.batch * length, staged_from, length);
  }
  Taps taps;
  load_taps(taps, weight, kWidth, 1, at, part);
  Acc biases[kGroup];
  load_bias(biases, bias, at, part);
  wait_for_tiles();

  const long long out_row = kLast ? dim : length;
  Scalar* const out = sequence(y, at, 1ll * dim * length, out_row);
#pragma unroll 1
  for (int run = part.segment; run < kTile / kRun; run += kSegments) {
    const int local = run * kRun, t = at.first + local;
    if (t >= length || part.channel >= at.channels) break;
    Values sums;
    sum_taps(sums, inputs + local * kChannels + part.channel, ids + local, taps, biases);
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        if constexpr (C::silu) sums[g][e] = with_silu(sums[g][e]);
        if constexpr (C::sequences) {
          if (ids[local + kHalo + e] < 0) sums[g][e] = Acc(0);
        }
      }
    }
    store_run(sums, out, out_row, t, length, part.channel, outputs + local);
  }
  store_staged(out, outputs, at.first, length);
}
