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
#pragma once
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

extern "C" __global__ void __launch_bounds__(256)
    copy(const Config::Scalar* input, void* input_copy, unsigned char* scratch,
         int batch FASTCONV_SLAB_PARAMETERS) {
  using namespace fastconv::tensor;
  if constexpr (kLoadsCopy) copy_halves<C>(input, input_copy, scratch, batch, FASTCONV_SLAB);
}
