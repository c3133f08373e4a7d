// Input: loaded to registers and written to shared memory, or copied asynchronously as it is.
#pragma once
#include "hopper/correlate_scale.cuh"

namespace fastconv {
namespace hopper {

constexpr int kLoaders = 32 * kLoaderWarps;  // threads

// Distances in the input, in elements.
constexpr bool kFolded = C::fold_height * C::fold_width > 1;
constexpr int kInGroup = C::group_in / (C::fold_height * C::fold_width);
constexpr int kInColumn = C::in_channels_last ? C::groups * kInGroup : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInChannel = C::in_channels_last ? 1 : C::in_height * C::in_width;
constexpr int kInImage = C::groups * kInGroup * C::in_height * C::in_width;

// Rows, columns and channels that tiles reach, before or behind the input's first; and what counts
// the elements to there.
constexpr long long kFarInRow = max_of<long long>(
    C::padding_top, elements_of(C::fold_height, C::stride_height, kRowStep) +
                        elements_of(C::fold_height, C::dilation_height, kRowPhases,
                                    kRowTiles* kTileRows + kHaloRows + C::kernel_height));
constexpr long long kFarInColumn = max_of<long long>(
    C::padding_left + elements_of(C::lead, C::stride_width),
    elements_of(C::fold_width, C::stride_width, kStrips* C::tile_columns + C::pitch + 1));
using InOffset = IndexTo<elements_of(kFarInRow, kInRow) + elements_of(kFarInColumn, kInColumn) +
                         elements_of(kChunks* kChunkChannels, kInChannel)>;
static_assert(elements_of(C::groups, kInGroup, C::in_height, C::in_width) < kMostElements, "");

// How far an element lies beyond a multiple of `unit` elements, counted from address 0.
__device__ __forceinline__ int misalignment(const Scalar* element, int unit) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(element) / kScalarBytes % unit);
}

// A pixel of a group's first channel.
struct Place {
  const Scalar* group;
  int y, x;  // maybe outside of the image
  bool exists;

  __device__ __forceinline__ bool inside(int rows_on = 0, int columns_on = 0) const {
    return static_cast<unsigned>(y + rows_on) < static_cast<unsigned>(C::in_height) &&
           static_cast<unsigned>(x + columns_on) < static_cast<unsigned>(C::in_width) && exists;
  }
  __device__ __forceinline__ const Scalar* address(int channel) const {
    return group +
           (InOffset{channel} * kInChannel + InOffset{y} * kInRow + InOffset{x} * kInColumn);
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

// What a thread loads at a time, one of two kinds. Each knows where its index-th unit of a stage
// lies (the first of its planes and pixels), loads it or zeros, and gives its vectors of channels.

// Channels are neighbours in memory: one vector. Neighbouring lanes load neighbouring vectors.
struct VectorUnit {
  static constexpr int kVectors = 1;
  static constexpr int kCount = kPartPixels;
  Words loaded;

  __device__ static int plane(int index) { return index % kChunkPlanes; }
  __device__ static int pixel(int index) { return index / kChunkPlanes; }
  __device__ static bool row_exists(const Place& place, int channel) {
    return static_cast<unsigned>(place.y) < static_cast<unsigned>(C::in_height) &&
           (kWholeChunks || channel < C::group_in);
  }
  __device__ void load(const Place& place, int channel) {
    const auto* const source = reinterpret_cast<const uint4*>(place.address(channel));
    const bool valid = place.inside() && (kWholeChunks || channel < C::group_in);
    loaded = Words::of(load_or_zero(source, valid));
  }
  __device__ Words vector(int) const { return loaded; }
  __device__ static int offset(int) { return 0; }
};

// Anything else: two vectors of one pixel, channel by channel. Neighbouring lanes load neighbouring
// pixels.
struct PixelUnit {
  static constexpr int kVectors = 2;
  static constexpr int kCount = kPartPixels / 2;
  Scalar loaded[2 * kVectorChannels];

  __device__ static int plane(int index) { return index / kPlanePixels * 2; }
  __device__ static int pixel(int index) { return index % kPlanePixels; }
  __device__ void load(const Place& place, int channel) {
    if constexpr (kFolded) {
      load_folded(place, channel);
      return;
    }
    const bool inside = place.inside();
    const Scalar* const source = place.address(channel);
    if (!__any_sync(~0u, inside)) {
#pragma unroll
      for (Scalar& element : loaded) element = Scalar{};
    } else if (kWholeChunks && __all_sync(~0u, inside)) {
#pragma unroll
      for (int j = 0; j < 2 * kVectorChannels; ++j)
        loaded[j] = load_element(source + j * kInChannel);
    } else {
#pragma unroll
      for (int j = 0; j < 2 * kVectorChannels; ++j) {
        const bool valid = inside && (kWholeChunks || channel + j < C::group_in);
        loaded[j] = load_element(source + j * kInChannel, valid);
      }
    }
  }
  __device__ void load_folded(const Place& place, int channel) {
#pragma unroll
    for (int j = 0; j < 2 * kVectorChannels; ++j) {
      const FoldedChannel folded(channel + j);
      const bool valid =
          place.inside(folded.row, folded.column) && (kWholeChunks || channel + j < C::group_in);
      loaded[j] = load_element(
          place.address(folded.channel) + folded.row * kInRow + folded.column * kInColumn, valid);
    }
  }
  __device__ Channels vector(int i) const { return channels_of(loaded + i * kVectorChannels); }
  __device__ static int offset(int i) { return i * kPlanePixels; }
};

using Unit = Either<C::vector_loads, VectorUnit, PixelUnit>::type;
constexpr int kBatches = ceil_div(Unit::kCount, kLoaders* C::batch);  // of a stage

__device__ __forceinline__ bool unit_exists(int index) {
  return Unit::kCount % (kLoaders * C::batch) == 0 || index < Unit::kCount;
}

// Goes through all input stages of a block: of each chunk, of each item.
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

// The same, and through the batches of each stage.
struct LoadCursor : StageCursor {
  int batch = 0;

  __device__ explicit LoadCursor(const Items& items) : StageCursor(items) {}
  __device__ void advance() {
    if (++batch < kBatches) return;
    batch = 0;
    StageCursor::advance();
  }
};

// A chunk of a tile, or a row of it, as it lies in the input.
struct Source {
  const Scalar* group;  // the first channel at row 0, column 0
  int row;              // of the tile's first pixel; folded, and before padding
  int column;
  int channel;  // the first, in its group

  __device__ Source(const Scalar* input, const StageCursor& at) {
    const Item& item = at.item;
    channel = at.chunk * kChunkChannels;
    group =
        input + static_cast<long long>(item.image) * kInImage + item.group * kInGroup * kInChannel;
    row = item.row_phase * C::stride_height +
          C::dilation_height * (item.tile * kTileRows * kRowPhases + at.stage);
    column = (item.column - C::lead) * C::stride_width;
  }

  // Where the first pixel of a unit lies.
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
  // Where a pixel of one of a plane's lines lies, if it does not go on with the next row.
  __device__ __forceinline__ Place find_in_line(int index, int position) const {
    const int slot = index / kStageRows;
    const int line = index % kStageRows;
    const int y = row + C::dilation_height * (slot / kColumnSlots + line * kRowPhases);
    const int column_phase = slot % kColumnSlots * kColumnStep % kColumnPhases;
    const int x = column + kColumnUnit * (column_phase + position * kColumnPhases);
    return {group, y * C::fold_height - C::padding_top, x * C::fold_width - C::padding_left, true};
  }
  __device__ __forceinline__ int channel_of(int index) const {
    return channel + Unit::plane(index) * kVectorChannels;
  }
  // Where its first channel is in the tables.
  __device__ __forceinline__ int column_of(int its_group) const {
    return its_group * kGroupColumns + channel;
  }
};

// A thread's units of a batch, the image they are of, and the first channel's column.
struct Batch {
  Unit units[C::batch];
  int image;
  int column;

  // Starts loading them.
  __device__ __forceinline__ void load(const Scalar* input, const LoadCursor& at, int thread) {
    const Source source(input, at);
    image = at.item.image;
    column = source.column_of(at.item.group);
#pragma unroll
    for (int k = 0; k < C::batch; ++k) {
      const int index = thread + kLoaders * (at.batch * C::batch + k);
      units[k].load(source.find(index), source.channel_of(index));
    }
  }

  // Writes them to a stage.
  __device__ __forceinline__ void store(unsigned char* stage, int batch, int thread,
                                        const ChunkPowers& powers, Range& range) const {
#pragma unroll
    for (int k = 0; k < C::batch; ++k) {
      const int index = thread + kLoaders * (batch * C::batch + k);
      if (!unit_exists(index)) continue;
      const int first = Unit::plane(index) * kPlanePixels + Unit::pixel(index);
      const int channel = Unit::plane(index) * kVectorChannels;
#pragma unroll
      for (int i = 0; i < Unit::kVectors; ++i) {
        const Scale scale = powers.of(channel + i * kVectorChannels);
        store_input(stage + (first + Unit::offset(i)) * 16, kPartPixels * 16, units[k].vector(i),
                    scale, range);
        if (powers.strict) range.see_strictly(units[k].vector(i), scale);
      }
    }
  }
};

// Three warps: load all input stages, a few batches ahead of what they write.
__device__ __forceinline__ void load_input(const Scalar* input, const Items& items) {
  const int thread = static_cast<int>(threadIdx.x) - 32;
  const int lane = thread % 32;
  Batch batches[C::batches_ahead];
  Range range;
  ChunkPowers powers(thread / 32);
  LoadCursor next(items);
  Ring<C::input_stages> at(1);
  int under_way = 0;
  int batch = 0;
#pragma unroll
  for (int i = 0; i < C::batches_ahead - 1; ++i) {
    if (next.more()) {
      batches[i].load(input, next, thread);
      next.advance();
      ++under_way;
    }
  }
  while (under_way > 0 || next.more()) {
#pragma unroll
    for (int i = 0; i < C::batches_ahead; ++i) {
      if (next.more()) {
        batches[(i + C::batches_ahead - 1) % C::batches_ahead].load(input, next, thread);
        next.advance();
        ++under_way;
      }
      if (under_way == 0) break;
      --under_way;
      if (batch == 0) {
        powers.load(items, batches[i].image, batches[i].column);
        barrier_wait(&barriers().input_empty[at.stage], at.parity);
      }
      batches[i].store(shared_memory() + kInputRing + at.stage * kInputBytes, batch, thread, powers,
                       range);
      if (++batch == kBatches) {
        batch = 0;
        items.judge(range, batches[i].image, at.stage);
        fence_async_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(&barriers().input_full[at.stage]);
        at.advance();
      }
    }
  }
}

// A thread's share of the lines of a stage, where they are copied as they are: of one plane, every
// kLineStep-th pixel. What a line's copies have in common is computed once for all of them.
struct LineCopy {
  static constexpr int kLineStep = kLoaders / kChunkPlanes;
  static constexpr int kCopies = ceil_div(C::pitch, kLineStep);
  static_assert(!C::vector_loads || kLoaders % kChunkPlanes == 0, "a thread stays in its plane");
  int plane, pixel;

  __device__ explicit LineCopy(int thread)
      : plane(thread % kChunkPlanes), pixel(thread / kChunkPlanes) {}

  __device__ __forceinline__ void start(const Source& source, int line,
                                        unsigned char* stage) const {
    const Place place = source.find_in_line(line, pixel);
    const int channel = source.channel + plane * kVectorChannels;
    const bool exists = VectorUnit::row_exists(place, channel);
    const Scalar* const from = place.address(channel);
    unsigned char* const to = stage + (plane * kPlanePixels + line * C::pitch + pixel) * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int on = i * kLineStep;
      if (C::pitch % kLineStep == 0 || i + 1 < kCopies || pixel + on < C::pitch) {
        const bool inside = static_cast<unsigned>(place.x + on * C::stride_width) <
                            static_cast<unsigned>(C::in_width);
        copy_async<16>(to + on * 16, from + on * (C::stride_width * kInColumn), exists && inside);
      }
    }
  }
};

// The same where neither transposing nor rounding is to be done: asynchronous copies. A consumer
// gives a stage back when it has the next: of two stages, none may be under way while this waits.
__device__ __forceinline__ void copy_input(const Scalar* input, const Items& items) {
  static_assert(!C::wraps || !C::vector_loads || sizeof(Scalar) == 4, "lines do not go on");
  const int thread = static_cast<int>(threadIdx.x) - 32;
  const LineCopy copy(thread);
  Ring<C::input_stages> at(1);
  Ring<C::input_stages> landed(0);
  const auto arrive = [&] {
    fence_async_shared();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(&barriers().input_full[landed.stage]);
    landed.advance();
  };
  constexpr int kAhead = C::input_stages > 2 ? 1 : 0;                          // stages
  constexpr int kLinesAtOnce = kLines * LineCopy::kCopies <= 32 ? kLines : 1;  // few instructions
  int under_way = 0;
  for (StageCursor next(items); next.more(); next.advance()) {
    const Source source(input, next);
    barrier_wait(&barriers().input_empty[at.stage], at.parity);
    unsigned char* const stage = shared_memory() + kInputRing + at.stage * kInputBytes;
#pragma unroll kLinesAtOnce
    for (int line = 0; line < kLines; ++line) copy.start(source, line, stage);
    copy_async_commit();
    at.advance();
    if (++under_way > kAhead) {
      copy_async_wait<kAhead>();
      arrive();
      --under_way;
    }
  }
  copy_async_wait<0>();
  if (under_way > 0) arrive();
}

}  // namespace hopper
}  // namespace fastconv
