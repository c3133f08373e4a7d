// How fast a GPU's warps multiply small matrices, if they do nothing else: bench/mma_rate.py.
#include "device/mma.cuh"

// Each warp has kLeft matrices of 16 rows and kRight of 8 rows, all rows of 32 bytes, in registers;
// they come one after the other in `matrices`. It multiplies each of the one with each of the
// other, `rounds` times, into sums of their own: no product waits for the one before. In the end, a
// lane adds up what it has of all products, and `totals` gets 16 by 8 of these from each warp.
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
  float sums[kLeft][kRight][4] = {};
#pragma unroll 4
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int m = 0; m < kLeft; ++m) {
#pragma unroll
      for (int n = 0; n < kRight; ++n) mma(Config::Kind{}, sums[m][n], left[m], right[n]);
    }
  }
  const int warp = static_cast<int>(blockIdx.x * (blockDim.x / 32)) + thread / 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float total = 0.0f;
#pragma unroll
    for (int m = 0; m < kLeft; ++m) {
#pragma unroll
      for (int n = 0; n < kRight; ++n) total += sums[m][n][i];
    }
    totals[warp * 128 + (row + i / 2 * 8) * 8 + word * 2 + i % 2] = total;
  }
}
