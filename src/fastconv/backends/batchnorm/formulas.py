"""Batch normalization by PyTorch's operations: on every device, and differentiable.

It is computed in float32, or float64 for float64, and rounded once. ``beside`` is the tensor that
an activation's gradient needs beside x (``kernels/batchnorm/plan.py: beside``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastconv.backends.epilogue import applied
from fastconv.kernels.batchnorm.plan import beside as needs_beside
from fastconv.problem import Epilogue


class Inputs(NamedTuple):
    """The operands of a normalization with given statistics, and what follows it."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    invstd: Tensor
    activation: str
    slope: float


class Gradients(NamedTuple):
    x: Tensor
    residual: Tensor
    weight: Tensor
    bias: Tensor


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which numbers of a type are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean of each channel, its variance, and 1 / sqrt(variance + eps)."""
    variance, mean = torch.var_mean(x.to(sum_type(x.dtype)), _axes(x), correction=0)
    return mean, variance, torch.rsqrt(variance + eps)


def update_running(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, count: int, by: float
) -> None:
    """Moves running statistics by a share towards those of a batch, in place."""
    unbiased = variance * (count / (count - 1))
    for running, new in ((running_mean, mean), (running_var, unbiased)):
        running.copy_((1 - by) * running.to(new.dtype) + by * new)


def output(inputs: Inputs) -> Tensor:
    """Returns activation((x - mean) * invstd * weight + bias + residual)."""
    activation, slope = inputs.activation, inputs.slope
    residual = None if inputs.residual is None else _wide(inputs.residual)
    return applied(_normalized(inputs), residual, Epilogue(activation, slope)).to(inputs.x.dtype)


def gradients(inputs: Inputs, grad: Tensor, beside: Tensor | None, of_batch: bool) -> Gradients:
    """Returns all gradients; the inputs' own residual is not read.

    Those of x are with constant statistics, unless these are those of the batch.
    """
    x, weight = inputs.x, inputs.weight
    before = grad_before(inputs, _wide(grad), beside)
    normalized = (_wide(x) - _by_channel(inputs.mean, x)) * _by_channel(inputs.invstd, x)
    grad_bias = before.sum(_axes(x))
    grad_weight = (before * normalized).sum(_axes(x))
    grad_x = before
    if of_batch:
        count = x.numel() / x.shape[1]
        shift, scale = _by_channel(grad_bias / count, x), _by_channel(grad_weight / count, x)
        grad_x = before - shift - normalized * scale
    grad_x = grad_x * _by_channel(_scale(inputs), x)
    parameter = x.dtype if weight is None else weight.dtype
    results = (grad_x.to(x.dtype), before.to(x.dtype))
    return Gradients(*results, grad_weight.to(parameter), grad_bias.to(parameter))


def tangent(inputs: Inputs, tangents: tuple[Tensor | None, ...], of_batch: bool) -> Tensor:
    """Returns the output's tangent, given those of x, residual, weight and bias."""
    x, of_x, of_residual, of_weight, of_bias = inputs.x, *tangents
    normalized = (_wide(x) - _by_channel(inputs.mean, x)) * _by_channel(inputs.invstd, x)
    total = torch.zeros_like(normalized)
    if of_x is not None:
        moved = _wide(of_x)
        if of_batch:
            along = (moved * normalized).mean(_axes(x), keepdim=True)
            moved = moved - moved.mean(_axes(x), keepdim=True) - normalized * along
        total = total + moved * _by_channel(_scale(inputs), x)
    if of_weight is not None:
        total = total + normalized * _by_channel(_wide(of_weight), x)
    if of_bias is not None:
        total = total + _by_channel(_wide(of_bias), x)
    if of_residual is not None:
        total = total + _wide(of_residual)
    sums = _normalized(inputs)
    if inputs.residual is not None:
        sums = sums + _wide(inputs.residual)
    return _of_input(inputs, total, sums).to(x.dtype)


def grad_before(inputs: Inputs, grad: Tensor, beside: Tensor | None) -> Tensor:
    """Returns the gradient before the activation, given that of the output."""
    activation, slope = inputs.activation, inputs.slope
    if activation == "identity":
        return grad
    if beside is not None and needs_beside(activation, slope, True) == "output":
        return _OF_OUTPUT[activation](grad, _wide(beside), slope)
    sums = _normalized(inputs)
    return _of_input(inputs, grad, sums if beside is None else sums + _wide(beside))


def _of_input(inputs: Inputs, grad: Tensor, sums: Tensor) -> Tensor:
    """Returns a gradient, or a tangent, times the activation's derivative."""
    activation, slope = inputs.activation, inputs.slope
    if activation == "identity":
        return grad
    if activation in ("sigmoid", "tanh"):
        return _OF_OUTPUT[activation](grad, applied(sums, None, Epilogue(activation)), slope)
    return {**_OF_OUTPUT, **_OF_INPUT}[activation](grad, sums, slope)


def scale_and_shift(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns what a normalization multiplies by and adds, in the type of its statistics."""
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def _normalized(inputs: Inputs) -> Tensor:
    x, bias = inputs.x, inputs.bias
    centered = _wide(x) - _by_channel(inputs.mean, x)
    found = centered * _by_channel(_scale(inputs), x)
    return found if bias is None else found + _by_channel(_wide(bias), x)


def _scale(inputs: Inputs) -> Tensor:
    return inputs.invstd if inputs.weight is None else inputs.invstd * _wide(inputs.weight)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(sum_type(tensor.dtype))


def _axes(x: Tensor) -> tuple[int, ...]:
    """The axes that the statistics of a channel are taken over."""
    return (0, *range(2, x.dim()))


def _by_channel(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.view(-1, *(1 for _ in x.shape[2:]))


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """PyTorch's own has no derivative."""
    share = torch.sigmoid(x)
    return grad * share * (1 + x * (1 - share))


_Backward = Callable[[Tensor, Tensor, float], Tensor]
_aten = torch.ops.aten

# PyTorch's own gradients of its activations, where they are differentiable. Those that choose
# between gradients are the same functions of the output and of the input.
_OF_OUTPUT: dict[str, _Backward] = {
    "relu": lambda grad, y, _: _aten.threshold_backward(grad, y, 0),
    "relu6": lambda grad, y, _: _aten.hardtanh_backward(grad, y, 0.0, 6.0),
    "leaky_relu": lambda grad, y, slope: _aten.leaky_relu_backward(grad, y, slope, False),
    "sigmoid": lambda grad, y, _: _aten.sigmoid_backward(grad, y),
    "tanh": lambda grad, y, _: _aten.tanh_backward(grad, y),
}
_OF_INPUT: dict[str, _Backward] = {
    "silu": lambda grad, x, _: _silu_backward(grad, x),
    "gelu": lambda grad, x, _: _aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x, _: _aten.gelu_backward(grad, x, approximate="tanh"),
    "hardswish": lambda grad, x, _: _aten.hardswish_backward(grad, x),
}
