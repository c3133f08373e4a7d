"""What the CUDA backend of batch normalization launches, run in the emulator on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from batchnorm_cases import EPS, Case, Tensors, check_close, reference
from emulator.driver import run
from fastconv.backends import cuda, left_statistics
from fastconv.backends.batchnorm import launches
from fastconv.backends.causal import launches as causal
from fastconv.backends.causal.taps import Inputs
from fastconv.jit import launch
from fastconv.kernels.batchnorm.plan import beside
from fastconv.kernels.family import Plan
from fastconv.kernels.gpus import H200
from fastconv.ops import batchnorm

LOADED = launches._loaded


class Emulated(NamedTuple):
    """Stands in for ``cuda.Ready``."""

    plan: Plan
    names: tuple[str, ...]

    def run(self, *tensors: Tensor | None, scratch: Tensor | None = None) -> None:
        if scratch is None:
            scratch = torch.full((max(4, self.plan.scratch_bytes) // 4,), torch.nan)
        named = dict(zip(self.names, (*tensors, scratch), strict=True))
        run(self.plan.launches, {name: one for name, one in named.items() if one is not None})


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launches, "_loaded", lambda made, names, _: Emulated(made, names))
    monkeypatch.setattr(cuda, "gpu", lambda _: H200)
    launches.ready.cache_clear()
    yield
    launches.ready.cache_clear()


CASES = [
    Case(3, 4, (3, 3), torch.float64, activation="silu", residual=True),
    Case(3, 8, (5,), torch.bfloat16, mixed=True, channels_last=True, residual=True),
    Case(4, 4, (), affine=False, activation="identity", residual=True),
    Case(2, 3, (2, 3), offset=1),
]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators_launch_what_they_plan(case: Case, training: bool) -> None:
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    running = (tensors.running_mean, tensors.running_var)
    leaves = (tensors.x, tensors.residual, tensors.weight, tensors.bias)
    y, mean, invstd = batchnorm._forward_cuda(
        *leaves, *running, None, training, 0.1, EPS, case.activation, case.slope
    )
    expected = reference(exact, case.activation, training)
    check_close(y, expected, case.dtype, "y")
    check_close(running[1], exact.running_var, case.dtype, "running variance")
    which = beside(case.activation, case.slope, case.residual)
    other = {None: None, "output": y, "residual": tensors.residual}[which]
    results = batchnorm._backward_cuda(
        tensors.grad, tensors.x, other, tensors.weight, tensors.bias, mean, invstd, training,
        case.residual, case.activation, case.slope, True, case.affine, case.residual,
    )  # fmt: skip
    found = [one for one in results if one.numel()]
    gradients = torch.autograd.grad(expected, exact.leaves, exact.grad)
    if case.residual and case.activation == "identity":
        found.insert(1, tensors.grad)
    for one, gradient in zip(found, gradients, strict=True):
        check_close(one, gradient, case.dtype, "gradient", 256)


@pytest.mark.parametrize("wanted", ["x", "parameters", "residual"])
def test_gradients_that_are_not_wanted_are_empty(wanted: str) -> None:
    case = Case(3, 4, (3, 3), activation="silu", residual=True)
    tensors = Tensors.random(case)
    leaves = (tensors.x, tensors.residual, tensors.weight, tensors.bias)
    options = (None, None, None, True, 0.1, EPS, "silu", 0.0)
    _, mean, invstd = batchnorm._forward_cuda(*leaves, *options)
    given = (tensors.grad, tensors.x, tensors.residual, *leaves[2:], mean, invstd)
    names = ("x", "parameters", "residual")
    chosen = [name == wanted for name in names]
    whole = batchnorm._backward_cuda(*given, True, True, "silu", 0.0, True, True, True)
    part = batchnorm._backward_cuda(*given, True, True, "silu", 0.0, *chosen)
    kept = {"x": (0,), "residual": (1,), "parameters": (2, 3)}[wanted]
    for number, (one, other) in enumerate(zip(part, whole, strict=True)):
        if number not in kept:
            assert one.numel() == 0
        elif number > 0:
            assert torch.equal(one, other)
        else:  # with the residual's gradient wanted, sums are those of its rounded numbers
            torch.testing.assert_close(one, other)


def test_views_are_copied() -> None:
    """Tensors in no format, other formats than that of x, and strided parameters."""
    case = Case(3, 4, (3, 5), residual=True)
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    x = tensors.x.transpose(2, 3).contiguous().transpose(2, 3)
    assert tensors.residual is not None
    residual = tensors.residual.to(memory_format=torch.channels_last)
    mean, var = torch.zeros(4, 2)[:, 0], torch.ones(4, 2)[:, 0]
    mean.copy_(tensors.running_mean)
    var.copy_(tensors.running_var)
    weight, bias = tensors.weight, tensors.bias
    options = (mean, var, None, True, 0.1, EPS, "relu", 0.0)
    y, *_ = batchnorm._forward_cuda(x, residual, weight, bias, *options)
    check_close(y, reference(exact, "relu"), case.dtype, "y")
    check_close(mean, exact.running_mean, case.dtype, "running mean")
    check_close(var, exact.running_var, case.dtype, "running variance")
    assert y.is_contiguous()


class Counted(NamedTuple):
    """Stands in for loaded launches."""

    names: tuple[str, ...]

    def run(self, *addresses: int) -> None:
        assert len(addresses) == len(self.names)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_launches_get_an_address_for_each_name(
    channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of normalizations and of causal convolutions, which are launched in the same way."""
    monkeypatch.setattr(launches, "_loaded", LOADED)
    monkeypatch.setattr(cuda, "gpu", lambda _: H200)
    monkeypatch.setattr(launch, "load_launches", lambda _, __, names: Counted(names))
    case = Case(3, 4, (5,), residual=True, channels_last=channels_last)
    tensors = Tensors.random(case)
    leaves = (tensors.x, tensors.residual, tensors.weight, tensors.bias)
    running = (tensors.running_mean, tensors.running_var, None)
    for training in (True, False):
        y, mean, invstd = batchnorm._forward_cuda(
            *leaves, *running, training, 0.1, EPS, "relu", 0.0
        )
    given = (tensors.grad, tensors.x, y, *leaves[2:], mean, invstd)
    batchnorm._backward_cuda(*given, True, True, "relu", 0.0, True, True, True)
    inputs = Inputs(tensors.x, torch.randn(4, 3), None, None, None, True)
    causal.forward(inputs, y)
    causal._ready_forward.cache_clear()


def test_averages_of_all_batches_wait_for_nothing() -> None:
    case = Case(5, 3, (2, 2))
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    running = (tensors.running_mean, tensors.running_var)
    options = (torch.tensor(4), True, 0.0, EPS, "identity", 0.0)
    batchnorm._forward_cuda(tensors.x, None, None, None, *running, *options)
    reference(exact, "identity", momentum=0.25)
    check_close(tensors.running_mean, exact.running_mean, case.dtype, "running mean")
    assert launches.ready.cache_info().currsize == 1


def test_statistics_that_a_convolution_has_left() -> None:
    """A normalization takes those of its own input, once, and only within a block."""
    case = Case(6, 8, (4, 4), torch.bfloat16, channels_last=True)
    tensors = Tensors.random(case)
    rows = torch.stack(tensors.x.split(3)).double().movedim(2, 1).flatten(2)
    mean, count = rows.mean(2), rows.shape[2]
    own = [mean, rows.var(2, correction=0) * count, torch.full_like(mean, count)]

    def normalized() -> list[Tensor]:
        running = [torch.zeros(8), torch.ones(8)]
        made = batchnorm._forward_cuda(
            tensors.x, None, tensors.weight, tensors.bias, *running, None, True, 0.1, EPS,
            "identity", 0.0,
        )  # fmt: skip
        return [*made, *running]

    expected = normalized()
    with left_statistics.asked():
        left = left_statistics.new(2, tensors.x, 8)
        assert left is not None
        left.copy_(torch.stack(own, 1))
        found = normalized()
        assert left_statistics.take(tensors.x) is None
        for one, other in zip(found, expected, strict=True):
            check_close(one, other, case.dtype, "result")
        other_left = left_statistics.new(2, tensors.x, 8)
        assert other_left is not None
        other_left.copy_(2 * torch.stack(own, 1))
        assert not torch.allclose(normalized()[1], expected[1])
        for output, channels in ((torch.empty(4), 8), (tensors.x[:3], 8), (tensors.x, 4)):
            left_statistics.new(2, output, channels)
            assert all(map(torch.equal, normalized(), expected))
        left_statistics.new(2, tensors.x, 8)
    assert all(map(torch.equal, normalized(), expected))
    assert not left_statistics.are_asked(torch.bfloat16)
