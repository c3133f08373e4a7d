"""Compiler processes: they let many threads compile at once.

Within a process, NVRTC's front end compiles one program at a time, for a sixth of a kernel's
compile time: of 16 threads, 9 would wait for the others. So a thread may have a process that
compiles for it, and that ends with the thread. If the process cannot be started or fails, the
thread compiles by itself. ``FASTCONV_COMPILE_PROCESSES`` sets how many there may be at once; 0
means none.
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
"""The environment variable that sets how many compiler processes there may be."""

DEFAULT_MOST = 12
"""How many compiler processes there may be by default; each takes 75 MB of memory."""

START_S = 20.0
"""Seconds after which a compiler process that has not answered is killed; 0.2 are usual."""

# The statuses of NVRTC that depend on the program alone. With any other status, for example
# out of memory, the program is compiled again in this process.
_PROGRAM_STATUSES = (None, "NVRTC_ERROR_COMPILATION")

# Names of interpreters: python3.12, python3.13t, python3.11-dbg, pythonw.exe.
_PYTHON = re.compile(r"python(w|[\d.]+[a-z]*)?(_d)?(-dbg|-debug|-intel64)?(\.exe)?", re.IGNORECASE)


class _ThreadState(threading.local):
    """Whether the current thread may have a compiler process, and the one that it has."""

    allowed = False
    compiler: _Compiler | None = None


class _Compiler:
    """A process that compiles with NVRTC.

    Raises:
        ValueError: its NVRTC does not have the given version.
    """

    def __init__(self, version: tuple[int, int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", nvrtc.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
        )
        kill_late = threading.Timer(START_S, self._kill)
        kill_late.daemon = True
        try:
            kill_late.start()
            paths = (os.fspath(path) for path in sys.path if isinstance(path, str | os.PathLike))
            if tuple(self._request([*map(str, paths)])) != version:
                raise ValueError("another version of NVRTC")
        except BaseException:
            self.close()
            raise
        finally:
            kill_late.cancel()

    def compile(self, program: nvrtc.Program) -> nvrtc.Outcome:
        return nvrtc.Outcome(*self._request(tuple(program)))

    def close(self) -> None:
        # Closing its input would not end it if a forked process has the pipe open as well.
        self._kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # closing flushes a request that nobody will read
                assert pipe is not None
                pipe.close()
        self._process.wait()

    def _kill(self) -> None:
        """Kills the process and its children: the executable may be a script that starts Python."""
        if self._process.returncode is not None:
            return
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()

    def _request(self, message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        nvrtc.send(message, self._process.stdin)
        return nvrtc.receive(self._process.stdout)


_this_thread = _ThreadState()
_owners: set[threading.Thread] = set()  # threads that have a compiler process, or start one
_start_failed = False  # after one failure, no thread tries again


def most() -> int:
    """How many compiler processes there may be: ``$FASTCONV_COMPILE_PROCESSES``, or the default.

    Raises:
        ValueError: the variable is not a number.
    """
    value = os.environ.get(VARIABLE) or str(DEFAULT_MOST)
    if not value.isdecimal():
        raise ValueError(f"{VARIABLE} should be a number, 0 for none, but got {value!r}")
    return int(value)


def is_python(executable: str | None) -> bool:
    """Whether the file is a Python interpreter, judged by its name after following links.

    ``sys.executable`` need not be one: an application that embeds Python may put its own path
    there, and running it would start the application once more.
    """
    if not executable or getattr(sys, "frozen", False):
        return False
    file = Path(os.path.realpath(executable))
    return bool(_PYTHON.fullmatch(file.name)) and os.access(file, os.X_OK) and file.is_file()


@contextmanager
def allowed() -> Iterator[None]:
    """A context in which this thread may have a compiler process; it ends with the context."""
    _this_thread.allowed = True
    try:
        yield
    finally:
        _this_thread.allowed = False
        _close()


def compile_program(program: nvrtc.Program, version: tuple[int, int]) -> nvrtc.Outcome | None:
    """Compiles in this thread's process; None if it has no process, or the process failed.

    ``version`` is the version of NVRTC that the process must have.

    Raises:
        ValueError: ``FASTCONV_COMPILE_PROCESSES`` is not a number.
    """
    limit = most()
    if not _this_thread.allowed or not (_this_thread.compiler or _started(version, limit)):
        return None
    assert _this_thread.compiler is not None
    try:
        outcome = _this_thread.compiler.compile(program)
    except Exception:  # the process was killed, for example
        _this_thread.allowed = False
        _close()
        return None
    return outcome if outcome.error in _PROGRAM_STATUSES else None


def _started(version: tuple[int, int], limit: int) -> bool:
    """Starts a compiler process for this thread; False if it may not or cannot."""
    global _start_failed
    if _start_failed or not is_python(sys.executable):
        return False
    # Added before the process runs, so that threads that start theirs meanwhile count this one.
    _owners.add(thread := threading.current_thread())
    try:
        if workers.alive(_owners) <= limit:
            _this_thread.compiler = _Compiler(version)
    except Exception:
        _start_failed = True
    if _this_thread.compiler is None:
        _owners.discard(thread)
    return _this_thread.compiler is not None


def _close() -> None:
    if (compiler := _this_thread.compiler) is not None:
        _this_thread.compiler = None
        compiler.close()
        _owners.discard(threading.current_thread())
