// The output: where accumulators are stored, and what is done to them before.
#pragma once
#include "device/epilogue.cuh"
#include "device/tensor/scale.cuh"

namespace fastconv {
namespace tensor {

constexpr int kOutChannels = C::groups * kOutGroup;
constexpr int kOutPlane = C::image_height * C::image_width;
constexpr int kOutChannel =
    DepthPlacing::planes * kOutPlane;  // from a channel to the next, if contiguous
constexpr int kOutImage = kOutChannels * kOutChannel;
constexpr int kOutColumn = C::out_channels_last ? kOutChannels : 1;

// A stored row has one column for each pixel, or `interleave` columns.
constexpr int kStoredWidth = C::interleave == 1 ? C::out_width : C::image_width;
constexpr int kStoredColumns = C::interleave * C::tile_columns;
constexpr int kStoredPitch = C::interleave * C::pitch;
static_assert(kDepthToSpace || C::interleave == 1 || (C::interleave == 2 && C::out_step_width == 2),
              "pairs");
static_assert(kDepthToSpace || C::interleave == 1 || (!C::out_channels_last && C::lead == 0),
              "contiguous rows");

// Where stored rows and columns lie in the image. The output of a layer that computes one residue
// of a strided input gradient has rows and columns of other residues between its own. Positions
// that no residue's taps reach are cleared by the layer of the residue next to them.
constexpr int kStoredStep = C::interleave == 1 ? C::out_step_width : 1;
constexpr int kStoredBegin = C::interleave == 1 ? C::column_begin : 0;
constexpr int kStoredEnd = C::interleave == 1 ? C::column_end : 1;
constexpr int kStoredAt = C::interleave == 1 ? C::column_at : 0;
constexpr bool kRowsInside =
    (C::out_height - 1) * C::out_step_height + C::row_end <= C::image_height;
constexpr bool kStoredInside = (kStoredWidth - 1) * kStoredStep + kStoredEnd <= C::image_width;

// MMA tiles have rows, columns and channels that do not exist. These are the farthest of them, and
// an index type that reaches their elements.
constexpr int kFarOutRow = C::out_step_height * kRowStep * kRowTiles * kTileRows + C::row_end;
constexpr int kFarOutColumn = kStoredStep * (kStrips * kStoredColumns + kStoredPitch) + kStoredEnd;
constexpr int kFarOutChannel =
    (C::groups - 1) * kOutGroup +
    ceil_div(kOutputGroups * C::channel_groups * kStackChannels, kOutResidues);
using OutOffset = IndexTo<elements_of(kFarOutRow, C::image_width, kOutColumn) +
                          elements_of(kFarOutColumn, kOutColumn) +
                          elements_of(kFarOutChannel, C::out_channels_last ? 1 : kOutChannel)>;
static_assert(elements_of(kOutChannels, DepthPlacing::planes, C::image_height, C::image_width) <
                  kMostElements,
              "");

// A pixel's stores: its value, and zeros for positions that no residue reaches. More than
// kMostUnrolled stores are a loop, which ends where the image does, since a step of rows or columns
// may be larger than the image.
constexpr int kMostUnrolled = 64;
constexpr int kPixelRows = C::row_end - C::row_begin;
constexpr int kPixelColumns = kStoredEnd - kStoredBegin;
constexpr bool kFewRows = kPixelRows <= kMostUnrolled;
constexpr bool kFewStores = kFewRows && kPixelColumns <= kMostUnrolled / kPixelRows;
constexpr int kStoredRowsAtOnce = kFewStores ? kPixelRows : 1;
constexpr int kStoredAtOnce = kFewStores ? kPixelColumns : 1;

// Where the accumulators of an MMA tile are stored.
struct Target {
  Scalar* image;  // in a volume, the plane
  int outputs;    // first output channel, in the group
  int group;
  int row;     // output row of the first pixel, for stacked row 0
  int column;  // stored column of pixel `lead`

  // The target of a tile of a work item, for one of its channel groups and rows from first_row on.
  __device__ Target(Scalar* output, const Item& item, int tile, int channel_group, int first_row) {
    if constexpr (Depth::exists) {
      const int plane = DepthPlacing::step * (item.image % Depth::out) + DepthPlacing::at;
      image = output + static_cast<long long>(item.image / Depth::out) * kOutImage +
              static_cast<long long>(plane) * kOutPlane * kOutColumn;
    } else {
      image = output + static_cast<long long>(item.image) * kOutImage;
    }
    outputs = item.outputs + channel_group * kStackChannels;
    group = item.group;
    row = item.row_residue + kRowStep * ((item.tile + tile) * kTileRows + first_row);
    column = C::interleave * item.column;
  }

  // The channel of an MMA row, in its group.
  __device__ int channel(int m) const { return outputs + row_of_column(m) % kStackRows; }
  // The output row of an MMA row, for the tile's line-th row of pixels.
  __device__ int output_row(int m, int line) const {
    return row + kRowStep * (line + row_of_column(m) / kStackRows);
  }
  __device__ bool exists(int m, int line) const {
    return channel(m) < C::group_out && output_row(m, line) < C::out_height;
  }
  // The image's row for an output row; i is row_at, or the offset of a row to clear.
  __device__ int image_row(int m, int line, int i) const {
    return C::out_step_height * output_row(m, line) + i;
  }
  // The element in column 0 of the image.
  __device__ Scalar* row_start(int m, int y) const { return channel_row(channel(m), y); }
  __device__ Scalar* channel_row(int channel, int y) const {
    const int c = group * kOutGroup + channel;
    if constexpr (C::out_channels_last) {
      return image + (static_cast<OutOffset>(y) * C::image_width * kOutChannels + c);
    } else {
      return image + ((static_cast<OutOffset>(c) * (DepthPlacing::planes * C::image_height) + y) *
                      C::image_width);
    }
  }

  // Where a forward pass, which has no residues, stores an output.
  __device__ __forceinline__ Scalar* place(int m, int line, int column) const {
    return row_start(m, output_row(m, line)) + static_cast<OutOffset>(column) * kOutColumn;
  }

  // Stores an element or a vector of channels if it is `valid`, and clears the positions beside it.
  template <class Stored>
  __device__ __forceinline__ void store(int m, int line, int stored_column, const Stored& value,
                                        bool valid) const {
#pragma unroll kStoredRowsAtOnce
    for (int i = C::row_begin; i < C::row_end; ++i) {
      const int y = image_row(m, line, i);
      if (!kFewStores && y >= C::image_height) break;
      Scalar* const row = row_start(m, y);
#pragma unroll kStoredAtOnce
      for (int j = kStoredBegin; j < kStoredEnd; ++j) {
        const int x = kStoredStep * stored_column + j;
        if (!kFewStores && x >= C::image_width) break;
        store_if(
            reinterpret_cast<Stored*>(row + static_cast<OutOffset>(x) * kOutColumn),
            i == C::row_at && j == kStoredAt ? value : Stored{},
            valid && (kRowsInside || y < C::image_height) && (kStoredInside || x < C::image_width));
      }
    }
  }
};

// Rounds two accumulators to a pair of the output's type, which the first argument selects.
__device__ __forceinline__ Vector<float, 2> narrow_pair(float, float first, float second) {
  return {{first, second}};
}
__device__ __forceinline__ unsigned narrow_pair(float16, float first, float second) {
  return floats_to_halves(first, second);
}
__device__ __forceinline__ unsigned narrow_pair(bfloat16, float first, float second) {
  return floats_to_bfloats(first, second);
}

// The epilogue of one accumulator: bias, scale, residual and activation.
struct Finish {
  float bias = 0.0f;
  float factor = 1.0f;  // scales scaled fp16 back

  template <class Residual = Nothing>
  __device__ __forceinline__ float operator()(float acc, Residual residual = {}) const {
    return Epilogue<C>::activated(C::scaled_fp16 ? fmaf(acc, factor, bias) : acc + bias, residual);
  }
};
static_assert(!kAddsResidual ||
                  (C::out_step_height == 1 && C::out_step_width == 1 && !kDepthToSpace),
              "forward passes alone have a residual");

// The epilogue of the accumulators in one MMA row.
__device__ __forceinline__ Finish finish_of(const Scalar* bias, const Items& items,
                                            const Item& item, const Target& target, int row) {
  Finish finish;
  const int channel = target.channel(row);
  if (bias && channel < C::group_out) {
    finish.bias = widen(bias[item.group * kOutGroup + DepthToSpaceChannel(channel).channel]);
  }
  if constexpr (C::scaled_fp16) {
    constexpr int kOfGroup = C::table_channels / C::groups;
    finish.factor =
        items.tables.channels()[item.group * kOfGroup + channel] *
        inverse(items.tables.images()[items.first_volume +
                                      item.image / HalfCopy::planes]);  // a power of two
  }
  return finish;
}

}  // namespace tensor
}  // namespace fastconv
