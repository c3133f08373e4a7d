"""The commands ``fastconv bench`` and ``fastconv info``, and the ceilings that bench measures."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from _fastconv_command import parser
from fastconv import cli, jit, native
from fastconv.bench import (
    configurations,
    environment,
    limits,
    measure,
    mma_rate,
    report,
    results,
)
from fastconv.bench.cases import PASSES, STEP, Case, Tensors
from fastconv.bench.limits import Ceilings, Limit
from fastconv.bench.results import Results, Row
from fastconv.bench.row_timing import Timing
from fastconv.commands import common
from fastconv.jit import launch as jit_launch
from fastconv.kernels import planner
from fastconv.kernels.family import FOLDER, Kernel, Launch, Plan
from fastconv.kernels.gpus import H200
from fastconv.workloads import (
    FOUNDING,
    REAL,
    parse_shape,
)

SHAPE = "2x4x9x11 6x2x3x5 padding=1,2 dilation=1,2 stride=2 groups=2"
CAUSAL = "2x3x8x9 4x3x2x3 padding=1,0,2,0"
FAST = ["--device", "cpu", "--repeats", "1", "--row-seconds", "0"]

pytestmark = pytest.mark.usefixtures("_small_ceilings")


def case(direction: str = "forward", shape: str = SHAPE, format: str = "nchw") -> Case:
    return Case(parse_shape(shape), direction, "float32", "ieee", format)


# --- Limits ---------------------------------------------------------------------------------------


def test_the_binding_limit() -> None:
    ceilings = Ceilings({"float32 ieee": 50.0}, copy_tb_s=4.0)
    founding = Case(FOUNDING[0], "forward", "float32", "ieee", "nchw")
    found = limits.limit(founding, ceilings)
    assert (found.name, found.flops) == ("compute", FOUNDING[0].problem.flops)
    assert found.ms == pytest.approx(371.5 / 50, rel=1e-3)
    (strip,) = (workload for workload in REAL if workload.name == "strip1x21dw")
    found = limits.limit(Case(strip, "forward", "float32", "ieee", "nchw"), ceilings)
    assert found.name == "memory"
    assert found.bytes == 4 * (2 * 8 * 256 * 128 * 128 + 256 * 21)


def _plan(family: str, *constants: dict[str, Any]) -> Plan:
    kernels = [Kernel("source.cuh", "entry", tuple(one.items())) for one in constants]
    launches = tuple(Launch(kernel, (1, 1, 1), 32, 0, ("input",)) for kernel in kernels)
    return Plan(launches, 0, family, "")


@pytest.mark.parametrize(
    ("dtype", "constants", "expected"),
    [
        ("bfloat16", [{}], ("bfloat16", 1)),
        ("float16", [{"parts": 1}], ("float16", 1)),
        ("float32", [{"parts": 1, "scaled_fp16": False}], ("tf32", 1)),
        ("float32", [{}, {"parts": 2}], ("tf32", 3)),
        ("float32", [{"parts": 2, "scaled_fp16": True}], ("float16", 3)),
        ("float32", [{"parts": 1, "scaled_fp16": True}, {"parts": 2}], ("float16", 1)),
    ],
)
def test_what_is_multiplied(
    dtype: str, constants: list[dict[str, Any]], expected: tuple[str, int]
) -> None:
    assert limits.multiplied(_plan("ampere", *constants), dtype) == expected


@pytest.mark.parametrize(("precision", "mmas"), [("tf32", 1), ("ieee", 3)])
def test_what_plans_multiply(precision: str, mmas: int) -> None:
    """The constants are read by the names that planners give them."""
    for direction in PASSES:
        one = Case(FOUNDING[0], direction, "float32", precision, "nchw")
        (found,) = configurations.planned(one, H200)
        assert limits.multiplied(found.plan, "float32") == ("float16", mmas)


def test_the_limit_of_mma_sync() -> None:
    mma = {"tf32": 30.0, "float16": 60.0, "bfloat16": 60.0}
    ceilings = Ceilings({"float32 ieee": 50.0}, copy_tb_s=4.0, mma_tflops=mma)
    one = Case(FOUNDING[0], "forward", "float32", "ieee", "nchw")
    ampere, scaled_fp16 = (
        _plan("ampere", {"parts": 2}),
        _plan("ampere", {"parts": 2, "scaled_fp16": True}),
    )
    for plan, tflops in ((ampere, 10), (scaled_fp16, 20)):
        found = limits.own_limit(one, ceilings, [plan])
        assert found is not None
        assert (found.name, found.flops) == ("mma.sync", FOUNDING[0].problem.flops)
        assert found.ms == pytest.approx(371.5 / tflops, rel=1e-3)
    step = Case(FOUNDING[0], "step", "float32", "ieee", "nchw")
    found = limits.own_limit(step, ceilings, [ampere, scaled_fp16, _plan("direct", {})])
    assert found is not None
    assert found.ms == pytest.approx(371.5 * (1 / 10 + 1 / 20 + 1 / 50), rel=1e-3)
    slow = Ceilings({"float32 ieee": 50.0}, copy_tb_s=0.001, mma_tflops=mma)
    assert limits.own_limit(one, slow, [ampere]) == limits.limit(one, slow)
    assert limits.own_limit(one, ceilings, [_plan("hopper", {"parts": 2})]) is None
    assert limits.own_limit(one, Ceilings({"float32 ieee": 50.0}, 4.0), [ampere]) is None


@pytest.mark.parametrize(
    ("precision", "constants", "name", "tflops"),
    [
        ("tf32", {"parts": 1, "scaled_fp16": True}, "scaled fp16", 80.0),
        ("ieee", {"parts": 2, "scaled_fp16": True}, "scaled fp16 x3", 80 / 3),
        ("ieee", {"parts": 2}, "TF32 x3", 40 / 3),
    ],
)
def test_the_limit_of_float32_that_is_multiplied_otherwise(
    precision: str, constants: dict[str, Any], name: str, tflops: float
) -> None:
    rates = {"float32 ieee": 5.0, "float32 tf32": 40.0, "float16": 80.0}
    one = Case(FOUNDING[0], "forward", "float32", precision, "nchw")
    found = limits.own_limit(one, Ceilings(rates, copy_tb_s=4.0), [_plan("hopper", constants)])
    assert found is not None
    assert found.name == name
    assert found.ms == pytest.approx(371.5 / tflops, rel=1e-3)
    unknown = Ceilings({one.mode: 40.0}, copy_tb_s=4.0)  # Older files have no rate of float16.
    assert (
        limits.own_limit(one, unknown, [_plan("hopper", {"parts": 1, "scaled_fp16": True})]) is None
    )


def test_plain_products_have_the_limit_of_their_mode() -> None:
    ceilings = Ceilings({"float32 tf32": 40.0, "float16": 80.0, "bfloat16": 80.0}, copy_tb_s=4.0)
    for mode in (("float32", "tf32"), ("bfloat16", None)):
        one = Case(FOUNDING[0], "forward", *mode, "nchw")
        assert limits.own_limit(one, ceilings, [_plan("hopper", {"parts": 1})]) is None
        assert limits.own_limit(one, ceilings, [_plan("direct", {})]) is None


def test_the_limit_of_a_step_of_several_kinds_of_mmas() -> None:
    rates = {"float32 ieee": 5.0, "float32 tf32": 40.0, "float16": 80.0}
    step = Case(FOUNDING[0], "step", "float32", "ieee", "nchw")
    plans = [_plan("hopper", {"parts": 2, "scaled_fp16": scaled}) for scaled in (True, True, False)]
    found = limits.own_limit(step, Ceilings(rates, copy_tb_s=4.0), plans)
    assert found is not None
    assert found.name == "MMAs"
    assert found.ms == pytest.approx(371.5 * (2 * 3 / 80 + 3 / 40), rel=1e-3)


def test_the_rate_of_mma_sync_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best number of warps counts; GPUs before sm_80 and CPUs have no rate. No GPU is used."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert mma_rate.measure(cpu, lambda run: 1.0) == {}
    capability = [(7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert mma_rate.measure(gpu, lambda run: 1.0) == {}
    capability[0] = (8, 0)
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in ("matrices", "totals"):
        real = getattr(mma_rate, name)
        monkeypatch.setattr(mma_rate, name, lambda what, device, real=real: real(what, cpu))
    ran: list[Launch] = []

    def prepare(launches: Sequence[Launch], *_: Any) -> Any:
        return SimpleNamespace(run=lambda *addresses: ran.extend(launches))

    monkeypatch.setattr(jit_launch, "load_launches", prepare)

    def seconds(run: Callable[[], object]) -> float:
        run()  # Up to 8 warps take the same time; beyond, time is proportional to their number.
        return max(1.0, ran[-1].block / 256)

    flops = 108 * 8 * mma_rate.ROUNDS * 8 * 2 * 16 * 8 * 8
    expected = {"tf32": flops, "float16": 2 * flops, "bfloat16": 2 * flops}
    found = mma_rate.measure(gpu, seconds)
    assert found == pytest.approx({kind: value * 1e-12 for kind, value in expected.items()})
    assert [launch.block // 32 for launch in ran] == [*mma_rate.WARPS] * 3


def test_a_ceiling_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> Any:
        raise jit.GpuUnavailable("no compiler")

    monkeypatch.setattr(mma_rate, "measure", measure)
    assert limits._mma_tflops(torch.device("cuda")) == {}


def test_shares_of_rows_with_a_limit_of_their_own(tmp_path: Path) -> None:
    limit, own = Limit("compute", 0.5, 1000, 1000), Limit("mma.sync", 0.8, 1000, 1000)
    ours, peer = Timing(1.0, 0.01, 7, 1.0), Timing(2.0, 0.01, 7, 1.0)
    row = Row(case(), "", ours, peer, "PyTorch", limit, own_limit=own)
    assert (row.share(ours), row.share(peer)) == (0.8, 0.25)
    assert "mma.sync" in report.row_cells(row)
    path = tmp_path / "results.json"
    ceilings = Ceilings({"float32 ieee": 50.0}, 4.0, mma_tflops={"tf32": 30.0})
    made = Results({"gpu": "abacus"}, ceilings, [row])
    made.write(path)
    assert results.read(path) == made
    assert "mma.sync tf32 30 TFLOP/s" in report.ceilings(made)
    contents = json.loads(path.read_text())  # Files of older versions lack these keys.
    del contents["ceilings"]["mma_tflops"], contents["rows"][0]["own_limit"]
    path.write_text(json.dumps(contents))
    (old,) = results.read(path).rows
    assert old.share(old.ours) == 0.5
    assert "mma.sync" not in report.ceilings(results.read(path))
    contents["ceilings"]["mma_tflops"] = {"tf32": 0.0}
    path.write_text(json.dumps(contents))
    with pytest.raises(results.ResultsError, match="a ceiling is 0"):
        results.read(path)


def test_a_changed_mma_ceiling_is_reported() -> None:
    before, after = (Ceilings({}, 1.0, mma_tflops={"tf32": rate}) for rate in (30.0, 10.0))
    (doubt,) = limits.doubts(before, after)
    assert "mma.sync tf32 TFLOP/s 30 before, 10 after" in doubt


class Clock:
    """The clock of a thread that runs for a share of each second."""

    def __init__(self, share: float) -> None:
        self.share, self.now = share, 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    def thread_time(self) -> float:
        return self.share * self.now


@pytest.mark.parametrize(("share", "busy"), [(0.3, True), (0.97, False), (2.6, False)])
def test_a_busy_cpu_is_reported_beside_the_figures(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    share: float,
    busy: bool,
) -> None:
    monkeypatch.setattr(limits, "time", Clock(share))
    path = tmp_path / "results.json"
    assert cli.main(["bench", *FAST, "--shape", SHAPE, "--output", str(path)]) == 0
    captured = capsys.readouterr()
    sentence = "this machine is busy: threads got 30% of the processor time"
    # The warning comes before the first row.
    assert (sentence in captured.err.partition("[1/3]")[0]) == busy
    assert (sentence in captured.out) == busy
    assert (sentence in "".join(json.loads(path.read_text())["doubts"])) == busy
    assert cli.main(["report", str(path)]) == 0
    assert (sentence in capsys.readouterr().out) == busy
    assert cli.main(["bench", "--compare", str(path), str(path)]) == 0
    assert (sentence in capsys.readouterr().out) == busy


def test_the_share_of_processors_is_measured() -> None:
    assert 0 <= limits._processor_share() <= 1


@pytest.mark.parametrize(
    ("rate", "arithmetic"), [(5e10, limits.MULTIPLY_ADDS), (None, limits.MATRIX_PRODUCTS)]
)
def test_a_cpus_arithmetic(
    monkeypatch: pytest.MonkeyPatch, rate: float | None, arithmetic: str
) -> None:
    """It is the library's rate of multiply-adds, where there is a library."""
    monkeypatch.setattr(native, "multiply_add_rate", lambda dtype, seconds: rate)
    cases = [
        Case(FOUNDING[0], "forward", dtype, precision, "nchw")
        for dtype, precision in (("float32", "ieee"), ("float16", None), ("float64", None))
    ]
    found = limits.measure(cases, torch.device("cpu"))
    assert found.arithmetic == arithmetic
    assert found.tflops.keys() == {case.mode for case in cases}
    if rate is not None:
        assert {*found.tflops.values()} == {rate * 1e-12}
    said = report.ceilings(Results({}, found, []))
    assert ("TFLOP/s of multiply-adds" in said) == (rate is not None)
    quiet = replace(found, processor_share=None)  # this machine may be busy
    other = Ceilings(dict.fromkeys(found.tflops, 1e-9), found.copy_tb_s, arithmetic="another")
    assert not limits.doubts(quiet, other), "rates of unlike arithmetic are not compared"


def test_a_machine_that_changes_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU, only changed ceilings show that others use it."""
    rates = iter([1.0, 0.5])
    monkeypatch.setattr(
        limits, "measure", lambda cases, device: Ceilings({"float32 ieee": 1.0}, next(rates))
    )
    assert cli.main(["bench", *FAST, "--shape", SHAPE, "--json"]) == 0
    (doubt,) = json.loads(capsys.readouterr().out)["doubts"]
    assert "speed changed while it was measured: copy TB/s 1 before, 0.5 after" in doubt
    steady = Ceilings({"float32 ieee": 1.0}, 1.0)
    assert not limits.doubts(steady, Ceilings({"float32 ieee": 1.1}, 0.9))
    assert not limits.doubts(steady, None)


# --- fastconv bench -------------------------------------------------------------------------------


def test_measures_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    arguments = ["bench", *FAST, "--shape", SHAPE, "--shape", CAUSAL, "--pass", *PASSES, STEP]
    arguments += ["--dtype", "float32", "bfloat16", "--precision", "ieee", "tf32"]
    assert cli.main([*arguments, "--format", "nchw", "nhwc", "--output", str(path)]) == 0
    found = results.read(path)
    assert len(found.measured) == 2 * 4 * 3 * 2
    assert {"commit", "torch", "system"} <= found.environment.keys()
    assert found.ceilings is not None
    assert found.ceilings.tflops.keys() == {"float32 ieee", "float32 tf32", "bfloat16"}
    for row in found.rows:
        assert row.ours
        assert row.peer
        assert row.limit
        assert row.speedup == row.peer.ms / row.ours.ms
    captured = capsys.readouterr()
    assert "speed-up" in captured.out
    assert "[48/48" in captured.err


def test_a_row_reproduces_itself(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", *FAST, "--quiet", "--json", "--shape", CAUSAL, "--pass", "input_grad"]
    assert cli.main([*arguments, "--dtype", "float16", "--format", "nhwc"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    (row,) = json.loads(captured.out)["rows"]
    _, *command = shlex.split(row["command"])
    assert cli.main([*command, *FAST, "--json"]) == 0
    (again,) = json.loads(capsys.readouterr().out)["rows"]
    keys = ("workload", "direction", "dtype", "precision", "format")
    assert [again[key] for key in keys] == [row[key] for key in keys]


def test_one_failing_row_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = measure.Bench._sets

    def sets(self: measure.Bench, case: Case) -> list[Tensors]:
        if case.direction == "input_grad":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, case)

    monkeypatch.setattr(measure.Bench, "_sets", sets)
    assert cli.main(["bench", *FAST, "--shape", SHAPE]) == 1
    captured = capsys.readouterr()
    assert "input_grad float32 ieee nchw failed: out of memory" in " ".join(captured.out.split())
    assert captured.err.count("PyTorch") == 2


def test_interruption_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = measure.Bench.row

    def row(self: measure.Bench, case: Case) -> Row:
        if case.direction == "weight_grad":
            raise KeyboardInterrupt
        return original(self, case)

    monkeypatch.setattr(measure.Bench, "row", row)
    path = tmp_path / "results.json"
    assert cli.main(["bench", *FAST, "--shape", SHAPE, "--output", str(path)]) == 130
    assert [row.case.direction for row in results.read(path).rows] == ["forward", "input_grad"]
    captured = capsys.readouterr()
    assert "keeping what was done" in captured.err
    assert "input_grad" in captured.out


def test_a_row_that_would_not_fit_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operating systems promise more memory than they have, and then kill the process."""
    monkeypatch.setattr(environment, "free_bytes", lambda device: 4 * (2 * 4 * 9 * 11))
    small = "1x1x3x3 1x1x3x3"
    arguments = ["--device", "cpu", "--shape", SHAPE, "--shape", small, "--pass", "forward"]
    assert cli.main(["bench", *FAST, "--json", *arguments]) == 1
    errors = [row["error"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert errors == ["out of memory: --divisor 2 may fit", None]
    assert cli.main(["verify", "--json", *arguments]) == 1
    assert "out of memory" in capsys.readouterr().err


def test_cases_are_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--device", "cpu", "--json", "--shape", SHAPE, "--shape", SHAPE]
    assert cli.main([*arguments, "--dtype", "float32", "float32", "--pass", "forward"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checks"]) == 1
    assert cli.main([*arguments, "--pass", "weight_grad", "all"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert sorted(check["direction"] for check in checks) == sorted(PASSES)


def test_a_time_limit_skips_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    for limit in ("1e-9", "0"):
        arguments = ["bench", *FAST, "--shape", SHAPE, "--time-limit", limit]
        assert cli.main([*arguments, "--json", "--output", str(path)]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert {row["skipped"] for row in rows} == {"the time limit was reached"}
        assert {row["error"] for row in rows} == {None}
    assert cli.main(["report", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("│ skipped │") == 3
    assert "weight_grad float32 ieee nchw skipped: the time limit was reached" in shown
    found = results.read(path)
    assert len(found.rows) == 3
    assert not found.measured


@pytest.mark.parametrize(
    ("selected", "advice"),
    [
        (["--shape", SHAPE], "--divisor 2 may fit"),
        (["--shape", SHAPE, "--divisor", "3"], "--divisor 6 may fit"),
        (["--suite", "founding"], "--divisor 8 may fit"),
        (["--model", "resnet50", "--batch", "32"], "--batch below 32, or --divisor 2 may fit"),
    ],
)
def test_advice_for_want_of_memory(selected: list[str], advice: str) -> None:
    arguments = parser.parse(["bench", *selected])
    assert common.memory_advice(arguments, torch.device("cpu")) == advice


def test_a_smaller_size_is_suggested_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    large = [Case(FOUNDING[0], direction, "float32", "ieee", "nchw") for direction in PASSES]
    for options, device, is_advised in (
        ([], "cpu", True), (["--divisor", "1"], "cpu", False), ([], "cuda", False),
    ):  # fmt: skip
        arguments = parser.parse(["bench", *options])
        common.advise(arguments, large, torch.device(device))
        assert ("--divisor 8" in capsys.readouterr().err) == is_advised
    common.advise(parser.parse(["bench"]), [case()], torch.device("cpu"))
    assert capsys.readouterr().err == ""


def test_dry_run_lists_rows_and_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--dry-run", "--suite", "founding", "--pass", "step", "--divisor", "1"]
    assert cli.main([*arguments, "--device", "cpu", "--commands"]) == 0
    shown = capsys.readouterr().out
    assert "with the kernels of an H200, since this machine has no GPU" in shown
    for workload in FOUNDING:
        assert f"{workload.name} step float32 ieee nchw: {workload.shape}" in shown
    for kernel in ("pack", "convolve", "weight_grad", "reduce"):
        assert shown.count(f" {kernel} of ") >= 3
    assert shown.count("fastconv bench --shape") == 3
    assert cli.main([*arguments, "--device", "cpu", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [len(row["configurations"]) for row in listed] == [3, 3, 3]


def test_shown_constants_are_some_that_kernels_read() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.cuh")]
    read = {name for text in texts for name in re.findall(r"\b(?:C|Config)::(\w+)", text)}
    assert set(configurations._CHOSEN) <= read


def test_configurations_depend_on_the_memory_format() -> None:
    for format, expected in (("nchw", False), ("nhwc", True)):
        with planner.only("direct"):
            (found,) = configurations.planned(case(format=format), H200)
        constants = dict(found.plan.launches[-1].kernel.constants)
        assert constants["in_channels_last"] is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_compiled_before_the_first_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device is a CPU that is planned for as a GPU; the compiler only counts."""
    built: list[Any] = []
    monkeypatch.setattr(configurations, "device_gpu", lambda device: H200)
    monkeypatch.setattr(jit, "build", lambda kernel, arch: built.append((kernel, arch)))
    deep = "1x16x6x9 64x16x3x3"
    arguments = ["bench", *FAST, "--shape", CAUSAL, "--shape", deep]
    arguments += ["--precision", "ieee", "tf32", "--json"]
    assert cli.main(arguments) == 0
    assert all(arch == "sm_90a" for _, arch in built)
    assert len(set(built)) == len(built)  # Each kernel is built once for both precisions.
    assert {kernel.source.split("/")[0] for kernel, _ in built} == {"direct", "hopper"}
    captured = capsys.readouterr()
    assert f"compiling {len(built)} kernels" in captured.err
    assert all(row["compile_s"] > 0 for row in json.loads(captured.out)["rows"])


# --- fastconv bench --compare ---------------------------------------------------------------------


def write_results(path: Path, ms: Sequence[float]) -> str:
    rows = [
        Row(
            case(direction),
            "",
            Timing(value, 0.01, 7, 1.0),
            Timing(2.0, 0.01, 7, 1.0),
            "PyTorch",
            Limit("compute", 0.5, 1000, 1000),
        )
        for direction, value in zip(PASSES, ms, strict=False)
    ]
    Results({"gpu": "abacus"}, None, rows).write(path)
    return str(path)


def test_compare_says_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_results(tmp_path / "old.json", [1.0, 1.0, 1.0])
    new = write_results(tmp_path / "new.json", [1.01, 1.5, 0.5])
    assert cli.main(["bench", "--compare", old, new, "--json"]) == 0
    verdicts = [change["verdict"] for change in json.loads(capsys.readouterr().out)]
    assert verdicts == ["same", "slower", "faster"]
    assert cli.main(["bench", "--compare", old, new]) == 0
    shown = capsys.readouterr().out
    assert "2 of 3 rows changed beyond noise" in shown
    assert "+50.0%" in shown


def test_compare_counts_rows_of_one_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_results(tmp_path / "old.json", [1.0])
    new = write_results(tmp_path / "new.json", [1.0, 1.0])
    assert cli.main(["bench", "--compare", old, new]) == 0
    assert "0 rows are in the old results alone, 1 in the new alone" in capsys.readouterr().out


# --- fastconv info --------------------------------------------------------------------------------


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--device", "cpu", "--shape", SHAPE]) == 0
    shown = capsys.readouterr().out
    for text in (
        "torch",
        "nvrtc",
        "cache",
        "direct",
        "convolve of direct/forward: grid",
        "does not take",
    ):
        assert text in shown
    assert "the cheapest, in cycles" not in shown
    wide = ["--shape", "8x32x512x512 64x32x5x9", "--pass", "forward"]
    assert cli.main(["info", "--device", "cpu", "--explain", *wide]) == 0
    shown = capsys.readouterr().out
    assert "the cheapest, in cycles" in shown
    assert "forward on a CPU: direct kernel: tiles of" in shown
    assert cli.main(["info", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"]["entries"] >= 0


def test_info_for_another_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "8x64x56x56 64x64x3x3 padding=1", "--pass", "forward"]
    for gpu, texts in {
        "sm_90a": ("planned for sm_90a, 132 SMs", "forward: hopper"),
        "sm_75": ("planned for sm_75, 40 SMs", "forward: direct", "not take tensor-core"),
        "sm_86": ("planned for sm_86, 82 SMs", "forward: ampere", "not take tensor-core"),
        "sm_87": ("planned for sm_87, 16 SMs", "forward: ampere"),
        "sm_103": ("planned for sm_103a, 148 SMs", "forward: ampere"),
        "sm_121a": ("planned for sm_121a, 48 SMs", "forward: ampere"),
    }.items():
        assert cli.main(["info", "--device", "cpu", "--gpu", gpu, *shape]) == 0
        shown = capsys.readouterr().out
        assert all(text in shown for text in texts)


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["bench", "--suite", "none"],
            "no suite 'none': it should be one of founding, real, odd, depthwise",
        ),
        (["bench", "--shape", "1x2"], "malformed shape '1x2'"),
        (
            ["verify", "--shape", "1x1x8x8", "1x1x3x3"],
            "1x1x3x3; a shape is one argument, in quotes",
        ),
        (
            ["bench", "--shape", "1x1x8x8 1x1x3x3", "padding=1"],
            "padding=1; a shape is one argument",
        ),
        (["bench", "quickly"], "unrecognized arguments: quickly (fastconv bench --help"),
        *(
            (
                ["bench", "--dry-run", option, value],
                f"{option}: should be a whole number, at least 1, but got",
            )
            for option in ("--repeats", "--divisor")
            for value in ("0", "-1", "1.5", "two")
        ),
        *(
            (
                ["bench", "--dry-run", option, value],
                f"{option}: should be seconds, at least 0, but got",
            )
            for option in ("--row-seconds", "--time-limit")
            for value in ("-1", "nan", "soon")
        ),
        (["bench", "--device", "cpu:1"], "it should be cpu, cuda"),
        (["bench", "--compare", "a.json", "b.json", "--output", "c.json"], "nothing to write"),
        (["bench", "--dry-run", "--output", "c.json"], "nothing to write"),
        (["bench", "--dry-run", "--compare", "a.json", "b.json"], "not allowed with"),
        (["bench", "--host", "--commands"], "to which --commands does not apply"),
        *(
            (
                ["bench", "--host", option, value],
                f"--host has rows of its own, to which {option} does not apply: it takes --device",
            )
            for option, value in (
                ("--shape", SHAPE),
                ("--suite", "real"),
                ("--model", "resnet50"),
                ("--batch", "2"),
                ("--image", "32"),
                ("--pass", "forward"),
                ("--dtype", "float32"),
                ("--precision", "ieee"),
                ("--format", "nchw"),
                ("--divisor", "2"),
                ("--peer", "pytorch"),
                ("--repeats", "7"),
                ("--time-limit", "0"),
            )
        ),
        *(
            (["bench", option, "32"], f"{option} applies to a --model, and none is given")
            for option in ("--batch", "--image")
        ),
        (["bench", "--host", "--dry-run"], "not allowed with"),
        (["bench", "--host", "--compare", "a.json", "b.json"], "not allowed with"),
        (["bench", "--device", "abacus"], "abacus"),
        (["bench", "--device", "meta"], "it should be cpu, cuda"),
        (["bench", "--dtype", "int8"], "int8"),
        (["bench", "--compare", "a.json", "b.json"], "cannot read a.json"),
        (["verify", "--pass", "step"], "step"),
        (["info", "--gpu", "sm_80"], "--gpu needs a --shape to plan, for example --shape"),
        (["info", "--explain"], "--explain needs a --shape to plan, for example --shape"),
        (["info", "--gpu", "sm_1", "--shape", SHAPE], "--gpu: no GPU 'sm_1': known are sm_70"),
        (["tune", "--device", "cpu"], "only GPU kernels are tuned, and cpu is no GPU"),
        (["report", "none.json"], "cannot read none.json"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "no device 'cuda' here" in capsys.readouterr().err
