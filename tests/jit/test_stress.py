"""``gpu/stress.py`` recognizes processes that do not end in their task's way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resource", reason="needs limits of other processes")

from effort import PATIENCE_S
from gpu.stress import ENDS, Outcome, Task, Watch

TASK = Task(seed=0, layers=0)


@pytest.mark.parametrize("end", [end for end in ENDS if end != "abort"])
def test_ended_as_it_was_to(end: str) -> None:
    outcome = Outcome(replace(TASK, end=end), ENDS[end], "OK\n", "Deliberate")
    assert (outcome.trouble, outcome.how) == ("", end)


@pytest.mark.parametrize(
    ("signal", "status", "errors"),
    [("SIGKILL", -9, ""), ("SIGTERM", -15, ""), ("SIGINT", -2, "KeyboardInterrupt")],
)
def test_ended_by_a_signal(signal: str, status: int, errors: str) -> None:
    outcome = Outcome(replace(TASK, signal=signal), status, "", errors, signalled=True)
    assert (outcome.trouble, outcome.how) == ("", signal)
    assert replace(outcome, signalled=False).trouble == f"status {status} instead of 0"
    assert replace(outcome, status=-6).trouble == "status -6 instead of 0"
    late = replace(outcome, status=0, output="OK\n")
    assert (late.trouble, late.how) == ("", "return")


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"status": -6}, "status -6 instead of 0"),
        ({"status": -11, "errors": "Fatal Python error: Segmentation fault"}, "wrote 'Fatal"),
        ({"errors": "terminate called without an active exception"}, "wrote 'terminate"),
        ({"output": ""}, "ended before all was done"),
        ({"status": 1, "errors": "AssertionError: output"}, "status 1 instead of 0"),
        ({"task": replace(TASK, end="exception"), "status": 1}, "another exception"),
        ({"hung": True, "status": -6}, "did not end"),
    ],
)
def test_trouble(change: dict[str, Any], trouble: str) -> None:
    outcome = replace(Outcome(TASK, 0, "OK\n", ""), **change)
    assert trouble in outcome.trouble
    assert outcome.how == "trouble"


def test_process_that_aborts(tmp_path: Path) -> None:
    outcome = Watch(tmp_path, PATIENCE_S).run(replace(TASK, end="abort"))
    assert outcome.trouble == "status -6, wrote 'Fatal Python error'"
    assert "in work" in outcome.errors


def test_damaged_entries_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCONV_CACHE_DIR", "")  # pytest restores it afterwards.
    watch = Watch(tmp_path, PATIENCE_S)
    (tmp_path / "shared/key.cubin").write_bytes(b"damaged")
    (tmp_path / "shared/key.0.tmp").touch()
    found = watch.entries()
    assert {"entries": 1, "damaged": 1, "unfinished": 1}.items() <= found["shared"].items()
    assert not any(found["full"].values())
