"""The depth of a layer: how planes of volumes are images, and taps of the depth input channels."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fastconv.kernels.family import Constant
from fastconv.problem import Axis, Problem


def of_planes(problem: Problem) -> Problem:
    """The problem of images that a weight gradient's tiles are chosen for.

    Each output plane of a volume is an image, and the planes that it reads are further channels.
    """
    depth = problem.depth
    if depth is None:
        return problem
    return replace(
        problem,
        batch=problem.batch * depth.output_size,
        in_channels=problem.in_channels * depth.kernel_size,
        depth=None,
    )


class Depth(NamedTuple):
    """A layer's planes: each one that it writes is an image, whose channels are those of its taps.

    Plane z reads planes ``stride * z + dilation * tap - padding``. It is written at ``step * z +
    at`` of the volume's ``image_size`` planes. A transposed layer's first tap is the kernel's
    ``last_tap``, the next is ``tap_step`` before it.
    """

    in_size: int
    out_size: int
    taps: int
    stride: int
    dilation: int
    padding: int
    image_size: int
    step: int = 1
    at: int = 0
    last_tap: int = 0
    tap_step: int = 1

    @classmethod
    def of(cls, axis: Axis) -> Depth:
        """The depth of a forward convolution."""
        planes = axis.output_size
        return cls(
            axis.input_size,
            planes,
            axis.kernel_size,
            axis.stride,
            axis.dilation,
            axis.before,
            planes,
        )

    @property
    def is_pointwise(self) -> bool:
        """Whether each plane reads the one at its own place, and nothing else."""
        return self.taps == self.stride == self.step == 1

    @property
    def words(self) -> str:
        """What the key of a measured choice says of it."""
        return (
            f"depth={self.in_size}-{self.out_size} taps={self.taps} stride={self.stride} "
            f"dilation={self.dilation} padding={self.padding} step={self.step}"
        )

    def constants(self, weight_stride: int) -> dict[str, Constant]:
        """The constants of a layer of volumes, which others lack (device/tensor/depth.cuh)."""
        return {
            "in_depth": self.in_size,
            "out_depth": self.out_size,
            "kernel_depth": self.taps,
            "stride_depth": self.stride,
            "dilation_depth": self.dilation,
            "padding_front": self.padding,
            "weight_stride_depth": weight_stride,
            "image_depth": self.image_size,
            "out_step_depth": self.step,
            "plane_at": self.at,
            "last_tap_plane": self.last_tap,
            "tap_step_depth": self.tap_step,
        }
