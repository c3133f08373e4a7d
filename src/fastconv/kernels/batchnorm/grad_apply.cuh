// The gradient of x. With g the gradient before the activation, it is
//
//   scale * (g - mean of g - (x - mean of x) * invstd^2 * mean of g * (x - mean of x))
//
// where the mean and the variance are those of the batch (`centers`), and scale * g otherwise. The
// means of gradients are what finish.cuh leaves in the workspace.
#pragma once
#include "batchnorm/grad.cuh"

extern "C" __global__ void __launch_bounds__(fastconv::batchnorm::kMostThreads,
                                             fastconv::batchnorm::kBlocks)
    batchnorm_grad_apply(const Config::Scalar* __restrict__ grad,
                         const Config::Scalar* __restrict__ x,
                         const Config::Scalar* __restrict__ beside,
                         const Config::Parameter* __restrict__ weight,
                         const Config::Parameter* __restrict__ bias,
                         const fastconv::AccOf<Config::Scalar>::type* __restrict__ mean,
                         const fastconv::AccOf<Config::Scalar>::type* __restrict__ invstd,
                         const void* __restrict__ scratch, Config::Scalar* __restrict__ grad_x,
                         int channels, int plane, int segments, int group, int lanes, int at_once,
                         int rows, int share, int tiles) {
  using namespace fastconv::batchnorm;
  fastconv::begin_launch();
  const Sizes sizes = {channels, plane, segments, group, lanes, at_once, rows, share, tiles};
  const Part part = part_of_block(sizes);
  Walk walk(sizes, part);
  const Channels own(sizes, part, walk);
  const Normalization normalized(own, mean, invstd, weight, bias);
  Acc means[kColumns], products[kColumns];
  if constexpr (C::centers) {
    const Acc* const from = static_cast<const Acc*>(scratch);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      means[i] = from[own.channel[i]];
      products[i] = from[channels + own.channel[i]];
    }
  }
  const auto load_at = [&](const Place& place) { return load_all(grad, x, beside, place); };
  walk_over<Operands, kUnroll>(walk, load_at, [&](const Place& place, const Operands& operands) {
    Elements found;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const int i = kWide ? 0 : e;
      Acc number = operands.grad_before(normalized, e);
      if constexpr (C::centers) {
        const Acc centered = normalized.centered(operands.x.element[e], i);
        number = fma(-centered, products[i], number - means[i]);
      }
      found.element[e] = fastconv::narrow<Scalar>(number * normalized.scale[i]);
    }
    store(grad_x, place, found);
  });
}
