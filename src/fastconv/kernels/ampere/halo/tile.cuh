// The warps of a block of the halo kernel, its shared memory, and the barriers between them.
#pragma once
#include "device/mma.cuh"
#include "device/sm80.cuh"
#include "device/tensor/tile.cuh"

namespace fastconv {
namespace ampere {

using namespace tensor;

static_assert(C::stack == 1 && C::stacked_columns == 1 && C::interleave == 1 &&
                  C::segment_tiles == 1 && C::lead == 0 && !C::wraps && !C::rolling &&
                  !C::watches && !C::smaller_part && !kDepthToSpace,
              "options of Hopper's tiles alone");

// One of a block's warps streams weights, some load input, and the rest are consumers. Consumers
// divide a tile by channels, then by pixels, which are counted row by row.
constexpr int kFirstMultiplier = 1 + C::loaders / 32;
constexpr int kThreads = 32 * (kFirstMultiplier + C::warps);
constexpr int kPixelGroups = C::warps / C::channel_groups;
constexpr int kTilePixels = kTileRows * C::tile_columns;
static_assert(C::warps == kPixelGroups * C::channel_groups, "whole groups");
static_assert(kTilePixels <= kPixelGroups * C::pixels, "the warps cover all pixels");

// MMAs of a warp's register tile, each of 16 channels by 8 pixels.
constexpr int kRowMmas = kOutputs / 16;
constexpr int kColumnMmas = C::pixels / 8;
static_assert(kOutputs % 16 == 0 && C::pixels % 16 == 0, "pixels are read in pairs of eights");

// Sizes of a stage of the input ring, which holds a chunk of channels, and of the weight ring.
constexpr int kInputBytes = C::parts * kPartPixels * 16;
constexpr int kTileStages = kChunks * kWeightStages;  // stages of weights that a tile takes

// A warp's staging buffer for outputs. For contiguous ones it holds 8 channels' rows of pass_pixels
// pixels, once or twice; for channels-last ones, all of the warp's channels of pass_pixels pixels.
// Pitches spread a warp's accesses over all banks.
constexpr int kRowPitch = round_up(C::pass_pixels, 32) + 8;
constexpr int kPixelPitch = kOutputs + kVector;
constexpr int kStagingBytes = kScalarBytes * (C::out_channels_last ? C::pass_pixels * kPixelPitch
                                                                   : C::buffers * 8 * kRowPitch);
constexpr int kPasses = C::pixels / C::pass_pixels;
static_assert(C::pixels % C::pass_pixels == 0 && C::pass_pixels % 8 == 0, "whole passes");

constexpr int kInputRing = 0;
constexpr int kWeightRing = kInputRing + C::input_stages * kInputBytes;
constexpr int kStaging = kWeightRing + C::weight_stages * kWeightBytes;
constexpr int kPowers = kStaging + C::warps * kStagingBytes;  // one copy for each loading warp
constexpr int kPowersBytes = C::scaled_fp16 ? kChunkChannels * 4 : 0;
static_assert(kPowers + C::loaders / 32 * kPowersBytes == C::shared_bytes, "as planned");
static_assert(kStagingBytes % 16 == 0, "vectors are aligned");

// The stages of a ring that kFillers producer threads fill for the consumers. Each has two named
// barriers, full and empty, numbered from kFirst on. Consumers mark all stages as empty before the
// first lap.
template <int kFirst, int kStages, int kFillers>
struct Stages {
  static constexpr int kThreads = kFillers + 32 * C::warps;
  static_assert(kFirst + 2 * kStages <= 16, "hardware has 16 named barriers");

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
  // Consumers call empty_all at first, producers wait_all_empty in the end, so that arrivals and
  // waits match at every barrier.
  __device__ __forceinline__ static void empty_all() {
    for (int i = 0; i < kStages; ++i) empty(i);
  }
  __device__ __forceinline__ static void wait_all_empty() {
    for (int i = 0; i < kStages; ++i) wait_empty(i);
  }
};
using InputStages = Stages<1, C::input_stages, C::loaders>;
// Resident weights need one pair of barriers: they arrive all at once.
constexpr int kWeightLaps = C::resident ? 1 : C::weight_stages;
using WeightStages = Stages<1 + 2 * C::input_stages, kWeightLaps, 32>;

// The ring of input stages, as the producers in device/tensor/load.cuh use it.
struct Input {
  static constexpr int kStages = C::input_stages;
  static constexpr bool kPowersCopied = C::scaled_fp16;

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
