"""Tables and progress, on a terminal and elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNLIMITED = 10_000  # Columns for a table that does not go to a terminal: more than any has.

Item = TypeVar("Item")


class MissingExtra(RuntimeError):
    """A package of the ``bench`` extra is not installed."""


def extra(name: str) -> ModuleType:
    """Imports a module of the ``bench`` extra; raises :class:`MissingExtra` if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingExtra(
            f"this needs {package}, which is not installed: pip install 'fastconv[bench]'"
        ) from error


def console(stderr: bool = False) -> Console:
    """A rich console; if the output is not a terminal, it is wide enough for every table."""
    made: Console = extra("rich.console").Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = UNLIMITED
    return made


def width() -> float:
    """The columns that a table may take: the terminal's, or any number if there is none."""
    made = console()
    return made.width if made.is_terminal else math.inf


def show(table: Table) -> None:
    """Prints a table; characters that the output cannot encode become question marks.

    A table that cannot be as narrow as the terminal keeps its lines, and the terminal wraps them.
    """
    made = console()
    least = made.measure(table, options=made.options.update(width=UNLIMITED)).minimum
    made.width = max(made.width, least)
    with made.capture() as captured:
        made.print(table)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(captured.get().encode(encoding, "replace").decode(encoding), end="")


def work_through(
    items: Sequence[Item],
    label: Callable[[Item], str],
    work: Callable[[Item], str | None],
    quiet: bool,
) -> bool:
    """Calls ``work`` for each item; shows on stderr its label, its outcome and the time left.

    An outcome of None leaves no line behind. Returns True if all items were done, and False after
    Ctrl-C, which stops only this loop.
    """
    start = time.perf_counter()
    with _display(len(items), quiet) as show:
        for done, item in enumerate(items):
            taken = time.perf_counter() - start
            left = f", {_clock(taken / done * (len(items) - done))} left" if done else ""
            show(done, f"[{done + 1}/{len(items)}{left}] {label(item)}", None)
            try:
                outcome = work(item)
            except KeyboardInterrupt:
                print("interrupted: keeping what was done", file=sys.stderr)
                return False
            show(done + 1, f"[{done + 1}/{len(items)}{left}] {label(item)}", outcome)
    return True


def follow(outcomes: Iterable[tuple[str, str | None]], total: int, quiet: bool) -> bool:
    """Shows the labels and outcomes of ``total`` items as an iterator produces them.

    Otherwise it is like :func:`work_through`.
    """
    start = time.perf_counter()
    with _display(total, quiet) as show:
        try:
            for done, (label, outcome) in enumerate(outcomes, 1):
                left = (time.perf_counter() - start) / done * (total - done)
                show(done, f"[{done}/{total}, {_clock(left)} left] {label}", outcome)
        except KeyboardInterrupt:
            print("interrupted: keeping what was done", file=sys.stderr)
            return False
    return True


@contextmanager
def stopwatch(quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """Shows on stderr how long a task of unknown length has been running.

    Yields a function to call, as often as convenient, with the task's name and the seconds since
    its start. A terminal shows both in place, updated every second; elsewhere a line is printed at
    the start and every half minute.
    """
    if quiet:
        yield lambda what, seconds: None
        return
    terminal = sys.stderr.isatty()
    every, start, end = (1, "\r", "\x1b[K") if terminal else (30, "", "\n")
    shown: tuple[str, int] | None = None

    def show(what: str, seconds: float) -> None:
        nonlocal shown
        if shown != (now := (what, int(seconds) // every)):
            shown = now
            print(f"{start}{what}, {_clock(seconds)}", end=end, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal and shown is not None:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


Show = Callable[[int, str, str | None], None]
"""Shows the number of items done, the current item's label, and its outcome once it is known."""


@contextmanager
def _display(total: int, quiet: bool) -> Iterator[Show]:
    if quiet:
        yield lambda done, text, outcome: None
    elif not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield _plain
    else:
        progress = extra("rich.progress").Progress(console=console(stderr=True), transient=True)
        task = progress.add_task("", total=total)

        def show(done: int, text: str, outcome: str | None) -> None:
            progress.update(task, completed=done, description=extra("rich.markup").escape(text))
            if outcome is not None:
                progress.console.print(f"{text}: {outcome}", markup=False)

        with progress:
            yield show


def _plain(done: int, text: str, outcome: str | None) -> None:
    if outcome is not None:
        print(f"{text}: {outcome}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
