// Depthwise layers: each group has one read and one written channel.
//
// Where channels are neighbours in memory, vectors hold channels, and padding is left out. Where
// columns are, a tile of a plane is staged, and vectors hold its elements from any one on: what
// lies beyond a row's last output is computed and not stored, so short rows fill vectors, too.
#pragma once

#include "epilogue.h"

namespace fastconv::cpu {

struct DepthwiseScratch {
  Buffer stage, grad, sums, offsets, factors;
};

// The outputs for which all taps read elements that exist: from `begin` to before `end`.
inline std::pair<int64_t, int64_t> inner_outputs(const Axis& axis, int64_t first_tap,
                                                 int64_t last_tap) {
  const int64_t least = axis.before - first_tap * axis.reach,
                most = axis.size - 1 + axis.before - last_tap * axis.reach;
  const int64_t begin = least > 0 ? (least + axis.step - 1) / axis.step : 0;
  const int64_t end = most < 0 ? 0 : most / axis.step + 1;
  const int64_t from = std::min(begin, axis.outputs);
  return {from, std::clamp(end, from, axis.outputs)};
}

template <class Stored>
class DepthwiseGather {
 public:
  using T = Computed<Stored>;

  explicit DepthwiseGather(const Gather& pass)
      : pass_(pass),
        row_phases_(pass.rows),
        column_phases_(pass.columns),
        epilogue_{pass.activation, T(pass.slope)} {}

  bool run(const Parallel& parallel) const {
    if (std::is_same_v<Stored, T> && pass_.source.strides[1] == 1 && pass_.target.strides[1] == 1) {
      run_by_channels(parallel);
      return true;
    }
    if (pass_.needs_finite_weights && !has_finite_weights()) return false;
    const int64_t tiles = ceil_div(pass_.rows.outputs, pass_.blocks.rows);
    parallel(pass_.images * pass_.groups * tiles, [&](int64_t begin, int64_t end) {
      DepthwiseScratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task % tiles * pass_.blocks.rows, plane = task / tiles;
        const int64_t rows = std::min(pass_.blocks.rows, pass_.rows.outputs - row);
        for (int64_t x = 0; x < pass_.columns.outputs; x += pass_.blocks.columns) {
          const int64_t columns = std::min(pass_.blocks.columns, pass_.columns.outputs - x);
          convolve_tile({plane / pass_.groups, plane % pass_.groups, row, rows, x, columns},
                        scratch);
        }
      }
    });
    return true;
  }

 private:
  bool has_finite_weights() const {
    T products{};
    for (int64_t channel = 0; channel < pass_.groups; ++channel) {
      for (int64_t tap = 0; tap < taps(); ++tap) {
        products += T() * factor(channel, tap / pass_.columns.taps, tap % pass_.columns.taps);
      }
    }
    return products == T();
  }

  struct Tile {
    int64_t image, channel, row, rows, column, columns;
  };

  int64_t taps() const { return pass_.rows.taps * pass_.columns.taps; }

  T bias(int64_t channel) const {
    return pass_.bias ? widened(static_cast<const Stored*>(pass_.bias)[channel]) : T();
  }

  T factor(int64_t channel, int64_t p, int64_t q) const {
    const auto& s = pass_.weights.strides;
    return widened(
        static_cast<const Stored*>(pass_.weights.data)[channel * s[0] + p * s[3] + q * s[4]]);
  }

  template <class Pointer>
  static Pointer place(const Images& images, const Tile& tile, int64_t y) {
    const auto& s = images.strides;
    return static_cast<Pointer>(images.data) + tile.image * s[0] + tile.channel * s[1] +
           (tile.row + y) * s[2] + tile.column * s[3];
  }

  // --- Vectors of columns
  // --------------------------------------------------------------------------

  void convolve_tile(const Tile& tile, DepthwiseScratch& scratch) const {
    const Window rows(pass_.rows, row_phases_, tile.row, tile.rows),
        columns(pass_.columns, column_phases_, tile.column, tile.columns);
    const Layout layout(rows, columns);
    constexpr int kVectors = 4, kMost = kVectors * kLanes<T>;
    T* staged = scratch.stage.take<T>(layout.channel + kMost);
    const auto& s = pass_.source.strides;
    if (taps() > 0) {
      stage(staged, layout,
            static_cast<const Stored*>(pass_.source.data) + tile.image * s[0] + tile.channel * s[1],
            s, 1, rows, columns);
    }
    std::fill(staged + layout.channel, staged + layout.channel + kMost, T());
    int64_t* offsets = scratch.offsets.take<int64_t>(taps());
    T* factors = scratch.factors.take<T>(taps());
    for (int64_t p = 0, tap = 0; p < pass_.rows.taps; ++p) {
      for (int64_t q = 0; q < pass_.columns.taps; ++q, ++tap) {
        offsets[tap] = layout.offset(row_phases_, column_phases_, p, q);
        factors[tap] = factor(tile.channel, p, q);
      }
    }
    // The last row's outputs end before its pitch does.
    const int64_t count = (tile.rows - 1) * layout.row + tile.columns;
    T* sums = scratch.sums.take<T>(count + kMost);
    const Vector<T> first = broadcast(bias(tile.channel));
    for (int64_t i = 0; i < count; i += kMost) {
      Vector<T> sum[kVectors] = {};
      for (int64_t tap = 0; tap < taps(); ++tap) {
        const T* from = staged + offsets[tap] + i;
        const Vector<T> by = broadcast(factors[tap]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[v] += by * load(from + v * kLanes<T>);
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(sums + i + v * kLanes<T>, sum[v] + first);
    }
    finish_rows(tile, sums, layout.row);
  }

  void finish_rows(const Tile& tile, const T* sums, int64_t pitch) const {
    const int64_t stride = pass_.target.strides[3], beside = pass_.residual.strides[3];
    for (int64_t y = 0; y < tile.rows; ++y, sums += pitch) {
      Stored* to = place<Stored*>(pass_.target, tile, y);
      const Stored* residual =
          pass_.residual.data ? place<const Stored*>(pass_.residual, tile, y) : nullptr;
      for (int64_t x = 0; x < tile.columns; x += kLanes<T>) {
        const int64_t some = std::min<int64_t>(kLanes<T>, tile.columns - x);
        finish(load_some(sums + x, some), epilogue_, residual ? residual + x * beside : nullptr,
               beside, to + x * stride, stride, some);
      }
    }
  }

  // --- Vectors of channels
  // -------------------------------------------------------------------------

  static constexpr int kPositions = 8;  // the most columns whose sums are in registers

  // A tap that reads no padding: where it reads, and where its factors are.
  struct Read {
    int64_t offset, factors;
  };

  void run_by_channels(const Parallel& parallel) const {
    // (taps, channels), and the bias behind them.
    Buffer packed;
    T* factors = packed.template take<T>((taps() + 1) * pass_.groups);
    for (int64_t tap = 0; tap < taps(); ++tap) {
      for (int64_t c = 0; c < pass_.groups; ++c) {
        factors[tap * pass_.groups + c] =
            factor(c, tap / pass_.columns.taps, tap % pass_.columns.taps);
      }
    }
    for (int64_t c = 0; c < pass_.groups; ++c) factors[taps() * pass_.groups + c] = bias(c);
    const auto inner = inner_outputs(pass_.columns, 0, pass_.columns.taps - 1);
    parallel(pass_.images * pass_.rows.outputs, [&](int64_t begin, int64_t end) {
      Buffer buffer;
      Read* reads = buffer.take<Read>(taps());
      for (int64_t task = begin; task < end; ++task) {
        const int64_t image = task / pass_.rows.outputs, y = task % pass_.rows.outputs;
        for (int64_t x = 0; x < pass_.columns.outputs;) {
          const bool is_inner = inner.first <= x && x < inner.second;
          const int64_t columns = is_inner ? std::min<int64_t>(kPositions, inner.second - x) : 1;
          constexpr auto kAll = std::make_integer_sequence<int, kPositions>();
          convolve_for(columns, kAll)(*this, factors, {image, 0, y, 1, x, columns}, reads,
                                      list_reads(reads, y, x, columns == 1));
          x += columns;
        }
      }
    });
  }

  // Lists the taps that an output reads elements by. Those of a row's inner outputs are the same.
  int64_t list_reads(Read* to, int64_t y, int64_t x, bool is_alone) const {
    const auto &rows = pass_.rows, &columns = pass_.columns;
    const auto& s = pass_.source.strides;
    int64_t count = 0;
    for (int64_t p = 0; p < rows.taps; ++p) {
      const int64_t row = y * rows.step + p * rows.reach - rows.before;
      if (row < 0 || row >= rows.size) continue;
      for (int64_t q = 0; q < columns.taps; ++q) {
        const int64_t column = x * columns.step + q * columns.reach - columns.before;
        if (is_alone && (column < 0 || column >= columns.size)) continue;
        to[count++] = {row * s[2] + column * s[3], (p * columns.taps + q) * pass_.groups};
      }
    }
    return count;
  }

  using Convolve = void (*)(const DepthwiseGather&, const T*, const Tile&, const Read*, int64_t);

  template <int... kIndex>
  static Convolve convolve_for(int64_t columns, std::integer_sequence<int, kIndex...>) {
    static constexpr Convolve kFound[] = {convolve_columns<kIndex + 1>...};
    return kFound[columns - 1];
  }

  // Computes some columns of a row, for all channels.
  template <int kColumns>
  static void convolve_columns(const DepthwiseGather& self, const T* factors, const Tile& tile,
                               const Read* reads, int64_t count) {
    const Gather& pass = self.pass_;
    const int64_t step = pass.columns.step * pass.source.strides[3],
                  last = self.taps() * pass.groups;
    const auto& s = pass.residual.strides;
    const T* source = static_cast<const T*>(pass.source.data) + tile.image * pass.source.strides[0];
    T* to = place<T*>(pass.target, tile, 0);
    const T* residual = pass.residual.data ? place<const T*>(pass.residual, tile, 0) : nullptr;
    for (int64_t c = 0; c < pass.groups; c += kLanes<T>) {
      const int64_t some = std::min<int64_t>(kLanes<T>, pass.groups - c);
      Vector<T> sums[kColumns] = {};
      const auto add = [&](auto read) {
        for (int64_t i = 0; i < count; ++i) {
          const T* from = source + reads[i].offset + c;
          const Vector<T> by = read(factors + reads[i].factors + c);
#pragma GCC unroll 8
          for (int x = 0; x < kColumns; ++x) sums[x] += by * read(from + x * step);
        }
      };
      if (some == kLanes<T>) {
        add([](const T* from) { return load(from); });
      } else {
        add([some](const T* from) { return load_some(from, some); });
      }
      const Vector<T> bias = load_some(factors + last + c, some);
#pragma GCC unroll 8
      for (int x = 0; x < kColumns; ++x) {
        finish<T>(sums[x] + bias, self.epilogue_,
                  residual ? residual + c * s[1] + x * s[3] : nullptr, s[1],
                  to + c + x * pass.target.strides[3], 1, some);
      }
    }
  }

  const Gather& pass_;
  Phases row_phases_, column_phases_;
  Epilogue<T> epilogue_;
};

template <class Stored>
class DepthwiseWeightGrad {
 public:
  using T = Computed<Stored>;

  explicit DepthwiseWeightGrad(const WeightGrad& pass)
      : pass_(pass), row_phases_(pass.rows), column_phases_(pass.columns) {
    for (int64_t q = 0; q < pass.columns.taps; ++q) {
      readers_.push_back(inner_outputs(pass.columns, q, q));
    }
  }

  void run(const Parallel& parallel) const {
    const bool by_channels =
        std::is_same_v<Stored, T> && pass_.input.strides[1] == 1 && pass_.grad.strides[1] == 1;
    const int64_t lanes = by_channels ? kLanes<T> : 1;
    parallel(ceil_div(pass_.groups, lanes), [&](int64_t begin, int64_t end) {
      DepthwiseScratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t channel = task * lanes,
                      channels = std::min<int64_t>(lanes, pass_.groups - channel);
        Vector<T>* sums = scratch.sums.take<Vector<T>>(2 * taps());
        std::fill(sums, sums + taps(), Vector<T>{});
        for (int64_t image = 0; image < pass_.images; ++image) {
          // Sums of an image are a chain of their own.
          std::fill(sums + taps(), sums + 2 * taps(), Vector<T>{});
          if (by_channels) {
            add_channels(image, channel, channels, sums + taps());
          } else {
            add_plane(image, channel, sums + taps(), scratch);
          }
          for (int64_t tap = 0; tap < taps(); ++tap) sums[tap] += sums[taps() + tap];
        }
        store_sums(channel, channels, by_channels, sums);
      }
    });
  }

 private:
  int64_t taps() const { return pass_.rows.taps * pass_.columns.taps; }

  void add_channels(int64_t image, int64_t channel, int64_t channels, Vector<T>* sums) const {
    const auto &s = pass_.input.strides, &g = pass_.grad.strides;
    const T* grad = static_cast<const T*>(pass_.grad.data) + image * g[0] + channel;
    const T* input = static_cast<const T*>(pass_.input.data) + image * s[0] + channel;
    const auto &rows = pass_.rows, &columns = pass_.columns;
    for (int64_t y = 0; y < rows.outputs; ++y) {
      for (int64_t p = 0; p < rows.taps; ++p) {
        const int64_t row = y * rows.step + p * rows.reach - rows.before;
        if (row < 0 || row >= rows.size) continue;
        for (int64_t q = 0; q < columns.taps; ++q) {
          const auto [begin, end] = readers_[q];
          const T* from = input + row * s[2] + (q * columns.reach - columns.before) * s[3];
          sums[p * columns.taps + q] +=
              product(grad + y * g[2], g[3], from, columns.step * s[3], begin, end, channels);
        }
      }
    }
  }

  // The sums of products of two rows of vectors of channels, in four chains.
  static Vector<T> product(const T* left, int64_t left_step, const T* right, int64_t right_step,
                           int64_t begin, int64_t end, int64_t channels) {
    Vector<T> chains[4] = {};
    int64_t i = begin;
    if (channels == kLanes<T>) {
      for (; i + 4 <= end; i += 4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          chains[j] += load(left + (i + j) * left_step) * load(right + (i + j) * right_step);
        }
      }
    }
    for (; i < end; ++i) {
      chains[0] +=
          load_some(left + i * left_step, channels) * load_some(right + i * right_step, channels);
    }
    return (chains[0] + chains[1]) + (chains[2] + chains[3]);
  }

  void add_plane(int64_t image, int64_t channel, Vector<T>* sums, DepthwiseScratch& scratch) const {
    const auto &s = pass_.input.strides, &g = pass_.grad.strides;
    const Stored* input =
        static_cast<const Stored*>(pass_.input.data) + image * s[0] + channel * s[1];
    const Stored* grad =
        static_cast<const Stored*>(pass_.grad.data) + image * g[0] + channel * g[1];
    for (int64_t y = 0; y < pass_.rows.outputs; y += pass_.blocks.rows) {
      const int64_t high = std::min(pass_.blocks.rows, pass_.rows.outputs - y);
      for (int64_t x = 0; x < pass_.columns.outputs; x += pass_.blocks.columns) {
        const int64_t wide = std::min(pass_.blocks.columns, pass_.columns.outputs - x);
        add_tile(input, grad, y, high, x, wide, sums, scratch);
      }
    }
  }

  void add_tile(const Stored* input, const Stored* grad, int64_t y, int64_t high, int64_t x,
                int64_t wide, Vector<T>* sums, DepthwiseScratch& scratch) const {
    const auto& g = pass_.grad.strides;
    const Window rows(pass_.rows, row_phases_, y, high),
        columns(pass_.columns, column_phases_, x, wide);
    const Layout layout(rows, columns);
    T* staged = scratch.stage.take<T>(layout.channel);
    stage(staged, layout, input, pass_.input.strides, 1, rows, columns);
    T* row = scratch.grad.take<T>(wide);
    for (int64_t i = 0; i < high; ++i) {
      copy_row(row, grad + (y + i) * g[2] + x * g[3], wide, g[3]);
      for (int64_t p = 0; p < pass_.rows.taps; ++p) {
        const int64_t read = (y + i) * pass_.rows.step + p * pass_.rows.reach - pass_.rows.before;
        if (read < 0 || read >= pass_.rows.size) continue;
        for (int64_t q = 0; q < pass_.columns.taps; ++q) {
          const auto [left, right] = readers_[q];
          const T* from =
              staged + layout.offset(row_phases_, column_phases_, p, q) + i * layout.row;
          sums[p * pass_.columns.taps + q] +=
              dot(row, from, std::max<int64_t>(0, left - x), std::min(wide, right - x));
        }
      }
    }
  }

  static Vector<T> dot(const T* left, const T* right, int64_t begin, int64_t end) {
    Vector<T> chain{}, other{};
    int64_t i = begin;
    for (; i + 2 * kLanes<T> <= end; i += 2 * kLanes<T>) {
      chain += load(left + i) * load(right + i);
      other += load(left + i + kLanes<T>) * load(right + i + kLanes<T>);
    }
    for (; i < end; i += kLanes<T>) {
      chain += load_some(left + i, end - i) * load_some(right + i, end - i);
    }
    return chain + other;
  }

  void store_sums(int64_t channel, int64_t channels, bool by_channels,
                  const Vector<T>* sums) const {
    const auto& s = pass_.target.strides;
    Stored* to = static_cast<Stored*>(const_cast<void*>(pass_.target.data)) + channel * s[0];
    for (int64_t p = 0; p < pass_.rows.taps; ++p) {
      for (int64_t q = 0; q < pass_.columns.taps; ++q, ++sums) {
        Stored* place = to + p * s[3] + q * s[4];
        T total{};
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
          if (by_channels && lane < channels) place[lane * s[0]] = rounded<Stored>((*sums)[lane]);
          total += (*sums)[lane];
        }
        if (!by_channels) *place = rounded<Stored>(total);
      }
    }
  }

  const WeightGrad& pass_;
  Phases row_phases_, column_phases_;
  std::vector<std::pair<int64_t, int64_t>> readers_;  // each tap column's outputs
};

}  // namespace fastconv::cpu
