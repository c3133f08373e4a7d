"""The tensors of a forward pass or of an input gradient, in terms that hold for both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastconv.kernels.family import Operands
from fastconv.kernels.lazy import lazy
from fastconv.problem import Problem


@dataclass(frozen=True)
class Directed:
    """A pass of a problem; ``transposed`` if it is the input gradient."""

    problem: Problem
    operands: Operands
    transposed: bool

    @lazy
    def in_channels(self) -> int:
        """Channels of what is read: the sum goes over them."""
        return self.problem.out_channels if self.transposed else self.problem.in_channels

    @lazy
    def out_channels(self) -> int:
        """Channels of what is written."""
        return self.problem.in_channels if self.transposed else self.problem.out_channels

    @lazy
    def in_size(self) -> tuple[int, ...]:
        """Height and width of the images that are read; of volumes, the depth before them."""
        shape = self.problem.output_shape if self.transposed else self.problem.input_shape
        return shape[2:]

    @lazy
    def image_size(self) -> tuple[int, ...]:
        """Height and width of the images that are written; of volumes, the depth before them."""
        shape = self.problem.input_shape if self.transposed else self.problem.output_shape
        return shape[2:]

    @property
    def sides(self) -> Iterator[tuple[int, int, int, int]]:
        """Kernel, stride, dilation and leading padding of each axis, the columns last."""
        for axis in self.problem.axes:
            yield axis.kernel_size, axis.stride, axis.dilation, axis.before
