"""The environment variables that fastconv reads: which are set, and whether values are allowed.

A process reads each variable where it needs it. Commands check values first, so that a wrong one is
reported before the work and not in the middle of it.
"""

from __future__ import annotations

import os

from fastconv import native
from fastconv.bench.environment import COMMIT_VARIABLE
from fastconv.jit import cache, pool, processes
from fastconv.kernels import planner
from fastconv.native import compiler
from fastconv.ops import inductor

_PREFIX = "FASTCONV_"

KNOWN = frozenset({
    cache.FOLDER_VARIABLE, cache.VARIABLE, pool.JOBS_VARIABLE, processes.VARIABLE,
    "FASTCONV_NATIVE", "FASTCONV_BUNDLE", inductor.VARIABLE, compiler.VARIABLE, planner.VARIABLE,
    COMMIT_VARIABLE,
})  # fmt: skip
"""The names of all variables that fastconv reads."""

# Functions that raise a ValueError if their variable has a value that is not allowed. A wrong
# family is an error of its own, and a wrong size limit a warning.
_READERS = (pool.compile_jobs, processes.most, native.wanted, compiler.limit_s)


def check() -> None:
    """Reads the variables.

    Raises:
        ValueError: a variable has a value that is not allowed; the message names both.
    """
    for read in _READERS:
        read()


def in_force() -> list[str]:
    """Every variable of fastconv's that is set, with its value; unknown names are marked."""
    return [
        f"{name}={value}" + ("" if name in KNOWN else " (fastconv reads no such variable)")
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIX) and value
    ]
