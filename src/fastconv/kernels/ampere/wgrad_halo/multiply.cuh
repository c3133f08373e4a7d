// A warp's main loop over a step in shared memory, and its accumulators.
#pragma once
#include "ampere/wgrad_halo/load.cuh"
#include "device/tensor/workspace.cuh"

namespace fastconv {
namespace ampere {

// A thread's four accumulators of each MMA, unit by unit. In the workspace, these are its slots.
constexpr int kSlots = C::units * C::row_tiles;
using RegisterTile = float[kSlots][4];

// A thread's fragments of the output's gradient, for all row tiles, and of a unit's input.
using GradFragment = unsigned[C::parts][C::row_tiles][4];
using InputFragment = unsigned[C::parts][2];

// --- The output's gradient: rows of MMAs (operand A) ---------------------------------------------

constexpr bool kByMatrices = k16Bit || !C::grad_channels_last;  // by ldmatrix, not by elements
constexpr int kGradTile = 16 * (C::grad_channels_last ? kScalarBytes : C::grad_pitch);
constexpr int kGradPixel = C::grad_channels_last ? C::grad_pitch : kScalarBytes;
// Bytes from the first half of an MMA's pixels to the second half.
constexpr int kGradHalf = (kRowPairs ? C::strip_columns : kMmaColumns / 2) * kGradPixel;

// Returns the offset in a stage of a lane's part of the first MMA; `output` is the warp's first
// channel. With ldmatrix it is one matrix row: 8 pixels of a channel (4 of float32), or 8 channels
// of a pixel.
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
__device__ __forceinline__ void load_left(GradFragment& left, const unsigned char* first) {
#pragma unroll
  for (int i = 0; i < C::parts * C::row_tiles; ++i) {
    const int part = i / C::row_tiles;
    const int tile = i % C::row_tiles;
    load_rows(left[part][tile], first + part * kPartBytes + tile * kGradTile);
  }
}

// --- The input: columns of MMAs (operand B) ------------------------------------------------------

// Units whose columns a lane loads at once, and loads for all units.
constexpr int kUnitsAtOnce = k16Bit ? 2 : 1;
constexpr int kUnitLoads = ceil_div(C::units, kUnitsAtOnce);
constexpr int kInPixel =
    kStride * kColumnBytes;  // bytes between neighbouring output pixels' inputs

// Returns the offset in a line of a lane's part of the first MMA.
__device__ __forceinline__ int first_right(int lane) {
  if constexpr (k16Bit) {
    return lane % 8 * kInPixel + (kRowPairs ? 0 : lane / 8 % 2 * (8 * kInPixel));
  } else {
    return lane % 4 * kInPixel;
  }
}

__device__ __forceinline__ void load_right(InputFragment (&right)[kUnitsAtOnce],
                                           const unsigned char* first) {
  if constexpr (k16Bit) {
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

// --- MMAs ----------------------------------------------------------------------------------------

// Multiplies a unit by all rows. The small products of low parts are added first, so that they are
// not lost.
__device__ __forceinline__ void multiply(float (*acc)[4], const GradFragment& left,
                                         const InputFragment& right) {
  constexpr int kLow = C::parts - 1;
  if constexpr (C::parts == 2) {
#pragma unroll
    for (int tile = 0; tile < C::row_tiles; ++tile) {
      mma(Operand{}, acc[tile], left[kLow][tile], right[0]);
    }
#pragma unroll
    for (int tile = 0; tile < C::row_tiles; ++tile) {
      mma(Operand{}, acc[tile], left[0][tile], right[kLow]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < C::row_tiles; ++tile) {
    mma(Operand{}, acc[tile], left[0][tile], right[0]);
  }
}

// MMAs along the pixels that the code unrolls, so that the next one's operands are loaded while one
// is computed. If there were more, the compiler would load more ahead than registers can hold.
constexpr int kMostUnrolled = k16Bit          ? (kSlots > 24 ? 2 : 4)
                              : C::parts == 2 ? (kByMatrices ? 4 : 2)
                                              : 8;
constexpr int kUnrolled = C::slice_mmas < kMostUnrolled ? C::slice_mmas : kMostUnrolled;

// A warp's addresses of its operands in a step.
struct Multiplier {
  Warp warp;
  int left;   // offset in a stage of the output's gradient
  int right;  // offset in a line
  int line;   // line, counted from the first output row's

  __device__ Multiplier(const WeightTile& tile, int index, int lane) : warp(index) {
    left = first_left(warp.out * kWarpOutputs, lane);
    right = kInput + first_right(lane) + InLoader::shift(tile) * kColumnBytes;
    line = kRowPairs ? lane / 8 % 2 * kLineAdvance : 0;
  }

  // Multiplies one of the warp's slices.
  __device__ __forceinline__ void multiply_slice(RegisterTile& acc, const StepPlace& step,
                                                 int slice) const {
    slice = slice * C::warps_pixels + warp.pixels;
    const int row = slice / kRowSlices * kMmaRows;
    const int column = slice % kRowSlices * kSliceColumns;
    const unsigned char* grad = step.grad() + left + (row * C::strip_columns + column) * kGradPixel;
    int units[kUnitLoads];
    find_units(units, step.position + row * kLineAdvance + line, right + column * kInPixel);
#pragma unroll 1
    for (int k = 0; k < C::slice_mmas / kUnrolled; ++k) {
      multiply_mmas<kUnrolled>(acc, grad, units);
      grad += kUnrolled * (kMmaColumns * kGradPixel);
#pragma unroll
      for (int& unit : units) unit += kUnrolled * (kMmaColumns * kInPixel);
    }
    multiply_mmas<C::slice_mmas % kUnrolled>(acc, grad, units);
  }

  // Multiplies kCount MMAs along the pixels.
  template <int kCount>
  __device__ static __forceinline__ void multiply_mmas(RegisterTile& acc, const unsigned char* grad,
                                                       const int (&units)[kUnitLoads]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      multiply_pixels(acc, grad + i * (kMmaColumns * kGradPixel), units,
                      i * (kMmaColumns * kInPixel));
    }
  }

  // Multiplies one MMA's pixels, `column` bytes from where units begin, for all units.
  __device__ static __forceinline__ void multiply_pixels(RegisterTile& acc,
                                                         const unsigned char* grad,
                                                         const int (&units)[kUnitLoads],
                                                         int column) {
    GradFragment rows;
    load_left(rows, grad);
#pragma unroll
    for (int i = 0; i < kUnitLoads; ++i) {
      InputFragment columns[kUnitsAtOnce];
      load_right(columns, shared_memory() + units[i] + column);
#pragma unroll
      for (int j = 0; j < kUnitsAtOnce; ++j) {
        const int unit = i * kUnitsAtOnce + j;
        if (unit < C::units) multiply(acc + unit * C::row_tiles, rows, columns[j]);
      }
    }
  }

  // Finds where the units' columns begin if the first output row's line is `first` in the ring.
  __device__ __forceinline__ void find_units(int (&units)[kUnitLoads], int first,
                                             int in_line) const {
#pragma unroll
    for (int i = 0; i < kUnitLoads; ++i) {
      int entry = warp.units * C::units + i * kUnitsAtOnce;
      if constexpr (!k16Bit) {
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

// Adds up a step's gradient of the output before it is rounded: a thread takes some pixels of one
// channel.
__device__ __forceinline__ float bias_of_step(const StepPlace& step) {
  constexpr int kSharers = kThreads / kBlockOutputs;  // threads that share a channel
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

// Returns where a block's bias sums begin in the workspace, behind all slots: [block][thread].
__device__ __forceinline__ long long bias_slots(int blocks, int block) {
  return static_cast<long long>(blocks) * (kSlots * kThreads * 4) + block * kThreads;
}

}  // namespace ampere
}  // namespace fastconv
