// Epilogue of a strided input gradient whose residues are output channels (`d2s_*`): a
// consumer's accumulators go through shared memory to global memory, in lines.
//
// A line is a row of the image: of one channel, or of all channels if these are neighbours. Each
// position has `interleave` elements of a line, and the positions of a row lie side by side. So the
// 64 rows of M are several lines, each of which is staged as it lies in memory and stored at once.
#pragma once
#include "hopper/halo/store.cuh"

namespace fastconv {
namespace hopper {

constexpr int kStagedLines = C::stack * kStackLines;  // for each row of positions of the tile
constexpr int kLineElements = C::image_width * kOutColumn;
constexpr int kLineBegin = -C::column_begin * kOutColumn;  // in stored columns: see Line
static_assert(!kDepthToSpace || (kLineBegin >= 0 && C::lead == 0 && !C::scaled_fp16 && !C::wraps),
              "");
static_assert(!kDepthToSpace || !C::out_channels_last || C::groups == 1,
              "all channels are neighbours");
static_assert(!kDepthToSpace || !C::bulk_stores || C::tile_rows == 1 ||
                  (kLineElements % kVector == 0 && kStoredPitch % kVector == 0),
              "several rows are aligned alike");

// The index-th line of the image that the tile's line-th row of positions writes. The first
// position may begin before the line: those elements would be gradients of the padding, and are not
// stored.
struct Line {
  Scalar* start;  // stored column 0
  bool exists;

  __device__ __forceinline__ Line(const Target& target, int index, int line) {
    const int output = target.outputs + index % kStackLines * C::interleave;
    const DepthToSpaceChannel first(output);
    const int row = target.row + kRowStep * (line + index / kStackLines);
    const int y = C::out_step_height * row + C::row_begin + first.row;
    exists = output < C::group_out && row < C::out_height && y >= 0 && y < C::image_height;
    start = target.channel_row(first.channel, y) - kLineBegin;
  }
};

// Whether some tap reaches a residue of an axis.
__device__ __forceinline__ bool is_reached(int residue, int last_tap, int taps, int step,
                                           int kernel, int dilation) {
  bool reached = false;
  for (int tap = 0; tap < taps; ++tap) {
    reached = reached || is_tap(last_tap - step * tap + residue, kernel, dilation);
  }
  return reached;
}

// Whether taps reach all residues of an axis: `kernel` of them, `dilation` apart.
__host__ __device__ constexpr bool all_reached(int residues, int kernel, int dilation) {
  return kernel >= residues && gcd(residues, dilation) == 1;
}

// One of a thread's two rows of M.
struct ResidueRow {
  static constexpr bool kAllReached =
      all_reached(C::d2s_height, C::weight_height, C::tap_dilation_height) &&
      all_reached(C::d2s_width, C::weight_width, C::tap_dilation_width);
  int index;    // index of its line
  int element;  // index among a position's elements
  bool exists;
  bool reached;

  __device__ __forceinline__ ResidueRow(const Target& target, int mma_row) {
    const int row = row_of_column(mma_row);
    const int of_stack = row % kStackRows;
    index = row / kStackRows * kStackLines + of_stack / C::interleave;
    element = of_stack % C::interleave;
    exists = of_stack < kStackLines * C::interleave;
    if constexpr (!kAllReached) {
      const DepthToSpaceChannel to(target.outputs + of_stack);
      reached = is_reached(to.row, C::last_tap_row, C::kernel_height, C::tap_step_height,
                           C::weight_height, C::tap_dilation_height) &&
                is_reached(to.column, C::last_tap_column, C::kernel_width, C::tap_step_width,
                           C::weight_width, C::tap_dilation_width);
    }
  }
  // An accumulator's output. Without a tap the weights are zero, but zero times infinity is NaN.
  __device__ __forceinline__ float finished(const Finish& finish, float accumulated) const {
    return finish(kAllReached || reached ? accumulated : 0.0f);
  }
  // Where the first position is staged. With bulk stores, a staged line has the misalignment to 16
  // bytes that it will have in global memory.
  __device__ __forceinline__ Scalar* staged(Scalar* staging, const Target& target) const {
    const int shift = C::bulk_stores ? misalignment(Line(target, index, 0).start, kVector) : 0;
    return staging + index * kLinePitch + shift + element;
  }
};

// Whether a thread's two rows are neighbours in a line and make an aligned word of shared memory.
constexpr bool kStagedPairs =
    C::interleave % 2 == 0 && (!C::bulk_stores || (kLineElements % 2 == 0 && kLineBegin % 2 == 0));

__device__ __forceinline__ void stage_residues(const float (&acc)[kAccumulators],
                                               const Finish (&finish)[2],
                                               const ResidueRow (&rows)[2],
                                               Scalar* const (&staged)[2], int store_pass,
                                               int lane) {
#pragma unroll
  for (int i = 0; i < C::pass_pixels / 8; ++i) {
    const int j = store_pass * (C::pass_pixels / 8) + i;
    if (8 * j >= C::pixels) break;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int at = C::interleave * (8 * i + lane % 4 * 2 + k);
      const float first = rows[0].finished(finish[0], acc[4 * j + k]);
      const float second = rows[1].finished(finish[1], acc[4 * j + 2 + k]);
      if constexpr (kStagedPairs) {
        if (rows[0].exists) {
          *reinterpret_cast<Pair*>(staged[0] + at) = narrow_pair(Scalar{}, first, second);
        }
      } else {
        if (rows[0].exists) staged[0][at] = narrow<Scalar>(first);
        if (rows[1].exists) staged[1][at] = narrow<Scalar>(second);
      }
    }
  }
}

// Stores one pass's part of a line, for the tile's line-th row of positions: with a bulk copy of
// one lane, or with all lanes of a warp.
__device__ __forceinline__ void store_line(const Scalar* staging, const Target& target, int index,
                                           int line, int store_pass, int lane) {
  const Line to(target, index, line);
  if (!to.exists) return;
  const int at =
      target.column + store_pass * kStoredPass - line * kStoredPitch;  // first of this pass
  const int begin = max(max(target.column, kLineBegin), at);
  const int end =
      min(min(target.column + kStoredColumns, kLineBegin + kLineElements), at + kStoredPass);
  const Scalar* const staged = staging + index * kLinePitch - at;
  if constexpr (C::bulk_stores) {
    store_columns(to.start, staged + misalignment(to.start, kVector), begin, end);
  } else {
    for (int x = begin + lane; x < end; x += 32) to.start[x] = staged[x];
  }
}

__device__ __forceinline__ void store_residues(const float (&acc)[kAccumulators],
                                               const Finish (&finish)[2], Scalar* staging,
                                               const Target& target, int warpgroup, int warp,
                                               int lane) {
  constexpr int kLinesOfTile = C::tile_rows * kStagedLines;
  const int first = 16 * warp + lane / 4;
  const ResidueRow rows[2] = {ResidueRow(target, first), ResidueRow(target, first + 8)};
  Scalar* const staged[2] = {rows[0].staged(staging, target), rows[1].staged(staging, target)};
#pragma unroll
  for (int store_pass = 0; store_pass < kPasses; ++store_pass) {
    if constexpr (C::bulk_stores) bulk_store_wait_read<0>();
    storing_sync(warpgroup);
    stage_residues(acc, finish, rows, staged, store_pass, lane);
    if constexpr (C::bulk_stores) fence_async_shared();
    storing_sync(warpgroup);
    const int line = C::bulk_stores ? 4 * lane + warp : warp;
    const int step = C::bulk_stores ? 128 : 4;
#pragma unroll 1
    for (int i = line; i < kLinesOfTile; i += step) {
      store_line(staging, target, i % kStagedLines, i / kStagedLines, store_pass, lane);
    }
    if constexpr (C::bulk_stores) bulk_store_commit();
  }
}

}  // namespace hopper
}  // namespace fastconv
