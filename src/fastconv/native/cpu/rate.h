// The machine's rate of multiply-adds, from independent chains that stay in registers.
#pragma once

#include <atomic>
#include <chrono>

#include "multiply.h"

namespace fastconv::cpu {

// Chains of additions in as many registers as the innermost loop's sums have: each multiply-add
// waits for the one before it in its chain only, of which there are more than units take to fill.
template <class T>
class MultiplyAdds {
 public:
  static constexpr int kChains = kTilePositions * kTileVectors;
  static constexpr int64_t kRounds = 1 << 17;  // about a millisecond

  // Operations of a call.
  static constexpr double kOperations = 2.0 * kChains * kLanes<T> * double(kRounds);

  // The chains approach 1, wherever they begin.
  static void run(T factor) {
    const Vector<T> by = broadcast(factor), added = broadcast(T(1) - factor);
    Vector<T> chains[kChains];
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) chains[i] = broadcast(factor * T(i));
    for (int64_t round = 0; round < kRounds; ++round) {
#pragma GCC unroll 32
      for (int i = 0; i < kChains; ++i) chains[i] = chains[i] * by + added;
    }
    Vector<T> sum{};
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sum += chains[i];
    result.store(double(sum[0]), std::memory_order_relaxed);
  }

 private:
  static inline std::atomic<double> result;  // what is never used need not be computed
};

// Operations a second in all threads, of the fastest sample of as many as take so many seconds.
template <class T>
double multiply_add_rate(const Parallel& parallel, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  volatile double factor = 0.5;  // unknown to the compiler
  const int64_t threads = parallel.threads();
  double best = 0;
  const auto begin = Clock::now();
  do {
    const auto start = Clock::now();
    parallel(threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) MultiplyAdds<T>::run(T(factor));
    });
    best = std::max(best, double(threads) * MultiplyAdds<T>::kOperations / since(start));
  } while (since(begin) < seconds);
  return best;
}

}  // namespace fastconv::cpu
