"""What happens to the command's output when it cannot be written, and to errors that users mend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

# Exit statuses. 130 is 128 + SIGINT and 141 is 128 + SIGPIPE, as shells report programs that were
# interrupted, and programs whose reader is gone.
BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


Errors = tuple[type[Exception], ...]


def guard(work: Callable[[], int], expected: Errors = (), verbatim: Errors = ()) -> int:
    """Calls ``work`` and returns its exit status, or that of the error that ended it.

    Errors of the types ``expected``, and those of the operating system, are printed in one line,
    those of the types ``verbatim`` with the line breaks of their message. Any other exception is a
    bug, and keeps its traceback.
    """
    caught: Errors = (OSError, *expected, *verbatim)
    try:
        try:
            return work()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # so that a failure is reported below
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except caught as error:
        _complain(str(error) if isinstance(error, verbatim) else _line(error))
        _drop_output()
        return BAD_INPUT


def _complain(text: str) -> None:
    with suppress(OSError):  # if stderr is closed, the exit status has to suffice
        print(f"fastconv: {text}", file=sys.stderr, flush=True)


def _line(error: Exception) -> str:
    """The error's message in one line."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'cannot write the output'}: {error.strerror}"
    return " ".join(text.split())


def _drop_output() -> None:
    """Redirects the streams that cannot be flushed to the null device.

    Otherwise Python would flush them again as it exits, and print an error of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or no file of the system
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
