// libfastconv.so: the operators of fastconv for programs without Python.
//
// Python plans, and a bundle has what it has planned: the forms of calls, their launches, and the
// machine code (bundle.h). This library looks a call up there (loading.h), and launches as the
// native host path does (run.h). It computes calls on a CPU by itself (compute.h).
//
// Where Python's fastconv is in the same process, it serves all calls, and this library none.

#include "fastconv.h"

#include <c10/core/DeviceType.h>

#include "compute.h"
#include "loading.h"
#include "operators.h"

namespace fastconv::host {

// Those of schemas.py, given by build.py.
constexpr std::array kSchemas = {FASTCONV_SCHEMAS};
constexpr std::array kNormSchemas = {FASTCONV_NORM_SCHEMAS};
constexpr auto kVariable = "FASTCONV_BUNDLE";

// --- Bundles -------------------------------------------------------------------------------------

struct Loaded {
  std::vector<std::unique_ptr<const Bundle>> bundles{};
  std::mutex mutex{};
  bool has_read_variable = false;
};

auto& loaded_bundles = *new Loaded;  // never destroyed: entries point into bundles

void read_variable() {
  if (loaded_bundles.has_read_variable) return;
  const char* paths = std::getenv(kVariable);
  std::string_view rest = paths ? paths : "";
  decltype(Loaded::bundles) read;
  while (!rest.empty()) {
    const std::string path(rest.substr(0, rest.find(':')));
    rest.remove_prefix(std::min(path.size() + 1, rest.size()));
    if (!path.empty()) read.push_back(read_bundle(path, FASTCONV_VERSION));
  }
  std::move(read.begin(), read.end(), std::back_inserter(loaded_bundles.bundles));
  loaded_bundles.has_read_variable = true;
}

using Found = std::pair<const Bundle*, const BundledEntry*>;

// The entries of a form, one for each GPU that it was planned for.
std::vector<Found> find_bundled(const Key& key) {
  const std::lock_guard lock(loaded_bundles.mutex);
  read_variable();
  std::vector<Found> found;
  for (const auto& bundle : loaded_bundles.bundles) {
    const auto [begin, end] = bundle->entries.equal_range(key);
    for (auto at = begin; at != end; ++at) found.emplace_back(bundle.get(), &at->second);
  }
  return found;
}

std::string names_of_bundles() {
  const std::lock_guard lock(loaded_bundles.mutex);
  std::string names;
  for (const auto& bundle : loaded_bundles.bundles) {
    names += (names.empty() ? "" : ", ") + bundle->path;
  }
  return names.empty() ? "none" : names;
}

// --- Forms in words ------------------------------------------------------------------------------

std::string words_of(const char* name, const Tensor& tensor, bool is_aligned) {
  if (!tensor.defined()) return "";
  return c10::str("; ", name, " ", tensor.scalar_type(), " of size ", tensor.sizes(),
                  " with strides ", tensor.strides(), is_aligned ? "" : " at an unaligned address");
}

std::string words_of(const Call& call, Precision precision) {
  const Geometry& g = call.geometry;
  const bool is_weight_grad = call.pass == kWeightGrad, is_input_grad = call.pass == kInputGrad;
  const bool is_gradient = is_weight_grad || is_input_grad;
  std::string words = c10::str(
      "fastconv::", kOperators[call.pass],
      words_of(is_gradient ? "grad_output" : "input", call.first, aligned(call.first)),
      words_of(is_weight_grad ? "input" : "weight", call.second, aligned(call.second)),
      words_of("bias", call.third, aligned_bias(call.third)),
      words_of("residual", call.residual, aligned(call.residual)), "; stride ",
      at::IntArrayRef(g.stride), ", padding ", at::IntArrayRef(g.padding), ", dilation ",
      at::IntArrayRef(g.dilation), ", groups ", g.groups, ", precision ", kPrecisions[precision]);
  if (is_weight_grad && call.bias_grad) words += ", with the bias's gradient";
  if (is_gradient) {
    words +=
        c10::str(is_weight_grad ? ", kernel size " : ", input size ", at::IntArrayRef(call.size));
  }
  if (call.pass == kTransposed) {
    words += c10::str(", output padding ", at::IntArrayRef(call.size));
  }
  if (is_gradient && call.format) words += c10::str(", memory format ", *call.format);
  if (has_epilogue(call.pass)) words += c10::str(", activation ", kActivations[call.activation]);
  if (call.slope != 0) words += c10::str(" of slope ", call.slope);
  return words;
}

// --- Entries -------------------------------------------------------------------------------------

constexpr auto kAdvice =
    "A bundle has the forms of the examples that it was made with, for the GPUs named: `fastconv "
    "bundle PACKAGE.pt2 --inputs EXAMPLE.pt -o MODEL.fastconv --gpu GPU` makes one.";

std::shared_ptr<const Entry> bundled_entry(const Call& call, Precision precision,
                                           const std::vector<Found>& found) {
  const int index = std::max<int>(call.first.device().index(), 0);
  const Gpu gpu = gpu_of(index);
  std::string others;
  for (const auto& [bundle, bundled] : found) {
    if (bundled->gpu == gpu) {
      const auto entry = loaded_entry(*bundle, *bundled, index);
      if (bundled->is_filled) entry->fill = compute;
      return entry;
    }
    others += (others.empty() ? "" : ", ") + bundled->gpu.words();
  }
  TORCH_CHECK(others.empty(), "the form ", words_of(call, precision), " is planned for ", others,
              ", and cuda:", index, " is ", gpu.words(), ". Bundles loaded: ", names_of_bundles(),
              ". ", kAdvice);
  TORCH_CHECK(false, "no bundle has the form ", words_of(call, precision), "; on cuda:", index,
              ", ", gpu.words(), ". Bundles loaded: ", names_of_bundles(),
              " (fastconv::load_bundle, ", kVariable, "). ", kAdvice);
}

std::shared_ptr<const Entry> entry_of(const Call& call, Precision precision) {
  const auto found = find_bundled(key_of(call, precision, true));
  if (found.empty() && !call.first.is_cuda()) return computed_entry(call);
  return bundled_entry(call, precision, found);
}

// --- Operators -----------------------------------------------------------------------------------

// Serves what the kernels of operators.h hand on: calls with a lazy conjugate, for example, go on
// below autograd. Python would serve all others.
void call_below(Pass pass, Level level, const c10::OperatorHandle& op, Stack* stack) {
  Call call{pass};
  const size_t count = op.schema().arguments().size();
  const IValue* values = &torch::jit::peek(*stack, 0, count);
  if (pass == kBackward) {
    const auto both = read_backward(values);
    TORCH_CHECK(both, op.schema(), " got tensors that do not fit together");
    call = {pass, both->grad, both->input, both->weight};
  } else {
    TORCH_CHECK(read_call(values, call), op.schema(),
                " got an argument that is none of its values");
  }
  const bool is_differentiated = is_recorded(call.first, call.second, call.third, call.residual) ||
                                 has_tangent(call.first, call.second, call.third, call.residual);
  TORCH_CHECK_NOT_IMPLEMENTED(
      level == kAutograd && !is_differentiated,
      "without Python, fastconv differentiates fastconv::forward and, without an epilogue, "
      "fastconv::transposed, once and in reverse mode; this is a call of fastconv::",
      kOperators[pass]);
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

// Takes the place of batch normalization's kernels: a model in evaluation mode does not call them,
// because its batch normalizations are parts of its convolutions.
void refuse_norm(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "without Python, fastconv does not compute ", op.schema().name(),
      ": export the model in evaluation mode, in which fastconv.conv_bn_act and its layers are "
      "convolutions");
}

// Defines the operators, unless Python has defined them. A library that raises an error while it is
// loaded would end the process.
[[maybe_unused]] const bool is_serving = [] {
  make_entry = entry_of;
  replaced = call_below;
  if (c10::Dispatcher::singleton().findSchema({"fastconv::forward", ""})) return false;
  static auto& library =
      *new torch::Library(torch::Library::DEF, "fastconv", std::nullopt, __FILE__, __LINE__);
  for (const char* schema : kSchemas) library.def(schema);
  for (const char* schema : kNormSchemas) {
    library.def(schema, torch::CppFunction::makeFromBoxedFunction<&refuse_norm>());
  }
  implement_operators();
  return true;
}();

}  // namespace fastconv::host

void fastconv::load_bundle(const char* path) {
  using namespace fastconv::host;
  auto bundle = read_bundle(path, FASTCONV_VERSION);
  const std::lock_guard lock(loaded_bundles.mutex);
  loaded_bundles.bundles.push_back(std::move(bundle));
}
