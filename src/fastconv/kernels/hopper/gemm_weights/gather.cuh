// Loading warps, for what tensor copies cannot bring: taps of planes begin anywhere, copies at
// multiples of 16 bytes; and few channels are less than a copy's 128 bytes.
//
// A lane has a position of a step (two of 16-bit types), which is four bytes of each row of a
// stage: a warp loads a channel's neighbours at once, and writes them side by side, swizzled as a
// copy would. The loads of a step are under way while those of the step before are written.
#pragma once
#include "hopper/gemm_weights/load.cuh"

namespace fastconv {
namespace hopper {

constexpr int kLanePositions = 4 / static_cast<int>(sizeof(Scalar));
constexpr int kWarpRows = C::grad_copied ? 0 : kTileRows / C::loaders;
constexpr int kWarpColumns = kTileColumns / C::loaders;

// Elements of the input from a channel to the next, and from a pixel to the next in a row.
constexpr int kInPixels = C::in_height * C::in_width;
constexpr int kInChannels = C::groups * C::group_in;
constexpr int kChannelStride = C::channels_last ? 1 : kInPixels;
constexpr int kPixelStride = C::channels_last ? kInChannels : 1;

// What a position has of a group: its element of the first output channel; and where its first tap
// reads the first input channel, which may be outside of the image.
struct Position {
  const Scalar* grad;
  const Scalar* first_tap;
  int row = 0, column = 0;
  bool exists = false;

  template <class Sources>
  __device__ __forceinline__ void find(const Sources& sources, int group, int flat, int end) {
    exists = flat < end;
    const int number = exists ? flat / kPositions : 0;
    const int in_image = exists ? flat - number * kPositions : 0;
    const int y = in_image / C::out_width;
    row = y * C::stride_height - C::padding_top;
    column = (in_image - y * C::out_width) * C::stride_width - C::padding_left;
    if constexpr (!C::grad_copied) {
      const long long first = 1LL * number * C::groups * C::group_out + group * kOut;
      grad = sources.grad_output + first * kPositions + in_image;
    }
    first_tap = sources.input + 1LL * number * kInChannels * kInPixels +
                (group * kIn * kChannelStride + (row * C::in_width + column) * kPixelStride);
  }
  __device__ __forceinline__ bool has_row(int tap) const {
    return exists && static_cast<unsigned>(row + tap * C::dilation_height) < C::in_height;
  }
  __device__ __forceinline__ bool has_column(int tap) const {
    return static_cast<unsigned>(column + tap * C::dilation_width) < C::in_width;
  }
  // What it reads there, of the group's first channel.
  __device__ __forceinline__ const Scalar* input(int tap_row, int tap_column) const {
    const int y = tap_row * C::dilation_height, x = tap_column * C::dilation_width;
    return first_tap + (y * C::in_width + x) * kPixelStride;
  }
};

// Columns of the kernel that a position reads, one bit each.
__device__ __forceinline__ unsigned columns_read(const Position& position) {
  unsigned bits = 0;
#pragma unroll
  for (int tap = 0; tap < C::kernel_width; ++tap) bits |= position.has_column(tap) ? 1u << tap : 0;
  return bits;
}

// A warp's share of a tile: so many rows of a stage, then so many columns.
template <class Sources>
struct Gatherer {
  const Sources& sources;
  const Tile& tile;
  int warp, lane, end;
  Position positions[kLanePositions];
  unsigned bits[kWarpRows + kWarpColumns][kLanePositions];  // under way

  __device__ __forceinline__ Gatherer(const Sources& sources, const Tile& tile, int warp, int batch)
      : sources(sources),
        tile(tile),
        warp(warp),
        lane(static_cast<int>(threadIdx.x) % 32),
        end(batch * kPositions) {}

  // A step's positions; of none, no position exists.
  __device__ __forceinline__ void find(int step, bool exists) {
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      positions[i].find(sources, tile.group, step * kDepth + lane * kLanePositions + i,
                        exists ? end : 0);
    }
  }
  // Writes what was loaded for a row (or column) of the warp.
  __device__ __forceinline__ void store(unsigned char* first, int row, int index) const {
    unsigned char* const target = first + row * kSpan + (lane * 4 ^ row % 8 * 16);
    if constexpr (sizeof(Scalar) == 4) {
      *reinterpret_cast<float*>(target) = round_to_even_tf32(__uint_as_float(bits[index][0]));
    } else {
      *reinterpret_cast<unsigned*>(target) = bits[index][0] | bits[index][1] << 16;
    }
  }

  template <bool kStores>
  __device__ __forceinline__ void move_rows(unsigned char* target) {
    const int first = tile.row + warp * kWarpRows;
    const Scalar* sources[kLanePositions];
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      sources[i] = positions[i].grad + first * kPositions;
      hold_address(sources[i]);
    }
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      if constexpr (kStores) store(target, row, row);
      const bool is_row = kOut % kTileRows == 0 || first + row < kOut;
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        bits[row][i] =
            tensor::load_bits(sources[i] + row * kPositions, is_row && positions[i].exists);
      }
    }
  }

  // Columns of the same tap are loaded from one address on.
  template <bool kStores>
  __device__ __forceinline__ void move_columns(unsigned char* target) {
    constexpr int kOfTap = gcd(kTapColumns, kWarpColumns);
#pragma unroll
    for (int first = 0; first < kWarpColumns; first += kOfTap) {
      const int at = tile.column + warp * kWarpColumns + first;
      const int tap = at / kTapColumns, channel = at - tap * kTapColumns;
      const int tap_row = tap / C::kernel_width, tap_column = tap % C::kernel_width;
      const Scalar* sources[kLanePositions];
      bool read[kLanePositions];
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        const Position& position = positions[i];
        sources[i] = position.input(tap_row, tap_column) + channel * kChannelStride;
        hold_address(sources[i]);
        read[i] = tap < kTaps && position.has_row(tap_row) && position.has_column(tap_column);
      }
#pragma unroll
      for (int j = 0; j < kOfTap; ++j) {
        if constexpr (kStores) store(target, first + j, kWarpRows + first + j);
        const bool is_channel = kIn == kTapColumns || channel + j < kIn;
#pragma unroll
        for (int i = 0; i < kLanePositions; ++i) {
          bits[kWarpRows + first + j][i] =
              tensor::load_bits(sources[i] + j * kChannelStride, is_channel && read[i]);
        }
      }
    }
  }

  // The same if each column has a tap of its own, known when this is compiled.
  template <bool kStores, int kFirst>
  __device__ __forceinline__ void move_few_columns(unsigned char* target) {
    unsigned read[kLanePositions], of_row[kLanePositions];
    Position held[kLanePositions];
#pragma unroll
    for (int i = 0; i < kLanePositions; ++i) {
      read[i] = columns_read(positions[i]);
      held[i] = positions[i];
      hold_address(held[i].first_tap);
    }
#pragma unroll
    for (int j = 0; j < kWarpColumns; ++j) {
      const int tap = (kFirst + j) / kIn, channel = (kFirst + j) % kIn;
      const int tap_row = tap / C::kernel_width, tap_column = tap % C::kernel_width;
      if constexpr (kStores) store(target, j, kWarpRows + j);
#pragma unroll
      for (int i = 0; i < kLanePositions; ++i) {
        if (j == 0 || (tap_column == 0 && channel == 0)) {
          of_row[i] = held[i].has_row(tap_row) ? read[i] : 0;
        }
        bits[kWarpRows + j][i] =
            tensor::load_bits(held[i].input(tap_row, tap_column) + channel * kChannelStride,
                              tap < kTaps && (of_row[i] >> tap_column & 1));
      }
    }
  }

  // Stores what is under way to a stage, and loads the positions that were found.
  template <bool kStores, int kFirst>
  __device__ __forceinline__ void move(const Shared& shared, int stage) {
    move_rows<kStores>(shared.rows(stage) + warp * kWarpRows * kSpan);
    unsigned char* const columns = shared.columns(stage) + warp * kWarpColumns * kSpan;
    if constexpr (C::few) {
      move_few_columns<kStores, kFirst>(columns);
    } else {
      move_columns<kStores>(columns);
    }
  }
};

// A warp's share of a run's steps. Of few channels, kFirst is its first column.
template <int kFirst, class Sources>
__device__ __forceinline__ void gather_run(const Shared& shared, Ring& ring, const Run& run,
                                           Gatherer<Sources>& gatherer) {
  gatherer.find(run.first, true);
  gatherer.template move<false, kFirst>(shared, 0);
  for (int step = run.first; step < run.end; ++step, ring.advance()) {
    gatherer.find(step + 1, step + 1 < run.end);
    barrier_wait(shared.empty(ring.stage), ring.parity);
    if constexpr (C::grad_copied) {
      if (gatherer.warp == 0 && is_elected()) {
        copy_step(shared, gatherer.sources, ring.stage, gatherer.tile, step);
      }
    }
    gatherer.template move<true, kFirst>(shared, ring.stage);
    fence_async_shared();
    __syncwarp();
    if (gatherer.lane == 0) barrier_arrive(shared.full(ring.stage));
  }
}

// The same of a warp's `number`-th share of columns, counted through all tiles of a group.
template <int kNumber, class Sources>
__device__ __forceinline__ void gather_share(int number, const Shared& shared, Ring& ring,
                                             const Run& run, Gatherer<Sources>& gatherer) {
  constexpr int kLast = C::few ? kColumnTiles * C::loaders - 1 : 0;
  if (kNumber == kLast || number == kNumber) {
    gather_run<kNumber * kWarpColumns>(shared, ring, run, gatherer);
  } else {
    gather_share<min_of(kNumber + 1, kLast)>(number, shared, ring, run, gatherer);
  }
}

template <class Sources>
__device__ __forceinline__ void gather_steps(const Shared& shared, const Sources& sources,
                                             const Share& share, int batch) {
  Ring ring(1);
  const int warp = static_cast<int>(threadIdx.x) / 32 - kConsumerWarps;
  for_runs(share, static_cast<int>(blockIdx.x), [&](const Run& run, int) {
    const Tile tile(run.tile);
    Gatherer<Sources> gatherer(sources, tile, warp, batch);
    gather_share<0>(tile.column / kWarpColumns + warp, shared, ring, run, gatherer);
  });
}

}  // namespace hopper
}  // namespace fastconv
