// Weight gradient as an implicit GEMM: M is output channels, N is input channels at taps, and K is
// the positions (output pixels) of all images. Stream-K divides K among the blocks. See
// docs/kernels/hopper.md.
#pragma once
#include "hopper/wgrad_implicit_gemm/gather.cuh"
#include "hopper/wgrad_implicit_gemm/multiply.cuh"
#include "hopper/wgrad_implicit_gemm/reduce.cuh"

namespace fastconv {
namespace hopper {

using GradOutput = Source<C::grad_copied>;
using Input = Source<C::input_copied>;
using Sources = SourcesOf<C::grad_copied, C::input_copied>;
constexpr int kCopiers = C::grad_copied || C::input_copied ? 1 : 0;  // lanes that issue TMA copies
constexpr int kGatherers = C::input_copied ? 0 : C::team_warps;      // warps that gather
// Whether a warpgroup that only copies gives registers to the consumers.
constexpr bool kGivesRegisters = Halo::consumer_registers > 0;

__device__ __forceinline__ void init_shared(const Shared& shared) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::stages; ++stage) {
      barrier_init(shared.full(stage), kCopiers + kGatherers);
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

template <class Sources>
__device__ __forceinline__ void prefetch_maps(const Sources& sources) {
  if (threadIdx.x != 32 * kConsumerWarps) return;
  if constexpr (C::grad_copied) tensor_map_prefetch(sources.grad_output);
  if constexpr (C::input_copied) tensor_map_prefetch(sources.input);
}

__device__ __forceinline__ bool is_copying_warp() {
  return !kGivesRegisters || static_cast<int>(threadIdx.x) / 32 == kConsumerWarps;
}

template <class Sources>
__device__ __forceinline__ void load_steps(const Shared& shared, const Sources& sources,
                                           const Share& share, int batch) {
  if constexpr (kGatherers > 0) {
    gather_steps(shared, sources, share, batch);
  } else if (is_copying_warp() && is_elected()) {
    copy_steps(shared, sources, share);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __cluster_dims__(Config::cluster, 1, 1) FASTCONV_BOUNDS
    wgrad_implicit_gemm(const __grid_constant__ fastconv::hopper::GradOutput grad_output,
                        const __grid_constant__ fastconv::hopper::Input input, float4* workspace,
                        Config::Scalar* grad, Config::Scalar* bias_grad, int group_tiles,
                        int group_blocks, int most_runs, int batch FASTCONV_SLAB_AND_IMAGE) {
  using namespace fastconv::hopper;
  const Shared shared;
  const Share share(batch, group_tiles, group_blocks, most_runs);
  const Sources sources{grad_output, input, FASTCONV_SLAB_IMAGE};
  prefetch_maps(sources);
  init_shared(shared);
  fastconv::wait_for_earlier_launch();
  fastconv::allow_later_launch();
  if (static_cast<int>(threadIdx.x) / 32 < kConsumerWarps) {
    if constexpr (kGivesRegisters) fastconv::take_registers<Halo::consumer_registers>();
    consume(shared, {workspace, grad, bias_grad}, share, FASTCONV_SLAB_NUMBER);
  } else {
    if constexpr (kGivesRegisters) fastconv::give_back_registers<Halo::producer_registers>();
    load_steps(shared, sources, share, batch);
  }
  if constexpr (Config::cluster > 1) exchange(shared, grad, bias_grad);
}

extern "C" __global__ void __launch_bounds__(fastconv::hopper::kReduceThreads)
    reduce(const float4* workspace, Config::Scalar* grad, Config::Scalar* bias_grad,
           int group_tiles, int group_blocks, int most_runs, int batch) {
  fastconv::wait_for_earlier_launch();
  fastconv::hopper::reduce(workspace, grad, bias_grad,
                           {batch, group_tiles, group_blocks, most_runs});
}
