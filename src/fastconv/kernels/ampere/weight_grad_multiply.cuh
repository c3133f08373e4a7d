// The products of a warp, and its sums.
#pragma once
#include "ampere/weight_grad_load.cuh"
#include "tensor/workspace.cuh"

namespace fastconv {
namespace ampere {

// Four sums of each product, unit by unit: also the slots of a thread in the workspace.
constexpr int kSlots = C::units * C::row_tiles;
using Sums = float[kSlots][4];

// What a thread has of one product's rows of all tiles, and of a unit's columns.
using Left = unsigned[C::parts][C::row_tiles][4];
using Right = unsigned[C::parts][2];

// Whether rounding to even is one instruction.
#if __CUDA_ARCH__ >= 900
constexpr bool kRoundsToEven = true;
#else
constexpr bool kRoundsToEven = false;
#endif

// float32 as the tensor core wants it: rounded to TF32, or in two such parts.
template <int kCount>
__device__ __forceinline__ void convert(unsigned (&high)[kCount], unsigned (&low)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float value = __uint_as_float(high[i]);
    if constexpr (C::parts == 2 && kRoundsToEven) {
      split(value, high[i], low[i]);
    } else if constexpr (C::parts == 2) {
      split_away(value, high[i], low[i]);
    } else {
      high[i] = __float_as_uint(round_operand_to_tf32(value));
    }
  }
}

// --- The output's gradient: rows of products -----------------------------------------------------

constexpr bool kByMatrices = kHalves || !C::grad_channels_last;  // or element by element
constexpr int kGradTile = 16 * (C::grad_channels_last ? kScalarBytes : C::grad_pitch);
constexpr int kGradPixel = C::grad_channels_last ? C::grad_pitch : kScalarBytes;
// From the first half of a product's pixels to the second one.
constexpr int kGradHalf = (kRowPairs ? C::strip_columns : kProductColumns / 2) * kGradPixel;

// Where in a stage a lane's part of the first product begins, `output` being the warp's first
// channel. Where it is loaded by matrices: one of their rows, 8 pixels of a channel (4 of float32)
// or 8 channels of a pixel.
__device__ __forceinline__ int first_left(int output, int lane) {
  if constexpr (!kByMatrices) {
    return lane % 4 * C::grad_pitch + (output + lane / 4) * kScalarBytes;
  } else if constexpr (C::grad_channels_last) {
    return lane % 8 * C::grad_pitch + (output + lane / 8 % 2 * 8) * kScalarBytes +
           lane / 16 * kGradHalf;
  } else {
    return (output + lane % 16) * C::grad_pitch + lane / 16 * kGradHalf;
  }
}

__device__ __forceinline__ void load_left(Left& left, const unsigned char* first) {
#pragma unroll
  for (int tile = 0; tile < C::row_tiles; ++tile) {
    const unsigned char* const at = first + tile * kGradTile;
    if constexpr (!kByMatrices) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        left[0][tile][i] =
            *reinterpret_cast<const unsigned*>(at + i % 2 * (8 * kScalarBytes) + i / 2 * kGradHalf);
      }
    } else if constexpr (C::grad_channels_last) {
      load_transposed(left[0][tile], at);
    } else {
      load_matrices(left[0][tile], at);
    }
    if constexpr (!kHalves) convert(left[0][tile], left[C::parts - 1][tile]);
  }
}

// --- The input: columns of products --------------------------------------------------------------

// Units whose columns a lane loads at once, and how often it does.
constexpr int kUnitsAtOnce = kHalves ? 2 : 1;
constexpr int kUnitLoads = ceil_div(C::units, kUnitsAtOnce);
constexpr int kInPixel = kStride * kColumnBytes;  // from one of a row to the next

// Where in a line a lane's part of the first product begins.
__device__ __forceinline__ int first_right(int lane) {
  if constexpr (kHalves) {
    return lane % 8 * kInPixel + (kRowPairs ? 0 : lane / 8 % 2 * (8 * kInPixel));
  } else {
    return lane % 4 * kInPixel;
  }
}

__device__ __forceinline__ void load_right(Right (&right)[kUnitsAtOnce],
                                           const unsigned char* first) {
  if constexpr (kHalves) {
    unsigned both[4];
    load_transposed(both, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) right[i / 2 % kUnitsAtOnce][0][i % 2] = both[i];
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      right[0][0][i] = *reinterpret_cast<const unsigned*>(first + i * (4 * kInPixel));
    }
    convert(right[0][0], right[0][C::parts - 1]);
  }
}

// --- Products ------------------------------------------------------------------------------------

// A unit's products with all rows. Large ones come last: what small ones add is not lost.
__device__ __forceinline__ void multiply(float (*sums)[4], const Left& left, const Right& right) {
  constexpr int kLow = C::parts - 1;
  if constexpr (C::parts == 2) {
#pragma unroll
    for (int tile = 0; tile < C::row_tiles; ++tile) {
      mma(Operand{}, sums[tile], left[kLow][tile], right[0]);
    }
#pragma unroll
    for (int tile = 0; tile < C::row_tiles; ++tile) {
      mma(Operand{}, sums[tile], left[0][tile], right[kLow]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < C::row_tiles; ++tile) {
    mma(Operand{}, sums[tile], left[0][tile], right[0]);
  }
}

// Of a slice's products, as many as code is written out for: more of them would be loaded at once
// than there are registers for.
__host__ __device__ constexpr int unrolled(int products, int most) {
  return products % most == 0 ? most : unrolled(products, most - 1);
}
constexpr int kUnrolled = unrolled(C::slice_products, C::parts == 2 || kSlots > 24 ? 2 : 4);

// What a warp multiplies: where its lanes find it in a step.
struct Multiplier {
  Warp warp;
  int left;   // in a stage
  int right;  // in a line
  int line;   // from the first output row's line

  __device__ Multiplier(const Tile& tile, int index, int lane) : warp(index) {
    left = first_left(warp.out * kWarpOutputs, lane);
    right = kInput + first_right(lane) + InLoader::shift(tile) * kColumnBytes;
    line = kRowPairs ? lane / 8 % 2 * kLineAdvance : 0;
  }

  // The products of one of the warp's slices.
  __device__ __forceinline__ void multiply_slice(Sums& sums, const StepPlace& step,
                                                 int slice) const {
    slice = slice * C::warps_pixels + warp.pixels;
    const int row = slice / kRowSlices * kProductRows;
    const int column = slice % kRowSlices * kSliceColumns;
    const unsigned char* grad = step.grad() + left + (row * C::strip_columns + column) * kGradPixel;
    int units[kUnitLoads];
    find_units(units, step.position + row * kLineAdvance + line, right + column * kInPixel);
#pragma unroll 1
    for (int k = 0; k < C::slice_products; k += kUnrolled) {
#pragma unroll
      for (int i = 0; i < kUnrolled; ++i) {
        multiply_pixels(sums, grad + i * (kProductColumns * kGradPixel), units,
                        i * (kProductColumns * kInPixel));
      }
      grad += kUnrolled * (kProductColumns * kGradPixel);
#pragma unroll
      for (int& unit : units) unit += kUnrolled * (kProductColumns * kInPixel);
    }
  }

  // One product along the pixels, which are `column` bytes beyond where units begin.
  __device__ static __forceinline__ void multiply_pixels(Sums& sums, const unsigned char* grad,
                                                         const int (&units)[kUnitLoads],
                                                         int column) {
    Left rows;
    load_left(rows, grad);
#pragma unroll
    for (int i = 0; i < kUnitLoads; ++i) {
      Right columns[kUnitsAtOnce];
      load_right(columns, shared_memory() + units[i] + column);
#pragma unroll
      for (int j = 0; j < kUnitsAtOnce; ++j) {
        const int unit = i * kUnitsAtOnce + j;
        if (unit < C::units) multiply(sums + unit * C::row_tiles, rows, columns[j]);
      }
    }
  }

  // Where the units' columns begin, if the first output row's line is `first` in the ring.
  __device__ __forceinline__ void find_units(int (&units)[kUnitLoads], int first,
                                             int in_line) const {
#pragma unroll
    for (int i = 0; i < kUnitLoads; ++i) {
      int entry = warp.units * C::units + i * kUnitsAtOnce;
      if constexpr (!kHalves) {
        entry = entry * kOctet + static_cast<int>(threadIdx.x) % 32 / 4;
      } else if (i * kUnitsAtOnce + 1 < C::units) {
        entry += static_cast<int>(threadIdx.x) / 16 % 2;
      }
      const int found = first * kLineBytes + unit_table()[entry];
      units[i] = (C::rolling ? ring_byte(found) : found) + in_line;
    }
  }
};

// --- The bias ------------------------------------------------------------------------------------

// Adds up what a step has of the output's gradient, as it is: a thread has some pixels of one
// channel.
__device__ __forceinline__ float bias_of_step(const StepPlace& step) {
  constexpr int kSharers = kThreads / kBlockOutputs;  // of a channel
  const int channel = static_cast<int>(threadIdx.x) % kBlockOutputs;
  const int first = static_cast<int>(threadIdx.x) / kBlockOutputs;
  float sum = 0.0f;
  if constexpr (C::grad_channels_last) {
    const unsigned char* const pixels = step.grad() + channel * kScalarBytes;
#pragma unroll 4
    for (int pixel = first; pixel < kStepPixels; pixel += kSharers) {
      sum += widen(*reinterpret_cast<const Scalar*>(pixels + pixel * C::grad_pitch));
    }
  } else {
    const unsigned char* const pixels = step.grad() + channel * C::grad_pitch;
#pragma unroll 2
    for (int pixel = first * kVector; pixel < kStepPixels; pixel += kSharers * kVector) {
      using Pixels = Vector<Scalar, kVector>;
      const Pixels vector = *reinterpret_cast<const Pixels*>(pixels + pixel * kScalarBytes);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum += widen(vector.element[i]);
    }
  }
  return sum;
}

// Where the sums for the bias are in the workspace, behind all slots: [block][thread].
__device__ __forceinline__ long long bias_slots(int blocks, int block) {
  return static_cast<long long>(blocks) * (kSlots * kThreads * 4) + block * kThreads;
}

}  // namespace ampere
}  // namespace fastconv
