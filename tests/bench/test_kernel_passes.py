"""Passes of 1-D, 3-D and transposed layers, and those of their problems that kernels compute."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fastconv import cli
from fastconv.bench import configurations, kernel_passes, tune
from fastconv.bench.cases import PASSES, Case
from fastconv.kernels import hopper
from fastconv.kernels.family import Plan
from fastconv.kernels.gpus import H200
from fastconv.timing import Effort
from fastconv.workloads import parse_shape, workload_of

CPU = torch.device("cpu")
SEQUENCE = "2x4x19 6x2x5 padding=2 dilation=2 stride=3 groups=2"
TRANSPOSED = "16x512x128 512x256x16 transposed stride=8 padding=4"
PROBLEM = "16x256x1x1024 512x256x1x16 stride=1,8 padding=0,4"
OF_TRANSPOSED = {"forward": "input_grad", "input_grad": "forward", "weight_grad": "weight_grad"}


def case(direction: str, shape: str = TRANSPOSED, format: str = "nchw") -> Case:
    return Case(parse_shape(shape), direction, "bfloat16", None, format)


@pytest.mark.parametrize(
    "shape",
    [
        SEQUENCE,
        TRANSPOSED,
        "2x4x5x6 4x3x3x2 transposed stride=2,3 padding=1,0 output_padding=1,2 groups=2",
        "2x4x3x5x6 6x2x2x3x1 stride=1,2,2 padding=1,0,1,1,0,0 groups=2",
        "2x4x2x5x6 4x3x1x3x2 transposed stride=1,2,3 output_padding=0,1,2 groups=2",
    ],
)
def test_the_tensors_of_a_layer_and_of_its_problem(shape: str) -> None:
    one = case("forward", shape)
    at, problem = one.tensors(CPU), one.workload.problem
    images = kernel_passes.of_problem(one.workload, at)
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    assert tuple(tuple(tensor.shape) for tensor in images) == shapes
    for back, given in zip(kernel_passes.of_layer(one.workload, images), at, strict=True):
        assert back.equal(given)
    for role in images._fields:
        layers = getattr(at, kernel_passes.counterpart(one.workload, role))
        assert kernel_passes.as_images(layers).equal(getattr(images, role))


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("format", ["nchw", "nhwc"])
def test_layers_have_the_plans_of_their_problems(direction: str, format: str) -> None:
    for shape, names in ((TRANSPOSED, OF_TRANSPOSED), (SEQUENCE, {})):
        layer = case(direction, shape, format)
        problem = workload_of(layer.workload.problem).shape
        of_problem = case(names.get(direction, direction), problem, format)
        (found,), (expected,) = (configurations.planned(one, H200) for one in (layer, of_problem))
        assert found.plan == expected.plan


def test_info_says_what_kernels_compute(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["info", "--device", "cpu", "--shape", TRANSPOSED, "--dtype", "bfloat16"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for direction, kernel_pass in OF_TRANSPOSED.items():
        assert f"  {direction}, computed as {kernel_pass} of {PROBLEM}: hopper, " in shown
    assert cli.main([*arguments, "--json"]) == 0
    for one in json.loads(capsys.readouterr().out)["cases"]:
        (found,) = one["configurations"]
        assert found["kernel_pass"] == OF_TRANSPOSED[found["direction"]]
        assert found["problem"] == PROBLEM
    assert cli.main(["info", "--device", "cpu", "--shape", "2x3x9 4x3x3 padding=2,0"]) == 0
    shown = capsys.readouterr().out
    assert "  forward, computed as forward of 2x3x1x9 4x3x1x3 padding=0,0,2,0: " in shown
    for own in ("2x3x9x9 4x3x3x3", "2x3x4x9x9 4x3x2x3x3"):
        assert cli.main(["info", "--device", "cpu", "--shape", own]) == 0
        assert "computed as" not in capsys.readouterr().out


def test_info_says_which_images_a_volume_is(capsys: pytest.CaptureFixture[str]) -> None:
    frames = ["info", "--device", "cpu", "--shape", "2x16x4x9x9 16x16x1x3x3 padding=0,1,1"]
    assert cli.main([*frames, "--format", "nhwc", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "  forward, computed as forward of 8x16x9x9 16x16x3x3 padding=1,1: " in shown
    assert "forward on a CPU: direct kernel: tiles of " in shown
    assert cli.main(frames) == 0
    assert "computed as" not in capsys.readouterr().out


def test_transposed_layers_are_tuned_by_their_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "device_gpu", lambda device: H200)
    asked: list[str] = []

    def alternatives(direction: str, problem: Any, *_: Any) -> list[Plan]:
        assert problem == parse_shape(TRANSPOSED).problem
        asked.append(direction)
        return []

    monkeypatch.setattr(hopper, "alternatives", alternatives)
    for direction in OF_TRANSPOSED:
        tune.tune(case(direction), CPU, Effort(1, 0.0))
    assert asked == list(OF_TRANSPOSED.values())
