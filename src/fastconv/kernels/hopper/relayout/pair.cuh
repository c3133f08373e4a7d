// Copies both tensors of a weight gradient's slab in one launch: blocks of the output's gradient,
// then blocks of the input.
//
// While a slab is multiplied, the next one is copied to other memory (Config::beside): the launch
// may begin once all blocks of the multiplication have, and takes what room they leave. All that
// it reads was there before the first slab, and who has read what it overwrites, the slab before
// the last, had ended before the multiplication began. The last block waits for the multiplication,
// so that what comes after this launch comes after that, too.
#pragma once
#include "device/sm90.cuh"
#include "hopper/relayout/tile.cuh"

namespace fastconv {
namespace hopper {

__device__ __forceinline__ void copy_pair(const SlabCopy& grad_output, const SlabCopy& input,
                                          int grad_blocks) {
  const int block = static_cast<int>(blockIdx.x);
  if constexpr (C::beside) {
    go_beside_earlier_launch();
  } else {
    wait_for_earlier_launch();
  }
  allow_later_launch();
  if (block < grad_blocks) {
    grad_output.copy<C::vector_loads, C::vector_stores>(block);
  } else {
    input.copy<C::input_vector_loads, C::input_vector_stores>(block - grad_blocks);
  }
  if (C::beside && blockIdx.x == gridDim.x - 1) wait_for_earlier_launch();
}

}  // namespace hopper
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks)
    transpose_pair(const Config::Scalar* grad_output, Config::Scalar* grad_output_copy,
                   const Config::Scalar* input, Config::Scalar* input_copy, int grad_channels,
                   int grad_planes, int grad_plane, int grad_begin, int grad_count, int channels,
                   int planes, int plane, int begin, int count, int first_volume, int place,
                   int grad_blocks) {
  using namespace fastconv::hopper;
  // Copies begin where the place-th volume would be in their memory.
  const long long grad_before = 1LL * place * grad_channels * grad_planes * grad_count;
  const long long before = 1LL * place * channels * planes * count;
  copy_pair(
      {reinterpret_cast<const Element*>(grad_output),
       reinterpret_cast<Element*>(grad_output_copy) + grad_before, grad_channels, grad_planes,
       grad_plane, grad_begin, grad_count, first_volume},
      {reinterpret_cast<const Element*>(input), reinterpret_cast<Element*>(input_copy) + before,
       channels, planes, plane, begin, count, first_volume},
      grad_blocks);
}
