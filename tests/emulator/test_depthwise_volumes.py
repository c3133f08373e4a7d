"""Depthwise kernels for volumes in the emulator: every pass, type and layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch

from effort import ALL
from emulator import isolated, precompile
from emulator.pass_cases import (
    SCALARS,
    Conv,
    PassCase,
    Planner,
    Tensors,
    assert_alone_as_in_batch,
    assert_special_values,
    check,
    is_taken,
    run,
    some,
)
from fastconv.kernels import depthwise, planner
from fastconv.kernels.family import Gpu
from fastconv.kernels.gpus import GPUS, H200
from fastconv.problem import Epilogue

PASSES: tuple[Planner, ...] = (depthwise.forward, depthwise.input_grad, depthwise.weight_grad)
ONE = (1, 1, 1)
CONVS = (
    Conv("3x3x3", (2, 6, 7, 9, 12), (6, 1, 3, 3, 3), ONE, (1,) * 6, ONE, 6),
    Conv("causal", (1, 5, 6, 8, 16), (5, 1, 3, 3, 3), ONE, (2, 0, 1, 1, 1, 1), ONE, 5),
    Conv("many channels", (1, 70, 3, 4, 5), (70, 1, 2, 3, 3), ONE, (1, 0, 1, 1, 1, 1), ONE, 70),
    Conv("strided", (1, 4, 9, 8, 11), (4, 1, 3, 3, 3), (2, 2, 2), (1, 1, 1, 0, 1, 1), ONE, 4),
    Conv("stride of depth", (2, 3, 11, 6, 7), (3, 1, 4, 3, 3), (3, 1, 1), (2, 2, 1, 1, 1, 1), ONE,
         3),
    Conv("planes unread", (1, 4, 10, 5, 6), (4, 1, 2, 2, 3), (4, 1, 1), (1, 0) + (1,) * 4, ONE, 4),
    Conv("dilated", (1, 4, 12, 9, 8), (4, 1, 3, 3, 3), ONE, (3, 2) + (2,) * 4, (3, 2, 2), 4),
    Conv("dilated, strided", (1, 4, 13, 6, 9), (4, 1, 3, 2, 3), (2, 1, 1), (3, 1, 0, 1, 1, 1),
         (4, 1, 1), 4),
    Conv("multiplier", (2, 3, 5, 6, 7), (9, 1, 3, 3, 3), ONE, (1,) * 6, ONE, 3),
    Conv("narrow groups", (1, 9, 5, 6, 9), (6, 3, 3, 3, 2), ONE, (1, 1, 1, 1, 1, 0), ONE, 3),
    Conv("long sums", (1, 2, 10, 9, 10), (2, 1, 9, 9, 9), ONE, (4,) * 6, ONE, 2),
    Conv("one column", (1, 3, 5, 14, 1), (3, 1, 3, 3, 3), ONE, (1,) * 6, ONE, 3),
    Conv("one plane of the kernel", (1, 4, 5, 6, 8), (4, 1, 1, 3, 3), (2, 1, 1), (1, 0) + (1,) * 4,
         ONE, 4),
    Conv("padding alone", (1, 3, 2, 5, 6), (3, 1, 2, 3, 3), ONE, (5, 4) + (1,) * 4, ONE, 3),
)  # fmt: skip


def _cases() -> list[PassCase]:
    cases = []
    for i, (conv, planned) in enumerate(product(CONVS, PASSES)):
        for last in (False, True):
            bias = planned is depthwise.weight_grad and i % 2 == 0
            gpu = replace(GPUS[("sm_70", "sm_86", "sm_100a")[i % 3]], sm_count=1 + i % 2)
            case = PassCase(conv, planned, channels_last=last, bias_grad=bias, gpu=H200)
            dtype = list(SCALARS)[i % len(SCALARS)]
            cases.append(case)
            cases.append(replace(case, dtype=dtype, gpu=gpu, aligned=i % 4 != 1))
    return list(filter(is_taken, dict.fromkeys(cases)))


def _drawn(draw: Random) -> PassCase:
    """Draws a pass that the kernels take."""
    while True:
        kernel = [draw.choice((1, 2, 3, 3, 5)) for _ in range(3)]
        dilation = [draw.choice((1, 1, 1, 2, 3)) for _ in kernel]
        extent = [step * (size - 1) + 1 for size, step in zip(kernel, dilation, strict=True)]
        groups = draw.choice((2, 3, 8, 20))
        ins, outs = draw.choice(((1, 1), (1, 1), (1, 1), (1, 2), (2, 3), (4, 1)))
        conv = Conv(
            "random",
            (draw.choice((1, 2, 3)), groups * ins, *(e + draw.randint(0, 7) for e in extent)),
            (groups * outs, ins, *kernel),
            tuple(draw.choice((1, 1, 1, 2, 3)) for _ in kernel),
            tuple(draw.randint(0, 3) for _ in range(6)),
            tuple(dilation),
            groups,
        )
        planned = draw.choice(PASSES)
        has_epilogue = planned is depthwise.forward and draw.random() < 0.3
        case = PassCase(
            conv,
            planned,
            draw.choice(list(SCALARS)),
            draw.random() < 0.5,
            draw.random() < 0.7,
            _few(draw.choice((H200, *GPUS.values())), draw),
            bias_grad=planned is depthwise.weight_grad and draw.random() < 0.5,
            plain_weight=draw.random() < 0.3,
            epilogue=Epilogue("silu", residual=True) if has_epilogue else Epilogue(),
        )
        if is_taken(case):
            return case


def _few(gpu: Gpu, draw: Random) -> Gpu:
    return replace(gpu, sm_count=draw.choice((1, 2, 5, gpu.sm_count)))


RUN = some(_cases(), one_in=13)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in RUN for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


@pytest.mark.parametrize("seed", range(120 if ALL else 10))
def test_random_volumes(seed: int) -> None:
    check(_drawn(Random(seed)))


@pytest.mark.parametrize("seed", range(40 if ALL else 3))
def test_isolation(seed: int) -> None:
    """Planes, channels and volumes that a result does not read do not change it."""
    isolated.check(replace(_drawn(Random(1000 + seed)), epilogue=Epilogue()), seed)


@pytest.mark.parametrize("last", [False, True])
def test_a_volume_alone_as_in_a_batch(last: bool) -> None:
    assert_alone_as_in_batch(PassCase(CONVS[0], PASSES[last], torch.float16, last))


@pytest.mark.parametrize(("conv", "planned"), [(CONVS[3], PASSES[0]), (CONVS[4], PASSES[1])])
@pytest.mark.parametrize("last", [False, True])
def test_special_values(conv: Conv, planned: Planner, last: bool) -> None:
    """Infinity and NaN reach the outputs that read them, and no others of other planes."""
    case = PassCase(conv, planned, channels_last=last)
    tensors = Tensors.random(case)
    read = tensors.input if planned is depthwise.forward else tensors.grad_output
    read[0, 0, 0, 0, 0], read[0, 1, -1, -1, -1] = torch.inf, torch.nan
    assert_special_values(case, tensors, run(case, tensors))


def test_walks_of_every_length() -> None:
    """The planner cuts the depth where SMs would be idle, and nowhere else."""
    few = Conv("few", (1, 2, 64, 16, 16), (2, 1, 3, 3, 3), ONE, (1,) * 6, ONE, 2)
    many = replace(few, input=(64, 512, 64, 16, 16), weight=(512, 1, 3, 3, 3), groups=512)
    walks = [
        dict(PassCase(conv, depthwise.forward).plan.launches[-1].kernel.constants)["walk"]
        for conv in (few, many)
    ]
    assert walks[0] < 16 <= walks[1]


@pytest.mark.parametrize("name", ["forward", "input_grad", "weight_grad"])
def test_which_volumes_go_where(name: str) -> None:
    """Images' kernels for one row and for tensor cores are not for volumes."""
    direction = getattr(planner, name)
    row = Conv("row", (1, 8, 6, 1, 512), (8, 1, 3, 1, 31), ONE, (1, 1, 0, 0, 15, 15), ONE, 8)
    for conv in (row, CONVS[0]):
        plan = PassCase(conv, direction).plan
        assert plan.family == "depthwise"
        assert plan.launches[-1].kernel.source.split("/")[1] in ("fma", "wgrad")
    both = replace(CONVS[0], stride=(2, 1, 1), dilation=(2, 1, 1))
    wanted = "direct" if name == "input_grad" else "depthwise"
    assert PassCase(both, direction).plan.family == wanted
