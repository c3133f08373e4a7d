"""Strict float32 has no larger rounding errors than PyTorch, or than docs/numerics.md says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fastconv import ops
from fastconv.kernels import planner
from fastconv.workloads import FOUNDING, Workload, parse_shape
from gpu.helpers import CUDA, FORMATS, arguments_of, is_hopper

MARGIN = 1.02
aten = torch.ops.aten


def _gradients(
    workload: Workload, grad_output: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """PyTorch's gradients of input and weight."""
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
    """Compares the errors of tuples of name, our result, PyTorch's result and the exact one."""
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
    first = slice(0, 1)  # Outputs and input gradients are compared for the first image alone.
    ours = [
        ops.forward(input, weight, None, *last)[first].clone(),
        ops.input_grad(grad_output, weight, problem.input_size, *last)[first].clone(),
        ops.weight_grad(grad_output, input, problem.kernel_size, *last, False)[0],
    ]
    input_grad, weight_grad = _gradients(workload, grad_output, input, weight)
    theirs = [_output(workload, input, weight)[first].clone(), input_grad[first], weight_grad]
    exact_weight_grad = torch.zeros_like(weight, dtype=torch.float64)
    for image in reversed(range(problem.batch)):  # The last input gradient is the first image's.
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


SMALL_UNIT = 2.0**-136  # the last bit of TF32's subnormal numbers
EXACT_FROM = 2.0**-113  # From here on, float32's last bit is no smaller than SMALL_UNIT.
ROUNDINGS = 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("exponent", [-112, -120, -130])
@pytest.mark.parametrize("family", ["hopper", "ampere", "direct"])
def test_numbers_below_2_to_the_minus_113(family: str, exponent: int) -> None:
    """Tensor cores lose only the bits of small operands that docs/numerics.md says they lose."""
    if family == "hopper" and not is_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    if torch.cuda.get_device_capability() < (8, 0) and family != "direct":
        pytest.skip("needs a GPU of compute capability 8.0 or later")
    workload = parse_shape("4x64x28x31 64x64x3x3 padding=1")
    problem = workload.problem
    scale = 2.0**exponent
    input, grad_output = (
        torch.randn(shape, device=CUDA) * scale
        for shape in (problem.input_shape, problem.output_shape)
    )
    weight = torch.randn(problem.weight_shape, device=CUDA)
    other = torch.randn(problem.output_shape, device=CUDA)  # the weight gradient's other operand
    last = arguments_of(problem)
    with planner.only(family, limits="sm_80" if family == "ampere" else None):
        ours = [
            ops.forward(input, weight, None, *last),
            ops.input_grad(grad_output, weight, problem.input_size, *last),
            ops.weight_grad(other, input, problem.kernel_size, *last, False)[0],
        ]

    def exact(input: Tensor, weight: Tensor, grad_output: Tensor, other: Tensor) -> list[Tensor]:
        some = [tensor.double() for tensor in (input, weight, grad_output, other)]
        return [
            _output(workload, some[0], some[1]),
            _gradients(workload, some[2], some[0], some[1])[0],
            _gradients(workload, some[3], some[0], some[1])[1],
        ]

    def small(tensor: Tensor) -> Tensor:
        return ((tensor.abs() < EXACT_FROM) & (tensor != 0)).float()

    magnitudes = exact(input.abs(), weight.abs(), grad_output.abs(), other.abs())
    beside = exact(small(input), weight.abs(), small(grad_output), other.abs())
    expected = exact(input, weight, grad_output, other)
    for result, true, size, lost in zip(ours, expected, magnitudes, beside, strict=True):
        error, rounding = (result.double() - true).abs(), ROUNDINGS * size + 2.0**-149
        print(f"{family} 2^{exponent}: {float((error / size).max()):.2e} of the magnitudes' sum")
        allowed = rounding if family == "direct" else rounding + SMALL_UNIT / 2 * lost
        assert (error <= allowed).all()


@pytest.mark.parametrize("layout", FORMATS)
def test_depthwise_layers_of_numbers_of_any_size(layout: str) -> None:
    """Toeplitz matrices in 3xTF32 lose no low part, and nothing overflows."""
    sizes = (-140, -127, -114, -97, -60, -53, -50, 0, 60, 100)
    weight_sizes = (-140, -127, -114, -96, -53, 0, 96, 120)
    problem = parse_shape("10x8x56x56 8x1x31x31 padding=15,15 groups=8").problem
    last = arguments_of(problem)
    input, weight = (
        (torch.randn(shape, device=CUDA).double() * 2.0 ** _along_images(exponents)).float()
        for shape, exponents in (
            (problem.input_shape, sizes),
            (problem.weight_shape, weight_sizes),
        )
    )
    input = input.contiguous(memory_format=FORMATS[layout])
    ours = {
        "forward": (ops.forward(input, weight, None, *last), weight),
        # The kernel is odd and the padding keeps the size, so that the input gradient is the
        # forward pass with the kernel reversed.
        "input_grad": (
            ops.input_grad(input, weight, problem.input_size, *last),
            weight.flip((2, 3)),
        ),
    }
    for name, (result, kernel) in ours.items():
        exact, size = (
            torch.nn.functional.conv2d(one, taps, padding=15, groups=8)
            for one, taps in (
                (input.double(), kernel.double()),
                (input.double().abs(), kernel.double().abs()),
            )
        )
        representable = size < torch.finfo(torch.float32).max
        error = (result.double() - exact).abs()
        wrong = representable & ~(error <= 2.0**-20 * size + 2.0**-148)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {int(representable.sum())}"


def _along_images(exponents: tuple[int, ...]) -> Tensor:
    return torch.tensor(exponents, dtype=torch.float64, device=CUDA).reshape(-1, 1, 1, 1)
