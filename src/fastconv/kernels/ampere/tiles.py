"""What a block computes at once, what of it is in shared memory, and what that takes, estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastconv.kernels import gpus
from fastconv.kernels.ampere.layers import Layer
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu
from fastconv.kernels.lazy import lazy
from fastconv.kernels.tensor.limits import together

BLOCKS = ((4, 2), (8, 1))
"""Warps of a block, and blocks of a processor: their registers are all that there are."""

MOST_ROWS = {1: 64, 2: 32}  # output channels of a warp's products, by parts
MOST_SUMS = {1: 128, 2: 48}  # of a thread, in each set of them
MOST_PIXELS = {64: 64, 32: 96, 16: 128}  # of a warp, by rows: their places take registers
MOST_WEIGHT_STAGES = 4
FEWEST_WEIGHT_STAGES = 2
TILE_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)

# Registers for units of input that are loaded while others are multiplied, by parts.
UNIT_REGISTERS = {1: 8, 2: 4}
MOST_COPIES = 2  # of which only the addresses take any

# Estimated. Instructions of a warp: to load 32 vectors, copied; loaded as vectors; channel by
# channel, for each channel, and in any case. More for numbers in two parts, and to scale halves.
COPY_INSTRUCTIONS = 14.0
VECTOR_INSTRUCTIONS = 24.0
CHANNEL_INSTRUCTIONS = 2.5
PIXEL_INSTRUCTIONS = 22.0
SPLIT_INSTRUCTIONS = 4.0
HALVES_INSTRUCTIONS = 28.0
SCHEDULERS = 4  # instructions of a processor in a cycle
SHARED_BYTES = 128.0  # that it reads in a cycle
FLUSH_INSTRUCTIONS = {False: 1.0, True: 5.0}  # of a sum, if totals are compensated or not
SECTOR = 32  # bytes that memory writes at once
TILE_CYCLES = 1500.0  # to start and to end a tile
EXPOSED_STORES = {1: 0.5, 2: 0.2}  # the share of stores that nothing hides, by blocks


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and what of it is in shared memory at the same time."""

    layer: Layer
    gpu: Gpu
    warps: int
    blocks: int  # of a processor
    product_rows: int
    channel_groups: int
    pixels: int  # of a warp
    rows: int
    columns: int
    weight_stages: int = 0

    @property
    def name(self) -> str:
        """Tells it from all other tiles of its layer."""
        height, width = self.layer.out_size
        return (
            f"{height}x{width} in {self.rows}x{self.columns} "
            f"{self.warps}x{self.product_rows}x{self.pixels}/{self.channel_groups}"
        )

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_pixels(self) -> int:
        """Those that all warps have room for."""
        return self.warps // self.channel_groups * self.pixels

    @property
    def block_channels(self) -> int:
        return self.channel_groups * self.product_rows

    @lazy
    def halo_rows(self) -> int:
        return self.rows + (self.layer.kernel[0] - 1) // self.layer.row_phases

    @lazy
    def pitch(self) -> int:
        """Pixels from one row to the next, in shared memory."""
        return self.columns + self.layer.column_halo

    @property
    def plane_padding(self) -> int:
        """Pixels between planes, so that lanes that write a pixel's planes hit different banks."""
        return self.layer.plane_padding(self.layer.slots * self.halo_rows * self.pitch)

    @lazy
    def vectors(self) -> int:
        """Of 16 bytes, that a chunk's input is made of, in one part."""
        layer = self.layer
        plane = layer.slots * self.halo_rows * self.pitch + self.plane_padding
        return 2 * layer.k_steps * plane

    @property
    def tap_bytes(self) -> int:
        return self.layer.k_steps * self.layer.parts * self.block_channels * 32

    @property
    def weight_bytes(self) -> int:
        return self.layer.stage_taps * self.tap_bytes

    @property
    def all_weight_stages(self) -> int:
        return self.layer.chunks * self.layer.stages

    @property
    def resident(self) -> bool:
        """Whether all weights stay in shared memory."""
        return self.alone and self.weight_stages == self.all_weight_stages

    @property
    def alone(self) -> bool:
        """Whether all blocks have the same weights."""
        return self.output_groups * self.layer.groups == 1

    @property
    def output_groups(self) -> int:
        return ceil_div(self.layer.group_out, self.block_channels)

    @property
    def pass_pixels(self) -> int:
        """Those that a warp stages at once on their way out."""
        operands = self.layer.operands
        if operands.output_channels_last:
            return 32 // operands.scalar_bytes
        return next(n for n in (64, 48, 32, 16) if self.pixels % n == 0)

    @property
    def store_vector(self) -> int:
        """Elements that are stored at once: neighbours in memory, and aligned."""
        layer, operands = self.layer, self.layer.operands
        if operands.output_channels_last:
            widest = operands.widest_vector(layer.group_out)
            return widest if widest == operands.vector else 1
        if layer.placing[1].step > 1:
            return 1
        return operands.widest_vector(layer.image_size[1], layer.out_size[1], self.columns)

    @property
    def staging_bytes(self) -> int:
        operands = self.layer.operands
        if operands.output_channels_last:
            elements = self.pass_pixels * (self.product_rows + operands.vector)
        else:
            elements = 8 * (round_up(self.pass_pixels, 32) + 8)
        return self.warps * elements * operands.scalar_bytes

    @property
    def input_bytes(self) -> int:
        """Of both stages."""
        return 2 * self.layer.parts * self.vectors * 16

    @property
    def shared_bytes(self) -> int:
        return self.input_bytes + self.weight_stages * self.weight_bytes + self.staging_bytes

    @property
    def strips(self) -> int:
        return ceil_div(self.layer.out_size[1], self.columns)

    @property
    def row_tiles(self) -> int:
        return ceil_div(ceil_div(self.layer.out_size[0], self.layer.row_step), self.rows)

    @lazy
    def image_tiles(self) -> int:
        layer = self.layer
        return self.output_groups * self.strips * self.row_tiles * layer.row_step * layer.groups

    @property
    def tiles(self) -> int:
        return self.image_tiles * self.layer.batch

    @lazy
    def batch(self) -> int:
        """Units of input that a thread loads at once, beside a stage of weights."""
        layer = self.layer
        if layer.copied:
            most = MOST_COPIES
        else:
            registers = 4 if layer.vector_loads else layer.vector_channels
            most = max(1, UNIT_REGISTERS[layer.parts] // registers)
        return min(most, ceil_div(self.vectors, self.threads * layer.stages))

    def fitted(self) -> Tile | None:
        """With as many stages of weights as fit shared memory; None if too few do."""
        budget = self.gpu.shared_budget(self.blocks)
        stages = (budget - self.input_bytes - self.staging_bytes) // self.weight_bytes
        everything = self.all_weight_stages
        if self.alone and stages >= everything:
            return replace(self, weight_stages=everything)
        if stages < FEWEST_WEIGHT_STAGES:
            return None
        return replace(self, weight_stages=min(stages, MOST_WEIGHT_STAGES))

    @lazy
    def work(self) -> dict[str, float]:
        """What a tile takes a processor, in cycles, if there were nothing else to do."""
        layer, rates = self.layer, gpus.rates(self.gpu)
        products = self.product_rows // 16 * (self.pixels // 8) * self.warps
        steps = layer.chunks * layer.k_steps * layer.taps
        multiplied = self.tile_pixels * self.block_channels * 2 * layer.vector_channels
        matrices = self.warps * (self.product_rows + self.pixels) // 16 * layer.parts
        issued = float(steps * (products * layer.products + matrices))
        if layer.parts == 2:
            sums = products * 4 * FLUSH_INSTRUCTIONS[layer.compensated]
            issued += layer.chunks * layer.stages * sums
        issued += layer.chunks * self.vectors / 32 * self._load_instructions
        loaded = self._loaded_bytes
        weights = 0 if self.resident else layer.chunks * layer.taps * self.tap_bytes
        outputs = self.rows * min(self.columns, layer.out_size[1] / self.strips)
        channels = layer.group_out / self.output_groups
        stored = outputs * channels * layer.written * layer.operands.scalar_bytes
        stored *= self._store_loss
        return {
            "products": steps * layer.products * multiplied / rates.products[layer.multiplied],
            "shared": steps * matrices * 512 / SHARED_BYTES,
            "issue": issued / SCHEDULERS,
            "loads": (loaded + weights) / rates.l2_bytes,
            "stores": stored / rates.memory_bytes,
        }

    @property
    def _store_loss(self) -> float:
        """What more is stored, where runs of neighbours share their first and last sectors."""
        layer, operands = self.layer, self.layer.operands
        last = operands.output_channels_last
        run = (self.product_rows if last else self.columns) * operands.scalar_bytes
        whole = (layer.group_out if last else layer.image_size[1]) * operands.scalar_bytes
        return 1.0 if run % SECTOR == whole % SECTOR == 0 else 1.0 + 2 * SECTOR / run

    @property
    def _load_instructions(self) -> float:
        """To load 32 vectors of input."""
        layer = self.layer
        if layer.copied:
            return COPY_INSTRUCTIONS
        numbers = layer.vector_channels
        split = SPLIT_INSTRUCTIONS * numbers * (layer.parts - 1)
        if layer.vector_loads:
            return VECTOR_INSTRUCTIONS + split
        scale = HALVES_INSTRUCTIONS if layer.halves else 0
        return PIXEL_INSTRUCTIONS + CHANNEL_INSTRUCTIONS * numbers + split + scale

    @property
    def _loaded_bytes(self) -> float:
        layer = self.layer
        return layer.chunks * self.vectors * layer.vector_channels * layer.operands.scalar_bytes

    @lazy
    def tile_cycles(self) -> float:
        exposed = EXPOSED_STORES[self.blocks] * self.work["stores"]
        return TILE_CYCLES / self.blocks + exposed + together(*self.work.values())

    def cycles(self) -> float:
        """What the whole layer takes, estimated."""
        rounds = ceil_div(self.tiles, self.gpu.processors * self.blocks)
        return rounds * self.blocks * self.tile_cycles


def tiles_of(views: list[Layer], gpu: Gpu) -> list[Tile]:
    """All tiles that fit, the best first.

    Raises:
        Declined: there are none.
    """
    fitted = (tile.fitted() for view in views for tile in _candidates(view, gpu))
    tiles = sorted(filter(None, fitted), key=Tile.cycles)
    if not tiles:
        raise Declined("a halo tile that does not fit shared memory")
    return tiles


def _candidates(layer: Layer, gpu: Gpu) -> Iterator[Tile]:
    for warps, blocks in BLOCKS:
        for rows, groups in _channels(layer, warps):
            most = min(MOST_PIXELS[rows], MOST_SUMS[layer.parts] * 32 // rows)
            for pixels in dict.fromkeys((most, round_up(most // 2, 16), 16)):
                for shape in _shapes(layer, warps // groups * pixels):
                    yield Tile(layer, gpu, warps, blocks, rows, groups, pixels, *shape)


def _channels(layer: Layer, warps: int) -> Iterator[tuple[int, int]]:
    """Output channels of a warp, and how many warps have others: not twice as many as there are."""
    for rows in (64, 32, 16):
        if rows > MOST_ROWS[layer.parts] or (rows > 16 and rows >= 2 * layer.group_out):
            continue
        groups = 1
        while groups <= warps and (groups == 1 or groups * rows < 2 * layer.group_out):
            yield rows, groups
            groups *= 2


def _shapes(layer: Layer, pixels: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles with at most so many pixels."""
    height, width = ceil_div(layer.out_size[0], layer.row_step), layer.out_size[1]
    for rows in (*(rows for rows in TILE_ROWS if rows < height), min(height, TILE_ROWS[-1])):
        if rows > pixels:
            break
        most = min(pixels // rows, width)
        columns = ceil_div(width, ceil_div(width, most))
        whole = round_up(columns, 8)
        yield rows, whole if whole * rows <= pixels else columns
