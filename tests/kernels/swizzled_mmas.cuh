// A kernel that multiplies two swizzled matrices with rows of 128 bytes by wgmma:
// tests/kernels/swizzled_mmas.py.
#include "device/wgmma.cuh"

namespace fastconv {

constexpr int kColumns = Config::columns;
constexpr int kPiece = 1024;                    // 8 rows of 128 bytes
constexpr int kPieces = Config::places / 8;     // along K, of an MN-major matrix
constexpr int kSteps = 4, kStepBytes = 32;      // along K, of rows of 128 bytes
constexpr int kLeftBytes = Config::left_bytes;  // in shared memory, then comes the right matrix

// The part of `matrix` for one MMA: a step along K.
template <bool kMnMajor>
__device__ __forceinline__ Matrix at_step(Matrix matrix, int step) {
  return matrix + step * (kMnMajor ? kPieces / kSteps * kPiece : kStepBytes) / 16;
}

template <class Kind>  // TF32 has no MN-major matrices
__device__ __forceinline__ void multiply(Kind kind, float (&acc)[kColumns / 2], Matrix left,
                                         Matrix right, bool accumulate) {
  if constexpr (Config::left_mn_major || Config::right_mn_major) {
    wgmma<kColumns, Config::left_mn_major, Config::right_mn_major>(kind, acc, left, right,
                                                                   accumulate);
  } else {
    wgmma<kColumns>(kind, acc, left, right, accumulate);
  }
}

}  // namespace fastconv

// `matrices` are both, as they are to lie in shared memory.
extern "C" __global__ void __launch_bounds__(128)
    swizzled_mma(const unsigned char* matrices, float* results, int bytes) {
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
  const Matrix left = swizzled_matrix(tile, kPieces * kPiece, kPiece);
  const Matrix right = swizzled_matrix(tile + kLeftBytes, kPieces * kPiece, kPiece);
  float acc[kColumns / 2];
  wgmma_fence();
  for (int step = 0; step < kSteps; ++step) {
    multiply(Config::Kind{}, acc, at_step<Config::left_mn_major>(left, step),
             at_step<Config::right_mn_major>(right, step), step > 0);
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
