// Outputs: from a warp's registers through shared memory to global memory.
#pragma once
#include "ampere/correlate_multiply.cuh"
#include "tensor/target.cuh"

namespace fastconv {
namespace ampere {

// How the sums of a lane's rows become outputs: those of products' upper and lower 8 rows.
using Finishes = Finish[kRowProducts][2];

using Stored = Vector<Scalar, C::store_vector>;
static_assert(C::store_vector == 1 || C::out_channels_last || kStoredStep == 1, "neighbours");

// Stores a vector of what is staged: of a channel, and of one of the tile's pixels.
__device__ __forceinline__ void store_staged(const Target& target, const Scalar* staged, int row,
                                             int pixel) {
  const int line = pixel / C::tile_columns;
  const int column = target.column + pixel % C::tile_columns;
  const bool valid = pixel < kTilePixels && column < C::out_width && target.exists(row, line);
  target.store(row, line, column, *reinterpret_cast<const Stored*>(staged), valid);
}

// Contiguous outputs: the rows of 8 channels at a time.
__device__ __forceinline__ void store_rows(const Sums& sums, const Finishes& finishes,
                                           Scalar* staging, const Target& target,
                                           const Multiplier& warp) {
  constexpr int kVectors = C::pass_pixels / C::store_vector;  // of a channel
  const int lane = warp.lane;
#pragma unroll
  for (int i = 0; i < 2 * kRowProducts * kPasses; ++i) {
    const int product = i / (2 * kPasses);
    const int half = i / kPasses % 2;
    const int turn = i % kPasses;
    __syncwarp();  // the last ones have been read
    Scalar* const row = staging + lane / 4 * kRowPitch + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < C::pass_pixels / 8; ++j) {
      const float* const pair = sums[product][turn * (C::pass_pixels / 8) + j] + 2 * half;
      const Finish& finish = finishes[product][half];
      *reinterpret_cast<decltype(narrow_pair(Scalar{}, 0.0f, 0.0f))*>(row + 8 * j) =
          narrow_pair(Scalar{}, finish(pair[0]), finish(pair[1]));
    }
    __syncwarp();
#pragma unroll 2
    for (int at = lane; at < 8 * kVectors; at += 32) {
      const int channel = at / kVectors;
      const int pixel = at % kVectors * C::store_vector;
      store_staged(target, staging + channel * kRowPitch + pixel, 16 * product + 8 * half + channel,
                   warp.first_pixel + turn * C::pass_pixels + pixel);
    }
  }
}

// Channels-last outputs: all channels of some pixels at a time.
__device__ __forceinline__ void store_pixels(const Sums& sums, const Finishes& finishes,
                                             Scalar* staging, const Target& target,
                                             const Multiplier& warp) {
  constexpr int kVectors = kOutputs / C::store_vector;  // of a pixel
  const int lane = warp.lane;
#pragma unroll
  for (int turn = 0; turn < kPasses; ++turn) {
    __syncwarp();  // the last ones have been read
#pragma unroll
    for (int j = 0; j < C::pass_pixels / 8; ++j) {
#pragma unroll
      for (int product = 0; product < kRowProducts; ++product) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int pixel = 8 * j + lane % 4 * 2 + k % 2;
          const int channel = 16 * product + k / 2 * 8 + lane / 4;
          const float sum = sums[product][turn * (C::pass_pixels / 8) + j][k];
          staging[pixel * kPixelPitch + channel] = narrow<Scalar>(finishes[product][k / 2](sum));
        }
      }
    }
    __syncwarp();
#pragma unroll 2
    for (int at = lane; at < C::pass_pixels * kVectors; at += 32) {
      const int pixel = at / kVectors;
      const int channel = at % kVectors * C::store_vector;
      store_staged(target, staging + pixel * kPixelPitch + channel, channel,
                   warp.first_pixel + turn * C::pass_pixels + pixel);
    }
  }
}

__device__ __forceinline__ void store(const Sums& sums, const Scalar* bias, Scalar* output,
                                      const Items& items, const Item& item,
                                      const Multiplier& warp) {
  const Target target(output, item, 0, warp.channel_group, 0);
  Finishes finishes;
#pragma unroll
  for (int i = 0; i < 2 * kRowProducts; ++i) {
    finishes[i / 2][i % 2] = finish_of(bias, items, item, target, 8 * i + warp.lane / 4);
  }
  Scalar* const staging =
      reinterpret_cast<Scalar*>(shared_memory() + kStaging + warp.warp * kStagingBytes);
  if constexpr (C::out_channels_last) {
    store_pixels(sums, finishes, staging, target, warp);
  } else {
    store_rows(sums, finishes, staging, target, warp);
  }
}

}  // namespace ampere
}  // namespace fastconv
