"""``Conv2d``: a ``torch.nn.Conv2d`` whose forward is ours; and one with what follows it."""

# Annotations are evaluated here: torch.fx keeps those of forward, and pickles no strings.

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

    Takes everything that ``nn.Conv2d`` takes, in the same order, and is one: same parameters, same
    initial values under the same seed, same state dict. Beyond it:

    Args:
        padding: also ``((top, bottom), (left, right))``.
        precision: arithmetic of float32 on a GPU, ``"ieee"`` or ``"tf32"``; None (the default)
            takes :class:`fastconv.precision`'s choice and, outside of it, PyTorch's setting.
            No effect on a CPU.
    """

    # A class attribute, so that modules whose state was saved by nn.Conv2d have one too.
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
        # Of almost all calls, the first comparison decides, which takes the least time.
        if type(input) is not Tensor and isinstance(input, Proxy) and self._is_leaf(input.tracer):
            path = input.tracer.path_of_module(self)
            return input.tracer.create_proxy("call_module", path, (input,), {})
        return self._conv_forward(input, self.weight, self.bias)

    def _is_leaf(self, tracer: Any) -> bool:
        """Whether ``torch.fx`` would write down a call of a ``torch.nn.Conv2d``, not what is in it.

        It decides by the name of a class's module, and so goes into ours. Hooks have run then: with
        them, what is in it is written down, lest they run twice.
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
        """The input, and the zeros that are to be around it."""
        if self.padding_mode == "zeros":
            return input, self.padding
        # As PyTorch does: only zeros are free, every other border is copied.
        return pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            "torch.jit.script does not take a fastconv.Conv2d: use torch.jit.trace or "
            "torch.export, or make it PyTorch's before, by module.__class__ = torch.nn.Conv2d"
        )

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.precision is None else f"{shown}, precision={self.precision}"


PYTORCHS: Any = Conv2d.__base__
"""What ``fastconv.optimize`` exchanges: the class of the layers that it is measured against."""


class FusedConv2d(Conv2d):
    """A convolution and what follows it in a network, in one kernel: made by ``fastconv.optimize``.

    Computes ``activation(convolution + bias + residual)``; see :func:`fastconv.conv2d` for
    ``activation``, None for none. A residual is given with each call, or not at all.
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
