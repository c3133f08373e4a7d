// Weights: packed as the tensor cores want them, and streamed to shared memory. The kernel that
// packs them as float16 finds scales first: theirs, and those of the images.
#pragma once
#include "hopper/correlate_load.cuh"

namespace fastconv {
namespace hopper {

constexpr int kSteps = kChunks * kTaps * C::k_steps;
constexpr int kPackedVectors =
    C::groups * kOutputGroups * kSteps * C::channel_groups * 2 * kOutputs;
constexpr int kMostSamples = 256;  // of an image, 32 numbers each

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
struct PackedVector {
  int part;  // group and output group
  int channel_group;
  int m;     // row of the product
  int step;  // chunk, tap and k step
  int plane;

  __device__ __forceinline__ void pack(const Scalar* weight, unsigned char* packed,
                                       Scale& scale) const {
    const int k_step = step % C::k_steps;
    const int tap = step / C::k_steps % kTaps;
    const int chunk = step / (C::k_steps * kTaps);
    const int stacked = row_of_column(m) / kStackChannels;
    const int out = (part % kOutputGroups * C::channel_groups + channel_group) * kStackChannels +
                    row_of_column(m) % kStackChannels;
    const int sum = m / 8 % C::column_sums;
    const int row = tap / C::kernel_width - stacked;
    const int column = tap % C::kernel_width;
    const int first = (chunk * kChunkPlanes + 2 * k_step + plane) * kVectorChannels;
    const bool exists = out < C::group_out && row >= 0 && row < C::kernel_height;
    Scalar elements[kVectorChannels];
    for (int j = 0; j < kVectorChannels; ++j) {
      const bool valid = exists && first + j < C::group_in;
      elements[j] = valid
                        ? weight_at(weight, part / kOutputGroups, out, first + j, row, column, sum)
                        : Scalar{};
    }
    const long long product =
        (static_cast<long long>(part) * kSteps + step) * (kWeightParts * C::channel_groups) +
        channel_group;
    store_parts<true>(packed + product * kProductBytes + (plane * kOutputs + m) * 16,
                      C::channel_groups * kProductBytes, channels_of(elements), scale);
  }
};

__device__ __forceinline__ void pack_all(const Scalar* weight, unsigned char* packed) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  Scale scale(1.0f);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kPackedVectors; i += step) {
    int rest = i;
    PackedVector vector;
    vector.m = rest % kOutputs;
    rest /= kOutputs;
    vector.plane = rest % 2;
    rest /= 2;
    vector.channel_group = rest % C::channel_groups;
    rest /= C::channel_groups;
    vector.step = rest % kSteps;
    vector.part = rest / kSteps;
    vector.pack(weight, packed, scale);
  }
}

// A block: scales and packs one output channel's weights. Gives what scales its sums back.
__device__ __forceinline__ float pack_channel(const Scalar* weight, unsigned char* packed,
                                              int channel) {
  PackedVector vector;
  const int of_product = channel % kStackChannels;
  vector.channel_group = channel / kStackChannels % C::channel_groups;
  vector.part = channel / (kStackChannels * C::channel_groups);
  const int out = channel % (kOutputGroups * C::channel_groups * kStackChannels);
  float largest = 0.0f;
  constexpr int kWeights = C::kernel_height * C::kernel_width * C::column_sums;
  for (int i = threadIdx.x; i < (out < C::group_out ? C::group_in * kWeights : 0);
       i += blockDim.x) {
    const int sum = i % C::column_sums;
    const int column = i / C::column_sums % C::kernel_width;
    const int row = i / (C::column_sums * C::kernel_width) % C::kernel_height;
    largest = larger(largest, fabsf(widen(weight_at(weight, vector.part / kOutputGroups, out,
                                                    i / kWeights, row, column, sum))));
  }
  Scale range(scale_to(block_largest(largest), kWeightExponent));
  if (range.scale == 0.0f) return 0.0f;
  for (int i = threadIdx.x; i < kSteps * 2 * C::stack * C::column_sums; i += blockDim.x) {
    const int row = i % C::stack * kStackChannels + of_product;
    const int sum = i / C::stack % C::column_sums;
    vector.m = C::column_sums == 1 ? row : row / 8 * 16 + sum * 8 + row % 8;
    vector.plane = i / (C::stack * C::column_sums) % 2;
    vector.step = i / (C::stack * C::column_sums * 2);
    vector.pack(weight, packed, range);
  }
  return block_largest(range.fits(kLeastWeight) ? 0.0f : 1.0f) == 0.0f ? 1.0f / range.scale : 0.0f;
}

// A block: the scale of an image, by the largest of numbers that are spread evenly over it.
__device__ __forceinline__ float sample(const Scalar* image) {
  constexpr int kPieces = ceil_div(kInImage, 32);
  constexpr int kSamples = kPieces < kMostSamples ? kPieces : kMostSamples;
  constexpr long long kLast = kInImage > 32 ? kInImage - 32 : 0;  // where the last begins
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float largest = 0.0f;
#pragma unroll 8
  for (int i = threadIdx.x / 32; i < kSamples; i += blockDim.x / 32) {
    const int first = static_cast<int>(kLast * i / (kSamples > 1 ? kSamples - 1 : 1));
    const float number = widen(load_element(image + first + lane, lane < kInImage));
    largest = larger(largest, fabsf(number));
  }
  return scale_to(block_largest(largest), kImageExponent);
}

__device__ __forceinline__ void pack(const Scalar* weight, const Scalar* input,
                                     unsigned char* scratch, int batch) {
  unsigned char* const packed = scratch + C::packed_at;
  if constexpr (C::halves) {
    static_assert(!C::halves || C::table_channels ==
                                    C::groups * kOutputGroups * C::channel_groups * kStackChannels,
                  "a factor for each row of the products");
    const Tables tables{scratch, batch};
#pragma unroll 1
    for (int i = blockIdx.x; i < C::table_channels + batch; i += gridDim.x) {
      const int image = i - C::table_channels;
      if (image < 0) {
        const float factor = pack_channel(weight, packed, i);
        if (threadIdx.x == 0) tables.channels()[i] = factor;
      } else {
        const float scale = sample(input + static_cast<long long>(image) * kInImage);
        if (threadIdx.x == 0) {
          tables.images()[image] = scale;
          tables.marks()[image] = 0;
        }
      }
    }
  } else {
    if (!Items(scratch, batch).none()) pack_all(weight, packed);
  }
}

// One thread: sends every tile's weights through the ring, or all weights once if they fit.
__device__ __forceinline__ void stream_weights(const unsigned char* packed, const Items& items) {
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
  for (int index = items.first(); index < items.count(); index = items.after(index)) {
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
