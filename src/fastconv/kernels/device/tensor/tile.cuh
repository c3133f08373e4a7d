// The tile that correlations on tensor cores share: its halo in shared memory, and how blocks walk
// over an image. A family's own header has what else it keeps there.
//
// Both operands lie in pieces of 16 bytes, channels that are multiplied at once:
//
//   input   [16 bytes of channels][row][pixel][16 bytes]     a halo tile, loaded once for all taps
//   weights [tap][2][product_rows output channels][16 bytes]
#pragma once
#include "device/tile.cuh"
#include "device/tensor/operand.cuh"
#include "device/tensor/ring.cuh"

namespace fastconv {
namespace tensor {

// What is multiplied: elements as they are, or float32 numbers as float16 (see scale.cuh).
using Factor = Either<C::halves, Float16, Operand>::type;
constexpr int kVectorChannels = C::halves ? 8 : kVector;  // in 16 bytes

constexpr int kChunkPlanes = 2 * C::k_steps;
constexpr int kChunkChannels = kChunkPlanes * kVectorChannels;
constexpr int kChunks = ceil_div(C::group_in, kChunkChannels);

// Along rows: tap k is in phase k % kRowPhases; a tile's output rows are kRowStep apart.
constexpr int kRowPhases = C::stride_height / gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / gcd(C::stride_height, C::dilation_height);
constexpr int kRowSlots = C::kernel_height < kRowPhases ? C::kernel_height : kRowPhases;

// Along columns, where output pixels are neighbours.
constexpr int kColumnUnit = gcd(C::stride_width, C::dilation_width);
constexpr int kColumnPhases = C::stride_width / kColumnUnit;
constexpr int kColumnStep = C::dilation_width / kColumnUnit;
constexpr int kColumnSlots = C::kernel_width < kColumnPhases ? C::kernel_width : kColumnPhases;

constexpr int kTapRows = C::kernel_height + C::stack - 1;
constexpr int kTaps = kTapRows * C::kernel_width;
constexpr int kWeightStages = kTaps / C::stage_taps;  // of a chunk
static_assert(kTaps % C::stage_taps == 0, "stages hold whole taps");

constexpr int kTileRows = C::block_rows;  // output rows of a block
constexpr int kHaloRows = kTileRows + (C::kernel_height - 1) / kRowPhases;
static_assert(C::lead + C::tile_columns + (C::kernel_width - 1) * kColumnStep / kColumnPhases <=
                  C::pitch,
              "a row holds its halo");

constexpr int kStageRows = C::rolling ? 1 : kHaloRows;
constexpr int kSlotPixels = kStageRows * C::pitch;  // of one phase of the rows and the columns
constexpr int kLines = kRowSlots * kColumnSlots * kStageRows;  // of a plane
constexpr int kPlanePixels = kLines * C::pitch + C::plane_padding;
constexpr int kPlaneBytes = kPlanePixels * 16;
constexpr int kPartPixels = kChunkPlanes * kPlanePixels;

// Phases of a strided gradient that are channels of the products (`out_fold`), by axes; and output
// channels of a group.
constexpr int kOutFold = C::out_fold_height * C::out_fold_width;
constexpr bool kUnfolds = kOutFold > 1;
constexpr int kOutGroup = C::group_out / kOutFold;

constexpr int kOutputs = C::product_rows;
constexpr int kStackRows = kOutputs / (C::stack * C::column_sums);  // of an output row
// Output channels of them. Of phases, those that are neighbours in memory stay together.
constexpr int kStackChannels = kUnfolds ? kStackRows / C::interleave * C::interleave : kStackRows;
constexpr int kProductBytes = kOutputs * 32;
// Of halves, the high part comes once more, 2^-11 times as large, where it is not made of the
// other.
constexpr bool kSmallerPart = C::halves && C::parts == 2 && C::smaller_part;
constexpr int kWeightParts = C::parts + kSmallerPart;
constexpr int kTapBytes = C::k_steps * kWeightParts * C::channel_groups * kProductBytes;
constexpr int kWeightBytes = C::stage_taps * kTapBytes;

// A product's row, counted among those of the same column: two sums of a pixel's columns are eight
// rows apart, in the same thread. So are two neighbours of phases that are channels.
__device__ __forceinline__ int row_of_column(int product_row) {
  if constexpr (kUnfolds) {
    return product_row / 16 * 16 + product_row % 8 * 2 + product_row / 8 % 2;
  } else {
    return C::column_sums == 1 ? product_row : product_row / 16 * 8 + product_row % 8;
  }
}
static_assert(C::column_sums == 1 || (C::column_sums == 2 && C::interleave == 2 && !kUnfolds),
              "pairs");
static_assert(kStackRows >= 8, "eight rows of a product are neighbouring channels");
static_assert(!kUnfolds || kStackChannels > 0, "a position's neighbours are in one product");

// With a lead, rows begin up to lead - 1 columns before the image.
constexpr int kStrips = ceil_div(C::out_width + (C::lead > 0 ? C::lead - 1 : 0), C::tile_columns);

// With `wraps`, a row's last strip goes on with the next row: a line of the tile has what it reads
// behind what this row reads, and so kGap columns between the rows' outputs.
constexpr int kGap = (C::kernel_width - 1) * C::dilation_width;
constexpr int kPaddedWidth = C::out_width + kGap;

// What is infinite or NaN, if it is in the input, is so in its low part (see `split`). Two kinds of
// sums would make NaN of the infinities that come of it: short ones, which multiply low parts by
// each other, and compensated ones. There, loaders mark what has such a number, and who
// multiplies is careful: what is not finite, and no result, they replace by zero.
constexpr bool kWatches = C::watches;
static_assert(!kWatches || (C::parts == 2 && !C::halves), "");

// --- Work items ----------------------------------------------------------------------------------

constexpr int kOutputGroups = ceil_div(C::group_out, C::channel_groups* kStackChannels);
constexpr int kRowTiles = ceil_div(ceil_div(C::out_height, kRowStep), kTileRows);
constexpr int kSegments = ceil_div(kRowTiles, C::segment_tiles);
constexpr int kItemsPerImage = kOutputGroups * kStrips * kSegments * kRowStep * C::groups;

// What a block does between two looks at its list: segment_tiles tiles, one below the other.
struct Item {
  int outputs;  // first channel of the block's products, in the group
  int column;   // first output column
  int tile;     // first tile, from the top of the image
  int tiles;
  int row_phase;
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
    row_phase = index % kRowStep;
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

// A channel of the group as the products have it: one of the input's, at one of its phases.
struct FoldedChannel {
  int channel, row, column;

  __device__ explicit FoldedChannel(int index)
      : channel(index / (C::fold_height * C::fold_width)),
        row(index / C::fold_width % C::fold_height),
        column(index % C::fold_width) {}
};

// An output channel of the group as the products have it: one of the image's, at one of its phases.
// Those that are neighbours in memory are neighbours.
struct UnfoldedChannel {
  int channel, row, column;

  __device__ __forceinline__ explicit UnfoldedChannel(int index) {
    if constexpr (!kUnfolds) {
      channel = index;
      row = column = 0;
    } else if constexpr (C::out_channels_last) {
      channel = index % kOutGroup;
      column = index / kOutGroup % C::out_fold_width;
      row = index / (kOutGroup * C::out_fold_width);
    } else {
      column = index % C::out_fold_width;
      row = index / C::out_fold_width % C::out_fold_height;
      channel = index / kOutFold;
    }
  }
};

}  // namespace tensor
}  // namespace fastconv
