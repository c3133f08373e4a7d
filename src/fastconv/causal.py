"""Causal depthwise convolutions of sequences, with the interface of the package causal-conv1d."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from fastconv.ops import causal

CausalActivation = Literal["silu", "swish"] | None
"""What follows a causal convolution: ``None``, ``"silu"``, or ``"swish"``, which is the same."""


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
    final_states_out: Tensor | None = None,
    activation: CausalActivation = None,
) -> Tensor: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
    return_final_states: Literal[True],
    final_states_out: Tensor | None = None,
    activation: CausalActivation = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: CausalActivation = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: CausalActivation = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Convolves each channel of a sequence with taps of its own that read no later position.

    $$
    y_{b,c,t} = \operatorname{activation}\Bigl(\text{bias}_c +
    \sum_{j=0}^{\text{width}-1} \text{weight}_{c,j}\, x_{b,c,t-(\text{width}-1)+j}\Bigr)
    $$

    Positions before the first count as zero, or are those of ``initial_states``. The function takes
    the place of the one in the package causal-conv1d. The output and the gradient of ``x`` have the
    layout of ``x``, which is contiguous or the transposed view of a tensor
    ``(batch, length, dim)``; either may have gaps between its rows. Other layouts are copied. Sums
    are in float32 (float64 for float64), and the same call gives the same bits.

    Args:
        x: the sequences, of shape ``(batch, dim, length)``, in float32, float16, bfloat16 or
            float64.
        weight: the taps, of shape ``(dim, width)``, the last one for the output's own position;
            ``width`` is from 1 to 64. It may have another type than ``x``, unless either is
            float64.
        bias: what is added to each channel, of shape ``(dim,)`` and the type of ``weight``.
        seq_idx: which of several sequences in a row each position belongs to, an int32 tensor of
            shape ``(batch, length)``. A tap counts only where the index of its position is that of
            the output's. Where the index is negative, the output is 0.
        initial_states: the inputs before the first position, of shape ``(batch, dim, width - 1)``
            and the type of ``x``. Not together with ``seq_idx``.
        return_final_states: whether to return the last ``width - 1`` inputs as well, which are the
            initial states of a sequence that continues this one. Not together with ``seq_idx``.
        final_states_out: a tensor for the final states, which is returned. It is written only if
            ``return_final_states``.
        activation: ``"silu"`` or ``"swish"``, which are the same, or ``None``.

    Returns:
        The output, of the shape and type of ``x``; with ``return_final_states``, the output and the
            final states, of shape ``(batch, dim, width - 1)``.

    Raises:
        ValueError: shapes, types or devices do not fit, or an argument is not supported.
        NotImplementedError: a tensor has a type that is not supported.

    Examples:
        >>> x, weight = torch.ones(1, 2, 5), torch.ones(2, 4)
        >>> fastconv.causal_conv1d_fn(x, weight)[0, 0]
        tensor([1., 2., 3., 4., 4.])
        >>> y, states = fastconv.causal_conv1d_fn(x, weight, return_final_states=True)
        >>> fastconv.causal_conv1d_fn(x, weight, initial_states=states)[0, 0]
        tensor([4., 4., 4., 4., 4.])
    """
    silu = _is_silu(activation)
    if not return_final_states:
        output, _ = causal.forward(x, weight, bias, seq_idx, initial_states, silu, False)
        return output
    output, states = causal.forward(x, weight, bias, seq_idx, initial_states, silu, True)
    if final_states_out is not None:
        if final_states_out.shape != states.shape:
            raise ValueError(
                f"final_states_out should have shape {tuple(states.shape)}, "
                f"but got {tuple(final_states_out.shape)}"
            )
        states = final_states_out.copy_(states)
    return output, states


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: CausalActivation = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Continues sequences by one position or a few, and puts these into their states, in place.

    The output is that of [`causal_conv1d_fn`][fastconv.causal_conv1d_fn] with the last
    ``width - 1`` inputs in ``conv_state`` as initial states. The function takes the place of the
    one in the package causal-conv1d. It has no gradient.

    Args:
        x: the new inputs, of shape ``(batch, dim)``, or ``(batch, dim, length)`` for several
            positions.
        conv_state: the latest inputs, of shape ``(batch, dim, state_len)`` with ``state_len`` at
            least ``width - 1``, and the type of ``x``. Without ``cache_seqlens``, the newest is
            the last, and all are shifted by the new ones.
        weight: the taps, of shape ``(dim, width)``; ``width`` is from 1 to 64.
        bias: what is added to each channel, of shape ``(dim,)`` and the type of ``weight``.
        activation: ``"silu"`` or ``"swish"``, which are the same, or ``None``.
        cache_seqlens: how many inputs each sequence has had, an int32 tensor of shape ``(batch,)``.
            With it, ``conv_state`` is a circular buffer: new inputs are written from
            ``cache_seqlens % state_len`` on, and nothing is shifted.
        conv_state_indices: which entry of ``conv_state`` each sequence has, an int32 tensor of
            shape ``(batch,)`` of different numbers; ``conv_state`` may then have more entries than
            ``x``. Where it is negative, the output is 0 and no state is written.

    Returns:
        The output, of the shape and type of ``x``.

    Raises:
        ValueError: shapes, types or devices do not fit, or an argument is not supported.
        NotImplementedError: a tensor has a type that is not supported, or a backward pass goes
            through the output.

    Examples:
        >>> state, weight = torch.zeros(1, 2, 3), torch.ones(2, 4)
        >>> for _ in range(5):
        ...     y = fastconv.causal_conv1d_update(torch.ones(1, 2), state, weight)
        >>> y
        tensor([[4., 4.]])
    """
    silu, single = _is_silu(activation), x.dim() == 2
    output: Tensor = causal.update(
        x[:, :, None] if single else x, conv_state, weight, bias,
        cache_seqlens, conv_state_indices, silu,
    )  # fmt: skip
    return output[:, :, 0] if single else output


def _is_silu(activation: CausalActivation) -> bool:
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation should be None, 'silu' or 'swish', but got {activation!r}")
    return activation is not None
