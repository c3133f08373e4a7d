// Convolution on Hopper's tensor cores: forward passes, and input gradients, which are forward
// convolutions with flipped and transposed weights: one, or one for each phase of a stride, which
// has every stride-th of the output's rows and columns, and some of the taps.
//
// A warpgroup multiplies 64 output channels (rows of wgmma) by `pixels` output pixels (columns), 16
// or 8 input channels at a time, and adds up over taps. Both operands lie in shared memory:
//
//   input   [16 bytes of channels][row][pixel][16 bytes]     a halo tile, loaded once for all taps
//   weights [tap][2][64 output channels][16 bytes]
//
// Neighbouring pixels are 16 bytes apart, as the tensor core wants its columns, so that a tap is
// nothing but another start address in the same tile, whatever the dilation:
//
//   tap (kh, kw) begins (kh * pitch + kw * dilation) * 16 bytes after tap (0, 0).
//
// Dilated rows: output rows that are equal modulo the dilation share input rows; a tile takes only
// such (every dilation-th) rows, and is dense again. Strides: an axis of stride s falls into s
// phases of every s-th position; a tile holds its phases one after the other, and a tap reads one
// of them, where neighbours are neighbours again.
//
// Strides and few input channels: the phases of both axes become channels (`fold`), of a
// convolution of stride 1 with a smaller kernel. Its input exists in no memory but the tile.
//
// Narrow images: a tile of several rows is one line of pixels, rows pitch apart. The columns
// between two rows are computed and thrown away.
//
// Phases of contiguous rows with a column stride of 2: the sums of both columns (`column_sums`)
// share the 64 rows of a product, with zero weights where only one has a tap; or one column is
// zero. Both are stored as one row (`interleave`).
//
// Few output channels: `stack` output rows share the 64 rows of a product. Row j of them sees tap
// row t as kernel row t - j, for which there are zero weights above and below the kernel.
//
// One block per processor, of three warpgroups that work at the same time:
//   producer   warp 0 streams packed weights through a ring of stages with bulk copies; warps 1-3
//              load input pixels, round or split them, and write them to a ring of input stages.
//              The transposition of NCHW and the padding are part of this copy.
//   consumers  two warpgroups, of different channels (channel_groups = 2) or different rows; they
//              multiply, and store their sums through shared memory.
// An input stage is either the halo tile of a chunk of the input channels, or, with `rolling`, one
// row of all channels: then a block walks down the image, and each row is loaded once.
//
// float32 with `parts` = 2: x = high + low, both with TF32's mantissa, and x y = low_x high_y +
// high_x low_y + high_x high_y: three products, and low_x low_y in short sums. The tensor core
// truncates as it accumulates, so sums move to registers of their own after every stage of weights.
#pragma once
#include "hopper/operand.cuh"
#include "include/tile.cuh"

namespace fastconv {
namespace hopper {

using C = Config;
using Scalar = C::Scalar;
using Operand = OperandOf<Scalar>::type;

// --- The tile: what a block computes, and where it lies in shared memory -------------------------

constexpr int kVector = 16 / static_cast<int>(sizeof(Scalar));  // channels in 16 bytes
constexpr int kChunkPlanes = 2 * C::k_steps;
constexpr int kChunkChannels = kChunkPlanes * kVector;
constexpr int kChunks = ceil_div(C::group_in, kChunkChannels);

// Along rows: tap k is in phase k % kRowPhases; a tile's output rows are kRowStep apart.
constexpr int kRowPhases = C::stride_height / gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / gcd(C::stride_height, C::dilation_height);
constexpr int kRowSlots = C::kernel_height < kRowPhases ? C::kernel_height : kRowPhases;

// Along columns, where output pixels are neighbours.
constexpr int kColumnUnit = gcd(C::stride_width, C::dilation_width);
constexpr int kColumnPhases = C::stride_width / kColumnUnit;
constexpr int kColumnStep = C::dilation_width / kColumnUnit;
constexpr int kColumnSlots = C::kernel_width < kColumnPhases ? C::kernel_width : kColumnPhases;

constexpr int kTapRows = C::kernel_height + C::stack - 1;
constexpr int kTaps = kTapRows * C::kernel_width;
constexpr int kWeightStages = kTaps / C::stage_taps;  // of a chunk
static_assert(kTaps % C::stage_taps == 0, "stages hold whole taps");

constexpr int kConsumers = 2;
constexpr int kPixelGroups = kConsumers / C::channel_groups;
constexpr int kGroupRows = C::tile_rows * C::stack;  // output rows of a consumer
constexpr int kTileRows = kPixelGroups * kGroupRows;
constexpr int kHaloRows = kTileRows + (C::kernel_height - 1) / kRowPhases;
static_assert(C::stack == 1 || (C::tile_rows == 1 && kRowPhases == 1), "rows stacked in M alone");
static_assert(C::lead + C::tile_columns + (C::kernel_width - 1) * kColumnStep / kColumnPhases <=
                  C::pitch,
              "a row holds its halo");

constexpr int kStageRows = C::rolling ? 1 : kHaloRows;
static_assert(!C::rolling || (kChunks == 1 && kRowPhases == 1 && C::tile_rows == 1), "see above");
constexpr int kSlotPixels = kStageRows * C::pitch;  // of one phase of the rows and the columns
constexpr int kPlanePixels = kRowSlots * kColumnSlots * kSlotPixels + C::plane_padding;
constexpr int kPlaneBytes = kPlanePixels * 16;
constexpr int kPartPixels = kChunkPlanes * kPlanePixels;
// Products come in eights of pixels: the last may reach a little beyond the tile's last row.
constexpr int kReach = C::pixels + (C::kernel_width - 1) * kColumnStep / kColumnPhases;
constexpr int kSlack = kReach > C::tile_rows* C::pitch ? kReach - C::tile_rows * C::pitch : 0;
static_assert(C::lead + C::tile_columns + (C::tile_rows - 1) * C::pitch <= C::pixels, "");
constexpr int kInputBytes = (C::parts * kPartPixels + kSlack) * 16;

constexpr int kOutputs = 64;  // channels of a product
constexpr int kStackChannels = kOutputs / (C::stack * C::column_sums);
constexpr int kProductBytes = kOutputs * 32;
constexpr int kTapBytes = C::k_steps * C::parts * C::channel_groups * kProductBytes;
constexpr int kWeightBytes = C::stage_taps * kTapBytes;

// A product's row, counted among those of the same column: two sums of a pixel's columns are eight
// rows apart, in the same thread.
__device__ __forceinline__ int row_of_column(int product_row) {
  return C::column_sums == 1 ? product_row : product_row / 16 * 8 + product_row % 8;
}
static_assert(C::column_sums == 1 || (C::column_sums == 2 && C::interleave == 2), "pairs");
static_assert(kStackChannels >= 8, "eight rows of a product are neighbouring channels");

// Space for sums on their way out. Contiguous outputs: every warp has its own, for 8 channels' rows
// of pass_pixels, once or twice. Channels-last outputs: every warpgroup has its own, for
// pass_pixels of 64 channels. Pitches spread a warp's accesses over all banks.
constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kRowPitch = round_up(C::interleave * C::pass_pixels + kVector - 8, 16) + 8;
constexpr int kPixelPitch = kOutputs + kVector;
constexpr int kStagingBytes =
    kScalarBytes *
    (C::out_channels_last ? C::pass_pixels * kPixelPitch : 4 * C::buffers * 8 * kRowPitch);

// Space for input on its way in (`staged`): pieces of a line, of 32 bytes' channels, as they lie in
// memory. Every loading warp has raw_slots of its own.
constexpr int kLoaderWarps = 3;
constexpr int kRawSlots = C::staged ? kLoaderWarps * C::raw_slots : 0;
constexpr int kPieceChannels = 2 * kVector;
constexpr int kRawLine = C::pitch < C::in_width ? C::pitch : C::in_width;
constexpr int kRawChannel = round_up(kRawLine + kVector - 1, kVector);  // elements
constexpr int kRawElements = kPieceChannels * kRawChannel;
constexpr int kRawBytes = kRawElements * kScalarBytes;

constexpr int kInputRing = 0;
constexpr int kWeightRing = kInputRing + C::input_stages * kInputBytes;
constexpr int kStaging = kWeightRing + C::weight_stages * kWeightBytes;
constexpr int kRawRing = kStaging + kConsumers * kStagingBytes;
constexpr int kBarriers = kRawRing + kRawSlots * kRawBytes;
static_assert(kBarriers + 16 * (C::input_stages + C::weight_stages) + 8 * kRawSlots <=
                  C::shared_bytes,
              "");
static_assert(kInputBytes % 16 == 0 && kStagingBytes % 16 == 0, "bulk copies are aligned");
static_assert(C::lead == 0 || (C::tile_rows == 1 && C::bulk_stores), "one row's alignment");

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier weights_full[C::weight_stages];
  Barrier weights_empty[C::weight_stages];
  Barrier raw_full[kRawSlots > 0 ? kRawSlots : 1];
};

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}

// A position in a ring of stages. Producers start a lap ahead: the stages are empty.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity;

  __device__ explicit Ring(unsigned first_parity) : parity(first_parity) {}
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- Work items ----------------------------------------------------------------------------------

constexpr int kOutputGroups = ceil_div(C::group_out, C::channel_groups* kStackChannels);
// With a lead, rows begin up to lead - 1 columns before the image.
constexpr int kStrips = ceil_div(C::out_width + (C::lead > 0 ? C::lead - 1 : 0), C::tile_columns);
constexpr int kRowTiles = ceil_div(ceil_div(C::out_height, kRowStep), kTileRows);
constexpr int kSegments = ceil_div(kRowTiles, C::segment_tiles);
constexpr int kItemsPerImage = kOutputGroups * kStrips * kSegments * kRowStep * C::groups;

// What a block does between two looks at its list: segment_tiles tiles, one below the other.
struct Item {
  int outputs;  // first channel of the block's products, in the group
  int column;   // first output column
  int tile;     // first tile, from the top of the image
  int tiles;
  int row_phase;
  int group;
  int image;

  __device__ explicit Item(int index) {
    outputs = index % kOutputGroups * (C::channel_groups * kStackChannels);
    index /= kOutputGroups;
    column = index % kStrips * C::tile_columns;
    index /= kStrips;
    tile = index % kSegments * C::segment_tiles;
    tiles = min(C::segment_tiles, kRowTiles - tile);
    index /= kSegments;
    row_phase = index % kRowStep;
    index /= kRowStep;
    group = index % C::groups;
    image = index / C::groups;
  }

  // Input stages of one chunk.
  __device__ int stages() const {
    return C::rolling ? tiles * kTileRows + C::kernel_height - 1 : 1;
  }
};

// --- Packing weights -----------------------------------------------------------------------------

// 16 bytes in registers.
struct alignas(16) Words {
  unsigned word[4];

  __device__ static Words of(uint4 bits) { return {{bits.x, bits.y, bits.z, bits.w}}; }
};

// Writes a vector of channels as the tensor core wants it: floats rounded to TF32, or in two such
// parts, part_bytes apart; 16-bit types as they are.
__device__ __forceinline__ void store_parts(unsigned char* target, int part_bytes, Words vector) {
  if constexpr (sizeof(Scalar) == 4 && C::parts == 1) {
#pragma unroll
    for (unsigned& word : vector.word) {
      word = __float_as_uint(round_operand_to_tf32(__uint_as_float(word)));
    }
  } else if constexpr (sizeof(Scalar) == 4) {
    Words low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = __uint_as_float(vector.word[i]);
      const float high = round_to_tf32(value);
      vector.word[i] = __float_as_uint(high);
      low.word[i] = __float_as_uint(round_to_tf32(value - high));
    }
    *reinterpret_cast<Words*>(target + part_bytes) = low;
  }
  *reinterpret_cast<Words*>(target) = vector;
}

constexpr int kPackedVectors =
    C::groups * kOutputGroups * kChunks * kTaps * C::k_steps * C::channel_groups * 2 * kOutputs;

// A channel of the group as the products have it: one of the input's, at one of its phases.
struct FoldedChannel {
  int channel, row, column;

  __device__ explicit FoldedChannel(int index)
      : channel(index / (C::fold_height * C::fold_width)),
        row(index / C::fold_width % C::fold_height),
        column(index % C::fold_width) {}
};

// The weight of output channel `out` for input channel `in`, both of the group; zero for what
// folding, or summing two columns, has added to the kernel. `sum` says which of the two.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int group, int out, int in,
                                            int row, int column, int sum) {
  const FoldedChannel folded(in);
  row = row * C::fold_height + folded.row;
  column = column * C::fold_width + folded.column;
  if (row >= C::weight_height || column >= C::weight_width) return Scalar{};
  long long k = group * C::group_out + out;
  long long c = folded.channel;
  if constexpr (C::transposed) {
    k = group * C::group_in + in;
    c = out;
    row = C::last_tap_row - C::tap_step_height * row;
    column = C::last_tap_column - C::tap_step_width * column + sum;
    if (C::column_sums > 1 && (column < 0 || column >= C::weight_width)) return Scalar{};
  }
  return weight[k * C::weight_stride_out + c * C::weight_stride_in +
                static_cast<long long>(row) * C::weight_stride_height +
                static_cast<long long>(column) * C::weight_stride_width];
}

// Weights as the consumers want them, a chunk's taps in one piece:
//   [group][output group][chunk][tap][k step][part][channel group][2][64][16 bytes]
__device__ __forceinline__ void pack(const Scalar* weight, unsigned char* packed) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kPackedVectors; i += step) {
    int rest = i;
    const int m = rest % kOutputs;
    rest /= kOutputs;
    const int plane = rest % 2;
    rest /= 2;
    const int channel_group = rest % C::channel_groups;
    rest /= C::channel_groups;
    const int k_step = rest % C::k_steps;
    rest /= C::k_steps;
    const int tap = rest % kTaps;
    rest /= kTaps;
    const int chunk = rest % kChunks;
    rest /= kChunks;
    const int output_group = rest % kOutputGroups;
    const int group = rest / kOutputGroups;

    const int stacked = row_of_column(m) / kStackChannels;
    const int out = (output_group * C::channel_groups + channel_group) * kStackChannels +
                    row_of_column(m) % kStackChannels;
    const int sum = m / 8 % C::column_sums;
    const int row = tap / C::kernel_width - stacked;
    const int column = tap % C::kernel_width;
    const int first = (chunk * kChunkPlanes + 2 * k_step + plane) * kVector;
    const bool exists = out < C::group_out && row >= 0 && row < C::kernel_height;
    Vector<Scalar, kVector> vector;
    for (int j = 0; j < kVector; ++j) {
      const bool valid = exists && first + j < C::group_in;
      vector.element[j] =
          valid ? weight_at(weight, group, out, first + j, row, column, sum) : Scalar{};
    }
    const long long product = static_cast<long long>(i / (2 * kOutputs * C::channel_groups)) *
                                  (C::parts * C::channel_groups) +
                              channel_group;
    store_parts(packed + product * kProductBytes + (plane * kOutputs + m) * 16,
                C::channel_groups * kProductBytes, reinterpret_cast<const Words&>(vector));
  }
}

// --- Producers -----------------------------------------------------------------------------------

// One thread: sends every tile's weights through the ring, or all weights once if they fit.
__device__ __forceinline__ void stream_weights(const unsigned char* packed, int items) {
  constexpr int kPerTile = kChunks * kWeightStages;
  const auto send = [](int stage, const unsigned char* source) {
    Barrier* const full = &barriers().weights_full[stage];
    barrier_arrive_expect(full, kWeightBytes);
    bulk_load(shared_memory() + kWeightRing + stage * kWeightBytes, source, kWeightBytes, full);
  };
  if constexpr (C::resident) {
    static_assert(!C::resident || C::weight_stages == kPerTile, "all of them fit");
    for (int i = 0; i < kPerTile; ++i) send(i, packed + i * kWeightBytes);
    return;
  }
  Ring<C::weight_stages> at(1);
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item(index);
    const int part =
        item.group * kOutputGroups + item.outputs / (C::channel_groups * kStackChannels);
    const unsigned char* const source =
        packed + static_cast<long long>(part) * kPerTile * kWeightBytes;
    for (int tile = 0; tile < item.tiles; ++tile) {
      for (int i = 0; i < kPerTile; ++i) {
        barrier_wait(&barriers().weights_empty[at.stage], at.parity);
        send(at.stage, source + static_cast<long long>(i) * kWeightBytes);
        at.advance();
      }
    }
  }
}

constexpr int kLoaders = 32 * kLoaderWarps;  // threads

// Distances in the input, in elements.
constexpr bool kFolded = C::fold_height * C::fold_width > 1;
constexpr int kInGroup = C::group_in / (C::fold_height * C::fold_width);
constexpr int kInColumn = C::in_channels_last ? C::groups * kInGroup : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInChannel = C::in_channels_last ? 1 : C::in_height * C::in_width;
constexpr int kInImage = C::groups * kInGroup * C::in_height * C::in_width;

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
    return group + (channel * kInChannel + y * kInRow + x * kInColumn);
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

__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }
template <class Half>
__device__ __forceinline__ unsigned bits_of(Half value) {
  return value.bits;
}

// A vector of channels.
__device__ __forceinline__ Words words_of(const Scalar* elements) {
  Words result;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Scalar* const first = elements + k * (kVector / 4);
    if constexpr (sizeof(Scalar) == 4) {
      result.word[k] = __float_as_uint(widen(*first));
    } else {
      result.word[k] = __byte_perm(bits_of(first[0]), bits_of(first[1]), 0x5410);
    }
  }
  return result;
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
  __device__ static bool valid(const Place& place, int channel) {
    return place.inside() && (kWholeChunks || channel < C::group_in);
  }
  __device__ void load(const Place& place, int channel) {
    const auto* const source = reinterpret_cast<const uint4*>(place.address(channel));
    loaded = Words::of(load_or_zero(source, valid(place, channel)));
  }
  __device__ Words vector(int) const { return loaded; }
  __device__ static int offset(int) { return 0; }
};

// Anything else: two vectors of one pixel, channel by channel. Neighbouring lanes load neighbouring
// pixels.
struct PixelUnit {
  static constexpr int kVectors = 2;
  static constexpr int kCount = kPartPixels / 2;
  Scalar loaded[2 * kVector];

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
      for (int j = 0; j < 2 * kVector; ++j) loaded[j] = load_element(source + j * kInChannel);
    } else {
#pragma unroll
      for (int j = 0; j < 2 * kVector; ++j) {
        const bool valid = inside && (kWholeChunks || channel + j < C::group_in);
        loaded[j] = load_element(source + j * kInChannel, valid);
      }
    }
  }
  __device__ void load_folded(const Place& place, int channel) {
#pragma unroll
    for (int j = 0; j < 2 * kVector; ++j) {
      const FoldedChannel folded(channel + j);
      const bool valid =
          place.inside(folded.row, folded.column) && (kWholeChunks || channel + j < C::group_in);
      loaded[j] = load_element(
          place.address(folded.channel) + folded.row * kInRow + folded.column * kInColumn, valid);
    }
  }
  __device__ Words vector(int i) const { return words_of(loaded + i * kVector); }
  __device__ static int offset(int i) { return i * kPlanePixels; }
};

template <bool kFirst, class First, class Second>
struct Either {
  using type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
  using type = Second;
};
using Unit = Either<C::vector_loads, VectorUnit, PixelUnit>::type;
constexpr int kBatches = ceil_div(Unit::kCount, kLoaders* C::batch);  // of a stage

__device__ __forceinline__ bool unit_exists(int index) {
  return Unit::kCount % (kLoaders * C::batch) == 0 || index < Unit::kCount;
}

// Goes through all input stages of a block: of each chunk, of each item.
struct StageCursor {
  int index;
  int items;
  Item item;
  int chunk = 0;
  int stage = 0;

  __device__ explicit StageCursor(int items) : index(blockIdx.x), items(items), item(blockIdx.x) {}
  __device__ bool more() const { return index < items; }
  __device__ void advance() {
    if (++stage < item.stages()) return;
    stage = 0;
    if (++chunk < kChunks) return;
    chunk = 0;
    index += gridDim.x;
    if (more()) item = Item(index);
  }
};

// The same, and through the batches of each stage.
struct LoadCursor : StageCursor {
  int batch = 0;

  __device__ explicit LoadCursor(int items) : StageCursor(items) {}
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
    const int slot = pixel / kSlotPixels;
    const int line = pixel % kSlotPixels / C::pitch;
    const int position = pixel % kSlotPixels % C::pitch;
    const int y = row + C::dilation_height * (slot / kColumnSlots + line * kRowPhases);
    const int column_phase = slot % kColumnSlots * kColumnStep % kColumnPhases;
    const int x = column + kColumnUnit * (column_phase + position * kColumnPhases);
    return {group, y * C::fold_height - C::padding_top, x * C::fold_width - C::padding_left,
            unit_exists(index)};
  }
  __device__ __forceinline__ int channel_of(int index) const {
    return channel + Unit::plane(index) * kVector;
  }
};

// Starts loading a thread's units of a batch.
__device__ __forceinline__ void load_batch(const Scalar* input, const LoadCursor& at, int thread,
                                           Unit (&units)[C::batch]) {
  const Source source(input, at);
#pragma unroll
  for (int k = 0; k < C::batch; ++k) {
    const int index = thread + kLoaders * (at.batch * C::batch + k);
    units[k].load(source.find(index), source.channel_of(index));
  }
}

// Writes them to a stage.
__device__ __forceinline__ void store_batch(unsigned char* stage, int batch, int thread,
                                            const Unit (&units)[C::batch]) {
#pragma unroll
  for (int k = 0; k < C::batch; ++k) {
    const int index = thread + kLoaders * (batch * C::batch + k);
    if (!unit_exists(index)) continue;
    const int first = Unit::plane(index) * kPlanePixels + Unit::pixel(index);
#pragma unroll
    for (int i = 0; i < Unit::kVectors; ++i) {
      store_parts(stage + (first + Unit::offset(i)) * 16, kPartPixels * 16, units[k].vector(i));
    }
  }
}

// Three warps: load all input stages, a few batches ahead of what they write.
__device__ __forceinline__ void load_input(const Scalar* input, int items) {
  const int thread = static_cast<int>(threadIdx.x) - 32;
  const int lane = thread % 32;
  Unit units[C::batches_ahead][C::batch];
  LoadCursor next(items);
  Ring<C::input_stages> at(1);
  int under_way = 0;
  int batch = 0;
#pragma unroll
  for (int i = 0; i < C::batches_ahead - 1; ++i) {
    if (next.more()) {
      load_batch(input, next, thread, units[i]);
      next.advance();
      ++under_way;
    }
  }
  while (under_way > 0 || next.more()) {
#pragma unroll
    for (int i = 0; i < C::batches_ahead; ++i) {
      if (next.more()) {
        load_batch(input, next, thread, units[(i + C::batches_ahead - 1) % C::batches_ahead]);
        next.advance();
        ++under_way;
      }
      if (under_way == 0) break;
      --under_way;
      if (batch == 0) barrier_wait(&barriers().input_empty[at.stage], at.parity);
      store_batch(shared_memory() + kInputRing + at.stage * kInputBytes, batch, thread, units[i]);
      if (++batch == kBatches) {
        batch = 0;
        fence_async_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(&barriers().input_full[at.stage]);
        at.advance();
      }
    }
  }
}

// The same where neither transposing nor rounding is to be done: asynchronous copies. A consumer
// gives a stage back when it has the next: of two stages, none may be under way while this waits.
__device__ __forceinline__ void copy_input(const Scalar* input, int items) {
  const int thread = static_cast<int>(threadIdx.x) - 32;
  Ring<C::input_stages> at(1);
  Ring<C::input_stages> landed(0);
  const auto arrive = [&] {
    fence_async_shared();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(&barriers().input_full[landed.stage]);
    landed.advance();
  };
  constexpr int kAhead = C::input_stages > 2 ? 1 : 0;  // stages
  int under_way = 0;
  for (LoadCursor next(items); next.more(); next.advance()) {
    const Source source(input, next);
    if (next.batch == 0) barrier_wait(&barriers().input_empty[at.stage], at.parity);
    unsigned char* const stage = shared_memory() + kInputRing + at.stage * kInputBytes;
#pragma unroll
    for (int k = 0; k < C::batch; ++k) {
      const int index = thread + kLoaders * (next.batch * C::batch + k);
      const Place place = source.find(index);
      const int channel = source.channel_of(index);
      if (place.exists) {
        copy_async<16>(stage + (Unit::plane(index) * kPlanePixels + Unit::pixel(index)) * 16,
                       place.address(channel), VectorUnit::valid(place, channel));
      }
    }
    if (next.batch == kBatches - 1) {
      copy_async_commit();
      at.advance();
      if (++under_way > kAhead) {
        copy_async_wait<kAhead>();
        arrive();
        --under_way;
      }
    }
  }
  copy_async_wait<0>();
  if (under_way > 0) arrive();
}

// --- Producers of contiguous input: bulk copies to shared memory, and from there
// ------------------
//
// Lines come in pieces of 32 bytes' channels, by one bulk copy a channel, some pieces ahead of the
// one that a warp transposes, rounds or splits. A copy starts at the multiple of 16 bytes before
// its first pixel, so that rows may begin anywhere.

constexpr int kLines = kRowSlots * kStageRows;  // of a stage's plane
constexpr int kPieces = C::k_steps * kLines;
static_assert(!C::staged || (!C::in_channels_last && C::stride_width == 1 && !kFolded), "");

// Goes through the pieces of one warp: every third, from stage to stage.
struct PieceCursor : StageCursor {
  int piece;

  __device__ PieceCursor(int items, int warp) : StageCursor(items), piece(warp) { settle(); }
  __device__ void settle() {
    for (; piece >= kPieces && more(); piece -= kPieces) StageCursor::advance();
  }
  __device__ void advance() {
    piece += kLoaderWarps;
    settle();
  }
};

// A piece, and the part of it that is inside of the image.
struct Piece {
  int channel;          // the first, in its group
  int target;           // where its first pixel lies in its stage, in 16 bytes
  int before;           // pixels outside, before the first inside
  int columns;          // pixels inside
  const Scalar* first;  // the first pixel inside, of its first channel

  __device__ Piece(const Source& source, int index) {
    const int k_step = index % C::k_steps;
    const int line = index / C::k_steps;
    const int slot = kRowSlots == 1 ? 0 : line / kStageRows;
    const int y = source.row +
                  C::dilation_height * (slot + (line - slot * kStageRows) * kRowPhases) -
                  C::padding_top;
    const int x = source.column - C::padding_left;
    channel = source.channel + k_step * kPieceChannels;
    target = 2 * k_step * kPlanePixels + line * C::pitch;
    before = max(-x, 0);
    const bool exists = static_cast<unsigned>(y) < static_cast<unsigned>(C::in_height);
    columns = exists ? max(min(C::pitch, C::in_width - x) - before, 0) : 0;
    first = source.group + (channel * kInChannel + y * kInRow + x + before);
  }
  __device__ __forceinline__ bool has(int of_piece) const {
    return kWholeChunks || channel + of_piece < C::group_in;
  }
  // How far a channel's first pixel lies beyond a multiple of 16 bytes, in elements.
  __device__ __forceinline__ int shift(int of_piece) const {
    const auto low_bits = static_cast<unsigned>(reinterpret_cast<unsigned long long>(first));
    return static_cast<int>((low_bits / kScalarBytes + of_piece * kInChannel) % kVector);
  }
};

// Starts to copy a piece: each of the first lanes its channel.
__device__ __forceinline__ void fetch(const Piece& piece, const Scalar* input_end, Scalar* raw,
                                      Barrier* full, int lane) {
  if (lane >= kPieceChannels) return;
  int bytes = 0;
  if (piece.columns > 0 && piece.has(lane)) {
    const int shift = piece.shift(lane);
    const Scalar* const source = piece.first + lane * kInChannel - shift;
    const int count = shift + piece.columns;
    Scalar* const target = raw + lane * kRawChannel;
    bytes = round_up(count, kVector) * kScalarBytes;
    if (kInImage % kVector != 0 && source + round_up(count, kVector) > input_end) {
      // The tensor ends within the last 16 bytes.
      bytes -= 16;
      for (int i = bytes / kScalarBytes; i < count; ++i) target[i] = source[i];
    }
    if (bytes > 0) bulk_load(target, source, bytes, full);
  }
  // The phase ends with the last lane's arrival, and all of the bytes.
  barrier_arrive_expect(full, bytes);
}

// A vector of channels of each of some pixels, 32 apart, to their stage.
template <bool kInside>
__device__ __forceinline__ void convert_batch(const Piece& piece, int plane,
                                              const Scalar* const (&channels)[kVector],
                                              unsigned char* target, int first) {
  Words vectors[C::batch];
#pragma unroll
  for (int k = 0; k < C::batch; ++k) {
    const int pixel = first + 32 * k;
    const bool inside = kInside ? pixel < C::pitch
                                : static_cast<unsigned>(pixel - piece.before) <
                                      static_cast<unsigned>(piece.columns);
    Scalar elements[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const bool valid = inside && (kInside || piece.has(plane * kVector + j));
      elements[j] = valid ? channels[j][pixel] : Scalar{};
    }
    vectors[k] = words_of(elements);
  }
#pragma unroll
  for (int k = 0; k < C::batch; ++k) {
    const int pixel = first + 32 * k;
    if (pixel < C::pitch) store_parts(target + pixel * 16, kPartPixels * 16, vectors[k]);
  }
}

// Writes a piece that has arrived to its stage.
__device__ __forceinline__ void convert(const Piece& piece, const Scalar* raw, unsigned char* stage,
                                        int lane) {
  const bool whole =
      piece.columns == C::pitch && (kWholeChunks || piece.channel + kPieceChannels <= C::group_in);
#pragma unroll
  for (int plane = 0; plane < 2; ++plane) {
    const Scalar* channels[kVector];  // at the line's first pixel, which may be outside
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int i = plane * kVector + j;
      channels[j] = raw + i * kRawChannel + piece.shift(i) - piece.before;
    }
    unsigned char* const target = stage + (piece.target + plane * kPlanePixels) * 16;
    if (whole) {
#pragma unroll
      for (int first = 0; first < C::pitch; first += 32 * C::batch) {
        convert_batch<true>(piece, plane, channels, target, first + lane);
      }
    } else {
#pragma unroll
      for (int first = 0; first < C::pitch; first += 32 * C::batch) {
        convert_batch<false>(piece, plane, channels, target, first + lane);
      }
    }
  }
}

// Three warps: load all input stages.
__device__ __forceinline__ void stage_input(const Scalar* input, const Scalar* input_end,
                                            int items) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // From one lane, for the compiler to see that it is the same for all.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - 1;
  Barrier* const full = barriers().raw_full + warp * C::raw_slots;
  Scalar* const raw =
      reinterpret_cast<Scalar*>(shared_memory() + kRawRing + warp * C::raw_slots * kRawBytes);
  PieceCursor next(items, warp);
  const auto fetch_next = [&](int slot) {
    if (next.more()) {
      fetch(Piece(Source(input, next), next.piece), input_end, raw + slot * kRawElements,
            full + slot, lane);
      next.advance();
    }
  };
  for (int slot = 0; slot < C::raw_slots; ++slot) fetch_next(slot);
  Ring<C::input_stages> at(1);
  Ring<C::raw_slots> arrived(0);
  int piece = warp;
  for (StageCursor stage(items); stage.more(); stage.advance()) {
    barrier_wait(&barriers().input_empty[at.stage], at.parity);
    const Source source(input, stage);
    for (; piece < kPieces; piece += kLoaderWarps) {
      barrier_wait(full + arrived.stage, arrived.parity);
      convert(Piece(source, piece), raw + arrived.stage * kRawElements,
              shared_memory() + kInputRing + at.stage * kInputBytes, lane);
      __syncwarp();
      fetch_next(arrived.stage);
      arrived.advance();
    }
    piece -= kPieces;
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(&barriers().input_full[at.stage]);
    at.advance();
  }
}

// --- Consumers -----------------------------------------------------------------------------------

constexpr int kSums = C::pixels / 2;  // of a thread

// Where a tap's first pixel lies in the stages of a tile whose first is `stage`, in 16 bytes.
__device__ __forceinline__ int tap_offset(int stage, int first_row, int tap) {
  const int tap_row = tap / C::kernel_width;
  const int tap_column = tap % C::kernel_width;
  const int column_slot = tap_column % kColumnPhases;
  const int column = column_slot * kSlotPixels + tap_column * kColumnStep / kColumnPhases;
  if constexpr (C::rolling) {
    int of_row = stage + first_row + tap_row;
    if (of_row >= C::input_stages) of_row -= C::input_stages;
    return of_row * (kInputBytes / 16) + column;
  } else {
    return stage * (kInputBytes / 16) + tap_row % kRowPhases * (kColumnSlots * kSlotPixels) +
           (first_row + tap_row / kRowPhases) * C::pitch + column;
  }
}

// A warpgroup that multiplies and stores; what it keeps from one tile to the next.
struct Consumer {
  int lane;
  int warp;  // of the warpgroup
  int warpgroup;
  int channel_group;
  int pixel_group;
  Matrix input_matrix;
  Matrix weight_matrix;
  Ring<C::input_stages> input{0};  // the next stage to wait for
  Ring<C::weight_stages> weights{0};
  Ring<C::input_stages> spent_input{0};  // the next to give back
  Ring<C::weight_stages> spent_weights{0};

  __device__ Consumer() {
    lane = static_cast<int>(threadIdx.x) % 32;
    // From one lane, for the compiler to see that it is the same for all.
    const int number = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - 4;
    warp = number % 4;
    warpgroup = number / 4;
    channel_group = warpgroup % C::channel_groups;
    pixel_group = warpgroup / C::channel_groups;
    input_matrix = matrix(shared_memory() + kInputRing, kPlaneBytes, 128);
    weight_matrix =
        matrix(shared_memory() + kWeightRing + channel_group * kProductBytes, kOutputs * 16, 128);
  }

  // Waits for the input of a chunk of a tile, as far as no earlier tile has; its first stage.
  __device__ __forceinline__ int wait_for_input(bool first_of_item) {
    const int first = C::rolling ? spent_input.stage : input.stage;
    const int stages = !C::rolling ? 1 : first_of_item ? kHaloRows : kTileRows;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_wait(&barriers().input_full[input.stage], input.parity);
      input.advance();
    }
    return first;
  }

  // Gives back the input of a chunk of a tile, but for what the next tile reads too.
  __device__ __forceinline__ void release_input(bool last_of_item) {
    const int stages = !C::rolling ? 1 : last_of_item ? kHaloRows : kTileRows;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (lane == 0) barrier_arrive(&barriers().input_empty[spent_input.stage]);
      spent_input.advance();
    }
  }

  __device__ __forceinline__ int wait_for_weights(int stage_of_tile) {
    if constexpr (C::resident) {
      barrier_wait(&barriers().weights_full[stage_of_tile], 0);
      return stage_of_tile;
    } else {
      const int stage = weights.stage;
      barrier_wait(&barriers().weights_full[stage], weights.parity);
      weights.advance();
      return stage;
    }
  }

  __device__ __forceinline__ void release_weights() {
    if constexpr (!C::resident) {
      if (lane == 0) barrier_arrive(&barriers().weights_empty[spent_weights.stage]);
      spent_weights.advance();
    }
  }

  // The products of one stage of weights.
  __device__ __forceinline__ void multiply(float (&sums)[kSums], int weight_stage, int input_stage,
                                           int first_tap, bool accumulate) const {
    constexpr int kPart = C::channel_groups * kProductBytes / 16;
    const Matrix left = weight_matrix + weight_stage * (kWeightBytes / 16);
    // The large products of split numbers last: what the small ones add is not lost.
#pragma unroll
    for (int large = C::parts == 2 ? 0 : 1; large < 2; ++large) {
#pragma unroll
      for (int j = 0; j < C::stage_taps; ++j) {
        const Matrix right =
            input_matrix + tap_offset(input_stage, pixel_group * kGroupRows, first_tap + j);
#pragma unroll
        for (int k = 0; k < C::k_steps; ++k) {
          const Matrix a = left + (j * C::k_steps + k) * (C::parts * kPart);
          const Matrix b = right + 2 * k * kPlanePixels;
          if (large) {
            wgmma<C::pixels>(Operand{}, sums, a, b, accumulate);
          } else {
            if constexpr (C::low_products) {
              wgmma<C::pixels>(Operand{}, sums, a + kPart, b + kPartPixels, accumulate);
              accumulate = true;
            }
            wgmma<C::pixels>(Operand{}, sums, a, b + kPartPixels, accumulate);
            wgmma<C::pixels>(Operand{}, sums, a + kPart, b, true);
          }
          accumulate = true;
        }
      }
    }
    wgmma_commit();
  }

  // One tile's sums, without the bias. Stages are given back one step late, when their products are
  // complete but the next ones are on their way already.
  __device__ __forceinline__ void compute(float (&sums)[kSums], bool first_of_item,
                                          bool last_of_item) {
    bool accumulate = false;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int input_stage = wait_for_input(first_of_item);
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        const int weight_stage = wait_for_weights(chunk * kWeightStages + stage);
        wgmma_fence();
        multiply(sums, weight_stage, input_stage, stage * C::stage_taps, accumulate);
        wgmma_wait<1>();
        if (accumulate) release_weights();
        if (chunk > 0 && stage == 0) release_input(false);
        accumulate = true;
      }
    }
    wgmma_wait<0>();
    hold_registers(sums);
    release_weights();
    release_input(last_of_item);
  }

  // The same in two levels, for numbers in two parts. What a total loses as it is rounded is where
  // the next sums begin (`compensated`): long sums are no less exact than short ones.
  __device__ __forceinline__ void compute_split(float (&totals)[kSums], bool first_of_item,
                                                bool last_of_item) {
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals[i] = sums[i] = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int input_stage = wait_for_input(first_of_item);
      int weight_stage = wait_for_weights(chunk * kWeightStages);
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        wgmma_fence();
        multiply(sums, weight_stage, input_stage, stage * C::stage_taps, C::compensated);
        // The next wait is over before the products are.
        if (stage < kWeightStages - 1) {
          weight_stage = wait_for_weights(chunk * kWeightStages + stage + 1);
        }
        wgmma_wait<0>();
        hold_registers(sums);
        release_weights();
        if (stage == kWeightStages - 1) release_input(last_of_item);
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const float total = totals[i] + sums[i];
          if constexpr (C::compensated) sums[i] -= total - totals[i];
          totals[i] = total;
        }
      }
    }
  }
};

// --- Storing a tile ------------------------------------------------------------------------------

constexpr int kPasses = ceil_div(C::pixels, C::pass_pixels);
constexpr int kOutChannels = C::groups * C::group_out;
constexpr int kOutPlane = C::image_height * C::image_width;
constexpr int kOutImage = kOutChannels * kOutPlane;
constexpr int kOutColumn = C::out_channels_last ? kOutChannels : 1;
constexpr int kSector = 32 / kScalarBytes;  // elements that memory writes at once

// What is stored of a row: a column for each pixel, or `interleave` columns.
constexpr int kStoredWidth = C::interleave == 1 ? C::out_width : C::image_width;
constexpr int kStoredColumns = C::interleave * C::tile_columns;
constexpr int kStoredPitch = C::interleave * C::pitch;
constexpr int kStoredPass = C::interleave * C::pass_pixels;
static_assert(C::interleave == 1 || (C::interleave == 2 && C::out_step_width == 2), "pairs");
static_assert(C::interleave == 1 || (!C::out_channels_last && C::lead == 0), "contiguous rows");
static_assert(!C::bulk_stores || C::out_step_width == C::interleave, "of whole rows");

// Where stored rows and columns lie in the image: the output of a layer that is a phase of a
// strided one's gradient has other phases' rows and columns between its own. What no phase reaches
// is cleared by the one beside it.
constexpr int kStoredStep = C::interleave == 1 ? C::out_step_width : 1;
constexpr int kStoredBegin = C::interleave == 1 ? C::column_begin : 0;
constexpr int kStoredEnd = C::interleave == 1 ? C::column_end : 1;
constexpr int kStoredAt = C::interleave == 1 ? C::column_at : 0;
constexpr bool kRowsInside =
    (C::out_height - 1) * C::out_step_height + C::row_end <= C::image_height;
constexpr bool kStoredInside = (kStoredWidth - 1) * kStoredStep + kStoredEnd <= C::image_width;

// Where a warpgroup's sums go.
struct Target {
  Scalar* image;
  int outputs;  // first channel, in the group
  int group;
  int row;     // output row of the first pixel, for stacked row 0
  int column;  // stored column of pixel `lead`

  __device__ Target(Scalar* output, const Item& item, int tile, const Consumer& consumer) {
    image = output + static_cast<long long>(item.image) * kOutImage;
    outputs = item.outputs + consumer.channel_group * kStackChannels;
    group = item.group;
    row = item.row_phase +
          kRowStep * ((item.tile + tile) * kTileRows + consumer.pixel_group * kGroupRows);
    column = C::interleave * item.column;
  }

  // The channel of a row of the product, in its group.
  __device__ int channel(int product_row) const {
    return outputs + row_of_column(product_row) % kStackChannels;
  }
  // The output row of the same, for the tile's line-th row of pixels.
  __device__ int output_row(int product_row, int line) const {
    return row + kRowStep * (line + row_of_column(product_row) / kStackChannels);
  }
  __device__ bool exists(int product_row, int line) const {
    return channel(product_row) < C::group_out && output_row(product_row, line) < C::out_height;
  }
  // The image's row for an output row; i is row_at, or that of a row to clear.
  __device__ int image_row(int product_row, int line, int i) const {
    return C::out_step_height * output_row(product_row, line) + i;
  }
  // The element in the image's column 0.
  __device__ Scalar* row_start(int product_row, int y) const {
    const int c = group * C::group_out + channel(product_row);
    if constexpr (C::out_channels_last) {
      return image + (y * C::image_width * kOutChannels + c);
    } else {
      return image + ((c * C::image_height + y) * C::image_width);
    }
  }

  // Stores an element, or a vector of channels, and clears what is beside it.
  template <class Stored>
  __device__ __forceinline__ void store(int product_row, int line, int stored_column,
                                        const Stored& value) const {
#pragma unroll
    for (int i = C::row_begin; i < C::row_end; ++i) {
      const int y = image_row(product_row, line, i);
      if (!kRowsInside && y >= C::image_height) break;
      Scalar* const row = row_start(product_row, y);
#pragma unroll
      for (int j = kStoredBegin; j < kStoredEnd; ++j) {
        const int x = kStoredStep * stored_column + j;
        if (!kStoredInside && x >= C::image_width) break;
        *reinterpret_cast<Stored*>(row + x * kOutColumn) =
            i == C::row_at && j == kStoredAt ? value : Stored{};
      }
    }
  }
};

// Two sums to neighbours of the output's type, which the first argument stands for.
__device__ __forceinline__ Vector<float, 2> narrow_pair(float, float first, float second) {
  return {{first, second}};
}
__device__ __forceinline__ unsigned narrow_pair(float16, float first, float second) {
  return floats_to_halves(first, second);
}
__device__ __forceinline__ unsigned narrow_pair(bfloat16, float first, float second) {
  return floats_to_bfloats(first, second);
}

using Pair = decltype(narrow_pair(Scalar{}, 0.0f, 0.0f));

__device__ __forceinline__ void stage_pair(Scalar* target, float first, float second) {
  const auto pair = narrow_pair(Scalar{}, first, second);
  if constexpr (!C::bulk_stores || kStoredWidth % 2 == 0) {
    *reinterpret_cast<Pair*>(target) = pair;
  } else {
    const auto& elements = reinterpret_cast<const Vector<Scalar, 2>&>(pair);
    target[0] = elements.element[0];
    target[1] = elements.element[1];
  }
}

// Sums of 8 channels to rows of pixels; `half` says which 8 of the warp's 16. With bulk stores, a
// row starts as far beyond a multiple of 16 bytes as it will in global memory.
__device__ __forceinline__ void stage_rows(const float (&sums)[kSums], Scalar* row, int turn,
                                           int half, float bias, int lane) {
#pragma unroll
  for (int i = 0; i < C::pass_pixels / 8; ++i) {
    const int j = turn * (C::pass_pixels / 8) + i;
    if (8 * j < C::pixels) {
      Scalar* const target = row + C::interleave * (8 * i + lane % 4 * 2);
      const float first = sums[4 * j + 2 * half] + bias;
      const float second = sums[4 * j + 2 * half + 1] + bias;
      if constexpr (C::interleave == 1) {
        stage_pair(target, first, second);
      } else if constexpr (C::column_sums == 2) {
        stage_pair(target, first, sums[4 * j + 2] + bias);
        stage_pair(target + 2, second, sums[4 * j + 3] + bias);
      } else {
        stage_pair(target, C::column_at ? 0.0f : first, C::column_at ? first : 0.0f);
        stage_pair(target + 2, C::column_at ? 0.0f : second, C::column_at ? second : 0.0f);
      }
    }
  }
}

// Whether every row, and every piece of one, starts at a multiple of 16 bytes.
constexpr bool kRowsAligned =
    C::lead == 0 && kStoredWidth % kVector == 0 && (kStrips == 1 || kStoredColumns % kVector == 0);

// Columns [begin, end) of a row: what is in whole 16 bytes by a bulk copy, the rest one by one.
__device__ __forceinline__ void store_columns(Scalar* row, const Scalar* staged, int begin,
                                              int end) {
  if (begin >= end) return;
  const int shift = kRowsAligned ? 0 : misalignment(row, kVector);
  const int aligned_begin = min(round_up(begin + shift, kVector) - shift, end);
  const int aligned_end = max((end + shift) / kVector * kVector - shift, aligned_begin);
  if (aligned_begin < aligned_end) {
    bulk_store(row + aligned_begin, staged + aligned_begin,
               (aligned_end - aligned_begin) * kScalarBytes);
  }
  if constexpr (!kRowsAligned) {
#pragma unroll 1
    for (int x = begin; x < aligned_begin; ++x) row[x] = staged[x];
#pragma unroll 1
    for (int x = aligned_end; x < end; ++x) row[x] = staged[x];
  }
}

// The columns of a row that a turn stores, of the tile's line-th row of pixels. With `lead`, they
// begin where the row's memory has a multiple of 32 bytes.
struct Window {
  Scalar* row;     // the element in the image's column 0
  int at;          // the stored column of the turn's first pixel, were it in this line
  int begin, end;  // stored columns
  int beyond;      // how far the row begins beyond a multiple of 32 bytes, in elements

  __device__ __forceinline__ Window(Scalar* row, const Target& target, int line, int turn)
      : row(row) {
    at = target.column - C::lead + turn * kStoredPass - line * kStoredPitch;
    beyond = kRowsAligned ? 0 : misalignment(row, kSector);
    begin = target.column - (C::lead > 0 ? beyond : 0);
    end = min(min(begin + kStoredColumns, at + kStoredPass), kStoredWidth);
    begin = max(C::lead > 0 ? max(begin, 0) : begin, at);
  }
};

constexpr int kStoringLanes = 8;  // of a warp, with bulk stores

// Rows of 8 channels from shared to global memory, each by one lane: bulk copies start one by one,
// but what they need is computed for all at once.
__device__ __forceinline__ void store_staged(const Scalar* staging, const Target& target, int first,
                                             int turn, int lane) {
  if (lane >= kStoringLanes) return;
#pragma unroll
  for (int line = 0; line < C::tile_rows; ++line) {
    const int y = target.image_row(first, line, C::row_at);
    if (!target.exists(first + lane, line) || (!kRowsInside && y >= C::image_height)) continue;
    const Window window(target.row_start(first + lane, y), target, line, turn);
    store_columns(window.row, staging + lane * kRowPitch - window.at + window.beyond % kVector,
                  window.begin, window.end);
  }
  bulk_store_commit();
}

// Clears the rows beside those: of other phases, which no tap reaches.
__device__ __forceinline__ void clear_beside(const Target& target, int first, int turn, int lane) {
  constexpr int kCleared = kRowsAligned ? kVector : 1;
#pragma unroll
  for (int line = 0; line < C::tile_rows; ++line) {
#pragma unroll
    for (int image_row = C::row_begin; image_row < C::row_end; ++image_row) {
      const int y = target.image_row(first, line, image_row);
      if (image_row == C::row_at || (!kRowsInside && y >= C::image_height)) continue;
      for (int i = 0; i < 8 && target.exists(first + i, line); ++i) {
        const Window window(target.row_start(first + i, y), target, line, turn);
        for (int x = window.begin + kCleared * lane; x < window.end; x += kCleared * 32) {
          *reinterpret_cast<Vector<Scalar, kCleared>*>(window.row + x) = {};
        }
      }
    }
  }
}

// Contiguous outputs, 8 channels at a time. With `lead`, neighbouring strips share no sector.
__device__ __forceinline__ void store_rows(const float (&sums)[kSums], const float (&bias)[2],
                                           Scalar* staging, const Target& target, int warp,
                                           int lane) {
  constexpr int kHalves = 2 / C::column_sums;
  static_assert(kHalves * kPasses % C::buffers == 0, "tiles begin with the same buffer");
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int first = 16 * warp + 8 * half;  // of the product's rows
    const Scalar* const row = target.row_start(first, target.image_row(first, 0, C::row_at));
    const int shift =
        C::bulk_stores ? misalignment(row + static_cast<long long>(lane / 4) * kOutPlane, kVector)
                       : 0;
#pragma unroll
    for (int turn = 0; turn < kPasses; ++turn) {
      if constexpr (C::bulk_stores) {
        if (lane < kStoringLanes) bulk_store_wait_read<C::buffers - 1>();
      }
      __syncwarp();
      Scalar* const buffer = staging + (half * kPasses + turn) % C::buffers * (8 * kRowPitch);
      stage_rows(sums, buffer + lane / 4 * kRowPitch + shift, turn, half, bias[half], lane);
      if constexpr (C::bulk_stores) {
        fence_async_shared();
        __syncwarp();
        store_staged(buffer, target, first, turn, lane);
        clear_beside(target, first, turn, lane);
      } else {
        __syncwarp();
#pragma unroll 1
        for (int channel = 0; channel < 8; ++channel) {
#pragma unroll
          for (int i = 0; i < ceil_div(kStoredPass, 32); ++i) {
            const int staged = 32 * i + lane;
            const int line = (turn * kStoredPass + staged) / kStoredPitch;
            const int at = (turn * kStoredPass + staged) % kStoredPitch;
            if (staged < kStoredPass && line < C::tile_rows && at < kStoredColumns &&
                target.column + at < kStoredWidth && target.exists(first + channel, line)) {
              target.store(first + channel, line, target.column + at,
                           buffer[channel * kRowPitch + staged]);
            }
          }
        }
      }
    }
  }
}

// Sums of 16 channels to pixels of 64 channels.
template <class T>
__device__ __forceinline__ void stage_pixels(const float (&sums)[kSums], T* staging, int turn,
                                             const float (&bias)[2], int warp, int lane) {
#pragma unroll
  for (int i = 0; i < C::pass_pixels / 8; i += 2) {
    const int j = turn * (C::pass_pixels / 8) + i;
    if constexpr (sizeof(T) == 2) {
      // Two times 8 pixels, two times 8 channels.
      unsigned rows[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int first = min(4 * (j + k / 2) + k % 2 * 2, kSums - 2);
        rows[k] = narrow_pair(T{}, sums[first] + bias[k % 2], sums[first + 1] + bias[k % 2]);
      }
      const int pixel = 8 * (i + lane / 16) + lane % 8;
      store_transposed(staging + pixel * kPixelPitch + 16 * warp + lane / 8 % 2 * 8, rows);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int pixel = 8 * (i + k / 4) + lane % 4 * 2 + k % 2;
        if (8 * (j + k / 4) < C::pixels) {
          staging[pixel * kPixelPitch + 16 * warp + lane / 4 + k / 2 % 2 * 8] =
              narrow<T>(sums[4 * j + k] + bias[k / 2 % 2]);
        }
      }
    }
  }
}

// Channels-last outputs: each pixel's 64 channels are neighbours.
__device__ __forceinline__ void store_pixels(const float (&sums)[kSums], const float (&bias)[2],
                                             Scalar* staging, const Target& target, int warpgroup,
                                             int warp, int lane) {
  constexpr int kStored = C::vector_stores ? kVector : 1;  // channels of one store
  constexpr int kPieces = kOutputs / kStored;
  const int columns = min(C::tile_columns, C::out_width - target.column);
#pragma unroll
  for (int turn = 0; turn < kPasses; ++turn) {
    warpgroup_sync(warpgroup);
    stage_pixels(sums, staging, turn, bias, warp, lane);
    warpgroup_sync(warpgroup);
    using Stored = Vector<Scalar, kStored>;
#pragma unroll 4
    for (int i = 32 * warp + lane; i < C::pass_pixels * kPieces; i += 128) {
      const int product_row = i % kPieces * kStored;
      const int pixel = turn * C::pass_pixels + i / kPieces;
      const int line = C::tile_rows == 1 ? 0 : pixel / C::pitch;
      const int at = pixel - line * C::pitch;
      if (line < C::tile_rows && at < columns && target.exists(product_row, line)) {
        target.store(
            product_row, line, target.column + at,
            *reinterpret_cast<const Stored*>(staging + i / kPieces * kPixelPitch + product_row));
      }
    }
  }
}

__device__ __forceinline__ void consume(const Scalar* bias, Scalar* output, int items) {
  Consumer consumer;
  const int lane = consumer.lane;
  const int warp = consumer.warp;
  const int warpgroup = consumer.warpgroup;
  Scalar* const staging =
      reinterpret_cast<Scalar*>(shared_memory() + kStaging + warpgroup * kStagingBytes);
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item(index);
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile) {
      float sums[kSums];
      if constexpr (C::parts == 2) {
        consumer.compute_split(sums, tile == 0, tile == item.tiles - 1);
      } else {
        consumer.compute(sums, tile == 0, tile == item.tiles - 1);
      }
      const Target target(output, item, tile, consumer);
      float biases[2] = {0.0f, 0.0f};
      if (bias) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int channel = target.channel(16 * warp + lane / 4 + 8 * half);
          if (channel < C::group_out)
            biases[half] = widen(bias[item.group * C::group_out + channel]);
        }
      }
      if constexpr (C::out_channels_last) {
        store_pixels(sums, biases, staging, target, warpgroup, warp, lane);
      } else {
        store_rows(sums, biases, staging + warp * C::buffers * 8 * kRowPitch, target, warp, lane);
      }
    }
  }
  if (C::bulk_stores && lane < kStoringLanes) bulk_store_wait();
}

__device__ __forceinline__ void correlate(const Scalar* input, const unsigned char* packed,
                                          const Scalar* bias, Scalar* output, int batch) {
  const int items = batch * kItemsPerImage;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::input_stages; ++i) {
      barrier_init(&barriers().input_full[i], kLoaders / 32);
      barrier_init(&barriers().input_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::weight_stages; ++i) {
      barrier_init(&barriers().weights_full[i], 1);
      barrier_init(&barriers().weights_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kRawSlots; ++i) barrier_init(&barriers().raw_full[i], kPieceChannels);
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    give_back_registers<C::producer_registers>();
    if (warp > 0) {
      if constexpr (C::staged) {
        stage_input(input, input + static_cast<long long>(batch) * kInImage, items);
      } else if constexpr (C::vector_loads && sizeof(Scalar) == 2) {
        copy_input(input, items);
      } else {
        load_input(input, items);
      }
    } else if (threadIdx.x == 0) {
      stream_weights(packed, items);
    }
  } else {
    take_registers<C::consumer_registers>();
    consume(bias, output, items);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(256)
    pack(const Config::Scalar* weight, unsigned char* packed) {
  fastconv::hopper::pack(weight, packed);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    correlate(const Config::Scalar* input, const unsigned char* packed, const Config::Scalar* bias,
              Config::Scalar* output, int batch) {
  fastconv::hopper::correlate(input, packed, bias, output, batch);
}
