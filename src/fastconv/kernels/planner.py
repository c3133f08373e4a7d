"""Chooses the kernel family that computes a pass: the first of a list that takes the problem.

A new family is one more entry in a list. The portable kernels come last: they take every problem.
Families for few kinds of layers come first: that for one output position (:data:`SINGLE`), and the
kernels for groups of few channels, which take those for which no other family's estimate is lower
(:data:`COMPARED`).
On Hopper, Ampere's kernels are used only if a switch asks for them: for the problems that Hopper's
decline, it was not measured whether Ampere's are faster than the portable ones.

``FASTCONV_FAMILY=hopper`` restricts a list to that family and the portable kernels, for the
problems that it declines. ``FASTCONV_FAMILY=hopper:sm_86`` also plans as if a block had only that
GPU's shared memory; the architecture and the number of SMs stay the device's own. The variable is
read once, when a process makes its first plan. :func:`only` does the same within a context.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

from fastconv import bypass
from fastconv.errors import FastconvError
from fastconv.kernels import ampere, dense, depthwise, direct, gpus, grouped, hopper
from fastconv.kernels.ampere.coverage import ANATOMIES as AMPERE
from fastconv.kernels.coverage import TENSOR
from fastconv.kernels.dense.coverage import ANATOMIES as DENSE
from fastconv.kernels.depthwise.coverage import ANATOMIES as DEPTHWISE
from fastconv.kernels.direct.coverage import ANATOMIES as DIRECT
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.grouped.coverage import ANATOMIES as GROUPED
from fastconv.kernels.hopper.coverage import ANATOMIES as HOPPER
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem


class Planner(Protocol):
    """Plans a pass, or raises Declined."""

    __name__: str
    __module__: str

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu, /) -> Plan: ...


FORWARD: tuple[Planner, ...] = (
    dense.forward,
    grouped.forward,
    hopper.forward,
    ampere.forward,
    depthwise.forward,
    direct.forward,
)
INPUT_GRAD: tuple[Planner, ...] = (
    dense.input_grad,
    grouped.input_grad,
    hopper.input_grad,
    ampere.input_grad,
    depthwise.input_grad,
    direct.input_grad,
)
WEIGHT_GRAD: tuple[Planner, ...] = (
    dense.weight_grad,
    grouped.weight_grad,
    hopper.weight_grad,
    ampere.weight_grad,
    depthwise.weight_grad,
    direct.weight_grad,
)

ANATOMIES = {**DENSE, **GROUPED, **HOPPER, **AMPERE, **DEPTHWISE, **DIRECT, **TENSOR}
"""What selects the code of each kernel that a plan can have, by the kernel's source."""

COMPARED = ("grouped",)
"""The families for several groups.

They take a problem only if the next family that takes it has no lower estimate.
"""

SINGLE = "dense"
"""The family for layers with one output position."""

MANY_IMAGES = 32
"""The batch for which forward passes and input gradients are compared, whatever a layer's is."""

VARIABLE = "FASTCONV_FAMILY"


class Switch(NamedTuple):
    """The one family that plans beside the portable kernels, and the GPU that limits shared memory.

    A switch is part of the key of every cached plan.
    """

    family: str | None = None  # None: all families
    limits: str | None = None  # None: the GPU's own shared memory

    def __str__(self) -> str:
        return ":".join(filter(None, self)) or "all"

    def planners(self, planners: tuple[Planner, ...], gpu: Gpu) -> tuple[Planner, ...]:
        if self.family is None:
            on_hopper = gpus.number(gpu) == gpus.number(gpus.H200)
            return tuple(one for one in planners if not on_hopper or _family(one) != "ampere")
        *others, portable = planners
        return (*(one for one in others if _family(one) == self.family), portable)

    def gpu(self, gpu: Gpu) -> Gpu:
        """Returns the GPU to plan for: with its own shared memory or the limit, if that is less."""
        if self.limits is None:
            return gpu
        other = gpus.named(self.limits)
        return replace(
            gpu,
            shared_bytes_per_block=min(gpu.shared_bytes_per_block, other.shared_bytes_per_block),
            shared_bytes_per_sm=min(gpu.shared_bytes_per_sm, other.shared_bytes_per_sm),
        )


EVERY = Switch()
"""All families, for the GPU as it is: the switch that is set by default."""


class SwitchError(FastconvError, ValueError):
    """An unknown family or GPU; the message names it, and lists those that are known."""


class Pass(Hashable, Protocol):
    """One of the three functions below; without a switch, they use the one that is set."""

    __name__: str

    def __call__(
        self, problem: Problem, operands: Operands, gpu: Gpu, switch: Switch | None = None
    ) -> Plan: ...


def forward(problem: Problem, operands: Operands, gpu: Gpu, switch: Switch | None = None) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    With ``operands.epilogue.residual``, there is a tensor ``residual`` too.
    """
    return _first(FORWARD, problem, operands, gpu, switch)


def input_grad(
    problem: Problem, operands: Operands, gpu: Gpu, switch: Switch | None = None
) -> Plan:
    """Plans an input gradient: ``input`` is the output's gradient, ``output`` the input's.

    For a transposed convolution, there is a tensor ``bias``, and operands have an epilogue, if
    :func:`adds_bias` and :func:`applies_epilogue` say so.
    """
    if not applies_epilogue(problem, operands.epilogue):
        _refuse_epilogue("an input gradient with these strides", operands)
    return _first(INPUT_GRAD, problem, operands, gpu, switch)


def weight_grad(
    problem: Problem, operands: Operands, gpu: Gpu, switch: Switch | None = None
) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output``."""
    _refuse_epilogue("a weight gradient", operands)
    return _first(WEIGHT_GRAD, problem, operands, gpu, switch)


def adds_bias(problem: Problem) -> bool:
    """Whether kernels of an input gradient can add a bias.

    At positions without a tap they store zeros, to which they would not add it.
    """
    return problem.reaches_every_input


def applies_epilogue(problem: Problem, epilogue: Epilogue) -> bool:
    """Whether kernels of an input gradient can apply an epilogue: with a residual, of stride 1."""
    strided = any(axis.stride != 1 for axis in problem.axes)
    return adds_bias(problem) and not (epilogue.residual and strided)


def _refuse_epilogue(what: str, operands: Operands) -> None:
    if operands.epilogue != NO_EPILOGUE:
        raise ValueError(f"{what} has no epilogue, but got {operands.epilogue}")


def families() -> list[str]:
    """Returns the names of all families, as in plans and switches."""
    return list(dict.fromkeys(map(_family, (*FORWARD, *INPUT_GRAD, *WEIGHT_GRAD))))


def current() -> Switch:
    """Returns the switch that is set: that of the innermost :func:`only`, or the process's.

    Raises:
        SwitchError: ``FASTCONV_FAMILY`` has an unknown value.
    """
    try:
        return _active[-1]
    except IndexError:  # no only() is active; another thread may just have left the last one
        return of_process()


@cache
def of_process() -> Switch:
    """Returns the switch that ``FASTCONV_FAMILY`` sets; later changes of it have no effect.

    Raises:
        SwitchError: the variable has an unknown value.
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return EVERY
    family, colon, limits = value.partition(":")
    try:
        return _checked(family, limits if colon else None)
    except SwitchError as error:
        raise SwitchError(
            f"{VARIABLE} should be a family, or a family:GPU, but got {value!r}: {error}"
        ) from None


@contextmanager
def only(family: str, limits: str | None = None) -> Iterator[None]:
    """Within this context, plans with one family, and the portable kernels for what it declines.

    For tests and benchmarks. ``limits`` names a GPU, whose shared memory a block has at most. The
    context holds for the whole process, because PyTorch's own threads plan gradients. Calls bypass
    the native host path meanwhile: its table has only plans by the process's own switch.

        >>> with planner.only("hopper", limits="sm_86"):
        ...     y = fastconv.conv2d(x, w)

    Raises:
        SwitchError: the family or the GPU is unknown.
    """
    switch = _checked(family, limits)
    with _lock:
        _active.append(switch)
        bypass.switch(True)
    try:
        yield
    finally:
        with _lock:
            _active.remove(switch)
            bypass.switch(bool(_active))


_active: list[Switch] = []
_lock = threading.Lock()


def _checked(family: str, limits: str | None) -> Switch:
    if family not in families():
        raise SwitchError(f"no kernel family {family!r}: known are {', '.join(families())}")
    try:
        return Switch(family, None if limits is None else gpus.named(limits).architecture)
    except ValueError as error:
        raise SwitchError(str(error)) from None


def _first(
    planners: tuple[Planner, ...],
    problem: Problem,
    operands: Operands,
    gpu: Gpu,
    switch: Switch | None,
) -> Plan:
    switch = current() if switch is None else switch
    reasons = [] if switch == EVERY else [f"; planned by {switch} alone"]
    problem = problem.without_idle_dilation  # else families would reserve memory for it
    asked = switch.planners(planners, gpu)
    asked = tuple(one for one in asked if _concerns(_family(one), problem))
    plan = _best(asked, problem, operands, switch.gpu(gpu), reasons)
    return replace(plan, why=plan.why + "".join(reasons))


def _concerns(family: str, problem: Problem) -> bool:
    """Whether a family for few kinds of layers may take a problem; all others may."""
    if family in COMPARED:
        return problem.groups > 1
    return family != SINGLE or problem.output_shape[2:] == (1, 1)


def _best(
    planners: tuple[Planner, ...],
    problem: Problem,
    operands: Operands,
    gpu: Gpu,
    reasons: list[str],
) -> Plan:
    """The plan of the first family that takes the problem; ``reasons`` gets why others do not."""
    for index, planner in enumerate(planners):
        family = _family(planner)
        try:
            plan = planner(problem, operands, gpu)
        except Declined as reason:
            reasons.append(f"; {family} does not take {reason}")
            continue
        if family in COMPARED and not _is_faster(
            planner, planners[index + 1 :], problem, operands, gpu
        ):
            reasons.append(f"; {family} is not estimated to be faster")
            continue
        return plan
    raise AssertionError("the portable kernels take everything")


def _is_faster(
    planner: Planner,
    others: tuple[Planner, ...],
    problem: Problem,
    operands: Operands,
    gpu: Gpu,
) -> bool:
    """Whether no lower estimate than a planner's is that of the others' plan.

    Families accumulate in different orders, so the batch must not decide where images have sums of
    their own.
    """
    if planner.__name__ != "weight_grad":
        problem = replace(problem, batch=MANY_IMAGES)
    try:
        cycles = planner(problem, operands, gpu).cycles
    except Declined:  # so many images
        return False
    other = _best(others, problem, operands, gpu, [])
    return other.cycles == 0 or cycles < other.cycles


def _family(planner: Planner) -> str:
    """The name of a planner's family: its folder in ``fastconv.kernels``."""
    return planner.__module__.removeprefix("fastconv.kernels.").partition(".")[0]
