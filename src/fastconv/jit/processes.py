"""Compilers in processes of their own, for threads that compile beside many others.

NVRTC's front end takes one program at a time in a process, for a sixth of what a kernel takes: of
16 threads, 9 would wait for the others. A thread's process ends with the thread. It is a help and
no more: without it, a thread compiles as all others do. ``FASTCONV_COMPILE_PROCESSES`` says how
many there may be at once; 0 for none.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastconv.jit import nvrtc, workers

VARIABLE = "FASTCONV_COMPILE_PROCESSES"
DEFAULT_MOST = 12  # of 75 MB each
START_S = 20.0  # in which one has to be there: it takes 0.2

# What NVRTC says of a program, in whatever process; of other trouble a process may have its own.
_OF_PROGRAMS = (None, "NVRTC_ERROR_COMPILATION")

# How interpreters are called: python3.12, python3.13t, python3.11-dbg, pythonw.exe.
_PYTHON = re.compile(r"python(w|[\d.]+[a-z]*)?(_d)?(-dbg|-debug|-intel64)?(\.exe)?", re.IGNORECASE)


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
        late = threading.Timer(START_S, self._kill)
        late.daemon = True
        try:
            late.start()
            paths = (os.fspath(path) for path in sys.path if isinstance(path, str | os.PathLike))
            if tuple(self._ask([*map(str, paths)])) != version:
                raise ValueError("another NVRTC")
        except BaseException:
            self.close()
            raise
        finally:
            late.cancel()

    def compiled(self, program: nvrtc.Program) -> nvrtc.Outcome:
        return nvrtc.Outcome(*self._ask(tuple(program)))

    def close(self) -> None:
        self._kill()  # it may not notice the end of its input: forks have that open, too
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # of what it was sent and will not read
                assert pipe is not None
                pipe.close()
        self._process.wait()

    def _kill(self) -> None:
        """With whatever else it may have started, if it is a script that starts the interpreter."""
        if self._process.returncode is not None:
            return
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def _ask(self, message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        nvrtc.send(message, self._process.stdin)
        return nvrtc.receive(self._process.stdout)


_own = _Own()
_having: set[threading.Thread] = set()  # threads that have one, or are about to
_impossible = False  # to start one: nobody tries again


def most() -> int:
    """How many processes there may be: ``$FASTCONV_COMPILE_PROCESSES``, or some.

    Raises:
        ValueError: the variable is no number.
    """
    value = os.environ.get(VARIABLE) or str(DEFAULT_MOST)
    if not value.isdecimal():
        raise ValueError(f"{VARIABLE} should be a number, 0 for none, but got {value!r}")
    return int(value)


def is_python(executable: str | None) -> bool:
    """Whether that file is an interpreter, which takes a program's name as its first argument.

    ``sys.executable`` need not be one: an application that embeds Python may name itself there, and
    would be started once more. Links count as what they lead to.
    """
    if not executable or getattr(sys, "frozen", False):
        return False
    file = Path(os.path.realpath(executable))
    return bool(_PYTHON.fullmatch(file.name)) and os.access(file, os.X_OK) and file.is_file()


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
    """What this thread's process makes of the program; None if it has none, or has trouble.

    Raises:
        ValueError: ``FASTCONV_COMPILE_PROCESSES`` is no number.
    """
    limit = most()
    if not _own.allowed or not (_own.compiler or _started(version, limit)):
        return None
    assert _own.compiler is not None
    try:
        outcome = _own.compiler.compiled(program)
    except Exception:  # it was killed, say
        _own.allowed = False
        _close()
        return None
    return outcome if outcome.error in _OF_PROGRAMS else None


def _started(version: tuple[int, int], limit: int) -> bool:
    """Whether this thread has a process now."""
    global _impossible
    if _impossible or not is_python(sys.executable):
        return False
    _having.add(thread := threading.current_thread())  # before it is there: others start theirs
    try:
        if workers.alive(_having) <= limit:
            _own.compiler = _Compiler(version)
    except Exception:
        _impossible = True
    if _own.compiler is None:
        _having.discard(thread)
    return _own.compiler is not None


def _close() -> None:
    if (compiler := _own.compiler) is not None:
        _own.compiler = None
        compiler.close()
        _having.discard(threading.current_thread())
