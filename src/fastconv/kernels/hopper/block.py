"""Constants of a thread block of the Hopper kernels: consumer warpgroups and their producers."""

from __future__ import annotations

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Declined, Gpu

REGISTERS = 65536  # of an SM
WARPGROUP = 128  # threads
CONSUMERS = 2  # warpgroups
THREADS = (1 + CONSUMERS) * WARPGROUP  # of a block with one producer
OUTPUTS = 64  # M of a wgmma: output channels
A_OPERAND_BYTES = OUTPUTS * 32  # A operand of a wgmma: 64 rows by 32 bytes of K


def consumer_registers(producer_registers: int, producers: int = 1) -> int:
    """Registers of a consumer thread if each producer thread keeps ``producer_registers``."""
    warpgroups = producers + CONSUMERS
    at_launch = most_registers(1, warpgroups * WARPGROUP)
    return (warpgroups * at_launch - producers * producer_registers) // CONSUMERS


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
