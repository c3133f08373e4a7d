// Vectors of channels: 16 bytes of an MMA operand, converted and written to shared or global
// memory.
#pragma once
#include "device/tensor/half_copy.cuh"
#include "device/tensor/powers.cuh"
#include "device/tensor/tile.cuh"

namespace fastconv {
namespace tensor {

// 16 bytes in registers.
struct alignas(16) Words {
  unsigned word[4];

  __device__ static Words of(uint4 bits) { return {{bits.x, bits.y, bits.z, bits.w}}; }
};

// Eight numbers that become 16 bytes of float16.
struct Numbers {
  float number[8];
};

// The channels of a vector of the input as it is loaded, and of one of the weights.
constexpr bool kScalesInput = C::scaled_fp16 && !kLoadsCopy;
using Channels = Either<kScalesInput, Numbers, Words>::type;
using WeightChannels = Either<C::scaled_fp16, Numbers, Words>::type;

__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }
template <class Half>
__device__ __forceinline__ unsigned bits_of(Half value) {
  return value.bits;
}

// Packs the elements of a vector.
template <class Element>
__device__ __forceinline__ void fill(Words& vector, const Element* elements) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Element* const first = elements + k * (4 / static_cast<int>(sizeof(Element)));
    if constexpr (sizeof(Element) == 4) {
      vector.word[k] = __float_as_uint(widen(*first));
    } else {
      vector.word[k] = __byte_perm(bits_of(first[0]), bits_of(first[1]), 0x5410);
    }
  }
}
template <class Element>
__device__ __forceinline__ void fill(Numbers& vector, const Element* elements) {
#pragma unroll
  for (int k = 0; k < 8; ++k) vector.number[k] = widen(elements[k]);
}
template <class Vector, class Element>
__device__ __forceinline__ Vector vector_of(const Element* elements) {
  Vector vector;
  fill(vector, elements);
  return vector;
}

// The powers of two that scale the eight channels of a vector. A power is negative if every number
// of its channel must fit (see scale.cuh).
struct Powers {
  alignas(16) float power[8];

  __device__ explicit Powers(const float* powers) {
    const auto* const halves = reinterpret_cast<const float4*>(powers);
    *reinterpret_cast<float4*>(power) = halves[0];
    *reinterpret_cast<float4*>(power + 4) = halves[1];
  }
  // Whether every number of some channel must fit.
  __device__ __forceinline__ bool strict() const {
    unsigned signs = 0;
#pragma unroll
    for (float one : power) signs |= __float_as_uint(one);
    return signs >> 31 != 0;
  }
  __device__ __forceinline__ Numbers scale(const Numbers& vector) const {
    Numbers scaled;
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled.number[i] = vector.number[i] * fabsf(power[i]);
    return scaled;
  }
};

// The range of the numbers that were converted to float16: what is needed to tell whether they fit.
struct HalfRange {
  float largest = 0.0f;
  unsigned smallest = ~0u;  // bit pattern minus one, so that zeros do not count

  // Records the largest number of a scaled vector.
  __device__ __forceinline__ void see(const Numbers& vector) {
    float of_vector = 0.0f;
#pragma unroll
    for (float number : vector.number) of_vector = larger(of_vector, fabsf(number));
    largest = larger(largest, of_vector);
    smallest = min(smallest, __float_as_uint(of_vector) - 1u);
  }
  // Records a single number that must fit, even if scaling makes it zero.
  __device__ __forceinline__ void see(float number, float scaled) {
    const unsigned bits = max(__float_as_uint(fabsf(scaled)), 1u);
    if (number != 0.0f) smallest = min(smallest, bits - 1u);
  }
  __device__ __forceinline__ void see_strictly(const Numbers& vector, const Powers& powers) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float number = powers.power[i] < 0.0f ? vector.number[i] : 0.0f;
      see(number, number * powers.power[i]);
    }
  }
  // Whether the largest number is in float16's range, and the smallest is not below `least`.
  __device__ bool fits(float least) const {
    return largest <= 65504.0f && smallest >= __float_as_uint(least) - 1u;
  }
};

// Stands for powers and ranges where there is no scaled fp16.
struct NoPowers {
  __device__ explicit NoPowers(const float*) {}
  __device__ bool strict() const { return false; }
};
struct NoRange {
  __device__ void see(const Words&) {}
  __device__ void see(float, float) {}
  __device__ void see_strictly(const Words&, const NoPowers&) {}
  __device__ bool fits(float) const { return true; }
};

// Tells whether one of the low parts was infinite or NaN. It accumulates products of two of them,
// which takes half the instructions. Products of finite parts overflow only for numbers beyond
// 2^70; then the stage is merely treated as if it had an infinity.
struct LowRange : NoRange {
  float products = 0.0f;

  using NoRange::see;
  __device__ __forceinline__ void see(const Words& low) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      products = fmaf(__uint_as_float(low.word[i]), __uint_as_float(low.word[i + 1]), products);
    }
  }
  __device__ bool finite() const { return is_finite(products); }
};

using Scale = Either<kScalesInput, Powers, NoPowers>::type;
using Range = Either<kScalesInput, HalfRange, Either<kWatches, LowRange, NoRange>::type>::type;
using WeightRange = Either<C::scaled_fp16, HalfRange, NoRange>::type;

// Writes a vector of Words. float32 is rounded to TF32, or split into the two parts of 3xTF32,
// which are part_bytes apart; 16-bit types are written as they are.
template <bool kWeight, class Seen>
__device__ __forceinline__ void store_parts(unsigned char* target, int part_bytes, Words vector,
                                            Seen& seen) {
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
      split(__uint_as_float(vector.word[i]), vector.word[i], low.word[i]);
    }
    seen.see(low);
    *reinterpret_cast<Words*>(target + part_bytes) = low;
  }
  *reinterpret_cast<Words*>(target) = vector;
}

// Writes a vector as scaled fp16. In two parts, the low part of the input is enlarged by
// kLowFactor, and multiplied by a third part of the weights, which is as much smaller.
template <bool kWeight, class Seen>
__device__ __forceinline__ void store_parts(unsigned char* target, int part_bytes,
                                            const Numbers& scaled, Seen&) {
  Words high, low, smaller;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = scaled.number[2 * i];
    const float second = scaled.number[2 * i + 1];
    const bool to_even = C::parts == 2 || C::ties_to_even;
    high.word[i] = to_even ? floats_to_halves(first, second) : round_to_halves(first, second);
    if constexpr (C::parts == 2) {
      low.word[i] = low_halves(first, second, high.word[i], kWeight ? 1.0f : kLowFactor);
      if constexpr (kWeight) {
        const float first_high = half_to_float(static_cast<unsigned short>(high.word[i]));
        const float second_high = half_to_float(static_cast<unsigned short>(high.word[i] >> 16));
        smaller.word[i] = floats_to_halves(first_high / kLowFactor, second_high / kLowFactor);
      }
    }
  }
  *reinterpret_cast<Words*>(target) = high;
  if constexpr (C::parts == 2) *reinterpret_cast<Words*>(target + part_bytes) = low;
  if constexpr (kWeight && kSmallerPart) {
    *reinterpret_cast<Words*>(target + 2 * part_bytes) = smaller;
  }
}

// Writes a vector of the input, as it was loaded.
template <class Seen>
__device__ __forceinline__ void store_input(unsigned char* target, int part_bytes,
                                            const Words& vector, const NoPowers&, Seen& range) {
  store_parts<false>(target, part_bytes, vector, range);
}
__device__ __forceinline__ void store_input(unsigned char* target, int part_bytes,
                                            const Numbers& vector, const Powers& powers,
                                            HalfRange& range) {
  const Numbers scaled = powers.scale(vector);
  range.see(scaled);
  store_parts<false>(target, part_bytes, scaled, range);
}

}  // namespace tensor
}  // namespace fastconv
