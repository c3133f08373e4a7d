// How outputs of a thread depend on a window of the input, along one axis; and what of a tile is in
// shared memory.
#pragma once
#include "device/tile.cuh"

namespace fastconv {
namespace depthwise {

using C = Config;
using Scalar = C::Scalar;
using Sum = SumOf<Scalar>::type;

// Neighbours in the type they are summed in. Pairs of 16 bits come out of a register at once.
__device__ __forceinline__ void widen_pair(float16, unsigned pair, float* target) {
  target[0] = half_to_float(static_cast<unsigned short>(pair));
  target[1] = half_to_float(static_cast<unsigned short>(pair >> 16));
}
__device__ __forceinline__ void widen_pair(bfloat16, unsigned pair, float* target) {
  target[0] = __uint_as_float(pair << 16);
  target[1] = __uint_as_float(pair & 0xffff0000u);
}
template <class T, int kCount>
__device__ __forceinline__ void widen_vector(const Vector<T, kCount>& vector, Sum* target) {
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    const unsigned* const pairs = reinterpret_cast<const unsigned*>(vector.element);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) widen_pair(T{}, pairs[i], target + 2 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) target[i] = widen(vector.element[i]);
  }
}

// Along one axis, a thread has some outputs, kOutStep apart, and reads a window of the input, whose
// elements are kUnit apart.
//
//   forward              output j reads elements j * kStep + tap
//   input gradients      the same with the kernel reversed, ...
//   ... with a stride    outputs lie between inputs: tap k of output j reads an element only if
//                        j + padding - k is a multiple of the stride
//
// Outputs that dilated taps have in common are a dilation apart: these are a thread's.
template <bool kTransposed, int kKernel, int kStride, int kDilation, int kPadding>
struct Axis {
  static constexpr bool kBetween = kTransposed && kStride > 1;
  static_assert(!kBetween || kDilation == 1, "not both");
  static constexpr int kTaps = kKernel;
  static constexpr int kUnit = kDilation;
  static constexpr int kCommon = kTransposed ? 1 : gcd(kStride, kDilation);
  static constexpr int kOutStep = kDilation / kCommon;
  static constexpr int kStep = kTransposed ? 1 : kStride / kCommon;
  // An output's first input is its own position, times or divided by this, and kOrigin on.
  static constexpr int kTimes = kTransposed ? 1 : kStride;
  static constexpr int kOver = kBetween ? kStride : 1;
  static constexpr int kOrigin =
      kBetween ? floor_div(kPadding - (kKernel - 1), kStride)
               : (kTransposed ? kPadding - kDilation * (kKernel - 1) : -kPadding);

  // Elements that so many outputs of a thread read.
  __host__ __device__ static constexpr int window(int outputs) {
    return kBetween ? floor_div(outputs - 1 + kPadding, kStride) - kOrigin + 1
                    : (outputs - 1) * kStep + kKernel;
  }
  // Input positions that so many neighbouring outputs read.
  __host__ __device__ static constexpr int halo(int outputs) {
    return kBetween ? window(outputs) : (outputs - 1) * kTimes + (kKernel - 1) * kDilation + 1;
  }
  // The element that tap k of output j reads, or -1.
  __host__ __device__ static constexpr int element(int j, int k) {
    if (kBetween) {
      const int at = j + kPadding - k;
      return floor_div(at, kStride) * kStride == at ? floor_div(at, kStride) - kOrigin : -1;
    }
    return kTransposed ? j + kKernel - 1 - k : j * kStep + k;
  }
  // The tap of output j that reads an element; there may be none of that number.
  __host__ __device__ static constexpr int tap(int element, int j) {
    if (kBetween) return j + kPadding - (element + kOrigin) * kStride;
    return kTransposed ? kKernel - 1 - (element - j) : element - j * kStep;
  }
  // The first output of a thread with kOutputs of them, counted from the tile's.
  template <int kOutputs>
  __device__ static __forceinline__ int first_output(int thread) {
    return kOutStep == 1 ? thread * kOutputs
                         : thread / kOutStep * (kOutputs * kOutStep) + thread % kOutStep;
  }
};

using Rows =
    Axis<C::transposed, C::kernel_height, C::stride_height, C::dilation_height, C::padding_top>;
using Columns =
    Axis<C::transposed, C::kernel_width, C::stride_width, C::dilation_width, C::padding_left>;

constexpr int kWindowRows = Rows::window(C::rows);
constexpr int kWindowColumns = Columns::window(C::columns);
static_assert(C::rows % Rows::kOver == 0 && C::columns % Columns::kOver == 0, "whole strides");
static_assert(C::lanes_y % Rows::kOutStep == 0 && C::lanes_x % Columns::kOutStep == 0,
              "all residues of a dilation");

// A tile's outputs, and what it reads of the input.
constexpr int kTileRows = C::lanes_y * C::rows;
constexpr int kTileColumns = C::lanes_x * C::columns;
constexpr int kHaloRows = Rows::halo(kTileRows);
constexpr int kHaloColumns = Columns::halo(kTileColumns);
constexpr int kTilesX = ceil_div(C::out_width, kTileColumns);
constexpr int kTilesY = ceil_div(C::out_height, kTileRows);

// What is copied of the halo: all of it; or, with `inside`, where a tile is a whole image, only
// what lies in that: the rest is cleared, once.
constexpr int kFirstRow = C::inside ? max_of(0, -Rows::kOrigin) : 0;
constexpr int kEndRow = C::inside ? min_of(kHaloRows, C::in_height - Rows::kOrigin) : kHaloRows;
constexpr int kFirstColumn = C::inside ? max_of(0, -Columns::kOrigin) : 0;
constexpr int kEndColumn =
    C::inside ? min_of(kHaloColumns, C::in_width - Columns::kOrigin) : kHaloColumns;
constexpr int kCopiedRows = kEndRow - kFirstRow;
static_assert(!C::inside || (kTilesX == 1 && kTilesY == 1), "a whole image");

template <int kBytes, int kThreads>
__device__ __forceinline__ void clear(void* target) {
  using Zeros = Vector<unsigned, 4>;
  for (int i = static_cast<int>(threadIdx.x); i < kBytes / 16; i += kThreads) {
    static_cast<Zeros*>(target)[i] = Zeros{};
  }
}

}  // namespace depthwise
}  // namespace fastconv
