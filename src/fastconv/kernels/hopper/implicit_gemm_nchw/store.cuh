// Sums on their way out, straight from registers: lanes have neighbouring pixels.
#pragma once
#include "hopper/implicit_gemm_nchw/multiply.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace hopper {

// From a channel's plane to the next; a product's last columns may be no channels.
constexpr IndexTo<elements_of(kColumns, C::out_height, C::out_width)> kOutPlane =
    C::out_height * C::out_width;
static_assert(!kAddsResidual || kRowPhases * kColumnPhases == 1, "of a forward pass");

struct Storer {
  const float* bias;
  float* rows[C::vector > 1 ? 1 : kRows];  // where a row's first phase is, in the first channel
  bool exist[C::vector > 1 ? 1 : kRows];
  int row_ends[C::vector > 1 ? 1 : kRows];  // phases that are in the image
  int column_ends[C::vector > 1 ? 1 : kRows];
  int channel;  // of the thread's first column
  Epilogue<C> epilogue;

  __device__ Storer(const float* bias, float* output, const Tile& tile, int batch,
                    const Epilogue<C>& epilogue)
      : bias(bias), epilogue(epilogue) {
    const int thread = static_cast<int>(threadIdx.x);
    channel = tile.column + thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < (C::vector > 1 ? 1 : kRows); ++i) {
      const int index = (thread / 128 - 1) * 64 * kRowTiles + position_of(i);
      const Position position(tile, index, batch);
      const int row = position.row * kRowPhases;
      const int column = position.column * kColumnPhases;
      exist[i] = position.exists;
      row_ends[i] = C::out_height - row;
      column_ends[i] = C::out_width - column;
      rows[i] = output +
                (static_cast<long long>(position.image) * C::group_out + channel) * kOutPlane +
                row * C::out_width + column;
    }
  }

  __device__ __forceinline__ bool has(int column) const {
    return C::group_out % kColumns == 0 || channel + column < C::group_out;
  }

  // What is added to sums of a channel: the bias, and where there is a residual, the thread's.
  struct BiasAndResidual {
    float bias;
    Vector<float, kRows> residual;
  };
  using Added = Either<kAddsResidual, BiasAndResidual, float>::type;

  __device__ __forceinline__ void load(float& added, int column) const {
    added = load_or_zero(bias + channel + column, bias != nullptr && has(column));
  }
  __device__ __forceinline__ void load(BiasAndResidual& added, int column) const {
    load(added.bias, column);
    if constexpr (C::vector > 1) {
      using Loaded = Bits<4 * kRows>::type;
      const auto* const source = epilogue.beside(rows[0] + column * kOutPlane);
      reinterpret_cast<Loaded&>(added.residual) =
          load_or_zero(reinterpret_cast<const Loaded*>(source), exist[0] && has(column));
    } else {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        added.residual.element[row] = load_or_zero(epilogue.beside(rows[row] + column * kOutPlane),
                                                   exist[row] && has(column));
      }
    }
  }
  __device__ __forceinline__ static float finished(float sum, float added, int) {
    return Epilogue<C>::activated(sum + added);
  }
  __device__ __forceinline__ static float finished(float sum, const BiasAndResidual& added,
                                                   int row) {
    return Epilogue<C>::activated(sum + added.bias, added.residual.element[row]);
  }

  // What is added comes some at a time, so that the thread does not wait for each.
  __device__ __forceinline__ void store(const Sums& sums) const {
    constexpr int kOctets = kColumns / 8;
    constexpr int kAtOnce = kAddsResidual ? 2 : 8;
#pragma unroll
    for (int first = 0; first < kOctets; first += kAtOnce) {
      Added added[2 * kAtOnce];
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce && first + i / 2 < kOctets; ++i) {
        load(added[i], 8 * (first + i / 2) + i % 2);
      }
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce && first + i / 2 < kOctets; ++i) {
        store_column(sums, first + i / 2, i % 2, added[i]);
      }
    }
  }

  __device__ __forceinline__ void store_column(const Sums& sums, int j, int i, Added added) const {
    if constexpr (C::vector > 1) {
      store_vector(sums, j, i, added);
    } else {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (exist[row] && has(8 * j + i)) store_phases(sums, row, j, i, added);
      }
    }
  }

  // All of a thread's rows.
  __device__ __forceinline__ void store_vector(const Sums& sums, int j, int i, Added added) const {
    union {
      float values[kRows];
      Bits<4 * kRows>::type bits;
    };
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      values[row] = finished(sums[row / 2][4 * j + row % 2 * 2 + i], added, row);
    }
    store_if(reinterpret_cast<Bits<4 * kRows>::type*>(rows[0] + (8 * j + i) * kOutPlane), bits,
             exist[0] && has(8 * j + i));
  }

  // The pixels of a row's phases from one on, two neighbours at once where they are aligned.
  template <int kPhase = 0>
  __device__ __forceinline__ void store_phases(const Sums& sums, int row, int j, int i,
                                               Added added) const {
    constexpr int kRow = kPhase / kColumnPhases;
    constexpr int kColumn = kPhase % kColumnPhases;
    constexpr int kNext = kPhase + (C::pairs ? 2 : 1);
    float* const target = rows[row] + (8 * j + i) * kOutPlane + kRow * C::out_width + kColumn;
    const float value = finished(value_of<kRow, kColumn>(sums, row, j, i), added, row);
    if (kRow == 0 || kRow < row_ends[row]) {
      if constexpr (C::pairs) {
        const float next = finished(value_of<kRow, kColumn + 1>(sums, row, j, i), added, row);
        *reinterpret_cast<float2*>(target) = make_float2(value, next);
      } else {
        if (kColumn == 0 || kColumn < column_ends[row]) *target = value;
      }
    }
    if constexpr (kNext < kRowPhases * kColumnPhases) {
      store_phases<kNext>(sums, row, j, i, added);
    }
  }

  // Zero for phases without taps.
  template <int kRow, int kColumn>
  __device__ __forceinline__ static float value_of(const Sums& sums, int row, int j, int i) {
    if constexpr (row_axis().has_sums(kRow) && column_axis().has_sums(kColumn)) {
      constexpr int kPhase = row_axis().sum_of(kRow) * kColumnSums + column_axis().sum_of(kColumn);
      return sums[kPhase * kRowTiles + row / 2][4 * j + row % 2 * 2 + i];
    } else {
      return 0.0f;
    }
  }
};

}  // namespace hopper
}  // namespace fastconv
