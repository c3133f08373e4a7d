"""Epilogues by PyTorch's elementwise operations: on every device, and differentiable."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastconv.problem import NO_EPILOGUE, Epilogue


def applied(output: Tensor, residual: Tensor | None, epilogue: Epilogue) -> Tensor:
    """Returns activation(output + residual); ``output`` itself where there is nothing to do."""
    if residual is not None:
        output = output + residual
    if epilogue.activation == "leaky_relu":
        return F.leaky_relu(output, epilogue.slope)
    return _FUNCTIONS[epilogue.activation](output)


def applied_in_place(output: Tensor, residual: Tensor | None, epilogue: Epilogue) -> Tensor:
    """Returns activation(output + residual), and overwrites ``output`` with the sum."""
    if residual is not None:
        output += residual
    return applied(output, None, epilogue)


def applied_to_bias(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue
) -> None:
    """Fills ``out`` with activation(bias + residual): a convolution that adds up nothing."""
    out.zero_()
    add_epilogue(out, bias, residual, epilogue)


def per_channel(bias: Tensor, axes: int) -> Tensor:
    """Returns a bias with as many dimensions of one element behind its own as there are axes."""
    for _ in range(axes):
        bias = bias.unsqueeze(-1)
    return bias


def add_epilogue(
    out: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: Epilogue
) -> None:
    """Makes ``out`` activation(out + bias + residual), in passes over memory of their own."""
    if bias is not None:
        out.add_(per_channel(bias, out.dim() - 2))
    if epilogue != NO_EPILOGUE:
        out.copy_(applied_in_place(out, residual, epilogue))


def _identity(output: Tensor) -> Tensor:
    return output


def _relu6(output: Tensor) -> Tensor:
    return F.relu6(output) if output.is_floating_point() else output.clamp(0, 6)


def _gelu_tanh(output: Tensor) -> Tensor:
    return F.gelu(output, approximate="tanh")


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": torch.relu,
    "relu6": _relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
