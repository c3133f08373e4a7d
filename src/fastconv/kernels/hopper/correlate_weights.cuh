// Weights: packed as the tensor cores want them, and streamed to shared memory.
#pragma once
#include "hopper/correlate_tile.cuh"

namespace fastconv {
namespace hopper {

constexpr int kPackedVectors =
    C::groups * kOutputGroups * kChunks * kTaps * C::k_steps * C::channel_groups * 2 * kOutputs;

// The weight of output channel `out` for input channel `in`, both of the group; zero for what
// folding, or summing two columns, has added to the kernel. `sum` says which of the two.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int group, int out, int in,
                                            int row, int column, int sum) {
  const FoldedChannel folded(in);
  row = row * C::fold_height + folded.row;
  column = column * C::fold_width + folded.column;
  if (row >= C::weight_height || column >= C::weight_width) return Scalar{};
  long long k = group * C::group_out + out;
  long long c = folded.channel;
  if constexpr (C::transposed) {
    k = group * C::group_in + in;
    c = out;
    row = C::last_tap_row - C::tap_step_height * row;
    column = C::last_tap_column - C::tap_step_width * column + sum;
    if (C::column_sums > 1 && (column < 0 || column >= C::weight_width)) return Scalar{};
  }
  return weight[k * C::weight_stride_out + c * C::weight_stride_in +
                static_cast<long long>(row) * C::weight_stride_height +
                static_cast<long long>(column) * C::weight_stride_width];
}

// Weights as the consumers want them, a chunk's taps in one piece:
//   [group][output group][chunk][tap][k step][part][channel group][2][64][16 bytes]
__device__ __forceinline__ void pack(const Scalar* weight, unsigned char* packed) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kPackedVectors; i += step) {
    int rest = i;
    const int m = rest % kOutputs;
    rest /= kOutputs;
    const int plane = rest % 2;
    rest /= 2;
    const int channel_group = rest % C::channel_groups;
    rest /= C::channel_groups;
    const int k_step = rest % C::k_steps;
    rest /= C::k_steps;
    const int tap = rest % kTaps;
    rest /= kTaps;
    const int chunk = rest % kChunks;
    rest /= kChunks;
    const int output_group = rest % kOutputGroups;
    const int group = rest / kOutputGroups;

    const int stacked = row_of_column(m) / kStackChannels;
    const int out = (output_group * C::channel_groups + channel_group) * kStackChannels +
                    row_of_column(m) % kStackChannels;
    const int sum = m / 8 % C::column_sums;
    const int row = tap / C::kernel_width - stacked;
    const int column = tap % C::kernel_width;
    const int first = (chunk * kChunkPlanes + 2 * k_step + plane) * kVector;
    const bool exists = out < C::group_out && row >= 0 && row < C::kernel_height;
    Vector<Scalar, kVector> vector;
    for (int j = 0; j < kVector; ++j) {
      const bool valid = exists && first + j < C::group_in;
      vector.element[j] =
          valid ? weight_at(weight, group, out, first + j, row, column, sum) : Scalar{};
    }
    const long long product = static_cast<long long>(i / (2 * kOutputs * C::channel_groups)) *
                                  (C::parts * C::channel_groups) +
                              channel_group;
    store_parts(packed + product * kProductBytes + (plane * kOutputs + m) * 16,
                C::channel_groups * kProductBytes, reinterpret_cast<const Words&>(vector));
  }
}

// One thread: sends every tile's weights through the ring, or all weights once if they fit.
__device__ __forceinline__ void stream_weights(const unsigned char* packed, int items) {
  constexpr int kPerTile = kChunks * kWeightStages;
  const auto send = [](int stage, const unsigned char* source) {
    Barrier* const full = &barriers().weights_full[stage];
    barrier_arrive_expect(full, kWeightBytes);
    bulk_load(shared_memory() + kWeightRing + stage * kWeightBytes, source, kWeightBytes, full);
  };
  if constexpr (C::resident) {
    static_assert(!C::resident || C::weight_stages == kPerTile, "all of them fit");
    for (int i = 0; i < kPerTile; ++i) send(i, packed + i * kWeightBytes);
    return;
  }
  Ring<C::weight_stages> at(1);
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item(index);
    const int part =
        item.group * kOutputGroups + item.outputs / (C::channel_groups * kStackChannels);
    const unsigned char* const source =
        packed + static_cast<long long>(part) * kPerTile * kWeightBytes;
    for (int tile = 0; tile < item.tiles; ++tile) {
      for (int i = 0; i < kPerTile; ++i) {
        barrier_wait(&barriers().weights_empty[at.stage], at.parity);
        send(at.stage, source + static_cast<long long>(i) * kWeightBytes);
        at.advance();
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
