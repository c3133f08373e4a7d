"""The largest sizes that the portable kernels take, all checked here.

Every size given to a kernel is below :data:`END`, and so is everything no larger than one of them:
kernel extents, output sizes, strides between outputs. Rounded up to tiles they still fit 32-bit
ints. Quantities that may be larger (offsets, packed weights, positions of tiles past an image's
end) have a type in device code that follows from their largest value: ``IndexTo`` in ``tile.cuh``.
"""

from __future__ import annotations

from dataclasses import replace

from fastconv.problem import Pair, Problem

END = 2**31 - 2**16  # leaves 2**16 of the 32-bit range for rounding up to tiles
MOST_BLOCKS = 2**31 - 1  # CUDA's limit on a grid's first dimension


def checked(problem: Problem) -> Problem:
    """Checks a problem's sizes, and returns the problem with idle strides and dilations reduced.

    A stride that no output uses, and the dilation of a single tap, may be larger than every other
    size: they become as small as they can be without changing the result.

    Raises:
        NotImplementedError: a size is too large; the message names it.
    """
    group_in = problem.in_channels // problem.groups
    group_out = problem.out_channels // problem.groups
    kernel = problem.kernel_size
    sides = ("depth", "height", "width")[-len(problem.axes) :]
    for axis, side in zip(problem.axes, sides, strict=True):
        require(f"a padded input {side}", axis.padded_size)
    require("a batch", problem.batch)
    require("input channels", problem.in_channels)
    require("output channels", problem.out_channels)
    planes = 1 if problem.depth is None else problem.depth.kernel_size
    taps = planes * kernel[0] * kernel[1]
    require("a group's channels times taps", max(group_in, group_out) * taps)
    problem = problem.without_idle_dilation
    depth = problem.depth
    if depth is not None:
        depth = depth._replace(stride=min(depth.stride, depth.padded_size))
    return replace(problem, stride=_strides(problem), depth=depth)


def require(what: str, value: int) -> None:
    """Raises NotImplementedError if a value, described by ``what``, is not below :data:`END`."""
    if value >= END:
        raise NotImplementedError(
            f"fastconv's portable kernels take {what} below {END} (2^31 - 2^16), but got {value}"
        )


def _strides(problem: Problem) -> Pair:
    """The strides, at most the padded size: with any larger one there is a single output."""
    height, width = map(min, problem.stride, problem.padded_size)
    return height, width
