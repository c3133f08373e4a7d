"""Workloads: the built-in suites, shapes as text, and JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastconv import cli
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
        ("1x1x9999999999x9999999999 1x1x3x3", "is too large"),
        ("1x1x8x8 1x1x3xq", "('q' in '1x1x3xq' is not a whole number)"),
        ("1x1x8x8 1x1x3x3 padding=same", "('same' is not a whole number)"),
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
    assert cli.main(["bench", "--device", "cpu", "--suite", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastconv: ")
    assert named in line
