"""Plans weight gradients with ``weight_grad.cuh``.

The rules: of all ways to cut the weights into products that fit registers and shared memory, the
one whose slowest part (products, or loads of either tensor) is estimated to take least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product

from fastconv.kernels.arithmetic import ceil_div, round_up, shares
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Launch,
    Operands,
    Plan,
    TensorMap,
    blocks_at_once,
    weight_grad_constants,
)
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.block import CONSUMERS, OUTPUTS, THREADS
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.launches import (
    MOST_PACK_BLOCKS,
    SCALE_THREADS,
    reduction_bytes,
    weight_grad_launches,
)
from fastconv.kernels.planning.limits import FLUSH_ADDITIONS, FLUSH_PRODUCTS, WORKSPACE_BYTES
from fastconv.problem import Problem

OCTET = 8  # input channels
QUAD = 4  # input columns that are loaded together

MOST_COLUMNS = 256  # of a product
# Of a warpgroup, so that a thread's sums (and their totals, of numbers in two parts) fit registers.
MOST_BLOCK_COLUMNS = {1: 360, 2: 184}
MOST_SEGMENTS = 9  # products of a rolled loop
BODY_COLUMNS = 8
# Of rows, each of which is a copy; and of pixels, which need no more to be long ones.
ROW_STAGE_COLUMNS = (16, 24, 32, 48, 64)
PIXEL_STAGE_COLUMNS = (16,)
MOST_STRIP_COLUMNS = 128
LANES = 4  # of a warp, that share the phases of a channel
BOX_BYTES = (64, 128)  # of a row that tensor copies swizzle
LINE_BYTES = 128  # that memory is read by
BOX_ALIGNMENT = 1024  # of what they write
COUNTER_BYTES = 2048  # of numbers that consumers find float16 has not all bits of
LEAST_BULK_BYTES = 64  # of a row: below, lanes are faster
MOST_WORKSPACE_BYTES = 16 << 30
MOST_WALKS = 2**30  # of what a launch computes: 32-bit numbers
MOST_PIXELS = 2**31  # of the planes that a map takes for a row
MOST_FILTERS = 2**28  # that are judged one by one, in a table
MOST_GRAD_STAGES = 4
FEWEST_GRAD_STAGES = 2

# Estimated cycles of one processor.
PRODUCT_CYCLES = 1.0  # of a product, beyond its multiplications
NARROW_CYCLES = 8.0  # more of one of few columns
INPUT_CYCLES = 4.0  # to load 16 bytes of the input, half of it for each of its parts
SCALED_LOSS = 1.6  # of twice as many numbers, that become float16
THIRD_WARP = {True: 0.67, False: 0.7}  # what three warps take; by `halves`
HALVES_CYCLES = 4e4  # of launches that find scales, and of those that repair nothing
HALVES_SHARE = 1.25  # of what it was taken for, as measured: 1.1 to 1.3, of asym5x7 in ieee 1.7
HALVES_LOSS = 1.05  # to be worth what it takes if there is something to repair
STRIDED_LOSS = 2.0  # of strides above 2
ROWS_LOSS = 1.35  # of steps that have several rows of their own
COPY_CYCLES = 8.0  # to issue a bulk copy of the output's gradient
BOX_ROW_CYCLES = 4.0  # the same of a row of a tensor copy
SHIFTED_LOSS = {4: 4.0, 2: 16.0}  # by bytes of an element: rows whose ends are copied by lanes
PIXEL_COPY_CYCLES = 16.0  # the same of a single pixel's channels
PIECE_CYCLES = 1.2  # of a copy by a lane, at a row's ends or of less than 16 bytes
LANE_CYCLES = 5.0  # the same of 16 bytes, inside
BYTES_PER_CYCLE = 15.0  # that arrive from memory if all processors load
LATENCY_CYCLES = 1500.0  # of memory
STEP_CYCLES = 300.0
SAME_LINE_LOSS = 0.25  # of lines that two strips read at different times
PART_LINE_LOSS = 0.08  # of those that a stage has half of
BLOCK_CYCLES = 6000.0  # to start and to end
FFMA_PRODUCTS = 70.0  # multiply-adds a cycle that the portable kernels reach
FEW = "so few channels or pixels that most of the products would not count"


def portable_cycles(problem: Problem, gpu: Gpu) -> float:
    """What the portable kernels take, about."""
    return limits.portable_loss(problem) * problem.flops / 2 / (FFMA_PRODUCTS * gpu.processors)


def plan(tile: Tile, gpu: Gpu) -> Plan:
    """The launches that compute the gradient with ``weight_grad.cuh``."""
    if not tile.layer.halves:
        return Plan(*_sums(tile, gpu), "hopper", _why(tile))
    launches, scratch = _sums(tile, gpu)
    operands = replace(tile.layer.operands, bias_grad=False)
    again = choose_tile(tile.layer.problem, operands, gpu, halves=False)
    repairs, more = _sums(again, gpu, repairs=True)
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
        (f"beyond float16's range, in TF32: {_why(again)}",),
    )


def _sums(tile: Tile, gpu: Gpu, repairs: bool = False) -> tuple[tuple[Launch, ...], int]:
    """What adds up a tile's weights; and the workspace that it needs, in bytes."""
    tiles_at_once = min(tile.count, tile.most_blocks)
    workers = tile.workers(gpu)
    tables = tile.layer.tables_bytes if tile.layer.halves or repairs else 0
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
    """A stage: of an output row's columns, all channels and phases.

    Rows in shared memory come as ``stage_row`` in ``tile.cuh`` has them. Where image rows are no
    multiple of 16 bytes, a plane is a single one, or as many planes as are a multiple of it.
    """
    problem, bytes_ = tile.layer.problem, tile.layer.operands.scalar_bytes
    height, width = problem.output_size
    classes, lane_phases = tile.layer.plane_classes, tile.layer.lane_phases
    planes = classes * height * width * bytes_
    image = problem.out_channels // classes * planes
    sizes: tuple[int, ...] = (problem.batch // lane_phases, image // planes, lane_phases)
    strides: tuple[int, ...] = (lane_phases * image, planes, image)
    box: tuple[int, ...] = (LANES, tile.channel_groups * OUTPUTS, lane_phases)
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


@dataclass(frozen=True)
class Layer:
    """What is computed, and what follows from it for all tiles."""

    problem: Problem
    operands: Operands
    halves: bool  # float32 multiplied as float16, see scale.cuh
    # Every so many-th plane of the output's gradient begins at a multiple of 16 bytes. A tile's are
    # all alike.
    plane_classes: int = 1

    @lazy
    def parts(self) -> int:
        return limits.parts(self.operands)

    @lazy
    def products(self) -> int:
        return 3 if self.parts == 2 else 1

    @lazy
    def vector(self) -> int:
        return self.operands.vector

    @lazy
    def phases(self) -> int:
        """Numbers of 16 bytes of a product's operands."""
        return 8 if self.halves else self.vector

    @lazy
    def lane_phases(self) -> int:
        return self.phases // LANES

    @lazy
    def group_in(self) -> int:
        return self.problem.in_channels // self.problem.groups

    @lazy
    def group_out(self) -> int:
        return self.problem.out_channels // self.problem.groups

    @lazy
    def class_out(self) -> int:
        """Of a group's output channels, those whose planes are alike."""
        return self.group_out // self.plane_classes

    @lazy
    def channels(self) -> int:
        """Of both tensors."""
        return self.problem.in_channels + self.problem.out_channels

    @lazy
    def tables_bytes(self) -> int:
        """Of what is known of channels and filters, as float16."""
        return round_up(4 * (2 * self.channels + self.problem.out_channels * self.group_in), 16)

    @lazy
    def row_step(self) -> int:
        return limits.row_step(self.problem)

    @lazy
    def row_advance(self) -> int:
        return limits.row_advance(self.problem)

    @lazy
    def grad_vector(self) -> int:
        """Elements of the copies of the output's gradient."""
        height, width = self.problem.output_size
        if self.operands.output_channels_last:
            return self.operands.widest_vector(self.group_out)
        # All rows with the same number, of a class, begin equally far from a multiple of 16 bytes.
        if self.operands.aligned and self.plane_classes * height * width % self.vector == 0:
            return self.vector
        return self.operands.widest_vector(width)

    @lazy
    def lead(self) -> int:
        """Columns by which the copies of a row begin early, at most."""
        if self.grad_vector < self.vector or self.operands.output_channels_last:
            return 0
        return self.vector - math.gcd(self.vector, self.problem.output_size[1])

    @lazy
    def shifted(self) -> bool:
        """Whether rows of one stage begin at different distances from multiples of 16 bytes."""
        return not self.operands.output_channels_last and self.grad_vector < self.vector

    @lazy
    def has_boxes(self) -> bool:
        """Whether a tensor copy can bring a stage of the output's gradient, of some width."""
        return (
            not self.operands.output_channels_last
            and self.problem.batch % self.lane_phases == 0
            and self.group_out % self.plane_classes == 0
            and self.grad_vector == self.vector
            and self.plane_classes * math.prod(self.problem.output_size) < MOST_PIXELS
        )

    @lazy
    def row_columns(self) -> int:
        """Of an output row, that are multiplied."""
        return round_up(self.problem.output_size[1] + self.lead, BODY_COLUMNS)


@dataclass(frozen=True)
class Tile:
    """What a block computes, and how it walks through the images."""

    layer: Layer
    channel_groups: int
    kernel_rows: int
    product_taps: int
    product_octets: int
    segments: int
    phase_images: int
    stage_columns: int = BODY_COLUMNS
    strip_stages: int = 0
    input_stages: int = 0
    grad_stages: int = 0
    in_step: bool = False

    @lazy
    def columns(self) -> int:
        """Of a product."""
        return self.product_taps * self.product_octets * OCTET

    # --- Weights ---------------------------------------------------------------------------------

    @property
    def planes(self) -> int:
        return ceil_div(self.layer.group_in, self.product_octets * OCTET)

    @lazy
    def block_segments(self) -> int:
        return self.segments * CONSUMERS // self.channel_groups

    @lazy
    def block_planes(self) -> int:
        """That a block's segments lie in, at most."""
        segments, rows = self.block_segments, self.kernel_rows
        if segments % rows == 0:
            return segments // rows
        return 1 if rows % segments == 0 else (segments - 2) // rows + 2

    @lazy
    def count(self) -> int:
        """Tiles of all the weights."""
        height, width = self.layer.problem.kernel_size
        return (
            self.layer.problem.groups
            * self.layer.plane_classes
            * ceil_div(self.layer.class_out, self.channel_groups * OUTPUTS)
            * ceil_div(height, self.kernel_rows)
            * ceil_div(width, self.product_taps)
            * ceil_div(self.planes * self.kernel_rows, self.block_segments)
        )

    @property
    def slot_bytes(self) -> int:
        """Of a block's sums of weights."""
        return CONSUMERS * OUTPUTS * self.segments * self.columns * 4

    @property
    def block_bytes(self) -> int:
        """Of the workspace: with those of the bias."""
        return self.slot_bytes + CONSUMERS * OUTPUTS * 4 * self.layer.operands.bias_grad

    @lazy
    def most_blocks(self) -> int:
        """Whose sums are in the workspace at once: more of them where weights are that large."""
        return blocks_at_once(self.count, self.block_bytes, WORKSPACE_BYTES, MOST_WORKSPACE_BYTES)

    # --- Pixels ----------------------------------------------------------------------------------

    @lazy
    def phase_strips(self) -> int:
        return self.layer.phases // self.phase_images

    @property
    def new_rows(self) -> int:
        return min(self.layer.row_advance, self.kernel_rows)

    @lazy
    def steps(self) -> int:
        """Of a strip of rows."""
        layer = self.layer
        height, width = layer.problem.output_size
        steps = ceil_div(ceil_div(height, layer.row_step), self.phase_strips)
        if layer.lead == 0 or self.phase_strips == 1:
            return steps
        # Rows of one step are aligned alike in all strips.
        return round_up(steps, layer.vector // math.gcd(layer.vector, layer.row_step * width))

    @property
    def grad_bulk(self) -> bool:
        """Whether the output's gradient is copied in bulk, and not by lanes."""
        layer = self.layer
        if layer.operands.output_channels_last:
            return layer.grad_vector == layer.vector
        return self.stage_columns * layer.operands.scalar_bytes >= LEAST_BULK_BYTES

    @property
    def grad_boxes(self) -> bool:
        """Whether one tensor copy brings a stage of the output's gradient."""
        layer = self.layer
        return (
            layer.has_boxes
            and self.phase_strips == 1
            and self.stage_columns * layer.operands.scalar_bytes in BOX_BYTES
        )

    @lazy
    def strip_columns(self) -> int:
        return self.strip_stages * self.stage_columns

    @lazy
    def strips(self) -> int:
        """Of an output row."""
        return ceil_div(self.layer.row_columns, self.strip_columns)

    @property
    def image_groups(self) -> int:
        return ceil_div(self.layer.problem.batch, self.phase_images)

    @property
    def walks(self) -> int:
        """Down strips of columns, of all images."""
        return self.image_groups * self.layer.row_step * self.strips

    @property
    def all_steps(self) -> int:
        """What workers share."""
        return self.walks * self.steps

    # --- Shared memory ---------------------------------------------------------------------------

    @property
    def vector_input(self) -> bool:
        """Whether four neighbours of the input, in a row or of a pixel, are aligned."""
        layer = self.layer
        if layer.operands.input_channels_last:
            return layer.operands.aligned and layer.group_in % QUAD == 0
        piece = self.product_taps * layer.problem.dilation[1]
        one_piece = self.product_taps >= layer.problem.kernel_size[1]
        return (
            layer.operands.aligned
            and layer.problem.input_size[1] % QUAD == 0
            and (one_piece or piece % QUAD == 0)
        )

    @lazy
    def tile_columns(self) -> int:
        layer = self.layer
        stride, dilation = layer.problem.stride[1], layer.problem.dilation[1]
        shift = -(layer.lead * stride + layer.problem.padding.left) % QUAD
        return round_up(
            (shift if self.vector_input and not layer.operands.input_channels_last else 0)
            + (self.strip_columns - 1 + layer.lead) * stride
            + (self.product_taps - 1) * dilation
            + 1,
            QUAD,
        )

    @lazy
    def row_bytes(self) -> int:
        channels = self.block_planes * self.product_octets * OCTET
        return self.layer.parts * channels * self.tile_columns * 16

    @lazy
    def stage_bytes(self) -> int:
        layer = self.layer
        if layer.operands.output_channels_last:
            pixel = self.channel_groups * OUTPUTS * layer.operands.scalar_bytes
            return layer.vector * (self.stage_columns * pixel + 8 * layer.operands.scalar_bytes)
        units = self.stage_columns // layer.vector + layer.shifted
        units = units if self.grad_boxes else units | 1
        return self.channel_groups * OUTPUTS * layer.phases * units * 16

    @property
    def shared_bytes(self) -> int:
        return (
            self.input_stages * (self.row_bytes + 16)
            + self.grad_stages * (self.stage_bytes + 24)
            + (BOX_ALIGNMENT if self.grad_boxes else 0)
            + (COUNTER_BYTES if self.layer.halves else 0)
        )

    def fitted(self, budget: int) -> Tile | None:
        """With as many stages as fit ``budget`` bytes of shared memory; None if too few do."""
        fewest = self.kernel_rows + self.new_rows
        tile = replace(self, input_stages=fewest, grad_stages=FEWEST_GRAD_STAGES)
        left = budget - tile.shared_bytes
        if left < 0:
            return None
        more = min(left // (self.stage_bytes + 24), MOST_GRAD_STAGES - FEWEST_GRAD_STAGES)
        left -= more * (self.stage_bytes + 24)
        rows = min(left // (self.row_bytes + 16), self.new_rows + 1)
        return replace(tile, grad_stages=FEWEST_GRAD_STAGES + more, input_stages=fewest + rows)

    # --- Estimates -------------------------------------------------------------------------------

    @property
    def product_cycles(self) -> float:
        narrow = NARROW_CYCLES if self.columns < 48 else 0.0
        return PRODUCT_CYCLES + self.columns / 2 + narrow * (48 - self.columns) / 40

    def multiply_cycles(self, columns: int) -> float:
        """What a processor's products take, for so many columns of a step."""
        products = CONSUMERS * self.segments * self.layer.products * columns / 2
        return products * self.product_cycles

    def grad_cycles(self, columns: int) -> float:
        """What it takes to get so many columns of a step's gradient of the output."""
        layer = self.layer
        problem, operands = layer.problem, layer.operands
        channels = min(self.channel_groups * OUTPUTS, layer.class_out)
        stages = ceil_div(columns, self.stage_columns)
        issue, pieces = 0.0, 0.0
        if self.grad_boxes:
            issue = channels * layer.phases * stages * BOX_ROW_CYCLES
        elif not self.grad_bulk and layer.grad_vector == layer.vector:
            issue = channels * layer.phases * columns / layer.vector * LANE_CYCLES
        elif not self.grad_bulk:
            pieces = channels * layer.phases * columns / layer.grad_vector
        elif operands.output_channels_last:
            whole = problem.out_channels == self.channel_groups * OUTPUTS
            pixels = layer.vector * columns * PIXEL_COPY_CYCLES
            issue = layer.vector * stages * COPY_CYCLES if whole else pixels
        else:
            issue = channels * layer.phases * stages * COPY_CYCLES
            issue *= SHIFTED_LOSS[operands.scalar_bytes] if layer.shifted else 1
            # The ends of a row are left to lanes.
            ends = 2 if layer.shifted else 1 if problem.output_size[1] % layer.vector else 0
            per_unit = layer.vector // math.gcd(layer.grad_vector, problem.output_size[1])
            pieces = channels * layer.phases * ends * per_unit / self.strips
        bytes_ = channels * layer.phases * columns * operands.scalar_bytes
        under_way = (self.grad_stages - 1) * self.stage_bytes / LATENCY_CYCLES
        issue += pieces * PIECE_CYCLES
        memory = bytes_ / min(BYTES_PER_CYCLE, under_way)
        if memory > self.multiply_cycles(columns):
            memory *= self.lines
        return max(issue, memory)

    @lazy
    def lines(self) -> float:
        """By how much longer reading takes for lines of memory that are read twice, or in parts."""
        operands = self.layer.operands
        row_bytes = self.layer.problem.output_size[1] * operands.scalar_bytes
        if operands.output_channels_last or row_bytes % LINE_BYTES == 0:
            return 1.0
        stage = LINE_BYTES / (self.stage_columns * operands.scalar_bytes)
        strip = LINE_BYTES / (self.strip_columns * operands.scalar_bytes)
        again = 0.0 if self.in_step else SAME_LINE_LOSS * strip
        return 1.0 + PART_LINE_LOSS * max(stage - 1, 0.0) + again

    def input_cycles(self, columns: int) -> float:
        """What it takes to load a step's new rows of so many columns of the input."""
        layer = self.layer
        channels = self.block_planes * self.product_octets * OCTET
        vectors = channels * columns * self.new_rows * (1 + layer.parts) / 2
        cycles = vectors * INPUT_CYCLES * (1 if self.vector_input else 1.5)
        cycles *= SCALED_LOSS if layer.halves else 1
        if self.grad_boxes and layer.lead == 0:
            cycles *= THIRD_WARP[layer.halves]
        cycles *= ROWS_LOSS if self.new_rows > 1 and not layer.operands.input_channels_last else 1
        return cycles * (STRIDED_LOSS if layer.problem.stride[1] > 2 else 1)

    def step_cycles(self, columns: int) -> float:
        """What a step of a strip of so many columns takes a processor."""
        stride = self.layer.problem.stride[1]
        in_columns = self.tile_columns - (self.strip_columns - columns) * stride
        return STEP_CYCLES + limits.together(
            self.multiply_cycles(columns),
            self.input_cycles(in_columns),
            self.grad_cycles(columns),
        )

    @lazy
    def weights(self) -> tuple[int, int]:
        """By which workers share steps: that of a strip, and of the last one, in 16 cycles."""
        last = self.layer.row_columns - (self.strips - 1) * self.strip_columns
        return (
            math.ceil(self.step_cycles(self.strip_columns) / 16),
            math.ceil(self.step_cycles(last) / 16),
        )

    def cycles(self, gpu: Gpu) -> float:
        """What all of it takes, about."""
        workers = self.workers(gpu)
        waves = ceil_div(self.count * workers, gpu.processors)
        rows = self.image_groups * self.layer.row_step * self.steps / workers
        # Where a walk begins, rows that steps share are loaded all at once.
        rows_again = (self.kernel_rows - self.new_rows) / self.new_rows
        again = (1 + rows * self.strips / self.steps) * rows_again / 2
        whole, last = self.weights
        share = HALVES_SHARE if self.layer.halves else 1.0
        return self.launch_cycles + waves * (
            BLOCK_CYCLES + 16 * share * (rows * ((self.strips - 1) * whole + last) + again * whole)
        )

    @property
    def launch_cycles(self) -> float:
        """Of the launches that find scales, and those that have nothing to repair."""
        return HALVES_CYCLES if self.layer.halves else 0.0

    def least_cycles(self, gpu: Gpu, grad_cycles: float) -> float:
        """What it takes at least, with any strips and stages; but for what boxes may save.

        ``grad_cycles`` are what it takes at least to get a row of the output's gradient.
        """
        columns = self.layer.row_columns
        return self._least_cycles(
            gpu,
            self.multiply_cycles(columns),
            self.input_cycles(columns * self.layer.problem.stride[1]),
            grad_cycles,
        )

    def least_group_cycles(self, gpu: Gpu, grad_cycles: float) -> float:
        """The least of ``least_cycles`` with as many segments or fewer, or less.

        A lower bound: with fewer segments, tiles are as many or more, and however many they are,
        together they multiply every segment and load every plane. What parts take altogether grows
        with each of them.
        """
        columns = self.layer.row_columns
        segments = self.planes * self.kernel_rows
        tiles = ceil_div(segments, self.block_segments)  # of the same output channels and taps
        multiplied = segments / (tiles * self.block_segments)
        loaded = self.planes / (tiles * self.block_planes)
        least = self._least_cycles(
            gpu,
            multiplied * self.multiply_cycles(columns),
            loaded * self.input_cycles(columns * self.layer.problem.stride[1]),
            grad_cycles,
        )
        return least * (1 - limits.ROUNDING)

    def _least_cycles(self, gpu: Gpu, multiply: float, input_: float, grad: float) -> float:
        """What it takes at least if a row of a tile takes so many cycles for each of its parts."""
        layer = self.layer
        rows = self.image_groups * layer.row_step * self.steps
        row = ceil_div(layer.row_columns, MOST_STRIP_COLUMNS) * STEP_CYCLES + limits.together(
            multiply, input_, grad
        )
        begun = self.launch_cycles + max(self.count / gpu.processors, 1.0) * BLOCK_CYCLES
        share = HALVES_SHARE if layer.halves else 1.0
        return begun + share * self.count * rows * row / gpu.processors

    @property
    def least_grad_cycles(self) -> float:
        """What it takes at least to get a row of the output's gradient, with any stages."""
        most = replace(self, grad_stages=MOST_GRAD_STAGES, in_step=True)
        columns = self.layer.row_columns
        stages = (
            replace(one, strip_stages=ceil_div(columns, one.stage_columns))
            for one in _with_stages(most)
        )
        return min((one.grad_cycles(columns) for one in stages), default=math.inf)

    def workers(self, gpu: Gpu) -> int:
        """Blocks that share the pixels: so many that few processors are idle at the end."""
        count, processors = self.count, gpu.processors
        steps = self.all_steps
        most = max(min(self.most_blocks // min(count, self.most_blocks), steps), 1)

        def cost(workers: int) -> float:
            waves = ceil_div(count * workers, processors)
            return waves * (steps / workers + self.kernel_rows)

        # As many as some number of waves has room for.
        best = min({min(max(n * processors // count, 1), most) for n in (1, 2, 3)}, key=cost)
        return best // self.walks * self.walks if self.in_step else best


def takes_halves(problem: Problem, operands: Operands) -> bool:
    """Whether float32 can be multiplied as float16."""
    contiguous = not (operands.input_channels_last or operands.output_channels_last)
    filters = problem.out_channels * (problem.in_channels // problem.groups)
    return operands.scalar == "float" and contiguous and filters < MOST_FILTERS


def choose_tile(
    problem: Problem,
    operands: Operands,
    gpu: Gpu,
    most_cycles: float = math.inf,
    halves: bool | None = None,
) -> Tile:
    """The tile that is estimated to take least, and no more than ``most_cycles``.

    ``halves`` says whether float32 is multiplied as float16; None: where that takes clearly less.

    Raises:
        Declined: there is none.
    """
    best: Tile | None = None
    least = most_cycles
    # Best products first: most of the others need not be looked at.
    for bound, products in _by_bounds(problem, operands, gpu, halves):
        if bound > least:
            break
        for candidate in _with_strips(products):
            fitted = candidate.fitted(gpu.shared_bytes_per_block)
            if fitted is None or fitted.block_bytes > WORKSPACE_BYTES:
                continue
            for tile in _with_steps(fitted, gpu):
                cycles = tile.cycles(gpu) * _loss(tile, halves)
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
    problem: Problem, operands: Operands, gpu: Gpu, halves: bool | None
) -> Iterator[tuple[float, Tile]]:
    """All products with what they take at least, the best first.

    Those that differ by their segments alone are a group: most need not be looked into.
    """
    queue: list[tuple[float, int, int, Tile, float]] = []
    for layer in _layers(problem, operands, halves):
        grad_cycles: dict[tuple[int, int], float] = {}  # by what alone decides
        for group in _groups(layer, gpu):
            key = (group.channel_groups, group.phase_images)
            if key not in grad_cycles:
                grad_cycles[key] = replace(group, segments=1).least_grad_cycles
            grad = grad_cycles[key]
            if grad < math.inf:  # else rows are so short that there is no stage
                bound = group.least_group_cycles(gpu, grad) * _loss(group, halves)
                queue.append((bound, len(queue), 0, group, grad))
    heapify(queue)
    while queue:
        bound, place, segments, products, grad = heappop(queue)
        if segments > 0:
            yield bound, products
            continue
        for segments in range(1, products.segments + 1):
            one = replace(products, segments=segments)
            bound = one.least_cycles(gpu, grad) * _loss(one, halves)
            heappush(queue, (bound, place, segments, one, grad))


def _layers(problem: Problem, operands: Operands, halves: bool | None) -> Iterator[Layer]:
    """All that the problem can be."""
    for one in (False, True) if takes_halves(problem, operands) else (False,):
        if halves in (None, one):
            layer = Layer(problem, operands, one)
            yield layer
            of_classes = in_plane_classes(layer)
            if of_classes is not None:
                yield of_classes


def in_plane_classes(layer: Layer) -> Layer | None:
    """The layer with planes in as many classes as begin at different distances from 16 bytes.

    None where TMA copies rows without such classes, or where no TMA box brings several planes.
    """
    classes = layer.vector // math.gcd(layer.vector, math.prod(layer.problem.output_size))
    found = replace(layer, plane_classes=classes)
    return found if layer.shifted and layer.operands.aligned and found.has_boxes else None


def _loss(tile: Tile, halves: bool | None) -> float:
    """By how much a tile is taken to be slower than it is, where there is a choice."""
    return HALVES_LOSS if tile.layer.halves and halves is None else 1.0


def _groups(layer: Layer, gpu: Gpu) -> Iterator[Tile]:
    """All ways to cut the weights into products, without strips and stages.

    Each with as many segments as it can have: it can also have fewer.
    """
    octets = ceil_div(layer.group_in, OCTET)
    most_columns = MOST_BLOCK_COLUMNS[layer.parts]
    all_groups = (1, 2) if layer.class_out > OUTPUTS else (1,)
    all_images = (1, layer.phases)[layer.plane_classes > 1 : min(layer.problem.batch, 2)]
    for taps, rows in _taps(layer, gpu):
        # Taps that are further apart than octets of channels make a product of one octet.
        joined = taps == 1 or layer.problem.dilation[1] == 1
        for product_octets in shares(octets) if joined else (1,):
            columns = taps * product_octets * OCTET
            if columns > min(MOST_COLUMNS, most_columns):
                break
            planes = ceil_div(octets, product_octets)
            for channel_groups, images in product(all_groups, all_images):
                needed = ceil_div(planes * rows * channel_groups, CONSUMERS)
                most = min(most_columns // columns, MOST_SEGMENTS, needed)
                yield Tile(layer, channel_groups, rows, taps, product_octets, most, images)


def _taps(layer: Layer, gpu: Gpu) -> Iterator[tuple[int, int]]:
    """Taps of a product and kernel rows of a tile, whose input may fit shared memory."""
    problem, advance = layer.problem, layer.row_advance
    height, width = problem.kernel_size
    for taps in shares(width):
        reach = (BODY_COLUMNS - 1) * problem.stride[1] + (taps - 1) * problem.dilation[1] + 1
        row_bytes = layer.parts * OCTET * reach * 16
        for rows in shares(height):
            if (rows + min(advance, rows)) * row_bytes > gpu.shared_bytes_per_block:
                break
            yield taps, rows


def _with_stages(tile: Tile) -> Iterator[Tile]:
    """With stages of any width."""
    last = tile.layer.operands.output_channels_last
    for columns in PIXEL_STAGE_COLUMNS if last else ROW_STAGE_COLUMNS:
        staged = replace(tile, stage_columns=min(columns, tile.layer.row_columns))
        if staged.grad_boxes or tile.layer.plane_classes == 1:
            yield staged
        if columns >= tile.layer.row_columns:
            break


def _with_strips(tile: Tile) -> Iterator[Tile]:
    """The same, and with strips of them of about equal widths."""
    for staged in _with_stages(tile):
        stages = ceil_div(staged.layer.row_columns, staged.stage_columns)
        wanted = range(1, MOST_STRIP_COLUMNS // staged.stage_columns + 1)
        for strip in sorted({ceil_div(stages, ceil_div(stages, n)) for n in wanted}):
            yield replace(staged, strip_stages=strip)


def _with_steps(tile: Tile, gpu: Gpu) -> Iterator[Tile]:
    """And with workers that go down neighbouring strips in step, where these share lines of memory.

    Each of them has the same part of a walk, and such lines are read once.
    """
    yield tile
    if tile.lines > 1.0 and tile.workers(gpu) >= tile.walks:
        yield replace(tile, in_step=True)


def _constants(tile: Tile, slots_at: int, repairs: bool) -> dict[str, Constant]:
    problem, operands = tile.layer.problem, tile.layer.operands
    split = tile.layer.parts == 2
    sums = tile.segments * tile.columns // 2
    producer = 72 if split else 56 if sums > 148 else 88
    bodies = tile.strip_columns // BODY_COLUMNS
    products = tile.strip_columns // 2
    return {
        **weight_grad_constants(problem, operands),
        "parts": tile.layer.parts,
        "halves": tile.layer.halves,
        "repairs": repairs,
        "ties_to_even": tile.layer.halves or repairs,
        "slots_at": slots_at,
        "vector_input": tile.vector_input,
        "grad_vector": tile.layer.grad_vector,
        "grad_bulk": tile.grad_bulk,
        "grad_boxes": tile.grad_boxes,
        "plane_classes": tile.layer.plane_classes,
        "lead": tile.layer.lead,
        "channel_groups": tile.channel_groups,
        "kernel_rows": tile.kernel_rows,
        "product_taps": tile.product_taps,
        "product_octets": tile.product_octets,
        "segments": tile.segments,
        "phase_images": tile.phase_images,
        "phase_strips": tile.phase_strips,
        "steps": tile.steps,
        "stage_columns": tile.stage_columns,
        "strip_stages": tile.strip_stages,
        "strip_weight": tile.weights[0],
        "last_strip_weight": tile.weights[1],
        "input_stages": tile.input_stages,
        "grad_stages": tile.grad_stages,
        "flush_steps": max(1, FLUSH_ADDITIONS // bodies if split else FLUSH_PRODUCTS // products),
        "batch": 2 if producer == 88 and not tile.layer.halves else 1,
        "producer_registers": producer,
        "consumer_registers": block.consumer_registers(producer),
        "shared_bytes": tile.shared_bytes,
    }


def _why(tile: Tile) -> str:
    halves = " in float16, where the range allows it" if tile.layer.halves else ""
    return (
        f"tensor cores{halves}: {tile.segments} products of {tile.columns} columns a warpgroup, "
        f"{tile.product_taps} taps of {tile.product_octets * OCTET} channels each"
    )
