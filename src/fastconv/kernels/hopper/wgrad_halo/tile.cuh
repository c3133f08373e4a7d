// The tile: what a block of weight_grad.cuh computes, how it walks through images, and what lies
// where in shared memory.
#pragma once
#include "device/tile.cuh"
#include "device/wgmma.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace hopper {

using namespace tensor;

// An element that nobody writes meanwhile, or zero.
__device__ __forceinline__ float load_element(const float* source, bool valid) {
  return load_or_zero(source, valid);
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* source, bool valid) {
  return {static_cast<unsigned short>(load_or_zero(&source->bits, valid))};
}

// --- The products: what a block computes ---------------------------------------------------------

// What is multiplied: elements as they are, or float32 numbers as float16 (see scale.cuh).
using Factor = Either<C::halves, Float16, Operand>::type;
__device__ __forceinline__ float round_factor(float value) {
  return C::ties_to_even ? round_to_even_tf32(value) : round_operand_to_tf32(value);
}
constexpr int kPhases = C::halves ? 8 : kVector;
static_assert(C::phase_images * C::phase_strips == kPhases, "16 bytes of them");
static_assert(!C::halves || (kScalarBytes == 4 && !C::in_channels_last && !C::grad_channels_last),
              "contiguous float32");

constexpr int kOutputs = 64;  // channels of a product
constexpr int kConsumers = 2;
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kOctet = 8;  // input channels
constexpr int kPlaneChannels = kOctet * C::product_octets;
constexpr int kColumns = C::product_taps * kPlaneChannels;  // of a product
constexpr int kSums = kColumns / 2;                         // of a thread and a product
static_assert(C::product_octets == 1 || C::product_taps == 1 || C::dilation_width == 1,
              "taps and octets are one row of cores, equally far apart");

constexpr int kPlanes = ceil_div(C::group_in, kPlaneChannels);
constexpr int kSegments = kPlanes * C::kernel_rows;
constexpr int kSlices = kConsumers / C::channel_groups;  // of segments, in a block
constexpr int kBlockSegments = C::segments * kSlices;
// Planes that a block's segments lie in, at most.
constexpr int kBlockPlanes = kBlockSegments % C::kernel_rows == 0 ? kBlockSegments / C::kernel_rows
                             : C::kernel_rows % kBlockSegments == 0
                                 ? 1
                                 : (kBlockSegments - 2) / C::kernel_rows + 2;

constexpr int kRowBlocks = ceil_div(C::kernel_height, C::kernel_rows);
constexpr int kPieces = ceil_div(C::kernel_width, C::product_taps);
constexpr int kSegmentBlocks = ceil_div(kSegments, kBlockSegments);
// Planes of grad_output that begin equally far from a multiple of 16 bytes: every so many-th, the
// channels of a tile.
constexpr int kClasses = C::plane_classes;
static_assert(C::group_out % kClasses == 0, "the same in all groups");
constexpr int kOutputBlocks =
    kClasses * ceil_div(C::group_out / kClasses, C::channel_groups* kOutputs);
constexpr int kSameOutputs = kSegmentBlocks * kPieces * kRowBlocks;  // tiles, side by side

// The weights that a block computes.
struct Tile {
  int segment;     // first
  int piece;       // of the kernel's columns, product_taps each
  int kernel_row;  // first
  int output;      // first channel, in the group
  int group;

  __device__ explicit Tile(int index) {
    segment = index % kSegmentBlocks * kBlockSegments;
    index /= kSegmentBlocks;
    piece = index % kPieces;
    index /= kPieces;
    kernel_row = index % kRowBlocks * C::kernel_rows;
    index /= kRowBlocks;
    const int block = index % kOutputBlocks;
    output = block / kClasses * (C::channel_groups * kOutputs * kClasses) + block % kClasses;
    group = index / kOutputBlocks;
  }

  __device__ int of_class() const { return output % kClasses; }
  // The n-th of its output channels, in the group; it may not exist.
  __device__ int channel(int n) const { return output + n * kClasses; }

  __device__ int plane() const { return segment / C::kernel_rows; }
  // How many tiles of the same output channels come before this one.
  __device__ int number() const {
    const int rows = kernel_row / C::kernel_rows;
    return segment / kBlockSegments + kSegmentBlocks * (piece + kPieces * rows);
  }
  __device__ bool has_bias() const { return number() == 0; }
};

// --- The pixels: how blocks walk through images --------------------------------------------------

// Output rows of a walk are kRowStep apart; they start at one of as many residues. From one to the
// next, input rows move on by kRowAdvance dilations.
constexpr int kRowGcd = gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / kRowGcd;
constexpr int kRowAdvance = C::stride_height / kRowGcd;
// Rows of the ring that a step needs and the one before it did not.
constexpr int kNewRows = kRowAdvance < C::kernel_rows ? kRowAdvance : C::kernel_rows;
constexpr int kOldRows = C::kernel_rows - kNewRows;

constexpr int kSteps = C::steps;  // of a strip of rows
constexpr int kCoveredRows = kSteps * kRowStep * C::phase_strips;
static_assert(kCoveredRows >= C::out_height, "strips cover the image");

constexpr int kBodyColumns = 8;  // that a consumer takes at a time
static_assert(C::stage_columns % kBodyColumns == 0, "");

// Rows of grad_output that are not multiples of 16 bytes: a step's columns begin up to `lead`
// early, where memory has a multiple of 16 bytes.
static_assert(C::lead < kVector, "");
constexpr int kRowColumns = round_up(C::out_width + C::lead, kBodyColumns);
constexpr int kStripColumns = C::strip_stages * C::stage_columns;
constexpr int kStrips = ceil_div(kRowColumns, kStripColumns);
constexpr int kWalksPerImage = kRowStep * kStrips;

// The last strip of a row is narrower, and so is its last stage.
__device__ __forceinline__ int columns_of(int strip) {
  return kRowColumns % kStripColumns == 0 ? kStripColumns
                                          : min(kStripColumns, kRowColumns - strip * kStripColumns);
}

// What the steps of a strip of rows take, in any unit: those of one strip of columns, of all but
// the last, and of all.
constexpr long long kStripWeight = static_cast<long long>(kSteps) * C::strip_weight;
constexpr long long kLastStrip = (kStrips - 1) * kStripWeight;
constexpr long long kRowsWeight =
    kLastStrip + static_cast<long long>(kSteps) * C::last_strip_weight;

// A step of a walk, found by the weight of what comes before it.
struct Place {
  int walk;
  int step;

  __device__ explicit Place(long long weight) {
    const long long rest = weight % kRowsWeight;
    const bool last = rest >= kLastStrip;
    const int strip = last ? kStrips - 1 : static_cast<int>(rest / kStripWeight);
    const long long of_strip = rest - strip * kStripWeight;
    walk = static_cast<int>(weight / kRowsWeight) * kStrips + strip;
    step = static_cast<int>(of_strip / (last ? C::last_strip_weight : C::strip_weight));
  }
};

// Part of a walk, all steps of which a block takes.
struct Run {
  int image;  // of phase 0
  int residue;
  int strip;
  int step;  // first
  int steps;

  // The output row of a step, for the first strip of rows.
  __device__ int output_row(int i) const { return residue + kRowStep * (step + i); }
};

// A worker's share of all pixels, run by run.
struct Share {
  Place at;
  Place end;

  __device__ Share(int worker, int workers, int batch)
      : at(weight(batch) * worker / workers), end(weight(batch) * (worker + 1) / workers) {}

  __device__ static long long weight(int batch) {
    return ceil_div(batch, C::phase_images) * (kRowStep * kRowsWeight);
  }
  __device__ bool more() const {
    return at.walk < end.walk || (at.walk == end.walk && at.step < end.step);
  }
  __device__ Run next() {
    Run run;
    run.strip = at.walk % kStrips;
    run.residue = at.walk / kStrips % kRowStep;
    run.image = at.walk / kWalksPerImage * C::phase_images;
    run.step = at.step;
    run.steps = (at.walk < end.walk ? kSteps : end.step) - at.step;
    ++at.walk;
    at.step = 0;
    return run;
  }
};

// What all blocks of a launch share. Each role finds its block's part by itself: values that all of
// them keep would take registers from those that have none to spare.
struct Work {
  int first_tile;
  int tiles;
  int workers;
  int batch;

  __device__ Tile tile() const { return Tile(first_tile + static_cast<int>(blockIdx.x) % tiles); }
  __device__ Share share() const {
    return Share(static_cast<int>(blockIdx.x) / tiles, workers, batch);
  }
};

// --- Shared memory -------------------------------------------------------------------------------

// An input row's tile: its first column lies at a multiple of 4 elements, `kShift` columns early.
constexpr int kQuad = 4;  // columns that are loaded together, or channels if they are neighbours
constexpr int kFirstColumn = -C::lead * C::stride_width - C::padding_left;
constexpr int kShift = C::vector_input && !C::in_channels_last
                           ? kFirstColumn - floor_div(kFirstColumn, kQuad) * kQuad
                           : 0;
// Its columns, for so many columns of an output row.
__host__ __device__ constexpr int tile_columns(int columns) {
  return round_up(kShift + (columns - 1 + C::lead) * C::stride_width +
                      (C::product_taps - 1) * C::dilation_width + 1,
                  kQuad);
}
constexpr int kTileColumns = tile_columns(kStripColumns);

// In units of 16 bytes, as wgmma's descriptors are.
constexpr int kColumnVectors = kOctet * C::product_octets;
constexpr int kPlaneVectors = kTileColumns * kColumnVectors;
constexpr int kPartVectors = kBlockPlanes * kPlaneVectors;
constexpr int kRowVectors = C::parts * kPartVectors;

// A stage of grad_output: a row of columns for every channel and phase. Where all channels and
// phases of an output row begin equally far from a multiple of 16 bytes, rows in shared memory
// begin at one. Otherwise (`kShifted`) they begin as far beyond it as they do in global memory. In
// either case units of 16 bytes are copied as they are. Consumers read a column of 8 rows that
// follow each other at a time: an odd number of units apart, they lie in different banks.
constexpr bool kShifted = !C::grad_channels_last && C::grad_vector < kVector;
constexpr int kStageChannels = C::channel_groups * kOutputs;
//
// Or one tensor copy brings all of them (`grad_boxes`), rows of 64 or 128 bytes without a gap:
// there, units of 16 bytes change places, in each of 8 rows that follow each other in another way.
constexpr int kStageUnits = C::stage_columns / kVector + (kShifted ? 1 : 0);
constexpr int kRowBytes = C::grad_boxes ? kStageUnits * 16 : (kStageUnits | 1) * 16;
static_assert(!C::grad_boxes || ((kRowBytes == 64 || kRowBytes == 128) && !kShifted &&
                                 !C::grad_channels_last && C::phase_images == kPhases),
              "what a tensor copy can describe");
// Where a box is of pixels whose rows follow each other, it has other rows' beyond a row's ends:
// these are cleared.
constexpr bool kClears = C::grad_boxes && C::lead > 0;
// By what the places of a row's units differ from what they would be.
__device__ __forceinline__ constexpr int swizzle_of(int row) {
  return C::grad_boxes ? row * kRowBytes / 128 % kStageUnits * 16 : 0;
}
constexpr int kStageRows = kStageChannels * kPhases;
// A lane of a consumer has so many neighbouring phases; they lie far apart, the lanes' side by
// side.
constexpr int kLanePhases = kPhases / 4;
__device__ __forceinline__ constexpr int stage_row(int channel, int phase) {
  return (phase % kLanePhases * kStageChannels + channel) * 4 + phase / kLanePhases;
}
// Of channels-last tensors, phases are padded: a warp reads one pixel of all of them.
constexpr int kPixelBytes = kStageChannels * kScalarBytes;
constexpr int kPhaseBytes = C::stage_columns * kPixelBytes + 8 * kScalarBytes;
constexpr int kStageBytes = C::grad_channels_last ? kPhases * kPhaseBytes : kStageRows * kRowBytes;

// The cores of a product overlap, two columns of taps. compute-sanitizer takes them to lie one
// behind the other, and what it believes that products read of the last input row must be shared
// memory, too.
constexpr int kInputRing = 0;
constexpr int kGradRing = round_up(C::input_stages * kRowVectors * 16, C::grad_boxes ? 1024 : 16);
constexpr int kBarriers = kGradRing + C::grad_stages * kStageBytes;
static_assert(C::input_stages >= C::kernel_rows + kNewRows, "a step's rows, and some to come");

// Of a consumer's thread and its two channels: groups of numbers that float16 has not all bits of.
using Counters = unsigned[kConsumers * 128][2];

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier grad_full[C::grad_stages];
  Barrier grad_empty[C::grad_stages];
  Barrier box_full[C::grad_stages];  // before it is cleared
};
constexpr int kCounters = kBarriers + sizeof(Barriers);
static_assert(kCounters + (C::halves ? sizeof(Counters) : 0) <= C::shared_bytes, "");

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}
// The calling consumer's.
__device__ __forceinline__ unsigned (&counters())[2] {
  return (*reinterpret_cast<Counters*>(shared_memory() + kCounters))[threadIdx.x - 128];
}

// A position in two laps of a ring of stages, whose parities differ. Producers start a lap ahead:
// the stages are empty.
template <int kRingStages>
struct Ring {
  int position;

  __device__ explicit Ring(int laps) : position(laps * kRingStages) {}
  __device__ int stage() const {
    return position < kRingStages ? position : position - kRingStages;
  }
  __device__ unsigned parity() const { return position >= kRingStages; }
  // The position so many stages further on.
  __device__ Ring operator+(int stages) const {
    Ring later(*this);
    later.position += stages;
    if (later.position >= 2 * kRingStages) later.position -= 2 * kRingStages;
    return later;
  }
  __device__ void advance() { *this = *this + 1; }
};

}  // namespace hopper
}  // namespace fastconv
