// A warp's products of what is in shared memory.
#pragma once
#include "ampere/correlate_tile.cuh"

namespace fastconv {
namespace ampere {

using Sums = float[kRowProducts][kColumnProducts][4];
using Left = unsigned[kRowProducts][4];

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (auto& row : sums) {
#pragma unroll
    for (auto& product : row) {
#pragma unroll
      for (float& sum : product) sum = 0.0f;
    }
  }
}

// Where a tap's first pixel lies in a stage, in 16 bytes.
__device__ __forceinline__ int tap_offset(int tap) {
  const int row = tap / C::kernel_width;
  const int column = tap % C::kernel_width;
  return (row % kRowPhases * kColumnSlots + column % kColumnPhases) * kSlotPixels +
         row / kRowPhases * C::pitch + column * kColumnStep / kColumnPhases;
}

// What low parts are limited to before they are multiplied by each other: no finite one is larger.
constexpr float kMostLow = 0x1p116f;

// A warp that multiplies. As ldmatrix wants it, each lane has the place of one row, of 16 bytes, in
// four matrices: of weights, those of 16 channels by 32 bytes; of input, two times 8 pixels by 32.
struct Multiplier {
  int warp;
  int lane;
  int channel_group;
  int first_pixel;                  // of the tile
  int weights;                      // in a stage, in bytes
  int pixels[kColumnProducts / 2];  // in a stage, for the first tap, in bytes

  __device__ Multiplier() {
    warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    channel_group = warp % C::channel_groups;
    first_pixel = warp / C::channel_groups * C::pixels;
    weights = channel_group * kProductBytes + (lane / 16 * kOutputs + lane % 16) * 16;
#pragma unroll
    for (int pair = 0; pair < kColumnProducts / 2; ++pair) {
      int pixel = first_pixel + 16 * pair + lane / 16 * 8 + lane % 8;
      if (pixel >= kTilePixels) pixel = 0;  // whose sums are dropped
      const int place = pixel / C::tile_columns * C::pitch + pixel % C::tile_columns;
      pixels[pair] = (place + lane / 8 % 2 * kPlanePixels) * 16;
    }
  }

  __device__ __forceinline__ void load_left(Left& left, const unsigned char* product) const {
#pragma unroll
    for (int i = 0; i < kRowProducts; ++i) load_matrices(left[i], product + weights + i * 256);
  }

  // The products of `left` with two times 8 pixels.
  __device__ __forceinline__ static void add(Sums& sums, const Left& left,
                                             const unsigned (&right)[4], int pair) {
    const unsigned first[2] = {right[0], right[1]};
    const unsigned second[2] = {right[2], right[3]};
#pragma unroll
    for (int i = 0; i < kRowProducts; ++i) {
      mma(Factor{}, sums[i][2 * pair], left[i], first);
      mma(Factor{}, sums[i][2 * pair + 1], left[i], second);
    }
  }

  // The products of one stage of weights.
  __device__ __forceinline__ void multiply(Sums& sums, const unsigned char* weight_stage,
                                           const unsigned char* input_stage, int first_tap) const {
#pragma unroll
    for (int j = 0; j < C::stage_taps; ++j) {
      const unsigned char* const tap = input_stage + tap_offset(first_tap + j) * 16;
#pragma unroll
      for (int k = 0; k < C::k_steps; ++k) {
        Left left;
        load_left(left, weight_stage + (j * C::k_steps + k) * (C::channel_groups * kProductBytes));
#pragma unroll
        for (int pair = 0; pair < kColumnProducts / 2; ++pair) {
          unsigned right[4];
          load_matrices(right, tap + pixels[pair] + 2 * k * kPlaneBytes);
          add(sums, left, right, pair);
        }
      }
    }
  }

  // The same of numbers in two parts: the products of two high parts to `sums`, those of a high and
  // a low one, which are far smaller, to `low`.
  __device__ __forceinline__ void multiply_split(Sums& sums, Sums& low,
                                                 const unsigned char* weight_stage,
                                                 const unsigned char* input_stage,
                                                 int first_tap) const {
    constexpr int kPart = C::channel_groups * kProductBytes;
#pragma unroll
    for (int j = 0; j < C::stage_taps; ++j) {
      const unsigned char* const tap = input_stage + tap_offset(first_tap + j) * 16;
#pragma unroll
      for (int k = 0; k < C::k_steps; ++k) {
        const unsigned char* const product = weight_stage + (j * C::k_steps + k) * (2 * kPart);
        Left left, left_low;
        load_left(left, product);
        load_left(left_low, product + kPart);
#pragma unroll
        for (int pair = 0; pair < kColumnProducts / 2; ++pair) {
          const unsigned char* const place = tap + pixels[pair] + 2 * k * kPlaneBytes;
          unsigned right[4], right_low[4];
          load_matrices(right, place);
          load_matrices(right_low, place + kPartPixels * 16);
          // Infinite ones first: an infinity's other products, which may overflow, change nothing.
          add_enlarged(low, left, right_low, pair);
          add(low, left_low, right, pair);
          if constexpr (C::low_products) add_low(low, left_low, right_low, pair);
          add(sums, left, right, pair);
        }
      }
    }
  }

  // Products of low parts: none of which is infinite, for its sign might be wrong.
  __device__ __forceinline__ static void add_low(Sums& low, const Left& left,
                                                 const unsigned (&right)[4], int pair) {
    Left finite_left;
    unsigned finite_right[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      finite_right[k] = finite(right[k]);
#pragma unroll
      for (int i = 0; i < kRowProducts; ++i) finite_left[i][k] = finite(left[i][k]);
    }
    add(low, finite_left, finite_right, pair);
  }
  __device__ __forceinline__ static unsigned finite(unsigned low) {
    return __float_as_uint(limited(__uint_as_float(low), kMostLow));
  }

  // Products with the input's low parts, which are enlarged where they are halves: so weights are
  // made as much smaller.
  __device__ __forceinline__ static void add_enlarged(Sums& low, const Left& left,
                                                      const unsigned (&right)[4], int pair) {
    if constexpr (C::halves) {
      Left smaller;
#pragma unroll
      for (int i = 0; i < kRowProducts; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) smaller[i][k] = halves_by_2048th(left[i][k]);
      }
      add(low, smaller, right, pair);
    } else {
      add(low, left, right, pair);
    }
  }
};

// A total, with what was too small for it. If it is infinite, then rightly, but products with a low
// part may have overflowed to the other infinity.
__device__ __forceinline__ float completed(float total, float low) {
  const float infinity = __uint_as_float(0x7f800000u);
  return fabsf(total) == infinity && fabsf(low) == infinity ? total : total + low;
}

// Adds sums to totals, and clears them: the tensor core truncates as it adds, so chains are short.
// What a total loses as it is rounded, of long sums, is added to `low`.
__device__ __forceinline__ void flush(Sums& totals, Sums& sums, Sums& low) {
#pragma unroll
  for (int i = 0; i < kRowProducts; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnProducts; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float total = totals[i][j][k] + sums[i][j][k];
        if constexpr (C::compensated) {
          if (is_finite(total)) low[i][j][k] += sums[i][j][k] - (total - totals[i][j][k]);
        }
        totals[i][j][k] = total;
        sums[i][j][k] = 0.0f;
      }
    }
  }
}

}  // namespace ampere
}  // namespace fastconv
