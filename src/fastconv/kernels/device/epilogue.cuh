// The epilogue of a forward pass: output = activation(acc + residual), where the accumulator
// already contains the bias. It is computed in the accumulator's type and rounded once, when it is
// stored.
//
// A kernel's Config has `activation`, one of the types below, and `residual`. A pass without an
// epilogue has neither. A residual adds a last parameter to the kernel's signature, which only the
// preprocessor can do: FASTCONV_RESIDUAL is defined where Config has a residual.
#pragma once
#include "device/tile.cuh"

namespace fastconv {

// --- Activations ---------------------------------------------------------------------------------
// Activations follow PyTorch's formulas. NaN stays NaN.

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float error_function(float x) { return erff(x); }
__device__ __forceinline__ double error_function(double x) { return erf(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }

struct Identity {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x;
  }
};

struct Relu {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x < Acc(0) ? Acc(0) : x;
  }
};

struct Relu6 {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x < Acc(0) ? Acc(0) : x > Acc(6) ? Acc(6) : x;
  }
};

// kSlope is the bit pattern of a double.
template <unsigned long long kSlope>
struct LeakyRelu {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    const double slope = __longlong_as_double(static_cast<long long>(kSlope));
    return x > Acc(0) ? x : x * static_cast<Acc>(slope);
  }
};

struct Sigmoid {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return Acc(1) / (Acc(1) + exponential(-x));
  }
};

struct Silu {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x / (Acc(1) + exponential(-x));
  }
};

struct Gelu {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x * Acc(0.5) * (Acc(1) + error_function(x * Acc(0.70710678118654752440)));
  }
};

struct GeluTanh {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    const Acc inner = Acc(0.79788456080286535588) * (x + Acc(0.044715) * x * x * x);
    return Acc(0.5) * x * (Acc(1) + hyperbolic_tangent(inner));
  }
};

struct Hardswish {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x * Relu6::of(x + Acc(3)) * Acc(1.0 / 6.0);
  }
};

struct Tanh {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return hyperbolic_tangent(x);
  }
};

// --- The bias ------------------------------------------------------------------------------------

// Loads kCount consecutive bias elements: as one vector if the plan guarantees that their address
// is aligned to the vector, else one by one.
template <int kCount, bool kAligned, class Scalar>
__device__ __forceinline__ Vector<Scalar, kCount> load_bias(const Scalar* first) {
  if constexpr (kAligned) {
    static_assert(kCount == 1 || kCount * sizeof(Scalar) <= 4, "BIAS_ALIGNMENT of family.py");
    return *reinterpret_cast<const Vector<Scalar, kCount>*>(first);
  } else {
    Vector<Scalar, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.element[i] = first[i];
    return vector;
  }
}

// --- The epilogue --------------------------------------------------------------------------------

template <class>
struct Exists {
  using type = void;
};
template <class Config, class = void>
struct ActivationOf {
  using type = Identity;
};
template <class Config>
struct ActivationOf<Config, typename Exists<typename Config::activation>::type> {
  using type = typename Config::activation;
};

#ifdef FASTCONV_RESIDUAL
constexpr bool kAddsResidual = true;
#define FASTCONV_WITH_RESIDUAL(...) , __VA_ARGS__
#define FASTCONV_EPILOGUE(output) fastconv::Epilogue<Config>(residual, output)
#else
constexpr bool kAddsResidual = false;
#define FASTCONV_WITH_RESIDUAL(...)
#define FASTCONV_EPILOGUE(output) fastconv::Epilogue<Config>()
#endif
#define FASTCONV_RESIDUAL_PARAMETER \
  FASTCONV_WITH_RESIDUAL(const Config::Scalar* __restrict__ residual)

// Stands for the residual in a pass that has none.
struct Nothing {};
template <bool kAdds, class Scalar>
struct ResidualOf {
  using type = Nothing;
};
template <class Scalar>
struct ResidualOf<true, Scalar> {
  using type = Scalar;
};

template <class Config>
struct Epilogue {
  using Scalar = typename Config::Scalar;
  using Acc = typename AccOf<Scalar>::type;
  using Residual = typename ResidualOf<kAddsResidual, Scalar>::type;

#ifdef FASTCONV_RESIDUAL
  // Bytes from an output element to the residual element that is added to it. Both tensors have the
  // same layout, so this distance is constant.
  long long distance;

  __device__ Epilogue(const Scalar* residual, const Scalar* output)
      : distance(reinterpret_cast<long long>(residual) - reinterpret_cast<long long>(output)) {}
#else
  static constexpr long long distance = 0;
#endif

  // The address of the residual of the output at `target`.
  template <class Stored>
  __device__ __forceinline__ const Stored* beside(const Stored* target) const {
    return reinterpret_cast<const Stored*>(reinterpret_cast<long long>(target) + distance);
  }

  // Loads the residuals of kCount consecutive outputs, or zeros if these are not `valid`.
  template <int kCount>
  __device__ __forceinline__ Vector<Scalar, kCount> residual_of(const Scalar* target,
                                                                bool valid) const {
    constexpr int kBytes = kCount * static_cast<int>(sizeof(Scalar));
    constexpr int kLoads = kBytes > 16 ? kBytes / 16 : 1;
    using Loaded = typename Bits<kBytes / kLoads>::type;
    Vector<Scalar, kCount> vector = {};
    if (valid) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        reinterpret_cast<Loaded*>(&vector)[i] =
            __ldg(reinterpret_cast<const Loaded*>(beside(target)) + i);
      }
    }
    return vector;
  }

  __device__ __forceinline__ Residual residual_of(const Scalar* target) const {
    if constexpr (kAddsResidual) {
      return residual_of<1>(target, true).element[0];
    } else {
      return {};
    }
  }

  // The residual that the kernel has staged at `place`, if the pass has a residual.
  __device__ __forceinline__ static Residual staged(const Scalar& place) {
    if constexpr (kAddsResidual) {
      return place;
    } else {
      return {};
    }
  }

  // Applies the residual and the activation to one accumulator.
  __device__ __forceinline__ static Acc activated(Acc acc, Nothing = {}) {
    return ActivationOf<Config>::type::of(acc);
  }
  __device__ __forceinline__ static Acc activated(Acc acc, Scalar residual) {
    return activated(acc + Acc(widen(residual)));
  }

  // Turns kCount accumulators into outputs, which are stored side by side at `target` if they are
  // `valid`.
  template <int kCount>
  __device__ __forceinline__ Vector<Scalar, kCount> operator()(const Acc (&accs)[kCount],
                                                               const Scalar* target,
                                                               bool valid = true) const {
    Vector<Scalar, kCount> vector;
    if constexpr (kAddsResidual) {
      const Vector<Scalar, kCount> residual = residual_of<kCount>(target, valid);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        vector.element[i] = narrow<Scalar>(activated(accs[i], residual.element[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) vector.element[i] = narrow<Scalar>(activated(accs[i]));
    }
    return vector;
  }
  __device__ __forceinline__ Scalar operator()(Acc acc, const Scalar* target) const {
    const Acc accs[1] = {acc};
    return (*this)(accs, target).element[0];
  }
};

}  // namespace fastconv
