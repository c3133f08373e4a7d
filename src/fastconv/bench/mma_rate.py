"""Measures the peak rate of ``mma.sync`` on a GPU, with warps that execute nothing else.

It is the ceiling of kernels that use this instruction. Some newer GPUs have faster ones (wgmma,
tcgen05), which PyTorch's matrix products use, so that these do not show the rate of ``mma.sync``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastconv.jit import launch
from fastconv.kernels.family import Kernel, Launch

LEAST_CAPABILITY = (8, 0)  # The first compute capability that has all KINDS.
KINDS = {
    "tf32": ("fastconv::Tf32", torch.float32),
    "float16": ("fastconv::Float16", torch.float16),
    "bfloat16": ("fastconv::Bfloat16", torch.bfloat16),
}
"""The number formats of the operands: their types in device code and in PyTorch."""

LEFT, RIGHT = 2, 4  # operand tiles of a warp: their eight MMAs are independent of each other
ROW_BYTES = 32  # bytes of a row of an operand tile
WARPS = (4, 8, 16, 32)  # The numbers of warps on an SM to try, up to 8 for each of its schedulers.
ROUNDS = 1 << 15  # A launch takes some milliseconds, so that launching takes little of it.


def launch_of(kind: str, warps: int, blocks: int, rounds: int) -> Launch:
    """The launch of ``ampere/ceiling.cuh``, which describes its tensors, matrices and totals."""
    constants = (("Kind", KINDS[kind][0]), ("left", LEFT), ("right", RIGHT))
    kernel = Kernel("ampere/ceiling.cuh", "ceiling", constants)
    return Launch(kernel, (blocks, 1, 1), 32 * warps, 0, ("matrices", "totals", rounds))


def matrices(kind: str, device: torch.device) -> Tensor:
    """The operand tiles of a warp, left ones first.

    They are random, for a GPU's power draw, and so its clock, depends on the numbers.
    """
    dtype = KINDS[kind][1]
    rows = torch.randn(16 * LEFT + 8 * RIGHT, ROW_BYTES // dtype.itemsize, device=device)
    return rows.to(dtype)


def totals(launch: Launch, device: torch.device) -> Tensor:
    """The output tensor of a launch: 16 by 8 sums for each of its warps."""
    return torch.empty(launch.grid[0] * launch.block // 32, 16, 8, device=device)


def flops(launch: Launch, kind: str) -> int:
    """The operations of a launch."""
    warps, (*_, rounds) = launch.grid[0] * launch.block // 32, launch.arguments
    assert isinstance(rounds, int)
    depth = ROW_BYTES // KINDS[kind][1].itemsize
    return warps * rounds * LEFT * RIGHT * 2 * 16 * 8 * depth


def measure(
    device: torch.device, seconds: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """The highest TFLOP/s of each of :data:`KINDS`, over all of :data:`WARPS`.

    The result is empty on GPUs before :data:`LEAST_CAPABILITY` and on CPUs. ``seconds`` measures
    how long a call takes.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return {}
    sms = torch.cuda.get_device_properties(device).multi_processor_count

    def tflops(kind: str, warps: int) -> float:
        one = launch_of(kind, warps, sms, ROUNDS)
        read, written = matrices(kind, device), totals(one, device)
        prepared = launch.load_launches([one], device, ("matrices", "totals"))
        taken = seconds(lambda: prepared.run(read.data_ptr(), written.data_ptr()))
        return flops(one, kind) / taken * 1e-12

    return {kind: max(tflops(kind, warps) for warps in WARPS) for kind in KINDS}
