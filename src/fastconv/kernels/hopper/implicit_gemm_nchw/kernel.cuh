// Convolutions that are nearly matrix products, of planes (NCHW) in TF32 on Hopper's tensor cores:
// forward passes and input gradients.
//
// Rows of a product are pixels, its columns output channels, its sum goes over input channels, and
// from tap to tap. The tensor cores want TF32 operands with channels for neighbours; planes have
// pixels. So planes are copied to shared memory as they are, by tensor copies that need no thread's
// help, and the left operand goes through registers: there, each thread has single numbers anyway,
// wherever they lay, and rounds them. A tap is an offset in shared memory, and so is a stride.
//
// The input gradient of a stride has phases: of every stride * stride pixels, each meets other
// taps. A grid has as many positions as phases have pixels; a position's numbers are loaded once
// and multiplied with all taps that are theirs, for sums of all phases.
//
// One block per processor, of three warpgroups: one thread of the first sends planes, another
// weights; the others multiply, the same weights with different pixels.
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
    Sums sums;
    consumer.compute(sums, tile, batch);
    Storer(bias, output, tile, batch, epilogue).store(sums);
  }
}

__device__ __forceinline__ void multiply_planes(const Planes& planes, const unsigned char* packed,
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
    gemm_planes(const __grid_constant__ fastconv::hopper::Planes planes,
                const unsigned char* packed, const float* bias, float* output,
                int batch FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::hopper::multiply_planes(planes, packed, bias, output, batch, FASTCONV_EPILOGUE(output));
}
