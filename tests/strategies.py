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


@dataclass(frozen=True)
class Sequences:
    """A convolution along one axis, or a transposed one along one or two, but for its values."""

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    bias: int  # its elements, 0 for none
    batched: bool
    geometry: dict[str, Any]
    channels_last: tuple[bool, bool]  # of input and weight

    def tensors(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Random input, weight and, if there is one, bias; the same ones each time."""
        torch.manual_seed(0)
        input, weight = (
            channels_last(random(shape, dtype, device)) if last else random(shape, dtype, device)
            for shape, last in zip(
                (self.input_shape, self.weight_shape), self.channels_last, strict=True
            )
        )
        tensors = [input if self.batched else input[0], weight]
        return [*tensors, random((self.bias,), dtype, device)] if self.bias else tensors


def channels_last(tensor: Tensor) -> Tensor:
    """A copy whose channels are neighbours in memory, for tensors of any rank."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


@st.composite
def sequences(draw: st.DrawFn, axes: int, transposed: bool) -> Sequences:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    depth, multiplier = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    kernel, stride, dilation, padding = (
        tuple(draw(values) for _ in range(axes))
        for values in (
            st.integers(1, 9),
            st.integers(1, 4),
            st.integers(1, 3),
            st.tuples(_PADDING, _PADDING),
        )
    )
    reach = [step * (taps - 1) + 1 for taps, step in zip(kernel, dilation, strict=True)]
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        # The smallest input whose output has an element, or a larger one.
        least = [
            max(1, -((needed - sum(sides) - 1) // step) + 1)
            for needed, sides, step in zip(reach, padding, stride, strict=True)
        ]
        geometry["output_padding"] = tuple(
            draw(st.integers(0, max(both) - 1)) for both in zip(stride, dilation, strict=True)
        )
    else:
        least = [max(1, needed - sum(sides)) for needed, sides in zip(reach, padding, strict=True)]
    batched = draw(st.booleans())
    outer, inner = groups * multiplier, depth
    channels = outer if transposed else groups * depth
    return Sequences(
        input_shape=(
            draw(st.integers(0, 3)) if batched else 1,
            channels,
            *(size + draw(st.integers(0, 7)) for size in least),
        ),
        weight_shape=(outer, inner, *kernel),
        bias=draw(st.sampled_from([0, groups * depth if transposed else outer])),
        batched=batched,
        geometry=geometry,
        channels_last=(draw(st.booleans()), draw(st.booleans())),
    )
