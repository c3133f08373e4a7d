// Gradients of activations, by PyTorch's formulas. Those that choose between gradients do not
// multiply: an infinite gradient that is not chosen leaves zero.
#pragma once
#include "device/epilogue.cuh"

namespace fastconv {

// The gradient of an activation's input, given that of its output. `of_output` computes it from the
// output, for activations that their outputs tell enough about, and `of_input` from the input.
template <class Activation>
struct Slope;

template <>
struct Slope<Identity> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc) {
    return grad;
  }
  template <class Acc>
  __device__ __forceinline__ static Acc of_output(Acc grad, Acc) {
    return grad;
  }
};

template <>
struct Slope<Relu> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_output(Acc grad, Acc y) {
    return y <= Acc(0) ? Acc(0) : grad;
  }
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    return of_output(grad, x);
  }
};

template <>
struct Slope<Relu6> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_output(Acc grad, Acc y) {
    return y <= Acc(0) || y >= Acc(6) ? Acc(0) : grad;
  }
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    return of_output(grad, x);
  }
};

template <unsigned long long kSlope>
struct Slope<LeakyRelu<kSlope>> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_output(Acc grad, Acc y) {
    const double slope = __longlong_as_double(static_cast<long long>(kSlope));
    return y > Acc(0) ? grad : grad * static_cast<Acc>(slope);
  }
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    return of_output(grad, x);
  }
};

template <>
struct Slope<Sigmoid> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_output(Acc grad, Acc y) {
    return grad * (Acc(1) - y) * y;
  }
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    return of_output(grad, Sigmoid::of(x));
  }
};

template <>
struct Slope<Tanh> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_output(Acc grad, Acc y) {
    return grad * (Acc(1) - y * y);
  }
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    return of_output(grad, Tanh::of(x));
  }
};

template <>
struct Slope<Silu> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    const Acc share = Sigmoid::of(x);
    return grad * share * (Acc(1) + x * (Acc(1) - share));
  }
};

template <>
struct Slope<Gelu> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    const Acc below = Acc(0.5) * (Acc(1) + error_function(x * Acc(0.70710678118654752440)));
    const Acc density = Acc(0.39894228040143267794) * exponential(Acc(-0.5) * x * x);
    return grad * (below + x * density);
  }
};

template <>
struct Slope<GeluTanh> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    const Acc factor = Acc(0.79788456080286535588), cubic = Acc(0.044715);
    const Acc tanh = hyperbolic_tangent(factor * (x + cubic * x * x * x));
    const Acc inner = factor * (Acc(1) + Acc(3) * cubic * x * x);
    return grad * Acc(0.5) * (Acc(1) + tanh + x * (Acc(1) - tanh * tanh) * inner);
  }
};

template <>
struct Slope<Hardswish> {
  template <class Acc>
  __device__ __forceinline__ static Acc of_input(Acc grad, Acc x) {
    if (x <= Acc(-3)) return Acc(0);
    return x < Acc(3) ? grad * (x / Acc(3) + Acc(0.5)) : grad;
  }
};

}  // namespace fastconv
