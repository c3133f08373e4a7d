"""Checks the Python code of an exported file, with PyTorch's CPU convolution in place of kernels.

Needs nothing but torch, so that it also runs under the oldest version that exported files support:

    python tests/api/exported_file.py examples/*.py
"""

import importlib.util
import inspect
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import grad


def load(path):
    """The exported file as a new module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_cpu(module, architecture="sm_80"):
    """Has the module compute on the CPU: plans are made, but nothing is compiled or launched."""
    ran = []

    def run(built, which, tensors):
        # The cache of plan_and_build keeps the objects alive, so that their IDs stay theirs.
        geometry = geometries[id(built)]
        ran.append((which, built.plans[which]))
        how = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
        axes = len(geometry.stride)
        name = f"conv{axes}d"
        if which == "forward":
            convolve = getattr(nn.functional, name)
            result = convolve(tensors["input"], tensors["weight"], tensors.get("bias"), *how)
        elif which == "input_grad":
            compute = getattr(grad, f"{name}_input")
            result = compute(geometry.input, tensors["weight"], tensors["input"], *how)
            if "bias" in tensors:  # a transposed convolution
                result = result + tensors["bias"].view(-1, *[1] * axes)
        elif which == "weight_grad":
            compute = getattr(grad, f"{name}_weight")
            result = compute(tensors["input"], geometry.weight, tensors["grad_output"], *how)
        else:
            result = tensors["grad_output"].sum((0, *range(2, 2 + axes)))
        tensors["output"].copy_(result)

    geometries = {}
    plan_and_build = module.plan_and_build

    def noting(passes, geometry, *others):
        built = plan_and_build(passes, geometry, *others)
        geometries[id(built)] = geometry
        return built

    module.plan_and_build, module.run = noting, run
    module.build = lambda kernels, architecture: None
    module.check_device = lambda x, weight: None
    module.gpu_architecture = lambda device: architecture
    module.sm_count = lambda device: 132
    module.shared_bytes = lambda device: 163 * 1024
    return ran


def twin(model, seed=0):
    """PyTorch's model with the same arguments, made with the same seed."""
    torch.manual_seed(seed)
    layer = model.conv2d
    twin = nn.Module()
    twin.conv2d = nn.Conv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding,
        layer.dilation, layer.groups, layer.bias is not None,
    )  # fmt: skip
    return twin


def check_parameters(module):
    for arguments in ({}, {"bias": True}, {"in_channels": 4, "out_channels": 6, "groups": 2}):
        torch.manual_seed(3)
        model = module.ModelNew(**arguments)
        ours, theirs = model.state_dict(), twin(model, seed=3).state_dict()
        assert list(ours) == list(theirs), (list(ours), list(theirs))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), arguments
        model.load_state_dict(theirs)


def check_signature(module):
    names = list(inspect.signature(module.ModelNew).parameters)
    expected = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation",
                "groups", "bias"]  # fmt: skip
    assert names == expected, names
    layer = module.ModelNew(4, 6, 3, 2, (1, 0), [2, 1], 2, True).conv2d
    assert layer.kernel_size == (3, 3)
    assert layer.dilation == (2, 1)


def check_gradients(module):
    ran = on_cpu(module)
    model = module.ModelNew(4, 6, (3, 2), 2, (1, 2), (2, 1), 2, True)
    reference = twin(model)
    reference.load_state_dict(model.state_dict())
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 4, 9, 8).contiguous(memory_format=memory_format).requires_grad_()
        y = model(x)
        expected = reference.conv2d(x)
        assert torch.allclose(y, expected, atol=1e-5)
        assert y.stride() == expected.stride()
        inputs = [x, *model.parameters()]
        grads = torch.autograd.grad(y.square().sum(), inputs)
        other = torch.autograd.grad(expected.square().sum(), [x, *reference.parameters()])
        assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(grads, other, strict=True))
    assert [which for which, _ in ran[:4]] == ["forward", "input_grad", "weight_grad", "bias_grad"]
    # A layer computes no input gradient if its input needs none.
    del ran[:]
    model(torch.randn(1, 4, 9, 8)).sum().backward()
    assert [which for which, _ in ran] == ["forward", "weight_grad", "bias_grad"]
    # An empty batch launches nothing.
    del ran[:]
    x = torch.randn(0, 4, 9, 8, requires_grad=True)
    model.zero_grad()
    model(x).sum().backward()
    assert not ran
    assert model.conv2d.weight.grad.abs().max() == 0
    (first,) = torch.autograd.grad(model(torch.randn(1, 4, 9, 8)).square().sum(),
                                   [model.conv2d.weight], create_graph=True)  # fmt: skip
    with raises(RuntimeError, "once_differentiable"):
        first.sum().backward()


def check_tuned_plans(module):
    """The exported geometry runs the GPU's tuned plans, or the portable kernels."""
    operands = module.Operands("float", 4, False, True)
    for made_for in ("sm_90a", "sm_80", "sm_86", ""):
        gpu = module.TARGETS.get(made_for, module.TARGETS["sm_80"])
        for which in ("forward", "input_grad", "weight_grad"):
            for precision in ("tf32", "ieee"):
                how = (which, module.EXPORTED, operands, precision, made_for, gpu.sms)
                tuned = module.TUNED.get((made_for, which, module.EXPORTED, "float", precision))
                if tuned is None:
                    portable = module.portable_plan(*how[:3], gpu.sms)
                    assert made_for in ("sm_86", "")
                    assert module.plan_of(*how) == portable
                else:
                    assert module.plan_of(*how) == tuned(lambda blocks: blocks)


def check_shared_memory(module):
    """PyTorch reports it since 2.7; before, it follows from the compute capability."""

    class Properties:
        major, minor = 8, 0

    module.torch = type("torch", (), {"cuda": type("cuda", (), {
        "get_device_properties": staticmethod(lambda device: Properties),
    })})  # fmt: skip
    for major, minor, kib in ((8, 0, 163), (8, 6, 99), (8, 7, 163), (8, 9, 99), (9, 0, 163)):
        Properties.major, Properties.minor = major, minor
        assert module.shared_bytes(0) == kib * 1024
    Properties.shared_memory_per_block_optin = 77
    assert module.shared_bytes(0) == 77


def check_errors(module):
    model = module.ModelNew()
    channels = model.conv2d.in_channels
    with raises(ValueError, f"(batch, {channels}, height, width), but got (1, 3, 40, 40)"):
        model(torch.randn(1, 3, 40, 40))
    with raises(ValueError, "height, width), but got (5, 40)"):
        model(torch.randn(5, 40))
    with raises(TypeError, "torch.bfloat16, but got torch.float64"):
        model(torch.randn(1, channels, 40, 40, dtype=torch.float64))
    with raises(TypeError, "same dtype, but got torch.float16 and torch.float32"):
        model(torch.randn(1, channels, 40, 40, dtype=torch.float16))
    missing = module.missing_gpu()
    if missing is not None:
        with raises(RuntimeError, "kernels need an NVIDIA GPU"):
            model(torch.randn(1, channels, 40, 40))
    module.missing_gpu = lambda: None
    with raises(ValueError, "on cpu and cpu: move them there with .cuda()"):
        model(torch.randn(1, channels, 40, 40))
    with raises(ValueError, "stride should be an int, or two, of at least 1, but got 0"):
        module.ModelNew(stride=0)
    with raises(ValueError, "padding should be an int, or two, of at least 0, but got 'same'"):
        module.ModelNew(padding="same")
    with raises(ValueError, "groups divide channels, but got in_channels=5"):
        module.ModelNew(in_channels=5, groups=2)
    with raises(ValueError, f"but got (1, {channels}, 0, 40)"):
        model(torch.randn(1, channels, 0, 40))
    on_cpu(module)
    with raises(ValueError, "the kernel is larger than the padded input"):
        module.ModelNew()(torch.randn(1, channels, 1, 1))


def check_compilation(module):
    """Records what PyTorch is asked to compile, with the arguments that its version takes."""
    parameters = inspect.signature(module.cpp_extension.load_inline).parameters
    asked = []

    def load_inline(**arguments):
        assert set(arguments) <= set(parameters), set(arguments) - set(parameters)
        asked.append(arguments)
        return "compiled"

    module.cpp_extension = type("cpp_extension", (), {
        "load_inline": staticmethod(load_inline), "CUDA_HOME": None,
    })  # fmt: skip
    load_inline.__signature__ = inspect.Signature(parameters.values())
    tuned = module.TUNED["sm_90a", "forward", module.EXPORTED, "float", "tf32"]
    plan = tuned(lambda blocks: blocks)
    kernels = tuple(module.kernel_of(launch) for launch in plan.launches)
    with raises(RuntimeError, "nvcc is needed"):
        module.build(kernels, "sm_90a")
    module.check_compiler = lambda: None
    assert module.build(kernels, "sm_90a") == "compiled"
    assert asked[0]["extra_cuda_cflags"] == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert asked[0].get("no_implicit_headers", False) == ("no_implicit_headers" in parameters)
    module.build(kernels, "sm_80")
    assert asked[0]["name"] != asked[1]["name"]


class raises:
    """Checks that an error is raised whose message contains the text."""

    def __init__(self, kind, text):
        self.kind, self.text = kind, text

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        assert error is not None, f"nothing was raised; expected {self.text!r}"
        assert isinstance(error, self.kind), error
        assert self.text in str(error), f"{error}\nlacks: {self.text}"
        return True


CHECKS = (check_parameters, check_signature, check_gradients, check_tuned_plans,
          check_shared_memory, check_errors, check_compilation)  # fmt: skip


def main(paths):
    for path in paths:
        for check in CHECKS:
            check(load(path))
        print(f"{path}: all right with torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
