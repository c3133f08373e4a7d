"""What a block computes at once, what of it is in shared memory, and what that takes, estimated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu
from fastconv.kernels.hopper.block import CONSUMERS, OUTPUTS, PRODUCT_BYTES
from fastconv.kernels.hopper.layers import MOST_RESIDENT_BYTES, Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together

LOADER_WARPS = 3

MOST_WEIGHT_STAGES = 10
ENOUGH_WEIGHT_STAGES = 6
WEIGHTS_LATENCY = 1500.0  # cycles

# Estimated cycles of one processor.
STORE_BYTES = 15.0  # a cycle
LINE_STORE_BYTES = 16.2  # of whole lines of the cache, four sectors
WRAPPED_GAIN = 1.13  # where rows' ends share none either
SHARED_SECTOR_BYTES = 7.0  # where neighbouring tiles write the same 32 bytes
SINGLE_STORE_BYTES = 6.0  # where rows are not aligned alike
STRIDED_STORE_BYTES = 3.0  # where a store's elements are not neighbours: parts of sectors
# To load 16 bytes of channels, by their number and their bytes in memory: as vectors; in pieces;
# pixel by pixel, of one row; of several; of strides.
LOAD_CYCLES = {
    (4, 4): (2.8, 0.7, 3.2, 2.6, 4.5),
    (8, 2): (2.0, 0.9, 5.0, 5.0, 5.0),
    (8, 4): (5.6, 1.6, 6.4, 8.8, 6.4),
}
PIECE_CYCLES = {(4, 4): 450.0, (8, 2): 600.0, (8, 4): 800.0}  # for its bulk copies, short or long
# If lanes copy it: in any case; more where lines begin anywhere; for each 16 bytes of all lanes.
COPY_CYCLES = (150.0, 200.0, 40.0)
MOST_COPIED_BYTES = 1024  # of a line, by lanes
FOLDED_LOSS = {(4, 4): 1.3, (8, 2): 1.3, (8, 4): 0.9}  # where each channel is somewhere else
SPLIT_CYCLES = {4: 0.8, 8: 1.6}  # more for numbers in two parts
PASS_CYCLES = 1000.0  # to wait for sums to be gone, of a tile that leaves in several passes
# How input gets in: pieces that a loading warp has under way, 0 for pixel by pixel; and whether by
# bulk copies.
LOADS = ((0, False), (1, True), (2, True), (2, False))
ONE_SLOT_LOSS = 1.25  # a warp with one waits for it
WEIGHT_BYTES = 24.0
TILE_CYCLES = 1500.0  # to start and to end a tile
SHARED_BYTES = 128.0  # a cycle that the tensor cores read
SEGMENT_COST = 0.3  # of a tile, for each row that is loaded again
MOST_SEGMENT = 64


class Way(NamedTuple):
    """To share out shared memory: the fewest stages of weights and of input, and how sums leave."""

    weight_stages: int
    input_stages: int
    pass_pixels: int
    buffers: int
    bytes: int  # but for weights


@dataclass(frozen=True)
class Shape:
    """Channels and pixels of a tile: what follows from these, however input gets in."""

    layer: Layer
    channel_groups: int
    rows: int
    columns: int
    lead: int = 0

    @lazy
    def pixels(self) -> int:
        return round_up((self.rows - 1) * self.pitch + self.lead + self.columns, 8)

    @lazy
    def tile_rows(self) -> int:
        """Output rows of both consumers."""
        return CONSUMERS // self.channel_groups * self.rows * self.layer.stack

    @lazy
    def halo_rows(self) -> int:
        return self.tile_rows + (self.layer.kernel[0] - 1) // self.layer.row_phases

    @lazy
    def stage_rows(self) -> int:
        return 1 if self.layer.rolling else self.halo_rows

    @lazy
    def pitch(self) -> int:
        """Pixels from one row to the next, in shared memory."""
        vector, interleave = self.layer.vector, self.layer.interleave
        pitch = self.lead + self.columns + self.layer.column_halo
        stored = self.layer.stored_width if self.layer.unfolds else interleave * self.columns
        whole = self.rows > 1 and stored % vector == 0 and self.layer.whole_rows
        return round_up(pitch, vector // math.gcd(vector, interleave)) if whole else pitch

    @lazy
    def raw_aligned(self) -> bool:
        """Whether pieces are whole rows, which all begin at multiples of 16 bytes."""
        layer = self.layer
        whole = self.strips == 1 and layer.padding[1] >= 0
        return whole and layer.in_size[1] % layer.vector == 0

    @lazy
    def plane_padding(self) -> int:
        """Pixels between planes, so that lanes that write a pixel's planes hit different banks."""
        return self.layer.plane_padding(self.layer.slots * self.stage_rows * self.pitch)

    @lazy
    def input_bytes(self) -> int:
        layer = self.layer
        plane = layer.slots * self.stage_rows * self.pitch + self.plane_padding
        reach = self.pixels + layer.column_halo
        slack = max(reach - self.rows * self.pitch, 0)
        return 16 * (layer.parts * 2 * layer.k_steps * plane + slack)

    @lazy
    def units(self) -> int:
        """What the loading threads share of a stage, one part of it."""
        layer = self.layer
        vectors = (
            2 * layer.k_steps * (layer.slots * self.stage_rows * self.pitch + self.plane_padding)
        )
        return vectors // (1 if layer.vector_loads else 2)

    @lazy
    def tap_bytes(self) -> int:
        return self.layer.k_steps * self.layer.weight_parts * self.channel_groups * PRODUCT_BYTES

    @lazy
    def weight_bytes(self) -> int:
        return self.layer.stage_taps * self.tap_bytes

    @lazy
    def fewest_weight_stages(self) -> int:
        """So many that a stage arrives while the others are multiplied."""
        layer = self.layer
        cycles = CONSUMERS * layer.stage_taps * layer.k_steps * layer.products * self.pixels / 2
        stages = min(1 + math.ceil(WEIGHTS_LATENCY / cycles), ENOUGH_WEIGHT_STAGES)
        return min(stages, self.layer.weight_stages)

    @lazy
    def most_weight_stages(self) -> int:
        """All of them where they stay; else what is enough."""
        if self.weight_bytes * self.layer.weight_stages <= MOST_RESIDENT_BYTES:
            return self.layer.weight_stages
        return min(MOST_WEIGHT_STAGES, self.layer.weight_stages)

    @lazy
    def output_groups(self) -> int:
        return ceil_div(self.layer.group_out, self.channel_groups * self.layer.product_channels)

    @lazy
    def input_stage_bytes(self) -> int:
        """With its barriers, and what loaders say of it."""
        return self.input_bytes + 16 + (4 if self.layer.watched else 0)

    @lazy
    def strips(self) -> int:
        return ceil_div(self.layer.out_size[1] + max(self.lead - 1, 0), self.columns)

    @lazy
    def row_tiles(self) -> int:
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
        """Whether channels of a pixel are stored together, rather than rows of pixels."""
        return self.layer.operands.output_channels_last and not self.layer.unfolds

    @lazy
    def bulk_stores(self) -> bool:
        """Whether rows are stored by bulk copies: single rows, or rows aligned alike."""
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
    def product_cycles(self) -> float:
        """What a tile's products take."""
        layer = self.layer
        product = max(self.pixels / 2, (PRODUCT_BYTES + 32 * self.pixels) / SHARED_BYTES)
        steps = layer.chunks * layer.taps * layer.k_steps * layer.products
        return CONSUMERS * steps * product

    @lazy
    def vectors(self) -> int:
        """Of 16 bytes of channels, that a tile loads."""
        layer = self.layer
        rows = self.tile_rows if layer.rolling else self.halo_rows
        return 2 * layer.steps * layer.slots * rows * self.pitch

    @lazy
    def outputs(self) -> float:
        """Elements that a tile writes."""
        layer = self.layer
        columns = min(self.columns, layer.out_size[1] / self.strips)
        return CONSUMERS * layer.product_outputs * self.rows * columns * layer.written

    @property
    def all_loads(self) -> Iterator[tuple[int, bool]]:
        """Of ``LOADS``, those that are possible."""
        size = self.pitch * self.layer.operands.scalar_bytes
        for raw_slots, bulk in LOADS if self.layer.lines else LOADS[:1]:
            if raw_slots == 0 or bulk or size <= MOST_COPIED_BYTES:
                yield raw_slots, bulk

    def raw_vectors(self, wraps: bool) -> int:
        """Of a piece, a line of two vectors' channels, in 16 bytes."""
        layer = self.layer
        pixels = self.pitch if wraps else min(self.pitch, layer.in_size[1])
        pixels += 0 if self.raw_aligned else layer.vector - 1
        return 2 * layer.vector_channels * ceil_div(pixels, layer.vector)

    def _vector_cycles(self, staged: bool) -> float:
        """What it takes to load 16 bytes of channels."""
        layer = self.layer
        vectors, pieces, row, rows, strides = LOAD_CYCLES[layer.vector_kind]
        if layer.vector_loads:
            return vectors
        if staged:
            return pieces
        return strides if layer.slots > 1 else rows if self.rows > 1 else row

    def _piece_cycles(self, bulk: bool, wraps: bool) -> float:
        """What it takes to fetch a piece, beside what each of its pixels takes.

        Of short lines also what lanes take that have no pixel.
        """
        if bulk:
            return PIECE_CYCLES[self.layer.vector_kind]
        idle = round_up(self.pitch, 32) - self.pitch
        start, anywhere, copy = COPY_CYCLES
        start += 0 if self.raw_aligned else anywhere
        copies = copy * ceil_div(self.raw_vectors(wraps), 32)
        return start + copies + 2 * idle * self._vector_cycles(staged=True)

    def load_cycles(self, raw_slots: int, bulk: bool, wraps: bool) -> float:
        """What a tile's input takes, if it gets in as one of ``LOADS`` says."""
        layer, vectors = self.layer, self.vectors
        split = SPLIT_CYCLES[layer.vector_channels] * (layer.parts - 1)
        folded = FOLDED_LOSS[layer.vector_kind] if layer.folding != (1, 1) else 1.0
        loads = vectors * (self._vector_cycles(staged=raw_slots > 0) * folded + split)
        if raw_slots > 0:
            loads += vectors / (2 * self.pitch) * self._piece_cycles(bulk, wraps)
            loads *= ONE_SLOT_LOSS if raw_slots == 1 else 1
        return loads

    def store_cycles(self, wraps: bool) -> float:
        """What a tile's outputs take, whose last strips go on with the next row if it ``wraps``."""
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
        """What a tile's weights take, where they do not stay."""
        return self.layer.weight_stages * self.weight_bytes / WEIGHT_BYTES

    @property
    def least_cycles(self) -> float:
        """What an image takes at least, however input gets in, and if there is room for everything.

        A lower bound: each part of a tile's work is the least that it is with any loads, strips
        that wrap or not and weights that stay or not, and what it takes altogether grows with each.
        """
        stays = self.output_groups * self.layer.groups == 1
        cycles = TILE_CYCLES + together(
            self.product_cycles,
            min(self.load_cycles(*loads, wraps=False) for loads in self.all_loads),
            self.store_cycles(wraps=self.lead > 0),
            0.0 if stays else self.weight_cycles,
        )
        return self.image_tiles * cycles

    def staging_bytes(self, pass_pixels: int, buffers: int) -> int:
        """Of each consumer, for so many pixels at a time."""
        operands, vector = self.layer.operands, self.layer.vector
        row = self.layer.interleave * pass_pixels
        if self.layer.unfolds:
            lines = self.layer.product_outputs // self.layer.interleave
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
    def ways(self) -> list[Way]:
        """To share out shared memory, the best first."""
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
            if buffers == 2 and (layer.column_sums == 2 or layer.unfolds):
                continue  # sums leave in one piece, and by the next tile it is gone
            pass_pixels = round_up(ceil_div(self.pixels, count), 16)
            staging = CONSUMERS * self.staging_bytes(pass_pixels, buffers)
            taken = staging + inputs * self.input_stage_bytes
            found.append(Way(weights, inputs, pass_pixels, buffers, taken))
        return found


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and what of it is in shared memory at the same time."""

    shape: Shape
    raw_slots: int = 0
    bulk_loads: bool = False
    pass_pixels: int = 0
    buffers: int = 1
    input_stages: int = 0
    weight_stages: int = 0

    @lazy
    def layer(self) -> Layer:
        return self.shape.layer

    @property
    def name(self) -> str:
        """Tells it from all other tiles of its layer."""
        shape, (height, width) = self.shape, self.layer.out_size
        return (
            f"{height}x{width} in {shape.channel_groups}x{shape.rows}x{shape.columns}+{shape.lead} "
            f"{self.loads}"
        )

    @property
    def loads(self) -> str:
        """How input gets in, and how many pieces of it a loading warp has under way."""
        if not self.staged:
            return "pixels"
        return f"{self.raw_slots} {'staged' if self.bulk_loads else 'copied'}"

    @property
    def staged(self) -> bool:
        """Whether input goes through shared memory as it is, on its way in.

        By bulk copies of lines (``bulk_loads``), or by each lane 16 bytes.
        """
        return self.raw_slots > 0

    @property
    def raw_bytes(self) -> int:
        """Of a piece."""
        return 16 * self.shape.raw_vectors(self.wraps)

    @lazy
    def resident(self) -> bool:
        return (
            self.shape.output_groups * self.layer.groups == 1
            and self.weight_stages == self.layer.weight_stages
        )

    @property
    def turns(self) -> bool:
        """Whether consumers multiply by turns, so that one does while the other stores.

        Where they need not wait for each other's weights or input, and storing takes longer anyway:
        a consumer alone does not keep the tensor cores quite as busy as two, least of all with
        TF32's numbers in two parts.
        """
        layer = self.layer
        if layer.halves:
            allowed = layer.rolling or layer.chunks <= self.input_stages
        else:
            allowed = layer.rolling and layer.parts == 1
        return allowed and self.resident and self.stores_bind and not self.joint_stores

    @property
    def joint_stores(self) -> bool:
        """Whether consumers store a pixel's channels together: more neighbours in memory."""
        return (
            self.layer.operands.output_channels_last
            and self.shape.channel_groups == CONSUMERS
            and self.layer.product_channels == OUTPUTS
            and not self.layer.unfolds
            and self.stores_bind
        )

    @property
    def stores_bind(self) -> bool:
        """Whether storing takes longer than multiplying."""
        return self.work["stores"] >= self.work["products"]

    @property
    def powers_bytes(self) -> int:
        """Of each loading warp, if lines are short: what a chunk's channels are multiplied by."""
        layer = self.layer
        copied = layer.halves and not self.bulk_loads
        return 4 * layer.k_steps * 2 * layer.vector_channels if copied else 0

    @property
    def shared_bytes(self) -> int:
        return (
            self.input_stages * self.shape.input_stage_bytes
            + self.weight_stages * (self.shape.weight_bytes + 16)
            + CONSUMERS * self.shape.staging_bytes(self.pass_pixels, self.buffers)
            + self.fixed_bytes
        )

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory, whatever else there is."""
        raw = self.raw_slots * (self.raw_bytes + 8)
        return LOADER_WARPS * (raw + self.powers_bytes) + 8 * CONSUMERS

    @lazy
    def wraps(self) -> bool:
        """Whether a row's last strip goes on with the next row, to the end of a sector or a line.

        Then no two strips write to the same one. The next row's outputs have to be this row's
        neighbours in memory, and so has its input if lines are fetched in pieces; there has to be
        room for them; and copies of vectors have no condition for it.
        """
        shape, layer = self.shape, self.layer
        width, before = layer.out_size[1], (shape.strips - 1) * shape.columns
        read = width + layer.column_halo
        unpadded = layer.padding[1] == 0 and layer.in_size[1] == read
        return (
            shape.lead > 0
            and layer.stride == layer.folding == (1, 1)
            and layer.placing[0].step == layer.placing[1].step == 1
            and self.pass_pixels >= shape.pixels
            and before < width
            and read + 2 * shape.lead - 1 <= before + shape.pixels
            and (unpadded or not self.staged)
            and not layer.copied
        )

    @lazy
    def work(self) -> dict[str, float]:
        """What a tile takes a processor, in cycles, if there were nothing else to do."""
        shape = self.shape
        return {
            "products": shape.product_cycles,
            "loads": shape.load_cycles(self.raw_slots, self.bulk_loads, self.wraps),
            "stores": shape.store_cycles(self.wraps),
            "weights": 0.0 if self.resident else shape.weight_cycles,
        }

    @lazy
    def tile_cycles(self) -> float:
        passes = ceil_div(self.shape.pixels, self.pass_pixels)
        return TILE_CYCLES + PASS_CYCLES * (passes - 1) + together(*self.work.values())

    def cycles(self, processors: int) -> float:
        """What the whole layer takes, estimated."""
        return ceil_div(self.shape.tiles, processors) * self.tile_cycles

    def fitted(self, budget: int) -> Tile | None:
        """With as many stages as fit ``budget`` bytes of shared memory; None if too few do.

        First of all weights: all of them if they can stay, or so many that they arrive in time.
        Then sums on their way out, in as few passes as possible; then more input. But asynchronous
        copies can be under way while others are waited for only if there are three stages for them.
        """
        shape = self.shape
        input_stage, weight_stage = shape.input_stage_bytes, shape.weight_bytes + 16
        room = budget - self.fixed_bytes
        for fewest, inputs, pass_pixels, buffers, taken in shape.ways:
            left = room - taken
            stages = left // weight_stage
            if stages < fewest:
                continue
            stages = min(stages, max(fewest, shape.most_weight_stages))
            more = (left - stages * weight_stage) // input_stage
            input_stages = min(inputs + more, max(shape.most_input_stages, inputs))
            # Not dataclasses.replace, which takes twice as long.
            loads = (self.raw_slots, self.bulk_loads)
            return Tile(shape, *loads, pass_pixels, buffers, input_stages, stages)
        return None


def tiles_of(views: list[Layer], gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the best first."""
    fitted = (
        Tile(shape, *loads).fitted(gpu.shared_bytes_per_block)
        for shape in shapes_of(views)
        for loads in shape.all_loads
    )
    tiles = sorted(filter(None, fitted), key=lambda tile: tile.cycles(gpu.processors))
    if not tiles:
        raise Declined("a halo tile that does not fit shared memory")
    return tiles


def least_cycles(views: list[Layer]) -> float:
    """What an image takes at least, with any tile."""
    return min((shape.least_cycles for shape in shapes_of(views)), default=math.inf)


def shapes_of(views: list[Layer]) -> Iterator[Shape]:
    """Of all tiles, whether they fit shared memory or not; about from small to large."""
    for view in dict.fromkeys(views):
        for shape in _shapes(view):
            if shape.pixels <= view.most_pixels:
                yield shape


def _shapes(layer: Layer) -> Iterator[Shape]:
    operands, width = layer.operands, layer.out_size[1]
    most = layer.most_pixels
    sector = 32 // operands.scalar_bytes
    rows_of_phase = ceil_div(layer.out_size[0], layer.row_step)
    for channel_groups in (1, 2) if layer.group_out > layer.product_channels else (1,):
        if width <= most:
            yield Shape(layer, channel_groups, 1, width)
        # Strips of rows that are not whole sectors share one with their neighbours, unless each row
        # has its own strips: of whole sectors, or of whole lines of the cache.
        neighbours = layer.interleave == 1 and not layer.unfolds
        own = layer.whole_rows and neighbours and width % sector
        leads = (sector, 4 * sector) if layer.halves else (sector,)
        for columns in _strip_widths(width, most, layer.vector, sector):
            yield Shape(layer, channel_groups, 1, columns)
        for lead in leads if own else ():
            for columns in _strip_widths(width + lead - 1, most - lead, lead):
                yield Shape(layer, channel_groups, 1, columns, lead)
        if layer.rolling or layer.stack > 1:
            continue
        for rows in range(2, rows_of_phase + 1):
            shape = Shape(layer, channel_groups, rows, width)
            if shape.pixels > most:
                break
            yield shape


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


def segment_tiles(tile: Tile, gpu: Gpu) -> int:
    """Tiles that a block computes on its way down.

    As many as leave all blocks equally much to do; at the top of each segment, rows are loaded that
    another block has loaded too.
    """
    if not tile.layer.rolling:
        return 1
    columns = tile.shape.tiles // tile.shape.row_tiles
    again = SEGMENT_COST * (tile.shape.halo_rows - tile.shape.tile_rows) / tile.shape.tile_rows

    def cost(count: int) -> float:
        items = columns * ceil_div(tile.shape.row_tiles, count)
        return ceil_div(items, gpu.processors) * (count + again)

    return min(range(1, min(tile.shape.row_tiles, MOST_SEGMENT) + 1), key=cost)


def item_count(tile: Tile, gpu: Gpu) -> int:
    """What the blocks share among themselves: tiles, or segments of them."""
    return (
        tile.shape.tiles
        // tile.shape.row_tiles
        * ceil_div(tile.shape.row_tiles, segment_tiles(tile, gpu))
    )
