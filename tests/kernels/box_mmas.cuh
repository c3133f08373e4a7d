// A kernel that multiplies an MN-major matrix by another one that begins anywhere in a swizzled
// box: tests/kernels/box_mmas.py.
#include "device/wgmma.cuh"

namespace fastconv {

constexpr int kColumns = Config::columns;
constexpr int kSteps = 3;                      // along K, of 16 places
constexpr int kLeftBytes = kSteps * 16 * 128;  // 64 rows, then comes the box
constexpr int kStepBytes = 16 * Config::span;  // of the right matrix

}  // namespace fastconv

// `matrices` are the left one and the box, as they are to lie in shared memory.
extern "C" __global__ void __launch_bounds__(128)
    box_mma(const unsigned char* matrices, float* results, int bytes) {
  using namespace fastconv;
  unsigned char* const tile = shared_memory();
  auto* const loaded = reinterpret_cast<Barrier*>(tile + bytes);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) barrier_init(loaded, 1);
  barrier_init_fence();
  __syncthreads();
  if (thread == 0) {
    barrier_arrive_expect(loaded, bytes);
    bulk_load(tile, matrices, bytes, loaded);
  }
  barrier_wait(loaded, 0);
  const Matrix left = swizzled_matrix(tile, kLeftBytes, 1024);
  const Matrix right =
      swizzled_matrix<Config::span>(tile + kLeftBytes + Config::first * Config::span,
                                    Config::leading * Config::span, Config::stride * Config::span);
  float acc[kColumns / 2];
  wgmma_fence();
  for (int step = 0; step < kSteps; ++step) {
    wgmma<kColumns, true, true>(Config::Kind{}, acc, left + step * 2048 / 16,
                                right + step * kStepBytes / 16, step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold_registers(acc);
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    results[(row + i / 2 % 2 * 8) * kColumns + i / 4 * 8 + column + i % 2] = acc[i];
  }
}
