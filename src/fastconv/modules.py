"""``Conv2d``: a ``torch.nn.Conv2d`` computed by fastconv; ``FusedConv2d`` adds an epilogue."""

# This file does not postpone the evaluation of annotations: torch.fx keeps those of forward, and
# cannot pickle them as strings.

from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy, Tracer
from torch.nn.functional import pad
from torch.nn.utils.parametrize import type_before_parametrizations

from fastconv import _precision
from fastconv._precision import Precision
from fastconv.functional import (
    Activation,
    LayerPadding,
    PaddingLike,
    conv2d,
    four_sides,
    is_four_sided,
)


class Conv2d(torch.nn.Conv2d):
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

    # A class attribute: modules that were pickled as nn.Conv2d have none of their own.
    precision: Precision | None = None

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
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
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
        if is_four_sided(padding):
            top, bottom, left, right = four_sides(padding)
            self._reversed_padding_repeated_twice = [left, right, top, bottom]
        if precision is not None:
            self.precision = _precision.checked(precision)

    def forward(self, input: Tensor) -> Tensor:
        """Convolves.

        Args:
            input: ``(batch, in_channels, height, width)``, or without ``batch``.

        Returns:
            ``(batch, out_channels, out_height, out_width)``, or without ``batch``.
        """
        # The first comparison, the cheapest, is false in almost all calls.
        if type(input) is not Tensor and isinstance(input, Proxy) and self._is_leaf(input.tracer):
            path = input.tracer.path_of_module(self)
            return input.tracer.create_proxy("call_module", path, (input,), {})
        return self._conv_forward(input, self.weight, self.bias)

    def _is_leaf(self, tracer: Any) -> bool:
        """Whether ``torch.fx`` would record a call of a ``torch.nn.Conv2d``, and not its contents.

        ``torch.fx`` decides by the name of a class's module, and so traces into this one. When
        forward is called, hooks have run: a module with hooks is traced into, so that its hooks do
        not run a second time.
        """
        if (
            type(self) is not Conv2d
            or not isinstance(tracer, Tracer)
            or tracer.root is self
            or self._forward_hooks
            or self._forward_pre_hooks
        ):
            return False
        twin = object.__new__(PYTORCHS)
        twin.__dict__ = self.__dict__
        return tracer.is_leaf_module(twin, tracer.path_of_module(self))

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        input, padding = self._padded(input)
        return conv2d(
            input, weight, bias, self.stride, padding, self.dilation, self.groups,
            precision=self.precision,
        )  # fmt: skip

    def _padded(self, input: Tensor) -> tuple[Tensor, PaddingLike]:
        """Returns the input and the padding by zeros that is left to the convolution."""
        if self.padding_mode == "zeros":
            return input, self.padding
        # As in PyTorch, the convolution itself pads only with zeros; other modes pad a copy.
        return pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            "torch.jit.script does not take a fastconv.Conv2d: use torch.jit.trace or "
            "torch.export, or turn it into PyTorch's first: module.__class__ = torch.nn.Conv2d"
        )

    def _get_name(self) -> str:
        """The name in ``print(model)``, which tells fastconv's layers from PyTorch's.

        Layers with parametrizations have a class of their own, which PyTorch derives. Classes that
        users derive have their own name.
        """
        name = super()._get_name()
        ours = type_before_parametrizations(self) in (Conv2d, FusedConv2d)
        return f"fastconv.{name}" if ours else name

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.precision is None else f"{shown}, precision={self.precision!r}"


PYTORCHS: Any = Conv2d.__base__
"""``torch.nn.Conv2d``, the class of the layers that ``fastconv.optimize`` replaces."""


class FusedConv2d(Conv2d):
    """A convolution and its epilogue in one kernel: what ``fastconv.optimize`` fuses layers into.

    It computes ``activation(convolution + bias + residual)``. Where gradients are recorded, that is
    three steps, as by ``fastconv.conv2d``. Its arguments are those of ``fastconv.Conv2d``.

    Attributes:
        activation: as for ``fastconv.conv2d``; None for none.
        takes_residual: whether ``fastconv.optimize`` has made an addition part of it, so that the
            model calls it with a residual.

    Examples:
        >>> layer = fastconv.FusedConv2d(8, 8, 3, padding="same")
        >>> layer.activation = "relu"
        >>> layer
        fastconv.FusedConv2d(8, 8, kernel_size=(3, 3), ..., activation='relu')
        >>> images = torch.randn(2, 8, 9, 9)
        >>> output = layer(images, images)
        >>> torch.testing.assert_close(
        ...     output, torch.relu(torch.nn.Conv2d.forward(layer, images) + images)
        ... )
    """

    # Class attributes: graphs may have been pickled before there were these attributes.
    activation: Activation | None = None
    takes_residual: bool = False

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Convolves, adds the residual and applies the activation.

        Args:
            input: ``(batch, in_channels, height, width)``, or without ``batch``.
            residual: a tensor that is added before the activation. It has the result's size and the
                input's type and device.

        Returns:
            ``(batch, out_channels, out_height, out_width)``, or without ``batch``.
        """
        input, padding = self._padded(input)
        return conv2d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups,
            precision=self.precision, activation=self.activation, residual=residual,
        )  # fmt: skip

    def extra_repr(self) -> str:
        residual = ", takes_residual=True" if self.takes_residual else ""
        return f"{super().extra_repr()}, activation={self.activation!r}{residual}"
