"""Which elements of an axis outputs and taps read."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from fastconv import problem as problems
from fastconv.problem import Problem


class Axis(NamedTuple):
    """Planes, rows or columns.

    For output ``o``, tap ``t`` reads element ``o * step + t * reach - before``.
    Elements outside ``range(size)`` are zeros.
    """

    size: int
    outputs: int
    taps: int
    step: int
    reach: int
    before: int

    @property
    def span(self) -> int:
        """The number of elements from the first one read to the last."""
        return (self.outputs - 1) * self.step + (self.taps - 1) * abs(self.reach) + 1

    def part(self, outputs: slice, taps: slice) -> Axis:
        """Returns the axis with these outputs and taps only."""
        count = outputs.stop - outputs.start
        return self._replace(
            outputs=count,
            taps=taps.stop - taps.start,
            step=self.step if count > 1 else 1,  # the bytes of an unused step might overflow
            before=self.before - outputs.start * self.step - taps.start * self.reach,
        )

    def window(self, elements: slice) -> Axis:
        """Returns the axis with these elements only, counted from the first of them."""
        return self._replace(
            size=elements.stop - elements.start, before=self.before + elements.start
        )

    def overlap(self) -> tuple[slice, slice]:
        """Returns the elements read that exist: a slice of all elements, and one of the span."""
        before = self.before - min(0, (self.taps - 1) * self.reach)
        start = min(max(0, -before), self.size)
        stop = max(start, min(self.size, self.span - before))
        held_start = min(max(0, before), self.span)
        return slice(start, stop), slice(held_start, held_start + stop - start)

    def readers(self, elements: slice, taps: slice) -> slice:
        """Returns the outputs, first to last, for which these taps read these elements."""
        least = elements.start + self.before - (taps.stop - 1) * self.reach
        most = elements.stop - 1 + self.before - taps.start * self.reach
        start = min(max(0, -(-least // self.step)), self.outputs)
        return slice(start, max(start, min(self.outputs, most // self.step + 1)))


def axes(problem: Problem) -> tuple[Axis, Axis]:
    """Returns the axes along which the forward pass reads its input: rows and columns."""
    *_, rows, columns = problem.axes
    return reading(rows), reading(columns)


def reading(axis: problems.Axis) -> Axis:
    """Returns how the forward pass reads along an axis of a problem."""
    # The stride of a single output and the dilation of a single tap have no effect, and may be so
    # large that sizes would overflow.
    step, reach = min(axis.stride, axis.padded_size), min(axis.dilation, axis.padded_size)
    return Axis(axis.input_size, axis.output_size, axis.kernel_size, step, reach, axis.before)


class Residue(NamedTuple):
    """The elements equal modulo the stride, the taps that read them, and for which outputs."""

    positions: slice
    taps: slice
    axis: Axis


def residues(axis: Axis) -> Iterator[Residue]:
    """Yields the residues of an axis: how their elements gather from its outputs.

    Tap ``t`` reads element ``e`` for output ``(e + before - t * reach) / step``, if that is a
    whole number, so the same taps read every step-th element.
    """
    size, outputs, taps, step, reach, before = axis
    common = gcd(step, reach)
    for first in range(min(step, size)):
        readers = [tap for tap in range(taps) if (first + before - tap * reach) % step == 0]
        start = readers[0] if readers else taps
        gathering = Axis(
            size=outputs,
            outputs=len(range(first, size, step)),
            taps=len(readers),
            step=1,
            reach=-(reach // common),
            before=(start * reach - first - before) // step,
        )
        yield Residue(slice(first, None, step), slice(start, None, step // common), gathering)
