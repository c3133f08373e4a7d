"""Has the gradients' kernels compiled in the background, while the forward pass goes on.

When a forward pass is planned whose gradients are recorded, a backward pass will come. What it will
need is known but for the form of the output's gradient: that is taken to be the output's. Where it
is another one, the gradient is planned and compiled when it is asked for, as without this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastconv import native
from fastconv.backends import cuda
from fastconv.kernels import planner
from fastconv.kernels.planner import Pass, Switch
from fastconv.ops.schema import OPERATORS, PRECISION, Result, gradient_format


def begin_if_new(args: Sequence[Any], wanted: Sequence[bool]) -> None:
    """:func:`begin`, if a forward pass with these arguments has just been planned, by this thread.

    For each call: where none has, it costs a look.
    """
    need = cuda.take_latest()
    if need is None or torch._C._are_functorch_transforms_active():
        return
    operator = OPERATORS["forward"]
    result = operator.describe(operator.known, *args)
    if need.problem == result.problem:
        begin(args, result, wanted, need.switch)


def begin(args: Sequence[Any], result: Result, wanted: Sequence[bool], switch: Switch) -> None:
    """Begins to plan and compile what gives the gradients of ``forward(*args)``.

    ``wanted`` says for input, weight and bias whether theirs are recorded. Does nothing where work
    in the background would be in the way (:func:`native.in_the_way`), and raises nothing: the
    backward pass would meet the same trouble, and tells of it.
    """
    if not native.in_the_way():
        with suppress(Exception):
            for need in _needs(args, result, wanted, switch):
                cuda.begin(need)


def _needs(
    args: Sequence[Any], result: Result, wanted: Sequence[bool], switch: Switch
) -> Iterator[cuda.Need]:
    input, weight = args[:2]
    needs_input, needs_weight, needs_bias = wanted
    problem, format = result.problem, gradient_format(input, weight)
    without_data = partial(torch.empty, dtype=result.dtype, device="meta")
    grad_output = without_data(result.shape, memory_format=result.memory_format)

    def need(plan: Pass, other: Tensor, out: Tensor, bias: bool = False) -> Iterator[cuda.Need]:
        # Copies would be made of what is not dense; as these, they are aligned.
        aligned = other.data_ptr() % 16 == 0 or not cuda.is_dense(other)
        other = torch.empty_strided(other.shape, other.stride(), dtype=other.dtype, device="meta")
        found = cuda.need(plan, problem, grad_output, other, out, args[PRECISION], bias, switch)
        if found is not None:
            yield found._replace(aligned=aligned, device=result.device.index)

    if needs_weight:
        out = without_data(problem.weight_shape, memory_format=format)
        yield from need(planner.weight_grad, input, out, needs_bias)
    if needs_input:
        out = without_data(problem.input_shape, memory_format=format)
        yield from need(planner.input_grad, weight, out)
