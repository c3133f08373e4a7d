"""Which kinds of kernels there are: what remains of them without what is a mere size.

A kernel is made of parts (one loads, one multiplies, one stores), and each is compiled to different
code for some of its constants. What these are for one kernel is a *class* of each of its parts.
Two kernels of the same classes run the same code, but for the numbers in it; so tests that execute
every class, and every pair of choices, have executed all code that the planner can choose. Each
choice with each property of a problem that decides how far code reaches is a class, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from math import gcd
from typing import Any

from fastconv.kernels.family import Constant, Kernel, Plan
from fastconv.problem import Problem

Class = tuple[str, str, tuple[tuple[str, Constant], ...]]
"""Source, part (or :data:`PAIR`), and what was chosen."""

PAIR = "pair"
REACH = "reach"
"""The part of classes that are a choice with a property of the problem: see :func:`reaches`."""


@dataclass(frozen=True)
class Anatomy:
    """What chooses the code of a family's kernel.

    Constants that are not ``sizes`` do, each by its value, and so does what ``chosen`` makes of all
    constants. ``parts`` says which of these choices the code of each part knows.
    """

    sizes: frozenset[str]
    chosen: Callable[[Mapping[str, Any]], dict[str, Constant]]
    parts: Mapping[str, tuple[str, ...]]

    def choices(self, kernel: Kernel) -> dict[str, Constant]:
        constants = dict(kernel.constants)
        taken = {name: value for name, value in constants.items() if name not in self.sizes}
        return taken | self.chosen(constants)

    def classes(self, kernel: Kernel) -> Iterator[Class]:
        choices = self.choices(kernel)
        for part, names in self.parts.items():
            yield kernel.source, part, tuple((name, choices[name]) for name in names)
        for pair in combinations(sorted(choices.items()), 2):
            yield kernel.source, PAIR, pair


def reaches(problem: Problem) -> dict[str, Constant]:
    """What of a problem decides where code reads and writes beyond an image, but chooses no code.

    Rows and columns that are left over where those a dilation apart are walked together, planes
    with an odd number of elements, and on which sides there is padding.
    """
    height, width = problem.output_size
    top, bottom, left, right = problem.padding
    return {
        "rows left over": height % _step(problem, 0) > 0,
        "columns left over": width % _step(problem, 1) > 0,
        "odd plane": height * width % 2 > 0,
        "rows padded": _padded(top, bottom),
        "columns padded": _padded(left, right),
    }


def _step(problem: Problem, axis: int) -> int:
    """How far apart outputs are that read the same input."""
    return problem.dilation[axis] // gcd(problem.stride[axis], problem.dilation[axis])


def _padded(before: int, behind: int) -> str:
    sides = ["before"] * (before > 0) + ["behind"] * (behind > 0)
    return " and ".join(sides) or "nowhere"


def classes(plan: Plan, problem: Problem, anatomies: Mapping[str, Anatomy]) -> set[Class]:
    """The classes of all kernels of a plan for a problem.

    In which order they are launched is a class of its own, and so is each choice of a kernel with
    each property of the problem that decides how far it reaches.
    """
    kernels = {launch.kernel.constants: launch.kernel for launch in plan.launches}
    found = {one for kernel in kernels.values() for one in anatomies[kernel.source].classes(kernel)}
    for kernel in kernels.values():
        choices = anatomies[kernel.source].choices(kernel)
        pairs = product(choices.items(), reaches(problem).items())
        found |= {(kernel.source, REACH, pair) for pair in pairs}
    entries = dict.fromkeys(launch.kernel.entry for launch in plan.launches)
    order = tuple((str(at), entry) for at, entry in enumerate(entries))
    return found | {(plan.launches[0].kernel.source, "launches", order)}


def describe(one: Class) -> str:
    source, part, choices = one
    return f"{source}, {part}: " + ", ".join(f"{name}={value}" for name, value in choices)
