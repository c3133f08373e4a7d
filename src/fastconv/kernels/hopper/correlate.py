"""Plans forward convolutions and input gradients with ``correlate.cuh``.

The rules: of all tiles that fit shared memory, the one whose slowest part (products, loads or
stores) is estimated to take least; unless measurements have shown another to be faster (see
``tuned``). What decides the order of a sum (chunks of channels, taps between two flushes, stacked
rows, rolling) depends on the layer alone, never on the batch, so that an image gives the same bits
in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, product
from typing import NamedTuple

from fastconv.kernels.arithmetic import ceil_div, divisors, round_up
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    geometry_constants,
)
from fastconv.kernels.hopper import limits, tuned
from fastconv.kernels.hopper.limits import CONSUMERS, OUTPUTS, THREADS
from fastconv.problem import Problem

PACK_THREADS = 256
MOST_PACK_BLOCKS = 4096
LOADER_WARPS = 3
PRODUCT_BYTES = OUTPUTS * 32

# A chunk should hold this many products for each pair of barriers.
CHUNK_PRODUCTS = 8
MOST_K_STEPS = 4
# Products of a stage of weights, about. Split numbers' sums are flushed after each: the error of
# the tensor core's accumulation grows with its length.
STAGE_PRODUCTS = 4
SHORT_SUM = 128  # terms
SHORT_SUM_PRODUCTS = 2  # the same for short sums, which may have a few large terms only
LONG_SUM = 240  # products
LONG_SUM_PRODUCTS = 6  # the same for long sums, whose totals take more instructions
MOST_PIXELS = {1: 256, 2: 168}  # by parts
MOST_STAGE_PRODUCTS = 8
MOST_WEIGHT_STAGES = 10
ENOUGH_WEIGHT_STAGES = 6
MOST_RESIDENT_BYTES = 100 * 1024
WEIGHTS_LATENCY = 1500.0  # cycles

# Estimated cycles of one processor.
STORE_BYTES = 15.0  # a cycle
SHARED_SECTOR_BYTES = 7.0  # where neighbouring tiles write the same 32 bytes
SINGLE_STORE_BYTES = 6.0  # where rows are not aligned alike
STRIDED_STORE_BYTES = 3.0  # where a store's elements are not neighbours: parts of sectors
# To load 16 bytes of channels, by bytes of an element: as vectors, in pieces, pixel by pixel.
LOAD_CYCLES = {4: (2.8, 0.7, 3.2), 2: (2.5, 0.9, 5.0)}
PIECE_CYCLES = {4: 450.0, 2: 600.0}  # for the bulk copies of a piece, be they short or long
RAW_SLOTS = (0, 1, 2)  # pieces that a loading warp has under way, 0 for pixel by pixel
ONE_SLOT_LOSS = 1.25  # a warp with one waits for it
WEIGHT_BYTES = 24.0
OVERLAP_LOSS = 0.25
SEGMENT_COST = 0.3  # of a tile, for each row that is loaded again
MOST_SEGMENT = 64
EXPLAINED = 5  # tiles
TILE_CYCLES = 1500.0  # to start and to end a tile
SHARED_BYTES = 128.0  # a cycle that the tensor cores read
# Multiply-adds a cycle: of the tensor cores, and how many must count for them to be worth it.
TENSOR_PRODUCTS = {4: 1024.0, 2: 2048.0}
LEAST_PRODUCTS = 64.0
MOST_PHASES = 16  # of a strided input gradient: each is launches and kernels of its own
# Of a pass, for each of its layers' launches. It is more of a small batch, which must not decide.
LAYER_COST = 0.05


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    return _chosen(_plans(_forward_ways(problem, operands), gpu))


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: ``input`` is the output's gradient, ``output`` the input's.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    return _chosen(_plans(_input_grad_ways(problem, operands), gpu))


def alternatives(
    direction: str, problem: Problem, operands: Operands, gpu: Gpu, most: int
) -> list[Plan]:
    """The plans for a pass that the rules like best. All give the same bits.

    Raises:
        Declined: there are none.
    """
    ways = {"forward": _forward_ways, "input_grad": _input_grad_ways}
    if direction not in ways:
        raise Declined(direction)
    return list(islice(_plans(ways[direction](problem, operands), gpu), most))


def _layer(problem: Problem, operands: Operands) -> Layer:
    return Layer(
        operands,
        False,
        problem.batch,
        problem.groups,
        problem.in_channels // problem.groups,
        problem.out_channels // problem.groups,
        problem.input_size,
        problem.output_size,
        problem.kernel_size,
        problem.stride,
        problem.dilation,
        (problem.padding.top, problem.padding.left),
        problem.kernel_size,
        problem.output_size,
    )


def _forward_ways(problem: Problem, operands: Operands) -> list[list[Layer]]:
    layer = _layer(problem, operands)
    return [[min(layer, _folded(layer), key=lambda one: one.steps * one.taps)]]


def _input_grad_ways(problem: Problem, operands: Operands) -> list[list[Layer]]:
    """Lists of layers that together write the gradient, one for each phase of the stride.

    Where rows of pixels are neighbours in memory, also one for two phases of columns at once.
    """
    rows, columns = (_phases(problem, axis) for axis in (0, 1))
    count = len(rows) * len(columns)
    if count > MOST_PHASES:
        raise Declined(f"input gradients of {count} phases, more than {MOST_PHASES}")
    whole = None if operands.output_channels_last else _interleaved(columns)
    ways = [columns] if whole is None else [columns, [whole]]
    layer = _layer(problem, operands)
    return [[_phase_layer(layer, *axes) for axes in product(rows, way)] for way in ways]


def _phase_layer(layer: Layer, row: Phase, column: Phase) -> Layer:
    """The other way round: channels and sizes change places, and what padding left out is added."""
    return replace(
        layer,
        transposed=True,
        group_in=layer.group_out,
        group_out=layer.group_in,
        in_size=layer.out_size,
        out_size=(row.size, column.size),
        kernel=(row.taps, column.taps),
        stride=(1, 1),
        dilation=(row.dilation, column.dilation),
        padding=(row.padding, column.padding),
        weight_kernel=(row.weight_taps, column.weight_taps),
        image_size=layer.in_size,
        placing=(row.placing, column.placing),
    )


class Placing(NamedTuple):
    """Along one axis, where a layer's positions and taps lie among all; by default, they are all.

    Position q is written at ``step * q + at``; what else is from ``step * q + begin`` on, before
    ``step * q + end``, is reached by no tap and cleared with it. A transposed layer's first tap is
    the kernel's ``last_tap``, the next is ``tap_step`` before it. With ``sums`` = 2, both positions
    of a step of 2 are computed: ``at`` 0, and ``at`` 1 with the tap after.
    """

    step: int = 1
    at: int = 0
    begin: int = 0
    end: int = 1
    last_tap: int = 0
    tap_step: int = 1
    sums: int = 1
    interleaved: bool = False  # whether all columns of a step are stored together


class Phase(NamedTuple):
    """Along one axis, every stride-th position of an input gradient: a convolution of stride 1."""

    placing: Placing
    size: int
    taps: int
    weight_taps: int
    dilation: int
    padding: int


def _phases(problem: Problem, axis: int) -> list[Phase]:
    """Those that some tap reaches; together they write all positions.

    Position i = stride * q + at adds up the taps k for which the stride divides i + padding -
    dilation * k, which is then stride times the output's position. The next such tap is stride /
    gcd further on, and reads dilation / gcd positions before.
    """
    size, kernel = problem.input_size[axis], problem.kernel_size[axis]
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    before = (problem.padding.top, problem.padding.left)[axis]
    step = dilation // math.gcd(stride, dilation)
    taps_of = [
        [tap for tap in range(kernel) if (at + before - tap * dilation) % stride == 0]
        for at in range(stride)
    ]
    reached = [at for at, taps in enumerate(taps_of) if taps]
    # Each clears what lies before it, the last also what comes after.
    borders = [0, *(at + 1 for at in reached[:-1]), stride]
    phases = []
    for at, begin, end in zip(reached, borders, borders[1:], strict=False):
        first, last, count = taps_of[at][0], taps_of[at][-1], len(taps_of[at])
        placing = Placing(stride, at, begin, end, last, stride * step // dilation)
        first_read = (at + before - first * dilation) // stride  # where q = 0
        padding = (count - 1) * step - first_read
        length = ceil_div(size - begin, stride)
        phases.append(Phase(placing, length, count, count, step, padding))
    return [phase for phase in phases if phase.size > 0]


def _interleaved(phases: list[Phase]) -> Phase | None:
    """All phases of columns of stride 2 as one, whose rows are whole; None if there is none."""
    first, last = phases[0], phases[-1]
    begin, end = first.placing.begin, last.placing.end
    if first.placing.step != 2 or (begin, end) != (0, 2):
        return None
    if first is last:
        return first._replace(placing=first.placing._replace(interleaved=True))
    if first.dilation > 1:
        return None  # they do not read the same columns
    padding = max(first.padding, last.padding)
    taps = padding + max(phase.taps - phase.padding for phase in phases)
    last_tap = first.placing.last_tap + 2 * (padding - first.padding)
    placing = Placing(2, 0, 0, 2, last_tap, 2, 2, True)
    return Phase(placing, first.size, taps, first.taps + last.taps, 1, padding)


@dataclass(frozen=True)
class Layer:
    """A forward convolution, maybe that which an input gradient is; ``padding`` is top and left.

    With ``folding``, channels, kernel and stride are those after folding (see ``correlate.cuh``),
    sizes and padding those of the tensors. ``weight_kernel`` are the weight's taps that it uses,
    ``image_size`` is the size of the tensor that it writes, and ``placing`` where in both they lie.
    """

    operands: Operands
    transposed: bool
    batch: int
    groups: int
    group_in: int
    group_out: int
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int]
    weight_kernel: tuple[int, int]
    image_size: tuple[int, int]
    folding: tuple[int, int] = (1, 1)
    placing: tuple[Placing, Placing] = (Placing(), Placing())

    @property
    def vector(self) -> int:
        return self.operands.vector

    @property
    def parts(self) -> int:
        return 2 if self.operands.scalar == "float" and self.operands.precision == "ieee" else 1

    @property
    def vector_loads(self) -> bool:
        """Whether 16 bytes of channels are neighbours in memory, and aligned."""
        operands = self.operands
        return (
            operands.input_channels_last
            and operands.aligned
            and self.group_in % operands.vector == 0
            and self.folding == (1, 1)
        )

    @property
    def copied(self) -> bool:
        """Whether these are copied as they are, asynchronously."""
        return self.vector_loads and self.operands.scalar_bytes == 2

    @property
    def lines(self) -> bool:
        """Whether a tile's rows are pieces of memory, which bulk copies can fetch."""
        operands = self.operands
        return (
            not operands.input_channels_last
            and operands.aligned
            and self.stride[1] == 1
            and self.folding == (1, 1)
        )

    @property
    def interleave(self) -> int:
        """Elements of a stored row for each pixel."""
        return self.placing[1].step if self.placing[1].interleaved else 1

    @property
    def column_sums(self) -> int:
        return self.placing[1].sums

    @property
    def stored_width(self) -> int:
        return self.image_size[1] if self.interleave > 1 else self.out_size[1]

    @property
    def written(self) -> float:
        """Elements that are written for each sum: itself, and zeros around it."""
        rows, columns = self.placing
        return (rows.end - rows.begin) * (columns.end - columns.begin) / columns.sums

    @property
    def strided_stores(self) -> bool:
        """Whether a stored row's elements are no neighbours in memory."""
        columns = self.placing[1]
        return columns.step > self.interleave and not self.operands.output_channels_last

    @property
    def whole_rows(self) -> bool:
        """Whether bulk copies can store a row: its elements are neighbours in memory."""
        operands = self.operands
        return operands.aligned and not (operands.output_channels_last or self.strided_stores)

    @property
    def terms(self) -> float:
        """Of a sum."""
        channels = self.group_in // (self.folding[0] * self.folding[1])
        return channels * self.weight_kernel[0] * self.weight_kernel[1] / self.column_sums

    @property
    def ties_to_even(self) -> bool:
        """How TF32 rounds numbers in the middle between two: as cuDNN does.

        Its kernels for pointwise layers round them to even, the others away from zero.
        """
        one = (1, 1)
        whole = self.placing == (Placing(), Placing())
        return self.weight_kernel == self.kernel == self.stride == one and whole

    @property
    def low_products(self) -> bool:
        """Whether the products of low parts count: in short sums, which round little themselves."""
        return self.parts == 2 and self.terms <= SHORT_SUM

    @property
    def compensated(self) -> bool:
        """Whether totals keep what rounding loses: of long sums, or of short and exact ones."""
        return self.low_products or (self.parts == 2 and self.steps * self.taps > LONG_SUM)

    @property
    def products(self) -> int:
        return 1 if self.parts == 1 else 4 if self.low_products else 3

    @property
    def most_pixels(self) -> int:
        """Of a product: sums, and their totals, have to fit a thread's registers."""
        return 128 if self.compensated else MOST_PIXELS[self.parts]

    @property
    def row_phases(self) -> int:
        return self.stride[0] // math.gcd(self.stride[0], self.dilation[0])

    @property
    def row_step(self) -> int:
        return self.dilation[0] // math.gcd(self.stride[0], self.dilation[0])

    @property
    def column_phases(self) -> int:
        return self.stride[1] // math.gcd(self.stride[1], self.dilation[1])

    @property
    def column_halo(self) -> int:
        step = self.dilation[1] // math.gcd(self.stride[1], self.dilation[1])
        return (self.kernel[1] - 1) * step // self.column_phases

    @property
    def slots(self) -> int:
        return min(self.kernel[0], self.row_phases) * min(self.kernel[1], self.column_phases)

    @cached_property
    def stack(self) -> int:
        """Output rows in a product's 64 rows."""
        if self.row_phases > 1:
            return 1
        height = self.kernel[0]
        rows = self.group_out * self.column_sums
        choices = [n for n in (1, 2, 4, 8) if n * rows <= OUTPUTS and n * self.column_sums <= 8]
        return max(choices or [1], key=lambda n: n * height / (height + n - 1))

    @property
    def product_channels(self) -> int:
        """Output channels of a product."""
        return OUTPUTS // (self.stack * self.column_sums)

    @property
    def tap_rows(self) -> int:
        return self.kernel[0] + self.stack - 1

    @property
    def taps(self) -> int:
        return self.tap_rows * self.kernel[1]

    @property
    def steps(self) -> int:
        """Of 32 bytes of channels, that the products of a tap need."""
        return ceil_div(self.group_in, 2 * self.vector)

    @cached_property
    def rolling(self) -> bool:
        """Whether blocks walk down the image: all channels of a few rows have to fit."""
        return (
            self.kernel[0] > 1
            and self.row_phases == 1
            and self.steps <= 2
            and 2 * (self.out_size[1] + self.column_halo) > MOST_PIXELS[self.parts]
        )

    @cached_property
    def k_steps(self) -> int:
        if self.rolling:
            return self.steps
        # Neighbouring channels are loaded in whole sectors.
        fewest = 2 if self.vector_loads else 1
        most = SHORT_SUM_PRODUCTS if self.low_products else MOST_K_STEPS
        return min(self.steps, most, max(fewest, ceil_div(CHUNK_PRODUCTS, self.taps)))

    @property
    def chunks(self) -> int:
        return ceil_div(self.steps, self.k_steps)

    @cached_property
    def stage_taps(self) -> int:
        products = STAGE_PRODUCTS
        if self.parts == 2:
            products = LONG_SUM_PRODUCTS if self.compensated else products
            products = SHORT_SUM_PRODUCTS if self.low_products else products
        wanted = products / self.k_steps
        if self.parts == 2 and self.rolling:
            # One consumer should multiply while the other stores, and they can drift apart by no
            # more than the stages there are.
            wanted = 1
        choices = [n for n in divisors(self.taps) if n * self.k_steps <= MOST_STAGE_PRODUCTS]
        return min(choices or [1], key=lambda taps: abs(math.log(taps / wanted)))

    @property
    def tensor_share(self) -> float:
        """The share of the tensor cores' products that count, but for the ends of tiles."""
        channels = self.product_channels
        outputs = self.group_out / (ceil_div(self.group_out, channels) * channels)
        return outputs * self.terms / (self.steps * 2 * self.vector * self.taps)


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and what of it is in shared memory at the same time."""

    layer: Layer
    channel_groups: int
    rows: int
    columns: int
    lead: int = 0
    raw_slots: int = 0
    pass_pixels: int = 0
    buffers: int = 1
    input_stages: int = 0
    weight_stages: int = 0

    @property
    def name(self) -> str:
        """Tells it from all other tiles of its layer."""
        height, width = self.layer.out_size
        loads = f"{self.raw_slots} staged" if self.staged else "pixels"
        return (
            f"{height}x{width} in {self.channel_groups}x{self.rows}x{self.columns}+{self.lead} "
            f"{loads}"
        )

    @cached_property
    def pixels(self) -> int:
        return round_up((self.rows - 1) * self.pitch + self.lead + self.columns, 8)

    @property
    def tile_rows(self) -> int:
        """Output rows of both consumers."""
        return CONSUMERS // self.channel_groups * self.rows * self.layer.stack

    @property
    def halo_rows(self) -> int:
        return self.tile_rows + (self.layer.kernel[0] - 1) // self.layer.row_phases

    @property
    def stage_rows(self) -> int:
        return 1 if self.layer.rolling else self.halo_rows

    @property
    def pitch(self) -> int:
        """Pixels from one row to the next, in shared memory."""
        vector, interleave = self.layer.vector, self.layer.interleave
        pitch = self.lead + self.columns + self.layer.column_halo
        whole = self.rows > 1 and interleave * self.columns % vector == 0
        return round_up(pitch, vector // interleave) if whole else pitch

    @property
    def staged(self) -> bool:
        """Whether input goes through shared memory as it is, on its way in."""
        return self.raw_slots > 0

    @property
    def raw_bytes(self) -> int:
        """Of a piece: a line of 32 bytes' channels."""
        layer = self.layer
        pixels = min(self.pitch, layer.in_size[1])
        return 32 * round_up(pixels + layer.vector - 1, layer.vector)

    @property
    def plane_padding(self) -> int:
        """Pixels between planes, so that lanes that write a pixel's planes hit different banks."""
        if not self.layer.vector_loads:
            return 0
        wanted = {2: 4, 4: 2, 8: 1}.get(2 * self.layer.k_steps, 2)
        return (wanted - self.layer.slots * self.stage_rows * self.pitch) % 8

    @property
    def input_bytes(self) -> int:
        layer = self.layer
        plane = layer.slots * self.stage_rows * self.pitch + self.plane_padding
        reach = self.pixels + layer.column_halo
        slack = max(reach - self.rows * self.pitch, 0)
        return 16 * (layer.parts * 2 * layer.k_steps * plane + slack)

    @property
    def units(self) -> int:
        """What the loading threads share of a stage, one part of it."""
        layer = self.layer
        vectors = (
            2 * layer.k_steps * (layer.slots * self.stage_rows * self.pitch + self.plane_padding)
        )
        return vectors // (1 if layer.vector_loads else 2)

    @property
    def tap_bytes(self) -> int:
        return self.layer.k_steps * self.layer.parts * self.channel_groups * PRODUCT_BYTES

    @property
    def weight_bytes(self) -> int:
        return self.layer.stage_taps * self.tap_bytes

    @property
    def all_weight_stages(self) -> int:
        """Of one group of output channels."""
        return self.layer.chunks * self.layer.taps // self.layer.stage_taps

    @property
    def fewest_weight_stages(self) -> int:
        """So many that a stage arrives while the others are multiplied."""
        layer = self.layer
        cycles = CONSUMERS * layer.stage_taps * layer.k_steps * layer.products * self.pixels / 2
        stages = min(1 + math.ceil(WEIGHTS_LATENCY / cycles), ENOUGH_WEIGHT_STAGES)
        return min(stages, self.all_weight_stages)

    @property
    def most_weight_stages(self) -> int:
        """All of them where they stay; else what is enough."""
        if self.weight_bytes * self.all_weight_stages <= MOST_RESIDENT_BYTES:
            return self.all_weight_stages
        return min(MOST_WEIGHT_STAGES, self.all_weight_stages)

    @property
    def output_groups(self) -> int:
        return ceil_div(self.layer.group_out, self.channel_groups * self.layer.product_channels)

    @property
    def resident(self) -> bool:
        return (
            self.output_groups * self.layer.groups == 1
            and self.weight_stages == self.all_weight_stages
        )

    @property
    def staging_bytes(self) -> int:
        """Of each consumer."""
        operands, vector = self.layer.operands, self.layer.vector
        if operands.output_channels_last:
            elements = self.pass_pixels * (OUTPUTS + vector)
        else:
            row = self.layer.interleave * self.pass_pixels
            elements = 4 * self.buffers * 8 * (round_up(row + vector - 8, 16) + 8)
        return elements * operands.scalar_bytes

    @property
    def shared_bytes(self) -> int:
        return (
            self.input_stages * self.input_bytes
            + self.weight_stages * self.weight_bytes
            + CONSUMERS * self.staging_bytes
            + LOADER_WARPS * self.raw_slots * (self.raw_bytes + 8)
            + 16 * (self.input_stages + self.weight_stages)
        )

    @property
    def strips(self) -> int:
        return ceil_div(self.layer.out_size[1] + max(self.lead - 1, 0), self.columns)

    @property
    def row_tiles(self) -> int:
        return ceil_div(ceil_div(self.layer.out_size[0], self.layer.row_step), self.tile_rows)

    @property
    def image_tiles(self) -> int:
        layer = self.layer
        return self.output_groups * self.strips * self.row_tiles * layer.row_step * layer.groups

    @property
    def tiles(self) -> int:
        return self.image_tiles * self.layer.batch

    @property
    def bulk_stores(self) -> bool:
        """Whether rows are stored by bulk copies: single rows, or rows aligned alike."""
        vector = self.layer.vector
        pitch = self.layer.interleave * self.pitch
        alike = self.layer.stored_width % vector == pitch % vector == 0
        return self.layer.whole_rows and (self.rows == 1 or alike)

    @property
    def shares_sectors(self) -> bool:
        """Whether neighbouring strips write to the same 32 bytes."""
        operands = self.layer.operands
        if self.strips == 1 or self.lead or operands.output_channels_last:
            return False
        sector = 32 // operands.scalar_bytes
        columns = self.layer.interleave * self.columns
        return columns % sector != 0 or self.layer.stored_width % sector != 0

    @cached_property
    def work(self) -> dict[str, float]:
        """What a tile takes a processor, in cycles, if there were nothing else to do."""
        layer = self.layer
        product = max(self.pixels / 2, (PRODUCT_BYTES + 32 * self.pixels) / SHARED_BYTES)
        steps = layer.chunks * layer.taps * layer.k_steps * layer.products
        rows_loaded = self.tile_rows if layer.rolling else self.halo_rows
        vectors = 2 * layer.steps * layer.slots * rows_loaded * self.pitch
        size = layer.operands.scalar_bytes
        kind = 0 if layer.vector_loads else 1 if self.staged else 2
        loads = vectors * (LOAD_CYCLES[size][kind] + 0.8 * (layer.parts - 1))
        if self.staged:
            loads += vectors / (2 * self.pitch) * PIECE_CYCLES[size]
            loads *= ONE_SLOT_LOSS if self.raw_slots == 1 else 1
        outputs = CONSUMERS * OUTPUTS * self.rows * self.columns * layer.written
        stored = STORE_BYTES
        if layer.strided_stores:
            stored = STRIDED_STORE_BYTES
        elif not (self.bulk_stores or layer.operands.output_channels_last):
            stored = SINGLE_STORE_BYTES
        elif self.shares_sectors:
            stored = SHARED_SECTOR_BYTES
        weights = self.all_weight_stages * self.weight_bytes
        return {
            "products": CONSUMERS * steps * product,
            "loads": loads,
            "stores": outputs * layer.operands.scalar_bytes / stored,
            "weights": 0.0 if self.resident else weights / WEIGHT_BYTES,
        }

    @property
    def tile_cycles(self) -> float:
        parts = self.work.values()
        # They go on at the same time, but not quite without getting into each other's way.
        return TILE_CYCLES + max(parts) + OVERLAP_LOSS * (sum(parts) - max(parts))

    def cycles(self, processors: int) -> float:
        """What the whole layer takes, estimated."""
        return ceil_div(self.tiles, processors) * self.tile_cycles

    def fitted(self, budget: int) -> Tile | None:
        """With as many stages as fit ``budget`` bytes of shared memory; None if too few do.

        First of all weights, so that they arrive in time; then sums on their way out, in as few
        passes as possible; then more input. But asynchronous copies can be under way while others
        are waited for only if there are three stages for them.
        """
        fewest_inputs = self.halo_rows + self.tile_rows if self.layer.rolling else 2
        more_inputs = 2 * self.tile_rows + 2 if self.layer.rolling else 1
        passes = ((1, 2), (1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1))
        choices = [(fewest_inputs, *choice) for choice in passes]
        if self.layer.copied and not self.layer.rolling:
            choices = [(3, *choice) for choice in passes[:4]] + choices
        for inputs, count, buffers in choices:
            if buffers == self.layer.column_sums == 2:
                continue  # sums leave in one piece, and by the next tile it is gone
            tile = replace(
                self,
                pass_pixels=round_up(ceil_div(self.pixels, count), 16),
                buffers=buffers,
                input_stages=inputs,
            )
            stages = (budget - tile.shared_bytes) // (self.weight_bytes + 16)
            if stages < self.fewest_weight_stages:
                continue
            tile = replace(tile, weight_stages=min(stages, self.most_weight_stages))
            more = (budget - tile.shared_bytes) // (self.input_bytes + 16)
            most = fewest_inputs + more_inputs
            return replace(tile, input_stages=min(inputs + more, max(most, inputs)))
        return None


def _folded(layer: Layer) -> Layer:
    """The layer with its strides' phases as channels, if that is possible."""
    rows, columns = (
        stride if stride <= kernel and dilation == 1 else 1
        for stride, kernel, dilation in zip(layer.stride, layer.kernel, layer.dilation, strict=True)
    )
    return replace(
        layer,
        group_in=layer.group_in * rows * columns,
        kernel=(ceil_div(layer.kernel[0], rows), ceil_div(layer.kernel[1], columns)),
        stride=(layer.stride[0] // rows, layer.stride[1] // columns),
        folding=(rows, columns),
    )


def _views(layer: Layer) -> list[Layer]:
    """The same layer, and other ways to see it: a pointwise one has no rows to respect."""
    views = [layer]
    if layer.kernel == layer.stride == (1, 1) and layer.padding == (0, 0):
        pixels = layer.in_size[0] * layer.in_size[1]
        if layer.in_size == layer.out_size == layer.image_size:
            sizes = [(rows, pixels // rows) for rows in (1, 2) if pixels % rows == 0]
            views += [
                replace(layer, in_size=size, out_size=size, image_size=size) for size in sizes
            ]
    return views


def _check(layers: list[Layer], gpu: Gpu) -> None:
    layer = layers[0]
    channels = (layer.group_in // (layer.folding[0] * layer.folding[1]), layer.group_out)
    operands = layer.operands
    limits.check(operands, gpu, layer.groups, channels, layer.in_size, layer.image_size)
    terms = sum(layer.terms for layer in layers)
    multiplied = sum(layer.terms / layer.tensor_share * layer.products for layer in layers)
    if TENSOR_PRODUCTS[operands.scalar_bytes] * terms / multiplied < LEAST_PRODUCTS:
        share = _tensor_share(layers)
        raise Declined(f"so few channels that {share:.0%} of the products would count")


def _tensor_share(layers: list[Layer]) -> float:
    """Of layers that have about equally many outputs."""
    terms = sum(layer.terms for layer in layers)
    return terms / sum(layer.terms / layer.tensor_share for layer in layers)


def _plans(ways: list[list[Layer]], gpu: Gpu) -> Iterator[Plan]:
    """For every tile that fits, the best first; of several layers, each one's next best at once."""
    layers, tiles = _best_way(ways, gpu)
    explanation = tuple(line for of_layer in tiles for line in _explanation(of_layer, gpu))
    key = _key(layers, gpu)
    for rank in range(max(map(len, tiles))):
        chosen = [of_layer[min(rank, len(of_layer) - 1)] for of_layer in tiles]
        pairs, packed = zip(*(_launches(tile, gpu) for tile in chosen), strict=True)
        yield Plan(
            tuple(chain.from_iterable(pairs)),
            max(packed),  # a layer's launches are done with it when the next one's begin
            "hopper",
            _why(chosen),
            explanation,
            key,
            " + ".join(tile.name for tile in chosen),
        )


def _best_way(ways: list[list[Layer]], gpu: Gpu) -> tuple[list[Layer], list[list[Tile]]]:
    """The layers of the way that takes an image the least, and each one's tiles, the best first.

    Sums differ between ways, so the batch must not decide.
    """
    possible, reasons = [], []
    for layers in ways:
        try:
            _check(layers, gpu)
            possible.append((layers, [_tiles(_views(layer), gpu) for layer in layers]))
        except Declined as reason:
            reasons.append(reason)
    if not possible:
        raise reasons[0]

    def cost(way: tuple[list[Layer], list[list[Tile]]]) -> float:
        layers, tiles = way
        fastest = (min(one.image_tiles * one.tile_cycles for one in each) for each in tiles)
        return sum(fastest) * (1 + LAYER_COST * len(layers))

    return min(possible, key=cost)


def _why(tiles: list[Tile]) -> str:
    shapes = dict.fromkeys(
        f"{tile.rows} rows of {tile.columns} pixels a warpgroup, in products of {tile.pixels}"
        for tile in tiles
    )
    phases = f" in {len(tiles)} phases" if len(tiles) > 1 else ""
    share = _tensor_share([tile.layer for tile in tiles])
    return f"tensor cores{phases}: {', '.join(shapes)}; {share:.0%} of the products count"


def _chosen(plans: Iterator[Plan]) -> Plan:
    """The plan that was measured to be best, if this layer was measured; else the rules' first."""
    first = next(plans)
    measured = tuned.choice(first.key)
    for plan in chain([first], plans) if measured else ():
        if plan.choice == measured:
            return replace(plan, why=f"{plan.why}; measured")
    return first


def _launches(tile: Tile, gpu: Gpu) -> tuple[tuple[Launch, Launch], int]:
    layer = tile.layer
    items = tile.tiles if not layer.rolling else _items(tile, gpu)
    if max(items, tile.tiles) >= 2**31:
        raise Declined("more than 2^31 tiles")
    packed = layer.groups * tile.output_groups * layer.chunks * layer.taps * tile.tap_bytes
    if packed // 16 >= 2**31:
        raise Declined(f"{packed} bytes of packed weights")
    constants = tuple(_constants(tile, gpu).items())
    pack = Launch(
        Kernel("hopper/correlate.cuh", "pack", constants),
        (min(ceil_div(packed // 16, PACK_THREADS), MOST_PACK_BLOCKS), 1, 1),
        PACK_THREADS,
        0,
        ("weight", "scratch"),
    )
    correlate = Launch(
        Kernel("hopper/correlate.cuh", "correlate", constants),
        (min(items, gpu.processors), 1, 1),
        THREADS,
        tile.shared_bytes,
        ("input", "scratch", "bias", "output", layer.batch),
    )
    return (pack, correlate), packed


def _key(layers: list[Layer], gpu: Gpu) -> str:
    """What a measured choice holds for: a layer or its phases, its tensors, and a GPU."""
    layer, operands = layers[0], layers[0].operands

    def size(values: tuple[int, int]) -> str:
        return "x".join(map(str, values))

    def written(layer: Layer) -> str:
        steps = (layer.placing[0].step, layer.placing[1].step)
        words = (
            f"{layer.group_out}x{size(layer.out_size)}",
            *((f"step={size(steps)}",) if steps != (1, 1) else ()),
            f"kernel={size(layer.weight_kernel)} stride={size(layer.stride)}",
            f"dilation={size(layer.dilation)} padding={size(layer.padding)}",
            f"fold={size(layer.folding)}",
        )
        return " ".join(words)

    words = (
        f"{gpu.architecture}/{gpu.processors}",
        "input_grad" if layer.transposed else "forward",
        operands.scalar.removeprefix("fastconv::"),
        operands.precision if operands.scalar == "float" else "-",
        "".join("NHWC" if last else "NCHW" for last in _channels_last(operands)),
        f"{layer.batch}x{layer.groups}x{layer.group_in}x{size(layer.in_size)}",
        " + ".join(map(written, layers)),
        "aligned" if operands.aligned else "unaligned",
    )
    return " ".join(words)


def _channels_last(operands: Operands) -> tuple[bool, bool]:
    return operands.input_channels_last, operands.output_channels_last


def _explanation(tiles: list[Tile], gpu: Gpu) -> Iterator[str]:
    rows, columns = tiles[0].layer.placing
    phase = "" if rows.step == columns.step == 1 else f"phase {rows.at}, {columns.at}: "
    yield f"{phase}{len(tiles)} tiles fit; the cheapest, in cycles:"
    for tile in tiles[:EXPLAINED]:
        yield _explain(tile, gpu)


def _explain(tile: Tile, gpu: Gpu) -> str:
    work = ", ".join(f"{name} {cycles:.0f}" for name, cycles in tile.work.items())
    return (
        f"{tile.cycles(gpu.processors):.3g}: {tile.channel_groups * OUTPUTS} channels x "
        f"{tile.rows} rows x {tile.columns} pixels ({tile.pixels}), "
        f"{f'{tile.raw_slots} staged pieces, ' if tile.staged else ''}"
        f"{ceil_div(tile.tiles, gpu.processors)} rounds of: "
        f"{work}; {tile.shared_bytes // 1024} KiB shared"
    )


def _tiles(views: list[Layer], gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the best first."""
    candidates = (
        replace(tile, raw_slots=raw_slots)
        for view in views
        for tile in _candidates(view)
        for raw_slots in (RAW_SLOTS if view.lines else (0,))
    )
    fitted = (
        tile.fitted(gpu.shared_bytes_per_block)
        for tile in candidates
        if tile.pixels <= tile.layer.most_pixels
    )
    tiles = sorted(
        filter(None, dict.fromkeys(fitted)), key=lambda tile: tile.cycles(gpu.processors)
    )
    if not tiles:
        raise Declined("a halo tile that does not fit shared memory")
    return tiles


def _candidates(layer: Layer) -> Iterator[Tile]:
    operands, width = layer.operands, layer.out_size[1]
    most = layer.most_pixels
    sector = 32 // operands.scalar_bytes
    rows_of_phase = ceil_div(layer.out_size[0], layer.row_step)
    for channel_groups in (1, 2) if layer.group_out > layer.product_channels else (1,):
        if width <= most:
            yield Tile(layer, channel_groups, 1, width)
        # Strips of rows that are not whole sectors share one with their neighbours, unless each row
        # has its own strips.
        own = layer.whole_rows and layer.interleave == 1 and width % sector
        for columns in _strip_widths(width, most, layer.vector, sector):
            yield Tile(layer, channel_groups, 1, columns)
        for columns in _strip_widths(width + sector - 1, most - sector, sector) if own else ():
            yield Tile(layer, channel_groups, 1, columns, sector)
        if layer.rolling or layer.stack > 1:
            continue
        for rows in range(2, rows_of_phase + 1):
            if Tile(layer, channel_groups, rows, width).pixels > most:
                break
            yield Tile(layer, channel_groups, rows, width)


def _strip_widths(width: int, most: int, *units: int) -> list[int]:
    """Widths that share out ``width`` about equally, in whole units, in two strips or more."""
    return sorted(
        {
            columns
            for unit in units
            for columns in range(unit, min(most, width - 1) + 1, unit)
            if columns == round_up(ceil_div(width, ceil_div(width, columns)), unit)
        }
    )


def _segment_tiles(tile: Tile, gpu: Gpu) -> int:
    """Tiles that a block computes on its way down.

    As many as leave all blocks equally much to do; at the top of each segment, rows are loaded that
    another block has loaded too.
    """
    if not tile.layer.rolling:
        return 1
    columns = tile.tiles // tile.row_tiles
    again = SEGMENT_COST * (tile.halo_rows - tile.tile_rows) / tile.tile_rows

    def cost(count: int) -> float:
        items = columns * ceil_div(tile.row_tiles, count)
        return ceil_div(items, gpu.processors) * (count + again)

    return min(range(1, min(tile.row_tiles, MOST_SEGMENT) + 1), key=cost)


def _items(tile: Tile, gpu: Gpu) -> int:
    return tile.tiles // tile.row_tiles * ceil_div(tile.row_tiles, _segment_tiles(tile, gpu))


def _constants(tile: Tile, gpu: Gpu) -> dict[str, Constant]:
    layer, operands = tile.layer, tile.layer.operands
    rows, columns = layer.placing
    split = layer.parts == 2
    if layer.vector_loads:
        most = 4 if split else 6
    elif layer.folding != (1, 1) or (split and tile.staged):
        most = 2
    else:
        most = 4 if split else 5 if operands.scalar_bytes == 4 else 3
    if tile.staged:
        warps = ceil_div(tile.pitch, 32)
        batch = ceil_div(warps, ceil_div(warps, most))
    else:
        batch = min(range(most, 0, -1), key=lambda n: round_up(tile.units, 32 * LOADER_WARPS * n))
    producer = 72 if split else 104 if layer.vector_loads else 136
    return {
        "Scalar": operands.scalar,
        "parts": layer.parts,
        "low_products": layer.low_products,
        "ties_to_even": layer.ties_to_even,
        "compensated": layer.compensated,
        "transposed": layer.transposed,
        "groups": layer.groups,
        "group_in": layer.group_in,
        "group_out": layer.group_out,
        "in_height": layer.in_size[0],
        "in_width": layer.in_size[1],
        "out_height": layer.out_size[0],
        "out_width": layer.out_size[1],
        **geometry_constants(layer.kernel, layer.stride, layer.dilation, layer.padding, operands),
        "fold_height": layer.folding[0],
        "fold_width": layer.folding[1],
        "weight_height": layer.weight_kernel[0],
        "weight_width": layer.weight_kernel[1],
        "last_tap_row": rows.last_tap,
        "last_tap_column": columns.last_tap,
        "tap_step_height": rows.tap_step,
        "tap_step_width": columns.tap_step,
        "image_height": layer.image_size[0],
        "image_width": layer.image_size[1],
        "out_step_height": rows.step,
        "out_step_width": columns.step,
        "row_at": rows.at,
        "row_begin": rows.begin,
        "row_end": rows.end,
        "column_at": columns.at,
        "column_begin": columns.begin,
        "column_end": columns.end,
        "column_sums": columns.sums,
        "interleave": layer.interleave,
        "in_channels_last": operands.input_channels_last,
        "out_channels_last": operands.output_channels_last,
        "vector_loads": layer.vector_loads,
        "staged": tile.staged,
        "raw_slots": tile.raw_slots,
        "vector_stores": operands.output_channels_last
        and operands.aligned
        and layer.group_out % layer.vector == 0,
        "bulk_stores": tile.bulk_stores,
        "channel_groups": tile.channel_groups,
        "stack": layer.stack,
        "pixels": tile.pixels,
        "tile_rows": tile.rows,
        "tile_columns": tile.columns,
        "pitch": tile.pitch,
        "lead": tile.lead,
        "plane_padding": tile.plane_padding,
        "rolling": layer.rolling,
        "segment_tiles": _segment_tiles(tile, gpu),
        "k_steps": layer.k_steps,
        "stage_taps": layer.stage_taps,
        "input_stages": tile.input_stages,
        "weight_stages": tile.weight_stages,
        "resident": tile.resident,
        "pass_pixels": tile.pass_pixels,
        "buffers": tile.buffers,
        "batch": batch,
        "batches_ahead": 1 if split else 2,
        "producer_registers": producer,
        "consumer_registers": limits.consumer_registers(producer),
        "shared_bytes": tile.shared_bytes,
    }
