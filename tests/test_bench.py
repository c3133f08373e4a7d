"""The ``fastconv bench`` command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fastconv import cli
from fastconv.bench import measure
from fastconv.bench.workloads import FOUNDING

SMALL = ["bench", "--device", "cpu", "--divisor", "16", "--repeats", "2"]


def test_checks_and_times_every_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, table = tmp_path / "results.json", tmp_path / "table.md"
    assert cli.main([*SMALL, "--json", str(results), "--markdown", str(table)]) == 0
    written = json.loads(results.read_text(encoding="utf-8"))
    found = [(row["workload"]["name"], row["direction"]) for row in written["rows"]]
    assert found == [(w.name, direction) for w in FOUNDING for direction in measure.PASSES]
    assert {"commit", "torch", "machine"} <= written["environment"].keys()
    for row in written["rows"]:
        assert 0 < row["ours_error"] <= row["bound"]
        assert row["speedup"] == pytest.approx(row["peer_ms"] / row["ours_ms"])
    assert len(re.findall(r"\| ok \|", table.read_text(encoding="utf-8"))) == 9
    shown = capsys.readouterr().out
    assert "speed-up" in shown
    assert all(shown.count(workload.name) == 3 for workload in FOUNDING)


def test_wrong_results_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(measure.ERROR_BOUND, "ieee", 1e-12)
    assert cli.main(SMALL) == 1
    assert "is above the bound 1e-12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--suite", "none"], "none"),
        (["--repeats", "0"], "at least 1, but got 0"),
        (["--divisor", "two"], "two"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert named in capsys.readouterr().err


def test_founding_workloads_have_the_sizes_they_are_known_by() -> None:
    outputs = {workload.name: workload.problem.output_shape for workload in FOUNDING}
    assert outputs == {
        "dilated5x9": (8, 64, 508, 496),
        "asym5x9": (8, 64, 508, 504),
        "square3x3": (16, 128, 1022, 1022),
    }
