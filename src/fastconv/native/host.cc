// The host path in C++: what an eager call does between the user and the GPU.
//
// A call's form (shapes, strides, types, devices, alignment, geometry, precision) is looked up in a
// table. What is found there says all that is left to do: allocate, and launch. What is not found
// is asked of Python (`prepare` of ops/entries.py), once: checks, planning and compiling are there,
// and so are the words of every error.
//
// Whatever is not plain goes to PyTorch's dispatcher, which knows the operators: `is_plain` is the
// one place that says what that is.

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <pthread.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

namespace py = pybind11;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- What is asked for ---------------------------------------------------------------------------

enum Pass : int64_t { kForward, kInputGrad, kWeightGrad };
constexpr std::array kOperators = {"forward", "input_grad", "weight_grad"};

enum Precision : int64_t { kIeee, kTf32, kPyTorchs };  // the last: whatever PyTorch is set to
constexpr std::array kPrecisions = {"ieee", "tf32"};

struct Geometry {
  std::array<int64_t, 2> stride;
  std::array<int64_t, 4> padding;  // top, bottom, left, right
  std::array<int64_t, 2> dilation;
  int64_t groups;
  int64_t precision;

  static constexpr size_t kNumbers = 10;

  std::vector<int64_t> numbers() const {
    return {stride[0],  stride[1],   padding[0],  padding[1], padding[2],
            padding[3], dilation[0], dilation[1], groups,     precision};
  }

  static Geometry of(const std::vector<int64_t>& n) {
    TORCH_INTERNAL_ASSERT(n.size() == kNumbers);
    return {{n[0], n[1]}, {n[2], n[3], n[4], n[5]}, {n[6], n[7]}, n[8], n[9]};
  }
};

// One call of an operator. `third` is the forward pass's bias. `size` is the input's, or the
// kernel's, where the operator is told; so are `format` (of a gradient) and `bias_grad`.
struct Call {
  Pass pass;
  Tensor first{}, second{}, third{};
  Geometry geometry{};
  std::array<int64_t, 2> size{};
  std::optional<at::MemoryFormat> format{};
  bool bias_grad = false;
  int64_t frozen = 0;  // the store's period, in which the packed weight may be kept
};

// How PyTorch declares what its own convolution asks has changed twice.
bool allows_tf32(bool (at::Context::*asks)() const) { return (at::globalContext().*asks)(); }
bool allows_tf32(bool (at::Context::*asks)(const std::string&) const) {
  return (at::globalContext().*asks)("conv");
}
template <class Op>
bool allows_tf32(bool (at::Context::*asks)(std::optional<Op>) const) {
  return (at::globalContext().*asks)(Op::CONV);
}

Precision precision_of(const Call& call) {
  const auto real = c10::toRealValueType(call.first.scalar_type());
  if (real != at::kFloat) return kIeee;  // the rest has no choice
  if (call.geometry.precision != kPyTorchs) return Precision(call.geometry.precision);
  return allows_tf32(&at::Context::allowTF32CuDNN) ? kTf32 : kIeee;
}

// --- What is kept of it --------------------------------------------------------------------------

constexpr size_t kMapBytes = 128;  // of a CUtensorMap

struct Argument {
  enum { kTensor, kInteger, kMap } kind;
  int64_t value;  // the integer itself, or which tensor
  std::array<char, kMapBytes> map;
};

struct Launch {
  void* function;
  std::array<unsigned, 3> grid;
  unsigned block, shared_bytes;
  std::vector<Argument> arguments{};
  size_t maps = 0;  // among them
};

struct Entry {
  std::vector<int64_t> shape;
  at::MemoryFormat format;
  int64_t bias_elements;       // of the bias's gradient
  std::array<bool, 2> copied;  // which of the two tensors have to be made contiguous first
  int64_t scratch_bytes;
  std::vector<Launch> launches;
  size_t packs;     // how many of them only pack the weight, into a workspace the others only read
  py::object fill;  // where there is more to do than to launch: does all of it
  py::object trouble;  // raises an error for the launch that failed, or mends the cause
};

using Key = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Key& key) const {
    size_t hash = 14695981039346656037ull;
    for (const int64_t number : key) hash = (hash ^ size_t(number)) * 1099511628211ull;
    return hash ^ (hash >> 32);
  }
};

void append(Key& key, const Tensor& tensor) {
  if (!tensor.defined()) {
    key.push_back(-1);
    return;
  }
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
  key.push_back(int64_t(tensor.scalar_type()));
  key.push_back(int64_t(tensor.device().type()) << 32 | uint8_t(tensor.device().index()));
}

uintptr_t address_of(const Tensor& tensor) {
  return tensor.defined() ? uintptr_t(tensor.const_data_ptr()) : 0;
}

bool aligned(const Tensor& tensor) { return address_of(tensor) % 16 == 0; }

Key key_of(const Call& call, Precision precision) {
  const Geometry& g = call.geometry;
  Key key;
  key.reserve(48);
  // Each tensor's alignment, not that of all: it does not matter of one that will be copied.
  key.insert(key.end(),
             {call.pass, precision, aligned(call.first), aligned(call.second), call.bias_grad,
              call.size[0], call.size[1], call.format ? int64_t(*call.format) : -1, g.groups});
  key.insert(key.end(), g.stride.begin(), g.stride.end());
  key.insert(key.end(), g.padding.begin(), g.padding.end());
  key.insert(key.end(), g.dilation.begin(), g.dilation.end());
  append(key, call.first);
  append(key, call.second);
  append(key, call.third);
  return key;
}

// --- Python: what is not known yet ---------------------------------------------------------------

PyObject* prepare = nullptr;  // ops/entries.py's, for as long as the process lives

// Calls Python from wherever; an error of its own goes on as such, through threads of autograd too.
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

py::object wrapped(const Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

Argument argument_of(const py::tuple& description) {
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

Launch launch_of(const py::tuple& description) {
  Launch launch{reinterpret_cast<void*>(description[0].cast<uintptr_t>()),
                description[1].cast<std::array<unsigned, 3>>(), description[2].cast<unsigned>(),
                description[3].cast<unsigned>()};
  for (const auto& argument : description[4]) {
    launch.arguments.push_back(argument_of(py::reinterpret_borrow<py::tuple>(argument)));
    launch.maps += launch.arguments.back().kind == Argument::kMap;
  }
  return launch;
}

std::shared_ptr<const Entry> entry_of(const py::object& prepared) {
  const auto entry = std::shared_ptr<Entry>(new Entry, [](Entry* entry) {
    py::gil_scoped_acquire gil;  // it holds Python's objects
    delete entry;
  });
  entry->shape = prepared.attr("shape").cast<std::vector<int64_t>>();
  entry->format = prepared.attr("channels_last").cast<bool>() ? at::MemoryFormat::ChannelsLast
                                                              : at::MemoryFormat::Contiguous;
  entry->bias_elements = prepared.attr("bias_elements").cast<int64_t>();
  entry->copied = prepared.attr("copied").cast<std::array<bool, 2>>();
  entry->scratch_bytes = prepared.attr("scratch_bytes").cast<int64_t>();
  for (const auto& launch : prepared.attr("launches")) {
    entry->launches.push_back(launch_of(py::reinterpret_borrow<py::tuple>(launch)));
  }
  entry->packs = prepared.attr("packs").cast<size_t>();
  entry->fill = prepared.attr("fill");
  entry->trouble = prepared.attr("trouble");
  return entry;
}

// The operator's arguments, as its schema has them.
py::tuple arguments_of(const Call& call, const py::object& precision) {
  const Geometry& g = call.geometry;
  const auto geometry = py::make_tuple(g.stride, g.padding, g.dilation, g.groups, precision);
  const auto both = py::make_tuple(wrapped(call.first), wrapped(call.second));
  const auto format = call.format ? py::cast(*call.format) : py::none();
  if (call.pass == kForward) return both + py::make_tuple(wrapped(call.third)) + geometry;
  const auto told = both + py::make_tuple(call.size) + geometry;
  if (call.pass == kInputGrad) return told + py::make_tuple(format);
  return told + py::make_tuple(call.bias_grad, format);
}

std::shared_ptr<const Entry> prepared(const Call& call, Precision precision) {
  return in_python([&] {
    const py::object answer = py::handle(prepare)(
        kOperators[call.pass], *arguments_of(call, py::str(kPrecisions[precision])));
    return entry_of(answer);
  });
}

std::shared_ptr<const Entry> find(const Call& call, Precision precision) {
  using Table = std::unordered_map<Key, std::shared_ptr<const Entry>, Hash>;
  constexpr size_t kMost = 4096;
  static auto& table = *new Table;
  static auto& mutex = *new std::shared_mutex;  // neither is destroyed: threads may outlive main
  // A forked process has none of the other threads, one of which might have had the lock.
  static const int forks [[maybe_unused]] = pthread_atfork(
      [] { mutex.lock(); }, [] { mutex.unlock(); }, [] { new (&mutex) std::shared_mutex; });
  Key key = key_of(call, precision);
  {
    const std::shared_lock lock(mutex);
    if (const auto found = table.find(key); found != table.end()) return found->second;
  }
  auto entry = prepared(call, precision);
  Table dropped;  // whose entries need the interpreter to go, which is not waited for in a lock
  const std::unique_lock lock(mutex);
  if (table.size() >= kMost) table.swap(dropped);
  table.emplace(std::move(key), entry);
  return entry;
}

// --- The driver ----------------------------------------------------------------------------------

// From libraries that PyTorch has loaded: nothing of CUDA is needed to build this.
void* loaded(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  void* found = handle ? dlsym(handle, name) : nullptr;
  TORCH_CHECK(found, "fastconv cannot find ", name, " in ", library, ", which should be loaded");
  return found;
}

template <class Function>
Function* driver(const char* name) {
  return reinterpret_cast<Function*>(loaded("libcuda.so.1", name));
}

// PyTorch's current stream. A CUDAStream is nothing but a Stream, and PyTorch's header for it needs
// the toolkit's.
void* stream_of(const at::Device& device) {
  if (!device.is_cuda()) return nullptr;
  static const auto handle = reinterpret_cast<void* (*)(const c10::Stream*)>(
      loaded("libc10_cuda.so", "_ZNK3c104cuda10CUDAStream6streamEv"));
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return handle(&stream);
}

constexpr size_t kTensors = 5;
using Addresses = std::array<uintptr_t, kTensors>;

// As aligned as the driver demands of a CUtensorMap, and more.
struct alignas(128) Map {
  std::array<char, kMapBytes> bytes;
};

struct Status {
  int code;
  int64_t mapped = -1;  // the argument whose map could not be made
  uintptr_t address = 0;
};

Status start(const Launch& launch, const Addresses& addresses, void* stream) {
  using LaunchKernel = int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, void*, void**, void**);
  using ReplaceAddress = int(void*, void*);
  static const auto launch_kernel = driver<LaunchKernel>("cuLaunchKernel");
  std::vector<Map> maps;
  maps.reserve(launch.maps);  // so that none moves
  c10::SmallVector<void*, 16> arguments;
  for (const Argument& argument : launch.arguments) {
    const void* at = &argument.value;
    if (argument.kind == Argument::kTensor) at = &addresses[argument.value];
    if (argument.kind == Argument::kMap) {
      static const auto replace = driver<ReplaceAddress>("cuTensorMapReplaceAddress");
      at = &maps.emplace_back(Map{argument.map});
      const uintptr_t address = addresses[argument.value];
      if (const int code = replace(&maps.back(), reinterpret_cast<void*>(address))) {
        return {code, &argument - launch.arguments.data(), address};
      }
    }
    arguments.push_back(const_cast<void*>(at));
  }
  const auto [x, y, z] = launch.grid;
  return {launch_kernel(launch.function, x, y, z, launch.block, 1, 1, launch.shared_bytes, stream,
                        arguments.data(), nullptr)};
}

void start_all(const Entry& entry, size_t first, const Addresses& addresses, void* stream) {
  for (size_t i = first; i < entry.launches.size(); ++i) {
    for (bool again = false;; again = true) {
      const Status status = start(entry.launches[i], addresses, stream);
      if (status.code == 0) break;
      in_python([&] { entry.trouble(i, status.mapped, status.address, status.code, again); });
    }
  }
}

// --- A call below autograd -----------------------------------------------------------------------

struct Results {
  Tensor first, bias_grad;
};

Tensor empty(at::IntArrayRef shape, const Tensor& like,
             std::optional<at::MemoryFormat> format = std::nullopt) {
  // What at::empty would come to in the end.
  const auto device = like.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::_ops::empty_memory_format::redispatch(
      c10::DispatchKeySet(device), c10::fromIntArrayRefSlow(shape), like.scalar_type(),
      at::kStrided, like.device(), false, format);
}

// Memory from wherever PyTorch has just taken a tensor's; a tensor of its own would cost more.
at::DataPtr workspace(int64_t bytes, const Tensor& beside) {
  return bytes ? beside.storage().allocator()->allocate(bytes) : at::DataPtr();
}

// --- Packed weights that are kept
// ------------------------------------------------------------------

// fastconv.frozen_weights: whoever uses it vouches that weights stay what they are, but for changes
// that their version counters tell. These alone would not do: what is written by way of `.data`, by
// a CUDA graph, by all-gathers of FSDP or by others' kernels changes no counter.

struct Packed {
  std::shared_ptr<const Entry> entry;  // so that no other has its address
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint32_t version;
  at::DataPtr memory;
};

// By entry, address and stream: on another stream, nothing says that it has been packed by now.
using Place = std::tuple<const Entry*, uintptr_t, void*>;

struct Store {
  static constexpr int64_t kMostBytes = int64_t(2) << 30;
  std::map<Place, std::shared_ptr<const Packed>> kept;
  std::mutex mutex;
  std::atomic<int64_t> period = 0;  // the number of a time in which weights are frozen, or 0
  int64_t periods = 0;

  void freeze(bool is_so) {
    decltype(kept) dropped;  // entries may need the interpreter to go: not in the lock
    const std::lock_guard lock(mutex);
    kept.swap(dropped);
    period = is_so ? ++periods : 0;
  }

  std::shared_ptr<const Packed> find(const Place& place, const Tensor& weight) {
    const std::lock_guard lock(mutex);
    const auto found = kept.find(place);
    if (found == kept.end()) return nullptr;
    const Packed& packed = *found->second;
    const bool same = packed.storage.lock().get() == weight.storage().unsafeGetStorageImpl();
    return same && packed.version == version_of(weight) ? found->second : nullptr;
  }

  // What has been packed, with nothing left to be launched for it.
  void keep(const Place& place, std::shared_ptr<const Packed> packed, int64_t since) {
    decltype(kept) others, all;
    const std::lock_guard lock(mutex);
    if (period != since) return;
    int64_t bytes = packed->entry->scratch_bytes;
    for (const auto& [where, one] : kept) {
      if (where == place || one->storage.expired()) continue;
      others.emplace(where, one);
      bytes += one->entry->scratch_bytes;
    }
    if (bytes <= kMostBytes) others.emplace(place, std::move(packed));
    all.swap(kept);  // to go after the lock
    kept.swap(others);
  }

  static uint32_t version_of(const Tensor& tensor) {
    return tensor.is_inference() ? 0 : uint32_t(tensor._version());
  }
};

auto& store = *new Store;  // never destroyed: the driver may be gone by then

bool is_captured(void* stream) {
  using IsCapturing = int(void*, int*);
  static const auto is_capturing = driver<IsCapturing>("cuStreamIsCapturing");
  int status = 0;
  return is_capturing(stream, &status) != 0 || status != 0;
}

// --- A call below autograd
// ------------------------------------------------------------------------

Results run(const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Precision precision = precision_of(call);
  const auto entry = find(call, precision);
  Tensor first = call.first, second = call.second, third = call.third;
  const c10::OptionalDeviceGuard on(first.is_cuda() ? std::optional(first.device()) : std::nullopt);
  Results results{empty(entry->shape, first, entry->format), {}};
  if (call.bias_grad) results.bias_grad = empty(entry->bias_elements, first);
  if (!entry->fill.is_none()) {
    const Tensor& last = call.bias_grad ? results.bias_grad : third;
    in_python([&] {
      entry->fill(wrapped(first), wrapped(second), wrapped(last), wrapped(results.first),
                  kPrecisions[precision]);
    });
  }
  if (entry->launches.empty()) return results;
  if (entry->copied[0]) first = first.contiguous();
  if (entry->copied[1]) second = second.contiguous();
  if (third.defined()) third = third.contiguous();
  void* stream = stream_of(first.device());
  const Place place{entry.get(), address_of(second), stream};
  const bool keeps = call.frozen && entry->packs && !entry->copied[1] && !is_captured(stream);
  const auto kept = keeps ? store.find(place, second) : nullptr;
  at::DataPtr scratch = kept ? at::DataPtr() : workspace(entry->scratch_bytes, results.first);
  const uintptr_t from = address_of(first), by = address_of(second), to = address_of(results.first),
                  working = uintptr_t(kept ? kept->memory.get() : scratch.get());
  const Addresses addresses = call.pass == kWeightGrad
                                  ? Addresses{from, by, to, address_of(results.bias_grad), working}
                                  : Addresses{from, by, address_of(third), to, working};
  start_all(*entry, kept ? entry->packs : 0, addresses, stream);
  if (keeps && !kept) {
    Packed packed{entry, second.storage().getWeakStorageImpl(), Store::version_of(second),
                  std::move(scratch)};
    store.keep(place, std::make_shared<const Packed>(std::move(packed)), call.frozen);
  }
  return results;
}

// --- What stands between the caller and the device -----------------------------------------------

c10::DispatchKeySet keys_of(const Tensor& first, const Tensor& second, const Tensor& third = {}) {
  auto keys = first.key_set() | second.key_set();
  if (third.defined()) keys = keys | third.key_set();
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return (keys | local.included_) - local.excluded_;
}

// Whether the dispatcher would find nothing to do for these keys but to record, and to call the
// device's kernel: no transform, no mode, no subclass, no tracer, no lazy conjugate, nor two
// devices. Of a profiler it has no key.
bool is_plain(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  const auto rest = keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                    c10::DispatchKeySet(DispatchKey::BackendSelect);
  return (rest == c10::DispatchKeySet(DispatchKey::CUDA) ||
          rest == c10::DispatchKeySet(DispatchKey::CPU)) &&
         !at::hasCallbacks();
}

template <class... Tensors>
bool is_recorded(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && ((tensors.defined() && tensors.requires_grad()) || ...);
}

template <class... Tensors>
bool has_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

// A gradient, of which autocast has nothing to say; recorded ones are Python's, by way of the
// dispatcher.
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

// In PyTorch both gradients of a convolution are laid out as its output is, complex ones
// contiguously.
at::MemoryFormat gradient_format(const Tensor& input, const Tensor& weight) {
  const auto type = input.scalar_type();
  const bool never = input.is_complex() || (type == at::kDouble && input.is_cuda());
  const auto last = at::MemoryFormat::ChannelsLast;
  const bool either =
      input.suggest_memory_format() == last || weight.suggest_memory_format() == last;
  return either && !never ? last : at::MemoryFormat::Contiguous;
}

std::array<int64_t, 2> size_of(const Tensor& tensor) { return {tensor.size(2), tensor.size(3)}; }

// The backward pass, in the form in which PyTorch's own C++ functions have it.
struct Conv2d {
  static constexpr bool is_traceable = true;  // by compiled autograd

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(3);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return found;
    const auto saved = context->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1];
    const auto geometry = Geometry::of(context->saved_data["geometry"].toIntVector());
    const auto format = gradient_format(input, weight);
    // Not what was recorded, but what the engine asks for now.
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

constexpr auto kNodeName = "FastconvConv2dBackward";  // ops/autograd.py's

// PyTorch's node for C++ functions, under this name.
struct Conv2dBackward final : torch::autograd::CppNode<Conv2d> {
  std::string name() const override { return kNodeName; }
};

using NodePointer = decltype(torch::autograd::Edge::function);

// Nodes are counted by std::shared_ptr up to PyTorch 2.12, and by themselves since.
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

// The convolution, or nothing where the dispatcher has to see it.
std::optional<Tensor> conv2d(Call call) {
  auto keys = keys_of(call.first, call.second, call.third);
  const auto casts = keys & c10::autocast_dispatch_keyset;
  if (!is_plain(keys - casts) || has_tangent(call.first, call.second, call.third)) return {};
  const c10::impl::ExcludeDispatchKeyGuard cast_already(casts);
  if (!casts.empty()) {
    const auto device = call.first.device().type();
    const auto type = at::autocast::get_autocast_dtype(device);
    for (Tensor* tensor : {&call.first, &call.second, &call.third}) {
      if (at::autocast::is_eligible(*tensor, device)) *tensor = tensor->to(type);
    }
  }
  const bool seen = keys.has_any(c10::autograd_dispatch_keyset);  // not so in inference mode
  if (seen && is_recorded(call.first, call.second, call.third)) return record(call);
  call.frozen = store.period;
  return run(call).first;
}

// --- Python's arguments --------------------------------------------------------------------------

// Each of these takes the usual forms, and is false for all others, which Python knows.

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
         parse_precision(arguments[7], g.precision);
}

// conv2d(input, weight, bias, stride, padding, dilation, groups, precision), all by position; or
// NotImplemented, with nothing done.
PyObject* conv2d_in_python(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8, "conv2d takes 8 arguments, not ", count);
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

PyMethodDef conv2d_method = {
    "conv2d", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(conv2d_in_python)),
    METH_FASTCALL, nullptr};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // The node's class in Python, where PyTorch looks for those of C++ (torch.autograd.graph.Node).
  static PyTypeObject node_class{};
  torch::autograd::_initFunctionPyTypeObject(node_class, kNodeName, nullptr, nullptr);
  torch::autograd::registerCppFunction(typeid(Conv2dBackward), &node_class);
  const auto classes = py::module_::import("torch._C").attr("_functions");
  classes.attr(kNodeName) = py::handle(reinterpret_cast<PyObject*>(&node_class));
  module.def("set_prepare", [](const py::object& function) { prepare = function.inc_ref().ptr(); });
  module.def(
      "freeze", [](bool is_so) { store.freeze(is_so); }, py::call_guard<py::gil_scoped_release>());
  module.attr("conv2d") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&conv2d_method, nullptr));
}
