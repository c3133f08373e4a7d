"""Kernels with deliberate faults, for tests that the emulator finds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from emulator.driver import HOST
from emulator.pass_cases import Planner
from fastconv.kernels.family import FOLDER, Gpu, Kernel, Operands, Plan
from fastconv.problem import Problem

INCLUDE = re.compile(r'#include "(.*)"')


@dataclass(frozen=True)
class Changed(Kernel):
    """A kernel from a test's own file, with ``old`` replaced by ``new`` in its text."""

    old: str
    new: str

    @property
    def text(self) -> str:
        include = f'#include "{self.source}"'
        text = super().text.replace(include, Path(self.source).read_text())
        assert self.old in text
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Fault:
    """A replacement of ``old`` by ``new`` in a file below ``fastconv/kernels``."""

    file: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.old!r} does not occur exactly once in {self.file}"
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Faulty(Kernel):
    """A kernel of the package with a fault in one of its files.

    Its text has all included files inlined, except those that the emulator has twins of.
    """

    fault: Fault

    @property
    def text(self) -> str:
        return "\n".join(_expanded(super().text, self.fault, set()))


def _expanded(text: str, fault: Fault, seen: set[str]) -> Iterator[str]:
    """The lines of a text with its includes inlined, each file once; adds the files to ``seen``."""
    for line in text.splitlines():
        found = INCLUDE.match(line)
        if found is None or (HOST / found[1]).exists():
            if line != "#pragma once":
                yield line
        elif found[1] not in seen:
            seen.add(found[1])
            included = (FOLDER / found[1]).read_text(encoding="utf-8")
            if found[1] == fault.file:
                included = fault.applied(included)
            yield from _expanded(included, fault, seen)


def _faulty_kernel(kernel: Kernel, fault: Fault) -> Kernel:
    """The kernel with the fault, or the kernel itself if it does not include the faulty file."""
    files: set[str] = set()
    for _ in _expanded(kernel.text, fault, files):
        pass
    if fault.file not in files:
        return kernel
    return Faulty(kernel.source, kernel.entry, kernel.constants, fault)


def with_fault(plan: Plan, fault: Fault) -> Plan:
    """The plan with a fault in those of its kernels that include the faulty file."""
    launches = tuple(
        replace(one, kernel=_faulty_kernel(one.kernel, fault)) for one in plan.launches
    )
    assert launches != plan.launches, f"no kernel of the plan includes {fault.file}"
    return replace(plan, launches=launches)


@dataclass(frozen=True)
class FaultyPlanner:
    """Makes the plans of another planner, with a fault in their kernels."""

    planner: Planner
    fault: Fault

    @property
    def __name__(self) -> str:
        return self.planner.__name__

    def __call__(self, problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        return with_fault(self.planner(problem, operands, gpu), self.fault)
