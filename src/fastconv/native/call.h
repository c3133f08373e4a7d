// What is asked for.
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

enum Pass : int64_t { kForward, kInputGrad, kWeightGrad, kFused };
constexpr std::array kOperators = {"forward", "input_grad", "weight_grad", "fused"};

// problem.py's; any other is Python's to refuse.
constexpr std::array kActivations = {"identity", "relu",      "relu6",     "leaky_relu", "silu",
                                     "gelu",     "gelu_tanh", "hardswish", "sigmoid",    "tanh"};
constexpr int64_t kIdentity = 0, kLeakyRelu = 3;
constexpr double kLeakySlope = 0.01;  // PyTorch's, where none is given

enum Precision : int64_t { kIeee, kTf32, kPyTorchs };  // the last: whatever PyTorch is set to
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

// One call of an operator. `third` is the forward pass's bias. `size` is the input's, or the
// kernel's, where the operator is told; so are `format` (of a gradient) and `bias_grad`. A fused
// forward pass alone has what comes last.
struct Call {
  Pass pass;
  Tensor first{}, second{}, third{};
  Geometry geometry{};
  std::array<int64_t, 2> size{};
  std::optional<at::MemoryFormat> format{};
  bool bias_grad = false;
  int64_t frozen = 0;  // the store's period, in which the packed weight may be kept
  Tensor residual{};
  int64_t activation = kIdentity;
  double slope = 0;
};

// How PyTorch declares what its own convolution asks has changed twice.
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
  if (real != at::kFloat) return kIeee;  // the rest has no choice
  if (call.geometry.precision != kPyTorchs) return Precision(call.geometry.precision);
  return allows_tf32(&at::Context::allowTF32CuDNN) ? kTf32 : kIeee;
}

}  // namespace fastconv::host
