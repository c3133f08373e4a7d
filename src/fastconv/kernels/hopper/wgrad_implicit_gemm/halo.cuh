// Boxes with a halo: TMA brings the pixels that several taps read once for all of them, and a tap
// is an address in the box.
//
// A step's positions are a patch of one plane of the output: patch_rows by patch_columns, which are
// a multiple of 8. A box has the channels of a chunk, in rows of 32, 64 or 128 bytes, of all pixels
// that the patch reads at a tile's taps. Both operands are MN-major, where 8 positions along K are
// 8 rows side by side. The swizzle depends on the address alone, so such 8 rows may begin anywhere
// in its pattern. With a stride along columns, TMA skips pixels, and a chunk has a box for each
// residue of its taps.
#pragma once
#include "device/depth.cuh"
#include "device/tensor/operand.cuh"
#include "device/tile.cuh"

namespace fastconv {
namespace hopper {

// A tile's columns are units, the columns of one MMA: `mma_taps` neighbouring taps of a kernel row
// by a chunk of channels, or of a kernel column, if the kernel has only one; or one tap by
// `mma_chunks` chunks. Units of the same row or column are its pieces.
template <class Config, class = void>
struct HaloOf {
  static constexpr bool exists = false;
  static constexpr int units = 1;  // MMAs of a consumer at each place along K
  static constexpr int tiles = 1, lines = 1, line_steps = 1, bytes = 0, loaded_bytes = 0;
  static constexpr int consumer_registers = 0, producer_registers = 0;
};

template <class Config>
struct HaloOf<Config, typename Exists<decltype(Config::halo_units)>::type> {
  using Depth = DepthOf<Config>;
  static constexpr bool exists = true;
  static constexpr int units = Config::halo_units;
  static constexpr int channels = Config::halo_channels;  // of a chunk
  static constexpr int span = 2 * channels;               // bytes of a pixel's row, and the swizzle
  static constexpr int mma_chunks = Config::halo_mma_chunks;
  static constexpr int mma_taps = Config::mma_columns / channels / mma_chunks;
  // Planes and rows of the kernel, and chunks of channels, in a tile.
  static constexpr int planes = Config::halo_planes, rows = Config::halo_rows,
                       chunks = Config::halo_chunks;
  static constexpr int patch_rows = Config::patch_rows, patch_columns = Config::patch_columns;

  static constexpr int consumer_registers = Config::consumer_registers,
                       producer_registers = Config::producer_registers;

  static constexpr bool upright = Config::kernel_width == 1 && Config::kernel_height > 1;
  static_assert(!upright || rows % mma_taps == 0, "tiles have whole units");
  static constexpr int pieces =
      upright ? rows / mma_taps : ceil_div(Config::kernel_width, mma_taps);
  static constexpr int unit_rows = upright ? 1 : rows;  // rows of units
  static constexpr int unit_chunks = chunks / mma_chunks;
  static constexpr int tile_units = planes * unit_rows * unit_chunks * pieces;
  static_assert(chunks % mma_chunks == 0 && (mma_chunks == 1 || mma_taps == 1), "whole units");
  static_assert(upright || mma_taps == 1 || Config::stride_width == 1, "neighbouring taps");
  static constexpr int plane_blocks = ceil_div(Depth::kernel, planes);
  static constexpr int row_blocks = ceil_div(Config::kernel_height, rows);
  static constexpr int chunk_blocks = ceil_div(Config::group_in, chunks* channels);
  static constexpr int tiles = plane_blocks * row_blocks * chunk_blocks;  // of all columns

  static constexpr int lines = Depth::out * ceil_div(Config::out_height, patch_rows);
  static constexpr int line_steps = ceil_div(Config::out_width, patch_columns);

  // A box's columns, rows and planes. If rows are split, a box has the rows of the tile's taps for
  // each row of the patch; otherwise all rows from the first that is read to the last.
  static constexpr bool split_rows = Config::split_rows;
  static constexpr int width =
      patch_columns +
      (upright ? 0 : (pieces * mma_taps - 1) * Config::dilation_width / Config::stride_width);
  static constexpr int height = split_rows ? patch_rows * rows
                                           : (patch_rows - 1) * Config::stride_height +
                                                 (rows - 1) * Config::dilation_height + 1;
  static constexpr int patch_row =
      (split_rows ? rows : Config::stride_height) * width;  // in pixels
  static constexpr int tap_row = (split_rows ? 1 : Config::dilation_height) * width;
  static constexpr int depth = (planes - 1) * Depth::dilation + 1;
  static constexpr int box_bytes = width * height * depth * span;
  static constexpr int box_distance = round_up(box_bytes, 1024);
  static_assert(patch_columns % 8 == 0, "8 positions are neighbours");
  static_assert(Config::groups == 1 && Config::channels_last && Config::input_copied, "");

  // The residue of a tap's pixels by the stride, the box of this residue, and the other way round.
  static constexpr __host__ __device__ int residue(int tap) {
    return tap * Config::dilation_width % Config::stride_width;
  }
  static constexpr __host__ __device__ bool begins_box(int tap) {
    for (int other = 0; other < tap; ++other) {
      if (residue(other) == residue(tap)) return false;
    }
    return true;
  }
  static constexpr __host__ __device__ int boxes_before(int tap) {
    int count = 0;
    for (int other = 0; other < tap; ++other) count += begins_box(other);
    return count;
  }
  static constexpr __host__ __device__ int box_of(int tap) {
    int first = 0;
    while (residue(first) != residue(tap)) ++first;
    return boxes_before(first);
  }
  static constexpr __host__ __device__ int residue_of(int box) {
    int tap = 0;
    while (box_of(tap) != box) ++tap;
    return residue(tap);
  }
  static constexpr int boxes = boxes_before(Config::kernel_width);  // of a chunk
  static constexpr int chunk_distance = boxes * box_distance;
  static constexpr int bytes = chunks * chunk_distance;            // of a stage
  static constexpr int loaded_bytes = chunks * boxes * box_bytes;  // that TMA counts

  // The second 8 of an MMA's 16 positions lie beside the first, or in the next row of the patch.
  static constexpr bool in_rows = patch_columns % 16 == 0;
  static_assert(in_rows || patch_rows % 2 == 0, "rows come in pairs");
  // The row and column of the patch where an MMA's positions begin.
  static constexpr __host__ __device__ int row_of(int mma) {
    return in_rows ? mma / (patch_columns / 16) : mma / (patch_columns / 8) * 2;
  }
  static constexpr __host__ __device__ int column_of(int mma) {
    return in_rows ? mma % (patch_columns / 16) * 16 : mma % (patch_columns / 8) * 8;
  }
  // Where an MMA's positions begin in a row of 128 bytes for each position of the patch, and how
  // far its two 8 positions lie apart, in bytes.
  static constexpr __host__ __device__ int grad_offset(int mma) {
    return (row_of(mma) * patch_columns + column_of(mma)) * 128;
  }
  static constexpr int grad_stride = (in_rows ? 8 : patch_columns) * 128;
  // The same in a box at its first tap.
  static constexpr __host__ __device__ int offset(int mma) {
    return (row_of(mma) * patch_row + column_of(mma)) * span;
  }
  static constexpr int stride = (in_rows ? 8 : patch_row) * span;
  static constexpr int tap_stride = (upright ? tap_row : Config::dilation_width) * span;
  static constexpr int leading = mma_chunks > 1 ? chunk_distance : tap_stride;

  // A unit of a tile, and the tile among those of all columns. A tile's last units may not exist.
  struct Unit {
    int plane, row, chunk, piece;  // in the tile

    __device__ __forceinline__ explicit Unit(int unit)
        : plane(unit / (unit_rows * unit_chunks * pieces)),
          row(unit / (unit_chunks * pieces) % unit_rows),
          chunk(unit / pieces % unit_chunks * mma_chunks),
          piece(unit % pieces) {}
    // Where the unit's first tap lies in the boxes.
    __device__ __forceinline__ int offset() const {
      const int pixel = plane * Depth::dilation * height * width + row * tap_row;
      const int start = chunk * chunk_distance + pixel * span;
      const int tap = piece * mma_taps;
      if constexpr (Config::stride_width == 1 || upright) return start + tap * tap_stride;
      const int column = tap * Config::dilation_width / Config::stride_width;
      return start + box_of(tap) * box_distance + column * span;
    }
  };
  struct Block {
    int plane, row, channel;  // first of the tile

    __device__ __forceinline__ explicit Block(int tile)
        : plane(tile / (row_blocks * chunk_blocks) * planes),
          row(tile / chunk_blocks % row_blocks * rows),
          channel(tile % chunk_blocks * (chunks * channels)) {}
  };
};

using Halo = HaloOf<Config>;

}  // namespace hopper
}  // namespace fastconv
