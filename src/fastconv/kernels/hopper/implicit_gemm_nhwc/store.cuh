// Epilogue: a warp's accumulators, 16 positions by kTileColumns channels, to global memory.
#pragma once
#include "hopper/implicit_gemm_nhwc/statistics.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace hopper {

constexpr int kAccumulators = kTileColumns / 2;  // registers of a thread
constexpr bool kPatches = C::patch_rows > 0;
constexpr int kPatchWidth = kPatches ? C::patch_width : 1;

__device__ __forceinline__ unsigned narrow_two(float16, float first, float second) {
  return floats_to_halves(first, second);
}
__device__ __forceinline__ unsigned narrow_two(bfloat16, float first, float second) {
  return floats_to_bfloats(first, second);
}

// `aligned_bias` promises 4 bytes: two 16-bit elements.
constexpr bool kBiasPairs = C::aligned_bias && kScalarBytes == 2;

// Adds the bias to a tile's accumulators. A thread has channels 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void add_bias(float (&acc)[kAccumulators], const Scalar* bias,
                                         int column, int lane) {
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
    const int channel = column + 8 * j + 2 * (lane % 4);
    if (channel >= C::out_channels) continue;
    const auto pair = load_bias<2, kBiasPairs>(bias + channel);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * j + i] += widen(pair.element[i % 2]);
  }
}

// Staging is templates of the element type, T = Scalar, so that only its own code is instantiated.

// The 16-bit outputs of two accumulators; `added` holds their residuals.
template <class T>
__device__ __forceinline__ unsigned finish_two(float first, float second, unsigned added) {
  if constexpr (kAddsResidual) {
    const auto& pair = reinterpret_cast<const Vector<T, 2>&>(added);
    return narrow_two(T{}, Epilogue<C>::activated(first, pair.element[0]),
                      Epilogue<C>::activated(second, pair.element[1]));
  } else {
    return narrow_two(T{}, Epilogue<C>::activated(first), Epilogue<C>::activated(second));
  }
}

// Stages a box of 16-bit outputs.
template <class T>
__device__ __forceinline__ void stage_halves(const float (&acc)[kAccumulators],
                                             unsigned char* staged, int box, int lane) {
  const int row = lane % 16 * C::joined + box % C::joined;  // row of 128 bytes
#pragma unroll
  for (int k = 0; k < 4 && box * kBoxColumns + 16 * k < kTileColumns; ++k) {
    const int chunk = 2 * k + lane / 16;
    unsigned char* const place = staged + row * kSpan + (chunk ^ (row % 8)) * 16;
    unsigned pairs[4] = {};
    if constexpr (kAddsResidual) load_matrices(pairs, place);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (8 * box + 2 * k + i / 2) + 2 * (i % 2);
      pairs[i] = finish_two<T>(acc[at], acc[at + 1], pairs[i]);
    }
    store_rows(place, pairs);
  }
}

// Stages a box of float32 outputs. A lane has pairs of neighbours, of rows eight apart. The places
// are computed for each box, because the accumulators leave no registers to keep them in.
template <class T>
__device__ __forceinline__ void stage_floats(const float (&acc)[kAccumulators],
                                             unsigned char* staged, int box, int lane) {
  lane = once_more(lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = (lane / 4 + 8 * half) * C::joined + box % C::joined;  // row of 128 bytes
#pragma unroll
    for (int k = 0; k < 4 && box * kBoxColumns + 8 * k < kTileColumns; ++k) {
      const int chunk = 2 * k + lane % 4 / 2, at = 4 * (4 * box + k) + 2 * half;
      auto& pair = *reinterpret_cast<Vector<T, 2>*>(staged + row * kSpan +
                                                    (chunk ^ (row % 8)) * 16 + lane % 2 * 8);
      if constexpr (kAddsResidual) {
        const Vector<T, 2> added = pair;
        pair = {Epilogue<C>::activated(acc[at], added.element[0]),
                Epilogue<C>::activated(acc[at + 1], added.element[1])};
      } else {
        pair = {Epilogue<C>::activated(acc[at]), Epilogue<C>::activated(acc[at + 1])};
      }
    }
  }
}

// Stages up to kBoxColumns channels of 16 positions in shared memory, with TMA's 128-byte swizzle,
// in the place of their residuals. Columns beyond the tile's last one are no channels, and are not
// stored.
template <class T>
__device__ __forceinline__ void stage_box(const float (&acc)[kAccumulators], unsigned char* staged,
                                          int box, int lane) {
  if constexpr (sizeof(T) == 4) {
    stage_floats<T>(acc, staged, box, lane);
  } else {
    stage_halves<T>(acc, staged, box, lane);
  }
}

// Starts to copy the residuals of a staging buffer into it: of 16 positions from `row` on, and of
// the existing channels from `column` on. The loop is not unrolled, because the accumulators leave
// no registers for the addresses.
__device__ __forceinline__ void load_residual(unsigned char* staged, const Scalar* output,
                                              const Epilogue<C>& epilogue, int row, int column,
                                              int rows, int lane) {
  lane = once_more(lane);
#pragma unroll 1
  for (int at = lane / 8; at < 16 * C::joined; at += 4) {  // rows of 128 bytes
    const int pixel = row + at / C::joined;
    const int channel = column + at % C::joined * kBoxColumns + lane % 8 * kVector;
    const bool valid = pixel < rows && channel < C::out_channels;
    const long long element = valid ? 1LL * pixel * C::out_channels + channel : 0;
    copy_async<16>(staged + at * kSpan + ((lane % 8) ^ (at % 8)) * 16,
                   epilogue.beside(output + element), valid);
  }
  copy_async_commit();
}

// The index of a pixel among all output pixels. Positions are counted in 32 bits, but each stands
// for one pixel of every residue, so pixels may need 64.
using Place = IndexOf<C::wide_places>::type;

// The output pixel of a position, or -1 if there is none. With residues, a tile's pixels are every
// stride-th of an image.
__device__ __forceinline__ Place place_of(int flat, const Tile& tile, int batch) {
  const int image = flat / kPositions;
  const int in_image = flat - image * kPositions;
  const int planes = Depth::exists ? in_image / kPlanePositions : 0;
  const int in_plane = in_image - planes * kPlanePositions;
  const int plane = planes * kPlaneResidues + tile.plane_residue;
  const int row = in_plane / C::position_columns * kRowResidues + tile.row_residue;
  const int column = in_plane % C::position_columns * kColumnResidues + tile.column_residue;
  if (image >= batch || row >= C::image_height || column >= C::image_width) return -1;
  if (Depth::exists && plane >= Depth::out) return -1;
  const Place first = static_cast<Place>(image) * Depth::out + plane;
  return (first * C::image_height + row) * C::image_width + column;
}

// The 16 bytes of a staged row that belong to a lane.
__device__ __forceinline__ uint4 staged_vector(const unsigned char* staged, int row, int lane) {
  return *reinterpret_cast<const uint4*>(staged + row * kSpan + ((lane % 8) ^ (row % 8)) * 16);
}

// Stores kBoxColumns staged channels of pixels that are not neighbours: 8 lanes store the 128 bytes
// of one.
__device__ __forceinline__ void scatter(const unsigned char* staged, Scalar* output, int column,
                                        Place place, int lane) {
  const int channel = column + lane % 8 * kVector;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const Place pixel = __shfl_sync(~0u, place, row);
    const uint4 values = staged_vector(staged, row, lane);
    store_if(reinterpret_cast<uint4*>(output + 1LL * pixel * C::out_channels + channel), values,
             pixel >= 0 && channel < C::out_channels);
  }
}

// Stores patches: each staged row is a patch, and its channels are those of all of the patch's
// pixels. A pixel row of a patch is contiguous in memory, but may be aligned to two elements only.
__device__ __forceinline__ void scatter_patches(const unsigned char* staged, Scalar* output,
                                                int column, Place place, int lane) {
  using Pair = Bits<2 * sizeof(Scalar)>::type;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const Place patch = __shfl_sync(~0u, place, row);
    const uint4 values = staged_vector(staged, row, lane);
    const Pair* const pairs = reinterpret_cast<const Pair*>(&values);
    Scalar* const first = output +
                          1LL * (patch / C::position_columns) * C::patch_rows * C::patch_pitch +
                          1LL * (patch % C::position_columns) * C::patch_width;
#pragma unroll
    for (int k = 0; k < kVector / 2; ++k) {
      const int channel = column + lane % 8 * kVector + 2 * k;
      const int patch_row = channel / kPatchWidth;
      store_if(reinterpret_cast<Pair*>(first + 1LL * patch_row * C::patch_pitch + channel -
                                       patch_row * kPatchWidth),
               pairs[k], patch >= 0 && channel < C::out_channels);
    }
  }
}

// Stores a staging buffer: one TMA box, or `joined` boxes of which `column` is the last one's.
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

// Starts to copy the residuals of the first boxes that a warp stages, one per buffer, while the
// tile is multiplied.
__device__ __forceinline__ void prefetch_residual(const Shared& shared, const Scalar* output,
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

// Stores a warp's 16 positions of a tile. A box is stored while the next one is staged, with
// C::buffers buffers in turn. Joined boxes are stored together: their channels are neighbours in
// memory. What is staged is also added to `sums`, while it is stored.
__device__ __forceinline__ void store_tile(const float (&acc)[kAccumulators], const Shared& shared,
                                           const TensorMap& map, Scalar* output, const Tile& tile,
                                           int batch, int warp, int lane,
                                           const Epilogue<C>& epilogue, Sums& sums) {
  const int row = tile.row + 16 * warp;
  if constexpr (kGivesStatistics) {
    sums.begin_tile(outputs_of(tile, batch * kPositions, warp, lane));
  }
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
      bulk_store_wait_read<C::buffers - 1>();  // returns at once in lanes that issued none
    }
    __syncwarp();
    stage_box<Scalar>(acc, staged, box, lane);
    if constexpr (C::dense) {
      if (box % C::joined < C::joined - 1) continue;
      fence_async_shared();
      __syncwarp();
      if (lane == 0) store_boxes(map, column, row, staged);
      bulk_store_commit();
#pragma unroll
      for (int i = 1 - C::joined; i <= 0; ++i) sums.add_box(box + i, staged, lane);
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
