// The input of scaled fp16 as a channels-last copy in float16, which a launch before the
// convolution makes in the workspace (scale.cuh): whether there is one, and what the input's
// elements are then.
//
// `copied_planes` planes that are written, all those of a volume, read one copy. The kernel that
// repairs reads the tensor itself, but the tables of the same volumes.
#pragma once
#include "device/epilogue.cuh"
#include "device/tensor/operand.cuh"

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

// The input as the convolution loads it: elements, how many of them are 16 bytes, and the format.
constexpr bool kLoadsCopy = HalfCopy::exists && C::scaled_fp16;
using Loaded = Either<kLoadsCopy, float16, Scalar>::type;
constexpr int kLoadedVector = 16 / static_cast<int>(sizeof(Loaded));
constexpr bool kLoadedLast = C::in_channels_last || kLoadsCopy;

}  // namespace tensor
}  // namespace fastconv
