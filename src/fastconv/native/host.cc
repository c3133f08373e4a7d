// The native host path: all that a call does on the host, in C++, as a module of Python.
//
// The form of a call (shapes, strides, types, devices, alignment, geometry, precision) is the key
// of a table (entry.h), whose entries say what to allocate and what to launch (run.h, launch.h).
// Python makes an entry at the first call of a form (`make_entry` in ops/entries.py): it checks
// arguments, plans, compiles, and raises all errors.
//
// Eager calls enter by `call` below. If they are not plain (`is_plain` in autograd.h), they go
// through PyTorch's dispatcher, whose kernels for our operators are in operators.h and
// norm_operators.h.

#include <torch/csrc/autograd/python_cpp_function.h>

#include <chrono>
#include <thread>

#include "norm_operators.h"
#include "python_norm.h"

// Declared here because PyTorch's header for it, torch/csrc/jit/python/pybind_utils.h, doubles the
// time that this file takes to compile.
namespace torch::jit {
py::object toPyObject(c10::IValue ivalue);
}

namespace fastconv::host {

// --- Operators -----------------------------------------------------------------------------------

// Python's kernels by operator, for the CPU, CUDA and autograd; never released.
std::array<std::array<PyObject*, kKeys.size()>, kOperators.size()> python_kernels{};

// The stack has a memory format as the number of an enumeration, which Python's kernels do not
// take.
py::object to_python(const c10::Argument& argument, const IValue& value) {
  const bool is_format = argument.name() == "memory_format" && !value.isNone();
  return is_format ? py::cast(value.toMemoryFormat()) : torch::jit::toPyObject(value);
}

void call_python(Pass pass, Level level, const c10::OperatorHandle& op, Stack* stack) {
  const auto& expected = op.schema().arguments();
  const size_t count = expected.size();
  in_python([&] {
    py::tuple arguments(count);
    for (size_t i = 0; i < count; ++i) {
      arguments[i] = to_python(expected[i], torch::jit::peek(*stack, i, count));
    }
    const py::object result = py::handle(python_kernels[pass][level])(*arguments);
    torch::jit::drop(*stack, count);
    if (op.schema().returns().size() > 1) {
      for (const auto& tensor : result) stack->emplace_back(py::cast<Tensor>(tensor));
    } else {
      stack->emplace_back(py::cast<Tensor>(result));
    }
  });
}

// Takes the place of Python's kernels, given by the operator's name. An operator that has none for
// autograd leaves that to PyTorch.
void register_operators(const py::dict& kernels) {
  for (size_t pass = 0; pass < kOperators.size(); ++pass) {
    const py::tuple of_pass = kernels[kOperators[pass]];
    for (size_t level = 0; level < of_pass.size(); ++level) {
      python_kernels[pass][level] = py::object(of_pass[level]).release().ptr();
    }
  }
  replaced = call_python;
  // No thread begins a call of Python's while this one holds the GIL. One that has released it to
  // call an operator finds Python's kernel meanwhile, and waits there for the GIL.
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  implement_operators();
  implement_norms();
}

// --- Eager calls ---------------------------------------------------------------------------------

// call(input, weight, bias, stride, padding, dilation, groups, precision, activation, residual,
// axes), all by position: a convolution along so many axes, 1, 2 or 3. With one more, the output
// padding, it is a transposed convolution. It returns NotImplemented for a call that it does not
// serve.
PyObject* call_from_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 11 || count == 12, "call takes 11 or 12 arguments, not ", count);
  Call call{count == 12 ? kTransposed : kForward};
  int64_t axes = 0;
  TORCH_CHECK_TYPE(parse(arguments[10], axes) && 1 <= axes && axes <= 3, "axes should be 1 to 3");
  call.sequences = axes == 1;
  call.geometry = Geometry::along(std::max<int64_t>(axes, 2));
  std::optional<Tensor> output;
  if (!at::impl::torch_function_mode_enabled() && parse_call(arguments, call)) {
    const py::gil_scoped_release others_may_run;
    output = convolve(std::move(call));
  }
  if (!output) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(std::move(*output));
  END_HANDLE_TH_ERRORS
}

// batch_norm_act(input, residual, weight, bias, running_mean, running_var, num_batches_tracked,
// training, momentum, eps, activation, counts), all by position, or NotImplemented.
PyObject* norm_from_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 1 + kNormArguments, "batch_norm_act takes 12 arguments, not ", count);
  Norm call;
  std::optional<Tensor> output;
  if (!at::impl::torch_function_mode_enabled() && parse(arguments[0], call.x) && call.x.defined() &&
      parse_norm(arguments + 1, call)) {
    const py::gil_scoped_release others_may_run;
    output = normalize(std::move(call));
  }
  if (!output) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(std::move(*output));
  END_HANDLE_TH_ERRORS
}

// Has a convolution as many axes as its weight; returns false if there are none, or too many.
bool set_axes(PyObject* weight, Call& call) {
  if (!parse(weight, call.second) || !call.second.defined()) return false;
  const int64_t axes = call.second.dim() - 2;
  if (axes < 1 || axes > 3) return false;
  call.sequences = axes == 1;
  call.geometry = Geometry::along(std::max<int64_t>(axes, 2));
  return true;
}

// conv_bn_act(input, weight, bias, stride, padding, dilation, groups, precision, residual, ...,
// recomputes) in training, or NotImplemented; the arguments from the residual on are those of
// batch_norm_act. `recomputes` is for inputs that are outputs of either function: see block.h.
PyObject* block_from_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 9 + kNormArguments, "conv_bn_act takes 20 arguments, not ", count);
  Call conv{kForward};
  Norm norm;
  bool recomputes = false;
  std::optional<Tensor> output;
  if (!at::impl::torch_function_mode_enabled() && set_axes(arguments[1], conv) &&
      parse_convolution(arguments, conv) && conv.first.dim() == conv.second.dim() &&
      parse_norm(arguments + 8, norm) && norm.training &&
      parse(arguments[8 + kNormArguments], recomputes)) {
    const py::gil_scoped_release others_may_run;
    output = convolve_and_normalize(std::move(conv), std::move(norm), recomputes);
  }
  if (!output) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(std::move(*output));
  END_HANDLE_TH_ERRORS
}

using Fastcall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// A function of Python that takes arguments by position.
template <Fastcall kFunction>
py::object function_of(const char* name) {
  static PyMethodDef method = {name,
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(kFunction)),
                               METH_FASTCALL, nullptr};
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr));
}

// Makes a node's class in Python, where PyTorch looks up classes of C++ nodes
// (torch.autograd.graph.Node).
template <class Function>
void make_node_class() {
  static PyTypeObject node_class{};
  torch::autograd::_initFunctionPyTypeObject(node_class, Function::kName, nullptr, nullptr);
  torch::autograd::registerCppFunction(typeid(Node<Function>), &node_class);
  const auto classes = py::module_::import("torch._C").attr("_functions");
  classes.attr(Function::kName) = py::handle(reinterpret_cast<PyObject*>(&node_class));
}

}  // namespace fastconv::host

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace fastconv::host;
  make_node_class<Conv2d>();
  make_node_class<ConvTranspose>();
  make_node_class<BatchNorm>();
  make_node_class<ConvBNAct>();
  make_entry = [](const Call& call, Precision precision) { return entry_of(call, precision); };
  module.def("set_make_entry",
             [](const py::object& function) { python_make_entry = function.inc_ref().ptr(); });
  module.def("record_forms", [](const py::object& function) {
    record_forms(function);
    table<NormEntry>.forget();
    table<NormOutputEntry>.forget();
    table<NormGradEntry>.forget();
  });
  module.def("register_operators", &register_operators);
  module.def("serve_operators", [](bool on) { serving = on; });
  module.def(
      "freeze", [](bool is_so) { store.freeze(is_so); }, py::call_guard<py::gil_scoped_release>());
  module.def(
      "multiply_add_rate",
      [](bool is_double, double seconds) {
        return fastconv::cpu::multiply_add_rate(
            is_double ? fastconv::cpu::kFloat64 : fastconv::cpu::kFloat32, all_threads(), seconds);
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("bypass", [](bool on) { bypassed = on; });
  module.def("serve_norms", &serve_norms);
  module.attr("call") = function_of<call_from_python>("call");
  module.attr("batch_norm_act") = function_of<norm_from_python>("batch_norm_act");
  module.attr("conv_bn_act") = function_of<block_from_python>("conv_bn_act");
}
