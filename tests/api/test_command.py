"""The ``fastconv`` command as a program: outputs, interruptions, pipes, and what ships."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

import fastconv
from _fastconv_command import choices
from fastconv import cli, files
from fastconv.bench import (
    campaign,
    configurations,
    limits,
    measure,
    page,
    plots,
    tune,
    written_networks,
)
from fastconv.bench.cases import Case
from fastconv.bench.contestants import PEERS
from fastconv.bench.results import Row
from fastconv.bench.trials import Trial
from fastconv.bench.verify import Check
from fastconv.commands import common, demo
from fastconv.exporter import ExportError, file
from fastconv.jit import cache
from fastconv.kernels.family import Plan
from fastconv.kernels.gpus import GPUS
from fastconv.workloads import SUITES

ROOT = Path(__file__).parents[2]
SHAPE = "1x2x6x6 3x2x3x3"
BENCH = ["bench", "--device", "cpu", "--repeats", "1", "--row-seconds", "0", "--shape", SHAPE]
SHOWN = ["--pass", "forward"]

pytestmark = pytest.mark.usefixtures("_small_ceilings")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    assert cli.main([*BENCH, *SHOWN, "--quiet", "--output", str(path)]) == 0
    return path


def _tuning(monkeypatch: pytest.MonkeyPatch, tuned: Callable[[Case], tune.Tuned]) -> None:
    """Has ``fastconv tune`` find a GPU, and return the given choices."""
    monkeypatch.setattr(common, "select_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(tune, "build", lambda cases, device: None)
    monkeypatch.setattr(tune, "tune", lambda case, device, effort: tuned(case))


def _unreachable(*arguments: Any, **others: Any) -> Any:
    raise AssertionError("this is done before the output is checked")


# --- Outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["missing/file", "folder", "results.json/file", "x" * 300])
@pytest.mark.parametrize(
    "command", ["bench", "markdown", "html", "plots", "export", "tune", "verify"]
)
def test_outputs_are_checked_before_the_work(
    command: str,
    where: str,
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command == "plots" and where in ("missing/file", "folder"):
        pytest.skip("a folder is what it wants")
    path = results.parent / where
    (results.parent / "folder").mkdir()
    _tuning(monkeypatch, _unreachable)
    for module, function in (
        (limits, "measure"), (tune, "build"), (plots, "write"), (page, "html"), (file, "compose"),
        (campaign, "run"),
    ):  # fmt: skip
        monkeypatch.setattr(module, function, _unreachable)
    capsys.readouterr()
    arguments = {
        "bench": [*BENCH, "--output"],
        "export": ["export", "--shape", SHAPE, "-o"],
        "tune": ["tune", "--shape", SHAPE, "--output"],
        "verify": ["verify", "--device", "cpu", "--random", "4", "--output"],
    }.get(command, ["report", str(results), f"--{command}"])
    assert cli.main([*arguments, str(path)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("fastconv: cannot write ")
    assert str(path) in line
    assert captured.out == ""


def test_functions_check_their_outputs_as_well(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="there is no folder"):
        fastconv.export(shape=SHAPE, output=tmp_path / "missing" / "model.py")


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        (["report", "results.json", "--markdown", "results.json"], "read"),
        (["report", "results.json", "--markdown", "link.json"], "read"),
        (["report", "results.json", "--markdown", "page", "--html", "page"], "written"),
        ([*BENCH, "--suite", "results.json", "--output", "results.json"], "read"),
        (["export", "--reference", "results.json", "-o", "results.json"], "read"),
    ],
)
def test_nothing_is_written_over_what_is_read(
    arguments: list[str],
    use: str,
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(results.parent)
    if "--suite" in arguments:
        results.write_text('[{"input": [1, 1, 8, 8], "weight": [1, 1, 3, 3]}]', encoding="utf-8")
    Path("link.json").symlink_to("results.json")
    before = results.read_text(encoding="utf-8")
    capsys.readouterr()
    assert cli.main(arguments) == 2
    assert f"it is to be {use} as well" in capsys.readouterr().err
    assert results.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("exists", [True, False])
def test_links_are_written_through(results: Path, exists: bool) -> None:
    folder = results.parent / "elsewhere"
    folder.mkdir()
    target, link = folder / "target", results.parent / "link"
    if exists:
        target.write_text("old", encoding="utf-8")
        target.chmod(0o640)
    link.symlink_to(target)
    for arguments in (
        [*BENCH, *SHOWN, "--output"],
        ["report", str(results), "--quiet", "--markdown"],
        ["export", "--shape", SHAPE, "-o"],
    ):
        assert cli.main([*arguments, str(link)]) == 0
        assert link.is_symlink()
        assert len(target.read_text(encoding="utf-8")) > 100
        assert target.stat().st_mode & 0o777 == 0o640 or not exists
        assert [path.name for path in folder.iterdir()] == ["target"]  # no temporary file is left
        target.write_text("", encoding="utf-8")


def test_pipes_are_written_to_once(tmp_path: Path) -> None:
    """Devices and pipes are not replaced; a reader gets the results once, not after each row."""
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text(encoding="utf-8")))
    reader.start()
    assert cli.main([*BENCH, "--quiet", "--output", str(pipe)]) == 0
    reader.join()
    assert pipe.is_fifo()
    assert len(json.loads(read[0])["rows"]) == 3


def test_what_is_open_is_not_replaced() -> None:
    assert not files.replaceable(Path("/dev/stdout"))
    assert not files.replaceable(Path("/proc/self/fd/1"))


def test_a_full_disk_loses_nothing(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, replace, calls = results.read_text(encoding="utf-8"), cache.replace, []

    def full(path: Path, contents: bytes) -> None:
        calls.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(cache, "replace", full)
    capsys.readouterr()
    assert cli.main([*BENCH, *SHOWN, "--quiet", "--output", str(results)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"fastconv: cannot write {results}: No space left on device")
    assert "forward" in captured.out  # The table is printed all the same.
    assert calls
    assert results.read_text(encoding="utf-8") == before
    monkeypatch.setattr(cache, "replace", replace)


def test_plots_that_fail_are_named(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = results.parent / "plots"
    (folder / "roofline.png").mkdir(parents=True)
    monkeypatch.setattr(plots, "write", _unreachable)
    assert cli.main(["report", str(results), "--plots", str(folder)]) == 2
    assert "roofline.png: it is a folder" in capsys.readouterr().err


# --- The standard output --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["info", "--device", "cpu"], [*BENCH, "--quiet"], ["--help"]])
def test_readers_may_leave(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert cli.main(command) == 141
    # Closing the stream raises nothing; otherwise Python would print an error as it exits.
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_output_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["info", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "fastconv: cannot write the output: No space left on device\n"


def test_tables_replace_characters_that_cannot_be_shown(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascii = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii)
    assert cli.main(["report", str(results)]) == 0
    assert b"speed-up" in ascii.buffer.getvalue()


# --- Interruptions --------------------------------------------------------------------------------

# Sends itself Ctrl-C when PyTorch is about to be imported.
INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore it

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
import _fastconv_command
sys.exit(_fastconv_command.main())
"""


def _without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process in which importing PyTorch, or fastconv, is an error."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import _fastconv_command\n"
        "sys.exit(_fastconv_command.main())"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    ["", "bench", "report", "verify", "demo", "info", "tune", "build", "cache", "export"]
    + [f"cache {action}" for action in ("list", "export", "import", "clear")],
)
def test_help_does_not_wait_for_pytorch(command: str) -> None:
    done = _without_torch(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {f'fastconv {command}'.strip()} ")


def test_version_does_not_wait_for_pytorch() -> None:
    done = _without_torch("--version")
    assert (done.returncode, done.stdout, done.stderr) == (
        0, f"fastconv {fastconv.__version__}\n", ""
    )  # fmt: skip


def test_wrong_arguments_do_not_wait_for_pytorch() -> None:
    done = _without_torch("bench", "--dtype", "int8")
    assert done.returncode == 2
    assert "int8" in done.stderr
    # A command that does something imports PyTorch: the check above can fail.
    assert "ModuleNotFoundError" in _without_torch("info").stderr


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "fastconv", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"fastconv {fastconv.__version__}\n"


def test_choices_are_those_of_the_package() -> None:
    """Tables by name, which the parser cannot import."""
    assert tuple(PEERS) == choices.PEERS
    assert tuple(SUITES) == choices.SUITES
    assert tuple(written_networks.NETWORKS) == choices.WRITTEN
    assert tuple(GPUS) == choices.GPUS


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals")
def test_ctrl_c_while_pytorch_is_imported() -> None:
    command = [sys.executable, "-c", INTERRUPTED, "info"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_command_starts_there() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'fastconv = "_fastconv_command:main"' in text


@pytest.mark.parametrize(
    ("module", "function", "command"),
    [
        (limits, "measure", BENCH),
        (configurations, "planned", ["info", "--device", "cpu", "--shape", SHAPE]),
        (file, "compose", ["export", "--shape", SHAPE]),
    ],
)
def test_ctrl_c_before_there_is_anything_to_keep(
    module: Any,
    function: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupt)
    output = tmp_path / "output"
    output.write_text("old", encoding="utf-8")
    more = [] if command[0] == "info" else ["--output", str(output)]
    assert cli.main([*command, *more]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "fastconv: interrupted"
    assert output.read_text(encoding="utf-8") == "old"


def test_ctrl_c_between_rows_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C comes just after a row was measured, while it is written."""
    replace, rows = cache.replace, []

    def interrupted(path: Path, contents: bytes) -> None:
        rows.append(path)
        if len(rows) == 2:
            raise KeyboardInterrupt
        replace(path, contents)

    monkeypatch.setattr(cache, "replace", interrupted)
    path = tmp_path / "results.json"
    assert cli.main([*BENCH, "--output", str(path)]) == 130
    assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == 2
    assert "input_grad" in capsys.readouterr().out


def test_an_error_of_ours_loses_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = measure.Bench.row

    def row(self: measure.Bench, case: Case) -> Row:
        if case.direction == "weight_grad":
            raise ZeroDivisionError
        return original(self, case)

    monkeypatch.setattr(measure.Bench, "row", row)
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        cli.main([*BENCH, "--quiet"])
    assert "input_grad" in capsys.readouterr().out


# --- The demo -------------------------------------------------------------------------------------


def test_the_demo_says_what_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "CPU_DIVISOR", 128)
    monkeypatch.setattr(demo, "CPU_ROW_SECONDS", 0)
    folder = tmp_path / "demo"
    assert cli.main(["demo", "--device", "cpu", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "$ fastconv verify --suite founding --device cpu --divisor 128" in shown
    assert "$ fastconv bench --suite founding --device cpu --divisor 128 --row-seconds 0" in shown
    last = shown.splitlines()[-1]
    assert last.startswith("9 of 9 results agree with float64; on a CPU with ")
    assert "fastconv computes 9 passes at " in last
    assert "these times say nothing about a GPU." in last
    assert last.endswith(
        f"The page {folder}/page.html shows it, with plots ({folder}/speedups.svg)."
    )
    sentence = last.partition(" The page")[0]
    assert f'<p class="lead">{escape(sentence)}</p>' in (folder / "page.html").read_text("utf-8")
    made = {"verify.json", "bench.json", "page.html"}
    made |= {f"{name}.{kind}" for name in ("speedups", "roofline") for kind in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == made


def test_the_demo_fails_with_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "CPU_DIVISOR", 128)
    monkeypatch.setattr(demo, "CPU_ROW_SECONDS", 0)
    monkeypatch.setattr(campaign, "run", lambda selected, *_: map(_wrong, selected))
    assert cli.main(["demo", "--device", "cpu", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of 9 results agree with float64")


def _wrong(trial: Trial) -> Check:
    return Check(trial, failure="wrong")


# --- Rows that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["info"], ["bench", "--dry-run"]])
def test_a_case_without_a_plan_hides_no_other(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = configurations.planned

    def planned(case: Case, gpu: Any) -> Any:
        if case.direction == "input_grad":
            raise ValueError("no plan\nof 3 lines")
        return original(case, gpu)

    monkeypatch.setattr(configurations, "planned", planned)
    assert cli.main([*command, "--device", "cpu", "--shape", SHAPE]) == 1
    shown = capsys.readouterr().out
    assert "  failed: ValueError: no plan\n" in shown
    assert f"{SHAPE} weight_grad" in shown


def _tuned(case: Case) -> tune.Tuned:
    if case.direction == "input_grad":
        raise torch.OutOfMemoryError("CUDA out of memory")
    names = [Plan((), 0, "hopper", "", key=case.direction, choice=one) for one in ("rule", "other")]
    return tune.Tuned(case, names, [2.0, 1.0])


def test_tuning_keeps_each_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _tuning(monkeypatch, _tuned)
    table = tmp_path / "table.json"
    table.write_text('{"known": "choice"}', encoding="utf-8")
    assert cli.main(["tune", "--shape", SHAPE, "--output", str(table)]) == 1
    captured = capsys.readouterr()
    assert "failed: out of memory" in captured.err
    assert captured.out == f"2 of 3 rows improved, 1 failed; written to {table}\n"
    kept = {"forward": "other", "known": "choice", "weight_grad": "other"}
    assert json.loads(table.read_text(encoding="utf-8")) == kept


def test_tuning_adds_to_tables_only(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _tuning(monkeypatch, _unreachable)
    assert cli.main(["tune", "--shape", SHAPE, "--output", str(results)]) == 2
    assert "holds no table of fastconv tune" in capsys.readouterr().err
    json.loads(results.read_text(encoding="utf-8"))


# --- What ships -----------------------------------------------------------------------------------


def test_the_source_distribution_has_everything() -> None:
    """The source distribution has every file that is under version control."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[tool.hatch.build.targets.sdist]")[2].partition("\n[")[0]
    included = set(re.findall(r'"/([^"]+)"', section))
    assert {"Makefile", "constraints.txt", ".clang-format"} <= included
    assert all((ROOT / name).exists() for name in included)
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        assert {name.partition("/")[0] for name in listed} == included
