"""Portable kernels on plain CUDA cores: any geometry, any real dtype, every GPU since Volta."""

from fastconv.kernels.direct.forward.plan import forward, input_grad
from fastconv.kernels.direct.wgrad.plan import weight_grad

__all__ = ["forward", "input_grad", "weight_grad"]
