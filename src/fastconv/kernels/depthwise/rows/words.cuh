// Rows of contiguous tensors as words of 16 bytes.
//
// A tensor's rows follow each other without gaps, so rows of an odd length begin anywhere in a
// word. Blocks still read and write whole words: those that the row's elements lie in, wherever the
// row begins. What is left to do is to shift elements, within registers, from the words that they
// were read in to those that they are used or written in. Words at a row's ends, which other rows
// share, are read and written element by element.
#pragma once
#include "causal/tile.cuh"

namespace fastconv {
namespace rows {

using namespace causal;

constexpr int kPerWord = 16 / static_cast<int>(sizeof(Scalar));
using Word = Vector<Scalar, kPerWord>;

// Which element of its word an address or a position is; positions may be negative.
__device__ __forceinline__ int place_in_word(const Scalar* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) % 16 / sizeof(Scalar));
}
__device__ __forceinline__ int place_in_word(int position) { return position & (kPerWord - 1); }

// Copies those of `count` words to shared memory that lie in a row of `length` elements. The first
// word begins at position `first` of the row, which is where a word of memory begins.
__device__ __forceinline__ void stage_words(Scalar* shared, const Scalar* row, int first,
                                            int length, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const int p = first + i * kPerWord;
    if (p >= 0 && p <= length - kPerWord) copy_async<16>(shared + i * kPerWord, row + p, true);
  }
}

// Copies `count` words of a row that has neighbours on both sides. Words at the row's ends, and the
// one behind them, also hold elements of these.
__device__ __forceinline__ void stage_inner_words(Scalar* shared, const Scalar* row, int first,
                                                  int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    copy_async<16>(shared + i * kPerWord, row + first + i * kPerWord, true);
  }
}

// Fills the other words, with zeros beyond the row. Elements are loaded synchronously, so all
// copies are started before.
__device__ __forceinline__ void stage_ends(Scalar* shared, const Scalar* row, int first, int length,
                                           int count) {
  const int before = min_of(first < 0 ? ceil_div(-first, kPerWord) : 0, count);
  const int behind = max_of(before, min_of(count, floor_div(length - first, kPerWord)));
  for (int i = static_cast<int>(threadIdx.x); i < before + count - behind; i += kThreads) {
    const int word_number = i < before ? i : i + behind - before;
    const int p = first + word_number * kPerWord;
    Word word;
#pragma unroll
    for (int e = 0; e < kPerWord; ++e) {
      word.element[e] = p + e >= 0 && p + e < length ? row[p + e] : Scalar{};
    }
    *reinterpret_cast<Word*>(shared + word_number * kPerWord) = word;
  }
}

// The word that begins `shift` elements, less than a word, after `low`, which `high` follows.
__device__ __forceinline__ Word joined(const Word& low, const Word& high, int shift) {
  union Both {
    Word words[2];
    unsigned parts[8];
    __device__ Both() {}
  } both;
  both.words[0] = low;
  both.words[1] = high;
  const int bytes = shift * static_cast<int>(sizeof(Scalar));
#pragma unroll
  for (int i = 0; i < 6; ++i) both.parts[i] = bytes & 8 ? both.parts[i + 2] : both.parts[i];
  if constexpr (sizeof(Scalar) <= 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) both.parts[i] = bytes & 4 ? both.parts[i + 1] : both.parts[i];
  }
  if constexpr (sizeof(Scalar) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned long long pair =
          static_cast<unsigned long long>(both.parts[i + 1]) << 32 | both.parts[i];
      both.parts[i] = static_cast<unsigned>(pair >> (bytes & 2) * 8);
    }
  }
  return both.words[0];
}

// Stores a tile's results, which lie in shared memory from position `first` of the row on, as words
// of memory. Only positions from `begin` to `end` are stored. `staged` has room for one more word.
__device__ __forceinline__ void store_words(Scalar* row, const Scalar* staged, int first, int begin,
                                            int end) {
  const int before = place_in_word(place_in_word(row) + first);
  const Word* const words = reinterpret_cast<const Word*>(staged);
  for (int i = static_cast<int>(threadIdx.x);; i += kThreads) {
    const int t = first - before + i * kPerWord;
    if (t >= end) break;
    if (t >= begin && t <= end - kPerWord) {
      const int low = i - (before > 0);
      *reinterpret_cast<Word*>(row + t) =
          joined(words[low], words[low + 1], place_in_word(-before));
    } else {
#pragma unroll
      for (int e = 0; e < kPerWord; ++e) {
        if (t + e >= begin && t + e < end) row[t + e] = staged[t + e - first];
      }
    }
  }
}

}  // namespace rows
}  // namespace fastconv
