"""``fastconv verify`` of 1-D, 3-D and transposed layers: the same checks, on what users call."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastconv import cli
from fastconv.bench import contestants, population, relations, trials, verify
from fastconv.bench.cases import PASSES, Case
from fastconv.bench.trials import DATA, PLACED, Data, Limits, Results, Trial
from fastconv.workloads import parse_shape, workload_of

CPU = torch.device("cpu")
SEQUENCE = "3x6x19 4x3x3 padding=4,1 stride=2 dilation=2 groups=2"
UP = "3x4x7 4x3x4 transposed stride=3 padding=2,1 output_padding=2 groups=2"
UP_IMAGES = "3x4x4x5 4x3x3x2 transposed stride=2,1 padding=1,0 output_padding=1,0 groups=2"
VOLUME = "2x4x4x5x3 4x2x2x3x2 padding=2,0,1,1,0,1 stride=1,2,1 dilation=2,1,1 groups=2"
UP_VOLUMES = "2x4x2x3x3 4x2x2x1x3 transposed stride=2,1,2 padding=0,0,1 output_padding=1,0,1"
LAYERS = (SEQUENCE, UP, UP_IMAGES, VOLUME, UP_VOLUMES)
MODES = ("float32 ieee", "float32 tf32", "bfloat16", "float64")


def trial(shape: str, direction: str = "forward", mode: str = "float32 ieee", **more: Any) -> Trial:
    dtype, _, precision = mode.partition(" ")
    case = Case(parse_shape(shape), direction, dtype, precision or None, more.pop("format", "nchw"))
    return Trial(case, **{"seed": relations.ADJOINT_EVERY, **more})


def found(one: Trial) -> set[str]:
    """The names of the checks that fail."""
    check = verify.check(one, CPU)
    assert check.failure is None
    return set(dict(check.complaints))


# --- What is right --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", ["nchw", "nhwc", "nhwc/nchw/nchw", "nchw/nhwc/nhwc"])
def test_right_results_pass(shape: str, mode: str, format: str) -> None:
    for direction in PASSES:
        one = trial(shape, direction, mode, format=format, bias=True, misaligned=PLACED)
        check = verify.check(one, CPU, with_peer=True)
        assert check.passed, check.complaint
        assert set(check.checked) >= {verify.ELEMENTS, "isolated", "adjoint"}
        assert check.peer is not None
        assert check.peer.relative < 0.01


@pytest.mark.parametrize("data", DATA)
def test_any_data_passes(data: str) -> None:
    for shape in LAYERS:
        for direction in PASSES:
            check = verify.check(trial(shape, direction, data=data, bias=True), CPU)
            assert check.passed, check.complaint


def test_tensors_lie_as_the_layer_says() -> None:
    """Names of tensors, for formats and alignment, are the layer's own."""
    one = trial(UP, format="nhwc/nchw/nchw", misaligned=("input",))
    data = one.make(CPU)
    assert data.first.shape == (3, 4, 1, 7)
    assert data.first.is_contiguous(memory_format=torch.channels_last)
    assert (data.first.storage_offset(), data.second.storage_offset()) == (1, 0)
    assert data.second.is_contiguous()
    seen: list[Tensor] = []

    def spy(input: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(input)
        return input

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contestants, "our_function", lambda workload: spy)
        trials.compute(one, data)
    assert seen[0].shape == one.case.workload.input
    assert seen[0].mT.is_contiguous()


# --- What is wrong --------------------------------------------------------------------------------


Function = Callable[..., Tensor]


def change_function(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Function], Function]
) -> None:
    """Has ``compute`` call another function in place of fastconv's."""
    right = contestants.our_function
    monkeypatch.setattr(contestants, "our_function", lambda workload: change(right(workload)))


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize(
    "change",
    [
        lambda call: lambda x, *at, **more: call(x.flip(-1), *at, **more).flip(-1),
        lambda call: lambda x, w, bias, **more: call(x, w, None, **more),
        lambda call: lambda x, w, *at, **more: call(x, w.flip(-1), *at, **more),
    ],
    ids=["mirrored", "without bias", "flipped weight"],
)
def test_functions_that_compute_something_else_are_found(
    shape: str, change: Callable[[Function], Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is PyTorch's function of the layer, not a pass of the layer's problem."""
    change_function(monkeypatch, change)
    assert verify.ELEMENTS in found(trial(shape, bias=True))


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("direction", PASSES)
def test_faults_of_every_pass_are_found(
    shape: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = trials.compute

    def broken(one: Trial, data: Data) -> Results:
        results = right(one, data)
        results.main[-1, -1, -1, -1] += 1e-3
        return results

    monkeypatch.setattr(trials, "compute", broken)
    assert found(trial(shape, direction)) >= {verify.ELEMENTS, "linearity"}


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("direction", PASSES)
def test_gradients_of_another_function_are_found(
    shape: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = trials.compute

    def broken(one: Trial, data: Data) -> Results:
        results = right(one, data)
        if one.case.direction != direction:
            results.main[0] *= 1.5
        return results

    monkeypatch.setattr(trials, "compute", broken)
    assert found(trial(shape, direction)) == {"adjoint"}


@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("direction", PASSES)
def test_what_a_neighbour_reads_is_found(
    shape: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = trials.compute

    def broken(one: Trial, data: Data) -> Results:
        results = right(one, data)
        return results._replace(main=results.main + 2.0**-10 * results.main.roll(1, -1))

    monkeypatch.setattr(trials, "compute", broken)
    check = verify.check_isolation(trial(shape, direction), CPU)
    assert "results that read no loud element have changed" in check.complaint


@pytest.mark.parametrize("shape", LAYERS)
def test_the_neighbours_bias_is_found(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change_function(
        monkeypatch,
        lambda call: lambda x, w, bias, **more: call(x, w, bias + bias.roll(1) / 1024, **more),
    )
    assert not verify.check_isolation(trial(shape, bias=True), CPU).passed


# --- What is drawn --------------------------------------------------------------------------------


def test_random_trials_are_layers_of_all_kinds() -> None:
    most = Limits(2e7, 2**22)
    layers = [trials.drawn(3, number, most).case.workload for number in range(600)]
    counts = Counter(layer.function for layer in layers)
    assert counts["conv2d"] > 300
    others = ("conv1d", "conv_transpose1d", "conv_transpose2d", "conv3d")
    assert min(counts[name] for name in others) > 20
    assert counts["conv_transpose3d"] > 5
    sequences = [layer for layer in layers if layer.function == "conv1d"]
    volumes = [layer for layer in layers if layer.function == "conv3d"]
    up = [layer for layer in layers if layer.transposed]
    for kinds, some in (
        (sequences, lambda one: one.input[2] > 10_000),
        (sequences, lambda one: one.weight[2] > 20),
        (sequences, lambda one: one.sides[0] > 0 == one.sides[1]),  # causal
        (sequences, lambda one: one.dilation[0] > 1),
        (sequences + up, lambda one: max(one.stride) > 2),
        (volumes, lambda one: one.sides[0] > 0 == one.sides[1]),  # causal
        (volumes, lambda one: max(one.dilation) > 1),
        (volumes, lambda one: len(set(one.stride)) > 1),
        (volumes, lambda one: one.groups == one.input[1] > 1),
        (volumes, lambda one: one.weight[2] == 1 < one.weight[3]),
        (up, lambda one: any(one.output_padding)),
        (up, lambda one: 1 < one.groups < one.input[1]),
        (up, lambda one: one.groups == one.input[1] > 1),
        (up, lambda one: len(set(one.sides)) > 1),
    ):
        assert sum(map(some, kinds)) >= 3


def test_drawn_layers_keep_to_the_limits() -> None:
    draw = Random(1)
    for kind in (population.sequence, population.transposed, population.volume):
        for _ in range(40):
            one = kind(draw, 1e6, 2**16)
            assert one.problem.flops <= 1e6
            assert parse_shape(one.shape) == one


def test_every_convolution_is_the_problem_of_a_transposed_layer() -> None:
    draw = Random(2)
    for _ in range(60):
        problem = population.workload(draw, 1e8).problem
        assert workload_of(problem, transposed=True).problem == problem
        assert workload_of(problem).problem == problem
        of_volumes = population.volume(draw, 1e8).problem
        assert workload_of(of_volumes, transposed=True).problem == of_volumes
        of_rows = population.sequence(draw, 1e8).problem
        for transposed in (False, True):
            layer = workload_of(of_rows, 1, transposed)
            assert layer.problem == of_rows
            layer.check()


# --- The command ----------------------------------------------------------------------------------


def test_failures_can_be_reproduced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = trials.compute

    def broken(one: Trial, data: Data) -> Results:
        results = right(one, data)
        results.main[0] += 1e-3
        return results

    monkeypatch.setattr(trials, "compute", broken)
    monkeypatch.setattr(trials, "_PRACTICAL_SHARE", 0.0)
    monkeypatch.setattr(trials, "_NARROW_SHARE", 0.0)
    monkeypatch.setattr(trials, "_SEQUENCE_SHARE", 0.4)
    monkeypatch.setattr(trials, "_TRANSPOSED_SHARE", 0.6)
    arguments = ["verify", "--device", "cpu", "--random", "9", "--seed", "4", "--dtype", "float64"]
    assert cli.main([*arguments, "--json", "--quiet"]) == 1
    failed = json.loads(capsys.readouterr().out)["failed"]
    assert len(failed) == 9
    for one in failed:
        words = shlex.split(one["command"])
        assert cli.main([*words[1:], "--json", "--quiet"]) == 1
        (again,) = json.loads(capsys.readouterr().out)["failed"]
        for name in ("share", "complaints", "checked", "seed", "command", "part", "workload"):
            assert again[name] == one[name], name


def test_shapes_are_compared_beside_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [word for shape in LAYERS for word in ("--shape", shape)]
    arguments = ["verify", "--device", "cpu", *shapes, "--bias", "--json", "--quiet"]
    assert cli.main(arguments) == 0
    contents = json.loads(capsys.readouterr().out)
    assert len(contents["checks"]) == 3 * len(LAYERS)
    groups = {(one["kind"], one["name"]): one for one in contents["summary"]["groups"]}
    for name in ("conv1d", "conv_transpose1d", "conv_transpose2d"):
        assert groups["layer", name]["trials"] == 3


def test_axes_restrict_what_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    volumes = trials.EVERY_KIND._replace(axes=(3,))
    drawn = [trials.drawn(5, number, Limits(1e5, 2**14), volumes) for number in range(30)]
    functions = {one.case.workload.function for one in drawn}
    assert functions == {"conv3d", "conv_transpose3d"}
    assert cli.main(["verify", "--device", "cpu", "--shape", VOLUME, "--axes", "3"]) == 2
    assert "--axes restricts what --random draws" in capsys.readouterr().err
