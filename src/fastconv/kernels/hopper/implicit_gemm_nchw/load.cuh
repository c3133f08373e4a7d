// The producer: one thread copies planes, another weights, each into a ring of stages.
#pragma once
#include "hopper/implicit_gemm_nchw/weights.cuh"

namespace fastconv {
namespace hopper {

// Planes come by TMA copies of a tensor map, or, where no tensor map can describe them, by bulk
// copies: a chunk of an image's whole planes is contiguous in memory.
using Planes = Either<C::bulk, const float*, TensorMap>::type;

constexpr int kInPlane = C::in_height * C::in_width;

__device__ __forceinline__ void load_piece(void* target, const float* planes, int image, int,
                                           int group, int channel, Barrier* full) {
  const int bytes = min(C::chunk, C::group_in - channel) * kInPlane * 4;
  const long long first = (static_cast<long long>(image) * C::groups + group) * C::group_in;
  bulk_load(target, planes + (first + channel) * kInPlane, bytes, full);
}
__device__ __forceinline__ void load_piece(void* target, const TensorMap& planes, int image,
                                           int begin, int group, int channel, Barrier* full) {
  tensor_load(
      target, planes,
      {C::flat ? begin : 0, C::flat || C::whole ? 0 : begin, group * C::group_in + channel, image},
      full);
}

// Calls `visit` for each piece of a tile, with its image and the row or pixel where it begins.
template <class Visit>
__device__ __forceinline__ void each_piece(const Tile& tile, int batch, Visit visit) {
  int image = tile.image;
  int pixel = tile.pixel;
  for (int left = C::tile_pixels; left > 0 && image < batch; ++image) {
    const Span span(pixel, min(pixel + left, kGridPixels) - 1);
    for (int begin = span.begin; begin < span.end; begin += C::piece) visit(image, begin);
    left -= C::image_pixels - pixel;
    pixel = 0;
  }
}

// Bytes that a copy of a piece writes. A TMA box also writes zeros for channels that do not exist.
__device__ __forceinline__ int piece_bytes(int channel) {
  return C::bulk ? min(C::chunk, C::group_in - channel) * kInPlane * 4 : kPieceBytes;
}

__device__ __forceinline__ void load_planes(const Planes& planes, int batch) {
  Ring<C::input_stages> at(1);
  const int tiles = tile_count(batch);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Tile tile(index);
    int pieces = 0;
    each_piece(tile, batch, [&](int, int) { ++pieces; });
    for (int channel = 0; channel < C::group_in; channel += C::chunk) {
      barrier_wait(&barriers().input_empty[at.stage], at.parity);
      Barrier* const full = &barriers().input_full[at.stage];
      barrier_arrive_expect(full, pieces * piece_bytes(channel));
      unsigned char* target = shared_memory() + at.stage * kInputBytes;
      each_piece(tile, batch, [&](int image, int begin) {
        load_piece(target, planes, image, begin, tile.group, channel, full);
        target += kPieceBytes;
      });
      at.advance();
    }
  }
}

// Copies the weights of every tile; with `resident`, all weights just once.
__device__ __forceinline__ void load_weights(const unsigned char* packed, int batch) {
  Ring<C::weight_stages> at(1);
  const int tiles = tile_count(batch);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const unsigned char* source =
        packed + static_cast<long long>(index % kColumnTiles) * kTileWeights;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll 1
      for (int row = 0; row < C::kernel_height; row = row_axis().end(row)) {
#pragma unroll 1
        for (int column = 0; column < C::kernel_width; column = column_axis().end(column)) {
          const int bytes = unit_taps(row, column) * kTapBytes;
          barrier_wait(&barriers().weights_empty[at.stage], at.parity);
          Barrier* const full = &barriers().weights_full[at.stage];
          barrier_arrive_expect(full, bytes);
          bulk_load(shared_memory() + kWeightRing + at.stage * kWeightBytes, source, bytes, full);
          source += bytes;
          at.advance();
        }
      }
    }
    if (C::resident) return;
  }
}

}  // namespace hopper
}  // namespace fastconv
