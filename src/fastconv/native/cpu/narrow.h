// Passes that gather, of groups that write few channels: vectors hold columns.
//
// A task is a tile of output rows and columns of one image, and as many groups as have a vector's
// worth of channels. It stages all read channels as rows, and multiplies register tiles: all
// written channels of a group by some vectors of columns. Weights are broadcast.
//
// Where rows are short, a staged plane is as one row. Sums of the positions between two rows of
// outputs, which follow from what the ends of rows read, are left where they are.
#pragma once

#include "direct.h"

namespace fastconv::cpu {

// The most written channels of a register tile, and the most vectors.
constexpr int kNarrowChannels = 8;
constexpr int kNarrowVectors = 8;

// The vectors of a register tile with so many channels: sums, a vector of each and a broadcast
// number fit registers.
constexpr int narrow_vectors(int channels) {
  return std::clamp((kRegisters - 2) / (channels + 1), 1, kNarrowVectors);
}

// sums[c * stride + x] += weights[step * kChannels + c] * staged[offsets[step] + x], for all steps.
template <class T, int kChannels, int kVectors>
void multiply_columns(const T* staged, const int32_t* offsets, int64_t steps, const T* weights,
                      T* sums, int64_t stride, bool is_first) {
  Vector<T> chain[kChannels][kVectors] = {};
  for (int64_t step = 0; step < steps; ++step, weights += kChannels) {
    const T* from = staged + offsets[step];
    Vector<T> read[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) read[v] = load(from + v * kLanes<T>);
#pragma GCC unroll 8
    for (int c = 0; c < kChannels; ++c) {
      const Vector<T> by = broadcast(weights[c]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) chain[c][v] += by * read[v];
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < kChannels; ++c) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      T* total = sums + c * stride + v * kLanes<T>;
      store(total, is_first ? chain[c][v] : load(total) + chain[c][v]);
    }
  }
}

template <class T>
using MultiplyColumns = void (*)(const T*, const int32_t*, int64_t, const T*, T*, int64_t, bool);

template <class T, int kChannels, int... kIndex>
constexpr MultiplyColumns<T> columns_of(int64_t vectors, std::integer_sequence<int, kIndex...>) {
  constexpr MultiplyColumns<T> found[] = {multiply_columns<T, kChannels, kIndex + 1>...};
  return found[vectors - 1];
}

template <class T, int kChannels>
MultiplyColumns<T> columns_for(int64_t channels, int64_t vectors) {
  if constexpr (kChannels > 1) {
    if (channels < kChannels) return columns_for<T, kChannels - 1>(channels, vectors);
  }
  return columns_of<T, kChannels>(vectors,
                                  std::make_integer_sequence<int, narrow_vectors(kChannels)>());
}

// Weights of a pass: for each group and each piece of its written channels, (tap planes, read
// channels, tap rows, tap columns, channels of the piece).
template <class Stored>
class NarrowWeights {
 public:
  using T = Computed<Stored>;

  explicit NarrowWeights(const Gather& pass)
      : pieces_(pass.channels, kNarrowChannels),
        of_channel_(pass.planes.taps * pass.depth * pass.rows.taps * pass.columns.taps),
        of_group_(pass.channels * of_channel_),
        memory_(buffer_.take<T>(pass.groups * of_group_ + 1)) {
    const auto& s = pass.weights.strides;
    T* to = memory_;
    for (int64_t group = 0; group < pass.groups; ++group) {
      for (int64_t i = 0; i < pieces_.count(); ++i) {
        const Stored* first =
            static_cast<const Stored*>(pass.weights.data) + group * s[0] + pieces_.begin(i) * s[1];
        for (int64_t z = 0; z < pass.planes.taps; ++z) {
          for (int64_t c = 0; c < pass.depth; ++c) {
            for (int64_t p = 0; p < pass.rows.taps; ++p) {
              for (int64_t q = 0; q < pass.columns.taps; ++q) {
                const Stored* from =
                    first + z * pass.weights.plane + c * s[2] + p * s[3] + q * s[4];
                for (int64_t k = 0; k < pieces_.size(i); ++k) *to++ = widened(from[k * s[1]]);
              }
            }
          }
        }
      }
    }
  }

  const Parts& pieces() const { return pieces_; }

  const T* of(int64_t group, int64_t piece, int64_t tap_plane, int64_t of_plane) const {
    return memory_ + group * of_group_ + pieces_.begin(piece) * of_channel_ +
           tap_plane * of_plane * pieces_.size(piece);
  }

  bool are_finite(int64_t groups) const { return cpu::are_finite<T>(memory_, groups * of_group_); }

 private:
  Parts pieces_;
  int64_t of_channel_, of_group_;  // elements
  Buffer buffer_;
  T* memory_;
};

template <class Stored>
class NarrowGather {
 public:
  using T = Computed<Stored>;

  NarrowGather(const Gather& pass, const NarrowWeights<Stored>& weights)
      : pass_(pass),
        row_phases_(pass.rows),
        column_phases_(pass.columns),
        weights_(weights),
        together_(std::max<int64_t>(1, kLanes<T> / std::max(pass.depth, pass.channels))),
        epilogue_{pass.activation, T(pass.slope)} {}

  void run(const Parallel& parallel) const {
    const int64_t images = pass_.images * pass_.planes.outputs,
                  sets = ceil_div(pass_.groups, together_), others = images * sets;
    const int64_t columns = std::min(pass_.columns.outputs, pass_.blocks.columns),
                  across = ceil_div(pass_.columns.outputs, columns);
    const int64_t rows =
        balanced(pass_.rows.outputs, pass_.blocks.rows, others * across, parallel.threads());
    const int64_t down = ceil_div(pass_.rows.outputs, rows);
    parallel(others * down * across, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        int64_t rest = task;
        Tile tile;
        tile.column = rest % across * columns, rest /= across;
        tile.row = rest % down * rows, rest /= down;
        tile.group = rest % sets * together_, rest /= sets;
        tile.plane = rest % pass_.planes.outputs;
        tile.image = rest / pass_.planes.outputs;
        tile.groups = std::min(together_, pass_.groups - tile.group);
        tile.rows = std::min(rows, pass_.rows.outputs - tile.row);
        tile.columns = std::min(columns, pass_.columns.outputs - tile.column);
        compute(tile, scratch);
      }
    });
  }

 private:
  struct Tile {
    int64_t image, plane, group, groups, row, rows, column, columns;
  };

  // How the outputs of a tile are lines of positions, which are `apart` in the stage.
  struct Lines {
    int64_t count, length, apart;
    int64_t padded;  // the length of a line of sums

    Lines(const Tile& tile, int64_t staged_row)
        : count(tile.rows), length(tile.columns), apart(staged_row) {
      const int64_t whole = (tile.rows - 1) * staged_row + tile.columns;
      if (ceil_div(whole, kLanes<T>) <= count * ceil_div(length, kLanes<T>)) {
        count = 1, length = whole;
      }
      padded = ceil_div(length, kLanes<T>) * kLanes<T>;
    }

    // Elements of sums between the rows of a tile.
    int64_t row() const { return count == 1 ? apart : padded; }
    int64_t of_channel() const { return count * padded; }
  };

  void compute(const Tile& tile, Scratch& scratch) const {
    const Window rows(pass_.rows, row_phases_, tile.row, tile.rows),
        columns(pass_.columns, column_phases_, tile.column, tile.columns);
    const Layout layout(rows, columns);
    const Lines lines(tile, layout.row);
    const auto [begin, end] = existing_taps(pass_.planes, tile.plane);
    const int64_t taps = pass_.rows.taps * pass_.columns.taps, of_plane = taps * pass_.depth,
                  channels = tile.groups * pass_.depth, of_planes = channels * layout.channel;
    const int64_t steps = (end - begin) * of_plane, written = tile.groups * pass_.channels;
    T* staged = scratch.stage.take<T>((end - begin) * of_planes + 2 * kLanes<T>);
    int32_t* offsets = scratch.offsets.take<int32_t>(steps);
    const auto& s = pass_.source.strides;
    for (int64_t z = begin, i = 0; z < end; ++z) {
      const int64_t plane =
          tile.plane * pass_.planes.step + z * pass_.planes.reach - pass_.planes.before;
      if (taps > 0) {
        stage(staged + (z - begin) * of_planes, layout,
              static_cast<const Stored*>(pass_.source.data) + tile.image * s[0] +
                  tile.group * pass_.depth * s[1] + plane * pass_.source.plane,
              s, channels, rows, columns);
      }
      for (int64_t c = 0; c < pass_.depth; ++c) {
        const int64_t first = (z - begin) * of_planes + c * layout.channel;
        for (int64_t p = 0; p < pass_.rows.taps; ++p) {
          for (int64_t q = 0; q < pass_.columns.taps; ++q) {
            offsets[i++] = int32_t(first + layout.offset(row_phases_, column_phases_, p, q));
          }
        }
      }
    }
    // The last vector of a line reads what follows it.
    std::fill(staged + (end - begin) * of_planes,
              staged + (end - begin) * of_planes + 2 * kLanes<T>, T());
    T* sums = scratch.sums.take<T>(written * lines.of_channel());
    const Parts& pieces = weights_.pieces();
    for (int64_t g = 0; g < tile.groups; ++g) {
      for (int64_t i = 0; i < pieces.count(); ++i) {
        const int64_t first = g * pass_.channels + pieces.begin(i);
        multiply_piece(lines, staged + g * pass_.depth * layout.channel, offsets, steps,
                       weights_.of(tile.group + g, i, begin, of_plane), pieces.size(i),
                       sums + first * lines.of_channel());
      }
    }
    finish_tile(tile, lines, written, sums);
  }

  // Multiplies a group's rows for some of its written channels.
  void multiply_piece(const Lines& lines, const T* staged, const int32_t* offsets, int64_t steps,
                      const T* weights, int64_t channels, T* sums) const {
    const Parts vectors(ceil_div(lines.length, kLanes<T>), narrow_vectors(int(channels)));
    const Parts chains(std::max<int64_t>(steps, 1), kLongSteps);
    for (int64_t line = 0; line < lines.count; ++line) {
      for (int64_t i = 0; i < vectors.count(); ++i) {
        const int64_t x = vectors.begin(i) * kLanes<T>;
        const auto multiplies = columns_for<T, kNarrowChannels>(channels, vectors.size(i));
        for (int64_t chain = 0; chain < chains.count(); ++chain) {
          const int64_t first = chains.begin(chain);
          multiplies(staged + line * lines.apart + x, offsets + first,
                     steps ? chains.size(chain) : 0, weights + first * channels,
                     sums + line * lines.padded + x, lines.of_channel(), chain == 0);
        }
      }
    }
  }

  // Adds the bias to a tile's sums, and stores them.
  void finish_tile(const Tile& tile, const Lines& lines, int64_t written, T* sums) const {
    const int64_t channel = tile.group * pass_.channels;
    const auto place = [&](const Images& images) {
      const auto& s = images.strides;
      return static_cast<Stored*>(images.data) + tile.image * s[0] + channel * s[1] +
             tile.row * s[2] + tile.column * s[3] + tile.plane * images.plane;
    };
    const auto &s = pass_.target.strides, &from = pass_.residual.strides;
    Stored* to = place(pass_.target);
    const Stored* residual = pass_.residual.data ? place(pass_.residual) : nullptr;
    const bool is_transposed = std::is_same_v<Stored, T> && s[1] == 1 && s[3] != 1;
    for (int64_t k = 0; k < written; ++k) {
      const Vector<T> bias = broadcast(
          pass_.bias ? widened(static_cast<const Stored*>(pass_.bias)[channel + k]) : T());
      for (int64_t y = 0; y < tile.rows; ++y) {
        T* row = sums + k * lines.of_channel() + y * lines.row();
        const Stored* beside = residual ? residual + k * from[1] + y * from[2] : nullptr;
        for (int64_t x = 0; x < tile.columns; x += kLanes<T>) {
          const int64_t some = std::min<int64_t>(kLanes<T>, tile.columns - x);
          const Vector<T> sum = load_some(row + x, some) + bias;
          if constexpr (std::is_same_v<Stored, T>) {
            if (is_transposed) {
              finish(sum, epilogue_, beside ? beside + x * from[3] : nullptr, from[3], row + x, 1,
                     some);
              continue;
            }
          }
          finish(sum, epilogue_, beside ? beside + x * from[3] : nullptr, from[3],
                 to + k * s[1] + y * s[2] + x * s[3], s[3], some);
        }
      }
    }
    if constexpr (std::is_same_v<Stored, T>) {
      for (int64_t y = 0; is_transposed && y < tile.rows; ++y) {
        copy_transposed(to + y * s[2], s[3], sums + y * lines.row(), lines.of_channel(), written,
                        written, tile.columns);
      }
    }
  }

  const Gather& pass_;
  Phases row_phases_, column_phases_;
  const NarrowWeights<Stored>& weights_;
  int64_t together_;  // groups of a task
  Epilogue<T> epilogue_;
};

// Computes passes that write different rows and columns of one result. Returns false if weights are
// not finite where they need to be.
template <class Stored>
bool gather_narrowly(const std::vector<Gather>& passes, const Parallel& parallel) {
  std::vector<NarrowWeights<Stored>> weights(passes.begin(), passes.end());
  for (size_t i = 0; i < passes.size(); ++i) {
    if (passes[i].needs_finite_weights && !weights[i].are_finite(passes[i].groups)) return false;
  }
  for (size_t i = 0; i < passes.size(); ++i) {
    NarrowGather<Stored>(passes[i], weights[i]).run(parallel);
  }
  return true;
}

}  // namespace fastconv::cpu
