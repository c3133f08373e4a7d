// The products of a warp, and its sums.
#pragma once
#include "ampere/wgrad_halo/load.cuh"
#include "device/tensor/workspace.cuh"

namespace fastconv {
namespace ampere {

// Four sums of each product, unit by unit: also the slots of a thread in the workspace.
constexpr int kSlots = C::units * C::row_tiles;
using Sums = float[kSlots][4];

// What a thread has of one product's rows of all tiles, and of a unit's columns.
using Left = unsigned[C::parts][C::row_tiles][4];
using Right = unsigned[C::parts][2];

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

__device__ __forceinline__ void load_rows(unsigned (&rows)[4], const unsigned char* first) {
  if constexpr (!kByMatrices) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = *reinterpret_cast<const unsigned*>(first + i % 2 * (8 * kScalarBytes) +
                                                   i / 2 * kGradHalf);
    }
  } else if constexpr (C::grad_channels_last) {
    load_transposed(rows, first);
  } else {
    load_matrices(rows, first);
  }
}
__device__ __forceinline__ void load_left(Left& left, const unsigned char* first) {
#pragma unroll
  for (int i = 0; i < C::parts * C::row_tiles; ++i) {
    const int part = i / C::row_tiles;
    const int tile = i % C::row_tiles;
    load_rows(left[part][tile], first + part * kPartBytes + tile * kGradTile);
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
      const float number = *reinterpret_cast<const float*>(first + i * (4 * kInPixel));
      if constexpr (C::parts == 2) {
        split_operand(number, right[0][0][i], right[0][C::parts - 1][i]);
      } else {
        right[0][0][i] = __float_as_uint(number);
      }
    }
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

// Of a slice's products, as many as code is written out for, so that the next one's numbers are
// loaded while one is computed: more of them would be loaded at once than there are registers for.
constexpr int kMostUnrolled = kHalves         ? (kSlots > 24 ? 2 : 4)
                              : C::parts == 2 ? (kByMatrices ? 4 : 2)
                                              : 8;
constexpr int kUnrolled = C::slice_products < kMostUnrolled ? C::slice_products : kMostUnrolled;

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
    for (int k = 0; k < C::slice_products / kUnrolled; ++k) {
      multiply_products<kUnrolled>(sums, grad, units);
      grad += kUnrolled * (kProductColumns * kGradPixel);
#pragma unroll
      for (int& unit : units) unit += kUnrolled * (kProductColumns * kInPixel);
    }
    multiply_products<C::slice_products % kUnrolled>(sums, grad, units);
  }

  // So many products along the pixels.
  template <int kCount>
  __device__ static __forceinline__ void multiply_products(Sums& sums, const unsigned char* grad,
                                                           const int (&units)[kUnitLoads]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      multiply_pixels(sums, grad + i * (kProductColumns * kGradPixel), units,
                      i * (kProductColumns * kInPixel));
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
