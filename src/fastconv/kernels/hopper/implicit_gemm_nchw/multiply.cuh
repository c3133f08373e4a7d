// Consumers: load their fragments of A from the planes in shared memory, and issue wgmma.
#pragma once
#include "hopper/implicit_gemm_nchw/weights.cuh"

namespace fastconv {
namespace hopper {

using Accumulators = float[kReachedResidues * kRowTiles][kColumns / 2];
using Fragments = unsigned[kRowTiles][kSteps][4];

// The position, among those of its warpgroup, of a thread's row of M. With `vector` > 1, a thread's
// rows are neighbours, which it loads and stores at once; otherwise eight lanes have eight
// neighbours.
__device__ __forceinline__ int position_of(int row) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32 / 4;
  const int first = thread / 32 * 8 * kRows;
  return first + (C::vector > 1 ? lane * kRows + row : row * 8 + lane);
}
static_assert(C::vector == 1 || C::vector == kRows, "all of a thread's rows at once");

// A tile's position in the grid, if it exists there.
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

// Where a position's input lies in a stage.
struct Source {
  int row, column;  // of the image, for offset 0
  int begin;        // row or pixel where the image's first piece in the stage begins
  int slot;         // index of that piece in the stage

  Source() = default;
  __device__ Source(const Tile& tile, const Position& position) {
    row = C::flat ? 0 : position.row * C::step_height;
    column =
        C::flat ? position.row * C::grid_width + position.column : position.column * C::step_width;
    // A position that does not exist has all taps outside the image.
    if (!position.exists) row = -C::in_height - row_axis().highest();
    const int later = position.image - tile.image;
    const Span first(tile.pixel, kGridPixels - 1);
    const Span full(0, kGridPixels - 1);
    begin = later == 0 ? first.begin : full.begin;
    slot = later == 0 ? 0 : first.pieces() + (later - 1) * full.pieces();
  }

  // The offset of a tap's element in a stage, in floats; negative if it is outside the image.
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

// Fragments are double-buffered: while one set is multiplied, the other one is loaded.
struct Consumer {
  Ring<C::input_stages> input{0};
  Ring<C::weight_stages> weights{0};
  int earlier;  // weight stage of wgmmas that may still run, or -1
  int spent;    // input stage that has been loaded completely but not released, or -1
  Source sources[kRows];
  int chunk;  // chunk and first tap of the unit that is loaded next
  int row, column;

  // A consumer warp's arrival: it no longer reads the stage.
  __device__ __forceinline__ static void release(Barrier* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
  }

  // Loads the next unit's fragments.
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

  // Whether a chunk's channel has been copied. TMA boxes write zeros for channels that do not
  // exist, bulk copies write nothing.
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

  // Loads all rows of a thread at once. Rows that do not exist load something that is not stored.
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

  // The MMAs of the `place`-th tap of a unit, into the accumulators of one residue.
  __device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& fragments, int place,
                                           int residue, bool accumulate) const {
    const Matrix tap =
        matrix(shared_memory() + kWeightRing + weights.stage * kWeightBytes + place * kTapBytes,
               kColumns * 16, 128);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        wgmma<kColumns>(Operand{}, acc[residue * kRowTiles + i], fragments[i][step],
                        tap + step * 2 * kColumns, accumulate || step > 0);
      }
    }
  }

  // Waits for a unit's weights and opens its wgmmas.
  __device__ __forceinline__ void begin() {
    barrier_wait(&barriers().weights_full[weights.stage], C::resident ? 0 : weights.parity);
    wgmma_fence();
  }

  // Commits a unit's wgmmas, and waits for those of the unit before, whose fragments may then be
  // overwritten. The input stage is released only here: the wgmmas have waited for their fragments,
  // while a load that nothing has waited for could still be in flight and read what the next copy
  // writes.
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

  // All units of a tile, with one tap each.
  __device__ __forceinline__ void compute_taps(Accumulators& acc, Fragments& first,
                                               Fragments& second) {
    constexpr int kAll = kChunks * kTaps;
#pragma unroll 1
    for (int left = kAll; left > 1; left -= 2) {
      compute_tap(acc, first, second, left < kAll, true);
      compute_tap(acc, second, first, true, left > 2);
    }
    if constexpr (kAll % 2 == 1) compute_tap(acc, first, second, kAll > 1, false);
  }
  __device__ __forceinline__ void compute_tap(Accumulators& acc, Fragments& now, Fragments& next,
                                              bool accumulate, bool more) {
    begin();
    multiply(acc, now, 0, 0, accumulate);
    end(next);
    if (more) load(next);
  }

  // All units of a tile, with several taps each, of different residues. The accumulators have been
  // cleared.
  __device__ __forceinline__ void compute_units(Accumulators& acc, Fragments& first,
                                                Fragments& second) {
#pragma unroll 1
    for (int left = kChunks; left > 0; --left) {
      compute_unit<0, 0>(acc, first, second, left == 1);
      if constexpr (kUnits % 2 == 1) {
        if (--left == 0) return;
        compute_unit<0, 0>(acc, second, first, left == 1);
      }
    }
  }
  template <int kRow, int kColumn>
  __device__ __forceinline__ void compute_unit(Accumulators& acc, Fragments& now, Fragments& next,
                                               bool last_chunk) {
    constexpr int kRowEnd = row_axis().end(kRow);
    constexpr int kColumnEnd = column_axis().end(kColumn);
    constexpr bool kRowDone = kColumnEnd == C::kernel_width;
    constexpr bool kDone = kRowDone && kRowEnd == C::kernel_height;
    begin();
    multiply_unit<kRow, kColumn>(acc, now);
    end(next);
    if (!kDone || !last_chunk) load(next);
    if constexpr (!kDone) {
      compute_unit<kRowDone ? kRowEnd : kRow, kRowDone ? 0 : kColumnEnd>(acc, next, now,
                                                                         last_chunk);
    }
  }
  template <int kRow, int kColumn, int kTap = 0>
  __device__ __forceinline__ void multiply_unit(Accumulators& acc, const Fragments& now) const {
    constexpr int kWidth = column_axis().end(kColumn) - kColumn;
    constexpr int kRowIndex = row_axis().index_of(row_axis().residue(kRow + kTap / kWidth));
    constexpr int kColumnIndex =
        column_axis().index_of(column_axis().residue(kColumn + kTap % kWidth));
    multiply(acc, now, kTap, kRowIndex * kReachedColumns + kColumnIndex, true);
    if constexpr (kTap + 1 < unit_taps(kRow, kColumn)) {
      multiply_unit<kRow, kColumn, kTap + 1>(acc, now);
    }
  }

  // The accumulators of a tile.
  __device__ __forceinline__ void compute(Accumulators& acc, const Tile& tile, int batch) {
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
    if constexpr (kReachedResidues == 1) {
      compute_taps(acc, first, second);
    } else {
#pragma unroll
      for (int i = 0; i < kReachedResidues * kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns / 2; ++j) acc[i][j] = 0.0f;
      }
      compute_units(acc, first, second);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kReachedResidues * kRowTiles; ++i) hold_registers(acc[i]);
    release_weights();
  }
};

}  // namespace hopper
}  // namespace fastconv
