"""What is multiplied: a forward pass or an input gradient as a product of matrices.

Decided from the layer alone, as all that decides the order of a sum: taps, then channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Declined, Gpu, Operands
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.directed import Directed
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.problem import Pair, Problem

# What tensor copies can express of images: where they begin, and how far taps lie from there.
CORNERS = range(-128, 128)
MOST_OFFSET = 255
MOST_STEP = 8
MOST_PACKED = 2**33  # weights: threads count them by eights, and on by as many as there are
MOST_PHASES = 128  # along an axis: each is looked at, most of them for nothing


@dataclass(frozen=True)
class Patches:
    """How columns of the product lie in the images, if those are cut into patches.

    Of each of a patch's ``rows``, ``width`` columns are neighbours; the next row is ``pitch`` away.
    """

    rows: int
    width: int
    pitch: int


@dataclass(frozen=True)
class Layer(Directed):
    """A pass as a product: what it reads, its taps, its positions, what it writes."""

    patches: Patches | None = None

    @property
    def phases(self) -> Pair:
        """Of a position: pixels that it stands for, along both axes."""
        return self.problem.stride if self.transposed else (1, 1)

    @property
    def positions(self) -> Pair:
        """Of an image."""
        rows, columns = map(ceil_div, self.image_size, self.phases)
        return rows, columns

    @property
    def steps(self) -> Pair:
        """Between what neighbouring positions read."""
        return (1, 1) if self.transposed else self.problem.stride

    @lazy
    def reads(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """For both axes, for each phase: how far from its position each of its taps reads."""
        rows, columns = (self._reads_of_axis(*side) for side in self.sides)
        return rows, columns

    def _reads_of_axis(
        self, taps: int, stride: int, dilation: int, padding: int
    ) -> tuple[tuple[int, ...], ...]:
        if not self.transposed:
            return (tuple(tap * dilation - padding for tap in range(taps)),)
        places = ([r + padding - dilation * tap for tap in range(taps)] for r in range(stride))
        return tuple(tuple(at // stride for at in of if at % stride == 0) for of in places)

    @lazy
    def lower(self) -> Pair:
        """Where the first position reads its first tap, rows and columns."""
        rows, columns = (min(min(of, default=0) for of in axis) for axis in self.reads)
        return rows, columns

    @property
    def taps(self) -> int:
        """Of all phases together."""
        rows, columns = (sum(map(len, axis)) for axis in self.reads)
        return rows * columns

    @property
    def flat(self) -> bool:
        """Whether all images are one matrix: a position reads the pixel that it is."""
        problem = self.problem
        return problem.kernel_size == problem.stride == (1, 1) and not any(problem.padding)

    @property
    def dense(self) -> bool:
        """Whether positions lie in the output side by side."""
        return self.phases == (1, 1) and self.patches is None

    @property
    def packs(self) -> bool:
        """Whether weights have to be moved, so that neighbours are input channels."""
        out, in_, rows, columns = self.operands.weight_strides
        kernel = self.problem.kernel_size
        sides = [out, *(s for s, n in ((rows, kernel[0]), (columns, kernel[1])) if n > 1)]
        return in_ != 1 or any(stride % self.operands.vector for stride in sides)

    @property
    def weights(self) -> int:
        return math.prod(self.problem.weight_shape)

    @property
    def weight_strides(self) -> tuple[int, int, int, int]:
        """Of the weights that are mapped."""
        channels, (height, width) = self.problem.in_channels, self.problem.kernel_size
        dense = (height * width * channels, 1, width * channels, channels)
        if self.packs:
            return dense
        out, in_, rows, columns = self.operands.weight_strides
        # Along an axis of one tap, no stride is needed, and what is given may be any number.
        return out, in_, rows if height > 1 else dense[2], columns if width > 1 else dense[3]

    @lazy
    def upper(self) -> Pair:
        """How far beyond the last pixel the last position reads its first tap."""
        sides = zip(self.lower, self.positions, self.steps, self.in_size, strict=True)
        rows, columns = (at + (count - 1) * step + 1 - size for at, count, step, size in sides)
        return rows, columns

    @lazy
    def image_bytes(self) -> float:
        """That an image has in memory, read and written; of the input, what is used."""
        used = 1.0
        for step, taps in zip(self.steps, self.problem.kernel_size, strict=True):
            used *= min(1.0, taps / step)
        read = self.in_channels * self.in_size[0] * self.in_size[1] * used
        outputs = self.out_channels * self.image_size[0] * self.image_size[1]
        return 2 * (read + outputs * (1 + self.operands.epilogue.residual))


def layer_of(problem: Problem, operands: Operands, gpu: Gpu, transposed: bool) -> Layer:
    """The layer of a pass.

    Raises:
        Declined: this kernel cannot compute it.
    """
    block.check(gpu)
    layer = _layer(problem, operands, transposed)
    problem, operands = layer.problem, layer.operands
    if operands.scalar_bytes != 2:
        raise Declined(f"{operands.scalar}")
    # Images of one pixel lie in memory either way.
    if not (operands.input_channels_last or layer.in_size == (1, 1)):
        raise Declined("contiguous input")
    if not (operands.output_channels_last or layer.image_size == (1, 1)):
        raise Declined("contiguous output")
    if not operands.aligned:
        raise Declined("tensors that are not aligned")
    if problem.groups > 1:
        raise Declined(f"{problem.groups} groups")
    channels = (layer.in_channels, layer.out_channels)
    limits.check(operands, 1, channels, layer.in_size, layer.image_size)
    for count in channels:
        if count % operands.vector:
            raise Declined(f"{count} channels, not a multiple of {operands.vector}")
    if layer.packs and layer.weights >= MOST_PACKED:
        raise Declined(f"{layer.weights} weights that have to be packed")
    if not layer.flat:
        _check_corners(layer)
    return layer


def _layer(problem: Problem, operands: Operands, transposed: bool) -> Layer:
    """As it is; or the gradient of few channels that patches have, as that of a pointwise layer.

    There, all pixels of a patch have the same position, and each is one tap's: channels of all taps
    are columns of one product.
    """
    height, width = problem.kernel_size
    channels, columns = problem.in_channels, height * width * problem.in_channels
    dense = (columns, 1, width * channels, channels)
    sizes = zip(problem.input_size, problem.stride, strict=True)
    is_cut = problem.stride == problem.kernel_size and not any(problem.padding)
    if (
        not (transposed and is_cut and problem.groups == 1 and operands.weight_strides == dense)
        # The layer's own images, of which a patch may be all: not the pointwise layer's.
        or not operands.output_channels_last
        or channels % operands.vector == 0
        or columns % operands.vector
        or width * channels % 2
        or any(size % step for size, step in sizes)
    ):
        return Layer(problem, operands, transposed)
    pointwise = Problem.of(
        (problem.batch, columns, *problem.output_size),
        (problem.out_channels, columns, 1, 1),
        (1, 1),
        (0, 0, 0, 0),
        (1, 1),
        1,
    )
    patches = Patches(height, width * channels, problem.input_size[1] * channels)
    return Layer(pointwise, replace(operands, weight_strides=(columns, 1, 1, 1)), True, patches)


def _check_corners(layer: Layer) -> None:
    if max(layer.steps) > MOST_STEP or max(layer.phases) > MOST_PHASES:
        raise Declined(f"a stride of {layer.problem.stride}")
    for lower, upper in zip(layer.lower, layer.upper, strict=True):
        if lower not in CORNERS or upper not in CORNERS:
            raise Declined(f"images read from {lower} to {upper} beyond their ends")
    for axis, lower in zip(layer.reads, layer.lower, strict=True):
        reach = max(max(of, default=lower) for of in axis) - lower
        if reach > MOST_OFFSET:
            raise Declined(f"taps that are {reach} pixels apart")
