"""Operands, problems and parts of plans for the tests of planners."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fastconv.kernels import gpus, planner
from fastconv.kernels.family import Launch, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.planner import Planner
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING, ODD, REAL, Workload

T4, A100 = gpus.GPUS["sm_75"], gpus.GPUS["sm_80"]
# Scalar, its bytes, precision.
MODES = {
    "tf32": ("float", 4, "tf32"),
    "ieee": ("float", 4, "ieee"),
    "float16": ("fastconv::float16", 2, "ieee"),
    "bfloat16": ("fastconv::bfloat16", 2, "ieee"),
    "float64": ("double", 8, "ieee"),
}
TENSOR_CORE_MODES = [mode for mode in MODES if mode != "float64"]
PASSES = (planner.forward, planner.input_grad)
WORKLOADS = [
    workload.scaled(4) if workload.name == "pointwise" else workload
    for workload in (*FOUNDING, *REAL, *ODD)
    if workload.groups != workload.input[1]
]


def make_operands(
    problem: Problem,
    mode: str = "tf32",
    channels_last: bool = False,
    output_channels_last: bool | None = None,
    aligned: bool = True,
) -> Operands:
    if output_channels_last is None:
        output_channels_last = channels_last
    scalar, scalar_bytes, precision = MODES[mode]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    weight = torch.empty(problem.weight_shape, device="meta", memory_format=layout)
    return Operands(
        scalar,
        scalar_bytes,
        channels_last,
        output_channels_last,
        weight.stride(),
        aligned,
        precision,
    )


def make_problem(input: tuple[int, ...], weight: tuple[int, ...], **more: Any) -> Problem:
    geometry = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1, **more}
    return Problem.of(input, weight, *geometry.values())


def is_few_outputs(plan: Plan) -> bool:
    return plan.launches[0].kernel.entry == "few_outputs"


def without_copies(plan: Plan) -> Plan:
    """The plan without the launches that copy tensors to another memory format."""
    own = tuple(one for one in plan.launches if not one.kernel.entry.startswith("transpose"))
    return replace(plan, launches=own)


def gemm_of(plan: Plan) -> str:
    """The name of the implicit-GEMM kernel that the plan launches, or nothing."""
    entry = without_copies(plan).launches[-1].kernel.entry
    return entry if entry.startswith("implicit_gemm") else ""


def packed_layers(plan: Plan) -> list[tuple[Launch, Launch, dict[str, Any]]]:
    """For each layer of a halo-tile plan: the launch that packs, the one that computes, constants.

    A strided input gradient has several layers, and the repair of scaled fp16 is one more. The
    launches that find the scales, that copy the input, and that compute all but a layer's first
    slab are left out.
    """
    launches: list[Launch] = []
    for launch in without_copies(plan).launches:
        entry = launch.kernel.entry
        again = launches and entry == launches[-1].kernel.entry == "convolve"
        if entry not in ("scale", "copy") and not again:
            launches.append(launch)
    packs, convolves = launches[::2], launches[1::2]
    return [
        (pack, halo, dict(halo.kernel.constants))
        for pack, halo in zip(packs, convolves, strict=True)
    ]


@cache
def planned_once(plan: Planner, workload: Workload, mode: str, channels_last: bool) -> Plan:
    """The plan for an H200, which is made once for all tests."""
    operands = make_operands(workload.problem, mode, channels_last)
    return plan(workload.problem, operands, H200)
