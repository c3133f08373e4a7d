// What a block of the weight gradient computes, how it walks through images, and the layout of its
// shared memory.
#pragma once
#include "device/mma.cuh"
#include "device/tensor/depth.cuh"
#include "device/tensor/operand.cuh"
#include "device/tile.cuh"

namespace fastconv {
namespace ampere {

using namespace tensor;

constexpr bool k16Bit = kScalarBytes == 2;  // elements of 16 bits

// --- The weight tile: what a block computes ------------------------------------------------------

// A unit is the 8 columns (N) of an MMA: 8 input channels of one tap, or, with float32, channels of
// several taps. A warp has the accumulators of `units` units and 16 * row_tiles output channels.
// The block's warps divide output channels, then units, then pixels among themselves.
constexpr int kOctet = 8;  // columns, and input channels
constexpr int kWarps = C::warps_out * C::warps_units * C::warps_pixels;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpOutputs = 16 * C::row_tiles;
constexpr int kBlockOutputs = kWarpOutputs * C::warps_out;
constexpr int kBlockUnits = C::units * C::warps_units;
static_assert(kThreads % kBlockOutputs == 0, "as many threads for each channel's bias");

// A group's input channels in memory. In volumes, group_in counts them once for each tap of the
// depth, and images are output planes.
constexpr int kInChannels = C::group_in / Depth::kernel;
using InChannel = DepthChannel<kInChannels>;
static_assert(!Depth::exists || (!C::in_channels_last && !C::grad_channels_last),
              "contiguous volumes");

// Input channels and taps of a weight tile.
constexpr int kTileWeights = C::tile_channels * C::tile_rows * C::tile_columns;
static_assert(kTileWeights <= kBlockUnits * kOctet, "units cover the weight tile");
static_assert(!k16Bit || C::tile_channels % kOctet == 0, "octets are loaded at once");

constexpr int kChannelBlocks = ceil_div(C::group_in, C::tile_channels);
constexpr int kRowBlocks = ceil_div(C::kernel_height, C::tile_rows);
constexpr int kColumnBlocks = ceil_div(C::kernel_width, C::tile_columns);
constexpr int kOutputBlocks = ceil_div(C::group_out, kBlockOutputs);

// A block's weight tile, by its first weight; channels are counted within the group.
struct WeightTile {
  int channel;
  int output;
  int kernel_row;
  int kernel_column;
  int group;

  __device__ explicit WeightTile(int index) {
    channel = index % kChannelBlocks * C::tile_channels;
    index /= kChannelBlocks;
    kernel_column = index % kColumnBlocks * C::tile_columns;
    index /= kColumnBlocks;
    kernel_row = index % kRowBlocks * C::tile_rows;
    index /= kRowBlocks;
    output = index % kOutputBlocks * kBlockOutputs;
    group = index / kOutputBlocks;
  }

  // Whether this is the first tile of its output channels: the one that adds up the bias.
  __device__ bool has_bias() const { return channel == 0 && kernel_row == 0 && kernel_column == 0; }
};

// The channel and the tap of an MMA's column, counted over all units of the weight tile.
struct Column {
  int channel;
  int row;
  int column;

  __device__ explicit Column(int index)
      : channel(index % C::tile_channels),
        row(index / C::tile_channels / C::tile_columns),
        column(index / C::tile_channels % C::tile_columns) {}
};

// A warp's place in the block.
struct Warp {
  int out;
  int units;
  int pixels;

  __device__ explicit Warp(int index)
      : out(index % C::warps_out),
        units(index / C::warps_out % C::warps_units),
        pixels(index / (C::warps_out * C::warps_units)) {}
};

// --- The pixels: how blocks walk through images --------------------------------------------------

// Output rows of a walk are kRowStep apart, so that there are kRowStep walks down a strip. From one
// row to the next, input rows advance by kRowAdvance dilations.
constexpr int kRowGcd = gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / kRowGcd;
constexpr int kRowAdvance = C::stride_height / kRowGcd;

// A step of a walk is step_rows of its rows of strip_columns columns: the pixels that are
// multiplied from shared memory at once.
constexpr int kStepPixels = C::step_rows * C::strip_columns;
constexpr int kStrips = ceil_div(C::out_width, C::strip_columns);
constexpr int kWalksPerImage = kRowStep * kStrips;
constexpr int kWalkRows = C::steps * C::step_rows;
static_assert(C::strip_columns % 8 == 0, "an MMA takes 8 pixels of a row");
static_assert(kWalkRows * kRowStep >= C::out_height, "walks cover the image");

// A step's place among the steps of all images.
struct Cursor {
  int walk;
  int step;

  __device__ explicit Cursor(long long index)
      : walk(static_cast<int>(index / C::steps)), step(static_cast<int>(index % C::steps)) {}
  __device__ void advance() {
    if (++step < C::steps) return;
    step = 0;
    ++walk;
  }
  __device__ int image() const { return walk / kWalksPerImage; }
  // Row and column of the step's first pixel.
  __device__ int output_row() const {
    return walk / kStrips % kRowStep + step * (C::step_rows * kRowStep);
  }
  __device__ int output_column() const { return walk % kStrips * C::strip_columns; }
};

// The tiles and workers of a launch. Workers divide the steps of all images among themselves.
struct LaunchRange {
  int first_tile;
  int tiles;
  int workers;
  int batch;

  __device__ WeightTile tile() const {
    return WeightTile(first_tile + static_cast<int>(blockIdx.x) % tiles);
  }
  // Returns the first step of a worker.
  __device__ long long first_step(int worker) const {
    return static_cast<long long>(batch) * (kWalksPerImage * C::steps) * worker / workers;
  }
};

// An MMA multiplies (K) 8 neighbouring pixels of float32 or 16 of 16-bit types; with 16-bit types
// and strips of an odd number of octets, 8 pixels of two rows.
constexpr bool kRowPairs = k16Bit && C::strip_columns % 16 == 8;
constexpr int kMmaColumns = k16Bit && !kRowPairs ? 16 : 8;
constexpr int kMmaRows = kRowPairs ? 2 : 1;
// A slice is the part of a step that a warp multiplies without computing new addresses.
constexpr int kSliceColumns = C::slice_mmas * kMmaColumns;
constexpr int kRowSlices = C::strip_columns / kSliceColumns;
constexpr int kSlices = C::step_rows / kMmaRows * kRowSlices;
constexpr int kWarpSlices = kSlices / C::warps_pixels;
static_assert(C::strip_columns % kSliceColumns == 0 && C::step_rows % kMmaRows == 0, "");
static_assert(kSlices % C::warps_pixels == 0, "all warps have as much to do");

// --- Shared memory -------------------------------------------------------------------------------

// The input is a ring of lines: rows of the input that some tap reads, one dilation apart. A step
// needs kWindow of them, from its first output row's first line on. With `rolling`, most of them
// are also the step before's; otherwise the ring has room for two steps' lines.
constexpr int kLineAdvance = kRowAdvance < C::tile_rows ? kRowAdvance : C::tile_rows;
constexpr int kWindow = (C::step_rows - 1) * kLineAdvance + C::tile_rows;
constexpr int kNewLines = C::rolling ? C::step_rows * kLineAdvance : kWindow;
constexpr int kOldLines = kWindow - kNewLines;
constexpr int kLines = kWindow + kNewLines;
static_assert(!C::rolling || kOldLines > 0, "");

// Taps read only every kColumnUnit-th column of a row; only these are stored.
constexpr int kColumnUnit =
    C::tile_columns == 1 ? C::stride_width : gcd(C::stride_width, C::dilation_width);
constexpr int kStride = C::stride_width / kColumnUnit;
constexpr int kTapStep = C::tile_columns == 1 ? 0 : C::dilation_width / kColumnUnit;
// Copies of several columns begin at multiples of their width, so lines begin up to `shift` columns
// early.
constexpr int kLineColumns =
    round_up(C::shift + (C::strip_columns - 1) * kStride + (C::tile_columns - 1) * kTapStep + 1,
             C::in_channels_last ? 1 : C::in_vector);

// The layout of a line:
//   16-bit types               [octet][column][8 channels]    octets are in_pitch bytes apart
//   float32                    [channel][column]              channels are in_pitch bytes apart
//   float32, channels-last     [column][channel]              columns are in_pitch bytes apart
constexpr bool kPixelLines = !k16Bit && C::in_channels_last;
constexpr int kColumnBytes = k16Bit ? 16 : kPixelLines ? C::in_pitch : 4;
constexpr int kChannelBytes = kPixelLines ? 4 : C::in_pitch;  // distance of float32 channels
constexpr int kLineBytes =
    (kPixelLines ? kLineColumns : C::tile_channels / (k16Bit ? kOctet : 1)) * C::in_pitch;
// Returns the offset of a channel in a line.
__device__ __forceinline__ int channel_bytes(int channel) {
  return k16Bit ? channel / kOctet * C::in_pitch + channel % kOctet * kScalarBytes
                : channel * kChannelBytes;
}

// The output's gradient has two stages. A stage has the layout of global memory, [channel][pixel],
// or [pixel][channel] if it is channels-last; with 3xTF32, all low parts follow all high parts.
constexpr int kPartBytes = (C::grad_channels_last ? kStepPixels : kBlockOutputs) * C::grad_pitch;
constexpr int kStageBytes = C::parts * kPartBytes;

constexpr int kInput = 0;
constexpr int kRingBytes = kLines * kLineBytes;
constexpr int kGrad = kInput + round_up(kRingBytes, 16);
constexpr int kUnits = kGrad + 2 * kStageBytes;
constexpr int kEntryColumns = k16Bit ? kOctet : 1;
constexpr int kEntries = kBlockUnits * kOctet / kEntryColumns;
static_assert(kUnits + 4 * kEntries <= C::shared_bytes, "");

// The offsets of each column, or of each unit with 16-bit types, from the first line of an output
// row.
__device__ __forceinline__ int* unit_table() {
  return reinterpret_cast<int*>(shared_memory() + kUnits);
}
__device__ __forceinline__ void fill_unit_table() {
  for (int i = static_cast<int>(threadIdx.x); i < kEntries; i += kThreads) {
    const int index = i * kEntryColumns;
    const Column column(index < kTileWeights ? index : 0);  // results of excess columns are dropped
    unit_table()[i] = column.row * kLineBytes + channel_bytes(column.channel) +
                      column.column * (kTapStep * kColumnBytes);
  }
}

// Wrap a line, or a byte, around the end of the ring.
__device__ __forceinline__ int ring_line(int line) { return line < kLines ? line : line - kLines; }
__device__ __forceinline__ int ring_byte(int byte) {
  return byte < kRingBytes ? byte : byte - kRingBytes;
}

}  // namespace ampere
}  // namespace fastconv
