"""Tables of results, for the terminal and as Markdown, and one-line outcomes for progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fastconv.bench import limits, row_timing
from fastconv.bench.campaign import Group, Summary
from fastconv.bench.cases import DTYPES, Case
from fastconv.bench.judging import Error
from fastconv.bench.network_results import (
    COMPILE_MODES,
    CompiledPair,
    NetworkResults,
    NetworkRow,
    Overall,
)
from fastconv.bench.results import (
    AnyResults,
    Change,
    HostResults,
    HostRow,
    HostTiming,
    Results,
    Row,
    Sum,
)
from fastconv.bench.row_timing import Timing
from fastconv.bench.terminal_table import Cells, Columns, explained, filled, made
from fastconv.bench.trials import Trial
from fastconv.bench.verify import Check

if TYPE_CHECKING:
    from rich.table import Table

NOTES = {
    "count": "count: how many such layers the model has; in a sum, the number of layers added up, "
    "each row's time multiplied by its count; first layers have no input gradient and do not "
    "count there",
    "fastconv ms": "times: median of interleaved samples ± half the interquartile range",
    "peer ms": "peer: PyTorch, as --peer selects it; *: in the other memory format",
    "speed-up": "speed-up: the peer's time over fastconv's",
    "limit": "limit: what bounds the row on this machine, arithmetic or memory bandwidth",
    "share": "share: the least time that arithmetic and memory bandwidth allow, over the measured "
    "time",
    "host µs": "host µs: time to queue a call, fastconv's / the peer's",
    "extra MiB": "extra MiB: peak memory beyond operands and results, likewise",
    "compile s": "compile s: time to compile the row's kernels",
    "first call ms": "first call ms: includes compiling and trying out algorithms",
}
HOST_NOTES = {
    "fastconv µs": "host time to queue a call (on a CPU, to compute it): median of interleaved "
    "samples (quartiles)",
    "ratio": "ratio: fastconv's time over PyTorch's; below 1, fastconv takes less",
}
HOST_NOTE = "; ".join(HOST_NOTES.values())
NETWORK_NOTES = {
    "fastconv ms": "times: a step of the whole network, eager, host time included: median of "
    "interleaved samples ± half the interquartile range",
    "compiled speed-up": "compiled: both after torch.compile in its default mode",
    "CUDA graphs speed-up": "CUDA graphs: both after torch.compile in its mode reduce-overhead",
    "layers": "layers: convolutions that fastconv.optimize exchanged, of all",
    "layers' ms": "layers' ms: GPU time of all convolutions measured one by one, PyTorch's / as "
    "chosen",
    "optimize s": "optimize s: time that fastconv.optimize took",
    "difference": "difference: norm of the difference of the results, relative to PyTorch's norm",
    "extra MiB": "extra MiB: peak memory beyond operands and results, fastconv's / PyTorch's",
    "first call ms": "first call ms: PyTorch's includes trying out algorithms, fastconv's comes "
    "after optimize",
    "compile s": "compile s: the first step after torch.compile, with empty caches, fastconv's / "
    "PyTorch's",
}
CHECK_NOTES = {
    "error": "error: ‖result - float64‖ / ‖float64‖",
    "max. error": "max. error: the largest error of an element, over the largest element",
    "error/bound": "error/bound: the largest error of any element, over the bound that its terms "
    "allow",
}
CHANGE_NOTES = {
    "change": "change: of fastconv's time",
    "noise": "noise: changes up to this size may be chance",
    "peer's change": "peer's change: if it is as large, the machine changed, not fastconv",
}
UNSTEADY_NOTE = (
    f"?: the samples spread by more than {row_timing.UNSTEADY:.0%}, as on a busy machine, so "
    "the figure says little"
)
LEFT = ("workload", "pass", "mode", "format")
RIGHT = (
    "count", "fastconv ms", "peer ms", "speed-up", "limit", "share", "peer's share", "host µs",
    "extra MiB", "compile s", "first call ms",
)  # fmt: skip
HOST_LEFT = ("row", "call")
HOST_RIGHT = ("fastconv µs", "PyTorch µs", "ratio")
NETWORK_LEFT = ("network", "mode", "configuration", "images")
COMPILED_RIGHT = {
    "default": ("fastconv compiled ms", "PyTorch compiled ms", "compiled speed-up", "compile s"),
    "reduce-overhead": (
        "fastconv CUDA graphs ms", "PyTorch CUDA graphs ms", "CUDA graphs speed-up",
        "CUDA graphs compile s",
    ),
}  # fmt: skip
"""The columns of compiled networks, by the modes of torch.compile."""
NETWORK_RIGHT = (
    "fastconv ms", "PyTorch ms", "speed-up", *COMPILED_RIGHT["default"],
    *COMPILED_RIGHT["reduce-overhead"], "layers", "layers' ms", "optimize s", "difference",
    "extra MiB", "first call ms",
)  # fmt: skip
_CHANGE = ("old ms", "new ms", "change", "noise", "peer's change", "verdict")
_CHECK = (
    "compared", "error", "PyTorch's error", "max. error", "PyTorch's max.", "error/bound", "check"
)  # fmt: skip
_SUMMARY = (("kind", "name"), ("trials", "wrong", "error/bound"))
_SHARE_NOTE = CHECK_NOTES["error/bound"]

# The columns that a narrow terminal leaves out, the first of them first.
_ORDER = (
    "first call ms", "compile s", "extra MiB", "host µs", "mode", "format", "peer's share", "limit",
    "share", "count", "peer ms",
)  # fmt: skip
_HOST_ORDER = ("call", "PyTorch µs")
_NETWORK_ORDER = (
    "first call ms", "extra MiB", "optimize s", "CUDA graphs compile s", "compile s", "layers' ms",
    "difference", "images", "mode", "configuration", "layers", "PyTorch CUDA graphs ms",
    "PyTorch compiled ms", "PyTorch ms", "fastconv CUDA graphs ms", "fastconv compiled ms",
)  # fmt: skip
_CHECK_ORDER = (
    "compared", "PyTorch's max.", "max. error", "mode", "format", "PyTorch's error", "error"
)  # fmt: skip
_CHANGE_ORDER = ("mode", "format", "noise", "peer's change", "old ms")


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
    is_gpu = "gpu" in results.environment
    matrices = [
        f"{mode if is_gpu else _on_cpu(mode)} {value:.3g}"
        for mode, value in results.ceilings.tflops.items()
    ]
    kinds = [f"{kind} {value:.3g}" for kind, value in results.ceilings.mma_tflops.items()]
    mma_sync = f"; mma.sync {', '.join(kinds)} TFLOP/s" if kinds else ""
    copy = results.ceilings.copy_tb_s
    compiled = f"; kernels compiled in {results.build_s:.1f} s" if results.build_s else ""
    of = results.ceilings.arithmetic
    how = "" if of == limits.MATRIX_PRODUCTS else f" of {of}"
    return f"ceilings: {', '.join(matrices)} TFLOP/s{how}{mma_sync}; copy {copy:.3g} TB/s{compiled}"


def _on_cpu(mode: str) -> str:
    """A mode, and what a CPU multiplies its numbers in if it is another type."""
    dtype = DTYPES[mode.partition(" ")[0]]
    multiplied = limits.multiplied_in(dtype)
    return mode if multiplied == dtype else f"{mode} (in {str(multiplied).removeprefix('torch.')})"


def row_cells(row: Row) -> Cells:
    """The cells of a row; one without times says "skipped" or "failed" in the first's place."""
    case = row.case
    count = f"{case.count}" if case.workload.model else ""
    head = (case.workload.name, case.direction, case.mode, case.format, count)
    if row.complaint is not None or not (row.ours and row.peer and row.binding):
        verdict = "skipped" if row.skipped else "failed"
        return (*head, verdict, *[""] * (len(RIGHT) - 2))
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
    """Explains the columns that the results fill."""
    shown = filled(_results_cells(results), len(LEFT + RIGHT))
    return "; ".join(explained(NOTES, [(LEFT + RIGHT)[at] for at in shown]))


def networks_note(results: NetworkResults) -> str:
    """Explains the columns that the results of networks fill."""
    headings = NETWORK_LEFT + NETWORK_RIGHT
    shown = filled(list(map(network_cells, results.rows)), len(headings))
    return "; ".join(explained(NETWORK_NOTES, [headings[at] for at in shown]))


def brief(row: Row) -> str:
    """A row's outcome in a few words."""
    if not (row.ours and row.peer):
        return str(row.complaint)
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
        return f"{title(results)}; {host_path(results)}; {HOST_NOTE}."
    if isinstance(results, NetworkResults):
        return f"{title(results)}; {host_path(results)}; {networks_note(results)}."
    return f"{title(results)}; {ceilings(results)}; {note(results)}."


def section(results: AnyResults) -> str:
    """A Markdown table without its legend, between warnings and notes."""
    if isinstance(results, HostResults):
        warnings, after = unsteady(results), _host_failures(results)
        table = _markdown(HOST_LEFT, HOST_RIGHT, list(map(host_cells, results.rows)))
    elif isinstance(results, NetworkResults):
        warnings, after = unsteady(results), [*overall(results), *_network_failures(results)]
        table = _markdown(NETWORK_LEFT, NETWORK_RIGHT, list(map(network_cells, results.rows)))
    else:
        warnings, after = remarks(results), failures(results)
        table = _markdown(LEFT, RIGHT, _results_cells(results))
    before = "".join(f"\n**{line[0].upper()}{line[1:]}.**\n" for line in warnings)
    notes = "".join(f"\n{line}\n" for line in [*slower(_rows(results)), *after])
    return f"{before}\n{table}{notes}"


def _rows(results: AnyResults) -> Sequence[Row | HostRow | NetworkRow]:
    """All rows that may lose; compiled networks are rows of their own."""
    if isinstance(results, NetworkResults):
        return [one for row in results.rows for one in (row, *row.compiled_rows)]
    return results.rows


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
    columns = Columns(LEFT, RIGHT, NOTES, _ORDER)
    lines = (ceilings(results), *remarks(results), *failures(results))
    return made(title(results), lines, columns, _results_cells(results))


def _results_cells(results: Results) -> list[Cells]:
    return [*map(row_cells, results.rows), *map(sum_cells, results.sums)]


def remarks(results: Results) -> list[str]:
    """Sentences of warning that belong above the figures: whether the machine was busy."""
    return [*unsteady(results), *results.doubts]


def failures(results: Results) -> list[str]:
    """A line for each row that was skipped or failed."""
    return [f"{row.case.label} {row.complaint}" for row in results.rows if row.complaint]


def _host_table(results: HostResults) -> Table:
    columns = Columns(HOST_LEFT, HOST_RIGHT, HOST_NOTES, _HOST_ORDER)
    lines = (host_path(results), *unsteady(results), *_host_failures(results))
    return made(title(results), lines, columns, list(map(host_cells, results.rows)))


def host_cells(row: HostRow) -> Cells:
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
    columns = Columns(NETWORK_LEFT, NETWORK_RIGHT, NETWORK_NOTES, _NETWORK_ORDER)
    lines = (host_path(results), *overall(results), *unsteady(results))
    rows = list(map(network_cells, results.rows))
    return made(title(results), (*lines, *_network_failures(results)), columns, rows)


def network_cells(row: NetworkRow) -> Cells:
    """The cells of a network's row; one without times says "skipped" or "failed"."""
    head, done = (row.network, row.mode, row.configuration, row.images), row.optimized
    if not (row.ours and row.peer and done):
        verdict = "skipped" if row.skipped else "failed"
        return (*head, verdict, *[""] * (len(NETWORK_RIGHT) - 1))
    ours, peer = row.ours, row.peer
    compiled = {pair.mode: pair for pair in row.compiled}
    return (
        *head,
        _time(ours),
        _time(peer),
        speedup(row),
        *(cell for mode in COMPILED_RIGHT for cell in _compiled_cells(compiled.get(mode))),
        f"{done.exchanged} of {done.layers}" + (", fused" if done.fused else ""),
        f"{done.before_ms:.4g} / {done.after_ms:.4g}",
        f"{done.seconds:.1f}",
        "" if row.difference is None else f"{row.difference:.1e}",
        _pair(ours.extra_mib, peer.extra_mib),
        _pair(ours.first_call_ms, peer.first_call_ms),
    )


def _compiled_cells(pair: CompiledPair | None) -> Cells:
    """The cells of networks that torch.compile compiled in one mode."""
    if pair is None:
        return ("",) * 4
    ours, peer = (_time(one) if one else "failed" for one in (pair.ours, pair.peer))
    if not (pair.ours and pair.peer):
        return (ours, peer, "", "")
    seconds = f"{pair.ours.first_call_ms / 1e3:.1f} / {pair.peer.first_call_ms / 1e3:.1f}"
    return (ours, peer, speedup(pair), seconds)


def network_brief(row: NetworkRow) -> str:
    """A network row's outcome in a few words."""
    if not (row.ours and row.peer):
        return str(row.complaint)
    compiled = "".join(
        f"; {pair.name} {speedup(pair) if pair.speedup else 'failed'}" for pair in row.compiled
    )
    return f"{_time(row.ours)} ms, PyTorch {_time(row.peer)} ms, {speedup(row)}{compiled}"


def overall(results: NetworkResults) -> list[str]:
    """A line for each mode that sums its speed-ups up."""
    return list(map(_overall_line, results.overall))


def _overall_line(found: Overall) -> str:
    compiled = "".join(
        f"; {COMPILE_MODES[one.mode]}, {_count(one.rows)}: {one.mean:.2f}x over PyTorch's, in the "
        "geometric mean"
        for one in found.compiled
    )
    return (
        f"{found.mode}, {_count(found.rows)}: speed-up "
        f"{found.mean:.2f}x in the geometric mean, {found.of_sums:.2f}x of the sums of times, "
        f"at least {found.least:.2f}x "
        f"({found.least_of}){compiled}"
    )


def _count(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}"


def changes_table(changes: Sequence[Change]) -> Table:
    """A table for the terminal of the changes between two results."""

    def cells(change: Change) -> Cells:
        case = change.case
        return (
            case.workload.name, case.direction, case.mode, case.format,
            _time(change.old), _time(change.new), f"{change.ratio - 1:+.1%}",
            f"±{change.noise:.1%}", f"{change.peer_ratio - 1:+.1%}", change.verdict,
        )  # fmt: skip

    columns = Columns(LEFT, _CHANGE, CHANGE_NOTES, _CHANGE_ORDER)
    return made("what changed", (), columns, list(map(cells, changes)))


def checks_table(checks: Sequence[Check], skipped: Sequence[Trial] = ()) -> Table:
    """A table for the terminal with the errors of each check, and the trials that were skipped."""

    def cells(check: Check) -> Cells:
        head = _head(check.trial.case)
        if check.failure is not None:
            return (*head, *[""] * (len(_CHECK) - 1), "failed")
        if not (check.ours and check.peer):  # as of isolation alone
            return (*head, *[""] * (len(_CHECK) - 1), "ok" if check.passed else "FAIL")
        share = f"{check.share:.0%}"
        verdict = "ok" if check.passed else "FAIL"
        return (*head, check.part, *_errors(check.ours, check.peer), share, verdict)

    left_out = [(*_head(one.case), *[""] * (len(_CHECK) - 1), "skipped") for one in skipped]
    columns = Columns(LEFT, _CHECK, CHECK_NOTES, _CHECK_ORDER)
    return made("errors against float64", (), columns, [*map(cells, checks), *left_out])


def _head(case: Case) -> Cells:
    return case.workload.name, case.direction, case.mode, case.format


def summary_table(summary: Summary) -> Table:
    """A table for the terminal of the counts of a run of trials."""
    return made(_totals(summary), (), Columns(*_SUMMARY, CHECK_NOTES), _group_cells(summary))


def summary_markdown(summary: Summary, environment: Mapping[str, str]) -> str:
    """The counts of a run of trials as a Markdown table, with versions and device."""
    where = environment.get("gpu", f"CPU, {environment.get('threads')} threads")
    names = ("fastconv", "commit", "torch")
    ours, commit, torch = (environment.get(name, "unknown") for name in names)
    versions = f"fastconv {ours} ({commit}), PyTorch {torch}, {where}"
    legend = f"{versions}: {_totals(summary)}; {_SHARE_NOTE}."
    return f"{legend}\n\n{_markdown(*_SUMMARY, _group_cells(summary))}"


def unsteady(results: AnyResults) -> list[str]:
    """A warning if samples of any row spread too much."""
    return [UNSTEADY_NOTE] if any(row.unsteady for row in _rows(results)) else []


def host_path(results: HostResults | NetworkResults) -> str:
    """Which code served the calls."""
    return f"host path: {results.environment.get('host_path', 'unknown')}"


def _host_failures(results: HostResults) -> list[str]:
    return [f"{row.name} {row.complaint}" for row in results.rows if row.complaint]


def _network_failures(results: NetworkResults) -> list[str]:
    failed = [f"{row.label} {row.complaint}" for row in results.rows if row.complaint]
    return [*failed, *compiled_remarks(results)]


def compiled_remarks(results: NetworkResults) -> list[str]:
    """A line for each compiled network that failed, or whose time is of something else."""
    return [
        f"{row.label}, {remark}"
        for row in results.rows
        for pair in row.compiled
        for remark in pair.remarks
    ]


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


def _markdown(left: Cells, right: Cells, rows: Sequence[Cells]) -> str:
    """A table as Markdown, without the columns that no row fills."""
    shown = filled(rows, len(left + right))
    rules = ["---"] * len(left) + ["---:"] * len(right)
    lines = (
        "| " + " | ".join(cells[at].replace("|", r"\|") for at in shown) + " |"
        for cells in (left + right, rules, *rows)
    )
    return "\n".join(lines) + "\n"


def _time(timing: Timing) -> str:
    ms = f"{timing.ms:.4g}" if timing.ms < 1000 else f"{timing.ms:.0f}"
    return f"{ms} ±{timing.spread:.0%}"


def speedup(row: Row | Sum | NetworkRow | CompiledPair) -> str:
    """A measured row's or a sum's speed-up, with a question mark if its samples are unsteady."""
    return f"{row.speedup:.2f}x" + ("?" if row.unsteady else "")


def _pair(ours: float | None, peer: float | None) -> str:
    """Our figure and the peer's; "" if they were not measured."""
    if ours is None or peer is None:
        return ""
    return f"{ours:.0f} / {peer:.0f}"
