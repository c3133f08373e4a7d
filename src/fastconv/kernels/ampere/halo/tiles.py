"""What a block of the halo kernel computes at once, its shared memory, and its estimated cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

from fastconv.kernels import gpus
from fastconv.kernels.ampere.halo.layer import Layer
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together

TEAMS = ((4, 3), (8, 3), (4, 7), (4, 11))
"""A block's consumer warps, and its producer warps of input; one more streams weights."""

# Accumulators of a thread in each set of them, by all warps of a block, then by parts: as many as
# registers hold.
MOST_ACCUMULATORS = {8: {1: 128, 2: 48}, 12: {1: 96, 2: 32}, 16: {1: 48, 2: 16}}
# The same limits where channels-last float32 is stored, and for 3xTF32.
MOST_WIDE_ACCUMULATORS = {8: {1: 64, 2: 32}, 12: {1: 64, 2: 24}, 16: {1: 48, 2: 16}}
MOST_ROWS = {1: 64, 2: 32}  # output channels (M) of a warp's register tile, by parts
MOST_PIXELS = {64: 64, 32: 96, 16: 128}  # pixels of a warp, by M: addresses take registers
INPUT_STAGES = 2
MOST_WEIGHT_STAGES = 4
FEWEST_WEIGHT_STAGES = 2
TILE_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)

# Registers of a producer thread for loads in flight, by all warps of a block. There is one batch of
# loads: a thread that waits for one waits for all that it has issued, so a second gains nothing.
BATCH_REGISTERS = {8: 96, 12: 48, 16: 32}

# Parameters of the cost model: cycles of a consumer warp.
STAGE_CYCLES = 90.0  # from a stage of weights to the next
FLUSH_CYCLES = {False: 1.2, True: 6.0}  # a flush of an accumulator, by whether it is compensated
TILE_CYCLES = 900.0  # the end of a tile
ACCUMULATOR_CYCLES = 2.0  # the epilogue of an accumulator
VECTOR_CYCLES = 14.0  # the store of a vector of outputs
EXPOSED = {4: 1.0, 8: 0.6}  # share of these that no warp of the same scheduler hides, by consumers
# Shares of the times that MMAs, by parts, and reads of their operands take alone.
MMA_SHARE = {1: 0.84, 2: 0.9}
OPERAND_SHARE = 0.49
SHARED_BYTES = 128.0  # bytes of shared memory that an SM reads in a cycle
# Cycles of a producer warp of input.
COPY_CYCLES = 6.0  # a vector that is copied as it is
VECTOR_LOAD_CYCLES = 50.0  # a vector that is loaded to registers
PIXEL_CYCLES = 60.0  # two vectors of a pixel whose numbers are loaded one by one
NUMBER_CYCLES = 10.0  # each number of a loaded vector or pixel
SPLIT_CYCLES = 14.0  # extra for a number that is split in two parts
SCALED_FP16_CYCLES = 4.0  # extra for a number of scaled fp16
LATENCY_CYCLES = 1200.0  # latency of memory
# Extra cost of stores that begin or end within a sector of memory, in bytes.
SECTOR = 32
PARTIAL_BYTES = 150.0
CUT_BYTES = 50.0  # extra cost of a sector that two warps of a block write


@dataclass(frozen=True)
class Patch:
    """Output pixels of a tile, and the halo tile that they read, whatever the block's warps."""

    layer: Layer
    rows: int
    columns: int

    @lazy
    def halo_rows(self) -> int:
        return self.rows + (self.layer.kernel[0] - 1) // self.layer.row_residues

    @lazy
    def pitch(self) -> int:
        """Pixels from one row to the next in shared memory."""
        return self.columns + self.layer.column_halo

    @lazy
    def plane_padding(self) -> int:
        """Pixels between planes, so that lanes that write a pixel's planes hit different banks."""
        return self.layer.plane_padding(self.layer.slots * self.halo_rows * self.pitch)

    @lazy
    def vectors(self) -> int:
        """Vectors of 16 bytes in one part of a chunk's halo tile."""
        layer = self.layer
        plane = layer.slots * self.halo_rows * self.pitch + self.plane_padding
        return 2 * layer.k_steps * plane

    @lazy
    def units(self) -> int:
        """What a producer thread loads at a time: vectors, or two vectors of a pixel."""
        return self.vectors if self.layer.vector_loads else self.vectors // 2

    @lazy
    def input_bytes(self) -> int:
        """Shared memory of all input stages."""
        return INPUT_STAGES * self.layer.parts * self.vectors * 16

    @lazy
    def loaded_bytes(self) -> float:
        """Bytes that a tile reads; each line of a plane adds a sector of which it uses a part."""
        layer = self.layer
        channels = 2 * layer.k_steps * layer.vector_channels
        lines = layer.slots * self.halo_rows * (4 if layer.vector_loads else channels)
        loaded = self.vectors * layer.vector_channels * layer.operands.scalar_bytes
        return layer.chunks * (loaded + lines * SECTOR)

    @lazy
    def strips(self) -> int:
        return ceil_div(self.layer.out_size[1], self.columns)

    @lazy
    def count(self) -> int:
        """Patches of an image, in all groups."""
        layer = self.layer
        down = ceil_div(ceil_div(layer.out_size[0], layer.row_step), self.rows)
        return self.strips * down * layer.row_step * layer.groups


@dataclass(frozen=True)
class Team:
    """A block's warps and their register tiles, whatever the patch of the tile."""

    layer: Layer
    gpu: Gpu
    warps: int  # consumer warps
    loaders: int  # producer warps of input
    register_tile_m: int  # output channels of a consumer warp
    channel_groups: int  # consumer warps that divide output channels
    pixels: int  # pixels of a consumer warp

    @lazy
    def all_warps(self) -> int:
        return self.warps + self.loaders + 1

    @lazy
    def tile_pixels(self) -> int:
        """Pixels that all consumer warps have room for."""
        return self.warps // self.channel_groups * self.pixels

    @lazy
    def block_channels(self) -> int:
        return self.channel_groups * self.register_tile_m

    @lazy
    def tap_bytes(self) -> int:
        return self.layer.k_steps * self.layer.parts * self.block_channels * 32

    @lazy
    def one_weight_block(self) -> bool:
        """Whether all blocks use the same weights."""
        return self.output_groups * self.layer.groups == 1

    @lazy
    def output_groups(self) -> int:
        return ceil_div(self.layer.group_out, self.block_channels)

    @lazy
    def pass_pixels(self) -> int:
        """Pixels that a warp stages at once before they are stored."""
        operands = self.layer.operands
        if operands.output_channels_last:
            return 32 // operands.scalar_bytes
        return next(n for n in (64, 32, 48, 16) if self.pixels % n == 0)

    @lazy
    def buffers(self) -> int:
        """Staging buffers of a warp for contiguous outputs: two where no other warp hides waits."""
        return 2 if self.warps == 4 else 1

    @lazy
    def staging_bytes(self) -> int:
        operands = self.layer.operands
        if operands.output_channels_last:
            elements = self.pass_pixels * (self.register_tile_m + operands.vector)
        else:
            elements = self.buffers * 8 * (round_up(self.pass_pixels, 32) + 8)
        return self.warps * elements * operands.scalar_bytes

    @lazy
    def powers_bytes(self) -> int:
        """Shared memory for the scales of a chunk's channels, with scaled fp16."""
        layer = self.layer
        return self.loaders * 4 * 2 * layer.k_steps * layer.vector_channels * layer.scaled_fp16

    @lazy
    def unit_registers(self) -> int:
        return 4 if self.layer.vector_loads else 2 * self.layer.vector_channels

    @lazy
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.register_tile_m * self.pixels // 32

    @lazy
    def mma_cycles(self) -> float:
        """Cycles that a tile's MMAs take alone."""
        layer, rates = self.layer, gpus.rates(self.gpu)
        steps = layer.chunks * layer.k_steps * layer.taps
        multiplied = self.tile_pixels * self.block_channels * 2 * layer.vector_channels
        return steps * layer.mmas_per_step * multiplied / rates.mma[layer.multiplied]

    @lazy
    def operand_cycles(self) -> float:
        """Cycles that shared memory takes alone to deliver the MMAs' operands."""
        layer = self.layer
        steps = layer.chunks * layer.k_steps * layer.taps
        matrices = self.warps * (self.register_tile_m + self.pixels) // 16 * layer.parts
        return steps * matrices * 512 / SHARED_BYTES


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and its stages in shared memory."""

    team: Team
    patch: Patch

    @lazy
    def layer(self) -> Layer:
        return self.team.layer

    @property
    def name(self) -> str:
        """A name that no other tile of the layer has."""
        (height, width), team, patch = self.layer.out_size, self.team, self.patch
        return (
            f"{height}x{width} in {patch.rows}x{patch.columns} "
            f"{team.warps}+{team.loaders}x{team.register_tile_m}x{team.pixels}"
            f"/{team.channel_groups}"
        )

    @property
    def weight_bytes(self) -> int:
        return self.stage_taps * self.team.tap_bytes

    @property
    def all_weight_stages(self) -> int:
        return self.layer.weight_stages(self.stage_taps)

    @property
    def resident(self) -> bool:
        """Whether all weights stay in shared memory."""
        return self.team.one_weight_block and self.weight_stages == self.all_weight_stages

    @property
    def store_vector(self) -> int:
        """Elements that are stored at once: neighbours in memory, and aligned."""
        layer, operands = self.layer, self.layer.operands
        if operands.output_channels_last:
            widest = operands.widest_vector(layer.group_out)
            return widest if widest == operands.vector else 1
        if layer.placing[1].step > 1:
            return 1
        return operands.widest_vector(layer.image_size[1], layer.out_size[1], self.patch.columns)

    @lazy
    def _other_bytes(self) -> int:
        """Shared memory besides weights."""
        return self.patch.input_bytes + self.team.staging_bytes + self.team.powers_bytes

    @property
    def shared_bytes(self) -> int:
        return self._other_bytes + self.weight_stages * self.weight_bytes

    @lazy
    def image_tiles(self) -> int:
        return self.team.output_groups * self.patch.count

    @property
    def tiles(self) -> int:
        return self.image_tiles * self.layer.batch

    @lazy
    def batch(self) -> int:
        """Units that a thread loads at once, in batches of about equal size."""
        units = ceil_div(self.patch.units, 32 * self.team.loaders)  # units of a thread
        most = BATCH_REGISTERS[self.team.all_warps] // self.team.unit_registers
        return ceil_div(units, ceil_div(units, most))

    @lazy
    def _weights(self) -> tuple[int, int]:
        """Taps of a stage of weights, the most of which enough stages fit, and stages; or zeros."""
        room = self.team.gpu.shared_budget(1) - self._other_bytes
        for taps in self.layer.stages_taps:
            stages = room // (taps * self.team.tap_bytes)
            all_stages = self.layer.weight_stages(taps)
            if self.team.one_weight_block and stages >= all_stages:
                return taps, all_stages
            if stages >= FEWEST_WEIGHT_STAGES:
                return taps, min(stages, MOST_WEIGHT_STAGES)
        return 0, 0

    @property
    def stage_taps(self) -> int:
        return self._weights[0]

    @property
    def weight_stages(self) -> int:
        return self._weights[1]

    @property
    def fits(self) -> bool:
        return self.weight_stages > 0

    @lazy
    def work(self) -> dict[str, float]:
        """Cycles that each kind of work of a tile takes an SM, if it were alone."""
        layer, team, patch = self.layer, self.team, self.patch
        rates = gpus.rates(team.gpu)
        ends = self.all_weight_stages * STAGE_CYCLES + TILE_CYCLES
        if layer.parts == 2:
            flushes = layer.chunks * layer.taps / layer.flush_taps
            ends += flushes * team.accumulators * FLUSH_CYCLES[layer.compensated]
        ends += team.accumulators * (ACCUMULATOR_CYCLES + VECTOR_CYCLES / self.store_vector)
        weights = 0 if self.resident else layer.chunks * layer.taps * team.tap_bytes
        outputs = patch.rows * min(patch.columns, layer.out_size[1] / patch.strips)
        channels = layer.group_out / team.output_groups
        stored = outputs * channels * layer.written * layer.operands.scalar_bytes
        return {
            "multiply": EXPOSED[team.warps] * ends
            + MMA_SHARE[layer.parts] * team.mma_cycles
            + OPERAND_SHARE * team.operand_cycles,
            "load": self._load_cycles,
            "read": (patch.loaded_bytes + weights) / rates.l2_bytes,
            "write": stored * self._store_loss / rates.memory_bytes,
        }

    @property
    def _store_loss(self) -> float:
        """Factor by which stores take longer because runs begin or end within sectors."""
        layer, operands = self.layer, self.layer.operands
        size, last = operands.scalar_bytes, operands.output_channels_last
        run = (self.team.register_tile_m if last else self.patch.columns) * size
        whole = (layer.group_out if last else layer.image_size[1]) * size
        if run % SECTOR == whole % SECTOR == 0:
            return 1.0
        cuts = 0.0 if last else self._cuts / self.patch.rows
        return 1.0 + 2 * (PARTIAL_BYTES + CUT_BYTES * cuts) / run

    @property
    def _cuts(self) -> int:
        """Cuts of a tile's rows between pixels that are stored at different times."""
        begins = range(0, self.patch.rows * self.patch.columns, self.team.pass_pixels)
        return sum(pixel % self.patch.columns > 0 for pixel in begins)

    @property
    def _load_cycles(self) -> float:
        """Cycles of the producer warps of input."""
        layer, threads = self.layer, 32 * self.team.loaders
        if layer.copied:
            copies = self.patch.vectors / threads * COPY_CYCLES
            return layer.chunks * (copies + LATENCY_CYCLES / INPUT_STAGES)
        numbers = self.team.unit_registers
        of_unit = VECTOR_LOAD_CYCLES if layer.vector_loads else PIXEL_CYCLES
        of_unit += NUMBER_CYCLES * numbers
        of_unit += (
            SPLIT_CYCLES * numbers * (layer.parts - 1)
            + SCALED_FP16_CYCLES * numbers * layer.scaled_fp16
        )
        batches = ceil_div(self.patch.units, threads * self.batch)
        return layer.chunks * batches * (LATENCY_CYCLES + self.batch * of_unit)

    @lazy
    def tile_cycles(self) -> float:
        return together(*self.work.values())

    def cycles(self) -> float:
        """Cycles that the whole layer takes, estimated."""
        return ceil_div(self.tiles, self.team.gpu.sm_count) * self.tile_cycles


def tiles_of(views: list[Layer], gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the best first.

    Raises:
        Declined: no tile fits.
    """
    candidates = (tile for view in views for tile in _candidates(view, gpu))
    tiles = sorted((tile for tile in candidates if tile.fits), key=Tile.cycles)
    if not tiles:
        raise Declined("a halo tile that does not fit shared memory")
    return tiles


def _candidates(layer: Layer, gpu: Gpu) -> Iterator[Tile]:
    patches_of = cache(partial(_patches, layer))
    for warps, loaders in TEAMS:
        if layer.copied and 32 * loaders % (2 * layer.k_steps):
            continue  # a thread copies vectors of one plane only
        most_accumulators = _most_accumulators(layer)[warps + loaders + 1][layer.parts]
        for rows, groups in _channels(layer, warps):
            most = min(MOST_PIXELS[rows], most_accumulators * 32 // rows // 16 * 16)
            for pixels in dict.fromkeys((most, round_up(most // 2, 16), 16) if most else ()):
                team = Team(layer, gpu, warps, loaders, rows, groups, pixels)
                for patch in patches_of(team.tile_pixels):
                    yield Tile(team, patch)


def _most_accumulators(layer: Layer) -> dict[int, dict[int, int]]:
    operands = layer.operands
    wide = operands.output_channels_last and operands.scalar_bytes == 4
    split = layer.parts == 2 and not layer.scaled_fp16
    return MOST_WIDE_ACCUMULATORS if wide or split else MOST_ACCUMULATORS


def _channels(layer: Layer, warps: int) -> Iterator[tuple[int, int]]:
    """Output channels of a warp, and warps that divide them: in all less than twice the layer's."""
    for rows in (64, 32, 16):
        if rows > MOST_ROWS[layer.parts] or (rows > 16 and rows >= 2 * layer.group_out):
            continue
        groups = 1
        while groups <= warps and (groups == 1 or groups * rows < 2 * layer.group_out):
            yield rows, groups
            groups *= 2


def _patches(layer: Layer, pixels: int) -> list[Patch]:
    """Patches of at most ``pixels`` pixels."""
    found = []
    height, width = ceil_div(layer.out_size[0], layer.row_step), layer.out_size[1]
    for rows in (*(rows for rows in TILE_ROWS if rows < height), min(height, TILE_ROWS[-1])):
        if rows > pixels:
            break
        most = min(pixels // rows, width)
        columns = ceil_div(width, ceil_div(width, most))
        whole = round_up(columns, 8)
        found.append(Patch(layer, rows, whole if whole * rows <= pixels else columns))
    return found
