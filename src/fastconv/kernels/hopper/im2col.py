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
from fastconv.problem import Problem

SPAN = 128  # bytes of channels of a step of K, the widest swizzle
# Limits of an im2col tensor map: the corners of the bounding box and the offset of a tap, which the
# axes of an image or of a volume share 16 bits for, and the step from a position to the next.
CORNERS = {2: range(-128, 128), 3: range(-16, 16)}
MOST_OFFSET = {2: 255, 3: 31}
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
    """A pass as an implicit GEMM: M is positions, N output channels, K taps and input channels.

    Axes are rows and columns, and of volumes planes before them.
    """

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
    def strides(self) -> tuple[int, ...]:
        return tuple(axis.stride for axis in self.problem.axes)

    @property
    def residues(self) -> tuple[int, ...]:
        """Pixels of a position along each axis: one for each residue of a gradient's stride."""
        return self.strides if self.transposed else (1,) * len(self.strides)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of an image, along each axis."""
        return tuple(map(ceil_div, self.image_size, self.residues))

    @property
    def steps(self) -> tuple[int, ...]:
        """Distance of what neighbouring positions read, along each axis."""
        return (1,) * len(self.strides) if self.transposed else self.strides

    @lazy
    def reads(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each axis and residue: how far from its position each of its taps reads."""
        return tuple(self._reads_of_axis(*side) for side in self.sides)

    def _reads_of_axis(
        self, taps: int, stride: int, dilation: int, padding: int
    ) -> tuple[tuple[int, ...], ...]:
        if not self.transposed:
            return (tuple(tap * dilation - padding for tap in range(taps)),)
        places = ([r + padding - dilation * tap for tap in range(taps)] for r in range(stride))
        return tuple(tuple(at // stride for at in of if at % stride == 0) for of in places)

    @lazy
    def lower(self) -> tuple[int, ...]:
        """Where the first position reads its first tap, along each axis."""
        return tuple(min(min(of, default=0) for of in axis) for axis in self.reads)

    @property
    def taps(self) -> int:
        """Taps of all residues together."""
        return math.prod(sum(map(len, axis)) for axis in self.reads)

    @property
    def flat(self) -> bool:
        """Whether all images are one matrix, because each position reads its own pixel only."""
        return all(axis.is_pointwise for axis in self.problem.axes)

    @property
    def dense(self) -> bool:
        """Whether neighbouring positions are neighbouring pixels of the output."""
        return math.prod(self.residues) == 1 and self.patches is None

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
        sizes = zip(strides[2:], self.kernel, strict=True)
        sides = [strides[1 - self.inner], *(stride for stride, taps in sizes if taps > 1)]
        return strides[self.inner] != 1 or any(side % self.operands.vector for side in sides)

    @property
    def kernel(self) -> tuple[int, ...]:
        """The kernel's size along each axis."""
        return self.problem.weight_shape[2:]

    @property
    def weights(self) -> int:
        """The number of weights."""
        return math.prod(self.problem.weight_shape)

    @property
    def weight_strides(self) -> tuple[int, ...]:
        """Strides of the weights that the tensor map describes, packed or not."""
        channels = self.problem.weight_shape[self.inner]
        outer = math.prod(self.kernel) * channels
        channel_strides = (outer, 1) if self.inner else (1, outer)
        dense = tuple(
            math.prod(self.kernel[axis + 1 :]) * channels for axis in range(len(self.kernel))
        )
        if self.packs:
            return *channel_strides, *dense
        given = self.operands.weight_strides
        # The stride of an axis with a single tap is arbitrary, and might not fit a tensor map.
        taps = zip(self.kernel, given[2:], dense, strict=True)
        return *given[:2], *(own if count > 1 else other for count, own, other in taps)

    @lazy
    def upper(self) -> tuple[int, ...]:
        """How far beyond an image's end the last position reads its first tap, along each axis."""
        sides = zip(self.lower, self.positions, self.steps, self.in_size, strict=True)
        return tuple(at + (count - 1) * step + 1 - size for at, count, step, size in sides)

    @lazy
    def image_bytes(self) -> float:
        """Bytes that an image reads and writes; of the input, only what is used."""
        used = 1.0
        for step, taps in zip(self.steps, self.kernel, strict=True):
            used *= min(1.0, taps / step)
        read = self.in_channels * math.prod(self.in_size) * used
        outputs = self.out_channels * math.prod(self.image_size)
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
    if not (operands.input_channels_last or math.prod(layer.in_size) == 1):
        raise Declined("contiguous input")
    if not (operands.output_channels_last or math.prod(layer.image_size) == 1):
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
    size = layer.in_size
    channels, pixel = layer.in_channels, layer.operands.scalar_bytes * layer.in_channels
    if layer.flat:
        sizes, box = (channels, batch * math.prod(size)), (layer.depth, pixels)
        return TensorMap("input", scalar, sizes, (pixel,), box, swizzle=128, promotion=promotion)
    return Im2colMap(
        "input",
        scalar,
        (channels, *size[::-1], batch),
        tuple(math.prod(size[axis:]) * pixel for axis in range(len(size), -1, -1)),
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
        or problem.depth is not None
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
        raise Declined(f"a stride of {layer.strides}")
    corners, most_offset = CORNERS[len(layer.strides)], MOST_OFFSET[len(layer.strides)]
    for lower, upper in zip(layer.lower, layer.upper, strict=True):
        if lower not in corners or upper not in corners:
            raise Declined(f"images read from {lower} to {upper} beyond their ends")
    for axis, lower in zip(layer.reads, layer.lower, strict=True):
        reach = max(max(of, default=lower) for of in axis) - lower
        if reach > most_offset:
            raise Declined(f"taps that are {reach} pixels apart")
