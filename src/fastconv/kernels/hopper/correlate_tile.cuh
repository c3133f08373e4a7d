// The tile: what a block of correlate.cuh computes at once, where it lies in shared memory, and how
// blocks walk over an image.
#pragma once
#include "hopper/operand.cuh"
#include "include/tile.cuh"

namespace fastconv {
namespace hopper {

// What is multiplied: elements as they are, or float32 numbers as float16 (see
// correlate_scale.cuh).
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

constexpr int kConsumers = 2;
constexpr int kPixelGroups = kConsumers / C::channel_groups;
constexpr int kGroupRows = C::tile_rows * C::stack;  // output rows of a consumer
constexpr int kTileRows = kPixelGroups * kGroupRows;
constexpr int kHaloRows = kTileRows + (C::kernel_height - 1) / kRowPhases;
static_assert(C::stack == 1 || (C::tile_rows == 1 && kRowPhases == 1), "rows stacked in M alone");
static_assert(C::lead + C::tile_columns + (C::kernel_width - 1) * kColumnStep / kColumnPhases <=
                  C::pitch,
              "a row holds its halo");

constexpr int kStageRows = C::rolling ? 1 : kHaloRows;
static_assert(!C::rolling || (kChunks == 1 && kRowPhases == 1 && C::tile_rows == 1), "see above");
constexpr int kSlotPixels = kStageRows * C::pitch;  // of one phase of the rows and the columns
constexpr int kLines = kRowSlots * kColumnSlots * kStageRows;  // of a plane
constexpr int kPlanePixels = kLines * C::pitch + C::plane_padding;
constexpr int kPlaneBytes = kPlanePixels * 16;
constexpr int kPartPixels = kChunkPlanes * kPlanePixels;
// Products come in eights of pixels: the last may reach a little beyond the tile's last row.
constexpr int kReach = C::pixels + (C::kernel_width - 1) * kColumnStep / kColumnPhases;
constexpr int kSlack = kReach > C::tile_rows* C::pitch ? kReach - C::tile_rows * C::pitch : 0;
static_assert(C::lead + C::tile_columns + (C::tile_rows - 1) * C::pitch <= C::pixels, "");
constexpr int kInputBytes = (C::parts * kPartPixels + kSlack) * 16;

constexpr int kOutputs = 64;  // channels of a product
constexpr int kStackChannels = kOutputs / (C::stack * C::column_sums);
constexpr int kProductBytes = kOutputs * 32;
constexpr int kWeightParts = C::halves && C::parts == 2 ? 3 : C::parts;
constexpr int kTapBytes = C::k_steps * kWeightParts * C::channel_groups * kProductBytes;
constexpr int kWeightBytes = C::stage_taps * kTapBytes;

// A product's row, counted among those of the same column: two sums of a pixel's columns are eight
// rows apart, in the same thread.
__device__ __forceinline__ int row_of_column(int product_row) {
  return C::column_sums == 1 ? product_row : product_row / 16 * 8 + product_row % 8;
}
static_assert(C::column_sums == 1 || (C::column_sums == 2 && C::interleave == 2), "pairs");
static_assert(kStackChannels >= 8, "eight rows of a product are neighbouring channels");

// Space for sums on their way out. Contiguous outputs: every warp has its own, for 8 channels' rows
// of pass_pixels, once or twice. Channels-last outputs: every warpgroup has its own, for
// pass_pixels of 64 channels. Pitches spread a warp's accesses over all banks.
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kRowPitch = round_up(C::interleave * C::pass_pixels + kVector - 8, 16) + 8;
constexpr int kPixelPitch = kOutputs + kVector;
constexpr int kStagingBytes =
    kScalarBytes *
    (C::out_channels_last ? C::pass_pixels * kPixelPitch : 4 * C::buffers * 8 * kRowPitch);

// With a lead, rows begin up to lead - 1 columns before the image.
constexpr int kStrips = ceil_div(C::out_width + (C::lead > 0 ? C::lead - 1 : 0), C::tile_columns);

// With `wraps`, a row's last strip goes on with the next row: a line of the tile has what it reads
// behind what this row reads, and so kGap columns between the rows' outputs.
constexpr int kGap = (C::kernel_width - 1) * C::dilation_width;
constexpr int kPaddedWidth = C::out_width + kGap;
static_assert(!C::wraps || (C::lead > 0 && C::pass_pixels >= C::pixels), "one row, stored at once");
static_assert(!C::wraps || (C::out_width > (kStrips - 1) * C::tile_columns &&
                            C::out_width + kGap + 2 * C::lead - 1 <=
                                (kStrips - 1) * C::tile_columns + C::pixels),
              "the last strip has room for a lead of the next row");
static_assert(!C::wraps || (C::stride_height == 1 && C::stride_width == 1 &&
                            C::fold_height * C::fold_width == 1 && C::out_step_height == 1),
              "the next row reads the next row");
static_assert(!C::wraps || !C::staged || (C::padding_left == 0 && C::in_width == kPaddedWidth),
              "neighbours in memory");

// Space for input on its way in (`staged`): pieces of a line, of two vectors' channels, as they lie
// in memory. Every loading warp has raw_slots of its own. Whole rows may all begin at multiples of
// 16 bytes.
constexpr int kLoaderWarps = 3;
constexpr int kRawSlots = C::staged ? kLoaderWarps * C::raw_slots : 0;
constexpr int kPieceChannels = 2 * kVectorChannels;
constexpr int kRawLine = C::wraps || C::pitch < C::in_width ? C::pitch : C::in_width;
constexpr bool kRawAligned = kStrips == 1 && C::padding_left >= 0 && C::in_width % kVector == 0;
constexpr int kRawChannel = round_up(kRawLine + (kRawAligned ? 0 : kVector - 1), kVector);
constexpr int kRawElements = kPieceChannels * kRawChannel;
constexpr int kRawBytes = kRawElements * kScalarBytes;

// What is infinite or NaN, if it is in the input, is so in its low part (see `split`). Two kinds of
// sums would make NaN of the infinities that come of it: short ones, which multiply low parts by
// each other, and compensated ones. There, loaders mark the stages that have such a number, and
// consumers are careful: what is not finite, and no result, they replace by zero.
constexpr bool kWatches = C::parts == 2 && !C::halves && (C::low_products || C::compensated);

constexpr int kInputRing = 0;
constexpr int kWeightRing = kInputRing + C::input_stages * kInputBytes;
constexpr int kStaging = kWeightRing + C::weight_stages * kWeightBytes;
constexpr int kRawRing = kStaging + kConsumers * kStagingBytes;
constexpr int kPowers = kRawRing + kRawSlots * kRawBytes;
// Of each loading warp, what a chunk's channels are multiplied by. Long lines' pieces read it from
// memory, which takes little beside them.
constexpr bool kPowersCopied = C::halves && !C::bulk_loads;
constexpr int kPowersBytes = kPowersCopied ? kChunkChannels * 4 : 0;
constexpr int kBarriers = kPowers + kLoaderWarps * kPowersBytes;
constexpr int kWatch =
    kBarriers + 16 * (C::input_stages + C::weight_stages) + 8 * (kConsumers + kRawSlots);
static_assert(kWatch + (kWatches ? 4 * C::input_stages : 0) <= C::shared_bytes, "");
static_assert(kInputBytes % 16 == 0 && kStagingBytes % 16 == 0, "bulk copies are aligned");
static_assert(C::lead == 0 || (C::tile_rows == 1 && C::bulk_stores), "one row's alignment");

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier weights_full[C::weight_stages];
  Barrier weights_empty[C::weight_stages];
  Barrier turn[kConsumers];  // the other consumer has its products under way
  Barrier raw_full[kRawSlots > 0 ? kRawSlots : 1];
};

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}

// Marks of each stage: whether a loading warp has written something infinite or NaN to it.
struct Watch {
  unsigned char marks[C::input_stages][4];

  __device__ __forceinline__ bool marked(int stage) const {
    return (*reinterpret_cast<const unsigned*>(marks[stage]) & 0xffffffu) != 0;
  }
};
static_assert(kLoaderWarps <= 3, "a byte for each");

__device__ __forceinline__ Watch& watch() {
  return *reinterpret_cast<Watch*>(shared_memory() + kWatch);
}

// A position in a ring of stages. Producers start a lap ahead: the stages are empty.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity;

  __device__ explicit Ring(unsigned first_parity) : parity(first_parity) {}
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

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

}  // namespace hopper
}  // namespace fastconv
