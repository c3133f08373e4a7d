"""Epilogues by PyTorch's elementwise operations: on every device, and differentiable."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastconv.problem import Epilogue


def applied(sums: Tensor, residual: Tensor | None, epilogue: Epilogue) -> Tensor:
    """activation(sums + residual); ``sums`` itself where there is nothing to do."""
    if residual is not None:
        sums = sums + residual
    if epilogue.activation == "leaky_relu":
        return F.leaky_relu(sums, epilogue.slope)
    return _FUNCTIONS[epilogue.activation](sums)


def _identity(sums: Tensor) -> Tensor:
    return sums


def _relu6(sums: Tensor) -> Tensor:
    return F.relu6(sums) if sums.is_floating_point() else sums.clamp(0, 6)


def _gelu_tanh(sums: Tensor) -> Tensor:
    return F.gelu(sums, approximate="tanh")


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
