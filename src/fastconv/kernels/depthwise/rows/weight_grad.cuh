// Weight gradient of a depthwise layer whose images are one row, stride 1, with the bias's.
//
// The gradient of tap j is the sum of the output's gradient at t times the input at t + origin + j.
// A block has some channels, and of their sequences a share of the units, which are tiles
// (causal/tile.cuh). It loads the next unit while its threads add the products of one to sums in
// registers. At the end the threads' sums are added up in a fixed order and stored as one partial
// sum of the share, which causal/reduce.cuh adds up.
//
// In contiguous tensors, runs begin where words of the output's gradient begin. Where rows of the
// input do not begin with words, windows are shifted as they are read.
//
//   shared memory   two stages, each with [positions read][channel] inputs and [tile][channel]
//                   gradients
#pragma once
#include "causal/sums.cuh"
#include "depthwise/rows/words.cuh"

namespace fastconv {
namespace rows {

constexpr int kChunks = ceil_div(kWindow, kRun);
// Words of a window beyond those of the runs that are staged for all.
constexpr int kMoreWords = C::whole_words ? kChunks - 1 : kChunks;
constexpr int kStaged = kLast ? kTile + kStates : kTile + kMoreWords * kRun;
constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr int kInputBytes = round_up(kStaged * kChannels * kScalarBytes, 16);
constexpr int kStageBytes = kInputBytes + round_up(kTile * kChannels * kScalarBytes, 16);

struct Tensors {
  const Scalar* input;
  const Scalar* grad;
  int dim;
  int in_length;
  int out_length;
  int origin;
  int tiles;         // of a row
  int runs_of_tile;  // the most
};

struct Stage {
  Scalar* inputs;
  Scalar* grads;
};
__device__ __forceinline__ Stage stage_of(int unit) {
  unsigned char* const memory = shared_memory() + (unit & 1) * kStageBytes;
  return {reinterpret_cast<Scalar*>(memory), reinterpret_cast<Scalar*>(memory + kInputBytes)};
}

// A unit of the block's channels, the first of which is `channel`.
struct Unit {
  const Scalar* input;  // the sequences
  const Scalar* grad;
  int first;  // the first position of the gradient; it may be negative in contiguous tensors
  int runs;
  int shift;  // elements of a word before the first window

  __device__ __forceinline__ Unit(const Tensors& tensors, int unit, int channel) {
    const int batch = unit / tensors.tiles;
    const long long from = kLast ? 1ll * batch * tensors.in_length * tensors.dim + channel
                                 : (1ll * batch * tensors.dim + channel) * tensors.in_length;
    const long long at = kLast ? 1ll * batch * tensors.out_length * tensors.dim + channel
                               : (1ll * batch * tensors.dim + channel) * tensors.out_length;
    input = tensors.input + from;
    grad = tensors.grad + at;
    first = unit % tensors.tiles * tensors.runs_of_tile * kRun;
    shift = kShift;
    if constexpr (!kLast && !C::whole_words) {
      first -= place_in_word(grad);
      shift = place_in_word(place_in_word(input) + first + tensors.origin);
    }
    runs = min_of(tensors.runs_of_tile, ceil_div(tensors.out_length - first, kRun));
  }
};

__device__ __forceinline__ void load_unit(const Tensors& tensors, const Unit& unit,
                                          const Stage& to, int channels) {
  const int origin = unit.first + tensors.origin;
  if constexpr (kLast) {
    stage<kStaged, C::load_vector>(to.inputs, unit.input, tensors.dim, origin, tensors.in_length,
                                   channels, nullptr);
    stage<kTile, C::load_vector>(to.grads, unit.grad, tensors.dim, unit.first, tensors.out_length,
                                 channels, nullptr);
  } else {
    stage_words(to.inputs, unit.input, origin - unit.shift, tensors.in_length,
                unit.runs + kMoreWords);
    stage_words(to.grads, unit.grad, unit.first, tensors.out_length, unit.runs);
  }
  copy_async_commit();
}

// Adds a run's products. Positions beyond the gradient are left out, rather than multiplied by
// zero: an input may be infinite. Those from `begin` to `end` exist.
template <class Read>
__device__ __forceinline__ void add_run(Sums& sums, const Values& grads, Read&& read, int begin,
                                        int end) {
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) sums.biases[g] += grads[g][e];
  }
  const auto add = [&](const Values& values, int i, int e, int tap) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      sums.taps[g][tap] = fma(grads[g][e], values[g][i], sums.taps[g][tap]);
    }
  };
  if (begin <= 0 && end >= kRun) {
    walk_chunks(read, nullptr, add);
  } else {
    walk_chunks(read, nullptr, [&](const Values& values, int i, int e, int tap) {
      if (e >= begin && e < end) add(values, i, e, tap);
    });
  }
}

__device__ __forceinline__ void add_unit(Sums& sums, const Unit& unit, const Stage& staged,
                                         const Part& part, int length) {
#pragma unroll 1
  for (int run = part.segment; run < unit.runs; run += kSegments) {
    const int at = run * kRun * kChannels + part.channel, t = unit.first + run * kRun;
    Values grads;
    read_run(grads, staged.grads + at, kRun);
    const Scalar* const window = staged.inputs + at;
    if constexpr (kLast || C::whole_words) {
      const auto read = [&](Values& values, int q) {
        read_run(values, window + q * kRun * kChannels, kWindow - q * kRun);
      };
      add_run(sums, grads, read, -t, length - t);
    } else {
      const Word* const words = reinterpret_cast<const Word*>(window);
      Word low = words[0];
      const auto read = [&](Values& values, int q) {
        const Word high = words[q + 1], word = joined(low, high, unit.shift);
#pragma unroll
        for (int i = 0; i < kRun; ++i) values[0][i] = widen(word.element[i]);
        low = high;
      };
      add_run(sums, grads, read, -t, length - t);
    }
  }
}

}  // namespace rows
}  // namespace fastconv

// A block has `per_block` of the `units`, which are a share; there are `shares`. The partial sums
// are [share][tap or bias][channel].
extern "C" __global__ void __launch_bounds__(Config::threads)
    weight_grad(const Config::Scalar* __restrict__ grad, const Config::Scalar* __restrict__ input,
                void* __restrict__ scratch, int dim, int in_length, int out_length, int origin,
                int tiles, int runs_of_tile, int units, int per_block, int shares) {
  using namespace fastconv::rows;
  const Tensors tensors = {input,  grad,  dim,         in_length, out_length,
                           origin, tiles, runs_of_tile};
  const int number = static_cast<int>(blockIdx.x);
  const int across = kLast ? fastconv::ceil_div(dim, kChannels) : shares;
  const int channel = kLast ? number % across * kChannels : number / across;
  const int share = kLast ? number / across : number % across;
  const Place at = {0, channel, fastconv::min_of(kChannels, dim - channel), 0};
  const Part part = part_of_thread();
  const int begin = share * per_block, end = fastconv::min_of(units, begin + per_block);
  Sums sums = {};
  load_unit(tensors, Unit(tensors, begin, channel), stage_of(begin), at.channels);
#pragma unroll 1
  for (int number_of = begin; number_of < end; ++number_of) {
    if (number_of + 1 < end) {
      const Unit next(tensors, number_of + 1, channel);
      load_unit(tensors, next, stage_of(number_of + 1), at.channels);
      fastconv::copy_async_wait<1>();
    } else {
      fastconv::copy_async_wait<0>();
    }
    __syncthreads();
    add_unit(sums, Unit(tensors, number_of, channel), stage_of(number_of), part, out_length);
    __syncthreads();  // before the load after next reuses the stage
  }
  Acc* const shared = reinterpret_cast<Acc*>(fastconv::shared_memory());
  Acc* const partials = static_cast<Acc*>(scratch) + 1ll * share * (kWidth + 1) * dim + channel;
  if constexpr (kLast) {
    store_channels(sums, shared, partials, dim, at, part);
  } else {
    store_channel(sums, shared, partials, dim);
  }
}
