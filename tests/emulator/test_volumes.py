"""Runs the portable kernels for volumes in the emulator, and compares with PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from emulator.driver import precompile
from emulator.pass_cases import (
    SCALARS,
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_alone_as_in_batch,
    assert_correct,
    check,
    float64,
    run,
    some,
)
from fastconv.kernels import direct, planner
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import Epilogue

PASSES: list[Planner] = [direct.forward, direct.input_grad, direct.weight_grad]

CONVS = [
    Conv("3x3x3", (2, 3, 4, 5, 9), (5, 3, 3, 3, 3), (1,) * 3, (1,) * 6, (1,) * 3),
    Conv("causal", (1, 2, 5, 4, 6), (3, 2, 3, 1, 2), (1,) * 3, (2, 0, 0, 0, 1, 0), (1,) * 3),
    Conv("strided", (1, 4, 7, 6, 8), (6, 2, 3, 2, 3), (2, 3, 2), (1, 2, 0, 1, 1, 1), (1,) * 3, 2),
    Conv("dilated", (1, 3, 9, 5, 7), (4, 3, 3, 2, 2), (1, 1, 1), (3, 1, 1, 0, 0, 2), (3, 2, 2)),
    Conv("both", (1, 2, 11, 6, 9), (4, 2, 4, 2, 3), (4, 2, 1), (3, 2, 0, 1, 1, 0), (2, 1, 3)),
    Conv("depthwise", (2, 6, 4, 5, 8), (6, 1, 3, 3, 3), (1,) * 3, (1,) * 6, (1,) * 3, 6),
    Conv("patches", (1, 3, 4, 6, 8), (9, 3, 2, 3, 4), (2, 3, 4), (0,) * 6, (1,) * 3),
    Conv("gaps", (1, 2, 8, 7, 6), (3, 2, 2, 1, 2), (4, 2, 3), (1, 0, 0, 0, 0, 1), (1,) * 3),
    Conv("one plane", (1, 5, 3, 6, 7), (4, 5, 1, 3, 3), (1, 2, 1), (1, 0, 1, 1, 1, 1), (1,) * 3),
    Conv("many", (1, 40, 3, 4, 5), (33, 40, 2, 2, 2), (1, 1, 2), (1, 1, 0, 1, 1, 0), (1,) * 3),
]
"""Volumes whose axes have different strides, dilations and paddings; every residue of a stride."""


def _cases() -> list[PassCase]:
    cases = []
    for i, conv in enumerate(CONVS):
        for j, planned in enumerate(PASSES):
            dtype = list(SCALARS)[(i + j) % len(SCALARS)]
            case = PassCase(conv, planned, dtype, aligned=(i + j) % 3 != 2)
            bias = planned is direct.weight_grad and i % 2 == 0
            cases.append(replace(case, bias_grad=bias))
            cases.append(replace(case, dtype=torch.float32, channels_last=True))
    return [*cases, *map(_random_case, range(100))]


def _random_case(seed: int) -> PassCase:
    r = Random(seed)
    kernel = [r.choice((1, 2, 3, 4)) for _ in range(3)]
    dilation = [r.choice((1, 1, 2, 3)) for _ in kernel]
    padding = [r.randint(0, 3) for _ in range(6)]
    extent = [step * (size - 1) + 1 for size, step in zip(kernel, dilation, strict=True)]
    groups = r.choice((1, 1, 2, 3))
    inputs, outputs = groups * r.choice((1, 2, 3, 9)), groups * r.choice((1, 2, 5))
    conv = Conv(
        f"random{seed}",
        (r.choice((1, 2)), inputs, *(size + r.randint(0, 5) for size in extent)),
        (outputs, inputs // groups, *kernel),
        tuple(r.choice((1, 1, 2, 3, 4)) for _ in kernel),
        tuple(padding),
        tuple(dilation),
        groups,
    )
    return PassCase(
        conv, r.choice(PASSES), r.choice(list(SCALARS)), r.random() < 0.5, r.random() < 0.7,
        r.choice(list(GPUS.values())), other_format=r.random() < 0.2, plain_weight=r.random() < 0.3,
    )  # fmt: skip


RUN = some(_cases(), one_in=11)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in RUN for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


def test_epilogues() -> None:
    epilogue = Epilogue("silu", residual=True)
    check(PassCase(CONVS[1], direct.forward, torch.bfloat16, True, epilogue=epilogue))


def test_a_volume_alone_as_in_a_batch() -> None:
    assert_alone_as_in_batch(PassCase(CONVS[1], direct.forward))


@pytest.mark.parametrize(
    ("conv", "planned"), [(CONVS[2], PASSES[0]), (CONVS[4], PASSES[1]), (CONVS[7], PASSES[1])]
)
def test_infinity_stays_where_it_is(conv: Conv, planned: Planner) -> None:
    """Taps that a residue lacks, planes of other outputs and padding do not meet the infinity."""
    case = PassCase(conv, planned)
    tensors = Tensors.random(case)
    read = tensors.input if planned is direct.forward else tensors.grad_output
    read[0, 0, -1, -1, -1] = torch.inf
    actual, expected = run(case, tensors), float64(case, tensors)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("planned", PASSES)
def test_strides_that_lead_far_beyond_the_volume(planned: Planner) -> None:
    """Only the first output reads the volume; positions after the last one exceed 2^31."""
    near, far = (
        Conv(name, (2, 2, 2, 3, 4), (3, 2, 2, 2, 1), stride, padding, (1, 1, 1))
        for name, stride, padding in (
            ("near", (8, 8, 8), (0, 9) * 3),
            ("far", (2**30,) * 3, (0, 2**30 + 7) * 3),
        )
    )
    assert near.problem.output_shape == far.problem.output_shape == (2, 3, 2, 2, 2)
    case = PassCase(far, planned)
    tensors = Tensors.random(case)
    assert_correct(replace(case, conv=near), tensors, run(case, tensors))


@pytest.mark.parametrize("direction", [planner.forward, planner.input_grad, planner.weight_grad])
@pytest.mark.parametrize("last", [False, True])
def test_which_family_plans_volumes(direction: Planner, last: bool) -> None:
    """Layers of many channels go to Hopper's tensor cores; depthwise ones and other GPUs do not."""
    wide = Conv("wide", (4, 64, 8, 28, 28), (96, 64, 3, 3, 3), (1,) * 3, (1,) * 6, (1,) * 3)
    case = PassCase(wide, direction, torch.bfloat16, last)
    assert case.plan.family == "hopper"
    assert replace(case, gpu=GPUS["sm_70"]).plan.family == "direct"
    grouped = replace(wide, weight=(64, 1, 3, 3, 3), groups=64)
    assert replace(case, conv=grouped, gpu=H200).plan.family == "depthwise"
