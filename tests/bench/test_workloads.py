"""Workloads: the built-in suites, shapes as text, and JSON files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.flop_counter

from fastconv import cli
from fastconv.bench import contestants
from fastconv.bench.cases import Case
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
SEQUENCE = "2x4x19 6x2x5 stride=3 padding=4,0 dilation=2 groups=2"
UP = "16x512x128 512x256x16 transposed stride=8 padding=4"
VOLUME = "1x4x5x9x8 6x2x3x2x3 padding=2,0,1,0,0,1 stride=1,2,2 dilation=2,1,1 groups=2"
UP_VOLUMES = (
    "2x4x3x4x5 4x3x1x3x2 transposed stride=1,2,3 padding=0,1,0 output_padding=0,1,2 groups=2"
)
UP_IMAGES = "2x4x5x6 4x3x3x2 transposed stride=2,3 padding=1,0 output_padding=1,2 groups=2"


ALL_SHAPES = (SHAPE, CAUSAL, SEQUENCE, UP, UP_IMAGES, VOLUME, UP_VOLUMES)


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
    assert {one.function for one in suite("sequence")} == {"conv1d"}
    functions = {one.function for one in suite("transposed")}
    assert functions == {"conv_transpose1d", "conv_transpose2d"}
    volumes = (*suite("video"), *suite("volume"))
    assert {one.function for one in volumes} == {"conv3d", "conv_transpose3d"}
    for workload in everything:
        parsed = parse_shape(workload.shape)
        assert (parsed.problem, parsed.output) == (workload.problem, workload.output)
        assert from_dict(json.loads(json.dumps(to_dict(workload)))) == workload
        assert workload.scaled(64).problem.flops > 0


def test_shapes_are_read_as_written() -> None:
    workload = parse_shape(SHAPE)
    assert workload == Workload(
        workload.name, "", (2, 4, 9, 11), (6, 2, 3, 5), (2, 2), (1, 2), (1, 2), 2
    )
    assert parse_shape(CAUSAL).sides == (1, 0, 2, 0)


def test_shapes_of_volumes() -> None:
    volume, up = map(parse_shape, (VOLUME, UP_VOLUMES))
    assert volume == Workload(
        volume.name, "", (1, 4, 5, 9, 8), (6, 2, 3, 2, 3), (1, 2, 2), (2, 0, 1, 0, 0, 1),
        (2, 1, 1), 2,
    )  # fmt: skip
    assert (up.function, up.output) == ("conv_transpose3d", (2, 6, 3, 8, 16))
    short = parse_shape("8x64x16x56x56 64x64x3x3x3 stride=1,2,2 padding=1")
    assert (short.padding, short.output) == ((1, 1, 1), (8, 64, 16, 28, 28))
    for one in (volume, up, short):
        assert parse_shape(one.shape) == one
        assert from_dict(json.loads(json.dumps(to_dict(one)))) == one


def test_shapes_of_sequences_and_of_transposed_convolutions() -> None:
    sequence, up, images = map(parse_shape, (SEQUENCE, UP, UP_IMAGES))
    assert sequence == Workload(
        SEQUENCE, "", (2, 4, 19), (6, 2, 5), (3,), (4, 0), (2,), 2
    )  # fmt: skip
    assert up == Workload(UP, "", (16, 512, 128), (512, 256, 16), (8,), (4,), (1,), transposed=True)
    assert images.output_padding == (1, 2)
    for one in (sequence, up, images):
        assert one.name == one.shape
        assert parse_shape(one.shape) == one
        assert from_dict(json.loads(json.dumps(to_dict(one)))) == one


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_outputs_have_pytorchs_shape(shape: str) -> None:
    workload = parse_shape(shape)
    case = Case(workload, "forward", "float32", "ieee", "nchw")
    at = case.tensors(torch.device("meta"))
    assert contestants.pytorch(case)(at).shape == at.grad_output.shape == workload.output
    counted = torch.utils.flop_counter.FlopCounterMode(display=False)
    with counted:
        contestants.pytorch(case)(at)
    assert counted.get_total_flops() == workload.problem.flops


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_scaled_workloads_are_as_small_as_they_can_be(shape: str) -> None:
    smallest = parse_shape(shape).scaled(10**6)
    assert min(smallest.output) > 0
    for axis in range(smallest.axes):
        size = list(smallest.input)
        size[2 + axis] -= 1
        with pytest.raises((ValueError, RuntimeError)):
            replace(smallest, input=tuple(size)).check()


def test_files_of_older_versions_are_read() -> None:
    """They have the keys of 2-D convolutions alone, and newer files of these have no others."""
    older = {
        "name": "one", "about": "", "input": [1, 2, 8, 8], "weight": [4, 2, 3, 3],
        "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1,
    }  # fmt: skip
    assert json.loads(json.dumps(to_dict(from_dict(older)))) == older


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ("8x32", "the sizes of an input and of a weight are needed"),
        ("1x1x8x8 1x1x3x3 stride=", "stride has no value"),
        ("1x1x8x8 1x1x3x3 stride=1 stride=2", "stride is given twice"),
        ("1x1x8x8 1x1x3x3 groups=1,2", "groups takes whole numbers from 1"),
        ("0x1x8x8 1x1x3x3", "input takes whole numbers from 1"),
        ("1x1x9999999999x9999999999 1x1x3x3", "is too large"),
        ("1x1x8x8 1x1x3xq", "('q' in '1x1x3xq' is not a whole number)"),
        ("1x1x8x8 1x1x3x3 padding=same", "('same' is not a whole number)"),
        ("1x1x8x8 1x1x3x3 pad=1", "'pad'"),
        ("1x1x8x8 1x1x3x3 padding=1,2,3", "padding should be 2 or 4 whole numbers"),
        ("1x1x2x2 1x1x3x3", "Kernel size can't be greater"),
        ("1x3x8x8 1x1x3x3", "channels"),
        ("1x3x8 1x3x3x3", "weight should be 3 whole numbers"),
        ("1x3x8x8x8x8 1x3x3x3x3", "input should be 3 or 4 or 5 whole numbers"),
        ("1x3x8x8x8 1x3x3x3", "weight should be 5 whole numbers"),
        ("1x3x8x8x8 1x3x3x3x3 padding=1,2", "padding should be 3 or 6 whole numbers"),
        ("1x3x8x8x2 1x3x3x3x3", "Kernel size can't be greater"),
        ("1x3x8 4x3x3 stride=1,2", "stride should be 1 whole number, but got [1, 2]"),
        ("1x3x8 4x3x3 padding=1,2,3", "padding should be 1 or 2 whole numbers"),
        ("1x3x2 4x3x3", "Kernel size can't be greater"),
        ("1x3x8 4x3x3 output_padding=1", "applies only to a transposed convolution"),
        ("1x3x8 3x4x3 transposed=1", "transposed takes no value"),
        ("1x3x8 4x3x3 transposed", "expected input[1, 3, 8] to have 4 channels"),
        ("1x3x8 3x4x3 transposed stride=2 output_padding=2", "smaller than either stride"),
        ("1x3x8 3x4x3 transposed stride=2 dilation=4 output_padding=3", "below the stride"),
        ("1x3x1 3x4x3 transposed padding=2", "Output size is too small"),
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
        ([{**WHOLE, "input": "1x1x8x8"}], "input should be 3 or 4 or 5 whole numbers"),
        ([{**WHOLE, "input": [[1], 1, 8, 8]}], "input takes whole numbers from 1"),
        ([{**WHOLE, "input": [True, 1, 8, 8]}], "input takes whole numbers from 1"),
        ([{**WHOLE, "input": [1, 1, 8.5, 8]}], "but got 8.5"),
        ([{**WHOLE, "stride": "2"}], "stride takes whole numbers from 1"),
        ([{**WHOLE, "padding": [1, 2, 3]}], "padding should be 2 or 4 whole numbers"),
        ([{**WHOLE, "padding": "same"}], "but got 'same'"),
        ([{**WHOLE, "groups": [1]}], "groups takes whole numbers from 1"),
        ([{**WHOLE, "transposed": "yes"}], "transposed should be true or false, but got 'yes'"),
        ([{**WHOLE, "output_padding": 1}], "applies only to a transposed convolution"),
        ([{**WHOLE, "name": "a"}, {**WHOLE, "name": "a", "groups": 1, "stride": 2}],
         "two workloads are called 'a'"),
    ],
)  # fmt: skip
def test_suite_files_that_cannot_be_read_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: Any, named: str
) -> None:
    path = tmp_path / "own.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    assert cli.main(["bench", "--device", "cpu", "--suite", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastconv: ")
    assert named in line
