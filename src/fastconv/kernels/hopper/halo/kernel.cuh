// Convolution on Hopper's tensor cores: forward passes, and input gradients, which are forward
// convolutions with flipped and transposed weights: one, or one for each phase of a stride, which
// has every stride-th of the output's rows and columns, and some of the taps.
//
// A warpgroup multiplies 64 output channels (rows of wgmma) by `pixels` output pixels (columns), 16
// or 8 input channels at a time, and adds up over taps. Both operands lie in shared memory:
//
//   input   [16 bytes of channels][row][pixel][16 bytes]     a halo tile, loaded once for all taps
//   weights [tap][2][64 output channels][16 bytes]
//
// Neighbouring pixels are 16 bytes apart, as the tensor core wants its columns, so that a tap is
// nothing but another start address in the same tile, whatever the dilation:
//
//   tap (kh, kw) begins (kh * pitch + kw * dilation) * 16 bytes after tap (0, 0).
//
// Dilated rows: output rows that are equal modulo the dilation share input rows; a tile takes only
// such (every dilation-th) rows, and is dense again. Strides: an axis of stride s falls into s
// phases of every s-th position; a tile holds its phases one after the other, and a tap reads one
// of them, where neighbours are neighbours again.
//
// Strides and few input channels: the phases of both axes become channels (`fold`), of a
// convolution of stride 1 with a smaller kernel. Its input exists in no memory but the tile.
//
// Narrow images: a tile of several rows is one line of pixels, rows pitch apart. The columns
// between two rows are computed and thrown away.
//
// Rows that are no whole sectors of memory: strips begin where memory has a whole one, in each row
// and channel somewhere else (`lead`), and the last strip of a row goes on with the next row as far
// as the sector that they share (`wraps`).
//
// Phases of contiguous rows with a column stride of 2: the sums of both columns (`column_sums`)
// share the 64 rows of a product, with zero weights where only one has a tap; or one column is
// zero. Both are stored as one row (`interleave`).
//
// Phases of a stride and few channels: the phases of both axes become output channels (`out_fold`),
// of a convolution of stride 1 with zero weights where a phase has no tap. Steps of the stride may
// begin before the image does. What a position's phases have in memory side by side is stored so.
//
// Few output channels: `stack` output rows share the 64 rows of a product. Row j of them sees tap
// row t as kernel row t - j, for which there are zero weights above and below the kernel.
//
// One block per processor, of three warpgroups that work at the same time:
//   producer   warp 0 streams packed weights through a ring of stages with bulk copies; warps 1-3
//              load input pixels, round or split them, and write them to a ring of input stages.
//              The transposition of NCHW and the padding are part of this copy.
//   consumers  two warpgroups, of different channels (channel_groups = 2) or different rows; they
//              multiply, and store their sums through shared memory.
// An input stage is either the halo tile of a chunk of the input channels, or, with `rolling`, one
// row of all channels: then a block walks down the image, and each row is loaded once.
//
// Where float16 has the range, float32 is multiplied as such (`halves`), and images where it has
// not are computed once more by a kernel without (`repairs`): see device/tensor/scale.cuh.
//
// float32 with `parts` = 2: x = high + low, both with TF32's mantissa, and x y = low_x high_y +
// high_x low_y + high_x high_y: three products, and low_x low_y in short sums. The tensor core
// truncates as it accumulates, so sums move to registers of their own after every stage of weights.
#pragma once
#include "hopper/halo/multiply.cuh"
#include "hopper/halo/stage.cuh"
#include "hopper/halo/store.cuh"
#include "hopper/halo/store_residues.cuh"
#include "device/tensor/load.cuh"
#include "device/tensor/weights.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ void consume(const Scalar* bias, Scalar* output, const Items& items,
                                        const Epilogue<C>& epilogue) {
  Consumer consumer;
  const int lane = consumer.lane;
  const int warp = consumer.warp;
  const int warpgroup = consumer.warpgroup;
  Scalar* const staging =
      reinterpret_cast<Scalar*>(shared_memory() + kStaging + warpgroup * kStagingBytes);
  for (int index = items.first(); index < items.count(); index = items.after(index)) {
    const Item item(index);
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile) {
      float sums[kSums];
      if constexpr (C::parts == 2) {
        consumer.compute_split(sums, tile == 0, tile == item.tiles - 1);
      } else {
        consumer.compute(sums, tile == 0, tile == item.tiles - 1);
      }
      const Target target(output, item, tile, consumer.channel_group,
                          consumer.pixel_group * kGroupRows);
      Finish finish[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        finish[half] = finish_of(bias, items, item, target, 16 * warp + lane / 4 + 8 * half);
      }
      if constexpr (kUnfolds) {
        store_phases(sums, finish, staging, target, warpgroup, warp, lane);
      } else if constexpr (C::out_channels_last) {
        store_pixels(sums, finish, staging, target, epilogue, warpgroup, warp, lane);
      } else {
        store_rows(sums, finish, staging + warp * C::buffers * 8 * kRowPitch, target, epilogue,
                   warp, lane);
      }
    }
  }
  if (C::bulk_stores && lane < kStoringLanes) bulk_store_wait();
}

// One thread: sends every tile's weights through the ring, or all weights once if they fit.
__device__ __forceinline__ void stream_weights(const unsigned char* packed, const Items& items) {
  constexpr int kPerTile = kChunks * kWeightStages;
  const auto send = [](int stage, const unsigned char* source) {
    Barrier* const full = &barriers().weights_full[stage];
    barrier_arrive_expect(full, kWeightBytes);
    bulk_load(shared_memory() + kWeightRing + stage * kWeightBytes, source, kWeightBytes, full);
  };
  if constexpr (C::resident) {
    static_assert(!C::resident || C::weight_stages == kPerTile, "all of them fit");
    for (int i = 0; i < kPerTile; ++i) send(i, packed + i * kWeightBytes);
    return;
  }
  Ring<C::weight_stages> at(1);
  for (int index = items.first(); index < items.count(); index = items.after(index)) {
    const Item item(index);
    const int part =
        item.group * kOutputGroups + item.outputs / (C::channel_groups * kStackChannels);
    const unsigned char* const source =
        packed + static_cast<long long>(part) * kPerTile * kWeightBytes;
    for (int tile = 0; tile < item.tiles; ++tile) {
      for (int i = 0; i < kPerTile; ++i) {
        barrier_wait(&barriers().weights_empty[at.stage], at.parity);
        send(at.stage, source + static_cast<long long>(i) * kWeightBytes);
        at.advance();
      }
    }
  }
}

__device__ __forceinline__ void correlate(const Scalar* input, unsigned char* scratch,
                                          const Scalar* bias, Scalar* output, int batch,
                                          const Epilogue<C>& epilogue) {
  const Items items(scratch, batch);
  if (items.none()) return;  // at a glance
  if (items.first() >= items.count()) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::input_stages; ++i) {
      barrier_init(&barriers().input_full[i], kLoaders / 32);
      barrier_init(&barriers().input_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::weight_stages; ++i) {
      barrier_init(&barriers().weights_full[i], 1);
      barrier_init(&barriers().weights_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kConsumers; ++i) barrier_init(&barriers().turn[i], 4);
    for (int i = 0; i < kRawSlots; ++i) barrier_init(&barriers().raw_full[i], kPieceChannels);
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    give_back_registers<C::producer_registers>();
    if (warp > 0) {
      if constexpr (C::staged) {
        stage_input(input, input + static_cast<long long>(batch) * kInImage, items);
      } else if constexpr (kInputCopied) {
        copy_input<Input>(input, items);
      } else {
        load_input<Input>(input, items);
      }
    } else if (threadIdx.x == 0) {
      stream_weights(scratch + C::packed_at, items);
    }
  } else {
    take_registers<C::consumer_registers>();
    consume(bias, output, items, epilogue);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(384, 1)
    correlate(const Config::Scalar* input, unsigned char* scratch, const Config::Scalar* bias,
              Config::Scalar* output, int batch FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::hopper::correlate(input, scratch, bias, output, batch, FASTCONV_EPILOGUE(output));
}
