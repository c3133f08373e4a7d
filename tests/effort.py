"""What a computation costs, wherever it runs: on a slow or busy machine, seconds say nothing."""

from __future__ import annotations

from collections.abc import Callable
from cProfile import Profile
from typing import Any

PATIENCE_S = 600.0
"""How long tests wait for what must come: on any machine, only what hangs takes longer."""


def calls(function: Callable[[], Any]) -> int:
    """How many Python functions it calls; a million of them take about half a second."""
    profile = Profile(subcalls=False, builtins=False)
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())
