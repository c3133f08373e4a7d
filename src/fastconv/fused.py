"""Layers with an epilogue, in one kernel where there is one: ``fastconv.optimize`` makes them."""

# This file does not postpone the evaluation of annotations: torch.fx keeps those of forward, and
# cannot pickle them as strings.

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastconv.functional import conv1d, conv2d, conv3d
from fastconv.geometry import Activation
from fastconv.modules import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from fastconv.transposed import conv_transpose1d, conv_transpose2d, conv_transpose3d


class Fused(torch.nn.Module):
    """What layers with an epilogue have in common."""

    # Class attributes: graphs may have been pickled before there were these attributes.
    activation: Activation | None = None
    takes_residual: bool = False

    _function: Callable[..., Tensor]  # the function that computes the layer

    def extra_repr(self) -> str:
        residual = ", takes_residual=True" if self.takes_residual else ""
        return f"{super().extra_repr()}, activation={self.activation!r}{residual}"


class _FusedConv(Fused):
    def forward(self: Any, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Convolves, adds the residual and applies the activation.

        Args:
            input: ``(batch, in_channels, ...)``, or without ``batch``.
            residual: a tensor that is added before the activation. It has the result's size and the
                input's type and device.

        Returns:
            ``(batch, out_channels, ...)``, or without ``batch``.
        """
        input, padding = self._padded(input)
        return self._function(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups,
            precision=self.precision, activation=self.activation, residual=residual,
        )  # fmt: skip


class _FusedConvTranspose(Fused):
    def forward(
        self: Any,
        input: Tensor,
        output_size: Sequence[int] | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Convolves, adds the residual and applies the activation.

        Args:
            input: ``(batch, in_channels, ...)``, or without ``batch``.
            output_size: the output's sizes, as for ``fastconv.ConvTranspose2d``.
            residual: a tensor that is added before the activation. It has the result's size and the
                input's type and device.

        Returns:
            ``(batch, out_channels, ...)``, or without ``batch``.
        """
        more = self.output_padding
        if output_size is not None:
            more = self._padding_for(input, output_size)
        return self._function(
            input, self.weight, self.bias, self.stride, self.padding, more, self.groups,
            self.dilation, precision=self.precision, activation=self.activation, residual=residual,
        )  # fmt: skip


class FusedConv2d(_FusedConv, Conv2d):
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

    _function = staticmethod(conv2d)


class FusedConv1d(_FusedConv, Conv1d):
    """A 1-D convolution and its epilogue in one kernel, as ``fastconv.FusedConv2d``.

    Its arguments are those of ``fastconv.Conv1d``.

    Attributes:
        activation: as for ``fastconv.conv2d``; None for none.
        takes_residual: whether ``fastconv.optimize`` has made an addition part of it.

    Examples:
        >>> layer = fastconv.FusedConv1d(8, 8, 3, padding="same")
        >>> layer.activation = "gelu"
        >>> layer(torch.randn(2, 8, 9)).shape
        torch.Size([2, 8, 9])
    """

    _function = staticmethod(conv1d)


class FusedConv3d(_FusedConv, Conv3d):
    """A 3-D convolution and its epilogue in one kernel, as ``fastconv.FusedConv2d``.

    Its arguments are those of ``fastconv.Conv3d``.

    Attributes:
        activation: as for ``fastconv.conv2d``; None for none.
        takes_residual: whether ``fastconv.optimize`` has made an addition part of it.

    Examples:
        >>> layer = fastconv.FusedConv3d(8, 8, 3, padding="same")
        >>> layer.activation = "relu"
        >>> layer(torch.randn(2, 8, 4, 9, 9)).shape
        torch.Size([2, 8, 4, 9, 9])
    """

    _function = staticmethod(conv3d)


class FusedConvTranspose1d(_FusedConvTranspose, ConvTranspose1d):
    """A 1-D transposed convolution and its epilogue, as ``fastconv.FusedConvTranspose2d``.

    Its arguments are those of ``fastconv.ConvTranspose1d``.

    Attributes:
        activation: as for ``fastconv.conv2d``; None for none.
        takes_residual: whether ``fastconv.optimize`` has made an addition part of it.

    Examples:
        >>> layer = fastconv.FusedConvTranspose1d(8, 4, 4, stride=2)
        >>> layer.activation = "tanh"
        >>> layer(torch.randn(2, 8, 9)).shape
        torch.Size([2, 4, 20])
    """

    _function = staticmethod(conv_transpose1d)


class FusedConvTranspose2d(_FusedConvTranspose, ConvTranspose2d):
    """A transposed convolution and its epilogue: what ``fastconv.optimize`` fuses layers into.

    It computes ``activation(transposed convolution + bias + residual)``, in one kernel where
    ``fastconv.conv_transpose2d`` does. Its arguments are those of ``fastconv.ConvTranspose2d``.

    Attributes:
        activation: as for ``fastconv.conv2d``; None for none.
        takes_residual: whether ``fastconv.optimize`` has made an addition part of it, so that the
            model calls it with a residual.

    Examples:
        >>> layer = fastconv.FusedConvTranspose2d(8, 4, 2, stride=2)
        >>> layer.activation = "relu"
        >>> images = torch.randn(2, 8, 9, 9)
        >>> torch.testing.assert_close(
        ...     layer(images), torch.relu(torch.nn.ConvTranspose2d.forward(layer, images))
        ... )
    """

    _function = staticmethod(conv_transpose2d)


class FusedConvTranspose3d(_FusedConvTranspose, ConvTranspose3d):
    """A 3-D transposed convolution and its epilogue, as ``fastconv.FusedConvTranspose2d``.

    Its arguments are those of ``fastconv.ConvTranspose3d``.

    Attributes:
        activation: as for ``fastconv.conv2d``; None for none.
        takes_residual: whether ``fastconv.optimize`` has made an addition part of it.

    Examples:
        >>> layer = fastconv.FusedConvTranspose3d(8, 4, 2, stride=2)
        >>> layer.activation = "relu"
        >>> layer(torch.randn(2, 8, 4, 9, 9)).shape
        torch.Size([2, 4, 8, 18, 18])
    """

    _function = staticmethod(conv_transpose3d)


FUSED: dict[type[torch.nn.Module], Any] = {
    Conv1d: FusedConv1d,
    Conv2d: FusedConv2d,
    Conv3d: FusedConv3d,
    ConvTranspose1d: FusedConvTranspose1d,
    ConvTranspose2d: FusedConvTranspose2d,
    ConvTranspose3d: FusedConvTranspose3d,
}
"""The classes of layers with an epilogue, by those without one."""
