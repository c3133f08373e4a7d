"""Hypothesis strategies that draw convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracle import random

_FORMATS = st.sampled_from([torch.contiguous_format, torch.channels_last])
_PADDING = st.integers(0, 4)


@dataclass(frozen=True)
class Convolution:
    """Everything about a convolution but its values and their dtype."""

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    bias: bool
    batched: bool
    geometry: dict[str, Any]
    formats: tuple[torch.memory_format, ...]

    def tensors(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Random input, weight and, if there is one, bias; the same ones each time."""
        torch.manual_seed(0)
        input, weight = (
            random(shape, dtype, device).to(memory_format=memory_format)
            for shape, memory_format in zip(
                (self.input_shape, self.weight_shape), self.formats, strict=True
            )
        )
        tensors = [input if self.batched else input[0], weight]
        return [*tensors, random(self.weight_shape[:1], dtype, device)] if self.bias else tensors


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    groups = draw(st.sampled_from([1, 1, 2, 3, 5]))
    depth, multiplier = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    kernel, stride, dilation, padding = (
        (draw(values), draw(values))
        for values in (
            st.integers(1, 9),
            st.integers(1, 3),
            st.integers(1, 3),
            st.tuples(_PADDING, _PADDING),
        )
    )
    # The smallest input that holds the kernel, or a larger one.
    size = (
        max(1, step * (taps - 1) + 1 - sum(sides)) + draw(st.integers(0, 7))
        for taps, step, sides in zip(kernel, dilation, padding, strict=True)
    )
    batched = draw(st.booleans())
    batch = draw(st.integers(0, 3)) if batched else 1
    return Convolution(
        input_shape=(batch, groups * depth, *size),
        weight_shape=(groups * multiplier, depth, *kernel),
        bias=draw(st.booleans()),
        batched=batched,
        geometry={"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
        formats=(draw(_FORMATS), draw(_FORMATS)),
    )
