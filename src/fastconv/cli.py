"""The ``fastconv`` command: runs the subcommand that the arguments select, and reports errors."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from _fastconv_command import parser, streams
from fastconv import jit, native
from fastconv.bench import settings
from fastconv.bench.console import MissingExtra
from fastconv.bench.results import ResultsError
from fastconv.commands import (
    bench,
    build,
    bundle,
    cache,
    common,
    demo,
    export,
    info,
    report,
    tune,
    verify,
)
from fastconv.exporter import ExportError
from fastconv.files import FileError
from fastconv.kernels.planner import SwitchError
from fastconv.workloads import WorkloadError

# Errors that a user can mend.
_EXPECTED = (
    common.UsageError, WorkloadError, ResultsError, MissingExtra, ExportError, FileError,
    jit.GpuUnavailable, jit.CompilationError, SwitchError, UnicodeEncodeError,
)  # fmt: skip
_VERBATIM = (native.Unavailable,)  # with the output of a C++ compiler

_COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "bench": bench.run,
    "report": report.run,
    "verify": verify.run,
    "demo": demo.run,
    "info": info.run,
    "tune": tune.run,
    "build": build.run,
    "bundle": bundle.run,
    "cache list": cache.list_entries,
    "cache export": cache.export_kernels,
    "cache import": cache.import_kernels,
    "cache clear": cache.clear,
    "export": export.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses arguments, by default the process's, and runs a command; its exit status."""
    return streams.guard(lambda: run(parser.parse(argv)))


def run(arguments: Namespace) -> int:
    """Runs the command that parsed arguments select, and returns its exit status.

    0: success; 1: a row failed, or an error exceeds its bound; 2: bad arguments, or a file that
    cannot be read or written; 130: interrupted, and the rows up to then are kept; 141: the reader
    of the output is gone.
    """
    return streams.guard(lambda: _run(arguments), _EXPECTED, _VERBATIM)


def _run(arguments: Namespace) -> int:
    try:
        settings.check()
    except ValueError as error:
        raise common.UsageError(str(error)) from None
    return _COMMANDS[arguments.command](arguments)
