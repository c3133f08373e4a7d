// Weight gradient of narrow groups on contiguous (NCHW) tensors. A block accumulates the weights of
// one output and one input channel; its warps divide kernel rows, then patches among themselves.
//
//   input    [slot][halo row][column]     the output's gradient   [slot][row][column]
#pragma once
#include "depthwise/plane_rows.cuh"
#include "depthwise/wgrad/kernel.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kGroupThreads = 32 * C::group_warps;  // threads with the same kernel rows
constexpr int kThreads = kBlockGroups * kGroupThreads;
constexpr int kPatchRounds = ceil_div(kPatches, kGroupThreads);

constexpr int kGradColumns = round_up(kTileColumns, C::grad_vector);
constexpr int kGradPlane = kTileRows * C::grad_pitch;
static_assert(kGradColumns <= C::grad_pitch, "rows have room");
// A patch's row is read in vectors of `grad_piece` elements.
using GradPiece = Vector<Scalar, C::grad_piece>;
static_assert(C::grad_piece == 1 || (Columns::kOutStep == 1 && C::columns % C::grad_piece == 0 &&
                                     C::grad_pitch % C::grad_piece == 0),
              "pieces are aligned");

constexpr int kInputBytes = round_up(C::slots * kPlane * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kGradBytes = round_up(C::slots * kGradPlane * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kStageBytes = kInputBytes + kGradBytes;
constexpr int kRingBytes = kRing * kInputBytes;  // of volumes
static_assert((D::exists ? kRingBytes + 2 * kGradBytes : 2 * kStageBytes) <= C::shared_bytes &&
                  kThreads / 32 * kAccumulators * static_cast<int>(sizeof(Acc)) <= C::shared_bytes,
              "as planned");

// Accumulates this thread's patches of a unit; of volumes, `input` is the ring.
__device__ __forceinline__ void add_unit(TapAccumulators<1>& acc, const Scalar* input,
                                         const Scalar* grad, const Unit& unit, int images,
                                         int first_tap, int first_plane, bool has_bias) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
#pragma unroll 1
  for (int round = 0; round < kPatchRounds; ++round) {
    const int index = round * kGroupThreads + thread;
    if (kPatches % kGroupThreads != 0 && index >= kPatches) return;
    const Patch patch(index);
    if (C::slots > 1 && unit.image + patch.slot >= images) return;
    Acc numbers[1][C::rows][C::columns];
#pragma unroll
    for (int r = 0; r < C::rows; ++r) {
      const Scalar* const row =
          grad + patch.slot * kGradPlane + (patch.y + r * Rows::kOutStep) * C::grad_pitch + patch.x;
#pragma unroll
      for (int p = 0; p < C::columns; p += C::grad_piece) {
        widen_vector(*reinterpret_cast<const GradPiece*>(row + p * Columns::kOutStep),
                     &numbers[0][r][p]);
      }
    }
    const Scalar* const window = input + patch.slot * kPlane +
                                 (patch.y * Rows::kTimes + first_tap * Rows::kUnit) * C::pitch +
                                 kFirstPiece + patch.x * Columns::kTimes;
    add_planes(unit.plane, first_plane, [&](int number, int place) {
      const Scalar* const plane = window + place * (kInputBytes / static_cast<int>(sizeof(Scalar)));
      acc.add(number, numbers, first_tap, C::out_height - unit.y - patch.y,
              C::out_width - unit.x - patch.x, [&](Acc(&row)[1][kWindowColumns], int i) {
                const WindowRow elements(plane + i * (Rows::kUnit * C::pitch));
#pragma unroll
                for (int j = 0; j < kWindowColumns; ++j) row[0][j] = elements[j];
              });
    });
    if (has_bias) acc.add_bias(numbers);
  }
}

// Returns the sum of a number over a warp's lanes, in every lane.
__device__ __forceinline__ Acc warp_sum(Acc number) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    number += __shfl_xor_sync(~0u, number, distance);
  }
  return number;
}

}  // namespace depthwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    weight_grad(const Config::Scalar* __restrict__ grad_output,
                const Config::Scalar* __restrict__ input,
                fastconv::AccOf<Config::Scalar>::type* __restrict__ workspace, int images) {
  using namespace fastconv::depthwise;
  unsigned block = blockIdx.x;
  const int split = static_cast<int>(block % C::splits);
  block /= C::splits;
  const int first_group = static_cast<int>(block % C::tap_blocks) * kBlockGroups;
  block /= C::tap_blocks;
  const int channel = static_cast<int>(block % C::group_in);  // input channel within the group
  const int output = static_cast<int>(block / C::group_in);
  const int thread = static_cast<int>(threadIdx.x);
  const int first_tap = first_tap_row(first_group + thread / kGroupThreads);
  const int first_plane = first_tap_plane(first_group + thread / kGroupThreads);
  const bool has_bias = C::bias && channel == 0 && first_tap == 0 && first_plane == 0;

  input += (output / C::group_out * C::group_in + channel) * kInChannel;
  grad_output += output * kOutChannel;
  unsigned char* const shared = fastconv::shared_memory();
  const auto inputs = [&](int unit) {
    return reinterpret_cast<Scalar*>(shared + unit % 2 * kStageBytes);
  };
  const auto grads = [&](int unit) {
    return reinterpret_cast<Scalar*>(shared + unit % 2 * kStageBytes + kInputBytes);
  };
  constexpr long long kInImage = (C::groups * C::group_in) * kInChannel;
  constexpr long long kOutImage = kAllOutputs * kOutChannel;
  using InputRows = PlaneRectangle<C::slots, kCopiedRows, kEndVector - kFirstVector, C::vector,
                                   C::pitch, kPlane, C::in_height, C::in_width, kThreads, kInImage>;
  using GradRows =
      PlaneRectangle<C::slots, kTileRows, kGradColumns / C::grad_vector, C::grad_vector,
                     C::grad_pitch, kGradPlane, C::out_height, C::out_width, kThreads, kOutImage>;
  const auto input_rows = [&](const Unit& unit) {
    return InputRows{
        images - unit.image, unit.y * Rows::kTimes + Rows::kOrigin + kFirstRow,
        unit.x * Columns::kTimes + Columns::kOrigin - kShift + kFirstVector * C::vector};
  };
  const auto grad_rows = [&](const Unit& unit) {
    return GradRows{images - unit.image, unit.y, unit.x};
  };
  TapAccumulators<1> acc;
  if constexpr (D::exists) {
    PlaneCopies<InputRows, kMostKept> rows;
    PlaneCopies<GradRows, kMostKept> gradient;
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
    walk_units(
        SplitUnits(split, images),
        [&](int index, bool all) {
          const Unit unit(index);
          if (all) {
            rows.find(input_rows(unit));
            gradient.find(grad_rows(unit));
          }
          if (unit.plane.exists()) {
            const Scalar* const volume = input + unit.image * kInImage;
            load_read<kRing>(unit.plane, all, [&](int place, int plane) {
              rows.copy(ring(place) + kFirstRow * C::pitch + kFirstVector * C::vector,
                        volume + plane * kInPlane);
            });
            gradient.copy(grad(index),
                          grad_output + unit.image * kOutImage + unit.plane.z * kOutPlane);
          }
          fastconv::copy_async_commit();
        },
        [&](int index) {
          const Unit unit(index);
          if (!unit.plane.exists()) return;
          add_unit(acc, ring(0), grad(index), unit, images, first_tap, first_plane, has_bias);
        });
  }
  const auto load = [&](int index) {
    const Unit unit(index);
    input_rows(unit).load(inputs(index) + kFirstRow * C::pitch + kFirstVector * C::vector,
                          input + unit.image * kInImage);
    grad_rows(unit).load(grads(index), grad_output + unit.image * kOutImage);
    fastconv::copy_async_commit();
  };
  if constexpr (C::inside && !D::exists) {
    clear<kInputBytes, kThreads>(inputs(0));
    clear<kInputBytes, kThreads>(inputs(1));
    __syncthreads();
  }

  if constexpr (!D::exists) {
    pipeline_units(SplitUnits(split, images), load, [&](int unit) {
      add_unit(acc, inputs(unit), grads(unit), Unit(unit), images, first_tap, 0, has_bias);
    });
  }

  // Reduce each warp's lanes by shuffles, then the warps of a tap group through shared memory.
  Acc* const gathered = reinterpret_cast<Acc*>(shared);
  Acc* const mine = gathered + thread / 32 * kAccumulators;
#pragma unroll
  for (int i = 0; i < kAccumulators - 1; ++i) {
    const Acc value = warp_sum(acc.value(0, i));
    if (thread % 32 == 0) mine[i] = value;
  }
  const Acc bias = C::bias ? warp_sum(acc.bias[0]) : Acc(0);
  if (thread % 32 == 0) mine[kAccumulators - 1] = bias;
  __syncthreads();
  for (int i = thread; i < kBlockGroups * kAccumulators; i += kThreads) {
    const int group = i / kAccumulators;
    const int at = i % kAccumulators;
    Acc value = 0;
#pragma unroll
    for (int warp = 0; warp < C::group_warps; ++warp) {
      value += gathered[(group * C::group_warps + warp) * kAccumulators + at];
    }
    write_entry(workspace, split, output, channel, first_group + group, at, value);
  }
}
