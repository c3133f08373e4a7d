"""What a block computes at once in each memory layout, as far as all passes share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd, inf, lcm
from typing import TypeVar

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.depthwise.layer import Layer
from fastconv.kernels.family import Constant, Declined, Gpu
from fastconv.kernels.lazy import lazy

FAMILY = "depthwise"
WHY = "groups of few channels"

# Channels-last kernels whose weights for 16 lanes' channels take more bytes count as large: they
# get fewer lanes.
MOST_WEIGHT_BYTES = 32768
MOST_BLOCKS_PER_SM = 8
THREADS_PER_SM = 1536  # the least of the GPUs that are planned for
REGISTERS_PER_SM = 65536
RESERVED_BYTES = 1024  # shared memory that the system reserves for each block
BANK_BYTES = 128  # bytes that shared memory delivers in a cycle
KEPT_COPY = 8  # instructions of a thread to copy a vector whose place it keeps, see depth.cuh
MOST_PARTS = 16  # parts that a row may be copied in: each is code of its own
# Blocks that a GPU starts in a cycle, about: on an H200, 12.6 million of one warp took 7.6 ms.
STARTED = 1.0


@dataclass(frozen=True)
class Area:
    """A thread's outputs (or patch), and the threads of a tile, down and across.

    Its properties do not depend on a tile's channels.
    """

    layer: Layer
    rows: int
    columns: int
    lanes_y: int
    lanes_x: int

    @lazy
    def tile_size(self) -> tuple[int, int]:
        return self.lanes_y * self.rows, self.lanes_x * self.columns

    @lazy
    def outputs(self) -> int:
        return self.tile_size[0] * self.tile_size[1]

    @lazy
    def threads(self) -> int:
        return self.lanes_y * self.lanes_x

    @lazy
    def is_whole(self) -> bool:
        """Whether one tile covers an image."""
        rows, columns = self.layer.rows, self.layer.columns
        whole = (rows.threads(self.rows), columns.threads(self.columns))
        return (self.lanes_y, self.lanes_x) == whole

    @lazy
    def halo_rows(self) -> int:
        return self.layer.rows.halo(self.tile_size[0])

    @lazy
    def halo_columns(self) -> int:
        return self.layer.columns.halo(self.tile_size[1])

    @lazy
    def window_rows(self) -> int:
        return self.layer.rows.window(self.rows)

    @lazy
    def window_columns(self) -> int:
        return self.layer.columns.window(self.columns)

    @lazy
    def image_tiles(self) -> int:
        """Tiles that cover an image's outputs."""
        height, width = self.layer.out_size
        return ceil_div(height, self.tile_size[0]) * ceil_div(width, self.tile_size[1])

    @lazy
    def in_image(self) -> tuple[range, range]:
        """The halo's rows and columns that lie in the image, if one tile covers the image."""
        layer = self.layer
        height, width = layer.in_size
        return (
            range(max(0, -layer.rows.origin), min(self.halo_rows, height - layer.rows.origin)),
            range(
                max(0, -layer.columns.origin), min(self.halo_columns, width - layer.columns.origin)
            ),
        )

    @lazy
    def halo_pixels(self) -> int:
        return self.halo_rows * self.halo_columns

    @lazy
    def pixels_in_image(self) -> int:
        rows, columns = self.in_image
        return len(rows) * len(columns)

    @lazy
    def inside(self) -> bool:
        """Whether to copy only the part of the halo in the image, if the rest is no smaller.

        The rest is cleared once.
        """
        if self.image_tiles > 1:
            return False
        return 0 < 2 * self.pixels_in_image <= self.halo_pixels

    @lazy
    def thread_step(self) -> int:
        """Input columns from one thread's window to the next thread's, without dilation."""
        columns = self.layer.columns
        return self.columns * columns.times // columns.over


_Any = TypeVar("_Any", bound="Tile")


@dataclass(frozen=True, kw_only=True)
class Tile(ABC):
    """What a block computes at once: an area of ``slots`` planes or images."""

    area: Area
    slots: int

    @lazy
    def layer(self) -> Layer:
        return self.area.layer

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of a thread."""

    @property
    @abstractmethod
    def threads(self) -> int: ...

    @property
    @abstractmethod
    def shared_bytes(self) -> int: ...

    @property
    @abstractmethod
    def registers(self) -> int:
        """Registers of a thread, estimated."""

    @abstractmethod
    def cycles(self, gpu: Gpu) -> float:
        """Cycles that the whole layer takes, estimated."""

    def least_cycles(self, gpu: Gpu) -> float:
        """A quick lower bound on the cycles of every variant."""
        return 0.0

    def variants(self: _Any, gpu: Gpu, most: float) -> Iterable[_Any]:
        """Tiles that :meth:`least_cycles` bounds, without some that take more than ``most``."""
        return (self,)

    @property
    @abstractmethod
    def vector(self) -> int:
        """Elements of the input that are copied at once."""

    def constants(self) -> dict[str, Constant]:
        """Constants that the kernel is compiled with."""
        return {
            "rows": self.area.rows,
            "columns": self.area.columns,
            "lanes_y": self.area.lanes_y,
            "lanes_x": self.area.lanes_x,
            "slots": self.slots,
            "vector": self.vector,
            "inside": self.area.inside,
        }

    def blocks_per_sm(self, gpu: Gpu) -> int:
        """Blocks that fit an SM at once; 0 if none does."""
        fit = min(
            gpu.shared_bytes_per_sm // (self.shared_bytes + RESERVED_BYTES),
            THREADS_PER_SM // self.threads,
            REGISTERS_PER_SM // (self.threads * round_up(self.registers, 8)),
            MOST_BLOCKS_PER_SM,
        )
        return fit if self.shared_bytes <= gpu.shared_bytes_per_block else 0

    def fits(self, gpu: Gpu) -> bool:
        return self.blocks_per_sm(gpu) > 0


_Planes = TypeVar("_Planes", bound="PlanesTile")


@dataclass(frozen=True, kw_only=True)
class PlanesTile(Tile):
    """A tile of contiguous tensors: the layout of rows in shared memory, see ``plane_rows.cuh``."""

    row_padding: int = 0
    plane_padding: int = 0

    @property
    def plane(self) -> int:
        """Elements of a plane's halo tile in shared memory."""
        return self.area.halo_rows * self.pitch + self.plane_padding

    @property
    def slot_threads(self) -> int:
        return self.area.threads

    def fits(self, gpu: Gpu) -> bool:
        return self.parts_of_rows <= MOST_PARTS and super().fits(gpu)

    @property
    def parts_of_rows(self) -> int:
        """Parts in which a row is copied, each of no more vectors than a block has threads."""
        return ceil_div(self.pitch // self.vector, self.threads)

    @lazy
    def vector(self) -> int:
        return self.widest_copy

    @property
    def widest_copy(self) -> int:
        layer, columns = self.layer, self.layer.columns
        distances = [layer.in_size[1]]
        if self.area.tile_size[1] < layer.out_size[1]:
            distances.append(self.area.tile_size[1] * columns.times // columns.over)
        return layer.operands.widest_vector(*distances)

    @lazy
    def shift(self) -> int:
        return self.layer.columns.origin % self.vector

    @lazy
    def piece(self) -> int:
        """Elements of a window's row that a thread reads at once."""
        operands = self.layer.operands
        if self.layer.columns.dilation > 1:
            return 1
        return gcd(self.area.thread_step, operands.vector)

    @lazy
    def pieces(self) -> int:
        return ceil_div(self.shift % self.piece + self.area.window_columns, self.piece)

    @lazy
    def pitch(self) -> int:
        """Elements from one row to the next in shared memory; threads read no further than that."""
        last = (
            (self.area.lanes_x - 1) * self.area.thread_step
            if self.layer.columns.dilation == 1
            else 0
        )
        read = last + self.shift - self.shift % self.piece + self.pieces * self.piece
        whole = lcm(self.vector, self.piece)
        copied = round_up(self.shift + self.area.halo_columns, self.vector)
        return round_up(max(copied, read), whole) + self.row_padding

    @lazy
    def copied(self) -> int:
        """Vectors that are copied for a slot."""
        rows, columns = range(self.area.halo_rows), range(-self.shift, self.area.halo_columns)
        if self.area.inside:
            rows, columns = self.area.in_image
        first = (self.shift + columns.start) // self.vector
        return len(rows) * (ceil_div(self.shift + columns.stop, self.vector) - first)

    @property
    def window_cycles(self) -> int:
        """Cycles in which shared memory delivers a piece to each thread of a warp."""
        size = self.layer.operands.scalar_bytes
        return read_cycles(self.piece * size, self.area.thread_step * size)

    def spread_over_banks(self: _Planes, gpu: Gpu) -> _Planes:
        """The tile with rows and planes padded for the fewest bank conflicts."""
        tile = self
        step = lcm(self.vector, self.piece)
        paddings = range(step, BANK_BYTES // self.layer.operands.scalar_bytes, step)
        if self.area.lanes_y > 1:
            tile = tile._best((replace(tile, row_padding=n) for n in paddings), gpu)
        if self.slots > 1:
            tile = tile._best((replace(tile, plane_padding=n) for n in paddings), gpu)
        return tile

    def _best(self: _Planes, others: Iterable[_Planes], gpu: Gpu) -> _Planes:
        """The tile with the fewest bank conflicts: this one, or another of the same occupancy."""
        blocks = self.blocks_per_sm(gpu)
        fitting = [tile for tile in others if tile.blocks_per_sm(gpu) == blocks]
        return min([self, *fitting], key=PlanesTile._conflicts)

    def _conflicts(self) -> int:
        """Cycles in which a warp reads the first piece of each thread."""
        size = self.layer.operands.scalar_bytes
        at_once = min(32, BANK_BYTES // (self.piece * size))
        words = [{at // 4 for at in self._bytes_of(thread)} for thread in range(32)]
        cycles = 0
        for first in range(0, 32, at_once):
            banks: dict[int, set[int]] = {}
            for word in set().union(*words[first : first + at_once]):
                banks.setdefault(word % 32, set()).add(word)
            cycles += max(map(len, banks.values()))
        return cycles

    def _bytes_of(self, thread: int) -> range:
        rows, columns = self.layer.rows, self.layer.columns
        slot, place = divmod(thread % (self.slots * self.slot_threads), self.slot_threads)
        y, x = divmod(place, self.area.lanes_x)
        row = (y // rows.out_step * self.area.rows * rows.out_step + y % rows.out_step) * rows.times
        column = (
            x // columns.out_step * self.area.columns * columns.out_step + x % columns.out_step
        ) * columns.times
        size = self.layer.operands.scalar_bytes
        at = slot * self.plane + row // rows.over * self.pitch + column // columns.over
        return range(at * size, (at + self.piece) * size)

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {
            "piece": self.piece,
            "pitch": self.pitch,
            "plane_padding": self.plane_padding,
        }


@dataclass(frozen=True)
class Channels:
    """Channels of a tile of channels-last tensors: a block's lanes, and channels of each."""

    layer: Layer
    lanes: int
    of_lane: int

    @lazy
    def count(self) -> int:
        return self.lanes * self.of_lane

    @lazy
    def groups(self) -> int:
        return max(1, self.count // self.layer.group_out)

    @lazy
    def tiles(self) -> int:
        layer = self.layer
        parts = ceil_div(layer.group_out, self.count)
        return ceil_div(layer.problem.groups, self.groups) * parts

    @lazy
    def vector(self) -> int:
        layer = self.layer
        inputs = self.groups * layer.group_in
        return layer.operands.widest_vector(layer.problem.groups * layer.group_in, inputs)

    @lazy
    def pixel(self) -> int:
        """Elements of a pixel in shared memory."""
        return round_up(self.groups * self.layer.group_in, self.vector)


@dataclass(frozen=True, kw_only=True)
class PixelsTile(Tile):
    """A tile of channels-last tensors: its channels and pixels, see ``pixel_tiles.cuh``."""

    block: Channels

    @property
    def channels(self) -> int:
        return self.block.of_lane

    @property
    def vector(self) -> int:
        return self.block.vector

    @property
    def input_bytes(self) -> int:
        size = self.layer.operands.scalar_bytes
        return round_up(self.pixels * self.block.pixel * size, 16)

    @property
    def bank_conflicts(self) -> int:
        """Times that threads of a warp with different pixels hit the same bank in one read."""
        layer = self.layer
        between = self.area.thread_step
        if self.area.lanes_x == 1:
            between = self.area.rows * layer.rows.times // layer.rows.over * self.area.halo_columns
        distance = between * self.block.pixel * layer.operands.scalar_bytes
        return 2 if self.block.lanes <= 16 and distance % BANK_BYTES == 0 else 1

    @property
    def pixels(self) -> int:
        """Pixels that a tile reads, of all images."""
        return self.slots * self.area.halo_pixels

    @lazy
    def copied(self) -> int:
        """Vectors that are copied for a tile."""
        pixels = self.area.pixels_in_image if self.area.inside else self.area.halo_pixels
        return self.slots * pixels * self.block.pixel // self.vector

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {
            "lanes_c": self.block.lanes,
            "lane_channels": self.block.of_lane,
        }


def best(candidates: Iterable[_Any], gpu: Gpu) -> _Any:
    """The tile that takes the fewest cycles; of several, the first.

    Raises:
        Declined: no tile fits the GPU.
    """
    found: _Any | None = None
    least = (inf, 0)
    # Candidates are visited in the order of their lower bounds, so that most need no estimate.
    bounds = ((tile.least_cycles(gpu), i, tile) for i, tile in enumerate(candidates))
    for bound, i, alike in sorted(bounds):
        if bound > least[0]:
            break
        for tile in alike.variants(gpu, least[0]):
            if tile.fits(gpu) and (cycles := (tile.cycles(gpu), i)) < least:
                found, least = tile, cycles
    if found is None:
        raise Declined("a halo tile that does not fit shared memory")
    return found


def kept(vectors: int, threads: int, most: int) -> int:
    """Vectors of a plane that each thread keeps the places of, about: all of them, or none."""
    each = ceil_div(vectors, threads)
    return each if each <= most else 0


def occupancy(blocks: int, fit: int, gpu: Gpu) -> tuple[int, int]:
    """Waves of ``blocks`` blocks if ``fit`` fit an SM, and the blocks of an SM at once."""
    return ceil_div(blocks, fit * gpu.sm_count), min(fit, ceil_div(blocks, gpu.sm_count))


def read_cycles(width: int, distance: int) -> int:
    """Cycles in which a warp's threads read ``width`` bytes each, ``distance`` bytes apart."""
    at_once = min(32, BANK_BYTES // width)
    if distance % width:
        return 32 // at_once
    return 32 // at_once * gcd(distance // width, at_once)


def lane_channels(layer: Layer) -> int:
    """Channels of a lane: two of 16 bits, if they are neighbours in both tensors, or one."""
    operands, channels = layer.operands, layer.problem.groups * layer.group_out
    pairs = operands.scalar_bytes == 2 and operands.aligned and channels % 2 == 0
    return 2 if pairs and layer.group_in == layer.group_out == 1 else 1


def lanes_of_channels(layer: Layer, lane_channels: int) -> set[int]:
    """Numbers of lanes for a block's channels: whole groups, or parts of one.

    They are a warp's, or half of them; fewer where the kernel's weights are large.
    """
    channels = ceil_div(layer.problem.groups * layer.group_out, lane_channels)
    weight_bytes = layer.terms * lane_channels * layer.operands.scalar_bytes
    large = 16 * weight_bytes > MOST_WEIGHT_BYTES
    found = {min(most, channels) for most in ((16, 8, 4, 2) if large else (32, 16))}
    group = layer.group_out
    return {lanes if group > lanes else lanes // group * group for lanes in found}


def areas(layer: Layer, rows: int, columns: int) -> list[Area]:
    """Areas of ``rows`` x ``columns`` outputs a thread, for a whole image or equal parts of it."""
    whole_y, whole_x = layer.rows.threads(rows), layer.columns.threads(columns)
    return [
        Area(layer, rows, columns, lanes_y, lanes_x)
        for lanes_x in shares(whole_x, layer.columns.out_step)
        for lanes_y in shares(whole_y, layer.rows.out_step)
    ]


def shares(whole: int, step: int) -> Iterator[int]:
    """All of ``whole``, a half, a quarter and so on, rounded up to multiples of ``step``."""
    parts, share = 1, whole
    while share > step:
        yield share
        parts *= 2
        share = round_up(ceil_div(whole, parts), step)
    yield step
