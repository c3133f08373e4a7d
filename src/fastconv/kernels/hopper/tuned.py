"""Measured choices: for some layers, which of the possible plans is fastest.

``tuned.json`` ships with the package; ``fastconv tune`` adds to a table of the user's own, which
comes first.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from fastconv.jit import cache as disk

SHIPPED = Path(__file__).with_name("tuned.json")


def choice(key: str) -> str | None:
    """The name of the fastest plan for a layer, if it was measured."""
    return _table().get(key)


def own() -> Path:
    """The user's table."""
    return disk.folder() / "tuned.json"


def read(path: Path) -> dict[str, str]:
    """A table, empty if there is none, or none that can be read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def add(path: Path, choices: dict[str, str]) -> None:
    """Adds choices to a table, for this process as well."""
    table = dict(sorted((read(path) | choices).items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    _table.cache_clear()


@cache
def _table() -> dict[str, str]:
    return read(SHIPPED) | read(own())
