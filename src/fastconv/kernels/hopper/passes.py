"""Plans each pass with one of this family's kernels: the one that is estimated to take least."""

from __future__ import annotations

from collections.abc import Callable

from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper import block
from fastconv.kernels.hopper.collect import collect
from fastconv.kernels.hopper.correlate import correlate
from fastconv.kernels.hopper.layers import Layer, forward_ways, input_grad_ways
from fastconv.kernels.hopper.spread import spread
from fastconv.kernels.hopper.weight_grad import weight_grad as by_tiles
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


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output`` (the gradient).

    With ``operands.bias_grad``, tensor ``bias_grad`` is filled in the same pass.
    ``operands.input_channels_last`` is the input's format, ``output_channels_last`` that of the
    output's gradient, ``weight_strides`` the result's.

    Raises:
        Declined: another family does it better, or this one cannot.
    """
    channels = (problem.in_channels // problem.groups, problem.out_channels // problem.groups)
    sizes = (problem.input_size, problem.output_size)
    block.check(gpu)
    limits.check(operands, problem.groups, channels, *sizes)
    limits.check_reach(problem, operands)
    ways: list[tuple[float, Callable[[], Plan]]] = []
    reasons = []
    most = by_tiles.portable_cycles(problem, gpu) + by_tiles.BLOCK_CYCLES
    try:
        tile = by_tiles.choose_tile(problem, operands, gpu, most)
        ways.append((tile.cycles(gpu), lambda: by_tiles.plan(tile, gpu)))
    except Declined as reason:
        reasons.append(reason)
    try:
        other = collect.collect_of(problem, operands, gpu)
        ways.append((other.cycles(gpu), lambda: collect.plan(other, gpu)))
    except Declined:
        pass  # few layers are its
    if not ways:
        raise reasons[0]
    cycles, chosen = min(ways, key=lambda way: way[0])
    if cycles > most:
        raise Declined(by_tiles.FEW)
    return chosen()


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
