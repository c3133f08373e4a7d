// Batch normalization with a residual and an activation: forms of calls, and calls below autograd.
#pragma once

#include <ATen/ops/empty_strided_ops.h>

#include "run.h"

namespace fastconv::host {

// --- Calls ---------------------------------------------------------------------------------------

// A call of batch_norm_forward (ops/batchnorm.py).
struct Norm {
  Tensor x{}, residual{}, weight{}, bias{}, running_mean{}, running_var{}, batches{};
  Tensor counted{};  // a number of batches, in which a call in training counts its own
  bool training = false;
  double momentum = 0, eps = 0;
  int64_t activation = kIdentity;
  double slope = 0;
  // The statistics that a convolution has left of x, in so many shares.
  int64_t shares = 0;
  const void* statistics = nullptr;
};

struct Normalized {
  Tensor y, mean, invstd;
  Tensor beside{};  // what the activation's gradient needs beside x: the residual, y, or nothing
};

// A call of batch_norm_backward.
struct NormGrad {
  Tensor grad, x, beside, weight, bias, mean, invstd;
  bool of_batch, residual;
  int64_t activation;
  double slope;
  bool wants_x, wants_parameters, wants_residual;
};

// A normalization without a residual whose statistics are known.
struct NormOutput {
  Tensor x, weight, bias, mean, invstd;
  int64_t activation;
  double slope;
};

struct NormGradients {
  Tensor x{}, residual{}, weight{}, bias{};
};

// --- Entries -------------------------------------------------------------------------------------

enum Beside { kNothing, kOutput, kResidual };

struct NormEntry : Launches {
  Beside beside;
  // Fills the results if launches do not; otherwise empty.
  std::function<void(const Norm&, const Normalized&)> fill;
};

struct NormGradEntry : Launches {
  std::function<void(const NormGrad&, const NormGradients&)> fill;
};

struct NormOutputEntry : Launches {
  std::function<void(const NormOutput&, const Tensor&)> fill;
};

// Make the entry for all calls of a call's form.
inline std::function<std::shared_ptr<const NormEntry>(const Norm&)> make_norm_entry;
inline std::function<std::shared_ptr<const NormOutputEntry>(const NormOutput&)>
    make_norm_output_entry;
inline std::function<std::shared_ptr<const NormGradEntry>(const NormGrad&)> make_norm_grad_entry;

// The largest alignment that plans may assume for tensors of x's size.
template <class... Tensors>
int64_t common_alignment(const Tensors&... tensors) {
  const uintptr_t all = (16 | ... | address_of(tensors));
  return int64_t(all & -all);
}

inline Key key_of(const Norm& call) {
  Key key;
  key.reserve(80);
  key.insert(key.end(),
             {call.training, std::bit_cast<int64_t>(call.momentum),
              std::bit_cast<int64_t>(call.eps), call.activation, std::bit_cast<int64_t>(call.slope),
              common_alignment(call.x, call.residual), call.shares});
  for (const Tensor* tensor : {&call.x, &call.residual, &call.weight, &call.bias,
                               &call.running_mean, &call.running_var, &call.batches}) {
    append(key, *tensor, false);
  }
  return key;
}

inline Key key_of(const NormOutput& call) {
  Key key;
  key.reserve(64);
  key.insert(key.end(),
             {call.activation, std::bit_cast<int64_t>(call.slope), common_alignment(call.x)});
  for (const Tensor* tensor : {&call.x, &call.weight, &call.bias, &call.mean, &call.invstd}) {
    append(key, *tensor, false);
  }
  return key;
}

inline Key key_of(const NormGrad& call) {
  Key key;
  key.reserve(80);
  key.insert(key.end(), {call.of_batch, call.residual, call.activation,
                         std::bit_cast<int64_t>(call.slope), call.wants_x, call.wants_parameters,
                         call.wants_residual, common_alignment(call.grad, call.x, call.beside)});
  for (const Tensor* tensor :
       {&call.grad, &call.x, &call.beside, &call.weight, &call.bias, &call.mean, &call.invstd}) {
    append(key, *tensor, false);
  }
  return key;
}

// --- Layouts -------------------------------------------------------------------------------------

// Whether channels are neighbours in memory, and the tensor is dense otherwise.
inline bool has_channels_last(const Tensor& tensor) {
  int64_t expected = 1;
  const auto fits = [&](int64_t axis) {
    const bool is_next = tensor.size(axis) == 1 || tensor.stride(axis) == expected;
    expected *= tensor.size(axis);
    return is_next;
  };
  if (!fits(1)) return false;
  for (int64_t axis = tensor.dim() - 1; axis >= 0; --axis) {
    if (axis != 1 && !fits(axis)) return false;
  }
  return true;
}

inline Tensor new_like(const Tensor& like) {
  const auto device = like.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::_ops::empty_strided::redispatch(
      c10::DispatchKeySet(device), c10::fromIntArrayRefSlow(like.sizes()),
      c10::fromIntArrayRefSlow(like.strides()), like.scalar_type(), at::kStrided, like.device(),
      false);
}

// The tensor itself if it is contiguous or has its channels last, or else a contiguous copy.
inline Tensor in_format(const Tensor& x) {
  return x.is_contiguous() || has_channels_last(x) ? x : x.contiguous();
}

// The tensor, or a copy, with the strides of x. One of another size stays as it is: the entry is
// refused.
inline Tensor laid_out(const Tensor& tensor, const Tensor& x) {
  if (!tensor.defined() || tensor.sizes() != x.sizes() || tensor.strides() == x.strides()) {
    return tensor;
  }
  const bool is_same = x.is_contiguous() ? tensor.is_contiguous() : has_channels_last(tensor);
  return is_same ? tensor : new_like(x).copy_(tensor);
}

inline Tensor dense(const Tensor& parameter) {
  return parameter.defined() ? parameter.contiguous() : parameter;
}

// A new number for each channel of x.
inline Tensor of_channels(const Tensor& x, at::ScalarType type) {
  const auto device = x.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::_ops::empty_memory_format::redispatch(c10::DispatchKeySet(device),
                                                   {c10::SymInt(x.size(1))}, type, at::kStrided,
                                                   x.device(), false, std::nullopt);
}

// --- Running -------------------------------------------------------------------------------------

// Version counters of running statistics count what has been written to them.
inline void count_version(const Tensor& written) {
  if (written.defined() && !written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
}

// Computes a normalization. Running statistics are contiguous.
inline Normalized run(Norm call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::OptionalDeviceGuard on(call.x.is_cuda() ? std::optional(call.x.device())
                                                     : std::nullopt);
  const Tensor given = call.residual;
  call.x = in_format(call.x);
  call.residual = laid_out(given, call.x);
  call.weight = dense(call.weight);
  call.bias = dense(call.bias);
  const auto entry = table<NormEntry>.find(key_of(call), [&] { return make_norm_entry(call); });
  const auto sums = call.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Normalized made{new_like(call.x), of_channels(call.x, sums), of_channels(call.x, sums)};
  made.beside = entry->beside == kOutput ? made.y : entry->beside == kResidual ? given : Tensor();
  // Launches count a batch, but not where their blocks read the number of batches.
  const bool counts_here = entry->fill || call.batches.defined();
  if (call.counted.defined() && counts_here) call.counted.add_(1);
  if (entry->fill) {
    entry->fill(call, made);
  } else {
    const at::DataPtr scratch = workspace(entry->scratch_bytes, made.y);
    const void* const working = call.shares ? call.statistics : scratch.get();
    const std::array addresses = {address_of(call.x),
                                  address_of(call.residual),
                                  address_of(call.weight),
                                  address_of(call.bias),
                                  address_of(call.running_mean),
                                  address_of(call.running_var),
                                  address_of(call.batches),
                                  counts_here ? 0 : address_of(call.counted),
                                  address_of(made.mean),
                                  address_of(made.invstd),
                                  address_of(made.y),
                                  uintptr_t(working)};
    start_all(*entry, 0, addresses, stream_of(call.x.device()));
  }
  if (call.training) {
    count_version(call.running_mean);
    count_version(call.running_var);
    count_version(call.counted);
  }
  return made;
}

// Computes the output of a normalization again, with the bits that it had at first.
inline Tensor run(NormOutput call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::OptionalDeviceGuard on(call.x.is_cuda() ? std::optional(call.x.device())
                                                     : std::nullopt);
  call.x = in_format(call.x);
  for (Tensor* one : {&call.weight, &call.bias}) *one = dense(*one);
  const auto entry =
      table<NormOutputEntry>.find(key_of(call), [&] { return make_norm_output_entry(call); });
  const Tensor y = new_like(call.x);
  if (entry->fill) {
    entry->fill(call, y);
  } else {
    constexpr uintptr_t residual = 0;
    const std::array addresses = {address_of(call.x),
                                  residual,
                                  address_of(call.weight),
                                  address_of(call.bias),
                                  address_of(call.mean),
                                  address_of(call.invstd),
                                  address_of(y)};
    start_all(*entry, 0, addresses, stream_of(call.x.device()));
  }
  return y;
}

// Computes the gradients that are wanted. Without an activation, that of the residual is `grad`.
inline NormGradients run(NormGrad call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::OptionalDeviceGuard on(call.x.is_cuda() ? std::optional(call.x.device())
                                                     : std::nullopt);
  const Tensor above = call.grad;
  const bool stores = call.wants_residual && call.activation != kIdentity;
  call.x = in_format(call.x);
  call.grad = laid_out(above, call.x);
  call.beside = laid_out(call.beside, call.x);
  for (Tensor* one : {&call.weight, &call.bias, &call.mean, &call.invstd}) *one = dense(*one);
  NormGradients made;
  if (call.wants_x || call.wants_parameters || stores) {
    const auto entry =
        table<NormGradEntry>.find(key_of(call), [&] { return make_norm_grad_entry(call); });
    const auto type = (call.weight.defined() ? call.weight : call.x).scalar_type();
    if (call.wants_x) made.x = new_like(call.x);
    if (stores) made.residual = new_like(call.x);
    if (call.wants_parameters) {
      made.weight = of_channels(call.x, type);
      made.bias = of_channels(call.x, type);
    }
    if (entry->fill) {
      entry->fill(call, made);
    } else {
      const at::DataPtr scratch = workspace(entry->scratch_bytes, call.x);
      const std::array addresses = {
          address_of(call.grad),   address_of(call.x),    address_of(call.beside),
          address_of(call.weight), address_of(call.bias), address_of(call.mean),
          address_of(call.invstd), address_of(made.x),    address_of(made.residual),
          address_of(made.weight), address_of(made.bias), uintptr_t(scratch.get())};
      start_all(*entry, 0, addresses, stream_of(call.x.device()));
    }
  }
  if (call.wants_residual && !stores) made.residual = above;
  return made;
}

}  // namespace fastconv::host
