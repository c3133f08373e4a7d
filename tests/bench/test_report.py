"""``fastconv report``: tables, plots, and the page as a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from effort import PATIENCE_S
from fastconv import cli
from fastconv.bench.cases import PASSES, Case
from fastconv.bench.limits import Ceilings, Limit
from fastconv.bench.network_results import NetworkResults, NetworkRow, Optimized
from fastconv.bench.results import HostResults, HostRow, HostTiming, Results, Row
from fastconv.bench.row_timing import Timing
from fastconv.workloads import FOUNDING

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Nine rows as if measured on a GPU, the last of them failed."""
    rows = [
        Row(
            Case(workload, direction, "float32", "ieee", "nchw"),
            f"fastconv bench --shape '{workload.shape}' <&>",
            Timing(8.0 + number, 0.01, 7, 900.0, 20.0, 1.5),
            Timing(16.0, 0.02, 7, 300.0, 30.0, 0.0),
            "PyTorch",
            Limit("compute", 7.2, workload.problem.flops, 10**9),
            1.25,
        )
        for number, (workload, direction) in enumerate((w, d) for w in FOUNDING for d in PASSES)
    ]
    rows[-1] = Row(rows[-1].case, rows[-1].command, error="out of memory <script>")
    environment = {"fastconv": "0", "commit": "abc", "torch": "2", "gpu": "Abacus", "threads": "1"}
    path = tmp_path / "results.json"
    Results(environment, Ceilings({"float32 ieee": 51.0}, 4.3), rows, 12.0).write(path)
    return path


@pytest.fixture
def host_times(tmp_path: Path) -> Path:
    """Three rows of host times: one measured, one skipped, one failed."""
    ours, peer = HostTiming(12.5, 12.25, 13.0, 100), HostTiming(10000.0, 9000.0, 12000.0, 100)
    rows = [
        HostRow("small_forward", "forward | no_grad", ours, peer),
        HostRow("resnet50_step", "a step", skipped="torchvision is not installed"),
        HostRow("resnet50_inference", "inference", error="out of memory"),
    ]
    environment = {"fastconv": "0", "torch": "2", "gpu": "Abacus", "host_path": "Python"}
    path = tmp_path / "host.json"
    HostResults(environment, rows).write(path)
    return path


def test_table_of_host_times(
    host_times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"
    assert cli.main(["report", str(host_times), "--markdown", str(table)]) == 0
    text = table.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line[:1] == "|"]
    assert lines[2:] == [
        r"| small_forward | forward \| no_grad | 12.5 (12.2 to 13.0) | 10000 (9000 to 12000) "
        "| 0.00? |",
        "| resnet50_step | a step | skipped | skipped |  |",
        "| resnet50_inference | inference | failed | failed |  |",
    ]
    shown = capsys.readouterr().out
    for said in (shown, text):
        assert "Abacus" in said
        assert "host path: Python" in said
        assert "samples spread by more than 10%" in said
        assert "resnet50_step skipped: torchvision is not installed" in said
        assert "resnet50_inference failed: out of memory" in said
    assert cli.main(["report", str(host_times), "--json"]) == 0
    assert capsys.readouterr().out == host_times.read_text(encoding="utf-8")


def test_host_times_have_no_plots(
    host_times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(host_times), "--plots", str(tmp_path / "made")]) == 2
    assert "holds host times, of which there are no plots" in capsys.readouterr().err
    assert cli.main(["bench", "--compare", str(host_times), str(host_times)]) == 2
    assert "its format is 'fastconv bench --host 1'" in capsys.readouterr().err


def test_terminal_table(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(results)]) == 0
    shown = capsys.readouterr().out
    for text in ("dilated5x9", "2.00x", "90%", "20 / 30", "out of memory", "copy 4.3 TB/s"):
        assert text in shown


def test_markdown(results: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    assert cli.main(["report", str(results), "--quiet", "--markdown", str(table)]) == 0
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert len(lines) == 2 + 9
    assert len({line.count("|") for line in lines}) == 1


def test_what_is_slower_is_listed(results: Path, host_times: Path, tmp_path: Path) -> None:
    table, contents = tmp_path / "table.md", json.loads(results.read_text())
    assert cli.main(["report", str(results), "--quiet", "--markdown", str(table)]) == 0
    assert "\nSlower than PyTorch: none.\n" in table.read_text(encoding="utf-8")
    for at, ms in (
        (1, 20.0),
        (4, 32.0),
        (5, 16.01),
    ):  # The peer takes 16; the last rounds to 1.00x.
        contents["rows"][at]["ours"]["ms"] = ms
    results.write_text(json.dumps(contents))
    assert cli.main(["report", str(results), "--quiet", "--markdown", str(table)]) == 0
    slower = (
        "\nSlower than PyTorch: asym5x9 input_grad float32 ieee nchw 0.50x, "
        "dilated5x9 input_grad float32 ieee nchw 0.80x.\n"
    )
    assert slower in table.read_text(encoding="utf-8")


def test_roofs_of_a_roofline() -> None:
    plots = pytest.importorskip("fastconv.bench.plots")
    ours, peer = Timing(1.0, 0.01, 7, 1.0), Timing(2.0, 0.01, 7, 1.0)
    limit = Limit("compute", 1.0, 4 * 10**11, 10**9)
    rows = [
        Row(
            Case(FOUNDING[0], direction, "float32", "tf32", "nchw"), "", ours, peer, "PyTorch",
            limit, own_limit=own,
        )
        for direction, own in (
            ("forward", Limit("scaled fp16", 0.5, 4 * 10**11, 10**9)),
            ("input_grad", Limit("memory", 1.0, 4 * 10**11, 10**9)),
            ("weight_grad", None),
            ("step", Limit("MMAs", 0.75, 4 * 10**11, 10**9)),
        )
    ]  # fmt: skip
    ceilings = Ceilings({"float32 tf32": 400.0, "float16": 800.0}, 4.0)
    roofs = plots._roofs(ceilings, rows)
    assert roofs == pytest.approx(
        {("float32 tf32", ""): 400.0, ("float32 tf32", "scaled fp16"): 800.0}
    )
    names = {("bfloat16", ""): 810.0, **roofs}
    assert [text for text, _ in plots._labels(names)] == [
        "float32 tf32: 400 TFLOP/s",
        "float32 tf32, scaled fp16: 800; bfloat16: 810 TFLOP/s",
    ]


def test_several_files(
    results: Path, host_times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, paths = tmp_path / "table.md", [str(host_times), str(results)]
    assert cli.main(["report", *paths, "--markdown", str(table)]) == 0
    shown, text = capsys.readouterr().out, table.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line[:2] == "##"] == [f"## {p}" for p in paths]
    for said in (shown, text):
        first, second = (said.index(path) for path in paths)
        assert first < said.index("small_forward") < second < said.index("dilated5x9")
    alone = []
    for path in paths:
        assert cli.main(["report", path, "--quiet", "--markdown", str(table)]) == 0
        alone.append(table.read_text(encoding="utf-8"))
    assert text == "\n".join(f"## {p}\n\n{one}" for p, one in zip(paths, alone, strict=True))


def test_several_files_as_json(
    results: Path, host_times: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(results), str(host_times), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        json.loads(path.read_text(encoding="utf-8")) for path in (results, host_times)
    ]


def test_plots_and_a_page_of_several_files(
    results: Path, host_times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    other, folder, page = tmp_path / "other.json", tmp_path / "plots", tmp_path / "page.html"
    shutil.copy(results, other)
    made = ["--quiet", "--plots", str(folder), "--html", str(page)]
    assert cli.main(["report", str(results), str(other), *made]) == 0
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.svg")} == {
        f"{name}/{plot}.svg" for name in ("results", "other") for plot in ("speedups", "roofline")
    }
    text = page.read_text(encoding="utf-8")
    assert text.count('<table class="sortable">') == text.count("<h1>") == 2
    assert text.index(f"<h1>{results}: fastconv") < text.index(f"<h1>{other}: fastconv")
    same_name = tmp_path / "folder" / "other.json"
    same_name.parent.mkdir()
    shutil.copy(results, same_name)
    assert cli.main(["report", str(other), str(same_name), *made]) == 2
    assert f"of {other} and of {same_name} would both go to" in capsys.readouterr().err
    assert cli.main(["report", str(results), str(host_times), *made]) == 2
    assert f"{host_times} holds host times, of which there are no plots" in capsys.readouterr().err


def test_a_file_without_results_is_named(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, table = tmp_path / "wrong.json", tmp_path / "table.md"
    wrong.write_text('{"format": "else"}', encoding="utf-8")
    absent = tmp_path / "absent.json"
    for path in (wrong, absent):
        assert cli.main(["report", str(results), str(path), "--markdown", str(table)]) == 2
        captured = capsys.readouterr()
        assert str(path) in captured.err
        assert captured.err.count("\n") == 1
        assert not captured.out
        assert not table.exists()
    command = ["report", str(results), str(wrong), "--markdown", str(results)]
    wrong.write_bytes(results.read_bytes())
    before = results.read_bytes()
    assert cli.main(command) == 2
    assert results.read_bytes() == before


def test_page_of_every_kind_of_results(results: Path, host_times: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, networks = tmp_path / "page.html", tmp_path / "networks.json"
    ours, peer = Timing(8.0, 0.01, 7, 900.0), Timing(16.0, 0.02, 7, 300.0)
    optimized = Optimized(53, 50, 0, False, 50, 1.5, 10.0, 5.0, "")
    rows = [
        NetworkRow("resnet50", "training", "float32", "8x3x32x32", ours, peer, optimized=optimized),
        NetworkRow("vgg16", "training", "float32", skipped="the time limit <was> reached"),
    ]
    NetworkResults({"gpu": "Abacus", "host_path": "Python"}, rows).write(networks)
    paths = [str(results), str(host_times), str(networks)]
    assert cli.main(["report", *paths, "--quiet", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    first, second, third = (text[text.index(f"<h1>{path}") :] for path in paths)
    for part, expected in (
        (first, "dilated5x9"),
        (second, '<td class="figure speedup" data-value="0.00?">0.00?</td>'),
        (second, '<tr class="skipped"><td data-value="resnet50_step">resnet50_step</td>'),
        (second, '<td colspan="3">failed: out of memory</td>'),
        (third, '<td class="figure speedup" data-value="2.00x">2.00x</td>'),
        (third, "skipped: the time limit &lt;was&gt; reached"),
        (third, "Training, 1 row: speed-up 2.00x in the geometric mean"),
    ):
        assert expected in part
    assert text.count("<svg") == 3  # Two plots of the first file, one of the networks.
    assert len(re.findall("<tr class=", text)) == 9 + 3 + 2


def test_unsteady_rows_are_marked(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = json.loads(results.read_text(encoding="utf-8"))
    contents["rows"][1]["peer"]["spread"] = 0.2
    results.write_text(json.dumps(contents), encoding="utf-8")
    table = tmp_path / "table.md"
    assert cli.main(["report", str(results), "--markdown", str(table)]) == 0
    for text in (capsys.readouterr().out, table.read_text(encoding="utf-8")):
        assert "1.78x?" in text
        assert text.count("x?") == 1
        assert "samples spread by more than 10%, as on a busy machine" in text


def test_page_and_plots_say_that_the_machine_was_busy(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contents = json.loads(results.read_text(encoding="utf-8"))
    contents["ceilings"]["processor_share"] = 0.25
    results.write_text(json.dumps(contents), encoding="utf-8")
    page = tmp_path / "page.html"
    assert cli.main(["report", str(results), "--quiet", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert '<p class="remark">This machine is busy: threads got 25%' in text
    assert text.count("this machine is busy") == 2  # Once in the title of each plot.


def _damaged(value: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with one part missing or of another type, at any depth."""
    yield from (None, -1, "x", [1], float("nan"))
    if isinstance(value, dict):
        for key, part in value.items():
            yield {name: one for name, one in value.items() if name != key}
            yield from ({**value, key: other} for other in _damaged(part))
        yield {**value, "unknown": 1}
    elif isinstance(value, list) and value:
        yield from ([other, *value[1:]] for other in _damaged(value[0]))


def test_damaged_host_times_end_with_a_line(
    host_times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = json.loads(host_times.read_text(encoding="utf-8"))
    damaged, table = tmp_path / "damaged.json", tmp_path / "table.md"
    statuses = []
    for other in _damaged(contents):
        damaged.write_text(json.dumps(other), encoding="utf-8")
        statuses.append(cli.main(["report", str(damaged), "--quiet", "--markdown", str(table)]))
        said = capsys.readouterr().err
        assert statuses[-1] == 0 or (statuses[-1] == 2 and said.count("\n") == 1), said
        assert not re.search(r"__|Error|typing|NoneType", said), said
    assert 2 * statuses.count(2) > len(statuses) > 50


def test_damaged_results_end_with_a_line(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = json.loads(results.read_text(encoding="utf-8"))
    contents["rows"] = contents["rows"][:1]
    damaged, table = tmp_path / "damaged.json", tmp_path / "table.md"
    statuses = []
    for number, other in enumerate(_damaged(contents)):
        damaged.write_text(json.dumps(other), encoding="utf-8")
        command = (
            ["report", str(damaged), "--quiet", "--markdown", str(table)],
            ["bench", "--compare", str(results), str(damaged)],
        )[number % 2]
        status = cli.main(command)
        said = capsys.readouterr().err
        assert status == 0 or (status == 2 and said.count("\n") == 1), (command, said)
        assert not re.search(r"__|Error|typing|NoneType", said), said
        statuses.append(status)
    assert 2 * statuses.count(2) > len(statuses) > 200


def test_plots(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    assert cli.main(["report", str(results), "--quiet", "--plots", str(folder)]) == 0
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert written.keys() == {"speedups.png", "speedups.svg", "roofline.png", "roofline.svg"}
    assert all(written[name].startswith(b"\x89PNG") for name in written if name.endswith("png"))
    assert all(b"<svg" in written[name] for name in written if name.endswith("svg"))


@pytest.fixture
def page(results: Path, tmp_path: Path) -> Path:
    pytest.importorskip("matplotlib")
    path = tmp_path / "page.html"
    assert cli.main(["report", str(results), "--quiet", "--html", str(path)]) == 0
    return path


def test_page_loads_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    assert "@import" not in text
    assert "<script>" in text
    assert "out of memory &lt;script&gt;" in text


def browse(page: Path, tmp_path: Path, *arguments: str) -> str:
    """What headless Chromium prints for the page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}", *arguments, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=PATIENCE_S, check=True
    )
    return done.stdout


def test_page_sorts_in_a_browser(page: Path, tmp_path: Path) -> None:
    """The page, with a script at its end that sorts by every column, then by speed-up, twice."""
    click = (
        "<script>document.querySelectorAll('.sortable th').forEach(head => head.click());"
        "for (let i = 0; i < 2; i++) document.querySelector('th.speedup').click()"
    )
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{click}</script></body>"), encoding="utf-8")
    shown = browse(page, tmp_path, "--dump-dom")
    assert 'aria-sort="descending"' in shown
    speedups = [float(value) for value in re.findall(r'speedup" data-value="([\d.]+)x"', shown)]
    assert len(speedups) == 8
    assert speedups == sorted(speedups, reverse=True)
    assert shown.count("<svg") == 2


def test_page_is_drawn(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(page, tmp_path, "--window-size=1400,2400", f"--screenshot={picture}")
    assert picture.stat().st_size > 50_000
