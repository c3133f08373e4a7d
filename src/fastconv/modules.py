"""``Conv2d`` and the other layers of PyTorch that convolve, computed by fastconv."""

# This file does not postpone the evaluation of annotations: torch.fx keeps those of forward, and
# cannot pickle them as strings.

from typing import Any, Literal

import torch
from torch import Tensor

from fastconv._precision import Precision
from fastconv.functional import conv1d, conv2d, conv3d
from fastconv.geometry import LayerPadding
from fastconv.layers import COUNTERPARTS, Convolution, PaddingMode, Transposed
from fastconv.transposed import conv_transpose1d, conv_transpose2d, conv_transpose3d


class Conv2d(Convolution, torch.nn.Conv2d):
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


class Conv1d(Convolution, torch.nn.Conv1d):
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


class Conv3d(Convolution, torch.nn.Conv3d):
    """``torch.nn.Conv3d``, computed by fastconv.

    It takes the arguments of ``torch.nn.Conv3d`` in the same order, and is a subclass of it: with
    the same parameters, the same initial values for the same seed, and the same state dict.
    ``padding`` has one more form, and ``precision`` is new.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, or ``(depth, height, width)``.
        stride: one number, or ``(depth, vertical, horizontal)``.
        padding: what is added around the input: one number, ``(depth, vertical, horizontal)``,
            ``"valid"`` (nothing), ``"same"`` (output as large as the input; stride 1 only), or,
            which PyTorch does not take, one number per side:
            ``((front, back), (top, bottom), (left, right))``. With ``((k - 1, 0), ...)`` the
            convolution is causal in time.
        dilation: one number, or ``(depth, vertical, horizontal)``.
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
        >>> layer = fastconv.Conv3d(3, 16, (3, 5, 5), padding=((2, 0), (2, 2), (2, 2)))
        >>> layer(torch.randn(2, 3, 8, 16, 16)).shape
        torch.Size([2, 16, 8, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: int
        | tuple[int, int, int]
        | tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
        | Literal["valid", "same"] = 0,
        dilation: int | tuple[int, int, int] = 1,
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
        self._set_sides(padding, 3)
        self._set_precision(precision)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = self._padded(input)
        return conv3d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups,
            precision=self.precision,
        )  # fmt: skip


class ConvTranspose1d(Transposed, torch.nn.ConvTranspose1d):
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


class ConvTranspose2d(Transposed, torch.nn.ConvTranspose2d):
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


class ConvTranspose3d(Transposed, torch.nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d``, computed by fastconv.

    It takes the arguments of ``torch.nn.ConvTranspose3d`` in the same order, and is a subclass of
    it: with the same parameters, the same initial values for the same seed, and the same state
    dict. ``padding`` has one more form, and ``precision`` is new.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: one number, or ``(depth, height, width)``.
        stride: one number, or ``(depth, vertical, horizontal)``.
        padding: what is left out at the output's sides: one number, ``(depth, vertical,
            horizontal)``, or, which PyTorch does not take, one number per side:
            ``((front, back), (top, bottom), (left, right))``.
        output_padding: planes, rows and columns that the output has in addition, at the back, at
            the bottom and to the right: one number, or ``(depth, vertical, horizontal)``.
        groups: number of groups the channels are split into.
        bias: whether to add a number to each output channel, which is learned.
        dilation: one number, or ``(depth, vertical, horizontal)``.
        padding_mode: ``"zeros"``, as in PyTorch.
        device: where the parameters are.
        dtype: the type of the parameters.
        precision: as for ``fastconv.Conv2d``.

    Raises:
        ValueError: an argument is none of those above, as in PyTorch.

    Examples:
        >>> layer = fastconv.ConvTranspose3d(16, 8, 2, stride=2)
        >>> layer
        fastconv.ConvTranspose3d(16, 8, kernel_size=(2, 2, 2), stride=(2, 2, 2))
        >>> layer(torch.randn(2, 16, 6, 6, 6)).shape
        torch.Size([2, 8, 12, 12, 12])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: int
        | tuple[int, int, int]
        | tuple[tuple[int, int], tuple[int, int], tuple[int, int]] = 0,
        output_padding: int | tuple[int, int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int, int] = 1,
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
        return conv_transpose3d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups,
            self.dilation, precision=self.precision,
        )  # fmt: skip


COUNTERPARTS.update(
    (ours, ours.__bases__[-1])
    for ours in (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
)
