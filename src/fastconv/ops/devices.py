"""Binds the operators to the backends of the devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastconv.backends import cpu, cuda
from fastconv.kernels import planner
from fastconv.kernels.planner import Switch
from fastconv.ops.schema import (
    BIAS,
    FUSED_PRECISION,
    OPERATORS,
    PRECISION,
    RESIDUAL,
    Operator,
    Result,
    fused,
    library,
    new_bias_grad,
)

BACKENDS = {"cpu": cpu, "cuda": cuda}

Kernels = dict[str, Callable[..., Any]]
"""The functions that do an operator's work, by type of device."""

forward_kernels: Kernels = {}
input_grad_kernels: Kernels = {}
weight_grad_kernels: Kernels = {}
fused_kernels: Kernels = {}

PLAIN = (Tensor, torch.nn.Parameter)


def register() -> None:
    for name, kernels, on in (
        ("forward", forward_kernels, _forward_on),
        ("input_grad", input_grad_kernels, _input_grad_on),
        ("weight_grad", weight_grad_kernels, _weight_grad_on),
        ("fused", fused_kernels, _fused_on),
    ):
        operator = OPERATORS[name]
        for device_type, backend in BACKENDS.items():
            kernels[device_type] = on(backend, partial(operator.describe, operator.known))
            library.impl(operator.call, kernels[device_type], device_type.upper())


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


def is_plain(tensor: Tensor | None) -> bool:
    """Whether :func:`direct` would have nothing against one more tensor."""
    return tensor is None or (type(tensor) in PLAIN and not (tensor.is_conj() or tensor.is_neg()))


def need(
    operator: Operator, result: Result, args: tuple[Any, ...], switch: Switch | None = None
) -> cuda.Need | None:
    """What a call of the operator needs of a GPU: see :func:`fastconv.backends.cuda.need`."""
    is_fused = operator.call is fused
    return cuda.need(
        operator.plan,
        result.problem,
        args[0],
        args[1],
        result.new(),
        args[FUSED_PRECISION if is_fused else PRECISION],
        bias_grad=operator.plan is planner.weight_grad and args[BIAS],
        switch=switch,
        residual=args[RESIDUAL] if is_fused else None,
        epilogue=result.epilogue,
        bias=args[2] if operator.plan is planner.forward else None,
    )


Describe = Callable[..., Result]


def _forward_on(backend: ModuleType, describe: Describe) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        result = describe(*args)
        output = result.new()
        if output.numel():
            backend.forward(result.problem, *args[:3], output, args[PRECISION])
        return output

    return run


def _input_grad_on(backend: ModuleType, describe: Describe) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        result = describe(*args)
        grad = result.new()
        if grad.numel():
            backend.input_grad(result.problem, *args[:2], grad, args[PRECISION])
        return grad

    return run


def _weight_grad_on(backend: ModuleType, describe: Describe) -> Callable[..., Any]:
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        result = describe(*args)
        grad, bias_grad = result.new(), new_bias_grad(result, args[BIAS])
        wanted = bias_grad if args[BIAS] else None
        backend.weight_grad(result.problem, *args[:2], grad, wanted, args[PRECISION])
        return grad, bias_grad

    return run


def _fused_on(backend: ModuleType, describe: Describe) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        result = describe(*args)
        output = result.new()
        if output.numel():
            backend.forward(
                result.problem, *args[:3], output, args[FUSED_PRECISION], args[RESIDUAL],
                result.epilogue,
            )  # fmt: skip
        return output

    return run
