// The input: where the pixels of a tile lie in memory, and how a thread loads some of their
// channels.
#pragma once
#include "device/tensor/scale.cuh"

namespace fastconv {
namespace tensor {

// Strides of the input, in elements. With space-to-depth, group_in counts a channel once for each
// residue; in volumes, also once for each tap of the depth.
constexpr bool kSpaceToDepth = C::s2d_height * C::s2d_width > 1;
constexpr int kInGroup = C::group_in / (C::s2d_height * C::s2d_width);
constexpr int kInChannels = kInGroup / Depth::kernel;  // a group's channels in memory
constexpr int kInColumn = kLoadedLast ? C::groups * kInChannels : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInPlane = C::in_height * kInRow;
constexpr int kInChannel = kLoadedLast ? 1 : Depth::in * kInPlane;
constexpr int kInImage = C::groups * kInChannels * Depth::in * C::in_height * C::in_width;
using InChannel = DepthChannel<kInChannels>;
// A group's channels that have powers of their own (scaled fp16): in a copy, those in memory.
constexpr int kScaledChannels = HalfCopy::exists ? kInChannels : kInGroup;

// The channel whose power scales a channel of the reduction.
__device__ __forceinline__ int scaled_channel(int channel) {
  return HalfCopy::exists ? channel % kScaledChannels : channel;
}

// The farthest rows and columns that tiles reach, before or behind the input's first, and an index
// type that reaches every element there.
constexpr long long kFarInRow = max_of<long long>(
    C::padding_top, elements_of(C::s2d_height, C::stride_height, kRowStep) +
                        elements_of(C::s2d_height, C::dilation_height, kRowResidues,
                                    kRowTiles* kTileRows + kHaloRows + C::kernel_height));
constexpr long long kFarInColumn = max_of<long long>(
    C::padding_left + elements_of(C::lead, C::stride_width),
    elements_of(C::s2d_width, C::stride_width, kStrips* C::tile_columns + C::pitch + 1));
using InOffset =
    IndexTo<elements_of(kFarInRow, kInRow) + elements_of(kFarInColumn, kInColumn) +
            elements_of(Depth::exists ? kInChannels : kChunks * kChunkChannels, kInChannel) +
            (Depth::exists ? elements_of(ceil_div(kChunks * kChunkChannels, kInChannels),
                                         Depth::dilation, kInPlane)
                           : 0)>;
static_assert(elements_of(C::groups, kInChannels, Depth::in, C::in_height, C::in_width) <
                  kMostElements,
              "");

// What an image of the batch reads: an image, or planes of a volume, the first of which may lie
// outside.
template <class Element>
struct InImage : Front {
  const Element* first;

  __device__ __forceinline__ InImage(const Element* input, int image) : Front(front_of(image)) {
    if constexpr (Depth::exists) {
      first = input + static_cast<long long>(image / Depth::out) * kInImage +
              static_cast<long long>(front) * kInPlane;
    } else {
      first = input + static_cast<long long>(image) * kInImage;
    }
  }
};

// Whether the volume has the plane that a channel reads, of those from `front` on.
__device__ __forceinline__ bool plane_exists(int front, int channel) {
  return plane_inside(front + InChannel(channel).plane());
}

// The offset of a channel's first element, from that of the image's.
__device__ __forceinline__ InOffset channel_offset(int channel) {
  const InChannel in_memory(channel);
  const InOffset offset = InOffset{in_memory.channel} * kInChannel;
  return Depth::exists ? offset + InOffset{in_memory.plane()} * kInPlane : offset;
}

// Elements from the last multiple of `unit` elements to an address.
template <class Element>
__device__ __forceinline__ int misalignment(const Element* element, int unit) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(element) / sizeof(Element) % unit);
}

// The place of a pixel, in the first channel of its group.
struct Place : Front {
  const Loaded* group;
  int y, x;  // may lie outside of the image
  bool exists;

  __device__ __forceinline__ bool inside(int rows_on = 0, int columns_on = 0) const {
    return static_cast<unsigned>(y + rows_on) < static_cast<unsigned>(C::in_height) &&
           static_cast<unsigned>(x + columns_on) < static_cast<unsigned>(C::in_width) && exists;
  }
  __device__ __forceinline__ const Loaded* address(int channel) const {
    return group + (channel_offset(channel) + InOffset{y} * kInRow + InOffset{x} * kInColumn);
  }
};

__device__ __forceinline__ float load_element(const float* source) { return load(source); }
__device__ __forceinline__ float load_element(const float* source, bool valid) {
  return load_or_zero(source, valid);
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* source) {
  return {load(&source->bits)};
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* source, bool valid) {
  return {load_or_zero(&source->bits, valid)};
}

constexpr bool kWholeChunks = C::group_in % kChunkChannels == 0;

// A unit is what a thread loads at a time: VectorUnit or PixelUnit. Each gives the plane and pixel
// of the index-th unit of a stage, loads the unit or zeros, and returns it as vectors of channels.

// One vector of channels that are neighbours in memory. Neighbouring lanes load neighbouring
// vectors.
struct VectorUnit {
  static constexpr int kVectors = 1;
  static constexpr int kCount = kPartPixels;
  Words loaded;

  __device__ static int plane(int index) { return index % kChunkPlanes; }
  __device__ static int pixel(int index) { return index / kChunkPlanes; }
  static_assert(!C::vector_loads || kInChannels % kLoadedVector == 0,
                "a vector has one tap of depth");
  __device__ static bool row_exists(const Place& place, int channel) {
    return static_cast<unsigned>(place.y) < static_cast<unsigned>(C::in_height) &&
           (kWholeChunks || channel < C::group_in) && plane_exists(place.front, channel);
  }
  __device__ void load(const Place& place, int channel) {
    const auto* const source = reinterpret_cast<const uint4*>(place.address(channel));
    const bool valid = place.inside() && (kWholeChunks || channel < C::group_in) &&
                       plane_exists(place.front, channel);
    loaded = Words::of(load_or_zero(source, valid));
  }
  __device__ Words vector(int) const { return loaded; }
  __device__ static int offset(int) { return 0; }
};

// One or two vectors of one pixel, loaded channel by channel, for any other layout. Neighbouring
// lanes load neighbouring pixels.
struct PixelUnit {
  static constexpr int kVectors = C::unit_vectors;
  static constexpr int kCount = kPartPixels / kVectors;
  static constexpr int kElements = kVectors * kVectorChannels;
  static_assert(kChunkPlanes % kVectors == 0, "units are whole");
  // Whether all channels of a unit are equally far apart in memory.
  static constexpr bool kTogether =
      !kSpaceToDepth && (!Depth::exists || kInChannels % kElements == 0);
  Loaded loaded[kElements];

  __device__ static int plane(int index) { return index / kPlanePixels * kVectors; }
  __device__ static int pixel(int index) { return index % kPlanePixels; }
  __device__ void load(const Place& place, int channel) {
    if constexpr (!kTogether) {
      load_apart(place, channel);
      return;
    }
    const bool inside = place.inside() && plane_exists(place.front, channel);
    const Loaded* const source = place.address(channel);
    if (!__any_sync(~0u, inside)) {
#pragma unroll
      for (Loaded& element : loaded) element = Loaded{};
    } else if (kWholeChunks && __all_sync(~0u, inside)) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) loaded[j] = load_element(source + 1LL * j * kInChannel);
    } else {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const bool valid = inside && (kWholeChunks || channel + j < C::group_in);
        loaded[j] = load_element(source + 1LL * j * kInChannel, valid);
      }
    }
  }
  __device__ void load_apart(const Place& place, int channel) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const SpaceToDepthChannel in_memory(channel + j);
      const bool valid = place.inside(in_memory.row, in_memory.column) &&
                         (kWholeChunks || channel + j < C::group_in) &&
                         plane_exists(place.front, in_memory.channel);
      loaded[j] = load_element(
          place.address(in_memory.channel) +
              (InOffset{in_memory.row} * kInRow + InOffset{in_memory.column} * kInColumn),
          valid);
    }
  }
  __device__ Channels vector(int i) const {
    return vector_of<Channels>(loaded + i * kVectorChannels);
  }
  __device__ static int offset(int i) { return i * kPlanePixels; }
};

using Unit = Either<C::vector_loads, VectorUnit, PixelUnit>::type;
constexpr int kBatches = ceil_div(Unit::kCount, C::loaders* C::batch);  // batches of a stage

__device__ __forceinline__ bool unit_exists(int index) {
  return Unit::kCount % (C::loaders * C::batch) == 0 || index < Unit::kCount;
}

// Iterates over all input stages of a block: the stages of each chunk of each work item.
struct StageCursor {
  const Items& items;
  int index;
  Item item;
  int chunk = 0;
  int stage = 0;

  __device__ explicit StageCursor(const Items& items)
      : items(items), index(items.first()), item(index) {}
  __device__ bool more() const { return index < items.count(); }
  __device__ void advance() {
    if (++stage < item.stages()) return;
    stage = 0;
    if (++chunk < kChunks) return;
    chunk = 0;
    index = items.after(index);
    if (more()) item = Item(index);
  }
};

// A chunk of a tile, or of one of its rows, as it lies in the input.
struct Source : Front {
  const Loaded* group;  // the first channel at row 0, column 0
  int row;  // the tile's first row, in space-to-depth rows, before padding is subtracted
  int column;
  int channel;  // the first channel, in its group

  __device__ Source(const Loaded* input, const StageCursor& at)
      : Source(input, at.item, at.chunk, at.stage) {}
  __device__ Source(const Loaded* input, const Item& item, int chunk, int stage)
      : Front(front_of(item.image)) {
    channel = chunk * kChunkChannels;
    group = InImage<Loaded>(input, item.image).first + item.group * kInChannels * kInChannel;
    row = item.row_residue * C::stride_height +
          C::dilation_height * (item.tile * kTileRows * kRowResidues + stage);
    column = (item.column - C::lead) * C::stride_width;
  }

  // The place of a unit's first pixel.
  __device__ __forceinline__ Place find(int index) const {
    const int pixel = Unit::pixel(index);
    Place place = find_in_line(pixel / C::pitch, pixel % C::pitch);
    if (C::wraps && place.x + C::padding_left >= kPaddedWidth) {
      place.x -= kPaddedWidth;
      ++place.y;
    }
    place.exists = unit_exists(index);
    return place;
  }
  // The place of a pixel in a line of a plane, if the line does not continue with the next row.
  __device__ __forceinline__ Place find_in_line(int index, int position) const {
    const int slot = index / kStageRows;
    const int line = index % kStageRows;
    const int y = row + C::dilation_height * (slot / kColumnSlots + line * kRowResidues);
    const int column_residue = slot % kColumnSlots * kColumnStep % kColumnResidues;
    const int x = column + kColumnUnit * (column_residue + position * kColumnResidues);
    return {Front(front), group, y * C::s2d_height - C::padding_top,
            x * C::s2d_width - C::padding_left, true};
  }
  __device__ __forceinline__ int channel_of(int index) const {
    return channel + Unit::plane(index) * kVectorChannels;
  }
  // The column of the chunk's first channel in the tables of scale.cuh.
  __device__ __forceinline__ int column_of(int its_group) const {
    return its_group * kGroupColumns + channel;
  }
};

}  // namespace tensor
}  // namespace fastconv
