"""Measuring in several calls, on a CPU with tiny layers; and what makes figures out of date."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import made_up
from fastconv.bench import networks, results
from fastconv.bench.cases import Case
from fastconv.bench.environment import COMMIT_VARIABLE
from fastconv.bench.measure import Bench
from fastconv.bench.network_results import NetworkRow
from fastconv.bench.networks import NetworkCase
from fastconv.bench.results import Results, Row
from fastconv.kernels import planner
from fastconv.kernels.family import Kernel
from fastconv.kernels.gpus import H200
from fastconv.timing import Effort
from fastconv.workloads import Workload, parse_shape
from results import __main__ as command
from results import catalogue, keeping, kernelbench, layers, others, sources
from results.keeping import Keeper, Late
from results.layers import Section
from results.sources import DirtyError

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _small_ceilings: None) -> Path:
    """The folder of a CPU's figures, which are of tiny layers."""
    tiny = [parse_shape("1x4x8x8 4x4x3x3"), parse_shape("2x4x8x8 4x4x1x3")]
    monkeypatch.setitem(layers.SUITES, "tiny", tiny)
    section = Section(
        "Tiny", ("tiny",), (), ("forward", "weight_grad"), ("float32 ieee",), ("nchw",)
    )
    monkeypatch.setattr(layers, "_ON_CPU", (section,))
    monkeypatch.setattr(layers, "CPU_DIVISOR", 1)
    monkeypatch.setitem(layers.EFFORT, "cpu", Effort(3, 0.01))
    monkeypatch.setattr(catalogue, "RESULTS", tmp_path)
    monkeypatch.setenv(COMMIT_VARIABLE, "0123456789")
    (tmp_path / "cpu").mkdir()
    return tmp_path / "cpu"


def _measure(folder: Path, seconds: float = 1000.0) -> None:
    (job,) = catalogue.jobs(folder)
    layers.measure(job, folder, CPU, time.monotonic() + seconds)


def _late_after(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the time of a call when so many rows are measured."""
    real = Keeper.check

    def check(self: Keeper[Any], seconds: float) -> None:
        if len(self.found.rows) >= rows:
            raise Late
        real(self, seconds)

    monkeypatch.setattr(Keeper, "check", check)


def test_a_second_call_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        _late_after(3, patched)
        with pytest.raises(Late):
            _measure(folder)
    first = results.read(folder / "layers.json")
    assert len(first.rows) == 3
    (file,) = catalogue.jobs(folder)[0].files
    assert file.state(folder) == "1 of 4 rows are left"
    _measure(folder)
    both = results.read(folder / "layers.json")
    assert both.rows[:3] == first.rows
    assert [row.case.direction for row in both.rows] == ["forward", "weight_grad"] * 2
    assert len(both.measured) == 4
    assert both.environment["commit"] == "0123456789"
    assert "resumed" in both.environment
    assert both.ceilings_after is not None
    assert file.state(folder) == ""


def test_no_time_at_all(folder: Path) -> None:
    with pytest.raises(Late):
        _measure(folder, seconds=0.0)
    assert not (folder / "layers.json").exists()


def test_kernels_in_the_cache_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends soon still measures a section whose kernels are compiled."""
    kernels = [Kernel(f"{i}.cuh", "entry", ()) for i in range(9)]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    in_cache: list[Kernel] = []
    monkeypatch.setattr(layers, "cached_cubin", lambda one, _: b"" if one in in_cache else None)
    assert layers._compile_seconds(kernels, H200) == 5 * layers.COMPILE_SECONDS
    in_cache += kernels[:8]
    assert layers._compile_seconds(kernels, H200) == layers.COMPILE_SECONDS
    in_cache += kernels[8:]
    assert layers._compile_seconds(kernels, H200) == 0


def test_a_lost_exception_ends_a_call_before_the_next_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ignores what is raised in some callbacks, as of weak references."""
    monkeypatch.setattr(keeping, "_asked_to_end", False)
    real = layers._rows

    def rows(bench: Any, case: Any) -> Any:
        if case.direction == "weight_grad":
            with suppress(SystemExit):
                keeping.end_when_asked()
        return real(bench, case)

    monkeypatch.setattr(layers, "_rows", rows)
    with pytest.raises(SystemExit):
        _measure(folder)
    assert len(results.read(folder / "layers.json").rows) == 2


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_call_keeps_its_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    real = layers._rows

    def rows(bench: Any, case: Any) -> Any:
        if case.direction == "weight_grad":
            raise end
        return real(bench, case)

    monkeypatch.setattr(layers, "_rows", rows)
    with pytest.raises(end):
        _measure(folder)
    assert len(results.read(folder / "layers.json").rows) == 1


def test_a_fault_of_a_kernel_is_a_failed_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing memory then raises, too; the next row would as well."""

    def fail(self: Bench, case: Case) -> Row:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(Bench, "row", fail)
    _measure(folder)
    rows = results.read(folder / "layers.json").rows
    why = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [row.error for row in rows] == [why] * 4


def test_rows_of_other_sources_are_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _measure(folder)
    (file,) = catalogue.jobs(folder)[0].files
    monkeypatch.setattr(sources, "hash_now", lambda *_: "others")
    assert file.state(folder) == "its sources have changed since 0123456789"
    before = results.read(folder / "layers.json")
    _measure(folder)
    after = results.read(folder / "layers.json")
    assert after.environment["sources"] == "others"
    assert "resumed" not in after.environment
    assert not {row.ours for row in before.rows} & {row.ours for row in after.rows}


def test_measuring_by_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(job: catalogue.Job, seconds: float, device: str) -> None:
        assert command.main(["job", job.name, f"{seconds}", device]) == 0

    monkeypatch.setattr(command, "_start", start)
    monkeypatch.setattr(command, "_pages", lambda _: 0)
    assert command.main(["measure", "--device", "cpu"]) == 0
    assert "cpu/layers: up to date" in capsys.readouterr().out
    monkeypatch.setattr(command, "_start", None)  # It is not measured again.
    assert command.main(["measure", "--device", "cpu"]) == 0
    monkeypatch.setattr(sources, "hash_now", lambda *_: "others")
    assert command.main(["status"]) == command.LEFT
    assert "cpu/layers: its sources have changed since 0123456789" in capsys.readouterr().out


def test_a_dirty_tree_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "0123456789-dirty")
    assert command.main(["measure", "--device", "cpu"]) == command.REFUSED
    assert "results are of a clean commit" in capsys.readouterr().err


def test_sections_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each section's rows are found again in the file; the founding workloads come first."""

    def layers_of(model: str) -> list[Workload]:
        return [replace(made_up.LAYER, name=f"{model}_01", model=model)]

    monkeypatch.setattr(layers, "_layers_of", layers_of)
    jobs = [job for job in catalogue.JOBS if command.MEASURE[job.name] == layers.measure]
    in_order = (list(layers._in_order(job, torch.device("cuda"))) for job in jobs)
    order, *rest = in_order
    others = [one for of_job in rest for one in of_job]
    assert [name for name, _ in order[:5]] == [*["layers"] * 2, *["layers-ampere"] * 2, "layers"]
    assert len(order) == len(layers._FOUNDING) + len(layers._AMPERE) + len(layers._OTHERS)
    assert [section for _, section in others] == [*layers._SEQUENCES, *layers._VOLUMES]
    for name, section in (*order, *others):
        cases = section.cases(torch.device("cuda"))
        found = Results({}, rows=[Row(case, "", error="none") for case in cases])
        assert section.part_of(found) == found, section.title
        with section.planned():
            expected = "ampere:sm_80" if name == "layers-ampere" else "all"
            assert str(planner.current()) == expected
    titles = {section.title: section for _, section in others}
    some = titles["Transposed layers, bfloat16 NHWC"].cases(torch.device("cuda"))
    assert {case.workload.name for case in some} == {"unet_up2", "dcgan_up4"}
    founding, step = order[0][1].cases(torch.device("cuda")), order[0][1].passes[-1]
    assert (len(founding), step) == (3 * 2 * 4, "step")


# --- Sources --------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that calls Git in a repository with two files."""
    if shutil.which("git") is None:
        pytest.skip("Git is not installed")
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    identity = {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", *arguments], cwd=tmp_path, env={**os.environ, **identity}, check=True,
            stdout=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
        return found.stdout

    git("init", "--quiet")
    (tmp_path / "src" / "kernels").mkdir(parents=True)
    (tmp_path / "src" / "kernels" / "a.cuh").write_text("a")
    (tmp_path / "src" / "b.py").write_text("b")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    return git


def test_hashes_of_sources(repository: Callable[..., str], tmp_path: Path) -> None:
    patterns = ("src/kernels",)
    before = sources.hash_now(patterns, tmp_path)
    assert before == sources.hash_at("HEAD", patterns, tmp_path)
    (tmp_path / "src" / "b.py").write_text("changed")  # no kernel
    (tmp_path / "src" / "kernels" / "__pycache__").mkdir()
    (tmp_path / "src" / "kernels" / "__pycache__" / "a.pyc").write_text("")
    assert before == sources.hash_now(patterns, tmp_path)
    assert before != sources.hash_now(("src/kernels", "src/b.py"), tmp_path)
    (tmp_path / "src" / "kernels" / "a.cuh").write_text("changed")
    assert before != sources.hash_now(patterns, tmp_path)
    assert before == sources.hash_at("HEAD", patterns, tmp_path)
    assert sources.hash_at("0123456789", patterns, tmp_path) is None


def test_the_commit_of_a_clean_tree(
    repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = repository("rev-parse", "HEAD").strip()
    assert commit.startswith(sources.clean_commit(tmp_path))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("Pages may change.")
    assert commit.startswith(sources.clean_commit(tmp_path))
    (tmp_path / "src" / "b.py").write_text("changed")
    with pytest.raises(DirtyError, match=r"src/b\.py"):
        sources.clean_commit(tmp_path)
    monkeypatch.setenv(COMMIT_VARIABLE, "0123456789")
    assert sources.clean_commit(tmp_path) == "0123456789"


def test_a_tree_without_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(sources, "_git", lambda *_: None)
    with pytest.raises(DirtyError, match="set FASTCONV_COMMIT"):
        sources.clean_commit(tmp_path)


def test_a_commit_that_has_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    made_up.write(tmp_path / "h200")
    (file, _) = catalogue.JOBS[0].files
    monkeypatch.setattr(sources, "hash_at", lambda *_: None)
    assert file.complaint(tmp_path / "h200") == ""  # The commit is not in this repository.
    monkeypatch.setattr(sources, "hash_at", lambda *_: "others")
    complaint = "commit 0123456789 does not have the sources that were measured"
    assert file.complaint(tmp_path / "h200") == complaint


def test_all_sources_exist() -> None:
    for file in (file for job in catalogue.JOBS for file in job.files):
        for path in file.sources:
            assert (sources.ROOT / path).exists(), path
            assert path.split("/")[0] in sources.MEASURED


def test_gpu_times_do_not_depend_on_operators() -> None:
    files = {file.name: file for job in catalogue.JOBS for file in job.files}
    dependent = {name for name, file in files.items() if "src/fastconv/ops" in file.sources}
    assert dependent == {"networks", "first-steps", "host", "host-python", "verify"}


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), (None, "cpu"),
    ],
)  # fmt: skip
def test_folders_have_the_names_of_gpus(gpu: str | None, name: str) -> None:
    assert catalogue.folder_of(gpu) == catalogue.RESULTS / name


# --- Other figures --------------------------------------------------------------------------------


def test_every_job_can_be_measured() -> None:
    assert {job.name for job in catalogue.JOBS} == command.MEASURE.keys()


def test_networks_that_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-50 in bfloat16 alone, whose rows need more time."""
    monkeypatch.setenv(COMMIT_VARIABLE, "0123456789")
    measured: dict[str, tuple[bool, float]] = {}
    checked: list[float] = []
    real = Keeper.check

    def row(case: NetworkCase, device: Any, effort: Effort, compile: bool) -> NetworkRow:
        measured[case.label] = (compile, effort.seconds)
        return case.outcome(skipped="not measured")

    def check(self: Keeper[Any], seconds: float) -> None:
        checked.append(seconds)
        real(self, seconds)

    monkeypatch.setattr(networks, "row", row)
    monkeypatch.setattr(Keeper, "check", check)
    (job,) = (job for job in catalogue.JOBS if job.name == "networks")
    others.measure_networks(job, tmp_path, CPU, time.monotonic() + 1000)
    expected = [f"resnet50 {mode} bfloat16 autocast nhwc" for mode in networks.MODES]
    assert [label for label, (compile, _) in measured.items() if compile] == expected
    assert len(measured) == len(checked) == 44
    for seconds, (compile, effort) in zip(checked, measured.values(), strict=True):
        assert (seconds, effort) == ((240.0, 3.0) if compile else (50.0, 1.0))


def test_verifying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "0123456789")
    monkeypatch.setattr(others, "VERIFIED", {"float64": (("--pass", "forward"), 2, 60)})
    (job,) = (job for job in catalogue.JOBS if job.name == "verify")
    others.measure_verify(job, tmp_path, CPU, time.monotonic() + 1000)
    contents = catalogue.read(tmp_path / "verify.json")
    assert contents is not None
    (row,) = contents["rows"]
    assert row["command"] == "fastconv verify --random 2 --time-limit 60 --pass forward"
    assert (row["summary"]["tried"], row["summary"]["wrong"]) == (2, 0)
    assert contents["environment"]["rows"] == "1"


@pytest.mark.parametrize(("scale", "right"), [(1.0, 5), (1.1, 0)])
@pytest.mark.parametrize(
    "problem",
    [
        kernelbench.Problem(1, "small", (1, 2, 6, 6), ("2, 3, 3, bias=False", "3, 1, 1")),
        kernelbench.Problem(2, "sequence", (1, 2, 6), ("2, 3, 4, stride=2",), "ConvTranspose1d"),
    ],
    ids=lambda problem: problem.name,
)
def test_judging_exported_files(
    tmp_path: Path, problem: kernelbench.Problem, scale: float, right: int
) -> None:
    """Exported files need a GPU: here, another model stands for one."""
    reference, exported = kernelbench.write(problem, tmp_path)
    assert "class ModelNew" in exported.read_text(encoding="utf-8")
    text = reference.read_text(encoding="utf-8").replace("class Model(", "class ModelNew(")
    exported.write_text(text.replace("self.layers(x)", f"{scale} * self.layers(x)"))
    found = kernelbench.judge(reference, exported, CPU)
    assert (found["correct"], found["seeds"]) == (right, 5)
    assert found["speedup"] == found["reference_ms"] / found["exported_ms"]
