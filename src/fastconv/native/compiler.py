"""Compiles a library, once for all processes that need it.

This file imports neither fastconv nor PyTorch: it also runs as a program in the background, which
continues if the process that started it ends.

Each build has a folder of its own for all that it writes, including the compiler's temporary files.
A process that builds a library holds its lock. So if nobody has locked the library of a folder, the
folder was left by a build that was killed, and the next build of any library removes it.
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
# The default time limit of the compiler, which takes one or two minutes, and ten on a slow and busy
# machine.
DEFAULT_LIMIT_S = 1800.0

# The library's permissions, whatever the umask: jit/trust.py requires that only the owner can write
# it.
_MODE = 0o644

# For how long a failure prevents another attempt; after that there may be another compiler.
_REMEMBERED_S = 24 * 3600.0
# Messages of failures that are not recorded, because the next attempt may succeed.
_PASSING = ("Killed", "No space left", "emporary file")
_FOLDER = re.compile(r"((?:host|deploy)-[0-9a-f]{32})\.[a-z0-9_]+\.tmp")
_ABANDONED_S = 24 * 3600.0  # the age at which folders are removed where files cannot be locked
_LOOK_S = 0.05  # the time between two checks of what is waited for
_LATE_S = 60.0  # by how much another process may exceed the time limit before waiting is given up

FAILED = ".failed"
"""The suffix of the file, beside a library, that says why it could not be compiled."""

Show = Callable[[str, float], None]
"""Is called again and again with what is under way and the seconds it has taken."""


class CompilerError(RuntimeError):
    """The compiler failed or exceeded its time limit; the message has its output."""


def limit_s() -> float:
    """Returns the compiler's time limit in seconds: ``$FASTCONV_BUILD_TIMEOUT``, or half an hour.

    Raises:
        ValueError: the variable is not a number of seconds.
    """
    value = os.environ.get(VARIABLE) or str(DEFAULT_LIMIT_S)
    with suppress(ValueError):
        if (seconds := float(value)) >= 0:
            return seconds or math.inf
    raise ValueError(f"{VARIABLE} should be seconds, 0 for no limit, but got {value!r}")


def compile_library(
    command: Sequence[str],
    target: Path,
    show: Show = lambda what, seconds: None,
    again: bool = False,
) -> bool:
    """Runs ``command`` to make ``target``, unless it is there and ``again`` is False.

    Returns whether it did. The file to write is added to the command's arguments. If another
    process makes the same target, this one waits for it. A target that is there stays if the
    compiler fails.

    Raises:
        CompilerError: the compiler failed, now or when another process tried; or it or another
            process exceeded the time limit.
        OSError: the folder cannot be written, or the compiler cannot be started.
        ValueError: ``FASTCONV_BUILD_TIMEOUT`` is not a number of seconds.
    """
    limit = limit_s()
    _sweep(target.parent)
    if target.exists() and not again:  # checked before the lock: the folder may be read-only
        return False
    with _alone(target, limit, show):
        if target.exists() and not again:
            return False
        if (words := failure(target)) is not None:
            raise CompilerError(f"(in an earlier attempt; `fastconv build` tries again) {words}")
        with _folder(target) as folder:
            made = folder / target.name
            _run([*command, str(made)], target, folder, limit, show)
            made.chmod(_MODE)
            os.replace(made, target)
    return True


def failure(target: Path) -> str | None:
    """Returns the compiler's output if it failed to make ``target`` within the last day."""
    record = target.with_suffix(FAILED)
    with suppress(OSError):
        if time.time() - record.stat().st_mtime < _REMEMBERED_S:
            return record.read_text(encoding="utf-8", errors="replace")
    return None


def forget_failure(target: Path) -> None:
    """Removes the record of a failure, so that the next attempt compiles again."""
    with suppress(OSError):  # most often there is no record
        target.with_suffix(FAILED).unlink()


def _run(command: Sequence[str], target: Path, folder: Path, limit: float, show: Show) -> None:
    # The compiler's output goes to a file: a compiler cache may start a server, which would keep a
    # pipe open. LC_ALL=C makes the output English, whatever the user's language.
    with tempfile.TemporaryFile(dir=folder) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
            start_new_session=True,  # so that killpg ends it with all processes it has started
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
    """Waits until ``done()``, but at most ``limit`` seconds; returns whether it is done."""
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
    """Makes a new folder for a build, and removes it at the end with all its contents."""
    made = tempfile.mkdtemp(prefix=f"{target.stem}.", suffix=".tmp", dir=target.parent)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes the folders of builds that were killed, but of no build that is under way."""
    with suppress(OSError):  # the folder does not exist or cannot be read
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
    """Holds the target's lock; where files cannot be locked, other processes compile as well."""
    with target.with_suffix(".lock").open("w") as lock:
        what = "waiting for another process that builds it"
        if not _wait(lambda: _try_lock(lock) is not False, limit + _LATE_S, what, show):
            raise CompilerError(
                f"another process has held {lock.name} for more than {limit:g} s. {VARIABLE} sets "
                "the limit, in seconds, 0 for none."
            )
        yield


def _try_lock(file: IO[str]) -> bool | None:
    """Locks the file, and returns whether that succeeded; None where files cannot be locked."""
    import fcntl  # Windows, where nothing is compiled, does not have it

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


if __name__ == "__main__":
    os.nice(10)
    with suppress(CompilerError):  # the process that started this reads the file with the reason
        compile_library(sys.argv[2:], Path(sys.argv[1]))
