"""Kernels for groups of 4, 8, 16 or 32 channels, with mma.sync, for every GPU since sm_80.

Tensors are channels-last, with 16-bit elements. Such layers are limited by memory, if products of
channels of different groups are not computed.
"""

from fastconv.kernels.grouped.convolve.plan import forward, input_grad
from fastconv.kernels.grouped.wgrad.plan import weight_grad

__all__ = ["forward", "input_grad", "weight_grad"]
