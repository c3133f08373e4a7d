"""The geometry of one convolution as a value: what is computed, independent of how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

Pair = tuple[int, int]

WORD = 1 << 63
"""One more than the largest integer in PyTorch, which has 64 bits."""


class Padding(NamedTuple):
    """The number of zeros on each side of the input."""

    top: int
    bottom: int
    left: int
    right: int


class Epilogue(NamedTuple):
    """What a forward pass does to its accumulators before it stores them.

    It stores activation(accumulators + bias + residual).
    """

    activation: str = "identity"
    slope: float = 0.0  # leaky_relu's factor of negative numbers, 0 for other activations
    residual: bool = False  # whether there is a residual


NO_EPILOGUE = Epilogue()

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
    """The geometry of one 2-D convolution, common to its forward pass and its two gradients.

    Sizes may be symbolic while PyTorch traces. :meth:`of` makes a checked one.
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
        """Returns the problem of convolving these shapes; raises PyTorch's error if invalid."""
        check_words(stride, padding, dilation, groups)
        _check_parameters(stride, padding, dilation, groups)
        _check_weight(weight_shape, groups)
        _check_input(input_shape, weight_shape, groups)
        batch, in_channels, *input_size = input_shape
        out_channels, _, *kernel_size = weight_shape
        problem = cls(
            batch,
            in_channels,
            out_channels,
            _pair(input_size),
            _pair(kernel_size),
            _pair(stride),
            Padding(*padding),
            _pair(dilation),
            groups,
        )
        problem._check_kernel_fits()
        problem._check_padded_size()
        return problem

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
    def input_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel_size)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.out_channels, *self.output_size)

    @property
    def flops(self) -> int:
        """Floating-point operations of a forward pass or either gradient; a multiply-add is two."""
        taps = self.kernel_size[0] * self.kernel_size[1]
        height, width = self.output_size
        per_pixel = 2 * self.out_channels * (self.in_channels // self.groups) * taps
        return self.batch * height * width * per_pixel

    @property
    def without_idle_dilation(self) -> Problem:
        """The same convolution with dilation 1 along axes of one tap, where it has no effect."""
        height, width = self.kernel_size
        rows, columns = self.dilation
        dilation = (rows if height > 1 else 1, columns if width > 1 else 1)
        return self if dilation == self.dilation else replace(self, dilation=dilation)

    def _check_kernel_fits(self) -> None:
        padded, extent = self.padded_size, self.kernel_extent
        if padded[0] < extent[0] or padded[1] < extent[1]:
            raise RuntimeError(
                f"Calculated padded input size per channel: ({padded[0]} x {padded[1]}). "
                f"Kernel size: ({extent[0]} x {extent[1]}). "
                "Kernel size can't be greater than actual input size"
            )

    def _check_padded_size(self) -> None:
        for size in self.padded_size:
            if isinstance(size, int) and size >= WORD:  # PyTorch itself checks symbolic sizes
                raise RuntimeError(
                    f"padded input sizes are below 2**63, but padding={list(self.padding)} "
                    f"(top, bottom, left, right) makes one of {size}"
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


def _pair(values: tuple[int, ...] | list[int]) -> Pair:
    first, second = values
    return first, second


def _check_parameters(
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> None:
    for name, values, length in (
        ("stride", stride, 2),
        ("padding", padding, 4),
        ("dilation", dilation, 2),
    ):
        if len(values) != length:
            raise RuntimeError(f"expected {length} values of {name}, but got {name}={list(values)}")
    if min(stride) <= 0:
        raise RuntimeError(f"non-positive stride is not supported, but got stride={list(stride)}")
    if min(padding) < 0:
        raise RuntimeError(
            f"negative padding is not supported, but got padding={list(padding)} "
            "(top, bottom, left, right)"
        )
    if min(dilation) <= 0:
        raise RuntimeError(
            "non-positive dilation is not supported: dilation should be greater than zero, "
            f"but got dilation={list(dilation)}"
        )
    if groups <= 0:
        raise RuntimeError(f"non-positive groups is not supported, but got groups={groups}")


def _check_weight(weight_shape: tuple[int, ...], groups: int) -> None:
    weight, rank = list(weight_shape), len(weight_shape)
    if rank != 4:
        raise RuntimeError(
            "conv2d takes a 4-dimensional weight (out_channels, in_channels / groups, height, "
            f"width), but got weight of size {weight}. "
            f"Expected {rank}-dimensional input for {rank}-dimensional weight"
        )
    out_channels, _, *kernel_size = weight_shape
    if out_channels < groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, "
            f"but got weight of size {weight} instead"
        )
    if out_channels % groups != 0:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, "
            f"but got weight of size {weight} instead"
        )
    if min(kernel_size) <= 0:
        raise RuntimeError(
            f"kernel size should be greater than zero, but got weight of size {weight}"
        )


def _check_input(input_shape: tuple[int, ...], weight_shape: tuple[int, ...], groups: int) -> None:
    if len(input_shape) != 4:
        raise RuntimeError(
            "Expected 4D (batched) input of size (batch, channels, height, width), "
            f"but got input of size: {list(input_shape)}"
        )
    channels, expected = input_shape[1], weight_shape[1] * groups
    if channels != expected:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight_shape)}, expected "
            f"input{list(input_shape)} to have {expected} channels, "
            f"but got {channels} channels instead"
        )


def is_channels_last(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether PyTorch takes a 4-D tensor of these strides to be channels-last.

    This is PyTorch's own rule (``suggest_memory_format``), which depends on strides and not on
    contiguity: tensors with sides of 1 are contiguous in both formats.
    """
    if stride[1] > stride[3] or stride[1] == 0:  # true of nearly every NCHW tensor
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if shape[dim] == 0 or stride[dim] < least:
            return False
        if dim == 0 and least == stride[1]:  # (N, 1, 1, 1) is ambiguous, and contiguous
            return False
        least = stride[dim] * max(shape[dim], 1)
    return True
