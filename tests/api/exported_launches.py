"""Runs and compiles the launches that an exported file makes, without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulator import run_both_orders
from fastconv import jit
from fastconv.jit import compile, nvrtc
from fastconv.kernels import family
from workspaces import split


def emulate(module: ModuleType, architecture: str, shared_kib: int = 0) -> list[str]:
    """Has the module run its launches in the emulator; returns the sources that it runs."""
    sources: list[str] = []

    def run(ready: Any, which: str, tensors: dict[str, Tensor]) -> None:
        plan = ready.plans[which]
        sources.extend(launch.source for launch in plan.launches)
        working = split(plan.scratch_bytes, plan.regions)
        run_both_orders(launches(plan), {**tensors, **working})

    module.run = run
    module.build = lambda kernels, architecture: None
    module.check_device = lambda x, weight: None
    module.gpu_architecture = lambda device: architecture
    module.sm_count = lambda device: 3
    module.shared_bytes = lambda device: shared_kib * 1024
    return sources


def launches(plan: Any) -> list[family.Launch]:
    """A file's plan as one of the package's."""
    return [
        family.Launch(
            family.Kernel(launch.source, launch.entry, launch.constants),
            (launch.grid, 1, 1),
            launch.block,
            launch.shared_bytes,
            tuple(map(argument, launch.arguments)),
            launch.early,
        )
        for launch in plan.launches
    ]


def argument(argument: Any) -> family.Argument:
    """An argument of a file's launch as one of the package's; tensor maps have the same fields."""
    return (
        argument
        if isinstance(argument, str | int)
        else getattr(family, type(argument).__name__)(*argument)
    )


def compare(module: ModuleType, model: nn.Module, x: Tensor, tolerance: float) -> None:
    """Compares the output and all gradients with PyTorch's in float64."""
    exact = module.pytorch_twin(model).double()
    exact_x = x.detach().double().requires_grad_()
    x = x.detach().requires_grad_()
    y, expected = model(x), exact(exact_x)
    grad = torch.randn(y.shape).to(y.dtype)
    y.backward(grad)
    expected.backward(grad.double())
    pairs = [(y, expected), (x.grad, exact_x.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < tolerance, f"{tuple(theirs.shape)}: {error:.1e}"


def kernels_of(module: ModuleType, made_for: str, scalar: str, precision: str) -> Any:
    """All kernels of the exported geometry, with a bias."""
    operands = module.Operands(scalar, 4 if scalar == "float" else 2, False, True)
    plans = [
        module.plan_of(which, module.EXPORTED, operands, precision, made_for, 132)
        for which in ("forward", "input_grad", "weight_grad", "bias_grad")
    ]
    launches = [launch for plan in plans for launch in plan.launches]
    return tuple(dict.fromkeys(module.kernel_of(launch) for launch in launches))


def compile_by_nvrtc(code: str, architecture: str) -> str:
    """Compiles with the package's NVRTC; the log."""
    try:
        jit.nvrtc_version()
    except jit.GpuUnavailable as error:
        pytest.skip(str(error))
    program = nvrtc.Program(code, "exported.cu", {}, compile._options(architecture))
    outcome = nvrtc.compile_program(program, compile._nvrtc())
    assert not outcome.error, outcome.log
    return outcome.log


def compile_by_nvcc(module: ModuleType, kernels: Any, flags: list[str], folder: Path) -> None:
    source = folder / "exported.cu"
    source.write_text(f"{module.device_code(kernels)}\n{module.host_code(kernels)}")
    gencode = [f"-gencode=arch={flag}" for flag in flags]
    command = ["nvcc", "-std=c++17", *gencode, "-c", source, "-o", folder / "exported.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
