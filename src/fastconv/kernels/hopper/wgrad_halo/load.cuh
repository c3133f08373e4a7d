// Producer warps of the input: load rows to registers, transpose, round or split them, and write
// them to shared memory.
#pragma once
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/scale.cuh"

namespace fastconv {
namespace hopper {

using Quad = Vector<Scalar, kQuad>;

// A warp loads units of 8 channels by 16 columns. A lane has 4 columns of a channel, of all
// members; for channels-last tensors 4 channels of a column.
constexpr int kBlockOctets = kBlockPlanes * C::mma_octets;
constexpr int kUnitColumns = 16;

// The units of an input row that this many columns of an output row read.
__host__ __device__ constexpr int units_of(int columns) {
  return kBlockOctets * ceil_div(tile_columns(columns), kUnitColumns);
}
constexpr int kUnits = units_of(kStripColumns);

// Input rows from a strip of rows to the next.
constexpr int kStripRows = kSteps * kRowStep * C::stride_height;

// The farthest rows and columns that the first strip of rows reads, before or behind the input's
// first, and an index type that reaches every element there.
constexpr int kFarRow = max_of(
    C::padding_top, kStripRows + round_up(C::kernel_height, C::kernel_rows) * C::dilation_height);
constexpr int kFarColumn =
    max_of(kShift - kFirstColumn, kStrips * kStripColumns * C::stride_width + kTileColumns +
                                      kPieces * C::mma_taps * C::dilation_width);
using InOffset = IndexTo<elements_of(kFarRow, kInRow) + elements_of(kFarColumn, kInColumn) +
                         elements_of(kBlockOctets, kOctet, kInChannel)>;

__device__ __forceinline__ bool is_below(int value, int bound) {
  return static_cast<unsigned>(value) < static_cast<unsigned>(bound);
}

// Starts loading 4 consecutive elements, the first of which has index `first` of `count`; elements
// that do not exist are zero. All elements of a vector load exist, or none.
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

using KVector = Vector<Scalar, kInterleave>;

// A lane's part of a unit: 4 consecutive elements of all members, and the power that scales them.
struct Loaded {
  Quad quads[kInterleave];
  float power;
};

// Writes the K vector of one column, rounded to TF32 or split for 3xTF32.
__device__ __forceinline__ void store_k_vector(unsigned char* target, Vector<float, 4> members) {
  Vector<float, 4> low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = members.element[i];
    if constexpr (C::parts == 2) {
      unsigned bits[2];
      split(value, bits[0], bits[1]);
      members.element[i] = __uint_as_float(bits[0]);
      low.element[i] = __uint_as_float(bits[1]);
    } else {
      members.element[i] = round_factor(value);
    }
  }
  if constexpr (C::parts == 2) {
    *reinterpret_cast<Vector<float, 4>*>(target + kPartVectors * 16) = low;
  }
  *reinterpret_cast<Vector<float, 4>*>(target) = members;
}
// Writes the K vector of one column as scaled fp16, in one or two parts.
__device__ __forceinline__ void store_k_vector(unsigned char* target, Vector<float, 8> members) {
  using Words = Vector<unsigned, 4>;
  Words high, low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = members.element[2 * i];
    const float second = members.element[2 * i + 1];
    high.element[i] = floats_to_halves(first, second);
    if constexpr (C::parts == 2) {
      low.element[i] = low_halves(first, second, high.element[i], kLowFactor);
    }
  }
  if constexpr (C::parts == 2) *reinterpret_cast<Words*>(target + kPartVectors * 16) = low;
  *reinterpret_cast<Words*>(target) = high;
}
// Writes the K vector of one column, of a 16-bit type.
template <class Half>
__device__ __forceinline__ void store_k_vector(unsigned char* target, Vector<Half, 8> members) {
  *reinterpret_cast<Vector<Half, 8>*>(target) = members;
}

// A lane's place in the first of its warp's units. Consecutive units go along octets, then along
// columns.
struct InputLoader {
  const Scalar* row;  // row 0 of image 0, in the lane's channel; of volumes, in the group's first
  Tables tables;
  int channel;        // the lane's, in an octet
  int channels_left;  // channels of the group from that one on
  int column;         // the lane's, in a unit
  int first_column;   // first column of the tile in the first strip
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
    first_column = kFirstColumn - kShift + tile.piece * (C::mma_taps * C::dilation_width);
    group = C::groups == 1 ? 0 : tile.group;
    row =
        input + static_cast<long long>(group * kInChannels + (Depth::exists ? 0 : first_channel)) *
                    kInChannel;
  }

  __device__ static int octet(int unit) { return unit % kBlockOctets; }
  __device__ static int unit_column(int unit) { return unit / kBlockOctets * kUnitColumns; }
  __device__ bool exists(int unit) const {
    return (kUnits % (kInputWarps * C::batch) == 0 || unit < kUnits) &&
           (kTileColumns % kUnitColumns == 0 || unit_column(unit) + column < kTileColumns);
  }

  // The index of a unit's channel among those of all groups.
  __device__ int number(int unit) const {
    return (group + 1) * C::group_in - channels_left + octet(unit) * kOctet;
  }

  // The images of a step, from that of member 0 on. Those of volumes are output planes, whose
  // addresses each member finds itself.
  struct Images {
    const Scalar* first;
    int index;
    int count;  // images that exist from this one on

    __device__ __forceinline__ Images(const InputLoader& loader, int image, int batch)
        : first(loader.row), index(image), count(batch - image) {
      if constexpr (!Depth::exists) first += static_cast<long long>(image) * kInImage;
    }
    // Whether an image has the plane that a channel reads, and where that channel begins in it.
    __device__ __forceinline__ bool has(int image, const InChannel& channel) const {
      return image < count && plane_inside(front_of(index + image) + channel.plane());
    }
    __device__ __forceinline__ long long offset(int image, const InChannel& channel) const {
      if constexpr (Depth::exists) {
        const int plane = front_of(index + image) + channel.plane();
        return static_cast<long long>((index + image) / Depth::out) * kInImage +
               (static_cast<long long>(channel.channel) * kInChannel + plane * kInPlane);
      } else {
        constexpr long long kImage = kInImage;
        return image * kImage;
      }
    }
  };

  // Starts loading a lane's part of a unit, from input row y in the first strip of rows; `first` is
  // the strip's first column.
  __device__ __forceinline__ void load(const Images& images, int y, int first, int unit,
                                       Loaded& loaded) const {
    const int x = first + first_column + unit_column(unit) + column;
    const int left = channels_left - octet(unit) * kOctet;
    const bool valid = exists(unit) && (C::in_channels_last ? is_below(x, C::in_width) : left > 0);
    // Consecutive elements are channels of a channels-last tensor, else columns.
    const int neighbour = C::in_channels_last ? 0 : x;
    const int count = !valid ? 0 : C::in_channels_last ? max(left, 0) : C::in_width;
    const InChannel from(C::group_in - left);
    const InOffset channels =
        Depth::exists ? 0 : static_cast<InOffset>(octet(unit) * kOctet) * kInChannel;
    const Scalar* const source = images.first + (channels + static_cast<InOffset>(y) * kInRow +
                                                 static_cast<InOffset>(x) * kInColumn);
#pragma unroll
    for (int member = 0; member < kInterleave; ++member) {
      const int of_image = member % C::interleaved_images;
      const int below = member / C::interleaved_images * kStripRows;
      const bool exists = images.has(of_image, from) && is_below(y + below, C::in_height);
      loaded.quads[member] = load_quad(
          source + (images.offset(of_image, from) + static_cast<long long>(below) * kInRow),
          neighbour, exists ? count : 0);
    }
    if constexpr (C::scaled_fp16) {
      loaded.power = load_or_zero(tables.powers() + number(unit), valid);
    }
  }

  // Writes a lane's part of a unit to a row of the ring.
  __device__ __forceinline__ void store(unsigned char* ring_row, int unit,
                                        const Loaded& loaded) const {
    if (!exists(unit)) return;
    const int plane = octet(unit) / C::mma_octets;
    const int vector = plane * kPlaneVectors + octet(unit) % C::mma_octets * kOctet + channel +
                       (unit_column(unit) + column) * kColumnVectors;
    constexpr int kNeighbour = C::in_channels_last ? 1 : kColumnVectors;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      KVector members;
#pragma unroll
      for (int member = 0; member < kInterleave; ++member) {
        members.element[member] = scaled(loaded.quads[member].element[i], loaded.power);
      }
      store_k_vector(ring_row + (vector + i * kNeighbour) * 16, members);
    }
    if constexpr (C::scaled_fp16) count_lossy(unit, loaded);
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

  // Loads the warp's units of a row, and writes them to the ring when the stage is empty.
  __device__ __forceinline__ void copy_row(const Images& images, int y, int first, int units,
                                           const Ring<C::input_stages>& at) const {
    unsigned char* const ring_row = shared_memory() + kInputRing + at.stage() * (kRowVectors * 16);
#pragma unroll 1
    for (int unit = warp; unit < units; unit += kInputWarps * C::batch) {
      Loaded loaded[C::batch];
#pragma unroll
      for (int k = 0; k < C::batch; ++k) {
        load(images, y, first, unit + kInputWarps * k, loaded[k]);
      }
      if (unit == warp) barrier_wait(&barriers().input_empty[at.stage()], at.parity());
#pragma unroll
      for (int k = 0; k < C::batch; ++k) store(ring_row, unit + kInputWarps * k, loaded[k]);
    }
    // A warp without units still has to wait: it must not arrive at `input_full` a phase early.
    if (warp >= units) barrier_wait(&barriers().input_empty[at.stage()], at.parity());
  }
};

// Loads the input rows of every run.
__device__ __forceinline__ void load_input(const Scalar* input, const Tables& tables,
                                           const Partition& partition) {
  const Tile tile = partition.tile();
  Share share = partition.share();
  const InputLoader loader(input, tables, tile, static_cast<int>(threadIdx.x) - 32 * kGradWarps);
  const int tap_row = tile.kernel_row * C::dilation_height - C::padding_top;
  Ring<C::input_stages> at(1);
  while (share.more()) {
    const Run run = share.next();
    const InputLoader::Images images(loader, run.image, partition.batch);
    const int first_column = run.strip * (kStripColumns * C::stride_width);
    const int units = units_of(columns_of(run.strip));
    const int rows = run.steps * kNewRows + kOldRows;
    int y = run.output_row(0) * C::stride_height + tap_row;
    int until_skip = kNewRows;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      loader.copy_row(images, y, first_column, units, at);
      fence_async_shared();
      __syncwarp();
      if (loader.lane == 0) barrier_arrive(&barriers().input_full[at.stage()]);
      at.advance();
      y += C::dilation_height;
      // Skip rows that no tap reads.
      if (kRowAdvance > kNewRows && --until_skip == 0) {
        y += (kRowAdvance - kNewRows) * C::dilation_height;
        until_skip = kNewRows;
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
