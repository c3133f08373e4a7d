// The native host path: all that an eager call does on the host, in C++.
//
// The form of a call (shapes, strides, types, devices, alignment, geometry, precision) is the key
// of a table (entry.h), whose entries say what to allocate and what to launch (launch.h). Python
// makes an entry at the first call of a form (`make_entry` in ops/entries.py): it checks arguments,
// plans, compiles, and raises all errors.
//
// Calls that are not plain go through PyTorch's dispatcher; `is_plain` defines which these are.

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <algorithm>
#include <atomic>

#include "call.h"
#include "entry.h"
#include "launch.h"
#include "packed.h"

namespace fastconv::host {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- A call below autograd -----------------------------------------------------------------------

struct Results {
  Tensor first, bias_grad;
};

Tensor empty(at::IntArrayRef shape, const Tensor& like,
             std::optional<at::MemoryFormat> format = std::nullopt) {
  // This is what at::empty calls in the end.
  const auto device = like.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::_ops::empty_memory_format::redispatch(
      c10::DispatchKeySet(device), c10::fromIntArrayRefSlow(shape), like.scalar_type(),
      at::kStrided, like.device(), false, format);
}

// Allocates a workspace by the allocator of a tensor's memory, which costs less than a new tensor.
at::DataPtr workspace(int64_t bytes, const Tensor& beside) {
  return bytes ? beside.storage().allocator()->allocate(bytes) : at::DataPtr();
}

Results run(const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Precision precision = precision_of(call);
  const auto entry = find(call, precision);
  Tensor first = call.first, second = call.second, third = call.third, residual = call.residual;
  const c10::OptionalDeviceGuard on(first.is_cuda() ? std::optional(first.device()) : std::nullopt);
  Results results{empty(entry->shape, first, entry->format), {}};
  if (call.bias_grad) results.bias_grad = empty(entry->bias_elements, first);
  if (!entry->fill.is_none()) {
    const Tensor& last = call.bias_grad ? results.bias_grad : third;
    in_python([&] {
      entry->fill(wrapped(first), wrapped(second), wrapped(last), wrapped(residual),
                  wrapped(results.first), kPrecisions[precision]);
    });
  }
  if (entry->launches.empty()) return results;
  if (entry->copied[0]) first = first.contiguous();
  if (entry->copied[1]) second = second.contiguous();
  if (third.defined()) third = third.contiguous();
  if (residual.defined()) residual = residual.contiguous(entry->format);
  void* stream = stream_of(first.device());
  const Place place{entry.get(), address_of(second), stream};
  const bool keeps = call.frozen && entry->packs && !entry->copied[1] && !is_captured(stream);
  const uint32_t version = keeps ? Store::version_of(second) : 0;  // read before packing
  const auto kept = keeps ? store.find(place, second, version) : nullptr;
  at::DataPtr scratch = kept ? at::DataPtr() : workspace(entry->scratch_bytes, results.first);
  const uintptr_t from = address_of(first), by = address_of(second), to = address_of(results.first),
                  working = uintptr_t(kept ? kept->memory.get() : scratch.get());
  const Addresses addresses =
      call.pass == kWeightGrad
          ? Addresses{from, by, to, address_of(results.bias_grad), working}
          : Addresses{from, by, address_of(third), address_of(residual), to, working};
  start_all(*entry, kept ? entry->packs : 0, addresses, stream);
  if (keeps && !kept) {
    Packed packed{entry, second.storage().getWeakStorageImpl(), version, std::move(scratch)};
    store.keep(place, std::make_shared<const Packed>(std::move(packed)), call.frozen);
  }
  return results;
}

// --- Which calls are plain -----------------------------------------------------------------------

template <class... Tensors>
c10::DispatchKeySet keys_of(const Tensor& first, const Tensors&... others) {
  auto keys = first.key_set();
  ((keys = others.defined() ? keys | others.key_set() : keys), ...);
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (keys | local.included_) - local.excluded_;
}

std::atomic<bool> bypassed = false;  // true while planner.only asks for other plans

// Whether the dispatcher would, for these keys, only record the call for autograd and call the
// device's kernel: there is no transform, mode, subclass, tracer, lazy conjugate or second device.
// A profiler and a bypass have no dispatch key, and are checked separately.
bool is_plain(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  const auto rest = keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                    c10::DispatchKeySet(DispatchKey::BackendSelect);
  return (rest == c10::DispatchKeySet(DispatchKey::CUDA) ||
          rest == c10::DispatchKeySet(DispatchKey::CPU)) &&
         !at::hasCallbacks() && !bypassed;
}

template <class... Tensors>
bool is_recorded(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && ((tensors.defined() && tensors.requires_grad()) || ...);
}

template <class... Tensors>
bool has_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

// Computes a gradient operator, for which autocast has no rule. If autograd records it, Python
// computes it, called through the dispatcher.
Results gradient(const Call& call) {
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

// --- Autograd ------------------------------------------------------------------------------------

Tensor conjugate(const Tensor& tensor) { return tensor.is_complex() ? tensor.conj() : tensor; }

Tensor sum_of_positions(const Tensor& grad) {
  if (grad.scalar_type() != at::kComplexHalf) return grad.sum({0, 2, 3});
  return at::view_as_complex(at::view_as_real(grad.resolve_conj()).sum({0, 2, 3}));
}

// In PyTorch both gradients of a convolution have the memory format of its output; complex ones are
// contiguous.
at::MemoryFormat gradient_format(const Tensor& input, const Tensor& weight) {
  const auto type = input.scalar_type();
  const bool never = input.is_complex() || (type == at::kDouble && input.is_cuda());
  const auto last = at::MemoryFormat::ChannelsLast;
  const bool either =
      input.suggest_memory_format() == last || weight.suggest_memory_format() == last;
  return either && !never ? last : at::MemoryFormat::Contiguous;
}

std::array<int64_t, 2> size_of(const Tensor& tensor) { return {tensor.size(2), tensor.size(3)}; }

// The backward pass, in the form that PyTorch's CppNode requires.
struct Conv2d {
  static constexpr bool is_traceable = true;  // compiled autograd may trace it

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(3);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return found;
    const auto saved = context->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1];
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

Tensor record(const Call& call) {
  const NodePointer pointer = new_node<NodePointer>();
  auto& node = static_cast<Conv2dBackward&>(*pointer);
  node.is_variable_input_ = {true, true, true};
  node.set_ctx_grad_fn(pointer);
  node.set_next_edges(torch::autograd::collect_next_edges(call.first, call.second, call.third));
  node.ctx_.set_materialize_grads(false);
  node.ctx_.saved_data["geometry"] = call.geometry.numbers();
  node.ctx_.save_for_backward({call.first, call.second});
  Tensor output = run(call).first;
  torch::autograd::set_history(output, pointer);
  node.output_info_.emplace_back(output);
  node.save_variables_to_ctx();
  return output;
}

// Computes the convolution; returns nothing if the dispatcher has to see the call.
std::optional<Tensor> conv2d(Call call) {
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
  return run(call).first;
}

// --- Python's arguments --------------------------------------------------------------------------

// Each function parses the usual forms of an argument, and returns false for all others: Python
// serves these calls.

bool parse(PyObject* object, int64_t& number) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool parse(PyObject* object, std::array<int64_t, 2>& pair) {
  if (parse(object, pair[0])) {
    pair[1] = pair[0];
    return true;
  }
  return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2 &&
         parse(PyTuple_GET_ITEM(object, 0), pair[0]) && parse(PyTuple_GET_ITEM(object, 1), pair[1]);
}

bool parse_padding(PyObject* object, const Tensor& weight, Geometry& g) {
  std::array<int64_t, 2> rows{}, columns{};
  if (parse(object, rows)) {
    g.padding = {rows[0], rows[0], rows[1], rows[1]};
    return true;
  }
  if (PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2) {
    g.padding = {};
    const bool four = PyTuple_CheckExact(PyTuple_GET_ITEM(object, 0)) &&
                      PyTuple_CheckExact(PyTuple_GET_ITEM(object, 1)) &&
                      parse(PyTuple_GET_ITEM(object, 0), rows) &&
                      parse(PyTuple_GET_ITEM(object, 1), columns);
    g.padding = {rows[0], rows[1], columns[0], columns[1]};
    return four;
  }
  if (!PyUnicode_CheckExact(object)) return false;
  g.padding = {};
  if (PyUnicode_CompareWithASCIIString(object, "valid") == 0) return true;
  if (PyUnicode_CompareWithASCIIString(object, "same") != 0 || g.stride[0] != 1 ||
      g.stride[1] != 1) {
    return false;
  }
  for (size_t axis : {0, 1}) {
    int64_t both;
    if (__builtin_mul_overflow(g.dilation[axis], weight.size(2 + axis) - 1, &both)) return false;
    if (both < 0) return false;
    g.padding[2 * axis] = both / 2;
    g.padding[2 * axis + 1] = both - both / 2;
  }
  return true;
}

bool parse_precision(PyObject* object, int64_t& precision) {
  precision = kPyTorchs;
  if (object == Py_None) return true;
  if (!PyUnicode_CheckExact(object)) return false;
  for (const int64_t known : {kIeee, kTf32}) {
    if (PyUnicode_CompareWithASCIIString(object, kPrecisions[known]) == 0) precision = known;
  }
  return precision != kPyTorchs;
}

bool parse_activation(PyObject* object, Call& call) {
  if (object == Py_None) return true;
  const bool has_slope = PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2;
  PyObject* name = has_slope ? PyTuple_GET_ITEM(object, 0) : object;
  if (!PyUnicode_CheckExact(name)) return false;
  const auto is_name = [&](const char* known) {
    return PyUnicode_CompareWithASCIIString(name, known) == 0;
  };
  const auto found = std::find_if(kActivations.begin(), kActivations.end(), is_name);
  call.activation = found - kActivations.begin();
  if (has_slope) {
    PyObject* slope = PyTuple_GET_ITEM(object, 1);
    if (!PyFloat_CheckExact(slope)) return false;
    call.slope = PyFloat_AS_DOUBLE(slope);
  } else if (call.activation == kLeakyRelu) {
    call.slope = kLeakySlope;
  }
  return found != kActivations.end();
}

bool parse_epilogue(PyObject* activation, PyObject* residual, Call& call) {
  if (activation == Py_None && residual == Py_None) return true;
  call.pass = kFused;
  if (residual != Py_None) {
    if (!THPVariable_CheckExact(residual)) return false;
    call.residual = THPVariable_Unpack(residual);
  }
  return parse_activation(activation, call);
}

bool parse_call(PyObject* const* arguments, Call& call) {
  if (!THPVariable_CheckExact(arguments[0]) || !THPVariable_CheckExact(arguments[1])) return false;
  call.first = THPVariable_Unpack(arguments[0]);
  call.second = THPVariable_Unpack(arguments[1]);
  if (arguments[2] != Py_None) {
    if (!THPVariable_CheckExact(arguments[2])) return false;
    call.third = THPVariable_Unpack(arguments[2]);
  }
  Geometry& g = call.geometry;
  for (const Tensor& tensor : {call.first, call.second}) {
    if (tensor.is_nested() || tensor.layout() != at::kStrided || tensor.dim() != 4) return false;
  }
  return parse(arguments[3], g.stride) && parse(arguments[5], g.dilation) &&
         parse_padding(arguments[4], call.second, g) && parse(arguments[6], g.groups) &&
         parse_precision(arguments[7], g.precision) &&
         parse_epilogue(arguments[8], arguments[9], call);
}

// call(input, weight, bias, stride, padding, dilation, groups, precision, activation, residual),
// all by position. It returns NotImplemented for a call that it does not serve.
PyObject* conv2d_in_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 10, "call takes 10 arguments, not ", count);
  Call call{kForward};
  std::optional<Tensor> output;
  if (!at::impl::torch_function_mode_enabled() && parse_call(arguments, call)) {
    const py::gil_scoped_release others_may_run;
    output = conv2d(std::move(call));
  }
  if (!output) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(std::move(*output));
  END_HANDLE_TH_ERRORS
}

PyMethodDef call_method = {"call",
                           reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(conv2d_in_python)),
                           METH_FASTCALL, nullptr};

}  // namespace fastconv::host

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace fastconv::host;
  // Makes the node's class in Python, where PyTorch looks up classes of C++ nodes
  // (torch.autograd.graph.Node).
  static PyTypeObject node_class{};
  torch::autograd::_initFunctionPyTypeObject(node_class, kNodeName, nullptr, nullptr);
  torch::autograd::registerCppFunction(typeid(Conv2dBackward), &node_class);
  const auto classes = py::module_::import("torch._C").attr("_functions");
  classes.attr(kNodeName) = py::handle(reinterpret_cast<PyObject*>(&node_class));
  module.def("set_make_entry",
             [](const py::object& function) { make_entry = function.inc_ref().ptr(); });
  module.def(
      "freeze", [](bool is_so) { store.freeze(is_so); }, py::call_guard<py::gil_scoped_release>());
  module.def("bypass", [](bool on) { bypassed = on; });
  module.attr("call") = py::reinterpret_steal<py::object>(PyCFunction_New(&call_method, nullptr));
}
