"""Plans weight gradients of narrow groups on plain CUDA cores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import gcd, inf, lcm
from typing import TypeVar

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.depthwise.layer import CHAIN, Layer, require
from fastconv.kernels.depthwise.rows import plan as one_row
from fastconv.kernels.depthwise.tiles import (
    FAMILY,
    KEPT_COPY,
    RESERVED_BYTES,
    WHY,
    Area,
    Channels,
    PixelsTile,
    PlanesTile,
    Tile,
    areas,
    best,
    kept,
    lane_channels,
    lanes_of_channels,
    occupancy,
    read_cycles,
)
from fastconv.kernels.family import (
    Constant,
    Gpu,
    Kernel,
    Launch,
    Operands,
    Plan,
    depth_constants,
    weight_grad_constants,
)
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.limits import together
from fastconv.problem import Problem

# A thread's accumulators, with one channel and with two, unless a single kernel row has more.
MOST_TAPS, MOST_PAIRED_TAPS = 56, 98
MOST_PATCH = 28  # pixels of a patch
MOST_WRITTEN = 1600  # products of a patch: the code unrolls all of them
MOST_KEPT = 6  # vectors of a plane that a thread keeps the places of, see depth.cuh
MOST_WARPS = 8
MOST_LANES = 512  # patches of a tile
FEWEST_ACROSS = 8  # patches across a tile of contiguous tensors, if an image has as many
WORKSPACE_BYTES = 64 << 20
REDUCE_THREADS = 256
MOST_REDUCE_ROWS = 8
OTHER_REGISTERS = 44  # registers of a thread besides accumulators, a patch and a window's row

# Parameters of the cost model, fitted to measurements on an H200.
ISSUED, ISSUED_BY_WARP = 2.9, 0.36  # most instructions issued in a cycle, by an SM and by a warp
# Instructions of a thread to copy a vector; beyond copies and products, for a unit and for a patch;
# and for an accumulator in the end.
COPY, UNIT, PATCH, END = 20, 230, 25, 4
# Cycles until a wave of blocks has its first copies, for a turn of the reduction within a block,
# and to reduce 8 splits.
START, TURN, REDUCE = 4000, 600, 1100

ENTRIES = ("weight_grad", "reduce")  # the kernels that a plan launches


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output``.

    Raises:
        Declined: this family does not take the layer.
    """
    layer = Layer.of_weight_grad(problem, operands)
    if one_row.takes(layer):
        return one_row.weight_grad(layer, gpu)
    if operands.input_channels_last:
        return _plan(best(_pixels(layer), gpu), gpu)
    return _plan(best(_planes(layer), gpu).spread_over_banks(gpu), gpu)


def _plan(tile: Planes | Pixels, gpu: Gpu) -> Plan:
    layer = tile.layer
    cycles, splits = tile.best_splits(gpu)
    rows = _reduce_rows(splits)
    constants: dict[str, Constant] = {
        **weight_grad_constants(layer.problem, layer.operands),
        **depth_constants(layer.problem, layer.operands),
        "transposed": False,
        **tile.constants(),
        "splits": splits,
        "reduce_threads": REDUCE_THREADS,
        "reduce_rows": rows,
        "shared_bytes": tile.shared_bytes,
        "blocks_per_sm": tile.blocks_per_sm(gpu),
    }
    kernels = [Kernel(tile.source, entry, tuple(constants.items())) for entry in ENTRIES]
    blocks = tile.blocks * splits
    require("blocks of a weight gradient", blocks)
    require("weights and biases", tile.entries)
    require("tiles of all images", tile.units)
    reducing = ceil_div(tile.entries, REDUCE_THREADS // rows)
    sum_bytes = layer.operands.sum_bytes
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
            REDUCE_THREADS * sum_bytes if rows > 1 else 0,
            ("scratch", "output", "bias_grad"),
        ),
    )
    return Plan(launches, splits * tile.entries * sum_bytes, FAMILY, WHY, cycles=cycles)


def _reduce_rows(splits: int) -> int:
    """Threads that divide a weight's splits among themselves in the reduction."""
    return MOST_REDUCE_ROWS if splits > MOST_REDUCE_ROWS else 1


@dataclass(frozen=True)
class Taps:
    """How taps and channels are divided: a thread's kernel rows, blocks that divide a kernel's rows
    among themselves, and a block's lanes, of some channels each.

    Of volumes, ``rows`` are those of whole planes of the kernel, or of a part of one.

    Its properties are the same for all patches.
    """

    layer: Layer
    rows: int
    blocks: int
    lanes: int = 1
    channels: int = 1

    @lazy
    def count(self) -> int:
        return self.rows * self.layer.columns.kernel

    @lazy
    def planes(self) -> int:
        """Kernel planes of a thread; 1 of images."""
        return max(1, self.rows // self.layer.rows.kernel)

    @lazy
    def plane_rows(self) -> int:
        """Kernel rows of a thread in each of its planes."""
        return self.rows // self.planes

    @lazy
    def block_groups(self) -> int:
        """Tap groups (kernel rows of a thread) in a block."""
        return ceil_div(_tap_groups(self.layer, self.rows), self.blocks)

    @lazy
    def threads(self) -> int:
        """Threads of a block that read the same patch."""
        return self.block_groups * self.lanes

    @lazy
    def accumulators(self) -> int:
        """Accumulators of a thread, and its products for each pixel of a patch."""
        return self.channels * self.count


_WgradTile = TypeVar("_WgradTile", bound="WgradTile")


@dataclass(frozen=True, kw_only=True)
class WgradTile(Tile):
    """A thread's patch, a unit's patches, and how a block's threads divide them.

    ``slots`` are images of a unit.
    """

    taps: Taps

    source = ""

    @property
    def patches(self) -> int:
        """Patches of a unit."""
        return self.slots * self.area.threads

    @lazy
    def units(self) -> int:
        planes = self.layer.planes
        tiles = self.area.image_tiles * planes.walks(planes.walked) * planes.walked
        return ceil_div(self.layer.problem.batch, self.slots) * tiles

    @lazy
    def ring(self) -> int:
        """Planes of the input that are loaded at once; one in each of two stages, of images."""
        return self.layer.planes.read + self.layer.planes.advance

    @lazy
    def loaded(self) -> float:
        """Planes of the input that are loaded for a unit, on average; 1 of images."""
        planes = self.layer.planes
        return planes.loaded(planes.walked) / planes.walked

    @lazy
    def stage_bytes(self) -> int:
        """Bytes of a stage of images."""
        return self.plane_bytes + self.grad_bytes

    @lazy
    def unit_bytes(self) -> float:
        """Bytes that are copied for a unit."""
        return self.loaded * self.plane_bytes + self.grad_bytes

    @lazy
    def entries(self) -> int:
        """Entries of a split in the workspace: all weights and biases."""
        layer = self.layer
        outputs = layer.problem.groups * layer.group_out
        return outputs * (layer.terms + layer.operands.bias_grad)

    def _splits(self, fit: int, gpu: Gpu) -> set[int]:
        """Numbers of splits to try: few that keep accumulation short, more that fill all SMs."""
        chain = self.units * self.rounds * self.area.rows * self.area.columns
        room = max(1, WORKSPACE_BYTES // (self.entries * self.layer.operands.sum_bytes))
        most = min(self.units, room)
        least = min(most, ceil_div(chain, CHAIN))
        filling = (rounds * fit * gpu.sm_count // self.blocks for rounds in (1, 2, 4, 8))
        return {least, *(min(most, max(least, splits)) for splits in filling)}

    @abstractmethod
    def teams(self: _WgradTile) -> Iterator[_WgradTile]:
        """The tile with all of its threads, and with half of them, rounded up."""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Patches of a thread in a unit."""

    @property
    @abstractmethod
    def turns(self) -> int:
        """Turns in which a block's threads add up their accumulators."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Blocks of a split."""

    @property
    @abstractmethod
    def plane_bytes(self) -> int:
        """Bytes of the input in a stage, or of one of its planes."""

    @property
    @abstractmethod
    def grad_bytes(self) -> int:
        """Bytes of the output's gradient in a stage."""

    @property
    @abstractmethod
    def end_bytes(self) -> int:
        """Shared memory that the reduction of a block's accumulators takes."""

    @lazy
    def copies(self) -> float:
        """Vectors that are copied for a unit."""
        inputs, grads = self.copied_of
        return self.loaded * inputs + grads

    @property
    @abstractmethod
    def grad_vector(self) -> int:
        """Elements of the output's gradient that are copied at once."""

    @property
    @abstractmethod
    def loads(self) -> tuple[float, float]:
        """Instructions of a thread to load a patch from shared memory, and cycles of a warp."""

    @lazy
    def staged_bytes(self) -> int:
        """Shared memory of what is copied: two stages, or of volumes the ring and two gradients."""
        return self.ring * self.plane_bytes + 2 * self.grad_bytes

    @lazy
    def shared_bytes(self) -> int:
        return max(self.staged_bytes, round_up(self.end_bytes, 16))

    @lazy
    def registers(self) -> int:
        words = max(1, self.layer.operands.scalar_bytes // 4)
        numbers = self.taps.count + self.area.rows * self.area.columns + self.area.window_columns
        return min(255, words * self.channels * numbers + 2 * self.kept + OTHER_REGISTERS)

    @lazy
    def kept(self) -> int:
        """Vectors of the planes of a walk that each thread keeps the places of."""
        if not self.layer.is_volume:
            return 0
        return sum(kept(vectors, self.threads, MOST_KEPT) for vectors in self.copied_of)

    @property
    def _least_copying(self) -> float:
        return (KEPT_COPY if self.layer.is_volume else COPY) * self.copies

    @property
    def copying(self) -> float:
        """Instructions of all threads to copy a unit."""
        if not self.layer.is_volume:
            return COPY * self.copies
        counts = zip(self.copied_of, (self.loaded, 1), strict=True)
        return sum(
            (KEPT_COPY if kept(vectors, self.threads, MOST_KEPT) else COPY) * vectors * planes
            for vectors, planes in counts
        )

    @property
    @abstractmethod
    def copied_of(self) -> tuple[int, int]:
        """Vectors of a plane of the input, and of the output's gradient."""

    def least_cycles(self, gpu: Gpu) -> float:
        """A lower bound for all teams: half of the threads, none of them idle."""
        return self._least(self.threads / 2, self.taps.threads * self.patches, self.turns / 2, gpu)

    def variants(self: _WgradTile, gpu: Gpu, most: float) -> Iterator[_WgradTile]:
        for tile in self.teams():
            if tile._least(tile.threads, tile.threads * tile.rounds, tile.turns, gpu) <= most:
                yield tile

    def _least(self, threads: float, in_rounds: int, turns: float, gpu: Gpu) -> float:
        """A lower bound for ``threads`` threads, ``in_rounds`` patches of threads, and ``turns``.

        It adds up what ``_cycles`` does, but divides units and blocks equally: rounding up, more
        splits than one, and writing them only add to it. And it lets as many warps issue as shared
        memory has room for: other limits only leave fewer.
        """
        fit = gpu.shared_bytes_per_sm // (self.staged_bytes + RESERVED_BYTES)
        if fit == 0:
            return inf
        instructions, bank_cycles = self._patch
        issued = in_rounds * instructions + self._least_copying + threads * UNIT
        blocks = self.blocks / gpu.sm_count
        units = blocks * self.units
        one_round = together(
            (units * issued + blocks * threads * END * self.taps.accumulators)
            / (32 * min(ISSUED, ISSUED_BY_WARP * self.threads / 32 * fit)),
            units * in_rounds / 32 * bank_cycles,
            units * self.unit_bytes / gpus.rates(gpu).l2_bytes,
        )
        return START + TURN * turns + one_round + REDUCE

    def cycles(self, gpu: Gpu) -> float:
        return self.best_splits(gpu)[0]

    def best_splits(self, gpu: Gpu) -> tuple[float, int]:
        """The fewest cycles, and the number of splits that takes them."""
        fit = self.blocks_per_sm(gpu)
        return min((self._cycles(splits, fit, gpu), splits) for splits in self._splits(fit, gpu))

    def _cycles(self, splits: int, fit: int, gpu: Gpu) -> float:
        """Cycles with ``splits`` splits, if ``fit`` blocks fit an SM."""
        rates, size = gpus.rates(gpu), self.layer.operands.sum_bytes
        issued, bank_cycles = self._unit
        rounds, resident = occupancy(self.blocks * splits, fit, gpu)
        units = ceil_div(self.units, splits)
        warps = self.threads / 32 * resident
        one_round = together(
            warps
            * (units * issued + END * self.taps.accumulators)
            / min(ISSUED, ISSUED_BY_WARP * warps),
            warps * units * bank_cycles,
            resident * units * self.unit_bytes / rates.l2_bytes,
        )
        written = splits * self.entries * size / gpu.sm_count / rates.l2_bytes
        added_up = ceil_div(splits, _reduce_rows(splits))
        start = START + TURN * self.turns
        return rounds * (start + one_round) + written + REDUCE * ceil_div(added_up, 8)

    @lazy
    def _unit(self) -> tuple[float, float]:
        """Instructions of a thread for a unit, and cycles of shared memory."""
        instructions, bank_cycles = self._patch
        copies = self.copying / self.threads
        return self.rounds * instructions + copies + UNIT, self.rounds * bank_cycles

    @lazy
    def _patch(self) -> tuple[float, float]:
        """Instructions of a thread for a patch, without copies, and cycles of shared memory."""
        loads, bank_cycles = self.loads
        products = self.area.rows * self.area.columns * self.taps.accumulators
        return products + loads + PATCH, bank_cycles

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {
            **({"tap_planes": self.taps.planes} if self.layer.is_volume else {}),
            "tap_rows": self.taps.plane_rows,
            "tap_blocks": self.taps.blocks,
            "grad_vector": self.grad_vector,
        }


@dataclass(frozen=True, kw_only=True)
class Planes(PlanesTile, WgradTile):
    """A tile of contiguous tensors, see ``wgrad/planes.cuh``."""

    group_warps: int

    source = "depthwise/wgrad/planes.cuh"

    @property
    def channels(self) -> int:
        return 1

    @property
    def parts_of_rows(self) -> int:
        grads = ceil_div(self.grad_pitch // self.grad_vector, self.threads)
        return max(grads, super().parts_of_rows)

    def teams(self) -> Iterator[Planes]:
        for warps in {self.group_warps, ceil_div(self.group_warps, 2)}:
            yield self if warps == self.group_warps else replace(self, group_warps=warps)

    @lazy
    def rounds(self) -> int:
        return ceil_div(self.patches, 32 * self.group_warps)

    @property
    def turns(self) -> int:
        return 1

    @lazy
    def threads(self) -> int:
        return 32 * self.group_warps * self.taps.threads

    @lazy
    def blocks(self) -> int:
        layer = self.layer
        return layer.problem.groups * layer.group_out * layer.group_in * self.taps.blocks

    @lazy
    def grad_vector(self) -> int:
        layer = self.layer
        distances = [layer.out_size[1]]
        if self.area.tile_size[1] < layer.out_size[1]:
            distances.append(self.area.tile_size[1])
        return layer.operands.widest_vector(*distances)

    @property
    def grad_piece(self) -> int:
        """Pixels of a patch's row that are read at once."""
        layer = self.layer
        return 1 if layer.columns.out_step > 1 else gcd(self.area.columns, layer.operands.vector)

    @property
    def grad_pitch(self) -> int:
        return round_up(self.area.tile_size[1], lcm(self.grad_vector, self.grad_piece))

    @lazy
    def plane_bytes(self) -> int:
        return round_up(self.slots * self.plane * self.layer.operands.scalar_bytes, 16)

    @lazy
    def grad_bytes(self) -> int:
        pixels = self.slots * self.area.tile_size[0] * self.grad_pitch
        return round_up(pixels * self.layer.operands.scalar_bytes, 16)

    @property
    def end_bytes(self) -> int:
        return self.threads // 32 * (self.taps.count + 1) * self.layer.operands.sum_bytes

    @lazy
    def copied_of(self) -> tuple[int, int]:
        grads = self.area.tile_size[0] * ceil_div(self.area.tile_size[1], self.grad_vector)
        return self.slots * self.copied, self.slots * grads

    @lazy
    def loads(self) -> tuple[float, float]:
        size = self.layer.operands.scalar_bytes
        rows = (self.area.rows - 1) * self.layer.rows.step + self.taps.plane_rows
        rows *= self.taps.planes
        windows, grads = rows * self.pieces, self.area.rows * self.area.columns // self.grad_piece
        widened = (windows * self.piece + self.area.rows * self.area.columns) * (size == 2)
        grad_cycles = read_cycles(self.grad_piece * size, self.area.columns * size)
        cycles = windows * self.window_cycles + grads * grad_cycles
        return windows + grads + widened, cycles

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {
            "group_warps": self.group_warps,
            "grad_piece": self.grad_piece,
            "grad_pitch": self.grad_pitch,
            "channels_last": False,
        }


@dataclass(frozen=True)
class GradChannels(Channels):
    """Channels of a tile, and the layout of a pixel of the output's gradient."""

    @lazy
    def grad_vector(self) -> int:
        layer = self.layer
        distances = [layer.problem.groups * layer.group_out, self.count]
        if layer.group_out > self.count:
            distances.append(layer.group_out)
        return layer.operands.widest_vector(*distances)

    @lazy
    def grad_vectors(self) -> int:
        """Vectors of a pixel."""
        return ceil_div(self.count, self.grad_vector)

    @lazy
    def load(self) -> tuple[int, int]:
        """A lane's instructions to load a pixel from shared memory, and a warp's cycles for it."""
        size = self.layer.operands.scalar_bytes
        width = self.of_lane * size
        return 1 + self.of_lane * (size == 2), read_cycles(width, width)


@dataclass(frozen=True, kw_only=True)
class Pixels(PixelsTile, WgradTile):
    """A tile of channels-last tensors, see ``wgrad/pixels.cuh``."""

    block: GradChannels
    group_patches: int

    source = "depthwise/wgrad/pixels.cuh"

    def teams(self) -> Iterator[Pixels]:
        for patches in {self.group_patches, ceil_div(self.group_patches, 2)}:
            yield self if patches == self.group_patches else replace(self, group_patches=patches)

    @lazy
    def rounds(self) -> int:
        return ceil_div(self.patches, self.group_patches)

    @property
    def turns(self) -> int:
        return self.group_patches

    @lazy
    def threads(self) -> int:
        return round_up(self.group_patches * self.taps.threads, 32)

    @lazy
    def blocks(self) -> int:
        return self.block.tiles * self.layer.group_in * self.taps.blocks

    @property
    def grad_vector(self) -> int:
        return self.block.grad_vector

    @property
    def _grads(self) -> int:
        """Pixels of the output's gradient."""
        return self.slots * self.area.outputs

    @property
    def plane_bytes(self) -> int:
        return self.input_bytes

    @lazy
    def grad_bytes(self) -> int:
        grads = self._grads * self.block.grad_vectors * self.block.grad_vector
        return round_up(grads * self.layer.operands.scalar_bytes, 16)

    @property
    def end_bytes(self) -> int:
        values = self.taps.block_groups * (self.taps.count + 1) * self.block.count
        return values * self.layer.operands.sum_bytes

    @lazy
    def copied_of(self) -> tuple[int, int]:
        return self.copied, self._grads * self.block.grad_vectors

    @lazy
    def loads(self) -> tuple[float, float]:
        rows = (self.area.rows - 1) * self.layer.rows.step + self.taps.plane_rows
        rows *= self.taps.planes
        loads = rows * self.area.window_columns + self.area.rows * self.area.columns
        instructions, cycles = self.block.load
        return loads * instructions, loads * cycles * self.bank_conflicts

    def constants(self) -> dict[str, Constant]:
        return super().constants() | {
            "group_patches": self.group_patches,
            "channels_last": True,
        }


def _planes(layer: Layer) -> Iterator[Planes]:
    """Candidate tiles for contiguous tensors."""
    tap_rows = _tap_rows(layer, 1, MOST_TAPS)
    tap_blocks, most_warps = _tap_blocks(layer, tap_rows, MOST_WARPS)
    taps = Taps(layer, tap_rows, tap_blocks)
    for rows, columns in _patches(layer, tap_rows, 1):
        for area, slots in _units(layer, rows, columns):
            warps = min(most_warps, ceil_div(slots * area.threads, 32))
            yield Planes(area=area, slots=slots, taps=taps, group_warps=warps)


def _pixels(layer: Layer) -> Iterator[Pixels]:
    """Candidate tiles for channels-last tensors."""
    units_of = cache(partial(_units, layer))
    for channels, tap_rows, lanes_c in _lane_shares(layer):
        block = GradChannels(layer, lanes_c, channels)
        tap_blocks, room = _tap_blocks(layer, tap_rows, 32 * MOST_WARPS // lanes_c)
        taps = Taps(layer, tap_rows, tap_blocks, lanes_c, channels)
        for rows, columns in _patches(layer, tap_rows, channels):
            for area, slots in units_of(rows, columns):
                patches = min(room, slots * area.threads)
                yield Pixels(area=area, slots=slots, taps=taps, group_patches=patches, block=block)


def _lane_shares(layer: Layer) -> set[tuple[int, int, int]]:
    """Candidates for a thread's channels, its kernel rows, and the lanes of a block's channels."""
    found = set()
    pairs = lane_channels(layer)
    for channels, most_taps in {(pairs, MOST_TAPS), (pairs, MOST_PAIRED_TAPS), (1, MOST_TAPS)}:
        if channels * layer.columns.kernel <= most_taps or channels == 1:
            for lanes_c in lanes_of_channels(layer, channels):
                found.add((channels, _tap_rows(layer, channels, most_taps), lanes_c))
    return found


def _tap_rows(layer: Layer, channels: int, most_taps: int) -> int:
    """Kernel rows of a thread: all, or equal parts that it has registers for.

    Of volumes, these are the rows of all planes, of some, or some rows of one.
    """
    most = most_taps // (1 + (layer.operands.scalar_bytes == 8))
    rows, planes = max(1, most // (channels * layer.columns.kernel)), layer.planes.kernel
    if rows < layer.rows.kernel or planes == 1:
        return ceil_div(layer.rows.kernel, ceil_div(layer.rows.kernel, rows))
    return ceil_div(planes, ceil_div(planes, rows // layer.rows.kernel)) * layer.rows.kernel


def _tap_groups(layer: Layer, tap_rows: int) -> int:
    """Parts of a kernel, if a thread has so many of its rows."""
    if tap_rows <= layer.rows.kernel:
        return layer.planes.kernel * ceil_div(layer.rows.kernel, tap_rows)
    return ceil_div(layer.planes.kernel, tap_rows // layer.rows.kernel)


def _tap_blocks(layer: Layer, tap_rows: int, most: int) -> tuple[int, int]:
    """The fewest blocks to divide a kernel's rows among, if ``most`` tap groups fit a block.

    The second number is how often a block's tap groups fit then.
    """
    groups = _tap_groups(layer, tap_rows)
    blocks = ceil_div(groups, most)
    return blocks, most // ceil_div(groups, blocks)


def _patches(layer: Layer, tap_rows: int, channels: int) -> Iterator[tuple[int, int]]:
    """Candidates for the rows and columns of a patch."""
    height, width = layer.out_size
    most = MOST_PATCH // (channels * (1 + (layer.operands.scalar_bytes == 8)))
    taps = channels * tap_rows * layer.columns.kernel
    for columns in {min(width, n) for n in (4, 7, 8)}:
        for rows in (1, 2, 4, 7):
            if rows > height or rows * columns > most:
                continue
            if rows * columns * taps <= MOST_WRITTEN or rows * columns <= 4:
                yield rows, columns


def _units(layer: Layer, rows: int, columns: int) -> list[tuple[Area, int]]:
    """Candidates for a unit: its area, in patches of this size, and its number of images."""
    found = []
    fewest = min(FEWEST_ACROSS, layer.columns.threads(columns))
    for area in areas(layer, rows, columns):
        if area.threads > MOST_LANES:
            continue
        if not layer.operands.input_channels_last and area.lanes_x < fewest:
            continue  # rows of few patches hit the same banks
        found.append((area, 1))
        if area.is_whole:
            for slots in (2, 4, 8, 32):
                if slots * area.threads <= 256 and slots < 2 * layer.problem.batch:
                    found.append((area, slots))
    return found
