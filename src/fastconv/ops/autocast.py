"""Autocast with conv2d's rule: all tensors of a forward convolution in the lower precision."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastconv.ops.schema import forward, fused, library

_here = threading.local()


@contextmanager
def of_mapped() -> Iterator[None]:
    """What autocast is for convolutions under vmap in PyTorch: on a CPU, nothing.

    vmap makes its ``conv2d`` a ``convolution``, which autocast knows on GPUs alone. No dispatch
    key can say so to the levels below: functorch puts back the keys that it found.
    """
    outer, _here.mapped = getattr(_here, "mapped", False), True
    try:
        yield
    finally:
        _here.mapped = outer


def register(device_type: str, dispatch_key: str) -> None:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        eligible = (
            tensor is not None
            and tensor.is_floating_point()
            and tensor.device.type == device_type
            and tensor.dtype != torch.float64
        )
        return tensor.to(dtype) if eligible and tensor is not None else tensor

    def kernel(operator: Callable[..., Tensor], tensors: int, *args: Any) -> Tensor:
        cast_args = args[:tensors]
        if not (device_type == "cpu" and getattr(_here, "mapped", False)):
            dtype = torch.get_autocast_dtype(device_type)
            cast_args = tuple(cast(tensor, dtype) for tensor in cast_args)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*cast_args, *args[tensors:])

    library.impl("forward", partial(kernel, forward, 3), dispatch_key)
    library.impl("fused", partial(kernel, fused, 4), dispatch_key)
