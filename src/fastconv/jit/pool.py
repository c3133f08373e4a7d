"""Compiles kernels in a pool of threads: those that are needed now, then those needed soon."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from fastconv.jit import processes
from fastconv.jit.compile import build, cached_cubin
from fastconv.jit.workers import Workers
from fastconv.kernels.family import Kernel

JOBS_VARIABLE = "FASTCONV_COMPILE_JOBS"
"""The environment variable that sets how many kernels compile at once."""

compile_threads: int | None = None
"""How many kernels compile at once; None: as many as :func:`compile_jobs` says.

Processes that share the machine with others of their kind set it to a smaller number.
"""

_workers = Workers(processes.allowed)


def _replace_workers() -> None:
    """Starts anew in a forked process, which has none of the threads, and may have locked locks."""
    global _workers
    _workers = Workers(processes.allowed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_workers)


def build_all(
    kernels: Sequence[Kernel], arch: str, show: Callable[[int, int], None] | None = None
) -> list[bytes]:
    """The kernels' machine code, as :func:`build` gives it; many compile at once.

    ``show`` is called with the number of programs that are done, and the number of all.
    """
    distinct = {kernel.text: kernel for kernel in kernels}  # kernels may share a program
    pending = {text: _load_or_submit(kernel, arch) for text, kernel in distinct.items()}
    built: dict[str, bytes] = {}
    for text, cubin in pending.items():
        built[text] = cubin if isinstance(cubin, bytes) else cubin.result()
        if show is not None:
            show(len(built), len(distinct))
    return [built[kernel.text] for kernel in kernels]


def _load_or_submit(kernel: Kernel, arch: str) -> bytes | Future[bytes]:
    """The machine code if it is on disk, else the future of the thread that compiles it."""
    key, work = _build_task(kernel, arch)
    return _workers.claim(key) or cached_cubin(kernel, arch) or _workers.submit(key, work, _jobs())


def build_ahead(kernel: Kernel, arch: str) -> None:
    """Compiles a kernel in the background, for :func:`build_all` to find. Raises nothing."""
    run_ahead(*_build_task(kernel, arch))


def run_ahead(key: Hashable, work: Callable[[], Any]) -> None:
    """Does other work in the background, for :func:`claim` to find by its key. Raises nothing.

    With ``FASTCONV_COMPILE_JOBS=1`` nothing is done ahead. Otherwise one thread of the pool is
    left for what is needed at once.
    """
    with suppress(ValueError):  # build_all reports a variable that is not a number
        _workers.submit_ahead(key, work, _jobs())


def cancel_ahead(key: Hashable) -> None:
    """Drops work that :func:`run_ahead` was given, unless a thread has begun it."""
    _workers.cancel_ahead(key)


def claim(key: Hashable) -> Any:
    """The result of work that was done ahead; None if there was none, or if it failed."""
    future = _workers.claim(key)
    return None if future is None else future.result()


def _build_task(kernel: Kernel, arch: str) -> tuple[Hashable, Callable[[], bytes]]:
    return (kernel.text, arch), functools.partial(build, kernel, arch)


def _jobs() -> int:
    return compile_threads or compile_jobs() or 1


def compile_jobs() -> int | None:
    """How many kernels to compile at once: ``$FASTCONV_COMPILE_JOBS``, or one for each core.

    Only cores that this process may use count: containers and schedulers limit them.

    Raises:
        ValueError: the variable is not a positive number.
    """
    if value := os.environ.get(JOBS_VARIABLE):
        if not value.isdecimal() or int(value) == 0:
            raise ValueError(f"{JOBS_VARIABLE} should be a positive number, but got {value!r}")
        return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
