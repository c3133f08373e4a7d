// Convolution with few output channels on Hopper's tensor cores: forward passes and input gradients
// of stride 1.
//
// M is 64 pixels of an image row, K the input channels, and N has a column for every tap of every
// output channel. Each input element is multiplied once, straight from the registers it was loaded
// to (wgmma's A operand); all weights stay in shared memory. The accumulators of a pixel and a tap
// are added to the output that they belong to afterwards:
//
//   rows      A warpgroup walks down a strip of the image. The accumulators of R output rows, where
//             R is the kernel's height, lie side by side in N (`slots`). A step adds an input row
//             to all slots, to each with another row of taps; then slot 0 is complete, and the
//             others move up by one.
//
//                input row i   slot 0: output row i - (R - 1)    taps of kernel row R - 1
//                              slot 1: output row i - (R - 2)    taps of kernel row R - 2
//                              ...                               (padding and dilation left out)
//
//   columns   A complete slot holds, for each pixel, one accumulator per tap of a kernel row. They
//             are written to shared memory, and an output adds up the taps of its neighbouring
//             pixels. The strip's outermost pixels have too few neighbours, so strips overlap by
//             the reach of a row of taps.
//
// Warpgroups work independently of each other: while one loads, another multiplies.
#pragma once
#include "hopper/walk.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace hopper {

constexpr int kWordElements = 4 / kScalarBytes;
constexpr int kPixels = 64;                 // M of a wgmma
constexpr int kStepChannels = 2 * kVector;  // K of a wgmma

// --- N: taps and output channels -----------------------------------------------------------------

constexpr int kSlots = C::kernel_height;
constexpr int kSlotColumns = round_up(C::kernel_width * C::group_out, 8);
constexpr int kColumns = kSlots * kSlotColumns;
constexpr int kAccumulators = kColumns / 2;  // registers of a thread
constexpr int kSlotAccumulators = kSlotColumns / 2;
static_assert(kColumns <= 256, "the widest wgmma");

// --- K: input channels, in units that are loaded together ----------------------------------------

constexpr int kUnits = ceil_div(ceil_div(C::group_in, kStepChannels), C::unit_steps);
constexpr int kSteps = kUnits * C::unit_steps;
static_assert(!C::vector_loads || C::unit_steps % 2 == 0, "16 bytes are a thread's of two MMAs");

// The channel at a place of K. As wgmma's A fragment, a thread holds 4 bytes of pixel 2 (lane / 4)
// and of the next pixel, at two places of K. The order of channels along K is free, so that 16
// bytes that are neighbours in memory go to one thread, for two wgmmas.
__device__ __forceinline__ int channel_of(int step, int place) {
  const int lane = place / kWordElements % 4;
  const int half = place / kVector;
  const int element = place % kWordElements;
  if constexpr (C::vector_loads) {
    return (step / 2 * 4 + lane) * kVector + (step % 2 * 2 + half) * kWordElements + element;
  } else {
    return step * kStepChannels + place;
  }
}

// --- Shared memory -------------------------------------------------------------------------------

constexpr int kPlaneBytes = kColumns * 16;
constexpr int kPartBytes = kSteps * 2 * kPlaneBytes;
constexpr int kStaging = C::parts * kPartBytes;
// A warpgroup's staging buffer: a line of pixels for each column of N, with a pitch that spreads a
// half-warp's pairs over different banks.
constexpr int kStagePitch = kPixels + 4;
constexpr int kStageFloats = kSlotColumns * kStagePitch;
static_assert(kStaging + C::warpgroups * kStageFloats * 4 <= C::shared_bytes, "");

// The weight in a column of N for an input channel; zero in the padding of N and K.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int column, int channel) {
  const int tap = column % kSlotColumns / C::group_out;
  const int out = column % kSlotColumns % C::group_out;
  if (tap >= C::kernel_width || channel >= C::group_in) return Scalar{};
  const int slot = column / kSlotColumns;
  const int row = C::transposed ? slot : kSlots - 1 - slot;
  const int kernel_column = C::transposed ? C::kernel_width - 1 - tap : tap;
  const long long first = C::transposed ? channel : out;
  const long long second = C::transposed ? out : channel;
  return weight[first * C::weight_stride_out + second * C::weight_stride_in +
                static_cast<long long>(row) * C::weight_stride_height +
                static_cast<long long>(kernel_column) * C::weight_stride_width];
}

__device__ __forceinline__ float rounded(float value) {
  return C::ties_to_even ? round_to_even_tf32(value) : round_operand_to_tf32(value);
}

__device__ __forceinline__ void store_weight(unsigned char* target, float value) {
  if constexpr (C::parts == 2) {
    split(value, *reinterpret_cast<unsigned*>(target),
          *reinterpret_cast<unsigned*>(target + kPartBytes));
  } else {
    *reinterpret_cast<float*>(target) = rounded(value);
  }
}
template <class Half>
__device__ __forceinline__ void store_weight(unsigned char* target, Half value) {
  *reinterpret_cast<Half*>(target) = value;
}

// All threads of a block write all weights to shared memory, in wgmma's layout without a swizzle:
//   [part][step][2][column][16 bytes of channels]
__device__ __forceinline__ void pack(const Scalar* weight) {
  constexpr int kElements = kSteps * kStepChannels * kColumns;
  for (int i = static_cast<int>(threadIdx.x); i < kElements; i += 128 * C::warpgroups) {
    const int column = i % kColumns;
    const int place = i / kColumns % kStepChannels;
    const int step = i / (kColumns * kStepChannels);
    unsigned char* const target = shared_memory() + (step * 2 + place / kVector) * kPlaneBytes +
                                  column * 16 + place % kVector * kScalarBytes;
    store_weight(target, weight_at(weight, column, channel_of(step, place)));
  }
  fence_async_shared();
}

// --- Items: strips that are distributed over warpgroups ------------------------------------------

constexpr int kRowStep = C::dilation_height;  // distance of a walk's output rows
using Item = Walk<C::strip_columns, kRowStep>;

// --- Input ---------------------------------------------------------------------------------------

constexpr int kInPlane = C::in_height * C::in_width;
constexpr int kInPixel = C::in_channels_last ? C::group_in : 1;
constexpr int kInChannel = C::in_channels_last ? 1 : kInPlane;
static_assert(elements_of(C::group_in, C::in_height, C::in_width) < kMostElements, "");
static_assert(elements_of(C::group_out, C::out_height, C::out_width) < kMostElements, "");

// Bounds of the rows and columns that taps may address, inside the input or not. With the padding
// of K they give the largest offset that is computed, and so the type that holds it.
constexpr int kFarRow =
    max_of(C::padding_top, C::out_height + C::kernel_height * C::dilation_height);
constexpr int kFarColumn = max_of(C::padding_left + C::lead, C::out_width + kPixels);
using InOffset =
    IndexTo<elements_of(kFarRow, C::in_width, kInPixel) + elements_of(kFarColumn, kInPixel) +
            elements_of(kSteps* kStepChannels, kInChannel)>;

// Words that a thread loads for a wgmma; 16-bit elements that are loaded singly take a word each.
constexpr bool kSingles = !C::vector_loads && !C::pair_loads;
constexpr int kRawWords = kSingles ? 4 * kWordElements : 4;

using Raw = unsigned[C::unit_steps][kRawWords];
using Fragments = unsigned[C::parts][C::unit_steps][4];

// Loads a thread's elements of the input rows of a walk.
struct Loader {
  const Scalar* pixels;  // first channel of the thread's first pixel, in row 0 of the image
  int first_channel;
  bool valid[2];  // whether the thread's two pixels are in the image

  __device__ Loader(const Scalar* input, const Item& item) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int column =
        item.column - C::padding_left - C::lead + thread / 32 * 16 + thread % 32 / 4 * 2;
    first_channel = thread % 4 * (C::vector_loads ? kVector : kWordElements);
    pixels = input + static_cast<long long>(item.image) * C::group_in * kInPlane +
             static_cast<long long>(first_channel) * kInChannel +
             static_cast<InOffset>(column) * kInPixel;
    for (int i = 0; i < 2; ++i) valid[i] = column + i >= 0 && column + i < C::in_width;
  }

  // Whether there is a channel that many after the thread's first one.
  __device__ __forceinline__ bool exists(int channel) const {
    constexpr bool kAll = kSteps * kStepChannels == C::group_in;
    return kAll || first_channel + channel < C::group_in;
  }

  // Loads a unit of a row, unconverted.
  __device__ __forceinline__ void load(Raw& raw, int row, int unit) const {
    const bool inside = row >= 0 && row < C::in_height;
    const Scalar* const source =
        pixels + static_cast<InOffset>(row) * (C::in_width * kInPixel) +
        static_cast<long long>(unit) * (C::unit_steps * kStepChannels) * kInChannel;
    const int channels = unit * (C::unit_steps * kStepChannels);
#pragma unroll
    for (int step = 0; step < C::unit_steps; ++step) {
      const Scalar* const of_step =
          source + static_cast<InOffset>(step * kStepChannels) * kInChannel;
      if constexpr (C::vector_loads) {
        if (step % 2 == 0) {
          load_vectors(raw[step], raw[(step + 1) % C::unit_steps], of_step,
                       inside && exists(channels + step * kStepChannels));
        }
      } else {
        load_step(raw[step], of_step, inside, channels + step * kStepChannels);
      }
    }
  }

  // Loads 16 bytes of channels of both pixels.
  __device__ __forceinline__ void load_vectors(unsigned (&first)[kRawWords],
                                               unsigned (&second)[kRawWords], const Scalar* source,
                                               bool exists) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 words =
          load_or_zero(reinterpret_cast<const uint4*>(source + i * kInPixel), exists && valid[i]);
      first[i] = words.x;
      first[2 + i] = words.y;
      second[i] = words.z;
      second[2 + i] = words.w;
    }
  }

  // Loads channel by channel: both pixels at once, or each by itself.
  __device__ __forceinline__ void load_step(unsigned (&raw)[kRawWords], const Scalar* source,
                                            bool inside, int channels) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int element = 0; element < kWordElements; ++element) {
        const int channel = half * kVector + element;
        const Scalar* const pixel = source + static_cast<InOffset>(channel) * kInChannel;
        const bool there = inside && exists(channels + channel);
        const int at = half * kWordElements + element;
        if constexpr (kSingles) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            raw[2 * at + i] = load_bits(pixel + i * kInPixel, there && valid[i]);
          }
        } else if constexpr (kScalarBytes == 2) {
          raw[at] = load_bits(reinterpret_cast<const float*>(pixel), there && valid[0]);
        } else {
          const uint2 pair = load_or_zero(reinterpret_cast<const uint2*>(pixel), there && valid[0]);
          raw[2 * at] = pair.x;
          raw[2 * at + 1] = pair.y;
        }
      }
    }
  }
};

// Converts what was loaded for a wgmma to its A fragment, in one part or two.
__device__ __forceinline__ void convert(unsigned (&fragment)[4], unsigned (&low)[4],
                                        const unsigned (&raw)[kRawWords]) {
  if constexpr (kScalarBytes == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = __uint_as_float(raw[i]);
      if constexpr (C::parts == 2) {
        split(value, fragment[i], low[i]);
      } else {
        fragment[i] = __float_as_uint(rounded(value));
      }
    }
  } else if constexpr (C::vector_loads) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = raw[i];
  } else {
    // A word of the fragment has two channels of one pixel.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kSingles) {
        fragment[2 * half] = raw[4 * half] | raw[4 * half + 2] << 16;
        fragment[2 * half + 1] = raw[4 * half + 1] | raw[4 * half + 3] << 16;
      } else {
        fragment[2 * half] = __byte_perm(raw[2 * half], raw[2 * half + 1], 0x5410);
        fragment[2 * half + 1] = __byte_perm(raw[2 * half], raw[2 * half + 1], 0x7632);
      }
    }
  }
}

__device__ __forceinline__ void convert(Fragments& fragments, const Raw& raw) {
#pragma unroll
  for (int step = 0; step < C::unit_steps; ++step) {
    convert(fragments[0][step], fragments[C::parts - 1][step], raw[step]);
  }
}

// Whether all numbers of a warp are finite, judged by their low parts. Multiplying two low parts
// takes half as many instructions as checking each; it overflows only for numbers beyond 2^70, for
// which the kernel is then careful without need.
__device__ __forceinline__ bool is_finite(const Fragments& fragments) {
  float products = 0.0f;
#pragma unroll
  for (int step = 0; step < C::unit_steps; ++step) {
    const unsigned (&low)[4] = fragments[C::parts - 1][step];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      products = fmaf(__uint_as_float(low[i]), __uint_as_float(low[i + 1]), products);
    }
  }
  return __all_sync(~0u, tensor::is_finite(products));
}

// --- MMA -----------------------------------------------------------------------------------------

// The low part of a finite number is never larger.
constexpr float kMostLow = 0x1p116f;

// Adds a unit to the accumulators of all slots. With 3xTF32 (`parts` = 2), these hold the rounding
// error of the totals so far (`compensated`), or are overwritten; and the high * high MMAs come
// last, so that the small products are added to small accumulators.
__device__ __forceinline__ void multiply(float (&acc)[kAccumulators], const Fragments& fragments,
                                         int unit) {
  constexpr int kLow = C::parts - 1;
  constexpr int kPart = kPartBytes / 16;
  // Infinite numbers have infinite low parts. They are limited, so that low * low is finite.
  unsigned limited_low[C::unit_steps][4];
  if constexpr (C::low_low_mma) {
#pragma unroll
    for (int step = 0; step < C::unit_steps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = __uint_as_float(fragments[kLow][step][i]);
        limited_low[step][i] = __float_as_uint(limited(low, kMostLow));
      }
    }
  }
  const Matrix weights =
      matrix(shared_memory(), kPlaneBytes, 128) + unit * C::unit_steps * (2 * kPlaneBytes / 16);
  wgmma_fence();
  if constexpr (C::parts == 2) {
#pragma unroll
    for (int step = 0; step < C::unit_steps; ++step) {
      const Matrix right = weights + step * (2 * kPlaneBytes / 16);
      bool accumulate = C::compensated || step > 0;
      if constexpr (C::low_low_mma) {
        wgmma<kColumns>(Operand{}, acc, limited_low[step], right + kPart, accumulate);
        accumulate = true;
      }
      wgmma<kColumns>(Operand{}, acc, fragments[kLow][step], right, accumulate);
      wgmma<kColumns>(Operand{}, acc, fragments[0][step], right + kPart, true);
    }
  }
#pragma unroll
  for (int step = 0; step < C::unit_steps; ++step) {
    wgmma<kColumns>(Operand{}, acc, fragments[0][step], weights + step * (2 * kPlaneBytes / 16),
                    true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold_registers(acc);
}

// --- Epilogue ------------------------------------------------------------------------------------

// Stores output rows of a walk from the accumulators of slot 0.
struct Storer {
  const Scalar* bias;
  Scalar* image;
  float* stage;
  int warpgroup;
  int column;
  int columns;
  Epilogue<C> epilogue;

  __device__ Storer(const Scalar* bias, Scalar* output, const Item& item,
                    const Epilogue<C>& epilogue)
      : bias(bias), epilogue(epilogue) {
    warpgroup = static_cast<int>(threadIdx.x) / 128;
    stage = reinterpret_cast<float*>(shared_memory() + kStaging) + warpgroup * kStageFloats;
    image =
        output + static_cast<long long>(item.image) * C::group_out * C::out_height * C::out_width;
    column = item.column;
    columns = min(C::strip_columns, C::out_width - column);
  }

  __device__ __forceinline__ float bias_of(int channel) const {
    return bias == nullptr ? 0.0f : widen(bias[channel]);
  }

  // An output: the sum over a row of taps, each taken from the pixel that it reads.
  __device__ __forceinline__ float output_at(int x, int channel) const {
    const float* const first = stage + channel * kStagePitch + C::lead + x;
    float sum = first[0];
#pragma unroll
    for (int tap = 1; tap < C::kernel_width; ++tap) {
      sum += first[tap * (C::group_out * kStagePitch + C::dilation_width)];
    }
    return sum;
  }

  __device__ __forceinline__ void store(const float (&acc)[kAccumulators], int row) const {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int warp = thread / 32;
    const int lane = thread % 32;
    warpgroup_sync(warpgroup);  // the previous row has been read
#pragma unroll
    for (int i = 0; i < kSlotAccumulators; i += 4) {
      // Accumulators i and i + 1 are two columns of the first pixel, i + 2 and i + 3 of the second.
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = 2 * i + lane % 4 * 2 + j;
        *reinterpret_cast<float2*>(stage + at * kStagePitch + warp * 16 + lane / 4 * 2) =
            make_float2(acc[i + j], acc[i + 2 + j]);
      }
    }
    warpgroup_sync(warpgroup);
    // These loops are not unrolled: the addresses would take registers that accumulators need.
    if constexpr (C::out_channels_last) {
      Scalar* const target = image + (row * C::out_width + column) * C::group_out;
#pragma unroll 1
      for (int i = thread; i < columns * C::group_out; i += 128) {
        const int channel = i % C::group_out;
        const float sum = output_at(i / C::group_out, channel) + bias_of(channel);
        target[i] = epilogue(sum, target + i);
      }
    } else {
      // The distance of four channels, some of which may not exist, has to fit the type.
      constexpr IndexTo<elements_of(4, C::out_height, C::out_width)> kPlane =
          C::out_height * C::out_width;
      Scalar* target = image + row * C::out_width + column + warp * kPlane + lane;
#pragma unroll 1
      for (int channel = warp; channel < C::group_out; channel += 4) {
        const float bias = bias_of(channel);
#pragma unroll
        for (int x = 0; x < C::strip_columns; x += 32) {
          if (x + lane < columns) {
            target[x] = epilogue(output_at(x + lane, channel) + bias, target + x);
          }
        }
        target += 4 * kPlane;
      }
    }
  }
};

// --- Kernel --------------------------------------------------------------------------------------

// Moves the slots up by one; the last one becomes a new output row.
__device__ __forceinline__ void advance(float (&acc)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    acc[i] = i + kSlotAccumulators < kAccumulators ? acc[i + kSlotAccumulators] : 0.0f;
  }
}

__device__ __forceinline__ void walk(const Scalar* input, const Scalar* bias, Scalar* output,
                                     const Item& item, const Epilogue<C>& epilogue) {
  const Loader loader(input, item);
  float acc[kAccumulators];
  float totals[kAccumulators];  // with 3xTF32, the sums of the accumulators of all units
  float (&slots)[kAccumulators] = C::parts == 2 ? totals : acc;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) slots[i] = acc[i] = 0.0f;
  Raw raw;
  Fragments fragments;
  bool careful = false;  // whether there was an infinity or a NaN
  int row = item.row - C::padding_top;
  loader.load(raw, row, 0);
  const int steps = item.rows + kSlots - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int next_row =
        step < steps - 1
            ? row + kRowStep
            : C::in_height;  // after the last row, one outside the image: nothing is loaded
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      convert(fragments, raw);
      if constexpr (C::compensated) careful = careful || !is_finite(fragments);
      // The next unit's loads are in flight while this one is multiplied.
      const bool last = unit == kUnits - 1;
      loader.load(raw, last ? next_row : row, last ? 0 : unit + 1);
      multiply(acc, fragments, unit);
      if constexpr (C::parts == 2) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) {
          const float total = totals[i] + acc[i];
          if constexpr (C::compensated) acc[i] -= total - totals[i];
          totals[i] = total;
        }
        // The rounding error of a total that became infinite is NaN or infinite.
        if (C::compensated && careful) drop_infinite(acc);
      }
    }
    row = next_row;
    const int complete = step - (kSlots - 1);
    if (complete >= 0) {
      Storer(bias, output, item, epilogue).store(slots, item.row + complete * kRowStep);
    }
    advance(slots);
    if constexpr (C::compensated) advance(acc);
  }
}

__device__ __forceinline__ void few_outputs(const Scalar* input, const Scalar* weight,
                                            const Scalar* bias, Scalar* output, int batch,
                                            const Epilogue<C>& epilogue) {
  pack(weight);
  __syncthreads();
  const int items = batch * Item::kPerImage;
  const int first =
      static_cast<int>(blockIdx.x) * C::warpgroups + static_cast<int>(threadIdx.x) / 128;
  for (int index = first; index < items; index += static_cast<int>(gridDim.x) * C::warpgroups) {
    const Item item(index);
    if (item.rows > 0) walk(input, bias, output, item, epilogue);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(128 * Config::warpgroups, 1)
    few_outputs(const Config::Scalar* input, const Config::Scalar* weight,
                const Config::Scalar* bias, Config::Scalar* output,
                int batch FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::hopper::few_outputs(input, weight, bias, output, batch, FASTCONV_EPILOGUE(output));
}
