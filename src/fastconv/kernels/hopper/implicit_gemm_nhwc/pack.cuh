// Packs weights that the tensor map cannot describe, to the layout that it has.
#pragma once
#include "hopper/implicit_gemm_nhwc/tile.cuh"

namespace fastconv {
namespace hopper {

// Packed weights are [outer][tap][inner]. Inner channels are the layer's input channels, or for a
// gradient in TF32, whose weights are K-major, its output channels.
constexpr bool kInnerOut = C::transposed && !kNMajor;
constexpr int kInner = kInnerOut ? C::weight_out : C::weight_in;
constexpr int kOuter = kInnerOut ? C::weight_in : C::weight_out;
constexpr int kInnerStride = kInnerOut ? C::weight_stride_out : C::weight_stride_in;
constexpr int kOuterStride = kInnerOut ? C::weight_stride_in : C::weight_stride_out;
constexpr int kPlaneTaps = C::kernel_height * C::kernel_width;
constexpr int kTaps = Depth::kernel * kPlaneTaps;
constexpr int kInnerVectors = kInner / kVector;

// The vector that a thread packs.
struct PackedVector {
  int inner, tap, outer;

  // Neighbouring threads store neighbours if elements have 16 bits. If they have 32, the threads
  // read neighbours, of which a sector of the L2 cache has only eight: taps, or outer channels. In
  // a gradient, kTogether threads store neighbours, so that they also store whole sectors.
  __device__ __forceinline__ explicit PackedVector(int i) {
    if constexpr (kScalarBytes == 2) {
      inner = i % kInnerVectors;
      tap = i / kInnerVectors % kTaps;
      outer = i / kInnerVectors / kTaps;
    } else if constexpr (kInnerOut) {
      constexpr int kTogether = gcd(kInnerVectors, 4);
      constexpr bool kOuterFirst = kOuterStride == 1;
      const int rest = i / kTogether, first = rest % (kOuterFirst ? kOuter : kTaps);
      const int second = rest / (kOuterFirst ? kOuter : kTaps) % (kOuterFirst ? kTaps : kOuter);
      outer = kOuterFirst ? first : second;
      tap = kOuterFirst ? second : first;
      inner = rest / (kOuter * kTaps) * kTogether + i % kTogether;
    } else {
      tap = i % kTaps;
      inner = i / kTaps % kInnerVectors;
      outer = i / kTaps / kInnerVectors;
    }
  }
  __device__ __forceinline__ int index() const {
    return (outer * kTaps + tap) * kInnerVectors + inner;
  }
};

__device__ __forceinline__ void pack_weights(const Scalar* weight, Scalar* packed) {
  constexpr int kCount = kOuter * kTaps * kInnerVectors;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < kCount;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    const PackedVector at(i);
    const int plane = Depth::exists ? at.tap / kPlaneTaps : 0, tap = at.tap - plane * kPlaneTaps;
    const Scalar* const source = weight + 1LL * at.outer * kOuterStride +
                                 1LL * (at.inner * kVector) * kInnerStride +
                                 1LL * plane * Depth::weight_stride +
                                 1LL * (tap / C::kernel_width) * C::weight_stride_height +
                                 1LL * (tap % C::kernel_width) * C::weight_stride_width;
    Vector<Scalar, kVector> vector;
#pragma unroll
    for (int k = 0; k < kVector; ++k) vector.element[k] = source[1LL * k * kInnerStride];
    reinterpret_cast<Vector<Scalar, kVector>*>(packed)[kScalarBytes == 2 ? i : at.index()] = vector;
  }
}

}  // namespace hopper
}  // namespace fastconv
