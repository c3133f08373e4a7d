// Consumers: what a thread has of the products' left operand, and the products.
#pragma once
#include "hopper/implicit_gemm_nchw/weights.cuh"

namespace fastconv {
namespace hopper {

using Sums = float[kPhaseSums * kRowTiles][kColumns / 2];
using Fragments = unsigned[kRowTiles][kSteps][4];

// A thread's rows of the products are these positions of its warpgroup's: neighbours that are
// loaded and stored at once (`vector` of them), or one of eight neighbours each, of eight lanes.
__device__ __forceinline__ int position_of(int row) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32 / 4;
  const int first = thread / 32 * 8 * kRows;
  return first + (C::vector > 1 ? lane * kRows + row : row * 8 + lane);
}
static_assert(C::vector == 1 || C::vector == kRows, "all of a thread's rows at once");

// Of a row: its place in the grid, if it has one.
struct Position {
  int image, row, column;
  bool exists;

  __device__ Position(const Tile& tile, int index, int batch) {
    const int pixel = tile.pixel + index;
    const int at = pixel % C::image_pixels;
    image = tile.image + pixel / C::image_pixels;
    row = at / C::grid_width;
    column = at % C::grid_width;
    exists = index < C::tile_pixels && image < batch && at < kGridPixels;
  }
};

// Where a thread's rows of the products lie in a stage.
struct Source {
  int row, column;  // of the image
  int begin;        // of the image's pieces, and which of the stage's its first is
  int slot;

  Source() = default;
  __device__ Source(const Tile& tile, const Position& position) {
    row = C::flat ? 0 : position.row * C::step_height;
    column =
        C::flat ? position.row * C::grid_width + position.column : position.column * C::step_width;
    if (!position.exists) row = -C::in_height - row_axis().highest();  // no tap is in the image
    const int later = position.image - tile.image;
    const Span first(tile.pixel, kGridPixels - 1);
    const Span full(0, kGridPixels - 1);
    begin = later == 0 ? first.begin : full.begin;
    slot = later == 0 ? 0 : first.pieces() + (later - 1) * full.pieces();
  }

  // The offset of a tap in a stage, in floats; negative if it is not in the image.
  __device__ __forceinline__ int at(int row_offset, int column_offset) const {
    const int y = row + row_offset;
    const int x = column + column_offset;
    if (y < 0 || y >= C::in_height || x < 0 || x >= C::in_width) return -1;
    if constexpr (C::whole) return slot * kPieceFloats + y * C::row_pixels + x;
    const int place = (C::flat ? x : y) - begin;
    const int piece = place / C::piece;
    const int inside = place - piece * C::piece;
    return (slot + piece) * kPieceFloats + (C::flat ? inside : inside * C::row_pixels + x);
  }
};

// Two sets of fragments take turns: while one is multiplied, the other one is loaded.
struct Consumer {
  Ring<C::input_stages> input{0};
  Ring<C::weight_stages> weights{0};
  int earlier;  // the stage of weights of products that are still under way, or -1
  int spent;    // the stage of planes of which all has been loaded, or -1
  Source sources[kRows];
  int chunk;  // of what is loaded next, and its tap
  int row, column;

  // All warps of both warpgroups say that they are done with a stage.
  __device__ __forceinline__ static void release(Barrier* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
  }

  // The next unit.
  __device__ __forceinline__ void load(Fragments& fragments) {
    if (row == 0 && column == 0) {
      barrier_wait(&barriers().input_full[input.stage], input.parity);
    }
    const int lane = static_cast<int>(threadIdx.x) % 4;
    const float* const stage =
        reinterpret_cast<const float*>(shared_memory() + input.stage * kInputBytes) +
        lane * C::pitch;
    const int row_offset = row_axis().offset(row);
    const int column_offset = column_axis().offset(column);
    if constexpr (C::vector > 1) {
      load_vectors(fragments, stage + max(sources[0].at(row_offset, column_offset), 0));
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int at = sources[i].at(row_offset, column_offset);
        load_row(fragments, i, stage + max(at, 0), at >= 0);
      }
    }
    advance();
  }

  __device__ __forceinline__ void advance() {
    column = column_axis().end(column);
    if (column < C::kernel_width) return;
    column = 0;
    row = row_axis().end(row);
    if (row < C::kernel_height) return;
    row = 0;
    ++chunk;
    spent = input.stage;
    input.advance();
  }

  // Whether a chunk's channel exists in shared memory: tensor copies write zeros for others.
  __device__ __forceinline__ bool loaded(int channel) const {
    constexpr bool kAll = !C::bulk || C::group_in % C::chunk == 0;
    return kAll || chunk * C::chunk + channel < C::group_in;
  }

  __device__ __forceinline__ void load_row(Fragments& fragments, int row, const float* source,
                                           bool valid) const {
    const int lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const bool there = valid && loaded(4 * i + lane);
      const float value = there ? source[4 * i * C::pitch] : 0.0f;
      fragments[row / 2][i / 2][row % 2 + i % 2 * 2] = __float_as_uint(rounded(value));
    }
  }

  // All rows at once. Those that do not exist read something, of which nothing is stored.
  __device__ __forceinline__ static void load_vectors(Fragments& fragments, const float* source) {
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const auto values = *reinterpret_cast<const Vector<float, kRows>*>(source + 4 * i * C::pitch);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        fragments[row / 2][i / 2][row % 2 + i % 2 * 2] =
            __float_as_uint(rounded(values.element[row]));
      }
    }
  }

  // A tap, the `place`-th of its unit, for one of the phases.
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& fragments, int place,
                                           int phase, bool accumulate) const {
    const Matrix tap =
        matrix(shared_memory() + kWeightRing + weights.stage * kWeightBytes + place * kProductBytes,
               kColumns * 16, 128);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        wgmma<kColumns>(Operand{}, sums[phase * kRowTiles + i], fragments[i][step],
                        tap + step * 2 * kColumns, accumulate || step > 0);
      }
    }
  }

  // Begins a unit's products.
  __device__ __forceinline__ void begin() {
    barrier_wait(&barriers().weights_full[weights.stage], C::resident ? 0 : weights.parity);
    wgmma_fence();
  }

  // Closes a unit's products, and waits for those before it, whose fragments are free then.
  // Planes are given back here: products begin when their fragments have arrived, while loads that
  // nothing has waited for may be overtaken, and would read what the next copy writes.
  __device__ __forceinline__ void end(Fragments& free) {
    wgmma_commit();
    if (spent >= 0) release(&barriers().input_empty[spent]);
    spent = -1;
    wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) hold_registers(free[i][step]);
    }
    release_weights();
    earlier = weights.stage;
    weights.advance();
  }

  __device__ __forceinline__ void release_weights() {
    if (!C::resident && earlier >= 0) release(&barriers().weights_empty[earlier]);
  }

  // Units of one tap each.
  __device__ __forceinline__ void compute_taps(Sums& sums, Fragments& first, Fragments& second) {
    constexpr int kAll = kChunks * kTaps;
#pragma unroll 1
    for (int left = kAll; left > 1; left -= 2) {
      compute_tap(sums, first, second, left < kAll, true);
      compute_tap(sums, second, first, true, left > 2);
    }
    if constexpr (kAll % 2 == 1) compute_tap(sums, first, second, kAll > 1, false);
  }
  __device__ __forceinline__ void compute_tap(Sums& sums, Fragments& now, Fragments& next,
                                              bool accumulate, bool more) {
    begin();
    multiply(sums, now, 0, 0, accumulate);
    end(next);
    if (more) load(next);
  }

  // Units of several taps, whose sums are of different phases, and were zero before.
  __device__ __forceinline__ void compute_units(Sums& sums, Fragments& first, Fragments& second) {
#pragma unroll 1
    for (int left = kChunks; left > 0; --left) {
      compute_unit<0, 0>(sums, first, second, left == 1);
      if constexpr (kUnits % 2 == 1) {
        if (--left == 0) return;
        compute_unit<0, 0>(sums, second, first, left == 1);
      }
    }
  }
  template <int kRow, int kColumn>
  __device__ __forceinline__ void compute_unit(Sums& sums, Fragments& now, Fragments& next,
                                               bool last_chunk) {
    constexpr int kRowEnd = row_axis().end(kRow);
    constexpr int kColumnEnd = column_axis().end(kColumn);
    constexpr bool kRowDone = kColumnEnd == C::kernel_width;
    constexpr bool kDone = kRowDone && kRowEnd == C::kernel_height;
    begin();
    multiply_unit<kRow, kColumn>(sums, now);
    end(next);
    if (!kDone || !last_chunk) load(next);
    if constexpr (!kDone) {
      compute_unit<kRowDone ? kRowEnd : kRow, kRowDone ? 0 : kColumnEnd>(sums, next, now,
                                                                         last_chunk);
    }
  }
  template <int kRow, int kColumn, int kTap = 0>
  __device__ __forceinline__ void multiply_unit(Sums& sums, const Fragments& now) const {
    constexpr int kWidth = column_axis().end(kColumn) - kColumn;
    constexpr int kRowSum = row_axis().sum_of(row_axis().phase(kRow + kTap / kWidth));
    constexpr int kColumnSum = column_axis().sum_of(column_axis().phase(kColumn + kTap % kWidth));
    multiply(sums, now, kTap, kRowSum * kColumnSums + kColumnSum, true);
    if constexpr (kTap + 1 < unit_taps(kRow, kColumn)) {
      multiply_unit<kRow, kColumn, kTap + 1>(sums, now);
    }
  }

  // The sums of a tile.
  __device__ __forceinline__ void compute(Sums& sums, const Tile& tile, int batch) {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int index = warpgroup * 64 * kRowTiles + position_of(i);
      sources[i] = Source(tile, Position(tile, index, batch));
    }
    chunk = row = column = 0;
    earlier = spent = -1;
    Fragments first, second;
    load(first);
    if constexpr (kPhaseSums == 1) {
      compute_taps(sums, first, second);
    } else {
#pragma unroll
      for (int i = 0; i < kPhaseSums * kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns / 2; ++j) sums[i][j] = 0.0f;
      }
      compute_units(sums, first, second);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kPhaseSums * kRowTiles; ++i) hold_registers(sums[i]);
    release_weights();
  }
};

}  // namespace hopper
}  // namespace fastconv
