// Scaled fp16 for weight gradients: float32 multiplied as float16, in half the time of TF32, with
// the same mantissa but a smaller range.
//
// Each channel of either tensor is multiplied, in all images, by a power of two that a sample of
// its numbers decides. Below 2^-14 float16 is subnormal and loses bits of a number. Threads that
// have such numbers in registers count them. The reduction compares what these numbers may have
// lost with the magnitude of each weight, and marks the filters (of an output and an input channel)
// for which it may be too much. A second pair of launches (`repairs`) computes those in TF32.
//
// Numbers above 65504 become infinite, and results that they contribute to become infinite or NaN:
// such filters are marked too.
#pragma once
#include "device/tensor/powers.cuh"
#include "hopper/wgrad_halo/tile.cuh"

namespace fastconv {
namespace hopper {

constexpr int kInputs = C::groups * C::group_in;  // channels of all groups
constexpr int kGradients = C::groups * C::group_out;

// Tables at the start of the workspace: one entry for each channel of both tensors, the input's
// first, then one for each filter.
struct Tables {
  float4* scratch;

  // What a channel's numbers are multiplied by; kNoPowerBits if no power is suitable.
  __device__ __forceinline__ float* powers() const { return reinterpret_cast<float*>(scratch); }
  // How many groups of a channel's numbers contain one that is subnormal in float16.
  __device__ __forceinline__ unsigned* lossy() const {
    return reinterpret_cast<unsigned*>(powers() + kInputs + kGradients);
  }
  // Not 0 for filters that must be computed again in TF32.
  __device__ __forceinline__ int* marks() const {
    return reinterpret_cast<int*>(lossy() + kInputs + kGradients);
  }
  // The index of a filter; `output` counts the channels of all groups, `input` those of one.
  __device__ static __forceinline__ int filter(int output, int input) {
    return output * C::group_in + input;
  }
  // The slots of accumulators, behind the tables.
  __device__ __forceinline__ float4* workspace() const { return scratch + C::slots_at; }
};

__device__ __forceinline__ float scaled(float number, float power) {
  return C::scaled_fp16 ? number * power : number;
}
template <class Half>
__device__ __forceinline__ Half scaled(Half element, float) {
  return element;  // only float32 is scaled
}

// --- Numbers that are subnormal in float16 -------------------------------------------------------

// A key that orders numbers by magnitude, with zeros above all others, since they lose nothing.
__host__ __device__ constexpr unsigned magnitude_key_of(unsigned bits) { return bits * 2u - 1u; }
__device__ __forceinline__ unsigned magnitude_key(float number) {
  return magnitude_key_of(__float_as_uint(number));
}
// The power of a channel whose sample does not tell how large it is. It makes all but the smallest
// numbers infinite, and least_key counts every number that is not zero as lossy.
constexpr unsigned kNoPowerBits = (127u + 113u) << 23;

// The key of the least number that keeps all bits, 2^-14 divided by the power: a single
// instruction. (Given a comparison of the power with zero and a product of floats, ptxas 13.0
// computed ~0u for all powers where registers were short.)
__device__ __forceinline__ unsigned least_key(float power) {
  constexpr unsigned kOne = 127u << 23, kLeast = (127u - 14u) << 23;
  static_assert(magnitude_key_of(kLeast + kOne - kNoPowerBits) == ~0u, "no number has all bits");
  return magnitude_key_of(kLeast + kOne) - 2u * __float_as_uint(power);
}

// How many numbers are checked together; of the input, all that a lane loads at once.
constexpr int kGradGroup = 8;
constexpr int kInputGroup = kQuad * kInterleave;

// --- Samples -------------------------------------------------------------------------------------

constexpr int kSamplePieces = 2048;  // pieces of 32 numbers that are sampled of a channel

// Block-wide: the power of a channel whose planes have kPixels pixels and lie `image` elements
// apart.
template <int kPixels>
__device__ __forceinline__ float power_of(const Scalar* channel, long long image, int batch) {
  constexpr int kAll = ceil_div(kPixels, 32);
  constexpr unsigned kLast = kPixels > 32 ? kPixels - 32 : 0;    // where the last piece begins
  const int pieces = min(ceil_div(kSamplePieces, batch), kAll);  // pieces of an image
  const unsigned distance = pieces > 1 ? ceil_div(static_cast<int>(kLast), pieces - 1) : 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  // Pieces are taken image by image. A division for each piece would take longer than its load.
  const int more_images = warps % batch;
  const int more_pieces = warps / batch;
  int of_image = warp % batch;
  unsigned piece = warp / batch;
  float largest = 0.0f;
#pragma unroll 16
  for (int i = warp; i < pieces * batch; i += warps) {
    const Scalar* const source = channel + (of_image * image + min(piece * distance, kLast) + lane);
    largest = larger(largest, fabsf(widen(load_element(source, lane < kPixels))));
    of_image += more_images;
    piece += more_pieces;
    if (of_image >= batch) {
      of_image -= batch;
      ++piece;
    }
  }
  largest = block_largest(largest);
  const float power = largest == 0.0f ? 0.0f : scale_to(largest, kSampleExponent);
  return power == 0.0f ? __uint_as_float(kNoPowerBits) : power;
}

// The number of an input channel in memory, of all groups.
__device__ __forceinline__ int in_memory(int input) {
  if constexpr (!Depth::exists) return input;
  return input / C::group_in * kInChannels + InChannel(input % C::group_in).channel;
}

// Finds the powers of all channels, and clears the other tables.
__device__ __forceinline__ void find_powers(const Scalar* grad_output, const Scalar* input,
                                            const Tables& tables, int batch) {
  constexpr int kInPixels = Depth::in * C::in_height * C::in_width;
  constexpr int kOutPixels = Depth::out * C::out_height * C::out_width;
  constexpr int kInMemory = C::groups * kInChannels;
  const int volumes = batch / Depth::out;
#pragma unroll 1
  for (int i = blockIdx.x; i < kInputs + kGradients; i += gridDim.x) {
    const int output = i - kInputs;
    const float power =
        output < 0 ? power_of<kInPixels>(input + static_cast<long long>(in_memory(i)) * kInPixels,
                                         static_cast<long long>(kInMemory) * kInPixels, volumes)
                   : power_of<kOutPixels>(grad_output + static_cast<long long>(output) * kOutPixels,
                                          static_cast<long long>(kGradients) * kOutPixels, volumes);
    if (threadIdx.x == 0) {
      tables.powers()[i] = power;
      tables.lossy()[i] = 0;
    }
  }
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kGradients * C::group_in; i += step) {
    tables.marks()[i] = 0;
  }
}

// --- Deciding which filters fit ------------------------------------------------------------------

// The most that a number below 2^-14 loses, times the largest number that it is multiplied by.
constexpr float kLoss = 65536.0f / (C::parts == 2 ? 1ll << 35 : 1ll << 24);
// What a weight may lose, relative to the magnitudes of its blocks' parts.
constexpr float kTolerance = 1.0f / (C::parts == 2 ? 1 << 25 : 1 << 20);

// A channel's power and count.
struct ScaledChannel {
  float power;
  float lossy;  // upper bound of its subnormal numbers

  __device__ ScaledChannel(const Tables& tables, int channel, int group)
      : power(tables.powers()[channel]),
        lossy(static_cast<float>(tables.lossy()[channel]) * group) {}
  // Whether all of the channel's numbers are zero.
  __device__ __forceinline__ bool zero() const {
    return __float_as_uint(power) == kNoPowerBits && lossy == 0.0f;
  }
  // What scales accumulators back.
  __device__ __forceinline__ float back() const { return inverse(power); }
};

// Whether a weight is as accurate as TF32's; `size` is the sum of the magnitudes of its parts.
__device__ __forceinline__ bool fits(const ScaledChannel& input, const ScaledChannel& gradient,
                                     float sum, float size) {
  const bool loses = !input.zero() && !gradient.zero();
  const float lost = loses ? (input.lossy + gradient.lossy) * kLoss : 0.0f;
  return is_finite(sum) && lost <= size * kTolerance;
}

// Whether a filter of a tile is marked. All lanes of a warp call it and get the same answer.
__device__ __forceinline__ bool is_marked(const Tables& tables, const Tile& tile) {
  constexpr int kBlockInputs = kBlockPlanes * kPlaneChannels;
  const int first_input = tile.plane() * kPlaneChannels;
  int found = 0;
#pragma unroll 16
  for (int i = threadIdx.x % 32; i < kStageChannels * kBlockInputs; i += 32) {
    const int output = tile.channel(i / kBlockInputs);
    const int input = first_input + i % kBlockInputs;
    const bool exists = output < C::group_out && input < C::group_in;
    // An early exit would make each load wait for the one before.
    found |= exists ? tables.marks()[Tables::filter(tile.group * C::group_out + output, input)] : 0;
  }
  return __any_sync(~0u, found != 0);
}

}  // namespace hopper
}  // namespace fastconv
