// Implicit GEMM of contiguous (NCHW) float32 tensors in TF32 on Hopper's tensor cores: forward
// passes and input gradients.
//
// M is pixels, N output channels, and K the input channels of one tap after the other. wgmma reads
// TF32 operands from shared memory only K-major, with channels as neighbours, but in a plane pixels
// are neighbours. So TMA copies planes to shared memory as they are, and A goes through registers:
// its fragments have single elements per thread anyway, which are loaded from wherever they lie and
// rounded to TF32. A tap is an offset in shared memory, and so is a stride.
//
// The input gradient of a strided layer has residues: of stride * stride neighbouring pixels, each
// is reached by other taps. The grid has one position for all residues of such a group. A
// position's input is loaded once and multiplied by all taps that read it, into accumulators of
// each residue.
//
// One block per SM, with three warpgroups: one thread of the producer copies planes, another one
// weights; the two consumers multiply different pixels by the same weights.
#pragma once
#include "hopper/implicit_gemm_nchw/load.cuh"
#include "hopper/implicit_gemm_nchw/store.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ void consume(const float* bias, float* output, int batch,
                                        const Epilogue<C>& epilogue) {
  Consumer consumer;
  const int tiles = tile_count(batch);
#pragma unroll 1
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Tile tile(index);
    Accumulators acc;
    consumer.compute(acc, tile, batch);
    Storer(bias, output, tile, batch, epilogue).store(acc);
  }
}

__device__ __forceinline__ void run_block(const Planes& planes, const unsigned char* packed,
                                          const float* bias, float* output, int batch,
                                          const Epilogue<C>& epilogue) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::input_stages; ++i) {
      barrier_init(&barriers().input_full[i], 1);
      barrier_init(&barriers().input_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::weight_stages; ++i) {
      barrier_init(&barriers().weights_full[i], 1);
      barrier_init(&barriers().weights_empty[i], kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_launch();
  allow_later_launch();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4) {
    give_back_registers<C::producer_registers>();
    if (warp == 0 && is_elected()) load_planes(planes, batch);
    if (warp == 1 && is_elected()) load_weights(packed, batch);
  } else {
    take_registers<C::consumer_registers>();
    consume(bias, output, batch, epilogue);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(256) pack(const float* weight, float4* packed) {
  fastconv::allow_later_launch();
  fastconv::hopper::pack_weights(weight, packed);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    implicit_gemm_nchw(const __grid_constant__ fastconv::hopper::Planes planes,
                       const unsigned char* packed, const float* bias, float* output,
                       int batch FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::hopper::run_block(planes, packed, bias, output, batch, FASTCONV_EPILOGUE(output));
}
