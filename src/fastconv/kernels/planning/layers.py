"""The convolutions that tensor-core kernels compute: forward passes, and input gradients as such.

Everything that decides the order in which an output is accumulated (chunks of channels, taps
between two flushes, stacked rows, rolling) is decided here, from the layer alone, never from the
batch: an image gives the same bits in any batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from operator import floordiv
from typing import NamedTuple, TypeVar

from fastconv.kernels.arithmetic import ceil_div
from fastconv.kernels.family import Declined, Operands
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.kernels.planning.depth import Depth
from fastconv.problem import Axis, Problem

# Approximate MMAs of a stage of weights, after which 3xTF32 flushes its accumulators: the error of
# the tensor core's accumulation grows with its length. Short accumulations may have only a few
# large terms, so they flush more often; compensated totals of long ones take more instructions.
STAGE_MMAS = 4
SHORT_SUM_MMAS = 2
LONG_SUM_MMAS = 6
SHORT_SUM = 128  # most products of a short accumulation
LONG_SUM = 240  # most MMA steps of an accumulation that is not long
SCALED_FP16_CHANNELS = 16  # fewest channels for scaled fp16: an MMA's K
MOST_EXPONENTS = 2**31 // 255  # weights of a channel, whose 8-bit exponents are added in 32 bits
LEAST_FILLED = 4  # fewest channels of the last vector of float16
MOST_RESIDUES = 16  # residues of a strided input gradient, each with its own launches and kernels
# Depth-to-space computes all residues as output channels of one layer. This bounds how many.
MOST_D2S_OUTPUTS = 2**16

AnyLayer = TypeVar("AnyLayer", bound="Layer")


def forward_ways(layer: AnyLayer) -> list[list[AnyLayer]]:
    """Ways to compute a forward convolution: lists of layers, here of one."""
    layer = min(layer, _space_to_depth(layer), key=lambda one: one.steps * one.taps)
    return [[layer], *([[replace(layer, scaled_fp16=True)]] if _fits_scaled_fp16(layer) else [])]


def input_grad_ways(layer: AnyLayer, problem: Problem, most_together: int) -> list[list[AnyLayer]]:
    """Lists of layers that together write the gradient, one layer for each residue of the stride.

    If an MMA can have ``most_together`` = 2 rows or more of a channel's residues, there is also a
    list with one layer for two residues of columns, where rows of pixels are contiguous; and one
    with a single layer for all residues, if channels are few. ``layer`` is that of the problem's
    forward convolution.
    """
    rows, columns = (residues(problem, axis) for axis in (0, 1))
    planes = _depth_residues(problem)
    count = len(rows) * len(columns) * len(planes)
    as_one = _depth_to_space_way(layer, problem, most_together)
    as_one = [[_of_planes(one, *way) for one in planes] for way in as_one]
    if count > MOST_RESIDUES:
        if not as_one:
            raise Declined(f"input gradients of {count} residues, more than {MOST_RESIDUES}")
        return as_one
    paired = most_together > 1 and not layer.operands.output_channels_last
    whole = interleaved(columns) if paired else None
    ways = [columns] if whole is None else [columns, [whole]]
    found = [
        [_of_planes(one, _residue_layer(layer, *axes)) for *axes, one in product(rows, way, planes)]
        for way in ways
    ]
    if count == 1 and _fits_scaled_fp16(found[0][0]):
        found.append([replace(found[0][0], scaled_fp16=True)])
    return found + as_one


def _depth_to_space_way(
    layer: AnyLayer, problem: Problem, most_together: int
) -> list[list[AnyLayer]]:
    """The list with all residues as output channels of one layer (depth-to-space), if there is one.

    Kernels for which ``most_together`` is 1 store a channel's rows where they lie one after
    another, whichever axis the residues are of.
    """
    if most_together == 1 or problem.stride == (1, 1):
        return []
    outputs = layer.in_channels * problem.stride[0] * problem.stride[1]
    apart = layer.operands.output_channels_last and layer.groups > 1
    if outputs > MOST_D2S_OUTPUTS or apart:
        return []
    rows, columns = (depth_to_space(problem, axis) for axis in (0, 1))
    one = replace(_residue_layer(layer, rows, columns), group_out=outputs)
    return [[one]] if one.interleave <= most_together else []


def _residue_layer(layer: AnyLayer, row: Residue, column: Residue) -> AnyLayer:
    """The layer that computes a residue: inputs and outputs exchange roles."""
    return replace(
        layer,
        transposed=True,
        group_in=layer.group_out,
        group_out=layer.in_channels,
        in_size=layer.out_size,
        out_size=(row.size, column.size),
        kernel=(row.taps, column.taps),
        stride=(1, 1),
        dilation=(row.dilation, column.dilation),
        padding=(row.padding, column.padding),
        weight_kernel=(row.weight_taps, column.weight_taps),
        image_size=layer.in_size,
        placing=(row.placing, column.placing),
    )


def _depth_residues(problem: Problem) -> list[Depth | None]:
    """The depth of each layer that an input gradient needs: none for images, else its residues.

    No layer writes the planes that no tap reaches: launches clear them.
    """
    if problem.depth is None:
        return [None]
    axis = problem.depth
    found = [
        Depth(
            axis.output_size,
            ceil_div(axis.input_size - residue.placing.at, residue.placing.step),
            residue.taps,
            1,
            residue.dilation,
            residue.padding,
            axis.input_size,
            residue.placing.step,
            residue.placing.at,
            residue.placing.last_tap,
            residue.placing.tap_step,
        )
        for residue in residues_of(axis)
        if residue.placing.at < axis.input_size
    ]
    if not found:
        raise Declined("volumes of which no tap reaches a plane")
    return list(found)


def _of_planes(depth: Depth | None, layer: AnyLayer) -> AnyLayer:
    """The layer of volumes: taps of the depth are further channels, planes are images."""
    if depth is None:
        return layer
    volumes = layer.batch // layer.planes
    return replace(
        layer, depth=depth, group_in=layer.group_in * depth.taps, batch=volumes * depth.out_size
    )


class Placing(NamedTuple):
    """Where a layer's positions and taps lie along one axis of the tensors; by default everywhere.

    Position q is written at ``step * q + at``. No tap reaches the other positions from ``step * q +
    begin`` to ``step * q + end``, which are cleared with it. A transposed layer's first tap is the
    kernel's ``last_tap``, the next is ``tap_step`` before it. With several ``outputs``, all
    positions of a step are computed, from ``at`` on: two columns in a pair of MMA rows, each with
    the tap after that of the one before, or any number as output channels (``depth_to_space``).
    Then ``last_tap`` and ``tap_step`` are distances in the dilated kernel, whose taps are
    ``tap_dilation`` apart.
    """

    step: int = 1
    at: int = 0
    begin: int = 0
    end: int = 1
    last_tap: int = 0
    tap_step: int = 1
    outputs: int = 1  # computed for each position
    interleaved: bool = False  # whether all columns of a step are stored together
    depth_to_space: bool = False
    tap_dilation: int = 1


class Residue(NamedTuple):
    """Every stride-th position of an input gradient along one axis: a convolution of stride 1."""

    placing: Placing
    size: int
    taps: int
    weight_taps: int
    dilation: int
    padding: int


def residues(problem: Problem, axis: int) -> list[Residue]:
    """The residues that some tap reaches; together their layers write all positions.

    Position i = stride * q + at adds up the taps k for which the stride divides i + padding -
    dilation * k, which is then stride times the output's position. The next such tap is stride /
    gcd further on, and reads dilation / gcd positions before.
    """
    return residues_of(problem.axes[axis - 2])


def residues_of(axis: Axis) -> list[Residue]:
    """The residues of one axis that some tap reaches."""
    size, kernel, stride, before, _, dilation = axis
    step = dilation // math.gcd(stride, dilation)
    taps_of: dict[int, list[int]] = {}
    for tap in range(kernel):
        taps_of.setdefault((tap * dilation - before) % stride, []).append(tap)
    reached = sorted(taps_of)
    # Each residue clears the positions before it, the last also those after it.
    borders = [0, *(at + 1 for at in reached[:-1]), stride]
    found = []
    for at, begin, end in zip(reached, borders, borders[1:], strict=False):
        first, last, count = taps_of[at][0], taps_of[at][-1], len(taps_of[at])
        placing = Placing(stride, at, begin, end, last, stride * step // dilation)
        first_read = (at + before - first * dilation) // stride  # where q = 0
        padding = (count - 1) * step - first_read
        length = ceil_div(size - begin, stride)
        found.append(Residue(placing, length, count, count, step, padding))
    return [residue for residue in found if residue.size > 0]


def interleaved(residues: list[Residue]) -> Residue | None:
    """All residues of columns of stride 2 as one, whose rows are whole; None if there is none."""
    first, last = residues[0], residues[-1]
    begin, end = first.placing.begin, last.placing.end
    if first.placing.step != 2 or (begin, end) != (0, 2):
        return None
    if first is last:
        return first._replace(placing=first.placing._replace(interleaved=True))
    if first.dilation > 1:
        return None  # they do not read the same columns
    padding = max(first.padding, last.padding)
    taps = padding + max(residue.taps - residue.padding for residue in residues)
    last_tap = first.placing.last_tap + 2 * (padding - first.padding)
    placing = Placing(2, 0, 0, 2, last_tap, 2, 2, True)
    return Residue(placing, first.size, taps, first.taps + last.taps, 1, padding)


def depth_to_space(problem: Problem, axis: int) -> Residue:
    """All residues of an axis as one, with several outputs for each position.

    Output r of position q is that of place stride * q + r - early. Its tap k reads grad_output at
    q + (r + padding - early - dilation * k) / stride, if that is a whole number; where an output
    reads nothing, it has a zero weight. Steps begin with the image, or so ``early`` that there are
    fewer taps.
    """
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    before = (problem.padding.top, problem.padding.left)[axis]
    if stride == 1:
        return residues(problem, axis)[0]
    # Taps are the fewest if a step begins with one: without dilation, with the first.
    taps = range(problem.kernel_size[axis] if dilation > 1 else 1)
    choices = sorted({0, *((before - dilation * tap) % stride for tap in taps)})
    ways = (_beginning(problem, axis, early) for early in choices)
    return min(ways, key=lambda residue: residue.taps * residue.size)


def _beginning(problem: Problem, axis: int, early: int) -> Residue:
    """All residues of an axis as one, whose first step begins ``early`` positions too soon."""
    size, kernel = problem.input_size[axis], problem.kernel_size[axis]
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    at = (problem.padding.top, problem.padding.left)[axis] - early
    # Each tap reaches one of the outputs, for which what it reads is a whole number.
    reads = {-((dilation * tap - at) // stride) for tap in range(kernel)}
    first, last = min(reads), max(reads)
    apart = math.gcd(*(read - first for read in reads)) or 1
    placing = Placing(
        stride,
        -early,
        -early,
        stride - early,
        at - stride * first,
        stride * apart,
        stride,
        depth_to_space=True,
        tap_dilation=dilation,
    )
    taps = (last - first) // apart + 1
    return Residue(placing, ceil_div(size + early, stride), taps, kernel, apart, -first)


class Slabs(NamedTuple):
    """The slabs in which volumes are computed, and what the whole batch has: see ``slabs``."""

    firsts: tuple[int, ...]  # the first row of the image that each slab of a volume writes
    sources: tuple[int, ...]  # the first row that each reads, which may lie before the image
    in_rows: int
    out_rows: int
    padding: int
    batch: int


@dataclass(frozen=True)
class Layer:
    """A forward convolution, perhaps that which an input gradient is; ``padding`` is top and left.

    With space-to-depth (``s2d_factors``), channels, kernel and stride are those after it, sizes and
    padding those of the tensors. With depth-to-space (``d2s_factors``), output channels are those
    before it. ``weight_kernel`` are the taps of the weight that the layer uses, ``image_size`` is
    the size of the tensor that it writes, and ``placing`` tells where in both its taps and
    positions lie.

    In volumes, which have a ``depth``, ``batch`` counts the planes that are written, and input
    channels are counted once for each tap of the depth; sizes are those of planes. With ``slabs``,
    the batch, the sizes that are read and computed, and the padding are those of one slab.

    Derived properties are cached: planning reads them ten thousand times.
    """

    operands: Operands
    transposed: bool
    batch: int
    groups: int
    group_in: int
    group_out: int
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int]
    weight_kernel: tuple[int, int]
    image_size: tuple[int, int]
    s2d_factors: tuple[int, int] = (1, 1)
    placing: tuple[Placing, Placing] = (Placing(), Placing())
    scaled_fp16: bool = False  # float32 multiplied as scaled fp16, see scale.cuh
    half_copy: bool = False  # and read from a channels-last copy in float16, see copy.cuh
    relaid: bool = False  # the input is a channels-last copy of a contiguous one
    depth: Depth | None = None
    slabs: Slabs | None = None

    @classmethod
    def of(cls: type[AnyLayer], problem: Problem, operands: Operands) -> AnyLayer:
        """The forward convolution of a problem."""
        images = cls(
            operands,
            False,
            problem.batch,
            problem.groups,
            problem.in_channels // problem.groups,
            problem.out_channels // problem.groups,
            problem.input_size,
            problem.output_size,
            problem.kernel_size,
            problem.stride,
            problem.dilation,
            (problem.padding.top, problem.padding.left),
            problem.kernel_size,
            problem.output_size,
        )
        return images if problem.depth is None else _of_planes(Depth.of(problem.depth), images)

    @lazy
    def vector(self) -> int:
        """Elements in 16 bytes of a tensor."""
        return self.operands.vector

    @lazy
    def vector_channels(self) -> int:
        """Channels in 16 bytes of an MMA operand."""
        return 8 if self.scaled_fp16 else self.vector

    @lazy
    def multiplied(self) -> str:
        """The MMA's operand type, by the names of the tables of rates."""
        if self.scaled_fp16:
            return "float16"
        scalar = self.operands.scalar.removeprefix("fastconv::")
        return "tf32" if scalar == "float" else scalar

    @lazy
    def vector_kind(self) -> tuple[int, int]:
        """Channels in 16 bytes of an MMA operand, and bytes of a channel in memory."""
        return self.vector_channels, self.loaded_bytes

    @lazy
    def loaded_bytes(self) -> int:
        """Bytes of a channel of the input as the kernel loads it."""
        return 2 if self.half_copy else self.operands.scalar_bytes

    @lazy
    def loads_channels_last(self) -> bool:
        return self.half_copy or self.operands.input_channels_last

    @lazy
    def parts(self) -> int:
        return limits.parts(self.operands)

    @lazy
    def weight_parts(self) -> int:
        return 3 if self.scaled_fp16 and self.parts == 2 else self.parts

    @lazy
    def vector_loads(self) -> bool:
        """Whether 16 bytes of channels are contiguous in memory, and aligned."""
        return (
            self.loads_channels_last
            and self.operands.aligned
            and self.in_channels * self.loaded_bytes % 16 == 0
            and self.s2d_factors == (1, 1)
        )

    @lazy
    def copied(self) -> bool:
        """Whether cp.async copies such vectors as they are."""
        return self.vector_loads and self.loaded_bytes == 2

    @lazy
    def lines(self) -> bool:
        """Whether a tile's rows are contiguous in memory, so that bulk copies can load them."""
        aligned = self.operands.aligned
        return not self.loads_channels_last and aligned and self.s2d_factors == (1, 1)

    @lazy
    def d2s_factors(self) -> tuple[int, int]:
        """Residues that are output channels (depth-to-space), along both axes."""
        rows, columns = (axis.outputs if axis.depth_to_space else 1 for axis in self.placing)
        return rows, columns

    @lazy
    def depth_to_space(self) -> bool:
        return self.d2s_factors != (1, 1)

    @lazy
    def planes(self) -> int:
        """Planes of a volume that are written, each an image of the batch."""
        return 1 if self.depth is None else self.depth.out_size

    @lazy
    def in_channels(self) -> int:
        """Input channels of a group in memory."""
        taps = 1 if self.depth is None else self.depth.taps
        return self.group_in // (self.s2d_factors[0] * self.s2d_factors[1] * taps)

    @lazy
    def copied_planes(self) -> int:
        """Planes that are written, and read the same copy of the input: all those of a volume."""
        return self.planes if self.half_copy else 1

    @lazy
    def slab_count(self) -> int:
        """Slabs of a volume."""
        return 1 if self.slabs is None else len(self.slabs.firsts)

    @lazy
    def in_whole_slabs(self) -> float:
        """The rows of the layer, in slabs: the last one may have fewer."""
        return 1.0 if self.slabs is None else self.slabs.out_rows / self.out_size[0]

    @lazy
    def volume_sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows of all planes, and columns, of what is read and of what is written."""
        if self.depth is None:
            return self.in_size, self.image_size
        planes = (self.depth.in_size, self.depth.image_size)
        read, written = (
            (count * rows, columns)
            for count, (rows, columns) in zip(planes, (self.in_size, self.image_size), strict=True)
        )
        return read, written

    @lazy
    def out_channels(self) -> int:
        """Output channels of a group in memory."""
        return self.group_out // (self.d2s_factors[0] * self.d2s_factors[1])

    @lazy
    def out_column(self) -> int:
        """Elements from a pixel to the next, where all residues are stored together."""
        return self.out_channels if self.operands.output_channels_last else 1

    @lazy
    def interleave(self) -> int:
        """Elements of a stored row for each pixel."""
        if self.depth_to_space:
            return self.d2s_factors[1] * self.out_column
        return self.placing[1].step if self.placing[1].interleaved else 1

    @lazy
    def stacked_columns(self) -> int:
        return 1 if self.depth_to_space else self.placing[1].outputs

    @lazy
    def stored_width(self) -> int:
        if self.depth_to_space:
            return self.image_size[1] * self.out_column
        return self.image_size[1] if self.interleave > 1 else self.out_size[1]

    @lazy
    def written(self) -> float:
        """Elements that are written for each accumulator: itself, and zeros around it."""
        rows, columns = self.placing
        return (
            (rows.end - rows.begin)
            * (columns.end - columns.begin)
            / (rows.outputs * columns.outputs)
        )

    @lazy
    def strided_stores(self) -> bool:
        """Whether the elements of a stored row are not contiguous in memory."""
        apart = self.placing[1].step > self.interleave
        return apart and not (self.depth_to_space or self.operands.output_channels_last)

    @lazy
    def whole_rows(self) -> bool:
        """Whether bulk copies can store a row: its elements are contiguous in memory."""
        operands = self.operands
        neighbours = not (operands.output_channels_last or self.strided_stores)
        return operands.aligned and (self.depth_to_space or neighbours)

    @lazy
    def terms(self) -> float:
        """Products that an output adds up."""
        channels = self.group_in // (self.s2d_factors[0] * self.s2d_factors[1])
        rows, columns = self.placing
        taps = self.weight_kernel[0] * self.weight_kernel[1]
        return channels * taps / (rows.outputs * columns.outputs)

    @lazy
    def fewest_terms(self) -> float:
        """Products of the shortest accumulation, as depth-to-space residues differ in taps."""
        if not self.depth_to_space:
            return self.terms
        rows, columns = map(floordiv, self.weight_kernel, self.d2s_factors)
        return self.group_in * max(rows, 1) * max(columns, 1)

    @lazy
    def ties_to_even(self) -> bool:
        """How TF32 rounds numbers in the middle between two: as cuDNN does.

        Its kernels for pointwise layers round them to even, the others away from zero.
        """
        one = (1, 1)
        whole = self.placing == (Placing(), Placing())
        whole = whole and (self.depth is None or self.depth.is_pointwise)
        return self.weight_kernel == self.kernel == self.stride == one and whole

    @lazy
    def low_low_mma(self) -> bool:
        """Whether 3xTF32 also multiplies low parts by each other, as short accumulations need."""
        return self.parts == 2 and self.fewest_terms <= SHORT_SUM and not self.scaled_fp16

    @lazy
    def compensated(self) -> bool:
        """Whether totals compensate for their rounding: in long accumulations."""
        return self.parts == 2 and self.steps * self.taps > LONG_SUM

    @lazy
    def watched(self) -> bool:
        """Whether consumers must be told of infinite numbers in the input."""
        return (self.low_low_mma or self.compensated) and not self.scaled_fp16

    @lazy
    def mmas_per_step(self) -> int:
        """MMAs of a step along K: one for each pair of parts that is multiplied."""
        return 1 if self.parts == 1 else 4 if self.low_low_mma else 3

    @lazy
    def row_residues(self) -> int:
        return self.stride[0] // math.gcd(self.stride[0], self.dilation[0])

    @lazy
    def row_step(self) -> int:
        return self.dilation[0] // math.gcd(self.stride[0], self.dilation[0])

    @lazy
    def column_residues(self) -> int:
        return self.stride[1] // math.gcd(self.stride[1], self.dilation[1])

    @lazy
    def column_halo(self) -> int:
        step = self.dilation[1] // math.gcd(self.stride[1], self.dilation[1])
        return (self.kernel[1] - 1) * step // self.column_residues

    @lazy
    def column_slots(self) -> int:
        """Residues of a column stride that some tap reads."""
        return min(self.kernel[1], self.column_residues)

    @lazy
    def slots(self) -> int:
        return min(self.kernel[0], self.row_residues) * self.column_slots

    @lazy
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @lazy
    def k_steps(self) -> int:
        """MMA steps along K of a tap and a chunk of channels, which each family defines."""
        raise NotImplementedError

    @lazy
    def chunks(self) -> int:
        return ceil_div(self.steps, self.k_steps)

    @lazy
    def stage_mmas(self) -> int:
        """Approximate MMAs of a stage of weights."""
        if self.low_low_mma:
            return SHORT_SUM_MMAS
        return LONG_SUM_MMAS if self.compensated else STAGE_MMAS

    def plane_padding(self, pixels: int) -> int:
        """Padding between planes, so that lanes that write one pixel use different banks."""
        if not self.vector_loads:
            return 0
        wanted = {2: 4, 4: 2, 8: 1}.get(2 * self.k_steps, 2)
        return (wanted - pixels) % 8

    @lazy
    def steps(self) -> int:
        """MMA steps along K that the channels of a tap need, of 32 bytes each."""
        return ceil_div(self.group_in, 2 * self.vector_channels)


def _space_to_depth(layer: AnyLayer) -> AnyLayer:
    """The layer after space-to-depth, which makes residues of its strides channels, if possible."""
    rows, columns = (
        stride if stride <= kernel and dilation == 1 else 1
        for stride, kernel, dilation in zip(layer.stride, layer.kernel, layer.dilation, strict=True)
    )
    return replace(
        layer,
        group_in=layer.group_in * rows * columns,
        kernel=(ceil_div(layer.kernel[0], rows), ceil_div(layer.kernel[1], columns)),
        stride=(layer.stride[0] // rows, layer.stride[1] // columns),
        s2d_factors=(rows, columns),
    )


def _fits_scaled_fp16(layer: Layer) -> bool:
    """Whether float32 can be multiplied as scaled fp16 (see ``scale.cuh``).

    It cannot for channels-last tensors, which are loaded otherwise; for short accumulations in two
    parts, which need products of low parts; for fewer channels than an MMA's K; if the last vector
    has so few channels that often all of them are small; or for more weights than 32 bits can add
    up the exponents of.
    """
    operands = layer.operands
    filled = (layer.group_in - 1) % 8 + 1
    return (
        operands.scalar == "float"
        and not operands.input_channels_last
        and not layer.low_low_mma
        and layer.group_in >= SCALED_FP16_CHANNELS
        and filled >= LEAST_FILLED
        and layer.group_out * layer.weight_kernel[0] * layer.weight_kernel[1] < MOST_EXPONENTS
    )


def views(layer: AnyLayer) -> list[AnyLayer]:
    """The same layer in other shapes: the pixels of a pointwise layer need not be in rows."""
    views = [layer]
    if layer.kernel == layer.stride == (1, 1) and layer.padding == (0, 0):
        pixels = layer.in_size[0] * layer.in_size[1]
        # With strided positions, even a single row or column is a residue: the next would be far
        # away.
        dense = layer.placing[0].step == layer.placing[1].step == 1
        if dense and layer.in_size == layer.out_size == layer.image_size:
            sizes = [(rows, pixels // rows) for rows in (1, 2) if pixels % rows == 0]
            views += [
                replace(layer, in_size=size, out_size=size, image_size=size) for size in sizes
            ]
    return views
