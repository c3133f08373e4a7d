"""The GEMM of a weight gradient: its M, N and K, and how its operands reach shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from fastconv.kernels.arithmetic import ceil_div, round_up
from fastconv.kernels.family import Declined, Gpu, Operands
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper import im2col as pixels
from fastconv.kernels.lazy import lazy
from fastconv.kernels.planning import limits
from fastconv.problem import Problem

SECTOR = 32  # bytes that the L2 cache transfers
SPAN = 128  # bytes of a row of a stage, which is also TMA's swizzle span
OCTET = 8  # columns that share one tap, unless channels are few
MOST_POSITIONS = 2**31 - 1024  # output pixels of all images: the kernel counts them in 32 bits
MOST_FEW_COLUMNS = 1024  # taps times channels, each of which has its own unrolled instructions
MOST_FEW_WIDTH = 32  # taps of a kernel row, of which the kernel keeps one bit each
MOST_JOINED = 64  # channels of groups that are multiplied as one
# Where warps gather by taps: a stride whose positions lie in different sectors of memory, and taps
# that fill most of an octet.
LEAST_TAP_STRIDE, LEAST_TAPS = 4, 5


@dataclass(frozen=True)
class Layer:
    """A weight gradient as a GEMM: rows are output channels, columns input channels at taps.

    TMA copies both operands, or warps gather what it cannot copy: the input, or both. Positions,
    the K of the GEMM, are the output pixels of all images one after the other; where TMA copies
    planes, each image has its own.
    """

    problem: Problem
    operands: Operands
    channels_last: bool
    input_copied: bool
    grad_copied: bool
    # The forward pass without groups, whose tensor map TMA copies pixels of the input with.
    pixels: pixels.Layer | None = None
    mirrored: bool = False  # input and grad_output have exchanged roles, see mirrored_layer_of
    boxed: bool = False  # TMA brings boxes of the input for several taps, see boxed_layer_of

    @property
    def span_elements(self) -> int:
        return SPAN // self.operands.scalar_bytes

    @property
    def parts(self) -> int:
        """TF32 parts that a number is multiplied as."""
        return limits.parts(self.operands)

    @property
    def gathered(self) -> bool:
        return not self.input_copied

    @property
    def flat(self) -> bool:
        """Whether the input is one matrix: all images of a pointwise layer, or copied planes."""
        return self.input_copied and not self.boxed and (not self.pixels or self.pixels.flat)

    @lazy
    def upright(self) -> bool:
        """Whether the kernel is a column, so that MMAs of boxes have taps of it, not of a row."""
        rows, columns = self.problem.kernel_size
        return columns == 1 < rows

    @property
    def taps(self) -> int:
        return prod(self.problem.weight_shape[2:])

    @lazy
    def joined(self) -> int:
        """Groups that are multiplied as one; most of the products are then not stored."""
        groups = self.problem.groups
        widest = max(self.problem.in_channels, self.problem.out_channels) // groups
        fitting = range(1, MOST_JOINED // widest + 1)
        return max((many for many in fitting if groups % many == 0), default=1)

    @property
    def groups(self) -> int:
        return self.problem.groups // self.joined

    @property
    def group_in(self) -> int:
        return self.problem.in_channels // self.groups

    @property
    def group_out(self) -> int:
        return self.problem.out_channels // self.groups

    @property
    def few(self) -> bool:
        """Whether channels are so few that columns have no padding between taps.

        In 16 bits, rows of neighbouring taps are gathered by taps however few channels there are: a
        lane would load two positions, each in a sector of its own.
        """
        return (
            self.gathered
            and not (self.operands.scalar_bytes == 2 and self._has_taps_in_rows)
            and self.group_in % OCTET > 0
            and self.taps * self.group_in <= MOST_FEW_COLUMNS
            and self.problem.kernel_size[1] <= MOST_FEW_WIDTH
        )

    @property
    def by_taps(self) -> bool:
        """Whether octets of columns are taps of a channel, rather than channels at a tap.

        Neighbouring taps are neighbours in memory, where positions of a wide stride are not.
        """
        return self.gathered and not self.few and self._has_taps_in_rows

    @property
    def _has_taps_in_rows(self) -> bool:
        """Whether gathered taps are neighbours in memory, and positions are not."""
        problem = self.problem
        return (
            problem.depth is None
            and not self.channels_last
            and problem.dilation[1] == 1
            and problem.stride[1] >= LEAST_TAP_STRIDE
            and problem.kernel_size[1] >= LEAST_TAPS
        )

    @property
    def scatters(self) -> bool:
        """Whether neighbouring columns are far apart in the weight, and leave one by one.

        A few taps of a channel share a sector that the L2 cache still has when the next one comes.
        """
        if self.by_taps or self.operands.weight_strides[1] == 1:
            return False
        return self.taps * self.operands.scalar_bytes >= SECTOR

    @property
    def tap_columns(self) -> int:
        if self.few or self.by_taps:
            return self.group_in
        return round_up(self.group_in, self.span_elements if self.pixels else OCTET)

    @property
    def columns(self) -> int:
        """Columns of a group."""
        return self.taps * self.tap_columns

    @lazy
    def positions(self) -> int:
        """Positions of an image."""
        return prod(self.problem.output_shape[2:])

    def steps(self, depth: int) -> int:
        """Steps of a tile's K, each of this many positions."""
        batch = self.problem.batch
        if self.by_taps:
            rows, columns = self.problem.output_size
            return batch * rows * ceil_div(columns, depth)
        if self.input_copied and not self.channels_last:
            return batch * ceil_div(self.positions, depth)
        return ceil_div(batch * self.positions, depth)

    @property
    def lane_positions(self) -> int:
        """Positions of a step that a lane gathers: four bytes of each channel."""
        return 4 // self.operands.scalar_bytes

    @property
    def mma_depth(self) -> int:
        """The K of one MMA: positions."""
        return 32 // self.operands.scalar_bytes

    @property
    def sums_bias(self) -> bool:
        """Whether MMAs give the bias's gradient: not if operands are rounded, or mirrored."""
        rounded = self.operands.scalar_bytes == 4
        return self.operands.bias_grad and not (rounded or self.mirrored)

    @property
    def grad_output(self) -> tuple[int, tuple[int, ...], bool]:
        """Channels and size of grad_output, and whether it is channels-last."""
        problem, operands = self.problem, self.operands
        if self.mirrored:
            return problem.in_channels, problem.input_shape[2:], operands.input_channels_last
        return problem.out_channels, problem.output_shape[2:], operands.output_channels_last

    @property
    def weight_start(self) -> int:
        """Elements from a filter's first element in memory to that of tap 0."""
        taps = zip(self.problem.weight_shape[2:], self.operands.weight_strides[2:], strict=True)
        return sum((count - 1) * -stride for count, stride in taps) if self.mirrored else 0

    @property
    def bytes(self) -> float:
        """Bytes of both tensors in memory that are read."""
        return sum(self.operand_bytes)

    @lazy
    def operand_bytes(self) -> tuple[float, float]:
        """Bytes of each tensor in memory that are read: of the rows' and the columns'."""
        size = self.problem.out_channels * self.positions
        read = self.problem.in_channels * prod(self.problem.input_shape[2:])
        axes = self.problem.axes
        for axis in axes if self.channels_last else axes[:-1]:
            read = round(read * min(1.0, axis.kernel_size / axis.stride))
        each = self.problem.batch * self.operands.scalar_bytes
        return each * size, each * read


def layer_of(problem: Problem, operands: Operands, gpu: Gpu) -> Layer:
    """The layer of a weight gradient.

    Raises:
        Declined: this kernel cannot compute it.
    """
    block.check(gpu)
    in_size, out_size = problem.input_shape[2:], problem.output_shape[2:]
    if problem.batch * prod(out_size) > MOST_POSITIONS:
        raise Declined(f"{problem.batch} images of {out_size}, 2^31 pixels and more")
    channels = (problem.in_channels // problem.groups, problem.out_channels // problem.groups)
    limits.check(operands, problem.groups, channels, in_size, out_size)
    # Images of one pixel, or of one channel, have both layouts at once.
    in_either = prod(in_size) == 1 or problem.in_channels == 1
    out_either = prod(out_size) == 1 or problem.out_channels == 1
    in_last, out_last = operands.input_channels_last, operands.output_channels_last
    has_planes = (in_either or not in_last) and (out_either or not out_last)
    if operands.scalar_bytes == 2 and (in_last or in_either) and (out_last or out_either):
        try:
            return _of_pixels(problem, operands, gpu)
        except Declined:
            if not has_planes:
                raise
    if not has_planes:
        raise Declined(f"{operands.scalar}, channels-last")
    copied = _has_copied_planes(problem, operands)
    return Layer(problem, operands, False, input_copied=copied, grad_copied=copied)


def boxed_layer_of(problem: Problem, operands: Operands, gpu: Gpu) -> Layer:
    """The layer of channels-last tensors in 16 bits whose taps share TMA boxes of the input.

    The columns of patches become channels. Other strides along columns are those of the tensor map.

    Raises:
        Declined: this kernel cannot compute it so.
    """
    block.check(gpu)
    problem, operands = _patches_as_channels(problem, operands)
    last = operands.input_channels_last and operands.output_channels_last
    if not (last and operands.scalar_bytes == 2 and operands.aligned):
        raise Declined(f"boxes of {operands.scalar} unless channels-last and aligned")
    if problem.groups > 1 or problem.stride[1] > pixels.MOST_STEP:
        raise Declined(f"boxes of {problem.groups} groups with strides {problem.stride}")
    if all(axis.kernel_size == 1 for axis in problem.axes):
        raise Declined("boxes of a single tap")
    channels = (problem.in_channels, problem.out_channels)
    if any(count % operands.vector for count in channels):
        raise Declined(f"boxes of {channels} channels, not multiples of {operands.vector}")
    in_size, out_size = problem.input_shape[2:], problem.output_shape[2:]
    limits.check(operands, 1, channels, in_size, out_size)
    if problem.batch * prod(out_size) > MOST_POSITIONS:
        raise Declined(f"{problem.batch} images of {out_size}, 2^31 pixels and more")
    return Layer(problem, operands, True, input_copied=True, grad_copied=True, boxed=True)


def _patches_as_channels(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Images that are cut into patches, with the columns of each as further channels.

    Neither tensor changes in memory: a pixel's channels are followed by those of the next one.
    """
    (_, width), (_, columns), (stride, step) = (
        problem.input_size,
        problem.kernel_size,
        problem.stride,
    )
    channels = problem.in_channels
    by_output, by_input, *by_tap = operands.weight_strides
    is_cut = (
        problem.depth is None
        and problem.groups == 1
        and 1 < columns == step
        and width % step == 0
        and problem.padding.left == problem.padding.right == 0
        and problem.dilation[1] == 1
        and (by_input, by_tap[-1]) == (1, channels)
    )
    if not is_cut:
        return problem, operands
    height, rows = problem.input_size[0], problem.kernel_size[0]
    wide = Problem.of(
        (problem.batch, columns * channels, height, width // step),
        (problem.out_channels, columns * channels, rows, 1),
        (stride, 1),
        problem.padding,
        problem.dilation,
        1,
    )
    return wide, replace(operands, weight_strides=(by_output, 1, by_tap[0], columns * channels))


def mirrored_layer_of(
    problem: Problem,
    operands: Operands,
    gpu: Gpu,
    of: Callable[[Problem, Operands, Gpu], Layer] = layer_of,
) -> Layer:
    """The same weight gradient with input channels as rows, for layers that have more of those.

    The gradient is also a sum over the input's pixels: of grad_output's pixels that read them, tap
    by tap. That is a weight gradient again, whose input is grad_output, with the taps in reverse.

    ``of`` makes the layer of a problem.

    Raises:
        Declined: this kernel cannot compute it so.
    """
    axes = problem.axes
    strides = tuple(axis.stride for axis in axes)
    if max(strides) > 1 or problem.groups > 1:
        raise Declined(f"stride {strides} or {problem.groups} groups, mirrored")
    sides = [(axis.kernel_extent - 1, axis.before, axis.after) for axis in axes]
    padding = tuple(outer - side for outer, *both in sides for side in both)
    if min(padding) < 0:
        given = tuple(side for _, *both in sides for side in both)
        extent = tuple(axis.kernel_extent for axis in axes)
        raise Declined(f"{given} beyond a kernel of {extent}, mirrored")
    outputs, inputs, *kernel = problem.weight_shape
    dilation = tuple(axis.dilation for axis in axes)
    mirrored = Problem.of(
        problem.output_shape, (inputs, outputs, *kernel), strides, padding, dilation, 1
    )
    by_output, by_input, *by_tap = operands.weight_strides
    operands = replace(
        operands,
        input_channels_last=operands.output_channels_last,
        output_channels_last=operands.input_channels_last,
        weight_strides=(by_input, by_output, *(-stride for stride in by_tap)),
    )
    return replace(of(mirrored, operands, gpu), mirrored=True)


def _of_pixels(problem: Problem, operands: Operands, gpu: Gpu) -> Layer:
    """The layer of channels-last tensors: TMA copies grad_output, and the input where it can."""
    group_out, group_in = problem.weight_shape[0] // problem.groups, problem.weight_shape[1]
    if not operands.aligned or group_out % operands.vector:
        raise Declined(f"{group_out} channels that are not aligned")
    try:
        whole = pixels.layer_of(replace(problem, groups=1), operands, gpu, transposed=False)
    except Declined:
        whole = None
    if whole is None or group_in % operands.vector:
        return Layer(problem, operands, True, input_copied=False, grad_copied=True)
    return Layer(problem, operands, True, input_copied=True, grad_copied=True, pixels=whole)


def _has_copied_planes(problem: Problem, operands: Operands) -> bool:
    """Whether TMA can copy what positions read: its boxes begin at multiples of 16 bytes."""
    if limits.parts(operands) > 1:
        return False  # warps split numbers for 3xTF32
    plane = prod(problem.input_shape[2:]) * operands.scalar_bytes
    own = all(axis.is_pointwise for axis in problem.axes)
    return operands.aligned and problem.groups == 1 and own and plane % 16 == 0
