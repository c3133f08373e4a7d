// Which elements a thread block and its threads have, in all passes of batch normalization.
//
// A tensor is a matrix whose rows are contiguous. A block has a tile of channels, and a share of
// the rows; a thread has one vector of a row, and walks over rows.
//
//   narrow   a row is an image of a contiguous tensor, or a pixel of a channels-last one, whose
//            planes have one element. A tile is several channels with all of their elements in a
//            row, and each element of a thread's vector has a channel of its own.
//   wide     a row is a segment of a plane, in contiguous tensors with large planes. A tile is one
//            channel. Vectors are aligned, so that the first and the last one of a plane may reach
//            beyond it (`edges`).
#pragma once
#include "device/begin.cuh"

namespace fastconv {
namespace batchnorm {

using C = Config;
using Scalar = C::Scalar;
using Acc = typename AccOf<Scalar>::type;

constexpr bool kWide = C::wide;
constexpr int kVector = C::vector;
constexpr int kMostThreads = 256;
constexpr int kBlocks = C::blocks;  // those that an SM has at the same time
// The numbers of a thread that belong to different channels.
constexpr int kColumns = kWide ? 1 : kVector;

using Elements = Vector<Scalar, kVector>;

// The sizes of a pass, in the order of the kernels' last parameters.
struct Sizes {
  int channels;
  int plane;     // elements of a channel in a row of a narrow tile; of a plane
  int segments;  // those of a plane, 1 in narrow tiles
  int group;     // channels of a tile
  int lanes;     // threads side by side in a row
  int at_once;   // rows that a block's threads have at the same time
  int rows;
  int share;  // rows of a block
  int tiles;
};

// A thread block's part of a tensor.
struct Part {
  int share;    // its number
  int channel;  // the first one
  int channels;
  int begin, end;  // rows
};
__device__ __forceinline__ Part part_of_block(const Sizes& sizes) {
  // Tiles of the same rows are neighbours in memory, and run at the same time.
  const int number = static_cast<int>(blockIdx.x);
  const int share = number / sizes.tiles;
  const int channel = number % sizes.tiles * sizes.group;
  const int begin = share * sizes.share;
  return {share, channel, min_of(sizes.group, sizes.channels - channel), begin,
          min_of(sizes.rows, begin + sizes.share)};
}

// Where a vector begins, and which of its elements exist: none, if `end` is 0.
struct Place {
  long long offset;
  int first, end;

  __device__ __forceinline__ bool exists() const { return end > 0; }
};

// A thread's walk over the rows of a narrow tile.
struct Columns {
  long long offset, step;
  int row, end, at_once;
  int column;  // the vector's first one, counted from the tile's
  bool works;

  __device__ __forceinline__ Columns(const Sizes& sizes, const Part& part) {
    const int thread = static_cast<int>(threadIdx.x);
    column = thread % sizes.lanes * kVector;
    row = part.begin + thread / sizes.lanes;
    end = part.end;
    at_once = sizes.at_once;
    works = thread < sizes.lanes * at_once && column < part.channels * sizes.plane;
    const long long columns = 1ll * sizes.channels * sizes.plane;
    step = at_once * columns;
    offset = row * columns + 1ll * part.channel * sizes.plane + column;
  }
  // The channel of a column of the thread, counted from the tile's first one; 0 without work.
  __device__ __forceinline__ int channel_of(int i, const Sizes& sizes) const {
    return works ? (column + i) / sizes.plane : 0;
  }
  __device__ __forceinline__ bool more() const { return works && row < end; }
  __device__ __forceinline__ Place next() {
    const Place place = {offset, 0, row < end ? kVector : 0};
    offset += step;
    row += at_once;
    return place;
  }
};

// A thread's walk over the segments of one channel's planes.
struct Planes {
  int image, segment, row, end;
  int images_at_once, segments_at_once, at_once;
  int channel, channels, plane, segments, lane, lanes;
  bool works;

  __device__ __forceinline__ Planes(const Sizes& sizes, const Part& part) {
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread % sizes.lanes;
    lanes = sizes.lanes;
    row = part.begin + thread / lanes;
    end = part.end;
    channel = part.channel;
    channels = sizes.channels;
    plane = sizes.plane;
    segments = sizes.segments;
    at_once = sizes.at_once;
    works = thread < lanes * at_once;
    image = row / segments;
    segment = row % segments;
    images_at_once = at_once / segments;
    segments_at_once = at_once % segments;
  }
  __device__ __forceinline__ int channel_of(int, const Sizes&) const { return 0; }
  __device__ __forceinline__ bool more() const { return works && row < end; }
  __device__ __forceinline__ Place next() {
    const long long begin = (1ll * image * channels + channel) * plane;
    // Elements of the first vector that belong to the plane before this one.
    const int skew = C::edges ? static_cast<int>(begin % kVector) : 0;
    const int at = (segment * lanes + lane) * kVector - skew;
    const Place place = {begin + at, max_of(0, -at), row < end ? min_of(kVector, plane - at) : 0};
    row += at_once;
    image += images_at_once;
    segment += segments_at_once;
    if (segment >= segments) {
      segment -= segments;
      ++image;
    }
    return place;
  }
};

template <bool>
struct WalkOf {
  using type = Columns;
};
template <>
struct WalkOf<true> {
  using type = Planes;
};
using Walk = WalkOf<kWide>::type;

// The offset of the first element of a channel in the first row of a block.
__device__ __forceinline__ long long first_of(const Sizes& sizes, const Part& part, int channel) {
  const int image = kWide ? part.begin / sizes.segments : part.begin;
  return (1ll * image * sizes.channels + channel) * sizes.plane;
}

// The number of elements of each channel that a block has.
__device__ __forceinline__ int count_of(const Sizes& sizes, const Part& part) {
  if constexpr (kWide) {
    const int length = sizes.lanes * kVector;
    int ends[2] = {part.begin, part.end};
#pragma unroll
    for (int& row : ends) {
      const int image = row / sizes.segments, segment = row % sizes.segments;
      const long long begin = (1ll * image * sizes.channels + part.channel) * sizes.plane;
      const int skew = C::edges ? static_cast<int>(begin % kVector) : 0;
      const int before = min_of(sizes.plane, max_of(0, segment * length - skew));
      row = (image - part.begin / sizes.segments) * sizes.plane + before;
    }
    return ends[1] - ends[0];
  } else {
    return (part.end - part.begin) * sizes.plane;
  }
}

// Loads the elements of a place; those that do not exist are `missing`.
__device__ __forceinline__ Elements load(const Scalar* from, const Place& place, Scalar missing) {
  const Scalar* const source = from + place.offset;
  if (place.end - place.first == kVector) return *reinterpret_cast<const Elements*>(source);
  Elements elements;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const bool exists = kWide && C::edges && e >= place.first && e < place.end;
    elements.element[e] = exists ? source[e] : missing;
  }
  return elements;
}

__device__ __forceinline__ void store(Scalar* to, const Place& place, const Elements& elements) {
  Scalar* const target = to + place.offset;
  if (place.end - place.first == kVector) {
    *reinterpret_cast<Elements*>(target) = elements;
  } else if constexpr (kWide && C::edges) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if (e >= place.first && e < place.end) target[e] = elements.element[e];
    }
  }
}

// Walks over a thread's vectors, kUnroll of them in flight: `load_at` loads what a place has, as an
// `Operands`, and `use` is called for each place that has elements.
template <class Operands, int kUnroll, class Load, class Use>
__device__ __forceinline__ void walk_over(Walk& walk, const Load& load_at, const Use& use) {
  while (walk.more()) {
    Place places[kUnroll];
    Operands operands[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      places[u] = walk.next();
      operands[u] = load_at(places[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (places[u].exists()) use(places[u], operands[u]);
    }
  }
}

// The channel of each of a thread's columns.
struct Channels {
  int channel[kColumns];

  __device__ __forceinline__ Channels(const Sizes& sizes, const Part& part, const Walk& walk) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      channel[i] = part.channel + walk.channel_of(i, sizes);
    }
  }
};

}  // namespace batchnorm
}  // namespace fastconv
