// The second kernel: adds up what the blocks have left in the workspace.
#pragma once
#include "hopper/weight_grad/multiply.cuh"

namespace fastconv {
namespace hopper {

// One of four neighbouring sums of a thread: which weight it is.
struct Weight {
  int output;  // channels, in the group
  int input;
  int row;
  int column;

  __device__ Weight(const Tile& tile, int warpgroup, int slot, int thread, int element) {
    const int segment =
        tile.segment + slot * 4 / kSums + (C::channel_groups == 2 ? 0 : warpgroup * C::segments);
    const int core = slot * 4 % kSums / 4;  // of the product: octets of taps
    const int lane = thread % 32;
    output = tile.output + (C::channel_groups == 2 ? warpgroup * kOutputs : 0) + thread / 32 * 16 +
             lane / 4 + element / 2 * 8;
    input = segment / C::kernel_rows * kPlaneChannels + core % C::product_octets * kOctet +
            lane % 4 * 2 + element % 2;
    row = tile.kernel_row + segment % C::kernel_rows;
    column = tile.piece * C::product_taps + core / C::product_octets;
  }

  __device__ bool exists() const {
    return output < C::group_out && input < C::group_in && row < C::kernel_height &&
           column < C::kernel_width;
  }
};

// Adds up the slots of every weight, workers in order, and writes it where its strides say.
__device__ __forceinline__ void reduce(const float4* workspace, Scalar* grad, int first_tile,
                                       int tiles, int workers) {
  constexpr int kBlockSlots = kConsumers * kSlots * 128;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kBlockSlots; i += step) {
    const Tile tile(first_tile + i / kBlockSlots);
    const float4 total = total_of(workspace + i, tiles * kBlockSlots, workers);
    const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Weight weight(tile, i / (kSlots * 128) % kConsumers, i / 128 % kSlots, i % 128, j);
      if (!weight.exists()) continue;
      grad[weight_offset(tile.group * C::group_out + weight.output, weight.input, weight.row,
                         weight.column)] = narrow<Scalar>(values[j]);
    }
  }
}

// Adds up the sums for the bias of every channel, workers in order.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int first_tile, int tiles, int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kStageChannels; i += step) {
    const int block = i / kStageChannels;
    const int channel = i % kStageChannels;
    const Tile tile(first_tile + block);
    if (!tile.has_bias() || tile.output + channel >= C::group_out) continue;
    float total = 0.0f;
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      const long long slots =
          bias_slots(tiles * workers, worker * tiles + block, channel / kOutputs);
      total += reinterpret_cast<const float*>(workspace)[slots + channel % kOutputs];
    }
    bias_grad[tile.group * C::group_out + tile.output + channel] = narrow<Scalar>(total);
  }
}

}  // namespace hopper
}  // namespace fastconv
