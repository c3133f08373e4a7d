// Convolution on the tensor cores of a warp (mma.sync), from sm_80 on: forward passes, and input
// gradients, which are forward convolutions with flipped and transposed weights: one, or one for
// each phase of a stride.
//
// A warp multiplies product_rows output channels by `pixels` output pixels, 32 bytes of input
// channels at a time, and adds up over taps. Both operands lie in shared memory as on Hopper
// (device/tensor/tile.cuh), in rows of 16 bytes. ldmatrix takes the address of each row from a lane, so
// that a tap is nothing but another start address, and a tile's pixels may lie anywhere in it:
// several short rows are as good as a long one.
//
// One block per processor, whose warps work at the same time:
//   one streams packed weights through a ring of stages, by asynchronous copies
//   3, 7 or 11 load input pixels, round or split them, and write them to a ring of input stages,
//   each of which has the halo tile of a chunk of channels (device/tensor/load.cuh)
//   4 or 8 multiply, and store their sums through shared memory
//
// float32 with `parts` = 2: x = high + low, both with TF32's mantissa. A thread keeps the sums of
// high parts' products, which it adds to totals after every flush_taps taps, for the tensor core
// truncates as it accumulates; and those of products with a low part, which are so small that it
// does no harm.
#pragma once
#include "ampere/halo/multiply.cuh"
#include "ampere/halo/store.cuh"
#include "ampere/halo/weights.cuh"
#include "device/tensor/load.cuh"
#include "device/tensor/weights.cuh"

namespace fastconv {
namespace ampere {

// What a thread keeps of a tile until it is stored.
template <int kParts>
struct Accumulators {
  Sums sums;

  __device__ __forceinline__ void start() { clear(sums); }
  // Adds the products of a stage of weights, whose first tap is the chunk's `tap`-th.
  __device__ __forceinline__ void multiply(const Multiplier& warp, const unsigned char* weights,
                                           const unsigned char* input, int tap) {
    warp.multiply(sums, weights, Taps(input, tap));
  }
  __device__ __forceinline__ const Sums& result() { return sums; }
};

template <>
struct Accumulators<2> {
  Sums totals, low;

  __device__ __forceinline__ void start() {
    clear(totals);
    clear(low);
  }
  __device__ __forceinline__ void multiply(const Multiplier& warp, const unsigned char* weights,
                                           const unsigned char* input, int tap) {
#pragma unroll 1
    for (int first = 0; first < C::stage_taps; first += C::period_taps) {
      const Taps taps(input, tap + first);
      Sums sums;
      clear(sums);
#pragma unroll
      for (int j = 0; j < C::period_taps; ++j) {
        warp.multiply_split(sums, low, weights + (first + j) * kTapBytes, taps[j]);
        constexpr int kPeriod = C::period_taps;
        if ((j + 1) % kPeriod % C::flush_taps == 0) flush(totals, sums, low);
      }
    }
  }
  __device__ __forceinline__ const Sums& result() {
#pragma unroll
    for (int i = 0; i < kRowProducts; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnProducts; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) totals[i][j][k] = completed(totals[i][j][k], low[i][j][k]);
      }
    }
    return totals;
  }
};

// Some warps: multiply what the others load, and store the sums.
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
    next = items.after(index);  // early: it takes a look at memory
    const Finishes finishes(bias, items, output, Item(index), warp);  // early, too
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

__device__ __forceinline__ void correlate(const Scalar* input, unsigned char* scratch,
                                          const Scalar* bias, Scalar* output, int batch,
                                          const Epilogue<C>& epilogue) {
  const Items items(scratch, batch);
  if (items.none()) return;  // at a glance
  if (items.first() >= items.count()) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= kFirstMultiplier) {
    multiply_tiles(bias, output, items, epilogue);
  } else if (warp == 0) {
    stream_weights(scratch + C::packed_at, items);
  } else {
    if constexpr (kInputCopied) {
      copy_input<Input>(input, items);
    } else {
      load_input<Input>(input, items);
    }
    InputStages::wait_all_empty();
  }
}

}  // namespace ampere
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::ampere::kThreads, 1)
    correlate(const Config::Scalar* input, unsigned char* scratch, const Config::Scalar* bias,
              Config::Scalar* output, int batch FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::ampere::correlate(input, scratch, bias, output, batch, FASTCONV_EPILOGUE(output));
}
