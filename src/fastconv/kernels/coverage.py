"""Coverage classes of kernels: which code a kernel consists of, apart from mere sizes.

A kernel is made of parts (one loads, one multiplies, one stores), and the code of each part depends
on the values of some constants. These values are the kernel's *coverage class* of that part. Two
kernels of the same classes run the same code, but for the numbers in it. So tests that execute
every class, and every pair of choices, execute all code that the planner can choose. Each choice
together with each property of a problem that decides how far code reads and writes is a class, too.
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
"""A coverage class: source, part (or :data:`PAIR` or :data:`REACH`), and the choices."""

PAIR = "pair"
"""The part of classes that are two choices of a kernel."""
OF_PAIRS = frozenset({"beside", "blocks", "input_vector_loads", "input_vector_stores"})
"""What copies of a weight gradient's pair of tensors have, by the code of other copies."""
OF_VOLUMES = frozenset({"walk", "tap_planes", "most_registers"}) | OF_PAIRS
"""Sizes that only kernels for volumes have."""
REACH = "reach"
"""The part of classes that are a choice and a property of the problem: see :func:`reaches`."""


@dataclass(frozen=True)
class Anatomy:
    """What selects the code of a family's kernel.

    The choices are the values of all constants but ``sizes``, and what ``chosen`` derives from the
    constants. ``parts`` lists the choices that the code of each part depends on.
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


def volume(constants: Mapping[str, Any]) -> dict[str, Constant]:
    """The choice between the code of images and that of volumes; images have no constant for it."""
    return {"volume": True} if "kernel_depth" in constants else {}


def reaches(problem: Problem) -> dict[str, Constant]:
    """Returns the properties of a problem that decide where code reads and writes at the borders.

    They select no code: whether rows and columns are left over where those a dilation apart are
    computed together, whether planes have an odd number of elements, and which sides are padded.
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
    """Returns the distance between outputs that read the same inputs."""
    return problem.dilation[axis] // gcd(problem.stride[axis], problem.dilation[axis])


def _padded(before: int, behind: int) -> str:
    sides = ["before"] * (before > 0) + ["behind"] * (behind > 0)
    return " and ".join(sides) or "nowhere"


def classes(plan: Plan, problem: Problem, anatomies: Mapping[str, Anatomy]) -> set[Class]:
    """Returns the coverage classes of all kernels of a plan for a problem.

    The order of the launches is a class of its own, and so is each choice of a kernel together with
    each of the problem's properties in :func:`reaches`.
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


TENSOR = {
    "device/tensor/clear_planes.cuh": Anatomy(
        sizes=frozenset({"rows", "depth", "first", "step", "plane"}),
        chosen=lambda constants: {},
        parts={"clear": ("Scalar",)},
    )
}
"""The kernels that the tensor-core families have in common."""
