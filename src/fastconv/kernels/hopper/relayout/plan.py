"""Plans contiguous layers by channels-last kernels, with copies in the workspace.

The copies are regions of the workspace. A launch before the channels-last plan makes that of what
the pass reads; a launch after it transposes what the plan has written. A weight gradient reads two
such tensors, and its result has the layout of a weight.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    REGION_ALIGNMENT,
    Argument,
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    Region,
)
from fastconv.kernels.planning.copies import IMAGE_LAUNCH_CYCLES, LAUNCH_CYCLES, SM_BYTES
from fastconv.problem import Problem

SOURCE = "hopper/relayout/kernel.cuh"
THREADS = 256
TILE = 64  # kTile in kernel.cuh
MOST_BLOCKS = 2**31 - 1


def channels_last(operands: Operands) -> Operands:
    """The operands of the channels-last plan of a contiguous layer.

    Raises:
        Declined: the layer is not contiguous, or is computed in full float32 or in float64.
    """
    if operands.scalar_bytes > 2 and operands.precision != "tf32":
        raise Declined(f"channels-last copies of {operands.scalar} in {operands.precision}")
    if operands.input_channels_last or operands.output_channels_last or not operands.aligned:
        raise Declined("channels-last copies unless tensors are contiguous and aligned")
    if operands.epilogue.residual:
        raise Declined("channels-last copies of a residual")
    # Batch normalization of contiguous tensors computes its own statistics.
    return replace(operands, input_channels_last=True, output_channels_last=True, statistics=False)


def image_cycles(problem: Problem, operands: Operands) -> float:
    """Estimated cycles of one SM for both copies of an image."""
    moved = 2 * _bytes(problem, operands) / problem.batch
    return moved / SM_BYTES + 2 * IMAGE_LAUNCH_CYCLES


def cycles(problem: Problem, operands: Operands, gpu: Gpu) -> float:
    """Estimated cycles of both copies of all images."""
    return 2 * _bytes(problem, operands) / SM_BYTES / gpu.sm_count + 2 * LAUNCH_CYCLES


def convolution(plan: Plan, problem: Problem, operands: Operands, reversed: bool) -> Plan:
    """The plan of a forward pass or, if ``reversed``, of an input gradient.

    ``plan`` is the same pass's with :func:`channels_last` operands.
    """
    read, written = problem.input_shape, problem.output_shape
    if reversed:
        read, written = written, read
    names = {"input": "input_copy", "output": "output_copy"}
    before = _to_channels_last("input", "input_copy", read, operands)
    after = _to_contiguous("output_copy", "output", written, operands)
    sizes = [operands.scalar_bytes * prod(shape) for shape in (read, written)]
    return _joined([before], plan, [after], names, sizes)


def weight_gradient(plan: Plan, problem: Problem, operands: Operands) -> Plan:
    """The plan of a weight gradient; ``plan`` is that with :func:`channels_last` operands."""
    names = {"grad_output": "grad_output_copy", "input": "input_copy"}
    shapes = (problem.output_shape, problem.input_shape)
    before = [
        _to_channels_last(name, copy, shape, operands)
        for (name, copy), shape in zip(names.items(), shapes, strict=True)
    ]
    sizes = [operands.scalar_bytes * prod(shape) for shape in shapes]
    return _joined(before, plan, [], names, sizes)


def _bytes(problem: Problem, operands: Operands) -> int:
    return (prod(problem.input_shape) + prod(problem.output_shape)) * operands.scalar_bytes


def _joined(
    before: list[Launch], plan: Plan, after: list[Launch], names: dict[str, str], sizes: list[int]
) -> Plan:
    """The channels-last plan on copies, whose sizes in bytes are given."""
    regions, end = [], plan.scratch_bytes
    for name, size in zip(names.values(), sizes, strict=True):
        regions.append(Region(name, round_up(end, REGION_ALIGNMENT)))
        end = regions[-1].offset + size
    return replace(
        plan,
        launches=(*before, *(_renamed(launch, names) for launch in plan.launches), *after),
        scratch_bytes=end,
        why=f"{plan.why}, on channels-last copies",
        packs=0,  # Frozen weights would keep the whole workspace, with the copies.
        regions=tuple(regions),
    )


def _renamed(launch: Launch, names: dict[str, str]) -> Launch:
    def renamed(argument: Argument) -> Argument:
        if isinstance(argument, int):
            return argument
        if isinstance(argument, str):
            return names.get(argument, argument)
        return replace(argument, tensor=names.get(argument.tensor, argument.tensor))

    return replace(launch, arguments=tuple(map(renamed, launch.arguments)))


def _to_channels_last(
    source: str, target: str, shape: tuple[int, ...], operands: Operands
) -> Launch:
    images, channels, *size = shape
    return _transpose(source, target, images, channels, prod(size), operands)


def _to_contiguous(source: str, target: str, shape: tuple[int, ...], operands: Operands) -> Launch:
    images, channels, *size = shape
    return _transpose(source, target, images, prod(size), channels, operands)


def _transpose(
    source: str, target: str, images: int, rows: int, columns: int, operands: Operands
) -> Launch:
    blocks = images * ceil_div(rows, TILE) * ceil_div(columns, TILE)
    if blocks > MOST_BLOCKS:
        raise Declined(f"channels-last copies of {images} images of {rows} by {columns} elements")
    shared_bytes = TILE * operands.scalar_bytes * (TILE + 2)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Scalar", operands.scalar),
        ("threads", THREADS),
        ("shared_bytes", shared_bytes),
        ("vector_loads", columns % operands.vector == 0),
        ("vector_stores", rows % operands.vector == 0),
    )
    return Launch(
        Kernel(SOURCE, "transpose", constants),
        (blocks, 1, 1),
        THREADS,
        shared_bytes,
        (source, target, rows, columns),
    )
