// The producer lane: TMA copies of operands to the ring of stages.
#pragma once
#include "hopper/wgrad_implicit_gemm/tile.cuh"

namespace fastconv {
namespace hopper {

// The kernel's parameter for a tensor: TMA copies need a tensor map.
template <bool kCopied>
using Source = typename tensor::Either<kCopied, TensorMap, const Scalar*>::type;

template <bool kGradCopied, bool kInputCopied>
struct SourcesOf {
  const Source<kGradCopied>& grad_output;
  const Source<kInputCopied>& input;
  int first_image;  // of boxes with a halo
};

constexpr int kCopiedColumnBytes = Halo::exists ? Halo::loaded_bytes : kColumnBytes;
constexpr int kCopiedBytes =  // bytes of a stage that TMA copies
    (C::grad_copied ? kRowBytes : 0) + (C::input_copied ? kCopiedColumnBytes : 0);

// Channels-last tensors: each TMA box is 128 bytes of channels of kDepth positions. TMA gives zeros
// for positions beyond the last. Channels beyond a group's may be another group's; their
// accumulators are not stored.
template <class Sources>
__device__ __forceinline__ void copy_pixel_rows(const Shared& shared, const Sources& sources,
                                                int stage, const Tile& tile, int step) {
#pragma unroll
  for (int i = 0; i < kTileRows / kSpanElements; ++i) {
    tensor_load(shared.rows(stage) + i * kBoxBytes, sources.grad_output,
                {tile.group * kOut + tile.row + i * kSpanElements, step * kDepth},
                shared.full(stage));
  }
}
template <class Sources>
__device__ __forceinline__ void copy_pixel_columns(const Shared& shared, const Sources& sources,
                                                   int stage, const Tile& tile, int step) {
  const int flat = step * kDepth;
  const int image = flat / kPositions, in_image = flat - image * kPositions;
  const int plane = Depth::exists ? in_image / kPlanePositions : 0;
  const int in_plane = in_image - plane * kPlanePositions;
  const int row = in_plane / C::out_width, column = in_plane - row * C::out_width;
#pragma unroll
  for (int i = 0; i < kTileColumns / kSpanElements; ++i) {
    unsigned char* const target = shared.columns(stage) + i * kBoxBytes;
    const int first = tile.column + i * kSpanElements;
    // Columns beyond the last tap are not stored, so any channels will do.
    const int tap = first / kTapColumns < kTaps ? first / kTapColumns : 0;
    const int channel = tile.group * kIn + first - tap * kTapColumns;
    if constexpr (C::flat) {
      tensor_load(target, sources.input, {channel, flat}, shared.full(stage));
    } else if constexpr (Depth::exists) {
      const int tap_plane = tap / kPlaneTaps, tap_row = tap % kPlaneTaps / C::kernel_width;
      im2col_load(
          target, sources.input,
          {channel, column * C::stride_width - C::padding_left,
           row * C::stride_height - C::padding_top, plane * Depth::stride - Depth::padding, image},
          {tap % C::kernel_width * C::dilation_width, tap_row * C::dilation_height,
           tap_plane * Depth::dilation},
          shared.full(stage));
    } else {
      im2col_load(
          target, sources.input,
          {channel, column * C::stride_width - C::padding_left,
           row * C::stride_height - C::padding_top, image},
          {tap % C::kernel_width * C::dilation_width, tap / C::kernel_width * C::dilation_height},
          shared.full(stage));
    }
  }
}

// Contiguous tensors: 128 bytes of an image's positions of each channel.
template <class Sources>
__device__ __forceinline__ void copy_planes(const Shared& shared, const Sources& sources, int stage,
                                            const Tile& tile, int step) {
  const int image = step / kLineSteps, position = (step - image * kLineSteps) * kDepth;
  tensor_load(shared.rows(stage), sources.grad_output, {position, tile.row, image},
              shared.full(stage));
#pragma unroll
  for (int i = 0; i < C::column_groups; ++i) {
    tensor_load(shared.columns(stage) + i * C::mma_columns * kSpan, sources.input,
                {position, tile.column + i * C::mma_columns, image}, shared.full(stage));
  }
}

// Channels-last tensors, with a halo: boxes of a patch of the output, and of the input's pixels
// that it reads. TMA gives zeros beyond images and channels.
template <class Halo, class Sources>
__device__ __forceinline__ void copy_boxes(const Shared& shared, const Sources& sources, int stage,
                                           const Tile& tile, int step) {
  const int line = step / kLineSteps, column = (step - line * kLineSteps) * Halo::patch_columns;
  const int of_slab = line / kLines, in_image = line - of_slab * kLines;
  const int image = sources.first_image + of_slab;
  constexpr int kPlaneLines = kLines / Depth::out;
  const int plane = in_image / kPlaneLines;
  const int row = (in_image - plane * kPlaneLines) * Halo::patch_rows;
#pragma unroll
  for (int i = 0; i < kTileRows / kSpanElements; ++i) {
    unsigned char* const target = shared.rows(stage) + i * kBoxBytes;
    const int channel = tile.row + i * kSpanElements;
    if constexpr (Depth::exists) {
      tensor_load(target, sources.grad_output, {channel, column, row, plane, image},
                  shared.full(stage));
    } else {
      tensor_load(target, sources.grad_output, {channel, column, row, image}, shared.full(stage));
    }
  }
  const typename Halo::Block block(tile.column / kTileColumns);
  const int in_row = row * C::stride_height - C::padding_top + block.row * C::dilation_height;
  const int in_plane = plane * Depth::stride - Depth::padding + block.plane * Depth::dilation;
#pragma unroll
  for (int i = 0; i < Halo::chunks * Halo::boxes; ++i) {
    unsigned char* const target = shared.columns(stage) + i * Halo::box_distance;
    const int channel = block.channel + i / Halo::boxes * Halo::channels;
    const int in_column =
        column * C::stride_width - C::padding_left + Halo::residue_of(i % Halo::boxes);
    if constexpr (Depth::exists) {
      tensor_load(target, sources.input, {channel, in_column, in_row, in_plane, image},
                  shared.full(stage));
    } else if constexpr (Halo::split_rows) {
      tensor_load(target, sources.input, {channel, in_column, block.row, row, image},
                  shared.full(stage));
    } else {
      tensor_load(target, sources.input, {channel, in_column, in_row, image}, shared.full(stage));
    }
  }
}

// Fills an empty stage.
template <class Sources>
__device__ __forceinline__ void copy_step(const Shared& shared, const Sources& sources, int stage,
                                          const Tile& tile, int step) {
  barrier_arrive_expect(shared.full(stage), kCopiedBytes);
  if constexpr (!C::channels_last) {
    copy_planes(shared, sources, stage, tile, step);
  } else if constexpr (Halo::exists) {
    copy_boxes<Halo>(shared, sources, stage, tile, step);
  } else {
    copy_pixel_rows(shared, sources, stage, tile, step);
    if constexpr (C::input_copied) copy_pixel_columns(shared, sources, stage, tile, step);
  }
}

template <class Sources>
__device__ __forceinline__ void copy_steps(const Shared& shared, const Sources& sources,
                                           const Share& share) {
  Ring ring(1);
  for_runs(share, static_cast<int>(blockIdx.x), [&](const Run& run, int) {
    const Tile tile(run.tile);
    for (int step = run.first; step < run.end; ++step, ring.advance()) {
      barrier_wait(shared.empty(ring.stage), ring.parity);
      copy_step(shared, sources, ring.stage, tile, step);
    }
  });
}

}  // namespace hopper
}  // namespace fastconv
