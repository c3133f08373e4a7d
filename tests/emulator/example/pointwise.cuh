// Forward pass of a 1x1 convolution, NCHW, on CUDA cores: the example of docs/contributing.md.
//
// A thread block computes kThreads pixels of one output channel of one image. It stages that
// channel's weights in shared memory, where every thread reads all of them.
#pragma once
#include "device/scalar.cuh"

namespace fastconv {
namespace pointwise {

using C = Config;
using Scalar = C::Scalar;

constexpr int kThreads = C::threads;
constexpr int kBlocksPerPlane = (C::pixels + kThreads - 1) / kThreads;

}  // namespace pointwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::pointwise::kThreads)
    pointwise(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ weight,
              const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output) {
  using namespace fastconv::pointwise;
  float* const weights = reinterpret_cast<float*>(fastconv::shared_memory());
  const int plane = blockIdx.x / kBlocksPerPlane;
  const int image = plane / C::out_channels, channel = plane % C::out_channels;
  const int thread = static_cast<int>(threadIdx.x);

  for (int i = thread; i < C::in_channels; i += kThreads) {
    weights[i] = fastconv::widen(weight[channel * C::in_channels + i]);
  }
  __syncthreads();

  const int pixel = blockIdx.x % kBlocksPerPlane * kThreads + thread;
  if (pixel >= C::pixels) return;
  // 64-bit: a tensor may have more than 2^31 elements.
  const Scalar* const read = input + 1ll * image * C::in_channels * C::pixels + pixel;
  float acc = bias == nullptr ? 0.0f : fastconv::widen(bias[channel]);
  for (int i = 0; i < C::in_channels; ++i) {
    acc += weights[i] * fastconv::widen(read[1ll * i * C::pixels]);
  }
  output[1ll * plane * C::pixels + pixel] = fastconv::narrow<Scalar>(acc);
}
