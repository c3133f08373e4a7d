// What a forward pass does to its sums before it stores them: activation(sum + residual), where the
// sum has its bias already. In the type of sums; what is stored is rounded once, behind it.
//
// Config has `activation`, one of these types, and `residual`; a pass that stores its sums as they
// are has neither. A residual is one more parameter of a kernel, the last one: as the preprocessor
// has to know of it, FASTCONV_RESIDUAL is defined where Config has it.
#pragma once
#include "device/tile.cuh"

namespace fastconv {

// --- Activations ---------------------------------------------------------------------------------
// As PyTorch computes them, with NaN in, NaN out.

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float error_function(float x) { return erff(x); }
__device__ __forceinline__ double error_function(double x) { return erf(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }

struct Identity {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    return x;
  }
};

struct Relu {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    return x < Sum(0) ? Sum(0) : x;
  }
};

struct Relu6 {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    return x < Sum(0) ? Sum(0) : x > Sum(6) ? Sum(6) : x;
  }
};

// The slope is a double's bits.
template <unsigned long long kSlope>
struct LeakyRelu {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    const double slope = __longlong_as_double(static_cast<long long>(kSlope));
    return x > Sum(0) ? x : x * static_cast<Sum>(slope);
  }
};

struct Sigmoid {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    return Sum(1) / (Sum(1) + exponential(-x));
  }
};

struct Silu {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    return x / (Sum(1) + exponential(-x));
  }
};

struct Gelu {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    return x * Sum(0.5) * (Sum(1) + error_function(x * Sum(0.70710678118654752440)));
  }
};

struct GeluTanh {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    const Sum inner = Sum(0.79788456080286535588) * (x + Sum(0.044715) * x * x * x);
    return Sum(0.5) * x * (Sum(1) + hyperbolic_tangent(inner));
  }
};

struct Hardswish {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    return x * Relu6::of(x + Sum(3)) * Sum(1.0 / 6.0);
  }
};

struct Tanh {
  template <class Sum>
  __device__ __forceinline__ static Sum of(Sum x) {
    return hyperbolic_tangent(x);
  }
};

// --- The bias ------------------------------------------------------------------------------------

// Neighbours of a bias: at once, if plans may assume that they lie at a multiple of their bytes.
template <int kCount, bool kAligned, class Scalar>
__device__ __forceinline__ Vector<Scalar, kCount> load_bias(const Scalar* first) {
  if constexpr (kAligned) {
    static_assert(kCount == 1 || kCount * sizeof(Scalar) <= 4, "as family.py has it");
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

// What is added to a sum where there is no residual.
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
  using Sum = typename SumOf<Scalar>::type;
  using Residual = typename ResidualOf<kAddsResidual, Scalar>::type;

#ifdef FASTCONV_RESIDUAL
  // In bytes, from where an output is stored to what is added to it: both tensors lie alike.
  long long distance;

  __device__ Epilogue(const Scalar* residual, const Scalar* output)
      : distance(reinterpret_cast<long long>(residual) - reinterpret_cast<long long>(output)) {}
#else
  static constexpr long long distance = 0;
#endif

  // Where the residual has what is added to the output at `target`.
  template <class Stored>
  __device__ __forceinline__ const Stored* beside(const Stored* target) const {
    return reinterpret_cast<const Stored*>(reinterpret_cast<long long>(target) + distance);
  }

  // What is added to neighbours, if these are `valid`.
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

  // The same from where a residual is staged, if there is one.
  __device__ __forceinline__ static Residual staged(const Scalar& place) {
    if constexpr (kAddsResidual) {
      return place;
    } else {
      return {};
    }
  }

  // A sum to an output.
  __device__ __forceinline__ static Sum activated(Sum sum, Nothing = {}) {
    return ActivationOf<Config>::type::of(sum);
  }
  __device__ __forceinline__ static Sum activated(Sum sum, Scalar residual) {
    return activated(sum + Sum(widen(residual)));
  }

  // Sums to outputs, neighbours that are stored at `target` if they are `valid`.
  template <int kCount>
  __device__ __forceinline__ Vector<Scalar, kCount> operator()(const Sum (&sums)[kCount],
                                                               const Scalar* target,
                                                               bool valid = true) const {
    Vector<Scalar, kCount> vector;
    if constexpr (kAddsResidual) {
      const Vector<Scalar, kCount> residual = residual_of<kCount>(target, valid);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        vector.element[i] = narrow<Scalar>(activated(sums[i], residual.element[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) vector.element[i] = narrow<Scalar>(activated(sums[i]));
    }
    return vector;
  }
  __device__ __forceinline__ Scalar operator()(Sum sum, const Scalar* target) const {
    const Sum sums[1] = {sum};
    return (*this)(sums, target).element[0];
  }
};

}  // namespace fastconv
