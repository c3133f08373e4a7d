"""The geometry of one convolution as a value: what is computed, independent of how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, get_args

Pair = tuple[int, int]
Ints = tuple[int, ...]

WORD = 1 << 63
"""One more than the largest integer in PyTorch, which has 64 bits."""


class Padding(NamedTuple):
    """The number of zeros on each side of the input."""

    top: int
    bottom: int
    left: int
    right: int


class Epilogue(NamedTuple):
    """What a convolution does to its accumulators before it stores them.

    It stores activation(accumulators + bias + residual).
    """

    activation: str = "identity"
    slope: float = 0.0  # leaky_relu's factor of negative numbers, 0 for other activations
    residual: bool = False  # whether there is a residual


NO_EPILOGUE = Epilogue()


class Axis(NamedTuple):
    """One axis of a problem: its sizes, and the zeros before and after the input."""

    input_size: int
    kernel_size: int
    stride: int
    before: int
    after: int
    dilation: int

    @property
    def padded_size(self) -> int:
        return self.input_size + self.before + self.after

    @property
    def kernel_extent(self) -> int:
        return self.dilation * (self.kernel_size - 1) + 1

    @property
    def output_size(self) -> int:
        return (self.padded_size - self.kernel_extent) // self.stride + 1

    @property
    def reaches_every_input(self) -> bool:
        """Whether each input position has a tap."""
        residues = {
            (tap * self.dilation - self.before) % self.stride for tap in range(self.kernel_size)
        }
        least = min(self.input_size, self.stride)
        return sum(residue < self.input_size for residue in residues) >= least

    @property
    def is_pointwise(self) -> bool:
        """Whether each output reads the input at its own position, and nothing else."""
        return (self.kernel_size, self.stride, self.before, self.after) == (1, 1, 0, 0)


ActivationName = Literal[
    "identity", "relu", "relu6", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "sigmoid",
    "tanh",
]  # fmt: skip
"""Names of activations in ``torch.nn.functional``.

``gelu`` is computed by erf, ``gelu_tanh`` is its approximation by tanh.
"""

ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)


@dataclass(frozen=True)
class Problem:
    """The geometry of one convolution, common to its forward pass and its two gradients.

    A 3-D convolution has a ``depth``, the axis before rows and columns, which the other fields are
    about. A 2-D one has none. Sizes may be symbolic while PyTorch traces. :meth:`of` makes a
    checked one.
    """

    batch: int
    in_channels: int
    out_channels: int
    input_size: Pair
    kernel_size: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    depth: Axis | None = None

    @classmethod
    def of(
        cls,
        input_shape: tuple[int, ...],
        weight_shape: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Problem:
        """Returns the problem of convolving these shapes; raises PyTorch's error if invalid.

        It has three axes if there are as many strides and the weight has them, otherwise two.
        """
        axes = _axes_of(stride, weight_shape)
        check_shapes(input_shape, weight_shape, stride, padding, dilation, groups, axes)
        batch, in_channels, *input_size = input_shape
        out_channels, _, *kernel_size = weight_shape
        depth = None
        if axes == 3:
            front, back = padding[:2]
            depth = Axis(input_size[0], kernel_size[0], stride[0], front, back, dilation[0])
        problem = cls(
            batch,
            in_channels,
            out_channels,
            _pair(input_size[-2:]),
            _pair(kernel_size[-2:]),
            _pair(stride[-2:]),
            Padding(*padding[-4:]),
            _pair(dilation[-2:]),
            groups,
            depth,
        )
        problem._check_padded_size()
        return problem

    @classmethod
    def of_transposed(
        cls,
        input_shape: tuple[int, ...],
        weight_shape: tuple[int, ...],
        output_padding: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Problem:
        """Returns the problem whose input gradient is this transposed convolution.

        What the transposed convolution reads has the problem's ``output_shape``, what it writes its
        ``input_shape``. Raises PyTorch's error if the arguments are invalid.
        """
        axes = _axes_of(stride, weight_shape)
        check_transposed(
            input_shape, weight_shape, output_padding, stride, padding, dilation, groups, axes
        )
        size = transposed_size(
            input_shape[2:], weight_shape[2:], output_padding, stride, padding, dilation
        )
        written = (input_shape[0], weight_shape[1] * groups, *size)
        return cls.of(written, weight_shape, stride, padding, dilation, groups)

    @property
    def padded_size(self) -> Pair:
        height, width = self.input_size
        top, bottom, left, right = self.padding
        return height + top + bottom, width + left + right

    @property
    def kernel_extent(self) -> Pair:
        """The rows and columns that a kernel spans, from its first tap to its last."""
        return (
            self.dilation[0] * (self.kernel_size[0] - 1) + 1,
            self.dilation[1] * (self.kernel_size[1] - 1) + 1,
        )

    @cached_property
    def output_size(self) -> Pair:
        padded, extent = self.padded_size, self.kernel_extent
        return (
            (padded[0] - extent[0]) // self.stride[0] + 1,
            (padded[1] - extent[1]) // self.stride[1] + 1,
        )

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Depth, if there is one, rows and columns."""
        plane = tuple(
            Axis(
                self.input_size[i],
                self.kernel_size[i],
                self.stride[i],
                self.padding[2 * i],
                self.padding[2 * i + 1],
                self.dilation[i],
            )
            for i in range(2)
        )
        return plane if self.depth is None else (self.depth, *plane)

    @property
    def geometry(self) -> tuple[Ints, Ints, Ints, int]:
        """Strides, padding before and after each axis, dilations, and groups.

        Operators take them in this order.
        """
        axes = self.axes
        sides = tuple(side for axis in axes for side in (axis.before, axis.after))
        strides, dilations = (axis.stride for axis in axes), (axis.dilation for axis in axes)
        return tuple(strides), sides, tuple(dilations), self.groups

    @property
    def input_shape(self) -> tuple[int, ...]:
        depth = () if self.depth is None else (self.depth.input_size,)
        return (self.batch, self.in_channels, *depth, *self.input_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        depth = () if self.depth is None else (self.depth.kernel_size,)
        return (self.out_channels, self.in_channels // self.groups, *depth, *self.kernel_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        depth = () if self.depth is None else (self.depth.output_size,)
        return (self.batch, self.out_channels, *depth, *self.output_size)

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass or either gradient; a multiply-add is two."""
        products = prod(self.output_shape) * prod(self.weight_shape[1:])
        return 2 * products

    @property
    def without_idle_dilation(self) -> Problem:
        """The same convolution with dilation 1 along axes of one tap, where it has no effect."""
        height, width = self.kernel_size
        rows, columns = self.dilation
        dilation = (rows if height > 1 else 1, columns if width > 1 else 1)
        depth = self.depth
        if depth is not None and depth.kernel_size == 1:
            depth = depth._replace(dilation=1)
        if (dilation, depth) == (self.dilation, self.depth):
            return self
        return replace(self, dilation=dilation, depth=depth)

    @cached_property
    def reaches_every_input(self) -> bool:
        """Whether each input position has a tap, so that an input gradient adds up products there.

        A stride above the kernel's size, for example, leaves positions without one.
        """
        return all(axis.reaches_every_input for axis in self.axes)

    def _check_padded_size(self) -> None:
        for axis in self.axes:
            size = axis.padded_size
            if isinstance(size, int) and size >= WORD:  # PyTorch itself checks symbolic sizes
                padding = [side for one in self.axes for side in (one.before, one.after)]
                raise RuntimeError(
                    f"padded input sizes are below 2**63, but padding={padding} "
                    f"{SIDES[len(self.axes)]} makes one of {size}"
                )


def check_words(
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> None:
    """Raises if a number does not fit into 64 bits, as all integers of PyTorch do."""
    for name, values in (
        ("stride", stride),
        ("padding", padding),
        ("dilation", dilation),
        ("groups", (groups,)),
    ):
        for value in values:
            if isinstance(value, int) and not -WORD <= value < WORD:
                raise ValueError(f"{name} should fit in 64 bits, but got {name}={value}")


def _pair(values: Sequence[int]) -> Pair:
    first, second = values
    return first, second


def check_shapes(
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    axes: int,
) -> None:
    """Raises PyTorch's error if tensors of these shapes cannot be convolved along ``axes`` axes."""
    check_words(stride, padding, dilation, groups)
    _check_parameters(stride, padding, dilation, groups, axes)
    _check_weight(weight_shape, groups, axes)
    _check_rank(input_shape, axes)
    channels, expected = input_shape[1], weight_shape[1] * groups
    if channels != expected:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight_shape)}, expected "
            f"input{list(input_shape)} to have {expected} channels, "
            f"but got {channels} channels instead"
        )
    _check_kernel_fits(input_shape, weight_shape, padding, dilation)


def check_transposed(
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    output_padding: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    axes: int,
) -> None:
    """Raises PyTorch's error if a transposed convolution cannot have these shapes."""
    check_words(stride, padding, dilation, groups)
    _check_parameters(stride, padding, dilation, groups, axes)
    check_output_padding(output_padding, stride, dilation)
    _check_weight(weight_shape, groups, axes, transposed=True)
    _check_rank(input_shape, axes)
    if input_shape[1] != weight_shape[0]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight_shape)}, expected "
            f"input{list(input_shape)} to have {weight_shape[0]} channels, "
            f"but got {input_shape[1]} channels instead"
        )
    if min(input_shape[2:]) <= 0:
        raise RuntimeError(
            "Only zero batch or zero channel inputs are supported, "
            f"but got input shape: {list(input_shape)}"
        )
    size = transposed_size(
        input_shape[2:], weight_shape[2:], output_padding, stride, padding, dilation
    )
    if min(size) <= 0:
        raise RuntimeError(
            f"Given input size per channel: {_by(input_shape[2:])}. "
            f"Calculated output size per channel: {_by(size)}. Output size is too small"
        )


def transposed_size(
    input_size: tuple[int, ...],
    kernel_size: tuple[int, ...],
    output_padding: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[int, ...]:
    """Returns the sizes of a transposed convolution's output along its axes."""
    axes = zip(input_size, kernel_size, output_padding, stride, dilation, strict=True)
    return tuple(
        (size - 1) * step + reach * (taps - 1) + 1 + more - sum(padding[2 * i : 2 * i + 2])
        for i, (size, taps, more, step, reach) in enumerate(axes)
    )


def check_bias(
    bias_shape: tuple[int, ...], weight_shape: tuple[int, ...], channels: int, transposed: bool
) -> None:
    """Raises PyTorch's error unless there is one number for each output channel."""
    if tuple(bias_shape) != (channels,):
        raise RuntimeError(
            f"Given {'transposed=1, ' if transposed else ''}weight of size {list(weight_shape)}, "
            f"expected bias to be 1-dimensional with {channels} elements, "
            f"but got bias of size {list(bias_shape)} instead"
        )


def _axes_of(stride: tuple[int, ...], weight_shape: tuple[int, ...]) -> int:
    return 3 if len(stride) == 3 and len(weight_shape) == 5 else 2


SIDES = {
    1: "(left, right)",
    2: "(top, bottom, left, right)",
    3: "(front, back, top, bottom, left, right)",
}
_SIZES = {1: "length", 2: "height, width", 3: "depth, height, width"}


def _check_parameters(
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    axes: int,
) -> None:
    for name, values, length in (
        ("stride", stride, axes),
        ("padding", padding, 2 * axes),
        ("dilation", dilation, axes),
    ):
        if len(values) != length:
            raise RuntimeError(f"expected {length} values of {name}, but got {name}={list(values)}")
    if min(stride) <= 0:
        raise RuntimeError(f"non-positive stride is not supported, but got stride={list(stride)}")
    if min(padding) < 0:
        raise RuntimeError(
            f"negative padding is not supported, but got padding={list(padding)} {SIDES[axes]}"
        )
    if min(dilation) <= 0:
        raise RuntimeError(
            "non-positive dilation is not supported: dilation should be greater than zero, "
            f"but got dilation={list(dilation)}"
        )
    if groups <= 0:
        raise RuntimeError(f"non-positive groups is not supported, but got groups={groups}")


def check_output_padding(
    output_padding: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    """Raises PyTorch's error unless the output padding is below the stride or the dilation."""
    if len(output_padding) != len(stride):
        raise RuntimeError(
            f"expected {len(stride)} values of output_padding, "
            f"but got output_padding={list(output_padding)}"
        )
    if min(output_padding) < 0:
        raise RuntimeError(
            "negative output_padding is not supported, "
            f"but got output_padding={list(output_padding)}"
        )
    if any(more >= max(both) for more, *both in zip(output_padding, stride, dilation, strict=True)):
        raise RuntimeError(
            "output padding must be smaller than either stride or dilation, "
            f"but got output_padding={list(output_padding)}, stride={list(stride)} and "
            f"dilation={list(dilation)}"
        )


def _check_weight(
    weight_shape: tuple[int, ...], groups: int, axes: int, transposed: bool = False
) -> None:
    weight, rank = list(weight_shape), len(weight_shape)
    if rank != axes + 2:
        few = "; weight should have at least three dimensions" if rank < 3 else ""
        channels = "in_channels, out_channels" if transposed else "out_channels, in_channels"
        raise RuntimeError(
            f"conv{'_transpose' if transposed else ''}{axes}d takes a {axes + 2}-dimensional "
            f"weight ({channels} / groups, {_SIZES[axes]}), "
            f"but got weight of size {weight}{few}. "
            f"Expected {rank}-dimensional input for {rank}-dimensional weight"
        )
    first, _, *kernel_size = weight_shape
    if first < groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, "
            f"but got weight of size {weight} instead"
        )
    if first % groups != 0:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, "
            f"but got weight of size {weight} instead"
        )
    if min(kernel_size) <= 0:
        raise RuntimeError(
            f"kernel size should be greater than zero, but got weight of size {weight}"
        )


def _check_rank(input_shape: tuple[int, ...], axes: int) -> None:
    if len(input_shape) != axes + 2:
        raise RuntimeError(
            f"Expected {axes + 2}D (batched) input of size "
            f"(batch, channels, {_SIZES[axes]}), "
            f"but got input of size: {list(input_shape)}"
        )


def _check_kernel_fits(
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> None:
    sizes = zip(input_shape[2:], padding[::2], padding[1::2], strict=True)
    padded = [size + before + after for size, before, after in sizes]
    taps = zip(weight_shape[2:], dilation, strict=True)
    extent = [step * (count - 1) + 1 for count, step in taps]
    if any(size < needed for size, needed in zip(padded, extent, strict=True)):
        raise RuntimeError(
            f"Calculated padded input size per channel: {_by(padded)}. "
            f"Kernel size: {_by(extent)}. "
            "Kernel size can't be greater than actual input size"
        )


def _by(sizes: Sequence[int]) -> str:
    return f"({' x '.join(map(str, sizes))})"


def is_channels_last(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether PyTorch takes a tensor of these strides to be channels-last.

    This is PyTorch's own rule (``suggest_memory_format``), which depends on strides and not on
    contiguity: tensors with sides of 1 are contiguous in both formats.
    """
    if stride[1] > stride[-1] or stride[1] == 0:  # true of nearly every NCHW tensor
        return False
    least = 0
    for dim in (1, 3, 2, 0) if len(shape) == 4 else (1, 4, 3, 2, 0):
        if shape[dim] == 0 or stride[dim] < least:
            return False
        if dim == 0 and least == stride[1]:  # (N, 1, 1, 1) is ambiguous, and contiguous
            return False
        least = stride[dim] * max(shape[dim], 1)
    return True
