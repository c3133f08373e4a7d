// Depthwise convolution by Toeplitz matrices on channels-last (NHWC) tensors: a block computes a
// tile of `channels` planes of `slots` images. It transposes pixels to planes as it loads them, and
// planes to pixels as it stages the results in shared memory:
//
//   results   [slot][row][column, padded to an odd number][channel]
#pragma once
#include "depthwise/toeplitz/kernel.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kAllChannels = C::groups;
constexpr int kChannelTiles = kAllChannels / C::channels;
using Pixel = Vector<Scalar, C::channels>;
static_assert(C::group_out == 1 && kAllChannels % C::channels == 0, "whole vectors");

constexpr int kResultRow = (kTileColumns | 1) * C::channels;
constexpr int kResults = C::slots * kTileRows * kResultRow;
constexpr int kTableBytes = round_up(C::channels * kTableWords + kMarks, 4) * 4;
static_assert((kParts * kPart + kResults) * static_cast<int>(sizeof(Scalar)) + kTableBytes ==
                  C::shared_bytes,
              "as planned");

// The tile of a block.
struct Tile {
  int y, x;     // first output
  int channel;  // first channel
  int first_image;

  __device__ explicit Tile(unsigned block) {
    // Channel tiles change fastest: blocks that share memory sectors run together.
    channel = static_cast<int>(block % kChannelTiles) * C::channels;
    block /= kChannelTiles;
    x = static_cast<int>(block % kTilesX) * kTileColumns;
    block /= kTilesX;
    y = static_cast<int>(block % kTilesY) * kTileRows;
    first_image = static_cast<int>(block / kTilesY) * C::slots;
  }
};

// Returns the offset of the tile's first channel of a pixel.
template <int kHeight, int kWidth>
__device__ __forceinline__ long long pixel_at(const Tile& tile, int slot, int y, int x) {
  return ((1ll * (tile.first_image + slot) * kHeight + y) * kWidth + x) * kAllChannels +
         tile.channel;
}

__device__ __forceinline__ void load_input(Scalar* target, const Scalar* input, const Tile& tile,
                                           int images) {
  constexpr int kColumns = (C::inside ? kEndColumn : kOperandColumns) - kFirstColumn;
  constexpr int kTasks = C::slots * kCopiedRows * kColumns;
#pragma unroll 4
  for (int task = static_cast<int>(threadIdx.x); task < kTasks; task += kThreads) {
    const int column = kFirstColumn + task % kColumns;
    const int row = kFirstRow + task / kColumns % kCopiedRows;
    const int slot = task / (kColumns * kCopiedRows);
    const int y = tile.y + Rows::kOrigin + row;
    const int x = tile.x + Columns::kOrigin + column;
    const bool exists = tile.first_image + slot < images && column < kHaloColumns &&
                        static_cast<unsigned>(y) < C::in_height &&
                        static_cast<unsigned>(x) < C::in_width;
    Pixel pixel = {};
    if (exists) {
      pixel = *reinterpret_cast<const Pixel*>(
          input + pixel_at<C::in_height, C::in_width>(tile, slot, y, x));
    }
    Scalar* const place = target + slot * kPlane + row * C::pitch + column;
#pragma unroll
    for (int channel = 0; channel < C::channels; ++channel) {
      place[channel * (C::slots * kPlane)] = pixel.element[channel];
    }
  }
}

// Adds the bias to the first or second strip of a pair (`half` 0 or 1), applies the epilogue and
// writes the strip to the staged results. Residuals have been loaded to the same places.
__device__ __forceinline__ void stage_results(const MmaAccumulators& accumulators, int half,
                                              float scale, Acc bias, Scalar* strip) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < C::lanes_x; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Scalar& place = strip[lane / 4 * kResultRow + (8 * j + lane % 4 * 2 + i) * C::channels];
      const Acc acc = accumulators.result(j, 2 * half + i) * scale + bias;
      place = narrow<Scalar>(Epilogue<C>::activated(acc, Epilogue<C>::staged(place)));
    }
  }
}

// Calls `visit` with the addresses of each of the tile's pixels in the output and in the results.
template <class Visit>
__device__ __forceinline__ void for_pixels(Scalar* output, Scalar* results, const Tile& tile,
                                           int images, const Visit& visit) {
#pragma unroll 2
  for (int task = static_cast<int>(threadIdx.x); task < C::slots * kTileRows * kTileColumns;
       task += kThreads) {
    const int column = task % kTileColumns;
    const int row = task / kTileColumns;  // counted over all slots
    const int slot = row / kTileRows;
    const int y = tile.y + row % kTileRows;
    const int x = tile.x + column;
    if (tile.first_image + slot >= images || y >= C::out_height || x >= C::out_width) continue;
    visit(output + pixel_at<C::out_height, C::out_width>(tile, slot, y, x),
          results + row * kResultRow + column * C::channels);
  }
}

}  // namespace depthwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    convolve(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ weight,
             const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
             int first_image, int images FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::depthwise;
  using fastconv::kAddsResidual;
  using fastconv::widen;
  const auto epilogue = FASTCONV_EPILOGUE(output);
  const Tile tile(blockIdx.x);
  input += 1ll * first_image * C::in_height * C::in_width * kAllChannels;
  output += 1ll * first_image * C::out_height * C::out_width * kAllChannels;
  Scalar* const inputs = reinterpret_cast<Scalar*>(fastconv::shared_memory());
  Scalar* const results = inputs + kParts * kPart;
  unsigned* const tables = reinterpret_cast<unsigned*>(results + kResults);
  unsigned* const marks = tables + C::channels * kTableWords;
  for (int i = static_cast<int>(threadIdx.x); i < kMarks; i += kThreads) marks[i] = 0;
  if constexpr (C::inside) clear<kPart* static_cast<int>(sizeof(Scalar)), kThreads>(inputs);
  if constexpr (k3xTf32 || C::inside) __syncthreads();
  if constexpr (kAddsResidual) {
    for_pixels(output, results, tile, images, [&](const Scalar* pixel, Scalar* result) {
      *reinterpret_cast<Pixel*>(result) = epilogue.residual_of<C::channels>(pixel, true);
    });
  }
  load_input(inputs, input, tile, images);
  load_tables(tables, weight, tile.channel, marks);
  __syncthreads();
  prepare_operands(inputs, tables, marks);
  __syncthreads();

#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x) / 32; item < C::channels * kStripPairs;
       item += C::warps) {
    const int channel = item / kStripPairs;
    const int pair = item % kStripPairs;
    const int output_channel = tile.channel + channel;
    const Acc shift = bias != nullptr ? Acc(widen(bias[output_channel])) : Acc(0);
    MmaAccumulators accumulators;
    multiply(accumulators, lane_row(inputs, channel, pair), lane_diagonals(tables, channel));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (2 * pair + half >= kStrips) continue;
      const Strip strip(2 * pair + half);
      Scalar* const first = results + (strip.slot * kTileRows + strip.row) * kResultRow + channel;
      const int plane = channel * C::slots + strip.slot;
      stage_results(accumulators, half, inverse_scale(marks, plane), shift, first);
      if (!strip.marked(marks, plane)) continue;
      __syncwarp();
      rewrite_nonfinite(
          [&](int y, int x) {
            return input[pixel_at<C::in_height, C::in_width>(tile, strip.slot, y, x) + channel];
          },
          weight, output_channel, shift, tile.y + strip.row, tile.x,
          [&](int row, int column) {
            return first + row * kResultRow + column * C::channels;
          } FASTCONV_WITH_RESIDUAL([&](int row, int column) {
            return epilogue.residual_of(
                output + channel +
                pixel_at<C::out_height, C::out_width>(tile, strip.slot, tile.y + strip.row + row,
                                                      tile.x + column));
          }));
    }
  }
  __syncthreads();
  for_pixels(output, results, tile, images, [&](Scalar* pixel, const Scalar* result) {
    *reinterpret_cast<Pixel*>(pixel) = *reinterpret_cast<const Pixel*>(result);
  });
}
