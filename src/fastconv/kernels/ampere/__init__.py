"""Kernels for the tensor cores of sm_80 and later, by what all of these have: mma.sync."""

from fastconv.kernels.ampere.halo.plan import forward, input_grad
from fastconv.kernels.ampere.wgrad_halo.plan import weight_grad

__all__ = ["forward", "input_grad", "weight_grad"]
