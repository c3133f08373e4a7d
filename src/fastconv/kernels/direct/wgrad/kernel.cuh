// Weight gradient on plain CUDA cores.
//
// grad[m, i, tap] = sum over images and output pixels of
// grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// A block computes a tile of the gradient: M output channels x I input channels of a group, for
// block_taps kernel rows and part_taps of their columns (all of them, unless the kernel is large).
// It accumulates over its split of the pixels (split-K), a stage of stage_rows x stage_columns at a
// time.
//
//   shared memory, one of two stages        registers of a thread
//   grad_output [M][row][pitch]             acc    [channels_per_thread][inputs_per_thread][taps]
//   input       [I][row][tap row][pitch]    window the pixels that 4 output pixels see
//
// A thread takes 4 neighbouring pixels at a time: their window serves all taps, so that 4
// multiply-adds for each accumulator cost channels_per_thread + (window / 4) * inputs_per_thread
// loads. Where a group has few channels, the threads of a block also divide the pixels among
// themselves (lanes_k, warps_k).
//
// Volumes have one more coordinate (depth.cuh): a tile's input channels are those of all planes
// that an output plane reads, and pixels are those of all planes.
//
// Accumulators lose digits over many pixels, so every flush_units stages a thread adds them to its
// own slots of a workspace and clears them. A second kernel reduces the slots in a fixed order,
// without atomics, so that the bits are the same every time. A launch covers as many tiles as the
// workspace has room for.
//
// With `bias`, a thread also adds up the output's gradient that it loads, in further accumulators
// behind the others: the gradient of the bias. The second kernel takes them from one of the threads
// that saw the same channels and pixels.
#pragma once
#include "device/depth.cuh"
#include "device/tile.cuh"

namespace fastconv {
namespace weight_grad {

using C = Config;
using D = DepthOf<C>;
using Scalar = C::Scalar;
using Acc = AccOf<Scalar>::type;
using Unit = IndexOf<C::wide_units>::type;  // counts the stages of all images

constexpr int kPixels = 4;  // neighbours in a row that a thread takes at a time
constexpr int kLanesK = 32 / (C::lanes_m * C::lanes_n);
constexpr int kThreads = 32 * C::warps_m * C::warps_n * C::warps_k;
constexpr int kThreadsM = C::lanes_m * C::warps_m;
constexpr int kThreadsN = C::lanes_n * C::warps_n;
constexpr int kThreadsK = kLanesK * C::warps_k;
constexpr int kTileM = C::channels_per_thread * kThreadsM;
constexpr int kTileI = C::inputs_per_thread * kThreadsN;

constexpr int kTaps = C::part_taps;
constexpr int kParts = ceil_div(C::kernel_width, kTaps);
constexpr int kTapChunks = ceil_div(C::kernel_height, C::block_taps);
constexpr int kBlockTaps = C::block_taps * kTaps;
constexpr int kAccumulators = C::channels_per_thread * C::inputs_per_thread * kBlockTaps;
// Values that a thread keeps in the workspace.
constexpr int kSlots = kAccumulators + (C::bias ? C::channels_per_thread : 0);

// The tile of a single kernel column holds only the columns that it reads; the tile of several
// holds a contiguous range.
constexpr int kColumnStep = kTaps == 1 ? C::stride_width : 1;
constexpr int kColumnStride = C::stride_width / kColumnStep;

// Vector copies need aligned addresses, so the input's tile may start kShift pixels before the
// first one needed. The shift is the same for every part.
constexpr int kShift =
    C::vector_input == 1 ? 0
                         : (C::vector_input - C::padding_left % C::vector_input) % C::vector_input;
static_assert(C::vector_input == 1 || kColumnStep == 1, "neighbours in memory");
static_assert(kParts == 1 || kTaps * C::dilation_width % C::vector_input == 0, "aligned parts");
constexpr int kWindow =
    kShift + (kPixels - 1) * kColumnStride + (kTaps - 1) * C::dilation_width + 1;
constexpr int kWindowPieces = ceil_div(kWindow, 4);

constexpr int kQuads = C::stage_columns / kPixels;  // groups of kPixels in a row of a stage
constexpr int kInputColumns = round_up((kQuads - 1) * kPixels * kColumnStride + kWindowPieces * 4,
                                       C::vector_input > 4 ? C::vector_input : 4);
constexpr int kInputRows = C::stage_rows * C::block_taps;
constexpr int kInputPitch = kInputColumns + C::input_pitch_padding;
constexpr int kGradPitch = C::stage_columns + C::grad_pitch_padding;
constexpr int kGradBytes =
    round_up(kTileM * C::stage_rows * kGradPitch * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kStageBytes =
    kGradBytes + round_up(kTileI * kInputRows * kInputPitch * static_cast<int>(sizeof(Scalar)), 16);
static_assert(2 * kStageBytes == C::shared_bytes, "the launch reserves what the tile needs");
static_assert(C::stage_columns % kPixels == 0, "whole quads");

constexpr int kTilesM = ceil_div(C::group_out, kTileM);
constexpr int kReads = C::group_in * D::kernel;  // channels of all planes that are read
constexpr int kTilesI = ceil_div(kReads, kTileI);
constexpr int kUnitsX = ceil_div(C::out_width, C::stage_columns);
constexpr int kUnitsY = ceil_div(C::out_height, C::stage_rows);
constexpr Unit kPlaneUnits = Unit{kUnitsX} * kUnitsY;
constexpr Unit kImageUnits = kPlaneUnits * D::out;

// Holds offsets and positions within an image, and positions beyond its end: with large strides,
// stages reach far past it.
constexpr long long kReach =
    max_of(1ll * (C::out_height + C::stage_rows) * C::stride_height +
               1ll * (C::kernel_height + C::block_taps) * C::dilation_height,
           1ll * (C::out_width + C::stage_columns) * C::stride_width +
               1ll * kParts * kTaps * C::dilation_width + 1ll * kInputColumns * kColumnStep);
constexpr long long kImageElements =
    C::groups * max_of(1ll * C::group_in * D::in * C::in_height * C::in_width,
                       1ll * C::group_out * D::out * C::out_height * C::out_width);
using Offset = IndexTo<max_of(kImageElements, kReach)>;

// Decodes a block's tile from its index.
struct Tile {
  int part, tap_row, i, m, group;  // tap_row is the first of block_taps kernel rows

  __device__ explicit Tile(int index) {
    part = index % kParts;
    index /= kParts;
    tap_row = index % kTapChunks * C::block_taps;
    index /= kTapChunks;
    i = index % kTilesI;
    index /= kTilesI;
    m = index % kTilesM;
    group = index / kTilesM;
  }

  // Whether this is the first tile of its output channels: the one that stores the bias gradient.
  __device__ bool has_bias() const { return part == 0 && tap_row == 0 && i == 0; }
};

// A thread's place in its block's tile; k is its share of the pixels.
struct Position {
  int m, n, k;

  __device__ Position() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    n = lane % C::lanes_n + C::lanes_n * (warp % C::warps_n);
    m = lane / C::lanes_n % C::lanes_m + C::lanes_m * (warp / C::warps_n % C::warps_m);
    k = lane / (C::lanes_n * C::lanes_m) + kLanesK * (warp / (C::warps_n * C::warps_m));
  }
};

// Returns the thread at a Position.
__device__ __forceinline__ int thread_at(int m, int n, int k) {
  const int lane = (k % kLanesK * C::lanes_m + m % C::lanes_m) * C::lanes_n + n % C::lanes_n;
  const int warp = (k / kLanesK * C::warps_m + m / C::lanes_m) * C::warps_n + n / C::lanes_n;
  return warp * 32 + lane;
}

// Returns where in the workspace a thread of a block keeps its accumulator `index`.
__device__ __forceinline__ long long slot(int block, int index, int thread) {
  return (1ll * block * kSlots + index) * kThreads + thread;
}

// Adds the slots of the threads that share a weight or a bias: its sum over a split's pixels.
__device__ __forceinline__ Acc split_sum(const Acc* workspace, int block, int index, int m, int n) {
  Acc total = 0;
  for (int k = 0; k < kThreadsK; ++k) {
    total += workspace[slot(block, index, thread_at(m, n, k))];
  }
  return total;
}

// A channel of one of a volume's planes, or none.
struct Place {
  int channel, plane;
  bool exists;
};

// Copies [channels][stage_rows][kTapRows][columns] of an image: channels from first_channel on or,
// of a volume, place(i) for each i below kChannels. Stage rows are row_step apart, tap rows
// tap_step; elements outside of the image become zero.
template <int kChannels, int kTapRows, int kColumns, int kStep, int kPitch, int kVector,
          bool kChannelsLast, int kAllChannels, int kDepth, int kHeight, int kWidth, class PlaceOf>
__device__ __forceinline__ void load(Scalar* tile, const Scalar* image, const PlaceOf& place,
                                     int first_channel, int end_channel, Offset first_row,
                                     Offset row_step, Offset tap_step, Offset first_column) {
  constexpr int kVectors = kColumns / kVector;
  constexpr int kRows = C::stage_rows * kTapRows;
#pragma unroll 1  // leaves the registers to the accumulators
  for (int i = threadIdx.x; i < kChannels * kRows * kVectors; i += kThreads) {
    const int channel = kChannelsLast ? i % kChannels : i / (kRows * kVectors);
    const int rest = kChannelsLast ? i / kChannels : i % (kRows * kVectors);
    const int row = rest / kVectors;
    const int column = rest % kVectors * kVector;
    const int c = first_channel + channel;
    const Offset y = first_row + row / kTapRows * row_step + row % kTapRows * tap_step;
    const Offset x = first_column + static_cast<Offset>(column) * kStep;
    bool valid = false;
    Offset offset = 0;
    if constexpr (D::exists) {
      const Place at = place(channel);
      const Offset plane = at.plane;
      valid = at.exists && y >= 0 && y < kHeight && x >= 0 && x < kWidth;
      if (valid) {
        offset =
            kChannelsLast
                ? ((plane * kHeight + y) * kWidth + x) * kAllChannels + at.channel
                : ((static_cast<Offset>(at.channel) * kDepth + plane) * kHeight + y) * kWidth + x;
      }
    } else {
      valid = c < end_channel && y >= 0 && y < kHeight && x >= 0 && x < kWidth;
      if (valid) {
        offset = kChannelsLast ? (y * kWidth + x) * kAllChannels + c
                               : (static_cast<Offset>(c) * kHeight + y) * kWidth + x;
      }
    }
    copy_elements<kVector>(tile + (channel * kRows + row) * kPitch + column, image + offset, valid);
  }
}

using Accumulators = Acc[C::channels_per_thread][C::inputs_per_thread][C::block_taps][kTaps];
using Biases = Acc[C::channels_per_thread];

// Adds the products of four pixels, or of the first `left` of them if not kWhole. Pixels beyond the
// image are skipped although the tiles hold zeros there, because zero times infinity is NaN.
template <bool kWhole>
__device__ __forceinline__ void multiply_quad(const Scalar* grad, const Scalar* input, int left,
                                              Accumulators& acc, Biases& bias) {
  Acc window[C::inputs_per_thread][C::block_taps][kWindowPieces][4];
#pragma unroll
  for (int i = 0; i < C::inputs_per_thread; ++i) {
#pragma unroll
    for (int r = 0; r < C::block_taps; ++r) {
#pragma unroll
      for (int piece = 0; piece < kWindowPieces; ++piece) {
        load4(input + (i * kThreadsN * kInputRows + r) * kInputPitch + piece * 4,
              window[i][r][piece]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::channels_per_thread; ++m) {
    Acc four[4];
    load4(grad + m * kThreadsM * C::stage_rows * kGradPitch, four);
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      if (!kWhole && p >= left) break;
      if (C::bias) bias[m] += four[p];
#pragma unroll
      for (int i = 0; i < C::inputs_per_thread; ++i) {
#pragma unroll
        for (int r = 0; r < C::block_taps; ++r) {
#pragma unroll
          for (int tap = 0; tap < kTaps; ++tap) {
            const int w = kShift + p * kColumnStride + tap * C::dilation_width;
            acc[m][i][r][tap] += four[p] * window[i][r][w / 4][w % 4];
          }
        }
      }
    }
  }
}

// Adds the products of a stage's rows x columns pixels that lie in the image.
__device__ __forceinline__ void multiply(const Scalar* grad, const Scalar* input,
                                         const Position& at, int rows, int columns,
                                         Accumulators& acc, Biases& bias) {
  const int quads = ceil_div(columns, kPixels);
#pragma unroll 1
  for (int q = at.k; q < rows * quads; q += kThreadsK) {
    const int row = C::stage_rows == 1 ? 0 : q / quads;
    const int column = (C::stage_rows == 1 ? q : q % quads) * kPixels;
    const Scalar* grads = grad + (at.m * C::stage_rows + row) * kGradPitch + column;
    const Scalar* inputs =
        input + (at.n * kInputRows + row * C::block_taps) * kInputPitch + column * kColumnStride;
    if (C::out_width % kPixels == 0 || column + kPixels <= columns) {
      multiply_quad<true>(grads, inputs, kPixels, acc, bias);
    } else {
      multiply_quad<false>(grads, inputs, columns - column, acc, bias);
    }
  }
}

}  // namespace weight_grad
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::weight_grad::kThreads, Config::blocks_per_sm)
    weight_grad(const Config::Scalar* __restrict__ grad_output,
                const Config::Scalar* __restrict__ input,
                fastconv::AccOf<Config::Scalar>::type* __restrict__ workspace, int first_tile,
                int tiles, int splits, int batch) {
  using namespace fastconv::weight_grad;
  const Tile tile(first_tile + blockIdx.x % tiles);
  const int split = blockIdx.x / tiles;
  const Position at;
  const long long units = 1ll * batch * D::out * kUnitsY * kUnitsX;
  const Unit first = static_cast<Unit>(units * split / splits);
  const Unit end = static_cast<Unit>(units * (split + 1) / splits);

  unsigned char* shared = fastconv::shared_memory();
  const auto grads = [&](Unit stage) {
    return reinterpret_cast<Scalar*>(shared + stage % 2 * kStageBytes);
  };
  const auto inputs = [&](Unit stage) {
    return reinterpret_cast<Scalar*>(shared + stage % 2 * kStageBytes + kGradBytes);
  };
  const auto row_of = [](Unit unit) {
    return static_cast<int>(unit / kUnitsX % kUnitsY) * C::stage_rows;
  };
  const auto column_of = [](Unit unit) {
    return static_cast<int>(unit % kUnitsX) * C::stage_columns;
  };
  const auto load_unit = [&](Unit unit) {
    const Unit stage = unit - first;
    const long long image = unit / kImageUnits;
    const int row = row_of(unit), column = column_of(unit);
    const int m = tile.group * C::group_out + tile.m * kTileM;
    const int i = tile.group * C::group_in + tile.i * kTileI;
    const auto written = [&](int channel) -> Place {
      const int plane = static_cast<int>(unit / kPlaneUnits % D::out);
      return {m + channel, plane, m + channel < (tile.group + 1) * C::group_out};
    };
    const auto read = [&](int channel) -> Place {
      const int index = tile.i * kTileI + channel;
      const int plane = static_cast<int>(unit / kPlaneUnits % D::out) * D::stride +
                        index / C::group_in * D::dilation - D::padding;
      return {tile.group * C::group_in + index % C::group_in, plane,
              index < kReads && plane >= 0 && plane < D::in};
    };
    constexpr int kOut = C::groups * C::group_out, kIn = C::groups * C::group_in;
    load<kTileM, 1, C::stage_columns, 1, kGradPitch, C::vector_grad, C::grad_channels_last, kOut,
         D::out, C::out_height, C::out_width>(
        grads(stage), grad_output + image * kOut * D::out * C::out_height * C::out_width, written,
        m, (tile.group + 1) * C::group_out, row, 1, 0, column);
    load<kTileI, C::block_taps, kInputColumns, kColumnStep, kInputPitch, C::vector_input,
         C::in_channels_last, kIn, D::in, C::in_height, C::in_width>(
        inputs(stage), input + image * kIn * D::in * C::in_height * C::in_width, read, i,
        (tile.group + 1) * C::group_in,
        static_cast<Offset>(row) * C::stride_height +
            static_cast<Offset>(tile.tap_row) * C::dilation_height - C::padding_top,
        C::stride_height, C::dilation_height,
        static_cast<Offset>(column) * C::stride_width +
            static_cast<Offset>(tile.part * kTaps) * C::dilation_width - C::padding_left - kShift);
    fastconv::copy_async_commit();
  };

  Accumulators acc = {};
  Biases bias = {};
  bool flushed = false;
  // Adds an accumulator to its slot and clears it.
  const auto flush = [&](Acc& value, int index) {
    Acc* target = workspace + slot(blockIdx.x, index, threadIdx.x);
    *target = flushed ? *target + value : value;
    value = 0;
  };
  if (first < end) load_unit(first);
#pragma unroll 1
  for (Unit unit = first; unit < end; ++unit) {
    if (unit + 1 < end) {
      load_unit(unit + 1);
      fastconv::copy_async_wait<1>();
    } else {
      fastconv::copy_async_wait<0>();
    }
    __syncthreads();
    const Unit stage = unit - first;
    const int rows_left = C::out_height - row_of(unit),
              columns_left = C::out_width - column_of(unit);
    multiply(grads(stage), inputs(stage), at, rows_left < C::stage_rows ? rows_left : C::stage_rows,
             columns_left < C::stage_columns ? columns_left : C::stage_columns, acc, bias);
    if ((stage + 1) % C::flush_units == 0 || unit + 1 == end) {
#pragma unroll
      for (int index = 0; index < kAccumulators; ++index) {
        flush(acc[index / (C::inputs_per_thread * kBlockTaps)]
                 [index / kBlockTaps % C::inputs_per_thread][index / kTaps % C::block_taps]
                 [index % kTaps],
              index);
      }
#pragma unroll
      for (int index = kAccumulators; index < kSlots; ++index)
        flush(bias[index - kAccumulators], index);
      flushed = true;
    }
    __syncthreads();  // before the stage after next overwrites this one
  }
}

// The split-K reduction: adds up the slots of every weight, splits in order, and writes the sum
// where the weight's strides say.
extern "C" __global__ void reduce(
    const fastconv::AccOf<Config::Scalar>::type* __restrict__ workspace,
    Config::Scalar* __restrict__ grad, Config::Scalar* __restrict__ bias_grad, int first_tile,
    int tiles, int splits) {
  using namespace fastconv::weight_grad;
  constexpr int kOwners = kThreads / kThreadsK;  // threads of a block with different weights
  const int step = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kAccumulators * kOwners;
       i += step) {
    const int owner = i % kOwners, index = i / kOwners % kAccumulators,
              block = i / (kOwners * kAccumulators);
    const int n = owner % kThreadsN, m = owner / kThreadsN;
    const Tile tile(first_tile + block);
    const int channel =
        tile.m * kTileM + index / (C::inputs_per_thread * kBlockTaps) * kThreadsM + m;
    const int read = tile.i * kTileI + index / kBlockTaps % C::inputs_per_thread * kThreadsN + n;
    const int tap_row = tile.tap_row + index / kTaps % C::block_taps;
    const int tap = tile.part * kTaps + index % kTaps;
    if (channel >= C::group_out || read >= kReads || tap_row >= C::kernel_height ||
        tap >= C::kernel_width) {
      continue;
    }
    Acc total = 0;
    for (int split = 0; split < splits; ++split) {
      total += split_sum(workspace, split * tiles + block, index, m, n);
    }
    const int input = D::exists ? read % C::group_in : read;
    const int plane = D::exists ? read / C::group_in : 0;
    grad[(1ll * tile.group * C::group_out + channel) * C::weight_stride_out +
         1ll * input * C::weight_stride_in + 1ll * plane * D::weight_stride +
         1ll * tap_row * C::weight_stride_height + 1ll * tap * C::weight_stride_width] =
        fastconv::narrow<Scalar>(total);
  }
  if constexpr (C::bias) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kTileM; i += step) {
      const int block = i / kTileM, index = i % kTileM / kThreadsM, m = i % kThreadsM;
      const Tile tile(first_tile + block);
      const int channel = tile.m * kTileM + i % kTileM;
      if (!tile.has_bias() || channel >= C::group_out) continue;
      Acc total = 0;
      for (int split = 0; split < splits; ++split) {
        total += split_sum(workspace, split * tiles + block, kAccumulators + index, m, 0);
      }
      bias_grad[tile.group * C::group_out + channel] = fastconv::narrow<Scalar>(total);
    }
  }
}
