// Convolution on the tensor cores of a warp (mma.sync), from sm_80 on: forward passes, and input
// gradients, which are forward convolutions with flipped and transposed weights: one, or one for
// each phase of a stride.
//
// A warp multiplies product_rows output channels by `pixels` output pixels, 32 bytes of input
// channels at a time, and adds up over taps. Both operands lie in shared memory as on Hopper
// (tensor/tile.cuh), in rows of 16 bytes. ldmatrix takes the address of each row from a lane, so
// that a tap is nothing but another start address, and a tile's pixels may lie anywhere in it:
// several short rows are as good as a long one.
//
// Blocks walk over tiles. All warps load, and all multiply: beside each stage of weights, which are
// copied some stages ahead, they load a part of the next chunk's input.
//
//   stage of weights   0      1      2      0      1      2    …
//   products           chunk 0              chunk 1
//   input loaded       chunk 1              chunk 2, or the next tile's first
//
// float32 with `parts` = 2: x = high + low, both with TF32's mantissa. A thread keeps the sums of
// high parts' products, which it adds to totals after every stage, for the tensor core truncates as
// it accumulates; and those of products with a low part, which are so small that it does no harm.
#pragma once
#include "ampere/correlate_load.cuh"
#include "ampere/correlate_multiply.cuh"
#include "ampere/correlate_store.cuh"
#include "tensor/weights.cuh"

namespace fastconv {
namespace ampere {

// What a thread keeps of a tile until it is stored.
template <int kParts>
struct Accumulators {
  Sums sums;

  __device__ __forceinline__ void start() { clear(sums); }
  __device__ __forceinline__ void multiply(const Multiplier& warp, const unsigned char* weights,
                                           const unsigned char* input, int tap) {
    warp.multiply(sums, weights, input, tap);
  }
  __device__ __forceinline__ void end_stage() {}
  __device__ __forceinline__ const Sums& result() { return sums; }
};

template <>
struct Accumulators<2> {
  Sums totals, sums, low;

  __device__ __forceinline__ void start() {
    clear(totals);
    clear(sums);
    clear(low);
  }
  __device__ __forceinline__ void multiply(const Multiplier& warp, const unsigned char* weights,
                                           const unsigned char* input, int tap) {
    warp.multiply_split(sums, low, weights, input, tap);
  }
  __device__ __forceinline__ void end_stage() { flush(totals, sums, low); }
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

__device__ __forceinline__ unsigned char* input_stage(int stage) {
  return shared_memory() + kInputRing + stage * kInputBytes;
}

// Copies under way beyond those that the next stage of weights needs. Of a chunk's first stage all
// have to be complete, if input is copied too.
constexpr int kAhead = C::resident ? 0 : C::weight_stages - 2;

__device__ __forceinline__ void correlate(const Scalar* input, unsigned char* scratch,
                                          const Scalar* bias, Scalar* output, int batch) {
  const Items items(scratch, batch);
  if (items.none()) return;  // at a glance
  if (items.first() >= items.count()) return;
  const Multiplier warp;
  Loader loader(input, items);
  WeightStream weights(scratch + C::packed_at, items);
  loader.fill(input_stage(0));
#pragma unroll 1
  for (int i = 0; i < (C::resident ? kTileStages : C::weight_stages - 1); ++i) {
    weights.start();
    copy_async_commit();
  }
  int buffer = 0;
  int slot = 0;
#pragma unroll 1
  for (int index = items.first(); index < items.count(); index = items.after(index)) {
    Accumulators<C::parts> accumulators;
    accumulators.start();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        if (stage == 0 && (kCopied || C::resident)) {
          copy_async_wait<0>();
        } else if (!C::resident) {
          copy_async_wait<kAhead>();
        }
        // What others have loaded is there, and what is loaded over has been read.
        if (stage == 0 || !C::resident) __syncthreads();
        if constexpr (!C::resident) weights.start();
        unsigned char* const next = input_stage(buffer ^ 1);
        if (stage < kBatches) loader.start(stage, next);
        copy_async_commit();
        accumulators.multiply(warp, shared_memory() + kWeightRing + slot * kWeightBytes,
                              input_stage(buffer), stage * C::stage_taps);
        accumulators.end_stage();
        if (stage < kBatches) loader.finish(stage, next);
        if (++slot == C::weight_stages) slot = 0;
      }
      // What the stages had no registers for.
#pragma unroll 1
      for (int i = kWeightStages; i < kBatches; ++i) {
        loader.start(i, input_stage(buffer ^ 1));
        loader.finish(i, input_stage(buffer ^ 1));
      }
      if (kCopied && kBatches > kWeightStages) copy_async_commit();
      buffer ^= 1;
    }
    store(accumulators.result(), bias, output, items, Item(index), warp);
  }
  copy_async_wait<0>();
}

}  // namespace ampere
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::ampere::kThreads, Config::blocks)
    correlate(const Config::Scalar* input, unsigned char* scratch, const Config::Scalar* bias,
              Config::Scalar* output, int batch) {
  fastconv::ampere::correlate(input, scratch, bias, output, batch);
}
