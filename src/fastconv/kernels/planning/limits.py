"""Limits of the tensor-core kernels, and estimates that their planners share."""

from __future__ import annotations

from math import gcd, prod

from fastconv.kernels.arithmetic import ceil_div, shares
from fastconv.kernels.family import Declined, Operands
from fastconv.problem import Pair, Problem

LEAST_GROUP = 8  # fewest channels of a group
# The kernels count these in 32 bits, with room for tiles that reach beyond an image.
MOST_IMAGE = 2**30  # elements of an image
MOST_REACH = 2**30  # rows or columns, with padding and what tiles overhang
OVERHANG = 1024  # positions beyond an output's last that a tile may have
MOST_BATCH = 2**30
MOST_STRIDE = 2**31  # elements between weights that are neighbours along one axis
OVERLAP_LOSS = 0.25  # share of the shorter activities that overlap does not hide
# Tolerance for comparing estimates: far above the rounding error of a few additions.
ROUNDING = 1e-9

# Weight gradients: the error of the tensor core's accumulation grows with the number of MMAs, even
# with 3xTF32, and so does that of float32 totals with the number of additions. FLUSH_MMAS
# bounds the MMAs between two flushes to the workspace, FLUSH_ADDITIONS the additions to 3xTF32's
# totals.
FLUSH_MMAS = 512
FLUSH_ADDITIONS = 64
WORKSPACE_BYTES = 64 << 20
REDUCE_THREADS = 256
MOST_REDUCE_BLOCKS = 4096


def parts(operands: Operands) -> int:
    """How many TF32 parts a float32 number is multiplied as: two with 3xTF32."""
    return 2 if operands.scalar == "float" and operands.precision == "ieee" else 1


def together(*cycles: float, loss: float = OVERLAP_LOSS) -> float:
    """The time of activities that overlap: the longest, and a share of the others, ``loss``."""
    most = max(cycles)
    return most + loss * (sum(cycles) - most)


def band_rows(walks: int, rows: int, workers: int, start: float) -> int:
    """Rows of a walk, so many that all workers have about equally much to do.

    There are ``walks`` walks of ``rows`` rows, which may be cut into bands. To start one takes as
    long as ``start`` rows.
    """

    def cost(band: int) -> float:
        return ceil_div(walks * ceil_div(rows, band), workers) * (band + start)

    return min(shares(rows), key=cost)


def row_step(problem: Problem) -> int:
    """The distance of output rows that read the same input rows at different taps."""
    return problem.dilation[0] // gcd(problem.stride[0], problem.dilation[0])


def row_advance(problem: Problem) -> int:
    """The tap difference at which two output rows ``row_step`` apart read the same input row."""
    return problem.stride[0] // gcd(problem.stride[0], problem.dilation[0])


def check_reach(problem: Problem, operands: Operands) -> None:
    """Raises Declined for places that cannot be counted in 32 bits.

    :func:`check` finds images of too many elements. Kernels compute where each tap of each position
    lies, also of positions that padding or the end of a tile has outside of the image.
    """
    names = ("planes", "rows", "columns")[-len(problem.axes) :]
    for name, axis in zip(names, problem.axes, strict=True):
        overhang = (OVERHANG * axis.stride + 2 * axis.kernel_size) * axis.dilation
        reach = axis.padded_size + overhang
        if reach >= MOST_REACH:
            raise Declined(f"{reach} {name} of padded images and tiles beyond them, 2^30 and more")
    planes = 1 if problem.depth is None else problem.depth.padded_size
    if problem.batch * planes >= MOST_BATCH:
        raise Declined(f"{problem.batch * planes} images, 2^30 and more")
    if max(operands.weight_strides) >= MOST_STRIDE:
        raise Declined(f"weights that are {max(operands.weight_strides)} elements apart")


def volume_sizes(problem: Problem) -> tuple[Pair, Pair]:
    """Rows of all planes, and columns, of the input and of the output."""
    (height, width), (out_height, out_width) = problem.input_size, problem.output_size
    depth = problem.depth
    if depth is None:
        return (height, width), (out_height, out_width)
    return (depth.input_size * height, width), (depth.output_size * out_height, out_width)


def check(
    operands: Operands,
    groups: int,
    group_channels: tuple[int, int],
    in_size: tuple[int, ...],
    out_size: tuple[int, ...],
    least_group: int = LEAST_GROUP,
) -> None:
    """Raises Declined for what no tensor-core kernel takes.

    ``group_channels`` are those of one group, of the image that is read and of the other. Each of
    several groups has at least ``least_group``.
    """
    if operands.scalar == "double":
        raise Declined("float64")
    first, second = group_channels
    if groups > 1 and min(first, second) < least_group:
        raise Declined(f"groups of {first} to {second} channels, fewer than {least_group}")
    images = (first * prod(in_size), second * prod(out_size))
    if groups * max(images) >= MOST_IMAGE:
        raise Declined("images of 2^30 elements and more")
