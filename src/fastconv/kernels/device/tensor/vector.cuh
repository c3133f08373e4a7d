// Vectors of channels: 16 bytes of an operand, from registers to memory as the tensor core wants
// them.
#pragma once
#include "device/tensor/powers.cuh"
#include "device/tensor/tile.cuh"

namespace fastconv {
namespace tensor {

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

// How a vector's numbers become float16's: multiplied by powers of two, which are negative for
// channels in which every number counts by itself (see scale.cuh).
struct Powers {
  alignas(16) float power[8];

  __device__ explicit Powers(const float* powers) {
    const auto* const halves = reinterpret_cast<const float4*>(powers);
    *reinterpret_cast<float4*>(power) = halves[0];
    *reinterpret_cast<float4*>(power + 4) = halves[1];
  }
  // Whether there is such a channel.
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

// Which numbers float16 was asked for: keeps what is needed to tell whether it has them.
struct HalfRange {
  float largest = 0.0f;
  unsigned smallest = ~0u;  // bits, less one: then zeros are no number's

  // Of a vector, scaled, the largest number counts.
  __device__ __forceinline__ void see(const Numbers& vector) {
    float of_vector = 0.0f;
#pragma unroll
    for (float number : vector.number) of_vector = larger(of_vector, fabsf(number));
    largest = larger(largest, of_vector);
    smallest = min(smallest, __float_as_uint(of_vector) - 1u);
  }
  // Of a number that counts by itself, even if scaling makes it zero.
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
  // Whether float16 has the largest, and the smallest as well as a number of this size.
  __device__ bool fits(float least) const {
    return largest <= 65504.0f && smallest >= __float_as_uint(least) - 1u;
  }
};

// What everything else needs of these.
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

// Whether one of the low parts was infinite or NaN. Products of two: half of the instructions, and
// those of finite ones overflow only where numbers are beyond 2^70, which does no harm.
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

using Scale = Either<C::halves, Powers, NoPowers>::type;
using Range = Either<C::halves, HalfRange, Either<kWatches, LowRange, NoRange>::type>::type;

// Writes a vector, in `parts` that are part_bytes apart: floats rounded to TF32, or in two such
// numbers; 16-bit types as they are.
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

// Floats as float16. Of two parts, the low one of the input is enlarged. It is multiplied by
// weights that are as much smaller: a third part.
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

// A vector of the input, as it was loaded.
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
