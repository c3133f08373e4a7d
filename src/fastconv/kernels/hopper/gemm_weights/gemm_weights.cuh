// A weight gradient as a product of matrices: output channels by positions of all images, and
// positions by input channels at a tap. See docs/kernels/hopper.md.
#pragma once
#include "hopper/gemm_weights/load.cuh"
#include "hopper/gemm_weights/multiply.cuh"
#include "hopper/gemm_weights/reduce.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ void begin(const Shared& shared) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::stages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), kConsumerWarps);
    }
    barrier_init_fence();
  }
  if constexpr (C::bias) {
    for (int i = static_cast<int>(threadIdx.x); i < kOnesBytes / 2; i += kThreads) {
      reinterpret_cast<Scalar*>(shared.ones())[i] = narrow<Scalar>(1.0f);
    }
    fence_async_shared();
  }
  __syncthreads();
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __cluster_dims__(Config::cluster, 1, 1)
    __launch_bounds__(fastconv::hopper::kThreads, Config::blocks)
        gemm_weights(const __grid_constant__ fastconv::TensorMap grad_output,
                     const __grid_constant__ fastconv::TensorMap input, float4* workspace,
                     Config::Scalar* grad, Config::Scalar* bias_grad, int group_tiles,
                     int group_blocks, int most_runs, int batch) {
  using namespace fastconv::hopper;
  const Shared shared;
  const Share share(batch, group_tiles, group_blocks, most_runs);
  if (threadIdx.x == kThreads - 32) {
    fastconv::tensor_map_prefetch(grad_output);
    fastconv::tensor_map_prefetch(input);
  }
  begin(shared);
  fastconv::wait_for_earlier_launch();
  if constexpr (Config::whole || Config::cluster > 1) fastconv::allow_later_launch();
  if (static_cast<int>(threadIdx.x) / 32 == kConsumerWarps) {
    if (fastconv::is_elected()) load_steps(shared, {grad_output, input}, share);
  } else {
    consume(shared, {workspace, grad, bias_grad}, share);
  }
  if constexpr (Config::cluster > 1) exchange(shared, grad, bias_grad);
}

extern "C" __global__ void __launch_bounds__(fastconv::hopper::kReduceThreads)
    reduce(const float4* workspace, Config::Scalar* grad, Config::Scalar* bias_grad,
           int group_tiles, int group_blocks, int most_runs, int batch) {
  fastconv::hopper::reduce(workspace, grad, bias_grad,
                           {batch, group_tiles, group_blocks, most_runs});
}
