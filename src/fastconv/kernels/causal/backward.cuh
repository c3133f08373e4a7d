// Backward pass of a causal depthwise convolution: the gradients of x and of the initial states,
// and partial sums of those of weight and bias, which reduce.cuh adds up.
//
// A block has a tile's channels, and one tile after the other of a share of the sequences. For each
// tile it
//   1. stages the inputs with halos on both sides, and the output's gradient with a halo after it;
//   2. computes the gradient before the activation, for the tile and the halo after it: the sums
//      are computed again from the inputs, which costs less than to read them from memory;
//   3. computes the gradient of x from that, and adds to the taps' sums in registers.
// At the end the threads' sums are added up in a fixed order, and stored as one partial sum of the
// share.
//
//   shared memory   [halo + tile + after][channel] inputs, [tile + after][channel] output gradient,
//                   [tile + after][channel] gradient before the activation, in the type of sums,
//                   [halo + tile + after] sequences
#pragma once
#include "causal/sums.cuh"

namespace fastconv {
namespace causal {

constexpr int kAfter = round_up(kStates, kRun);
// Positions after the tile that are staged: in channels-last the rest of kAfter is not read.
constexpr int kStagedAfter = kLast ? kStates : kAfter;
constexpr int kGradients = kTile + kAfter;
constexpr int kInputs = kHalo + kGradients;
constexpr int kRuns = kGradients / kRun;
constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr int kInputBytes = round_up(kInputs * kChannels * kScalarBytes, 16);
constexpr int kGradBytes = round_up(kGradients * kChannels * kScalarBytes, 16);
constexpr int kSumBytes = kGradients * kChannels * static_cast<int>(sizeof(Acc));

// --- The gradient before the activation, in shared memory ----------------------------------------

// A contiguous run of 16-bit elements has two vectors of sums. They lie in two planes, so that the
// vectors of neighbouring threads are neighbours, without bank conflicts.
constexpr int kPlanes = kLast ? 1 : kRun * static_cast<int>(sizeof(Acc)) / 16;
constexpr int kPerPlane = kRun / kPlanes;

__device__ __forceinline__ int sum_index(int position, int channel) {
  if constexpr (kLast) return position * kChannels + channel;
  const int plane = position % kRun / kPerPlane;
  return (plane * kRuns + position / kRun) * kPerPlane + position % kPerPlane;
}

using SumVector = Vector<Acc, kLast ? kGroup : kPerPlane>;

__device__ __forceinline__ void write_sums(Acc* sums, const Values& values, int local,
                                           int channel) {
  constexpr int kVectors = kLast ? kRun : kPlanes;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    SumVector vector;
#pragma unroll
    for (int i = 0; i < (kLast ? kGroup : kPerPlane); ++i) {
      vector.element[i] = kLast ? values[i % kGroup][v] : values[0][v * kPerPlane + i];
    }
    const int position = local + (kLast ? v : v * kPerPlane);
    *reinterpret_cast<SumVector*>(sums + sum_index(position, channel)) = vector;
  }
}

// Reads a run, but not what lies at positions from `count` on.
__device__ __forceinline__ void read_sums(Values& values, const Acc* sums, int local, int channel,
                                          int count) {
  constexpr int kVectors = kLast ? kRun : kPlanes;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v * (kRun / kVectors) >= count) break;
    const int position = local + v * (kRun / kVectors);
    const auto vector = *reinterpret_cast<const SumVector*>(sums + sum_index(position, channel));
#pragma unroll
    for (int i = 0; i < (kLast ? kGroup : kPerPlane); ++i) {
      if constexpr (kLast) {
        values[i][v] = vector.element[i];
      } else {
        values[0][v * kPerPlane + i] = vector.element[i];
      }
    }
  }
}

// What a block has in shared memory.
struct Staged {
  const Scalar* inputs;
  Scalar* grads;
  Acc* sums;
  const int* ids;
};

// --- Step 2 --------------------------------------------------------------------------------------

__device__ __forceinline__ void differentiate(const Staged& staged, const Taps& taps,
                                              const Acc (&biases)[kGroup], const Place& at,
                                              const Part& part, int length) {
#pragma unroll 1
  for (int run = part.segment; run < kRuns; run += kSegments) {
    const int local = run * kRun, t = at.first + local;
    Values grads;
    read_run(grads, staged.grads + local * kChannels + part.channel, kRun);
    if constexpr (C::silu) {
      Values sums;
      sum_taps(sums, staged.inputs + local * kChannels + part.channel, staged.ids + local, taps,
               biases);
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
#pragma unroll
        for (int g = 0; g < kGroup; ++g) grads[g][e] *= silu_slope(sums[g][e]);
      }
    }
    if (C::sequences || t + kRun > length) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        bool counts = t + e < length;
        if constexpr (C::sequences) counts = counts && staged.ids[kHalo + local + e] >= 0;
#pragma unroll
        for (int g = 0; g < kGroup; ++g) grads[g][e] = counts ? grads[g][e] : Acc(0);
      }
    }
    write_sums(staged.sums, grads, local, part.channel);
  }
}

// --- Step 3 --------------------------------------------------------------------------------------

// The gradient of a run of x. `own` becomes the run's gradient before the activation.
__device__ __forceinline__ void sum_grads(Values& result, Values& own, const Staged& staged,
                                          const Taps& taps, int local, int channel) {
  const int* const ids = staged.ids + kHalo + local;
#pragma unroll
  for (int q = 0; q < ceil_div(kRun + kStates, kRun); ++q) {
    Values sums = {};
    const int first = q * kRun;
    read_sums(sums, staged.sums, local + first, channel, kRun + kStates - first);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        if (q == 0) own[g][i] = sums[g][i];
      }
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        const int tap = e + kStates - (first + i);
        if (tap < 0 || tap >= kWidth) continue;
        if constexpr (C::sequences) {
          if (ids[first + i] != ids[e]) continue;
        }
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
          result[g][e] = fma(taps[g][tap], sums[g][i], result[g][e]);
        }
      }
    }
  }
}

// Adds the gradient of the final states, which are the last inputs. `grad_final` is that of the
// tile's first channel.
__device__ __forceinline__ void add_final(Values& result, const Scalar* grad_final, int t,
                                          int length, const Place& at, int channel) {
  if (grad_final == nullptr || t + kRun <= length - kStates) return;
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
    const int state = t + e - (length - kStates);
    if (state < 0 || t + e >= length) continue;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (channel + g < at.channels) {
        result[g][e] += widen(grad_final[(channel + g) * kStates + state]);
      }
    }
  }
}

// Adds a run's products to the sums. Positions beyond the sequence are left out, rather than
// multiplied by zero: an input may be infinite.
__device__ __forceinline__ void add_products(Sums& sums, const Values& own, const Staged& staged,
                                             int local, int channel, int count) {
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) sums.biases[g] += own[g][e];
  }
  const Scalar* const window = staged.inputs + local * kChannels + channel;
  const auto add = [&](const Values& values, int i, int e, int tap) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      sums.taps[g][tap] = fma(own[g][e], values[g][i], sums.taps[g][tap]);
    }
  };
  if (count >= kRun) {
    walk(window, staged.ids + local, add);
  } else {
    walk(window, staged.ids + local, [&](const Values& values, int i, int e, int tap) {
      if (e < count) add(values, i, e, tap);
    });
  }
}

// The gradient of the initial states, by the block that has the sequence's first tile. `before` is
// the number of channels before the tile's first one.
__device__ __forceinline__ void store_states(Scalar* grad_states, const Scalar* grad_final,
                                             const WeightScalar* weight, const Staged& staged,
                                             const Place& at, long long before, int length) {
  for (int i = static_cast<int>(threadIdx.x); i < at.channels * kStates; i += kThreads) {
    const int channel = i / kStates, state = i % kStates;
    const WeightScalar* const taps = weight + 1ll * (at.channel + channel) * kWidth;
    Acc sum = 0;
    for (int t = 0; t <= state && t < length; ++t) {
      sum = fma(widen(taps[state - t]), staged.sums[sum_index(t, channel)], sum);
    }
    if (grad_final != nullptr && state >= length) {
      sum += widen(grad_final[channel * kStates + state - length]);
    }
    grad_states[before * kStates + i] = narrow<Scalar>(sum);
  }
}

}  // namespace causal
}  // namespace fastconv

// `units` are the tiles of all sequences of a channel, and a block has `per_block` of them, which
// are a share; there are `shares`. The partial sums are [share][tap or bias][channel].
extern "C" __global__ void __launch_bounds__(fastconv::causal::kThreads) causal_backward(
    const Config::Scalar* __restrict__ x, const Config::WeightScalar* __restrict__ weight,
    const Config::WeightScalar* __restrict__ bias, const int* __restrict__ seq_idx,
    const Config::Scalar* __restrict__ initial_states, const Config::Scalar* __restrict__ grad,
    const Config::Scalar* __restrict__ grad_final, Config::Scalar* __restrict__ grad_x,
    Config::Scalar* __restrict__ grad_states, void* __restrict__ scratch, int dim, int length,
    int tiles, int units, int per_block, int shares, int batch_low, int batch_high, int row_low,
    int row_high, int grad_batch_low, int grad_batch_high, int grad_row_low, int grad_row_high) {
  using namespace fastconv::causal;
  unsigned char* const memory = fastconv::shared_memory();
  Scalar* const inputs = reinterpret_cast<Scalar*>(memory);
  Scalar* const grads = reinterpret_cast<Scalar*>(memory + kInputBytes);
  Acc* const before_activation = reinterpret_cast<Acc*>(memory + kInputBytes + kGradBytes);
  int* const ids = reinterpret_cast<int*>(memory + kInputBytes + kGradBytes + kSumBytes);
  const Staged staged = {inputs, grads, before_activation, ids};

  const int number = static_cast<int>(blockIdx.x);
  const int across = kLast ? fastconv::ceil_div(dim, kChannels) : shares;
  const int channel = kLast ? number % across * kChannels : number / across;
  const int share = kLast ? number / across : number % across;
  const long long row = wide(row_low, row_high), grad_row = wide(grad_row_low, grad_row_high);
  const long long out_row = kLast ? dim : length;
  Place at = {0, channel, fastconv::min_of(kChannels, dim - channel), 0};
  const Part part = part_of_thread();
  Taps taps;
  load_taps(taps, weight, kWidth, 1, at, part);
  Acc biases[kGroup];
  load_bias(biases, bias, at, part);
  Sums sums = {};

  const int end = fastconv::min_of(units, (share + 1) * per_block);
#pragma unroll 1
  for (int unit = share * per_block; unit < end; ++unit) {
    at.batch = unit / tiles;
    at.first = unit % tiles * kTile;
    const long long before = 1ll * at.batch * dim + channel;  // channels before this one
    const long long states = before * kStates;
    stage<kHalo + kTile + kStagedAfter, Config::load_vector>(
        inputs, sequence(x, at, wide(batch_low, batch_high), row), row, at.first - kHalo, length,
        at.channels, initial_states == nullptr ? nullptr : initial_states + states);
    stage<kTile + kStagedAfter, Config::grad_vector>(
        grads, sequence(grad, at, wide(grad_batch_low, grad_batch_high), grad_row), grad_row,
        at.first, length, at.channels, nullptr);
    if constexpr (Config::sequences) {
      stage_sequences<kInputs>(ids, seq_idx + 1ll * at.batch * length, at.first - kHalo, length);
    }
    wait_for_tiles();
    differentiate(staged, taps, biases, at, part, length);
    __syncthreads();

    const Scalar* const final = grad_final == nullptr ? nullptr : grad_final + states;
    Scalar* const out = sequence(grad_x, at, 1ll * dim * length, out_row);
#pragma unroll 1
    for (int run = part.segment; run < kTile / kRun; run += kSegments) {
      const int local = run * kRun, t = at.first + local;
      if (t >= length || part.channel >= at.channels) break;
      Values result = {}, own;
      sum_grads(result, own, staged, taps, local, part.channel);
      if constexpr (Config::parameters) {
        add_products(sums, own, staged, local, part.channel, length - t);
      }
      add_final(result, final, t, length, at, part.channel);
      // The output's gradient is not read any more: its memory takes runs that are not stored yet.
      store_run(result, out, out_row, t, length, part.channel, grads + local);
    }
    if (grad_states != nullptr && at.first == 0) {
      store_states(grad_states, final, weight, staged, at, before, length);
    }
    store_staged(out, grads, at.first, length);
    __syncthreads();
  }
  if constexpr (Config::parameters) {
    Acc* const shared = reinterpret_cast<Acc*>(memory);
    Acc* const partials = static_cast<Acc*>(scratch) + 1ll * share * (kWidth + 1) * dim + channel;
    if constexpr (kLast) {
      store_channels(sums, shared, partials, dim, at, part);
    } else {
      store_channel(sums, shared, partials, dim);
    }
  }
}
