"""Plans forward convolutions and input gradients with ``grouped/convolve/kernel.cuh``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import (
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    epilogue_constants,
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
    SM_REGISTERS,
    THREADS,
    WARPS,
    Layer,
    Tile,
    request_loss,
    resident,
    tiles_of,
)
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together
from fastconv.problem import Problem

SOURCE = "grouped/convolve/kernel.cuh"
STAGED_PIXEL_BYTES = 2 * BUNDLE + 16
STAGING_BYTES = WARPS * 16 * STAGED_PIXEL_BYTES
PACK_THREADS = 256
MOST_PACK_BLOCKS = 4096
MOST_WORDS = 2**30
MOST_GRID = 2**31
PAIR = 60  # instructions of a warp for two rows of positions, beside MMAs and loads
# Latencies of a warp: two rows of positions, and each of their MMAs along K.
PAIR_CYCLES = 250
STEP_CYCLES = 35
AHEAD_REGISTERS = 56  # of a thread that loads ahead, beside what Taps.registers counts
EXPLAINED = 5


@dataclass(frozen=True)
class Taps:
    """The taps of a residue; mirrors ``Taps`` in ``kernel.cuh``."""

    layer: Layer
    down: int
    across: int

    @lazy
    def tiles(self) -> int:
        """MMAs along N of a bundle."""
        return 4 if self.layer.width == 4 else 2

    @lazy
    def steps(self) -> int:
        """MMAs along K."""
        if self.layer.width == 4:
            return self.down * ceil_div(self.across, 4)
        return ceil_div(self.down * self.across * (self.layer.width // OCTET), 2)

    @lazy
    def pieces(self) -> int:
        """Registers that a lane loads of an input row."""
        if self.layer.width == 4:
            return self.tiles * ceil_div(self.across, 4) * 2
        return self.across * self.layer.octets

    @lazy
    def registers(self) -> int:
        """Registers of a lane for weights, the window and accumulators."""
        window = self.layer.window_rows * self.pieces
        return 2 * self.steps * self.tiles + window + 4 * self.tiles


def residues(layer: Layer) -> list[Taps]:
    """The taps of each residue."""
    return [
        Taps(layer, layer.rows.taps(row), layer.columns.taps(column))
        for row in range(layer.rows.over)
        for column in range(layer.columns.over)
    ]


@dataclass(frozen=True)
class Estimate:
    """A tile with what it takes."""

    tile: Tile
    gpu: Gpu
    taps: tuple[Taps, ...]

    @lazy
    def shared_bytes(self) -> int:
        return self.tile.halo_bytes + STAGING_BYTES

    @lazy
    def registers(self) -> int:
        return max(one.registers for one in self.taps) + OTHER_REGISTERS

    @lazy
    def blocks_per_sm(self) -> int:
        return resident(self.gpu, self.shared_bytes, self.registers)

    @lazy
    def ahead(self) -> bool:
        """Whether a lane has registers to load rows before it stores those before them."""
        taken = max(one.registers for one in self.taps)
        return self.blocks_per_sm == 1 or taken + AHEAD_REGISTERS <= SM_REGISTERS // (
            THREADS * self.blocks_per_sm
        )

    @lazy
    def blocks(self) -> int:
        return self.tile.tiles * self.tile.chunk_count

    @lazy
    def work(self) -> float:
        """Cycles of a block, if it were alone but for latencies."""
        tile, rates = self.tile, gpus.rates(self.gpu)
        layer = tile.layer
        walks = tile.slots * tile.columns // OCTET * tile.chunk // BUNDLE
        pairs = walks * tile.rows // 2
        rows = 2 * layer.rows.times * pairs + walks * layer.rows.reach
        mmas = sum(one.steps * one.tiles for one in self.taps)
        pieces = sum(one.pieces for one in self.taps)
        weights = sum(one.steps * one.tiles for one in self.taps) * 256 * WARPS
        outputs = tile.slots * tile.rows * tile.columns * len(self.taps) * tile.chunk * 2
        loaded = tile.halo_vectors * 16
        instructions = tile.halo_vectors * COPY / 32
        instructions += pairs * (mmas + len(self.taps) * PAIR) + 2 * rows * pieces
        return together(
            pairs * mmas * MMA_PRODUCTS / rates.mma["bfloat16"],
            (rows * pieces * 128 + loaded + 3 * outputs) / SHARED_BYTES,
            max(
                (loaded * request_loss(tile) + outputs + weights) / rates.l2_bytes,
                self._memory / self.blocks,
            ),
            instructions / ISSUED,
        )

    @lazy
    def _memory(self) -> float:
        """Cycles that memory takes for all tensors, of one SM's share of its bandwidth."""
        layer = self.tile.layer
        pixels = sum(height * width for height, width in (layer.in_size, layer.out_size))
        bytes_ = 2 * layer.problem.batch * layer.channels * pixels
        return bytes_ / gpus.rates(self.gpu).memory_bytes

    @lazy
    def alone(self) -> float:
        """Cycles of a block from its start to its end: loads, then the walks of a warp."""
        tile = self.tile
        walks = ceil_div(tile.slots * tile.columns // OCTET * tile.chunk // BUNDLE, WARPS)
        pair = sum(PAIR_CYCLES + STEP_CYCLES * one.steps for one in self.taps)
        loaded = tile.halo_vectors * 16 / gpus.rates(self.gpu).l2_bytes
        return BLOCK_CYCLES + loaded + walks * tile.rows // 2 * pair

    @lazy
    def cycles(self) -> float:
        blocks = ceil_div(self.blocks, self.gpu.sm_count)
        rounds = ceil_div(blocks, self.blocks_per_sm)
        return LAUNCH_CYCLES + together(blocks * self.work, rounds * self.alone)


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: this family does not take the layer.
    """
    return _plan(Layer.of(problem, operands, gpu), gpu)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: tensor ``input`` is the output's gradient, ``output`` the result.

    Raises:
        Declined: this family does not take the layer.
    """
    return _plan(Layer.of(problem, operands, gpu, transposed=True), gpu)


def _plan(layer: Layer, gpu: Gpu) -> Plan:
    best = sorted(candidates(layer, gpu), key=lambda one: one.cycles)
    explanation = tuple(f"{one.tile.name}: {one.cycles:.0f}" for one in best[:EXPLAINED])
    return plan(best[0], explanation)


def candidates(layer: Layer, gpu: Gpu) -> Iterator[Estimate]:
    """The tiles that fit.

    Raises:
        Declined: none does.
    """
    taps = tuple(residues(layer))
    if max(one.registers for one in taps) + OTHER_REGISTERS > MOST_REGISTERS:
        raise Declined("windows and weights that do not fit registers")
    found = [Estimate(tile, gpu, taps) for tile in tiles_of(layer)]
    fitting = [one for one in found if one.blocks_per_sm and one.blocks < MOST_GRID]
    if not fitting:
        raise Declined("a halo tile that does not fit shared memory")
    yield from fitting


def plan(chosen: Estimate, explanation: tuple[str, ...] = ()) -> Plan:
    """The launches that compute a layer with a tile."""
    tile = chosen.tile
    layer = tile.layer
    steps = sum(one.steps * one.tiles for one in chosen.taps)
    words = layer.channels // BUNDLE * steps * 64
    if words >= MOST_WORDS:
        raise Declined(f"{words} words of packed weights")
    constants = tuple(
        {
            **layer.constants(),
            **tile.constants(),
            "ahead": chosen.ahead,
            "blocks_per_sm": chosen.blocks_per_sm,
            "shared_bytes": chosen.shared_bytes,
            **epilogue_constants(layer.operands.epilogue),
        }.items()
    )
    pack = Launch(
        Kernel(SOURCE, "pack", constants),
        (min(ceil_div(words, PACK_THREADS), MOST_PACK_BLOCKS), 1, 1),
        PACK_THREADS,
        0,
        ("weight", "scratch"),
    )
    convolve = Launch(
        Kernel(SOURCE, "convolve", constants),
        (chosen.blocks, 1, 1),
        THREADS,
        chosen.shared_bytes,
        ("input", "scratch", "bias", "output", layer.problem.batch, *layer.operands.residuals),
    )
    why = f"groups of {layer.width} channels on tensor cores, in tiles of {tile.name} channels"
    return Plan(
        (pack, convolve), 4 * words, FAMILY, why, explanation, packs=1, cycles=chosen.cycles
    )
