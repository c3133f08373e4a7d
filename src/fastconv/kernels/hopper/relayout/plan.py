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
    RESERVED_SHARED_BYTES,
    Argument,
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    Region,
    TensorMap,
)
from fastconv.kernels.hopper import block
from fastconv.kernels.planning.copies import IMAGE_LAUNCH_CYCLES, LAUNCH_CYCLES, SM_BYTES
from fastconv.kernels.planning.layers import Layer
from fastconv.kernels.planning.slabs import Part, Slab, copies_bytes, slabs_of
from fastconv.problem import Problem

SOURCE = "hopper/relayout/kernel.cuh"
THREADS = 256
WARP = 32
TILE = 64  # kTile in kernel.cuh
MOST_BLOCKS = 2**31 - 1
PAIR_REGISTERS = 32  # of a thread that copies a slab's pair of tensors


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


def pair_cycles(problem: Problem, operands: Operands, gpu: Gpu) -> float:
    """Estimated cycles of one launch that copies both tensors."""
    return 2 * _bytes(problem, operands) / SM_BYTES / gpu.sm_count + LAUNCH_CYCLES


def room_for(blocks: int, gpu: Gpu) -> Gpu:
    """The GPU as kernels see it that leave shared memory for so many of the pair's blocks on an SM.

    Kernels have a block of an SM themselves.
    """
    each = TILE * 2 * (TILE + 2) + RESERVED_SHARED_BYTES
    left = gpu.shared_bytes_per_sm - RESERVED_SHARED_BYTES - blocks * each
    return replace(gpu, shared_bytes_per_block=min(gpu.shared_bytes_per_block, left))


def registers_beside(threads: int, blocks: int) -> int:
    """The most registers of a block's threads that leave an SM room for so many blocks of a pair.

    Each quarter of an SM has a quarter of the registers and of a block's warps.
    """
    warps = ceil_div(threads, WARP)
    left = block.REGISTERS // 4 // WARP - blocks * THREADS // WARP // 4 * PAIR_REGISTERS
    return left // ceil_div(warps, 4) // 8 * 8


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


def weight_gradient_of_slabs(
    plans: list[Plan],
    bias: tuple[Launch, ...],
    bias_bytes: int,
    problem: Problem,
    parts: list[Part],
    operands: Operands,
) -> Plan:
    """The plan of a volumes' weight gradient in slabs.

    ``plans`` are those of the slabs with :func:`channels_last` operands: launches that multiply,
    and that reduce. ``bias`` are the launches for the bias's gradient.
    """
    names = {"grad_output": "grad_output_copy", "input": "input_copy"}
    found = list(bias)
    for number, (plan, part) in enumerate(zip(plans, parts, strict=True)):
        found.append(_copy_of_pair(problem, parts, number, operands))
        multiply = _renamed(plan.launches[0], names)
        if part.image:
            multiply = _of_images(multiply, part.image + part.problem.batch)
        found.append(replace(multiply, arguments=(*multiply.arguments[:-2], number, part.image)))
    first, (read, written) = plans[0], copies_bytes(parts, operands)
    whole = replace(first, scratch_bytes=max(first.scratch_bytes, bias_bytes))
    joined = _joined([], whole, [], names, [written, read])
    why = f"{joined.why} in {len(parts)} slabs"
    return replace(joined, launches=(*found, *first.launches[1:]), why=why)


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


def _of_images(launch: Launch, images: int) -> Launch:
    """The launch with tensor maps of so many images."""

    def widened(argument: Argument) -> Argument:
        if isinstance(argument, TensorMap):
            return replace(argument, sizes=(*argument.sizes[:-1], images))
        return argument

    return replace(launch, arguments=tuple(map(widened, launch.arguments)))


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
    constants = _constants(rows, columns, operands)
    return Launch(
        Kernel(SOURCE, "transpose", constants),
        (blocks, 1, 1),
        THREADS,
        _shared_bytes(operands),
        (source, target, rows, columns),
    )


def _constants(rows: int, columns: int, operands: Operands) -> tuple[tuple[str, Constant], ...]:
    """The constants of a kernel, by the distances of rows that it reads and that it writes."""
    return (
        ("Scalar", operands.scalar),
        ("threads", THREADS),
        ("shared_bytes", _shared_bytes(operands)),
        *zip(("vector_loads", "vector_stores"), _vectors(rows, columns, operands), strict=True),
    )


def _vectors(rows: int, columns: int, operands: Operands) -> tuple[bool, bool]:
    """Whether a matrix is loaded, and its transpose stored, in vectors."""
    return columns % operands.vector == 0, rows % operands.vector == 0


def _shared_bytes(operands: Operands) -> int:
    return TILE * operands.scalar_bytes * (TILE + 2)


def copies_of_slabs(layer: Layer) -> tuple[Launch, ...]:
    """The launches that copy a layer's contiguous input, one for each slab."""
    channels, operands = layer.groups * layer.in_channels, layer.operands
    if layer.slabs is None:
        images, pixels = layer.batch // layer.planes, prod(layer.volume_sizes[0])
        return (_transpose("input", "input_copy", images, channels, pixels, operands),)
    depth = 1 if layer.depth is None else layer.depth.in_size
    shape = (layer.slabs.batch, channels, depth, layer.slabs.in_rows, layer.in_size[1])
    return tuple(
        _slab_copy("input", "input_copy", shape, layer.in_size[0], slab.source, slab, operands)
        for slab in slabs_of(layer)
    )


def _slab_copy(
    source: str,
    target: str,
    shape: tuple[int, ...],
    rows: int,
    first_row: int,
    slab: Slab,
    operands: Operands,
) -> Launch:
    """The launch that copies a slab's rows of a tensor of this shape, from ``first_row`` on."""
    blocks, numbers = _slab_numbers(shape, rows, first_row, slab, operands)
    channels, _, plane, *_ = numbers
    return Launch(
        Kernel(SOURCE, "transpose_slab", _constants(channels, plane, operands)),
        (blocks, 1, 1),
        THREADS,
        _shared_bytes(operands),
        (source, target, *numbers, slab.first_volume),
    )


def _slab_numbers(
    shape: tuple[int, ...], rows: int, first_row: int, slab: Slab, operands: Operands
) -> tuple[int, tuple[int, ...]]:
    """Blocks that copy a slab's rows of a tensor of this shape, and the numbers they are told.

    These are the tensor's channels, planes and pixels of a plane, the first pixel that is copied,
    and how many are.
    """
    _, channels, planes, height, width = shape
    plane, begin, count = height * width, first_row * width, rows * width
    vector = operands.vector if plane % operands.vector == 0 else 1
    across = ceil_div(begin % vector + count, TILE)
    blocks = slab.volumes * planes * across * ceil_div(channels, TILE)
    if max(blocks, channels * plane, abs(begin) + count) > MOST_BLOCKS:
        raise Declined(f"channels-last copies of {slab.volumes} volumes of {shape[1:]}")
    return blocks, (channels, planes, plane, begin, count)


def _copy_of_pair(problem: Problem, parts: list[Part], number: int, operands: Operands) -> Launch:
    """The launch that copies both tensors of a weight gradient's number-th slab."""
    part = parts[number]
    grad, read = part.problem.output_shape, part.problem.input_shape
    grad_blocks, of_grad = _slab_numbers(
        problem.output_shape, grad[-2], part.place.row, part.place, operands
    )
    blocks, of_input = _slab_numbers(
        problem.input_shape, read[-2], part.place.source, part.place, operands
    )
    if grad_blocks + blocks > MOST_BLOCKS:
        raise Declined(f"channels-last copies of {part.place.volumes} volumes")
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "threads": THREADS,
        "shared_bytes": _shared_bytes(operands),
        "blocks": block.REGISTERS // THREADS // PAIR_REGISTERS,
        "beside": any(one.image for one in parts),
    }
    for prefix, (channels, _, plane, *_) in (("", of_grad), ("input_", of_input)):
        loads, stores = _vectors(channels, plane, operands)
        constants |= {f"{prefix}vector_loads": loads, f"{prefix}vector_stores": stores}
    numbers = (*of_grad, *of_input, part.place.first_volume, part.image, grad_blocks)
    return Launch(
        Kernel(SOURCE, "transpose_pair", tuple(constants.items())),
        (grad_blocks + blocks, 1, 1),
        THREADS,
        _shared_bytes(operands),
        ("grad_output", "grad_output_copy", "input", "input_copy", *numbers),
        early=number > 0,
    )
