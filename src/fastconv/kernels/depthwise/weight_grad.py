"""Plans weight gradients of narrow groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.depthwise.layer import CHAIN, Layer
from fastconv.kernels.depthwise.tiles import (
    COPY,
    FAMILY,
    ISSUED,
    ISSUED_BY_WARP,
    WHY,
    PixelsTile,
    PlanesTile,
    Tile,
    lane_channels,
    lanes,
    lanes_of_channels,
)
from fastconv.kernels.direct import limits
from fastconv.kernels.family import (
    Constant,
    Declined,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    weight_grad_constants,
)
from fastconv.kernels.lazy import lazy
from fastconv.kernels.tensor.limits import together
from fastconv.problem import Problem

MOST_TAPS = 56  # sums of a thread, unless a kernel row has more
MOST_PATCH = 28  # pixels
MOST_WRITTEN = 1600  # products of a patch: they are written out
MOST_WARPS = 8
MOST_LANES = 512  # patches of a tile
ENOUGH_BLOCKS = 1024  # for every GPU
WORKSPACE_BYTES = 64 << 20
REDUCE_THREADS = 256
MOST_REDUCE_BLOCKS = 4096
OTHER_REGISTERS = 44  # of a thread, than sums, a patch and a window's row
UNIT, PATCH = 150, 60  # instructions, more for a unit and for a patch


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output``.

    Raises:
        Declined: the portable kernels have to do it.
    """
    layer = Layer.of(problem, operands, transposed=False)
    found = _pixels(layer) if operands.input_channels_last else _planes(layer)
    tiles = [tile for tile in found if tile.blocks_per_processor(gpu) > 0]
    if not tiles:
        raise Declined("a halo tile that does not fit shared memory")
    return _plan(min(tiles, key=lambda tile: tile.cycles(gpu)), gpu)


def _plan(tile: Planes | Pixels, gpu: Gpu) -> Plan:
    layer = tile.layer
    constants: dict[str, Constant] = {
        **weight_grad_constants(layer.problem, layer.operands),
        "transposed": False,
        **tile.constants(),
        "splits": tile.splits,
        "shared_bytes": tile.shared_bytes,
        "blocks_per_sm": tile.blocks_per_processor(gpu),
    }
    kernels = [Kernel(tile.source, entry, tuple(constants.items())) for entry in tile.entries]
    blocks = tile.blocks * tile.splits
    limits.require("blocks of a weight gradient", blocks)
    reducing = min(ceil_div(tile.sums, REDUCE_THREADS), MOST_REDUCE_BLOCKS)
    batch = layer.problem.batch
    launches = (
        Launch(
            kernels[0],
            (blocks, 1, 1),
            tile.threads,
            tile.shared_bytes,
            ("grad_output", "input", "scratch", batch),
        ),
        Launch(
            kernels[1],
            (reducing, 1, 1),
            REDUCE_THREADS,
            0,
            ("scratch", "output", "bias_grad"),
        ),
    )
    return Plan(launches, tile.workspace_bytes, FAMILY, WHY)


@dataclass(frozen=True, kw_only=True)
class Walk(Tile):
    """A patch of a thread, patches of a unit, and how a block's threads share them.

    ``slots`` are images of a unit, ``tap_rows`` kernel rows of a thread, ``tap_blocks`` blocks that
    share a kernel's.
    """

    tap_rows: int
    tap_blocks: int

    source = ""
    entries = ("weight_grad", "reduce")

    @property
    def patches(self) -> int:
        """Of a unit."""
        return self.slots * self.lanes_y * self.lanes_x

    @property
    def block_groups(self) -> int:
        """Of kernel rows, in a block."""
        return ceil_div(ceil_div(self.layer.rows.kernel, self.tap_rows), self.tap_blocks)

    @property
    def units(self) -> int:
        return ceil_div(self.layer.problem.batch, self.slots) * self.image_tiles

    @property
    def sums(self) -> int:
        """All weights, and the bias."""
        layer = self.layer
        outputs = layer.problem.groups * layer.group_out
        return outputs * (layer.terms + layer.operands.bias_grad)

    @lazy
    def splits(self) -> int:
        """So many that there is work for all processors, and no chain of products is long."""
        chain = self.units * self.rounds * self.rows * self.columns
        wanted = max(ceil_div(chain, CHAIN), ceil_div(ENOUGH_BLOCKS, self.blocks))
        room = max(1, WORKSPACE_BYTES // (self.sums * self.layer.operands.sum_bytes))
        return min(self.units, wanted, room)

    @property
    def workspace_bytes(self) -> int:
        return self.splits * self.sums * self.layer.operands.sum_bytes

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Patches of a thread, in a unit."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Of a split."""

    @property
    @abstractmethod
    def stage_bytes(self) -> int: ...

    @property
    @abstractmethod
    def end_bytes(self) -> int:
        """Of shared memory, to add up what threads have."""

    @property
    @abstractmethod
    def copies(self) -> int:
        """Vectors of a unit."""

    @property
    @abstractmethod
    def loads(self) -> int:
        """Instructions that read shared memory, for a patch."""

    @property
    def shared_bytes(self) -> int:
        return max(2 * self.stage_bytes, round_up(self.end_bytes, 16))

    @property
    def registers(self) -> int:
        words = max(1, self.layer.operands.scalar_bytes // 4)
        taps = self.tap_rows * self.layer.columns.kernel
        numbers = taps + self.rows * self.columns + self.window_columns
        return min(255, words * self.channels * numbers + OTHER_REGISTERS)

    def cycles(self, gpu: Gpu) -> float:
        """What the whole layer takes, estimated."""
        layer, rates = self.layer, gpus.rates(gpu)
        taps = self.tap_rows * layer.columns.kernel
        patch = self.channels * self.rows * self.columns * taps + self.loads + PATCH
        unit = self.rounds * patch + COPY * self.copies / self.threads + UNIT
        end = 10 * self.channels * taps
        blocks = self.blocks * self.splits
        at_once = self.blocks_per_processor(gpu) * gpu.processors
        rounds = ceil_div(blocks, at_once)
        resident = min(at_once, blocks) / gpu.processors
        units = ceil_div(self.units, self.splits)
        warps = self.threads / 32 * resident
        return rounds * together(
            warps * (units * unit + end) / min(ISSUED, ISSUED_BY_WARP * warps),
            resident * units * self.stage_bytes / rates.l2_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Planes(PlanesTile, Walk):
    """Of contiguous tensors, see ``weight_grad_planes.cuh``."""

    group_warps: int

    source = "depthwise/weight_grad_planes.cuh"

    @property
    def channels(self) -> int:
        return 1

    @property
    def rounds(self) -> int:
        return ceil_div(self.patches, 32 * self.group_warps)

    @property
    def threads(self) -> int:
        return 32 * self.group_warps * self.block_groups

    @property
    def blocks(self) -> int:
        layer = self.layer
        return layer.problem.groups * layer.group_out * layer.group_in * self.tap_blocks

    @lazy
    def grad_vector(self) -> int:
        layer = self.layer
        distances = [layer.out_size[1]]
        if self.tile_size[1] < layer.out_size[1]:
            distances.append(self.tile_size[1])
        return layer.operands.widest_vector(*distances)

    @property
    def grad_pitch(self) -> int:
        return round_up(self.tile_size[1], self.grad_vector)

    @property
    def stage_bytes(self) -> int:
        size = self.layer.operands.scalar_bytes
        pixels = self.slots * self.halo_rows * self.pitch * size
        grads = self.slots * self.tile_size[0] * self.grad_pitch * size
        return round_up(pixels, 16) + round_up(grads, 16)

    @property
    def end_bytes(self) -> int:
        sums = self.tap_rows * self.layer.columns.kernel + 1
        return self.threads // 32 * sums * self.layer.operands.sum_bytes

    @property
    def copies(self) -> int:
        grads = self.tile_size[0] * ceil_div(self.tile_size[1], self.grad_vector)
        return self.slots * (prod(self.copied) + grads)

    @property
    def loads(self) -> int:
        rows = (self.rows - 1) * self.layer.rows.step + self.tap_rows
        return rows * self.pieces + self.rows * self.columns

    def constants(self) -> dict[str, Constant]:
        return {
            "rows": self.rows,
            "columns": self.columns,
            "lanes_y": self.lanes_y,
            "lanes_x": self.lanes_x,
            "slots": self.slots,
            "tap_rows": self.tap_rows,
            "tap_blocks": self.tap_blocks,
            "group_warps": self.group_warps,
            "vector": self.vector,
            "grad_vector": self.grad_vector,
            "piece": self.piece,
            "pitch": self.pitch,
            "plane_padding": 0,
            "grad_pitch": self.grad_pitch,
        }


@dataclass(frozen=True, kw_only=True)
class Pixels(PixelsTile, Walk):
    """Of channels-last tensors, see ``weight_grad_pixels.cuh``."""

    group_patches: int

    source = "depthwise/weight_grad_pixels.cuh"

    @property
    def rounds(self) -> int:
        return ceil_div(self.patches, self.group_patches)

    @property
    def threads(self) -> int:
        return round_up(self.block_groups * self.group_patches * self.lanes_c, 32)

    @property
    def blocks(self) -> int:
        return self.channel_tiles * self.layer.group_in * self.tap_blocks

    @lazy
    def grad_vector(self) -> int:
        layer = self.layer
        distances = [layer.problem.groups * layer.group_out, self.tile_channels]
        if layer.group_out > self.tile_channels:
            distances.append(layer.group_out)
        return layer.operands.widest_vector(*distances)

    @property
    def _grads(self) -> int:
        """Pixels of the output's gradient."""
        return self.slots * prod(self.tile_size)

    @property
    def stage_bytes(self) -> int:
        grads = self._grads * round_up(self.tile_channels, self.grad_vector)
        return self.input_bytes + round_up(grads * self.layer.operands.scalar_bytes, 16)

    @property
    def end_bytes(self) -> int:
        sums = self.tap_rows * self.layer.columns.kernel + 1
        return self.block_groups * sums * self.tile_channels * self.layer.operands.sum_bytes

    @property
    def copies(self) -> int:
        grads = self._grads * ceil_div(self.tile_channels, self.grad_vector)
        return self.pixels * self.pixel // self.vector + grads

    @property
    def loads(self) -> int:
        rows = (self.rows - 1) * self.layer.rows.step + self.tap_rows
        loads = rows * self.window_columns + self.rows * self.columns
        return loads * (1 + self.channels * (self.layer.operands.scalar_bytes == 2))

    def constants(self) -> dict[str, Constant]:
        return {
            "rows": self.rows,
            "columns": self.columns,
            "lanes_y": self.lanes_y,
            "lanes_x": self.lanes_x,
            "slots": self.slots,
            "tap_rows": self.tap_rows,
            "tap_blocks": self.tap_blocks,
            "group_patches": self.group_patches,
            "lanes_c": self.lanes_c,
            "lane_channels": self.lane_channels,
            "vector": self.vector,
            "grad_vector": self.grad_vector,
        }


def _planes(layer: Layer) -> Iterator[Planes]:
    """All that may be worth it."""
    tap_rows = _tap_rows(layer, 1)
    for rows, columns in _patches(layer, tap_rows, 1):
        for lanes_y, lanes_x, slots in _units(layer, rows, columns):
            patches = slots * lanes_y * lanes_x
            groups = ceil_div(layer.rows.kernel, tap_rows)
            for tap_blocks in _tap_blocks(groups, MOST_WARPS):
                most = max(1, MOST_WARPS // ceil_div(groups, tap_blocks))
                most = min(most, ceil_div(patches, 32))
                for warps in {most, ceil_div(most, 2), 1}:
                    tile = Planes(
                        layer=layer, rows=rows, columns=columns, lanes_y=lanes_y, lanes_x=lanes_x,
                        slots=slots, tap_rows=tap_rows, tap_blocks=tap_blocks, group_warps=warps,
                    )  # fmt: skip
                    widest = max(tile.pitch // tile.vector, tile.grad_pitch // tile.grad_vector)
                    if widest <= tile.threads:  # a row is copied at once
                        yield tile


def _pixels(layer: Layer) -> Iterator[Pixels]:
    """All that may be worth it."""
    channels = lane_channels(layer) if 2 * layer.columns.kernel <= MOST_TAPS else 1
    lanes_c = lanes_of_channels(layer, channels)
    tap_rows = _tap_rows(layer, channels)
    most_threads = 32 * MOST_WARPS // lanes_c
    for rows, columns in _patches(layer, tap_rows, channels):
        for lanes_y, lanes_x, slots in _units(layer, rows, columns):
            patches = slots * lanes_y * lanes_x
            groups = ceil_div(layer.rows.kernel, tap_rows)
            for tap_blocks in _tap_blocks(groups, most_threads):
                most = max(1, most_threads // ceil_div(groups, tap_blocks))
                for at_once in {min(most, patches), ceil_div(min(most, patches), 2)}:
                    yield Pixels(
                        layer=layer, rows=rows, columns=columns, lanes_y=lanes_y, lanes_x=lanes_x,
                        slots=slots, tap_rows=tap_rows, tap_blocks=tap_blocks,
                        group_patches=at_once, lanes_c=lanes_c, lane_channels=channels,
                    )  # fmt: skip


def _tap_rows(layer: Layer, channels: int) -> int:
    """Kernel rows of a thread: all, or an equal share that it has registers for."""
    most = MOST_TAPS // (1 + (layer.operands.scalar_bytes == 8))
    rows = max(1, most // (channels * layer.columns.kernel))
    return ceil_div(layer.rows.kernel, ceil_div(layer.rows.kernel, rows))


def _tap_blocks(groups: int, most: int) -> Iterator[int]:
    """Blocks that share a kernel's rows: as few as have room, or twice as many."""
    fewest = ceil_div(groups, most)
    yield fewest
    if 2 * fewest <= groups:
        yield 2 * fewest


def _patches(layer: Layer, tap_rows: int, channels: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of a thread's pixels."""
    height, width = layer.out_size
    most = MOST_PATCH // (channels * (1 + (layer.operands.scalar_bytes == 8)))
    taps = channels * tap_rows * layer.columns.kernel
    for columns in {min(width, n) for n in (4, 7, 8)}:
        for rows in (1, 2, 4, 7):
            if rows > height or rows * columns > most:
                continue
            if rows * columns * taps <= MOST_WRITTEN or rows * columns <= 4:
                yield rows, columns


def _units(layer: Layer, rows: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """Lanes of a unit's tile, and images."""
    whole = (layer.rows.threads(rows), layer.columns.threads(columns))
    for lanes_y, lanes_x in lanes(layer, rows, columns, MOST_LANES):
        yield lanes_y, lanes_x, 1
        if (lanes_y, lanes_x) == whole:
            for slots in (2, 4, 8, 32):
                if slots * lanes_y * lanes_x <= 256 and slots < 2 * layer.problem.batch:
                    yield lanes_y, lanes_x, slots
