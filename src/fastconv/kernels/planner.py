"""Which kernel family computes a pass: the first of a list that takes it.

A new family is one more entry in a list. The portable kernels come last: they take everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fastconv.kernels import direct, hopper
from fastconv.kernels.direct.classes import ANATOMIES as DIRECT
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper.classes import ANATOMIES as HOPPER
from fastconv.problem import Problem

Planner = Callable[[Problem, Operands, Gpu], Plan]

FORWARD: tuple[Planner, ...] = (hopper.forward, direct.forward)
INPUT_GRAD: tuple[Planner, ...] = (hopper.input_grad, direct.input_grad)
WEIGHT_GRAD: tuple[Planner, ...] = (hopper.weight_grad, direct.weight_grad)

ANATOMIES = {**HOPPER, **DIRECT}
"""What chooses the code of every kernel that a plan can have, by its source."""


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``."""
    return _first(FORWARD, problem, operands, gpu)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans an input gradient: ``input`` is the output's gradient, ``output`` the input's."""
    return _first(INPUT_GRAD, problem, operands, gpu)


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output``."""
    return _first(WEIGHT_GRAD, problem, operands, gpu)


def _first(planners: tuple[Planner, ...], problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    declined = []
    problem = problem.without_idle_dilation  # which families would make room for
    for planner in planners:
        try:
            plan = planner(problem, operands, gpu)
        except Declined as reason:
            family = planner.__module__.split(".")[-2]
            declined.append(f"; {family} does not take {reason}")
        else:
            return replace(plan, why=plan.why + "".join(declined))
    raise AssertionError("the portable kernels take everything")
