"""Tables for the terminal: which columns have room, and that names and figures stay whole."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from fastconv.bench import console, terminal_table
from fastconv.bench.terminal_table import Columns, made

COLUMNS = Columns(
    left=("workload", "mode", "format"),
    right=("fastconv ms", "peer ms", "first call ms"),
    notes={"fastconv ms": "times: medians", "first call ms": "first call: with compiling"},
    order=("first call ms", "mode", "format", "peer ms"),
)
NAME = "a_long_name_of_a_workload"
ROWS = [
    (NAME, "float32 ieee", "nchw", "12.34 ±1%", "23.45 ±2%", "100 / 200"),
    ("short", "float32 ieee", "nhwc", "1.2 ±1%", "2.3 ±2%", "1 / 2"),
]


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int | None
) -> list[str]:
    """The lines of the table in a terminal of so many columns; None: in a file."""
    for name in ("FORCE_COLOR", "COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if width is not None:
        for name, value in {"FORCE_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm"}.items():
            monkeypatch.setenv(name, value)
    console.show(made("title", ["a line"], COLUMNS, ROWS))
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (None, ["workload", "mode", "format", "fastconv", "peer", "first"]),
        (120, ["workload", "mode", "format", "fastconv", "peer", "first"]),
        (70, ["workload", "format", "fastconv", "peer"]),
        (60, ["workload", "format", "fastconv"]),
    ],
)
def test_secondary_columns_go_first(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    width: int | None,
    headings: list[str],
) -> None:
    lines = shown(monkeypatch, capsys, width)
    head = " ".join(line for line in lines if "┃" in line)
    every = ("workload", "mode", "format", "fastconv", "peer", "first")
    assert [one for one in every if one in head] == headings
    assert all(len(line) <= (width or 1000) for line in lines)
    caption = " ".join(lines[-4:])
    assert ("first call: with compiling" in caption) == ("first" in headings)
    assert ("mode: float32 ieee;" in caption) == ("mode" not in headings)
    omitted = [name for name in ("first call ms", "peer ms") if name.split()[0] not in headings]
    assert (f"{width} columns: {', '.join(omitted)}" in " ".join(caption.split())) == bool(omitted)


def test_names_are_never_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal that is narrower than the table wraps its lines by itself."""
    lines = shown(monkeypatch, capsys, 20)
    (line,) = (line for line in lines if NAME in line)
    assert "12.34 ±1%" in line


def test_columns_with_one_value_are_told() -> None:
    alike = [(*row[:2], "nchw", *row[3:]) for row in ROWS]
    indices, words = terminal_table._fitting(COLUMNS, alike, 60)
    assert [COLUMNS.headings[at] for at in indices] == ["workload", "fastconv ms", "peer ms"]
    assert words.startswith("mode: float32 ieee; format: nchw; not shown in a terminal of 60")


def test_progress_does_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json nothing needs rich, on a terminal either."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(console, "extra", lambda name: pytest.fail(f"imports {name}"))
    assert console.work_through(["one"], str, lambda item: "done", quiet=False)
    assert capsys.readouterr().err == "[1/1] one: done\n"
