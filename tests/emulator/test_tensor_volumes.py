"""Runs the tensor-core kernels for volumes in the emulator, and compares with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from emulator.driver import precompile
from emulator.pass_cases import (
    Conv,
    PassCase,
    assert_alone_as_in_batch,
    check,
    is_taken,
    some,
)
from fastconv.kernels import ampere
from fastconv.kernels.ampere.wgrad_halo import plan as ampere_wgrad
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.kernels.hopper.halo import plan as hopper_halo
from fastconv.kernels.hopper.layers import forward_ways, input_grad_ways
from fastconv.kernels.hopper.wgrad_halo import plan as hopper_wgrad
from fastconv.problem import Epilogue, Problem

Passes = tuple[Callable[[Problem, Operands, Gpu], Plan], ...]

ONE = (1, 1, 1)
CONVS = [
    Conv("few channels", (2, 3, 4, 7, 13), (32, 3, 3, 3, 3), ONE, (0,) * 6, ONE),
    Conv("padded", (1, 16, 4, 7, 18), (24, 16, 3, 3, 3), ONE, (1,) * 6, ONE),
    Conv("stem", (1, 3, 4, 13, 17), (32, 3, 3, 7, 7), (1, 2, 2), (1, 1, 3, 3, 3, 3), ONE),
    Conv("dilated", (1, 20, 9, 7, 12), (16, 20, 3, 3, 2), (2, 1, 1), (3, 1, 1, 0, 0, 2), (3, 2, 2)),
    Conv("groups", (2, 32, 3, 5, 9), (32, 16, 2, 3, 3), ONE, (0, 2, 1, 1, 0, 1), ONE, 2),
    Conv("wide", (1, 17, 3, 2, 150), (18, 17, 3, 3, 3), ONE, (1,) * 6, ONE),
    Conv("whole rows", (1, 16, 3, 4, 68), (24, 16, 3, 3, 3), ONE, (1, 1, 0, 0, 0, 0), ONE),
    Conv("strided", (1, 24, 7, 9, 11), (32, 24, 3, 3, 3), (2, 2, 2), (1,) * 6, ONE),
    Conv("along depth", (1, 16, 8, 9, 11), (16, 16, 4, 3, 2), (3, 1, 2), (2, 1, 1, 1, 1, 0), ONE),
    Conv("many volumes", (5, 16, 3, 4, 9), (16, 16, 3, 3, 3), ONE, (1,) * 6, ONE),
    Conv("idle planes", (2, 16, 7, 6, 7), (24, 16, 2, 3, 3), (3, 2, 2), (1,) * 6, (3, 2, 1)),
    Conv("pointwise planes", (2, 24, 5, 6, 7), (16, 24, 3, 1, 1), ONE, (2, 0, 0, 0, 0, 0), ONE),
]
"""Volumes whose taps, strides and paddings differ along the three axes."""

MODES = (
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
    (torch.bfloat16, "ieee"),
    (torch.float16, "ieee"),
)
FEW_SMS = (1, 2, 5)


class OnHopper:
    """Hopper's kernels, also where others are estimated to be faster."""

    @staticmethod
    def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        return hopper_halo.plan(forward_ways(problem, operands), gpu)

    @staticmethod
    def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        return hopper_halo.plan(input_grad_ways(problem, operands), gpu)

    @staticmethod
    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        return hopper_wgrad.plan(hopper_wgrad.choose_tile(problem, operands, gpu), gpu)


class OnAmpere:
    """Ampere's kernels, likewise."""

    forward, input_grad = staticmethod(ampere.forward), staticmethod(ampere.input_grad)

    @staticmethod
    def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
        return ampere_wgrad.plan(ampere_wgrad.choose_tile(problem, operands, gpu), gpu)


def scaled(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    """A weight gradient in scaled fp16, named as planners are."""
    tile = hopper_wgrad.choose_tile(problem, operands, gpu, scaled_fp16=True)
    return hopper_wgrad.plan(tile, gpu)


scaled.__name__ = "weight_grad"
DIRECTIONS = ("forward", "input_grad", "weight_grad")
FAMILIES = ((OnHopper, H200), (OnAmpere, GPUS["sm_80"]))


def _taken(cases: list[PassCase]) -> list[PassCase]:
    """The cases that the kernels take: not those with too few channels, for example."""
    found = list(filter(is_taken, cases))
    assert {case.plan.family for case in found} <= {"hopper", "ampere"}
    return found


def _case(conv: Conv, number: int, direction: str) -> PassCase:
    family, gpu = FAMILIES[number % 3 == 2]
    dtype, precision = MODES[number % len(MODES)]
    weight_grad = direction == "weight_grad"
    return PassCase(
        conv,
        getattr(family, direction),
        dtype,
        channels_last=number % 5 == 1 and not weight_grad,
        aligned=number % 7 != 3,
        gpu=replace(gpu, sm_count=FEW_SMS[number % 3]),
        precision=precision,
        other_format=number % 5 == 4 and not weight_grad,
        bias_grad=weight_grad and number % 2 == 0,
        plain_weight=number % 4 == 0,
    )


def _cases() -> list[PassCase]:
    cases = [
        _case(conv, 3 * i + j + more, direction)
        for i, conv in enumerate(CONVS)
        for j, direction in enumerate(DIRECTIONS)
        for more in (0, 7, 13)
    ]
    for i, conv in enumerate(CONVS[1:6]):
        precision = ("tf32", "ieee")[i % 2]
        gpu = replace(H200, sm_count=FEW_SMS[i % 3])
        cases.append(PassCase(conv, scaled, precision=precision, bias_grad=True, gpu=gpu))
    return cases


def _random_case(seed: int) -> PassCase:
    r = Random(seed)
    kernel = [r.choice((1, 2, 3, 3, 4)) for _ in range(3)]
    dilation = [r.choice((1, 1, 2, 3)) for _ in kernel]
    padding = [r.randint(0, 3) for _ in range(6)]
    extent = [step * (size - 1) + 1 for size, step in zip(kernel, dilation, strict=True)]
    groups = r.choice((1, 1, 1, 2))
    inputs, outputs = (groups * r.choice((8, 12, 16, 17, 32)) for _ in range(2))
    conv = Conv(
        f"random{seed}",
        (r.choice((1, 2, 3)), inputs, *(size + r.randint(0, 6) for size in extent)),
        (outputs, inputs // groups, *kernel),
        tuple(r.choice((1, 1, 1, 2, 3)) for _ in kernel),
        tuple(padding),
        tuple(dilation),
        groups,
    )
    return _case(conv, r.randrange(1000), r.choice(DIRECTIONS))


CASES = _taken(some([*_cases(), *map(_random_case, range(60))], 30))


@pytest.fixture(scope="module")
def _compiled() -> None:
    precompile({launch.kernel for case in CASES for launch in case.plan.launches})


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pass(case: PassCase) -> None:
    check(case)


def test_all_cases_are_taken() -> None:
    """The kernels decline none of the fixed cases but those for which there is a reason."""
    declined = {
        (conv.name, direction)
        for i, conv in enumerate(CONVS)
        for j, direction in enumerate(DIRECTIONS)
        if not _taken([_case(conv, 3 * (i + j), direction)])
    }
    assert len(declined) <= 2


@pytest.mark.parametrize(
    "case",
    some(
        [
            PassCase(conv, OnHopper.forward, precision=precision, gpu=replace(H200, sm_count=2))
            for conv in (CONVS[0], CONVS[9])
            for precision in ("tf32", "ieee")
        ],
        4,
    ),
    ids=str,
)
def test_volume_alone_as_in_batch(case: PassCase) -> None:
    assert_alone_as_in_batch(case)


def test_epilogue() -> None:
    """A residual and an activation are those of the volume's own elements."""
    conv = Conv("epilogue", (2, 16, 3, 5, 7), (24, 16, 3, 3, 3), ONE, (1,) * 6, ONE)
    case = PassCase(
        conv, OnHopper.forward, torch.bfloat16, epilogue=Epilogue("relu", residual=True)
    )
    check(case)
