// Adds up the partial sums of a causal convolution's gradients of weight and bias, which the blocks
// of backward.cuh leave as [share][tap or bias][channel].
//
// A block has one tap, or the bias, of 32 channels; without a bias, there are blocks for taps
// alone. Each of its warps adds every kWarps-th share, and the first one adds up the warps' sums:
// the order is fixed.
#pragma once
#include "device/tile.cuh"

namespace fastconv {
namespace causal {

using WeightScalar = Config::WeightScalar;
using Acc = AccOf<WeightScalar>::type;

constexpr int kWidth = Config::width;
constexpr int kReduced = kWidth + Config::bias;  // taps, and the bias
constexpr int kThreads = Config::threads;
constexpr int kWarps = kThreads / 32;

}  // namespace causal
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::causal::kThreads)
    causal_reduce(const void* __restrict__ scratch, Config::WeightScalar* __restrict__ grad_weight,
                  Config::WeightScalar* __restrict__ grad_bias, int dim, int shares) {
  using namespace fastconv::causal;
  Acc* const shared = reinterpret_cast<Acc*>(fastconv::shared_memory());
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  const int tap = static_cast<int>(blockIdx.x) % kReduced;
  const int channel = static_cast<int>(blockIdx.x) / kReduced * 32 + lane;
  const bool exists = channel < dim;

  const Acc* const partials = static_cast<const Acc*>(scratch) + 1ll * tap * dim + channel;
  Acc sum = 0;
#pragma unroll 4
  for (int share = warp; share < shares; share += kWarps) {
    if (exists) sum += partials[1ll * share * (kWidth + 1) * dim];
  }
  shared[thread] = sum;
  __syncthreads();
  if (warp > 0 || !exists) return;
  for (int i = 1; i < kWarps; ++i) sum += shared[i * 32 + lane];
  WeightScalar* const to = tap < kWidth ? grad_weight + 1ll * channel * Config::weight_stride_out +
                                              1ll * tap * Config::weight_stride_width
                                        : grad_bias + channel;
  *to = fastconv::narrow<WeightScalar>(sum);
}
