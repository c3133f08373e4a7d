"""Ordinary layers, as networks have them: what has to be planned for every GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

from fastconv.kernels.family import Operands
from fastconv.problem import Pair, Problem

# Input channels, output channels, groups.
CHANNELS = (
    (1, 16, 1), (3, 64, 1), (3, 96, 1), (5, 128, 1), (16, 128, 1), (24, 7, 1), (48, 48, 1),
    (64, 4, 1), (64, 64, 1), (84, 11, 1), (128, 128, 1), (256, 64, 1), (320, 1, 1), (512, 512, 1),
    (2048, 256, 1), (64, 64, 64), (12, 36, 12), (96, 96, 2), (256, 256, 32), (40, 24, 8),
)  # fmt: skip
KERNELS = (
    (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (7, 7), (11, 11), (31, 31), (9, 1), (1, 9), (5, 1),
    (1, 3), (3, 9), (20, 5), (1, 60),
)  # fmt: skip
STRIDES = ((1, 1), (2, 2), (2, 1), (4, 4), (3, 5), (16, 16))
DILATIONS = ((1, 1), (2, 2), (1, 12))
SIZES = ((1, 1000), (7, 7), (14, 14), (28, 28), (56, 56), (65, 65), (224, 224), (128, 431))
BATCHES = (1, 32)
SCALARS = (("float", 4), ("fastconv::float16", 2), ("fastconv::bfloat16", 2), ("double", 8))
FORMATS = tuple(product((False, True), repeat=2))  # channels last: what is read, what is written
BOOLS = (False, True)

_AXES: tuple[tuple[Any, ...], ...] = (
    FORMATS, SCALARS, BOOLS, BOOLS, BATCHES, SIZES, DILATIONS, STRIDES, KERNELS, CHANNELS
)  # fmt: skip


def ordinary(every: int) -> Iterator[tuple[Problem, Operands]]:
    """One in so many of all combinations, or in $FASTCONV_EVERY, if that is set.

    If the number is a prime beyond the axes' lengths, all values of an axis take turns.
    """
    every = int(os.environ.get("FASTCONV_EVERY", every))
    for number in range(0, prod(map(len, _AXES)), every):
        values = []
        for axis in _AXES:
            number, index = divmod(number, len(axis))
            values.append(axis[index])
        formats, scalar, aligned, bias_grad, *geometry = values
        problem = _problem(*geometry)
        if problem is not None:
            strides = weight_strides(problem, formats[1])
            yield problem, Operands(*scalar, *formats, strides, aligned, "ieee", bias_grad)


def _problem(
    batch: int, size: Pair, dilation: Pair, stride: Pair, kernel: Pair, channels: tuple[int, ...]
) -> Problem | None:
    """Padded by half a kernel; None if even so the image is too small for it."""
    top, left = ((taps - 1) * step // 2 for taps, step in zip(kernel, dilation, strict=True))
    in_channels, out_channels, groups = channels
    shapes = (batch, in_channels, *size), (out_channels, in_channels // groups, *kernel)
    try:
        return Problem.of(*shapes, stride, (top, top, left, left), dilation, groups)
    except RuntimeError:
        return None


def weight_strides(problem: Problem, channels_last: bool) -> tuple[int, int, int, int]:
    _, depth, height, width = problem.weight_shape
    if channels_last:
        return depth * height * width, 1, width * depth, depth
    return depth * height * width, height * width, width, 1
