"""``fastconv report --html``: one self-contained page with plots and sortable tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fastconv.bench import plots, report
from fastconv.bench.network_results import NetworkResults
from fastconv.bench.results import AnyResults, HostResults, Results
from fastconv.bench.terminal_table import Cells, filled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1440px;
       padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left }
th.figure, td.figure { text-align: right }
thead th { position: sticky; top: 0; background: #f4f4f4; cursor: pointer; user-select: none }
th[aria-sort=ascending]::after { content: " \\25B2" }
th[aria-sort=descending]::after { content: " \\25BC" }
tr.faster td.speedup { color: #17753f; font-weight: 600 }
tr.slower td.speedup { color: #b3261e; font-weight: 600 }
tr.skipped td { color: #777; white-space: normal }
tr.failed td { color: #b3261e; white-space: normal }
p.lead { font-size: 1.2rem }
p.remark { color: #b3261e; font-weight: 600 }
svg { max-width: 100%; height: auto }
.environment th { font-weight: 600; background: none; cursor: auto }
"""

_SCRIPT = """
document.querySelectorAll("table.sortable").forEach(table => {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const key = (row, at) => row.cells[at]?.dataset.value ?? "";
  const order = (a, b) => {
    const x = parseFloat(a), y = parseFloat(b);
    return isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;  // "" of failed rows comes first.
  };
  const sort = (head, at) => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].sort((a, b) => order(key(a, at), key(b, at)));
    body.append(...(up ? rows : rows.reverse()));
  };
  heads.forEach((head, at) => {
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(head, at));
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(head, at); });
  });
});
"""


def html(found: Mapping[Path, AnyResults], lead: str = "") -> str:
    """The whole page, with a section for each file of results, below the sentence ``lead``."""
    sections = "\n".join(
        _section(f"{path}: " if len(found) > 1 else "", results) for path, results in found.items()
    )
    first = f'<p class="lead">{escape(lead)}</p>\n' if lead else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fastconv benchmark</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
{first}{sections}
<script>{_SCRIPT}</script>
</body>
</html>
"""


@dataclass(frozen=True)
class _Row:
    """A row of the table."""

    cells: Cells
    kind: str  # the class of its element
    tooltip: str = ""  # of its first cell
    complaint: str | None = None  # takes the place of all figures


@dataclass(frozen=True)
class _Sheet:
    """What a section shows of one file of results."""

    about: Sequence[str]  # sentences above the table
    figures: Mapping[str, Figure]  # by their headings
    left: Cells
    right: Cells
    rows: Sequence[_Row]
    sums: Sequence[_Row]
    legend: str
    remarks: Sequence[str]


def _section(name: str, results: AnyResults) -> str:
    sheet = _sheet(results)
    about = "\n".join(f"<p>{escape(_sentence(line))}</p>" for line in sheet.about)
    remarks = "\n".join(
        f'<p class="remark">{escape(_sentence(line))}</p>' for line in sheet.remarks
    )
    figures = "\n".join(
        f"<h2>{escape(heading)}</h2>\n{plots.inline_svg(figure)}"
        for heading, figure in sheet.figures.items()
    )
    return f"""<h1>{escape(name + report.title(results))}</h1>
{about}
{remarks}
{figures}
<h2>Every row</h2>
<p>Click a heading to sort. {escape(_sentence(sheet.legend))}</p>
<div class="scroll">{_table(sheet)}</div>
<h2>Environment</h2>
{_environment(results.environment)}"""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _sheet(results: AnyResults) -> _Sheet:
    if isinstance(results, HostResults):
        return _host_sheet(results)
    return _networks_sheet(results) if isinstance(results, NetworkResults) else _rows_sheet(results)


def _rows_sheet(results: Results) -> _Sheet:
    return _Sheet(
        [report.ceilings(results)],
        {name.capitalize(): draw(results) for name, draw in plots.PLOTS.items()},
        report.LEFT,
        report.RIGHT,
        [
            _Row(report.row_cells(row), _kind(row.speedup), row.command, row.complaint)
            for row in results.rows
        ],
        [_Row(report.sum_cells(found), _kind(found.speedup)) for found in results.sums],
        f"{report.note(results)}; the command that reproduces a row is the tooltip of its workload",
        report.remarks(results),
    )


def _host_sheet(results: HostResults) -> _Sheet:
    rows = [
        _Row(report.host_cells(row), _kind(row.ratio and 1 / row.ratio), "", row.complaint)
        for row in results.rows
    ]
    about, legend = [report.host_path(results)], report.HOST_NOTE
    headings = (report.HOST_LEFT, report.HOST_RIGHT)
    return _Sheet(about, {}, *headings, rows, [], legend, report.unsteady(results))


def _networks_sheet(results: NetworkResults) -> _Sheet:
    rows = [
        _Row(report.network_cells(row), _kind(row.speedup), "", row.complaint)
        for row in results.rows
    ]
    return _Sheet(
        [report.host_path(results), *report.overall(results)],
        {name.capitalize(): draw(results) for name, draw in plots.NETWORK_PLOTS.items()},
        report.NETWORK_LEFT,
        report.NETWORK_RIGHT,
        rows,
        [],
        report.networks_note(results),
        [*report.unsteady(results), *report.compiled_remarks(results)],
    )


def _kind(speedup: float | None) -> str:
    """The class of a row; one without times is neither faster nor slower."""
    if speedup is None:
        return "unmeasured"
    return "faster" if speedup >= 1 else "slower"


def _table(sheet: _Sheet) -> str:
    headings = sheet.left + sheet.right
    shown = filled([row.cells for row in sheet.rows], len(headings))
    head = "".join(
        f'<th{_class(sheet, at)} scope="col">{escape(headings[at])}</th>' for at in shown
    )
    body = "\n".join(_row(sheet, row, shown) for row in sheet.rows)
    foot = "\n".join(_row(sheet, row, shown) for row in sheet.sums)  # Sorting moves the body only.
    return (
        f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody>'
        f"<tfoot>\n{foot}\n</tfoot></table>"
    )


def _row(sheet: _Sheet, row: _Row, shown: Sequence[int]) -> str:
    """A row; if it was skipped or failed, the reason takes the place of all figures."""
    kind, rest = row.kind, ""
    if row.complaint is not None:
        texts = [at for at in shown if at < len(sheet.left)]
        kind = row.complaint.partition(":")[0]
        rest = f'<td colspan="{len(shown) - len(texts)}">{escape(row.complaint)}</td>'
        shown = texts
    made = "".join(_cell(sheet, row, at) for at in shown)
    return f'<tr class="{kind}">{made}{rest}</tr>'


def _cell(sheet: _Sheet, row: _Row, at: int) -> str:
    """The cell of a column; ``data-value`` is what its column is sorted by."""
    text = row.cells[at]
    tooltip = f' title="{escape(row.tooltip)}"' if at == 0 and row.tooltip else ""
    value = escape(text if at < len(sheet.left) else text.split(" ")[0])
    return f'<td{_class(sheet, at)}{tooltip} data-value="{value}">{escape(text)}</td>'


def _class(sheet: _Sheet, at: int) -> str:
    """The class attribute of a column's cells; the columns of text have none."""
    if at < len(sheet.left):
        return ""
    is_verdict = sheet.right[at - len(sheet.left)] in ("speed-up", "ratio")
    return f' class="figure{" speedup" if is_verdict else ""}"'


def _environment(found: dict[str, str]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in found.items()
    )
    return f'<table class="environment">{lines}</table>'
