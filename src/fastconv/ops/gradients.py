"""The operator ``backward``: all gradients of a convolution in one call.

It computes what two other operators compute: ``input_grad``, or ``forward`` for a transposed
convolution, and ``weight_grad``. Callers that go through PyTorch's dispatcher, as compiled graphs
do, have the host time of one call instead of two.

It has no rules of its own. Whatever PyTorch asks of it, a derivative for one, is asked of the two.
Where one gradient alone is wanted, they are called themselves: their graphs need not keep a tensor
that only the other gradient reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv.ops.arguments import BackwardArguments
from fastconv.ops.schema import OPERATORS, gradient_format, library

Part = tuple[str, tuple[Any, ...]]
"""An operator's name and its arguments."""

Gradients = tuple[Tensor, Tensor, Tensor]


def parts(*args: Any) -> tuple[Part, Part]:
    """Returns what computes the gradient of the input, and what those of weight and bias."""
    given = BackwardArguments(*args)
    _check_channels(given)
    grad, input, weight, geometry = given.grad_output, given.input, given.weight, args[3:8]
    memory_format = gradient_format(input, weight)
    if given.transposed:
        above = grad.contiguous(memory_format=memory_format)
        return (
            ("forward", (above, weight, None, *geometry)),
            ("weight_grad", (input, above, weight.shape[2:], *geometry, False, memory_format)),
        )
    return (
        ("input_grad", (grad, weight, input.shape[2:], *geometry, memory_format)),
        ("weight_grad", (grad, input, weight.shape[2:], *geometry, given.bias, memory_format)),
    )


def _check_channels(given: BackwardArguments) -> None:
    """Checks what neither part can see, as it has only one of input and weight."""
    rank = len(given.stride) + 2
    for name in ("input", "weight"):
        shape = getattr(given, name).shape
        if len(shape) != rank:
            raise RuntimeError(f"Expected {rank}D {name}, but got {name} of size: {list(shape)}")
    first, second, *_ = given.weight.shape
    channels = first if given.transposed else second * given.groups
    if given.input.shape[1] != channels:
        raise RuntimeError(
            f"Given groups={given.groups}, weight of size {list(given.weight.shape)}, expected "
            f"input to have {channels} channels, but got input of size {list(given.input.shape)}"
        )


def by_parts(compute: Callable[[str, tuple[Any, ...]], Any], args: Sequence[Any]) -> Gradients:
    """Computes the operator by its parts: ``compute(name, arguments)`` computes an operator."""
    of_input, of_weight = parts(*args)
    input = compute(*of_input)
    weight, bias = compute(*of_weight)
    *_, transposed, wants_bias = args
    if transposed and wants_bias:
        bias = sum_of_positions(args[0])
    return input, weight, bias


def by_operators(*args: Any) -> Gradients:
    """Computes the operator by calls of the others, each of which PyTorch sees."""
    return by_parts(lambda name, given: OPERATORS[name].call(*given), args)


def check(*args: Any) -> None:
    """Raises an error unless the operator takes the arguments."""
    for name, given in parts(*args):
        OPERATORS[name].result(*given)


def fake(*args: Any) -> Gradients:
    """The operator's meta function."""
    return by_parts(lambda name, given: OPERATORS[name].fake(*given), args)


def sum_of_positions(grad_output: Tensor) -> Tensor:
    """Computes the gradient of the bias."""
    all_but_channels = (0, *range(2, grad_output.dim()))
    if grad_output.dtype != torch.complex32:
        return grad_output.sum(all_but_channels)
    # PyTorch has no sum of complex32 on a CPU.
    parts = torch.view_as_real(grad_output.resolve_conj()).sum(all_but_channels)
    return torch.view_as_complex(parts)


def register() -> None:
    torch.library.register_fake("fastconv::backward", fake, lib=library)
