"""Rounding errors of strict float32 are no larger than those of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fastconv import ops
from fastconv.workloads import FOUNDING, Workload
from gpu.helpers import CUDA, arguments_of

MARGIN = 1.02
aten = torch.ops.aten


def _gradients(
    workload: Workload, grad_output: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """PyTorch's, of input and weight."""
    geometry = (
        workload.stride,
        workload.padding,
        workload.dilation,
        False,
        [0, 0],
        workload.groups,
    )
    grads = aten.convolution_backward(
        grad_output, input, weight, None, *geometry, [True, True, False]
    )
    return grads[0], grads[1]


def _output(workload: Workload, input: Tensor, weight: Tensor) -> Tensor:
    geometry = (workload.stride, workload.padding, workload.dilation, workload.groups)
    return torch.nn.functional.conv2d(input, weight, None, *geometry)


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def _assert_no_worse(results: Iterable[tuple[str, Tensor, Tensor, Tensor]]) -> None:
    """Of name, our result, PyTorch's and the exact one."""
    errors = {
        name: (_error(ours, exact), _error(theirs, exact)) for name, ours, theirs, exact in results
    }
    for name, (ours, theirs) in errors.items():
        print(f"{name:12} ours {ours:.3e}  PyTorch {theirs:.3e}  ratio {ours / theirs:.3f}")
    worse = {name: pair for name, pair in errors.items() if pair[0] > MARGIN * pair[1]}
    assert not worse


@pytest.mark.parametrize("workload", FOUNDING, ids=lambda workload: workload.name)
def test_founding_workloads(workload: Workload) -> None:
    assert not torch.backends.cudnn.allow_tf32
    problem = workload.problem
    input, weight, grad_output = (
        torch.randn(shape, device=CUDA)
        for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    last = arguments_of(problem)
    first = slice(0, 1)  # image, of those that outputs and input gradients are compared for
    ours = [
        ops.forward(input, weight, None, *last)[first].clone(),
        ops.input_grad(grad_output, weight, problem.input_size, *last)[first].clone(),
        ops.weight_grad(grad_output, input, problem.kernel_size, *last, False)[0],
    ]
    input_grad, weight_grad = _gradients(workload, grad_output, input, weight)
    theirs = [_output(workload, input, weight)[first].clone(), input_grad[first], weight_grad]
    exact_weight_grad = torch.zeros_like(weight, dtype=torch.float64)
    for image in reversed(range(problem.batch)):  # ends with the first
        at = slice(image, image + 1)
        exact_input_grad, part = _gradients(
            workload, grad_output[at].double(), input[at].double(), weight.double()
        )
        exact_weight_grad += part
    exact = [
        _output(workload, input[first].double(), weight.double()),
        exact_input_grad,
        exact_weight_grad,
    ]
    _assert_no_worse(
        zip(("forward", "input_grad", "weight_grad"), ours, theirs, exact, strict=True)
    )
