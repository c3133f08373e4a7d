"""Autocast: as in PyTorch, all tensors of a convolution are cast to the lower type."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastconv.ops.schema import forward, fused, library, transposed

_here = threading.local()


@contextmanager
def of_mapped() -> Iterator[None]:
    """Has autocast treat convolutions as PyTorch's under vmap: on a CPU it does not cast them.

    PyTorch's vmap turns ``conv2d`` into ``convolution``, for which autocast has a rule only on
    GPUs. A dispatch key cannot tell the levels below: functorch restores the keys that it found.
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

    # The first arguments, as many as ``tensors``, are tensors. The rest is passed on as it is.
    def kernel(operator: Callable[..., Tensor], tensors: int, *args: Any) -> Tensor:
        cast_args = args[:tensors]
        if not (device_type == "cpu" and getattr(_here, "mapped", False)):
            dtype = torch.get_autocast_dtype(device_type)
            cast_args = tuple(cast(tensor, dtype) for tensor in cast_args)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*cast_args, *args[tensors:])

    library.impl("forward", partial(kernel, forward, 3), dispatch_key)
    library.impl("fused", partial(kernel, fused, 4), dispatch_key)
    library.impl("transposed", partial(kernel, transposed, 4), dispatch_key)
