"""``Conv2d`` and the other layers of PyTorch that convolve, computed by fastconv."""

# This file does not postpone the evaluation of annotations: torch.fx keeps those of forward, and
# cannot pickle them as strings.

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy, Tracer
from torch.nn.functional import pad
from torch.nn.utils.parametrize import type_before_parametrizations

from fastconv import _precision
from fastconv._precision import Precision
from fastconv.functional import conv1d, conv2d
from fastconv.geometry import (
    LayerPadding,
    PaddingLike,
    by_side,
    is_by_side,
    sides_without_names,
)
from fastconv.problem import transposed_size
from fastconv.transposed import conv_transpose1d, conv_transpose2d

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class _Layer(torch.nn.Module):
    """What layers of fastconv have in common: a precision, a name, and how tracers see them."""

    # A class attribute: modules that were pickled as PyTorch's have none of their own.
    precision: Precision | None = None

    def _set_precision(self, precision: Precision | None) -> None:
        if precision is not None:
            self.precision = _precision.checked(precision)

    def _recorded(self, *arguments: Any) -> Any:
        """Records the call if ``torch.fx`` traces it and keeps this layer whole, or else None."""
        input = arguments[0]
        # The first comparison, the cheapest, is false in almost all calls.
        if type(input) is not Tensor and isinstance(input, Proxy) and self._is_leaf(input.tracer):
            tracer: Any = input.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), arguments, {})
        return None

    def _is_leaf(self, tracer: Any) -> bool:
        """Whether ``torch.fx`` would record a call of PyTorch's layer, and not its contents.

        ``torch.fx`` decides by the name of a class's module, and so traces into this one. When
        forward is called, hooks have run: a module with hooks is traced into, so that its hooks do
        not run a second time.
        """
        pytorchs = COUNTERPARTS.get(type(self))
        if (
            pytorchs is None
            or not isinstance(tracer, Tracer)
            or tracer.root is self
            or self._forward_hooks
            or self._forward_pre_hooks
        ):
            return False
        twin = object.__new__(pytorchs)
        twin.__dict__ = self.__dict__
        return tracer.is_leaf_module(twin, tracer.path_of_module(self))

    def __prepare_scriptable__(self) -> NoReturn:
        name = type_before_parametrizations(self).__name__
        raise NotImplementedError(
            f"torch.jit.script does not take a fastconv.{name}: use torch.jit.trace or "
            f"torch.export, or turn it into PyTorch's first: module.__class__ = torch.nn.{name}"
        )

    def _get_name(self) -> str:
        """The name in ``print(model)``, which tells fastconv's layers from PyTorch's.

        Layers with parametrizations have a class of their own, which PyTorch derives. Classes that
        users derive have their own name.
        """
        name = super()._get_name()
        module = type_before_parametrizations(self).__module__
        ours = module.partition(".")[0] == __name__.partition(".")[0]
        return f"fastconv.{name}" if ours else name

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.precision is None else f"{shown}, precision={self.precision!r}"


class _Conv(_Layer):
    """A layer whose padding may have a mode, and differ from side to side."""

    # PyTorch's layers, from which the classes below are derived too, have these.
    padding: Any
    padding_mode: PaddingMode
    weight: Tensor
    bias: Tensor | None
    _reversed_padding_repeated_twice: list[int]

    def _set_sides(self, padding: Any, axes: int) -> None:
        """Takes the padding of each side, if it is written so: PyTorch's constructor does not."""
        if is_by_side(padding, axes):
            flat = by_side(type(self).__name__, padding)
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            self._reversed_padding_repeated_twice = [side for pair in pairs[::-1] for side in pair]

    def forward(self, input: Tensor) -> Tensor:
        """Convolves.

        Args:
            input: ``(batch, in_channels, ...)``, or without ``batch``.

        Returns:
            ``(batch, out_channels, ...)``, or without ``batch``.
        """
        recorded = self._recorded(input)
        if recorded is not None:
            return recorded
        return self._conv_forward(input, self.weight, self.bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _padded(self, input: Tensor) -> tuple[Tensor, PaddingLike]:
        """Returns the input and the padding by zeros that is left to the convolution."""
        if self.padding_mode == "zeros":
            return input, self.padding
        # As in PyTorch, the convolution itself pads only with zeros; other modes pad a copy.
        return pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0


class Conv2d(_Conv, torch.nn.Conv2d):
    """``torch.nn.Conv2d``, computed by fastconv.

    It takes the arguments of ``torch.nn.Conv2d`` in the same order, and is a subclass of it: with
    the same parameters, the same initial values for the same seed, and the same state dict.
    ``padding`` has one more form, and ``precision`` is new.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, or ``(height, width)``.
        stride: one number, or ``(vertical, horizontal)``.
        padding: what is added around the input: one number, ``(vertical, horizontal)``,
            ``"valid"`` (nothing), ``"same"`` (output as large as the input; stride 1 only), or,
            which PyTorch does not take, one number per side: ``((top, bottom), (left, right))``.
        dilation: one number, or ``(vertical, horizontal)``.
        groups: number of groups the channels are split into.
        bias: whether to add a number to each output channel, which is learned.
        padding_mode: what the padding has in it: ``"zeros"``, ``"reflect"``, ``"replicate"`` or
            ``"circular"``.
        device: where the parameters are.
        dtype: the type of the parameters.
        precision: the arithmetic of float32 on a GPU, ``"ieee"`` or ``"tf32"``; None takes the
            choice of ``fastconv.precision`` and, outside of it, PyTorch's setting. It has no
            effect on a CPU.

    Raises:
        ValueError: an argument is none of those above, as in PyTorch.

    Examples:
        >>> layer = fastconv.Conv2d(32, 64, (5, 9), padding=(2, 4))
        >>> layer
        fastconv.Conv2d(32, 64, kernel_size=(5, 9), stride=(1, 1), padding=(2, 4))
        >>> isinstance(layer, torch.nn.Conv2d)
        True
        >>> output = layer(torch.randn(8, 32, 24, 24))
        >>> output.shape
        torch.Size([8, 64, 24, 24])
        >>> output.sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([64, 32, 5, 9])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: LayerPadding = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride,
            padding,  # type: ignore[arg-type]  # PyTorch's annotation has no four-sided padding
            dilation, groups, bias, padding_mode, device, dtype,
        )  # fmt: skip
        self._set_sides(padding, 2)
        self._set_precision(precision)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = self._padded(input)
        return conv2d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups,
            precision=self.precision,
        )  # fmt: skip


class Conv1d(_Conv, torch.nn.Conv1d):
    """``torch.nn.Conv1d``, computed by fastconv.

    It takes the arguments of ``torch.nn.Conv1d`` in the same order, and is a subclass of it: with
    the same parameters, the same initial values for the same seed, and the same state dict.
    ``padding`` has one more form, and ``precision`` is new.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, alone or in a tuple.
        stride: one number, alone or in a tuple.
        padding: what is added before and after the input: one number, alone or in a tuple,
            ``"valid"`` (nothing), ``"same"`` (output as long as the input; stride 1 only), or,
            which PyTorch does not take, one number per side: ``((before, after),)``. With
            ``((kernel_size - 1, 0),)`` the convolution is causal.
        dilation: one number, alone or in a tuple.
        groups: number of groups the channels are split into.
        bias: whether to add a number to each output channel, which is learned.
        padding_mode: what the padding has in it: ``"zeros"``, ``"reflect"``, ``"replicate"`` or
            ``"circular"``.
        device: where the parameters are.
        dtype: the type of the parameters.
        precision: as for ``fastconv.Conv2d``.

    Raises:
        ValueError: an argument is none of those above, as in PyTorch.

    Examples:
        >>> layer = fastconv.Conv1d(16, 32, 4, padding=((3, 0),))
        >>> layer
        fastconv.Conv1d(16, 32, kernel_size=(4,), stride=(1,), padding=((3, 0),))
        >>> layer(torch.randn(8, 16, 100)).shape
        torch.Size([8, 32, 100])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] | tuple[tuple[int, int]] | Literal["valid", "same"] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride,
            padding,  # type: ignore[arg-type]  # PyTorch's annotation has no padding for each side
            dilation, groups, bias, padding_mode, device, dtype,
        )  # fmt: skip
        self._set_sides(padding, 1)
        self._set_precision(precision)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = self._padded(input)
        return conv1d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups,
            precision=self.precision,
        )  # fmt: skip


class _ConvTranspose(_Layer):
    """A transposed layer: ``output_size`` chooses among the sizes that one input may belong to."""

    # PyTorch's layers, from which the classes below are derived too, have these.
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...]
    padding_mode: PaddingMode
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Convolves.

        Args:
            input: ``(batch, in_channels, ...)``, or without ``batch``.
            output_size: the output's sizes, with or without those of batch and channels; None for
                those that ``output_padding`` gives.

        Returns:
            ``(batch, out_channels, ...)``, or without ``batch``.

        Raises:
            ValueError: the output cannot have this size, as in PyTorch.
        """
        recorded = self._recorded(input, *(() if output_size is None else (output_size,)))
        if recorded is not None:
            return recorded
        if self.padding_mode != "zeros":
            name = type_before_parametrizations(self).__name__
            raise ValueError(f"Only `zeros` padding mode is supported for {name}")
        more = self.output_padding
        if output_size is not None:
            more = self._padding_for(input, output_size)
        return self._convolved(input, more)

    def _convolved(self, input: Tensor, output_padding: tuple[int, ...]) -> Tensor:
        raise NotImplementedError

    def _padding_for(self, input: Tensor, output_size: Sequence[int]) -> tuple[int, ...]:
        """Returns the output padding for an output of this size."""
        axes = len(self.kernel_size)
        others = input.dim() - axes
        wanted = list(output_size[others:] if len(output_size) == others + axes else output_size)
        if len(wanted) != axes:
            raise ValueError(
                f"ConvTranspose{axes}D: for {input.dim()}D input, output_size must have {axes} "
                f"or {others + axes} elements (got {len(wanted)})"
            )
        around = sides_without_names(type(self).__name__, self.padding, axes)
        sizes = (input.shape[others:], self.kernel_size)
        least = list(transposed_size(*sizes, (0,) * axes, self.stride, around, self.dilation))
        most = [size + step - 1 for size, step in zip(least, self.stride, strict=True)]
        if not all(map(_is_between, least, wanted, most)):
            raise ValueError(
                f"requested an output size of {wanted}, but valid sizes range "
                f"from {least} to {most} (for an input of {input.size()[2:]})"
            )
        return tuple(size - low for size, low in zip(wanted, least, strict=True))


def _is_between(least: int, value: int, most: int) -> bool:
    return least <= value <= most


class ConvTranspose1d(_ConvTranspose, torch.nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d``, computed by fastconv.

    It takes the arguments of ``torch.nn.ConvTranspose1d`` in the same order, and is a subclass of
    it: with the same parameters, the same initial values for the same seed, and the same state
    dict. ``padding`` has one more form, and ``precision`` is new.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, alone or in a tuple.
        stride: one number, alone or in a tuple.
        padding: what is left out at both ends of the output: one number, alone or in a tuple, or,
            which PyTorch does not take, one number per side: ``((before, after),)``.
        output_padding: what the output has in addition at its end.
        groups: number of groups the channels are split into.
        bias: whether to add a number to each output channel, which is learned.
        dilation: one number, alone or in a tuple.
        padding_mode: ``"zeros"``, as in PyTorch.
        device: where the parameters are.
        dtype: the type of the parameters.
        precision: as for ``fastconv.Conv2d``.

    Raises:
        ValueError: an argument is none of those above, as in PyTorch.

    Examples:
        >>> layer = fastconv.ConvTranspose1d(32, 16, 16, stride=8, padding=4)
        >>> layer
        fastconv.ConvTranspose1d(32, 16, kernel_size=(16,), stride=(8,), padding=(4,))
        >>> frames = torch.randn(8, 32, 50)
        >>> layer(frames).shape
        torch.Size([8, 16, 400])
        >>> layer(frames, output_size=[403]).shape
        torch.Size([8, 16, 403])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] | tuple[tuple[int, int]] = 0,
        output_padding: int | tuple[int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int] = 1,
        padding_mode: Literal["zeros"] = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride,
            padding,  # type: ignore[arg-type]  # PyTorch's annotation has no padding for each side
            output_padding, groups, bias, dilation, padding_mode, device, dtype,
        )  # fmt: skip
        self._set_precision(precision)

    def _convolved(self, input: Tensor, output_padding: tuple[int, ...]) -> Tensor:
        return conv_transpose1d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups,
            self.dilation, precision=self.precision,
        )  # fmt: skip


class ConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d``, computed by fastconv.

    It takes the arguments of ``torch.nn.ConvTranspose2d`` in the same order, and is a subclass of
    it: with the same parameters, the same initial values for the same seed, and the same state
    dict. ``padding`` has one more form, and ``precision`` is new.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, or ``(height, width)``.
        stride: one number, or ``(vertical, horizontal)``.
        padding: what is left out at the output's sides: one number, ``(vertical, horizontal)``, or,
            which PyTorch does not take, one number per side: ``((top, bottom), (left, right))``.
        output_padding: rows and columns that the output has in addition, at the bottom and to the
            right: one number, or ``(vertical, horizontal)``.
        groups: number of groups the channels are split into.
        bias: whether to add a number to each output channel, which is learned.
        dilation: one number, or ``(vertical, horizontal)``.
        padding_mode: ``"zeros"``, as in PyTorch.
        device: where the parameters are.
        dtype: the type of the parameters.
        precision: as for ``fastconv.Conv2d``.

    Raises:
        ValueError: an argument is none of those above, as in PyTorch.

    Examples:
        >>> layer = fastconv.ConvTranspose2d(16, 8, 2, stride=2)
        >>> layer
        fastconv.ConvTranspose2d(16, 8, kernel_size=(2, 2), stride=(2, 2))
        >>> layer(torch.randn(8, 16, 12, 12)).shape
        torch.Size([8, 8, 24, 24])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int] = 1,
        padding_mode: Literal["zeros"] = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride,
            padding,  # type: ignore[arg-type]  # PyTorch's annotation has no padding for each side
            output_padding, groups, bias, dilation, padding_mode, device, dtype,
        )  # fmt: skip
        self._set_precision(precision)

    def _convolved(self, input: Tensor, output_padding: tuple[int, ...]) -> Tensor:
        return conv_transpose2d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups,
            self.dilation, precision=self.precision,
        )  # fmt: skip


COUNTERPARTS: dict[type[torch.nn.Module], Any] = {
    ours: ours.__bases__[-1] for ours in (Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d)
}
"""PyTorch's classes of the layers that can be exchanged, by fastconv's."""
