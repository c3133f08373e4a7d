"""Which kernel family computes a pass: the first of a list that takes it.

A new family is one more entry in a list. The portable kernels come last: they take everything. On
Hopper, Ampere's kernels plan only where they are asked for: where its own decline, it was not
measured whether they are faster than the portable ones.

``FASTCONV_FAMILY=hopper`` leaves a list with that family and the portable kernels, for what it
declines. ``FASTCONV_FAMILY=hopper:sm_86`` also plans as if a block had the shared memory that it
has on that GPU; what is compiled for, and the number of processors, stay the device's own. It is
read once, when a process makes its first plan. :func:`only` does the same for a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

from fastconv import bypass
from fastconv.kernels import ampere, depthwise, direct, gpus, hopper
from fastconv.kernels.ampere.classes import ANATOMIES as AMPERE
from fastconv.kernels.depthwise.classes import ANATOMIES as DEPTHWISE
from fastconv.kernels.direct.classes import ANATOMIES as DIRECT
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.kernels.hopper.classes import ANATOMIES as HOPPER
from fastconv.problem import NO_EPILOGUE, Problem

Planner = Callable[[Problem, Operands, Gpu], Plan]

FORWARD: tuple[Planner, ...] = (
    hopper.forward,
    ampere.forward,
    depthwise.forward,
    direct.forward,
)
INPUT_GRAD: tuple[Planner, ...] = (
    hopper.input_grad,
    ampere.input_grad,
    depthwise.input_grad,
    direct.input_grad,
)
WEIGHT_GRAD: tuple[Planner, ...] = (
    hopper.weight_grad,
    ampere.weight_grad,
    depthwise.weight_grad,
    direct.weight_grad,
)

ANATOMIES = {**HOPPER, **AMPERE, **DEPTHWISE, **DIRECT}
"""What chooses the code of every kernel that a plan can have, by its source."""

VARIABLE = "FASTCONV_FAMILY"


class Switch(NamedTuple):
    """Which family alone plans, beside the portable kernels; and whose shared memory it has.

    Whatever keeps plans keeps them by this, too.
    """

    family: str | None = None  # all of them
    limits: str | None = None  # the GPU's own

    def __str__(self) -> str:
        return ":".join(filter(None, self)) or "all"

    def planners(self, planners: tuple[Planner, ...], gpu: Gpu) -> tuple[Planner, ...]:
        if self.family is None:
            on_hopper = gpus.number(gpu) == gpus.number(gpus.H200)
            return tuple(one for one in planners if not on_hopper or _family(one) != "ampere")
        *others, portable = planners
        return (*(one for one in others if _family(one) == self.family), portable)

    def gpu(self, gpu: Gpu) -> Gpu:
        """The GPU as it is seen: with no more shared memory than it has, or kernels would fail."""
        if self.limits is None:
            return gpu
        other = gpus.named(self.limits)
        return replace(
            gpu,
            shared_bytes_per_block=min(gpu.shared_bytes_per_block, other.shared_bytes_per_block),
            shared_bytes_per_processor=min(
                gpu.shared_bytes_per_processor, other.shared_bytes_per_processor
            ),
        )


EVERY = Switch()
"""All families, for the GPU as it is: what there is without a switch."""


class SwitchError(ValueError):
    """A family or a GPU that is not known; the message names it, and those that are."""


class Pass(Hashable, Protocol):
    """One of the three functions below; without a switch, they go by the one that is set."""

    __name__: str

    def __call__(
        self, problem: Problem, operands: Operands, gpu: Gpu, switch: Switch | None = None
    ) -> Plan: ...


def forward(problem: Problem, operands: Operands, gpu: Gpu, switch: Switch | None = None) -> Plan:
    """Plans a forward convolution: tensors ``input``, ``weight``, ``bias`` and ``output``.

    ``operands.epilogue`` may ask for one of ``residual`` too.
    """
    return _first(FORWARD, problem, operands, gpu, switch)


def input_grad(
    problem: Problem, operands: Operands, gpu: Gpu, switch: Switch | None = None
) -> Plan:
    """Plans an input gradient: ``input`` is the output's gradient, ``output`` the input's."""
    _refuse_epilogue("an input gradient", operands)
    return _first(INPUT_GRAD, problem, operands, gpu, switch)


def weight_grad(
    problem: Problem, operands: Operands, gpu: Gpu, switch: Switch | None = None
) -> Plan:
    """Plans a weight gradient: tensors ``grad_output``, ``input`` and ``output``."""
    _refuse_epilogue("a weight gradient", operands)
    return _first(WEIGHT_GRAD, problem, operands, gpu, switch)


def _refuse_epilogue(what: str, operands: Operands) -> None:
    if operands.epilogue != NO_EPILOGUE:
        raise ValueError(
            f"{what} has no epilogue, but got {operands.epilogue}: only forward passes do"
        )


def families() -> list[str]:
    """The names of all families, as plans and the switch have them."""
    return list(dict.fromkeys(map(_family, (*FORWARD, *INPUT_GRAD, *WEIGHT_GRAD))))


def current() -> Switch:
    """The switch that is set: the innermost :func:`only`'s, or else the process's.

    Raises:
        SwitchError: ``FASTCONV_FAMILY`` has a value that is not known.
    """
    try:
        return _active[-1]
    except IndexError:  # of two threads, the other may just have left
        return of_process()


@cache
def of_process() -> Switch:
    """What ``FASTCONV_FAMILY`` asks for; changed later, it has no effect.

    Raises:
        SwitchError: it has a value that is not known.
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
    """Plans with one family, and the portable kernels for what it declines; for a time.

    For tests and benchmarks. ``limits`` names a GPU, whose shared memory a block is to have at
    most. It holds for the whole process, as gradients are planned by threads of PyTorch's. Python
    serves meanwhile: the native host path knows the process's own setting alone.

        >>> with planner.only("hopper", limits="sm_86"):
        ...     y = fastconv.conv2d(x, w)

    Raises:
        SwitchError: the family or the GPU is not known.
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
    problem = problem.without_idle_dilation  # which families would make room for
    for planner in switch.planners(planners, gpu):
        try:
            plan = planner(problem, operands, switch.gpu(gpu))
        except Declined as reason:
            reasons.append(f"; {_family(planner)} does not take {reason}")
        else:
            return replace(plan, why=plan.why + "".join(reasons))
    raise AssertionError("the portable kernels take everything")


def _family(planner: Planner) -> str:
    """By the name of its folder."""
    return planner.__module__.split(".")[-2]
