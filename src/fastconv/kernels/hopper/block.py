"""Constants of a thread block of the Hopper kernels: three warpgroups, one of them the producer."""

from __future__ import annotations

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Declined, Gpu

REGISTERS = 65536  # of an SM
THREADS = 384
CONSUMERS = 2  # warpgroups
OUTPUTS = 64  # M of a wgmma: output channels
A_OPERAND_BYTES = OUTPUTS * 32  # A operand of a wgmma: 64 rows by 32 bytes of K
LAUNCH_REGISTERS = 168  # per thread at launch, the most for THREADS threads of one block per SM


def consumer_registers(producer_registers: int) -> int:
    """Registers of a consumer thread if a producer thread keeps ``producer_registers``."""
    return (3 * LAUNCH_REGISTERS - producer_registers) // CONSUMERS


def check(gpu: Gpu) -> None:
    """Raises Declined unless the GPU has wgmma and TMA as sm_90a has them."""
    if gpu.architecture != "sm_90a":
        raise Declined(f"tensor-core kernels for {gpu.architecture}")


def most_registers(blocks: int, threads: int) -> int:
    """The most registers of a thread if an SM runs ``blocks`` blocks of ``threads`` threads.

    Each quarter of an SM has a quarter of the registers, and warps are distributed over the
    quarters.
    """
    warps = ceil_div(blocks * threads // 32, 4)
    return REGISTERS // 4 // 32 // warps // 8 * 8
