// The reduction kernel: adds up the slots that blocks have written to the workspace.
#pragma once
#include "hopper/wgrad_halo/multiply.cuh"

namespace fastconv {
namespace hopper {

// The weight that one of the four accumulators in a slot belongs to.
struct Weight {
  int output;  // channels, in the group
  int input;
  int row;
  int column;

  __device__ Weight(const Tile& tile, int warpgroup, int slot, int thread, int element) {
    const int segment =
        tile.segment + slot * 4 / kAccs + (C::channel_groups == 2 ? 0 : warpgroup * C::segments);
    const int core = slot * 4 % kAccs / 4;  // core matrix of the wgmma: an octet of a tap
    const int lane = thread % 32;
    output = tile.channel((C::channel_groups == 2 ? warpgroup * kOutputs : 0) + thread / 32 * 16 +
                          lane / 4 + element / 2 * 8);
    input = segment / C::kernel_rows * kPlaneChannels + core % C::mma_octets * kOctet +
            lane % 4 * 2 + element % 2;
    row = tile.kernel_row + segment % C::kernel_rows;
    column = tile.piece * C::mma_taps + core / C::mma_octets;
  }

  // Whether the weight exists, and this kernel is to compute it.
  __device__ bool is_wanted(const Tables& tables, int group) const {
    const bool exists = output < C::group_out && input < C::group_in && row < C::kernel_height &&
                        column < C::kernel_width;
    if constexpr (C::repairs) {
      return exists && tables.marks()[Tables::filter(group * C::group_out + output, input)] != 0;
    }
    return exists;
  }
};

// The four accumulators of a slot, reduced over all workers.
struct Totals {
  float sums[4];

  __device__ Totals(const float4* first, long long distance, int workers) {
    const float4 total = total_of(first, distance, workers);
    sums[0] = total.x;
    sums[1] = total.y;
    sums[2] = total.z;
    sums[3] = total.w;
  }
  __device__ __forceinline__ float weight(int i, const Tables&, int, const Weight&) const {
    return sums[i];
  }
};

// The reduced slot for scaled fp16, with the sums of the magnitudes of the workers' parts.
struct ScaledTotals {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float sizes[4] = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ ScaledTotals(const float4* first, long long distance, int workers) {
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      const float4 part = first[worker * distance];
      const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] += parts[i];
        sizes[i] += fabsf(parts[i]);
      }
    }
  }
  // The weight, scaled back. Marks its filter if the result is less accurate than TF32's.
  __device__ __forceinline__ float weight(int i, const Tables& tables, int group,
                                          const Weight& weight) const {
    const int output = group * C::group_out + weight.output;
    const ScaledChannel in(tables, group * C::group_in + weight.input, kInputGroup);
    const ScaledChannel out(tables, kInputs + output, kGradGroup);
    if (!fits(in, out, sums[i], sizes[i])) tables.marks()[Tables::filter(output, weight.input)] = 1;
    return sums[i] * (in.back() * out.back());
  }
};

// Reduces the slots of every weight, workers in order, and writes it where the strides say.
__device__ __forceinline__ void reduce(const Tables& tables, Scalar* grad, int first_tile,
                                       int tiles, int workers) {
  using Reduced = Either<C::scaled_fp16, ScaledTotals, Totals>::type;
  constexpr int kBlockSlots = kConsumers * kSlots * 128;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kBlockSlots; i += step) {
    const Tile tile(first_tile + i / kBlockSlots);
    const auto weight_of = [&](int j) {
      return Weight(tile, i / (kSlots * 128) % kConsumers, i / 128 % kSlots, i % 128, j);
    };
    bool wanted = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) wanted = wanted || weight_of(j).is_wanted(tables, tile.group);
    if (!wanted) continue;
    const Reduced sum(tables.workspace() + i, tiles * kBlockSlots, workers);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Weight weight = weight_of(j);
      if (!weight.is_wanted(tables, tile.group)) continue;
      grad[weight_offset(tile.group * C::group_out + weight.output,
                         depth_channel<kInChannels>(weight.input), weight.row, weight.column)] =
          narrow<Scalar>(sum.weight(j, tables, tile.group, weight));
    }
  }
}

// Reduces the bias's gradient of every channel, workers in order.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int first_tile, int tiles, int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kStageChannels; i += step) {
    const int block = i / kStageChannels;
    const int place = i % kStageChannels;
    const Tile tile(first_tile + block);
    const int channel = tile.channel(place);
    if (!tile.has_bias() || channel >= C::group_out) continue;
    float total = 0.0f;
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      const long long slots = bias_slots(tiles * workers, worker * tiles + block, place / kOutputs);
      total += reinterpret_cast<const float*>(workspace)[slots + place % kOutputs];
    }
    bias_grad[tile.group * C::group_out + channel] = narrow<Scalar>(total);
  }
}

}  // namespace hopper
}  // namespace fastconv
