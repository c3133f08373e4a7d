// The depth of a volume's convolution (device/depth.cuh), for tensor cores: an output plane is an
// image of its own, and the planes that it reads are further input channels.
//
// A group's channels and a kernel of `kernel` planes make channels of the reduction, those of the
// first plane's tap first: channel c at tap t is number t * channels + c, and reads plane `stride *
// z + dilation * t - padding` for output plane z. Planes outside of the volume are zeros. `batch`
// counts output planes: those of the first volume, then those of the second.
#pragma once
#include "device/depth.cuh"
#include "device/tensor/operand.cuh"

namespace fastconv {
namespace tensor {

using Depth = DepthOf<C>;

// Where the planes of a layer lie that computes an input gradient, perhaps one residue of its
// stride along depth: plane z is written at `step * z + at` of `planes`, and the layer's taps are
// `tap_step` apart in the kernel, backwards from `last_tap`.
template <class Config, class = void>
struct DepthPlacingOf {
  static constexpr int planes = 1, step = 1, at = 0, last_tap = 0, tap_step = 1;
};
template <class Config>
struct DepthPlacingOf<Config, typename Exists<decltype(Config::image_depth)>::type> {
  static constexpr int planes = Config::image_depth, step = Config::out_step_depth,
                       at = Config::plane_at, last_tap = Config::last_tap_plane,
                       tap_step = Config::tap_step_depth;
};
using DepthPlacing = DepthPlacingOf<C>;

// One of a group's channels of the reduction: one of kChannels in memory, at a tap of the depth.
template <int kChannels>
struct DepthChannel {
  int channel, tap;

  __device__ __forceinline__ explicit DepthChannel(int index)
      : channel(Depth::exists ? index % kChannels : index),
        tap(Depth::exists ? index / kChannels : 0) {}

  // The plane that it reads, counted from the first one that an output plane reads.
  __device__ __forceinline__ int plane() const { return Depth::dilation * tap; }
};

// A channel of the reduction as functions of weights take it: in volumes, with its tap.
template <int kChannels>
__device__ __forceinline__ auto depth_channel(int index) {
  if constexpr (Depth::exists) {
    return DepthChannel<kChannels>(index);
  } else {
    return index;
  }
}

// The first plane that an image of the batch reads, which may lie outside.
__device__ __forceinline__ int front_of(int image) {
  return Depth::exists ? image % Depth::out * Depth::stride - Depth::padding : 0;
}

// The first plane that an image reads. Images without depth have no member for it: it would cost
// them nothing, but the compiler would order their instructions otherwise.
template <bool kExists>
struct FrontOf {
  int front;

  __device__ __forceinline__ explicit FrontOf(int front = 0) : front(front) {}
};
template <>
struct FrontOf<false> {
  static constexpr int front = 0;

  __device__ __forceinline__ explicit FrontOf(int = 0) {}
};
using Front = FrontOf<Depth::exists>;

__device__ __forceinline__ bool plane_inside(int plane) {
  return !Depth::exists || static_cast<unsigned>(plane) < static_cast<unsigned>(Depth::in);
}

}  // namespace tensor
}  // namespace fastconv
