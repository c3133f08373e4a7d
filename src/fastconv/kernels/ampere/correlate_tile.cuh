// What a block of correlate.cuh is made of, and what it has in shared memory.
#pragma once
#include "include/mma.cuh"
#include "include/sm80.cuh"
#include "tensor/tile.cuh"

namespace fastconv {
namespace ampere {

using namespace tensor;

static_assert(C::stack == 1 && C::column_sums == 1 && C::interleave == 1 && C::segment_tiles == 1 &&
                  C::lead == 0 && !C::wraps && !C::rolling && !C::watches && !C::smaller_part,
              "what only Hopper's tiles have");

// Of a block's warps, one streams weights, some load input, and the rest multiply. These share a
// tile: by channels, then by pixels, which are counted row by row.
constexpr int kFirstMultiplier = 1 + C::loaders / 32;
constexpr int kThreads = 32 * (kFirstMultiplier + C::warps);
constexpr int kPixelGroups = C::warps / C::channel_groups;
constexpr int kTilePixels = kTileRows * C::tile_columns;
static_assert(C::warps == kPixelGroups * C::channel_groups, "whole groups");
static_assert(kTilePixels <= kPixelGroups * C::pixels, "every pixel is some warp's");

// A warp's products, each of 16 channels by 8 pixels.
constexpr int kRowProducts = kOutputs / 16;
constexpr int kColumnProducts = C::pixels / 8;
static_assert(kOutputs % 16 == 0 && C::pixels % 16 == 0, "pixels are read in pairs of eights");

// Rings: of input, whose stages have a chunk each, and of weights.
constexpr int kInputBytes = C::parts * kPartPixels * 16;
constexpr int kTileStages = kChunks * kWeightStages;  // of weights

// Space for a warp's sums on their way out. Contiguous outputs: 8 channels' rows of pass_pixels.
// Channels-last ones: pass_pixels of all its channels. Pitches spread a warp's accesses over all
// banks.
constexpr int kRowPitch = round_up(C::pass_pixels, 32) + 8;
constexpr int kPixelPitch = kOutputs + kVector;
constexpr int kStagingBytes = kScalarBytes * (C::out_channels_last ? C::pass_pixels * kPixelPitch
                                                                   : C::buffers * 8 * kRowPitch);
constexpr int kPasses = C::pixels / C::pass_pixels;
static_assert(C::pixels % C::pass_pixels == 0 && C::pass_pixels % 8 == 0, "whole passes");

constexpr int kInputRing = 0;
constexpr int kWeightRing = kInputRing + C::input_stages * kInputBytes;
constexpr int kStaging = kWeightRing + C::weight_stages * kWeightBytes;
constexpr int kPowers = kStaging + C::warps * kStagingBytes;  // a copy of each loading warp's
constexpr int kPowersBytes = C::halves ? kChunkChannels * 4 : 0;
constexpr int kBarriers = kPowers + C::loaders / 32 * kPowersBytes;
static_assert(kBarriers + 16 * (C::input_stages + C::weight_stages) == C::shared_bytes, "");
static_assert(kStagingBytes % 16 == 0, "vectors are aligned");

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier weights_full[C::weight_stages];
  Barrier weights_empty[C::weight_stages];
};

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}

// By one thread of the block.
__device__ __forceinline__ void init_barriers() {
  for (int i = 0; i < C::input_stages; ++i) {
    barrier_init(&barriers().input_full[i], C::loaders / 32);
    barrier_init(&barriers().input_empty[i], C::warps);
  }
  for (int i = 0; i < C::weight_stages; ++i) {
    barrier_init(&barriers().weights_full[i], 32);
    barrier_init(&barriers().weights_empty[i], C::warps);
  }
}

// All lanes of a warp are done with what the barrier tells others of.
__device__ __forceinline__ void arrive_as_warp(Barrier* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The ring of input stages, for those who load it (tensor/load.cuh).
struct Input {
  static constexpr int kStages = C::input_stages;
  static constexpr bool kPowersCopied = C::halves;

  __device__ __forceinline__ static unsigned char* stage(int stage) {
    return shared_memory() + kInputRing + stage * kInputBytes;
  }
  __device__ __forceinline__ static float* powers(int warp) {
    return reinterpret_cast<float*>(shared_memory() + kPowers + warp * kPowersBytes);
  }
  __device__ __forceinline__ static void wait(const Ring<kStages>& at) {
    barrier_wait(&barriers().input_empty[at.stage], at.parity);
  }
  __device__ __forceinline__ static void show(int stage) {
    arrive_as_warp(&barriers().input_full[stage]);
  }
};

}  // namespace ampere
}  // namespace fastconv
