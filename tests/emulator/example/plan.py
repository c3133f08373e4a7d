"""Plans the example's kernel: what it takes, its constants and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.coverage import Anatomy
from fastconv.kernels.family import Constant, Declined, Gpu, Kernel, Launch, Operands, Plan
from fastconv.problem import NO_EPILOGUE, Problem

# A kernel of the package names its source by the path below fastconv/kernels.
SOURCE = str(Path(__file__).with_name("pointwise.cuh"))
THREADS = 128


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward pass: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: the kernel does not compute this problem; the message ends the sentence
            "the family does not take ...".
    """
    if problem.kernel_size != (1, 1) or problem.stride != (1, 1) or any(problem.padding):
        raise Declined("kernels other than 1x1 with stride 1 and no padding")
    if problem.groups > 1:
        raise Declined(f"{problem.groups} groups")
    if operands.input_channels_last or operands.output_channels_last:
        raise Declined("channels-last tensors")
    if operands.scalar == "double" or operands.epilogue != NO_EPILOGUE:
        raise Declined("float64 and epilogues")
    if problem.in_channels * 4 > gpu.shared_bytes_per_block:
        raise Declined(f"{problem.in_channels} input channels, whose weights exceed shared memory")
    pixels = prod(problem.input_size)
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "in_channels": problem.in_channels,
        "out_channels": problem.out_channels,
        "pixels": pixels,
        "threads": THREADS,
    }
    blocks = problem.batch * problem.out_channels * ceil_div(pixels, THREADS)
    launch = Launch(
        Kernel(SOURCE, "pointwise", tuple(constants.items())),
        grid=(blocks, 1, 1),
        block=THREADS,
        shared_bytes=problem.in_channels * 4,
        arguments=("input", "weight", "bias", "output"),
    )
    return Plan((launch,), scratch_bytes=0, family="example", why="a 1x1 convolution")


def _choices(constants: Mapping[str, Any]) -> dict[str, Constant]:
    return {
        "last block is partial": constants["pixels"] % THREADS > 0,
        "weights by several loads": constants["in_channels"] > THREADS,
    }


ANATOMIES = {
    SOURCE: Anatomy(
        sizes=frozenset({"in_channels", "out_channels", "pixels", "threads"}),
        chosen=_choices,
        parts={
            "load": ("Scalar", "weights by several loads"),
            "store": ("Scalar", "last block is partial"),
        },
    )
}
"""What chooses the code of each kernel: everything that is not a mere size."""
