// What a block of weight_grad.cuh computes, how it walks through images, and what lies where in
// shared memory.
#pragma once
#include "device/mma.cuh"
#include "device/tile.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace ampere {

using namespace tensor;

constexpr bool kHalves = kScalarBytes == 2;  // elements of 16 bits

// --- The products: what a block computes ---------------------------------------------------------

// A unit is the 8 columns of a product: 8 input channels of one tap, or, of float32, channels of
// several taps. A warp has the sums of `units` units and 16 * row_tiles output channels. The
// block's warps have different output channels, then different units, then different pixels.
constexpr int kOctet = 8;  // columns, and input channels
constexpr int kWarps = C::warps_out * C::warps_units * C::warps_pixels;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpOutputs = 16 * C::row_tiles;
constexpr int kBlockOutputs = kWarpOutputs * C::warps_out;
constexpr int kBlockUnits = C::units * C::warps_units;
static_assert(kThreads % kBlockOutputs == 0, "as many threads for each channel's bias");

// A block's weights are a box of input channels and taps.
constexpr int kBoxSize = C::box_channels * C::box_rows * C::box_columns;
static_assert(kBoxSize <= kBlockUnits * kOctet, "a block has the sums of its box");
static_assert(!kHalves || C::box_channels % kOctet == 0, "what is loaded at once");

constexpr int kChannelBlocks = ceil_div(C::group_in, C::box_channels);
constexpr int kRowBlocks = ceil_div(C::kernel_height, C::box_rows);
constexpr int kColumnBlocks = ceil_div(C::kernel_width, C::box_columns);
constexpr int kOutputBlocks = ceil_div(C::group_out, kBlockOutputs);

struct Tile {
  int channel;  // first ones, in the group
  int output;
  int kernel_row;
  int kernel_column;
  int group;

  __device__ explicit Tile(int index) {
    channel = index % kChannelBlocks * C::box_channels;
    index /= kChannelBlocks;
    kernel_column = index % kColumnBlocks * C::box_columns;
    index /= kColumnBlocks;
    kernel_row = index % kRowBlocks * C::box_rows;
    index /= kRowBlocks;
    output = index % kOutputBlocks * kBlockOutputs;
    group = index / kOutputBlocks;
  }

  // Whether no tile of the same output channels comes before this one.
  __device__ bool has_bias() const { return channel == 0 && kernel_row == 0 && kernel_column == 0; }
};

// A product's column: its place in the box.
struct Column {
  int channel;
  int row;
  int column;

  __device__ explicit Column(int index)
      : channel(index % C::box_channels),
        row(index / C::box_channels / C::box_columns),
        column(index / C::box_channels % C::box_columns) {}
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

// Output rows of a walk are kRowStep apart; they start at one of as many residues. From one to the
// next, input rows move on by kRowAdvance dilations.
constexpr int kRowGcd = gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / kRowGcd;
constexpr int kRowAdvance = C::stride_height / kRowGcd;

// A step of a walk: step_rows such rows of strip_columns columns, the pixels that are in shared
// memory at once.
constexpr int kStepPixels = C::step_rows * C::strip_columns;
constexpr int kStrips = ceil_div(C::out_width, C::strip_columns);
constexpr int kWalksPerImage = kRowStep * kStrips;
constexpr int kWalkRows = C::steps * C::step_rows;
static_assert(C::strip_columns % 8 == 0, "what a product takes of a row");
static_assert(kWalkRows * kRowStep >= C::out_height, "walks cover the image");

// Where a step is, and what comes after it.
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
  // The first pixel's.
  __device__ int output_row() const {
    return walk / kStrips % kRowStep + step * (C::step_rows * kRowStep);
  }
  __device__ int output_column() const { return walk % kStrips * C::strip_columns; }
};

// What all blocks of a launch share.
struct Work {
  int first_tile;
  int tiles;
  int workers;
  int batch;

  __device__ Tile tile() const { return Tile(first_tile + static_cast<int>(blockIdx.x) % tiles); }
  // The first step of a worker's share.
  __device__ long long first_step(int worker) const {
    return static_cast<long long>(batch) * (kWalksPerImage * C::steps) * worker / workers;
  }
};

// A step's products: 8 float32 or 16 half pixels each, neighbours in a row. Of 16-bit types and
// strips of an odd number of octets, it is 8 pixels of two rows.
constexpr bool kRowPairs = kHalves && C::strip_columns % 16 == 8;
constexpr int kProductColumns = kHalves && !kRowPairs ? 16 : 8;
constexpr int kProductRows = kRowPairs ? 2 : 1;
// A slice of it is what a warp multiplies at a time, without looking for addresses.
constexpr int kSliceColumns = C::slice_products * kProductColumns;
constexpr int kRowSlices = C::strip_columns / kSliceColumns;
constexpr int kSlices = C::step_rows / kProductRows * kRowSlices;
constexpr int kWarpSlices = kSlices / C::warps_pixels;
static_assert(C::strip_columns % kSliceColumns == 0 && C::step_rows % kProductRows == 0, "");
static_assert(kSlices % C::warps_pixels == 0, "all warps have as much to do");

// --- Shared memory -------------------------------------------------------------------------------

// The input: a ring of lines, rows of the input that some tap reads, one dilation apart. A step
// needs kWindow of them, which begin where the ones of its first output row do. With `rolling`,
// most of them are those of the step before; otherwise there is room for two steps' lines.
constexpr int kLineAdvance = kRowAdvance < C::box_rows ? kRowAdvance : C::box_rows;
constexpr int kWindow = (C::step_rows - 1) * kLineAdvance + C::box_rows;
constexpr int kNewLines = C::rolling ? C::step_rows * kLineAdvance : kWindow;
constexpr int kOldLines = kWindow - kNewLines;
constexpr int kLines = kWindow + kNewLines;
static_assert(!C::rolling || kOldLines > 0, "");

// Of a row, only every kColumnUnit-th column is read, and stored.
constexpr int kColumnUnit =
    C::box_columns == 1 ? C::stride_width : gcd(C::stride_width, C::dilation_width);
constexpr int kStride = C::stride_width / kColumnUnit;
constexpr int kTapStep = C::box_columns == 1 ? 0 : C::dilation_width / kColumnUnit;
// Where copies have more than one column, lines begin at one of their multiples: up to `shift`
// columns early.
constexpr int kLineColumns =
    round_up(C::shift + (C::strip_columns - 1) * kStride + (C::box_columns - 1) * kTapStep + 1,
             C::in_channels_last ? 1 : C::in_vector);

// How a line lies there, by bytes:
//   16-bit types               [octet][column][8 channels]    octets are in_pitch apart
//   float32                    [channel][column]              channels are
//   float32, channels-last     [column][channel]              columns are
constexpr bool kPixelLines = !kHalves && C::in_channels_last;
constexpr int kColumnBytes = kHalves ? 16 : kPixelLines ? C::in_pitch : 4;
constexpr int kChannelBytes = kPixelLines ? 4 : C::in_pitch;  // of float32
constexpr int kLineBytes =
    (kPixelLines ? kLineColumns : C::box_channels / (kHalves ? kOctet : 1)) * C::in_pitch;
// From a line's beginning to a channel.
__device__ __forceinline__ int channel_bytes(int channel) {
  return kHalves ? channel / kOctet * C::in_pitch + channel % kOctet * kScalarBytes
                 : channel * kChannelBytes;
}

// The output's gradient, as it lies in memory: [channel][pixel], or [pixel][channel] if it is
// channels-last; then, with two parts, all the low ones. Two stages.
constexpr int kPartBytes = (C::grad_channels_last ? kStepPixels : kBlockOutputs) * C::grad_pitch;
constexpr int kStageBytes = C::parts * kPartBytes;

constexpr int kInput = 0;
constexpr int kRingBytes = kLines * kLineBytes;
constexpr int kGrad = kInput + round_up(kRingBytes, 16);
constexpr int kUnits = kGrad + 2 * kStageBytes;
constexpr int kEntryColumns = kHalves ? kOctet : 1;
constexpr int kEntries = kBlockUnits * kOctet / kEntryColumns;
static_assert(kUnits + 4 * kEntries <= C::shared_bytes, "");

// Where each column begins, or each unit of 16-bit types, counted from the first line of an output
// row.
__device__ __forceinline__ int* unit_table() {
  return reinterpret_cast<int*>(shared_memory() + kUnits);
}
__device__ __forceinline__ void fill_unit_table() {
  for (int i = static_cast<int>(threadIdx.x); i < kEntries; i += kThreads) {
    const int index = i * kEntryColumns;
    const Column column(index < kBoxSize ? index : 0);  // others compute something, for nobody
    unit_table()[i] = column.row * kLineBytes + channel_bytes(column.channel) +
                      column.column * (kTapStep * kColumnBytes);
  }
}

// A line of the ring, and a byte of it.
__device__ __forceinline__ int ring_line(int line) { return line < kLines ? line : line - kLines; }
__device__ __forceinline__ int ring_byte(int byte) {
  return byte < kRingBytes ? byte : byte - kRingBytes;
}

}  // namespace ampere
}  // namespace fastconv
