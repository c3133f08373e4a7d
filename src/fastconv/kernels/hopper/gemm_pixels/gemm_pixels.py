"""Plans channels-last layers of 16-bit types with ``gemm_pixels.cuh``.

What decides the order of a sum (taps, then channels) is the layer's alone; a tile changes no bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Im2colMap,
    Kernel,
    Launch,
    Operands,
    Plan,
    TensorMap,
    geometry_constants,
)
from fastconv.kernels.hopper import block
from fastconv.kernels.lazy import lazy
from fastconv.kernels.tensor import limits
from fastconv.problem import Pair, Problem

SOURCE = "hopper/gemm_pixels/gemm_pixels.cuh"
DEPTH = 64  # channels of a step of the sum: 128 bytes
ROWS = 64  # of a consumer
STORED_COLUMNS = 64
WARP_BYTES = 16 * STORED_COLUMNS * 2  # of what a warp stores at once
PACK_THREADS = 256
MOST_PACK_BLOCKS = 1024
MOST_STAGES = 8
ENOUGH_STAGES = 4
FEWEST_STAGES = 2
REGISTERS = 65536  # of a processor
OTHER_REGISTERS = 30  # of a thread, beside its sums
SCATTER_REGISTERS = 46  # the same where pixels are stored one by one
COLUMNS = (64, 128, 192, 256)  # of a tile
CONSUMERS = (1, 2, 3, 4)
MOST_BLOCKS = 4  # of a processor
# Estimates: fitted to measurements of ResNet-50's layers on an H200, in cycles of 1.755 GHz.
SHARED_BYTES = 128.0  # a cycle, that products read of shared memory
LOAD_BYTES = 108.0  # a cycle, of one processor
CACHE_BYTES = 52.0  # a cycle and processor, if all of them load
MEMORY_BYTES = 17.0  # likewise, of the GPU's memory
LATENCY = 1200.0  # of a load
TILE_CYCLES = 250.0  # to end one tile and begin the next
STORED_BYTES = 28.0  # a cycle, of a block's sums on their way out
OVERLAP_LOSS = 0.25
START_CYCLES = 3900.0  # of a launch
# What tensor copies can express of images: where they begin, and how far taps lie from there.
CORNERS = range(-128, 128)
MOST_OFFSET = 255
MOST_STEP = 8
MOST_PHASES = 128  # along an axis: each is looked at, most of them for nothing


@dataclass(frozen=True)
class Layer:
    """A pass as a product: what it reads, its taps, its positions, what it writes."""

    problem: Problem
    operands: Operands
    transposed: bool

    @property
    def in_channels(self) -> int:
        """That the sum goes over."""
        return self.problem.out_channels if self.transposed else self.problem.in_channels

    @property
    def out_channels(self) -> int:
        return self.problem.in_channels if self.transposed else self.problem.out_channels

    @property
    def in_size(self) -> Pair:
        return self.problem.output_size if self.transposed else self.problem.input_size

    @property
    def image_size(self) -> Pair:
        return self.problem.input_size if self.transposed else self.problem.output_size

    @property
    def phases(self) -> Pair:
        """Of a position: pixels that it stands for, along both axes."""
        return self.problem.stride if self.transposed else (1, 1)

    @property
    def positions(self) -> Pair:
        """Of an image."""
        rows, columns = map(ceil_div, self.image_size, self.phases)
        return rows, columns

    @property
    def steps(self) -> Pair:
        """Between what neighbouring positions read."""
        return (1, 1) if self.transposed else self.problem.stride

    @lazy
    def reads(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """For both axes, for each phase: how far from its position each of its taps reads."""
        problem = self.problem
        sides = zip(
            problem.kernel_size,
            problem.stride,
            problem.dilation,
            (problem.padding.top, problem.padding.left),
            strict=True,
        )
        rows, columns = (self._reads_of_axis(*side) for side in sides)
        return rows, columns

    def _reads_of_axis(
        self, taps: int, stride: int, dilation: int, padding: int
    ) -> tuple[tuple[int, ...], ...]:
        if not self.transposed:
            return (tuple(tap * dilation - padding for tap in range(taps)),)
        places = ([r + padding - dilation * tap for tap in range(taps)] for r in range(stride))
        return tuple(tuple(at // stride for at in of if at % stride == 0) for of in places)

    @lazy
    def lower(self) -> Pair:
        """Where the first position reads its first tap, rows and columns."""
        rows, columns = (min(min(of, default=0) for of in axis) for axis in self.reads)
        return rows, columns

    @property
    def taps(self) -> int:
        """Of all phases together."""
        rows, columns = (sum(map(len, axis)) for axis in self.reads)
        return rows * columns

    @property
    def flat(self) -> bool:
        """Whether all images are one matrix: a position reads the pixel that it is."""
        problem = self.problem
        return problem.kernel_size == problem.stride == (1, 1) and not any(problem.padding)

    @property
    def dense(self) -> bool:
        """Whether positions lie in the output side by side."""
        return self.phases == (1, 1)

    @property
    def packs(self) -> bool:
        """Whether weights have to be moved, so that neighbours are input channels."""
        out, in_, rows, columns = self.operands.weight_strides
        kernel = self.problem.kernel_size
        sides = [out, *(s for s, n in ((rows, kernel[0]), (columns, kernel[1])) if n > 1)]
        return in_ != 1 or any(stride % self.operands.vector for stride in sides)

    @property
    def weight_strides(self) -> tuple[int, int, int, int]:
        """Of the weights that are mapped."""
        channels, (height, width) = self.problem.in_channels, self.problem.kernel_size
        dense = (height * width * channels, 1, width * channels, channels)
        if self.packs:
            return dense
        out, in_, rows, columns = self.operands.weight_strides
        # Along an axis of one tap, no stride is needed, and what is given may be any number.
        return out, in_, rows if height > 1 else dense[2], columns if width > 1 else dense[3]

    @lazy
    def image_bytes(self) -> float:
        """That an image has in memory, read and written; of the one that is read, what is used."""
        used = 1.0
        for step, taps in zip(self.steps, self.problem.kernel_size, strict=True):
            used *= min(1.0, taps / step)
        read = self.in_channels * self.in_size[0] * self.in_size[1] * used
        return 2 * (read + self.out_channels * self.image_size[0] * self.image_size[1])


def layer_of(problem: Problem, operands: Operands, gpu: Gpu, transposed: bool) -> Layer:
    """The layer of a pass.

    Raises:
        Declined: this kernel cannot compute it.
    """
    block.check(gpu)
    problem = problem.without_idle_dilation
    layer = Layer(problem, operands, transposed)
    if operands.scalar_bytes != 2:
        raise Declined(f"{operands.scalar}")
    if not (operands.input_channels_last and operands.output_channels_last):
        raise Declined("contiguous images")
    if not operands.aligned:
        raise Declined("tensors that are not aligned")
    if problem.groups > 1:
        raise Declined(f"{problem.groups} groups")
    channels = (layer.in_channels, layer.out_channels)
    limits.check(operands, 1, channels, layer.in_size, layer.image_size)
    for count in channels:
        if count % operands.vector:
            raise Declined(f"{count} channels, not a multiple of {operands.vector}")
    if not layer.flat:
        _check_corners(layer)
    return layer


def _check_corners(layer: Layer) -> None:
    if max(layer.steps) > MOST_STEP or max(layer.phases) > MOST_PHASES:
        raise Declined(f"a stride of {layer.problem.stride}")
    for lower, upper in zip(layer.lower, _upper(layer), strict=True):
        if lower not in CORNERS or upper not in CORNERS:
            raise Declined(f"images read from {lower} to {upper} beyond their ends")
    for axis, lower in zip(layer.reads, layer.lower, strict=True):
        reach = max(max(of, default=lower) for of in axis) - lower
        if reach > MOST_OFFSET:
            raise Declined(f"taps that are {reach} pixels apart")


def _upper(layer: Layer) -> Pair:
    """How far beyond the last pixel a position's first tap may read."""
    sides = zip(layer.lower, layer.positions, layer.steps, layer.in_size, strict=True)
    rows, columns = (at + (count - 1) * step + 1 - size for at, count, step, size in sides)
    return rows, columns


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and with what."""

    layer: Layer
    consumers: int
    columns: int
    blocks: int  # of a processor
    stages: int = 0
    buffers: int = 1

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns}, {self.blocks} at once"

    @property
    def rows(self) -> int:
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32

    @property
    def stage_bytes(self) -> int:
        """With its barriers."""
        return (self.rows + self.columns) * 2 * DEPTH + 16

    @property
    def shared_bytes(self) -> int:
        staged = 4 * self.consumers * self.buffers * WARP_BYTES
        return self.stages * self.stage_bytes + staged

    @property
    def registers(self) -> int:
        """That a thread needs."""
        return self.columns // 2 + (OTHER_REGISTERS if self.layer.dense else SCATTER_REGISTERS)

    @property
    def most_registers(self) -> int:
        """That a thread can have: a processor's quarters have equally many, warps are dealt out."""
        warps = ceil_div(self.blocks * self.threads // 32, 4)
        return REGISTERS // 4 // 32 // warps // 8 * 8

    def row_tiles(self, batch: int) -> int:
        rows, columns = self.layer.positions
        return ceil_div(batch * rows * columns, self.rows)

    @property
    def column_tiles(self) -> int:
        return ceil_div(self.layer.out_channels, self.columns)

    def tiles(self, batch: int) -> int:
        rows, columns = self.layer.phases
        return self.row_tiles(batch) * self.column_tiles * rows * columns

    @lazy
    def _work(self) -> tuple[float, float, float]:
        """Of a tile, on average: cycles of its products, bytes that it loads, bytes it stores."""
        layer = self.layer
        phases = layer.phases[0] * layer.phases[1]
        depth = layer.taps * layer.in_channels / phases
        product = max(self.columns / 2, (ROWS + self.columns) * 32 / SHARED_BYTES)
        products = self.consumers * ceil_div(layer.in_channels, 16) * layer.taps / phases * product
        columns = min(self.columns, layer.out_channels)
        return products, (self.rows + self.columns) * 2 * depth, 2.0 * self.rows * columns

    @lazy
    def tile_cycles(self) -> float:
        """What a tile takes a processor that has more of them than it computes at once."""
        products, loaded, stored = self._work
        busy = max(products, loaded / LOAD_BYTES)
        under_way = max((self.stages - 1) * (self.stage_bytes - 16), 1)
        alone = max(busy, loaded / under_way * LATENCY)
        ending = TILE_CYCLES + stored / STORED_BYTES
        tile = max(busy, (alone + ending) / self.blocks)
        return tile if self.blocks == 1 else tile + OVERLAP_LOSS * min(busy, ending)

    def _cycles(self, rounds: float, tiles: float, images: float) -> float:
        """Of so many rounds of tiles, of so many tiles a processor, which are so many images."""
        cached = tiles * self._work[1] / CACHE_BYTES
        memory = images * self.layer.image_bytes / MEMORY_BYTES
        return limits.together(rounds * self.tile_cycles, max(cached, memory), loss=OVERLAP_LOSS)

    def cycles(self, processors: int) -> float:
        """What the layer takes, estimated."""
        batch = self.layer.problem.batch
        tiles = self.tiles(batch)
        share = tiles / processors
        return START_CYCLES + self._cycles(ceil_div(tiles, processors), share, batch / processors)

    @lazy
    def image_cycles(self) -> float:
        """What an image of a large batch takes, in cycles of one processor."""
        rows, columns = self.layer.positions
        phases = self.layer.phases[0] * self.layer.phases[1]
        tiles = phases * self.column_tiles * rows * columns / self.rows
        return self._cycles(tiles, tiles, 1.0)

    def fitted(self, gpu: Gpu) -> Tile | None:
        """With as many stages as fit; None if too few do."""
        if self.registers > self.most_registers:
            return None
        budget = gpu.shared_budget(self.blocks)
        for buffers, fewest in ((2, ENOUGH_STAGES), (1, FEWEST_STAGES)):
            if buffers > self.columns // STORED_COLUMNS:
                continue
            room = budget - 4 * self.consumers * buffers * WARP_BYTES
            stages = min(room // self.stage_bytes, MOST_STAGES)
            if stages >= fewest:
                return Tile(
                    self.layer,
                    self.consumers,
                    self.columns,
                    self.blocks,
                    stages,
                    buffers,
                )
        return None


def tiles_of(layer: Layer, gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the best first."""
    return sorted(_tiles(layer, gpu), key=lambda tile: tile.cycles(gpu.processors))


def image_cycles(layer: Layer, gpu: Gpu) -> float:
    """What an image takes, in cycles of one processor."""
    return min(tile.image_cycles for tile in _tiles(layer, gpu))


def _tiles(layer: Layer, gpu: Gpu) -> Iterator[Tile]:
    choices = product(CONSUMERS, COLUMNS, range(1, MOST_BLOCKS + 1))
    for consumers, columns, blocks in choices:
        if columns >= 2 * layer.out_channels and columns > COLUMNS[0]:
            continue
        tile = Tile(layer, consumers, columns, blocks).fitted(gpu)
        if tile is not None:
            yield tile


def plans(layer: Layer, gpu: Gpu, most: int) -> list[Plan]:
    """The plans that the rules like best. All give the same bits."""
    return [plan(tile, gpu) for tile in tiles_of(layer, gpu)[:most]]


def plan(tile: Tile, gpu: Gpu) -> Plan:
    """The launches that compute a layer so."""
    layer, batch = tile.layer, tile.layer.problem.batch
    rows, columns = layer.positions
    tiles = tile.tiles(batch)
    if max(tiles, (batch * rows * columns + tile.rows)) >= 2**31:
        raise Declined(f"{batch} images of {rows} by {columns} positions, 2^31 and more")
    constants = tuple(_constants(tile).items())
    launch = Launch(
        Kernel(SOURCE, "gemm_pixels", constants),
        (min(tiles, gpu.processors * tile.blocks), 1, 1),
        tile.threads,
        tile.shared_bytes,
        (_input_map(tile), _weight_map(tile), _output_map(layer), "bias", "output", batch),
        early=True,
    )
    weights = layer.problem.out_channels * layer.problem.in_channels
    weights *= layer.problem.kernel_size[0] * layer.problem.kernel_size[1]
    pack = Launch(
        Kernel(SOURCE, "pack", constants),
        (min(ceil_div(weights // 8, PACK_THREADS), MOST_PACK_BLOCKS), 1, 1),
        PACK_THREADS,
        0,
        ("weight", "scratch"),
    )
    why = (
        f"tensor cores: {tile.rows} pixels by {tile.columns} channels a block, "
        "as a product of matrices"
    )
    if layer.packs:
        return Plan((pack, launch), 2 * weights, "hopper", why, choice=tile.name, packs=1)
    return Plan((launch,), 0, "hopper", why, choice=tile.name)


def _input_map(tile: Tile) -> TensorMap | Im2colMap:
    layer, scalar = tile.layer, tile.layer.operands.scalar
    height, width = layer.in_size
    channels, batch = layer.in_channels, layer.problem.batch
    pixel = 2 * channels
    if layer.flat:
        sizes = (channels, batch * height * width)
        return TensorMap("input", scalar, sizes, (pixel,), (DEPTH, tile.rows), swizzle=128)
    return Im2colMap(
        "input",
        scalar,
        (channels, width, height, batch),
        (pixel, width * pixel, height * width * pixel),
        layer.lower[::-1],
        _upper(layer)[::-1],
        DEPTH,
        tile.rows,
        (1, *layer.steps[::-1], 1),
        swizzle=128,
    )


def _weight_map(tile: Tile) -> TensorMap:
    layer = tile.layer
    height, width = layer.problem.kernel_size
    out, _, rows, columns = layer.weight_strides
    along = ROWS if layer.transposed else tile.columns
    return TensorMap(
        "scratch" if layer.packs else "weight",
        layer.operands.scalar,
        (layer.problem.in_channels, width, height, layer.problem.out_channels),
        (2 * columns, 2 * rows, 2 * out),
        (DEPTH, 1, 1, along),
        swizzle=128,
    )


def _output_map(layer: Layer) -> TensorMap:
    """Of all pixels; a warp stores 16 of them."""
    height, width = layer.image_size
    sizes = (layer.out_channels, layer.problem.batch * height * width)
    strides = (2 * layer.out_channels,)
    box = (STORED_COLUMNS, 16)
    return TensorMap("output", layer.operands.scalar, sizes, strides, box, swizzle=128)


def _constants(tile: Tile) -> dict[str, Constant]:
    layer, problem = tile.layer, tile.layer.problem
    taps = [len(of) for axis in layer.reads for of in (axis[0], axis[-1])]
    return {
        "Scalar": layer.operands.scalar,
        "transposed": layer.transposed,
        "flat": layer.flat,
        "dense": layer.dense,
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "weight_in": problem.in_channels,
        "weight_out": problem.out_channels,
        "image_height": layer.image_size[0],
        "image_width": layer.image_size[1],
        "position_rows": layer.positions[0],
        "position_columns": layer.positions[1],
        "lower_height": layer.lower[0],
        "lower_width": layer.lower[1],
        "input_step_height": layer.steps[0],
        "input_step_width": layer.steps[1],
        **geometry_constants(
            problem.kernel_size,
            problem.stride,
            problem.dilation,
            (problem.padding.top, problem.padding.left),
            layer.operands,
        ),
        "last_phase_first": taps[0] < taps[1] or taps[2] < taps[3],
        "consumers": tile.consumers,
        "tile_columns": tile.columns,
        "blocks": tile.blocks,
        "stages": tile.stages,
        "buffers": tile.buffers,
    }
