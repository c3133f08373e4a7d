"""Tiles of the NHWC implicit GEMM: sizes, shared memory and estimated cycles.

The choice of a tile does not change the bits of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Gpu
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.im2col import SPAN, Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.problem import NO_EPILOGUE

ROWS = 64  # M of a consumer warpgroup
MMA_SPAN = 32  # bytes of K of an MMA
WARP_ROWS = 16  # positions of a tile that a warp has
WARP_BYTES = WARP_ROWS * SPAN  # of a box that a warp stores
# Pipeline stages: the most; enough to prefer more staging buffers or resident weights; the fewest.
MOST_STAGES = 8
ENOUGH_STAGES = 4
FEWEST_STAGES = 2
BARRIER_BYTES = 16  # of the mbarrier of resident weights, rounded up
# Registers of a thread beside its accumulators: with TMA stores, and if pixels are stored singly.
OTHER_REGISTERS = 30
SCATTER_REGISTERS = 46
STATISTICS_REGISTERS = 6  # of a thread that adds up statistics, for each box of channels
# The most positions that a warp adds up, one after the other: with 65,536, a variance would be off
# by 4 % where the first one is 20 deviations from the others.
MOST_COUNTED = 1 << 13
COLUMNS = (64, 128, 192, 256)  # choices of N; or all of a layer's channels, if they are fewer
COLUMN_STEP = 16  # N of a layer with few channels is a multiple of this
CONSUMERS = (1, 2, 3, 4)  # choices of consumer warpgroups
MOST_BLOCKS = 4  # per SM
# Estimates: fitted to 768 measured tiles of ResNet-50's layers and others on an H200, in cycles of
# 1.755 GHz. See docs/kernels/hopper-implicit-gemm-nhwc.md.
# Bytes per cycle of an SM: shared memory that MMAs read, DRAM if all SMs load.
SHARED_BYTES = 128.0
MEMORY_BYTES = 21.0
# Cycles of TMA in im2col mode for a pixel's 128 bytes, for 64 bytes and more, and for fewer.
PIXEL_CYCLES = 2.75
HALF_PIXEL_CYCLES = 6.0
NARROW_PIXEL_CYCLES = 10.6
TILE_CYCLES = 120.0  # from the end of one tile to the start of the next
STATISTICS_CYCLES = 6.0  # of each channel of a tile whose statistics are added up
# Bytes that a block's epilogue stores per cycle: in general, with a single buffer that is stored
# box by box, and for patches, which are stored two elements at a time.
STORED_BYTES = 42.0
SINGLY_STORED_BYTES = 33.0
PATCH_STORED_BYTES = 3.5
OVERLAP_LOSS = 0.5  # how much of the shorter of computing and loading is not hidden
START_CYCLES = 1500.0  # of a launch


class Loads(NamedTuple):
    """What loads cost."""

    cache_bytes: float  # bytes per cycle of an SM from the L2 cache, if all SMs load
    ragged_loss: float  # of pixels that are no multiple of 128 bytes, a cache line
    latency: float  # cycles of a load


# Among tiles, as fitted to 380 measured ones; and against other kernels, for an image of a large
# batch, as those kernels' estimates were fitted.
TILE_LOADS = Loads(79.0, 1.62, 1610.0)
IMAGE_LOADS = Loads(91.0, 1.0, 960.0)


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and the resources that it uses."""

    layer: Layer
    consumers: int
    columns: int
    blocks: int  # per SM
    stages: int = 0
    buffers: int = 1
    joined: int = 1  # boxes that one TMA store writes
    resident: bool = False  # whether all weights stay in shared memory

    @property
    def name(self) -> str:
        """Tells the tile from all others of its layer."""
        return f"{self.rows}x{self.columns}, {self.blocks} at once"

    @property
    def rows(self) -> int:
        """M of a block."""
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32

    @property
    def steps(self) -> int:
        """Steps of K, for a residue that all taps reach."""
        return prod(self.layer.kernel) * ceil_div(self.layer.in_channels, self.layer.depth)

    @property
    def resident_bytes(self) -> int:
        return self.steps * self.weight_bytes if self.resident else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of a step's weights."""
        layer = self.layer
        return SPAN * (round_up(self.columns, layer.depth) if layer.n_major else self.columns)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage with its mbarriers."""
        return self.rows * SPAN + (0 if self.resident else self.weight_bytes) + 16

    @property
    def shared_bytes(self) -> int:
        staged = 4 * self.consumers * self.buffers * self.joined * WARP_BYTES
        return self.resident_bytes + self.stages * self.stage_bytes + staged + BARRIER_BYTES

    @property
    def registers(self) -> int:
        """Registers that a thread needs."""
        needed = self.columns // 2 + (OTHER_REGISTERS if self.layer.dense else SCATTER_REGISTERS)
        if self.gives_statistics:
            needed += STATISTICS_REGISTERS * ceil_div(self.columns, self.layer.depth)
        return needed

    @property
    def left_bytes(self) -> int:
        """Bytes of statistics that a warp leaves in its staging buffers (``statistics.cuh``)."""
        return 8 * round_up(self.columns, self.layer.depth) + 4

    @property
    def gives_statistics(self) -> bool:
        """Whether the kernel leaves statistics of its output: it is asked for them, and can."""
        operands = self.layer.operands
        forward = self.layer.dense and not self.layer.transposed
        plain = operands.scalar_bytes == 2 and operands.epilogue == NO_EPILOGUE
        return operands.statistics and forward and plain

    def row_tiles(self, batch: int) -> int:
        return ceil_div(batch * prod(self.layer.positions), self.rows)

    @property
    def column_tiles(self) -> int:
        return ceil_div(self.layer.out_channels, self.columns)

    def shares(self, batch: int, at_once: int) -> int:
        """The blocks that each column of tiles has, if so many blocks run at the same time.

        That is as many as run at the same time, or a multiple of it, so that no warp adds up too
        many outputs, and all blocks end together.
        """
        shares = max(1, at_once // self.column_tiles)
        counted = WARP_ROWS * self.row_tiles(batch)
        return shares * ceil_div(counted, shares * MOST_COUNTED)

    def tiles(self, batch: int) -> int:
        return self.row_tiles(batch) * self.column_tiles * prod(self.layer.residues)

    @lazy
    def _work(self) -> tuple[float, float, float]:
        """Averages of a tile: cycles of MMAs or TMA, bytes that it loads, bytes that it stores."""
        layer, bytes_ = self.layer, self.layer.operands.scalar_bytes
        taps = layer.taps / prod(layer.residues)
        read = bytes_ * layer.in_channels  # of a pixel
        mma = max(self.columns / 2, (ROWS + self.columns) * MMA_SPAN / SHARED_BYTES)
        mmas = self.consumers * ceil_div(read, MMA_SPAN) * taps * mma
        steps = ceil_div(read, SPAN) * taps
        copies = 0.0 if layer.flat else self.rows * taps * _pixel_cycles(read)
        loaded = (self.stage_bytes - 16) * steps
        stored = float(bytes_ * self.rows * min(self.columns, layer.out_channels))
        return max(mmas, copies), loaded, stored

    @property
    def _stored_bytes(self) -> float:
        """Bytes per cycle of the epilogue."""
        if self.layer.patches:
            return PATCH_STORED_BYTES
        return SINGLY_STORED_BYTES if self.buffers * self.joined == 1 else STORED_BYTES

    def _tile_cycles(self, blocks: float, latency: float) -> float:
        """Cycles of a tile on an SM that runs ``blocks`` blocks."""
        busy, loaded, stored = self._work
        under_way = (self.stages - 1) * (self.stage_bytes - 16)
        loading = loaded / under_way * latency / blocks
        counted = STATISTICS_CYCLES * self.columns if self.gives_statistics else 0.0
        return TILE_CYCLES + max(busy, loading) + stored / self._stored_bytes + counted

    def _cycles(
        self, rounds: float, blocks: float, tiles: float, images: float, loads: Loads
    ) -> float:
        """Cycles of an SM for ``rounds`` rounds of tiles: ``tiles`` tiles of ``images`` images."""
        is_ragged = self.layer.operands.scalar_bytes * self.layer.in_channels % SPAN > 0
        cached = tiles * self._work[1] / loads.cache_bytes
        cached *= loads.ragged_loss if is_ragged else 1.0
        memory = images * self.layer.image_bytes / MEMORY_BYTES
        computed = rounds * self._tile_cycles(blocks, loads.latency)
        return limits.together(computed, max(cached, memory), loss=OVERLAP_LOSS)

    def cycles(self, sms: int) -> float:
        """The estimated cycles of the whole layer."""
        batch = self.layer.problem.batch
        tiles = self.tiles(batch)
        blocks = min(self.blocks, ceil_div(tiles, sms))
        rounds = self._rounds(tiles, sms * blocks) * blocks
        cycles = self._cycles(rounds, blocks, tiles / sms, batch / sms, TILE_LOADS)
        return START_CYCLES + cycles

    def _rounds(self, tiles: int, at_once: int) -> int:
        """The most tiles of a block, if so many blocks run at the same time.

        A block that leaves statistics has tiles of one column; some SMs may have none.
        """
        if not self.gives_statistics:
            return ceil_div(tiles, at_once)
        batch = self.layer.problem.batch
        shares = self.shares(batch, min(tiles, at_once))
        tiles_of_block = ceil_div(self.row_tiles(batch), shares)
        return tiles_of_block * ceil_div(shares * self.column_tiles, at_once)

    @lazy
    def image_cycles(self) -> float:
        """Cycles of one SM for an image of a large batch."""
        residues, positions = prod(self.layer.residues), prod(self.layer.positions)
        tiles = residues * self.column_tiles * positions / self.rows
        return self._cycles(tiles, self.blocks, tiles, 1.0, IMAGE_LOADS)

    @property
    def _stores(self) -> Iterator[tuple[int, int, int]]:
        """Choices of buffers, joined boxes and fewest stages of the epilogue, the best first."""
        # With an odd number of boxes and two buffers, a tile's first box would take the buffer of
        # the previous tile's last one.
        box = self.layer.depth
        if ceil_div(self.columns, box) % 2 == 0:
            joins = self.layer.dense and self.layer.out_channels % box == 0
            yield (1, 2, ENOUGH_STAGES) if joins else (2, 1, ENOUGH_STAGES)
        yield 1, 1, FEWEST_STAGES

    def fitted(self, gpu: Gpu) -> Tile | None:
        """The tile with as many stages as fit; None if too few do."""
        if self.registers > block.most_registers(self.blocks, self.threads):
            return None
        for resident, (buffers, joined, fewest) in product((True, False), self._stores):
            if self.gives_statistics and self.left_bytes > buffers * joined * WARP_BYTES:
                continue
            if resident and not (self.layer.dense and self.column_tiles == 1):
                continue  # tiles read different weights
            tile = replace(self, buffers=buffers, joined=joined, resident=resident)
            room = gpu.shared_budget(self.blocks) - tile.shared_bytes
            stages = min(room // tile.stage_bytes, MOST_STAGES)
            if stages >= (ENOUGH_STAGES if resident else fewest):
                return replace(tile, stages=stages)
        return None


def _pixel_cycles(read: int) -> float:
    """Cycles of TMA in im2col mode for a pixel of a tap, of which it reads this many bytes."""
    whole, rest = divmod(read, SPAN)
    last = HALF_PIXEL_CYCLES if rest >= SPAN // 2 else NARROW_PIXEL_CYCLES
    return whole * PIXEL_CYCLES + (last if rest else 0.0)


def tiles_of(layer: Layer, gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the fastest by estimate first."""
    return sorted(_tiles(layer, gpu), key=lambda tile: tile.cycles(gpu.sm_count))


def image_cycles(layer: Layer, gpu: Gpu) -> float:
    """Cycles of one SM for an image of a large batch, with the best tile for that.

    Statistics do not count: they must not decide which kernel adds up the sums.
    """
    return min(tile.image_cycles for tile in _tiles(without_statistics(layer), gpu))


def without_statistics(layer: Layer) -> Layer:
    """The layer of a pass that does not leave statistics."""
    return replace(layer, operands=replace(layer.operands, statistics=False))


@lru_cache(maxsize=64)
def _tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    """All tiles that fit; cached, because choosing a kernel and planning both need them."""
    own = round_up(layer.out_channels, COLUMN_STEP)
    widths = [columns for columns in COLUMNS if columns < own]
    if own <= COLUMNS[-1]:
        widths.append(own)
    choices = product(CONSUMERS, widths, range(1, MOST_BLOCKS + 1))
    return tuple(filter(None, (Tile(layer, *choice).fitted(gpu) for choice in choices)))
