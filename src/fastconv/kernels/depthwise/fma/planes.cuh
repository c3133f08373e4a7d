// Forward convolution and input gradient of narrow groups with fused multiply-adds, on contiguous
// (NCHW) tensors, where each channel of an image is a plane.
//
// A block computes a tile of `slots` output planes, times `channels` of the same group, from halo
// tiles of the input planes in shared memory; small images have as many planes to a block as there
// are threads for. Where groups have several input channels, the next channel's planes are loaded
// while one is multiplied.
//
// A thread computes `rows` x `columns` outputs, neighbours in a row, so that it loads few words for
// many products: one row of its window at a time, which serves every output row that has a tap
// there. All lanes of a plane read the same weights at once. Neighbouring threads' columns are 16
// bytes apart in shared memory, so that there are no bank conflicts.
//
//   input    [slot][halo row][column]     weights   [slot][channel][tap row][tap column]
//
// Of volumes, a block walks along the depth: it has all weights of its channels in shared memory,
// and a ring with the planes of the input that an output plane reads, and those that the next one
// reads besides.
#pragma once
#include "depthwise/fma/kernel.cuh"
#include "depthwise/plane_rows.cuh"

namespace fastconv {
namespace depthwise {

constexpr int kSlotThreads = C::lanes_y * C::lanes_x;
constexpr int kThreads = round_up(C::slots * kSlotThreads, 32);
constexpr int kParts = ceil_div(C::group_out, C::channels);  // parts of a group's output planes
constexpr int kStages = C::group_in > 1 ? 2 : 1;

constexpr int kWeightRow = round_up(Columns::kTaps, 4);
constexpr int kWeightPlane = C::channels * C::kernel_height * kWeightRow + C::weight_padding;
constexpr int kInputBytes = round_up(C::slots * kPlane * static_cast<int>(sizeof(Scalar)), 16);
constexpr int kWeightBytes = round_up(C::slots * kWeightPlane * static_cast<int>(sizeof(Acc)), 16);
constexpr int kStageBytes = kInputBytes + kWeightBytes;
constexpr int kRing = kReadPlanes + (kWalk > 1 ? kNextPlanes : 0);
constexpr int kRingBytes = kRing * C::group_in * kInputBytes;
constexpr int kSharedBytes =
    D::exists ? kRingBytes + D::kernel * C::group_in * kWeightBytes : kStages * kStageBytes;
static_assert(kSharedBytes == C::shared_bytes, "as planned");

// The tile of a block.
struct Tile {
  int y, x;   // first output
  int walk;   // of volumes
  int first;  // first plane, counted over images, groups and parts of groups

  __device__ explicit Tile(unsigned block) {
    x = static_cast<int>(block % kTilesX) * kTileColumns;
    block /= kTilesX;
    y = static_cast<int>(block % kTilesY) * kTileRows;
    block /= kTilesY;
    walk = static_cast<int>(block % kWalks);
    first = static_cast<int>(block / kWalks) * C::slots;
  }
  // The group of a slot's plane, counted over all images.
  __device__ int group(int slot) const { return (first + slot) / kParts; }
};

// Holds offsets from the first slot's input plane to the other slots', and to rows before or behind
// a plane that padding or the last tile reaches.
constexpr long long kFarRow = 1ll * (C::out_height + kTileRows) * Rows::kTimes + kHaloRows +
                              max_of(Rows::kOrigin, -Rows::kOrigin);
using Offset = IndexTo<(C::slots + 1) * C::group_in * kInChannel + (kFarRow + 1) * C::in_width>;

// Copies the halo tiles of all slots. A thread copies vectors of one column, of every kRows-th row.
// Rows of more vectors than there are threads are copied in parts; this copies those from vector
// kFirst on.
template <int kFirst = kFirstVector>
__device__ __forceinline__ void load_input(Scalar* target, const Scalar* input, const Tile& tile,
                                           int channel, int planes) {
  constexpr int kVectors = min_of(kEndVector - kFirst, kThreads);
  constexpr int kRows = kThreads / kVectors;  // rows that are copied at once
  if constexpr (kFirst + kVectors < kEndVector) {
    load_input<kFirst + kVectors>(target, input, tile, channel, planes);
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (kThreads % kVectors != 0 && thread >= kRows * kVectors) return;
  const int at = (kFirst + thread % kVectors) * C::vector;
  const int first_row = tile.y * Rows::kTimes / Rows::kOver + Rows::kOrigin + kFirstRow;
  const int x = tile.x * Columns::kTimes / Columns::kOver + Columns::kOrigin - kShift + at;
  const bool inside = C::inside || static_cast<unsigned>(x) < C::in_width;
  const int group = tile.group(0);
  input += (1ll * group * C::group_in + channel) * kInChannel;
  target += kFirstRow * C::pitch + at;
#pragma unroll 4
  for (int i = thread / kVectors; i < C::slots * kCopiedRows; i += kRows) {
    const int slot = C::slots == 1 ? 0 : i / kCopiedRows;
    const int row = C::slots == 1 ? i : i % kCopiedRows;
    const int y = first_row + row;
    const bool exists = inside && (C::inside || static_cast<unsigned>(y) < C::in_height) &&
                        (C::slots == 1 || tile.first + slot < planes);
    const Offset source =
        static_cast<Offset>(tile.group(slot) - group) * (C::group_in * kInChannel) +
        static_cast<Offset>(y) * C::in_width + x;
    copy_elements<C::vector>(target + slot * kPlane + row * C::pitch, input + (exists ? source : 0),
                             exists);
  }
}

// Returns the elements before the first slot's first channel.
__device__ __forceinline__ long long first_group(const Tile& tile) {
  return 1ll * tile.group(0) * C::group_in * kInChannel;
}

// What load_input copies of one plane of volumes, relative to that plane of the first slot.
struct InputRows {
  static constexpr int kVector = C::vector;
  static constexpr int kVectors = kEndVector - kFirstVector;
  static constexpr bool kAtOnce = kVectors <= kThreads;
  static constexpr int kTotal = C::slots * kCopiedRows;
  static constexpr int kStep = max_of(1, kThreads / kVectors);
  static constexpr long long kReach = (C::slots + 1) * C::group_in * kInChannel;

  Tile tile;
  int planes;

  __device__ static int first() {
    const int thread = static_cast<int>(threadIdx.x);
    return kThreads % kVectors != 0 && thread >= kStep * kVectors ? kTotal : thread / kVectors;
  }
  __device__ __forceinline__ Located<Offset> locate(int i) const {
    const int at = (kFirstVector + static_cast<int>(threadIdx.x) % kVectors) * C::vector;
    const int slot = C::slots == 1 ? 0 : i / kCopiedRows;
    const int row = C::slots == 1 ? i : i % kCopiedRows;
    const int y = tile.y * Rows::kTimes / Rows::kOver + Rows::kOrigin + kFirstRow + row;
    const int x = tile.x * Columns::kTimes / Columns::kOver + Columns::kOrigin - kShift + at;
    const bool inside = C::inside || (static_cast<unsigned>(y) < C::in_height &&
                                      static_cast<unsigned>(x) < C::in_width);
    const Offset group = static_cast<Offset>(tile.group(slot) - tile.group(0));
    return {group * static_cast<Offset>(C::group_in * kInChannel) +
                static_cast<Offset>(y) * C::in_width + x,
            slot * kPlane + (kFirstRow + row) * C::pitch + at,
            inside && (C::slots == 1 || tile.first + slot < planes)};
  }
  __device__ __forceinline__ void load(Scalar* target, const Scalar* plane) const {
    load_input(target, plane - first_group(tile), tile, 0, planes);
  }
};

// Loads the weights of input channel `channel` of each plane's group; a thread loads whole kernel
// rows. Planes and channels that do not exist get zeros, and so does the padding of rows. Of
// volumes this loads plane `tap_plane` of the kernel.
__device__ __forceinline__ void load_weights(Acc* target, const Scalar* weight, const Tile& tile,
                                             int channel, int planes, int tap_plane = 0) {
  constexpr int kRows = C::channels * C::kernel_height;  // kernel rows of a slot
  for (int i = static_cast<int>(threadIdx.x); i < C::slots * kRows; i += kThreads) {
    const int slot = i / kRows;
    const int tap_row = i % C::kernel_height;
    const int plane = tile.first + slot;
    const int group = plane / kParts % C::groups;
    const int output = plane % kParts * C::channels + i / C::kernel_height % C::channels;
    const bool exists = plane < planes && output < C::group_out;
    const Scalar* const source =
        exists ? kernel_row(weight, group, output, channel, tap_row, tap_plane) : weight;
    Acc* const row = target + slot * kWeightPlane + i % kRows * kWeightRow;
#pragma unroll
    for (int tap = 0; tap < C::kernel_width; ++tap) {
      const Scalar* const weight = source + 1ll * tap * C::weight_stride_width;
      if constexpr (sizeof(Scalar) == sizeof(Acc)) {
        copy_elements<1>(reinterpret_cast<Scalar*>(row + tap), weight, exists);
      } else {
        row[tap] = exists ? Acc(widen(*weight)) : Acc(0);
      }
    }
#pragma unroll
    for (int tap = C::kernel_width; tap < kWeightRow; ++tap) row[tap] = 0;
  }
}

// A thread's place in the block.
struct Position {
  int slot, y, x;  // y, x: first output within the tile

  __device__ Position() {
    const int thread = static_cast<int>(threadIdx.x);
    slot = thread / kSlotThreads;
    y = Rows::first_output<C::rows>(thread % kSlotThreads / C::lanes_x);
    x = Columns::first_output<C::columns>(thread % C::lanes_x);
  }
  __device__ bool idle() const { return C::slots * kSlotThreads < kThreads && slot >= C::slots; }
};

// A kernel row in shared memory, which is read four weights at a time.
struct WeightRow {
  const Acc* row;
  mutable Acc four[4];

  __device__ explicit WeightRow(const Acc* row) : row(row) {}
  __device__ __forceinline__ Acc operator()(int k) const {
    if (k % 4 == 0) load4(row + k, four);
    return four[k % 4];
  }
};

// Adds the products of one input channel.
__device__ __forceinline__ void multiply(Accumulators<C::channels>& acc, const Scalar* input,
                                         const Acc* weights, const Position& at) {
  const Scalar* const window = input + at.slot * kPlane +
                               at.y * Rows::kTimes / Rows::kOver * C::pitch + kFirstPiece +
                               at.x * Columns::kTimes / Columns::kOver;
  weights += at.slot * kWeightPlane;
#pragma unroll kUnrolledRows < C::channels>
  for (int i = 0; i < kWindowRows; ++i) {
    const WindowRow row(window + i * (Rows::kUnit * C::pitch));
#pragma unroll
    for (int r = 0; r < C::rows; ++r) {
      const int k = Rows::tap(i, r);
      if (!is_tap<Rows>(k)) continue;
#pragma unroll
      for (int m = 0; m < C::channels; ++m) {
        acc.add(m, r, row, WeightRow(weights + (m * C::kernel_height + k) * kWeightRow));
      }
      acc.end_row(r, k);
    }
  }
}

// Adds the bias, applies the epilogue and writes the outputs that lie in the image, or in the plane
// of this depth.
__device__ __forceinline__ void store(const Accumulators<C::channels>& acc, const Scalar* bias,
                                      Scalar* output, const Tile& tile, const Position& at,
                                      int planes, const Epilogue<C>& epilogue, int depth = 0) {
  const int plane = tile.first + at.slot;
  if (plane >= planes) return;
  const int part = plane % kParts * C::channels;
  const int group = plane / kParts % C::groups;
  const int y = tile.y + at.y;
  const int x = tile.x + at.x;
#pragma unroll
  for (int m = 0; m < C::channels; ++m) {
    const int channel = part + m;
    if (channel >= C::group_out) return;
    const Acc shift = bias != nullptr ? Acc(widen(bias[group * C::group_out + channel])) : Acc(0);
    Scalar* const target = output +
                           (1ll * (plane / kParts) * C::group_out + channel) * kOutChannel +
                           depth * kOutPlane;
#pragma unroll
    for (int r = 0; r < C::rows; ++r) {
      const int row = y + r * Rows::kOutStep;
      if (row >= C::out_height) continue;
#pragma unroll
      for (int p = 0; p < C::columns; p += C::store_vector) {
        const int column = x + p * Columns::kOutStep;
        Acc values[C::store_vector];
#pragma unroll
        for (int i = 0; i < C::store_vector; ++i) values[i] = acc.result(m, r, p + i) + shift;
        Scalar* const place = target + 1ll * row * C::out_width + column;
        const bool valid = column < C::out_width;
        store_vector(place, epilogue(values, place, valid), valid);
      }
    }
  }
}

// Computes a walk through volumes.
__device__ __forceinline__ void convolve_walk(const Scalar* input, const Scalar* weight,
                                              const Scalar* bias, Scalar* output, const Tile& tile,
                                              int planes, const Epilogue<C>& epilogue) {
  const Walk walk(tile.walk);
  if (walk.first >= walk.end) return;
  input += first_group(tile);
  unsigned char* const shared = shared_memory();
  const auto inputs = [&](int place, int channel) {
    return reinterpret_cast<Scalar*>(shared + (place * C::group_in + channel) * kInputBytes);
  };
  const auto weights = [&](int tap, int channel) {
    return reinterpret_cast<Acc*>(shared + kRingBytes +
                                  (tap * C::group_in + channel) * kWeightBytes);
  };
  const PlaneCopies<InputRows, kMostKept> rows(InputRows{tile, planes});
  const auto load = [&](int position, bool all) {
    load_read<kRing>(OutputPlane(walk.residue, position), all, [&](int place, int plane) {
#pragma unroll 1
      for (int channel = 0; channel < C::group_in; ++channel) {
        rows.copy(inputs(place, channel), input + channel * kInChannel + plane * kInPlane);
      }
    });
    copy_async_commit();
  };
  if constexpr (C::inside) {
    clear<kRingBytes, kThreads>(shared);
    __syncthreads();
  }
#pragma unroll 1
  for (int i = 0; i < D::kernel * C::group_in; ++i) {
    load_weights(weights(i / C::group_in, i % C::group_in), weight, tile, i % C::group_in, planes,
                 i / C::group_in);
  }
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
      Accumulators<C::channels> acc;
#pragma unroll 1
      for (int number = 0; number < kReadPlanes; ++number) {
        if (!plane.reads(number)) continue;
#pragma unroll 1
        for (int channel = 0; channel < C::group_in; ++channel) {
          multiply(acc, inputs(plane.place<kRing>(number), channel),
                   weights(plane.tap(number), channel), at);
        }
      }
      store(acc, bias, output, tile, at, planes, epilogue, plane.z);
    }
    if (!last) __syncthreads();  // before the load after next reuses the oldest planes
  }
}

}  // namespace depthwise
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::depthwise::kThreads, Config::blocks_per_sm)
    convolve(const Config::Scalar* __restrict__ input, const Config::Scalar* __restrict__ weight,
             const Config::Scalar* __restrict__ bias, Config::Scalar* __restrict__ output,
             int first_image, int images FASTCONV_RESIDUAL_PARAMETER) {
  using namespace fastconv::depthwise;
  const auto epilogue = FASTCONV_EPILOGUE(output);
  const Tile tile(blockIdx.x);
  const int planes = images * C::groups * kParts;
  input += 1ll * first_image * C::groups * C::group_in * kInChannel;
  output += 1ll * first_image * C::groups * C::group_out * kOutChannel;
  if constexpr (D::exists) {
    convolve_walk(input, weight, bias, output, tile, planes, epilogue);
    return;
  }
  unsigned char* const shared = fastconv::shared_memory();
  const auto inputs = [&](int channel) {
    return reinterpret_cast<Scalar*>(shared + channel % kStages * kStageBytes);
  };
  const auto weights = [&](int channel) {
    return reinterpret_cast<Acc*>(shared + channel % kStages * kStageBytes + kInputBytes);
  };
  const auto load = [&](int channel) {
    load_input(inputs(channel), input, tile, channel, planes);
    load_weights(weights(channel), weight, tile, channel, planes);
    fastconv::copy_async_commit();
  };
  if constexpr (C::inside) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) clear<kInputBytes, kThreads>(inputs(stage));
    __syncthreads();
  }
  const Position at;
  Accumulators<C::channels> acc;
  load(0);
#pragma unroll 1
  for (int channel = 0; channel < C::group_in; ++channel) {
    if (channel + 1 < C::group_in) {
      load(channel + 1);
      fastconv::copy_async_wait<1>();
    } else {
      fastconv::copy_async_wait<0>();
    }
    __syncthreads();
    if (!at.idle()) multiply(acc, inputs(channel), weights(channel), at);
    if (channel + 1 < C::group_in) __syncthreads();  // before the load after next reuses the stage
  }
  if (!at.idle()) store(acc, bias, output, tile, at, planes, epilogue);
}
