// Statistics of each output channel, for the batch normalization that follows: what a block leaves
// is [share][mean, squares, count][channel], as batchnorm/statistics.cuh does.
//
// A block has one column of tiles, so its threads add up over all of its tiles in registers. A warp
// reads the boxes that it has staged and stores: they are private to it, and nothing but the warp
// itself has to wait. Warps meet once, behind the last tile.
#pragma once
#include "hopper/implicit_gemm_nhwc/tile.cuh"

// Statistics are also a parameter of the kernel, which only the preprocessor can add:
// FASTCONV_STATISTICS is defined where Config has them.
#ifdef FASTCONV_STATISTICS
#define FASTCONV_STATISTICS_PARAMETER , float* __restrict__ statistics
#define FASTCONV_STATISTICS_OF_PASS statistics
#else
#define FASTCONV_STATISTICS_PARAMETER
#define FASTCONV_STATISTICS_OF_PASS nullptr
#endif

namespace fastconv {
namespace hopper {

#ifdef FASTCONV_STATISTICS
constexpr bool kGivesStatistics = true;
static_assert(C::dense && kResidues == 1 && kScalarBytes == 2, "forward passes in 16 bits alone");
#else
constexpr bool kGivesStatistics = false;
#endif

constexpr int kWarpRows = 16;  // positions of a tile that a warp has

// Which of a warp's positions of a tile are outputs, a bit for each.
__device__ __forceinline__ unsigned outputs_of(const Tile& tile, int positions, int warp,
                                               int lane) {
  const int position = tile.row + kWarpRows * warp + lane;
  return __ballot_sync(~0u, lane < kWarpRows && position < positions);
}

// Sums of differences from the first output that the warp has of a channel, and of their squares.
// So numbers that are large beside their deviation lose no bits. A lane has two neighbouring
// channels of each box.
template <class T>
struct ChannelSums {
  using Pair = Vector<T, 2>;
  unsigned outputs = 0;  // the warp's rows of the current tile that count, a bit for each
  int before = 0;        // how many counted in the tiles before
  Pair first[kBoxes] = {};
  float sum[kBoxes][2] = {}, squares[kBoxes][2] = {};

  // The outputs of all tiles.
  __device__ __forceinline__ int count() const { return before + __popc(outputs); }

  __device__ __forceinline__ void begin_tile(unsigned rows) {
    before = count();
    outputs = rows;
  }

  // A lane's channels of a staged row.
  __device__ __forceinline__ static Pair staged_pair(const unsigned char* staged, int box, int row,
                                                     int lane) {
    const int at = row * C::joined + box % C::joined;  // row of 128 bytes
    const unsigned char* const chunk = staged + at * kSpan + ((lane / 4) ^ (at % 8)) * 16;
    return *reinterpret_cast<const Pair*>(chunk + lane % 4 * 4);
  }

  __device__ __forceinline__ void add(int box, Pair pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float difference = widen(pair.element[i]) - widen(first[box].element[i]);
      sum[box][i] += difference;
      squares[box][i] = fma(difference, difference, squares[box][i]);
    }
  }

  // Adds the outputs of a box that the whole warp has staged.
  __device__ __forceinline__ void add_box(int box, const unsigned char* staged, int lane) {
    if (outputs == 0) return;
    if (before == 0) first[box] = staged_pair(staged, box, __ffs(outputs) - 1, lane);
    if (outputs == (1u << kWarpRows) - 1) {
#pragma unroll
      for (int row = 0; row < kWarpRows; ++row) add(box, staged_pair(staged, box, row, lane));
    } else {
#pragma unroll 1
      for (unsigned rest = outputs; rest != 0; rest &= rest - 1) {
        add(box, staged_pair(staged, box, __ffs(rest) - 1, lane));
      }
    }
  }
};

// What a warp leaves in its staging buffers for all warps of the block, of each channel and at last
// how many outputs it has added up.
struct Deviations {
  float mean, squares;
};
constexpr int kCountAt = kBoxes * kBoxColumns * static_cast<int>(sizeof(Deviations));
static_assert(!kGivesStatistics ||
                  kCountAt + static_cast<int>(sizeof(int)) <= C::buffers * kStagedBytes,
              "statistics of a warp lie in its staging buffers");

template <class T>
__device__ __forceinline__ void leave(const ChannelSums<T>& sums, unsigned char* target, int lane) {
  const int count = sums.count();
  if (lane == 0) *reinterpret_cast<int*>(target + kCountAt) = count;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    Deviations both[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = count > 0 ? sums.sum[box][i] / static_cast<float>(count) : 0.0f;
      both[i] = {widen(sums.first[box].element[i]) + shift,
                 sums.squares[box][i] - sums.sum[box][i] * shift};
    }
    reinterpret_cast<float4*>(target)[box * kBoxColumns / 2 + lane] = {
        both[0].mean, both[0].squares, both[1].mean, both[1].squares};
  }
}

// Merges the statistics of a block's warps, in their order, as differences from the first one's
// mean. The first warp has outputs in every tile.
__device__ __forceinline__ void merge(const Shared& shared, const Walk& walk, float* statistics,
                                      int thread) {
  const int column = walk.tile(static_cast<int>(blockIdx.x)).column;
  const int channels = min(kTileColumns, C::out_channels - column);
  const long long share = static_cast<int>(blockIdx.x) / kColumnTiles;
  float* const target = statistics + 3 * share * C::out_channels + column;
  for (int channel = thread; channel < channels; channel += 32 * kConsumerWarps) {
    float mean = 0.0f, sum = 0.0f, squares = 0.0f, count = 0.0f;
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      const unsigned char* const left = shared.staged(warp, 0);
      const int outputs = *reinterpret_cast<const int*>(left + kCountAt);
      if (outputs == 0) continue;
      const Deviations own = reinterpret_cast<const Deviations*>(left)[channel];
      if (warp == 0) mean = own.mean;
      const float difference = own.mean - mean, weighted = static_cast<float>(outputs) * difference;
      count += static_cast<float>(outputs);
      sum += weighted;
      squares += fma(weighted, difference, own.squares);
    }
    const float shift = sum / count;
    target[channel] = mean + shift;
    target[C::out_channels + channel] = squares - sum * shift;
    target[2 * C::out_channels + channel] = count;
  }
}

// Writes the statistics of a block. Its stores have been read from the staging buffers.
template <class T>
__device__ __forceinline__ void store_statistics(const ChannelSums<T>& sums, const Shared& shared,
                                                 const Walk& walk, float* statistics, int warp,
                                                 int lane) {
  __syncwarp();
  leave(sums, shared.staged(warp, 0), lane);
  warpgroups_sync<kConsumers>(kConsumers);
  merge(shared, walk, statistics, 32 * warp + lane);
}

// Stands for the sums of a pass that gives no statistics.
struct NoSums {
  template <class... All>
  __device__ __forceinline__ void add_box(const All&...) {}
  __device__ __forceinline__ void begin_tile(unsigned) {}
};
template <class... All>
__device__ __forceinline__ void store_statistics(const NoSums&, const All&...) {}

template <bool kGives>
struct SumsOf {
  using type = ChannelSums<Scalar>;
};
template <>
struct SumsOf<false> {
  using type = NoSums;
};
using Sums = SumsOf<kGivesStatistics>::type;

}  // namespace hopper
}  // namespace fastconv
