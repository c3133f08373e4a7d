"""What is multiplied: a weight gradient as a product of matrices, summed over positions."""

from __future__ import annotations

from dataclasses import dataclass

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu, Operands
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.gemm_pixels import layer as pixels
from fastconv.kernels.lazy import lazy
from fastconv.kernels.tensor import limits
from fastconv.problem import Problem

SPAN = 128  # bytes of a row of shared memory
MOST_POSITIONS = 2**31 - 1024  # of all images


@dataclass(frozen=True)
class Layer:
    """A weight gradient: rows are output channels, columns are input channels, tap after tap.

    Of channels-last tensors, positions are pixels of all images one after the other, and of the
    input, tensor copies have what they read at a tap. Of planes, they are an image's pixels.
    """

    problem: Problem
    operands: Operands
    pixels: pixels.Layer | None  # the forward pass, of channels-last tensors

    @property
    def span_elements(self) -> int:
        return SPAN // self.operands.scalar_bytes

    @property
    def flat(self) -> bool:
        return self.pixels is None or self.pixels.flat

    @property
    def taps(self) -> int:
        return self.problem.kernel_size[0] * self.problem.kernel_size[1]

    @property
    def tap_columns(self) -> int:
        channels = self.problem.in_channels
        return channels if self.pixels is None else round_up(channels, self.span_elements)

    @property
    def columns(self) -> int:
        return self.taps * self.tap_columns

    @lazy
    def positions(self) -> int:
        """Of an image."""
        return self.problem.output_size[0] * self.problem.output_size[1]

    def steps(self, depth: int) -> int:
        """Of a tile's sum, each of so many positions."""
        batch = self.problem.batch
        if self.pixels is None:
            return batch * ceil_div(self.positions, depth)
        return ceil_div(batch * self.positions, depth)

    @property
    def product_depth(self) -> int:
        """Positions of a product."""
        return 32 // self.operands.scalar_bytes

    @property
    def sums_bias(self) -> bool:
        """Whether products give the bias's gradient: not if copies round what they copy."""
        return self.operands.bias_grad and self.operands.scalar_bytes == 2

    @lazy
    def bytes(self) -> float:
        """Of both tensors in memory, that are used."""
        size = self.problem.out_channels * self.positions
        read = self.problem.in_channels * self.problem.input_size[0] * self.problem.input_size[1]
        for step, taps in zip(self.problem.stride, self.problem.kernel_size, strict=True):
            read = round(read * min(1.0, taps / step))
        return self.problem.batch * (size + read) * self.operands.scalar_bytes


def layer_of(problem: Problem, operands: Operands, gpu: Gpu) -> Layer:
    """The layer of a weight gradient.

    Raises:
        Declined: this kernel cannot compute it.
    """
    block.check(gpu)
    if problem.batch * problem.output_size[0] * problem.output_size[1] > MOST_POSITIONS:
        raise Declined(f"{problem.batch} images of {problem.output_size}, 2^31 pixels and more")
    # Images of one pixel lie in memory either way.
    last = operands.input_channels_last or problem.input_size == (1, 1)
    if operands.scalar_bytes == 2 and last:
        return Layer(problem, operands, pixels.layer_of(problem, operands, gpu, transposed=False))
    _check_planes(problem, operands)
    return Layer(problem, operands, None)


def _check_planes(problem: Problem, operands: Operands) -> None:
    if operands.input_channels_last or operands.output_channels_last:
        raise Declined(f"{operands.scalar}, channels-last")
    if operands.scalar == "double" or limits.parts(operands) > 1:
        raise Declined(f"{operands.scalar} as it is")
    if not operands.aligned:
        raise Declined("tensors that are not aligned")
    if problem.groups > 1:
        raise Declined(f"{problem.groups} groups")
    if problem.kernel_size != (1, 1) or problem.stride != (1, 1) or any(problem.padding):
        raise Declined("planes that taps read from elsewhere")
    channels = (problem.in_channels, problem.out_channels)
    limits.check(operands, 1, channels, problem.input_size, problem.output_size)
    plane = problem.input_size[0] * problem.input_size[1] * operands.scalar_bytes
    if plane % 16:
        raise Declined(f"planes of {plane} bytes, not a multiple of 16")
