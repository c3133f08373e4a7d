// Weight gradients of narrow groups, of channels-last tensors. Neighbouring threads have
// neighbouring channels; those of other patches, or other kernel rows, come after them.
//
//   input    [slot][halo row][halo column][channel]     the output's gradient   [slot][row][column]
//                                                                               [channel]
#pragma once
#include "depthwise/weight_grad.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kOutputs = C::lanes_c * C::lane_channels;  // channels of a tile
constexpr int kTileGroups = kOutputs >= C::group_out ? kOutputs / C::group_out : 1;
constexpr int kParts = ceil_div(C::group_out, kOutputs);  // tiles of a group
constexpr int kInputs = kTileGroups * C::group_in;
constexpr int kChannelTiles = ceil_div(C::groups, kTileGroups) * kParts;
static_assert(kParts == 1 ? kOutputs % C::group_out == 0 : kTileGroups == 1, "or several tiles");
static_assert(C::lane_channels == 1 || (C::group_in == 1 && C::group_out == 1), "one to one");

constexpr int kBlockGroups = ceil_div(kTapGroups, C::tap_blocks);
constexpr int kGroupPatches = C::group_patches;  // that a group of threads has at once
constexpr int kThreads = round_up(kBlockGroups * kGroupPatches * C::lanes_c, 32);
constexpr int kPatchRounds = ceil_div(kPatches, kGroupPatches);

constexpr int kPixel = round_up(kInputs, C::vector);
constexpr int kGradPixel = round_up(kOutputs, C::grad_vector);
constexpr int kSlot = kHaloRows * kHaloColumns * kPixel;
constexpr int kGradSlot = kTileRows * kTileColumns * kGradPixel;
constexpr int kInputBytes = round_up(C::slots * kSlot * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kStageBytes =
    kInputBytes + round_up(C::slots * kGradSlot * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kSums = C::tap_rows * C::kernel_width + 1;  // of a channel, with the bias's
static_assert(2 * kStageBytes <= C::shared_bytes &&
                  kBlockGroups * kSums * kOutputs * static_cast<int>(sizeof(Sum)) <=
                      C::shared_bytes,
              "as planned");

// Copies a tile of pixels of each of `slots` images: kChannels of them, from `channel` on.
template <int kRows, int kColumns, int kChannels, int kVector, int kAll, int kHeight, int kWidth>
__device__ __forceinline__ void load_pixels(Scalar* target, const Scalar* image, int images_left,
                                            int channel, int first_row, int first_column) {
  constexpr int kVectors = kChannels / kVector;
  constexpr int kTasks = C::slots * kRows * kColumns * kVectors;
#pragma unroll 2
  for (int task = static_cast<int>(threadIdx.x); task < kTasks; task += kThreads) {
    const int first = channel + task % kVectors * kVector;
    const int pixel = task / kVectors;
    const int x = first_column + pixel % kColumns;
    const int y = first_row + pixel / kColumns % kRows;
    const int slot = pixel / (kColumns * kRows);
    const bool exists = slot < images_left && first < kAll && static_cast<unsigned>(y) < kHeight &&
                        static_cast<unsigned>(x) < kWidth;
    const long long source = ((1ll * slot * kHeight + y) * kWidth + x) * kAll + first;
    copy_elements<kVector>(target + task * kVector, image + (exists ? source : 0), exists);
  }
}

using Channels = Vector<Scalar, C::lane_channels>;

__device__ __forceinline__ void load(Sum (&target)[C::lane_channels], const Scalar* source) {
  widen_vector(*reinterpret_cast<const Channels*>(source), target);
}

// A thread's place in the block.
struct Position {
  int output;  // the first channel, of the tile
  int input;   // that it reads
  int patch;   // the first
  int group;   // of kernel rows

  __device__ explicit Position(int channel) {
    int thread = static_cast<int>(threadIdx.x);
    output = thread % C::lanes_c * C::lane_channels;
    thread /= C::lanes_c;
    patch = thread % kGroupPatches;
    group = thread / kGroupPatches;
    input = (kParts == 1 ? output / C::group_out * C::group_in : 0) + channel;
  }
  __device__ bool idle() const {
    return kBlockGroups * kGroupPatches * C::lanes_c < kThreads && group >= kBlockGroups;
  }
};

// Adds the sums of a unit's patches that are this thread's.
__device__ __forceinline__ void add_unit(TapSums<C::lane_channels>& sums, const Scalar* input,
                                         const Scalar* grad, const Position& at, const Unit& unit,
                                         int images, int first_tap, bool has_bias) {
#pragma unroll 1
  for (int round = 0; round < kPatchRounds; ++round) {
    const int index = round * kGroupPatches + at.patch;
    if (kPatches % kGroupPatches != 0 && index >= kPatches) return;
    const Patch patch(index);
    if (C::slots > 1 && unit.image + patch.slot >= images) return;
    Sum numbers[C::lane_channels][C::rows][C::columns];
#pragma unroll
    for (int r = 0; r < C::rows; ++r) {
#pragma unroll
      for (int p = 0; p < C::columns; ++p) {
        const int pixel =
            (patch.y + r * Rows::kOutStep) * kTileColumns + patch.x + p * Columns::kOutStep;
        Sum pixels[C::lane_channels];
        load(pixels, grad + patch.slot * kGradSlot + pixel * kGradPixel + at.output);
#pragma unroll
        for (int m = 0; m < C::lane_channels; ++m) numbers[m][r][p] = kept(pixels[m]);
      }
    }
    const int first = (patch.y * Rows::kTimes + first_tap * Rows::kUnit) * kHaloColumns +
                      patch.x * Columns::kTimes;
    const Scalar* const window = input + patch.slot * kSlot + first * kPixel + at.input;
    sums.add(numbers, first_tap, C::out_height - unit.y - patch.y, C::out_width - unit.x - patch.x,
             [&](Sum(&row)[C::lane_channels][kWindowColumns], int i) {
#pragma unroll
               for (int j = 0; j < kWindowColumns; ++j) {
                 Sum pixels[C::lane_channels];
                 load(pixels,
                      window + (i * (Rows::kUnit * kHaloColumns) + j * Columns::kUnit) * kPixel);
#pragma unroll
                 for (int m = 0; m < C::lane_channels; ++m) row[m][j] = kept(pixels[m]);
               }
             });
    if (has_bias) sums.add_bias(numbers);
  }
}

}  // namespace depthwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    weight_grad(const Config::Scalar* __restrict__ grad_output,
                const Config::Scalar* __restrict__ input,
                fastconv::SumOf<Config::Scalar>::type* __restrict__ workspace, int images) {
  using namespace fastconv::depthwise;
  unsigned block = blockIdx.x;
  const int tile = static_cast<int>(block % kChannelTiles);  // neighbours share pixels' sectors
  block /= kChannelTiles;
  const int split = static_cast<int>(block % C::splits);
  block /= C::splits;
  const int first_group = static_cast<int>(block % C::tap_blocks) * kBlockGroups;
  const int channel = static_cast<int>(block / C::tap_blocks);  // of the group
  const int group = tile / kParts * kTileGroups;
  const int first_output = group * C::group_out + tile % kParts * kOutputs;
  const Position at(channel);
  const int first_tap = (first_group + at.group) * C::tap_rows;
  const bool has_bias = C::bias && channel == 0 && first_tap == 0;

  unsigned char* const shared = fastconv::shared_memory();
  const auto inputs = [&](int unit) {
    return reinterpret_cast<Scalar*>(shared + unit % 2 * kStageBytes);
  };
  const auto grads = [&](int unit) {
    return reinterpret_cast<Scalar*>(shared + unit % 2 * kStageBytes + kInputBytes);
  };
  const auto load_unit = [&](int index) {
    const Unit unit(index);
    load_pixels<kHaloRows, kHaloColumns, kPixel, C::vector, kInChannels, C::in_height, C::in_width>(
        inputs(index), input + 1ll * unit.image * C::in_height * C::in_width * kInChannels,
        images - unit.image, group * C::group_in, unit.y * Rows::kTimes + Rows::kOrigin,
        unit.x * Columns::kTimes + Columns::kOrigin);
    load_pixels<kTileRows, kTileColumns, kGradPixel, C::grad_vector, kOutChannels, C::out_height,
                C::out_width>(
        grads(index), grad_output + 1ll * unit.image * C::out_height * C::out_width * kOutChannels,
        images - unit.image, first_output, unit.y, unit.x);
    fastconv::copy_async_commit();
  };

  TapSums<C::lane_channels> sums;
  const Share share(split, images);
  if (share.first < share.end) load_unit(share.first);
#pragma unroll 1
  for (int unit = share.first; unit < share.end; ++unit) {
    if (unit + 1 < share.end) {
      load_unit(unit + 1);
      fastconv::copy_async_wait<1>();
    } else {
      fastconv::copy_async_wait<0>();
    }
    __syncthreads();
    if (!at.idle()) {
      add_unit(sums, inputs(unit), grads(unit), at, Unit(unit), images, first_tap, has_bias);
    }
    __syncthreads();  // before the next but one overwrites it
  }

  // Patch after patch, a group's threads add what they have: [group][sum][channel].
  Sum* const gathered = reinterpret_cast<Sum*>(shared);
  Sum* const mine = gathered + at.group * (kSums * kOutputs) + at.output;
#pragma unroll 1
  for (int turn = 0; turn < kGroupPatches; ++turn) {
    if (!at.idle() && at.patch == turn) {
#pragma unroll
      for (int m = 0; m < C::lane_channels; ++m) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const Sum sum =
              i + 1 < kSums ? sums.taps[m][i / C::kernel_width][i % C::kernel_width] : sums.bias[m];
          Sum& target = mine[i * kOutputs + m];
          target = turn == 0 ? sum : target + sum;
        }
      }
    }
    __syncthreads();
  }
  for (int i = static_cast<int>(threadIdx.x); i < kBlockGroups * kSums * kOutputs; i += kThreads) {
    const int place = i % kOutputs;
    const int at_sum = i / kOutputs % kSums;
    const int tap_group = first_group + i / (kOutputs * kSums);
    const int output = first_output + place;
    if (output >= kOutChannels ||
        (kParts > 1 && tile % kParts * kOutputs + place >= C::group_out)) {
      continue;
    }
    const int row = tap_group * C::tap_rows + at_sum / C::kernel_width;
    if (at_sum == kSums - 1) {
      if (C::bias && channel == 0 && tap_group == 0) {
        workspace[bias_slot_of(split, output)] = gathered[i];
      }
    } else if (row < C::kernel_height) {
      workspace[slot_of(split, output, channel, row * C::kernel_width + at_sum % C::kernel_width)] =
          gathered[i];
    }
  }
}
