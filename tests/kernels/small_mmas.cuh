// A kernel whose warps each run one mma.sync: tests/kernels/small_mmas.py.
#include "device/mma.cuh"

namespace fastconv {

constexpr int kRowBytes = 32;
constexpr int kPitch = kRowBytes + Config::gap;  // bytes from row to row in shared memory

// The rows of a matrix of 16 rows of 32 bytes that a lane gives the address of: four matrices of 8
// rows of 16 bytes, first those of the first 16 bytes.
__device__ __forceinline__ const unsigned char* lane_row(const unsigned char* matrix, int lane) {
  return matrix + lane % 16 * kPitch + lane / 16 * 16;
}

}  // namespace fastconv

// Each warp multiplies its own 16 rows of `left` with its own 8 rows of `right`, both of 32 bytes;
// or with 8 columns of `right`, 16 rows of 16 bytes, which are transposed as they are loaded.
extern "C" __global__ void __launch_bounds__(1024)
    small_mmas(const unsigned char* left, const unsigned char* right, float* sums) {
  using namespace fastconv;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  unsigned char* const tile = shared_memory() + warp * (24 * kPitch + 16 * kPitch);
  unsigned char* const other = tile + 16 * kPitch;
  for (int i = lane; i < 16 * kRowBytes; i += 32) {
    tile[i / kRowBytes * kPitch + i % kRowBytes] = left[warp * 16 * kRowBytes + i];
  }
  constexpr int kRightRow = Config::transposed ? 16 : kRowBytes;
  for (int i = lane; i < 8 * kRowBytes; i += 32) {
    other[i / kRightRow * kPitch + i % kRightRow] = right[warp * 8 * kRowBytes + i];
  }
  __syncwarp();
  unsigned rows[4], columns[4];
  load_matrices(rows, lane_row(tile, lane));
  if constexpr (Config::transposed) {
    load_transposed(columns, other + lane % 16 * kPitch);
  } else {
    load_matrices(columns, other + lane % 8 * kPitch + lane / 8 % 2 * 16);
  }
  float found[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  mma(Config::Kind{}, found, rows, {columns[0], columns[1]});
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    sums[warp * 128 + row * 8 + column] = found[i] - static_cast<float>(i + 1);
  }
}
