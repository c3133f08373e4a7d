"""Finds ratios in pages that no file of results has: ``3.8x``, ``2.4 times``, ``1.7 to 3.6 times``.

A page may round a figure. Blocks that are made from the files are compared as a whole instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from results import catalogue
from results.blocks import BLOCK
from results.sources import ROOT

RATIO = re.compile(
    r"(?<![\w./-])(?P<x>\d+(?:\.\d+)?)x(?!\w)"
    r"|(?P<times>\d+\.\d+)(?= times\b)"
    r"|(?P<to>\d+\.\d+)(?= to \d+(?:\.\d+)? times\b)"
)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`]*`")
KEYS = {"speedup", "ratio", "mean", "of_sums", "least"}
"""The keys of the files of results whose values are ratios."""


class Figure(NamedTuple):
    """A ratio in a page."""

    page: Path
    line: int
    text: str

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def decimals(self) -> int:
        return len(self.text.partition(".")[2])


def pages() -> list[Path]:
    """The pages whose figures have to be measured: all but the log, the changelog and results."""
    apart = (ROOT / "docs" / "log", catalogue.RESULTS)
    found = (page for page in (ROOT / "docs").rglob("*.md") if not {*apart} & {*page.parents})
    return [ROOT / "README.md", *sorted(found)]


def ratios(page: Path, text: str) -> Iterator[Figure]:
    """The ratios of a page outside of code and of generated blocks."""
    for pattern in (BLOCK, FENCE, CODE_SPAN):  # Newlines stay, so that lines keep their numbers.
        text = pattern.sub(lambda found: re.sub(r"[^\n]", "", found[0]), text)
    for number, line in enumerate(text.splitlines(), 1):
        for found in RATIO.finditer(line):
            yield Figure(page, number, next(filter(None, found.groups())))


def known(folder: Path) -> list[float]:
    """All ratios of the files of results in a folder, and in those below."""
    found = [
        value
        for path in sorted(folder.rglob("*.json"))
        for value in _values(json.loads(path.read_text(encoding="utf-8")))
    ]
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        found += [figure.value for figure in ratios(path, text)]
    return found


def _values(contents: Any) -> Iterator[float]:
    if isinstance(contents, dict):
        for key, value in contents.items():
            if key in KEYS and isinstance(value, float):
                yield value
            yield from _values(value)
    elif isinstance(contents, list):
        for value in contents:
            yield from _values(value)


def unknown(figures: Sequence[Figure], measured: Sequence[float]) -> list[Figure]:
    """The figures that no measured ratio rounds to."""
    rounded = {places: {round(value, places) for value in measured} for places in range(4)}
    return [one for one in figures if one.value not in rounded[one.decimals]]
