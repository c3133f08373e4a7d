"""Causal convolutions on a GPU: plan, compile, launch.

What follows from shapes, strides, types and alignment is decided once and cached.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from fastconv.backends import cuda
from fastconv.backends.causal import taps
from fastconv.backends.causal.taps import Inputs
from fastconv.backends.cuda import Ready
from fastconv.jit import launch
from fastconv.kernels.causal import plan
from fastconv.kernels.causal.plan import Convolution, Layout, Update
from fastconv.kernels.family import ALIGNMENT, Plan

_INPUTS = ("x", "weight", "bias", "seq_idx", "initial_states")
FORWARD = (*_INPUTS, "y", "scratch")
BACKWARD = (
    *_INPUTS, "grad", "grad_final", "grad_x", "grad_states", "grad_weight", "grad_bias", "scratch"
)  # fmt: skip
UPDATE = (
    "x", "conv_state", "weight", "bias", "cache_seqlens", "conv_state_indices", "y", "scratch"
)  # fmt: skip
"""The names of each pass's tensors in launches, in the order in which they are passed."""


class Rows(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    misalignment: int  # bytes of the address beyond a multiple of ALIGNMENT

    @classmethod
    def of(cls, tensor: Tensor) -> Rows:
        return cls(tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT)

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides, with 0 for axes of one element, along which nothing is strided."""
        axes = zip(self.shape, self.stride, strict=True)
        batch, channel, position = (stride if size > 1 else 0 for size, stride in axes)
        return batch, channel, position

    def layout(self, channels_last: bool) -> Layout:
        batch, channel, position = self.strides
        return Layout(
            batch, position if channels_last else channel, gcd(ALIGNMENT, self.misalignment)
        )


class Call(NamedTuple):
    """All that the launches of a pass depend on; a call makes it and looks them up by it."""

    x: Rows
    dtype: torch.dtype
    weight_dtype: torch.dtype
    width: int
    channels_last: bool
    silu: bool
    sequences: bool
    gpu: int  # its index

    @classmethod
    def of(cls, inputs: Inputs, result: Tensor) -> Call:
        """Describes a convolution, whose result has the layout of its input."""
        x, weight, _, seq_idx, _, silu = inputs
        return cls(
            Rows.of(x),
            x.dtype,
            weight.dtype,
            weight.shape[1],
            rows_are_positions(result),
            silu,
            seq_idx is not None,
            x.device.index,
        )

    @property
    def planned_for(self) -> Convolution:
        """The call in the planner's terms."""
        batch, dim, length = self.x.shape
        return Convolution(
            *cuda.SCALARS[self.dtype],
            cuda.SCALARS[self.weight_dtype][0],
            batch,
            dim,
            length,
            self.width,
            self.channels_last,
            self.silu,
            self.sequences,
            self.x.layout(self.channels_last),
        )


class Steps(NamedTuple):
    """All that the launches of an update depend on."""

    x: Rows
    state: Rows
    dtype: torch.dtype
    weight_dtype: torch.dtype
    width: int
    silu: bool
    circular: bool
    gpu: int  # its index

    @classmethod
    def of(cls, x: Tensor, conv_state: Tensor, weight: Tensor, silu: bool, circular: bool) -> Steps:
        kind = (x.dtype, weight.dtype, weight.shape[1], silu, circular, x.device.index)
        return cls(Rows.of(x), Rows.of(conv_state), *kind)

    @property
    def planned_for(self) -> Update:
        """The steps in the planner's terms."""
        batch, dim, count = self.x.shape
        return Update(
            cuda.SCALARS[self.dtype][0],
            cuda.SCALARS[self.weight_dtype][0],
            batch,
            dim,
            count,
            self.state.shape[2],
            self.width,
            self.silu,
            self.circular,
            self.x.strides,
            self.state.strides,
        )


def forward(inputs: Inputs, y: Tensor) -> None:
    """Fills ``y``, whose layout is that of x, with the output."""
    inputs = laid_out(inputs, y)
    _ready_forward(Call.of(inputs, y)).run(*inputs[:5], y)


def backward(
    inputs: Inputs,
    grad: Tensor,
    grad_final: Tensor | None,
    gradients: taps.Gradients,
) -> None:
    """Fills the gradients; that of x has the layout of x. Those that are empty are not computed."""
    inputs, grad_x = laid_out(inputs, gradients.x), gradients.x
    grad = as_rows(grad, grad_x)
    wanted = (_unless_empty(one) for one in (gradients.initial_states, *gradients[1:3]))
    parameters = gradients.weight.numel() > 0
    ready = _ready_backward(Call.of(inputs, grad_x), Rows.of(grad), parameters)
    ready.run(*inputs[:5], grad, _contiguous(grad_final), grad_x, *wanted)


def update(
    y: Tensor,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    silu: bool,
) -> None:
    """Fills ``y``, which is contiguous, with the outputs, and puts ``x`` into the state."""
    weight = weight.contiguous()
    seen, entries = _contiguous(cache_seqlens), _contiguous(conv_state_indices)
    ready = _ready_update(Steps.of(x, conv_state, weight, silu, seen is not None))
    ready.run(x, conv_state, weight, _contiguous(bias), seen, entries, y)


def rows_are_positions(result: Tensor) -> bool:
    """Whether kernels take a result without gaps as a channels-last one.

    So they do with sequences of one position, where both layouts are the same.
    """
    return result.stride(1) == 1


def laid_out(inputs: Inputs, result: Tensor) -> Inputs:
    """Returns the tensors as kernels read them, copied where they lie otherwise."""
    return Inputs(
        as_rows(inputs.x, result),
        inputs.weight.contiguous(),
        _contiguous(inputs.bias),
        _contiguous(inputs.seq_idx),
        _contiguous(inputs.initial_states),
        inputs.silu,
    )


def as_rows(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor, or a copy, such that its rows are contiguous along the axis of another's.

    Rows of a contiguous tensor are channels, and rows of a channels-last one are positions.
    """
    axis = 1 if rows_are_positions(like) else 2
    if tensor.stride(axis) == 1 or tensor.shape[axis] == 1:
        return tensor
    return torch.empty_like(like).copy_(tensor)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _unless_empty(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


MOST_READY = 1024
"""The most passes of each kind whose launches are cached; each length of a sequence is one."""


@lru_cache(MOST_READY)
def _ready_forward(call: Call) -> Ready:
    made = plan.forward(call.planned_for, cuda.gpu(call.gpu))
    return _loaded(made, FORWARD, call.gpu)


@lru_cache(MOST_READY)
def _ready_backward(call: Call, grad: Rows, parameters: bool) -> Ready:
    layout = grad.layout(call.channels_last)
    made = plan.backward(call.planned_for, layout, parameters, cuda.gpu(call.gpu))
    return _loaded(made, BACKWARD, call.gpu)


@lru_cache(MOST_READY)
def _ready_update(steps: Steps) -> Ready:
    return _loaded(plan.update(steps.planned_for), UPDATE, steps.gpu)


def _loaded(made: Plan, names: tuple[str, ...], index: int) -> Ready:
    loaded = launch.load_launches(made.launches, torch.device("cuda", index), names)
    return Ready(loaded, made.scratch_bytes, made.family, made.packs)
