"""The cost of a computation on any machine: seconds say nothing on a slow or busy one."""

from __future__ import annotations

from collections.abc import Callable
from cProfile import Profile
from typing import Any

PATIENCE_S = 600.0
"""How long tests wait for other threads and processes: only what hangs takes longer."""


def calls(function: Callable[[], Any]) -> int:
    """How many Python functions are called; a million of them take about half a second."""
    profile = Profile(subcalls=False, builtins=False)
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())
