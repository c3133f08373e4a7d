// The epilogue: from a warp's accumulators through shared memory to global memory.
#pragma once
#include "ampere/halo/multiply.cuh"
#include "device/tensor/target.cuh"

namespace fastconv {
namespace ampere {

// How accumulators of a warp's rows become outputs (bias, scale). Each lane holds this for every
// 32nd row.
struct Finishes {
  static constexpr int kRows = ceil_div(kOutputs, 32);  // rows of a lane
  Finish of[kRows];

  __device__ Finishes(const Scalar* bias, const Items& items, Scalar* output, const Item& item,
                      const Multiplier& warp) {
    const Target target(output, item, 0, warp.channel_group, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = 32 * i + warp.lane;
      if (kOutputs % 32 == 0 || row < kOutputs) of[i] = finish_of(bias, items, item, target, row);
    }
  }
  // Returns the Finish of the row that a lane holds among eight rows.
  __device__ __forceinline__ Finish of_eight(int eight, int lane) const {
    const int source = eight % 4 * 8 + lane / 4;
    Finish finish;
    finish.bias = __shfl_sync(~0u, of[eight / 4].bias, source);
    if constexpr (C::scaled_fp16) finish.factor = __shfl_sync(~0u, of[eight / 4].factor, source);
    return finish;
  }
};

using Stored = Bits<C::store_vector * kScalarBytes>::type;
static_assert(C::store_vector == 1 || C::out_channels_last || kStoredStep == 1, "neighbours");

// A pixel of the tile that a lane stores.
struct Spot {
  int line, column;
  bool valid;

  __device__ Spot(const Target& target, int pixel) {
    line = pixel / C::tile_columns;
    column = target.column + pixel % C::tile_columns;
    valid = pixel < kTilePixels && column < C::out_width;
  }
  // Loads residuals to where outputs will be staged.
  __device__ __forceinline__ void load(const Target& target, const Epilogue<C>& epilogue,
                                       Scalar* staged, int channel) const {
    *reinterpret_cast<Vector<Scalar, C::store_vector>*>(staged) =
        epilogue.residual_of<C::store_vector>(target.place(channel, line, column),
                                              valid && target.exists(channel, line));
  }
  __device__ __forceinline__ void store(const Target& target, const Scalar* staged,
                                        int channel) const {
    target.store(channel, line, column, *reinterpret_cast<const Stored*>(staged),
                 valid && target.exists(channel, line));
  }
};

__host__ __device__ constexpr int power_of_two_in(int n) { return n & -n; }

// Finishes a lane's accumulators of two pixels of a channel and stages them, for contiguous
// outputs. Residuals have been loaded to the same places.
__device__ __forceinline__ void stage_row(Scalar* pixel, const float* acc, const Finish& finish) {
  using Pair = decltype(narrow_pair(Scalar{}, 0.0f, 0.0f));
  const float first = finish(acc[0], Epilogue<C>::staged(pixel[0]));
  const float second = finish(acc[1], Epilogue<C>::staged(pixel[1]));
  *reinterpret_cast<Pair*>(pixel) = narrow_pair(Scalar{}, first, second);
}

// Calls `visit` with each of a lane's spots in the eight rows that are staged in `buffer`: the
// spot, the row, and the spot's place in the buffer.
template <class Visit>
__device__ __forceinline__ void for_spots_of_rows(const Target& target, const Multiplier& warp,
                                                  int turn, int lane, Scalar* buffer,
                                                  const Visit& visit) {
  // As many lanes as divide a row evenly store one channel's row, so that each lane stores the same
  // pixels of all channels.
  constexpr int kVectors = C::pass_pixels / C::store_vector;
  constexpr int kLanes = power_of_two_in(kVectors) < 32 ? power_of_two_in(kVectors) : 32;
#pragma unroll
  for (int part = 0; part < kVectors / kLanes; ++part) {
    const int pixel = (part * kLanes + lane % kLanes) * C::store_vector;
    const Spot spot(target, warp.first_pixel + turn * C::pass_pixels + pixel);
#pragma unroll
    for (int first = 0; first < 8; first += 32 / kLanes) {
      const int channel = first + lane / kLanes;
      if (kLanes < 4 && channel >= 8) break;
      visit(spot, channel, buffer + channel * kRowPitch + pixel);
    }
  }
}

// Stores contiguous outputs, the rows of 8 channels at a time.
__device__ __forceinline__ void store_rows(const RegisterTile& acc, const Finishes& finishes,
                                           Scalar* staging, const Target& target,
                                           const Epilogue<C>& epilogue, const Multiplier& warp) {
  const int lane = warp.lane;
#pragma unroll
  for (int turn = 0; turn < kPasses; ++turn) {
#pragma unroll
    for (int eight = 0; eight < 2 * kRowMmas; ++eight) {
      if (C::buffers == 1) __syncwarp();  // all lanes have read the rows before
      Scalar* const buffer = staging + eight % C::buffers * 8 * kRowPitch;
      Scalar* const row = buffer + lane / 4 * kRowPitch + lane % 4 * 2;
      const Finish finish = finishes.of_eight(eight, lane);
      if constexpr (kAddsResidual) {
        // Addresses are computed again for the stores: keeping them would take registers that
        // accumulators need.
        for_spots_of_rows(target, warp, turn, once_more(lane), buffer,
                          [&](const Spot& spot, int channel, Scalar* staged) {
                            spot.load(target, epilogue, staged, 8 * eight + channel);
                          });
        __syncwarp();
      }
#pragma unroll
      for (int j = 0; j < C::pass_pixels / 8; ++j) {
        const float* const pair = acc[eight / 2][turn * (C::pass_pixels / 8) + j] + eight % 2 * 2;
        stage_row(row + 8 * j, pair, finish);
      }
      __syncwarp();
      for_spots_of_rows(target, warp, turn, lane, buffer,
                        [&](const Spot& spot, int channel, const Scalar* staged) {
                          spot.store(target, staged, 8 * eight + channel);
                        });
    }
  }
}

// Stages a lane's values of two pixels of a channel, for channels-last outputs.
__device__ __forceinline__ void stage_pixels(float* pixel, float first, float second) {
  pixel[0] = first;
  pixel[kPixelPitch] = second;
}
// With 16-bit types, lanes of neighbouring channels exchange values, so that each has both channels
// of one pixel and writes them as one word.
template <class Half>
__device__ __forceinline__ void stage_pixels(Half* pixel, float first, float second) {
  const unsigned own = narrow_pair(Half{}, first, second);
  const unsigned other = __shfl_xor_sync(~0u, own, 4);
  const bool odd = threadIdx.x / 4 % 2 != 0;
  Half* const target = odd ? pixel + kPixelPitch - 1 : pixel;
  *reinterpret_cast<unsigned*>(target) =
      odd ? __byte_perm(other, own, 0x7632) : __byte_perm(own, other, 0x5410);
}
// Finishes a lane's accumulators of two pixels and stages them. Residuals have been loaded to the
// same places.
__device__ __forceinline__ void stage_pixels(Scalar* pixel, const float* acc,
                                             const Finish& finish) {
  const float first = finish(acc[0], Epilogue<C>::staged(pixel[0]));
  const float second = finish(acc[1], Epilogue<C>::staged(pixel[kPixelPitch]));
  // No lane overwrites another's residuals: the exchange between lanes comes after all reads.
  stage_pixels(pixel, first, second);
}

// Calls `visit` with each of a lane's spots in the pixels that are staged in `staging`: the spot,
// the channel, and the spot's place in the buffer.
template <class Visit>
__device__ __forceinline__ void for_spots_of_pixels(const Target& target, const Multiplier& warp,
                                                    int turn, Scalar* staging, const Visit& visit) {
  constexpr int kVectors = kOutputs / C::store_vector;  // vectors of a pixel
#pragma unroll 2
  for (int at = warp.lane; at < C::pass_pixels * kVectors; at += 32) {
    const int pixel = at / kVectors;
    const int channel = at % kVectors * C::store_vector;
    const Spot spot(target, warp.first_pixel + turn * C::pass_pixels + pixel);
    visit(spot, channel, staging + pixel * kPixelPitch + channel);
  }
}

// Stores channels-last outputs, all of the warp's channels of some pixels at a time.
__device__ __forceinline__ void store_pixels(const RegisterTile& acc, const Finishes& finishes,
                                             Scalar* staging, const Target& target,
                                             const Epilogue<C>& epilogue, const Multiplier& warp) {
  const int lane = warp.lane;
#pragma unroll
  for (int turn = 0; turn < kPasses; ++turn) {
    __syncwarp();  // all lanes have read the pixels before
    if constexpr (kAddsResidual) {
      for_spots_of_pixels(target, warp, turn, staging,
                          [&](const Spot& spot, int channel, Scalar* staged) {
                            spot.load(target, epilogue, staged, channel);
                          });
      __syncwarp();
    }
#pragma unroll
    for (int eight = 0; eight < 2 * kRowMmas; ++eight) {
      const Finish finish = finishes.of_eight(eight, lane);
#pragma unroll
      for (int j = 0; j < C::pass_pixels / 8; ++j) {
        const float* const pair = acc[eight / 2][turn * (C::pass_pixels / 8) + j] + eight % 2 * 2;
        stage_pixels(staging + (8 * j + lane % 4 * 2) * kPixelPitch + 8 * eight + lane / 4, pair,
                     finish);
      }
    }
    __syncwarp();
    for_spots_of_pixels(target, warp, turn, staging,
                        [&](const Spot& spot, int channel, const Scalar* staged) {
                          spot.store(target, staged, channel);
                        });
  }
}

// Stores a warp's register tile.
__device__ __forceinline__ void store(const RegisterTile& acc, const Finishes& finishes,
                                      const Target& target, const Epilogue<C>& epilogue,
                                      const Multiplier& warp) {
  Scalar* const staging =
      reinterpret_cast<Scalar*>(shared_memory() + kStaging + warp.warp * kStagingBytes);
  if constexpr (C::out_channels_last) {
    store_pixels(acc, finishes, staging, target, epilogue, warp);
  } else {
    store_rows(acc, finishes, staging, target, epilogue, warp);
  }
}

}  // namespace ampere
}  // namespace fastconv
