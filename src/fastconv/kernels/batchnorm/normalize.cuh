// The normalization of an element, which the forward pass and gradients compute with the same bits.
#pragma once
#include "batchnorm/walk.cuh"

namespace fastconv {
namespace batchnorm {

using Parameter = C::Parameter;

// What the elements of a thread's columns are normalized with: (x - mean) * scale + shift. The mean
// is subtracted first, so that numbers that are large beside their deviation lose no bits.
struct Normalization {
  Acc mean[kColumns], scale[kColumns], shift[kColumns];

  __device__ __forceinline__ Normalization(const Channels& own, const Acc* means,
                                           const Acc* invstds, const Parameter* weight,
                                           const Parameter* bias) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int channel = own.channel[i];
      mean[i] = means[channel];
      scale[i] = invstds[channel];
      if (weight != nullptr) scale[i] *= widen(weight[channel]);
      shift[i] = bias == nullptr ? Acc(0) : widen(bias[channel]);
    }
  }
  __device__ __forceinline__ Acc centered(Scalar x, int i) const { return widen(x) - mean[i]; }
  __device__ __forceinline__ Acc operator()(Scalar x, int i) const {
    return fma(centered(x, i), scale[i], shift[i]);
  }
};

}  // namespace batchnorm
}  // namespace fastconv
