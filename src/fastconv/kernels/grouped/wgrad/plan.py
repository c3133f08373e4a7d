"""Plans weight gradients with ``grouped/wgrad/kernel.cuh``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import (
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    weight_grad_constants,
)
from fastconv.kernels.grouped.layer import (
    BLOCK_CYCLES,
    BUNDLE,
    COPY,
    FAMILY,
    ISSUED,
    LAUNCH_CYCLES,
    MMA_PRODUCTS,
    MOST_REGISTERS,
    OCTET,
    OTHER_REGISTERS,
    SHARED_BYTES,
    THREADS,
    WARPS,
    Layer,
    Tile,
    request_loss,
    resident,
    tiles_of,
)
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import FLUSH_MMAS, WORKSPACE_BYTES, together
from fastconv.problem import Problem

SOURCE = "grouped/wgrad/kernel.cuh"
REDUCE_THREADS = 256
REDUCE_LANES = 32  # entries that a block of the reduction has at a time
MOST_REDUCE_BLOCKS = 4096
MOST_ENTRIES = 2**29
PAIR = 40  # instructions of a warp for two rows of positions, beside MMAs and loads
PAIR_CYCLES = 120  # latencies of a warp for two rows of positions
MMA_CYCLES = 6.0  # of a scheduler, which a warp alone waits for
TILE_CYCLES = 500.0
REDUCE_CYCLES = 3000.0
# What measured times on an H200 are of the model: 1.19 to 1.30 for ResNeXt-50's layers. Other
# families' estimates, with which these are compared, are fitted to measured times.
MEASURED_SHARE = 1.27
EXPLAINED = 5


@dataclass(frozen=True)
class Estimate:
    """A tile, and how many splits divide all tiles, with what they take."""

    tile: Tile
    gpu: Gpu
    splits: int = 1

    @lazy
    def layer(self) -> Layer:
        return self.tile.layer

    @lazy
    def teams(self) -> int:
        """Warps of different channels."""
        return self.tile.chunk // BUNDLE * max(self.layer.width // BUNDLE, 1)

    @lazy
    def sharers(self) -> int:
        """Warps of the same channels."""
        return WARPS // self.teams

    @lazy
    def stage_bytes(self) -> int:
        tile = self.tile
        return tile.halo_bytes + tile.slots * tile.rows * tile.columns * tile.pixel_bytes

    @lazy
    def sums(self) -> int:
        """Accumulators of a thread."""
        return 8 * self.layer.taps + 4

    @lazy
    def shared_bytes(self) -> int:
        gathered = self.teams * self.sums * 128 if self.sharers > 1 else 0
        return max(2 * self.stage_bytes, gathered)

    @lazy
    def registers(self) -> int:
        window = self.layer.window_rows * 2 * self.layer.columns.kernel
        return self.sums + window + OTHER_REGISTERS

    @lazy
    def blocks_per_sm(self) -> int:
        return resident(self.gpu, self.shared_bytes, self.registers)

    @lazy
    def pairs(self) -> int:
        """Two rows of positions that a warp multiplies in a tile."""
        tile = self.tile
        return ceil_div(tile.slots * tile.columns // OCTET, self.sharers) * tile.rows // 2

    @lazy
    def split_tiles(self) -> int:
        return ceil_div(self.tile.tiles, self.splits)

    @lazy
    def entries(self) -> int:
        layer = self.layer
        return layer.channels * (layer.width * layer.taps + layer.operands.bias_grad)

    @lazy
    def _tile_work(self) -> tuple[float, float]:
        """Cycles of a tile: with others at the same time, and those that a block takes at least."""
        tile, layer, rates = self.tile, self.layer, gpus.rates(self.gpu)
        mmas = 2 * layer.taps + layer.operands.bias_grad
        pieces = 2 * layer.columns.kernel * 2 * layer.rows.times + 4
        pairs = self.pairs * WARPS
        grads = tile.slots * tile.rows * tile.columns * tile.chunk // OCTET
        loaded = 16 * (tile.halo_vectors + grads)
        instructions = (tile.halo_vectors + grads) * COPY / 32
        instructions += pairs * (mmas + PAIR + pieces)
        shared = together(
            pairs * mmas * MMA_PRODUCTS / rates.mma["bfloat16"],
            (pairs * pieces * 128 + loaded) / SHARED_BYTES,
            max(
                loaded * request_loss(tile) / rates.l2_bytes,
                self._memory / (tile.tiles * tile.chunk_count),
            ),
            instructions / ISSUED,
        )
        alone = TILE_CYCLES + self.pairs * (PAIR_CYCLES + mmas * MMA_CYCLES)
        return shared, alone

    @lazy
    def _memory(self) -> float:
        """Cycles that memory takes for all tensors, of one SM's share of its bandwidth."""
        layer = self.layer
        pixels = sum(height * width for height, width in (layer.in_size, layer.out_size))
        bytes_ = 2 * layer.problem.batch * layer.channels * pixels
        return bytes_ / gpus.rates(self.gpu).memory_bytes

    @lazy
    def cycles(self) -> float:
        rates, sms = gpus.rates(self.gpu), self.gpu.sm_count
        blocks = ceil_div(self.splits * self.tile.chunk_count, sms)
        rounds = ceil_div(blocks, self.blocks_per_sm)
        shared, alone = self._tile_work
        tiles = self.split_tiles
        written = 4 * self.splits * self.entries / sms / rates.l2_bytes
        reduced = REDUCE_CYCLES * (1 + self.splits / 256)
        main = rounds * BLOCK_CYCLES + together(blocks * tiles * shared, rounds * tiles * alone)
        return MEASURED_SHARE * (LAUNCH_CYCLES + main + 2 * written + reduced)


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output`` (the gradient).

    Raises:
        Declined: this family does not take the layer.
    """
    layer = Layer.of(problem, operands, gpu)
    best = sorted(candidates(layer, gpu), key=lambda one: one.cycles)
    explanation = tuple(
        f"{one.tile.name} in {one.splits} splits: {one.cycles:.0f}" for one in best[:EXPLAINED]
    )
    return plan(best[0], explanation)


def candidates(layer: Layer, gpu: Gpu) -> Iterator[Estimate]:
    """The tiles that fit, with numbers of splits.

    Raises:
        Declined: none does.
    """
    found = False
    for tile in tiles_of(layer):
        one = Estimate(tile, gpu)
        if one.teams > WARPS or one.registers > MOST_REGISTERS or not one.blocks_per_sm:
            continue
        for splits in _splits(one):
            found = True
            yield replace(one, splits=splits)
    if not found:
        raise Declined("accumulators of all taps, tiles or splits that do not fit")


def _splits(one: Estimate) -> list[int]:
    """Numbers of splits: as many blocks as run at once or fewer, unless sums get too long."""
    tiles = one.tile.tiles
    room = WORKSPACE_BYTES // (4 * one.entries)
    fewest = ceil_div(tiles, max(FLUSH_MMAS // one.pairs, 1))
    at_once = max(one.gpu.sm_count * one.blocks_per_sm // one.tile.chunk_count, 1)
    wanted = {max(at_once // n, fewest) for n in (1, 2, 4)}
    return sorted({n for n in wanted if n <= min(tiles, room)}) if one.pairs <= FLUSH_MMAS else []


def plan(chosen: Estimate, explanation: tuple[str, ...] = ()) -> Plan:
    """The launches that compute a weight gradient with a tile."""
    tile, layer = chosen.tile, chosen.layer
    if chosen.entries >= MOST_ENTRIES:
        raise Declined(f"{chosen.entries} weights")
    constants = tuple(
        {
            **weight_grad_constants(layer.problem, layer.operands),
            "transposed": False,
            **tile.constants(),
            "reduce_threads": REDUCE_THREADS,
            "blocks_per_sm": chosen.blocks_per_sm,
            "shared_bytes": chosen.shared_bytes,
        }.items()
    )
    launches = (
        Launch(
            Kernel(SOURCE, "weight_grad", constants),
            (chosen.splits * tile.chunk_count, 1, 1),
            THREADS,
            chosen.shared_bytes,
            ("grad_output", "input", "scratch", chosen.splits, layer.problem.batch),
        ),
        Launch(
            Kernel(SOURCE, "reduce", constants),
            (min(ceil_div(chosen.entries, REDUCE_LANES), MOST_REDUCE_BLOCKS), 1, 1),
            REDUCE_THREADS,
            4 * REDUCE_THREADS,
            ("scratch", "output", "bias_grad", chosen.splits),
        ),
    )
    scratch = round_up(4 * chosen.splits * chosen.entries, 16)
    why = (
        f"groups of {layer.width} channels on tensor cores, in tiles of {tile.name} channels and "
        f"{chosen.splits} splits"
    )
    return Plan(launches, scratch, FAMILY, why, explanation, cycles=chosen.cycles)
