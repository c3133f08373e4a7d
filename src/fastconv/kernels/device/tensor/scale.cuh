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
#pragma once
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
