// Forward convolution and input gradient on tensor cores (mma.sync), from sm_80 on, as an implicit
// GEMM over a halo tile. Input gradients are forward convolutions with flipped and transposed
// weights: one, or one for each residue of a stride.
//
// A warp multiplies register_tile_m output channels (M) by `pixels` output pixels (N), 32 bytes of
// input channels at a time (K), and accumulates over taps. Both operands lie in shared memory in
// rows of 16 bytes (device/tensor/tile.cuh). ldmatrix takes the address of each row from a lane, so
// that a tap is just another start address, and a tile's pixels may lie anywhere in the halo tile:
// several short rows are as good as a long one.
//
// There is one block per SM, with specialised warps that run at the same time:
//   one producer warp streams packed weights through a ring of stages, by cp.async
//   3, 7 or 11 producer warps load input pixels, round or split them, and write them to a ring of
//   stages, each of which has the halo tile of a chunk of channels (device/tensor/load.cuh)
//   4 or 8 consumer warps multiply, and store their accumulators through shared memory
//
// With `parts` = 2 (3xTF32, or scaled fp16 in two parts) a number is high + low. A thread has
// accumulators for products of high parts, which are added to a second level after every flush_taps
// taps, because the tensor core truncates as it accumulates; and accumulators for products with a
// low part, which are so small that truncation does no harm.
#pragma once
#include "ampere/halo/multiply.cuh"
#include "ampere/halo/store.cuh"
#include "ampere/halo/weights.cuh"
#include "device/tensor/load.cuh"
#include "device/tensor/weights.cuh"

namespace fastconv {
namespace ampere {

// A thread's accumulators of a tile, until it is stored.
template <int kParts>
struct Accumulators {
  RegisterTile acc;

  __device__ __forceinline__ void start() { clear(acc); }
  // Multiplies a stage of weights, whose first tap is the chunk's `tap`-th.
  __device__ __forceinline__ void multiply(const Multiplier& warp, const unsigned char* weights,
                                           const unsigned char* input, int tap) {
    warp.multiply(acc, weights, Taps(input, tap));
  }
  __device__ __forceinline__ const RegisterTile& result() { return acc; }
};

template <>
struct Accumulators<2> {
  RegisterTile total_acc, low;

  __device__ __forceinline__ void start() {
    clear(total_acc);
    clear(low);
  }
  __device__ __forceinline__ void multiply(const Multiplier& warp, const unsigned char* weights,
                                           const unsigned char* input, int tap) {
#pragma unroll 1
    for (int first = 0; first < C::stage_taps; first += C::period_taps) {
      const Taps taps(input, tap + first);
      RegisterTile acc;
      clear(acc);
#pragma unroll
      for (int j = 0; j < C::period_taps; ++j) {
        warp.multiply_two_parts(acc, low, weights + (first + j) * kTapBytes, taps[j]);
        constexpr int kPeriod = C::period_taps;
        if ((j + 1) % kPeriod % C::flush_taps == 0) flush(total_acc, acc, low);
      }
    }
  }
  __device__ __forceinline__ const RegisterTile& result() {
#pragma unroll
    for (int i = 0; i < kRowMmas; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnMmas; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          total_acc[i][j][k] = completed(total_acc[i][j][k], low[i][j][k]);
      }
    }
    return total_acc;
  }
};

// The consumer warps' loop over tiles: multiplies what the producers load, and stores the outputs.
__device__ __forceinline__ void multiply_tiles(const Scalar* bias, Scalar* output,
                                               const Items& items, const Epilogue<C>& epilogue) {
  const Multiplier warp;
  Ring<C::input_stages> input(0);
  Ring<C::weight_stages> weights(0);
  InputStages::empty_all();
  if constexpr (C::resident) {
    WeightStages::wait_full(0);
  } else {
    WeightStages::empty_all();
  }
  int next;
#pragma unroll 1
  for (int index = items.first(); index < items.count(); index = next) {
    // Both read global memory: issued before the main loop, which hides their latency.
    next = items.after(index);
    const Finishes finishes(bias, items, output, Item(index), warp);
    Accumulators<C::parts> accumulators;
    accumulators.start();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      InputStages::wait_full(input.stage);
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        if constexpr (!C::resident) WeightStages::wait_full(weights.stage);
        accumulators.multiply(warp, shared_memory() + kWeightRing + weights.stage * kWeightBytes,
                              Input::stage(input.stage), stage * C::stage_taps);
        if constexpr (!C::resident) WeightStages::empty(weights.stage);
        weights.advance();
      }
      InputStages::empty(input.stage);
      input.advance();
    }
    const Target target(output, Item(once_more(index)), 0, warp.channel_group, 0);
    store(accumulators.result(), finishes, target, epilogue, warp);
  }
}

// Runs a thread's role: consumer, producer of weights, or producer of input.
__device__ __forceinline__ void convolve(const Scalar* input, unsigned char* scratch,
                                         const Scalar* bias, Scalar* output, int batch,
                                         const Epilogue<C>& epilogue) {
  const Items items(scratch, batch);
  if (items.none()) return;  // cheaper than to look for the first
  if (items.first() >= items.count()) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= kFirstMultiplier) {
    multiply_tiles(bias, output, items, epilogue);
  } else if (warp == 0) {
    stream_weights(scratch + C::packed_at, items);
  } else {
    fill_stages<Input>(input, items);
    InputStages::wait_all_empty();
  }
}

}  // namespace ampere
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::ampere::kThreads, 1)
    convolve(const Config::Scalar* input, unsigned char* scratch, const Config::Scalar* bias,
             Config::Scalar* output, int batch FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::ampere::convolve(input, scratch, bias, output, batch, FASTCONV_EPILOGUE(output));
}
