"""Tables of results, for the terminal and as Markdown, and one-line outcomes for progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fastconv.bench import row_timing
from fastconv.bench.campaign import Group, Summary
from fastconv.bench.console import extra
from fastconv.bench.judging import Error
from fastconv.bench.results import (
    AnyResults,
    Change,
    HostResults,
    HostRow,
    HostTiming,
    NetworkResults,
    NetworkRow,
    Overall,
    Results,
    Row,
    Sum,
)
from fastconv.bench.row_timing import Timing
from fastconv.bench.verify import Check

if TYPE_CHECKING:
    from rich.table import Table

Cells = tuple[str, ...]

NOTE = (
    "times: median of interleaved samples ± half the interquartile range; limit: the ceiling of "
    "this machine that binds the row; share: the least time that this ceiling allows, over the "
    "measured time; host: time to queue a call; extra: peak memory beyond operands and results; "
    "first call: includes compiling and trying out algorithms"
)
HOST_NOTE = (
    "host time to queue a call (on a CPU, to compute it): median of interleaved samples "
    "(quartiles); ratio: fastconv's time over PyTorch's; below 1, fastconv takes less"
)
NETWORKS_NOTE = (
    "times: a step of the whole network, eager, host time included: median of interleaved samples "
    "± half the interquartile range; over compile: speed-up over torch.compile; layers: "
    "convolutions that fastconv.optimize exchanged, of all; layers' ms: GPU time of all "
    "convolutions measured one by one, PyTorch's / as chosen; difference: norm of the difference "
    "of the results, relative to PyTorch's norm; extra: peak memory beyond operands and results; "
    "first call: PyTorch's includes trying out algorithms, fastconv's comes after optimize"
)
SUM_NOTE = (
    "count: how many such layers the model has, in a sum all of its layers; sum: each row's time, "
    "multiplied by its count; first layers have no input gradient and do not count there"
)
UNSTEADY_NOTE = (
    f"?: samples spread by more than {row_timing.UNSTEADY:.0%}, as on a busy machine: "
    "the figure says little"
)
LEFT = ("workload", "pass", "mode", "format")
RIGHT = (
    "count", "fastconv ms", "peer ms", "speed-up", "limit", "share", "peer's share", "host µs",
    "extra MiB", "compile s", "first call ms",
)  # fmt: skip
_HOST_LEFT = ("row", "call")
_HOST_RIGHT = ("fastconv µs", "PyTorch µs", "ratio")
_NETWORK_LEFT = ("network", "mode", "configuration", "images")
_NETWORK_RIGHT = (
    "fastconv ms", "PyTorch ms", "speed-up", "torch.compile ms", "over compile", "layers",
    "layers' ms", "optimize s", "difference", "extra MiB", "first call ms",
)  # fmt: skip
_CHANGE = ("old ms", "new ms", "change", "noise", "peer's change", "verdict")
_STYLES = {"failed": "red", "FAIL": "red", "slower": "red", "faster": "green"}
_CHECK = ("compared", "error", "PyTorch's", "max. error", "PyTorch's", "error/bound", "check")
_SUMMARY = (("kind", "name"), ("trials", "wrong", "error/bound"))
_SHARE_NOTE = "error/bound: the largest error of any element, as a share of its allowed bound"


def title(results: AnyResults) -> str:
    """The title of a table: the versions that were compared, and the device."""
    about = results.environment
    ours, commit, torch, threads = (
        about.get(name, "unknown") for name in ("fastconv", "commit", "torch", "threads")
    )
    where = about.get("gpu", f"CPU, {threads} threads")
    switch = f"; {about['family']}" if "family" in about else ""
    return f"fastconv {ours} ({commit}) and PyTorch {torch}, {where}{switch}"


def ceilings(results: Results) -> str:
    """The measured ceilings, and the time spent compiling, in a line."""
    if results.ceilings is None:
        return "ceilings not measured"
    matrices = [f"{mode} {value:.3g}" for mode, value in results.ceilings.tflops.items()]
    kinds = [f"{kind} {value:.3g}" for kind, value in results.ceilings.mma_tflops.items()]
    mma_sync = f"; mma.sync {', '.join(kinds)} TFLOP/s" if kinds else ""
    copy = results.ceilings.copy_tb_s
    compiled = f"; kernels compiled in {results.build_s:.1f} s" if results.build_s else ""
    return f"ceilings: {', '.join(matrices)} TFLOP/s{mma_sync}; copy {copy:.3g} TB/s{compiled}"


def row_cells(row: Row) -> Cells:
    """The cells of a row; a failed row has "failed" for its first time, and no other figures."""
    case = row.case
    count = f"{case.count}" if case.workload.model else ""
    head = (case.workload.name, case.direction, case.mode, case.format, count)
    if row.error is not None or not (row.ours and row.peer and row.binding):
        return (*head, "failed", *[""] * (len(RIGHT) - 2))
    ours, peer = row.ours, row.peer
    compiled = "" if row.compile_s is None else f"{row.compile_s:.1f}"
    return (
        *head,
        _time(ours),
        _time(peer) + ("*" if "other" in row.peer_name else ""),
        speedup(row),
        row.binding.name,
        f"{row.share(ours):.0%}",
        f"{row.share(peer):.0%}",
        _pair(ours.host_us, peer.host_us),
        _pair(ours.extra_mib, peer.extra_mib),
        compiled,
        _pair(ours.first_call_ms, peer.first_call_ms),
    )


def sum_cells(found: Sum) -> Cells:
    """The cells of a sum; columns that cannot be added up are empty."""
    of = f" of {found.wanted}" if found.layers < found.wanted else ""
    return (
        f"{found.model}: sum", found.direction, found.mode, found.format, f"{found.layers}{of}",
        _time(found.ours), _time(found.peer), speedup(found), *[""] * (len(RIGHT) - 4),
    )  # fmt: skip


def note(results: Results) -> str:
    """Explains the columns of the table."""
    return f"{NOTE}; {SUM_NOTE}" if results.sums else NOTE


def filled(rows: Sequence[Cells], columns: int) -> list[int]:
    """The indices of the columns that at least one row fills; of all, if there are no rows."""
    return [at for at in range(columns) if not rows or any(cells[at] for cells in rows)]


def brief(row: Row) -> str:
    """A row's outcome in a few words."""
    if row.error is not None or not (row.ours and row.peer):
        return f"failed: {row.error}"
    return f"{_time(row.ours)} ms, {row.peer_name} {_time(row.peer)} ms, {speedup(row)}"


class Brief:
    """Describes the last of the checks in a few words, for progress.

    With ``every_s`` above 0, checks that passed are reported together, every so many seconds.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s, self._told = every_s, time.monotonic()

    def __call__(self, checks: Sequence[Check]) -> str | None:
        check = checks[-1]
        if not check.passed:
            return f"FAIL, {check.complaint}"
        if not self._every_s:
            peer = f", PyTorch's {check.peer.relative:.1e}" if check.peer else ""
            return f"ok, error {check.ours.relative:.1e}{peer}" if check.ours else "ok"
        if time.monotonic() - self._told < self._every_s:
            return None
        self._told = time.monotonic()
        return f"{sum(not check.passed for check in checks)} wrong so far"


def table(results: AnyResults) -> Table:
    """A table for the terminal."""
    if isinstance(results, HostResults):
        return _host_table(results)
    if isinstance(results, NetworkResults):
        return _networks_table(results)
    return _results_table(results)


def markdown(results: AnyResults) -> str:
    """A Markdown table with its legend, and a list of what is slower than the peer."""
    return f"{legend(results)}\n{section(results)}"


def legend(results: AnyResults) -> str:
    """The sentence above a Markdown table: versions, device, and what the columns are."""
    if isinstance(results, HostResults):
        return f"{title(results)}; {_host_path(results)}; {HOST_NOTE}."
    if isinstance(results, NetworkResults):
        return f"{title(results)}; {_host_path(results)}; {NETWORKS_NOTE}."
    return f"{title(results)}; {ceilings(results)}; {note(results)}."


def section(results: AnyResults) -> str:
    """A Markdown table without its legend, between warnings and notes."""
    if isinstance(results, HostResults):
        warnings, after = _unsteady(results), _host_failures(results)
        table = _markdown(_HOST_LEFT, _HOST_RIGHT, list(map(_host_cells, results.rows)))
    elif isinstance(results, NetworkResults):
        warnings, after = _unsteady(results), [*_overall(results), *_network_failures(results)]
        table = _markdown(_NETWORK_LEFT, _NETWORK_RIGHT, list(map(_network_cells, results.rows)))
    else:
        warnings, after = remarks(results), failures(results)
        table = _markdown(LEFT, RIGHT, _results_cells(results))
    before = "".join(f"\n**{line[0].upper()}{line[1:]}.**\n" for line in warnings)
    notes = "".join(f"\n{line}\n" for line in [*slower(results.rows), *after])
    return f"{before}\n{table}{notes}"


def slower(rows: Sequence[Row | Sum | HostRow | NetworkRow]) -> list[str]:
    """A sentence that names all measured rows that lose to the peer, the slowest first."""
    measured = [one for one in map(_speed, rows) if one is not None]
    lost = [f"{label} {figure}" for ratio, label, figure in sorted(measured) if round(ratio, 2) < 1]
    return [f"Slower than PyTorch: {', '.join(lost) or 'none'}."] if measured else []


def _speed(row: Row | Sum | HostRow | NetworkRow) -> tuple[float, str, str] | None:
    """A row's speed relative to the peer's, its label and its figure; None if it has no times."""
    if isinstance(row, HostRow):
        return (1 / row.ratio, row.name, _ratio(row)) if row.ratio else None
    label = row.case.label if isinstance(row, Row) else row.label
    return (row.speedup, label, speedup(row)) if row.speedup else None


def _results_table(results: Results) -> Table:
    caption = "\n".join((ceilings(results), note(results), *remarks(results), *failures(results)))
    return _table(title(results), caption, LEFT, RIGHT, _results_cells(results))


def _results_cells(results: Results) -> list[Cells]:
    return [*map(row_cells, results.rows), *map(sum_cells, results.sums)]


def remarks(results: Results) -> list[str]:
    """Sentences of warning that belong above the figures: whether the machine was busy."""
    return [*_unsteady(results), *results.doubts]


def failures(results: Results) -> list[str]:
    """A line for each row that failed."""
    return [f"{row.case.label} failed: {row.error}" for row in results.rows if row.error]


def _host_table(results: HostResults) -> Table:
    lines = (_host_path(results), HOST_NOTE, *_unsteady(results), *_host_failures(results))
    rows = list(map(_host_cells, results.rows))
    return _table(title(results), "\n".join(lines), _HOST_LEFT, _HOST_RIGHT, rows)


def _host_cells(row: HostRow) -> Cells:
    """The cells of a row of host times; a row without times says "skipped" or "failed"."""
    if not (row.ours and row.peer):
        return (row.name, row.about, *["skipped" if row.skipped else "failed"] * 2, "")
    return (row.name, row.about, _host_time(row.ours), _host_time(row.peer), _ratio(row))


def host_brief(row: HostRow) -> str:
    """A host row's outcome in a few words."""
    if not (row.ours and row.peer):
        return str(row.complaint)
    return f"{_us(row.ours.us)} µs, PyTorch {_us(row.peer.us)} µs, ratio {_ratio(row)}"


def _ratio(row: HostRow) -> str:
    """A measured row's ratio, with a question mark if its samples are unsteady."""
    return f"{row.ratio:.2f}" + ("?" if row.unsteady else "")


def _networks_table(results: NetworkResults) -> Table:
    lines = (_host_path(results), NETWORKS_NOTE, *_overall(results), *_unsteady(results))
    caption = "\n".join((*lines, *_network_failures(results)))
    rows = list(map(_network_cells, results.rows))
    return _table(title(results), caption, _NETWORK_LEFT, _NETWORK_RIGHT, rows)


def _network_cells(row: NetworkRow) -> Cells:
    """The cells of a network's row; one without times says "skipped" or "failed"."""
    head, done = (row.network, row.mode, row.configuration, row.images), row.optimized
    if not (row.ours and row.peer and done):
        verdict = "skipped" if row.skipped else "failed"
        return (*head, verdict, *[""] * (len(_NETWORK_RIGHT) - 1))
    ours, peer, compiled = row.ours, row.peer, row.compiled
    return (
        *head,
        _time(ours),
        _time(peer),
        speedup(row),
        _time(compiled) if compiled else "",
        f"{row.compiled_speedup:.2f}x" if compiled else "",
        f"{done.exchanged} of {done.layers}" + (", fused" if done.fused else ""),
        f"{done.before_ms:.4g} / {done.after_ms:.4g}",
        f"{done.seconds:.1f}",
        "" if row.difference is None else f"{row.difference:.1e}",
        _pair(ours.extra_mib, peer.extra_mib),
        _pair(ours.first_call_ms, peer.first_call_ms),
    )


def network_brief(row: NetworkRow) -> str:
    """A network row's outcome in a few words."""
    if not (row.ours and row.peer):
        return str(row.complaint)
    return f"{_time(row.ours)} ms, PyTorch {_time(row.peer)} ms, {speedup(row)}"


def _overall(results: NetworkResults) -> list[str]:
    return list(map(_overall_line, results.overall))


def _overall_line(found: Overall) -> str:
    over = found.over_compiled
    compiled = "" if over is None else f"; {over:.2f}x over torch.compile, in the geometric mean"
    return (
        f"{found.mode}, {found.rows} rows: speed-up {found.mean:.2f}x in the geometric mean, "
        f"{found.of_sums:.2f}x of the sums of times, at least {found.least:.2f}x "
        f"({found.least_of}){compiled}"
    )


def changes_table(changes: Sequence[Change]) -> Table:
    """A table for the terminal of the changes between two results."""

    def cells(change: Change) -> Cells:
        case = change.case
        return (
            case.workload.name, case.direction, case.mode, case.format,
            _time(change.old), _time(change.new), f"{change.ratio - 1:+.1%}",
            f"±{change.noise:.1%}", f"{change.peer_ratio - 1:+.1%}", change.verdict,
        )  # fmt: skip

    return _table("what changed", "", LEFT, _CHANGE, list(map(cells, changes)))


def checks_table(checks: Sequence[Check]) -> Table:
    """A table for the terminal with the errors of each check."""

    def cells(check: Check) -> Cells:
        case = check.trial.case
        head = (case.workload.name, case.direction, case.mode, case.format)
        if check.failure is not None or not (check.ours and check.peer):
            return (*head, "", *["-"] * 5, "failed")
        share = f"{check.share:.0%}"
        verdict = "ok" if check.passed else "FAIL"
        return (*head, check.part, *_errors(check.ours, check.peer), share, verdict)

    caption = (
        "error: ‖result - float64‖ / ‖float64‖; max. error: the largest error of an element, over "
        "the largest element; " + _SHARE_NOTE
    )
    return _table("errors against float64", caption, LEFT, _CHECK, list(map(cells, checks)))


def summary_table(summary: Summary) -> Table:
    """A table for the terminal of the counts of a run of trials."""
    return _table(_totals(summary), _SHARE_NOTE, *_SUMMARY, _group_cells(summary))


def summary_markdown(summary: Summary, environment: Mapping[str, str]) -> str:
    """The counts of a run of trials as a Markdown table, with versions and device."""
    where = environment.get("gpu", f"CPU, {environment.get('threads')} threads")
    names = ("fastconv", "commit", "torch")
    ours, commit, torch = (environment.get(name, "unknown") for name in names)
    versions = f"fastconv {ours} ({commit}), PyTorch {torch}, {where}"
    legend = f"{versions}: {_totals(summary)}; {_SHARE_NOTE}."
    return f"{legend}\n\n{_markdown(*_SUMMARY, _group_cells(summary))}"


def _unsteady(results: AnyResults) -> list[str]:
    return [UNSTEADY_NOTE] if any(row.unsteady for row in results.rows) else []


def _host_path(results: HostResults | NetworkResults) -> str:
    return f"host path: {results.environment.get('host_path', 'unknown')}"


def _host_failures(results: HostResults) -> list[str]:
    return [f"{row.name} {row.complaint}" for row in results.rows if row.complaint]


def _network_failures(results: NetworkResults) -> list[str]:
    return [f"{row.label} {row.complaint}" for row in results.rows if row.complaint]


def _host_time(timing: HostTiming) -> str:
    return f"{_us(timing.us)} ({_us(timing.low_us)} to {_us(timing.high_us)})"


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _totals(summary: Summary) -> str:
    asked = f" of {summary.asked}" if summary.tried < summary.asked else ""
    return (
        f"{summary.tried}{asked} trials, {summary.wrong} wrong, {summary.flops:.3g} flops, "
        f"{summary.seconds:.0f} s"
    )


def _group_cells(summary: Summary) -> list[Cells]:
    return [
        (group.kind, group.name, f"{group.trials}", f"{group.wrong}", _share(group))
        for group in summary.groups
    ]


def _share(group: Group) -> str:
    return "" if group.share is None else f"{group.share:.3g}"


def _errors(ours: Error, peer: Error) -> Cells:
    figures = (ours.relative, peer.relative, ours.maximum, peer.maximum)
    return tuple(f"{figure:.1e}" for figure in figures)


def _table(title: str, caption: str, left: Cells, right: Cells, rows: Sequence[Cells]) -> Table:
    """A table for the terminal, without the columns that no row fills."""
    table: Table = extra("rich.table").Table(
        title=_escaped(title), caption=_escaped(caption), caption_justify="left"
    )
    shown = filled(rows, len(left + right))
    for at in shown:
        if at < len(left):
            table.add_column(left[at], overflow="fold", no_wrap=at > 0)
        else:
            table.add_column(right[at - len(left)], justify="right", overflow="fold")
    for cells in rows:
        verdict = next((cell for cell in cells if cell in _STYLES), "")
        table.add_row(*(_escaped(cells[at]) for at in shown), style=_STYLES.get(verdict))
    return table


def _markdown(left: Cells, right: Cells, rows: Sequence[Cells]) -> str:
    """A table as Markdown, without the columns that no row fills."""
    shown = filled(rows, len(left + right))
    rules = ["---"] * len(left) + ["---:"] * len(right)
    lines = (
        "| " + " | ".join(cells[at].replace("|", r"\|") for at in shown) + " |"
        for cells in (left + right, rules, *rows)
    )
    return "\n".join(lines) + "\n"


def _escaped(cell: str) -> str:
    return extra("rich.markup").escape(cell)


def _time(timing: Timing) -> str:
    return f"{timing.ms:.4g} ±{timing.spread:.0%}"


def speedup(row: Row | Sum | NetworkRow) -> str:
    """A measured row's or a sum's speed-up, with a question mark if its samples are unsteady."""
    return f"{row.speedup:.2f}x" + ("?" if row.unsteady else "")


def _pair(ours: float | None, peer: float | None) -> str:
    """Our figure and the peer's; "" if they were not measured."""
    if ours is None or peer is None:
        return ""
    return f"{ours:.0f} / {peer:.0f}"
