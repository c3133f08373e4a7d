"""How a pass is cut into blocks of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from fastconv.backends.cpu.axes import Axis, axes
from fastconv.backends.cpu.scratch import Scratch
from fastconv.problem import Problem

EFFICIENT_DEPTH = 128
"""The least depth of an efficient matrix product; below it, one takes all kernel rows at once."""

EFFICIENT_POSITIONS = 2048
"""The fewest positions of an image that is read in place; smaller images share a block."""


class Extent(NamedTuple):
    """The size of a block along each dimension.

    ``channels`` are output channels and ``depth`` is input channels, both of a group.
    """

    images: int
    rows: int
    columns: int
    groups: int
    channels: int
    depth: int
    tap_rows: int
    tap_columns: int

    @property
    def weights(self) -> int:
        return self.groups * self.channels * self.depth * self.tap_rows * self.tap_columns


# The order in which the dimensions of a block are cut, and down to which size: first the cuts that
# leave matrix products efficient, then whatever is needed to fit.
Cuts = tuple[tuple[str, int], ...]
_KERNEL_CUTS: Cuts = (
    ("groups", 1),
    ("channels", 128),
    ("depth", 64),
    ("tap_rows", 1),
    ("tap_columns", 1),
    ("depth", 1),
    ("channels", 1),
)
_CUTS: Cuts = (
    ("images", 1),
    ("rows", 8),
    ("groups", 1),
    ("columns", 512),
    *_KERNEL_CUTS[1:3],
    ("rows", 1),
    ("columns", 64),
    *_KERNEL_CUTS[3:],
    ("columns", 1),
)
_TAP_CUTS: Cuts = (
    ("images", 1),
    ("rows", 64),
    ("groups", 32),
    ("columns", 512),
    *_KERNEL_CUTS[3:5],  # for taps so far apart that little is read between them
    ("groups", 1),
    ("rows", 1),
    ("columns", 1),
)


class Tiling(NamedTuple):
    """How a convolution is cut into blocks."""

    whole: Extent
    block: Extent

    @classmethod
    def fitting(
        cls, whole: Extent, elements: Callable[[Extent], int], kernel_copies: int, limit: int
    ) -> Tiling:
        """Chooses the largest blocks of at most ``limit`` elements, up to half for the kernel."""

        def kernel(block: Extent) -> int:
            return kernel_copies * block.weights

        together = EFFICIENT_POSITIONS // max(1, whole.rows * whole.columns)
        block = whole._replace(images=min(whole.images, max(1, together)))
        block = _cut(block, _KERNEL_CUTS, kernel, limit // 2)
        block = _cut(block, _CUTS, lambda block: elements(block) + kernel(block), limit)
        return cls(whole, block)

    def spans(self, *names: str) -> Iterator[tuple[slice, ...]]:
        """Returns the slices of all blocks along these dimensions, in all combinations."""
        return product(*(_spans(getattr(self.whole, n), getattr(self.block, n)) for n in names))


def _cut(block: Extent, cuts: Cuts, elements: Callable[[Extent], int], limit: int) -> Extent:
    """Halves the dimensions of ``block`` until ``elements`` are within ``limit``."""
    for name, least in cuts:
        while getattr(block, name) > least and elements(block) > limit:
            block = block._replace(**{name: (getattr(block, name) + 1) // 2})
    return block


def _spans(size: int, length: int) -> list[slice]:
    return [slice(start, min(start + length, size)) for start in range(0, size, max(1, length))]


def lowered_tiling(problem: Problem, scratch: Scratch, kernel_copies: int) -> Tiling:
    """Cuts the forward pass or the weight gradient, computed by matrix products."""
    row_axis, column_axis = axes(problem)

    def elements(block: Extent) -> int:
        rows = row_axis._replace(outputs=block.rows, taps=block.tap_rows)
        columns = column_axis._replace(outputs=block.columns, taps=block.tap_columns)
        shared = shares_rows(rows, columns, block.depth)
        lowered_rows = rows.span if shared else rows.outputs * rows.taps
        inputs = rows.span * columns.span + lowered_rows * columns.outputs * columns.taps
        outputs = 2 * rows.outputs * columns.outputs
        positions = inputs * block.depth + outputs * block.channels
        return block.images * block.groups * positions

    whole = _whole(problem, problem.output_size, problem.kernel_size)
    return Tiling.fitting(whole, elements, kernel_copies, scratch.limit)


def shares_rows(rows: Axis, columns: Axis, depth: int) -> bool:
    """Whether all kernel rows read one lowered matrix, or the input is lowered for each of them."""
    if rows.step > 1:
        return False
    deep = columns.taps * depth >= EFFICIENT_DEPTH
    return rows.taps == 1 or (deep and rows.span < rows.outputs * rows.taps)


def tap_tiling(shape: Sequence[int], rows: Axis, columns: Axis, scratch: Scratch) -> Tiling:
    """Cuts a pass computed tap by tap: ``(channels, rows, images, columns, groups)``."""

    def elements(block: Extent) -> int:
        row = rows._replace(outputs=block.rows, taps=block.tap_rows)
        column = columns._replace(outputs=block.columns, taps=block.tap_columns)
        read = row.span * (column.span + column.outputs)
        written = row.outputs * column.outputs * block.channels
        return block.images * block.groups * (read + 2 * written) + 2 * block.weights

    channels, row_count, images, column_count, groups = shape
    whole = Extent(images, row_count, column_count, groups, channels, 1, rows.taps, columns.taps)
    return Tiling(whole, _cut(whole, _TAP_CUTS, elements, scratch.limit))


def spread_tiling(problem: Problem, rows: Axis, scratch: Scratch, kernel_copies: int) -> Tiling:
    """Cuts the input gradient, computed by matrix products, for one residue of its rows."""
    columns = axes(problem)[1]

    def elements(block: Extent) -> int:
        span = block.columns + columns.reach * (block.tap_columns - 1)
        readers = min(columns.outputs, span // columns.step + 1)
        spread = block.columns + readers * block.tap_columns
        gathered = readers * block.tap_rows
        positions = block.rows * (spread * block.depth + gathered * block.channels)
        return block.images * block.groups * positions

    whole = _whole(problem, (rows.outputs, columns.size), (rows.taps, columns.taps))
    return Tiling.fitting(whole, elements, kernel_copies, scratch.limit)


def _whole(problem: Problem, size: tuple[int, int], taps: tuple[int, int]) -> Extent:
    groups = problem.groups
    channels, depth = problem.out_channels // groups, problem.in_channels // groups
    return Extent(problem.batch, *size, groups, channels, depth, *taps)
