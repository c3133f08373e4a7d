"""Binds the operators to the backends of the devices."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastconv.backends import cpu, cuda
from fastconv.ops.schema import (
    describe_forward,
    describe_gradient,
    forward,
    forward_result,
    input_grad,
    input_grad_result,
    library,
    new_bias_grad,
    remembered,
    weight_grad,
    weight_grad_result,
)

_forward_result = remembered(forward_result)
_input_grad_result = remembered(input_grad_result)
_weight_grad_result = remembered(weight_grad_result)

# The functions below, by operator and type of device.
_kernels: dict[tuple[Any, str], Callable[..., Any]] = {}
_PLAIN = (Tensor, torch.nn.Parameter)


def register() -> None:
    for backend, device_type in ((cpu, "cpu"), (cuda, "cuda")):
        kernels = (
            (forward, _forward_on(backend)),
            (input_grad, _input_grad_on(backend)),
            (weight_grad, _weight_grad_on(backend)),
        )
        for op, kernel in kernels:
            _kernels[op, device_type] = kernel
            library.impl(op, kernel, device_type.upper())


def call(op: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the dispatcher would do below autograd, with autograd's keys excluded.

    For ordinary tensors that is to call the device's function: going there through the dispatcher
    takes as long again as the whole rest of a call.
    """
    kernel = direct(op, args[0], args[1])
    return op(*args) if kernel is None else kernel(*args)


def direct(op: Callable[..., Any], first: Tensor, second: Tensor) -> Callable[..., Any] | None:
    """The device's function, if the dispatcher would find nothing to do on the way to it."""
    if (
        type(first) in _PLAIN
        and type(second) in _PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not (first.is_conj() or second.is_conj() or first.is_neg() or second.is_neg())
    ):
        return _kernels.get((op, first.device.type))
    return None


def _forward_on(backend: ModuleType) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        result = describe_forward(_forward_result, *args)
        output = result.new()
        if output.numel():
            input, weight, bias, *_ = args
            backend.forward(result.problem, input, weight, bias, output)
        return output

    return run


def _input_grad_on(backend: ModuleType) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        result = describe_gradient(_input_grad_result, *args)
        grad = result.new()
        if grad.numel():
            grad_output, weight, *_ = args
            backend.input_grad(result.problem, grad_output, weight, grad)
        return grad

    return run


def _weight_grad_on(backend: ModuleType) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        result = describe_gradient(_weight_grad_result, *args)
        grad_output, input, *_, bias = args
        grad, bias_grad = result.new(), new_bias_grad(result, bias)
        backend.weight_grad(result.problem, grad_output, input, grad, bias_grad if bias else None)
        return grad, bias_grad

    return run
