"""Volumes that are computed in slabs, so that copies of their input stay small.

A slab is some rows of all planes of all volumes, or all rows of some volumes. Each slab has
launches of its own: one copies what it reads, and others compute it. All slabs use the same memory
and the same kernels, which take their first row and volume as arguments. How a batch is divided
changes no bits of the result; whether it can be divided depends on the layer alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from math import prod
from typing import NamedTuple

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import REGION_ALIGNMENT, Constant, Declined, Operands
from fastconv.kernels.planning.copies import volume_copy_bytes
from fastconv.kernels.planning.layers import AnyLayer, Layer, Slabs
from fastconv.problem import Padding, Problem

# Slabs of all layers of a pass: launches of more would take longer than the kernels that need no
# copy.
MOST_SLABS = 20
# The share of a weight gradient's copies that mostly leaves enough memory for its partial sums.
COPIES_SHARE = 0.7


def most_copied(layer: Layer) -> int:
    """The most bytes of copies of a volume: half of what the pass writes.

    An input gradient may write far less than it reads, which is the layer's output then. So where
    it reads more than twice as much, it is half of that.
    """
    size = layer.operands.scalar_bytes * layer.groups
    read_pixels, written_pixels = map(prod, layer.volume_sizes)
    read = size * layer.in_channels * read_pixels
    written = size * layer.out_channels * written_pixels
    return (read if layer.transposed and read > 2 * written else written) // 2


def in_slabs(layers: list[AnyLayer], rows: int = 0) -> list[AnyLayer]:
    """The layers that compute one slab, of layers that together write volumes.

    Images, and volumes whose copy is small enough, are computed as a whole. A slab has as many rows
    as it may if it has those of all volumes, or ``rows`` of each layer.

    Raises:
        Declined: there would have to be too many slabs.
    """
    first = layers[0]
    most, copied = most_copied(first), volume_copy_bytes(first)
    if first.depth is None or copied <= most:
        return layers
    placing = first.placing[0]
    whole_steps = placing.step == 1 or first.image_size[0] % placing.step == 0
    if first.s2d_factors != (1, 1) or placing.begin < 0 or not whole_steps:
        raise Declined("volumes whose rows cannot be computed in slabs")
    before, behind = _beside(layers)
    fitting = (most * first.in_size[0] // copied - 1 - before - behind) // first.stride[0] + 1
    rows = rows or fitting
    if fitting < 1 or len(layers) * ceil_div(_steps(layers), rows) > MOST_SLABS:
        raise Declined("copies of volumes that are large beside what is written")
    return _of_rows(layers, rows)


def of_few_volumes(layers: list[AnyLayer]) -> list[AnyLayer]:
    """The same of whole planes of some volumes.

    Raises:
        Declined: a volume has too large a copy.
    """
    first = layers[0]
    volumes = first.batch // first.planes
    fitting = volumes * most_copied(first) // volume_copy_bytes(first)
    if fitting < 1:
        raise Declined("copies of whole volumes")
    equal = ceil_div(volumes, ceil_div(volumes, fitting))  # or nearly, each time
    return [
        replace(
            layer,
            batch=equal * layer.planes,
            slabs=Slabs(
                (0,), (0,), layer.in_size[0], layer.out_size[0], layer.padding[0], layer.batch
            ),
        )
        for layer in layers
    ]


def _of_rows(layers: list[AnyLayer], rows: int) -> list[AnyLayer]:
    step, stride = layers[0].placing[0].step, layers[0].stride[0]
    before, behind = _beside(layers)
    starts = range(0, _steps(layers), rows)
    read = (rows - 1) * stride + 1 + before + behind
    return [
        replace(
            layer,
            in_size=(read, layer.in_size[1]),
            out_size=(rows, layer.out_size[1]),
            padding=(layer.padding[0] - before, layer.padding[1]),
            slabs=Slabs(
                tuple(start * step for start in starts),
                tuple(start * stride - before for start in starts),
                layer.in_size[0],
                layer.out_size[0],
                layer.padding[0],
                layer.batch,
            ),
        )
        for layer in layers
    ]


def _steps(layers: list[AnyLayer]) -> int:
    """Rows that the layers compute, residues of a stride one beside the other."""
    return max(layer.out_size[0] for layer in layers)


def _beside(layers: list[AnyLayer]) -> tuple[int, int]:
    """Rows that the layers read before those at the outputs' own places, and behind them."""
    before = max(layer.padding[0] for layer in layers)
    return before, max(_reach(layer) - layer.padding[0] for layer in layers)


class Slab(NamedTuple):
    """What launches are told of a slab."""

    source: int  # the first row that is copied, which may lie before the image
    row: int  # the first row of the image that is written
    first_volume: int
    volumes: int
    is_last: bool  # of its volumes, with perhaps fewer rows


def slabs_of(layer: Layer) -> list[Slab]:
    """All slabs of a layer, in order."""
    volumes = layer.batch // layer.planes
    if layer.slabs is None:
        return [Slab(0, 0, 0, volumes, True)]
    rows = list(zip(layer.slabs.sources, layer.slabs.firsts, strict=True))
    everything = layer.slabs.batch // layer.planes
    return [
        Slab(source, row, first, min(volumes, everything - first), number == len(rows) - 1)
        for first in range(0, everything, volumes)
        for number, (source, row) in enumerate(rows)
    ]


def last_rows(layer: Layer) -> int:
    """Rows of a layer's last slab."""
    if layer.slabs is None:
        return layer.out_size[0]
    return layer.slabs.out_rows - (layer.slab_count - 1) * layer.out_size[0]


def whole(layer: AnyLayer) -> AnyLayer:
    """The layer of which another one computes slabs."""
    if layer.slabs is None:
        return layer
    return replace(
        layer,
        batch=layer.slabs.batch,
        in_size=(layer.slabs.in_rows, layer.in_size[1]),
        out_size=(layer.slabs.out_rows, layer.out_size[1]),
        padding=(layer.slabs.padding, layer.padding[1]),
        slabs=None,
    )


def whole_constants(layer: Layer) -> dict[str, Constant]:
    """The constants by which kernels that read the whole input differ from those of a slab."""
    of = whole(layer)
    return {
        "in_height": of.in_size[0],
        "out_height": of.out_size[0],
        "padding_top": of.padding[0],
    }


class Part(NamedTuple):
    """A slab of a weight gradient: its problem, its place, and that of its copies.

    Copies of both tensors begin where their ``image``-th volume would be in the copies' memory.
    """

    problem: Problem
    place: Slab
    image: int = 0


def problems_in_slabs(problem: Problem, operands: Operands) -> list[list[Part]]:
    """Ways to cut a volumes' weight gradient into slabs whose copies, of both tensors, are small.

    A slab has some rows of all volumes, or all rows of some volumes; the last one may have fewer.
    Together, copies have :func:`most_of_gradient` at most, or what leaves room for partial sums
    beside them. They are those of one slab; or, in smaller slabs, of two that alternate, so that
    one can be copied beside the multiplication of the one before.

    Raises:
        Declined: there are none.
    """
    height, batch = problem.output_size[0], problem.batch
    most = most_of_gradient(problem, operands)
    found: list[list[Part]] = []
    for size, cut in ((height, _some_rows), (batch, _some_volumes)):
        counts = range(2, min(size, MOST_SLABS) + 1)
        ways = [cut(problem, ceil_div(size, count)) for count in counts]
        for kind, share in product((ways, list(map(_alternating, ways))), (1.0, COPIES_SHARE)):
            fitting = (w for w in kind if sum(copies_bytes(w, operands)) <= share * most)
            found += [way for way in islice(fitting, 1) if way not in found]
    if not found:
        raise Declined("copies of volumes that are large beside the layer's output")
    return found


def most_of_gradient(problem: Problem, operands: Operands) -> int:
    """The most bytes of copies for a weight gradient: half of the layer's output.

    Where the input is more than twice as large, it is half of that.
    """
    read, written = prod(problem.input_shape), prod(problem.output_shape)
    return (read if read > 2 * written else written) * operands.scalar_bytes // 2


def _some_rows(problem: Problem, rows: int) -> list[Part]:
    top, _, left, right = problem.padding
    stride, extent = problem.stride[0], problem.kernel_extent[0]
    height, width = problem.output_size[0], problem.input_size[1]
    found = []
    for row in range(0, height, rows):
        count = min(rows, height - row)
        slab = replace(
            problem,
            input_size=((count - 1) * stride + extent, width),
            padding=Padding(0, 0, left, right),
        )
        place = Slab(row * stride - top, row, 0, problem.batch, row + rows >= height)
        found.append(Part(slab, place))
    return found


def _some_volumes(problem: Problem, volumes: int) -> list[Part]:
    found = []
    for first in range(0, problem.batch, volumes):
        count = min(volumes, problem.batch - first)
        found.append(Part(replace(problem, batch=count), Slab(0, 0, first, count, True)))
    return found


def _alternating(parts: list[Part]) -> list[Part]:
    """The slabs with the copies of every second one behind those of the first."""
    first = parts[0].problem
    batch, volumes = first.batch, _volumes(first)
    found = []
    for number, part in enumerate(parts):
        own = _volumes(part.problem)
        behind = max(ceil_div(batch * one, other) for one, other in zip(volumes, own, strict=True))
        found.append(part._replace(image=number % 2 * behind))
    return found


def _volumes(problem: Problem) -> tuple[int, int]:
    """Elements of a volume of the input and of the output."""
    return prod(problem.input_shape[1:]), prod(problem.output_shape[1:])


def copies_bytes(parts: list[Part], operands: Operands) -> tuple[int, int]:
    """Bytes of the memory for all copies of the input, and for those of the output's gradient."""
    read, written = (
        operands.scalar_bytes
        * max((part.image + part.problem.batch) * _volumes(part.problem)[of] for part in parts)
        for of in (0, 1)
    )
    return round_up(read, REGION_ALIGNMENT), round_up(written, REGION_ALIGNMENT)


def _reach(layer: Layer) -> int:
    """Rows from the first tap's to the last one's."""
    return layer.dilation[0] * (layer.kernel[0] - 1)
