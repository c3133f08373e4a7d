// Maps a thread's outputs to its window of the input along each axis, and defines the sizes of a
// tile and of its halo in shared memory.
#pragma once
#include "device/tile.cuh"

namespace fastconv {
namespace depthwise {

using C = Config;
using Scalar = C::Scalar;
using Acc = AccOf<Scalar>::type;

// Convert neighbouring elements to the accumulators' type. Two 16-bit elements are extracted from
// one register.
__device__ __forceinline__ void widen_pair(float16, unsigned pair, float* target) {
  target[0] = half_to_float(static_cast<unsigned short>(pair));
  target[1] = half_to_float(static_cast<unsigned short>(pair >> 16));
}
__device__ __forceinline__ void widen_pair(bfloat16, unsigned pair, float* target) {
  target[0] = __uint_as_float(pair << 16);
  target[1] = __uint_as_float(pair & 0xffff0000u);
}
template <class T, int kCount>
__device__ __forceinline__ void widen_vector(const Vector<T, kCount>& vector, Acc* target) {
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    const unsigned* const pairs = reinterpret_cast<const unsigned*>(vector.element);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) widen_pair(T{}, pairs[i], target + 2 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) target[i] = widen(vector.element[i]);
  }
}

// Along one axis, a thread computes some outputs, kOutStep apart, from a window of the input, whose
// elements are kUnit apart.
//
//   forward                     output j reads elements j * kStep + tap
//   input gradient, stride 1    as forward, with the kernel reversed
//   input gradient, strided     fractionally strided (outputs lie between inputs): tap k of output
//                               j reads an element only if j + padding - k is a multiple of the
//                               stride
//
// With a dilation, outputs a dilation apart share inputs, so a thread computes outputs that far
// apart.
template <bool kTransposed, int kKernel, int kStride, int kDilation, int kPadding>
struct Axis {
  static constexpr bool kFractional = kTransposed && kStride > 1;
  static_assert(!kFractional || kDilation == 1, "fractional strides are not dilated");
  static constexpr int kTaps = kKernel;
  static constexpr int kUnit = kDilation;
  static constexpr int kCommon = kTransposed ? 1 : gcd(kStride, kDilation);
  static constexpr int kOutStep = kDilation / kCommon;
  static constexpr int kStep = kTransposed ? 1 : kStride / kCommon;
  // An output at position p reads its first input at p * kTimes / kOver + kOrigin.
  static constexpr int kTimes = kTransposed ? 1 : kStride;
  static constexpr int kOver = kFractional ? kStride : 1;
  static constexpr int kOrigin =
      kFractional ? floor_div(kPadding - (kKernel - 1), kStride)
                  : (kTransposed ? kPadding - kDilation * (kKernel - 1) : -kPadding);

  // Returns how many elements a thread with this many outputs reads.
  __host__ __device__ static constexpr int window(int outputs) {
    return kFractional ? floor_div(outputs - 1 + kPadding, kStride) - kOrigin + 1
                       : (outputs - 1) * kStep + kKernel;
  }
  // Returns the span of input positions that this many neighbouring outputs read.
  __host__ __device__ static constexpr int halo(int outputs) {
    return kFractional ? window(outputs) : (outputs - 1) * kTimes + (kKernel - 1) * kDilation + 1;
  }
  // Returns the element that tap k of output j reads, or -1 if there is none.
  __host__ __device__ static constexpr int element(int j, int k) {
    if (kFractional) {
      const int at = j + kPadding - k;
      return floor_div(at, kStride) * kStride == at ? floor_div(at, kStride) - kOrigin : -1;
    }
    return kTransposed ? j + kKernel - 1 - k : j * kStep + k;
  }
  // Returns the index of output j's tap that reads an element; it may be out of the kernel's range.
  __host__ __device__ static constexpr int tap(int element, int j) {
    if (kFractional) return j + kPadding - (element + kOrigin) * kStride;
    return kTransposed ? kKernel - 1 - (element - j) : element - j * kStep;
  }
  // Returns the position in the tile of the first of a thread's kOutputs outputs.
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

// Sizes of a tile's outputs, and of the halo tile that it reads.
constexpr int kTileRows = C::lanes_y * C::rows;
constexpr int kTileColumns = C::lanes_x * C::columns;
constexpr int kHaloRows = Rows::halo(kTileRows);
constexpr int kHaloColumns = Columns::halo(kTileColumns);
constexpr int kTilesX = ceil_div(C::out_width, kTileColumns);
constexpr int kTilesY = ceil_div(C::out_height, kTileRows);

// Bounds of the part of the halo tile that is copied. That is all of it; or, with `inside`, where a
// tile is a whole image, only the part in the image, and the rest is cleared once.
constexpr int kFirstRow = C::inside ? max_of(0, -Rows::kOrigin) : 0;
constexpr int kEndRow = C::inside ? min_of(kHaloRows, C::in_height - Rows::kOrigin) : kHaloRows;
constexpr int kFirstColumn = C::inside ? max_of(0, -Columns::kOrigin) : 0;
constexpr int kEndColumn =
    C::inside ? min_of(kHaloColumns, C::in_width - Columns::kOrigin) : kHaloColumns;
constexpr int kCopiedRows = kEndRow - kFirstRow;
static_assert(!C::inside || (kTilesX == 1 && kTilesY == 1), "a whole image");

// Fills shared memory with zeros.
template <int kBytes, int kThreads>
__device__ __forceinline__ void clear(void* target) {
  using Zeros = Vector<unsigned, 4>;
  for (int i = static_cast<int>(threadIdx.x); i < kBytes / 16; i += kThreads) {
    static_cast<Zeros*>(target)[i] = Zeros{};
  }
}

}  // namespace depthwise
}  // namespace fastconv
