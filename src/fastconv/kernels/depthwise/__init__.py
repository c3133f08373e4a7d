"""Groups of few channels on plain CUDA cores, every GPU since Volta: little to multiply, much to
move."""

from fastconv.kernels.depthwise.correlate import forward, input_grad
from fastconv.kernels.depthwise.weight_grad import weight_grad

__all__ = ["forward", "input_grad", "weight_grad"]
