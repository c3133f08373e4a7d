"""Counts of operations for ``torch.utils.flop_counter``: the same as of PyTorch's convolution.

Of causal convolutions, the products of taps are counted, and none that is computed twice.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from fastconv.ops.late import when_imported

Shape = tuple[int, ...]


def register() -> None:
    when_imported("torch.utils.flop_counter", _register)


def _register() -> None:
    # PyTorch's own formulas give the same counts in every version. With groups, they count more
    # for a weight gradient than is computed.
    from torch.utils import flop_counter

    of_forward: Any = flop_counter.conv_flop
    of_gradients: Any = flop_counter.conv_backward_flop
    # The formulas use only shapes: not bias, stride, padding and dilation. The last argument says
    # that the convolution is not transposed.
    geometry = (None, None, None, None, False)

    @flop_counter.register_flop_formula([torch.ops.fastconv.forward, torch.ops.fastconv.fused])
    def forward(input: Shape, weight: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return of_forward(input, weight, *geometry, out_val=out_shape)

    @flop_counter.register_flop_formula(torch.ops.fastconv.causal_forward)
    def causal_forward(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
        return 2 * prod(x) * weight[1]

    @flop_counter.register_flop_formula(torch.ops.fastconv.causal_backward)
    def causal_backward(grad: Shape, _: Any, x: Shape, weight: Shape, *__: Any, **___: Any) -> int:
        return 4 * prod(x) * weight[1]  # the gradients of x and of weight

    @flop_counter.register_flop_formula(torch.ops.fastconv.causal_update)
    def causal_update(x: Shape, state: Shape, weight: Shape, *_: Any, **__: Any) -> int:
        return 2 * prod(x) * weight[1]

    @flop_counter.register_flop_formula(torch.ops.fastconv.transposed)
    def transposed(input: Shape, weight: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return of_forward(input, weight, *geometry[:-1], True, out_val=out_shape)

    @flop_counter.register_flop_formula(torch.ops.fastconv.input_grad)
    def input_grad(grad_output: Shape, weight: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        results, wanted = (out_shape, None, None), [True, False, False]
        return of_gradients(
            grad_output, None, weight, *geometry, None, None, wanted, out_val=results
        )

    @flop_counter.register_flop_formula(torch.ops.fastconv.backward)
    def backward(
        grad_output: Shape, input: Shape, weight: Shape, *rest: Any, out_shape: Any, **__: Any
    ) -> int:
        transposed, bias = rest[-2:]
        form = (*geometry[:-1], transposed)
        wanted = [True, True, bias]
        return of_gradients(
            grad_output, input, weight, *form, None, None, wanted, out_val=out_shape
        )

    @flop_counter.register_flop_formula(torch.ops.fastconv.weight_grad)
    def weight_grad(grad_output: Shape, input: Shape, *_: Any, out_shape: Any, **__: Any) -> int:
        results, wanted = (None, *out_shape), [False, True, False]
        return of_gradients(
            grad_output, input, None, *geometry, None, None, wanted, out_val=results
        )
