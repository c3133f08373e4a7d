// The depth of a volume's convolution: one more coordinate of taps and of positions.
//
// The planes that an output plane reads are further channels of the reduction. A group of group_in
// channels and a kernel of kTaps planes make group_in * kTaps channels, those of the first tap
// first. Planes outside of the volume are zeros. The convolution of images has no constants for
// depth: it is that of volumes of one plane.
#pragma once
#include "device/epilogue.cuh"

namespace fastconv {

template <class Config, class = void>
struct DepthOf {
  static constexpr bool exists = false;
  static constexpr int in = 1, out = 1, kernel = 1, stride = 1, dilation = 1, padding = 0,
                       weight_stride = 0;
};
template <class Config>
struct DepthOf<Config, typename Exists<decltype(Config::kernel_depth)>::type> {
  static constexpr bool exists = true;
  static constexpr int in = Config::in_depth, out = Config::out_depth,
                       kernel = Config::kernel_depth, stride = Config::stride_depth,
                       dilation = Config::dilation_depth, padding = Config::padding_front,
                       weight_stride = Config::weight_stride_depth;
};

}  // namespace fastconv
