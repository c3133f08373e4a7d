"""Isolation: patterns predict exactly what changes, and faulty kernels are found.

Only the tests of the patterns themselves compare with float64 results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastconv import cli
from fastconv.bench import configurations, isolation, population, trials, verify
from fastconv.bench.cases import PASSES, Case
from fastconv.bench.isolation import Pattern
from fastconv.bench.trials import PLACED, Data, Limits, Results, Trial
from fastconv.kernels.gpus import H200
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING, parse_shape

CPU = torch.device("cpu")
SHAPE = "3x6x9x8 4x3x3x2 padding=1,2 stride=2,1 groups=2"
MODES = ["float32 ieee", "float32 tf32", "float16", "bfloat16", "float64"]
SMALL = 3e4, 3e3  # operations and elements
LOUD = 2.0**20

Compute = Callable[[Trial, Data], Results]


# --- Patterns -------------------------------------------------------------------------------------


def problems(count: int) -> Iterator[Problem]:
    """Small random problems of all kinds."""
    draw = Random(0)
    kinds = (population.workload, population.narrow, population.practical, population.volume)
    for number in range(count):
        yield kinds[number % len(kinds)](draw, *SMALL).problem


def plain(problem: Problem, direction: str, given: dict[str, Tensor]) -> Tensor:
    """The pass in float64, through PyTorch."""
    stride, padding, dilation, groups = problem.geometry
    nothing = {
        "input": torch.zeros(problem.input_shape),
        "weight": torch.zeros(problem.weight_shape),
        "grad_output": torch.zeros(problem.output_shape),
    }
    at = {role: given.get(role, one).double() for role, one in nothing.items()}
    at["input"].requires_grad_(), at["weight"].requires_grad_()
    sides = [side for pair in zip(padding[-2::-2], padding[::-2], strict=True) for side in pair]
    padded = torch.nn.functional.pad(at["input"], sides)
    convolve = torch.nn.functional.conv2d if len(stride) == 2 else torch.nn.functional.conv3d
    output = convolve(padded, at["weight"], given.get("bias"), stride, 0, dilation, groups)
    if direction == "forward":
        return output.detach() + given.get("residual", 0)
    wanted = at["input" if direction == "input_grad" else "weight"]
    (grad,) = torch.autograd.grad(output, wanted, at["grad_output"])
    return grad


def tensors_of(problem: Problem, direction: str) -> dict[str, Tensor]:
    shapes = {
        "input": problem.input_shape,
        "weight": problem.weight_shape,
        "grad_output": problem.output_shape,
    }
    del shapes[isolation.RESULTS[direction]]
    if direction == "forward":
        shapes["bias"] = (problem.out_channels,)
        shapes["residual"] = problem.output_shape
    return {
        role: isolation.positive(shape, torch.float64, 0, seed)
        for seed, (role, shape) in enumerate(shapes.items())
    }


def made_loud(pattern: Pattern, given: dict[str, Tensor]) -> dict[str, Tensor]:
    masks = isolation._masks(pattern, CPU)
    return {role: isolation.made_loud(one, masks[role], LOUD) for role, one in given.items()}


@pytest.mark.parametrize("direction", PASSES)
def test_patterns_say_exactly_what_changes(direction: str) -> None:
    draw = Random(1)
    some_change = some_stay = 0
    for problem in problems(60):
        given = tensors_of(problem, direction)
        before = plain(problem, direction, given)
        for pattern, is_nan in isolation.patterns(problem, direction, draw):
            assert not is_nan or pattern.whole_planes
            after = plain(problem, direction, made_loud(pattern, given))
            # The tolerance ignores another order of summation; a loud number exceeds it by far.
            changed = (after - before).abs() > 1e-9 * before.abs()
            unchanged = pattern.unchanged.mask(CPU)
            reads = isolation._product(pattern.reading, CPU) | (
                direction == "forward"
            )  # Bias and residual may be loud too.
            assert (changed == (~unchanged & reads)).all(), (problem, pattern.describe())
            some_change += int(changed.sum())
            some_stay += int((~changed).sum())
            if direction == "weight_grad":
                grad = given["grad_output"]
                stays = (made_loud(pattern, given)["grad_output"] == grad).flatten(2).all(2).all(0)
                assert (pattern.unchanged_bias_grad <= stays).all()
    assert some_change > 1000
    assert some_stay > 1000


def test_outputs_that_read_only_padding_are_told_apart() -> None:
    """Outputs that read only padding must not be required to change."""
    problem = parse_shape("1x1x1x1 1x1x1x1 padding=2,0").problem
    (pattern, _), *_ = isolation.patterns(problem, "forward", Random(0))
    assert pattern.reading[0].tolist() == [False, False, True, False, False]
    before = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]).view(1, 1, 5, 1)
    assert isolation.complaint(pattern, before, before, lambda: None, must_change=False) is None


@pytest.mark.parametrize("direction", PASSES)
def test_patterns_are_of_all_kinds(direction: str) -> None:
    """Patterns restrict rows, columns, both or neither, and some make whole images loud."""
    problem = parse_shape("4x6x9x8 4x6x3x3 padding=1,1").problem
    draw = Random(0)
    seen = [isolation.drawn(problem, direction, draw) for _ in range(300)]
    kinds = {tuple(bool(one.all()) for one in pattern.unchanged.sides) for pattern in seen}
    assert len(kinds) == 4
    assert direction == "weight_grad" or any(pattern.other_images for pattern in seen)
    assert any(not pattern.whole_planes for pattern in seen)


# --- Trials ---------------------------------------------------------------------------------------


def trial(direction: str = "forward", mode: str = "float32 ieee", **more: Any) -> Trial:
    dtype, _, precision = mode.partition(" ")
    workload = parse_shape(more.pop("shape", SHAPE))
    case = Case(workload, direction, dtype, precision or None, more.pop("format", "nchw"))
    return Trial(case, **more)


def break_kernels(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[Compute, Trial, Data], Results]
) -> None:
    right = trials.compute
    monkeypatch.setattr(trials, "compute", lambda trial, data: broken(right, trial, data))


def complaints(one: Trial, seeds: int = 12) -> list[str]:
    """The complaints about the trial with different seeds."""
    found = (isolation.check(replace(one, seed=seed), CPU).complaint for seed in range(seeds))
    return [text for text in found if text is not None]


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", ["nchw", "nhwc", "nhwc/nchw/nchw"])
def test_right_results_pass(direction: str, mode: str, format: str) -> None:
    for misaligned in ((), PLACED, ("weight",)):
        one = trial(direction, mode, format=format, misaligned=misaligned, bias=True)
        assert complaints(one, seeds=3) == []


def test_rounding_of_cpu_activations_may_depend_on_neighbours() -> None:
    """PyTorch's error function takes another path for a vector with a large number."""
    one = trial(shape="1x32x28x28 320x32x1x1", bias=True, seed=862999647)
    given = isolation._given(one, CPU, Random(f"{one.seed} isolation"))
    assert given.activation == "gelu"
    assert isolation.check(one, CPU).complaint is None


def test_random_trials_pass() -> None:
    for number in range(60):
        one = trials.drawn(11, number, Limits(2e5, 2**14))
        assert isolation.check(one, CPU).complaint is None, one.label


def test_all_that_a_trial_reads_has_loud_numbers_around_it() -> None:
    """Loud numbers lie before and behind a tensor, or between its rows; alignment is kept."""
    kinds = set()
    for seed in range(40):
        one = trial(seed=seed, bias=True, misaligned=("weight",))
        draw = Random(f"{one.seed} isolation")
        given = isolation._given(one, CPU, draw)
        data = isolation._data(one, given, {}, torch.nan)
        kinds.add((given.with_gaps, data.activation != "identity", data.residual is not None))
        for tensor in filter(torch.is_tensor, data[:4]):
            storage = tensor.new_empty(0).set_(tensor.untyped_storage())
            assert tensor.isfinite().all()
            assert int(storage.isnan().sum()) == storage.numel() - tensor.numel() > 0
        if given.with_gaps != "weight":
            assert data.second.data_ptr() % 16 == data.second.element_size()
        if given.with_gaps != "input":
            assert data.first.data_ptr() % 16 == 0
    assert {with_gaps for with_gaps, *_ in kinds} == {"", "input", "weight"}
    assert any(activated and residual for _, activated, residual in kinds)


SHARE = 2.0**-10
"""A faulty result adds this share of another: no float64 check of 16-bit types could see it."""


def shifted(tensor: Tensor, dim: int) -> Tensor:
    """Each element's next neighbour along a dimension, and zero for the last."""
    out = torch.zeros_like(tensor)
    size = tensor.shape[dim] - 1
    out.narrow(dim, 0, size).copy_(tensor.narrow(dim, 1, size))
    return out


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("dim", range(4))
def test_what_a_neighbour_reads_is_found(
    direction: str, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each result has a small share of the next image, channel, row, column or tap added."""

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        return results._replace(main=results.main + SHARE * shifted(results.main, dim))

    break_kernels(monkeypatch, broken)
    found = complaints(trial(direction, shape="3x6x9x8 4x6x3x2 padding=1,2 stride=2,1"))
    assert len(found) >= 6
    assert all("results that read no loud element have changed" in text for text in found)


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("operand", ["first", "second"])
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("mode", ["float32 ieee", "float16"])
def test_memory_around_a_tensor_is_found(
    direction: str, operand: str, behind: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single number next to a tensor is found even if it counts little."""

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        tensor: Tensor = getattr(data, operand)
        last = sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        at = tensor.storage_offset() + (last + 1 if behind else -1)
        results = right(trial, data)
        results.main[0, 0, 0, 0] += 2.0**-8 * tensor.as_strided((1,), (1,), at)[0]
        return results

    break_kernels(monkeypatch, broken)
    # Patterns in which this result may change do not find it.
    assert len(complaints(trial(direction, mode))) >= 4


def test_numbers_between_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel treats a tensor as dense although its rows have gaps between them."""
    found_gaps = []

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        first = data.first
        if not first.is_contiguous():
            found_gaps.append(True)
            first = first.as_strided(first.shape, torch.empty(first.shape).stride())
        return right(trial, data._replace(first=first))

    break_kernels(monkeypatch, broken)
    found = complaints(trial(), seeds=30)
    assert found_gaps
    assert found


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("value", [torch.nan, 0.0, 1.0], ids=["nan", "zero", "constant"])
def test_results_that_are_not_written_are_found(
    direction: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element keeps a constant, or NaN."""

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        results.main[-1, -1, 1, 1] = value
        return results

    break_kernels(monkeypatch, broken)
    found = complaints(trial(direction))
    is_nan = value != value  # NaN is found only among results that may not change.
    assert len(found) >= (3 if is_nan else 6)
    if not is_nan:
        assert all("results that read loud elements have not changed" in text for text in found)


def test_operands_that_a_result_ignores_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of taps is left out, so that elements that only these taps read have no effect."""

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        second = data.second.clone()
        second[:, :, :, -1] = 0
        return right(trial, data._replace(second=second))

    break_kernels(monkeypatch, broken)
    assert complaints(trial(shape="2x3x6x7 4x3x3x3"), seeds=30)


@pytest.mark.parametrize("which", ["bias", "residual"])
def test_the_neighbours_bias_and_residual_are_found(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    had = []

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        tensor = getattr(data, which)
        had.append(tensor is not None)
        if tensor is not None:
            tensor = tensor.roll(1, 0 if which == "bias" else 3)
        return right(trial, data._replace(**{which: tensor}))

    break_kernels(monkeypatch, broken)
    found = complaints(trial(bias=True))
    assert any(had)
    assert len(found) >= 3


def test_the_neighbours_bias_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        assert results.bias_grad is not None
        return results._replace(bias_grad=results.bias_grad + SHARE * results.bias_grad.roll(1))

    break_kernels(monkeypatch, broken)
    found = complaints(trial("weight_grad", bias=True))
    assert found
    assert all("bias gradient: " in text for text in found)


def test_isolation_is_one_of_the_checks_of_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number behind the input is zero except in isolation: no other check finds its use."""

    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        end = data.first.storage_offset() + data.first.numel()
        if data.first.is_contiguous() and end < data.first.untyped_storage().nbytes() // 4:
            results.main[...] += data.first.as_strided((1,), (1,), end)
        return results

    break_kernels(monkeypatch, broken)
    seeds = (check for seed in range(9) for check in [verify.check(trial(seed=seed), CPU)])
    assert {name for check in seeds for name, _ in check.complaints} == {"isolated"}


# --- The command ----------------------------------------------------------------------------------

COMMAND = ["verify", "--device", "cpu", "--isolation"]


def test_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMAND, "--shape", SHAPE, "--bias", "--json", "--quiet"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {check["direction"] for check in checks} == set(PASSES)
    for check in checks:
        assert check["passed"]
        assert check["checked"] == ["isolated"]
        assert check["family"] == "cpu"
        assert check["share"] is None


def test_random_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMAND, "--random", "6", "--json", "--quiet"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["tried"], summary["wrong"]) == (6, 0)
    groups = {(group["kind"], group["name"]): group["trials"] for group in summary["groups"]}
    assert {name for kind, name in groups if kind == "check"} == {"isolated"}
    assert groups["check", "isolated"] == 6


@pytest.mark.parametrize(
    ("words", "misaligned"),
    [([], []), (["--misaligned"], list(PLACED)), (["--misaligned", "bias", "input"], None)],
)
def test_misaligned_tensors(
    words: list[str], misaligned: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*COMMAND, "--shape", SHAPE, *words, "--json", "--quiet"]) == 0
    for check in json.loads(capsys.readouterr().out)["checks"]:
        expected = ["bias", "input"] if misaligned is None else misaligned
        assert sorted(check["misaligned"]) == sorted(expected)


def test_failures_name_what_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(right: Compute, trial: Trial, data: Data) -> Results:
        results = right(trial, data)
        return results._replace(main=results.main + SHARE * shifted(results.main, 3))

    break_kernels(monkeypatch, broken)
    words = [*COMMAND, "--shape", SHAPE, "--pass", "forward", "--seed", "1"]
    assert cli.main([*words, "--json", "--quiet"]) == 1
    captured = capsys.readouterr()
    (check,) = json.loads(captured.out)["failed"]
    assert "have changed, first at" in check["complaints"]["isolated"]
    assert "quiet planes x rows x columns: input" in check["complaints"]["isolated"]


def test_unknown_tensors_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*COMMAND, "--shape", SHAPE, "--misaligned", "gradient"])
    assert stop.value.code == 2
    assert "invalid choice: 'gradient'" in capsys.readouterr().err


@pytest.mark.parametrize("direction", PASSES)
def test_scaled_fp16_may_change_arithmetic(direction: str) -> None:
    """Plans with scaled fp16 are known by a constant of their kernels."""
    pattern = mock.Mock(spec=Pattern, whole_planes=False, other_images=False)
    for dtype, expected in (("float32", True), ("bfloat16", False)):
        one = Case(FOUNDING[0], direction, dtype, "tf32", "nchw")
        (found,) = configurations.planned(one, H200)
        assert isolation.may_change_arithmetic(found.plan, direction, pattern) is expected
