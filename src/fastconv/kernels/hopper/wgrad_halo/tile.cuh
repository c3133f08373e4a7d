// The tile of a block of the wgrad_halo kernel: the weights that it computes, how it walks through
// images, and its layout of shared memory.
#pragma once
#include "device/tensor/depth.cuh"
#include "device/tensor/operand.cuh"
#include "device/tile.cuh"
#include "device/wgmma.cuh"

namespace fastconv {
namespace hopper {

using namespace tensor;

// Loads an element that no thread writes while the kernel runs, or gives zero.
__device__ __forceinline__ float load_element(const float* source, bool valid) {
  return load_or_zero(source, valid);
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* source, bool valid) {
  return {static_cast<unsigned short>(load_or_zero(&source->bits, valid))};
}

// --- Weights: what a block computes --------------------------------------------------------------

// The MMA's operand type: the tensor's own, or scaled fp16 for float32 (see scale.cuh).
using Factor = Either<C::scaled_fp16, Float16, Operand>::type;
__device__ __forceinline__ float round_factor(float value) {
  return C::ties_to_even ? round_to_even_tf32(value) : round_operand_to_tf32(value);
}
constexpr int kInterleave = C::scaled_fp16 ? 8 : kVector;
static_assert(C::interleaved_images * C::interleaved_strips == kInterleave,
              "members fill 16 bytes");
static_assert(!C::scaled_fp16 ||
                  (kScalarBytes == 4 && !C::in_channels_last && !C::grad_channels_last),
              "contiguous float32");

// A group's input channels in memory. In volumes, group_in counts them once for each tap of the
// depth, and images are output planes.
constexpr int kInChannels = C::group_in / Depth::kernel;
using InChannel = DepthChannel<kInChannels>;
static_assert(!Depth::exists || (!C::in_channels_last && !C::grad_channels_last),
              "contiguous volumes");

constexpr int kOutputs = 64;  // the M of a wgmma: output channels
constexpr int kConsumers = 2;
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kOctet = 8;  // input channels
constexpr int kPlaneChannels = kOctet * C::mma_octets;
constexpr int kColumns = C::mma_taps * kPlaneChannels;  // the N of a wgmma
constexpr int kAccs = kColumns / 2;                     // accumulators of a thread for one wgmma
static_assert(C::mma_octets == 1 || C::mma_taps == 1 || C::dilation_width == 1,
              "taps and octets are core matrices at equal distances");

constexpr int kPlanes = ceil_div(C::group_in, kPlaneChannels);
constexpr int kSegments = kPlanes * C::kernel_rows;
constexpr int kSlices = kConsumers / C::channel_groups;  // consumers with different segments
constexpr int kBlockSegments = C::segments * kSlices;
// The most planes that a block's segments lie in.
constexpr int kBlockPlanes = kBlockSegments % C::kernel_rows == 0 ? kBlockSegments / C::kernel_rows
                             : C::kernel_rows % kBlockSegments == 0
                                 ? 1
                                 : (kBlockSegments - 2) / C::kernel_rows + 2;

constexpr int kRowBlocks = ceil_div(C::kernel_height, C::kernel_rows);
constexpr int kPieces = ceil_div(C::kernel_width, C::mma_taps);
constexpr int kSegmentBlocks = ceil_div(kSegments, kBlockSegments);
// Every kClasses-th plane of grad_output begins equally far from a multiple of 16 bytes; the
// channels of a tile are such planes.
constexpr int kClasses = C::plane_classes;
static_assert(C::group_out % kClasses == 0, "the same in all groups");
constexpr int kOutputBlocks =
    kClasses * ceil_div(C::group_out / kClasses, C::channel_groups* kOutputs);
// Tiles of the same output channels; they have consecutive indices.
constexpr int kSameOutputs = kSegmentBlocks * kPieces * kRowBlocks;

// The weights that a block computes.
struct Tile {
  int segment;     // first segment
  int piece;       // piece of the kernel's columns, mma_taps each
  int kernel_row;  // first row
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
  // The n-th of the tile's output channels, in the group; it may not exist.
  __device__ int channel(int n) const { return output + n * kClasses; }

  __device__ int plane() const { return segment / C::kernel_rows; }
  // The index of this tile among those of the same output channels.
  __device__ int number() const {
    const int rows = kernel_row / C::kernel_rows;
    return segment / kBlockSegments + kSegmentBlocks * (piece + kPieces * rows);
  }
  __device__ bool has_bias() const { return number() == 0; }
};

// --- Pixels: how blocks walk through images ------------------------------------------------------

// Output rows of a walk are kRowStep apart and start at one of kRowStep residues. From one to the
// next, input rows advance by kRowAdvance dilations.
constexpr int kRowGcd = gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / kRowGcd;
constexpr int kRowAdvance = C::stride_height / kRowGcd;
// Input rows that a step reads and the step before did not.
constexpr int kNewRows = kRowAdvance < C::kernel_rows ? kRowAdvance : C::kernel_rows;
constexpr int kOldRows = C::kernel_rows - kNewRows;

constexpr int kSteps = C::steps;  // steps of a strip of rows
constexpr int kCoveredRows = kSteps * kRowStep * C::interleaved_strips;
static_assert(kCoveredRows >= C::out_height, "strips cover the image");

constexpr int kBodyColumns = 8;  // columns that a consumer takes at a time
static_assert(C::stage_columns % kBodyColumns == 0, "");

// If rows of grad_output are not multiples of 16 bytes, a step's columns begin up to `lead` columns
// early, at a multiple of 16 bytes in memory.
static_assert(C::lead < kVector, "");
constexpr int kRowColumns = round_up(C::out_width + C::lead, kBodyColumns);
constexpr int kStripColumns = C::strip_stages * C::stage_columns;
constexpr int kStrips = ceil_div(kRowColumns, kStripColumns);
constexpr int kWalksPerImage = kRowStep * kStrips;

// The columns of a strip. The last strip of a row, and its last stage, may be narrower.
__device__ __forceinline__ int columns_of(int strip) {
  return kRowColumns % kStripColumns == 0 ? kStripColumns
                                          : min(kStripColumns, kRowColumns - strip * kStripColumns);
}

// The estimated cost of the steps of a strip of rows: for one strip of columns, for all but the
// last strip, and for all. The planner gives the costs of a step; their unit does not matter.
constexpr long long kStripWeight = static_cast<long long>(kSteps) * C::strip_weight;
constexpr long long kLastStrip = (kStrips - 1) * kStripWeight;
constexpr long long kRowsWeight =
    kLastStrip + static_cast<long long>(kSteps) * C::last_strip_weight;

// A step of a walk, found by the cost of all steps before it.
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

// Consecutive steps of a walk that one block takes.
struct Run {
  int image;  // image of member 0
  int residue;
  int strip;
  int step;  // first step
  int steps;

  // The output row of the run's i-th step, in the first strip of rows.
  __device__ int output_row(int i) const { return residue + kRowStep * (step + i); }
};

// A worker's share of all pixels, run by run: shares have about equal costs.
struct Share {
  Place at;
  Place end;

  __device__ Share(int worker, int workers, int batch)
      : at(weight(batch) * worker / workers), end(weight(batch) * (worker + 1) / workers) {}

  __device__ static long long weight(int batch) {
    return ceil_div(batch, C::interleaved_images) * (kRowStep * kRowsWeight);
  }
  __device__ bool more() const {
    return at.walk < end.walk || (at.walk == end.walk && at.step < end.step);
  }
  __device__ Run next() {
    Run run;
    run.strip = at.walk % kStrips;
    run.residue = at.walk / kStrips % kRowStep;
    run.image = at.walk / kWalksPerImage * C::interleaved_images;
    run.step = at.step;
    run.steps = (at.walk < end.walk ? kSteps : end.step) - at.step;
    ++at.walk;
    at.step = 0;
    return run;
  }
};

// How the blocks of a launch divide the tiles and pixels. Each warp role computes its block's part
// itself: values that all roles kept would take registers from the consumers, which have none to
// spare.
struct Partition {
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

// An input row in shared memory begins at a multiple of 4 elements of the tensor, `kShift` columns
// before the first column that is read.
constexpr int kQuad = 4;  // columns that are loaded together, or channels of a channels-last tensor
constexpr int kFirstColumn = -C::lead * C::stride_width - C::padding_left;
constexpr int kShift = C::vector_input && !C::in_channels_last
                           ? kFirstColumn - floor_div(kFirstColumn, kQuad) * kQuad
                           : 0;
// The columns of an input row that this many columns of an output row read.
__host__ __device__ constexpr int tile_columns(int columns) {
  return round_up(kShift + (columns - 1 + C::lead) * C::stride_width +
                      (C::mma_taps - 1) * C::dilation_width + 1,
                  kQuad);
}
constexpr int kTileColumns = tile_columns(kStripColumns);

// Distances in units of 16 bytes, which wgmma's descriptors use.
constexpr int kColumnVectors = kOctet * C::mma_octets;
constexpr int kPlaneVectors = kTileColumns * kColumnVectors;
constexpr int kPartVectors = kBlockPlanes * kPlaneVectors;
constexpr int kRowVectors = C::parts * kPartVectors;

// A stage of grad_output has a row of columns for every channel and member. Where all channels and
// members of an output row begin equally far from a multiple of 16 bytes, rows in shared memory
// begin at one. Otherwise (`kShifted`) they begin as far beyond it as they do in global memory. In
// either case units of 16 bytes are copied as they are. Consumers read a column of 8 consecutive
// rows at a time: rows are an odd number of units apart, so that these lie in different banks.
constexpr bool kShifted = !C::grad_channels_last && C::grad_vector < kVector;
constexpr int kStageChannels = C::channel_groups * kOutputs;
// If a TMA box brings the whole stage (`grad_boxes`), its rows of 64 or 128 bytes are dense, and
// TMA's swizzle spreads the units of 8 consecutive rows over the banks.
constexpr int kStageUnits = C::stage_columns / kVector + (kShifted ? 1 : 0);
constexpr int kRowBytes = C::grad_boxes ? kStageUnits * 16 : (kStageUnits | 1) * 16;
static_assert(!C::grad_boxes || ((kRowBytes == 64 || kRowBytes == 128) && !kShifted &&
                                 !C::grad_channels_last && C::interleaved_images == kInterleave),
              "a TMA box can describe a stage");
// If rows of grad_output follow each other in the tensor map without a gap (`lead`), a box contains
// parts of other rows beyond its row's ends, which are cleared.
constexpr bool kClears = C::grad_boxes && C::lead > 0;
// The swizzle of a row: what the byte offsets of its units are XORed with.
__device__ __forceinline__ constexpr int swizzle_of(int row) {
  return C::grad_boxes ? row * kRowBytes / 128 % kStageUnits * 16 : 0;
}
constexpr int kStageRows = kStageChannels * kInterleave;
// A consumer's lane has kLaneMembers consecutive members. These lie far apart in a stage, and the
// rows of neighbouring lanes lie side by side.
constexpr int kLaneMembers = kInterleave / 4;
__device__ __forceinline__ constexpr int stage_row(int channel, int member) {
  return (member % kLaneMembers * kStageChannels + channel) * 4 + member / kLaneMembers;
}
// A warp reads one pixel of all members of a channels-last tensor: padding between the members
// avoids bank conflicts.
constexpr int kPixelBytes = kStageChannels * kScalarBytes;
constexpr int kMemberBytes = C::stage_columns * kPixelBytes + 8 * kScalarBytes;
constexpr int kStageBytes =
    C::grad_channels_last ? kInterleave * kMemberBytes : kStageRows * kRowBytes;

// The core matrices of a wgmma overlap where taps share columns. compute-sanitizer assumes that
// they lie one behind the other, and what it assumes to be read beyond the last input row must be
// shared memory too.
constexpr int kInputRing = 0;
constexpr int kGradRing = round_up(C::input_stages * kRowVectors * 16, C::grad_boxes ? 1024 : 16);
constexpr int kBarriers = kGradRing + C::grad_stages * kStageBytes;
static_assert(C::input_stages >= C::kernel_rows + kNewRows, "a step's rows, and some to come");

// For each consumer thread and each of its two channels, a count of groups with numbers that are
// subnormal in float16.
using Counters = unsigned[kConsumers * 128][2];

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier grad_full[C::grad_stages];
  Barrier grad_empty[C::grad_stages];
  Barrier box_full[C::grad_stages];  // the box has arrived, but is not cleared
};
constexpr int kCounters = kBarriers + sizeof(Barriers);
static_assert(kCounters + (C::scaled_fp16 ? sizeof(Counters) : 0) <= C::shared_bytes, "");

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}
// The counts of the calling thread.
__device__ __forceinline__ unsigned (&counters())[2] {
  return (*reinterpret_cast<Counters*>(shared_memory() + kCounters))[threadIdx.x - 128];
}

// A position in two laps of a ring of stages, whose mbarrier parities differ. Producers start one
// lap ahead: all stages are empty.
template <int kRingStages>
struct Ring {
  int position;

  __device__ explicit Ring(int laps) : position(laps * kRingStages) {}
  __device__ int stage() const {
    return position < kRingStages ? position : position - kRingStages;
  }
  __device__ unsigned parity() const { return position >= kRingStages; }
  // The position this many stages further on.
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
