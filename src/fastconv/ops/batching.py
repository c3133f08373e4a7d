"""vmap: the mapped dimension becomes more images, more channels or more groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv.backends.epilogue import applied, per_channel
from fastconv.ops import autocast, gradients
from fastconv.ops.arguments import (
    BackwardArguments,
    ForwardArguments,
    FusedArguments,
    InputGradArguments,
    TransposedArguments,
    WeightGradArguments,
)
from fastconv.ops.schema import (
    OPERATORS,
    backward,
    forward,
    input_grad,
    library,
    transposed,
    weight_grad,
)
from fastconv.problem import Epilogue

Dims = Sequence[int | None]
"""Which dimension of each argument is mapped, None for those that are not."""


def _merge(tensor: Tensor, mapped: int, dim: int, groups: int = 1) -> Tensor:
    """Merges the ``mapped`` dimension into ``dim``, as (groups, mapped, rest of the channels)."""
    tensor = tensor.movedim(mapped, 0)
    rest = tensor.shape[dim + 1] // groups
    return tensor.unflatten(dim + 1, (groups, rest)).movedim(0, dim + 1).flatten(dim, dim + 2)


def _split(tensor: Tensor, dim: int, size: int, groups: int = 1) -> Tensor:
    """Undoes :func:`_merge`; the mapped dimension comes first in the result."""
    rest = tensor.shape[dim] // (groups * size)
    tensor = tensor.unflatten(dim, (groups, size, rest)).movedim(dim + 1, 0)
    return tensor.flatten(dim + 1, dim + 2)


def _expand(tensor: Tensor, mapped: int | None, size: int) -> Tensor:
    """Returns the tensor with the mapped dimension first; one that has none is expanded."""
    return tensor.expand(size, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)


def _each(
    function: Callable[[Tensor, int], Tensor], in_dims: Dims, args: Sequence[Any]
) -> list[Any]:
    """Applies ``function`` to every mapped argument and its mapped dimension; keeps the others."""
    return [
        function(arg, mapped) if isinstance(arg, Tensor) and mapped is not None else arg
        for arg, mapped in zip(args, in_dims, strict=True)
    ]


def _one(in_dims: Dims, args: Sequence[Any]) -> list[Any]:
    """The arguments of one of the mapped calls."""
    return _each(lambda tensor, mapped: tensor.select(mapped, 0), in_dims, args)


def _over_nothing(op: Callable[..., Any], in_dims: Dims, args: Sequence[Any]) -> Any:
    """Maps over a dimension of size 0; for autograd, the result still depends on ``args``."""

    def one(tensor: Tensor, mapped: int) -> Tensor:
        tensor = tensor.movedim(mapped, 0)
        return torch.cat((tensor, tensor.new_zeros(1, *tensor.shape[1:])))[0]

    result = op(*_each(one, in_dims, args))
    if isinstance(result, Tensor):
        return result.expand(0, *result.shape), 0
    return tuple(part.expand(0, *part.shape) for part in result), (0,) * len(result)


def _vmap_forward(size: int, in_dims: Dims, given: ForwardArguments) -> tuple[Tensor, int]:
    input_dim, weight_dim, bias_dim, *_ = in_dims
    if weight_dim is None and bias_dim is None:
        assert input_dim is not None
        output = forward(*given._replace(input=_merge(given.input, input_dim, 0)))
        return _split(output, 0, size), 0
    # If images are mapped too, each has its own kernels: they become groups. Otherwise all kernels
    # read the same images: they become output channels of each group.
    inner = 1 if input_dim is not None else given.groups
    given = given._replace(weight=_merge(_expand(given.weight, weight_dim, size), 0, 0, inner))
    if given.bias is not None:
        given = given._replace(bias=_merge(_expand(given.bias, bias_dim, size), 0, 0, inner))
    if input_dim is not None:
        images = _merge(given.input, input_dim, 1)
        given = given._replace(input=images, groups=given.groups * size)
    return _split(forward(*given), 1, size, inner), 0


def _vmap_input_grad(size: int, in_dims: Dims, given: InputGradArguments) -> tuple[Tensor, int]:
    def compute(grad_output: Tensor, weight: Tensor, groups: int) -> Tensor:
        return input_grad(*given._replace(grad_output=grad_output, weight=weight, groups=groups))

    return _vmap_gradient(size, in_dims, given.grad_output, given.weight, given.groups, compute)


def _vmap_gradient(
    size: int,
    in_dims: Dims,
    grad_output: Tensor,
    weight: Tensor,
    groups: int,
    compute: Callable[[Tensor, Tensor, int], Tensor],
) -> tuple[Tensor, int]:
    """Maps an input gradient that ``compute`` computes of its two tensors and their groups."""
    grad_dim, weight_dim, *_ = in_dims
    if grad_dim is not None:
        grad_output = _merge(grad_output, grad_dim, 0 if weight_dim is None else 1)
    if weight_dim is None:
        return _split(compute(grad_output, weight, groups), 0, size), 0
    if grad_dim is None:
        merged = _merge(weight, weight_dim, 1)
        return _split(compute(grad_output, merged, groups), 1, size, groups), 0
    merged = _merge(weight, weight_dim, 0)
    return _split(compute(grad_output, merged, groups * size), 1, size), 0


def _vmap_weight_grad(
    size: int, in_dims: Dims, given: WeightGradArguments
) -> tuple[tuple[Tensor, Tensor], tuple[int | None, int | None]]:
    grad_dim, input_dim, *_ = in_dims
    groups = given.groups
    if grad_dim is None:
        assert input_dim is not None
        given = given._replace(input=_merge(given.input, input_dim, 1, groups))
        grad, bias_grad = weight_grad(*given)
        return (_split(grad, 1, size), bias_grad), (0, None)
    inner = 1 if input_dim is not None else groups
    given = given._replace(grad_output=_merge(given.grad_output, grad_dim, 1, inner))
    if input_dim is not None:
        given = given._replace(input=_merge(given.input, input_dim, 1), groups=groups * size)
    grad, bias_grad = weight_grad(*given)
    if not given.bias:
        return (_split(grad, 0, size, inner), bias_grad), (0, None)
    return (_split(grad, 0, size, inner), _split(bias_grad, 0, size, inner)), (0, 0)


def _vmap_fused(size: int, in_dims: Dims, given: FusedArguments) -> tuple[Tensor, int]:
    if any(dim is not None for dim in in_dims[:3]):
        output, _ = _vmap_forward(size, in_dims[:3], given.of_forward)
    else:
        output = forward(*given.of_forward)
    residual = given.residual
    if residual is not None:
        residual = _expand(residual, in_dims[3], size).to(output.dtype)  # autocast casts it as well
    return applied(output, residual, Epilogue(given.activation, given.slope)), 0


def _vmap_transposed(size: int, in_dims: Dims, given: TransposedArguments) -> tuple[Tensor, int]:
    def compute(input: Tensor, weight: Tensor, groups: int) -> Tensor:
        return transposed(*given.plain._replace(input=input, weight=weight, groups=groups))

    _, _, bias_dim, residual_dim, *_ = in_dims
    if in_dims[0] is None and in_dims[1] is None:
        output = compute(given.input, given.weight, given.groups)
    else:
        output, _ = _vmap_gradient(size, in_dims, given.input, given.weight, given.groups, compute)
    bias, residual = given.bias, given.residual  # autocast casts them as well
    if bias is not None:
        bias = _expand(bias, bias_dim, size).to(output.dtype)
        output = output + per_channel(bias[:, None], len(given.stride))
    if residual is not None:
        residual = _expand(residual, residual_dim, size).to(output.dtype)
    return applied(output, residual, Epilogue(given.activation, given.slope)), 0


_RULES: dict[str, Callable[..., Any]] = {
    "forward": _vmap_forward,
    "input_grad": _vmap_input_grad,
    "weight_grad": _vmap_weight_grad,
    "fused": _vmap_fused,
    "transposed": _vmap_transposed,
}


def _vmap_backward(size: int, in_dims: Dims, given: BackwardArguments) -> tuple[Any, Any]:
    (name, of_input), (_, of_weight) = gradients.parts(*_one(in_dims, given))
    grad, input, weight = zip(given[:3], in_dims[:3], strict=True)
    (input_,) = _by_rule(size, name, (grad, weight), of_input[2:])
    both = (input, grad) if given.transposed else (grad, input)
    weight_, bias_ = _by_rule(size, "weight_grad", both, of_weight[2:])
    if given.transposed and given.bias:
        bias_ = torch.stack([gradients.sum_of_positions(one) for one in _expand(*grad, size)])
    return (input_, weight_, bias_), (0, 0, 0)


def _by_rule(
    size: int, name: str, tensors: Sequence[tuple[Tensor, int | None]], rest: Sequence[Any]
) -> list[Tensor]:
    """Maps an operator of two tensors, each given with its mapped dimension.

    The mapped dimension comes first in all results, even if neither tensor has one.
    """
    operator, dims = OPERATORS[name], [dim for _, dim in tensors]
    args = (*(tensor for tensor, _ in tensors), *rest)
    if dims == [None, None]:
        results = operator.call(*args)
        mapped: Any = (None, None) if isinstance(results, tuple) else None
    else:
        results, mapped = _RULES[name](size, (*dims, None), operator.arguments(*args))
    if isinstance(results, Tensor):
        results, mapped = (results,), (mapped,)
    return [_expand(result, dim, size) for result, dim in zip(results, mapped, strict=True)]


def register() -> None:
    for name, rule in _RULES.items():
        operator = OPERATORS[name]
        _register(operator.call, operator.result, operator.arguments, rule)
    _register(backward, gradients.check, BackwardArguments, _vmap_backward)


def _register(
    operator: Any,
    check: Callable[..., Any],
    arguments: Callable[..., Any],
    rule: Callable[..., Any],
) -> None:
    def batched(info: Any, in_dims: Dims, *args: Any) -> Any:
        with autocast.of_mapped():
            if info.batch_size == 0:
                return _over_nothing(operator, in_dims, args)
            # The arguments are checked before dimensions are merged, so that errors name the
            # user's own sizes.
            check(*_one(in_dims, args))
            return rule(info.batch_size, in_dims, arguments(*args))

    torch.library.register_vmap(operator._name, batched, lib=library)
