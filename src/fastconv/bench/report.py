"""Tables of results: for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastconv.bench.console import extra
from fastconv.bench.results import Change, Results, Row
from fastconv.bench.timing import Timing
from fastconv.bench.verify import Check, Error

if TYPE_CHECKING:
    from rich.table import Table

Cells = tuple[str, ...]

NOTE = (
    "median of interleaved samples ± half the interquartile range; share: of the limit that binds, "
    "as measured on this machine; first call: with compiling and trying out algorithms; "
    "host: to queue a call; extra: peak memory beyond the results"
)
LEFT = ("workload", "pass", "mode", "format")
RIGHT = (
    "fastconv ms", "peer ms", "speed-up", "limit", "share", "peer's", "host µs", "extra MiB",
    "compile s", "first call ms",
)  # fmt: skip
_CHANGE = ("old ms", "new ms", "change", "noise", "peer's change", "verdict")
_CHECK = ("part", "error", "PyTorch's", "max. error", "PyTorch's", "bound", "check")


def title(results: Results) -> str:
    """What was compared, and where."""
    about = results.environment
    where = about.get("gpu", f"CPU, {about['threads']} threads")
    return f"fastconv {about['fastconv']} ({about['commit']}) and PyTorch {about['torch']}, {where}"


def ceilings(results: Results) -> str:
    """The measured limits, and the time spent compiling, in a line."""
    if results.ceilings is None:
        return "ceilings not measured"
    products = [f"{mode} {value:.3g}" for mode, value in results.ceilings.tflops.items()]
    copy = results.ceilings.copy_tb_s
    compiled = f"; kernels compiled in {results.build_s:.1f} s" if results.build_s else ""
    return f"ceilings: {', '.join(products)} TFLOP/s; copy {copy:.3g} TB/s{compiled}"


def row_cells(row: Row) -> Cells:
    """The cells of a row; a failed one says why in the first of its figures."""
    case = row.case
    head = (case.workload.name, case.direction, case.mode, case.format)
    if row.error is not None or not (row.ours and row.peer and row.limit):
        return (*head, f"failed: {row.error}", *[""] * (len(RIGHT) - 1))
    ours, peer = row.ours, row.peer
    compiled = "" if row.compile_s is None else f"{row.compile_s:.1f}"
    return (
        *head,
        _time(ours),
        _time(peer) + ("*" if "other" in row.peer_name else ""),
        f"{row.speedup:.2f}x",
        row.limit.name,
        f"{row.share(ours):.0%}",
        f"{row.share(peer):.0%}",
        _pair(ours.host_us, peer.host_us),
        _pair(ours.extra_mib, peer.extra_mib),
        compiled,
        _pair(ours.first_call_ms, peer.first_call_ms),
    )


def brief(row: Row) -> str:
    """A row's outcome in a few words."""
    if row.error is not None or not (row.ours and row.peer):
        return f"failed: {row.error}"
    return f"{_time(row.ours)} ms, {row.peer_name} {_time(row.peer)} ms, {row.speedup:.2f}x"


def brief_check(check: Check) -> str:
    """A check's outcome in a few words."""
    if check.failure is not None or not (check.ours and check.peer):
        return f"failed: {check.failure}"
    verdict = "ok" if check.passed else "FAIL"
    return f"{verdict}, error {check.ours.relative:.1e}, PyTorch's {check.peer.relative:.1e}"


def results_table(results: Results) -> Table:
    caption = f"{ceilings(results)}\n{NOTE}"
    return _table(title(results), caption, LEFT, RIGHT, map(row_cells, results.rows))


def results_markdown(results: Results) -> str:
    """A table for the documentation, with its legend."""
    rows = [row_cells(row) for row in results.rows]
    return f"{title(results)}; {ceilings(results)}; {NOTE}.\n\n{_markdown(LEFT, RIGHT, rows)}"


def changes_table(changes: Sequence[Change]) -> Table:
    def cells(change: Change) -> Cells:
        case = change.case
        return (
            case.workload.name, case.direction, case.mode, case.format,
            _time(change.old), _time(change.new), f"{change.ratio - 1:+.1%}",
            f"±{change.noise:.1%}", f"{change.peer_ratio - 1:+.1%}", change.verdict,
        )  # fmt: skip

    return _table("what changed", "", LEFT, _CHANGE, map(cells, changes))


def checks_table(checks: Sequence[Check]) -> Table:
    def cells(check: Check) -> Cells:
        case = check.case
        head = (case.workload.name, case.direction, case.mode, case.format, check.part)
        bound = f"{check.bound:.0e}"
        if check.ours is None or check.peer is None:
            return (*head, *["-"] * 4, bound, f"failed: {check.failure}")
        return (*head, *_errors(check.ours, check.peer), bound, "ok" if check.passed else "FAIL")

    caption = "error: ‖result - float64‖ / ‖float64‖; max. error: of an element, over the largest"
    return _table("errors against float64", caption, LEFT, _CHECK, map(cells, checks))


def _errors(ours: Error, peer: Error) -> Cells:
    figures = (ours.relative, peer.relative, ours.maximum, peer.maximum)
    return tuple(f"{figure:.1e}" for figure in figures)


def _table(title: str, caption: str, left: Cells, right: Cells, rows: map[Cells]) -> Table:
    table: Table = extra("rich.table").Table(title=title, caption=caption)
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", overflow="fold")
    for cells in rows:
        colour = {"FAIL": "red", "slower": "red", "faster": "green"}.get(cells[-1])
        failed = any(cell.startswith("failed") for cell in cells)
        table.add_row(*map(_escaped, cells), style="red" if failed else colour)
    return table


def _markdown(left: Cells, right: Cells, rows: Sequence[Cells]) -> str:
    lines = [
        f"| {' | '.join(left + right)} |",
        f"|{' --- |' * len(left)}{' ---: |' * len(right)}",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _escaped(cell: str) -> str:
    return extra("rich.markup").escape(cell)  # type: ignore[no-any-return]


def _time(timing: Timing) -> str:
    return f"{timing.ms:.4g} ±{timing.spread:.0%}"


def _pair(ours: float | None, peer: float | None) -> str:
    """Ours and the peer's figure, or nothing where it was not measured."""
    if ours is None or peer is None:
        return ""
    return f"{ours:.0f} / {peer:.0f}"
