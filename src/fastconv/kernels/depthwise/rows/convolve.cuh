// Forward convolution or input gradient of a depthwise layer whose images are one row, stride 1.
//
// Output t is the sum of inputs t + origin + j times tap j. The gradient of the input is the same
// sum over the output's gradient, with the taps in reverse.
//
// A block has a tile of outputs (causal/tile.cuh), stages the inputs that they read in shared
// memory, by cp.async, and each thread computes runs from there. Memory's rate bounds the kernel:
// there is no pipeline within a block, since other blocks of the SM compute while this one loads.
//
//   contiguous      A tile is part of a row of one channel. Where rows do not begin with words, the
//                   tile's first output is such that the windows of runs begin with words of the
//                   input, and results are shifted to words of the output.
//   channels-last   A tile is some positions of some channels.
//
//   shared memory   [positions read][channel] inputs, [tile + a word] outputs
#pragma once
#include "depthwise/rows/words.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace rows {

constexpr int kStagedRuns = kTile / kRun + ceil_div(kShift + kStates, kRun);
constexpr int kStaged = kLast ? kTile + kStates : kStagedRuns * kRun;
constexpr int kInputBytes = round_up(kStaged * kChannels * static_cast<int>(sizeof(Scalar)), 16);

// SiLU of 16-bit types by approximations that have more bits than the result: exact functions would
// take longer than memory.
struct ApproximateSilu {
  template <class T>
  __device__ __forceinline__ static T of(T x) {
    return with_silu(x);
  }
};
template <class Activation, int kBytes>
struct FastestOf {
  using type = Activation;
};
template <>
struct FastestOf<Silu, 2> {
  using type = ApproximateSilu;
};
struct FastConfig : Config {
  using activation = typename FastestOf<typename ActivationOf<Config>::type, sizeof(Scalar)>::type;
};

// What a block reads and writes.
struct Tensors {
  const Scalar* input;
  Scalar* output;
  int dim;
  int in_length;
  int out_length;
  int origin;
};

// Applies the epilogue to a run of outputs, of which those from `begin` to `end` exist. `target` is
// where the run's outputs lie, `step` apart.
__device__ __forceinline__ void finish(Values& sums, const Epilogue<Config>& epilogue,
                                       const Scalar* target, long long step, int begin, int end) {
#pragma unroll
  for (int e = 0; e < kRun; ++e) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      typename Epilogue<Config>::Residual residual = {};
      if (kAddsResidual && e >= begin && e < end) {
        residual = epilogue.residual_of(target + e * step + g);
      }
      sums[g][e] = Epilogue<FastConfig>::activated(sums[g][e], residual);
    }
  }
}

// The taps in the order in which they meet inputs.
__device__ __forceinline__ void load_ordered_taps(Taps& taps, const Scalar* weight, const Place& at,
                                                  const Part& part) {
  const long long step = C::weight_stride_width;
  if constexpr (C::transposed) {
    load_taps(taps, weight + kStates * step, C::weight_stride_out, -step, at, part);
  } else {
    load_taps(taps, weight, C::weight_stride_out, step, at, part);
  }
}

// A contiguous tile: up to `runs_of_tile` runs of a row, which has `tiles` tiles.
__device__ __forceinline__ void convolve_row(const Tensors& tensors, const Scalar* weight,
                                             const Scalar* bias, const Epilogue<Config>& epilogue,
                                             int tiles, int runs_of_tile) {
  Scalar* const inputs = reinterpret_cast<Scalar*>(shared_memory());
  Scalar* const outputs = reinterpret_cast<Scalar*>(shared_memory() + kInputBytes);
  const int number = static_cast<int>(blockIdx.x), row = number / tiles;
  const int length = tensors.out_length;
  const Scalar* const from = tensors.input + 1ll * row * tensors.in_length;
  Scalar* const to = tensors.output + 1ll * row * length;
  int first = number % tiles * runs_of_tile * kRun;
  if constexpr (!C::whole_words) first -= place_in_word(place_in_word(from) + tensors.origin);
  const int runs = min_of(runs_of_tile, ceil_div(length - first, kRun));
  const int staged_from = first + tensors.origin - kShift;
  const int words = runs + kStagedRuns - kTile / kRun;
  stage_words(inputs, from, staged_from, tensors.in_length, words);
  stage_ends(inputs, from, staged_from, tensors.in_length, words);

  const Place at = {0, row % tensors.dim, 1, first};
  const Part part = part_of_thread();
  Taps taps;
  load_ordered_taps(taps, weight, at, part);
  Acc biases[kGroup];
  causal::load_bias(biases, bias, at, part);
  wait_for_tiles();
#pragma unroll 1
  for (int run = part.segment; run < runs; run += kSegments) {
    const int local = run * kRun, t = first + local;
    Values sums;
    sum_taps(sums, inputs + local, nullptr, taps, biases);
    finish(sums, epilogue, to + t, 1, -t, length - t);
    store_run(sums, to, 1, t, length, 0, outputs + local);
  }
  if constexpr (!C::whole_words) {
    __syncthreads();
    store_words(to, outputs, first, max_of(first, 0), min_of(first + runs * kRun, length));
  }
}

// A channels-last tile. Tiles of neighbouring channels are neighbours in the grid, and those of
// neighbouring positions run at the same time: they share the cache lines of their halos.
__device__ __forceinline__ void convolve_positions(const Tensors& tensors, const Scalar* weight,
                                                   const Scalar* bias,
                                                   const Epilogue<Config>& epilogue, int tiles) {
  Scalar* const inputs = reinterpret_cast<Scalar*>(shared_memory());
  const int dim = tensors.dim, length = tensors.out_length;
  const int across = ceil_div(dim, kChannels), number = static_cast<int>(blockIdx.x);
  const int channel = number % across * kChannels, outer = number / across;
  const int first = outer % tiles * kTile;
  const Place at = {outer / tiles, channel, min_of(kChannels, dim - channel), first};
  stage<kStaged, C::load_vector>(
      inputs, sequence(tensors.input, at, 1ll * dim * tensors.in_length, dim), dim,
      first + tensors.origin, tensors.in_length, at.channels, nullptr);

  const Part part = part_of_thread();
  Taps taps;
  load_ordered_taps(taps, weight, at, part);
  Acc biases[kGroup];
  causal::load_bias(biases, bias, at, part);
  wait_for_tiles();
  Scalar* const to = sequence(tensors.output, at, 1ll * dim * length, dim);
#pragma unroll 1
  for (int run = part.segment; run < kTile / kRun; run += kSegments) {
    const int local = run * kRun, t = first + local;
    if (t >= length || part.channel >= at.channels) break;
    Values sums;
    sum_taps(sums, inputs + local * kChannels + part.channel, nullptr, taps, biases);
    finish(sums, epilogue, to + 1ll * t * dim + part.channel, dim, 0, length - t);
    store_run(sums, to, dim, t, length, part.channel, nullptr);
  }
}

}  // namespace rows
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(Config::threads)
    convolve(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ weight,
             const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output, int dim,
             int in_length, int out_length, int origin, int tiles,
             int runs_of_tile FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::rows;
  const Tensors tensors = {input, output, dim, in_length, out_length, origin};
  const fastconv::Epilogue<Config> epilogue = FASTCONV_EPILOGUE(output);
  if constexpr (kLast) {
    convolve_positions(tensors, weight, bias, epilogue, tiles);
  } else {
    convolve_row(tensors, weight, bias, epilogue, tiles, runs_of_tile);
  }
}
