"""Measured choices: for some layers, which of the possible plans is the fastest.

``tuned.json`` ships with the package. ``fastconv tune`` adds to the user's own table, which takes
precedence. It is read only if nobody else could have written it, since what it names is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from fastconv.jit import cache as disk
from fastconv.jit import trust

SHIPPED = Path(__file__).with_name("tuned.json")


def choice(key: str) -> str | None:
    """The name of the plan that was measured to be the fastest for a layer, if any."""
    return table().get(key)


def own() -> Path:
    """The path of the user's table."""
    return disk.folder() / "tuned.json"


def read(path: Path, contents: Callable[[Path], bytes] = Path.read_bytes) -> dict[str, str]:
    """Reads a table, which is empty if the file does not exist or cannot be read."""
    try:
        found = json.loads(contents(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def add(path: Path, choices: dict[str, str]) -> None:
    """Adds choices to a table, also for this process."""
    added = dict(sorted((read(path) | choices).items()))
    trust.make_folder(path.parent)
    with open(path, "w", encoding="utf-8", opener=_open) as file:
        file.write(json.dumps(added, indent=1) + "\n")
    table.cache_clear()


@cache
def table() -> dict[str, str]:
    """All choices by layer: the shipped ones and the user's."""
    try:
        path = own()
    except RuntimeError:  # the user has no home folder
        return read(SHIPPED)
    return read(SHIPPED) | read(path, trust.read)


def _open(name: str, flags: int) -> int:
    return os.open(name, flags, trust.FILE_MODE)
