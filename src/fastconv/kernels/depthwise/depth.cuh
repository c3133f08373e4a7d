// Walks along the depth of volumes: a block computes one output plane after the other, and loads
// each plane of the input once, to a ring in shared memory.
#pragma once
#include "depthwise/axis.cuh"
#include "device/depth.cuh"

namespace fastconv {
namespace depthwise {

using D = DepthOf<C>;
using Planes = Axis<C::transposed, D::kernel, D::stride, D::dilation, D::padding>;

// Output planes of a block's walk, and kernel planes of a thread in weight gradients; one of
// images.
template <class Config, class = void>
struct WalkOf {
  static constexpr int value = 1;
};
template <class Config>
struct WalkOf<Config, typename Exists<decltype(Config::walk)>::type> {
  static constexpr int value = Config::walk;
};
template <class Config, class = void>
struct TapPlanesOf {
  static constexpr int value = 1;
};
template <class Config>
struct TapPlanesOf<Config, typename Exists<decltype(Config::tap_planes)>::type> {
  static constexpr int value = Config::tap_planes;
};
constexpr int kWalk = WalkOf<C>::value;
constexpr int kTapPlanes = TapPlanesOf<C>::value;

// Planes that an output plane reads at most, and those that the next one of a walk reads besides.
constexpr int kReadPlanes = Planes::kFractional ? ceil_div(D::kernel, D::stride) : D::kernel;
constexpr int kNextPlanes = Planes::kFractional ? 1 : min_of(Planes::kStep, D::kernel);
// Output planes that share planes of the input are kOutStep apart: a residue of them is walked
// through together, by position.
constexpr int kPlaneResidues = min_of(Planes::kOutStep, D::out);
constexpr int kPlanePositions = ceil_div(D::out, Planes::kOutStep);
constexpr int kWalksOfResidue = ceil_div(kPlanePositions, kWalk);
constexpr int kWalks = kPlaneResidues * kWalksOfResidue;

// The output planes of a walk: positions of a residue.
struct Walk {
  int residue, first, end;

  __device__ explicit Walk(int index)
      : residue(index / kWalksOfResidue),
        first(index % kWalksOfResidue * kWalk),
        end(min_of(first + kWalk, ceil_div(D::out - residue, Planes::kOutStep))) {}
};

// An output plane, and the planes of the input that it reads: number 0 to kReadPlanes - 1.
struct OutputPlane {
  int position, z;

  __device__ OutputPlane(int residue, int position)
      : position(position), z(position * Planes::kOutStep + residue) {}
  // The planes before the first of a residue would be those of another one.
  __device__ bool exists() const { return z < D::out; }
  __device__ int input(int number) const {
    if (Planes::kFractional) return (z + D::padding) / D::stride - (kReadPlanes - 1) + number;
    return z * Planes::kTimes + Planes::kOrigin + number * Planes::kUnit;
  }
  __device__ int tap(int number) const {
    if (Planes::kFractional) return z + D::padding - input(number) * D::stride;
    return C::transposed ? D::kernel - 1 - number : number;
  }
  // Whether there is such a plane, and a tap that reads it.
  __device__ bool reads(int number) const {
    return static_cast<unsigned>(input(number)) < static_cast<unsigned>(D::in) &&
           (!Planes::kFractional || tap(number) < D::kernel);
  }
  // The first of the planes that no output before it in the walk reads.
  __device__ int first_new() const {
    if (Planes::kFractional) return kReadPlanes - ((z + D::padding) % D::stride == 0);
    return kReadPlanes - kNextPlanes;
  }
  // The place of a plane in a ring of kRing planes: the same one for all outputs of a walk.
  template <int kRing>
  __device__ int place(int number) const {
    if (Planes::kFractional) return (input(number) + kReadPlanes) % kRing;
    return (position * kNextPlanes + number) % kRing;
  }
};

// Calls load(place, plane) for the planes that an output plane reads: all of them, or those that
// are new.
template <int kRing, class Load>
__device__ __forceinline__ void load_read(const OutputPlane& at, bool all, const Load& load) {
#pragma unroll 1
  for (int number = all ? 0 : at.first_new(); number < kReadPlanes; ++number) {
    if (at.reads(number)) load(at.place<kRing>(number), at.input(number));
  }
}

// A vector that a thread copies: where it begins in a plane of the tensor, and in shared memory.
template <class Offset>
struct Located {
  Offset source;
  int place;
  bool exists;  // else zeros are written
};

// A thread's copies of the same rectangle of one plane after the other. What it copies lies at the
// same place in all planes, so places are found once and kept in registers. A `Rectangle` locates
// vectors number first(), first() + kStep and so on, below kTotal; it copies them by itself where
// they are more than kMost.
template <class Rectangle, int kMost>
struct PlaneCopies {
  static constexpr int kCount = ceil_div(Rectangle::kTotal, Rectangle::kStep);
  static constexpr bool kKept =
      Rectangle::kAtOnce && kCount <= kMost && Rectangle::kReach < 1ll << 31;

  Rectangle rectangle;
  int source[kKept ? kCount : 1];
  int place[kKept ? kCount : 1];

  PlaneCopies() = default;
  __device__ explicit PlaneCopies(const Rectangle& wanted) : rectangle(wanted) { find(wanted); }
  __device__ __forceinline__ void find(const Rectangle& wanted) {
    rectangle = wanted;
    if constexpr (kKept) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto at = rectangle.locate(Rectangle::first() + i * Rectangle::kStep);
        source[i] = at.exists ? static_cast<int>(at.source) : -1;
        place[i] = at.place;
      }
    }
  }
  __device__ __forceinline__ void copy(Scalar* target, const Scalar* plane) const {
    if constexpr (kKept) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (Rectangle::first() + i * Rectangle::kStep >= Rectangle::kTotal) continue;
        copy_elements<Rectangle::kVector>(target + place[i], plane + max_of(source[i], 0),
                                          source[i] >= 0);
      }
    } else {
      rectangle.load(target, plane);
    }
  }
};

}  // namespace depthwise
}  // namespace fastconv
