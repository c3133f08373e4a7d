"""Tables as text, and errors as one line of it, for reports and commands."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def lines(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row; the first row is the heading. Columns of ``right`` end in line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def error_line(error: Exception) -> str:
    """The kind of an error, and what it says first."""
    return ": ".join(filter(None, (type(error).__name__, *str(error).splitlines()[:1])))
