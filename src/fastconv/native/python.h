// Calls between the library and Python: entries that Python makes, and arguments of eager calls.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <span>

#include "compute_cpu.h"
#include "entry.h"

namespace fastconv::host {

namespace py = pybind11;

inline PyObject* python_make_entry = nullptr;  // the function of ops/entries.py, never released
// Is called with the portable key (None if bundles have no such operator), the operator and the
// arguments of each form that a call makes an entry for, while Python records forms; otherwise
// null.
inline PyObject* python_record = nullptr;

// Calls Python from any thread. A Python error is rethrown in a form that threads of autograd can
// pass on.
template <class Function>
auto in_python(const Function& function) {
  py::gil_scoped_acquire gil;
  try {
    return function();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error persistent;
    persistent.persist();
    throw persistent;
  }
}

inline py::object wrapped(const Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

inline Argument argument_of(const py::tuple& description) {
  Argument argument{Argument::kTensor, 0, {}};
  const auto kind = description[0].cast<std::string>();
  if (kind == "map") {
    argument.kind = Argument::kMap;
    const auto bytes = description[1].cast<std::string>();
    TORCH_INTERNAL_ASSERT(bytes.size() == kMapBytes);
    std::copy(bytes.begin(), bytes.end(), argument.map.begin());
    argument.value = description[2].cast<int64_t>();
    return argument;
  }
  if (kind == "int") argument.kind = Argument::kInteger;
  argument.value = description[1].cast<int64_t>();
  return argument;
}

inline Launch launch_of(const py::tuple& description) {
  Launch launch{reinterpret_cast<void*>(description[0].cast<uintptr_t>()),
                description[1].cast<std::array<unsigned, 3>>(), description[2].cast<unsigned>(),
                description[3].cast<unsigned>(), description[4].cast<bool>()};
  for (const auto& argument : description[5]) {
    launch.arguments.push_back(argument_of(py::reinterpret_borrow<py::tuple>(argument)));
    launch.maps += launch.arguments.back().kind == Argument::kMap;
  }
  return launch;
}

// A reference to a Python object that any thread may drop.
inline std::shared_ptr<PyObject> kept(const py::object& object) {
  return {object.inc_ref().ptr(), [](PyObject* held) {
            py::gil_scoped_acquire gil;
            Py_DECREF(held);
          }};
}

// The function that computes an entry's calls by a function of Python.
inline decltype(Entry::fill) filled_by(const py::object& fill) {
  return [function = kept(fill)](const Call& call, Precision precision, const Tensor& result,
                                 const Tensor& bias_grad) {
    in_python([&] {
      py::handle(function.get())(wrapped(call.first), wrapped(call.second),
                                 wrapped(call.bias_grad ? bias_grad : call.third),
                                 wrapped(call.residual), wrapped(result), kPrecisions[precision]);
    });
  };
}

// The function that computes an entry's calls by the CPU kernels, and those whose numbers need
// another way by a function of Python.
inline decltype(Entry::fill) filled_by_kernels(const py::object& plan,
                                               decltype(Entry::fill) otherwise) {
  const auto [kernel, rows, columns, depth, channels, images, skips] =
      plan.cast<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t, int64_t, bool>>();
  return [=, plan = CpuPlan{cpu_kernel(kernel), {rows, columns, depth, channels, images, skips}}](
             const Call& call, Precision precision, const Tensor& result, const Tensor& bias_grad) {
    if (!compute_by_kernels(call, plan, result, bias_grad)) {
      otherwise(call, precision, result, bias_grad);
    }
  };
}

inline void set_launches(const py::object& made, Launches& entry) {
  entry.scratch_bytes = made.attr("scratch_bytes").cast<int64_t>();
  for (const auto& launch : made.attr("launches")) {
    entry.launches.push_back(launch_of(py::reinterpret_borrow<py::tuple>(launch)));
  }
  if (const py::object trouble = made.attr("trouble"); !trouble.is_none()) {
    entry.trouble = [function = kept(trouble)](auto... what) {
      in_python([&] { py::handle(function.get())(what...); });
    };
  }
}

inline std::shared_ptr<const Entry> entry_of(const py::object& made) {
  const auto entry = std::make_shared<Entry>();
  entry->shape = made.attr("shape").cast<std::vector<int64_t>>();
  entry->format = made.attr("channels_last").cast<bool>() ? channels_last(entry->shape.size())
                                                          : at::MemoryFormat::Contiguous;
  entry->bias_elements = made.attr("bias_elements").cast<int64_t>();
  entry->copied = made.attr("copied").cast<std::array<bool, 2>>();
  entry->regions = made.attr("regions").cast<std::array<int64_t, 2>>();
  set_launches(made, *entry);
  entry->packs = made.attr("packs").cast<size_t>();
  entry->shares = made.attr("shares").cast<int64_t>();
  if (const py::object fill = made.attr("fill"); !fill.is_none()) entry->fill = filled_by(fill);
  if (const py::object plan = made.attr("cpu_plan"); !plan.is_none()) {
    entry->fill = filled_by_kernels(plan, entry->fill);
  }
  return entry;
}

// The operator's arguments, in the order of its schema.
inline py::tuple arguments_of(const Call& call, const py::object& precision) {
  const Geometry& g = call.geometry;
  const auto geometry =
      py::make_tuple(g.stride.list(), g.padding.list(), g.dilation.list(), g.groups, precision);
  const auto both = py::make_tuple(wrapped(call.first), wrapped(call.second));
  const auto format = call.format ? py::cast(*call.format) : py::none();
  if (call.pass == kForward) return both + py::make_tuple(wrapped(call.third)) + geometry;
  if (call.pass == kFused) {
    return both + py::make_tuple(wrapped(call.third), wrapped(call.residual)) + geometry +
           py::make_tuple(kActivations[call.activation], call.slope);
  }
  if (call.pass == kTransposed) {
    return both + py::make_tuple(wrapped(call.third), wrapped(call.residual), call.size.list()) +
           geometry + py::make_tuple(kActivations[call.activation], call.slope);
  }
  const auto common = both + py::make_tuple(call.size.list()) + geometry;
  if (call.pass == kInputGrad) return common + py::make_tuple(format);
  return common + py::make_tuple(call.bias_grad, format);
}

constexpr const char* kForwardWithStatistics = "forward_with_statistics";  // ops/entries.py

inline std::shared_ptr<const Entry> entry_of(const Call& call, Precision precision) {
  return in_python([&] {
    const char* name = call.statistics ? kForwardWithStatistics : kOperators[call.pass];
    const auto arguments = arguments_of(call, py::str(kPrecisions[precision]));
    if (python_record) {
      const py::handle record(python_record);
      Call plain = call;
      plain.statistics = false;
      record(key_of(plain, precision, true), kOperators[call.pass], *arguments);
    }
    return entry_of(py::handle(python_make_entry)(name, *arguments));
  });
}

// Has a function of Python see the forms of all calls from now on, or ends that if it is None.
inline void record_forms(const py::object& function) {
  Py_XDECREF(python_record);
  python_record = function.is_none() ? nullptr : py::object(function).release().ptr();
  table<Entry>.forget();
}

// --- The arguments of an eager call --------------------------------------------------------------

// Each function parses the usual forms of an argument, and returns false for all others: Python
// serves these calls.

inline bool parse(PyObject* object, int64_t& number) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

inline bool parse(PyObject* object, double& number) {
  if (!PyFloat_CheckExact(object)) return false;
  number = PyFloat_AS_DOUBLE(object);
  return true;
}

inline bool parse(PyObject* object, bool& word) {
  word = object == Py_True;
  return word || object == Py_False;
}

// Parses a tensor or None.
inline bool parse(PyObject* object, Tensor& tensor) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;
  tensor = THPVariable_Unpack(object);
  return true;
}

// The elements of a tuple or list; none for any other object.
inline std::span<PyObject*> elements(PyObject* object) {
  if (!PyTuple_CheckExact(object) && !PyList_CheckExact(object)) return {};
  return {PySequence_Fast_ITEMS(object), size_t(PySequence_Fast_GET_SIZE(object))};
}

inline bool parse_two(PyObject* object, int64_t& first, int64_t& second) {
  const auto both = elements(object);
  return both.size() == 2 && parse(both[0], first) && parse(both[1], second);
}

// The element of a tuple or list of one, or the object itself.
inline PyObject* alone(PyObject* object) {
  const auto some = elements(object);
  return some.size() == 1 ? some[0] : object;
}

// Parses a number for each axis, which may be one for all. Sequences have the second axis alone.
inline bool parse_axes(PyObject* object, bool sequences, Axes& values) {
  if (sequences) return parse(alone(object), values[1]);
  if (parse(alone(object), values[0])) {
    std::fill(values.begin(), values.end(), int64_t(values[0]));
    return true;
  }
  const auto each = elements(object);
  if (each.size() != values.size()) return false;
  for (size_t axis = 0; axis < each.size(); ++axis) {
    if (!parse(each[axis], values[axis])) return false;
  }
  return true;
}

// Parses "valid" and "same", for the axes from `first` on.
inline bool parse_named_padding(PyObject* object, const Tensor& weight, size_t first, Geometry& g) {
  if (!PyUnicode_CheckExact(object)) return false;
  g.padding = Sides(g.axes());
  if (PyUnicode_CompareWithASCIIString(object, "valid") == 0) return true;
  const bool dense = std::all_of(g.stride.begin(), g.stride.end(), [](auto s) { return s == 1; });
  if (PyUnicode_CompareWithASCIIString(object, "same") != 0 || !dense) return false;
  for (size_t axis = first; axis < g.axes(); ++axis) {
    int64_t both;
    const int64_t taps = weight.size(2 + axis - first);
    if (__builtin_mul_overflow(g.dilation[axis], taps - 1, &both)) return false;
    if (both < 0) return false;
    g.padding[2 * axis] = both / 2;
    g.padding[2 * axis + 1] = both - both / 2;
  }
  return true;
}

// Parses the padding of each axis, as one number for both of its sides or as two.
inline bool parse_sides(PyObject* object, bool sequences, Sides& padding) {
  const size_t count = padding.size() / 2, first = sequences;
  Axes both(count);
  if (parse_axes(object, sequences, both)) {
    for (size_t axis = 0; axis < count; ++axis) {
      padding[2 * axis] = padding[2 * axis + 1] = both[axis];
    }
    return true;
  }
  padding = Sides(count);
  const auto axes = elements(object);
  if (axes.size() != count - first) return false;
  for (size_t axis = first; axis < count; ++axis) {
    if (!parse_two(axes[axis - first], padding[2 * axis], padding[2 * axis + 1])) return false;
  }
  return true;
}

// Parses the sizes that the output has in addition. Where they are not below the stride, the weight
// may not reach them, which Python takes care of.
inline bool parse_output_padding(PyObject* object, Call& call) {
  call.size = Axes(call.geometry.axes());
  if (!parse_axes(object, call.sequences, call.size)) return false;
  for (size_t axis = 0; axis < call.size.size(); ++axis) {
    if (call.size[axis] < 0 || call.size[axis] >= call.geometry.stride[axis]) return false;
  }
  return true;
}

inline bool parse_precision(PyObject* object, int64_t& precision) {
  precision = kPyTorchs;
  if (object == Py_None) return true;
  if (!PyUnicode_CheckExact(object)) return false;
  for (const int64_t known : {kIeee, kTf32}) {
    if (PyUnicode_CompareWithASCIIString(object, kPrecisions[known]) == 0) precision = known;
  }
  return precision != kPyTorchs;
}

inline bool parse_activation(PyObject* object, int64_t& activation, double& slope) {
  if (object == Py_None) return true;
  const bool has_slope = PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2;
  PyObject* name = has_slope ? PyTuple_GET_ITEM(object, 0) : object;
  if (!PyUnicode_CheckExact(name)) return false;
  const auto is_name = [&](const char* known) {
    return PyUnicode_CompareWithASCIIString(name, known) == 0;
  };
  const auto found = std::find_if(kActivations.begin(), kActivations.end(), is_name);
  activation = found - kActivations.begin();
  if (has_slope) {
    if (!parse(PyTuple_GET_ITEM(object, 1), slope)) return false;
  } else if (activation == kLeakyRelu) {
    slope = kLeakySlope;
  }
  return found != kActivations.end();
}

inline bool parse_epilogue(PyObject* activation, PyObject* residual, Call& call) {
  if (activation == Py_None && residual == Py_None) return true;
  if (call.pass == kForward) call.pass = kFused;
  return parse(residual, call.residual) &&
         parse_activation(activation, call.activation, call.slope);
}

// Whether tensors have the dimensions of sequences, images or volumes, in a batch or not. Other
// errors in sizes are found by the operator.
inline bool have_dimensions(const Call& call) {
  for (const Tensor& tensor : {call.first, call.second}) {
    if (tensor.is_nested() || tensor.layout() != at::kStrided) return false;
  }
  const int64_t batched = call.sequences ? 3 : 2 + call.geometry.axes();
  const int64_t dimensions = call.first.dim();
  return call.second.dim() == batched && (dimensions == batched || dimensions == batched - 1);
}

inline bool has_dimensions(const Tensor& residual, int64_t dimensions) {
  return !residual.is_nested() && residual.layout() == at::kStrided && residual.dim() == dimensions;
}

// Parses the geometry of a call whose tensors are parsed. Only a transposed convolution has an
// output padding; its padding has no name.
inline bool parse_geometry(PyObject* const* arguments, Call& call) {
  Geometry& g = call.geometry;
  if (!parse_axes(arguments[3], call.sequences, g.stride) ||
      !parse_axes(arguments[5], call.sequences, g.dilation) || !parse(arguments[6], g.groups)) {
    return false;
  }
  const bool has_sides = parse_sides(arguments[4], call.sequences, g.padding);
  if (call.pass == kTransposed) return has_sides && parse_output_padding(arguments[11], call);
  return has_sides || parse_named_padding(arguments[4], call.second, call.sequences, g);
}

// Parses a convolution without an epilogue: the first eight arguments of `call` in host.cc.
inline bool parse_convolution(PyObject* const* arguments, Call& call) {
  return parse(arguments[0], call.first) && call.first.defined() &&
         parse(arguments[1], call.second) && call.second.defined() &&
         parse(arguments[2], call.third) && have_dimensions(call) &&
         parse_geometry(arguments, call) && parse_precision(arguments[7], call.geometry.precision);
}

// Parses the arguments of `call` in host.cc.
inline bool parse_call(PyObject* const* arguments, Call& call) {
  return parse_convolution(arguments, call) && parse_epilogue(arguments[8], arguments[9], call) &&
         (!call.residual.defined() || has_dimensions(call.residual, call.first.dim()));
}

}  // namespace fastconv::host
