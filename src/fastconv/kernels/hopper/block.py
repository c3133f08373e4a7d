"""The make-up of Hopper's blocks."""

from __future__ import annotations

from fastconv.kernels.family import Declined, Gpu

THREADS = 384
CONSUMERS = 2  # warpgroups
OUTPUTS = 64  # channels of a product
PRODUCT_BYTES = OUTPUTS * 32  # of its weights
LAUNCH_REGISTERS = 168  # of a thread, for three warpgroups


def consumer_registers(producer_registers: int) -> int:
    """What the two consumers' threads can have if the producer's keep so many."""
    return (3 * LAUNCH_REGISTERS - producer_registers) // CONSUMERS


def check(gpu: Gpu) -> None:
    """Raises Declined for GPUs that have not what these kernels are made of."""
    if gpu.architecture != "sm_90a":
        raise Declined(f"tensor-core kernels for {gpu.architecture}")
