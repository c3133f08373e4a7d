"""What all kernels of the family require of a GPU, and when they are worth it."""

from __future__ import annotations

from fastconv.kernels import gpus
from fastconv.kernels.family import Declined, Gpu

FIRST_ARCHITECTURE = 80  # sm_80 is the first with mma.sync of TF32 and cp.async

PORTABLE_SHARE = 0.5
"""The share of the plain CUDA cores' peak rate that the portable kernels reach, estimated."""


def portable_rate(gpu: Gpu) -> float:
    """Multiply-adds of the portable kernels in a cycle of an SM, estimated."""
    return PORTABLE_SHARE * gpus.rates(gpu).float32


def check(gpu: Gpu) -> None:
    """Raises Declined for GPUs without the instructions that these kernels use."""
    if gpus.number(gpu) < FIRST_ARCHITECTURE:
        raise Declined(f"tensor-core kernels for {gpu.architecture}")
