"""Plans weight gradients with ``direct/wgrad/kernel.cuh``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

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
    blocks_at_once,
    depth_constants,
    weight_grad_constants,
)
from fastconv.kernels.planning.depth import of_planes
from fastconv.problem import Problem

PIXELS = 4  # neighbours in a row that a thread takes at a time
# A thread's accumulators, and accumulators and input pixels together. More would use registers that
# two blocks of 256 threads on an SM do not leave.
MOST_ACCUMULATORS = 72
MOST_VALUES = 108
MOST_WARPS = 8
LEAST_WARPS = 4
# The widest stage that fits is taken. With 4 elements of padding, multiples of 32 make rows that
# start in different banks.
STAGE_COLUMNS = (96, 64, 32, 16, 8)
FLUSH_PIXELS = 512  # accumulators are added to the workspace after about so many pixels
WORKSPACE_BYTES = 64 << 20
MOST_WORKSPACE_BYTES = 4 << 30  # for weights that would otherwise take too many rounds of launches
REDUCE_THREADS = 256
MOST_REDUCE_BLOCKS = 4096


@dataclass(frozen=True)
class Tile:
    """What one block computes, and how its threads divide it among themselves."""

    problem: Problem
    operands: Operands
    channels_per_thread: int
    inputs_per_thread: int
    lanes_m: int
    lanes_n: int
    warps_m: int
    warps_n: int
    warps_k: int
    part_taps: int
    block_taps: int
    stage_rows: int
    stage_columns: int
    vector_input: int
    vector_grad: int
    tight: bool

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that share an SM: 512 threads have 128 registers each, 256 have 255."""
        return (256 if self.operands.scalar_bytes == 8 else 512) // self.threads

    @property
    def channels(self) -> int:
        return self.channels_per_thread * self.lanes_m * self.warps_m

    @property
    def inputs(self) -> int:
        return self.inputs_per_thread * self.lanes_n * self.warps_n

    @property
    def accumulators(self) -> int:
        return self.channels_per_thread * self.inputs_per_thread * self.part_taps * self.block_taps

    @property
    def slots(self) -> int:
        """Values that a thread keeps in the workspace: accumulators of the weight and the bias."""
        return self.accumulators + self.channels_per_thread * self.operands.bias_grad

    @property
    def window(self) -> int:
        shift = -self.problem.padding.left % self.vector_input
        return _window(self.problem, self.part_taps, shift)

    @property
    def input_columns(self) -> int:
        stride = 1 if self.part_taps == 1 else self.problem.stride[1]
        columns = (self.stage_columns - PIXELS) * stride + self.window
        return round_up(columns, max(self.vector_input, 4))

    @property
    def input_pitch_padding(self) -> int:
        scalar_bytes = self.operands.scalar_bytes
        rows = self.stage_rows * self.block_taps
        return pitch_padding(self.input_columns, rows, scalar_bytes, self.vector_input, self.tight)

    @property
    def grad_pitch_padding(self) -> int:
        scalar_bytes = self.operands.scalar_bytes
        return pitch_padding(
            self.stage_columns, self.stage_rows, scalar_bytes, self.vector_grad, self.tight
        )

    @property
    def shared_bytes(self) -> int:
        grad = self.channels * self.stage_rows * (self.stage_columns + self.grad_pitch_padding)
        input_rows = self.inputs * self.stage_rows * self.block_taps
        input_ = input_rows * (self.input_columns + self.input_pitch_padding)
        return STAGES * sum(
            round_up(elements * self.operands.scalar_bytes, 16) for elements in (grad, input_)
        )

    @property
    def count(self) -> int:
        """Tiles that cover the whole weight."""
        problem = self.problem
        return (
            problem.groups
            * ceil_div(problem.out_channels // problem.groups, self.channels)
            * ceil_div(problem.in_channels // problem.groups, self.inputs)
            * ceil_div(problem.kernel_size[0], self.block_taps)
            * ceil_div(problem.kernel_size[1], self.part_taps)
        )

    @property
    def units(self) -> int:
        """Stages that cover the pixels of all images."""
        height, width = self.problem.output_size
        rows, columns = ceil_div(height, self.stage_rows), ceil_div(width, self.stage_columns)
        return self.problem.batch * rows * columns


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output`` (the gradient).

    ``operands.input_channels_last`` is the input's format, ``output_channels_last`` that of the
    output's gradient, ``weight_strides`` the result's. With ``operands.bias_grad``, tensor
    ``bias_grad`` is filled in the same pass.
    """
    problem = limits.checked(problem)
    tile = _choose_tile(of_planes(problem), operands, gpu)
    limits.require("tiles of a weight", tile.count)
    constants: dict[str, Constant] = {
        **weight_grad_constants(problem, operands),
        **depth_constants(problem, operands),
        "wide_units": tile.units >= 2**31,
        "channels_per_thread": tile.channels_per_thread,
        "inputs_per_thread": tile.inputs_per_thread,
        "lanes_m": tile.lanes_m,
        "lanes_n": tile.lanes_n,
        "warps_m": tile.warps_m,
        "warps_n": tile.warps_n,
        "warps_k": tile.warps_k,
        "part_taps": tile.part_taps,
        "block_taps": tile.block_taps,
        "stage_rows": tile.stage_rows,
        "stage_columns": tile.stage_columns,
        "vector_input": tile.vector_input,
        "vector_grad": tile.vector_grad,
        "input_pitch_padding": tile.input_pitch_padding,
        "grad_pitch_padding": tile.grad_pitch_padding,
        "flush_units": max(1, FLUSH_PIXELS // (tile.stage_rows * tile.stage_columns)),
        "shared_bytes": tile.shared_bytes,
        "blocks_per_sm": tile.blocks_per_sm,
    }
    block_bytes = tile.slots * tile.threads * operands.sum_bytes
    most_blocks = blocks_at_once(tile.count, block_bytes, WORKSPACE_BYTES, MOST_WORKSPACE_BYTES)
    tiles_at_once = min(tile.count, most_blocks)
    splits = min(
        max(gpu.sm_count * tile.blocks_per_sm // tiles_at_once, 1),
        most_blocks // tiles_at_once,
        max(tile.units, 1),
    )
    launches: list[Launch] = []
    for first in range(0, tile.count, tiles_at_once):
        tiles = min(tiles_at_once, tile.count - first)
        launches.append(
            Launch(
                _kernel("weight_grad", constants),
                (tiles * splits, 1, 1),
                tile.threads,
                tile.shared_bytes,
                ("grad_output", "input", "scratch", first, tiles, splits, problem.batch),
            )
        )
        owned = tiles * tile.accumulators * tile.threads
        launches.append(
            Launch(
                _kernel("reduce", constants),
                (min(ceil_div(owned, REDUCE_THREADS), MOST_REDUCE_BLOCKS), 1, 1),
                REDUCE_THREADS,
                0,
                ("scratch", "output", "bias_grad", first, tiles, splits),
            )
        )
    return Plan(tuple(launches), tiles_at_once * splits * block_bytes, FAMILY, WHY)


def _kernel(entry: str, constants: dict[str, Constant]) -> Kernel:
    return Kernel("direct/wgrad/kernel.cuh", entry, tuple(constants.items()))


def _choose_tile(problem: Problem, operands: Operands, gpu: Gpu) -> Tile:
    """The first tile that fits shared memory, with as much of a kernel row as possible.

    A stage's rows and columns shrink first; then its rows are padded less, which costs bank
    conflicts; then the block takes one kernel row instead of all.
    """
    height = problem.kernel_size[0]
    for part_taps in part_sizes(problem.kernel_size[1], problem.dilation[1], operands.vector):
        for tap_rows, tight in product(dict.fromkeys((height, 1)), (False, True)):
            tile = _tile(problem, operands, part_taps, tap_rows, tight)
            if tile.window > MOST_WINDOW:
                break
            for smaller in _stages(tile):
                if smaller.shared_bytes <= gpu.shared_budget(smaller.blocks_per_sm):
                    return smaller
    raise AssertionError("a single tap has no halo and fits every GPU")


def _stages(tile: Tile) -> Iterator[Tile]:
    """The tile with ever smaller stages: rows first, then columns, then a thread's inputs."""
    rows = tile.stage_rows
    while rows > 1:
        yield replace(tile, stage_rows=rows)
        rows //= 2
    tile = replace(tile, stage_rows=1)
    yield tile
    for columns in STAGE_COLUMNS:
        if columns < tile.stage_columns:
            tile = replace(tile, stage_columns=columns)
            yield tile
    while tile.inputs_per_thread > 1:
        tile = replace(tile, inputs_per_thread=tile.inputs_per_thread // 2)
        yield tile


def _tile(
    problem: Problem, operands: Operands, part_taps: int, most_tap_rows: int, tight: bool
) -> Tile:
    """A tile with the largest register tile; lanes and warps go to channels, the rest to pixels."""
    group_in = problem.in_channels // problem.groups
    group_out = problem.out_channels // problem.groups
    most_accumulators = MOST_ACCUMULATORS if operands.scalar_bytes < 8 else MOST_ACCUMULATORS // 2
    channels_per_thread = power_of_two_for(group_out, 8)
    while channels_per_thread * part_taps > most_accumulators:
        channels_per_thread //= 2
    # A block that takes all the kernel's rows loads the output's gradient just once.
    block_taps = most_tap_rows
    window = _window(problem, part_taps, operands.vector - 1)
    if (
        block_taps * (channels_per_thread * part_taps + window)
        > MOST_VALUES * most_accumulators // MOST_ACCUMULATORS
    ):
        block_taps = 1
    accumulators_per_input = channels_per_thread * part_taps * block_taps
    inputs_per_thread = max(
        range(1, max(1, min(8, most_accumulators // accumulators_per_input)) + 1),
        key=lambda inputs: (filled(group_in, inputs * _lanes_n(group_in, inputs)), inputs),
    )
    lanes_m = power_of_two_for(ceil_div(group_out, channels_per_thread), 4)
    lanes_n = _lanes_n(group_in, inputs_per_thread)
    warps_m = power_of_two_for(ceil_div(group_out, channels_per_thread * lanes_m), 4)
    warps_n = power_of_two_for(
        ceil_div(group_in, inputs_per_thread * lanes_n), MOST_WARPS // warps_m
    )
    warps_k = max(LEAST_WARPS // (warps_m * warps_n), 1)
    height, width = problem.output_size
    quantum = max(operands.vector, PIXELS)
    stage_columns = min(round_up(width, quantum), STAGE_COLUMNS[0])
    stage_rows = max(1, min(height, STAGE_COLUMNS[0] // stage_columns))
    stride, dilation = problem.stride[1], problem.dilation[1]
    vector_input, vector_grad = 1, 1
    if not operands.input_channels_last and (stride == 1 or part_taps > 1):
        part_step = 0 if part_taps >= problem.kernel_size[1] else part_taps * dilation
        vector_input = operands.widest_vector(problem.input_size[1], part_step)
    if not operands.output_channels_last:
        vector_grad = operands.widest_vector(width)
    return Tile(
        problem, operands, channels_per_thread, inputs_per_thread, lanes_m, lanes_n, warps_m,
        warps_n, warps_k, part_taps, block_taps, stage_rows, stage_columns,
        vector_input, vector_grad, tight,
    )  # fmt: skip


def _window(problem: Problem, part_taps: int, shift: int) -> int:
    """Input pixels of one row that a thread reads for its four output pixels, in whole vectors."""
    stride = 1 if part_taps == 1 else problem.stride[1]
    return round_up(shift + (PIXELS - 1) * stride + (part_taps - 1) * problem.dilation[1] + 1, 4)


def _lanes_n(group_in: int, inputs_per_thread: int) -> int:
    return power_of_two_for(ceil_div(group_in, inputs_per_thread), 8)
