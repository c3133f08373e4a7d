// Transposes tiles of matrices: between contiguous memory (channels by pixels) and channels-last
// memory (pixels by channels).
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

// A matrix whose rows are `pitch` elements apart. With kPads, columns outside are zeros; otherwise
// they are not loaded: no one stores them.
template <class T, bool kPads>
struct Matrix {
  const T* first;
  int rows, columns, pitch;

  __device__ __forceinline__ const T* place(int y, int x) const {
    return first + (static_cast<long long>(y) * pitch + x);
  }
  __device__ __forceinline__ bool has_column(int x) const {
    return static_cast<unsigned>(x) < static_cast<unsigned>(columns);
  }
  __device__ __forceinline__ bool skips(int x) const { return !kPads && !has_column(x); }
  // A vector at a row that exists, or zeros.
  __device__ __forceinline__ uint4 vector(int y, int x) const {
    if (kPads && !has_column(x)) return {};
    return *reinterpret_cast<const uint4*>(place(y, x));
  }
};

// Loads the tile at (row, column) of a matrix. A thread loads a vector of each of two rows.
template <bool kPads>
__device__ __forceinline__ void load_vectors(const Matrix<unsigned short, kPads>& matrix, int row,
                                             int column, Words& words) {
  constexpr int kAcross = kTile / 8;
  const int thread = static_cast<int>(threadIdx.x);
  const int pair = thread / kAcross, at = thread % kAcross * 8;
  const int y = row + 2 * pair, x = column + at;
  if (matrix.skips(x) || y >= matrix.rows) return;
  const uint4 even = matrix.vector(y, x);
  const uint4 odd = y + 1 < matrix.rows ? matrix.vector(y + 1, x) : even;
  const unsigned lows[] = {even.x, even.y, even.z, even.w};
  const unsigned highs[] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint2* const target = reinterpret_cast<uint2*>(&words[pair][at + 2 * i]);
    *target = {packed(lows[i] & 0xffff, highs[i]), packed(lows[i] >> 16, highs[i] >> 16)};
  }
}

// A thread loads vectors of several rows, all before the first store waits for one.
template <bool kPads>
__device__ __forceinline__ void load_vectors(const Matrix<unsigned, kPads>& matrix, int row,
                                             int column, Words& words) {
  constexpr int kAcross = kTile / 4, kRound = kThreads / kAcross, kRounds = kWordRows / kRound;
  const int thread = static_cast<int>(threadIdx.x);
  const int first = thread / kAcross, at = thread % kAcross * 4, x = column + at;
  if (matrix.skips(x)) return;
  uint4 loaded[kRounds] = {};
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int y = row + first + i * kRound;
    if (y < matrix.rows) loaded[i] = matrix.vector(y, x);
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
                                              int pitch) {
  const unsigned low = y < rows ? element[0] : 0;
  return packed(low, y + 1 < rows ? element[pitch] : 0);
}
__device__ __forceinline__ unsigned load_word(const unsigned* element, int y, int rows, int) {
  return y < rows ? *element : 0;
}

template <bool kPads>
__device__ __forceinline__ void load_elements(const Matrix<Element, kPads>& matrix, int row,
                                              int column, Words& words) {
  constexpr int kRound = kThreads / kTile, kRounds = kWordRows / kRound;
  const int at = static_cast<int>(threadIdx.x) % kTile, x = column + at;
  const int first = static_cast<int>(threadIdx.x) / kTile;
  if (matrix.skips(x)) return;
  // No row exists in a column outside.
  const int rows = matrix.has_column(x) ? matrix.rows : 0;
  unsigned loaded[kRounds];  // All loads are issued before the first store waits for one.
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int y = kWordElements * (first + i * kRound);
    loaded[i] = load_word(matrix.place(row + y, x), row + y, rows, matrix.pitch);
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) words[first + i * kRound][at] = loaded[i];
}

// Stores the tile's transpose: rows of the result are the matrix's columns, those that exist.
__device__ __forceinline__ void store_vectors(Element* result, int rows, int columns, int row,
                                              int column, const Words& words) {
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kRound = kThreads / 4;
#pragma unroll
  for (int part = 0; part < kWordRows / 16 * kTile / kRound; ++part) {
    const int item = thread / 4 + part * kRound;
    const int at = item % kTile, word = (item / kTile * 4 + thread % 4) * 4;
    const int x = column + at, y = row + kWordElements * word;
    if (static_cast<unsigned>(x) < static_cast<unsigned>(columns) && y < rows) {
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
    if (column + at < 0) continue;
    const unsigned word = words[of_column / kWordElements][at];
    result[static_cast<long long>(column + at) * rows + y] =
        static_cast<Element>(of_column % kWordElements ? word >> 16 : word);
  }
}

// Transposes the tile at (row, column): the result's rows are `count` columns from `begin` on.
template <bool kVectorLoads, bool kVectorStores, bool kPads>
__device__ __forceinline__ void transpose(const Matrix<Element, kPads>& source, Element* target,
                                          int begin, int count, int row, int column) {
  Words& words = *reinterpret_cast<Words*>(shared_memory());
  if constexpr (kVectorLoads) {
    load_vectors(source, row, column, words);
  } else {
    load_elements(source, row, column, words);
  }
  __syncthreads();
  if constexpr (kVectorStores) {
    store_vectors(target, source.rows, count, row, column - begin, words);
  } else {
    store_elements(target, source.rows, count, row, column - begin, words);
  }
}

// What is copied of a tensor for a slab: some columns of a matrix for each plane of some volumes,
// one volume after another. The columns are the pixels of the rows that the slab reads, with zeros
// for rows outside of the plane (padding).
struct SlabCopy {
  const Element* source;
  Element* target;
  int channels, planes, plane;  // of a volume, and the pixels of a plane
  int begin, count;             // the first pixel of a plane that is copied, and how many are
  int first_volume;

  // Copies a block's tile.
  template <bool kVectorLoads, bool kVectorStores>
  __device__ __forceinline__ void copy(int block) const {
    const int behind = kVectorLoads ? (begin % kVector + kVector) % kVector : 0;
    const int across = ceil_div(behind + count, kTile), tiles = across * ceil_div(channels, kTile);
    const int matrix = block / tiles, tile = block % tiles;
    const int volume = first_volume + matrix / planes;
    const int row = tile / across * kTile, column = begin - behind + tile % across * kTile;
    const Element* const first =
        source + (static_cast<long long>(volume) * channels * planes + matrix % planes) * plane;
    transpose<kVectorLoads, kVectorStores>(
        Matrix<Element, true>{first, channels, plane, planes * plane},
        target + static_cast<long long>(matrix) * count * channels, begin, count, row, column);
  }
};

}  // namespace hopper
}  // namespace fastconv
