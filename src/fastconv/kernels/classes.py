"""Which kinds of kernels there are: what remains of them without what is a mere size.

A kernel is made of parts (one loads, one multiplies, one stores), and each is compiled to different
code for some of its constants. What these are for one kernel is a *class* of each of its parts.
Two kernels of the same classes run the same code, but for the numbers in it; so tests that execute
every class, and every pair of choices, have executed all code that the planner can choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fastconv.kernels.family import Constant, Kernel, Plan

Class = tuple[str, str, tuple[tuple[str, Constant], ...]]
"""Source, part (or :data:`PAIR`), and what was chosen."""

PAIR = "pair"


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


def classes(plan: Plan, anatomies: Mapping[str, Anatomy]) -> set[Class]:
    """Of all kernels of a plan; and in which order they are launched, as a class of its own."""
    kernels = {launch.kernel.constants: launch.kernel for launch in plan.launches}
    found = {one for kernel in kernels.values() for one in anatomies[kernel.source].classes(kernel)}
    entries = dict.fromkeys(launch.kernel.entry for launch in plan.launches)
    order = tuple((str(at), entry) for at, entry in enumerate(entries))
    return found | {(plan.launches[0].kernel.source, "launches", order)}


def describe(one: Class) -> str:
    source, part, choices = one
    return f"{source}, {part}: " + ", ".join(f"{name}={value}" for name, value in choices)
