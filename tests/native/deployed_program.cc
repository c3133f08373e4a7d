// A program without Python, for tests of libfastconv.so.
//
//   program run PACKAGE DEVICE INPUT OUTPUT N C H W
// calls a package of AOTInductor that has one input and one output; INPUT and OUTPUT are files of
// contiguous float32 numbers.
//
//   program trace FILE DEVICE INPUT OUTPUT N C H W
// does the same with a file of torch.jit.trace.
//
//   program read BUNDLE...
// reads bundles, and prints an error for each.
//
//   program call
// calls an operator with tensors of cuda:0.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/import.h>

#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "fastconv.h"

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

using Model = std::function<at::Tensor(const at::Tensor&)>;

Model packaged(const std::string& path) {
  auto package = std::make_shared<torch::inductor::AOTIModelPackageLoader>(path);
  return [package](const at::Tensor& input) {
    const std::vector<at::Tensor> inputs{input};
    return package->run(inputs).at(0);
  };
}

Model traced(const std::string& path) {
  torch::jit::Module module = torch::jit::load(path);
  return [module](const at::Tensor& input) mutable {
    const c10::InferenceMode guard;
    return module.forward({input}).toTensor();
  };
}

int run(const Model& model, const std::vector<std::string>& arguments) {
  std::vector<int64_t> shape;
  for (size_t i = 4; i < 8; ++i) shape.push_back(std::stoll(arguments.at(i)));
  std::string bytes = contents(arguments[2]);
  const at::Tensor input = at::from_blob(bytes.data(), shape, at::kFloat);
  const at::Tensor there = input.to(at::Device(arguments[1]));
  at::Tensor output;
  for (int repeat = 0; repeat < 2; ++repeat) output = model(there);
  output = output.to(at::kCPU, at::kFloat).contiguous();
  std::ofstream(arguments[3], std::ios::binary)
      .write(static_cast<const char*>(output.data_ptr()), std::streamsize(output.nbytes()));
  const std::string mapped = contents("/proc/self/maps");
  const bool has_python = mapped.find("libpython") != std::string::npos ||
                          mapped.find("libtorch_python") != std::string::npos;
  std::cout << (has_python ? "Python is in this process" : "no Python") << "\n";
  return has_python;
}

int read(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    try {
      fastconv::load_bundle(path.c_str());
      std::cout << path << ": read\n";
    } catch (const c10::Error& error) {
      std::cout << path << ": " << error.what_without_backtrace() << "\n";
    }
  }
  return 0;
}

// A tensor that says to be on a GPU. Nothing may read it.
at::Tensor on_gpu(at::IntArrayRef shape, void* address) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 1 << 20,
                       c10::DataPtr(address, c10::Device(c10::kCUDA, 0)));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

int call() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fastconv::fused", "");
  alignas(64) static char memory[128];
  torch::jit::Stack stack{on_gpu({2, 4, 9, 8}, memory),
                          on_gpu({6, 2, 3, 3}, memory),
                          on_gpu({6}, memory),
                          on_gpu({2, 6, 5, 8}, memory + 4),
                          at::IntArrayRef({2, 1}),
                          at::IntArrayRef({1, 1, 2, 2}),
                          at::IntArrayRef({1, 2}),
                          int64_t(2),
                          "tf32",
                          "leaky_relu",
                          0.25};
  op.callBoxed(stack);
  return 0;
}

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  const std::vector<std::string> rest(arguments + std::min(count, 2), arguments + count);
  try {
    if (what == "run") return run(packaged(rest.at(0)), rest);
    if (what == "trace") return run(traced(rest.at(0)), rest);
    if (what == "read") return read(rest);
    if (what == "call") return call();
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 2;
}
