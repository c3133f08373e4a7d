"""The ``fastconv`` command: bench, info."""

from __future__ import annotations

import gc
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastconv
from fastconv import cli, jit, native
from fastconv import timing as turns
from fastconv.bench import (
    configurations,
    contestants,
    environment,
    host,
    limits,
    measure,
    products,
    report,
    results,
    timing,
)
from fastconv.bench.cases import PASSES, STEP, Case, Tensors
from fastconv.bench.limits import Ceilings, Limit
from fastconv.bench.results import Results, Row
from fastconv.bench.timing import Timing
from fastconv.jit import launch as jit_launch
from fastconv.kernels import planner
from fastconv.kernels.family import Kernel, Launch, Plan
from fastconv.kernels.gpus import H200
from fastconv.timing import Effort
from fastconv.workloads import (
    FOUNDING,
    ODD,
    REAL,
    SUITES,
    Workload,
    WorkloadError,
    from_dict,
    parse_shape,
    suite,
    to_dict,
    unique,
)

SHAPE = "2x4x9x11 6x2x3x5 padding=1,2 dilation=1,2 stride=2 groups=2"
CAUSAL = "2x3x8x9 4x3x2x3 padding=1,0,2,0"
FAST = ["--device", "cpu", "--repeats", "1", "--row-seconds", "0"]

pytestmark = pytest.mark.usefixtures("_small_ceilings")


def case(direction: str = "forward", shape: str = SHAPE, format: str = "nchw") -> Case:
    return Case(parse_shape(shape), direction, "float32", "ieee", format)


# --- Workloads ------------------------------------------------------------------------------------


def test_founding_workloads_have_the_sizes_they_are_known_by() -> None:
    outputs = {workload.name: workload.problem.output_shape for workload in FOUNDING}
    assert outputs == {
        "dilated5x9": (8, 64, 508, 496),
        "asym5x9": (8, 64, 508, 504),
        "square3x3": (16, 128, 1022, 1022),
    }


def test_suites_are_many_and_valid() -> None:
    everything = unique(workload for name in SUITES for workload in suite(name))
    assert len(REAL) + len(ODD) >= 7 + 20
    assert 15 < len(suite("depthwise")) < len(REAL)
    for workload in everything:
        assert parse_shape(workload.shape).problem == workload.problem
        assert from_dict(json.loads(json.dumps(to_dict(workload)))) == workload
        assert workload.scaled(64).problem.flops > 0


def test_shapes_are_read_as_written() -> None:
    workload = parse_shape(SHAPE)
    assert workload == Workload(
        workload.name, "", (2, 4, 9, 11), (6, 2, 3, 5), (2, 2), (1, 2), (1, 2), 2
    )
    assert parse_shape(CAUSAL).sides == (1, 0, 2, 0)


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ("8x32", "the sizes of an input and of a weight are needed"),
        ("1x1x8x8 1x1x3x3 stride=", "stride has no value"),
        ("1x1x8x8 1x1x3x3 stride=1 stride=2", "stride is given twice"),
        ("1x1x8x8 1x1x3x3 groups=1,2", "groups takes whole numbers from 1"),
        ("0x1x8x8 1x1x3x3", "input takes whole numbers from 1"),
        ("1x1x9999999999x9999999999 1x1x3x3", "no machine holds a tensor of"),
        ("1x1x8x8 1x1x3xq", "'q'"),
        ("1x1x8x8 1x1x3x3 pad=1", "'pad'"),
        ("1x1x8x8 1x1x3x3 padding=1,2,3", "padding should be 2 or 4 whole numbers"),
        ("1x1x2x2 1x1x3x3", "Kernel size can't be greater"),
        ("1x3x8x8 1x1x3x3", "channels"),
    ],
)
def test_malformed_shapes_are_explained(shape: str, named: str) -> None:
    with pytest.raises(WorkloadError, match="malformed shape") as raised:
        parse_shape(shape)
    assert named in str(raised.value)
    assert "NxCxHxW" in str(raised.value)


def test_suite_files(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps([{"input": [1, 1, 8, 8], "weight": [1, 1, 3, 3]}]))
    (workload,) = suite(str(path))
    assert workload.name == "1x1x8x8 1x1x3x3"
    path.write_text('[{"input": [1, 1, 8, 8], "weight": [1, 1, 3, 3], "stride": 2, "padding": 1}]')
    (workload,) = suite(str(path))
    assert (workload.stride, workload.padding) == ((2, 2), (1, 1))


WHOLE = {"input": [1, 1, 8, 8], "weight": [1, 1, 3, 3]}


@pytest.mark.parametrize(
    ("contents", "named"),
    [
        ("", "is no JSON"),
        ('[{"input": [1, 1', "is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "should hold a JSON list"),
        ("[]", "should hold a JSON list of at least one workload"),
        ("[1, 2]", "workload 1: expected an object with input and weight, but got 1"),
        ([{"input": [1, 1, 8, 8], "wait": []}], "unknown keys ['wait']"),
        ([WHOLE, {"input": [1, 1, 8, 8]}], "workload 2: it has no weight"),
        ([{**WHOLE, "name": 3}], "name should be text, but got 3"),
        ([{**WHOLE, "input": "1x1x8x8"}], "input should be 4 whole numbers"),
        ([{**WHOLE, "input": [[1], 1, 8, 8]}], "input takes whole numbers from 1"),
        ([{**WHOLE, "input": [True, 1, 8, 8]}], "input takes whole numbers from 1"),
        ([{**WHOLE, "input": [1, 1, 8.5, 8]}], "but got 8.5"),
        ([{**WHOLE, "stride": "2"}], "stride takes whole numbers from 1"),
        ([{**WHOLE, "padding": [1, 2, 3]}], "padding should be 2 or 4 whole numbers"),
        ([{**WHOLE, "padding": "same"}], "but got 'same'"),
        ([{**WHOLE, "groups": [1]}], "groups takes whole numbers from 1"),
        ([{**WHOLE, "name": "a"}, {**WHOLE, "name": "a", "groups": 1, "stride": 2}],
         "two workloads are called 'a'"),
    ],
)  # fmt: skip
def test_suite_files_that_cannot_be_read_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: Any, named: str
) -> None:
    path = tmp_path / "own.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    assert cli.main(["bench", *FAST, "--suite", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastconv: ")
    assert named in line


# --- Timing ---------------------------------------------------------------------------------------


def test_contestants_take_turns_on_rotating_inputs() -> None:
    seen: list[tuple[str, int]] = []
    sets = [case().tensors(torch.device("cpu"), seed) for seed in range(3)]
    places = {id(at): number for number, at in enumerate(sets)}

    def contestant(name: str) -> contestants.Pass:
        return lambda at: seen.append((name, places[id(at)]))

    samples = timing.take_turns([contestant("a"), contestant("b")], sets, Effort(7, 0.0))
    assert [len(taken) for taken in samples] == [turns.LEAST_SAMPLES] * 2
    assert {place for _, place in seen} == {0, 1, 2}
    last = [name for name, _ in seen[-2 * turns.MOST_CALLS :]]
    assert set(last) == {"a", "b"}


def test_samples_are_repeated_while_they_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    at = case().tensors(torch.device("cpu"))
    for spread, rounds in ((1.0, turns.MOST_ROUNDS), (0.0, 1)):
        monkeypatch.setattr(turns, "spread", lambda taken, spread=spread: spread)
        (taken,) = timing.take_turns([lambda _: None], [at], Effort(3, 60.0))
        assert len(taken) == 3 * rounds


def test_sets_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    at = case().tensors(torch.device("cpu"))
    monkeypatch.setattr(timing, "CPU_CACHE_BYTES", 10 * at.bytes)
    assert timing.set_count(at, torch.device("cpu")) == timing.CACHES * 10 + 1


# --- Contestants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPE, CAUSAL])
@pytest.mark.parametrize("direction", [*PASSES, STEP])
@pytest.mark.parametrize("peer", ["pytorch", "best"])
def test_contestants_compute_the_same(shape: str, direction: str, peer: str) -> None:
    one = case(direction, shape)
    at = one.tensors(torch.device("cpu"))
    expected = contestants.ours(one)(at)
    for make in contestants.PEERS[peer].values():
        torch.testing.assert_close(make(one)(at), expected, atol=1e-4, rtol=1e-4)


def test_other_format_is_converted_once() -> None:
    one, seen = case(format="nhwc"), []
    at = one.tensors(torch.device("cpu"))
    assert at.input.is_contiguous(memory_format=torch.channels_last)

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    compute = contestants.other_format(one)
    compute(at)
    with Spy():
        compute(at)
    assert seen == ["convolution"]


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
        ("float32", [{"parts": 1, "halves": False}], ("tf32", 1)),
        ("float32", [{}, {"parts": 2}], ("tf32", 3)),
        ("float32", [{"parts": 2, "halves": True}], ("float16", 3)),
        ("float32", [{"parts": 1, "halves": True}, {"parts": 2}], ("float16", 1)),
    ],
)
def test_what_is_multiplied(
    dtype: str, constants: list[dict[str, Any]], expected: tuple[str, int]
) -> None:
    assert limits.multiplied(_plan("ampere", *constants), dtype) == expected


def test_the_limit_of_mma_products() -> None:
    mma = {"tf32": 30.0, "float16": 60.0, "bfloat16": 60.0}
    ceilings = Ceilings({"float32 ieee": 50.0}, copy_tb_s=4.0, mma_tflops=mma)
    one = Case(FOUNDING[0], "forward", "float32", "ieee", "nchw")
    ampere, halves = _plan("ampere", {"parts": 2}), _plan("ampere", {"parts": 2, "halves": True})
    for plan, tflops in ((ampere, 10), (halves, 20)):
        found = limits.mma_limit(one, ceilings, [plan])
        assert found is not None
        assert (found.name, found.flops) == ("mma.sync", FOUNDING[0].problem.flops)
        assert found.ms == pytest.approx(371.5 / tflops, rel=1e-3)
    step = Case(FOUNDING[0], "step", "float32", "ieee", "nchw")
    found = limits.mma_limit(step, ceilings, [ampere, halves, _plan("direct", {})])
    assert found is not None
    assert found.ms == pytest.approx(371.5 * (1 / 10 + 1 / 20 + 1 / 50), rel=1e-3)
    slow = Ceilings({"float32 ieee": 50.0}, copy_tb_s=0.001, mma_tflops=mma)
    assert limits.mma_limit(one, slow, [ampere]) == limits.limit(one, slow)
    assert limits.mma_limit(one, ceilings, [_plan("hopper", {"parts": 2})]) is None
    assert limits.mma_limit(one, Ceilings({"float32 ieee": 50.0}, 4.0), [ampere]) is None


def test_mma_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many warps as are best, on GPUs that have them; here, on none."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert products.measure(cpu, lambda run: 1.0) == {}
    capability = [(7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert products.measure(gpu, lambda run: 1.0) == {}
    capability[0] = (8, 0)
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in ("matrices", "totals"):
        real = getattr(products, name)
        monkeypatch.setattr(products, name, lambda what, device, real=real: real(what, cpu))
    ran: list[Launch] = []

    def prepare(launches: Sequence[Launch], *_: Any) -> Any:
        return SimpleNamespace(run=lambda *addresses: ran.extend(launches))

    monkeypatch.setattr(jit_launch, "load_launches", prepare)

    def seconds(run: Callable[[], object]) -> float:
        run()  # 8 warps take as long as 4, then it is twice as long for twice as many
        return max(1.0, ran[-1].block / 256)

    flops = 108 * 8 * products.ROUNDS * 8 * 2 * 16 * 8 * 8
    expected = {"tf32": flops, "float16": 2 * flops, "bfloat16": 2 * flops}
    found = products.measure(gpu, seconds)
    assert found == pytest.approx({kind: value * 1e-12 for kind, value in expected.items()})
    assert [launch.block // 32 for launch in ran] == [*products.WARPS] * 3


def test_a_ceiling_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> Any:
        raise jit.GpuUnavailable("no compiler")

    monkeypatch.setattr(products, "measure", measure)
    assert limits._mma_products(torch.device("cuda")) == {}


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
    contents = json.loads(path.read_text())  # as older versions wrote it
    del contents["ceilings"]["mma_tflops"], contents["rows"][0]["own_limit"]
    path.write_text(json.dumps(contents))
    (old,) = results.read(path).rows
    assert old.share(old.ours) == 0.5
    assert "mma.sync" not in report.ceilings(results.read(path))
    contents["ceilings"]["mma_tflops"] = {"tf32": 0.0}
    path.write_text(json.dumps(contents))
    with pytest.raises(results.ResultsError, match="a ceiling is 0"):
        results.read(path)


def test_a_changed_mma_ceiling_is_told() -> None:
    before, after = (Ceilings({}, 1.0, mma_tflops={"tf32": rate}) for rate in (30.0, 10.0))
    (doubt,) = limits.doubts(before, after)
    assert "mma.sync tf32 TFLOP/s 30 before, 10 after" in doubt


class Clock:
    """Time as a thread sees it that has a processor for a share of each second."""

    def __init__(self, share: float) -> None:
        self.share, self.now = share, 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    def thread_time(self) -> float:
        return self.share * self.now


@pytest.mark.parametrize(("share", "busy"), [(0.3, True), (0.97, False)])
def test_a_busy_cpu_is_told_beside_the_figures(
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
    assert (sentence in captured.err.partition("[1/3]")[0]) == busy  # before the first row
    assert (sentence in captured.out) == busy
    assert (sentence in "".join(json.loads(path.read_text())["doubts"])) == busy
    assert cli.main(["report", str(path)]) == 0
    assert (sentence in capsys.readouterr().out) == busy
    assert cli.main(["bench", "--compare", str(path), str(path)]) == 0
    assert (sentence in capsys.readouterr().out) == busy


def test_the_share_of_processors_is_measured() -> None:
    share = limits._processor_share()
    assert 0 < share < 1.1


def test_a_machine_that_changes_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU, whose other users no clock shows."""
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
    """Systems give out more memory than they have, and then end the process."""
    monkeypatch.setattr(environment, "free_bytes", lambda device: 4 * (2 * 4 * 9 * 11))
    small = "1x1x3x3 1x1x3x3"
    arguments = ["--device", "cpu", "--shape", SHAPE, "--shape", small, "--pass", "forward"]
    assert cli.main(["bench", *FAST, "--json", *arguments]) == 1
    errors = [row["error"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert errors == ["out of memory: a smaller batch, or --divisor 2, would fit", None]
    assert cli.main(["verify", "--json", *arguments]) == 1
    assert "out of memory" in capsys.readouterr().err


def test_cases_are_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--device", "cpu", "--json", "--shape", SHAPE, "--shape", SHAPE]
    assert cli.main([*arguments, "--dtype", "float32", "float32", "--pass", "forward"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checks"]) == 1
    assert cli.main([*arguments, "--pass", "weight_grad", "all"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert sorted(check["direction"] for check in checks) == sorted(PASSES)


def test_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    for limit in ("1e-9", "0"):
        arguments = ["bench", *FAST, "--shape", SHAPE, "--time-limit", limit, "--json"]
        assert cli.main(arguments) == 1
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert all("time limit" in row["error"] for row in rows)


def test_dry_run_lists_rows_and_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--dry-run", "--suite", "founding", "--pass", "step", "--divisor", "1"]
    assert cli.main([*arguments, "--device", "cpu", "--commands"]) == 0
    shown = capsys.readouterr().out
    assert "no GPU here" in shown
    for workload in FOUNDING:
        assert f"{workload.name} step float32 ieee nchw: {workload.shape}" in shown
    for kernel in ("pack", "correlate", "weight_grad", "reduce"):
        assert shown.count(f" {kernel}: grid") >= 3
    assert shown.count("fastconv bench --shape") == 3
    assert cli.main([*arguments, "--device", "cpu", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [len(row["configurations"]) for row in listed] == [3, 3, 3]


def test_configurations_know_the_memory_format() -> None:
    for format, expected in (("nchw", False), ("nhwc", True)):
        with planner.only("direct"):
            (found,) = configurations.legal(case(format=format), H200)
        constants = dict(found.plan.launches[-1].kernel.constants)
        assert constants["in_channels_last"] is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_compiled_before_the_first_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, but for the compiler, which only counts, and for the device, which is a CPU."""
    built: list[Any] = []
    monkeypatch.setattr(configurations, "device_gpu", lambda device: H200)
    monkeypatch.setattr(jit, "build", lambda kernel, arch: built.append((kernel, arch)))
    deep = "1x16x6x9 64x16x3x3"
    arguments = ["bench", *FAST, "--shape", CAUSAL, "--shape", deep]
    arguments += ["--precision", "ieee", "tf32", "--json"]
    assert cli.main(arguments) == 0
    assert all(arch == "sm_90a" for _, arch in built)
    assert len(set(built)) == len(built)  # each once, for whatever precision
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


def test_compare_knows_rows_of_one_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_results(tmp_path / "old.json", [1.0])
    new = write_results(tmp_path / "new.json", [1.0, 1.0])
    assert cli.main(["bench", "--compare", old, new]) == 0
    assert "0 rows are in the old results alone, 1 in the new alone" in capsys.readouterr().out


# --- fastconv bench --host ------------------------------------------------------------------------

HOST = ["bench", "--host", "--device", "cpu", "--row-seconds", "0"]
HOST_ROWS = [
    "small_forward", "small_forward_recorded", "small_backward", "small_input_grad",
    "layers20_step", "resnet50_step", "resnet50_inference",
]  # fmt: skip


@pytest.fixture
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small calls and one thread: several wait for each other where others use the machine."""
    threads = torch.get_num_threads()
    monkeypatch.setitem(host.CALLS, "cpu", 1)
    monkeypatch.setattr(host, "WARM_UPS", 1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_network(weights: None) -> torch.nn.Module:
    """In place of ResNet-50."""
    layers = (torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4))
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


@pytest.mark.usefixtures("_one_thread")
def test_host_times_of_every_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = SimpleNamespace(resnet50=small_network)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    path = tmp_path / "host.json"
    assert cli.main([*HOST, "--output", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["format"] == results.HOST_FORMAT
    assert found["environment"]["host_path"] == native.describe()
    assert [row["name"] for row in found["rows"]] == HOST_ROWS
    for row in found["rows"]:
        assert row["ratio"] == row["ours"]["us"] / row["peer"]["us"]
        for timed in (row["ours"], row["peer"]):
            assert 0 < timed["low_us"] <= timed["us"] <= timed["high_us"]
            assert timed["samples"] == turns.LEAST_SAMPLES
    captured = capsys.readouterr()
    assert "small_backward" in captured.out
    assert "[7/7" in captured.err


@pytest.mark.usefixtures("_one_thread")
def test_networks_are_skipped_without_torchvision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    assert cli.main([*HOST, "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = json.loads(captured.out)["rows"]
    skipped = {row["name"]: row["skipped"] for row in rows if row["skipped"]}
    assert skipped == dict.fromkeys(
        HOST_ROWS[5:], "torchvision is not installed: pip install torchvision"
    )


def test_one_failing_host_row_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def nothing() -> tuple[host.Contestant, host.Contestant]:
        return (lambda: lambda: None), (lambda: lambda: None)

    cases = [host.HostCase("a", "", 1, fails), host.HostCase("b", "", 1, nothing)]
    monkeypatch.setattr(host, "cases", lambda device: cases)
    assert cli.main([*HOST, "--json"]) == 1
    failed, measured = json.loads(capsys.readouterr().out)["rows"]
    assert failed["error"] == "out of memory: the other rows need less"
    assert measured["ours"]["samples"] == turns.LEAST_SAMPLES


def test_host_samples_are_bursts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the timed part moves on."""
    clock, seen = SimpleNamespace(now=0), []

    def contestant(name: str, ns: int) -> host.Contestant:
        def run() -> None:
            assert not gc.isenabled()
            seen.append(name)
            clock.now += ns

        def prepare() -> host.Run:
            clock.now += 10**9  # untimed
            return run

        return prepare

    fake = SimpleNamespace(perf_counter_ns=lambda: clock.now, perf_counter=lambda: clock.now / 1e9)
    monkeypatch.setattr(host, "time", fake)
    monkeypatch.setattr(host, "WARM_UPS", 1)
    turns = [contestant("ours", 6000), contestant("peer", 9000)]
    samples = host.take_turns(turns, 3, torch.device("cpu"), 9.5)
    assert samples == [[2.0] * 5, [3.0] * 5]  # 2 seconds a round
    assert seen == ["ours", "peer"] * 6
    assert gc.isenabled()


def test_host_ratio_is_of_medians() -> None:
    ours = results.HostTiming.of([9.0, 10.0, 10.0, 11.0, 100.0])
    peer = results.HostTiming.of([20.0, 20.0, 20.0])
    assert (ours.us, ours.low_us, ours.samples) == (10.0, 9.5, 5)
    row = results.HostRow("small_forward", "", ours, peer)
    assert row.ratio == 0.5
    assert row.unsteady
    assert not results.HostRow("small_forward", "", peer, peer).unsteady


def test_networks_with_fastconv_share_their_parameters() -> None:
    torch.manual_seed(0)
    peer = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Sequential(small_network(None)))
    peer[1][0][0] = torch.nn.Conv2d(4, 4, 3, padding=1)
    ours = host.with_fastconv(peer)
    convolutions = [m for m in ours.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [type(module) for module in convolutions] == [fastconv.Conv2d] * 2
    assert not any(isinstance(module, fastconv.Conv2d) for module in peer.modules())
    for one, other in zip(ours.parameters(), peer.parameters(), strict=True):
        assert one is other
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(ours(images), peer(images))


# --- fastconv info --------------------------------------------------------------------------------


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--device", "cpu", "--shape", SHAPE]) == 0
    shown = capsys.readouterr().out
    for text in ("torch", "nvrtc", "cache", "direct", "correlate: grid", "does not take"):
        assert text in shown
    assert "the cheapest, in cycles" not in shown
    wide = ["--shape", "8x32x512x512 64x32x5x9", "--pass", "forward"]
    assert cli.main(["info", "--device", "cpu", "--explain", *wide]) == 0
    assert "the cheapest, in cycles" in capsys.readouterr().out
    assert cli.main(["info", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"]["entries"] >= 0


def test_info_for_another_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--shape", "8x64x56x56 64x64x3x3 padding=1", "--pass", "forward"]
    for gpu, texts in {
        "sm_90a": ("planned for sm_90a, 132 processors", "forward: hopper"),
        "sm_75": ("planned for sm_75, 40 processors", "forward: direct", "not take tensor-core"),
        "sm_86": ("planned for sm_86, 82 processors", "forward: ampere", "not take tensor-core"),
        "sm_87": ("planned for sm_87, 16 processors", "forward: ampere"),
        "sm_103": ("planned for sm_103a, 148 processors", "forward: ampere"),
        "sm_121a": ("planned for sm_121a, 48 processors", "forward: ampere"),
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
