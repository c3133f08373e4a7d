"""Arithmetic that the plans of both portable kernels share; mirrors ``device/tile.cuh``."""

from __future__ import annotations

from math import gcd

from fastconv.kernels.arithmetic import ceil_div

FAMILY = "direct"
WHY = "plain CUDA cores: any geometry and dtype, on every GPU"

STAGES = 2
"""Buffers of every tile in shared memory: one is read while the next is loaded."""

MOST_UNROLLED_TAPS = 16
"""The longest kernel row, in taps, that is unrolled whole; longer rows are cut into parts."""

MOST_WINDOW = 128
"""The most pixels of a row that a thread's taps may span: the compiler unrolls over all of them."""


def filled(size: int, tile: int) -> float:
    """The fraction of the tiles over ``size`` that lies within it."""
    return size / (ceil_div(size, tile) * tile)


def power_of_two_for(count: int, most: int) -> int:
    """The least power of two that covers ``count``, at most ``most``."""
    power = 1
    while power < min(count, most):
        power *= 2
    return min(power, most)


def part_sizes(taps: int, step: int, vector: int) -> list[int]:
    """Sizes of parts, in taps, to cut a kernel row into: best first, down to a single tap.

    The row has ``taps`` taps, ``step`` pixels apart. The first size is the whole row if that is not
    too long to unroll; smaller ones are for rows whose pixels do not fit shared memory. With vector
    copies of ``vector`` pixels all parts must start at the same alignment.
    """
    count = ceil_div(taps, MOST_UNROLLED_TAPS)
    sizes = []
    while ceil_div(taps, count) > 1:
        size = ceil_div(taps, count)
        while count > 1 and size * step % vector != 0:
            size += 1
        sizes.append(size)
        count *= 2
    return [*sizes, 1]


def pitch_padding(
    row_elements: int, rows: int, element_bytes: int, vector: int, tight: bool
) -> int:
    """Elements to add to a tile's rows, so that lanes ``rows`` rows apart hit different banks.

    The best distance between these lanes is 16 bytes (4 banks) modulo the 128 bytes of all banks;
    rows stay multiples of ``vector`` elements. ``tight`` tiles, which would otherwise not fit
    shared memory, get one vector or none: whichever leaves the distance a smaller common divisor
    with the 128 bytes.
    """
    step = max(vector, 4)

    def distance(padding: int) -> int:
        return (row_elements + padding) * rows * element_bytes

    if tight:
        return min((0, step), key=lambda padding: gcd(distance(padding), 128))
    paddings = range(0, 128 // element_bytes, step)
    return min(paddings, key=lambda padding: abs(distance(padding) % 128 - 16))
