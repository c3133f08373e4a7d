// The kernels of torch.ops.fastconv.batch_norm_* for PyTorch's dispatcher, as operators.h has those
// of convolutions.
#pragma once

#include "block.h"
#include "operators.h"

namespace fastconv::host {

// --- The arguments -------------------------------------------------------------------------------

inline bool read(const IValue& value, double& number) {
  if (!value.isDouble()) return false;
  number = value.toDouble();
  return true;
}

// Reads the arguments of batch_norm_forward, in the order of its schema.
inline bool read(const IValue* values, Norm& call) {
  Tensor* const tensors[] = {&call.x,      &call.residual,     &call.weight,
                             &call.bias,   &call.running_mean, &call.running_var,
                             &call.batches};
  for (Tensor* tensor : tensors) read(*values++, *tensor);
  call.training = values[0].toBool();
  return read(values[1], call.momentum) && read(values[2], call.eps) &&
         read(values[3], kActivations, call.activation) && read(values[4], call.slope);
}

// Reads the arguments of batch_norm_backward, in the order of its schema.
inline bool read(const IValue* values, NormGrad& call) {
  Tensor* const tensors[] = {&call.grad, &call.x,    &call.beside, &call.weight,
                             &call.bias, &call.mean, &call.invstd};
  for (Tensor* tensor : tensors) read(*values++, *tensor);
  call.of_batch = values[0].toBool();
  call.residual = values[1].toBool();
  call.wants_x = values[4].toBool();
  call.wants_parameters = values[5].toBool();
  call.wants_residual = values[6].toBool();
  return read(values[2], kActivations, call.activation) && read(values[3], call.slope);
}

// --- The kernels ---------------------------------------------------------------------------------

// Whether a call is served here: Python takes those of other devices, of tensors without elements
// and of a single axis, and those that only it explains.
inline bool is_served(c10::DispatchKeySet keys, const Tensor& x) {
  return has_only_autograd(keys) && x.dim() >= 2 && x.numel() > 0;
}

template <Level kLevel>
void norm_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t kCount = 12;
  Norm call;
  if (bypassed || !serving || !read(&torch::jit::peek(*stack, 0, kCount), call) ||
      !is_served(keys, call.x) || !has_dense_statistics(call)) {
    return replaced(kNorm, kLevel, op, stack);
  }
  bool recorded = false;
  if constexpr (kLevel == kAutograd) {
    if (has_tangent(call.x, call.residual, call.weight, call.bias)) {
      return replaced(kNorm, kLevel, op, stack);
    }
    recorded = is_recorded(call.x, call.residual, call.weight, call.bias);
  }
  const Normalized made = recorded ? record(call) : run(call);
  torch::jit::drop(*stack, kCount);
  torch::jit::push(*stack, made.y, made.mean, made.invstd);
}

// A gradient that the operator returns: an empty tensor for one that is not wanted.
inline Tensor given_back(const Tensor& gradient, const Tensor& x, at::ScalarType type) {
  return gradient.defined() ? gradient : x.new_empty({0}, type);
}

template <Level kLevel>
void norm_grad_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t kCount = 14;
  NormGrad call{};
  if (bypassed || !serving || !read(&torch::jit::peek(*stack, 0, kCount), call) ||
      !is_served(keys, call.x)) {
    return replaced(kNormGrad, kLevel, op, stack);
  }
  NormGradients made = run(call);
  if (call.activation == kIdentity) made.residual.reset();  // it is `grad`, which callers have
  const auto type = call.x.scalar_type();
  const auto parameter = call.weight.defined() ? call.weight.scalar_type() : type;
  torch::jit::drop(*stack, kCount);
  torch::jit::push(
      *stack, given_back(made.x, call.x, type), given_back(made.residual, call.x, type),
      given_back(made.weight, call.x, parameter), given_back(made.bias, call.x, parameter));
}

// Registers these kernels, as `implement_operators` does. PyTorch's own kernel for operators
// without derivatives stays that of batch_norm_backward for autograd.
inline void implement_norms() {
  NoWarnings silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  implement<&norm_kernel<kCpu>>(kNorm, kCpu);
  implement<&norm_kernel<kCuda>>(kNorm, kCuda);
  implement<&norm_kernel<kAutograd>>(kNorm, kAutograd);
  implement<&norm_grad_kernel<kCpu>>(kNormGrad, kCpu);
  implement<&norm_grad_kernel<kCuda>>(kNormGrad, kCuda);
}

}  // namespace fastconv::host
