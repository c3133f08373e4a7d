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
        _padded(input, before), weight, bias, stride, within, dilation, False, _none(within), groups
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
    before, within = _split(padding)
    batch, channels, *sizes = result.shape
    whole = [size + sum(before[2 * i : 2 * i + 2]) for i, size in enumerate(sizes)]
    gradient, _, _ = _aten.convolution_backward(
        grad_output, grad_output.new_empty((batch, channels, *whole)), weight, None,
        stride, within, dilation, False, _none(within), groups, (True, False, False),
    )  # fmt: skip
    return _cut(gradient, before, sizes).contiguous(memory_format=result.memory_format)


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
        stride, within, dilation, False, _none(within), groups, (False, True, bias),
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
    around, within = _split(given.padding)
    # Where opposite sides differ, all of the output is computed, and cut out of it. An output that
    # ends after the last tap's is padded at its end.
    ends = around[1::2]
    more = [max(0, one - end) for one, end in zip(given.output_padding, ends, strict=True)]
    output = _aten.convolution(
        given.input, given.weight, given.bias, given.stride, within, given.dilation, True, more,
        given.groups,
    )  # fmt: skip
    if any(around):
        output = _cut(output, around, result.shape[2:])
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
    before, after = padding[::2], padding[1::2]
    if list(before) == list(after):
        return [0] * len(padding), before
    return padding, [0] * len(before)


def _padded(input: Tensor, padding: Ints) -> Tensor:
    if not any(padding):
        return input
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    return _aten.constant_pad_nd(input, [side for pair in pairs[::-1] for side in pair])


def _cut(whole: Tensor, around: Ints, sizes: Ints) -> Tensor:
    """Returns what is left of a tensor of these sizes without the padding around it."""
    for dim, (before, size) in enumerate(zip(around[::2], sizes, strict=True), start=2):
        whole = whole.narrow(dim, before, size)
    return whole


def _none(axes: Ints) -> list[int]:
    """Returns an output padding of nothing along each axis."""
    return [0 for _ in axes]
