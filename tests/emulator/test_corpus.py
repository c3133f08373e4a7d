"""The coverage corpus: the emulator executes every coverage class that the planner can choose.

CI runs the first problems of ``problems.txt``, which cover most classes. ``make test-corpus`` runs
all of them, and draws many more problems to look for classes that no line has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from random import Random

import pytest

from effort import ALL
from emulator import corpus, isolated, precompile
from emulator.pass_cases import PassCase, check
from fastconv.kernels import coverage, planner
from fastconv.kernels.family import GEOMETRY, Kernel, Plan
from fastconv.kernels.gpus import GPUS

PROBLEMS = corpus.read_cases()
EMULATED = PROBLEMS if ALL else PROBLEMS[:24]
DRAWN = 20_000 if ALL else 500
SEED = int(os.environ.get("FASTCONV_CORPUS") or 0)


@pytest.fixture(scope="module")
def _compiled() -> None:
    precompile({launch.kernel for case in EMULATED for launch in case.plan.launches})


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("case", EMULATED, ids=corpus.line_of)
def test_problem(case: PassCase) -> None:
    check(case)


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("case", EMULATED, ids=corpus.line_of)
def test_isolation(case: PassCase) -> None:
    isolated.check(case)


def test_every_class_has_a_problem() -> None:
    draw = Random(SEED)
    cases = chain(corpus.known(), (corpus.drawn(draw) for _ in range(DRAWN)))
    drawn = {one: case for case in cases for one in corpus.classes_of(case)}
    assert len(drawn) > 5000
    open_classes = corpus.missing(drawn, PROBLEMS)
    lines = {
        one: corpus.small_line((one, corpus.line_of(drawn[one]))) or corpus.line_of(drawn[one])
        for one in sorted(open_classes, key=str)[:20]
    }
    report = "\n".join(f"{coverage.describe(one)}\n    {line}" for one, line in lines.items())
    assert not open_classes, (
        f"{len(open_classes)} classes of {len(drawn)} have no problem. `make corpus` adds "
        f"some, or add these lines to problems.txt:\n{report}"
    )


def test_every_gpu_is_drawn() -> None:
    draw = Random(SEED)
    assert {corpus.drawn_gpu(draw, True) for _ in range(1000)} == set(GPUS.values())


def test_lines_say_what_they_mean() -> None:
    lines = [corpus.line_of(case) for case in PROBLEMS]
    assert len(set(lines)) == len(lines)
    assert [corpus.case_of(line) for line in lines] == PROBLEMS


def _plans() -> Iterator[Plan]:
    return (case.plan for case in PROBLEMS)


@pytest.mark.parametrize("source", planner.ANATOMIES)
def test_parts_name_all_choices(source: str) -> None:
    """Each choice is in a part; otherwise only classes of pairs would have it."""
    anatomy = planner.ANATOMIES[source]
    kernels = (launch.kernel for plan in _plans() for launch in plan.launches)
    kernel: Kernel = next(one for one in kernels if one.source == source)
    assert anatomy.sizes - GEOMETRY - coverage.OF_VOLUMES <= dict(kernel.constants).keys()
    known = {name for names in anatomy.parts.values() for name in names}
    assert known <= anatomy.choices(kernel).keys()


def test_a_new_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant that is not declared counts as a choice of code."""
    case = PROBLEMS[0]
    kernel = case.plan.launches[-1].kernel
    other = Kernel(kernel.source, kernel.entry, (*kernel.constants, ("novel", True)))
    anatomy = planner.ANATOMIES[kernel.source]
    found = set(anatomy.classes(other)) - set(anatomy.classes(kernel))
    assert found
    assert all("novel=True" in coverage.describe(one) for one in found)
