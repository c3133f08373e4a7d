"""A block's weight tile and its walk through the images, with their estimated cost."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Gpu, Operands, blocks_at_once
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.limits import WORKSPACE_BYTES
from fastconv.problem import Problem

WARPS = 8
THREADS = 32 * WARPS
OCTET = 8  # columns (N) of an MMA; with 16-bit types, these are 8 input channels of a tap

# Accumulators of a thread, by parts; with 3xTF32, registers also hold a second level of them.
MOST_ACCUMULATORS = {1: 128, 2: 64}
MOST_UNITS = 16
MOST_TRANSPOSED = 4  # columns that a thread transposes at once
BATCH_REGISTERS = 16  # registers of a thread for elements that it has loaded and not yet written
MOST_WORKSPACE_BYTES = 16 << 30

# Parameters of the cost model: cycles of one SM.
MMA_PRODUCTS = 16 * 8 * 8  # multiply-adds of a TF32 MMA; 16-bit ones have twice, in equal time
ISSUE = 4.0  # instructions that an SM issues in a cycle
# The shares of other work that the longest does not hide: on an H200, tiles that read less from
# shared memory were measured to be faster even with more MMAs; and the same for copies from memory.
OVERLAP_LOSS = 0.35
COPY_LOSS = 0.1
SPLIT_INSTRUCTIONS = 8.0  # splits a number of the input, once for every MMA that reads it
CONVERT_INSTRUCTIONS = {1: 2.0, 2: 7.0}  # rounds or splits a number in shared memory, by parts
TASK_INSTRUCTIONS = 10.0  # starts an asynchronous copy
CONVERT_TASK_INSTRUCTIONS = 5.0  # converts a copy, beside what each of its numbers takes
SHARED_BYTES_PER_CYCLE = 128.0
REGISTER_INSTRUCTIONS = 60.0  # copies through registers
SLICE_INSTRUCTIONS = 20.0
UNIT_INSTRUCTIONS = 5.0  # computes the address of a unit
BYTES_PER_CYCLE = 14.0  # bytes that an SM gets from memory if all SMs load
LATENCY_CYCLES = 900.0  # latency of memory
STEP_CYCLES = 150.0
BLOCK_CYCLES = 6000.0  # start and end of a block
SWAP_BYTES = 10.0  # bytes of the workspace that an SM writes, and reads again, in a cycle


@dataclass(frozen=True)
class Tile:
    """A block's weight tile, and how the block walks through the images."""

    problem: Problem
    operands: Operands
    # A warp's row tiles, of 16 output channels each, and how a block's warps divide output
    # channels, units and pixels.
    row_tiles: int
    warps_out: int
    warps_units: int
    warps_pixels: int
    # Input channels and taps of the weight tile.
    tile_channels: int
    tile_rows: int
    tile_columns: int
    # Pixels of a strip, a step and a slice.
    strip_columns: int = 0
    step_rows: int = 0
    slice_mmas: int = 0
    rolling: bool = False
    # The problem of volumes whose output planes are the images of ``problem``.
    volumes: Problem | None = None

    @lazy
    def parts(self) -> int:
        return limits.parts(self.operands)

    @lazy
    def mmas(self) -> int:
        """MMAs that multiply two fragments: three with 3xTF32."""
        return 3 if self.parts == 2 else 1

    @lazy
    def is_16_bit(self) -> bool:
        return self.operands.scalar_bytes == 2

    @lazy
    def mma_pixels(self) -> int:
        return 16 if self.is_16_bit else 8

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
    def tile_units(self) -> int:
        return ceil_div(self.tile_channels * self.tile_rows * self.tile_columns, OCTET)

    @lazy
    def units(self) -> int:
        """Units (8 columns of an MMA) of a warp."""
        return ceil_div(self.tile_units, self.warps_units)

    @lazy
    def count(self) -> int:
        """Tiles that cover all weights."""
        height, width = self.problem.kernel_size
        return (
            self.problem.groups
            * ceil_div(self.group_out, self.block_outputs)
            * ceil_div(self.group_in, self.tile_channels)
            * ceil_div(height, self.tile_rows)
            * ceil_div(width, self.tile_columns)
        )

    @property
    def slots(self) -> int:
        """Slots of a thread in the workspace, of four accumulators each."""
        return self.units * self.row_tiles

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the workspace."""
        return THREADS * (16 * self.slots + 4 * self.operands.bias_grad)

    @lazy
    def most_blocks(self) -> int:
        """Blocks whose accumulators are in the workspace at once; large weights get more room."""
        return blocks_at_once(self.count, self.block_bytes, WORKSPACE_BYTES, MOST_WORKSPACE_BYTES)

    # --- Pixels ----------------------------------------------------------------------------------

    @lazy
    def walk_rows(self) -> int:
        """Output rows of a walk down a strip."""
        return ceil_div(self.problem.output_size[0], limits.row_step(self.problem))

    @property
    def mma_columns(self) -> int:
        return 8 if self.row_pairs else self.mma_pixels

    @lazy
    def row_pairs(self) -> bool:
        """Whether an MMA has pixels of two rows."""
        return self.is_16_bit and self.strip_columns % 16 == 8

    @lazy
    def step_mmas(self) -> int:
        """MMAs along the pixels of a step."""
        return self.strip_columns * self.step_rows // self.mma_pixels

    @property
    def slices(self) -> int:
        """Slices of a warp in a step."""
        return self.step_mmas // (self.slice_mmas * self.warps_pixels)

    @lazy
    def steps(self) -> int:
        """Steps of a walk."""
        return ceil_div(self.walk_rows, self.step_rows)

    @lazy
    def walks(self) -> int:
        strips = ceil_div(self.problem.output_size[1], self.strip_columns)
        return self.problem.batch * limits.row_step(self.problem) * strips

    @property
    def all_steps(self) -> int:
        """Steps of all images, which workers divide among themselves."""
        return self.walks * self.steps

    # --- Shared memory ---------------------------------------------------------------------------

    @lazy
    def line_advance(self) -> int:
        return min(limits.row_advance(self.problem), self.tile_rows)

    @lazy
    def window(self) -> int:
        """Lines (input rows that some tap reads) of a step."""
        return (self.step_rows - 1) * self.line_advance + self.tile_rows

    @lazy
    def new_lines(self) -> int:
        return self.step_rows * self.line_advance if self.rolling else self.window

    @lazy
    def column_unit(self) -> int:
        stride = self.problem.stride[1]
        return stride if self.tile_columns == 1 else math.gcd(stride, self.problem.dilation[1])

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
        return self.is_16_bit and (not self.operands.input_channels_last or self.in_vector == 1)

    @lazy
    def grad_vector(self) -> int:
        """Elements of the output's gradient that are copied at once."""
        last = self.operands.output_channels_last
        return self.operands.widest_vector(self.group_out if last else self.problem.output_size[1])

    @lazy
    def grad_in_registers(self) -> bool:
        return self.is_16_bit and self.grad_vector == 1

    @lazy
    def shift(self) -> int:
        """The most columns by which lines begin early, for copies to be aligned."""
        if self.operands.input_channels_last or self.in_vector == 1:
            return 0
        step = self.tile_columns * self.problem.dilation[1]
        pieces = range(
            min(ceil_div(self.problem.kernel_size[1], self.tile_columns), self.in_vector)
        )
        return max((i * step - self.problem.padding.left) % self.in_vector for i in pieces)

    @lazy
    def line_columns(self) -> int:
        taps = (self.tile_columns - 1) * self.problem.dilation[1]
        reach = (self.strip_columns - 1) * self.problem.stride[1] + taps
        vector = 1 if self.operands.input_channels_last else self.in_vector
        return round_up(self.shift + reach // self.column_unit + 1, vector)

    @lazy
    def in_pitch(self) -> int:
        """Bytes between octets (16-bit types), channels, or columns if channels are neighbours."""
        stride = self.problem.stride[1] // self.column_unit
        if self.is_16_bit:
            # An odd pitch brings copies of a pixel's channels to different banks.
            return 16 * (self.line_columns | self.operands.input_channels_last)
        if self.operands.input_channels_last:
            least, (along, across) = self.tile_channels, (1, stride)
            return 4 * min(_pitches(least), key=lambda n: bank_conflicts(along, across * n))
        return 4 * min(_pitches(self.line_columns), key=lambda n: bank_conflicts(n, stride))

    @lazy
    def line_bytes(self) -> int:
        if not self.is_16_bit and self.operands.input_channels_last:
            return self.line_columns * self.in_pitch
        return self.tile_channels // (OCTET if self.is_16_bit else 1) * self.in_pitch

    @lazy
    def grad_pitch(self) -> int:
        """Bytes between channels, or pixels if channels are neighbours."""
        size = self.operands.scalar_bytes
        if not self.operands.output_channels_last:
            return 16 * (self.strip_columns * self.step_rows * size // 16 | 1)
        if self.is_16_bit:
            return 16 * (self.block_outputs * size // 16 | 1)
        return 4 * min(_pitches(self.block_outputs), key=lambda n: bank_conflicts(1, n))

    @property
    def stage_bytes(self) -> int:
        pixels = self.strip_columns * self.step_rows
        last = self.operands.output_channels_last
        return self.parts * self.grad_pitch * (pixels if last else self.block_outputs)

    @lazy
    def shared_bytes(self) -> int:
        lines = round_up((self.window + self.new_lines) * self.line_bytes, 16)
        entries = self.units * self.warps_units * (1 if self.is_16_bit else OCTET)
        return lines + 2 * self.stage_bytes + 4 * entries

    # --- Copies ----------------------------------------------------------------------------------

    @lazy
    def grad_sheet(self) -> tuple[int, int]:
        """Copies of an output row of the gradient: along memory, and across."""
        unit = self.operands.vector if self.grad_in_registers else self.grad_vector
        if self.operands.output_channels_last:
            return self.block_outputs // unit, self.strip_columns
        return self.strip_columns // unit, self.block_outputs

    @lazy
    def in_sheet(self) -> tuple[int, int]:
        """Copies of a line of the input: along memory, and across."""
        channels = self.tile_channels
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
        """Copies of a thread in a step."""
        return self.step_rows * _tasks(*self.grad_sheet, self.grad_lanes)

    @lazy
    def in_tasks(self) -> int:
        return self.new_lines * _tasks(*self.in_sheet, self.in_lanes)

    @property
    def batches(self) -> tuple[int, int]:
        """Copies that are in registers at once, of the output's gradient and of the input."""
        both = self.grad_in_registers and self.in_in_registers
        registers = BATCH_REGISTERS // (2 if both else 1)
        of_input = OCTET * max(self.in_vector // 2, 1)
        return max(registers // OCTET, 1), max(registers // of_input, 1)

    # --- Estimates -------------------------------------------------------------------------------

    @lazy
    def block_mmas(self) -> int:
        """MMAs of all warps for the same pixels."""
        return self.warps_out * self.warps_units * self.row_tiles * self.units * self.mmas

    def multiply_cycles(self, gpu: Gpu, along: float) -> float:
        """Cycles of the tensor cores for ``along`` MMAs along the pixels."""
        cycles = MMA_PRODUCTS / gpus.rates(gpu).mma["tf32"]
        return along * self.block_mmas * cycles

    @lazy
    def right_conflicts(self) -> int:
        """Bank bank_conflicts of a warp's reads of the input: 1 if there are none."""
        stride = self.problem.stride[1] // self.column_unit
        if self.is_16_bit:
            return math.gcd(stride, 8)
        if self.operands.input_channels_last:
            return bank_conflicts(1, stride * self.in_pitch // 4)
        return bank_conflicts(self.in_pitch // 4, stride)

    def shared_cycles(self, along: float) -> float:
        """Cycles of shared memory to read the operands of ``along`` MMAs along the pixels."""
        reads = 4 * self.parts * self.row_tiles + 2 * self.units * self.right_conflicts
        return along * self.warps_out * self.warps_units * reads

    def issue_cycles(self, along: float) -> float:
        """Cycles to issue these MMAs and the loads of their operands."""
        warps = self.warps_out * self.warps_units
        if self.is_16_bit:
            loads = self.row_tiles + self.units / 2
        else:
            left = 4 if self.operands.output_channels_last else 1
            loads = left * self.parts * self.row_tiles + 2 * self.units
            loads += 2 * self.units * (SPLIT_INSTRUCTIONS if self.parts == 2 else 0)
        return along * (self.block_mmas + warps * loads) / ISSUE

    @property
    def load_cycles(self) -> float:
        """Cycles to issue a step's copies."""
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
        """Cycles to issue the instructions that round or split a step's numbers."""
        if self.is_16_bit:
            return 0.0
        tasks, numbers = self.grad_tasks, self.grad_tasks * self.grad_vector
        if self.parts == 1:
            tasks, numbers = tasks + self.in_tasks, numbers + self.in_tasks * self.in_vector
        instructions = numbers * CONVERT_INSTRUCTIONS[self.parts]
        return WARPS * (instructions + tasks * CONVERT_TASK_INSTRUCTIONS) / ISSUE

    @lazy
    def grad_bytes(self) -> int:
        """Bytes of the output's gradient that a step loads."""
        outputs = min(self.block_outputs, self.group_out)
        return self.operands.scalar_bytes * self.strip_columns * self.step_rows * outputs

    @lazy
    def in_bytes(self) -> int:
        channels = min(self.tile_channels, self.group_in)
        return self.operands.scalar_bytes * self.new_lines * self.line_columns * channels

    @property
    def fill_cycles(self) -> float:
        """Cycles of shared memory to write a step, and to read and write it again to convert it."""
        times = (1, 1) if self.is_16_bit else (3, 3) if self.parts == 1 else (4, 1)
        return (times[0] * self.grad_bytes + times[1] * self.in_bytes) / SHARED_BYTES_PER_CYCLE

    def step_cycles(self, gpu: Gpu) -> float:
        along = float(self.step_mmas)
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
        """Cycles of the whole gradient, estimated."""
        return self._best_workers(gpu)[0]

    def workers(self, gpu: Gpu) -> int:
        """Blocks that divide the steps of all images (split-K), for few idle SMs at the end."""
        return self._best_workers(gpu)[1]

    def _best_workers(self, gpu: Gpu) -> tuple[float, int]:
        """The fewest cycles, and the number of workers that takes them."""
        room = self.most_blocks // min(self.count, self.most_blocks)
        most = max(min(room, self.all_steps), 1)
        wanted = (gpu.sm_count * n // (4 * self.count) for n in (1, 2, 4, 8, 12))
        step_cycles = self.step_cycles(gpu)
        numbers = {min(max(n, 1), most) for n in wanted}
        return min((self._cost(gpu, workers, step_cycles), workers) for workers in numbers)

    def _cost(self, gpu: Gpu, workers: int, step_cycles: float) -> float:
        waves = ceil_div(self.count * workers, gpu.sm_count)
        steps = ceil_div(self.all_steps, workers)
        begun = (1 + ceil_div(steps, self.steps)) if self.rolling else 1
        swapped = self.count * workers * self.block_bytes / (gpu.sm_count * SWAP_BYTES)
        return swapped + waves * (BLOCK_CYCLES + steps * step_cycles + begun * LATENCY_CYCLES)

    def least_cycles(self, gpu: Gpu) -> float:
        """About the fewest cycles that this weight tile takes, whatever its steps."""
        height, width = self.problem.output_size
        pixels = self.problem.batch * height * width
        along = pixels / self.mma_pixels
        outputs = min(self.block_outputs, self.group_out)
        channels = min(self.tile_channels, self.group_in)
        bytes_ = pixels * (outputs + channels) * self.operands.scalar_bytes
        together = limits.together(
            self.multiply_cycles(gpu, along),
            along * self.warps_out * self.warps_units * (4 * self.row_tiles + 2 * self.units),
            self.issue_cycles(along),
            loss=OVERLAP_LOSS,
        )
        least = limits.together(together, bytes_ / BYTES_PER_CYCLE, loss=COPY_LOSS)
        return self.count * least / gpu.sm_count + BLOCK_CYCLES

    @property
    def is_large(self) -> bool:
        """Whether the tile has at least half of the units that a block can have, or all."""
        most = most_units(self.operands, self.row_tiles) * self.warps_units
        height, width = self.problem.kernel_size
        all_channels = round_up(self.group_in, OCTET) if self.is_16_bit else self.group_in
        all_units = ceil_div(all_channels * height * width, OCTET)
        return 2 * self.tile_units >= min(most, 2 * all_units)

    def fits(self, gpu: Gpu) -> bool:
        return self.shared_bytes <= gpu.shared_bytes_per_block


_LANES = (1, 2, 4, 8, 16, 32)


def _tasks(width: int, rows: int, lanes: int) -> int:
    """Copies of a thread, if ``lanes`` lanes divide rows of ``width`` copies."""
    return ceil_div(width, lanes) * ceil_div(rows, THREADS // lanes)


def _pitches(least: int) -> range:
    """Words between rows in shared memory: multiples of 16 bytes."""
    first = round_up(least, 4)
    return range(first, first + 32, 4)


@cache
def bank_conflicts(along: int, across: int) -> int:
    """The most of 8 by 4 lanes, ``along`` and ``across`` words apart, that read the same bank."""
    banks = Counter((i * along + j * across) % 32 for i in range(8) for j in range(4))
    return max(banks.values())


def most_units(operands: Operands, row_tiles: int) -> int:
    """The most units of a warp, for its accumulators to fit registers."""
    return min(MOST_ACCUMULATORS[limits.parts(operands)] // (4 * row_tiles), MOST_UNITS)
