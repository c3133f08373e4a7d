"""Plain-text tables and one-line error messages, for reports and commands."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def lines(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Formats rows of cells as aligned lines; columns whose index is in ``right`` align right.

    The heading, if there is one, is just the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def error_line(error: Exception) -> str:
    """The error's type and the first line of its message."""
    return ": ".join(filter(None, (type(error).__name__, *str(error).splitlines()[:1])))
