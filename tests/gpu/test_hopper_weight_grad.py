"""The tensor cores' weight gradient on the GPU, with that of the bias in the same pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from emulator import test_hopper_collect, test_hopper_weight_grad
from emulator.test_hopper_weight_grad import MODES, TOLERANCES
from emulator.works import Tensors, Work, float64, new_output, placed
from fastconv import ops
from fastconv.backends import cuda as backend
from fastconv.bench.workloads import FOUNDING, Workload
from fastconv.kernels import planner
from gpu.helpers import CUDA, FORMATS, arguments_of, precompile


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.usefixtures("_poisoned_memory"),
    pytest.mark.skipif(not _is_hopper(), reason="needs a GPU of compute capability 9.0"),
]

# The tensor core truncates as it adds, which the emulator does not.
TRUNCATION = 5e-6


WORKS = [*test_hopper_weight_grad.WORKS, *test_hopper_collect.WORKS]


@contextmanager
def _planned_as(work: Work) -> Iterator[None]:
    """With the work's plan, for its GPU of few processors."""
    backend._ready.cache_clear()
    with (
        mock.patch.object(backend, "gpu", return_value=work.gpu),
        mock.patch.object(planner, "WEIGHT_GRAD", (work.planner,)),
    ):
        yield
    backend._ready.cache_clear()


def _run(work: Work, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
    def on_gpu(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
        return placed(tensor.to(CUDA), memory_format, work.aligned)

    input = on_gpu(tensors.input, work.input_format)
    grad_output = on_gpu(tensors.grad_output, work.output_format)
    grad = on_gpu(new_output(work), work.output_format)
    bias = torch.full((work.case.weight[0],), torch.nan, dtype=work.dtype, device=CUDA)
    bias_out = bias if work.bias_grad else None
    with _planned_as(work):
        backend.weight_grad(work.case.problem, grad_output, input, grad, bias_out, work.precision)
    return grad.cpu(), bias.cpu() if work.bias_grad else None


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def _works_compiled() -> None:
    precompile(partial(_run, work, Tensors.random(work)) for work in WORKS)


@pytest.mark.usefixtures("_works_compiled")
@pytest.mark.parametrize("work", WORKS, ids=str)
def test_emulated(work: Work) -> None:
    """The very kernels that the emulator runs, twice with the same bits."""
    tensors = Tensors.random(work)
    grad, bias = _run(work, tensors)
    tolerance = TOLERANCES[work.dtype, work.precision] + TRUNCATION
    assert _error(grad, float64(work, tensors)) <= tolerance
    again, bias_again = _run(work, tensors)
    assert torch.equal(grad, again)
    if bias is not None and bias_again is not None:
        assert _error(bias, tensors.grad_output.double().sum((0, 2, 3))) <= tolerance
        assert torch.equal(bias, bias_again)


@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_bias_in_the_same_pass(mode: str, memory_format: Any, workload: Workload) -> None:
    """It leaves the weight's gradient as it is, and is that of numbers that are not rounded."""
    dtype, precision, tolerance = MODES[mode]
    problem = workload.scaled(2).with_batch(2).problem
    input, grad_output = (
        torch.randn(shape, device=CUDA).to(dtype).to(memory_format=memory_format)
        for shape in (problem.input_shape, problem.output_shape)
    )
    last = memory_format == torch.channels_last
    grad_alone, _ = ops.weight_grad(
        grad_output, input, problem.kernel_size, *arguments_of(problem, precision), False
    )
    kind = (dtype, last, last, grad_alone.stride(), True, precision, True)
    plan = planner.weight_grad(problem, backend.operands_of(*kind), backend.gpu(0))
    assert plan.family == "hopper", plan.why
    assert plan.scratch_bytes <= 64 << 20
    grad, bias = ops.weight_grad(
        grad_output, input, problem.kernel_size, *arguments_of(problem, precision), True
    )
    assert torch.equal(grad, grad_alone)
    expected = grad_output.double().sum((0, 2, 3))
    assert _error(bias, expected) <= max(tolerance, 2e-6)
