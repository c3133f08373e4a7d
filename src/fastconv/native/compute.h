// The operators computed tap by tap with PyTorch's matrix multiplication, for CPU tensors where
// there is no Python.
//
// Each tap of the kernel multiplies the rows and columns of the image that it meets, a strided
// slice, by a matrix of channels. So no padded or unfolded copy of the image is made. Numbers of 16
// bits are summed in float32, and rounded once.
#pragma once

#include <ATen/ops/clamp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>

#include "entry.h"

namespace fastconv::host {

// --- The form of a call --------------------------------------------------------------------------

// The sizes of a convolution, whichever of its passes a call computes.
struct Sizes {
  int64_t batch, in_channels, out_channels;
  std::array<int64_t, 2> image{}, kernel{}, output{};
};

inline void check_geometry(const Geometry& g) {
  constexpr int64_t kLimit = int64_t(1) << 31;  // keeps sums and products within 64 bits
  const auto check = [](const char* name, const auto& values, int64_t least) {
    for (const int64_t value : values) {
      TORCH_CHECK(value >= least && value < kLimit, "fastconv takes a ", name, " from ", least,
                  " to 2**31 - 1, but got ", value);
    }
  };
  check("stride", g.stride, 1);
  check("padding", g.padding, 0);
  check("dilation", g.dilation, 1);
  check("number of groups", std::array{g.groups}, 1);
}

inline void check_tensors(const Call& call) {
  const Tensor& first = call.first;
  for (const Tensor* tensor : {&call.first, &call.second, &call.third, &call.residual}) {
    if (!tensor->defined()) continue;
    TORCH_CHECK(tensor->layout() == at::kStrided && tensor->device() == first.device() &&
                    tensor->scalar_type() == first.scalar_type(),
                "fastconv::", kOperators[call.pass],
                " takes dense tensors of one type and one device");
    const bool is_bias = tensor == &call.third;
    TORCH_CHECK(tensor->dim() == (is_bias ? 1 : 4), "fastconv::", kOperators[call.pass],
                " takes 4-D tensors and a 1-D bias, but got one of size ", tensor->sizes());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      first.scalar_type() != at::kBool && !c10::isFloat8Type(first.scalar_type()),
      "fastconv is not implemented for ", first.scalar_type());
}

// Checks the arguments of a call, and returns the convolution's sizes.
inline Sizes sizes_of(const Call& call) {
  const Geometry& g = call.geometry;
  check_geometry(g);
  check_tensors(call);
  const auto first = call.first.sizes(), second = call.second.sizes();
  Sizes sizes{first[0], 0, 0};
  if (call.pass == kInputGrad) {
    sizes = {first[0], second[1] * g.groups, second[0], call.size, {second[2], second[3]}};
  } else if (call.pass == kWeightGrad) {
    sizes = {first[0], second[1], first[1], {second[2], second[3]}, call.size};
  } else {
    sizes = {first[0], first[1], second[0], {first[2], first[3]}, {second[2], second[3]}};
    TORCH_CHECK(first[1] == second[1] * g.groups, "Given groups=", g.groups, ", weight of size ",
                second, ", expected input of ", second[1] * g.groups, " channels, but got ", first);
  }
  TORCH_CHECK(sizes.in_channels % g.groups == 0 && sizes.out_channels % g.groups == 0,
              "fastconv takes channels that ", g.groups,
              " groups divide, but got tensors of sizes ", first, " and ", second);
  for (const size_t axis : {0, 1}) {
    const int64_t padded = sizes.image[axis] + g.padding[2 * axis] + g.padding[2 * axis + 1],
                  extent = g.dilation[axis] * (sizes.kernel[axis] - 1) + 1;
    TORCH_CHECK(sizes.kernel[axis] > 0 && padded >= extent, "a kernel of ", extent,
                " rows or columns does not fit into a padded input of ", padded);
    sizes.output[axis] = (padded - extent) / g.stride[axis] + 1;
  }
  return sizes;
}

// Checks the tensors that have the output's size, its channels or its images.
inline void check_outputs(const Call& call, const Sizes& sizes) {
  const std::array shape{sizes.batch, sizes.out_channels, sizes.output[0], sizes.output[1]};
  const at::IntArrayRef expected(shape);
  const bool is_gradient = call.pass == kInputGrad || call.pass == kWeightGrad;
  const Tensor& output = is_gradient ? call.first : call.residual;
  const auto given = output.defined() ? output.sizes() : expected;
  TORCH_CHECK(given == expected, "fastconv expected ", is_gradient ? "grad_output" : "a residual",
              " of size ", expected, ", but got ", given);
  TORCH_CHECK(!call.third.defined() || call.third.size(0) == sizes.out_channels,
              "fastconv expected a bias of ", sizes.out_channels, " elements");
  TORCH_CHECK(call.pass != kWeightGrad || call.second.size(0) == sizes.batch,
              "fastconv expected as many images as gradients");
}

// --- Arithmetic ----------------------------------------------------------------------------------

// The tensor in the type that its products are added in.
inline Tensor widened(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  if (type == at::kHalf || type == at::kBFloat16) return tensor.to(at::kFloat);
  return type == at::kComplexHalf ? tensor.to(at::kComplexFloat) : tensor;
}

inline Tensor activated(const Tensor& sum, int64_t activation, double slope) {
  const std::string_view name = kActivations[activation];
  if (name == "relu") return at::relu(sum);
  if (name == "relu6") return at::clamp(sum, 0, 6);
  if (name == "leaky_relu") return at::leaky_relu(sum, slope);
  if (name == "silu") return at::silu(sum);
  if (name == "gelu") return at::gelu(sum);
  if (name == "gelu_tanh") return at::gelu(sum, "tanh");
  if (name == "hardswish") return at::hardswish(sum);
  if (name == "sigmoid") return at::sigmoid(sum);
  if (name == "tanh") return at::tanh(sum);
  TORCH_INTERNAL_ASSERT(activation == kIdentity, "no activation ", name);
  return sum;
}

// A product of matrices; an outer product is one of elements.
inline Tensor product(const Tensor& left, const Tensor& right) {
  return left.size(-1) == 1 ? at::mul(left, right) : at::matmul(left, right);
}

// The part of an axis that one tap meets: outputs from `first` to before `last`, and inputs from
// `first * stride + offset` on.
struct Met {
  int64_t first, last, stride, offset;

  Tensor of_image(const Tensor& image, int64_t axis) const {
    const int64_t from = first * stride + offset;
    return image.slice(axis, from, from + (last - first - 1) * stride + 1, stride);
  }
};

inline Met met_by(int64_t tap, size_t axis, const Geometry& g, const Sizes& sizes) {
  const int64_t stride = g.stride[axis], offset = tap * g.dilation[axis] - g.padding[2 * axis],
                room = sizes.image[axis] - 1 - offset;  // from the first tap's input to the last
  const int64_t first = offset < 0 ? (stride - 1 - offset) / stride : 0;
  const int64_t last = room < 0 ? 0 : std::min(sizes.output[axis], room / stride + 1);
  return {first, last, stride, offset};
}

// Calls a function for each tap, with its row and column in the kernel and with the slices of the
// image and of the output that it connects.
template <class Function>
void for_each_tap(const Tensor& image, const Tensor& output, const Geometry& g, const Sizes& sizes,
                  const Function& function) {
  for (int64_t row = 0; row < sizes.kernel[0]; ++row) {
    const Met rows = met_by(row, 0, g, sizes);
    for (int64_t column = 0; column < sizes.kernel[1]; ++column) {
      const Met columns = met_by(column, 1, g, sizes);
      if (rows.first >= rows.last || columns.first >= columns.last) continue;
      function(row, column, columns.of_image(rows.of_image(image, 2), 3),
               output.slice(2, rows.first, rows.last).slice(3, columns.first, columns.last));
    }
  }
}

// A slice of images as matrices: (images, groups, channels of a group, pixels).
inline Tensor matrices(const Tensor& slice, int64_t groups) {
  return slice.reshape(
      {slice.size(0), groups, slice.size(1) / groups, slice.size(2) * slice.size(3)});
}

inline Tensor new_sum(const Tensor& like, at::IntArrayRef shape) {
  return at::zeros(shape, like.options());
}

// One tap of a weight: (groups, output channels of a group, input channels of a group).
inline Tensor tap_of(const Tensor& weight, int64_t row, int64_t column, int64_t groups) {
  const Tensor tap = weight.select(3, column).select(2, row);
  return tap.reshape({groups, tap.size(0) / groups, tap.size(1)});
}

inline void compute_forward(const Call& call, const Sizes& sizes, const Tensor& result) {
  const Tensor image = widened(call.first), weight = widened(call.second);
  const int64_t groups = call.geometry.groups;
  Tensor sum = new_sum(image, result.sizes());
  for_each_tap(image, sum, call.geometry, sizes,
               [&](int64_t row, int64_t column, const Tensor& from, const Tensor& to) {
                 const Tensor tap = tap_of(weight, row, column, groups);
                 to.add_(product(tap, matrices(from, groups)).reshape(to.sizes()));
               });
  if (call.third.defined()) sum.add_(widened(call.third).reshape({-1, 1, 1}));
  if (call.residual.defined()) sum.add_(widened(call.residual));
  result.copy_(call.pass == kFused ? activated(sum, call.activation, call.slope) : sum);
}

inline void compute_input_grad(const Call& call, const Sizes& sizes, const Tensor& result) {
  const Tensor grad = widened(call.first), weight = widened(call.second);
  const int64_t groups = call.geometry.groups;
  const Tensor sum = new_sum(grad, result.sizes());
  for_each_tap(sum, grad, call.geometry, sizes,
               [&](int64_t row, int64_t column, const Tensor& to, const Tensor& from) {
                 const Tensor tap = tap_of(weight, row, column, groups).transpose(1, 2);
                 to.add_(product(tap, matrices(from, groups)).reshape(to.sizes()));
               });
  result.copy_(sum);
}

inline void compute_weight_grad(const Call& call, const Sizes& sizes, const Tensor& result,
                                const Tensor& bias_grad) {
  const Tensor grad = widened(call.first), image = widened(call.second);
  const int64_t groups = call.geometry.groups;
  const Tensor sum = new_sum(grad, result.sizes());
  for_each_tap(image, grad, call.geometry, sizes,
               [&](int64_t row, int64_t column, const Tensor& inputs, const Tensor& grads) {
                 // (groups, channels of a group, images, pixels): one sum over all of them.
                 const Tensor left = matrices(grads, groups).permute({1, 2, 0, 3}).flatten(2);
                 const Tensor right = matrices(inputs, groups).permute({1, 2, 0, 3}).flatten(2);
                 const Tensor tap = sum.select(3, column).select(2, row);
                 tap.copy_(at::matmul(left, right.transpose(1, 2)).reshape(tap.sizes()));
               });
  result.copy_(sum);
  if (bias_grad.defined()) bias_grad.copy_(grad.sum({0, 2, 3}));
}

inline void compute(const Call& call, Precision, const Tensor& result, const Tensor& bias_grad) {
  const Sizes sizes = sizes_of(call);
  if (call.pass == kInputGrad) return compute_input_grad(call, sizes, result);
  if (call.pass == kWeightGrad) return compute_weight_grad(call, sizes, result, bias_grad);
  compute_forward(call, sizes, result);
}

// The entry of calls that `compute` computes.
inline std::shared_ptr<const Entry> computed_entry(const Call& call) {
  const Sizes sizes = sizes_of(call);
  check_outputs(call, sizes);
  const auto last = at::MemoryFormat::ChannelsLast;
  const bool is_last =
      call.first.suggest_memory_format() == last || call.second.suggest_memory_format() == last;
  const auto entry = std::make_shared<Entry>();
  entry->shape = {sizes.batch, sizes.out_channels, sizes.output[0], sizes.output[1]};
  if (call.pass == kInputGrad) {
    entry->shape = {sizes.batch, sizes.in_channels, sizes.image[0], sizes.image[1]};
  } else if (call.pass == kWeightGrad) {
    entry->shape = {sizes.out_channels, sizes.in_channels / call.geometry.groups, sizes.kernel[0],
                    sizes.kernel[1]};
  }
  entry->format = call.format.value_or(is_last ? last : at::MemoryFormat::Contiguous);
  entry->bias_elements = call.bias_grad ? sizes.out_channels : 0;
  entry->fill = compute;
  return entry;
}

}  // namespace fastconv::host
