// What a block of correlate.cuh is made of, and what it has in shared memory.
#pragma once
#include "include/mma.cuh"
#include "tensor/tile.cuh"

namespace fastconv {
namespace ampere {

using namespace tensor;

static_assert(C::stack == 1 && C::column_sums == 1 && C::interleave == 1 && C::segment_tiles == 1 &&
                  C::lead == 0 && !C::wraps && !C::rolling && !C::watches && !C::smaller_part,
              "what only Hopper's tiles have");

// Warps share a tile: by channels, then by pixels, which are counted row by row.
constexpr int kThreads = 32 * C::warps;
constexpr int kPixelGroups = C::warps / C::channel_groups;
constexpr int kTilePixels = kTileRows * C::tile_columns;
static_assert(kThreads == C::loaders, "all threads load");
static_assert(C::warps == kPixelGroups * C::channel_groups, "whole groups");
static_assert(kTilePixels <= kPixelGroups * C::pixels, "every pixel is some warp's");

// A warp's products, each of 16 channels by 8 pixels.
constexpr int kRowProducts = kOutputs / 16;
constexpr int kColumnProducts = C::pixels / 8;
static_assert(kOutputs % 16 == 0 && C::pixels % 16 == 0, "pixels are read in pairs of eights");

// Input has two stages: one is multiplied while the next chunk's is filled. Weights have a ring.
constexpr int kInputBytes = C::parts * kPartPixels * 16;
constexpr int kTileStages = kChunks * kWeightStages;  // of weights

// Space for a warp's sums on their way out. Contiguous outputs: 8 channels' rows of pass_pixels.
// Channels-last ones: pass_pixels of all its channels. Pitches spread a warp's accesses over all
// banks.
constexpr int kRowPitch = round_up(C::pass_pixels, 32) + 8;
constexpr int kPixelPitch = kOutputs + kVector;
constexpr int kStagingBytes =
    kScalarBytes * (C::out_channels_last ? C::pass_pixels * kPixelPitch : 8 * kRowPitch);
constexpr int kPasses = C::pixels / C::pass_pixels;
static_assert(C::pixels % C::pass_pixels == 0 && C::pass_pixels % 8 == 0, "whole passes");

constexpr int kInputRing = 0;
constexpr int kWeightRing = kInputRing + 2 * kInputBytes;
constexpr int kStaging = kWeightRing + C::weight_stages * kWeightBytes;
static_assert(kStaging + C::warps * kStagingBytes == C::shared_bytes, "as planned");
static_assert(kStagingBytes % 16 == 0, "vectors are aligned");

}  // namespace ampere
}  // namespace fastconv
