"""``Conv2d``: a ``torch.nn.Conv2d`` computed by fastconv; ``FusedConv2d`` adds an epilogue."""

# This file does not postpone the evaluation of annotations: torch.fx keeps those of forward, and
# cannot pickle them as strings.

from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy, Tracer
from torch.nn.functional import pad

from fastconv import _precision
from fastconv._precision import Precision
from fastconv.functional import Activation, PaddingLike, conv2d, four_sides, is_four_sided


class Conv2d(torch.nn.Conv2d):
    """:class:`torch.nn.Conv2d`, computed by fastconv.

    It takes the arguments of ``nn.Conv2d`` in the same order, and is a subclass of it: with the
    same parameters, the same initial values for the same seed, and the same state dict. These
    arguments differ:

    Args:
        padding: may also be ``((top, bottom), (left, right))``.
        precision: the arithmetic of float32 on a GPU, ``"ieee"`` or ``"tf32"``; None (the default)
            takes :class:`fastconv.precision`'s choice and, outside of it, PyTorch's setting.
            It has no effect on a CPU.
    """

    # A class attribute: modules that were pickled as nn.Conv2d have none of their own.
    precision: Precision | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: PaddingLike = 0,
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

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.precision is None else f"{shown}, precision={self.precision}"


PYTORCHS: Any = Conv2d.__base__
"""``torch.nn.Conv2d``, the class of the layers that ``fastconv.optimize`` replaces."""


class FusedConv2d(Conv2d):
    """A convolution and its epilogue in one kernel, made by ``fastconv.optimize``.

    It computes ``activation(convolution + bias + residual)``; see :func:`fastconv.conv2d` for
    ``activation``. A residual is an argument of the call.
    """

    activation: Activation | None = None

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        input, padding = self._padded(input)
        return conv2d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups,
            precision=self.precision, activation=self.activation, residual=residual,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"
