"""The weight gradient as the kernel sees it: alignment, interleaving and precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fastconv.kernels.arithmetic import round_up
from fastconv.kernels.family import Operands
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.depth import of_planes
from fastconv.problem import Problem

BODY_COLUMNS = 8  # columns that a consumer takes at a time
LANES = 4  # lanes of a warp that share the members of a channel
MOST_PIXELS = 2**31  # pixels of the planes that a tensor map takes for one row
MOST_FILTERS = 2**28  # filters, each of which has an entry in a table


@dataclass(frozen=True)
class Layer:
    """A weight gradient, and what follows from it for all tiles."""

    problem: Problem
    operands: Operands
    scaled_fp16: bool  # float32 multiplied as scaled fp16, see scale.cuh
    # Every plane_classes-th plane of grad_output begins at the same distance from a multiple of 16
    # bytes. A tile has planes of one such class.
    plane_classes: int = 1
    # The problem of volumes that this is: ``problem`` is that of their output planes as images,
    # where input channels are counted once for each tap of the depth.
    volumes: Problem | None = None

    @classmethod
    def of(cls, problem: Problem, operands: Operands, scaled_fp16: bool) -> Layer:
        """The weight gradient of a problem of images or volumes."""
        volumes = None if problem.depth is None else problem
        return cls(of_planes(problem), operands, scaled_fp16, volumes=volumes)

    @lazy
    def parts(self) -> int:
        return limits.parts(self.operands)

    @lazy
    def mmas(self) -> int:
        """MMAs for each pair of operands: three with 3xTF32."""
        return 3 if self.parts == 2 else 1

    @lazy
    def vector(self) -> int:
        return self.operands.vector

    @lazy
    def interleave(self) -> int:
        """Members of a K vector: elements in 16 bytes of an MMA operand."""
        return 8 if self.scaled_fp16 else self.vector

    @lazy
    def lane_members(self) -> int:
        return self.interleave // LANES

    @lazy
    def group_in(self) -> int:
        return self.problem.in_channels // self.problem.groups

    @lazy
    def group_out(self) -> int:
        return self.problem.out_channels // self.problem.groups

    @lazy
    def class_out(self) -> int:
        """Output channels of a group whose planes are in one class."""
        return self.group_out // self.plane_classes

    @lazy
    def channels(self) -> int:
        """Channels of both tensors."""
        return self.problem.in_channels + self.problem.out_channels

    @lazy
    def tables_bytes(self) -> int:
        """Bytes of the tables of channels and filters that scaled fp16 needs."""
        return round_up(4 * (2 * self.channels + self.problem.out_channels * self.group_in), 16)

    @lazy
    def row_step(self) -> int:
        return limits.row_step(self.problem)

    @lazy
    def row_advance(self) -> int:
        return limits.row_advance(self.problem)

    @lazy
    def grad_vector(self) -> int:
        """Elements of a copy of grad_output."""
        height, width = self.problem.output_size
        if self.operands.output_channels_last:
            return self.operands.widest_vector(self.group_out)
        # Rows with the same number, of a class, begin equally far from a multiple of 16 bytes.
        if self.operands.aligned and self.plane_classes * height * width % self.vector == 0:
            return self.vector
        return self.operands.widest_vector(width)

    @lazy
    def lead(self) -> int:
        """The most columns by which the copies of a row begin early."""
        if self.grad_vector < self.vector or self.operands.output_channels_last:
            return 0
        return self.vector - math.gcd(self.vector, self.problem.output_size[1])

    @lazy
    def shifted(self) -> bool:
        """Whether rows of one stage begin at different distances from multiples of 16 bytes."""
        return not self.operands.output_channels_last and self.grad_vector < self.vector

    @lazy
    def has_boxes(self) -> bool:
        """Whether a TMA box can bring a stage of grad_output, of some width."""
        return (
            self.volumes is None
            and not self.operands.output_channels_last
            and self.problem.batch % self.lane_members == 0
            and self.group_out % self.plane_classes == 0
            and self.grad_vector == self.vector
            and self.plane_classes * math.prod(self.problem.output_size) < MOST_PIXELS
        )

    @lazy
    def row_columns(self) -> int:
        """Columns of an output row that are multiplied."""
        return round_up(self.problem.output_size[1] + self.lead, BODY_COLUMNS)


def takes_scaled_fp16(problem: Problem, operands: Operands) -> bool:
    """Whether float32 can be multiplied as scaled fp16."""
    contiguous = not (operands.input_channels_last or operands.output_channels_last)
    taps = 1 if problem.depth is None else problem.depth.kernel_size
    filters = problem.out_channels * (problem.in_channels // problem.groups) * taps
    return operands.scalar == "float" and contiguous and filters < MOST_FILTERS


def in_plane_classes(layer: Layer) -> Layer | None:
    """The layer with planes in as many classes as begin at different distances from 16 bytes.

    None where TMA copies rows without such classes, or where no TMA box brings several planes.
    """
    classes = layer.vector // math.gcd(layer.vector, math.prod(layer.problem.output_size))
    found = replace(layer, plane_classes=classes)
    return found if layer.shifted and layer.operands.aligned and found.has_boxes else None
