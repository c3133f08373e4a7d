// float32 multiplied as float16: half the time of TF32, the same mantissa, but a smaller range.
//
// Each channel of either tensor, of all images, is multiplied by a power of two that a sample of
// its numbers decides. Below 2^-14, float16 has not all bits of a number. Who has such a number in
// registers counts it; who adds up the sums compares what these numbers may have lost with what
// there is of each weight, and marks the filters (of an output and an input channel) for which it
// may be too much. A second pair of launches (`repairs`) computes those in TF32.
//
// Numbers above 65504 become infinite, and so, or NaN, does every sum that they are a part of: such
// filters are marked, too.
#pragma once
#include "hopper/wgrad_halo/tile.cuh"
#include "device/tensor/powers.cuh"

namespace fastconv {
namespace hopper {

constexpr int kInputs = C::groups * C::group_in;  // channels
constexpr int kGradients = C::groups * C::group_out;

// Tables at the workspace's start: of the channels of both tensors, the input's first, and of
// filters.
struct Tables {
  float4* scratch;

  // What a channel's numbers are multiplied by; kNoPower if no power will do.
  __device__ __forceinline__ float* powers() const { return reinterpret_cast<float*>(scratch); }
  // How many groups of its numbers have some that float16 has not all bits of.
  __device__ __forceinline__ unsigned* lossy() const {
    return reinterpret_cast<unsigned*>(powers() + kInputs + kGradients);
  }
  // Not 0 for filters that float16 does not do.
  __device__ __forceinline__ int* marks() const {
    return reinterpret_cast<int*>(lossy() + kInputs + kGradients);
  }
  // Of channels of all groups' outputs, and of a group's inputs.
  __device__ static __forceinline__ int filter(int output, int input) {
    return output * C::group_in + input;
  }
  // The slots that come behind them.
  __device__ __forceinline__ float4* workspace() const { return scratch + C::slots_at; }
};

__device__ __forceinline__ float scaled(float number, float power) {
  return C::halves ? number * power : number;
}
template <class Half>
__device__ __forceinline__ Half scaled(Half element, float) {
  return element;  // only floats have powers
}

// --- Numbers that float16 has not all bits of ----------------------------------------------------

// A number's magnitude, for comparisons: zeros, which lose nothing, are larger than all others.
__host__ __device__ constexpr unsigned magnitude_key_of(unsigned bits) { return bits * 2u - 1u; }
__device__ __forceinline__ unsigned magnitude_key(float number) {
  return magnitude_key_of(__float_as_uint(number));
}
// What a channel is multiplied by of which no sample tells how large it is. It becomes infinite,
// but for the smallest numbers; and all that are not zero count as lost, as least_key has it.
constexpr unsigned kNoPowerBits = (127u + 113u) << 23;

// The key of the least number that has all bits, 2^-14 divided by the power: a single instruction.
// (Of a comparison of the power with zero and a product of floats, ptxas 13.0 made ~0u for all
// powers where registers were short.)
__device__ __forceinline__ unsigned least_key(float power) {
  constexpr unsigned kOne = 127u << 23, kLeast = (127u - 14u) << 23;
  static_assert(magnitude_key_of(kLeast + kOne - kNoPowerBits) == ~0u, "no number has all bits");
  return magnitude_key_of(kLeast + kOne) - 2u * __float_as_uint(power);
}

// Of how many numbers the least is compared with it: of the input, all that a lane loads at once.
constexpr int kGradGroup = 8;
constexpr int kInputGroup = kQuad * kPhases;

// --- Samples -------------------------------------------------------------------------------------

constexpr int kSamplePieces = 2048;  // of 32 numbers each, of a channel

// A block: the power of a channel whose planes have so many pixels, `image` elements apart.
template <int kPixels>
__device__ __forceinline__ float power_of(const Scalar* channel, long long image, int batch) {
  constexpr int kAll = ceil_div(kPixels, 32);
  constexpr unsigned kLast = kPixels > 32 ? kPixels - 32 : 0;    // where the last piece begins
  const int pieces = min(ceil_div(kSamplePieces, batch), kAll);  // of an image
  const unsigned distance = pieces > 1 ? ceil_div(static_cast<int>(kLast), pieces - 1) : 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  // Pieces follow each other image by image. To divide for each would take longer than to load it.
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

// Finds the powers of all channels, and clears the other tables.
__device__ __forceinline__ void find_powers(const Scalar* grad_output, const Scalar* input,
                                            const Tables& tables, int batch) {
  constexpr int kInPixels = C::in_height * C::in_width;
  constexpr int kOutPixels = C::out_height * C::out_width;
#pragma unroll 1
  for (int i = blockIdx.x; i < kInputs + kGradients; i += gridDim.x) {
    const int output = i - kInputs;
    const float power =
        output < 0 ? power_of<kInPixels>(input + static_cast<long long>(i) * kInPixels,
                                         static_cast<long long>(kInputs) * kInPixels, batch)
                   : power_of<kOutPixels>(grad_output + static_cast<long long>(output) * kOutPixels,
                                          static_cast<long long>(kGradients) * kOutPixels, batch);
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

// --- Judging -------------------------------------------------------------------------------------

// What a number below 2^-14 loses at most, times the largest number that it is multiplied by.
constexpr float kLoss = 65536.0f / (C::parts == 2 ? 1ll << 35 : 1ll << 24);
// What a weight may lose, as a part of what blocks have of it.
constexpr float kTolerance = 1.0f / (C::parts == 2 ? 1 << 25 : 1 << 20);

// What its power and its count say of a channel.
struct ScaledChannel {
  float power;
  float lossy;  // numbers, at most

  __device__ ScaledChannel(const Tables& tables, int channel, int group)
      : power(tables.powers()[channel]),
        lossy(static_cast<float>(tables.lossy()[channel]) * group) {}
  // Whether all of its numbers are zero.
  __device__ __forceinline__ bool zero() const {
    return __float_as_uint(power) == kNoPowerBits && lossy == 0.0f;
  }
  // What scales sums back.
  __device__ __forceinline__ float back() const { return inverse(power); }
};

// Whether a weight's sum is as good as TF32's; `size` is the sum of the magnitudes of its parts.
__device__ __forceinline__ bool fits(const ScaledChannel& input, const ScaledChannel& gradient,
                                     float sum, float size) {
  const bool loses = !input.zero() && !gradient.zero();
  const float lost = loses ? (input.lossy + gradient.lossy) * kLoss : 0.0f;
  return is_finite(sum) && lost <= size * kTolerance;
}

// Whether a filter of a tile is marked. All lanes of a warp ask, and get the same answer.
__device__ __forceinline__ bool is_marked(const Tables& tables, const Tile& tile) {
  constexpr int kBlockInputs = kBlockPlanes * kPlaneChannels;
  const int first_input = tile.plane() * kPlaneChannels;
  int found = 0;
#pragma unroll 16
  for (int i = threadIdx.x % 32; i < kStageChannels * kBlockInputs; i += 32) {
    const int output = tile.channel(i / kBlockInputs);
    const int input = first_input + i % kBlockInputs;
    const bool exists = output < C::group_out && input < C::group_in;
    // No load waits for what another one finds.
    found |= exists ? tables.marks()[Tables::filter(tile.group * C::group_out + output, input)] : 0;
  }
  return __any_sync(~0u, found != 0);
}

}  // namespace hopper
}  // namespace fastconv
