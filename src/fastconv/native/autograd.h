// Which calls autograd alone has to see, how it records them, and the backward pass.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <atomic>

#include "run.h"

namespace fastconv::host {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- Which calls are plain -----------------------------------------------------------------------

template <class... Tensors>
c10::DispatchKeySet keys_of(const Tensor& first, const Tensors&... others) {
  auto keys = first.key_set();
  ((keys = others.defined() ? keys | others.key_set() : keys), ...);
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (keys | local.included_) - local.excluded_;
}

inline std::atomic<bool> bypassed = false;  // true while planner.only asks for other plans

// Whether the dispatcher would, for these keys, only record the call for autograd and call the
// device's kernel: there is no transform, mode, subclass, tracer, lazy conjugate or second device.
inline bool has_only_autograd(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  const auto rest = keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                    c10::DispatchKeySet(DispatchKey::BackendSelect);
  return rest == c10::DispatchKeySet(DispatchKey::CUDA) ||
         rest == c10::DispatchKeySet(DispatchKey::CPU);
}

// Whether a call need not go through the dispatcher. A profiler and a bypass have no dispatch key.
inline bool is_plain(c10::DispatchKeySet keys) {
  return has_only_autograd(keys) && !at::hasCallbacks() && !bypassed;
}

template <class... Tensors>
bool is_recorded(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && ((tensors.defined() && tensors.requires_grad()) || ...);
}

template <class... Tensors>
bool has_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

// --- Autograd ------------------------------------------------------------------------------------

// Computes a gradient operator, for which autocast has no rule. If autograd records it, Python
// computes it, called through the dispatcher.
inline Results gradient(const Call& call) {
  const auto keys = keys_of(call.first, call.second) - c10::autocast_dispatch_keyset;
  if (is_plain(keys) && !is_recorded(call.first, call.second) &&
      !has_tangent(call.first, call.second)) {
    return run(call);
  }
  const Geometry& g = call.geometry;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      (std::string("fastconv::") + kOperators[call.pass]).c_str(), "");
  const at::IValue precision =
      g.precision == kPyTorchs ? at::IValue() : at::IValue(kPrecisions[g.precision]);
  torch::jit::Stack stack{call.first,
                          call.second,
                          at::IntArrayRef(call.size),
                          at::IntArrayRef(g.stride),
                          at::IntArrayRef(g.padding),
                          at::IntArrayRef(g.dilation),
                          g.groups,
                          precision};
  if (call.pass == kWeightGrad) stack.emplace_back(call.bias_grad);
  stack.emplace_back(call.format);
  op.callBoxed(stack);
  return {stack[0].toTensor(), stack.size() > 1 ? stack[1].toTensor() : Tensor()};
}

inline Tensor conjugate(const Tensor& tensor) {
  return tensor.is_complex() ? tensor.conj() : tensor;
}

inline Tensor sum_of_positions(const Tensor& grad) {
  if (grad.scalar_type() != at::kComplexHalf) return grad.sum({0, 2, 3});
  return at::view_as_complex(at::view_as_real(grad.resolve_conj()).sum({0, 2, 3}));
}

// In PyTorch both gradients of a convolution have the memory format of its output; complex ones are
// contiguous.
inline at::MemoryFormat gradient_format(const Tensor& input, const Tensor& weight) {
  const auto type = input.scalar_type();
  const bool never = input.is_complex() || (type == at::kDouble && input.is_cuda());
  const auto last = at::MemoryFormat::ChannelsLast;
  const bool either =
      input.suggest_memory_format() == last || weight.suggest_memory_format() == last;
  return either && !never ? last : at::MemoryFormat::Contiguous;
}

inline std::array<int64_t, 2> size_of(const Tensor& tensor) {
  return {tensor.size(2), tensor.size(3)};
}

// --- Sequences -----------------------------------------------------------------------------------

// A 1-D convolution is one of images with one row.
inline Tensor with_row(const Tensor& tensor) {
  return tensor.defined() ? tensor.unsqueeze(2) : tensor;
}

// Computes a call below autograd.
inline Tensor computed(const Call& call) {
  if (!call.sequences) return run(call).first;
  const at::AutoDispatchBelowADInplaceOrView below;  // to autograd, the output is no view
  Call images = call;
  images.sequences = false;
  for (Tensor* tensor : {&images.first, &images.second, &images.residual}) {
    *tensor = with_row(*tensor);
  }
  return run(images).first.squeeze(2);
}

// The backward pass, in the form that PyTorch's CppNode requires.
struct Conv2d {
  static constexpr bool is_traceable = true;  // compiled autograd may trace it

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(3);
    if (!grads[0].defined()) return found;
    const auto saved = context->get_saved_variables();
    const bool sequences = saved[0].dim() == 3;
    const Tensor grad = sequences ? with_row(grads[0]) : grads[0];
    const Tensor input = sequences ? with_row(saved[0]) : saved[0];
    const Tensor weight = sequences ? with_row(saved[1]) : saved[1];
    const auto geometry = Geometry::of(context->saved_data["geometry"].toIntVector());
    const auto format = gradient_format(input, weight);
    // needs_input_grad says which gradients the engine wants now, which may be fewer than recorded.
    const bool bias = context->needs_input_grad(2);
    if (context->needs_input_grad(0)) {
      found[0] =
          gradient({kInputGrad, grad, conjugate(weight), {}, geometry, size_of(input), format})
              .first;
    }
    if (context->needs_input_grad(1)) {
      const auto both = gradient(
          {kWeightGrad, grad, conjugate(input), {}, geometry, size_of(weight), format, bias});
      found[1] = both.first;
      if (bias) found[2] = both.bias_grad;
    } else if (bias) {
      found[2] = sum_of_positions(grad);
    }
    for (size_t i = 0; sequences && i < 2; ++i) {
      if (found[i].defined()) found[i] = found[i].squeeze(2);
    }
    return found;
  }
};

constexpr auto kNodeName = "FastconvConv2dBackward";  // the node's name in ops/autograd.py

// PyTorch's node for C++ functions, under this name.
struct Conv2dBackward final : torch::autograd::CppNode<Conv2d> {
  std::string name() const override { return kNodeName; }
};

using NodePointer = decltype(torch::autograd::Edge::function);

// Up to PyTorch 2.12 std::shared_ptr counts references to nodes; in newer versions nodes do.
template <class Pointer>
Pointer new_node() {
  if constexpr (std::is_constructible_v<Pointer, std::shared_ptr<Conv2dBackward>>) {
    return Pointer(new Conv2dBackward, [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Conv2dBackward>();
  }
}

inline Tensor record(const Call& call) {
  const NodePointer pointer = new_node<NodePointer>();
  auto& node = static_cast<Conv2dBackward&>(*pointer);
  node.is_variable_input_ = {true, true, true};
  node.set_ctx_grad_fn(pointer);
  node.set_next_edges(torch::autograd::collect_next_edges(call.first, call.second, call.third));
  node.ctx_.set_materialize_grads(false);
  node.ctx_.saved_data["geometry"] = call.geometry.numbers();
  node.ctx_.save_for_backward({call.first, call.second});
  Tensor output = computed(call);
  torch::autograd::set_history(output, pointer);
  node.output_info_.emplace_back(output);
  node.save_variables_to_ctx();
  return output;
}

// Computes the convolution; returns nothing if the dispatcher has to see the call.
inline std::optional<Tensor> conv2d(Call call) {
  auto keys = keys_of(call.first, call.second, call.third, call.residual);
  const auto casts = keys & c10::autocast_dispatch_keyset;
  if (!is_plain(keys - casts) || has_tangent(call.first, call.second, call.third, call.residual)) {
    return {};
  }
  const bool seen = keys.has_any(c10::autograd_dispatch_keyset);  // false in inference mode
  const bool recorded = seen && is_recorded(call.first, call.second, call.third, call.residual);
  if (recorded && call.pass == kFused) return {};  // Python computes it by differentiable operators
  const c10::impl::ExcludeDispatchKeyGuard cast_already(casts);
  if (!casts.empty()) {
    const auto device = call.first.device().type();
    const auto type = at::autocast::get_autocast_dtype(device);
    for (Tensor* tensor : {&call.first, &call.second, &call.third, &call.residual}) {
      if (at::autocast::is_eligible(*tensor, device)) *tensor = tensor->to(type);
    }
  }
  if (recorded) return record(call);
  call.frozen = store.period;
  return computed(call);
}

}  // namespace fastconv::host
