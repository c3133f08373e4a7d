// Where accumulators are stored: each belongs to a weight, or to the bias of a row.
#pragma once
#include "hopper/wgrad_implicit_gemm/tile.cuh"

namespace fastconv {
namespace hopper {

// The tap and channel of a GEMM column. Columns go tap by tap if TMA copies their channels or if
// channels are few, channel by channel if warps gather by taps, and unit by unit with a halo;
// otherwise eight channels of all taps come first, then the next eight, so that what neighbouring
// taps read is found in the L1 cache.
struct Column {
  int tap, channel;

  __device__ __forceinline__ explicit Column(int column) {
    if constexpr (Halo::exists) {
      of_unit<Halo>(column / kTileColumns, column % kTileColumns);
    } else if constexpr (kOctets) {
      const int octet = column / (8 * kTaps), in_octet = column - octet * 8 * kTaps;
      tap = in_octet / 8;
      channel = octet * 8 + in_octet % 8;
    } else if constexpr (C::by_taps) {
      channel = column / kTaps;
      tap = column - channel * kTaps;
    } else {
      tap = column / kTapColumns;
      channel = column - tap * kTapColumns;
    }
  }

 private:
  // A column of a tile with a halo; without a weight, it has no tap.
  template <class Halo>
  __device__ __forceinline__ void of_unit(int tile, int column) {
    const int unit = column / C::mma_columns, in_unit = column - unit * C::mma_columns;
    const typename Halo::Block block(tile);
    const typename Halo::Unit of(unit);
    const int part = in_unit / Halo::channels;  // a tap, or a chunk
    const int along = of.piece * Halo::mma_taps + (Halo::mma_chunks > 1 ? 0 : part);
    const int chunk = of.chunk + (Halo::mma_chunks > 1 ? part : 0);
    const int plane = block.plane + of.plane;
    const int row = block.row + of.row + (Halo::upright ? along : 0);
    const int in_row = Halo::upright ? 0 : along;
    const bool exists = unit < Halo::tile_units && plane < Depth::kernel &&
                        row < C::kernel_height && in_row < C::kernel_width;
    tap = exists ? plane * kPlaneTaps + row * C::kernel_width + in_row : kTaps;
    channel = block.channel + chunk * Halo::channels + in_unit % Halo::channels;
  }
};

// Whether a row and a column of a group have a weight: of joined groups, most have none.
__device__ __forceinline__ bool has_weight(int row, const Column& column) {
  const bool own = C::joined == 1 || row / C::group_out == column.channel / C::group_in;
  return row < kOut && column.tap < kTaps && column.channel < kIn && own;
}
__device__ __forceinline__ long long offset_of(const Tile& tile, int row, const Column& column) {
  const int input = C::joined == 1 ? column.channel : column.channel % C::group_in;
  const int plane = Depth::exists ? column.tap / kPlaneTaps : 0;
  const int tap = column.tap - plane * kPlaneTaps;
  return C::weight_start + 1LL * plane * Depth::weight_stride +
         tensor::weight_offset(tile.group * kOut + row, input, tap / C::kernel_width,
                               tap % C::kernel_width);
}

__device__ __forceinline__ void store_weight(Scalar* grad, const Tile& tile, int row,
                                             const Column& column, float value) {
  if (has_weight(row, column)) grad[offset_of(tile, row, column)] = narrow<Scalar>(value);
}

// Whether four columns, from a multiple of four on, are contiguous and aligned in memory, and exist
// all or none: channels of a tap, or if columns go channel by channel, taps of a filter and the
// next.
constexpr bool kDenseFilters =
    C::weight_stride_in == kTaps && (C::kernel_width == 1 || C::weight_stride_width == 1) &&
    (C::kernel_height == 1 || C::weight_stride_height == C::kernel_width);
constexpr bool kVectorChannels =
    C::weight_stride_in == 1 && C::group_in % 4 == 0 && kTapColumns % 4 == 0 &&
    (kTaps == 1 || (C::weight_stride_height % 4 == 0 && C::weight_stride_width % 4 == 0 &&
                    Depth::weight_stride % 4 == 0));
constexpr bool kVectorWeights =
    C::aligned && C::weight_start % 4 == 0 && C::weight_stride_out % 4 == 0 &&
    (C::by_taps ? kDenseFilters && C::group_in * kTaps % 4 == 0 : kVectorChannels);

// Stores two columns of a row, the first of which is even.
__device__ __forceinline__ void store_two(Scalar* grad, const Tile& tile, int row, int first,
                                          float value, float next) {
  const Column column(first);
  if constexpr (kVectorWeights) {
    if (!has_weight(row, column)) return;
    *reinterpret_cast<Vector<Scalar, 2>*>(grad + offset_of(tile, row, column)) = {
        narrow<Scalar>(value), narrow<Scalar>(next)};
  } else {
    store_weight(grad, tile, row, column, value);
    store_weight(grad, tile, row, Column(first + 1), next);
  }
}

// Stores the four columns from `first` of the tile on.
__device__ __forceinline__ void store_four(Scalar* grad, const Tile& tile, int row, int first,
                                           const float4& acc) {
  if constexpr (kVectorWeights) {
    const Column column(tile.column + first);
    if (!has_weight(row, column)) return;
    *reinterpret_cast<Vector<Scalar, 4>*>(grad + offset_of(tile, row, column)) = {
        narrow<Scalar>(acc.x), narrow<Scalar>(acc.y), narrow<Scalar>(acc.z), narrow<Scalar>(acc.w)};
  } else {
    const float four[4] = {acc.x, acc.y, acc.z, acc.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_weight(grad, tile, row, Column(tile.column + first + i), four[i]);
    }
  }
}

// Stores the biases of the four rows from `first` of the tile on.
__device__ __forceinline__ void store_biases(Scalar* bias_grad, const Tile& tile, int first,
                                             const float4& acc) {
  const float four[4] = {acc.x, acc.y, acc.z, acc.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = tile.row + first + i;
    if (row < kOut) bias_grad[tile.group * kOut + row] = narrow<Scalar>(four[i]);
  }
}

}  // namespace hopper
}  // namespace fastconv
