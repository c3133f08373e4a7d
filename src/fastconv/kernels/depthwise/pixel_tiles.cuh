// The channels of a channels-last tensor that a block computes, and how it copies their pixels to
// shared memory.
#pragma once
#include "depthwise/depth.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kOutputs = C::lanes_c * C::lane_channels;  // channels of a tile
constexpr int kTileGroups = kOutputs >= C::group_out ? kOutputs / C::group_out : 1;
constexpr int kParts = ceil_div(C::group_out, kOutputs);  // tiles of a group
constexpr int kInputs = kTileGroups * C::group_in;
constexpr int kChannelTiles = ceil_div(C::groups, kTileGroups) * kParts;
static_assert(kParts == 1 ? kOutputs % C::group_out == 0 : kTileGroups == 1,
              "whole groups, or a part of one");
static_assert(C::lane_channels == 1 || (C::group_in == 1 && C::group_out == 1),
              "several channels of a lane only in depthwise layers");

constexpr int kInChannels = C::groups * C::group_in;
constexpr int kOutChannels = C::groups * C::group_out;
constexpr int kPixel = round_up(kInputs, C::vector);  // elements of a pixel in shared memory
constexpr int kSlot = kHaloRows * kHaloColumns * kPixel;
constexpr int kInputBytes = round_up(C::slots * kSlot * static_cast<int>(sizeof(Scalar)), 16);

// The output channels of a tile.
struct ChannelTile {
  int group;   // first group
  int output;  // first channel within the group

  __device__ explicit ChannelTile(int index)
      : group(index / kParts * kTileGroups), output(index % kParts * kOutputs) {}
  // The first channel of all groups' outputs, or inputs.
  __device__ int first_output() const { return group * C::group_out + output; }
  __device__ int first_input() const { return group * C::group_in; }
  __device__ bool has(int place) const {
    return first_output() + place < kOutChannels && (kParts == 1 || output + place < C::group_out);
  }
};

// Returns the first of the tile's input channels that one of its outputs reads.
__device__ __forceinline__ int first_read(int output) {
  return kParts == 1 ? output / C::group_out * C::group_in : 0;
}

// A rectangle of pixels of each of `slots` images: kChannels of the kAll channels, from `channel`
// on. In shared memory, rows have kPitch pixels and images kSlot elements. Images are kDepth planes
// apart.
template <int kRows, int kColumns, int kPitch, int kSlot, int kChannels, int kCopied, int kAll,
          int kDepth, int kHeight, int kWidth, int kThreads>
struct PixelRectangle {
  static constexpr int kVector = kCopied;
  static constexpr int kVectors = kChannels / kVector;
  static constexpr int kTotal = C::slots * kRows * kColumns * kVectors;
  static constexpr int kStep = kThreads;
  static constexpr bool kAtOnce = true;
  static constexpr long long kReach = 1ll * C::slots * kDepth * kHeight * kWidth * kAll;

  int images_left, channel, first_row, first_column;

  __device__ static int first() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ Located<long long> locate(int task) const {
    const int first = channel + task % kVectors * kVector;
    const int pixel = task / kVectors;
    const int column = pixel % kColumns;
    const int row = pixel / kColumns % kRows;
    const int x = first_column + column;
    const int y = first_row + row;
    const int slot = pixel / (kColumns * kRows);
    const bool exists = slot < images_left && first < kAll && static_cast<unsigned>(y) < kHeight &&
                        static_cast<unsigned>(x) < kWidth;
    const long long source =
        ((1ll * slot * (1ll * kDepth * kHeight) + y) * kWidth + x) * kAll + first;
    constexpr bool kDense = kPitch == kColumns && kSlot == kRows * kColumns * kChannels;
    const int place =
        kDense ? task * kVector
               : slot * kSlot + (row * kPitch + column) * kChannels + task % kVectors * kVector;
    return {source, place, exists};
  }
  __device__ __forceinline__ void load(Scalar* target, const Scalar* image) const {
#pragma unroll 2
    for (int task = first(); task < kTotal; task += kThreads) {
      const auto at = locate(task);
      copy_elements<kVector>(target + at.place, image + (at.exists ? at.source : 0), at.exists);
    }
  }
};

// The halo tile of the output tile that begins at pixel (y, x), but for padding that is cleared.
template <int kThreads>
struct HaloRectangle
    : PixelRectangle<kCopiedRows, kEndColumn - kFirstColumn, kHaloColumns, kSlot, kPixel, C::vector,
                     kInChannels, D::in, C::in_height, C::in_width, kThreads> {
  HaloRectangle() = default;
  __device__ HaloRectangle(int images_left, const ChannelTile& channels, int y, int x)
      : PixelRectangle<kCopiedRows, kEndColumn - kFirstColumn, kHaloColumns, kSlot, kPixel,
                       C::vector, kInChannels, D::in, C::in_height, C::in_width, kThreads>{
            images_left, channels.first_input(),
            y * Rows::kTimes / Rows::kOver + Rows::kOrigin + kFirstRow,
            x * Columns::kTimes / Columns::kOver + Columns::kOrigin + kFirstColumn} {}
};
constexpr int kHaloPlace = (kFirstRow * kHaloColumns + kFirstColumn) * kPixel;

// Elements from one image's or volume's pixels to the next one's, and from one plane's.
constexpr long long kInPlane = 1ll * C::in_height * C::in_width * kInChannels;
constexpr long long kOutPlane = 1ll * C::out_height * C::out_width * kOutChannels;
constexpr long long kInImage = kInPlane * D::in;
constexpr long long kOutImage = kOutPlane * D::out;

// Copies the halo tile of the output tile that begins at pixel (y, x).
template <int kThreads>
__device__ __forceinline__ void load_halo(Scalar* target, const Scalar* input, int first_image,
                                          int images, const ChannelTile& channels, int y, int x) {
  HaloRectangle<kThreads>(images - first_image, channels, y, x)
      .load(target + kHaloPlace, input + first_image * kInImage);
}

// A thread's channels of a pixel, or of a tap's weights.
using Channels = Vector<Scalar, C::lane_channels>;

__device__ __forceinline__ void load(Acc (&target)[C::lane_channels], const Scalar* source) {
  widen_vector(*reinterpret_cast<const Channels*>(source), target);
}

// Loads a row of a thread's window, by channel. `kept` makes the compiler convert each element
// once: it would otherwise do so for each use.
__device__ __forceinline__ void load_window(Acc (&row)[C::lane_channels][kWindowColumns],
                                            const Scalar* window, int i) {
#pragma unroll
  for (int j = 0; j < kWindowColumns; ++j) {
    Acc pixel[C::lane_channels];
    load(pixel, window + (i * (Rows::kUnit * kHaloColumns) + j * Columns::kUnit) * kPixel);
#pragma unroll
    for (int m = 0; m < C::lane_channels; ++m) row[m][j] = kept(pixel[m]);
  }
}

}  // namespace depthwise
}  // namespace fastconv
