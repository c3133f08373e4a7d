"""Keeps the rows of a file of figures as they are measured, and takes a file up again."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from fastconv import files, tables
from fastconv.bench import environment
from results import sources
from results.catalogue import File

FORMAT = "fastconv results 1"
WRITE_SECONDS = 5.0  # Large files take time to write: rows that come fast are written together.

# Rows that were measured before are kept only if these entries of the environment are the same.
_SAME = ("sources", "gpu", "torch", "cuda", "cudnn", "rows")


_asked_to_end = False


def end_when_asked(*_: object) -> None:
    """Handles SIGTERM: ends the process, so that contexts write what was measured.

    Where an exception is lost, as in the callback of a weak reference, the next row is not begun.
    """
    global _asked_to_end
    _asked_to_end = True
    raise SystemExit(128 + signal.SIGTERM)


class Late(Exception):
    """The time of this call is over; what was measured is kept."""


class Poisoned(Exception):
    """The process cannot use the GPU any longer, after a fault of a kernel."""


class Measured(Protocol):
    """What is kept: any class of :mod:`fastconv.bench.results`, or :class:`Plain`."""

    environment: dict[str, str]
    rows: list[Any]

    def write(self, path: Path) -> None: ...


Kind = TypeVar("Kind", bound=Measured)
Made = TypeVar("Made")


@dataclass
class Plain:
    """Rows that are dictionaries, for figures that have no class of their own."""

    environment: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        contents = {"format": FORMAT, "environment": self.environment, "rows": self.rows}
        files.write(path, json.dumps(contents, indent=1) + "\n")


def read_plain(path: Path) -> Plain:
    contents = files.read_json(path)
    return Plain(contents["environment"], contents["rows"])


def attempt(measure: Callable[[], Made], failed: Callable[[str], Made]) -> list[Made]:
    """A measured row, or a failed one if the GPU cannot be used any longer after a fault.

    The benchmark's functions return failed rows by themselves, but then free memory, which raises.
    """
    try:
        return [measure()]
    except RuntimeError as error:
        return [failed(tables.error_line(error))]


class Keeper(Generic[Kind]):
    """Adds rows to a file until the deadline; used as a context, it writes them in any case."""

    def __init__(
        self,
        file: File,
        folder: Path,
        read: Callable[[Path], Kind],
        new: Callable[[dict[str, str]], Kind],
        device: torch.device,
        deadline: float,
        rows: int,
        effort: str,
    ) -> None:
        self._path, self._deadline, self._device = folder / f"{file.name}.json", deadline, device
        self._written = time.monotonic()
        now = environment.describe(device) | {
            "part": file.name,
            "sources": sources.hash_now(file.sources),
            "rows": f"{rows}",
            "effort": effort,
        }
        self.found = self._resumed(read, now) or new(now)

    def _resumed(self, read: Callable[[Path], Kind], now: dict[str, str]) -> Kind | None:
        if not self._path.exists():
            return None
        found = read(self._path)
        if any(found.environment.get(name) != now.get(name) for name in _SAME):
            return None
        found.environment["resumed"] = now["time"]
        return found

    def __enter__(self) -> Keeper[Kind]:
        return self

    def __exit__(self, *_: object) -> None:
        if self.found.rows:
            self.found.write(self._path)

    def check(self, seconds: float) -> None:
        """Raises :class:`Late` if work of so many seconds would not end before the deadline.

        Raises SystemExit if the process was asked to end before.
        """
        if _asked_to_end:
            raise SystemExit(128 + signal.SIGTERM)
        if time.monotonic() + seconds > self._deadline:
            raise Late

    def add(self, label: str, seconds: float, measure: Callable[[], list[Any]]) -> None:
        """Measures rows, which take about so many seconds, and keeps them."""
        self.check(seconds)
        start = time.monotonic()
        self.found.rows += measure()
        print(f"{label}: {time.monotonic() - start:.1f} s", flush=True)
        if time.monotonic() - self._written > WRITE_SECONDS:
            self.found.write(self._path)
            self._written = time.monotonic()
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                raise Poisoned(f"{label}: {error}") from error
