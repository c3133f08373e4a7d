// Convolution with halo tiles on Hopper's tensor cores: forward passes and input gradients.
//
// An input gradient is a forward convolution with flipped and transposed weights: a single one if
// the stride is 1, otherwise one for each residue of the stride, which computes the output rows and
// columns equal to that residue modulo the stride from the taps that reach them.
//
// A warpgroup's wgmma multiplies 64 output channels (M) by `pixels` output pixels (N), 16 or 8
// input channels (K) at a time, and accumulates over taps. Both operands lie in shared memory,
// without a swizzle:
//
//   input   [16 bytes of channels][row][pixel][16 bytes]     a halo tile, loaded once for all taps
//   weights [tap][2][64 output channels][16 bytes]
//
// Neighbouring pixels are 16 bytes apart, which is how wgmma reads N from a matrix without a
// swizzle. So a tap is only another start address in the same tile, whatever the dilation:
//
//   tap (kh, kw) begins (kh * pitch + kw * dilation) * 16 bytes after tap (0, 0).
//
// Dilated rows: output rows that are equal modulo the dilation share input rows. A tile takes only
// such rows (every dilation-th), so its halo tile is dense.
//
// Strides: an axis of stride s splits into s residues, each with every s-th position. A halo tile
// holds its residues one after the other. A tap reads one of them, where the inputs of neighbouring
// output pixels are neighbours.
//
// Strides with few input channels: space-to-depth (`s2d_*`) turns the residues of both axes into
// channels of a convolution of stride 1 with a smaller kernel. The rearranged input exists only in
// the halo tile.
//
// Narrow images: a tile of several rows is one line of pixels, with rows `pitch` apart. The outputs
// between two rows are computed and discarded.
//
// Rows that are not whole 32-byte sectors of memory: strips begin at sector boundaries, which lie
// elsewhere in every row and channel (`lead`), and the last strip of a row continues into the next
// row up to the end of the sector that both rows share (`wraps`).
//
// Input gradients with a column stride of 2, written to contiguous rows: the accumulators of both
// columns (`stacked_columns`) share the 64 rows of M, with zero weights where only one column has a
// tap; or only one column has taps at all, and the other is zero. Both columns are stored as one
// row (`interleave`).
//
// Input gradients with a stride: the residues of both axes may become output channels
// (`d2s_*`) of a convolution of stride 1, with zero weights where a residue has no tap. The
// first step of the stride may begin before the image does. The residues of a position that are
// neighbours in memory are stored together.
//
// Few output channels: `stack` output rows share the 64 rows of M. Stacked row j multiplies tap row
// t by kernel row t - j; above and below the kernel, the weights are zero.
//
// One block per SM, with three or four warpgroups that work concurrently:
//   producers  warp 0 streams packed weights through a ring of stages with bulk copies; the others
//              (`loader_warps`) load input pixels, round or split them, and write them to a ring of
//              input stages. This copy also transposes NCHW and writes the zeros of the padding.
//   consumers  two warpgroups, with different channels (channel_groups = 2) or different rows; they
//              issue the MMAs, and store their accumulators through shared memory.
// An input stage is either the halo tile of a chunk of input channels, or, with `rolling`, one row
// of all channels: then a block walks down the image, and each row is loaded once.
//
// Scaled fp16 (`scaled_fp16`): float32 is multiplied as float16 with powers of two where its range
// allows, and a second kernel in TF32 (`repairs`) recomputes the images where it does not: see
// device/tensor/scale.cuh. With `copied_planes`, the input is read from a channels-last copy in
// float16, as a channels-last layer of that type would be, and the output is float32.
//
// Slabs (`slabs`, see device/tensor/half_copy.cuh): what is read are rows of planes, copied with
// their padding, and the output begins with the slab's first row.
//
// 3xTF32 (float32 with `parts` = 2): x = high + low, both with TF32's mantissa, and x y = low_x
// high_y + high_x low_y + high_x high_y: three MMAs, and a fourth for low_x low_y if the sum has
// few terms (`low_low_mma`). The tensor core truncates as it accumulates, so accumulators are
// added to registers of their own after every stage of weights.
#pragma once
#include "hopper/halo/multiply.cuh"
#include "hopper/halo/stage.cuh"
#include "hopper/halo/store.cuh"
#include "hopper/halo/store_residues.cuh"
#include "device/tensor/copy.cuh"
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
      float acc[kAccumulators];
      if constexpr (C::parts == 2) {
        consumer.compute_split(acc, tile == 0, tile == item.tiles - 1);
      } else {
        consumer.compute(acc, tile == 0, tile == item.tiles - 1);
      }
      const Target target(output, item, tile, consumer.channel_group,
                          consumer.pixel_group * kGroupRows);
      Finish finish[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        finish[half] = finish_of(bias, items, item, target, 16 * warp + lane / 4 + 8 * half);
      }
      if constexpr (kDepthToSpace) {
        store_residues(acc, finish, staging, target, warpgroup, warp, lane);
      } else if constexpr (C::out_channels_last) {
        store_pixels(acc, finish, staging, target, epilogue, warpgroup, warp, lane);
      } else {
        store_rows(acc, finish, staging + warp * C::buffers * 8 * kRowPitch, target, epilogue, warp,
                   lane);
      }
    }
  }
  if (C::bulk_stores && lane < kStoringLanes) bulk_store_wait();
}

// One thread copies every tile's weights into the ring; with `resident`, all weights just once.
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

__device__ __forceinline__ void convolve(const Given& given, unsigned char* scratch,
                                         const Scalar* bias, Scalar* output, int batch,
                                         const Slab& slab, const Epilogue<C>& epilogue) {
  const Items items(scratch, batch, slab);
  if (items.none()) return;
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
    constexpr int kCopies = C::box_loads ? 1 : kPieceChannels;
    for (int i = 0; i < kRawSlots; ++i) barrier_init(&barriers().raw_full[i], kCopies);
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < kProducerWarps) {
    give_back_registers<C::producer_registers>();
    if (warp > 0) {
      const Loaded* const input = address_of(given);
      if constexpr (C::staged) {
        const Loaded* const end = input + static_cast<long long>(batch / Depth::out) * kInImage;
        stage_input(given, input, end, items);
      } else {
        fill_stages<Input>(input, items);
      }
    } else if (threadIdx.x == 0) {
      stream_weights(scratch + C::packed_at, items);
    }
  } else {
    take_registers<C::consumer_registers>();
    output += 1LL * slab.first_volume * kOutImage + 1LL * slab.row * C::image_width;
    consume(bias, output, items, epilogue);
  }
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(Config::threads, 1)
    convolve(const __grid_constant__ fastconv::hopper::Given input, unsigned char* scratch,
             const Config::Scalar* bias, Config::Scalar* output,
             int batch FASTCONV_SLAB_PARAMETERS FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::hopper::convolve(input, scratch, bias, output, batch, FASTCONV_SLAB,
                             FASTCONV_EPILOGUE(output));
}
