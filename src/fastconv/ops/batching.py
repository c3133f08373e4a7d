"""vmap: the mapped dimension becomes more images, more channels or more groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastconv.backends.epilogue import applied
from fastconv.ops import autocast
from fastconv.ops.schema import OPERATORS, Operator, forward, input_grad, library, weight_grad
from fastconv.problem import Epilogue


def _fold(tensor: Tensor, mapped: int, dim: int, groups: int = 1) -> Tensor:
    """Merges the ``mapped`` dimension into ``dim``, below its groups: (groups, mapped, rest)."""
    tensor = tensor.movedim(mapped, 0)
    rest = tensor.shape[dim + 1] // groups
    return tensor.unflatten(dim + 1, (groups, rest)).movedim(0, dim + 1).flatten(dim, dim + 2)


def _unfold(tensor: Tensor, dim: int, size: int, groups: int = 1) -> Tensor:
    """Undoes :func:`_fold`; the mapped dimension comes first."""
    rest = tensor.shape[dim] // (groups * size)
    tensor = tensor.unflatten(dim, (groups, size, rest)).movedim(dim + 1, 0)
    return tensor.flatten(dim + 1, dim + 2)


def _expand(tensor: Tensor, mapped: int | None, size: int) -> Tensor:
    """The tensor with a mapped dimension in front, whether it had one or not."""
    return tensor.expand(size, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)


def _each(function: Callable[[Tensor, int], Tensor], in_dims: Any, args: Any) -> list[Any]:
    """The arguments, ``function`` applied to those that are mapped and the dimension they are."""
    return [
        function(arg, mapped) if isinstance(arg, Tensor) and mapped is not None else arg
        for arg, mapped in zip(args, in_dims, strict=True)
    ]


def _over_nothing(op: Callable[..., Any], in_dims: Any, *args: Any) -> Any:
    """The result of a map over a dimension of size 0, which autograd sees depend on ``args``."""

    def one(tensor: Tensor, mapped: int) -> Tensor:
        tensor = tensor.movedim(mapped, 0)
        return torch.cat((tensor, tensor.new_zeros(1, *tensor.shape[1:])))[0]

    result = op(*_each(one, in_dims, args))
    if isinstance(result, Tensor):
        return result.expand(0, *result.shape), 0
    return tuple(part.expand(0, *part.shape) for part in result), (0,) * len(result)


def _vmap_forward(
    info: Any, in_dims: Any, input: Any, weight: Any, bias: Any, *geometry: Any
) -> Any:
    stride, padding, dilation, groups, precision = geometry
    size, (input_dim, weight_dim, bias_dim, *_) = info.batch_size, in_dims
    if weight_dim is None and bias_dim is None:
        output = forward(_fold(input, input_dim, 0), weight, bias, *geometry)
        return _unfold(output, 0, size), 0
    # Mapped over images too, every image has its own kernels: groups. Otherwise all kernels see
    # the same images: more output channels in each group.
    inner = 1 if input_dim is not None else groups
    weight = _fold(_expand(weight, weight_dim, size), 0, 0, inner)
    if bias is not None:
        bias = _fold(_expand(bias, bias_dim, size), 0, 0, inner)
    if input_dim is not None:
        input, groups = _fold(input, input_dim, 1), groups * size
    output = forward(input, weight, bias, stride, padding, dilation, groups, precision)
    return _unfold(output, 1, size, inner), 0


def _vmap_input_grad(
    info: Any, in_dims: Any, grad_output: Any, weight: Any, input_size: Any, *geometry: Any
) -> Any:
    stride, padding, dilation, groups, precision, *rest = geometry
    size, (grad_dim, weight_dim, *_) = info.batch_size, in_dims
    if weight_dim is None:
        grad = input_grad(_fold(grad_output, grad_dim, 0), weight, input_size, *geometry)
        return _unfold(grad, 0, size), 0
    if grad_dim is None:
        grad = input_grad(grad_output, _fold(weight, weight_dim, 1), input_size, *geometry)
        return _unfold(grad, 1, size, groups), 0
    grad = input_grad(
        _fold(grad_output, grad_dim, 1), _fold(weight, weight_dim, 0), input_size,
        stride, padding, dilation, groups * size, precision, *rest,
    )  # fmt: skip
    return _unfold(grad, 1, size), 0


def _vmap_weight_grad(
    info: Any, in_dims: Any, grad_output: Any, input: Any, kernel_size: Any, *geometry: Any
) -> Any:
    stride, padding, dilation, groups, precision, bias, *rest = geometry
    size, (grad_dim, input_dim, *_) = info.batch_size, in_dims
    if grad_dim is None:
        grad, bias_grad = weight_grad(
            grad_output, _fold(input, input_dim, 1, groups), kernel_size, *geometry
        )
        return (_unfold(grad, 1, size), bias_grad), (0, None)
    inner = 1 if input_dim is not None else groups
    grad_output = _fold(grad_output, grad_dim, 1, inner)
    if input_dim is not None:
        input, groups = _fold(input, input_dim, 1), groups * size
    grad, bias_grad = weight_grad(
        grad_output, input, kernel_size,
        stride, padding, dilation, groups, precision, bias, *rest,
    )  # fmt: skip
    if not bias:
        return (_unfold(grad, 0, size, inner), bias_grad), (0, None)
    return (_unfold(grad, 0, size, inner), _unfold(bias_grad, 0, size, inner)), (0, 0)


def _vmap_fused(
    info: Any, in_dims: Any, input: Any, weight: Any, bias: Any, residual: Any, *rest: Any
) -> Any:
    *geometry, activation, slope = rest
    if any(dim is not None for dim in in_dims[:3]):
        dims = (*in_dims[:3], *in_dims[4:-2])
        sums, _ = _vmap_forward(info, dims, input, weight, bias, *geometry)
    else:
        sums = forward(input, weight, bias, *geometry)
    if residual is not None:
        residual = _expand(residual, in_dims[3], info.batch_size).to(sums.dtype)  # as autocast does
    return applied(sums, residual, Epilogue(activation, slope)), 0


def register() -> None:
    for name, rule in (
        ("forward", _vmap_forward),
        ("input_grad", _vmap_input_grad),
        ("weight_grad", _vmap_weight_grad),
        ("fused", _vmap_fused),
    ):
        batched = _batched(OPERATORS[name], rule)
        torch.library.register_vmap(f"fastconv::{name}", batched, lib=library)


def _batched(operator: Operator, rule: Callable[..., Any]) -> Callable[..., Any]:
    def batched(info: Any, in_dims: Any, *args: Any) -> Any:
        with autocast.of_mapped():
            if info.batch_size == 0:
                return _over_nothing(operator.call, in_dims, *args)
            # Folded sizes would be wrong in other words than those the user has.
            operator.result(*_each(lambda tensor, mapped: tensor.select(mapped, 0), in_dims, args))
            return rule(info, in_dims, *args)

    return batched
