// Input and weights on their way to shared memory, while others are multiplied.
#pragma once
#include "ampere/correlate_tile.cuh"
#include "tensor/input.cuh"

namespace fastconv {
namespace ampere {

// Whether input is copied as it is: neither transposed nor rounded.
constexpr bool kCopied = C::vector_loads && sizeof(Scalar) == 2;

// Loads the input of all chunks of all items, each while the one before is multiplied. A chunk
// comes in kBatches, one or more beside each stage of weights: `start` begins to load a batch to
// registers, `finish` writes it to shared memory when the stage's products are under way.
struct Loader {
  const Scalar* input;
  const Items& items;
  int index;      // of the next item, of which few registers are kept
  int chunk = 0;  // of its
  int thread;
  Range range;
  Unit units[kCopied ? 1 : C::batch];

  __device__ Loader(const Scalar* input, const Items& items)
      : input(input), items(items), index(items.first()), thread(static_cast<int>(threadIdx.x)) {}

  __device__ static __forceinline__ int unit_of(int thread, int batch, int k) {
    return thread + kThreads * (batch * C::batch + k);
  }
  // Where a unit's first vector lies in a stage, in 16 bytes.
  __device__ static __forceinline__ int place_of(int index) {
    return Unit::plane(index) * kPlanePixels + Unit::pixel(index);
  }

  __device__ __forceinline__ void start(int batch, unsigned char* stage) {
    if (index >= items.count()) return;
    const Source source(input, Item(index), chunk, 0);
#pragma unroll
    for (int k = 0; k < C::batch; ++k) {
      const int unit = unit_of(thread, batch, k);
      const Place place = source.find(unit);
      const int channel = source.channel_of(unit);
      if constexpr (kCopied) {
        const bool valid = place.inside() && (kWholeChunks || channel < C::group_in);
        if (unit_exists(unit)) {
          copy_async<16>(stage + place_of(unit) * 16, place.address(channel), valid);
        }
      } else {
        units[k].load(place, channel);
      }
    }
  }

  __device__ __forceinline__ void finish(int batch, unsigned char* stage) {
    if (index >= items.count()) return;
    const Item item(index);
    if constexpr (!kCopied) {
#pragma unroll
      for (int k = 0; k < C::batch; ++k) {
        const int unit = unit_of(thread, batch, k);
        if (unit_exists(unit)) store(stage + place_of(unit) * 16, units[k], item, unit);
      }
    }
    if (batch < kBatches - 1) return;
    items.judge(range, item.image);
    if (++chunk == kChunks) {
      chunk = 0;
      index = items.after(index);
    }
  }

  __device__ __forceinline__ void store(unsigned char* target, const Unit& unit, const Item& item,
                                        int index) {
    const int channel = chunk * kChunkChannels + Unit::plane(index) * kVectorChannels;
    const float* const powers = items.tables.powers(item.image) + item.group * kGroupColumns;
#pragma unroll
    for (int i = 0; i < Unit::kVectors; ++i) {
      const Scale scale(powers + channel + i * kVectorChannels);
      store_input(target + Unit::offset(i) * 16, kPartPixels * 16, unit.vector(i), scale, range);
      if (scale.strict()) range.see_strictly(unit.vector(i), scale);
    }
  }

  // A whole chunk at once.
  __device__ __forceinline__ void fill(unsigned char* stage) {
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      start(batch, stage);
      finish(batch, stage);
    }
  }
};

// Copies weights to the ring's stages, in the order of their use; or all of them once, if they fit.
struct WeightStream {
  const unsigned char* packed;
  const Items& items;
  int index;      // of the item
  int stage = 0;  // of the item's
  int slot = 0;   // of the ring

  __device__ WeightStream(const unsigned char* packed, const Items& items)
      : packed(packed), items(items), index(items.first()) {}

  // Starts to copy the next stage, if there is one.
  __device__ __forceinline__ void start() {
    if (index < items.count()) {
      const Item item(index);
      const int part = item.group * kOutputGroups + item.outputs / (C::channel_groups * kOutputs);
      const long long from = static_cast<long long>(part) * kTileStages + stage;
      copy(shared_memory() + kWeightRing + slot * kWeightBytes, packed + from * kWeightBytes);
      if (++stage == kTileStages) {
        stage = 0;
        index = items.after(index);
      }
    }
    if (++slot == C::weight_stages) slot = 0;
  }
  __device__ static __forceinline__ void copy(unsigned char* target, const unsigned char* source) {
    constexpr int kVectors = kWeightBytes / 16;
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int first = 0; first < kVectors; first += kThreads) {
      const int i = first + thread;
      if (kVectors % kThreads == 0 || i < kVectors) {
        copy_async<16>(target + i * 16, source + i * 16, true);
      }
    }
  }
};

}  // namespace ampere
}  // namespace fastconv
