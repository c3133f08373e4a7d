"""The make-up of Hopper's blocks."""

from __future__ import annotations

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Declined, Gpu

REGISTERS = 65536  # of a processor
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


def most_registers(blocks: int, threads: int) -> int:
    """That a thread can have, if a processor has so many blocks.

    A processor's quarters have equally many, and warps are dealt out to them.
    """
    warps = ceil_div(blocks * threads // 32, 4)
    return REGISTERS // 4 // 32 // warps // 8 * 8
