"""Plans forward passes and input gradients: with which of the two kernels, by estimated cycles."""

from __future__ import annotations

from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper import correlate, spread
from fastconv.kernels.hopper.layers import Layer, forward_ways, input_grad_ways
from fastconv.kernels.tensor import limits
from fastconv.problem import Problem


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    limits.check_reach(problem, operands)
    return _plan(forward_ways(problem, operands), gpu)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: ``input`` is the output's gradient, ``output`` the input's.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    limits.check_reach(problem, operands)
    return _plan(input_grad_ways(problem, operands), gpu)


def alternatives(
    direction: str, problem: Problem, operands: Operands, gpu: Gpu, most: int
) -> list[Plan]:
    """The plans for a pass that the rules like best. All give the same bits.

    Raises:
        Declined: there are none.
    """
    ways_of = {"forward": forward_ways, "input_grad": input_grad_ways}
    if direction not in ways_of:
        raise Declined(direction)
    limits.check_reach(problem, operands)
    ways = ways_of[direction](problem.without_idle_dilation, operands)
    chosen = _spread(ways, gpu)
    return correlate.alternatives(ways, gpu, most) if chosen is None else [chosen]


def _plan(ways: list[list[Layer]], gpu: Gpu) -> Plan:
    return _spread(ways, gpu) or correlate.plan(ways, gpu)


def _spread(ways: list[list[Layer]], gpu: Gpu) -> Plan | None:
    """The plan with the kernel for few output channels, if that takes an image less.

    The two add up in different orders, so the batch must not decide.
    """
    layer = ways[0][0]
    if len(ways[0]) > 1:
        return None
    try:
        candidate = spread.spread_of(layer, gpu)
    except Declined:
        return None
    try:
        other = correlate.image_cycles(ways, gpu)
    except Declined:
        other = spread.portable_cycles(layer)
    return spread.plan(candidate, gpu) if candidate.image_cycles < other else None
