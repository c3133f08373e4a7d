// One call of an operator, as a value.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fastconv::host {

using at::Tensor;

// The operators. All but kBackward are one pass; kBackward is two.
enum Pass : int64_t { kForward, kInputGrad, kWeightGrad, kFused, kTransposed, kBackward };
constexpr std::array kOperators = {"forward", "input_grad", "weight_grad",
                                   "fused",   "transposed", "backward"};
constexpr bool has_epilogue(Pass pass) { return pass == kFused || pass == kTransposed; }

// The activations of problem.py. Python raises the error for any other name.
constexpr std::array kActivations = {"identity", "relu",      "relu6",     "leaky_relu", "silu",
                                     "gelu",     "gelu_tanh", "hardswish", "sigmoid",    "tanh"};
constexpr int64_t kIdentity = 0, kLeakyRelu = 3;
constexpr double kLeakySlope = 0.01;  // the default of PyTorch's leaky_relu

enum Precision : int64_t { kIeee, kTf32, kPyTorchs };  // kPyTorchs: PyTorch's current setting
constexpr std::array kPrecisions = {"ieee", "tf32"};

struct Geometry {
  std::array<int64_t, 2> stride;
  std::array<int64_t, 4> padding;  // top, bottom, left, right
  std::array<int64_t, 2> dilation;
  int64_t groups;
  int64_t precision;

  static constexpr size_t kNumbers = 10;

  std::vector<int64_t> numbers() const {
    return {stride[0],  stride[1],   padding[0],  padding[1], padding[2],
            padding[3], dilation[0], dilation[1], groups,     precision};
  }

  static Geometry of(const std::vector<int64_t>& n) {
    TORCH_INTERNAL_ASSERT(n.size() == kNumbers);
    return {{n[0], n[1]}, {n[2], n[3], n[4], n[5]}, {n[6], n[7]}, n[8], n[9]};
  }
};

// One call of an operator: the forward pass of an input and a weight, or a gradient of the output's
// gradient and one of these.
struct Call {
  Pass pass;
  Tensor first{}, second{};  // the operator's first two tensors
  Tensor third{};            // the bias of a convolution
  Geometry geometry{};
  // The input's or kernel's size, an argument of gradients; a transposed one's output padding.
  std::array<int64_t, 2> size{};
  std::optional<at::MemoryFormat> format{};  // the memory format of a gradient
  bool bias_grad = false;                    // whether a weight gradient computes the bias's too
  bool sequences = false;  // whether tensors have no rows: (N, C, L) instead of (N, C, 1, L)
  int64_t frozen = 0;      // the store's period in which the packed weight may be cached, or 0
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

}  // namespace fastconv::host
