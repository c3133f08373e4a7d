"""What the three kinds of ``fastconv bench`` share: time limits, and writing rows as they come."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Sequence

from fastconv import files
from fastconv.bench import report
from fastconv.bench.console import show
from fastconv.bench.results import AnyResults, Results
from fastconv.commands.common import UsageError
from fastconv.timing import Effort

TOO_LATE = "the time limit was reached"
"""Why rows are skipped that ``--time-limit`` leaves out."""


def deadline(arguments: Namespace) -> float:
    """The time, by ``time.perf_counter``, after which no further row begins."""
    return time.perf_counter() + (
        math.inf if arguments.time_limit is None else arguments.time_limit
    )


def effort(arguments: Namespace) -> Effort:
    """How many samples a row takes, and for how long."""
    return Effort(arguments.repeats or Effort.repeats, arguments.row_seconds)


def refuse_options(arguments: Namespace, mode: str, excluded: Sequence[str], accepted: str) -> None:
    """Raises a UsageError if an option is given that this kind of benchmark does not take.

    ``mode`` and ``accepted`` are words for the message; ``excluded`` are names of arguments.
    """
    for name in excluded:
        given = getattr(arguments, name)
        if given is not None and given is not False:  # a time limit of 0 is given
            raise UsageError(f"{mode}, to which --{_option(name)} does not apply: {accepted}")


def _option(name: str) -> str:
    """The option that sets an argument."""
    return "pass" if name == "passes" else name.replace("_", "-")


def write_so_far(arguments: Namespace, found: AnyResults) -> None:
    """Writes the rows so far to ``--output``, so that an interruption loses none of them.

    A pipe or a device cannot be replaced by a longer file: it gets everything at the end.
    """
    if arguments.output and files.replaceable(arguments.output):
        found.write(arguments.output)


def hand_over(arguments: Namespace, found: AnyResults) -> None:
    """Shows the rows that were measured and writes them to ``--output``, if there are any."""
    if not found.rows:
        return
    if arguments.json:
        print(found.json(), end="")
    else:
        show(report.table(found))
        if arguments.commands and isinstance(found, Results):
            print("\n".join(row.command for row in found.rows))
    if arguments.output:
        found.write(arguments.output)
