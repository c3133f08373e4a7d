// float32 multiplied as float16: half the time of TF32, the same mantissa, but a smaller range.
//
// Numbers are scaled by powers of two: those of an input channel by one that the size of its
// weights decides, the weights by its inverse, so that it does not matter in which units a channel
// is given; each image by one that a sample of its numbers decides, and each output channel's
// weights by one that the largest of them decides. Sums are scaled back as they are stored.
//
// Below 2^-14, float16 has fewer bits, and what it loses is absolute. So numbers fit if
//   - of each vector of 8 channels, the largest number is not below that, and
//   - what is lost is nothing beside the channel as a whole (of weights: the filter, an output and
//     an input channel's taps): its mean square is large enough, or none of its numbers is below.
// An image's channel is proven to be large enough by the sample, for what is in it is a part of
// the sum of squares; in channels where it is not, loaders look at every number (`strict`).
//
// If an image does not fit, it is marked, and a second kernel (`repairs`) computes it once more, in
// TF32; if weights do not, it computes all images, and the first none. Nothing but an image's own
// numbers and the weights decides.
#pragma once
#include "device/tensor/powers.cuh"
#include "device/tensor/vector.cuh"

namespace fastconv {
namespace tensor {

constexpr bool kSelects = C::halves || C::repairs;  // images, out of the batch

constexpr int kWeightExponent = 14;  // that the largest weight is scaled to

// What a vector's largest number has to reach, once scaled: from there on, float16 has all bits.
// The low parts of weights, and weights 2^-11 times as large, have no scale of their own.
constexpr float kLeastInput = 1.0f / (1 << 14);
constexpr float kLeastWeight = C::parts == 2 ? 0.25f : kLeastInput;

// The root mean square, of a channel or of a filter, beside which it does not matter what smaller
// numbers lose: each 2^-24 at most, in two parts 2^-36 of the input and 2^-25 of weights; so all of
// them 1e-6 of the channel's or the filter's norm, 3e-8 in two parts.
constexpr float kInputSize = C::parts == 2 ? 1.0f / (1 << 11) : 1.0f / (1 << 4);
constexpr float kWeightSize = C::parts == 2 ? 1.0f : 1.0f / (1 << 4);

// Input channels as the tables have them: those of the products, of one group after the other.
constexpr int kGroupColumns = C::halves ? C::table_columns / C::groups : 1;

// Tables in the workspace.
struct Tables {
  unsigned char* scratch;
  int batch;

  // What scales an output channel's sums back; 0 if its weights do not fit.
  __device__ __forceinline__ float* channels() const {
    return reinterpret_cast<float*>(scratch + C::tables_at);
  }
  // What an input channel's numbers are multiplied by, and its weights divided by.
  __device__ __forceinline__ float* columns() const { return channels() + C::table_channels; }
  // The same times the image's scale: all that its numbers are multiplied by. Negative if each of
  // them has to fit.
  __device__ __forceinline__ float* powers(int image) const {
    return columns() + (1ll + image) * C::table_columns;
  }
  // An image's scale; 0 if none will do.
  __device__ __forceinline__ float* images() const { return powers(batch); }
  // Not 0 for images some of whose numbers do not fit.
  __device__ __forceinline__ int* marks() const { return reinterpret_cast<int*>(images() + batch); }
};

// What a block takes its items from: the images that this kernel computes.
struct Items {
  Tables tables;  // without a workspace if weights do not fit

  __device__ Items(unsigned char* scratch, int batch) : tables{scratch, batch} {
    if constexpr (kSelects) {
      bool fit = true;
#pragma unroll 4
      for (int i = threadIdx.x % 32; i < C::table_channels; i += 32) {
        fit = fit && tables.channels()[i] != 0.0f;
      }
      if (!__all_sync(~0u, fit)) tables.scratch = nullptr;
    }
  }
  __device__ __forceinline__ bool has(int image) const {
    if constexpr (C::halves) return tables.scratch && tables.images()[image] != 0.0f;
    if constexpr (C::repairs) {
      return !tables.scratch || tables.images()[image] == 0.0f || tables.marks()[image] != 0;
    }
    return true;
  }
  // Whether there is nothing to do.
  __device__ bool none() const {
    if constexpr (!kSelects) return false;
    bool found = false;
    for (int i = threadIdx.x % 32; i < tables.batch; i += 32) found = found || has(i);
    return !__any_sync(~0u, found);
  }
  __device__ __forceinline__ int count() const { return tables.batch * kItemsPerImage; }

  // A block's items: the first, and the one after another.
  __device__ __forceinline__ int first() const { return settled(blockIdx.x); }
  __device__ __forceinline__ int after(int index) const { return settled(index + gridDim.x); }
  __device__ __forceinline__ int settled(int index) const {
    if constexpr (kSelects) {
      while (index < count() && !has(index / kItemsPerImage)) index += gridDim.x;
    }
    return index;
  }

  // Of the numbers that the warp has seen since the last call: marks the image if not all fit.
  __device__ __forceinline__ void judge(HalfRange& range, int image) const {
    const bool fits = range.fits(kLeastInput);
    if (!__all_sync(~0u, fits) && threadIdx.x % 32 == 0) tables.marks()[image] = 1;
    range = HalfRange();
  }
  __device__ __forceinline__ void judge(NoRange&, int) const {}
};

}  // namespace tensor
}  // namespace fastconv
