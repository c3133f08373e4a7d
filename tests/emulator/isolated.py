"""Checks isolation: values that a result's formula does not read must not change the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from emulator.pass_cases import PassCase, Tensors, new_bias_grad, placed, run
from fastconv.bench import isolation
from fastconv.bench.isolation import Pattern

# Largest relative difference between scaled fp16 and TF32. An image's own values decide which of
# the two computes it.
RULES = {"tf32": 2.0**-9, "ieee": 2.0**-19}


def check(case: PassCase, seed: int = 0) -> None:
    """Raises an AssertionError if a result depends on elements that its formula does not read."""
    problem, draw = case.conv.problem, Random(seed)
    tensors = positive(case, seed)
    before = _results(case, tensors)
    for pattern, is_nan in isolation.patterns(problem, case.direction, draw):
        factor = torch.nan if is_nan else isolation.loudness(case.dtype)
        after = _results(case, made_loud(case, tensors, pattern, factor))
        found = _complaint(case, pattern, before, after)
        assert found is None, found


def positive(case: PassCase, seed: int = 0) -> Tensors:
    """Positive values whose sums are about 1, in the memory formats of the case."""
    like, powers = Tensors.random(case), isolation.exponents(_terms(case))
    read = {"forward": "input", "input_grad": "grad_output", "weight_grad": "input"}
    made = {}
    for at, (role, tensor) in enumerate(vars(like).items()):
        exponent = 0
        if role in ("input", "weight", "grad_output"):
            exponent = powers[role != read[case.direction]]
        values = isolation.positive(tensor.shape, case.dtype, exponent, 8 * seed + at)
        made[role] = _like(tensor, values)
    return Tensors(**made)


def made_loud(case: PassCase, tensors: Tensors, pattern: Pattern, factor: float) -> Tensors:
    """The tensors, with every element outside of the pattern's quiet regions times ``factor``."""
    regions: Mapping[str, isolation.Region] = pattern.quiet
    masks = {role: region.mask(tensors.input.device) for role, region in regions.items()}
    if case.epilogue.residual:
        masks["residual"] = pattern.unchanged.mask(tensors.input.device)
    if case.direction == "forward" and pattern.quiet_bias is not None:
        # Input gradients have no bias in these cases.
        masks["bias"] = pattern.quiet_bias
    loud = {
        role: _like(one, isolation.made_loud(one, masks[role], factor))
        for role, one in vars(tensors).items()
        if role in masks
    }
    return replace(tensors, **loud)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """The values, in the memory format and with the alignment of ``tensor``."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = tensor.dim() in formats and not tensor.is_contiguous()
    order = formats[tensor.dim()] if last else torch.contiguous_format
    return placed(values, order, tensor.data_ptr() % 16 == 0)


def _terms(case: PassCase) -> int:
    """The largest number of products that are summed for one result."""
    problem = case.conv.problem
    if case.direction == "weight_grad":
        return problem.batch * math.prod(problem.output_shape[2:])
    channels = problem.in_channels if case.direction == "forward" else problem.out_channels
    return channels // problem.groups * math.prod(problem.weight_shape[2:])


def _results(case: PassCase, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
    bias_grad = new_bias_grad(case)
    return run(case, tensors, bias_grad, both_orders=False), bias_grad


def _complaint(
    case: PassCase,
    pattern: Pattern,
    before: tuple[Tensor, Tensor | None],
    after: tuple[Tensor, Tensor | None],
) -> str | None:
    def within() -> float | None:
        changes = isolation.may_change_arithmetic(case.plan, case.direction, pattern)
        return RULES[case.precision] if changes else None

    found = isolation.complaint(pattern, before[0], after[0], within)
    if found is None and before[1] is not None and after[1] is not None:
        found = isolation.bias_grad_complaint(pattern, before[1], after[1], within)
    return found
