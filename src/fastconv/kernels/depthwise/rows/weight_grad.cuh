// Weight gradient of a depthwise layer whose images are one row, stride 1, with the bias's.
//
// The gradient of tap j is the sum of the output's gradient at t times the input at t + origin + j.
// A block has some channels, and of their sequences a share of the units, which are tiles
// (causal/tile.cuh). It loads the next unit while its threads add the products of one to sums in
// registers. At the end the threads' sums are added up in a fixed order and stored as one partial
// sum of the share, which causal/reduce.cuh adds up.
//
// Where rows of contiguous tensors do not begin with words, runs are such that their windows begin
// with words of the input, and the output's gradient is shifted as it is read: a run has one word
// of it, and two or more of its window. Words that two rows share are then copied like all others,
// for a load of single elements would have to be waited for: what they hold of the row's neighbours
// is left out when products are added. Only the tensor's first and last row have no neighbour.
//
//   shared memory   two stages, each with [positions read][channel] inputs and [tile][channel]
//                   gradients
#pragma once
#include "causal/sums.cuh"
#include "depthwise/rows/words.cuh"

namespace fastconv {
namespace rows {

// Words that windows read, and that gradients are read from, beyond one for each run.
constexpr int kMoreInputs = ceil_div(kWindow, kRun) - 1;
constexpr int kMoreGrads = !kLast && !C::whole_words;
constexpr int kStaged = kLast ? kTile + kStates : kTile + kMoreInputs * kRun;
constexpr int kStagedGrads = kTile + kMoreGrads * kRun;
constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr int kInputBytes = round_up(kStaged * kChannels * kScalarBytes, 16);
constexpr int kStageBytes = kInputBytes + round_up(kStagedGrads * kChannels * kScalarBytes, 16);

struct Tensors {
  const Scalar* input;
  const Scalar* grad;
  int dim;
  int in_length;
  int out_length;
  int origin;
  int tiles;         // of a row
  int runs_of_tile;  // the most
  long long rows;
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
  int shift;      // elements of the gradient's word before that position
  bool is_inner;  // whether the row is neither the first nor the last of a contiguous tensor

  __device__ __forceinline__ Unit(const Tensors& tensors, int unit, int channel) {
    const int batch = unit / tensors.tiles;
    const long long from = kLast ? 1ll * batch * tensors.in_length * tensors.dim + channel
                                 : (1ll * batch * tensors.dim + channel) * tensors.in_length;
    const long long at = kLast ? 1ll * batch * tensors.out_length * tensors.dim + channel
                               : (1ll * batch * tensors.dim + channel) * tensors.out_length;
    const long long row = 1ll * batch * tensors.dim + channel;
    is_inner = row > 0 && row < tensors.rows - 1;
    input = tensors.input + from;
    grad = tensors.grad + at;
    first = unit % tensors.tiles * tensors.runs_of_tile * kRun;
    shift = 0;
    if constexpr (!kLast && !C::whole_words) {
      first -= place_in_word(place_in_word(input) + tensors.origin);
      shift = place_in_word(place_in_word(grad) + first);
    }
    runs = min_of(tensors.runs_of_tile, ceil_div(tensors.out_length - first, kRun));
  }
};

__device__ __forceinline__ void load_unit(const Tensors& tensors, const Unit& unit, const Stage& to,
                                          int channels) {
  const int origin = unit.first + tensors.origin;
  if constexpr (kLast) {
    stage<kStaged, C::load_vector>(to.inputs, unit.input, tensors.dim, origin, tensors.in_length,
                                   channels, nullptr);
    stage<kTile, C::load_vector>(to.grads, unit.grad, tensors.dim, unit.first, tensors.out_length,
                                 channels, nullptr);
  } else {
    const int inputs_from = origin - kShift, inputs = unit.runs + kMoreInputs;
    const int grads_from = unit.first - unit.shift, grads = unit.runs + kMoreGrads;
    stage_words(to.inputs, unit.input, inputs_from, tensors.in_length, inputs);
    if (kMoreGrads && unit.is_inner) {
      stage_inner_words(to.grads, unit.grad, grads_from, grads);
      stage_ends(to.inputs, unit.input, inputs_from, tensors.in_length, inputs);
    } else {
      stage_words(to.grads, unit.grad, grads_from, tensors.out_length, grads);
      stage_ends(to.inputs, unit.input, inputs_from, tensors.in_length, inputs);
      stage_ends(to.grads, unit.grad, grads_from, tensors.out_length, grads);
    }
  }
  copy_async_commit();
}

// Reads a run of the gradient.
__device__ __forceinline__ void read_grads(Values& values, const Scalar* grads, int shift) {
  if constexpr (kMoreGrads) {
    const Word* const words = reinterpret_cast<const Word*>(grads);
    const Word word = joined(words[0], words[1], shift);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[0][i] = widen(word.element[i]);
  } else {
    read_run(values, grads, kRun);
  }
}

// Adds a run's products. Positions beyond the gradient are left out, rather than multiplied by
// zero: an input may be infinite. Those from `begin` to `end` exist; all do if it `is_whole`.
__device__ __forceinline__ void add_run(Sums& sums, const Values& grads, const Scalar* window,
                                        bool is_whole, int begin, int end) {
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
    if (!is_whole && (e < begin || e >= end)) continue;
#pragma unroll
    for (int g = 0; g < kGroup; ++g) sums.biases[g] += grads[g][e];
  }
  const auto add = [&](const Values& values, int i, int e, int tap) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      sums.taps[g][tap] = fma(grads[g][e], values[g][i], sums.taps[g][tap]);
    }
  };
  if (is_whole) {
    walk(window, nullptr, add);
  } else {
    walk(window, nullptr, [&](const Values& values, int i, int e, int tap) {
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
    read_grads(grads, staged.grads + at, unit.shift);
    // The runs of a warp take the same branch.
    const int lane = kLast ? 0 : static_cast<int>(threadIdx.x) % 32;
    const int of_warp = t - lane * kRun;
    const bool is_whole = of_warp >= 0 && of_warp + (kLast ? 1 : 32) * kRun <= length;
    add_run(sums, grads, staged.inputs + at, is_whole, -t, length - t);
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
  const Tensors tensors = {input,     grad,         dim,
                           in_length, out_length,   origin,
                           tiles,     runs_of_tile, 1ll * (units / tiles) * dim};
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
