"""What a block multiplies at once, what of it lies in shared memory, and what that should take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from math import gcd

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu, TensorMap
from fastconv.kernels.hopper.block import CONSUMERS
from fastconv.kernels.hopper.implicit_gemm_nchw.layer import (
    FEW_BULK_PIXELS,
    FEW_PIXELS,
    Layer,
)
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together

ROWS = 64  # of a product
STEP = 8  # channels of a product
MOST_BOX = 256  # of a tensor copy, along each axis
MOST_SUMS = 256  # of a thread's, columns of all of its products
LEAST_COLUMNS = 32
MOST_STARTS = 4096
MOST_INPUT_STAGES = 6
MOST_WEIGHT_STAGES = 8
FLAT_PIECES = (40, 72, 136, 200)  # pixels: 8 more than whole banks
ROW_PIECES = (2, 3, 4, 6, 8)
BANKS = 32

# Estimates: fitted to 601 measured tiles of ResNet-50's layers and others on an H200, in cycles of
# 1.755 GHz. See docs/kernels/hopper.md.
SHARED_BYTES = 128.0  # a cycle, of a processor's shared memory
CACHE_BYTES = 45.0  # a cycle and processor, if all of them load
MEMORY_BYTES = 18.2  # likewise, of the GPU's memory
LINE_CYCLES = 3.6  # of 128 bytes that are copied, whole or not
STORED_BYTES = 19.0  # a cycle, of sums on their way out
VECTOR_BYTES = 22.0  # the same where a thread stores neighbours
PAIR_BYTES = 14.0  # and where neighbours are of two phases
UNIT_CYCLES = 396.0  # to load the fragments of a unit, for each of a thread's row tiles
PLANES_LATENCY = 530.0
WEIGHTS_LATENCY = 1170.0
TILE_CYCLES = 150.0  # to start and to end a tile
OVERLAP_LOSS = 0.18
START_CYCLES = 5000.0  # of a launch
PACK_CYCLES = 3000.0  # of the one before it
PACK_BYTES = 500.0  # a cycle, of the GPU


@dataclass(frozen=True)
class Cut:
    """How a tile's planes lie in shared memory: in pieces, each [channel][pitch].

    A piece has ``piece`` rows of ``row_pixels``, or pixels of a ``flat`` plane, or is ``whole``.
    Rows may be every ``row_step``-th of the image. ``bulk``: copied without a map.
    """

    kind: str
    piece: int
    row_pixels: int
    pitch: int
    row_step: int = 1
    bulk: bool = False

    @property
    def flat(self) -> bool:
        return self.kind == "flat"

    @property
    def whole(self) -> bool:
        return self.kind == "whole"

    def conflicts(self, step: int) -> int:
        """How many lanes want the same bank, if pixels of neighbouring lanes are so far apart."""
        return _conflicts(self.pitch % BANKS, step % BANKS)


@cache
def _conflicts(pitch: int, step: int) -> int:
    lanes = product(range(4), range(8))  # channels, pixels
    banks = Counter((t * pitch + g * step) % BANKS for t, g in lanes)
    return max(banks.values())


def cuts_of(layer: Layer) -> list[Cut]:
    """All ways to copy the layer's planes."""
    return [*_flat_cuts(layer), *_whole_cuts(layer), *_row_cuts(layer)]


def _flat_cuts(layer: Layer) -> Iterator[Cut]:
    if layer.flat and layer.in_pixels % 4 == 0:
        for piece in FLAT_PIECES:
            yield Cut("flat", piece, layer.in_pixels, piece)


def _whole_cuts(layer: Layer) -> Iterator[Cut]:
    pixels, width = layer.in_pixels, layer.in_size[1]
    if pixels % 4:
        fits = pixels <= FEW_BULK_PIXELS and layer.chunk * pixels % 32 == 0
        if fits and layer.in_channels * pixels % 4 == 0:
            yield Cut("whole", 1, width, pixels, bulk=True)
        return
    if pixels > FEW_PIXELS:
        return
    spread = [pitch for pitch in range(pixels, MOST_BOX + 1, 4) if pitch % 16 == 8]
    yield Cut("whole", 1, width, spread[0] if spread else pixels)


def _row_cuts(layer: Layer) -> Iterator[Cut]:
    """Of all rows, or of those that a stride leaves over for a kernel of one row."""
    rows, _ = layer.axes
    height, width = layer.in_size
    if layer.in_pixels % 4 or width > MOST_BOX:
        return
    steps = {1, rows.step if rows.offsets == [0] else 1}
    for step in sorted(steps):
        row = width if width % 4 == 0 else round_up(width, 4)
        last = (height - 1) // step * step * width  # where the last of the rows begins
        if step * width % 4 or row > step * width or last + row > layer.in_pixels:
            continue
        most = min(ceil_div(height, step), MOST_BOX)
        for piece in sorted({*ROW_PIECES, most}):
            if piece <= most:
                yield Cut("rows", piece, row, piece * row, step)


@dataclass(frozen=True)
class Shape:
    """Which positions tiles have: consecutive ones, or those of one image."""

    tile_pixels: int
    image_pixels: int  # with what tiles have beyond the grid's last position


def shapes_of(layer: Layer, most: int) -> list[Shape]:
    """Tiles of at most so many positions."""
    height, width = layer.grid
    pixels = layer.grid_pixels
    found = [Shape(most, pixels), Shape(most, round_up(pixels, most))]
    if pixels <= most:
        found.append(Shape(most // pixels * pixels, pixels))
    if width <= most:
        rows = ceil_div(height, ceil_div(height, most // width))
        found.append(Shape(rows * width, round_up(height, rows) * width))
    return list(dict.fromkeys(found))


def pieces_of(layer: Layer, cut: Cut, shape: Shape) -> tuple[int, float]:
    """Of a tile: the most, and the mean."""
    tiles = _units(layer, cut.kind, cut.row_step, shape)
    counts = [(sum(ceil_div(n, cut.piece) for n in units), many) for units, many in tiles.items()]
    return max(counts)[0], sum(count * many for count, many in counts) / tiles.total()


@lru_cache(maxsize=64)
def _units(layer: Layer, kind: str, row_step: int, shape: Shape) -> Counter[tuple[int, ...]]:
    """What tiles' pieces are made of, of each image, and how many tiles have the same.

    Kept, for many cuts differ by their pieces alone.

    Raises:
        Declined: there are too many different tiles.
    """
    cycle = shape.image_pixels // gcd(shape.tile_pixels, shape.image_pixels)
    if cycle > MOST_STARTS:
        raise Declined(f"{cycle} different tiles")
    return Counter(
        tuple(_span_units(layer, kind, row_step, *span) for span in _spans(layer, shape, index))
        for index in range(cycle)
    )


def _spans(layer: Layer, shape: Shape, index: int) -> Iterator[tuple[int, int]]:
    """A tile's first and last position of each image, as ``each_piece`` has them."""
    first, left = index * shape.tile_pixels % shape.image_pixels, shape.tile_pixels
    while left > 0:
        yield first, min(first + left, layer.grid_pixels) - 1
        left -= shape.image_pixels - first
        first = 0


def _span_units(layer: Layer, kind: str, row_step: int, first: int, last: int) -> int:
    """The plane, or so many pixels or rows."""
    if kind == "whole":
        return 1
    if kind == "flat":
        return last + 1 - first
    rows, width = layer.axes[0], layer.grid[1]
    step = rows.step // row_step
    begin = max(first // width * step + min(rows.offsets), 0)
    end = min(last // width * step + max(rows.offsets) + 1, ceil_div(layer.in_size[0], row_step))
    return max(end - begin, 0)


@dataclass(frozen=True)
class Tile:
    """What a block multiplies at once: positions by ``columns``, output channels of each phase."""

    layer: Layer
    cut: Cut
    shape: Shape
    pieces: tuple[int, float]  # see pieces_of
    row_tiles: int
    columns: int
    input_stages: int = 0
    weight_stages: int = 0

    @property
    def name(self) -> str:
        cut = self.cut
        return (
            f"{self.shape.tile_pixels}x{self.columns} of {self.shape.image_pixels} in "
            f"{self.row_tiles}, {cut.kind} {cut.piece}"
        )

    @property
    def piece_bytes(self) -> int:
        return 4 * self.layer.chunk * self.cut.pitch

    @property
    def input_bytes(self) -> int:
        return self.pieces[0] * self.piece_bytes

    @property
    def product_bytes(self) -> int:
        """Weights of a tap."""
        return 4 * self.layer.chunk * self.columns

    @property
    def weight_bytes(self) -> int:
        return self.layer.most_unit_taps * self.product_bytes

    @property
    def all_weight_stages(self) -> int:
        return self.layer.chunks * self.layer.units

    @property
    def column_tiles(self) -> int:
        return ceil_div(self.layer.out_channels, self.columns)

    @property
    def packed_bytes(self) -> int:
        return self.column_tiles * self.layer.chunks * self.layer.taps * self.product_bytes

    @property
    def resident(self) -> bool:
        return self.column_tiles == 1 and self.weight_stages == self.all_weight_stages

    @property
    def shared_bytes(self) -> int:
        return self.input_stages * (self.input_bytes + 16) + self.weight_stages * (
            self.weight_bytes + 16
        )

    @property
    def vector(self) -> int:
        """Neighbours that a thread loads and stores at once."""
        whole = self.cut.flat and self.layer.image_size == self.layer.grid
        return 2 * self.row_tiles if whole and self.shape.tile_pixels % 4 == 0 else 1

    @property
    def pairs(self) -> bool:
        """Whether the phases of a row are stored at once."""
        return self.layer.axes[1].phases == 2 and self.layer.image_size[1] % 2 == 0

    def fitted(self, budget: int) -> Tile | None:
        """With as many stages as fit ``budget`` bytes of shared memory, or None."""
        layer = self.layer
        input_stage, weight_stage = self.input_bytes + 16, self.weight_bytes + 16
        if self.column_tiles == 1:
            every = self.all_weight_stages
            if every * weight_stage + 3 * input_stage <= budget:
                inputs = min((budget - every * weight_stage) // input_stage, MOST_INPUT_STAGES)
                return replace(self, input_stages=inputs, weight_stages=every)
        inputs = weights = 2
        if inputs * input_stage + weights * weight_stage > budget:
            return None
        while True:
            left = budget - inputs * input_stage - weights * weight_stage
            # What is ahead of the consumers, in units.
            wants_weights = weights < inputs * layer.units and weights < MOST_WEIGHT_STAGES
            if wants_weights and left >= weight_stage:
                weights += 1
            elif inputs < MOST_INPUT_STAGES and inputs * layer.units < 12 and left >= input_stage:
                inputs += 1
            else:
                break
        return replace(self, input_stages=inputs, weight_stages=weights)

    @property
    def row_lines(self) -> float:
        """Of 128 bytes, that a copy reads for a channel: one more for each of a piece's rows."""
        if self.cut.bulk:
            return self.cut.pitch / 32
        rows = self.cut.piece if self.cut.kind == "rows" else 1
        return rows + self.cut.pitch / 32

    @lazy
    def work(self) -> dict[str, float]:
        """What a tile takes a processor, in cycles, if there were nothing else to do."""
        layer = self.layer
        rows, columns = layer.axes
        steps = layer.chunks * layer.chunk // STEP
        row_tiles = CONSUMERS * self.row_tiles
        products = row_tiles * steps * layer.taps
        weights = layer.chunks * layer.taps * self.product_bytes
        loaded = layer.chunks * self.pieces[1] * self.piece_bytes
        lanes = 1 if self.vector > 1 else self.cut.conflicts(columns.step)
        fragments = row_tiles * steps * layer.units * ROWS * STEP * 4
        units = layer.chunks * layer.units
        waited = units * WEIGHTS_LATENCY + weights / CACHE_BYTES
        positions = self.shape.tile_pixels * layer.grid_pixels / self.shape.image_pixels
        outputs = positions * rows.phases * columns.phases * self.columns * 4
        read = positions * layer.in_pixels / layer.grid_pixels * layer.in_channels * 4
        stored = VECTOR_BYTES if self.vector > 1 else PAIR_BYTES if self.pairs else STORED_BYTES
        return {
            "products": products * self.columns / 2,
            "shared": (products * self.columns * 32 + fragments * lanes + loaded + weights)
            / SHARED_BYTES,
            "units": units * UNIT_CYCLES * self.row_tiles + products * self.columns / 2 / CONSUMERS,
            "planes": layer.chunks * PLANES_LATENCY / (self.input_stages - 1),
            "weights": 0.0 if self.resident else waited / (self.weight_stages - 1),
            "stores": outputs / stored,
            "loads": (loaded + (0 if self.resident else weights)) / CACHE_BYTES,
            "lines": layer.chunks * self.pieces[1] * layer.chunk * self.row_lines * LINE_CYCLES,
            "memory": (read / self.cut.row_step / self.column_tiles + outputs) / MEMORY_BYTES,
        }

    def _cycles(self, rounds: float, share: float) -> float:
        """Of so many rounds of tiles, of so many tiles a processor."""
        work = self.work
        consumers = max(work[name] for name in ("products", "shared", "units", "planes", "weights"))
        computed = rounds * (consumers + work["stores"] + TILE_CYCLES)
        loaded = max(rounds * max(work["loads"], work["lines"]), share * work["memory"])
        return together(computed, loaded, loss=OVERLAP_LOSS)

    def tiles(self, batch: int) -> int:
        return ceil_div(batch * self.shape.image_pixels, self.shape.tile_pixels) * self.column_tiles

    def cycles(self, gpu: Gpu) -> float:
        """What the whole layer takes, estimated."""
        tiles = self.tiles(self.layer.problem.batch)
        packing = PACK_CYCLES + self.packed_bytes / PACK_BYTES
        rounds = ceil_div(tiles, gpu.processors)
        return packing + START_CYCLES + self._cycles(rounds, tiles / gpu.processors)

    @lazy
    def image_cycles(self) -> float:
        """What an image takes, of many, in cycles of one processor."""
        tiles = self.shape.image_pixels / self.shape.tile_pixels * self.column_tiles
        return self._cycles(tiles, tiles)

    @property
    def map(self) -> TensorMap:
        """Of the planes: rows' pixels, rows, channels, images."""
        layer, cut = self.layer, self.cut
        pixels, width = layer.in_pixels, layer.in_size[1]
        planes = (4 * pixels, 4 * layer.in_channels * pixels)
        counts = (layer.in_channels, layer.problem.batch)
        if cut.kind == "rows":
            rows = ceil_div(layer.in_size[0], cut.row_step)
            return TensorMap(
                "input", "float", (cut.row_pixels, rows, *counts),
                (4 * cut.row_step * width, *planes), (cut.row_pixels, cut.piece, layer.chunk, 1),
                promotion=256,
            )  # fmt: skip
        return TensorMap(
            "input", "float", (pixels, 1, *counts), (4 * pixels, *planes),
            (cut.pitch, 1, layer.chunk, 1), promotion=256,
        )  # fmt: skip


def tiles_of(layer: Layer, gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the best first.

    Raises:
        Declined: there are none.
    """
    found = []
    for row_tiles in (1, 2):
        most = MOST_SUMS // (layer.phase_sums * row_tiles)
        widths = _widths(layer.out_channels, most)
        for cut in cuts_of(layer) if widths else ():
            for shape in shapes_of(layer, CONSUMERS * ROWS * row_tiles):
                if cut.flat and (shape.tile_pixels % 4 or shape.image_pixels % 4):
                    continue
                pieces = pieces_of(layer, cut, shape)
                for columns in widths:
                    tile = Tile(layer, cut, shape, pieces, row_tiles, columns)
                    found.append(tile.fitted(gpu.shared_bytes_per_block))
    tiles = sorted(filter(None, found), key=lambda tile: tile.cycles(gpu))
    if not tiles:
        raise Declined(
            f"planes of {layer.in_size[0]}x{layer.in_size[1]} pixels and {layer.in_channels} "
            "channels, of which no piece can be copied that fits shared memory"
        )
    return tiles


def _widths(channels: int, most: int) -> list[int]:
    """Columns of a product that share out the output channels about equally."""
    found = []
    for count in range(ceil_div(channels, most), ceil_div(channels, LEAST_COLUMNS) + 1):
        columns = round_up(ceil_div(channels, count), 8)
        if columns <= most and columns not in found:
            found.append(columns)
        if len(found) == 4:
            break
    return found
