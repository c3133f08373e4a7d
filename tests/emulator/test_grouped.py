"""Kernels for groups of 4 to 32 channels on the CPU: every pass and width on small odd shapes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from effort import ALL
from emulator import isolated, precompile
from emulator.pass_cases import (
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_alone_as_in_batch,
    at_corners,
    check,
    check_special_values,
    in_batch,
    some,
)
from fastconv.bench import population
from fastconv.kernels import grouped, planner
from fastconv.kernels.family import Declined
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import Epilogue, Problem

PASSES: tuple[Planner, ...] = (grouped.forward, grouped.input_grad, grouped.weight_grad)
# Few SMs, so that blocks have several tiles.
GPU = replace(GPUS["sm_80"], sm_count=3)
SMALL = replace(H200, sm_count=1)

CONVS = (
    Conv("groups of 4", (3, 32, 9, 11), (32, 4, 3, 3), padding=(1, 1, 1, 1), groups=8),
    Conv("groups of 8", (2, 48, 10, 17), (48, 8, 3, 3), padding=(1, 1, 1, 1), groups=6),
    Conv("groups of 16", (9, 32, 7, 7), (32, 16, 3, 3), padding=(1, 1, 1, 1), groups=2),
    Conv("groups of 32", (2, 64, 9, 8), (64, 32, 3, 3), padding=(1, 1, 1, 1), groups=2),
    Conv("strided groups of 4", (2, 32, 13, 11), (32, 4, 3, 3), (2, 2), (1, 1, 1, 1), groups=8),
    Conv("strided groups of 8", (2, 32, 12, 11), (32, 8, 3, 3), (2, 2), (1, 1, 1, 1), groups=4),
    Conv("strided groups of 32", (2, 64, 9, 12), (64, 32, 3, 3), (2, 2), (1, 1, 1, 1), groups=2),
    Conv("strides differ", (1, 48, 9, 20), (48, 16, 2, 5), (1, 3), (1, 0, 2, 3), groups=3),
    Conv("more than four taps", (1, 16, 9, 20), (16, 4, 2, 6), (3, 1), (1, 0, 2, 3), groups=4),
    Conv("dilated", (1, 32, 9, 20), (32, 8, 3, 3), (1, 1), (2, 1, 2, 3), (2, 3), groups=4),
    Conv("dilated and strided", (1, 32, 13, 22), (32, 4, 3, 3), (2, 3), (2, 1, 0, 3), (3, 2),
         groups=8),
    Conv("residues without taps", (1, 32, 9, 20), (32, 8, 1, 2), (2, 3), (0, 1, 2, 1), groups=4),
)  # fmt: skip


def _cases() -> list[PassCase]:
    cases = []
    for i, conv in enumerate(CONVS):
        for j, plan in enumerate(PASSES):
            dtype = (torch.bfloat16, torch.float16)[(i + j) % 2]
            bias = plan is grouped.weight_grad and i % 2 == 0
            gpu = (GPU, SMALL)[(i + j) % 2]
            case = PassCase(conv, plan, dtype, True, gpu=gpu, bias_grad=bias)
            cases.append(replace(case, plain_weight=i % 3 == 1))
    # Strides and dilations at once are no input gradients of this family.
    return [case for case in cases if _takes(case)]


def _takes(case: PassCase) -> bool:
    try:
        return case.plan.family == "grouped"
    except Declined:
        return False


CASES = _cases()
RUN = some(CASES, one_in=5)
IMAGES = [case for case in RUN if case.direction != "weight_grad"]  # they write images
EPILOGUES = [
    replace(CASES[0], epilogue=Epilogue("gelu", residual=True)),
    replace(CASES[9], epilogue=Epilogue("leaky_relu", 0.3), bias=False),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in (*RUN, *EPILOGUES) for launch in case.plan.launches})


def test_takes_all_but_one() -> None:
    assert len(CASES) == len(CONVS) * len(PASSES) - 1


@pytest.mark.parametrize("case", [*RUN, *EPILOGUES], ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


@pytest.mark.parametrize("case", [*RUN, *EPILOGUES], ids=str)
def test_isolation(case: PassCase) -> None:
    """Neither other groups nor other images nor padding reach a result, even as NaN."""
    isolated.check(case)


@pytest.mark.parametrize("seed", range(60 if ALL else 6))
def test_random_problems(seed: int) -> None:
    draw = Random(seed)
    while True:
        problem = population.grouped(draw, 2e6, 4e4).problem
        conv = Conv(
            f"drawn {seed}",
            problem.input_shape,
            problem.weight_shape,
            problem.stride,
            problem.padding,
            problem.dilation,
            problem.groups,
        )
        plan = draw.choice(PASSES)
        bias = plan is grouped.weight_grad and draw.random() < 0.5
        gpu = replace(draw.choice(list(GPUS.values())), sm_count=draw.choice((1, 3)))
        case = PassCase(conv, plan, torch.bfloat16, True, gpu=gpu, bias_grad=bias)
        if _takes(case):
            break
    check(case)
    isolated.check(case, seed)


@pytest.mark.parametrize("case", IMAGES[:4], ids=str)
def test_infinity_and_nan(case: PassCase) -> None:
    """They reach the outputs whose taps read them, as in PyTorch."""
    tensors = Tensors.random(case)
    at_corners(tensors.grad_output if case.direction == "input_grad" else tensors.input)
    check_special_values(case, tensors)


@pytest.mark.parametrize("case", IMAGES[:2], ids=str)
def test_alone_as_in_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


@pytest.mark.parametrize("direction", ["forward", "input_grad"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90a"])
def test_the_batch_does_not_choose_the_family(direction: str, architecture: str) -> None:
    """Families accumulate in different orders; an image has the same bits in any batch."""
    for conv in CONVS:
        case = PassCase(conv, getattr(planner, direction), torch.float16, True)
        batches = (1, 3, 64, 1024)
        cases = (replace(in_batch(case, n), gpu=GPUS[architecture]) for n in batches)
        assert len({one.plan.family for one in cases}) == 1, conv


def _plan_of(**changes: object) -> None:
    case = replace(CASES[0], **changes)
    case.plan  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "types that have not 16 bits"),
        ({"channels_last": False}, "not channels-last"),
        ({"aligned": False}, "not aligned"),
        ({"gpu": GPUS["sm_75"]}, "tensor-core kernels for sm_75"),
        ({"conv": Conv("", (1, 32, 9, 9), (32, 32, 3, 3))}, "a single group"),
        ({"conv": Conv("", (1, 24, 9, 9), (24, 4, 3, 3), groups=6)}, "24 channels"),
        ({"conv": Conv("", (1, 48, 9, 9), (48, 12, 3, 3), groups=4)}, "12 to 12 channels"),
        ({"conv": Conv("", (1, 32, 9, 9), (64, 4, 3, 3), groups=8)}, "4 to 8 channels"),
        ({"conv": Conv("", (1, 32, 9, 9), (32, 4, 1, 1), groups=8)}, "kernels of one tap"),
        ({"conv": Conv("", (1, 64, 9, 9), (64, 32, 9, 9), groups=2)}, "do not fit registers"),
    ],
)
def test_declines(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(Declined, match=reason):
        _plan_of(**changes)


def test_weight_gradients_of_many_pixels_are_split() -> None:
    """No accumulator adds up more MMAs than tensor cores may without losing bits."""
    problem = Problem.of((4096, 128, 56, 56), (128, 4, 3, 3), (1, 1), (1,) * 4, (1, 1), 32)
    case = replace(CASES[2], conv=Conv("", problem.input_shape, problem.weight_shape,
                                       padding=(1,) * 4, groups=32), gpu=SMALL)  # fmt: skip
    main = case.plan.launches[0]
    c = dict(main.kernel.constants)
    splits, pixels = int(main.arguments[3]), 4096 * 56 * 56
    teams = int(c["chunk"]) // 16
    assert pixels / splits / (8 // teams) / 16 <= 512
