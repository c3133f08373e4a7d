"""Plots of results: speed-ups as bars, and a roofline with every row as a point."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastconv import files
from fastconv.bench import report
from fastconv.bench.cases import PASSES, STEP
from fastconv.bench.console import extra
from fastconv.bench.limits import Ceilings
from fastconv.bench.network_results import NetworkResults, NetworkRow
from fastconv.bench.networks import MODES
from fastconv.bench.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = dict(zip((*PASSES, STEP), ("#3b6fb6", "#d9822b", "#3d9970", "#8e5ea2"), strict=True))
NETWORK_COLOURS = dict(zip(MODES, ("#8e5ea2", "#3b6fb6"), strict=True))
MARKERS = ("o", "s", "^", "D", "v")  # one for each mode in a roofline
BAR_INCHES = 0.17
NEAR_ROOFS = 1.15  # Roofs whose rates differ by less than this factor share a label.
TITLE_COLUMNS = 110  # Characters of a title that fit above a figure, in the title's size.

AnyRow = TypeVar("AnyRow", Row, NetworkRow)


def speedups(results: Results) -> Figure:
    """A bar for each row: its speed-up over the peer, on a logarithmic scale."""
    figure, axes = _bars(results.measured, _bar_name, lambda row: row.case.direction, COLOURS)
    axes.set_xlabel("speed-up over the peer (right of 1: fastconv is faster)")
    axes.set_title(_title(results), fontsize=9)
    return figure


def network_speedups(results: NetworkResults) -> Figure:
    """A bar for each row: its speed-up over PyTorch's network, on a logarithmic scale."""
    figure, axes = _bars(
        results.measured,
        lambda row: f"{row.network} · {row.configuration}",
        lambda row: row.mode,
        NETWORK_COLOURS,
    )
    axes.set_xlabel("speed-up of whole networks by fastconv.optimize (right of 1: faster)")
    axes.set_title(report.title(results), fontsize=9)
    return figure


def _bars(
    rows: Sequence[AnyRow],
    name: Callable[[AnyRow], str],
    kind: Callable[[AnyRow], str],
    colours: Mapping[str, str],
) -> tuple[Figure, Axes]:
    """Bars in groups of rows with the same name, coloured by kind."""
    names = list(dict.fromkeys(map(name, rows)))
    kinds = [one for one in colours if any(kind(row) == one for row in rows)]
    figure, axes = _figure(9, 1.6 + BAR_INCHES * (len(rows) + len(names)))
    height = 0.85 / max(len(kinds), 1)
    for number, one in enumerate(kinds):
        found = {name(row): row for row in rows if kind(row) == one}
        places = [names.index(at) + (number + 0.5) * height - 0.425 for at in found]
        bars = axes.barh(
            places, [(row.speedup or 1) - 1 for row in found.values()], height, left=1,
            color=colours[one], label=one,
        )  # fmt: skip
        axes.bar_label(bars, list(map(report.speedup, found.values())), fontsize=6, padding=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    _plain_ticks(axes.xaxis, [row.speedup or 1 for row in rows])
    axes.margins(x=0.12)
    if rows:
        axes.legend(fontsize=8, loc="best")
    return figure, axes


def roofline(results: Results) -> Figure:
    """Operations per second over operations per byte, ours and the peer's, under the ceilings."""
    figure, axes = _figure(9, 6)
    rows = results.measured
    if results.ceilings is not None and rows:
        _draw_ceilings(axes, results.ceilings, rows)
    modes = list(dict.fromkeys(row.case.mode for row in rows))
    markers = dict(zip(modes, MARKERS * len(modes), strict=False))
    for row in rows:
        _draw_point(axes, row, markers[row.case.mode])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity: operations per byte that has to be moved")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"roofline: {_title(results)}", fontsize=9)
    axes.grid(alpha=0.25, which="both", linewidth=0.4)
    _add_legend(axes, {row.case.direction for row in rows}, markers)
    return figure


PLOTS: dict[str, Callable[[Results], Figure]] = {"speedups": speedups, "roofline": roofline}
NETWORK_PLOTS: dict[str, Callable[[NetworkResults], Figure]] = {"speedups": network_speedups}


def write(results: Results | NetworkResults, folder: Path) -> None:
    """Writes every plot to the folder, as PNG and as SVG."""
    if isinstance(results, NetworkResults):
        figures = {name: draw(results) for name, draw in NETWORK_PLOTS.items()}
    else:
        figures = {name: draw(results) for name, draw in PLOTS.items()}
    for path in outputs(results, folder):
        save(figures[path.stem], path)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure to a file, in the format of its suffix; it has no date."""
    buffer, suffix = io.BytesIO(), path.suffix[1:]
    with extra("matplotlib").rc_context({"svg.hashsalt": "fastconv"}):
        figure.savefig(buffer, format=suffix, dpi=150, metadata=_undated(suffix))
    files.write(path, buffer.getvalue())


def outputs(results: Results | NetworkResults, folder: Path) -> list[Path]:
    """The files that :func:`write` writes to the folder."""
    names = NETWORK_PLOTS if isinstance(results, NetworkResults) else PLOTS
    return [folder / f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]


def inline_svg(figure: Figure) -> str:
    """The figure as an SVG element for an HTML page."""
    buffer = io.StringIO()
    with extra("matplotlib").rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastconv"}):
        figure.savefig(buffer, format="svg", metadata=_undated("svg"))
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _undated(suffix: str) -> dict[str, Any]:
    """Metadata without the date that matplotlib writes by default, so that files are the same."""
    return {"Date": None} if suffix == "svg" else {}


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure that needs no display: it is made without pyplot, which would open windows."""
    figure: Figure = extra("matplotlib.figure").Figure((width, height), layout="constrained")
    return figure, figure.add_subplot()


def _title(results: Results) -> str:
    lines = (report.title(results), *results.doubts)
    return "\n".join(textwrap.fill(line, TITLE_COLUMNS) for line in lines)


def _bar_name(row: Row) -> str:
    return f"{row.case.workload.name} · {row.case.mode} · {row.case.format}"


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Sets ticks at 0.5, 1, 2, ... rather than at powers of ten."""
    ticks = [2.0**power for power in range(-6, 9)]
    low, high = min([*values, 1.0]), max([*values, 1.0])
    axis.set_ticks([t for t in ticks if low / 2 <= t <= high * 2], minor=False)
    axis.set_major_formatter("{x:g}x")
    axis.set_minor_formatter("")


def _draw_ceilings(axes: Axes, ceilings: Ceilings, rows: Sequence[Row]) -> None:
    """Draws a solid roof for each mode, and a dashed one for MMAs other than the mode's."""
    intensities = [row.limit.intensity for row in rows if row.limit]
    low, high = min(intensities) / 2, max(intensities) * 2
    roofs = _roofs(ceilings, rows)
    for (_, own), tflops in roofs.items():
        knee = tflops / ceilings.copy_tb_s
        steps = sorted({low, min(max(knee, low), high), high})
        roof = [min(tflops, x * ceilings.copy_tb_s) for x in steps]
        axes.plot(steps, roof, "--" if own else "-", color="black", linewidth=1)
    for names, tflops in _labels(roofs):
        at = (high, min(tflops, high * ceilings.copy_tb_s))
        axes.annotate(names, at, fontsize=7, ha="right", va="bottom")
    axes.annotate(f"copy: {ceilings.copy_tb_s:.3g} TB/s", (low, low * ceilings.copy_tb_s),
                  fontsize=7, rotation=35, ha="left", va="bottom")  # fmt: skip


def _roofs(ceilings: Ceilings, rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """The TFLOP/s of each roof, by the mode of its rows and the name of their own limit, or ""."""
    modes = {row.case.mode for row in rows}
    roofs = {(mode, ""): tflops for mode, tflops in ceilings.tflops.items() if mode in modes}
    for row in rows:
        own = row.own_limit
        if own and own.name != "memory" and row.case.direction != STEP:
            roofs[row.case.mode, own.name] = own.flops / own.ms * 1e-9
    return roofs


def _labels(roofs: Mapping[tuple[str, str], float]) -> list[tuple[str, float]]:
    """A text for each roof and its height; roofs so near that texts would overlap share one."""
    found: list[tuple[str, float]] = []
    for (mode, own), tflops in sorted(roofs.items(), key=lambda roof: roof[1]):
        text = f"{mode}{own and f', {own}'}: {tflops:.3g}"
        if found and tflops < NEAR_ROOFS * found[-1][1]:
            text = f"{found.pop()[0]}; {text}"
        found.append((text, tflops))
    return [(f"{text} TFLOP/s", tflops) for text, tflops in found]


def _draw_point(axes: Axes, row: Row, marker: str) -> None:
    """Draws a row: a filled point for ours, a hollow one for the peer, and a line between."""
    if row.limit and row.ours and row.peer:
        x, rates = row.limit.intensity, [_tflops(row, t.ms) for t in (row.ours, row.peer)]
        colour = COLOURS[row.case.direction]
        axes.plot([x, x], rates, color=colour, linewidth=0.6, alpha=0.6)
        axes.plot(x, rates[0], marker, color=colour, markersize=5)
        axes.plot(x, rates[1], marker, mfc="none", mec=colour, markersize=5)


def _add_legend(axes: Axes, directions: set[str], markers: dict[str, str]) -> None:
    """Explains the points: colours are passes, shapes are modes."""
    line = extra("matplotlib.lines").Line2D
    ours_and_peer = [
        line([], [], marker="o", linestyle="", color="black", label="filled: fastconv"),
        line([], [], marker="o", linestyle="", mfc="none", mec="black", label="hollow: peer"),
    ]
    passes = [
        line([], [], linewidth=4, color=colour, label=direction)
        for direction, colour in COLOURS.items()
        if direction in directions
    ]
    modes = [
        line([], [], marker=marker, linestyle="", color="grey", label=mode)
        for mode, marker in markers.items()
    ]
    axes.legend(handles=[*ours_and_peer, *passes, *modes], fontsize=8, loc="lower right")


def _tflops(row: Row, ms: float) -> float:
    return row.limit.flops / ms * 1e-9 if row.limit else 0.0
