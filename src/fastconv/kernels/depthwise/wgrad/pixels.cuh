// Weight gradient of narrow groups on channels-last (NHWC) tensors. A block's threads divide first
// channels among themselves (neighbouring threads take neighbours), then patches, then kernel rows.
//
//   input    [slot][halo row][halo column][channel]     the output's gradient   [slot][row][column]
//                                                                               [channel]
#pragma once
#include "depthwise/pixel_tiles.cuh"
#include "depthwise/wgrad/kernel.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kGroupPatches = C::group_patches;  // patches that a tap group's threads take at once
constexpr int kThreads = round_up(kBlockGroups * kGroupPatches * C::lanes_c, 32);
constexpr int kPatchRounds = ceil_div(kPatches, kGroupPatches);

constexpr int kGradPixel = round_up(kOutputs, C::grad_vector);
constexpr int kGradSlot = kTileRows * kTileColumns * kGradPixel;
constexpr int kGradBytes = round_up(C::slots * kGradSlot * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kStageBytes = kInputBytes + kGradBytes;
constexpr int kRingBytes = kRing * kInputBytes;  // of volumes
static_assert((D::exists ? kRingBytes + 2 * kGradBytes : 2 * kStageBytes) <= C::shared_bytes &&
                  kBlockGroups * kAccumulators * kOutputs * static_cast<int>(sizeof(Acc)) <=
                      C::shared_bytes,
              "as planned");

// A thread's place in the block.
struct Position {
  int output;  // first output channel within the tile
  int input;   // input channel that it reads
  int patch;   // first patch
  int group;   // tap group: which kernel rows

  __device__ explicit Position(int channel) {
    int thread = static_cast<int>(threadIdx.x);
    output = thread % C::lanes_c * C::lane_channels;
    thread /= C::lanes_c;
    patch = thread % kGroupPatches;
    group = thread / kGroupPatches;
    input = first_read(output) + channel;
  }
  __device__ bool idle() const {
    return kBlockGroups * kGroupPatches * C::lanes_c < kThreads && group >= kBlockGroups;
  }
};

// Accumulates this thread's patches of a unit; of volumes, `input` is the ring.
__device__ __forceinline__ void add_unit(TapAccumulators<C::lane_channels>& acc,
                                         const Scalar* input, const Scalar* grad,
                                         const Position& at, const Unit& unit, int images,
                                         int first_tap, int first_plane, bool has_bias) {
#pragma unroll 1
  for (int round = 0; round < kPatchRounds; ++round) {
    const int index = round * kGroupPatches + at.patch;
    if (kPatches % kGroupPatches != 0 && index >= kPatches) return;
    const Patch patch(index);
    if (C::slots > 1 && unit.image + patch.slot >= images) return;
    Acc numbers[C::lane_channels][C::rows][C::columns];
#pragma unroll
    for (int r = 0; r < C::rows; ++r) {
#pragma unroll
      for (int p = 0; p < C::columns; ++p) {
        const int pixel =
            (patch.y + r * Rows::kOutStep) * kTileColumns + patch.x + p * Columns::kOutStep;
        Acc pixels[C::lane_channels];
        load(pixels, grad + patch.slot * kGradSlot + pixel * kGradPixel + at.output);
#pragma unroll
        for (int m = 0; m < C::lane_channels; ++m) numbers[m][r][p] = kept(pixels[m]);
      }
    }
    const int first = (patch.y * Rows::kTimes + first_tap * Rows::kUnit) * kHaloColumns +
                      patch.x * Columns::kTimes;
    const Scalar* const window = input + patch.slot * kSlot + first * kPixel + at.input;
    add_planes(unit.plane, first_plane, [&](int number, int place) {
      const Scalar* const plane = window + place * (kInputBytes / static_cast<int>(sizeof(Scalar)));
      acc.add(
          number, numbers, first_tap, C::out_height - unit.y - patch.y,
          C::out_width - unit.x - patch.x,
          [&](Acc(&row)[C::lane_channels][kWindowColumns], int i) { load_window(row, plane, i); });
    });
    if (has_bias) acc.add_bias(numbers);
  }
}

}  // namespace depthwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    weight_grad(const Config::Scalar* __restrict__ grad_output,
                const Config::Scalar* __restrict__ input,
                fastconv::AccOf<Config::Scalar>::type* __restrict__ workspace, int images) {
  using namespace fastconv::depthwise;
  unsigned block = blockIdx.x;
  // Channel tiles change fastest: blocks that share memory sectors run together.
  const ChannelTile tile(static_cast<int>(block % kChannelTiles));
  block /= kChannelTiles;
  const int split = static_cast<int>(block % C::splits);
  block /= C::splits;
  const int first_group = static_cast<int>(block % C::tap_blocks) * kBlockGroups;
  const int channel = static_cast<int>(block / C::tap_blocks);  // input channel within the group
  const Position at(channel);
  const int first_tap = first_tap_row(first_group + at.group);
  const int first_plane = first_tap_plane(first_group + at.group);
  const bool has_bias = C::bias && channel == 0 && first_tap == 0 && first_plane == 0;

  unsigned char* const shared = fastconv::shared_memory();
  const auto inputs = [&](int unit) {
    return reinterpret_cast<Scalar*>(shared + unit % 2 * kStageBytes);
  };
  const auto grads = [&](int unit) {
    return reinterpret_cast<Scalar*>(shared + unit % 2 * kStageBytes + kInputBytes);
  };
  using GradRectangle =
      PixelRectangle<kTileRows, kTileColumns, kTileColumns, kGradSlot, kGradPixel, C::grad_vector,
                     kOutChannels, D::out, C::out_height, C::out_width, kThreads>;
  const auto grad_rectangle = [&](const Unit& unit) {
    return GradRectangle{images - unit.image, tile.first_output(), unit.y, unit.x};
  };
  TapAccumulators<C::lane_channels> acc;
  if constexpr (D::exists) {
    const auto ring = [&](int place) {
      return reinterpret_cast<Scalar*>(shared + place * kInputBytes);
    };
    const auto grad = [&](int unit) {
      return reinterpret_cast<Scalar*>(shared + kRingBytes + unit % 2 * kGradBytes);
    };
    if constexpr (C::inside) {
      clear<kRingBytes, kThreads>(shared);
      __syncthreads();
    }
    PlaneCopies<HaloRectangle<kThreads>, kMostKept> halo;
    PlaneCopies<GradRectangle, kMostKept> gradient;
    walk_units(
        SplitUnits(split, images),
        [&](int index, bool all) {
          const Unit unit(index);
          if (all) {
            halo.find(HaloRectangle<kThreads>(images - unit.image, tile, unit.y, unit.x));
            gradient.find(grad_rectangle(unit));
          }
          if (unit.plane.exists()) {
            const Scalar* const volume = input + unit.image * kInImage;
            load_read<kRing>(unit.plane, all, [&](int place, int plane) {
              halo.copy(ring(place) + kHaloPlace, volume + plane * kInPlane);
            });
            gradient.copy(grad(index),
                          grad_output + unit.image * kOutImage + unit.plane.z * kOutPlane);
          }
          fastconv::copy_async_commit();
        },
        [&](int index) {
          const Unit unit(index);
          if (at.idle() || !unit.plane.exists()) return;
          add_unit(acc, ring(0), grad(index), at, unit, images, first_tap, first_plane, has_bias);
        });
  }
  const auto load_unit = [&](int index) {
    const Unit unit(index);
    load_halo<kThreads>(inputs(index), input, unit.image, images, tile, unit.y, unit.x);
    grad_rectangle(unit).load(grads(index), grad_output + unit.image * kOutImage);
    fastconv::copy_async_commit();
  };

  if constexpr (C::inside && !D::exists) {
    clear<kInputBytes, kThreads>(inputs(0));
    clear<kInputBytes, kThreads>(inputs(1));
    __syncthreads();
  }

  if constexpr (!D::exists) {
    pipeline_units(SplitUnits(split, images), load_unit, [&](int unit) {
      if (at.idle()) return;
      add_unit(acc, inputs(unit), grads(unit), at, Unit(unit), images, first_tap, 0, has_bias);
    });
  }

  // Threads of a tap group add their accumulators to shared memory in turn, in the order of their
  // patches: [group][accumulator][channel].
  Acc* const gathered = reinterpret_cast<Acc*>(shared);
  Acc* const mine = gathered + at.group * (kAccumulators * kOutputs) + at.output;
#pragma unroll 1
  for (int turn = 0; turn < kGroupPatches; ++turn) {
    if (!at.idle() && at.patch == turn) {
#pragma unroll
      for (int m = 0; m < C::lane_channels; ++m) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) {
          const Acc value = acc.value(m, i);
          Acc& target = mine[i * kOutputs + m];
          target = turn == 0 ? value : target + value;
        }
      }
    }
    __syncthreads();
  }
  for (int i = static_cast<int>(threadIdx.x); i < kBlockGroups * kAccumulators * kOutputs;
       i += kThreads) {
    const int place = i % kOutputs;
    const int group = first_group + i / (kOutputs * kAccumulators);
    if (!tile.has(place)) continue;
    write_entry(workspace, split, tile.first_output() + place, channel, group,
                i / kOutputs % kAccumulators, gathered[i]);
  }
}
