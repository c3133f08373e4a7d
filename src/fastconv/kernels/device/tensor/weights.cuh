// Packs the weights into the layout of the tensor cores. For scaled fp16, the `scale` kernel first
// finds the powers of the input channels; the `pack` kernel finds the scales of output channels and
// images.
#pragma once
#include "device/tensor/input.cuh"

namespace fastconv {
namespace tensor {

constexpr int kSteps = kChunks * kTaps * C::k_steps;
constexpr int kPackedVectors =
    C::groups * kOutputGroups * kSteps * C::channel_groups * 2 * kOutputs;
constexpr int kResidues = C::s2d_height * C::s2d_width;
// A sample of an image consists of pieces of 32 numbers: at least kImageSamples pieces of an
// image, and one for every kProvenPixels pixels of a channel.
constexpr int kImageSamples = 256;
constexpr int kProvenPixels = 1 << 15;

// The weight of one of the layer's taps, for an output and an input channel of the group. It is
// zero for taps that the layer has only because it computes several positions of a step.
// `stacked_column` selects one of the two columns that share the rows of M (`stacked_columns`);
// with depth-to-space, an output channel is also a residue.
__device__ __forceinline__ Scalar tap_at(const Scalar* weight, int group, int out, int in, int row,
                                         int column, int stacked_column) {
  const InChannel from(in);
  long long k = group * C::group_out + out;
  long long c = from.channel;
  long long plane = from.tap;
  if constexpr (C::transposed) {
    const DepthToSpaceChannel to(out);
    k = group * kInChannels + from.channel;
    c = to.channel;
    plane = DepthPlacing::last_tap - DepthPlacing::tap_step * plane;
    row = C::last_tap_row - C::tap_step_height * row + to.row;
    column = C::last_tap_column - C::tap_step_width * column + stacked_column + to.column;
    if (kDepthToSpace && !is_tap(row, C::weight_height, C::tap_dilation_height)) return Scalar{};
    if ((kDepthToSpace || C::stacked_columns > 1) &&
        !is_tap(column, C::weight_width, C::tap_dilation_width)) {
      return Scalar{};
    }
    row /= C::tap_dilation_height;
    column /= C::tap_dilation_width;
  }
  return weight[k * C::weight_stride_out + c * C::weight_stride_in + plane * Depth::weight_stride +
                static_cast<long long>(row) * C::weight_stride_height +
                static_cast<long long>(column) * C::weight_stride_width];
}

// The weight of a tap of the layer after space-to-depth, which adds taps with zero weights.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int group, int out, int in,
                                            int row, int column, int stacked_column) {
  const SpaceToDepthChannel in_memory(in);
  row = row * C::s2d_height + in_memory.row;
  column = column * C::s2d_width + in_memory.column;
  if (!C::transposed && (row >= C::weight_height || column >= C::weight_width)) return Scalar{};
  return tap_at(weight, group, out, in_memory.channel, row, column, stacked_column);
}

// A vector of packed weights. A chunk's taps are contiguous:
//   [group][output group][chunk][tap][k step][part][channel group][2][64][16 bytes]
struct PackedVector {
  int part;  // group and output group
  int channel_group;
  int m;     // MMA row
  int step;  // chunk, tap and k step
  int plane;

  // Loads the vector; `number_of` maps a weight and its input channel to the number that is packed.
  template <class NumberOf>
  __device__ __forceinline__ WeightChannels load(const Scalar* weight, NumberOf number_of) const {
    const int k_step = step % C::k_steps;
    const int tap = step / C::k_steps % kTaps;
    const int chunk = step / (C::k_steps * kTaps);
    const int stacked = row_of_column(m) / kStackRows;
    const int of_stack = row_of_column(m) % kStackRows;
    const int out =
        (part % kOutputGroups * C::channel_groups + channel_group) * kStackChannels + of_stack;
    const int stacked_column = m / 8 % C::stacked_columns;
    const int row = tap / C::kernel_width - stacked;
    const int column = tap % C::kernel_width;
    const int first = (chunk * kChunkPlanes + 2 * k_step + plane) * kVectorChannels;
    const bool exists =
        of_stack < kStackChannels && out < C::group_out && row >= 0 && row < C::kernel_height;
    const int group = part / kOutputGroups;
    Scalar elements[kVectorChannels];
    for (int j = 0; j < kVectorChannels; ++j) {
      const bool valid = exists && first + j < C::group_in;
      elements[j] =
          valid ? number_of(weight_at(weight, group, out, first + j, row, column, stacked_column),
                            first + j)
                : Scalar{};
    }
    return vector_of<WeightChannels>(elements);
  }
  __device__ __forceinline__ unsigned char* target(unsigned char* packed) const {
    const long long operand =
        (static_cast<long long>(part) * kSteps + step) * (kWeightParts * C::channel_groups) +
        channel_group;
    return packed + operand * kAOperandBytes + (plane * kOutputs + m) * 16;
  }
};
constexpr int kPartBytes = C::channel_groups * kAOperandBytes;  // bytes from a part to the next

__device__ __forceinline__ void pack_all(const Scalar* weight, unsigned char* packed) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
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
    const auto as_it_is = [](Scalar element, int) { return element; };
    NoRange any;
    store_parts<true>(vector.target(packed), kPartBytes, vector.load(weight, as_it_is), any);
  }
}

// The weight of the layer's `tap`-th tap; channels are the group's.
static_assert(!C::scaled_fp16 || (C::stacked_columns == 1 && !kDepthToSpace),
              "one sum for each tap");
constexpr int kUsedTaps = C::weight_height * C::weight_width;
constexpr int kScaledTaps = kInGroup / kScaledChannels * kUsedTaps;  // that share a power
__device__ __forceinline__ float used_weight(const Scalar* weight, int group, int out, int channel,
                                             int tap) {
  return widen(
      tap_at(weight, group, out, channel, tap / C::weight_width, tap % C::weight_width, 0));
}

// Block-wide: the power that an input channel's numbers are multiplied by and its weights divided
// by, at the mean exponent of these weights. If the channel's weights are 2^n times as large, so is
// the power; if an output channel's weights are, the powers of all input channels grow alike.
__device__ __forceinline__ float column_power(const Scalar* weight, int group, int channel) {
  int exponents = 0;
  int count = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < C::group_out * kScaledTaps; i += blockDim.x) {
    const int of_depth = HalfCopy::exists ? i % kScaledTaps / kUsedTaps : 0;
    const float number = used_weight(weight, group, i / kScaledTaps,
                                     channel + of_depth * kScaledChannels, i % kUsedTaps);
    exponents += static_cast<int>(__float_as_uint(number) >> 23 & 255u);
    count += number != 0.0f;
  }
  exponents = block_combined(exponents, sum_of<int>);
  return mean_power(exponents, block_combined(count, sum_of<int>));
}

// Grid-wide: the powers of all input channels.
__device__ __forceinline__ void find_columns(const Scalar* weight, float* columns) {
#pragma unroll 1
  for (int i = blockIdx.x; i < C::groups * kScaledChannels; i += gridDim.x) {
    const int group = i / kScaledChannels;
    const int channel = i % kScaledChannels;
    const float power = column_power(weight, group, channel);
    const int residue = static_cast<int>(threadIdx.x);
    if (residue < kResidues) columns[group * kGroupColumns + channel * kResidues + residue] = power;
  }
}

// Scales an output channel's weights; `in` counts input channels after space-to-depth.
struct WeightScale {
  const float* columns;  // the powers of the channels of its group
  float scale;

  __device__ __forceinline__ float operator()(float number, int in) const {
    return number * inverse(columns[scaled_channel(in)]) * scale;
  }
  template <class Half>
  __device__ __forceinline__ Half operator()(Half element, int) const {
    return element;  // never called: only float32 is scaled
  }
};

// Block-wide: whether what float16 loses of an output channel's filters is negligible beside them.
__device__ __forceinline__ bool filters_fit(const Scalar* weight, int group, int out,
                                            const WeightScale& scale) {
  bool fit = true;
  for (int channel = threadIdx.x; channel < kInGroup; channel += blockDim.x) {
    HalfRange range;
    float squares = 0.0f;
#pragma unroll 16
    for (int tap = 0; tap < kUsedTaps; ++tap) {
      const float number = used_weight(weight, group, out, channel, tap);
      const float scaled = scale(number, channel * kResidues);
      range.see(number, scaled);
      squares += scaled * scaled;
    }
    fit = fit && (range.fits(kLeastWeight) || squares >= kUsedTaps * (kWeightSize * kWeightSize));
  }
  return block_largest(fit ? 0.0f : 1.0f) == 0.0f;
}

// Block-wide: scales and packs one output channel's weights. Returns what scales its accumulators
// back.
__device__ __forceinline__ float pack_channel(const Scalar* weight, const float* columns,
                                              unsigned char* packed, int channel) {
  PackedVector vector;
  const int stack_channel = channel % kStackChannels;
  vector.channel_group = channel / kStackChannels % C::channel_groups;
  vector.part = channel / (kStackChannels * C::channel_groups);
  const int group = vector.part / kOutputGroups;
  const int out = channel % (kOutputGroups * C::channel_groups * kStackChannels);
  const bool exists = out < C::group_out;
  WeightScale scale{columns + group * kGroupColumns, 1.0f};
  float largest = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < (exists ? kInGroup * kUsedTaps : 0); i += blockDim.x) {
    const int channel = i / kUsedTaps;
    const float number = used_weight(weight, group, out, channel, i % kUsedTaps);
    largest = larger(largest, fabsf(scale(number, channel * kResidues)));
  }
  scale.scale = scale_to(block_largest(largest), kWeightExponent);
  if (scale.scale == 0.0f || (exists && !filters_fit(weight, group, out, scale))) return 0.0f;
  WeightRange range;
  for (int i = threadIdx.x; i < kSteps * 2 * C::stack; i += blockDim.x) {
    vector.m = i % C::stack * kStackChannels + stack_channel;
    vector.plane = i / C::stack % 2;
    vector.step = i / (C::stack * 2);
    const WeightChannels scaled = vector.load(weight, scale);
    range.see(scaled);
    store_parts<true>(vector.target(packed), kPartBytes, scaled, range);
  }
  return block_largest(range.fits(kLeastWeight) ? 0.0f : 1.0f) == 0.0f ? inverse(scale.scale)
                                                                       : 0.0f;
}

// The sample of an image, or of a volume that is copied as a whole: pieces of 32 numbers, spread
// evenly over each channel.
struct Samples {
  static constexpr int kChannels = C::groups * kScaledChannels;
  static constexpr int kPixels = (HalfCopy::exists ? Depth::in : 1) * C::in_height * C::in_width;
  static constexpr int kOfImage = ceil_div(kImageSamples, kChannels);
  static constexpr int kOfPixels = kPixels / kProvenPixels;
  static constexpr int kWanted = kOfImage > kOfPixels ? kOfImage : kOfPixels;
  static constexpr int kAll = ceil_div(kPixels, 32);
  static constexpr int kPieces = kWanted < kAll ? kWanted : kAll;
  // Where the last piece begins.
  static constexpr long long kLast = kPixels > 32 ? kPixels - 32 : 0;
  const Scalar* first;
  int front;  // the first plane that the image reads, in volumes that are not copied
  const float* columns;
  int lane;

  __device__ __forceinline__ Samples(const Scalar* input, int image, const float* columns)
      : columns(columns), lane(static_cast<int>(threadIdx.x) % 32) {
    if constexpr (HalfCopy::exists) {
      first = input + static_cast<long long>(image) * kInImage;
      front = 0;
    } else {
      const InImage<Scalar> read(input, image);
      first = read.first;
      front = read.front;
    }
  }

  // The table column of a channel; `channel` counts those of all groups.
  __device__ static __forceinline__ int column(int channel) {
    return channel / kScaledChannels * kGroupColumns + channel % kScaledChannels * kResidues;
  }
  // Where a channel begins; `channel` counts those of all groups.
  __device__ static __forceinline__ long long offset(int channel) {
    if constexpr (Depth::exists && !HalfCopy::exists) {
      return channel / kInGroup * (static_cast<long long>(kInChannels) * kInChannel) +
             channel_offset(channel % kInGroup);
    } else {
      return static_cast<long long>(channel) * kPixels;
    }
  }
  // A lane's number of a piece, times its channel's power; 0 if there is none.
  __device__ __forceinline__ float number(int channel, int piece) const {
    const long long begin = kLast * piece / (kPieces > 1 ? kPieces - 1 : 1);
    const Scalar* const source = first + offset(channel) + begin + lane;
    const bool exists = lane < kPixels && channel < kChannels &&
                        (HalfCopy::exists || plane_exists(front, channel % kInGroup));
    return fabsf(widen(load_element(source, exists))) *
           columns[column(min(channel, kChannels - 1))];
  }
};

// Block-wide: finds the scale of an image, and what its channels' numbers are multiplied by.
__device__ __forceinline__ float sample_image(const Samples& samples, float* powers) {
  static_assert(!C::scaled_fp16 || !C::in_channels_last, "a channel's pixels are neighbours");
  constexpr int kPieces = Samples::kPieces;
  constexpr int kTogether = kPieces < 8 ? 8 / kPieces : 1;  // channels that a warp samples at once
  const int warps = static_cast<int>(blockDim.x) / 32;
  float largest = 0.0f;
  for (int first = threadIdx.x / 32 * kTogether; first < Samples::kChannels;
       first += warps * kTogether) {
    float squares[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll 8
      for (int piece = 0; piece < kPieces; ++piece) {
        const float number = samples.number(first + i, piece);
        largest = larger(largest, number);
        squares[i] += number * number;
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float of_channel = warp_combined(squares[i], sum_of<float>);
      if (samples.lane == 0 && first + i < Samples::kChannels) {
        powers[Samples::column(first + i)] = of_channel;
      }
    }
  }
  const float scale = scale_to(block_largest(largest), kSampleExponent);
  // block_largest has synchronised: all warps' sums of squares are written. They overflow only
  // where no scale is suitable.
  for (int channel = threadIdx.x; channel < Samples::kChannels; channel += blockDim.x) {
    const int column = Samples::column(channel);
    const float power = samples.columns[column] * scale;
    const float least = Samples::kPixels * (kInputSize * kInputSize);
    const bool proven = powers[column] * scale * scale >= least;
    for (int residue = 0; residue < kResidues; ++residue)
      powers[column + residue] = proven ? power : -power;
  }
  for (int i = threadIdx.x; i < C::table_columns; i += blockDim.x) {
    if (i % kGroupColumns >= C::group_in) powers[i] = 0.0f;  // channels that do not exist
  }
  return scale;
}

__device__ __forceinline__ void pack(const Scalar* weight, const Scalar* input,
                                     unsigned char* scratch, int batch) {
  unsigned char* const packed = scratch + C::packed_at;
  if constexpr (C::scaled_fp16) {
    static_assert(!C::scaled_fp16 || C::table_channels == C::groups * kOutputGroups *
                                                              C::channel_groups * kStackChannels,
                  "a factor for each MMA row");
    const Tables tables{scratch, batch / HalfCopy::planes};
#pragma unroll 1
    for (int i = blockIdx.x; i < C::table_channels + tables.batch; i += gridDim.x) {
      const int image = i - C::table_channels;
      if (image < 0) {
        const float factor = pack_channel(weight, tables.columns(), packed, i);
        if (threadIdx.x == 0) tables.channels()[i] = factor;
      } else {
        const Samples samples(input, image, tables.columns());
        const float scale = sample_image(samples, tables.powers(image));
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

}  // namespace tensor
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(1024)
    scale(const Config::Scalar* weight, unsigned char* scratch, int batch) {
  using namespace fastconv::tensor;
  const Tables tables{scratch, batch / HalfCopy::planes};
  if constexpr (C::scaled_fp16) find_columns(weight, tables.columns());
}

extern "C" __global__ void __launch_bounds__(256)
    pack(const Config::Scalar* weight, const Config::Scalar* input, unsigned char* scratch,
         int batch) {
  fastconv::tensor::pack(weight, input, scratch, batch);
}
