"""Groups of few channels on plain CUDA cores, every GPU since Volta: little to multiply, much to
move."""

from fastconv.kernels.depthwise.passes import forward, input_grad
from fastconv.kernels.depthwise.wgrad.plan import weight_grad

__all__ = ["forward", "input_grad", "weight_grad"]
