// Vectors of channels: 16 bytes of an operand, from registers to memory as the tensor core wants
// them.
#pragma once
#include "hopper/correlate_tile.cuh"

namespace fastconv {
namespace hopper {

// 16 bytes in registers.
struct alignas(16) Words {
  unsigned word[4];

  __device__ static Words of(uint4 bits) { return {{bits.x, bits.y, bits.z, bits.w}}; }
};

// Numbers that are to be 16 bytes of float16.
struct Numbers {
  float number[8];
};

using Channels = Either<C::halves, Numbers, Words>::type;

__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }
template <class Half>
__device__ __forceinline__ unsigned bits_of(Half value) {
  return value.bits;
}

// A vector of elements.
__device__ __forceinline__ void fill(Words& vector, const Scalar* elements) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Scalar* const first = elements + k * (kVector / 4);
    if constexpr (sizeof(Scalar) == 4) {
      vector.word[k] = __float_as_uint(widen(*first));
    } else {
      vector.word[k] = __byte_perm(bits_of(first[0]), bits_of(first[1]), 0x5410);
    }
  }
}
__device__ __forceinline__ void fill(Numbers& vector, const Scalar* elements) {
#pragma unroll
  for (int k = 0; k < 8; ++k) vector.number[k] = widen(elements[k]);
}
__device__ __forceinline__ Channels channels_of(const Scalar* elements) {
  Channels vector;
  fill(vector, elements);
  return vector;
}

// How numbers become float16: multiplied by a power of two. Keeps what is needed to tell whether
// all of them fit: of each vector's largest number, but for zeros, the largest and the smallest.
struct HalfScale {
  float scale;
  float largest = 0.0f;
  unsigned smallest = ~0u;  // its bits, less one: then zeros are no number's

  __device__ explicit HalfScale(float scale) : scale(scale) {}

  __device__ __forceinline__ void see(const Numbers& vector) {
    float of_vector = 0.0f;
#pragma unroll
    for (float number : vector.number) of_vector = larger(of_vector, fabsf(number));
    largest = larger(largest, of_vector);
    smallest = min(smallest, __float_as_uint(of_vector) - 1u);
  }
  // Whether float16 has them all, and the least of a vector's largest numbers as a normal one with
  // so much to spare: what a vector's smaller ones lose then is no more than its largest does.
  __device__ bool fits(float least) const {
    return largest * scale <= 65504.0f && smallest >= __float_as_uint(least / scale) - 1u;
  }
};

// What everything else needs of that.
struct NoScale {
  static constexpr float scale = 1.0f;

  __device__ explicit NoScale(float) {}
  __device__ bool fits(float) const { return true; }
};

using Scale = Either<C::halves, HalfScale, NoScale>::type;

// Writes a vector, in `parts` that are part_bytes apart: floats rounded to TF32, or in two such
// numbers; 16-bit types as they are.
template <bool kWeight>
__device__ __forceinline__ void store_parts(unsigned char* target, int part_bytes, Words vector,
                                            NoScale&) {
  if constexpr (sizeof(Scalar) == 4 && C::parts == 1) {
#pragma unroll
    for (unsigned& word : vector.word) {
      const float value = __uint_as_float(word);
      word = __float_as_uint(C::ties_to_even ? round_to_even_tf32(value)
                                             : round_operand_to_tf32(value));
    }
  } else if constexpr (sizeof(Scalar) == 4) {
    Words low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = __uint_as_float(vector.word[i]);
      const float high = round_to_tf32(value);
      vector.word[i] = __float_as_uint(high);
      low.word[i] = __float_as_uint(round_to_tf32(value - high));
    }
    *reinterpret_cast<Words*>(target + part_bytes) = low;
  }
  *reinterpret_cast<Words*>(target) = vector;
}

// Floats as float16. Of two parts, the low one of the input is 2^11 times as large as it counts
// for, so that it fits where the high one does. It is multiplied by weights that are as much
// smaller: a third part.
template <bool kWeight>
__device__ __forceinline__ void store_parts(unsigned char* target, int part_bytes,
                                            const Numbers& vector, HalfScale& range) {
  constexpr float kLow = 2048.0f;
  range.see(vector);
  Words high, low, smaller;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = vector.number[2 * i] * range.scale;
    const float second = vector.number[2 * i + 1] * range.scale;
    const bool to_even = C::parts == 2 || C::ties_to_even;
    high.word[i] = to_even ? floats_to_halves(first, second) : round_to_halves(first, second);
    if constexpr (C::parts == 2) {
      const float first_high = half_to_float(static_cast<unsigned short>(high.word[i]));
      const float second_high = half_to_float(static_cast<unsigned short>(high.word[i] >> 16));
      constexpr float kFactor = kWeight ? 1.0f : kLow;
      low.word[i] =
          floats_to_halves((first - first_high) * kFactor, (second - second_high) * kFactor);
      if constexpr (kWeight) {
        smaller.word[i] = floats_to_halves(first_high / kLow, second_high / kLow);
      }
    }
  }
  *reinterpret_cast<Words*>(target) = high;
  if constexpr (C::parts == 2) *reinterpret_cast<Words*>(target + part_bytes) = low;
  if constexpr (C::parts == 2 && kWeight) {
    *reinterpret_cast<Words*>(target + 2 * part_bytes) = smaller;
  }
}

}  // namespace hopper
}  // namespace fastconv
