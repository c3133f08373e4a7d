// Forward convolution and input gradient of narrow groups with fused multiply-adds, on
// channels-last (NHWC) tensors, where neighbouring threads compute neighbouring channels.
//
// A block computes a tile of output pixels of `slots` images for some channels: whole groups, or a
// part of one. It loads the halo tile of the input and the weights to shared memory. A thread
// computes `lane_channels` channels of `rows` x `columns` pixels, neighbours in a row; the lanes of
// a warp read neighbouring words. It loads one row of its window at a time, which serves every
// output row that has a tap there.
//
//   input    [slot][halo row][halo column][channel]     weights   [channel][tap row][tap][output]
//
// A separate kernel, `pack`, brings all weights into that layout first. Of volumes, a block walks
// along the depth with a ring of the input's planes, and weights are [channel][tap plane][tap
// row][tap][output].
#pragma once
#include "depthwise/fma/kernel.cuh"
#include "depthwise/pixel_tiles.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kPatches = C::lanes_y * C::lanes_x;
constexpr int kThreads = round_up(C::slots * kPatches * C::lanes_c, 32);
constexpr int kPlaneTaps = C::kernel_height * C::kernel_width;
constexpr int kTaps = D::kernel * kPlaneTaps;
constexpr int kRing = kReadPlanes + (kWalk > 1 ? kNextPlanes : 0);  // 1 of images
constexpr int kRingBytes = kRing * kInputBytes;
static_assert(kRingBytes + C::group_in * kTaps * kOutputs * static_cast<int>(sizeof(Scalar)) ==
                  C::shared_bytes,
              "as planned");

// The tile of a block.
struct Tile {
  int y, x;  // first output
  int walk;  // of volumes
  int first_image;
  ChannelTile channels;

  __device__ explicit Tile(unsigned block) : channels(static_cast<int>(block % kChannelTiles)) {
    block /= kChannelTiles;
    x = static_cast<int>(block % kTilesX) * kTileColumns;
    block /= kTilesX;
    y = static_cast<int>(block % kTilesY) * kTileRows;
    block /= kTilesY;
    walk = static_cast<int>(block % kWalks);
    first_image = static_cast<int>(block / kWalks) * C::slots;
  }
};

// Loads all weights of the tile's channels from the layout of `pack`.
__device__ __forceinline__ void load_weights(Scalar* target, const Scalar* packed,
                                             const Tile& tile) {
  constexpr int kVectors = kOutputs / C::weight_vector;
  const int first = tile.channels.first_output();
#pragma unroll 4
  for (int task = static_cast<int>(threadIdx.x); task < C::group_in * kTaps * kVectors;
       task += kThreads) {
    const int at = task % kVectors * C::weight_vector;
    const bool exists = first + at < kOutChannels;
    const int source = task / kVectors * kOutChannels + first + at;
    copy_elements<C::weight_vector>(target + task * C::weight_vector,
                                    packed + (exists ? source : 0), exists);
  }
}

// A thread's place in the block.
struct Position {
  int slot, y, x;  // y, x: first output within the tile
  int output;      // first output channel within the tile
  int input;       // first input channel that it reads

  __device__ Position() {
    int thread = static_cast<int>(threadIdx.x);
    output = thread % C::lanes_c * C::lane_channels;
    thread /= C::lanes_c;
    slot = thread / kPatches;
    y = Rows::first_output<C::rows>(thread % kPatches / C::lanes_x);
    x = Columns::first_output<C::columns>(thread % C::lanes_x);
    input = first_read(output);
  }
  __device__ bool idle() const {
    return C::slots * kPatches * C::lanes_c < kThreads && slot >= C::slots;
  }
};

// Adds the products of all input channels, of one plane of volumes.
__device__ __forceinline__ void multiply(Accumulators<C::lane_channels>& acc, const Scalar* input,
                                         const Scalar* weights, const Position& at) {
  const int row = at.y * Rows::kTimes / Rows::kOver;
  const int column = at.x * Columns::kTimes / Columns::kOver;
  const Scalar* window =
      input + at.slot * kSlot + (row * kHaloColumns + column) * kPixel + at.input;
  weights += at.output;
#pragma unroll 1
  for (int channel = 0; channel < C::group_in; ++channel) {
#pragma unroll kUnrolledRows < C::lane_channels>
    for (int i = 0; i < kWindowRows; ++i) {
      Acc elements[C::lane_channels][kWindowColumns];
      load_window(elements, window, i);
#pragma unroll
      for (int r = 0; r < C::rows; ++r) {
        const int k = Rows::tap(i, r);
        if (!is_tap<Rows>(k)) continue;
        const Scalar* const taps = weights + k * (C::kernel_width * kOutputs);
#pragma unroll
        for (int m = 0; m < C::lane_channels; ++m) {
          acc.add(m, r, elements[m], [&](int tap) {
            Acc weight[C::lane_channels];
            load(weight, taps + tap * kOutputs);
            return weight[m];
          });
        }
        acc.end_row(r, k);
      }
    }
    window += 1;
    weights += kTaps * kOutputs;
  }
}

// Adds the bias, applies the epilogue and writes the outputs that lie in the image.
__device__ __forceinline__ void store(const Accumulators<C::lane_channels>& acc, const Scalar* bias,
                                      Scalar* output, const Tile& tile, const Position& at,
                                      int images, const Epilogue<C>& epilogue, int depth = 0) {
  const int image = tile.first_image + at.slot;
  const int channel = tile.channels.first_output() + at.output;
  if (image >= images || !tile.channels.has(at.output)) return;
  Channels shift = {};
  if (bias != nullptr) shift = load_bias<C::lane_channels, C::aligned_bias>(bias + channel);
#pragma unroll
  for (int r = 0; r < C::rows; ++r) {
    const int y = tile.y + at.y + r * Rows::kOutStep;
    if (y >= C::out_height) continue;
#pragma unroll
    for (int p = 0; p < C::columns; ++p) {
      const int x = tile.x + at.x + p * Columns::kOutStep;
      if (x >= C::out_width) continue;
      Acc values[C::lane_channels];
#pragma unroll
      for (int m = 0; m < C::lane_channels; ++m) {
        values[m] = acc.result(m, r, p) + Acc(widen(shift.element[m]));
      }
      Scalar* const target =
          output + ((((1ll * image * D::out + depth) * C::out_height + y) * C::out_width + x) *
                        kOutChannels +
                    channel);
      store_vector(target, epilogue(values, target), true);
    }
  }
}

// Computes a walk through volumes.
__device__ __forceinline__ void convolve_walk(const Scalar* input, const Scalar* packed,
                                              const Scalar* bias, Scalar* output, const Tile& tile,
                                              int images, const Epilogue<C>& epilogue) {
  const Walk walk(tile.walk);
  if (walk.first >= walk.end) return;
  const auto inputs = [&](int place) {
    return reinterpret_cast<Scalar*>(shared_memory() + place * kInputBytes);
  };
  Scalar* const weights = reinterpret_cast<Scalar*>(shared_memory() + kRingBytes);
  input += tile.first_image * kInImage;
  const PlaneCopies<HaloRectangle<kThreads>, kMostKept> halo(
      HaloRectangle<kThreads>(images - tile.first_image, tile.channels, tile.y, tile.x));
  const auto load = [&](int position, bool all) {
    load_read<kRing>(OutputPlane(walk.residue, position), all, [&](int place, int plane) {
      halo.copy(inputs(place) + kHaloPlace, input + plane * kInPlane);
    });
    copy_async_commit();
  };
  if constexpr (C::inside) {
    clear<kRingBytes, kThreads>(shared_memory());
    __syncthreads();
  }
  load_weights(weights, packed, tile);
  load(walk.first, true);
  const Position at;
#pragma unroll 1
  for (int position = walk.first; position < walk.end; ++position) {
    const bool last = position + 1 == walk.end;
    if (!last) {
      load(position + 1, false);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    const OutputPlane plane(walk.residue, position);
    if (!at.idle()) {
      Accumulators<C::lane_channels> acc;
#pragma unroll 1
      for (int number = 0; number < kReadPlanes; ++number) {
        if (!plane.reads(number)) continue;
        multiply(acc, inputs(plane.place<kRing>(number)),
                 weights + plane.tap(number) * (kPlaneTaps * kOutputs), at);
      }
      store(acc, bias, output, tile, at, images, epilogue, plane.z);
    }
    if (!last) __syncthreads();  // before the load after next reuses the oldest planes
  }
}

}  // namespace depthwise
}  // namespace fastconv

// Packs the weights in the order in which blocks read them: [channel][tap row][tap][output].
extern "C" __global__ void pack(const Config::Scalar* __restrict__ weight,
                                Config::Scalar* __restrict__ packed) {
  using namespace fastconv::depthwise;
  constexpr int kTotal = C::group_in * kTaps * kOutChannels;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < kTotal; i += step) {
    const int group = i % kOutChannels / C::group_out;
    const int output = i % C::group_out;
    const int tap = i / kOutChannels % kTaps;
    const int channel = i / (kOutChannels * kTaps);
    const int tap_row = tap / C::kernel_width;  // of all planes
    const Scalar* const row =
        D::exists ? kernel_row(weight, group, output, channel, tap_row % C::kernel_height,
                               tap_row / C::kernel_height)
                  : kernel_row(weight, group, output, channel, tap_row);
    packed[i] = row[1ll * (tap % C::kernel_width) * C::weight_stride_width];
  }
}

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    convolve(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ packed,
             const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
             int first_image, int images FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::depthwise;
  const auto epilogue = FASTCONV_EPILOGUE(output);
  const Tile tile(blockIdx.x);
  input += first_image * kInImage;
  output += first_image * kOutImage;
  if constexpr (D::exists) {
    convolve_walk(input, packed, bias, output, tile, images, epilogue);
    return;
  }
  Scalar* const inputs = reinterpret_cast<Scalar*>(fastconv::shared_memory());
  Scalar* const weights = reinterpret_cast<Scalar*>(fastconv::shared_memory() + kInputBytes);
  if constexpr (C::inside) {
    clear<kInputBytes, kThreads>(inputs);
    __syncthreads();
  }
  load_halo<kThreads>(inputs, input, tile.first_image, images, tile.channels, tile.y, tile.x);
  load_weights(weights, packed, tile);
  fastconv::copy_async_commit();
  fastconv::copy_async_wait<0>();
  __syncthreads();
  const Position at;
  if (at.idle()) return;
  Accumulators<C::lane_channels> acc;
  multiply(acc, inputs, weights, at);
  store(acc, bias, output, tile, at, images, epilogue);
}
