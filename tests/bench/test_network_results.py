"""Results of ``fastconv bench --networks``: tables, plots, pages, and files that are damaged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastconv import cli
from fastconv.bench import networks, report, results
from fastconv.bench.network_results import (
    CompiledMean,
    CompiledPair,
    NetworkResults,
    NetworkRow,
    Optimized,
    Overall,
)
from fastconv.bench.networks import INFERENCE, TRAINING
from fastconv.bench.row_timing import Timing
from test_report import _damaged

FLOAT32, BFLOAT16 = (one.name for one in networks.CONFIGURATIONS.values())
DONE = Optimized(53, 50, 49, True, 21, 12.25, 8.0, 6.0, "")


def network_row(network: str, mode: str, ours: float, peer: float, **more: Any) -> NetworkRow:
    return NetworkRow(
        network, mode, FLOAT32, "64x3x224x224", Timing(ours, 0.01, 7, 20.0, extra_mib=100.0),
        Timing(peer, 0.02, 7, 900.0, extra_mib=110.0), optimized=DONE, **more,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Five rows as if measured on a GPU, the last ones skipped and failed."""
    compiled = (
        CompiledPair("default", Timing(5.0, 0.01, 7, 31000.0), Timing(9.0, 0.01, 7, 30000.0)),
        CompiledPair("reduce-overhead", None, Timing(4.0, 0.01, 7, 35000.0), "failed: no memory"),
    )
    rows = [
        network_row("resnet50", TRAINING, 20.0, 25.0),
        network_row("vgg16", TRAINING, 10.0, 10.0),
        network_row("vgg16", INFERENCE, 6.0, 12.0, compiled=compiled, difference=2e-4),
        NetworkRow("vgg19", TRAINING, FLOAT32, skipped="torchvision is not installed"),
        NetworkRow("unet", TRAINING, BFLOAT16, error="out of memory"),
    ]  # fmt: skip
    environment = {"fastconv": "0", "torch": "2", "gpu": "Abacus", "host_path": "native"}
    written = tmp_path / "networks.json"
    NetworkResults(environment, rows).write(written)
    return written


def test_overall() -> None:
    rows = [
        network_row("a", INFERENCE, 10.0, 40.0),
        network_row("b", INFERENCE, 30.0, 30.0),
        NetworkRow("c", INFERENCE, FLOAT32, error="out of memory"),
    ]
    (found,) = NetworkResults({}, rows).overall
    assert found == Overall(INFERENCE, 2, pytest.approx(2.0), 1.75, 1.0, f"b, {FLOAT32}", ())
    assert NetworkResults({}, rows[2:]).overall == []
    pairs = [
        (CompiledPair("default", *(Timing(ms, 0.0, 1, 1.0) for ms in times)),)
        for times in ((1.0, 8.0), (1.0, 2.0))
    ]
    rows = [replace(row, compiled=pair) for row, pair in zip(rows, pairs, strict=False)]
    (found,) = NetworkResults({}, rows).overall
    assert found.compiled == (CompiledMean("default", 2, pytest.approx(4.0)),)


def test_tables(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.md"
    assert cli.main(["report", str(path), "--markdown", str(table)]) == 0
    text = table.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line[:1] == "|"]
    assert lines[2] == (
        f"| resnet50 | training | {FLOAT32} | 64x3x224x224 | 20 ±1% | 25 ±2% | 1.25x |  |  |  |  "
        "|  |  | 50 of 53, fused | 8 / 6 | 12.2 |  | 100 / 110 | 20 / 900 |"
    )
    assert lines[4].split(" | ")[7:17] == [
        "5 ±1%", "9 ±1%", "1.80x", "31.0 / 30.0", "failed", "4 ±1%", "50 of 53, fused", "8 / 6",
        "12.2", "2.0e-04",
    ]  # fmt: skip
    assert lines[0].split(" | ")[7:13] == [
        *report.COMPILED_RIGHT["default"], "fastconv CUDA graphs ms", "PyTorch CUDA graphs ms"
    ]  # fmt: skip
    assert [line.split(" | ")[4] for line in lines[5:]] == ["skipped", "failed"]
    shown = capsys.readouterr().out
    for said in (shown, text):
        assert "Abacus" in said
        assert "host path: native" in said
        assert "training, 2 rows: speed-up 1.12x in the geometric mean, 1.17x of the sums" in said
        assert "vgg19 training float32 tf32 nchw skipped: torchvision is not installed" in said
        assert "unet training bfloat16 autocast nhwc failed: out of memory" in said
        failed = f"vgg16 inference {FLOAT32}, fastconv compiled + CUDA graphs: failed: no memory"
        assert failed in said
    assert f"at least 1.00x (vgg16, {FLOAT32})\n" in text
    assert (
        f"(vgg16, {FLOAT32}); compiled, 1 row: 1.80x over PyTorch's, in the geometric mean\n"
        in text
    )
    assert cli.main(["report", str(path), "--json"]) == 0
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")


def test_unsteady_rows_are_marked() -> None:
    slow, steady = Timing(9.0, 0.2, 7, 1.0), Timing(1.0, 0.01, 7, 1.0)
    pair = CompiledPair("default", steady, slow)
    row = network_row("a", INFERENCE, 1.0, 2.0, compiled=(pair,))
    said = "1 ±1% ms, PyTorch 2 ±2% ms, 2.00x; compiled 9.00x?"
    assert report.network_brief(row) == said
    assert report.unsteady(NetworkResults({}, [row]))
    assert not report.unsteady(NetworkResults({}, [replace(row, compiled=())]))
    said = "1 ±1% ms, PyTorch 9 ±20% ms, 9.00x?"
    assert report.network_brief(replace(row, peer=slow, compiled=())) == said


def test_compiled_networks_that_lose_are_named() -> None:
    fast, slow = Timing(1.0, 0.01, 7, 1.0), Timing(2.0, 0.01, 7, 1.0)
    pairs = (CompiledPair("default", slow, fast), CompiledPair("reduce-overhead", fast, fast))
    results = NetworkResults({}, [network_row("a", INFERENCE, 1.0, 2.0, compiled=pairs)])
    lost = f"Slower than PyTorch: a compiled inference {FLOAT32} 0.50x.\n"
    assert lost in report.markdown(results)


def test_a_plot_and_a_page(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    assert cli.main(["report", str(path), "--quiet", "--plots", str(folder)]) == 0
    assert {one.name for one in folder.iterdir()} == {"speedups.png", "speedups.svg"}
    page = tmp_path / "page.html"
    assert cli.main(["report", str(path), "--quiet", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "skipped: torchvision is not installed" in text
    assert "fastconv compiled + CUDA graphs: failed: no memory.</p>" in text
    assert '<th class="figure" scope="col">compiled speed-up</th>' in text
    assert cli.main(["bench", "--compare", str(path), str(path)]) == 2
    assert "its format is 'fastconv bench --networks 2'" in capsys.readouterr().err


def test_damaged_results_are_refused(path: Path, tmp_path: Path) -> None:
    contents = json.loads(path.read_text(encoding="utf-8"))
    contents["rows"] = contents["rows"][2:3]
    wrong, refused = tmp_path / "damaged.json", []
    for one in _damaged(contents):
        wrong.write_text(json.dumps(one), encoding="utf-8")
        try:
            report.markdown(results.read_any(wrong))
        except results.ResultsError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert not any(re.search(r"__|Error|typing|NoneType", said) for said in refused)
