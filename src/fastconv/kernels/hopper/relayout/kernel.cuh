// Transposes matrices, one for each image: between contiguous memory (channels by pixels) and
// channels-last memory (pixels by channels).
//
// A block has a tile of kTile rows and columns of one matrix. Shared memory holds it as words of 32
// bits: a word has one element, or two 16-bit elements of neighbouring rows in the same column,
// which are neighbours in the result. A row of words is kPitch words long. Four lanes that read
// four words each, of one column after the other, are 4 * kPitch words apart: 8 banks, so that a
// warp's 4 by 8 lanes read from all 32 banks.
#pragma once
#include "device/tile.cuh"

namespace fastconv {
namespace hopper {

using C = Config;
using Element = Bits<sizeof(C::Scalar)>::type;

constexpr int kTile = 64;
constexpr int kWordElements = 4 / static_cast<int>(sizeof(Element));
constexpr int kWordRows = kTile / kWordElements;
constexpr int kPitch = kTile + 2;
constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
constexpr int kThreads = C::threads;
static_assert(4 * kPitch % 32 == 8, "lanes of a warp read from different banks");
static_assert(kTile == 64 && kThreads == 256, "rounds that load and store whole tiles");
static_assert(kWordRows * kPitch * 4 == C::shared_bytes, "");

using Words = unsigned[kWordRows][kPitch];

__device__ __forceinline__ unsigned packed(unsigned low, unsigned high) { return low | high << 16; }

// Loads the tile at (row, column) of a matrix. Elements outside are not loaded: no one stores them.
// A thread loads a vector of each of two rows.
__device__ __forceinline__ void load_vectors(const unsigned short* matrix, int rows, int columns,
                                             int row, int column, Words& words) {
  constexpr int kAcross = kTile / 8;
  const int thread = static_cast<int>(threadIdx.x);
  const int pair = thread / kAcross, at = thread % kAcross * 8;
  const int y = row + 2 * pair, x = column + at;
  if (x >= columns || y >= rows) return;
  const unsigned short* const source = matrix + static_cast<long long>(y) * columns + x;
  const uint4 even = *reinterpret_cast<const uint4*>(source);
  const uint4 odd = y + 1 < rows ? *reinterpret_cast<const uint4*>(source + columns) : even;
  const unsigned lows[] = {even.x, even.y, even.z, even.w};
  const unsigned highs[] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint2* const target = reinterpret_cast<uint2*>(&words[pair][at + 2 * i]);
    *target = {packed(lows[i] & 0xffff, highs[i]), packed(lows[i] >> 16, highs[i] >> 16)};
  }
}

// A thread loads vectors of several rows, all before the first store waits for one.
__device__ __forceinline__ void load_vectors(const unsigned* matrix, int rows, int columns, int row,
                                             int column, Words& words) {
  constexpr int kAcross = kTile / 4, kRound = kThreads / kAcross, kRounds = kWordRows / kRound;
  const int thread = static_cast<int>(threadIdx.x);
  const int first = thread / kAcross, at = thread % kAcross * 4, x = column + at;
  if (x >= columns) return;
  uint4 loaded[kRounds] = {};
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int y = row + first + i * kRound;
    const unsigned* const source = matrix + static_cast<long long>(y) * columns + x;
    if (y < rows) loaded[i] = *reinterpret_cast<const uint4*>(source);
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    uint2* const target = reinterpret_cast<uint2*>(&words[first + i * kRound][at]);
    target[0] = {loaded[i].x, loaded[i].y};
    target[1] = {loaded[i].z, loaded[i].w};
  }
}

// The word of the element at row `y`, and of the next row's.
__device__ __forceinline__ unsigned load_word(const unsigned short* element, int y, int rows,
                                              int columns) {
  const unsigned low = y < rows ? element[0] : 0;
  return packed(low, y + 1 < rows ? element[columns] : 0);
}
__device__ __forceinline__ unsigned load_word(const unsigned* element, int y, int rows, int) {
  return y < rows ? *element : 0;
}

__device__ __forceinline__ void load_elements(const Element* matrix, int rows, int columns, int row,
                                              int column, Words& words) {
  constexpr int kRound = kThreads / kTile, kRounds = kWordRows / kRound;
  const int at = static_cast<int>(threadIdx.x) % kTile, x = column + at;
  const int first = static_cast<int>(threadIdx.x) / kTile;
  if (x >= columns) return;
  const Element* const source = matrix + static_cast<long long>(row) * columns + x;
  unsigned loaded[kRounds];  // All loads are issued before the first store waits for one.
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int y = kWordElements * (first + i * kRound);
    loaded[i] = load_word(source + static_cast<long long>(y) * columns, row + y, rows, columns);
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) words[first + i * kRound][at] = loaded[i];
}

// Stores the tile's transpose: rows of the result are the matrix's columns.
__device__ __forceinline__ void store_vectors(Element* result, int rows, int columns, int row,
                                              int column, const Words& words) {
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kRound = kThreads / 4;
#pragma unroll
  for (int part = 0; part < kWordRows / 16 * kTile / kRound; ++part) {
    const int item = thread / 4 + part * kRound;
    const int at = item % kTile, word = (item / kTile * 4 + thread % 4) * 4;
    const int x = column + at, y = row + kWordElements * word;
    if (x < columns && y < rows) {
      uint4* const target = reinterpret_cast<uint4*>(result + static_cast<long long>(x) * rows + y);
      *target = {words[word][at], words[word + 1][at], words[word + 2][at], words[word + 3][at]};
    }
  }
}

__device__ __forceinline__ void store_elements(Element* result, int rows, int columns, int row,
                                               int column, const Words& words) {
  const int of_column = static_cast<int>(threadIdx.x) % kTile, y = row + of_column;
  const int first = static_cast<int>(threadIdx.x) / kTile;
  constexpr int kRound = kThreads / kTile;
  if (y >= rows) return;
#pragma unroll 4
  for (int at = first; at < kTile && column + at < columns; at += kRound) {
    const unsigned word = words[of_column / kWordElements][at];
    result[static_cast<long long>(column + at) * rows + y] =
        static_cast<Element>(of_column % kWordElements ? word >> 16 : word);
  }
}

__device__ __forceinline__ void transpose(const Element* source, Element* target, int rows,
                                          int columns) {
  Words& words = *reinterpret_cast<Words*>(shared_memory());
  const int across = ceil_div(columns, kTile), tiles = across * ceil_div(rows, kTile);
  const int block = static_cast<int>(blockIdx.x);
  const int tile = block % tiles, row = tile / across * kTile, column = tile % across * kTile;
  const long long matrix = static_cast<long long>(block / tiles) * rows * columns;
  if constexpr (C::vector_loads) {
    load_vectors(source + matrix, rows, columns, row, column, words);
  } else {
    load_elements(source + matrix, rows, columns, row, column, words);
  }
  __syncthreads();
  if constexpr (C::vector_stores) {
    store_vectors(target + matrix, rows, columns, row, column, words);
  } else {
    store_elements(target + matrix, rows, columns, row, column, words);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(Config::threads)
    transpose(const Config::Scalar* source, Config::Scalar* target, int rows, int columns) {
  using Element = fastconv::hopper::Element;
  fastconv::hopper::transpose(reinterpret_cast<const Element*>(source),
                              reinterpret_cast<Element*>(target), rows, columns);
}
