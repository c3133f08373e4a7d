// The gradient before the activation, which both passes of the gradients begin with.
//
//   kSlopeIsOne      there is no activation, or the gradient is given before it
//   kSlopeOfX        the activation's input is computed again, from x
//   kSlopeOfSum      the same, from x and the residual, which is read beside x
//   kSlopeOfOutput   from the output, which is read beside x: where there is a residual
#pragma once
#include "batchnorm/normalize.cuh"
#include "batchnorm/slope.cuh"

namespace fastconv {
namespace batchnorm {

constexpr int kSlopeIsOne = 0;
constexpr int kSlopeOfX = 1;
constexpr int kSlopeOfSum = 2;
constexpr int kSlopeOfOutput = 3;
constexpr int kSource = C::source;
constexpr bool kReadsBeside = kSource == kSlopeOfSum || kSource == kSlopeOfOutput;
constexpr int kUnroll = 2;  // vectors of a thread in flight, of each tensor

// The vectors of one place.
struct Operands {
  Elements grad, x, beside;

  // The gradient of element e before the activation.
  template <class Activation = C::activation>
  __device__ __forceinline__ Acc grad_before(const Normalization& normalized, int e) const {
    const Acc after = widen(grad.element[e]);
    if constexpr (kSource == kSlopeIsOne) {
      return after;
    } else if constexpr (kSource == kSlopeOfOutput) {
      return Slope<Activation>::of_output(after, Acc(widen(beside.element[e])));
    } else {
      Acc before = normalized(x.element[e], kWide ? 0 : e);
      if constexpr (kSource == kSlopeOfSum) before += widen(beside.element[e]);
      return Slope<Activation>::of_input(after, before);
    }
  }
};

__device__ __forceinline__ Operands load_all(const Scalar* grad, const Scalar* x,
                                             const Scalar* beside, const Place& place) {
  Operands operands;
  operands.grad = load(grad, place, Scalar{});
  operands.x = load(x, place, Scalar{});
  if constexpr (kReadsBeside) operands.beside = load(beside, place, Scalar{});
  return operands;
}

}  // namespace batchnorm
}  // namespace fastconv
