"""Plans forward convolutions and input gradients with ``direct/forward/kernel.cuh``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.direct import limits
from fastconv.kernels.direct.tiling import (
    FAMILY,
    MOST_WINDOW,
    STAGES,
    WHY,
    filled,
    part_sizes,
    pitch_padding,
    power_of_two_for,
)
from fastconv.kernels.family import (
    Constant,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    depth_constants,
    epilogue_constants,
    problem_constants,
)
from fastconv.kernels.planning.axes import PassAxis
from fastconv.problem import Problem

PIXELS = 4  # neighbours in a row that a thread computes
WARPS = 8  # warps of a block
UNROLLED_TAPS = 48  # stages of more taps loop over kernel rows instead of unrolling them
FLUSH_PRODUCTS = 60  # least products of an accumulator between two flushes, to be worth their time
MOST_PRODUCTS = 512  # a channel of more products in a stage is flushed within it, by kernel rows
HELPER_THREADS = 256  # threads of a block of the small kernels that pack and clear
MOST_HELPER_BLOCKS = 4096
# A stage should hold this many products of each accumulator, to be worth its two barriers.
STAGE_PRODUCTS = 160
MOST_STAGE_CHANNELS = 16


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``."""
    return _plan(problem, operands, gpu, transposed=False)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: tensor ``input`` is the output's gradient, ``output`` the result."""
    return _plan(problem, operands, gpu, transposed=True)


@dataclass(frozen=True)
class Axis(PassAxis):
    """One axis of the cross-correlation; mirrors ``Axis`` in ``kernel.cuh``."""

    @property
    def tap_step(self) -> int:
        return self.dilation // (math.gcd(self.stride, self.dilation) if self.transposed else 1)

    @property
    def kernel_step(self) -> int:
        """Distance, in kernel indices, between neighbouring taps of a residue."""
        return self.stride // math.gcd(self.stride, self.dilation) if self.transposed else 1

    @property
    def taps(self) -> int:
        return ceil_div(self.kernel, self.kernel_step)

    @property
    def residues(self) -> int:
        """Residues of the stride that some tap reaches."""
        return min(self.kernel, self.kernel_step)

    @property
    def origin(self) -> int:
        """Input position of the first output's first tap, in the first residue."""
        if not self.transposed:
            return -self.padding
        return ceil_div(self.padding, self.stride) - (self.taps - 1) * self.tap_step

    @property
    def reaches_all(self) -> bool:
        """Whether every output has a tap."""
        outputs = min(self.out_size, self.over)
        if self.residues == self.over:
            return True
        firsts = (tap * self.dilation - self.padding for tap in range(self.residues))
        return sum(first % self.stride < outputs for first in firsts) == outputs

    def stride_in_tile(self, taps: int) -> int:
        """Distance between neighbouring outputs' first taps in a tile that serves ``taps`` taps."""
        return 1 if taps == 1 else self.times

    def halo(self, outputs: int, taps: int) -> int:
        """Input positions that a tile of ``outputs`` outputs and ``taps`` taps holds."""
        return (outputs - 1) * self.stride_in_tile(taps) + (taps - 1) * self.tap_step + 1


@dataclass(frozen=True)
class Tile:
    """What one block computes, and how its threads divide it among themselves."""

    depth: Axis
    rows: Axis
    columns: Axis
    operands: Operands
    channels_per_thread: int
    lanes_y: int
    lanes_x: int
    stage_channels: int
    stage_taps: int
    part_taps: int
    vector: int
    shift: int
    tight: bool

    @property
    def channels(self) -> int:
        return self.channels_per_thread * 32 // (self.lanes_y * self.lanes_x)

    @property
    def width(self) -> int:
        return PIXELS * self.lanes_x

    @property
    def height(self) -> int:
        return self.lanes_y * WARPS

    @property
    def window(self) -> int:
        return self.shift + self.columns.halo(PIXELS, self.part_taps)

    @property
    def halo_rows(self) -> int:
        return self.rows.halo(self.height, self.stage_taps)

    @property
    def halo_columns(self) -> int:
        first_of_last = (self.width - PIXELS) * self.columns.stride_in_tile(self.part_taps)
        return round_up(first_of_last + round_up(self.window, 4), max(self.vector, 4))

    @cached_property
    def pitch_padding(self) -> int:
        if self.lanes_y == 1:
            return 0
        rows_apart = self.rows.stride_in_tile(self.stage_taps)
        scalar_bytes = self.operands.scalar_bytes
        return pitch_padding(self.halo_columns, rows_apart, scalar_bytes, self.vector, self.tight)

    @property
    def shared_bytes(self) -> int:
        pitch = self.halo_columns + self.pitch_padding
        elements = self.stage_channels * self.halo_rows * pitch
        weights = self.stage_channels * self.stage_taps * self.part_taps * self.channels
        input_bytes = round_up(elements * self.operands.scalar_bytes, 16)
        return STAGES * (input_bytes + round_up(weights * self.operands.sum_bytes, 16))

    def packed_elements(self, problem: Problem, in_channels: int, out_channels: int) -> int:
        """Elements of the packed weights, padded to whole tiles and stages."""
        return (
            self.depth.residues
            * self.rows.residues
            * self.columns.residues
            * problem.groups
            * round_up(out_channels, self.channels)
            * round_up(in_channels, self.stage_channels)
            * round_up(self.rows.taps, self.stage_taps)
            * round_up(self.columns.taps, self.part_taps)
        )

    def blocks(self, problem: Problem, out_channels: int) -> int:
        """Blocks that one image takes."""
        return (
            ceil_div(out_channels, self.channels)
            * ceil_div(self.columns.positions, self.width)
            * ceil_div(self.rows.positions, self.height)
            * self.depth.positions
            * problem.groups
            * self.depth.residues
            * self.rows.residues
            * self.columns.residues
        )


def _plan(problem: Problem, operands: Operands, gpu: Gpu, transposed: bool) -> Plan:
    problem = limits.checked(problem)
    group_in = problem.in_channels // problem.groups
    group_out = problem.out_channels // problem.groups
    in_size, out_size = problem.input_size, problem.output_size
    if transposed:
        group_in, group_out, in_size, out_size = group_out, group_in, out_size, in_size
    blocks_per_sm = 1 if operands.scalar_bytes == 8 else 2
    axes = [Axis.of(axis, transposed) for axis in problem.axes]
    depth = axes[0] if len(axes) == 3 else _ONE_PLANE
    reads = group_in * depth.taps  # the planes that an output plane reads are further channels
    *_, rows, columns = axes
    tile = _choose_tile(
        depth, rows, columns, operands, gpu, reads, group_out, in_size, blocks_per_sm
    )
    flushes = _flushes(tile, reads)
    single_stage = (
        tile.stage_channels >= reads
        and tile.stage_taps >= tile.rows.taps
        and tile.part_taps >= tile.columns.taps
    )
    constants: dict[str, Constant] = {
        "Scalar": operands.scalar,
        "transposed": transposed,
        "group_in": group_in,
        "group_out": group_out,
        "groups": problem.groups,
        "in_height": in_size[0],
        "in_width": in_size[1],
        "out_height": out_size[0],
        "out_width": out_size[1],
        **problem_constants(problem, operands),
        **depth_constants(problem, operands, transposed),
        "in_channels_last": operands.input_channels_last,
        "out_channels_last": operands.output_channels_last,
        "channels_per_thread": tile.channels_per_thread,
        "lanes_y": tile.lanes_y,
        "lanes_x": tile.lanes_x,
        "warps": WARPS,
        "stage_channels": tile.stage_channels,
        "stage_taps": tile.stage_taps,
        "part_taps": tile.part_taps,
        "unrolled_taps": UNROLLED_TAPS,
        "vector": tile.vector,
        "pitch_padding": tile.pitch_padding,
        "aligned": operands.aligned,
        "two_level": not single_stage
        or tile.stage_channels > flushes.channels
        or tile.stage_taps > flushes.rows,
        "flush_channels": flushes.channels,
        "flush_stages": flushes.stages,
        "flush_rows": flushes.rows,
        "shared_bytes": tile.shared_bytes,
        "blocks_per_sm": blocks_per_sm,
        **epilogue_constants(operands.epilogue),
    }
    blocks = tile.blocks(problem, group_out)
    limits.require("blocks of one image", blocks)
    # Packing is worth a launch of its own if there are more blocks than run at once.
    constants["packed"] = problem.batch * blocks > gpu.sm_count * blocks_per_sm
    launches: list[Launch] = []
    if not all(axis.reaches_all for axis in axes):
        elements = math.prod(problem.input_shape)
        launches.append(_helper("clear", constants, elements, ("output", problem.batch)))
    packed = 0
    if constants["packed"]:
        packed = tile.packed_elements(problem, reads, group_out)
        launches.append(_helper("pack", constants, packed, ("weight", "scratch")))
    images_at_once = limits.MOST_BLOCKS // blocks
    for first in range(0, problem.batch, images_at_once):
        images = min(images_at_once, problem.batch - first)
        launches.append(
            Launch(
                _kernel("convolve", constants),
                (images * blocks, 1, 1),
                32 * WARPS,
                tile.shared_bytes,
                (
                    *("input", "weight", "scratch", "bias", "output", first, images),
                    *operands.residuals,
                ),
            )
        )
    packs = int(launches[0].kernel.entry == "pack")
    return Plan(tuple(launches), packed * operands.sum_bytes, FAMILY, WHY, packs=packs)


# The depth of an image.
_ONE_PLANE = Axis(transposed=False, kernel=1, stride=1, dilation=1, padding=0, out_size=1)


class Flushes(NamedTuple):
    """How often accumulators are flushed to the second level: every so many of each."""

    channels: int  # input channels of a stage
    stages: int
    rows: int  # kernel rows of a channel


def _flushes(tile: Tile, reads: int) -> Flushes:
    """The flushes that make both levels about equally long, which keeps rounding errors least.

    Each level then adds about as many terms as the square root of all products.
    """
    channel = tile.stage_taps * tile.part_taps
    best = max(math.sqrt(reads * tile.rows.taps * tile.columns.taps), FLUSH_PRODUCTS)
    if channel > MOST_PRODUCTS:
        return Flushes(1, 1, ceil_div(round(best), tile.part_taps))
    if best > tile.stage_channels * channel:
        stages = round(best / (tile.stage_channels * channel))
        return Flushes(tile.stage_channels, stages, tile.stage_taps)
    divisors = (n for n in range(1, tile.stage_channels + 1) if tile.stage_channels % n == 0)
    channels = min(divisors, key=lambda channels: abs(math.log(channels * channel / best)))
    return Flushes(channels, 1, tile.stage_taps)


def _helper(
    entry: str, constants: dict[str, Constant], elements: int, arguments: tuple[str | int, ...]
) -> Launch:
    """Launches a small kernel with a thread for each element, up to a limit; threads loop."""
    blocks = min(ceil_div(elements, HELPER_THREADS), MOST_HELPER_BLOCKS)
    return Launch(_kernel(entry, constants), (blocks, 1, 1), HELPER_THREADS, 0, arguments)


def _kernel(entry: str, constants: dict[str, Constant]) -> Kernel:
    return Kernel("direct/forward/kernel.cuh", entry, tuple(constants.items()))


def _choose_tile(
    depth: Axis,
    rows: Axis,
    columns: Axis,
    operands: Operands,
    gpu: Gpu,
    reads: int,
    group_out: int,
    in_size: tuple[int, int],
    blocks_per_sm: int,
) -> Tile:
    """A tile that wastes little at the image's borders and fits shared memory.

    Output channels go to a thread first (which reads a weight once for its four pixels), then to
    lanes. The rest of the warp, and all warps, go to pixels.
    """
    most = 8 if operands.scalar_bytes < 8 else 4
    channels_per_thread = power_of_two_for(group_out, most)
    lanes_m = power_of_two_for(ceil_div(group_out, channels_per_thread), 4)
    lanes_n = 32 // lanes_m
    lanes_x = max(
        (2**power for power in range(lanes_n.bit_length())),
        key=lambda lanes: (
            filled(columns.positions, PIXELS * lanes)
            * filled(rows.positions, lanes_n // lanes * WARPS),
            lanes,
        ),
    )  # fmt: skip
    budget = gpu.shared_budget(blocks_per_sm)
    for tight, (stage_channels, stage_taps, part_taps) in _stages(
        rows, columns, operands.vector, reads
    ):
        vector = 1
        if not operands.input_channels_last and columns.residues == 1:
            part_step = 0 if part_taps >= columns.taps else part_taps * columns.tap_step
            tile_step = PIXELS * lanes_x * columns.times
            if columns.times == 1 or part_taps > 1:
                vector = operands.widest_vector(in_size[1], part_step, tile_step)
        tile = Tile(
            depth, rows, columns, operands, channels_per_thread, lanes_n // lanes_x, lanes_x,
            stage_channels, stage_taps, part_taps, vector, columns.origin % vector, tight,
        )  # fmt: skip
        if tile.shared_bytes <= budget and tile.window <= MOST_WINDOW:
            return tile
    raise AssertionError("the last stage, one tap, has no halo and fits every GPU")


def _stages(
    rows: Axis, columns: Axis, vector: int, reads: int
) -> Iterator[tuple[bool, tuple[int, int, int]]]:
    """Stages from the best down to a single tap: whether rows are tight, and the stage's sizes.

    The sizes are channels, kernel rows and kernel columns. Tight rows come before parts of kernels:
    bank conflicts cost less than the halo that each part loads for itself.
    """
    first, *smaller = part_sizes(columns.taps, columns.tap_step, vector)
    wanted = ceil_div(STAGE_PRODUCTS, rows.taps * first)
    most = min(wanted, MOST_STAGE_CHANNELS, reads)
    whole = [(channels, rows.taps, first) for channels in range(most, 0, -1)]
    parts = [(1, 1, part) for part in (first, *smaller)]
    yield from product((False, True), whole)
    yield from product((False, True), parts)
