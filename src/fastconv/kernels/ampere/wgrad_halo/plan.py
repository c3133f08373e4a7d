"""Plans weight gradients with ``weight_grad.cuh``.

Of all ways to cut the weights into boxes and the pixels into steps that fit registers and shared
memory, it takes the one that is estimated to be fastest.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from fastconv.kernels import gpus
from fastconv.kernels.ampere import block
from fastconv.kernels.arithmetic import ceil_div, divisors, round_up, shares
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Operands,
    Plan,
    blocks_at_once,
    weight_grad_constants,
)
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.launches import weight_grad_launches
from fastconv.kernels.planning.limits import FLUSH_ADDITIONS, FLUSH_PRODUCTS, WORKSPACE_BYTES
from fastconv.problem import Problem

SOURCE = "ampere/wgrad_halo/kernel.cuh"
WARPS = 8
THREADS = 32 * WARPS
OCTET = 8  # columns of a product; of 16-bit types, these are input channels

MOST_SUMS = {1: 128, 2: 64}  # of a thread, by parts: with their totals, they have to fit registers
MOST_UNITS = 16
MOST_STRIP_COLUMNS = 128
STEP_PIXELS = (32, 64, 128, 256, 512)
GOOD_SLICE_PRODUCTS = 4
MOST_SLICE_PRODUCTS = 8
MOST_TRANSPOSED = 4  # columns that a thread loads at once
# Registers of a thread for what it has loaded and not yet written.
BATCH_REGISTERS = 16
MOST_WORKSPACE_BYTES = 16 << 30
MOST_STEPS = 2**30  # of what a launch computes: 32-bit numbers
# What is looked at: boxes, each with strips of some widths, by waste in such parts of a row.
MOST_BOXES = 12
MOST_STRIPS = 5
WASTE_STEPS = 24

# Estimated cycles of one processor.
PRODUCT = 16 * 8 * 8  # multiply-adds of TF32; 16-bit types' have twice as many, in as many cycles
ISSUE = 4.0  # instructions a cycle
# Of what goes on beside the slowest: as measured on an H200, where tiles that read less from shared
# memory are faster even with more products, and of copies from memory.
OVERLAP_LOSS = 0.35
COPY_LOSS = 0.1
SPLIT_INSTRUCTIONS = 8.0  # of a number of the input, each time
CONVERT_INSTRUCTIONS = {1: 2.0, 2: 7.0}  # of a number, once, by parts
TASK_INSTRUCTIONS = 10.0  # of a copy
CONVERT_TASK_INSTRUCTIONS = 5.0  # of what was copied at once
SHARED_BYTES_PER_CYCLE = 128.0
REGISTER_INSTRUCTIONS = 60.0  # of what is loaded and written
SLICE_INSTRUCTIONS = 20.0
UNIT_INSTRUCTIONS = 5.0  # to find a unit
BYTES_PER_CYCLE = 14.0  # that arrive from memory if all processors load
LATENCY_CYCLES = 900.0  # of memory
STEP_CYCLES = 150.0
BLOCK_CYCLES = 6000.0  # to start and to end
SWAP_BYTES = 10.0  # a cycle: of the workspace, written and read again
FEW = "so few channels or pixels that most of the products would not count"


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output`` (the gradient).

    With ``operands.bias_grad``, tensor ``bias_grad`` is filled in the same pass.
    ``operands.input_channels_last`` is the input's format, ``output_channels_last`` that of the
    output's gradient, ``weight_strides`` the result's.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    channels = (problem.in_channels // problem.groups, problem.out_channels // problem.groups)
    block.check(gpu)
    limits.check(operands, problem.groups, channels, problem.input_size, problem.output_size)
    limits.check_reach(problem, operands)
    most = portable_cycles(problem, gpu) + 2 * BLOCK_CYCLES
    return plan(choose_tile(problem, operands, gpu, most), gpu)


def portable_cycles(problem: Problem, gpu: Gpu) -> float:
    """What the portable kernels take, about."""
    products = block.PORTABLE_SHARE * gpus.rates(gpu).float32
    return limits.portable_loss(problem) * problem.flops / 2 / (products * gpu.processors)


def plan(tile: Tile, gpu: Gpu) -> Plan:
    """The launches that compute the gradient so."""
    tiles_at_once = min(tile.count, tile.most_blocks)
    workers = tile.workers(gpu)
    launches = weight_grad_launches(
        SOURCE,
        tuple(_constants(tile).items()),
        tile.count,
        tiles_at_once,
        workers,
        THREADS,
        tile.shared_bytes,
        tile.slots * THREADS // tile.warps_pixels,
        tile.problem.batch,
    )
    scratch = tiles_at_once * workers * tile.block_bytes
    return Plan(launches, scratch, "ampere", _why(tile))


@dataclass(frozen=True)
class Tile:
    """What a block computes, and how it walks through the images."""

    problem: Problem
    operands: Operands
    # A warp's products, 16 rows each; and how warps share the block's.
    row_tiles: int
    warps_out: int
    warps_units: int
    warps_pixels: int
    # The block's weights.
    box_channels: int
    box_rows: int
    box_columns: int
    # Its pixels.
    strip_columns: int = 0
    step_rows: int = 0
    slice_products: int = 0
    rolling: bool = False

    @lazy
    def parts(self) -> int:
        return limits.parts(self.operands)

    @lazy
    def products(self) -> int:
        return 3 if self.parts == 2 else 1

    @lazy
    def halves(self) -> bool:
        return self.operands.scalar_bytes == 2

    @lazy
    def product_pixels(self) -> int:
        return 16 if self.halves else 8

    @lazy
    def group_in(self) -> int:
        return self.problem.in_channels // self.problem.groups

    @lazy
    def group_out(self) -> int:
        return self.problem.out_channels // self.problem.groups

    # --- Weights ---------------------------------------------------------------------------------

    @lazy
    def block_outputs(self) -> int:
        return 16 * self.row_tiles * self.warps_out

    @lazy
    def box_units(self) -> int:
        return ceil_div(self.box_channels * self.box_rows * self.box_columns, OCTET)

    @lazy
    def units(self) -> int:
        """Of a warp."""
        return ceil_div(self.box_units, self.warps_units)

    @lazy
    def count(self) -> int:
        """Boxes of all the weights."""
        height, width = self.problem.kernel_size
        return (
            self.problem.groups
            * ceil_div(self.group_out, self.block_outputs)
            * ceil_div(self.group_in, self.box_channels)
            * ceil_div(height, self.box_rows)
            * ceil_div(width, self.box_columns)
        )

    @property
    def slots(self) -> int:
        """Of a thread, four sums each."""
        return self.units * self.row_tiles

    @property
    def block_bytes(self) -> int:
        """Of the workspace."""
        return THREADS * (16 * self.slots + 4 * self.operands.bias_grad)

    @lazy
    def most_blocks(self) -> int:
        """Whose sums are in the workspace at once: more of them where weights are that large."""
        return blocks_at_once(self.count, self.block_bytes, WORKSPACE_BYTES, MOST_WORKSPACE_BYTES)

    # --- Pixels ----------------------------------------------------------------------------------

    @lazy
    def walk_rows(self) -> int:
        """Output rows of a walk."""
        return ceil_div(self.problem.output_size[0], limits.row_step(self.problem))

    @property
    def product_columns(self) -> int:
        return 8 if self.row_pairs else self.product_pixels

    @lazy
    def row_pairs(self) -> bool:
        """Whether a product has pixels of two rows."""
        return self.halves and self.strip_columns % 16 == 8

    @lazy
    def step_products(self) -> int:
        """Along the pixels of a step."""
        return self.strip_columns * self.step_rows // self.product_pixels

    @property
    def slices(self) -> int:
        """Of a warp, in a step."""
        return self.step_products // (self.slice_products * self.warps_pixels)

    @lazy
    def steps(self) -> int:
        """Of a walk."""
        return ceil_div(self.walk_rows, self.step_rows)

    @lazy
    def walks(self) -> int:
        strips = ceil_div(self.problem.output_size[1], self.strip_columns)
        return self.problem.batch * limits.row_step(self.problem) * strips

    @property
    def all_steps(self) -> int:
        """What workers share."""
        return self.walks * self.steps

    # --- Shared memory ---------------------------------------------------------------------------

    @lazy
    def line_advance(self) -> int:
        return min(limits.row_advance(self.problem), self.box_rows)

    @lazy
    def window(self) -> int:
        """Lines that a step needs."""
        return (self.step_rows - 1) * self.line_advance + self.box_rows

    @lazy
    def new_lines(self) -> int:
        return self.step_rows * self.line_advance if self.rolling else self.window

    @lazy
    def column_unit(self) -> int:
        stride = self.problem.stride[1]
        return stride if self.box_columns == 1 else math.gcd(stride, self.problem.dilation[1])

    @lazy
    def in_vector(self) -> int:
        """Elements of the input that are copied at once."""
        if self.operands.input_channels_last:
            return self.operands.widest_vector(self.group_in)
        if self.column_unit > 1:
            return 1
        vector = self.operands.widest_vector(self.problem.input_size[1])
        return min(vector, MOST_TRANSPOSED)

    @lazy
    def in_in_registers(self) -> bool:
        return self.halves and (not self.operands.input_channels_last or self.in_vector == 1)

    @lazy
    def grad_vector(self) -> int:
        """The same of the output's gradient."""
        last = self.operands.output_channels_last
        return self.operands.widest_vector(self.group_out if last else self.problem.output_size[1])

    @lazy
    def grad_in_registers(self) -> bool:
        return self.halves and self.grad_vector == 1

    @lazy
    def shift(self) -> int:
        """Columns by which lines begin early, at most."""
        if self.operands.input_channels_last or self.in_vector == 1:
            return 0
        step = self.box_columns * self.problem.dilation[1]
        pieces = range(min(ceil_div(self.problem.kernel_size[1], self.box_columns), self.in_vector))
        return max((i * step - self.problem.padding.left) % self.in_vector for i in pieces)

    @lazy
    def line_columns(self) -> int:
        taps = (self.box_columns - 1) * self.problem.dilation[1]
        reach = (self.strip_columns - 1) * self.problem.stride[1] + taps
        vector = 1 if self.operands.input_channels_last else self.in_vector
        return round_up(self.shift + reach // self.column_unit + 1, vector)

    @lazy
    def in_pitch(self) -> int:
        """Bytes between octets (16-bit types), channels, or columns if these are neighbours."""
        stride = self.problem.stride[1] // self.column_unit
        if self.halves:
            # Copies of a pixel's channels go to different banks.
            return 16 * (self.line_columns | self.operands.input_channels_last)
        if self.operands.input_channels_last:
            least, (along, across) = self.box_channels, (1, stride)
            return 4 * min(_pitches(least), key=lambda n: conflicts(along, across * n))
        return 4 * min(_pitches(self.line_columns), key=lambda n: conflicts(n, stride))

    @lazy
    def line_bytes(self) -> int:
        if not self.halves and self.operands.input_channels_last:
            return self.line_columns * self.in_pitch
        return self.box_channels // (OCTET if self.halves else 1) * self.in_pitch

    @lazy
    def grad_pitch(self) -> int:
        """Bytes between channels, or pixels if channels are neighbours."""
        size = self.operands.scalar_bytes
        if not self.operands.output_channels_last:
            return 16 * (self.strip_columns * self.step_rows * size // 16 | 1)
        if self.halves:
            return 16 * (self.block_outputs * size // 16 | 1)
        return 4 * min(_pitches(self.block_outputs), key=lambda n: conflicts(1, n))

    @property
    def stage_bytes(self) -> int:
        pixels = self.strip_columns * self.step_rows
        last = self.operands.output_channels_last
        return self.parts * self.grad_pitch * (pixels if last else self.block_outputs)

    @lazy
    def shared_bytes(self) -> int:
        lines = round_up((self.window + self.new_lines) * self.line_bytes, 16)
        entries = self.units * self.warps_units * (1 if self.halves else OCTET)
        return lines + 2 * self.stage_bytes + 4 * entries

    # --- Who loads what --------------------------------------------------------------------------

    @lazy
    def grad_sheet(self) -> tuple[int, int]:
        """Of an output row: units that are neighbours in memory, and rows of them."""
        unit = self.operands.vector if self.grad_in_registers else self.grad_vector
        if self.operands.output_channels_last:
            return self.block_outputs // unit, self.strip_columns
        return self.strip_columns // unit, self.block_outputs

    @lazy
    def in_sheet(self) -> tuple[int, int]:
        """The same of a line."""
        channels = self.box_channels
        if self.operands.input_channels_last:
            unit = OCTET if self.in_in_registers else self.in_vector
            return channels // unit, self.line_columns
        unit = OCTET if self.in_in_registers else 1
        return self.line_columns // self.in_vector, channels // unit

    @lazy
    def grad_lanes(self) -> int:
        return min(_LANES, key=lambda lanes: (_tasks(*self.grad_sheet, lanes), -lanes))

    @lazy
    def in_lanes(self) -> int:
        return min(_LANES, key=lambda lanes: (_tasks(*self.in_sheet, lanes), -lanes))

    @lazy
    def grad_tasks(self) -> int:
        """Of a thread, in a step."""
        return self.step_rows * _tasks(*self.grad_sheet, self.grad_lanes)

    @lazy
    def in_tasks(self) -> int:
        return self.new_lines * _tasks(*self.in_sheet, self.in_lanes)

    @property
    def batches(self) -> tuple[int, int]:
        """Tasks that are in registers at once, of the output's gradient and of the input."""
        both = self.grad_in_registers and self.in_in_registers
        registers = BATCH_REGISTERS // (2 if both else 1)
        of_input = OCTET * max(self.in_vector // 2, 1)
        return max(registers // OCTET, 1), max(registers // of_input, 1)

    # --- Estimates -------------------------------------------------------------------------------

    @lazy
    def block_products(self) -> int:
        """Of all warps, for the pixels of one."""
        return self.warps_out * self.warps_units * self.row_tiles * self.units * self.products

    def multiply_cycles(self, gpu: Gpu, along: float) -> float:
        """What so many products along the pixels take the tensor cores."""
        cycles = PRODUCT / gpus.rates(gpu).products["tf32"]
        return along * self.block_products * cycles

    @lazy
    def right_conflicts(self) -> int:
        """How often shared memory is read for what could be read at once."""
        stride = self.problem.stride[1] // self.column_unit
        if self.halves:
            return math.gcd(stride, 8)
        if self.operands.input_channels_last:
            return conflicts(1, stride * self.in_pitch // 4)
        return conflicts(self.in_pitch // 4, stride)

    def shared_cycles(self, along: float) -> float:
        """What its operands take shared memory."""
        reads = 4 * self.parts * self.row_tiles + 2 * self.units * self.right_conflicts
        return along * self.warps_out * self.warps_units * reads

    def issue_cycles(self, along: float) -> float:
        """What it takes to issue the instructions for that."""
        warps = self.warps_out * self.warps_units
        if self.halves:
            loads = self.row_tiles + self.units / 2
        else:
            left = 4 if self.operands.output_channels_last else 1
            loads = left * self.parts * self.row_tiles + 2 * self.units
            loads += 2 * self.units * (SPLIT_INSTRUCTIONS if self.parts == 2 else 0)
        return along * (self.block_products + warps * loads) / ISSUE

    @property
    def load_cycles(self) -> float:
        """What it takes to issue a step's loads."""
        kinds = (
            (self.grad_tasks, self.grad_in_registers),
            (self.in_tasks, self.in_in_registers),
        )
        instructions = sum(
            tasks * (REGISTER_INSTRUCTIONS if registers else TASK_INSTRUCTIONS)
            for tasks, registers in kinds
        )
        return WARPS * instructions / ISSUE

    @property
    def convert_cycles(self) -> float:
        """What it takes to issue the instructions that convert what a step has loaded."""
        if self.halves:
            return 0.0
        tasks, numbers = self.grad_tasks, self.grad_tasks * self.grad_vector
        if self.parts == 1:
            tasks, numbers = tasks + self.in_tasks, numbers + self.in_tasks * self.in_vector
        instructions = numbers * CONVERT_INSTRUCTIONS[self.parts]
        return WARPS * (instructions + tasks * CONVERT_TASK_INSTRUCTIONS) / ISSUE

    @lazy
    def grad_bytes(self) -> int:
        """That a step loads of the output's gradient."""
        outputs = min(self.block_outputs, self.group_out)
        return self.operands.scalar_bytes * self.strip_columns * self.step_rows * outputs

    @lazy
    def in_bytes(self) -> int:
        channels = min(self.box_channels, self.group_in)
        return self.operands.scalar_bytes * self.new_lines * self.line_columns * channels

    @property
    def fill_cycles(self) -> float:
        """What it takes shared memory to be written, read and written again to convert it."""
        times = (1, 1) if self.halves else (3, 3) if self.parts == 1 else (4, 1)
        return (times[0] * self.grad_bytes + times[1] * self.in_bytes) / SHARED_BYTES_PER_CYCLE

    def step_cycles(self, gpu: Gpu) -> float:
        along = float(self.step_products)
        find = SLICE_INSTRUCTIONS + UNIT_INSTRUCTIONS * self.units
        issue = self.issue_cycles(along) + WARPS * self.slices * find / ISSUE
        together = limits.together(
            self.multiply_cycles(gpu, along),
            self.shared_cycles(along) + self.fill_cycles,
            issue + self.load_cycles + self.convert_cycles,
            loss=OVERLAP_LOSS,
        )
        arrives = max(LATENCY_CYCLES, (self.grad_bytes + self.in_bytes) / BYTES_PER_CYCLE)
        return STEP_CYCLES + limits.together(together, arrives, loss=COPY_LOSS)

    def cycles(self, gpu: Gpu) -> float:
        """What all of it takes, about."""
        return self._best_workers(gpu)[0]

    def workers(self, gpu: Gpu) -> int:
        """Blocks that share the pixels: so many that few processors are idle at the end."""
        return self._best_workers(gpu)[1]

    def _best_workers(self, gpu: Gpu) -> tuple[float, int]:
        """With what all of it takes then."""
        room = self.most_blocks // min(self.count, self.most_blocks)
        most = max(min(room, self.all_steps), 1)
        wanted = (gpu.processors * n // (4 * self.count) for n in (1, 2, 4, 8, 12))
        step_cycles = self.step_cycles(gpu)
        numbers = {min(max(n, 1), most) for n in wanted}
        return min((self._cost(gpu, workers, step_cycles), workers) for workers in numbers)

    def _cost(self, gpu: Gpu, workers: int, step_cycles: float) -> float:
        waves = ceil_div(self.count * workers, gpu.processors)
        steps = ceil_div(self.all_steps, workers)
        begun = (1 + ceil_div(steps, self.steps)) if self.rolling else 1
        swapped = self.count * workers * self.block_bytes / (gpu.processors * SWAP_BYTES)
        return swapped + waves * (BLOCK_CYCLES + steps * step_cycles + begun * LATENCY_CYCLES)

    def least_cycles(self, gpu: Gpu) -> float:
        """What it takes about, with steps as good as any."""
        height, width = self.problem.output_size
        pixels = self.problem.batch * height * width
        along = pixels / self.product_pixels
        outputs = min(self.block_outputs, self.group_out)
        channels = min(self.box_channels, self.group_in)
        bytes_ = pixels * (outputs + channels) * self.operands.scalar_bytes
        together = limits.together(
            self.multiply_cycles(gpu, along),
            along * self.warps_out * self.warps_units * (4 * self.row_tiles + 2 * self.units),
            self.issue_cycles(along),
            loss=OVERLAP_LOSS,
        )
        least = limits.together(together, bytes_ / BYTES_PER_CYCLE, loss=COPY_LOSS)
        return self.count * least / gpu.processors + BLOCK_CYCLES

    @property
    def is_large(self) -> bool:
        """Whether a box has about as many units as a block can, or all there are."""
        most = most_units(self.operands, self.row_tiles) * self.warps_units
        height, width = self.problem.kernel_size
        all_channels = round_up(self.group_in, OCTET) if self.halves else self.group_in
        all_units = ceil_div(all_channels * height * width, OCTET)
        return 2 * self.box_units >= min(most, 2 * all_units)

    def fits(self, gpu: Gpu) -> bool:
        return self.shared_bytes <= gpu.shared_bytes_per_block


_LANES = (1, 2, 4, 8, 16, 32)


def _tasks(width: int, rows: int, lanes: int) -> int:
    """Units of a thread, if so many lanes share rows of ``width`` units."""
    return ceil_div(width, lanes) * ceil_div(rows, THREADS // lanes)


def _pitches(least: int) -> range:
    """Words between rows in shared memory: multiples of 16 bytes."""
    first = round_up(least, 4)
    return range(first, first + 32, 4)


@cache
def conflicts(along: int, across: int) -> int:
    """Of 8 by 4 lanes, that read words so far apart: how many need the same bank."""
    banks = Counter((i * along + j * across) % 32 for i in range(8) for j in range(4))
    return max(banks.values())


def choose_tile(
    problem: Problem, operands: Operands, gpu: Gpu, most_cycles: float = math.inf
) -> Tile:
    """The tile that is estimated to take least, and no more than ``most_cycles``.

    Raises:
        Declined: there is none.
    """
    boxes = [*_boxes(as_one_row(problem), operands)]
    # Small boxes are for input that would not fit shared memory otherwise.
    large = [box for box in boxes if box.is_large]
    best = _best(large, gpu, most_cycles) or _best(boxes, gpu, most_cycles)
    if best is None:
        fits = most_cycles < math.inf
        raise Declined(FEW if fits else "input rows that do not fit shared memory")
    if best.all_steps >= MOST_STEPS:
        raise Declined(f"{best.all_steps} steps through all images, 2^30 and more")
    return best


def as_one_row(problem: Problem) -> Problem:
    """The same of a pointwise layer, whose pixels are all alike: more of them fill whole strips."""
    if problem.kernel_size == problem.stride == (1, 1) and not any(problem.padding):
        height, width = problem.input_size
        return replace(problem, input_size=(1, height * width))
    return problem


def _best(boxes: list[Tile], gpu: Gpu, most_cycles: float) -> Tile | None:
    """Of the first few that fit, with any steps."""
    best, least, tried = None, most_cycles, 0
    bounds = [(box.least_cycles(gpu), i, box) for i, box in enumerate(boxes)]
    for bound, _, box in sorted(bounds):
        if tried == MOST_BOXES or bound > least:
            break
        fitting = [tile for tile in _with_steps(box) if tile.fits(gpu)]
        tried += bool(fitting)
        for tile in fitting:
            cycles = tile.cycles(gpu)
            if cycles < least or (cycles == least and best is None):
                best, least = tile, cycles
    return best


def _boxes(problem: Problem, operands: Operands) -> Iterator[Tile]:
    """All ways to cut the weights into boxes that blocks have the sums of."""
    group_in = problem.in_channels // problem.groups
    octets = shares(ceil_div(group_in, OCTET))
    # Columns of float32 may be of any channels and taps: none is idle for want of channels.
    channels = [
        min(OCTET * n, group_in if operands.scalar_bytes == 4 else OCTET * n) for n in octets
    ]
    group_out = problem.out_channels // problem.groups
    taps = [*product(*map(shares, problem.kernel_size))]
    for row_tiles, warps_out, warps_pixels in product((1, 2, 4), (1, 2), (1, 2, 4, 8)):
        outputs = 16 * row_tiles * warps_out
        warps_units = WARPS // (warps_out * warps_pixels)
        if warps_units == 0 or (outputs > 16 and outputs >= 2 * group_out):
            continue
        most = most_units(operands, row_tiles) * warps_units
        for (rows, columns), box_channels in product(taps, channels):
            units = ceil_div(rows * columns * box_channels, OCTET)
            whole = (rows, columns) == problem.kernel_size and box_channels == channels[-1]
            # Where there are too few weights for all warps, these have different pixels, or nothing
            # to do where there are too few pixels, too.
            if units <= most and (
                whole if warps_pixels > 1 or units < warps_units else units >= warps_units
            ):
                yield Tile(
                    problem, operands, row_tiles, warps_out, warps_units, warps_pixels,
                    box_channels, rows, columns,
                )  # fmt: skip


def most_units(operands: Operands, row_tiles: int) -> int:
    """Of a warp."""
    return min(MOST_SUMS[limits.parts(operands)] // (4 * row_tiles), MOST_UNITS)


def _with_steps(box: Tile) -> Iterator[Tile]:
    """With steps of any shape."""
    advance = limits.row_advance(box.problem)
    for columns in _strip_columns(box.problem.output_size[1]):
        strip = replace(box, strip_columns=columns)
        for rows in _step_rows(strip):
            step = replace(strip, step_rows=rows)
            products = _slice_products(step)
            if products == 0:
                continue
            for rolling in (False, True)[: 1 + (box.box_rows > advance)]:
                yield replace(step, slice_products=products, rolling=rolling)


@cache
def _strip_columns(width: int) -> tuple[int, ...]:
    """Of strips of about equal widths: some with which least is wasted; wide ones are better."""
    columns = {round_up(share, 8) for share in shares(width) if share <= MOST_STRIP_COLUMNS}

    def waste(columns: int) -> int:
        return round(WASTE_STEPS * round_up(width, columns) / width)

    best = sorted(columns, key=lambda n: (waste(n), -n))[:MOST_STRIPS]
    return tuple(dict.fromkeys((*best, 8)))


def _step_rows(strip: Tile) -> list[int]:
    """Of which a step has about as many pixels as are good to have."""
    unit = 2 if strip.row_pairs else 1
    rows = _shares(strip.walk_rows)
    most = (max(pixels // strip.strip_columns, 1) for pixels in STEP_PIXELS)
    return sorted({round_up(rows[bisect(rows, n) - 1], unit) for n in most})


@cache
def _shares(size: int) -> list[int]:
    return shares(size)


def _slice_products(step: Tile) -> int:
    """As many as the loop over a slice may have, a whole number of times in a row; or 0."""
    of_row = step.strip_columns // step.product_columns
    rows = step.step_rows // (2 if step.row_pairs else 1)
    fits = [n for n in divisors(of_row) if rows * of_row // n % step.warps_pixels == 0]
    # With two slices and more, warps take turns at other things than products.
    several = 2 * step.warps_pixels
    good = MOST_SLICE_PRODUCTS if not step.halves else GOOD_SLICE_PRODUCTS
    few = max((n for n in fits if n <= good and rows * of_row // n >= several), default=0)
    # Where a row has five of them or seven, these are better than one at a time.
    return few if few > 2 else max((n for n in fits if n <= MOST_SLICE_PRODUCTS), default=0)


def _constants(tile: Tile) -> dict[str, Constant]:
    split = tile.parts == 2
    products = tile.step_products // tile.warps_pixels
    grad_batch, in_batch = tile.batches
    return {
        **weight_grad_constants(tile.problem, tile.operands),
        "parts": tile.parts,
        "row_tiles": tile.row_tiles,
        "units": tile.units,
        "warps_out": tile.warps_out,
        "warps_units": tile.warps_units,
        "warps_pixels": tile.warps_pixels,
        "box_channels": tile.box_channels,
        "box_rows": tile.box_rows,
        "box_columns": tile.box_columns,
        "strip_columns": tile.strip_columns,
        "step_rows": tile.step_rows,
        "steps": tile.steps,
        "slice_products": tile.slice_products,
        "rolling": tile.rolling,
        "in_vector": tile.in_vector,
        "in_lanes": tile.in_lanes,
        "in_pitch": tile.in_pitch,
        "in_batch": in_batch,
        "shift": tile.shift,
        "grad_vector": tile.grad_vector,
        "grad_lanes": tile.grad_lanes,
        "grad_pitch": tile.grad_pitch,
        "grad_batch": grad_batch,
        "flush_steps": max(
            1, FLUSH_ADDITIONS // tile.slices if split else FLUSH_PRODUCTS // products
        ),
        "shared_bytes": tile.shared_bytes,
    }


def _why(tile: Tile) -> str:
    channels = min(tile.box_channels, tile.group_in)
    return (
        f"tensor cores: boxes of {tile.block_outputs} output channels, {channels} input channels "
        f"and {tile.box_rows}x{tile.box_columns} taps, "
        f"{tile.step_rows} rows of {tile.strip_columns} pixels at a time"
    )
