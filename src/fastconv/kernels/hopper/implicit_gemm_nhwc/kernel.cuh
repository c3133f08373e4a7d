// Implicit GEMM of channels-last (NHWC) tensors, in TF32 or 16-bit types, on Hopper's tensor cores:
// forward passes and input gradients. M is the output positions of all images, N the output
// channels, and K the input channels of one tap after the other. TMA brings both operands: the
// input in im2col mode, or tiled where all images are one matrix. It rounds float32 to TF32 as it
// copies. See docs/kernels/hopper-implicit-gemm-nhwc.md.
#pragma once
#include "hopper/implicit_gemm_nhwc/load.cuh"
#include "hopper/implicit_gemm_nhwc/pack.cuh"
#include "hopper/implicit_gemm_nhwc/store.cuh"

namespace fastconv {
namespace hopper {

// B is K-major (input channels are neighbours in the weight), or with kNMajor N-major.
template <int kColumns>
__device__ __forceinline__ void multiply(float (&acc)[kColumns / 2], Matrix rows, Matrix weights,
                                         bool accumulate) {
  if constexpr (kScalarBytes == 4) {
    wgmma<kColumns>(Operand{}, acc, rows, weights, accumulate);
  } else {
    wgmma<kColumns, false, kNMajor>(Operand{}, acc, rows, weights, accumulate);
  }
}

// The MMAs of a stage.
template <int kMmas>
__device__ __forceinline__ void multiply_stage(float (&acc)[kAccumulators], Matrix rows,
                                               Matrix weights, bool accumulate) {
  constexpr int kWeightStep = (kNMajor ? kMmaDepth * kSpan : kMmaSpan) / 16;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kMmas; ++k) {
    multiply<kTileColumns>(acc, rows + k * kMmaSpan / 16, weights + k * kWeightStep,
                           accumulate || k > 0);
  }
  wgmma_commit();
}

// A consumer warp's arrival: it no longer reads the stage.
__device__ __forceinline__ void release(Barrier* empty, int lane) {
  if (lane == 0) barrier_arrive(empty);
}

__device__ __forceinline__ void multiply_tile(float (&acc)[kAccumulators], const Shared& shared,
                                              Ring& ring, int steps, int consumer, int lane) {
  int previous = -1;
  for (int step = 0; step < steps; ++step, ring.advance()) {
    barrier_wait(shared.full(ring.stage), ring.parity);
    const Matrix rows = swizzled_matrix(shared.rows(ring.stage) + consumer * 64 * kSpan, 16, 1024);
    const Matrix weights = swizzled_matrix(shared.weights(ring.stage, step), 64 * kSpan, 1024);
    if (kLastMmas == kDepth / kMmaDepth || step % kChunks != kChunks - 1) {
      multiply_stage<kDepth / kMmaDepth>(acc, rows, weights, step > 0);
    } else {
      multiply_stage<kLastMmas>(acc, rows, weights, step > 0);
    }
    wgmma_wait<1>();
    if (previous >= 0) release(shared.empty(previous), lane);
    previous = ring.stage;
  }
  wgmma_wait<0>();
  if (previous >= 0) release(shared.empty(previous), lane);
}

__device__ __forceinline__ void consume(const Shared& shared, const TensorMap& map,
                                        const Scalar* bias, Scalar* output, const Walk& walk,
                                        int batch, const Epilogue<C>& epilogue, float* statistics) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  Ring ring(0);
  Sums sums;
  if constexpr (C::resident) barrier_wait(shared.resident(), 0);
  for (int number = static_cast<int>(blockIdx.x); number < walk.tiles;
       number += static_cast<int>(gridDim.x)) {
    const Tile tile = walk.tile(number);
    const int steps = tile.steps();
    if constexpr (kAddsResidual) {
      prefetch_residual(shared, output, epilogue, tile, walk.positions, warp, lane);
    }
    float acc[kAccumulators];
    multiply_tile(acc, shared, ring, steps, warp / 4, lane);
    hold_registers(acc);
    if (steps == 0) {  // no tap reaches this residue
#pragma unroll
      for (float& sum : acc) sum = 0.0f;
    }
    if (bias != nullptr) add_bias(acc, bias, tile.column, lane);
    store_tile(acc, shared, map, output, tile, batch, warp, lane, epilogue, sums);
  }
  if constexpr (C::dense) bulk_store_wait();
  store_statistics(sums, shared, walk, statistics, warp, lane);
}

__device__ __forceinline__ void init_barriers(const Shared& shared) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::stages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), kConsumerWarps);
    }
    barrier_init(shared.resident(), 1);
    barrier_init_fence();
  }
  __syncthreads();
}

}  // namespace hopper
}  // namespace fastconv

// Packs weights that the tensor map cannot describe, to the layout that it has:
// [outer][tap][inner].
extern "C" __global__ void pack(const Config::Scalar* weight, Config::Scalar* packed) {
  fastconv::allow_later_launch();
  fastconv::hopper::pack_weights(weight, packed);
}

extern "C" __global__ void __launch_bounds__(fastconv::hopper::kThreads, Config::blocks)
    implicit_gemm_nhwc(const __grid_constant__ fastconv::TensorMap input,
                       const __grid_constant__ fastconv::TensorMap weight,
                       const __grid_constant__ fastconv::TensorMap stored,
                       const Config::Scalar* bias, Config::Scalar* output,
                       int batch FASTCONV_RESIDUAL_PARAMETER FASTCONV_STATISTICS_PARAMETER) {
  using namespace fastconv::hopper;
  const Shared shared;
  const Walk walk(batch);
  if (threadIdx.x == kThreads - 32) {
    fastconv::tensor_map_prefetch(input);
    fastconv::tensor_map_prefetch(weight);
  }
  init_barriers(shared);
  fastconv::wait_for_earlier_launch();
  fastconv::allow_later_launch();
  if (static_cast<int>(threadIdx.x) / 32 == kConsumerWarps) {
    if (fastconv::is_elected()) load_tiles(shared, {input, weight}, walk);
  } else {
    consume(shared, stored, bias, output, walk, batch, FASTCONV_EPILOGUE(output),
            FASTCONV_STATISTICS_OF_PASS);
  }
}
