// A consumer warp's main loop: ldmatrix and mma.sync on operands in shared memory.
#pragma once
#include "ampere/halo/tile.cuh"

namespace fastconv {
namespace ampere {

using RegisterTile = float[kRowMmas][kColumnMmas][4];
constexpr int kPairs = kColumnMmas / 2;  // one ldmatrix loads the pixels of two MMAs
using WeightFragment = unsigned[kRowMmas][4];
using InputFragment = unsigned[kPairs][4];

__device__ __forceinline__ void clear(RegisterTile& acc) {
#pragma unroll
  for (auto& row : acc) {
#pragma unroll
    for (auto& mma_acc : row) {
#pragma unroll
      for (float& value : mma_acc) value = 0.0f;
    }
  }
}

// Returns the offset of a tap's first pixel in a stage of input, in bytes.
__host__ __device__ constexpr int tap_offset(int tap) {
  const int row = tap / C::kernel_width;
  const int column = tap % C::kernel_width;
  return ((row % kRowResidues * kColumnSlots + column % kColumnResidues) * kSlotPixels +
          row / kRowResidues * C::pitch + column * kColumnStep / kColumnResidues) *
         16;
}

// Whether a thread has registers to load operands ahead of their MMAs. In larger blocks it has not,
// and another warp multiplies while this one waits.
constexpr bool kPrefetches = kThreads == 256;

// Taps that the code unrolls: a stage of weights, or a period of flushes. They are steady if their
// distances in the halo tile are those of the first taps, so that offsets are constants: whole rows
// of the kernel, or parts of one.
constexpr int kUnrolledTaps = C::parts == 2 ? C::period_taps : C::stage_taps;
constexpr bool kSteady = (kUnrolledTaps % C::kernel_width == 0 && kRowResidues == 1) ||
                         (C::kernel_width % kUnrolledTaps == 0 && kColumnResidues == 1) ||
                         kUnrolledTaps == kTaps;
static_assert(C::stage_taps % kUnrolledTaps == 0, "stages have whole periods");

// The addresses of the unrolled taps in a stage of input.
struct Taps {
  const unsigned char* input;
  int first;

  __device__ Taps(const unsigned char* input_stage, int first)
      : input(kSteady ? input_stage + tap_offset(first) : input_stage), first(first) {}
  __device__ __forceinline__ const unsigned char* operator[](int j) const {
    return input + (kSteady ? tap_offset(j) : tap_offset(first + j));
  }
};

// Low parts are clamped to this before they are multiplied by each other: no finite one is larger.
constexpr float kMostLow = 0x1p116f;

// A consumer warp. Each lane passes ldmatrix the address of one row, of 16 bytes, of four matrices:
// 16 channels by 32 bytes of weights, or two times 8 pixels by 32 bytes of input.
struct Multiplier {
  int warp;
  int lane;
  int channel_group;
  int first_pixel;     // the warp's first pixel of the tile
  int weights;         // the lane's offset in a stage of weights, in bytes
  int pixels[kPairs];  // the lane's offsets in a stage of input at the first tap, in bytes

  __device__ Multiplier() {
    warp = static_cast<int>(threadIdx.x) / 32 - kFirstMultiplier;
    lane = static_cast<int>(threadIdx.x) % 32;
    channel_group = warp % C::channel_groups;
    first_pixel = warp / C::channel_groups * C::pixels;
    weights = channel_group * kAOperandBytes + (lane / 16 * kOutputs + lane % 16) * 16;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      int pixel = first_pixel + 16 * pair + lane / 16 * 8 + lane % 8;
      if (pixel >= kTilePixels) pixel = 0;  // computed, but not stored
      const int place = pixel / C::tile_columns * C::pitch + pixel % C::tile_columns;
      pixels[pair] = (place + lane / 8 % 2 * kPlanePixels) * 16;
    }
  }

  __device__ __forceinline__ void load_left(WeightFragment& left,
                                            const unsigned char* step_weights) const {
#pragma unroll
    for (int i = 0; i < kRowMmas; ++i) load_matrices(left[i], step_weights + weights + i * 256);
  }
  __device__ __forceinline__ void load_right(InputFragment& right,
                                             const unsigned char* planes) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) load_matrices(right[pair], planes + pixels[pair]);
  }

  // Multiplies 16 channels by two times 8 pixels.
  __device__ __forceinline__ static void add(RegisterTile& acc, int i, int pair,
                                             const unsigned (&left)[4],
                                             const unsigned (&right)[4]) {
    const unsigned first[2] = {right[0], right[1]};
    const unsigned second[2] = {right[2], right[3]};
    mma(Factor{}, acc[i][2 * pair], left, first);
    mma(Factor{}, acc[i][2 * pair + 1], left, second);
  }
  // Multiplies all of the warp's channels by two times 8 pixels.
  __device__ __forceinline__ static void add(RegisterTile& acc, const WeightFragment& left,
                                             const unsigned (&right)[4], int pair) {
#pragma unroll
    for (int i = 0; i < kRowMmas; ++i) add(acc, i, pair, left[i], right);
  }

  // Multiplies a stage of weights.
  __device__ __forceinline__ void multiply(RegisterTile& acc, const unsigned char* weight_stage,
                                           const Taps& taps) const {
    const auto step_weights = [&](int step) {
      return weight_stage + step * (C::channel_groups * kAOperandBytes);
    };
    const auto planes = [&](int step) {
      return taps[step / C::k_steps] + step % C::k_steps * 2 * kPlaneBytes;
    };
    constexpr int kSteps = C::stage_taps * C::k_steps;
    if constexpr (kPrefetches) {
      multiply_prefetched<kSteps>(acc, step_weights, planes);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        WeightFragment left;
        load_left(left, step_weights(step));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          unsigned right[4];
          load_matrices(right, planes(step) + pixels[pair]);
          add(acc, left, right, pair);
        }
      }
    }
  }

  // Loads each step's operands while those of the step before are multiplied: the smaller operand
  // at once, to a second set of registers, the other fragment by fragment, as registers become
  // free.
  template <int kSteps, class StepWeights, class Planes>
  __device__ __forceinline__ void multiply_prefetched(RegisterTile& acc,
                                                      const StepWeights& step_weights,
                                                      const Planes& planes) const {
    constexpr bool kRowsFirst = kPairs <= kRowMmas;
    WeightFragment left[kRowsFirst ? 1 : 2];
    InputFragment right[kRowsFirst ? 2 : 1];
    load_left(left[0], step_weights(0));
    load_right(right[0], planes(0));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool more = step + 1 < kSteps;
      if constexpr (kRowsFirst) {
        if (more) load_right(right[(step + 1) % 2], planes(step + 1));
#pragma unroll
        for (int i = 0; i < kRowMmas; ++i) {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            add(acc, i, pair, left[0][i], right[step % 2][pair]);
          }
          if (more) load_matrices(left[0][i], step_weights(step + 1) + weights + i * 256);
        }
      } else {
        if (more) load_left(left[(step + 1) % 2], step_weights(step + 1));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          add(acc, left[step % 2], right[0][pair], pair);
          if (more) load_matrices(right[0][pair], planes(step + 1) + pixels[pair]);
        }
      }
    }
  }

  // Multiplies a tap's numbers, each in two parts. Products of two high parts are added to `acc`;
  // those of a high and a low part, which are far smaller, to `low`.
  __device__ __forceinline__ void multiply_two_parts(RegisterTile& acc, RegisterTile& low,
                                                     const unsigned char* tap_weights,
                                                     const unsigned char* tap_input) const {
    constexpr int kPart = C::channel_groups * kAOperandBytes;
#pragma unroll
    for (int k = 0; k < C::k_steps; ++k) {
      WeightFragment left, left_low;
      load_left(left, tap_weights + 2 * k * kPart);
      load_left(left_low, tap_weights + (2 * k + 1) * kPart);
      WeightFragment smaller;
      make_smaller(smaller, left);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const unsigned char* const place = tap_input + pixels[pair] + 2 * k * kPlaneBytes;
        unsigned right[4], right_low[4];
        load_matrices(right, place);
        load_matrices(right_low, place + kPartPixels * 16);
        // Infinite products come first: an infinity's other products, which may overflow, change
        // nothing after them.
        add(low, smaller, right_low, pair);
        add(low, left_low, right, pair);
        if constexpr (C::low_low_mma) add_low(low, left_low, right_low, pair);
        add(acc, left, right, pair);
      }
    }
  }

  // Multiplies low parts by each other. Infinite ones are clamped, because their signs may be
  // wrong.
  __device__ __forceinline__ static void add_low(RegisterTile& low, const WeightFragment& left,
                                                 const unsigned (&right)[4], int pair) {
    WeightFragment finite_left;
    unsigned finite_right[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      finite_right[k] = finite(right[k]);
#pragma unroll
      for (int i = 0; i < kRowMmas; ++i) finite_left[i][k] = finite(left[i][k]);
    }
    add(low, finite_left, finite_right, pair);
  }
  __device__ __forceinline__ static unsigned finite(unsigned low) {
    return __float_as_uint(limited(__uint_as_float(low), kMostLow));
  }

  // Makes the weights for the input's low parts: with scaled fp16 these are stored times 2048.
  __device__ __forceinline__ static void make_smaller(WeightFragment& smaller,
                                                      const WeightFragment& left) {
#pragma unroll
    for (int i = 0; i < kRowMmas; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        smaller[i][k] = C::scaled_fp16 ? halves_by_2048th(left[i][k]) : left[i][k];
      }
    }
  }
};

// Adds the low accumulators to the total. An infinite total is right as it is: products with a low
// part may have overflowed to the other infinity.
__device__ __forceinline__ float completed(float total, float low) {
  const float infinity = __uint_as_float(0x7f800000u);
  return fabsf(total) == infinity && fabsf(low) == infinity ? total : total + low;
}

// Adds the accumulators to the second level and clears them: the tensor core truncates as it
// accumulates, so chains of MMAs are short. With `compensated`, for long sums, what the second
// level loses as it is rounded is added to `low`.
__device__ __forceinline__ void flush(RegisterTile& total_acc, RegisterTile& acc,
                                      RegisterTile& low) {
#pragma unroll
  for (int i = 0; i < kRowMmas; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnMmas; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float total = total_acc[i][j][k] + acc[i][j][k];
        if constexpr (C::compensated) {
          if (is_finite(total)) low[i][j][k] += acc[i][j][k] - (total - total_acc[i][j][k]);
        }
        total_acc[i][j][k] = total;
        acc[i][j][k] = 0.0f;
      }
    }
  }
}

}  // namespace ampere
}  // namespace fastconv
