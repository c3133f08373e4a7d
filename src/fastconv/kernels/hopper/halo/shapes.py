"""Tile shapes of the halo kernel: what follows from a tile's channels and pixels alone.

A shape fixes how many output channels and pixels a block computes at once. How the input reaches
shared memory, and how many pipeline stages fit there, is decided for each shape by ``tiles``.
Cycles are estimates for one SM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.hopper.block import A_OPERAND_BYTES, CONSUMERS, OUTPUTS
from fastconv.kernels.hopper.layers import MOST_RESIDENT_BYTES, Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together

# Bounds of the ring of weight stages, where weights do not stay in shared memory.
MOST_WEIGHT_STAGES = 10
ENOUGH_WEIGHT_STAGES = 6  # the most that the latency of loads asks for
WEIGHTS_LATENCY = 1500.0  # cycles from the copy of a weight stage to its arrival

# Bytes of outputs that an SM stores per cycle.
STORE_BYTES = 15.0
LINE_STORE_BYTES = 16.2  # strips of whole cache lines (four sectors)
WRAPPED_GAIN = 1.13  # factor where the ends of rows share no sector either
SHARED_SECTOR_BYTES = 7.0  # neighbouring tiles write to the same 32-byte sector
SINGLE_STORE_BYTES = 6.0  # element by element, because rows are not aligned alike
STRIDED_STORE_BYTES = 3.0  # element by element, to parts of sectors
# Cycles to load 16 bytes of channels, by (channels in 16 bytes, bytes of a channel in memory). The
# columns are: vectors; staged pieces, if a warp reads them without bank conflicts; pixel by pixel
# of one row, of several rows, and with strides.
LOAD_CYCLES = {
    (4, 4): (2.8, 0.7, 3.2, 2.6, 4.5),
    (8, 2): (2.0, 0.9, 5.0, 5.0, 5.0),
    (8, 4): (5.6, 1.6, 6.4, 8.8, 6.4),
}
PIECE_CYCLES = {(4, 4): 450.0, (8, 2): 600.0, (8, 4): 800.0}  # a piece's bulk copies
BOX_CYCLES = {(4, 4): 225.0, (8, 2): 300.0, (8, 4): 300.0}  # a piece's TMA box
# Cycles of a piece copied with cp.async: always; if lines begin anywhere; per 16 bytes of a warp.
COPY_CYCLES = (150.0, 200.0, 40.0)
MOST_COPIED_BYTES = 1024  # of a line that is copied with cp.async; longer ones take bulk copies
S2D_LOSS = {(4, 4): 1.3, (8, 2): 1.3, (8, 4): 0.9}  # factor of loads with space-to-depth
SPLIT_CYCLES = {4: 0.8, 8: 1.6}  # added per 16 bytes to split operands into two parts


class LoadMethod(NamedTuple):
    """How input is loaded."""

    raw_slots: int  # pieces that a loading warp has in flight; 0: pixel by pixel
    bulk: bool  # whether bulk copies fetch them
    warps: int = 3  # that load: the rest of one producer warpgroup, or of two
    boxes: bool = False  # whether each of these copies is a TMA box, a whole piece

    @property
    def piece_vectors(self) -> int:
        """16-byte vectors of the tile whose channels a piece has: fewer for more warps."""
        return 2 if self.warps == 3 else 1


MANY_WARPS = 7
# The largest N beside two producers: the compiler wants as many registers for a wgmma as a thread
# has at launch, 128.
MANY_WARPS_PIXELS = 200
LOAD_METHODS = (
    LoadMethod(0, False),
    LoadMethod(1, True),
    LoadMethod(2, True),
    LoadMethod(2, False),
    LoadMethod(1, True, MANY_WARPS),
    LoadMethod(2, True, MANY_WARPS),
    LoadMethod(2, False, MANY_WARPS),
    LoadMethod(1, True, boxes=True),
    LoadMethod(2, True, boxes=True),
)
MOST_BOX_COLUMNS = 256
BOX_BYTES = 128  # alignment of a TMA box in shared memory
# Factors of staged loads if a warp has one slot, or more; by the loading warps and a vector's
# channels. A single slot makes a warp wait, but many warps wait for each other anyway. In 16 bits,
# many warps take less where no row is padded, and none looks for columns that are not there.
STAGED_SHARES = {
    (3, 4): (1.25, 1.0), (3, 8): (1.25, 1.0),
    (MANY_WARPS, 4): (0.89, 0.85), (MANY_WARPS, 8): (0.8, 0.82),
}  # fmt: skip
UNPADDED_SHARE = 0.8
BOX_SHARES = (1.35, 1.15)  # the same of TMA boxes
WEIGHT_BYTES = 24.0  # bytes of weights that an SM loads per cycle
TILE_CYCLES = 1500.0  # prologue and epilogue of a tile
SHARED_BYTES = 128.0  # bytes of shared memory that the tensor cores read per cycle


class SharedLayout(NamedTuple):
    """One way to divide shared memory: the fewest stages, and how accumulators are staged."""

    weight_stages: int
    input_stages: int
    pass_pixels: int
    buffers: int
    bytes: int  # everything except the weight stages


@dataclass(frozen=True)
class Shape:
    """The channels and pixels of a tile.

    A consumer computes ``rows`` rows of ``columns`` pixels, for 64 rows of M; ``channel_groups`` is
    the number of consumers with different channels. ``lead`` is the number of columns by which a
    strip may begin before its first one, to begin at a multiple of ``lead`` elements in memory.
    """

    layer: Layer
    channel_groups: int
    rows: int
    columns: int
    lead: int = 0

    @lazy
    def pixels(self) -> int:
        """N of the MMA, with the gaps between rows."""
        return round_up((self.rows - 1) * self.pitch + self.lead + self.columns, 8)

    @lazy
    def tile_rows(self) -> int:
        """Output rows of a block."""
        return CONSUMERS // self.channel_groups * self.rows * self.layer.stack

    @lazy
    def halo_rows(self) -> int:
        """Input rows that a tile reads, of each residue of a row stride."""
        return self.tile_rows + (self.layer.kernel[0] - 1) // self.layer.row_residues

    @lazy
    def stage_rows(self) -> int:
        """Rows of an input stage, of each residue."""
        return 1 if self.layer.rolling else self.halo_rows

    @lazy
    def pitch(self) -> int:
        """Pixels from one row of the halo tile to the next, in shared memory."""
        vector, interleave = self.layer.vector, self.layer.interleave
        pitch = self.lead + self.columns + self.layer.column_halo
        stored = self.layer.stored_width if self.layer.depth_to_space else interleave * self.columns
        whole = self.rows > 1 and stored % vector == 0 and self.layer.whole_rows
        return round_up(pitch, vector // math.gcd(vector, interleave)) if whole else pitch

    @lazy
    def raw_aligned(self) -> bool:
        """Whether raw pieces are whole rows that all begin at multiples of 16 bytes."""
        layer = self.layer
        whole = self.strips == 1 and layer.padding[1] >= 0
        return whole and layer.in_size[1] % layer.vector == 0

    @lazy
    def plane_padding(self) -> int:
        """Pixels of padding after a plane, so that lanes write planes to different banks."""
        return self.layer.plane_padding(self.layer.slots * self.stage_rows * self.pitch)

    @lazy
    def input_bytes(self) -> int:
        """Bytes of an input stage, with what the last MMA reads beyond its last row."""
        layer = self.layer
        plane = layer.slots * self.stage_rows * self.pitch + self.plane_padding
        reach = self.pixels + layer.column_halo
        slack = max(reach - self.rows * self.pitch, 0)
        return 16 * (layer.parts * 2 * layer.k_steps * plane + slack)

    @lazy
    def units(self) -> int:
        """Units that the loading threads distribute among themselves, for one part of a stage."""
        layer = self.layer
        vectors = (
            2 * layer.k_steps * (layer.slots * self.stage_rows * self.pitch + self.plane_padding)
        )
        return vectors // (1 if layer.vector_loads else 2)

    @lazy
    def tap_bytes(self) -> int:
        """Bytes of a tap's packed weights for a chunk of channels."""
        return self.layer.k_steps * self.layer.weight_parts * self.channel_groups * A_OPERAND_BYTES

    @lazy
    def weight_bytes(self) -> int:
        """Bytes of a weight stage."""
        return self.layer.stage_taps * self.tap_bytes

    @lazy
    def fewest_weight_stages(self) -> int:
        """Stages in flight that hide the latency of a load behind the MMAs of the others."""
        layer = self.layer
        cycles = (
            CONSUMERS * layer.stage_taps * layer.k_steps * layer.mmas_per_step * self.pixels / 2
        )
        stages = min(1 + math.ceil(WEIGHTS_LATENCY / cycles), ENOUGH_WEIGHT_STAGES)
        return min(stages, self.layer.weight_stages)

    @lazy
    def most_weight_stages(self) -> int:
        """All weights where they may stay in shared memory, else at most a few stages."""
        if self.weight_bytes * self.layer.weight_stages <= MOST_RESIDENT_BYTES:
            return self.layer.weight_stages
        return min(MOST_WEIGHT_STAGES, self.layer.weight_stages)

    @lazy
    def output_groups(self) -> int:
        """Tiles that divide a group's output channels."""
        return ceil_div(self.layer.group_out, self.channel_groups * self.layer.mma_channels)

    @lazy
    def input_stage_bytes(self) -> int:
        """Bytes of an input stage with its mbarriers and its marks of infinite numbers."""
        return self.input_bytes + 16 + (4 if self.layer.watched else 0)

    @lazy
    def strips(self) -> int:
        """Tiles that divide a row."""
        return ceil_div(self.layer.out_size[1] + max(self.lead - 1, 0), self.columns)

    @lazy
    def row_tiles(self) -> int:
        """Tiles that divide the rows of one residue of the dilation."""
        return ceil_div(ceil_div(self.layer.out_size[0], self.layer.row_step), self.tile_rows)

    @lazy
    def image_tiles(self) -> int:
        layer = self.layer
        return self.output_groups * self.strips * self.row_tiles * layer.row_step * layer.groups

    @lazy
    def tiles(self) -> int:
        return self.image_tiles * self.layer.batch

    @lazy
    def stores_pixels(self) -> bool:
        """Whether stores write the channels of a pixel together, rather than rows of pixels."""
        return self.layer.operands.output_channels_last and not self.layer.depth_to_space

    @lazy
    def bulk_stores(self) -> bool:
        """Whether bulk copies store rows: single rows, or rows with the same alignment."""
        vector = self.layer.vector
        pitch = self.layer.interleave * self.pitch
        alike = self.layer.stored_width % vector == pitch % vector == 0
        return self.layer.whole_rows and (self.rows == 1 or alike)

    @lazy
    def shares_sectors(self) -> bool:
        """Whether neighbouring strips write to the same 32 bytes."""
        operands = self.layer.operands
        if self.strips == 1 or self.lead or self.stores_pixels:
            return False
        sector = 32 // operands.scalar_bytes
        columns = self.layer.interleave * self.columns
        return columns % sector != 0 or self.layer.stored_width % sector != 0

    @lazy
    def mma_cycles(self) -> float:
        """Cycles of a tile's MMAs: bound by the tensor cores, or by reading shared memory."""
        layer = self.layer
        one = max(self.pixels / 2, (A_OPERAND_BYTES + 32 * self.pixels) / SHARED_BYTES)
        steps = layer.chunks * layer.taps * layer.k_steps * layer.mmas_per_step
        return CONSUMERS * steps * one

    @lazy
    def vectors(self) -> int:
        """Vectors of 16 bytes of channels that a tile loads."""
        layer = self.layer
        rows = self.tile_rows if layer.rolling else self.halo_rows
        return 2 * layer.steps * layer.slots * rows * self.pitch

    @lazy
    def outputs(self) -> float:
        """Elements that a tile writes, on average."""
        layer = self.layer
        columns = min(self.columns, layer.out_size[1] / self.strips)
        return CONSUMERS * layer.mma_outputs * self.rows * columns * layer.written

    @property
    def load_methods(self) -> Iterator[LoadMethod]:
        """The ``LOAD_METHODS`` that the shape allows.

        Two producers leave too few registers for operands in two parts.
        """
        layer = self.layer
        size = self.raw_columns * layer.operands.scalar_bytes
        for method in LOAD_METHODS if layer.lines else LOAD_METHODS[:1]:
            short = method.raw_slots == 0 or method.bulk or size <= MOST_COPIED_BYTES
            few = layer.parts == 1 and self.pixels <= MANY_WARPS_PIXELS
            if method.boxes and not self._fits_box(method):
                continue
            if short and (method.warps < MANY_WARPS or few):
                yield method

    def _fits_box(self, method: LoadMethod) -> bool:
        """Whether a TMA box can bring a piece: a line of channels that are equally far apart.

        Pointwise layers, whose lines are as long as they like, have been slower with boxes.
        """
        layer = self.layer
        if layer.kernel == (1, 1):
            return False
        channels = method.piece_vectors * layer.vector_channels
        return (
            self.box_columns <= MOST_BOX_COLUMNS
            and layer.in_size[0] * layer.in_size[1] % layer.vector == 0
            and (layer.depth is None or layer.in_channels % channels == 0)
        )

    @lazy
    def raw_columns(self) -> int:
        """Columns of the image that a line of the tile spans, of all residues of a stride."""
        stride = self.layer.stride[1]
        return self.pitch * stride - (math.gcd(stride, self.layer.dilation[1]) - 1)

    @lazy
    def box_columns(self) -> int:
        """Columns of a TMA box with a line, which may begin behind a multiple of 16 bytes."""
        vector = self.layer.vector
        return round_up(self.raw_columns + vector - 1, vector)

    @lazy
    def unpadded(self) -> bool:
        """Whether a row has several taps, and all columns that these read are in the image."""
        layer = self.layer
        read = layer.out_size[1] + layer.column_halo
        several = layer.kernel[1] > 1 and layer.stride[1] == 1
        return several and layer.padding[1] == 0 and layer.in_size[1] == read

    def raw_vectors(self, method: LoadMethod, wraps: bool) -> int:
        """16-byte vectors of a raw piece: a line of the channels of one or two of the tile's."""
        layer = self.layer
        columns = self.raw_columns if wraps else min(self.raw_columns, layer.in_size[1])
        columns += 0 if self.raw_aligned else layer.vector - 1
        columns = self.box_columns if method.boxes else columns
        return method.piece_vectors * layer.vector_channels * ceil_div(columns, layer.vector)

    def _vector_cycles(self, staged: bool) -> float:
        """Cycles to load 16 bytes of channels."""
        layer = self.layer
        vectors, pieces, row, rows, strides = LOAD_CYCLES[layer.vector_kind]
        if layer.vector_loads:
            return vectors
        if staged:
            conflicts = _read_cycles(layer.stride[1] * layer.operands.scalar_bytes) - 1
            return pieces + conflicts * layer.vector_channels / 32
        return strides if layer.slots > 1 else rows if self.rows > 1 else row

    def _piece_cycles(self, method: LoadMethod, wraps: bool) -> float:
        """Cycles of a raw piece in addition to those of its pixels.

        With cp.async, these include the lanes that idle because a short line has no pixel for them.
        """
        if method.bulk:
            cycles = BOX_CYCLES if method.boxes else PIECE_CYCLES
            return cycles[self.layer.vector_kind] * method.piece_vectors / 2
        idle = self.layer.column_slots * (round_up(self.pitch, 32) - self.pitch)
        start, anywhere, copy = COPY_CYCLES
        start += 0 if self.raw_aligned else anywhere
        copies = copy * ceil_div(self.raw_vectors(method, wraps), 32)
        return start + copies + method.piece_vectors * idle * self._vector_cycles(staged=True)

    def load_cycles(self, method: LoadMethod, wraps: bool) -> float:
        """Cycles of a tile's input, loaded by one of ``LOAD_METHODS``."""
        layer, vectors = self.layer, self.vectors
        split = SPLIT_CYCLES[layer.vector_channels] * (layer.parts - 1)
        loss = S2D_LOSS[layer.vector_kind] if layer.s2d_factors != (1, 1) else 1.0
        loads = vectors * (self._vector_cycles(staged=method.raw_slots > 0) * loss + split)
        if method.raw_slots > 0:
            pieces = vectors / (method.piece_vectors * self.pitch * layer.column_slots)
            loads += pieces * self._piece_cycles(method, wraps)
            shares = STAGED_SHARES[method.warps, layer.vector_channels]
            one_slot, more = BOX_SHARES if method.boxes else shares
            loads *= one_slot if method.raw_slots == 1 else more
            many = method.bulk and method.warps == MANY_WARPS and layer.vector_kind == (8, 2)
            loads *= UNPADDED_SHARE if many and self.unpadded else 1.0
        return loads

    def store_cycles(self, wraps: bool) -> float:
        """Cycles of a tile's stores; with ``wraps``, last strips continue into the next row."""
        layer, size = self.layer, self.layer.operands.scalar_bytes
        stored = LINE_STORE_BYTES if self.lead * size == 4 * 32 else STORE_BYTES
        stored *= WRAPPED_GAIN if wraps else 1
        if layer.strided_stores:
            stored = STRIDED_STORE_BYTES
        elif not (self.bulk_stores or self.stores_pixels):
            stored = SINGLE_STORE_BYTES
        elif self.shares_sectors:
            stored = SHARED_SECTOR_BYTES
        return self.outputs * size / stored

    @lazy
    def weight_cycles(self) -> float:
        """Cycles of a tile's weights, unless they stay in shared memory."""
        return self.layer.weight_stages * self.weight_bytes / WEIGHT_BYTES

    @property
    def least_cycles(self) -> float:
        """A lower bound of an image's cycles, for any load method and any shared memory.

        Each part of a tile's work is the least over all load methods, strips that wrap or not, and
        weights that stay or not; and the total grows with each part.
        """
        stays = self.output_groups * self.layer.groups == 1
        cycles = TILE_CYCLES + together(
            self.mma_cycles,
            min(self.load_cycles(method, wraps=False) for method in self.load_methods),
            self.store_cycles(wraps=self.lead > 0),
            0.0 if stays else self.weight_cycles,
        )
        return self.image_tiles * cycles

    def staging_bytes(self, pass_pixels: int, buffers: int) -> int:
        """Bytes of a consumer's staging buffers, for passes of ``pass_pixels`` pixels."""
        operands, vector = self.layer.operands, self.layer.vector
        row = self.layer.interleave * pass_pixels
        if self.layer.depth_to_space:
            lines = self.layer.mma_outputs // self.layer.interleave
            elements = lines * (round_up(row + vector - 1, 2 * vector) + vector)
        elif operands.output_channels_last:
            elements = pass_pixels * (OUTPUTS + vector)
        else:
            elements = 4 * buffers * 8 * (round_up(row + vector - 8, 16) + 8)
        return elements * operands.scalar_bytes

    @lazy
    def _fewest_input_stages(self) -> int:
        return self.halo_rows + self.tile_rows if self.layer.rolling else 2

    @lazy
    def most_input_stages(self) -> int:
        return self._fewest_input_stages + (2 * self.tile_rows + 2 if self.layer.rolling else 1)

    @lazy
    def layouts(self) -> list[SharedLayout]:
        """Ways to divide shared memory, the best first."""
        layer = self.layer
        passes = ((1, 2), (1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1))
        choices = [(self._fewest_input_stages, *choice) for choice in passes]
        if layer.copied and not layer.rolling:
            choices = [(3, *choice) for choice in passes[:4]] + choices
        needs = [(self.fewest_weight_stages, choice) for choice in choices]
        if self.output_groups * layer.groups == 1:
            needs = [(layer.weight_stages, choice) for choice in choices[:3]] + needs
        found = []
        for weights, (inputs, count, buffers) in needs:
            if buffers == 2 and (layer.stacked_columns == 2 or layer.depth_to_space):
                continue  # all rows are staged at once, and stored before the next tile is
            pass_pixels = round_up(ceil_div(self.pixels, count), 16)
            staging = CONSUMERS * self.staging_bytes(pass_pixels, buffers)
            taken = staging + inputs * self.input_stage_bytes
            found.append(SharedLayout(weights, inputs, pass_pixels, buffers, taken))
        return found


@cache
def _read_cycles(distance: int) -> int:
    """Cycles in which a warp reads an element each from shared memory, ``distance`` bytes apart."""
    words = {lane * distance // 4 for lane in range(32)}
    return max(Counter(word % 32 for word in words).values())


def least_cycles(views: list[Layer]) -> float:
    """A lower bound of an image's cycles, for any tile."""
    return min((shape.least_cycles for shape in shapes_of(views)), default=math.inf)


def shapes_of(views: list[Layer]) -> Iterator[Shape]:
    """Shapes of all tiles, whether they fit shared memory or not; roughly from small to large."""
    for view in dict.fromkeys(views):
        for shape in _shapes(view):
            if shape.pixels <= view.most_pixels:
                yield shape


def _shapes(layer: Layer) -> Iterator[Shape]:
    operands, width = layer.operands, layer.out_size[1]
    most = layer.most_pixels
    sector = 32 // operands.scalar_bytes
    rows_of_residue = ceil_div(layer.out_size[0], layer.row_step)
    for channel_groups in (1, 2) if layer.group_out > layer.mma_channels else (1,):
        if width <= most:
            yield Shape(layer, channel_groups, 1, width)
        # If rows are not whole sectors, neighbouring strips share one, unless the strips of each
        # row begin at its own sectors or cache lines.
        neighbours = layer.interleave == 1 and not layer.depth_to_space
        own = layer.whole_rows and neighbours and width % sector
        leads = (sector, 4 * sector) if layer.scaled_fp16 else (sector,)
        for columns in _strip_widths(width, most, layer.vector, sector):
            yield Shape(layer, channel_groups, 1, columns)
        for lead in leads if own else ():
            for columns in _strip_widths(width + lead - 1, most - lead, lead):
                yield Shape(layer, channel_groups, 1, columns, lead)
        if layer.rolling or layer.stack > 1:
            continue
        for rows in range(2, rows_of_residue + 1):
            shape = Shape(layer, channel_groups, rows, width)
            if shape.pixels > most:
                break
            yield shape


def _strip_widths(width: int, most: int, *units: int) -> list[int]:
    """Widths, multiples of a unit, that divide ``width`` into two or more nearly equal strips."""
    return sorted(
        {
            columns
            for unit in units
            for columns in range(unit, min(most, width - 1) + 1, unit)
            if columns == round_up(ceil_div(width, ceil_div(width, columns)), unit)
        }
    )
