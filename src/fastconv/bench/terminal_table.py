"""Tables for the terminal: as wide as it is, with the columns that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastconv.bench.console import extra, width

if TYPE_CHECKING:
    from rich.table import Table

Cells = tuple[str, ...]

Notes = Mapping[str, str]
"""Explanations of columns, by their headings; a table explains those that it shows."""

_STYLES = {"failed": "red", "FAIL": "red", "slower": "red", "faster": "green"}
# Columns that are left out only if all rows have the same value, which is then told in the caption.
SAME_FOR_ALL = ("mode", "format", "configuration")


@dataclass(frozen=True)
class Columns:
    """The columns of a table for the terminal."""

    left: Cells  # headings of text, of which the first is the row's name
    right: Cells  # headings of figures
    notes: Notes
    order: Cells = ()  # headings that a narrow terminal leaves out, the first of them first

    @property
    def headings(self) -> Cells:
        return self.left + self.right


def made(title: str, lines: Sequence[str], columns: Columns, rows: Sequence[Cells]) -> Table:
    """A table for the terminal, without the columns that no row fills or that have no room.

    ``lines`` go below the table, and so do explanations of the columns that it has.
    """
    shown, omitted = _fitting(columns, rows, width())
    caption = "\n".join(
        (*lines, "; ".join(explained(columns.notes, [columns.headings[at] for at in shown])))
    )
    if omitted:
        caption += f"\n{omitted}"
    table: Table = extra("rich.table").Table(
        title=_escaped(title), caption=_escaped(caption.strip()), caption_justify="left"
    )
    for at in shown:
        is_text = at < len(columns.left)
        # Names and figures stay in one line. Other texts may be wrapped if nothing else helps.
        may_wrap = is_text and at > 0
        table.add_column(
            _heading(columns, rows, at),
            justify="left" if is_text else "right",
            no_wrap=not may_wrap,
        )
    for cells in rows:
        verdict = next((cell for cell in cells if cell in _STYLES), "")
        table.add_row(*(_escaped(cells[at]) for at in shown), style=_STYLES.get(verdict))
    return table


def _fitting(columns: Columns, rows: Sequence[Cells], most: float) -> tuple[list[int], str]:
    """The indices of the columns that fit into ``most`` characters, and what to say of the others.

    A column that all rows fill alike is left out with its value told instead.
    """
    shown = filled(rows, len(columns.headings))
    omitted: dict[str, str] = {}
    for heading in columns.order:
        if _table_width(columns, rows, shown) <= most:
            break
        at = columns.headings.index(heading)
        values = {cells[at] for cells in rows}
        if at not in shown or (heading in SAME_FOR_ALL and len(values) > 1):
            continue
        shown.remove(at)
        omitted[heading] = min(values) if heading in SAME_FOR_ALL else ""
    told = [f"{heading}: {value}" for heading, value in omitted.items() if value]
    missing = [heading for heading, value in omitted.items() if not value]
    if missing:
        told.append(f"not shown in a terminal of {most} columns: {', '.join(missing)}")
    return shown, "; ".join(told)


def _table_width(columns: Columns, rows: Sequence[Cells], shown: Sequence[int]) -> int:
    """The characters of a line: each column has two spaces and a border, and the table one more."""
    return sum(_column_width(columns, rows, at) for at in shown) + 3 * len(shown) + 1


def _column_width(columns: Columns, rows: Sequence[Cells], at: int) -> int:
    """The characters of the longest cell, or of the longest word of the heading."""
    return max(map(len, (*columns.headings[at].split(), *(cells[at] for cells in rows))))


def _heading(columns: Columns, rows: Sequence[Cells], at: int) -> str:
    """The heading of a column, in as many lines as its cells are too narrow for."""
    return textwrap.fill(columns.headings[at], _column_width(columns, rows, at))


def explained(notes: Notes, headings: Collection[str]) -> list[str]:
    """The explanations of the given columns."""
    return [text for heading, text in notes.items() if heading in headings]


def filled(rows: Sequence[Cells], columns: int) -> list[int]:
    """The indices of the columns that at least one row fills; of all, if there are no rows."""
    return [at for at in range(columns) if not rows or any(cells[at] for cells in rows)]


def _escaped(cell: str) -> str:
    return extra("rich.markup").escape(cell)
