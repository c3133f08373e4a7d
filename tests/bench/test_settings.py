"""Wrong values of environment variables are reported at once, and `info` shows what is set."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fastconv import cli
from fastconv.bench import settings

PAGE = Path(__file__).parents[2] / "docs" / "environment.md"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for line in settings.in_force():
        monkeypatch.delenv(line.partition("=")[0])
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path))


def test_all_variables_are_known() -> None:
    rows = re.findall(r"^\| `(FASTCONV_[A-Z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(rows) == sorted(settings.KNOWN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FASTCONV_NATIVE", "2"),
        ("FASTCONV_COMPILE_JOBS", "0"),
        ("FASTCONV_COMPILE_PROCESSES", "-1"),
        ("FASTCONV_BUILD_TIMEOUT", "soon"),
    ],
)
def test_a_wrong_value_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert cli.main(["info", "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"fastconv: {name} should be ")
    assert line.endswith(f"but got {value!r}")


def test_info_shows_what_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTCONV_COMPILE_JOBS", "3")
    monkeypatch.setenv("FASTCONV_COMPILE_JOB", "4")
    monkeypatch.setenv("FASTCONV_BUILD_TIMEOUT", "")
    assert cli.main(["info", "--device", "cpu"]) == 0
    *_, folder, unknown, jobs = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"settings +FASTCONV_CACHE_DIR={re.escape(str(tmp_path))}", folder)
    assert unknown.strip() == "FASTCONV_COMPILE_JOB=4 (fastconv reads no such variable)"
    assert jobs.strip() == "FASTCONV_COMPILE_JOBS=3"
    assert cli.main(["info", "--device", "cpu", "--json"]) == 0
    assert "FASTCONV_COMPILE_JOBS=3" in json.loads(capsys.readouterr().out)["settings"]
