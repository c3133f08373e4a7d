"""Compiles a library, once for all processes that want it.

It imports nothing of fastconv's or PyTorch's: as a program of its own it runs in the background,
and goes on if the process that started it ends.

A build has a folder of its own, in which all lies that it writes, the compiler's temporary files as
well. Who builds a library holds its lock: so a folder whose library nobody has locked was left by a
build that was killed, and the next build of any library removes it.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

VARIABLE = "FASTCONV_BUILD_TIMEOUT"
DEFAULT_LIMIT_S = 1800.0  # a compiler takes one minute or two, on a slow and busy machine ten

# What jit/trust.py asks for, whatever the umask: nobody else writes it, others may read it.
_MODE = 0o644

_REMEMBERED_S = 24 * 3600.0  # by then there may be another compiler
_PASSING = ("Killed", "No space left", "emporary file")  # that say nothing of the next attempt
_FOLDER = re.compile(r"(host-[0-9a-f]{32})\.[a-z0-9_]+\.tmp")
_ABANDONED_S = 24 * 3600.0  # for folders of builds where files cannot be locked
_LOOK_S = 0.05  # between two looks at what is waited for
_LATE_S = 60.0  # by which another process's build may exceed the limit, to end what it does

FAILED = ".failed"
"""What stands in a library's place, by this suffix, if it could not be compiled: the reason."""

Show = Callable[[str, float], None]
"""Is told again and again what is under way, and for how many seconds."""


class CompilerError(RuntimeError):
    """The compiler refused or was given up; holds its words."""


def limit_s() -> float:
    """How long a compiler may take, in seconds: ``$FASTCONV_BUILD_TIMEOUT``, or half an hour.

    Raises:
        ValueError: the variable is no number of seconds.
    """
    value = os.environ.get(VARIABLE) or str(DEFAULT_LIMIT_S)
    with suppress(ValueError):
        if (seconds := float(value)) >= 0:
            return seconds or math.inf
    raise ValueError(f"{VARIABLE} should be seconds, 0 for no limit, but got {value!r}")


def compile_library(
    command: Sequence[str], target: Path, show: Show = lambda what, seconds: None
) -> bool:
    """Has ``command`` make ``target``, unless it is there; says whether it had to.

    The command gets one argument more, the file to write. Another process that is at it is waited
    for.

    Raises:
        CompilerError: the compiler failed, now or when another process tried; or it or another
            process took longer than it may.
        OSError: the folder cannot be written, or the compiler not be started.
        ValueError: ``FASTCONV_BUILD_TIMEOUT`` is no number of seconds.
    """
    limit = limit_s()
    _sweep(target.parent)
    if target.exists():  # in a folder that cannot be written, perhaps
        return False
    with _alone(target, limit, show):
        if target.exists():
            return False
        if (words := failure(target)) is not None:
            raise CompilerError(words)
        with _folder(target) as folder:
            made = folder / target.name
            _run([*command, str(made)], target, folder, limit, show)
            made.chmod(_MODE)
            os.replace(made, target)
    return True


def failure(target: Path) -> str | None:
    """What the compiler said, if it failed to make ``target``, no longer than a day ago."""
    record = target.with_suffix(FAILED)
    with suppress(OSError):
        if time.time() - record.stat().st_mtime < _REMEMBERED_S:
            return record.read_text(encoding="utf-8", errors="replace")
    return None


def forget_failure(target: Path) -> None:
    """Has the next attempt compile again."""
    with suppress(OSError):  # most often there is none
        target.with_suffix(FAILED).unlink()


def _run(command: Sequence[str], target: Path, folder: Path, limit: float, show: Show) -> None:
    # The compiler's words go to a file: a pipe would stay open as long as a server does that a
    # compiler cache starts. The environment's language would be that of the words.
    with tempfile.TemporaryFile(dir=folder) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
            start_new_session=True,  # so that it can be ended with all that it has started
        )
        try:
            in_time = _wait(lambda: process.poll() is not None, limit, "compiling", show)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        words = output.read().decode(errors="replace").strip()
    if in_time and process.returncode == 0:
        return
    how = f"ended with status {process.returncode}" if in_time else f"not ended in {limit:g} s"
    text = f"{' '.join(command)}\n{how}:\n{words}"
    if not in_time:
        text += f"\nIt was stopped. {VARIABLE} sets the limit, in seconds, 0 for none."
    passing = in_time and (process.returncode < 0 or any(sign in words for sign in _PASSING))
    if not passing:
        target.with_suffix(FAILED).write_text(text, encoding="utf-8")
    raise CompilerError(text)


def _wait(done: Callable[[], bool], limit: float, what: str, show: Show) -> bool:
    """Waits until it is done, but no longer than ``limit`` seconds: whether it is."""
    start = time.monotonic()
    while not done():
        seconds = time.monotonic() - start
        if seconds >= limit:
            return False
        show(what, seconds)
        time.sleep(_LOOK_S)
    return True


@contextmanager
def _folder(target: Path) -> Iterator[Path]:
    """A new folder for a build, which is removed with all that is in it."""
    made = tempfile.mkdtemp(prefix=f"{target.stem}.", suffix=".tmp", dir=target.parent)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes the folders of builds that were killed, and of no build that is under way."""
    with suppress(OSError):  # there is no folder, or it is not ours to read
        for left in folder.iterdir():
            if found := _FOLDER.fullmatch(left.name):
                with suppress(OSError):
                    _remove_if_abandoned(left, folder / f"{found[1]}.lock")


def _remove_if_abandoned(left: Path, lock: Path) -> None:
    with lock.open("a") as file:
        locked = _try_lock(file)
        old = time.time() - left.stat().st_mtime > _ABANDONED_S
        if locked or (locked is None and old):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _alone(target: Path, limit: float, show: Show) -> Iterator[None]:
    """Keeps other processes waiting; where files cannot be locked, they compile as well."""
    with target.with_suffix(".lock").open("w") as lock:
        what = "waiting for another process that builds it"
        if not _wait(lambda: _try_lock(lock) is not False, limit + _LATE_S, what, show):
            raise CompilerError(
                f"another process has held {lock.name} for more than {limit:g} s. {VARIABLE} sets "
                "the limit, in seconds, 0 for none."
            )
        yield


def _try_lock(file: IO[str]) -> bool | None:
    """Whether the file is locked by this; None where files cannot be locked."""
    import fcntl  # not on Windows, where nothing is compiled

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


if __name__ == "__main__":
    os.nice(10)
    with suppress(CompilerError):  # whoever started this reads it from the file
        compile_library(sys.argv[2:], Path(sys.argv[1]))
