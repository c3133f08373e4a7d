"""Tiles: what a block multiplies at once, how blocks share K, and the estimated time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, log2, prod

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.wgrad_implicit_gemm.layer import OCTET, SPAN, Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits

ROWS = 64  # rows of a consumer: wgmma's M
# Consumer warpgroups of a block, along rows and columns.
GROUPS = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4))
COLUMNS = (64, 128, 192, 256)  # the N of a wgmma
DEPTHS = (32, 64)  # positions of a step, where TMA copies pixels
TEAMS = ((1, 4), (1, 8), (2, 4))  # teams of gathering warps, and the warps of each
MOST_GATHERED_STAGES = 4  # the rest of shared memory is the L1 cache, which gathering needs
MOST_BLOCKS = 2  # blocks of an SM
MOST_STAGES = 8
FEWEST_STAGES = 3
OTHER_REGISTERS = 30  # registers of a thread, beside its accumulators
COMPILED_REGISTERS = 6  # beyond those, with which kernels compile with few spills or none
# Registers beside the loads in flight, for one position a lane and for two.
GATHER_REGISTERS = (46, 62)
ONES_BYTES = 256
BARRIER_BYTES = 16  # barriers of a stage
# Blocks of a cluster, and the share of a GPU's SMs that surely has room for all clusters at once. A
# cluster needs SMs of one GPC, and not all GPCs are complete: on an H200, 32 clusters of 4 took two
# waves.
CLUSTERS = {2: 1.0, 4: 0.85}
MOST_VALUES = 80  # values that a lane has in flight: with 96, steps took a third longer
# MMAs that are accumulated in a row, by the bytes of an element: tensor cores truncate what does
# not fit the accumulator, by 1.8e-8 of the sum for each. Results in 16 bits are rounded far more.
FLUSH_MMAS = {2: 1024, 4: 256}
# Threads that share the reduction of a slot, if each has two runs of a tile at least.
REDUCE_PARTS = (32, 8)
WORKSPACE_BYTES = 1 << 30
MOST_STEPS = 2**31 - 1024  # steps of all tiles
# Estimates, fitted to 476 measured tiles of ResNet-50's layers and others on an H200, in cycles of
# 1.755 GHz. See docs/kernels/hopper.md.
SHARED_BYTES = 128.0  # bytes a cycle that MMAs read from shared memory
MMA_SHARE = 0.88  # share of the time that MMAs and copies take by themselves
RAGGED_LOSS = 1.47  # planes that are no multiple of 128 bytes
MEMORY_BYTES = 19.65  # bytes a cycle and SM from the GPU's memory
KEPT_BYTES = 40 << 20  # bytes that the L2 cache keeps
EVEN_LOSS = 1.07  # several tiles that read the same positions at the same time
UNEVEN_LOSS = 1.67  # several tiles that do not
# The same of contiguous planes: what each further tile that reads a tensor adds to its time.
UNEVEN_READER_LOSS = 0.6
# Of pointwise layers: what each doubling of the tiles that read a tensor adds to its time, and
# tiles that do not read the same positions at the same time.
READER_LOSS = 0.23
UNEVEN_POINTWISE_LOSS = 2.9
RAGGED_PIXELS_LOSS = 1.34  # pixels that are no multiple of 128 bytes, from the L2 cache
# Stages too small to have enough bytes under way, where blocks do not wait for memory and pixels
# are multiples of 128 bytes: with twice as many positions a step, 20 layers took 0.85 of the time.
SHALLOW_BYTES = 8 << 10
SHALLOW_LOSS = 1.25
LATENCY = 223.0  # latency of a load that is not hidden
GATHER_CYCLES = 1.55  # a warp's access to 128 bytes of memory or shared memory
GATHER_LATENCY = 400.0  # latency of a step's loads that is not hidden
PARTS_LOSS = 1.35  # steps with 3xTF32, measured: 1.1 to 1.5
# Share of loads that miss the L1 cache with few channels; the second is channels-last.
FEW_SHARES = (0.42, 0.3)
PIXEL_CYCLES = 2.75  # 128 bytes of a pixel that an im2col TMA copy brings
# Added in volumes for each byte that a pixel's channels lack of 128, fitted to pixels of 48, 64 and
# 96 bytes. Images' estimates are fitted without it.
MISSING_BYTE_CYCLES = 0.051
GATHER_OVERLAP_LOSS = 0.3
RUN_CYCLES = 255.0  # beginning and ending a run
REDUCED_BYTES = 72.9  # bytes a cycle and SM that the reduction reads
# Cycles of an SM for a weight whose neighbours in memory belong to columns that are far away, each
# of which is a sector of its own to the L2 cache; and for one that a cluster stores mirrored.
SCATTER_CYCLES = 2.0
MIRRORED_CYCLES = 3.0


@dataclass(frozen=True)
class Costs:
    """The constants of estimates that differ where both operands are plain matrices."""

    cache_bytes: float  # bytes a cycle and SM from the L2 cache, if all SMs load
    overlap_loss: float  # how much of the shorter of computing and loading is not hidden
    flush_bytes: float  # bytes a cycle of a block's accumulators on their way to memory
    reduce_cycles: float  # waiting for all blocks and launching the reduction
    exchange_cycles: float  # synchronising a cluster twice
    exchange_bytes: float  # bytes a cycle of a block's accumulators through DSMEM


COSTS = Costs(54.6, 0.64, 18.1, 11000.0, 1500.0, 25.0)
# Fitted to 437 measured tiles of 70 pointwise layers. These estimates are off by 12 %, and what
# they choose is 2 % slower than the best measured tile.
POINTWISE_COSTS = Costs(46.2, 0.3, 11.6, 7400.0, 2160.0, 24.5)


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and with what."""

    layer: Layer
    row_groups: int
    column_groups: int
    mma_columns: int
    depth: int  # positions of a step
    blocks: int  # blocks of an SM
    teams: int = 1  # teams of warps that load
    team_warps: int = 1
    grid: int = 1  # blocks of the grid
    stages: int = 0
    cluster: int = 1  # blocks that share a tile and reduce it through DSMEM

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
        return self.mma_columns * self.column_groups

    @lazy
    def count(self) -> int:
        """Tiles of all weights."""
        layer = self.layer
        of_group = ceil_div(layer.group_out, self.rows) * ceil_div(layer.columns, self.columns)
        return layer.groups * of_group

    @lazy
    def steps(self) -> int:
        return self.layer.steps(self.depth)

    @property
    def flush_steps(self) -> int:
        mmas = FLUSH_MMAS[self.layer.operands.scalar_bytes]
        return mmas * self.layer.mma_depth // self.depth

    @lazy
    def group_tiles(self) -> int:
        """Tiles of a group, which has its own blocks: as few as possible."""
        return self.count // gcd(self.count, self.grid)

    @lazy
    def group_blocks(self) -> int:
        return self.grid // gcd(self.count, self.grid)

    @property
    def is_even(self) -> bool:
        """Whether no block has steps of several tiles."""
        return self.group_tiles == 1

    @lazy
    def most_runs(self) -> int:
        """The most tiles of which a block has steps."""
        if self.is_even:
            return 1
        steps = ceil_div(self.group_tiles * self.steps, self.group_blocks)
        return (steps - 1) // self.steps + 2

    @lazy
    def is_whole(self) -> bool:
        """Whether each block has whole tiles, and writes their weights."""
        return self.group_blocks == 1 and self.steps <= self.flush_steps

    @property
    def is_reduced(self) -> bool:
        """Whether accumulators go to a workspace, and a second launch reduces them."""
        return self.cluster == 1 and not self.is_whole

    @lazy
    def run_bytes(self) -> int:
        """Bytes of a run's accumulators."""
        return self.rows * 4 * (self.columns + self.layer.sums_bias)

    @property
    def workspace_bytes(self) -> int:
        return self.grid * self.most_runs * self.run_bytes if self.is_reduced else 0

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that a cluster's block needs for its accumulators, with padding between rows."""
        return self.rows * 4 * (self.columns // 16 * 16 + 8 + self.layer.sums_bias)

    @property
    def reduce_parts(self) -> int:
        runs = self.grid // self.count
        return next((parts for parts in REDUCE_PARTS if runs >= 2 * parts), 1)

    @property
    def gathered_rows(self) -> int:
        """Rows of a stage that are gathered."""
        layer = self.layer
        return (0 if layer.grad_copied else self.rows) + (self.columns if layer.gathered else 0)

    @property
    def gathered_values(self) -> int:
        """Values of a step that a lane has in flight."""
        return self.gathered_rows * self.layer.lane_positions // self.team_warps

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, with its barriers."""
        elements = (self.rows + self.columns) * self.depth
        return self.layer.parts * elements * self.layer.operands.scalar_bytes + BARRIER_BYTES

    @property
    def registers(self) -> int:
        """Registers that a thread needs."""
        accumulators = self.layer.parts * self.mma_columns // 2
        consumer = accumulators + OTHER_REGISTERS + 4 * self.layer.sums_bias
        if not self.layer.gathered:
            return consumer
        other = GATHER_REGISTERS[self.layer.lane_positions - 1]
        return max(consumer, self.gathered_values + other)

    @property
    def compiled_registers(self) -> int:
        """Registers that a thread of the compiled kernel has, as far as can be told before."""
        return min(self.registers + COMPILED_REGISTERS, block.most_registers(1, self.threads))

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + ONES_BYTES * self.layer.sums_bias

    def fitted(self, gpu: Gpu) -> Tile | None:
        """The tile with as many stages as fit; None if too few do."""
        if self.registers > block.most_registers(self.blocks, self.threads):
            return None
        if self.gathered_values > MOST_VALUES:
            return None
        room = gpu.shared_budget(self.blocks) - self.shared_bytes
        most = MOST_GATHERED_STAGES if self.layer.gathered else MOST_STAGES
        stages = min(room // self.stage_bytes, most)
        return replace(self, stages=stages) if stages >= FEWEST_STAGES else None

    def in_clusters(self, cluster: int) -> Tile | None:
        """The tile with a cluster of blocks for each of the layer's tiles.

        None if a block had none of a tile's steps, or more than are accumulated in a row, or if the
        accumulators did not fit the stages.
        """
        room = self.stages * (self.stage_bytes - BARRIER_BYTES)
        steps = ceil_div(self.steps, cluster)
        if self.steps < cluster or steps > self.flush_steps or self.exchanged_bytes > room:
            return None
        return replace(self, grid=self.count * cluster, cluster=cluster)

    @lazy
    def _step_cycles(self) -> float:
        """Cycles of a step's MMAs and copies, if an SM has one block."""
        layer = self.layer
        mma = max(self.mma_columns / 2, (ROWS + self.mma_columns) * 32 / SHARED_BYTES)
        mmas = self.consumers * self.depth / layer.mma_depth * mma
        mmas *= 3 if layer.parts > 1 else 1
        tiled = layer.flat or layer.gathered
        boxes = 0 if tiled else self.columns // layer.span_elements
        cycles = PIXEL_CYCLES + MISSING_BYTE_CYCLES * SPAN * (1 - self._filled)
        return max(mmas, boxes * self.depth * cycles)

    @property
    def _filled(self) -> float:
        """The share of a pixel's boxes that volumes have bytes for; all, of images."""
        layer = self.layer
        if layer.problem.depth is None or layer.pixels is None:
            return 1.0
        return min(1.0, layer.problem.in_channels / layer.tap_columns)

    @property
    def _gather_cycles(self) -> float:
        """Cycles of a step's gathering: each 128 bytes that a warp reads or writes count."""
        layer = self.layer
        pixel = layer.problem.in_channels if layer.channels_last else 1
        lanes = 4 if layer.by_taps else 32  # with different positions, of four bytes each
        lines = 1 + min(4 * pixel * layer.problem.stride[1] * lanes / SPAN, 32)
        loads = self.columns * lines * (FEW_SHARES[layer.channels_last] if layer.few else 1.0)
        loads += 2 * (self.gathered_rows - self.columns)
        stores = layer.parts * self.gathered_rows
        return GATHER_CYCLES * (stores + layer.lane_positions * loads)

    def cycles(self, gpu: Gpu) -> float:
        """Estimated cycles of the layer."""
        blocks = ceil_div(self.grid, gpu.sm_count)
        steps = ceil_div(self.count * self.steps, self.grid)
        waited = LATENCY / (self.stages - 1)
        if self.layer.gathered:
            waited = self._gather_cycles + GATHER_LATENCY / self.teams / min(self.blocks, blocks)
        computed = max(self._step_cycles * MMA_SHARE, waited)
        computed *= PARTS_LOSS if self.layer.parts > 1 else 1.0
        loaded = max(blocks * steps * self._cache_cycles, self._memory_cycles / gpu.sm_count)
        loss = GATHER_OVERLAP_LOSS if self.layer.gathered else self._costs.overlap_loss
        multiplied = limits.together(blocks * steps * computed, loaded, loss=loss)
        scattered = prod(self.layer.problem.weight_shape) * self._scatter_cycles / gpu.sm_count
        return (
            multiplied + scattered + self._end_cycles(blocks, steps, gpu) + self._bias_cycles(gpu)
        )

    @property
    def _costs(self) -> Costs:
        return POINTWISE_COSTS if self._is_pointwise else COSTS

    @property
    def _is_pointwise(self) -> bool:
        """Whether TMA copies whole pixels of one tap: a product of matrices."""
        return self.layer.pixels is not None and self.layer.flat

    @property
    def _scatter_cycles(self) -> float:
        """Cycles for each weight whose neighbours in memory leave at other times."""
        if self.layer.scatters:
            return SCATTER_CYCLES
        mirrored = self._is_pointwise and self.layer.mirrored and self.cluster > 1
        return MIRRORED_CYCLES if mirrored else 0.0

    def _bias_cycles(self, gpu: Gpu) -> float:
        """Cycles of the bias's gradient, where MMAs do not give it."""
        layer = self.layer
        if not layer.operands.bias_grad or layer.sums_bias:
            return 0.0
        channels, size, channels_last = layer.grad_output
        bytes_ = layer.problem.batch * channels * prod(size) * layer.operands.scalar_bytes
        # The block of a channel of a channels-last tensor reads 32 bytes for each element.
        again = min(channels, 32 // layer.operands.scalar_bytes) if channels_last else 1
        return COSTS.reduce_cycles + again * bytes_ / MEMORY_BYTES / gpu.sm_count

    def _end_cycles(self, blocks: int, steps: int, gpu: Gpu) -> float:
        """Cycles of an SM's blocks to store or reduce their accumulators."""
        costs = self._costs
        if self.cluster > 1:
            exchanged = RUN_CYCLES + self.run_bytes / costs.exchange_bytes
            return costs.exchange_cycles + blocks * exchanged
        runs = self.most_runs
        flushes = max(runs, ceil_div(steps, self.flush_steps))
        flushed = blocks * (runs * RUN_CYCLES + flushes * self.run_bytes / costs.flush_bytes)
        if self.is_whole:
            return flushed
        return flushed + self._reduced_cycles(gpu) + costs.reduce_cycles

    def _reduced_cycles(self, gpu: Gpu) -> float:
        """Cycles of an SM to add up the runs of all tiles."""
        reduced = self.grid * self.most_runs * self.run_bytes / gpu.sm_count / REDUCED_BYTES
        if self.workspace_bytes > KEPT_BYTES:  # written to memory, and read from there
            reduced += 2 * self.workspace_bytes / gpu.sm_count / MEMORY_BYTES
        return reduced

    def end_cycles(self, gpu: Gpu) -> float:
        """Estimated cycles of the launch that reduces, which slabs of volumes share."""
        return self._reduced_cycles(gpu) + self._costs.reduce_cycles

    @property
    def _cache_cycles(self) -> float:
        """Cycles to load a step from the L2 cache."""
        layer = self.layer
        if self._is_pointwise:
            return self._pointwise_cache_cycles
        if layer.gathered:
            return 0.0  # part of the cycles of gathering
        plane = layer.positions * layer.operands.scalar_bytes
        ragged = layer.pixels is None and plane % SPAN > 0
        columns = self.columns * self._filled
        filled = (self.rows + columns) / (self.rows + self.columns)
        cycles = filled * self.stage_bytes / self._costs.cache_bytes
        return cycles * (RAGGED_LOSS if ragged else 1.0)

    @property
    def _pointwise_cache_cycles(self) -> float:
        """The same for matrices of whole pixels."""
        layer, channels = self.layer, (self.layer.group_out, self.layer.group_in)
        bytes_ = [layer.operands.scalar_bytes * count for count in channels]
        losses = [RAGGED_PIXELS_LOSS if size % SPAN else 1.0 for size in bytes_]
        read = losses[0] * self.rows + losses[1] * self.columns
        cycles = read * self.depth * layer.operands.scalar_bytes / POINTWISE_COSTS.cache_bytes
        return cycles * (SHALLOW_LOSS if self._is_shallow and max(losses) == 1 else 1.0)

    @property
    def _is_shallow(self) -> bool:
        """Whether stages are small and blocks read whole tiles from the L2 cache."""
        bytes_ = self.stage_bytes - BARRIER_BYTES
        return bytes_ <= SHALLOW_BYTES and (self.is_whole or self.cluster > 1)

    @property
    def _memory_cycles(self) -> float:
        """Cycles of one SM to read both tensors from memory."""
        if self._is_pointwise:
            return self._pointwise_memory_cycles
        layer = self.layer
        if self.count == 1 or layer.bytes <= KEPT_BYTES:
            return layer.bytes / MEMORY_BYTES
        if self.is_even:
            return EVEN_LOSS * layer.bytes / MEMORY_BYTES
        if layer.flat and layer.pixels is None:
            again = [UNEVEN_READER_LOSS * (many - 1) for many in self._readers]
            return self._bytes_read(again) / MEMORY_BYTES
        return UNEVEN_LOSS * layer.bytes / MEMORY_BYTES

    @property
    def _pointwise_memory_cycles(self) -> float:
        """The same for matrices of whole pixels."""
        uneven = not self.is_even and self.layer.bytes > KEPT_BYTES
        bytes_ = self._bytes_read([READER_LOSS * log2(many) for many in self._readers])
        return bytes_ / MEMORY_BYTES * (UNEVEN_POINTWISE_LOSS if uneven else 1.0)

    @property
    def _readers(self) -> tuple[int, int]:
        """The tiles that read each tensor: as many as the other one has."""
        layer = self.layer
        return ceil_div(layer.columns, self.columns), ceil_div(layer.group_out, self.rows)

    def _bytes_read(self, again: Sequence[float]) -> float:
        """Bytes of both tensors, and those that are read ``again`` so many times."""
        sizes = self.layer.operand_bytes
        return sum(size * (1 + more) for size, more in zip(sizes, again, strict=True))


def tiles_of(layer: Layer, gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the fastest first.

    Raises:
        Declined: there are none.
    """
    return sorted(_tiles(layer, gpu), key=lambda tile: tile.cycles(gpu))


@lru_cache(maxsize=64)
def _tiles(layer: Layer, gpu: Gpu) -> tuple[Tile, ...]:
    depths = DEPTHS if layer.pixels else (layer.span_elements,)
    teams: tuple[tuple[int, int], ...] = TEAMS if layer.gathered else ((1, 1),)
    if layer.few:  # A team's warps have different instructions, and the instruction cache is small.
        teams = tuple(team for team in TEAMS if team[1] == 4)
    found = []
    for groups, depth, blocks, team in product(GROUPS, depths, range(1, MOST_BLOCKS + 1), teams):
        for columns in _widths(layer, groups[1], team[1]):
            tile = Tile(layer, *groups, columns, depth, blocks, *team).fitted(gpu)
            if tile is not None and not _is_idle(tile):
                found += [replace(tile, grid=grid) for grid in grids(tile, gpu)]
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
    """The possible N of a wgmma: whole TMA boxes, or as many octets as warps."""
    unit = layer.span_elements if layer.pixels else OCTET * warps
    own = round_up(ceil_div(layer.columns, groups), unit)
    return [columns for columns in COLUMNS if columns < own] + [own] * (own <= COLUMNS[-1])


def _is_idle(tile: Tile) -> bool:
    """Whether a consumer has no channels at all, in any tile."""
    return tile.rows >= tile.layer.group_out + ROWS


def grids(tile: Tile, gpu: Gpu) -> list[int]:
    """Sizes of the grid: all blocks that fit, or as many as leave none with parts of two tiles."""
    room = gpu.sm_count * tile.blocks
    all_steps = tile.count * tile.steps
    even = room // tile.count * tile.count
    whole = max(divisor for divisor in range(1, room + 1) if tile.count % divisor == 0)
    return sorted({min(room, all_steps), *([min(even, all_steps)] if even else [whole])})


def _clustered(tile: Tile, gpu: Gpu) -> list[Tile]:
    """The tile in clusters, if all of them run at once and fill the SMs."""
    found = []
    for cluster, share in CLUSTERS.items():
        per_sm = tile.count * cluster / gpu.sm_count
        if tile.blocks - 1 < per_sm <= share * tile.blocks:
            found.append(tile.in_clusters(cluster))
    return [one for one in found if one is not None]
