// What all kernels of causal convolutions that read x share: types, sizes, and wide parameters.
#pragma once
#include "device/tile.cuh"

namespace fastconv {
namespace causal {

using C = Config;
using Scalar = C::Scalar;
using WeightScalar = C::WeightScalar;
using Acc = typename AccOf<Scalar>::type;

constexpr int kWidth = C::width;
constexpr int kStates = kWidth - 1;
constexpr int kThreads = C::threads;

// The parameters of a launch are 32-bit ints; strides are passed in two.
__device__ __forceinline__ long long wide(int low, int high) {
  return static_cast<long long>(high) << 32 | static_cast<unsigned>(low);
}

}  // namespace causal
}  // namespace fastconv
