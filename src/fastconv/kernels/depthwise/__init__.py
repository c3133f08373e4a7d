"""Kernels for groups of few channels (depthwise layers among them), for every GPU since Volta.

Such layers are limited by memory and by instructions rather than by multiplications. ``fma`` and
``wgrad`` use plain CUDA cores; ``toeplitz`` multiplies long kernel rows on tensor cores.
"""

from fastconv.kernels.depthwise.passes import forward, input_grad
from fastconv.kernels.depthwise.wgrad.plan import weight_grad

__all__ = ["forward", "input_grad", "weight_grad"]
