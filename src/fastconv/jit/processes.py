"""Compilers in processes of their own, for threads that compile beside many others.

NVRTC's front end takes one program at a time in a process, for a sixth of what a kernel takes: of
16 threads, 9 would wait for the others. A thread's process ends with the thread. It is a help and
no more: without it, a thread compiles as all others do.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastconv.jit import nvrtc

MOST = 12  # at once, of 75 MB each

# A process that was killed, that could not be started, or whose compiler is another one.
_TROUBLE = (OSError, EOFError, pickle.UnpicklingError, ValueError)


class _Own(threading.local):
    """A thread's: whether it may have a process, and the one that it has."""

    allowed = False
    compiler: _Compiler | None = None


class _Compiler:
    """Another process that compiles; its NVRTC is of the version that is asked for."""

    def __init__(self, version: tuple[int, int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", nvrtc.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is not for it
        )
        try:
            if tuple(self._ask(sys.path)) != version:
                raise ValueError("another NVRTC")
        except BaseException:
            self.close()
            raise

    def compiled(self, program: nvrtc.Program) -> nvrtc.Outcome:
        return nvrtc.Outcome(*self._ask(tuple(program)))

    def close(self) -> None:
        self._process.kill()  # it may not notice the end of its input: forks have that open, too
        with suppress(OSError):  # of what it was sent and will not read
            self._process.communicate()

    def _ask(self, message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


_own = _Own()
_running: set[_Compiler] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)


@contextmanager
def allowed() -> Iterator[None]:
    """Within, this thread may have a process that compiles for it."""
    _own.allowed = True
    try:
        yield
    finally:
        _own.allowed = False
        _close()


def compiled(program: nvrtc.Program, version: tuple[int, int]) -> nvrtc.Outcome | None:
    """What this thread's process makes of the program; None if it has none, and will have none."""
    if not _own.allowed:
        return None
    try:
        if _own.compiler is None:
            if len(_running) >= MOST or not _is_python(sys.executable):
                return None
            _own.compiler = _Compiler(version)
            _running.add(_own.compiler)
        return _own.compiler.compiled(program)
    except _TROUBLE:
        _own.allowed = False
        _close()
        return None


def _close() -> None:
    if (compiler := _own.compiler) is not None:
        _own.compiler = None
        compiler.close()
        _running.discard(compiler)


def _is_python(executable: str | None) -> bool:
    """Whether that is an interpreter: programs that have one inside may name themselves."""
    frozen = getattr(sys, "frozen", False)
    return not frozen and Path(executable or "").name.lower().startswith("python")
