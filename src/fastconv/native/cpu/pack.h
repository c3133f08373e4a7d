// The weights of direct kernels, in the order in which they are multiplied.
#pragma once

#include <atomic>

#include "epilogue.h"
#include "multiply.h"

namespace fastconv::cpu {

// Whether a pass stages pixels: with few channels, most of a pixel would be gaps.
inline bool stages_pixels(const Gather& pass) {
  return pass.blocks.skips || (pass.source.strides[1] == 1 && pass.depth >= 16);
}

// The weights of a pass: for each group and each tile of channels, (read channels, tap rows, tap
// columns, channels), with zeros for channels that do not exist. Where pixels are staged, each
// block of read channels has its taps first; where padding is skipped, tap columns before tap rows.
// Tap planes follow one another as if each had read channels of its own.
template <class Stored>
class PackedWeights {
 public:
  using T = Computed<Stored>;

  explicit PackedWeights(const Gather& pass)
      : taps_(pass.rows.taps * pass.columns.taps),
        depth_(pass.depth),
        block_(stages_pixels(pass) ? std::min(pass.blocks.depth, pass.depth) : 1),
        tile_elements_(pass.planes.taps * depth_ * taps_ * kTileChannels<T>),
        tiles_(ceil_div(pass.channels, kTileChannels<T>)),
        memory_(buffer_.take<T>(pass.groups * tiles_ * tile_elements_)) {}

  int64_t tiles() const { return tiles_; }

  // The weights of a tile of channels, from a read channel of a tap plane on.
  T* of(int64_t group, int64_t tile, int64_t plane, int64_t first) const {
    return memory_ + (group * tiles_ + tile) * tile_elements_ +
           (plane * depth_ + first) * taps_ * kTileChannels<T>;
  }

  // Where a read channel's first tap is, and how far its taps and its neighbours lie apart.
  struct Place {
    T* first;
    int64_t of_tap, of_channel;
  };

  Place place(int64_t group, int64_t tile, int64_t plane, int64_t channel) const {
    const int64_t first = channel / block_ * block_, some = std::min(block_, depth_ - first);
    return {of(group, tile, plane, first) + (channel - first) * kTileChannels<T>,
            some * kTileChannels<T>, (block_ > 1 ? 1 : taps_) * kTileChannels<T>};
  }

 private:
  int64_t taps_, depth_;
  int64_t block_;  // read channels between which there are no other taps
  int64_t tile_elements_, tiles_;
  Buffer buffer_;
  T* memory_;
};

// Packs the weights of passes that have them in common and differ by their taps, as the residues of
// an input gradient do: all taps of a read channel are read together.
template <class Stored>
class WeightPacker {
 public:
  using T = Computed<Stored>;

  WeightPacker(const std::vector<Gather>& passes, const std::vector<PackedWeights<Stored>>& packed)
      : passes_(passes),
        pass_(passes[0]),
        packed_(packed),
        data_(static_cast<const Stored*>(pass_.weights.data)) {}

  // Returns false if weights are not finite where the passes need it.
  bool run(const Parallel& parallel) {
    const auto& s = pass_.weights.strides;
    const int64_t taps = pass_.rows.taps * pass_.columns.taps;
    const bool is_one = kIsCopied && passes_.size() == 1;
    if (is_one && taps > 0 && s[4] == 1 && s[3] == pass_.columns.taps && s[2] == taps &&
        !stages_pixels(pass_)) {
      pack_in_order(parallel);
      return are_finite_;
    }
    list_taps();
    if (window_ == 0) return true;
    if (is_one && s[2] == 1) {
      pack_by_taps(parallel);
    } else {
      pack_by_channels(parallel);
    }
    return are_finite_;
  }

 private:
  static constexpr bool kIsCopied = std::is_same_v<Stored, T>;
  // The most elements that are transposed together.
  static constexpr int64_t kMostWindow = 1024;
  // As many fill vectors, and stay in the L1 cache.
  static constexpr int64_t kFewTaps = 128;

  // Calls function(row, column) for the taps of a plane in their order.
  template <class Function>
  static void for_plane(const Gather& pass, const Function& function) {
    const int64_t rows = pass.rows.taps, columns = pass.columns.taps;
    for (int64_t tap = 0; tap < rows * columns; ++tap) {
      if (pass.blocks.skips) {
        function(tap % rows, tap / rows);
      } else {
        function(tap / columns, tap % columns);
      }
    }
  }

  // Lists where taps are, counted from the first element of any.
  void list_taps() {
    const auto address = [](const Gather& pass) {
      return reinterpret_cast<intptr_t>(pass.weights.data) / intptr_t(sizeof(Stored));
    };
    taps_.resize(passes_.size());
    int64_t least = 0, most = 0;
    bool is_first = true;
    for (size_t i = 0; i < passes_.size(); ++i) {
      const Gather& pass = passes_[i];
      const auto& s = pass.weights.strides;
      taps_[i].reserve(pass.planes.taps * pass.rows.taps * pass.columns.taps);
      for (int64_t z = 0; z < pass.planes.taps; ++z) {
        for_plane(pass, [&](int64_t p, int64_t q) {
          const int64_t at = address(pass) + z * pass.weights.plane + p * s[3] + q * s[4];
          taps_[i].push_back(at);
          least = is_first ? at : std::min(least, at), most = is_first ? at : std::max(most, at);
          is_first = false;
        });
      }
    }
    for (auto& of_pass : taps_) {
      for (int64_t& tap : of_pass) tap -= least;
    }
    window_ = is_first ? 0 : most - least + 1;
    data_ += least - address(pass_);
  }

  int64_t tiles() const { return packed_[0].tiles(); }

  int64_t channels_of(int64_t tile) const {
    return std::min<int64_t>(kTileChannels<T>, pass_.channels - tile * kTileChannels<T>);
  }

  // The first element of any tap.
  const Stored* from(int64_t group, int64_t tile, int64_t depth) const {
    const auto& s = pass_.weights.strides;
    return data_ + group * s[0] + tile * kTileChannels<T> * s[1] + depth * s[2];
  }

  void check(const Finiteness<T>& finiteness) {
    if (pass_.needs_finite_weights && !finiteness.holds()) are_finite_ = false;
  }

  // Steps follow one another in memory: a part is some read channels of a tile.
  void pack_in_order(const Parallel& parallel) {
    if constexpr (kIsCopied) {
      const int64_t taps = pass_.rows.taps * pass_.columns.taps,
                    share = std::max<int64_t>(1, 4096 / taps),
                    shares = ceil_div(pass_.depth, share), all = shares * pass_.planes.taps;
      parallel(pass_.groups * tiles() * all, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) {
          const int64_t first = part % shares * share, plane = part / shares % pass_.planes.taps,
                        tile = part / all % tiles(), group = part / all / tiles();
          const int64_t steps = (std::min(pass_.depth, first + share) - first) * taps;
          T* to = packed_[0].of(group, tile, plane, first);
          copy_transposed(to, kTileChannels<T>,
                          from(group, tile, first) + plane * pass_.weights.plane,
                          pass_.weights.strides[1], channels_of(tile), kTileChannels<T>, steps);
          Finiteness<T> finiteness;
          finiteness.add(to, steps * kTileChannels<T>);
          check(finiteness);
        }
      });
    }
  }

  // Read channels are neighbours in memory: a part is a line of taps of a tile.
  void pack_by_taps(const Parallel& parallel) {
    if constexpr (kIsCopied) {
      const int64_t taps = pass_.rows.taps * pass_.columns.taps,
                    wide = pass_.blocks.skips ? pass_.rows.taps : pass_.columns.taps,
                    in_plane = taps / wide, lines = pass_.planes.taps * in_plane,
                    block = stages_pixels(pass_) ? pass_.blocks.depth : pass_.depth;
      parallel(pass_.groups * tiles() * lines, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) {
          const int64_t line = part % lines, tile = part / lines % tiles(),
                        group = part / lines / tiles(), plane = line / in_plane,
                        first = line % in_plane * wide;
          for (int64_t tap = first; tap < first + wide; ++tap) {
            for (int64_t c = 0; c < pass_.depth; c += block) {
              const auto place = packed_[0].place(group, tile, plane, c);
              copy_transposed(place.first + tap * place.of_tap, place.of_channel,
                              from(group, tile, c) + taps_[0][plane * taps + tap],
                              pass_.weights.strides[1], channels_of(tile), kTileChannels<T>,
                              std::min(block, pass_.depth - c));
            }
          }
          check_line(group, tile, plane, first, wide);
        }
      });
    }
  }

  // Checks a line of taps of a tile.
  void check_line(int64_t group, int64_t tile, int64_t plane, int64_t first, int64_t wide) {
    if (!pass_.needs_finite_weights) return;
    Finiteness<T> finiteness;
    for (int64_t c = 0; c < pass_.depth; ++c) {
      const auto place = packed_[0].place(group, tile, plane, c);
      for (int64_t tap = first; tap < first + wide; ++tap) {
        finiteness.add(place.first + tap * place.of_tap, kTileChannels<T>);
      }
    }
    check(finiteness);
  }

  // A part is some read channels of a tile, with all taps of all passes. Parts are in the order of
  // memory.
  void pack_by_channels(const Parallel& parallel) {
    const auto& s = pass_.weights.strides;
    const int64_t share = pass_.blocks.depth, shares = ceil_div(pass_.depth, share),
                  all = shares * tiles();
    const bool has_near_tiles = s[1] < s[2];
    const bool is_transposed = kIsCopied && s[1] != 1 && window_ <= kMostWindow;
    // Read channels whose taps follow one another in memory.
    const int64_t together = s[2] == window_ ? ceil_div(kFewTaps, window_) : 1;
    parallel(pass_.groups * all, [&](int64_t begin, int64_t end) {
      Buffer buffer;
      T* window = is_transposed ? buffer.take<T>(together * window_ * kTileChannels<T>) : nullptr;
      for (int64_t part = begin; part < end; ++part) {
        const int64_t group = part / all, rest = part % all,
                      tile = has_near_tiles ? rest % tiles() : rest / shares,
                      first = (has_near_tiles ? rest / tiles() : rest % shares) * share,
                      last = std::min(pass_.depth, first + share);
        Finiteness<T> finiteness;
        if constexpr (kIsCopied) {
          for (int64_t c = first; is_transposed && c < last; c += together) {
            const int64_t some = std::min(together, last - c);
            copy_transposed(window, kTileChannels<T>, from(group, tile, c), s[1], channels_of(tile),
                            kTileChannels<T>, some * window_);
            finiteness.add(window, some * window_ * kTileChannels<T>);
            const T* row = window;
            for (int64_t i = 0; i < some; ++i, row += window_ * kTileChannels<T>) {
              for_taps(group, tile, c + i, [&](T* to, int64_t, int64_t tap) {
                for (int v = 0; v < kTileChannels<T>; v += kLanes<T>) {
                  store(to + v, load(row + tap * kTileChannels<T> + v));
                }
              });
            }
          }
        }
        if (!is_transposed) copy_rows(group, tile, first, last, finiteness);
        check(finiteness);
      }
    });
  }

  // Copies the weights of some read channels of a block, one tap after the other.
  void copy_rows(int64_t group, int64_t tile, int64_t first, int64_t last,
                 Finiteness<T>& finiteness) const {
    const auto& s = pass_.weights.strides;
    const int64_t count = channels_of(tile);
    const Stored* source = from(group, tile, first);
    for_taps(group, tile, first, [&](T* to, int64_t of_channel, int64_t tap) {
      for (int64_t c = 0; c < last - first; ++c, to += of_channel) {
        copy_pixel(to, kTileChannels<T>, source + tap + c * s[2], count, s[1]);
        finiteness.add(to, kTileChannels<T>);
      }
    });
  }

  // Calls function(place, of_channel, tap) for all taps of all passes.
  template <class Function>
  void for_taps(int64_t group, int64_t tile, int64_t c, const Function& function) const {
    for (size_t i = 0; i < passes_.size(); ++i) {
      const int64_t count = passes_[i].rows.taps * passes_[i].columns.taps;
      const int64_t* taps = taps_[i].data();
      for (int64_t plane = 0; plane < passes_[i].planes.taps; ++plane, taps += count) {
        const auto place = packed_[i].place(group, tile, plane, c);
        for (int64_t tap = 0; tap < count; ++tap) {
          function(place.first + tap * place.of_tap, place.of_channel, taps[tap]);
        }
      }
    }
  }

  const std::vector<Gather>& passes_;
  const Gather& pass_;  // for what all of them have in common
  const std::vector<PackedWeights<Stored>>& packed_;
  std::vector<std::vector<int64_t>> taps_;  // for each pass, where its taps are
  int64_t window_ = 0;                      // elements from the first tap to the last
  const Stored* data_;                      // the first tap
  std::atomic<bool> are_finite_ = true;
};

}  // namespace fastconv::cpu
