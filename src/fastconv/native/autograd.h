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

// Whether a backward pass has to call PyTorch's dispatcher, or need not.
template <class... Tensors>
bool has_to_dispatch(const Tensors&... tensors) {
  return !is_plain(keys_of(tensors...)) || is_recorded(tensors...) || has_tangent(tensors...);
}

inline void dispatch(Pass pass, torch::jit::Stack& stack) {
  c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("fastconv::") + kOperators[pass]).c_str(), "")
      .callBoxed(stack);
}

inline void push(const Geometry& g, torch::jit::Stack& stack) {
  torch::jit::push(stack, at::IntArrayRef(g.stride), at::IntArrayRef(g.padding),
                   at::IntArrayRef(g.dilation), g.groups,
                   g.precision == kPyTorchs ? at::IValue() : at::IValue(kPrecisions[g.precision]));
}

// Computes an operator in a backward pass, where autocast casts nothing. If autograd records it,
// Python computes it, called through the dispatcher.
inline Results gradient(const Call& call) {
  const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
  if (!has_to_dispatch(call.first, call.second)) return run(call);
  const bool has_size = call.pass != kForward;
  torch::jit::Stack stack{call.first, call.second,
                          has_size ? at::IValue(at::IntArrayRef(call.size)) : at::IValue()};
  push(call.geometry, stack);
  if (call.pass == kWeightGrad) stack.emplace_back(call.bias_grad);
  if (call.pass != kForward) stack.emplace_back(call.format);
  dispatch(call.pass, stack);
  return {stack[0].toTensor(), stack.size() > 1 ? stack[1].toTensor() : Tensor()};
}

inline Tensor conjugate(const Tensor& tensor) {
  return tensor.is_complex() ? tensor.conj() : tensor;
}

inline Tensor sum_of_positions(const Tensor& grad) {
  const auto dims = all_but_channels(grad);
  if (grad.scalar_type() != at::kComplexHalf) return grad.sum(dims);
  return at::view_as_complex(at::view_as_real(grad.resolve_conj()).sum(dims));
}

// In PyTorch both gradients of a convolution have the memory format of its output; complex ones are
// contiguous.
inline at::MemoryFormat gradient_format(const Tensor& input, const Tensor& weight) {
  return input.is_complex() ? at::MemoryFormat::Contiguous : joint_format(input, weight);
}

// The backward pass of a convolution, transposed or not: the operator `backward`.
struct Backward {
  Tensor grad, input, weight;
  Geometry geometry;
  bool transposed;
  bool bias;  // whether it computes the bias's gradient too

  // The memory format of both gradients.
  at::MemoryFormat format = gradient_format(input, weight);
  // What the two passes read. That of a transposed convolution's input is a convolution, whose
  // output has the format of what it reads.
  Tensor above = transposed ? grad.contiguous(format) : grad;

  Call of_input() const {
    if (transposed) return {kForward, above, weight, {}, geometry};
    return {kInputGrad, above, weight, {}, geometry, size_of(input), format};
  }

  // In the weight's gradient of a transposed convolution, input and output change places.
  Call of_weight() const {
    if (transposed) return {kWeightGrad, input, above, {}, geometry, size_of(weight), format};
    return {kWeightGrad, above, input, {}, geometry, size_of(weight), format, bias};
  }
};

struct Gradients {
  Tensor input{}, weight{}, bias{};
};

inline Gradients run(const Backward& call) {
  Gradients found{run(call.of_input()).first};
  Results of_weight = run(call.of_weight());
  found.weight = std::move(of_weight.first);
  found.bias = std::move(of_weight.bias_grad);
  if (call.transposed && call.bias) found.bias = sum_of_positions(call.grad);
  return found;
}

// Computes all gradients as `gradient` computes one.
inline Gradients gradients(const Backward& call) {
  const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
  if (!has_to_dispatch(call.grad, call.input, call.weight)) return run(call);
  torch::jit::Stack stack{call.grad, call.input, call.weight};
  push(call.geometry, stack);
  torch::jit::push(stack, call.transposed, call.bias);
  dispatch(kBackward, stack);
  return {stack[0].toTensor(), stack[1].toTensor(), call.bias ? stack[2].toTensor() : Tensor()};
}

// --- Sequences -----------------------------------------------------------------------------------

// A 1-D convolution is one of images with one row.
inline Tensor with_row(const Tensor& tensor) {
  return tensor.defined() ? tensor.unsqueeze(2) : tensor;
}

// Computes a call below autograd.
inline Results computed(const Call& call) {
  if (!call.sequences) return run(call);
  const at::AutoDispatchBelowADInplaceOrView below;  // to autograd, the output is no view
  Call images = call;
  images.sequences = false;
  for (Tensor* tensor : {&images.first, &images.second, &images.residual}) {
    *tensor = with_row(*tensor);
  }
  Results results = run(images);
  results.first = results.first.squeeze(2);
  return results;
}

// --- Nodes ---------------------------------------------------------------------------------------

// Computes the gradients of input, weight and bias that the engine wants: more may be recorded.
inline variable_list wanted_gradients(AutogradContext* context, const Tensor& above,
                                      bool transposed) {
  variable_list found(3);
  if (!above.defined()) return found;
  const auto saved = context->get_saved_variables();
  const bool sequences = saved[0].dim() == 3;
  const auto as_images = [&](const Tensor& tensor) {
    return sequences ? with_row(tensor) : tensor;
  };
  const Tensor grad = as_images(above);
  const bool input = context->needs_input_grad(0), weight = context->needs_input_grad(1),
             bias = context->needs_input_grad(2);
  if (input || weight) {
    const Backward call{grad,
                        conjugate(as_images(saved[0])),
                        conjugate(as_images(saved[1])),
                        Geometry::of(context->saved_data["geometry"].toIntVector()),
                        transposed,
                        bias && !transposed};
    Gradients some;
    if (input && weight) {
      some = gradients(call);
    } else if (input) {
      some.input = gradient(call.of_input()).first;
    } else {
      const Results both = gradient(call.of_weight());
      some.weight = both.first;
      if (call.bias) some.bias = both.bias_grad;
    }
    found = {some.input, some.weight, some.bias};
  }
  if (bias && !found[2].defined()) found[2] = sum_of_positions(grad);
  for (size_t i = 0; sequences && i < 2; ++i) {
    if (found[i].defined()) found[i] = found[i].squeeze(2);
  }
  return found;
}

// The backward passes, in the form that PyTorch's CppNode requires. They have the names of the
// nodes in ops/autograd.py.

struct Conv2d {
  static constexpr auto kName = "FastconvConv2dBackward";
  static constexpr bool is_traceable = true;  // compiled autograd may trace it

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return wanted_gradients(context, grads[0], false);
  }
};

struct ConvTranspose {
  static constexpr auto kName = "FastconvConvTransposeBackward";
  static constexpr bool is_traceable = true;

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return wanted_gradients(context, grads[0], true);
  }
};

// PyTorch's node for C++ functions, under the function's name.
template <class Function>
struct Node final : torch::autograd::CppNode<Function> {
  std::string name() const override { return Function::kName; }

  // Has other nodes save what this one saves in place of its output, until it is released.
  void lend(const Tensor& output) { lent_version_ = output._version(); }

  // What the node has saved; nothing unless it lends, and the output is as the node has left it.
  std::optional<variable_list> lent(const Tensor& output) {
    const std::lock_guard lock(this->mutex_);
    if (lent_version_ != output._version()) return {};
    return this->ctx_.get_saved_variables();
  }

  void release_variables() override {
    {
      const std::lock_guard lock(this->mutex_);
      lent_version_.reset();
    }
    torch::autograd::CppNode<Function>::release_variables();
  }

 private:
  std::optional<int64_t> lent_version_{};
};

using NodePointer = decltype(torch::autograd::Edge::function);

// Up to PyTorch 2.12 std::shared_ptr counts references to nodes; in newer versions nodes do.
template <class Made, class Pointer>
Pointer new_node() {
  if constexpr (std::is_constructible_v<Pointer, std::shared_ptr<Made>>) {
    return Pointer(new Made, [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>();
  }
}

template <class Function>
Tensor record_by(const Call& call) {
  const NodePointer pointer = new_node<Node<Function>, NodePointer>();
  auto& node = static_cast<Node<Function>&>(*pointer);
  node.is_variable_input_ = {true, true, true};
  node.set_ctx_grad_fn(pointer);
  node.set_next_edges(torch::autograd::collect_next_edges(call.first, call.second, call.third));
  node.ctx_.set_materialize_grads(false);
  node.ctx_.saved_data["geometry"] = call.geometry.numbers();
  node.ctx_.save_for_backward({call.first, call.second});
  Tensor output = computed(call).first;
  torch::autograd::set_history(output, pointer);
  node.output_info_.emplace_back(output);
  node.save_variables_to_ctx();
  return output;
}

// Whether a call has a node here. Python computes what has an epilogue by differentiable operators.
inline bool is_recordable(const Call& call) {
  return call.pass == kForward || (call.pass == kTransposed && is_bare(call));
}

// Computes a call that `is_recordable`, and records it.
inline Tensor record(const Call& call) {
  return call.pass == kForward ? record_by<Conv2d>(call) : record_by<ConvTranspose>(call);
}

// --- Autocast ------------------------------------------------------------------------------------

// Casts a tensor to autocast's type, if autocast casts it. The copy has the tensor's own gradient
// edge: no node has to cast its gradient back, as the engine casts gradients to the type of the
// tensor that they are of.
inline void autocast(Tensor& tensor, c10::DeviceType device, at::ScalarType type) {
  if (!at::autocast::is_eligible(tensor, device) || tensor.scalar_type() == type) return;
  Tensor cast;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    cast = tensor.to(type);
  }
  if (is_recorded(tensor)) {
    torch::autograd::impl::set_gradient_edge(cast, torch::autograd::impl::gradient_edge(tensor));
  }
  tensor = std::move(cast);
}

// --- Eager calls ---------------------------------------------------------------------------------

// Computes a convolution; returns nothing if the dispatcher has to see the call.
inline std::optional<Tensor> convolve(Call call) {
  auto keys = keys_of(call.first, call.second, call.third, call.residual);
  const auto casts = keys & c10::autocast_dispatch_keyset;
  if (!is_plain(keys - casts) || has_tangent(call.first, call.second, call.third, call.residual)) {
    return {};
  }
  const bool seen = keys.has_any(c10::autograd_dispatch_keyset);  // false in inference mode
  const bool recorded = seen && is_recorded(call.first, call.second, call.third, call.residual);
  if (recorded && !is_recordable(call)) return {};
  const c10::impl::ExcludeDispatchKeyGuard cast_already(casts);
  if (!casts.empty()) {
    const auto device = call.first.device().type();
    const auto type = at::autocast::get_autocast_dtype(device);
    for (Tensor* tensor : {&call.first, &call.second, &call.third, &call.residual}) {
      autocast(*tensor, device, type);
    }
  }
  const bool batched = call.first.dim() == call.second.dim();
  if (!batched) {  // as in PyTorch, autograd sees a batch of one
    call.first = call.first.unsqueeze(0);
    if (call.residual.defined()) call.residual = call.residual.unsqueeze(0);
  }
  if (!recorded) call.frozen = store.period;
  const Tensor output = recorded ? record(call) : computed(call).first;
  return batched ? output : output.squeeze(0);
}

}  // namespace fastconv::host
