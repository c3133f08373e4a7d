"""Plans depthwise convolutions, and their input gradients, on tensor cores: see ``bands.cuh``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.depthwise.layer import Layer
from fastconv.kernels.depthwise.tiles import PlanesTile
from fastconv.kernels.family import Constant, Declined, Gpu
from fastconv.kernels.lazy import lazy
from fastconv.kernels.tensor.limits import together

STRIP, PRODUCT_COLUMNS = 8, 8  # rows, and outputs of a product in a row
MOST_WARPS = 8
MOST_PRODUCTS = 8  # of a strip: what a warp has registers for
FIRST_ARCHITECTURE = 80

# Estimated, and so measured on an H200: cycles that a tensor core takes for a product, and
# instructions of a thread to copy a vector, for a diagonal of the table, for a block of columns that
# is checked, or split, and for a stored vector; how many are issued in a cycle; cycles of a round.
PRODUCT_CYCLES = 6
COPY, DIAGONAL, CHECKED, SPLIT, STORE = 20, 30, 30, 60, 12
ISSUED, START = 2.0, 2500


@dataclass(frozen=True, kw_only=True)
class Bands(PlanesTile):
    """Strips (``lanes_y``) and products (``lanes_x``) of a tile; ``slots`` are images."""

    warps: int

    @property
    def channels(self) -> int:
        return 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def parts(self) -> int:
        """That numbers are split in."""
        return 2 if self.layer.operands.scalar_bytes == 4 else 1

    @lazy
    def block(self) -> int:
        """Columns in 16 bytes."""
        return 16 // self.layer.operands.scalar_bytes

    @lazy
    def vector(self) -> int:
        """Copies are so wide that a band, which begins where they do, has no more blocks for it."""
        size, vector = self.layer.operands.scalar_bytes, self.widest_copy
        found = [vector]
        while vector * size > 4:
            vector //= 2
            found.append(vector)
        return min(found, key=self._band_blocks)

    @property
    def band_blocks(self) -> int:
        """Of columns that 8 outputs may read."""
        return self._band_blocks(self.vector)

    def _band_blocks(self, vector: int) -> int:
        columns = self.layer.columns
        read = columns.origin % vector + PRODUCT_COLUMNS + columns.kernel - 1
        return round_up(read, 2 * self.block) // self.block

    @lazy
    def row_pairs(self) -> int:
        """Twos of blocks that a strip's row has."""
        between = (self.lanes_x - 1) * PRODUCT_COLUMNS // self.block
        return ceil_div(between + self.band_blocks, 2)

    @lazy
    def pitch(self) -> int:
        """Rows of 16 bytes, 8 of which hit all banks."""
        blocks = max(2 * self.row_pairs, ceil_div(self.shift + self.halo_columns, self.block))
        return (blocks | 1) * self.block

    @lazy
    def shared_bytes(self) -> int:
        size, kernel_rows = self.layer.operands.scalar_bytes, self.layer.rows.kernel
        planes = self.parts * self.slots * self.halo_rows * self.pitch * size
        diagonals = 8 + self.band_blocks * self.block
        words = self.parts * kernel_rows * diagonals + self.slots * self.halo_rows
        return planes + round_up(words, 4) * 4

    @property
    def registers(self) -> int:
        sums = 4 * self.lanes_x * self.parts
        return min(255, 40 + sums + self.parts * (self.band_blocks + 12))

    @property
    def strip_pairs(self) -> int:
        return ceil_div(self.slots * self.lanes_y, 2)

    def blocks(self, images: int) -> int:
        layer = self.layer
        planes = ceil_div(images, self.slots) * layer.problem.groups * layer.group_out
        return planes * self.image_tiles

    @property
    def store_vector(self) -> int:
        return self.layer.operands.widest_vector(self.layer.out_size[1], 2)

    def cycles(self, gpu: Gpu) -> float:
        """What the whole layer takes, estimated."""
        layer, rates = self.layer, gpus.rates(gpu)
        fit = self.blocks_per_processor(gpu)
        blocks = self.blocks(layer.problem.batch)
        rounds = ceil_div(blocks, fit * gpu.processors)
        resident = min(fit, ceil_div(blocks, gpu.processors))
        size, kernel_rows = layer.operands.scalar_bytes, layer.rows.kernel
        turns = ceil_div(self.strip_pairs, self.warps) * self.warps  # idle ones, too
        products = turns * kernel_rows * self.lanes_x * self.band_blocks / 2 * (2 * self.parts - 1)
        loads = turns * kernel_rows * self.parts * (4 * self.row_pairs + self.band_blocks)
        vectors = self.slots * self.copied
        checked = self.slots * self.halo_rows * 2 * self.row_pairs
        diagonals = kernel_rows * (8 + self.band_blocks * self.block)
        stores = turns * 32 * 4 * self.lanes_x / self.store_vector
        prepared = SPLIT if self.parts == 2 else CHECKED
        issued = COPY * vectors + prepared * checked + DIAGONAL * diagonals + STORE * stores
        one_round = together(
            resident * products * PRODUCT_CYCLES / 4,
            resident * (loads + 2 * self.parts * checked / 8),
            resident * issued / 32 / ISSUED,
            resident * vectors * self.vector * size / rates.l2_bytes,
            resident * 2 * self.slots * self.tile_size[0] * self.tile_size[1] * size
            / rates.memory_bytes,
        )  # fmt: skip
        return rounds * (START + one_round)

    def constants(self) -> dict[str, Constant]:
        return {
            "rows": self.rows,
            "columns": self.columns,
            "lanes_y": self.lanes_y,
            "lanes_x": self.lanes_x,
            "slots": self.slots,
            "warps": self.warps,
            "vector": self.vector,
            "inside": self.inside,
            "piece": 1,
            "pitch": self.pitch,
            "plane_padding": 0,
            "store_vector": self.store_vector,
        }


def tiles(layer: Layer, gpu: Gpu) -> Iterator[Bands]:
    """All that may be worth it.

    Raises:
        Declined: these kernels do not take the layer.
    """
    _check(layer, gpu)
    strips = ceil_div(layer.out_size[0], STRIP)
    products = ceil_div(layer.out_size[1], PRODUCT_COLUMNS)
    tiles_x = ceil_div(products, MOST_PRODUCTS)
    lanes_x = ceil_div(products, tiles_x)
    for parts_y in (1, 2, 4, 8, 16, 32):
        lanes_y = ceil_div(strips, parts_y)
        whole = parts_y == 1 and tiles_x == 1
        for slots in (1, 2, 4, 8, 16) if whole else (1, 2):
            if slots > 1 and slots >= 2 * layer.problem.batch:
                break
            pairs = ceil_div(slots * lanes_y, 2)
            for turns in (1, 2):
                warps = ceil_div(pairs, turns)
                if warps > MOST_WARPS:
                    continue
                tile = Bands(
                    layer=layer, rows=STRIP, columns=PRODUCT_COLUMNS, lanes_y=lanes_y,
                    lanes_x=lanes_x, slots=slots, warps=warps,
                )  # fmt: skip
                if tile.pitch <= tile.vector * tile.threads:  # a row is copied at once
                    yield tile
        if lanes_y == 1:
            break


def _check(layer: Layer, gpu: Gpu) -> None:
    problem = layer.problem
    if gpus.number(gpu) < FIRST_ARCHITECTURE:
        raise Declined("tensor cores before sm_80")
    if layer.operands.scalar_bytes == 8:
        raise Declined("float64")
    if layer.group_in > 1:
        raise Declined("groups of several channels")
    if max(*problem.stride, *problem.dilation) > 1:
        raise Declined("strides or dilation")
