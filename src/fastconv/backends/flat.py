"""Convolutions of volumes that are convolutions of images, seen through other strides.

A pointwise axis, along which each output reads the input at its own position alone, can be taken
together with the one before it, wherever the tensors' strides allow it: without a copy, three axes
become two. So the kernels for images compute

- a kernel of (k, 1, 1): rows are planes, and columns are all positions of a plane;
- a kernel of (1, 1, k): rows are those of all planes;
- a kernel of (k, k, 1) without stride: columns are all positions of a plane, and taps that were
  neighbours are a row's width apart;
- a kernel of (1, k, k) of channels-last volumes: each plane is an image;
- a kernel as deep as the volume, of contiguous volumes, in passes that read the volume: planes are
  channels. An input gradient may add a bias, which has a number for each channel, not each plane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from fastconv.problem import Axis, Padding, Problem

View = Callable[[Tensor], Tensor]

MOST_APART = 32
"""The most elements between taps that were neighbours before a pointwise axis came between them.

A tile of neighbouring outputs reads all that lies between its taps.
"""


class Flat(NamedTuple):
    """A convolution of images, and how tensors of a convolution of volumes are seen as its own."""

    problem: Problem
    input: View
    weight: View
    output: View


def flattened(
    problem: Problem, input: Tensor, weight: Tensor, output: Tensor, transposed: bool = False
) -> Flat | None:
    """Returns the convolution of images that one of volumes is, if it is one for these tensors.

    ``input``, ``weight`` and ``output`` have the problem's shapes; any of them may be a gradient. A
    ``transposed`` pass writes the input.
    """
    depth, rows, columns = problem.axes
    spans = not transposed and _spans_depth(depth)
    if spans and _merge(input, 1, 2) and _merge(weight, 1, 2):
        return Flat(_with_planes_as_channels(problem), _flat(1), _flat(1), _only_plane)
    if depth.is_pointwise and _merge(input, 0, 2) and _merge(output, 0, 2):
        batch = problem.batch * depth.input_size
        images = replace(problem, batch=batch, depth=None)
        return Flat(images, _planes, _only_plane, _planes)
    across = _together(rows, columns)
    if across is not None and _merge(input, 3, 4) and _merge(output, 3, 4):
        return Flat(_of_axes(problem, depth, across), _flat(3), _first_column, _flat(3))
    down = _together(depth, rows)
    if down is not None and _merge(input, 2, 3) and _merge(output, 2, 3):
        return Flat(_of_axes(problem, down, columns), _flat(2), _first_row, _flat(2))
    return None


def _together(outer: Axis, inner: Axis) -> Axis | None:
    """Returns the axis of all positions along two, if the inner one is pointwise.

    Whoever goes one step along the outer axis passes all positions of the inner one. Outputs are
    evenly spaced unless the outer axis has a stride.
    """
    size = inner.input_size
    near = size == 1 or outer.is_pointwise or (outer.stride == 1 and size <= MOST_APART)
    if not (inner.is_pointwise and near):
        return None
    return outer._replace(
        input_size=outer.input_size * size,
        before=outer.before * size,
        after=outer.after * size,
        dilation=outer.dilation * size,
    )


def _spans_depth(depth: Axis) -> bool:
    """Whether there is one output plane, and its taps are all planes of the input."""
    dense = depth.kernel_size == 1 or depth.dilation == 1
    return dense and depth.padded_size == depth.input_size == depth.kernel_size


def _with_planes_as_channels(problem: Problem) -> Problem:
    planes = problem.axes[0].input_size
    return replace(problem, in_channels=problem.in_channels * planes, depth=None)


def _of_axes(problem: Problem, rows: Axis, columns: Axis) -> Problem:
    return replace(
        problem,
        input_size=(rows.input_size, columns.input_size),
        kernel_size=(rows.kernel_size, columns.kernel_size),
        stride=(rows.stride, columns.stride),
        padding=Padding(rows.before, rows.after, columns.before, columns.after),
        dilation=(rows.dilation, columns.dilation),
        depth=None,
    )


def _merge(tensor: Tensor, outer: int, inner: int) -> bool:
    """Whether the positions along two dimensions are evenly spaced in memory, one after another."""
    sizes, strides = tensor.shape, tensor.stride()
    return (
        sizes[outer] == 1
        or sizes[inner] == 1
        or strides[outer] == sizes[inner] * strides[inner]
        or 0 in sizes
    )


def _flat(dim: int) -> View:
    """Takes a dimension and the next one together: a view, of tensors that are flattened by it."""

    def view(tensor: Tensor) -> Tensor:
        shape = tensor.shape
        return tensor.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])

    return view


def _planes(tensor: Tensor) -> Tensor:
    """Takes images and their planes together."""
    return _flat(0)(tensor.transpose(1, 2))


def _only_plane(tensor: Tensor) -> Tensor:
    return tensor.select(2, 0)


def _first_row(weight: Tensor) -> Tensor:
    return weight.select(3, 0)


def _first_column(weight: Tensor) -> Tensor:
    return weight.select(4, 0)
