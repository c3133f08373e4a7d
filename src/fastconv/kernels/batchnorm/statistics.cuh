// Mean and squared deviations of each channel in the rows of a block.
//
// A block subtracts the first element that it has of a channel, and adds up differences and their
// squares. So numbers that are large beside their deviation lose no bits, and threads' sums can
// simply be added. What a block leaves in the workspace is [share][mean, squares, count][channel];
// statistics of all blocks are merged by finish.cuh.
#pragma once
#include "batchnorm/sums.cuh"

namespace fastconv {
namespace batchnorm {

constexpr int kUnroll = 4;  // vectors of a thread in flight

}  // namespace batchnorm
}  // namespace fastconv

extern "C" __global__ void __launch_bounds__(fastconv::batchnorm::kMostThreads,
                                             fastconv::batchnorm::kBlocks)
    batchnorm_statistics(const Config::Scalar* __restrict__ x, void* __restrict__ scratch,
                         int channels, int plane, int segments, int group, int lanes, int at_once,
                         int rows, int share, int tiles) {
  using namespace fastconv::batchnorm;
  using fastconv::widen;
  fastconv::begin_launch();
  const Sizes sizes = {channels, plane, segments, group, lanes, at_once, rows, share, tiles};
  const Part part = part_of_block(sizes);
  Walk walk(sizes, part);
  const Channels own(sizes, part, walk);
  Scalar firsts[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) firsts[i] = x[first_of(sizes, part, own.channel[i])];

  Sums sums = {};
  // Only at the edges of planes are there elements that do not exist: elsewhere nothing waits for
  // the first ones before it loads.
  constexpr bool kEdges = kWide && C::edges;
  const Scalar missing = kEdges ? firsts[0] : Scalar{};
  const auto load_at = [&](const Place& place) { return load(x, place, missing); };
  walk_over<Elements, kUnroll>(walk, load_at, [&](const Place&, const Elements& elements) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const int i = kWide ? 0 : e;
      const Acc difference = widen(elements.element[e]) - widen(firsts[i]);
      sums[0][i] += difference;
      sums[1][i] = fma(difference, difference, sums[1][i]);
    }
  });

  const Acc count = static_cast<Acc>(count_of(sizes, part));
  Acc* const partials = static_cast<Acc*>(scratch) + 3ll * part.share * channels + part.channel;
  add_up(sums, sizes, part, [&](int channel, Acc sum, Acc squares) {
    // The last segment of a plane may be empty, where its first vector begins with the plane.
    const Acc mean = count > Acc(0) ? sum / count : Acc(0);
    const Acc first = widen(x[first_of(sizes, part, part.channel + channel)]);
    partials[channel] = first + mean;
    partials[channels + channel] = squares - sum * mean;
    partials[2 * channels + channel] = count;
  });
}
