"""Gradients of a convolution with the batch normalization of its output, as one node.

The native host path has such a node (``native/block.h``). Where the dispatcher has to see the
gradients, as for second derivatives, they are computed here, by operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastconv.ops.autograd import gradients_here
from fastconv.ops.batchnorm import is_differentiated, norm_gradients
from fastconv.ops.gradients import sum_of_positions
from fastconv.ops.schema import forward


def block_gradients(
    grad: Tensor,
    operands: Sequence[Any],
    geometry: Sequence[Any],
    saved: Sequence[Any],
    options: Sequence[Any],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Returns the gradients that are needed, and None for others.

    They are those of the convolution's input, weight and bias, which are the ``operands``, and of
    residual, weight and bias of the normalization. ``saved`` and ``options`` are as for
    ``norm_gradients``.
    """
    input, weight, bias = operands
    x, *others_saved = saved
    is_sequence = input.dim() == 3
    if is_sequence:  # a convolution of images with one row
        input, weight = input.unsqueeze(2), weight.unsqueeze(2)
    needs_input, needs_weight, needs_bias, *others = needed
    if is_differentiated(grad, input, weight, *saved):
        # What is saved of the convolution's output are its numbers, not how they came to be.
        x = forward(input, weight, bias, *geometry)
        x = x.squeeze(2) if is_sequence else x
    needs_conv = needs_input or needs_weight or needs_bias
    x_, *rest = norm_gradients(grad, (x, *others_saved), options, (needs_conv, *others))
    input_, weight_, bias_ = None, None, None
    if x_ is not None:
        x_ = x_.unsqueeze(2) if is_sequence else x_
        args = (x_, input, weight, *geometry, False, needs_bias)
        input_, weight_, bias_ = gradients_here(args, needs_input, needs_weight)
        if needs_bias and not needs_weight:
            bias_ = sum_of_positions(x_)
        if is_sequence:
            input_ = None if input_ is None else input_.squeeze(2)
            weight_ = None if weight_ is None else weight_.squeeze(2)
    return (input_, weight_, bias_ if needs_bias else None, *rest)
