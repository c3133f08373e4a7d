"""Measured choices: for some layers, which of the possible plans is fastest.

``tuned.json`` ships with the package; ``fastconv tune`` adds to a table of the user's own, which
comes first, unless others could have written it: what it names is run.
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
    """The name of the fastest plan for a layer, if it was measured."""
    return table().get(key)


def own() -> Path:
    """The user's table."""
    return disk.folder() / "tuned.json"


def read(path: Path, contents: Callable[[Path], bytes] = Path.read_bytes) -> dict[str, str]:
    """A table, empty if there is none, or none that can be read."""
    try:
        found = json.loads(contents(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def add(path: Path, choices: dict[str, str]) -> None:
    """Adds choices to a table, for this process as well."""
    added = dict(sorted((read(path) | choices).items()))
    trust.make_folder(path.parent)
    with open(path, "w", encoding="utf-8", opener=_open) as file:
        file.write(json.dumps(added, indent=1) + "\n")
    table.cache_clear()


@cache
def table() -> dict[str, str]:
    """All choices, by layer."""
    try:
        path = own()
    except RuntimeError:  # there is no home
        return read(SHIPPED)
    return read(SHIPPED) | read(path, trust.read)


def _open(name: str, flags: int) -> int:
    return os.open(name, flags, trust.FILE_MODE)
