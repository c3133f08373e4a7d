// A tile's part of a tensor, staged: copied next to one another, with zeros for the padding.
//
// The elements of an axis that one tap reads are `step` apart, so an axis is split into its phases,
// the elements equal modulo the step, and neighbouring outputs read neighbouring elements. Phases
// that no tap reads are left out.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace fastconv::cpu {

// A quotient of numbers that are not negative. Many CPUs divide 64 bits three times as slowly
// as 32.
inline int64_t quotient(int64_t number, int64_t by) {
  const bool is_short = (number | by) >> 32 == 0;
  return is_short ? int64_t(uint32_t(number) / uint32_t(by)) : number / by;
}

inline int64_t ceil_div(int64_t number, int64_t by) { return quotient(number + by - 1, by); }

// As few parts of an axis as there can be, of at most `most` elements: all about equal, the longer
// ones first. A loop over register tiles asks for parts, so these come without divisions.
class Parts {
 public:
  Parts(int64_t count, int64_t most)
      : count_(ceil_div(count, most)),
        least_(quotient(count, std::max<int64_t>(count_, 1))),
        longer_(count - least_ * count_) {}

  int64_t count() const { return count_; }
  int64_t begin(int64_t part) const { return part * least_ + std::min(part, longer_); }
  int64_t size(int64_t part) const { return least_ + (part < longer_); }

 private:
  int64_t count_, least_;
  int64_t longer_;  // how many parts have one element more
};

// The size of parts of an axis: at most `most`, all about equal, and so many of them that threads
// have equal shares of the tasks, of which there are `others` for each part.
inline int64_t balanced(int64_t count, int64_t most, int64_t others, int64_t threads) {
  int64_t parts = ceil_div(count, most);
  while (parts < count && parts * others < 4 * threads && parts * others % threads != 0) ++parts;
  return ceil_div(count, std::max<int64_t>(parts, 1));
}

// Memory at a multiple of a vector's size, as large as it has been asked to be.
class Buffer {
 public:
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(T) + kVectorBytes) / kVectorBytes * kVectorBytes;
    if (bytes > bytes_) {
      memory_.reset(std::aligned_alloc(kVectorBytes, bytes));
      if (!memory_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t bytes_ = 0;
};

// The phases of an axis: which there are, and where each tap reads.
struct Phases {
  std::vector<int64_t> phases;  // in the order in which they are staged
  struct Tap {
    int64_t slot, index;  // the index of its phase, and of the element that output 0 reads
  };
  std::vector<Tap> taps;
  int64_t reach = 0;  // by how much a phase has more elements than there are outputs

  explicit Phases(const Axis& axis) {
    for (int64_t tap = 0; tap < axis.taps; ++tap) {
      const int64_t phase = tap * axis.reach % axis.step, index = tap * axis.reach / axis.step;
      auto found = std::find(phases.begin(), phases.end(), phase);
      if (found == phases.end()) found = phases.insert(phases.end(), phase);
      taps.push_back({found - phases.begin(), index});
      reach = std::max(reach, index);
    }
  }

  int64_t count() const { return int64_t(phases.size()); }
  int64_t length(int64_t outputs) const { return outputs + reach; }
};

// The taps of an output that read elements that exist: from `begin` to before `end`.
inline std::pair<int64_t, int64_t> existing_taps(const Axis& axis, int64_t output) {
  const int64_t first = output * axis.step - axis.before;
  int64_t begin = 0, end = axis.taps;
  while (begin < end && first + begin * axis.reach < 0) ++begin;
  while (end > begin && first + (end - 1) * axis.reach >= axis.size) --end;
  return {begin, end};
}

// The outputs of which a tap reads elements that exist: from `begin` to before `end`.
inline std::pair<int64_t, int64_t> existing_outputs(const Axis& axis, int64_t tap) {
  const int64_t first = tap * axis.reach - axis.before;
  const int64_t begin = first < 0 ? std::min(axis.outputs, ceil_div(-first, axis.step)) : 0;
  const int64_t end = first < axis.size
                          ? std::min(axis.outputs, quotient(axis.size - 1 - first, axis.step) + 1)
                          : 0;
  return {begin, std::max(begin, end)};
}

// Whose indices in a tensor a stage has: element i of a phase is first + phase + i * step.
struct Window {
  const Axis* axis;
  const Phases* phases;
  int64_t first, length;

  Window(const Axis& axis, const Phases& phases, int64_t first_output, int64_t outputs)
      : axis(&axis),
        phases(&phases),
        first(first_output * axis.step - axis.before),
        length(phases.length(outputs)) {}

  int64_t index(int64_t phase, int64_t i) const { return first + phase + i * axis->step; }

  // The elements of a phase that exist: from `begin` to before `end`.
  std::pair<int64_t, int64_t> existing(int64_t phase) const {
    const int64_t least = first + phase, step = axis->step, size = axis->size;
    // A division takes longer than a small plane's other work.
    const auto divided = [step](int64_t count) { return step == 1 ? count : count / step; };
    const int64_t begin = least < 0 ? std::min(length, divided(-least + step - 1)) : 0;
    const int64_t end = least >= size ? 0 : std::min(length, divided(size - 1 - least) + 1);
    return {begin, std::max(begin, end)};
  }
};

// The layout of a stage: channels, phases of rows, phases of columns, rows, columns.
struct Layout {
  int64_t row, phase, channel;  // strides in elements

  Layout(const Window& rows, const Window& columns)
      : row(columns.length),
        phase(rows.length * columns.length),
        channel(phase * rows.phases->count() * columns.phases->count()) {}

  // Where output (0, 0) reads a tap in its channel.
  int64_t offset(const Phases& rows, const Phases& columns, int64_t p, int64_t q) const {
    const auto [row_slot, y] = rows.taps[p];
    const auto [column_slot, x] = columns.taps[q];
    return (row_slot * columns.count() + column_slot) * phase + y * row + x;
  }
};

template <class Stored>
void copy_row(Computed<Stored>* to, const Stored* from, int64_t count, int64_t stride) {
  if constexpr (std::is_same_v<Stored, Computed<Stored>>) {
    if (stride == 1) {
      constexpr int kStep = kLanes<Stored>;
      for (int64_t i = 0; i < count; i += kStep) {
        store_some(to + i, load_some(from + i, count - i), count - i);
      }
      return;
    }
  }
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = widened(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = widened(from[i * stride]);
  }
}

// Copies one row of a phase for all channels of a stage: (channels, columns), at `to`.
template <class Stored>
void copy_columns(Computed<Stored>* to, int64_t to_channel, const Stored* from,
                  int64_t from_channel, int64_t from_column, int64_t columns, int64_t channels) {
  if constexpr (std::is_same_v<Stored, Computed<Stored>>) {
    if (from_channel == 1 && channels > 1) {
      return copy_transposed(to, to_channel, from, from_column, columns, columns, channels);
    }
  }
  for (int64_t c = 0; c < channels; ++c) {
    copy_row(to + c * to_channel, from + c * from_channel, columns, from_column);
  }
}

// Fills a stage with channels from `source` on, whose strides are those of a tensor.
template <class Stored>
void stage(Computed<Stored>* to, const Layout& layout, const Stored* source,
           const std::array<int64_t, 4>& strides, int64_t channels, const Window& rows,
           const Window& columns) {
  using T = Computed<Stored>;
  const auto [_, channel_stride, row_stride, column_stride] = strides;
  for (const int64_t row_phase : rows.phases->phases) {
    for (const int64_t column_phase : columns.phases->phases) {
      const auto [top, bottom] = rows.existing(row_phase);
      const auto [left, right] = columns.existing(column_phase);
      for (int64_t y = 0; y < rows.length; ++y, to += layout.row) {
        const bool exists = top <= y && y < bottom;
        const int64_t begin = exists ? left : columns.length, end = exists ? right : begin;
        for (int64_t c = 0; c < channels; ++c) {
          T* row = to + c * layout.channel;
          for (int64_t x = 0; x < begin; ++x) row[x] = T();
          for (int64_t x = end; x < columns.length; ++x) row[x] = T();
        }
        if (begin == end) continue;
        const Stored* from = source + rows.index(row_phase, y) * row_stride +
                             columns.index(column_phase, begin) * column_stride;
        copy_columns(to + begin, layout.channel, from, channel_stride,
                     column_stride * columns.axis->step, end - begin, channels);
      }
    }
  }
}

// Copies a pixel's channels, with zeros up to `pitch`.
template <class Stored>
void copy_pixel(Computed<Stored>* to, int64_t pitch, const Stored* from, int64_t channels,
                int64_t stride) {
  using T = Computed<Stored>;
  if constexpr (std::is_same_v<Stored, T>) {
    if (stride == 1) {
      int64_t c = 0;
      for (; c + kLanes<T> <= channels; c += kLanes<T>) store(to + c, load(from + c));
      for (; c < pitch; c += kLanes<T>) {
        const int64_t some = std::max<int64_t>(channels - c, 0);
        store_some(to + c, load_some(from + c, some), pitch - c);
      }
      return;
    }
  }
  copy_row(to, from, channels, stride);
  std::fill(to + channels, to + pitch, T());
}

// How pixels are staged: channels in pieces of up to `wide`, and each piece as (pixels, channels).
struct Pieces {
  int64_t wide, pitch;  // channels of a piece, and elements between neighbouring pixels
  int64_t apart;        // elements between pieces
};

// Copies a tile's pixels, with zeros where an index lies outside of the tensor. What follows a
// piece's channels up to the pitch are zeros, or the next piece's first channels.
template <class Stored>
void stage_pixels(Computed<Stored>* to, const Pieces& pieces, const Stored* source,
                  const std::array<int64_t, 4>& strides, int64_t channels, const Window& rows,
                  const Window& columns) {
  using T = Computed<Stored>;
  const int64_t wide = pieces.wide, pitch = pieces.pitch, apart = pieces.apart;
  const int64_t channel_stride = strides[1], step = strides[3] * columns.axis->step;
  const auto for_pieces = [&](T* place, const auto& function) {
    for (int64_t c = 0; c < channels; c += wide, place += apart) {
      function(place, c, std::min(pitch, channels - c));
    }
  };
  if (channel_stride != 1 && channels > wide) {  // a piece after the other: rows are read in order
    return for_pieces(to, [&](T* place, int64_t c, int64_t some) {
      stage_pixels(place, {pitch, pitch, 0}, source + c * channel_stride, strides, some, rows,
                   columns);
    });
  }
  for (const int64_t row_phase : rows.phases->phases) {
    for (const int64_t column_phase : columns.phases->phases) {
      const auto [top, bottom] = rows.existing(row_phase);
      const auto [left, right] = columns.existing(column_phase);
      for (int64_t y = 0; y < rows.length; ++y, to += columns.length * pitch) {
        const bool exists = top <= y && y < bottom && left < right;
        const int64_t begin = exists ? left : columns.length, end = exists ? right : begin;
        if (begin > 0 || end < columns.length) {
          for_pieces(to, [&](T* row, int64_t, int64_t) {
            std::fill(row, row + begin * pitch, T());
            std::fill(row + end * pitch, row + columns.length * pitch, T());
          });
        }
        if (!exists) continue;
        const Stored* from = source + rows.index(row_phase, y) * strides[2] +
                             columns.index(column_phase, begin) * strides[3];
        if constexpr (std::is_same_v<Stored, T>) {
          if (step == 1 && channel_stride != 1) {
            for_pieces(to + begin * pitch, [&](T* row, int64_t c, int64_t some) {
              copy_transposed(row, pitch, from + c * channel_stride, channel_stride, some, pitch,
                              end - begin);
            });
            continue;
          }
        }
        if constexpr (std::is_same_v<Stored, T>) {
          if (channel_stride == 1 && channels <= wide && channels % kLanes<T> == 0 &&
              channels == pitch) {
            for (int64_t x = begin; x < end; ++x, from += step) {
              for (int64_t c = 0; c < pitch; c += kLanes<T>) {
                store(to + x * pitch + c, load(from + c));
              }
            }
            continue;
          }
        }
        for (int64_t x = begin; x < end; ++x, from += step) {
          for_pieces(to + x * pitch, [&](T* pixel, int64_t c, int64_t some) {
            copy_pixel(pixel, pitch, from + c * channel_stride, some, channel_stride);
          });
        }
      }
    }
  }
}

}  // namespace fastconv::cpu
