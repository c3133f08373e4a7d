// What the forward and the backward kernel of causal convolutions share: the tile of a block, how
// it is staged in shared memory, and how results are stored.
//
// A tile has kChannels channels and kTile positions of one sequence. In shared memory it lies as
// [position][channel]; contiguous tensors have tiles of one channel, whose positions are
// neighbours. A thread computes runs of kRun consecutive positions of kGroup neighbouring channels:
//
//   contiguous      a run is a vector of 16 bytes; neighbouring threads have neighbouring runs
//   channels-last   a lane has kGroup channels, 4 bytes where alignment allows it, and a segment of
//                   the block's threads has every kSegments-th run
#pragma once
#include "causal/config.cuh"

namespace fastconv {
namespace causal {

constexpr bool kLast = C::channels_last;
constexpr int kLanes = C::lanes;
constexpr int kGroup = C::group;
constexpr int kTile = C::tile;
constexpr int kChannels = kLanes * kGroup;
constexpr int kSegments = kThreads / kLanes;
constexpr int kRun = kLast ? 8 : 16 / static_cast<int>(sizeof(Scalar));
// Positions of a run's window before those that its first output reads, so that windows begin with
// whole vectors.
constexpr int kShift = C::shift;
constexpr int kWindow = kShift + kStates + kRun;
// Positions that are staged before the tile of a causal convolution.
constexpr int kHalo = kShift + kStates;

static_assert(kLast || kChannels == 1, "a contiguous tile has one channel");
static_assert(kTile % kRun == 0, "a tile consists of runs");

using Values = Acc[kGroup][kRun];
using Taps = Acc[kGroup][kWidth];

// A block's part of a tensor of shape (batch, dim, length).
struct Place {
  int batch;
  int channel;   // the first one
  int channels;  // those of the tile that exist
  int first;     // the first position
};

// This thread's part of a tile.
struct Part {
  int channel;
  int segment;
};
__device__ __forceinline__ Part part_of_thread() {
  const int thread = static_cast<int>(threadIdx.x);
  return {thread % kLanes * kGroup, thread / kLanes};
}

// Where a sequence's first channel of the tile begins. `row` is the distance between channels of a
// contiguous tensor, or between positions of a channels-last one.
template <class T>
__device__ __forceinline__ T* sequence(T* tensor, const Place& at, long long batch, long long row) {
  return tensor + at.batch * batch + (kLast ? at.channel : at.channel * row);
}

// --- Staging -------------------------------------------------------------------------------------

// The state before position 0 of a channel, which `states` points to; p is negative.
__device__ __forceinline__ Scalar state_at(const Scalar* states, int channel, int p) {
  return p >= -kStates ? states[channel * kStates + p + kStates] : Scalar{};
}

// Copies kCount positions of a tile's channels to shared memory, from position `first` on, with
// zeros beyond the tensor. Positions before 0 are those of `states`, if there are any.
template <int kCount, int kVector>
__device__ __forceinline__ void stage(Scalar* shared, const Scalar* from, long long row, int first,
                                      int length, int channels, const Scalar* states) {
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kPerRow = kLast ? kChannels / kVector : 1;
  constexpr int kCopies = kLast ? kCount * kPerRow : kCount / kVector;
  static_assert(kLast ? kChannels % kVector == 0 : kCount % kVector == 0, "whole vectors");
  for (int i = thread; i < kCopies; i += kThreads) {
    const int p = first + (kLast ? i / kPerRow : i * kVector);
    const int channel = kLast ? i % kPerRow * kVector : 0;
    Scalar* const to = shared + i * kVector;
    const bool exists = channel < channels;
    if (p < 0 && states != nullptr && exists) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        to[v] = kLast ? state_at(states, channel + v, p) : state_at(states, 0, p + v);
      }
    } else {
      const bool valid = exists && p >= 0 && p < length;
      const Scalar* const source = from + (kLast ? p * row + channel : p);
      copy_elements<kVector>(to, valid ? source : from, valid);
    }
  }
}

// Copies which sequence each of kCount positions belongs to; -1 beyond the tensor.
template <int kCount>
__device__ __forceinline__ void stage_sequences(int* shared, const int* from, int first,
                                                int length) {
  for (int i = static_cast<int>(threadIdx.x); i < kCount; i += kThreads) {
    const int p = first + i;
    shared[i] = p >= 0 && p < length ? from[p] : -1;
  }
}

__device__ __forceinline__ void wait_for_tiles() {
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
}

// --- Parameters and taps -------------------------------------------------------------------------

// Neighbouring taps are `step` apart, those of neighbouring channels `row`.
__device__ __forceinline__ void load_taps(Taps& taps, const WeightScalar* weight, long long row,
                                          long long step, const Place& at, const Part& part) {
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const bool exists = part.channel + g < at.channels;
    const WeightScalar* const from = weight + (at.channel + part.channel + g) * row;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) taps[g][j] = exists ? widen(from[j * step]) : Acc(0);
  }
}

__device__ __forceinline__ void load_bias(Acc (&biases)[kGroup], const WeightScalar* bias,
                                          const Place& at, const Part& part) {
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const bool exists = bias != nullptr && part.channel + g < at.channels;
    biases[g] = exists ? widen(bias[at.channel + part.channel + g]) : Acc(0);
  }
}

// Reads kRun staged positions of this thread's channels, but not those from `count` on.
__device__ __forceinline__ void read_run(Values& values, const Scalar* from, int count) {
  if constexpr (kLast) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i >= count) break;
      const auto at = *reinterpret_cast<const Vector<Scalar, kGroup>*>(from + i * kChannels);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) values[g][i] = widen(at.element[g]);
    }
  } else {
    const auto run = *reinterpret_cast<const Vector<Scalar, kRun>*>(from);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[0][i] = widen(run.element[i]);
  }
}

// Walks over the window of a run, and calls visit(values, i, e, tap) for each element i of its
// values that output e reads by a tap. For each output, taps come in ascending order. `ids` are the
// sequences of the window's positions.
template <class Visit>
__device__ __forceinline__ void walk(const Scalar* window, const int* ids, Visit&& visit) {
  int own[kRun];
  if constexpr (C::sequences) {
#pragma unroll
    for (int e = 0; e < kRun; ++e) own[e] = ids[kHalo + e];
  }
#pragma unroll
  for (int q = 0; q < ceil_div(kWindow, kRun); ++q) {
    Values values = {};
    read_run(values, window + q * kRun * kChannels, kWindow - q * kRun);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        const int tap = q * kRun + i - e - kShift;
        if (tap < 0 || tap >= kWidth) continue;
        if constexpr (C::sequences) {
          if (ids[q * kRun + i] != own[e]) continue;
        }
        visit(values, i, e, tap);
      }
    }
  }
}

// The sums of a run before the activation.
__device__ __forceinline__ void sum_taps(Values& sums, const Scalar* window, const int* ids,
                                         const Taps& taps, const Acc (&biases)[kGroup]) {
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
#pragma unroll
    for (int e = 0; e < kRun; ++e) sums[g][e] = biases[g];
  }
  walk(window, ids, [&](const Values& values, int i, int e, int tap) {
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      sums[g][e] = fma(taps[g][tap], values[g][i], sums[g][e]);
    }
  });
}

// --- Activation ----------------------------------------------------------------------------------

// Results of 16-bit types are rounded to fewer bits than the approximations have.
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(Scalar) == 2) {
    return inverse_approximately(1.0f + exp2_approximately(x * -1.44269504f));
  }
  return 1.0f / (1.0f + expf(-x));
}
__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

__device__ __forceinline__ Acc with_silu(Acc x) { return x * sigmoid(x); }

__device__ __forceinline__ Acc silu_slope(Acc x) {
  const Acc slope = sigmoid(x);
  return slope * fma(x, Acc(1) - slope, Acc(1));
}

// --- Storing -------------------------------------------------------------------------------------

#if __CUDA_ARCH__ >= 800
constexpr bool kPairsExist = true;
__device__ __forceinline__ unsigned narrow_pair(float16, float first, float second) {
  return floats_to_halves(first, second);
}
__device__ __forceinline__ unsigned narrow_pair(bfloat16, float first, float second) {
  return floats_to_bfloats(first, second);
}
#else
constexpr bool kPairsExist = false;
__device__ __forceinline__ unsigned narrow_pair(Scalar, Acc, Acc) { return 0; }  // is not called
#endif

// Whether a thread stores a run of a contiguous tensor as one vector. Otherwise runs go through
// shared memory, so that neighbouring threads store neighbouring elements.
constexpr bool kStoresRuns = !kLast && C::store_vector == kRun;

// Rounds kCount elements of a vector, in pairs where the GPU can.
template <int kCount>
__device__ __forceinline__ Vector<Scalar, kCount> narrow_vector(const Acc (&values)[kCount]) {
  Vector<Scalar, kCount> vector;
  constexpr bool kPairs = sizeof(Scalar) == 2 && kCount % 2 == 0 && kPairsExist;
#pragma unroll
  for (int i = 0; i < kCount; i += kPairs ? 2 : 1) {
    if constexpr (kPairs) {
      const unsigned pair = narrow_pair(Scalar{}, values[i], values[i + 1]);
      vector.element[i].bits = static_cast<unsigned short>(pair);
      vector.element[i + 1].bits = static_cast<unsigned short>(pair >> 16);
    } else {
      vector.element[i] = narrow<Scalar>(values[i]);
    }
  }
  return vector;
}

// Stores the outputs of a run, from position t on, to the tensor, whose positions are `row` apart
// in channels-last, or to the tile in `staged`.
__device__ __forceinline__ void store_run(const Values& values, Scalar* to, long long row, int t,
                                          int length, int channel, Scalar* staged) {
  if constexpr (kLast) {
    Scalar* at = to + t * row + channel;
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      Acc group[kGroup];
#pragma unroll
      for (int g = 0; g < kGroup; ++g) group[g] = values[g][e];
      const auto out = narrow_vector(group);
      if (t + e < length) *reinterpret_cast<Vector<Scalar, kGroup>*>(at) = out;
      at += row;
    }
  } else {
    *reinterpret_cast<Vector<Scalar, kRun>*>(kStoresRuns ? to + t : staged) =
        narrow_vector(values[0]);
  }
}

// Stores the runs that store_run has left in shared memory.
__device__ __forceinline__ void store_staged(Scalar* to, const Scalar* staged, int first,
                                             int length) {
  if constexpr (!kLast && !kStoresRuns) {
    constexpr int kStore = C::store_vector;
    using Stored = Vector<Scalar, kStore>;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x) * kStore; i < kTile; i += kThreads * kStore) {
      if (first + i >= length) break;
      *reinterpret_cast<Stored*>(to + first + i) = *reinterpret_cast<const Stored*>(staged + i);
    }
  }
}

}  // namespace causal
}  // namespace fastconv
