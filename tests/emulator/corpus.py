"""The coverage corpus: a small problem for the emulator to run, for every coverage class.

Each problem is a line of ``problems.txt``. ``make corpus`` draws problems at random and adds the
smallest that it finds for every coverage class that no line has; it removes lines whose classes all
occur in other lines. See docs/testing.md.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from emulator.forced_plans import (
    TILE_CONSTANTS,
    Copies,
    kind_of,
    main_kernel,
    planner_of,
    tile_of,
    word_of,
)
from emulator.pass_cases import Conv, PassCase
from fastconv.bench import population
from fastconv.kernels import coverage, planner
from fastconv.kernels.coverage import Class
from fastconv.kernels.family import Declined, Gpu
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import Problem
from fastconv.workloads import parse_shape

PROBLEMS = Path(__file__).with_name("problems.txt")


PASSES = ("forward", "input_grad", "weight_grad")


def _forced(case: PassCase) -> Iterator[PassCase]:
    """The test case with its kernel forced, or if it is forced already, its tile."""
    kernel, family = main_kernel(case.plan), case.plan.family
    kind = kind_of(case.plan)
    if type(case.planner) is not kind:
        if family in ("hopper", "ampere"):
            yield replace(case, planner=kind(case.direction))
    elif kernel.source in TILE_CONSTANTS and not (case.planner.tile or is_small(case)):
        if case.direction != "weight_grad" and kind is not Copies:
            kernel = case.plan.launches[-1].kernel
        yield replace(case, planner=kind(case.direction, tile_of(kernel)))


MODES = {
    "float32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float16": (torch.float16, "ieee"),
    "bfloat16": (torch.bfloat16, "ieee"),
    "float64": (torch.float64, "ieee"),
}
FORMATS = ("nchw", "nhwc")
# Numbers of SMs, so few that small problems have more tiles than SMs.
SM_COUNTS = (1, 2, 3, 5)

# Limits of a drawn problem that the emulator runs in about a second. Where no smaller problem has a
# class, FAR_MORE times as much is allowed: about a minute.
MOST_FLOPS, MOST_ELEMENTS = 3e8, 3e5
FAR_MORE = 6
PRICE = 1e5  # of compiling a test case, in the unit of :func:`cost`
LARGE_FLOPS = 1e12  # limits of a problem that is only planned
LARGE_ELEMENTS = 4e9
# Shares of drawn problems with narrow groups, from practice, with many channels, and of volumes.
NARROW = 0.1
PRACTICAL = 0.2
DENSE = 0.15
VOLUMES = 0.15
DENSE_MODES = ("tf32", "float16", "bfloat16")
GROUPED = 0.05  # of layers that the kernels for groups of few channels take


# --- Lines ----------------------------------------------------------------------------------------


def line_of(case: PassCase) -> str:
    """A test case as a line: the GPU and its number of SMs, the pass, the tensors, the shape."""
    modes = {kind: name for name, kind in MODES.items()}
    words = [
        f"{case.gpu.architecture}/{case.gpu.sm_count}",
        word_of(case.planner),
        modes[case.dtype, case.precision],
        "/".join(FORMATS[last] for last in (case.channels_last, case.output_channels_last)),
    ]
    words += ["unaligned"] * (not case.aligned) + ["bias"] * case.bias_grad
    words += ["plain"] * case.plain_weight
    return f"{' '.join(words)}: {case.conv.name}"


def case_of(line: str) -> PassCase:
    """The test case of a line: the inverse of :func:`line_of`."""
    words, _, shape = line.partition(": ")
    gpu, direction, mode, formats, *more = words.split()
    architecture, sm_count = gpu.split("/")
    read, written = (one == "nhwc" for one in formats.split("/"))
    dtype, precision = MODES[mode]
    return PassCase(
        _conv(parse_shape(shape).problem),
        planner_of(direction),
        dtype,
        read,
        "unaligned" not in more,
        replace(GPUS[architecture], sm_count=int(sm_count)),
        precision,
        read != written,
        bias_grad="bias" in more,
        plain_weight="plain" in more,
    )


def read_cases(path: Path = PROBLEMS) -> list[PassCase]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [case_of(line) for line in lines if line and not line.startswith("#")]


def _conv(problem: Problem) -> Conv:
    return Conv(
        population.workload_of(problem).shape,
        problem.input_shape,
        problem.weight_shape,
        tuple(axis.stride for axis in problem.axes),
        tuple(side for axis in problem.axes for side in (axis.before, axis.after)),
        tuple(axis.dilation for axis in problem.axes),
        problem.groups,
    )


# --- Drawing test cases ---------------------------------------------------------------------------


def mode_of(case: PassCase) -> str:
    """The name of a test case's type and precision."""
    return next(name for name, kind in MODES.items() if kind == (case.dtype, case.precision))


def classes_of(case: PassCase) -> set[Class]:
    return coverage.classes(case.plan, case.conv.problem, planner.ANATOMIES)


def drawn(draw: Random) -> PassCase:
    """Draws a pass of a small or large problem for any GPU, more than half of them for Hopper."""
    place = draw.random()
    large = place < 0.4
    limits = _limits(large)
    problem = population.workload(draw, *limits).problem
    kind = place * 100 % 1  # digits of ``place``, so that the draws that follow stay the same
    if kind < NARROW:
        problem = population.narrow(Random(place), *limits).problem
    elif kind > 1 - PRACTICAL:
        problem = population.practical(Random(place), *limits).problem
    elif kind > 1 - PRACTICAL - VOLUMES:
        problem = population.volume(Random(place), *limits).problem
    mode = draw.choice(("float32", "tf32", "float16", "bfloat16"))
    if draw.random() < 0.05:
        mode = "float64"
    direction = draw.choice(PASSES)
    read = draw.random() < 0.45
    written = read if draw.random() < 0.75 else not read
    bias_grad = direction == "weight_grad" and draw.random() < 0.5
    dtype, precision = MODES[mode]
    case = PassCase(
        _conv(problem),
        getattr(planner, direction),
        dtype,
        read,
        draw.random() < 0.85,
        drawn_gpu(draw, large),
        precision,
        read != written,
        bias_grad=bias_grad,
    )
    if 0 <= kind - NARROW - DENSE < GROUPED:
        grouped = _grouped(Random(place), case, large)
        return grouped if grouped.plan.family == "grouped" else case
    return _dense(Random(place), large) if NARROW <= kind < NARROW + DENSE else case


def _grouped(draw: Random, case: PassCase, large: bool) -> PassCase:
    """Draws a channels-last layer with groups of few channels, for the GPU of a case."""
    return replace(
        case,
        conv=_conv(population.grouped(draw, *_limits(large)).problem),
        dtype=draw.choice((torch.float16, torch.bfloat16)),
        precision="ieee",
        channels_last=True,
        other_format=False,
        aligned=True,
        plain_weight=draw.random() < 0.3,
    )


def _dense(draw: Random, large: bool) -> PassCase:
    """Draws a layer of many channels for Hopper, in a mode that implicit GEMM kernels take."""
    is_real = draw.random() < 0.3
    drawn = population.residual(draw) if is_real else population.dense(draw, *_limits(large))
    case = _dense_case(drawn.problem, draw.choice(DENSE_MODES), draw.choice(PASSES))
    gpu = H200 if large or is_real else replace(H200, sm_count=draw.choice(SM_COUNTS))
    case = replace(case, gpu=gpu, plain_weight=draw.random() < 0.2)
    if case.direction != "weight_grad":
        return case
    last = case.channels_last and draw.random() < 0.7
    return replace(case, channels_last=last, bias_grad=draw.random() < 0.5)


def known() -> Iterator[PassCase]:
    """The benchmark suites' layers at full size."""
    layers = [workload.problem for workload in population.KNOWN if workload.groups == 1]
    for problem, mode, direction in product(layers, DENSE_MODES, PASSES[:2]):
        yield _dense_case(problem, mode, direction)


def _dense_case(problem: Problem, mode: str, direction: str) -> PassCase:
    dtype, precision = MODES[mode]
    last = mode != "tf32"
    return PassCase(_conv(problem), getattr(planner, direction), dtype, last, precision=precision)


def _limits(large: bool) -> tuple[float, float]:
    return (LARGE_FLOPS, LARGE_ELEMENTS) if large else (MOST_FLOPS, MOST_ELEMENTS)


# GPUs with equal shared memory share a turn, so that the draws after this one do not depend on the
# number of GPUs. Otherwise each new GPU would change all problems, and with them the rare classes.
TURNS = (
    ("sm_70",), ("sm_75",), ("sm_80", "sm_87"), ("sm_86",), ("sm_89",), ("sm_90a",),
    ("sm_100a", "sm_103a"), ("sm_120a", "sm_121a"),
)  # fmt: skip


def drawn_gpu(draw: Random, whole: bool) -> Gpu:
    gpu, place = H200, (draw.random() - 0.55) / 0.45
    if place >= 0:
        alike = draw.choice(TURNS)
        gpu = GPUS[alike[int(place * len(alike))]]
    return gpu if whole else replace(gpu, sm_count=draw.choice(SM_COUNTS))


def cost(case: PassCase) -> float:
    """About what it takes to emulate a test case, in elements."""
    problem = case.conv.problem
    elements = sum(
        map(math.prod, (problem.input_shape, problem.weight_shape, problem.output_shape))
    )
    return elements + problem.flops / 100 + case.plan.scratch_bytes / 100


def is_small(case: PassCase) -> bool:
    problem = case.conv.problem
    return problem.flops <= FAR_MORE * MOST_FLOPS and cost(case) <= FAR_MORE * MOST_ELEMENTS


def shrunk(case: PassCase, wanted: Callable[[PassCase], bool]) -> PassCase:
    """Makes a test case smaller, step by step, as long as ``wanted`` holds for it."""
    while True:
        for smaller in _smaller(case):
            with suppress(Declined):
                if wanted(smaller):
                    case = smaller
                    break
        else:
            return case


def _smaller(case: PassCase) -> Iterator[PassCase]:
    for problem in population.smaller(case.conv.problem):
        yield replace(case, conv=_conv(problem))
    yield from _forced(case)
    if case.gpu.sm_count > SM_COUNTS[-1]:
        for sm_count in SM_COUNTS:
            yield replace(case, gpu=replace(case.gpu, sm_count=sm_count))


# --- Extending the corpus -------------------------------------------------------------------------


class Found(NamedTuple):
    """The cheapest of the drawn test cases of a coverage class."""

    cost: float
    line: str


def survey(seed: int, seconds: float) -> tuple[int, dict[Class, Found]]:
    """Draws test cases; returns how many, and the cheapest one of each coverage class."""
    draw, end = Random(seed), time.monotonic() + seconds
    found: dict[Class, Found] = {}
    count = 0
    while time.monotonic() < end:
        _add(found, drawn(draw))
        count += 1
    return count, found


def _add(found: dict[Class, Found], case: PassCase) -> None:
    one = Found(cost(case), line_of(case))
    for each in classes_of(case):
        found[each] = min(one, found.get(each, one))


def missing(found: Iterable[Class], cases: Iterable[PassCase]) -> set[Class]:
    """Coverage classes that none of the test cases has."""
    return set(found).difference(*map(cached_classes, map(line_of, cases)))


@cache
def cached_classes(line: str) -> frozenset[Class]:
    return frozenset(classes_of(case_of(line)))


def small_line(task: tuple[Class, str]) -> str | None:
    """A line of that coverage class which the emulator can run, or None if none was found."""
    one, line = task
    case = case_of(line)
    # Classes of REACH are so many that any small problem will do.
    if one[1] != coverage.REACH or not is_small(case):
        case = shrunk(case, lambda case: one in classes_of(case))
    return line_of(case) if is_small(case) else None


def extended(
    cases: Sequence[PassCase], found: dict[Class, Found], pool: ProcessPoolExecutor
) -> tuple[list[PassCase], list[Class]]:
    """Adds a test case for each class that has none; also returns classes of large problems."""
    lines = [line_of(case) for case in cases]
    open_classes = set(found).difference(*map(cached_classes, lines))
    too_large: list[Class] = []
    while open_classes:
        # Expensive classes come first: their problems also have many of the cheap classes.
        wave = sorted(open_classes, key=lambda one: (-found[one].cost, one[:2], str(one)))[:64]
        tasks = [(one, found[one].line) for one in wave]
        for (one, _), line in zip(tasks, pool.map(small_line, tasks), strict=True):
            if one not in open_classes:
                continue
            open_classes.discard(one)
            if line is None:
                too_large.append(one)
            else:
                lines.append(line)
                open_classes -= cached_classes(line)
    return [case_of(line) for line in lines], too_large


def without_idle(cases: Iterable[PassCase]) -> list[PassCase]:
    """Drops test cases, expensive ones first, whose classes all occur in others."""
    kept = {line_of(case): cost(case) for case in cases}
    count: dict[Class, int] = {}
    for line in kept:
        for one in cached_classes(line):
            count[one] = count.get(one, 0) + 1
    for line in sorted(kept, key=lambda line: -kept[line]):
        if all(count[one] > 1 for one in cached_classes(line)):
            del kept[line]
            for one in cached_classes(line):
                count[one] -= 1
    return [case_of(line) for line in kept]


def ordered(cases: Iterable[PassCase]) -> list[PassCase]:
    """Orders test cases by new classes per cost, so that the first few cover most."""
    price = {line_of(case): PRICE + cost(case) for case in cases}
    left = set().union(*map(cached_classes, price))
    # The worth of a line only falls as others are taken, so a stale value is an upper bound.
    worth = [(-len(cached_classes(line)) / cost, line) for line, cost in price.items()]
    heapify(worth)
    taken = []
    while worth:
        _, line = heappop(worth)
        now = -len(cached_classes(line) & left) / price[line]
        if worth and now > worth[0][0]:
            heappush(worth, (now, line))
        else:
            taken.append(case_of(line))
            left -= cached_classes(line)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="time to draw problems")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jobs = os.cpu_count() or 1
    with ProcessPoolExecutor(jobs) as pool:
        seeds = range(arguments.seed * jobs, (arguments.seed + 1) * jobs)
        surveys = list(pool.map(survey, seeds, [arguments.seconds] * jobs))
        found: dict[Class, Found] = {}
        for _, of_one in surveys:
            for each, best in of_one.items():
                found[each] = min(best, found.get(each, best))
        for case in known():
            _add(found, case)
        cases = read_cases()
        print(f"Drew {sum(count for count, _ in surveys)} problems of {len(found)} classes.")
        print(f"The corpus of {len(cases)} problems lacks {len(missing(found, cases))} of them.")
        cases, too_large = extended(cases, found, pool)
    cases = ordered(without_idle(cases))
    PROBLEMS.write_text("".join(f"{line_of(case)}\n" for case in cases), encoding="utf-8")
    print(f"The corpus has {len(cases)} problems. Classes too large to emulate: {len(too_large)}")
    for one in sorted(too_large, key=str):
        print(f"  {coverage.describe(one)}: {found[one].line}")


if __name__ == "__main__":
    main()
