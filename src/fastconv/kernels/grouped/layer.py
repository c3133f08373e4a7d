"""The geometry of a grouped layer's pass, as in ``tile.cuh``, and what both kernels require."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from fastconv.kernels import gpus
from fastconv.kernels.arithmetic import ceil_div, round_up, shares
from fastconv.kernels.family import Constant, Declined, Gpu, Operands, problem_constants
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.axes import PassAxis
from fastconv.problem import Problem

FAMILY = "grouped"
FIRST_ARCHITECTURE = 80  # sm_80 is the first with mma.sync of bfloat16 and cp.async
WIDTHS = (4, 8, 16, 32)  # channels of a group
OCTET = 8
BUNDLE = 16  # channels that a warp computes at once
WARPS = 8
THREADS = 32 * WARPS
MOST_REGISTERS = 216  # of a thread, as estimated: the compiler takes some more
OTHER_REGISTERS = 44
SM_REGISTERS = 1 << 16
MOST_BLOCKS = 6  # of an SM
MOST_TILE_ROWS = 32
MOST_TILE_COLUMNS = 64
MOST_SLOTS = 8
MOST_STRIDE = 4

# The cost model: cycles of an SM.
MMA_PRODUCTS = 16 * 8 * 16
ISSUED = 3.0  # instructions in a cycle
COPY = 16  # instructions of a copied vector
REQUEST_CHANNELS = 16  # channels that the requests of a pixel cost beside its own
SHARED_BYTES = 128  # bytes of shared memory in a cycle
BLOCK_CYCLES = 3000.0  # start and end of a block: latencies that other blocks hide
LAUNCH_CYCLES = 3000.0


@dataclass(frozen=True)
class Axis(PassAxis):
    """One axis of a pass; mirrors ``Axis`` in ``tile.cuh``."""

    @lazy
    def reach(self) -> int:
        """The largest distance of an input from a position's first one."""
        if not self.fractional:
            return (self.kernel - 1) * self.dilation
        origin = (self.padding - (self.kernel - 1)) // self.stride
        return (self.stride - 1 + self.padding) // self.stride - origin

    def taps(self, residue: int) -> int:
        if not self.fractional:
            return self.kernel
        first = (residue + self.padding) % self.stride
        return ceil_div(max(self.kernel - first, 0), self.stride)

    def halo(self, positions: int) -> int:
        """Inputs that neighbouring positions span."""
        return (positions - 1) * self.times + self.reach + 1


@dataclass(frozen=True)
class Layer:
    """A pass of a layer with groups of few channels."""

    problem: Problem
    operands: Operands
    transposed: bool

    @staticmethod
    def of(problem: Problem, operands: Operands, gpu: Gpu, transposed: bool = False) -> Layer:
        """A pass as these kernels compute it.

        Raises:
            Declined: they do not take it.
        """
        layer = Layer(problem, operands, transposed)
        layer._check(gpu)
        return layer

    def _check(self, gpu: Gpu) -> None:
        problem, operands = self.problem, self.operands
        if gpus.number(gpu) < FIRST_ARCHITECTURE:
            raise Declined(f"tensor-core kernels for {gpu.architecture}")
        if problem.groups == 1:
            raise Declined("a single group")
        if problem.depth is not None:
            raise Declined("volumes")
        if operands.scalar_bytes != 2:
            raise Declined("types that have not 16 bits")
        if not (operands.input_channels_last and operands.output_channels_last):
            raise Declined("tensors that are not channels-last")
        if not operands.aligned:
            raise Declined("tensors that are not aligned")
        group_in = problem.in_channels // problem.groups
        group_out = problem.out_channels // problem.groups
        if group_in != group_out or group_in not in WIDTHS:
            raise Declined(f"groups of {group_in} to {group_out} channels, not 4, 8, 16 or 32")
        if problem.in_channels % BUNDLE:
            raise Declined(f"{problem.in_channels} channels, not a multiple of {BUNDLE}")
        if prod(problem.kernel_size) == 1:
            raise Declined("kernels of one tap")
        if max(problem.stride) > MOST_STRIDE:
            raise Declined(f"strides of more than {MOST_STRIDE}")
        for axis in (self.rows, self.columns):
            if axis.fractional and axis.dilation > 1:
                raise Declined("strides and dilations at once")
        limits.check(operands, problem.groups, (group_in, group_out), *limits.volume_sizes(problem),
                     least_group=WIDTHS[0])  # fmt: skip
        limits.check_reach(problem, operands)

    @lazy
    def width(self) -> int:
        """Channels of a group."""
        return self.problem.in_channels // self.problem.groups

    @lazy
    def channels(self) -> int:
        return self.problem.in_channels

    @lazy
    def in_size(self) -> tuple[int, int]:
        return self.problem.output_size if self.transposed else self.problem.input_size

    @lazy
    def out_size(self) -> tuple[int, int]:
        return self.problem.input_size if self.transposed else self.problem.output_size

    @lazy
    def rows(self) -> Axis:
        return Axis.of(self.problem.axes[0], self.transposed)

    @lazy
    def columns(self) -> Axis:
        return Axis.of(self.problem.axes[1], self.transposed)

    @lazy
    def taps(self) -> int:
        return self.rows.kernel * self.columns.kernel

    @lazy
    def octets(self) -> int:
        """Octets of input channels that a bundle reads."""
        return max(self.width, BUNDLE) // OCTET

    @lazy
    def window_rows(self) -> int:
        """Input rows that two rows of positions read."""
        return self.rows.times + self.rows.reach + 1

    @lazy
    def chunks(self) -> list[int]:
        """Channels that a block may have: whole groups, divided among its warps."""
        return [
            chunk
            for chunk in (16, 32, 64, 128)
            if self.channels % chunk == 0 and chunk % self.width == 0
        ]

    def constants(self) -> dict[str, Constant]:
        """Constants that both kernels are compiled with."""
        return {
            "Scalar": self.operands.scalar,
            "transposed": self.transposed,
            "groups": self.problem.groups,
            "group_in": self.width,
            "group_out": self.width,
            "in_height": self.in_size[0],
            "in_width": self.in_size[1],
            "out_height": self.out_size[0],
            "out_width": self.out_size[1],
            **problem_constants(self.problem, self.operands),
        }


@dataclass(frozen=True)
class Tile:
    """What a block computes at once: channels, images, and rows and columns of positions."""

    layer: Layer
    chunk: int
    slots: int
    rows: int
    columns: int

    @lazy
    def name(self) -> str:
        return f"{self.slots}x{self.rows}x{self.columns} of {self.chunk}"

    @lazy
    def pixel_bytes(self) -> int:
        return 2 * self.chunk + 16

    @lazy
    def halo(self) -> tuple[int, int]:
        return self.layer.rows.halo(self.rows), self.layer.columns.halo(self.columns)

    @lazy
    def halo_bytes(self) -> int:
        rows, columns = self.halo
        times = self.layer.columns.times
        return self.slots * rows * round_up(columns, times) * self.pixel_bytes

    @lazy
    def image_tiles(self) -> int:
        layer = self.layer
        return ceil_div(layer.rows.positions, self.rows) * ceil_div(
            layer.columns.positions, self.columns
        )

    @lazy
    def tiles(self) -> int:
        """Tiles of all images, of one chunk."""
        return self.image_tiles * ceil_div(self.layer.problem.batch, self.slots)

    @lazy
    def chunk_count(self) -> int:
        return self.layer.channels // self.chunk

    @lazy
    def halo_vectors(self) -> int:
        rows, columns = self.halo
        return self.slots * rows * columns * self.chunk // OCTET

    def constants(self) -> dict[str, Constant]:
        return {
            "chunk": self.chunk,
            "slots": self.slots,
            "tile_rows": self.rows,
            "tile_columns": self.columns,
            "warps": WARPS,
        }


def tiles_of(layer: Layer) -> Iterator[Tile]:
    """Candidate tiles of a layer."""
    height, width = layer.rows.positions, layer.columns.positions
    all_rows = sorted({round_up(n, 2) for n in shares(height) if n <= MOST_TILE_ROWS})
    all_columns = sorted({round_up(n, OCTET) for n in shares(width) if n <= MOST_TILE_COLUMNS})
    for chunk in layer.chunks:
        for columns in all_columns:
            for rows in all_rows:
                yield Tile(layer, chunk, 1, rows, columns)
                if rows >= height and columns >= width:
                    for slots in (2, 4, MOST_SLOTS):
                        if slots < 2 * layer.problem.batch:
                            yield Tile(layer, chunk, slots, rows, columns)


def request_loss(tile: Tile) -> float:
    """How many times longer a tile's loads take than those of whole lines of memory."""
    return 1 + REQUEST_CHANNELS / tile.chunk


def resident(gpu: Gpu, shared_bytes: int, registers: int) -> int:
    """Blocks that fit an SM at once, 0 if none does."""
    by_registers = SM_REGISTERS // (THREADS * round_up(registers, 8))
    most = min(MOST_BLOCKS, by_registers)
    return max((n for n in range(1, most + 1) if gpu.shared_budget(n) >= shared_bytes), default=0)
