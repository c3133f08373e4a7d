"""What is multiplied: a forward pass or an input gradient as products of planes.

Decided from the layer alone, as all that decides the order of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.hopper.directed import Directed
from fastconv.kernels.lazy import lazy

CHUNK = 32  # channels that are copied at once
FEW_PIXELS = 256  # of a plane that fits shared memory whole, and a box
FEW_BULK_PIXELS = 324  # of one that no box can have
SOME_POSITIONS = 128  # of a small tile
MOST_BYTES = 100 * 1024  # of a chunk's rows that such a tile needs
MOST_STRIDED_BYTES = 72 * 1024


@dataclass(frozen=True)
class Axis:
    """One axis of a layer: the device code's ``Axis``.

    A position of the grid meets the image at ``position * step + offset`` for each tap.
    """

    kernel: int
    stride: int
    dilation: int
    padding: int
    transposed: bool

    @lazy
    def offsets(self) -> list[int]:
        """Of each tap. Taps with the same one are neighbours."""
        reaches = [tap * self.dilation - self.padding for tap in range(self.kernel)]
        return [-(reach // self.stride) for reach in reaches] if self.transposed else reaches

    @lazy
    def phases(self) -> int:
        return self.stride if self.transposed else 1

    @lazy
    def phase_sums(self) -> int:
        """Phases that have taps."""
        reaches = (tap * self.dilation - self.padding for tap in range(self.kernel))
        return len({reach % self.phases for reach in reaches})

    @lazy
    def units(self) -> int:
        """Different offsets."""
        return len(set(self.offsets))

    @lazy
    def most_unit_taps(self) -> int:
        return max(self.offsets.count(offset) for offset in self.offsets)

    @lazy
    def step(self) -> int:
        return 1 if self.transposed else self.stride

    @lazy
    def reach(self) -> int:
        """Places from the first that a position needs to the last, both included."""
        return max(self.offsets) - min(self.offsets) + 1


@dataclass(frozen=True)
class Layer(Directed):
    """A pass of a problem. What it reads has ``in_channels`` planes, what it writes has others."""

    @lazy
    def axes(self) -> tuple[Axis, Axis]:
        rows, columns = (Axis(*side, self.transposed) for side in self.sides)
        return rows, columns

    @lazy
    def grid(self) -> tuple[int, int]:
        """Positions: as many as a phase of the output has pixels."""
        rows, columns = self.axes
        height, width = self.image_size
        return ceil_div(height, rows.phases), ceil_div(width, columns.phases)

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
        return self.axes[0].units * self.axes[1].units

    @lazy
    def most_unit_taps(self) -> int:
        return self.axes[0].most_unit_taps * self.axes[1].most_unit_taps

    @lazy
    def phase_sums(self) -> int:
        return self.axes[0].phase_sums * self.axes[1].phase_sums

    @lazy
    def flat(self) -> bool:
        """Whether a position needs just its own pixel: planes may be taken for single rows."""
        rows, columns = self.axes
        own = all(axis.offsets == [0] and axis.step == 1 for axis in (rows, columns))
        return own and self.in_size == self.grid

    @lazy
    def chunk(self) -> int:
        """Channels that are copied at once, for all taps: fewer where taps or strides need much.

        A sum goes over a chunk's taps, then over the next chunk's.
        """
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
        return ceil_div(self.in_channels, self.chunk)

    @lazy
    def ties_to_even(self) -> bool:
        """How TF32 rounds numbers in the middle between two: as ``tensor.layers`` has it."""
        return self.taps == 1 and self.problem.stride == (1, 1)
