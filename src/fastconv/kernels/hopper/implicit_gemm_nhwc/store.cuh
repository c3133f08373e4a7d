// Outputs: from a warp's registers, 16 positions by kTileColumns channels, to memory.
#pragma once
#include "hopper/implicit_gemm_nhwc/tile.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace hopper {

constexpr int kSums = kTileColumns / 2;  // of a thread
constexpr bool kPatches = C::patch_rows > 0;
constexpr int kPatchWidth = kPatches ? C::patch_width : 1;

__device__ __forceinline__ unsigned narrow_two(float16, float first, float second) {
  return floats_to_halves(first, second);
}
__device__ __forceinline__ unsigned narrow_two(bfloat16, float first, float second) {
  return floats_to_bfloats(first, second);
}

// Adds the bias to a tile's sums. A thread has channels 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void add_bias(float (&sums)[kSums], const Scalar* bias, int column,
                                         int lane) {
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
    const int channel = column + 8 * j + 2 * (lane % 4);
    if (channel >= C::out_channels) continue;
    const auto pair = load_bias<2, C::aligned_bias>(bias + channel);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[4 * j + i] += widen(pair.element[i % 2]);
  }
}

// Two sums to outputs; `added` are their residuals.
__device__ __forceinline__ unsigned finish_two(float first, float second, unsigned added) {
  if constexpr (kAddsResidual) {
    const auto& pair = reinterpret_cast<const Vector<Scalar, 2>&>(added);
    return narrow_two(Scalar{}, Epilogue<C>::activated(first, pair.element[0]),
                      Epilogue<C>::activated(second, pair.element[1]));
  } else {
    return narrow_two(Scalar{}, Epilogue<C>::activated(first), Epilogue<C>::activated(second));
  }
}

// Up to 64 channels of 16 rows to shared memory, swizzled as tensor copies have it; to where their
// residuals are. What lies beyond the tile's last is no channel's, and not stored.
__device__ __forceinline__ void stage_sums(const float (&sums)[kSums], unsigned char* staged,
                                           int box, int lane) {
  const int row = lane % 16 * C::joined + box % C::joined;  // of shared memory
#pragma unroll
  for (int k = 0; k < 4 && box * kBoxColumns + 16 * k < kTileColumns; ++k) {
    const int chunk = 2 * k + lane / 16;
    unsigned char* const place = staged + row * kSpan + (chunk ^ (row % 8)) * 16;
    unsigned pairs[4] = {};
    if constexpr (kAddsResidual) load_matrices(pairs, place);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (8 * box + 2 * k + i / 2) + 2 * (i % 2);
      pairs[i] = finish_two(sums[at], sums[at + 1], pairs[i]);
    }
    store_rows(place, pairs);
  }
}

// The residuals of what is staged at once, on their way there: of 16 rows from `row` on, and of
// channels from `column` on, those that exist. Step by step: sums leave no registers for addresses.
__device__ __forceinline__ void load_residual(unsigned char* staged, const Scalar* output,
                                              const Epilogue<C>& epilogue, int row, int column,
                                              int rows, int lane) {
  lane = once_more(lane);
#pragma unroll 1
  for (int at = lane / 8; at < 16 * C::joined; at += 4) {  // rows of shared memory
    const int pixel = row + at / C::joined;
    const int channel = column + at % C::joined * kBoxColumns + lane % 8 * 8;
    const bool valid = pixel < rows && channel < C::out_channels;
    const long long element = valid ? 1LL * pixel * C::out_channels + channel : 0;
    copy_async<16>(staged + at * kSpan + ((lane % 8) ^ (at % 8)) * 16,
                   epilogue.beside(output + element), valid);
  }
  copy_async_commit();
}

// A pixel among all that are stored: positions are counted in 32 bits, but each stands for one
// pixel of every phase.
using Place = IndexOf<C::wide_places>::type;

// That of a row's position, or -1: of a phase, it is every stride-th of an image.
__device__ __forceinline__ Place place_of(int flat, const Tile& tile, int batch) {
  const int image = flat / kPositions;
  const int in_image = flat - image * kPositions;
  const int row = in_image / C::position_columns * kRowPhases + tile.row_residue;
  const int column = in_image % C::position_columns * kColumnPhases + tile.column_residue;
  if (image >= batch || row >= C::image_height || column >= C::image_width) return -1;
  return (static_cast<Place>(image) * C::image_height + row) * C::image_width + column;
}

// A lane's eight of the channels that are staged for a row.
__device__ __forceinline__ uint4 staged_vector(const unsigned char* staged, int row, int lane) {
  return *reinterpret_cast<const uint4*>(staged + row * kSpan + ((lane % 8) ^ (row % 8)) * 16);
}

// Of 64 staged channels to pixels anywhere: 8 lanes have the 128 bytes of one.
__device__ __forceinline__ void scatter(const unsigned char* staged, Scalar* output, int column,
                                        Place place, int lane) {
  const int channel = column + lane % 8 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const Place pixel = __shfl_sync(~0u, place, row);
    const uint4 values = staged_vector(staged, row, lane);
    store_if(reinterpret_cast<uint4*>(output + 1LL * pixel * C::out_channels + channel), values,
             pixel >= 0 && channel < C::out_channels);
  }
}

// The same of patches: rows are patches, channels those of all of their pixels. A row of a patch's
// pixels lies in one piece, which need not be aligned to more than two numbers.
__device__ __forceinline__ void scatter_patches(const unsigned char* staged, Scalar* output,
                                                int column, Place place, int lane) {
  using Pair = Bits<2 * sizeof(Scalar)>::type;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const Place patch = __shfl_sync(~0u, place, row);
    const uint4 values = staged_vector(staged, row, lane);
    const unsigned pairs[4] = {values.x, values.y, values.z, values.w};
    Scalar* const first = output +
                          1LL * (patch / C::position_columns) * C::patch_rows * C::patch_pitch +
                          1LL * (patch % C::position_columns) * C::patch_width;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int channel = column + lane % 8 * 8 + 2 * k;
      const int patch_row = channel / kPatchWidth;
      store_if(reinterpret_cast<Pair*>(first + 1LL * patch_row * C::patch_pitch + channel -
                                       patch_row * kPatchWidth),
               pairs[k], patch >= 0 && channel < C::out_channels);
    }
  }
}

// The last box's column is given.
__device__ __forceinline__ void store_boxes(const TensorMap& map, int column, int row,
                                            const unsigned char* staged) {
  if constexpr (C::joined > 1) {
    tensor_store(map, {0, column / kBoxColumns + 1 - C::joined, row}, staged);
  } else {
    tensor_store(map, {column, row}, staged);
  }
}

static_assert(kBoxes % (C::joined * C::buffers) == 0, "tiles take all buffers in turn");
static_assert(!kAddsResidual || C::dense, "forward passes alone have a residual");

// Residuals of the first boxes that a warp stages, as many as there are buffers: they come while
// the tile is multiplied.
__device__ __forceinline__ void begin_residual(const Shared& shared, const Scalar* output,
                                               const Epilogue<C>& epilogue, const Tile& tile,
                                               int rows, int warp, int lane) {
  bulk_store_wait_read<0>();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < C::buffers; ++i) {
    load_residual(shared.staged(warp, i), output, epilogue, tile.row + 16 * warp,
                  tile.column + i * C::joined * kBoxColumns, rows, lane);
  }
}

// A warp's 16 rows of a tile. What is staged leaves while the next is, C::buffers at a time; boxes
// that are joined, at once: their pixels' channels lie side by side in memory.
__device__ __forceinline__ void store_sums(const float (&sums)[kSums], const Shared& shared,
                                           const TensorMap& map, Scalar* output, const Tile& tile,
                                           int batch, int warp, int lane,
                                           const Epilogue<C>& epilogue) {
  const int row = tile.row + 16 * warp;
  const Place place = C::dense ? 0 : place_of(row + lane % 16, tile, batch);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    unsigned char* const staged = shared.staged(warp, box / C::joined % C::buffers);
    const int column = tile.column + box * kBoxColumns;
    if constexpr (kAddsResidual) {
      if (box % C::joined == 0) {
        if (box >= C::joined * C::buffers) {
          bulk_store_wait_read<C::buffers - 1>();
          __syncwarp();
          load_residual(staged, output, epilogue, row, column, batch * kPositions, lane);
        }
        copy_async_wait<0>();
      }
    } else if (C::dense && box % C::joined == 0) {
      bulk_store_wait_read<C::buffers - 1>();  // who did not issue any waits for none
    }
    __syncwarp();
    stage_sums(sums, staged, box, lane);
    if constexpr (C::dense) {
      if (box % C::joined < C::joined - 1) continue;
      fence_async_shared();
      __syncwarp();
      if (lane == 0) store_boxes(map, column, row, staged);
      bulk_store_commit();
    } else {
      __syncwarp();
      if constexpr (kPatches) {
        scatter_patches(staged, output, column, place, lane);
      } else {
        scatter(staged, output, column, place, lane);
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
