"""Tiles of forward convolutions and input gradients with multiply-adds on plain CUDA cores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import gcd
from typing import TypeVar

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.depthwise.layer import Layer
from fastconv.kernels.depthwise.tiles import (
    BANK_BYTES,
    KEPT_COPY,
    STARTED,
    Area,
    Channels,
    PixelsTile,
    PlanesTile,
    Tile,
    areas,
    kept,
    lane_channels,
    lanes_of_channels,
    occupancy,
    shares,
)
from fastconv.kernels.family import Constant, Gpu
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together

MOST_THREADS = 256
MOST_KEPT = 10  # vectors of a plane that a thread keeps the places of, see depth.cuh
MOST_UNROLLED = 800  # products of a thread and a plane that are unrolled, see kernel.cuh
OTHER_REGISTERS = 32  # registers of a thread besides accumulators and a window's row

# Parameters of the cost model, fitted to measurements on an H200.
# Instructions that an SM issues in a cycle with many warps; with HALF_ISSUED warps it issues half.
ISSUED, HALF_ISSUED = 4.4, 4.2
# Instructions of a thread to copy a vector, to load a weight, for each output row that a row of the
# window may belong to, and to store a vector.
COPY, WEIGHT, OUTPUT_ROW, STORE = 40, 45, 3.7, 9
# The factor by which copies are slower than the L2 cache's rate, cycles for a stored byte, and the
# share of all other work that the longest does not hide.
L2_LOAD, STORED_SECTOR, LOSS = 2.0, 0.67, 0.1
SECTOR_BYTES = 32
# Cycles in which a walk's warps wait for its first planes, and for each other at every plane. Other
# blocks hide them.
FIRST_PLANES, NEXT_PLANE = 2000, 500
# What memory moves at least. A tile's rows that begin or end within a granule move all of it, and
# measured times of tiles of 16 to 512 bytes across follow that.
GRANULE_BYTES = 64


_Tile = TypeVar("_Tile", bound="FmaTile")


@dataclass(frozen=True, kw_only=True)
class FmaTile(Tile):
    """What a block computes at once with multiply-adds, and its estimated cost.

    Of volumes, it computes that for ``walk`` output planes, one after the other.
    """

    walk: int = 1

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Outputs that a block has room for."""

    @abstractmethod
    def blocks(self, images: int) -> int: ...

    @property
    @abstractmethod
    def weights(self) -> int:
        """Weights that a block loads one by one."""

    @property
    @abstractmethod
    def loads(self) -> tuple[float, float]:
        """A thread's instructions to load from shared memory, and a warp's cycles for them."""

    @property
    @abstractmethod
    def stores(self) -> int:
        """Store instructions of a thread."""

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes from one thread's store to the next thread's, at most a sector.

        A warp's store takes that many times STORED_SECTOR cycles.
        """

    @lazy
    def moved(self) -> float:
        """Elements moved from and to memory: outputs, about as many inputs, and residuals."""
        return (self.written * self.walk + self.loaded) * self.outputs

    def constants(self) -> dict[str, Constant]:
        walk: dict[str, Constant] = {"walk": self.walk} if self.layer.is_volume else {}
        return super().constants() | walk

    @property
    def written(self) -> int:
        """Tensors of the output's size that are moved: the output, and the residual."""
        return 1 + self.layer.operands.epilogue.residual

    @lazy
    def loaded(self) -> float:
        """Planes that are loaded for a walk; 1 of images."""
        return self.layer.planes.loaded(self.walk)

    @lazy
    def multiplied(self) -> float:
        """Pairs of a plane and a tap plane that are multiplied in a walk; 1 of images."""
        return self.walk * self.layer.tap_planes

    @lazy
    def ring(self) -> int:
        """Planes in shared memory; 1 of images."""
        planes = self.layer.planes
        return planes.read + (planes.advance if self.walk > 1 else 0)

    @property
    @abstractmethod
    def plane_copies(self) -> int:
        """Vectors of the input that a block copies for each plane."""

    @lazy
    def copies(self) -> float:
        """Vectors that a block copies."""
        return self.loaded * self.plane_copies

    @lazy
    def kept(self) -> int:
        """Vectors of an input channel's plane that each thread keeps the places of."""
        if not self.layer.is_volume:
            return 0
        return kept(self.plane_copies // self.passes, self.threads, MOST_KEPT)

    @property
    def passes(self) -> int:
        """Input channels that are copied one after the other."""
        return 1

    @lazy
    def unrolled(self) -> bool:
        """Whether the rows of a thread's window are unrolled."""
        layer = self.layer
        products = self.channels * self.area.rows * self.area.columns
        kernel = layer.rows.kernel * layer.columns.kernel
        return layer.is_volume and products * kernel <= MOST_UNROLLED

    @property
    def choosing(self) -> float:
        """Instructions of a thread to find the output rows that rows of its window belong to."""
        if self.unrolled:
            return 0
        return self.layer.group_in * self.area.window_rows * OUTPUT_ROW * self.area.rows

    @property
    def copying(self) -> float:
        """Instructions of all threads to copy."""
        if self.kept == 0:
            return COPY * self.copies
        return COPY * self.kept * self.threads + KEPT_COPY * self.copies

    def variants(self: _Tile, gpu: Gpu, most: float) -> Iterator[_Tile]:
        """The tile with walks of all planes of a volume, of half of them, and so on."""
        for walk in shares(self.layer.planes.walked, 1):
            yield self if walk == self.walk else replace(self, walk=walk)

    def in_granules(self, loaded: float, written: float) -> float:
        """Elements of so many planes, with the rest of granules where a tile's rows begin and end.

        ``loaded`` are planes of the input, ``written`` those of other tensors.
        """
        return (loaded + written) * self.outputs

    @lazy
    def registers(self) -> int:
        """Registers of a thread, estimated."""
        words = max(1, self.layer.operands.scalar_bytes // 4)
        accumulators = (
            self.channels * self.area.rows * self.area.columns * (1 + self.layer.two_level)
        )
        numbers = accumulators + self.area.window_columns * self.channels
        return min(255, words * numbers + 2 * self.kept + OTHER_REGISTERS)

    def least_cycles(self, gpu: Gpu) -> float:
        """The estimate without copies, as if all blocks of an SM ran at once."""
        layer, rates = self.layer, gpus.rates(gpu)
        if layer.is_volume:
            return self._least_of_walks(gpu)
        blocks = ceil_div(self.blocks(layer.problem.batch), gpu.sm_count)
        products = self.channels * self.area.rows * self.area.columns * layer.products
        rows = self.choosing
        loads, bank_cycles = self.loads
        stores = self.stores
        warps = self.threads / 32 * blocks
        least = together(
            (products + loads + rows + STORE * stores) * (warps + HALF_ISSUED) / ISSUED,
            32 * warps * products / rates.float32,
            warps * bank_cycles,
            warps * stores * self.stored_bytes * STORED_SECTOR,
            blocks * self.moved * layer.operands.scalar_bytes / rates.memory_bytes,
            loss=LOSS,
        )
        return max(least, self.blocks(layer.problem.batch) / STARTED)

    def _least_of_walks(self, gpu: Gpu) -> float:
        """The same for walks of any length: what all planes take, divided equally among SMs."""
        layer, rates = self.layer, gpus.rates(gpu)
        tiles = replace(self, walk=layer.planes.walked).blocks(layer.problem.batch)
        walks = layer.planes.walks(layer.planes.walked)
        planes = tiles / walks * layer.planes.out_size / gpu.sm_count
        accumulators = self.channels * self.area.rows * self.area.columns
        instructions, bank_cycles = self.loads
        pairs, loaded = layer.tap_planes, layer.planes.advance / layer.planes.over
        copies = loaded * self.plane_copies
        issued = accumulators * layer.products + (instructions + self.choosing) * pairs
        issued += STORE * self.stores + (KEPT_COPY if self.kept else COPY) * copies / self.threads
        warps = self.threads / 32 * planes
        size = layer.operands.scalar_bytes
        return together(
            issued * warps / ISSUED,
            32 * warps * accumulators * layer.products / rates.float32,
            warps * bank_cycles * pairs,
            warps * self.stores * self.stored_bytes * STORED_SECTOR,
            planes * copies * self.vector * size / rates.l2_bytes * L2_LOAD,
            planes * self.in_granules(loaded, self.written) * size / rates.memory_bytes,
            loss=LOSS,
        )

    def cycles(self, gpu: Gpu) -> float:
        layer, rates = self.layer, gpus.rates(gpu)
        blocks = self.blocks(layer.problem.batch)
        rounds, resident = occupancy(blocks, self.blocks_per_sm(gpu), gpu)
        accumulators = self.channels * self.area.rows * self.area.columns
        instructions, bank_cycles = self.loads
        walk, pairs = self.walk, self.multiplied
        moved = self.in_granules(self.loaded, self.written * walk)
        issued = (
            accumulators * layer.products * walk
            + instructions * pairs
            + self.choosing * pairs
            + (self.copying + WEIGHT * self.weights) / self.threads
            + STORE * self.stores * walk
        )
        warps = self.threads / 32 * resident
        size = layer.operands.scalar_bytes
        one_round = together(
            issued * (warps + HALF_ISSUED) / ISSUED,
            32 * warps * accumulators * layer.products * walk / rates.float32,
            warps * bank_cycles * pairs,
            warps * self.stores * self.stored_bytes * STORED_SECTOR * walk,
            resident * self.copies * self.vector * size / rates.l2_bytes * L2_LOAD,
            resident * moved * size / rates.memory_bytes,
            loss=LOSS,
        )
        if layer.is_volume:
            one_round += (FIRST_PLANES + walk * NEXT_PLANE) / resident
        return max(rounds * one_round, blocks / STARTED)


@dataclass(frozen=True, kw_only=True)
class Planes(PlanesTile, FmaTile):
    """A tile of contiguous tensors, see ``planes.cuh``."""

    source = "depthwise/fma/planes.cuh"

    thread_channels: int

    @property
    def channels(self) -> int:
        return self.thread_channels

    @property
    def parts(self) -> int:
        return ceil_div(self.layer.group_out, self.channels)

    @lazy
    def threads(self) -> int:
        return round_up(self.slots * self.slot_threads, 32)

    @property
    def outputs(self) -> int:
        return self.slots * self.channels * self.area.outputs

    def blocks(self, images: int) -> int:
        planes = images * self.layer.problem.groups * self.parts
        tiles = self.area.image_tiles * self.layer.planes.walks(self.walk)
        return ceil_div(planes, self.slots) * tiles

    def in_granules(self, loaded: float, written: float) -> float:
        layer, columns = self.layer, self.area.tile_size[1]
        if columns >= layer.out_size[1]:  # Whole rows follow one another in memory.
            return super().in_granules(loaded, written)
        read = columns * layer.columns.times // layer.columns.over
        loads = self._in_granules(self.shift + self.area.halo_columns, read, layer.in_size[1])
        stores = self._in_granules(columns, columns, layer.out_size[1])
        return self.outputs * (loaded * loads / max(1, read) + written * stores / columns)

    def _in_granules(self, elements: int, *distances: int) -> float:
        """Elements that memory moves for a row, if rows begin these distances apart."""
        granule = max(1, GRANULE_BYTES // self.layer.operands.scalar_bytes)
        return elements + granule - gcd(granule, *distances)

    @property
    def _weight_plane(self) -> int:
        kernel = self.layer.problem.kernel_size
        return self.channels * kernel[0] * round_up(kernel[1], 4)

    @property
    def weight_padding(self) -> int:
        """Elements between planes' weights, so that neighbouring planes use different banks."""
        return 4 if self.slots > 1 and self._weight_plane // 4 % 2 == 0 else 0

    @lazy
    def shared_bytes(self) -> int:
        layer, operands = self.layer, self.layer.operands
        weights = self.slots * (self._weight_plane + self.weight_padding) * operands.sum_bytes
        pixels = round_up(self.slots * self.plane * operands.scalar_bytes, 16)
        if layer.is_volume:
            planes = self.ring * pixels + layer.planes.kernel * round_up(weights, 16)
            return planes * layer.group_in
        return (pixels + round_up(weights, 16)) * min(2, layer.group_in)

    @property
    def plane_copies(self) -> int:
        return self.layer.group_in * self.slots * self.copied

    @property
    def passes(self) -> int:
        return self.layer.group_in

    @property
    def weights(self) -> int:
        layer = self.layer
        return layer.planes.kernel * layer.group_in * self.slots * self._weight_plane

    @lazy
    def loads(self) -> tuple[float, float]:
        layer, size = self.layer, self.layer.operands.scalar_bytes
        kernel, rows = layer.problem.kernel_size, layer.rows
        windows = layer.group_in * self.area.window_rows * self.pieces
        fours = self.channels * self.area.rows * kernel[0] / rows.over * ceil_div(kernel[1], 4)
        fours *= layer.group_in
        widened = windows * self.piece * (size == 2)
        slots = min(self.slots, ceil_div(32, self.slot_threads))  # planes of a warp
        cycles = windows * self.window_cycles + fours * ceil_div(slots, 8)
        return windows + widened + fours, cycles

    @lazy
    def store_vector(self) -> int:
        layer = self.layer
        if layer.columns.out_step > 1:
            return 1
        return layer.operands.widest_vector(layer.out_size[1], self.area.columns)

    @lazy
    def stores(self) -> int:
        return self.channels * self.area.rows * self.area.columns // self.store_vector

    @property
    def stored_bytes(self) -> int:
        size = self.layer.operands.scalar_bytes
        if self.layer.columns.out_step > 1:
            return size
        return max(self.store_vector * size, min(SECTOR_BYTES, self.area.columns * size))

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {
            "channels": self.channels,
            "weight_padding": self.weight_padding,
            "store_vector": self.store_vector,
        }


@dataclass(frozen=True, kw_only=True)
class Pixels(PixelsTile, FmaTile):
    """A tile of channels-last tensors, see ``pixels.cuh``."""

    source = "depthwise/fma/pixels.cuh"

    @lazy
    def threads(self) -> int:
        return round_up(self.slots * self.area.threads * self.block.lanes, 32)

    @property
    def outputs(self) -> int:
        return self.slots * self.block.count * self.area.outputs

    def blocks(self, images: int) -> int:
        tiles = self.area.image_tiles * self.layer.planes.walks(self.walk)
        return ceil_div(images, self.slots) * tiles * self.block.tiles

    @property
    def weight_vector(self) -> int:
        """Packed weights that are copied at once."""
        layer = self.layer
        outputs = (layer.problem.groups * layer.group_out, layer.group_out, self.block.count)
        if layer.group_out <= self.block.count:
            outputs = (outputs[0], self.block.count, self.block.count)
        return replace(layer.operands, aligned=True).widest_vector(*outputs)

    @lazy
    def shared_bytes(self) -> int:
        return self.ring * self.input_bytes + self._weights * self.layer.operands.scalar_bytes

    @property
    def plane_copies(self) -> int:
        return self.copied

    @lazy
    def copies(self) -> float:
        return super().copies + self._weights // self.weight_vector

    @property
    def _weights(self) -> int:
        return self.layer.terms * self.block.count

    @property
    def weights(self) -> int:
        return 0

    @lazy
    def loads(self) -> tuple[float, float]:
        layer, size = self.layer, self.layer.operands.scalar_bytes
        windows = layer.group_in * self.area.window_rows * self.area.window_columns
        taps = layer.terms // layer.planes.kernel * self.area.rows / layer.rows.over
        if self.unrolled:
            taps /= self.area.rows / layer.rows.over  # registers hold weights for all rows
        widened = self.channels * (windows + taps) * (size == 2)
        banks = max(1.0, self.channels * size * 32 / BANK_BYTES)
        return windows + taps + widened, (windows * self.bank_conflicts + taps) * banks

    @property
    def stores(self) -> int:
        return self.area.rows * self.area.columns * self.channels

    @property
    def stored_bytes(self) -> int:
        return self.channels * self.layer.operands.scalar_bytes

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {
            "weight_vector": self.weight_vector,
            "aligned_bias": self.layer.operands.aligned_bias,
        }


def planes(layer: Layer) -> Iterator[Planes]:
    """Candidate tiles for contiguous tensors."""
    areas_of = cache(partial(areas, layer))
    strided = max(layer.columns.times, layer.columns.over) > 1
    usual = (4,) if layer.operands.scalar_bytes > 2 else (8, 4) if strided else (8,)
    for columns in _columns(layer, usual):
        most = max(1, layer.most_accumulators // columns)
        channels = min(layer.group_out, most // layer.rows.over or 1)
        for rows in _rows(layer, most // channels):
            for area in areas_of(rows, columns):
                for slots in _slots(area, MOST_THREADS):
                    yield Planes(area=area, slots=slots, thread_channels=channels)


def pixels(layer: Layer) -> Iterator[Pixels]:
    """Candidate tiles for channels-last tensors."""
    channels = lane_channels(layer)
    room = layer.most_accumulators // channels
    areas_of = cache(partial(areas, layer))
    all_columns = _columns(layer, (16, 8, 4))
    for lanes_c, columns in product(lanes_of_channels(layer, channels), all_columns):
        if columns > room:
            continue
        block = Channels(layer, lanes_c, channels)
        for rows in _rows(layer, room // columns):
            for area in areas_of(rows, columns):
                for slots in _slots(area, MOST_THREADS // lanes_c):
                    yield Pixels(area=area, slots=slots, block=block)


def _columns(layer: Layer, usual: tuple[int, ...]) -> list[int]:
    """Columns of a thread, in whole strides; also fewer than usual where images are narrow."""
    axis, found = layer.columns, list(usual)
    width = ceil_div(axis.out_size, axis.over * axis.out_step)
    while found[-1] >= 2 * width:
        found.append(found[-1] // 2)
    return [columns * axis.over for columns in found]


def _rows(layer: Layer, most: int) -> Iterable[int]:
    """Rows of a thread: up to ``most``; with a fractional stride, one of each residue."""
    over = layer.rows.over
    if over > 1:
        return (over,)
    return range(1, min(max(most, 1), ceil_div(layer.out_size[0], layer.rows.out_step)) + 1)


def _slots(area: Area, most: int) -> Iterator[int]:
    """Planes or images of a block with at most ``most`` threads; several only of whole images."""
    if area.threads > most:
        return
    yield 1
    if not area.is_whole:
        return
    for eighths in (2, 4, 8):
        slots = eighths * most // 8 // area.threads
        if slots > 1:
            yield slots
