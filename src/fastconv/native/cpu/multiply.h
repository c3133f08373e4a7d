// The innermost loop: a register tile of positions by channels.
//
//   sums[p][c] += left[offsets[step] + p * pitch] * right[step * pace + c], over all steps
//
// Sums of neighbouring positions lie `stride` elements apart. Where positions are few, a tile has
// two lines of them, which lie `jump` elements apart.
//
// A step is a tap and a read channel in passes that gather, where p is an output column; it is a
// pixel in weight gradients, where p is a channel of the input. Numbers of `left` are broadcast,
// those of `right` are vectors. The pitch is 1, or one of those below where steps are neighbours in
// `left`: it is a constant, so that all positions have the same address but for a displacement.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace fastconv::cpu {

// Vectors of channels in a tile: two, so that a broadcast number is multiplied twice.
constexpr int kTileVectors = 2;

// The most positions of a tile: sums, two vectors of `right` and a broadcast number fit registers.
constexpr int kTilePositions = (kRegisters - kTileVectors - 1) / kTileVectors;

template <class T>
constexpr int kTileChannels = kTileVectors * kLanes<T>;

// The most steps of a call, so that what it reads of `right` stays in the L1 cache while it is
// called for all positions of a tile. It is also the longest chain of additions: the sums of calls
// are added to one another.
constexpr int64_t kSteps = 128;

// The longest chain of direct kernels.
constexpr int64_t kLongSteps = 160;

// The size of as few equal parts of at most so many steps as there can be.
inline int64_t part_of(int64_t steps, int64_t most) {
  const int64_t parts = (steps + most - 1) / most;
  return parts > 1 ? (steps + parts - 1) / parts : std::max<int64_t>(steps, 1);
}

// The pitches of positions whose steps are neighbours: the most elements of a pixel that are staged
// together.
constexpr int kPitches[] = {16, 32, 48, 64};
// The same of matrices' rows that are packed by cache lines, a line of each row of a register tile
// after the other. A step requests what steps read that come as much later as a line is long.
template <class T>
constexpr int64_t kLine = 64 / sizeof(T);

// A call may copy what it reads of `right`, so that other calls find it next to one another. It may
// request rows that are packed by cache lines.
template <class T, int kPositions, int kVectors, int kApart, int kLines, bool kCopies, bool kByLine>
void multiply(const T* left, const int32_t* offsets, int64_t steps, const T* right, int64_t pace,
              T* sums, int64_t stride, bool is_first, int64_t jump, T* copy) {
  constexpr int kAll = kLines * kPositions, kAhead = 16;
  Vector<T> chain[kAll][kVectors] = {};
#pragma GCC unroll 2
  for (int64_t step = 0; step < steps; ++step) {
    const T* from = left + offsets[step];
    if constexpr (kByLine) {
      __builtin_prefetch(left + (step + kLine<T>)*kTilePositions);
    }
    Vector<T> factors[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      factors[v] = load(right + step * pace + v * kLanes<T>);
      if constexpr (kCopies) {
        __builtin_prefetch(right + (step + kAhead) * pace + v * kLanes<T>);
        store(copy + step * kTileChannels<T> + v * kLanes<T>, factors[v]);
      }
    }
#pragma GCC unroll 32
    for (int p = 0; p < kAll; ++p) {
      const Vector<T> number =
          broadcast(p < kPositions ? from[p * kApart] : from[jump + (p - kPositions) * kApart]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) chain[p][v] += number * factors[v];
    }
  }
#pragma GCC unroll 32
  for (int p = 0; p < kAll; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      T* total = sums + p * stride + v * kLanes<T>;
      store(total, is_first ? chain[p][v] : load(total) + chain[p][v]);
    }
  }
}

template <class T>
using Multiply = void (*)(const T*, const int32_t*, int64_t, const T*, int64_t, T*, int64_t, bool,
                          int64_t, T*);

template <class T, int kVectors, int kApart, int kLines, bool kCopies, bool kByLine, int... kIndex>
constexpr Multiply<T> multiply_of(int positions, std::integer_sequence<int, kIndex...>) {
  constexpr Multiply<T> found[] = {
      multiply<T, kIndex + 1, kVectors, kApart, kLines, kCopies, kByLine>...};
  return found[positions - 1];
}

// The function for this many positions of a line and channels of a tile.
template <class T, int kApart = 1, int kLines = 1, bool kCopies = false, bool kByLine = false>
Multiply<T> multiply_for(int64_t positions, int64_t channels) {
  constexpr auto kAll = std::make_integer_sequence<int, kTilePositions / kLines>();
  return channels > kLanes<T>
             ? multiply_of<T, 2, kApart, kLines, kCopies, kByLine>(int(positions), kAll)
             : multiply_of<T, 1, kApart, kLines, kCopies, kByLine>(int(positions), kAll);
}

}  // namespace fastconv::cpu
