// The kernels of torch.ops.fastconv.* for PyTorch's dispatcher: what compiled graphs, exported
// programs and direct calls of the operators run.
//
// They take the place of Python's kernels for the keys CPU, CUDA and Autograd once the library is
// loaded, and read the same table as eager calls. What they do not serve (transforms, modes,
// subclasses, tangents, second derivatives) they hand to the kernels whose place they took.
#pragma once

#include <c10/util/Exception.h>
#include <torch/library.h>

#include "autograd.h"

namespace fastconv::host {

using c10::IValue;
using torch::jit::Stack;

// --- An operator's arguments ---------------------------------------------------------------------

// Each function reads a value of the stack, and returns false for what only Python takes: symbolic
// integers, lists of the wrong length, unknown words.

inline bool read(const IValue& value, Tensor& tensor) {
  if (!value.isNone()) tensor = value.toTensor();
  return true;
}

inline bool read(const IValue& value, int64_t& number) {
  if (!value.isInt()) return false;
  number = value.toInt();
  return true;
}

template <size_t kEach>
bool read(const IValue& value, PerAxis<kEach>& numbers, size_t axes) {
  if (!value.isIntList()) return false;
  const auto list = value.toIntList();
  if (list.size() != axes * kEach) return false;
  numbers = PerAxis<kEach>(axes);
  std::copy(list.begin(), list.end(), numbers.begin());
  return true;
}

// The axes of a call that has so many strides; 0 for what is neither of images nor of volumes.
inline size_t axes_of(const IValue& stride) {
  const size_t count = stride.isIntList() ? stride.toIntList().size() : 0;
  return count == 2 || count == 3 ? count : 0;
}

inline bool read(const IValue& value, std::optional<at::MemoryFormat>& format) {
  if (!value.isNone()) format = value.toMemoryFormat();
  return true;
}

template <class Words>
bool read(const IValue& value, const Words& words, int64_t& index) {
  const auto found = std::find(words.begin(), words.end(), value.toStringView());
  index = found - words.begin();
  return found != words.end();
}

inline bool read_geometry(const IValue* values, Geometry& g) {
  const size_t axes = axes_of(values[0]);
  if (!axes) return false;
  if (values[4].isNone()) {
    g.precision = kPyTorchs;
  } else if (!read(values[4], kPrecisions, g.precision)) {
    return false;
  }
  return read(values[0], g.stride, axes) && read(values[1], g.padding, axes) &&
         read(values[2], g.dilation, axes) && read(values[3], g.groups);
}

// Reads the arguments in the order of the schemas in ops/schema.py.
inline bool read_call(const IValue* values, Call& call) {
  if (!read(values[0], call.first) || !read(values[1], call.second)) return false;
  switch (call.pass) {
    case kForward:
      return read(values[2], call.third) && read_geometry(values + 3, call.geometry);
    case kFused:
      call.slope = values[10].toDouble();
      return read(values[2], call.third) && read(values[3], call.residual) &&
             read_geometry(values + 4, call.geometry) &&
             read(values[9], kActivations, call.activation);
    case kInputGrad:
      return read_geometry(values + 3, call.geometry) &&
             read(values[2], call.size, call.geometry.axes()) && read(values[8], call.format);
    case kTransposed:
      call.slope = values[11].toDouble();
      return read(values[2], call.third) && read(values[3], call.residual) &&
             read_geometry(values + 5, call.geometry) &&
             read(values[4], call.size, call.geometry.axes()) &&
             read(values[10], kActivations, call.activation);
    case kWeightGrad:
      call.bias_grad = values[8].toBool();
      return read_geometry(values + 3, call.geometry) &&
             read(values[2], call.size, call.geometry.axes()) && read(values[9], call.format);
    default:
      break;  // no pass of a convolution
  }
  return false;
}

// Whether the weight has the input's channels. All else that has to agree, one of the two passes
// finds.
inline bool have_channels(const Tensor& input, const Tensor& weight, const Geometry& geometry,
                          bool transposed) {
  const int64_t rank = 2 + geometry.axes();
  return input.dim() == rank && weight.dim() == rank &&
         input.size(1) == (transposed ? weight.size(0) : weight.size(1) * geometry.groups);
}

// Reads the arguments of `backward`; nothing for what only Python takes.
inline std::optional<Backward> read_backward(const IValue* values) {
  Tensor grad, input, weight;
  Geometry geometry = Geometry::along(2);
  if (!read(values[0], grad) || !read(values[1], input) || !read(values[2], weight) ||
      !read_geometry(values + 3, geometry)) {
    return {};
  }
  const bool transposed = values[8].toBool();
  if (!have_channels(input, weight, geometry, transposed)) return {};
  return Backward{grad, input, weight, geometry, transposed, values[9].toBool()};
}

// --- The kernels ---------------------------------------------------------------------------------

enum Level : size_t { kCpu, kCuda, kAutograd };
constexpr std::array kKeys = {c10::DispatchKey::CPU, c10::DispatchKey::CUDA,
                              c10::DispatchKey::Autograd};

// Computes a call by the kernel that this library's took the place of.
inline std::function<void(Pass, Level, const c10::OperatorHandle&, Stack*)> replaced;

inline void give(const Call& call, Results results, Stack* stack, size_t count) {
  torch::jit::drop(*stack, count);
  if (call.pass == kWeightGrad && !call.bias_grad) results.bias_grad = empty({0}, results.first);
  stack->emplace_back(std::move(results.first));
  if (call.pass == kWeightGrad) stack->emplace_back(std::move(results.bias_grad));
}

inline std::atomic<bool> serving = true;  // false: the kernels hand all calls on, for tests

template <Pass kPass, Level kLevel>
void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Call call{kPass};
  if (bypassed || !serving || (kLevel == kAutograd && !has_only_autograd(keys)) ||
      !read_call(&torch::jit::peek(*stack, 0, count), call)) {
    return replaced(kPass, kLevel, op, stack);
  }
  if constexpr (kLevel == kAutograd) {
    if (has_tangent(call.first, call.second, call.third, call.residual)) {
      return replaced(kPass, kLevel, op, stack);
    }
    if (is_recorded(call.first, call.second, call.third, call.residual)) {
      if (!is_recordable(call)) return replaced(kPass, kLevel, op, stack);
      return give(call, {record(call), {}}, stack, count);
    }
  }
  // A compiled graph may compute one weight after the other in the same buffer, without a word to
  // its version counter. Such a buffer requires no gradient, as the weights of layers do.
  const bool is_layer = kPass == kForward || has_epilogue(kPass);
  if (is_layer && call.second.requires_grad()) call.frozen = store.period;
  give(call, run(call), stack, count);
}

template <Level kLevel>
void backward_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  constexpr size_t kCount = 10;
  const bool is_ours = !bypassed && serving && (kLevel != kAutograd || has_only_autograd(keys));
  const auto call = is_ours ? read_backward(&torch::jit::peek(*stack, 0, kCount)) : std::nullopt;
  if (!call || (kLevel == kAutograd && (is_recorded(call->grad, call->input, call->weight) ||
                                        has_tangent(call->grad, call->input, call->weight)))) {
    return replaced(kBackward, kLevel, op, stack);
  }
  Gradients found = run(*call);
  if (!call->bias) found.bias = empty({0}, call->grad);
  torch::jit::drop(*stack, kCount);
  torch::jit::push(*stack, std::move(found.input), std::move(found.weight), std::move(found.bias));
}

template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* kKernel>
void implement(Pass pass, Level level) {
  static auto& libraries = *new std::vector<torch::Library>;
  libraries.emplace_back(torch::Library::IMPL, "fastconv", kKeys[level], __FILE__, __LINE__)
      .impl(kOperators[pass], torch::CppFunction::makeFromBoxedFunction<kKernel>());
}

template <Pass kPass, Level kLevel>
void implement() {
  if constexpr (kPass == kBackward) {
    implement<&backward_kernel<kLevel>>(kPass, kLevel);
  } else {
    implement<&kernel<kPass, kLevel>>(kPass, kLevel);
  }
}

struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Registers the kernels of all operators of convolutions with PyTorch, which does so without a lock
// that readers take. The caller has made sure that no thread is looking one of them up.
inline void implement_operators() {
  NoWarnings silent;  // PyTorch warns of a kernel that replaces another
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const auto implement_all = []<Pass... kPasses>() {
    (implement<kPasses, kCpu>(), ...);
    (implement<kPasses, kCuda>(), ...);
    (implement<kPasses, kAutograd>(), ...);
  };
  implement_all
      .template operator()<kForward, kInputGrad, kWeightGrad, kFused, kTransposed, kBackward>();
}

}  // namespace fastconv::host
