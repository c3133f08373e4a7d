// The split-K reduction, a second kernel: adds up the blocks' slots of the workspace.
#pragma once
#include "ampere/wgrad_halo/multiply.cuh"

namespace fastconv {
namespace ampere {

// The weight that one of a slot's four accumulators belongs to.
struct Weight {
  int output;  // channels within the group
  int input;
  int row;
  int column;
  bool exists;

  __device__ Weight(const WeightTile& tile, int slot, int thread, int element) {
    const Warp warp(thread / 32);
    const int lane = thread % 32;
    const int index =
        (warp.units * C::units + slot / C::row_tiles) * kOctet + lane % 4 * 2 + element % 2;
    const Column place(index);
    output = tile.output + warp.out * kWarpOutputs + slot % C::row_tiles * 16 + lane / 4 +
             element / 2 * 8;
    input = tile.channel + place.channel;
    row = tile.kernel_row + place.row;
    column = tile.kernel_column + place.column;
    exists = index < kTileWeights && output < C::group_out && input < C::group_in &&
             row < C::kernel_height && column < C::kernel_width;
  }
};

// Adds up the slots of every weight, in order, and writes the sum where the weight's strides say.
__device__ __forceinline__ void reduce(const float4* workspace, Scalar* grad, int first_tile,
                                       int tiles, int workers) {
  constexpr int kTileThreads = kThreads / C::warps_pixels;  // threads with different weights
  constexpr int kBlockSlots = kSlots * kThreads;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kSlots * kTileThreads;
       i += step) {
    const int thread = i % kTileThreads;
    const int slot = i / kTileThreads % kSlots;
    const int block = i / (kTileThreads * kSlots);
    const float4* const first = workspace + block * kBlockSlots + slot * kThreads + thread;
    float4 total = total_of(first, tiles * kBlockSlots, workers);
#pragma unroll
    for (int j = 1; j < C::warps_pixels; ++j) {
      const float4 more = total_of(first + j * kTileThreads, tiles * kBlockSlots, workers);
      total = make_float4(total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w);
    }
    const float values[4] = {total.x, total.y, total.z, total.w};
    const WeightTile tile(first_tile + block);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Weight weight(tile, slot, thread, j);
      if (!weight.exists) continue;
      grad[weight_offset(tile.group * C::group_out + weight.output,
                         depth_channel<kInChannels>(weight.input), weight.row, weight.column)] =
          narrow<Scalar>(values[j]);
    }
  }
}

// Adds up the bias of every channel: over threads, then over workers, in order.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int first_tile, int tiles, int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kBlockOutputs; i += step) {
    const int block = i / kBlockOutputs;
    const int channel = i % kBlockOutputs;
    const WeightTile tile(first_tile + block);
    if (!tile.has_bias() || tile.output + channel >= C::group_out) continue;
    float total = 0.0f;
    for (int worker = 0; worker < workers; ++worker) {
      const float* const partial = reinterpret_cast<const float*>(workspace) +
                                   bias_slots(tiles * workers, worker * tiles + block) + channel;
      float worker_sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kThreads; j += kBlockOutputs) worker_sum += partial[j];
      total += worker_sum;
    }
    bias_grad[tile.group * C::group_out + tile.output + channel] = narrow<Scalar>(total);
  }
}

}  // namespace ampere
}  // namespace fastconv
