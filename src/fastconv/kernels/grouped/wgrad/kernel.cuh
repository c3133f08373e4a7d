// Weight gradient, and with it the bias gradient, of groups of 4, 8, 16 or 32 channels on tensor
// cores (mma.sync), from sm_80 on. Tensors are channels-last, with 16-bit elements.
//
//   grad[tap][output][input] = sum over pixels of grad_output[pixel][output] * input[pixel + tap]
//
// A block has a chunk of channels. It walks through its split of all tiles (grouped/tile.cuh);
// while it multiplies one, cp.async copies the next:
//
//   stage   halo tile, then the tile of the output's gradient [slot][row][column][channel]
//
// A warp has accumulators for 16 output channels (M), two times 8 input channels (N) and all taps.
// Along K are 16 pixels: 8 neighbours of two rows. Operands are transposed as ldmatrix reads them.
// A warp keeps a window of input rows in registers, as the forward kernel does
// (convolve/kernel.cuh). With groups of 4 and 8 channels, MMAs also multiply channels of different
// groups; what they add to is dropped.
//
// Warps that have the same channels divide segments of columns among themselves, and add up their
// accumulators in the end. A second kernel adds up the splits, in order.
#pragma once
#include "grouped/tile.cuh"

namespace fastconv {
namespace grouped {

static_assert(!C::transposed, "positions are those of the output");

constexpr int kParts = max_of(kWidth / kBundle, 1);  // warps that divide a group's input channels
constexpr int kTeams = kBundles * kParts;            // warps with different channels
constexpr int kSharers = C::warps / kTeams;          // warps with the same channels
static_assert(C::warps % kTeams == 0, "all warps have as much to do");
constexpr int kTaps = C::kernel_height * C::kernel_width;

constexpr int kGradRowBytes = C::tile_columns * kPixelBytes;
constexpr int kGradSlotBytes = C::tile_rows * kGradRowBytes;
constexpr int kStageBytes = kHaloBytes + C::slots * kGradSlotBytes;
constexpr int kSums = kTaps * 8 + 4;  // accumulators of a thread, the bias's included
static_assert(2 * kStageBytes <= C::shared_bytes &&
                  (kSharers == 1 || kTeams * kSums * 32 * 4 <= C::shared_bytes),
              "as planned");

// The splits' sums: [split][tap][output][input], then the bias's.
constexpr int kWeights = kTaps * kChannels * kWidth;
constexpr int kEntries = kWeights + (C::bias ? kChannels : 0);

// Tiles of a split.
struct Range {
  int first, end;

  __device__ Range(int split, int splits, int images) {
    const long long tiles = 1ll * kTilesX * kTilesY * ceil_div(images, C::slots);
    first = static_cast<int>(tiles * split / splits);
    end = static_cast<int>(tiles * (split + 1) / splits);
  }
};

// A warp's channels, and its share of the segments.
struct Warp {
  int lane;
  int sharer;
  int bundle;
  int part;  // of the group's input channels

  __device__ Warp() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    sharer = warp / kTeams;
    bundle = warp % kTeams / kParts;
    part = warp % kParts;
  }
  // The first of 16 input channels, within the chunk.
  __device__ int first_input() const { return (bundle / kParts * kParts + part) * kBundle; }
};

// Fragments of ones: their product adds up the other factor.
__device__ __forceinline__ unsigned ones(float16) { return 0x3c003c00u; }
__device__ __forceinline__ unsigned ones(bfloat16) { return 0x3f803f80u; }

constexpr int kWindowRows = Rows::kTimes + Rows::kReach + 1;
constexpr int kOldRows = max_of(kWindowRows - 2 * Rows::kTimes, 0);  // also of the pair before
constexpr int kPieces = C::kernel_width * 2;  // registers that a lane has of an input row

struct Accumulators {
  float taps[kTaps][2][4];
  float bias[4];

  __device__ __forceinline__ Accumulators() {
    for_each([](float& sum, int) { sum = 0.0f; });
  }
  // Calls `visit` with each accumulator and its number.
  template <class Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
      for (int i = 0; i < 8; ++i) visit(taps[tap][i / 4][i % 4], tap * 8 + i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(bias[i], kTaps * 8 + i);
  }
};

struct Walk {
  unsigned window[kWindowRows][kPieces];

  // Loads rows kFirst to kEnd - 1 of the window, which begins at `input`.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load_rows(const unsigned char* input, int lane) {
    constexpr int kCount = (kEnd - kFirst) * kPieces;
#pragma unroll
    for (int first = 0; first < kCount; first += 4) {
      // A lane passes the address of a row of one of four pieces.
      const int piece = min_of(first + lane / 8, kCount - 1);
      const int row = kFirst + piece / kPieces;
      const int pixel = place(Columns::offset(0, piece % kPieces / 2)) + lane % 8;
      unsigned four[4];
      load_transposed(four, input + row * kRowBytes + pixel * kPixelBytes + piece % 2 * 16);
#pragma unroll
      for (int i = 0; i < 4 && first + i < kCount; ++i) {
        window[kFirst + (first + i) / kPieces][(first + i) % kPieces] = four[i];
      }
    }
  }
  __device__ __forceinline__ void move_window() {
#pragma unroll
    for (int row = 0; row < kOldRows; ++row) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        window[row][piece] = window[row + 2 * Rows::kTimes][piece];
      }
    }
  }

  // Adds a segment of all rows, whose first pixels are at `input` and `grad`.
  __device__ __forceinline__ void add(Accumulators& sums, const unsigned char* input,
                                      const unsigned char* grad, const Warp& warp) {
    const int matrix = warp.lane / 8;
    grad += matrix / 2 * kGradRowBytes + warp.lane % 8 * kPixelBytes + matrix % 2 * 16;
    unsigned left[4];
    load_transposed(left, grad);
    load_rows<0, kWindowRows>(input, warp.lane);
#pragma unroll 1
    for (int pair = 0; pair < kRowPairs; ++pair) {
      if constexpr (C::bias) {
        const unsigned right[2] = {ones(Scalar{}), ones(Scalar{})};
        mma(Factor{}, sums.bias, left, right);
      }
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        const int row = Rows::offset(0, tap / C::kernel_width);
#pragma unroll
        for (int octet = 0; octet < 2; ++octet) {
          const int piece = tap % C::kernel_width * 2 + octet;
          const unsigned right[2] = {window[row][piece], window[row + Rows::kTimes][piece]};
          mma(Factor{}, sums.taps[tap][octet], left, right);
        }
      }
      move_window();
      input += 2 * Rows::kTimes * kRowBytes;
      grad += 2 * kGradRowBytes;
      if (pair + 1 < kRowPairs) {
        load_transposed(left, grad);
        load_rows<kOldRows, kWindowRows>(input, warp.lane);
      }
    }
  }
};

// Adds up the accumulators of warps that have the same channels, one warp after the other.
__device__ __forceinline__ void add_up(Accumulators& sums, const Warp& warp) {
  float* const gathered = reinterpret_cast<float*>(shared_memory()) +
                          (warp.bundle * kParts + warp.part) * (kSums * 32) + warp.lane;
#pragma unroll 1
  for (int sharer = 1; sharer < kSharers; ++sharer) {
    if (warp.sharer == sharer) sums.for_each([&](float& sum, int i) { gathered[i * 32] = sum; });
    __syncthreads();
    if (warp.sharer == 0) sums.for_each([&](float& sum, int i) { sum += gathered[i * 32]; });
    __syncthreads();
  }
}

// Writes a warp's accumulators to the workspace, but for those of channels of different groups.
__device__ __forceinline__ void write_sums(float* workspace, const Accumulators& sums, int chunk,
                                           const Warp& warp) {
  const int g = warp.lane / 4, t = warp.lane % 4;
  const int bundle = chunk * C::chunk + warp.bundle * kBundle;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int output = half * 8 + g;
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      const int input = octet * kOctet + 2 * t;
      if (kWidth < kBundle && output / kWidth != input / kWidth) continue;
      const int column = warp.part * kBundle + (kWidth < kBundle ? input % kWidth : input);
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        const float* const acc = sums.taps[tap][octet] + 2 * half;
        const int entry = (tap * kChannels + bundle + output) * kWidth + column;
        *reinterpret_cast<Vector<float, 2>*>(workspace + entry) = {acc[0], acc[1]};
      }
    }
    if (C::bias && warp.part == 0 && t == 0) {
      workspace[kWeights + bundle + output] = sums.bias[2 * half];
    }
  }
}

// The reduction: a block has 32 entries at a time, and for each several threads, which add up equal
// shares of the splits.
constexpr int kLanes = 32;
constexpr int kReduceRows = C::reduce_threads / kLanes;

__device__ __forceinline__ float sum_of(const float* first, int begin, int end) {
  float sum = 0.0f;
#pragma unroll 8
  for (int split = begin; split < end; ++split) sum += first[1ll * split * kEntries];
  return sum;
}

}  // namespace grouped
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::grouped::kThreads, Config::blocks_per_sm)
    weight_grad(const Config::Scalar* __restrict__ grad_output,
                const Config::Scalar* __restrict__ input, float* __restrict__ workspace, int splits,
                int images) {
  using namespace fastconv::grouped;
  // Chunks change fastest: blocks that read the same pixels run together.
  const int chunk = static_cast<int>(blockIdx.x) % kChunks;
  const int split = static_cast<int>(blockIdx.x) / kChunks;
  const Range range(split, splits, images);
  unsigned char* const shared = fastconv::shared_memory();
  const auto copy_tile = [&](int index) {
    const Tile tile(index);
    unsigned char* const stage = shared + (index - range.first) % 2 * kStageBytes;
    copy_halo(stage, input, chunk, tile, images);
    copy_pixels<C::tile_rows, C::tile_columns, C::out_height, C::out_width>(
        grad_output, chunk * C::chunk, tile.image, images, tile.y, tile.x,
        [&](int slot, int row, int column) {
          return stage + kHaloBytes + slot * kGradSlotBytes + row * kGradRowBytes +
                 column * kPixelBytes;
        });
  };

  const Warp warp;
  Accumulators sums;
  if (range.first < range.end) copy_tile(range.first);
  fastconv::copy_async_commit();
#pragma unroll 1
  for (int index = range.first; index < range.end; ++index) {
    if (index + 1 < range.end) copy_tile(index + 1);
    fastconv::copy_async_commit();
    fastconv::copy_async_wait<1>();
    __syncthreads();
    const unsigned char* const stage = shared + (index - range.first) % 2 * kStageBytes;
    const Tile tile(index);
#pragma unroll 1
    for (int item = warp.sharer; item < C::slots * kSegments; item += kSharers) {
      const int segment = item % kSegments, slot = item / kSegments;
      if (tile.image + slot >= images) break;
      const int pixel = segment * (kOctet * kPixelBytes);
      Walk walk;
      walk.add(sums, stage + slot * kSlotBytes + pixel + warp.first_input() * kScalarBytes,
               stage + kHaloBytes + slot * kGradSlotBytes + pixel +
                   warp.bundle * (kBundle * kScalarBytes),
               warp);
    }
    __syncthreads();  // the next tile but one overwrites what other warps read
  }
  fastconv::copy_async_wait<0>();
  add_up(sums, warp);
  if (warp.sharer == 0) {
    write_sums(workspace + 1ll * split * kEntries, sums, chunk, warp);
  }
}

extern "C" __global__ void __launch_bounds__(Config::reduce_threads)
    reduce(const float* __restrict__ workspace, Config::Scalar* __restrict__ grad,
           Config::Scalar* __restrict__ bias_grad, int splits) {
  using namespace fastconv::grouped;
  float* const gathered = reinterpret_cast<float*>(fastconv::shared_memory());
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes, row = thread / kLanes;
  const int step = static_cast<int>(gridDim.x) * kLanes;
#pragma unroll 1
  for (int first = static_cast<int>(blockIdx.x) * kLanes; first < kEntries; first += step) {
    const int entry = first + lane;
    const bool exists = entry < kEntries;
    gathered[thread] = exists ? sum_of(workspace + entry, splits * row / kReduceRows,
                                       splits * (row + 1) / kReduceRows)
                              : 0.0f;
    __syncthreads();
    if (row == 0 && exists) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kReduceRows; ++i) sum += gathered[i * kLanes + lane];
      if (entry < kWeights) {
        const int output = entry / kWidth % kChannels, tap = entry / (kWidth * kChannels);
        grad[1ll * output * C::weight_stride_out + 1ll * (entry % kWidth) * C::weight_stride_in +
             1ll * (tap / C::kernel_width) * C::weight_stride_height +
             1ll * (tap % C::kernel_width) * C::weight_stride_width] =
            fastconv::narrow<Scalar>(sum);
      } else {
        bias_grad[entry - kWeights] = fastconv::narrow<Scalar>(sum);
      }
    }
    __syncthreads();
  }
}
