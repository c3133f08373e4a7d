"""dilated5x9, asymmetric, dilated kernel: 8x32x512x512 64x32x5x9 padding=2,4 dilation=2,3.

A convolution in one file, with CUDA kernels for the result and for all gradients.

    from model import ModelNew      # this file as model.py
    model = ModelNew().cuda()

    python model.py                 # compares with PyTorch: results, and speed

Needs PyTorch 2.0.1 or newer on Python 3.10 or newer, an NVIDIA GPU of compute capability 7.0 or
newer, and nvcc (CUDA 11.8 or newer). Kernels are compiled when first used, for each geometry, and
kept in PyTorch's cache of extensions.

Tuned for these sizes, in float32, on the tensor cores of Hopper GPUs and all others since Ampere.
Everything else is computed by portable kernels: other sizes, strides, groups and types (float32,
float16, bfloat16), channels-last tensors, older GPUs. PyTorch's own convolution is never used as a
fallback: what goes wrong raises an error.

On tensor cores, float32 arithmetic follows PyTorch's setting, torch.backends.cudnn.allow_tf32;
other kernels compute in float32 throughout. Results are deterministic. Gradients cannot be
differentiated again.

In this file: device code, where each kernel begins with an explanation; host code; plans, which
give the constants and the grid of each launch; the code that calls PyTorch; ModelNew; a self-check.

Written by fastconv 0.1.0: fastconv export --workload dilated5x9
SPDX-License-Identifier: Apache-2.0
"""

import copy
import functools
import hashlib
import inspect
import itertools
import math
import os
import re
import shutil
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import cpp_extension


# === Device code ==================================================================================

SOURCES = {}

SOURCES["hopper/halo/kernel.cuh"] = r"""
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

__global__ void __launch_bounds__(Config::threads, 1)
    convolve(const __grid_constant__ fastconv::hopper::Given input, unsigned char* scratch,
             const Config::Scalar* bias, Config::Scalar* output,
             int batch FASTCONV_SLAB_PARAMETERS FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::hopper::convolve(input, scratch, bias, output, batch, FASTCONV_SLAB,
                             FASTCONV_EPILOGUE(output));
}
"""

SOURCES["ampere/halo/kernel.cuh"] = r"""
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

__global__ void __launch_bounds__(fastconv::ampere::kThreads, 1)
    convolve(const Config::Scalar* input, unsigned char* scratch, const Config::Scalar* bias,
             Config::Scalar* output, int batch FASTCONV_RESIDUAL_PARAMETER) {
  fastconv::ampere::convolve(input, scratch, bias, output, batch, FASTCONV_EPILOGUE(output));
}
"""

SOURCES["hopper/wgrad_halo/kernel.cuh"] = r"""
// Weight gradient with halo tiles on Hopper's tensor cores.
//
// grad[m, i, tap] = sum over images and output pixels of
//   grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// M is 64 output channels for each warpgroup, N is input channels and taps, and K is pixels. wgmma
// reads 16 contiguous bytes along K. If these were neighbouring pixels, every tap would need the
// input shifted by a different number of bytes. So a K vector interleaves the same pixel of 4
// images, or of 4 strips of rows of one image (8 for 16-bit types). These images or strips are its
// members. In shared memory lie
//
//   input       [kernel row][plane][column][octet][8 channels][members]
//   grad_output [64 channels][members][columns]      copied as it is, or
//               [members][column][64 channels]       if it is channels-last
//
// 8 channels of one column are 128 bytes, a core matrix, and another tap is merely another start
// address. One wgmma takes two neighbouring columns of all members, for mma_taps taps of one kernel
// row and mma_octets octets of channels. grad_output goes through registers, where it is rounded or
// split.
//
// A block walks down the image in steps: one output row of every member, over a strip of columns.
// Consecutive steps share input rows (with dilation, a walk takes every dilation-th output row), so
// input rows are in a ring, and each is loaded once for a walk.
//
// A segment is a kernel row of a plane of channels: the N of one wgmma. A warpgroup accumulates
// `segments` of them. The block's two consumer warpgroups have different segments, or, with
// channel_groups = 2, the same segments of different output channels.
//
// There is one block for each SM, with three warpgroups that work at the same time:
//   producers  Warps 0 and 1 copy grad_output to a ring of stages of a few columns, by bulk copies
//              of a row's columns. Warps 2 and 3 load input rows to registers, transpose, round or
//              split them, and write them to their ring. Padding is part of the copy. Where a TMA
//              box can describe a stage (`grad_boxes`), warp 0 issues one for each stage, and three
//              warps load input, or two if boxes must be cleared beyond a row's ends.
//   consumers  Two warpgroups multiply.
//
// The tensor core truncates as it accumulates, so errors grow with the number of MMAs. After every
// flush_steps steps, accumulators are added to the block's own slots of a workspace. With 3xTF32
// (`parts` = 2), they are first added to totals in registers, after every few columns. A second
// kernel reduces the slots of all blocks in a fixed order, so results are the same bits every time.
//
// Where numbers are in float16's range, float32 is multiplied as scaled fp16 (`scaled_fp16`), and
// filters for which they are not are computed again in TF32 (`repairs`): see scale.cuh.
//
// With `bias`, consumers also add up what they load of grad_output, before it is rounded: the
// gradient of the bias. All of them do, since a condition would cost them time; the second kernel
// takes the result of one of the consumers that load the same channels.
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/load.cuh"
#include "hopper/wgrad_halo/multiply.cuh"
#include "hopper/wgrad_halo/reduce.cuh"
#include "hopper/wgrad_halo/scale.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ void weight_grad(const Grad& grad_output, const Scalar* input,
                                            const Tables& tables, const Partition& partition) {
  if constexpr (C::repairs) {
    if (!is_marked(tables, partition.tile())) return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::input_stages; ++i) {
      barrier_init(&barriers().input_full[i], kInputWarps);
      barrier_init(&barriers().input_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::grad_stages; ++i) {
      barrier_init(&barriers().grad_full[i], kGradArrivals);
      barrier_init(&barriers().grad_empty[i], kConsumerWarps);
      barrier_init(&barriers().box_full[i], 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    give_back_registers<C::producer_registers>();
    if (warp < kGradWarps) {
      load_grad(grad_output, partition);
    } else {
      load_input(input, tables, partition);
    }
  } else {
    take_registers<C::consumer_registers>();
    consume(grad_output, tables, partition);
  }
}

}  // namespace hopper
}  // namespace fastconv

__global__ void __launch_bounds__(384, 1)
    weight_grad(const __grid_constant__ fastconv::hopper::Grad grad_output,
                const Config::Scalar* input, float4* scratch, int first_tile, int tiles,
                int workers, int batch) {
  fastconv::hopper::weight_grad(grad_output, input, {scratch}, {first_tile, tiles, workers, batch});
}

__global__ void __launch_bounds__(256)
    reduce(float4* scratch, Config::Scalar* grad, Config::Scalar* bias_grad, int first_tile,
           int tiles, int workers) {
  const fastconv::hopper::Tables tables{scratch};
  fastconv::hopper::reduce(tables, grad, first_tile, tiles, workers);
  if constexpr (Config::bias) {
    fastconv::hopper::reduce_bias(tables.workspace(), bias_grad, first_tile, tiles, workers);
  }
}

__global__ void __launch_bounds__(1024)
    scale(const Config::Scalar* grad_output, const Config::Scalar* input, float4* scratch,
          int batch) {
  if constexpr (Config::scaled_fp16) {
    fastconv::hopper::find_powers(grad_output, input, {scratch}, batch);
  }
}
"""

SOURCES["ampere/wgrad_halo/kernel.cuh"] = r"""
// Weight gradient on tensor cores (mma.sync), from sm_80 on.
//
// grad[m, i, tap] = sum over images and output pixels of
// grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// A warp multiplies output channels (M) by input channels of some taps (N), and accumulates over
// pixels (K). Each lane computes where its part of an operand lies in shared memory, so taps,
// strides and dilations are just addresses:
//
//   16-bit types   matrices of 8 pixels by 8 channels, 16 bytes of each pixel, are transposed as
//                  they are loaded (ldmatrix.trans); pixels may lie anywhere.
//   float32        lanes load single elements. The threads that copied them to shared memory have
//                  rounded or split them there; with 3xTF32, the input is split here instead.
//
// The output's gradient has the same layout in shared memory as in global memory, with pixels or
// channels as neighbours. So has the input, except contiguous 16-bit tensors, which are transposed
// on their way.
//
// A block computes a weight tile: some output channels, some octets of input channels, some taps.
// It walks down the image in steps, each of some output rows of a strip of columns, and loads the
// next step while it multiplies one. Steps share input rows (with a dilation, a walk takes every
// dilation-th output row): with `rolling`, rows are in a ring, and each is loaded once for a walk.
//
// The tensor core truncates as it accumulates, so errors grow with the length of a chain of MMAs.
// After every flush_steps steps, accumulators are added to the block's own slots of a workspace.
// With 3xTF32 (`parts` = 2) they are first added to a second level in registers, after every slice
// of a few MMAs. A second kernel reduces the slots of all blocks in a fixed order (split-K), so
// that the bits are the same every time.
//
// With `bias`, the blocks of the first weights also add up the output's gradient, as it is in
// shared memory before it is rounded.
#include "ampere/wgrad_halo/reduce.cuh"

namespace fastconv {
namespace ampere {

// A thread's accumulators since the last flush.
struct State {
  RegisterTile acc;
  float bias = 0.0f;
  float bias_total = 0.0f;
  int steps = 0;
  bool flushed = false;

  __device__ State() { clear(acc); }

  __device__ __forceinline__ void flush_to(float4* slots) {
    flush<kThreads>(acc, slots, !flushed);
    clear(acc);
    flushed = true;
    steps = 0;
    bias_total += bias;
    bias = 0.0f;
  }
};

// Multiplies a slice; with 3xTF32 in accumulators of its own, which are then added to the state's.
__device__ __forceinline__ void multiply_slice(State& state, const Multiplier& multiplier,
                                               const StepPlace& step, int slice) {
  if constexpr (C::parts == 1) {
    multiplier.multiply_slice(state.acc, step, slice);
  } else {
    RegisterTile slice_acc;
    clear(slice_acc);
    multiplier.multiply_slice(slice_acc, step, slice);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.acc[i][j] += slice_acc[i][j];
    }
  }
}

// Converts a step that has been copied, its lines from `first_line` on; the next barrier makes it
// visible to all threads. The bias's gradient is added up before, from numbers that other threads
// have copied, hence the barriers.
__device__ __forceinline__ void finish(State& state, const Loader& loader, const StepPlace& step,
                                       int first_line, bool has_bias) {
  if (kConvertsGrad && has_bias) {
    copy_async_wait<0>();
    __syncthreads();
    state.bias += bias_of_step(step);
    __syncthreads();
  }
  loader.convert_copied(step, first_line);
}

__device__ __forceinline__ void weight_grad(const Scalar* grad_output, const Scalar* input,
                                            float4* workspace, const LaunchRange& range) {
  const int thread = static_cast<int>(threadIdx.x);
  const int worker = static_cast<int>(blockIdx.x) / range.tiles;
  const WeightTile tile = range.tile();
  const bool has_bias = C::bias && tile.has_bias();
  fill_unit_table();
  Loader loader(grad_output, input, tile);
  const Multiplier multiplier(tile, thread / 32, thread % 32);
  float4* const slots =
      workspace + static_cast<long long>(blockIdx.x) * (kSlots * kThreads) + thread;
  const long long first = range.first_step(worker);
  const int steps = static_cast<int>(range.first_step(worker + 1) - first);
  // The slice after which a warp converts the next step: half of the warps convert while the others
  // multiply.
  const int last =
      kWarpSlices == 1 || has_bias || thread >= kThreads / 2 ? kWarpSlices - 1 : kWarpSlices - 2;
  Cursor at(first);
  StepPlace step;
  State state;
  if (steps > 0) {
    loader.move_to(at);
    loader.load_all(step);
    finish(state, loader, step, 0, has_bias);
  }
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    // The step has arrived, and no thread reads the one before any longer.
    __syncthreads();
    at.advance();
    const bool more = i + 1 < steps;
    // The ring has room for this walk's next lines, not for those of a new walk.
    const bool ahead = more && (!C::rolling || at.step > 0);
    StepPlace next = step.next();
    if (ahead) {
      loader.move_to(at);
      loader.copy(next, kOldLines);
    }
#pragma unroll 1
    for (int slice = 0; slice < kWarpSlices; ++slice) {
      if (ahead) loader.load_slice(next, slice);
      multiply_slice(state, multiplier, step, slice);
      if (ahead) loader.store_slice(next, slice);
      if (ahead && slice == last) finish(state, loader, next, kOldLines, has_bias);
    }
    if (!kConvertsGrad && has_bias) state.bias += bias_of_step(step);
    if (++state.steps == C::flush_steps) state.flush_to(slots);
    if (C::rolling && more && !ahead) {
      __syncthreads();
      next.position = 0;
      loader.move_to(at);
      loader.load_all(next);
      finish(state, loader, next, 0, has_bias);
    }
    step = next;
  }
  if (state.steps > 0 || !state.flushed) state.flush_to(slots);
  if (has_bias) {
    reinterpret_cast<float*>(
        workspace)[bias_slots(range.tiles * range.workers, blockIdx.x) + thread] = state.bias_total;
  }
}

}  // namespace ampere
}  // namespace fastconv

__global__ void __launch_bounds__(fastconv::ampere::kThreads, 1)
    weight_grad(const Config::Scalar* grad_output, const Config::Scalar* input, float4* workspace,
                int first_tile, int tiles, int workers, int batch) {
  fastconv::ampere::weight_grad(grad_output, input, workspace, {first_tile, tiles, workers, batch});
}

__global__ void __launch_bounds__(256)
    reduce(const float4* workspace, Config::Scalar* grad, Config::Scalar* bias_grad, int first_tile,
           int tiles, int workers) {
  fastconv::ampere::reduce(workspace, grad, first_tile, tiles, workers);
  if constexpr (Config::bias) {
    fastconv::ampere::reduce_bias(workspace, bias_grad, first_tile, tiles, workers);
  }
}
"""

SOURCES["direct/forward/kernel.cuh"] = r"""
// Forward convolution and input gradient on plain CUDA cores.
//
// Both passes are a cross-correlation along each of the two axes, or three (depth.cuh):
// out[m, o] = bias[m] + sum over channels k and taps j of
// packed[m, k, j] * in[k, o * in_stride + j * tap_step + origin].
//   forward        in = input, in_stride = stride, tap_step = dilation, origin = -padding.
//   input gradient in = grad_output. Input pixels whose positions have the same residue modulo the
//                  stride see the same taps, so each residue is a correlation of in_stride 1 that
//                  writes every stride-th pixel. Residues may differ by one tap; the missing one
//                  gets zero weights. Residues that no tap reaches are not computed: `clear` fills
//                  the image with zeros before.
//
// A block computes a tile of M channels x (rows x columns) pixels of one residue, plane, image and
// group.
//
//   shared memory, one of two stages          registers of a thread
//   input   [channel][row][pitch]             acc    [channels_per_thread][4 pixels]
//   weights [channel][tap row][tap col][M]    window the pixels of one row that its 4 pixels see
//
// A stage covers stage_channels input channels, stage_taps kernel rows and part_taps kernel columns
// (all of them, unless the kernel is very wide); one halo tile serves all of their taps. For each
// channel and kernel row a thread loads its window once and slides it over the kernel's columns:
// each tap costs channels_per_thread / 4 loads of weights and 4 * channels_per_thread
// multiply-adds.
//
// With `two_level`, accumulators are added to a second set of registers and cleared every
// flush_channels channels; where stages are small, every flush_stages stages, and where kernels are
// large, every flush_rows kernel rows. Rounding errors then grow with the lengths of the two levels
// and not with the length of the whole sum.
#include "device/depth.cuh"
#include "device/epilogue.cuh"

namespace fastconv {
namespace convolve {

using C = Config;
using D = DepthOf<C>;
using Scalar = C::Scalar;
using Acc = AccOf<Scalar>::type;

// --- One axis -----------------------------------------------------------------------------------

// Maps taps along one axis to input positions and kernel indices.
template <bool kTransposed, int kKernel, int kStride, int kDilation, int kPadding, int kOutSize>
struct Axis {
  static constexpr int kCommon = gcd(kStride, kDilation);
  // Distance between neighbouring outputs of a residue.
  static constexpr int kOutStep = kTransposed ? kStride : 1;
  static constexpr int kInStride = kTransposed ? 1 : kStride;
  static constexpr int kTapStep = kTransposed ? kDilation / kCommon : kDilation;
  static constexpr int kKernelStep = kTransposed ? kStride / kCommon : 1;
  static constexpr int kTaps = (kKernel - 1) / kKernelStep + 1;
  // Kernel index k reaches the outputs at k * dilation - padding modulo the stride, and these
  // residues repeat after kKernelStep indices.
  static constexpr int kResidues = kKernel < kKernelStep ? kKernel : kKernelStep;
  static constexpr bool kAllTaps = kResidues == kKernel || kKernel % kKernelStep == 0;
  static constexpr int kPositions = (kOutSize - 1) / kOutStep + 1;  // most outputs of a residue
  // Member `origin` of residue 0, which is that of every residue if kOutStep is 1.
  static constexpr int kOrigin =
      kTransposed ? (kPadding == 0 ? 0 : (kPadding - 1) / kStride + 1) - (kTaps - 1) * kTapStep
                  : -kPadding;

  int taps;          // taps of this residue, at most kTaps
  int first_kernel;  // kernel index of the last tap (transposed) or of the first (forward)
  int origin;        // input position of the first output's first tap
  int first_out;     // position of the first output
  int positions;     // number of outputs, kOutStep apart; may be 0

  __device__ explicit Axis(int residue)
      : taps(kTaps), first_kernel(0), origin(kOrigin), first_out(0), positions(kOutSize) {
    if constexpr (kOutStep > 1) {
      first_kernel = residue;
      taps = (kKernel - 1 - residue) / kKernelStep + 1;
      const int shifted = residue * kDilation - kPadding;
      int quotient = shifted / kStride;
      first_out = shifted % kStride;
      if (first_out < 0) {
        first_out += kStride;
        --quotient;
      }
      origin = -quotient - (taps - 1) * kTapStep;
      positions = first_out < kOutSize ? (kOutSize - 1 - first_out) / kOutStep + 1 : 0;
    }
  }

  // Taps count up with input positions; a transposed kernel's indices then count down.
  __device__ int kernel_index(int tap) const {
    return kTransposed ? first_kernel + (taps - 1 - tap) * kKernelStep : tap;
  }
};

using Depth = Axis<C::transposed, D::kernel, D::stride, D::dilation, D::padding, D::out>;
using Rows = Axis<C::transposed, C::kernel_height, C::stride_height, C::dilation_height,
                  C::padding_top, C::out_height>;
using Columns = Axis<C::transposed, C::kernel_width, C::stride_width, C::dilation_width,
                     C::padding_left, C::out_width>;

// --- The tile -----------------------------------------------------------------------------------

constexpr int kPixels = 4;  // neighbours in a row that a thread computes
constexpr int kThreads = 32 * C::warps;
constexpr int kLanesN = C::lanes_y * C::lanes_x;
constexpr int kLanesM = 32 / kLanesN;
constexpr int kTileM = C::channels_per_thread * kLanesM;
constexpr int kTileWidth = kPixels * C::lanes_x;
constexpr int kTileHeight = C::lanes_y * C::warps;
// A thread's channels come in groups that one shared-memory instruction reads. Neighbouring lanes
// take neighbouring groups, so that a warp reads without bank conflicts.
constexpr int kGroup = C::channels_per_thread < 4 ? C::channels_per_thread : 4;
constexpr int kGroups = C::channels_per_thread / kGroup;

constexpr int kParts = ceil_div(Columns::kTaps, C::part_taps);
constexpr int kTapChunks = ceil_div(Rows::kTaps, C::stage_taps);
constexpr int kReads = C::group_in * Depth::kTaps;  // channels of all planes that are read
constexpr int kChunks = ceil_div(kReads, C::stage_channels);
constexpr int kStages = kChunks * kParts * kTapChunks;

// The tile of a single kernel row (or column) holds only the rows (or columns) that it reads; the
// tile of several holds a contiguous range.
constexpr int kRowStep = C::stage_taps == 1 ? Rows::kInStride : 1;
constexpr int kRowStride = Rows::kInStride / kRowStep;
constexpr int kColumnStep = C::part_taps == 1 ? Columns::kInStride : 1;
constexpr int kColumnStride = Columns::kInStride / kColumnStep;

// Vector copies need aligned addresses, so the tile may start kShift pixels before the first one
// needed. The shift is the same for every residue and part.
constexpr int kVector = C::vector;
constexpr int kShift = kVector == 1 ? 0 : (Columns::kOrigin % kVector + kVector) % kVector;
static_assert(kVector == 1 || (Columns::kResidues == 1 && kColumnStep == 1),
              "neighbours in memory");
static_assert(kParts == 1 || C::part_taps * Columns::kTapStep % kVector == 0, "aligned parts");
constexpr int kWindow =
    kShift + (kPixels - 1) * kColumnStride + (C::part_taps - 1) * Columns::kTapStep + 1;
constexpr int kWindowPieces = ceil_div(kWindow, 4);

constexpr int kRows = (kTileHeight - 1) * kRowStride + (C::stage_taps - 1) * Rows::kTapStep + 1;
constexpr int kColumns =
    round_up((kTileWidth - kPixels) * kColumnStride + kWindowPieces * 4, kVector > 4 ? kVector : 4);
constexpr int kPitch = kColumns + C::pitch_padding;
static_assert(C::stage_channels % C::flush_channels == 0, "stages end flushed");
static_assert(C::flush_stages == 1 || C::stage_channels == C::flush_channels, "or several do");
static_assert(C::flush_rows == C::stage_taps || C::flush_channels * C::flush_stages == 1, "");
constexpr int kStageTaps = C::stage_taps * C::part_taps;
constexpr int kInputElements = C::stage_channels * kRows * kPitch;
constexpr int kWeightElements = C::stage_channels * kStageTaps * kTileM;
constexpr int kInputBytes = round_up(kInputElements * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kStageBytes =
    kInputBytes + round_up(kWeightElements * static_cast<int>(sizeof(Acc)), 16);
static_assert(2 * kStageBytes == C::shared_bytes, "the launch reserves what the tile needs");
static_assert(kLanesM * kLanesN == 32 && C::channels_per_thread % kGroup == 0, "whole warps");

constexpr int kTilesM = ceil_div(C::group_out, kTileM);
constexpr int kPlaneResidues = Rows::kResidues * Columns::kResidues;
constexpr int kResidues = Depth::kResidues * kPlaneResidues;
// Packed weights of one channel tile: [channel][part][tap row][tap column of the part][kTileM], so
// that each channel's weights of a stage are a contiguous run.
constexpr int kTapsHeight = kTapChunks * C::stage_taps;
constexpr int kChannels = kChunks * C::stage_channels;
constexpr long long kPackedTile = 1ll * kChannels * kParts * kTapsHeight * C::part_taps * kTileM;
using PackedOffset = IndexTo<kPackedTile>;
constexpr PackedOffset kPackedPart = PackedOffset{1} * kTapsHeight * C::part_taps * kTileM;
constexpr PackedOffset kPackedChannel = kParts * kPackedPart;

// Holds offsets and positions within an image, and positions beyond its end: with large strides,
// tiles reach far past it.
constexpr long long kReach =
    max_of(1ll * (Rows::kPositions + kTileHeight) * Rows::kInStride +
               1ll * kTapsHeight * Rows::kTapStep + 1ll * kRows * kRowStep,
           1ll * (Columns::kPositions + kTileWidth) * Columns::kInStride +
               1ll * kParts * C::part_taps * Columns::kTapStep + 1ll * kColumns * kColumnStep);
constexpr long long kImageElements =
    C::groups * max_of(1ll * C::group_in * D::in * C::in_height * C::in_width,
                       1ll * C::group_out * D::out * C::out_height * C::out_width);
using Offset = IndexTo<max_of(kImageElements, kReach)>;

// Decodes a block's tile from its index. Channel tiles change fastest, so that the blocks that read
// the same input run together and find it in the L2 cache.
struct Tile {
  int m, x, y, z, group, image, residue;

  __device__ explicit Tile(int index, int first_image, int images) {
    constexpr int kTilesX = ceil_div(Columns::kPositions, kTileWidth);
    constexpr int kTilesY = ceil_div(Rows::kPositions, kTileHeight);
    m = index % kTilesM;
    index /= kTilesM;
    x = index % kTilesX;
    index /= kTilesX;
    y = index % kTilesY;
    index /= kTilesY;
    z = index % Depth::kPositions;
    index /= Depth::kPositions;
    group = index % C::groups;
    index /= C::groups;
    image = first_image + index % images;
    residue = index / images;
  }
};

// The axes of a tile's residue.
__device__ __forceinline__ Depth depth_of(int residue) { return Depth(residue / kPlaneResidues); }
__device__ __forceinline__ Rows rows_of(int residue) {
  if constexpr (Depth::kResidues > 1) residue %= kPlaneResidues;
  return Rows(residue / Columns::kResidues);
}
__device__ __forceinline__ Columns columns_of(int residue) {
  return Columns(residue % Columns::kResidues);
}

__device__ __forceinline__ Offset in_offset(int channel, Offset row, Offset column) {
  if constexpr (C::in_channels_last) {
    return (row * C::in_width + column) * (C::group_in * C::groups) + channel;
  }
  return (static_cast<Offset>(channel) * C::in_height + row) * C::in_width + column;
}

__device__ __forceinline__ Offset in_offset(int channel, Offset plane, Offset row, Offset column) {
  if constexpr (C::in_channels_last) return in_offset(channel, plane * C::in_height + row, column);
  return ((static_cast<Offset>(channel) * D::in + plane) * C::in_height + row) * C::in_width +
         column;
}

// The offset within the first output plane.
__device__ __forceinline__ Offset out_offset(int channel, Offset row, Offset column) {
  if constexpr (C::out_channels_last) {
    return (row * C::out_width + column) * (C::group_out * C::groups) + channel;
  }
  return (static_cast<Offset>(channel) * D::out * C::out_height + row) * C::out_width + column;
}

// The distance between neighbouring output planes.
constexpr Offset kOutPlane =
    static_cast<Offset>(C::out_channels_last ? C::group_out * C::groups : 1) * C::out_height *
    C::out_width;

// A channel of one of the planes that an output plane reads, counted as the reduction does.
struct Read {
  int channel;  // within the group
  int tap;      // of the kernel's planes

  __device__ explicit Read(int index) : channel(index), tap(0) {
    if constexpr (Depth::kTaps > 1) {
      channel = index % C::group_in;
      tap = index / C::group_in;
    }
  }

  // Whether the reduction has this channel: the last chunk may go beyond it, and a residue may have
  // fewer taps than others.
  __device__ bool exists(const Depth& depth) const {
    return Depth::kTaps > 1 ? tap < depth.taps : channel < C::group_in;
  }
};

// --- Loading ------------------------------------------------------------------------------------

// Copies one stage's halo tile; elements outside of the image or past the last channel become zero.
__device__ __forceinline__ void load_input(Scalar* tile, const Scalar* image, int group,
                                           const Depth& depth, int first_channel, int first_plane,
                                           Offset first_row, Offset first_column) {
  constexpr int kVectors = kColumns / kVector;
  constexpr int kTotal = C::stage_channels * kRows * kVectors;
  for (int i = threadIdx.x; i < kTotal; i += kThreads) {
    // Neighbouring threads copy neighbouring addresses: columns, or channels if they come last.
    const int channel = C::in_channels_last ? i % C::stage_channels : i / (kRows * kVectors);
    const int rest = C::in_channels_last ? i / C::stage_channels : i % (kRows * kVectors);
    const int row = rest / kVectors;
    const int column = rest % kVectors * kVector;
    const Offset y = first_row + static_cast<Offset>(row) * kRowStep;
    const Offset x = first_column + static_cast<Offset>(column) * kColumnStep;
    bool valid = false;
    Offset offset = 0;
    if constexpr (D::exists) {
      const Read read(first_channel + channel);
      const int plane = first_plane + read.tap * Depth::kTapStep;
      valid = read.exists(depth) && plane >= 0 && plane < D::in && y >= 0 && y < C::in_height &&
              x >= 0 && x < C::in_width;
      if (valid) offset = in_offset(group * C::group_in + read.channel, plane, y, x);
    } else {
      valid = first_channel + channel < C::group_in && y >= 0 && y < C::in_height && x >= 0 &&
              x < C::in_width;
      if (valid) offset = in_offset(group * C::group_in + first_channel + channel, y, x);
    }
    copy_elements<kVector>(tile + (channel * kRows + row) * kPitch + column, image + offset, valid);
  }
}

// Returns the weight of a group's output channel m and channel `index` of the reduction at a tap;
// zero past the last channel, and past the last tap of the residue.
__device__ __forceinline__ Acc weight_at(const Scalar* weight, const Depth& depth, const Rows& rows,
                                         const Columns& columns, int group, int m, int index,
                                         int tap_y, int tap_x) {
  const Read read(index);
  const int k = read.channel;
  if (m >= C::group_out || !read.exists(depth) || tap_y >= rows.taps || tap_x >= columns.taps)
    return 0;
  // The weight's first dimension is the forward pass's output channels.
  const long long first = C::transposed ? group * C::group_in + k : group * C::group_out + m;
  const long long second = C::transposed ? m : k;
  if constexpr (D::exists) weight += 1ll * depth.kernel_index(read.tap) * D::weight_stride;
  return widen(weight[first * C::weight_stride_out + second * C::weight_stride_in +
                      1ll * rows.kernel_index(tap_y) * C::weight_stride_height +
                      1ll * columns.kernel_index(tap_x) * C::weight_stride_width]);
}

// Returns where a stage's weights begin in a channel tile's packed weights.
__device__ __forceinline__ PackedOffset packed_offset(int channel, int part, int tap_row) {
  return channel * kPackedChannel + part * kPackedPart +
         PackedOffset{tap_row} * C::part_taps * kTileM;
}

// Copies one stage's weights: for each channel a contiguous run of the packed array.
__device__ __forceinline__ void load_packed(Acc* tile, const Acc* packed) {
  constexpr int kVectorAccs = 16 / static_cast<int>(sizeof(Acc));
  constexpr int kRun = kStageTaps * kTileM;
  constexpr int kWidth = kRun % kVectorAccs == 0 ? kVectorAccs : 1;
  for (int i = threadIdx.x; i < C::stage_channels * kRun / kWidth; i += kThreads) {
    const int channel = i / (kRun / kWidth);
    const int position = i % (kRun / kWidth) * kWidth;
    copy_elements<kWidth>(tile + channel * kRun + position,
                          packed + channel * kPackedChannel + position, true);
  }
}

// Reads one stage's weights from the weight tensor itself. This is slower than load_packed, but
// saves small problems the launch of `pack`.
__device__ __forceinline__ void load_unpacked(Acc* tile, const Scalar* weight, const Depth& depth,
                                              const Rows& rows, const Columns& columns, int group,
                                              int first_m, int first_channel, int first_tap_y,
                                              int first_tap_x) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kWeightElements; i += kThreads) {
    const int m = i % kTileM, tap = i / kTileM % kStageTaps, channel = i / (kTileM * kStageTaps);
    tile[i] = weight_at(weight, depth, rows, columns, group, first_m + m, first_channel + channel,
                        first_tap_y + tap / C::part_taps, first_tap_x + tap % C::part_taps);
  }
}

// --- Multiplying --------------------------------------------------------------------------------

// A thread's place in its block's tile.
struct Position {
  int m, y, x;

  __device__ Position() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    m = lane / kLanesN;
    y = lane % kLanesN / C::lanes_x + C::lanes_y * warp;
    x = lane % C::lanes_x;
  }

  // Maps the thread's i-th channel, below channels_per_thread, to a channel of the tile.
  __device__ __forceinline__ int channel(int i) const {
    return (i / kGroup * kLanesM + m) * kGroup + i % kGroup;
  }
};

using Accumulators = Acc[C::channels_per_thread][kPixels];

// Adds the accumulators to the second level and clears them.
__device__ __forceinline__ void flush(Accumulators& acc, Accumulators& total_acc) {
#pragma unroll
  for (int i = 0; i < C::channels_per_thread; ++i) {
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      total_acc[i][p] += acc[i][p];
      acc[i][p] = 0;
    }
  }
}

// Multiplies a stage's input by its weights. Only tap_rows x tap_columns of the stage's taps exist;
// the others are skipped although their weights are zero, because zero times infinity is NaN.
__device__ __forceinline__ void multiply(const Scalar* input, const Acc* weights,
                                         const Position& at, int tap_rows, int tap_columns,
                                         Accumulators& acc, Accumulators& total_acc) {
  constexpr bool kAllColumns = kParts == 1 && Columns::kAllTaps;
  constexpr bool kAllRows = kTapChunks == 1 && Rows::kAllTaps;
  constexpr int kRowsUnrolled = kStageTaps <= C::unrolled_taps ? C::stage_taps : 1;
#pragma unroll 1
  for (int channel = 0; channel < C::stage_channels; ++channel) {
#pragma unroll(kRowsUnrolled)
    for (int tap_row = 0; tap_row < C::stage_taps; ++tap_row) {
      if (!kAllRows && tap_row >= tap_rows) break;
      const int row = at.y * kRowStride + tap_row * Rows::kTapStep;
      const Scalar* pixels =
          input + (channel * kRows + row) * kPitch + at.x * kPixels * kColumnStride;
      const Acc* taps = weights + (channel * C::stage_taps + tap_row) * C::part_taps * kTileM;
      Acc window[kWindowPieces][4];
#pragma unroll
      for (int piece = 0; piece < kWindowPieces; ++piece) load4(pixels + piece * 4, window[piece]);
#pragma unroll
      for (int tap = 0; tap < C::part_taps; ++tap) {
        if (!kAllColumns && tap >= tap_columns) break;
        Acc weight[C::channels_per_thread];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const auto group = *reinterpret_cast<const Vector<Acc, kGroup>*>(taps + tap * kTileM +
                                                                           at.channel(i * kGroup));
#pragma unroll
          for (int j = 0; j < kGroup; ++j) weight[i * kGroup + j] = group.element[j];
        }
#pragma unroll
        for (int i = 0; i < C::channels_per_thread; ++i) {
#pragma unroll
          for (int p = 0; p < kPixels; ++p) {
            const int w = kShift + p * kColumnStride + tap * Columns::kTapStep;
            acc[i][p] += weight[i] * window[w / 4][w % 4];
          }
        }
      }
      if (C::two_level && C::flush_rows < C::stage_taps && (tap_row + 1) % C::flush_rows == 0) {
        flush(acc, total_acc);
      }
    }
    if (C::two_level && C::flush_stages == 1 && (channel + 1) % C::flush_channels == 0) {
      flush(acc, total_acc);
    }
  }
}

// --- Storing ------------------------------------------------------------------------------------

// Writes the first `left` elements, kStep apart in memory, in vectors of kVectorOut. `left` is a
// multiple of kVectorOut.
template <int kVectorOut, int kStep = 1, int kCount>
__device__ __forceinline__ void store_first(Scalar* target, const Scalar (&elements)[kCount],
                                            int left, const Epilogue<C>&) {
  static_assert(kVectorOut == 1 || kStep == 1, "neighbours in memory");
#pragma unroll
  for (int i = 0; i < kCount; i += kVectorOut) {
    Vector<Scalar, kVectorOut> vector;
#pragma unroll
    for (int j = 0; j < kVectorOut; ++j) vector.element[j] = elements[i + j];
    if (i < left) *reinterpret_cast<Vector<Scalar, kVectorOut>*>(target + i * kStep) = vector;
  }
}

// An accumulator whose residual is still to be added. store_first loads all residuals before it
// uses the first, so that their latencies overlap.
struct Unfinished {
  Acc acc;
};
template <int kVectorOut, int kStep = 1, int kCount>
__device__ __forceinline__ void store_first(Scalar* target,
                                            const Unfinished (&accumulators)[kCount], int left,
                                            const Epilogue<C>& epilogue) {
  Vector<Scalar, kVectorOut> residuals[kCount / kVectorOut];
#pragma unroll
  for (int i = 0; i < kCount; i += kVectorOut) {
    residuals[i / kVectorOut] = epilogue.residual_of<kVectorOut>(target + i * kStep, i < left);
  }
  Scalar elements[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Scalar residual = residuals[i / kVectorOut].element[i % kVectorOut];
    elements[i] = narrow<Scalar>(epilogue.activated(accumulators[i].acc, residual));
  }
  store_first<kVectorOut, kStep>(target, elements, left, epilogue);
}

// What store_first takes: finished outputs, or accumulators if there is a residual to add.
#ifdef FASTCONV_RESIDUAL
using Value = Unfinished;
__device__ __forceinline__ Value value_of(Acc acc) { return {acc}; }
#else
using Value = Scalar;
__device__ __forceinline__ Value value_of(Acc acc) {
  return narrow<Scalar>(Epilogue<C>::activated(acc));
}
#endif

// Adds the bias and writes the part of the tile inside the image, in vectors along the dimension
// that is contiguous in memory where the image's size keeps all of them aligned.
__device__ __forceinline__ void store(Scalar* image, const Scalar* bias, const Tile& tile,
                                      const Rows& rows, const Columns& columns, const Position& at,
                                      const Accumulators& acc, const Epilogue<C>& epilogue) {
  const int y = tile.y * kTileHeight + at.y, x = tile.x * kTileWidth + at.x * kPixels;
  if (y >= rows.positions || x >= columns.positions) return;
  const int row = y * Rows::kOutStep + rows.first_out;
  const int column = x * Columns::kOutStep + columns.first_out;
  Value value[C::channels_per_thread][kPixels];
#pragma unroll
  for (int i = 0; i < C::channels_per_thread; ++i) {
    const int m = tile.m * kTileM + at.channel(i);
    const Acc shift = bias != nullptr && m < C::group_out
                          ? Acc(widen(bias[tile.group * C::group_out + m]))
                          : Acc(0);
#pragma unroll
    for (int p = 0; p < kPixels; ++p) value[i][p] = value_of(acc[i][p] + shift);
  }
  const int first = tile.group * C::group_out + tile.m * kTileM;
  if constexpr (C::out_channels_last) {
    constexpr int kVectorOut = C::aligned ? gcd(C::group_out, kGroup) : 1;
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      if (x + p >= columns.positions) return;
      const int column_p = column + p * Columns::kOutStep;
#pragma unroll
      for (int i = 0; i < C::channels_per_thread; i += kGroup) {
        const int m = at.channel(i);
        Value group[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) group[j] = value[i + j][p];
        store_first<kVectorOut>(image + out_offset(first + m, row, column_p), group,
                                C::group_out - tile.m * kTileM - m, epilogue);
      }
    }
  } else {
    constexpr int kVectorOut =
        C::aligned && Columns::kOutStep == 1 ? gcd(C::out_width, kPixels) : 1;
#pragma unroll
    for (int i = 0; i < C::channels_per_thread; ++i) {
      const int m = at.channel(i);
      if (tile.m * kTileM + m >= C::group_out) continue;
      store_first<kVectorOut, Columns::kOutStep>(image + out_offset(first + m, row, column),
                                                 value[i], columns.positions - x, epilogue);
    }
  }
}

}  // namespace convolve
}  // namespace fastconv

// Fills the output with zeros. Launched before `convolve` where that does not write every pixel.
__global__ void clear(Config::Scalar* __restrict__ output, int batch) {
  using namespace fastconv::convolve;
  constexpr int kCount = C::aligned ? 16 / static_cast<int>(sizeof(Scalar)) : 1;
  using Zeros = fastconv::Vector<Scalar, kCount>;
  const long long total =
      1ll * batch * C::groups * C::group_out * D::out * C::out_height * C::out_width;
  const long long thread = 1ll * blockIdx.x * blockDim.x + threadIdx.x;
  const long long step = 1ll * gridDim.x * blockDim.x;
  for (long long i = thread; i < total / kCount; i += step) {
    reinterpret_cast<Zeros*>(output)[i] = Zeros{};
  }
  for (long long i = total / kCount * kCount + thread; i < total; i += step) output[i] = Scalar{};
}

// Packs the weights in the order in which `convolve` reads them: [residue][group][channel tile]
// [channel][part][tap row][tap column][kTileM], converted to the accumulators' type.
__global__ void pack(const Config::Scalar* __restrict__ weight,
                                fastconv::AccOf<Config::Scalar>::type* __restrict__ packed) {
  using namespace fastconv::convolve;
  constexpr long long kTotal = 1ll * kResidues * C::groups * kTilesM * kPackedTile;
  const long long step = 1ll * gridDim.x * blockDim.x;
  for (long long i = 1ll * blockIdx.x * blockDim.x + threadIdx.x; i < kTotal; i += step) {
    long long rest = i;
    const int in_tile = static_cast<int>(rest % kTileM);
    rest /= kTileM;
    const int in_part = static_cast<int>(rest % C::part_taps);
    rest /= C::part_taps;
    const int tap_y = static_cast<int>(rest % kTapsHeight);
    rest /= kTapsHeight;
    const int tap_x = static_cast<int>(rest % kParts) * C::part_taps + in_part;
    rest /= kParts;
    const int k = static_cast<int>(rest % kChannels);
    rest /= kChannels;
    const int m = static_cast<int>(rest % kTilesM) * kTileM + in_tile;
    rest /= kTilesM;
    const int group = static_cast<int>(rest % C::groups);
    const int residue = static_cast<int>(rest / C::groups);
    packed[i] = weight_at(weight, depth_of(residue), rows_of(residue), columns_of(residue), group,
                          m, k, tap_y, tap_x);
  }
}

__global__ void __launch_bounds__(fastconv::convolve::kThreads, Config::blocks_per_sm)
    convolve(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ weight,
             const fastconv::AccOf<Config::Scalar>::type* __restrict__ packed,
             const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
             int first_image, int images FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::convolve;
  const Tile tile(blockIdx.x, first_image, images);
  const Position at;
  const Depth depth = depth_of(tile.residue);
  const Rows rows = rows_of(tile.residue);
  const Columns columns = columns_of(tile.residue);
  // Residues may differ in size; the grid covers the largest.
  if constexpr (Depth::kOutStep > 1) {
    if (tile.z >= depth.positions) return;
  }
  if constexpr (Rows::kOutStep > 1 || Columns::kOutStep > 1) {
    if (tile.y * kTileHeight >= rows.positions || tile.x * kTileWidth >= columns.positions) return;
  }
  const Offset first_row =
      static_cast<Offset>(tile.y * kTileHeight) * Rows::kInStride + rows.origin;
  const Offset first_column =
      static_cast<Offset>(tile.x * kTileWidth) * Columns::kInStride + columns.origin - kShift;
  const int first_plane = tile.z * Depth::kInStride + depth.origin;
  const Scalar* image =
      input + 1ll * tile.image * C::groups * C::group_in * D::in * C::in_height * C::in_width;
  packed += ((tile.residue * C::groups + tile.group) * kTilesM + tile.m) * kPackedTile;

  unsigned char* shared = fastconv::shared_memory();
  const auto inputs = [&](int stage) {
    return reinterpret_cast<Scalar*>(shared + stage % 2 * kStageBytes);
  };
  const auto weights = [&](int stage) {
    return reinterpret_cast<Acc*>(shared + stage % 2 * kStageBytes + kInputBytes);
  };
  // Stages go through the kernel's rows first, then through parts of rows, then through channels.
  const auto tap_row = [](int stage) { return stage % kTapChunks * C::stage_taps; };
  const auto part = [](int stage) { return stage / kTapChunks % kParts; };
  const auto load = [&](int stage) {
    const int channel = stage / (kTapChunks * kParts) * C::stage_channels;
    load_input(inputs(stage), image, tile.group, depth, channel, first_plane,
               first_row + tap_row(stage) * Rows::kTapStep,
               first_column + part(stage) * C::part_taps * Columns::kTapStep);
    if constexpr (C::packed) {
      load_packed(weights(stage), packed + packed_offset(channel, part(stage), tap_row(stage)));
    } else {
      load_unpacked(weights(stage), weight, depth, rows, columns, tile.group, tile.m * kTileM,
                    channel, tap_row(stage), part(stage) * C::part_taps);
    }
    fastconv::copy_async_commit();
  };

  Accumulators acc = {}, total_acc = {};
  load(0);
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage + 1 < kStages) {
      load(stage + 1);
      fastconv::copy_async_wait<1>();
    } else {
      fastconv::copy_async_wait<0>();
    }
    __syncthreads();
    multiply(inputs(stage), weights(stage), at, rows.taps - tap_row(stage),
             columns.taps - part(stage) * C::part_taps, acc, total_acc);
    if (C::two_level && C::flush_stages > 1) {
      if ((stage + 1) % C::flush_stages == 0 || stage + 1 == kStages) flush(acc, total_acc);
    }
    __syncthreads();  // before the stage after next overwrites this one
  }
  Scalar* target =
      output + 1ll * tile.image * C::groups * C::group_out * D::out * C::out_height * C::out_width;
  if constexpr (D::exists) {
    target += static_cast<Offset>(tile.z * Depth::kOutStep + depth.first_out) * kOutPlane;
  }
  store(target, bias, tile, rows, columns, at, C::two_level ? total_acc : acc,
        FASTCONV_EPILOGUE(output));
}
"""

SOURCES["direct/wgrad/kernel.cuh"] = r"""
// Weight gradient on plain CUDA cores.
//
// grad[m, i, tap] = sum over images and output pixels of
// grad_output[m, pixel] * input[i, pixel * stride + tap * dilation - padding].
//
// A block computes a tile of the gradient: M output channels x I input channels of a group, for
// block_taps kernel rows and part_taps of their columns (all of them, unless the kernel is large).
// It accumulates over its split of the pixels (split-K), a stage of stage_rows x stage_columns at a
// time.
//
//   shared memory, one of two stages        registers of a thread
//   grad_output [M][row][pitch]             acc    [channels_per_thread][inputs_per_thread][taps]
//   input       [I][row][tap row][pitch]    window the pixels that 4 output pixels see
//
// A thread takes 4 neighbouring pixels at a time: their window serves all taps, so that 4
// multiply-adds for each accumulator cost channels_per_thread + (window / 4) * inputs_per_thread
// loads. Where a group has few channels, the threads of a block also divide the pixels among
// themselves (lanes_k, warps_k).
//
// Volumes have one more coordinate (depth.cuh): a tile's input channels are those of all planes
// that an output plane reads, and pixels are those of all planes.
//
// Accumulators lose digits over many pixels, so every flush_units stages a thread adds them to its
// own slots of a workspace and clears them. A second kernel reduces the slots in a fixed order,
// without atomics, so that the bits are the same every time. A launch covers as many tiles as the
// workspace has room for.
//
// With `bias`, a thread also adds up the output's gradient that it loads, in further accumulators
// behind the others: the gradient of the bias. The second kernel takes them from one of the threads
// that saw the same channels and pixels.
#include "device/depth.cuh"
#include "device/tile.cuh"

namespace fastconv {
namespace weight_grad {

using C = Config;
using D = DepthOf<C>;
using Scalar = C::Scalar;
using Acc = AccOf<Scalar>::type;
using Unit = IndexOf<C::wide_units>::type;  // counts the stages of all images

constexpr int kPixels = 4;  // neighbours in a row that a thread takes at a time
constexpr int kLanesK = 32 / (C::lanes_m * C::lanes_n);
constexpr int kThreads = 32 * C::warps_m * C::warps_n * C::warps_k;
constexpr int kThreadsM = C::lanes_m * C::warps_m;
constexpr int kThreadsN = C::lanes_n * C::warps_n;
constexpr int kThreadsK = kLanesK * C::warps_k;
constexpr int kTileM = C::channels_per_thread * kThreadsM;
constexpr int kTileI = C::inputs_per_thread * kThreadsN;

constexpr int kTaps = C::part_taps;
constexpr int kParts = ceil_div(C::kernel_width, kTaps);
constexpr int kTapChunks = ceil_div(C::kernel_height, C::block_taps);
constexpr int kBlockTaps = C::block_taps * kTaps;
constexpr int kAccumulators = C::channels_per_thread * C::inputs_per_thread * kBlockTaps;
// Values that a thread keeps in the workspace.
constexpr int kSlots = kAccumulators + (C::bias ? C::channels_per_thread : 0);

// The tile of a single kernel column holds only the columns that it reads; the tile of several
// holds a contiguous range.
constexpr int kColumnStep = kTaps == 1 ? C::stride_width : 1;
constexpr int kColumnStride = C::stride_width / kColumnStep;

// Vector copies need aligned addresses, so the input's tile may start kShift pixels before the
// first one needed. The shift is the same for every part.
constexpr int kShift =
    C::vector_input == 1 ? 0
                         : (C::vector_input - C::padding_left % C::vector_input) % C::vector_input;
static_assert(C::vector_input == 1 || kColumnStep == 1, "neighbours in memory");
static_assert(kParts == 1 || kTaps * C::dilation_width % C::vector_input == 0, "aligned parts");
constexpr int kWindow =
    kShift + (kPixels - 1) * kColumnStride + (kTaps - 1) * C::dilation_width + 1;
constexpr int kWindowPieces = ceil_div(kWindow, 4);

constexpr int kQuads = C::stage_columns / kPixels;  // groups of kPixels in a row of a stage
constexpr int kInputColumns = round_up((kQuads - 1) * kPixels * kColumnStride + kWindowPieces * 4,
                                       C::vector_input > 4 ? C::vector_input : 4);
constexpr int kInputRows = C::stage_rows * C::block_taps;
constexpr int kInputPitch = kInputColumns + C::input_pitch_padding;
constexpr int kGradPitch = C::stage_columns + C::grad_pitch_padding;
constexpr int kGradBytes =
    round_up(kTileM * C::stage_rows * kGradPitch * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kStageBytes =
    kGradBytes + round_up(kTileI * kInputRows * kInputPitch * static_cast<int>(sizeof(Scalar)), 16);
static_assert(2 * kStageBytes == C::shared_bytes, "the launch reserves what the tile needs");
static_assert(C::stage_columns % kPixels == 0, "whole quads");

constexpr int kTilesM = ceil_div(C::group_out, kTileM);
constexpr int kReads = C::group_in * D::kernel;  // channels of all planes that are read
constexpr int kTilesI = ceil_div(kReads, kTileI);
constexpr int kUnitsX = ceil_div(C::out_width, C::stage_columns);
constexpr int kUnitsY = ceil_div(C::out_height, C::stage_rows);
constexpr Unit kPlaneUnits = Unit{kUnitsX} * kUnitsY;
constexpr Unit kImageUnits = kPlaneUnits * D::out;

// Holds offsets and positions within an image, and positions beyond its end: with large strides,
// stages reach far past it.
constexpr long long kReach =
    max_of(1ll * (C::out_height + C::stage_rows) * C::stride_height +
               1ll * (C::kernel_height + C::block_taps) * C::dilation_height,
           1ll * (C::out_width + C::stage_columns) * C::stride_width +
               1ll * kParts * kTaps * C::dilation_width + 1ll * kInputColumns * kColumnStep);
constexpr long long kImageElements =
    C::groups * max_of(1ll * C::group_in * D::in * C::in_height * C::in_width,
                       1ll * C::group_out * D::out * C::out_height * C::out_width);
using Offset = IndexTo<max_of(kImageElements, kReach)>;

// Decodes a block's tile from its index.
struct Tile {
  int part, tap_row, i, m, group;  // tap_row is the first of block_taps kernel rows

  __device__ explicit Tile(int index) {
    part = index % kParts;
    index /= kParts;
    tap_row = index % kTapChunks * C::block_taps;
    index /= kTapChunks;
    i = index % kTilesI;
    index /= kTilesI;
    m = index % kTilesM;
    group = index / kTilesM;
  }

  // Whether this is the first tile of its output channels: the one that stores the bias gradient.
  __device__ bool has_bias() const { return part == 0 && tap_row == 0 && i == 0; }
};

// A thread's place in its block's tile; k is its share of the pixels.
struct Position {
  int m, n, k;

  __device__ Position() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    n = lane % C::lanes_n + C::lanes_n * (warp % C::warps_n);
    m = lane / C::lanes_n % C::lanes_m + C::lanes_m * (warp / C::warps_n % C::warps_m);
    k = lane / (C::lanes_n * C::lanes_m) + kLanesK * (warp / (C::warps_n * C::warps_m));
  }
};

// Returns the thread at a Position.
__device__ __forceinline__ int thread_at(int m, int n, int k) {
  const int lane = (k % kLanesK * C::lanes_m + m % C::lanes_m) * C::lanes_n + n % C::lanes_n;
  const int warp = (k / kLanesK * C::warps_m + m / C::lanes_m) * C::warps_n + n / C::lanes_n;
  return warp * 32 + lane;
}

// Returns where in the workspace a thread of a block keeps its accumulator `index`.
__device__ __forceinline__ long long slot(int block, int index, int thread) {
  return (1ll * block * kSlots + index) * kThreads + thread;
}

// Adds the slots of the threads that share a weight or a bias: its sum over a split's pixels.
__device__ __forceinline__ Acc split_sum(const Acc* workspace, int block, int index, int m, int n) {
  Acc total = 0;
  for (int k = 0; k < kThreadsK; ++k) {
    total += workspace[slot(block, index, thread_at(m, n, k))];
  }
  return total;
}

// A channel of one of a volume's planes, or none.
struct Place {
  int channel, plane;
  bool exists;
};

// Copies [channels][stage_rows][kTapRows][columns] of an image: channels from first_channel on or,
// of a volume, place(i) for each i below kChannels. Stage rows are row_step apart, tap rows
// tap_step; elements outside of the image become zero.
template <int kChannels, int kTapRows, int kColumns, int kStep, int kPitch, int kVector,
          bool kChannelsLast, int kAllChannels, int kDepth, int kHeight, int kWidth, class PlaceOf>
__device__ __forceinline__ void load(Scalar* tile, const Scalar* image, const PlaceOf& place,
                                     int first_channel, int end_channel, Offset first_row,
                                     Offset row_step, Offset tap_step, Offset first_column) {
  constexpr int kVectors = kColumns / kVector;
  constexpr int kRows = C::stage_rows * kTapRows;
#pragma unroll 1  // leaves the registers to the accumulators
  for (int i = threadIdx.x; i < kChannels * kRows * kVectors; i += kThreads) {
    const int channel = kChannelsLast ? i % kChannels : i / (kRows * kVectors);
    const int rest = kChannelsLast ? i / kChannels : i % (kRows * kVectors);
    const int row = rest / kVectors;
    const int column = rest % kVectors * kVector;
    const int c = first_channel + channel;
    const Offset y = first_row + row / kTapRows * row_step + row % kTapRows * tap_step;
    const Offset x = first_column + static_cast<Offset>(column) * kStep;
    bool valid = false;
    Offset offset = 0;
    if constexpr (D::exists) {
      const Place at = place(channel);
      const Offset plane = at.plane;
      valid = at.exists && y >= 0 && y < kHeight && x >= 0 && x < kWidth;
      if (valid) {
        offset =
            kChannelsLast
                ? ((plane * kHeight + y) * kWidth + x) * kAllChannels + at.channel
                : ((static_cast<Offset>(at.channel) * kDepth + plane) * kHeight + y) * kWidth + x;
      }
    } else {
      valid = c < end_channel && y >= 0 && y < kHeight && x >= 0 && x < kWidth;
      if (valid) {
        offset = kChannelsLast ? (y * kWidth + x) * kAllChannels + c
                               : (static_cast<Offset>(c) * kHeight + y) * kWidth + x;
      }
    }
    copy_elements<kVector>(tile + (channel * kRows + row) * kPitch + column, image + offset, valid);
  }
}

using Accumulators = Acc[C::channels_per_thread][C::inputs_per_thread][C::block_taps][kTaps];
using Biases = Acc[C::channels_per_thread];

// Adds the products of four pixels, or of the first `left` of them if not kWhole. Pixels beyond the
// image are skipped although the tiles hold zeros there, because zero times infinity is NaN.
template <bool kWhole>
__device__ __forceinline__ void multiply_quad(const Scalar* grad, const Scalar* input, int left,
                                              Accumulators& acc, Biases& bias) {
  Acc window[C::inputs_per_thread][C::block_taps][kWindowPieces][4];
#pragma unroll
  for (int i = 0; i < C::inputs_per_thread; ++i) {
#pragma unroll
    for (int r = 0; r < C::block_taps; ++r) {
#pragma unroll
      for (int piece = 0; piece < kWindowPieces; ++piece) {
        load4(input + (i * kThreadsN * kInputRows + r) * kInputPitch + piece * 4,
              window[i][r][piece]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::channels_per_thread; ++m) {
    Acc four[4];
    load4(grad + m * kThreadsM * C::stage_rows * kGradPitch, four);
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      if (!kWhole && p >= left) break;
      if (C::bias) bias[m] += four[p];
#pragma unroll
      for (int i = 0; i < C::inputs_per_thread; ++i) {
#pragma unroll
        for (int r = 0; r < C::block_taps; ++r) {
#pragma unroll
          for (int tap = 0; tap < kTaps; ++tap) {
            const int w = kShift + p * kColumnStride + tap * C::dilation_width;
            acc[m][i][r][tap] += four[p] * window[i][r][w / 4][w % 4];
          }
        }
      }
    }
  }
}

// Adds the products of a stage's rows x columns pixels that lie in the image.
__device__ __forceinline__ void multiply(const Scalar* grad, const Scalar* input,
                                         const Position& at, int rows, int columns,
                                         Accumulators& acc, Biases& bias) {
  const int quads = ceil_div(columns, kPixels);
#pragma unroll 1
  for (int q = at.k; q < rows * quads; q += kThreadsK) {
    const int row = C::stage_rows == 1 ? 0 : q / quads;
    const int column = (C::stage_rows == 1 ? q : q % quads) * kPixels;
    const Scalar* grads = grad + (at.m * C::stage_rows + row) * kGradPitch + column;
    const Scalar* inputs =
        input + (at.n * kInputRows + row * C::block_taps) * kInputPitch + column * kColumnStride;
    if (C::out_width % kPixels == 0 || column + kPixels <= columns) {
      multiply_quad<true>(grads, inputs, kPixels, acc, bias);
    } else {
      multiply_quad<false>(grads, inputs, columns - column, acc, bias);
    }
  }
}

}  // namespace weight_grad
}  // namespace fastconv

__global__ void __launch_bounds__(fastconv::weight_grad::kThreads, Config::blocks_per_sm)
    weight_grad(const Config::Scalar* __restrict__ grad_output,
                const Config::Scalar* __restrict__ input,
                fastconv::AccOf<Config::Scalar>::type* __restrict__ workspace, int first_tile,
                int tiles, int splits, int batch) {
  using namespace fastconv::weight_grad;
  const Tile tile(first_tile + blockIdx.x % tiles);
  const int split = blockIdx.x / tiles;
  const Position at;
  const long long units = 1ll * batch * D::out * kUnitsY * kUnitsX;
  const Unit first = static_cast<Unit>(units * split / splits);
  const Unit end = static_cast<Unit>(units * (split + 1) / splits);

  unsigned char* shared = fastconv::shared_memory();
  const auto grads = [&](Unit stage) {
    return reinterpret_cast<Scalar*>(shared + stage % 2 * kStageBytes);
  };
  const auto inputs = [&](Unit stage) {
    return reinterpret_cast<Scalar*>(shared + stage % 2 * kStageBytes + kGradBytes);
  };
  const auto row_of = [](Unit unit) {
    return static_cast<int>(unit / kUnitsX % kUnitsY) * C::stage_rows;
  };
  const auto column_of = [](Unit unit) {
    return static_cast<int>(unit % kUnitsX) * C::stage_columns;
  };
  const auto load_unit = [&](Unit unit) {
    const Unit stage = unit - first;
    const long long image = unit / kImageUnits;
    const int row = row_of(unit), column = column_of(unit);
    const int m = tile.group * C::group_out + tile.m * kTileM;
    const int i = tile.group * C::group_in + tile.i * kTileI;
    const auto written = [&](int channel) -> Place {
      const int plane = static_cast<int>(unit / kPlaneUnits % D::out);
      return {m + channel, plane, m + channel < (tile.group + 1) * C::group_out};
    };
    const auto read = [&](int channel) -> Place {
      const int index = tile.i * kTileI + channel;
      const int plane = static_cast<int>(unit / kPlaneUnits % D::out) * D::stride +
                        index / C::group_in * D::dilation - D::padding;
      return {tile.group * C::group_in + index % C::group_in, plane,
              index < kReads && plane >= 0 && plane < D::in};
    };
    constexpr int kOut = C::groups * C::group_out, kIn = C::groups * C::group_in;
    load<kTileM, 1, C::stage_columns, 1, kGradPitch, C::vector_grad, C::grad_channels_last, kOut,
         D::out, C::out_height, C::out_width>(
        grads(stage), grad_output + image * kOut * D::out * C::out_height * C::out_width, written,
        m, (tile.group + 1) * C::group_out, row, 1, 0, column);
    load<kTileI, C::block_taps, kInputColumns, kColumnStep, kInputPitch, C::vector_input,
         C::in_channels_last, kIn, D::in, C::in_height, C::in_width>(
        inputs(stage), input + image * kIn * D::in * C::in_height * C::in_width, read, i,
        (tile.group + 1) * C::group_in,
        static_cast<Offset>(row) * C::stride_height +
            static_cast<Offset>(tile.tap_row) * C::dilation_height - C::padding_top,
        C::stride_height, C::dilation_height,
        static_cast<Offset>(column) * C::stride_width +
            static_cast<Offset>(tile.part * kTaps) * C::dilation_width - C::padding_left - kShift);
    fastconv::copy_async_commit();
  };

  Accumulators acc = {};
  Biases bias = {};
  bool flushed = false;
  // Adds an accumulator to its slot and clears it.
  const auto flush = [&](Acc& value, int index) {
    Acc* target = workspace + slot(blockIdx.x, index, threadIdx.x);
    *target = flushed ? *target + value : value;
    value = 0;
  };
  if (first < end) load_unit(first);
#pragma unroll 1
  for (Unit unit = first; unit < end; ++unit) {
    if (unit + 1 < end) {
      load_unit(unit + 1);
      fastconv::copy_async_wait<1>();
    } else {
      fastconv::copy_async_wait<0>();
    }
    __syncthreads();
    const Unit stage = unit - first;
    const int rows_left = C::out_height - row_of(unit),
              columns_left = C::out_width - column_of(unit);
    multiply(grads(stage), inputs(stage), at, rows_left < C::stage_rows ? rows_left : C::stage_rows,
             columns_left < C::stage_columns ? columns_left : C::stage_columns, acc, bias);
    if ((stage + 1) % C::flush_units == 0 || unit + 1 == end) {
#pragma unroll
      for (int index = 0; index < kAccumulators; ++index) {
        flush(acc[index / (C::inputs_per_thread * kBlockTaps)]
                 [index / kBlockTaps % C::inputs_per_thread][index / kTaps % C::block_taps]
                 [index % kTaps],
              index);
      }
#pragma unroll
      for (int index = kAccumulators; index < kSlots; ++index)
        flush(bias[index - kAccumulators], index);
      flushed = true;
    }
    __syncthreads();  // before the stage after next overwrites this one
  }
}

// The split-K reduction: adds up the slots of every weight, splits in order, and writes the sum
// where the weight's strides say.
__global__ void reduce(
    const fastconv::AccOf<Config::Scalar>::type* __restrict__ workspace,
    Config::Scalar* __restrict__ grad, Config::Scalar* __restrict__ bias_grad, int first_tile,
    int tiles, int splits) {
  using namespace fastconv::weight_grad;
  constexpr int kOwners = kThreads / kThreadsK;  // threads of a block with different weights
  const int step = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kAccumulators * kOwners;
       i += step) {
    const int owner = i % kOwners, index = i / kOwners % kAccumulators,
              block = i / (kOwners * kAccumulators);
    const int n = owner % kThreadsN, m = owner / kThreadsN;
    const Tile tile(first_tile + block);
    const int channel =
        tile.m * kTileM + index / (C::inputs_per_thread * kBlockTaps) * kThreadsM + m;
    const int read = tile.i * kTileI + index / kBlockTaps % C::inputs_per_thread * kThreadsN + n;
    const int tap_row = tile.tap_row + index / kTaps % C::block_taps;
    const int tap = tile.part * kTaps + index % kTaps;
    if (channel >= C::group_out || read >= kReads || tap_row >= C::kernel_height ||
        tap >= C::kernel_width) {
      continue;
    }
    Acc total = 0;
    for (int split = 0; split < splits; ++split) {
      total += split_sum(workspace, split * tiles + block, index, m, n);
    }
    const int input = D::exists ? read % C::group_in : read;
    const int plane = D::exists ? read / C::group_in : 0;
    grad[(1ll * tile.group * C::group_out + channel) * C::weight_stride_out +
         1ll * input * C::weight_stride_in + 1ll * plane * D::weight_stride +
         1ll * tap_row * C::weight_stride_height + 1ll * tap * C::weight_stride_width] =
        fastconv::narrow<Scalar>(total);
  }
  if constexpr (C::bias) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kTileM; i += step) {
      const int block = i / kTileM, index = i % kTileM / kThreadsM, m = i % kThreadsM;
      const Tile tile(first_tile + block);
      const int channel = tile.m * kTileM + i % kTileM;
      if (!tile.has_bias() || channel >= C::group_out) continue;
      Acc total = 0;
      for (int split = 0; split < splits; ++split) {
        total += split_sum(workspace, split * tiles + block, kAccumulators + index, m, 0);
      }
      bias_grad[tile.group * C::group_out + channel] = fastconv::narrow<Scalar>(total);
    }
  }
}
"""

SOURCES["direct/bias_grad.cuh"] = r"""
// Bias gradient on plain CUDA cores: the sum of the output's gradient over images and pixels.
//
// `splits` blocks share each channel's values. A thread adds up every kThreads-th value of its
// block's share, then the block reduces its threads' results pairwise in shared memory. A second
// kernel adds the blocks' results in a fixed order, without atomics, so that the bits are the same
// every time. It serves weight gradients that do not read the output's gradient as it is, and
// exported files.
#include "device/scalar.cuh"

namespace fastconv {
namespace bias_grad {

using C = Config;
using Scalar = C::Scalar;

constexpr int kThreads = 256;
constexpr long long kPixels = 1ll * C::height * C::width;

__device__ __forceinline__ long long offset(long long image, int channel, long long pixel) {
  if (C::channels_last) return (image * kPixels + pixel) * C::channels + channel;
  return (image * C::channels + channel) * kPixels + pixel;
}

}  // namespace bias_grad
}  // namespace fastconv

__global__ void __launch_bounds__(fastconv::bias_grad::kThreads)
    bias_grad(const Config::Scalar* __restrict__ grad_output, float* __restrict__ partial,
              int splits, int batch) {
  using namespace fastconv::bias_grad;
  const int channel = blockIdx.x % C::channels, split = blockIdx.x / C::channels;
  const long long count = batch * kPixels;
  const long long end = count * (split + 1) / splits;
  float acc = 0;
  for (long long i = count * split / splits + threadIdx.x; i < end; i += kThreads) {
    acc += fastconv::widen(grad_output[offset(i / kPixels, channel, i % kPixels)]);
  }
  float* partial_acc = reinterpret_cast<float*>(fastconv::shared_memory());
  partial_acc[threadIdx.x] = acc;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial_acc[threadIdx.x] += partial_acc[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[channel * splits + split] = partial_acc[0];
}

__global__ void __launch_bounds__(fastconv::bias_grad::kThreads)
    bias_reduce(const float* __restrict__ partial, Config::Scalar* __restrict__ grad, int splits) {
  using namespace fastconv::bias_grad;
  const int channel = blockIdx.x * kThreads + threadIdx.x;
  if (channel >= C::channels) return;
  float acc = 0;
  for (int split = 0; split < splits; ++split) acc += partial[channel * splits + split];
  grad[channel] = fastconv::narrow<Scalar>(acc);
}
"""

SOURCES["hopper/halo/stage.cuh"] = r"""
// Contiguous (NCHW) input: copied to shared memory as it lies in global memory, then transposed
// from there into the halo tile.
//
// Each loading warp copies pieces: one line of as many channels as one or two 16-byte vectors of
// the tile have (`piece_vectors`). The copies run some pieces ahead of the one that the warp
// transposes, rounds or splits. A TMA box brings a piece at once (`box_loads`): the tensor map has
// all pixels of a plane as one dimension, so that a line may continue into the next row, and
// columns that are padding are whatever lies there. Otherwise, a long line takes one bulk copy per
// channel
// (`bulk_loads`), a short one cp.async of 16 bytes per lane. All of them start at the multiple of
// 16 bytes before a line's first pixel, so that rows may begin anywhere. A line has the columns of
// all residues of a column stride, which are taken apart as they are transposed: each column of the
// image is copied once.
#include "device/tensor/load.cuh"

namespace fastconv {
namespace hopper {

// The input as the kernel is given it. TMA boxes are found by coordinates, so the addresses that
// pieces have are not read from; they are counted from the tensor map because null has no offsets.
using Given = Either<C::box_loads, TensorMap, const void*>::type;
__device__ __forceinline__ const Loaded* address_of(const void* given) {
  return static_cast<const Loaded*>(given);
}
__device__ __forceinline__ const Loaded* address_of(const TensorMap& given) {
  return reinterpret_cast<const Loaded*>(&given);
}

constexpr int kLinePieces = C::k_steps * 2 / C::piece_vectors;  // pieces of a line's channels
constexpr int kPieces = kLinePieces * kRowSlots * kStageRows;
static_assert(!C::staged || (!C::in_channels_last && !kSpaceToDepth), "");

// The column of a line that a residue's pixel reads. Residues are counted by their slots.
__device__ __forceinline__ int raw_column(int slot, int pixel) {
  const int residue = kColumnSlots == 1 ? 0 : slot * kColumnStep % kColumnResidues;
  return kColumnUnit * residue + pixel * C::stride_width;
}

// Iterates over the pieces of one warp: every kLoaderWarps-th, from stage to stage.
struct PieceCursor : StageCursor {
  int piece;

  __device__ PieceCursor(const Items& items, int warp) : StageCursor(items), piece(warp) {
    settle();
  }
  __device__ void settle() {
    for (; piece >= kPieces && more(); piece -= kPieces) StageCursor::advance();
  }
  __device__ void advance() {
    piece += kLoaderWarps;
    settle();
  }
};

// A piece, and which part of it lies inside the image.
struct Piece : Front {
  int channel;          // first channel, in its group
  int target;           // offset of its first pixel in its stage, in units of 16 bytes
  int before;           // columns of padding before the first column inside
  int columns;          // columns inside
  int start;            // the line's first column, in pixels of its plane
  const Loaded* first;  // first column inside; in images, of the first channel

  __device__ Piece(const Source& source, int index) : Front(source.front) {
    const int of_line = index % kLinePieces;
    const int line = index / kLinePieces;
    const int slot = kRowSlots == 1 ? 0 : line / kStageRows;
    const int y = source.row +
                  C::dilation_height * (slot + (line - slot * kStageRows) * kRowResidues) -
                  C::padding_top;
    const int x = source.column - C::padding_left;
    channel = source.channel + of_line * kPieceChannels;
    const int lines_before =
        kColumnSlots == 1 ? line : line + slot * (kColumnSlots - 1) * kStageRows;
    target = C::piece_vectors * of_line * kPlanePixels + lines_before * C::pitch;
    before = max(-x, 0);
    bool exists = static_cast<unsigned>(y) < static_cast<unsigned>(C::in_height);
    int end = C::in_width - x;
    start = y * C::in_width + x;
    if constexpr (C::wraps) {
      // The strip continues into the next row, if there is one. Above the image, that row is all
      // that the piece has.
      if (y == -1) before = end;
      if (y + 1 < C::in_height) end += C::in_width;
      exists = exists || y == -1;
    }
    columns = exists ? max(min(kRawReach, end) - before, 0) : 0;
    if constexpr (Depth::exists) {
      first = source.group + (InOffset{y} * kInRow + x + before);
    } else {
      first = source.group + (InOffset{channel} * kInChannel + InOffset{y} * kInRow + x + before);
    }
  }
  __device__ __forceinline__ bool has(int of_piece) const {
    if constexpr (Depth::exists) {
      if (!plane_exists(front, channel + of_piece)) return false;
    }
    return kWholeChunks || channel + of_piece < C::group_in;
  }
  __device__ __forceinline__ bool has_all() const {
    if constexpr (Depth::exists) {
      // Planes that lie between two of the volume's are its own.
      const int last = channel + kPieceChannels - 1;
      if (!plane_exists(front, channel) || !plane_exists(front, last)) return false;
    }
    return kWholeChunks || channel + kPieceChannels <= C::group_in;
  }
  // The offset of one of the piece's channels, from the first column inside.
  template <class Index>
  __device__ __forceinline__ auto offset(Index of_piece) const {
    if constexpr (Depth::exists) {
      return channel_offset(channel + static_cast<int>(of_piece));
    } else {
      return of_piece * kInChannel;
    }
  }
  // Where a channel's line begins among the elements of the piece, with the columns of padding.
  __device__ __forceinline__ int raw_start(int of_piece) const {
    const int at = of_piece * kRawChannel;
    return C::box_loads ? at + box_shift() : at + shift(of_piece) - before;
  }
  // Pixels of a box before the line's first column: those after a multiple of 16 bytes.
  __device__ __forceinline__ int box_shift() const { return start & (kVector - 1); }
  // The misalignment of a channel's first pixel: elements after a multiple of 16 bytes.
  __device__ __forceinline__ int shift(int of_piece) const {
    if constexpr (kRawAligned) return 0;
    const auto low_bits = static_cast<unsigned>(reinterpret_cast<unsigned long long>(first));
    return static_cast<int>(
        (low_bits / kScalarBytes + static_cast<unsigned>(offset(static_cast<unsigned>(of_piece)))) %
        kVector);
  }
};

// Starts the copy of a piece as a TMA box.
__device__ __forceinline__ void fetch_box(const TensorMap& input, const Piece& piece,
                                          const Item& item, Loaded* raw, Barrier* full, int lane) {
  if (lane > 0) return;
  barrier_arrive_expect(full, piece.columns > 0 ? kBoxBytes : 0);
  if (piece.columns == 0) return;
  const InChannel read(piece.channel);
  const int channel = item.group * kInChannels + read.channel;
  const int first = piece.start - piece.box_shift();
  if constexpr (Depth::exists) {
    const int plane = piece.front + read.plane();
    tensor_load(raw, input, {first, plane, channel, item.image / Depth::out}, full);
  } else {
    tensor_load(raw, input, {first, channel, item.image}, full);
  }
}
__device__ __forceinline__ void fetch_box(const void*, const Piece&, const Item&, Loaded*, Barrier*,
                                          int) {}

// Starts the bulk copies of a piece: each of the first kPieceChannels lanes copies its channel.
__device__ __forceinline__ void fetch_lines(const Piece& piece, const Loaded* input_end,
                                            Loaded* raw, Barrier* full, int lane) {
  if (lane >= kPieceChannels) return;
  int bytes = 0;
  if (piece.columns > 0 && piece.has(lane)) {
    const int shift = piece.shift(lane);
    const Loaded* const source = piece.first + piece.offset(lane) - shift;
    const int count = shift + piece.columns;
    Loaded* const target = raw + lane * kRawChannel;
    bytes = round_up(count, kVector) * kScalarBytes;
    if (kInImage % kVector != 0 && source + round_up(count, kVector) > input_end) {
      // The tensor ends within the last 16 bytes.
      bytes -= 16;
      for (int i = bytes / kScalarBytes; i < count; ++i) target[i] = source[i];
    }
    if (bytes > 0) bulk_load(target, source, bytes, full);
  }
  // The mbarrier's phase completes when all these lanes have arrived and all bytes are there.
  barrier_arrive_expect(full, bytes);
}

// Starts the copies of a piece with cp.async, 16 bytes per lane at a time.
__device__ __forceinline__ void fetch_vectors(const Piece& piece, const Loaded* input_end,
                                              Loaded* raw, int lane) {
  constexpr int kOfChannel = kRawChannel / kVector;
  constexpr int kOfPiece = kPieceChannels * kOfChannel;
#pragma unroll 4
  for (int i = lane; i < kOfPiece; i += 32) {
    const int channel = i / kOfChannel;
    const int at = i % kOfChannel * kVector;
    const int count = piece.shift(channel) + piece.columns;
    if (at >= count || piece.columns == 0 || !piece.has(channel)) continue;
    const Loaded* const source = piece.first + (piece.offset(channel) - piece.shift(channel) + at);
    Loaded* const target = raw + channel * kRawChannel + at;
    if (kInImage % kVector != 0 && source + kVector > input_end) {
      // The tensor ends within these 16 bytes.
      for (int j = 0; j < count - at; ++j) target[j] = source[j];
    } else {
      copy_async<16>(target, source, true);
    }
  }
}

// Writes one vector of channels for each of C::batch pixels of a residue, 32 apart, to the input
// stage.
template <bool kInside>
__device__ __forceinline__ void convert_batch(const Piece& piece, int plane, int slot,
                                              const Loaded* const (&channels)[kVectorChannels],
                                              unsigned char* target, int first, const Scale& scale,
                                              Range& range) {
  Channels vectors[C::batch];
#pragma unroll
  for (int k = 0; k < C::batch; ++k) {
    const int pixel = first + 32 * k;
    const int column = raw_column(slot, pixel);
    const bool inside = kInside ? pixel < C::pitch
                                : static_cast<unsigned>(column - piece.before) <
                                      static_cast<unsigned>(piece.columns);
    Loaded elements[kVectorChannels];
#pragma unroll
    for (int j = 0; j < kVectorChannels; ++j) {
      const bool valid = inside && (kInside || piece.has(plane * kVectorChannels + j));
      elements[j] = valid ? channels[j][column] : Loaded{};
    }
    vectors[k] = vector_of<Channels>(elements);
  }
#pragma unroll
  for (int k = 0; k < C::batch; ++k) {
    const int pixel = first + 32 * k;
    if (pixel < C::pitch) {
      store_input(target + pixel * 16, kPartPixels * 16, vectors[k], scale, range);
    }
  }
}

// Transposes a piece that has arrived into its input stage. `scales` belong to its vectors, and
// `of_chunk` is its first channel in the chunk.
__device__ __forceinline__ void convert(const Piece& piece, const Loaded* raw, unsigned char* stage,
                                        int lane, const Scale (&scales)[2],
                                        const ChunkPowers<kPowersCopied>& powers, int of_chunk,
                                        Range& range) {
  const bool whole = piece.columns == kRawReach && piece.has_all();
#pragma unroll
  for (int plane = 0; plane < C::piece_vectors; ++plane) {
    // Operands in two parts leave no registers for the scales of both vectors.
    const Scale scale =
        C::parts == 1 ? scales[plane] : powers.of(of_chunk + plane * kVectorChannels);
    const Loaded* channels[kVectorChannels];  // the line's first column, which may be padding
#pragma unroll
    for (int j = 0; j < kVectorChannels; ++j) {
      const int i = plane * kVectorChannels + j;
      channels[j] = raw + piece.raw_start(i);
    }
    unsigned char* target = stage + (piece.target + plane * kPlanePixels) * 16;
#pragma unroll 1
    for (int slot = 0; slot < kColumnSlots; ++slot, target += kSlotPixels * 16) {
      if (whole) {
#pragma unroll
        for (int first = 0; first < C::pitch; first += 32 * C::batch) {
          convert_batch<true>(piece, plane, slot, channels, target, first + lane, scale, range);
        }
      } else {
#pragma unroll
        for (int first = 0; first < C::pitch; first += 32 * C::batch) {
          convert_batch<false>(piece, plane, slot, channels, target, first + lane, scale, range);
        }
      }
    }
  }
}

// Checks the range of every number that pixels read in those channels of a piece whose power is
// marked negative, because the sample did not prove them large enough (see scale.cuh).
__device__ __forceinline__ void inspect(const Piece& piece, const Loaded* raw, int lane,
                                        const ChunkPowers<kPowersCopied>& powers, int of_chunk,
                                        Range& range) {
#pragma unroll 1
  for (int i = 0; i < kPieceChannels; ++i) {
    const float power = powers.powers[of_chunk + i];
    if (power >= 0.0f || !piece.has(i)) continue;
    const Loaded* const channel = raw + piece.raw_start(i) + piece.before;
    if constexpr (C::stride_width == 1) {
      for (int column = lane; column < piece.columns; column += 32) {
        const float number = widen(channel[column]);
        range.see(number, number * power);
      }
    } else {
      for (int at = lane; at < kColumnSlots * C::pitch; at += 32) {
        const int column = raw_column(at / C::pitch, at % C::pitch) - piece.before;
        if (static_cast<unsigned>(column) >= static_cast<unsigned>(piece.columns)) continue;
        const float number = widen(channel[column]);
        range.see(number, number * power);
      }
    }
  }
}

// The loading warps: fill all input stages.
__device__ __forceinline__ void stage_input(const Given& given, const Loaded* input,
                                            const Loaded* input_end, const Items& items) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The shuffle tells the compiler that the warp's number is uniform.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - 1;
  Barrier* const full = barriers().raw_full + warp * C::raw_slots;
  Loaded* const raw =
      reinterpret_cast<Loaded*>(shared_memory() + kRawRing + warp * C::raw_slots * kRawBytes);
  PieceCursor next(items, warp);
  const auto fetch_next = [&](int slot) {
    if (next.more()) {
      const Piece piece(Source(input, next), next.piece);
      if constexpr (C::box_loads) {
        fetch_box(given, piece, next.item, raw + slot * kRawElements, full + slot, lane);
      } else if constexpr (C::bulk_loads) {
        fetch_lines(piece, input_end, raw + slot * kRawElements, full + slot, lane);
      } else {
        fetch_vectors(piece, input_end, raw + slot * kRawElements, lane);
      }
      next.advance();
    }
    if constexpr (!C::bulk_loads) copy_async_commit();  // may be empty: waits count groups
  };
  for (int slot = 0; slot < C::raw_slots; ++slot) fetch_next(slot);
  Ring<C::input_stages> at(1);
  Ring<C::raw_slots> arrived(0);
  ChunkPowers<kPowersCopied> powers(Input::powers(warp));
  int piece = warp;
  for (StageCursor stage(items); stage.more(); stage.advance()) {
    const Source source(input, stage);
    Range range;
    powers.load(items, stage.item.image, source.column_of(stage.item.group));
    Input::wait(at);
    for (; piece < kPieces; piece += kLoaderWarps) {
      const int of_chunk = piece % kLinePieces * kPieceChannels;
      const Scale scales[2] = {powers.of(of_chunk),
                               powers.of(of_chunk + (C::piece_vectors - 1) * kVectorChannels)};
      if constexpr (C::bulk_loads) {
        barrier_wait(full + arrived.stage, arrived.parity);
      } else {
        copy_async_wait<C::raw_slots - 1>();
        __syncwarp();
      }
      const Loaded* const arrived_raw = raw + arrived.stage * kRawElements;
      convert(Piece(source, piece), arrived_raw, Input::stage(at.stage), lane, scales, powers,
              of_chunk, range);
      if (powers.strict) inspect(Piece(source, piece), arrived_raw, lane, powers, of_chunk, range);
      __syncwarp();
      fetch_next(arrived.stage);
      arrived.advance();
    }
    piece -= kPieces;
    judge<Input>(items, range, stage.item.image, at.stage);
    Input::show(at.stage);
    at.advance();
  }
}

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["hopper/halo/store_residues.cuh"] = r"""
// Epilogue of a strided input gradient whose residues are output channels (`d2s_*`): a
// consumer's accumulators go through shared memory to global memory, in lines.
//
// A line is a row of the image: of one channel, or of all channels if these are neighbours. Each
// position has `interleave` elements of a line, and the positions of a row lie side by side. So the
// 64 rows of M are several lines, each of which is staged as it lies in memory and stored at once.
#include "hopper/halo/store.cuh"

namespace fastconv {
namespace hopper {

constexpr int kStagedLines = C::stack * kStackLines;  // for each row of positions of the tile
constexpr int kLineElements = C::image_width * kOutColumn;
constexpr int kLineBegin = -C::column_begin * kOutColumn;  // in stored columns: see Line
static_assert(!kDepthToSpace || (kLineBegin >= 0 && C::lead == 0 && !C::scaled_fp16 && !C::wraps),
              "");
static_assert(!kDepthToSpace || !C::out_channels_last || C::groups == 1,
              "all channels are neighbours");
static_assert(!kDepthToSpace || !C::bulk_stores || C::tile_rows == 1 ||
                  (kLineElements % kVector == 0 && kStoredPitch % kVector == 0),
              "several rows are aligned alike");

// The index-th line of the image that the tile's line-th row of positions writes. The first
// position may begin before the line: those elements would be gradients of the padding, and are not
// stored.
struct Line {
  Scalar* start;  // stored column 0
  bool exists;

  __device__ __forceinline__ Line(const Target& target, int index, int line) {
    const int output = target.outputs + index % kStackLines * C::interleave;
    const DepthToSpaceChannel first(output);
    const int row = target.row + kRowStep * (line + index / kStackLines);
    const int y = C::out_step_height * row + C::row_begin + first.row;
    exists = output < C::group_out && row < C::out_height && y >= 0 && y < C::image_height;
    start = target.channel_row(first.channel, y) - kLineBegin;
  }
};

// Whether some tap reaches a residue of an axis.
__device__ __forceinline__ bool is_reached(int residue, int last_tap, int taps, int step,
                                           int kernel, int dilation) {
  bool reached = false;
  for (int tap = 0; tap < taps; ++tap) {
    reached = reached || is_tap(last_tap - step * tap + residue, kernel, dilation);
  }
  return reached;
}

// Whether taps reach all residues of an axis: `kernel` of them, `dilation` apart.
__host__ __device__ constexpr bool all_reached(int residues, int kernel, int dilation) {
  return kernel >= residues && gcd(residues, dilation) == 1;
}

// One of a thread's two rows of M.
struct ResidueRow {
  static constexpr bool kAllReached =
      all_reached(C::d2s_height, C::weight_height, C::tap_dilation_height) &&
      all_reached(C::d2s_width, C::weight_width, C::tap_dilation_width);
  int index;    // index of its line
  int element;  // index among a position's elements
  bool exists;
  bool reached;

  __device__ __forceinline__ ResidueRow(const Target& target, int mma_row) {
    const int row = row_of_column(mma_row);
    const int of_stack = row % kStackRows;
    index = row / kStackRows * kStackLines + of_stack / C::interleave;
    element = of_stack % C::interleave;
    exists = of_stack < kStackLines * C::interleave;
    if constexpr (!kAllReached) {
      const DepthToSpaceChannel to(target.outputs + of_stack);
      reached = is_reached(to.row, C::last_tap_row, C::kernel_height, C::tap_step_height,
                           C::weight_height, C::tap_dilation_height) &&
                is_reached(to.column, C::last_tap_column, C::kernel_width, C::tap_step_width,
                           C::weight_width, C::tap_dilation_width);
    }
  }
  // An accumulator's output. Without a tap the weights are zero, but zero times infinity is NaN.
  __device__ __forceinline__ float finished(const Finish& finish, float accumulated) const {
    return finish(kAllReached || reached ? accumulated : 0.0f);
  }
  // Where the first position is staged. With bulk stores, a staged line has the misalignment to 16
  // bytes that it will have in global memory.
  __device__ __forceinline__ Scalar* staged(Scalar* staging, const Target& target) const {
    const int shift = C::bulk_stores ? misalignment(Line(target, index, 0).start, kVector) : 0;
    return staging + index * kLinePitch + shift + element;
  }
};

// Whether a thread's two rows are neighbours in a line and make an aligned word of shared memory.
constexpr bool kStagedPairs =
    C::interleave % 2 == 0 && (!C::bulk_stores || (kLineElements % 2 == 0 && kLineBegin % 2 == 0));

__device__ __forceinline__ void stage_residues(const float (&acc)[kAccumulators],
                                               const Finish (&finish)[2],
                                               const ResidueRow (&rows)[2],
                                               Scalar* const (&staged)[2], int store_pass,
                                               int lane) {
#pragma unroll
  for (int i = 0; i < C::pass_pixels / 8; ++i) {
    const int j = store_pass * (C::pass_pixels / 8) + i;
    if (8 * j >= C::pixels) break;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int at = C::interleave * (8 * i + lane % 4 * 2 + k);
      const float first = rows[0].finished(finish[0], acc[4 * j + k]);
      const float second = rows[1].finished(finish[1], acc[4 * j + 2 + k]);
      if constexpr (kStagedPairs) {
        if (rows[0].exists) {
          *reinterpret_cast<Pair*>(staged[0] + at) = narrow_pair(Scalar{}, first, second);
        }
      } else {
        if (rows[0].exists) staged[0][at] = narrow<Scalar>(first);
        if (rows[1].exists) staged[1][at] = narrow<Scalar>(second);
      }
    }
  }
}

// Stores one pass's part of a line, for the tile's line-th row of positions: with a bulk copy of
// one lane, or with all lanes of a warp.
__device__ __forceinline__ void store_line(const Scalar* staging, const Target& target, int index,
                                           int line, int store_pass, int lane) {
  const Line to(target, index, line);
  if (!to.exists) return;
  const int at =
      target.column + store_pass * kStoredPass - line * kStoredPitch;  // first of this pass
  const int begin = max(max(target.column, kLineBegin), at);
  const int end =
      min(min(target.column + kStoredColumns, kLineBegin + kLineElements), at + kStoredPass);
  const Scalar* const staged = staging + index * kLinePitch - at;
  if constexpr (C::bulk_stores) {
    store_columns(to.start, staged + misalignment(to.start, kVector), begin, end);
  } else {
    for (int x = begin + lane; x < end; x += 32) to.start[x] = staged[x];
  }
}

__device__ __forceinline__ void store_residues(const float (&acc)[kAccumulators],
                                               const Finish (&finish)[2], Scalar* staging,
                                               const Target& target, int warpgroup, int warp,
                                               int lane) {
  constexpr int kLinesOfTile = C::tile_rows * kStagedLines;
  const int first = 16 * warp + lane / 4;
  const ResidueRow rows[2] = {ResidueRow(target, first), ResidueRow(target, first + 8)};
  Scalar* const staged[2] = {rows[0].staged(staging, target), rows[1].staged(staging, target)};
#pragma unroll
  for (int store_pass = 0; store_pass < kPasses; ++store_pass) {
    if constexpr (C::bulk_stores) bulk_store_wait_read<0>();
    storing_sync(warpgroup);
    stage_residues(acc, finish, rows, staged, store_pass, lane);
    if constexpr (C::bulk_stores) fence_async_shared();
    storing_sync(warpgroup);
    const int line = C::bulk_stores ? 4 * lane + warp : warp;
    const int step = C::bulk_stores ? 128 : 4;
#pragma unroll 1
    for (int i = line; i < kLinesOfTile; i += step) {
      store_line(staging, target, i % kStagedLines, i / kStagedLines, store_pass, lane);
    }
    if constexpr (C::bulk_stores) bulk_store_commit();
  }
}

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["device/tensor/copy.cuh"] = r"""
// Copies contiguous float32 input to channels-last float16, multiplied by the powers of two of
// scaled fp16, and marks the images some of whose numbers do not fit (scale.cuh).
//
// A block copies a tile of an image, or of a volume with its planes one after the other:
// `copy_pixels` pixels of `copy_vectors` vectors of 8 channels. Each lane loads the channels of a
// vector at one pixel, and its neighbours those of the next pixels. The tile is stored from shared
// memory, where an odd number of vectors lies between two pixels, so that lanes write to different
// banks: neighbouring threads store neighbouring vectors of a pixel.
//
// The copy of a slab has `in_height` of the `source_height` rows of each plane, from the slab's row
// on, and zeros for those that lie outside: padding.
#include "device/tensor/input.cuh"

namespace fastconv {
namespace tensor {

template <class Config>
struct CopyTile {
  static constexpr int kThreads = 256;
  static constexpr int kVectors = Config::copy_vectors, kPixels = Config::copy_pixels;
  static constexpr int kPitch = kVectors | 1;  // 16-byte vectors from a pixel to the next
  static constexpr int kChannels = Config::groups * kInChannels;
  static constexpr int kAcross = kChannels / 8 / kVectors;  // tiles that divide the channels
  static constexpr int kImagePixels = Depth::in * Config::in_height * Config::in_width;
  static constexpr int kAlong = ceil_div(kImagePixels, kPixels);
  using Slabs = SlabsOf<Config>;
  static constexpr int kCopiedPlane = Config::in_height * Config::in_width;
  static constexpr int kPlane = Slabs::source_height * Config::in_width;
  static constexpr int kSourcePixels = Depth::in * kPlane;
  // Vectors at 32 pixels, which a warp loads at once, and how many of them it loads ahead.
  static constexpr int kItems = kVectors * (kPixels / 32), kOfWarp = kItems / (kThreads / 32);
  static constexpr int kAhead = kOfWarp % 3 == 0 ? 3 : kOfWarp % 2 == 0 ? 2 : 1;
  static_assert(kChannels % (8 * kVectors) == 0 && kPixels % 32 == 0, "whole vectors");
  static_assert(kItems % (kThreads / 32) == 0, "warps have equal shares");
  static_assert(!kLoadsCopy || kGroupColumns == kInChannels,
                "a channel's number is that of its power");

  const Items& items;
  int image, first_vector, first_pixel;  // the image counts from the slab's first

  __device__ explicit CopyTile(const Items& items, int block) : items(items) {
    image = block / (kAcross * kAlong);
    first_vector = block % kAcross * kVectors;
    first_pixel = block / kAcross % kAlong * kPixels;
  }

  __device__ __forceinline__ int in_batch() const { return items.first_volume + image; }

  // The item-th of a warp's items: its vector, and the lane's pixel in the tile.
  __device__ static int vector(int item) { return item % kVectors; }
  __device__ static int pixel(int item) {
    return item / kVectors * 32 + static_cast<int>(threadIdx.x) % 32;
  }
  __device__ __forceinline__ Numbers load(const float* input, int item) const {
    const int channel = 8 * (first_vector + vector(item)), at = first_pixel + pixel(item);
    const float* source = input + (1LL * in_batch() * kChannels + channel) * kSourcePixels;
    bool inside = at < kImagePixels;
    if constexpr (Slabs::exists) {
      const int in_plane = at % kCopiedPlane + items.row * Config::in_width;
      inside = inside && static_cast<unsigned>(in_plane) < static_cast<unsigned>(kPlane);
      source += at / kCopiedPlane * kPlane + in_plane;
    } else {
      source += at;
    }
    Numbers numbers;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      numbers.number[i] = load_or_zero(source + 1LL * i * kSourcePixels, inside);
    }
    return numbers;
  }
  // Scales and rounds a vector, and writes it to shared memory.
  __device__ __forceinline__ void stage(const Numbers& numbers, int item, HalfRange& range) const {
    const Powers powers(items.tables.powers(in_batch()) + 8 * (first_vector + vector(item)));
    if (powers.strict()) range.see_strictly(numbers, powers);
    unsigned char* const target = shared_memory() + 16 * (pixel(item) * kPitch + vector(item));
    store_input(target, 0, numbers, powers, range);
  }
  __device__ __forceinline__ void store(uint4* copy) const {
    const auto* const staged = reinterpret_cast<const uint4*>(shared_memory());
    uint4* const target =
        copy + (1LL * image * kImagePixels + first_pixel) * (kChannels / 8) + first_vector;
    const int count = min(kPixels, kImagePixels - first_pixel) * kVectors;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int at = i / kVectors, vector = i % kVectors;
      target[static_cast<long long>(at) * (kChannels / 8) + vector] = staged[at * kPitch + vector];
    }
  }
};

template <class Config>
__device__ __forceinline__ void copy_halves(const Scalar* input, void* copy, unsigned char* scratch,
                                            int batch, const Slab& slab) {
  using Tile = CopyTile<Config>;
  const Items items(scratch, batch, slab);
  const Tile tile(items, blockIdx.x);
  if (!items.has_scales(tile.in_batch())) return;  // other blocks may be marking images
  const int warp = static_cast<int>(threadIdx.x) / 32;
  HalfRange range;
#pragma unroll 1
  for (int i = 0; i < Tile::kOfWarp; i += Tile::kAhead) {
    Numbers numbers[Tile::kAhead];
#pragma unroll
    for (int k = 0; k < Tile::kAhead; ++k) numbers[k] = tile.load(input, warp + 8 * (i + k));
#pragma unroll
    for (int k = 0; k < Tile::kAhead; ++k) tile.stage(numbers[k], warp + 8 * (i + k), range);
  }
  items.judge(range, tile.in_batch());
  __syncthreads();
  tile.store(static_cast<uint4*>(copy));
}

}  // namespace tensor
}  // namespace fastconv

__global__ void __launch_bounds__(256)
    copy(const Config::Scalar* input, void* input_copy, unsigned char* scratch,
         int batch FASTCONV_SLAB_PARAMETERS) {
  using namespace fastconv::tensor;
  if constexpr (kLoadsCopy) copy_halves<C>(input, input_copy, scratch, batch, FASTCONV_SLAB);
}
"""

SOURCES["device/tensor/weights.cuh"] = r"""
// Packs the weights into the layout of the tensor cores. For scaled fp16, the `scale` kernel first
// finds the powers of the input channels; the `pack` kernel finds the scales of output channels and
// images.
#include "device/tensor/input.cuh"

namespace fastconv {
namespace tensor {

constexpr int kSteps = kChunks * kTaps * C::k_steps;
constexpr int kPackedVectors =
    C::groups * kOutputGroups * kSteps * C::channel_groups * 2 * kOutputs;
constexpr int kResidues = C::s2d_height * C::s2d_width;
// A sample of an image consists of pieces of 32 numbers: at least kImageSamples pieces of an
// image, and one for every kProvenPixels pixels of a channel.
constexpr int kImageSamples = 256;
constexpr int kProvenPixels = 1 << 15;

// The weight of one of the layer's taps, for an output and an input channel of the group. It is
// zero for taps that the layer has only because it computes several positions of a step.
// `stacked_column` selects one of the two columns that share the rows of M (`stacked_columns`);
// with depth-to-space, an output channel is also a residue.
__device__ __forceinline__ Scalar tap_at(const Scalar* weight, int group, int out, int in, int row,
                                         int column, int stacked_column) {
  const InChannel from(in);
  long long k = group * C::group_out + out;
  long long c = from.channel;
  long long plane = from.tap;
  if constexpr (C::transposed) {
    const DepthToSpaceChannel to(out);
    k = group * kInChannels + from.channel;
    c = to.channel;
    plane = DepthPlacing::last_tap - DepthPlacing::tap_step * plane;
    row = C::last_tap_row - C::tap_step_height * row + to.row;
    column = C::last_tap_column - C::tap_step_width * column + stacked_column + to.column;
    if (kDepthToSpace && !is_tap(row, C::weight_height, C::tap_dilation_height)) return Scalar{};
    if ((kDepthToSpace || C::stacked_columns > 1) &&
        !is_tap(column, C::weight_width, C::tap_dilation_width)) {
      return Scalar{};
    }
    row /= C::tap_dilation_height;
    column /= C::tap_dilation_width;
  }
  return weight[k * C::weight_stride_out + c * C::weight_stride_in + plane * Depth::weight_stride +
                static_cast<long long>(row) * C::weight_stride_height +
                static_cast<long long>(column) * C::weight_stride_width];
}

// The weight of a tap of the layer after space-to-depth, which adds taps with zero weights.
__device__ __forceinline__ Scalar weight_at(const Scalar* weight, int group, int out, int in,
                                            int row, int column, int stacked_column) {
  const SpaceToDepthChannel in_memory(in);
  row = row * C::s2d_height + in_memory.row;
  column = column * C::s2d_width + in_memory.column;
  if (!C::transposed && (row >= C::weight_height || column >= C::weight_width)) return Scalar{};
  return tap_at(weight, group, out, in_memory.channel, row, column, stacked_column);
}

// A vector of packed weights. A chunk's taps are contiguous:
//   [group][output group][chunk][tap][k step][part][channel group][2][64][16 bytes]
struct PackedVector {
  int part;  // group and output group
  int channel_group;
  int m;     // MMA row
  int step;  // chunk, tap and k step
  int plane;

  // Loads the vector; `number_of` maps a weight and its input channel to the number that is packed.
  template <class NumberOf>
  __device__ __forceinline__ WeightChannels load(const Scalar* weight, NumberOf number_of) const {
    const int k_step = step % C::k_steps;
    const int tap = step / C::k_steps % kTaps;
    const int chunk = step / (C::k_steps * kTaps);
    const int stacked = row_of_column(m) / kStackRows;
    const int of_stack = row_of_column(m) % kStackRows;
    const int out =
        (part % kOutputGroups * C::channel_groups + channel_group) * kStackChannels + of_stack;
    const int stacked_column = m / 8 % C::stacked_columns;
    const int row = tap / C::kernel_width - stacked;
    const int column = tap % C::kernel_width;
    const int first = (chunk * kChunkPlanes + 2 * k_step + plane) * kVectorChannels;
    const bool exists =
        of_stack < kStackChannels && out < C::group_out && row >= 0 && row < C::kernel_height;
    const int group = part / kOutputGroups;
    Scalar elements[kVectorChannels];
    for (int j = 0; j < kVectorChannels; ++j) {
      const bool valid = exists && first + j < C::group_in;
      elements[j] =
          valid ? number_of(weight_at(weight, group, out, first + j, row, column, stacked_column),
                            first + j)
                : Scalar{};
    }
    return vector_of<WeightChannels>(elements);
  }
  __device__ __forceinline__ unsigned char* target(unsigned char* packed) const {
    const long long operand =
        (static_cast<long long>(part) * kSteps + step) * (kWeightParts * C::channel_groups) +
        channel_group;
    return packed + operand * kAOperandBytes + (plane * kOutputs + m) * 16;
  }
};
constexpr int kPartBytes = C::channel_groups * kAOperandBytes;  // bytes from a part to the next

__device__ __forceinline__ void pack_all(const Scalar* weight, unsigned char* packed) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kPackedVectors; i += step) {
    int rest = i;
    PackedVector vector;
    vector.m = rest % kOutputs;
    rest /= kOutputs;
    vector.plane = rest % 2;
    rest /= 2;
    vector.channel_group = rest % C::channel_groups;
    rest /= C::channel_groups;
    vector.step = rest % kSteps;
    vector.part = rest / kSteps;
    const auto as_it_is = [](Scalar element, int) { return element; };
    NoRange any;
    store_parts<true>(vector.target(packed), kPartBytes, vector.load(weight, as_it_is), any);
  }
}

// The weight of the layer's `tap`-th tap; channels are the group's.
static_assert(!C::scaled_fp16 || (C::stacked_columns == 1 && !kDepthToSpace),
              "one sum for each tap");
constexpr int kUsedTaps = C::weight_height * C::weight_width;
constexpr int kScaledTaps = kInGroup / kScaledChannels * kUsedTaps;  // that share a power
__device__ __forceinline__ float used_weight(const Scalar* weight, int group, int out, int channel,
                                             int tap) {
  return widen(
      tap_at(weight, group, out, channel, tap / C::weight_width, tap % C::weight_width, 0));
}

// Block-wide: the power that an input channel's numbers are multiplied by and its weights divided
// by, at the mean exponent of these weights. If the channel's weights are 2^n times as large, so is
// the power; if an output channel's weights are, the powers of all input channels grow alike.
__device__ __forceinline__ float column_power(const Scalar* weight, int group, int channel) {
  int exponents = 0;
  int count = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < C::group_out * kScaledTaps; i += blockDim.x) {
    const int of_depth = HalfCopy::exists ? i % kScaledTaps / kUsedTaps : 0;
    const float number = used_weight(weight, group, i / kScaledTaps,
                                     channel + of_depth * kScaledChannels, i % kUsedTaps);
    exponents += static_cast<int>(__float_as_uint(number) >> 23 & 255u);
    count += number != 0.0f;
  }
  exponents = block_combined(exponents, sum_of<int>);
  return mean_power(exponents, block_combined(count, sum_of<int>));
}

// Grid-wide: the powers of all input channels.
__device__ __forceinline__ void find_columns(const Scalar* weight, float* columns) {
#pragma unroll 1
  for (int i = blockIdx.x; i < C::groups * kScaledChannels; i += gridDim.x) {
    const int group = i / kScaledChannels;
    const int channel = i % kScaledChannels;
    const float power = column_power(weight, group, channel);
    const int residue = static_cast<int>(threadIdx.x);
    if (residue < kResidues) columns[group * kGroupColumns + channel * kResidues + residue] = power;
  }
}

// Scales an output channel's weights; `in` counts input channels after space-to-depth.
struct WeightScale {
  const float* columns;  // the powers of the channels of its group
  float scale;

  __device__ __forceinline__ float operator()(float number, int in) const {
    return number * inverse(columns[scaled_channel(in)]) * scale;
  }
  template <class Half>
  __device__ __forceinline__ Half operator()(Half element, int) const {
    return element;  // never called: only float32 is scaled
  }
};

// Block-wide: whether what float16 loses of an output channel's filters is negligible beside them.
__device__ __forceinline__ bool filters_fit(const Scalar* weight, int group, int out,
                                            const WeightScale& scale) {
  bool fit = true;
  for (int channel = threadIdx.x; channel < kInGroup; channel += blockDim.x) {
    HalfRange range;
    float squares = 0.0f;
#pragma unroll 16
    for (int tap = 0; tap < kUsedTaps; ++tap) {
      const float number = used_weight(weight, group, out, channel, tap);
      const float scaled = scale(number, channel * kResidues);
      range.see(number, scaled);
      squares += scaled * scaled;
    }
    fit = fit && (range.fits(kLeastWeight) || squares >= kUsedTaps * (kWeightSize * kWeightSize));
  }
  return block_largest(fit ? 0.0f : 1.0f) == 0.0f;
}

// Block-wide: scales and packs one output channel's weights. Returns what scales its accumulators
// back.
__device__ __forceinline__ float pack_channel(const Scalar* weight, const float* columns,
                                              unsigned char* packed, int channel) {
  PackedVector vector;
  const int stack_channel = channel % kStackChannels;
  vector.channel_group = channel / kStackChannels % C::channel_groups;
  vector.part = channel / (kStackChannels * C::channel_groups);
  const int group = vector.part / kOutputGroups;
  const int out = channel % (kOutputGroups * C::channel_groups * kStackChannels);
  const bool exists = out < C::group_out;
  WeightScale scale{columns + group * kGroupColumns, 1.0f};
  float largest = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < (exists ? kInGroup * kUsedTaps : 0); i += blockDim.x) {
    const int channel = i / kUsedTaps;
    const float number = used_weight(weight, group, out, channel, i % kUsedTaps);
    largest = larger(largest, fabsf(scale(number, channel * kResidues)));
  }
  scale.scale = scale_to(block_largest(largest), kWeightExponent);
  if (scale.scale == 0.0f || (exists && !filters_fit(weight, group, out, scale))) return 0.0f;
  WeightRange range;
  for (int i = threadIdx.x; i < kSteps * 2 * C::stack; i += blockDim.x) {
    vector.m = i % C::stack * kStackChannels + stack_channel;
    vector.plane = i / C::stack % 2;
    vector.step = i / (C::stack * 2);
    const WeightChannels scaled = vector.load(weight, scale);
    range.see(scaled);
    store_parts<true>(vector.target(packed), kPartBytes, scaled, range);
  }
  return block_largest(range.fits(kLeastWeight) ? 0.0f : 1.0f) == 0.0f ? inverse(scale.scale)
                                                                       : 0.0f;
}

// The sample of an image, or of a volume that is copied as a whole: pieces of 32 numbers, spread
// evenly over each channel.
struct Samples {
  static constexpr int kChannels = C::groups * kScaledChannels;
  static constexpr int kPixels = (HalfCopy::exists ? Depth::in : 1) * C::in_height * C::in_width;
  static constexpr int kOfImage = ceil_div(kImageSamples, kChannels);
  static constexpr int kOfPixels = kPixels / kProvenPixels;
  static constexpr int kWanted = kOfImage > kOfPixels ? kOfImage : kOfPixels;
  static constexpr int kAll = ceil_div(kPixels, 32);
  static constexpr int kPieces = kWanted < kAll ? kWanted : kAll;
  // Where the last piece begins.
  static constexpr long long kLast = kPixels > 32 ? kPixels - 32 : 0;
  const Scalar* first;
  int front;  // the first plane that the image reads, in volumes that are not copied
  const float* columns;
  int lane;

  __device__ __forceinline__ Samples(const Scalar* input, int image, const float* columns)
      : columns(columns), lane(static_cast<int>(threadIdx.x) % 32) {
    if constexpr (HalfCopy::exists) {
      first = input + static_cast<long long>(image) * kInImage;
      front = 0;
    } else {
      const InImage<Scalar> read(input, image);
      first = read.first;
      front = read.front;
    }
  }

  // The table column of a channel; `channel` counts those of all groups.
  __device__ static __forceinline__ int column(int channel) {
    return channel / kScaledChannels * kGroupColumns + channel % kScaledChannels * kResidues;
  }
  // Where a channel begins; `channel` counts those of all groups.
  __device__ static __forceinline__ long long offset(int channel) {
    if constexpr (Depth::exists && !HalfCopy::exists) {
      return channel / kInGroup * (static_cast<long long>(kInChannels) * kInChannel) +
             channel_offset(channel % kInGroup);
    } else {
      return static_cast<long long>(channel) * kPixels;
    }
  }
  // A lane's number of a piece, times its channel's power; 0 if there is none.
  __device__ __forceinline__ float number(int channel, int piece) const {
    const long long begin = kLast * piece / (kPieces > 1 ? kPieces - 1 : 1);
    const Scalar* const source = first + offset(channel) + begin + lane;
    const bool exists = lane < kPixels && channel < kChannels &&
                        (HalfCopy::exists || plane_exists(front, channel % kInGroup));
    return fabsf(widen(load_element(source, exists))) *
           columns[column(min(channel, kChannels - 1))];
  }
};

// Block-wide: finds the scale of an image, and what its channels' numbers are multiplied by.
__device__ __forceinline__ float sample_image(const Samples& samples, float* powers) {
  static_assert(!C::scaled_fp16 || !C::in_channels_last, "a channel's pixels are neighbours");
  constexpr int kPieces = Samples::kPieces;
  constexpr int kTogether = kPieces < 8 ? 8 / kPieces : 1;  // channels that a warp samples at once
  const int warps = static_cast<int>(blockDim.x) / 32;
  float largest = 0.0f;
  for (int first = threadIdx.x / 32 * kTogether; first < Samples::kChannels;
       first += warps * kTogether) {
    float squares[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll 8
      for (int piece = 0; piece < kPieces; ++piece) {
        const float number = samples.number(first + i, piece);
        largest = larger(largest, number);
        squares[i] += number * number;
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float of_channel = warp_combined(squares[i], sum_of<float>);
      if (samples.lane == 0 && first + i < Samples::kChannels) {
        powers[Samples::column(first + i)] = of_channel;
      }
    }
  }
  const float scale = scale_to(block_largest(largest), kSampleExponent);
  // block_largest has synchronised: all warps' sums of squares are written. They overflow only
  // where no scale is suitable.
  for (int channel = threadIdx.x; channel < Samples::kChannels; channel += blockDim.x) {
    const int column = Samples::column(channel);
    const float power = samples.columns[column] * scale;
    const float least = Samples::kPixels * (kInputSize * kInputSize);
    const bool proven = powers[column] * scale * scale >= least;
    for (int residue = 0; residue < kResidues; ++residue)
      powers[column + residue] = proven ? power : -power;
  }
  for (int i = threadIdx.x; i < C::table_columns; i += blockDim.x) {
    if (i % kGroupColumns >= C::group_in) powers[i] = 0.0f;  // channels that do not exist
  }
  return scale;
}

__device__ __forceinline__ void pack(const Scalar* weight, const Scalar* input,
                                     unsigned char* scratch, int batch) {
  unsigned char* const packed = scratch + C::packed_at;
  if constexpr (C::scaled_fp16) {
    static_assert(!C::scaled_fp16 || C::table_channels == C::groups * kOutputGroups *
                                                              C::channel_groups * kStackChannels,
                  "a factor for each MMA row");
    const Tables tables{scratch, batch / HalfCopy::planes};
#pragma unroll 1
    for (int i = blockIdx.x; i < C::table_channels + tables.batch; i += gridDim.x) {
      const int image = i - C::table_channels;
      if (image < 0) {
        const float factor = pack_channel(weight, tables.columns(), packed, i);
        if (threadIdx.x == 0) tables.channels()[i] = factor;
      } else {
        const Samples samples(input, image, tables.columns());
        const float scale = sample_image(samples, tables.powers(image));
        if (threadIdx.x == 0) {
          tables.images()[image] = scale;
          tables.marks()[image] = 0;
        }
      }
    }
  } else {
    if (!Items(scratch, batch).none()) pack_all(weight, packed);
  }
}

}  // namespace tensor
}  // namespace fastconv

__global__ void __launch_bounds__(1024)
    scale(const Config::Scalar* weight, unsigned char* scratch, int batch) {
  using namespace fastconv::tensor;
  const Tables tables{scratch, batch / HalfCopy::planes};
  if constexpr (C::scaled_fp16) find_columns(weight, tables.columns());
}

__global__ void __launch_bounds__(256)
    pack(const Config::Scalar* weight, const Config::Scalar* input, unsigned char* scratch,
         int batch) {
  fastconv::tensor::pack(weight, input, scratch, batch);
}
"""

SOURCES["device/tensor/load.cuh"] = r"""
// Producer warps that load the input, chunk by chunk: to registers and from there to shared memory,
// transposed and rounded or split; or by cp.async, as it is.
//
// A kernel's `Input` describes its ring of stages: producers wait until a stage is empty, and
// signal when it is full. Warp 0 has another role; the loaders are the warps after it.
#include "device/tensor/input.cuh"

namespace fastconv {
namespace tensor {

constexpr int kLoaders = C::loaders;  // threads that load input

// Whether cp.async copies the input as it is, neither transposed nor rounded.
constexpr bool kInputCopied = C::vector_loads && sizeof(Loaded) == 2;

// The powers that a chunk's channels are multiplied by (scaled fp16). A warp may keep a copy of
// them in shared memory.
template <bool kCopied>
struct ChunkPowers {
  const float* powers;
  unsigned at = ~0u;    // where they begin in the tables, modulo 2^32
  bool strict = false;  // whether some power is negative: every number of that channel must fit

  __device__ explicit ChunkPowers(float* copy) : powers(copy) {}

  __device__ __forceinline__ void load(const Items& items, int image, int column) {
    const unsigned begin = static_cast<unsigned>(image) * C::table_columns + column;
    if (!kScalesInput || at == begin) return;
    at = begin;
    const float* const source = items.tables.powers(image) + column;
    if constexpr (!kCopied) powers = source;
    strict = false;
    __syncwarp();  // the previous powers have been read
#pragma unroll
    for (int first = 0; first < kChunkChannels; first += 32) {
      const int i = first + static_cast<int>(threadIdx.x) % 32;
      const float power = i < kChunkChannels ? source[i] : 0.0f;
      if (kCopied && i < kChunkChannels) const_cast<float*>(powers)[i] = power;
      strict = strict || power < 0.0f;
    }
    strict = __any_sync(~0u, strict);
    __syncwarp();  // the powers have been written
  }
  // The powers of the vector that begins with a channel of the chunk.
  __device__ __forceinline__ Scale of(int channel) const { return Scale(powers + channel); }
};

// Evaluates what a warp has seen since the last call: marks the image if its numbers do not all fit
// float16, or the stage if they are not all finite.
template <class Input>
__device__ __forceinline__ void judge(const Items& items, HalfRange& range, int image, int) {
  items.judge(range, image);
}
template <class Input>
__device__ __forceinline__ void judge(const Items&, LowRange& range, int, int stage) {
  const bool watched = !__all_sync(~0u, range.finite());
  const int warp = static_cast<int>(threadIdx.x) / 32 - 1;
  if (threadIdx.x % 32 == 0) Input::mark(stage, warp, watched);
  range = LowRange();
}
template <class Input>
__device__ __forceinline__ void judge(const Items&, NoRange&, int, int) {}

// Iterates over all input stages of a block, and over the batches of each stage.
struct LoadCursor : StageCursor {
  int batch = 0;

  __device__ explicit LoadCursor(const Items& items) : StageCursor(items) {}
  __device__ void advance() {
    if (++batch < kBatches) return;
    batch = 0;
    StageCursor::advance();
  }
};

// A thread's units of a batch, with their image and the table column of their first channel.
struct Batch {
  Unit units[C::batch];
  int image;
  int column;

  // Starts loading the units.
  __device__ __forceinline__ void load(const Loaded* input, const LoadCursor& at, int thread) {
    const Source source(input, at);
    image = at.item.image;
    column = source.column_of(at.item.group);
#pragma unroll
    for (int k = 0; k < C::batch; ++k) {
      const int index = thread + kLoaders * (at.batch * C::batch + k);
      units[k].load(source.find(index), source.channel_of(index));
    }
  }

  // Writes the units to a stage.
  template <class Powers>
  __device__ __forceinline__ void store(unsigned char* stage, int batch, int thread,
                                        const Powers& powers, Range& range) const {
#pragma unroll
    for (int k = 0; k < C::batch; ++k) {
      const int index = thread + kLoaders * (batch * C::batch + k);
      if (!unit_exists(index)) continue;
      const int first = Unit::plane(index) * kPlanePixels + Unit::pixel(index);
      const int channel = Unit::plane(index) * kVectorChannels;
#pragma unroll
      for (int i = 0; i < Unit::kVectors; ++i) {
        const Scale scale = powers.of(channel + i * kVectorChannels);
        store_input(stage + (first + Unit::offset(i)) * 16, kPartPixels * 16, units[k].vector(i),
                    scale, range);
        if (powers.strict) range.see_strictly(units[k].vector(i), scale);
      }
    }
  }
};

// Loads all input stages, a few batches ahead of what is written to shared memory.
template <class Input>
__device__ __forceinline__ void load_input(const Loaded* input, const Items& items) {
  const int thread = static_cast<int>(threadIdx.x) - 32;
  Batch batches[C::batches_ahead];
  Range range;
  ChunkPowers<Input::kPowersCopied> powers(Input::powers(thread / 32));
  LoadCursor next(items);
  Ring<Input::kStages> at(1);
  int in_flight = 0;
  int batch = 0;
#pragma unroll
  for (int i = 0; i < C::batches_ahead - 1; ++i) {
    if (next.more()) {
      batches[i].load(input, next, thread);
      next.advance();
      ++in_flight;
    }
  }
  while (in_flight > 0 || next.more()) {
#pragma unroll
    for (int i = 0; i < C::batches_ahead; ++i) {
      if (next.more()) {
        batches[(i + C::batches_ahead - 1) % C::batches_ahead].load(input, next, thread);
        next.advance();
        ++in_flight;
      }
      if (in_flight == 0) break;
      --in_flight;
      if (batch == 0) {
        powers.load(items, batches[i].image, batches[i].column);
        Input::wait(at);
      }
      batches[i].store(Input::stage(at.stage), batch, thread, powers, range);
      if (++batch == kBatches) {
        batch = 0;
        judge<Input>(items, range, batches[i].image, at.stage);
        Input::show(at.stage);
        at.advance();
      }
    }
  }
}

// A thread's share of the lines of a stage, for cp.async: every kLineStep-th pixel of one plane.
// What the copies of a line have in common is computed once for all of them.
struct LineCopy {
  static constexpr int kLineStep = kLoaders / kChunkPlanes;
  static constexpr int kCopies = ceil_div(C::pitch, kLineStep);
  static_assert(!kInputCopied || kLoaders % kChunkPlanes == 0, "a thread stays in its plane");
  int plane, pixel;

  __device__ explicit LineCopy(int thread)
      : plane(thread % kChunkPlanes), pixel(thread / kChunkPlanes) {}

  __device__ __forceinline__ void start(const Source& source, int line,
                                        unsigned char* stage) const {
    const Place place = source.find_in_line(line, pixel);
    const int channel = source.channel + plane * kVectorChannels;
    const bool exists = VectorUnit::row_exists(place, channel);
    const Loaded* const from = place.address(channel);
    unsigned char* const to = stage + (plane * kPlanePixels + line * C::pitch + pixel) * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int on = i * kLineStep;
      if (C::pitch % kLineStep == 0 || i + 1 < kCopies || pixel + on < C::pitch) {
        const bool inside = static_cast<unsigned>(place.x + on * C::stride_width) <
                            static_cast<unsigned>(C::in_width);
        copy_async<16>(to + on * 16, from + 1LL * on * C::stride_width * kInColumn,
                       exists && inside);
      }
    }
  }
};

// Copies all input stages with cp.async. A consumer releases a stage only when it has the next one,
// so with two stages no copy may be in flight while this waits for a stage.
template <class Input>
__device__ __forceinline__ void copy_input(const Loaded* input, const Items& items) {
  static_assert(!C::wraps || !C::vector_loads || sizeof(Loaded) == 4, "lines do not go on");
  const int thread = static_cast<int>(threadIdx.x) - 32;
  const LineCopy copy(thread);
  Ring<Input::kStages> at(1);
  Ring<Input::kStages> landed(0);
  const auto arrive = [&] {
    Input::show(landed.stage);
    landed.advance();
  };
  // Stages that are in flight while the next one is copied.
  constexpr int kAhead = Input::kStages > 2 ? 1 : 0;
  // Unrolls all lines only if that takes few instructions.
  constexpr int kLinesAtOnce = kLines * LineCopy::kCopies <= 32 ? kLines : 1;
  int in_flight = 0;
  for (StageCursor next(items); next.more(); next.advance()) {
    const Source source(input, next);
    Input::wait(at);
    unsigned char* const stage = Input::stage(at.stage);
#pragma unroll kLinesAtOnce
    for (int line = 0; line < kLines; ++line) copy.start(source, line, stage);
    copy_async_commit();
    at.advance();
    if (++in_flight > kAhead) {
      copy_async_wait<kAhead>();
      arrive();
      --in_flight;
    }
  }
  copy_async_wait<0>();
  if (in_flight > 0) arrive();
}

// Fills all input stages, in the way that the input's format asks for.
template <class Input>
__device__ __forceinline__ void fill_stages(const Loaded* input, const Items& items) {
  if constexpr (kInputCopied) {
    copy_input<Input>(input, items);
  } else {
    load_input<Input>(input, items);
  }
}

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["hopper/halo/store.cuh"] = r"""
// Epilogue: a consumer's accumulators go through shared memory to global memory.
#include "hopper/halo/multiply.cuh"
#include "device/tensor/target.cuh"

namespace fastconv {
namespace hopper {

constexpr int kPasses = ceil_div(C::pixels, C::pass_pixels);
constexpr int kStoredPass = C::interleave * C::pass_pixels;
static_assert(!C::bulk_stores || kDepthToSpace || C::out_step_width == C::interleave,
              "of whole rows");

using Pair = decltype(narrow_pair(Scalar{}, 0.0f, 0.0f));

__device__ __forceinline__ void stage_pair(Scalar* target, float first, float second) {
  const auto pair = narrow_pair(Scalar{}, first, second);
  if constexpr (!C::bulk_stores || kStoredWidth % 2 == 0) {
    *reinterpret_cast<Pair*>(target) = pair;
  } else {
    const auto& elements = reinterpret_cast<const Vector<Scalar, 2>&>(pair);
    target[0] = elements.element[0];
    target[1] = elements.element[1];
  }
}

// Stages a pair in a row that continues into the next one (`wraps`). The first pixel lies `past`
// pixels after the row's end, or before it if negative. The kGap pixels after the end are
// discarded, and the next row's pixels are staged right behind this row's.
__device__ __forceinline__ void stage_wrapped(Scalar* target, int past, float first, float second) {
  if constexpr (C::out_width % 2 == 0 && kGap % 2 == 0) {
    if (past < 0) stage_pair(target, first, second);
    if (past >= kGap) stage_pair(target - kGap, first, second);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Scalar value = narrow<Scalar>(i == 0 ? first : second);
      if (past + i < 0) target[i] = value;
      if (past + i >= kGap) target[i - kGap] = value;
    }
  }
}

// The residual of two neighbouring pixels of a channel, for contiguous outputs, loaded straight
// from global memory: the lanes of a warp have neighbouring pixels.
template <bool kAdds>
struct RowResidual {
  // Whether a pair that begins at an even pixel is aligned, and inside the image as a whole or not
  // at all.
  static constexpr bool kPairs = C::bulk_stores && C::out_width % 2 == 0 && C::pitch % 2 == 0 &&
                                 (kStrips == 1 || C::tile_columns % 2 == 0) &&
                                 (!C::wraps || kGap % 2 == 0);
  Scalar first, second;

  // The lane takes one of 8 rows of M from first_row on, and two of 8 pixels from first_pixel on.
  __device__ __forceinline__ RowResidual(const Target& target, const Epilogue<C>& epilogue,
                                         int first_row, int first_pixel, int lane) {
    const int mma_row = first_row + lane / 4;
    const int pixel = first_pixel + lane % 4 * 2;
    if constexpr (kPairs) {
      const auto both = load<2>(target, epilogue, mma_row, pixel);
      first = both.element[0];
      second = both.element[1];
    } else {
      first = load<1>(target, epilogue, mma_row, pixel).element[0];
      second = load<1>(target, epilogue, mma_row, pixel + 1).element[0];
    }
  }
  template <int kCount>
  __device__ __forceinline__ static Vector<Scalar, kCount> load(const Target& target,
                                                                const Epilogue<C>& epilogue,
                                                                int mma_row, int pixel) {
    const int line = C::tile_rows == 1 ? 0 : pixel / C::pitch;
    int column = target.column - C::lead + pixel - line * C::pitch;
    bool valid = column >= 0 && line < C::tile_rows && target.exists(mma_row, line);
    if constexpr (C::wraps) {
      // After the gap comes the next row.
      const bool beyond = column >= C::out_width + kGap;
      const int end = target.output_row(mma_row, line) + 1 < C::out_height ? 2 : 1;
      valid = valid && (beyond || column < C::out_width);
      if (beyond) column -= kGap;
      valid = valid && column < end * C::out_width;
    } else {
      valid = valid && column < C::out_width;
    }
    return epilogue.residual_of<kCount>(target.place(mma_row, line, column), valid);
  }
};

template <>
struct RowResidual<false> {
  Nothing first, second;

  __device__ RowResidual(const Target&, const Epilogue<C>&, int, int, int) {}
};

// Stages the accumulators of 8 channels as rows of pixels; `half` tells which 8 of the warp's 16.
// With bulk stores, a staged row has the misalignment to 16 bytes that it will have in global
// memory.
template <bool kWrapped>
__device__ __forceinline__ void stage_rows(const float (&acc)[kAccumulators], Scalar* row,
                                           int row_end, int store_pass, int half,
                                           const Finish& finish, const Target& to,
                                           const Epilogue<C>& epilogue, int first_row, int lane) {
  // Recomputes the residuals' addresses for each use: kept, they would take registers that the
  // accumulators need.
  const int fresh_lane = kAddsResidual ? once_more(lane) : lane;
  const int past = lane % 4 * 2 - row_end;
#pragma unroll
  for (int i = 0; i < C::pass_pixels / 8; ++i) {
    const int j = store_pass * (C::pass_pixels / 8) + i;
    if (8 * j < C::pixels) {
      Scalar* const target = row + C::interleave * (8 * i + lane % 4 * 2);
      const RowResidual<kAddsResidual> added(to, epilogue, first_row, 8 * j, fresh_lane);
      const float first = finish(acc[4 * j + 2 * half], added.first);
      const float second = finish(acc[4 * j + 2 * half + 1], added.second);
      if constexpr (kWrapped) {
        stage_wrapped(target, 8 * i + past, first, second);
      } else if constexpr (C::interleave == 1) {
        stage_pair(target, first, second);
      } else if constexpr (C::stacked_columns == 2) {
        stage_pair(target, first, finish(acc[4 * j + 2]));
        stage_pair(target + 2, second, finish(acc[4 * j + 3]));
      } else {
        stage_pair(target, C::column_at ? 0.0f : first, C::column_at ? first : 0.0f);
        stage_pair(target + 2, C::column_at ? 0.0f : second, C::column_at ? second : 0.0f);
      }
    }
  }
}

// Whether every stored row, and every strip of one, starts at a multiple of 16 bytes.
constexpr bool kRowsAligned = C::lead == 0 && kStoredWidth % kVector == 0 &&
                              (kStrips == 1 || kStoredColumns % kVector == 0) && !kDepthToSpace;

// Stores columns [begin, end) of a row: whole 16-byte vectors with a bulk copy, the rest element by
// element.
__device__ __forceinline__ void store_columns(Scalar* row, const Scalar* staged, int begin,
                                              int end) {
  if (begin >= end) return;
  const int shift = kRowsAligned ? 0 : misalignment(row, kVector);
  const int aligned_begin = min(round_up(begin + shift, kVector) - shift, end);
  const int aligned_end = max((end + shift) / kVector * kVector - shift, aligned_begin);
  if (aligned_begin < aligned_end) {
    bulk_store(row + aligned_begin, staged + aligned_begin,
               (aligned_end - aligned_begin) * kScalarBytes);
  }
  if constexpr (!kRowsAligned) {
#pragma unroll 1
    for (int x = begin; x < aligned_begin; ++x) row[x] = staged[x];
#pragma unroll 1
    for (int x = aligned_end; x < end; ++x) row[x] = staged[x];
  }
}

// The columns of a row that one pass stores, for the tile's line-th row of pixels. With `lead`,
// they begin at a multiple of `lead` elements in memory. If the strip also `wraps`, the next row's
// own columns begin at such a multiple too, and those before it are stored with this row, as
// columns beyond its end.
struct Window {
  Scalar* row;     // the element in the image's column 0
  int at;          // the stored column of the pass's first pixel, counted along this line
  int begin, end;  // stored columns
  int beyond;      // elements from a multiple of 16 bytes, or of `lead`, to the row's start

  __device__ __forceinline__ Window(Scalar* row, const Target& target, int y, int line,
                                    int store_pass)
      : row(row) {
    at = target.column - C::lead + store_pass * kStoredPass - line * kStoredPitch;
    beyond = kRowsAligned ? 0 : misalignment(row, C::lead > 0 ? C::lead : kVector);
    begin = target.column - (C::lead > 0 ? beyond : 0);
    int first = C::lead > 0 ? 0 : begin;
    int last = kStoredWidth;
    if constexpr (C::wraps) {
      if (y > 0) first = round_up(beyond, C::lead) - beyond;
      if (y + 1 < C::out_height) last = round_up(last + beyond, C::lead) - beyond;
    }
    end = min(min(begin + kStoredColumns, at + kStoredPass), last);
    begin = max(max(begin, first), at);
  }
};

constexpr int kStoringLanes = kDepthToSpace ? 32 : 8;  // lanes of a warp that issue bulk stores

// Stores staged rows of 8 channels, each by one lane: the lanes' bulk copies start one after the
// other, but their addresses are computed in parallel.
__device__ __forceinline__ void store_staged(const Scalar* staging, const Target& target, int first,
                                             int store_pass, int lane) {
  if (lane >= kStoringLanes) return;
#pragma unroll
  for (int line = 0; line < C::tile_rows; ++line) {
    const int y = target.image_row(first, line, C::row_at);
    if (!target.exists(first + lane, line) || (!kRowsInside && y >= C::image_height)) continue;
    const Window window(target.row_start(first + lane, y), target, y, line, store_pass);
    store_columns(window.row, staging + lane * kRowPitch - window.at + window.beyond % kVector,
                  window.begin, window.end);
  }
  bulk_store_commit();
}

// Clears the neighbouring rows that belong to residues which no tap reaches.
__device__ __forceinline__ void clear_beside(const Target& target, int first, int store_pass,
                                             int lane) {
  constexpr int kCleared = kRowsAligned ? kVector : 1;
  constexpr int kRowsAtOnce = kFewRows ? kPixelRows : 1;
#pragma unroll
  for (int line = 0; line < C::tile_rows; ++line) {
#pragma unroll kRowsAtOnce
    for (int image_row = C::row_begin; image_row < C::row_end; ++image_row) {
      const int y = target.image_row(first, line, image_row);
      if (!kFewRows && y >= C::image_height) break;
      if (image_row == C::row_at || (!kRowsInside && y >= C::image_height)) continue;
      for (int i = 0; i < 8 && target.exists(first + i, line); ++i) {
        const Window window(target.row_start(first + i, y), target, y, line, store_pass);
        for (int x = window.begin + kCleared * lane; x < window.end; x += kCleared * 32) {
          *reinterpret_cast<Vector<Scalar, kCleared>*>(window.row + x) = {};
        }
      }
    }
  }
}

// Stores contiguous outputs, 8 channels at a time. With `lead`, neighbouring strips share no
// sector.
__device__ __forceinline__ void store_rows(const float (&acc)[kAccumulators],
                                           const Finish (&finish)[2], Scalar* staging,
                                           const Target& target, const Epilogue<C>& epilogue,
                                           int warp, int lane) {
  constexpr int kRowHalves = 2 / C::stacked_columns;
  static_assert(kRowHalves * kPasses % C::buffers == 0, "tiles begin with the same buffer");
#pragma unroll
  for (int half = 0; half < kRowHalves; ++half) {
    const int first = 16 * warp + 8 * half;  // row of M
    const Scalar* const row = target.row_start(first, target.image_row(first, 0, C::row_at));
    const int shift =
        C::bulk_stores ? misalignment(row + static_cast<long long>(lane / 4) * kOutChannel, kVector)
                       : 0;
#pragma unroll
    for (int store_pass = 0; store_pass < kPasses; ++store_pass) {
      if constexpr (C::bulk_stores) {
        if (lane < kStoringLanes) bulk_store_wait_read<C::buffers - 1>();
      }
      __syncwarp();
      Scalar* const buffer = staging + (half * kPasses + store_pass) % C::buffers * (8 * kRowPitch);
      Scalar* const rows = buffer + lane / 4 * kRowPitch + shift;
      const int row_end = C::out_width - target.column + C::lead;  // in pixels
      if (C::wraps && row_end < C::pixels) {
        stage_rows<C::wraps>(acc, rows, row_end, store_pass, half, finish[half], target, epilogue,
                             first, lane);
      } else {
        stage_rows<false>(acc, rows, row_end, store_pass, half, finish[half], target, epilogue,
                          first, lane);
      }
      if constexpr (C::bulk_stores) {
        fence_async_shared();
        __syncwarp();
        store_staged(buffer, target, first, store_pass, lane);
        clear_beside(target, first, store_pass, lane);
      } else {
        __syncwarp();
#pragma unroll 1
        for (int channel = 0; channel < 8; ++channel) {
#pragma unroll
          for (int i = 0; i < ceil_div(kStoredPass, 32); ++i) {
            const int staged = 32 * i + lane;
            const int line = (store_pass * kStoredPass + staged) / kStoredPitch;
            const int at = (store_pass * kStoredPass + staged) % kStoredPitch;
            if (staged < kStoredPass && line < C::tile_rows && at < kStoredColumns &&
                target.column + at < kStoredWidth && target.exists(first + channel, line)) {
              target.store(first + channel, line, target.column + at,
                           buffer[channel * kRowPitch + staged], true);
            }
          }
        }
      }
    }
  }
}

// Stages the accumulators of a warp's 16 channels among pixels of 64 channels, in the place of
// their residuals.
template <class T>
__device__ __forceinline__ void stage_pixels(const float (&acc)[kAccumulators], T* staging,
                                             int store_pass, const Finish (&finish)[2], int warp,
                                             int lane) {
#pragma unroll
  for (int i = 0; i < C::pass_pixels / 8; i += 2) {
    const int j = store_pass * (C::pass_pixels / 8) + i;
    if constexpr (sizeof(T) == 2) {
      // stmatrix of 2 x 8 pixels by 2 x 8 channels.
      const int pixel = 8 * (i + lane / 16) + lane % 8;
      T* const place = staging + pixel * kPixelPitch + 16 * warp + lane / 8 % 2 * 8;
      unsigned rows[4];
      if constexpr (kAddsResidual) load_transposed(rows, place);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = min(4 * (j + k / 2) + k % 2 * 2, kAccumulators - 2);
        if constexpr (kAddsResidual) {
          const auto added = reinterpret_cast<const Vector<T, 2>&>(rows[k]);
          rows[k] = narrow_pair(T{}, finish[k % 2](acc[at], added.element[0]),
                                finish[k % 2](acc[at + 1], added.element[1]));
        } else {
          rows[k] = narrow_pair(T{}, finish[k % 2](acc[at]), finish[k % 2](acc[at + 1]));
        }
      }
      store_transposed(place, rows);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int pixel = 8 * (i + k / 4) + lane % 4 * 2 + k % 2;
        if (8 * (j + k / 4) < C::pixels) {
          T& place = staging[pixel * kPixelPitch + 16 * warp + lane / 4 + k / 2 % 2 * 8];
          place = narrow<T>(finish[k / 2 % 2](acc[4 * j + k], Epilogue<C>::staged(place)));
        }
      }
    }
  }
}

// Channels-last outputs: a pixel's 64 channels are neighbours in memory. With `joint_stores`, both
// consumers store a pixel's 128 channels together.
constexpr int kStoring = C::joint_stores ? kConsumers : 1;  // consumers that store together
static_assert(!C::joint_stores || (C::out_channels_last && C::channel_groups == kConsumers &&
                                   kStackChannels == kOutputs && !C::turns),
              "the same pixels at the same time");

__device__ __forceinline__ void storing_sync(int warpgroup) {
  if constexpr (C::joint_stores) {
    warpgroups_sync<2>(kConsumers);
  } else {
    warpgroup_sync(warpgroup);
  }
}

__device__ __forceinline__ void store_pixels(const float (&acc)[kAccumulators],
                                             const Finish (&finish)[2], Scalar* staging,
                                             const Target& target, const Epilogue<C>& epilogue,
                                             int warpgroup, int warp, int lane) {
  using Stored = Either<C::vector_stores, uint4, Scalar>::type;
  constexpr int kStored = C::vector_stores ? kVector : 1;  // channels of one store
  constexpr int kStores = kStoring * kOutputs / kStored;   // stores of a pixel
  constexpr int kStep = kStoring * 128 / kStores;          // pixels stored by all threads at once
  constexpr int kAtOnce = 4;                               // loads that a thread has in flight
  const int thread = (C::joint_stores ? 128 * warpgroup : 0) + 32 * warp + lane;
  const int channel = thread % kStores * kStored;
  const int mma_row = channel % kOutputs;
  // Which consumer's accumulators the thread stores: 0 its own, -1 or 1 those of the one before or
  // after it.
  const int other = C::joint_stores ? channel / kOutputs - warpgroup : 0;
  Scalar* const staged = staging + other * (kStagingBytes / kScalarBytes) + mma_row;
  Target owner = target;
  owner.outputs += other * kOutputs;
  const int columns = min(C::tile_columns, C::out_width - target.column);
#pragma unroll
  for (int store_pass = 0; store_pass < kPasses; ++store_pass) {
    const int count = min(C::pass_pixels, C::pixels - store_pass * C::pass_pixels);
    storing_sync(warpgroup);
    if constexpr (kAddsResidual) {
#pragma unroll 1
      for (int first = thread / kStores; first < count; first += kAtOnce * kStep) {
        Vector<Scalar, kStored> values[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int pixel = store_pass * C::pass_pixels + first + k * kStep;
          const int line = C::tile_rows == 1 ? 0 : pixel / C::pitch;
          const int at = pixel - line * C::pitch;
          values[k] =
              epilogue.residual_of<kStored>(owner.place(mma_row, line, target.column + at),
                                            first + k * kStep < count && line < C::tile_rows &&
                                                at < columns && owner.exists(mma_row, line));
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int pixel = first + k * kStep;
          if (pixel < count) {
            *reinterpret_cast<Vector<Scalar, kStored>*>(staged + pixel * kPixelPitch) = values[k];
          }
        }
      }
      storing_sync(warpgroup);
    }
    stage_pixels(acc, staging, store_pass, finish, warp, lane);
    storing_sync(warpgroup);
#pragma unroll 1
    for (int first = thread / kStores; first < count; first += kAtOnce * kStep) {
      Stored values[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int pixel = min(first + k * kStep, count - 1);
        values[k] = *reinterpret_cast<const Stored*>(staged + pixel * kPixelPitch);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int pixel = store_pass * C::pass_pixels + first + k * kStep;
        const int line = C::tile_rows == 1 ? 0 : pixel / C::pitch;
        const int at = pixel - line * C::pitch;
        owner.store(mma_row, line, target.column + at, values[k],
                    first + k * kStep < count && line < C::tile_rows && at < columns &&
                        owner.exists(mma_row, line));
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["hopper/halo/multiply.cuh"] = r"""
// Consumers: warpgroups that issue wgmma on the input and weight stages in shared memory.
#include "hopper/halo/tile.cuh"
#include "device/wgmma.cuh"

namespace fastconv {
namespace hopper {

constexpr int kAccumulators = C::pixels / 2;  // registers of a thread

// The offset of a tap's first pixel in the ring of input stages, in units of 16 bytes, for a tile
// whose first stage is `stage`.
__device__ __forceinline__ int tap_offset(int stage, int first_row, int tap) {
  const int tap_row = tap / C::kernel_width;
  const int tap_column = tap % C::kernel_width;
  const int column_slot = tap_column % kColumnResidues;
  const int column = column_slot * kSlotPixels + tap_column * kColumnStep / kColumnResidues;
  if constexpr (C::rolling) {
    int of_row = stage + first_row + tap_row;
    if (of_row >= C::input_stages) of_row -= C::input_stages;
    return of_row * (kInputBytes / 16) + column;
  } else {
    return stage * (kInputBytes / 16) + tap_row % kRowResidues * (kColumnSlots * kSlotPixels) +
           (first_row + tap_row / kRowResidues) * C::pitch + column;
  }
}

static_assert(!C::turns || (C::resident && (C::rolling || kChunks <= C::input_stages)),
              "a consumer that takes turns needs all of a tile before the other gives any back");

// What a consumer warpgroup keeps from one tile to the next.
struct Consumer {
  int lane;
  int warp;  // index in the warpgroup
  int warpgroup;
  int channel_group;
  int pixel_group;
  Matrix input_matrix;
  Matrix weight_matrix;
  Ring<C::input_stages> input{0};  // next stage to wait for
  Ring<C::weight_stages> weights{0};
  Ring<C::input_stages> spent_input{0};  // next stage to release
  Ring<C::weight_stages> spent_weights{0};
  unsigned turn;  // parity of the mbarrier that grants the turn

  __device__ Consumer() {
    lane = static_cast<int>(threadIdx.x) % 32;
    // The shuffle tells the compiler that the warp's number is uniform.
    const int number = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - kProducerWarps;
    warp = number % 4;
    warpgroup = number / 4;
    turn = warpgroup == 0;
    channel_group = warpgroup % C::channel_groups;
    pixel_group = warpgroup / C::channel_groups;
    input_matrix = matrix(shared_memory() + kInputRing, kPlaneBytes, 128);
    weight_matrix =
        matrix(shared_memory() + kWeightRing + channel_group * kAOperandBytes, kOutputs * 16, 128);
  }

  // Waits for a chunk of a tile's input, except stages that an earlier tile has waited for. Returns
  // the chunk's first stage.
  __device__ __forceinline__ int wait_for_input(bool first_of_item) {
    const int first = C::rolling ? spent_input.stage : input.stage;
    const int stages = !C::rolling ? 1 : first_of_item ? kHaloRows : kTileRows;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      barrier_wait(&barriers().input_full[input.stage], input.parity);
      input.advance();
    }
    return first;
  }

  // Whether the stages from `first` on hold an infinity or a NaN. All warps read the same marks,
  // because none has released these stages.
  __device__ __forceinline__ bool is_marked(int first) const {
    bool marked = false;
#pragma unroll 1
    for (int i = 0; i < (C::rolling ? kHaloRows : 1); ++i) {
      marked = marked || watch().marked(first);
      if (++first == C::input_stages) first = 0;
    }
    return marked;
  }

  // Releases the stages of a tile's chunk, except rows that the next tile reads too.
  __device__ __forceinline__ void release_input(bool last_of_item) {
    const int stages = !C::rolling ? 1 : last_of_item ? kHaloRows : kTileRows;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (lane == 0) barrier_arrive(&barriers().input_empty[spent_input.stage]);
      spent_input.advance();
    }
  }

  __device__ __forceinline__ int wait_for_weights(int stage_of_tile) {
    if constexpr (C::resident) {
      barrier_wait(&barriers().weights_full[stage_of_tile], 0);
      return stage_of_tile;
    } else {
      const int stage = weights.stage;
      barrier_wait(&barriers().weights_full[stage], weights.parity);
      weights.advance();
      return stage;
    }
  }

  __device__ __forceinline__ void release_weights() {
    if constexpr (!C::resident) {
      if (lane == 0) barrier_arrive(&barriers().weights_empty[spent_weights.stage]);
      spent_weights.advance();
    }
  }

  // With `turns`, the consumers alternate: one issues MMAs while the other stores.
  __device__ __forceinline__ void wait_for_turn() {
    if constexpr (C::turns) {
      barrier_wait(&barriers().turn[warpgroup], turn);
      turn ^= 1;
    }
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (C::turns) {
      if (lane == 0) barrier_arrive(&barriers().turn[kConsumers - 1 - warpgroup]);
    }
  }

  // The MMAs low * low of one stage of weights.
  __device__ __forceinline__ void multiply_low(float (&acc)[kAccumulators], int weight_stage,
                                               int input_stage, int first_tap) const {
    constexpr int kPart = C::channel_groups * kAOperandBytes / 16;
    const Matrix left = weight_matrix + weight_stage * (kWeightBytes / 16);
#pragma unroll
    for (int j = 0; j < C::stage_taps; ++j) {
      const Matrix right =
          input_matrix + tap_offset(input_stage, pixel_group * kGroupRows, first_tap + j);
#pragma unroll
      for (int k = 0; k < C::k_steps; ++k) {
        wgmma<C::pixels>(Factor{}, acc,
                         left + (j * C::k_steps + k) * (kWeightParts * kPart) + kPart,
                         right + 2 * k * kPlanePixels + kPartPixels, j + k > 0);
      }
    }
  }

  // All other MMAs of one stage of weights.
  __device__ __forceinline__ void multiply(float (&acc)[kAccumulators], int weight_stage,
                                           int input_stage, int first_tap, bool accumulate) const {
    constexpr int kPart = C::channel_groups * kAOperandBytes / 16;
    const Matrix left = weight_matrix + weight_stage * (kWeightBytes / 16);
    // The high * high MMAs come last, so that the small products are added to small accumulators.
#pragma unroll
    for (int large = C::parts == 2 ? 0 : 1; large < 2; ++large) {
#pragma unroll
      for (int j = 0; j < C::stage_taps; ++j) {
        const Matrix right =
            input_matrix + tap_offset(input_stage, pixel_group * kGroupRows, first_tap + j);
#pragma unroll
        for (int k = 0; k < C::k_steps; ++k) {
          const Matrix a = left + (j * C::k_steps + k) * (kWeightParts * kPart);
          const Matrix b = right + 2 * k * kPlanePixels;
          if (large) {
            wgmma<C::pixels>(Factor{}, acc, a, b, accumulate);
          } else {
            // Scaled fp16 stores the input's low part enlarged; a third part of the weights, the
            // high part made smaller, compensates.
            const Matrix high = C::scaled_fp16 ? a + 2 * kPart : a;
            wgmma<C::pixels>(Factor{}, acc, high, b + kPartPixels, accumulate);
            wgmma<C::pixels>(Factor{}, acc, a + kPart, b, true);
          }
          accumulate = true;
        }
      }
    }
    wgmma_commit();
  }

  // The MMAs of one stage of weights for operands in two parts. If the input has infinite low parts
  // (`careful`), what low * low has made infinite is dropped. Each branch has its own fence: the
  // compiler wants no condition between the fence and the wgmmas.
  __device__ __forceinline__ void multiply_split(float (&acc)[kAccumulators], int weight_stage,
                                                 int input_stage, int first_tap,
                                                 bool careful) const {
    static_assert(!C::low_low_mma || !C::compensated, "sums begin with the low parts' products");
    if constexpr (C::low_low_mma) {
      if (careful) {
        wgmma_fence();
        multiply_low(acc, weight_stage, input_stage, first_tap);
        wgmma_commit();
        wgmma_wait<0>();
        hold_registers(acc);
        drop_infinite(acc);
        wgmma_fence();
        multiply(acc, weight_stage, input_stage, first_tap, true);
      } else {
        wgmma_fence();
        multiply_low(acc, weight_stage, input_stage, first_tap);
        multiply(acc, weight_stage, input_stage, first_tap, true);
      }
    } else {
      wgmma_fence();
      multiply(acc, weight_stage, input_stage, first_tap, C::compensated);
    }
  }

  // A tile's accumulators, without the bias. A stage is released one step late, when its wgmmas are
  // complete and the next ones have been issued.
  __device__ __forceinline__ void compute(float (&acc)[kAccumulators], bool first_of_item,
                                          bool last_of_item) {
    bool accumulate = false;
    wait_for_turn();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int input_stage = wait_for_input(first_of_item);
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        const int weight_stage = wait_for_weights(chunk * kWeightStages + stage);
        wgmma_fence();
        multiply(acc, weight_stage, input_stage, stage * C::stage_taps, accumulate);
        wgmma_wait<1>();
        if (accumulate) release_weights();
        if (chunk > 0 && stage == 0) release_input(false);
        accumulate = true;
      }
    }
    end_turn();
    wgmma_wait<0>();
    hold_registers(acc);
    release_weights();
    release_input(last_of_item);
  }

  // The same for operands in two parts, in two levels: after each stage of weights the accumulators
  // are added to `totals`. With `compensated`, the next stage's accumulators start from the
  // rounding error of that addition, so that long sums are as exact as short ones.
  __device__ __forceinline__ void compute_split(float (&totals)[kAccumulators], bool first_of_item,
                                                bool last_of_item) {
    float acc[kAccumulators];
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) totals[i] = acc[i] = 0.0f;
    bool careful = false;
    wait_for_turn();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int input_stage = wait_for_input(first_of_item);
      if constexpr (kWatches) careful = careful || is_marked(input_stage);
      int weight_stage = wait_for_weights(chunk * kWeightStages);
#pragma unroll 1
      for (int stage = 0; stage < kWeightStages; ++stage) {
        multiply_split(acc, weight_stage, input_stage, stage * C::stage_taps, careful);
        // Waits for the next weights while the wgmmas run.
        if (stage < kWeightStages - 1) {
          weight_stage = wait_for_weights(chunk * kWeightStages + stage + 1);
        } else if (chunk == kChunks - 1) {
          end_turn();
        }
        wgmma_wait<0>();
        hold_registers(acc);
        release_weights();
        if (stage == kWeightStages - 1) release_input(last_of_item);
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) {
          const float total = totals[i] + acc[i];
          if constexpr (C::compensated) acc[i] -= total - totals[i];
          totals[i] = total;
        }
        // The rounding error of a total that became infinite is NaN or infinite.
        if constexpr (C::compensated && kWatches) {
          if (careful) drop_infinite(acc);
        }
      }
    }
  }
};

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["device/tensor/target.cuh"] = r"""
// The output: where accumulators are stored, and what is done to them before.
#include "device/epilogue.cuh"
#include "device/tensor/scale.cuh"

namespace fastconv {
namespace tensor {

constexpr int kOutChannels = C::groups * kOutGroup;
constexpr int kOutPlane = C::image_height * C::image_width;
constexpr int kOutChannel =
    DepthPlacing::planes * kOutPlane;  // from a channel to the next, if contiguous
constexpr int kOutImage = kOutChannels * kOutChannel;
constexpr int kOutColumn = C::out_channels_last ? kOutChannels : 1;

// A stored row has one column for each pixel, or `interleave` columns.
constexpr int kStoredWidth = C::interleave == 1 ? C::out_width : C::image_width;
constexpr int kStoredColumns = C::interleave * C::tile_columns;
constexpr int kStoredPitch = C::interleave * C::pitch;
static_assert(kDepthToSpace || C::interleave == 1 || (C::interleave == 2 && C::out_step_width == 2),
              "pairs");
static_assert(kDepthToSpace || C::interleave == 1 || (!C::out_channels_last && C::lead == 0),
              "contiguous rows");

// Where stored rows and columns lie in the image. The output of a layer that computes one residue
// of a strided input gradient has rows and columns of other residues between its own. Positions
// that no residue's taps reach are cleared by the layer of the residue next to them.
constexpr int kStoredStep = C::interleave == 1 ? C::out_step_width : 1;
constexpr int kStoredBegin = C::interleave == 1 ? C::column_begin : 0;
constexpr int kStoredEnd = C::interleave == 1 ? C::column_end : 1;
constexpr int kStoredAt = C::interleave == 1 ? C::column_at : 0;
constexpr bool kRowsInside =
    (C::out_height - 1) * C::out_step_height + C::row_end <= C::image_height;
constexpr bool kStoredInside = (kStoredWidth - 1) * kStoredStep + kStoredEnd <= C::image_width;

// MMA tiles have rows, columns and channels that do not exist. These are the farthest of them, and
// an index type that reaches their elements.
constexpr int kFarOutRow = C::out_step_height * kRowStep * kRowTiles * kTileRows + C::row_end;
constexpr int kFarOutColumn = kStoredStep * (kStrips * kStoredColumns + kStoredPitch) + kStoredEnd;
constexpr int kFarOutChannel =
    (C::groups - 1) * kOutGroup +
    ceil_div(kOutputGroups * C::channel_groups * kStackChannels, kOutResidues);
using OutOffset = IndexTo<elements_of(kFarOutRow, C::image_width, kOutColumn) +
                          elements_of(kFarOutColumn, kOutColumn) +
                          elements_of(kFarOutChannel, C::out_channels_last ? 1 : kOutChannel)>;
static_assert(elements_of(kOutChannels, DepthPlacing::planes, C::image_height, C::image_width) <
                  kMostElements,
              "");

// A pixel's stores: its value, and zeros for positions that no residue reaches. More than
// kMostUnrolled stores are a loop, which ends where the image does, since a step of rows or columns
// may be larger than the image.
constexpr int kMostUnrolled = 64;
constexpr int kPixelRows = C::row_end - C::row_begin;
constexpr int kPixelColumns = kStoredEnd - kStoredBegin;
constexpr bool kFewRows = kPixelRows <= kMostUnrolled;
constexpr bool kFewStores = kFewRows && kPixelColumns <= kMostUnrolled / kPixelRows;
constexpr int kStoredRowsAtOnce = kFewStores ? kPixelRows : 1;
constexpr int kStoredAtOnce = kFewStores ? kPixelColumns : 1;

// Where the accumulators of an MMA tile are stored.
struct Target {
  Scalar* image;  // in a volume, the plane
  int outputs;    // first output channel, in the group
  int group;
  int row;     // output row of the first pixel, for stacked row 0
  int column;  // stored column of pixel `lead`

  // The target of a tile of a work item, for one of its channel groups and rows from first_row on.
  __device__ Target(Scalar* output, const Item& item, int tile, int channel_group, int first_row) {
    if constexpr (Depth::exists) {
      const int plane = DepthPlacing::step * (item.image % Depth::out) + DepthPlacing::at;
      image = output + static_cast<long long>(item.image / Depth::out) * kOutImage +
              static_cast<long long>(plane) * kOutPlane * kOutColumn;
    } else {
      image = output + static_cast<long long>(item.image) * kOutImage;
    }
    outputs = item.outputs + channel_group * kStackChannels;
    group = item.group;
    row = item.row_residue + kRowStep * ((item.tile + tile) * kTileRows + first_row);
    column = C::interleave * item.column;
  }

  // The channel of an MMA row, in its group.
  __device__ int channel(int m) const { return outputs + row_of_column(m) % kStackRows; }
  // The output row of an MMA row, for the tile's line-th row of pixels.
  __device__ int output_row(int m, int line) const {
    return row + kRowStep * (line + row_of_column(m) / kStackRows);
  }
  __device__ bool exists(int m, int line) const {
    return channel(m) < C::group_out && output_row(m, line) < C::out_height;
  }
  // The image's row for an output row; i is row_at, or the offset of a row to clear.
  __device__ int image_row(int m, int line, int i) const {
    return C::out_step_height * output_row(m, line) + i;
  }
  // The element in column 0 of the image.
  __device__ Scalar* row_start(int m, int y) const { return channel_row(channel(m), y); }
  __device__ Scalar* channel_row(int channel, int y) const {
    const int c = group * kOutGroup + channel;
    if constexpr (C::out_channels_last) {
      return image + (static_cast<OutOffset>(y) * C::image_width * kOutChannels + c);
    } else {
      return image + ((static_cast<OutOffset>(c) * (DepthPlacing::planes * C::image_height) + y) *
                      C::image_width);
    }
  }

  // Where a forward pass, which has no residues, stores an output.
  __device__ __forceinline__ Scalar* place(int m, int line, int column) const {
    return row_start(m, output_row(m, line)) + static_cast<OutOffset>(column) * kOutColumn;
  }

  // Stores an element or a vector of channels if it is `valid`, and clears the positions beside it.
  template <class Stored>
  __device__ __forceinline__ void store(int m, int line, int stored_column, const Stored& value,
                                        bool valid) const {
#pragma unroll kStoredRowsAtOnce
    for (int i = C::row_begin; i < C::row_end; ++i) {
      const int y = image_row(m, line, i);
      if (!kFewStores && y >= C::image_height) break;
      Scalar* const row = row_start(m, y);
#pragma unroll kStoredAtOnce
      for (int j = kStoredBegin; j < kStoredEnd; ++j) {
        const int x = kStoredStep * stored_column + j;
        if (!kFewStores && x >= C::image_width) break;
        store_if(
            reinterpret_cast<Stored*>(row + static_cast<OutOffset>(x) * kOutColumn),
            i == C::row_at && j == kStoredAt ? value : Stored{},
            valid && (kRowsInside || y < C::image_height) && (kStoredInside || x < C::image_width));
      }
    }
  }
};

// Rounds two accumulators to a pair of the output's type, which the first argument selects.
__device__ __forceinline__ Vector<float, 2> narrow_pair(float, float first, float second) {
  return {{first, second}};
}
__device__ __forceinline__ unsigned narrow_pair(float16, float first, float second) {
  return floats_to_halves(first, second);
}
__device__ __forceinline__ unsigned narrow_pair(bfloat16, float first, float second) {
  return floats_to_bfloats(first, second);
}

// The epilogue of one accumulator: bias, scale, residual and activation.
struct Finish {
  float bias = 0.0f;
  float factor = 1.0f;  // scales scaled fp16 back

  template <class Residual = Nothing>
  __device__ __forceinline__ float operator()(float acc, Residual residual = {}) const {
    return Epilogue<C>::activated(C::scaled_fp16 ? fmaf(acc, factor, bias) : acc + bias, residual);
  }
};
static_assert(!kAddsResidual ||
                  (C::out_step_height == 1 && C::out_step_width == 1 && !kDepthToSpace),
              "forward passes alone have a residual");

// The epilogue of the accumulators in one MMA row.
__device__ __forceinline__ Finish finish_of(const Scalar* bias, const Items& items,
                                            const Item& item, const Target& target, int row) {
  Finish finish;
  const int channel = target.channel(row);
  if (bias && channel < C::group_out) {
    finish.bias = widen(bias[item.group * kOutGroup + DepthToSpaceChannel(channel).channel]);
  }
  if constexpr (C::scaled_fp16) {
    constexpr int kOfGroup = C::table_channels / C::groups;
    finish.factor =
        items.tables.channels()[item.group * kOfGroup + channel] *
        inverse(items.tables.images()[items.first_volume +
                                      item.image / HalfCopy::planes]);  // a power of two
  }
  return finish;
}

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["hopper/halo/tile.cuh"] = r"""
// The shared memory of a block of the halo kernel: stages, staging buffers, barriers.
#include "device/wgmma.cuh"
#include "device/tensor/half_copy.cuh"
#include "device/tensor/tile.cuh"

namespace fastconv {
namespace hopper {

using namespace tensor;

constexpr int kConsumers = 2;
constexpr int kPixelGroups = kConsumers / C::channel_groups;
constexpr int kGroupRows = C::tile_rows * C::stack;  // output rows of a consumer
static_assert(kTileRows == kPixelGroups * kGroupRows, "");
static_assert(C::stack == 1 || (C::tile_rows == 1 && kRowResidues == 1), "rows stacked in M alone");
static_assert(!C::rolling || (kChunks == 1 && kRowResidues == 1 && C::tile_rows == 1), "see above");
// N is a multiple of 8 pixels, so the last MMA may read a little beyond the tile's last row.
constexpr int kReach = C::pixels + (C::kernel_width - 1) * kColumnStep / kColumnResidues;
constexpr int kSlack = kReach > C::tile_rows* C::pitch ? kReach - C::tile_rows * C::pitch : 0;
static_assert(C::lead + C::tile_columns + (C::tile_rows - 1) * C::pitch <= C::pixels, "");
constexpr int kInputBytes = (C::parts * kPartPixels + kSlack) * 16;

static_assert(kOutputs == 64, "rows of wgmma");

// Staging buffers of the epilogue. Contiguous outputs: each warp has `buffers` buffers, with rows
// of pass_pixels for 8 channels. Channels-last outputs: each warpgroup has one, with 64 channels of
// pass_pixels. Residues as channels (`d2s_*`): each warpgroup has one, with the lines of all
// existing residues of pass_pixels. The pitches spread a warp's accesses over all banks.
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kRowPitch = round_up(C::interleave * C::pass_pixels + kVector - 8, 16) + 8;
constexpr int kPixelPitch = kOutputs + kVector;
constexpr int kLinePitch =
    round_up(C::interleave * C::pass_pixels + kVector - 1, 2 * kVector) + kVector;
constexpr int kStackLines =  // lines of a stacked output row
    min_of(kStackChannels, C::group_out) / C::interleave;
constexpr int kStagingBytes =
    kScalarBytes * (kDepthToSpace          ? C::stack * kStackLines * kLinePitch
                    : C::out_channels_last ? C::pass_pixels * kPixelPitch
                                           : 4 * C::buffers * 8 * kRowPitch);

static_assert(!C::wraps || (C::lead > 0 && C::pass_pixels >= C::pixels), "one row, stored at once");
static_assert(!C::wraps || (C::out_width > (kStrips - 1) * C::tile_columns &&
                            C::out_width + kGap + 2 * C::lead - 1 <=
                                (kStrips - 1) * C::tile_columns + C::pixels),
              "the last strip has room for a lead of the next row");
static_assert(!C::wraps || (C::stride_height == 1 && C::stride_width == 1 &&
                            C::s2d_height * C::s2d_width == 1 && C::out_step_height == 1),
              "the next row reads the next row");
static_assert(!C::wraps || !C::staged || (C::padding_left == 0 && C::in_width == kPaddedWidth),
              "neighbours in memory");

// Raw input (`staged`): pieces of a line as they lie in memory, with the channels of
// `piece_vectors` vectors.
// A piece has the columns of all residues of a column stride. Every loading warp has raw_slots
// slots of its own. kRawAligned: pieces are whole rows, which all begin at multiples of 16 bytes.
// TMA boxes (`box_loads`) have the columns of padding, too.
constexpr int kLoaderWarps = C::loader_warps;
constexpr int kProducerWarps = kLoaderWarps + 1;  // the first streams weights
static_assert(kProducerWarps % 4 == 0 && 32 * (kProducerWarps + kConsumerWarps) == C::threads,
              "whole warpgroups");
constexpr int kRawSlots = C::staged ? kLoaderWarps * C::raw_slots : 0;
constexpr int kPieceChannels = C::piece_vectors * kVectorChannels;
constexpr int kRawReach = C::pitch * C::stride_width - (kColumnUnit - 1);  // columns of a line
constexpr int kRawLine =
    C::box_loads || C::wraps || kRawReach < C::in_width ? kRawReach : C::in_width;
constexpr bool kRawAligned =
    !C::box_loads && kStrips == 1 && C::padding_left >= 0 && C::in_width % kVector == 0;
constexpr int kRawChannel = round_up(kRawLine + (kRawAligned ? 0 : kVector - 1), kVector);
constexpr int kBoxAlignment = C::box_loads ? 128 : 16;  // bytes
constexpr int kBoxBytes = kPieceChannels * kRawChannel * kScalarBytes;
constexpr int kRawElements = round_up(kBoxBytes, kBoxAlignment) / kScalarBytes;
constexpr int kRawBytes = kRawElements * kScalarBytes;

constexpr int kInputRing = 0;
constexpr int kWeightRing = kInputRing + C::input_stages * kInputBytes;
constexpr int kStaging = kWeightRing + C::weight_stages * kWeightBytes;
constexpr int kRawRing = round_up(kStaging + kConsumers * kStagingBytes, kBoxAlignment);
constexpr int kPowers = kRawRing + kRawSlots * kRawBytes;
// Scaled fp16: each loading warp's copy of the powers of two that scale a chunk's channels. Bulk
// copies fetch long lines, beside which reading the powers from global memory costs little.
constexpr bool kPowersCopied = C::scaled_fp16 && !kLoadsCopy && !C::bulk_loads;
constexpr int kPowersBytes = kPowersCopied ? kChunkChannels * 4 : 0;
constexpr int kBarriers = kPowers + kLoaderWarps * kPowersBytes;
constexpr int kWatch =
    kBarriers + 16 * (C::input_stages + C::weight_stages) + 8 * (kConsumers + kRawSlots);
static_assert(kWatch + (kWatches ? 4 * C::input_stages : 0) <= C::shared_bytes, "");
static_assert(kInputBytes % 16 == 0 && kStagingBytes % 16 == 0, "bulk copies are aligned");
static_assert(C::lead == 0 || (C::tile_rows == 1 && C::bulk_stores), "one row's alignment");

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier weights_full[C::weight_stages];
  Barrier weights_empty[C::weight_stages];
  Barrier turn[kConsumers];  // the other consumer has issued its MMAs
  Barrier raw_full[kRawSlots > 0 ? kRawSlots : 1];
};

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}

// A mark for each input stage and loading warp: whether the warp wrote an infinity or a NaN to it.
struct Watch {
  unsigned char marks[C::input_stages][4];

  __device__ __forceinline__ bool marked(int stage) const {
    return (*reinterpret_cast<const unsigned*>(marks[stage]) & 0xffffffu) != 0;
  }
};
static_assert(kLoaderWarps <= 3 || !kWatches, "a byte for each");

__device__ __forceinline__ Watch& watch() {
  return *reinterpret_cast<Watch*>(shared_memory() + kWatch);
}

// The ring of input stages, as the loaders of device/tensor/load.cuh use it.
struct Input {
  static constexpr int kStages = C::input_stages;
  static constexpr bool kPowersCopied = hopper::kPowersCopied;

  __device__ __forceinline__ static unsigned char* stage(int stage) {
    return shared_memory() + kInputRing + stage * kInputBytes;
  }
  __device__ __forceinline__ static float* powers(int warp) {
    return reinterpret_cast<float*>(shared_memory() + kPowers + warp * kPowersBytes);
  }
  __device__ __forceinline__ static void wait(const Ring<kStages>& at) {
    barrier_wait(&barriers().input_empty[at.stage], at.parity);
  }
  __device__ __forceinline__ static void show(int stage) {
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers().input_full[stage]);
  }
  __device__ __forceinline__ static void mark(int stage, int warp, bool watched) {
    watch().marks[stage][warp] = watched;
  }
};

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["device/wgmma.cuh"] = r"""
// wgmma.mma_async, the warpgroup-wide MMA of sm_90a, for each of its 32 values of N. Inline
// assembly names every accumulator register, so the macros below list them; each list extends the
// one before.
#include "device/sm90.cuh"

namespace fastconv {

// clang-format off
#define FASTCONV_REGISTERS_4 "%0, %1, %2, %3"
#define FASTCONV_REGISTERS_8 FASTCONV_REGISTERS_4 ", %4, %5, %6, %7"
#define FASTCONV_REGISTERS_12 FASTCONV_REGISTERS_8 ", %8, %9, %10, %11"
#define FASTCONV_REGISTERS_16 FASTCONV_REGISTERS_12 ", %12, %13, %14, %15"
#define FASTCONV_REGISTERS_20 FASTCONV_REGISTERS_16 ", %16, %17, %18, %19"
#define FASTCONV_REGISTERS_24 FASTCONV_REGISTERS_20 ", %20, %21, %22, %23"
#define FASTCONV_REGISTERS_28 FASTCONV_REGISTERS_24 ", %24, %25, %26, %27"
#define FASTCONV_REGISTERS_32 FASTCONV_REGISTERS_28 ", %28, %29, %30, %31"
#define FASTCONV_REGISTERS_36 FASTCONV_REGISTERS_32 ", %32, %33, %34, %35"
#define FASTCONV_REGISTERS_40 FASTCONV_REGISTERS_36 ", %36, %37, %38, %39"
#define FASTCONV_REGISTERS_44 FASTCONV_REGISTERS_40 ", %40, %41, %42, %43"
#define FASTCONV_REGISTERS_48 FASTCONV_REGISTERS_44 ", %44, %45, %46, %47"
#define FASTCONV_REGISTERS_52 FASTCONV_REGISTERS_48 ", %48, %49, %50, %51"
#define FASTCONV_REGISTERS_56 FASTCONV_REGISTERS_52 ", %52, %53, %54, %55"
#define FASTCONV_REGISTERS_60 FASTCONV_REGISTERS_56 ", %56, %57, %58, %59"
#define FASTCONV_REGISTERS_64 FASTCONV_REGISTERS_60 ", %60, %61, %62, %63"
#define FASTCONV_REGISTERS_68 FASTCONV_REGISTERS_64 ", %64, %65, %66, %67"
#define FASTCONV_REGISTERS_72 FASTCONV_REGISTERS_68 ", %68, %69, %70, %71"
#define FASTCONV_REGISTERS_76 FASTCONV_REGISTERS_72 ", %72, %73, %74, %75"
#define FASTCONV_REGISTERS_80 FASTCONV_REGISTERS_76 ", %76, %77, %78, %79"
#define FASTCONV_REGISTERS_84 FASTCONV_REGISTERS_80 ", %80, %81, %82, %83"
#define FASTCONV_REGISTERS_88 FASTCONV_REGISTERS_84 ", %84, %85, %86, %87"
#define FASTCONV_REGISTERS_92 FASTCONV_REGISTERS_88 ", %88, %89, %90, %91"
#define FASTCONV_REGISTERS_96 FASTCONV_REGISTERS_92 ", %92, %93, %94, %95"
#define FASTCONV_REGISTERS_100 FASTCONV_REGISTERS_96 ", %96, %97, %98, %99"
#define FASTCONV_REGISTERS_104 FASTCONV_REGISTERS_100 ", %100, %101, %102, %103"
#define FASTCONV_REGISTERS_108 FASTCONV_REGISTERS_104 ", %104, %105, %106, %107"
#define FASTCONV_REGISTERS_112 FASTCONV_REGISTERS_108 ", %108, %109, %110, %111"
#define FASTCONV_REGISTERS_116 FASTCONV_REGISTERS_112 ", %112, %113, %114, %115"
#define FASTCONV_REGISTERS_120 FASTCONV_REGISTERS_116 ", %116, %117, %118, %119"
#define FASTCONV_REGISTERS_124 FASTCONV_REGISTERS_120 ", %120, %121, %122, %123"
#define FASTCONV_REGISTERS_128 FASTCONV_REGISTERS_124 ", %124, %125, %126, %127"

#define FASTCONV_OPERANDS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FASTCONV_OPERANDS_8 FASTCONV_OPERANDS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FASTCONV_OPERANDS_12 FASTCONV_OPERANDS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define FASTCONV_OPERANDS_16 FASTCONV_OPERANDS_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define FASTCONV_OPERANDS_20 FASTCONV_OPERANDS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define FASTCONV_OPERANDS_24 FASTCONV_OPERANDS_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define FASTCONV_OPERANDS_28 FASTCONV_OPERANDS_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define FASTCONV_OPERANDS_32 FASTCONV_OPERANDS_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FASTCONV_OPERANDS_36 FASTCONV_OPERANDS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FASTCONV_OPERANDS_40 FASTCONV_OPERANDS_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define FASTCONV_OPERANDS_44 FASTCONV_OPERANDS_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define FASTCONV_OPERANDS_48 FASTCONV_OPERANDS_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define FASTCONV_OPERANDS_52 FASTCONV_OPERANDS_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define FASTCONV_OPERANDS_56 FASTCONV_OPERANDS_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define FASTCONV_OPERANDS_60 FASTCONV_OPERANDS_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define FASTCONV_OPERANDS_64 FASTCONV_OPERANDS_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FASTCONV_OPERANDS_68 FASTCONV_OPERANDS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define FASTCONV_OPERANDS_72 FASTCONV_OPERANDS_68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define FASTCONV_OPERANDS_76 FASTCONV_OPERANDS_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define FASTCONV_OPERANDS_80 FASTCONV_OPERANDS_76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define FASTCONV_OPERANDS_84 FASTCONV_OPERANDS_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define FASTCONV_OPERANDS_88 FASTCONV_OPERANDS_84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define FASTCONV_OPERANDS_92 FASTCONV_OPERANDS_88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define FASTCONV_OPERANDS_96 FASTCONV_OPERANDS_92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define FASTCONV_OPERANDS_100 FASTCONV_OPERANDS_96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define FASTCONV_OPERANDS_104 FASTCONV_OPERANDS_100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define FASTCONV_OPERANDS_108 FASTCONV_OPERANDS_104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define FASTCONV_OPERANDS_112 FASTCONV_OPERANDS_108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define FASTCONV_OPERANDS_116 FASTCONV_OPERANDS_112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define FASTCONV_OPERANDS_120 FASTCONV_OPERANDS_116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define FASTCONV_OPERANDS_124 FASTCONV_OPERANDS_120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define FASTCONV_OPERANDS_128 FASTCONV_OPERANDS_124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// One instruction for N = `columns`. The input operands are numbered after the accumulator
// registers: `left` is a matrix descriptor in shared memory, or four registers.
#define FASTCONV_WGMMA(columns, registers, a, b, c, d, e, f, shape, types, flags)                   \
  if constexpr (kColumns == columns) {                                                              \
    asm volatile(                                                                                   \
        "{\n"                                                                                       \
        ".reg .pred accumulate;\n"                                                                  \
        "setp.ne.b32 accumulate, %" #c ", 0;\n"                                                     \
        "wgmma.mma_async.sync.aligned.m64n" #columns shape ".f32" types                             \
        " {" FASTCONV_REGISTERS_##registers "}, %" #a ", %" #b ", accumulate, 1, 1" flags ";\n"     \
        "}"                                                                                         \
        : FASTCONV_OPERANDS_##registers                                                             \
        : "l"(left), "l"(right), "r"(static_cast<int>(accumulate)));                                \
  }
#define FASTCONV_WGMMA_FROM_REGISTERS(columns, registers, a, b, c, d, e, f, shape, types, flags)    \
  if constexpr (kColumns == columns) {                                                              \
    asm volatile(                                                                                   \
        "{\n"                                                                                       \
        ".reg .pred accumulate;\n"                                                                  \
        "setp.ne.b32 accumulate, %" #f ", 0;\n"                                                     \
        "wgmma.mma_async.sync.aligned.m64n" #columns shape ".f32" types                             \
        " {" FASTCONV_REGISTERS_##registers "}, {%" #a ", %" #b ", %" #c ", %" #d "}, %" #e         \
        ", accumulate, 1, 1" flags ";\n"                                                            \
        "}"                                                                                         \
        : FASTCONV_OPERANDS_##registers                                                             \
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right),                       \
          "r"(static_cast<int>(accumulate)));                                                       \
  }
#define FASTCONV_WGMMA_WIDTHS(instruction, ...) \
  instruction(8, 4, 4, 5, 6, 7, 8, 9, __VA_ARGS__) \
  instruction(16, 8, 8, 9, 10, 11, 12, 13, __VA_ARGS__) \
  instruction(24, 12, 12, 13, 14, 15, 16, 17, __VA_ARGS__) \
  instruction(32, 16, 16, 17, 18, 19, 20, 21, __VA_ARGS__) \
  instruction(40, 20, 20, 21, 22, 23, 24, 25, __VA_ARGS__) \
  instruction(48, 24, 24, 25, 26, 27, 28, 29, __VA_ARGS__) \
  instruction(56, 28, 28, 29, 30, 31, 32, 33, __VA_ARGS__) \
  instruction(64, 32, 32, 33, 34, 35, 36, 37, __VA_ARGS__) \
  instruction(72, 36, 36, 37, 38, 39, 40, 41, __VA_ARGS__) \
  instruction(80, 40, 40, 41, 42, 43, 44, 45, __VA_ARGS__) \
  instruction(88, 44, 44, 45, 46, 47, 48, 49, __VA_ARGS__) \
  instruction(96, 48, 48, 49, 50, 51, 52, 53, __VA_ARGS__) \
  instruction(104, 52, 52, 53, 54, 55, 56, 57, __VA_ARGS__) \
  instruction(112, 56, 56, 57, 58, 59, 60, 61, __VA_ARGS__) \
  instruction(120, 60, 60, 61, 62, 63, 64, 65, __VA_ARGS__) \
  instruction(128, 64, 64, 65, 66, 67, 68, 69, __VA_ARGS__) \
  instruction(136, 68, 68, 69, 70, 71, 72, 73, __VA_ARGS__) \
  instruction(144, 72, 72, 73, 74, 75, 76, 77, __VA_ARGS__) \
  instruction(152, 76, 76, 77, 78, 79, 80, 81, __VA_ARGS__) \
  instruction(160, 80, 80, 81, 82, 83, 84, 85, __VA_ARGS__) \
  instruction(168, 84, 84, 85, 86, 87, 88, 89, __VA_ARGS__) \
  instruction(176, 88, 88, 89, 90, 91, 92, 93, __VA_ARGS__) \
  instruction(184, 92, 92, 93, 94, 95, 96, 97, __VA_ARGS__) \
  instruction(192, 96, 96, 97, 98, 99, 100, 101, __VA_ARGS__) \
  instruction(200, 100, 100, 101, 102, 103, 104, 105, __VA_ARGS__) \
  instruction(208, 104, 104, 105, 106, 107, 108, 109, __VA_ARGS__) \
  instruction(216, 108, 108, 109, 110, 111, 112, 113, __VA_ARGS__) \
  instruction(224, 112, 112, 113, 114, 115, 116, 117, __VA_ARGS__) \
  instruction(232, 116, 116, 117, 118, 119, 120, 121, __VA_ARGS__) \
  instruction(240, 120, 120, 121, 122, 123, 124, 125, __VA_ARGS__) \
  instruction(248, 124, 124, 125, 126, 127, 128, 129, __VA_ARGS__) \
  instruction(256, 128, 128, 129, 130, 131, 132, 133, __VA_ARGS__)
// clang-format on

// d (+)= left * right^T: M = 64 rows of `left` by N = kColumns rows of `right`, over 32 bytes along
// K. A warpgroup's threads hold the accumulators in wgmma's layout:
//   d[4 j + 2 h + i] is row 16 warp + lane / 4 + 8 h, column 8 j + 2 (lane % 4) + i.
// The instruction is asynchronous: between wgmma_fence and wgmma_wait neither d nor the operands
// may be accessed. By default both operands are K-major: elements that follow each other in shared
// memory follow each other along K. 16-bit operands may also be MN-major, which kLeftMnMajor and
// kRightMnMajor say of `left` and `right`.
template <int kColumns>
__device__ __forceinline__ void wgmma(Tf32, float (&d)[kColumns / 2], Matrix left, Matrix right,
                                      bool accumulate) {
  FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k8", ".tf32.tf32", "")
}
template <int kColumns, bool kLeftMnMajor = false, bool kRightMnMajor = false>
__device__ __forceinline__ void wgmma(Float16, float (&d)[kColumns / 2], Matrix left, Matrix right,
                                      bool accumulate) {
  if constexpr (kLeftMnMajor && kRightMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".f16.f16", ", 1, 1")
  } else if constexpr (kLeftMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".f16.f16", ", 1, 0")
  } else if constexpr (kRightMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".f16.f16", ", 0, 1")
  } else {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".f16.f16", ", 0, 0")
  }
}
template <int kColumns, bool kLeftMnMajor = false, bool kRightMnMajor = false>
__device__ __forceinline__ void wgmma(Bfloat16, float (&d)[kColumns / 2], Matrix left, Matrix right,
                                      bool accumulate) {
  if constexpr (kLeftMnMajor && kRightMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".bf16.bf16", ", 1, 1")
  } else if constexpr (kLeftMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".bf16.bf16", ", 1, 0")
  } else if constexpr (kRightMnMajor) {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".bf16.bf16", ", 0, 1")
  } else {
    FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA, "k16", ".bf16.bf16", ", 0, 0")
  }
}

// `left` in registers: left[h + 2 i] holds 4 bytes of row 16 warp + lane / 4 + 8 h, from byte 16 i
// + 4 (lane % 4) on. These registers may not be written either until the wgmma is complete.
template <int kColumns>
__device__ __forceinline__ void wgmma(Tf32, float (&d)[kColumns / 2], const unsigned (&left)[4],
                                      Matrix right, bool accumulate) {
  FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA_FROM_REGISTERS, "k8", ".tf32.tf32", "")
}
template <int kColumns>
__device__ __forceinline__ void wgmma(Float16, float (&d)[kColumns / 2], const unsigned (&left)[4],
                                      Matrix right, bool accumulate) {
  FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA_FROM_REGISTERS, "k16", ".f16.f16", ", 0")
}
template <int kColumns>
__device__ __forceinline__ void wgmma(Bfloat16, float (&d)[kColumns / 2], const unsigned (&left)[4],
                                      Matrix right, bool accumulate) {
  FASTCONV_WGMMA_WIDTHS(FASTCONV_WGMMA_FROM_REGISTERS, "k16", ".bf16.bf16", ", 0")
}

}  // namespace fastconv
"""

SOURCES["device/sm90.cuh"] = r"""
// PTX of sm_90a, one function for each instruction; wgmma.cuh has wgmma itself. The CPU emulator
// has a host version of this file.
#include "device/sm80.cuh"

namespace fastconv {

// --- mbarrier: barriers in shared memory ---------------------------------------------------------
// An mbarrier's phase is complete when the arrivals that it was initialised for have happened and
// the bytes that it expects have been copied; then the next phase begins. Phases count from 0.

using Barrier = unsigned long long;

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Goes between barrier_init and __syncthreads: makes the barriers visible to asynchronous copies.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives. The arrival may overtake this thread's loads from shared memory unless their results
// have been used; an asynchronous copy that waits for the barrier would then overwrite what they
// read.
__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and makes the phase wait for this many bytes of bulk or TMA copies.
__device__ __forceinline__ void barrier_arrive_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Makes the phase wait for this many bytes, some of which may have been copied already. The phase
// must still lack an arrival that comes after this.
__device__ __forceinline__ void barrier_expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Makes the phase wait for all cp.async of this thread so far. The phase must still lack an arrival
// that comes after this.
__device__ __forceinline__ void barrier_expect_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives when all cp.async of this thread so far are complete. Threads that wait for the phase see
// what was copied, but not this thread's own stores.
__device__ __forceinline__ void barrier_arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Waits until the phase with this parity (its number modulo 2) is complete. The barrier is in that
// phase or in the one after it.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
  unsigned complete;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!complete);
}

// True for one lane of the warp; all lanes must call it. With elect.sync, the compiler emits one
// bulk copy whose operands come from that lane. A condition such as lane == 0 makes it emit a loop.
__device__ __forceinline__ bool is_elected() {
  unsigned elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// --- Bulk copies: one thread moves many contiguous bytes -----------------------------------------
// Addresses and sizes are multiples of 16.

// Copies from global to shared memory and counts the bytes at `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Copies from shared to global memory. It sees ordinary stores to shared memory only if
// fence_async_shared comes between.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Commits this thread's bulk stores since the last commit as one group.
__device__ __forceinline__ void bulk_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this thread's latest kPending groups have read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's bulk stores are complete.
__device__ __forceinline__ void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes this thread's ordinary accesses of shared memory visible to wgmma and bulk copies (the
// async proxy).
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- TMA: one thread moves a box of a tensor -----------------------------------------------------
// Coordinates come innermost first, and the innermost is a multiple of 16 bytes. They may lie
// outside of the tensor: loads give zeros there, and stores write nothing. Coordinates of a store
// may not be negative, and its rows are whole multiples of 16 bytes (an H200 reports an illegal
// instruction for others). A box is dense in shared memory, at a multiple of 128 bytes, or of 8 n
// bytes if its swizzle spans n bytes.

// A tensor map that the CUDA driver has encoded. It is a kernel parameter of type `const
// __grid_constant__ TensorMap`.
struct __align__(64) TensorMap {
  unsigned long long words[16];
};

// Prefetches the tensor map before the first copy needs it.
__device__ __forceinline__ void tensor_map_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads a box to shared memory and counts its bytes at `barrier`, those outside of the tensor
// included.
template <int kRank>
__device__ __forceinline__ void tensor_load(void* shared, const TensorMap& map,
                                            const int (&at)[kRank], Barrier* barrier) {
  static_assert(kRank >= 2 && kRank <= 5, "what kernels use");
  if constexpr (kRank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1])
        : "memory");
  } else if constexpr (kRank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2])
        : "memory");
  } else if constexpr (kRank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
        "r"(at[4])
        : "memory");
  }
}

// Loads a box of an im2col tensor map. `at` is the first pixel (channel, column, row, image),
// within the bounding box; `offset` (column, row; 0 to 255) is added to every pixel, and may lead
// out of it. Volumes have planes after rows, and offsets from 0 to 31.
__device__ __forceinline__ void im2col_load(void* shared, const TensorMap& map, const int (&at)[4],
                                            const int (&offset)[2], Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
      "h"(static_cast<short>(offset[0])), "h"(static_cast<short>(offset[1]))
      : "memory");
}
__device__ __forceinline__ void im2col_load(void* shared, const TensorMap& map, const int (&at)[5],
                                            const int (&offset)[3], Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
      "r"(at[4]), "h"(static_cast<short>(offset[0])), "h"(static_cast<short>(offset[1])),
      "h"(static_cast<short>(offset[2]))
      : "memory");
}

// Stores a box from shared memory. It needs the same fence, commit and wait as bulk_store.
template <int kRank>
__device__ __forceinline__ void tensor_store(const TensorMap& map, const int (&at)[kRank],
                                             const void* shared) {
  static_assert(kRank >= 2 && kRank <= 5, "what kernels use");
  if constexpr (kRank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
        "r"(shared_address(shared)), "r"(at[0]), "r"(at[1])
        : "memory");
  } else if constexpr (kRank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            &map),
        "r"(shared_address(shared)), "r"(at[0]), "r"(at[1]), "r"(at[2])
        : "memory");
  } else if constexpr (kRank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            &map),
        "r"(shared_address(shared)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3])
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group "
        "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
        "r"(shared_address(shared)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
        : "memory");
  }
}

// --- Warpgroups ----------------------------------------------------------------------------------

// Sets how many registers each thread of the calling warpgroup has (setmaxnreg). If a block's
// threads together exceed the number it was launched with, the kernel hangs.
template <int kRegisters>
__device__ __forceinline__ void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Synchronises the threads of one warpgroup. `number` is the warpgroup's own within its block.
__device__ __forceinline__ void warpgroup_sync(int number) {
  asm volatile("bar.sync %0, 128;" ::"r"(number + 1) : "memory");
}

// Synchronises kWarpgroups warpgroups, for which `number` is one that no other group of them uses.
template <int kWarpgroups>
__device__ __forceinline__ void warpgroups_sync(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "n"(128 * kWarpgroups) : "memory");
}

// Writes four 8 by 8 matrices of 16-bit elements to shared memory, transposed (stmatrix.trans).
// Lane l holds elements (l / 4, 2 (l % 4) + {0, 1}) of matrix k in `rows[k]`, and lane 8 k + i
// passes the address of 16 bytes for column i of matrix k.
__device__ __forceinline__ void store_transposed(void* column, const unsigned (&rows)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(column)),
               "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
               : "memory");
}

// Writes four such matrices without transposing them: lane 8 k + i passes the address of 16 bytes
// for row i of matrix k.
__device__ __forceinline__ void store_rows(void* row, const unsigned (&rows)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
      : "memory");
}

// Orders accesses of registers and shared memory before the warpgroup's next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits the warpgroup's wgmma since the last commit as one group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the warpgroup's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading accumulators before the preceding wgmma_wait.
template <int kCount>
__device__ __forceinline__ void hold_registers(float (&accs)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accs[i])::"memory");
}
// Keeps the compiler from reusing the registers of wgmma's operands before the preceding
// wgmma_wait.
template <int kCount>
__device__ __forceinline__ void hold_registers(unsigned (&operands)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(operands[i])::"memory");
}

// Keeps the compiler from splitting an address, so that later offsets become immediates of the
// loads instead of registers of their own.
template <class T>
__device__ __forceinline__ void hold_address(const T*& address) {
  asm volatile("" : "+l"(address));
}

// A wgmma matrix descriptor without swizzle. Core matrices of 8 rows by 16 bytes are 128 contiguous
// bytes each; `leading` bytes lie between core matrices that are neighbours along K, `stride` bytes
// between neighbours along M or N. Adding bytes / 16 to a descriptor moves its start.
using Matrix = unsigned long long;

__device__ __forceinline__ Matrix matrix(const void* start, int leading, int stride) {
  // In a cluster, the highest bits of a shared address hold the block's rank; the descriptor has
  // other fields there.
  const unsigned address = shared_address(start) & 0x3ffffu;
  return static_cast<Matrix>(address >> 4) | static_cast<Matrix>(leading >> 4) << 16 |
         static_cast<Matrix>(stride >> 4) << 32;
}

// A descriptor with a swizzle of kSpan (32, 64 or 128) bytes, for TMA boxes at multiples of 8 kSpan
// bytes. K-major operand: 8 rows of kSpan bytes are contiguous, `stride` bytes lie between such
// groups, and `leading` is unused; adding bytes / 16 moves along K within a row. MN-major operand
// (see wgmma): 8 places along K by kSpan bytes are contiguous, `stride` bytes lie between
// neighbours along K, and `leading` bytes between neighbours along M or N. The swizzle is a
// function of the address in shared memory, so an MN-major operand may begin at any row of a box,
// and `stride` and `leading` may be any number of rows.
template <int kSpan = 128>
__device__ __forceinline__ Matrix swizzled_matrix(const void* start, int leading, int stride) {
  static_assert(kSpan == 32 || kSpan == 64 || kSpan == 128, "spans of wgmma's swizzles");
  constexpr unsigned long long kCode = kSpan == 128 ? 1 : kSpan == 64 ? 2 : 3;
  return matrix(start, leading, stride) | kCode << 62;
}

// --- Clusters: thread blocks that share their shared memory (DSMEM) ------------------------------
// These are for kernels with __cluster_dims__. In any other kernel each block is a cluster of one.

// The rank of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Synchronises all threads of the cluster's blocks that have not exited; after it, each sees what
// all of them wrote before. It is due before the first access of another block's shared memory,
// since that block may not have started, and after the last, since that block must not have ended.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// Loads four floats from the shared memory of the block with this rank, at the offset that `shared`
// has in this block.
__device__ __forceinline__ float4 load_from_block(const float4* shared, int rank) {
  float4 value;
  asm volatile(
      "{\n"
      ".reg .u32 address;\n"
      "mapa.shared::cluster.u32 address, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [address];\n"
      "}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(shared_address(shared)), "r"(rank)
      : "memory");
  return value;
}

// --- Programmatic dependent launch (PDL) ---------------------------------------------------------
// Blocks of a launch that is `early` may begin while the launch before it is still running.

// Waits until earlier launches are complete and their writes are visible. Every thread that
// accesses a tensor calls it before its first access.
__device__ __forceinline__ void wait_for_earlier_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Says that a block accesses no tensor that the launch before writes, and writes none that it
// reads, and so need not wait for it. Some block of the grid waits, so that later launches come
// after both.
__device__ __forceinline__ void go_beside_earlier_launch() {}

// Lets the blocks of the next launch begin where there is room for them, once all blocks of this
// one have called it or ended.
__device__ __forceinline__ void allow_later_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fastconv
"""

SOURCES["device/tensor/input.cuh"] = r"""
// The input: where the pixels of a tile lie in memory, and how a thread loads some of their
// channels.
#include "device/tensor/scale.cuh"

namespace fastconv {
namespace tensor {

// Strides of the input, in elements. With space-to-depth, group_in counts a channel once for each
// residue; in volumes, also once for each tap of the depth.
constexpr bool kSpaceToDepth = C::s2d_height * C::s2d_width > 1;
constexpr int kInGroup = C::group_in / (C::s2d_height * C::s2d_width);
constexpr int kInChannels = kInGroup / Depth::kernel;  // a group's channels in memory
constexpr int kInColumn = kLoadedLast ? C::groups * kInChannels : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInPlane = C::in_height * kInRow;
constexpr int kInChannel = kLoadedLast ? 1 : Depth::in * kInPlane;
constexpr int kInImage = C::groups * kInChannels * Depth::in * C::in_height * C::in_width;
using InChannel = DepthChannel<kInChannels>;
// A group's channels that have powers of their own (scaled fp16): in a copy, those in memory.
constexpr int kScaledChannels = HalfCopy::exists ? kInChannels : kInGroup;

// The channel whose power scales a channel of the reduction.
__device__ __forceinline__ int scaled_channel(int channel) {
  return HalfCopy::exists ? channel % kScaledChannels : channel;
}

// The farthest rows and columns that tiles reach, before or behind the input's first, and an index
// type that reaches every element there.
constexpr long long kFarInRow = max_of<long long>(
    C::padding_top, elements_of(C::s2d_height, C::stride_height, kRowStep) +
                        elements_of(C::s2d_height, C::dilation_height, kRowResidues,
                                    kRowTiles* kTileRows + kHaloRows + C::kernel_height));
constexpr long long kFarInColumn = max_of<long long>(
    C::padding_left + elements_of(C::lead, C::stride_width),
    elements_of(C::s2d_width, C::stride_width, kStrips* C::tile_columns + C::pitch + 1));
using InOffset =
    IndexTo<elements_of(kFarInRow, kInRow) + elements_of(kFarInColumn, kInColumn) +
            elements_of(Depth::exists ? kInChannels : kChunks * kChunkChannels, kInChannel) +
            (Depth::exists ? elements_of(ceil_div(kChunks * kChunkChannels, kInChannels),
                                         Depth::dilation, kInPlane)
                           : 0)>;
static_assert(elements_of(C::groups, kInChannels, Depth::in, C::in_height, C::in_width) <
                  kMostElements,
              "");

// What an image of the batch reads: an image, or planes of a volume, the first of which may lie
// outside.
template <class Element>
struct InImage : Front {
  const Element* first;

  __device__ __forceinline__ InImage(const Element* input, int image) : Front(front_of(image)) {
    if constexpr (Depth::exists) {
      first = input + static_cast<long long>(image / Depth::out) * kInImage +
              static_cast<long long>(front) * kInPlane;
    } else {
      first = input + static_cast<long long>(image) * kInImage;
    }
  }
};

// Whether the volume has the plane that a channel reads, of those from `front` on.
__device__ __forceinline__ bool plane_exists(int front, int channel) {
  return plane_inside(front + InChannel(channel).plane());
}

// The offset of a channel's first element, from that of the image's.
__device__ __forceinline__ InOffset channel_offset(int channel) {
  const InChannel in_memory(channel);
  const InOffset offset = InOffset{in_memory.channel} * kInChannel;
  return Depth::exists ? offset + InOffset{in_memory.plane()} * kInPlane : offset;
}

// Elements from the last multiple of `unit` elements to an address.
template <class Element>
__device__ __forceinline__ int misalignment(const Element* element, int unit) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(element) / sizeof(Element) % unit);
}

// The place of a pixel, in the first channel of its group.
struct Place : Front {
  const Loaded* group;
  int y, x;  // may lie outside of the image
  bool exists;

  __device__ __forceinline__ bool inside(int rows_on = 0, int columns_on = 0) const {
    return static_cast<unsigned>(y + rows_on) < static_cast<unsigned>(C::in_height) &&
           static_cast<unsigned>(x + columns_on) < static_cast<unsigned>(C::in_width) && exists;
  }
  __device__ __forceinline__ const Loaded* address(int channel) const {
    return group + (channel_offset(channel) + InOffset{y} * kInRow + InOffset{x} * kInColumn);
  }
};

__device__ __forceinline__ float load_element(const float* source) { return load(source); }
__device__ __forceinline__ float load_element(const float* source, bool valid) {
  return load_or_zero(source, valid);
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* source) {
  return {load(&source->bits)};
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* source, bool valid) {
  return {load_or_zero(&source->bits, valid)};
}

constexpr bool kWholeChunks = C::group_in % kChunkChannels == 0;

// A unit is what a thread loads at a time: VectorUnit or PixelUnit. Each gives the plane and pixel
// of the index-th unit of a stage, loads the unit or zeros, and returns it as vectors of channels.

// One vector of channels that are neighbours in memory. Neighbouring lanes load neighbouring
// vectors.
struct VectorUnit {
  static constexpr int kVectors = 1;
  static constexpr int kCount = kPartPixels;
  Words loaded;

  __device__ static int plane(int index) { return index % kChunkPlanes; }
  __device__ static int pixel(int index) { return index / kChunkPlanes; }
  static_assert(!C::vector_loads || kInChannels % kLoadedVector == 0,
                "a vector has one tap of depth");
  __device__ static bool row_exists(const Place& place, int channel) {
    return static_cast<unsigned>(place.y) < static_cast<unsigned>(C::in_height) &&
           (kWholeChunks || channel < C::group_in) && plane_exists(place.front, channel);
  }
  __device__ void load(const Place& place, int channel) {
    const auto* const source = reinterpret_cast<const uint4*>(place.address(channel));
    const bool valid = place.inside() && (kWholeChunks || channel < C::group_in) &&
                       plane_exists(place.front, channel);
    loaded = Words::of(load_or_zero(source, valid));
  }
  __device__ Words vector(int) const { return loaded; }
  __device__ static int offset(int) { return 0; }
};

// One or two vectors of one pixel, loaded channel by channel, for any other layout. Neighbouring
// lanes load neighbouring pixels.
struct PixelUnit {
  static constexpr int kVectors = C::unit_vectors;
  static constexpr int kCount = kPartPixels / kVectors;
  static constexpr int kElements = kVectors * kVectorChannels;
  static_assert(kChunkPlanes % kVectors == 0, "units are whole");
  // Whether all channels of a unit are equally far apart in memory.
  static constexpr bool kTogether =
      !kSpaceToDepth && (!Depth::exists || kInChannels % kElements == 0);
  Loaded loaded[kElements];

  __device__ static int plane(int index) { return index / kPlanePixels * kVectors; }
  __device__ static int pixel(int index) { return index % kPlanePixels; }
  __device__ void load(const Place& place, int channel) {
    if constexpr (!kTogether) {
      load_apart(place, channel);
      return;
    }
    const bool inside = place.inside() && plane_exists(place.front, channel);
    const Loaded* const source = place.address(channel);
    if (!__any_sync(~0u, inside)) {
#pragma unroll
      for (Loaded& element : loaded) element = Loaded{};
    } else if (kWholeChunks && __all_sync(~0u, inside)) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) loaded[j] = load_element(source + 1LL * j * kInChannel);
    } else {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const bool valid = inside && (kWholeChunks || channel + j < C::group_in);
        loaded[j] = load_element(source + 1LL * j * kInChannel, valid);
      }
    }
  }
  __device__ void load_apart(const Place& place, int channel) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      const SpaceToDepthChannel in_memory(channel + j);
      const bool valid = place.inside(in_memory.row, in_memory.column) &&
                         (kWholeChunks || channel + j < C::group_in) &&
                         plane_exists(place.front, in_memory.channel);
      loaded[j] = load_element(
          place.address(in_memory.channel) +
              (InOffset{in_memory.row} * kInRow + InOffset{in_memory.column} * kInColumn),
          valid);
    }
  }
  __device__ Channels vector(int i) const {
    return vector_of<Channels>(loaded + i * kVectorChannels);
  }
  __device__ static int offset(int i) { return i * kPlanePixels; }
};

using Unit = Either<C::vector_loads, VectorUnit, PixelUnit>::type;
constexpr int kBatches = ceil_div(Unit::kCount, C::loaders* C::batch);  // batches of a stage

__device__ __forceinline__ bool unit_exists(int index) {
  return Unit::kCount % (C::loaders * C::batch) == 0 || index < Unit::kCount;
}

// Iterates over all input stages of a block: the stages of each chunk of each work item.
struct StageCursor {
  const Items& items;
  int index;
  Item item;
  int chunk = 0;
  int stage = 0;

  __device__ explicit StageCursor(const Items& items)
      : items(items), index(items.first()), item(index) {}
  __device__ bool more() const { return index < items.count(); }
  __device__ void advance() {
    if (++stage < item.stages()) return;
    stage = 0;
    if (++chunk < kChunks) return;
    chunk = 0;
    index = items.after(index);
    if (more()) item = Item(index);
  }
};

// A chunk of a tile, or of one of its rows, as it lies in the input.
struct Source : Front {
  const Loaded* group;  // the first channel at row 0, column 0
  int row;  // the tile's first row, in space-to-depth rows, before padding is subtracted
  int column;
  int channel;  // the first channel, in its group

  __device__ Source(const Loaded* input, const StageCursor& at)
      : Source(input, at.item, at.chunk, at.stage) {}
  __device__ Source(const Loaded* input, const Item& item, int chunk, int stage)
      : Front(front_of(item.image)) {
    channel = chunk * kChunkChannels;
    group = InImage<Loaded>(input, item.image).first + item.group * kInChannels * kInChannel;
    row = item.row_residue * C::stride_height +
          C::dilation_height * (item.tile * kTileRows * kRowResidues + stage);
    column = (item.column - C::lead) * C::stride_width;
  }

  // The place of a unit's first pixel.
  __device__ __forceinline__ Place find(int index) const {
    const int pixel = Unit::pixel(index);
    Place place = find_in_line(pixel / C::pitch, pixel % C::pitch);
    if (C::wraps && place.x + C::padding_left >= kPaddedWidth) {
      place.x -= kPaddedWidth;
      ++place.y;
    }
    place.exists = unit_exists(index);
    return place;
  }
  // The place of a pixel in a line of a plane, if the line does not continue with the next row.
  __device__ __forceinline__ Place find_in_line(int index, int position) const {
    const int slot = index / kStageRows;
    const int line = index % kStageRows;
    const int y = row + C::dilation_height * (slot / kColumnSlots + line * kRowResidues);
    const int column_residue = slot % kColumnSlots * kColumnStep % kColumnResidues;
    const int x = column + kColumnUnit * (column_residue + position * kColumnResidues);
    return {Front(front), group, y * C::s2d_height - C::padding_top,
            x * C::s2d_width - C::padding_left, true};
  }
  __device__ __forceinline__ int channel_of(int index) const {
    return channel + Unit::plane(index) * kVectorChannels;
  }
  // The column of the chunk's first channel in the tables of scale.cuh.
  __device__ __forceinline__ int column_of(int its_group) const {
    return its_group * kGroupColumns + channel;
  }
};

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/tensor/scale.cuh"] = r"""
// Scaled fp16: float32 multiplied as float16, in half the time of TF32, with the same mantissa but
// a smaller range.
//
// Numbers are scaled by powers of two. Each input channel has one, which the size of its weights
// decides; its weights are divided by it, so a channel's unit of measure does not matter. Each
// image has one, which a sample of its numbers decides, and each output channel's weights have one,
// which the largest of them decides. The epilogue scales accumulators back.
//
// Below 2^-14, float16 is subnormal: it has fewer bits, and its error is absolute. So numbers fit
// if
//   - the largest number of each vector of 8 channels is not below that, and
//   - the error is negligible beside the channel as a whole (for weights: beside the filter, which
//     is an output and an input channel's taps): its mean square is large enough, or none of its
//     numbers is below 2^-14.
// The sample proves that a channel of an image is large enough, since its numbers are a part of the
// sum of squares. In channels where it does not, loaders check every number (`strict`).
//
// An image that does not fit is marked, and a second kernel (`repairs`) computes it again in TF32.
// If the weights do not fit, that kernel computes all images and the first one none. An image's own
// numbers and the weights alone decide, never the rest of the batch.
//
// The input may be scaled and rounded before the convolution, by a launch that makes a
// channels-last copy of it (half_copy.cuh). Then that launch judges the numbers. All planes of a
// volume share its scale, and all taps of the depth a channel's power.
#include "device/tensor/half_copy.cuh"
#include "device/tensor/powers.cuh"
#include "device/tensor/vector.cuh"

namespace fastconv {
namespace tensor {

// Whether the kernel computes only some images of the batch.
constexpr bool kSelects = C::scaled_fp16 || C::repairs;

constexpr int kWeightExponent = 14;  // the exponent that the largest weight is scaled to

// The least magnitude, once scaled, of a vector's largest number: from there on, float16 has all
// bits. Weights in two parts need more, since their low part and their copy times 2^-11 have no
// scale of their own.
constexpr float kLeastInput = 1.0f / (1 << 14);
constexpr float kLeastWeight = C::parts == 2 ? 0.25f : kLeastInput;

// The root mean square of a channel or filter beside which the error of smaller numbers is
// negligible. Each of them loses at most 2^-24, or in two parts 2^-36 (input) and 2^-25 (weights);
// all of them together 1e-6 of the norm of the channel or filter, or 3e-8 in two parts.
constexpr float kInputSize = C::parts == 2 ? 1.0f / (1 << 11) : 1.0f / (1 << 4);
constexpr float kWeightSize = C::parts == 2 ? 1.0f : 1.0f / (1 << 4);

// Columns of the tables are input channels after space-to-depth, one group after the other.
constexpr int kGroupColumns = C::scaled_fp16 ? C::table_columns / C::groups : 1;

// Tables of scales in the workspace.
struct Tables {
  unsigned char* scratch;
  int batch;

  // What scales an output channel's accumulators back; 0 if its weights do not fit.
  __device__ __forceinline__ float* channels() const {
    return reinterpret_cast<float*>(scratch + C::tables_at);
  }
  // What an input channel's numbers are multiplied by, and its weights divided by.
  __device__ __forceinline__ float* columns() const { return channels() + C::table_channels; }
  // The column's power times the image's scale: what a channel's numbers in this image are
  // multiplied by. It is negative if each of these numbers must fit (`strict`).
  __device__ __forceinline__ float* powers(int image) const {
    return columns() + (1ll + image) * C::table_columns;
  }
  // An image's scale; 0 if no power of two is suitable.
  __device__ __forceinline__ float* images() const { return powers(batch); }
  // Not 0 for images with numbers that do not fit.
  __device__ __forceinline__ int* marks() const { return reinterpret_cast<int*>(images() + batch); }
};

// The work items of a block: those of the images that this kernel computes.
struct Items : Slab {
  Tables tables;  // its scratch is null if the weights do not fit
  int images;     // of the slab or the batch; volumes, where their planes share a copy

  __device__ Items(unsigned char* scratch, int batch, const Slab& slab = {})
      : Slab(slab),
        tables{scratch, batch / HalfCopy::planes},
        images(slab.images_of(batch) / HalfCopy::planes) {
    if constexpr (kSelects) {
      bool fit = true;
#pragma unroll 4
      for (int i = threadIdx.x % 32; i < C::table_channels; i += 32) {
        fit = fit && tables.channels()[i] != 0.0f;
      }
      if (!__all_sync(~0u, fit)) tables.scratch = nullptr;
    }
  }
  // Whether there are scales for an image, or for the volume of this number.
  __device__ __forceinline__ bool has_scales(int image) const {
    return tables.scratch && tables.images()[image] != 0.0f;
  }
  // Whether the kernel computes it.
  __device__ __forceinline__ bool has(int image) const {
    if constexpr (kLoadsCopy) return has_scales(image) && tables.marks()[image] == 0;
    if constexpr (C::scaled_fp16) return has_scales(image);
    if constexpr (C::repairs) {
      return !tables.scratch || tables.images()[image] == 0.0f || tables.marks()[image] != 0;
    }
    return true;
  }
  // Whether this kernel computes no image at all.
  __device__ bool none() const {
    if constexpr (!kSelects) return false;
    bool found = false;
    for (int i = threadIdx.x % 32; i < images; i += 32) found = found || has(first_volume + i);
    return !__any_sync(~0u, found);
  }
  __device__ __forceinline__ int count() const {
    return images * (HalfCopy::planes * kItemsPerImage);
  }

  // The indices of a block's first work item, and of the one after `index`.
  __device__ __forceinline__ int first() const { return next_selected(blockIdx.x); }
  __device__ __forceinline__ int after(int index) const { return next_selected(index + gridDim.x); }
  __device__ __forceinline__ int next_selected(int index) const {
    if constexpr (kSelects) {
      while (index < count() && !has(first_volume + index / (HalfCopy::planes * kItemsPerImage)))
        index += gridDim.x;
    }
    return index;
  }

  // Marks the image if not all numbers fit that the warp has seen since the last call.
  __device__ __forceinline__ void judge(HalfRange& range, int image) const {
    const bool fits = range.fits(kLeastInput);
    if (!__all_sync(~0u, fits) && threadIdx.x % 32 == 0) tables.marks()[image] = 1;
    range = HalfRange();
  }
  __device__ __forceinline__ void judge(NoRange&, int) const {}
};

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/tensor/vector.cuh"] = r"""
// Vectors of channels: 16 bytes of an MMA operand, converted and written to shared or global
// memory.
#include "device/tensor/half_copy.cuh"
#include "device/tensor/powers.cuh"
#include "device/tensor/tile.cuh"

namespace fastconv {
namespace tensor {

// 16 bytes in registers.
struct alignas(16) Words {
  unsigned word[4];

  __device__ static Words of(uint4 bits) { return {{bits.x, bits.y, bits.z, bits.w}}; }
};

// Eight numbers that become 16 bytes of float16.
struct Numbers {
  float number[8];
};

// The channels of a vector of the input as it is loaded, and of one of the weights.
constexpr bool kScalesInput = C::scaled_fp16 && !kLoadsCopy;
using Channels = Either<kScalesInput, Numbers, Words>::type;
using WeightChannels = Either<C::scaled_fp16, Numbers, Words>::type;

__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }
template <class Half>
__device__ __forceinline__ unsigned bits_of(Half value) {
  return value.bits;
}

// Packs the elements of a vector.
template <class Element>
__device__ __forceinline__ void fill(Words& vector, const Element* elements) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Element* const first = elements + k * (4 / static_cast<int>(sizeof(Element)));
    if constexpr (sizeof(Element) == 4) {
      vector.word[k] = __float_as_uint(widen(*first));
    } else {
      vector.word[k] = __byte_perm(bits_of(first[0]), bits_of(first[1]), 0x5410);
    }
  }
}
template <class Element>
__device__ __forceinline__ void fill(Numbers& vector, const Element* elements) {
#pragma unroll
  for (int k = 0; k < 8; ++k) vector.number[k] = widen(elements[k]);
}
template <class Vector, class Element>
__device__ __forceinline__ Vector vector_of(const Element* elements) {
  Vector vector;
  fill(vector, elements);
  return vector;
}

// The powers of two that scale the eight channels of a vector. A power is negative if every number
// of its channel must fit (see scale.cuh).
struct Powers {
  alignas(16) float power[8];

  __device__ explicit Powers(const float* powers) {
    const auto* const halves = reinterpret_cast<const float4*>(powers);
    *reinterpret_cast<float4*>(power) = halves[0];
    *reinterpret_cast<float4*>(power + 4) = halves[1];
  }
  // Whether every number of some channel must fit.
  __device__ __forceinline__ bool strict() const {
    unsigned signs = 0;
#pragma unroll
    for (float one : power) signs |= __float_as_uint(one);
    return signs >> 31 != 0;
  }
  __device__ __forceinline__ Numbers scale(const Numbers& vector) const {
    Numbers scaled;
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled.number[i] = vector.number[i] * fabsf(power[i]);
    return scaled;
  }
};

// The range of the numbers that were converted to float16: what is needed to tell whether they fit.
struct HalfRange {
  float largest = 0.0f;
  unsigned smallest = ~0u;  // bit pattern minus one, so that zeros do not count

  // Records the largest number of a scaled vector.
  __device__ __forceinline__ void see(const Numbers& vector) {
    float of_vector = 0.0f;
#pragma unroll
    for (float number : vector.number) of_vector = larger(of_vector, fabsf(number));
    largest = larger(largest, of_vector);
    smallest = min(smallest, __float_as_uint(of_vector) - 1u);
  }
  // Records a single number that must fit, even if scaling makes it zero.
  __device__ __forceinline__ void see(float number, float scaled) {
    const unsigned bits = max(__float_as_uint(fabsf(scaled)), 1u);
    if (number != 0.0f) smallest = min(smallest, bits - 1u);
  }
  __device__ __forceinline__ void see_strictly(const Numbers& vector, const Powers& powers) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float number = powers.power[i] < 0.0f ? vector.number[i] : 0.0f;
      see(number, number * powers.power[i]);
    }
  }
  // Whether the largest number is in float16's range, and the smallest is not below `least`.
  __device__ bool fits(float least) const {
    return largest <= 65504.0f && smallest >= __float_as_uint(least) - 1u;
  }
};

// Stands for powers and ranges where there is no scaled fp16.
struct NoPowers {
  __device__ explicit NoPowers(const float*) {}
  __device__ bool strict() const { return false; }
};
struct NoRange {
  __device__ void see(const Words&) {}
  __device__ void see(float, float) {}
  __device__ void see_strictly(const Words&, const NoPowers&) {}
  __device__ bool fits(float) const { return true; }
};

// Tells whether one of the low parts was infinite or NaN. It accumulates products of two of them,
// which takes half the instructions. Products of finite parts overflow only for numbers beyond
// 2^70; then the stage is merely treated as if it had an infinity.
struct LowRange : NoRange {
  float products = 0.0f;

  using NoRange::see;
  __device__ __forceinline__ void see(const Words& low) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      products = fmaf(__uint_as_float(low.word[i]), __uint_as_float(low.word[i + 1]), products);
    }
  }
  __device__ bool finite() const { return is_finite(products); }
};

using Scale = Either<kScalesInput, Powers, NoPowers>::type;
using Range = Either<kScalesInput, HalfRange, Either<kWatches, LowRange, NoRange>::type>::type;
using WeightRange = Either<C::scaled_fp16, HalfRange, NoRange>::type;

// Writes a vector of Words. float32 is rounded to TF32, or split into the two parts of 3xTF32,
// which are part_bytes apart; 16-bit types are written as they are.
template <bool kWeight, class Seen>
__device__ __forceinline__ void store_parts(unsigned char* target, int part_bytes, Words vector,
                                            Seen& seen) {
  if constexpr (sizeof(Scalar) == 4 && C::parts == 1) {
#pragma unroll
    for (unsigned& word : vector.word) {
      const float value = __uint_as_float(word);
      word = __float_as_uint(C::ties_to_even ? round_to_even_tf32(value)
                                             : round_operand_to_tf32(value));
    }
  } else if constexpr (sizeof(Scalar) == 4) {
    Words low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split(__uint_as_float(vector.word[i]), vector.word[i], low.word[i]);
    }
    seen.see(low);
    *reinterpret_cast<Words*>(target + part_bytes) = low;
  }
  *reinterpret_cast<Words*>(target) = vector;
}

// Writes a vector as scaled fp16. In two parts, the low part of the input is enlarged by
// kLowFactor, and multiplied by a third part of the weights, which is as much smaller.
template <bool kWeight, class Seen>
__device__ __forceinline__ void store_parts(unsigned char* target, int part_bytes,
                                            const Numbers& scaled, Seen&) {
  Words high, low, smaller;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = scaled.number[2 * i];
    const float second = scaled.number[2 * i + 1];
    const bool to_even = C::parts == 2 || C::ties_to_even;
    high.word[i] = to_even ? floats_to_halves(first, second) : round_to_halves(first, second);
    if constexpr (C::parts == 2) {
      low.word[i] = low_halves(first, second, high.word[i], kWeight ? 1.0f : kLowFactor);
      if constexpr (kWeight) {
        const float first_high = half_to_float(static_cast<unsigned short>(high.word[i]));
        const float second_high = half_to_float(static_cast<unsigned short>(high.word[i] >> 16));
        smaller.word[i] = floats_to_halves(first_high / kLowFactor, second_high / kLowFactor);
      }
    }
  }
  *reinterpret_cast<Words*>(target) = high;
  if constexpr (C::parts == 2) *reinterpret_cast<Words*>(target + part_bytes) = low;
  if constexpr (kWeight && kSmallerPart) {
    *reinterpret_cast<Words*>(target + 2 * part_bytes) = smaller;
  }
}

// Writes a vector of the input, as it was loaded.
template <class Seen>
__device__ __forceinline__ void store_input(unsigned char* target, int part_bytes,
                                            const Words& vector, const NoPowers&, Seen& range) {
  store_parts<false>(target, part_bytes, vector, range);
}
__device__ __forceinline__ void store_input(unsigned char* target, int part_bytes,
                                            const Numbers& vector, const Powers& powers,
                                            HalfRange& range) {
  const Numbers scaled = powers.scale(vector);
  range.see(scaled);
  store_parts<false>(target, part_bytes, scaled, range);
}

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/tensor/half_copy.cuh"] = r"""
// The input of scaled fp16 as a channels-last copy in float16, which a launch before the
// convolution makes in the workspace (scale.cuh): whether there is one, and what the input's
// elements are then.
//
// `copied_planes` planes that are written, all those of a volume, read one copy. The kernel that
// repairs reads the tensor itself, but the tables of the same volumes.
//
// A copy may be that of a slab, some rows of all planes of some volumes (planning/slabs.py). Then
// launches are told the slab's volumes, and the first row that is copied or that is written. A
// function's parameters cannot depend on Config, only on what the preprocessor can do:
// FASTCONV_SLABS is defined where Config has slabs.
#include "device/epilogue.cuh"
#include "device/tensor/depth.cuh"

namespace fastconv {
namespace tensor {

template <class Config, class = void>
struct HalfCopyOf {
  static constexpr bool exists = false;
  static constexpr int planes = 1;
};
template <class Config>
struct HalfCopyOf<Config, typename Exists<decltype(Config::copied_planes)>::type> {
  static constexpr bool exists = true;
  static constexpr int planes = Config::copied_planes;
};
using HalfCopy = HalfCopyOf<C>;

#undef FASTCONV_SLAB_PARAMETERS  // an exported file has this text several times
#undef FASTCONV_SLAB
#ifdef FASTCONV_SLABS
struct Slab {
  int row, first_volume, volumes;

  // Images of the slab, of a batch of so many.
  __device__ __forceinline__ int images_of(int) const { return volumes * Depth::out; }
};
#define FASTCONV_SLAB_PARAMETERS , int slab_row, int first_volume, int slab_volumes
#define FASTCONV_SLAB \
  fastconv::tensor::Slab { slab_row, first_volume, slab_volumes }
#else
struct Slab {
  static constexpr int row = 0, first_volume = 0;

  __device__ __forceinline__ static int images_of(int batch) { return batch; }
};
#define FASTCONV_SLAB_PARAMETERS
#define FASTCONV_SLAB \
  fastconv::tensor::Slab {}
#endif

// The rows of planes that slabs are copied from.
template <class Config, class = void>
struct SlabsOf {
  static constexpr bool exists = false;
  static constexpr int source_height = Config::in_height;
};
template <class Config>
struct SlabsOf<Config, typename Exists<decltype(Config::source_height)>::type> {
  static constexpr bool exists = true;
  static constexpr int source_height = Config::source_height;
};

// The input as the convolution loads it: elements, how many of them are 16 bytes, and the format.
constexpr bool kLoadsCopy = HalfCopy::exists && C::scaled_fp16;
using Loaded = Either<kLoadsCopy, float16, Scalar>::type;
constexpr int kLoadedVector = 16 / static_cast<int>(sizeof(Loaded));
constexpr bool kLoadedLast = C::in_channels_last || kLoadsCopy;

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/tensor/powers.cuh"] = r"""
// Scaled fp16: powers of two that bring numbers into float16's range, and the block-wide reductions
// that find them.
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace tensor {

// The exponent that the largest number of a sample is scaled to: numbers outside of the sample may
// be 2^4 times as large.
constexpr int kSampleExponent = 11;
// Bounds the exponents of numbers that are scaled, so that the product of two scales is a normal
// number.
constexpr int kMostExponent = 50;

// In two-part scaled fp16, the low part is stored this many times larger than it counts, so that it
// has the high part's range.
constexpr float kLowFactor = 2048.0f;

// The low parts of two numbers whose float16 is `high`: what is left of them, times `factor`.
__device__ __forceinline__ unsigned low_halves(float first, float second, unsigned high,
                                               float factor) {
  const float first_high = half_to_float(static_cast<unsigned short>(high));
  const float second_high = half_to_float(static_cast<unsigned short>(high >> 16));
  return floats_to_halves((first - first_high) * factor, (second - second_high) * factor);
}

// Reduces a value over the lanes of a warp, in a fixed order.
template <class Value, class Combine>
__device__ __forceinline__ Value warp_combined(Value value, Combine combine) {
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, flip));
  }
  return value;
}

// Reduces a value over the threads of a block of whole warps.
template <class Value, class Combine>
__device__ __forceinline__ Value block_combined(Value value, Combine combine) {
  auto* const of_warps = reinterpret_cast<Value*>(shared_memory());
  value = warp_combined(value, combine);
  __syncthreads();  // values of the last call have been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
  for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) value = combine(value, of_warps[i]);
  return value;
}
__device__ __forceinline__ float block_largest(float number) {
  return block_combined(number, larger);
}
template <class Value>
__device__ __forceinline__ Value sum_of(Value first, Value second) {
  return first + second;
}

// The bit patterns of 2^-100 and 2^100.
constexpr unsigned kLeastBits = 27u << 23, kMostBits = 227u << 23;

// The power of two at the mean exponent of `count` numbers, whose biased exponents add up to
// `exponents`; 1 if there are no numbers.
__device__ __forceinline__ float mean_power(int exponents, int count) {
  if (count == 0) return 1.0f;
  const unsigned bits = static_cast<unsigned>((exponents + count / 2) / count) << 23;
  return __uint_as_float(min(max(bits, kLeastBits), kMostBits));
}
// The inverse of a power of two.
__device__ __forceinline__ float inverse(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// The power of two that scales a number to this exponent. It is 1 for zero, and 0 if the number is
// too large, too small or NaN.
__device__ __forceinline__ float scale_to(float number, int exponent) {
  if (number == 0.0f) return 1.0f;
  const int its = static_cast<int>(__float_as_uint(number) >> 23 & 255u) - 127;
  if (its < -kMostExponent || its > kMostExponent) return 0.0f;
  return __uint_as_float(static_cast<unsigned>(127 + exponent - its) << 23);
}

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/tensor/tile.cuh"] = r"""
// The halo tile of the forward and input-gradient kernels: its layout in shared memory, and how
// blocks divide an image. What else a kernel keeps in shared memory is in its own headers.
//
// Both operands consist of vectors of 16 bytes, channels that one MMA multiplies:
//
//   input   [16 bytes of channels][row][pixel][16 bytes]     a halo tile, loaded once for all taps
//   weights [tap][2][register_tile_m output channels][16 bytes]
#include "device/tensor/depth.cuh"
#include "device/tensor/operand.cuh"
#include "device/tensor/ring.cuh"
#include "device/tile.cuh"

namespace fastconv {
namespace tensor {

// The MMA's operand type: the tensor's own, or scaled fp16 for float32 (see scale.cuh).
using Factor = Either<C::scaled_fp16, Float16, Operand>::type;
constexpr int kVectorChannels = C::scaled_fp16 ? 8 : kVector;  // channels in 16 bytes

constexpr int kChunkPlanes = 2 * C::k_steps;
constexpr int kChunkChannels = kChunkPlanes * kVectorChannels;
constexpr int kChunks = ceil_div(C::group_in, kChunkChannels);

// Input rows of a tile are grouped by their residue modulo the stride, and tap k reads residue k %
// kRowResidues. Output rows of a tile are kRowStep apart.
constexpr int kRowResidues = C::stride_height / gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / gcd(C::stride_height, C::dilation_height);
constexpr int kRowSlots = C::kernel_height < kRowResidues ? C::kernel_height : kRowResidues;

// Columns are grouped by their residue likewise; output pixels of a tile are neighbours.
constexpr int kColumnUnit = gcd(C::stride_width, C::dilation_width);
constexpr int kColumnResidues = C::stride_width / kColumnUnit;
constexpr int kColumnStep = C::dilation_width / kColumnUnit;
constexpr int kColumnSlots = C::kernel_width < kColumnResidues ? C::kernel_width : kColumnResidues;

constexpr int kTapRows = C::kernel_height + C::stack - 1;
constexpr int kTaps = kTapRows * C::kernel_width;
constexpr int kWeightStages = kTaps / C::stage_taps;  // stages of one chunk's weights
static_assert(kTaps % C::stage_taps == 0, "stages hold whole taps");

constexpr int kTileRows = C::block_rows;  // output rows of a tile
constexpr int kHaloRows = kTileRows + (C::kernel_height - 1) / kRowResidues;
static_assert(C::lead + C::tile_columns + (C::kernel_width - 1) * kColumnStep / kColumnResidues <=
                  C::pitch,
              "a row holds its halo");

constexpr int kStageRows = C::rolling ? 1 : kHaloRows;
// Pixels of one residue of the rows and the columns.
constexpr int kSlotPixels = kStageRows * C::pitch;
constexpr int kLines = kRowSlots * kColumnSlots * kStageRows;  // rows of all residues in one plane
constexpr int kPlanePixels = kLines * C::pitch + C::plane_padding;
constexpr int kPlaneBytes = kPlanePixels * 16;
constexpr int kPartPixels = kChunkPlanes * kPlanePixels;

// Depth-to-space: the residues of a strided input gradient that are output channels of one layer
// (`d2s_*`), along both axes; and the output channels of a group in memory.
constexpr int kOutResidues = C::d2s_height * C::d2s_width;
constexpr bool kDepthToSpace = kOutResidues > 1;
constexpr int kOutGroup = C::group_out / kOutResidues;

constexpr int kOutputs = C::register_tile_m;
constexpr int kStackRows =
    kOutputs / (C::stack * C::stacked_columns);  // MMA rows of one output row
// Output channels of one output row. With depth-to-space, channels that are neighbours in memory
// stay in one MMA.
constexpr int kStackChannels =
    kDepthToSpace ? kStackRows / C::interleave * C::interleave : kStackRows;
constexpr int kAOperandBytes = kOutputs * 32;
// Scaled fp16 in two parts stores the high part of the weights a second time, multiplied by 2^-11,
// unless consumers compute it from the first.
constexpr bool kSmallerPart = C::scaled_fp16 && C::parts == 2 && C::smaller_part;
constexpr int kWeightParts = C::parts + kSmallerPart;
constexpr int kTapBytes = C::k_steps * kWeightParts * C::channel_groups * kAOperandBytes;
constexpr int kWeightBytes = C::stage_taps * kTapBytes;

// The index of an MMA row among the rows of its output column. Two columns of a pixel, or two
// neighbouring depth-to-space channels, are eight MMA rows apart, so that one thread has both.
__device__ __forceinline__ int row_of_column(int m) {
  if constexpr (kDepthToSpace) {
    return m / 16 * 16 + m % 8 * 2 + m / 8 % 2;
  } else {
    return C::stacked_columns == 1 ? m : m / 16 * 8 + m % 8;
  }
}
static_assert(C::stacked_columns == 1 ||
                  (C::stacked_columns == 2 && C::interleave == 2 && !kDepthToSpace),
              "pairs");
static_assert(kStackRows >= 8, "eight rows of an MMA are neighbouring channels");
static_assert(!kDepthToSpace || kStackChannels > 0, "a position's neighbours are in one MMA");

// With a lead, a row's first strip begins up to lead - 1 columns before the image.
constexpr int kStrips = ceil_div(C::out_width + (C::lead > 0 ? C::lead - 1 : 0), C::tile_columns);

// With `wraps`, the last strip of a row continues with the next row. A line of the tile holds the
// input of both, so kGap columns without outputs lie between the two rows' outputs.
constexpr int kGap = (C::kernel_width - 1) * C::dilation_width;
constexpr int kPaddedWidth = C::out_width + kGap;

// 3xTF32 keeps infinities and NaN of the input in the low part (see `split`). Two kinds of
// accumulation would turn an infinite result into NaN: short ones, which also multiply low parts by
// each other, and compensated ones. There, loaders mark stages that hold such a number, and
// consumers of a marked stage replace intermediate values that are not finite by zero.
constexpr bool kWatches = C::watches;
static_assert(!kWatches || (C::parts == 2 && !C::scaled_fp16), "");

// --- Work items ----------------------------------------------------------------------------------

constexpr int kOutputGroups = ceil_div(C::group_out, C::channel_groups* kStackChannels);
constexpr int kRowTiles = ceil_div(ceil_div(C::out_height, kRowStep), kTileRows);
constexpr int kSegments = ceil_div(kRowTiles, C::segment_tiles);
constexpr int kItemsPerImage = kOutputGroups * kStrips * kSegments * kRowStep * C::groups;

// A work item of a block: segment_tiles tiles, one below the other.
struct Item {
  int outputs;  // first output channel, in the group
  int column;   // first output column
  int tile;     // first tile, from the top of the image
  int tiles;
  int row_residue;
  int group;
  int image;

  __device__ explicit Item(int index) {
    outputs = index % kOutputGroups * (C::channel_groups * kStackChannels);
    index /= kOutputGroups;
    column = index % kStrips * C::tile_columns;
    index /= kStrips;
    tile = index % kSegments * C::segment_tiles;
    tiles = min(C::segment_tiles, kRowTiles - tile);
    index /= kSegments;
    row_residue = index % kRowStep;
    index /= kRowStep;
    group = index % C::groups;
    image = index / C::groups;
  }

  // Input stages of one chunk.
  __device__ int stages() const {
    return C::rolling ? tiles * kTileRows + C::kernel_height - 1 : 1;
  }
};

// --- Channels ------------------------------------------------------------------------------------

// A space-to-depth channel of the group's input: a channel in memory, at one residue of the stride.
struct SpaceToDepthChannel {
  int channel, row, column;

  __device__ explicit SpaceToDepthChannel(int index)
      : channel(index / (C::s2d_height * C::s2d_width)),
        row(index / C::s2d_width % C::s2d_height),
        column(index % C::s2d_width) {}
};

// A depth-to-space channel of the group's output: a channel in memory, at one residue of the
// stride. Channels that are neighbours in memory have neighbouring indices.
struct DepthToSpaceChannel {
  int channel, row, column;

  __device__ __forceinline__ explicit DepthToSpaceChannel(int index) {
    if constexpr (!kDepthToSpace) {
      channel = index;
      row = column = 0;
    } else if constexpr (C::out_channels_last) {
      channel = index % kOutGroup;
      column = index / kOutGroup % C::d2s_width;
      row = index / (kOutGroup * C::d2s_width);
    } else {
      column = index % C::d2s_width;
      row = index / C::d2s_width % C::d2s_height;
      channel = index / kOutResidues;
    }
  }
};

// Whether a kernel has a tap at a place of an axis, where its taps are `dilation` apart.
__device__ __forceinline__ bool is_tap(int place, int taps, int dilation) {
  return place >= 0 && place < taps * dilation && place % dilation == 0;
}

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/tensor/depth.cuh"] = r"""
// The depth of a volume's convolution (device/depth.cuh), for tensor cores: an output plane is an
// image of its own, and the planes that it reads are further input channels.
//
// A group's channels and a kernel of `kernel` planes make channels of the reduction, those of the
// first plane's tap first: channel c at tap t is number t * channels + c, and reads plane `stride *
// z + dilation * t - padding` for output plane z. Planes outside of the volume are zeros. `batch`
// counts output planes: those of the first volume, then those of the second.
#include "device/depth.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace tensor {

using Depth = DepthOf<C>;

// Where the planes of a layer lie that computes an input gradient, perhaps one residue of its
// stride along depth: plane z is written at `step * z + at` of `planes`, and the layer's taps are
// `tap_step` apart in the kernel, backwards from `last_tap`.
template <class Config, class = void>
struct DepthPlacingOf {
  static constexpr int planes = 1, step = 1, at = 0, last_tap = 0, tap_step = 1;
};
template <class Config>
struct DepthPlacingOf<Config, typename Exists<decltype(Config::image_depth)>::type> {
  static constexpr int planes = Config::image_depth, step = Config::out_step_depth,
                       at = Config::plane_at, last_tap = Config::last_tap_plane,
                       tap_step = Config::tap_step_depth;
};
using DepthPlacing = DepthPlacingOf<C>;

// One of a group's channels of the reduction: one of kChannels in memory, at a tap of the depth.
template <int kChannels>
struct DepthChannel {
  int channel, tap;

  __device__ __forceinline__ explicit DepthChannel(int index)
      : channel(Depth::exists ? index % kChannels : index),
        tap(Depth::exists ? index / kChannels : 0) {}

  // The plane that it reads, counted from the first one that an output plane reads.
  __device__ __forceinline__ int plane() const { return Depth::dilation * tap; }
};

// A channel of the reduction as functions of weights take it: in volumes, with its tap.
template <int kChannels>
__device__ __forceinline__ auto depth_channel(int index) {
  if constexpr (Depth::exists) {
    return DepthChannel<kChannels>(index);
  } else {
    return index;
  }
}

// The first plane that an image of the batch reads, which may lie outside.
__device__ __forceinline__ int front_of(int image) {
  return Depth::exists ? image % Depth::out * Depth::stride - Depth::padding : 0;
}

// The first plane that an image reads. Images without depth have no member for it: it would cost
// them nothing, but the compiler would order their instructions otherwise.
template <bool kExists>
struct FrontOf {
  int front;

  __device__ __forceinline__ explicit FrontOf(int front = 0) : front(front) {}
};
template <>
struct FrontOf<false> {
  static constexpr int front = 0;

  __device__ __forceinline__ explicit FrontOf(int = 0) {}
};
using Front = FrontOf<Depth::exists>;

__device__ __forceinline__ bool plane_inside(int plane) {
  return !Depth::exists || static_cast<unsigned>(plane) < static_cast<unsigned>(Depth::in);
}

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/tensor/ring.cuh"] = r"""
// The pipeline: a ring of stages in shared memory that producers fill and consumers empty.

namespace fastconv {
namespace tensor {

// A position in the ring, with the parity of the stage's mbarrier phase. Producers start with
// parity 1 and consumers with 0: all stages are empty at first.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity;

  __device__ explicit Ring(unsigned first_parity) : parity(first_parity) {}
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/depth.cuh"] = r"""
// The depth of a volume's convolution: one more coordinate of taps and of positions.
//
// The planes that an output plane reads are further channels of the reduction. A group of group_in
// channels and a kernel of kTaps planes make group_in * kTaps channels, those of the first tap
// first. Planes outside of the volume are zeros. The convolution of images has no constants for
// depth: it is that of volumes of one plane.
#include "device/epilogue.cuh"

namespace fastconv {

template <class Config, class = void>
struct DepthOf {
  static constexpr bool exists = false;
  static constexpr int in = 1, out = 1, kernel = 1, stride = 1, dilation = 1, padding = 0,
                       weight_stride = 0;
};
template <class Config>
struct DepthOf<Config, typename Exists<decltype(Config::kernel_depth)>::type> {
  static constexpr bool exists = true;
  static constexpr int in = Config::in_depth, out = Config::out_depth,
                       kernel = Config::kernel_depth, stride = Config::stride_depth,
                       dilation = Config::dilation_depth, padding = Config::padding_front,
                       weight_stride = Config::weight_stride_depth;
};

}  // namespace fastconv
"""

SOURCES["device/tensor/operand.cuh"] = r"""
// The element type of a kernel's tensors, and the MMA operand type that it becomes.
#include "device/scalar.cuh"
#include "device/sm80.cuh"

namespace fastconv {
namespace tensor {

template <class T>
struct OperandOf;
template <>
struct OperandOf<float> {
  using type = Tf32;
};
template <>
struct OperandOf<float16> {
  using type = Float16;
};
template <>
struct OperandOf<bfloat16> {
  using type = Bfloat16;
};

template <bool kFirst, class First, class Second>
struct Either {
  using type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
  using type = Second;
};

using C = Config;
using Scalar = C::Scalar;
using Operand = OperandOf<Scalar>::type;

constexpr int kScalarBytes = static_cast<int>(sizeof(Scalar));
constexpr int kVector = 16 / kScalarBytes;  // elements in 16 bytes

// The number of elements of a tensor of these sizes. Plans are made only for images of fewer than
// kMostElements, so offsets within an image are 32-bit numbers (planning/limits.py). Offsets of
// places outside of it, in padding or where tiles overhang, may be larger: see IndexTo.
constexpr long long kMostElements = 1LL << 30;
template <class... Sizes>
__host__ __device__ constexpr long long elements_of(Sizes... sizes) {
  return (1LL * ... * sizes);
}

// 3xTF32: splits a number into two parts with TF32's mantissa. For infinity and NaN, the low part
// is the number itself and the high part is TF32's largest number with its sign. So of the three
// products
//
//   low_x high_y + high_x low_y + high_x high_y,
//
// the first is infinite if x is, with the sign of x y, or NaN if y = 0; the others are finite, or
// overflow with the same sign. If x and y are both infinite, all three products equal x y.
__device__ __forceinline__ void split(float value, unsigned& high, unsigned& low) {
  constexpr unsigned kLargest = 0x7f7fe000u;
  const float rounded = round_to_even_tf32(limited(value, __uint_as_float(kLargest)));
  high = __float_as_uint(rounded);
  low = __float_as_uint(round_to_even_tf32(value - rounded));
}

// Splits an operand of an MMA with ties away from zero. Before sm_90 this takes half as many
// instructions as rounding ties to even.
__device__ __forceinline__ void split_away(float value, unsigned& high, unsigned& low) {
  // Stays finite when half of its last TF32 bit is added.
  constexpr unsigned kLargest = 0x7f7fe000u;
  high = (__float_as_uint(limited(value, __uint_as_float(kLargest))) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(round_operand_to_tf32(value - __uint_as_float(high)));
}

__device__ __forceinline__ bool is_finite(float value) {
  return fabsf(value) < __uint_as_float(0x7f800000u);
}

// Replaces infinities and NaN by zero.
template <int kCount>
__device__ __forceinline__ void drop_infinite(float (&accs)[kCount]) {
#pragma unroll
  for (float& acc : accs) acc = is_finite(acc) ? acc : 0.0f;
}

// The bits of an element, or zero if not `valid`.
__device__ __forceinline__ unsigned load_bits(const float* element, bool valid) {
  return __float_as_uint(load_or_zero(element, valid));
}
template <class Half>
__device__ __forceinline__ unsigned load_bits(const Half* element, bool valid) {
  return load_or_zero(reinterpret_cast<const unsigned short*>(element), valid);
}

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["device/epilogue.cuh"] = r"""
// The epilogue of a forward pass: output = activation(acc + residual), where the accumulator
// already contains the bias. It is computed in the accumulator's type and rounded once, when it is
// stored.
//
// A kernel's Config has `activation`, one of the types below, and `residual`. A pass without an
// epilogue has neither. A residual adds a last parameter to the kernel's signature, which only the
// preprocessor can do: FASTCONV_RESIDUAL is defined where Config has a residual.
#include "device/tile.cuh"

namespace fastconv {

// --- Activations ---------------------------------------------------------------------------------
// Activations follow PyTorch's formulas. NaN stays NaN.

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float error_function(float x) { return erff(x); }
__device__ __forceinline__ double error_function(double x) { return erf(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }

struct Identity {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x;
  }
};

struct Relu {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x < Acc(0) ? Acc(0) : x;
  }
};

struct Relu6 {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x < Acc(0) ? Acc(0) : x > Acc(6) ? Acc(6) : x;
  }
};

// kSlope is the bit pattern of a double.
template <unsigned long long kSlope>
struct LeakyRelu {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    const double slope = __longlong_as_double(static_cast<long long>(kSlope));
    return x > Acc(0) ? x : x * static_cast<Acc>(slope);
  }
};

struct Sigmoid {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return Acc(1) / (Acc(1) + exponential(-x));
  }
};

struct Silu {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x / (Acc(1) + exponential(-x));
  }
};

struct Gelu {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x * Acc(0.5) * (Acc(1) + error_function(x * Acc(0.70710678118654752440)));
  }
};

struct GeluTanh {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    const Acc inner = Acc(0.79788456080286535588) * (x + Acc(0.044715) * x * x * x);
    return Acc(0.5) * x * (Acc(1) + hyperbolic_tangent(inner));
  }
};

struct Hardswish {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return x * Relu6::of(x + Acc(3)) * Acc(1.0 / 6.0);
  }
};

struct Tanh {
  template <class Acc>
  __device__ __forceinline__ static Acc of(Acc x) {
    return hyperbolic_tangent(x);
  }
};

// --- The bias ------------------------------------------------------------------------------------

// Loads kCount consecutive bias elements: as one vector if the plan guarantees that their address
// is aligned to the vector, else one by one.
template <int kCount, bool kAligned, class Scalar>
__device__ __forceinline__ Vector<Scalar, kCount> load_bias(const Scalar* first) {
  if constexpr (kAligned) {
    static_assert(kCount == 1 || kCount * sizeof(Scalar) <= 4, "BIAS_ALIGNMENT of family.py");
    return *reinterpret_cast<const Vector<Scalar, kCount>*>(first);
  } else {
    Vector<Scalar, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.element[i] = first[i];
    return vector;
  }
}

// --- The epilogue --------------------------------------------------------------------------------

template <class>
struct Exists {
  using type = void;
};
template <class Config, class = void>
struct ActivationOf {
  using type = Identity;
};
template <class Config>
struct ActivationOf<Config, typename Exists<typename Config::activation>::type> {
  using type = typename Config::activation;
};

#ifdef FASTCONV_RESIDUAL
constexpr bool kAddsResidual = true;
#define FASTCONV_WITH_RESIDUAL(...) , __VA_ARGS__
#define FASTCONV_EPILOGUE(output) fastconv::Epilogue<Config>(residual, output)
#else
constexpr bool kAddsResidual = false;
#define FASTCONV_WITH_RESIDUAL(...)
#define FASTCONV_EPILOGUE(output) fastconv::Epilogue<Config>()
#endif
#define FASTCONV_RESIDUAL_PARAMETER \
  FASTCONV_WITH_RESIDUAL(const Config::Scalar* __restrict__ residual)

// Stands for the residual in a pass that has none.
struct Nothing {};
template <bool kAdds, class Scalar>
struct ResidualOf {
  using type = Nothing;
};
template <class Scalar>
struct ResidualOf<true, Scalar> {
  using type = Scalar;
};

template <class Config>
struct Epilogue {
  using Scalar = typename Config::Scalar;
  using Acc = typename AccOf<Scalar>::type;
  using Residual = typename ResidualOf<kAddsResidual, Scalar>::type;

#ifdef FASTCONV_RESIDUAL
  // Bytes from an output element to the residual element that is added to it. Both tensors have the
  // same layout, so this distance is constant.
  long long distance;

  __device__ Epilogue(const Scalar* residual, const Scalar* output)
      : distance(reinterpret_cast<long long>(residual) - reinterpret_cast<long long>(output)) {}
#else
  static constexpr long long distance = 0;
#endif

  // The address of the residual of the output at `target`.
  template <class Stored>
  __device__ __forceinline__ const Stored* beside(const Stored* target) const {
    return reinterpret_cast<const Stored*>(reinterpret_cast<long long>(target) + distance);
  }

  // Loads the residuals of kCount consecutive outputs, or zeros if these are not `valid`.
  template <int kCount>
  __device__ __forceinline__ Vector<Scalar, kCount> residual_of(const Scalar* target,
                                                                bool valid) const {
    constexpr int kBytes = kCount * static_cast<int>(sizeof(Scalar));
    constexpr int kLoads = kBytes > 16 ? kBytes / 16 : 1;
    using Loaded = typename Bits<kBytes / kLoads>::type;
    Vector<Scalar, kCount> vector = {};
    if (valid) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        reinterpret_cast<Loaded*>(&vector)[i] =
            __ldg(reinterpret_cast<const Loaded*>(beside(target)) + i);
      }
    }
    return vector;
  }

  __device__ __forceinline__ Residual residual_of(const Scalar* target) const {
    if constexpr (kAddsResidual) {
      return residual_of<1>(target, true).element[0];
    } else {
      return {};
    }
  }

  // The residual that the kernel has staged at `place`, if the pass has a residual.
  __device__ __forceinline__ static Residual staged(const Scalar& place) {
    if constexpr (kAddsResidual) {
      return place;
    } else {
      return {};
    }
  }

  // Applies the residual and the activation to one accumulator.
  __device__ __forceinline__ static Acc activated(Acc acc, Nothing = {}) {
    return ActivationOf<Config>::type::of(acc);
  }
  __device__ __forceinline__ static Acc activated(Acc acc, Scalar residual) {
    return activated(acc + Acc(widen(residual)));
  }

  // Turns kCount accumulators into outputs, which are stored side by side at `target` if they are
  // `valid`.
  template <int kCount>
  __device__ __forceinline__ Vector<Scalar, kCount> operator()(const Acc (&accs)[kCount],
                                                               const Scalar* target,
                                                               bool valid = true) const {
    Vector<Scalar, kCount> vector;
    if constexpr (kAddsResidual) {
      const Vector<Scalar, kCount> residual = residual_of<kCount>(target, valid);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        vector.element[i] = narrow<Scalar>(activated(accs[i], residual.element[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) vector.element[i] = narrow<Scalar>(activated(accs[i]));
    }
    return vector;
  }
  __device__ __forceinline__ Scalar operator()(Acc acc, const Scalar* target) const {
    const Acc accs[1] = {acc};
    return (*this)(accs, target).element[0];
  }
};

}  // namespace fastconv
"""

SOURCES["device/tile.cuh"] = r"""
// Integer arithmetic, index types and vectors that all kernels share.
#include "device/scalar.cuh"

namespace fastconv {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }
// Division that rounds down, also for negative a.
__host__ __device__ constexpr int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

template <class T>
__host__ __device__ constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

template <class T>
__host__ __device__ constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

// The index type for numbers up to kEnd: 32 bits where they suffice, since 64-bit address
// arithmetic takes several times as many instructions.
template <bool kWide>
struct IndexOf {
  using type = int;
};
template <>
struct IndexOf<true> {
  using type = long long;
};
template <long long kEnd>
using IndexTo = typename IndexOf<(kEnd >= 1ll << 31)>::type;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T element[kCount];
};
// 16 bytes are the widest access of one instruction: a wider vector is read by several, and needs
// no more than their alignment.
template <>
struct alignas(16) Vector<double, 4> {
  double element[4];
};

// Loads four consecutive elements and widens them to the accumulator's type.
template <class T>
__device__ __forceinline__ void load4(const T* source, typename AccOf<T>::type (&target)[4]) {
  const Vector<T, 4> four = *reinterpret_cast<const Vector<T, 4>*>(source);
#pragma unroll
  for (int i = 0; i < 4; ++i) target[i] = widen(four.element[i]);
}

// Copies kCount consecutive elements to shared memory, or writes zeros. cp.async copies 4 bytes or
// more; fewer are copied synchronously.
template <int kCount, class T>
__device__ __forceinline__ void copy_elements(T* shared, const T* global, bool valid) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  if constexpr (kBytes >= 4) {
    copy_async<kBytes>(shared, global, valid);
  } else {
    *shared = valid ? *global : T{};
  }
}

}  // namespace fastconv
"""

SOURCES["device/sm80.cuh"] = r"""
// PTX of sm_80 and later, one function for each instruction (ptx.cuh has those of every GPU). The
// CPU emulator has a host version of this file.
#include "device/ptx.cuh"

namespace fastconv {

// --- Loads, stores and conversions ---------------------------------------------------------------

// Loads 2, 4, 8 or 16 bytes that no thread writes while the kernel runs (ld.global.nc), or gives
// zeros if not `valid` (then nothing is read). The load is issued where it is called: the compiler
// does not move volatile assembly. Two bytes are loaded to a 32-bit register of their own: the
// compiler would pack two 16-bit registers into one as soon as the second load is issued, and the
// thread would stall for it.
__device__ __forceinline__ unsigned load_or_zero(const unsigned short* global, bool valid) {
  unsigned value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@p ld.global.nc.u16 %0, [%1];\n"
      "}"
      : "=r"(value)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}
__device__ __forceinline__ float load_or_zero(const float* global, bool valid) {
  float value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.f32 %0, 0f00000000;\n"
      "@p ld.global.nc.f32 %0, [%1];\n"
      "}"
      : "=f"(value)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}
__device__ __forceinline__ uint4 load_or_zero(const uint4* global, bool valid) {
  uint4 value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}

__device__ __forceinline__ uint2 load_or_zero(const uint2* global, bool valid) {
  uint2 value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n"
      "}"
      : "=r"(value.x), "=r"(value.y)
      : "l"(global), "r"(static_cast<int>(valid)));
  return value;
}

// Loads without a predicate. The 16-byte load also prefetches 256 bytes to L2.
__device__ __forceinline__ unsigned short load(const unsigned short* global) {
  unsigned short value;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(value) : "l"(global));
  return value;
}
__device__ __forceinline__ float load(const float* global) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(global));
  return value;
}

__device__ __forceinline__ uint4 load(const uint4* global) {
  uint4 value;
  asm volatile("ld.global.nc.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global));
  return value;
}

// Adds to four consecutive floats in global memory, without a result to wait for. Additions of one
// thread to one address are performed in program order.
__device__ __forceinline__ void add_to_memory(float4* global, float4 values) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global),
               "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
               : "memory");
#else
  asm volatile(
      "red.relaxed.gpu.global.add.f32 [%0], %1;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 4], %2;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 8], %3;\n"
      "red.relaxed.gpu.global.add.f32 [%0 + 12], %4;" ::"l"(global),
      "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
      : "memory");
#endif
}

// Adds to a counter in global memory that threads of several blocks may add to.
__device__ __forceinline__ void add_to_memory(unsigned* global, unsigned value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// Prepares an operand of a TF32 MMA, which ignores the last 13 bits of its mantissa: the result
// makes that truncation a rounding to nearest, ties away from zero.
__device__ __forceinline__ float round_operand_to_tf32(float value) {
  float result;
  asm("{\n"
      ".reg .pred finite;\n"
      ".reg .f32 magnitude;\n"
      ".reg .b32 bits;\n"
      "abs.f32 magnitude, %1;\n"
      "setp.lt.f32 finite, magnitude, 0f7f800000;\n"
      "mov.b32 bits, %1;\n"
      "@finite add.u32 bits, bits, 0x1000;\n"  // the addition would turn some NaNs into numbers
      "mov.b32 %0, bits;\n"
      "}"
      : "=f"(result)
      : "f"(value));
  return result;
}

// Rounds to TF32's 10-bit mantissa, to nearest, ties to even. sm_90 has an instruction for it;
// rounding ties away from zero takes three.
__device__ __forceinline__ float round_to_even_tf32(float value) {
#if __CUDA_ARCH__ >= 900
  unsigned bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
#else
  const unsigned bits = __float_as_uint(value);
  const unsigned rounded = (bits + 0x0fffu + (bits >> 13 & 1u)) & 0xffffe000u;
  return fabsf(value) < __uint_as_float(0x7f800000u) ? __uint_as_float(rounded) : value;
#endif
}

// Converts two numbers that are not NaN to float16, to nearest, ties away from zero, with `first`
// in the lower 16 bits.
__device__ __forceinline__ unsigned round_to_halves(float first, float second) {
  unsigned bits;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;"
      : "=r"(bits)
      : "f"(__uint_as_float(__float_as_uint(second) + 0x1000u)),
        "f"(__uint_as_float(__float_as_uint(first) + 0x1000u)));
  return bits;
}

// Multiplies two float16 numbers by 2^-11, to nearest, ties to even.
__device__ __forceinline__ unsigned halves_by_2048th(unsigned halves) {
  unsigned result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(halves), "r"(0x10001000u));
  return result;
}

// The larger of two numbers, or NaN if either is NaN.
__device__ __forceinline__ float larger(float first, float second) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(first), "f"(second));
  return result;
}

// `number`, or `most` with its sign if its magnitude is larger or it is NaN.
__device__ __forceinline__ float limited(float number, float most) {
#if __CUDA_ARCH__ >= 860
  float result;
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(result) : "f"(number), "f"(most));
  return result;
#else
  return copysignf(fminf(fabsf(number), most), number);
#endif
}

// --- ldmatrix: matrices of 8 rows of 16 bytes in shared memory -----------------------------------
// Of each matrix, lane 4 g + t gets a fragment of 4 bytes: bytes 4 t to 4 t + 3 of row g. These are
// two 16-bit elements, or one TF32 element.

// Loads four matrices from shared memory. Lane i passes the address of row i % 8 of matrix i / 8, a
// multiple of 16 bytes.
__device__ __forceinline__ void load_matrices(unsigned (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

// Loads four matrices of 8 by 8 16-bit elements, each of them transposed.
__device__ __forceinline__ void load_transposed(unsigned (&fragments)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace fastconv
"""

SOURCES["device/scalar.cuh"] = r"""
// The element types of tensors, and the type that each is accumulated in.
#include "device/ptx.cuh"

namespace fastconv {

struct float16 {
  unsigned short bits;
};

struct bfloat16 {
  unsigned short bits;
};

// The accumulator's type: products are computed and added in it.
template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};

__device__ __forceinline__ float widen(float16 value) { return half_to_float(value.bits); }
__device__ __forceinline__ float widen(bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }

template <class T>
__device__ __forceinline__ T narrow(typename AccOf<T>::type value) {
  return value;
}
template <>
__device__ __forceinline__ float16 narrow<float16>(float value) {
  return {float_to_half(value)};
}
template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16>(float value) {
  return {float_to_bfloat(value)};
}

// The type whose loads and stores move kBytes at once.
template <int kBytes>
struct Bits;
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<4> {
  using type = unsigned;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<16> {
  using type = uint4;
};

}  // namespace fastconv
"""

SOURCES["device/ptx.cuh"] = r"""
// PTX that every supported GPU has, one function for each instruction, with a fallback where sm_80
// added one. sm80.cuh, sm90.cuh, mma.cuh and wgmma.cuh wrap the instructions of newer GPUs in the
// same way. All inline assembly of the kernels is in these five files. The CPU emulator
// (tests/emulator) replaces them by host versions, so it runs the kernels' own sources.

namespace fastconv {

// Tags for the element types of an MMA's operands: float with TF32's mantissa, or a 16-bit type.
struct Tf32 {};
struct Float16 {};
struct Bfloat16 {};

// The thread block's dynamic shared memory.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes (4, 8 or 16) from global to shared memory with cp.async, or writes zeros if not
// `valid` (then `global` is not read). Both addresses are multiples of kBytes. The copy is complete
// after copy_async_wait. GPUs before sm_80 copy synchronously, through registers.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async can copy");
#if __CUDA_ARCH__ >= 800
  // cp.async fills what its source size leaves with zeros.
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
               "l"(global), "n"(kBytes), "r"(valid ? kBytes : 0)
               : "memory");
#else
  unsigned words[kBytes / 4];
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    words[i] = valid ? static_cast<const unsigned*>(global)[i] : 0u;
  }
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) static_cast<unsigned*>(shared)[i] = words[i];
#endif
}

// Commits this thread's copies since the last commit as one group.
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Stores an element if it is `valid`. Stores of 8 or 16 bytes are one predicated instruction,
// without a branch.
template <class T>
__device__ __forceinline__ void store_if(T* global, const T& value, bool valid) {
  if (valid) *global = value;
}
__device__ __forceinline__ void store_if(uint4* global, const uint4& value, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(global),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(valid))
      : "memory");
}
__device__ __forceinline__ void store_if(uint2* global, const uint2& value, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p st.global.v2.b32 [%0], {%1, %2};\n"
      "}" ::"l"(global),
      "r"(value.x), "r"(value.y), "r"(static_cast<int>(valid))
      : "memory");
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Rounds to nearest, ties to even; GPUs before sm_80 have no instruction for it. NaN stays NaN.
__device__ __forceinline__ unsigned short float_to_bfloat(float value) {
#if __CUDA_ARCH__ >= 800
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// Converts two floats to a pair of 16-bit floats, to nearest, ties to even, with `first` in the
// lower 16 bits. Needs sm_80.
__device__ __forceinline__ unsigned floats_to_halves(float first, float second) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
__device__ __forceinline__ unsigned floats_to_bfloats(float first, float second) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// 2^x and 1 / x, with an error of about 2^-22; subnormal numbers count as zero. One instruction
// each: expf and a division take some eight.
__device__ __forceinline__ float exp2_approximately(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float inverse_approximately(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Returns `number` as a value that the compiler cannot relate to the argument. Expressions that
// depend on it are recomputed instead of being kept in registers.
__device__ __forceinline__ int once_more(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Returns `number` as a value that the compiler cannot recompute, so that it stays in a register.
__device__ __forceinline__ float kept(float number) {
  asm volatile("" : "+f"(number));
  return number;
}
__device__ __forceinline__ double kept(double number) {
  asm volatile("" : "+d"(number));
  return number;
}

// --- Named barriers (bar.sync, bar.arrive) -------------------------------------------------------
// A named barrier has a number from 1 to 15 and an expected number of threads, which are whole
// warps. Threads that only signal use bar.arrive; threads that wait for all of them use bar.sync,
// and then see what every participant wrote before.

__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void come_to(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fastconv
"""

SOURCES["ampere/halo/store.cuh"] = r"""
// The epilogue: from a warp's accumulators through shared memory to global memory.
#include "ampere/halo/multiply.cuh"
#include "device/tensor/target.cuh"

namespace fastconv {
namespace ampere {

// How accumulators of a warp's rows become outputs (bias, scale). Each lane holds this for every
// 32nd row.
struct Finishes {
  static constexpr int kRows = ceil_div(kOutputs, 32);  // rows of a lane
  Finish of[kRows];

  __device__ Finishes(const Scalar* bias, const Items& items, Scalar* output, const Item& item,
                      const Multiplier& warp) {
    const Target target(output, item, 0, warp.channel_group, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = 32 * i + warp.lane;
      if (kOutputs % 32 == 0 || row < kOutputs) of[i] = finish_of(bias, items, item, target, row);
    }
  }
  // Returns the Finish of the row that a lane holds among eight rows.
  __device__ __forceinline__ Finish of_eight(int eight, int lane) const {
    const int source = eight % 4 * 8 + lane / 4;
    Finish finish;
    finish.bias = __shfl_sync(~0u, of[eight / 4].bias, source);
    if constexpr (C::scaled_fp16) finish.factor = __shfl_sync(~0u, of[eight / 4].factor, source);
    return finish;
  }
};

using Stored = Bits<C::store_vector * kScalarBytes>::type;
static_assert(C::store_vector == 1 || C::out_channels_last || kStoredStep == 1, "neighbours");

// A pixel of the tile that a lane stores.
struct Spot {
  int line, column;
  bool valid;

  __device__ Spot(const Target& target, int pixel) {
    line = pixel / C::tile_columns;
    column = target.column + pixel % C::tile_columns;
    valid = pixel < kTilePixels && column < C::out_width;
  }
  // Loads residuals to where outputs will be staged.
  __device__ __forceinline__ void load(const Target& target, const Epilogue<C>& epilogue,
                                       Scalar* staged, int channel) const {
    *reinterpret_cast<Vector<Scalar, C::store_vector>*>(staged) =
        epilogue.residual_of<C::store_vector>(target.place(channel, line, column),
                                              valid && target.exists(channel, line));
  }
  __device__ __forceinline__ void store(const Target& target, const Scalar* staged,
                                        int channel) const {
    target.store(channel, line, column, *reinterpret_cast<const Stored*>(staged),
                 valid && target.exists(channel, line));
  }
};

__host__ __device__ constexpr int power_of_two_in(int n) { return n & -n; }

// Finishes a lane's accumulators of two pixels of a channel and stages them, for contiguous
// outputs. Residuals have been loaded to the same places.
__device__ __forceinline__ void stage_row(Scalar* pixel, const float* acc, const Finish& finish) {
  using Pair = decltype(narrow_pair(Scalar{}, 0.0f, 0.0f));
  const float first = finish(acc[0], Epilogue<C>::staged(pixel[0]));
  const float second = finish(acc[1], Epilogue<C>::staged(pixel[1]));
  *reinterpret_cast<Pair*>(pixel) = narrow_pair(Scalar{}, first, second);
}

// Calls `visit` with each of a lane's spots in the eight rows that are staged in `buffer`: the
// spot, the row, and the spot's place in the buffer.
template <class Visit>
__device__ __forceinline__ void for_spots_of_rows(const Target& target, const Multiplier& warp,
                                                  int turn, int lane, Scalar* buffer,
                                                  const Visit& visit) {
  // As many lanes as divide a row evenly store one channel's row, so that each lane stores the same
  // pixels of all channels.
  constexpr int kVectors = C::pass_pixels / C::store_vector;
  constexpr int kLanes = power_of_two_in(kVectors) < 32 ? power_of_two_in(kVectors) : 32;
#pragma unroll
  for (int part = 0; part < kVectors / kLanes; ++part) {
    const int pixel = (part * kLanes + lane % kLanes) * C::store_vector;
    const Spot spot(target, warp.first_pixel + turn * C::pass_pixels + pixel);
#pragma unroll
    for (int first = 0; first < 8; first += 32 / kLanes) {
      const int channel = first + lane / kLanes;
      if (kLanes < 4 && channel >= 8) break;
      visit(spot, channel, buffer + channel * kRowPitch + pixel);
    }
  }
}

// Stores contiguous outputs, the rows of 8 channels at a time.
__device__ __forceinline__ void store_rows(const RegisterTile& acc, const Finishes& finishes,
                                           Scalar* staging, const Target& target,
                                           const Epilogue<C>& epilogue, const Multiplier& warp) {
  const int lane = warp.lane;
#pragma unroll
  for (int turn = 0; turn < kPasses; ++turn) {
#pragma unroll
    for (int eight = 0; eight < 2 * kRowMmas; ++eight) {
      if (C::buffers == 1) __syncwarp();  // all lanes have read the rows before
      Scalar* const buffer = staging + eight % C::buffers * 8 * kRowPitch;
      Scalar* const row = buffer + lane / 4 * kRowPitch + lane % 4 * 2;
      const Finish finish = finishes.of_eight(eight, lane);
      if constexpr (kAddsResidual) {
        // Addresses are computed again for the stores: keeping them would take registers that
        // accumulators need.
        for_spots_of_rows(target, warp, turn, once_more(lane), buffer,
                          [&](const Spot& spot, int channel, Scalar* staged) {
                            spot.load(target, epilogue, staged, 8 * eight + channel);
                          });
        __syncwarp();
      }
#pragma unroll
      for (int j = 0; j < C::pass_pixels / 8; ++j) {
        const float* const pair = acc[eight / 2][turn * (C::pass_pixels / 8) + j] + eight % 2 * 2;
        stage_row(row + 8 * j, pair, finish);
      }
      __syncwarp();
      for_spots_of_rows(target, warp, turn, lane, buffer,
                        [&](const Spot& spot, int channel, const Scalar* staged) {
                          spot.store(target, staged, 8 * eight + channel);
                        });
    }
  }
}

// Stages a lane's values of two pixels of a channel, for channels-last outputs.
__device__ __forceinline__ void stage_pixels(float* pixel, float first, float second) {
  pixel[0] = first;
  pixel[kPixelPitch] = second;
}
// With 16-bit types, lanes of neighbouring channels exchange values, so that each has both channels
// of one pixel and writes them as one word.
template <class Half>
__device__ __forceinline__ void stage_pixels(Half* pixel, float first, float second) {
  const unsigned own = narrow_pair(Half{}, first, second);
  const unsigned other = __shfl_xor_sync(~0u, own, 4);
  const bool odd = threadIdx.x / 4 % 2 != 0;
  Half* const target = odd ? pixel + kPixelPitch - 1 : pixel;
  *reinterpret_cast<unsigned*>(target) =
      odd ? __byte_perm(other, own, 0x7632) : __byte_perm(own, other, 0x5410);
}
// Finishes a lane's accumulators of two pixels and stages them. Residuals have been loaded to the
// same places.
__device__ __forceinline__ void stage_pixels(Scalar* pixel, const float* acc,
                                             const Finish& finish) {
  const float first = finish(acc[0], Epilogue<C>::staged(pixel[0]));
  const float second = finish(acc[1], Epilogue<C>::staged(pixel[kPixelPitch]));
  // No lane overwrites another's residuals: the exchange between lanes comes after all reads.
  stage_pixels(pixel, first, second);
}

// Calls `visit` with each of a lane's spots in the pixels that are staged in `staging`: the spot,
// the channel, and the spot's place in the buffer.
template <class Visit>
__device__ __forceinline__ void for_spots_of_pixels(const Target& target, const Multiplier& warp,
                                                    int turn, Scalar* staging, const Visit& visit) {
  constexpr int kVectors = kOutputs / C::store_vector;  // vectors of a pixel
#pragma unroll 2
  for (int at = warp.lane; at < C::pass_pixels * kVectors; at += 32) {
    const int pixel = at / kVectors;
    const int channel = at % kVectors * C::store_vector;
    const Spot spot(target, warp.first_pixel + turn * C::pass_pixels + pixel);
    visit(spot, channel, staging + pixel * kPixelPitch + channel);
  }
}

// Stores channels-last outputs, all of the warp's channels of some pixels at a time.
__device__ __forceinline__ void store_pixels(const RegisterTile& acc, const Finishes& finishes,
                                             Scalar* staging, const Target& target,
                                             const Epilogue<C>& epilogue, const Multiplier& warp) {
  const int lane = warp.lane;
#pragma unroll
  for (int turn = 0; turn < kPasses; ++turn) {
    __syncwarp();  // all lanes have read the pixels before
    if constexpr (kAddsResidual) {
      for_spots_of_pixels(target, warp, turn, staging,
                          [&](const Spot& spot, int channel, Scalar* staged) {
                            spot.load(target, epilogue, staged, channel);
                          });
      __syncwarp();
    }
#pragma unroll
    for (int eight = 0; eight < 2 * kRowMmas; ++eight) {
      const Finish finish = finishes.of_eight(eight, lane);
#pragma unroll
      for (int j = 0; j < C::pass_pixels / 8; ++j) {
        const float* const pair = acc[eight / 2][turn * (C::pass_pixels / 8) + j] + eight % 2 * 2;
        stage_pixels(staging + (8 * j + lane % 4 * 2) * kPixelPitch + 8 * eight + lane / 4, pair,
                     finish);
      }
    }
    __syncwarp();
    for_spots_of_pixels(target, warp, turn, staging,
                        [&](const Spot& spot, int channel, const Scalar* staged) {
                          spot.store(target, staged, channel);
                        });
  }
}

// Stores a warp's register tile.
__device__ __forceinline__ void store(const RegisterTile& acc, const Finishes& finishes,
                                      const Target& target, const Epilogue<C>& epilogue,
                                      const Multiplier& warp) {
  Scalar* const staging =
      reinterpret_cast<Scalar*>(shared_memory() + kStaging + warp.warp * kStagingBytes);
  if constexpr (C::out_channels_last) {
    store_pixels(acc, finishes, staging, target, epilogue, warp);
  } else {
    store_rows(acc, finishes, staging, target, epilogue, warp);
  }
}

}  // namespace ampere
}  // namespace fastconv
"""

SOURCES["ampere/halo/weights.cuh"] = r"""
// The producer warp of weights: cp.async from the packed weights to a ring of stages.
#include "ampere/halo/tile.cuh"
#include "device/tensor/scale.cuh"

namespace fastconv {
namespace ampere {

// Starts to copy a stage of weights.
__device__ __forceinline__ void copy_weights(int stage, const unsigned char* source, int lane) {
  constexpr int kVectors = kWeightBytes / 16;
  constexpr int kAtOnce = 8;
  unsigned char* const target = shared_memory() + kWeightRing + stage * kWeightBytes;
#pragma unroll kAtOnce
  for (int i = lane; i < kVectors; i += 32) copy_async<16>(target + i * 16, source + i * 16, true);
  copy_async_commit();
}

// Streams every tile's weights through the ring; or copies all weights once, if they fit.
__device__ __forceinline__ void stream_weights(const unsigned char* packed, const Items& items) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (C::resident) {
    static_assert(!C::resident || C::weight_stages == kTileStages, "all of them fit");
    for (int i = 0; i < kTileStages; ++i) copy_weights(i, packed + i * kWeightBytes, lane);
    copy_async_wait<0>();
    WeightStages::fill(0);
    return;
  }
  // Copies in flight beside the one that is waited for. It is one stage less than there could be,
  // because consumers read one while the next is announced.
  constexpr int kAhead = C::resident ? 0 : C::weight_stages - 2;
  Ring<C::weight_stages> at(0), landed(0);
  int under_way = 0;
  for (int index = items.first(); index < items.count(); index = items.after(index)) {
    const Item item(index);
    const int part = item.group * kOutputGroups + item.outputs / (C::channel_groups * kOutputs);
    const unsigned char* source =
        packed + static_cast<long long>(part) * kTileStages * kWeightBytes;
#pragma unroll 1
    for (int i = 0; i < kTileStages; ++i) {
      WeightStages::wait_empty(at.stage);
      copy_weights(at.stage, source, lane);
      source += kWeightBytes;
      at.advance();
      if (++under_way > kAhead) {
        copy_async_wait<kAhead>();
        WeightStages::fill(landed.stage);
        landed.advance();
        --under_way;
      }
    }
  }
  copy_async_wait<0>();
  for (; under_way > 0; --under_way) {
    WeightStages::fill(landed.stage);
    landed.advance();
  }
  WeightStages::wait_all_empty();
}

}  // namespace ampere
}  // namespace fastconv
"""

SOURCES["ampere/halo/multiply.cuh"] = r"""
// A consumer warp's main loop: ldmatrix and mma.sync on operands in shared memory.
#include "ampere/halo/tile.cuh"

namespace fastconv {
namespace ampere {

using RegisterTile = float[kRowMmas][kColumnMmas][4];
constexpr int kPairs = kColumnMmas / 2;  // one ldmatrix loads the pixels of two MMAs
using WeightFragment = unsigned[kRowMmas][4];
using InputFragment = unsigned[kPairs][4];

__device__ __forceinline__ void clear(RegisterTile& acc) {
#pragma unroll
  for (auto& row : acc) {
#pragma unroll
    for (auto& mma_acc : row) {
#pragma unroll
      for (float& value : mma_acc) value = 0.0f;
    }
  }
}

// Returns the offset of a tap's first pixel in a stage of input, in bytes.
__host__ __device__ constexpr int tap_offset(int tap) {
  const int row = tap / C::kernel_width;
  const int column = tap % C::kernel_width;
  return ((row % kRowResidues * kColumnSlots + column % kColumnResidues) * kSlotPixels +
          row / kRowResidues * C::pitch + column * kColumnStep / kColumnResidues) *
         16;
}

// Whether a thread has registers to load operands ahead of their MMAs. In larger blocks it has not,
// and another warp multiplies while this one waits.
constexpr bool kPrefetches = kThreads == 256;

// Taps that the code unrolls: a stage of weights, or a period of flushes. They are steady if their
// distances in the halo tile are those of the first taps, so that offsets are constants: whole rows
// of the kernel, or parts of one.
constexpr int kUnrolledTaps = C::parts == 2 ? C::period_taps : C::stage_taps;
constexpr bool kSteady = (kUnrolledTaps % C::kernel_width == 0 && kRowResidues == 1) ||
                         (C::kernel_width % kUnrolledTaps == 0 && kColumnResidues == 1) ||
                         kUnrolledTaps == kTaps;
static_assert(C::stage_taps % kUnrolledTaps == 0, "stages have whole periods");

// The addresses of the unrolled taps in a stage of input.
struct Taps {
  const unsigned char* input;
  int first;

  __device__ Taps(const unsigned char* input_stage, int first)
      : input(kSteady ? input_stage + tap_offset(first) : input_stage), first(first) {}
  __device__ __forceinline__ const unsigned char* operator[](int j) const {
    return input + (kSteady ? tap_offset(j) : tap_offset(first + j));
  }
};

// Low parts are clamped to this before they are multiplied by each other: no finite one is larger.
constexpr float kMostLow = 0x1p116f;

// A consumer warp. Each lane passes ldmatrix the address of one row, of 16 bytes, of four matrices:
// 16 channels by 32 bytes of weights, or two times 8 pixels by 32 bytes of input.
struct Multiplier {
  int warp;
  int lane;
  int channel_group;
  int first_pixel;     // the warp's first pixel of the tile
  int weights;         // the lane's offset in a stage of weights, in bytes
  int pixels[kPairs];  // the lane's offsets in a stage of input at the first tap, in bytes

  __device__ Multiplier() {
    warp = static_cast<int>(threadIdx.x) / 32 - kFirstMultiplier;
    lane = static_cast<int>(threadIdx.x) % 32;
    channel_group = warp % C::channel_groups;
    first_pixel = warp / C::channel_groups * C::pixels;
    weights = channel_group * kAOperandBytes + (lane / 16 * kOutputs + lane % 16) * 16;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      int pixel = first_pixel + 16 * pair + lane / 16 * 8 + lane % 8;
      if (pixel >= kTilePixels) pixel = 0;  // computed, but not stored
      const int place = pixel / C::tile_columns * C::pitch + pixel % C::tile_columns;
      pixels[pair] = (place + lane / 8 % 2 * kPlanePixels) * 16;
    }
  }

  __device__ __forceinline__ void load_left(WeightFragment& left,
                                            const unsigned char* step_weights) const {
#pragma unroll
    for (int i = 0; i < kRowMmas; ++i) load_matrices(left[i], step_weights + weights + i * 256);
  }
  __device__ __forceinline__ void load_right(InputFragment& right,
                                             const unsigned char* planes) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) load_matrices(right[pair], planes + pixels[pair]);
  }

  // Multiplies 16 channels by two times 8 pixels.
  __device__ __forceinline__ static void add(RegisterTile& acc, int i, int pair,
                                             const unsigned (&left)[4],
                                             const unsigned (&right)[4]) {
    const unsigned first[2] = {right[0], right[1]};
    const unsigned second[2] = {right[2], right[3]};
    mma(Factor{}, acc[i][2 * pair], left, first);
    mma(Factor{}, acc[i][2 * pair + 1], left, second);
  }
  // Multiplies all of the warp's channels by two times 8 pixels.
  __device__ __forceinline__ static void add(RegisterTile& acc, const WeightFragment& left,
                                             const unsigned (&right)[4], int pair) {
#pragma unroll
    for (int i = 0; i < kRowMmas; ++i) add(acc, i, pair, left[i], right);
  }

  // Multiplies a stage of weights.
  __device__ __forceinline__ void multiply(RegisterTile& acc, const unsigned char* weight_stage,
                                           const Taps& taps) const {
    const auto step_weights = [&](int step) {
      return weight_stage + step * (C::channel_groups * kAOperandBytes);
    };
    const auto planes = [&](int step) {
      return taps[step / C::k_steps] + step % C::k_steps * 2 * kPlaneBytes;
    };
    constexpr int kSteps = C::stage_taps * C::k_steps;
    if constexpr (kPrefetches) {
      multiply_prefetched<kSteps>(acc, step_weights, planes);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        WeightFragment left;
        load_left(left, step_weights(step));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          unsigned right[4];
          load_matrices(right, planes(step) + pixels[pair]);
          add(acc, left, right, pair);
        }
      }
    }
  }

  // Loads each step's operands while those of the step before are multiplied: the smaller operand
  // at once, to a second set of registers, the other fragment by fragment, as registers become
  // free.
  template <int kSteps, class StepWeights, class Planes>
  __device__ __forceinline__ void multiply_prefetched(RegisterTile& acc,
                                                      const StepWeights& step_weights,
                                                      const Planes& planes) const {
    constexpr bool kRowsFirst = kPairs <= kRowMmas;
    WeightFragment left[kRowsFirst ? 1 : 2];
    InputFragment right[kRowsFirst ? 2 : 1];
    load_left(left[0], step_weights(0));
    load_right(right[0], planes(0));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool more = step + 1 < kSteps;
      if constexpr (kRowsFirst) {
        if (more) load_right(right[(step + 1) % 2], planes(step + 1));
#pragma unroll
        for (int i = 0; i < kRowMmas; ++i) {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            add(acc, i, pair, left[0][i], right[step % 2][pair]);
          }
          if (more) load_matrices(left[0][i], step_weights(step + 1) + weights + i * 256);
        }
      } else {
        if (more) load_left(left[(step + 1) % 2], step_weights(step + 1));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          add(acc, left[step % 2], right[0][pair], pair);
          if (more) load_matrices(right[0][pair], planes(step + 1) + pixels[pair]);
        }
      }
    }
  }

  // Multiplies a tap's numbers, each in two parts. Products of two high parts are added to `acc`;
  // those of a high and a low part, which are far smaller, to `low`.
  __device__ __forceinline__ void multiply_two_parts(RegisterTile& acc, RegisterTile& low,
                                                     const unsigned char* tap_weights,
                                                     const unsigned char* tap_input) const {
    constexpr int kPart = C::channel_groups * kAOperandBytes;
#pragma unroll
    for (int k = 0; k < C::k_steps; ++k) {
      WeightFragment left, left_low;
      load_left(left, tap_weights + 2 * k * kPart);
      load_left(left_low, tap_weights + (2 * k + 1) * kPart);
      WeightFragment smaller;
      make_smaller(smaller, left);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const unsigned char* const place = tap_input + pixels[pair] + 2 * k * kPlaneBytes;
        unsigned right[4], right_low[4];
        load_matrices(right, place);
        load_matrices(right_low, place + kPartPixels * 16);
        // Infinite products come first: an infinity's other products, which may overflow, change
        // nothing after them.
        add(low, smaller, right_low, pair);
        add(low, left_low, right, pair);
        if constexpr (C::low_low_mma) add_low(low, left_low, right_low, pair);
        add(acc, left, right, pair);
      }
    }
  }

  // Multiplies low parts by each other. Infinite ones are clamped, because their signs may be
  // wrong.
  __device__ __forceinline__ static void add_low(RegisterTile& low, const WeightFragment& left,
                                                 const unsigned (&right)[4], int pair) {
    WeightFragment finite_left;
    unsigned finite_right[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      finite_right[k] = finite(right[k]);
#pragma unroll
      for (int i = 0; i < kRowMmas; ++i) finite_left[i][k] = finite(left[i][k]);
    }
    add(low, finite_left, finite_right, pair);
  }
  __device__ __forceinline__ static unsigned finite(unsigned low) {
    return __float_as_uint(limited(__uint_as_float(low), kMostLow));
  }

  // Makes the weights for the input's low parts: with scaled fp16 these are stored times 2048.
  __device__ __forceinline__ static void make_smaller(WeightFragment& smaller,
                                                      const WeightFragment& left) {
#pragma unroll
    for (int i = 0; i < kRowMmas; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        smaller[i][k] = C::scaled_fp16 ? halves_by_2048th(left[i][k]) : left[i][k];
      }
    }
  }
};

// Adds the low accumulators to the total. An infinite total is right as it is: products with a low
// part may have overflowed to the other infinity.
__device__ __forceinline__ float completed(float total, float low) {
  const float infinity = __uint_as_float(0x7f800000u);
  return fabsf(total) == infinity && fabsf(low) == infinity ? total : total + low;
}

// Adds the accumulators to the second level and clears them: the tensor core truncates as it
// accumulates, so chains of MMAs are short. With `compensated`, for long sums, what the second
// level loses as it is rounded is added to `low`.
__device__ __forceinline__ void flush(RegisterTile& total_acc, RegisterTile& acc,
                                      RegisterTile& low) {
#pragma unroll
  for (int i = 0; i < kRowMmas; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnMmas; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float total = total_acc[i][j][k] + acc[i][j][k];
        if constexpr (C::compensated) {
          if (is_finite(total)) low[i][j][k] += acc[i][j][k] - (total - total_acc[i][j][k]);
        }
        total_acc[i][j][k] = total;
        acc[i][j][k] = 0.0f;
      }
    }
  }
}

}  // namespace ampere
}  // namespace fastconv
"""

SOURCES["ampere/halo/tile.cuh"] = r"""
// The warps of a block of the halo kernel, its shared memory, and the barriers between them.
#include "device/mma.cuh"
#include "device/sm80.cuh"
#include "device/tensor/tile.cuh"

namespace fastconv {
namespace ampere {

using namespace tensor;

static_assert(C::stack == 1 && C::stacked_columns == 1 && C::interleave == 1 &&
                  C::segment_tiles == 1 && C::lead == 0 && !C::wraps && !C::rolling &&
                  !C::watches && !C::smaller_part && !kDepthToSpace,
              "options of Hopper's tiles alone");

// One of a block's warps streams weights, some load input, and the rest are consumers. Consumers
// divide a tile by channels, then by pixels, which are counted row by row.
constexpr int kFirstMultiplier = 1 + C::loaders / 32;
constexpr int kThreads = 32 * (kFirstMultiplier + C::warps);
constexpr int kPixelGroups = C::warps / C::channel_groups;
constexpr int kTilePixels = kTileRows * C::tile_columns;
static_assert(C::warps == kPixelGroups * C::channel_groups, "whole groups");
static_assert(kTilePixels <= kPixelGroups * C::pixels, "the warps cover all pixels");

// MMAs of a warp's register tile, each of 16 channels by 8 pixels.
constexpr int kRowMmas = kOutputs / 16;
constexpr int kColumnMmas = C::pixels / 8;
static_assert(kOutputs % 16 == 0 && C::pixels % 16 == 0, "pixels are read in pairs of eights");

// Sizes of a stage of the input ring, which holds a chunk of channels, and of the weight ring.
constexpr int kInputBytes = C::parts * kPartPixels * 16;
constexpr int kTileStages = kChunks * kWeightStages;  // stages of weights that a tile takes

// A warp's staging buffer for outputs. For contiguous ones it holds 8 channels' rows of pass_pixels
// pixels, once or twice; for channels-last ones, all of the warp's channels of pass_pixels pixels.
// Pitches spread a warp's accesses over all banks.
constexpr int kRowPitch = round_up(C::pass_pixels, 32) + 8;
constexpr int kPixelPitch = kOutputs + kVector;
constexpr int kStagingBytes = kScalarBytes * (C::out_channels_last ? C::pass_pixels * kPixelPitch
                                                                   : C::buffers * 8 * kRowPitch);
constexpr int kPasses = C::pixels / C::pass_pixels;
static_assert(C::pixels % C::pass_pixels == 0 && C::pass_pixels % 8 == 0, "whole passes");

constexpr int kInputRing = 0;
constexpr int kWeightRing = kInputRing + C::input_stages * kInputBytes;
constexpr int kStaging = kWeightRing + C::weight_stages * kWeightBytes;
constexpr int kPowers = kStaging + C::warps * kStagingBytes;  // one copy for each loading warp
constexpr int kPowersBytes = C::scaled_fp16 ? kChunkChannels * 4 : 0;
static_assert(kPowers + C::loaders / 32 * kPowersBytes == C::shared_bytes, "as planned");
static_assert(kStagingBytes % 16 == 0, "vectors are aligned");

// The stages of a ring that kFillers producer threads fill for the consumers. Each has two named
// barriers, full and empty, numbered from kFirst on. Consumers mark all stages as empty before the
// first lap.
template <int kFirst, int kStages, int kFillers>
struct Stages {
  static constexpr int kThreads = kFillers + 32 * C::warps;
  static_assert(kFirst + 2 * kStages <= 16, "hardware has 16 named barriers");

  __device__ __forceinline__ static void wait_full(int stage) { wait_at(kFirst + stage, kThreads); }
  __device__ __forceinline__ static void fill(int stage) {
    __syncwarp();  // lanes that had nothing to write may be ahead
    come_to(kFirst + stage, kThreads);
  }
  __device__ __forceinline__ static void wait_empty(int stage) {
    wait_at(kFirst + kStages + stage, kThreads);
  }
  __device__ __forceinline__ static void empty(int stage) {
    come_to(kFirst + kStages + stage, kThreads);
  }
  // Consumers call empty_all at first, producers wait_all_empty in the end, so that arrivals and
  // waits match at every barrier.
  __device__ __forceinline__ static void empty_all() {
    for (int i = 0; i < kStages; ++i) empty(i);
  }
  __device__ __forceinline__ static void wait_all_empty() {
    for (int i = 0; i < kStages; ++i) wait_empty(i);
  }
};
using InputStages = Stages<1, C::input_stages, C::loaders>;
// Resident weights need one pair of barriers: they arrive all at once.
constexpr int kWeightLaps = C::resident ? 1 : C::weight_stages;
using WeightStages = Stages<1 + 2 * C::input_stages, kWeightLaps, 32>;

// The ring of input stages, as the producers in device/tensor/load.cuh use it.
struct Input {
  static constexpr int kStages = C::input_stages;
  static constexpr bool kPowersCopied = C::scaled_fp16;

  __device__ __forceinline__ static unsigned char* stage(int stage) {
    return shared_memory() + kInputRing + stage * kInputBytes;
  }
  __device__ __forceinline__ static float* powers(int warp) {
    return reinterpret_cast<float*>(shared_memory() + kPowers + warp * kPowersBytes);
  }
  __device__ __forceinline__ static void wait(const Ring<kStages>& at) {
    InputStages::wait_empty(at.stage);
  }
  __device__ __forceinline__ static void show(int stage) { InputStages::fill(stage); }
};

}  // namespace ampere
}  // namespace fastconv
"""

SOURCES["device/mma.cuh"] = r"""
// mma.sync, the warp-wide MMA of sm_80 and later. All 32 lanes take part.
//
// A fragment is a lane's 4 bytes of an 8-row matrix with rows of 16 bytes: lane 4 g + t holds bytes
// 4 t to 4 t + 3 of row g. These are two 16-bit elements, or one TF32 element.
#include "device/sm80.cuh"

namespace fastconv {

// acc += left * right^T, with 16 rows of `left` and 8 rows of `right`, each of 32 bytes along K.
// `left` has four fragments: the first 16 bytes of the upper and of the lower 8 rows, then the last
// 16 bytes of both. `right` has two: the first and the last 16 bytes. Lane 4 g + t holds the
// accumulators of row g, columns 2 t and 2 t + 1, then those of row g + 8.
__device__ __forceinline__ void mma(Tf32, float (&acc)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
__device__ __forceinline__ void mma(Float16, float (&acc)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
__device__ __forceinline__ void mma(Bfloat16, float (&acc)[4], const unsigned (&left)[4],
                                    const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

}  // namespace fastconv
"""

SOURCES["hopper/wgrad_halo/load.cuh"] = r"""
// Producer warps of the input: load rows to registers, transpose, round or split them, and write
// them to shared memory.
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/scale.cuh"

namespace fastconv {
namespace hopper {

using Quad = Vector<Scalar, kQuad>;

// A warp loads units of 8 channels by 16 columns. A lane has 4 columns of a channel, of all
// members; for channels-last tensors 4 channels of a column.
constexpr int kBlockOctets = kBlockPlanes * C::mma_octets;
constexpr int kUnitColumns = 16;

// The units of an input row that this many columns of an output row read.
__host__ __device__ constexpr int units_of(int columns) {
  return kBlockOctets * ceil_div(tile_columns(columns), kUnitColumns);
}
constexpr int kUnits = units_of(kStripColumns);

// Input rows from a strip of rows to the next.
constexpr int kStripRows = kSteps * kRowStep * C::stride_height;

// The farthest rows and columns that the first strip of rows reads, before or behind the input's
// first, and an index type that reaches every element there.
constexpr int kFarRow = max_of(
    C::padding_top, kStripRows + round_up(C::kernel_height, C::kernel_rows) * C::dilation_height);
constexpr int kFarColumn =
    max_of(kShift - kFirstColumn, kStrips * kStripColumns * C::stride_width + kTileColumns +
                                      kPieces * C::mma_taps * C::dilation_width);
using InOffset = IndexTo<elements_of(kFarRow, kInRow) + elements_of(kFarColumn, kInColumn) +
                         elements_of(kBlockOctets, kOctet, kInChannel)>;

__device__ __forceinline__ bool is_below(int value, int bound) {
  return static_cast<unsigned>(value) < static_cast<unsigned>(bound);
}

// Starts loading 4 consecutive elements, the first of which has index `first` of `count`; elements
// that do not exist are zero. All elements of a vector load exist, or none.
__device__ __forceinline__ Quad load_quad(const Scalar* source, int first, int count) {
  Quad quad;
  if constexpr (C::vector_input && kScalarBytes == 4) {
    const uint4 bits = load_or_zero(reinterpret_cast<const uint4*>(source), is_below(first, count));
    quad = reinterpret_cast<const Quad&>(bits);
  } else if constexpr (C::vector_input) {
    const uint2 bits = load_or_zero(reinterpret_cast<const uint2*>(source), is_below(first, count));
    quad = reinterpret_cast<const Quad&>(bits);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      quad.element[i] = load_element(source + i, is_below(first + i, count));
    }
  }
  return quad;
}

using KVector = Vector<Scalar, kInterleave>;

// A lane's part of a unit: 4 consecutive elements of all members, and the power that scales them.
struct Loaded {
  Quad quads[kInterleave];
  float power;
};

// Writes the K vector of one column, rounded to TF32 or split for 3xTF32.
__device__ __forceinline__ void store_k_vector(unsigned char* target, Vector<float, 4> members) {
  Vector<float, 4> low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = members.element[i];
    if constexpr (C::parts == 2) {
      unsigned bits[2];
      split(value, bits[0], bits[1]);
      members.element[i] = __uint_as_float(bits[0]);
      low.element[i] = __uint_as_float(bits[1]);
    } else {
      members.element[i] = round_factor(value);
    }
  }
  if constexpr (C::parts == 2) {
    *reinterpret_cast<Vector<float, 4>*>(target + kPartVectors * 16) = low;
  }
  *reinterpret_cast<Vector<float, 4>*>(target) = members;
}
// Writes the K vector of one column as scaled fp16, in one or two parts.
__device__ __forceinline__ void store_k_vector(unsigned char* target, Vector<float, 8> members) {
  using Words = Vector<unsigned, 4>;
  Words high, low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = members.element[2 * i];
    const float second = members.element[2 * i + 1];
    high.element[i] = floats_to_halves(first, second);
    if constexpr (C::parts == 2) {
      low.element[i] = low_halves(first, second, high.element[i], kLowFactor);
    }
  }
  if constexpr (C::parts == 2) *reinterpret_cast<Words*>(target + kPartVectors * 16) = low;
  *reinterpret_cast<Words*>(target) = high;
}
// Writes the K vector of one column, of a 16-bit type.
template <class Half>
__device__ __forceinline__ void store_k_vector(unsigned char* target, Vector<Half, 8> members) {
  *reinterpret_cast<Vector<Half, 8>*>(target) = members;
}

// A lane's place in the first of its warp's units. Consecutive units go along octets, then along
// columns.
struct InputLoader {
  const Scalar* row;  // row 0 of image 0, in the lane's channel; of volumes, in the group's first
  Tables tables;
  int channel;        // the lane's, in an octet
  int channels_left;  // channels of the group from that one on
  int column;         // the lane's, in a unit
  int first_column;   // first column of the tile in the first strip
  int group;
  int warp;
  int lane;

  __device__ InputLoader(const Scalar* input, const Tables& tables, const Tile& tile, int thread)
      : tables(tables) {
    warp = thread / 32;
    lane = thread % 32;
    channel = C::in_channels_last ? lane % 2 * kQuad : lane % kOctet;
    column = C::in_channels_last ? lane / 2 : lane / kOctet * kQuad;
    const int first_channel = tile.plane() * kPlaneChannels + channel;
    channels_left = C::group_in - first_channel;
    first_column = kFirstColumn - kShift + tile.piece * (C::mma_taps * C::dilation_width);
    group = C::groups == 1 ? 0 : tile.group;
    row =
        input + static_cast<long long>(group * kInChannels + (Depth::exists ? 0 : first_channel)) *
                    kInChannel;
  }

  __device__ static int octet(int unit) { return unit % kBlockOctets; }
  __device__ static int unit_column(int unit) { return unit / kBlockOctets * kUnitColumns; }
  __device__ bool exists(int unit) const {
    return (kUnits % (kInputWarps * C::batch) == 0 || unit < kUnits) &&
           (kTileColumns % kUnitColumns == 0 || unit_column(unit) + column < kTileColumns);
  }

  // The index of a unit's channel among those of all groups.
  __device__ int number(int unit) const {
    return (group + 1) * C::group_in - channels_left + octet(unit) * kOctet;
  }

  // The images of a step, from that of member 0 on. Those of volumes are output planes, whose
  // addresses each member finds itself.
  struct Images {
    const Scalar* first;
    int index;
    int count;  // images that exist from this one on

    __device__ __forceinline__ Images(const InputLoader& loader, int image, int batch)
        : first(loader.row), index(image), count(batch - image) {
      if constexpr (!Depth::exists) first += static_cast<long long>(image) * kInImage;
    }
    // Whether an image has the plane that a channel reads, and where that channel begins in it.
    __device__ __forceinline__ bool has(int image, const InChannel& channel) const {
      return image < count && plane_inside(front_of(index + image) + channel.plane());
    }
    __device__ __forceinline__ long long offset(int image, const InChannel& channel) const {
      if constexpr (Depth::exists) {
        const int plane = front_of(index + image) + channel.plane();
        return static_cast<long long>((index + image) / Depth::out) * kInImage +
               (static_cast<long long>(channel.channel) * kInChannel + plane * kInPlane);
      } else {
        constexpr long long kImage = kInImage;
        return image * kImage;
      }
    }
  };

  // Starts loading a lane's part of a unit, from input row y in the first strip of rows; `first` is
  // the strip's first column.
  __device__ __forceinline__ void load(const Images& images, int y, int first, int unit,
                                       Loaded& loaded) const {
    const int x = first + first_column + unit_column(unit) + column;
    const int left = channels_left - octet(unit) * kOctet;
    const bool valid = exists(unit) && (C::in_channels_last ? is_below(x, C::in_width) : left > 0);
    // Consecutive elements are channels of a channels-last tensor, else columns.
    const int neighbour = C::in_channels_last ? 0 : x;
    const int count = !valid ? 0 : C::in_channels_last ? max(left, 0) : C::in_width;
    const InChannel from(C::group_in - left);
    const InOffset channels =
        Depth::exists ? 0 : static_cast<InOffset>(octet(unit) * kOctet) * kInChannel;
    const Scalar* const source = images.first + (channels + static_cast<InOffset>(y) * kInRow +
                                                 static_cast<InOffset>(x) * kInColumn);
#pragma unroll
    for (int member = 0; member < kInterleave; ++member) {
      const int of_image = member % C::interleaved_images;
      const int below = member / C::interleaved_images * kStripRows;
      const bool exists = images.has(of_image, from) && is_below(y + below, C::in_height);
      loaded.quads[member] = load_quad(
          source + (images.offset(of_image, from) + static_cast<long long>(below) * kInRow),
          neighbour, exists ? count : 0);
    }
    if constexpr (C::scaled_fp16) {
      loaded.power = load_or_zero(tables.powers() + number(unit), valid);
    }
  }

  // Writes a lane's part of a unit to a row of the ring.
  __device__ __forceinline__ void store(unsigned char* ring_row, int unit,
                                        const Loaded& loaded) const {
    if (!exists(unit)) return;
    const int plane = octet(unit) / C::mma_octets;
    const int vector = plane * kPlaneVectors + octet(unit) % C::mma_octets * kOctet + channel +
                       (unit_column(unit) + column) * kColumnVectors;
    constexpr int kNeighbour = C::in_channels_last ? 1 : kColumnVectors;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      KVector members;
#pragma unroll
      for (int member = 0; member < kInterleave; ++member) {
        members.element[member] = scaled(loaded.quads[member].element[i], loaded.power);
      }
      store_k_vector(ring_row + (vector + i * kNeighbour) * 16, members);
    }
    if constexpr (C::scaled_fp16) count_lossy(unit, loaded);
  }

  __device__ __forceinline__ void count_lossy(int unit, const Loaded& loaded) const {
    unsigned least = ~0u;
#pragma unroll
    for (const Quad& quad : loaded.quads) {
#pragma unroll
      for (const Scalar& value : quad.element) least = min(least, magnitude_key(widen(value)));
    }
    if (least < least_key(loaded.power)) {
      add_to_memory(tables.lossy() + number(unit), 1u);
    }
  }

  // Loads the warp's units of a row, and writes them to the ring when the stage is empty.
  __device__ __forceinline__ void copy_row(const Images& images, int y, int first, int units,
                                           const Ring<C::input_stages>& at) const {
    unsigned char* const ring_row = shared_memory() + kInputRing + at.stage() * (kRowVectors * 16);
#pragma unroll 1
    for (int unit = warp; unit < units; unit += kInputWarps * C::batch) {
      Loaded loaded[C::batch];
#pragma unroll
      for (int k = 0; k < C::batch; ++k) {
        load(images, y, first, unit + kInputWarps * k, loaded[k]);
      }
      if (unit == warp) barrier_wait(&barriers().input_empty[at.stage()], at.parity());
#pragma unroll
      for (int k = 0; k < C::batch; ++k) store(ring_row, unit + kInputWarps * k, loaded[k]);
    }
    // A warp without units still has to wait: it must not arrive at `input_full` a phase early.
    if (warp >= units) barrier_wait(&barriers().input_empty[at.stage()], at.parity());
  }
};

// Loads the input rows of every run.
__device__ __forceinline__ void load_input(const Scalar* input, const Tables& tables,
                                           const Partition& partition) {
  const Tile tile = partition.tile();
  Share share = partition.share();
  const InputLoader loader(input, tables, tile, static_cast<int>(threadIdx.x) - 32 * kGradWarps);
  const int tap_row = tile.kernel_row * C::dilation_height - C::padding_top;
  Ring<C::input_stages> at(1);
  while (share.more()) {
    const Run run = share.next();
    const InputLoader::Images images(loader, run.image, partition.batch);
    const int first_column = run.strip * (kStripColumns * C::stride_width);
    const int units = units_of(columns_of(run.strip));
    const int rows = run.steps * kNewRows + kOldRows;
    int y = run.output_row(0) * C::stride_height + tap_row;
    int until_skip = kNewRows;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      loader.copy_row(images, y, first_column, units, at);
      fence_async_shared();
      __syncwarp();
      if (loader.lane == 0) barrier_arrive(&barriers().input_full[at.stage()]);
      at.advance();
      y += C::dilation_height;
      // Skip rows that no tap reads.
      if (kRowAdvance > kNewRows && --until_skip == 0) {
        y += (kRowAdvance - kNewRows) * C::dilation_height;
        until_skip = kNewRows;
      }
    }
  }
}

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["hopper/wgrad_halo/reduce.cuh"] = r"""
// The reduction kernel: adds up the slots that blocks have written to the workspace.
#include "hopper/wgrad_halo/multiply.cuh"

namespace fastconv {
namespace hopper {

// The weight that one of the four accumulators in a slot belongs to.
struct Weight {
  int output;  // channels, in the group
  int input;
  int row;
  int column;

  __device__ Weight(const Tile& tile, int warpgroup, int slot, int thread, int element) {
    const int segment =
        tile.segment + slot * 4 / kAccs + (C::channel_groups == 2 ? 0 : warpgroup * C::segments);
    const int core = slot * 4 % kAccs / 4;  // core matrix of the wgmma: an octet of a tap
    const int lane = thread % 32;
    output = tile.channel((C::channel_groups == 2 ? warpgroup * kOutputs : 0) + thread / 32 * 16 +
                          lane / 4 + element / 2 * 8);
    input = segment / C::kernel_rows * kPlaneChannels + core % C::mma_octets * kOctet +
            lane % 4 * 2 + element % 2;
    row = tile.kernel_row + segment % C::kernel_rows;
    column = tile.piece * C::mma_taps + core / C::mma_octets;
  }

  // Whether the weight exists, and this kernel is to compute it.
  __device__ bool is_wanted(const Tables& tables, int group) const {
    const bool exists = output < C::group_out && input < C::group_in && row < C::kernel_height &&
                        column < C::kernel_width;
    if constexpr (C::repairs) {
      return exists && tables.marks()[Tables::filter(group * C::group_out + output, input)] != 0;
    }
    return exists;
  }
};

// The four accumulators of a slot, reduced over all workers.
struct Totals {
  float sums[4];

  __device__ Totals(const float4* first, long long distance, int workers) {
    const float4 total = total_of(first, distance, workers);
    sums[0] = total.x;
    sums[1] = total.y;
    sums[2] = total.z;
    sums[3] = total.w;
  }
  __device__ __forceinline__ float weight(int i, const Tables&, int, const Weight&) const {
    return sums[i];
  }
};

// The reduced slot for scaled fp16, with the sums of the magnitudes of the workers' parts.
struct ScaledTotals {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float sizes[4] = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ ScaledTotals(const float4* first, long long distance, int workers) {
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      const float4 part = first[worker * distance];
      const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] += parts[i];
        sizes[i] += fabsf(parts[i]);
      }
    }
  }
  // The weight, scaled back. Marks its filter if the result is less accurate than TF32's.
  __device__ __forceinline__ float weight(int i, const Tables& tables, int group,
                                          const Weight& weight) const {
    const int output = group * C::group_out + weight.output;
    const ScaledChannel in(tables, group * C::group_in + weight.input, kInputGroup);
    const ScaledChannel out(tables, kInputs + output, kGradGroup);
    if (!fits(in, out, sums[i], sizes[i])) tables.marks()[Tables::filter(output, weight.input)] = 1;
    return sums[i] * (in.back() * out.back());
  }
};

// Reduces the slots of every weight, workers in order, and writes it where the strides say.
__device__ __forceinline__ void reduce(const Tables& tables, Scalar* grad, int first_tile,
                                       int tiles, int workers) {
  using Reduced = Either<C::scaled_fp16, ScaledTotals, Totals>::type;
  constexpr int kBlockSlots = kConsumers * kSlots * 128;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kBlockSlots; i += step) {
    const Tile tile(first_tile + i / kBlockSlots);
    const auto weight_of = [&](int j) {
      return Weight(tile, i / (kSlots * 128) % kConsumers, i / 128 % kSlots, i % 128, j);
    };
    bool wanted = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) wanted = wanted || weight_of(j).is_wanted(tables, tile.group);
    if (!wanted) continue;
    const Reduced sum(tables.workspace() + i, tiles * kBlockSlots, workers);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Weight weight = weight_of(j);
      if (!weight.is_wanted(tables, tile.group)) continue;
      grad[weight_offset(tile.group * C::group_out + weight.output,
                         depth_channel<kInChannels>(weight.input), weight.row, weight.column)] =
          narrow<Scalar>(sum.weight(j, tables, tile.group, weight));
    }
  }
}

// Reduces the bias's gradient of every channel, workers in order.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int first_tile, int tiles, int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kStageChannels; i += step) {
    const int block = i / kStageChannels;
    const int place = i % kStageChannels;
    const Tile tile(first_tile + block);
    const int channel = tile.channel(place);
    if (!tile.has_bias() || channel >= C::group_out) continue;
    float total = 0.0f;
#pragma unroll 8
    for (int worker = 0; worker < workers; ++worker) {
      const long long slots = bias_slots(tiles * workers, worker * tiles + block, place / kOutputs);
      total += reinterpret_cast<const float*>(workspace)[slots + place % kOutputs];
    }
    bias_grad[tile.group * C::group_out + channel] = narrow<Scalar>(total);
  }
}

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["hopper/wgrad_halo/multiply.cuh"] = r"""
// Consumer warpgroups: multiply, and add their accumulators to a workspace.
#include "hopper/wgrad_halo/copy.cuh"
#include "hopper/wgrad_halo/scale.cuh"
#include "hopper/workspace.cuh"

namespace fastconv {
namespace hopper {

using Accumulators = float[C::segments][kAccs];
// Slots of a thread: four accumulators that lie together in the workspace.
constexpr int kSlots = C::segments * kAccs / 4;

// 4 columns of grad_output as left operands: two MMAs, each in `parts` parts.
constexpr int kGroupColumns = 4;
constexpr int kGroupMmas = 2;
using Fragments = unsigned[C::parts][kGroupMmas][4];

// Where a thread's rows begin, in bytes of a stage: those of two channels, 8 apart, for its
// members.
constexpr int kNextHalf = C::grad_channels_last ? 8 * kScalarBytes : 8 * 4 * kRowBytes;
constexpr int kNextMember = kStageChannels * 4 * kRowBytes;
struct FragmentRows {
  int first;  // with its swizzle, which is the same for all of the thread's rows
  // Byte offsets of rows that begin as far beyond a multiple of 16 bytes as in global memory.
  int shifts[2][kLaneMembers];
};

// Loads 4 columns of a channel and member, in pieces as wide as the alignment of its row allows.
template <class T>
__device__ __forceinline__ Vector<T, kGroupColumns> load_columns(const unsigned char* stage,
                                                                 const FragmentRows& rows, int half,
                                                                 int member, int column) {
  Vector<T, kGroupColumns> columns;
  if constexpr (C::grad_channels_last) {
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
      columns.element[i] = *reinterpret_cast<const T*>(stage + rows.first + half * kNextHalf +
                                                       (column + i) * kPixelBytes);
    }
  } else {
    constexpr int kPiece = gcd(C::grad_vector, kGroupColumns);
    using Piece = Vector<T, kPiece>;
    const int at = column * kScalarBytes;
    const unsigned char* const row = stage + (C::grad_boxes ? rows.first ^ at : rows.first + at) +
                                     half * kNextHalf + member * kNextMember +
                                     rows.shifts[half][member];
#pragma unroll
    for (int i = 0; i < kGroupColumns; i += kPiece) {
      const Piece piece = *reinterpret_cast<const Piece*>(row + i * kScalarBytes);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) columns.element[i + j] = piece.element[j];
    }
  }
  return columns;
}

// The state of a thread's two channels.
struct Channels {
  float bias[2] = {0.0f, 0.0f};  // sums of what was loaded since the last flush
  float power[2];                // scaled fp16: what numbers are multiplied by
  bool counts_lossy = false;     // whether to count numbers that are subnormal in float16
};

// Loads the fragments of float32: a thread has one member of two channels, 8 apart. Adds what it
// loads to their `bias`.
__device__ __forceinline__ void load_rounded(Fragments& fragments, Channels& channels,
                                             const unsigned char* stage, const FragmentRows& rows,
                                             int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto columns = load_columns<float>(stage, rows, half, 0, column);
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
      unsigned& target = fragments[0][i / 2][half + i % 2 * 2];
      if constexpr (C::parts == 2) {
        split(columns.element[i], target, fragments[C::parts - 1][i / 2][half + i % 2 * 2]);
      } else {
        target = __float_as_uint(round_factor(columns.element[i]));
      }
    }
    if constexpr (C::bias) {
      channels.bias[half] +=
          columns.element[0] + columns.element[1] + (columns.element[2] + columns.element[3]);
    }
  }
}

// Loads the fragments of scaled fp16: a thread has two consecutive members of two channels.
__device__ __forceinline__ void load_scaled(Fragments& fragments, Channels& channels,
                                            const unsigned char* stage, const FragmentRows& rows,
                                            int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto even = load_columns<float>(stage, rows, half, 0, column);
    const auto odd = load_columns<float>(stage, rows, half, kLaneMembers - 1, column);
    const float power = channels.power[half];
    if (channels.counts_lossy) {
      unsigned least = ~0u;
#pragma unroll
      for (int i = 0; i < kGroupColumns; ++i) {
        least = min(least, min(magnitude_key(even.element[i]), magnitude_key(odd.element[i])));
      }
      if (least < least_key(power)) ++counters()[half];
    }
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
      const float first = even.element[i] * power;
      const float second = odd.element[i] * power;
      const unsigned high = floats_to_halves(first, second);
      const int at = half + i % 2 * 2;
      fragments[0][i / 2][at] = high;
      if constexpr (C::parts == 2) {
        fragments[C::parts - 1][i / 2][at] = low_halves(first, second, high, kLowFactor);
      }
    }
    if constexpr (C::bias) {
      channels.bias[half] +=
          even.element[0] + odd.element[0] + (even.element[1] + odd.element[1]) +
          (even.element[2] + odd.element[2] + (even.element[3] + odd.element[3]));
    }
  }
}
static_assert(kGradGroup == 2 * kGroupColumns, "numbers that are checked together");

// Loads the fragments of a 16-bit type: a thread has two consecutive members of two channels.
template <class Half>
__device__ __forceinline__ void load_16_bit(Fragments& fragments, Channels& channels,
                                            const unsigned char* stage, const FragmentRows& rows,
                                            int column) {
  if constexpr (C::grad_channels_last) {
#pragma unroll
    for (int k = 0; k < kGroupMmas; ++k) {
      load_transposed(fragments[0][k], stage + rows.first + (column + 2 * k) * kPixelBytes);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto even = load_columns<Half>(stage, rows, half, 0, column);
      const auto odd = load_columns<Half>(stage, rows, half, kLaneMembers - 1, column);
#pragma unroll
      for (int i = 0; i < kGroupColumns; ++i) {
        fragments[0][i / 2][half + i % 2 * 2] =
            even.element[i].bits | static_cast<unsigned>(odd.element[i].bits) << 16;
      }
    }
  }
  if constexpr (C::bias) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float columns[kGroupColumns];
#pragma unroll
      for (int i = 0; i < kGroupColumns; ++i) {
        const unsigned word = fragments[0][i / 2][half + i % 2 * 2];
        columns[i] = widen(Half{static_cast<unsigned short>(word)}) +
                     widen(Half{static_cast<unsigned short>(word >> 16)});
      }
      channels.bias[half] += columns[0] + columns[1] + (columns[2] + columns[3]);
    }
  }
}

template <class Element>
__device__ __forceinline__ void load_fragments(Fragments& fragments, Channels& channels,
                                               const unsigned char* stage, const FragmentRows& rows,
                                               int column) {
  if constexpr (C::scaled_fp16) {
    load_scaled(fragments, channels, stage, rows, column);
  } else if constexpr (sizeof(Element) == 4) {
    load_rounded(fragments, channels, stage, rows, column);
  } else {
    load_16_bit<Element>(fragments, channels, stage, rows, column);
  }
}

// The byte offset of a thread's first fragment in a stage; `channel` is the warp's first.
__device__ __forceinline__ int first_fragment(int channel, int lane) {
  if constexpr (!C::grad_channels_last) {
    const int row = stage_row(channel + lane / 4, lane % 4 * kLaneMembers);
    return row * kRowBytes + swizzle_of(row);
  } else if constexpr (kScalarBytes == 4) {
    return lane % 4 * kMemberBytes + (channel + lane / 4) * kScalarBytes;
  } else {
    // load_transposed takes from each lane the address of a row of one of four matrices, members by
    // channels: for 8 channels and the next 8, in a column and in the next.
    return lane % 8 * kMemberBytes + lane / 16 * kPixelBytes +
           (channel + lane / 8 % 2 * 8) * kScalarBytes;
  }
}

__device__ __forceinline__ bool is_first_lane() { return threadIdx.x % 32 == 0; }

// A consumer warpgroup. Accumulators take nearly all registers, so values that are easily
// recomputed are not kept.
struct Consumer {
  int fragment;  // byte offset of the thread's first fragment in a stage
  int segment;   // first segment, counted from the first of the block's first plane
  // Offset of its first row in grad_output, in elements: only the lowest bits matter.
  unsigned origin;
  bool accumulate = false;
  Channels channels;
  float bias_total[2] = {0.0f, 0.0f};  // sums until the last flush
  Ring<C::input_stages> row{0};        // the first row of a step
  Ring<C::grad_stages> grad{0};

  __device__ Consumer(const Grad& grad_output, const Tables& tables, const Tile& tile) {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int warpgroup = thread / 128;
    const int channel = (C::channel_groups == 2 ? warpgroup * kOutputs : 0) + thread / 32 % 4 * 16;
    fragment = first_fragment(channel, thread % 32);
    segment = tile.segment - tile.plane() * C::kernel_rows +
              (C::channel_groups == 2 ? 0 : warpgroup * C::segments);
    const unsigned first = tile.group * C::group_out + tile.output + channel + thread % 32 / 4;
    origin = misalignment(grad_output) + first * kOutChannel;
    if constexpr (!Depth::exists) origin += member_distance(thread % 4 * kLaneMembers);
    if constexpr (C::scaled_fp16) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of_group = tile.channel(channel + thread % 32 / 4 + 8 * half);
        channels.power[half] =
            load_or_zero(tables.powers() + kInputs + tile.group * C::group_out + of_group,
                         of_group < C::group_out);
      }
    }
  }

  __device__ __forceinline__ void flush_bias() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias_total[half] += channels.bias[half];
      channels.bias[half] = 0.0f;
    }
  }

  // Whether this consumer counts subnormal numbers in a step of this output row. Consumers of the
  // same output channels load the same numbers, so they take turns. Only those of one launch do:
  // its reduction needs a complete count.
  __device__ static bool has_turn(const Partition& partition, int output_row) {
    const int before = partition.tile().number();
    const int in_launch = static_cast<int>(blockIdx.x) % partition.tiles;
    const int turns = min(kSameOutputs, partition.tiles - in_launch + before) * kSlices;
    const int turn = before * kSlices + static_cast<int>(threadIdx.x) / 128 % kSlices;
    return before <= in_launch && output_row % turns == turn;
  }

  // Adds the thread's counts to those of its channels.
  __device__ __forceinline__ void count_lossy(const Tables& tables, const Tile& tile) const {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const int channel_group = C::channel_groups == 2 ? thread / 128 : 0;
    const int first = channel_group * kOutputs + thread / 32 % 4 * 16 + thread % 32 / 4;
    unsigned* const counts = tables.lossy() + kInputs + tile.group * C::group_out;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Channels that do not exist have no count.
      const int channel = tile.channel(first + 8 * half);
      const unsigned lossy = counters()[half];
      if (channel < C::group_out && lossy > 0) add_to_memory(counts + channel, lossy);
    }
  }

  // Elements of grad_output from member 0 to another member.
  __device__ static unsigned member_distance(int member) {
    return static_cast<unsigned>(member % C::interleaved_images) * kOutImage +
           static_cast<unsigned>(member / C::interleaved_images) * (kSteps * kRowStep) *
               C::out_width;
  }

  // Where the i-th of the thread's members lies in grad_output, if images are planes of volumes:
  // their distances are not all alike.
  __device__ static unsigned of_volumes(int image, int i) {
    const int member = static_cast<int>(threadIdx.x) % 4 * kLaneMembers + i;
    return grad_image<unsigned>(image + member % C::interleaved_images) +
           static_cast<unsigned>(member / C::interleaved_images) * (kSteps * kRowStep) *
               C::out_width;
  }

  // The thread's rows in the stages of a step.
  __device__ FragmentRows fragment_rows(int image, int output_row) const {
    const unsigned moved = (Depth::exists ? 0u : static_cast<unsigned>(image) * kOutImage) +
                           static_cast<unsigned>(output_row) * C::out_width;
    FragmentRows rows;
    rows.first = fragment;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kLaneMembers; ++i) {
        const unsigned element = origin + moved + half * 8u * kOutChannel +
                                 (Depth::exists ? of_volumes(image, i)
                                  : i > 0       ? member_distance(1)
                                                : 0u);
        rows.shifts[half][i] = kShifted ? static_cast<int>(element % kVector) * kScalarBytes : 0;
      }
    }
    return rows;
  }

  // The descriptor of the ring of input rows. Along K comes the neighbouring column; along N the
  // next octet, or the next tap if there is only one octet.
  __device__ static Matrix ring() {
    constexpr bool kNextTap = C::mma_octets == 1 && C::mma_taps > 1;
    constexpr int kAlong = C::stride_width * kColumnVectors * 16;
    constexpr int kAcross = 128 * (kNextTap ? C::dilation_width : 1);
    static_assert(max_of(kAlong, kAcross) < 1 << 18, "offsets fit a matrix descriptor");
    return matrix(shared_memory() + kInputRing, kAlong, kAcross);
  }

  // Waits for input rows of this step.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void wait_for_rows() const {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      const Ring<C::input_stages> at = row + i;
      barrier_wait(&barriers().input_full[at.stage()], at.parity());
    }
  }

  // Releases the step's first input rows.
  __device__ __forceinline__ void release_rows(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (is_first_lane()) barrier_arrive(&barriers().input_empty[row.stage()]);
      row.advance();
    }
  }

  // Where each segment begins in the rows of this step: the lower 32 bits of its matrix descriptor,
  // the only ones that differ.
  __device__ __forceinline__ void find_segments(unsigned (&starts)[C::segments],
                                                int early_columns) const {
    // The plane is a compile-time constant where a warpgroup's first segment is a plane's first.
    constexpr bool kWholePlanes = C::segments % C::kernel_rows == 0;
    const int column = kShift + (C::lead - early_columns) * C::stride_width;
    const unsigned first = static_cast<unsigned>(ring()) + column * kColumnVectors +
                           (kWholePlanes ? segment / C::kernel_rows * kPlaneVectors : 0);
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
      const int at = kWholePlanes ? i : segment + i;
      starts[i] = first + (row + at % C::kernel_rows).stage() * kRowVectors +
                  at / C::kernel_rows * kPlaneVectors;
    }
  }

  // Issues the MMAs of 4 columns, `column` columns after the starts of the segments.
  template <int kLeftPart, int kRightPart>
  __device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& fragments,
                                           const unsigned (&starts)[C::segments], int column,
                                           bool accumulate_first) const {
#pragma unroll
    for (int k = 0; k < kGroupMmas; ++k) {
#pragma unroll
      for (int i = 0; i < C::segments; ++i) {
        const int offset =
            (column + 2 * k) * (C::stride_width * kColumnVectors) + kRightPart * kPartVectors;
        const Matrix right = ring() >> 32 << 32 | (starts[i] + offset);
        wgmma<kColumns>(Factor{}, acc[i], fragments[kLeftPart][k], right,
                        k > 0 || accumulate_first);
      }
    }
  }

  // Multiplies a stage. While one group of MMAs runs, the next group's left operands are loaded to
  // other registers.
  __device__ __forceinline__ void multiply_stage(Accumulators& acc, Fragments (&fragments)[2],
                                                 unsigned (&starts)[C::segments],
                                                 const unsigned char* stage,
                                                 const FragmentRows& rows, int columns) {
#pragma unroll 1
    for (int column = 0; column < columns; column += kBodyColumns) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        load_fragments<Scalar>(fragments[group], channels, stage, rows,
                               column + group * kGroupColumns);
        wgmma_fence();
        multiply<0, 0>(acc, fragments[group], starts, group * kGroupColumns,
                       group > 0 || accumulate);
        wgmma_commit();
        wgmma_wait<1>();
      }
      accumulate = true;
      move_on(starts);
    }
  }

  // Multiplies a stage of numbers in two parts, whose accumulators are added to totals. Large
  // products come last, so that what small ones add is not lost.
  __device__ __forceinline__ void multiply_stage_split(Accumulators& acc, Accumulators& totals,
                                                       Fragments (&fragments)[2],
                                                       unsigned (&starts)[C::segments],
                                                       const unsigned char* stage,
                                                       const FragmentRows& rows, int columns) {
#pragma unroll 1
    for (int column = 0; column < columns; column += kBodyColumns) {
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        constexpr int kLow = C::parts - 1;
        load_fragments<Scalar>(fragments[group], channels, stage, rows,
                               column + group * kGroupColumns);
        wgmma_fence();
        multiply<kLow, 0>(acc, fragments[group], starts, group * kGroupColumns, group > 0);
        multiply<0, kLow>(acc, fragments[group], starts, group * kGroupColumns, true);
        if constexpr (!C::scaled_fp16) {
          multiply<0, 0>(acc, fragments[group], starts, group * kGroupColumns, true);
        }
        wgmma_commit();
      }
      if constexpr (C::scaled_fp16) {
        // Low parts are enlarged, so their products are accumulated separately.
        add_to_totals(totals, acc, 1.0f / kLowFactor);
        wgmma_fence();
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          multiply<0, 0>(acc, fragments[group], starts, group * kGroupColumns, group > 0);
        }
        wgmma_commit();
      }
      add_to_totals(totals, acc, 1.0f);
      move_on(starts);
    }
  }

  // Waits for the MMAs, and adds their accumulators, times `factor`, to the totals.
  __device__ static __forceinline__ void add_to_totals(Accumulators& totals, Accumulators& acc,
                                                       float factor) {
    wgmma_wait<0>();
    hold_accumulators(acc);
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
#pragma unroll
      for (int j = 0; j < kAccs; ++j) {
        totals[i][j] =
            factor == 1.0f ? totals[i][j] + acc[i][j] : fmaf(acc[i][j], factor, totals[i][j]);
      }
    }
  }

  __device__ __forceinline__ void move_on(unsigned (&starts)[C::segments]) const {
#pragma unroll
    for (int i = 0; i < C::segments; ++i) {
      starts[i] += kBodyColumns * C::stride_width * kColumnVectors;
    }
  }

  // Multiplies a step.
  __device__ __forceinline__ void compute(Accumulators& acc, Accumulators& totals, int image,
                                          int output_row, int of_class, int columns) {
    unsigned starts[C::segments];
    Fragments fragments[2];
    find_segments(starts, early(output_row, of_class));
    const FragmentRows rows = fragment_rows(image, output_row);
#pragma unroll 1
    for (int column = 0; column < columns; column += C::stage_columns) {
      // The width is a compile-time constant where all stages are whole.
      const int stage_columns = kRowColumns % C::stage_columns == 0
                                    ? C::stage_columns
                                    : min(C::stage_columns, columns - column);
      barrier_wait(&barriers().grad_full[grad.stage()], grad.parity());
      const unsigned char* const stage = shared_memory() + kGradRing + grad.stage() * kStageBytes;
      if constexpr (C::parts == 2) {
        multiply_stage_split(acc, totals, fragments, starts, stage, rows, stage_columns);
      } else {
        multiply_stage(acc, fragments, starts, stage, rows, stage_columns);
      }
      __syncwarp();
      if (is_first_lane()) barrier_arrive(&barriers().grad_empty[grad.stage()]);
      grad.advance();
    }
    wgmma_wait<0>();
  }
};

// Where the bias's sums begin in the workspace, behind all slots: [block][warpgroup][channel].
__device__ __forceinline__ long long bias_slots(int blocks, int block, int warpgroup) {
  return static_cast<long long>(blocks) * (kConsumers * kSlots * 128 * 4) +
         (block * kConsumers + warpgroup) * kOutputs;
}

// Writes a consumer's sums for the bias; four lanes have the members of a channel.
__device__ __forceinline__ void store_bias(const Consumer& consumer, float4* workspace,
                                           const Partition& partition) {
  const int thread = static_cast<int>(threadIdx.x) - 128;
  float* const target = reinterpret_cast<float*>(workspace) +
                        bias_slots(partition.tiles * partition.workers, blockIdx.x, thread / 128);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = sum_of_four_lanes(consumer.bias_total[half] + consumer.channels.bias[half]);
    if (thread % 4 == 0) target[thread / 32 % 4 * 16 + thread % 32 / 4 + half * 8] = total;
  }
}

// Where a warpgroup's slots begin: [block][warpgroup][slot][thread].
__device__ __forceinline__ long long slots_of(int block, int warpgroup) {
  return (static_cast<long long>(block) * kConsumers + warpgroup) * (kSlots * 128);
}

__device__ __forceinline__ void consume(const Grad& grad_output, const Tables& tables,
                                        const Partition& partition) {
  Share share = partition.share();
  Consumer consumer(grad_output, tables, partition.tile());
  const int thread = static_cast<int>(threadIdx.x) - 128;
  float4* const slots = tables.workspace() + slots_of(blockIdx.x, thread / 128) + thread % 128;
  Accumulators acc, more;
  // With numbers in two parts, `more` collects the accumulators.
  Accumulators& totals = C::parts == 2 ? more : acc;
  clear(totals);
  if constexpr (C::scaled_fp16) counters()[0] = counters()[1] = 0u;
  int steps = 0;  // since the last flush
  bool flushed = false;
  while (share.more()) {
    const Run run = share.next();
    consumer.wait_for_rows<0, kOldRows>();
#pragma unroll 1
    for (int step = 0; step < run.steps; ++step) {
      consumer.wait_for_rows<kOldRows, C::kernel_rows>();
      if constexpr (C::scaled_fp16) {
        consumer.channels.counts_lossy = Consumer::has_turn(partition, run.output_row(step));
      }
      consumer.compute(acc, totals, run.image, run.output_row(step), partition.tile().of_class(),
                       columns_of(run.strip));
      consumer.release_rows(kNewRows);
      if (++steps == C::flush_steps) {
        flush(totals, slots, !flushed);
        flushed = true;
        steps = 0;
        consumer.accumulate = false;
        consumer.flush_bias();
        if constexpr (C::parts == 2) clear(totals);
      }
    }
    consumer.release_rows(kOldRows);
  }
  if (steps > 0 || !flushed) flush(totals, slots, !flushed);
  if constexpr (C::bias) store_bias(consumer, tables.workspace(), partition);
  if constexpr (C::scaled_fp16) consumer.count_lossy(tables, partition.tile());
}

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["hopper/wgrad_halo/copy.cuh"] = r"""
// Producer warps of grad_output: copy it to shared memory as it is.
#include "hopper/wgrad_halo/tile.cuh"

namespace fastconv {
namespace hopper {

// How the four producer warps are divided.
constexpr int kGradWarps = C::grad_boxes && !kClears ? 1 : 2;
constexpr int kInputWarps = 4 - kGradWarps;
constexpr int kGradArrivals = C::grad_boxes ? 1 : 32 * kGradWarps;  // arrivals that fill a stage
constexpr int kInImage = C::groups * kInChannels * Depth::in * C::in_height * C::in_width;
constexpr int kInColumn = C::in_channels_last ? C::groups * C::group_in : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInPlane = C::in_height * C::in_width;
constexpr int kInChannel = C::in_channels_last ? 1 : Depth::in * kInPlane;
constexpr int kOutPlane = C::out_height * C::out_width;
constexpr int kOutChannel = Depth::out * kOutPlane;
constexpr int kOutImage = C::groups * C::group_out * kOutChannel;
static_assert(elements_of(C::groups, kInChannels, Depth::in, C::in_height, C::in_width) <
                  kMostElements,
              "");
static_assert(elements_of(C::groups, C::group_out, Depth::out, C::out_height, C::out_width) <
                  kMostElements,
              "");

// The offset of an image in grad_output, or of an output plane.
template <class Offset>
__device__ __forceinline__ Offset grad_image(int image) {
  if constexpr (Depth::exists) {
    return static_cast<Offset>(image / Depth::out) * kOutImage +
           static_cast<Offset>(image % Depth::out) * kOutPlane;
  } else {
    return static_cast<Offset>(image) * kOutImage;
  }
}

// By how many columns a step begins early. It is the same for all members, and for all channels of
// an alignment class.
__device__ __forceinline__ int early(int output_row, int of_class = 0) {
  // The row may be beyond the image; the lowest bits are right in any case.
  const unsigned first = static_cast<unsigned>(output_row) * C::out_width +
                         static_cast<unsigned>(of_class) * kOutChannel;
  return C::lead == 0 ? 0 : static_cast<int>(first % static_cast<unsigned>(kVector));
}

// Where a member of a step lies in grad_output.
struct MemberPlace {
  int image;
  int row;
  bool exists;

  // `first_image` and `first_row` are those of member 0.
  __device__ MemberPlace(int first_image, int first_row, int member, int batch) {
    image = first_image + member % C::interleaved_images;
    row = first_row + member / C::interleaved_images * (kSteps * kRowStep);
    exists = image < batch && row < C::out_height;
  }
};

// Elements that a lane copies at once: at a row's ends, which are whole multiples of them, or of a
// pixel's channels. Less than 4 bytes are stored from registers, since cp.async cannot copy them.
constexpr int kCopied = C::grad_channels_last ? C::grad_vector : gcd(C::out_width, C::grad_vector);
// Inside of a row, lanes copy whole units of 16 bytes.
constexpr int kMostCopied = C::grad_channels_last || kShifted ? kCopied : kVector;

// The part of a step that fills a stage.
struct StagePlace {
  int image;  // image of member 0
  int row;
  int column;   // first column
  int columns;  // columns that consumers read
};

// Elements from the last multiple of 16 bytes to an address.
__device__ __forceinline__ int misalignment(const Scalar* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) / kScalarBytes % kVector);
}

// The units of 16 bytes of a row in a stage, beginning at `column` of the row. One bulk copy takes
// [begin, end), all units that lie entirely in the row.
struct Units {
  int column;
  int begin;
  int end;
  int count;

  // `row` is any address with the alignment of the row's first column.
  __device__ Units(const Scalar* row, const StagePlace& place, bool exists) {
    column = place.column - (kShifted ? misalignment(row) : early(place.row));
    count = place.columns / kVector + (kShifted ? 1 : 0);
    begin = column < 0 ? 1 : 0;
    end = max(min(count, floor_div(C::out_width - column, kVector)), begin);
    if (!exists) end = begin;
  }

  __device__ int bytes() const { return (end - begin) * 16; }
};

// A warp's part of the copies of a stage: the rows of some channels, of all members. One bulk copy
// brings the whole units inside of a row; lanes copy the others, and write zeros beyond a row's
// ends.
struct RowCopier {
  static constexpr int kChannels = kStageChannels / kGradWarps;

  const Scalar* channels;  // the first channel, in image 0
  int count;               // channels that exist
  int first;               // index of the first among the stage's channels
  int lane;

  __device__ RowCopier(const Scalar* grad_output, const Tile& tile, int thread) {
    first = thread / 32 * kChannels;
    lane = thread % 32;
    const int channel = tile.output + first;
    channels =
        grad_output + static_cast<long long>(tile.group * C::group_out + channel) * kOutChannel;
    count = C::group_out % kStageChannels == 0 ? kChannels
                                               : max(min(kChannels, C::group_out - channel), 0);
  }

  __device__ __forceinline__ void copy(unsigned char* stage, Barrier* barrier, int batch,
                                       const StagePlace& place) const {
#pragma unroll 1
    for (int member = 0; member < kInterleave; ++member) {
      const MemberPlace of(place.image, place.row, member, batch);
      const Scalar* const row =
          channels + (of.exists ? grad_image<long long>(of.image) + of.row * C::out_width : 0);
      unsigned char* const target = stage + stage_row(first, member) * kRowBytes;
      if constexpr (!C::grad_bulk) {
        copy_all(target, row, place, of.exists);
      } else {
        if (of.exists && is_elected()) copy_inside(target, row, barrier, place);
        if (!of.exists || has_edges(place)) copy_edges(target, row, place, of.exists);
      }
    }
  }

  // Whether some row of the stage may have units that are not entirely inside of it.
  __device__ static __forceinline__ bool has_edges(const StagePlace& place) {
    const int first = place.column - (kShifted ? kVector - 1 : early(place.row));
    const int end = place.column - early(place.row) + place.columns + (kShifted ? kVector : 0);
    return first < 0 || end > C::out_width;
  }

  // Called by the elected lane. All operands are the same for the whole warp.
  __device__ __forceinline__ void copy_inside(unsigned char* target, const Scalar* row,
                                              Barrier* barrier, const StagePlace& place) const {
    if constexpr (!kShifted) {
      const Units units(row, place, true);  // the same for every row
      if (units.bytes() == 0) return;
      barrier_expect(barrier, count * units.bytes());
      const Scalar* source = row + (units.column + units.begin * kVector);
      unsigned char* to = target + units.begin * 16;
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        bulk_load(to, source, units.bytes(), barrier);
        to += 4 * kRowBytes;
        source += kOutChannel;
      }
    } else {
      int bytes = 0;
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        const Scalar* const of = row + i * kOutChannel;
        const Units units(of, place, true);
        bytes += units.bytes();
        if (units.bytes() == 0) continue;
        bulk_load(target + i * (4 * kRowBytes) + units.begin * 16,
                  of + (units.column + units.begin * kVector), units.bytes(), barrier);
      }
      barrier_expect(barrier, bytes);
    }
  }

  // Copies what copy_inside leaves out, one row for each lane, with zeros beyond the row's ends.
  __device__ __forceinline__ void copy_edges(unsigned char* target, const Scalar* row,
                                             const StagePlace& place, bool exists) const {
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      const Scalar* const source = row + i * kOutChannel;
      unsigned char* const to = target + i * (4 * kRowBytes);
      const Units units(source, place, exists);
      if (units.begin > 0) copy_unit(to, source, units.column, exists);
#pragma unroll 1
      for (int unit = units.end; unit < units.count; ++unit) {
        copy_unit(to + unit * 16, source, units.column + unit * kVector, exists);
      }
    }
  }

  // Copies all units without bulk copies: neighbouring lanes have neighbouring units.
  __device__ __forceinline__ void copy_all(unsigned char* target, const Scalar* row,
                                           const StagePlace& place, bool exists) const {
#pragma unroll 2
    for (int i = lane; i < count * kStageUnits; i += 32) {
      const int channel = i / kStageUnits;
      const int unit = i % kStageUnits;
      const Scalar* const source = row + channel * kOutChannel;
      const Units units(source, place, exists);
      if (unit < units.count) {
        copy_unit(target + channel * (4 * kRowBytes) + unit * 16, source,
                  units.column + unit * kVector, exists);
      }
    }
  }

  // Copies 16 bytes of a row, from a column on, with zeros beyond its ends, or everywhere if the
  // row does not exist (then `row` is just an aligned address).
  __device__ static __forceinline__ void copy_unit(unsigned char* target, const Scalar* row,
                                                   int column, bool exists) {
    Scalar* const unit = reinterpret_cast<Scalar*>(target);
    const bool inside = column >= 0 && column + kVector <= C::out_width;
    if (!kShifted && (inside || !exists)) {
      copy_elements<kVector>(unit, row + (exists ? column : 0), exists);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; i += kCopied) {
      const int at = column + i;
      const bool valid = exists && at >= 0 && at < C::out_width;
      copy_elements<kCopied>(unit + i, row + (valid ? at : 0), valid);
    }
  }
};

// The copies of channels-last tensors. The warps take turns at the members. A member's columns are
// one bulk copy if all channels of a pixel are the block's, otherwise each column is one.
struct PixelCopier {
  static constexpr int kOutChannels = C::groups * C::group_out;
  // With several groups, a pixel has channels of other groups between the block's.
  static constexpr bool kWholePixels = C::groups == 1 && kOutChannels == kStageChannels;
  static constexpr int kPixelVectors = kStageChannels / kVector;
  using Offset = IndexTo<elements_of(kCoveredRows, C::out_width, kOutChannels) +
                         elements_of(kStrips, kStripColumns, kOutChannels)>;

  const Scalar* channels;
  int count;  // channels that exist
  int warp;
  int lane;

  __device__ PixelCopier(const Scalar* grad_output, const Tile& tile, int thread) {
    channels = grad_output + (tile.group * C::group_out + tile.output);
    count = min(kStageChannels, C::group_out - tile.output);
    warp = thread / 32;
    lane = thread % 32;
  }

  __device__ __forceinline__ void copy(unsigned char* stage, Barrier* barrier, int batch,
                                       const StagePlace& place) const {
#pragma unroll 1
    for (int member = warp; member < kInterleave; member += kGradWarps) {
      const MemberPlace of(place.image, place.row, member, batch);
      const int columns = of.exists ? min(place.columns, C::out_width - place.column) : 0;
      const Scalar* const pixel =
          channels + static_cast<long long>(of.image) * kOutImage +
          (static_cast<Offset>(of.row) * C::out_width + place.column) * kOutChannels;
      unsigned char* const target = stage + member * kMemberBytes;
      if (C::grad_bulk && columns > 0 && is_elected()) copy_inside(target, pixel, columns, barrier);
      copy_rest(target, pixel, C::grad_bulk ? max(columns, 0) : 0, columns, place.columns);
    }
  }

  __device__ __forceinline__ void copy_inside(unsigned char* target, const Scalar* pixel,
                                              int columns, Barrier* barrier) const {
    const int bytes = count * kScalarBytes;
    barrier_expect(barrier, columns * bytes);
    if constexpr (kWholePixels) {
      bulk_load(target, pixel, columns * bytes, barrier);
    } else {
#pragma unroll 4
      for (int i = 0; i < columns; ++i) {
        bulk_load(target + i * kPixelBytes, pixel + i * kOutChannels, bytes, barrier);
      }
    }
  }

  // Copies columns from `first` to `end`, with zeros from `columns` on.
  __device__ __forceinline__ void copy_rest(unsigned char* target, const Scalar* pixel, int first,
                                            int columns, int end) const {
    for (int i = first * kPixelVectors + lane; i < end * kPixelVectors; i += 32) {
      const int column = i / kPixelVectors;
      const int channel = i % kPixelVectors * kVector;
      Scalar* const unit = reinterpret_cast<Scalar*>(target + i * 16);
#pragma unroll
      for (int j = 0; j < kVector; j += kCopied) {
        const bool exists = column < columns && channel + j < count;
        copy_elements<kCopied>(
            unit + j, exists ? pixel + column * kOutChannels + channel + j : channels, exists);
      }
    }
  }
};

template <bool kChannelsLast>
struct CopierFor {
  using type = RowCopier;
};
template <>
struct CopierFor<true> {
  using type = PixelCopier;
};
using GradCopier = CopierFor<C::grad_channels_last>::type;

// Arrives when everything that this thread has stored or copied to shared memory is visible.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
  constexpr bool kCopies = kMostCopied * kScalarBytes >= 4;
  constexpr bool kWrites = kCopied * kScalarBytes < 4;
  if constexpr (kCopies && kWrites) {
    barrier_expect_copies(barrier);
    barrier_arrive(barrier);
  } else if constexpr (kCopies) {
    barrier_arrive_after_copies(barrier);
  } else {
    barrier_arrive(barrier);
  }
}

// Calls `fill` for every stage that the block needs, when it is empty, with its position in the
// ring.
template <class Fill>
__device__ __forceinline__ void for_stages(const Partition& partition, Fill fill) {
  Share share = partition.share();
  Ring<C::grad_stages> at(1);
  while (share.more()) {
    const Run run = share.next();
    const int columns = columns_of(run.strip);
#pragma unroll 1
    for (int step = 0; step < run.steps; ++step) {
#pragma unroll 1
      for (int column = 0; column < columns; column += C::stage_columns) {
        barrier_wait(&barriers().grad_empty[at.stage()], at.parity());
        fill(at, StagePlace{run.image, run.output_row(step), run.strip * kStripColumns + column,
                            min(C::stage_columns, columns - column)});
        at.advance();
      }
    }
  }
}
__device__ __forceinline__ unsigned char* grad_stage(const Ring<C::grad_stages>& at) {
  return shared_memory() + kGradRing + at.stage() * kStageBytes;
}

// Copies grad_output with two warps.
__device__ __forceinline__ void load_grad(const Scalar* grad_output, const Partition& partition) {
  const GradCopier copier(grad_output, partition.tile(), static_cast<int>(threadIdx.x));
  for_stages(partition, [&](const Ring<C::grad_stages>& at, const StagePlace& place) {
    Barrier* const full = &barriers().grad_full[at.stage()];
    // Bulk copies will overwrite what lanes may have stored to the stage.
    fence_async_shared();
    __syncwarp();
    copier.copy(grad_stage(at), full, partition.batch, place);
    __syncwarp();
    arrive_after_copies(full);
  });
}

// Copies grad_output with one lane, in TMA boxes of all channels and members. TMA gives zeros
// beyond the tensor's ends.
__device__ __forceinline__ void load_boxes(const TensorMap& grad_output,
                                           const Partition& partition) {
  tensor_map_prefetch(grad_output);
  const Tile tile = partition.tile();
  const int channel = (tile.group * C::group_out + tile.output) / kClasses;
  const int plane = tile.of_class() * kOutChannel;
  for_stages(partition, [&](const Ring<C::grad_stages>& at, const StagePlace& place) {
    Barrier* const full = (kClears ? barriers().box_full : barriers().grad_full) + at.stage();
    const int images = place.image / kLaneMembers;
    barrier_arrive_expect(full, kStageBytes);
    if constexpr (kClears) {
      fence_async_shared();  // clear_boxes has written to the stage
      const int first = place.column - early(place.row, tile.of_class());
      // A row of the tensor map is several planes, one behind the other. A row beyond the image
      // would be one of the next plane: its box goes behind all planes instead, where TMA gives
      // zeros.
      const bool exists = kSteps * kRowStep <= C::out_height || place.row < C::out_height;
      const int pixel = exists ? plane + place.row * C::out_width + first : kClasses * kOutChannel;
      tensor_load(grad_stage(at), grad_output, {pixel, images, channel, 0}, full);
    } else {
      tensor_load(grad_stage(at), grad_output, {place.column, images, channel, 0, place.row}, full);
    }
  });
}

// Writes zeros to columns [begin, end) of a lane's rows.
__device__ __forceinline__ void clear_columns(unsigned char* stage, int begin, int end) {
  if (begin >= end) return;  // most stages have nothing to clear, and consumers wait for them
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) % 32; row < kStageRows; row += 32) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const int at = row * kRowBytes + (i * kScalarBytes ^ swizzle_of(row));
      *reinterpret_cast<Scalar*>(stage + at) = Scalar{};
    }
  }
}

// Clears what a box has beyond its row's ends.
__device__ __forceinline__ void clear_box(unsigned char* stage, const StagePlace& place,
                                          int of_class) {
  const int first = place.column - early(place.row, of_class);
  clear_columns(stage, 0, -first);
  // The box may begin beyond the row's end.
  clear_columns(stage, max(C::out_width - first, 0), place.columns);
}

// Clears every box with one warp, and hands it to the consumers.
__device__ __forceinline__ void clear_boxes(const Partition& partition) {
  const int of_class = partition.tile().of_class();
  for_stages(partition, [&](const Ring<C::grad_stages>& at, const StagePlace& place) {
    barrier_wait(&barriers().box_full[at.stage()], 1u - at.parity());
    clear_box(grad_stage(at), place, of_class);
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers().grad_full[at.stage()]);
  });
}

__device__ __forceinline__ void load_grad(const TensorMap& grad_output,
                                          const Partition& partition) {
  if (kClears && threadIdx.x >= 32) {
    clear_boxes(partition);
  } else if (is_elected()) {
    load_boxes(grad_output, partition);
  }
}

// The kernel's parameter for grad_output.
using Grad = Either<C::grad_boxes, TensorMap, const Scalar*>::type;
__device__ __forceinline__ int misalignment(const TensorMap&) { return 0; }

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["hopper/wgrad_halo/scale.cuh"] = r"""
// Scaled fp16 for weight gradients: float32 multiplied as float16, in half the time of TF32, with
// the same mantissa but a smaller range.
//
// Each channel of either tensor is multiplied, in all images, by a power of two that a sample of
// its numbers decides. Below 2^-14 float16 is subnormal and loses bits of a number. Threads that
// have such numbers in registers count them. The reduction compares what these numbers may have
// lost with the magnitude of each weight, and marks the filters (of an output and an input channel)
// for which it may be too much. A second pair of launches (`repairs`) computes those in TF32.
//
// Numbers above 65504 become infinite, and results that they contribute to become infinite or NaN:
// such filters are marked too.
#include "device/tensor/powers.cuh"
#include "hopper/wgrad_halo/tile.cuh"

namespace fastconv {
namespace hopper {

constexpr int kInputs = C::groups * C::group_in;  // channels of all groups
constexpr int kGradients = C::groups * C::group_out;

// Tables at the start of the workspace: one entry for each channel of both tensors, the input's
// first, then one for each filter.
struct Tables {
  float4* scratch;

  // What a channel's numbers are multiplied by; kNoPowerBits if no power is suitable.
  __device__ __forceinline__ float* powers() const { return reinterpret_cast<float*>(scratch); }
  // How many groups of a channel's numbers contain one that is subnormal in float16.
  __device__ __forceinline__ unsigned* lossy() const {
    return reinterpret_cast<unsigned*>(powers() + kInputs + kGradients);
  }
  // Not 0 for filters that must be computed again in TF32.
  __device__ __forceinline__ int* marks() const {
    return reinterpret_cast<int*>(lossy() + kInputs + kGradients);
  }
  // The index of a filter; `output` counts the channels of all groups, `input` those of one.
  __device__ static __forceinline__ int filter(int output, int input) {
    return output * C::group_in + input;
  }
  // The slots of accumulators, behind the tables.
  __device__ __forceinline__ float4* workspace() const { return scratch + C::slots_at; }
};

__device__ __forceinline__ float scaled(float number, float power) {
  return C::scaled_fp16 ? number * power : number;
}
template <class Half>
__device__ __forceinline__ Half scaled(Half element, float) {
  return element;  // only float32 is scaled
}

// --- Numbers that are subnormal in float16 -------------------------------------------------------

// A key that orders numbers by magnitude, with zeros above all others, since they lose nothing.
__host__ __device__ constexpr unsigned magnitude_key_of(unsigned bits) { return bits * 2u - 1u; }
__device__ __forceinline__ unsigned magnitude_key(float number) {
  return magnitude_key_of(__float_as_uint(number));
}
// The power of a channel whose sample does not tell how large it is. It makes all but the smallest
// numbers infinite, and least_key counts every number that is not zero as lossy.
constexpr unsigned kNoPowerBits = (127u + 113u) << 23;

// The key of the least number that keeps all bits, 2^-14 divided by the power: a single
// instruction. (Given a comparison of the power with zero and a product of floats, ptxas 13.0
// computed ~0u for all powers where registers were short.)
__device__ __forceinline__ unsigned least_key(float power) {
  constexpr unsigned kOne = 127u << 23, kLeast = (127u - 14u) << 23;
  static_assert(magnitude_key_of(kLeast + kOne - kNoPowerBits) == ~0u, "no number has all bits");
  return magnitude_key_of(kLeast + kOne) - 2u * __float_as_uint(power);
}

// How many numbers are checked together; of the input, all that a lane loads at once.
constexpr int kGradGroup = 8;
constexpr int kInputGroup = kQuad * kInterleave;

// --- Samples -------------------------------------------------------------------------------------

constexpr int kSamplePieces = 2048;  // pieces of 32 numbers that are sampled of a channel

// Block-wide: the power of a channel whose planes have kPixels pixels and lie `image` elements
// apart.
template <int kPixels>
__device__ __forceinline__ float power_of(const Scalar* channel, long long image, int batch) {
  constexpr int kAll = ceil_div(kPixels, 32);
  constexpr unsigned kLast = kPixels > 32 ? kPixels - 32 : 0;    // where the last piece begins
  const int pieces = min(ceil_div(kSamplePieces, batch), kAll);  // pieces of an image
  const unsigned distance = pieces > 1 ? ceil_div(static_cast<int>(kLast), pieces - 1) : 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  // Pieces are taken image by image. A division for each piece would take longer than its load.
  const int more_images = warps % batch;
  const int more_pieces = warps / batch;
  int of_image = warp % batch;
  unsigned piece = warp / batch;
  float largest = 0.0f;
#pragma unroll 16
  for (int i = warp; i < pieces * batch; i += warps) {
    const Scalar* const source = channel + (of_image * image + min(piece * distance, kLast) + lane);
    largest = larger(largest, fabsf(widen(load_element(source, lane < kPixels))));
    of_image += more_images;
    piece += more_pieces;
    if (of_image >= batch) {
      of_image -= batch;
      ++piece;
    }
  }
  largest = block_largest(largest);
  const float power = largest == 0.0f ? 0.0f : scale_to(largest, kSampleExponent);
  return power == 0.0f ? __uint_as_float(kNoPowerBits) : power;
}

// The number of an input channel in memory, of all groups.
__device__ __forceinline__ int in_memory(int input) {
  if constexpr (!Depth::exists) return input;
  return input / C::group_in * kInChannels + InChannel(input % C::group_in).channel;
}

// Finds the powers of all channels, and clears the other tables.
__device__ __forceinline__ void find_powers(const Scalar* grad_output, const Scalar* input,
                                            const Tables& tables, int batch) {
  constexpr int kInPixels = Depth::in * C::in_height * C::in_width;
  constexpr int kOutPixels = Depth::out * C::out_height * C::out_width;
  constexpr int kInMemory = C::groups * kInChannels;
  const int volumes = batch / Depth::out;
#pragma unroll 1
  for (int i = blockIdx.x; i < kInputs + kGradients; i += gridDim.x) {
    const int output = i - kInputs;
    const float power =
        output < 0 ? power_of<kInPixels>(input + static_cast<long long>(in_memory(i)) * kInPixels,
                                         static_cast<long long>(kInMemory) * kInPixels, volumes)
                   : power_of<kOutPixels>(grad_output + static_cast<long long>(output) * kOutPixels,
                                          static_cast<long long>(kGradients) * kOutPixels, volumes);
    if (threadIdx.x == 0) {
      tables.powers()[i] = power;
      tables.lossy()[i] = 0;
    }
  }
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kGradients * C::group_in; i += step) {
    tables.marks()[i] = 0;
  }
}

// --- Deciding which filters fit ------------------------------------------------------------------

// The most that a number below 2^-14 loses, times the largest number that it is multiplied by.
constexpr float kLoss = 65536.0f / (C::parts == 2 ? 1ll << 35 : 1ll << 24);
// What a weight may lose, relative to the magnitudes of its blocks' parts.
constexpr float kTolerance = 1.0f / (C::parts == 2 ? 1 << 25 : 1 << 20);

// A channel's power and count.
struct ScaledChannel {
  float power;
  float lossy;  // upper bound of its subnormal numbers

  __device__ ScaledChannel(const Tables& tables, int channel, int group)
      : power(tables.powers()[channel]),
        lossy(static_cast<float>(tables.lossy()[channel]) * group) {}
  // Whether all of the channel's numbers are zero.
  __device__ __forceinline__ bool zero() const {
    return __float_as_uint(power) == kNoPowerBits && lossy == 0.0f;
  }
  // What scales accumulators back.
  __device__ __forceinline__ float back() const { return inverse(power); }
};

// Whether a weight is as accurate as TF32's; `size` is the sum of the magnitudes of its parts.
__device__ __forceinline__ bool fits(const ScaledChannel& input, const ScaledChannel& gradient,
                                     float sum, float size) {
  const bool loses = !input.zero() && !gradient.zero();
  const float lost = loses ? (input.lossy + gradient.lossy) * kLoss : 0.0f;
  return is_finite(sum) && lost <= size * kTolerance;
}

// Whether a filter of a tile is marked. All lanes of a warp call it and get the same answer.
__device__ __forceinline__ bool is_marked(const Tables& tables, const Tile& tile) {
  constexpr int kBlockInputs = kBlockPlanes * kPlaneChannels;
  const int first_input = tile.plane() * kPlaneChannels;
  int found = 0;
#pragma unroll 16
  for (int i = threadIdx.x % 32; i < kStageChannels * kBlockInputs; i += 32) {
    const int output = tile.channel(i / kBlockInputs);
    const int input = first_input + i % kBlockInputs;
    const bool exists = output < C::group_out && input < C::group_in;
    // An early exit would make each load wait for the one before.
    found |= exists ? tables.marks()[Tables::filter(tile.group * C::group_out + output, input)] : 0;
  }
  return __any_sync(~0u, found != 0);
}

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["hopper/workspace.cuh"] = r"""
// Moves wgmma's accumulators to the workspace.
#include "device/sm90.cuh"
#include "device/tensor/workspace.cuh"

namespace fastconv {
namespace hopper {

template <int kRows, int kAccs>
__device__ __forceinline__ void hold_accumulators(float (&acc)[kRows][kAccs]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) hold_registers(acc[i]);
}

// Adds a thread's accumulators to its slots, or overwrites these (`set`). The slots of a
// warpgroup's threads are interleaved.
template <int kRows, int kAccs>
__device__ __forceinline__ void flush(float (&acc)[kRows][kAccs], float4* slots, bool set) {
  hold_accumulators(acc);
  tensor::flush<128>(acc, slots, set);
}

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["device/tensor/workspace.cuh"] = r"""
// Partial accumulators of weight gradients. Each thread has its own slots in the workspace, of four
// accumulators each, side by side with its neighbours' slots; a second kernel reduces them in a
// fixed order.
#include "device/tensor/depth.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace tensor {

template <int kRows, int kAccs>
__device__ __forceinline__ void clear(float (&acc)[kRows][kAccs]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kAccs; ++j) acc[i][j] = 0.0f;
  }
}

// Adds a thread's accumulators to its slots of the workspace, or overwrites the slots (kSet). The
// slots of kThreads threads are interleaved.
template <int kThreads, bool kSet, int kRows, int kAccs>
__device__ __forceinline__ void flush(const float (&acc)[kRows][kAccs], float4* slots) {
#pragma unroll
  for (int i = 0; i < kRows * kAccs / 4; ++i) {
    const float* const four = &acc[i * 4 / kAccs][i * 4 % kAccs];
    const float4 values = make_float4(four[0], four[1], four[2], four[3]);
    if constexpr (kSet) {
      slots[i * kThreads] = values;
    } else {
      add_to_memory(slots + i * kThreads, values);
    }
  }
}
template <int kThreads, int kRows, int kAccs>
__device__ __forceinline__ void flush(const float (&acc)[kRows][kAccs], float4* slots, bool set) {
  if (set) {
    flush<kThreads, true>(acc, slots);
  } else {
    flush<kThreads, false>(acc, slots);
  }
}

// Sums over four neighbouring lanes, which hold pixels of the same channels.
__device__ __forceinline__ float sum_of_four_lanes(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  value += __shfl_xor_sync(~0u, value, 2);
  return value;
}

__device__ __forceinline__ void add(float4& total, const float4& value) {
  total.x += value.x;
  total.y += value.y;
  total.z += value.z;
  total.w += value.w;
}

// Reduces one slot over all workers, in order; `distance` slots lie between two workers' slots.
__device__ __forceinline__ float4 total_of(const float4* first, long long distance, int workers) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int worker = 0; worker < workers; ++worker) {
    add(total, first[worker * distance]);
  }
  return total;
}

// The offset of a weight in its tensor; `output` counts the channels of all groups.
__device__ __forceinline__ long long weight_offset(int output, int input, int row, int column) {
  return static_cast<long long>(output) * C::weight_stride_out +
         static_cast<long long>(input) * C::weight_stride_in +
         static_cast<long long>(row) * C::weight_stride_height +
         static_cast<long long>(column) * C::weight_stride_width;
}
// The same in volumes, where an input channel is at a tap of the depth.
template <int kChannels>
__device__ __forceinline__ long long weight_offset(int output, const DepthChannel<kChannels>& input,
                                                   int row, int column) {
  return weight_offset(output, input.channel, row, column) +
         static_cast<long long>(input.tap) * Depth::weight_stride;
}

}  // namespace tensor
}  // namespace fastconv
"""

SOURCES["hopper/wgrad_halo/tile.cuh"] = r"""
// The tile of a block of the wgrad_halo kernel: the weights that it computes, how it walks through
// images, and its layout of shared memory.
#include "device/tensor/depth.cuh"
#include "device/tensor/operand.cuh"
#include "device/tile.cuh"
#include "device/wgmma.cuh"

namespace fastconv {
namespace hopper {

using namespace tensor;

// Loads an element that no thread writes while the kernel runs, or gives zero.
__device__ __forceinline__ float load_element(const float* source, bool valid) {
  return load_or_zero(source, valid);
}
template <class Half>
__device__ __forceinline__ Half load_element(const Half* source, bool valid) {
  return {static_cast<unsigned short>(load_or_zero(&source->bits, valid))};
}

// --- Weights: what a block computes --------------------------------------------------------------

// The MMA's operand type: the tensor's own, or scaled fp16 for float32 (see scale.cuh).
using Factor = Either<C::scaled_fp16, Float16, Operand>::type;
__device__ __forceinline__ float round_factor(float value) {
  return C::ties_to_even ? round_to_even_tf32(value) : round_operand_to_tf32(value);
}
constexpr int kInterleave = C::scaled_fp16 ? 8 : kVector;
static_assert(C::interleaved_images * C::interleaved_strips == kInterleave,
              "members fill 16 bytes");
static_assert(!C::scaled_fp16 ||
                  (kScalarBytes == 4 && !C::in_channels_last && !C::grad_channels_last),
              "contiguous float32");

// A group's input channels in memory. In volumes, group_in counts them once for each tap of the
// depth, and images are output planes.
constexpr int kInChannels = C::group_in / Depth::kernel;
using InChannel = DepthChannel<kInChannels>;
static_assert(!Depth::exists || (!C::in_channels_last && !C::grad_channels_last),
              "contiguous volumes");

constexpr int kOutputs = 64;  // the M of a wgmma: output channels
constexpr int kConsumers = 2;
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kOctet = 8;  // input channels
constexpr int kPlaneChannels = kOctet * C::mma_octets;
constexpr int kColumns = C::mma_taps * kPlaneChannels;  // the N of a wgmma
constexpr int kAccs = kColumns / 2;                     // accumulators of a thread for one wgmma
static_assert(C::mma_octets == 1 || C::mma_taps == 1 || C::dilation_width == 1,
              "taps and octets are core matrices at equal distances");

constexpr int kPlanes = ceil_div(C::group_in, kPlaneChannels);
constexpr int kSegments = kPlanes * C::kernel_rows;
constexpr int kSlices = kConsumers / C::channel_groups;  // consumers with different segments
constexpr int kBlockSegments = C::segments * kSlices;
// The most planes that a block's segments lie in.
constexpr int kBlockPlanes = kBlockSegments % C::kernel_rows == 0 ? kBlockSegments / C::kernel_rows
                             : C::kernel_rows % kBlockSegments == 0
                                 ? 1
                                 : (kBlockSegments - 2) / C::kernel_rows + 2;

constexpr int kRowBlocks = ceil_div(C::kernel_height, C::kernel_rows);
constexpr int kPieces = ceil_div(C::kernel_width, C::mma_taps);
constexpr int kSegmentBlocks = ceil_div(kSegments, kBlockSegments);
// Every kClasses-th plane of grad_output begins equally far from a multiple of 16 bytes; the
// channels of a tile are such planes.
constexpr int kClasses = C::plane_classes;
static_assert(C::group_out % kClasses == 0, "the same in all groups");
constexpr int kOutputBlocks =
    kClasses * ceil_div(C::group_out / kClasses, C::channel_groups* kOutputs);
// Tiles of the same output channels; they have consecutive indices.
constexpr int kSameOutputs = kSegmentBlocks * kPieces * kRowBlocks;

// The weights that a block computes.
struct Tile {
  int segment;     // first segment
  int piece;       // piece of the kernel's columns, mma_taps each
  int kernel_row;  // first row
  int output;      // first channel, in the group
  int group;

  __device__ explicit Tile(int index) {
    segment = index % kSegmentBlocks * kBlockSegments;
    index /= kSegmentBlocks;
    piece = index % kPieces;
    index /= kPieces;
    kernel_row = index % kRowBlocks * C::kernel_rows;
    index /= kRowBlocks;
    const int block = index % kOutputBlocks;
    output = block / kClasses * (C::channel_groups * kOutputs * kClasses) + block % kClasses;
    group = index / kOutputBlocks;
  }

  __device__ int of_class() const { return output % kClasses; }
  // The n-th of the tile's output channels, in the group; it may not exist.
  __device__ int channel(int n) const { return output + n * kClasses; }

  __device__ int plane() const { return segment / C::kernel_rows; }
  // The index of this tile among those of the same output channels.
  __device__ int number() const {
    const int rows = kernel_row / C::kernel_rows;
    return segment / kBlockSegments + kSegmentBlocks * (piece + kPieces * rows);
  }
  __device__ bool has_bias() const { return number() == 0; }
};

// --- Pixels: how blocks walk through images ------------------------------------------------------

// Output rows of a walk are kRowStep apart and start at one of kRowStep residues. From one to the
// next, input rows advance by kRowAdvance dilations.
constexpr int kRowGcd = gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / kRowGcd;
constexpr int kRowAdvance = C::stride_height / kRowGcd;
// Input rows that a step reads and the step before did not.
constexpr int kNewRows = kRowAdvance < C::kernel_rows ? kRowAdvance : C::kernel_rows;
constexpr int kOldRows = C::kernel_rows - kNewRows;

constexpr int kSteps = C::steps;  // steps of a strip of rows
constexpr int kCoveredRows = kSteps * kRowStep * C::interleaved_strips;
static_assert(kCoveredRows >= C::out_height, "strips cover the image");

constexpr int kBodyColumns = 8;  // columns that a consumer takes at a time
static_assert(C::stage_columns % kBodyColumns == 0, "");

// If rows of grad_output are not multiples of 16 bytes, a step's columns begin up to `lead` columns
// early, at a multiple of 16 bytes in memory.
static_assert(C::lead < kVector, "");
constexpr int kRowColumns = round_up(C::out_width + C::lead, kBodyColumns);
constexpr int kStripColumns = C::strip_stages * C::stage_columns;
constexpr int kStrips = ceil_div(kRowColumns, kStripColumns);
constexpr int kWalksPerImage = kRowStep * kStrips;

// The columns of a strip. The last strip of a row, and its last stage, may be narrower.
__device__ __forceinline__ int columns_of(int strip) {
  return kRowColumns % kStripColumns == 0 ? kStripColumns
                                          : min(kStripColumns, kRowColumns - strip * kStripColumns);
}

// The estimated cost of the steps of a strip of rows: for one strip of columns, for all but the
// last strip, and for all. The planner gives the costs of a step; their unit does not matter.
constexpr long long kStripWeight = static_cast<long long>(kSteps) * C::strip_weight;
constexpr long long kLastStrip = (kStrips - 1) * kStripWeight;
constexpr long long kRowsWeight =
    kLastStrip + static_cast<long long>(kSteps) * C::last_strip_weight;

// A step of a walk, found by the cost of all steps before it.
struct Place {
  int walk;
  int step;

  __device__ explicit Place(long long weight) {
    const long long rest = weight % kRowsWeight;
    const bool last = rest >= kLastStrip;
    const int strip = last ? kStrips - 1 : static_cast<int>(rest / kStripWeight);
    const long long of_strip = rest - strip * kStripWeight;
    walk = static_cast<int>(weight / kRowsWeight) * kStrips + strip;
    step = static_cast<int>(of_strip / (last ? C::last_strip_weight : C::strip_weight));
  }
};

// Consecutive steps of a walk that one block takes.
struct Run {
  int image;  // image of member 0
  int residue;
  int strip;
  int step;  // first step
  int steps;

  // The output row of the run's i-th step, in the first strip of rows.
  __device__ int output_row(int i) const { return residue + kRowStep * (step + i); }
};

// A worker's share of all pixels, run by run: shares have about equal costs.
struct Share {
  Place at;
  Place end;

  __device__ Share(int worker, int workers, int batch)
      : at(weight(batch) * worker / workers), end(weight(batch) * (worker + 1) / workers) {}

  __device__ static long long weight(int batch) {
    return ceil_div(batch, C::interleaved_images) * (kRowStep * kRowsWeight);
  }
  __device__ bool more() const {
    return at.walk < end.walk || (at.walk == end.walk && at.step < end.step);
  }
  __device__ Run next() {
    Run run;
    run.strip = at.walk % kStrips;
    run.residue = at.walk / kStrips % kRowStep;
    run.image = at.walk / kWalksPerImage * C::interleaved_images;
    run.step = at.step;
    run.steps = (at.walk < end.walk ? kSteps : end.step) - at.step;
    ++at.walk;
    at.step = 0;
    return run;
  }
};

// How the blocks of a launch divide the tiles and pixels. Each warp role computes its block's part
// itself: values that all roles kept would take registers from the consumers, which have none to
// spare.
struct Partition {
  int first_tile;
  int tiles;
  int workers;
  int batch;

  __device__ Tile tile() const { return Tile(first_tile + static_cast<int>(blockIdx.x) % tiles); }
  __device__ Share share() const {
    return Share(static_cast<int>(blockIdx.x) / tiles, workers, batch);
  }
};

// --- Shared memory -------------------------------------------------------------------------------

// An input row in shared memory begins at a multiple of 4 elements of the tensor, `kShift` columns
// before the first column that is read.
constexpr int kQuad = 4;  // columns that are loaded together, or channels of a channels-last tensor
constexpr int kFirstColumn = -C::lead * C::stride_width - C::padding_left;
constexpr int kShift = C::vector_input && !C::in_channels_last
                           ? kFirstColumn - floor_div(kFirstColumn, kQuad) * kQuad
                           : 0;
// The columns of an input row that this many columns of an output row read.
__host__ __device__ constexpr int tile_columns(int columns) {
  return round_up(kShift + (columns - 1 + C::lead) * C::stride_width +
                      (C::mma_taps - 1) * C::dilation_width + 1,
                  kQuad);
}
constexpr int kTileColumns = tile_columns(kStripColumns);

// Distances in units of 16 bytes, which wgmma's descriptors use.
constexpr int kColumnVectors = kOctet * C::mma_octets;
constexpr int kPlaneVectors = kTileColumns * kColumnVectors;
constexpr int kPartVectors = kBlockPlanes * kPlaneVectors;
constexpr int kRowVectors = C::parts * kPartVectors;

// A stage of grad_output has a row of columns for every channel and member. Where all channels and
// members of an output row begin equally far from a multiple of 16 bytes, rows in shared memory
// begin at one. Otherwise (`kShifted`) they begin as far beyond it as they do in global memory. In
// either case units of 16 bytes are copied as they are. Consumers read a column of 8 consecutive
// rows at a time: rows are an odd number of units apart, so that these lie in different banks.
constexpr bool kShifted = !C::grad_channels_last && C::grad_vector < kVector;
constexpr int kStageChannels = C::channel_groups * kOutputs;
// If a TMA box brings the whole stage (`grad_boxes`), its rows of 64 or 128 bytes are dense, and
// TMA's swizzle spreads the units of 8 consecutive rows over the banks.
constexpr int kStageUnits = C::stage_columns / kVector + (kShifted ? 1 : 0);
constexpr int kRowBytes = C::grad_boxes ? kStageUnits * 16 : (kStageUnits | 1) * 16;
static_assert(!C::grad_boxes || ((kRowBytes == 64 || kRowBytes == 128) && !kShifted &&
                                 !C::grad_channels_last && C::interleaved_images == kInterleave),
              "a TMA box can describe a stage");
// If rows of grad_output follow each other in the tensor map without a gap (`lead`), a box contains
// parts of other rows beyond its row's ends, which are cleared.
constexpr bool kClears = C::grad_boxes && C::lead > 0;
// The swizzle of a row: what the byte offsets of its units are XORed with.
__device__ __forceinline__ constexpr int swizzle_of(int row) {
  return C::grad_boxes ? row * kRowBytes / 128 % kStageUnits * 16 : 0;
}
constexpr int kStageRows = kStageChannels * kInterleave;
// A consumer's lane has kLaneMembers consecutive members. These lie far apart in a stage, and the
// rows of neighbouring lanes lie side by side.
constexpr int kLaneMembers = kInterleave / 4;
__device__ __forceinline__ constexpr int stage_row(int channel, int member) {
  return (member % kLaneMembers * kStageChannels + channel) * 4 + member / kLaneMembers;
}
// A warp reads one pixel of all members of a channels-last tensor: padding between the members
// avoids bank conflicts.
constexpr int kPixelBytes = kStageChannels * kScalarBytes;
constexpr int kMemberBytes = C::stage_columns * kPixelBytes + 8 * kScalarBytes;
constexpr int kStageBytes =
    C::grad_channels_last ? kInterleave * kMemberBytes : kStageRows * kRowBytes;

// The core matrices of a wgmma overlap where taps share columns. compute-sanitizer assumes that
// they lie one behind the other, and what it assumes to be read beyond the last input row must be
// shared memory too.
constexpr int kInputRing = 0;
constexpr int kGradRing = round_up(C::input_stages * kRowVectors * 16, C::grad_boxes ? 1024 : 16);
constexpr int kBarriers = kGradRing + C::grad_stages * kStageBytes;
static_assert(C::input_stages >= C::kernel_rows + kNewRows, "a step's rows, and some to come");

// For each consumer thread and each of its two channels, a count of groups with numbers that are
// subnormal in float16.
using Counters = unsigned[kConsumers * 128][2];

struct Barriers {
  Barrier input_full[C::input_stages];
  Barrier input_empty[C::input_stages];
  Barrier grad_full[C::grad_stages];
  Barrier grad_empty[C::grad_stages];
  Barrier box_full[C::grad_stages];  // the box has arrived, but is not cleared
};
constexpr int kCounters = kBarriers + sizeof(Barriers);
static_assert(kCounters + (C::scaled_fp16 ? sizeof(Counters) : 0) <= C::shared_bytes, "");

__device__ __forceinline__ Barriers& barriers() {
  return *reinterpret_cast<Barriers*>(shared_memory() + kBarriers);
}
// The counts of the calling thread.
__device__ __forceinline__ unsigned (&counters())[2] {
  return (*reinterpret_cast<Counters*>(shared_memory() + kCounters))[threadIdx.x - 128];
}

// A position in two laps of a ring of stages, whose mbarrier parities differ. Producers start one
// lap ahead: all stages are empty.
template <int kRingStages>
struct Ring {
  int position;

  __device__ explicit Ring(int laps) : position(laps * kRingStages) {}
  __device__ int stage() const {
    return position < kRingStages ? position : position - kRingStages;
  }
  __device__ unsigned parity() const { return position >= kRingStages; }
  // The position this many stages further on.
  __device__ Ring operator+(int stages) const {
    Ring later(*this);
    later.position += stages;
    if (later.position >= 2 * kRingStages) later.position -= 2 * kRingStages;
    return later;
  }
  __device__ void advance() { *this = *this + 1; }
};

}  // namespace hopper
}  // namespace fastconv
"""

SOURCES["ampere/wgrad_halo/reduce.cuh"] = r"""
// The split-K reduction, a second kernel: adds up the blocks' slots of the workspace.
#include "ampere/wgrad_halo/multiply.cuh"

namespace fastconv {
namespace ampere {

// The weight that one of a slot's four accumulators belongs to.
struct Weight {
  int output;  // channels within the group
  int input;
  int row;
  int column;
  bool exists;

  __device__ Weight(const WeightTile& tile, int slot, int thread, int element) {
    const Warp warp(thread / 32);
    const int lane = thread % 32;
    const int index =
        (warp.units * C::units + slot / C::row_tiles) * kOctet + lane % 4 * 2 + element % 2;
    const Column place(index);
    output = tile.output + warp.out * kWarpOutputs + slot % C::row_tiles * 16 + lane / 4 +
             element / 2 * 8;
    input = tile.channel + place.channel;
    row = tile.kernel_row + place.row;
    column = tile.kernel_column + place.column;
    exists = index < kTileWeights && output < C::group_out && input < C::group_in &&
             row < C::kernel_height && column < C::kernel_width;
  }
};

// Adds up the slots of every weight, in order, and writes the sum where the weight's strides say.
__device__ __forceinline__ void reduce(const float4* workspace, Scalar* grad, int first_tile,
                                       int tiles, int workers) {
  constexpr int kTileThreads = kThreads / C::warps_pixels;  // threads with different weights
  constexpr int kBlockSlots = kSlots * kThreads;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kSlots * kTileThreads;
       i += step) {
    const int thread = i % kTileThreads;
    const int slot = i / kTileThreads % kSlots;
    const int block = i / (kTileThreads * kSlots);
    const float4* const first = workspace + block * kBlockSlots + slot * kThreads + thread;
    float4 total = total_of(first, tiles * kBlockSlots, workers);
#pragma unroll
    for (int j = 1; j < C::warps_pixels; ++j) {
      const float4 more = total_of(first + j * kTileThreads, tiles * kBlockSlots, workers);
      total = make_float4(total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w);
    }
    const float values[4] = {total.x, total.y, total.z, total.w};
    const WeightTile tile(first_tile + block);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Weight weight(tile, slot, thread, j);
      if (!weight.exists) continue;
      grad[weight_offset(tile.group * C::group_out + weight.output,
                         depth_channel<kInChannels>(weight.input), weight.row, weight.column)] =
          narrow<Scalar>(values[j]);
    }
  }
}

// Adds up the bias of every channel: over threads, then over workers, in order.
__device__ __forceinline__ void reduce_bias(const float4* workspace, Scalar* bias_grad,
                                            int first_tile, int tiles, int workers) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * kBlockOutputs; i += step) {
    const int block = i / kBlockOutputs;
    const int channel = i % kBlockOutputs;
    const WeightTile tile(first_tile + block);
    if (!tile.has_bias() || tile.output + channel >= C::group_out) continue;
    float total = 0.0f;
    for (int worker = 0; worker < workers; ++worker) {
      const float* const partial = reinterpret_cast<const float*>(workspace) +
                                   bias_slots(tiles * workers, worker * tiles + block) + channel;
      float worker_sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kThreads; j += kBlockOutputs) worker_sum += partial[j];
      total += worker_sum;
    }
    bias_grad[tile.group * C::group_out + tile.output + channel] = narrow<Scalar>(total);
  }
}

}  // namespace ampere
}  // namespace fastconv
"""

SOURCES["ampere/wgrad_halo/multiply.cuh"] = r"""
// A warp's main loop over a step in shared memory, and its accumulators.
#include "ampere/wgrad_halo/load.cuh"
#include "device/tensor/workspace.cuh"

namespace fastconv {
namespace ampere {

// A thread's four accumulators of each MMA, unit by unit. In the workspace, these are its slots.
constexpr int kSlots = C::units * C::row_tiles;
using RegisterTile = float[kSlots][4];

// A thread's fragments of the output's gradient, for all row tiles, and of a unit's input.
using GradFragment = unsigned[C::parts][C::row_tiles][4];
using InputFragment = unsigned[C::parts][2];

// --- The output's gradient: rows of MMAs (operand A) ---------------------------------------------

constexpr bool kByMatrices = k16Bit || !C::grad_channels_last;  // by ldmatrix, not by elements
constexpr int kGradTile = 16 * (C::grad_channels_last ? kScalarBytes : C::grad_pitch);
constexpr int kGradPixel = C::grad_channels_last ? C::grad_pitch : kScalarBytes;
// Bytes from the first half of an MMA's pixels to the second half.
constexpr int kGradHalf = (kRowPairs ? C::strip_columns : kMmaColumns / 2) * kGradPixel;

// Returns the offset in a stage of a lane's part of the first MMA; `output` is the warp's first
// channel. With ldmatrix it is one matrix row: 8 pixels of a channel (4 of float32), or 8 channels
// of a pixel.
__device__ __forceinline__ int first_left(int output, int lane) {
  if constexpr (!kByMatrices) {
    return lane % 4 * C::grad_pitch + (output + lane / 4) * kScalarBytes;
  } else if constexpr (C::grad_channels_last) {
    return lane % 8 * C::grad_pitch + (output + lane / 8 % 2 * 8) * kScalarBytes +
           lane / 16 * kGradHalf;
  } else {
    return (output + lane % 16) * C::grad_pitch + lane / 16 * kGradHalf;
  }
}

__device__ __forceinline__ void load_rows(unsigned (&rows)[4], const unsigned char* first) {
  if constexpr (!kByMatrices) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows[i] = *reinterpret_cast<const unsigned*>(first + i % 2 * (8 * kScalarBytes) +
                                                   i / 2 * kGradHalf);
    }
  } else if constexpr (C::grad_channels_last) {
    load_transposed(rows, first);
  } else {
    load_matrices(rows, first);
  }
}
__device__ __forceinline__ void load_left(GradFragment& left, const unsigned char* first) {
#pragma unroll
  for (int i = 0; i < C::parts * C::row_tiles; ++i) {
    const int part = i / C::row_tiles;
    const int tile = i % C::row_tiles;
    load_rows(left[part][tile], first + part * kPartBytes + tile * kGradTile);
  }
}

// --- The input: columns of MMAs (operand B) ------------------------------------------------------

// Units whose columns a lane loads at once, and loads for all units.
constexpr int kUnitsAtOnce = k16Bit ? 2 : 1;
constexpr int kUnitLoads = ceil_div(C::units, kUnitsAtOnce);
constexpr int kInPixel =
    kStride * kColumnBytes;  // bytes between neighbouring output pixels' inputs

// Returns the offset in a line of a lane's part of the first MMA.
__device__ __forceinline__ int first_right(int lane) {
  if constexpr (k16Bit) {
    return lane % 8 * kInPixel + (kRowPairs ? 0 : lane / 8 % 2 * (8 * kInPixel));
  } else {
    return lane % 4 * kInPixel;
  }
}

__device__ __forceinline__ void load_right(InputFragment (&right)[kUnitsAtOnce],
                                           const unsigned char* first) {
  if constexpr (k16Bit) {
    unsigned both[4];
    load_transposed(both, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) right[i / 2 % kUnitsAtOnce][0][i % 2] = both[i];
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float number = *reinterpret_cast<const float*>(first + i * (4 * kInPixel));
      if constexpr (C::parts == 2) {
        split_operand(number, right[0][0][i], right[0][C::parts - 1][i]);
      } else {
        right[0][0][i] = __float_as_uint(number);
      }
    }
  }
}

// --- MMAs ----------------------------------------------------------------------------------------

// Multiplies a unit by all rows. The small products of low parts are added first, so that they are
// not lost.
__device__ __forceinline__ void multiply(float (*acc)[4], const GradFragment& left,
                                         const InputFragment& right) {
  constexpr int kLow = C::parts - 1;
  if constexpr (C::parts == 2) {
#pragma unroll
    for (int tile = 0; tile < C::row_tiles; ++tile) {
      mma(Operand{}, acc[tile], left[kLow][tile], right[0]);
    }
#pragma unroll
    for (int tile = 0; tile < C::row_tiles; ++tile) {
      mma(Operand{}, acc[tile], left[0][tile], right[kLow]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < C::row_tiles; ++tile) {
    mma(Operand{}, acc[tile], left[0][tile], right[0]);
  }
}

// MMAs along the pixels that the code unrolls, so that the next one's operands are loaded while one
// is computed. If there were more, the compiler would load more ahead than registers can hold.
constexpr int kMostUnrolled = k16Bit          ? (kSlots > 24 ? 2 : 4)
                              : C::parts == 2 ? (kByMatrices ? 4 : 2)
                                              : 8;
constexpr int kUnrolled = C::slice_mmas < kMostUnrolled ? C::slice_mmas : kMostUnrolled;

// A warp's addresses of its operands in a step.
struct Multiplier {
  Warp warp;
  int left;   // offset in a stage of the output's gradient
  int right;  // offset in a line
  int line;   // line, counted from the first output row's

  __device__ Multiplier(const WeightTile& tile, int index, int lane) : warp(index) {
    left = first_left(warp.out * kWarpOutputs, lane);
    right = kInput + first_right(lane) + InLoader::shift(tile) * kColumnBytes;
    line = kRowPairs ? lane / 8 % 2 * kLineAdvance : 0;
  }

  // Multiplies one of the warp's slices.
  __device__ __forceinline__ void multiply_slice(RegisterTile& acc, const StepPlace& step,
                                                 int slice) const {
    slice = slice * C::warps_pixels + warp.pixels;
    const int row = slice / kRowSlices * kMmaRows;
    const int column = slice % kRowSlices * kSliceColumns;
    const unsigned char* grad = step.grad() + left + (row * C::strip_columns + column) * kGradPixel;
    int units[kUnitLoads];
    find_units(units, step.position + row * kLineAdvance + line, right + column * kInPixel);
#pragma unroll 1
    for (int k = 0; k < C::slice_mmas / kUnrolled; ++k) {
      multiply_mmas<kUnrolled>(acc, grad, units);
      grad += kUnrolled * (kMmaColumns * kGradPixel);
#pragma unroll
      for (int& unit : units) unit += kUnrolled * (kMmaColumns * kInPixel);
    }
    multiply_mmas<C::slice_mmas % kUnrolled>(acc, grad, units);
  }

  // Multiplies kCount MMAs along the pixels.
  template <int kCount>
  __device__ static __forceinline__ void multiply_mmas(RegisterTile& acc, const unsigned char* grad,
                                                       const int (&units)[kUnitLoads]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      multiply_pixels(acc, grad + i * (kMmaColumns * kGradPixel), units,
                      i * (kMmaColumns * kInPixel));
    }
  }

  // Multiplies one MMA's pixels, `column` bytes from where units begin, for all units.
  __device__ static __forceinline__ void multiply_pixels(RegisterTile& acc,
                                                         const unsigned char* grad,
                                                         const int (&units)[kUnitLoads],
                                                         int column) {
    GradFragment rows;
    load_left(rows, grad);
#pragma unroll
    for (int i = 0; i < kUnitLoads; ++i) {
      InputFragment columns[kUnitsAtOnce];
      load_right(columns, shared_memory() + units[i] + column);
#pragma unroll
      for (int j = 0; j < kUnitsAtOnce; ++j) {
        const int unit = i * kUnitsAtOnce + j;
        if (unit < C::units) multiply(acc + unit * C::row_tiles, rows, columns[j]);
      }
    }
  }

  // Finds where the units' columns begin if the first output row's line is `first` in the ring.
  __device__ __forceinline__ void find_units(int (&units)[kUnitLoads], int first,
                                             int in_line) const {
#pragma unroll
    for (int i = 0; i < kUnitLoads; ++i) {
      int entry = warp.units * C::units + i * kUnitsAtOnce;
      if constexpr (!k16Bit) {
        entry = entry * kOctet + static_cast<int>(threadIdx.x) % 32 / 4;
      } else if (i * kUnitsAtOnce + 1 < C::units) {
        entry += static_cast<int>(threadIdx.x) / 16 % 2;
      }
      const int found = first * kLineBytes + unit_table()[entry];
      units[i] = (C::rolling ? ring_byte(found) : found) + in_line;
    }
  }
};

// --- The bias ------------------------------------------------------------------------------------

// Adds up a step's gradient of the output before it is rounded: a thread takes some pixels of one
// channel.
__device__ __forceinline__ float bias_of_step(const StepPlace& step) {
  constexpr int kSharers = kThreads / kBlockOutputs;  // threads that share a channel
  const int channel = static_cast<int>(threadIdx.x) % kBlockOutputs;
  const int first = static_cast<int>(threadIdx.x) / kBlockOutputs;
  float sum = 0.0f;
  if constexpr (C::grad_channels_last) {
    const unsigned char* const pixels = step.grad() + channel * kScalarBytes;
#pragma unroll 4
    for (int pixel = first; pixel < kStepPixels; pixel += kSharers) {
      sum += widen(*reinterpret_cast<const Scalar*>(pixels + pixel * C::grad_pitch));
    }
  } else {
    const unsigned char* const pixels = step.grad() + channel * C::grad_pitch;
#pragma unroll 2
    for (int pixel = first * kVector; pixel < kStepPixels; pixel += kSharers * kVector) {
      using Pixels = Vector<Scalar, kVector>;
      const Pixels vector = *reinterpret_cast<const Pixels*>(pixels + pixel * kScalarBytes);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum += widen(vector.element[i]);
    }
  }
  return sum;
}

// Returns where a block's bias sums begin in the workspace, behind all slots: [block][thread].
__device__ __forceinline__ long long bias_slots(int blocks, int block) {
  return static_cast<long long>(blocks) * (kSlots * kThreads * 4) + block * kThreads;
}

}  // namespace ampere
}  // namespace fastconv
"""

SOURCES["ampere/wgrad_halo/load.cuh"] = r"""
// Loads a step of both tensors to shared memory. Most of it is copied by cp.async. 16-bit elements
// that are copied one by one or transposed go through registers: each slice's share is loaded
// before the slice is multiplied, and written after it. float32 is converted in place, by the
// thread that copied it.
#include "ampere/wgrad_halo/tile.cuh"

namespace fastconv {
namespace ampere {

// How threads divide kRows rows of kWidth tasks each among themselves: kLanes threads take
// neighbours of a row. A task is one copy; a thread has kTasks of them.
template <int kWidth, int kRows, int kLanes>
struct Sheet {
  static constexpr int kAcross = ceil_div(kWidth, kLanes);
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static constexpr int kTasks = kAcross * ceil_div(kRows, kRowsAtOnce);

  __device__ static int column(int task) {
    return static_cast<int>(threadIdx.x) % kLanes + task % kAcross * kLanes;
  }
  __device__ static int row(int task) {
    return static_cast<int>(threadIdx.x) / kLanes + task / kAcross * kRowsAtOnce;
  }
  __device__ static bool exists(int task) {
    return (kWidth % kLanes == 0 || column(task) < kWidth) &&
           (kRows % kRowsAtOnce == 0 || row(task) < kRows);
  }
};

__device__ __forceinline__ bool is_below(int value, int bound) {
  return static_cast<unsigned>(value) < static_cast<unsigned>(bound);
}

// --- float32 to TF32 -----------------------------------------------------------------------------

// Whether the GPU rounds to nearest even with one instruction.
#if __CUDA_ARCH__ >= 900
constexpr bool kRoundsToEven = true;
#else
constexpr bool kRoundsToEven = false;
#endif

__device__ __forceinline__ void split_operand(float value, unsigned& high, unsigned& low) {
  if constexpr (kRoundsToEven) {
    split(value, high, low);
  } else {
    split_away(value, high, low);
  }
}

// Numbers are rounded, or split, in shared memory: once, not for every MMA that reads them. The
// input is not split there: that would take twice the room, and most of an MMA's operands are the
// output's gradient.
constexpr bool kConvertsGrad = !k16Bit;
constexpr bool kConvertsInput = !k16Bit && C::parts == 1;
constexpr int kConvertedAtOnce = 4;  // vectors that registers hold beside the accumulators

// Converts neighbouring numbers and writes them back to shared memory. If they are split, low parts
// go `low` bytes further.
template <int kParts, int kCount>
__device__ __forceinline__ void convert(Vector<float, kCount> numbers, unsigned char* first,
                                        int low) {
  Vector<float, kCount> rest;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float& number = numbers.element[i];
    if constexpr (kParts == 2) {
      unsigned parts[2];
      split_operand(number, parts[0], parts[1]);
      number = __uint_as_float(parts[0]);
      rest.element[i] = __uint_as_float(parts[1]);
    } else {
      number = round_operand_to_tf32(number);
    }
  }
  *reinterpret_cast<Vector<float, kCount>*>(first) = numbers;
  if constexpr (kParts == 2) *reinterpret_cast<Vector<float, kCount>*>(first + low) = rest;
}

// Converts what a thread's tasks have copied, several at once, so that loads do not wait for one
// another. `place` returns where a task's numbers are.
template <class Sheet, int kParts, int kCount, class Place>
__device__ __forceinline__ void convert_tasks(const Place& place, int low) {
#pragma unroll 1
  for (int first = 0; first < Sheet::kTasks; first += kConvertedAtOnce) {
    Vector<float, kCount> numbers[kConvertedAtOnce];
#pragma unroll
    for (int i = 0; i < kConvertedAtOnce; ++i) {
      if (first + i < Sheet::kTasks && Sheet::exists(first + i)) {
        numbers[i] = *reinterpret_cast<const Vector<float, kCount>*>(place(first + i));
      }
    }
#pragma unroll
    for (int i = 0; i < kConvertedAtOnce; ++i) {
      if (first + i < Sheet::kTasks && Sheet::exists(first + i)) {
        convert<kParts>(numbers[i], place(first + i), low);
      }
    }
  }
}

// --- The output's gradient -----------------------------------------------------------------------

constexpr int kOutPlane = C::out_height * C::out_width;
constexpr int kOutImage = C::groups * C::group_out * Depth::out * kOutPlane;
constexpr int kOutColumn = C::grad_channels_last ? C::groups * C::group_out : 1;
constexpr int kOutRow = C::out_width * kOutColumn;
constexpr int kOutChannel = C::grad_channels_last ? 1 : Depth::out * kOutPlane;
static_assert(elements_of(C::groups, C::group_out, Depth::out, C::out_height, C::out_width) <
                  kMostElements,
              "");
using OutOffset = IndexTo<elements_of(kWalkRows + 1, kRowStep, kOutRow) +
                          elements_of(kStrips, C::strip_columns, kOutColumn) +
                          elements_of(kBlockOutputs, kOutChannel)>;

// Elements of a task, neighbours of a row or of a pixel: copied at once, or loaded one by one and
// written at once.
constexpr bool kGradInRegisters = k16Bit && C::grad_vector == 1;
constexpr int kGradUnit = kGradInRegisters ? kVector : C::grad_vector;
// Tasks of an output row: along memory, and across.
using GradSheet = Sheet<(C::grad_channels_last ? kBlockOutputs : C::strip_columns) / kGradUnit,
                        C::grad_channels_last ? C::strip_columns : kBlockOutputs, C::grad_lanes>;
constexpr int kGradTasks = C::step_rows * GradSheet::kTasks;

// Loads the output's gradient.
struct GradLoader {
  const Scalar* channels;  // the tile's first channel in image 0
  int channels_left;       // channels of the group from there on
  const Scalar* image;
  int row;
  int column;

  __device__ GradLoader(const Scalar* grad_output, const WeightTile& tile)
      : channels(grad_output +
                 static_cast<long long>(tile.group * C::group_out + tile.output) * kOutChannel),
        channels_left(C::group_out - tile.output) {}

  __device__ void move_to(const Cursor& at) {
    image = channels + static_cast<long long>(at.image() / Depth::out) * kOutImage;
    if constexpr (Depth::exists) image += at.image() % Depth::out * kOutPlane;
    row = at.output_row();
    column = at.output_column();
  }

  // A task's first element: its address, its offset in a stage, and how many elements exist from it
  // on.
  struct Place {
    const Scalar* source;
    int target;
    int left;
  };
  __device__ __forceinline__ Place find(int step_row, int task) const {
    const int along = GradSheet::column(task) * kGradUnit;
    const int across = GradSheet::row(task);
    const int channel = C::grad_channels_last ? along : across;
    const int pixel = C::grad_channels_last ? across : along;
    const int y = row + step_row * kRowStep;
    const int x = column + pixel;
    const bool exists =
        y < C::out_height && (C::grad_channels_last ? x < C::out_width : channel < channels_left);
    Place place;
    place.source =
        image + (static_cast<OutOffset>(channel) * kOutChannel +
                 static_cast<OutOffset>(y) * kOutRow + static_cast<OutOffset>(x) * kOutColumn);
    place.target =
        C::grad_channels_last
            ? (step_row * C::strip_columns + pixel) * C::grad_pitch + channel * kScalarBytes
            : channel * C::grad_pitch + (step_row * C::strip_columns + pixel) * kScalarBytes;
    place.left = !exists ? 0 : C::grad_channels_last ? channels_left - channel : C::out_width - x;
    return place;
  }

  __device__ __forceinline__ void copy(unsigned char* stage) const {
#pragma unroll 1
    for (int step_row = 0; step_row < C::step_rows; ++step_row) {
#pragma unroll
      for (int task = 0; task < GradSheet::kTasks; ++task) {
        if (!GradSheet::exists(task)) continue;
        const Place place = find(step_row, task);
        copy_elements<C::grad_vector>(reinterpret_cast<Scalar*>(stage + place.target), place.source,
                                      place.left > 0);
      }
    }
  }

  // Converts what this thread has copied.
  __device__ __forceinline__ void convert_copied(unsigned char* stage) const {
#pragma unroll 1
    for (int step_row = 0; step_row < C::step_rows; ++step_row) {
      const auto place = [&](int task) { return stage + find(step_row, task).target; };
      convert_tasks<GradSheet, C::parts, C::grad_vector>(place, kPartBytes);
    }
  }

  // Some tasks' elements in registers.
  template <int kTasks>
  struct Batch {
    unsigned short elements[kTasks][kVector];
  };
  template <int kTasks>
  __device__ __forceinline__ void load(Batch<kTasks>& batch, int first) const {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int task = first + i;
      const bool exists = task < kGradTasks && GradSheet::exists(task % GradSheet::kTasks);
      const Place place = find(task / GradSheet::kTasks, task % GradSheet::kTasks);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        batch.elements[i][j] = load_or_zero(
            reinterpret_cast<const unsigned short*>(place.source) + j, exists && j < place.left);
      }
    }
  }
  template <int kTasks>
  __device__ __forceinline__ void store(const Batch<kTasks>& batch, int first,
                                        unsigned char* stage) const {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int task = first + i;
      if (task >= kGradTasks || !GradSheet::exists(task % GradSheet::kTasks)) continue;
      const Place place = find(task / GradSheet::kTasks, task % GradSheet::kTasks);
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = batch.elements[i][2 * j] | static_cast<unsigned>(batch.elements[i][2 * j + 1])
                                                  << 16;
      }
      *reinterpret_cast<uint4*>(stage + place.target) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

// --- The input -----------------------------------------------------------------------------------

constexpr int kInPlane = C::in_height * C::in_width;
constexpr int kInImage = C::groups * kInChannels * Depth::in * kInPlane;
constexpr int kInColumn = C::in_channels_last ? C::groups * C::group_in : 1;
constexpr int kInRow = C::in_width * kInColumn;
constexpr int kInChannel = C::in_channels_last ? 1 : Depth::in * kInPlane;
static_assert(elements_of(C::groups, kInChannels, Depth::in, C::in_height, C::in_width) <
                  kMostElements,
              "");
// The largest distances of rows and columns that taps read from the input's first; InOffset holds
// the offset of the farthest element.
constexpr long long kFarRow = max_of<long long>(
    C::padding_top, elements_of(kWalkRows + 1, kRowStep, C::stride_height) +
                        elements_of(kRowBlocks, C::tile_rows, C::dilation_height));
constexpr long long kFarColumn = max_of<long long>(
    C::padding_left + C::shift, elements_of(kStrips, C::strip_columns, C::stride_width) +
                                    elements_of(kColumnBlocks, C::tile_columns, C::dilation_width) +
                                    elements_of(kLineColumns + 1, kColumnUnit));
using InOffset = IndexTo<elements_of(kFarRow, kInRow) + elements_of(kFarColumn, kInColumn) +
                         elements_of(C::tile_channels + kOctet, kInChannel)>;

// The planes of a volume that an output plane reads; images have one.
struct Planes : Front {
  int first_channel;  // the tile's, in its group

  // Whether the volume has the plane that one of the tile's channels reads.
  __device__ __forceinline__ bool exist(int channel) const {
    return plane_inside(front + InChannel(first_channel + channel).plane());
  }
  // The offset of the plane that one of the tile's channels reads, from the group's first.
  __device__ __forceinline__ long long offset(int channel) const {
    const InChannel from(first_channel + channel);
    return static_cast<long long>(from.channel) * kInChannel +
           (front + from.plane()) * static_cast<long long>(kInPlane);
  }
};

// With contiguous 16-bit types, a task is in_vector columns of 8 channels, which are transposed.
// Otherwise it is neighbours in memory: columns, or channels if the input is channels-last.
constexpr bool kInInRegisters = k16Bit && (!C::in_channels_last || C::in_vector == 1);
constexpr int kTaskChannels = kInInRegisters ? kOctet : C::in_channels_last ? C::in_vector : 1;
constexpr int kTaskColumns = C::in_channels_last ? 1 : C::in_vector;
// Tasks of a line: along memory, and across.
using InSheet =
    Sheet<C::in_channels_last ? C::tile_channels / kTaskChannels : kLineColumns / kTaskColumns,
          C::in_channels_last ? kLineColumns : C::tile_channels / kTaskChannels, C::in_lanes>;
constexpr int kInTasks = kNewLines * InSheet::kTasks;

// kCount neighbouring 16-bit elements in registers.
template <int kCount>
struct Neighbours {
  static_assert(kCount == 2 || kCount == 4, "");
  unsigned words[kCount / 2];

  __device__ __forceinline__ void load(const Scalar* source, bool valid) {
    if constexpr (kCount == 2) {
      words[0] = load_bits(reinterpret_cast<const float*>(source), valid);
    } else {
      const uint2 both = load_or_zero(reinterpret_cast<const uint2*>(source), valid);
      words[0] = both.x;
      words[kCount / 2 - 1] = both.y;
    }
  }
  __device__ __forceinline__ unsigned element(int i) const {
    return i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16;
  }
};
template <>
struct Neighbours<1> {
  unsigned short word;

  __device__ __forceinline__ void load(const Scalar* source, bool valid) {
    word = load_or_zero(reinterpret_cast<const unsigned short*>(source), valid);
  }
  __device__ __forceinline__ unsigned element(int) const { return word; }
};

// Loads the input.
struct InLoader {
  const Scalar* channels;  // the tile's first channel in image 0
  int channels_left;       // channels of the group from there on
  Planes planes;
  int first_row;     // input row of output row 0's first line
  int first_column;  // input column where the lines of output column 0 begin
  const Scalar* image;
  int row;
  int column;

  __device__ InLoader(const Scalar* input, const WeightTile& tile)
      : channels(input + static_cast<long long>(tile.group * kInChannels +
                                                (Depth::exists ? 0 : tile.channel)) *
                             kInChannel),
        channels_left(C::group_in - tile.channel),
        planes{Front(), tile.channel},
        first_row(tile.kernel_row * C::dilation_height - C::padding_top) {
    first_column = tile.kernel_column * C::dilation_width - C::padding_left;
    first_column -= shift(tile);
  }

  // Returns the columns by which lines begin early, which is the same for all strips.
  __device__ static int shift(const WeightTile& tile) {
    if constexpr (C::shift == 0) return 0;
    const int column = tile.kernel_column * C::dilation_width - C::padding_left;
    return column - floor_div(column, C::in_vector) * C::in_vector;
  }

  __device__ void move_to(const Cursor& at) {
    image = channels + static_cast<long long>(at.image() / Depth::out) * kInImage;
    static_cast<Front&>(planes) = Front(front_of(at.image()));
    row = first_row + at.output_row() * C::stride_height;
    column = first_column + at.output_column() * C::stride_width;
  }

  // Returns the input row of one of the step's lines.
  __device__ __forceinline__ int row_of(int line) const {
    constexpr bool kSkips = kRowAdvance > C::tile_rows;
    return row + C::dilation_height *
                     (kSkips ? line / C::tile_rows * kRowAdvance + line % C::tile_rows : line);
  }

  struct Place {
    const Scalar* source;
    int target;
    int channel;
    int channels;  // channels that exist, from the task's first on
  };
  __device__ __forceinline__ Place find(int y, int task) const {
    const int along = InSheet::column(task);
    const int across = InSheet::row(task);
    const int channel = (C::in_channels_last ? along : across) * kTaskChannels;
    const int at = (C::in_channels_last ? across : along) * kTaskColumns;
    const int x = column + at * kColumnUnit;
    Place place;
    const InOffset first = Depth::exists ? 0 : static_cast<InOffset>(channel) * kInChannel;
    place.source =
        image + (first + static_cast<InOffset>(y) * kInRow + static_cast<InOffset>(x) * kInColumn);
    place.target = channel_bytes(channel) + at * kColumnBytes;
    place.channel = channel;
    const bool exists = is_below(y, C::in_height) && is_below(x, C::in_width);
    place.channels = exists ? channels_left - channel : 0;
    return place;
  }

  // Copies lines `first` to `end` of a step whose first line is `position` in the ring.
  __device__ __forceinline__ void copy(int position, int first, int end) const {
#pragma unroll 1
    for (int line = first; line < end; ++line) {
      unsigned char* const target =
          shared_memory() + kInput + ring_line(position + line) * kLineBytes;
      const int y = row_of(line);
#pragma unroll
      for (int task = 0; task < InSheet::kTasks; ++task) {
        if (!InSheet::exists(task)) continue;
        const Place place = find(y, task);
        auto* const to = reinterpret_cast<Scalar*>(target + place.target);
        if constexpr (Depth::exists) {
          copy_elements<C::in_vector>(to, place.source + planes.offset(place.channel),
                                      place.channels > 0 && planes.exist(place.channel));
        } else {
          copy_elements<C::in_vector>(to, place.source, place.channels > 0);
        }
      }
    }
  }

  // Converts what this thread has copied of these lines.
  __device__ __forceinline__ void convert_copied(int position, int first, int end) const {
#pragma unroll 1
    for (int line = first; line < end; ++line) {
      unsigned char* const target =
          shared_memory() + kInput + ring_line(position + line) * kLineBytes;
      const auto place = [&](int task) { return target + find(0, task).target; };
      convert_tasks<InSheet, 1, C::in_vector>(place, 0);
    }
  }

  template <int kTasks>
  struct Batch {
    Neighbours<kTaskColumns> elements[kTasks][kOctet];
  };
  // Loads tasks from `first` on, of lines from `first_line` to kWindow.
  template <int kTasks>
  __device__ __forceinline__ void load(Batch<kTasks>& batch, int first_line, int first) const {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int line = first_line + (first + i) / InSheet::kTasks;
      const int task = (first + i) % InSheet::kTasks;
      const bool exists = line < kWindow && InSheet::exists(task);
      const Place place = find(row_of(line), task);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        if constexpr (Depth::exists) {
          const int channel = place.channel + j;
          batch.elements[i][j].load(place.source + planes.offset(channel),
                                    exists && j < place.channels && planes.exist(channel));
        } else {
          batch.elements[i][j].load(place.source + static_cast<InOffset>(j) * kInChannel,
                                    exists && j < place.channels);
        }
      }
    }
  }
  template <int kTasks>
  __device__ __forceinline__ void store(const Batch<kTasks>& batch, int position, int first_line,
                                        int first) const {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int line = first_line + (first + i) / InSheet::kTasks;
      const int task = (first + i) % InSheet::kTasks;
      if (line >= kWindow || !InSheet::exists(task)) continue;
      unsigned char* const target =
          shared_memory() + kInput + ring_line(position + line) * kLineBytes + find(0, task).target;
#pragma unroll
      for (int column = 0; column < kTaskColumns; ++column) {
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = batch.elements[i][2 * j].element(column) |
                     batch.elements[i][2 * j + 1].element(column) << 16;
        }
        *reinterpret_cast<uint4*>(target + column * kColumnBytes) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
};

// --- Both ----------------------------------------------------------------------------------------

// A thread's tasks that go through registers while a slice is multiplied, and how many at once.
constexpr int kSliceGradTasks = kGradInRegisters ? ceil_div(kGradTasks, kWarpSlices) : 0;
constexpr int kSliceInTasks = kInInRegisters ? ceil_div(kInTasks, kWarpSlices) : 0;
constexpr int kGradBatch = kSliceGradTasks < C::grad_batch ? kSliceGradTasks : C::grad_batch;
constexpr int kInBatch = kSliceInTasks < C::in_batch ? kSliceInTasks : C::in_batch;
static_assert(C::grad_batch > 0 && C::in_batch > 0, "");

// A step's place in shared memory.
struct StepPlace {
  int position = 0;  // first line in the ring
  int stage = 0;

  __device__ unsigned char* grad() const { return shared_memory() + kGrad + stage * kStageBytes; }
  __device__ StepPlace next() const {
    StepPlace place;
    place.position = ring_line(position + kNewLines);
    place.stage = 1 - stage;
    return place;
  }
};

// Loads both tensors.
struct Loader {
  GradLoader grad;
  InLoader in;
  GradLoader::Batch<kGradBatch + (kGradBatch == 0)> grad_batch;
  InLoader::Batch<kInBatch + (kInBatch == 0)> in_batch;

  __device__ Loader(const Scalar* grad_output, const Scalar* input, const WeightTile& tile)
      : grad(grad_output, tile), in(input, tile) {}

  __device__ void move_to(const Cursor& at) {
    grad.move_to(at);
    in.move_to(at);
  }

  // Starts the asynchronous copies of a step, its lines from `first_line` on.
  __device__ __forceinline__ void copy(const StepPlace& to, int first_line) const {
    if constexpr (!kGradInRegisters) grad.copy(to.grad());
    if constexpr (!kInInRegisters) in.copy(to.position, first_line, kWindow);
    copy_async_commit();
  }

  // Waits for what this thread has copied of a step, and converts it.
  __device__ __forceinline__ void convert_copied(const StepPlace& to, int first_line) const {
    copy_async_wait<0>();
    if constexpr (kConvertsGrad) grad.convert_copied(to.grad());
    if constexpr (kConvertsInput) in.convert_copied(to.position, first_line, kWindow);
  }

  // Loads a slice's share of what goes through registers. All batches but the last are also
  // written; store_slice writes that one.
  __device__ __forceinline__ void load_slice(const StepPlace& to, int slice) {
    if constexpr (kGradBatch > 0) {
      int task = slice * kSliceGradTasks;
#pragma unroll 1
      for (; task < (slice + 1) * kSliceGradTasks - kGradBatch; task += kGradBatch) {
        grad.load(grad_batch, task);
        grad.store(grad_batch, task, to.grad());
      }
      grad.load(grad_batch, task);
    }
    if constexpr (kInBatch > 0) {
      int task = slice * kSliceInTasks;
#pragma unroll 1
      for (; task < (slice + 1) * kSliceInTasks - kInBatch; task += kInBatch) {
        in.load(in_batch, kOldLines, task);
        in.store(in_batch, to.position, kOldLines, task);
      }
      in.load(in_batch, kOldLines, task);
    }
  }
  __device__ __forceinline__ void store_slice(const StepPlace& to, int slice) const {
    if constexpr (kGradBatch > 0) {
      grad.store(grad_batch, last_batch(slice, kSliceGradTasks, kGradBatch), to.grad());
    }
    if constexpr (kInBatch > 0) {
      in.store(in_batch, to.position, kOldLines, last_batch(slice, kSliceInTasks, kInBatch));
    }
  }
  // Returns the first task of a slice's last batch.
  __device__ static int last_batch(int slice, int tasks, int batch) {
    return batch == 0 ? 0 : slice * tasks + (tasks - 1) / batch * batch;
  }

  // Loads all of a step, without overlap with MMAs.
  __device__ __forceinline__ void load_all(const StepPlace& to) {
    copy(to, 0);
    if constexpr (kGradBatch > 0) {
#pragma unroll 1
      for (int task = 0; task < kGradTasks; task += kGradBatch) {
        grad.load(grad_batch, task);
        grad.store(grad_batch, task, to.grad());
      }
    }
    if constexpr (kInBatch > 0) {
#pragma unroll 1
      for (int task = 0; task < kWindow * InSheet::kTasks; task += kInBatch) {
        in.load(in_batch, 0, task);
        in.store(in_batch, to.position, 0, task);
      }
    }
  }
};

}  // namespace ampere
}  // namespace fastconv
"""

SOURCES["ampere/wgrad_halo/tile.cuh"] = r"""
// What a block of the weight gradient computes, how it walks through images, and the layout of its
// shared memory.
#include "device/mma.cuh"
#include "device/tensor/depth.cuh"
#include "device/tensor/operand.cuh"
#include "device/tile.cuh"

namespace fastconv {
namespace ampere {

using namespace tensor;

constexpr bool k16Bit = kScalarBytes == 2;  // elements of 16 bits

// --- The weight tile: what a block computes ------------------------------------------------------

// A unit is the 8 columns (N) of an MMA: 8 input channels of one tap, or, with float32, channels of
// several taps. A warp has the accumulators of `units` units and 16 * row_tiles output channels.
// The block's warps divide output channels, then units, then pixels among themselves.
constexpr int kOctet = 8;  // columns, and input channels
constexpr int kWarps = C::warps_out * C::warps_units * C::warps_pixels;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpOutputs = 16 * C::row_tiles;
constexpr int kBlockOutputs = kWarpOutputs * C::warps_out;
constexpr int kBlockUnits = C::units * C::warps_units;
static_assert(kThreads % kBlockOutputs == 0, "as many threads for each channel's bias");

// A group's input channels in memory. In volumes, group_in counts them once for each tap of the
// depth, and images are output planes.
constexpr int kInChannels = C::group_in / Depth::kernel;
using InChannel = DepthChannel<kInChannels>;
static_assert(!Depth::exists || (!C::in_channels_last && !C::grad_channels_last),
              "contiguous volumes");

// Input channels and taps of a weight tile.
constexpr int kTileWeights = C::tile_channels * C::tile_rows * C::tile_columns;
static_assert(kTileWeights <= kBlockUnits * kOctet, "units cover the weight tile");
static_assert(!k16Bit || C::tile_channels % kOctet == 0, "octets are loaded at once");

constexpr int kChannelBlocks = ceil_div(C::group_in, C::tile_channels);
constexpr int kRowBlocks = ceil_div(C::kernel_height, C::tile_rows);
constexpr int kColumnBlocks = ceil_div(C::kernel_width, C::tile_columns);
constexpr int kOutputBlocks = ceil_div(C::group_out, kBlockOutputs);

// A block's weight tile, by its first weight; channels are counted within the group.
struct WeightTile {
  int channel;
  int output;
  int kernel_row;
  int kernel_column;
  int group;

  __device__ explicit WeightTile(int index) {
    channel = index % kChannelBlocks * C::tile_channels;
    index /= kChannelBlocks;
    kernel_column = index % kColumnBlocks * C::tile_columns;
    index /= kColumnBlocks;
    kernel_row = index % kRowBlocks * C::tile_rows;
    index /= kRowBlocks;
    output = index % kOutputBlocks * kBlockOutputs;
    group = index / kOutputBlocks;
  }

  // Whether this is the first tile of its output channels: the one that adds up the bias.
  __device__ bool has_bias() const { return channel == 0 && kernel_row == 0 && kernel_column == 0; }
};

// The channel and the tap of an MMA's column, counted over all units of the weight tile.
struct Column {
  int channel;
  int row;
  int column;

  __device__ explicit Column(int index)
      : channel(index % C::tile_channels),
        row(index / C::tile_channels / C::tile_columns),
        column(index / C::tile_channels % C::tile_columns) {}
};

// A warp's place in the block.
struct Warp {
  int out;
  int units;
  int pixels;

  __device__ explicit Warp(int index)
      : out(index % C::warps_out),
        units(index / C::warps_out % C::warps_units),
        pixels(index / (C::warps_out * C::warps_units)) {}
};

// --- The pixels: how blocks walk through images --------------------------------------------------

// Output rows of a walk are kRowStep apart, so that there are kRowStep walks down a strip. From one
// row to the next, input rows advance by kRowAdvance dilations.
constexpr int kRowGcd = gcd(C::stride_height, C::dilation_height);
constexpr int kRowStep = C::dilation_height / kRowGcd;
constexpr int kRowAdvance = C::stride_height / kRowGcd;

// A step of a walk is step_rows of its rows of strip_columns columns: the pixels that are
// multiplied from shared memory at once.
constexpr int kStepPixels = C::step_rows * C::strip_columns;
constexpr int kStrips = ceil_div(C::out_width, C::strip_columns);
constexpr int kWalksPerImage = kRowStep * kStrips;
constexpr int kWalkRows = C::steps * C::step_rows;
static_assert(C::strip_columns % 8 == 0, "an MMA takes 8 pixels of a row");
static_assert(kWalkRows * kRowStep >= C::out_height, "walks cover the image");

// A step's place among the steps of all images.
struct Cursor {
  int walk;
  int step;

  __device__ explicit Cursor(long long index)
      : walk(static_cast<int>(index / C::steps)), step(static_cast<int>(index % C::steps)) {}
  __device__ void advance() {
    if (++step < C::steps) return;
    step = 0;
    ++walk;
  }
  __device__ int image() const { return walk / kWalksPerImage; }
  // Row and column of the step's first pixel.
  __device__ int output_row() const {
    return walk / kStrips % kRowStep + step * (C::step_rows * kRowStep);
  }
  __device__ int output_column() const { return walk % kStrips * C::strip_columns; }
};

// The tiles and workers of a launch. Workers divide the steps of all images among themselves.
struct LaunchRange {
  int first_tile;
  int tiles;
  int workers;
  int batch;

  __device__ WeightTile tile() const {
    return WeightTile(first_tile + static_cast<int>(blockIdx.x) % tiles);
  }
  // Returns the first step of a worker.
  __device__ long long first_step(int worker) const {
    return static_cast<long long>(batch) * (kWalksPerImage * C::steps) * worker / workers;
  }
};

// An MMA multiplies (K) 8 neighbouring pixels of float32 or 16 of 16-bit types; with 16-bit types
// and strips of an odd number of octets, 8 pixels of two rows.
constexpr bool kRowPairs = k16Bit && C::strip_columns % 16 == 8;
constexpr int kMmaColumns = k16Bit && !kRowPairs ? 16 : 8;
constexpr int kMmaRows = kRowPairs ? 2 : 1;
// A slice is the part of a step that a warp multiplies without computing new addresses.
constexpr int kSliceColumns = C::slice_mmas * kMmaColumns;
constexpr int kRowSlices = C::strip_columns / kSliceColumns;
constexpr int kSlices = C::step_rows / kMmaRows * kRowSlices;
constexpr int kWarpSlices = kSlices / C::warps_pixels;
static_assert(C::strip_columns % kSliceColumns == 0 && C::step_rows % kMmaRows == 0, "");
static_assert(kSlices % C::warps_pixels == 0, "all warps have as much to do");

// --- Shared memory -------------------------------------------------------------------------------

// The input is a ring of lines: rows of the input that some tap reads, one dilation apart. A step
// needs kWindow of them, from its first output row's first line on. With `rolling`, most of them
// are also the step before's; otherwise the ring has room for two steps' lines.
constexpr int kLineAdvance = kRowAdvance < C::tile_rows ? kRowAdvance : C::tile_rows;
constexpr int kWindow = (C::step_rows - 1) * kLineAdvance + C::tile_rows;
constexpr int kNewLines = C::rolling ? C::step_rows * kLineAdvance : kWindow;
constexpr int kOldLines = kWindow - kNewLines;
constexpr int kLines = kWindow + kNewLines;
static_assert(!C::rolling || kOldLines > 0, "");

// Taps read only every kColumnUnit-th column of a row; only these are stored.
constexpr int kColumnUnit =
    C::tile_columns == 1 ? C::stride_width : gcd(C::stride_width, C::dilation_width);
constexpr int kStride = C::stride_width / kColumnUnit;
constexpr int kTapStep = C::tile_columns == 1 ? 0 : C::dilation_width / kColumnUnit;
// Copies of several columns begin at multiples of their width, so lines begin up to `shift` columns
// early.
constexpr int kLineColumns =
    round_up(C::shift + (C::strip_columns - 1) * kStride + (C::tile_columns - 1) * kTapStep + 1,
             C::in_channels_last ? 1 : C::in_vector);

// The layout of a line:
//   16-bit types               [octet][column][8 channels]    octets are in_pitch bytes apart
//   float32                    [channel][column]              channels are in_pitch bytes apart
//   float32, channels-last     [column][channel]              columns are in_pitch bytes apart
constexpr bool kPixelLines = !k16Bit && C::in_channels_last;
constexpr int kColumnBytes = k16Bit ? 16 : kPixelLines ? C::in_pitch : 4;
constexpr int kChannelBytes = kPixelLines ? 4 : C::in_pitch;  // distance of float32 channels
constexpr int kLineBytes =
    (kPixelLines ? kLineColumns : C::tile_channels / (k16Bit ? kOctet : 1)) * C::in_pitch;
// Returns the offset of a channel in a line.
__device__ __forceinline__ int channel_bytes(int channel) {
  return k16Bit ? channel / kOctet * C::in_pitch + channel % kOctet * kScalarBytes
                : channel * kChannelBytes;
}

// The output's gradient has two stages. A stage has the layout of global memory, [channel][pixel],
// or [pixel][channel] if it is channels-last; with 3xTF32, all low parts follow all high parts.
constexpr int kPartBytes = (C::grad_channels_last ? kStepPixels : kBlockOutputs) * C::grad_pitch;
constexpr int kStageBytes = C::parts * kPartBytes;

constexpr int kInput = 0;
constexpr int kRingBytes = kLines * kLineBytes;
constexpr int kGrad = kInput + round_up(kRingBytes, 16);
constexpr int kUnits = kGrad + 2 * kStageBytes;
constexpr int kEntryColumns = k16Bit ? kOctet : 1;
constexpr int kEntries = kBlockUnits * kOctet / kEntryColumns;
static_assert(kUnits + 4 * kEntries <= C::shared_bytes, "");

// The offsets of each column, or of each unit with 16-bit types, from the first line of an output
// row.
__device__ __forceinline__ int* unit_table() {
  return reinterpret_cast<int*>(shared_memory() + kUnits);
}
__device__ __forceinline__ void fill_unit_table() {
  for (int i = static_cast<int>(threadIdx.x); i < kEntries; i += kThreads) {
    const int index = i * kEntryColumns;
    const Column column(index < kTileWeights ? index : 0);  // results of excess columns are dropped
    unit_table()[i] = column.row * kLineBytes + channel_bytes(column.channel) +
                      column.column * (kTapStep * kColumnBytes);
  }
}

// Wrap a line, or a byte, around the end of the ring.
__device__ __forceinline__ int ring_line(int line) { return line < kLines ? line : line - kLines; }
__device__ __forceinline__ int ring_byte(int byte) {
  return byte < kRingBytes ? byte : byte - kRingBytes;
}

}  // namespace ampere
}  // namespace fastconv
"""


# === Host code ====================================================================================

LAUNCHER = r"""
// Launches a kernel from Python, which passes its sizes and arguments as 64-bit numbers. An address
// or an integer is one number, a tensor map several.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using Numbers = std::vector<int64_t>;
using Arguments = std::vector<Numbers>;

inline void check(cudaError_t status, const std::string& kernel) {
  if (status == cudaSuccess) return;
  throw std::runtime_error("CUDA error at the launch of " + kernel + ": " +
                           cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

// A driver function that exists since CUDA 12. It is looked up at run time, because linking it
// would need the driver's library.
template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
#if CUDART_VERSION >= 13000
  const auto status = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault);
#else
  const auto status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault);
#endif
  if (status != cudaSuccess || found == nullptr) {
    throw std::runtime_error(std::string("the NVIDIA driver is too old: it has no ") + name);
  }
  return reinterpret_cast<Function*>(found);
}

// Copies numbers to an array, and advances past them.
template <class T>
void take(const int64_t*& numbers, T* target, int count) {
  for (int i = 0; i < count; ++i) target[i] = static_cast<T>(*numbers++);
}

// Encodes a tensor map, given its tensor's address and the numbers that map_numbers returns.
inline cudaError_t encode(void* map, const Numbers& numbers) {
  using Tiled = int(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*,
                    const unsigned*, int, int, int, int);
  using Im2col = int(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const int*,
                     const int*, unsigned, unsigned, const unsigned*, int, int, int, int);
  const int64_t* next = numbers.data();
  void* const tensor = reinterpret_cast<void*>(*next++);
  int head[5];
  take(next, head, 5);
  const auto [tiled, type, swizzle, promotion, rank] = head;
  uint64_t sizes[5], strides[5];
  unsigned steps[5];
  take(next, sizes, rank);
  take(next, strides, rank - 1);
  take(next, steps, rank);
  int status;
  if (tiled) {
    static const auto encode = driver_function<Tiled>("cuTensorMapEncodeTiled");
    unsigned box[5];
    take(next, box, rank);
    status = encode(map, type, rank, tensor, sizes, strides, box, steps, 0, swizzle, promotion, 0);
  } else {
    static const auto encode = driver_function<Im2col>("cuTensorMapEncodeIm2col");
    int lower[3], upper[3];
    unsigned box[2];  // channels, pixels
    take(next, lower, rank - 2);
    take(next, upper, rank - 2);
    take(next, box, 2);
    status = encode(map, type, rank, tensor, sizes, strides, lower, upper, box[0], box[1], steps, 0,
                    swizzle, promotion, 0);
  }
  return static_cast<cudaError_t>(status);  // driver and runtime have the same error numbers
}

template <class T>
T as_argument(const std::string& kernel, const Numbers& numbers) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(numbers.at(0));
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(numbers.at(0));
  } else {
    static_assert(sizeof(T) == 128, "the size of an encoded tensor map");
    alignas(128) T map;
    check(encode(&map, numbers), kernel);
    return map;
  }
}

// Converts the arguments to the kernel's parameters, and launches it.
template <class... Parameters, std::size_t... kIndex>
void start(const std::string& name, void (*kernel)(Parameters...), const Numbers& sizes,
           const Arguments& arguments, int64_t stream, std::index_sequence<kIndex...>) {
  if (arguments.size() != sizeof...(Parameters)) {
    throw std::invalid_argument(name + " has " + std::to_string(sizeof...(Parameters)) +
                                " arguments, not " + std::to_string(arguments.size()));
  }
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(sizes.at(0)));
  config.blockDim = dim3(static_cast<unsigned>(sizes.at(1)));
  config.dynamicSmemBytes = static_cast<std::size_t>(sizes.at(2));
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &dependent;
  config.numAttrs = sizes.at(3) != 0 ? 1 : 0;
  // More than 48 KiB of shared memory need an attribute, on each device; setting it takes well
  // under a microsecond. It also gives the thread a context, which encoding tensor maps needs.
  if (config.dynamicSmemBytes > 48 * 1024 || (std::is_class_v<Parameters> || ...)) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.dynamicSmemBytes)),
          name);
  }
  cudaLaunchKernelEx(&config, kernel, as_argument<Parameters>(name, arguments[kIndex])...);
  check(cudaGetLastError(), name);  // this also clears the error
}

// `sizes` are the number of blocks, threads of a block, bytes of its dynamic shared memory, and
// whether this is a programmatic dependent launch.
template <class... Parameters>
void start(const std::string& name, void (*kernel)(Parameters...), const Numbers& sizes,
           const Arguments& arguments, int64_t stream) {
  start(name, kernel, sizes, arguments, stream, std::index_sequence_for<Parameters...>());
}
"""

BINDINGS = r"""
// The Python module that is compiled with the kernels: one function, which launches them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

void launch(int kernel, const std::vector<int64_t>& sizes,
            const std::vector<std::vector<int64_t>>& arguments, int64_t stream);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("launch", &launch); }
"""


# === Plans for the portable kernels, for any geometry =============================================

# A thread computes this many neighbouring pixels of a row, for each of its channels.
PIXELS = 4
# The warps of a block, in forward convolutions and input gradients.
WARPS = 8
# A stage's loop over kernel rows is unrolled if the stage has at most this many taps.
UNROLLED_TAPS = 48
# A stage covers at most this many columns of the kernel: their loop is unrolled.
MOST_PART_TAPS = 16
# A thread holds at most this many input pixels of a row: their loop is unrolled as well.
MOST_WINDOW = 128
# A stage should add this many products to each accumulator, to be worth its two barriers.
STAGE_PRODUCTS = 160
# In weight gradients, the accumulators of a thread, and these together with its input pixels: two
# blocks of 256 threads then have enough registers on an SM.
MOST_ACCUMULATORS = 72
MOST_VALUES = 108
# In weight gradients, the columns of a stage: the widest that fits is taken.
STAGE_COLUMNS = (96, 64, 32, 16, 8)
# Partial sums are flushed to a second level of summation, which bounds rounding errors: after at
# least and at most so many products, and in weight gradients after so many pixels.
FLUSH_PRODUCTS, MOST_PRODUCTS = 60, 512
FLUSH_PIXELS = 512
# The most shared memory of a block: every GPU has it, and most have it for two blocks on an SM.
SHARED_BYTES = 47 * 1024
# The most workspace of a weight gradient.
WORKSPACE_BYTES = 64 << 20
# The block and the largest grid of the small kernels that clear, pack and reduce.
HELPER_THREADS = 256
MOST_HELPER_BLOCKS = 4096
# CUDA's limit on the blocks of a one-dimensional grid.
MOST_BLOCKS = 2**31 - 1
# Kernels count in 32-bit ints. Counts stay below this, so that a further tile does not overflow.
END = 2**31 - 2**16

Constant = int | bool | str
Constants = tuple[tuple[str, Constant], ...]


def config(like: Constants = (), /, **constants: Constant) -> Constants:
    """The constants that a kernel is compiled with, or those of ``like`` with changes."""
    return tuple({**dict(like), **constants}.items())


class TensorMap(NamedTuple):
    """A tensor map for TMA loads and stores of boxes; dimensions come innermost first.

    ``strides`` are in bytes, for all dimensions but the innermost.
    """

    tensor: str
    scalar: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    promotion: int


class Im2colMap(NamedTuple):
    """A tensor map for TMA loads in im2col mode, within the corners of a bounding box."""

    tensor: str
    scalar: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    element_strides: tuple[int, ...]
    swizzle: int
    promotion: int


Argument = str | int | TensorMap | Im2colMap


class Launch(NamedTuple):
    """One kernel launch, complete but for the addresses of its tensors.

    ``arguments`` are the kernel's, in order: the name of a tensor, an int, or a tensor map. If
    ``early``, it is a programmatic dependent launch: it may begin while the launch before it still
    runs, and the kernel waits for that before it touches any tensor.
    """

    source: str
    entry: str
    constants: Constants
    grid: int
    block: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    early: bool = False


class Plan(NamedTuple):
    """The launches in order, and the bytes of their workspace (the tensor ``scratch``).

    ``regions`` are tensors that lie in the workspace, and the bytes before them.
    """

    launches: tuple[Launch, ...]
    scratch_bytes: int
    regions: dict[str, int] = {}  # noqa: RUF012  # nothing changes it


class Target(NamedTuple):
    """A GPU that plans were made for: its SMs, and the shared memory that a block may use."""

    sms: int
    shared_bytes: int


class Geometry(NamedTuple):
    """The shapes and parameters of a convolution along two axes, or three: depth comes first."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def output(self) -> tuple[int, ...]:
        sizes = []
        for axis in range(len(self.stride)):
            extent = self.dilation[axis] * (self.weight[2 + axis] - 1) + 1
            padded = self.input[2 + axis] + 2 * self.padding[axis]
            sizes.append((padded - extent) // self.stride[axis] + 1)
        return (self.input[0], self.weight[0], *sizes)


class Operands(NamedTuple):
    """The tensors' type and layout; ``aligned``: all addresses are multiples of 16 bytes."""

    scalar: str
    scalar_bytes: int
    channels_last: bool
    aligned: bool

    def vector(self, *distances: int) -> int:
        """Elements of the widest vector that is aligned at all multiples of these distances."""
        if self.channels_last or not self.aligned:
            return 1
        vector = math.gcd(16 // self.scalar_bytes, *distances)
        return vector if vector * self.scalar_bytes >= 4 else 1


class Axis(NamedTuple):
    """One axis of a forward convolution or of an input gradient, as the kernel sees it.

    An input gradient is computed separately for each residue of the stride: input positions that
    are equal modulo the stride see the same taps.
    """

    taps: int  # taps of a residue, at most
    step: int  # input positions from one tap to the next
    residues: int  # residues that any tap reaches; 1 in a forward convolution
    in_stride: int  # input positions from one output to the next
    origin: int  # input position of the first output's first tap, if there is one residue
    positions: int  # outputs of a residue, at most
    reaches_all: bool  # whether every output has a tap

    @classmethod
    def of(cls, transposed: bool, geometry: Geometry, axis: int) -> "Axis":
        kernel, padding = geometry.weight[2 + axis], geometry.padding[axis]
        stride, dilation = geometry.stride[axis], geometry.dilation[axis]
        if not transposed:
            return cls(kernel, dilation, 1, stride, -padding, geometry.output[2 + axis], True)
        common = math.gcd(stride, dilation)
        taps, step, size = ceil_div(kernel, stride // common), dilation // common, geometry.input
        residues = min(kernel, stride // common)
        positions = ceil_div(size[2 + axis], stride)
        origin = ceil_div(padding, stride) - (taps - 1) * step
        return cls(taps, step, residues, 1, origin, positions, residues == stride)

    def distance(self, taps: int) -> int:
        """Pixels of a tile from one output's first tap to the next output's.

        A tile for a single tap holds only the pixels that this tap reads.
        """
        return 1 if taps == 1 else self.in_stride


ONE_PLANE = Axis(1, 1, 1, 1, 0, 1, True)  # the depth of an image


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def power_of_two_for(count: int, most: int) -> int:
    """The least power of two that is at least ``count``, but at most ``most``."""
    return min(1 << (count - 1).bit_length(), most)


def portable_plan(which: str, geometry: Geometry, operands: Operands, sms: int) -> Plan:
    """The plan of the portable kernels for one operation, on a GPU with so many SMs.

    ``which`` names the operation, and with it the launches' tensors: "forward" has ``input``,
    ``weight``, ``bias`` and ``output``. "input_grad" has the same; its ``input`` is the output's
    gradient, and its ``output`` the input's. "weight_grad" has ``grad_output``, ``input`` and
    ``output``, "bias_grad" ``grad_output`` and ``output``.
    """
    geometry = countable(geometry)
    if which == "weight_grad":
        return weight_grad_plan(geometry, operands, sms)
    if which == "bias_grad":
        return bias_grad_plan(geometry, operands, sms)
    return convolution_plan(geometry, operands, transposed=which == "input_grad")


def convolution_plan(geometry: Geometry, operands: Operands, transposed: bool) -> Plan:
    """The plan of a forward convolution, or of an input gradient (``transposed``)."""
    batch, groups = geometry.input[0], geometry.groups
    group_in, group_out = geometry.weight[1], geometry.weight[0] // groups
    in_size, out_size = geometry.input[-2:], geometry.output[-2:]
    if transposed:
        group_in, group_out, in_size, out_size = group_out, group_in, out_size, in_size
    axes = [Axis.of(transposed, geometry, i) for i in range(len(geometry.stride))]
    depth, rows, columns = (ONE_PLANE, *axes)[-3:]
    reads = group_in * depth.taps  # the planes that an output plane reads are further channels
    # Channels go to a thread's registers first, then to lanes. The other lanes, and all warps, take
    # pixels.
    channels_per_thread = power_of_two_for(group_out, 8)
    lanes_m = power_of_two_for(ceil_div(group_out, channels_per_thread), 4)
    lanes_x = power_of_two_for(ceil_div(columns.positions, PIXELS), 32 // lanes_m)
    lanes_y = 32 // (lanes_m * lanes_x)
    tile = (channels_per_thread * lanes_m, WARPS * lanes_y, PIXELS * lanes_x)

    for channels, tap_rows, tap_columns in convolution_stages(rows.taps, columns.taps, reads):
        distance = columns.distance(tap_columns)
        vector = 1
        if columns.residues == 1 and distance == columns.in_stride and tap_columns == columns.taps:
            vector = operands.vector(in_size[1], tile[2] * columns.in_stride)
        window = (
            columns.origin % vector + (PIXELS - 1) * distance + (tap_columns - 1) * columns.step + 1
        )
        quantum = max(vector, 4)
        halo_columns = round_up((tile[2] - PIXELS) * distance + round_up(window, 4), quantum)
        halo_rows = (tile[1] - 1) * rows.distance(tap_rows) + (tap_rows - 1) * rows.step + 1
        pitch_padding = quantum if lanes_y > 1 else 0  # so that rows lie in different banks
        pixels = channels * halo_rows * (halo_columns + pitch_padding)
        weights = channels * tap_rows * tap_columns * tile[0]
        shared_bytes = 2 * (
            round_up(pixels * operands.scalar_bytes, 16) + round_up(weights * 4, 16)
        )
        if shared_bytes <= SHARED_BYTES and window <= MOST_WINDOW:
            break

    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "transposed": transposed,
        "group_in": group_in,
        "group_out": group_out,
        "groups": groups,
        "in_height": in_size[0],
        "in_width": in_size[1],
        "out_height": out_size[0],
        "out_width": out_size[1],
        **kernel_constants(geometry),
        **depth_constants(geometry, transposed),
        "in_channels_last": operands.channels_last,
        "out_channels_last": operands.channels_last,
        "channels_per_thread": channels_per_thread,
        "lanes_y": lanes_y,
        "lanes_x": lanes_x,
        "warps": WARPS,
        "stage_channels": channels,
        "stage_taps": tap_rows,
        "part_taps": tap_columns,
        "unrolled_taps": UNROLLED_TAPS,
        "vector": vector,
        "pitch_padding": pitch_padding,
        "aligned": operands.aligned,
        "two_level": True,
        "flush_channels": channels,
        "flush_stages": ceil_div(FLUSH_PRODUCTS, channels * tap_rows * tap_columns),
        "flush_rows": min(tap_rows, ceil_div(MOST_PRODUCTS, tap_columns)),
        "shared_bytes": shared_bytes,
        "blocks_per_sm": 2,
        "packed": True,
    }
    blocks = (
        ceil_div(group_out, tile[0])
        * ceil_div(rows.positions, tile[1])
        * ceil_div(columns.positions, tile[2])
        * depth.positions
        * groups
        * depth.residues
        * rows.residues
        * columns.residues
    )
    require("blocks of one image", blocks)
    packed = (
        depth.residues
        * rows.residues
        * columns.residues
        * groups
        * round_up(group_out, tile[0])
        * round_up(reads, channels)
        * round_up(rows.taps, tap_rows)
        * round_up(columns.taps, tap_columns)
    )
    code = ("direct/forward/kernel.cuh", tuple(constants.items()))
    launches = [helper_launch(code, "pack", packed, ("weight", "scratch"))]
    if not all(axis.reaches_all for axis in axes):
        elements = math.prod(geometry.input)
        launches.append(helper_launch(code, "clear", elements, ("output", batch)))
    at_once = MOST_BLOCKS // blocks
    for first in range(0, batch, at_once):
        images = min(at_once, batch - first)
        arguments = ("input", "weight", "scratch", "bias", "output", first, images)
        launches.append(
            Launch(
                code[0], "convolve", code[1], images * blocks, 32 * WARPS, shared_bytes, arguments
            )
        )
    return Plan(tuple(launches), packed * 4)


def convolution_stages(rows: int, columns: int, reads: int) -> tuple[tuple[int, int, int], ...]:
    """Candidates for a stage's channels, kernel rows and kernel columns, the best first."""
    part = ceil_div(columns, ceil_div(columns, MOST_PART_TAPS))
    most = min(reads, max(STAGE_PRODUCTS // (rows * part), 1), 16)
    whole = tuple((channels, rows, part) for channels in range(most, 0, -1))
    return (*whole, (1, 1, part), (1, 1, 1))


def weight_grad_plan(geometry: Geometry, operands: Operands, sms: int) -> Plan:
    batch, groups = geometry.input[0], geometry.groups
    group_in, group_out = geometry.weight[1], geometry.weight[0] // groups
    kernel, out_size = geometry.weight[-2:], geometry.output[-2:]
    stride, dilation = geometry.stride[-1], geometry.dilation[-1]
    # Each output plane of a volume is an image, and the planes that it reads are further channels.
    planes, reads = math.prod(geometry.output[2:-2]), group_in * math.prod(geometry.weight[2:-2])
    whole = ceil_div(kernel[1], ceil_div(kernel[1], MOST_PART_TAPS))

    # The kernel rows of a block, and the input channels of a thread, at most.
    owned = ((kernel[0], 8), (1, 8), (1, 1))
    for part_taps, (tap_rows, most_inputs), most_columns in itertools.product(
        (whole, 1), owned, STAGE_COLUMNS
    ):
        distance = 1 if part_taps == 1 else stride
        vector_input = 1
        if distance == stride and part_taps == kernel[1]:
            vector_input = operands.vector(geometry.input[-1])
        vector_grad = operands.vector(out_size[1])
        shift = -geometry.padding[-1] % vector_input
        window = round_up(shift + (PIXELS - 1) * distance + (part_taps - 1) * dilation + 1, 4)
        # A thread has the accumulators of all kernel rows if they fit. Lanes and warps take
        # channels.
        channels_per_thread = power_of_two_for(group_out, 8)
        while channels_per_thread * part_taps > MOST_ACCUMULATORS:
            channels_per_thread //= 2
        block_taps = tap_rows
        if block_taps * (channels_per_thread * part_taps + window) > MOST_VALUES:
            block_taps = 1
        inputs_per_thread = power_of_two_for(reads, most_inputs)
        accumulators_per_input = channels_per_thread * part_taps * block_taps
        while (
            inputs_per_thread > 1 and inputs_per_thread * accumulators_per_input > MOST_ACCUMULATORS
        ):
            inputs_per_thread //= 2
        lanes_m = power_of_two_for(ceil_div(group_out, channels_per_thread), 4)
        lanes_n = power_of_two_for(ceil_div(reads, inputs_per_thread), 8)
        warps_m = power_of_two_for(ceil_div(group_out, channels_per_thread * lanes_m), 4)
        warps_n = power_of_two_for(ceil_div(reads, inputs_per_thread * lanes_n), 8 // warps_m)
        warps_k = max(4 // (warps_m * warps_n), 1)
        channels = channels_per_thread * lanes_m * warps_m
        inputs = inputs_per_thread * lanes_n * warps_n
        # A stage has as much of a row as fits, and several rows of narrow images.
        quantum = max(16 // operands.scalar_bytes, PIXELS)
        stage_columns = min(round_up(out_size[1], quantum), most_columns)
        stage_rows = max(1, min(out_size[0], most_columns // stage_columns))
        while True:
            columns = (stage_columns - PIXELS) * distance + window
            columns = round_up(columns, max(vector_input, 4))
            grads = channels * stage_rows * (stage_columns + max(vector_grad, 4))
            pixels = inputs * stage_rows * block_taps * (columns + max(vector_input, 4))
            shared_bytes = 2 * sum(
                round_up(elements * operands.scalar_bytes, 16) for elements in (grads, pixels)
            )
            if shared_bytes <= SHARED_BYTES or stage_rows == 1:
                break
            stage_rows //= 2
        if shared_bytes <= SHARED_BYTES and window <= MOST_WINDOW:
            break

    threads = 32 * warps_m * warps_n * warps_k
    units = planes * ceil_div(out_size[0], stage_rows) * ceil_div(out_size[1], stage_columns)
    units *= batch
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "bias": False,  # the bias gradient has a kernel of its own
        "group_in": group_in,
        "group_out": group_out,
        "groups": groups,
        "in_height": geometry.input[-2],
        "in_width": geometry.input[-1],
        "out_height": out_size[0],
        "out_width": out_size[1],
        **kernel_constants(geometry),
        **depth_constants(geometry),
        "in_channels_last": operands.channels_last,
        "grad_channels_last": operands.channels_last,
        "wide_units": units >= 2**31,
        "channels_per_thread": channels_per_thread,
        "inputs_per_thread": inputs_per_thread,
        "lanes_m": lanes_m,
        "lanes_n": lanes_n,
        "warps_m": warps_m,
        "warps_n": warps_n,
        "warps_k": warps_k,
        "part_taps": part_taps,
        "block_taps": block_taps,
        "stage_rows": stage_rows,
        "stage_columns": stage_columns,
        "vector_input": vector_input,
        "vector_grad": vector_grad,
        "input_pitch_padding": max(vector_input, 4),
        "grad_pitch_padding": max(vector_grad, 4),
        "flush_units": max(1, FLUSH_PIXELS // (stage_rows * stage_columns)),
        "shared_bytes": shared_bytes,
        "blocks_per_sm": 512 // threads,
    }
    code = ("direct/wgrad/kernel.cuh", tuple(constants.items()))
    tiles = (
        groups
        * ceil_div(group_out, channels)
        * ceil_div(reads, inputs)
        * ceil_div(kernel[0], block_taps)
        * ceil_div(kernel[1], part_taps)
    )
    require("tiles of a weight", tiles)
    block_accumulators = channels_per_thread * inputs_per_thread * part_taps * block_taps * threads
    most_blocks = WORKSPACE_BYTES // (block_accumulators * 4)
    at_once = min(tiles, most_blocks)
    splits = min(max(sms * (512 // threads) // at_once, 1), most_blocks // at_once, max(units, 1))
    launches = []
    for first in range(0, tiles, at_once):
        count = min(at_once, tiles - first)
        arguments = ("grad_output", "input", "scratch", first, count, splits, batch)
        launches.append(
            Launch(
                code[0], "weight_grad", code[1], count * splits, threads, shared_bytes, arguments
            )
        )
        reduced = ("scratch", "output", "bias_grad", first, count, splits)
        launches.append(helper_launch(code, "reduce", count * block_accumulators, reduced))
    return Plan(tuple(launches), at_once * splits * block_accumulators * 4)


def bias_grad_plan(geometry: Geometry, operands: Operands, sms: int) -> Plan:
    batch, channels, *sizes = geometry.output
    height, width = math.prod(sizes[:-1]), sizes[-1]
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "channels": channels,
        "height": height,
        "width": width,
        "channels_last": operands.channels_last,
    }
    code = ("direct/bias_grad.cuh", tuple(constants.items()))
    splits = max(1, min(8 * sms // channels, batch * height * width // HELPER_THREADS))
    arguments = ("grad_output", "scratch", splits, batch)
    partial = Launch(
        code[0], "bias_grad", code[1], channels * splits, HELPER_THREADS, 4 * HELPER_THREADS,
        arguments,
    )  # fmt: skip
    reduced = ("scratch", "output", splits)
    blocks = ceil_div(channels, HELPER_THREADS)
    reduce = Launch(code[0], "bias_reduce", code[1], blocks, HELPER_THREADS, 0, reduced)
    return Plan((partial, reduce), channels * splits * 4)


def helper_launch(
    code: tuple[str, Constants],
    entry: str,
    elements: int,
    arguments: tuple[str | int, ...],
) -> Launch:
    """A launch with a thread for each element, up to a limit; beyond it, threads loop."""
    blocks = min(ceil_div(elements, HELPER_THREADS), MOST_HELPER_BLOCKS)
    return Launch(code[0], entry, code[1], blocks, HELPER_THREADS, 0, arguments)


def kernel_constants(geometry: Geometry) -> dict[str, Constant]:
    """The constants that describe a contiguous weight, and how it is applied."""
    height, width = geometry.weight[-2:]
    return {
        "kernel_height": height,
        "kernel_width": width,
        "stride_height": geometry.stride[-2],
        "stride_width": geometry.stride[-1],
        "dilation_height": geometry.dilation[-2],
        "dilation_width": geometry.dilation[-1],
        "padding_top": geometry.padding[-2],
        "padding_left": geometry.padding[-1],
        "weight_stride_out": math.prod(geometry.weight[1:]),
        "weight_stride_in": math.prod(geometry.weight[2:]),
        "weight_stride_height": width,
        "weight_stride_width": 1,
    }


def depth_constants(geometry: Geometry, transposed: bool = False) -> dict[str, Constant]:
    """The constants of a volume's depth; there are none for images."""
    if len(geometry.stride) == 2:
        return {}
    sizes = (geometry.input[2], geometry.output[2])
    return {
        "in_depth": sizes[transposed],
        "out_depth": sizes[not transposed],
        "kernel_depth": geometry.weight[2],
        "stride_depth": geometry.stride[0],
        "dilation_depth": geometry.dilation[0],
        "padding_front": geometry.padding[0],
        "weight_stride_depth": math.prod(geometry.weight[3:]),
    }


def countable(geometry: Geometry) -> Geometry:
    """The geometry, after checking that kernels can count its elements in 32-bit ints.

    Strides larger than the padded input, and the dilation of a single tap, have no effect: they are
    reduced.
    """
    out_channels, group_in, *kernel = geometry.weight
    axes = range(len(kernel))
    padded = [geometry.input[2 + i] + 2 * geometry.padding[i] for i in axes]
    sizes = (*geometry.input[:2], out_channels, *padded)
    require("images, channels and padded sides", max(sizes))
    channels = max(out_channels // geometry.groups, group_in)
    require("a group's channels times taps", channels * math.prod(kernel))
    stride = tuple(min(geometry.stride[i], padded[i]) for i in axes)
    dilation = tuple(geometry.dilation[i] if kernel[i] > 1 else 1 for i in axes)
    return geometry._replace(stride=stride, dilation=dilation)


def require(what: str, value: int) -> None:
    """Raises a ValueError if a count exceeds what kernels can hold in 32-bit ints."""
    if value >= END:
        raise ValueError(
            f"the portable kernels take {what} below {END} (2^31 - 2^16), but got {value}"
        )


# === Tuned plans for the exported convolutions, by GPU ============================================

EXPORTED = Geometry(
    input=(8, 32, 512, 512),
    weight=(64, 32, 5, 9),
    stride=(1, 1),
    padding=(2, 4),
    dilation=(2, 3),
    groups=1,
)

TARGETS = {
    "sm_90a": Target(sms=132, shared_bytes=232448),
    "sm_80": Target(sms=108, shared_bytes=166912),
    "sm_86": Target(sms=82, shared_bytes=101376),
}

TUNED = {}

SM_90A_FORWARD_FLOAT_TF32_0 = config(
    Scalar="float", parts=1, scaled_fp16=True, low_low_mma=False, ties_to_even=False,
    compensated=False, transposed=False, groups=1, group_in=32, group_out=64, in_height=512,
    in_width=512, out_height=508, out_width=496, kernel_height=5, kernel_width=9,
    stride_height=1, stride_width=1, dilation_height=2, dilation_width=3, padding_top=2,
    padding_left=4, weight_stride_out=1440, weight_stride_in=45, weight_stride_height=9,
    weight_stride_width=1, s2d_height=1, s2d_width=1, d2s_height=1, d2s_width=1,
    weight_height=5, weight_width=9, last_tap_row=0, last_tap_column=0, tap_step_height=1,
    tap_step_width=1, tap_dilation_height=1, tap_dilation_width=1, image_height=508,
    image_width=496, out_step_height=1, out_step_width=1, row_at=0, row_begin=0, row_end=1,
    column_at=0, column_begin=0, column_end=1, stacked_columns=1, interleave=1,
    in_channels_last=False, out_channels_last=False, vector_loads=False, staged=True,
    raw_slots=1, bulk_loads=True, box_loads=False, vector_stores=False, bulk_stores=True,
    channel_groups=1, stack=1, pixels=168, tile_rows=1, block_rows=2, register_tile_m=64,
    loaders=224, loader_warps=7, piece_vectors=1, threads=512, unit_vectors=2,
    smaller_part=True, watches=False, tile_columns=168, pitch=192, lead=0, joint_stores=False,
    wraps=False, turns=False, plane_padding=0, rolling=True, segment_tiles=16, k_steps=2,
    stage_taps=3, input_stages=8, weight_stages=3, resident=False, pass_pixels=176, buffers=1,
    batch=2, batches_ahead=2, producer_registers=72, consumer_registers=184,
    shared_bytes=226424, packed_at=368640, tables_at=552960, table_channels=64,
    table_columns=32, repairs=False,
)
SM_90A_FORWARD_FLOAT_TF32_1 = config(
    SM_90A_FORWARD_FLOAT_TF32_0, scaled_fp16=False, raw_slots=2, pixels=248, loaders=96,
    loader_warps=3, piece_vectors=2, threads=384, tile_columns=248, pitch=272, rolling=False,
    segment_tiles=1, k_steps=1, stage_taps=5, input_stages=2, pass_pixels=128, batch=5,
    producer_registers=136, shared_bytes=223120, packed_at=0, repairs=True,
)
TUNED["sm_90a", "forward", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "hopper/halo/kernel.cuh", "scale", SM_90A_FORWARD_FLOAT_TF32_0,
            grid=32, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "pack", SM_90A_FORWARD_FLOAT_TF32_0,
            grid=72, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "convolve", SM_90A_FORWARD_FLOAT_TF32_0,
            grid=132, block=512, shared_bytes=226424,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "pack", SM_90A_FORWARD_FLOAT_TF32_1,
            grid=90, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "convolve", SM_90A_FORWARD_FLOAT_TF32_1,
            grid=132, block=384, shared_bytes=223120,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=554432,
)

SM_80_FORWARD_FLOAT_TF32_0 = config(
    Scalar="float", parts=1, scaled_fp16=True, low_low_mma=False, ties_to_even=False,
    compensated=False, transposed=False, groups=1, group_in=32, group_out=64, in_height=512,
    in_width=512, out_height=508, out_width=496, kernel_height=5, kernel_width=9,
    stride_height=1, stride_width=1, dilation_height=2, dilation_width=3, padding_top=2,
    padding_left=4, weight_stride_out=1440, weight_stride_in=45, weight_stride_height=9,
    weight_stride_width=1, s2d_height=1, s2d_width=1, d2s_height=1, d2s_width=1,
    weight_height=5, weight_width=9, last_tap_row=0, last_tap_column=0, tap_step_height=1,
    tap_step_width=1, tap_dilation_height=1, tap_dilation_width=1, image_height=508,
    image_width=496, out_step_height=1, out_step_width=1, row_at=0, row_begin=0, row_end=1,
    column_at=0, column_begin=0, column_end=1, stacked_columns=1, interleave=1,
    in_channels_last=False, out_channels_last=False, vector_loads=False, stack=1, lead=0,
    segment_tiles=1, wraps=False, rolling=False, watches=False, smaller_part=False, warps=8,
    register_tile_m=64, channel_groups=1, pixels=48, block_rows=16, tile_columns=24, pitch=48,
    plane_padding=0, k_steps=1, stage_taps=9, period_taps=1, flush_taps=1, input_stages=2,
    weight_stages=4, resident=False, loaders=96, unit_vectors=2, batch=3, batches_ahead=1,
    pass_pixels=48, buffers=1, store_vector=4, shared_bytes=153792, packed_at=368640,
    tables_at=552960, table_channels=64, table_columns=32, repairs=False,
)
SM_80_FORWARD_FLOAT_TF32_1 = config(
    SM_80_FORWARD_FLOAT_TF32_0, scaled_fp16=False, batch=5, shared_bytes=153600, packed_at=0,
    repairs=True,
)
TUNED["sm_80", "forward", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/halo/kernel.cuh", "scale", SM_80_FORWARD_FLOAT_TF32_0,
            grid=32, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_80_FORWARD_FLOAT_TF32_0,
            grid=72, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_80_FORWARD_FLOAT_TF32_0,
            grid=share(108), block=384, shared_bytes=153792,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_80_FORWARD_FLOAT_TF32_1,
            grid=90, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_80_FORWARD_FLOAT_TF32_1,
            grid=share(108), block=384, shared_bytes=153600,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=554432,
)

SM_86_FORWARD_FLOAT_TF32_0 = config(
    SM_80_FORWARD_FLOAT_TF32_0, warps=4, pixels=64, tile_columns=16, pitch=40, stage_taps=5,
    weight_stages=3, batch=5, pass_pixels=64, buffers=2, shared_bytes=100544,
)
SM_86_FORWARD_FLOAT_TF32_1 = config(
    SM_86_FORWARD_FLOAT_TF32_0, scaled_fp16=False, batch=9, shared_bytes=100352, packed_at=0,
    repairs=True,
)
TUNED["sm_86", "forward", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/halo/kernel.cuh", "scale", SM_86_FORWARD_FLOAT_TF32_0,
            grid=32, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_86_FORWARD_FLOAT_TF32_0,
            grid=72, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_86_FORWARD_FLOAT_TF32_0,
            grid=share(82), block=256, shared_bytes=100544,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_86_FORWARD_FLOAT_TF32_1,
            grid=90, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_86_FORWARD_FLOAT_TF32_1,
            grid=share(82), block=256, shared_bytes=100352,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=554432,
)

SM_90A_INPUT_GRAD_FLOAT_TF32_0 = config(
    SM_90A_FORWARD_FLOAT_TF32_0, transposed=True, group_in=64, group_out=32, in_height=508,
    in_width=496, out_height=512, out_width=512, padding_top=6, padding_left=20, last_tap_row=4,
    last_tap_column=8, image_height=512, image_width=512, stack=2, pixels=176, block_rows=4,
    tile_columns=176, pitch=200, rolling=False, segment_tiles=1, k_steps=1, input_stages=2,
    weight_stages=6, shared_bytes=232264, packed_at=884736, tables_at=1327104,
    table_channels=32, table_columns=64,
)
SM_90A_INPUT_GRAD_FLOAT_TF32_1 = config(
    SM_90A_INPUT_GRAD_FLOAT_TF32_0, scaled_fp16=False, pixels=256, loaders=96, loader_warps=3,
    piece_vectors=2, threads=384, tile_columns=256, pitch=280, weight_stages=4, pass_pixels=128,
    batch=5, producer_registers=136, shared_bytes=230152, packed_at=0, repairs=True,
)
TUNED["sm_90a", "input_grad", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "hopper/halo/kernel.cuh", "scale", SM_90A_INPUT_GRAD_FLOAT_TF32_0,
            grid=64, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "pack", SM_90A_INPUT_GRAD_FLOAT_TF32_0,
            grid=40, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "convolve", SM_90A_INPUT_GRAD_FLOAT_TF32_0,
            grid=132, block=512, shared_bytes=232264,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "pack", SM_90A_INPUT_GRAD_FLOAT_TF32_1,
            grid=216, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "convolve", SM_90A_INPUT_GRAD_FLOAT_TF32_1,
            grid=132, block=384, shared_bytes=230152,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=1329600,
)

SM_80_INPUT_GRAD_FLOAT_TF32_0 = config(
    SM_80_FORWARD_FLOAT_TF32_0, transposed=True, group_in=64, group_out=32, in_height=508,
    in_width=496, out_height=512, out_width=512, padding_top=6, padding_left=20, last_tap_row=4,
    last_tap_column=8, image_height=512, image_width=512, warps=4, register_tile_m=32,
    pixels=96, block_rows=6, tile_columns=64, pitch=88, loaders=224, batch=2, pass_pixels=32,
    buffers=2, shared_bytes=103872, table_channels=32, table_columns=64,
)
SM_80_INPUT_GRAD_FLOAT_TF32_1 = config(
    SM_80_INPUT_GRAD_FLOAT_TF32_0, scaled_fp16=False, warps=8, tile_columns=128, pitch=152,
    loaders=96, batch=6, buffers=1, shared_bytes=144384, packed_at=0, repairs=True,
)
TUNED["sm_80", "input_grad", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/halo/kernel.cuh", "scale", SM_80_INPUT_GRAD_FLOAT_TF32_0,
            grid=64, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_80_INPUT_GRAD_FLOAT_TF32_0,
            grid=40, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_80_INPUT_GRAD_FLOAT_TF32_0,
            grid=share(108), block=384, shared_bytes=103872,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_80_INPUT_GRAD_FLOAT_TF32_1,
            grid=90, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_80_INPUT_GRAD_FLOAT_TF32_1,
            grid=share(108), block=384, shared_bytes=144384,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=555456,
)

SM_86_INPUT_GRAD_FLOAT_TF32_0 = config(
    SM_80_INPUT_GRAD_FLOAT_TF32_0, weight_stages=3, shared_bytes=94656,
)
SM_86_INPUT_GRAD_FLOAT_TF32_1 = config(
    SM_86_INPUT_GRAD_FLOAT_TF32_0, scaled_fp16=False, batch=4, shared_bytes=94208, packed_at=0,
    repairs=True,
)
TUNED["sm_86", "input_grad", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/halo/kernel.cuh", "scale", SM_86_INPUT_GRAD_FLOAT_TF32_0,
            grid=64, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_86_INPUT_GRAD_FLOAT_TF32_0,
            grid=40, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_86_INPUT_GRAD_FLOAT_TF32_0,
            grid=share(82), block=384, shared_bytes=94656,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_86_INPUT_GRAD_FLOAT_TF32_1,
            grid=90, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_86_INPUT_GRAD_FLOAT_TF32_1,
            grid=share(82), block=384, shared_bytes=94208,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=555456,
)

SM_90A_WEIGHT_GRAD_FLOAT_TF32_0 = config(
    Scalar="float", bias=False, groups=1, group_in=32, group_out=64, in_height=512,
    in_width=512, out_height=508, out_width=496, kernel_height=5, kernel_width=9,
    stride_height=1, stride_width=1, dilation_height=2, dilation_width=3, padding_top=2,
    padding_left=4, weight_stride_out=1440, weight_stride_in=45, weight_stride_height=9,
    weight_stride_width=1, in_channels_last=False, grad_channels_last=False, parts=1,
    scaled_fp16=True, repairs=False, ties_to_even=True, slots_at=560, vector_input=True,
    grad_vector=4, grad_bulk=True, grad_boxes=True, plane_classes=1, lead=0, channel_groups=1,
    kernel_rows=5, mma_taps=9, mma_octets=1, segments=5, interleaved_images=8,
    interleaved_strips=1, steps=254, stage_columns=16, strip_stages=4, strip_weight=990,
    last_strip_weight=754, input_stages=7, grad_stages=2, flush_steps=16, batch=1,
    producer_registers=56, consumer_registers=224, shared_bytes=226464,
)
SM_90A_WEIGHT_GRAD_FLOAT_TF32_1 = config(
    SM_90A_WEIGHT_GRAD_FLOAT_TF32_0, scaled_fp16=False, repairs=True, interleaved_images=4,
    strip_stages=5, strip_weight=1102, last_strip_weight=249, input_stages=6, grad_stages=4,
    flush_steps=12, shared_bytes=226496,
)
TUNED["sm_90a", "weight_grad", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "scale", SM_90A_WEIGHT_GRAD_FLOAT_TF32_0,
            grid=96, block=1024, shared_bytes=128,
            arguments=("grad_output", "input", "scratch", 8),
        ),
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "weight_grad", SM_90A_WEIGHT_GRAD_FLOAT_TF32_0,
            grid=132, block=384, shared_bytes=226464,
            arguments=(
                TensorMap(
                    tensor="grad_output", scalar="float", sizes=(496, 4, 64, 2, 508),
                    strides=(129007616, 1007872, 64503808, 1984), box=(16, 4, 64, 2, 1),
                    element_strides=(1, 1, 1, 1, 1), swizzle=64, promotion=128,
                ),
                "input",
                "scratch",
                0,
                2,
                66,
                8,
            ),
        ),
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "reduce", SM_90A_WEIGHT_GRAD_FLOAT_TF32_0,
            grid=90, block=256, shared_bytes=0,
            arguments=("scratch", "output", "bias_grad", 0, 2, 66),
        ),
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "weight_grad", SM_90A_WEIGHT_GRAD_FLOAT_TF32_1,
            grid=132, block=384, shared_bytes=226496,
            arguments=(
                TensorMap(
                    tensor="grad_output", scalar="float", sizes=(496, 8, 64, 1, 508),
                    strides=(64503808, 1007872, 64503808, 1984), box=(16, 4, 64, 1, 1),
                    element_strides=(1, 1, 1, 1, 1), swizzle=64, promotion=128,
                ),
                "input",
                "scratch",
                0,
                2,
                66,
                8,
            ),
        ),
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "reduce", SM_90A_WEIGHT_GRAD_FLOAT_TF32_1,
            grid=90, block=256, shared_bytes=0,
            arguments=("scratch", "output", "bias_grad", 0, 2, 66),
        ),
    ),
    scratch_bytes=24339200,
)

SM_80_WEIGHT_GRAD_FLOAT_TF32_0 = config(
    Scalar="float", bias=False, groups=1, group_in=32, group_out=64, in_height=512,
    in_width=512, out_height=508, out_width=496, kernel_height=5, kernel_width=9,
    stride_height=1, stride_width=1, dilation_height=2, dilation_width=3, padding_top=2,
    padding_left=4, weight_stride_out=1440, weight_stride_in=45, weight_stride_height=9,
    weight_stride_width=1, in_channels_last=False, grad_channels_last=False, parts=1,
    row_tiles=2, units=15, warps_out=2, warps_units=4, warps_pixels=1, tile_channels=32,
    tile_rows=5, tile_columns=3, strip_columns=56, step_rows=2, steps=127, slice_mmas=7,
    rolling=True, in_vector=4, in_lanes=16, in_pitch=272, in_batch=1, shift=2, grad_vector=4,
    grad_lanes=16, grad_pitch=464, grad_batch=2, flush_steps=36, shared_bytes=130944,
)
TUNED["sm_80", "weight_grad", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/wgrad_halo/kernel.cuh", "weight_grad", SM_80_WEIGHT_GRAD_FLOAT_TF32_0,
            grid=3 * share(36), block=256, shared_bytes=130944,
            arguments=("grad_output", "input", "scratch", 0, 3, share(36), 8),
        ),
        Launch(
            "ampere/wgrad_halo/kernel.cuh", "reduce", SM_80_WEIGHT_GRAD_FLOAT_TF32_0,
            grid=90, block=256, shared_bytes=0,
            arguments=("scratch", "output", "bias_grad", 0, 3, share(36)),
        ),
    ),
    scratch_bytes=368640 * share(36),
)

SM_86_WEIGHT_GRAD_FLOAT_TF32_0 = config(
    SM_80_WEIGHT_GRAD_FLOAT_TF32_0, step_rows=1, steps=254, grad_pitch=240, flush_steps=73,
    shared_bytes=84864,
)
TUNED["sm_86", "weight_grad", EXPORTED, "float", "tf32"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/wgrad_halo/kernel.cuh", "weight_grad", SM_86_WEIGHT_GRAD_FLOAT_TF32_0,
            grid=3 * share(82), block=256, shared_bytes=84864,
            arguments=("grad_output", "input", "scratch", 0, 3, share(82), 8),
        ),
        Launch(
            "ampere/wgrad_halo/kernel.cuh", "reduce", SM_86_WEIGHT_GRAD_FLOAT_TF32_0,
            grid=90, block=256, shared_bytes=0,
            arguments=("scratch", "output", "bias_grad", 0, 3, share(82)),
        ),
    ),
    scratch_bytes=368640 * share(82),
)

SM_90A_FORWARD_FLOAT_IEEE_0 = config(
    SM_90A_FORWARD_FLOAT_TF32_0, parts=2, staged=False, raw_slots=0, bulk_loads=False,
    pixels=128, loaders=96, loader_warps=3, piece_vectors=2, threads=384, tile_columns=128,
    pitch=152, segment_tiles=64, stage_taps=1, pass_pixels=128, batches_ahead=1,
    producer_registers=88, consumer_registers=208, shared_bytes=227904, packed_at=737280,
    tables_at=1290240,
)
SM_90A_FORWARD_FLOAT_IEEE_1 = config(
    SM_90A_FORWARD_FLOAT_IEEE_0, scaled_fp16=False, rolling=False, segment_tiles=1, k_steps=1,
    stage_taps=5, input_stages=2, weight_stages=2, buffers=2, producer_registers=72,
    consumer_registers=216, shared_bytes=227408, packed_at=0, repairs=True,
)
TUNED["sm_90a", "forward", EXPORTED, "float", "ieee"] = lambda share: Plan(
    launches=(
        Launch(
            "hopper/halo/kernel.cuh", "scale", SM_90A_FORWARD_FLOAT_IEEE_0,
            grid=32, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "pack", SM_90A_FORWARD_FLOAT_IEEE_0,
            grid=72, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "convolve", SM_90A_FORWARD_FLOAT_IEEE_0,
            grid=128, block=384, shared_bytes=227904,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "pack", SM_90A_FORWARD_FLOAT_IEEE_1,
            grid=180, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "convolve", SM_90A_FORWARD_FLOAT_IEEE_1,
            grid=132, block=384, shared_bytes=227408,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=1291712,
)

SM_80_FORWARD_FLOAT_IEEE_0 = config(
    SM_80_FORWARD_FLOAT_TF32_0, parts=2, register_tile_m=32, channel_groups=2, pixels=32,
    block_rows=8, tile_columns=16, pitch=40, period_taps=3, flush_taps=3, weight_stages=2,
    pass_pixels=32, shared_bytes=145600, packed_at=737280, tables_at=1105920,
)
SM_80_FORWARD_FLOAT_IEEE_1 = config(
    SM_80_FORWARD_FLOAT_IEEE_0, scaled_fp16=False, warps=4, channel_groups=1, weight_stages=4,
    batch=5, buffers=2, shared_bytes=145408, packed_at=0, repairs=True,
)
TUNED["sm_80", "forward", EXPORTED, "float", "ieee"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/halo/kernel.cuh", "scale", SM_80_FORWARD_FLOAT_IEEE_0,
            grid=32, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_80_FORWARD_FLOAT_IEEE_0,
            grid=72, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_80_FORWARD_FLOAT_IEEE_0,
            grid=share(108), block=384, shared_bytes=145600,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_80_FORWARD_FLOAT_IEEE_1,
            grid=180, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_80_FORWARD_FLOAT_IEEE_1,
            grid=share(108), block=256, shared_bytes=145408,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=1107392,
)

SM_86_FORWARD_FLOAT_IEEE_0 = config(
    SM_80_FORWARD_FLOAT_IEEE_0, stage_taps=3, shared_bytes=96448,
)
SM_86_FORWARD_FLOAT_IEEE_1 = config(
    SM_80_FORWARD_FLOAT_IEEE_1, warps=8, register_tile_m=16, channel_groups=4, pixels=48,
    block_rows=6, stage_taps=3, weight_stages=2, pass_pixels=48, buffers=1, shared_bytes=94208,
)
TUNED["sm_86", "forward", EXPORTED, "float", "ieee"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/halo/kernel.cuh", "scale", SM_86_FORWARD_FLOAT_IEEE_0,
            grid=32, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_86_FORWARD_FLOAT_IEEE_0,
            grid=72, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_86_FORWARD_FLOAT_IEEE_0,
            grid=share(82), block=384, shared_bytes=96448,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_86_FORWARD_FLOAT_IEEE_1,
            grid=180, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_86_FORWARD_FLOAT_IEEE_1,
            grid=share(82), block=384, shared_bytes=94208,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=1107392,
)

SM_90A_INPUT_GRAD_FLOAT_IEEE_0 = config(
    SM_90A_INPUT_GRAD_FLOAT_TF32_1, parts=2, scaled_fp16=True, box_loads=True, pixels=104,
    tile_columns=104, pitch=128, weight_stages=3, pass_pixels=64, batch=2, batches_ahead=1,
    producer_registers=88, consumer_registers=208, shared_bytes=230392, packed_at=1769472,
    tables_at=3096576, repairs=False,
)
SM_90A_INPUT_GRAD_FLOAT_IEEE_1 = config(
    SM_90A_INPUT_GRAD_FLOAT_IEEE_0, scaled_fp16=False, compensated=True, staged=False,
    raw_slots=0, bulk_loads=False, box_loads=False, watches=True, stage_taps=6, weight_stages=2,
    pass_pixels=112, batch=1, producer_registers=72, consumer_registers=216,
    shared_bytes=211032, packed_at=0, repairs=True,
)
TUNED["sm_90a", "input_grad", EXPORTED, "float", "ieee"] = lambda share: Plan(
    launches=(
        Launch(
            "hopper/halo/kernel.cuh", "scale", SM_90A_INPUT_GRAD_FLOAT_IEEE_0,
            grid=64, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "pack", SM_90A_INPUT_GRAD_FLOAT_IEEE_0,
            grid=40, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "convolve", SM_90A_INPUT_GRAD_FLOAT_IEEE_0,
            grid=132, block=384, shared_bytes=230392,
            arguments=(
                TensorMap(
                    tensor="input", scalar="float", sizes=(251968, 64, 8), strides=(1007872,
                    64503808), box=(132, 16, 1), element_strides=(1, 1, 1), swizzle=0,
                    promotion=0,
                ),
                "scratch",
                "bias",
                "output",
                8,
            ),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "pack", SM_90A_INPUT_GRAD_FLOAT_IEEE_1,
            grid=432, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "hopper/halo/kernel.cuh", "convolve", SM_90A_INPUT_GRAD_FLOAT_IEEE_1,
            grid=132, block=384, shared_bytes=211032,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=3099072,
)

SM_80_INPUT_GRAD_FLOAT_IEEE_0 = config(
    SM_86_INPUT_GRAD_FLOAT_TF32_0, parts=2, warps=8, pixels=32, block_rows=4, period_taps=3,
    flush_taps=3, loaders=96, batch=3, buffers=1, shared_bytes=155840, packed_at=737280,
    tables_at=1105920,
)
SM_80_INPUT_GRAD_FLOAT_IEEE_1 = config(
    SM_80_INPUT_GRAD_FLOAT_TF32_1, parts=2, compensated=True, register_tile_m=16,
    channel_groups=2, pixels=48, tile_columns=32, pitch=56, stage_taps=5, period_taps=5,
    flush_taps=5, pass_pixels=48, shared_bytes=131072, tables_at=1105920,
)
TUNED["sm_80", "input_grad", EXPORTED, "float", "ieee"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/halo/kernel.cuh", "scale", SM_80_INPUT_GRAD_FLOAT_IEEE_0,
            grid=64, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_80_INPUT_GRAD_FLOAT_IEEE_0,
            grid=40, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_80_INPUT_GRAD_FLOAT_IEEE_0,
            grid=share(108), block=384, shared_bytes=155840,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_80_INPUT_GRAD_FLOAT_IEEE_1,
            grid=180, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_80_INPUT_GRAD_FLOAT_IEEE_1,
            grid=share(108), block=384, shared_bytes=131072,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=1108416,
)

SM_86_INPUT_GRAD_FLOAT_IEEE_0 = config(
    SM_80_INPUT_GRAD_FLOAT_IEEE_0, warps=4, tile_columns=32, pitch=56, stage_taps=3,
    weight_stages=4, loaders=224, batch=2, buffers=2, shared_bytes=92608,
)
SM_86_INPUT_GRAD_FLOAT_IEEE_1 = config(
    SM_80_INPUT_GRAD_FLOAT_IEEE_1, register_tile_m=32, channel_groups=1, pixels=16,
    block_rows=4, weight_stages=3, batch=5, pass_pixels=16, shared_bytes=98304,
)
TUNED["sm_86", "input_grad", EXPORTED, "float", "ieee"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/halo/kernel.cuh", "scale", SM_86_INPUT_GRAD_FLOAT_IEEE_0,
            grid=64, block=1024, shared_bytes=128,
            arguments=("weight", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_86_INPUT_GRAD_FLOAT_IEEE_0,
            grid=40, block=256, shared_bytes=32,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_86_INPUT_GRAD_FLOAT_IEEE_0,
            grid=share(82), block=384, shared_bytes=92608,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "pack", SM_86_INPUT_GRAD_FLOAT_IEEE_1,
            grid=180, block=256, shared_bytes=0,
            arguments=("weight", "input", "scratch", 8),
        ),
        Launch(
            "ampere/halo/kernel.cuh", "convolve", SM_86_INPUT_GRAD_FLOAT_IEEE_1,
            grid=share(82), block=384, shared_bytes=98304,
            arguments=("input", "scratch", "bias", "output", 8),
        ),
    ),
    scratch_bytes=1108416,
)

SM_90A_WEIGHT_GRAD_FLOAT_IEEE_0 = config(
    SM_90A_WEIGHT_GRAD_FLOAT_TF32_0, parts=2, kernel_rows=2, segments=2, strip_stages=5,
    strip_weight=1467, last_strip_weight=366, input_stages=3, flush_steps=6,
    producer_registers=72, consumer_registers=216, shared_bytes=228448,
)
SM_90A_WEIGHT_GRAD_FLOAT_IEEE_1 = config(
    SM_90A_WEIGHT_GRAD_FLOAT_TF32_1, parts=2, segments=2, strip_stages=2, strip_weight=556,
    last_strip_weight=300, grad_stages=3, flush_steps=16, producer_registers=72,
    consumer_registers=216, shared_bytes=222376,
)
TUNED["sm_90a", "weight_grad", EXPORTED, "float", "ieee"] = lambda share: Plan(
    launches=(
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "scale", SM_90A_WEIGHT_GRAD_FLOAT_IEEE_0,
            grid=96, block=1024, shared_bytes=128,
            arguments=("grad_output", "input", "scratch", 8),
        ),
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "weight_grad", SM_90A_WEIGHT_GRAD_FLOAT_IEEE_0,
            grid=132, block=384, shared_bytes=228448,
            arguments=(
                TensorMap(
                    tensor="grad_output", scalar="float", sizes=(496, 4, 64, 2, 508),
                    strides=(129007616, 1007872, 64503808, 1984), box=(16, 4, 64, 2, 1),
                    element_strides=(1, 1, 1, 1, 1), swizzle=64, promotion=128,
                ),
                "input",
                "scratch",
                0,
                6,
                22,
                8,
            ),
        ),
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "reduce", SM_90A_WEIGHT_GRAD_FLOAT_IEEE_0,
            grid=108, block=256, shared_bytes=0,
            arguments=("scratch", "output", "bias_grad", 0, 6, 22),
        ),
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "weight_grad", SM_90A_WEIGHT_GRAD_FLOAT_IEEE_1,
            grid=130, block=384, shared_bytes=222376,
            arguments=(
                TensorMap(
                    tensor="grad_output", scalar="float", sizes=(496, 8, 64, 1, 508),
                    strides=(64503808, 1007872, 64503808, 1984), box=(16, 4, 64, 1, 1),
                    element_strides=(1, 1, 1, 1, 1), swizzle=64, promotion=128,
                ),
                "input",
                "scratch",
                0,
                5,
                26,
                8,
            ),
        ),
        Launch(
            "hopper/wgrad_halo/kernel.cuh", "reduce", SM_90A_WEIGHT_GRAD_FLOAT_IEEE_1,
            grid=90, block=256, shared_bytes=0,
            arguments=("scratch", "output", "bias_grad", 0, 5, 26),
        ),
    ),
    scratch_bytes=9741056,
)

SM_80_WEIGHT_GRAD_FLOAT_IEEE_0 = config(
    SM_80_WEIGHT_GRAD_FLOAT_TF32_0, parts=2, row_tiles=4, units=4, warps_out=1, warps_units=8,
    tile_channels=16, flush_steps=32, shared_bytes=154624,
)
TUNED["sm_80", "weight_grad", EXPORTED, "float", "ieee"] = lambda share: Plan(
    launches=(
        Launch(
            "ampere/wgrad_halo/kernel.cuh", "weight_grad", SM_80_WEIGHT_GRAD_FLOAT_IEEE_0,
            grid=6 * share(18), block=256, shared_bytes=154624,
            arguments=("grad_output", "input", "scratch", 0, 6, share(18), 8),
        ),
        Launch(
            "ampere/wgrad_halo/kernel.cuh", "reduce", SM_80_WEIGHT_GRAD_FLOAT_IEEE_0,
            grid=96, block=256, shared_bytes=0,
            arguments=("scratch", "output", "bias_grad", 0, 6, share(18)),
        ),
    ),
    scratch_bytes=393216 * share(18),
)


# === Compiling, launching and autograd ============================================================

# The name in device code and the bytes of each type.
SCALARS = {
    torch.float32: ("float", 4),
    torch.float16: ("fastconv::float16", 2),
    torch.bfloat16: ("fastconv::bfloat16", 2),
}

# The CUDA driver's numbers for the parts of tensor maps. For swizzles and L2 promotions, in bytes,
# these are the positions in the lists.
MAPPED_TYPES = {
    "fastconv::float16": 6,
    "float": 7,
    "double": 8,
    "fastconv::bfloat16": 9,
    "tf32": 11,
}
SWIZZLES = (0, 32, 64, 128)
PROMOTIONS = (0, 64, 128, 256)

# The preprocessor condition under which each family's kernels are compiled. Some versions of
# PyTorch also compile for architectures that lack the kernels' instructions.
CONDITIONS = {
    "hopper": "defined(__CUDA_ARCH_FEAT_SM90_ALL)",
    "ampere": "__CUDA_ARCH__ >= 800",
    "depthwise": "__CUDA_ARCH__ >= 800",
}

Kernel = tuple[str, Constants, str]  # source, constants, entry


# --- Compiling -----------------------------------------------------------------------------------


def with_headers(source: str, seen: set[str]) -> str:
    """A device source with the headers that it includes in their places, each once."""
    lines = []
    for line in SOURCES[source].splitlines():
        include = re.match(r'#include "(.*)"', line)
        if include is None:
            lines.append(line)
        elif include[1] not in seen:
            seen.add(include[1])
            lines.append(with_headers(include[1], seen))
    return "\n".join(lines)


def member(name: str, value: Constant) -> str:
    """A constant as a member of the struct ``Config``, from which device code reads it."""
    if isinstance(value, bool):
        return f"  static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"  static constexpr int {name} = {value};"
    return f"  using {name} = {value};"


def device_code(kernels: tuple[Kernel, ...]) -> str:
    """The device code of the kernels: each source and set of constants in its own namespace."""
    code = []
    for number, (source, constants) in enumerate(configurations(kernels)):
        seen = {"device/scalar.cuh"}
        types = with_headers("device/scalar.cuh", seen)
        members = "\n".join(member(name, value) for name, value in constants)
        text = with_headers(source, seen)
        condition = CONDITIONS.get(source.split("/")[0])
        if condition is not None:
            text = f"#if !defined(__CUDA_ARCH__) || {condition}\n{text}\n#endif"
        space = (
            f"namespace kernels_{number} {{\n{types}\n"
            f"struct Config {{\n{members}\n}};\n{text}\n}}  // namespace kernels_{number}\n"
        )
        for name in ("slabs", "most_registers", "beside"):  # not only constants
            if name in dict(constants):
                macro = f"FASTCONV_{name.upper()}"
                space = f"#define {macro}\n{space}#undef {macro}\n"
        code.append(space)
    return "\n".join(code)


def host_code(kernels: tuple[Kernel, ...]) -> str:
    """The function that launches the kernel of a given number."""
    spaces = configurations(kernels)
    cases = [
        f'    case {number}: return start("{entry}", '
        f"kernels_{spaces.index((source, constants))}::{entry}, sizes, arguments, stream);"
        for number, (source, constants, entry) in enumerate(kernels)
    ]
    return "\n".join((
        "#ifndef __CUDA_ARCH__  // device code may lack kernels of other architectures",
        LAUNCHER,
        "void launch(int kernel, const Numbers& sizes, const Arguments& arguments, int64_t stream)",
        "{",
        "  switch (kernel) {",
        *cases,
        "  }",
        '  throw std::invalid_argument("no kernel " + std::to_string(kernel));',
        "}",
        "#endif",
    ))  # fmt: skip


def configurations(kernels: tuple[Kernel, ...]) -> list[tuple[str, Constants]]:
    """The distinct pairs of a source and constants; several kernels may share a pair."""
    return list(dict.fromkeys((source, constants) for source, constants, _ in kernels))


@functools.cache
def build(kernels: tuple[Kernel, ...], architecture: str) -> Any:
    """The module that launches the kernels, compiled unless PyTorch has cached it."""
    check_compiler()
    code = device_code(kernels) + "\n" + host_code(kernels)
    number = architecture[len("sm_") :]
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    options = {}
    if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
        options["no_implicit_headers"] = True  # PyTorch's headers take ten times as long to compile
    digest = hashlib.sha256(repr((code, BINDINGS, flags, torch.__version__)).encode()).hexdigest()
    return cpp_extension.load_inline(
        name=f"convolution_{digest[:16]}",
        cpp_sources=[BINDINGS],
        cuda_sources=[code],
        extra_cuda_cflags=flags,
        with_cuda=True,
        **options,
    )


def check_compiler() -> None:
    """Raises an error if nvcc is missing."""
    home = cpp_extension.CUDA_HOME
    if home is None or shutil.which("nvcc", path=os.path.join(home, "bin")) is None:
        raise RuntimeError(
            "nvcc is needed to compile this convolution's kernels, but none was found"
            + ("" if home is None else f" in {home}/bin")
            + f": install the CUDA toolkit, version {torch.version.cuda}, and set the environment "
            "variable CUDA_HOME to its folder"
        )


# --- Planning and launching ----------------------------------------------------------------------


class BuiltPlans(NamedTuple):
    """The plans of some passes, and the module that launches their kernels by number."""

    plans: dict[str, Plan]
    module: Any
    kernels: tuple[Kernel, ...]


@functools.lru_cache(maxsize=4096)
def plan_and_build(
    passes: tuple[str, ...], geometry: Geometry, operands: Operands, precision: str, device: int
) -> BuiltPlans:
    """Plans some passes, and compiles their kernels together, once."""
    architecture = gpu_architecture(device)
    made_for = target(architecture, shared_bytes(device))
    plans = {
        which: plan_of(which, geometry, operands, precision, made_for, sm_count(device))
        for which in passes
    }
    launches = (launch for plan in plans.values() for launch in plan.launches)
    kernels = tuple(dict.fromkeys(kernel_of(launch) for launch in launches))
    return BuiltPlans(plans, build(kernels, architecture), kernels)


def plan_of(
    which: str,
    geometry: Geometry,
    operands: Operands,
    precision: str,
    made_for: str,
    sms: int,
) -> Plan:
    """The tuned plan if there is one for these operands, else the portable kernels'."""
    tuned = TUNED.get((made_for, which, geometry, operands.scalar, precision))
    if tuned is None or not operands.aligned or operands.channels_last:
        return portable_plan(which, geometry, operands, sms)
    # Grids whose size is free are scaled from the SMs of the plan's GPU to those of this one.
    return tuned(lambda blocks: max(blocks * sms // TARGETS[made_for].sms, 1))


def target(architecture: str, shared_bytes: int) -> str:
    """The GPU of TARGETS whose plans run on this one; "" if there is none."""
    if architecture == "sm_90a":
        return architecture
    if int(architecture[len("sm_") :]) < 80:
        return ""
    fitting = (gpu for gpu in ("sm_80", "sm_86") if TARGETS[gpu].shared_bytes <= shared_bytes)
    return next(fitting, "")


def kernel_of(launch: Launch) -> Kernel:
    return launch.source, launch.constants, launch.entry


def gpu_architecture(device: int) -> str:
    """The architecture to compile for, for example "sm_80" or "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, but "
            "this convolution's kernels need 7.0 or newer"
        )
    # Hopper's wgmma needs sm_90a, which nvcc supports since CUDA 12.
    tensor_cores = (major, minor) == (9, 0) and int(str(torch.version.cuda).split(".")[0]) >= 12
    return f"sm_{major}{minor}{'a' if tensor_cores else ''}"


def sm_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_bytes(device: int) -> int:
    """The most shared memory that a block may use."""
    properties = torch.cuda.get_device_properties(device)
    alike = "sm_80" if (properties.major, properties.minor) in ((8, 0), (8, 7), (9, 0)) else "sm_86"
    # PyTorch has this property since 2.7. Older versions support no other GPU with as much
    # shared memory as sm_80.
    return getattr(properties, "shared_memory_per_block_optin", TARGETS[alike].shared_bytes)


def run(built: BuiltPlans, which: str, tensors: dict[str, Tensor]) -> None:
    """Launches an operation on the current stream of the tensors' device, and does not wait."""
    plan, device = built.plans[which], tensors["output"].device
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    addresses["scratch"] = scratch.data_ptr()
    addresses.update((name, scratch.data_ptr() + at) for name, at in plan.regions.items())
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        for launch in plan.launches:
            built.module.launch(
                built.kernels.index(kernel_of(launch)),
                [launch.grid, launch.block, launch.shared_bytes, int(launch.early)],
                [as_numbers(argument, addresses) for argument in launch.arguments],
                stream,
            )


def as_numbers(argument: Argument, addresses: dict[str, int]) -> list[int]:
    """An argument as the launcher takes it; an absent tensor has address 0."""
    if isinstance(argument, int):
        return [argument]
    if isinstance(argument, str):
        return [addresses.get(argument, 0)]
    return [addresses.get(argument.tensor, 0), *map_numbers(argument)]


def map_numbers(of: TensorMap | Im2colMap) -> list[int]:
    """A tensor map's fields, in the order in which the launcher reads them."""
    tiled = isinstance(of, TensorMap)
    box = of.box if isinstance(of, TensorMap) else (*of.lower, *of.upper, of.channels, of.pixels)
    modes = (SWIZZLES.index(of.swizzle), PROMOTIONS.index(of.promotion))
    layout = (*of.sizes, *of.strides, *of.element_strides)
    return [int(tiled), MAPPED_TYPES[of.scalar], *modes, len(of.sizes), *layout, *box]


# What the file was exported with, "tf32" or "ieee"; None: PyTorch's setting decides.
PRECISION: str | None = None


def float32_precision() -> str:
    """The arithmetic of float32, "tf32" or "ieee": the file's, or PyTorch's setting."""
    if PRECISION is not None:
        return PRECISION
    conv = getattr(torch.backends.cudnn, "conv", None)  # since PyTorch 2.9
    if conv is not None:
        return "tf32" if conv.fp32_precision == "tf32" else "ieee"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


# --- The convolution -----------------------------------------------------------------------------


class Convolution(torch.autograd.Function):
    """The convolution and its gradients, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.format = joint_format(input, weight)
        ctx.geometry = geometry
        input, weight = input.contiguous(memory_format=ctx.format), weight.contiguous()
        ctx.save_for_backward(input, weight)
        output = torch.empty(
            geometry.output, dtype=input.dtype, device=input.device, memory_format=ctx.format
        )
        tensors = {"input": input, "weight": weight, "output": output}
        if bias is not None:
            tensors["bias"] = bias.contiguous()
        compute(ctx, {"forward": tensors})
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous(memory_format=ctx.format)
        passes, outputs = {}, {}
        if ctx.needs_input_grad[0]:
            outputs["input_grad"] = torch.empty_like(input, memory_format=ctx.format)
            passes["input_grad"] = {"input": grad_output, "weight": weight}
        if ctx.needs_input_grad[1]:
            outputs["weight_grad"] = torch.empty_like(weight)
            passes["weight_grad"] = {"grad_output": grad_output, "input": input}
        if ctx.needs_input_grad[2]:
            outputs["bias_grad"] = weight.new_empty(weight.shape[0])
            passes["bias_grad"] = {"grad_output": grad_output}
        for which, output in outputs.items():
            passes[which]["output"] = output
        compute(ctx, passes)
        wanted = ("input_grad", "weight_grad", "bias_grad")
        return (*(outputs.get(which) for which in wanted), None)


def joint_format(*tensors: Tensor) -> torch.memory_format:
    """Channels-last if one of the tensors is, which are of images or of volumes."""
    last = channels_last(tensors[0].dim())
    return last if any(map(is_channels_last, tensors)) else torch.contiguous_format


def is_channels_last(tensor: Tensor) -> bool:
    last = channels_last(tensor.dim())
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)


def channels_last(rank: int) -> torch.memory_format:
    """PyTorch's name of the format for tensors of this rank."""
    return torch.channels_last if rank == 4 else torch.channels_last_3d


def compute(ctx: Any, passes: dict[str, dict[str, Tensor]]) -> None:
    """Computes some passes, each on its tensors by name; their kernels are compiled together."""
    if ctx.geometry.input[0] == 0:
        for tensors in passes.values():  # an empty batch: all sums are empty
            tensors["output"].zero_()
        return
    everything = [tensor for tensors in passes.values() for tensor in tensors.values()]
    if not everything:
        return
    dtype, device = everything[0].dtype, everything[0].device
    operands = Operands(
        *SCALARS[dtype],
        channels_last=ctx.format != torch.contiguous_format,
        aligned=all(tensor.data_ptr() % 16 == 0 for tensor in everything),
    )
    precision = float32_precision() if dtype == torch.float32 else "ieee"
    built = plan_and_build(tuple(passes), ctx.geometry, operands, precision, device.index)
    for which, tensors in passes.items():
        run(built, which, tensors)


class Conv2d(nn.Module):
    """A 2-D convolution with the arguments, parameters and initial values of ``nn.Conv2d``."""

    axes = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        least = min(in_channels, out_channels, groups)
        if least < 1 or in_channels % groups != 0 or out_channels % groups != 0:
            raise ValueError(
                "channels and groups should be at least 1, and groups divide channels, but got "
                f"in_channels={in_channels}, out_channels={out_channels}, groups={groups}"
            )
        if padding_mode != "zeros":
            raise ValueError(f"padding_mode should be 'zeros', but got {padding_mode!r}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = self.each("kernel_size", kernel_size, least=1)
        self.stride = self.each("stride", stride, least=1)
        self.padding = self.each("padding", padding, least=0)
        self.dilation = self.each("dilation", dilation, least=1)
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def each(self, name: str, value: int | tuple[int, ...], least: int) -> tuple[int, ...]:
        """One int for each axis, from a single int or as many."""
        values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * self.axes
        if len(values) != self.axes or not all(isinstance(v, int) and v >= least for v in values):
            raise ValueError(
                f"{name} should be an int, or {('two', 'three')[self.axes - 2]}, of at least "
                f"{least}, but got {value!r}"
            )
        return values

    def reset_parameters(self) -> None:
        """Draws the parameters as PyTorch does: the same values from the same seed."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(self.weight.shape[1:]))
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        geometry = Geometry(
            tuple(x.shape),
            tuple(self.weight.shape),
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )
        if min(geometry.output[2:]) < 1:
            raise ValueError(
                f"the kernel is larger than the padded input: input of shape {geometry.input}, "
                f"kernel_size={self.kernel_size}, padding={self.padding}, "
                f"dilation={self.dilation}"
            )
        return Convolution.apply(x, self.weight, self.bias, geometry)

    def check(self, x: Tensor) -> None:
        """Raises an error if the input cannot be convolved."""
        if x.dim() != 2 + self.axes or x.shape[1] != self.in_channels or 0 in x.shape[2:]:
            sizes = ", ".join(("depth", "height", "width")[-self.axes :])
            raise ValueError(
                f"expected input of shape (batch, {self.in_channels}, {sizes}), but got "
                f"{tuple(x.shape)}"
            )
        if x.dtype not in SCALARS:
            names = ", ".join(str(dtype) for dtype in SCALARS)
            raise TypeError(f"expected input of dtype {names}, but got {x.dtype}")
        if x.dtype != self.weight.dtype:
            raise TypeError(
                f"input and weight should have the same dtype, but got {x.dtype} and "
                f"{self.weight.dtype}"
            )
        check_device(x, self.weight)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, bias={self.bias is not None}"
        )


def missing_gpu() -> str | None:
    """Why there is no GPU to compute on; None if there is one."""
    if torch.version.cuda is None:
        return (
            "this convolution's kernels need an NVIDIA GPU and PyTorch for CUDA, but PyTorch "
            f"{torch.__version__} is built without it"
        )
    if not torch.cuda.is_available():
        return "this convolution's kernels need an NVIDIA GPU, but PyTorch finds none here"
    return None


def check_device(x: Tensor, weight: Tensor) -> None:
    """Raises an error unless both tensors are on the same GPU."""
    missing = missing_gpu()
    if missing is not None:
        raise RuntimeError(missing)
    if not x.is_cuda or x.device != weight.device:
        raise ValueError(
            "input and weight should be on the same CUDA device, but are on "
            f"{x.device} and {weight.device}: move them there with .cuda()"
        )


# === The model ====================================================================================


class ModelNew(nn.Module):
    """A model of one convolution, by default the one that this file is tuned for."""

    def __init__(
        self,
        in_channels=32,
        out_channels=64,
        kernel_size=(5, 9),
        stride=1,
        padding=(2, 4),
        dilation=(2, 3),
        groups=1,
        bias=False,
    ):
        super().__init__()
        self.conv2d = Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias
        )

    def forward(self, x):
        return self.conv2d(x)


# === Self-check: the only part that uses PyTorch's convolution ====================================

# The largest error relative to the norm, by precision. TF32 has a mantissa of 10 bits.
TOLERANCE = {"ieee": 1e-5, "tf32": 1e-3}


def pytorch_twin(module: nn.Module) -> nn.Module:
    """A copy of the module with PyTorch's convolutions and the same parameters."""
    if isinstance(module, Conv2d):
        names = ("kernel_size", "stride", "padding", "dilation")
        sizes = {name: getattr(module, name) for name in names}
        layer = nn.Conv2d(
            module.in_channels, module.out_channels, groups=module.groups,
            bias=module.bias is not None, **sizes,
        )  # fmt: skip
        layer.load_state_dict(module.state_dict())
        return layer.to(module.weight)
    twin = copy.deepcopy(module)
    for name, child in module.named_children():
        setattr(twin, name, pytorch_twin(child))
    return twin


def results(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    model.zero_grad()
    y = model(*inputs)
    y.backward(torch.linspace(-1, 1, y.shape[-1], device=y.device).expand(y.shape))
    found = {"output": y.detach()}
    found.update((f"gradient of input {i}", x.grad) for i, x in enumerate(inputs))
    found.update((f"gradient of {name}", p.grad) for name, p in model.named_parameters())
    return found


def milliseconds(step: Callable[[], object], repeats: int = 10) -> float:
    """The median time of a step on the GPU, after three warm-up steps."""
    times = []
    for _ in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def self_check(model: nn.Module, *shapes: tuple[int, ...]) -> None:
    """Prints a model's errors and speed-up on inputs of these shapes, in both precisions.

    Raises an AssertionError if it differs from PyTorch by more than rounding errors. Exits with a
    message if there is no GPU.
    """
    missing = missing_gpu()
    if missing is not None:
        raise SystemExit(missing)
    model = model.cuda()
    twin = pytorch_twin(model)
    inputs = [torch.randn(shape, device="cuda") for shape in shapes]
    torch.backends.cudnn.benchmark = True  # let cuDNN choose its fastest algorithm
    for precision, tolerance in TOLERANCE.items():
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        tolerance = max(tolerance, TOLERANCE[PRECISION or precision])
        ours, theirs = results(model, inputs), results(twin, inputs)
        for name, expected in theirs.items():
            error = (torch.norm(ours[name] - expected) / torch.norm(expected)).item()
            print(f"{precision}  {name} differs by {error:.1e} of its norm")
            assert error < tolerance, f"{name} differs by {error:.1e}, more than {tolerance}"
        del ours, theirs
        with torch.no_grad():
            report(precision, "forward", model, twin, lambda m: m(*inputs))
        report(precision, "forward and backward", model, twin, lambda m: results(m, inputs))


def report(
    precision: str,
    what: str,
    model: nn.Module,
    twin: nn.Module,
    step: Callable[[nn.Module], object],
) -> None:
    """Prints the time that a step takes with the model and with PyTorch."""
    ours, theirs = (milliseconds(functools.partial(step, m)) for m in (model, twin))
    speed_up = theirs / ours
    print(f"{precision}  {what}: {ours:.2f} ms, PyTorch {theirs:.2f} ms, speed-up {speed_up:.2f}")


if __name__ == "__main__":
    self_check(ModelNew(), (8, 32, 512, 512))
