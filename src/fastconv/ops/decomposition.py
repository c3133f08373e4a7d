"""The operators in terms of PyTorch's own, for programs that others are to read.

``torch.onnx.export`` looks operators that it does not know up in PyTorch's table of
decompositions, and whoever wants core ATen can (docs/networks.md). Nothing that computes does:
neither eager calls nor ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition

from fastconv.backends.epilogue import applied
from fastconv.ops.late import when_imported
from fastconv.ops.schema import OPERATORS, Result, new_bias_grad

Ints = Sequence[int]

_aten = torch.ops.aten


def register() -> None:
    for name, decomposition in (
        ("forward", _forward),
        ("input_grad", _input_grad),
        ("weight_grad", _weight_grad),
        ("fused", _fused),
    ):
        operator = OPERATORS[name]
        register_decomposition(operator.call)(decomposition)
        # Of symbolic sizes, fake tensors would else be what the decomposition makes of them.
        register_decomposition(operator.call, type="meta")(operator.fake)
    when_imported("torch._inductor.lowering", _keep_for_inductor)


def _keep_for_inductor() -> None:
    """Has ``torch.compile`` call the operators as they are, without asking why.

    It does anyway; but where the variable ``CI`` is set, it takes a decomposition that it does not
    use for PyTorch's own mistake, and raises.
    """
    from torch._inductor import lowering

    for operator in OPERATORS.values():
        lowering.make_fallback(operator.call, warn=False)


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


def _fused(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any
) -> Tensor:
    result = _check("fused", input, weight, bias, residual, *rest)
    *geometry, _, _ = rest
    return applied(_forward(input, weight, bias, *geometry), residual, result.epilogue)


def _check(name: str, *args: Any) -> Result:
    result = OPERATORS[name].result(*args)
    if result.dtype.is_complex:
        raise NotImplementedError(
            f"aten.convolution takes real numbers, but a convolution of {result.dtype} is to be "
            "decomposed into it"
        )
    return result


def _split(padding: Ints) -> tuple[Ints, Ints]:
    """What has to be put around the input beforehand, and what PyTorch's convolution pads itself.

    It has one number for two sides.
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
