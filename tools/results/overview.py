"""The picture of the README: speed-ups of whole networks and of the founding layers, as one SVG.

It is written by hand rather than by matplotlib, so that its text follows the reader's colours: a
style sheet within the file has one set for light pages, and one for dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fastconv.bench import row_timing
from fastconv.bench.cases import PASSES, STEP
from fastconv.bench.network_results import NetworkResults, NetworkRow
from fastconv.bench.networks import CONFIGURATIONS, MODES
from fastconv.bench.results import Results, Row
from fastconv.workloads import FOUNDING
from results.blocks import FOUNDING_MODES, NETWORK_NAMES, PASS_NAMES, ratio

WIDTH = 960
NAME_WIDTH = 172  # of the names left of the panels
GAP = 28  # between panels
BAR = 13  # height of a bar
GROUP_GAP = 9  # between groups of bars
HEAD = 74  # of a row of panels: title, legend, names of columns
FIGURE_WIDTH = 40  # of the figure behind a bar

_STYLE = """
text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.figure { font-size: 11px; fill: #59636e }
.column { font-weight: 600; fill: #59636e }
.one { stroke: #1f2328; stroke-width: 1 }
.s0 { fill: #2f6fb5 } .s1 { fill: #e08a2c } .s2 { fill: #2f9268 } .s3 { fill: #8e5ea2 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .figure, .column { fill: #9198a1 }
  .one { stroke: #f0f6fc }
  .s0 { fill: #5b9bd8 } .s1 { fill: #e9a558 } .s2 { fill: #4fb58a } .s3 { fill: #b188c4 }
}
"""

Cell = Row | NetworkRow | None


@dataclass(frozen=True)
class Chart:
    """A row of panels that share their groups: a panel for each column, a bar for each series."""

    title: str
    series: Sequence[str]
    columns: Sequence[str]
    groups: Sequence[str]
    cells: Sequence[Sequence[Sequence[Cell]]]  # by column, group and series

    @property
    def height(self) -> int:
        return HEAD + len(self.groups) * (len(self.series) * BAR + GROUP_GAP) + 8

    def svg(self, top: int) -> str:
        """The chart's elements, from a height downwards."""
        width = (WIDTH - NAME_WIDTH - GAP * len(self.columns)) // len(self.columns)
        parts = [
            f'<text class="title" x="12" y="{top + 22}">{escape(self.title)}</text>',
            *self._legend(top + 44),
            *self._names(top + HEAD),
        ]
        for number, column in enumerate(self.columns):
            left = NAME_WIDTH + number * (width + GAP)
            parts.append(f'<text class="column" x="{left}" y="{top + 66}">{escape(column)}</text>')
            parts += self._panel(left, top + HEAD, width, self.cells[number])
        return "\n".join(parts)

    def _legend(self, y: int) -> list[str]:
        parts, x = [], 12.0
        for number, name in enumerate(self.series):
            parts.append(
                f'<rect class="key s{number}" x="{x:.0f}" y="{y - 9}" width="11" height="11"/>'
            )
            parts.append(f'<text x="{x + 16:.0f}" y="{y}">{escape(name)}</text>')
            x += 16 + 7 * len(name) + 18
        return parts

    def _names(self, top: int) -> list[str]:
        step = len(self.series) * BAR + GROUP_GAP
        middle = len(self.series) * BAR / 2 + 4
        return [
            f'<text x="{NAME_WIDTH - 10}" y="{top + at * step + middle:.0f}" text-anchor="end">'
            f"{escape(name)}</text>"
            for at, name in enumerate(self.groups)
        ]

    def _panel(
        self, left: int, top: int, width: int, groups: Sequence[Sequence[Cell]]
    ) -> list[str]:  # fmt: skip
        """The bars of a panel, from 0 on, with a line at 1: PyTorch's speed."""
        ratios = [cell.speedup for cells in groups for cell in cells if cell and cell.speedup]
        scale = (width - FIGURE_WIDTH) / max([2.0, *ratios])
        step = len(self.series) * BAR + GROUP_GAP
        bottom = top + len(groups) * step - GROUP_GAP
        at = left + scale
        parts = []
        for number, cells in enumerate(groups):
            for series, cell in enumerate(cells):
                if cell is not None and cell.speedup:
                    y, end = top + number * step + series * BAR, cell.speedup * scale
                    parts.append(
                        f'<rect class="s{series}" x="{left}" y="{y}" width="{end:.1f}" '
                        f'height="{BAR - 2}"/>'
                        f'<text class="figure" x="{left + end + 4:.1f}" y="{y + BAR - 3}">'
                        f"{ratio(cell)}</text>"
                    )
        parts.append(
            f'<line class="one" x1="{at:.1f}" y1="{top - 3}" x2="{at:.1f}" y2="{bottom}"/>'
        )
        return parts


def svg(layers: Results, networks: NetworkResults) -> str:
    """The picture: whole networks above, founding layers below."""
    charts = (_networks(networks), _founding(layers))
    height = sum(chart.height for chart in charts) + 30
    parts, top = [], 0
    for chart in charts:
        parts.append(chart.svg(top))
        top += chart.height
    gpu = layers.environment.get("gpu", "")
    note = f"Times as fast as PyTorch with cuDNN (the line is 1), {gpu}. Longer is better."
    if any("x?</text>" in part for part in parts):
        note += f" ?: samples spread by more than {row_timing.UNSTEADY:.0%}."
    parts.append(f'<text class="figure" x="12" y="{height - 12}">{escape(note)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(note)}">\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _networks(found: NetworkResults) -> Chart:
    rows = {(row.network, row.mode, row.configuration): row for row in found.measured}
    names = list(dict.fromkeys(row.network for row in found.measured))
    titles = {"float32": "float32, TF32", "bfloat16": "bfloat16 autocast, channels-last"}
    cells = [
        [[rows.get((name, mode, one.name)) for mode in MODES] for name in names]
        for one in CONFIGURATIONS.values()
    ]
    groups = [NETWORK_NAMES.get(name, name) for name in names]
    columns = [titles[name] for name in CONFIGURATIONS]
    return Chart("Whole networks after fastconv.optimize", MODES, columns, groups, cells)


def _founding(found: Results) -> Chart:
    rows = {(r.case.workload.name, r.case.mode, r.case.format, r.case.direction): r
            for r in found.measured}  # fmt: skip
    names = [workload.name for workload in FOUNDING]
    cells = [
        [[rows.get((name, *mode, one)) for one in (*PASSES, STEP)] for name in names]
        for mode in FOUNDING_MODES
    ]
    columns = ["float32, TF32", "float32, ieee", "bfloat16, channels-last"]
    return Chart("Single layers", list(PASS_NAMES.values()), columns, names, cells)
