// Layers whose kernels are 1x1, without padding: products of matrices.
//
//   result[m][n] = sum over k of left[m][k] * right[k][n]
//
// n is what neighbours in the result's memory differ by, so sums are stored as they are. Of images
// with channels last, m are pixels and n are channels; of others, m are channels and n are pixels.
// In weight gradients k are the pixels of all images. A task has a block of m and n, and adds up
// one block of k after the other.
#pragma once

#include "direct.h"

namespace fastconv::cpu {

// An axis of a matrix: the pixels of images or volumes, or channels, which are columns of a single
// row.
struct Places {
  int64_t images, planes, rows, columns;
  int64_t image, plane, row, column;  // strides

  struct Run {
    int64_t offset, count;
  };

  static Places of_channels(int64_t count, int64_t stride) {
    return {1, 1, 1, count, 0, 0, 0, stride};
  }

  // The pixels that a pass writes, or those that it reads.
  static Places of_pixels(const auto& pass, const Images& of, bool is_read) {
    const auto& s = of.strides;
    const auto step = [is_read](const Axis& axis) { return is_read ? axis.step : 1; };
    return {pass.images,
            pass.planes.outputs,
            pass.rows.outputs,
            pass.columns.outputs,
            s[0],
            of.plane * step(pass.planes),
            s[2] * step(pass.rows),
            s[3] * step(pass.columns)};
  }

  int64_t lines() const { return images * planes * rows; }
  int64_t count() const { return lines() * columns; }

  bool has_joined_rows() const { return row == columns * column; }
  bool has_joined_planes() const { return rows == 1 && plane == columns * column; }
  bool has_joined_images() const { return planes * rows == 1 && image == columns * column; }
  void join_rows() { columns *= rows, rows = 1; }
  void join_planes() { columns *= planes, planes = 1; }
  void join_images() { columns *= images, images = 1; }

  // Calls function(offset, count) for parts of the range whose elements are `column` apart.
  template <class Function>
  void for_runs(int64_t begin, int64_t end, const Function& function) const {
    if (lines() == 1) return function(begin * column, end - begin);
    for (int64_t i = begin; i < end;) {
      const int64_t line = quotient(i, columns), x = i - line * columns,
                    slice = quotient(line, rows), n = quotient(slice, planes);
      const int64_t some = std::min(columns - x, end - i);
      function(n * image + (slice - n * planes) * plane + (line - slice * rows) * row + x * column,
               some);
      i += some;
    }
  }
};

// Takes rows together, planes, and images, where they follow one another in all tensors.
template <class... Others>
void join(Places& first, Others&... others) {
  if (first.rows > 1 && (first.has_joined_rows() && ... && others.has_joined_rows())) {
    first.join_rows(), (others.join_rows(), ...);
  }
  if (first.planes > 1 && (first.has_joined_planes() && ... && others.has_joined_planes())) {
    first.join_planes(), (others.join_planes(), ...);
  }
  if (first.images > 1 && (first.has_joined_images() && ... && others.has_joined_images())) {
    first.join_images(), (others.join_images(), ...);
  }
}

template <class Stored>
struct Matrix {
  Stored* data;
  int64_t group;  // the stride of groups
  Places rows, columns;

  Matrix flipped() const { return {data, group, columns, rows}; }
};

// Copies a part of a matrix; its rows will lie `to_row` apart.
template <class Stored>
void copy_part(Computed<Stored>* to, int64_t to_row, const Matrix<const Stored>& matrix,
               int64_t group, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const Stored* data = matrix.data + group * matrix.group;
  const int64_t down = matrix.rows.column, right = matrix.columns.column;
  matrix.rows.for_runs(row, row + rows, [&](int64_t row_offset, int64_t high) {
    auto* place = to;
    matrix.columns.for_runs(column, column + columns, [&](int64_t offset, int64_t wide) {
      const Stored* from = data + row_offset + offset;
      if constexpr (std::is_same_v<Stored, Computed<Stored>>) {
        if (down == 1 && right != 1) {
          copy_transposed(place, to_row, from, right, wide, wide, high);
          place += wide;
          return;
        }
      }
      for (int64_t y = 0; y < high; ++y) {
        copy_row(place + y * to_row, from + y * down, wide, right);
      }
      place += wide;
    });
    to += high * to_row;
  });
}

// Requests a part of a matrix from memory, ahead of its copying: a share of its rows at a time.
template <class Stored>
class Requests {
 public:
  // Nothing, unless the elements of rows or of columns are neighbours in memory.
  Requests(const Matrix<const Stored>& matrix, int64_t group, int64_t row, int64_t rows,
           int64_t column, int64_t columns, int64_t shares) {
    const bool is_flipped = matrix.columns.column != 1;
    if (is_flipped && matrix.rows.column != 1) return;
    matrix_ = is_flipped ? matrix.flipped() : matrix;
    matrix_.data += group * matrix.group;
    row_ = is_flipped ? column : row, end_ = row_ + (is_flipped ? columns : rows);
    column_ = is_flipped ? row : column, columns_ = is_flipped ? rows : columns;
    pace_ = ceil_div((end_ - row_) << kFraction, shares);
    position_ = row_ << kFraction;
  }

  // Requests the next share.
  void next() {
    position_ += pace_;
    const int64_t last = std::min(end_, position_ >> kFraction);
    if (row_ >= last) return;
    constexpr int64_t kLine = 64 / sizeof(Stored);
    matrix_.rows.for_runs(row_, last, [&](int64_t row_offset, int64_t high) {
      matrix_.columns.for_runs(column_, column_ + columns_, [&](int64_t offset, int64_t wide) {
        const Stored* from = matrix_.data + row_offset + offset;
        for (int64_t y = 0; y < high; ++y, from += matrix_.rows.column) {
          for (int64_t x = 0; x < wide; x += kLine) __builtin_prefetch(from + x);
        }
      });
    });
    row_ = last;
  }

 private:
  static constexpr int kFraction = 16;  // bits of a fraction of a row

  Matrix<const Stored> matrix_{};
  int64_t row_ = 0, end_ = 0, column_ = 0, columns_ = 0;
  int64_t pace_ = 0, position_ = 0;  // the rows of a share, and those up to here, with fractions
};

template <class Stored>
class MatrixProduct {
 public:
  using T = Computed<Stored>;

  MatrixProduct(const Matrix<const Stored>& left, const Matrix<const Stored>& right,
                const Matrix<Stored>& result, const Matrix<const Stored>& residual = {})
      : left(left), right(right), result(result), residual(residual) {}

  Matrix<const Stored> left, right;
  Matrix<Stored> result;
  Matrix<const Stored> residual;  // its data may be null
  int64_t groups = 1;
  const Stored* bias = nullptr;
  int64_t bias_group = 0;  // the stride of groups
  bool has_row_bias = false;
  Epilogue<T> epilogue{kIdentity, T()};
  Blocks blocks{};  // rows and columns of a task's block
  // Whether an operand is packed once for all tasks, or by each task for itself.
  bool shares_left = false, shares_right = false;

  void run(const Parallel& parallel) {
    m_ = result.rows.count(), n_ = result.columns.count(), k_ = left.columns.count();
    blocks.rows =
        balanced(m_, blocks.rows, groups * ceil_div(n_, blocks.columns), parallel.threads());
    steps_ = k_ <= kLongSteps ? kLongSteps : kSteps;
    depth_ = ceil_div(blocks.depth, steps_) * steps_;
    is_pitched_ = left.columns.column == 1;
    is_left_in_place_ = !is_pitched_ && is_left_read_in_place();
    is_right_in_place_ = !shares_right && is_right_read_in_place();
    if (is_left_in_place_) shares_left = false;
    Buffer left_buffer, right_buffer;
    if (shares_left) share_left(left_buffer, parallel);
    if (shares_right) share_right(right_buffer, parallel);
    const int64_t high = ceil_div(m_, blocks.rows), wide = ceil_div(n_, blocks.columns);
    parallel(groups * high * wide, [&](int64_t begin, int64_t end) {
      TaskScratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        const Block block = block_of(task, high, wide);
        compute(block, task + 1 < end ? block_of(task + 1, high, wide) : Block{}, scratch);
      }
    });
  }

 private:
  struct Block {
    int64_t group, m, rows, n, columns;
  };

  Block block_of(int64_t task, int64_t high, int64_t wide) const {
    const int64_t m = task / wide % high * blocks.rows, n = task % wide * blocks.columns;
    return {task / wide / high, m, std::min(blocks.rows, m_ - m), n,
            std::min(blocks.columns, n_ - n)};
  }

  struct TaskScratch : Scratch {
    Buffer rows, residual_rows;
  };

  // A panel of the result: as many columns as a register tile has, and where they are in memory.
  struct Panel {
    int64_t n, columns, runs;
    Places::Run results[kTileChannels<T>], residuals[kTileChannels<T>];
  };

  // --- Packing ---
  // The left matrix has, for each block of rows, blocks of `depth` columns, and these have register
  // tiles of rows. If a row's columns are neighbours in memory, a tile has a cache line of each of
  // its rows after the other. Or else its columns lie kApart apart. The right matrix has panels of
  // kTileChannels columns.

  static constexpr int64_t kApart = 16;
  static_assert(kTilePositions <= kApart);

  // Elements of a register tile of rows, for so many columns.
  int64_t tile_elements(int64_t columns) const {
    return is_pitched_ ? ceil_div(columns, kLine<T>) * kLine<T> * kTilePositions : kApart * columns;
  }

  // Elements of a block of rows, for so many columns.
  int64_t left_elements(int64_t rows, int64_t columns) const {
    return ceil_div(rows, kTilePositions) * tile_elements(columns);
  }

  // Copies some columns of a row, from column `x` of its register tile on.
  static void copy_to_lines(T* row, int64_t x, const Stored* from, int64_t columns,
                            int64_t stride) {
    constexpr int64_t kNext = kLine<T> * kTilePositions;
    const int64_t rest = x % kLine<T>;
    row += x / kLine<T> * kNext;
    if (rest) {
      const int64_t some = std::min(kLine<T> - rest, columns);
      copy_row(row + rest, from, some, stride);
      row += kNext, from += some * stride, columns -= some;
    }
    if constexpr (std::is_same_v<Stored, T>) {
      for (; stride == 1 && columns >= kLine<T>; row += kNext) {
        for (int v = 0; v < kLine<T>; v += kLanes<T>) store(row + v, load(from + v));
        from += kLine<T>, columns -= kLine<T>;
      }
    }
    for (; columns > 0; row += kNext) {
      const int64_t some = std::min(kLine<T>, columns);
      copy_row(row, from, some, stride);
      from += some * stride, columns -= some;
    }
  }

  void pack_left(T* to, const Block& block, int64_t k, int64_t steps) const {
    constexpr int64_t kSome = 16;  // read together, while what is read stays in the L1 cache
    const Parts pieces(block.rows, kTilePositions);
    if (is_pitched_) {
      const Stored* data = left.data + block.group * left.group;
      for (int64_t piece = 0; piece < pieces.count(); ++piece, to += tile_elements(steps)) {
        const int64_t row = block.m + pieces.begin(piece);
        T* place = to;
        left.rows.for_runs(row, row + pieces.size(piece), [&](int64_t row_offset, int64_t high) {
          int64_t x = 0;
          left.columns.for_runs(k, k + steps, [&](int64_t offset, int64_t wide) {
            const Stored* from = data + row_offset + offset;
            for (int64_t y = 0; y < high; ++y, from += left.rows.column) {
              copy_to_lines(place + y * kLine<T>, x, from, wide, left.columns.column);
            }
            x += wide;
          });
          place += high * kLine<T>;
        });
      }
      return;
    }
    for (int64_t i = 0; i < steps; i += kSome) {
      for (int64_t piece = 0; piece < pieces.count(); ++piece) {
        copy_part(to + (piece * steps + i) * kApart, kApart, left.flipped(), block.group, k + i,
                  std::min(kSome, steps - i), block.m + pieces.begin(piece), pieces.size(piece));
      }
    }
  }

  // Packs some panels, which will lie `apart`.
  void pack_right(T* to, int64_t apart, int64_t group, int64_t n, int64_t columns, int64_t k,
                  int64_t steps) const {
    // Where columns are neighbours in memory, some rows of all panels are read together.
    const int64_t some = right.rows.column == 1 ? steps : 8;
    for (int64_t i = 0; i < steps; i += some) {
      const int64_t high = std::min(some, steps - i);
      T* panel = to + i * kTileChannels<T>;
      for (int64_t x = 0; x < columns; x += kTileChannels<T>, panel += apart) {
        const int64_t wide = std::min<int64_t>(kTileChannels<T>, columns - x);
        if (wide < kTileChannels<T>) std::fill(panel, panel + high * kTileChannels<T>, T());
        if (copy_rows(panel, group, k + i, high, n + x, wide)) continue;
        copy_part(panel, kTileChannels<T>, right, group, k + i, high, n + x, wide);
      }
    }
  }

  // Whether a panel of the right matrix is whole and its columns follow one another in memory.
  bool is_in_line(int64_t n, int64_t columns) const {
    const int64_t line = right.columns.columns;
    return columns == kTileChannels<T> && n % line + columns <= line && has_rows(right);
  }

  // An element of the right matrix.
  const T* in_line(int64_t group, int64_t k, int64_t n) const {
    const T* found = at(right, group, k, 0);
    right.columns.for_runs(n, n + 1, [&](int64_t offset, int64_t) { found += offset; });
    return found;
  }

  // Copies some rows of a panel, if its columns follow one another.
  bool copy_rows(T* panel, int64_t group, int64_t k, int64_t rows, int64_t n, int64_t wide) const {
    if (!is_in_line(n, wide)) return false;
    const T* from = in_line(group, k, n);
    for (int64_t y = 0; y < rows; ++y, from += right.rows.column, panel += kTileChannels<T>) {
#pragma GCC unroll 4
      for (int v = 0; v < kTileChannels<T>; v += kLanes<T>) store(panel + v, load(from + v));
    }
    return true;
  }

  void share_left(Buffer& buffer, const Parallel& parallel) {
    const int64_t parts = ceil_div(k_, depth_), high = ceil_div(m_, blocks.rows);
    shared_left_ = buffer.take<T>(groups * high * left_elements(blocks.rows, k_));
    parallel(groups * high * parts, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t m = part / parts % high * blocks.rows, k = part % parts * depth_;
        const Block block{part / parts / high, m, std::min(blocks.rows, m_ - m), 0, 0};
        pack_left(const_cast<T*>(shared_left(block, k)), block, k, std::min(depth_, k_ - k));
      }
    });
  }

  const T* shared_left(const Block& block, int64_t k) const {
    const int64_t number = block.group * ceil_div(m_, blocks.rows) + block.m / blocks.rows;
    return shared_left_ + number * left_elements(blocks.rows, k_) + left_elements(block.rows, k);
  }

  void share_right(Buffer& buffer, const Parallel& parallel) {
    const int64_t panels = ceil_div(n_, kTileChannels<T>), size = k_ * kTileChannels<T>;
    shared_right_ = buffer.take<T>(groups * panels * size);
    parallel(groups * panels, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t n = panel % panels * kTileChannels<T>;
        pack_right(shared_right_ + panel * size, 0, panel / panels, n,
                   std::min<int64_t>(kTileChannels<T>, n_ - n), 0, k_);
      }
    });
  }

  // Whether register tiles read a matrix where it is: rows of neighbours, of which one step reads
  // some.
  static bool has_rows(const Matrix<const Stored>& matrix) {
    return std::is_same_v<Stored, T> && matrix.columns.column == 1 && matrix.rows.lines() == 1;
  }

  // Whether the left matrix's columns are read where they are. Those that lie a multiple of so many
  // bytes apart would replace one another in caches.
  bool is_left_read_in_place() const {
    constexpr int64_t kMultiple = 2048;
    const Matrix<const Stored> flipped = left.flipped();
    const int64_t bytes = flipped.rows.column * int64_t(sizeof(Stored));
    return has_rows(flipped) && flipped.columns.lines() == 1 && bytes % kMultiple != 0 &&
           bytes * kLongSteps < int64_t(1) << 31;
  }

  // Whether register tiles read the right matrix where it is. Where rows lie so apart that a
  // block's would replace one another in caches, these are packed together.
  bool is_right_read_in_place() const {
    constexpr int64_t kMultiple = 1024;
    const int64_t bytes = right.rows.column * int64_t(sizeof(Stored));
    return has_rows(right) && right.columns.columns >= 4 * kTileChannels<T> &&
           (blocks.rows <= 2 * kTilePositions || bytes % kMultiple != 0);
  }

  static const T* at(const Matrix<const Stored>& matrix, int64_t group, int64_t row,
                     int64_t column) {
    return reinterpret_cast<const T*>(matrix.data + group * matrix.group +
                                      row * matrix.rows.column + column * matrix.columns.column);
  }

  const T* left_of(const Block& block, int64_t k, int64_t steps, TaskScratch& scratch) const {
    if (is_left_in_place_) return at(left, block.group, block.m, k);
    if (shares_left) return shared_left(block, k);
    T* to = scratch.stage.template take<T>(left_elements(block.rows, steps));
    pack_left(to, block, k, steps);
    return to;
  }

  // Where panels of a block are that have been packed: the first one, and how far they are apart.
  struct Panels {
    const T* first;
    int64_t apart;
  };

  Panels right_of(const Block& block, int64_t k, int64_t steps, TaskScratch& scratch) const {
    if (is_right_in_place_) return {};
    if (shares_right) {
      const int64_t panels = ceil_div(n_, kTileChannels<T>), panel = block.n / kTileChannels<T>;
      return {shared_right_ + ((block.group * panels + panel) * k_ + k) * kTileChannels<T>,
              k_ * kTileChannels<T>};
    }
    const int64_t apart = steps * kTileChannels<T>;
    T* to = scratch.grad.template take<T>(ceil_div(block.columns, kTileChannels<T>) * apart);
    pack_right(to, apart, block.group, block.n, block.columns, k, steps);
    return {to, apart};
  }

  // A part of a panel: where it is, how far its rows are apart, and where to copy it, or null.
  struct PanelPart {
    const T* first;
    int64_t pace;
    T* copy;
  };

  // A part of a panel that is read in place. Its rows lie so far apart that they would replace one
  // another in the L1 cache, so the first of several register tiles copies them.
  PanelPart part_in_place(const Block& block, const Panel& panel, int64_t k, int64_t steps,
                          TaskScratch& scratch) const {
    T* copy = scratch.grad.template take<T>(steps_ * kTileChannels<T>);
    if constexpr (std::is_same_v<Stored, T>) {
      if (is_in_line(panel.n, panel.columns)) {
        return {in_line(block.group, k, panel.n), right.rows.column,
                block.rows > kTilePositions ? copy : nullptr};
      }
    }
    pack_right(copy, 0, block.group, panel.n, panel.columns, k, steps);
    return {copy, kTileChannels<T>, nullptr};
  }

  // --- Multiplying ---

  void compute(const Block& block, const Block& after, TaskScratch& scratch) const {
    const int64_t rows = block.rows;
    int32_t* offsets = scratch.offsets.template take<int32_t>(steps_);
    for (int64_t i = 0; i < steps_; ++i) {
      offsets[i] = int32_t(is_pitched_ ? tile_elements(i / kLine<T> * kLine<T>) + i % kLine<T>
                           : is_left_in_place_ ? i * left.columns.column
                                               : i * kApart);
    }
    const int64_t panels = ceil_div(block.columns, kTileChannels<T>);
    const bool waits = k_ > steps_;
    T* sums = scratch.sums.template take<T>((waits ? panels : 1) * rows * kTileChannels<T>);
    const int64_t* places = list_rows(result, block, scratch.rows);
    const int64_t* beside =
        residual.data ? list_rows(residual, block, scratch.residual_rows) : nullptr;
    const auto multiplies =
        is_pitched_ ? multiply_for<T, kLine<T>, 1, false, true> : multiply_for<T, 1>;
    const auto copies =
        is_pitched_ ? multiply_for<T, kLine<T>, 1, true, true> : multiply_for<T, 1, 1, true>;
    const Parts pieces(rows, kTilePositions);
    for (int64_t k = 0; k == 0 || k < k_; k += depth_) {  // once even if there is nothing to add
      const int64_t deep = std::min(depth_, k_ - k);
      const bool ends = k + depth_ >= k_;
      const T* from = left_of(block, k, deep, scratch);
      const Panels by = right_of(block, k, deep, scratch);
      const int64_t calls = panels * pieces.count() * std::max<int64_t>(1, ceil_div(deep, steps_));
      const Block& next = ends ? after : block;
      const int64_t next_k = ends ? 0 : k + depth_, next_deep = std::min(depth_, k_ - next_k);
      Requests<Stored> lefts(left, next.group, next.m, shares_left ? 0 : next.rows, next_k,
                             next_deep, calls);
      Requests<Stored> rights(right, next.group, next_k, next_deep, next.n,
                              shares_right ? 0 : next.columns, calls);
      for (int64_t i = 0; i < panels; ++i) {
        const Panel panel = panel_of(block, i * kTileChannels<T>);
        const bool is_finished = is_finished_by_sums(panel);
        T* to = sums + (waits ? i * rows * kTileChannels<T> : 0);
        if constexpr (std::is_same_v<Stored, T>) {
          if (is_finished) {
            to = result.data + block.group * result.group + panel.results[0].offset + places[0];
          }
        }
        const int64_t stride = is_finished ? result.rows.column : kTileChannels<T>;
        for (int64_t step = 0; step == 0 || step < deep; step += steps_) {
          const int64_t steps = std::min(steps_, deep - step);
          PanelPart part{by.first + i * by.apart + step * kTileChannels<T>, kTileChannels<T>,
                         nullptr};
          if (is_right_in_place_) part = part_in_place(block, panel, k + step, steps, scratch);
          const bool is_last = ends && step + steps_ >= deep;
          for (int64_t piece = 0; piece < pieces.count(); ++piece) {
            const int64_t row = pieces.begin(piece), some = pieces.size(piece);
            T* of_tile = to + row * stride;
            lefts.next(), rights.next();
            const T* left_part = is_left_in_place_
                                     ? from + step * left.columns.column + row
                                     : from + piece * tile_elements(deep) + tile_elements(step);
            if (is_finished ? k + step == 0 : is_last) {
              prefetch_tile(block, panel, row, some, places);
            }
            (part.copy ? copies : multiplies)(some, panel.columns)(
                left_part, offsets, steps, part.first, part.pace, of_tile, stride, k + step == 0, 0,
                part.copy);
            if (part.copy) part = {part.copy, kTileChannels<T>, nullptr};
            if (is_last && !is_finished) {
              finish_tile(block, panel, row, some, of_tile, places, beside);
            }
          }
        }
      }
    }
  }

  // Whether a panel is added up where its result is: nothing remains to be done to its sums. Rows
  // that lie a multiple of so many bytes apart would replace one another in caches between chains.
  bool is_finished_by_sums(const Panel& panel) const {
    constexpr int64_t kMultiple = 2048;
    const bool stays = k_ <= steps_ || result.rows.column * int64_t(sizeof(T)) % kMultiple != 0;
    return std::is_same_v<Stored, T> && stays && is_whole(panel) && result.rows.lines() == 1 &&
           !bias && !residual.data && epilogue.activation == kIdentity;
  }

  // Requests what a register tile will write, while it is multiplied.
  void prefetch_tile(const Block& block, const Panel& panel, int64_t row, int64_t rows,
                     const int64_t* places) const {
    if (!is_in_a_line(panel)) return;
    const Stored* to = result.data + block.group * result.group + panel.results[0].offset;
    for (int64_t r = row; r < row + rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) __builtin_prefetch(to + places[r] + v * kLanes<T>, 1);
    }
  }

  static const int64_t* list_rows(const auto& matrix, const Block& block, Buffer& buffer) {
    int64_t* places = buffer.take<int64_t>(block.rows);
    int64_t* next = places;
    matrix.rows.for_runs(block.m, block.m + block.rows, [&](int64_t offset, int64_t count) {
      for (int64_t i = 0; i < count; ++i) *next++ = offset + i * matrix.rows.column;
    });
    return places;
  }

  Panel panel_of(const Block& block, int64_t first) const {
    const int64_t n = block.n + first;
    Panel panel;
    panel.n = n;
    panel.columns = std::min<int64_t>(kTileChannels<T>, block.columns - first);
    const auto list = [&](const Places& places, Places::Run* to) {
      const Places::Run* first_run = to;
      places.for_runs(n, n + panel.columns,
                      [&](int64_t offset, int64_t count) { *to++ = {offset, count}; });
      return to - first_run;
    };
    panel.runs = list(result.columns, panel.results);
    if (residual.data) list(residual.columns, panel.residuals);
    return panel;
  }

  // Adds the bias and the residual to a register tile's sums, and stores them.
  void finish_tile(const Block& block, const Panel& panel, int64_t row, int64_t rows, const T* sums,
                   const int64_t* places, const int64_t* beside) const {
    const Stored* added = bias ? bias + block.group * bias_group : nullptr;
    Vector<T> of_columns[kTileVectors] = {};
    if (added && !has_row_bias) {
      for (int v = 0; v < kTileVectors && v * kLanes<T> < panel.columns; ++v) {
        const int64_t x = v * kLanes<T>;
        of_columns[v] =
            gather_some(added + panel.n + x, 1, std::min<int64_t>(kLanes<T>, panel.columns - x));
      }
    }
    Stored* to = result.data + block.group * result.group;
    if constexpr (std::is_same_v<Stored, T>) {
      if (is_in_a_line(panel) && !residual.data && epilogue.activation == kIdentity) {
        to += panel.results[0].offset;
        for (int64_t r = row; r < row + rows; ++r, sums += kTileChannels<T>) {
          const Vector<T> of_row =
              added && has_row_bias ? broadcast(added[block.m + r]) : Vector<T>{};
#pragma GCC unroll 4
          for (int v = 0; v < kTileVectors; ++v) {
            const int64_t some = panel.columns - v * kLanes<T>;
            if (some <= 0) break;
            store_some(to + places[r] + v * kLanes<T>,
                       load(sums + v * kLanes<T>) + of_columns[v] + of_row, some);
          }
        }
        return;
      }
    }
    for (int64_t r = row; r < row + rows; ++r, sums += kTileChannels<T>) {
      const Vector<T> of_row =
          added && has_row_bias ? broadcast(widened(added[block.m + r])) : Vector<T>{};
      Vector<T> totals[kTileVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) {
        totals[v] = load(sums + v * kLanes<T>) + of_columns[v] + of_row;
      }
      store_row(totals, panel, to + places[r],
                residual.data ? residual.data + block.group * residual.group + beside[r] : nullptr);
    }
  }

  // Whether a panel's columns are neighbours in the result's memory.
  bool is_in_a_line(const Panel& panel) const {
    return panel.runs == 1 && result.columns.column == 1;
  }

  // Whether they are also as many as there can be.
  bool is_whole(const Panel& panel) const {
    return is_in_a_line(panel) && panel.columns == kTileChannels<T>;
  }

  void store_row(Vector<T>* totals, const Panel& panel, Stored* to, const Stored* beside) const {
    const int64_t stride = result.columns.column, other_stride = residual.columns.column;
    if constexpr (std::is_same_v<Stored, T>) {
      if (is_in_a_line(panel) && !beside) {
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) {
          const int64_t some = panel.columns - v * kLanes<T>;
          if (some <= 0) break;
          store_some(to + panel.results[0].offset + v * kLanes<T>, epilogue.applied(totals[v]),
                     some);
        }
        return;
      }
    }
    T buffer[kTileChannels<T>];
    for (int v = 0; v < kTileVectors; ++v) store(buffer + v * kLanes<T>, totals[v]);
    for (int64_t i = 0, done = 0; i < panel.runs; ++i) {
      const auto [offset, count] = panel.results[i];
      for (int64_t x = 0; x < count; x += kLanes<T>) {
        const int64_t some = std::min<int64_t>(kLanes<T>, count - x);
        finish(load_some(buffer + done + x, some), epilogue,
               beside ? beside + panel.residuals[i].offset + x * other_stride : nullptr,
               other_stride, to + offset + x * stride, stride, some);
      }
      done += count;
    }
  }

  int64_t m_ = 0, n_ = 0, k_ = 0;
  int64_t steps_ = kSteps;  // the longest chain of additions
  int64_t depth_ = kSteps;  // columns of the left matrix that are packed together
  bool is_pitched_ = false, is_left_in_place_ = false, is_right_in_place_ = false;
  T *shared_left_ = nullptr, *shared_right_ = nullptr;
};

// The product that computes a forward pass, or an input gradient's residue.
template <class Stored>
MatrixProduct<Stored> product_of(const Gather& pass) {
  const auto pixels = [&](const Images& images, bool is_read) {
    return Places::of_pixels(pass, images, is_read);
  };
  const auto &from = pass.source.strides, &to = pass.target.strides,
             &beside = pass.residual.strides;
  const auto& by = pass.weights.strides;
  // Where no tap reads an element of a residue, there is nothing to add up.
  const int64_t depth = pass.planes.taps * pass.rows.taps * pass.columns.taps * pass.depth;
  Matrix<const Stored> source{static_cast<const Stored*>(pass.source.data), pass.depth * from[1],
                              pixels(pass.source, true), Places::of_channels(depth, from[1])};
  const Matrix<const Stored> weights{static_cast<const Stored*>(pass.weights.data), by[0],
                                     Places::of_channels(depth, by[2]),
                                     Places::of_channels(pass.channels, by[1])};
  Matrix<Stored> target{static_cast<Stored*>(pass.target.data), pass.channels * to[1],
                        pixels(pass.target, false), Places::of_channels(pass.channels, to[1])};
  Matrix<const Stored> residual{static_cast<const Stored*>(pass.residual.data),
                                pass.channels * beside[1], pixels(pass.residual, false),
                                Places::of_channels(pass.channels, beside[1])};
  join(source.rows);
  if (residual.data) {
    join(target.rows, residual.rows);
  } else {
    join(target.rows);
  }
  MatrixProduct<Stored> product{source, weights, target, residual};
  if (to[1] != 1) {
    product = {weights.flipped(), source.flipped(), target.flipped(), residual.flipped()};
    product.has_row_bias = true;
  }
  product.groups = pass.groups;
  product.bias = static_cast<const Stored*>(pass.bias);
  product.bias_group = pass.channels;
  product.epilogue = {pass.activation, Computed<Stored>(pass.slope)};
  product.blocks = pass.blocks;
  // Weights are packed once if more than two tasks read them.
  const bool is_shared = to[1] == 1 ? target.rows.count() > 2 * pass.blocks.rows
                                    : target.rows.count() > 2 * pass.blocks.columns;
  (to[1] == 1 ? product.shares_right : product.shares_left) = is_shared;
  return product;
}

template <class Stored>
MatrixProduct<Stored> product_of(const WeightGrad& pass) {
  const auto matrix = [&](const Images& images, int64_t channels, bool is_read) {
    const auto& s = images.strides;
    Matrix<const Stored> found{static_cast<const Stored*>(images.data), channels * s[1],
                               Places::of_channels(channels, s[1]),
                               Places::of_pixels(pass, images, is_read)};
    join(found.columns);
    return found;
  };
  const auto& s = pass.target.strides;
  MatrixProduct<Stored> product{
      matrix(pass.grad, pass.channels, false), matrix(pass.input, pass.depth, true).flipped(),
      Matrix<Stored>{static_cast<Stored*>(const_cast<void*>(pass.target.data)), s[0],
                     Places::of_channels(pass.channels, s[1]),
                     Places::of_channels(pass.depth, s[2])}};
  product.groups = pass.groups;
  product.blocks = pass.blocks;
  return product;
}

}  // namespace fastconv::cpu
