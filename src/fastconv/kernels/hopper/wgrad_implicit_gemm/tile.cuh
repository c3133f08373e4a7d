// The tile of a block of wgrad_implicit_gemm, its share of the work, and its stages in shared
// memory.
#pragma once
#include "device/depth.cuh"
#include "device/tensor/ring.cuh"
#include "device/tile.cuh"
#include "device/wgmma.cuh"
#include "hopper/wgrad_implicit_gemm/halo.cuh"
#include "hopper/workspace.cuh"

namespace fastconv {
namespace hopper {

using tensor::C;
using tensor::Operand;
using Ring = tensor::Ring<C::stages>;
using tensor::Scalar;
using Depth = DepthOf<C>;

// Rows of the GEMM are output channels, its columns input channels at taps. Both belong to one
// group, or to a few narrow groups (`joined`) that are multiplied as if they were one.
constexpr int kTileRows = 64 * C::row_groups;
constexpr int kGroupColumns = Halo::units * C::mma_columns;  // of a consumer
constexpr int kTileColumns = kGroupColumns * C::column_groups;
constexpr int kConsumers = C::row_groups * C::column_groups;  // consumer warpgroups
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kThreads = 128 * kConsumers + 32 * C::teams * C::team_warps;
constexpr int kPlaneTaps = C::kernel_height * C::kernel_width;
constexpr int kTaps = Depth::kernel * kPlaneTaps;
constexpr int kOut = C::joined * C::group_out;
constexpr int kIn = C::joined * C::group_in;

// A step is kDepth positions along K. TMA copies an operand, or warps gather it. It is K-major, 128
// bytes of positions of each channel; or, where TMA copies pixels of a channels-last tensor,
// MN-major, 128 bytes of channels of each position.
constexpr bool kRowsMnMajor = C::grad_copied && C::channels_last;
constexpr bool kColumnsMnMajor = C::input_copied && C::channels_last;
constexpr int kSpan = 128;
constexpr int kSpanElements = kSpan / static_cast<int>(sizeof(Scalar));
constexpr int kDepth = kColumnsMnMajor ? C::depth : kSpanElements;
constexpr int kPlanePositions = C::out_height * C::out_width;
constexpr int kPositions = Depth::out * kPlanePositions;  // positions of an image
// Whether K runs through the positions of all images one after the other. Otherwise it runs through
// lines, and each has steps of its own: an image, where TMA copies planes, or a row of one, where
// warps gather tap by tap, or a row of patches, where TMA brings boxes with a halo.
constexpr bool kOfAllImages =
    !Halo::exists && (C::channels_last || !(C::input_copied || C::by_taps));
constexpr int kLines = Halo::exists ? Halo::lines : C::by_taps ? C::out_height : 1;  // in an image
constexpr int kLinePositions = kPositions / kLines;
constexpr int kLineSteps = Halo::exists ? Halo::line_steps : ceil_div(kLinePositions, kDepth);
constexpr int kMmaDepth = 32 / static_cast<int>(sizeof(Scalar));
constexpr int kMmas = kDepth / kMmaDepth;  // MMAs of a step
constexpr int kLastMmas =                  // MMAs of a line's last step
    Halo::exists ? kMmas : ceil_div(kLinePositions - (kLineSteps - 1) * kDepth, kMmaDepth);
constexpr int kBoxBytes = kDepth * kSpan;  // bytes of a TMA box of pixels

constexpr int kTapColumns = kColumnsMnMajor        ? round_up(kIn, kSpanElements)
                            : C::few || C::by_taps ? kIn
                                                   : round_up(kIn, 8);
constexpr bool kOctets = !C::input_copied && !C::few && !C::by_taps;
constexpr int kRowTiles = ceil_div(kOut, kTileRows);
constexpr int kColumnTiles =
    Halo::exists ? Halo::tiles : ceil_div(kTaps * kTapColumns, kTileColumns);
constexpr int kGroupTiles = kRowTiles * kColumnTiles;
constexpr int kTiles = C::groups / C::joined * kGroupTiles;
static_assert(!C::input_copied || C::channels_last || kTaps == 1, "copied planes have one tap");
static_assert(C::parts == 1 || (!C::grad_copied && !C::input_copied),
              "gathering warps split numbers");
static_assert(!kColumnsMnMajor || Halo::exists || C::mma_columns % kSpanElements == 0,
              "boxes are whole");

constexpr int kRowBytes = kTileRows * kDepth * static_cast<int>(sizeof(Scalar));
constexpr int kColumnBytes =
    Halo::exists ? Halo::bytes : kTileColumns * kDepth * static_cast<int>(sizeof(Scalar));
constexpr int kPartBytes = kRowBytes + kColumnBytes;
constexpr int kStageBytes = C::parts * kPartBytes;  // low parts of 3xTF32 behind high ones
constexpr int kOnesBytes = C::bias ? 256 : 0;

// Shared memory: the stages, a matrix of ones for the bias, and the barriers.
struct Shared {
  unsigned char* const start = shared_memory();

  __device__ __forceinline__ unsigned char* rows(int stage) const {
    return start + stage * kStageBytes;
  }
  __device__ __forceinline__ unsigned char* columns(int stage) const {
    return rows(stage) + kRowBytes;
  }
  __device__ __forceinline__ unsigned char* ones() const { return rows(C::stages); }
  __device__ __forceinline__ Barrier* full(int stage) const {
    return reinterpret_cast<Barrier*>(ones() + kOnesBytes) + stage;
  }
  __device__ __forceinline__ Barrier* empty(int stage) const { return full(C::stages) + stage; }
};

struct Tile {
  int group, row, column;  // group of joined groups; first row and column, in the group

  __device__ __forceinline__ explicit Tile(int number) : group(number / kGroupTiles) {
    const int in_group = number - group * kGroupTiles;
    row = in_group / kColumnTiles * kTileRows;
    column = in_group % kColumnTiles * kTileColumns;
  }
  __device__ __forceinline__ bool has_bias() const { return C::bias && column == 0; }
};

// Slabs of volumes (planning/slabs.py) are computed by launches of their own, each of which is told
// its number: all but the first add to what the one before has left in the workspace. Copies of two
// slabs lie one behind the other: a slab is told which image its first one is there. A function's
// parameters cannot depend on Config: FASTCONV_SLABS is defined where Config has slabs.
#undef FASTCONV_SLAB_AND_IMAGE  // an exported file has this text several times
#undef FASTCONV_SLAB_NUMBER
#undef FASTCONV_SLAB_IMAGE
#ifdef FASTCONV_SLABS
#define FASTCONV_SLAB_AND_IMAGE , int slab, int first_image
#define FASTCONV_SLAB_NUMBER slab
#define FASTCONV_SLAB_IMAGE first_image
static_assert(!C::whole && C::cluster == 1, "accumulators go to the workspace");
#else
#define FASTCONV_SLAB_AND_IMAGE
#define FASTCONV_SLAB_NUMBER 0
#define FASTCONV_SLAB_IMAGE 0
#endif

// Threads have fewer registers than they could, where they leave room for blocks that copy the next
// slab. FASTCONV_MOST_REGISTERS is defined where Config says how many: a kernel's bounds cannot be
// chosen otherwise.
#undef FASTCONV_BOUNDS
#if defined(FASTCONV_MOST_REGISTERS) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
#define FASTCONV_BOUNDS __maxnreg__(Config::most_registers)
#else
#define FASTCONV_BOUNDS __launch_bounds__(fastconv::hopper::kThreads, Config::blocks)
#endif

// The workspace holds, for each run, its consumers' accumulators, then those of the bias, in slots
// of 16 bytes.
constexpr int kSlots = kGroupColumns / 8;  // slots of a thread
constexpr int kAccSlots = kConsumers * kSlots * 128;
constexpr int kRunSlots = kAccSlots + (C::bias ? kTileRows / 4 : 0);

// Stream-K: how blocks share the steps of all tiles. Tiles come in groups, each with its own
// blocks. The steps of a group, tile after tile, are dealt out evenly; the group's first `longer`
// blocks have one more. A block has a run of steps of one tile, then perhaps one of the next tile,
// each with its own accumulators.
struct Share {
  int steps;                      // steps of a tile
  int group_steps, group_blocks;  // steps and blocks of a group
  int least, longer;              // steps of a block; blocks of a group with one more
  int most_runs;                  // most runs of a block

  __device__ __forceinline__ Share(int batch, int group_tiles, int group_blocks, int most_runs)
      : steps(kOfAllImages ? ceil_div(batch * kPositions, kDepth) : batch * kLines * kLineSteps),
        group_steps(group_tiles * steps),
        group_blocks(group_blocks),
        least(group_steps / group_blocks),
        longer(group_steps % group_blocks),
        most_runs(most_runs) {}

  // A block's first step among those of all tiles.
  __device__ __forceinline__ int first(int block) const {
    const int group = block / group_blocks, in_group = block - group * group_blocks;
    return group * group_steps + in_group * least + min(in_group, longer);
  }
  // The block that has a step.
  __device__ __forceinline__ int block_of(int step) const {
    const int group = step / group_steps, in_group = step - group * group_steps;
    const int rest = in_group - longer * (least + 1);
    return group * group_blocks + (rest < 0 ? in_group / (least + 1) : longer + rest / least);
  }
  // Where the slots of a block's run begin in the workspace.
  __device__ __forceinline__ long long slots(int block, int run) const {
    return (1LL * block * most_runs + run) * kRunSlots;
  }
};

struct Run {
  int tile, first, end;  // first and end are steps of the tile
};

// Calls visit(run, number) for the runs of a block, in order.
template <class Visit>
__device__ __forceinline__ void for_runs(const Share& share, int block, Visit visit) {
  const int end = share.first(block + 1);
  int tile = share.first(block) / share.steps;
  for (int at = share.first(block), number = 0; at < end; ++number, ++tile) {
    const int begin = tile * share.steps, until = min(end, begin + share.steps);
    visit(Run{tile, at - begin, until - begin}, number);
    at = until;
  }
}

}  // namespace hopper
}  // namespace fastconv
