"""``fastconv verify --random`` on a GPU, in several processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastconv import cli
from fastconv.kernels import planner


def test_random_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "summary.json"
    arguments = ["verify", "--random", "24", "--seed", "5", "--jobs", "2", "--output", str(output)]
    assert cli.main([*arguments, "--device", "cuda"]) == 0, capsys.readouterr().err
    summary = json.loads(output.read_text(encoding="utf-8"))["summary"]
    assert summary["tried"] == 24
    families = {group["name"] for group in summary["groups"] if group["kind"] == "family"}
    assert families <= set(planner.families())
