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
  Axes image, kernel, output;
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
    const int64_t rank = 2 + call.geometry.axes();
    TORCH_CHECK(tensor->dim() == (is_bias ? 1 : rank), "fastconv::", kOperators[call.pass],
                " takes ", rank, "-D tensors and a 1-D bias, but got one of size ",
                tensor->sizes());
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
  const size_t axes = g.axes();
  Sizes sizes{first[0], 0, 0, Axes(axes), Axes(axes), Axes(axes)};
  if (call.pass == kInputGrad) {
    sizes = {first[0],  second[1] * g.groups, second[0],
             call.size, size_of(call.second), Axes(axes)};
  } else if (call.pass == kTransposed) {
    sizes = {first[0],   second[1] * g.groups, second[0],
             Axes(axes), size_of(call.second), Axes(axes)};
    for (size_t axis = 0; axis < axes; ++axis) {
      const int64_t extent = g.dilation[axis] * (sizes.kernel[axis] - 1) + 1,
                    whole = (first[2 + axis] - 1) * g.stride[axis] + extent + call.size[axis];
      sizes.image[axis] = whole - g.padding[2 * axis] - g.padding[2 * axis + 1];
      TORCH_CHECK(sizes.image[axis] > 0, "the output of fastconv::transposed would have ",
                  sizes.image[axis], " positions along an axis");
    }
  } else if (call.pass == kWeightGrad) {
    sizes = {first[0], second[1], first[1], size_of(call.second), call.size, Axes(axes)};
  } else {
    sizes = {first[0], first[1], second[0], size_of(call.first), size_of(call.second), Axes(axes)};
    TORCH_CHECK(first[1] == second[1] * g.groups, "Given groups=", g.groups, ", weight of size ",
                second, ", expected input of ", second[1] * g.groups, " channels, but got ", first);
  }
  TORCH_CHECK(sizes.in_channels % g.groups == 0 && sizes.out_channels % g.groups == 0,
              "fastconv takes channels that ", g.groups,
              " groups divide, but got tensors of sizes ", first, " and ", second);
  for (size_t axis = 0; axis < axes; ++axis) {
    const int64_t padded = sizes.image[axis] + g.padding[2 * axis] + g.padding[2 * axis + 1],
                  extent = g.dilation[axis] * (sizes.kernel[axis] - 1) + 1;
    TORCH_CHECK(sizes.kernel[axis] > 0 && padded >= extent, "a kernel of ", extent,
                " positions does not fit into a padded input of ", padded);
    sizes.output[axis] = (padded - extent) / g.stride[axis] + 1;
  }
  return sizes;
}

// The shape of a tensor: its first two sizes, and those along all axes.
inline std::vector<int64_t> shape_of(int64_t first, int64_t second, const Axes& sizes) {
  std::vector<int64_t> shape{first, second};
  shape.insert(shape.end(), sizes.begin(), sizes.end());
  return shape;
}

// Checks the tensors that have the output's size, its channels or its images.
inline void check_outputs(const Call& call, const Sizes& sizes) {
  const auto shape = shape_of(sizes.batch, sizes.out_channels, sizes.output);
  const at::IntArrayRef expected(shape);
  const bool is_transposed = call.pass == kTransposed;
  const bool is_gradient = call.pass == kInputGrad || call.pass == kWeightGrad;
  const Tensor& output = is_gradient || is_transposed ? call.first : call.residual;
  const auto given = output.defined() ? output.sizes() : expected;
  const char* name = is_gradient ? "grad_output" : is_transposed ? "an input" : "a residual";
  TORCH_CHECK(given == expected, "fastconv expected ", name, " of size ", expected, ", but got ",
              given);
  const auto image = shape_of(sizes.batch, sizes.in_channels, sizes.image);
  TORCH_CHECK(
      !is_transposed || !call.residual.defined() || call.residual.sizes() == at::IntArrayRef(image),
      "fastconv expected a residual of size ", at::IntArrayRef(image), ", but got ",
      call.residual.sizes());
  const int64_t channels = is_transposed ? sizes.in_channels : sizes.out_channels;
  TORCH_CHECK(!call.third.defined() || call.third.size(0) == channels,
              "fastconv expected a bias of ", channels, " elements");
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

// Calls a function for each tap that meets the image, with the slices of the image and of the
// output that the tap connects, and with its own slice of the weight, from which `axis` on all axes
// are left.
template <class Function>
void for_each_tap(const Tensor& image, const Tensor& output, const Tensor& weight,
                  const Geometry& g, const Sizes& sizes, const Function& function,
                  size_t axis = 0) {
  if (axis == g.axes()) return function(image, output, weight);
  const int64_t dim = 2 + int64_t(axis);
  for (int64_t tap = 0; tap < sizes.kernel[axis]; ++tap) {
    const Met met = met_by(tap, axis, g, sizes);
    if (met.first >= met.last) continue;
    for_each_tap(met.of_image(image, dim), output.slice(dim, met.first, met.last),
                 weight.select(2, tap), g, sizes, function, axis + 1);
  }
}

// A slice of images as matrices: (images, groups, channels of a group, pixels).
inline Tensor matrices(const Tensor& slice, int64_t groups) {
  const int64_t pixels = c10::multiply_integers(slice.sizes().slice(2));
  return slice.reshape({slice.size(0), groups, slice.size(1) / groups, pixels});
}

inline Tensor new_sum(const Tensor& like, at::IntArrayRef shape) {
  return at::zeros(shape, like.options());
}

// One tap of a weight: (groups, output channels of a group, input channels of a group).
inline Tensor by_group(const Tensor& tap, int64_t groups) {
  return tap.reshape({groups, tap.size(0) / groups, tap.size(1)});
}

// Fills the result with activation(sum + bias + residual).
inline void finish(const Call& call, const Tensor& sum, const Tensor& result) {
  if (call.third.defined()) {
    std::vector<int64_t> shape(1 + call.geometry.axes(), 1);
    shape[0] = -1;
    sum.add_(widened(call.third).reshape(shape));
  }
  if (call.residual.defined()) sum.add_(widened(call.residual));
  result.copy_(activated(sum, call.activation, call.slope));
}

inline void compute_forward(const Call& call, const Sizes& sizes, const Tensor& result) {
  const Tensor image = widened(call.first), weight = widened(call.second);
  const int64_t groups = call.geometry.groups;
  Tensor sum = new_sum(image, result.sizes());
  for_each_tap(image, sum, weight, call.geometry, sizes,
               [&](const Tensor& from, const Tensor& to, const Tensor& tap) {
                 const Tensor left = by_group(tap, groups);
                 to.add_(product(left, matrices(from, groups)).reshape(to.sizes()));
               });
  finish(call, sum, result);
}

inline void compute_input_grad(const Call& call, const Sizes& sizes, const Tensor& result) {
  const Tensor grad = widened(call.first), weight = widened(call.second);
  const int64_t groups = call.geometry.groups;
  const Tensor sum = new_sum(grad, result.sizes());
  for_each_tap(sum, grad, weight, call.geometry, sizes,
               [&](const Tensor& to, const Tensor& from, const Tensor& tap) {
                 const Tensor left = by_group(tap, groups).transpose(1, 2);
                 to.add_(product(left, matrices(from, groups)).reshape(to.sizes()));
               });
  finish(call, sum, result);
}

inline void compute_weight_grad(const Call& call, const Sizes& sizes, const Tensor& result,
                                const Tensor& bias_grad) {
  const Tensor grad = widened(call.first), image = widened(call.second);
  const int64_t groups = call.geometry.groups;
  const Tensor sum = new_sum(grad, result.sizes());
  for_each_tap(image, grad, sum, call.geometry, sizes,
               [&](const Tensor& inputs, const Tensor& grads, const Tensor& tap) {
                 // (groups, channels of a group, images, pixels): one sum over all of them.
                 const Tensor left = matrices(grads, groups).permute({1, 2, 0, 3}).flatten(2);
                 const Tensor right = matrices(inputs, groups).permute({1, 2, 0, 3}).flatten(2);
                 tap.copy_(at::matmul(left, right.transpose(1, 2)).reshape(tap.sizes()));
               });
  result.copy_(sum);
  if (bias_grad.defined()) bias_grad.copy_(grad.sum(all_but_channels(grad)));
}

inline void compute(const Call& call, Precision, const Tensor& result, const Tensor& bias_grad) {
  const Sizes sizes = sizes_of(call);
  if (call.pass == kInputGrad || call.pass == kTransposed) {
    return compute_input_grad(call, sizes, result);
  }
  if (call.pass == kWeightGrad) return compute_weight_grad(call, sizes, result, bias_grad);
  compute_forward(call, sizes, result);
}

// The entry of calls that `compute` computes.
inline std::shared_ptr<const Entry> computed_entry(const Call& call) {
  const Sizes sizes = sizes_of(call);
  check_outputs(call, sizes);
  const auto entry = std::make_shared<Entry>();
  entry->shape = shape_of(sizes.batch, sizes.out_channels, sizes.output);
  if (call.pass == kInputGrad || call.pass == kTransposed) {
    entry->shape = shape_of(sizes.batch, sizes.in_channels, sizes.image);
  } else if (call.pass == kWeightGrad) {
    entry->shape =
        shape_of(sizes.out_channels, sizes.in_channels / call.geometry.groups, sizes.kernel);
  }
  entry->format = call.format.value_or(joint_format(call.first, call.second));
  entry->bias_elements = call.bias_grad ? sizes.out_channels : 0;
  entry->fill = compute;
  return entry;
}

}  // namespace fastconv::host
