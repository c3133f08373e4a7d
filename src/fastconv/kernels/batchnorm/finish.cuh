// Merges what the blocks of statistics.cuh or grad_sums.cuh leave in the workspace, channel by
// channel and in a fixed order; or takes the running statistics.
//
// A block has kChannels channels. Each of its threads merges every kSteps-th share of one channel;
// lanes of a warp, then warps, are added up.
#pragma once
#include "device/begin.cuh"

namespace fastconv {
namespace batchnorm {

using C = Config;
using Acc = C::Acc;

constexpr int kThreads = C::threads;
constexpr int kChannels = 8;
constexpr int kSteps = kThreads / kChannels;
constexpr int kWarps = kThreads / 32;

// The parameters of a launch are 32-bit ints; doubles are passed in two.
__device__ __forceinline__ double wide(int low, int high) {
  return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}

// Adds up two numbers of all threads that have the same channel. The sums are those of the first
// kChannels threads.
__device__ __forceinline__ void add_up(Acc& first, Acc& second) {
  Acc* const shared = reinterpret_cast<Acc*>(shared_memory());
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int distance = 16; distance >= kChannels; distance /= 2) {
    first += __shfl_xor_sync(~0u, first, distance);
    second += __shfl_xor_sync(~0u, second, distance);
  }
  if (thread % 32 < kChannels) {
    Acc* const own = shared + (thread / 32 * kChannels + thread % 32) * 2;
    own[0] = first;
    own[1] = second;
  }
  __syncthreads();
  if (thread >= kChannels) return;
  for (int warp = 1; warp < kWarps; ++warp) {
    first += shared[(warp * kChannels + thread) * 2];
    second += shared[(warp * kChannels + thread) * 2 + 1];
  }
}

// Returns a running statistic, moved towards that of a batch.
template <class T>
__device__ __forceinline__ T moved(Acc before, Acc batch, Acc momentum) {
  return fastconv::narrow<T>((Acc(1) - momentum) * before + momentum * batch);
}

__device__ __forceinline__ float square_root(float number) { return sqrtf(number); }
__device__ __forceinline__ double square_root(double number) { return sqrt(number); }

}  // namespace batchnorm
}  // namespace fastconv

// Shares have (mean, squares, count). With d the difference of a share's mean from that of the
// first share, all elements' mean and squares follow from the sums of count * d and of
// squares + count * d * d. A batch is one of `batches` where that is given: running statistics are
// then averages of all batches, and `momentum` is not used. The number `counted`, if it is given,
// is increased by one: `batches` is null then, as other blocks may read it before or after.
extern "C" __global__ void __launch_bounds__(fastconv::batchnorm::kThreads)
    batchnorm_finish_statistics(const void* __restrict__ scratch,
                                Config::Running* __restrict__ running_mean,
                                Config::Running* __restrict__ running_var,
                                const long long* __restrict__ batches,
                                long long* __restrict__ counted, Config::Acc* __restrict__ mean,
                                Config::Acc* __restrict__ invstd, int channels, int shares,
                                int count_low, int count_high, int eps_low, int eps_high,
                                int momentum_low, int momentum_high) {
  using namespace fastconv::batchnorm;
  fastconv::begin_launch();
  const int thread = static_cast<int>(threadIdx.x);
  const int channel = static_cast<int>(blockIdx.x) * kChannels + thread % kChannels;
  const bool exists = channel < channels;
  const bool finishes = thread < kChannels && exists;
  const bool moves = finishes && running_mean != nullptr;
  // Loaded at first, because memory answers late: what they are needed for comes last.
  const Acc mean_before = moves ? fastconv::widen(running_mean[channel]) : Acc(0);
  const Acc var_before = moves ? fastconv::widen(running_var[channel]) : Acc(0);
  const long long batch = moves && batches != nullptr ? *batches : 0;
  const Acc* const partials = static_cast<const Acc*>(scratch) + (exists ? channel : 0);
  const Acc first = partials[0];
  Acc sum = 0, squares = 0;
#pragma unroll 4
  for (int share = thread / kChannels; share < shares; share += kSteps) {
    const Acc* const own = partials + 3ll * share * channels;
    const Acc difference = own[0] - first, weighted = own[2ll * channels] * difference;
    sum += weighted;
    squares += fma(weighted, difference, own[channels]);
  }
  add_up(sum, squares);
  if (!finishes) return;
  if (channel == 0 && counted != nullptr) *counted += 1;
  const double count = wide(count_low, count_high);
  const Acc shift = sum / static_cast<Acc>(count);
  squares -= sum * shift;
  if (squares < Acc(0)) squares = Acc(0);  // by rounding; NaN stays NaN
  mean[channel] = first + shift;
  const Acc eps = static_cast<Acc>(wide(eps_low, eps_high));
  invstd[channel] = Acc(1) / square_root(squares / static_cast<Acc>(count) + eps);
  if (!moves) return;
  const Acc momentum = batches == nullptr ? static_cast<Acc>(wide(momentum_low, momentum_high))
                                          : Acc(1) / static_cast<Acc>(batch);
  const Acc variance = squares / static_cast<Acc>(count - 1.0);
  running_mean[channel] = moved<Config::Running>(mean_before, first + shift, momentum);
  running_var[channel] = moved<Config::Running>(var_before, variance, momentum);
}

// Takes running statistics for those of a batch, as evaluation does. A thread has one channel.
extern "C" __global__ void __launch_bounds__(fastconv::batchnorm::kThreads)
    batchnorm_finish_running(const Config::Running* __restrict__ running_mean,
                             const Config::Running* __restrict__ running_var,
                             Config::Acc* __restrict__ mean, Config::Acc* __restrict__ invstd,
                             int channels, int eps_low, int eps_high) {
  using namespace fastconv::batchnorm;
  fastconv::begin_launch();
  const int channel = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (channel >= channels) return;
  const Acc variance = fastconv::widen(running_var[channel]);
  const Acc eps = static_cast<Acc>(wide(eps_low, eps_high));
  mean[channel] = fastconv::widen(running_mean[channel]);
  invstd[channel] = Acc(1) / square_root(variance + eps);
}

// Shares have (sum of gradients, sum of gradients times x - mean), which lie in the workspace
// behind two numbers for each channel. These become both sums over the number of elements, the
// second one times invstd^2.
extern "C" __global__ void __launch_bounds__(fastconv::batchnorm::kThreads)
    batchnorm_finish_grads(void* scratch, const Config::Acc* __restrict__ invstd,
                           Config::Parameter* __restrict__ grad_weight,
                           Config::Parameter* __restrict__ grad_bias, int channels, int shares,
                           int count_low, int count_high) {
  using namespace fastconv::batchnorm;
  fastconv::begin_launch();
  const int thread = static_cast<int>(threadIdx.x);
  const int channel = static_cast<int>(blockIdx.x) * kChannels + thread % kChannels;
  const bool exists = channel < channels;
  const bool finishes = thread < kChannels && exists;
  const Acc scale = finishes ? invstd[channel] : Acc(0);  // loaded at first, needed last
  Acc* const means = static_cast<Acc*>(scratch) + (exists ? channel : 0);
  const Acc* const partials = means + 2ll * channels;
  Acc sum = 0, product = 0;
#pragma unroll 4
  for (int share = thread / kChannels; share < shares; share += kSteps) {
    const Acc* const own = partials + 2ll * share * channels;
    sum += own[0];
    product += own[channels];
  }
  add_up(sum, product);
  if (!finishes) return;
  product *= scale;
  if (grad_weight != nullptr) {
    grad_weight[channel] = fastconv::narrow<Config::Parameter>(product);
  }
  if (grad_bias != nullptr) grad_bias[channel] = fastconv::narrow<Config::Parameter>(sum);
  const Acc count = static_cast<Acc>(wide(count_low, count_high));
  means[0] = sum / count;
  means[channels] = product * scale / count;
}
