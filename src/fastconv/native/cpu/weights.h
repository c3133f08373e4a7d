// Weight gradients, in layers with many channels.
//
// A task has some channels of the input and of the output's gradient, and one tap plane. It stages
// tiles of both with channels next to one another, and multiplies register tiles: channels of the
// input, which are broadcast, by two vectors of channels of the gradient, over the pixels of the
// tile. Where the input has few channels, those of neighbouring tap columns, which are neighbours
// in the stage, are in the same register tile.
//
// Where there are few tasks, each is cut into shares of the tiles, which sum in buffers of their
// own. Their number follows from the problem, so no bit depends on how many threads there are.
#pragma once

#include "direct.h"

namespace fastconv::cpu {

template <class Stored>
class DirectWeightGrad {
 public:
  using T = Computed<Stored>;

  explicit DirectWeightGrad(const WeightGrad& pass)
      : pass_(pass), row_phases_(pass.rows), column_phases_(pass.columns) {
    is_merged_ = std::min(pass.depth, pass.blocks.depth) <= kMostMerged;
    list_runs();
    for (int64_t p = 0; p < pass.rows.taps; ++p) {
      read_rows_.push_back(existing_outputs(pass.rows, p));
    }
  }

  void run(const Parallel& parallel) const {
    const auto& blocks = pass_.blocks;
    const int64_t wide = ceil_div(pass_.channels, blocks.channels), planes = pass_.planes.taps;
    const int64_t others = pass_.groups * wide * planes, shares = count_shares(others);
    const int64_t depth = balanced(pass_.depth, blocks.depth, others * shares, parallel.threads());
    const int64_t deep = ceil_div(pass_.depth, depth), parts = others * deep;
    const int64_t most = elements(std::min(pass_.channels, blocks.channels), depth);
    const auto part_of_task = [&](int64_t task) {
      Part part;
      part.plane = task % planes, task /= planes;
      part.first = task % deep * depth, task /= deep;
      part.channel = task % wide * blocks.channels;
      part.group = task / wide;
      part.channels = std::min(blocks.channels, pass_.channels - part.channel);
      part.depth = std::min(depth, pass_.depth - part.first);
      return part;
    };
    Buffer buffer;
    T* shared = shares > 1 ? buffer.take<T>(parts * shares * most) : nullptr;
    parallel(parts * shares, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        const Part part = part_of_task(task / shares);
        T* sums = shared ? shared + task * most : scratch.sums.take<T>(most);
        compute(part, task % shares, shares, sums, scratch);
        if (!shared) store_sums(part, sums);
      }
    });
    if (!shared) return;
    parallel(parts, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const Part part = part_of_task(task);
        T* sums = shared + task * shares * most;
        for (int64_t share = 1; share < shares; ++share) {
          const T* added = sums + share * most;
          for (int64_t i = 0; i < elements(part.channels, part.depth); i += kLanes<T>) {
            store(sums + i, load(sums + i) + load(added + i));
          }
        }
        store_sums(part, sums);
      }
    });
  }

 private:
  // Up to so many channels share register tiles with those of neighbouring tap columns.
  static constexpr int64_t kMostMerged = 2 * kTilePositions;

  // Elements of a pixel of a piece of channels.
  static constexpr int64_t kApart = kTilePositions > 8 ? 16 : 8;
  static_assert(kTilePositions <= kApart);

  struct Part {
    int64_t group, channel, channels, first, depth, plane;
  };

  // The pixels of a tile: its first row, and how many rows and columns it has.
  struct Grid {
    int64_t first, high, wide;
  };

  // Tap columns that read neighbouring elements of one phase.
  struct Run {
    int64_t first, count;  // its first tap, and how many there are
    int64_t rank;          // the first tap's place among all taps' sums
  };

  void list_runs() {
    const auto& taps = column_phases_.taps;
    ranks_.resize(taps.size());
    int64_t rank = 0;
    for (int64_t slot = 0; slot < column_phases_.count(); ++slot) {
      int64_t last = -1;  // the tap before, of the same phase
      for (int64_t q = 0; q < int64_t(taps.size()); ++q) {
        if (taps[q].slot != slot) continue;
        if (is_merged_ && last >= 0 && taps[q].index == taps[last].index + 1) {
          ++runs_.back().count;
        } else {
          runs_.push_back({q, 1, is_merged_ ? rank : q});
        }
        ranks_[q] = is_merged_ ? rank : q;
        ++rank, last = q;
      }
    }
  }

  // How the input is staged. Each register tile of channels has a stage of its own, in which a
  // pixel is a cache line, of which a step reads all. Merged channels are not apart.
  Pieces pieces_of(const Part& part, const Layout& layout) const {
    if (is_merged_) return {part.depth, part.depth, layout.channel * part.depth};
    const int64_t count = ceil_div(part.depth, kTilePositions);
    return {ceil_div(part.depth, count), kApart, layout.channel * kApart};
  }

  int64_t taps() const { return pass_.rows.taps * pass_.columns.taps; }

  // Elements of sums: (tiles of channels, then taps and input channels, channels of a tile).
  int64_t elements(int64_t channels, int64_t depth) const {
    return taps() * depth * ceil_div(channels, kTileChannels<T>) * kTileChannels<T>;
  }

  // Strides of sums: those of input channels and of taps.
  int64_t of_channel() const { return (is_merged_ ? 1 : taps()) * kTileChannels<T>; }
  int64_t of_tap(const Part& part) const {
    return (is_merged_ ? part.depth : 1) * kTileChannels<T>;
  }

  int64_t row_tiles() const { return ceil_div(pass_.rows.outputs, pass_.blocks.rows); }
  int64_t column_tiles() const { return ceil_div(pass_.columns.outputs, pass_.blocks.columns); }
  int64_t tiles() const {
    return pass_.images * pass_.planes.outputs * row_tiles() * column_tiles();
  }

  // Into how many shares tasks are cut, of which there are `others` for each block of channels.
  int64_t count_shares(int64_t others) const {
    constexpr int64_t kTasks = 16, kProducts = 1 << 22, kBytes = 4 << 20;
    const int64_t tasks = others * ceil_div(pass_.depth, pass_.blocks.depth);
    const double pixels = double(pass_.images * pass_.planes.outputs) *
                          double(pass_.rows.outputs * pass_.columns.outputs);
    const int64_t sums = pass_.groups * pass_.planes.taps * elements(pass_.channels, pass_.depth);
    const auto worth = int64_t(pixels * double(sums) / double(kProducts));
    const int64_t most = std::min({tiles(), worth, kBytes / int64_t(sums * sizeof(T))});
    return 2 * tasks > kTasks ? 1 : std::max<int64_t>(1, std::min(kTasks / tasks, most));
  }

  // Sums a share of the tiles.
  void compute(const Part& part, int64_t share, int64_t shares, T* sums, Scratch& scratch) const {
    bool is_first = true;
    const int64_t count = tiles(), first = count * share / shares,
                  last = count * (share + 1) / shares;
    for (int64_t tile = first; tile < last; ++tile) {
      int64_t rest = tile;
      const int64_t x = rest % column_tiles() * pass_.blocks.columns;
      rest /= column_tiles();
      const int64_t y = rest % row_tiles() * pass_.blocks.rows;
      rest /= row_tiles();
      const auto& planes = pass_.planes;
      const int64_t z = rest % planes.outputs,
                    read = z * planes.step + part.plane * planes.reach - planes.before;
      if (read < 0 || read >= planes.size) continue;
      const int64_t image = rest / planes.outputs;
      const auto &s = pass_.input.strides, &g = pass_.grad.strides;
      add_tile(part,
               static_cast<const Stored*>(pass_.input.data) + image * s[0] +
                   read * pass_.input.plane + (part.group * pass_.depth + part.first) * s[1],
               static_cast<const Stored*>(pass_.grad.data) + image * g[0] + z * pass_.grad.plane +
                   (part.group * pass_.channels + part.channel) * g[1] + y * g[2] + x * g[3],
               y, x, sums, is_first, scratch);
      is_first = false;
    }
    if (is_first) std::fill(sums, sums + elements(part.channels, part.depth), T());
  }

  // Adds what a tile of the gradient's rows and columns, from (y, x) on, contributes.
  void add_tile(const Part& part, const Stored* source, const Stored* from, int64_t y, int64_t x,
                T* sums, bool is_first, Scratch& scratch) const {
    const int64_t high = std::min(pass_.blocks.rows, pass_.rows.outputs - y),
                  wide = std::min(pass_.blocks.columns, pass_.columns.outputs - x);
    const Window rows(pass_.rows, row_phases_, y, high),
        columns(pass_.columns, column_phases_, x, wide);
    const Layout layout(rows, columns);
    const Pieces pieces = pieces_of(part, layout);
    T* input = scratch.stage.take<T>(pieces.apart * ceil_div(part.depth, pieces.wide));
    stage_pixels(input, pieces, source, pass_.input.strides, part.depth, rows, columns);
    T* grad = scratch.grad.take<T>(elements(part.channels, 1) / taps() * high * wide);
    // Rows that follow one another in memory are as one.
    const bool is_joined = pass_.grad.strides[2] == wide * pass_.grad.strides[3];
    const int64_t down = is_joined ? 1 : high, across = is_joined ? high * wide : wide;
    const Axis grad_rows{down, down, 1, 1, 1, 0}, grad_columns{across, across, 1, 1, 1, 0};
    const Phases all_rows(grad_rows), all_columns(grad_columns);
    const Pieces tiles{kTileChannels<T>, kTileChannels<T>, kTileChannels<T> * high * wide};
    stage_pixels(grad, tiles, from, pass_.grad.strides, part.channels,
                 Window(grad_rows, all_rows, 0, down),
                 Window(grad_columns, all_columns, 0, across));
    int32_t* offsets = scratch.offsets.take<int32_t>(high * wide);
    for (int64_t row = 0, i = 0; row < high; ++row) {
      for (int64_t column = 0; column < wide; ++column, ++i) {
        offsets[i] = int32_t((row * layout.row + column) * pieces.pitch);
      }
    }
    multiply_tile(part, layout, input, grad, offsets, {y, high, wide}, sums, is_first);
  }

  // Sums of some tap rows are added to for all pixels of a tile before the next ones are, so that
  // they stay in the L2 cache. A part of the pixels of the gradient stays in the L1 cache, and so
  // do those of a piece of the input's channels, while they are multiplied for all these taps.
  void multiply_tile(const Part& part, const Layout& layout, const T* input, const T* grad,
                     const int32_t* offsets, const Grid& grid, T* sums, bool is_first) const {
    constexpr int64_t kSums = (256 << 10) / sizeof(T);
    const int64_t pixels = grid.high * grid.wide, most = part_of(pixels, kSteps),
                  in_row = pass_.columns.taps * part.depth;
    const int64_t some_rows = std::max<int64_t>(1, kSums / (in_row * kTileChannels<T>));
    for (int64_t c = 0; c < part.channels;
         c += kTileChannels<T>, grad += pixels * kTileChannels<T>) {
      const int64_t channels = std::min<int64_t>(kTileChannels<T>, part.channels - c);
      T* to = sums + c * taps() * part.depth;
      for (int64_t p = 0; p < pass_.rows.taps; p += some_rows) {
        const int64_t end = std::min(p + some_rows, pass_.rows.taps);
        for (int64_t pixel = 0; pixel < pixels; pixel += most) {
          multiply_pixels(part, layout, p, end, input, offsets, grid, pixel,
                          std::min(most, pixels - pixel), grad, channels, to,
                          is_first && pixel == 0);
        }
      }
    }
  }

  // Multiplies some pixels for tap rows from `first` to before `last`, but for those pixels with
  // which a tap row reads padding.
  void multiply_pixels(const Part& part, const Layout& layout, int64_t first, int64_t last,
                       const T* input, const int32_t* offsets, const Grid& grid, int64_t pixel,
                       int64_t pixels, const T* grad, int64_t channels, T* sums,
                       bool is_first) const {
    const Pieces pieces = pieces_of(part, layout);
    const int64_t stride = of_channel();
    const auto multiply_piece = [&](int64_t p, const Run& run, int64_t i, int64_t count,
                                    const T* left) {
      const auto [top, bottom] = read_rows_[p];
      const auto place = [&](int64_t row) {
        return std::clamp((row - grid.first) * grid.wide, pixel, pixel + pixels);
      };
      const int64_t begin = place(top), some = place(bottom) - begin;
      if (some == 0 && !is_first) return;
      left += layout.offset(row_phases_, column_phases_, p, run.first) * pieces.pitch;
      T* to = sums + (p * pass_.columns.taps + run.rank) * of_tap(part) + i * stride;
      multiply_for<T>(count, channels)(left, offsets + begin, some, grad + begin * kTileChannels<T>,
                                       kTileChannels<T>, to, stride, is_first, 0, nullptr);
    };
    if (!is_merged_) {
      for (int64_t i = 0; i < part.depth; i += pieces.wide, input += pieces.apart) {
        const int64_t count = std::min(pieces.wide, part.depth - i);
        for (int64_t p = first; p < last; ++p) {
          for (const Run& run : runs_) multiply_piece(p, run, i, count, input);
        }
      }
      return;
    }
    for (int64_t p = first; p < last; ++p) {
      for (const Run& run : runs_) {
        const Parts parts(run.count * part.depth, kTilePositions);
        for (int64_t n = 0; n < parts.count(); ++n) {
          const int64_t i = parts.begin(n);
          multiply_piece(p, run, i, parts.size(n), input + i);
        }
      }
    }
  }

  void store_sums(const Part& part, const T* sums) const {
    const auto& s = pass_.target.strides;
    const bool in_order = !is_merged_ && s[4] == 1 && s[3] == pass_.columns.taps && s[2] == taps();
    Stored* to = static_cast<Stored*>(const_cast<void*>(pass_.target.data)) + part.group * s[0] +
                 part.channel * s[1] + part.first * s[2] + part.plane * pass_.target.plane;
    for (int64_t c = 0; c < part.channels; c += kTileChannels<T>, to += kTileChannels<T> * s[1]) {
      const int64_t channels = std::min<int64_t>(kTileChannels<T>, part.channels - c);
      const T* from = sums + c * taps() * part.depth;
      if constexpr (std::is_same_v<Stored, T>) {
        if (in_order) {  // a channel's sums follow one another in memory
          const int64_t rows = part.depth * taps();
          copy_transposed(to, s[1], from, kTileChannels<T>, rows, rows, channels);
          continue;
        }
      }
      for (int64_t p = 0; p < pass_.rows.taps; ++p) {
        for (int64_t q = 0; q < pass_.columns.taps; ++q) {
          store_tap(part, to + p * s[3] + q * s[4],
                    from + (p * pass_.columns.taps + ranks_[q]) * of_tap(part), channels);
        }
      }
    }
  }

  // Stores the sums of a tap: (input channels, channels of a tile).
  void store_tap(const Part& part, Stored* to, const T* from, int64_t channels) const {
    const auto& s = pass_.target.strides;
    if constexpr (std::is_same_v<Stored, T>) {
      if (s[2] == 1) {
        return copy_transposed(to, s[1], from, of_channel(), part.depth, part.depth, channels);
      }
    }
    for (int64_t i = 0; i < part.depth; ++i, from += of_channel()) {
      for (int64_t k = 0; k < channels; ++k) to[k * s[1] + i * s[2]] = rounded<Stored>(from[k]);
    }
  }

  const WeightGrad& pass_;
  Phases row_phases_, column_phases_;
  bool is_merged_;
  std::vector<Run> runs_;
  std::vector<int64_t> ranks_;  // the place of each tap column among sums
  // The output rows with which a tap row reads the image: from a first one to before a last one.
  std::vector<std::pair<int64_t, int64_t>> read_rows_;
};

}  // namespace fastconv::cpu
