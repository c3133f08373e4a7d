"""Arithmetic that both kernels' plans share; mirrors ``device/tile.cuh``."""

from __future__ import annotations

from math import gcd

from fastconv.kernels.arithmetic import ceil_div

FAMILY = "direct"
WHY = "plain CUDA cores: any geometry and dtype, on every GPU"

STAGES = 2
"""Of every tile in shared memory: one is read while the next is loaded."""

MOST_UNROLLED_TAPS = 16

MOST_WINDOW = 128
"""Pixels of a row that a thread's taps may span: the compiler unrolls over all of them."""


def filled(size: int, tile: int) -> float:
    """The share of the tiles over ``size`` that is not beyond its end."""
    return size / (ceil_div(size, tile) * tile)


def power_of_two_for(count: int, most: int) -> int:
    """The least power of two that covers ``count``, at most ``most``."""
    power = 1
    while power < min(count, most):
        power *= 2
    return min(power, most)


def part_sizes(taps: int, step: int, vector: int) -> list[int]:
    """Ways to cut a kernel row of ``taps`` taps, ``step`` pixels apart, best first.

    Whole, if it is not too long to unroll; else, and if a whole row's pixels do not fit shared
    memory, in ever smaller parts. With vector copies all parts must start at the same alignment.
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

    Best is a distance of 16 bytes (4 banks) modulo the 128 bytes of all banks; rows stay multiples
    of ``vector`` elements. ``tight`` tiles, which would not fit shared memory otherwise, have one
    vector or none: whichever leaves the distance less in common with the 128 bytes.
    """
    step = max(vector, 4)

    def distance(padding: int) -> int:
        return (row_elements + padding) * rows * element_bytes

    if tight:
        return min((0, step), key=lambda padding: gcd(distance(padding), 128))
    paddings = range(0, 128 // element_bytes, step)
    return min(paddings, key=lambda padding: abs(distance(padding) % 128 - 16))
