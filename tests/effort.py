"""How much tests run, cost and wait, none of which depends on how fast or busy a machine is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from cProfile import Profile
from typing import Any

ALL = "FASTCONV_CORPUS" in os.environ
"""Whether to run all test cases, as ``make test-corpus`` does, instead of a selection for CI."""

PATIENCE_S = 600.0
"""How long tests wait for other threads and processes: only what hangs takes longer."""


def wait_until(condition: Callable[[], object]) -> None:
    """Waits for other threads or processes until ``condition()`` is true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited for {PATIENCE_S:.0f} s"
        time.sleep(0.001)


def calls(function: Callable[[], Any]) -> int:
    """How many Python functions are called; a million of them take about half a second."""
    profile = Profile(subcalls=False, builtins=False)
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())
