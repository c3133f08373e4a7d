// Weight gradient of narrow groups with fused multiply-adds: what the kernels of both layouts
// share.
//
// grad[output, input, tap] = sum over images and output pixels of
// grad_output[output, pixel] * input[input, pixel * stride + tap * dilation - padding].
//
// A thread takes patches of the output's gradient, `rows` x `columns` pixels each, and accumulates
// the products of some kernel rows (`tap_rows`) in registers: it loads one row of its window of the
// input at a time, which serves every pixel row that has a tap there. A block goes through its
// split's units (a tile of some images each) and loads the next unit while it multiplies one. Then
// it reduces its threads' accumulators in a fixed order and writes them to its own entries of a
// workspace. A second kernel reduces the splits (split-K). Splits are so small that no accumulator
// adds more than a few hundred products.
//
// Of volumes, units are output planes, and a thread has some of the kernel's planes (`tap_planes`),
// too. A block walks along the depth, with the planes of the input in a ring.
#pragma once
#include "depthwise/depth.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kPlaneTaps = C::kernel_height * C::kernel_width;
constexpr int kTaps = D::kernel * kPlaneTaps;
constexpr int kRowGroups = ceil_div(C::kernel_height, C::tap_rows);  // tap groups of a plane
constexpr int kTapGroups = ceil_div(D::kernel, kTapPlanes) * kRowGroups;
constexpr int kBlockGroups = ceil_div(kTapGroups, C::tap_blocks);  // tap groups of a block
// A tap group's values for one channel, of a plane and of all its planes; the last is the bias's.
constexpr int kPlaneAccumulators = C::tap_rows * C::kernel_width;
constexpr int kAccumulators = kTapPlanes * kPlaneAccumulators + 1;
constexpr int kAllOutputs = C::groups * C::group_out;
constexpr int kPatches = C::slots * C::lanes_y * C::lanes_x;
constexpr int kTiles = kTilesX * kTilesY;
// Units of a tile: positions of a residue, then of the next one. Images have a single one.
constexpr int kUnitPlanes = kPlaneResidues * kPlanePositions;
constexpr int kRing = kReadPlanes + kNextPlanes;
constexpr int kMostKept = 6;  // vectors of a plane that a thread keeps the places of

// The first kernel row and the first kernel plane of a tap group.
__device__ __forceinline__ int first_tap_row(int group) {
  return (D::exists ? group % kRowGroups : group) * C::tap_rows;
}
__device__ __forceinline__ int first_tap_plane(int group) {
  return D::exists ? group / kRowGroups * kTapPlanes : 0;
}

// The workspace holds for each split an entry for every weight, then one for every bias. Entries
// that neighbouring threads write are neighbours: taps, or with channels-last tensors, outputs.
constexpr int kWeightEntries = kAllOutputs * C::group_in * kTaps;
constexpr long long kSplitEntries = kWeightEntries + (C::bias ? kAllOutputs : 0);

__device__ __forceinline__ int entry_of(int output, int channel, int tap) {
  return C::channels_last ? (channel * kTaps + tap) * kAllOutputs + output
                          : (output * C::group_in + channel) * kTaps + tap;
}

// Writes value `index` of a tap group's kAccumulators to the workspace.
__device__ __forceinline__ void write_entry(Acc* workspace, int split, int output, int channel,
                                            int tap_group, int index, Acc value) {
  const int row = tap_group * C::tap_rows + index / C::kernel_width;
  workspace += split * kSplitEntries;
  if (index == kAccumulators - 1) {
    if (!C::bias || channel > 0 || tap_group > 0) return;
    workspace[kWeightEntries + output] = value;
  } else if constexpr (D::exists) {
    const int plane = first_tap_plane(tap_group) + index / kPlaneAccumulators;
    const int of_plane = first_tap_row(tap_group) * C::kernel_width + index % kPlaneAccumulators;
    if (plane >= D::kernel || of_plane >= kPlaneTaps) return;
    workspace[entry_of(output, channel, plane * kPlaneTaps + of_plane)] = value;
  } else if (row < C::kernel_height) {
    workspace[entry_of(output, channel, tap_group * C::tap_rows * C::kernel_width + index)] = value;
  }
}

// The units of a split: from `first` to `end`, a tile of `slots` images each.
struct SplitUnits {
  int first, end;

  __device__ SplitUnits(int split, int batch) {
    const long long units = 1ll * ceil_div(batch, C::slots) * (kTiles * kUnitPlanes);
    first = static_cast<int>(units * split / C::splits);
    end = static_cast<int>(units * (split + 1) / C::splits);
  }
};
struct Unit {
  int image, y, x;    // first image, and first output pixel
  OutputPlane plane;  // of volumes

  __device__ explicit Unit(int index)
      : image(index / (kTiles * kUnitPlanes) * C::slots),
        y(index / kUnitPlanes % kTiles / kTilesX * kTileRows),
        x(index / kUnitPlanes % kTilesX * kTileColumns),
        plane(index % kUnitPlanes / kPlanePositions, index % kPlanePositions) {}
};

// A patch's place in the tile: its image, and its first pixel.
struct Patch {
  int slot, y, x;

  __device__ explicit Patch(int index)
      : slot(index / (C::lanes_y * C::lanes_x)),
        y(Rows::first_output<C::rows>(index / C::lanes_x % C::lanes_y)),
        x(Columns::first_output<C::columns>(index % C::lanes_x)) {}
};

// A thread's accumulators for tap_rows kernel rows of kTapPlanes kernel planes and kChannels
// channels, and for the bias.
template <int kChannels>
struct TapAccumulators {
  Acc taps[kTapPlanes][kChannels][C::tap_rows][Columns::kTaps] = {};
  Acc bias[kChannels] = {};

  // Returns one of the kAccumulators values of a channel.
  __device__ __forceinline__ Acc value(int m, int index) const {
    if (index == kAccumulators - 1) return bias[m];
    const int of_plane = index % kPlaneAccumulators;
    return taps[index / kPlaneAccumulators][m][of_plane / C::kernel_width]
               [of_plane % C::kernel_width];
  }

  // Adds the products of a patch for one of the thread's kernel planes, from kernel row `first_tap`
  // on. The image ends `rows_left` rows
  // and `columns_left` columns after the patch's first pixel; pixels beyond are skipped although
  // their gradient is zero, because zero times infinity is NaN.
  template <class Grad, class LoadRow>
  __device__ __forceinline__ void add(int plane, const Grad& grad, int first_tap, int rows_left,
                                      int columns_left, const LoadRow& load_row) {
    constexpr int kRows = (C::rows - 1) * Rows::kStep + C::tap_rows;
    constexpr bool kWholeColumns = C::out_width % C::columns == 0 && Columns::kOutStep == 1;
    constexpr bool kWholeTaps =
        D::exists ? C::kernel_height % C::tap_rows == 0
                  : C::kernel_height == C::tap_blocks * kBlockGroups * C::tap_rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!kWholeTaps && first_tap + i >= kWindowRows) continue;  // no tap reads this row
      Acc window[kChannels][kWindowColumns];
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
                taps[plane][m][k][tap] += grad[m][r][p] * window[m][p * Columns::kStep + tap];
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

// A step of a pipeline of two stages: `load_next` starts to copy what the next step reads, if there
// is `more`, while `use` computes with what the step before has begun to copy. The next load reuses
// what this step reads.
template <class Load, class Use>
__device__ __forceinline__ void use_while_loading(bool more, const Load& load_next,
                                                  const Use& use) {
  if (more) {
    load_next();
    copy_async_wait<1>();
  } else {
    copy_async_wait<0>();
  }
  __syncthreads();
  use();
  __syncthreads();
}

// Goes through a split's units in a two-stage pipeline: `load` starts to copy a unit to its stage,
// `add` accumulates it.
template <class Load, class Add>
__device__ __forceinline__ void pipeline_units(const SplitUnits& range, const Load& load,
                                               const Add& add) {
  if (range.first < range.end) load(range.first);
#pragma unroll 1
  for (int unit = range.first; unit < range.end; ++unit) {
    use_while_loading(unit + 1 < range.end, [&] { load(unit + 1); }, [&] { add(unit); });
  }
}

// Goes through a split's units of volumes. `load` starts to copy a unit and the planes of the input
// that it reads: all of them where a walk begins, or those that the unit before it has not read.
template <class Load, class Add>
__device__ __forceinline__ void walk_units(const SplitUnits& range, const Load& load,
                                           const Add& add) {
  bool loaded = false;
#pragma unroll 1
  for (int unit = range.first; unit < range.end; ++unit) {
    if (!loaded) load(unit, true);
    loaded = unit + 1 < range.end && (unit + 1) % kPlanePositions != 0;
    use_while_loading(loaded, [&] { load(unit + 1, false); }, [&] { add(unit); });
  }
}

// Calls add(number, plane) for the thread's kernel planes whose planes of the input exist; `plane`
// is the place of that in the ring.
template <class Add>
__device__ __forceinline__ void add_planes(const OutputPlane& at, int first_tap_plane,
                                           const Add& add) {
#pragma unroll
  for (int number = 0; number < kTapPlanes; ++number) {
    const int tap = first_tap_plane + number;
    if constexpr (D::exists) {
      if (tap >= D::kernel || !at.reads(tap)) continue;
    }
    add(number, D::exists ? at.place<kRing>(tap) : 0);
  }
}

// In `reduce`, a block adds up kReduceEntries neighbouring entries over all splits. reduce_rows
// threads take kReduceSplits consecutive splits each of the same entry.
constexpr int kReduceEntries = C::reduce_threads / C::reduce_rows;
constexpr int kReduceSplits = ceil_div(C::splits, C::reduce_rows);

// Adds up the splits of an entry that belong to a row of threads.
__device__ __forceinline__ Acc sum_splits(const Acc* workspace, int entry, int row) {
  const int first = row * kReduceSplits;
  const int end = min_of(first + kReduceSplits, C::splits);
  Acc total = 0;
#pragma unroll 8
  for (int split = first; split < end; ++split) total += workspace[entry + split * kSplitEntries];
  return total;
}

// Writes the reduced value of an entry to the weight's or the bias's gradient.
__device__ __forceinline__ void write_grad(Scalar* grad, Scalar* bias_grad, int entry, Acc total) {
  if (entry >= kWeightEntries) {
    bias_grad[entry - kWeightEntries] = narrow<Scalar>(total);
    return;
  }
  const int output = C::channels_last ? entry % kAllOutputs : entry / (kTaps * C::group_in);
  const int rest = C::channels_last ? entry / kAllOutputs : entry % (kTaps * C::group_in);
  const int tap = rest % kTaps;
  if constexpr (D::exists) grad += 1ll * (tap / kPlaneTaps) * D::weight_stride;
  grad[1ll * output * C::weight_stride_out + 1ll * (rest / kTaps) * C::weight_stride_in +
       1ll * ((D::exists ? tap % kPlaneTaps : tap) / C::kernel_width) * C::weight_stride_height +
       1ll * (tap % C::kernel_width) * C::weight_stride_width] = narrow<Scalar>(total);
}

}  // namespace depthwise
}  // namespace fastconv

// The split-K reduction: adds up all splits in a fixed order, without atomics, so that the bits are
// the same every time.
extern "C" __global__ void __launch_bounds__(Config::reduce_threads)
    reduce(const fastconv::AccOf<Config::Scalar>::type* __restrict__ workspace,
           Config::Scalar* __restrict__ grad, Config::Scalar* __restrict__ bias_grad) {
  using namespace fastconv::depthwise;
  const int row = static_cast<int>(threadIdx.x) / kReduceEntries;
  const int entry = static_cast<int>(blockIdx.x) * kReduceEntries +
                    static_cast<int>(threadIdx.x) % kReduceEntries;
  Acc total = entry < kSplitEntries ? sum_splits(workspace, entry, row) : Acc(0);
  if constexpr (C::reduce_rows > 1) {
    Acc* const partial = reinterpret_cast<Acc*>(fastconv::shared_memory());
    partial[threadIdx.x] = total;
    __syncthreads();
    if (row > 0) return;
#pragma unroll
    for (int other = 1; other < C::reduce_rows; ++other) {
      total += partial[other * kReduceEntries + threadIdx.x];
    }
  }
  if (entry < kSplitEntries) write_grad(grad, bias_grad, entry, total);
}
