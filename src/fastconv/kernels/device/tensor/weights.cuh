// Weights, packed as the tensor cores want them, with the kernels that do it. Before they are
// packed as float16, a kernel finds the input channels' scales; the one that packs them finds those
// of output channels and of images.
#pragma once
#include "device/tensor/input.cuh"

namespace fastconv {
namespace tensor {

constexpr int kSteps = kChunks * kTaps * C::k_steps;
constexpr int kPackedVectors =
    C::groups * kOutputGroups * kSteps * C::channel_groups * 2 * kOutputs;
constexpr int kFold = C::fold_height * C::fold_width;
// Samples are of 32 numbers: of an image at least so many, and one for so many pixels of a channel.
constexpr int kImageSamples = 256;
constexpr int kProvenPixels = 1 << 15;

// The weight of one of the taps that are used, for an output and an input channel of the group;
// zero where summing several places of a step has added to the kernel. `sum` says which of two
// columns; an output channel may be a phase as well.
__device__ __forceinline__ Scalar tap_at(const Scalar* weight, int group, int out, int in, int row,
                                         int column, int sum) {
  long long k = group * C::group_out + out;
  long long c = in;
  if constexpr (C::transposed) {
    const UnfoldedChannel to(out);
    k = group * C::group_in + in;
    c = to.channel;
    row = C::last_tap_row - C::tap_step_height * row + to.row;
    column = C::last_tap_column - C::tap_step_width * column + sum + to.column;
    if (kUnfolds && (row < 0 || row >= C::weight_height)) return Scalar{};
    if ((kUnfolds || C::column_sums > 1) && (column < 0 || column >= C::weight_width)) {
      return Scalar{};
    }
  }
  return weight[k * C::weight_stride_out + c * C::weight_stride_in +
                static_cast<long long>(row) * C::weight_stride_height +
                static_cast<long long>(column) * C::weight_stride_width];
}

// The same as the products have it: zero also for what folding has added to the kernel.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int group, int out, int in,
                                            int row, int column, int sum) {
  const FoldedChannel folded(in);
  row = row * C::fold_height + folded.row;
  column = column * C::fold_width + folded.column;
  if (row >= C::weight_height || column >= C::weight_width) return Scalar{};
  return tap_at(weight, group, out, folded.channel, row, column, sum);
}

// Weights as the consumers want them, a chunk's taps in one piece:
//   [group][output group][chunk][tap][k step][part][channel group][2][64][16 bytes]
struct PackedVector {
  int part;  // group and output group
  int channel_group;
  int m;     // row of the product
  int step;  // chunk, tap and k step
  int plane;

  // Their numbers are what `number_of` makes of a weight and its input channel.
  template <class NumberOf>
  __device__ __forceinline__ Channels load(const Scalar* weight, NumberOf number_of) const {
    const int k_step = step % C::k_steps;
    const int tap = step / C::k_steps % kTaps;
    const int chunk = step / (C::k_steps * kTaps);
    const int stacked = row_of_column(m) / kStackRows;
    const int of_stack = row_of_column(m) % kStackRows;
    const int out =
        (part % kOutputGroups * C::channel_groups + channel_group) * kStackChannels + of_stack;
    const int sum = m / 8 % C::column_sums;
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
          valid ? number_of(weight_at(weight, group, out, first + j, row, column, sum), first + j)
                : Scalar{};
    }
    return channels_of(elements);
  }
  __device__ __forceinline__ unsigned char* target(unsigned char* packed) const {
    const long long product =
        (static_cast<long long>(part) * kSteps + step) * (kWeightParts * C::channel_groups) +
        channel_group;
    return packed + product * kProductBytes + (plane * kOutputs + m) * 16;
  }
};
constexpr int kPartBytes = C::channel_groups * kProductBytes;  // from a part to the next

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

// The weight of the `tap`-th tap that is used; channels are the group's.
static_assert(!C::halves || (C::column_sums == 1 && !kUnfolds), "one sum for each tap");
constexpr int kUsedTaps = C::weight_height * C::weight_width;
__device__ __forceinline__ float used_weight(const Scalar* weight, int group, int out, int channel,
                                             int tap) {
  return widen(
      tap_at(weight, group, out, channel, tap / C::weight_width, tap % C::weight_width, 0));
}

// A block: what an input channel's numbers are multiplied by, and its weights divided by: the mean
// of their exponents. If the channel's weights are 2^n times as large, so is this; and if an output
// channel's are, it is as much larger for all input channels.
__device__ __forceinline__ float column_power(const Scalar* weight, int group, int channel) {
  int exponents = 0;
  int count = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < C::group_out * kUsedTaps; i += blockDim.x) {
    const float number = used_weight(weight, group, i / kUsedTaps, channel, i % kUsedTaps);
    exponents += static_cast<int>(__float_as_uint(number) >> 23 & 255u);
    count += number != 0.0f;
  }
  exponents = block_combined(exponents, sum_of<int>);
  return mean_power(exponents, block_combined(count, sum_of<int>));
}

// Blocks: all of these.
__device__ __forceinline__ void find_columns(const Scalar* weight, float* columns) {
#pragma unroll 1
  for (int i = blockIdx.x; i < C::groups * kInGroup; i += gridDim.x) {
    const int group = i / kInGroup;
    const int channel = i % kInGroup;
    const float power = column_power(weight, group, channel);
    const int fold = static_cast<int>(threadIdx.x);
    if (fold < kFold) columns[group * kGroupColumns + channel * kFold + fold] = power;
  }
}

// How an output channel's weights are scaled, by input channels of the products.
struct WeightScale {
  const float* columns;  // of its group
  float scale;

  __device__ __forceinline__ float operator()(float number, int in) const {
    return number * inverse(columns[in]) * scale;
  }
  template <class Half>
  __device__ __forceinline__ Half operator()(Half element, int) const {
    return element;  // never: only floats are scaled
  }
};

// A block: whether what float16 has not of an output channel's filters is nothing beside them.
__device__ __forceinline__ bool filters_fit(const Scalar* weight, int group, int out,
                                            const WeightScale& scale) {
  bool fit = true;
  for (int channel = threadIdx.x; channel < kInGroup; channel += blockDim.x) {
    HalfRange range;
    float squares = 0.0f;
#pragma unroll 16
    for (int tap = 0; tap < kUsedTaps; ++tap) {
      const float number = used_weight(weight, group, out, channel, tap);
      const float scaled = scale(number, channel * kFold);
      range.see(number, scaled);
      squares += scaled * scaled;
    }
    fit = fit && (range.fits(kLeastWeight) || squares >= kUsedTaps * (kWeightSize * kWeightSize));
  }
  return block_largest(fit ? 0.0f : 1.0f) == 0.0f;
}

// A block: scales and packs one output channel's weights. Gives what scales its sums back.
__device__ __forceinline__ float pack_channel(const Scalar* weight, const float* columns,
                                              unsigned char* packed, int channel) {
  PackedVector vector;
  const int of_product = channel % kStackChannels;
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
    largest = larger(largest, fabsf(scale(number, channel * kFold)));
  }
  scale.scale = scale_to(block_largest(largest), kWeightExponent);
  if (scale.scale == 0.0f || (exists && !filters_fit(weight, group, out, scale))) return 0.0f;
  Range range;
  for (int i = threadIdx.x; i < kSteps * 2 * C::stack; i += blockDim.x) {
    vector.m = i % C::stack * kStackChannels + of_product;
    vector.plane = i / C::stack % 2;
    vector.step = i / (C::stack * 2);
    const Channels scaled = vector.load(weight, scale);
    range.see(scaled);
    store_parts<true>(vector.target(packed), kPartBytes, scaled, range);
  }
  return block_largest(range.fits(kLeastWeight) ? 0.0f : 1.0f) == 0.0f ? inverse(scale.scale)
                                                                       : 0.0f;
}

// Samples of an image: pieces of 32 numbers, spread evenly over each channel.
struct Samples {
  static constexpr int kChannels = C::groups * kInGroup;
  static constexpr int kPixels = C::in_height * C::in_width;
  static constexpr int kOfImage = ceil_div(kImageSamples, kChannels);
  static constexpr int kOfPixels = kPixels / kProvenPixels;
  static constexpr int kWanted = kOfImage > kOfPixels ? kOfImage : kOfPixels;
  static constexpr int kAll = ceil_div(kPixels, 32);
  static constexpr int kPieces = kWanted < kAll ? kWanted : kAll;
  static constexpr long long kLast = kPixels > 32 ? kPixels - 32 : 0;  // where the last begins
  const Scalar* image;
  const float* columns;
  int lane;

  // Of a channel of all groups'.
  __device__ static __forceinline__ int column(int channel) {
    return channel / kInGroup * kGroupColumns + channel % kInGroup * kFold;
  }
  // A lane's number of a piece, with its channel's power; 0 if there is none.
  __device__ __forceinline__ float number(int channel, int piece) const {
    const long long first = kLast * piece / (kPieces > 1 ? kPieces - 1 : 1);
    const Scalar* const source = image + static_cast<long long>(channel) * kPixels + first + lane;
    const bool exists = lane < kPixels && channel < kChannels;
    return fabsf(widen(load_element(source, exists))) *
           columns[column(min(channel, kChannels - 1))];
  }
};

// A block: the scale of an image, and what its channels' numbers are multiplied by.
__device__ __forceinline__ float sample(const Scalar* image, const float* columns, float* powers) {
  static_assert(!C::halves || !C::in_channels_last, "a channel's pixels are neighbours");
  constexpr int kPieces = Samples::kPieces;
  constexpr int kTogether = kPieces < 8 ? 8 / kPieces : 1;  // channels
  const Samples samples{image, columns, static_cast<int>(threadIdx.x) % 32};
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
  // All warps' have been written. They overflow only where no scale will do.
  for (int channel = threadIdx.x; channel < Samples::kChannels; channel += blockDim.x) {
    const int column = Samples::column(channel);
    const float power = columns[column] * scale;
    const float least = Samples::kPixels * (kInputSize * kInputSize);
    const bool proven = powers[column] * scale * scale >= least;
    for (int fold = 0; fold < kFold; ++fold) powers[column + fold] = proven ? power : -power;
  }
  for (int i = threadIdx.x; i < C::table_columns; i += blockDim.x) {
    if (i % kGroupColumns >= C::group_in) powers[i] = 0.0f;  // channels that do not exist
  }
  return scale;
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
        const float factor = pack_channel(weight, tables.columns(), packed, i);
        if (threadIdx.x == 0) tables.channels()[i] = factor;
      } else {
        const float scale = sample(input + static_cast<long long>(image) * kInImage,
                                   tables.columns(), tables.powers(image));
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
  if constexpr (C::halves) find_columns(weight, Tables{scratch, batch}.columns());
}

extern "C" __global__ void __launch_bounds__(256)
    pack(const Config::Scalar* weight, const Config::Scalar* input, unsigned char* scratch,
         int batch) {
  fastconv::tensor::pack(weight, input, scratch, batch);
}
