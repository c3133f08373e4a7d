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
#pragma once
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
