"""What plans are estimated to take, beside what they took: the committed results of ResNet-50."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastconv import workloads
from fastconv.kernels import planner
from fastconv.kernels.family import Operands, Plan
from fastconv.kernels.gpus import H200

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CYCLES_A_MS = 1.755e6  # an H200's clock under load
TOLERANCE = 0.25


def _plan(row: dict[str, Any]) -> Plan:
    problem = workloads.from_dict(row["workload"]).problem
    _, in_, height, width = problem.weight_shape
    last = row["format"] == "nhwc"
    strides = (
        (in_ * height * width, 1, width * in_, in_)
        if last
        else (in_ * height * width, height * width, width, 1)
    )
    scalar = ("float", 4) if row["dtype"] == "float32" else (f"fastconv::{row['dtype']}", 2)
    operands = Operands(*scalar, last, last, strides, True, row["precision"] or "ieee")
    return getattr(planner, row["direction"])(problem, operands, H200)


def _is_needed(row: dict[str, Any]) -> bool:
    """What a training step has: not the images' gradient."""
    is_first = row["workload"]["first"] == row["workload"]["count"]
    return row["direction"] != "input_grad" or not is_first


@pytest.mark.parametrize(
    ("name", "weight_gradients"), [("h200-resnet50-bfloat16-nhwc", 23), ("h200-resnet50-tf32", 21)]
)
def test_estimates_are_near_what_was_measured(name: str, weight_gradients: int) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    times = {
        f"{row['workload']['name']} {row['direction']}": (
            _plan(row).cycles / CYCLES_A_MS,
            row["ours"]["ms"],
        )
        for row in filter(_is_needed, rows)
    }
    # Of weight gradients, those by matrix products; the other kernels' are rougher.
    times = {key: both for key, both in times.items() if both[0] > 0}
    assert len(times) == 45 + weight_gradients  # 23 layers
    far = {key: both for key, both in times.items() if abs(both[0] / both[1] - 1) > TOLERANCE}
    assert not far
