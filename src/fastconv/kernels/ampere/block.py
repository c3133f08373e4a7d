"""What all kernels of the family require of a GPU."""

from __future__ import annotations

from fastconv.kernels import gpus
from fastconv.kernels.family import Declined, Gpu

FIRST_ARCHITECTURE = 80  # sm_80 is the first with mma.sync of TF32 and cp.async


def check(gpu: Gpu) -> None:
    """Raises Declined for GPUs without the instructions that these kernels use."""
    if gpus.number(gpu) < FIRST_ARCHITECTURE:
        raise Declined(f"tensor-core kernels for {gpu.architecture}")
