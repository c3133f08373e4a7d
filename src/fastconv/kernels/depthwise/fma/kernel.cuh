// What correlations of both layouts have in common: how a thread keeps its sums, and stores them.
#pragma once
#include "depthwise/axis.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace depthwise {

// A row of the kernel of one output and one input channel of a group. Input gradients sum over
// output channels: the weight's are the other way round.
__device__ __forceinline__ const Scalar* kernel_row(const Scalar* weight, int group, int output,
                                                    int channel, int row) {
  const long long out =
      C::transposed ? 1ll * group * C::group_in + channel : 1ll * group * C::group_out + output;
  const int in = C::transposed ? output : channel;
  return weight + out * C::weight_stride_out + 1ll * in * C::weight_stride_in +
         1ll * row * C::weight_stride_height;
}

// The sums of a thread: of kChannels channels. After every flush_rows kernel rows, those of an
// output are added to a total, where the whole sum is long.
template <int kChannels>
struct Sums {
  Sum sum[kChannels][C::rows][C::columns];
  Sum total[kChannels][C::rows][C::two_level ? C::columns : 1];

  __device__ Sums() {
#pragma unroll
    for (int m = 0; m < kChannels; ++m) {
#pragma unroll
      for (int r = 0; r < C::rows; ++r) {
#pragma unroll
        for (int p = 0; p < C::columns; ++p) {
          sum[m][r][p] = 0;
          if constexpr (C::two_level) total[m][r][p] = 0;
        }
      }
    }
  }

  // Adds a kernel row's products with a row of the window.
  template <class Window, class Weight>
  __device__ __forceinline__ void add(int m, int r, const Window& window, const Weight& weight) {
#pragma unroll
    for (int k = 0; k < Columns::kTaps; ++k) {
      const Sum tap = weight(k);
#pragma unroll
      for (int p = 0; p < C::columns; ++p) {
        const int element = Columns::element(p, k);
        if (element >= 0) sum[m][r][p] += tap * window[element];
      }
    }
  }

  // Ends kernel row k of output row r.
  __device__ __forceinline__ void end_row(int r, int k) {
    if constexpr (C::two_level) {
      // Of outputs between inputs, only every stride-th row is one of theirs.
      if ((k / Rows::kOver + 1) % C::flush_rows != 0) return;
#pragma unroll
      for (int m = 0; m < kChannels; ++m) {
#pragma unroll
        for (int p = 0; p < C::columns; ++p) {
          total[m][r][p] += sum[m][r][p];
          sum[m][r][p] = 0;
        }
      }
    }
  }

  __device__ __forceinline__ Sum result(int m, int r, int p) const {
    if constexpr (C::two_level) return total[m][r][p] + sum[m][r][p];
    return sum[m][r][p];
  }
};

// Writes neighbours at once, if they are `valid`. The compiler would split them.
template <int kCount>
__device__ __forceinline__ void store_vector(Scalar* target, const Vector<Scalar, kCount>& vector,
                                             bool valid) {
  using Stored = typename Bits<kCount* static_cast<int>(sizeof(Scalar))>::type;
  store_if(reinterpret_cast<Stored*>(target), reinterpret_cast<const Stored&>(vector), valid);
}

// Whether a window's row has the tap k of an output.
template <class Axis>
__device__ __forceinline__ bool is_tap(int k) {
  return static_cast<unsigned>(k) < static_cast<unsigned>(Axis::kTaps);
}

}  // namespace depthwise
}  // namespace fastconv
