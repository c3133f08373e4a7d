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
from .pass_cases import Conv, PassCase, Tensors, check, new_output, tensors_read

CONVS = (
    Conv("whole blocks", (2, 3, 8, 16), (5, 3, 1, 1)),
    Conv("a partial block", (1, 4, 7, 19), (3, 4, 1, 1)),
    Conv("many channels", (1, 130, 3, 5), (2, 130, 1, 1)),
)
CASES = [
    PassCase(conv, example.forward, dtype)
    for conv in CONVS
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_isolation(case: PassCase) -> None:
    isolated.check(case)


def test_what_it_declines() -> None:
    conv = replace(CONVS[0], weight=(5, 3, 3, 3))
    with pytest.raises(Declined, match="other than 1x1"):
        _ = PassCase(conv, example.forward).plan


def test_a_fault_is_seen() -> None:
    """A bound one pixel too wide reads and writes past a plane's end."""
    case = CASES[2]
    (launch,) = case.plan.launches
    kernel = Changed(
        launch.kernel.source,
        launch.kernel.entry,
        launch.kernel.constants,
        "pixel >= C::pixels",
        "pixel > C::pixels",
    )
    tensors = {**tensors_read(case, Tensors.random(case)), "output": new_output(case)}
    with pytest.raises(EmulatorError):
        run([replace(launch, kernel=kernel)], tensors)


def test_coverage_classes() -> None:
    """The test cases have every coverage class of the kernel."""
    found = {
        one
        for case in CASES
        for one in coverage.classes(case.plan, case.conv.problem, example.ANATOMIES)
    }
    choices = {one[2] for one in found if one[1] == "store"}
    assert {dict(one)["last block is partial"] for one in choices} == {True, False}


def test_the_planner_tries_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family joins the planner by an entry in a list for each pass that it has."""
    monkeypatch.setattr(planner, "FORWARD", (example.forward, *planner.FORWARD))
    assert PassCase(CONVS[0], planner.forward).plan.family == "example"
    wide = PassCase(replace(CONVS[0], weight=(5, 3, 3, 3)), planner.forward)
    assert "does not take kernels other than 1x1" in wide.plan.why


@pytest.mark.parametrize("architecture", ["sm_80", H200.architecture])
def test_it_compiles(architecture: str) -> None:
    try:
        jit.nvrtc_version()
    except jit.GpuUnavailable as error:
        pytest.skip(str(error))
    (launch,) = CASES[0].plan.launches
    assert jit.compile_kernel(launch.kernel, architecture).stack_bytes == 0
