"""An axis of a forward pass or an input gradient, as the kernels without residue layers see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.lazy import lazy
from fastconv.problem import Axis

A = TypeVar("A", bound="PassAxis")


@dataclass(frozen=True)
class PassAxis:
    """One axis of a pass, with what it reads as inputs and what it writes as outputs.

    Families add what their kernels derive from it.
    """

    transposed: bool
    kernel: int
    stride: int
    dilation: int
    padding: int  # before the first input
    out_size: int

    @classmethod
    def of(cls: type[A], axis: Axis, transposed: bool) -> A:
        """The axis of a problem in a pass, which is ``transposed`` in an input gradient."""
        out_size = axis.input_size if transposed else axis.output_size
        return cls(transposed, axis.kernel_size, axis.stride, axis.dilation, axis.before, out_size)

    @lazy
    def fractional(self) -> bool:
        """Whether the stride is fractional: outputs lie between inputs, in an input gradient."""
        return self.transposed and self.stride > 1

    @lazy
    def over(self) -> int:
        """Outputs of a position: one for each residue of a fractional stride."""
        return self.stride if self.fractional else 1

    @lazy
    def times(self) -> int:
        """Inputs from one position to the next."""
        return 1 if self.transposed else self.stride

    @lazy
    def positions(self) -> int:
        """Positions of the axis; the last one may have outputs that do not exist."""
        return ceil_div(self.out_size, self.over)
