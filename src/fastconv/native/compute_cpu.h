// Calls on a CPU that the CPU kernels compute (cpu/kernels.h).
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>

#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <exception>
#include <numeric>

#include "cpu/kernels.h"
#include "entry.h"

namespace fastconv::host {

// How the kernels compute a call; backends/cpu/plans.py has a class of the same name.
struct CpuPlan {
  cpu::Kernel kernel;
  cpu::Blocks blocks;
};

inline cpu::Kernel cpu_kernel(std::string_view name) {
  if (name == "depthwise") return cpu::kDepthwise;
  if (name == "pointwise") return cpu::kPointwise;
  if (name == "narrow") return cpu::kNarrow;
  TORCH_INTERNAL_ASSERT(name == "direct", "no CPU kernel ", name);
  return cpu::kDirect;
}

// The OpenMP library that PyTorch has loaded. Its threads are those of PyTorch's own operators, and
// a process has no second pool. It is found at run time, so neither the compiler nor its OpenMP
// library matters: GCC's, LLVM's and Intel's all have these functions.
struct OpenMp {
  void (*parallel)(void (*body)(void*), void* context, unsigned threads, unsigned flags);
  int (*thread)();
  int (*threads)();

  static const OpenMp& of_pytorch() {
    static const OpenMp found = [] {
      // A search from libtorch_cpu on finds what that is linked with.
      void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
      OpenMp one{};
      if (!torch) return one;
      one.parallel = reinterpret_cast<decltype(one.parallel)>(dlsym(torch, "GOMP_parallel"));
      one.thread = reinterpret_cast<decltype(one.thread)>(dlsym(torch, "omp_get_thread_num"));
      one.threads = reinterpret_cast<decltype(one.threads)>(dlsym(torch, "omp_get_num_threads"));
      return one;
    }();
    return found;
  }

  bool exists() const { return parallel && thread && threads; }
};

inline void parallel_for(int64_t count, cpu::Parallel::Body body, void* context) {
  struct Job {
    int64_t count;
    cpu::Parallel::Body body;
    void* context;
    std::atomic_flag has_failed;
    std::exception_ptr failure;
  } job{count, body, context, {}, {}};
  const auto run = [](void* data) {
    auto& [count, body, context, has_failed, failure] = *static_cast<Job*>(data);
    const OpenMp& openmp = OpenMp::of_pytorch();
    const int64_t thread = openmp.thread(), threads = openmp.threads();
    const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
    try {
      if (begin < end) body(context, begin, end);
    } catch (...) {  // it may not leave the parallel region
      if (!has_failed.test_and_set()) failure = std::current_exception();
    }
  };
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  if (threads > 0) OpenMp::of_pytorch().parallel(run, &job, unsigned(threads), 0);
  if (job.failure) std::rethrow_exception(job.failure);
}

inline void in_this_thread(int64_t count, cpu::Parallel::Body body, void* context) {
  if (count > 0) body(context, 0, count);
}

// The threads that PyTorch's operators would run in.
inline cpu::Parallel all_threads() {
  const bool is_alone = at::in_parallel_region() || !OpenMp::of_pytorch().exists();
  const int64_t threads = is_alone ? 1 : at::get_num_threads();
  return threads == 1 ? cpu::Parallel(in_this_thread) : cpu::Parallel(parallel_for, threads);
}

// How to run a pass: work of a few microseconds is not worth waking other threads. Depthwise
// layers take longer for a product, as they use each element that they read for few of them.
template <class Pass>
cpu::Parallel threads_for(const Pass& pass, const CpuPlan& plan) {
  constexpr double kLeast = 1 << 20;
  const double products = double(pass.images * pass.groups) * double(pass.depth * pass.channels) *
                          double(pass.planes.outputs * pass.planes.taps) *
                          double(pass.rows.outputs * pass.rows.taps) *
                          double(pass.columns.outputs * pass.columns.taps);
  const bool is_short = products * (plan.kernel == cpu::kDepthwise ? 8 : 1) < kLeast;
  return is_short ? cpu::Parallel(in_this_thread) : all_threads();
}

inline cpu::Type cpu_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return cpu::kFloat32;
    case at::kDouble:
      return cpu::kFloat64;
    case at::kBFloat16:
      return cpu::kBfloat16;
    default:
      TORCH_INTERNAL_ASSERT(tensor.scalar_type() == at::kHalf);
      return cpu::kFloat16;
  }
}

inline cpu::Images images_of(const Tensor& tensor) {
  if (!tensor.defined()) return {nullptr, {}};
  const bool is_volume = tensor.dim() == 5;
  return {const_cast<void*>(tensor.const_data_ptr()),
          {tensor.stride(0), tensor.stride(1), tensor.stride(-2), tensor.stride(-1)},
          is_volume ? tensor.stride(2) : 0};
}

// The axis, counted from the last one, along which a forward pass reads its input; images have a
// single plane. The stride of a single output and the dilation of a single tap have no effect, and
// may be so large that places would overflow.
inline cpu::Axis axis_of(const Geometry& g, int64_t from_last, const Tensor& image,
                         const Tensor& output, const Tensor& weight) {
  const int64_t axis = int64_t(g.axes()) - 1 - from_last;
  if (axis < 0) return cpu::kOnePlane;
  const int64_t size = image.size(2 + axis), before = g.padding[2 * axis],
                padded = size + before + g.padding[2 * axis + 1];
  return {size,
          output.size(2 + axis),
          weight.size(2 + axis),
          std::min(g.stride[axis], padded),
          std::min(g.dilation[axis], padded),
          before};
}

enum : int64_t { kColumns, kRows, kPlanes };  // axes, counted from the last one

// The strides of a weight of which the kernels write dimension `written` and read the other.
inline cpu::Weights weights_of(const Tensor& weight, int64_t channels, int64_t written,
                               int64_t read) {
  return {weight.const_data_ptr(),
          {weight.stride(0) * channels, weight.stride(written), weight.stride(read),
           weight.stride(-2), weight.stride(-1)},
          weight.dim() == 5 ? weight.stride(2) : 0};
}

// The elements of an axis equal modulo the stride, and how they gather from the outputs by some of
// the taps: ops in backends/cpu/axes.py do the same.
struct Residue {
  int64_t first, tap,
      tap_step;  // the first element; the last of its taps, and the step between two
  cpu::Axis axis;
};

inline std::vector<Residue> residues_of(const cpu::Axis& axis) {
  std::vector<Residue> found;
  const int64_t common = std::gcd(axis.step, axis.reach), tap_step = axis.step / common;
  for (int64_t first = 0; first < std::min(axis.step, axis.size); ++first) {
    int64_t start = 0;
    while (start < axis.taps && (first + axis.before - start * axis.reach) % axis.step) ++start;
    const int64_t taps = (axis.taps - start + tap_step - 1) / tap_step, reach = axis.reach / common;
    // Later taps read earlier elements, so the taps are gathered from the last to the first.
    const int64_t before =
        taps ? (start * axis.reach - first - axis.before) / axis.step + (taps - 1) * reach : 0;
    found.push_back(
        {first,
         start + (taps - 1) * tap_step,
         -tap_step,
         {axis.outputs, (axis.size - first + axis.step - 1) / axis.step, taps, 1, reach, before}});
  }
  return found;
}

inline bool is_applied_by_kernels(int64_t activation) {
  const std::string_view name = kActivations[activation];
  return name == "identity" || name == "relu" || name == "relu6" || name == "leaky_relu" ||
         name == "hardswish";
}

inline cpu::Activation cpu_activation(const Call& call) {
  const std::string_view name = kActivations[call.activation];
  return name == "relu"         ? cpu::kRelu
         : name == "relu6"      ? cpu::kRelu6
         : name == "leaky_relu" ? cpu::kLeakyRelu
         : name == "hardswish"  ? cpu::kHardswish
                                : cpu::kIdentity;
}

// What forward passes and input gradients have in common.
inline cpu::Gather gather_of(const Call& call, const CpuPlan& plan, const Tensor& result) {
  cpu::Gather pass{};
  pass.type = cpu_type(result);
  pass.images = result.size(0);
  pass.groups = call.geometry.groups;
  pass.depth = call.first.size(1) / pass.groups;
  pass.channels = result.size(1) / pass.groups;
  pass.source = images_of(call.first);
  pass.target = images_of(result);
  pass.residual = images_of(call.residual);
  pass.bias = call.third.defined() ? call.third.const_data_ptr() : nullptr;
  pass.activation = cpu_activation(call);
  pass.slope = call.slope;
  pass.blocks = plan.blocks;
  return pass;
}

inline bool forward_by_kernels(const Call& call, const CpuPlan& plan, const Tensor& result) {
  const Tensor& weight = call.second;
  const auto axis = [&](int64_t from_last) {
    return axis_of(call.geometry, from_last, call.first, result, weight);
  };
  cpu::Gather pass = gather_of(call, plan, result);
  pass.planes = axis(kPlanes), pass.rows = axis(kRows), pass.columns = axis(kColumns);
  pass.weights = weights_of(weight, pass.channels, 0, 1);
  return cpu::gather(plan.kernel, {pass}, threads_for(pass, plan));
}

inline bool input_grad_by_kernels(const Call& call, const CpuPlan& plan, const Tensor& result) {
  const Tensor& weight = call.second;
  const auto axis = [&](int64_t from_last) {
    return axis_of(call.geometry, from_last, result, call.first, weight);
  };
  const auto planes = axis(kPlanes), rows = axis(kRows), columns = axis(kColumns);
  const auto moved = [&](const void* data, int64_t elements) {
    const auto bytes = elements * int64_t(result.element_size());
    return data ? static_cast<char*>(const_cast<void*>(data)) + bytes : nullptr;
  };
  const auto row_residues = residues_of(rows), column_residues = residues_of(columns);
  for (const Residue& plane : residues_of(planes)) {
    std::vector<cpu::Gather> passes;
    for (const Residue& row : row_residues) {
      for (const Residue& column : column_residues) {
        cpu::Gather pass = gather_of(call, plan, result);
        pass.planes = plane.axis, pass.rows = row.axis, pass.columns = column.axis;
        pass.needs_finite_weights = true;
        for (cpu::Images* images : {&pass.target, &pass.residual}) {
          images->data = moved(images->data, plane.first * images->plane);
          images->plane *= planes.step;
        }
        pass.at_rows = {row.first, rows.step};
        pass.at_columns = {column.first, columns.step};
        pass.weights = weights_of(weight, pass.depth, 1, 0);
        auto& [data, s, of_plane] = pass.weights;
        data = moved(data, plane.tap * of_plane + row.tap * s[3] + column.tap * s[4]);
        s[3] *= row.tap_step;
        s[4] *= column.tap_step;
        of_plane *= plane.tap_step;
        passes.push_back(pass);
      }
    }
    if (!cpu::gather(plan.kernel, passes, threads_for(passes[0], plan))) return false;
  }
  return true;
}

inline void weight_grad_by_kernels(const Call& call, const CpuPlan& plan, const Tensor& result) {
  const Tensor &grad = call.first, &input = call.second;
  const auto axis = [&](int64_t from_last) {
    return axis_of(call.geometry, from_last, input, grad, result);
  };
  cpu::WeightGrad pass{};
  pass.type = cpu_type(result);
  pass.images = input.size(0);
  pass.groups = call.geometry.groups;
  pass.depth = input.size(1) / pass.groups;
  pass.channels = grad.size(1) / pass.groups;
  pass.planes = axis(kPlanes), pass.rows = axis(kRows), pass.columns = axis(kColumns);
  pass.input = images_of(input);
  pass.grad = images_of(grad);
  pass.target = weights_of(result, pass.channels, 0, 1);
  pass.blocks = plan.blocks;
  cpu::weight_grad(plan.kernel, pass, threads_for(pass, plan));
}

// Asks for large pages where a result is so large that its memory is always new: the C library
// takes allocations of at least so many bytes from the system, and gives them back. In pages of
// 4 KiB, the first access to each would take longer than some layers. A system that refuses leaves
// the result as it is.
inline void ask_for_large_pages(const Tensor& result) {
  constexpr uintptr_t kPage = 2 << 20;
  constexpr size_t kLeast = 32 << 20;
  if (result.nbytes() < kLeast) return;
  const auto first = reinterpret_cast<uintptr_t>(result.const_data_ptr());
  const uintptr_t begin = (first + kPage - 1) / kPage * kPage,
                  end = (first + result.nbytes()) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// Computes a call, or returns false if its numbers need another way.
inline bool compute_by_kernels(const Call& call, const CpuPlan& plan, const Tensor& result,
                               const Tensor& bias_grad) {
  if (call.third.defined() && !call.third.is_contiguous()) {  // the kernels read a dense bias
    Call other = call;
    other.third = call.third.contiguous();
    return compute_by_kernels(other, plan, result, bias_grad);
  }
  ask_for_large_pages(result);
  if (call.pass == kWeightGrad) {
    weight_grad_by_kernels(call, plan, result);
    if (bias_grad.defined()) bias_grad.copy_(call.first.sum(all_but_channels(call.first)));
    return true;
  }
  return call.pass == kForward || call.pass == kFused ? forward_by_kernels(call, plan, result)
                                                      : input_grad_by_kernels(call, plan, result);
}

}  // namespace fastconv::host
