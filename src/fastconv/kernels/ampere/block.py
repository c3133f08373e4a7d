"""What all kernels here ask of a GPU."""

from __future__ import annotations

from fastconv.kernels import gpus
from fastconv.kernels.family import Declined, Gpu

FIRST_ARCHITECTURE = 80  # sm_80: mma.sync of TF32, ldmatrix and cp.async

PORTABLE_SHARE = 0.5
"""Of the plain cores' rate, what the portable kernels reach: tensor cores have to be worth it."""


def check(gpu: Gpu) -> None:
    """Raises Declined for GPUs that have not what these kernels are made of."""
    if gpus.number(gpu) < FIRST_ARCHITECTURE:
        raise Declined(f"tensor-core kernels for {gpu.architecture}")
