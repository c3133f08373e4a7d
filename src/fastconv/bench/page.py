"""``fastconv report --html``: one self-contained page with plots and a sortable table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fastconv.bench import plots, report
from fastconv.bench.results import Results, Row, Sum

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
tr.failed td { color: #b3261e; white-space: normal }
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


def html(found: Mapping[Path, Results]) -> str:
    """The whole page, with a section for each file of results."""
    sections = "\n".join(
        _section(f"{path}: " if len(found) > 1 else "", results) for path, results in found.items()
    )
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
{sections}
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _section(name: str, results: Results) -> str:
    figures = "\n".join(
        f"<h2>{escape(name.capitalize())}</h2>\n{plots.inline_svg(draw(results))}"
        for name, draw in plots.PLOTS.items()
    )
    remarks = "\n".join(
        f'<p class="remark">{escape(line[0].upper() + line[1:])}.</p>'
        for line in report.remarks(results)
    )
    return f"""<h1>{escape(name + report.title(results))}</h1>
<p>{escape(report.ceilings(results))}.</p>
{remarks}
{figures}
<h2>Every row</h2>
<p>Click a heading to sort. {escape(report.note(results).capitalize())}. The command that
reproduces a row is the tooltip of its workload.</p>
<div class="scroll">{_table(results)}</div>
<h2>Environment</h2>
{_environment(results.environment)}"""


def _table(results: Results) -> str:
    headings, rows = report.LEFT + report.RIGHT, results.rows
    shown = report.filled([report.row_cells(row) for row in rows], len(headings))
    head = "".join(f'<th{_class(at)} scope="col">{escape(headings[at])}</th>' for at in shown)
    body = "\n".join(_row(row, shown) for row in rows)
    foot = "\n".join(_sum(found, shown) for found in results.sums)  # Sorting moves the body only.
    return (
        f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody>'
        f"<tfoot>\n{foot}\n</tfoot></table>"
    )


def _sum(found: Sum, shown: Sequence[int]) -> str:
    """The row of a sum, with the columns that are shown."""
    cells, kind = report.sum_cells(found), "faster" if found.speedup >= 1 else "slower"
    return f'<tr class="{kind}">{"".join(_cell(at, cells[at], "") for at in shown)}</tr>'


def _row(row: Row, shown: Sequence[int]) -> str:
    """The row of a case; if it failed, the reason takes the place of all figures."""
    cells, tooltip = report.row_cells(row), f' title="{escape(row.command)}"'
    if row.error is not None:
        kind, shown, rest = "failed", shown[: len(report.LEFT)], len(shown) - len(report.LEFT)
        failure = f'<td colspan="{rest}">{escape(f"failed: {row.error}")}</td>'
    else:
        kind, failure = "faster" if (row.speedup or 0) >= 1 else "slower", ""
    made = "".join(_cell(at, cells[at], tooltip) for at in shown)
    return f'<tr class="{kind}">{made}{failure}</tr>'


def _cell(number: int, text: str, tooltip: str) -> str:
    """The cell of a column; ``data-value`` is what its column is sorted by."""
    extra = tooltip if number == 0 else ""
    value = escape(text if number < len(report.LEFT) else text.split(" ")[0])
    return f'<td{_class(number)}{extra} data-value="{value}">{escape(text)}</td>'


def _class(number: int) -> str:
    """The class attribute of a column's cells; the columns of text have none."""
    if number < len(report.LEFT):
        return ""
    named = " speedup" if report.RIGHT[number - len(report.LEFT)] == "speed-up" else ""
    return f' class="figure{named}"'


def _environment(found: dict[str, str]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in found.items()
    )
    return f'<table class="environment">{lines}</table>'
