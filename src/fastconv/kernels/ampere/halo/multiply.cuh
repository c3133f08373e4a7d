// A warp's products of what is in shared memory.
#pragma once
#include "ampere/halo/tile.cuh"

namespace fastconv {
namespace ampere {

using Sums = float[kRowProducts][kColumnProducts][4];
constexpr int kPairs = kColumnProducts / 2;  // of eights of pixels
using Left = unsigned[kRowProducts][4];
using Right = unsigned[kPairs][4];

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

// Where a tap's first pixel lies in a stage of input, in bytes.
__host__ __device__ constexpr int tap_offset(int tap) {
  const int row = tap / C::kernel_width;
  const int column = tap % C::kernel_width;
  return ((row % kRowPhases * kColumnSlots + column % kColumnPhases) * kSlotPixels +
          row / kRowPhases * C::pitch + column * kColumnStep / kColumnPhases) *
         16;
}

// Whether a thread has registers for operands that it needs later. Where it has not, there are more
// warps, and another one multiplies while this one waits.
constexpr bool kRoomy = kThreads == 256;

// Taps whose products are written out: of a stage of weights, or of a period of flushes. And
// whether they are always as far apart as the first ones: whole rows of the kernel, or parts of
// one.
constexpr int kWrittenTaps = C::parts == 2 ? C::period_taps : C::stage_taps;
constexpr bool kSteady = (kWrittenTaps % C::kernel_width == 0 && kRowPhases == 1) ||
                         (C::kernel_width % kWrittenTaps == 0 && kColumnPhases == 1) ||
                         kWrittenTaps == kTaps;
static_assert(C::stage_taps % kWrittenTaps == 0, "stages have whole periods");

// Such taps, in a stage of input.
struct Taps {
  const unsigned char* input;
  int first;

  __device__ Taps(const unsigned char* input_stage, int first)
      : input(kSteady ? input_stage + tap_offset(first) : input_stage), first(first) {}
  __device__ __forceinline__ const unsigned char* operator[](int j) const {
    return input + (kSteady ? tap_offset(j) : tap_offset(first + j));
  }
};

// What low parts are limited to before they are multiplied by each other: no finite one is larger.
constexpr float kMostLow = 0x1p116f;

// A warp that multiplies. As ldmatrix wants it, each lane has the place of one row, of 16 bytes, in
// four matrices: of weights, those of 16 channels by 32 bytes; of input, two times 8 pixels by 32.
struct Multiplier {
  int warp;
  int lane;
  int channel_group;
  int first_pixel;     // of the tile
  int weights;         // in a stage, in bytes
  int pixels[kPairs];  // in a stage, for the first tap, in bytes

  __device__ Multiplier() {
    warp = static_cast<int>(threadIdx.x) / 32 - kFirstMultiplier;
    lane = static_cast<int>(threadIdx.x) % 32;
    channel_group = warp % C::channel_groups;
    first_pixel = warp / C::channel_groups * C::pixels;
    weights = channel_group * kProductBytes + (lane / 16 * kOutputs + lane % 16) * 16;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
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
  __device__ __forceinline__ void load_right(Right& right, const unsigned char* planes) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) load_matrices(right[pair], planes + pixels[pair]);
  }

  // The products of 16 channels with two times 8 pixels.
  __device__ __forceinline__ static void add(Sums& sums, int i, int pair, const unsigned (&left)[4],
                                             const unsigned (&right)[4]) {
    const unsigned first[2] = {right[0], right[1]};
    const unsigned second[2] = {right[2], right[3]};
    mma(Factor{}, sums[i][2 * pair], left, first);
    mma(Factor{}, sums[i][2 * pair + 1], left, second);
  }
  // The products of `left` with two times 8 pixels.
  __device__ __forceinline__ static void add(Sums& sums, const Left& left,
                                             const unsigned (&right)[4], int pair) {
#pragma unroll
    for (int i = 0; i < kRowProducts; ++i) add(sums, i, pair, left[i], right);
  }

  // The products of a stage of weights.
  __device__ __forceinline__ void multiply(Sums& sums, const unsigned char* weight_stage,
                                           const Taps& taps) const {
    const auto product = [&](int step) {
      return weight_stage + step * (C::channel_groups * kProductBytes);
    };
    const auto planes = [&](int step) {
      return taps[step / C::k_steps] + step % C::k_steps * 2 * kPlaneBytes;
    };
    constexpr int kSteps = C::stage_taps * C::k_steps;
    if constexpr (kRoomy) {
      multiply_ahead<kSteps>(sums, product, planes);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Left left;
        load_left(left, product(step));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          unsigned right[4];
          load_matrices(right, planes(step) + pixels[pair]);
          add(sums, left, right, pair);
        }
      }
    }
  }

  // Each step's operands are loaded while those of the one before are multiplied: the smaller one
  // at once, to registers of its own, the other piece by piece, as registers become free.
  template <int kSteps, class Product, class Planes>
  __device__ __forceinline__ void multiply_ahead(Sums& sums, const Product& product,
                                                 const Planes& planes) const {
    constexpr bool kRowsFirst = kPairs <= kRowProducts;
    Left left[kRowsFirst ? 1 : 2];
    Right right[kRowsFirst ? 2 : 1];
    load_left(left[0], product(0));
    load_right(right[0], planes(0));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool more = step + 1 < kSteps;
      if constexpr (kRowsFirst) {
        if (more) load_right(right[(step + 1) % 2], planes(step + 1));
#pragma unroll
        for (int i = 0; i < kRowProducts; ++i) {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            add(sums, i, pair, left[0][i], right[step % 2][pair]);
          }
          if (more) load_matrices(left[0][i], product(step + 1) + weights + i * 256);
        }
      } else {
        if (more) load_left(left[(step + 1) % 2], product(step + 1));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          add(sums, left[step % 2], right[0][pair], pair);
          if (more) load_matrices(right[0][pair], planes(step + 1) + pixels[pair]);
        }
      }
    }
  }

  // The products of a tap, of numbers in two parts: of two high parts to `sums`, of a high and a
  // low one, which are far smaller, to `low`.
  __device__ __forceinline__ void multiply_split(Sums& sums, Sums& low,
                                                 const unsigned char* tap_weights,
                                                 const unsigned char* tap_input) const {
    constexpr int kPart = C::channel_groups * kProductBytes;
#pragma unroll
    for (int k = 0; k < C::k_steps; ++k) {
      Left left, left_low;
      load_left(left, tap_weights + 2 * k * kPart);
      load_left(left_low, tap_weights + (2 * k + 1) * kPart);
      Left smaller;
      make_smaller(smaller, left);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const unsigned char* const place = tap_input + pixels[pair] + 2 * k * kPlaneBytes;
        unsigned right[4], right_low[4];
        load_matrices(right, place);
        load_matrices(right_low, place + kPartPixels * 16);
        // Infinite ones first: an infinity's other products, which may overflow, change nothing.
        add(low, smaller, right_low, pair);
        add(low, left_low, right, pair);
        if constexpr (C::low_products) add_low(low, left_low, right_low, pair);
        add(sums, left, right, pair);
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

  // Weights for the input's low parts, which are enlarged where they are halves.
  __device__ __forceinline__ static void make_smaller(Left& smaller, const Left& left) {
#pragma unroll
    for (int i = 0; i < kRowProducts; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        smaller[i][k] = C::halves ? halves_by_2048th(left[i][k]) : left[i][k];
      }
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
