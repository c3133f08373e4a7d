"""Autocast with conv2d's rule: all tensors of a forward convolution in the lower precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastconv.ops.schema import forward, library


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

    def kernel(input: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return forward(cast(input, dtype), cast(weight, dtype), cast(bias, dtype), *geometry)

    library.impl("forward", kernel, dispatch_key)
