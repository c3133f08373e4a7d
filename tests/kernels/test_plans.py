"""Plans from the disk cache equal those that the planner would make."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastconv.backends.cuda import operands_of
from fastconv.bench import population
from fastconv.jit import cache, trust
from fastconv.kernels import planner, plans, tuned
from fastconv.kernels.family import Im2colMap, Plan, TensorMap
from fastconv.kernels.gpus import H200, named
from fastconv.kernels.planner import EVERY, Pass, Switch
from fastconv.kernels.plans import find_or_make  # which other tests do without
from fastconv.problem import Problem

PASSES = (planner.forward, planner.input_grad, planner.weight_grad)
PROBLEM = Problem.of((8, 64, 28, 28), (64, 64, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
OPERANDS = operands_of(torch.bfloat16, False, False, (576, 9, 3, 1), True, "ieee", False)
ASKED = (PROBLEM, OPERANDS, H200, EVERY)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_told", set())
    monkeypatch.setattr(cache, "_stores", itertools.count())
    monkeypatch.setattr(trust, "_once", threading.Lock())
    return tmp_path / "cache"


class Planner:
    """A pass that counts how often it plans."""

    __name__ = "forward"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *asked: Any) -> Plan:
        self.calls += 1
        return planner.forward(*asked)


def test_made_once() -> None:
    noted = Planner()
    first, again = find_or_make(noted, *ASKED), find_or_make(noted, *ASKED)
    assert first == again == planner.forward(*ASKED)
    assert noted.calls == 1
    assert [entry.kind for entry in cache.entries()] == ["plan"]
    (entry,) = cache.entries()
    assert cache.metadata(entry) == {"source": "forward, hopper", "architecture": "sm_90a"}


@pytest.mark.parametrize(
    "change",
    [
        {0: replace(PROBLEM, batch=9)},
        {1: replace(OPERANDS, aligned=False)},
        {1: replace(OPERANDS, bias_grad=True)},
        {2: replace(H200, sm_count=100)},
        {2: replace(H200, shared_bytes_per_sm=200_000)},
        {3: Switch("direct")},
    ],
    ids=str,
)
def test_kept_by_all_that_it_depends_on(change: dict[int, Any]) -> None:
    noted = Planner()
    find_or_make(noted, *ASKED)
    other = [change.get(i, one) for i, one in enumerate(ASKED)]
    assert find_or_make(noted, *other) == planner.forward(*other)
    assert noted.calls == 2


def test_kept_by_the_pass() -> None:
    found = [find_or_make(plan, *ASKED) for plan in PASSES]
    assert (
        found
        == [find_or_make(plan, *ASKED) for plan in PASSES]
        == [plan(*ASKED) for plan in PASSES]
    )


def test_kept_by_sources_and_measured_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Planner()
    find_or_make(noted, *ASKED)
    with monkeypatch.context() as changed:
        changed.setattr(tuned, "table", lambda: {"a layer": "a tile"})
        find_or_make(noted, *ASKED)
    monkeypatch.setattr(plans, "_sources", lambda: "others")
    find_or_make(noted, *ASKED)
    assert noted.calls == 3


@pytest.mark.parametrize(
    "contents",
    [b"", b"[", b"[1]", b"{}", b'{"class": "Plan"}', b'{"class": "Popen", "args": ["ls"]}',
     b"[" * 100_000],
    ids=["empty", "no JSON", "a list", "nothing", "half", "another class", "deep"],
)  # fmt: skip
def test_what_is_no_plan(contents: bytes, folder: Path) -> None:
    assert plans.decode(contents) is None
    noted = Planner()
    expected = find_or_make(noted, *ASKED)
    (entry,) = cache.entries()
    cache.store("plan", entry.path.stem, contents, {})  # its checksum is right
    assert find_or_make(noted, *ASKED) == find_or_make(noted, *ASKED) == expected
    assert noted.calls == 2


def test_damage(folder: Path) -> None:
    noted = Planner()
    expected = find_or_make(noted, *ASKED)
    (entry,) = cache.entries()
    contents = entry.path.read_bytes()
    entry.path.write_bytes(contents.replace(b"hopper", b"happen"))
    assert find_or_make(noted, *ASKED) == expected
    assert noted.calls == 2


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90a", "sm_120a"])
def test_every_kind_of_plan_is_read_as_it_was(architecture: str) -> None:
    draw, gpu, classes = random.Random(0), named(architecture), set[type]()
    for number in range(24):
        drawn = population.residual(draw) if number % 2 else population.workload(draw, 1e11)
        problem = drawn.problem
        dtype = draw.choice([torch.float32, torch.float16, torch.float64])
        strides = torch.empty(problem.weight_shape, device="meta").stride()
        formats = [draw.random() < 0.5] * 2
        precision = draw.choice(["ieee", "tf32"]) if dtype == torch.float32 else "ieee"
        operands = operands_of(dtype, *formats, strides, draw.random() < 0.8, precision)
        for one in PASSES:
            plan = one(problem, operands, gpu, EVERY)
            again = plans.decode(plans.encode(plan))
            assert again == plan
            for launch, same in zip(plan.launches, again.launches, strict=True):
                assert launch.kernel.text == same.kernel.text  # true is not 1 there
                classes.update(map(type, launch.arguments))
    maps = {TensorMap, Im2colMap} if architecture == "sm_90a" else set()
    assert classes == {str, int} | maps


POINTWISE = Problem.of((64, 1008, 7, 7), (1008, 1008, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
NINE_TAPS = Problem.of((64, 256, 14, 14), (256, 256, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)


@pytest.mark.parametrize(
    ("one", "problem"),
    [
        (planner.forward, POINTWISE),
        (planner.input_grad, POINTWISE),
        (planner.weight_grad, NINE_TAPS),
    ],
    ids=["forward", "input_grad", "weight_grad"],
)
def test_regions_are_read_as_they_were(one: Pass, problem: Problem) -> None:
    """Contiguous tensors in 16 bits have channels-last copies in regions of the workspace."""
    strides = torch.empty(problem.weight_shape, device="meta").stride()
    operands = operands_of(torch.bfloat16, False, False, strides, True, "ieee")
    plan = one(problem, operands, named("sm_90a"), EVERY)
    again = plans.decode(plans.encode(plan))
    assert again == plan
    names = [region.name for region in plan.regions]
    assert len(names) == 2
    assert again.offsets(names) == plan.offsets(names)
