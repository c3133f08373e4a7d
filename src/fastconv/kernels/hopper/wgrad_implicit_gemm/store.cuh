// Where sums end up: a place of the product is a weight, a row's own sum that of a bias.
#pragma once
#include "hopper/wgrad_implicit_gemm/tile.cuh"

namespace fastconv {
namespace hopper {

// What a column of the product is: tap after tap, if copies bring their channels, or if those are
// few; otherwise eight channels of all taps, then the next eight, for what neighbouring taps read
// is then found in the L1 cache.
struct Column {
  int tap, channel;

  __device__ __forceinline__ explicit Column(int column) {
    if constexpr (kOctets) {
      const int octet = column / (8 * kTaps), in_octet = column - octet * 8 * kTaps;
      tap = in_octet / 8;
      channel = octet * 8 + in_octet % 8;
    } else {
      tap = column / kTapColumns;
      channel = column - tap * kTapColumns;
    }
  }
};

// Of a group's row and column, whether they have a weight: of joined groups, most have not.
__device__ __forceinline__ bool has_weight(int row, const Column& column) {
  const bool own = C::joined == 1 || row / C::group_out == column.channel / C::group_in;
  return row < kOut && column.tap < kTaps && column.channel < kIn && own;
}
__device__ __forceinline__ long long offset_of(const Tile& tile, int row, const Column& column) {
  const int input = C::joined == 1 ? column.channel : column.channel % C::group_in;
  return C::weight_start + tensor::weight_offset(tile.group * kOut + row, input,
                                                 column.tap / C::kernel_width,
                                                 column.tap % C::kernel_width);
}

__device__ __forceinline__ void store_weight(Scalar* grad, const Tile& tile, int row,
                                             const Column& column, float sum) {
  if (has_weight(row, column)) grad[offset_of(tile, row, column)] = narrow<Scalar>(sum);
}

// Whether four columns, from a multiple of four on, are neighbours in memory at a multiple of their
// bytes, all or none of which exist.
constexpr bool kVectorWeights =
    C::aligned && C::weight_stride_in == 1 && C::group_in % 4 == 0 && kTapColumns % 4 == 0 &&
    C::weight_start % 4 == 0 && C::weight_stride_out % 4 == 0 &&
    (kTaps == 1 || (C::weight_stride_height % 4 == 0 && C::weight_stride_width % 4 == 0));

// The four columns from `first` of the tile on.
__device__ __forceinline__ void store_four(Scalar* grad, const Tile& tile, int row, int first,
                                           const float4& sums) {
  if constexpr (kVectorWeights) {
    const Column column(tile.column + first);
    if (!has_weight(row, column)) return;
    *reinterpret_cast<Vector<Scalar, 4>*>(grad + offset_of(tile, row, column)) = {
        narrow<Scalar>(sums.x), narrow<Scalar>(sums.y), narrow<Scalar>(sums.z),
        narrow<Scalar>(sums.w)};
  } else {
    const float four[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_weight(grad, tile, row, Column(tile.column + first + i), four[i]);
    }
  }
}

// Those of the rows from `first` of the tile on.
__device__ __forceinline__ void store_biases(Scalar* bias_grad, const Tile& tile, int first,
                                             const float4& sums) {
  const float four[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = tile.row + first + i;
    if (row < kOut) bias_grad[tile.group * kOut + row] = narrow<Scalar>(four[i]);
  }
}

}  // namespace hopper
}  // namespace fastconv
