"""Convolutions with epilogues for tests: shapes, activations, and the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv
import oracle

# For tests of backends in Python, which both host paths call in the same way.
by_python = pytest.mark.parametrize("host_path", ["python"], indirect=True)

FUNCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    **oracle.ACTIVATIONS,
    ("leaky_relu", 0.2): lambda x: F.leaky_relu(x, 0.2),
    ("leaky_relu", -1): lambda x: F.leaky_relu(x, -1),
}
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
INPUT, WEIGHT, BIAS = (2, 4, 5, 6), (6, 2, 3, 2), (6,)
RESIDUAL = (2, 6, 2, 7)
OPTIONS = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2}
GEOMETRY = ((2, 1), (1, 0, 2, 1), (1, 2), 2, None)
ALL = (INPUT, WEIGHT, BIAS, RESIDUAL)
every_activation = pytest.mark.parametrize("activation", FUNCTIONS, ids=str)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Any = "gelu",
    **options: Any,
) -> Tensor:
    options = options or OPTIONS
    return fastconv.conv2d(input, weight, bias, **options, activation=activation, residual=residual)


def reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: Any = "gelu",
    **options: Any,
) -> Tensor:
    sums = oracle.conv2d(input, weight, bias, **(options or OPTIONS))
    return FUNCTIONS[activation](sums if residual is None else sums + residual)


def random_tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [oracle.random(shape, dtype) for shape in shapes]


def assert_close(actual: Tensor, tensors: list[Any], activation: Any, **options: Any) -> None:
    """Compares with the float64 result; one rounding of the output is allowed."""
    exact = [None if tensor is None else oracle.exact(tensor) for tensor in tensors]
    expected = reference(*exact, activation=activation, **options)
    magnitudes = [None if tensor is None else tensor.abs() for tensor in exact]
    sizes = reference(*magnitudes, activation=None, **options) + expected.abs()
    assert actual.dtype == tensors[0].dtype
    # No activation has a slope above 1.13.
    oracle.assert_within_rounding("output", actual, expected, 1.2 * sizes)
