// Weight gradients, in layers with many channels.
//
// A task has some channels of the input and of the output's gradient, and sums over all images. It
// stages tiles of both with channels next to one another, and multiplies register tiles: channels
// of the input, which are broadcast, by two vectors of channels of the gradient, over the pixels of
// the tile.
#pragma once

#include "direct.h"

namespace fastconv::cpu {

template <class Stored>
class DirectWeightGrad {
 public:
  using T = Computed<Stored>;

  explicit DirectWeightGrad(const WeightGrad& pass)
      : pass_(pass), row_phases_(pass.rows), column_phases_(pass.columns) {}

  void run(const Parallel& parallel) const {
    const auto& blocks = pass_.blocks;
    const int64_t wide = ceil_div(pass_.channels, blocks.channels);
    const int64_t depth =
        balanced(pass_.depth, blocks.depth, pass_.groups * wide, parallel.threads());
    const int64_t deep = ceil_div(pass_.depth, depth);
    parallel(pass_.groups * wide * deep, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        Part part;
        part.group = task / (wide * deep);
        part.channel = task / deep % wide * blocks.channels;
        part.first = task % deep * depth;
        part.channels = std::min(blocks.channels, pass_.channels - part.channel);
        part.depth = std::min(depth, pass_.depth - part.first);
        compute(part, scratch);
      }
    });
  }

 private:
  struct Part {
    int64_t group, channel, channels, first, depth;
  };

  struct Tile {
    int64_t rows, columns;       // how many of the gradient's
    int64_t row, phase;          // strides of staged pixels of the input
    int64_t depth_pitch, pitch;  // staged channels of a pixel: the input's and the gradient's
  };

  int64_t taps() const { return pass_.rows.taps * pass_.columns.taps; }

  void compute(const Part& part, Scratch& scratch) const {
    const int64_t pitch = ceil_div(part.channels, kTileChannels<T>) * kTileChannels<T>;
    T* sums = scratch.sums.take<T>(taps() * part.depth * pitch);
    std::fill(sums, sums + taps() * part.depth * pitch, T());
    for (int64_t image = 0; image < pass_.images; ++image) {
      for (int64_t y = 0; y < pass_.rows.outputs; y += pass_.blocks.rows) {
        for (int64_t x = 0; x < pass_.columns.outputs; x += pass_.blocks.columns) {
          add_tile(part, image, y, x, pitch, sums, scratch);
        }
      }
    }
    store_sums(part, pitch, sums);
  }

  // Adds what a tile of the gradient's rows and columns, from (y, x) on, contributes.
  void add_tile(const Part& part, int64_t image, int64_t y, int64_t x, int64_t pitch, T* sums,
                Scratch& scratch) const {
    const int64_t high = std::min(pass_.blocks.rows, pass_.rows.outputs - y),
                  wide = std::min(pass_.blocks.columns, pass_.columns.outputs - x);
    const Window rows(pass_.rows, row_phases_, y, high),
        columns(pass_.columns, column_phases_, x, wide);
    const Layout layout(rows, columns);
    T* input = scratch.stage.take<T>(layout.channel * part.depth);
    const auto &s = pass_.input.strides, &g = pass_.grad.strides;
    stage_pixels(input, part.depth,
                 static_cast<const Stored*>(pass_.input.data) + image * s[0] +
                     (part.group * pass_.depth + part.first) * s[1],
                 s, part.depth, rows, columns);
    T* grad = scratch.grad.take<T>(high * wide * pitch);
    const Axis grad_rows{high, high, 1, 1, 1, 0}, grad_columns{wide, wide, 1, 1, 1, 0};
    const Phases all_rows(grad_rows), all_columns(grad_columns);
    stage_tiles(grad,
                static_cast<const Stored*>(pass_.grad.data) + image * g[0] +
                    (part.group * pass_.channels + part.channel) * g[1] + y * g[2] + x * g[3],
                g, part.channels, Window(grad_rows, all_rows, 0, high),
                Window(grad_columns, all_columns, 0, wide));
    int32_t* offsets = scratch.offsets.take<int32_t>(high * wide);
    for (int64_t i = 0; i < high * wide; ++i) {
      offsets[i] = int32_t((i / wide * layout.row + i % wide) * part.depth);
    }
    multiply_tile(part, layout, input, grad, offsets, high * wide, pitch, sums);
  }

  // Stages the gradient as (tiles of channels, pixels, channels of a tile).
  static void stage_tiles(T* to, const Stored* source, const std::array<int64_t, 4>& strides,
                          int64_t channels, const Window& rows, const Window& columns) {
    for (int64_t c = 0; c < channels; c += kTileChannels<T>) {
      stage_pixels(to, kTileChannels<T>, source + c * strides[1], strides,
                   std::min<int64_t>(kTileChannels<T>, channels - c), rows, columns);
      to += kTileChannels<T> * rows.length * columns.length;
    }
  }

  void multiply_tile(const Part& part, const Layout& layout, const T* input, const T* grad,
                     const int32_t* offsets, int64_t pixels, int64_t pitch, T* sums) const {
    const int64_t pieces = ceil_div(part.depth, kTilePositions);
    for (int64_t c = 0; c < part.channels;
         c += kTileChannels<T>, grad += pixels * kTileChannels<T>) {
      const int64_t channels = std::min<int64_t>(kTileChannels<T>, part.channels - c);
      T* to = sums + c * taps() * part.depth;
      for (int64_t pixel = 0; pixel < pixels; pixel += kSteps) {
        const int64_t steps = std::min(kSteps, pixels - pixel);
        for (int64_t p = 0; p < pass_.rows.taps; ++p) {
          for (int64_t q = 0; q < pass_.columns.taps; ++q) {
            const T* left = input + layout.offset(row_phases_, column_phases_, p, q) * part.depth;
            for (int64_t piece = 0; piece < pieces; ++piece) {
              const int64_t i = part.depth * piece / pieces,
                            some = part.depth * (piece + 1) / pieces - i;
              multiply_for<T>(some, channels)(
                  left + i, offsets + pixel, steps, grad + pixel * kTileChannels<T>,
                  kTileChannels<T>,
                  to + (i * taps() + p * pass_.columns.taps + q) * kTileChannels<T>,
                  taps() * kTileChannels<T>, false);
            }
          }
        }
      }
    }
  }

  // Sums are (tiles of channels, input channels, tap rows, tap columns, channels of a tile).
  void store_sums(const Part& part, int64_t pitch, const T* sums) const {
    const auto& s = pass_.target.strides;
    const bool in_order = s[4] == 1 && s[3] == pass_.columns.taps && s[2] == taps();
    Stored* to = static_cast<Stored*>(const_cast<void*>(pass_.target.data)) + part.group * s[0] +
                 part.channel * s[1] + part.first * s[2];
    const int64_t sums_of_tile = part.depth * taps() * kTileChannels<T>;
    for (int64_t c = 0; c < pitch; c += kTileChannels<T>, to += kTileChannels<T> * s[1]) {
      const int64_t channels = std::min<int64_t>(kTileChannels<T>, part.channels - c);
      const T* from = sums + c / kTileChannels<T> * sums_of_tile;
      if constexpr (std::is_same_v<Stored, T>) {
        if (in_order) {  // a channel's sums follow one another in memory
          const int64_t rows = part.depth * taps();
          copy_transposed(to, s[1], from, kTileChannels<T>, rows, rows, channels);
          continue;
        }
      }
      for (int64_t k = 0; k < channels; ++k) store_channel(part, to + k * s[1], from + k);
    }
  }

  void store_channel(const Part& part, Stored* to, const T* from) const {
    const auto& s = pass_.target.strides;
    const int64_t between = taps() * kTileChannels<T>;
    for (int64_t p = 0; p < pass_.rows.taps; ++p) {
      for (int64_t q = 0; q < pass_.columns.taps; ++q, from += kTileChannels<T>) {
        Stored* place = to + p * s[3] + q * s[4];
        for (int64_t i = 0; i < part.depth; ++i) {
          place[i * s[2]] = rounded<Stored>(from[i * between]);
        }
      }
    }
  }

  const WeightGrad& pass_;
  Phases row_phases_, column_phases_;
};

}  // namespace fastconv::cpu
