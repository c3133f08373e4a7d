// The halo tile of the forward and input-gradient kernels: its layout in shared memory, and how
// blocks divide an image. What else a kernel keeps in shared memory is in its own headers.
//
// Both operands consist of vectors of 16 bytes, channels that one MMA multiplies:
//
//   input   [16 bytes of channels][row][pixel][16 bytes]     a halo tile, loaded once for all taps
//   weights [tap][2][register_tile_m output channels][16 bytes]
#pragma once
#include "device/tensor/depth.cuh"
#include "device/tensor/operand.cuh"
#include "device/tensor/ring.cuh"
#include "device/tile.cuh"

namespace fastconv {
namespace tensor {

// The MMA's operand type: the tensor's own, or scaled fp16 for float32 (see scale.cuh).
using Factor = Either<C::scaled_fp16, Float16, Operand>::type;
constexpr int kVectorChannels = C::scaled_fp16 ? 8 : kVector;  // channels in 16 bytes

constexpr int kChunkPlanes = 2 * C::k_steps;
constexpr int kChunkChannels = kChunkPlanes * kVectorChannels;
constexpr int kChunks = ceil_div(C::group_in, kChunkChannels);

// Input rows of a tile are grouped by their residue modulo the stride, and tap k reads residue k %
// kRowResidues. Output rows of a tile are kRowStep apart.
constexpr int kRowResidues = C::stride_height / gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / gcd(C::stride_height, C::dilation_height);
constexpr int kRowSlots = C::kernel_height < kRowResidues ? C::kernel_height : kRowResidues;

// Columns are grouped by their residue likewise; output pixels of a tile are neighbours.
constexpr int kColumnUnit = gcd(C::stride_width, C::dilation_width);
constexpr int kColumnResidues = C::stride_width / kColumnUnit;
constexpr int kColumnStep = C::dilation_width / kColumnUnit;
constexpr int kColumnSlots = C::kernel_width < kColumnResidues ? C::kernel_width : kColumnResidues;

constexpr int kTapRows = C::kernel_height + C::stack - 1;
constexpr int kTaps = kTapRows * C::kernel_width;
constexpr int kWeightStages = kTaps / C::stage_taps;  // stages of one chunk's weights
static_assert(kTaps % C::stage_taps == 0, "stages hold whole taps");

constexpr int kTileRows = C::block_rows;  // output rows of a tile
constexpr int kHaloRows = kTileRows + (C::kernel_height - 1) / kRowResidues;
static_assert(C::lead + C::tile_columns + (C::kernel_width - 1) * kColumnStep / kColumnResidues <=
                  C::pitch,
              "a row holds its halo");

constexpr int kStageRows = C::rolling ? 1 : kHaloRows;
// Pixels of one residue of the rows and the columns.
constexpr int kSlotPixels = kStageRows * C::pitch;
constexpr int kLines = kRowSlots * kColumnSlots * kStageRows;  // rows of all residues in one plane
constexpr int kPlanePixels = kLines * C::pitch + C::plane_padding;
constexpr int kPlaneBytes = kPlanePixels * 16;
constexpr int kPartPixels = kChunkPlanes * kPlanePixels;

// Depth-to-space: the residues of a strided input gradient that are output channels of one layer
// (`d2s_*`), along both axes; and the output channels of a group in memory.
constexpr int kOutResidues = C::d2s_height * C::d2s_width;
constexpr bool kDepthToSpace = kOutResidues > 1;
constexpr int kOutGroup = C::group_out / kOutResidues;

constexpr int kOutputs = C::register_tile_m;
constexpr int kStackRows =
    kOutputs / (C::stack * C::stacked_columns);  // MMA rows of one output row
// Output channels of one output row. With depth-to-space, channels that are neighbours in memory
// stay in one MMA.
constexpr int kStackChannels =
    kDepthToSpace ? kStackRows / C::interleave * C::interleave : kStackRows;
constexpr int kAOperandBytes = kOutputs * 32;
// Scaled fp16 in two parts stores the high part of the weights a second time, multiplied by 2^-11,
// unless consumers compute it from the first.
constexpr bool kSmallerPart = C::scaled_fp16 && C::parts == 2 && C::smaller_part;
constexpr int kWeightParts = C::parts + kSmallerPart;
constexpr int kTapBytes = C::k_steps * kWeightParts * C::channel_groups * kAOperandBytes;
constexpr int kWeightBytes = C::stage_taps * kTapBytes;

// The index of an MMA row among the rows of its output column. Two columns of a pixel, or two
// neighbouring depth-to-space channels, are eight MMA rows apart, so that one thread has both.
__device__ __forceinline__ int row_of_column(int m) {
  if constexpr (kDepthToSpace) {
    return m / 16 * 16 + m % 8 * 2 + m / 8 % 2;
  } else {
    return C::stacked_columns == 1 ? m : m / 16 * 8 + m % 8;
  }
}
static_assert(C::stacked_columns == 1 ||
                  (C::stacked_columns == 2 && C::interleave == 2 && !kDepthToSpace),
              "pairs");
static_assert(kStackRows >= 8, "eight rows of an MMA are neighbouring channels");
static_assert(!kDepthToSpace || kStackChannels > 0, "a position's neighbours are in one MMA");

// With a lead, a row's first strip begins up to lead - 1 columns before the image.
constexpr int kStrips = ceil_div(C::out_width + (C::lead > 0 ? C::lead - 1 : 0), C::tile_columns);

// With `wraps`, the last strip of a row continues with the next row. A line of the tile holds the
// input of both, so kGap columns without outputs lie between the two rows' outputs.
constexpr int kGap = (C::kernel_width - 1) * C::dilation_width;
constexpr int kPaddedWidth = C::out_width + kGap;

// 3xTF32 keeps infinities and NaN of the input in the low part (see `split`). Two kinds of
// accumulation would turn an infinite result into NaN: short ones, which also multiply low parts by
// each other, and compensated ones. There, loaders mark stages that hold such a number, and
// consumers of a marked stage replace intermediate values that are not finite by zero.
constexpr bool kWatches = C::watches;
static_assert(!kWatches || (C::parts == 2 && !C::scaled_fp16), "");

// --- Work items ----------------------------------------------------------------------------------

constexpr int kOutputGroups = ceil_div(C::group_out, C::channel_groups* kStackChannels);
constexpr int kRowTiles = ceil_div(ceil_div(C::out_height, kRowStep), kTileRows);
constexpr int kSegments = ceil_div(kRowTiles, C::segment_tiles);
constexpr int kItemsPerImage = kOutputGroups * kStrips * kSegments * kRowStep * C::groups;

// A work item of a block: segment_tiles tiles, one below the other.
struct Item {
  int outputs;  // first output channel, in the group
  int column;   // first output column
  int tile;     // first tile, from the top of the image
  int tiles;
  int row_residue;
  int group;
  int image;

  __device__ explicit Item(int index) {
    outputs = index % kOutputGroups * (C::channel_groups * kStackChannels);
    index /= kOutputGroups;
    column = index % kStrips * C::tile_columns;
    index /= kStrips;
    tile = index % kSegments * C::segment_tiles;
    tiles = min(C::segment_tiles, kRowTiles - tile);
    index /= kSegments;
    row_residue = index % kRowStep;
    index /= kRowStep;
    group = index % C::groups;
    image = index / C::groups;
  }

  // Input stages of one chunk.
  __device__ int stages() const {
    return C::rolling ? tiles * kTileRows + C::kernel_height - 1 : 1;
  }
};

// --- Channels ------------------------------------------------------------------------------------

// A space-to-depth channel of the group's input: a channel in memory, at one residue of the stride.
struct SpaceToDepthChannel {
  int channel, row, column;

  __device__ explicit SpaceToDepthChannel(int index)
      : channel(index / (C::s2d_height * C::s2d_width)),
        row(index / C::s2d_width % C::s2d_height),
        column(index % C::s2d_width) {}
};

// A depth-to-space channel of the group's output: a channel in memory, at one residue of the
// stride. Channels that are neighbours in memory have neighbouring indices.
struct DepthToSpaceChannel {
  int channel, row, column;

  __device__ __forceinline__ explicit DepthToSpaceChannel(int index) {
    if constexpr (!kDepthToSpace) {
      channel = index;
      row = column = 0;
    } else if constexpr (C::out_channels_last) {
      channel = index % kOutGroup;
      column = index / kOutGroup % C::d2s_width;
      row = index / (kOutGroup * C::d2s_width);
    } else {
      column = index % C::d2s_width;
      row = index / C::d2s_width % C::d2s_height;
      channel = index / kOutResidues;
    }
  }
};

// Whether a kernel has a tap at a place of an axis, where its taps are `dilation` apart.
__device__ __forceinline__ bool is_tap(int place, int taps, int dilation) {
  return place >= 0 && place < taps * dilation && place % dilation == 0;
}

}  // namespace tensor
}  // namespace fastconv
