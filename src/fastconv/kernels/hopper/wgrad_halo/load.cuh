// The input: loaded to registers, transposed, rounded or split, and written to shared memory.
#pragma once
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/scale.cuh"

namespace fastconv {
namespace hopper {

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

// Input rows from a strip of rows to the next.
constexpr int kStripRows = kSteps * kRowStep * C::stride_height;

// Rows and columns that the first strip of rows reads, before or behind the input's first; and
// where the farthest element would be.
constexpr int kFarRow = max_of(
    C::padding_top, kStripRows + round_up(C::kernel_height, C::kernel_rows) * C::dilation_height);
constexpr int kFarColumn =
    max_of(kShift - kFirstColumn, kStrips * kStripColumns * C::stride_width + kTileColumns +
                                      kPieces * C::product_taps * C::dilation_width);
using InOffset = IndexTo<elements_of(kFarRow, kInRow) + elements_of(kFarColumn, kInColumn) +
                         elements_of(kBlockOctets, kOctet, kInChannel)>;

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

// What a lane has of a unit: 4 neighbours in all phases, and what they are multiplied by.
struct Loaded {
  Quad quads[kPhases];
  float power;
};

// Writes one column's phases as the tensor core wants them: rounded to TF32, or in two such parts.
__device__ __forceinline__ void store_phases(unsigned char* target, Vector<float, 4> phases) {
  Vector<float, 4> low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = phases.element[i];
    if constexpr (C::parts == 2) {
      unsigned bits[2];
      split(value, bits[0], bits[1]);
      phases.element[i] = __uint_as_float(bits[0]);
      low.element[i] = __uint_as_float(bits[1]);
    } else {
      phases.element[i] = round_factor(value);
    }
  }
  if constexpr (C::parts == 2) {
    *reinterpret_cast<Vector<float, 4>*>(target + kPartVectors * 16) = low;
  }
  *reinterpret_cast<Vector<float, 4>*>(target) = phases;
}
// As float16, or in two such parts.
__device__ __forceinline__ void store_phases(unsigned char* target, Vector<float, 8> phases) {
  using Words = Vector<unsigned, 4>;
  Words high, low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = phases.element[2 * i];
    const float second = phases.element[2 * i + 1];
    high.element[i] = floats_to_halves(first, second);
    if constexpr (C::parts == 2) {
      low.element[i] = low_halves(first, second, high.element[i], kLowFactor);
    }
  }
  if constexpr (C::parts == 2) *reinterpret_cast<Words*>(target + kPartVectors * 16) = low;
  *reinterpret_cast<Words*>(target) = high;
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
  Tables tables;
  int channel;        // in an octet
  int channels_left;  // in the group, from there on
  int column;         // in a unit
  int first_column;   // of the tile, if the strip is the first
  int group;
  int warp;
  int lane;

  __device__ InputLoader(const Scalar* input, const Tables& tables, const Tile& tile, int thread)
      : tables(tables) {
    warp = thread / 32;
    lane = thread % 32;
    channel = C::in_channels_last ? lane % 2 * kQuad : lane % kOctet;
    column = C::in_channels_last ? lane / 2 : lane / kOctet * kQuad;
    const int first_channel = tile.plane() * kPlaneChannels + channel;
    channels_left = C::group_in - first_channel;
    first_column = kFirstColumn - kShift + tile.piece * (C::product_taps * C::dilation_width);
    group = C::groups == 1 ? 0 : tile.group;
    row = input + static_cast<long long>(group * C::group_in + first_channel) * kInChannel;
  }

  __device__ static int octet(int unit) { return unit % kBlockOctets; }
  __device__ static int unit_column(int unit) { return unit / kBlockOctets * kUnitColumns; }
  __device__ bool exists(int unit) const {
    return (kUnits % (kInputWarps * C::batch) == 0 || unit < kUnits) &&
           (kTileColumns % kUnitColumns == 0 || unit_column(unit) + column < kTileColumns);
  }

  // Of a unit's channel, among all groups'.
  __device__ int number(int unit) const {
    return (group + 1) * C::group_in - channels_left + octet(unit) * kOctet;
  }

  // Starts loading a lane's part of a unit, of input row y for the first strip of rows. `images`
  // are left, from the first on; `first` is the strip's column.
  __device__ __forceinline__ void load(const Scalar* image, int images, int y, int first, int unit,
                                       Loaded& loaded) const {
    const int x = first + first_column + unit_column(unit) + column;
    const int left = channels_left - octet(unit) * kOctet;
    const bool valid = exists(unit) && (C::in_channels_last ? is_below(x, C::in_width) : left > 0);
    // The neighbours are channels, or columns.
    const int neighbour = C::in_channels_last ? 0 : x;
    const int count = !valid ? 0 : C::in_channels_last ? max(left, 0) : C::in_width;
    const Scalar* const source =
        image + (static_cast<InOffset>(octet(unit) * kOctet) * kInChannel +
                 static_cast<InOffset>(y) * kInRow + static_cast<InOffset>(x) * kInColumn);
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      constexpr long long kImage = kInImage;
      const int of_image = phase % C::phase_images;
      const int below = phase / C::phase_images * kStripRows;
      const bool exists = of_image < images && is_below(y + below, C::in_height);
      loaded.quads[phase] =
          load_quad(source + (of_image * kImage + static_cast<long long>(below) * kInRow),
                    neighbour, exists ? count : 0);
    }
    if constexpr (C::halves) {
      loaded.power = load_or_zero(tables.powers() + number(unit), valid);
    }
  }

  // Writes it to a row of the ring.
  __device__ __forceinline__ void store(unsigned char* ring_row, int unit,
                                        const Loaded& loaded) const {
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
        phases.element[phase] = scaled(loaded.quads[phase].element[i], loaded.power);
      }
      store_phases(ring_row + (vector + i * kNeighbour) * 16, phases);
    }
    if constexpr (C::halves) count_lossy(unit, loaded);
  }

  __device__ __forceinline__ void count_lossy(int unit, const Loaded& loaded) const {
    unsigned least = ~0u;
#pragma unroll
    for (const Quad& quad : loaded.quads) {
#pragma unroll
      for (const Scalar& value : quad.element) least = min(least, magnitude_key(widen(value)));
    }
    if (least < least_key(loaded.power)) {
      add_to_memory(tables.lossy() + number(unit), 1u);
    }
  }

  // Loads units of a row and writes them to the ring, as soon as there is room.
  __device__ __forceinline__ void copy_row(const Scalar* image, int images, int y, int first,
                                           int units, const Ring<C::input_stages>& at) const {
    unsigned char* const ring_row = shared_memory() + kInputRing + at.stage() * (kRowVectors * 16);
#pragma unroll 1
    for (int unit = warp; unit < units; unit += kInputWarps * C::batch) {
      Loaded loaded[C::batch];
#pragma unroll
      for (int k = 0; k < C::batch; ++k) {
        load(image, images, y, first, unit + kInputWarps * k, loaded[k]);
      }
      if (unit == warp) barrier_wait(&barriers().input_empty[at.stage()], at.parity());
#pragma unroll
      for (int k = 0; k < C::batch; ++k) store(ring_row, unit + kInputWarps * k, loaded[k]);
    }
    // With one unit there is nothing to do for the second warp but to wait.
    if (warp >= units) barrier_wait(&barriers().input_empty[at.stage()], at.parity());
  }
};

// Warps that load the rows of every run.
__device__ __forceinline__ void load_input(const Scalar* input, const Tables& tables,
                                           const Work& work) {
  const Tile tile = work.tile();
  Share share = work.share();
  const InputLoader loader(input, tables, tile, static_cast<int>(threadIdx.x) - 32 * kGradWarps);
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

}  // namespace hopper
}  // namespace fastconv
