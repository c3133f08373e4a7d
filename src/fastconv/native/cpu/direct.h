// Passes that gather, in layers with many channels.
//
// A task is a tile of output rows and columns of one group, and some channels; of one image, or of
// several small ones, which read the same weights. It stages a block of read channels after the
// other, and for each multiplies register tiles: some columns of a row by two vectors of channels.
// Sums wait in a buffer until all blocks have been added.
//
// A volume is computed plane by plane: the read channels of each tap plane are further blocks.
//
// Where read channels are neighbours in memory they are so in the stage, too: a pixel's lie next to
// one another, and a pitch (multiply.h) after those of the pixel before.
//
// Where much of what taps read is padding, its products are left out. Then steps are sorted by tap
// column and by tap row: those of a tap column are multiplied for the columns of a register tile
// that it reads from the image, and with the tap rows that a line reads from it. Steps that are
// multiplied together are of one tap column everywhere, so the order of additions is the same,
// however rows and columns are cut into tiles.
#pragma once

#include "ahead.h"
#include "multiply.h"
#include "pack.h"

namespace fastconv::cpu {

// A thread's buffers.
struct Scratch {
  Buffer stage, grad, sums, offsets;
};

// A staged block of read channels.
template <class T>
struct Block {
  const T* staged;
  int64_t row, image;  // the strides of its rows and images
  const int32_t* offsets;
  int64_t plane, first;     // its tap plane and first channel
  int64_t channels, steps;  // how many channels there are, and the steps of all of them
  bool is_first, is_last;
};

template <class Stored>
class DirectGather {
 public:
  using T = Computed<Stored>;

  DirectGather(const Gather& pass, const PackedWeights<Stored>& weights)
      : pass_(pass),
        row_phases_(pass.rows),
        column_phases_(pass.columns),
        is_pixels_(stages_pixels(pass)),
        pitch_(is_pixels_ ? pitch_for(std::min(pass.depth, pass.blocks.depth)) : 1),
        weights_(weights),
        epilogue_{pass.activation, T(pass.slope)},
        is_plain_(pass.activation == kIdentity && !pass.residual.data) {
    if (!pass.blocks.skips) return;
    for (int64_t y = 0; y < pass.rows.outputs; ++y) {
      row_taps_.push_back(existing_taps(pass.rows, y));
    }
    for (int64_t q = 0; q < pass.columns.taps; ++q) {
      read_columns_.push_back(existing_outputs(pass.columns, q));
    }
  }

  void run(const Parallel& parallel) const {
    const int64_t images = pass_.blocks.images,
                  tiles = ceil_div(pass_.images, images) * pass_.planes.outputs * pass_.groups;
    const int64_t channels = share_of_channels(tiles, parallel.threads()),
                  shares = ceil_div(pass_.channels, channels);
    const int64_t others = tiles * shares;
    const int64_t columns = balanced(pass_.columns.outputs, pass_.blocks.columns,
                                     others * pass_.rows.outputs, parallel.threads());
    const int64_t column_tiles = ceil_div(pass_.columns.outputs, columns);
    const int64_t rows =
        balanced(pass_.rows.outputs, pass_.blocks.rows, others * column_tiles, parallel.threads());
    const int64_t row_tiles = ceil_div(pass_.rows.outputs, rows);
    const int64_t tasks = others * row_tiles * column_tiles;
    const auto tile_of = [&](int64_t rest) {
      const auto next = [&rest](int64_t count) {
        const int64_t index = rest % count;
        rest /= count;
        return index;
      };
      Tile tile;
      tile.channel = next(shares) * channels;
      tile.column = next(column_tiles) * columns;
      tile.row = next(row_tiles) * rows;
      tile.group = next(pass_.groups);
      tile.plane = next(pass_.planes.outputs);
      tile.image = rest * images;
      tile.images = std::min(images, pass_.images - tile.image);
      tile.channels = std::min(channels, pass_.channels - tile.channel);
      tile.columns = std::min(columns, pass_.columns.outputs - tile.column);
      tile.rows = std::min(rows, pass_.rows.outputs - tile.row);
      return tile;
    };
    parallel(tasks, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t task = begin; task < end; ++task) {
        compute(tile_of(task), task + 1 < end ? tile_of(task + 1) : Tile{}, scratch);
      }
    });
  }

 private:
  struct Tile {
    int64_t image, images, plane, group, row, rows, column, columns, channel, channels;
  };

  // A row of outputs of an image of a tile.
  struct Line {
    int64_t image = 0, row = 0;

    Line next(int64_t rows) const {
      return row + 1 < rows ? Line{image, row + 1} : Line{image + 1, 0};
    }
  };

  // Steps that are multiplied together: of all taps, or of a tap column.
  struct Chunk {
    int64_t first, steps, column;
  };

  static int64_t pitch_for(int64_t channels) {
    return *std::find_if(std::begin(kPitches), std::end(kPitches) - 1,
                         [=](int64_t pitch) { return channels <= pitch; });
  }

  // The written channels of a task: where positions are few, threads share weights and not images.
  int64_t share_of_channels(int64_t tiles, int64_t threads) const {
    constexpr int64_t kFewPositions = 256;
    const int64_t most = pass_.blocks.channels;
    if (pass_.rows.outputs * pass_.columns.outputs > kFewPositions) return most;
    const int64_t units = ceil_div(pass_.channels, kTileChannels<T>);
    const int64_t unit =
        balanced(units, std::max<int64_t>(1, most / kTileChannels<T>), tiles, threads);
    return unit * kTileChannels<T>;
  }

  // A part of images: how much of each axis.
  struct Extent {
    int64_t images, channels, rows, columns;
  };

  // Nothing, unless channels or columns are neighbours in memory.
  static Ahead ahead_of(Ahead::Use use, const Images& images, const Stored* first,
                        const Extent& part, int64_t shares) {
    const auto along = [](int64_t count, int64_t stride) {
      return Ahead::Along{count, stride * int64_t(sizeof(Stored))};
    };
    const auto& s = images.strides;
    const Ahead::Along by_image = along(part.images, s[0]), by_row = along(part.rows, s[2]);
    if (s[1] == 1) {
      return {use,
              first,
              {by_image, by_row, along(part.columns, s[3])},
              part.channels * int64_t(sizeof(Stored)),
              shares};
    }
    if (s[3] != 1) return {};
    return {use,
            first,
            {by_image, along(part.channels, s[1]), by_row},
            part.columns * int64_t(sizeof(Stored)),
            shares};
  }

  // Requests what a tile reads for one of its blocks.
  Ahead block_ahead(const Tile& tile, int64_t block, int64_t depth, int64_t shares) const {
    const auto [begin, end] = existing_taps(pass_.planes, tile.plane);
    const int64_t parts = ceil_div(pass_.depth, depth), plane = begin + block / parts,
                  first = block % parts * depth;
    // The elements that exist, from the first to before the last.
    const auto range = [](const Axis& axis, int64_t output, int64_t outputs) {
      const int64_t least = output * axis.step - axis.before,
                    most = least + (outputs - 1) * axis.step + (axis.taps - 1) * axis.reach;
      return std::pair(std::max<int64_t>(least, 0), std::min(most + 1, axis.size));
    };
    const auto [top, bottom] = range(pass_.rows, tile.row, tile.rows);
    const auto [left, right] = range(pass_.columns, tile.column, tile.columns);
    if (tile.images == 0 || plane >= end || top >= bottom || left >= right) return {};
    const auto& s = pass_.source.strides;
    const Stored* from = source_of(tile, plane, first) + top * s[2] + left * s[3];
    const Extent part{tile.images, std::min(depth, pass_.depth - first), bottom - top,
                      right - left};
    return ahead_of(Ahead::kRead, pass_.source, from, part, shares);
  }

  // Requests what a tile writes of some channels.
  Ahead results_ahead(const Tile& tile, int64_t channel, int64_t channels, int64_t shares) const {
    return ahead_of(Ahead::kWritten, pass_.target, place(pass_.target, tile, channel, {}, 0),
                    {tile.images, channels, tile.rows, tile.columns}, shares);
  }

  // A channel of the source's plane that a tap plane reads.
  const Stored* source_of(const Tile& tile, int64_t tap_plane, int64_t channel) const {
    const auto& axis = pass_.planes;
    const auto& s = pass_.source.strides;
    const int64_t plane = tile.plane * axis.step + tap_plane * axis.reach - axis.before;
    return static_cast<const Stored*>(pass_.source.data) + tile.image * s[0] +
           (tile.group * pass_.depth + channel) * s[1] + plane * pass_.source.plane;
  }

  // Computes a tile, and requests what the next one reads first.
  void compute(const Tile& tile, const Tile& after, Scratch& scratch) const {
    const Window rows(pass_.rows, row_phases_, tile.row, tile.rows),
        columns(pass_.columns, column_phases_, tile.column, tile.columns);
    const Layout layout(rows, columns);
    const int64_t depth = std::min(pass_.blocks.depth, pass_.depth);
    const int64_t taps = pass_.rows.taps * pass_.columns.taps;
    int32_t* offsets = scratch.offsets.take<int32_t>(depth * taps);
    const int64_t of_image = layout.channel * (is_pixels_ ? pitch_ : depth);
    T* staged = scratch.stage.take<T>(of_image * tile.images);
    // Tap planes that read planes that exist; without any there is one block of no steps.
    const auto [begin, end] = existing_taps(pass_.planes, tile.plane);
    const int64_t parts = ceil_div(pass_.depth, depth),
                  blocks = std::max<int64_t>((end - begin) * parts, 1);
    const int64_t kept = blocks > 1 ? ceil_div(tile.channels, kTileChannels<T>) : 1;
    const int64_t positions = tile.images * tile.rows * tile.columns;
    T* sums = scratch.sums.take<T>(positions * kept * kTileChannels<T>);
    const auto& s = pass_.source.strides;
    int64_t listed = -1;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t plane = begin + i / parts, first = i % parts * depth;
      const int64_t some = begin == end ? 0 : std::min(depth, pass_.depth - first);
      if (some != listed) list_offsets(offsets, layout, listed = some);
      if (taps > 0 && some > 0) {
        const Stored* source = source_of(tile, plane, first);
        for (int64_t n = 0; n < tile.images; ++n) {
          T* to = staged + n * of_image;
          if (is_pixels_) {
            stage_pixels(to, Pieces{pitch_, pitch_, 0}, source + n * s[0], s, some, rows, columns);
          } else {
            stage(to, layout, source + n * s[0], s, some, rows, columns);
          }
        }
      }
      const Block<T> block{staged, layout.row, of_image,    offsets, plane,
                           first,  some,       some * taps, i == 0,  i == blocks - 1};
      const int64_t calls = count_calls(tile, block) * ceil_div(tile.channels, kTileChannels<T>);
      Ahead next_block = block.is_last ? block_ahead(after, 0, depth, calls)
                                       : block_ahead(tile, i + 1, depth, calls);
      for (int64_t c = 0; c < tile.channels; c += kTileChannels<T>) {
        multiply_block(tile, block, c, sums + (kept > 1 ? positions * c : 0), next_block);
      }
    }
  }

  void list_offsets(int32_t* to, const Layout& layout, int64_t depth) const {
    const int64_t taps = pass_.rows.taps * pass_.columns.taps;
    for (int64_t p = 0, tap = 0; p < pass_.rows.taps; ++p) {
      for (int64_t q = 0; q < pass_.columns.taps; ++q, ++tap) {
        const int64_t offset = layout.offset(row_phases_, column_phases_, p, q);
        const int64_t place = pass_.blocks.skips ? q * pass_.rows.taps + p : tap;
        for (int64_t c = 0; c < depth; ++c) {
          if (is_pixels_) {
            to[place * depth + c] = int32_t(offset * pitch_ + c);
          } else {
            to[c * taps + tap] = int32_t(offset + c * layout.channel);
          }
        }
      }
    }
  }

  // How many register tiles are multiplied for a block and a tile of channels.
  int64_t count_calls(const Tile& tile, const Block<T>& block) const {
    const int64_t lines = tile.images * tile.rows,
                  of_steps = lines_share_tiles(tile)
                                 ? ceil_div(lines, 2)
                                 : lines * ceil_div(tile.columns, kTilePositions);
    return of_steps * count_chunks(block);
  }

  // Whether two lines of a tile are multiplied together: where none reads fewer taps than another.
  bool lines_share_tiles(const Tile& tile) const {
    return 2 * tile.columns <= kTilePositions && !pass_.blocks.skips;
  }

  // Tap columns whose steps are multiplied apart from others.
  int64_t slices() const {
    return pass_.blocks.skips ? std::max<int64_t>(1, pass_.columns.taps) : 1;
  }

  Parts parts_of_slice(const Block<T>& block) const {
    return {block.steps / slices(), most_steps(block)};
  }

  // One even without steps, where nothing is added up.
  int64_t count_chunks(const Block<T>& block) const {
    return slices() * std::max<int64_t>(1, parts_of_slice(block).count());
  }

  Chunk chunk_of(const Block<T>& block, int64_t index) const {
    const Parts parts = parts_of_slice(block);
    const int64_t count = std::max<int64_t>(1, parts.count()), column = index / count,
                  part = index % count;
    return {column * (block.steps / slices()) + parts.begin(part), parts.size(part), column};
  }

  // Multiplies a staged block for a tile's channels from `c` on.
  void multiply_block(const Tile& tile, const Block<T>& block, int64_t c, T* sums,
                      Ahead& next_block) const {
    const int64_t channel = tile.channel + c,
                  channels = std::min<int64_t>(kTileChannels<T>, tile.channels - c);
    const T* right = weights_.of(tile.group, channel / kTileChannels<T>, block.plane, block.first);
    const Parts pieces(tile.columns, kTilePositions);
    const int64_t chunks = count_chunks(block);
    const bool has_pairs = lines_share_tiles(tile);
    // Results are requested until the last steps, at whose end they are written.
    const int64_t before_last = count_calls(tile, block) / chunks * (chunks - 1);
    Ahead results;
    if (block.is_last && before_last > 0) {
      results = results_ahead(tile, channel, channels, before_last);
    }
    for (int64_t i = 0; i < chunks; ++i) {
      const Chunk chunk = chunk_of(block, i);
      const bool is_first = block.is_first && i == 0, is_last = block.is_last && i == chunks - 1;
      Line line;
      for (int64_t piece = 0; piece < pieces.count() && line.image < tile.images;) {
        const int64_t x = pieces.begin(piece), positions = pieces.size(piece);
        const Line next = line.next(tile.rows);
        const int64_t lines = has_pairs && next.image < tile.images ? 2 : 1;
        T* to = sums + ((line.image * tile.rows + line.row) * tile.columns + x) * kTileChannels<T>;
        next_block.next();
        if (!is_last) results.next();
        multiply_tile(tile, block, chunk, {lines, line, next, x, positions, channels}, right, to,
                      is_first);
        for (int64_t k = 0; k < lines; ++k, to += positions * kTileChannels<T>) {
          if (is_last) finish_tile(tile, channel, channels, k ? next : line, x, positions, to);
        }
        const Line after = lines > 1 ? next.next(tile.rows) : next;
        // A line below reads most of the pixels that a tap column reads of the one before.
        if (!pass_.blocks.skips) {
          if (++piece == pieces.count()) piece = 0, line = after;
        } else if (after.image < tile.images) {
          line = after;
        } else {
          ++piece, line = {};
        }
      }
    }
  }

  // Positions and channels that are multiplied together.
  struct RegisterTile {
    int64_t lines;
    Line line, next;
    int64_t x, positions, channels;
  };

  // Adds a chunk's products to the sums of a register tile.
  void multiply_tile(const Tile& tile, const Block<T>& block, Chunk chunk, const RegisterTile& at,
                     const T* right, T* sums, bool is_first) const {
    int64_t left = 0, some = at.positions;
    if (pass_.blocks.skips && chunk.steps > 0) {
      const int64_t slice = chunk.column * pass_.rows.taps * block.channels;
      const auto [top, bottom] = row_taps_[tile.row + at.line.row];
      const int64_t last = std::min(chunk.first + chunk.steps, slice + bottom * block.channels);
      chunk.first = std::max(chunk.first, slice + top * block.channels);
      chunk.steps = std::max<int64_t>(0, last - chunk.first);
      const auto [begin, end] = read_columns_[chunk.column];
      const int64_t x = tile.column + at.x;
      left = std::max<int64_t>(0, begin - x);
      some = std::max<int64_t>(0, std::min(at.positions, end - x) - left);
    }
    if (is_first && (chunk.steps == 0 || some < at.positions)) {
      std::fill(sums, sums + at.lines * at.positions * kTileChannels<T>, T());
      is_first = false;
    }
    if (chunk.steps == 0 || some == 0) return;
    // Where a line of the tile starts in the stage.
    const auto start_of = [&](const Line& line) {
      return line.image * block.image + line.row * block.row * pitch_;
    };
    const int64_t start = start_of(at.line);
    const auto multiplies =
        at.lines == 1 ? function_for<1>(some, at.channels) : function_for<2>(some, at.channels);
    multiplies(block.staged + start + (at.x + left) * pitch_, block.offsets + chunk.first,
               chunk.steps, right + chunk.first * kTileChannels<T>, kTileChannels<T>,
               sums + left * kTileChannels<T>, kTileChannels<T>, is_first,
               start_of(at.next) - start, nullptr);
  }

  // Rows of many channels need more of the L1 cache, beside weights, than pixels and large kernels.
  int64_t most_steps(const Block<T>& block) const {
    constexpr int64_t kManyTaps = 64;
    const int64_t taps = pass_.rows.taps * pass_.columns.taps;
    return is_pixels_ || taps > kManyTaps || block.steps <= kLongSteps ? kLongSteps : kSteps;
  }

  template <int kLines>
  Multiply<T> function_for(int64_t positions, int64_t channels) const {
    switch (pitch_) {
      case kPitches[0]:
        return multiply_for<T, kPitches[0], kLines>(positions, channels);
      case kPitches[1]:
        return multiply_for<T, kPitches[1], kLines>(positions, channels);
      case kPitches[2]:
        return multiply_for<T, kPitches[2], kLines>(positions, channels);
      case kPitches[3]:
        return multiply_for<T, kPitches[3], kLines>(positions, channels);
      default:
        return multiply_for<T, 1, kLines>(positions, channels);
    }
  }

  // Where a register tile's sums are in a result, or a residual, which may be null.
  Stored* place(const Images& images, const Tile& tile, int64_t channel, const Line& line,
                int64_t x) const {
    const auto& s = images.strides;
    Stored* data = static_cast<Stored*>(images.data);
    return data
               ? data + (tile.image + line.image) * s[0] +
                     (tile.group * pass_.channels + channel) * s[1] + (tile.row + line.row) * s[2] +
                     (tile.column + x) * s[3] + tile.plane * images.plane
               : nullptr;
  }

  // Adds the bias to a register tile's sums, and stores them.
  void finish_tile(const Tile& tile, int64_t channel, int64_t channels, const Line& line, int64_t x,
                   int64_t positions, T* sums) const {
    const int64_t whole = tile.group * pass_.channels + channel;
    Stored* to = place(pass_.target, tile, channel, line, x);
    const Stored* residual = place(pass_.residual, tile, channel, line, x);
    const Stored* bias = pass_.bias ? static_cast<const Stored*>(pass_.bias) + whole : nullptr;
    for (int64_t c = 0; c < channels; c += kLanes<T>) {
      const int64_t some = std::min<int64_t>(kLanes<T>, channels - c);
      const Vector<T> first = bias ? gather_some(bias + c, 1, some) : Vector<T>{};
      if (pass_.target.strides[1] == 1) {
        finish_channels(first, to + c,
                        residual ? residual + c * pass_.residual.strides[1] : nullptr, sums + c,
                        positions, some);
      } else {
        finish_columns(first, to + c * pass_.target.strides[1],
                       residual ? residual + c * pass_.residual.strides[1] : nullptr, sums + c,
                       positions, some);
      }
    }
  }

  // Stores vectors of channels, which are neighbours in memory.
  void finish_channels(Vector<T> bias, Stored* to, const Stored* residual, const T* sums,
                       int64_t positions, int64_t channels) const {
    const auto& from = pass_.residual.strides;
    if constexpr (std::is_same_v<Stored, T>) {
      if (is_plain_ && channels == kLanes<T>) {
        for (int64_t p = 0; p < positions; ++p, to += pass_.target.strides[3]) {
          store(to, load(sums + p * kTileChannels<T>) + bias);
        }
        return;
      }
    }
    for (int64_t p = 0; p < positions; ++p) {
      finish(load(sums + p * kTileChannels<T>) + bias, epilogue_,
             residual ? residual + p * from[3] : nullptr, from[1], to + p * pass_.target.strides[3],
             1, channels);
    }
  }

  // Transposes sums, and stores vectors of columns.
  void finish_columns(Vector<T> bias, Stored* to, const Stored* residual, const T* sums,
                      int64_t positions, int64_t channels) const {
    constexpr int kBlock = kLanes<T>;
    const auto &into = pass_.target.strides, &from = pass_.residual.strides;
    for (int64_t p = 0; p < positions; p += kBlock) {
      const int64_t some = std::min<int64_t>(kBlock, positions - p);
      Vector<T> block[kBlock] = {};
      for (int64_t i = 0; i < some; ++i) block[i] = load(sums + (p + i) * kTileChannels<T>) + bias;
      transpose<T>(block);
      if constexpr (std::is_same_v<Stored, T>) {
        if (is_plain_ && into[3] == 1) {
          Stored* row = to + p;
          for (int64_t c = 0; c < channels; ++c, row += into[1]) store_some(row, block[c], some);
          continue;
        }
      }
      for (int64_t c = 0; c < channels; ++c) {
        finish(block[c], epilogue_, residual ? residual + c * from[1] + p * from[3] : nullptr,
               from[3], to + c * into[1] + p * into[3], into[3], some);
      }
    }
  }

  const Gather& pass_;
  Phases row_phases_, column_phases_;
  bool is_pixels_;
  int64_t pitch_;  // elements between neighbouring positions of a stage
  const PackedWeights<Stored>& weights_;
  Epilogue<T> epilogue_;
  bool is_plain_;  // sums and the bias are the result
  // The tap rows that an output row reads from the image, and the output columns that a tap column
  // does: from a first one to before a last one.
  std::vector<std::pair<int64_t, int64_t>> row_taps_, read_columns_;
};

// Computes passes that write different rows and columns of one result. Returns false if weights are
// not finite where they need to be.
template <class Stored>
bool gather_directly(const std::vector<Gather>& passes, const Parallel& parallel) {
  const std::vector<PackedWeights<Stored>> weights(passes.begin(), passes.end());
  if (!WeightPacker<Stored>(passes, weights).run(parallel)) return false;
  for (size_t i = 0; i < passes.size(); ++i) {
    DirectGather<Stored>(passes[i], weights[i]).run(parallel);
  }
  return true;
}

}  // namespace fastconv::cpu
