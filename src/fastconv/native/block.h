// Eager calls of batch_norm_act and conv_bn_act: which of them the native path serves, and their
// autograd nodes.
#pragma once

#include <ATen/SavedTensorHooks.h>

#include "autograd.h"
#include "norm.h"

namespace fastconv::host {

// --- Nodes ---------------------------------------------------------------------------------------

// What a backward pass has to know of a normalization beside its tensors, as a node keeps it.
struct NormOptions {
  bool of_batch, residual;
  int64_t activation;
  double slope, eps;

  static constexpr size_t kNumbers = 5;

  static NormOptions of(const Norm& call) {
    return {call.training, call.residual.defined(), call.activation, call.slope, call.eps};
  }

  std::vector<int64_t> numbers() const {
    return {of_batch, residual, activation, std::bit_cast<int64_t>(slope),
            std::bit_cast<int64_t>(eps)};
  }

  static NormOptions of(const int64_t* n) {
    return {bool(n[0]), bool(n[1]), n[2], std::bit_cast<double>(n[3]), std::bit_cast<double>(n[4])};
  }
};

// The tensors that a node of a normalization saves, in this order.
struct SavedNorm {
  Tensor x, beside, weight, bias, mean, invstd;

  static constexpr size_t kTensors = 6;

  static SavedNorm of(const Tensor* saved) {
    return {saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
  }
};

// What a node saves in place of its input, which is the output of a normalization before it: the
// output is computed again in the backward pass. `edge` has no elements, but the input's history.
struct Recipe {
  NormOutput output;
  Tensor edge;

  static constexpr size_t kTensors = 5, kNumbers = 2;

  // Adds the tensors to those that a node saves, after `edge` as the first one.
  void save(variable_list& saved) const {
    saved[0] = edge;
    for (const Tensor& one : {output.x, output.weight, output.bias, output.mean, output.invstd}) {
      saved.push_back(one);
    }
  }

  static std::vector<int64_t> numbers(const std::optional<Recipe>& recipe) {
    if (!recipe) return {kIdentity, 0};
    return {recipe->output.activation, std::bit_cast<int64_t>(recipe->output.slope)};
  }

  static Recipe of(const Tensor& edge, const Tensor* saved, const int64_t* numbers) {
    return {{saved[0], saved[1], saved[2], saved[3], saved[4], numbers[0],
             std::bit_cast<double>(numbers[1])},
            edge};
  }
};

// Which gradients of a normalization are wanted.
struct NormNeeds {
  bool x, residual, weight, bias;

  bool any() const { return x || residual || weight || bias; }
};

// Compute gradients where PyTorch's dispatcher has to see them: functions of ops/batchnorm.py.
inline std::function<NormGradients(const Tensor& grad, const SavedNorm&, const NormOptions&,
                                   const NormNeeds&)>
    dispatch_norm_gradients;

inline std::function<Tensor(const NormOutput&)> dispatch_norm_output;

// The same for a convolution with a normalization; the first three are those of the convolution.
struct BlockGradients {
  Gradients conv;
  NormGradients norm;
};
inline std::function<BlockGradients(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                    const Tensor& bias, const Geometry&, const SavedNorm&,
                                    const NormOptions&, const std::array<bool, 6>& needs)>
    dispatch_block_gradients;

inline NormGradients norm_gradients(const Tensor& grad, const SavedNorm& saved,
                                    const NormOptions& options, const NormNeeds& needs) {
  return run(NormGrad{grad, saved.x, saved.beside, saved.weight, saved.bias, saved.mean,
                      saved.invstd, options.of_batch, options.residual, options.activation,
                      options.slope, needs.x, needs.weight || needs.bias, needs.residual});
}

// Computes the gradients of a convolution that are wanted, below autograd.
inline Gradients conv_gradients(const Backward& call, bool needs_input, bool needs_weight,
                                bool needs_bias) {
  Gradients found;
  if (needs_input && needs_weight) {
    found = run(call);
  } else if (needs_input) {
    found.input = run(call.of_input()).first;
  } else if (needs_weight) {
    Results both = run(call.of_weight());
    found.weight = std::move(both.first);
    found.bias = std::move(both.bias_grad);
  }
  if (needs_bias && !needs_weight) found.bias = sum_of_positions(call.grad);
  return found;
}

inline BlockGradients block_gradients(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                      const Geometry& geometry, const SavedNorm& saved,
                                      const NormOptions& options,
                                      const std::array<bool, 6>& needs) {
  const auto [needs_input, needs_weight, needs_bias, needs_residual, needs_scale, needs_shift] =
      needs;
  const bool needs_conv = needs_input || needs_weight || needs_bias;
  BlockGradients found;
  found.norm =
      norm_gradients(grad, saved, options, {needs_conv, needs_residual, needs_scale, needs_shift});
  if (needs_conv) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool sequences = input.dim() == 3;
    const auto as_images = [&](const Tensor& tensor) {
      return sequences ? with_row(tensor) : tensor;
    };
    const Backward call{
        as_images(found.norm.x),   as_images(input), as_images(weight), geometry, false,
        needs_bias && needs_weight};
    found.conv = conv_gradients(call, needs_input, needs_weight, needs_bias);
    for (Tensor* one : {&found.conv.input, &found.conv.weight}) {
      if (sequences && one->defined()) *one = one->squeeze(2);
    }
  }
  return found;
}

// They have the names of the nodes in Python, so far as there are any.

struct BatchNorm {
  static constexpr auto kName = "FastconvBatchNormBackward";
  static constexpr bool is_traceable = true;

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(4);
    const auto tensors = context->get_saved_variables();
    const SavedNorm saved = SavedNorm::of(tensors.data());
    const auto numbers = context->saved_data["options"].toIntVector();
    const NormOptions options = NormOptions::of(numbers.data());
    const NormNeeds needs{context->needs_input_grad(0), context->needs_input_grad(1),
                          context->needs_input_grad(2), context->needs_input_grad(3)};
    const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    const bool dispatches =
        has_to_dispatch(grads[0], saved.x, saved.beside, saved.weight, saved.bias);
    NormGradients found = dispatches ? dispatch_norm_gradients(grads[0], saved, options, needs)
                                     : norm_gradients(grads[0], saved, options, needs);
    if (!needs.weight) found.weight.reset();
    if (!needs.bias) found.bias.reset();
    return {found.x, found.residual, found.weight, found.bias};
  }
};

// The input of a node, with the history that it had.
inline Tensor recomputed(const Recipe& recipe) {
  const NormOutput& output = recipe.output;
  const bool plain =
      is_plain(keys_of(output.x, output.weight, output.bias, output.mean, output.invstd));
  Tensor input = plain ? run(output) : dispatch_norm_output(output);
  torch::autograd::impl::set_gradient_edge(input,
                                           torch::autograd::impl::gradient_edge(recipe.edge));
  return input;
}

struct ConvBNAct {
  static constexpr auto kName = "FastconvConvBNActBackward";
  static constexpr bool is_traceable = true;
  // The tensors that it saves, without those of a recipe: input, weight, the normalization's, bias.
  static constexpr size_t kTensors = 3 + SavedNorm::kTensors;
  // Those of its options behind the numbers of a geometry.
  static constexpr size_t kNumbers = NormOptions::kNumbers + Recipe::kNumbers;

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(6);
    const auto tensors = context->get_saved_variables();
    const Tensor &weight = tensors[1], &bias = tensors[kTensors - 1];
    const SavedNorm saved = SavedNorm::of(tensors.data() + 2);
    auto numbers = context->saved_data["options"].toIntVector();
    const size_t of_geometry = numbers.size() - kNumbers;
    const NormOptions options = NormOptions::of(numbers.data() + of_geometry);
    const Tensor input =
        tensors.size() == kTensors
            ? tensors[0]
            : recomputed(Recipe::of(tensors[0], tensors.data() + kTensors,
                                    numbers.data() + of_geometry + NormOptions::kNumbers));
    numbers.resize(of_geometry);
    const Geometry geometry = Geometry::of(numbers);
    std::array<bool, 6> needs;
    for (size_t i = 0; i < needs.size(); ++i) needs[i] = context->needs_input_grad(i);
    const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    const bool dispatches = has_to_dispatch(grads[0], input, weight, bias, saved.x, saved.beside,
                                            saved.weight, saved.bias);
    BlockGradients found =
        dispatches ? dispatch_block_gradients(grads[0], input, weight, bias, geometry, saved,
                                              options, needs)
                   : block_gradients(grads[0], input, weight, geometry, saved, options, needs);
    if (!needs[4]) found.norm.weight.reset();
    if (!needs[5]) found.norm.bias.reset();
    return {found.conv.input,    found.conv.weight, found.conv.bias,
            found.norm.residual, found.norm.weight, found.norm.bias};
  }
};

// Whether hooks decide what becomes of tensors that nodes save (torch.autograd.graph), as those of
// checkpoints: they may keep none of them.
inline bool has_saving_hooks() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

// Records a call: computes it by `compute`, which gives the output and the tensors to save.
template <class Function, class Compute, class... Tensors>
Tensor record_call(std::vector<int64_t> options, const Compute& compute,
                   const Tensors&... differentiable) {
  const NodePointer pointer = new_node<Node<Function>, NodePointer>();
  auto& node = static_cast<Node<Function>&>(*pointer);
  node.is_variable_input_ = std::vector<bool>(sizeof...(differentiable), true);
  node.set_ctx_grad_fn(pointer);
  node.set_next_edges(torch::autograd::collect_next_edges(differentiable...));
  node.ctx_.set_materialize_grads(false);
  node.ctx_.saved_data["options"] = std::move(options);
  auto [output, saved] = compute();
  node.ctx_.save_for_backward(std::move(saved));
  torch::autograd::set_history(output, pointer);
  node.output_info_.emplace_back(output);
  node.save_variables_to_ctx();
  if (!has_saving_hooks()) node.lend(output);
  return output;
}

// What the output of a normalization can be computed again from: nothing if it had a residual, was
// changed since, or is that of another node.
inline std::optional<Recipe> recipe_of(const Tensor& output) {
  if (has_saving_hooks()) return {};
  const auto function = output.grad_fn();
  const auto of_node = [&](auto* node, size_t tensors, size_t numbers) -> std::optional<Recipe> {
    const auto options = node->ctx_.saved_data["options"].toIntVector();
    const NormOptions norm = NormOptions::of(options.data() + options.size() - numbers);
    const auto lent = norm.residual ? std::nullopt : node->lent(output);
    if (!lent) return {};
    const SavedNorm saved = SavedNorm::of(lent->data() + tensors);
    const Tensor edge = output.new_empty({0});
    torch::autograd::impl::set_gradient_edge(edge, torch::autograd::impl::gradient_edge(output));
    return Recipe{
        {saved.x, saved.weight, saved.bias, saved.mean, saved.invstd, norm.activation, norm.slope},
        edge};
  };
  if (auto* node = dynamic_cast<Node<ConvBNAct>*>(function.get())) {
    return of_node(node, 2, ConvBNAct::kNumbers);
  }
  if (auto* node = dynamic_cast<Node<BatchNorm>*>(function.get())) {
    return of_node(node, 0, NormOptions::kNumbers);
  }
  return {};
}

// Only the output has a history: the statistics are not differentiable.
inline Normalized record(const Norm& call) {
  Normalized made;
  const auto compute = [&] {
    made = run(call);
    return std::pair(
        made.y, variable_list{call.x, made.beside, call.weight, call.bias, made.mean, made.invstd});
  };
  record_call<BatchNorm>(NormOptions::of(call).numbers(), compute, call.x, call.residual,
                         call.weight, call.bias);
  return made;
}

// A convolution and the normalization of its output, computed.
struct Block {
  Tensor x;  // the convolution's output
  Normalized norm;
};

// Types whose kernels may leave statistics of what they store.
inline bool may_leave_statistics(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

// Computes a convolution, and the normalization of its output in training.
inline Block run(Call conv, Norm norm) {
  conv.statistics = may_leave_statistics(conv.first.scalar_type());
  const Results left = computed(conv);
  norm.x = left.first;
  norm.shares = left.shares;
  norm.statistics = left.statistics.get();
  return {left.first, run(std::move(norm))};
}

// The normalization's x is the convolution's output. With `recomputes`, an input that is a
// normalization's output is not saved, where it can be computed again.
inline Tensor record(const Call& conv, const Norm& norm, bool recomputes) {
  const auto recipe = recomputes ? recipe_of(conv.first) : std::nullopt;
  std::vector<int64_t> options = conv.geometry.numbers();
  for (const int64_t number : NormOptions::of(norm).numbers()) options.push_back(number);
  for (const int64_t number : Recipe::numbers(recipe)) options.push_back(number);
  const auto compute = [&] {
    const auto [x, made] = run(conv, norm);
    variable_list saved{conv.first, conv.second, x,           made.beside, norm.weight,
                        norm.bias,  made.mean,   made.invstd, conv.third};
    if (recipe) recipe->save(saved);
    return std::pair(made.y, std::move(saved));
  };
  return record_call<ConvBNAct>(std::move(options), compute, conv.first, conv.second, conv.third,
                                norm.residual, norm.weight, norm.bias);
}

// --- Eager calls ---------------------------------------------------------------------------------

inline bool has_dense_statistics(const Norm& call) {
  return (!call.running_mean.defined() || call.running_mean.is_contiguous()) &&
         (!call.running_var.defined() || call.running_var.is_contiguous());
}

// Whether kernels can count a call's batch, if it counts it.
inline bool is_countable(const Norm& call) {
  return !call.counted.defined() ||
         (call.training && call.counted.scalar_type() == at::kLong && call.counted.dim() == 0);
}

// Computes a normalization; returns nothing if the dispatcher has to see the call.
inline std::optional<Tensor> normalize(Norm call) {
  const auto keys = keys_of(call.x, call.residual, call.weight, call.bias, call.running_mean,
                            call.running_var, call.batches, call.counted);
  const auto casts = keys & c10::autocast_dispatch_keyset;
  if (!is_plain(keys - casts) || has_tangent(call.x, call.residual, call.weight, call.bias) ||
      !has_dense_statistics(call) || !is_countable(call) || call.x.dim() < 2) {
    return {};
  }
  const c10::impl::ExcludeDispatchKeyGuard cast_already(casts);
  if (!casts.empty() && call.residual.defined() && call.residual.is_floating_point()) {
    call.residual = call.residual.to(call.x.scalar_type());
  }
  const bool seen = keys.has_any(c10::autograd_dispatch_keyset);  // false in inference mode
  const bool recorded = seen && is_recorded(call.x, call.residual, call.weight, call.bias);
  return (recorded ? record(call) : run(call)).y;
}

// Computes a convolution and the normalization of its output in training; returns nothing if the
// dispatcher has to see the call.
inline std::optional<Tensor> convolve_and_normalize(Call conv, Norm norm, bool recomputes) {
  const auto keys =
      keys_of(conv.first, conv.second, conv.third, norm.residual, norm.weight, norm.bias,
              norm.running_mean, norm.running_var, norm.batches, norm.counted);
  const auto casts = keys & c10::autocast_dispatch_keyset;
  if (!is_plain(keys - casts) || !has_dense_statistics(norm) || !is_countable(norm) ||
      conv.first.is_complex() ||
      has_tangent(conv.first, conv.second, conv.third, norm.residual, norm.weight, norm.bias)) {
    return {};
  }
  const c10::impl::ExcludeDispatchKeyGuard cast_already(casts);
  if (!casts.empty()) {
    const auto device = conv.first.device().type();
    const auto type = at::autocast::get_autocast_dtype(device);
    for (Tensor* tensor : {&conv.first, &conv.second, &conv.third}) {
      autocast(*tensor, device, type);
    }
    if (norm.residual.defined() && norm.residual.is_floating_point()) {
      norm.residual = norm.residual.to(conv.first.scalar_type());
    }
  }
  const bool seen = keys.has_any(c10::autograd_dispatch_keyset);  // false in inference mode
  const bool recorded = seen && is_recorded(conv.first, conv.second, conv.third, norm.residual,
                                            norm.weight, norm.bias);
  if (recorded) return record(conv, norm, recomputes);
  conv.frozen = store.period;
  return run(std::move(conv), std::move(norm)).norm.y;
}

}  // namespace fastconv::host
