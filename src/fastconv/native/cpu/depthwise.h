// Depthwise layers, which have one read and one written channel in each group, and the weight
// gradients of layers whose groups have a few.
//
// Vectors hold channels. Where these are neighbours in memory, forward passes read them there, and
// leave padding out. Elsewhere, and in weight gradients, a tile of as many planes as a vector has
// lanes is staged, with zeros for the padding, and transposed on the way.
//
// A weight gradient of wider groups is computed as if the layer was depthwise and had more taps. A
// vector has the written channels of some groups, and there is a stage for each read channel of a
// group, in which a lane has that channel of its own group. So all lanes are used, and no group's
// numbers meet another one's.
#pragma once

#include "epilogue.h"
#include "multiply.h"

namespace fastconv::cpu {

struct DepthwiseScratch {
  Buffer stage, planes, grad, sums, offsets;
};

// How vectors cover the written channels of groups: some groups in one vector, or a part of one.
template <class T>
class Lanes {
 public:
  // Written channels in some lanes of one vector, and the first read channel of their groups.
  struct Part {
    int64_t group, groups, first;  // the first channel of the group, if it is a part of one
    int64_t channels;
    int64_t written, read;  // the first channels of the tensors
  };

  Lanes(int64_t groups, int64_t depth, int64_t channels)
      : groups_(groups),
        depth_(depth),
        channels_(channels),
        together_(std::max<int64_t>(1, kLanes<T> / std::max(depth, channels))),
        pieces_(ceil_div(channels, kLanes<T>)) {
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
      const int64_t group = channels <= kLanes<T> ? lane / channels : 0;
      first_[lane] = int(group < together_ ? group * depth : 0);
    }
  }

  int64_t vectors() const { return ceil_div(groups_, together_) * pieces_; }

  Part part(int64_t vector) const {
    const int64_t group = vector / pieces_ * together_, first = vector % pieces_ * kLanes<T>,
                  groups = std::min(together_, groups_ - group);
    const int64_t channels =
        pieces_ > 1 ? std::min<int64_t>(kLanes<T>, channels_ - first) : groups * channels_;
    return {group, groups, first, channels, group * channels_ + first, group * depth_};
  }

  bool is_depthwise() const { return depth_ == 1 && channels_ == 1; }

  // Calls function(lane, offset) with the weights of a part.
  template <class Function>
  void for_lanes(const Part& part, const std::array<int64_t, 5>& strides,
                 const Function& function) const {
    for (int64_t lane = 0; lane < part.channels; ++lane) {
      const int64_t channel = part.first + lane, group = channel / channels_;
      function(lane,
               (part.group + group) * strides[0] + (channel - group * channels_) * strides[1]);
    }
  }

  // Copies vectors of the first read channels of some groups: each lane will have the `c`-th one of
  // its group.
  void spread(T* to, const T* from, int64_t count, int64_t c) const {
    LaneNumbers<T> which;
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) which[lane] = first_[lane] + int(c);
    for (int64_t i = 0; i < count; i += kLanes<T>) store(to + i, chosen<T>(load(from + i), which));
  }

 private:
  int64_t groups_, depth_, channels_;
  int64_t together_;  // groups of a vector
  int64_t pieces_;    // vectors of a group
  int first_[kLanes<T>];
};

// The elements that some outputs of an axis read, next to one another: an axis of its own, of which
// the outputs are these elements.
inline Axis read_by(const Axis& axis, int64_t first, int64_t outputs) {
  const int64_t elements = (outputs - 1) * axis.step + (axis.taps - 1) * axis.reach + 1;
  return {axis.size, axis.taps ? elements : 0, 1, 1, 1, axis.before - first * axis.step};
}

// Stages planes whose rows follow one another in memory, as a tile has them from a column `left`
// on.
template <class T>
void stage_joined(T* to, int64_t pitch, const T* from, int64_t of_plane, int64_t planes,
                  int64_t rows, int64_t columns) {
  const int64_t count = rows * columns;
  for (int64_t i = 0, x = 0; i < count; i += kLanes<T>) {
    const int64_t some = std::min<int64_t>(kLanes<T>, count - i);
    Vector<T> block[kLanes<T>] = {};
    for (int64_t c = 0; c < planes; ++c) block[c] = load_some(from + c * of_plane + i, some);
    transpose<T>(block);
    for (int64_t j = 0; j < some; ++j, to += kLanes<T>) {
      store(to, block[j]);
      if (++x == columns) x = 0, to += (pitch - columns) * kLanes<T>;
    }
  }
}

// Stages a tile of as many channels as a vector has, which are neighbours in memory.
template <class T>
void stage_vectors(T* to, const T* source, const std::array<int64_t, 4>& strides,
                   const Window& rows, const Window& columns) {
  const auto [top, bottom] = rows.existing(0);
  const auto [left, right] = columns.existing(0);
  for (int64_t y = 0; y < rows.length; ++y) {
    const bool exists = top <= y && y < bottom;
    const int64_t begin = exists ? left : columns.length, end = exists ? right : begin;
    const T* from = source + rows.index(0, y) * strides[2] + columns.index(0, 0) * strides[3];
    for (int64_t x = 0; x < begin; ++x) store(to + x * kLanes<T>, Vector<T>{});
    for (int64_t x = begin; x < end; ++x) {
      // Pixels lie further apart than CPUs foresee; the next tile mostly has the next channels.
      __builtin_prefetch(from + x * strides[3] + kLanes<T>, 0, 2);
      store(to + x * kLanes<T>, load(from + x * strides[3]));
    }
    for (int64_t x = end; x < columns.length; ++x) store(to + x * kLanes<T>, Vector<T>{});
    to += columns.length * kLanes<T>;
  }
}

// Stages a tile of some planes: (rows, columns, lanes of a vector).
template <class Stored>
void stage_planes(Computed<Stored>* to, const Stored* source, const std::array<int64_t, 4>& strides,
                  int64_t planes, const Axis& rows, const Axis& columns) {
  using T = Computed<Stored>;
  const Phases of_rows(rows), of_columns(columns);
  const Window row_window(rows, of_rows, 0, rows.outputs),
      column_window(columns, of_columns, 0, columns.outputs);
  if constexpr (std::is_same_v<Stored, T>) {
    if (strides[1] == 1 && planes == kLanes<T>) {
      return stage_vectors(to, source, strides, row_window, column_window);
    }
    const auto [top, bottom] = row_window.existing(0);
    const auto [left, right] = column_window.existing(0);
    const bool is_joined = strides[3] == 1 && strides[2] == columns.size && strides[1] != 1;
    if (is_joined && right - left == columns.size && columns.size % kLanes<T> && top < bottom) {
      std::fill(to, to + rows.outputs * columns.outputs * kLanes<T>, T());
      return stage_joined(to + (top * columns.outputs + left) * kLanes<T>, columns.outputs,
                          source + row_window.index(0, top) * strides[2], strides[1], planes,
                          bottom - top, columns.size);
    }
  }
  stage_pixels(to, Pieces{kLanes<T>, kLanes<T>, 0}, source, strides, planes, row_window,
               column_window);
}

// Stages a tile of the read channels of some groups: (channels of a group, rows, columns, lanes).
template <class Stored>
void stage_groups(Computed<Stored>* to, const Lanes<Computed<Stored>>& lanes, int64_t depth,
                  int64_t groups, const Stored* source, const std::array<int64_t, 4>& strides,
                  const Axis& rows, const Axis& columns, Buffer& buffer) {
  using T = Computed<Stored>;
  if (lanes.is_depthwise()) return stage_planes(to, source, strides, groups, rows, columns);
  const int64_t count = rows.outputs * columns.outputs * kLanes<T>;
  T* planes = buffer.take<T>(count);
  for (int64_t first = 0; first < depth; first += kLanes<T>) {
    const int64_t some = std::min<int64_t>(kLanes<T>, depth - first);
    stage_planes(planes, source + first * strides[1], strides, groups * some, rows, columns);
    for (int64_t c = 0; c < some; ++c, to += count) lanes.spread(to, planes, count, c);
  }
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

// What passes that gather share.
template <class Stored>
struct DepthwisePass {
  using T = Computed<Stored>;

  static constexpr int kPositions = 8;  // the most columns whose sums are in registers

  static int64_t taps(const Gather& pass) { return pass.rows.taps * pass.columns.taps; }

  static T bias(const Gather& pass, int64_t channel) {
    return pass.bias ? widened(static_cast<const Stored*>(pass.bias)[channel]) : T();
  }

  static const Stored* factor(const Gather& pass, int64_t channel, int64_t plane, int64_t tap) {
    const auto& s = pass.weights.strides;
    return static_cast<const Stored*>(pass.weights.data) + channel * s[0] +
           plane * pass.weights.plane + tap / pass.columns.taps * s[3] +
           tap % pass.columns.taps * s[4];
  }
};

// Stages planes, and computes all residues of an input gradient from one stage.
template <class Stored>
class DepthwisePlanes : DepthwisePass<Stored> {
  using Base = DepthwisePass<Stored>;
  using Base::kPositions, Base::taps;

 public:
  using T = Computed<Stored>;

  explicit DepthwisePlanes(const std::vector<Gather>& passes)
      : passes_(passes),
        pass_(passes[0]),
        rows_(reach_of(&Gather::rows, &Gather::at_rows)),
        columns_(reach_of(&Gather::columns, &Gather::at_columns)),
        epilogue_{pass_.activation, T(pass_.slope)} {}

  bool run(const Parallel& parallel) const {
    Buffer packed;
    const T* factors = pack(packed);
    if (!factors) return false;
    const int64_t wide = pass_.blocks.columns, vectors = ceil_div(pass_.groups, kLanes<T>),
                  across = ceil_div(columns_.outputs, wide),
                  images = pass_.images * pass_.planes.outputs;
    const int64_t high =
        balanced(rows_.outputs, pass_.blocks.rows, images * vectors * across, parallel.threads());
    const int64_t down = ceil_div(rows_.outputs, high);
    parallel(images * vectors * down * across, [&](int64_t begin, int64_t end) {
      DepthwiseScratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        int64_t rest = task;
        Tile tile;
        tile.column = rest % across * wide, rest /= across;
        tile.row = rest % down * high, rest /= down;
        tile.channel = rest % vectors * kLanes<T>, rest /= vectors;
        tile.plane = rest % pass_.planes.outputs;
        tile.image = rest / pass_.planes.outputs;
        tile.rows = std::min(high, rows_.outputs - tile.row);
        tile.columns = std::min(wide, columns_.outputs - tile.column);
        convolve_tile(tile, factors + tile.channel * of_vector(), scratch);
      }
    });
    return true;
  }

 private:
  struct Tile {
    int64_t image, plane, channel, row, rows, column, columns;  // rows and columns of a residue
  };

  // What all passes read along an axis, and the rows or columns of the result.
  struct Reach {
    int64_t outputs;      // of the residue that has the most
    int64_t least, most;  // offsets of the first and last element that an output's taps read
    int64_t step, every, whole;
  };

  Reach reach_of(Axis Gather::* axis, Every Gather::* at) const {
    Reach reach{0, INT64_MAX, INT64_MIN, (pass_.*axis).step, (pass_.*at).step, 0};
    for (const Gather& pass : passes_) {
      const Axis& its = pass.*axis;
      reach.outputs = std::max(reach.outputs, its.outputs);
      reach.whole = std::max(reach.whole, (pass.*at).first + (its.outputs - 1) * reach.every + 1);
      if (taps(pass) == 0) continue;
      reach.least = std::min(reach.least, -its.before);
      reach.most = std::max(reach.most, (its.taps - 1) * its.reach - its.before);
    }
    return reach;
  }

  // What a tile reads along an axis: an axis of its own, of which the outputs are these elements.
  static Axis read_by(const Axis& axis, const Reach& reach, int64_t first, int64_t outputs) {
    const bool reads = reach.least <= reach.most;
    int64_t elements = reads ? (outputs - 1) * reach.step + reach.most - reach.least + 1 : 0;
    // Rows that lie a multiple of 4 KiB apart would replace one another in the L1 cache.
    if (elements * int64_t(kVectorBytes) % 4096 == 0) elements += elements > 0;
    return {axis.size, elements, 1, 1, 1, reads ? -reach.least - first * reach.step : 0};
  }

  // Elements of a channel's factors: those of all passes' taps, and its bias.
  int64_t of_vector() const {
    int64_t count = 1;
    for (const Gather& pass : passes_) count += pass.planes.taps * taps(pass);
    return count;
  }

  // Packs, for each vector of channels, the factors of all passes' taps, and behind them the bias.
  // Returns null if weights are not finite where they need to be.
  const T* pack(Buffer& buffer) const {
    const int64_t vectors = ceil_div(pass_.groups, kLanes<T>), count = of_vector();
    T* factors = buffer.take<T>(vectors * count * kLanes<T>);
    std::fill(factors, factors + vectors * count * kLanes<T>, T());
    T* to = factors;
    for (int64_t channel = 0; channel < pass_.groups; channel += kLanes<T>) {
      const int64_t planes = std::min<int64_t>(kLanes<T>, pass_.groups - channel);
      const T* first = to;
      for (const Gather& pass : passes_) {
        for (int64_t plane = 0; plane < pass.planes.taps; ++plane) {
          for (int64_t tap = 0; tap < taps(pass); ++tap, to += kLanes<T>) {
            copy_row(to, Base::factor(pass, channel, plane, tap), planes, pass.weights.strides[0]);
          }
        }
      }
      if (pass_.needs_finite_weights && !are_finite(first, to - first)) return nullptr;
      for (int64_t c = 0; c < planes; ++c) to[c] = Base::bias(pass_, channel + c);
      to += kLanes<T>;
    }
    return factors;
  }

  void convolve_tile(const Tile& tile, const T* factors, DepthwiseScratch& scratch) const {
    const int64_t planes = std::min<int64_t>(kLanes<T>, pass_.groups - tile.channel);
    const Axis rows = read_by(pass_.rows, rows_, tile.row, tile.rows),
               columns = read_by(pass_.columns, columns_, tile.column, tile.columns);
    const auto [begin, end] = existing_taps(pass_.planes, tile.plane);
    const int64_t of_plane = rows.outputs * columns.outputs * kLanes<T>;
    T* staged = scratch.stage.take<T>((end - begin) * of_plane);
    const auto& s = pass_.source.strides;
    for (int64_t plane = begin; of_plane > 0 && plane < end; ++plane) {
      const int64_t read =
          tile.plane * pass_.planes.step + plane * pass_.planes.reach - pass_.planes.before;
      stage_planes(staged + (plane - begin) * of_plane,
                   static_cast<const Stored*>(pass_.source.data) + tile.image * s[0] +
                       tile.channel * s[1] + read * pass_.source.plane,
                   s, planes, rows, columns);
    }
    const int64_t high = std::min(tile.rows * rows_.every, rows_.whole - tile.row * rows_.every),
                  wide = std::min(tile.columns * columns_.every,
                                  columns_.whole - tile.column * columns_.every);
    T* sums = scratch.sums.take<T>(high * wide * kLanes<T>);
    const T *by = factors, *bias = factors + (of_vector() - 1) * kLanes<T>;
    for (const Gather& pass : passes_) {
      int64_t* offsets = scratch.offsets.take<int64_t>((end - begin) * taps(pass));
      for (int64_t plane = begin, i = 0; plane < end; ++plane) {
        for (int64_t p = 0; p < pass.rows.taps; ++p) {
          for (int64_t q = 0; q < pass.columns.taps; ++q, ++i) {
            const int64_t row = p * pass.rows.reach - pass.rows.before - rows_.least,
                          column = q * pass.columns.reach - pass.columns.before - columns_.least;
            offsets[i] = (plane - begin) * of_plane + (row * columns.outputs + column) * kLanes<T>;
          }
        }
      }
      const Taps some{offsets, (end - begin) * taps(pass), by + begin * taps(pass) * kLanes<T>,
                      bias};
      convolve_residue(pass, tile, some, staged, columns.outputs, sums, wide);
      by += pass.planes.taps * taps(pass) * kLanes<T>;
    }
    finish_planes(tile, planes, high, wide, sums);
  }

  struct Taps {
    const int64_t* offsets;
    int64_t count;
    const T *factors, *bias;
  };

  // Sums a pass's rows and columns of a tile, of which the result's have a pitch of `wide`.
  void convolve_residue(const Gather& pass, const Tile& tile, const Taps& some, const T* staged,
                        int64_t pitch, T* sums, int64_t wide) const {
    constexpr auto kAll = std::make_integer_sequence<int, kPositions>();
    const int64_t high = std::min(tile.rows, pass.rows.outputs - tile.row),
                  columns = std::min(tile.columns, pass.columns.outputs - tile.column);
    const int64_t pieces = ceil_div(std::max<int64_t>(columns, 0), kPositions);
    const auto sum_piece = [&](int64_t y, int64_t piece) {
      T* row = sums +
               ((y * rows_.every + pass.at_rows.first) * wide + pass.at_columns.first) * kLanes<T>;
      const int64_t x = columns * piece / pieces, count = columns * (piece + 1) / pieces - x;
      sum_for(count, kAll)(
          staged + (y * pass.rows.step * pitch + x * pass.columns.step) * kLanes<T>,
          pass.columns.step * kLanes<T>, some, row + x * columns_.every * kLanes<T>,
          columns_.every * kLanes<T>);
    };
    // A row reads most of what the one above does, which stays in the L1 cache if that is little.
    constexpr int64_t kLittle = (24 << 10) / kVectorBytes;
    if (pass.rows.taps * pitch > kLittle) {
      for (int64_t piece = 0; piece < pieces; ++piece) {
        for (int64_t y = 0; y < high; ++y) sum_piece(y, piece);
      }
      return;
    }
    for (int64_t y = 0; y < high; ++y) {
      for (int64_t piece = 0; piece < pieces; ++piece) sum_piece(y, piece);
    }
  }

  using Sum = void (*)(const T*, int64_t, const Taps&, T*, int64_t);

  template <int... kIndex>
  static Sum sum_for(int64_t columns, std::integer_sequence<int, kIndex...>) {
    static constexpr Sum kFound[] = {sum_columns<kIndex + 1>...};
    return kFound[columns - 1];
  }

  // Sums the taps of some columns of a row, which lie `step` apart, to ones that lie `apart`.
  template <int kColumns>
  static void sum_columns(const T* from, int64_t step, const Taps& some, T* to, int64_t apart) {
    const Vector<T> bias = load(some.bias);
    int64_t tap = 0;
    do {
      const bool is_first = tap == 0;
      Vector<T> sums[kColumns] = {};
      for (const int64_t end = std::min(some.count, tap + kSteps); tap < end; ++tap) {
        const Vector<T> by = load(some.factors + tap * kLanes<T>);
        const T* read = from + some.offsets[tap];
#pragma GCC unroll 8
        for (int x = 0; x < kColumns; ++x) sums[x] += by * load(read + x * step);
      }
#pragma GCC unroll 8
      for (int x = 0; x < kColumns; ++x) {
        store(to + x * apart, sums[x] + (is_first ? bias : load(to + x * apart)));
      }
    } while (tap < some.count);
  }

  void finish_planes(const Tile& tile, int64_t planes, int64_t high, int64_t wide,
                     const T* sums) const {
    const auto joined = [&](const Images& images) {
      return images.strides[2] == wide * images.strides[3];
    };
    const auto place = [&](const Images& images, int64_t y) {
      const auto& s = images.strides;
      return static_cast<Stored*>(images.data) + tile.image * s[0] + tile.plane * images.plane +
             tile.channel * s[1] + (tile.row * rows_.every + y) * s[2] +
             tile.column * columns_.every * s[3];
    };
    const bool is_one = joined(pass_.target) && (!pass_.residual.data || joined(pass_.residual));
    const int64_t rows = is_one ? 1 : high, columns = high * wide / rows;
    for (int64_t y = 0; y < rows; ++y, sums += columns * kLanes<T>) {
      Stored* to = place(pass_.target, y);
      const Stored* residual = pass_.residual.data ? place(pass_.residual, y) : nullptr;
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

  const std::vector<Gather>& passes_;
  const Gather& pass_;  // the first one
  Reach rows_, columns_;
  Epilogue<T> epilogue_;
};

// Reads channels that are neighbours in memory there.
template <class Stored>
class DepthwiseChannels : DepthwisePass<Stored> {
  using Base = DepthwisePass<Stored>;
  using Base::kPositions;

 public:
  using T = Computed<Stored>;

  static bool takes(const Gather& pass) {
    // Rows of pixels that are far apart replace one another in the L1 cache where there are many,
    // and columns that read padding are computed one by one.
    constexpr int64_t kManyRows = 7;
    return std::is_same_v<Stored, T> && pass.source.strides[1] == 1 &&
           pass.target.strides[1] == 1 && pass.rows.taps < kManyRows;
  }

  explicit DepthwiseChannels(const Gather& pass)
      : pass_(pass), epilogue_{pass.activation, T(pass.slope)} {}

  void run(const Parallel& parallel) const {
    // (taps, channels), and the bias behind them.
    Buffer packed;
    const int64_t of_plane = Base::taps(pass_);
    T* factors = packed.template take<T>((taps() + 1) * pass_.groups);
    for (int64_t tap = 0; tap < taps(); ++tap) {
      copy_row(factors + tap * pass_.groups, Base::factor(pass_, 0, tap / of_plane, tap % of_plane),
               pass_.groups, pass_.weights.strides[0]);
    }
    T* biases = factors + taps() * pass_.groups;
    for (int64_t c = 0; c < pass_.groups; ++c) biases[c] = Base::bias(pass_, c);
    const auto inner = inner_outputs(pass_.columns, 0, pass_.columns.taps - 1);
    parallel(pass_.images * pass_.planes.outputs * pass_.rows.outputs, [&](int64_t begin,
                                                                           int64_t end) {
      Buffer buffer;
      Read* reads = buffer.take<Read>(taps());
      for (int64_t task = begin; task < end; ++task) {
        const int64_t y = task % pass_.rows.outputs, rest = task / pass_.rows.outputs;
        const int64_t plane = rest % pass_.planes.outputs, image = rest / pass_.planes.outputs;
        for (int64_t x = 0; x < pass_.columns.outputs;) {
          const bool is_inner = inner.first <= x && x < inner.second;
          const int64_t columns = is_inner ? std::min<int64_t>(kPositions, inner.second - x) : 1;
          constexpr auto kAll = std::make_integer_sequence<int, kPositions>();
          convolve_for(columns, kAll)(*this, factors, {image, plane, y, x}, reads,
                                      list_reads(reads, plane, y, x, columns == 1));
          x += columns;
        }
      }
    });
  }

 private:
  // A tap that reads no padding: where it reads, and where its factors are.
  struct Read {
    int64_t offset, factors;
  };

  struct Place {
    int64_t image, plane, row, column;
  };

  int64_t taps() const { return pass_.planes.taps * Base::taps(pass_); }

  // Lists the taps that an output reads elements by. Those of a row's inner outputs are the same.
  int64_t list_reads(Read* to, int64_t plane, int64_t y, int64_t x, bool is_alone) const {
    const auto &planes = pass_.planes, &rows = pass_.rows, &columns = pass_.columns;
    const auto& s = pass_.source.strides;
    const auto [begin, end] = existing_taps(planes, plane);
    int64_t count = 0;
    for (int64_t o = begin; o < end; ++o) {
      const int64_t read = plane * planes.step + o * planes.reach - planes.before;
      for (int64_t p = 0; p < rows.taps; ++p) {
        const int64_t row = y * rows.step + p * rows.reach - rows.before;
        if (row < 0 || row >= rows.size) continue;
        for (int64_t q = 0; q < columns.taps; ++q) {
          const int64_t column = x * columns.step + q * columns.reach - columns.before;
          if (is_alone && (column < 0 || column >= columns.size)) continue;
          to[count++] = {read * pass_.source.plane + row * s[2] + column * s[3],
                         ((o * rows.taps + p) * columns.taps + q) * pass_.groups};
        }
      }
    }
    return count;
  }

  using Convolve = void (*)(const DepthwiseChannels&, const T*, const Place&, const Read*, int64_t);

  template <int... kIndex>
  static Convolve convolve_for(int64_t columns, std::integer_sequence<int, kIndex...>) {
    static constexpr Convolve kFound[] = {convolve_columns<kIndex + 1>...};
    return kFound[columns - 1];
  }

  static T* at(const Images& images, const Place& place) {
    const auto& s = images.strides;
    return static_cast<T*>(images.data) + place.image * s[0] + place.plane * images.plane +
           place.row * s[2] + place.column * s[3];
  }

  // Computes some columns of a row, for all channels.
  template <int kColumns>
  static void convolve_columns(const DepthwiseChannels& self, const T* factors, const Place& place,
                               const Read* reads, int64_t count) {
    const Gather& pass = self.pass_;
    const int64_t step = pass.columns.step * pass.source.strides[3],
                  last = self.taps() * pass.groups;
    const auto& s = pass.residual.strides;
    const T* source =
        static_cast<const T*>(pass.source.data) + place.image * pass.source.strides[0];
    T* to = at(pass.target, place);
    const T* residual = pass.residual.data ? at(pass.residual, place) : nullptr;
    for (int64_t c = 0; c < pass.groups; c += kLanes<T>) {
      const int64_t some = std::min<int64_t>(kLanes<T>, pass.groups - c);
      Vector<T> sums[kColumns] = {};
      const auto add = [&](auto read) {
        for (int64_t i = 0; i < count;) {
          Vector<T> chains[kColumns] = {};
          for (const int64_t end = std::min(count, i + kSteps); i < end; ++i) {
            const T* from = source + reads[i].offset + c;
            const Vector<T> by = read(factors + reads[i].factors + c);
#pragma GCC unroll 8
            for (int x = 0; x < kColumns; ++x) chains[x] += by * read(from + x * step);
          }
#pragma GCC unroll 8
          for (int x = 0; x < kColumns; ++x) sums[x] += chains[x];
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

  explicit DepthwiseWeightGrad(const WeightGrad& pass)
      : pass_(pass), lanes_(pass.groups, pass.depth, pass.channels) {}

  void run(const Parallel& parallel) const {
    const int64_t planes = pass_.planes.taps;
    // A thread's vectors of channels take turns tile by tile, which is the order of memory.
    parallel(lanes_.vectors() * planes, [&](int64_t begin, int64_t end) {
      DepthwiseScratch scratch;
      const int64_t count = (end - begin) * factors();
      Vector<T>* sums = scratch.sums.take<Vector<T>>(2 * count);
      Vector<T>* of_plane = sums + count;
      std::fill(sums, sums + count, Vector<T>{});
      for (int64_t image = 0; image < pass_.images; ++image) {
        for (int64_t plane = 0; plane < pass_.planes.outputs; ++plane) {
          // Sums of a plane are chains of their own.
          std::fill(of_plane, of_plane + count, Vector<T>{});
          for (int64_t y = 0; y < pass_.rows.outputs; y += pass_.blocks.rows) {
            for (int64_t x = 0; x < pass_.columns.outputs; x += pass_.blocks.columns) {
              for (int64_t task = begin; task < end; ++task) {
                const auto& axis = pass_.planes;
                const int64_t read = plane * axis.step + task % planes * axis.reach - axis.before;
                if (read < 0 || read >= axis.size) continue;
                const Part part = lanes_.part(task / planes);
                add_part(part, place(pass_.input, image, read, part.read),
                         place(pass_.grad, image, plane, part.written), y, x,
                         of_plane + (task - begin) * factors(), scratch);
              }
            }
          }
          for (int64_t i = 0; i < count; ++i) sums[i] += of_plane[i];
        }
      }
      for (int64_t task = begin; task < end; ++task) {
        store_sums(lanes_.part(task / planes), task % planes, sums + (task - begin) * factors());
      }
    });
  }

 private:
  using Part = typename Lanes<T>::Part;

  // The taps that are summed together, in registers, for each element of the gradient.
  static constexpr int kMostTaps = 9;

  // The taps of all read channels of a group.
  int64_t factors() const { return pass_.rows.taps * pass_.columns.taps * pass_.depth; }

  static const Stored* place(const Images& images, int64_t image, int64_t plane, int64_t channel) {
    return static_cast<const Stored*>(images.data) + image * images.strides[0] +
           plane * images.plane + channel * images.strides[1];
  }

  // Rows of vectors: the gradient's, and what the first tap reads for them.
  struct Rows {
    const T *grad, *input;
    int64_t grad_row, grad_step, input_row, input_step;  // strides
    int64_t rows, columns;
  };

  using Sum = void (*)(const Rows&, const int64_t*, Vector<T>*);

  template <bool kIsStaged, int... kIndex>
  static Sum sum_for(int64_t taps, std::integer_sequence<int, kIndex...>) {
    static constexpr Sum kFound[] = {sum_taps<kIndex + 1, kIsStaged>...};
    return kFound[taps - 1];
  }

  // Adds the products of rows for taps whose inputs lie at these offsets.
  static void add_rows(const Rows& rows, const int64_t* offsets, int64_t taps, Vector<T>* sums) {
    constexpr auto kAll = std::make_integer_sequence<int, kMostTaps>();
    const int64_t groups = ceil_div(taps, kMostTaps);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = taps * group / groups, some = taps * (group + 1) / groups - first;
      const Sum sum =
          rows.grad_step == kLanes<T> ? sum_for<true>(some, kAll) : sum_for<false>(some, kAll);
      sum(rows, offsets + first, sums + first);
    }
  }

  // With few taps there are more chains for each, as an addition waits for the one before.
  template <int kTaps, bool kIsStaged>
  static void sum_taps(const Rows& rows, const int64_t* offsets, Vector<T>* sums) {
    constexpr int kChains = kTaps == 1 ? 4 : kTaps <= 4 ? 2 : 1;
    Vector<T> chains[kChains][kTaps] = {};
    const T *grad = rows.grad, *input = rows.input;
    for (int64_t y = 0; y < rows.rows; ++y, grad += rows.grad_row, input += rows.input_row) {
      int64_t x = 0;
      const auto add = [&](int chain, int64_t at) {
        const int64_t step = kIsStaged ? kLanes<T> : rows.grad_step;
        if (!kIsStaged) __builtin_prefetch(grad + at * step + kLanes<T>, 0, 2);
        const Vector<T> by = load(grad + at * step);
        const T* from = input + at * rows.input_step;
#pragma GCC unroll 16
        for (int tap = 0; tap < kTaps; ++tap) chains[chain][tap] += by * load(from + offsets[tap]);
      };
      for (; x + kChains <= rows.columns; x += kChains) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) add(chain, x + chain);
      }
      for (; x < rows.columns; ++x) add(0, x);
    }
#pragma GCC unroll 16
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) sums[tap] += chains[chain][tap];
    }
  }

  // Adds what a tile of the gradient's rows and columns, from (y, x) on, contributes.
  void add_part(const Part& part, const Stored* input, const Stored* grad, int64_t y, int64_t x,
                Vector<T>* sums, DepthwiseScratch& scratch) const {
    const int64_t high = std::min(pass_.blocks.rows, pass_.rows.outputs - y),
                  wide = std::min(pass_.blocks.columns, pass_.columns.outputs - x);
    const Axis rows = read_by(pass_.rows, y, high), columns = read_by(pass_.columns, x, wide);
    const int64_t of_channel = rows.outputs * columns.outputs * kLanes<T>;
    T* inputs = scratch.stage.take<T>(pass_.depth * of_channel);
    stage_groups(inputs, lanes_, pass_.depth, part.groups, input, pass_.input.strides, rows,
                 columns, scratch.planes);
    const auto& g = pass_.grad.strides;
    const Stored* from = grad + y * g[2] + x * g[3];
    if constexpr (std::is_same_v<Stored, T>) {
      // A gradient of which vectors are read once, and that has no padding, needs no stage.
      if (g[1] == 1 && part.channels == kLanes<T> && factors() <= kMostTaps) {
        return add_tile(inputs, of_channel, columns.outputs, from, g[2], g[3], high, wide, sums,
                        scratch);
      }
    }
    T* grads = scratch.grad.take<T>(high * wide * kLanes<T>);
    stage_planes(grads, from, g, part.channels, Axis{high, high, 1, 1, 1, 0},
                 Axis{wide, wide, 1, 1, 1, 0});
    add_tile(inputs, of_channel, columns.outputs, grads, wide * kLanes<T>, kLanes<T>, high, wide,
             sums, scratch);
  }

  void add_tile(const T* input, int64_t of_channel, int64_t pitch, const T* grad, int64_t grad_row,
                int64_t grad_step, int64_t high, int64_t wide, Vector<T>* sums,
                DepthwiseScratch& scratch) const {
    const auto &rows = pass_.rows, &columns = pass_.columns;
    int64_t* offsets = scratch.offsets.take<int64_t>(factors());
    for (int64_t p = 0, i = 0; p < rows.taps; ++p) {
      for (int64_t q = 0; q < columns.taps; ++q) {
        for (int64_t c = 0; c < pass_.depth; ++c, ++i) {
          offsets[i] = c * of_channel + (p * rows.reach * pitch + q * columns.reach) * kLanes<T>;
        }
      }
    }
    // A chain has some rows, or a part of a long one.
    const int64_t across = std::min(wide, kSteps), most = std::max<int64_t>(1, kSteps / wide);
    for (int64_t y = 0; y < high; y += most) {
      for (int64_t x = 0; x < wide; x += across) {
        const Rows some{grad + y * grad_row + x * grad_step,
                        input + (y * rows.step * pitch + x * columns.step) * kLanes<T>,
                        grad_row,
                        grad_step,
                        rows.step * pitch * kLanes<T>,
                        columns.step * kLanes<T>,
                        std::min(most, high - y),
                        std::min(across, wide - x)};
        add_rows(some, offsets, factors(), sums);
      }
    }
  }

  void store_sums(const Part& part, int64_t plane, const Vector<T>* sums) const {
    const auto& s = pass_.target.strides;
    Stored* to =
        static_cast<Stored*>(const_cast<void*>(pass_.target.data)) + plane * pass_.target.plane;
    for (int64_t p = 0; p < pass_.rows.taps; ++p) {
      for (int64_t q = 0; q < pass_.columns.taps; ++q) {
        for (int64_t c = 0; c < pass_.depth; ++c, ++sums) {
          Stored* tap = to + p * s[3] + q * s[4] + c * s[2];
          lanes_.for_lanes(part, s, [&](int64_t lane, int64_t offset) {
            tap[offset] = rounded<Stored>((*sums)[lane]);
          });
        }
      }
    }
  }

  const WeightGrad& pass_;
  Lanes<T> lanes_;
};

}  // namespace fastconv::cpu
