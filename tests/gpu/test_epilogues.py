"""Fused epilogues on a GPU, against float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv
import oracle
from fastconv import native
from gpu.helpers import CUDA, FORMATS, PLACES, precompile

LEAKY = ("leaky_relu", 0.2)
FUNCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    LEAKY if name == "leaky_relu" else name: function
    for name, function in oracle.ACTIVATIONS.items()
}
FUNCTIONS[LEAKY] = lambda x: F.leaky_relu(x, 0.2)
Layer = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]
"""Shapes of input and weight, and options."""

# These layers are large enough to get the plans that layers of networks get.
REAL: dict[str, Layer] = {
    "square": ((4, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    "strided": ((4, 64, 56, 56), (128, 64, 3, 3), {"padding": 1, "stride": 2}),
    "pointwise": ((4, 256, 28, 28), (128, 256, 1, 1), {}),
    "first": ((2, 3, 112, 112), (64, 3, 7, 7), {"padding": 3, "stride": 2}),
    "depthwise": ((4, 96, 28, 28), (96, 1, 3, 3), {"padding": 1, "groups": 96}),
    "few outputs": ((2, 64, 40, 40), (3, 64, 3, 3), {"padding": 1}),
}


def _random_layer(seed: int) -> Layer:
    number = random.Random(seed).randint
    groups, kernel = number(1, 3), (number(1, 5), number(1, 5))
    padding = tuple((number(0, 3), number(0, 3)) for _ in range(2))
    options = {"stride": (number(1, 3), number(1, 3)), "padding": padding, "groups": groups}
    input = (number(1, 3), groups * number(1, 20), number(5, 20), number(5, 20))
    return input, (groups * number(1, 20), input[1] // groups, *kernel), options


# No tile fits these layers exactly.
SMALL: dict[str, Layer] = {
    "odd": ((2, 5, 13, 15), (7, 5, 5, 3), {"padding": ((2, 1), (0, 1)), "dilation": (1, 2)}),
    "grouped": ((3, 6, 9, 11), (9, 2, 2, 3), {"stride": (1, 2), "groups": 3}),
    "one pixel": ((2, 16, 3, 3), (8, 16, 3, 3), {}),
    **{f"random {seed}": _random_layer(seed) for seed in range(7)},
}
LAYERS = REAL | SMALL
# Type, precision, and the error allowed for a sum, relative to the sum of its terms' magnitudes.
KINDS: dict[str, tuple[torch.dtype, Any, float]] = {
    "tf32": (torch.float32, "tf32", 2e-3),
    "ieee": (torch.float32, "ieee", 2e-6),
    "bfloat16": (torch.bfloat16, None, 2e-6),
    "float16": (torch.float16, None, 2e-6),
    "float64": (torch.float64, None, 1e-14),
}
MOST_SLOPE = 1.2  # Bounds by how much an activation enlarges an error: no slope is above 1.13.


class Case(NamedTuple):
    layer: str
    kind: str
    memory_format: torch.memory_format
    activation: Any
    residual: bool


def _cases() -> Iterator[Case]:
    """Real layers in all kinds, small ones in one, with and without a residual.

    Activations alternate. Some are skipped, so that each meets other kinds and layouts.
    """
    activations, formats = cycle(FUNCTIONS), [*FORMATS.values()]
    for number, layer in enumerate(LAYERS):
        kinds = [*KINDS] if layer in REAL else [[*KINDS][number % len(KINDS)]]
        for turn, kind in enumerate(kinds, number):
            yield Case(layer, kind, formats[turn % 2], next(activations), False)
            yield Case(layer, kind, formats[1 - turn % 2], next(activations), True)
            next(activations)
        next(activations), next(activations)


CASES = list(_cases())
every_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.layer}-{c.kind}-{c.activation}{'-residual' * c.residual}"
)


@cache
def _exact(layer: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Input, weight, bias and residual; the output before the residual, and its magnitude."""
    input, weight, options = LAYERS[layer]
    torch.manual_seed(0)
    # Every type can represent these numbers, so that all kinds have the same exact sums.
    tensors = [torch.randn(shape).bfloat16().double() for shape in (input, weight, weight[:1])]
    sums = oracle.conv2d(*tensors, **options)
    sizes = oracle.conv2d(*(tensor.abs() for tensor in tensors), **options)
    return [*tensors, torch.randn(sums.shape).bfloat16().double()], sums, sizes


def _tensors(case: Case) -> list[Tensor]:
    dtype, _, _ = KINDS[case.kind]
    input, weight, bias, residual = (t.to(CUDA, dtype) for t in _exact(case.layer)[0])
    last = case.memory_format
    return [input.to(memory_format=last), weight.to(memory_format=last), bias, residual]


def _run(case: Case, tensors: list[Tensor] | None = None) -> Tensor:
    *some, residual = _tensors(case) if tensors is None else tensors
    return fastconv.conv2d(
        *some, **LAYERS[case.layer][2], precision=KINDS[case.kind][1],
        activation=case.activation, residual=residual if case.residual else None,
    )  # fmt: skip


def _check(case: Case, output: Tensor) -> None:
    (*_, residual), sums, sizes = _exact(case.layer)
    dtype, _, tolerance = KINDS[case.kind]
    if case.residual:
        sums, sizes = sums + residual, sizes + residual.abs()
    expected = FUNCTIONS[case.activation](sums)
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    error = (output.to("cpu", torch.float64) - expected).abs()
    bound = MOST_SLOPE * tolerance * sizes
    if dtype.itemsize == 2:  # The result is rounded once, perhaps to a subnormal number.
        bound += torch.finfo(dtype).eps * expected.abs() + torch.finfo(dtype).smallest_normal
    else:
        bound += 8 * torch.finfo(dtype).eps * (1 + expected.abs())
    assert (error <= bound).all(), f"{case}: {(error / bound).max():.3g} times what is allowed"


# A few cases with residuals, whose plans differ.
SOME = [
    Case("square", "bfloat16", torch.channels_last, "silu", True),
    Case("pointwise", "tf32", torch.contiguous_format, "relu", True),
    Case("odd", "ieee", torch.contiguous_format, "gelu", True),
]
some_cases = pytest.mark.parametrize("case", SOME, ids=lambda case: case.layer)


def _placed(case: Case, place: Callable[[Tensor], Tensor]) -> Tensor:
    *some, residual = _tensors(case)
    return _run(case, [*some, place(residual)])


def _recorded(case: Case) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and the gradients of all tensors."""
    tensors = [tensor.requires_grad_() for tensor in _tensors(case)]
    output = _run(case, tensors)
    return output, torch.autograd.grad(output.sum(), tensors)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile([
        *(partial(_run, case) for case in (*CASES, *SOME)),
        *(partial(_recorded, case) for case in SOME),
        *(partial(_placed, case, place) for case in SOME for place in PLACES.values()),
    ])  # fmt: skip


@pytest.fixture(params=["python", "native"], scope="module", autouse=True)
def _path(request: pytest.FixtureRequest, _compiled: None) -> Iterator[None]:
    native.make()
    chosen = native.load() if request.param == "native" else None
    with mock.patch.object(native, "conv2d", chosen):
        yield


@every_case
def test_against_float64(case: Case) -> None:
    output = _run(case)
    assert output.is_contiguous(memory_format=case.memory_format) or case.kind == "float64"
    _check(case, output)


@some_cases
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_wherever_the_residual_lies(case: Case, place: Callable[[Tensor], Tensor]) -> None:
    _check(case, _placed(case, place))


@some_cases
def test_the_same_bits(case: Case) -> None:
    tensors = _tensors(case)
    first = _run(case, tensors)
    for _ in range(9):
        assert _run(case, tensors).equal(first)


@some_cases
def test_cuda_graph(case: Case) -> None:
    tensors = _tensors(case)
    expected = _run(case, tensors)
    for tensor in tensors:
        tensor.neg_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = _run(case, tensors)
    for tensor in tensors:
        tensor.neg_()
    graph.replay()
    assert output.equal(expected)


@some_cases
def test_recorded(case: Case) -> None:
    """Recorded calls run kernels without an epilogue, which may sum in another order."""
    output, gradients = _recorded(case)
    tolerance = max(8 * torch.finfo(output.dtype).eps, 1e-3)
    torch.testing.assert_close(output.detach(), _run(case), rtol=tolerance, atol=tolerance)
    leaves = [tensor.requires_grad_() for tensor in map(torch.clone, _exact(case.layer)[0])]
    sums = oracle.conv2d(*leaves[:3], **LAYERS[case.layer][2]) + leaves[3]
    expected = torch.autograd.grad(FUNCTIONS[case.activation](sums).sum(), leaves)
    for gradient, exact in zip(gradients, expected, strict=True):
        error = (gradient.to("cpu", torch.float64) - exact).norm() / exact.norm()
        assert error < 4 * tolerance


def test_what_is_not_computed_by_launches_alone() -> None:
    residual = torch.randn(2, 6, 4, 4, device=CUDA)
    bias = torch.randn(6, device=CUDA)
    nothing = [torch.empty(shape, device=CUDA) for shape in ((2, 0, 4, 4), (6, 0, 1, 1))]
    output = fastconv.conv2d(*nothing, bias, activation="silu", residual=residual)
    torch.testing.assert_close(output, F.silu(bias[:, None, None] + residual))
    no_images = torch.empty(0, 3, 4, 4, device=CUDA), torch.empty(6, 3, 1, 1, device=CUDA)
    output = fastconv.conv2d(*no_images, bias, activation="silu", residual=residual[:0])
    assert output.shape == (0, 6, 4, 4)
    numbers = [
        torch.randn(shape, dtype=torch.complex64, device=CUDA)
        for shape in ((2, 3, 4, 4), (6, 3, 1, 1), (6,), (2, 6, 4, 4))
    ]
    output = fastconv.conv2d(*numbers[:3], residual=numbers[3], precision="ieee")
    exact = [oracle.exact(tensor) for tensor in numbers]
    expected = oracle.conv2d(*exact[:3]) + exact[3]
    torch.testing.assert_close(oracle.exact(output), expected, rtol=1e-5, atol=1e-5)
