"""Kernels for tensor cores with mma.sync, which all GPUs from sm_80 on have."""

from fastconv.kernels.ampere.halo.plan import forward, input_grad
from fastconv.kernels.ampere.wgrad_halo.plan import weight_grad

__all__ = ["forward", "input_grad", "weight_grad"]
