"""What the plans of kernels on tensor cores share: what they do not take, and small estimates."""

from __future__ import annotations

from math import gcd

from fastconv.kernels.arithmetic import ceil_div, shares
from fastconv.kernels.family import Declined, Operands
from fastconv.problem import Problem

LEAST_GROUP = 8  # channels
# What kernels count in 32 bits, with room for tiles that reach beyond an image.
MOST_IMAGE = 2**30  # elements
MOST_REACH = 2**30  # rows or columns, padding and what tiles overhang included
OVERHANG = 1024  # positions of an output beyond its last one that a tile may have
MOST_BATCH = 2**30
MOST_STRIDE = 2**31  # of weights in memory
OVERLAP_LOSS = 0.25
ROUNDING = 1e-9  # of estimates: far more than sums of a few numbers have

# Weight gradients. The error of the tensor core's sums grows with the number of products added, in
# float32's too; so does that of totals that are added to, each level of which rounds.
FLUSH_PRODUCTS = 512
FLUSH_ADDITIONS = 64
WORKSPACE_BYTES = 64 << 20
REDUCE_THREADS = 256
MOST_REDUCE_BLOCKS = 4096
# Input channels and taps, below both of which the portable kernels take far longer.
LEAST_PORTABLE_CHANNELS = 8
LEAST_PORTABLE_TAPS = 64
FEW_CHANNELS_LOSS = (1.6, 5.0)  # below the first, below both


def parts(operands: Operands) -> int:
    """How many TF32 numbers a float32 number is multiplied as."""
    return 2 if operands.scalar == "float" and operands.precision == "ieee" else 1


def together(*cycles: float, loss: float = OVERLAP_LOSS) -> float:
    """Of what goes on at the same time, but not quite without getting into each other's way."""
    most = max(cycles)
    return most + loss * (sum(cycles) - most)


def band_rows(walks: int, rows: int, workers: int, start: float) -> int:
    """Rows of a walk: so many that all workers have equally much to do.

    Each of ``walks`` goes down so many ``rows``, and may be cut into bands; to ``start`` one takes
    as long as so many rows.
    """

    def cost(band: int) -> float:
        return ceil_div(walks * ceil_div(rows, band), workers) * (band + start)

    return min(shares(rows), key=cost)


def portable_loss(problem: Problem) -> float:
    """How many times longer the portable kernels take for a weight gradient of so few channels."""
    if problem.in_channels // problem.groups >= LEAST_PORTABLE_CHANNELS:
        return 1.0
    taps = problem.kernel_size[0] * problem.kernel_size[1]
    return FEW_CHANNELS_LOSS[taps < LEAST_PORTABLE_TAPS]


def row_step(problem: Problem) -> int:
    """How far apart output rows are that read the same input rows, one tap later or more."""
    return problem.dilation[0] // gcd(problem.stride[0], problem.dilation[0])


def row_advance(problem: Problem) -> int:
    """How many taps later that is."""
    return problem.stride[0] // gcd(problem.stride[0], problem.dilation[0])


def check_reach(problem: Problem, operands: Operands) -> None:
    """Raises Declined for places that cannot be counted in 32 bits.

    Images of too many elements are found by :func:`check`. Kernels compute where each tap of each
    position lies, also of those that padding or the end of a tile has outside of the image.
    """
    sides = zip(
        ("rows", "columns"),
        problem.padded_size,
        problem.kernel_size,
        problem.stride,
        problem.dilation,
        strict=True,
    )
    for name, padded, taps, stride, dilation in sides:
        reach = padded + (OVERHANG * stride + 2 * taps) * dilation
        if reach >= MOST_REACH:
            raise Declined(f"{reach} {name} of padded images and tiles beyond them, 2^30 and more")
    if problem.batch >= MOST_BATCH:
        raise Declined(f"{problem.batch} images, 2^30 and more")
    if max(operands.weight_strides) >= MOST_STRIDE:
        raise Declined(f"weights that are {max(operands.weight_strides)} elements apart")


def check(
    operands: Operands,
    groups: int,
    group_channels: tuple[int, int],
    in_size: tuple[int, int],
    out_size: tuple[int, int],
) -> None:
    """Raises Declined for what no kernel here takes.

    ``group_channels`` are a group's, of the image that is read and of the other.
    """
    if operands.scalar == "double":
        raise Declined("float64")
    first, second = group_channels
    if groups > 1 and min(first, second) < LEAST_GROUP:
        raise Declined(f"groups of {first} to {second} channels, fewer than {LEAST_GROUP}")
    images = (first * in_size[0] * in_size[1], second * out_size[0] * out_size[1])
    if groups * max(images) >= MOST_IMAGE:
        raise Declined("images of 2^30 elements and more")
