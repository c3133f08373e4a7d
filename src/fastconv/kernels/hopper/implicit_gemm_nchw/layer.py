"""A forward pass or an input gradient as the NCHW implicit GEMM: positions, taps and chunks.

The order in which a sum is added up depends on these alone, and these on the layer alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.hopper.directed import Directed
from fastconv.kernels.lazy import lazy

CHUNK = 32  # channels that are copied at once
# The largest planes that are copied whole: by TMA, whose boxes have at most 256 elements along an
# axis, and by bulk copies.
FEW_PIXELS = 256
FEW_BULK_PIXELS = 324
# The most bytes of a chunk that a tile of SOME_POSITIONS positions may need; less with a stride.
SOME_POSITIONS = 128
MOST_BYTES = 100 * 1024
MOST_STRIDED_BYTES = 72 * 1024


@dataclass(frozen=True)
class Axis:
    """One axis of a layer, as ``Axis`` in the device code.

    A position of the grid reads the image at ``position * step + offset`` for each tap.
    """

    kernel: int
    stride: int
    dilation: int
    padding: int
    transposed: bool

    @lazy
    def offsets(self) -> list[int]:
        """The offset of each tap. Taps with the same offset are neighbours, and make a unit."""
        reaches = [tap * self.dilation - self.padding for tap in range(self.kernel)]
        return [-(reach // self.stride) for reach in reaches] if self.transposed else reaches

    @lazy
    def residues(self) -> int:
        """Residues of a gradient's stride."""
        return self.stride if self.transposed else 1

    @lazy
    def reached_residues(self) -> int:
        """Residues that have taps, and so accumulators."""
        reaches = (tap * self.dilation - self.padding for tap in range(self.kernel))
        return len({reach % self.residues for reach in reaches})

    @lazy
    def units(self) -> int:
        """The number of different offsets."""
        return len(set(self.offsets))

    @lazy
    def most_unit_taps(self) -> int:
        """Taps of the largest unit."""
        return max(self.offsets.count(offset) for offset in self.offsets)

    @lazy
    def step(self) -> int:
        """Distance of what neighbouring positions read."""
        return 1 if self.transposed else self.stride

    @lazy
    def reach(self) -> int:
        """Rows or columns from the first that a position reads to the last, both included."""
        return max(self.offsets) - min(self.offsets) + 1


@dataclass(frozen=True)
class Layer(Directed):
    """A pass as an implicit GEMM: M is positions, N output channels, K taps and input channels."""

    @lazy
    def axes(self) -> tuple[Axis, Axis]:
        rows, columns = (Axis(*side, self.transposed) for side in self.sides)
        return rows, columns

    @property
    def groups(self) -> int:
        return self.problem.groups

    @property
    def group_in(self) -> int:
        """Channels of a group that is read."""
        return self.in_channels // self.groups

    @property
    def group_out(self) -> int:
        """Channels of a group that is written."""
        return self.out_channels // self.groups

    @lazy
    def grid(self) -> tuple[int, int]:
        """Positions of an image, along both axes: one for all residues of a gradient's stride."""
        rows, columns = self.axes
        height, width = self.image_size
        return ceil_div(height, rows.residues), ceil_div(width, columns.residues)

    @property
    def grid_pixels(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def in_pixels(self) -> int:
        return self.in_size[0] * self.in_size[1]

    @property
    def taps(self) -> int:
        return self.axes[0].kernel * self.axes[1].kernel

    @lazy
    def units(self) -> int:
        """Different offsets of taps: a position's input is loaded once for each."""
        return self.axes[0].units * self.axes[1].units

    @lazy
    def most_unit_taps(self) -> int:
        return self.axes[0].most_unit_taps * self.axes[1].most_unit_taps

    @lazy
    def reached_residues(self) -> int:
        """Residues of both axes that have taps: each has accumulators of its own."""
        return self.axes[0].reached_residues * self.axes[1].reached_residues

    @lazy
    def flat(self) -> bool:
        """Whether a position reads its own pixel only, so that a plane can be taken for one row."""
        rows, columns = self.axes
        own = all(axis.offsets == [0] and axis.step == 1 for axis in (rows, columns))
        return own and self.in_size == self.grid

    @lazy
    def chunk(self) -> int:
        """Channels that are copied at once: fewer where taps or strides need many rows.

        A sum goes over all taps of a chunk, then over those of the next chunk. Chunks of several
        groups have no channels of the next group: zero weights would not keep out its NaNs.
        """
        return self._most_chunk if self.groups == 1 else gcd(self._most_chunk, self.group_in)

    @lazy
    def _most_chunk(self) -> int:
        rows, columns = self.axes
        if self.units == 1 or self.in_pixels <= FEW_PIXELS:
            return CHUNK
        needed = ceil_div(SOME_POSITIONS - 1, self.grid[1]) * rows.step + rows.reach
        row_bytes = 4 * min(needed, self.in_size[0]) * self.in_size[1]
        most = MOST_BYTES if rows.step * columns.step == 1 else MOST_STRIDED_BYTES
        fitting = (chunk for chunk in (CHUNK, CHUNK // 2) if chunk * row_bytes <= most)
        return next(fitting, CHUNK // 4)

    @lazy
    def chunks(self) -> int:
        return ceil_div(self.group_in, self.chunk)

    @lazy
    def ties_to_even(self) -> bool:
        """How TF32 rounds ties, by the same rule as ``fastconv.kernels.planning.layers``."""
        return self.taps == 1 and self.problem.stride == (1, 1)
