"""Tiles of the NCHW implicit GEMM: how planes are copied, stages, and estimated cycles."""

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
    CHUNK,
    FEW_BULK_PIXELS,
    FEW_PIXELS,
    Layer,
)
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together

ROWS = 64  # M of a wgmma
STEP = 8  # K of a TF32 wgmma
MOST_BOX = 256  # elements of a TMA box along each axis
MOST_COLUMNS = 256  # N of a warpgroup's MMAs, over all residues and row tiles: 128 accumulators
LEAST_COLUMNS = 32  # N, unless a group has fewer output channels
MOST_STARTS = 4096  # tiles of a layer with different places in an image; layers with more decline
MOST_INPUT_STAGES = 6
MOST_WEIGHT_STAGES = 8
FLAT_PIECES = (40, 72, 136, 200)  # pixels, 8 modulo the banks: lanes' channels hit different banks
ROW_PIECES = (2, 3, 4, 6, 8)  # rows
BANKS = 32  # of shared memory, with 4 bytes each

# Estimates: fitted to 601 measured tiles of ResNet-50's layers and others on an H200, in cycles of
# 1.755 GHz. See docs/kernels/hopper-implicit-gemm-nchw.md.
# Bytes per cycle of an SM: shared memory, L2 and DRAM if all SMs load.
SHARED_BYTES = 128.0
CACHE_BYTES = 45.0
MEMORY_BYTES = 18.2
LINE_CYCLES = 3.6  # of a TMA copy, for each cache line of 128 bytes that it touches
# Bytes that the epilogue stores per cycle: in general, vectors of neighbouring pixels, and pairs of
# two residues.
STORED_BYTES = 19.0
VECTOR_BYTES = 22.0
PAIR_BYTES = 14.0
NARROWEST_MMA = 64  # columns of an MMA with A in registers; fewer take as long
UNIT_CYCLES = 396.0  # to load a unit's fragments of A, for each row tile of a warpgroup
# The part of them that units of groups with fewer channels do not save: addresses and waits. With
# two row tiles, units of 8, 16 and 32 channels have 170, 195 and 250 instructions. What was fitted
# to layers without groups does not distinguish them.
UNIT_START = 0.55
# Cycles from a copy's start to its arrival.
PLANES_LATENCY = 530.0
WEIGHTS_LATENCY = 1170.0
TILE_CYCLES = 150.0  # prologue and epilogue of a tile
OVERLAP_LOSS = 0.18  # how much of the shorter of computing and loading is not hidden
START_CYCLES = 5000.0  # of a launch
PACK_CYCLES = 3000.0  # of the launch that packs weights
PACK_BYTES = 500.0  # of weights that it packs per cycle, on all SMs together


@dataclass(frozen=True)
class Cut:
    """How planes are cut into pieces that are copied to shared memory, each [channel][pitch].

    A piece has ``piece`` rows of ``row_pixels`` pixels (kind "rows"), ``piece`` pixels of a plane
    that is taken for one row ("flat"), or is a whole plane ("whole"). Its rows are every
    ``row_step``-th row of the image. With ``bulk``, bulk copies are used instead of a tensor map.
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
        """Lanes that read the same bank, if the pixels of neighbouring lanes are ``step`` apart."""
        return _conflicts(self.pitch % BANKS, step % BANKS)


@cache
def _conflicts(pitch: int, step: int) -> int:
    lanes = product(range(4), range(8))  # channels, pixels
    banks = Counter((t * pitch + g * step) % BANKS for t, g in lanes)
    return max(banks.values())


def cuts_of(layer: Layer) -> list[Cut]:
    """All ways to cut the layer's planes."""
    return [*_flat_cuts(layer), *_whole_cuts(layer), *_row_cuts(layer)]


def _flat_cuts(layer: Layer) -> Iterator[Cut]:
    if layer.flat and layer.in_pixels % 4 == 0:
        for piece in FLAT_PIECES:
            yield Cut("flat", piece, layer.in_pixels, piece)


def _whole_cuts(layer: Layer) -> Iterator[Cut]:
    pixels, width = layer.in_pixels, layer.in_size[1]
    if pixels % 4:
        if pixels <= FEW_BULK_PIXELS and layer.in_channels * pixels % 4 == 0:
            yield Cut("whole", 1, width, pixels, bulk=True)
        return
    if pixels > FEW_PIXELS:
        return
    spread = [pitch for pitch in range(pixels, MOST_BOX + 1, 4) if pitch % 16 == 8]
    yield Cut("whole", 1, width, spread[0] if spread else pixels)


def _row_cuts(layer: Layer) -> Iterator[Cut]:
    """Pieces of all rows, or, with a kernel of one row, of only those that the stride reads."""
    rows, _ = layer.axes
    height, width = layer.in_size
    if layer.in_pixels % 4 or width > MOST_BOX:
        return
    steps = {1, rows.step if rows.offsets == [0] else 1}
    for step in sorted(steps):
        row = width if width % 4 == 0 else round_up(width, 4)
        last = (height - 1) // step * step * width  # pixel where the last row begins
        if step * width % 4 or row > step * width or last + row > layer.in_pixels:
            continue
        most = min(ceil_div(height, step), MOST_BOX)
        for piece in sorted({*ROW_PIECES, most}):
            if piece <= most:
                yield Cut("rows", piece, row, piece * row, step)


@dataclass(frozen=True)
class Shape:
    """How positions are distributed over tiles: across images, or each image by itself."""

    tile_pixels: int
    image_pixels: int  # positions of an image, with those of its last tile beyond the grid


def shapes_of(layer: Layer, most: int) -> list[Shape]:
    """Shapes of tiles with at most ``most`` positions."""
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
    """Pieces of a tile: the most, and the mean."""
    tiles = _extents(layer, cut.kind, cut.row_step, shape)
    counts = [(sum(ceil_div(n, cut.piece) for n in parts), many) for parts, many in tiles.items()]
    return max(counts)[0], sum(count * many for count, many in counts) / tiles.total()


@lru_cache(maxsize=64)
def _extents(layer: Layer, kind: str, row_step: int, shape: Shape) -> Counter[tuple[int, ...]]:
    """Rows, pixels or planes that a tile needs of each image, and how many tiles need the same.

    Cached, because many cuts differ in the size of their pieces alone.

    Raises:
        Declined: there are too many different tiles.
    """
    cycle = shape.image_pixels // gcd(shape.tile_pixels, shape.image_pixels)
    if cycle > MOST_STARTS:
        raise Declined(f"{cycle} different tiles")
    return Counter(
        tuple(_extent(layer, kind, row_step, *span) for span in _spans(layer, shape, index))
        for index in range(cycle)
    )


def _spans(layer: Layer, shape: Shape, index: int) -> Iterator[tuple[int, int]]:
    """A tile's first and last position in each image, as in the device code's ``each_piece``."""
    first, left = index * shape.tile_pixels % shape.image_pixels, shape.tile_pixels
    while left > 0:
        yield first, min(first + left, layer.grid_pixels) - 1
        left -= shape.image_pixels - first
        first = 0


def _extent(layer: Layer, kind: str, row_step: int, first: int, last: int) -> int:
    """Rows, pixels or planes that positions ``first`` to ``last`` of an image need."""
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
    """What a block computes at once: positions by ``columns`` output channels of each residue."""

    layer: Layer
    cut: Cut
    shape: Shape
    pieces: tuple[int, float]  # see pieces_of
    row_tiles: int  # M of a consumer warpgroup, in units of 64
    columns: int  # N
    input_stages: int = 0
    weight_stages: int = 0

    @property
    def name(self) -> str:
        """Tells the tile from all others of its layer."""
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
    def tap_bytes(self) -> int:
        """Bytes of a tap's weights for a chunk of channels."""
        return 4 * self.layer.chunk * self.columns

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight stage: the taps of a unit."""
        return self.layer.most_unit_taps * self.tap_bytes

    @property
    def all_weight_stages(self) -> int:
        """Stages that hold all weights of a tile."""
        return self.layer.chunks * self.layer.units

    @property
    def column_tiles(self) -> int:
        """Tiles of the output channels: each has channels of one group."""
        return self.layer.groups * ceil_div(self.layer.group_out, self.columns)

    @property
    def packed_bytes(self) -> int:
        return self.column_tiles * self.layer.chunks * self.layer.taps * self.tap_bytes

    @property
    def resident(self) -> bool:
        """Whether all weights stay in shared memory, because all tiles read the same ones."""
        return self.column_tiles == 1 and self.weight_stages == self.all_weight_stages

    @property
    def shared_bytes(self) -> int:
        return self.input_stages * (self.input_bytes + 16) + self.weight_stages * (
            self.weight_bytes + 16
        )

    @property
    def vector(self) -> int:
        """Neighbouring pixels that a thread loads and stores at once."""
        whole = self.cut.flat and self.layer.image_size == self.layer.grid
        return 2 * self.row_tiles if whole and self.shape.tile_pixels % 4 == 0 else 1

    @property
    def pairs(self) -> bool:
        """Whether the two residues of a row's stride are stored at once."""
        return self.layer.axes[1].residues == 2 and self.layer.image_size[1] % 2 == 0

    def fitted(self, budget: int) -> Tile | None:
        """The tile with as many stages as fit ``budget`` bytes of shared memory, or None."""
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
            # Weight stages hold one unit each, input stages all units of a chunk. Both should run
            # equally far ahead of the consumers.
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
        """Cache lines that a copy reads for a channel, if rows begin anywhere in a line."""
        if self.cut.bulk:
            return self.cut.pitch / 32
        rows = self.cut.piece if self.cut.kind == "rows" else 1
        return rows + self.cut.pitch / 32

    @property
    def unit_cycles(self) -> float:
        """Cycles to load a unit's fragments, for each row tile of a warpgroup."""
        if self.layer.groups == 1:
            return UNIT_CYCLES
        return UNIT_CYCLES * (UNIT_START + (1 - UNIT_START) * self.layer.chunk / CHUNK)

    @lazy
    def work(self) -> dict[str, float]:
        """Cycles of each kind of work of a tile, as if there were nothing else to do."""
        layer = self.layer
        rows, columns = layer.axes
        steps = layer.chunks * layer.chunk // STEP
        mma_cycles = max(self.columns, NARROWEST_MMA) / 2
        row_tiles = CONSUMERS * self.row_tiles
        mmas = row_tiles * steps * layer.taps
        weights = layer.chunks * layer.taps * self.tap_bytes
        loaded = layer.chunks * self.pieces[1] * self.piece_bytes
        lanes = 1 if self.vector > 1 else self.cut.conflicts(columns.step)
        fragments = row_tiles * steps * layer.units * ROWS * STEP * 4
        units = layer.chunks * layer.units
        waited = units * WEIGHTS_LATENCY + weights / CACHE_BYTES
        positions = self.shape.tile_pixels * layer.grid_pixels / self.shape.image_pixels
        outputs = positions * rows.residues * columns.residues * self.columns * 4
        read = positions * layer.in_pixels / layer.grid_pixels * layer.in_channels * 4
        stored = VECTOR_BYTES if self.vector > 1 else PAIR_BYTES if self.pairs else STORED_BYTES
        return {
            "mma": mmas * mma_cycles,
            "shared": (mmas * self.columns * 32 + fragments * lanes + loaded + weights)
            / SHARED_BYTES,
            "units": units * self.unit_cycles * self.row_tiles + mmas * mma_cycles / CONSUMERS,
            "planes": layer.chunks * PLANES_LATENCY / (self.input_stages - 1),
            "weights": 0.0 if self.resident else waited / (self.weight_stages - 1),
            "stores": outputs / stored,
            "loads": (loaded + (0 if self.resident else weights)) / CACHE_BYTES,
            "lines": layer.chunks * self.pieces[1] * layer.chunk * self.row_lines * LINE_CYCLES,
            "memory": (read / self.cut.row_step / self.column_tiles + outputs) / MEMORY_BYTES,
        }

    def _cycles(self, rounds: float, share: float) -> float:
        """Cycles of ``rounds`` rounds of tiles, with a mean of ``share`` tiles per SM."""
        work = self.work
        consumers = max(work[name] for name in ("mma", "shared", "units", "planes", "weights"))
        computed = rounds * (consumers + work["stores"] + TILE_CYCLES)
        loaded = max(rounds * max(work["loads"], work["lines"]), share * work["memory"])
        return together(computed, loaded, loss=OVERLAP_LOSS)

    def tiles(self, batch: int) -> int:
        return ceil_div(batch * self.shape.image_pixels, self.shape.tile_pixels) * self.column_tiles

    def cycles(self, gpu: Gpu) -> float:
        """The estimated cycles of the whole layer."""
        tiles = self.tiles(self.layer.problem.batch)
        packing = PACK_CYCLES + self.packed_bytes / PACK_BYTES
        rounds = ceil_div(tiles, gpu.sm_count)
        return packing + START_CYCLES + self._cycles(rounds, tiles / gpu.sm_count)

    @lazy
    def image_cycles(self) -> float:
        """Cycles of one SM for an image of a large batch."""
        tiles = self.shape.image_pixels / self.shape.tile_pixels * self.column_tiles
        return self._cycles(tiles, tiles)

    @property
    def map(self) -> TensorMap:
        """The tensor map of the planes: pixels of a row, rows, channels, images."""
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
    """All tiles that fit, the fastest by estimate first.

    Raises:
        Declined: there are none.
    """
    found = []
    for row_tiles in (1, 2):
        most = MOST_COLUMNS // (layer.reached_residues * row_tiles)
        widths = _widths(layer.group_out, most)
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
    """Choices of N that divide the output channels about equally."""
    found = []
    for count in range(ceil_div(channels, most), ceil_div(channels, LEAST_COLUMNS) + 1):
        columns = round_up(ceil_div(channels, count), 8)
        if columns <= most and columns not in found:
            found.append(columns)
        if len(found) == 4:
            break
    return found
