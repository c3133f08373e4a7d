"""Tiles of depthwise convolutions and input gradients as Toeplitz matrices on tensor cores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.depthwise.layer import Layer
from fastconv.kernels.depthwise.tiles import Area, PlanesTile, occupancy, shares
from fastconv.kernels.family import Constant, Declined, Gpu
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together

STRIP, MMA_COLUMNS = 8, 8  # rows of a strip, and outputs of an MMA in a row
MOST_WARPS = 8
MOST_MMAS = 8  # MMAs across a strip: a warp has registers for their accumulators
MAGNITUDES = 9  # magnitudes of float32 weights that the kernel distinguishes
FIRST_ARCHITECTURE = 80
FEWEST_COLUMNS, FEWEST_PIXEL_COLUMNS = 5, 11  # shorter kernel rows are not worth tensor cores

# Parameters of the cost model, fitted to measurements on an H200.
MMA_LOSS = 1.2  # factor by which MMAs are slower than the tensor cores' rate
# Instructions of a thread to copy a vector, or one of less than 4 bytes; for a diagonal of the
# table; for a block of columns that is checked, or split; and for a stored vector.
COPY, AWAITED_COPY, DIAGONAL, CHECKED, SPLIT, STORE = 11, 60, 52, 31, 38, 9.4
# Instructions that an SM issues in a cycle with many warps (with HALF_ISSUED warps it issues half),
# and cycles that each wave of blocks takes to start.
ISSUED, HALF_ISSUED, START = 2.35, 3.9, 1500
# The share of all other work that the longest does not hide, and what a block that is alone on its
# SM adds to it.
LOSS, LOSS_ALONE = 0.23, 0.15


@dataclass(frozen=True, kw_only=True)
class ToeplitzTile(PlanesTile):
    """A tile of ``lanes_y`` strips, ``lanes_x`` MMAs across; ``slots`` are images."""

    warps: int
    source = ""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def parts(self) -> int:
        """TF32 parts of a float32 number (3xTF32); 1 for 16-bit types."""
        return 2 if self.layer.operands.scalar_bytes == 4 else 1

    @property
    def multiplied(self) -> str:
        """The type that tensor cores multiply."""
        return "tf32" if self.parts == 2 else self.layer.operands.scalar.removeprefix("fastconv::")

    @lazy
    def block(self) -> int:
        """Columns in 16 bytes."""
        return 16 // self.layer.operands.scalar_bytes

    @lazy
    def toeplitz_blocks(self) -> int:
        """Blocks of columns of a Toeplitz matrix: those that 8 outputs may read."""
        return self._toeplitz_blocks(self.vector)

    def _toeplitz_blocks(self, vector: int) -> int:
        columns = self.layer.columns
        read = columns.origin % vector + MMA_COLUMNS + columns.kernel - 1
        return round_up(read, 2 * self.block) // self.block

    @lazy
    def row_pairs(self) -> int:
        """Pairs of blocks in a strip's row."""
        between = (self.area.lanes_x - 1) * MMA_COLUMNS // self.block
        return ceil_div(between + self.toeplitz_blocks, 2)

    @lazy
    def piece(self) -> int:
        return 1  # unused: threads read blocks of columns, not windows

    @lazy
    def pitch(self) -> int:
        """Elements of a row: an odd number of 16 bytes, so that 8 rows hit all banks."""
        blocks = max(2 * self.row_pairs, ceil_div(self.shift + self.area.halo_columns, self.block))
        return (blocks | 1) * self.block

    @property
    def _rows(self) -> int:
        """Halo rows of all planes."""
        return self.channels * self.slots * self.area.halo_rows

    @property
    def diagonals(self) -> int:
        """Diagonals in a block's tables."""
        return self.channels * self.layer.rows.kernel * (8 + self.toeplitz_blocks * self.block)

    @lazy
    def shared_bytes(self) -> int:
        elements = self.parts * self._rows * self.pitch + self.results
        marks = self._rows + self.channels * self.slots
        if self.parts == 2:
            marks += self.channels * MAGNITUDES
        words = round_up(self.parts * self.diagonals + marks, 4)
        return elements * self.layer.operands.scalar_bytes + words * 4

    @property
    def registers(self) -> int:
        accumulators = 4 * self.area.lanes_x * self.parts
        return min(255, 40 + accumulators + self.parts * (self.toeplitz_blocks + 12))

    @property
    @abstractmethod
    def results(self) -> int:
        """Output elements that are staged in shared memory before they are stored."""

    @property
    @abstractmethod
    def loading(self) -> float:
        """Instructions of all threads until the input is ready."""

    @property
    @abstractmethod
    def storing(self) -> float:
        """Instructions of all threads to store the results."""

    @property
    @abstractmethod
    def other_reads(self) -> float:
        """Cycles of shared memory for what is neither an operand nor copied."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Bytes of the input that come from the L2 cache."""

    @abstractmethod
    def blocks(self, images: int) -> int: ...

    def cycles(self, gpu: Gpu) -> float:
        layer, rates = self.layer, gpus.rates(gpu)
        blocks = self.blocks(layer.problem.batch)
        rounds, resident = occupancy(blocks, self.blocks_per_sm(gpu), gpu)
        size, kernel_rows = layer.operands.scalar_bytes, layer.rows.kernel
        pairs = self.channels * ceil_div(self.slots * self.area.lanes_y, 2)
        pairs = round_up(pairs, self.warps)  # counts idle warps too
        steps = (
            pairs
            * kernel_rows
            * self.area.lanes_x
            * self.toeplitz_blocks
            / 2
            * (2 * self.parts - 1)
        )
        products = steps * 2 * STRIP * MMA_COLUMNS * 2 * self.block
        reads = pairs * kernel_rows * self.parts * (4 * self.row_pairs + self.toeplitz_blocks)
        issued = self.loading + DIAGONAL * self.diagonals + self.storing
        outputs = self.channels * self.slots * self.area.outputs
        warps = resident * self.warps
        one_round = together(
            resident * products / rates.mma[self.multiplied] * MMA_LOSS,
            resident * (reads + self.other_reads),
            resident * issued / 32 * (1 + HALF_ISSUED / warps) / ISSUED,
            resident * self.read_bytes / rates.l2_bytes,
            resident * (2 + layer.operands.epilogue.residual) * outputs * size / rates.memory_bytes,
            loss=LOSS + LOSS_ALONE / resident,
        )
        return rounds * (START + one_round)

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {"channels": self.channels, "warps": self.warps}


@dataclass(frozen=True, kw_only=True)
class ToeplitzPlanes(ToeplitzTile):
    """A tile of contiguous tensors."""

    source = "depthwise/toeplitz/planes.cuh"

    @property
    def channels(self) -> int:
        return 1

    @property
    def results(self) -> int:
        return 0

    @lazy
    def vector(self) -> int:
        """The copy width for which Toeplitz matrices, which begin where copies do, are smallest."""
        size, vector = self.layer.operands.scalar_bytes, self.widest_copy
        found = [vector]
        while vector * size > 4:
            vector //= 2
            found.append(vector)
        return min(found, key=self._toeplitz_blocks)

    def blocks(self, images: int) -> int:
        layer = self.layer
        planes = ceil_div(images, self.slots) * layer.problem.groups * layer.group_out
        return planes * self.area.image_tiles

    @property
    def store_vector(self) -> int:
        return self.layer.operands.widest_vector(self.layer.out_size[1], 2)

    @property
    def _checked(self) -> int:
        """Blocks of columns that are checked for infinity and NaN."""
        return self._rows * 2 * self.row_pairs

    @property
    def loading(self) -> float:
        prepared = SPLIT if self.parts == 2 else CHECKED
        awaited = self.vector * self.layer.operands.scalar_bytes < 4
        copy = AWAITED_COPY if awaited else COPY
        return copy * self.slots * self.copied + prepared * self._checked

    @property
    def storing(self) -> float:
        pairs = round_up(ceil_div(self.slots * self.area.lanes_y, 2), self.warps)
        return STORE * pairs * 32 * 4 * self.area.lanes_x / self.store_vector

    @property
    def other_reads(self) -> float:
        return 2 * self.parts * self._checked / 8

    @property
    def read_bytes(self) -> int:
        return self.slots * self.copied * self.vector * self.layer.operands.scalar_bytes

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {"store_vector": self.store_vector}


# Instructions of the channels-last kernel, fitted to measurements on an H200: for a loaded pixel,
# for each of its numbers, for each that is split into TF32 parts, to stage a result, and to store a
# pixel, for which a block waits.
PIXEL, NUMBER, SPLIT_NUMBER, RESULT, STORED_PIXEL = 5, 0.5, 4.5, 8.5, 190


@dataclass(frozen=True, kw_only=True)
class ToeplitzPixels(ToeplitzTile):
    """A tile of channels-last tensors."""

    block_channels: int
    source = "depthwise/toeplitz/pixels.cuh"

    @property
    def channels(self) -> int:
        return self.block_channels

    @lazy
    def vector(self) -> int:
        return 1  # the kernel copies pixel by pixel

    @property
    def results(self) -> int:
        rows, columns = self.area.tile_size
        return self.slots * rows * (columns | 1) * self.channels

    def blocks(self, images: int) -> int:
        tiles = ceil_div(images, self.slots) * self.area.image_tiles
        return tiles * self.layer.problem.groups // self.channels

    @property
    def _pixels(self) -> int:
        """Pixels that are copied."""
        if self.area.inside:
            return self.slots * self.area.pixels_in_image
        return self.slots * self.area.halo_rows * 2 * self.row_pairs * self.block

    @property
    def loading(self) -> float:
        number = SPLIT_NUMBER if self.parts == 2 else NUMBER
        return self._pixels * (PIXEL + self.channels * number)

    @property
    def storing(self) -> float:
        pixels = self.slots * self.area.outputs
        return pixels * (STORED_PIXEL + RESULT * self.channels)

    @property
    def other_reads(self) -> float:
        """Cycles to write planes, and results with four-way bank conflicts."""
        outputs = self.channels * self.slots * self.area.outputs
        return self.parts * self.channels * self._pixels / 32 + 4 * outputs / 32

    @property
    def read_bytes(self) -> int:
        """Whole sectors: a block uses only part of each, the rest is other blocks' channels."""
        return self._pixels * 32


def tiles(layer: Layer, gpu: Gpu) -> Iterator[ToeplitzTile]:
    """Candidate tiles for a layer.

    Raises:
        Declined: these kernels do not take the layer.
    """
    _check(layer, gpu)
    strips = ceil_div(layer.out_size[0], STRIP)
    mmas = ceil_div(layer.out_size[1], MMA_COLUMNS)
    tiles_x = ceil_div(mmas, MOST_MMAS)
    lanes_x = ceil_div(mmas, tiles_x)
    for lanes_y in shares(strips, 1):
        area = Area(layer, STRIP, MMA_COLUMNS, lanes_y, lanes_x)
        whole = lanes_y == strips and tiles_x == 1
        for slots in (1, 2, 4, 8, 16) if whole else (1, 2):
            if slots == 1 or slots < 2 * layer.problem.batch:
                yield from _of_size(area, slots)


def _of_size(area: Area, slots: int) -> Iterator[ToeplitzTile]:
    layer, pairs = area.layer, ceil_div(slots * area.lanes_y, 2)
    if layer.operands.input_channels_last:
        widest = 16 // layer.operands.scalar_bytes
        for channels in (widest, widest // 2):
            if layer.problem.groups % channels == 0:
                yield ToeplitzPixels(
                    area=area, slots=slots, warps=MOST_WARPS, block_channels=channels
                )
        return
    for turns in (1, 2):
        tile = ToeplitzPlanes(area=area, slots=slots, warps=ceil_div(pairs, turns))
        at_once = ceil_div(tile.pitch, 32 * tile.vector)  # warps that copy a row at once
        if at_once > tile.warps:
            tile = replace(tile, warps=at_once)
        if tile.warps <= MOST_WARPS:
            yield tile


def _check(layer: Layer, gpu: Gpu) -> None:
    problem, operands = layer.problem, layer.operands
    if gpus.number(gpu) < FIRST_ARCHITECTURE:
        raise Declined("tensor cores before sm_80")
    if operands.scalar_bytes == 8:
        raise Declined("float64")
    if layer.is_volume:
        raise Declined("volumes")
    if layer.group_in > 1:
        raise Declined("groups of several channels")
    if max(*problem.stride, *problem.dilation) > 1:
        raise Declined("strides or dilation")
    fewest = FEWEST_PIXEL_COLUMNS if operands.input_channels_last else FEWEST_COLUMNS
    if layer.columns.kernel < fewest:
        raise Declined(f"kernels of less than {fewest} columns")
    if operands.input_channels_last and (layer.group_out > 1 or not operands.aligned):
        raise Declined("channels that are not whole vectors")
