// One call of an operator, as a value.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fastconv::host {

using at::Tensor;

// The operators. Those before kBackward are one pass of a convolution, and kBackward is two; those
// behind it are of batch normalization (norm.h).
enum Pass : int64_t {
  kForward,
  kInputGrad,
  kWeightGrad,
  kFused,
  kTransposed,
  kBackward,
  kNorm,
  kNormGrad
};
constexpr std::array kOperators = {
    "forward",    "input_grad", "weight_grad",        "fused",
    "transposed", "backward",   "batch_norm_forward", "batch_norm_backward"};
constexpr bool has_epilogue(Pass pass) { return pass == kFused || pass == kTransposed; }

// The activations of problem.py. Python raises the error for any other name.
constexpr std::array kActivations = {"identity", "relu",      "relu6",     "leaky_relu", "silu",
                                     "gelu",     "gelu_tanh", "hardswish", "sigmoid",    "tanh"};
constexpr int64_t kIdentity = 0, kLeakyRelu = 3;
constexpr double kLeakySlope = 0.01;  // the default of PyTorch's leaky_relu

enum Precision : int64_t { kIeee, kTf32, kPyTorchs };  // kPyTorchs: PyTorch's current setting
constexpr std::array kPrecisions = {"ieee", "tf32"};

// So many numbers for each axis: rows and columns, and before them the depth of volumes.
template <size_t kEach>
class PerAxis {
 public:
  explicit PerAxis(size_t axes = 2, int64_t value = 0) : size_(axes * kEach) {
    std::fill(begin(), end(), value);
  }

  size_t size() const { return size_; }
  int64_t* begin() { return values_.data(); }
  int64_t* end() { return begin() + size_; }
  const int64_t* begin() const { return values_.data(); }
  const int64_t* end() const { return begin() + size_; }
  int64_t& operator[](size_t i) { return values_[i]; }
  int64_t operator[](size_t i) const { return values_[i]; }
  operator at::IntArrayRef() const { return {begin(), size_}; }
  std::vector<int64_t> list() const { return {begin(), end()}; }

 private:
  size_t size_;
  std::array<int64_t, 3 * kEach> values_;
};

using Axes = PerAxis<1>;
using Sides = PerAxis<2>;  // before and after

struct Geometry {
  Axes stride;
  Sides padding;
  Axes dilation;
  int64_t groups;
  int64_t precision;

  static Geometry along(size_t axes) { return {Axes(axes, 1), Sides(axes), Axes(axes, 1), 1, 0}; }

  size_t axes() const { return stride.size(); }

  std::vector<int64_t> numbers() const {
    std::vector<int64_t> all = stride.list();
    all.insert(all.end(), padding.begin(), padding.end());
    all.insert(all.end(), dilation.begin(), dilation.end());
    all.insert(all.end(), {groups, precision});
    return all;
  }

  static Geometry of(const std::vector<int64_t>& n) {
    Geometry g = along((n.size() - 2) / 4);
    TORCH_INTERNAL_ASSERT(n.size() == 4 * g.axes() + 2);
    auto next = n.begin();
    const auto fill = [&](auto& numbers) {
      std::copy_n(next, numbers.size(), numbers.begin());
      next += numbers.size();
    };
    fill(g.stride);
    fill(g.padding);
    fill(g.dilation);
    g.groups = next[0];
    g.precision = next[1];
    return g;
  }
};

// One call of an operator: the forward pass of an input and a weight, or a gradient of the output's
// gradient and one of these.
struct Call {
  Pass pass;
  Tensor first{}, second{};  // the operator's first two tensors
  Tensor third{};            // the bias of a convolution
  Geometry geometry = Geometry::along(2);
  // The input's or kernel's size, an argument of gradients; a transposed one's output padding.
  Axes size{};
  std::optional<at::MemoryFormat> format{};  // the memory format of a gradient
  bool bias_grad = false;                    // whether a weight gradient computes the bias's too
  bool sequences = false;   // whether tensors have no rows: (N, C, L) instead of (N, C, 1, L)
  bool statistics = false;  // whether a forward pass leaves those of its output, where it can
  int64_t frozen = 0;       // the store's period in which the packed weight may be cached, or 0
  // Only passes with an epilogue have the members below.
  Tensor residual{};
  int64_t activation = kIdentity;
  double slope = 0;
};

// Whether nothing but a bias follows the convolution.
inline bool is_bare(const Call& call) {
  return call.activation == kIdentity && call.slope == 0 && !call.residual.defined();
}

// Versions of PyTorch declare the setting for its own convolution in three ways.
inline bool allows_tf32(bool (at::Context::*asks)() const) { return (at::globalContext().*asks)(); }
inline bool allows_tf32(bool (at::Context::*asks)(const std::string&) const) {
  return (at::globalContext().*asks)("conv");
}
template <class Op>
bool allows_tf32(bool (at::Context::*asks)(std::optional<Op>) const) {
  return (at::globalContext().*asks)(Op::CONV);
}

inline Precision precision_of(const Call& call) {
  const auto real = c10::toRealValueType(call.first.scalar_type());
  if (real != at::kFloat) return kIeee;  // only float32 has a choice of arithmetic
  if (call.geometry.precision != kPyTorchs) return Precision(call.geometry.precision);
  return allows_tf32(&at::Context::allowTF32CuDNN) ? kTf32 : kIeee;
}

// A tensor's sizes along all axes.
inline Axes size_of(const Tensor& tensor) {
  Axes size(tensor.dim() - 2);
  std::copy_n(tensor.sizes().begin() + 2, size.size(), size.begin());
  return size;
}

inline at::MemoryFormat channels_last(size_t rank) {
  return rank == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
}

// Whether PyTorch's results of this type are contiguous, whatever the format of the operands: on
// GPUs those of float64, and on CPUs volumes that oneDNN does not compute.
inline bool is_always_contiguous(const Tensor& like) {
  const auto type = c10::toRealValueType(like.scalar_type());
  return type == at::kDouble && (like.is_cuda() || like.dim() == 5);
}

// Channels-last if either operand has it, which is PyTorch's rule.
inline at::MemoryFormat joint_format(const Tensor& first, const Tensor& second) {
  const auto last = channels_last(first.dim());
  const bool either =
      first.suggest_memory_format() == last || second.suggest_memory_format() == last;
  return either && !is_always_contiguous(first) ? last : at::MemoryFormat::Contiguous;
}

// The dimensions that a bias's gradient is summed over.
inline std::vector<int64_t> all_but_channels(const Tensor& tensor) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < tensor.dim(); ++dim) dims.push_back(dim);
  return dims;
}

}  // namespace fastconv::host
