// What the weight gradients of both layouts have in common.
//
// grad[output, input, tap] = sum over images and output pixels of
// grad_output[output, pixel] * input[input, pixel * stride + tap * dilation - padding].
//
// A thread has a patch of the output's gradient, `rows` x `columns` pixels, and adds up the
// products of some kernel rows (`tap_rows`) in registers: a row of its window of the input at a
// time, which all of its pixel rows use that have a tap there. A block walks over its share of
// units (a tile of some images), of which the next one is loaded while one is multiplied; then its
// threads' sums are added up in a fixed order, and written to its own slots of a workspace. A
// second kernel adds those of all blocks. Shares are so small that no thread adds up more than some
// hundred products.
#pragma once
#include "depthwise/axis.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kTaps = C::kernel_height * C::kernel_width;
constexpr int kTapGroups = ceil_div(C::kernel_height, C::tap_rows);
constexpr int kBlockGroups = ceil_div(kTapGroups, C::tap_blocks);  // of a block
constexpr int kSums = C::tap_rows * C::kernel_width + 1;  // of a group's channel, the bias's too
constexpr int kAllOutputs = C::groups * C::group_out;
constexpr int kPatches = C::slots * C::lanes_y * C::lanes_x;
constexpr int kTiles = kTilesX * kTilesY;

// The workspace: of each split, all weights' sums, then those of the bias. Neighbours are what
// neighbouring threads write: taps, or with channels-last tensors, outputs.
constexpr int kWeightSums = kAllOutputs * C::group_in * kTaps;
constexpr long long kSplitSums = kWeightSums + (C::bias ? kAllOutputs : 0);

__device__ __forceinline__ int slot_of(int output, int channel, int tap) {
  return C::channels_last ? (channel * kTaps + tap) * kAllOutputs + output
                          : (output * C::group_in + channel) * kTaps + tap;
}

// Writes one of a group's kSums, the last of which is the bias's.
__device__ __forceinline__ void write_sum(Sum* workspace, int split, int output, int channel,
                                          int tap_group, int index, Sum sum) {
  const int row = tap_group * C::tap_rows + index / C::kernel_width;
  workspace += split * kSplitSums;
  if (index == kSums - 1) {
    if (!C::bias || channel > 0 || tap_group > 0) return;
    workspace[kWeightSums + output] = sum;
  } else if (row < C::kernel_height) {
    workspace[slot_of(output, channel, tap_group * C::tap_rows * C::kernel_width + index)] = sum;
  }
}

// A block's share: units from `first` to `end`, a tile of `slots` images each.
struct Share {
  int first, end;

  __device__ Share(int split, int batch) {
    const long long units = 1ll * ceil_div(batch, C::slots) * kTiles;
    first = static_cast<int>(units * split / C::splits);
    end = static_cast<int>(units * (split + 1) / C::splits);
  }
};
struct Unit {
  int image, y, x;  // the first, and the first output pixel

  __device__ explicit Unit(int index)
      : image(index / kTiles * C::slots),
        y(index % kTiles / kTilesX * kTileRows),
        x(index % kTilesX * kTileColumns) {}
};

// A thread's patch: where it lies in the tile.
struct Patch {
  int slot, y, x;

  __device__ explicit Patch(int index)
      : slot(index / (C::lanes_y * C::lanes_x)),
        y(Rows::first_output<C::rows>(index / C::lanes_x % C::lanes_y)),
        x(Columns::first_output<C::columns>(index % C::lanes_x)) {}
};

// Sums of the products of tap_rows kernel rows, of kChannels channels; and of the gradient itself.
template <int kChannels>
struct TapSums {
  Sum taps[kChannels][C::tap_rows][Columns::kTaps] = {};
  Sum bias[kChannels] = {};

  // Adds the products of a patch, from kernel row `first_tap` on. Pixels that do not exist are not
  // multiplied: zero times infinity is no zero. `rows_left` and `columns_left` do, of the image.
  template <class Grad, class LoadRow>
  __device__ __forceinline__ void add(const Grad& grad, int first_tap, int rows_left,
                                      int columns_left, const LoadRow& load_row) {
    constexpr int kRows = (C::rows - 1) * Rows::kStep + C::tap_rows;
    constexpr bool kWholeColumns = C::out_width % C::columns == 0 && Columns::kOutStep == 1;
    constexpr bool kWholeTaps = C::kernel_height == C::tap_blocks * kBlockGroups * C::tap_rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!kWholeTaps && first_tap + i >= kWindowRows) continue;  // of no tap
      Sum window[kChannels][kWindowColumns];
      load_row(window, i);
#pragma unroll
      for (int r = 0; r < C::rows; ++r) {
        const int k = i - r * Rows::kStep;
        if (k < 0 || k >= C::tap_rows) continue;
        if (r * Rows::kOutStep >= rows_left) continue;
#pragma unroll
        for (int m = 0; m < kChannels; ++m) {
#pragma unroll
          for (int tap = 0; tap < Columns::kTaps; ++tap) {
#pragma unroll
            for (int p = 0; p < C::columns; ++p) {
              if (kWholeColumns || p * Columns::kOutStep < columns_left) {
                taps[m][k][tap] += grad[m][r][p] * window[m][p * Columns::kStep + tap];
              }
            }
          }
        }
      }
    }
  }
  template <class Grad>
  __device__ __forceinline__ void add_bias(const Grad& grad) {
#pragma unroll
    for (int m = 0; m < kChannels; ++m) {
#pragma unroll
      for (int r = 0; r < C::rows; ++r) {
#pragma unroll
        for (int p = 0; p < C::columns; ++p) bias[m] += grad[m][r][p];
      }
    }
  }
};

// Goes through a block's share: `load` starts to copy a unit to its stage, `add` adds it.
template <class Load, class Add>
__device__ __forceinline__ void walk(const Share& share, const Load& load, const Add& add) {
  if (share.first < share.end) load(share.first);
#pragma unroll 1
  for (int unit = share.first; unit < share.end; ++unit) {
    if (unit + 1 < share.end) {
      load(unit + 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    add(unit);
    __syncthreads();  // before the next but one overwrites it
  }
}

// How `reduce` adds up what all splits have: a block has kReduceSums neighbours, and reduce_rows
// threads of each, that have a share of the splits, in order.
constexpr int kReduceSums = C::reduce_threads / C::reduce_rows;
constexpr int kReduceShare = ceil_div(C::splits, C::reduce_rows);

__device__ __forceinline__ Sum share_of(const Sum* workspace, int slot, int row) {
  const int first = row * kReduceShare;
  const int end = min_of(first + kReduceShare, C::splits);
  Sum total = 0;
#pragma unroll 8
  for (int split = first; split < end; ++split) total += workspace[slot + split * kSplitSums];
  return total;
}

__device__ __forceinline__ void write_total(Scalar* grad, Scalar* bias_grad, int slot, Sum total) {
  if (slot >= kWeightSums) {
    bias_grad[slot - kWeightSums] = narrow<Scalar>(total);
    return;
  }
  const int output = C::channels_last ? slot % kAllOutputs : slot / (kTaps * C::group_in);
  const int rest = C::channels_last ? slot / kAllOutputs : slot % (kTaps * C::group_in);
  const int tap = rest % kTaps;
  grad[1ll * output * C::weight_stride_out + 1ll * (rest / kTaps) * C::weight_stride_in +
       1ll * (tap / C::kernel_width) * C::weight_stride_height +
       1ll * (tap % C::kernel_width) * C::weight_stride_width] = narrow<Scalar>(total);
}

}  // namespace depthwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(Config::reduce_threads)
    reduce(const fastconv::SumOf<Config::Scalar>::type* __restrict__ workspace,
           Config::Scalar* __restrict__ grad, Config::Scalar* __restrict__ bias_grad) {
  using namespace fastconv::depthwise;
  const int row = static_cast<int>(threadIdx.x) / kReduceSums;
  const int slot =
      static_cast<int>(blockIdx.x) * kReduceSums + static_cast<int>(threadIdx.x) % kReduceSums;
  Sum total = slot < kSplitSums ? share_of(workspace, slot, row) : Sum(0);
  if constexpr (C::reduce_rows > 1) {
    Sum* const shares = reinterpret_cast<Sum*>(fastconv::shared_memory());
    shares[threadIdx.x] = total;
    __syncthreads();
    if (row > 0) return;
#pragma unroll
    for (int other = 1; other < C::reduce_rows; ++other) {
      total += shares[other * kReduceSums + threadIdx.x];
    }
  }
  if (slot < kSplitSums) write_total(grad, bias_grad, slot, total);
}
