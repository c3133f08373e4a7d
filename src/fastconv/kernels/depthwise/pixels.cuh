// Convolutions of narrow groups, and their input gradients, of channels-last tensors: neighbouring
// threads have neighbouring channels.
//
// A block has a tile of output pixels of `slots` images, and some channels of them: whole groups,
// or a part of one. It loads the pixels that they read, with their halo, and the weights to shared
// memory. A thread has `lane_channels` channels of `rows` x `columns` pixels, neighbours in a row;
// all lanes of a warp read neighbouring words. It loads a row of its window at a time, which all of
// its output rows use that have a tap there.
//
//   input    [slot][halo row][halo column][channel]     weights   [channel][tap row][tap][output]
//
// `pack` lays the weights out like that before, of all outputs.
#pragma once
#include "depthwise/correlate.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kOutputs = C::lanes_c * C::lane_channels;  // channels of a tile
constexpr int kTileGroups = kOutputs >= C::group_out ? kOutputs / C::group_out : 1;
constexpr int kParts = ceil_div(C::group_out, kOutputs);  // tiles of a group
constexpr int kInputs = kTileGroups * C::group_in;
constexpr int kChannelTiles = ceil_div(C::groups, kTileGroups) * kParts;
constexpr int kPatches = C::lanes_y * C::lanes_x;
constexpr int kThreads = round_up(C::slots * kPatches * C::lanes_c, 32);
static_assert(kParts == 1 ? kOutputs % C::group_out == 0 : kTileGroups == 1, "or several tiles");
static_assert(C::lane_channels == 1 || (C::group_in == 1 && C::group_out == 1), "one to one");

constexpr int kPixel = round_up(kInputs, C::vector);  // elements
constexpr int kSlot = kHaloRows * kHaloColumns * kPixel;
constexpr int kTaps = C::kernel_height * C::kernel_width;
constexpr int kInputBytes = round_up(C::slots * kSlot * static_cast<int>(sizeof(Scalar)), 16);
static_assert(kInputBytes + C::group_in * kTaps * kOutputs * static_cast<int>(sizeof(Scalar)) ==
                  C::shared_bytes,
              "as planned");

constexpr int kInChannels = C::groups * C::group_in;
constexpr int kOutChannels = C::groups * C::group_out;

struct Tile {
  int y, x;    // the first output
  int group;   // the first
  int output;  // the group's first channel
  int first_image;

  __device__ explicit Tile(unsigned block) {
    const int channels = static_cast<int>(block % kChannelTiles);
    block /= kChannelTiles;
    x = static_cast<int>(block % kTilesX) * kTileColumns;
    block /= kTilesX;
    y = static_cast<int>(block % kTilesY) * kTileRows;
    first_image = static_cast<int>(block / kTilesY) * C::slots;
    group = channels / kParts * kTileGroups;
    output = channels % kParts * kOutputs;
  }
};

__device__ __forceinline__ void load_input(Scalar* target, const Scalar* input, const Tile& tile,
                                           int images) {
  constexpr int kVectors = kPixel / C::vector;
  constexpr int kTasks = C::slots * kHaloRows * kHaloColumns * kVectors;
  const int first_row = tile.y * Rows::kTimes / Rows::kOver + Rows::kOrigin;
  const int first_column = tile.x * Columns::kTimes / Columns::kOver + Columns::kOrigin;
  for (int task = static_cast<int>(threadIdx.x); task < kTasks; task += kThreads) {
    const int channel = tile.group * C::group_in + task % kVectors * C::vector;
    const int pixel = task / kVectors;
    const int x = first_column + pixel % kHaloColumns;
    const int y = first_row + pixel / kHaloColumns % kHaloRows;
    const int image = tile.first_image + pixel / (kHaloColumns * kHaloRows);
    const bool exists = image < images && channel < kInChannels &&
                        static_cast<unsigned>(y) < C::in_height &&
                        static_cast<unsigned>(x) < C::in_width;
    const long long source =
        ((1ll * image * C::in_height + y) * C::in_width + x) * kInChannels + channel;
    copy_elements<C::vector>(target + task * C::vector, exists ? input + source : input, exists);
  }
}

// All taps' weights of the tile's channels, as `pack` has laid them out.
__device__ __forceinline__ void load_weights(Scalar* target, const Scalar* packed,
                                             const Tile& tile) {
  constexpr int kVectors = kOutputs / C::weight_vector;
  const int first = tile.group * C::group_out + tile.output;
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
  int slot, y, x;  // the first output, in the tile
  int output;      // the first channel
  int input;       // that it reads first

  __device__ Position() {
    int thread = static_cast<int>(threadIdx.x);
    output = thread % C::lanes_c * C::lane_channels;
    thread /= C::lanes_c;
    slot = thread / kPatches;
    y = Rows::first_output<C::rows>(thread % kPatches / C::lanes_x);
    x = Columns::first_output<C::columns>(thread % C::lanes_x);
    input = kParts == 1 ? output / C::group_out * C::group_in : 0;
  }
  __device__ bool idle() const {
    return C::slots * kPatches * C::lanes_c < kThreads && slot >= C::slots;
  }
};

using Channels = Vector<Scalar, C::lane_channels>;

__device__ __forceinline__ void load(Sum (&target)[C::lane_channels], const Scalar* source) {
  widen_vector(*reinterpret_cast<const Channels*>(source), target);
}

__device__ __forceinline__ void multiply(Sums<C::lane_channels>& sums, const Scalar* input,
                                         const Scalar* weights, const Position& at) {
  const int row = at.y * Rows::kTimes / Rows::kOver;
  const int column = at.x * Columns::kTimes / Columns::kOver;
  const Scalar* window =
      input + at.slot * kSlot + (row * kHaloColumns + column) * kPixel + at.input;
  weights += at.output;
#pragma unroll 1
  for (int channel = 0; channel < C::group_in; ++channel) {
#pragma unroll 1
    for (int i = 0; i < kWindowRows; ++i) {
      Sum elements[C::lane_channels][kWindowColumns];
#pragma unroll
      for (int j = 0; j < kWindowColumns; ++j) {
        Sum pixel[C::lane_channels];
        load(pixel, window + (i * (Rows::kUnit * kHaloColumns) + j * Columns::kUnit) * kPixel);
#pragma unroll
        for (int m = 0; m < C::lane_channels; ++m) elements[m][j] = kept(pixel[m]);
      }
#pragma unroll
      for (int r = 0; r < C::rows; ++r) {
        const int k = Rows::tap(i, r);
        if (!is_tap<Rows>(k)) continue;
        const Scalar* const taps = weights + k * (C::kernel_width * kOutputs);
#pragma unroll
        for (int m = 0; m < C::lane_channels; ++m) {
          sums.add(m, r, elements[m], [&](int tap) {
            Sum weight[C::lane_channels];
            load(weight, taps + tap * kOutputs);
            return weight[m];
          });
        }
        sums.end_row(r, k);
      }
    }
    window += 1;
    weights += kTaps * kOutputs;
  }
}

// Adds the bias, and writes what lies in the image.
__device__ __forceinline__ void store(const Sums<C::lane_channels>& sums, const Scalar* bias,
                                      Scalar* output, const Tile& tile, const Position& at,
                                      int images) {
  const int image = tile.first_image + at.slot;
  const int channel = tile.group * C::group_out + tile.output + at.output;
  if (image >= images || channel >= kOutChannels) return;
  if (kParts > 1 && tile.output + at.output >= C::group_out) return;
  Channels shift = {};
  if (bias != nullptr) shift = *reinterpret_cast<const Channels*>(bias + channel);
#pragma unroll
  for (int r = 0; r < C::rows; ++r) {
    const int y = tile.y + at.y + r * Rows::kOutStep;
    if (y >= C::out_height) continue;
#pragma unroll
    for (int p = 0; p < C::columns; ++p) {
      const int x = tile.x + at.x + p * Columns::kOutStep;
      if (x >= C::out_width) continue;
      Channels result;
#pragma unroll
      for (int m = 0; m < C::lane_channels; ++m) {
        result.element[m] = narrow<Scalar>(sums.result(m, r, p) + Sum(widen(shift.element[m])));
      }
      const long long target =
          ((1ll * image * C::out_height + y) * C::out_width + x) * kOutChannels + channel;
      store_vector(output + target, result, true);
    }
  }
}

}  // namespace depthwise
}  // namespace fastconv

// Lays the weights out as blocks read them: [channel][tap row][tap][output].
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
    // Input gradients sum over output channels: the weight's are the other way round.
    const long long out =
        C::transposed ? 1ll * group * C::group_in + channel : 1ll * group * C::group_out + output;
    const int in = C::transposed ? output : channel;
    packed[i] = weight[out * C::weight_stride_out + 1ll * in * C::weight_stride_in +
                       1ll * (tap / C::kernel_width) * C::weight_stride_height +
                       1ll * (tap % C::kernel_width) * C::weight_stride_width];
  }
}

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    correlate(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ packed,
              const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
              int first_image, int images) {
  using namespace fastconv::depthwise;
  const Tile tile(blockIdx.x);
  input += 1ll * first_image * C::in_height * C::in_width * kInChannels;
  output += 1ll * first_image * C::out_height * C::out_width * kOutChannels;
  Scalar* const inputs = reinterpret_cast<Scalar*>(fastconv::shared_memory());
  Scalar* const weights = reinterpret_cast<Scalar*>(fastconv::shared_memory() + kInputBytes);
  load_input(inputs, input, tile, images);
  load_weights(weights, packed, tile);
  fastconv::copy_async_commit();
  fastconv::copy_async_wait<0>();
  __syncthreads();
  const Position at;
  if (at.idle()) return;
  Sums<C::lane_channels> sums;
  multiply(sums, inputs, weights, at);
  store(sums, bias, output, tile, at, images);
}
