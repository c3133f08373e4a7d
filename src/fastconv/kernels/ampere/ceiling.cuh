// Measures the peak rate of mma.sync: warps that do nothing else. Launched by bench/mma_rate.py.
#include "device/mma.cuh"

// Each warp loads kLeft matrices of 16 rows and kRight of 8 rows from `matrices` to registers, one
// after the other; all rows have 32 bytes. It multiplies each left one by each right one, `rounds`
// times. Each pair has its own accumulators, so that no MMA waits for the one before. In the end,
// each lane sums its accumulators over all pairs, and `totals` gets 16 by 8 of these sums from each
// warp.
extern "C" __global__ void __launch_bounds__(1024)
    ceiling(const unsigned* matrices, float* totals, int rounds) {
  using namespace fastconv;
  constexpr int kLeft = Config::left, kRight = Config::right, kRowWords = 8;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int row = lane / 4, word = lane % 4;
  unsigned left[kLeft][4], right[kRight][2];
#pragma unroll
  for (int m = 0; m < kLeft; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left[m][i] = matrices[(m * 16 + i % 2 * 8 + row) * kRowWords + i / 2 * 4 + word];
    }
  }
#pragma unroll
  for (int n = 0; n < kRight; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      right[n][i] = matrices[(kLeft * 16 + n * 8 + row) * kRowWords + i * 4 + word];
    }
  }
  float acc[kLeft][kRight][4] = {};
#pragma unroll 4
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int m = 0; m < kLeft; ++m) {
#pragma unroll
      for (int n = 0; n < kRight; ++n) mma(Config::Kind{}, acc[m][n], left[m], right[n]);
    }
  }
  const int warp = static_cast<int>(blockIdx.x * (blockDim.x / 32)) + thread / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < kLeft; ++m) {
#pragma unroll
      for (int n = 0; n < kRight; ++n) sum += acc[m][n][i];
    }
    totals[warp * 128 + (row + i / 2 * 8) * 8 + word * 2 + i % 2] = sum;
  }
}
