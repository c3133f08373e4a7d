"""The arguments of each operator as a value, in the order of its schema.

``operator(*arguments)`` calls the operator with them. Code that runs in every eager call passes
plain tuples in the same order instead: making one of these values would cost it a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastconv._precision import Precision

Ints = Sequence[int]

Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, Precision | None]
"""Stride, padding, dilation, groups and precision: the arguments that all operators share."""


class ForwardArguments(NamedTuple):
    """The arguments of ``torch.ops.fastconv.forward``."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int
    precision: str | None


class InputGradArguments(NamedTuple):
    """The arguments of ``torch.ops.fastconv.input_grad``."""

    grad_output: Tensor
    weight: Tensor
    input_size: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int
    precision: str | None
    memory_format: torch.memory_format | None = None


class WeightGradArguments(NamedTuple):
    """The arguments of ``torch.ops.fastconv.weight_grad``."""

    grad_output: Tensor
    input: Tensor
    kernel_size: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int
    precision: str | None
    bias: bool
    memory_format: torch.memory_format | None = None


class FusedArguments(NamedTuple):
    """The arguments of ``torch.ops.fastconv.fused``."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int
    precision: str | None
    activation: str
    slope: float

    @property
    def of_forward(self) -> ForwardArguments:
        """The arguments of the convolution alone, without its epilogue."""
        return ForwardArguments(
            self.input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.precision,
        )


class TransposedArguments(NamedTuple):
    """The arguments of ``torch.ops.fastconv.transposed``."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    output_padding: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int
    precision: str | None
    activation: str
    slope: float

    @property
    def plain(self) -> TransposedArguments:
        """The arguments of the transposed convolution alone, without bias and epilogue."""
        return self._replace(bias=None, residual=None, activation="identity", slope=0.0)


class BackwardArguments(NamedTuple):
    """The arguments of ``torch.ops.fastconv.backward``."""

    grad_output: Tensor
    input: Tensor
    weight: Tensor
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int
    precision: str | None
    transposed: bool
    bias: bool


Arguments = (
    ForwardArguments
    | InputGradArguments
    | WeightGradArguments
    | FusedArguments
    | TransposedArguments
)
