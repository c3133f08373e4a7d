// The output of batch normalization: activation((x - mean) * invstd * weight + bias + residual), in
// one pass over memory. It is rounded once.
#pragma once
#include "batchnorm/normalize.cuh"

namespace fastconv {
namespace batchnorm {

constexpr int kUnroll = C::adds ? 2 : 4;  // vectors of a thread in flight, of each tensor

// The vectors of one place.
struct Operands {
  Elements x, residual;
};

}  // namespace batchnorm
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::batchnorm::kMostThreads,
                                             fastconv::batchnorm::kBlocks)
    batchnorm_apply(const Config::Scalar* __restrict__ x,
                    const Config::Scalar* __restrict__ residual,
                    const Config::Parameter* __restrict__ weight,
                    const Config::Parameter* __restrict__ bias,
                    const fastconv::AccOf<Config::Scalar>::type* __restrict__ mean,
                    const fastconv::AccOf<Config::Scalar>::type* __restrict__ invstd,
                    Config::Scalar* __restrict__ y, int channels, int plane, int segments,
                    int group, int lanes, int at_once, int rows, int share, int tiles) {
  using namespace fastconv::batchnorm;
  fastconv::begin_launch();
  const Sizes sizes = {channels, plane, segments, group, lanes, at_once, rows, share, tiles};
  const Part part = part_of_block(sizes);
  Walk walk(sizes, part);
  const Channels own(sizes, part, walk);
  const Normalization normalized(own, mean, invstd, weight, bias);
  const auto load_at = [&](const Place& place) {
    Operands operands;
    operands.x = load(x, place, Scalar{});
    if constexpr (C::adds) operands.residual = load(residual, place, Scalar{});
    return operands;
  };
  walk_over<Operands, kUnroll>(walk, load_at, [&](const Place& place, const Operands& operands) {
    Elements found;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      Acc number = normalized(operands.x.element[e], kWide ? 0 : e);
      if constexpr (C::adds) number += fastconv::widen(operands.residual.element[e]);
      found.element[e] = fastconv::narrow<Scalar>(C::activation::of(number));
    }
    store(y, place, found);
  });
}
