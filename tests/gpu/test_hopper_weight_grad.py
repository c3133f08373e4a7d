"""The weight-gradient kernels of sm_90a, with the bias's gradient in the same pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from emulator import (
    test_hopper_wgrad_few_inputs,
    test_hopper_wgrad_halo,
    test_hopper_wgrad_implicit_gemm,
    test_hopper_wgrad_scaled_fp16,
)
from emulator.pass_cases import SPECIAL_VALUES, PassCase, Tensors, float64, new_output, placed
from emulator.test_hopper_wgrad_halo import MODES, TOLERANCES, put_special_values
from fastconv import ops
from fastconv.backends import cuda as backend
from fastconv.kernels import planner
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING, Workload
from gpu.helpers import CUDA, FORMATS, arguments_of, is_hopper, precompile

pytestmark = [
    pytest.mark.usefixtures("_poisoned_memory"),
    pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0"),
]

# Tensor cores truncate where the emulator rounds: each MMA of a chain loses up to 2^-24 of its sum,
# and some test cases have chains of 300.
TRUNCATION = 8e-6


WORKS = [
    *test_hopper_wgrad_halo.CASES,
    *test_hopper_wgrad_few_inputs.CASES,
    *test_hopper_wgrad_implicit_gemm.CASES,
    *test_hopper_wgrad_scaled_fp16.CASES,
]


@contextmanager
def _planned_as(work: PassCase) -> Iterator[None]:
    """Calls get the work's plan, for its GPU of few SMs."""
    backend._ready.cache_clear()
    with (
        mock.patch.object(backend, "gpu", return_value=work.gpu),
        mock.patch.object(planner, "WEIGHT_GRAD", (work.planner,)),
    ):
        yield
    backend._ready.cache_clear()


def _run(work: PassCase, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
    def on_gpu(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
        return placed(tensor.to(CUDA), memory_format, work.aligned)

    input = on_gpu(tensors.input, work.input_format)
    grad_output = on_gpu(tensors.grad_output, work.output_format)
    grad = on_gpu(new_output(work), work.weight_format)
    bias = torch.full((work.conv.weight[0],), torch.nan, dtype=work.dtype, device=CUDA)
    bias_out = bias if work.bias_grad else None
    with _planned_as(work):
        backend.weight_grad(work.conv.problem, grad_output, input, grad, bias_out, work.precision)
    return grad.cpu(), bias.cpu() if work.bias_grad else None


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def _works_compiled() -> None:
    precompile(partial(_run, work, Tensors.random(work)) for work in WORKS)


@pytest.mark.usefixtures("_works_compiled")
@pytest.mark.parametrize("work", WORKS, ids=str)
def test_emulated(work: PassCase) -> None:
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


@pytest.mark.parametrize("mode", MODES)
def test_infinity_stays_where_it_is(mode: str) -> None:
    """Infinite results keep their sign, and undefined ones are NaN, as in plain float32."""
    work = test_hopper_wgrad_halo.shifted(mode)
    tensors = Tensors.random(work)
    put_special_values(tensors.input, SPECIAL_VALUES[:3])
    tensors.grad_output[0, 7, 1, 65] = -torch.inf
    grad, _ = _run(work, tensors)
    expected = float64(work, tensors)
    finite = expected.isfinite()
    assert torch.equal(grad.isnan(), expected.isnan())
    infinite = expected.isinf()
    assert torch.equal(grad[infinite].double(), expected[infinite])
    tolerance = TOLERANCES[work.dtype, work.precision] + TRUNCATION
    assert _error(grad[finite], expected[finite]) <= tolerance


@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_bias_in_the_same_pass(mode: str, memory_format: Any, workload: Workload) -> None:
    """The weight gradient keeps its bits, and the bias's gradient sums unrounded numbers."""
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


# Input, kernel, stride and padding of contiguous layers whose output rows have odd lengths.
ODD_ROWS = (
    ((16, 64, 128, 431), (3, 9), (2, 1), (1, 4)),
    ((16, 64, 128, 431), (3, 9), (1, 1), (1, 4)),
    ((16, 64, 128, 431), (3, 3), (2, 1), (1, 1)),
    ((16, 64, 128, 199), (3, 9), (2, 1), (1, 4)),
    ((16, 64, 64, 101), (5, 5), (2, 1), (2, 2)),
    ((1, 64, 128, 431), (3, 9), (2, 1), (1, 4)),
    ((8, 64, 65, 65), (3, 3), (1, 1), (1, 1)),
    ((2, 64, 512, 513), (3, 3), (1, 1), (1, 1)),
)


@pytest.mark.parametrize("layer", ODD_ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_odd_rows(dtype: torch.dtype, layer: tuple[Any, ...]) -> None:
    """The layers have ordinary sizes, at which copies take long to arrive."""
    input_shape, kernel, stride, (rows, columns) = layer
    padding = (rows, rows, columns, columns)
    problem = Problem.of(input_shape, (64, 64, *kernel), stride, padding, (1, 1), 1)
    input = torch.randn(problem.input_shape, device=CUDA).to(dtype)
    grad_output = torch.randn(problem.output_shape, device=CUDA).to(dtype)
    grad, bias = ops.weight_grad(grad_output, input, kernel, *arguments_of(problem), True)
    tolerance = TOLERANCES[dtype, "ieee"] + TRUNCATION
    assert _error(grad, _weight_grad_in_float64(problem, grad_output, input)) <= tolerance
    assert _error(bias, grad_output.double().sum((0, 2, 3))) <= tolerance


def _weight_grad_in_float64(problem: Problem, grad_output: Tensor, input: Tensor) -> Tensor:
    """PyTorch's result, two images at a time because its workspaces for float64 are large."""
    padding = (problem.padding.top, problem.padding.left)
    total = torch.zeros(problem.weight_shape, dtype=torch.float64, device=input.device)
    for image, grad in zip(input.split(2), grad_output.split(2), strict=True):
        total += torch.nn.grad.conv2d_weight(
            image.double(), problem.weight_shape, grad.double(), problem.stride, padding
        )
    return total
