"""Kernels for Hopper's tensor cores (sm_90a)."""

from fastconv.kernels.hopper.passes import alternatives, forward, input_grad
from fastconv.kernels.hopper.weight_grad import weight_grad

__all__ = ["alternatives", "forward", "input_grad", "weight_grad"]
