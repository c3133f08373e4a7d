// Forward convolution and input gradient with fused multiply-adds: what the kernels of both layouts
// share. A thread's accumulators, and how it stores outputs.
#pragma once
#include "depthwise/depth.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace depthwise {

// Returns a kernel row of a group's output channel `output` and input channel `channel`. For an
// input gradient these are the weight's input and output channels. `plane` is the kernel's plane.
__device__ __forceinline__ const Scalar* kernel_row(const Scalar* weight, int group, int output,
                                                    int channel, int row, int plane = 0) {
  const long long out =
      C::transposed ? 1ll * group * C::group_in + channel : 1ll * group * C::group_out + output;
  const int in = C::transposed ? output : channel;
  return weight + out * C::weight_stride_out + 1ll * in * C::weight_stride_in +
         1ll * row * C::weight_stride_height + 1ll * plane * D::weight_stride;
}

// Rows of the window that are unrolled, if a thread has kChannels channels: of volumes with small
// kernels all of them, so that no instructions are spent on which tap row belongs to which output
// row.
constexpr int kMostUnrolled = 800;
constexpr int kMostKept = 10;  // vectors of a plane that a thread keeps the places of
template <int kChannels>
constexpr int kUnrolledRows =
    D::exists &&
            kChannels * C::rows * C::columns * C::kernel_height * C::kernel_width <= kMostUnrolled
        ? kWindowRows
        : 1;

// A thread's accumulators, for kChannels channels. With `two_level`, for long sums, those of an
// output are added to a second level every flush_rows kernel rows, which keeps rounding errors
// small.
template <int kChannels>
struct Accumulators {
  Acc acc[kChannels][C::rows][C::columns];
  Acc total_acc[kChannels][C::rows][C::two_level ? C::columns : 1];

  __device__ Accumulators() {
#pragma unroll
    for (int m = 0; m < kChannels; ++m) {
#pragma unroll
      for (int r = 0; r < C::rows; ++r) {
#pragma unroll
        for (int p = 0; p < C::columns; ++p) {
          acc[m][r][p] = 0;
          if constexpr (C::two_level) total_acc[m][r][p] = 0;
        }
      }
    }
  }

  // Multiplies a row of the window by a kernel row, for output row r.
  template <class Window, class Weight>
  __device__ __forceinline__ void add(int m, int r, const Window& window, const Weight& weight) {
#pragma unroll
    for (int k = 0; k < Columns::kTaps; ++k) {
      const Acc tap = weight(k);
#pragma unroll
      for (int p = 0; p < C::columns; ++p) {
        const int element = Columns::element(p, k);
        if (element >= 0) acc[m][r][p] += tap * window[element];
      }
    }
  }

  // Flushes output row r if flush_rows kernel rows end with k.
  __device__ __forceinline__ void end_row(int r, int k) {
    if constexpr (C::two_level) {
      // An output of a fractional stride uses only every stride-th kernel row.
      if ((k / Rows::kOver + 1) % C::flush_rows != 0) return;
#pragma unroll
      for (int m = 0; m < kChannels; ++m) {
#pragma unroll
        for (int p = 0; p < C::columns; ++p) {
          total_acc[m][r][p] += acc[m][r][p];
          acc[m][r][p] = 0;
        }
      }
    }
  }

  __device__ __forceinline__ Acc result(int m, int r, int p) const {
    if constexpr (C::two_level) return total_acc[m][r][p] + acc[m][r][p];
    return acc[m][r][p];
  }
};

// Writes neighbouring elements with one instruction if `valid`; the compiler would split them.
template <int kCount>
__device__ __forceinline__ void store_vector(Scalar* target, const Vector<Scalar, kCount>& vector,
                                             bool valid) {
  using Stored = typename Bits<kCount* static_cast<int>(sizeof(Scalar))>::type;
  store_if(reinterpret_cast<Stored*>(target), reinterpret_cast<const Stored&>(vector), valid);
}

// Whether k is a tap of the kernel along an axis.
template <class Axis>
__device__ __forceinline__ bool is_tap(int k) {
  return static_cast<unsigned>(k) < static_cast<unsigned>(Axis::kTaps);
}

}  // namespace depthwise
}  // namespace fastconv
