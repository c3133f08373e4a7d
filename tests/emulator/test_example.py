"""The example of docs/contributing.md: a new kernel from its plan to a check of its results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastconv import jit
from fastconv.kernels import coverage, planner
from fastconv.kernels.family import Declined
from fastconv.kernels.gpus import H200

from . import EmulatorError, isolated, run
from .example import plan as example
from .faults import Changed
from .works import Case, Tensors, Work, check, new_output, tensors_read

CASES = (
    Case("whole blocks", (2, 3, 8, 16), (5, 3, 1, 1)),
    Case("a partial block", (1, 4, 7, 19), (3, 4, 1, 1)),
    Case("many channels", (1, 130, 3, 5), (2, 130, 1, 1)),
)
WORKS = [
    Work(case, example.forward, dtype)
    for case in CASES
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_against_float64(work: Work) -> None:
    check(work)


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_isolation(work: Work) -> None:
    isolated.check(work)


def test_what_it_declines() -> None:
    case = replace(CASES[0], weight=(5, 3, 3, 3))
    with pytest.raises(Declined, match="other than 1x1"):
        _ = Work(case, example.forward).plan


def test_a_fault_is_seen() -> None:
    """A bound one pixel too wide reads and writes past a plane's end."""
    work = WORKS[2]
    (launch,) = work.plan.launches
    kernel = Changed(
        launch.kernel.source,
        launch.kernel.entry,
        launch.kernel.constants,
        "pixel >= C::pixels",
        "pixel > C::pixels",
    )
    tensors = {**tensors_read(work, Tensors.random(work)), "output": new_output(work)}
    with pytest.raises(EmulatorError):
        run([replace(launch, kernel=kernel)], tensors)


def test_coverage_classes() -> None:
    """The cases have every class of code that the kernel has."""
    found = {
        one
        for work in WORKS
        for one in coverage.classes(work.plan, work.case.problem, example.ANATOMIES)
    }
    choices = {one[2] for one in found if one[1] == "store"}
    assert {dict(one)["last block is partial"] for one in choices} == {True, False}


def test_the_planner_asks_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family joins the planner by an entry in a list for each pass that it has."""
    monkeypatch.setattr(planner, "FORWARD", (example.forward, *planner.FORWARD))
    assert Work(CASES[0], planner.forward).plan.family == "example"
    wide = Work(replace(CASES[0], weight=(5, 3, 3, 3)), planner.forward)
    assert "does not take kernels other than 1x1" in wide.plan.why


@pytest.mark.parametrize("architecture", ["sm_80", H200.architecture])
def test_it_compiles(architecture: str) -> None:
    try:
        jit.nvrtc_version()
    except jit.GpuUnavailable as error:
        pytest.skip(str(error))
    (launch,) = WORKS[0].plan.launches
    assert jit.compile_kernel(launch.kernel, architecture).stack_bytes == 0
