// float32 multiplied as float16: half the time of TF32, the same mantissa, but a smaller range.
//
// Each image is scaled by a power of two that a sample of its numbers decides, and each output
// channel's weights by one that the largest of them decides; sums are scaled back as they are
// stored. Whether all numbers fit is seen as they are converted. If an image's do not, it is
// marked, and a second kernel (`repairs`) computes it once more, in TF32; if weights do not, it
// computes all images, and the first none. Nothing but an image's own numbers and the weights
// decides.
#pragma once
#include "hopper/correlate_vector.cuh"

namespace fastconv {
namespace hopper {

constexpr bool kSelects = C::halves || C::repairs;  // images, out of the batch

// The exponents that numbers are scaled to: that of the largest weight, and of an image's largest
// number in the sample. Others of it may be 2^4 times as large.
constexpr int kWeightExponent = 14;
constexpr int kImageExponent = 11;
constexpr int kMostExponent = 50;  // of what is scaled: products of two scales are normal numbers

// What a vector's largest number has to reach, once scaled. From 2^-14 on, float16 has all bits;
// the low parts of weights, and weights 2^-11 times as large, have no scale of their own.
constexpr float kLeastInput = 1.0f / (1 << 14);
constexpr float kLeastWeight = C::parts == 2 ? 0.25f : kLeastInput;

// Tables in the workspace.
struct Tables {
  unsigned char* scratch;
  int batch;

  // What scales an output channel's sums back; 0 if its weights do not fit.
  __device__ __forceinline__ float* channels() const {
    return reinterpret_cast<float*>(scratch + C::tables_at);
  }
  // An image's scale; 0 if none will do.
  __device__ __forceinline__ float* images() const { return channels() + C::table_channels; }
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

  // What an image's numbers are multiplied by.
  __device__ __forceinline__ Scale scale(int image) const {
    return Scale(C::halves ? tables.images()[image] : 1.0f);
  }
  // Marks the image if not all numbers that the warp has seen since the last call fit.
  __device__ __forceinline__ void judge(HalfScale& range, int image) const {
    const bool fits = range.fits(kLeastInput);
    if (!__all_sync(~0u, fits) && threadIdx.x % 32 == 0) tables.marks()[image] = 1;
    range = HalfScale(range.scale);
  }
  __device__ __forceinline__ void judge(NoScale&, int) const {}
};

// The larger of all threads' numbers, in a block of whole warps.
__device__ __forceinline__ float block_largest(float number) {
  auto* const of_warps = reinterpret_cast<float*>(shared_memory());
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) {
    number = larger(number, __shfl_xor_sync(~0u, number, flip));
  }
  __syncthreads();  // the last call's have been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = number;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) number = larger(number, of_warps[i]);
  return number;
}

// The power of two that gives a number this exponent; 1 for zero, 0 for one that is too large, too
// small or no number.
__device__ __forceinline__ float scale_to(float number, int exponent) {
  if (number == 0.0f) return 1.0f;
  const int its = static_cast<int>(__float_as_uint(number) >> 23 & 255u) - 127;
  if (its < -kMostExponent || its > kMostExponent) return 0.0f;
  return __uint_as_float(static_cast<unsigned>(127 + exponent - its) << 23);
}

}  // namespace hopper
}  // namespace fastconv
