// The second kernel: adds up what the blocks have left in the workspace.
#pragma once
#include "ampere/wgrad_halo/multiply.cuh"

namespace fastconv {
namespace ampere {

// One of four neighbouring sums of a thread: which weight it is.
struct Weight {
  int output;  // channels, in the group
  int input;
  int row;
  int column;
  bool exists;

  __device__ Weight(const Tile& tile, int slot, int thread, int element) {
    const Warp warp(thread / 32);
    const int lane = thread % 32;
    const int index =
        (warp.units * C::units + slot / C::row_tiles) * kOctet + lane % 4 * 2 + element % 2;
    const Column of_box(index);
    output = tile.output + warp.out * kWarpOutputs + slot % C::row_tiles * 16 + lane / 4 +
             element / 2 * 8;
    input = tile.channel + of_box.channel;
    row = tile.kernel_row + of_box.row;
    column = tile.kernel_column + of_box.column;
    exists = index < kBoxSize && output < C::group_out && input < C::group_in &&
             row < C::kernel_height && column < C::kernel_width;
  }
};

// Adds up the slots of every weight, in order, and writes it where its strides say.
__device__ __forceinline__ void reduce(const float4* workspace, Scalar* grad, int first_tile,
                                       int tiles, int workers) {
  constexpr int kTileThreads = kThreads / C::warps_pixels;  // of other weights
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
    const Tile tile(first_tile + block);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Weight weight(tile, slot, thread, j);
      if (!weight.exists) continue;
      grad[weight_offset(tile.group * C::group_out + weight.output, weight.input, weight.row,
                         weight.column)] = narrow<Scalar>(values[j]);
    }
  }
}

// Adds up the sums for the bias of every channel: of threads, then of workers, in order.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int first_tile, int tiles, int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kBlockOutputs; i += step) {
    const int block = i / kBlockOutputs;
    const int channel = i % kBlockOutputs;
    const Tile tile(first_tile + block);
    if (!tile.has_bias() || tile.output + channel >= C::group_out) continue;
    float total = 0.0f;
    for (int worker = 0; worker < workers; ++worker) {
      const float* const sums = reinterpret_cast<const float*>(workspace) +
                                bias_slots(tiles * workers, worker * tiles + block) + channel;
      float of_worker = 0.0f;
#pragma unroll
      for (int j = 0; j < kThreads; j += kBlockOutputs) of_worker += sums[j];
      total += of_worker;
    }
    bias_grad[tile.group * C::group_out + tile.output + channel] = narrow<Scalar>(total);
  }
}

}  // namespace ampere
}  // namespace fastconv
