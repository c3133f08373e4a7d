// The shared memory of a block of the halo kernel: stages, staging buffers, barriers.
#pragma once
#include "device/wgmma.cuh"
#include "device/tensor/half_copy.cuh"
#include "device/tensor/tile.cuh"

namespace fastconv {
namespace hopper {

using namespace tensor;

constexpr int kConsumers = 2;
constexpr int kPixelGroups = kConsumers / C::channel_groups;
constexpr int kGroupRows = C::tile_rows * C::stack;  // output rows of a consumer
static_assert(kTileRows == kPixelGroups * kGroupRows, "");
static_assert(C::stack == 1 || (C::tile_rows == 1 && kRowResidues == 1), "rows stacked in M alone");
static_assert(!C::rolling || (kChunks == 1 && kRowResidues == 1 && C::tile_rows == 1), "see above");
// N is a multiple of 8 pixels, so the last MMA may read a little beyond the tile's last row.
constexpr int kReach = C::pixels + (C::kernel_width - 1) * kColumnStep / kColumnResidues;
constexpr int kSlack = kReach > C::tile_rows* C::pitch ? kReach - C::tile_rows * C::pitch : 0;
static_assert(C::lead + C::tile_columns + (C::tile_rows - 1) * C::pitch <= C::pixels, "");
constexpr int kInputBytes = (C::parts * kPartPixels + kSlack) * 16;

static_assert(kOutputs == 64, "rows of wgmma");

// Staging buffers of the epilogue. Contiguous outputs: each warp has `buffers` buffers, with rows
// of pass_pixels for 8 channels. Channels-last outputs: each warpgroup has one, with 64 channels of
// pass_pixels. Residues as channels (`d2s_*`): each warpgroup has one, with the lines of all
// existing residues of pass_pixels. The pitches spread a warp's accesses over all banks.
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kRowPitch = round_up(C::interleave * C::pass_pixels + kVector - 8, 16) + 8;
constexpr int kPixelPitch = kOutputs + kVector;
constexpr int kLinePitch =
    round_up(C::interleave * C::pass_pixels + kVector - 1, 2 * kVector) + kVector;
constexpr int kStackLines =  // lines of a stacked output row
    min_of(kStackChannels, C::group_out) / C::interleave;
constexpr int kStagingBytes =
    kScalarBytes * (kDepthToSpace          ? C::stack * kStackLines * kLinePitch
                    : C::out_channels_last ? C::pass_pixels * kPixelPitch
                                           : 4 * C::buffers * 8 * kRowPitch);

static_assert(!C::wraps || (C::lead > 0 && C::pass_pixels >= C::pixels), "one row, stored at once");
static_assert(!C::wraps || (C::out_width > (kStrips - 1) * C::tile_columns &&
                            C::out_width + kGap + 2 * C::lead - 1 <=
                                (kStrips - 1) * C::tile_columns + C::pixels),
              "the last strip has room for a lead of the next row");
static_assert(!C::wraps || (C::stride_height == 1 && C::stride_width == 1 &&
                            C::s2d_height * C::s2d_width == 1 && C::out_step_height == 1),
              "the next row reads the next row");
static_assert(!C::wraps || !C::staged || (C::padding_left == 0 && C::in_width == kPaddedWidth),
              "neighbours in memory");

// Raw input (`staged`): pieces of a line as they lie in memory, with the channels of
// `piece_vectors` vectors.
// A piece has the columns of all residues of a column stride. Every loading warp has raw_slots
// slots of its own. kRawAligned: pieces are whole rows, which all begin at multiples of 16 bytes.
// TMA boxes (`box_loads`) have the columns of padding, too.
constexpr int kLoaderWarps = C::loader_warps;
constexpr int kProducerWarps = kLoaderWarps + 1;  // the first streams weights
static_assert(kProducerWarps % 4 == 0 && 32 * (kProducerWarps + kConsumerWarps) == C::threads,
              "whole warpgroups");
constexpr int kRawSlots = C::staged ? kLoaderWarps * C::raw_slots : 0;
constexpr int kPieceChannels = C::piece_vectors * kVectorChannels;
constexpr int kRawReach = C::pitch * C::stride_width - (kColumnUnit - 1);  // columns of a line
constexpr int kRawLine =
    C::box_loads || C::wraps || kRawReach < C::in_width ? kRawReach : C::in_width;
constexpr bool kRawAligned =
    !C::box_loads && kStrips == 1 && C::padding_left >= 0 && C::in_width % kVector == 0;
constexpr int kRawChannel = round_up(kRawLine + (kRawAligned ? 0 : kVector - 1), kVector);
constexpr int kBoxAlignment = C::box_loads ? 128 : 16;  // bytes
constexpr int kBoxBytes = kPieceChannels * kRawChannel * kScalarBytes;
constexpr int kRawElements = round_up(kBoxBytes, kBoxAlignment) / kScalarBytes;
constexpr int kRawBytes = kRawElements * kScalarBytes;

constexpr int kInputRing = 0;
constexpr int kWeightRing = kInputRing + C::input_stages * kInputBytes;
constexpr int kStaging = kWeightRing + C::weight_stages * kWeightBytes;
constexpr int kRawRing = round_up(kStaging + kConsumers * kStagingBytes, kBoxAlignment);
constexpr int kPowers = kRawRing + kRawSlots * kRawBytes;
// Scaled fp16: each loading warp's copy of the powers of two that scale a chunk's channels. Bulk
// copies fetch long lines, beside which reading the powers from global memory costs little.
constexpr bool kPowersCopied = C::scaled_fp16 && !kLoadsCopy && !C::bulk_loads;
constexpr int kPowersBytes = kPowersCopied ? kChunkChannels * 4 : 0;
constexpr int kBarriers = kPowers + kLoaderWarps * kPowersBytes;
constexpr int kWatch =
    kBarriers + 16 * (C::input_stages + C::weight_stages) + 8 * (kConsumers + kRawSlots);
static_assert(kWatch + (kWatches ? 4 * C::input_stages : 0) <= C::shared_bytes, "");
static_assert(kInputBytes % 16 == 0 && kStagingBytes % 16 == 0, "bulk copies are aligned");
static_assert(C::lead == 0 || (C::tile_rows == 1 && C::bulk_stores), "one row's alignment");

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier weights_full[C::weight_stages];
  Barrier weights_empty[C::weight_stages];
  Barrier turn[kConsumers];  // the other consumer has issued its MMAs
  Barrier raw_full[kRawSlots > 0 ? kRawSlots : 1];
};

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}

// A mark for each input stage and loading warp: whether the warp wrote an infinity or a NaN to it.
struct Watch {
  unsigned char marks[C::input_stages][4];

  __device__ __forceinline__ bool marked(int stage) const {
    return (*reinterpret_cast<const unsigned*>(marks[stage]) & 0xffffffu) != 0;
  }
};
static_assert(kLoaderWarps <= 3 || !kWatches, "a byte for each");

__device__ __forceinline__ Watch& watch() {
  return *reinterpret_cast<Watch*>(shared_memory() + kWatch);
}

// The ring of input stages, as the loaders of device/tensor/load.cuh use it.
struct Input {
  static constexpr int kStages = C::input_stages;
  static constexpr bool kPowersCopied = hopper::kPowersCopied;

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
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers().input_full[stage]);
  }
  __device__ __forceinline__ static void mark(int stage, int warp, bool watched) {
    watch().marks[stage][warp] = watched;
  }
};

}  // namespace hopper
}  // namespace fastconv
