"""Tiles whose boxes have a halo: TMA brings pixels once for all taps of a tile that read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from fastconv.kernels.arithmetic import ceil_div, round_up, shares
from fastconv.kernels.family import Declined, Gpu, TensorMap
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.wgrad_implicit_gemm.layer import Layer
from fastconv.kernels.hopper.wgrad_implicit_gemm.tiles import (
    BARRIER_BYTES,
    COMPILED_REGISTERS,
    COSTS,
    FEWEST_STAGES,
    GROUPS,
    MOST_STAGES,
    MOST_STEPS,
    OTHER_REGISTERS,
    ROWS,
    SHARED_BYTES,
    WORKSPACE_BYTES,
    Tile,
    grids,
)
from fastconv.kernels.lazy import lazy

CHANNELS = (16, 32, 64)  # of a chunk, whose rows the swizzle spans
LEAST_COLUMNS, MOST_COLUMNS = 64, 256  # the N of a wgmma
MOST_BOX = 256  # elements of a TMA box along an axis
BOX_ALIGNMENT = 1024  # of a box in shared memory, in bytes
PATCH_COLUMNS = (8, 16, 24, 32, 40, 48, 56, 64)
PATCH_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
PATCH_POSITIONS = (15, 64, 128, 256, 512)  # bounds of the sizes of patches
BEST_PATCHES = 2  # patches of each size that are examined
LOADED_SHARE = 0.1  # how loads count beside MMAs, to compare patches
MOST_UNITS = 4  # of a consumer
FLUSH_MMAS = 512  # MMAs that are accumulated in a row, as in wgrad_halo
UNIT_REGISTERS = 4  # of a thread for each further unit
WGMMA_REGISTERS = 28  # of a wgmma beside its accumulators, all of which a thread has at launch
MOST_REGISTERS = 240
PRODUCER_REGISTERS = 32  # of a warpgroup that copies, where consumers need more than their share
# Estimates, in cycles.
MMA_OVERHEAD = 5.0  # of every wgmma, measured
ROW_CYCLES = 2.75  # a row of a box, which has up to 128 bytes
# A weight that a block stores itself, in cycles of an SM: where it writes whole cache lines, and
# where others write parts of them.
WHOLE_LINE_CYCLES, PART_LINE_CYCLES = 0.3, 0.8
LINE_BYTES = 128


@dataclass(frozen=True)
class HaloTile(Tile):
    """A tile whose positions are patches, and whose columns are units of taps and channels."""

    box_channels: int = 0  # of a chunk
    kernel_planes: int = 1  # planes and rows of the kernel, and chunks of channels, in a tile
    kernel_rows: int = 1
    chunks: int = 1
    mma_chunks: int = 1  # chunks of an MMA, which then has one tap
    patch: tuple[int, int] = (0, 0)  # rows and columns

    @property
    def name(self) -> str:
        rows, columns = self.patch
        along = 1 if self.layer.upright else self.mma_taps * self.pieces
        taps = f"{self.kernel_planes}x{self.kernel_rows}x{along} taps"
        return (
            f"{self.rows} by {taps} of {self.chunks} times {self.box_channels} channels "
            f"({self.mma_columns} an MMA), "
            f"{self.row_groups}x{self.column_groups} consumers of {self.units} MMAs, "
            f"patches of {rows} by {columns}, {self.stages} stages, {self.grid} blocks"
        )

    @property
    def mma_taps(self) -> int:
        return self.mma_columns // self.box_channels // self.mma_chunks

    @lazy
    def pieces(self) -> int:
        """Units of a kernel row, or of a column if there is only one."""
        if self.layer.upright:
            return self.kernel_rows // self.mma_taps
        return ceil_div(self.layer.problem.kernel_size[1], self.mma_taps)

    @property
    def tile_units(self) -> int:
        rows = 1 if self.layer.upright else self.kernel_rows
        return self.kernel_planes * rows * self.chunks // self.mma_chunks * self.pieces

    @lazy
    def units(self) -> int:
        """Units of a consumer."""
        return ceil_div(self.tile_units, self.column_groups)

    @lazy
    def columns(self) -> int:
        return self.mma_columns * self.units * self.column_groups

    @property
    def threads(self) -> int:
        return 128 * self.consumers + (128 if self.gives_registers else 32)

    @lazy
    def count(self) -> int:
        layer = self.layer
        planes, rows = _kernel(layer)
        return (
            ceil_div(layer.group_out, self.rows)
            * ceil_div(planes, self.kernel_planes)
            * ceil_div(rows, self.kernel_rows)
            * ceil_div(layer.group_in, self.chunks * self.box_channels)
        )

    @lazy
    def steps(self) -> int:
        return patch_count(self.layer, self.patch)

    @property
    def flush_steps(self) -> int:
        return max(FLUSH_MMAS * self.layer.mma_depth // self.depth, 1)

    @lazy
    def all_rows(self) -> int:
        """Rows of the input from the first that a patch reads at a tile's taps to the last."""
        stride, dilation = self.layer.problem.stride[0], self.layer.problem.dilation[0]
        return (self.patch[0] - 1) * stride + (self.kernel_rows - 1) * dilation + 1

    @lazy
    def split_rows(self) -> bool:
        """Whether boxes have only the rows of taps, which are an axis of the tensor map.

        So they do if these are fewer. No row of padding is among those of such a map.
        """
        problem = self.layer.problem
        inside = problem.depth is None and problem.padding.top == problem.padding.bottom == 0
        return inside and self.patch[0] * self.kernel_rows < self.all_rows

    @lazy
    def boxes(self) -> int:
        """Boxes of the input in a stage: for each chunk, as many as taps have residues."""
        problem = self.layer.problem
        stride, dilation = problem.stride[1], problem.dilation[1]
        taps = range(problem.kernel_size[1]) if stride > 1 else range(1)
        return self.chunks * len({tap * dilation % stride for tap in taps})

    @lazy
    def box(self) -> tuple[int, int, int]:
        """Planes, rows and columns of a box of the input."""
        problem = self.layer.problem
        depth = 1 if problem.depth is None else problem.depth.dilation
        along = 1 if self.layer.upright else self.pieces * self.mma_taps
        return (
            (self.kernel_planes - 1) * depth + 1,
            self.patch[0] * self.kernel_rows if self.split_rows else self.all_rows,
            self.patch[1] + (along - 1) * problem.dilation[1] // problem.stride[1],
        )

    @lazy
    def stage_bytes(self) -> int:
        boxes = self.boxes * round_up(prod(self.box) * 2 * self.box_channels, BOX_ALIGNMENT)
        return self.rows * self.depth * 2 + boxes + BARRIER_BYTES

    @property
    def needed_registers(self) -> int:
        """Registers of a consumer's thread."""
        accumulators = self.units * self.mma_columns // 2
        other = OTHER_REGISTERS + UNIT_REGISTERS * (self.units - 1)
        return accumulators + other + 4 * self.layer.sums_bias

    @property
    def compiled_registers(self) -> int:
        """Registers of a thread at launch."""
        most = block.most_registers(1, self.threads)
        compiled = self.needed_registers + COMPILED_REGISTERS
        return most if self.gives_registers else min(compiled, most)

    @property
    def gives_registers(self) -> bool:
        """Whether a whole warpgroup copies, to give the consumers registers."""
        most = block.most_registers(1, 128 * self.consumers + 32)
        return self.needed_registers > most

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread where a warpgroup gives its own."""
        groups = self.consumers + 1
        at_launch = block.most_registers(1, 128 * groups)
        each = (groups * at_launch - PRODUCER_REGISTERS) // self.consumers // 8 * 8
        return min(each, MOST_REGISTERS)

    @property
    def has_registers(self) -> bool:
        """Whether a block's threads have the registers that they need, whatever the patch."""
        if self.gives_registers and self.needed_registers > self.consumer_registers:
            return False
        at_launch = block.most_registers(1, self.threads)
        return self.mma_columns // 2 + WGMMA_REGISTERS <= at_launch

    def fitted(self, gpu: Gpu) -> HaloTile | None:
        if max(*self.box, self._box_extent) > MOST_BOX:
            return None
        room = gpu.shared_budget(self.blocks) - self.shared_bytes
        stages = min(room // self.stage_bytes, MOST_STAGES)
        return replace(self, stages=stages) if stages >= FEWEST_STAGES else None

    @lazy
    def _step_cycles(self) -> float:
        mma = max(self.mma_columns / 2, (ROWS + self.mma_columns) * 32 / SHARED_BYTES)
        mmas = self.consumers * self.units * self.depth / self.layer.mma_depth
        rows = self.row_groups * self.depth + self.boxes * prod(self.box)
        return max(mmas * (mma + MMA_OVERHEAD), rows * ROW_CYCLES)

    @property
    def _cache_cycles(self) -> float:
        layer = self.layer
        grad = min(self.rows, layer.group_out) * self.depth
        channels = min(self.chunks * self.box_channels, layer.group_in)
        columns = self.boxes // self.chunks * channels * prod(self.box)
        return 2 * (grad + columns) / COSTS.cache_bytes

    @property
    def _box_extent(self) -> int:
        """Columns from a box's first to its last."""
        return (self.box[-1] - 1) * self.layer.problem.stride[1] + 1

    def cycles(self, gpu: Gpu) -> float:
        stored = 0.0
        if self.is_whole:
            whole = self._stored_bytes >= LINE_BYTES
            each = WHOLE_LINE_CYCLES if whole else PART_LINE_CYCLES
            stored = prod(self.layer.problem.weight_shape) * each / gpu.sm_count
        return super().cycles(gpu) + stored

    @property
    def _stored_bytes(self) -> int:
        """Bytes of a block's weights that are neighbours in memory."""
        rows, columns = self.layer.operands.weight_strides[:2]
        if rows == 1:
            return 2 * self.rows
        return 2 * self.chunks * self.box_channels if columns == 1 else 2

    @property
    def box_map(self) -> TensorMap:
        """The tensor map of the input."""
        layer, problem = self.layer, self.layer.problem
        name = "grad_output" if layer.mirrored else "input"
        _, *others = self.box[-len(problem.axes) :][::-1]
        box = (self.box_channels, self._box_extent, *others, 1)
        step = (1, problem.stride[1], *(1 for _ in others), 1)
        whole = _map(name, layer, problem.input_shape, box, step)
        if not self.split_rows:
            return whole
        channels, columns, _, images = whole.sizes
        pixel, row, image = whole.strides
        dilation, stride = problem.dilation[0], min(problem.stride[0], problem.input_size[0])
        return replace(
            whole,
            sizes=(channels, columns, problem.kernel_size[0], problem.output_size[0], images),
            strides=(pixel, row * dilation, row * stride, image),
            box=(*box[:2], self.kernel_rows, self.patch[0], 1),
            element_strides=(*step[:2], 1, 1, 1),
        )

    @property
    def patch_map(self) -> TensorMap:
        """The tensor map of the output's gradient."""
        problem = self.layer.problem
        rows, columns = self.patch
        planes = (1,) * (len(problem.axes) - 2)
        return _map(
            "input" if self.layer.mirrored else "grad_output",
            self.layer,
            problem.output_shape,
            (ROWS, columns, rows, *planes, 1),
        )


def _map(
    name: str,
    layer: Layer,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    step: tuple[int, ...] = (),
) -> TensorMap:
    """The tensor map of boxes of a channels-last tensor of this shape."""
    batch, channels, *size = shape
    sizes = (channels, *size[::-1], batch)
    bytes_ = layer.operands.scalar_bytes
    strides = tuple(bytes_ * prod(sizes[: axis + 1]) for axis in range(len(sizes) - 1))
    return TensorMap(
        name,
        layer.operands.scalar,
        sizes,
        strides,
        box,
        step,
        swizzle=box[0] * bytes_,
        promotion=128,
    )


def patch_count(layer: Layer, patch: tuple[int, int]) -> int:
    """Patches of all images."""
    problem = layer.problem
    planes = 1 if problem.depth is None else problem.depth.output_size
    sides = map(ceil_div, problem.output_size, patch)
    return problem.batch * planes * prod(sides)


@lru_cache(maxsize=64)
def tiles_of(layer: Layer, gpu: Gpu) -> tuple[HaloTile, ...]:
    """All tiles that fit.

    Raises:
        Declined: there are none.
    """
    found: list[HaloTile] = []
    for cut, patch in product(_cuts(layer), _patches(layer)):
        tile = replace(cut, patch=patch, depth=prod(patch)).fitted(gpu)
        if tile is not None:
            found += [replace(tile, grid=grid) for grid in grids(tile, gpu)]
    possible = tuple(
        tile
        for tile in found
        if tile.workspace_bytes <= WORKSPACE_BYTES and tile.count * tile.steps < MOST_STEPS
    )
    if not possible:
        raise Declined(f"boxes for weights of {layer.problem.weight_shape}")
    return possible


def _cuts(layer: Layer) -> Iterator[HaloTile]:
    """Ways to cut the weights into tiles, for any patch."""
    kernel_planes, kernel_rows = _kernel(layer)
    upright = layer.upright
    for channels in CHANNELS:
        if channels >= 2 * layer.group_in > CHANNELS[0]:
            continue
        for taps, together in _units(layer, channels):
            sides = product(
                sorted({1, kernel_planes}),
                shares(ceil_div(kernel_rows, taps) if upright else kernel_rows),
                shares(ceil_div(layer.group_in, channels * together)),
                GROUPS,
            )
            for planes, rows, chunks, groups in sides:
                tile = HaloTile(
                    layer,
                    *groups,
                    taps * together * channels,
                    0,
                    1,
                    box_channels=channels,
                    kernel_planes=planes,
                    kernel_rows=rows * taps if upright else rows,
                    chunks=chunks * together,
                    mma_chunks=together,
                )
                idle = tile.rows >= layer.group_out + ROWS or groups[1] > tile.tile_units
                if not idle and tile.units <= MOST_UNITS and tile.has_registers:
                    yield tile


def _units(layer: Layer, channels: int) -> list[tuple[int, int]]:
    """Taps and chunks of this many channels in an MMA: neighbouring taps, unless strided."""
    rows, columns = layer.problem.kernel_size
    if layer.problem.stride[1] > 1 and not layer.upright:
        chunks = shares(ceil_div(layer.group_in, channels))
        widths = range(LEAST_COLUMNS, MOST_COLUMNS + 1)
        return [(1, many) for many in chunks if many * channels in widths] or [(1, chunks[-1])]
    all_taps = rows if layer.upright else columns
    return [(taps, 1) for taps in shares(all_taps) if taps * channels <= MOST_COLUMNS][-2:]


@lru_cache(maxsize=64)
def _patches(layer: Layer) -> tuple[tuple[int, int], ...]:
    """Patches to examine: for stages of each size, those that multiply and load least."""
    height, width = layer.problem.output_size
    kernel_rows, kernel_columns = layer.problem.kernel_size
    possible = [
        (rows, columns)
        for rows, columns in product(PATCH_ROWS, PATCH_COLUMNS)
        if (columns % 16 == 0 or rows % 2 == 0) and rows < height + 2 and columns < width + 8
    ]

    def cost(patch: tuple[int, int]) -> float:
        rows, columns = patch
        multiplied = patch_count(layer, patch) * rows * columns
        loaded = (rows + kernel_rows - 1) * (columns + kernel_columns - 1) / (rows * columns)
        return multiplied * (1 + LOADED_SHARE * loaded)

    found = []
    for least, most in pairwise(PATCH_POSITIONS):
        of_size = [one for one in possible if least < prod(one) <= most]
        found += sorted(of_size, key=cost)[:BEST_PATCHES]
    return tuple(found)


def _kernel(layer: Layer) -> tuple[int, int]:
    """Planes and rows of the kernel."""
    depth = layer.problem.depth
    return (1 if depth is None else depth.kernel_size), layer.problem.kernel_size[0]
