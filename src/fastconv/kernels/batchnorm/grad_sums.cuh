// Sums of the gradients before the activation, and of these times x - mean, of each channel in the
// rows of a block. They are left in the workspace as [share][sum][channel], behind two numbers for
// each channel, and merged by finish.cuh.
//
// With `stores`, gradients before the activation are written as well: they are the residual's, and
// grad_apply.cuh reads them. Sums are then those of the rounded gradients.
#pragma once
#include "batchnorm/grad.cuh"
#include "batchnorm/sums.cuh"

extern "C" __global__ void __launch_bounds__(fastconv::batchnorm::kMostThreads,
                                             fastconv::batchnorm::kBlocks)
    batchnorm_grad_sums(const Config::Scalar* __restrict__ grad,
                        const Config::Scalar* __restrict__ x,
                        const Config::Scalar* __restrict__ beside,
                        const Config::Parameter* __restrict__ weight,
                        const Config::Parameter* __restrict__ bias,
                        const fastconv::AccOf<Config::Scalar>::type* __restrict__ mean,
                        const fastconv::AccOf<Config::Scalar>::type* __restrict__ invstd,
                        Config::Scalar* __restrict__ grad_residual, void* __restrict__ scratch,
                        int channels, int plane, int segments, int group, int lanes, int at_once,
                        int rows, int share, int tiles) {
  using namespace fastconv::batchnorm;
  fastconv::begin_launch();
  const Sizes sizes = {channels, plane, segments, group, lanes, at_once, rows, share, tiles};
  const Part part = part_of_block(sizes);
  Walk walk(sizes, part);
  const Channels own(sizes, part, walk);
  const Normalization normalized(own, mean, invstd, weight, bias);
  Sums sums = {};
  const auto load_at = [&](const Place& place) { return load_all(grad, x, beside, place); };
  walk_over<Operands, kUnroll>(walk, load_at, [&](const Place& place, const Operands& operands) {
    Elements stored;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const int i = kWide ? 0 : e;
      Acc before = operands.grad_before(normalized, e);
      if constexpr (C::stores) {
        stored.element[e] = fastconv::narrow<Scalar>(before);
        before = fastconv::widen(stored.element[e]);
      }
      sums[0][i] += before;
      sums[1][i] = fma(before, normalized.centered(operands.x.element[e], i), sums[1][i]);
    }
    if constexpr (C::stores) store(grad_residual, place, stored);
  });
  Acc* const partials =
      static_cast<Acc*>(scratch) + 2ll * (part.share + 1) * channels + part.channel;
  add_up(sums, sizes, part, [&](int channel, Acc sum, Acc product) {
    partials[channel] = sum;
    partials[channels + channel] = product;
  });
}
