"""Tiles: what a block computes, how it walks through the images, and its estimated time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Gpu, blocks_at_once
from fastconv.kernels.hopper.block import CONSUMERS, OUTPUTS
from fastconv.kernels.hopper.wgrad_halo.layer import BODY_COLUMNS, Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.limits import WORKSPACE_BYTES

OCTET = 8  # input channels of a core matrix
QUAD = 4  # input columns that are loaded together
# Columns of a stage. Each row of a stage is one copy, which is cheaper the longer it is; pixels of
# a channels-last tensor are long enough in narrow stages.
ROW_STAGE_COLUMNS = (16, 24, 32, 48, 64)
PIXEL_STAGE_COLUMNS = (16,)
MOST_STRIP_COLUMNS = 128
BOX_BYTES = (64, 128)  # bytes of a row that TMA can swizzle
BOX_ALIGNMENT = 1024  # alignment of a swizzled TMA box in shared memory, in bytes
LINE_BYTES = 128  # bytes of a cache line
COUNTER_BYTES = 2048  # two counts of subnormal numbers for each consumer thread
LEAST_BULK_BYTES = 64  # bytes of a row, below which copies by lanes are faster than bulk copies
MOST_WORKSPACE_BYTES = 16 << 30
MOST_GRAD_STAGES = 4
FEWEST_GRAD_STAGES = 2

# Estimated cycles of one SM; a loss or a share is a factor.
MMA_CYCLES = 1.0  # overhead of a wgmma beyond its multiplications
NARROW_CYCLES = 8.0  # extra cycles of a wgmma of small N
INPUT_CYCLES = 4.0  # loading 16 bytes of the input, half of it for each part
FP16_LOAD_LOSS = 1.6  # factor of scaled fp16: twice as many numbers, which are converted
# Time that three loading warps take relative to two, by `scaled_fp16`.
THIRD_WARP = {True: 0.67, False: 0.7}
FP16_LAUNCH_CYCLES = 4e4  # launches that find scales, and those that repair nothing
# Measured time of scaled fp16 over its estimate: 1.1 to 1.3, with asym5x7 in ieee 1.7.
FP16_SHARE = 1.25
STRIDED_LOSS = 2.0  # strides above 2
ROWS_LOSS = 1.35  # steps that load several input rows
COPY_CYCLES = 8.0  # issuing a bulk copy of grad_output
BOX_ROW_CYCLES = 4.0  # for each row of a TMA box
SHIFTED_LOSS = {4: 4.0, 2: 16.0}  # rows whose ends lanes copy, by bytes of an element
PIXEL_COPY_CYCLES = 16.0  # issuing a bulk copy of a single pixel's channels
PIECE_CYCLES = 1.2  # a lane's copy at a row's ends, or of less than 16 bytes
LANE_CYCLES = 5.0  # a lane's copy of 16 bytes inside of a row
BYTES_PER_CYCLE = 15.0  # bytes from memory for each SM if all SMs load
LATENCY_CYCLES = 1500.0  # latency of memory
STEP_CYCLES = 300.0
SAME_LINE_LOSS = 0.25  # cache lines that two strips read at different times
PART_LINE_LOSS = 0.08  # cache lines of which a stage has half
BLOCK_CYCLES = 6000.0  # starting and ending a block


@dataclass(frozen=True)
class Tile:
    """What a block computes, and how it walks through the images."""

    layer: Layer
    channel_groups: int
    kernel_rows: int
    mma_taps: int
    mma_octets: int
    segments: int
    interleaved_images: int
    stage_columns: int = BODY_COLUMNS
    strip_stages: int = 0
    input_stages: int = 0
    grad_stages: int = 0
    in_step: bool = False  # whether workers walk down neighbouring strips in step

    @lazy
    def columns(self) -> int:
        """The N of one wgmma."""
        return self.mma_taps * self.mma_octets * OCTET

    # --- Weights ---------------------------------------------------------------------------------

    @property
    def planes(self) -> int:
        return ceil_div(self.layer.group_in, self.mma_octets * OCTET)

    @lazy
    def block_segments(self) -> int:
        return self.segments * CONSUMERS // self.channel_groups

    @lazy
    def block_planes(self) -> int:
        """The most planes that a block's segments lie in."""
        segments, rows = self.block_segments, self.kernel_rows
        if segments % rows == 0:
            return segments // rows
        return 1 if rows % segments == 0 else (segments - 2) // rows + 2

    @lazy
    def count(self) -> int:
        """Tiles of all weights."""
        height, width = self.layer.problem.kernel_size
        return (
            self.layer.problem.groups
            * self.layer.plane_classes
            * ceil_div(self.layer.class_out, self.channel_groups * OUTPUTS)
            * ceil_div(height, self.kernel_rows)
            * ceil_div(width, self.mma_taps)
            * ceil_div(self.planes * self.kernel_rows, self.block_segments)
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block's accumulators."""
        return CONSUMERS * OUTPUTS * self.segments * self.columns * 4

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the workspace, with the bias's."""
        return self.slot_bytes + CONSUMERS * OUTPUTS * 4 * self.layer.operands.bias_grad

    @property
    def fits_workspace(self) -> bool:
        return self.block_bytes <= WORKSPACE_BYTES

    @lazy
    def most_blocks(self) -> int:
        """The most blocks in the workspace at once, which is larger where weights are."""
        return blocks_at_once(self.count, self.block_bytes, WORKSPACE_BYTES, MOST_WORKSPACE_BYTES)

    # --- Pixels ----------------------------------------------------------------------------------

    @lazy
    def interleaved_strips(self) -> int:
        return self.layer.interleave // self.interleaved_images

    @property
    def new_rows(self) -> int:
        return min(self.layer.row_advance, self.kernel_rows)

    @lazy
    def steps(self) -> int:
        """Steps of a strip of rows."""
        layer = self.layer
        height, width = layer.problem.output_size
        steps = ceil_div(ceil_div(height, layer.row_step), self.interleaved_strips)
        if layer.lead == 0 or self.interleaved_strips == 1:
            return steps
        # Rows of one step must be aligned alike in all strips.
        return round_up(steps, layer.vector // math.gcd(layer.vector, layer.row_step * width))

    @property
    def grad_bulk(self) -> bool:
        """Whether bulk copies bring grad_output, and not copies by lanes."""
        layer = self.layer
        if layer.operands.output_channels_last:
            return layer.grad_vector == layer.vector
        return self.stage_columns * layer.operands.scalar_bytes >= LEAST_BULK_BYTES

    @property
    def grad_boxes(self) -> bool:
        """Whether one TMA box brings a stage of grad_output."""
        layer = self.layer
        return (
            layer.has_boxes
            and self.interleaved_strips == 1
            and self.stage_columns * layer.operands.scalar_bytes in BOX_BYTES
        )

    @lazy
    def strip_columns(self) -> int:
        return self.strip_stages * self.stage_columns

    @lazy
    def strips(self) -> int:
        """Strips of an output row."""
        return ceil_div(self.layer.row_columns, self.strip_columns)

    @property
    def image_groups(self) -> int:
        return ceil_div(self.layer.problem.batch, self.interleaved_images)

    @property
    def walks(self) -> int:
        """Walks down strips of columns, of all images."""
        return self.image_groups * self.layer.row_step * self.strips

    @property
    def all_steps(self) -> int:
        """Steps of all walks, which workers share."""
        return self.walks * self.steps

    # --- Shared memory ---------------------------------------------------------------------------

    @property
    def vector_input(self) -> bool:
        """Whether four consecutive elements of the input, in a row or of a pixel, are aligned."""
        layer = self.layer
        if layer.operands.input_channels_last:
            return layer.operands.aligned and layer.group_in % QUAD == 0
        piece = self.mma_taps * layer.problem.dilation[1]
        one_piece = self.mma_taps >= layer.problem.kernel_size[1]
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
            + (self.mma_taps - 1) * dilation
            + 1,
            QUAD,
        )

    @lazy
    def row_bytes(self) -> int:
        channels = self.block_planes * self.mma_octets * OCTET
        return self.layer.parts * channels * self.tile_columns * 16

    @lazy
    def stage_bytes(self) -> int:
        layer = self.layer
        if layer.operands.output_channels_last:
            pixel = self.channel_groups * OUTPUTS * layer.operands.scalar_bytes
            return layer.vector * (self.stage_columns * pixel + 8 * layer.operands.scalar_bytes)
        units = self.stage_columns // layer.vector + layer.shifted
        units = units if self.grad_boxes else units | 1
        return self.channel_groups * OUTPUTS * layer.interleave * units * 16

    @property
    def shared_bytes(self) -> int:
        return (
            self.input_stages * (self.row_bytes + 16)
            + self.grad_stages * (self.stage_bytes + 24)
            + (BOX_ALIGNMENT if self.grad_boxes else 0)
            + (COUNTER_BYTES if self.layer.scaled_fp16 else 0)
        )

    def fitted(self, budget: int) -> Tile | None:
        """The tile with as many stages as fit ``budget`` bytes of shared memory, or None."""
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
    def mma_cycles(self) -> float:
        narrow = NARROW_CYCLES if self.columns < 48 else 0.0
        return MMA_CYCLES + self.columns / 2 + narrow * (48 - self.columns) / 40

    def multiply_cycles(self, columns: int) -> float:
        """Cycles of an SM's MMAs for this many columns of a step."""
        mmas = CONSUMERS * self.segments * self.layer.mmas * columns / 2
        return mmas * self.mma_cycles

    def grad_cycles(self, columns: int) -> float:
        """Cycles to copy this many columns of a step of grad_output."""
        layer = self.layer
        problem, operands = layer.problem, layer.operands
        channels = min(self.channel_groups * OUTPUTS, layer.class_out)
        stages = ceil_div(columns, self.stage_columns)
        issue, pieces = 0.0, 0.0
        if self.grad_boxes:
            issue = channels * layer.interleave * stages * BOX_ROW_CYCLES
        elif not self.grad_bulk and layer.grad_vector == layer.vector:
            issue = channels * layer.interleave * columns / layer.vector * LANE_CYCLES
        elif not self.grad_bulk:
            pieces = channels * layer.interleave * columns / layer.grad_vector
        elif operands.output_channels_last:
            whole = problem.out_channels == self.channel_groups * OUTPUTS
            pixels = layer.vector * columns * PIXEL_COPY_CYCLES
            issue = layer.vector * stages * COPY_CYCLES if whole else pixels
        else:
            issue = channels * layer.interleave * stages * COPY_CYCLES
            issue *= SHIFTED_LOSS[operands.scalar_bytes] if layer.shifted else 1
            # Lanes copy the ends of a row.
            ends = 2 if layer.shifted else 1 if problem.output_size[1] % layer.vector else 0
            per_unit = layer.vector // math.gcd(layer.grad_vector, problem.output_size[1])
            pieces = channels * layer.interleave * ends * per_unit / self.strips
        bytes_ = channels * layer.interleave * columns * operands.scalar_bytes
        under_way = (self.grad_stages - 1) * self.stage_bytes / LATENCY_CYCLES
        issue += pieces * PIECE_CYCLES
        memory = bytes_ / min(BYTES_PER_CYCLE, under_way)
        if memory > self.multiply_cycles(columns):
            memory *= self.lines
        return max(issue, memory)

    @lazy
    def lines(self) -> float:
        """The factor by which reading takes longer if cache lines are read twice, or in parts."""
        operands = self.layer.operands
        row_bytes = self.layer.problem.output_size[1] * operands.scalar_bytes
        if operands.output_channels_last or row_bytes % LINE_BYTES == 0:
            return 1.0
        stage = LINE_BYTES / (self.stage_columns * operands.scalar_bytes)
        strip = LINE_BYTES / (self.strip_columns * operands.scalar_bytes)
        again = 0.0 if self.in_step else SAME_LINE_LOSS * strip
        return 1.0 + PART_LINE_LOSS * max(stage - 1, 0.0) + again

    def input_cycles(self, columns: int) -> float:
        """Cycles to load a step's new input rows, of this many columns."""
        layer = self.layer
        channels = self.block_planes * self.mma_octets * OCTET
        vectors = channels * columns * self.new_rows * (1 + layer.parts) / 2
        cycles = vectors * INPUT_CYCLES * (1 if self.vector_input else 1.5)
        cycles *= FP16_LOAD_LOSS if layer.scaled_fp16 else 1
        if self.grad_boxes and layer.lead == 0:
            cycles *= THIRD_WARP[layer.scaled_fp16]
        cycles *= ROWS_LOSS if self.new_rows > 1 and not layer.operands.input_channels_last else 1
        return cycles * (STRIDED_LOSS if layer.problem.stride[1] > 2 else 1)

    def step_cycles(self, columns: int) -> float:
        """Cycles of a step of a strip of this many columns."""
        stride = self.layer.problem.stride[1]
        in_columns = self.tile_columns - (self.strip_columns - columns) * stride
        return STEP_CYCLES + limits.together(
            self.multiply_cycles(columns),
            self.input_cycles(in_columns),
            self.grad_cycles(columns),
        )

    @lazy
    def weights(self) -> tuple[int, int]:
        """Costs of a step, in 16 cycles, by which workers share: of a whole strip, and the last."""
        last = self.layer.row_columns - (self.strips - 1) * self.strip_columns
        return (
            math.ceil(self.step_cycles(self.strip_columns) / 16),
            math.ceil(self.step_cycles(last) / 16),
        )

    def cycles(self, gpu: Gpu) -> float:
        """Estimated cycles of the whole gradient."""
        workers = self.workers(gpu)
        waves = ceil_div(self.count * workers, gpu.sm_count)
        rows = self.image_groups * self.layer.row_step * self.steps / workers
        # At the start of a walk, rows that its steps share are loaded at once.
        rows_again = (self.kernel_rows - self.new_rows) / self.new_rows
        again = (1 + rows * self.strips / self.steps) * rows_again / 2
        whole, last = self.weights
        share = FP16_SHARE if self.layer.scaled_fp16 else 1.0
        return self.launch_cycles + waves * (
            BLOCK_CYCLES + 16 * share * (rows * ((self.strips - 1) * whole + last) + again * whole)
        )

    @property
    def launch_cycles(self) -> float:
        """Cycles of the launches that find scales, and of those that have nothing to repair."""
        return FP16_LAUNCH_CYCLES if self.layer.scaled_fp16 else 0.0

    def least_cycles(self, gpu: Gpu, grad_cycles: float) -> float:
        """A lower bound of ``cycles`` with any strips and stages, but for what TMA boxes may save.

        ``grad_cycles`` bounds the cycles to copy a row of grad_output.
        """
        columns = self.layer.row_columns
        return self._least_cycles(
            gpu,
            self.multiply_cycles(columns),
            self.input_cycles(columns * self.layer.problem.stride[1]),
            grad_cycles,
        )

    def least_group_cycles(self, gpu: Gpu, grad_cycles: float) -> float:
        """A lower bound of ``least_cycles`` with this many segments or fewer.

        With fewer segments, tiles are as many or more, and however many they are, together they
        multiply every segment and load every plane. The time of overlapped parts grows with each of
        them.
        """
        columns = self.layer.row_columns
        segments = self.planes * self.kernel_rows
        # Tiles of the same output channels and taps.
        tiles = ceil_div(segments, self.block_segments)
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
        """The lower bound for a tile's row whose parts take these cycles."""
        layer = self.layer
        rows = self.image_groups * layer.row_step * self.steps
        row = ceil_div(layer.row_columns, MOST_STRIP_COLUMNS) * STEP_CYCLES + limits.together(
            multiply, input_, grad
        )
        begun = self.launch_cycles + max(self.count / gpu.sm_count, 1.0) * BLOCK_CYCLES
        share = FP16_SHARE if layer.scaled_fp16 else 1.0
        return begun + share * self.count * rows * row / gpu.sm_count

    @property
    def least_grad_cycles(self) -> float:
        """A lower bound of the cycles to copy a row of grad_output, with any stages."""
        most = replace(self, grad_stages=MOST_GRAD_STAGES, in_step=True)
        columns = self.layer.row_columns
        stages = (
            replace(one, strip_stages=ceil_div(columns, one.stage_columns))
            for one in with_stages(most)
        )
        return min((one.grad_cycles(columns) for one in stages), default=math.inf)

    def workers(self, gpu: Gpu) -> int:
        """Blocks that share the pixels: as many as leave few SMs idle at the end."""
        count, sm_count = self.count, gpu.sm_count
        steps = self.all_steps
        most = max(min(self.most_blocks // min(count, self.most_blocks), steps), 1)

        def cost(workers: int) -> float:
            waves = ceil_div(count * workers, sm_count)
            return waves * (steps / workers + self.kernel_rows)

        # The candidates fill one, two or three waves.
        best = min({min(max(n * sm_count // count, 1), most) for n in (1, 2, 3)}, key=cost)
        return best // self.walks * self.walks if self.in_step else best


def with_stages(tile: Tile) -> Iterator[Tile]:
    """The tile with stages of every width."""
    last = tile.layer.operands.output_channels_last
    for columns in PIXEL_STAGE_COLUMNS if last else ROW_STAGE_COLUMNS:
        staged = replace(tile, stage_columns=min(columns, tile.layer.row_columns))
        if staged.grad_boxes or tile.layer.plane_classes == 1:
            yield staged
        if columns >= tile.layer.row_columns:
            break


def with_strips(tile: Tile) -> Iterator[Tile]:
    """The tile with stages of every width, in strips of about equal widths."""
    for staged in with_stages(tile):
        stages = ceil_div(staged.layer.row_columns, staged.stage_columns)
        wanted = range(1, MOST_STRIP_COLUMNS // staged.stage_columns + 1)
        for strip in sorted({ceil_div(stages, ceil_div(stages, n)) for n in wanted}):
            yield replace(staged, strip_stages=strip)


def with_steps(tile: Tile, gpu: Gpu) -> Iterator[Tile]:
    """The tile, and also with workers that walk down strips in step, if strips share cache lines.

    Each of those workers has the same part of a walk, so that shared cache lines are read once.
    """
    yield tile
    if tile.lines > 1.0 and tile.workers(gpu) >= tile.walks:
        yield replace(tile, in_step=True)
