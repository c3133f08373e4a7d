"""Binds the operators to the backends of the devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastconv import native
from fastconv.backends import cpu, cuda
from fastconv.kernels import planner
from fastconv.kernels.planner import Switch
from fastconv.ops import gradients
from fastconv.ops.arguments import Ints
from fastconv.ops.schema import OPERATORS, Operator, Result, library, new_bias_grad

BACKENDS = {"cpu": cpu, "cuda": cuda}

Kernels = dict[str, Callable[..., Any]]
"""The functions that compute an operator, by type of device."""

forward_kernels: Kernels = {}
input_grad_kernels: Kernels = {}
weight_grad_kernels: Kernels = {}
fused_kernels: Kernels = {}
transposed_kernels: Kernels = {}
backward_kernels: Kernels = {}

PLAIN = (Tensor, torch.nn.Parameter)
"""The classes of tensors that have no ``__torch_function__`` or ``__torch_dispatch__``."""


KERNELS = {
    "forward": forward_kernels,
    "input_grad": input_grad_kernels,
    "weight_grad": weight_grad_kernels,
    "fused": fused_kernels,
    "transposed": transposed_kernels,
    "backward": backward_kernels,
}


def register() -> None:
    makers = (_forward_on, _input_grad_on, _weight_grad_on, _fused_on, _transposed_on)
    for (name, operator), on in zip(OPERATORS.items(), makers, strict=True):
        for device_type, backend in BACKENDS.items():
            made = on(backend, partial(operator.describe, operator.known))
            KERNELS[name][device_type] = made
    for device_type in BACKENDS:
        backward_kernels[device_type] = _backward_on(device_type)
    for name, found in KERNELS.items():
        for device_type, kernel in found.items():
            library.impl(name, loading(kernel), device_type.upper())


def loading(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the kernel that PyTorch calls until the native host path takes its place."""

    def run(*args: Any) -> Any:
        native.load_if_built()  # in inference mode, no other kernel of ours has done so
        return kernel(*args)

    return run


def _backward_on(device_type: str) -> Callable[..., Any]:
    def compute(name: str, args: tuple[Any, ...]) -> Any:
        return KERNELS[name][device_type](*args)

    return lambda *args: gradients.by_parts(compute, args)


def kernels(name: str) -> tuple[Callable[..., Any], ...]:
    """Returns the functions that compute an operator on a CPU and on a GPU."""
    return tuple(KERNELS[name][device_type] for device_type in BACKENDS)


def direct(
    kernels: Kernels, first: Tensor, second: Tensor, bias: Tensor | None = None
) -> Callable[..., Any] | None:
    """Returns the device's function if the dispatcher would find nothing to do below autograd.

    A call through the dispatcher takes as long again as all the rest of a call.
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
    """Whether one more tensor (or None) satisfies the conditions of :func:`direct`."""
    return tensor is None or (type(tensor) in PLAIN and not (tensor.is_conj() or tensor.is_neg()))


def need(
    operator: Operator, result: Result, args: tuple[Any, ...], switch: Switch | None = None
) -> cuda.Need | None:
    """Says what a call of the operator needs of a GPU: see :func:`fastconv.backends.cuda.need`.

    ``args`` are the operator's arguments.
    """
    arguments = operator.arguments(*args)
    sums_bias = operator.plan is planner.weight_grad
    return cuda.need(
        operator.plan,
        result.problem,
        arguments[0],
        arguments[1],
        result.new(),
        arguments.precision,
        bias_grad=sums_bias and arguments.bias,
        switch=switch,
        residual=getattr(arguments, "residual", None),
        epilogue=result.epilogue,
        bias=None if sums_bias else getattr(arguments, "bias", None),
    )


Describe = Callable[..., Result]


def _forward_on(backend: ModuleType, describe: Describe) -> Callable[..., Tensor]:
    def run(
        input: Tensor, weight: Tensor, bias: Tensor | None,
        stride: Ints, padding: Ints, dilation: Ints, groups: int, precision: str | None,
    ) -> Tensor:  # fmt: skip
        result = describe(input, weight, bias, stride, padding, dilation, groups, precision)
        output = result.new()
        if output.numel():
            backend.forward(result.problem, input, weight, bias, output, precision)
        return output

    return run


def _input_grad_on(backend: ModuleType, describe: Describe) -> Callable[..., Tensor]:
    def run(
        grad_output: Tensor, weight: Tensor, input_size: Ints,
        stride: Ints, padding: Ints, dilation: Ints, groups: int, precision: str | None,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:  # fmt: skip
        result = describe(
            grad_output, weight, input_size, stride, padding, dilation, groups, precision,
            memory_format,
        )  # fmt: skip
        grad = result.new()
        if grad.numel():
            backend.input_grad(result.problem, grad_output, weight, grad, precision)
        return grad

    return run


def _weight_grad_on(backend: ModuleType, describe: Describe) -> Callable[..., Any]:
    def run(
        grad_output: Tensor, input: Tensor, kernel_size: Ints,
        stride: Ints, padding: Ints, dilation: Ints, groups: int, precision: str | None,
        bias: bool, memory_format: torch.memory_format | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        result = describe(
            grad_output, input, kernel_size, stride, padding, dilation, groups, precision,
            bias, memory_format,
        )  # fmt: skip
        grad, bias_grad = result.new(), new_bias_grad(result, bias)
        wanted = bias_grad if bias else None
        backend.weight_grad(result.problem, grad_output, input, grad, wanted, precision)
        return grad, bias_grad

    return run


def _fused_on(backend: ModuleType, describe: Describe) -> Callable[..., Tensor]:
    def run(
        input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
        stride: Ints, padding: Ints, dilation: Ints, groups: int, precision: str | None,
        activation: str, slope: float,
    ) -> Tensor:  # fmt: skip
        result = describe(
            input, weight, bias, residual, stride, padding, dilation, groups, precision,
            activation, slope,
        )  # fmt: skip
        output = result.new()
        if output.numel():
            backend.forward(
                result.problem, input, weight, bias, output, precision, residual, result.epilogue
            )
        return output

    return run


def _transposed_on(backend: ModuleType, describe: Describe) -> Callable[..., Tensor]:
    def run(
        input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
        output_padding: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int,
        precision: str | None, activation: str, slope: float,
    ) -> Tensor:  # fmt: skip
        result = describe(
            input, weight, bias, residual, output_padding, stride, padding, dilation, groups,
            precision, activation, slope,
        )  # fmt: skip
        output = result.new()
        if output.numel():
            backend.input_grad(
                result.problem, input, weight, output, precision, bias, residual, result.epilogue
            )
        return output

    return run
