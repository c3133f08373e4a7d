"""``fastconv verify``: right results pass, and each check finds faults that no other finds."""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastconv import cli
from fastconv.bench import campaign, judging, relations, report, trials, verify
from fastconv.bench.cases import PASSES, Case
from fastconv.bench.trials import DATA, EVERY_KIND, PLACED, Data, Limits, Results, Trial
from fastconv.bench.verify import Check
from fastconv.workloads import parse_shape

CPU = torch.device("cpu")
SHAPE = "3x6x9x8 4x3x3x2 padding=1,2 stride=2,1 groups=2"
WITH_ADJOINT = relations.ADJOINT_EVERY  # a seed whose trials check `adjoint`
CHECKED = ["verify", "--device", "cpu", "--shape", SHAPE]
RANDOM = ["verify", "--device", "cpu", "--random"]

Compute = Callable[[Trial, Data], Results]


def trial(direction: str = "forward", mode: str = "float32 ieee", **more: Any) -> Trial:
    dtype, _, precision = mode.partition(" ")
    workload = parse_shape(more.pop("shape", SHAPE))
    case = Case(workload, direction, dtype, precision or None, more.pop("format", "nchw"))
    return Trial(case, **{"seed": WITH_ADJOINT, **more})


def break_kernels(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[Compute, Trial, Data], Results]
) -> None:
    right = trials.compute
    monkeypatch.setattr(trials, "compute", lambda trial, data: broken(right, trial, data))


def wrong_in(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], None]) -> None:
    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        change(results.main)
        return results

    break_kernels(monkeypatch, broken)


def found(one: Trial) -> set[str]:
    """The names of the checks that fail."""
    check = verify.check(one, CPU)
    assert check.failure is None
    assert set(dict(check.complaints)) <= set(check.checked)
    return set(dict(check.complaints))


# --- What is right ------------------------------------------------------------------------------


def test_random_trials_pass_and_are_spread_evenly() -> None:
    count = len(EVERY_KIND.passes) * len(EVERY_KIND.modes) * len(EVERY_KIND.formats)
    drawn = [trials.drawn(7, number, Limits(2e6, 2**18)) for number in range(count)]
    checks = [verify.check(one, CPU) for one in drawn]
    assert [check.complaint for check in checks if not check.passed] == []
    summary = campaign.summarise(checks, count, 1.0)
    assert (summary.asked, summary.tried, summary.wrong) == (count, count, 0)
    counts = {(group.kind, group.name): group.trials for group in summary.groups}
    assert {counts["pass", name] for name in PASSES} == {count // 3}
    assert {n for (kind, _), n in counts.items() if kind == "mode"} == {count // 5}
    assert {name for kind, name in counts if kind == "data"} == set(DATA)
    assert {name for kind, name in counts if kind == "check"} == {
        verify.ELEMENTS, *relations.RELATIONS
    }  # fmt: skip
    formats = Counter(one.case.format for one in drawn if one.case.direction != "forward")
    assert len(formats) == len(EVERY_KIND.formats)
    assert len(set(formats.values())) == 1


def test_trials_follow_from_seed_and_number() -> None:
    most = Limits(1e6, 2**16)
    assert trials.drawn(1, 5, most) == trials.drawn(1, 5, most)
    assert len({trials.drawn(seed, 5, most) for seed in range(5)}) == 5
    one = trial(data="sparse", misaligned=PLACED, bias=True)
    for first, second in zip(one.make(CPU)[:3], one.make(CPU)[:3], strict=True):
        assert first is not None
        assert second is not None
        assert first.equal(second)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("mode", ["float32 ieee", "float32 tf32", "float16", "bfloat16", "float64"])
def test_any_data_passes(mode: str, data: str) -> None:
    for direction in PASSES:
        one = trial(
            direction, mode, data=data, bias=True, format="nhwc/nchw/nchw", misaligned=PLACED
        )
        check = verify.check(one, CPU)
        assert check.passed, check.complaint


@pytest.mark.parametrize("mode", ["float32 tf32", "bfloat16"])
def test_bias_gradients_of_large_images_are_finite(mode: str) -> None:
    """Large numbers are such that the sum of all pixels of a channel is in the type's range."""
    for seed in range(12):
        one = trial(
            "weight_grad", mode, shape="2x1x600x700 1x1x1x1", data=trials.FAR, bias=True, seed=seed
        )
        grad_output = one.make(CPU).second
        deviation = grad_output.double().std() * grad_output.numel() ** 0.5
        assert 8 * deviation < torch.finfo(grad_output.dtype).max


def test_tensors_lie_as_the_trial_says() -> None:
    one = trial("weight_grad", format="nhwc/nchw/nchw", misaligned=PLACED)
    data = one.make(CPU)
    assert data.first.is_contiguous(memory_format=torch.channels_last)
    assert data.second.is_contiguous()
    assert all(tensor.data_ptr() % 16 == 4 for tensor in (data.first, data.second))
    weight = trials.compute(one, data).main
    assert weight.is_contiguous(memory_format=torch.channels_last)  # Autograd makes it so, too.
    assert not torch.are_deterministic_algorithms_enabled()


# --- What is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("mode", ["float32 ieee", "float32 tf32", "float16", "bfloat16", "float64"])
def test_a_missing_tap_is_found(direction: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        if trial.roles.second == "weight":
            second = data.second.clone()
            second[:, :, -1, -1] = 0
            return right(trial, data._replace(second=second))
        results = right(trial, data)
        results.main[:, :, -1, -1] = 0
        return results

    break_kernels(monkeypatch, broken)
    assert verify.ELEMENTS in found(trial(direction, mode, seed=1))


@pytest.mark.parametrize("value", [1e-4, float("nan"), float("inf")])
def test_a_single_wrong_element_is_found(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(result: Tensor) -> None:
        result[-1, -1, -1, 0] += value

    wrong_in(monkeypatch, change)
    check = verify.check(trial(), CPU)
    assert verify.ELEMENTS in dict(check.complaints)
    assert "1 of" in check.complaint
    assert "image 2, channel 3, [4, 0]" in check.complaint


def test_unwritten_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        with trials._poisoned_memory():
            nothing = torch.empty_like(right(trial, data).main)
        return Results(nothing, None)

    break_kernels(monkeypatch, broken)
    assert {verify.ELEMENTS, "repetition"} <= found(trial())


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("shape", ["2x20x9x8 24x20x3x2", "2x40x9x8 48x10x3x2 groups=4"])
def test_channels_that_are_not_compared_count_in_their_sum(
    direction: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial(direction, shape=shape)
    monkeypatch.setitem(judging.MOST_FLOPS, "cpu", one.problem.flops / 4)
    selection = judging.select(one, CPU)
    assert len(selection.rows) < selection.of_rows - 1
    assert {0, selection.of_rows - 1} <= set(selection.rows.tolist())
    assert found(one) == set()
    (missing, *_) = set(range(selection.of_rows)) - set(selection.rows.tolist())

    def change(result: Tensor) -> None:
        result.select(0 if direction == "weight_grad" else 1, missing)[-1, -1, 0] *= 1.01

    wrong_in(monkeypatch, change)
    check = verify.check(one, CPU)
    assert "sum from 0 to" in dict(check.complaints)[verify.ELEMENTS]
    assert "and the sum of all" in check.part


@pytest.mark.parametrize("direction", PASSES)
def test_images_are_compared_some_at_a_time(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial(direction, bias=True)
    whole = verify.check(one, CPU)
    monkeypatch.setattr(judging, "CHUNK_ELEMENTS", one.elements // 2)
    check = verify.check(one, CPU)
    assert check.passed
    assert check.share == pytest.approx(whole.share)

    def change(result: Tensor) -> None:
        result[-1, 0, 0, 0] += 0.01

    wrong_in(monkeypatch, change)
    assert verify.ELEMENTS in found(one)


def test_groups_are_left_out_where_there_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trial(shape="2x40x9x8 40x1x3x2 groups=40")
    monkeypatch.setitem(judging.MOST_FLOPS, "cpu", one.problem.flops / 4)
    check = verify.check(one, CPU)
    assert check.passed
    assert check.part == "all channels, 5 of 40 groups"


def test_wrong_bias_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        if results.bias_grad is not None:
            results.bias_grad[1] += 1e-4
        return results

    break_kernels(monkeypatch, broken)
    assert verify.ELEMENTS in found(trial("weight_grad", bias=True))
    assert found(trial("weight_grad", bias=False)) == set()


def test_chance_is_found_by_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def change(result: Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            result[0, 0, 0, 0] = result[0, 0, 0, 0].nextafter(torch.tensor(9.0))

    wrong_in(monkeypatch, change)
    assert found(trial()) == {"repetition"}


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
def test_what_depends_on_the_batch_is_found(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(result: Tensor) -> None:
        if result.shape[0] == 1:
            result *= 1.001

    wrong_in(monkeypatch, change)
    assert found(trial(direction)) == {"alone"}


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("operand", ["first", "second"])
def test_what_is_not_linear_is_found(
    direction: str, operand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that depends on whether an operand has zeros."""

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        if (getattr(data, operand) == 0).any():
            results.main[0, 0, 0, 0] += 0.01
        return results

    break_kernels(monkeypatch, broken)
    check = verify.check(trial(direction), CPU)
    ((name, complaint),) = check.complaints
    assert name == "linearity"
    assert f"in {getattr(check.trial.roles, operand)}:" in complaint


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("mode", ["float32 ieee", "float32 tf32"])
def test_scales_that_are_not_kept_are_found(
    direction: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small numbers lose bits, as they do with one scale for a whole tensor."""

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        largest = data.first.abs().nan_to_num().max().double()
        # The unit is so small that only scaled numbers lose bits.
        unit = torch.exp2(largest.log2().floor() - 48)
        first = ((data.first / unit).round() * unit).to(data.first.dtype)
        return right(trial, data._replace(first=first))

    break_kernels(monkeypatch, broken)
    assert found(trial(direction, mode, seed=1)) == {"scales"}


@pytest.mark.parametrize("direction", PASSES)
def test_gradients_of_another_function_are_found(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        if trial.case.direction != direction:
            results.main[0, 0, 0, 0] *= 1.5
        return results

    break_kernels(monkeypatch, broken)
    assert found(trial(direction)) == {"adjoint"}
    assert found(trial(direction, seed=1)) == set()


# --- The command --------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["normal", "spike"])
def test_failures_can_be_reproduced(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(result: Tensor) -> None:
        result[0] += 1e-3

    wrong_in(monkeypatch, change)
    monkeypatch.setattr(trials, "_NORMAL_SHARE", float(data == "normal"))
    assert cli.main([*RANDOM, "6", "--seed", "3", "--json", "--quiet"]) == 1
    captured = capsys.readouterr()
    failed = json.loads(captured.out)["failed"]
    assert failed
    for one in failed:
        assert one["command"] in captured.err
        words = shlex.split(one["command"])
        assert words[0] == "fastconv"
        assert cli.main([*words[1:], "--json", "--quiet"]) == 1
        (again,) = json.loads(capsys.readouterr().out)["failed"]
        for name in ("share", "complaints", "checked", "seed", "command", "part", "workload"):
            assert again[name] == one[name], name


def test_shapes_are_compared_beside_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    modes = ["--dtype", "float32", "bfloat16", "--format", "nhwc", "nchw/nhwc/nchw", "--bias"]
    assert cli.main([*CHECKED, *modes, "--json", "--quiet"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert len(checks) == 3 * 2 * 2
    for check in checks:
        assert check["passed"]
        assert 0 <= check["share"] <= 1
        assert check["ours"]["relative"] < 0.01
        assert check["peer"]["relative"] < 0.01
        assert check["part"] == "all channels"
    assert cli.main(CHECKED) == 0
    captured = capsys.readouterr()
    assert "PyTorch's" in captured.out
    assert captured.err.count(": ok, error") == 3


def test_failures_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong_in(monkeypatch, lambda result: result.add_(1))
    assert cli.main([*CHECKED, "--pass", "forward"]) == 1
    captured = capsys.readouterr()
    assert "FAIL" in captured.out
    assert "elements are wrong" in captured.err


def test_summaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, markdown = tmp_path / "summary.json", tmp_path / "summary.md"
    written = ["--output", str(output), "--markdown", str(markdown)]
    limits = ["--pass", "forward", "--dtype", "float64", "--format", "nchw"]
    assert cli.main([*RANDOM, "4", *limits, *written, "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "4 trials, 0 wrong" in captured.out
    contents = json.loads(output.read_text(encoding="utf-8"))
    assert contents["format"] == campaign.FORMAT
    assert contents["failed"] == []
    groups = {(group["kind"], group["name"]): group for group in contents["summary"]["groups"]}
    assert groups["mode", "float64"]["trials"] == groups["format", "nchw"]["trials"] == 4
    assert 0 < groups["check", "elements"]["share"] <= 1
    assert "| mode | float64 | 4 | 0 |" in markdown.read_text(encoding="utf-8")


def test_the_time_limit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RANDOM, "4", "--time-limit", "0"]) == 0
    captured = capsys.readouterr()
    assert "0 of 4 trials, 0 wrong" in captured.out
    assert "skipped 4 of 4 trials: the time limit was reached" in captured.err
    shape = ["--device", "cpu", "--shape", "1x2x6x6 3x2x3x3", "--time-limit", "0"]
    assert cli.main(["verify", *shape]) == 0
    assert capsys.readouterr().out.count("│ skipped │") == 3
    assert cli.main(["verify", *shape, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["skipped"]) == 3
    assert all(command.startswith("fastconv verify --shape") for command in found["skipped"])


def test_ctrl_c_keeps_what_was_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = verify.check

    def interrupted(one: Trial, **options: Any) -> Check:
        if one.case.direction == "weight_grad":
            raise KeyboardInterrupt
        return right(one, **options)

    monkeypatch.setattr(verify, "check", interrupted)
    assert cli.main([*RANDOM, "4"]) == 130
    assert "2 of 4 trials, 0 wrong" in capsys.readouterr().out


def test_progress_is_told_now_and_then() -> None:
    check = verify.check(trial(), CPU)
    assert report.Brief(every_s=60.0)([check]) is None
    assert report.Brief(every_s=1e-9)([check, check]) == "0 wrong so far"
    failed = replace(check, failure="no")
    assert report.Brief(every_s=60.0)([check, failed]) == "FAIL, failed: no"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--random", "0"], "at least 1, but got '0'"),
        (["--random", "4", "--shape", SHAPE], "--random draws what --shape would say"),
        (["--random", "4", "--model", "resnet50"], "--random draws what --model would say"),
        (["--random", "4", "--bias"], "--random draws what --bias would say"),
        (["--seed", "-1"], "at least 0, but got '-1'"),
        (["--jobs", "none"], "at least 1, but got 'none'"),
        (["--data", "none"], "invalid choice: 'none'"),
        (["--format", "nhwc/nchw"], "invalid choice: 'nhwc/nchw'"),
        (["--random", "4", "--output", "missing/file"], "there is no folder"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = cli.main(["verify", "--device", "cpu", *arguments])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


# --- Processes ----------------------------------------------------------------------------------


def dies(one: Trial) -> Check:
    """A checker for worker processes, which import it; it kills its process for seed 1."""
    if one.seed == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return Check(one)


def sleeps(one: Trial) -> Check:
    time.sleep(600)
    raise AssertionError("nobody waits for this")


def test_processes_that_die_are_replaced() -> None:
    several = [trial(seed=seed) for seed in range(3)]
    checks = {check.trial: check for check in campaign.run(several, dies, CPU, 2, 600)}
    assert checks.keys() == set(several)
    failures = [checks[one].failure for one in several]
    assert failures == [None, "the process died: SIGSEGV", None]
    assert [checks[one].passed for one in several] == [True, False, True]


def test_processes_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "TRIAL_SECONDS", 0.1)
    (check,) = campaign.run([trial()], sleeps, CPU, 2, 600)
    assert "no result within" in check.complaint


def test_no_application_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """If sys.executable is an application that embeds Python, trials run in its process."""
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/usr/bin/application")
    with pytest.raises(ChildProcessError, match=r"2 processes: .*application.* --jobs 1"):
        next(campaign.run([trial()], Check, CPU, 2, 600))
    assert [check.trial for check in campaign.run([trial()], Check, CPU, 1, 600)] == [trial()]
    assert campaign.default_jobs(torch.device("cuda")) == 1


def test_what_runs_out_of_memory_is_tried_by_itself() -> None:
    pool = campaign._Pool(dies, CPU, 2, 600)
    one = trial()
    failed = Check(one, failure="out of memory: a smaller batch would fit")
    assert not pool._is_retried_alone(failed, running=1)
    assert not pool._is_retried_alone(Check(one, failure="another"), running=2)
    assert pool._is_retried_alone(failed, running=2)
    assert pool._bytes(one) == float("inf")
    assert not pool._is_retried_alone(failed, running=2)
