// Epilogue: accumulators are stored straight from registers, since lanes have neighbouring pixels.
#pragma once
#include "hopper/implicit_gemm_nchw/multiply.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace hopper {

// The distance of two channels' planes, in a type that also holds the offset of N's last column,
// which may not be a channel.
constexpr IndexTo<elements_of(kColumns, C::out_height, C::out_width)> kOutPlane =
    C::out_height * C::out_width;
constexpr int kOutChannels = C::groups * C::group_out;
static_assert(!kAddsResidual || kRowResidues * kColumnResidues == 1, "of a forward pass");

struct Storer {
  const float* bias;
  float* rows[C::vector > 1 ? 1 : kRows];  // a row's first residue, in the thread's first channel
  bool exist[C::vector > 1 ? 1 : kRows];
  int row_ends[C::vector > 1 ? 1 : kRows];  // residues that are in the image
  int column_ends[C::vector > 1 ? 1 : kRows];
  int channel;        // channel of the thread's first column, in its group
  int first_channel;  // of the group
  Epilogue<C> epilogue;

  __device__ Storer(const float* bias, float* output, const Tile& tile, int batch,
                    const Epilogue<C>& epilogue)
      : bias(bias), epilogue(epilogue) {
    const int thread = static_cast<int>(threadIdx.x);
    channel = tile.column + thread % 4 * 2;
    first_channel = tile.group * C::group_out;
#pragma unroll
    for (int i = 0; i < (C::vector > 1 ? 1 : kRows); ++i) {
      const int index = (thread / 128 - 1) * 64 * kRowTiles + position_of(i);
      const Position position(tile, index, batch);
      const int row = position.row * kRowResidues;
      const int column = position.column * kColumnResidues;
      exist[i] = position.exists;
      row_ends[i] = C::out_height - row;
      column_ends[i] = C::out_width - column;
      rows[i] = output +
                (static_cast<long long>(position.image) * kOutChannels + first_channel + channel) *
                    kOutPlane +
                row * C::out_width + column;
    }
  }

  __device__ __forceinline__ bool has(int column) const {
    return C::group_out % kColumns == 0 || channel + column < C::group_out;
  }

  // What is added to a thread's accumulators of a channel: the bias, and maybe the residuals.
  struct BiasAndResidual {
    float bias;
    Vector<float, kRows> residual;
  };
  using Added = Either<kAddsResidual, BiasAndResidual, float>::type;

  __device__ __forceinline__ void load(float& added, int column) const {
    added = load_or_zero(bias + first_channel + channel + column, bias != nullptr && has(column));
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

  // Biases and residuals are loaded several at a time, so that a thread does not wait for each.
  __device__ __forceinline__ void store(const Accumulators& acc) const {
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
        store_column(acc, first + i / 2, i % 2, added[i]);
      }
    }
  }

  __device__ __forceinline__ void store_column(const Accumulators& acc, int j, int i,
                                               Added added) const {
    if constexpr (C::vector > 1) {
      store_vector(acc, j, i, added);
    } else {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (exist[row] && has(8 * j + i)) store_residues(acc, row, j, i, added);
      }
    }
  }

  // Stores all of a thread's rows at once.
  __device__ __forceinline__ void store_vector(const Accumulators& acc, int j, int i,
                                               Added added) const {
    union {
      float values[kRows];
      Bits<4 * kRows>::type bits;
    };
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      values[row] = finished(acc[row / 2][4 * j + row % 2 * 2 + i], added, row);
    }
    store_if(reinterpret_cast<Bits<4 * kRows>::type*>(rows[0] + (8 * j + i) * kOutPlane), bits,
             exist[0] && has(8 * j + i));
  }

  // Stores a row's pixels from residue kResidue on, two neighbours at once where they are aligned.
  template <int kResidue = 0>
  __device__ __forceinline__ void store_residues(const Accumulators& acc, int row, int j, int i,
                                                 Added added) const {
    constexpr int kRow = kResidue / kColumnResidues;
    constexpr int kColumn = kResidue % kColumnResidues;
    constexpr int kNext = kResidue + (C::pairs ? 2 : 1);
    float* const target = rows[row] + (8 * j + i) * kOutPlane + kRow * C::out_width + kColumn;
    const float value = finished(value_of<kRow, kColumn>(acc, row, j, i), added, row);
    if (kRow == 0 || kRow < row_ends[row]) {
      if constexpr (C::pairs) {
        const float next = finished(value_of<kRow, kColumn + 1>(acc, row, j, i), added, row);
        *reinterpret_cast<float2*>(target) = make_float2(value, next);
      } else {
        if (kColumn == 0 || kColumn < column_ends[row]) *target = value;
      }
    }
    if constexpr (kNext < kRowResidues * kColumnResidues) {
      store_residues<kNext>(acc, row, j, i, added);
    }
  }

  // The accumulator of a residue; zero if the residue has no taps.
  template <int kRow, int kColumn>
  __device__ __forceinline__ static float value_of(const Accumulators& acc, int row, int j, int i) {
    if constexpr (row_axis().has_taps(kRow) && column_axis().has_taps(kColumn)) {
      constexpr int kResidue =
          row_axis().index_of(kRow) * kReachedColumns + column_axis().index_of(kColumn);
      return acc[kResidue * kRowTiles + row / 2][4 * j + row % 2 * 2 + i];
    } else {
      return 0.0f;
    }
  }
};

}  // namespace hopper
}  // namespace fastconv
