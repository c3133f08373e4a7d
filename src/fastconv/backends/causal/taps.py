"""Causal depthwise convolutions tap by tap, in PyTorch's elementwise operations.

This is what a CPU computes. All operations but those of :func:`update` are differentiable, so the
gradients here also are what a second derivative is computed from, on any device. Sums are in
float32, and in float64 for float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    """The tensors that a causal convolution reads, and whether SiLU follows it.

    Shapes are ``x (batch, dim, length)``, ``weight (dim, width)``, ``bias (dim,)``, ``seq_idx
    (batch, length)`` and ``initial_states (batch, dim, width - 1)``.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    seq_idx: Tensor | None
    initial_states: Tensor | None
    silu: bool

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def length(self) -> int:
        return self.x.shape[2]


class Gradients(NamedTuple):
    """The gradients of what a causal convolution reads, in the types of the tensors."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    initial_states: Tensor


def forward(inputs: Inputs) -> Tensor:
    """Returns the output, with strides that follow from PyTorch's own rules."""
    sums = _sums(inputs, _extended(inputs))
    if inputs.silu:
        sums = F.silu(sums)
    if inputs.seq_idx is not None:
        sums = torch.where(_is_token(inputs.seq_idx), sums, 0.0)
    return sums.to(inputs.x.dtype)


def final_states(x: Tensor, initial_states: Tensor | None, width: int) -> Tensor:
    """Returns the last ``width - 1`` inputs, those of ``initial_states`` and zeros included."""
    missing = max(0, width - 1 - x.shape[2])
    latest = x[:, :, max(0, x.shape[2] - (width - 1)) :]
    if initial_states is not None:
        return torch.cat((initial_states[:, :, width - 1 - missing :], latest), 2)
    return F.pad(latest, (missing, 0)) if missing else latest.clone()


def backward(inputs: Inputs, grad: Tensor, grad_final: Tensor | None) -> Gradients:
    """Returns the gradients, given those of the output and of the final states, if there are."""
    extended = _extended(inputs)
    grad_sums = grad.to(extended.dtype)
    if inputs.silu:
        sums = _sums(inputs, extended)
        sigmoid = torch.sigmoid(sums)
        grad_sums = grad_sums * (sigmoid * (1 + sums * (1 - sigmoid)))
    if inputs.seq_idx is not None:
        grad_sums = torch.where(_is_token(inputs.seq_idx), grad_sums, 0.0)
    grad_extended, grad_weight = _tap_gradients(inputs, extended, grad_sums)
    if grad_final is not None:
        grad_extended = grad_extended + F.pad(grad_final, (inputs.length, 0))
    states = inputs.width - 1
    dtype = inputs.x.dtype
    return Gradients(
        grad_extended[:, :, states:].to(dtype),
        grad_weight.to(inputs.weight.dtype),
        grad_sums.sum((0, 2)).to(inputs.weight.dtype),
        grad_extended[:, :, :states].to(dtype),
    )


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    silu: bool,
) -> Tensor:
    """Returns the outputs of ``x (batch, dim, length)``, and puts ``x`` into the state."""
    used = torch.arange(x.shape[0], device=x.device)
    entries = used if conv_state_indices is None else conv_state_indices.long()
    used = used[entries >= 0]  # a negative entry is padding
    state, latest = conv_state[entries[used]], x[used]
    width, states = weight.shape[1], conv_state.shape[2]
    if cache_seqlens is None:
        joined = torch.cat((state, latest), 2)
        before, after = state[:, :, states - (width - 1) :], joined[:, :, x.shape[2] :]
    else:
        begin = cache_seqlens[used].long()[:, None]
        before = state.gather(2, _places(begin, 1 - width, 0, state))
        after = _written_circularly(state, latest, begin)
    out = torch.zeros_like(x)
    out[used] = forward(Inputs(latest, weight, bias, None, before, silu))
    conv_state[entries[used]] = after
    return out


def _written_circularly(state: Tensor, latest: Tensor, begin: Tensor) -> Tensor:
    """Returns the state with the latest inputs from ``begin`` on, the last round alone."""
    skipped = max(0, latest.shape[2] - state.shape[2])
    places = _places(begin, skipped, latest.shape[2], state)
    return state.scatter(2, places, latest[:, :, skipped:])


def _places(begin: Tensor, first: int, last: int, state: Tensor) -> Tensor:
    """Returns the places in a circular state from ``begin + first`` to ``begin + last - 1``."""
    numbers = begin + torch.arange(first, last, device=begin.device)
    return numbers.remainder(state.shape[2])[:, None].expand(-1, state.shape[1], -1)


def _extended(inputs: Inputs) -> Tensor:
    """Returns the states, or zeros, followed by the inputs, in the type of the sums."""
    dtype = torch.float64 if inputs.x.dtype == torch.float64 else torch.float32
    if inputs.initial_states is None:
        return F.pad(inputs.x.to(dtype), (inputs.width - 1, 0))
    return torch.cat((inputs.initial_states, inputs.x), 2).to(dtype)


def _sums(inputs: Inputs, extended: Tensor) -> Tensor:
    """Returns the bias plus all taps' products, before the activation."""
    taps = inputs.weight.to(extended.dtype)[:, :, None]
    sums = extended.new_zeros(()) if inputs.bias is None else inputs.bias.to(extended)[:, None]
    for tap in range(inputs.width):
        product = _tap(inputs, extended, tap) * taps[:, tap]
        sums = sums + _of_one_sequence(inputs, product, tap)
    return sums


def _tap_gradients(inputs: Inputs, extended: Tensor, grad_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the states and inputs, and of the weight."""
    taps = inputs.weight.to(extended.dtype)[:, :, None]
    grad_extended, grad_weight = torch.zeros_like(extended), []
    for tap in range(inputs.width):
        product = _of_one_sequence(inputs, grad_sums * taps[:, tap], tap)
        grad_extended = grad_extended + F.pad(product, (tap, inputs.width - 1 - tap))
        product = _of_one_sequence(inputs, grad_sums * _tap(inputs, extended, tap), tap)
        grad_weight.append(product.sum((0, 2)))
    return grad_extended, torch.stack(grad_weight, 1)


def _tap(inputs: Inputs, extended: Tensor, tap: int) -> Tensor:
    """Returns what each output reads by a tap."""
    return extended[:, :, tap : tap + inputs.length]


def _of_one_sequence(inputs: Inputs, products: Tensor, tap: int) -> Tensor:
    """Returns the products of a tap, and zeros where it reads another sequence than its output."""
    if inputs.seq_idx is None:
        return products
    lag = inputs.width - 1 - tap
    before = F.pad(inputs.seq_idx, (lag, 0), value=-1)[:, : inputs.length]
    is_one = (before == inputs.seq_idx) & (inputs.seq_idx >= 0)
    return torch.where(is_one[:, None], products, 0.0)


def _is_token(seq_idx: Tensor) -> Tensor:
    """Returns where outputs are computed: a negative index is padding, whose output is 0."""
    return (seq_idx >= 0)[:, None]
