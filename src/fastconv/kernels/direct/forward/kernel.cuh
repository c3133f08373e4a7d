// Forward convolution and input gradient on plain CUDA cores.
//
// Both passes are a cross-correlation along each of the two axes, or three (depth.cuh):
// out[m, o] = bias[m] + sum over channels k and taps j of
// packed[m, k, j] * in[k, o * in_stride + j * tap_step + origin].
//   forward        in = input, in_stride = stride, tap_step = dilation, origin = -padding.
//   input gradient in = grad_output. Input pixels whose positions have the same residue modulo the
//                  stride see the same taps, so each residue is a correlation of in_stride 1 that
//                  writes every stride-th pixel. Residues may differ by one tap; the missing one
//                  gets zero weights. Residues that no tap reaches are not computed: `clear` fills
//                  the image with zeros before.
//
// A block computes a tile of M channels x (rows x columns) pixels of one residue, plane, image and
// group.
//
//   shared memory, one of two stages          registers of a thread
//   input   [channel][row][pitch]             acc    [channels_per_thread][4 pixels]
//   weights [channel][tap row][tap col][M]    window the pixels of one row that its 4 pixels see
//
// A stage covers stage_channels input channels, stage_taps kernel rows and part_taps kernel columns
// (all of them, unless the kernel is very wide); one halo tile serves all of their taps. For each
// channel and kernel row a thread loads its window once and slides it over the kernel's columns:
// each tap costs channels_per_thread / 4 loads of weights and 4 * channels_per_thread
// multiply-adds.
//
// With `two_level`, accumulators are added to a second set of registers and cleared every
// flush_channels channels; where stages are small, every flush_stages stages, and where kernels are
// large, every flush_rows kernel rows. Rounding errors then grow with the lengths of the two levels
// and not with the length of the whole sum.
#pragma once
#include "device/depth.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace convolve {

using C = Config;
using D = DepthOf<C>;
using Scalar = C::Scalar;
using Acc = AccOf<Scalar>::type;

// --- One axis -----------------------------------------------------------------------------------

// Maps taps along one axis to input positions and kernel indices.
template <bool kTransposed, int kKernel, int kStride, int kDilation, int kPadding, int kOutSize>
struct Axis {
  static constexpr int kCommon = gcd(kStride, kDilation);
  // Distance between neighbouring outputs of a residue.
  static constexpr int kOutStep = kTransposed ? kStride : 1;
  static constexpr int kInStride = kTransposed ? 1 : kStride;
  static constexpr int kTapStep = kTransposed ? kDilation / kCommon : kDilation;
  static constexpr int kKernelStep = kTransposed ? kStride / kCommon : 1;
  static constexpr int kTaps = (kKernel - 1) / kKernelStep + 1;
  // Kernel index k reaches the outputs at k * dilation - padding modulo the stride, and these
  // residues repeat after kKernelStep indices.
  static constexpr int kResidues = kKernel < kKernelStep ? kKernel : kKernelStep;
  static constexpr bool kAllTaps = kResidues == kKernel || kKernel % kKernelStep == 0;
  static constexpr int kPositions = (kOutSize - 1) / kOutStep + 1;  // most outputs of a residue
  // Member `origin` of residue 0, which is that of every residue if kOutStep is 1.
  static constexpr int kOrigin =
      kTransposed ? (kPadding == 0 ? 0 : (kPadding - 1) / kStride + 1) - (kTaps - 1) * kTapStep
                  : -kPadding;

  int taps;          // taps of this residue, at most kTaps
  int first_kernel;  // kernel index of the last tap (transposed) or of the first (forward)
  int origin;        // input position of the first output's first tap
  int first_out;     // position of the first output
  int positions;     // number of outputs, kOutStep apart; may be 0

  __device__ explicit Axis(int residue)
      : taps(kTaps), first_kernel(0), origin(kOrigin), first_out(0), positions(kOutSize) {
    if constexpr (kOutStep > 1) {
      first_kernel = residue;
      taps = (kKernel - 1 - residue) / kKernelStep + 1;
      const int shifted = residue * kDilation - kPadding;
      int quotient = shifted / kStride;
      first_out = shifted % kStride;
      if (first_out < 0) {
        first_out += kStride;
        --quotient;
      }
      origin = -quotient - (taps - 1) * kTapStep;
      positions = first_out < kOutSize ? (kOutSize - 1 - first_out) / kOutStep + 1 : 0;
    }
  }

  // Taps count up with input positions; a transposed kernel's indices then count down.
  __device__ int kernel_index(int tap) const {
    return kTransposed ? first_kernel + (taps - 1 - tap) * kKernelStep : tap;
  }
};

using Depth = Axis<C::transposed, D::kernel, D::stride, D::dilation, D::padding, D::out>;
using Rows = Axis<C::transposed, C::kernel_height, C::stride_height, C::dilation_height,
                  C::padding_top, C::out_height>;
using Columns = Axis<C::transposed, C::kernel_width, C::stride_width, C::dilation_width,
                     C::padding_left, C::out_width>;

// --- The tile -----------------------------------------------------------------------------------

constexpr int kPixels = 4;  // neighbours in a row that a thread computes
constexpr int kThreads = 32 * C::warps;
constexpr int kLanesN = C::lanes_y * C::lanes_x;
constexpr int kLanesM = 32 / kLanesN;
constexpr int kTileM = C::channels_per_thread * kLanesM;
constexpr int kTileWidth = kPixels * C::lanes_x;
constexpr int kTileHeight = C::lanes_y * C::warps;
// A thread's channels come in groups that one shared-memory instruction reads. Neighbouring lanes
// take neighbouring groups, so that a warp reads without bank conflicts.
constexpr int kGroup = C::channels_per_thread < 4 ? C::channels_per_thread : 4;
constexpr int kGroups = C::channels_per_thread / kGroup;

constexpr int kParts = ceil_div(Columns::kTaps, C::part_taps);
constexpr int kTapChunks = ceil_div(Rows::kTaps, C::stage_taps);
constexpr int kReads = C::group_in * Depth::kTaps;  // channels of all planes that are read
constexpr int kChunks = ceil_div(kReads, C::stage_channels);
constexpr int kStages = kChunks * kParts * kTapChunks;

// The tile of a single kernel row (or column) holds only the rows (or columns) that it reads; the
// tile of several holds a contiguous range.
constexpr int kRowStep = C::stage_taps == 1 ? Rows::kInStride : 1;
constexpr int kRowStride = Rows::kInStride / kRowStep;
constexpr int kColumnStep = C::part_taps == 1 ? Columns::kInStride : 1;
constexpr int kColumnStride = Columns::kInStride / kColumnStep;

// Vector copies need aligned addresses, so the tile may start kShift pixels before the first one
// needed. The shift is the same for every residue and part.
constexpr int kVector = C::vector;
constexpr int kShift = kVector == 1 ? 0 : (Columns::kOrigin % kVector + kVector) % kVector;
static_assert(kVector == 1 || (Columns::kResidues == 1 && kColumnStep == 1),
              "neighbours in memory");
static_assert(kParts == 1 || C::part_taps * Columns::kTapStep % kVector == 0, "aligned parts");
constexpr int kWindow =
    kShift + (kPixels - 1) * kColumnStride + (C::part_taps - 1) * Columns::kTapStep + 1;
constexpr int kWindowPieces = ceil_div(kWindow, 4);

constexpr int kRows = (kTileHeight - 1) * kRowStride + (C::stage_taps - 1) * Rows::kTapStep + 1;
constexpr int kColumns =
    round_up((kTileWidth - kPixels) * kColumnStride + kWindowPieces * 4, kVector > 4 ? kVector : 4);
constexpr int kPitch = kColumns + C::pitch_padding;
static_assert(C::stage_channels % C::flush_channels == 0, "stages end flushed");
static_assert(C::flush_stages == 1 || C::stage_channels == C::flush_channels, "or several do");
static_assert(C::flush_rows == C::stage_taps || C::flush_channels * C::flush_stages == 1, "");
constexpr int kStageTaps = C::stage_taps * C::part_taps;
constexpr int kInputElements = C::stage_channels * kRows * kPitch;
constexpr int kWeightElements = C::stage_channels * kStageTaps * kTileM;
constexpr int kInputBytes = round_up(kInputElements * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kStageBytes =
    kInputBytes + round_up(kWeightElements * static_cast<int>(sizeof(Acc)), 16);
static_assert(2 * kStageBytes == C::shared_bytes, "the launch reserves what the tile needs");
static_assert(kLanesM * kLanesN == 32 && C::channels_per_thread % kGroup == 0, "whole warps");

constexpr int kTilesM = ceil_div(C::group_out, kTileM);
constexpr int kPlaneResidues = Rows::kResidues * Columns::kResidues;
constexpr int kResidues = Depth::kResidues * kPlaneResidues;
// Packed weights of one channel tile: [channel][part][tap row][tap column of the part][kTileM], so
// that each channel's weights of a stage are a contiguous run.
constexpr int kTapsHeight = kTapChunks * C::stage_taps;
constexpr int kChannels = kChunks * C::stage_channels;
constexpr long long kPackedTile = 1ll * kChannels * kParts * kTapsHeight * C::part_taps * kTileM;
using PackedOffset = IndexTo<kPackedTile>;
constexpr PackedOffset kPackedPart = PackedOffset{1} * kTapsHeight * C::part_taps * kTileM;
constexpr PackedOffset kPackedChannel = kParts * kPackedPart;

// Holds offsets and positions within an image, and positions beyond its end: with large strides,
// tiles reach far past it.
constexpr long long kReach =
    max_of(1ll * (Rows::kPositions + kTileHeight) * Rows::kInStride +
               1ll * kTapsHeight * Rows::kTapStep + 1ll * kRows * kRowStep,
           1ll * (Columns::kPositions + kTileWidth) * Columns::kInStride +
               1ll * kParts * C::part_taps * Columns::kTapStep + 1ll * kColumns * kColumnStep);
constexpr long long kImageElements =
    C::groups * max_of(1ll * C::group_in * D::in * C::in_height * C::in_width,
                       1ll * C::group_out * D::out * C::out_height * C::out_width);
using Offset = IndexTo<max_of(kImageElements, kReach)>;

// Decodes a block's tile from its index. Channel tiles change fastest, so that the blocks that read
// the same input run together and find it in the L2 cache.
struct Tile {
  int m, x, y, z, group, image, residue;

  __device__ explicit Tile(int index, int first_image, int images) {
    constexpr int kTilesX = ceil_div(Columns::kPositions, kTileWidth);
    constexpr int kTilesY = ceil_div(Rows::kPositions, kTileHeight);
    m = index % kTilesM;
    index /= kTilesM;
    x = index % kTilesX;
    index /= kTilesX;
    y = index % kTilesY;
    index /= kTilesY;
    z = index % Depth::kPositions;
    index /= Depth::kPositions;
    group = index % C::groups;
    index /= C::groups;
    image = first_image + index % images;
    residue = index / images;
  }
};

// The axes of a tile's residue.
__device__ __forceinline__ Depth depth_of(int residue) { return Depth(residue / kPlaneResidues); }
__device__ __forceinline__ Rows rows_of(int residue) {
  if constexpr (Depth::kResidues > 1) residue %= kPlaneResidues;
  return Rows(residue / Columns::kResidues);
}
__device__ __forceinline__ Columns columns_of(int residue) {
  return Columns(residue % Columns::kResidues);
}

__device__ __forceinline__ Offset in_offset(int channel, Offset row, Offset column) {
  if constexpr (C::in_channels_last) {
    return (row * C::in_width + column) * (C::group_in * C::groups) + channel;
  }
  return (static_cast<Offset>(channel) * C::in_height + row) * C::in_width + column;
}

__device__ __forceinline__ Offset in_offset(int channel, Offset plane, Offset row, Offset column) {
  if constexpr (C::in_channels_last) return in_offset(channel, plane * C::in_height + row, column);
  return ((static_cast<Offset>(channel) * D::in + plane) * C::in_height + row) * C::in_width +
         column;
}

// The offset within the first output plane.
__device__ __forceinline__ Offset out_offset(int channel, Offset row, Offset column) {
  if constexpr (C::out_channels_last) {
    return (row * C::out_width + column) * (C::group_out * C::groups) + channel;
  }
  return (static_cast<Offset>(channel) * D::out * C::out_height + row) * C::out_width + column;
}

// The distance between neighbouring output planes.
constexpr Offset kOutPlane =
    static_cast<Offset>(C::out_channels_last ? C::group_out * C::groups : 1) * C::out_height *
    C::out_width;

// A channel of one of the planes that an output plane reads, counted as the reduction does.
struct Read {
  int channel;  // within the group
  int tap;      // of the kernel's planes

  __device__ explicit Read(int index) : channel(index), tap(0) {
    if constexpr (Depth::kTaps > 1) {
      channel = index % C::group_in;
      tap = index / C::group_in;
    }
  }

  // Whether the reduction has this channel: the last chunk may go beyond it, and a residue may have
  // fewer taps than others.
  __device__ bool exists(const Depth& depth) const {
    return Depth::kTaps > 1 ? tap < depth.taps : channel < C::group_in;
  }
};

// --- Loading ------------------------------------------------------------------------------------

// Copies one stage's halo tile; elements outside of the image or past the last channel become zero.
__device__ __forceinline__ void load_input(Scalar* tile, const Scalar* image, int group,
                                           const Depth& depth, int first_channel, int first_plane,
                                           Offset first_row, Offset first_column) {
  constexpr int kVectors = kColumns / kVector;
  constexpr int kTotal = C::stage_channels * kRows * kVectors;
  for (int i = threadIdx.x; i < kTotal; i += kThreads) {
    // Neighbouring threads copy neighbouring addresses: columns, or channels if they come last.
    const int channel = C::in_channels_last ? i % C::stage_channels : i / (kRows * kVectors);
    const int rest = C::in_channels_last ? i / C::stage_channels : i % (kRows * kVectors);
    const int row = rest / kVectors;
    const int column = rest % kVectors * kVector;
    const Offset y = first_row + static_cast<Offset>(row) * kRowStep;
    const Offset x = first_column + static_cast<Offset>(column) * kColumnStep;
    bool valid = false;
    Offset offset = 0;
    if constexpr (D::exists) {
      const Read read(first_channel + channel);
      const int plane = first_plane + read.tap * Depth::kTapStep;
      valid = read.exists(depth) && plane >= 0 && plane < D::in && y >= 0 && y < C::in_height &&
              x >= 0 && x < C::in_width;
      if (valid) offset = in_offset(group * C::group_in + read.channel, plane, y, x);
    } else {
      valid = first_channel + channel < C::group_in && y >= 0 && y < C::in_height && x >= 0 &&
              x < C::in_width;
      if (valid) offset = in_offset(group * C::group_in + first_channel + channel, y, x);
    }
    copy_elements<kVector>(tile + (channel * kRows + row) * kPitch + column, image + offset, valid);
  }
}

// Returns the weight of a group's output channel m and channel `index` of the reduction at a tap;
// zero past the last channel, and past the last tap of the residue.
__device__ __forceinline__ Acc weight_at(const Scalar* weight, const Depth& depth, const Rows& rows,
                                         const Columns& columns, int group, int m, int index,
                                         int tap_y, int tap_x) {
  const Read read(index);
  const int k = read.channel;
  if (m >= C::group_out || !read.exists(depth) || tap_y >= rows.taps || tap_x >= columns.taps)
    return 0;
  // The weight's first dimension is the forward pass's output channels.
  const long long first = C::transposed ? group * C::group_in + k : group * C::group_out + m;
  const long long second = C::transposed ? m : k;
  if constexpr (D::exists) weight += 1ll * depth.kernel_index(read.tap) * D::weight_stride;
  return widen(weight[first * C::weight_stride_out + second * C::weight_stride_in +
                      1ll * rows.kernel_index(tap_y) * C::weight_stride_height +
                      1ll * columns.kernel_index(tap_x) * C::weight_stride_width]);
}

// Returns where a stage's weights begin in a channel tile's packed weights.
__device__ __forceinline__ PackedOffset packed_offset(int channel, int part, int tap_row) {
  return channel * kPackedChannel + part * kPackedPart +
         PackedOffset{tap_row} * C::part_taps * kTileM;
}

// Copies one stage's weights: for each channel a contiguous run of the packed array.
__device__ __forceinline__ void load_packed(Acc* tile, const Acc* packed) {
  constexpr int kVectorAccs = 16 / static_cast<int>(sizeof(Acc));
  constexpr int kRun = kStageTaps * kTileM;
  constexpr int kWidth = kRun % kVectorAccs == 0 ? kVectorAccs : 1;
  for (int i = threadIdx.x; i < C::stage_channels * kRun / kWidth; i += kThreads) {
    const int channel = i / (kRun / kWidth);
    const int position = i % (kRun / kWidth) * kWidth;
    copy_elements<kWidth>(tile + channel * kRun + position,
                          packed + channel * kPackedChannel + position, true);
  }
}

// Reads one stage's weights from the weight tensor itself. This is slower than load_packed, but
// saves small problems the launch of `pack`.
__device__ __forceinline__ void load_unpacked(Acc* tile, const Scalar* weight, const Depth& depth,
                                              const Rows& rows, const Columns& columns, int group,
                                              int first_m, int first_channel, int first_tap_y,
                                              int first_tap_x) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kWeightElements; i += kThreads) {
    const int m = i % kTileM, tap = i / kTileM % kStageTaps, channel = i / (kTileM * kStageTaps);
    tile[i] = weight_at(weight, depth, rows, columns, group, first_m + m, first_channel + channel,
                        first_tap_y + tap / C::part_taps, first_tap_x + tap % C::part_taps);
  }
}

// --- Multiplying --------------------------------------------------------------------------------

// A thread's place in its block's tile.
struct Position {
  int m, y, x;

  __device__ Position() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    m = lane / kLanesN;
    y = lane % kLanesN / C::lanes_x + C::lanes_y * warp;
    x = lane % C::lanes_x;
  }

  // Maps the thread's i-th channel, below channels_per_thread, to a channel of the tile.
  __device__ __forceinline__ int channel(int i) const {
    return (i / kGroup * kLanesM + m) * kGroup + i % kGroup;
  }
};

using Accumulators = Acc[C::channels_per_thread][kPixels];

// Adds the accumulators to the second level and clears them.
__device__ __forceinline__ void flush(Accumulators& acc, Accumulators& total_acc) {
#pragma unroll
  for (int i = 0; i < C::channels_per_thread; ++i) {
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      total_acc[i][p] += acc[i][p];
      acc[i][p] = 0;
    }
  }
}

// Multiplies a stage's input by its weights. Only tap_rows x tap_columns of the stage's taps exist;
// the others are skipped although their weights are zero, because zero times infinity is NaN.
__device__ __forceinline__ void multiply(const Scalar* input, const Acc* weights,
                                         const Position& at, int tap_rows, int tap_columns,
                                         Accumulators& acc, Accumulators& total_acc) {
  constexpr bool kAllColumns = kParts == 1 && Columns::kAllTaps;
  constexpr bool kAllRows = kTapChunks == 1 && Rows::kAllTaps;
  constexpr int kRowsUnrolled = kStageTaps <= C::unrolled_taps ? C::stage_taps : 1;
#pragma unroll 1
  for (int channel = 0; channel < C::stage_channels; ++channel) {
#pragma unroll(kRowsUnrolled)
    for (int tap_row = 0; tap_row < C::stage_taps; ++tap_row) {
      if (!kAllRows && tap_row >= tap_rows) break;
      const int row = at.y * kRowStride + tap_row * Rows::kTapStep;
      const Scalar* pixels =
          input + (channel * kRows + row) * kPitch + at.x * kPixels * kColumnStride;
      const Acc* taps = weights + (channel * C::stage_taps + tap_row) * C::part_taps * kTileM;
      Acc window[kWindowPieces][4];
#pragma unroll
      for (int piece = 0; piece < kWindowPieces; ++piece) load4(pixels + piece * 4, window[piece]);
#pragma unroll
      for (int tap = 0; tap < C::part_taps; ++tap) {
        if (!kAllColumns && tap >= tap_columns) break;
        Acc weight[C::channels_per_thread];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const auto group = *reinterpret_cast<const Vector<Acc, kGroup>*>(taps + tap * kTileM +
                                                                           at.channel(i * kGroup));
#pragma unroll
          for (int j = 0; j < kGroup; ++j) weight[i * kGroup + j] = group.element[j];
        }
#pragma unroll
        for (int i = 0; i < C::channels_per_thread; ++i) {
#pragma unroll
          for (int p = 0; p < kPixels; ++p) {
            const int w = kShift + p * kColumnStride + tap * Columns::kTapStep;
            acc[i][p] += weight[i] * window[w / 4][w % 4];
          }
        }
      }
      if (C::two_level && C::flush_rows < C::stage_taps && (tap_row + 1) % C::flush_rows == 0) {
        flush(acc, total_acc);
      }
    }
    if (C::two_level && C::flush_stages == 1 && (channel + 1) % C::flush_channels == 0) {
      flush(acc, total_acc);
    }
  }
}

// --- Storing ------------------------------------------------------------------------------------

// Writes the first `left` elements, kStep apart in memory, in vectors of kVectorOut. `left` is a
// multiple of kVectorOut.
template <int kVectorOut, int kStep = 1, int kCount>
__device__ __forceinline__ void store_first(Scalar* target, const Scalar (&elements)[kCount],
                                            int left, const Epilogue<C>&) {
  static_assert(kVectorOut == 1 || kStep == 1, "neighbours in memory");
#pragma unroll
  for (int i = 0; i < kCount; i += kVectorOut) {
    Vector<Scalar, kVectorOut> vector;
#pragma unroll
    for (int j = 0; j < kVectorOut; ++j) vector.element[j] = elements[i + j];
    if (i < left) *reinterpret_cast<Vector<Scalar, kVectorOut>*>(target + i * kStep) = vector;
  }
}

// An accumulator whose residual is still to be added. store_first loads all residuals before it
// uses the first, so that their latencies overlap.
struct Unfinished {
  Acc acc;
};
template <int kVectorOut, int kStep = 1, int kCount>
__device__ __forceinline__ void store_first(Scalar* target,
                                            const Unfinished (&accumulators)[kCount], int left,
                                            const Epilogue<C>& epilogue) {
  Vector<Scalar, kVectorOut> residuals[kCount / kVectorOut];
#pragma unroll
  for (int i = 0; i < kCount; i += kVectorOut) {
    residuals[i / kVectorOut] = epilogue.residual_of<kVectorOut>(target + i * kStep, i < left);
  }
  Scalar elements[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Scalar residual = residuals[i / kVectorOut].element[i % kVectorOut];
    elements[i] = narrow<Scalar>(epilogue.activated(accumulators[i].acc, residual));
  }
  store_first<kVectorOut, kStep>(target, elements, left, epilogue);
}

// What store_first takes: finished outputs, or accumulators if there is a residual to add.
#ifdef FASTCONV_RESIDUAL
using Value = Unfinished;
__device__ __forceinline__ Value value_of(Acc acc) { return {acc}; }
#else
using Value = Scalar;
__device__ __forceinline__ Value value_of(Acc acc) {
  return narrow<Scalar>(Epilogue<C>::activated(acc));
}
#endif

// Adds the bias and writes the part of the tile inside the image, in vectors along the dimension
// that is contiguous in memory where the image's size keeps all of them aligned.
__device__ __forceinline__ void store(Scalar* image, const Scalar* bias, const Tile& tile,
                                      const Rows& rows, const Columns& columns, const Position& at,
                                      const Accumulators& acc, const Epilogue<C>& epilogue) {
  const int y = tile.y * kTileHeight + at.y, x = tile.x * kTileWidth + at.x * kPixels;
  if (y >= rows.positions || x >= columns.positions) return;
  const int row = y * Rows::kOutStep + rows.first_out;
  const int column = x * Columns::kOutStep + columns.first_out;
  Value value[C::channels_per_thread][kPixels];
#pragma unroll
  for (int i = 0; i < C::channels_per_thread; ++i) {
    const int m = tile.m * kTileM + at.channel(i);
    const Acc shift = bias != nullptr && m < C::group_out
                          ? Acc(widen(bias[tile.group * C::group_out + m]))
                          : Acc(0);
#pragma unroll
    for (int p = 0; p < kPixels; ++p) value[i][p] = value_of(acc[i][p] + shift);
  }
  const int first = tile.group * C::group_out + tile.m * kTileM;
  if constexpr (C::out_channels_last) {
    constexpr int kVectorOut = C::aligned ? gcd(C::group_out, kGroup) : 1;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      if (x + p >= columns.positions) return;
      const int column_p = column + p * Columns::kOutStep;
#pragma unroll
      for (int i = 0; i < C::channels_per_thread; i += kGroup) {
        const int m = at.channel(i);
        Value group[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) group[j] = value[i + j][p];
        store_first<kVectorOut>(image + out_offset(first + m, row, column_p), group,
                                C::group_out - tile.m * kTileM - m, epilogue);
      }
    }
  } else {
    constexpr int kVectorOut =
        C::aligned && Columns::kOutStep == 1 ? gcd(C::out_width, kPixels) : 1;
#pragma unroll
    for (int i = 0; i < C::channels_per_thread; ++i) {
      const int m = at.channel(i);
      if (tile.m * kTileM + m >= C::group_out) continue;
      store_first<kVectorOut, Columns::kOutStep>(image + out_offset(first + m, row, column),
                                                 value[i], columns.positions - x, epilogue);
    }
  }
}

}  // namespace convolve
}  // namespace fastconv

// Fills the output with zeros. Launched before `convolve` where that does not write every pixel.
extern "C" __global__ void clear(Config::Scalar* __restrict__ output, int batch) {
  using namespace fastconv::convolve;
  constexpr int kCount = C::aligned ? 16 / static_cast<int>(sizeof(Scalar)) : 1;
  using Zeros = fastconv::Vector<Scalar, kCount>;
  const long long total =
      1ll * batch * C::groups * C::group_out * D::out * C::out_height * C::out_width;
  const long long thread = 1ll * blockIdx.x * blockDim.x + threadIdx.x;
  const long long step = 1ll * gridDim.x * blockDim.x;
  for (long long i = thread; i < total / kCount; i += step) {
    reinterpret_cast<Zeros*>(output)[i] = Zeros{};
  }
  for (long long i = total / kCount * kCount + thread; i < total; i += step) output[i] = Scalar{};
}

// Packs the weights in the order in which `convolve` reads them: [residue][group][channel tile]
// [channel][part][tap row][tap column][kTileM], converted to the accumulators' type.
extern "C" __global__ void pack(const Config::Scalar* __restrict__ weight,
                                fastconv::AccOf<Config::Scalar>::type* __restrict__ packed) {
  using namespace fastconv::convolve;
  constexpr long long kTotal = 1ll * kResidues * C::groups * kTilesM * kPackedTile;
  const long long step = 1ll * gridDim.x * blockDim.x;
  for (long long i = 1ll * blockIdx.x * blockDim.x + threadIdx.x; i < kTotal; i += step) {
    long long rest = i;
    const int in_tile = static_cast<int>(rest % kTileM);
    rest /= kTileM;
    const int in_part = static_cast<int>(rest % C::part_taps);
    rest /= C::part_taps;
    const int tap_y = static_cast<int>(rest % kTapsHeight);
    rest /= kTapsHeight;
    const int tap_x = static_cast<int>(rest % kParts) * C::part_taps + in_part;
    rest /= kParts;
    const int k = static_cast<int>(rest % kChannels);
    rest /= kChannels;
    const int m = static_cast<int>(rest % kTilesM) * kTileM + in_tile;
    rest /= kTilesM;
    const int group = static_cast<int>(rest % C::groups);
    const int residue = static_cast<int>(rest / C::groups);
    packed[i] = weight_at(weight, depth_of(residue), rows_of(residue), columns_of(residue), group,
                          m, k, tap_y, tap_x);
  }
}

extern "C" __global__ void __launch_bounds__(fastconv::convolve::kThreads, Config::blocks_per_sm)
    convolve(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ weight,
             const fastconv::AccOf<Config::Scalar>::type* __restrict__ packed,
             const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
             int first_image, int images FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::convolve;
  const Tile tile(blockIdx.x, first_image, images);
  const Position at;
  const Depth depth = depth_of(tile.residue);
  const Rows rows = rows_of(tile.residue);
  const Columns columns = columns_of(tile.residue);
  // Residues may differ in size; the grid covers the largest.
  if constexpr (Depth::kOutStep > 1) {
    if (tile.z >= depth.positions) return;
  }
  if constexpr (Rows::kOutStep > 1 || Columns::kOutStep > 1) {
    if (tile.y * kTileHeight >= rows.positions || tile.x * kTileWidth >= columns.positions) return;
  }
  const Offset first_row =
      static_cast<Offset>(tile.y * kTileHeight) * Rows::kInStride + rows.origin;
  const Offset first_column =
      static_cast<Offset>(tile.x * kTileWidth) * Columns::kInStride + columns.origin - kShift;
  const int first_plane = tile.z * Depth::kInStride + depth.origin;
  const Scalar* image =
      input + 1ll * tile.image * C::groups * C::group_in * D::in * C::in_height * C::in_width;
  packed += ((tile.residue * C::groups + tile.group) * kTilesM + tile.m) * kPackedTile;

  unsigned char* shared = fastconv::shared_memory();
  const auto inputs = [&](int stage) {
    return reinterpret_cast<Scalar*>(shared + stage % 2 * kStageBytes);
  };
  const auto weights = [&](int stage) {
    return reinterpret_cast<Acc*>(shared + stage % 2 * kStageBytes + kInputBytes);
  };
  // Stages go through the kernel's rows first, then through parts of rows, then through channels.
  const auto tap_row = [](int stage) { return stage % kTapChunks * C::stage_taps; };
  const auto part = [](int stage) { return stage / kTapChunks % kParts; };
  const auto load = [&](int stage) {
    const int channel = stage / (kTapChunks * kParts) * C::stage_channels;
    load_input(inputs(stage), image, tile.group, depth, channel, first_plane,
               first_row + tap_row(stage) * Rows::kTapStep,
               first_column + part(stage) * C::part_taps * Columns::kTapStep);
    if constexpr (C::packed) {
      load_packed(weights(stage), packed + packed_offset(channel, part(stage), tap_row(stage)));
    } else {
      load_unpacked(weights(stage), weight, depth, rows, columns, tile.group, tile.m * kTileM,
                    channel, tap_row(stage), part(stage) * C::part_taps);
    }
    fastconv::copy_async_commit();
  };

  Accumulators acc = {}, total_acc = {};
  load(0);
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage + 1 < kStages) {
      load(stage + 1);
      fastconv::copy_async_wait<1>();
    } else {
      fastconv::copy_async_wait<0>();
    }
    __syncthreads();
    multiply(inputs(stage), weights(stage), at, rows.taps - tap_row(stage),
             columns.taps - part(stage) * C::part_taps, acc, total_acc);
    if (C::two_level && C::flush_stages > 1) {
      if ((stage + 1) % C::flush_stages == 0 || stage + 1 == kStages) flush(acc, total_acc);
    }
    __syncthreads();  // before the stage after next overwrites this one
  }
  Scalar* target =
      output + 1ll * tile.image * C::groups * C::group_out * D::out * C::out_height * C::out_width;
  if constexpr (D::exists) {
    target += static_cast<Offset>(tile.z * Depth::kOutStep + depth.first_out) * kOutPlane;
  }
  store(target, bias, tile, rows, columns, at, C::two_level ? total_acc : acc,
        FASTCONV_EPILOGUE(output));
}
