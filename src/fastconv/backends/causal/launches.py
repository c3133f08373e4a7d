"""Causal convolutions on a GPU: plan, compile, launch.

What follows from shapes, strides, types and alignment is decided once and cached.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

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


def forward(inputs: Inputs, y: Tensor) -> None:
    """Fills ``y``, whose layout is that of x, with the output."""
    inputs = laid_out(inputs, y)
    conv = convolution(inputs, y)
    _ready_forward(conv, y.device.index).run(*inputs[:5], y)


def backward(
    inputs: Inputs,
    grad: Tensor,
    grad_final: Tensor | None,
    gradients: taps.Gradients,
) -> None:
    """Fills the gradients; that of x has the layout of x. Those that are empty are not computed."""
    inputs, grad_x = laid_out(inputs, gradients.x), gradients.x
    conv = convolution(inputs, grad_x)
    grad = as_rows(grad, grad_x)
    grad_final = None if grad_final is None else grad_final.contiguous()
    wanted = (_unless_empty(one) for one in (gradients.initial_states, *gradients[1:3]))
    parameters = gradients.weight.numel() > 0
    ready = _ready_backward(conv, layout(grad, conv.channels_last), parameters, grad.device.index)
    ready.run(*inputs[:5], grad, grad_final, grad_x, *wanted)


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
    steps = steps_of(x, conv_state, weight, silu, cache_seqlens is not None)
    seen, entries = _contiguous(cache_seqlens), _contiguous(conv_state_indices)
    ready = _ready_update(steps, y.device.index)
    ready.run(x, conv_state, weight, _contiguous(bias), seen, entries, y)


def convolution(inputs: Inputs, result: Tensor) -> Convolution:
    """Describes a convolution, whose result has the layout of its input."""
    batch, dim, length = inputs.x.shape
    channels_last = rows_are_positions(result)
    return Convolution(
        *cuda.SCALARS[inputs.x.dtype],
        cuda.SCALARS[inputs.weight.dtype][0],
        batch,
        dim,
        length,
        inputs.width,
        channels_last,
        inputs.silu,
        inputs.seq_idx is not None,
        layout(inputs.x, channels_last),
    )


def rows_are_positions(result: Tensor) -> bool:
    """Whether kernels take a result without gaps as a channels-last one.

    So they do with sequences of one position, where both layouts are the same.
    """
    return result.stride(1) == 1


def layout(tensor: Tensor, channels_last: bool) -> Layout:
    """Describes where a tensor lies, whose rows are contiguous."""
    batch, channel, position = _strides(tensor)
    row = position if channels_last else channel
    return Layout(batch, row, gcd(ALIGNMENT, tensor.data_ptr()))


def steps_of(x: Tensor, conv_state: Tensor, weight: Tensor, silu: bool, circular: bool) -> Update:
    """Describes decoding steps."""
    batch, dim, count = x.shape
    return Update(
        cuda.SCALARS[x.dtype][0],
        cuda.SCALARS[weight.dtype][0],
        batch,
        dim,
        count,
        conv_state.shape[2],
        weight.shape[1],
        silu,
        circular,
        _strides(x),
        _strides(conv_state),
    )


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """Returns the strides, with 0 for axes of one element, along which nothing is strided."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    batch, channel, position = (stride if size > 1 else 0 for size, stride in axes)
    return batch, channel, position


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
def _ready_forward(conv: Convolution, index: int) -> Ready:
    return _loaded(plan.forward(conv, cuda.gpu(index)), FORWARD, index)


@lru_cache(MOST_READY)
def _ready_backward(conv: Convolution, grad: Layout, parameters: bool, index: int) -> Ready:
    return _loaded(plan.backward(conv, grad, parameters, cuda.gpu(index)), BACKWARD, index)


@lru_cache(MOST_READY)
def _ready_update(steps: Update, index: int) -> Ready:
    return _loaded(plan.update(steps), UPDATE, index)


def _loaded(made: Plan, names: tuple[str, ...], index: int) -> Ready:
    loaded = launch.load_launches(made.launches, torch.device("cuda", index), names)
    return Ready(loaded, made.scratch_bytes, made.family, made.packs)
