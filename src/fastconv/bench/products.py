"""What ``mma.sync`` reaches on a GPU: warps that multiply small matrices, and do nothing else.

It is the ceiling of kernels that multiply so. Newer GPUs have faster products, and what PyTorch's
matrix product reaches there says nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastconv.jit import launch
from fastconv.kernels.family import Kernel, Launch

LEAST_CAPABILITY = (8, 0)
KINDS = {
    "tf32": ("fastconv::Tf32", torch.float32),
    "float16": ("fastconv::Float16", torch.float16),
    "bfloat16": ("fastconv::Bfloat16", torch.bfloat16),
}
"""What is multiplied, as device code and as PyTorch calls it."""

LEFT, RIGHT = 2, 4  # matrices of a warp: eight products, none of which waits for another
ROW_BYTES = 32
WARPS = (4, 8, 16, 32)  # of a processor, which are tried: up to 8 for each of its schedulers
ROUNDS = 1 << 15  # some milliseconds, of which a launch takes little


def launch_of(kind: str, warps: int, blocks: int, rounds: int) -> Launch:
    """Tensors ``matrices`` and ``totals``; what they hold is in the kernel's file."""
    constants = (("Kind", KINDS[kind][0]), ("left", LEFT), ("right", RIGHT))
    kernel = Kernel("ampere/ceiling.cuh", "ceiling", constants)
    return Launch(kernel, (blocks, 1, 1), 32 * warps, 0, ("matrices", "totals", rounds))


def matrices(kind: str, device: torch.device) -> Tensor:
    """Random ones: a GPU's clock depends on what it multiplies. Those of the left come first."""
    dtype = KINDS[kind][1]
    rows = torch.randn(16 * LEFT + 8 * RIGHT, ROW_BYTES // dtype.itemsize, device=device)
    return rows.to(dtype)


def totals(launch: Launch, device: torch.device) -> Tensor:
    """Where the launch leaves 16 by 8 sums for each of its warps."""
    return torch.empty(launch.grid[0] * launch.block // 32, 16, 8, device=device)


def flops(launch: Launch, kind: str) -> int:
    """Operations of a launch."""
    warps, (*_, rounds) = launch.grid[0] * launch.block // 32, launch.arguments
    assert isinstance(rounds, int)
    depth = ROW_BYTES // KINDS[kind][1].itemsize
    return warps * rounds * LEFT * RIGHT * 2 * 16 * 8 * depth


def measure(
    device: torch.device, seconds: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """TFLOP/s of each kind of products, with as many warps as are best; empty on older GPUs.

    ``seconds`` measures how long a call takes.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return {}
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def tflops(kind: str, warps: int) -> float:
        one = launch_of(kind, warps, processors, ROUNDS)
        read, written = matrices(kind, device), totals(one, device)
        prepared = launch.load_launches([one], device, ("matrices", "totals"))
        taken = seconds(lambda: prepared.run(read.data_ptr(), written.data_ptr()))
        return flops(one, kind) / taken * 1e-12

    return {kind: max(tflops(kind, warps) for warps in WARPS) for kind in KINDS}
