// Vectors of the machine's width, by GCC's and Clang's vector extensions, and the storage types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>  // for loads and stores of a part of a vector
#endif

namespace fastconv::cpu {

// The width of a vector register, and how many of them there are.
#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr size_t kVectorBytes = 32;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr size_t kVectorBytes = 16;
constexpr int kRegisters = 32;
#else
constexpr size_t kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};

template <class T>
using Vector = typename VectorOf<T>::Type;

template <class T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename VectorOf<T>::Unaligned*>(from);
}

template <class T>
inline void store(T* to, Vector<T> vector) {
  *reinterpret_cast<typename VectorOf<T>::Unaligned*>(to) = vector;
}

// Compilers fold a subtraction of zero away, which leaves a broadcast.
template <class T>
inline Vector<T> broadcast(T number) {
  return number - Vector<T>{};
}

#if defined(__AVX512F__)
// The first lanes of a vector, of which there are fewer than it has.
inline uint16_t mask_of(int64_t count) { return uint16_t((1u << count) - 1); }
#endif

// The first `count` lanes from memory, and zeros in the others.
template <class T>
inline Vector<T> load_some(const T* from, int64_t count) {
#if defined(__AVX512F__)
  if (count >= kLanes<T>) return load(from);
  if constexpr (sizeof(T) == 4) {
    return Vector<T>(_mm512_maskz_loadu_epi32(mask_of(count), from));
  } else {
    return Vector<T>(_mm512_maskz_loadu_epi64(mask_of(count), from));
  }
#else
  Vector<T> vector{};
  if (count >= kLanes<T>) {
    vector = load(from);
  } else {
    std::memcpy(&vector, from, size_t(count) * sizeof(T));
  }
  return vector;
#endif
}

template <class T>
inline void store_some(T* to, Vector<T> vector, int64_t count) {
  if (count >= kLanes<T>) return store(to, vector);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_epi32(to, mask_of(count), __m512i(vector));
  } else {
    _mm512_mask_storeu_epi64(to, mask_of(count), __m512i(vector));
  }
#else
  std::memcpy(to, &vector, size_t(count) * sizeof(T));
#endif
}

// As many integers as a vector has lanes, each as long as a lane.
template <class T>
using LaneNumbers = typename VectorOf<std::conditional_t<sizeof(T) == 4, int32_t, int64_t>>::Type;

// The lanes of a vector that have these numbers.
template <class T>
inline Vector<T> chosen(Vector<T> vector, LaneNumbers<T> which) {
#if defined(__clang__)
  Vector<T> found{};
  for (int lane = 0; lane < kLanes<T>; ++lane) found[lane] = vector[which[lane]];
  return found;
#else
  return __builtin_shuffle(vector, which);
#endif
}

// One step of a transposition: exchanges the lanes of two rows that lie kDistance apart.
template <class T, int kDistance, int... kLane>
inline void exchange(Vector<T>& above, Vector<T>& below, std::integer_sequence<int, kLane...>) {
  const Vector<T> a = above, b = below;
  above =
      __builtin_shufflevector(a, b, (kLane & kDistance ? kLanes<T> + kLane - kDistance : kLane)...);
  below =
      __builtin_shufflevector(a, b, (kLane & kDistance ? kLanes<T> + kLane : kLane + kDistance)...);
}

template <class T, int kDistance = 1>
inline void transpose(Vector<T>* rows) {
  if constexpr (kDistance < kLanes<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) {
      if (!(i & kDistance)) {
        exchange<T, kDistance>(rows[i], rows[i + kDistance],
                               std::make_integer_sequence<int, kLanes<T>>());
      }
    }
    transpose<T, 2 * kDistance>(rows);
  }
}

// Whether no number is infinite or NaN: zero times such a number is NaN.
template <class T>
class Finiteness {
 public:
  void add(const T* numbers, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      products_ += load_some(numbers + i, count - i) * Vector<T>{};
    }
  }

  bool holds() const {
    bool does = true;
    for (int lane = 0; lane < kLanes<T>; ++lane) does = does && products_[lane] == T();
    return does;
  }

 private:
  Vector<T> products_{};
};

template <class T>
inline bool are_finite(const T* numbers, int64_t count) {
  Finiteness<T> found;
  found.add(numbers, count);
  return found.holds();
}

// Copies a matrix's rows as columns. Rows and columns lie `from_row` and `to_row` apart. Rows from
// `rows` to `padded`, which do not exist, count as zeros.
template <class T>
inline void copy_transposed(T* to, int64_t to_row, const T* from, int64_t from_row, int64_t rows,
                            int64_t padded, int64_t columns) {
  constexpr int kBlock = kLanes<T>;
  for (int64_t y = 0; y < padded; y += kBlock) {
    const int64_t high = rows - y, written = padded - y;
    int64_t x = 0;
    if (high >= kBlock) {
      // The last of several blocks overlaps the one before.
      for (; x < columns && columns >= kBlock; x += kBlock) {
        x = x + kBlock <= columns ? x : columns - kBlock;
        Vector<T> block[kBlock];
#pragma GCC unroll 16
        for (int i = 0; i < kBlock; ++i) block[i] = load(from + (y + i) * from_row + x);
        transpose<T>(block);
#pragma GCC unroll 16
        for (int i = 0; i < kBlock; ++i) store(to + (x + i) * to_row + y, block[i]);
      }
    }
    for (; x < columns; x += kBlock) {
      const int64_t wide = columns - x;
      Vector<T> block[kBlock];
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) {
        block[i] = i < high ? load_some(from + (y + i) * from_row + x, wide) : Vector<T>{};
      }
      transpose<T>(block);
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) {
        if (i < wide) store_some(to + (x + i) * to_row + y, block[i], written);
      }
    }
  }
}

// --- Types in memory -----------------------------------------------------------------------------

struct Bfloat16 {
  uint16_t bits;
};

#if defined(__FLT16_MANT_DIG__)
#define FASTCONV_HAS_FLOAT16 1
using Float16 = _Float16;
#else
#define FASTCONV_HAS_FLOAT16 0
#endif

// The type that numbers of a type in memory are multiplied and added in.
template <class Stored>
using Computed = std::conditional_t<sizeof(Stored) == 2, float, Stored>;

template <class Stored>
inline Computed<Stored> widened(Stored number) {
  return Computed<Stored>(number);
}

template <>
inline float widened(Bfloat16 number) {
  return __builtin_bit_cast(float, uint32_t(number.bits) << 16);
}

template <class Stored>
inline Stored rounded(Computed<Stored> number) {
  return Stored(number);
}

// Rounds to the nearest, ties to even, as PyTorch does; a NaN stays one.
template <>
inline Bfloat16 rounded<Bfloat16>(float number) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, number);
  if (number != number) return {0x7fc0};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace fastconv::cpu
