"""Decompositions of the operators into PyTorch's own, for exported programs.

``torch.onnx.export`` looks up operators that it does not support in PyTorch's table of
decompositions, and users may do so to get core ATen (docs/deployment.md). Neither eager calls nor
``torch.compile`` use the decompositions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition

from fastconv.backends.epilogue import applied
from fastconv.ops import gradients
from fastconv.ops.arguments import FusedArguments, Ints, TransposedArguments
from fastconv.ops.schema import OPERATORS, Result, backward, new_bias_grad

_aten = torch.ops.aten


def register() -> None:
    for name, operator in OPERATORS.items():
        _register(operator.call, _DECOMPOSITIONS[name], operator.fake)
    _register(backward, _backward, gradients.fake)


def _register(operator: Any, decomposition: Callable[..., Any], fake: Callable[..., Any]) -> None:
    register_decomposition(operator)(decomposition)
    # Otherwise PyTorch would decompose the operator to make fake tensors of symbolic sizes.
    register_decomposition(operator, type="meta")(fake)


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    precision: str | None,
) -> Tensor:
    _check("forward", input, weight, bias, stride, padding, dilation, groups, precision)
    before, within = _split(padding)
    return _aten.convolution(
        _padded(input, before), weight, bias, stride, within, dilation, False, (0, 0), groups
    )


def _input_grad(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    precision: str | None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    result = _check(
        "input_grad", grad_output, weight, input_size,
        stride, padding, dilation, groups, precision, memory_format,
    )  # fmt: skip
    (top, bottom, left, right), within = _split(padding)
    batch, channels, height, width = result.shape
    padded = (batch, channels, height + top + bottom, width + left + right)
    gradient, _, _ = _aten.convolution_backward(
        grad_output, grad_output.new_empty(padded), weight, None,
        stride, within, dilation, False, (0, 0), groups, (True, False, False),
    )  # fmt: skip
    gradient = gradient[:, :, top : top + height, left : left + width]
    return gradient.contiguous(memory_format=result.memory_format)


def _weight_grad(
    grad_output: Tensor,
    input: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    precision: str | None,
    bias: bool,
    memory_format: torch.memory_format | None = None,
) -> tuple[Tensor, Tensor]:
    result = _check(
        "weight_grad", grad_output, input, kernel_size,
        stride, padding, dilation, groups, precision, bias, memory_format,
    )  # fmt: skip
    before, within = _split(padding)
    _, gradient, bias_gradient = _aten.convolution_backward(
        grad_output, _padded(input, before), grad_output.new_empty(result.shape),
        result.shape[:1] if bias else None,
        stride, within, dilation, False, (0, 0), groups, (False, True, bias),
    )  # fmt: skip
    gradient = gradient.contiguous(memory_format=result.memory_format)
    return gradient, bias_gradient if bias else new_bias_grad(result, bias)


def _fused(*args: Any) -> Tensor:
    given = FusedArguments(*args)
    result = _check("fused", *given)
    return applied(_forward(*given.of_forward), given.residual, result.epilogue)


def _transposed(*args: Any) -> Tensor:
    given = TransposedArguments(*args)
    result = _check("transposed", *given)
    (top, bottom, left, right), within = _split(given.padding)
    # Where opposite sides differ, all of the output is computed, and cut out of it. An output that
    # ends after the last tap's is padded at its end.
    ends = (bottom, right)
    more = [max(0, one - end) for one, end in zip(given.output_padding, ends, strict=True)]
    output = _aten.convolution(
        given.input, given.weight, given.bias, given.stride, within, given.dilation, True, more,
        given.groups,
    )  # fmt: skip
    if any((top, bottom, left, right)):
        height, width = result.shape[2:]
        output = output[:, :, top : top + height, left : left + width]
        output = output.contiguous(memory_format=result.memory_format)
    return applied(output, given.residual, result.epilogue)


_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "input_grad": _input_grad,
    "weight_grad": _weight_grad,
    "fused": _fused,
    "transposed": _transposed,
}


def _backward(*args: Any) -> gradients.Gradients:
    return gradients.by_parts(lambda name, given: _DECOMPOSITIONS[name](*given), args)


def _check(name: str, *args: Any) -> Result:
    result = OPERATORS[name].result(*args)
    if result.dtype.is_complex:
        raise NotImplementedError(
            f"a convolution of {result.dtype} cannot be decomposed into aten.convolution, which "
            "takes real numbers"
        )
    return result


def _split(padding: Ints) -> tuple[Ints, Ints]:
    """Splits padding into what to pad beforehand, and what ``aten.convolution`` pads itself.

    ``aten.convolution`` pads opposite sides by the same number.
    """
    top, bottom, left, right = padding
    if top == bottom and left == right:
        return (0, 0, 0, 0), (top, left)
    return padding, (0, 0)


def _padded(input: Tensor, padding: Ints) -> Tensor:
    top, bottom, left, right = padding
    if not any(padding):
        return input
    return _aten.constant_pad_nd(input, (left, right, top, bottom))
