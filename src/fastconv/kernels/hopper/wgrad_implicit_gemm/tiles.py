"""What a block multiplies at once, who does which steps of the sum, and what that should take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.wgrad_implicit_gemm.layer import OCTET, SPAN, Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits

ROWS = 64  # of a consumer
GROUPS = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4))  # of rows, of columns
COLUMNS = (64, 128, 192, 256)  # of a product
DEPTHS = (32, 64)  # of a step, of pixels that are copied
TEAMS = ((1, 4), (1, 8), (2, 4))  # of warps that gather, and how many each has
MOST_GATHERED_STAGES = 4  # what is left of shared memory is the L1 cache
MOST_BLOCKS = 2  # of a processor
MOST_STAGES = 8
FEWEST_STAGES = 3
OTHER_REGISTERS = 30  # of a thread, beside its sums
GATHER_REGISTERS = (46, 62)  # beside what is under way, of one position a lane and of two
ONES_BYTES = 256
BARRIER_BYTES = 16  # of a stage
# Blocks that add up their sums by themselves, and the share of a GPU's processors that surely has
# room for them at once. A cluster's processors are neighbours, and not all neighbourhoods are
# complete: on an H200, 32 clusters of 4 took two turns.
CLUSTERS = {2: 1.0, 4: 0.85}
MOST_VALUES = 80  # of a lane under way: with 96, steps took a third longer
FLUSH_PRODUCTS = 256  # that are added up in a row: tensor cores cut off what does not fit a sum
REDUCE_PARTS = (32, 8)  # threads that add up a sum, if each has two runs of a tile at least
WORKSPACE_BYTES = 1 << 30
MOST_STEPS = 2**31 - 1024  # of all tiles
# Estimates: fitted to 476 measured tiles of ResNet-50's layers and others on an H200, in cycles of
# 1.755 GHz. See docs/kernels/hopper.md.
SHARED_BYTES = 128.0  # a cycle, that products read of shared memory
PRODUCT_SHARE = 0.88  # of what products and copies take by themselves
CACHE_BYTES = 54.6  # a cycle and processor, if all of them load
RAGGED_LOSS = 1.47  # of planes that are no multiple of 128 bytes
MEMORY_BYTES = 19.65  # as CACHE_BYTES, of the GPU's memory
KEPT_BYTES = 40 << 20  # of what the L2 cache keeps
EVEN_LOSS = 1.07  # of several tiles that are at the same positions at the same time
UNEVEN_LOSS = 1.67  # of those that are not
LATENCY = 223.0  # of a load, as far as it is seen
GATHER_CYCLES = 1.55  # of a warp's access to 128 bytes of memory or shared memory
GATHER_LATENCY = 400.0  # of the loads of a step, as far as it is seen
PARTS_LOSS = 1.35  # of steps of numbers in two parts, as measured: 1.1 to 1.5
FEW_SHARES = (0.42, 0.3)  # of loads of few channels that the L1 cache has not; channels-last
PIXEL_CYCLES = 2.75  # of 128 bytes of a pixel that are copied in im2col mode
OVERLAP_LOSS = 0.64
GATHER_OVERLAP_LOSS = 0.3
FLUSH_BYTES = 18.1  # a cycle, of a block's sums on their way out
RUN_CYCLES = 255.0  # to begin and end one
REDUCED_BYTES = 72.9  # a cycle and processor, that are read again
REDUCE_CYCLES = 11000.0  # to wait for all blocks, and to launch it
# Of clusters: guesses, near which two layers were measured (14.1 us for 14.9, 43 for 46).
EXCHANGE_CYCLES = 1500.0  # to wait for the cluster's blocks, twice
EXCHANGE_BYTES = 25.0  # a cycle, of a block's sums through shared memory


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and with what."""

    layer: Layer
    row_groups: int
    column_groups: int
    product_columns: int
    depth: int  # positions of a step
    blocks: int  # of a processor
    teams: int = 1  # of warps that load
    team_warps: int = 1
    grid: int = 1  # blocks of all
    stages: int = 0
    cluster: int = 1  # blocks that share a tile and add up its sums through shared memory

    @property
    def name(self) -> str:
        groups = f"{self.row_groups}x{self.column_groups}"
        size = f"{self.rows}x{self.columns}x{self.depth}"
        gathered = f", {self.teams}x{self.team_warps} gather" if self.layer.gathered else ""
        clusters = f" in clusters of {self.cluster}" if self.cluster > 1 else ""
        return f"{size} by {groups}{gathered}, {self.blocks} at once, {self.grid} blocks{clusters}"

    @property
    def consumers(self) -> int:
        return self.row_groups * self.column_groups

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32 * self.teams * self.team_warps

    @property
    def rows(self) -> int:
        return ROWS * self.row_groups

    @property
    def columns(self) -> int:
        return self.product_columns * self.column_groups

    @lazy
    def count(self) -> int:
        """Tiles of all the weights."""
        layer = self.layer
        of_group = ceil_div(layer.group_out, self.rows) * ceil_div(layer.columns, self.columns)
        return layer.groups * of_group

    @lazy
    def steps(self) -> int:
        return self.layer.steps(self.depth)

    @property
    def flush_steps(self) -> int:
        return FLUSH_PRODUCTS * self.layer.product_depth // self.depth

    @property
    def group_tiles(self) -> int:
        """That blocks share, as few as can be."""
        return self.count // gcd(self.count, self.grid)

    @property
    def group_blocks(self) -> int:
        return self.grid // gcd(self.count, self.grid)

    @property
    def is_even(self) -> bool:
        """Whether no block has steps of several tiles."""
        return self.group_tiles == 1

    @property
    def most_runs(self) -> int:
        """Of a block: tiles of which it has steps."""
        if self.is_even:
            return 1
        steps = ceil_div(self.group_tiles * self.steps, self.group_blocks)
        return (steps - 1) // self.steps + 2

    @property
    def is_whole(self) -> bool:
        """Whether each block has whole tiles, and writes their weights."""
        return self.group_blocks == 1 and self.steps <= self.flush_steps

    @property
    def is_reduced(self) -> bool:
        """Whether sums go to a workspace, and a second launch adds them."""
        return self.cluster == 1 and not self.is_whole

    @property
    def run_bytes(self) -> int:
        """A run's sums."""
        return self.rows * 4 * (self.columns + self.layer.sums_bias)

    @property
    def workspace_bytes(self) -> int:
        return self.grid * self.most_runs * self.run_bytes if self.is_reduced else 0

    @property
    def exchanged_bytes(self) -> int:
        """What a cluster's block has of its stages for its sums, whose rows lie a bit apart."""
        return self.rows * 4 * (self.columns // 16 * 16 + 8 + self.layer.sums_bias)

    @property
    def reduce_parts(self) -> int:
        runs = self.grid // self.count
        return next((parts for parts in REDUCE_PARTS if runs >= 2 * parts), 1)

    @property
    def gathered_rows(self) -> int:
        """Rows of a stage that loaders write."""
        layer = self.layer
        return (0 if layer.grad_copied else self.rows) + (self.columns if layer.gathered else 0)

    @property
    def gathered_values(self) -> int:
        """Of a step, that a lane has under way."""
        return self.gathered_rows * self.layer.lane_positions // self.team_warps

    @property
    def stage_bytes(self) -> int:
        """With its barriers."""
        elements = (self.rows + self.columns) * self.depth
        return self.layer.parts * elements * self.layer.operands.scalar_bytes + BARRIER_BYTES

    @property
    def registers(self) -> int:
        """That a thread needs."""
        sums = self.layer.parts * self.product_columns // 2
        consumer = sums + OTHER_REGISTERS + 4 * self.layer.sums_bias
        if not self.layer.gathered:
            return consumer
        other = GATHER_REGISTERS[self.layer.lane_positions - 1]
        return max(consumer, self.gathered_values + other)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + ONES_BYTES * self.layer.sums_bias

    def fitted(self, gpu: Gpu) -> Tile | None:
        """With as many stages as fit; None if too few do."""
        if self.registers > block.most_registers(self.blocks, self.threads):
            return None
        if self.gathered_values > MOST_VALUES:
            return None
        room = gpu.shared_budget(self.blocks) - self.shared_bytes
        most = MOST_GATHERED_STAGES if self.layer.gathered else MOST_STAGES
        stages = min(room // self.stage_bytes, most)
        return replace(self, stages=stages) if stages >= FEWEST_STAGES else None

    def in_clusters(self, cluster: int) -> Tile | None:
        """The same with so many blocks for each tile, a cluster, all of whose sums fit at the end.

        None if a block had none of a tile's steps, or more than are added up in a row, or not the
        shared memory.
        """
        room = self.stages * (self.stage_bytes - BARRIER_BYTES)
        steps = ceil_div(self.steps, cluster)
        if self.steps < cluster or steps > self.flush_steps or self.exchanged_bytes > room:
            return None
        return replace(self, grid=self.count * cluster, cluster=cluster)

    @lazy
    def _step_cycles(self) -> float:
        """Of a step, if a processor has one block."""
        layer = self.layer
        product = max(self.product_columns / 2, (ROWS + self.product_columns) * 32 / SHARED_BYTES)
        products = self.consumers * self.depth / layer.product_depth * product
        products *= 3 if layer.parts > 1 else 1
        boxes = 0 if layer.flat or layer.gathered else self.columns // layer.span_elements
        return max(products, boxes * self.depth * PIXEL_CYCLES)

    @property
    def _gather_cycles(self) -> float:
        """Of a step's loads and stores, of which each 128 bytes that a warp touches count."""
        layer = self.layer
        pixel = layer.problem.in_channels if layer.channels_last else 1
        lines = 1 + min(4 * pixel * layer.problem.stride[1] * 32 / SPAN, 32)
        loads = self.columns * lines * (FEW_SHARES[layer.channels_last] if layer.few else 1.0)
        loads += 2 * (self.gathered_rows - self.columns)
        stores = layer.parts * self.gathered_rows
        return GATHER_CYCLES * (stores + layer.lane_positions * loads)

    def cycles(self, gpu: Gpu) -> float:
        """What the layer takes, estimated."""
        blocks = ceil_div(self.grid, gpu.processors)
        steps = ceil_div(self.count * self.steps, self.grid)
        waited = LATENCY / (self.stages - 1)
        if self.layer.gathered:
            waited = self._gather_cycles + GATHER_LATENCY / self.teams / min(self.blocks, blocks)
        computed = max(self._step_cycles * PRODUCT_SHARE, waited)
        computed *= PARTS_LOSS if self.layer.parts > 1 else 1.0
        loaded = max(blocks * steps * self._cache_cycles, self._memory_cycles / gpu.processors)
        loss = GATHER_OVERLAP_LOSS if self.layer.gathered else OVERLAP_LOSS
        multiplied = limits.together(blocks * steps * computed, loaded, loss=loss)
        return multiplied + self._end_cycles(blocks, steps, gpu) + self._bias_cycles(gpu)

    def _bias_cycles(self, gpu: Gpu) -> float:
        """Of a bias's gradient that products do not give."""
        layer = self.layer
        if not layer.operands.bias_grad or layer.sums_bias:
            return 0.0
        channels, (height, width), channels_last = layer.grad_output
        bytes_ = layer.problem.batch * channels * height * width * layer.operands.scalar_bytes
        # Of channels-last tensors, each channel's block reads what lies beside it, 32 bytes.
        again = min(channels, 32 // layer.operands.scalar_bytes) if channels_last else 1
        return REDUCE_CYCLES + again * bytes_ / MEMORY_BYTES / gpu.processors

    def _end_cycles(self, blocks: int, steps: int, gpu: Gpu) -> float:
        """Of a processor's blocks, for what is done with sums."""
        if self.cluster > 1:
            return EXCHANGE_CYCLES + blocks * (RUN_CYCLES + self.run_bytes / EXCHANGE_BYTES)
        runs = self.most_runs
        flushes = max(runs, ceil_div(steps, self.flush_steps))
        flushed = blocks * (runs * RUN_CYCLES + flushes * self.run_bytes / FLUSH_BYTES)
        if self.is_whole:
            return flushed
        reduced = self.grid * runs * self.run_bytes / gpu.processors / REDUCED_BYTES
        return flushed + reduced + REDUCE_CYCLES

    @property
    def _cache_cycles(self) -> float:
        """To load what a step needs, from the L2 cache."""
        layer = self.layer
        if layer.gathered:
            return 0.0  # part of what gathering takes
        plane = layer.positions * layer.operands.scalar_bytes
        ragged = layer.pixels is None and plane % SPAN > 0
        return self.stage_bytes / CACHE_BYTES * (RAGGED_LOSS if ragged else 1.0)

    @property
    def _memory_cycles(self) -> float:
        """To read both tensors from memory, of one processor."""
        loss = 1.0
        if self.count > 1 and self.layer.bytes > KEPT_BYTES:
            loss = EVEN_LOSS if self.is_even else UNEVEN_LOSS
        return loss * self.layer.bytes / MEMORY_BYTES


def tiles_of(layer: Layer, gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the best first.

    Raises:
        Declined: there are none.
    """
    return sorted(_tiles(layer, gpu), key=lambda tile: tile.cycles(gpu))


@lru_cache(maxsize=64)
def _tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    depths = DEPTHS if layer.pixels else (layer.span_elements,)
    teams: tuple[tuple[int, int], ...] = TEAMS if layer.gathered else ((1, 1),)
    if layer.few:  # a team's warps have different instructions, of which a cache holds so many
        teams = tuple(team for team in TEAMS if team[1] == 4)
    found = []
    for groups, depth, blocks, team in product(GROUPS, depths, range(1, MOST_BLOCKS + 1), teams):
        for columns in _widths(layer, groups[1], team[1]):
            tile = Tile(layer, *groups, columns, depth, blocks, *team).fitted(gpu)
            if tile is not None and not _is_idle(tile):
                found += [replace(tile, grid=grid) for grid in _grids(tile, gpu)]
                found += _clustered(tile, gpu)
    possible = tuple(
        tile
        for tile in found
        if tile.workspace_bytes <= WORKSPACE_BYTES and tile.count * tile.steps < MOST_STEPS
    )
    if not possible:
        raise Declined(f"weights of {layer.problem.weight_shape}, too many for a workspace")
    return possible


def _widths(layer: Layer, groups: int, warps: int) -> list[int]:
    """Columns of a product: whole boxes, or as many octets as warps."""
    unit = layer.span_elements if layer.pixels else OCTET * warps
    own = round_up(ceil_div(layer.columns, groups), unit)
    return [columns for columns in COLUMNS if columns < own] + [own] * (own <= COLUMNS[-1])


def _is_idle(tile: Tile) -> bool:
    """Whether a group has no channels at all, in any tile."""
    return tile.rows >= tile.layer.group_out + ROWS


def _grids(tile: Tile, gpu: Gpu) -> list[int]:
    """How many blocks share the steps: all that fit, or so many that none has two tiles' steps."""
    room = gpu.processors * tile.blocks
    all_steps = tile.count * tile.steps
    even = room // tile.count * tile.count
    return sorted({min(room, all_steps), *([min(even, all_steps)] if even else [])})


def _clustered(tile: Tile, gpu: Gpu) -> list[Tile]:
    """With clusters for all tiles at once, on processors that have as many blocks as they could."""
    found = []
    for cluster, share in CLUSTERS.items():
        per_processor = tile.count * cluster / gpu.processors
        if tile.blocks - 1 < per_processor <= share * tile.blocks:
            found.append(tile.in_clusters(cluster))
    return [one for one in found if one is not None]
