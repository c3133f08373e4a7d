"""How far the portable kernels count: the one place where the sizes that they take are checked.

Every number that a kernel is told is below :data:`END`, and with it whatever is no larger than one
of them: kernel extents, output sizes, strides between outputs. Rounded up to tiles they are still
32-bit ints. What grows beyond (offsets, packed weights, positions that tiles reach past an image's
end) has a type in device code that follows from its largest value: ``IndexTo`` in ``tile.cuh``.
"""

from __future__ import annotations

from dataclasses import replace

from fastconv.problem import Pair, Problem

END = 2**31 - 2**16
MOST_BLOCKS = 2**31 - 1  # of a launch


def checked(problem: Problem) -> Problem:
    """The problem, in numbers that the kernels can hold.

    A stride that is never taken, and the dilation of a single tap, may be larger than all the rest:
    they become as small as they can be without a change of the result.

    Raises:
        NotImplementedError: a size is too large; the message names it.
    """
    group_in = problem.in_channels // problem.groups
    group_out = problem.out_channels // problem.groups
    kernel = problem.kernel_size
    for axis, side in enumerate(("height", "width")):
        require(f"a padded input {side}", problem.padded_size[axis])
    require("a batch", problem.batch)
    require("input channels", problem.in_channels)
    require("output channels", problem.out_channels)
    require("a group's channels times taps", max(group_in, group_out) * kernel[0] * kernel[1])
    return replace(problem.without_idle_dilation, stride=_strides(problem))


def require(what: str, value: int) -> None:
    """Raises NotImplementedError if there is too much of something for 32-bit ints."""
    if value >= END:
        raise NotImplementedError(
            f"fastconv's portable kernels take {what} below {END} (2^31 - 2^16), but got {value}"
        )


def _strides(problem: Problem) -> Pair:
    """At most the padded size: beyond, there is one output anyway."""
    height, width = map(min, problem.stride, problem.padded_size)
    return height, width
