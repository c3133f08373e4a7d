"""The geometry of a narrow-group layer, as in ``axis.cuh``, and a thread's share of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import gcd

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.direct import limits
from fastconv.kernels.family import (
    Constant,
    Declined,
    Operands,
    depth_constants,
    problem_constants,
)
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning.axes import PassAxis
from fastconv.problem import Padding, Problem

MOST_CHANNELS = 7  # channels of a group, unless the layer is depthwise
MOST_KERNEL_COLUMNS = 64  # the code unrolls a kernel row
MOST_STRIDE = 4  # for input gradients, where a thread computes outputs of all residues
CHAIN = 512  # most products that one accumulator adds up before it is flushed
SHORT_CHAIN = 60  # fewest products between two flushes, to be worth their time


def require(what: str, value: int) -> None:
    """Raises Declined if a count, described by ``what``, is too large for 32-bit ints."""
    if value >= limits.END:
        raise Declined(f"{value} {what}, {limits.END} and more")


@dataclass(frozen=True)
class Axis(PassAxis):
    """One axis of the cross-correlation; mirrors ``Axis`` in ``axis.cuh``."""

    @lazy
    def out_step(self) -> int:
        """Distance between a thread's outputs."""
        return self.dilation // (1 if self.transposed else gcd(self.stride, self.dilation))

    @lazy
    def step(self) -> int:
        """Elements of the window from one of a thread's outputs to the next."""
        return 1 if self.transposed else self.stride // gcd(self.stride, self.dilation)

    @lazy
    def origin(self) -> int:
        """Input position of the first output's window."""
        if self.fractional:
            return (self.padding - (self.kernel - 1)) // self.stride
        if self.transposed:
            return self.padding - self.dilation * (self.kernel - 1)
        return -self.padding

    def window(self, outputs: int) -> int:
        """Elements that a thread with this many outputs reads."""
        if self.fractional:
            return (outputs - 1 + self.padding) // self.stride - self.origin + 1
        return (outputs - 1) * self.step + self.kernel

    def halo(self, outputs: int) -> int:
        """Span of input positions that this many neighbouring outputs read."""
        if self.fractional:
            return self.window(outputs)
        return (outputs - 1) * self.times + (self.kernel - 1) * self.dilation + 1

    def threads(self, outputs: int) -> int:
        """Threads along the axis if each computes this many outputs."""
        return ceil_div(self.out_size, outputs * self.out_step) * self.out_step

    # Walks along the depth of volumes, see depth.cuh.

    @lazy
    def read(self) -> int:
        """Input positions that an output reads at most."""
        return ceil_div(self.kernel, self.over)

    @lazy
    def advance(self) -> int:
        """Input positions that the next output of a walk reads besides."""
        return 1 if self.fractional else min(self.step, self.kernel)

    @lazy
    def walked(self) -> int:
        """Outputs of the longest walk: a residue's."""
        return ceil_div(self.out_size, self.out_step)

    def walks(self, outputs: int) -> int:
        """Walks of at most this many outputs."""
        return min(self.out_step, self.out_size) * ceil_div(self.walked, outputs)

    def loaded(self, outputs: int) -> float:
        """Input positions that a walk of this many outputs loads, on average."""
        return self.read + (outputs - 1) * self.advance / self.over


def _column_as_row(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Turns images of one column into images of one row, which have the same layout in memory.

    A thread computes neighbours of a row, and copies them at once: a column would give it just one.
    """
    (height, width), (out_height, out_width) = problem.input_size, problem.output_size
    is_column = width == out_width == 1 and max(height, out_height) > 1
    if not is_column or problem.kernel_size[0] > MOST_KERNEL_COLUMNS:
        return problem, operands
    top, bottom, left, right = problem.padding
    *others, row, column = operands.weight_strides
    turned = replace(
        problem,
        input_size=(width, height),
        kernel_size=problem.kernel_size[::-1],
        stride=problem.stride[::-1],
        padding=Padding(left, right, top, bottom),
        dilation=problem.dilation[::-1],
    )
    return turned, replace(operands, weight_strides=(*others, column, row))


@dataclass(frozen=True)
class Layer:
    """A forward or backward pass of a layer whose groups are narrow."""

    problem: Problem
    operands: Operands
    transposed: bool

    @staticmethod
    def of(problem: Problem, operands: Operands, transposed: bool) -> Layer:
        """A forward convolution or an input gradient.

        Raises:
            Declined: these kernels do not take it.
        """
        return Layer._of(*_column_as_row(problem, operands), transposed)

    @staticmethod
    def of_weight_grad(problem: Problem, operands: Operands) -> Layer:
        """A weight gradient.

        Images of one column stay as they are: blocks divide the rows of an image among themselves,
        and an image of one row would leave nothing to divide.

        Raises:
            Declined: these kernels do not take it.
        """
        return Layer._of(problem, operands, transposed=False)

    @staticmethod
    def _of(problem: Problem, operands: Operands, transposed: bool) -> Layer:
        layer = Layer(limits.checked(problem), operands, transposed)
        layer._check_channels()
        if operands.input_channels_last != operands.output_channels_last:
            raise Declined("tensors of different memory formats")
        if layer.columns.kernel > MOST_KERNEL_COLUMNS:
            raise Declined(f"kernels of more than {MOST_KERNEL_COLUMNS} columns")
        for axis in (layer.rows, layer.columns):
            if axis.fractional and axis.dilation > 1:
                raise Declined("strides and dilations at once")
            if axis.fractional and axis.stride > MOST_STRIDE:
                raise Declined(f"strides of more than {MOST_STRIDE}")
        if layer.planes.fractional and layer.planes.dilation > 1:
            raise Declined("strides and dilations at once")
        return layer

    def _check_channels(self) -> None:
        if self.problem.groups == 1:
            raise Declined("a single group")
        depthwise = self.problem.in_channels == self.problem.groups
        if not depthwise and max(self.group_in, self.group_out) > MOST_CHANNELS:
            raise Declined(f"groups of more than {MOST_CHANNELS} channels")

    @lazy
    def _of_group(self) -> tuple[int, int]:
        problem = self.problem
        return problem.in_channels // problem.groups, problem.out_channels // problem.groups

    @lazy
    def group_in(self) -> int:
        return self._of_group[self.transposed]

    @lazy
    def group_out(self) -> int:
        return self._of_group[not self.transposed]

    @lazy
    def in_size(self) -> tuple[int, int]:
        return self.problem.output_size if self.transposed else self.problem.input_size

    @lazy
    def out_size(self) -> tuple[int, int]:
        return self.problem.input_size if self.transposed else self.problem.output_size

    @lazy
    def rows(self) -> Axis:
        return Axis.of(self.problem.axes[-2], self.transposed)

    @lazy
    def columns(self) -> Axis:
        return Axis.of(self.problem.axes[-1], self.transposed)

    @lazy
    def is_volume(self) -> bool:
        return self.problem.depth is not None

    @lazy
    def planes(self) -> Axis:
        """The depth; that of an image is a single plane."""
        depth = self.problem.depth
        if depth is None:
            return Axis(self.transposed, 1, 1, 1, 0, 1)
        return Axis.of(depth, self.transposed)

    @lazy
    def flush_rows(self) -> int:
        """Kernel rows after which accumulators are flushed to the second level."""
        best = max(SHORT_CHAIN, math.isqrt(self.terms))
        return min(self.rows.kernel, ceil_div(best, self.columns.kernel))

    @lazy
    def terms(self) -> int:
        """Input channels times taps of an output; a fractional stride skips some of them."""
        return self.group_in * self.planes.kernel * self.rows.kernel * self.columns.kernel

    @lazy
    def two_level(self) -> bool:
        """Whether sums are so long that accumulators are flushed to a second level."""
        return self.terms > CHAIN

    @lazy
    def products(self) -> float:
        """Products of an output that are computed, on average."""
        return self.terms / (self.planes.over * self.rows.over * self.columns.over)

    @lazy
    def tap_planes(self) -> float:
        """Planes of the kernel that an output has, on average; those of padding among them."""
        return self.planes.kernel / self.planes.over

    @lazy
    def most_accumulators(self) -> int:
        """The most outputs of a thread, for the registers that their accumulators take."""
        return 32 // (1 + self.two_level) // (1 + (self.operands.scalar_bytes == 8))

    def constants(self) -> dict[str, Constant]:
        """Constants that the kernels of both layouts are compiled with."""
        problem, operands = self.problem, self.operands
        return {
            "Scalar": operands.scalar,
            "transposed": self.transposed,
            "groups": problem.groups,
            "group_in": self.group_in,
            "group_out": self.group_out,
            "in_height": self.in_size[0],
            "in_width": self.in_size[1],
            "out_height": self.out_size[0],
            "out_width": self.out_size[1],
            **problem_constants(problem, operands),
            **depth_constants(problem, operands, self.transposed),
            "two_level": self.two_level,
            "flush_rows": self.flush_rows,
        }
