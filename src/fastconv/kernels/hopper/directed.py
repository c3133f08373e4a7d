"""The tensors of a forward pass or of an input gradient, in terms that hold for both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastconv.kernels.family import Operands
from fastconv.kernels.lazy import lazy
from fastconv.problem import Pair, Problem


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
    def in_size(self) -> Pair:
        """Height and width of the images that are read."""
        return self.problem.output_size if self.transposed else self.problem.input_size

    @lazy
    def image_size(self) -> Pair:
        """Height and width of the images that are written."""
        return self.problem.input_size if self.transposed else self.problem.output_size

    @property
    def sides(self) -> Iterator[tuple[int, int, int, int]]:
        """Kernel, stride, dilation and leading padding of the rows, then of the columns."""
        problem = self.problem
        padding = (problem.padding.top, problem.padding.left)
        return zip(problem.kernel_size, problem.stride, problem.dilation, padding, strict=True)
