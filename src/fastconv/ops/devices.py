"""Binds the operators to the backends of the devices."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastconv.backends import cpu, cuda
from fastconv.ops.schema import (
    BIAS,
    PRECISION,
    describe_forward,
    describe_input_grad,
    describe_weight_grad,
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

forward_check = remembered(forward_result)
input_grad_check = remembered(input_grad_result)
weight_grad_check = remembered(weight_grad_result)

BACKENDS = {"cpu": cpu, "cuda": cuda}

Kernels = dict[str, Callable[..., Any]]
"""The functions that do an operator's work, by type of device."""

forward_kernels: Kernels = {}
input_grad_kernels: Kernels = {}
weight_grad_kernels: Kernels = {}

PLAIN = (Tensor, torch.nn.Parameter)


def register() -> None:
    for device_type, backend in BACKENDS.items():
        forward_kernels[device_type] = _forward_on(backend)
        input_grad_kernels[device_type] = _input_grad_on(backend)
        weight_grad_kernels[device_type] = _weight_grad_on(backend)
    for op, kernels in (
        (forward, forward_kernels),
        (input_grad, input_grad_kernels),
        (weight_grad, weight_grad_kernels),
    ):
        for device_type, kernel in kernels.items():
            library.impl(op, kernel, device_type.upper())


def direct(
    kernels: Kernels, first: Tensor, second: Tensor, bias: Tensor | None = None
) -> Callable[..., Any] | None:
    """The device's function, if the dispatcher would find nothing to do below autograd.

    To get there through the dispatcher takes as long again as the whole rest of a call.
    """
    if (
        type(first) in PLAIN
        and type(second) in PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not (first.is_conj() or second.is_conj() or first.is_neg() or second.is_neg())
        and (bias is None or (type(bias) in PLAIN and not (bias.is_conj() or bias.is_neg())))
    ):
        return kernels.get(first.device.type)
    return None


def _forward_on(backend: ModuleType) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        result = describe_forward(forward_check, *args)
        output = result.new()
        if output.numel():
            backend.forward(result.problem, *args[:3], output, args[PRECISION])
        return output

    return run


def _input_grad_on(backend: ModuleType) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        result = describe_input_grad(input_grad_check, *args)
        grad = result.new()
        if grad.numel():
            backend.input_grad(result.problem, *args[:2], grad, args[PRECISION])
        return grad

    return run


def _weight_grad_on(backend: ModuleType) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        result = describe_weight_grad(weight_grad_check, *args)
        grad, bias_grad = result.new(), new_bias_grad(result, args[BIAS])
        wanted = bias_grad if args[BIAS] else None
        backend.weight_grad(result.problem, *args[:2], grad, wanted, args[PRECISION])
        return grad, bias_grad

    return run
