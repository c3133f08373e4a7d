"""Plans weight gradients with the wgrad_halo kernel.

Of all ways to cut the weights into MMAs that fit registers and shared memory, the planner takes the
one with the least estimated time: that of its slowest part, the MMAs or the loads of either tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import product

from fastconv.kernels.arithmetic import ceil_div, shares
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Launch,
    Operands,
    Plan,
    TensorMap,
    depth_constants,
    weight_grad_constants,
)
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.block import CONSUMERS, OUTPUTS, THREADS
from fastconv.kernels.hopper.wgrad_halo.layer import (
    BODY_COLUMNS,
    LANES,
    Layer,
    in_plane_classes,
    takes_scaled_fp16,
)
from fastconv.kernels.hopper.wgrad_halo.tiles import (
    BLOCK_CYCLES,
    LINE_BYTES,
    OCTET,
    Tile,
    with_steps,
    with_strips,
)
from fastconv.kernels.planning.launches import (
    MOST_PACK_BLOCKS,
    SCALE_THREADS,
    reduction_bytes,
    weight_grad_launches,
)
from fastconv.kernels.planning.limits import FLUSH_ADDITIONS, FLUSH_MMAS
from fastconv.problem import Problem

__all__ = [
    "BLOCK_CYCLES",
    "FEW",
    "Layer",
    "Tile",
    "choose_tile",
    "in_plane_classes",
    "plan",
    "takes_scaled_fp16",
]

MOST_MMA_COLUMNS = 256  # wgmma's largest N
# Bounds the N of a warpgroup's segments together, by parts, so that a thread's accumulators (and
# with 3xTF32 their totals) fit registers.
MOST_WARPGROUP_COLUMNS = {1: 360, 2: 184}
MOST_SEGMENTS = 9  # MMAs of one iteration of a rolled loop
MOST_WALKS = 2**30  # the kernel counts the walks of a launch in 32 bits
FP16_LOSS = 1.05  # scaled fp16 must save this factor, since it may have something to repair
FEW = "so few channels or pixels that most of the MMAs would be padding"


def plan(tile: Tile, gpu: Gpu) -> Plan:
    """The launches that compute the gradient with a tile."""
    if not tile.layer.scaled_fp16:
        return Plan(*_launches(tile, gpu), "hopper", _why(tile))
    launches, scratch = _launches(tile, gpu)
    operands = replace(tile.layer.operands, bias_grad=False)
    problem = tile.layer.volumes or tile.layer.problem
    again = choose_tile(problem, operands, gpu, scaled_fp16=False)
    repairs, more = _launches(again, gpu, repairs=True)
    scale = Launch(
        replace(launches[0].kernel, entry="scale"),
        (min(tile.layer.channels, MOST_PACK_BLOCKS), 1, 1),
        SCALE_THREADS,
        reduction_bytes(SCALE_THREADS),
        ("grad_output", "input", "scratch", tile.layer.problem.batch),
    )
    return Plan(
        (scale, *launches, *repairs),
        max(scratch, more),
        "hopper",
        _why(tile),
        (f"outside of float16's range, in TF32: {_why(again)}",),
    )


def _launches(tile: Tile, gpu: Gpu, repairs: bool = False) -> tuple[tuple[Launch, ...], int]:
    """The launches that compute a tile's weights, and the bytes of workspace that they need."""
    tiles_at_once = min(tile.count, tile.most_blocks)
    workers = tile.workers(gpu)
    tables = tile.layer.tables_bytes if tile.layer.scaled_fp16 or repairs else 0
    launches = weight_grad_launches(
        "hopper/wgrad_halo/kernel.cuh",
        tuple(_constants(tile, tables // 16, repairs).items()),
        tile.count,
        tiles_at_once,
        workers,
        THREADS,
        tile.shared_bytes,
        tile.slot_bytes // 16,
        tile.layer.problem.batch,
        _grad_map(tile) if tile.grad_boxes else "grad_output",
    )
    return launches, tables + tiles_at_once * workers * tile.block_bytes


def _grad_map(tile: Tile) -> TensorMap:
    """The tensor map whose box is a stage: an output row's columns, of all channels and members.

    Rows in shared memory have the order of ``stage_row`` in ``tile.cuh``. Where image rows are not
    multiples of 16 bytes, a row of the map is a whole plane, or as many planes as are such a
    multiple.
    """
    problem, bytes_ = tile.layer.problem, tile.layer.operands.scalar_bytes
    height, width = problem.output_size
    classes, lane_members = tile.layer.plane_classes, tile.layer.lane_members
    planes = classes * height * width * bytes_
    image = problem.out_channels // classes * planes
    sizes: tuple[int, ...] = (problem.batch // lane_members, image // planes, lane_members)
    strides: tuple[int, ...] = (lane_members * image, planes, image)
    box: tuple[int, ...] = (LANES, tile.channel_groups * OUTPUTS, lane_members)
    if tile.layer.lead:
        sizes = (classes * height * width, *sizes)
    else:
        sizes, strides, box = (width, *sizes, height), (*strides, width * bytes_), (*box, 1)
    return TensorMap(
        "grad_output",
        tile.layer.operands.scalar,
        sizes,
        strides,
        (tile.stage_columns, *box),
        swizzle=tile.stage_columns * bytes_,
        promotion=LINE_BYTES,
    )


def choose_tile(
    problem: Problem,
    operands: Operands,
    gpu: Gpu,
    most_cycles: float = math.inf,
    scaled_fp16: bool | None = None,
    accept: Callable[[Tile], bool] | None = None,
) -> Tile:
    """The tile with the least estimated time, at most ``most_cycles``.

    ``scaled_fp16`` says whether float32 is multiplied as scaled fp16; None means where that is
    clearly faster. Only tiles that ``accept`` is true for are considered.

    Raises:
        Declined: there is none.
    """
    if problem.depth is not None and (
        operands.input_channels_last or operands.output_channels_last
    ):
        raise Declined("weight gradients of channels-last volumes")
    best: Tile | None = None
    least = most_cycles
    # The best lower bounds come first, so most candidates are never examined.
    for bound, cut in _by_bounds(problem, operands, gpu, scaled_fp16):
        if bound > least:
            break
        for candidate in with_strips(cut):
            if accept is not None and not accept(candidate):
                continue
            fitted = candidate.fitted(gpu.shared_bytes_per_block)
            if fitted is None or not fitted.fits_workspace:
                continue
            for tile in with_steps(fitted, gpu):
                cycles = tile.cycles(gpu) * _loss(tile, scaled_fp16)
                if cycles < least or (cycles == least and best is None):
                    best, least = tile, cycles
    if best is None:
        fits = least < math.inf
        raise Declined(FEW if fits else "input rows that do not fit shared memory")
    if best.walks >= MOST_WALKS:
        raise Declined(f"{best.walks} strips of columns of all images, 2^30 and more")
    if best.all_steps * max(best.weights) * best.workers(gpu) >= 2**62:
        raise Declined("more work than can be shared by 64-bit numbers")
    return best


def _by_bounds(
    problem: Problem, operands: Operands, gpu: Gpu, scaled_fp16: bool | None
) -> Iterator[tuple[float, Tile]]:
    """All ways to cut the weights into MMAs, with lower bounds of their cycles, the least first.

    Those that differ only in their segments are a group, most of which are never examined one by
    one.
    """
    queue: list[tuple[float, int, int, Tile, float]] = []
    for layer in _layers(problem, operands, scaled_fp16):
        grad_cycles: dict[tuple[int, int], float] = {}  # by the two sizes that decide it
        for group in _groups(layer, gpu):
            key = (group.channel_groups, group.interleaved_images)
            if key not in grad_cycles:
                grad_cycles[key] = replace(group, segments=1).least_grad_cycles
            grad = grad_cycles[key]
            if grad < math.inf:  # otherwise rows are so short that there is no stage
                bound = group.least_group_cycles(gpu, grad) * _loss(group, scaled_fp16)
                queue.append((bound, len(queue), 0, group, grad))
    heapify(queue)
    while queue:
        bound, place, segments, cut, grad = heappop(queue)
        if segments > 0:
            yield bound, cut
            continue
        for segments in range(1, cut.segments + 1):
            one = replace(cut, segments=segments)
            bound = one.least_cycles(gpu, grad) * _loss(one, scaled_fp16)
            heappush(queue, (bound, place, segments, one, grad))


def _layers(problem: Problem, operands: Operands, scaled_fp16: bool | None) -> Iterator[Layer]:
    """The layers that the problem can be computed as."""
    for one in (False, True) if takes_scaled_fp16(problem, operands) else (False,):
        if scaled_fp16 in (None, one):
            layer = Layer.of(problem, operands, one)
            yield layer
            of_classes = in_plane_classes(layer)
            if of_classes is not None:
                yield of_classes


def _loss(tile: Tile, scaled_fp16: bool | None) -> float:
    """The factor by which a tile must be faster than others to be chosen."""
    return FP16_LOSS if tile.layer.scaled_fp16 and scaled_fp16 is None else 1.0


def _groups(layer: Layer, gpu: Gpu) -> Iterator[Tile]:
    """All ways to cut the weights into MMAs, without strips and stages.

    Each has as many segments as possible; it can also have fewer.
    """
    octets = ceil_div(layer.group_in, OCTET)
    most_columns = MOST_WARPGROUP_COLUMNS[layer.parts]
    all_groups = (1, 2) if layer.class_out > OUTPUTS else (1,)
    all_images = (1, layer.interleave)[layer.plane_classes > 1 : min(layer.problem.batch, 2)]
    for taps, rows in _taps(layer, gpu):
        # Taps that are further apart than octets of channels allow only one octet in a wgmma.
        joined = taps == 1 or layer.problem.dilation[1] == 1
        for mma_octets in shares(octets) if joined else (1,):
            columns = taps * mma_octets * OCTET
            if columns > min(MOST_MMA_COLUMNS, most_columns):
                break
            planes = ceil_div(octets, mma_octets)
            for channel_groups, images in product(all_groups, all_images):
                needed = ceil_div(planes * rows * channel_groups, CONSUMERS)
                most = min(most_columns // columns, MOST_SEGMENTS, needed)
                yield Tile(layer, channel_groups, rows, taps, mma_octets, most, images)


def _taps(layer: Layer, gpu: Gpu) -> Iterator[tuple[int, int]]:
    """Taps of a wgmma and kernel rows of a tile whose input may fit shared memory."""
    problem, advance = layer.problem, layer.row_advance
    height, width = problem.kernel_size
    for taps in shares(width):
        reach = (BODY_COLUMNS - 1) * problem.stride[1] + (taps - 1) * problem.dilation[1] + 1
        row_bytes = layer.parts * OCTET * reach * 16
        for rows in shares(height):
            if (rows + min(advance, rows)) * row_bytes > gpu.shared_bytes_per_block:
                break
            yield taps, rows


def _constants(tile: Tile, slots_at: int, repairs: bool) -> dict[str, Constant]:
    problem, operands = tile.layer.problem, tile.layer.operands
    volumes = tile.layer.volumes
    split = tile.layer.parts == 2
    accumulators = tile.segments * tile.columns // 2
    producer = 72 if split else 56 if accumulators > 148 else 88
    bodies = tile.strip_columns // BODY_COLUMNS
    mmas = tile.strip_columns // 2
    return {
        **weight_grad_constants(problem, operands),
        **({} if volumes is None else depth_constants(volumes, operands)),
        "parts": tile.layer.parts,
        "scaled_fp16": tile.layer.scaled_fp16,
        "repairs": repairs,
        "ties_to_even": tile.layer.scaled_fp16 or repairs,
        "slots_at": slots_at,
        "vector_input": tile.vector_input,
        "grad_vector": tile.layer.grad_vector,
        "grad_bulk": tile.grad_bulk,
        "grad_boxes": tile.grad_boxes,
        "plane_classes": tile.layer.plane_classes,
        "lead": tile.layer.lead,
        "channel_groups": tile.channel_groups,
        "kernel_rows": tile.kernel_rows,
        "mma_taps": tile.mma_taps,
        "mma_octets": tile.mma_octets,
        "segments": tile.segments,
        "interleaved_images": tile.interleaved_images,
        "interleaved_strips": tile.interleaved_strips,
        "steps": tile.steps,
        "stage_columns": tile.stage_columns,
        "strip_stages": tile.strip_stages,
        "strip_weight": tile.weights[0],
        "last_strip_weight": tile.weights[1],
        "input_stages": tile.input_stages,
        "grad_stages": tile.grad_stages,
        "flush_steps": max(1, FLUSH_ADDITIONS // bodies if split else FLUSH_MMAS // mmas),
        "batch": 2 if producer == 88 and not tile.layer.scaled_fp16 else 1,
        "producer_registers": producer,
        "consumer_registers": block.consumer_registers(producer),
        "shared_bytes": tile.shared_bytes,
    }


def _why(tile: Tile) -> str:
    scaled = " in scaled fp16" if tile.layer.scaled_fp16 else ""
    return (
        f"tensor cores{scaled}: {tile.segments} MMAs of {tile.columns} columns a warpgroup, "
        f"{tile.mma_taps} taps of {tile.mma_octets * OCTET} channels each"
    )
