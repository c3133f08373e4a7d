// What a block of correlate.cuh is made of, and what it has in shared memory.
#pragma once
#include "device/mma.cuh"
#include "device/sm80.cuh"
#include "device/tensor/tile.cuh"

namespace fastconv {
namespace ampere {

using namespace tensor;

static_assert(C::stack == 1 && C::column_sums == 1 && C::interleave == 1 && C::segment_tiles == 1 &&
                  C::lead == 0 && !C::wraps && !C::rolling && !C::watches && !C::smaller_part &&
                  !kUnfolds,
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

// Space for a warp's sums on their way out. Contiguous outputs: 8 channels' rows of pass_pixels,
// once or twice. Channels-last ones: pass_pixels of all its channels. Pitches spread a warp's
// accesses over all banks.
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
static_assert(kPowers + C::loaders / 32 * kPowersBytes == C::shared_bytes, "as planned");
static_assert(kStagingBytes % 16 == 0, "vectors are aligned");

// The stages of a ring, which kFillers threads fill for those that multiply: two barriers each, of
// which the first one's number is kFirst. Before the first lap, all stages count as emptied.
template <int kFirst, int kStages, int kFillers>
struct Stages {
  static constexpr int kThreads = kFillers + 32 * C::warps;
  static_assert(kFirst + 2 * kStages <= 16, "there are no more");

  __device__ __forceinline__ static void wait_full(int stage) { wait_at(kFirst + stage, kThreads); }
  __device__ __forceinline__ static void fill(int stage) {
    __syncwarp();  // lanes that had nothing to write may be ahead
    come_to(kFirst + stage, kThreads);
  }
  __device__ __forceinline__ static void wait_empty(int stage) {
    wait_at(kFirst + kStages + stage, kThreads);
  }
  __device__ __forceinline__ static void empty(int stage) {
    come_to(kFirst + kStages + stage, kThreads);
  }
  // By those that multiply, at first; and by those that fill, in the end: no one comes in vain.
  __device__ __forceinline__ static void empty_all() {
    for (int i = 0; i < kStages; ++i) empty(i);
  }
  __device__ __forceinline__ static void wait_all_empty() {
    for (int i = 0; i < kStages; ++i) wait_empty(i);
  }
};
using InputStages = Stages<1, C::input_stages, C::loaders>;
// Weights that stay are all there, or not yet.
constexpr int kWeightLaps = C::resident ? 1 : C::weight_stages;
using WeightStages = Stages<1 + 2 * C::input_stages, kWeightLaps, 32>;

// The ring of input stages, for those who load it (device/tensor/load.cuh).
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
    InputStages::wait_empty(at.stage);
  }
  __device__ __forceinline__ static void show(int stage) { InputStages::fill(stage); }
};

}  // namespace ampere
}  // namespace fastconv
