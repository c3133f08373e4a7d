// Depthwise convolution by Toeplitz matrices on contiguous (NCHW) tensors: a block computes a tile
// of one channel's plane, of `slots` images.
#pragma once
#include "depthwise/toeplitz/kernel.cuh"

namespace fastconv {
namespace depthwise {

static_assert(C::channels == 1, "a block computes one channel");
static_assert(kParts * kPart * static_cast<int>(sizeof(Scalar)) +
                      round_up(kTableWords + kMarks, 4) * 4 ==
                  C::shared_bytes,
              "as planned");

// The tile of a block.
struct Tile {
  int y, x;    // first output
  int output;  // output channel
  int first_image;

  __device__ explicit Tile(unsigned block) {
    x = static_cast<int>(block % kTilesX) * kTileColumns;
    block /= kTilesX;
    y = static_cast<int>(block % kTilesY) * kTileRows;
    block /= kTilesY;
    output = static_cast<int>(block % (C::groups * C::group_out));
    first_image = static_cast<int>(block / (C::groups * C::group_out)) * C::slots;
  }
  // Offset of the input plane that the first image's tile reads.
  __device__ long long input_plane() const {
    return (1ll * first_image * C::groups + output / C::group_out) * kInPlane;
  }
};
constexpr long long kInImage = C::groups * kInPlane;

__device__ __forceinline__ void load_input(Scalar* target, const Scalar* input, const Tile& tile,
                                           int images) {
  constexpr int kEnd = C::inside ? kEndVector : kOperandColumns / C::vector;
  load_planes<C::slots, kCopiedRows, kEnd - kFirstVector, C::vector, C::pitch, kPlane, C::in_height,
              C::in_width, kThreads>(target + kFirstRow * C::pitch + kFirstVector * C::vector,
                                     input + tile.input_plane(), kInImage,
                                     images - tile.first_image, tile.y + Rows::kOrigin + kFirstRow,
                                     tile.x + Columns::kOrigin - kShift + kFirstVector * C::vector);
}

// Adds the bias to the first or second strip of a pair (`half` 0 or 1), applies the epilogue and
// writes the outputs that lie in the image.
__device__ __forceinline__ void store(const MmaAccumulators& accumulators, int half, float scale,
                                      Acc bias, Scalar* row, const Tile& tile,
                                      const Epilogue<C>& epilogue) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < C::lanes_x; ++j) {
#pragma unroll
    for (int i = 0; i < 2; i += C::store_vector) {
      const int x = tile.x + 8 * j + lane % 4 * 2 + i;
      Acc values[C::store_vector];
#pragma unroll
      for (int k = 0; k < C::store_vector; ++k) {
        values[k] = accumulators.result(j, 2 * half + i + k) * scale + bias;
      }
      store_vector(row + x, epilogue(values, row + x, x < C::out_width), x < C::out_width);
    }
  }
}

}  // namespace depthwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    convolve(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ weight,
             const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
             int first_image, int images FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::depthwise;
  using fastconv::widen;
  const auto epilogue = FASTCONV_EPILOGUE(output);
  const Tile tile(blockIdx.x);
  input += first_image * kInImage;
  output += first_image * (C::groups * C::group_out * kOutPlane);
  Scalar* const inputs = reinterpret_cast<Scalar*>(fastconv::shared_memory());
  unsigned* const table = reinterpret_cast<unsigned*>(inputs + kParts * kPart);
  unsigned* const marks = table + kTableWords;
  if constexpr (k3xTf32) clear_magnitudes(marks);
  if constexpr (C::inside) clear<kPart* static_cast<int>(sizeof(Scalar)), kThreads>(inputs);
  if constexpr (k3xTf32 || C::inside) __syncthreads();
  load_input(inputs, input, tile, images);
  fastconv::copy_async_commit();
  load_tables(table, weight, tile.output, marks);
  for (int i = static_cast<int>(threadIdx.x); i < kWeightMarks; i += kThreads) marks[i] = 0;
  const Acc shift = bias != nullptr ? Acc(widen(bias[tile.output])) : Acc(0);
  fastconv::copy_async_wait<0>();
  __syncthreads();
  prepare_operands(inputs, table, marks);
  __syncthreads();

#pragma unroll 1
  for (int pair = static_cast<int>(threadIdx.x) / 32; pair < kStripPairs; pair += C::warps) {
    MmaAccumulators accumulators;
    multiply(accumulators, lane_row(inputs, 0, pair), lane_diagonals(table, 0));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Strip strip(2 * pair + half);
      const int image = tile.first_image + strip.slot;
      if (2 * pair + half >= kStrips || image >= images) continue;
      const int first_row = tile.y + strip.row;
      Scalar* const plane =
          output + (1ll * image * (C::groups * C::group_out) + tile.output) * kOutPlane;
      const int y = first_row + static_cast<int>(threadIdx.x) % 32 / 4;
      const float scale = inverse_scale(marks, strip.slot);
      if (y < C::out_height) {
        store(accumulators, half, scale, shift, plane + 1ll * y * C::out_width, tile, epilogue);
      }
      if (!strip.marked(marks, strip.slot)) continue;
      __syncwarp();
      const Scalar* const source = input + tile.input_plane() + strip.slot * kInImage;
      rewrite_nonfinite([&](int y, int x) { return source[1ll * y * C::in_width + x]; }, weight,
                        tile.output, shift, first_row, tile.x,
                        [&](int row, int column) {
                          return plane + 1ll * (first_row + row) * C::out_width + tile.x + column;
                        } FASTCONV_WITH_RESIDUAL([&](int row, int column) {
                          return epilogue.residual_of(
                              plane + 1ll * (first_row + row) * C::out_width + tile.x + column);
                        }));
    }
  }
}
