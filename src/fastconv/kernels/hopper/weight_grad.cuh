// Weight gradient on Hopper's tensor cores.
//
// grad[m, i, tap] = sum over images and output pixels of
// grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// A warpgroup multiplies 64 output channels (rows of wgmma) by input channels and taps (columns),
// and sums over pixels. wgmma wants 16 bytes of the sum's index side by side. Were they
// neighbouring pixels, every tap would need the input shifted by another number of bytes. So they
// are the same pixel of 4 images, or of 4 strips of rows of one image (8 for 16-bit types): the
// phases.
//
//   input       [kernel row][plane][column][octet][8 channels][phases]       in shared memory
//   grad_output [64 channels][phases][columns]                               there as it is, or
//               [phases][column][64 channels]                                if it is channels-last
//
// One tap of 8 channels in one column is 128 bytes, a core matrix, and a tap is nothing but another
// start address. A product takes two neighbouring columns of all phases, for product_taps taps of
// one kernel row and product_octets octets of channels. The output's gradient goes through
// registers, where it is rounded or split.
//
// A block walks down the image, in steps: one output row of every phase, over a strip of columns.
// Steps that follow each other share input rows (dilated rows: a walk takes every dilation-th
// output row), so input rows are in a ring, and each is loaded once for a walk.
//
// A segment is a kernel row of a plane of channels: one product wide. A warpgroup has the sums of
// `segments` of them. The block's two warpgroups either have different segments, or, with
// channel_groups = 2, the same of different output channels.
//
// One block per processor and three warpgroups, that work at the same time:
//   producers  warps 0 and 1 copy grad_output to a ring of stages of a few columns, by bulk copies
//              of a row's columns; warps 2 and 3 load input rows to registers, transpose and round
//              or split them, and write them to theirs. Padding is part of the copy.
//   consumers  two warpgroups multiply.
//
// The tensor core truncates as it accumulates, so that errors grow with the length of its sums.
// After every flush_steps steps sums are added to the block's own slots of a workspace. float32
// with `parts` = 2 (x = high + low, both with TF32's mantissa, and three products): they are added
// to totals in registers first, after every few columns. A second kernel adds the slots of all
// blocks in a fixed order: the same bits every time.
//
// With `bias`, consumers also add up what they load of grad_output, as it is before it is rounded:
// the gradient of the bias. All of them do, since they have no time for conditions; the second
// kernel takes the sums of one of those that see the same channels.
#pragma once
#include "hopper/operand.cuh"
#include "include/tile.cuh"

namespace fastconv {
namespace hopper {

using C = Config;
using Scalar = C::Scalar;
using Operand = OperandOf<Scalar>::type;

// --- The products: what a block computes ---------------------------------------------------------

constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr int kVector = 16 / kScalarBytes;  // elements in 16 bytes
constexpr int kPhases = kVector;
static_assert(C::phase_images * C::phase_strips == kPhases, "16 bytes of them");

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
constexpr int kOutputBlocks = ceil_div(C::group_out, C::channel_groups* kOutputs);

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
    output = index % kOutputBlocks * (C::channel_groups * kOutputs);
    group = index / kOutputBlocks;
  }

  __device__ int plane() const { return segment / C::kernel_rows; }
  // Whether no tile of the same output channels comes before this one.
  __device__ bool has_bias() const { return segment == 0 && piece == 0 && kernel_row == 0; }
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
static_assert(kSteps * kRowStep * C::phase_strips >= C::out_height, "strips cover the image");

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

// What a step takes, in any unit: of one strip, and of all strips of one row.
constexpr long long kLastStrip = static_cast<long long>(kStrips - 1) * C::strip_weight;
constexpr long long kRowWeight = kLastStrip + C::last_strip_weight;

// A step of a walk, found by the weight of what comes before it.
struct Place {
  int walk;
  int step;

  __device__ explicit Place(long long weight) {
    const long long rest = weight % (kSteps * kRowWeight);
    const bool last = rest >= kSteps * kLastStrip;
    const int strip = last ? kStrips - 1 : static_cast<int>(rest / (kSteps * C::strip_weight));
    const long long of_strip = rest - static_cast<long long>(strip) * kSteps * C::strip_weight;
    walk = static_cast<int>(weight / (kSteps * kRowWeight)) * kStrips + strip;
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
    return ceil_div(batch, C::phase_images) * kRowStep * kSteps * kRowWeight;
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
constexpr int kStageUnits = C::stage_columns / kVector + (kShifted ? 1 : 0);
constexpr int kRowBytes = (kStageUnits | 1) * 16;
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

constexpr int kInputRing = 0;
constexpr int kGradRing = kInputRing + C::input_stages * kRowVectors * 16;
constexpr int kBarriers = kGradRing + C::grad_stages * kStageBytes;
static_assert(kBarriers + 16 * (C::input_stages + C::grad_stages) <= C::shared_bytes, "");
static_assert(C::input_stages >= C::kernel_rows + kNewRows, "a step's rows, and some to come");

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier grad_full[C::grad_stages];
  Barrier grad_empty[C::grad_stages];
};

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
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

// --- Producers: the output's gradient ------------------------------------------------------------

constexpr int kProducers = 64;  // threads, for each of the two tensors
constexpr int kGradWarps = kProducers / 32;
constexpr int kInImage = C::groups * C::group_in * C::in_height * C::in_width;
constexpr int kInColumn = C::in_channels_last ? C::groups * C::group_in : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInChannel = C::in_channels_last ? 1 : C::in_height * C::in_width;
constexpr int kOutImage = C::groups * C::group_out * C::out_height * C::out_width;
constexpr int kOutChannel = C::out_height * C::out_width;

// By how many columns a step begins early: all phases and channels of a row are aligned alike.
__device__ __forceinline__ int early(int output_row) {
  return C::lead == 0 ? 0 : output_row * C::out_width % kVector;
}

// Where a phase of a step lies in grad_output.
struct PhasePlace {
  int image;
  int row;
  bool exists;

  // From where phase 0 lies.
  __device__ PhasePlace(int first_image, int first_row, int phase, int batch) {
    image = first_image + phase % C::phase_images;
    row = first_row + phase / C::phase_images * (kSteps * kRowStep);
    exists = image < batch && row < C::out_height;
  }
};

// Part of a step that fills a stage.
struct StagePlace {
  int image;  // of phase 0
  int row;
  int column;   // first
  int columns;  // that consumers read
};

// Elements from the last multiple of 16 bytes to an address.
__device__ __forceinline__ int misalignment(const Scalar* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) / kScalarBytes % kVector);
}

// Units of 16 bytes of a row's stage, from `column` of the row on; [begin, end) is what a bulk copy
// takes, all that lie in the row as a whole.
struct Units {
  int column;
  int begin;
  int end;
  int count;

  // `row` is any address that is aligned as the row's first column.
  __device__ Units(const Scalar* row, const StagePlace& place, bool exists) {
    column = place.column - (kShifted ? misalignment(row) : early(place.row));
    count = place.columns / kVector + (kShifted ? 1 : 0);
    begin = column < 0 ? 1 : 0;
    end = max(min(count, floor_div(C::out_width - column, kVector)), begin);
    if (!exists) end = begin;
  }

  __device__ int bytes() const { return (end - begin) * 16; }
};

// A warp's part of the copies of a stage: some channels' rows in all phases. Whole units inside of
// a row go by one bulk copy; the others, and what lies beyond a row's ends, by lanes.
struct RowCopier {
  static constexpr int kChannels = kStageChannels / kGradWarps;

  const Scalar* channels;  // the first, of image 0
  int count;               // of channels that exist
  int first;               // of the stage's channels
  int lane;

  __device__ RowCopier(const Scalar* grad_output, const Tile& tile, int thread) {
    first = thread / 32 * kChannels;
    lane = thread % 32;
    const int channel = tile.output + first;
    channels =
        grad_output + static_cast<long long>(tile.group * C::group_out + channel) * kOutChannel;
    count = C::group_out % kStageChannels == 0 ? kChannels
                                               : max(min(kChannels, C::group_out - channel), 0);
  }

  __device__ __forceinline__ void copy(unsigned char* stage, Barrier* barrier, int batch,
                                       const StagePlace& place) const {
#pragma unroll 1
    for (int phase = 0; phase < kPhases; ++phase) {
      const PhasePlace of(place.image, place.row, phase, batch);
      const Scalar* const row =
          channels +
          (of.exists ? static_cast<long long>(of.image) * kOutImage + of.row * C::out_width : 0);
      unsigned char* const target = stage + stage_row(first, phase) * kRowBytes;
      if constexpr (!C::grad_bulk) {
        copy_all(target, row, place, of.exists);
      } else {
        if (of.exists && is_elected()) copy_inside(target, row, barrier, place);
        if (!of.exists || has_edges(place)) copy_edges(target, row, place, of.exists);
      }
    }
  }

  // Whether some row of the stage has other than whole units, or may have.
  __device__ static __forceinline__ bool has_edges(const StagePlace& place) {
    const int first = place.column - (kShifted ? kVector - 1 : early(place.row));
    const int end = place.column - early(place.row) + place.columns + (kShifted ? kVector : 0);
    return first < 0 || end > C::out_width;
  }

  // Called by the elected lane. All operands are the same for the whole warp.
  __device__ __forceinline__ void copy_inside(unsigned char* target, const Scalar* row,
                                              Barrier* barrier, const StagePlace& place) const {
    if constexpr (!kShifted) {
      const Units units(row, place, true);  // of any row
      if (units.bytes() == 0) return;
      barrier_expect(barrier, count * units.bytes());
      const Scalar* source = row + (units.column + units.begin * kVector);
      unsigned char* to = target + units.begin * 16;
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        bulk_load(to, source, units.bytes(), barrier);
        to += 4 * kRowBytes;
        source += kOutChannel;
      }
    } else {
      int bytes = 0;
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        const Scalar* const of = row + i * kOutChannel;
        const Units units(of, place, true);
        bytes += units.bytes();
        if (units.bytes() == 0) continue;
        bulk_load(target + i * (4 * kRowBytes) + units.begin * 16,
                  of + (units.column + units.begin * kVector), units.bytes(), barrier);
      }
      barrier_expect(barrier, bytes);
    }
  }

  // Copies what copy_inside leaves out, a row a lane; zeros beyond the row's ends.
  __device__ __forceinline__ void copy_edges(unsigned char* target, const Scalar* row,
                                             const StagePlace& place, bool exists) const {
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      const Scalar* const source = row + i * kOutChannel;
      unsigned char* const to = target + i * (4 * kRowBytes);
      const Units units(source, place, exists);
      if (units.begin > 0) copy_unit(to, source, units.column, exists);
#pragma unroll 1
      for (int unit = units.end; unit < units.count; ++unit) {
        copy_unit(to + unit * 16, source, units.column + unit * kVector, exists);
      }
    }
  }

  // Copies everything: neighbouring lanes have neighbouring units.
  __device__ __forceinline__ void copy_all(unsigned char* target, const Scalar* row,
                                           const StagePlace& place, bool exists) const {
#pragma unroll 2
    for (int i = lane; i < count * kStageUnits; i += 32) {
      const int channel = i / kStageUnits;
      const int unit = i % kStageUnits;
      const Scalar* const source = row + channel * kOutChannel;
      const Units units(source, place, exists);
      if (unit < units.count) {
        copy_unit(target + channel * (4 * kRowBytes) + unit * 16, source,
                  units.column + unit * kVector, exists);
      }
    }
  }

  // Copies 16 bytes of a row, from a column on; zeros beyond its ends, or if it does not exist
  // (then `row` is just an aligned address).
  __device__ static __forceinline__ void copy_unit(unsigned char* target, const Scalar* row,
                                                   int column, bool exists) {
    Scalar* const unit = reinterpret_cast<Scalar*>(target);
    const bool inside = column >= 0 && column + kVector <= C::out_width;
    if (!kShifted && (inside || !exists)) {
      copy_elements<kVector>(unit, row + (exists ? column : 0), exists);
      return;
    }
    constexpr int kCopied = gcd(C::out_width, C::grad_vector);  // a row has whole ones
#pragma unroll
    for (int i = 0; i < kVector; i += kCopied) {
      const int at = column + i;
      const bool valid = exists && at >= 0 && at < C::out_width;
      copy_elements<kCopied>(unit + i, row + (valid ? at : 0), valid);
    }
  }
};

// The same for channels-last tensors: a warp has every other phase. If all channels of a pixel are
// the block's, a phase's columns are one copy, otherwise each column.
struct PixelCopier {
  static constexpr int kOutChannels = C::groups * C::group_out;
  static constexpr bool kWholePixels = kOutChannels == kStageChannels;
  static constexpr int kPixelVectors = kStageChannels / kVector;

  const Scalar* channels;
  int count;  // of channels that exist
  int warp;
  int lane;

  __device__ PixelCopier(const Scalar* grad_output, const Tile& tile, int thread) {
    channels = grad_output + (tile.group * C::group_out + tile.output);
    count = min(kStageChannels, C::group_out - tile.output);
    warp = thread / 32;
    lane = thread % 32;
  }

  __device__ __forceinline__ void copy(unsigned char* stage, Barrier* barrier, int batch,
                                       const StagePlace& place) const {
#pragma unroll 1
    for (int phase = warp; phase < kPhases; phase += kGradWarps) {
      const PhasePlace of(place.image, place.row, phase, batch);
      const int columns = of.exists ? min(place.columns, C::out_width - place.column) : 0;
      const Scalar* const pixel = channels + static_cast<long long>(of.image) * kOutImage +
                                  (of.row * C::out_width + place.column) * kOutChannels;
      unsigned char* const target = stage + phase * kPhaseBytes;
      if (C::grad_bulk && columns > 0 && is_elected()) copy_inside(target, pixel, columns, barrier);
      copy_rest(target, pixel, C::grad_bulk ? max(columns, 0) : 0, columns, place.columns);
    }
  }

  __device__ __forceinline__ void copy_inside(unsigned char* target, const Scalar* pixel,
                                              int columns, Barrier* barrier) const {
    const int bytes = count * kScalarBytes;
    barrier_expect(barrier, columns * bytes);
    if constexpr (kWholePixels) {
      bulk_load(target, pixel, columns * bytes, barrier);
    } else {
#pragma unroll 4
      for (int i = 0; i < columns; ++i) {
        bulk_load(target + i * kPixelBytes, pixel + i * kOutChannels, bytes, barrier);
      }
    }
  }

  // Columns from `first` to `end`; zeros from `columns` on.
  __device__ __forceinline__ void copy_rest(unsigned char* target, const Scalar* pixel, int first,
                                            int columns, int end) const {
    for (int i = first * kPixelVectors + lane; i < end * kPixelVectors; i += 32) {
      const int column = i / kPixelVectors;
      const int channel = i % kPixelVectors * kVector;
      Scalar* const unit = reinterpret_cast<Scalar*>(target + i * 16);
#pragma unroll
      for (int j = 0; j < kVector; j += C::grad_vector) {
        const bool exists = column < columns && channel + j < count;
        copy_elements<C::grad_vector>(
            unit + j, exists ? pixel + column * kOutChannels + channel + j : channels, exists);
      }
    }
  }
};

template <bool kChannelsLast>
struct CopierFor {
  using type = RowCopier;
};
template <>
struct CopierFor<true> {
  using type = PixelCopier;
};
using GradCopier = CopierFor<C::grad_channels_last>::type;

// Arrives when all that this thread has written or copied to shared memory is there. What is copied
// element by element, 2 bytes each, is written at once.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
  constexpr int kCopied =
      C::grad_channels_last ? C::grad_vector : gcd(C::out_width, C::grad_vector);
  if constexpr (kCopied * kScalarBytes >= 4) {
    barrier_arrive_after_copies(barrier);
  } else {
    barrier_arrive(barrier);
  }
}

// Two warps: copy grad_output, as many stages ahead as there are.
__device__ __forceinline__ void load_grad(const Scalar* grad_output, const Work& work) {
  Share share = work.share();
  const GradCopier copier(grad_output, work.tile(), static_cast<int>(threadIdx.x));
  Ring<C::grad_stages> at(1);
  while (share.more()) {
    const Run run = share.next();
    const int columns = columns_of(run.strip);
#pragma unroll 1
    for (int step = 0; step < run.steps; ++step) {
#pragma unroll 1
      for (int column = 0; column < columns; column += C::stage_columns) {
        Barrier* const full = &barriers().grad_full[at.stage()];
        barrier_wait(&barriers().grad_empty[at.stage()], at.parity());
        // Lanes may have written to the stage, where bulk copies will.
        fence_async_shared();
        __syncwarp();
        copier.copy(shared_memory() + kGradRing + at.stage() * kStageBytes, full, work.batch,
                    {run.image, run.output_row(step), run.strip * kStripColumns + column,
                     min(C::stage_columns, columns - column)});
        __syncwarp();
        arrive_after_copies(full);
        at.advance();
      }
    }
  }
}

// --- Producers: the input ------------------------------------------------------------------------

using Quad = Vector<Scalar, kQuad>;

// A warp's unit: 8 channels of 16 columns. A lane has 4 columns of a channel, in all phases; of
// channels-last tensors 4 channels of a column.
constexpr int kBlockOctets = kBlockPlanes * C::product_octets;
constexpr int kUnitColumns = 16;

// Of an input row, for so many columns of an output row.
__host__ __device__ constexpr int units_of(int columns) {
  return kBlockOctets * ceil_div(tile_columns(columns), kUnitColumns);
}
constexpr int kUnits = units_of(kStripColumns);
constexpr int kInputWarps = kProducers / 32;

// Input rows from a strip of rows to the next.
constexpr int kStripRows = kSteps * kRowStep * C::stride_height;

__device__ __forceinline__ float load_element(const float* source, bool valid) {
  return load_or_zero(source, valid);
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* source, bool valid) {
  return {load_or_zero(&source->bits, valid)};
}

__device__ __forceinline__ bool is_below(int value, int bound) {
  return static_cast<unsigned>(value) < static_cast<unsigned>(bound);
}

// Starts loading 4 neighbours, of which the first is number `first` of `count`; zeros where there
// are none. A vector is there as a whole or not at all.
__device__ __forceinline__ Quad load_quad(const Scalar* source, int first, int count) {
  Quad quad;
  if constexpr (C::vector_input && kScalarBytes == 4) {
    const uint4 bits = load_or_zero(reinterpret_cast<const uint4*>(source), is_below(first, count));
    quad = reinterpret_cast<const Quad&>(bits);
  } else if constexpr (C::vector_input) {
    const uint2 bits = load_or_zero(reinterpret_cast<const uint2*>(source), is_below(first, count));
    quad = reinterpret_cast<const Quad&>(bits);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      quad.element[i] = load_element(source + i, is_below(first + i, count));
    }
  }
  return quad;
}

using Phases = Vector<Scalar, kPhases>;

// Writes one column's phases as the tensor core wants them: rounded to TF32, or in two such parts.
__device__ __forceinline__ void store_phases(unsigned char* target, Vector<float, 4> phases) {
  Vector<float, 4> low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = phases.element[i];
    if constexpr (C::parts == 2) {
      phases.element[i] = round_to_tf32(value);
      low.element[i] = round_operand_to_tf32(value - phases.element[i]);
    } else {
      phases.element[i] = round_operand_to_tf32(value);
    }
  }
  if constexpr (C::parts == 2) {
    *reinterpret_cast<Vector<float, 4>*>(target + kPartVectors * 16) = low;
  }
  *reinterpret_cast<Vector<float, 4>*>(target) = phases;
}
// 16-bit types as they are.
template <class Half>
__device__ __forceinline__ void store_phases(unsigned char* target, Vector<Half, 8> phases) {
  *reinterpret_cast<Vector<Half, 8>*>(target) = phases;
}

// What a lane loads: its place in the first of its warp's units. Units follow each other along
// octets, then along columns.
struct InputLoader {
  const Scalar* row;  // row 0 of image 0, of the lane's channel
  int channel;        // in an octet
  int channels_left;  // in the group, from there on
  int column;         // in a unit
  int first_column;   // of the tile, if the strip is the first
  int warp;
  int lane;

  __device__ InputLoader(const Scalar* input, const Tile& tile, int thread) {
    warp = thread / 32;
    lane = thread % 32;
    channel = C::in_channels_last ? lane % 2 * kQuad : lane % kOctet;
    column = C::in_channels_last ? lane / 2 : lane / kOctet * kQuad;
    const int first_channel = tile.plane() * kPlaneChannels + channel;
    channels_left = C::group_in - first_channel;
    first_column = kFirstColumn - kShift + tile.piece * (C::product_taps * C::dilation_width);
    row = input + static_cast<long long>(tile.group * C::group_in + first_channel) * kInChannel;
  }

  __device__ static int octet(int unit) { return unit % kBlockOctets; }
  __device__ static int unit_column(int unit) { return unit / kBlockOctets * kUnitColumns; }
  __device__ bool exists(int unit) const {
    return (kUnits % (kInputWarps * C::batch) == 0 || unit < kUnits) &&
           (kTileColumns % kUnitColumns == 0 || unit_column(unit) + column < kTileColumns);
  }

  // Starts loading a lane's part of a unit, of input row y for the first strip of rows. `images`
  // are left, from the first on; `first` is the strip's column.
  __device__ __forceinline__ void load(const Scalar* image, int images, int y, int first, int unit,
                                       Quad (&quads)[kPhases]) const {
    const int x = first + first_column + unit_column(unit) + column;
    const int left = channels_left - octet(unit) * kOctet;
    const bool valid = exists(unit) && (C::in_channels_last ? is_below(x, C::in_width) : left > 0);
    // The neighbours are channels, or columns.
    const int number = C::in_channels_last ? 0 : x;
    const int count = !valid ? 0 : C::in_channels_last ? max(left, 0) : C::in_width;
    const Scalar* const source =
        image + (octet(unit) * kOctet * kInChannel + y * kInRow + x * kInColumn);
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      constexpr long long kImage = kInImage;
      const int of_image = phase % C::phase_images;
      const int below = phase / C::phase_images * kStripRows;
      const bool exists = of_image < images && is_below(y + below, C::in_height);
      quads[phase] =
          load_quad(source + (of_image * kImage + static_cast<long long>(below) * kInRow), number,
                    exists ? count : 0);
    }
  }

  // Writes it to a row of the ring.
  __device__ __forceinline__ void store(unsigned char* ring_row, int unit,
                                        const Quad (&quads)[kPhases]) const {
    if (!exists(unit)) return;
    const int plane = octet(unit) / C::product_octets;
    const int vector = plane * kPlaneVectors + octet(unit) % C::product_octets * kOctet + channel +
                       (unit_column(unit) + column) * kColumnVectors;
    constexpr int kNeighbour = C::in_channels_last ? 1 : kColumnVectors;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      Phases phases;
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) {
        phases.element[phase] = quads[phase].element[i];
      }
      store_phases(ring_row + (vector + i * kNeighbour) * 16, phases);
    }
  }

  // Loads units of a row and writes them to the ring, as soon as there is room.
  __device__ __forceinline__ void copy_row(const Scalar* image, int images, int y, int first,
                                           int units, const Ring<C::input_stages>& at) const {
    unsigned char* const ring_row = shared_memory() + kInputRing + at.stage() * (kRowVectors * 16);
#pragma unroll 1
    for (int unit = warp; unit < units; unit += kInputWarps * C::batch) {
      Quad quads[C::batch][kPhases];
#pragma unroll
      for (int k = 0; k < C::batch; ++k) {
        load(image, images, y, first, unit + kInputWarps * k, quads[k]);
      }
      if (unit == warp) barrier_wait(&barriers().input_empty[at.stage()], at.parity());
#pragma unroll
      for (int k = 0; k < C::batch; ++k) store(ring_row, unit + kInputWarps * k, quads[k]);
    }
    // With one unit there is nothing to do for the second warp but to wait.
    if (warp >= units) barrier_wait(&barriers().input_empty[at.stage()], at.parity());
  }
};

// Two warps: load the rows of every run.
__device__ __forceinline__ void load_input(const Scalar* input, const Work& work) {
  const Tile tile = work.tile();
  Share share = work.share();
  const InputLoader loader(input, tile, static_cast<int>(threadIdx.x) - kProducers);
  const int tap_row = tile.kernel_row * C::dilation_height - C::padding_top;
  Ring<C::input_stages> at(1);
  while (share.more()) {
    const Run run = share.next();
    const Scalar* const image = loader.row + static_cast<long long>(run.image) * kInImage;
    const int first_column = run.strip * (kStripColumns * C::stride_width);
    const int units = units_of(columns_of(run.strip));
    const int rows = run.steps * kNewRows + kOldRows;
    int y = run.output_row(0) * C::stride_height + tap_row;
    int until_skip = kNewRows;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      loader.copy_row(image, work.batch - run.image, y, first_column, units, at);
      fence_async_shared();
      __syncwarp();
      if (loader.lane == 0) barrier_arrive(&barriers().input_full[at.stage()]);
      at.advance();
      y += C::dilation_height;
      // Rows that no tap reads are left out.
      if (kRowAdvance > kNewRows && --until_skip == 0) {
        y += (kRowAdvance - kNewRows) * C::dilation_height;
        until_skip = kNewRows;
      }
    }
  }
}

// --- Consumers -----------------------------------------------------------------------------------

using Sums = float[C::segments][kSums];
// Of a thread, in groups of four that lie together in the workspace.
constexpr int kSlots = C::segments * kSums / 4;

// 4 columns of grad_output as left operands: two products, each in `parts` parts.
constexpr int kGroupColumns = 4;
constexpr int kGroupProducts = 2;
using Fragments = unsigned[C::parts][kGroupProducts][4];

__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
  const float rounded = round_to_tf32(value);
  high = __float_as_uint(rounded);
  low = __float_as_uint(round_operand_to_tf32(value - rounded));
}

// Where a thread's rows begin: of two channels, 8 apart, in its phases.
struct FragmentRows {
  int offsets[2][kLanePhases];  // bytes, in a stage
};

// 4 columns of a channel and phase, in pieces as wide as its start allows.
template <class T>
__device__ __forceinline__ Vector<T, kGroupColumns> load_columns(const unsigned char* row,
                                                                 int column) {
  Vector<T, kGroupColumns> columns;
  if constexpr (C::grad_channels_last) {
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
      columns.element[i] = *reinterpret_cast<const T*>(row + (column + i) * kPixelBytes);
    }
  } else {
    constexpr int kPiece = gcd(C::grad_vector, kGroupColumns);
    using Piece = Vector<T, kPiece>;
#pragma unroll
    for (int i = 0; i < kGroupColumns; i += kPiece) {
      const Piece piece = *reinterpret_cast<const Piece*>(row + (column + i) * kScalarBytes);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) columns.element[i + j] = piece.element[j];
    }
  }
  return columns;
}

// Of float32, a thread has one phase of two channels, 8 apart. Adds what it loads to their `bias`.
__device__ __forceinline__ void load_fragments(Fragments& fragments, float (&bias)[2],
                                               const unsigned char* stage, const FragmentRows& rows,
                                               int column, float) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto columns = load_columns<float>(stage + rows.offsets[half][0], column);
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
      unsigned& target = fragments[0][i / 2][half + i % 2 * 2];
      if constexpr (C::parts == 2) {
        split(columns.element[i], target, fragments[C::parts - 1][i / 2][half + i % 2 * 2]);
      } else {
        target = __float_as_uint(round_operand_to_tf32(columns.element[i]));
      }
    }
    if constexpr (C::bias) {
      bias[half] +=
          columns.element[0] + columns.element[1] + (columns.element[2] + columns.element[3]);
    }
  }
}

// Of 16-bit types, two neighbouring phases of two channels.
template <class Half>
__device__ __forceinline__ void load_fragments(Fragments& fragments, float (&bias)[2],
                                               const unsigned char* stage, const FragmentRows& rows,
                                               int column, Half) {
  if constexpr (C::grad_channels_last) {
#pragma unroll
    for (int k = 0; k < kGroupProducts; ++k) {
      load_transposed(fragments[0][k], stage + rows.offsets[0][0] + (column + 2 * k) * kPixelBytes);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto even = load_columns<Half>(stage + rows.offsets[half][0], column);
      const auto odd = load_columns<Half>(stage + rows.offsets[half][kLanePhases - 1], column);
#pragma unroll
      for (int i = 0; i < kGroupColumns; ++i) {
        fragments[0][i / 2][half + i % 2 * 2] =
            even.element[i].bits | static_cast<unsigned>(odd.element[i].bits) << 16;
      }
    }
  }
  if constexpr (C::bias) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float columns[kGroupColumns];
#pragma unroll
      for (int i = 0; i < kGroupColumns; ++i) {
        const unsigned word = fragments[0][i / 2][half + i % 2 * 2];
        columns[i] = widen(Half{static_cast<unsigned short>(word)}) +
                     widen(Half{static_cast<unsigned short>(word >> 16)});
      }
      bias[half] += columns[0] + columns[1] + (columns[2] + columns[3]);
    }
  }
}

// Where in a stage a thread's fragments begin; `channel` is the warp's first.
__device__ __forceinline__ int first_fragment(int channel, int lane) {
  if constexpr (!C::grad_channels_last) {
    return stage_row(channel + lane / 4, lane % 4 * kLanePhases) * kRowBytes;
  } else if constexpr (kScalarBytes == 4) {
    return lane % 4 * kPhaseBytes + (channel + lane / 4) * kScalarBytes;
  } else {
    // load_transposed wants of a lane a row of one of four matrices, phases by channels: of 8
    // channels and of the next 8, in a column and in the next.
    return lane % 8 * kPhaseBytes + lane / 16 * kPixelBytes +
           (channel + lane / 8 % 2 * 8) * kScalarBytes;
  }
}

__device__ __forceinline__ void hold_sums(Sums& sums) {
#pragma unroll
  for (int i = 0; i < C::segments; ++i) hold_registers(sums[i]);
}

__device__ __forceinline__ bool is_first_lane() { return threadIdx.x % 32 == 0; }

// A warpgroup that multiplies. Sums take nearly all registers: what is easily found again is not
// kept.
struct Consumer {
  int fragment;     // where in a stage the thread's first fragment begins, in bytes
  int segment;      // first, from the first of the block's first plane
  unsigned origin;  // where in grad_output its first row begins, in elements: the last bits
  bool accumulate = false;
  // Sums of what was loaded: since the last flush, and until then.
  float bias[2] = {0.0f, 0.0f};
  float bias_total[2] = {0.0f, 0.0f};
  Ring<C::input_stages> row{0};  // the first row of a step
  Ring<C::grad_stages> grad{0};

  __device__ Consumer(const Scalar* grad_output, const Tile& tile) {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int warpgroup = thread / 128;
    const int channel = (C::channel_groups == 2 ? warpgroup * kOutputs : 0) + thread / 32 % 4 * 16;
    fragment = first_fragment(channel, thread % 32);
    segment = tile.segment - tile.plane() * C::kernel_rows +
              (C::channel_groups == 2 ? 0 : warpgroup * C::segments);
    const unsigned first = tile.group * C::group_out + tile.output + channel + thread % 32 / 4;
    origin =
        misalignment(grad_output) + first * kOutChannel + phase_distance(thread % 4 * kLanePhases);
  }

  __device__ __forceinline__ void flush_bias() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias_total[half] += bias[half];
      bias[half] = 0.0f;
    }
  }

  // Elements of grad_output from phase 0 to another one.
  __device__ static unsigned phase_distance(int phase) {
    return static_cast<unsigned>(phase % C::phase_images) * kOutImage +
           static_cast<unsigned>(phase / C::phase_images) * (kSteps * kRowStep * C::out_width);
  }

  // The thread's rows in the stages of a step.
  __device__ FragmentRows fragment_rows(int image, int output_row) const {
    constexpr int kNextHalf = C::grad_channels_last ? 8 * kScalarBytes : 8 * 4 * kRowBytes;
    const unsigned moved =
        static_cast<unsigned>(image) * kOutImage + static_cast<unsigned>(output_row) * C::out_width;
    FragmentRows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kLanePhases; ++i) {
        rows.offsets[half][i] = fragment + half * kNextHalf + i * (kStageChannels * 4 * kRowBytes);
        if constexpr (kShifted) {
          const unsigned element =
              origin + moved + half * 8u * kOutChannel + (i > 0 ? phase_distance(1) : 0u);
          rows.offsets[half][i] += static_cast<int>(element % kVector) * kScalarBytes;
        }
      }
    }
    return rows;
  }

  // The ring of input rows. Along the sum comes the neighbouring column, across it the next octet,
  // or if there is but one, the next tap.
  __device__ static Matrix ring() {
    return matrix(shared_memory() + kInputRing, C::stride_width * kColumnVectors * 16,
                  128 * (C::product_octets == 1 ? C::dilation_width : 1));
  }

  // Waits for rows of this step.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void wait_for_rows() const {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const Ring<C::input_stages> at = row + i;
      barrier_wait(&barriers().input_full[at.stage()], at.parity());
    }
  }

  // Gives back the step's first rows.
  __device__ __forceinline__ void release_rows(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (is_first_lane()) barrier_arrive(&barriers().input_empty[row.stage()]);
      row.advance();
    }
  }

  // Where each segment's products begin in the rows of this step: the lower half of a matrix, the
  // only one that differs.
  __device__ __forceinline__ void find_segments(unsigned (&starts)[C::segments],
                                                int early_columns) const {
    // Known at compile time where a warpgroup's first segment is a plane's first.
    constexpr bool kWholePlanes = C::segments % C::kernel_rows == 0;
    const int column = kShift + (C::lead - early_columns) * C::stride_width;
    const unsigned first = static_cast<unsigned>(ring()) + column * kColumnVectors +
                           (kWholePlanes ? segment / C::kernel_rows * kPlaneVectors : 0);
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
      const int at = kWholePlanes ? i : segment + i;
      starts[i] = first + (row + at % C::kernel_rows).stage() * kRowVectors +
                  at / C::kernel_rows * kPlaneVectors;
    }
  }

  // The products of 4 columns, `column` after where the segments start.
  template <int kLeftPart, int kRightPart>
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& fragments,
                                           const unsigned (&starts)[C::segments], int column,
                                           bool accumulate_first) const {
#pragma unroll
    for (int k = 0; k < kGroupProducts; ++k) {
#pragma unroll
      for (int i = 0; i < C::segments; ++i) {
        const int offset =
            (column + 2 * k) * (C::stride_width * kColumnVectors) + kRightPart * kPartVectors;
        const Matrix right = ring() >> 32 << 32 | (starts[i] + offset);
        wgmma<kColumns>(Operand{}, sums[i], fragments[kLeftPart][k], right,
                        k > 0 || accumulate_first);
      }
    }
  }

  // The products of a stage. While one group of them is computed, the next one's left operands are
  // loaded to other registers.
  __device__ __forceinline__ void multiply_stage(Sums& sums, Fragments (&fragments)[2],
                                                 unsigned (&starts)[C::segments],
                                                 const unsigned char* stage,
                                                 const FragmentRows& rows, int columns) {
#pragma unroll 1
    for (int column = 0; column < columns; column += kBodyColumns) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        load_fragments(fragments[group], bias, stage, rows, column + group * kGroupColumns,
                       Scalar{});
        wgmma_fence();
        multiply<0, 0>(sums, fragments[group], starts, group * kGroupColumns,
                       group > 0 || accumulate);
        wgmma_commit();
        wgmma_wait<1>();
      }
      accumulate = true;
      move_on(starts);
    }
  }

  // The same in two levels, for numbers in two parts. Large products come last: what small ones add
  // is not lost.
  __device__ __forceinline__ void multiply_stage_split(Sums& sums, Sums& totals,
                                                       Fragments (&fragments)[2],
                                                       unsigned (&starts)[C::segments],
                                                       const unsigned char* stage,
                                                       const FragmentRows& rows, int columns) {
#pragma unroll 1
    for (int column = 0; column < columns; column += kBodyColumns) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        constexpr int kLow = C::parts - 1;
        load_fragments(fragments[group], bias, stage, rows, column + group * kGroupColumns,
                       Scalar{});
        wgmma_fence();
        multiply<kLow, 0>(sums, fragments[group], starts, group * kGroupColumns, group > 0);
        multiply<0, kLow>(sums, fragments[group], starts, group * kGroupColumns, true);
        multiply<0, 0>(sums, fragments[group], starts, group * kGroupColumns, true);
        wgmma_commit();
      }
      wgmma_wait<0>();
      hold_sums(sums);
#pragma unroll
      for (int i = 0; i < C::segments; ++i) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) totals[i][j] += sums[i][j];
      }
      move_on(starts);
    }
  }

  __device__ __forceinline__ void move_on(unsigned (&starts)[C::segments]) const {
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
      starts[i] += kBodyColumns * C::stride_width * kColumnVectors;
    }
  }

  // The products of a step.
  __device__ __forceinline__ void compute(Sums& sums, Sums& totals, int image, int output_row,
                                          int columns) {
    unsigned starts[C::segments];
    Fragments fragments[2];
    find_segments(starts, early(output_row));
    const FragmentRows rows = fragment_rows(image, output_row);
#pragma unroll 1
    for (int column = 0; column < columns; column += C::stage_columns) {
      // Known at compile time where all stages are whole.
      const int stage_columns = kRowColumns % C::stage_columns == 0
                                    ? C::stage_columns
                                    : min(C::stage_columns, columns - column);
      barrier_wait(&barriers().grad_full[grad.stage()], grad.parity());
      const unsigned char* const stage = shared_memory() + kGradRing + grad.stage() * kStageBytes;
      if constexpr (C::parts == 2) {
        multiply_stage_split(sums, totals, fragments, starts, stage, rows, stage_columns);
      } else {
        multiply_stage(sums, fragments, starts, stage, rows, stage_columns);
      }
      __syncwarp();
      if (is_first_lane()) barrier_arrive(&barriers().grad_empty[grad.stage()]);
      grad.advance();
    }
    wgmma_wait<0>();
  }
};

// Where the sums for the bias are in the workspace, behind all slots: [block][warpgroup][channel].
__device__ __forceinline__ long long bias_slots(int blocks, int block, int warpgroup) {
  return static_cast<long long>(blocks) * (kConsumers * kSlots * 128 * 4) +
         (block * kConsumers + warpgroup) * kOutputs;
}

// Writes a consumer's sums for the bias; four lanes have the phases of a channel.
__device__ __forceinline__ void store_bias(const Consumer& consumer, float4* workspace,
                                           const Work& work) {
  const int thread = static_cast<int>(threadIdx.x) - 128;
  float* const target = reinterpret_cast<float*>(workspace) +
                        bias_slots(work.tiles * work.workers, blockIdx.x, thread / 128);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = consumer.bias_total[half] + consumer.bias[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (thread % 4 == 0) target[thread / 32 % 4 * 16 + thread % 32 / 4 + half * 8] = total;
  }
}

// Adds a thread's sums to its slots of the workspace, or sets those.
template <bool kSet>
__device__ __forceinline__ void flush(const Sums& sums, float4* slots) {
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const float* const four = &sums[i * 4 / kSums][i * 4 % kSums];
    const float4 values = make_float4(four[0], four[1], four[2], four[3]);
    if constexpr (kSet) {
      slots[i * 128] = values;
    } else {
      add_to_memory(slots + i * 128, values);
    }
  }
}
__device__ __forceinline__ void flush(Sums& sums, float4* slots, bool set) {
  hold_sums(sums);
  if (set) {
    flush<true>(sums, slots);
  } else {
    flush<false>(sums, slots);
  }
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int i = 0; i < C::segments; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) sums[i][j] = 0.0f;
  }
}

// A block's slots: [warpgroup][slot][thread].
__device__ __forceinline__ long long slots_of(int block, int warpgroup) {
  return (static_cast<long long>(block) * kConsumers + warpgroup) * (kSlots * 128);
}

__device__ __forceinline__ void consume(const Scalar* grad_output, float4* workspace,
                                        const Work& work) {
  Share share = work.share();
  Consumer consumer(grad_output, work.tile());
  const int thread = static_cast<int>(threadIdx.x) - 128;
  float4* const slots = workspace + slots_of(blockIdx.x, thread / 128) + thread % 128;
  Sums sums, more;
  // Where numbers are in two parts, `more` collects the sums.
  Sums& totals = C::parts == 2 ? more : sums;
  clear(totals);
  int steps = 0;  // since the last flush
  bool flushed = false;
  while (share.more()) {
    const Run run = share.next();
    consumer.wait_for_rows<0, kOldRows>();
#pragma unroll 1
    for (int step = 0; step < run.steps; ++step) {
      consumer.wait_for_rows<kOldRows, C::kernel_rows>();
      consumer.compute(sums, totals, run.image, run.output_row(step), columns_of(run.strip));
      consumer.release_rows(kNewRows);
      if (++steps == C::flush_steps) {
        flush(totals, slots, !flushed);
        flushed = true;
        steps = 0;
        consumer.accumulate = false;
        consumer.flush_bias();
        if constexpr (C::parts == 2) clear(totals);
      }
    }
    consumer.release_rows(kOldRows);
  }
  if (steps > 0 || !flushed) flush(totals, slots, !flushed);
  if constexpr (C::bias) store_bias(consumer, workspace, work);
}

__device__ __forceinline__ void weight_grad(const Scalar* grad_output, const Scalar* input,
                                            float4* workspace, const Work& work) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::input_stages; ++i) {
      barrier_init(&barriers().input_full[i], kInputWarps);
      barrier_init(&barriers().input_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::grad_stages; ++i) {
      barrier_init(&barriers().grad_full[i], kProducers);
      barrier_init(&barriers().grad_empty[i], kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    give_back_registers<C::producer_registers>();
    if (warp < 2) {
      load_grad(grad_output, work);
    } else {
      load_input(input, work);
    }
  } else {
    take_registers<C::consumer_registers>();
    consume(grad_output, workspace, work);
  }
}

// --- The second kernel ---------------------------------------------------------------------------

// One of four neighbouring sums of a thread: which weight it is.
struct Weight {
  int output;  // channels, in the group
  int input;
  int row;
  int column;

  __device__ Weight(const Tile& tile, int warpgroup, int slot, int thread, int element) {
    const int segment =
        tile.segment + slot * 4 / kSums + (C::channel_groups == 2 ? 0 : warpgroup * C::segments);
    const int core = slot * 4 % kSums / 4;  // of the product: octets of taps
    const int lane = thread % 32;
    output = tile.output + (C::channel_groups == 2 ? warpgroup * kOutputs : 0) + thread / 32 * 16 +
             lane / 4 + element / 2 * 8;
    input = segment / C::kernel_rows * kPlaneChannels + core % C::product_octets * kOctet +
            lane % 4 * 2 + element % 2;
    row = tile.kernel_row + segment % C::kernel_rows;
    column = tile.piece * C::product_taps + core / C::product_octets;
  }

  __device__ bool exists() const {
    return output < C::group_out && input < C::group_in && row < C::kernel_height &&
           column < C::kernel_width;
  }
};

// Adds up the slots of every weight, workers in order, and writes it where its strides say.
__device__ __forceinline__ void reduce(const float4* workspace, Scalar* grad, int first_tile,
                                       int tiles, int workers) {
  constexpr int kBlockSlots = kConsumers * kSlots * 128;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kBlockSlots; i += step) {
    const Tile tile(first_tile + i / kBlockSlots);
    const float4* const first = workspace + i;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      const float4 partial = first[static_cast<long long>(worker) * tiles * kBlockSlots];
      total.x += partial.x;
      total.y += partial.y;
      total.z += partial.z;
      total.w += partial.w;
    }
    const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Weight weight(tile, i / (kSlots * 128) % kConsumers, i / 128 % kSlots, i % 128, j);
      if (!weight.exists()) continue;
      grad[static_cast<long long>(tile.group * C::group_out + weight.output) *
               C::weight_stride_out +
           static_cast<long long>(weight.input) * C::weight_stride_in +
           static_cast<long long>(weight.row) * C::weight_stride_height +
           static_cast<long long>(weight.column) * C::weight_stride_width] =
          narrow<Scalar>(values[j]);
    }
  }
}

// Adds up the sums for the bias of every channel, workers in order.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int first_tile, int tiles, int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kStageChannels; i += step) {
    const int block = i / kStageChannels;
    const int channel = i % kStageChannels;
    const Tile tile(first_tile + block);
    if (!tile.has_bias() || tile.output + channel >= C::group_out) continue;
    float total = 0.0f;
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      const long long slots =
          bias_slots(tiles * workers, worker * tiles + block, channel / kOutputs);
      total += reinterpret_cast<const float*>(workspace)[slots + channel % kOutputs];
    }
    bias_grad[tile.group * C::group_out + tile.output + channel] = narrow<Scalar>(total);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(384, 1)
    weight_grad(const Config::Scalar* grad_output, const Config::Scalar* input, float4* workspace,
                int first_tile, int tiles, int workers, int batch) {
  fastconv::hopper::weight_grad(grad_output, input, workspace, {first_tile, tiles, workers, batch});
}

extern "C" __global__ void __launch_bounds__(256)
    reduce(const float4* workspace, Config::Scalar* grad, Config::Scalar* bias_grad, int first_tile,
           int tiles, int workers) {
  fastconv::hopper::reduce(workspace, grad, first_tile, tiles, workers);
  if constexpr (Config::bias) {
    fastconv::hopper::reduce_bias(workspace, bias_grad, first_tile, tiles, workers);
  }
}
