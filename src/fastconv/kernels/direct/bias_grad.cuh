// Bias gradient on plain CUDA cores: the sum of the output's gradient over images and pixels.
//
// `splits` blocks share each channel's values. A thread adds up every kThreads-th value of its
// block's share, then the block reduces its threads' results pairwise in shared memory. A second
// kernel adds the blocks' results in a fixed order, without atomics, so that the bits are the same
// every time. It serves weight gradients that do not read the output's gradient as it is, and
// exported files.
#pragma once
#include "device/scalar.cuh"

namespace fastconv {
namespace bias_grad {

using C = Config;
using Scalar = C::Scalar;

constexpr int kThreads = 256;
constexpr long long kPixels = 1ll * C::height * C::width;

__device__ __forceinline__ long long offset(long long image, int channel, long long pixel) {
  if (C::channels_last) return (image * kPixels + pixel) * C::channels + channel;
  return (image * C::channels + channel) * kPixels + pixel;
}

}  // namespace bias_grad
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::bias_grad::kThreads)
    bias_grad(const Config::Scalar* __restrict__ grad_output, float* __restrict__ partial,
              int splits, int batch) {
  using namespace fastconv::bias_grad;
  const int channel = blockIdx.x % C::channels, split = blockIdx.x / C::channels;
  const long long count = batch * kPixels;
  const long long end = count * (split + 1) / splits;
  float acc = 0;
  for (long long i = count * split / splits + threadIdx.x; i < end; i += kThreads) {
    acc += fastconv::widen(grad_output[offset(i / kPixels, channel, i % kPixels)]);
  }
  float* partial_acc = reinterpret_cast<float*>(fastconv::shared_memory());
  partial_acc[threadIdx.x] = acc;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial_acc[threadIdx.x] += partial_acc[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[channel * splits + split] = partial_acc[0];
}

extern "C" __global__ void __launch_bounds__(fastconv::bias_grad::kThreads)
    bias_reduce(const float* __restrict__ partial, Config::Scalar* __restrict__ grad, int splits) {
  using namespace fastconv::bias_grad;
  const int channel = blockIdx.x * kThreads + threadIdx.x;
  if (channel >= C::channels) return;
  float acc = 0;
  for (int split = 0; split < splits; ++split) acc += partial[channel * splits + split];
  grad[channel] = fastconv::narrow<Scalar>(acc);
}
