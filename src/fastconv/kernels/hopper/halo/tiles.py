"""Tiles of the halo kernel: a shape, its load method, and what shared memory holds of it."""

from __future__ import annotations

from dataclasses import dataclass

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu
from fastconv.kernels.hopper.block import CONSUMERS, OUTPUTS
from fastconv.kernels.hopper.halo.shapes import (
    BOX_BYTES,
    TILE_CYCLES,
    LoadMethod,
    Shape,
    shapes_of,
)
from fastconv.kernels.hopper.layers import Layer
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together

# Estimated cycles of an SM, and shares of a tile's.
PASS_CYCLES = 1000.0  # of each further pass, which waits for the staged outputs of the one before
SEGMENT_COST = 0.3  # tiles, for each row that a segment loads again
MOST_SEGMENT = 64  # tiles that a block computes on its way down


@dataclass(frozen=True)
class Tile:
    """What a block computes at once, and how many stages of it shared memory holds.

    Outputs are staged in passes of ``pass_pixels``.
    """

    shape: Shape
    method: LoadMethod
    pass_pixels: int = 0
    buffers: int = 1
    input_stages: int = 0
    weight_stages: int = 0

    @lazy
    def layer(self) -> Layer:
        return self.shape.layer

    @property
    def name(self) -> str:
        """Tells the tile from all others of its layer; measured choices are stored by it."""
        shape, (height, width) = self.shape, self.layer.out_size
        return (
            f"{height}x{width} in {shape.channel_groups}x{shape.rows}x{shape.columns}+{shape.lead} "
            f"{self.loads}"
        )

    @property
    def loads(self) -> str:
        """The load method, and how many pieces a loading warp has in flight."""
        if not self.staged:
            return "pixels"
        kind = "boxed" if self.method.boxes else "staged" if self.method.bulk else "copied"
        return f"{self.method.raw_slots} {kind}{' by 7' if self.producers == 2 else ''}"

    @property
    def producers(self) -> int:
        """Producer warpgroups, whose first warp streams weights."""
        return (self.method.warps + 1) // 4

    @property
    def staged(self) -> bool:
        """Whether raw input goes through shared memory on its way to the halo tile.

        Bulk copies fetch whole lines, or cp.async 16 bytes per lane.
        """
        return self.method.raw_slots > 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of a raw piece."""
        size = 16 * self.shape.raw_vectors(self.method, self.wraps)
        return round_up(size, BOX_BYTES) if self.method.boxes else size

    @lazy
    def resident(self) -> bool:
        """Whether all weights stay in shared memory, because all tiles read the same ones."""
        return (
            self.shape.output_groups * self.layer.groups == 1
            and self.weight_stages == self.layer.weight_stages
        )

    @property
    def turns(self) -> bool:
        """Whether the consumers alternate: one issues MMAs while the other stores.

        Only if neither waits for weights or input that the other holds, and storing takes longer
        than multiplying: a single consumer does not keep the tensor cores as busy as two, least of
        all with 3xTF32. Loaders that copy asynchronously show a stage only when they have started
        on the next, for which a tile whose chunks fill all stages would wait forever.
        """
        layer = self.layer
        if layer.scaled_fp16 and not layer.copied:
            allowed = layer.rolling or layer.chunks <= self.input_stages
        else:
            allowed = layer.rolling and layer.parts == 1
        return allowed and self.resident and self.stores_bind and not self.joint_stores

    @property
    def joint_stores(self) -> bool:
        """Whether both consumers store a pixel's channels together, in longer runs of memory."""
        return (
            self.layer.operands.output_channels_last
            and self.shape.channel_groups == CONSUMERS
            and self.layer.mma_channels == OUTPUTS
            and not self.layer.depth_to_space
            and self.stores_bind
        )

    @property
    def stores_bind(self) -> bool:
        """Whether storing takes longer than multiplying."""
        return self.work["stores"] >= self.work["mma"]

    @property
    def powers_bytes(self) -> int:
        """Bytes of a loading warp's copy of the powers of two that scale a chunk's channels."""
        layer = self.layer
        copied = layer.scaled_fp16 and not (layer.half_copy or self.method.bulk)
        return 4 * layer.k_steps * 2 * layer.vector_channels if copied else 0

    @property
    def shared_bytes(self) -> int:
        return (
            self.input_stages * self.shape.input_stage_bytes
            + self.weight_stages * (self.shape.weight_bytes + 16)
            + CONSUMERS * self.shape.staging_bytes(self.pass_pixels, self.buffers)
            + self.fixed_bytes
        )

    @property
    def fixed_bytes(self) -> int:
        """Bytes of shared memory that do not depend on stages and passes."""
        raw = self.method.raw_slots * (self.raw_bytes + 8)
        before = BOX_BYTES if self.method.boxes else 0
        return before + self.method.warps * (raw + self.powers_bytes) + 8 * CONSUMERS

    @lazy
    def wraps(self) -> bool:
        """Whether a row's last strip continues into the next row, to the end of a sector or line.

        Then no two strips write to the same sector. The next row's outputs have to follow this
        row's in memory, and so does its input if lines are staged; they have to fit the tile; and
        the loader that copies vectors of channels does not support it.
        """
        shape, layer = self.shape, self.layer
        width, before = layer.out_size[1], (shape.strips - 1) * shape.columns
        read = width + layer.column_halo
        unpadded = layer.padding[1] == 0 and layer.in_size[1] == read
        return (
            shape.lead > 0
            and layer.stride == layer.s2d_factors == (1, 1)
            and layer.placing[0].step == layer.placing[1].step == 1
            and self.pass_pixels >= shape.pixels
            and before < width
            and read + 2 * shape.lead - 1 <= before + shape.pixels
            and (unpadded or not self.staged)
            and not layer.copied
        )

    @lazy
    def work(self) -> dict[str, float]:
        """Cycles of each kind of work of a tile, as if there were nothing else to do."""
        shape = self.shape
        return {
            "mma": shape.mma_cycles,
            "loads": shape.load_cycles(self.method, self.wraps),
            "stores": shape.store_cycles(self.wraps),
            "weights": 0.0 if self.resident else shape.weight_cycles,
        }

    @lazy
    def tile_cycles(self) -> float:
        passes = ceil_div(self.shape.pixels, self.pass_pixels)
        return TILE_CYCLES + PASS_CYCLES * (passes - 1) + together(*self.work.values())

    def cycles(self, sms: int) -> float:
        """The estimated cycles of the whole layer."""
        return ceil_div(self.shape.tiles, sms) * self.tile_cycles

    def fitted(self, budget: int) -> Tile | None:
        """The tile with as many stages as fit ``budget`` bytes of shared memory, or None.

        Weights come first: all of them if they can stay, or enough stages to hide the latency. Then
        the staging of outputs, in as few passes as possible; then more input stages. Layers that
        cp.async loads prefer three input stages: only then are copies in flight during a wait.
        """
        shape = self.shape
        input_stage, weight_stage = shape.input_stage_bytes, shape.weight_bytes + 16
        room = budget - self.fixed_bytes
        for fewest, inputs, pass_pixels, buffers, taken in shape.layouts:
            left = room - taken
            stages = left // weight_stage
            if stages < fewest:
                continue
            stages = min(stages, max(fewest, shape.most_weight_stages))
            more = (left - stages * weight_stage) // input_stage
            input_stages = min(inputs + more, max(shape.most_input_stages, inputs))
            # dataclasses.replace would take twice as long.
            return Tile(shape, self.method, pass_pixels, buffers, input_stages, stages)
        return None


def tiles_of(views: list[Layer], gpu: Gpu) -> list[Tile]:
    """All tiles that fit shared memory, the fastest by estimate first.

    Raises:
        Declined: none fits.
    """
    fitted = (
        Tile(shape, method).fitted(gpu.shared_bytes_per_block)
        for shape in shapes_of(views)
        for method in shape.load_methods
    )
    tiles = sorted(filter(None, fitted), key=lambda tile: tile.cycles(gpu.sm_count))
    if not tiles:
        raise Declined("a halo tile that does not fit shared memory")
    return tiles


def segment_tiles(tile: Tile, gpu: Gpu) -> int:
    """Tiles of a segment, which a block computes from top to bottom.

    The number balances the blocks' loads against the rows at the top of each segment, which the
    block above loads too.
    """
    if not tile.layer.rolling:
        return 1
    columns = tile.shape.tiles // tile.shape.row_tiles
    again = SEGMENT_COST * (tile.shape.halo_rows - tile.shape.tile_rows) / tile.shape.tile_rows

    def cost(count: int) -> float:
        items = columns * ceil_div(tile.shape.row_tiles, count)
        return ceil_div(items, gpu.sm_count) * (count + again)

    return min(range(1, min(tile.shape.row_tiles, MOST_SEGMENT) + 1), key=cost)


def item_count(tile: Tile, gpu: Gpu) -> int:
    """The number of items that are distributed over blocks: tiles, or segments of tiles."""
    return (
        tile.shape.tiles
        // tile.shape.row_tiles
        * ceil_div(tile.shape.row_tiles, segment_tiles(tile, gpu))
    )
