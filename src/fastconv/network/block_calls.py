"""The call of a convolution together with the BatchNorm behind it: repeated with random data.

A convolution that is slower than PyTorch's by itself may be faster in a block, where it leaves the
statistics of its output for the normalization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastconv.backends import left_statistics
from fastconv.batchnorm import conv_bn_act
from fastconv.network.calls import Call, Form, Passes, Trial
from fastconv.network.norm_calls import NormCall, NormTrial


@dataclass(frozen=True)
class BlockCall:
    """The calls of a block's convolution and of its BatchNorm, with what follows that."""

    conv: Call
    norm: NormCall

    @property
    def kind(self) -> str:
        return f"{self.conv.kind} with {self.norm.kind}"

    @property
    def forms(self) -> tuple[Form, ...]:
        return self.conv.forms

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the convolution is computed."""
        return self.conv.dtype

    @property
    def may_leave_statistics(self) -> bool:
        """Whether there are kernels that leave statistics of such an output."""
        return self.norm.of_batch and self.dtype in left_statistics.TYPES

    def trial(self, layer: nn.Module, device: torch.device) -> BlockTrial:
        """The call with random data; ``layer`` is the convolution."""
        return BlockTrial(self, layer, device)


class BlockTrial(Passes):
    """A block with random data, whose convolution is PyTorch's or fastconv's; the rest is ours."""

    def __init__(self, call: BlockCall, layer: nn.Module, device: torch.device) -> None:
        self.call = call
        self._conv = Trial(call.conv, layer, device)
        self._norm = NormTrial(call.norm, device)
        self.input, self.residual = self._conv.input, self._norm.residual
        # The normalization's own input is the convolution's output here.
        beside = [one for one in self._norm.wanted if one is not self._norm.input]
        self.wanted = [*self._conv.wanted, *beside]

    def pytorchs(self) -> object:
        with torch.set_grad_enabled(bool(self.wanted)):
            output = self._conv.pytorchs_forward(self.input, None)
            return self.gradients(self._norm.ours_forward(output, self.residual))

    def ours(self) -> object:
        return self.gradients(self.ours_forward(self.input, self.residual))

    def ours_forward(self, input: Tensor, residual: Tensor | None) -> Tensor:
        layer: Any = self._conv.layer
        (mean, var), (scale, shift) = self._norm.statistics, self._norm.parameters
        with self._conv.settings(), torch.set_grad_enabled(bool(self.wanted)):
            input, padding = layer._padded(input)
            return conv_bn_act(
                input, layer.weight, layer.bias, mean, var, scale, shift, layer.stride, padding,
                layer.dilation, layer.groups, training=True,
                activation=self.call.norm.activation, residual=residual,
            )  # fmt: skip
