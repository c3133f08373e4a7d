"""Implicit GEMM of channels-last tensors: positions, taps, and the input's im2col map.

The forward and input-gradient kernel ``implicit_gemm_nhwc`` computes such layers, and the weight
gradient ``wgrad_implicit_gemm`` loads the input of one. The order in which a sum is added up (taps,
then channels) depends on the layer alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Declined, Gpu, Im2colMap, Operands, TensorMap
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.directed import Directed
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.problem import Pair, Problem

SPAN = 128  # bytes of channels of a step of K, the widest swizzle
# Limits of an im2col tensor map of images: the corners of the bounding box, the offset of a tap,
# and the step from a position to the next.
CORNERS = range(-128, 128)
MOST_OFFSET = 255
MOST_STEP = 8
MOST_PACKED = 2**30  # vectors of weights: the packing kernel counts them in 32 bits
MOST_RESIDUES = 128  # along an axis; a block visits each of them, even those without taps


@dataclass(frozen=True)
class Patches:
    """How the columns of N lie in images that are cut into patches.

    ``width`` columns are neighbours in each of a patch's ``rows``, which are ``pitch`` elements
    apart.
    """

    rows: int
    width: int
    pitch: int


@dataclass(frozen=True)
class Layer(Directed):
    """A pass as an implicit GEMM: M is positions, N output channels, K taps and input channels."""

    patches: Patches | None = None

    @property
    def depth(self) -> int:
        """Channels of a step of K, which is also the columns of a TMA box of outputs."""
        return SPAN // self.operands.scalar_bytes

    @property
    def loaded_scalar(self) -> str:
        """The element type of the tensor maps that load: TMA rounds float32 to TF32."""
        scalar = self.operands.scalar
        return "tf32" if scalar == "float" else scalar

    @property
    def residues(self) -> Pair:
        """Pixels of a position along both axes: one for each residue of a gradient's stride."""
        return self.problem.stride if self.transposed else (1, 1)

    @property
    def positions(self) -> Pair:
        """Positions of an image, along both axes."""
        rows, columns = map(ceil_div, self.image_size, self.residues)
        return rows, columns

    @property
    def steps(self) -> Pair:
        """Distance of what neighbouring positions read, along both axes."""
        return (1, 1) if self.transposed else self.problem.stride

    @lazy
    def reads(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """For both axes and each residue: how far from its position each of its taps reads."""
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
        """Row and column where the first position reads its first tap."""
        rows, columns = (min(min(of, default=0) for of in axis) for axis in self.reads)
        return rows, columns

    @property
    def taps(self) -> int:
        """Taps of all residues together."""
        rows, columns = (sum(map(len, axis)) for axis in self.reads)
        return rows * columns

    @property
    def flat(self) -> bool:
        """Whether all images are one matrix, because each position reads its own pixel only."""
        problem = self.problem
        return problem.kernel_size == problem.stride == (1, 1) and not any(problem.padding)

    @property
    def dense(self) -> bool:
        """Whether neighbouring positions are neighbouring pixels of the output."""
        return self.residues == (1, 1) and self.patches is None

    @property
    def n_major(self) -> bool:
        """Whether the MMAs' weights are N-major: in gradients, unless in TF32, which is K-major."""
        return self.transposed and self.operands.scalar_bytes == 2

    @property
    def inner(self) -> int:
        """The axis of the weight along which TMA loads neighbours: that of K, or of N."""
        return 0 if self.transposed and not self.n_major else 1

    @property
    def packs(self) -> bool:
        """Whether weights have to be packed, so that inner channels are neighbours in memory."""
        strides = self.operands.weight_strides
        sizes = zip(strides[2:], self.problem.kernel_size, strict=True)
        sides = [strides[1 - self.inner], *(stride for stride, taps in sizes if taps > 1)]
        return strides[self.inner] != 1 or any(side % self.operands.vector for side in sides)

    @property
    def weights(self) -> int:
        """The number of weights."""
        return math.prod(self.problem.weight_shape)

    @property
    def weight_strides(self) -> tuple[int, int, int, int]:
        """Strides of the weights that the tensor map describes, packed or not."""
        channels, (height, width) = self.problem.weight_shape[self.inner], self.problem.kernel_size
        outer = height * width * channels
        dense = (*((outer, 1) if self.inner else (1, outer)), width * channels, channels)
        if self.packs:
            return dense
        out, in_, rows, columns = self.operands.weight_strides
        # The stride of an axis with a single tap is arbitrary, and might not fit a tensor map.
        return out, in_, rows if height > 1 else dense[2], columns if width > 1 else dense[3]

    @lazy
    def upper(self) -> Pair:
        """How far beyond the last row and column the last position reads its first tap."""
        sides = zip(self.lower, self.positions, self.steps, self.in_size, strict=True)
        rows, columns = (at + (count - 1) * step + 1 - size for at, count, step, size in sides)
        return rows, columns

    @lazy
    def image_bytes(self) -> float:
        """Bytes that an image reads and writes; of the input, only what is used."""
        used = 1.0
        for step, taps in zip(self.steps, self.problem.kernel_size, strict=True):
            used *= min(1.0, taps / step)
        read = self.in_channels * self.in_size[0] * self.in_size[1] * used
        outputs = self.out_channels * self.image_size[0] * self.image_size[1]
        stored = outputs * (1 + self.operands.epilogue.residual)
        return self.operands.scalar_bytes * (read + stored)


def layer_of(problem: Problem, operands: Operands, gpu: Gpu, transposed: bool) -> Layer:
    """The implicit GEMM of a pass.

    Raises:
        Declined: TMA or the kernel cannot handle it.
    """
    block.check(gpu)
    layer = _layer(problem, operands, transposed)
    problem, operands = layer.problem, layer.operands
    if operands.scalar_bytes > 2 and operands.precision != "tf32":
        raise Declined(f"{operands.scalar} in {operands.precision}: TMA rounds to TF32")
    # Images of one pixel are the same in both formats.
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
    if layer.packs and layer.weights >= MOST_PACKED * operands.vector:
        raise Declined(f"{layer.weights} weights that have to be packed")
    if not layer.flat:
        _check_corners(layer)
    return layer


def input_map(layer: Layer, pixels: int, promotion: int) -> TensorMap | Im2colMap:
    """The tensor map that loads 128 bytes of what each of ``pixels`` positions reads at a tap."""
    scalar, batch = layer.loaded_scalar, layer.problem.batch
    height, width = layer.in_size
    channels, pixel = layer.in_channels, layer.operands.scalar_bytes * layer.in_channels
    if layer.flat:
        sizes, box = (channels, batch * height * width), (layer.depth, pixels)
        return TensorMap("input", scalar, sizes, (pixel,), box, swizzle=128, promotion=promotion)
    return Im2colMap(
        "input",
        scalar,
        (channels, width, height, batch),
        (pixel, width * pixel, height * width * pixel),
        layer.lower[::-1],
        layer.upper[::-1],
        layer.depth,
        pixels,
        (1, *layer.steps[::-1], 1),
        swizzle=128,
        promotion=promotion,
    )


def _layer(problem: Problem, operands: Operands, transposed: bool) -> Layer:
    """The layer of a pass; if possible, the gradient of patches as that of a pointwise layer.

    With patches (stride = kernel size, no padding), the pixels of a patch belong to one position,
    each to one tap, so the channels of all taps are columns of one GEMM. Taken if the channels of a
    pixel alone are no whole vectors.
    """
    height, width = problem.kernel_size
    channels, columns = problem.in_channels, height * width * problem.in_channels
    dense = (columns, 1, width * channels, channels)
    sizes = zip(problem.input_size, problem.stride, strict=True)
    is_cut = problem.stride == problem.kernel_size and not any(problem.padding)
    if (
        not (transposed and is_cut and problem.groups == 1 and operands.weight_strides == dense)
        # Checked here for the layer's own images: the pointwise layer's may have a single pixel.
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
    if max(layer.steps) > MOST_STEP or max(layer.residues) > MOST_RESIDUES:
        raise Declined(f"a stride of {layer.problem.stride}")
    for lower, upper in zip(layer.lower, layer.upper, strict=True):
        if lower not in CORNERS or upper not in CORNERS:
            raise Declined(f"images read from {lower} to {upper} beyond their ends")
    for axis, lower in zip(layer.reads, layer.lower, strict=True):
        reach = max(max(of, default=lower) for of in axis) - lower
        if reach > MOST_OFFSET:
            raise Declined(f"taps that are {reach} pixels apart")
