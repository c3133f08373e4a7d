"""What a block multiplies at once, what of it lies in shared memory, and what that should take.

A tile changes no bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Gpu
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.implicit_gemm_nhwc.layer import Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits

DEPTH = 64  # channels of a step of the sum: 128 bytes
ROWS = 64  # of a consumer
BOX_COLUMNS = 64
WARP_BYTES = 16 * BOX_COLUMNS * 2  # of what a warp stores at once
MOST_STAGES = 8
ENOUGH_STAGES = 4
FEWEST_STAGES = 2
BARRIER_BYTES = 16  # of the one for weights that stay, rounded up
OTHER_REGISTERS = 30  # of a thread, beside its sums
SCATTER_REGISTERS = 46  # the same where pixels are stored one by one
COLUMNS = (64, 128, 192, 256)  # of a tile; or those of a layer, if it has no more
COLUMN_STEP = 16
CONSUMERS = (1, 2, 3, 4)
MOST_BLOCKS = 4  # of a processor
# Estimates: fitted to 768 measured tiles of ResNet-50's layers and others on an H200, in cycles of
# 1.755 GHz. See docs/kernels/hopper.md.
SHARED_BYTES = 128.0  # a cycle, that products read of shared memory
CACHE_BYTES = 91.0  # a cycle and processor, if all of them load
MEMORY_BYTES = 21.0  # likewise, of the GPU's memory
LATENCY = 960.0  # of a load
PIXEL_CYCLES = 2.75  # of a pixel's 128 bytes that are copied in im2col mode
HALF_PIXEL_CYCLES = 6.0  # of 64 and more
NARROW_PIXEL_CYCLES = 10.6  # of fewer
TILE_CYCLES = 120.0  # to end one tile and begin the next
STORED_BYTES = 42.0  # a cycle, of a block's sums on their way out
SINGLY_STORED_BYTES = 33.0  # the same of a single buffer, box by box
PATCH_STORED_BYTES = 3.5  # of patches, two numbers at a time
OVERLAP_LOSS = 0.5
START_CYCLES = 1500.0  # of a launch


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and with what."""

    layer: Layer
    consumers: int
    columns: int
    blocks: int  # of a processor
    stages: int = 0
    buffers: int = 1
    joined: int = 1  # boxes of columns that are stored at once
    resident: bool = False  # whether all weights stay in shared memory

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
    def steps(self) -> int:
        """Of a tile's sum, most of all phases."""
        height, width = self.layer.problem.kernel_size
        return height * width * ceil_div(self.layer.in_channels, DEPTH)

    @property
    def resident_bytes(self) -> int:
        return self.steps * self.weight_bytes if self.resident else 0

    @property
    def weight_bytes(self) -> int:
        """Of a step."""
        columns = round_up(self.columns, BOX_COLUMNS) if self.layer.transposed else self.columns
        return columns * 2 * DEPTH

    @property
    def stage_bytes(self) -> int:
        """With its barriers."""
        return self.rows * 2 * DEPTH + (0 if self.resident else self.weight_bytes) + 16

    @property
    def shared_bytes(self) -> int:
        staged = 4 * self.consumers * self.buffers * self.joined * WARP_BYTES
        return self.resident_bytes + self.stages * self.stage_bytes + staged + BARRIER_BYTES

    @property
    def registers(self) -> int:
        """That a thread needs."""
        return self.columns // 2 + (OTHER_REGISTERS if self.layer.dense else SCATTER_REGISTERS)

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
        """Of a tile, on average: cycles of products and copies, bytes that it loads and stores."""
        layer = self.layer
        taps = layer.taps / (layer.phases[0] * layer.phases[1])
        product = max(self.columns / 2, (ROWS + self.columns) * 32 / SHARED_BYTES)
        products = self.consumers * ceil_div(layer.in_channels, 16) * taps * product
        steps = ceil_div(layer.in_channels, DEPTH) * taps
        copies = 0.0 if layer.flat else self.rows * taps * _pixel_cycles(layer.in_channels)
        loaded = (self.stage_bytes - 16) * steps
        stored = 2.0 * self.rows * min(self.columns, layer.out_channels)
        return max(products, copies), loaded, stored

    @property
    def _stored_bytes(self) -> float:
        """A cycle."""
        if self.layer.patches:
            return PATCH_STORED_BYTES
        return SINGLY_STORED_BYTES if self.buffers * self.joined == 1 else STORED_BYTES

    def _tile_cycles(self, blocks: float) -> float:
        """What a tile takes a processor that has so many blocks."""
        busy, loaded, stored = self._work
        under_way = (self.stages - 1) * (self.stage_bytes - 16)
        loading = loaded / under_way * LATENCY / blocks
        return TILE_CYCLES + max(busy, loading) + stored / self._stored_bytes

    def _cycles(self, rounds: float, blocks: float, tiles: float, images: float) -> float:
        """Of so many rounds of tiles, of so many tiles a processor, which are so many images."""
        cached = tiles * self._work[1] / CACHE_BYTES
        memory = images * self.layer.image_bytes / MEMORY_BYTES
        computed = rounds * self._tile_cycles(blocks)
        return limits.together(computed, max(cached, memory), loss=OVERLAP_LOSS)

    def cycles(self, processors: int) -> float:
        """What the layer takes, estimated."""
        batch = self.layer.problem.batch
        tiles = self.tiles(batch)
        blocks = min(self.blocks, ceil_div(tiles, processors))
        rounds = ceil_div(tiles, processors * blocks) * blocks
        cycles = self._cycles(rounds, blocks, tiles / processors, batch / processors)
        return START_CYCLES + cycles

    @lazy
    def image_cycles(self) -> float:
        """What an image of a large batch takes, in cycles of one processor."""
        rows, columns = self.layer.positions
        phases = self.layer.phases[0] * self.layer.phases[1]
        tiles = phases * self.column_tiles * rows * columns / self.rows
        return self._cycles(tiles, self.blocks, tiles, 1.0)

    @property
    def _stores(self) -> Iterator[tuple[int, int, int]]:
        """How sums can leave, the best first: buffers, joined boxes, stages that need room too."""
        # With an odd number of boxes, a tile's first would be staged where the last has just been.
        if ceil_div(self.columns, BOX_COLUMNS) % 2 == 0:
            joins = self.layer.dense and self.layer.out_channels % BOX_COLUMNS == 0
            yield (1, 2, ENOUGH_STAGES) if joins else (2, 1, ENOUGH_STAGES)
        yield 1, 1, FEWEST_STAGES

    def fitted(self, gpu: Gpu) -> Tile | None:
        """With as many stages as fit; None if too few do."""
        if self.registers > block.most_registers(self.blocks, self.threads):
            return None
        for resident, (buffers, joined, fewest) in product((True, False), self._stores):
            if resident and not (self.layer.dense and self.column_tiles == 1):
                continue  # tiles have different weights
            tile = replace(self, buffers=buffers, joined=joined, resident=resident)
            room = gpu.shared_budget(self.blocks) - tile.shared_bytes
            stages = min(room // tile.stage_bytes, MOST_STAGES)
            if stages >= (ENOUGH_STAGES if resident else fewest):
                return replace(tile, stages=stages)
        return None


def _pixel_cycles(channels: int) -> float:
    """Of a pixel's copies for a tap, in im2col mode."""
    whole, rest = divmod(channels, DEPTH)
    last = HALF_PIXEL_CYCLES if rest >= DEPTH // 2 else NARROW_PIXEL_CYCLES
    return whole * PIXEL_CYCLES + (last if rest else 0.0)


def tiles_of(layer: Layer, gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the best first."""
    return sorted(_tiles(layer, gpu), key=lambda tile: tile.cycles(gpu.processors))


def image_cycles(layer: Layer, gpu: Gpu) -> float:
    """What an image takes, in cycles of one processor."""
    return min(tile.image_cycles for tile in _tiles(layer, gpu))


@lru_cache(maxsize=64)
def _tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    """All that fit; kept, for they are asked what an image takes, and then planned with."""
    own = round_up(layer.out_channels, COLUMN_STEP)
    widths = [columns for columns in COLUMNS if columns < own]
    if own <= COLUMNS[-1]:
        widths.append(own)
    choices = product(CONSUMERS, widths, range(1, MOST_BLOCKS + 1))
    return tuple(filter(None, (Tile(layer, *choice).fitted(gpu) for choice in choices)))
