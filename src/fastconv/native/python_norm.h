// What norm.h and block.h call in Python, and the arguments of their eager calls.
#pragma once

#include "block.h"
#include "python.h"

namespace fastconv::host {

// --- Entries -------------------------------------------------------------------------------------

inline py::tuple arguments_of(const Norm& call) {
  return py::make_tuple(wrapped(call.x), wrapped(call.residual), wrapped(call.weight),
                        wrapped(call.bias), wrapped(call.running_mean), wrapped(call.running_var),
                        wrapped(call.batches), call.training, call.momentum, call.eps,
                        kActivations[call.activation], call.slope);
}

inline py::tuple arguments_of(const NormGrad& call) {
  return py::make_tuple(wrapped(call.grad), wrapped(call.x), wrapped(call.beside),
                        wrapped(call.weight), wrapped(call.bias), wrapped(call.mean),
                        wrapped(call.invstd), call.of_batch, call.residual,
                        kActivations[call.activation], call.slope, call.wants_x,
                        call.wants_parameters, call.wants_residual);
}

inline py::tuple arguments_of(const NormOutput& call) {
  return py::make_tuple(wrapped(call.x), wrapped(call.weight), wrapped(call.bias),
                        wrapped(call.mean), wrapped(call.invstd), kActivations[call.activation],
                        call.slope);
}

inline py::object results_of(const Tensor& made) { return wrapped(made); }

inline py::tuple results_of(const Normalized& made) {
  return py::make_tuple(wrapped(made.y), wrapped(made.mean), wrapped(made.invstd));
}

inline py::tuple results_of(const NormGradients& made) {
  return py::make_tuple(wrapped(made.x), wrapped(made.residual), wrapped(made.weight),
                        wrapped(made.bias));
}

// What an entry depends on beside the operator's arguments.
inline py::tuple given_beside(const Norm& call) {
  return call.shares ? py::make_tuple(call.shares) : py::tuple();
}
inline py::tuple given_beside(const NormGrad&) { return py::tuple(); }
inline py::tuple given_beside(const NormOutput&) { return py::tuple(); }

// Makes an entry by Python: its launches, and the function that fills the results if there is one.
template <class Made, class MadeBy>
std::shared_ptr<Made> norm_entry_of(const char* name, const MadeBy& call, py::object& made) {
  const py::tuple arguments = arguments_of(call);
  if (const py::handle record(python_record); record) record(py::none(), name, *arguments);
  made = py::handle(python_make_entry)(name, *(arguments + given_beside(call)));
  const auto entry = std::make_shared<Made>();
  set_launches(made, *entry);
  if (const py::object fill = made.attr("fill"); !fill.is_none()) {
    entry->fill = [function = kept(fill)](const auto& given, const auto& results) {
      in_python([&] { py::handle(function.get())(arguments_of(given), results_of(results)); });
    };
  }
  return entry;
}

inline std::shared_ptr<const NormEntry> entry_of(const Norm& call) {
  return in_python([&] {
    py::object made;
    const auto entry = norm_entry_of<NormEntry>("batch_norm_forward", call, made);
    const py::object beside = made.attr("beside");
    const auto word = beside.is_none() ? std::string() : beside.cast<std::string>();
    entry->beside = word == "output" ? kOutput : word == "residual" ? kResidual : kNothing;
    return entry;
  });
}

inline std::shared_ptr<const NormOutputEntry> entry_of(const NormOutput& call) {
  return in_python([&] {
    py::object made;
    return norm_entry_of<NormOutputEntry>("batch_norm_output", call, made);
  });
}

inline std::shared_ptr<const NormGradEntry> entry_of(const NormGrad& call) {
  return in_python([&] {
    py::object made;
    return norm_entry_of<NormGradEntry>("batch_norm_backward", call, made);
  });
}

// --- Gradients by the dispatcher -----------------------------------------------------------------

// The functions of ops/batchnorm.py and ops/blocks.py, never released.
inline PyObject *python_norm_gradients = nullptr, *python_block_gradients = nullptr,
                *python_norm_output = nullptr;

inline py::tuple saved_of(const SavedNorm& saved) {
  return py::make_tuple(wrapped(saved.x), wrapped(saved.beside), wrapped(saved.weight),
                        wrapped(saved.bias), wrapped(saved.mean), wrapped(saved.invstd));
}

inline py::tuple options_of(const NormOptions& options) {
  return py::make_tuple(options.of_batch, options.eps, kActivations[options.activation],
                        options.slope, options.residual);
}

inline Tensor tensor_of(const py::handle& object) {
  return object.is_none() ? Tensor() : THPVariable_Unpack(object.ptr());
}

inline NormGradients python_gradients(const Tensor& grad, const SavedNorm& saved,
                                      const NormOptions& options, const NormNeeds& needs) {
  return in_python([&] {
    const py::tuple found = py::handle(python_norm_gradients)(
        wrapped(grad), saved_of(saved), options_of(options),
        py::make_tuple(needs.x, needs.residual, needs.weight, needs.bias));
    return NormGradients{tensor_of(found[0]), tensor_of(found[1]), tensor_of(found[2]),
                         tensor_of(found[3])};
  });
}

inline BlockGradients python_gradients(const Tensor& grad, const Tensor& input,
                                       const Tensor& weight, const Tensor& bias, const Geometry& g,
                                       const SavedNorm& saved, const NormOptions& options,
                                       const std::array<bool, 6>& needs) {
  return in_python([&] {
    const auto precision =
        g.precision == kPyTorchs ? py::object(py::none()) : py::str(kPrecisions[g.precision]);
    const py::tuple found = py::handle(python_block_gradients)(
        wrapped(grad), py::make_tuple(wrapped(input), wrapped(weight), wrapped(bias)),
        py::make_tuple(g.stride.list(), g.padding.list(), g.dilation.list(), g.groups, precision),
        saved_of(saved), options_of(options), needs);
    return BlockGradients{{tensor_of(found[0]), tensor_of(found[1]), tensor_of(found[2])},
                          {{}, tensor_of(found[3]), tensor_of(found[4]), tensor_of(found[5])}};
  });
}

inline Tensor python_output(const NormOutput& call) {
  return in_python([&] { return tensor_of(py::handle(python_norm_output)(*arguments_of(call))); });
}

inline void serve_norms(const py::object& norm_gradients, const py::object& block_gradients,
                        const py::object& norm_output) {
  python_norm_gradients = norm_gradients.inc_ref().ptr();
  python_block_gradients = block_gradients.inc_ref().ptr();
  python_norm_output = norm_output.inc_ref().ptr();
  make_norm_entry = [](const Norm& call) { return entry_of(call); };
  make_norm_output_entry = [](const NormOutput& call) { return entry_of(call); };
  make_norm_grad_entry = [](const NormGrad& call) { return entry_of(call); };
  dispatch_norm_gradients = [](const auto&... all) { return python_gradients(all...); };
  dispatch_norm_output = [](const NormOutput& call) { return python_output(call); };
  dispatch_block_gradients = [](const auto&... all) { return python_gradients(all...); };
}

// --- The arguments of an eager call --------------------------------------------------------------

// Parses the number of batches, which is read where there is no momentum.
inline bool parse_momentum(PyObject* momentum, PyObject* batches, Norm& call) {
  if (momentum != Py_None) return parse(momentum, call.momentum);
  if (!call.training || !call.running_mean.defined()) return true;
  return parse(batches, call.batches) && call.batches.defined();
}

// Parses whether a call counts its batch in the number of batches.
inline bool parse_counts(PyObject* counts, PyObject* batches, Norm& call) {
  bool is_wanted = false;
  return parse(counts, is_wanted) && (!is_wanted || parse(batches, call.counted));
}

// Parses residual, weight, bias, running_mean, running_var, batches, training, momentum, eps,
// activation, and whether the call counts its batch.
constexpr Py_ssize_t kNormArguments = 11;
inline bool parse_norm(PyObject* const* arguments, Norm& call) {
  return parse(arguments[0], call.residual) && parse(arguments[1], call.weight) &&
         parse(arguments[2], call.bias) && parse(arguments[3], call.running_mean) &&
         parse(arguments[4], call.running_var) && parse(arguments[6], call.training) &&
         parse_momentum(arguments[7], arguments[5], call) && parse(arguments[8], call.eps) &&
         parse_activation(arguments[9], call.activation, call.slope) &&
         parse_counts(arguments[10], arguments[5], call);
}

}  // namespace fastconv::host
