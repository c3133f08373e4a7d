// Calls on a CPU that the CPU kernels compute (cpu/kernels.h).
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>

#include <numeric>

#include "cpu/kernels.h"
#include "entry.h"

namespace fastconv::host {

// How the kernels compute a call; backends/cpu/plans.py has a class of the same name.
struct CpuPlan {
  cpu::Kernel kernel;
  cpu::Blocks blocks;
};

inline cpu::Kernel cpu_kernel(std::string_view name) {
  if (name == "depthwise") return cpu::kDepthwise;
  if (name == "pointwise") return cpu::kPointwise;
  TORCH_INTERNAL_ASSERT(name == "direct", "no CPU kernel ", name);
  return cpu::kDirect;
}

inline void parallel_for(int64_t count, cpu::Parallel::Body body, void* context) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

inline void in_this_thread(int64_t count, cpu::Parallel::Body body, void* context) {
  if (count > 0) body(context, 0, count);
}

// How to run a pass: work of a few microseconds is not worth waking other threads. Depthwise
// layers take longer for a product, as they use each element that they read for few of them.
template <class Pass>
cpu::Parallel threads_for(const Pass& pass, const CpuPlan& plan) {
  constexpr double kLeast = 1 << 20;
  const double products = double(pass.images * pass.groups) * double(pass.depth * pass.channels) *
                          double(pass.rows.outputs * pass.rows.taps) *
                          double(pass.columns.outputs * pass.columns.taps);
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const bool is_short = products * (plan.kernel == cpu::kDepthwise ? 8 : 1) < kLeast;
  return threads == 1 || is_short ? cpu::Parallel(in_this_thread)
                                  : cpu::Parallel(parallel_for, threads);
}

inline cpu::Type cpu_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return cpu::kFloat32;
    case at::kDouble:
      return cpu::kFloat64;
    case at::kBFloat16:
      return cpu::kBfloat16;
    default:
      TORCH_INTERNAL_ASSERT(tensor.scalar_type() == at::kHalf);
      return cpu::kFloat16;
  }
}

inline cpu::Images images_of(const Tensor& tensor) {
  if (!tensor.defined()) return {nullptr, {}};
  return {const_cast<void*>(tensor.const_data_ptr()),
          {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)}};
}

// The axis along which a forward pass reads its input. The stride of a single output and the
// dilation of a single tap have no effect, and may be so large that places would overflow.
inline cpu::Axis axis_of(const Geometry& g, size_t axis, const Tensor& image, const Tensor& output,
                         int64_t taps) {
  const int64_t size = image.size(2 + axis), before = g.padding[2 * axis],
                padded = size + before + g.padding[2 * axis + 1];
  return {size,
          output.size(2 + axis),
          taps,
          std::min(g.stride[axis], padded),
          std::min(g.dilation[axis], padded),
          before};
}

// The elements of an axis equal modulo the stride, and how they gather from the outputs by some of
// the taps: ops in backends/cpu/axes.py do the same.
struct Residue {
  int64_t first, tap,
      tap_step;  // the first element; the last of its taps, and the step between two
  cpu::Axis axis;
};

inline std::vector<Residue> residues_of(const cpu::Axis& axis) {
  std::vector<Residue> found;
  const int64_t common = std::gcd(axis.step, axis.reach), tap_step = axis.step / common;
  for (int64_t first = 0; first < std::min(axis.step, axis.size); ++first) {
    int64_t start = 0;
    while (start < axis.taps && (first + axis.before - start * axis.reach) % axis.step) ++start;
    const int64_t taps = (axis.taps - start + tap_step - 1) / tap_step, reach = axis.reach / common;
    // Later taps read earlier elements, so the taps are gathered from the last to the first.
    const int64_t before =
        taps ? (start * axis.reach - first - axis.before) / axis.step + (taps - 1) * reach : 0;
    found.push_back(
        {first,
         start + (taps - 1) * tap_step,
         -tap_step,
         {axis.outputs, (axis.size - first + axis.step - 1) / axis.step, taps, 1, reach, before}});
  }
  return found;
}

inline bool is_applied_by_kernels(int64_t activation) {
  const std::string_view name = kActivations[activation];
  return name == "identity" || name == "relu" || name == "relu6" || name == "leaky_relu" ||
         name == "hardswish";
}

inline cpu::Activation cpu_activation(const Call& call) {
  const std::string_view name = kActivations[call.activation];
  return name == "relu"         ? cpu::kRelu
         : name == "relu6"      ? cpu::kRelu6
         : name == "leaky_relu" ? cpu::kLeakyRelu
         : name == "hardswish"  ? cpu::kHardswish
                                : cpu::kIdentity;
}

// What forward passes and input gradients have in common.
inline cpu::Gather gather_of(const Call& call, const CpuPlan& plan, const Tensor& result) {
  cpu::Gather pass{};
  pass.type = cpu_type(result);
  pass.images = result.size(0);
  pass.groups = call.geometry.groups;
  pass.depth = call.first.size(1) / pass.groups;
  pass.channels = result.size(1) / pass.groups;
  pass.source = images_of(call.first);
  pass.target = images_of(result);
  pass.residual = images_of(call.residual);
  pass.bias = call.third.defined() ? call.third.const_data_ptr() : nullptr;
  pass.activation = cpu_activation(call);
  pass.slope = call.slope;
  pass.blocks = plan.blocks;
  return pass;
}

inline bool run_gather(const cpu::Gather& pass, const CpuPlan& plan) {
  return cpu::gather(plan.kernel, pass, threads_for(pass, plan));
}

inline bool forward_by_kernels(const Call& call, const CpuPlan& plan, const Tensor& result) {
  const Tensor& weight = call.second;
  cpu::Gather pass = gather_of(call, plan, result);
  pass.rows = axis_of(call.geometry, 0, call.first, result, weight.size(2));
  pass.columns = axis_of(call.geometry, 1, call.first, result, weight.size(3));
  pass.weights = {weight.const_data_ptr(),
                  {weight.stride(0) * pass.channels, weight.stride(0), weight.stride(1),
                   weight.stride(2), weight.stride(3)}};
  return run_gather(pass, plan);
}

inline bool input_grad_by_kernels(const Call& call, const CpuPlan& plan, const Tensor& result) {
  const Tensor& weight = call.second;
  const auto rows = axis_of(call.geometry, 0, result, call.first, weight.size(2)),
             columns = axis_of(call.geometry, 1, result, call.first, weight.size(3));
  const auto element = int64_t(result.element_size());
  const auto moved = [&](const void* data, int64_t elements) {
    return data ? static_cast<char*>(const_cast<void*>(data)) + elements * element : nullptr;
  };
  for (const Residue& row : residues_of(rows)) {
    for (const Residue& column : residues_of(columns)) {
      cpu::Gather pass = gather_of(call, plan, result);
      pass.rows = row.axis;
      pass.columns = column.axis;
      pass.needs_finite_weights = true;
      for (cpu::Images* images : {&pass.target, &pass.residual}) {
        auto& s = images->strides;
        images->data = moved(images->data, row.first * s[2] + column.first * s[3]);
        s[2] *= rows.step;
        s[3] *= columns.step;
      }
      const int64_t down = weight.stride(2), right = weight.stride(3);
      pass.weights = {moved(weight.const_data_ptr(), row.tap * down + column.tap * right),
                      {weight.stride(0) * pass.depth, weight.stride(1), weight.stride(0),
                       row.tap_step * down, column.tap_step * right}};
      if (!run_gather(pass, plan)) return false;
    }
  }
  return true;
}

inline void weight_grad_by_kernels(const Call& call, const CpuPlan& plan, const Tensor& result) {
  const Tensor &grad = call.first, &input = call.second;
  const int64_t groups = call.geometry.groups;
  cpu::WeightGrad pass{};
  pass.type = cpu_type(result);
  pass.images = input.size(0);
  pass.groups = groups;
  pass.depth = input.size(1) / groups;
  pass.channels = grad.size(1) / groups;
  pass.rows = axis_of(call.geometry, 0, input, grad, result.size(2));
  pass.columns = axis_of(call.geometry, 1, input, grad, result.size(3));
  pass.input = images_of(input);
  pass.grad = images_of(grad);
  pass.target = {result.const_data_ptr(),
                 {result.stride(0) * pass.channels, result.stride(0), result.stride(1),
                  result.stride(2), result.stride(3)}};
  pass.blocks = plan.blocks;
  cpu::weight_grad(plan.kernel, pass, threads_for(pass, plan));
}

// Computes a call, or returns false if its numbers need another way.
inline bool compute_by_kernels(const Call& call, const CpuPlan& plan, const Tensor& result,
                               const Tensor& bias_grad) {
  if (call.pass == kWeightGrad) {
    weight_grad_by_kernels(call, plan, result);
    if (bias_grad.defined()) bias_grad.copy_(call.first.sum(all_but_channels(call.first)));
    return true;
  }
  return call.pass == kForward || call.pass == kFused ? forward_by_kernels(call, plan, result)
                                                      : input_grad_by_kernels(call, plan, result);
}

}  // namespace fastconv::host
