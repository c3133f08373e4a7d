"""Compiles a library, once for all processes that want it.

It imports nothing of fastconv's or PyTorch's: as a program of its own it runs in the background,
and goes on if the process that started it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# What jit/trust.py asks for, whatever the umask: nobody else writes it, others may read it.
_MODE = 0o644

_REMEMBERED_S = 24 * 3600.0  # by then there may be another compiler
_PASSING = ("Killed", "No space left", "emporary file")  # that say nothing of the next attempt

FAILED = ".failed"
"""What stands in a library's place, by this suffix, if it could not be compiled: the reason."""


class CompilerError(RuntimeError):
    """The compiler refused; holds its words."""


def compile_library(command: Sequence[str], target: Path) -> bool:
    """Has ``command`` make ``target``, unless it is there; says whether it had to.

    The command gets one argument more, the file to write. Another process that is at it is waited
    for.

    Raises:
        CompilerError: the compiler failed, now or when another process tried.
        OSError: the folder cannot be written, or the compiler not be started.
    """
    if target.exists():  # in a folder that cannot be written, perhaps
        return False
    with _alone(target):
        if target.exists():
            return False
        if (words := failure(target)) is not None:
            raise CompilerError(words)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            _run([*command, str(temporary)], target)
            temporary.chmod(_MODE)
            os.replace(temporary, target)
        finally:
            with suppress(OSError):
                temporary.unlink()
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


def _run(command: Sequence[str], target: Path) -> None:
    # The environment's language would be that of the compiler's words.
    ended = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if ended.returncode:
        words = ended.stdout.decode(errors="replace").strip()
        text = f"{' '.join(command)}\nended with status {ended.returncode}:\n{words}"
        killed = ended.returncode < 0
        if not killed and not any(passing in words for passing in _PASSING):
            target.with_suffix(FAILED).write_text(text, encoding="utf-8")
        raise CompilerError(text)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Keeps other processes waiting; where files cannot be locked, they compile as well."""
    import fcntl  # not on Windows, where nothing is compiled

    with target.with_suffix(".lock").open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    os.nice(10)
    with suppress(CompilerError):  # whoever started this reads it from the file
        compile_library(sys.argv[2:], Path(sys.argv[1]))
