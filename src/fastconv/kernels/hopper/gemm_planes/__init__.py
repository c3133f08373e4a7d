"""Convolutions that are nearly matrix products, of planes: float32 in TF32, NCHW.

Pixels are the rows of the products, straight from planes through registers: see ``gemm_planes.cuh``
(with a header for each concern), and ``layer`` (what is multiplied), ``tiles`` (how much of it at
once, and what that takes) and ``plan`` for what it takes on.
"""

from fastconv.kernels.hopper.gemm_planes.plan import (
    forward,
    forward_image_cycles,
    input_grad,
    input_grad_image_cycles,
)

__all__ = ["forward", "forward_image_cycles", "input_grad", "input_grad_image_cycles"]
