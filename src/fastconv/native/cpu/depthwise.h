// Depthwise layers: each group has one read and one written channel.
//
// Vectors hold channels. Where these are neighbours in memory, forward passes read them there, and
// leave padding out. Elsewhere, and in weight gradients, a tile of as many planes as a vector has
// lanes is staged, with zeros for the padding, and transposed on the way.
#pragma once

#include "epilogue.h"
#include "multiply.h"

namespace fastconv::cpu {

struct DepthwiseScratch {
  Buffer stage, grad, sums, offsets;
};

// The elements that some outputs of an axis read, next to one another: an axis of its own, of which
// the outputs are these elements.
inline Axis read_by(const Axis& axis, int64_t first, int64_t outputs) {
  const int64_t elements = (outputs - 1) * axis.step + (axis.taps - 1) * axis.reach + 1;
  return {axis.size, axis.taps ? elements : 0, 1, 1, 1, axis.before - first * axis.step};
}

// Stages a tile of some planes: (rows, columns, lanes of a vector).
template <class Stored>
void stage_planes(Computed<Stored>* to, const Stored* source, const std::array<int64_t, 4>& strides,
                  int64_t planes, const Axis& rows, const Axis& columns) {
  const Phases of_rows(rows), of_columns(columns);
  stage_pixels(to, kLanes<Computed<Stored>>, source, strides, planes,
               Window(rows, of_rows, 0, rows.outputs),
               Window(columns, of_columns, 0, columns.outputs));
}

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
      : pass_(pass), epilogue_{pass.activation, T(pass.slope)} {}

  bool run(const Parallel& parallel) const {
    if (std::is_same_v<Stored, T> && pass_.source.strides[1] == 1 && pass_.target.strides[1] == 1) {
      run_by_channels(parallel);
      return true;
    }
    Buffer packed;
    const T* factors = pack_planes(packed);
    if (!factors) return false;
    const int64_t wide = pass_.blocks.columns, vectors = ceil_div(pass_.groups, kLanes<T>),
                  across = ceil_div(pass_.columns.outputs, wide);
    const int64_t high = balanced(pass_.rows.outputs, pass_.blocks.rows,
                                  pass_.images * vectors * across, parallel.threads());
    const int64_t down = ceil_div(pass_.rows.outputs, high);
    parallel(pass_.images * vectors * down * across, [&](int64_t begin, int64_t end) {
      DepthwiseScratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t x = task % across * wide, y = task / across % down * high,
                      vector = task / across / down;
        convolve_tile(
            {vector / vectors, vector % vectors * kLanes<T>, y,
             std::min(high, pass_.rows.outputs - y), x, std::min(wide, pass_.columns.outputs - x)},
            factors + vector % vectors * (taps() + 1) * kLanes<T>, scratch);
      }
    });
    return true;
  }

 private:
  // Packs, for each vector of channels, the factors of its taps, and behind them the bias. Returns
  // null if weights are not finite where they need to be.
  const T* pack_planes(Buffer& buffer) const {
    const int64_t of_vector = (taps() + 1) * kLanes<T>;
    const auto& s = pass_.weights.strides;
    T* factors = buffer.take<T>(ceil_div(pass_.groups, kLanes<T>) * of_vector);
    T* to = factors;
    for (int64_t channel = 0; channel < pass_.groups; channel += kLanes<T>, to += of_vector) {
      const int64_t planes = std::min<int64_t>(kLanes<T>, pass_.groups - channel);
      const Stored* from = static_cast<const Stored*>(pass_.weights.data) + channel * s[0];
      std::fill(to, to + of_vector, T());
      for (int64_t p = 0; p < pass_.rows.taps; ++p) {
        for (int64_t q = 0; q < pass_.columns.taps; ++q) {
          copy_row(to + (p * pass_.columns.taps + q) * kLanes<T>, from + p * s[3] + q * s[4],
                   planes, s[0]);
        }
      }
      if (pass_.needs_finite_weights && !are_finite(to, taps() * kLanes<T>)) return nullptr;
      for (int64_t c = 0; c < planes; ++c) to[taps() * kLanes<T> + c] = bias(channel + c);
    }
    return factors;
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

  static constexpr int kPositions = 8;  // the most columns whose sums are in registers

  // --- Staged planes
  // -------------------------------------------------------------------------------

  void convolve_tile(const Tile& tile, const T* factors, DepthwiseScratch& scratch) const {
    const int64_t planes = std::min<int64_t>(kLanes<T>, pass_.groups - tile.channel);
    const Axis rows = read_by(pass_.rows, tile.row, tile.rows),
               columns = read_by(pass_.columns, tile.column, tile.columns);
    T* staged = scratch.stage.take<T>(rows.outputs * columns.outputs * kLanes<T>);
    const auto& s = pass_.source.strides;
    if (taps() > 0) {
      stage_planes(
          staged,
          static_cast<const Stored*>(pass_.source.data) + tile.image * s[0] + tile.channel * s[1],
          s, planes, rows, columns);
    }
    int64_t* offsets = scratch.offsets.take<int64_t>(taps());
    for (int64_t p = 0, tap = 0; p < pass_.rows.taps; ++p) {
      for (int64_t q = 0; q < pass_.columns.taps; ++q, ++tap) {
        offsets[tap] =
            (p * pass_.rows.reach * columns.outputs + q * pass_.columns.reach) * kLanes<T>;
      }
    }
    T* sums = scratch.sums.take<T>(tile.rows * tile.columns * kLanes<T>);
    constexpr auto kAll = std::make_integer_sequence<int, kPositions>();
    for (int64_t y = 0; y < tile.rows; ++y) {
      const int64_t pieces = ceil_div(tile.columns, kPositions);
      for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t x = tile.columns * piece / pieces,
                      some = tile.columns * (piece + 1) / pieces - x;
        sum_for(some, kAll)(
            staged + (y * pass_.rows.step * columns.outputs + x * pass_.columns.step) * kLanes<T>,
            pass_.columns.step * kLanes<T>, offsets, taps(), factors,
            sums + (y * tile.columns + x) * kLanes<T>);
      }
    }
    finish_planes(tile, planes, sums);
  }

  using Sum = void (*)(const T*, int64_t, const int64_t*, int64_t, const T*, T*);

  template <int... kIndex>
  static Sum sum_for(int64_t columns, std::integer_sequence<int, kIndex...>) {
    static constexpr Sum kFound[] = {sum_columns<kIndex + 1>...};
    return kFound[columns - 1];
  }

  // Sums the taps of some columns of a row; the bias lies behind the taps' factors.
  template <int kColumns>
  static void sum_columns(const T* from, int64_t step, const int64_t* offsets, int64_t taps,
                          const T* factors, T* to) {
    Vector<T> sums[kColumns] = {};
    for (int64_t tap = 0; tap < taps; ++tap) {
      const Vector<T> by = load(factors + tap * kLanes<T>);
      const T* read = from + offsets[tap];
#pragma GCC unroll 8
      for (int x = 0; x < kColumns; ++x) sums[x] += by * load(read + x * step);
    }
    const Vector<T> bias = load(factors + taps * kLanes<T>);
#pragma GCC unroll 8
    for (int x = 0; x < kColumns; ++x) store(to + x * kLanes<T>, sums[x] + bias);
  }

  void finish_planes(const Tile& tile, int64_t planes, const T* sums) const {
    const auto joined = [&](const Images& images) {
      return images.strides[2] == tile.columns * images.strides[3];
    };
    const bool is_one = joined(pass_.target) && (!pass_.residual.data || joined(pass_.residual));
    const int64_t rows = is_one ? 1 : tile.rows, columns = tile.rows * tile.columns / rows;
    for (int64_t y = 0; y < rows; ++y, sums += columns * kLanes<T>) {
      Stored* to = place<Stored*>(pass_.target, tile, y);
      const Stored* residual =
          pass_.residual.data ? place<const Stored*>(pass_.residual, tile, y) : nullptr;
      if (pass_.target.strides[1] == 1) {
        finish_channels(to, residual, sums, columns, planes);
      } else {
        finish_columns(to, residual, sums, columns, planes);
      }
    }
  }

  void finish_channels(Stored* to, const Stored* residual, const T* sums, int64_t columns,
                       int64_t planes) const {
    const auto& s = pass_.residual.strides;
    for (int64_t x = 0; x < columns; ++x) {
      finish(load(sums + x * kLanes<T>), epilogue_, residual ? residual + x * s[3] : nullptr, s[1],
             to + x * pass_.target.strides[3], 1, planes);
    }
  }

  void finish_columns(Stored* to, const Stored* residual, const T* sums, int64_t columns,
                      int64_t planes) const {
    constexpr int kBlock = kLanes<T>;
    const auto &into = pass_.target.strides, &from = pass_.residual.strides;
    for (int64_t x = 0; x < columns; x += kBlock) {
      const int64_t some = std::min<int64_t>(kBlock, columns - x);
      Vector<T> block[kBlock] = {};
      for (int64_t i = 0; i < some; ++i) block[i] = load(sums + (x + i) * kLanes<T>);
      transpose<T>(block);
      for (int64_t c = 0; c < planes; ++c) {
        finish(block[c], epilogue_, residual ? residual + c * from[1] + x * from[3] : nullptr,
               from[3], to + c * into[1] + x * into[3], into[3], some);
      }
    }
  }

  // --- Channels that are neighbours
  // ----------------------------------------------------------------

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
  Epilogue<T> epilogue_;
};

template <class Stored>
class DepthwiseWeightGrad {
 public:
  using T = Computed<Stored>;

  explicit DepthwiseWeightGrad(const WeightGrad& pass) : pass_(pass) {
    for (int64_t q = 0; q < pass.columns.taps; ++q) {
      readers_.push_back(inner_outputs(pass.columns, q, q));
    }
  }

  void run(const Parallel& parallel) const {
    const bool in_place =
        std::is_same_v<Stored, T> && pass_.input.strides[1] == 1 && pass_.grad.strides[1] == 1;
    parallel(ceil_div(pass_.groups, kLanes<T>), [&](int64_t begin, int64_t end) {
      DepthwiseScratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t channel = task * kLanes<T>,
                      planes = std::min<int64_t>(kLanes<T>, pass_.groups - channel);
        Vector<T>* sums = scratch.sums.take<Vector<T>>(2 * taps());
        std::fill(sums, sums + taps(), Vector<T>{});
        for (int64_t image = 0; image < pass_.images; ++image) {
          // Sums of an image are a chain of their own.
          std::fill(sums + taps(), sums + 2 * taps(), Vector<T>{});
          if (in_place) {
            add_channels(image, channel, planes, sums + taps());
          } else {
            add_image(image, channel, planes, sums + taps(), scratch);
          }
          for (int64_t tap = 0; tap < taps(); ++tap) sums[tap] += sums[taps() + tap];
        }
        store_sums(channel, planes, sums);
      }
    });
  }

 private:
  int64_t taps() const { return pass_.rows.taps * pass_.columns.taps; }

  // Reads channels that are neighbours in memory there.
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
              row_product(grad + y * g[2], g[3], from, columns.step * s[3], begin, end, channels);
        }
      }
    }
  }

  // The sums of products of two rows of vectors of channels, in four chains.
  static Vector<T> row_product(const T* left, int64_t left_step, const T* right, int64_t right_step,
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

  void add_image(int64_t image, int64_t channel, int64_t planes, Vector<T>* sums,
                 DepthwiseScratch& scratch) const {
    for (int64_t y = 0; y < pass_.rows.outputs; y += pass_.blocks.rows) {
      const int64_t high = std::min(pass_.blocks.rows, pass_.rows.outputs - y);
      for (int64_t x = 0; x < pass_.columns.outputs; x += pass_.blocks.columns) {
        const int64_t wide = std::min(pass_.blocks.columns, pass_.columns.outputs - x);
        const auto first = [&](const Images& images, int64_t row, int64_t column) {
          const auto& s = images.strides;
          return static_cast<const Stored*>(images.data) + image * s[0] + channel * s[1] +
                 row * s[2] + column * s[3];
        };
        const Axis rows = read_by(pass_.rows, y, high), columns = read_by(pass_.columns, x, wide);
        T* input = scratch.stage.take<T>(rows.outputs * columns.outputs * kLanes<T>);
        stage_planes(input, first(pass_.input, 0, 0), pass_.input.strides, planes, rows, columns);
        T* grad = scratch.grad.take<T>(high * wide * kLanes<T>);
        stage_planes(grad, first(pass_.grad, y, x), pass_.grad.strides, planes,
                     Axis{high, high, 1, 1, 1, 0}, Axis{wide, wide, 1, 1, 1, 0});
        add_tile(input, columns.outputs, grad, high, wide, sums);
      }
    }
  }

  void add_tile(const T* input, int64_t pitch, const T* grad, int64_t high, int64_t wide,
                Vector<T>* sums) const {
    const auto &rows = pass_.rows, &columns = pass_.columns;
    const int64_t most = std::max<int64_t>(1, 4 * kSteps / wide);  // rows in one chain
    for (int64_t p = 0; p < rows.taps; ++p) {
      for (int64_t q = 0; q < columns.taps; ++q, ++sums) {
        const T* from = input + (p * rows.reach * pitch + q * columns.reach) * kLanes<T>;
        for (int64_t y = 0; y < high; y += most) {
          *sums += product(grad + y * wide * kLanes<T>, wide,
                           from + y * rows.step * pitch * kLanes<T>, rows.step * pitch * kLanes<T>,
                           columns.step * kLanes<T>, std::min(most, high - y));
        }
      }
    }
  }

  // The sums of products of rows of vectors, in four chains.
  static Vector<T> product(const T* left, int64_t wide, const T* right, int64_t right_row,
                           int64_t right_step, int64_t rows) {
    Vector<T> chains[4] = {};
    for (int64_t y = 0; y < rows; ++y, left += wide * kLanes<T>, right += right_row) {
      int64_t i = 0;
      for (; i + 4 <= wide; i += 4) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          chains[j] += load(left + (i + j) * kLanes<T>) * load(right + (i + j) * right_step);
        }
      }
      for (int j = 0; i < wide; ++i, ++j) {
        chains[j] += load(left + i * kLanes<T>) * load(right + i * right_step);
      }
    }
    return (chains[0] + chains[1]) + (chains[2] + chains[3]);
  }

  void store_sums(int64_t channel, int64_t planes, const Vector<T>* sums) const {
    const auto& s = pass_.target.strides;
    Stored* to = static_cast<Stored*>(const_cast<void*>(pass_.target.data)) + channel * s[0];
    for (int64_t p = 0; p < pass_.rows.taps; ++p) {
      for (int64_t q = 0; q < pass_.columns.taps; ++q, ++sums) {
        for (int64_t lane = 0; lane < planes; ++lane) {
          to[lane * s[0] + p * s[3] + q * s[4]] = rounded<Stored>((*sums)[lane]);
        }
      }
    }
  }

  const WeightGrad& pass_;
  std::vector<std::pair<int64_t, int64_t>> readers_;  // each tap column's outputs
};

}  // namespace fastconv::cpu
