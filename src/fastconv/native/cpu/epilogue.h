// What becomes of a tile's sums: bias, residual and activation, and the way to memory.
#pragma once

#include "stage.h"

namespace fastconv::cpu {

template <class T>
struct Epilogue {
  Activation activation;
  T slope;

  // A NaN stays one in every activation, as in PyTorch.
  Vector<T> applied(Vector<T> sum) const {
    const Vector<T> zero{}, six = broadcast(T(6));
    switch (activation) {
      case kIdentity:
        return sum;
      case kRelu:
        return sum < zero ? zero : sum;
      case kRelu6:
        return sum < zero ? zero : (sum > six ? six : sum);
      case kLeakyRelu:
        return sum > zero ? sum : sum * broadcast(slope);
      case kHardswish: {
        const Vector<T> moved = sum + broadcast(T(3));
        const Vector<T> gate = moved < zero ? zero : (moved > six ? six : moved);
        return sum * gate / six;
      }
    }
    __builtin_unreachable();
  }
};

// Reads `count` numbers that lie `stride` apart; the other lanes are zero.
template <class Stored>
Vector<Computed<Stored>> gather_some(const Stored* from, int64_t stride, int64_t count) {
  using T = Computed<Stored>;
  if constexpr (std::is_same_v<Stored, T>) {
    if (stride == 1) return load_some(from, count);
  }
  Vector<T> vector{};
  for (int64_t i = 0; i < count; ++i) vector[i] = widened(from[i * stride]);
  return vector;
}

template <class Stored>
void scatter_some(Stored* to, int64_t stride, Vector<Computed<Stored>> vector, int64_t count) {
  if constexpr (std::is_same_v<Stored, Computed<Stored>>) {
    if (stride == 1) return store_some(to, vector, count);
  }
  for (int64_t i = 0; i < count; ++i) to[i * stride] = rounded<Stored>(vector[i]);
}

// Finishes a vector of sums, and stores `count` of its lanes. A call would take as long as that.
template <class Stored>
[[gnu::always_inline]] inline void finish(Vector<Computed<Stored>> sum,
                                          const Epilogue<Computed<Stored>>& epilogue,
                                          const Stored* residual, int64_t residual_stride,
                                          Stored* to, int64_t stride, int64_t count) {
  if (residual) sum += gather_some(residual, residual_stride, count);
  scatter_some(to, stride, epilogue.applied(sum), count);
}

}  // namespace fastconv::cpu
