"""Hopper's kernel for few output channels on the CPU: every mode, layout and branch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import (
    BATCH,
    SPECIAL_VALUES,
    Conv,
    PassCase,
    Tensors,
    assert_alone_as_in_batch,
    at_corners,
    check,
    check_special_values,
    in_batch,
    some,
)
from emulator.test_hopper_halo import FEW, MODES, ONE
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.hopper.few_outputs import plan as few_outputs
from fastconv.kernels.hopper.layers import forward_ways, input_grad_ways
from fastconv.problem import Problem


def forward(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return few_outputs.plan(few_outputs.walks_of(forward_ways(problem, operands)[0][0], gpu), gpu)


def input_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return few_outputs.plan(
        few_outputs.walks_of(input_grad_ways(problem, operands)[0][0], gpu), gpu
    )


def _case(planner: Any, conv: Conv, mode: str, **options: Any) -> PassCase:
    dtype, precision = MODES[mode]
    options.setdefault("gpu", FEW)
    return PassCase(conv, planner, dtype=dtype, precision=precision, **options)


# This one runs in every mode and layout. It has a partial strip and a partial unit of channels.
EVERYWHERE = Conv("everywhere", (1, 40, 5, 66), (6, 40, 3, 4), padding=(1, 2, 2, 1))
GRADIENT = Conv("gradient", (1, 5, 6, 70), (72, 5, 3, 3))
TALL = Conv("several bands", (1, 24, 41, 20), (8, 24, 2, 3), padding=(1, 1, 1, 1))

CASES = [
    *(_case(planner, conv, mode, channels_last=last, other_format=other)
      for (planner, conv), mode, last, other in product(
          ((forward, EVERYWHERE), (input_grad, GRADIENT)), MODES, (False, True), (False, True))
      if not other or (planner is forward and mode in ("tf32", "bfloat16"))),
    # Loads of single pixels: odd widths, unaligned tensors, odd numbers of channels.
    *(_case(forward, Conv("odd width", (1, 24, 5, 37), (4, 24, 3, 3), padding=(1, 1, 1, 1)), mode)
      for mode in MODES),
    *(_case(forward, Conv("unaligned", (1, 24, 4, 40), (7, 24, 2, 3)), mode, aligned=False,
            channels_last=mode == "ieee") for mode in ("tf32", "ieee", "float16")),
    *(_case(input_grad, Conv("odd channels", (1, 3, 6, 20), (43, 3, 3, 3)), mode,
            channels_last=True) for mode in ("tf32", "bfloat16")),
    # Several bands of rows, and warpgroups with several bands.
    *(_case(forward, TALL, mode, gpu=gpu) for mode, gpu in (("tf32", ONE), ("ieee", FEW))),
    # Strips begin one pixel early, so that they begin with a pair.
    _case(forward, Conv("lead", (1, 24, 5, 130), (8, 24, 2, 2), padding=(0, 1, 3, 0)), "tf32"),
    _case(forward, Conv("lead", (1, 24, 5, 130), (8, 24, 2, 2), padding=(0, 1, 3, 0)), "bfloat16"),
    # Dilated: the output rows of a walk are apart, and some walks are shorter.
    _case(forward, Conv("dilated", (1, 20, 13, 60), (5, 20, 3, 3), padding=(2, 2, 4, 4),
                        dilation=(3, 5)), "tf32", gpu=ONE),
    _case(input_grad, Conv("dilated", (2, 5, 9, 60), (24, 5, 3, 2), padding=(1, 1, 2, 2),
                           dilation=(2, 7)), "float16"),
    _case(input_grad, Conv("padding beyond the kernel", (1, 4, 6, 20), (72, 4, 2, 3),
                           padding=(4, 3, 5, 4)), "ieee"),
    _case(forward, Conv("pointwise", (2, 40, 5, 70), (48, 40, 1, 1)), "tf32", bias=False),
    # Sums are so short that products of two low parts count, or so long that they are compensated.
    *(_case(forward, Conv("short sums", (1, 40, 7, 64), (24, 40, 1, 1)), "ieee", channels_last=last)
      for last in (False, True)),
    _case(forward, Conv("short sums", (1, 12, 7, 30), (5, 12, 3, 3)), "ieee"),
    _case(forward, Conv("long sums", (1, 104, 20, 4), (3, 104, 19, 1)), "ieee"),
    _case(forward, Conv("many columns", (1, 16, 6, 33), (13, 16, 6, 3)), "bfloat16"),
    _case(forward, Conv("many columns", (1, 24, 4, 33), (20, 24, 2, 4)), "ieee"),
    _case(forward, Conv("one output", (1, 30, 9, 24), (1, 30, 9, 5), padding=(4, 4, 2, 2)),
          "tf32"),
]  # fmt: skip

RUN = some(CASES, one_in=6)
ALONE = [
    _case(forward, TALL, "tf32"),
    _case(input_grad, Conv("alone", (1, 4, 5, 20), (40, 4, 3, 3)), "ieee", channels_last=True),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = [*RUN, *(in_batch(case, batch) for case in ALONE for batch in (1, BATCH))]
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", RUN, ids=str)
def test_correct(case: PassCase) -> None:
    check(case)


def _constants(case: PassCase) -> dict[str, Any]:
    return dict(case.plan.launches[0].kernel.constants)


def test_all_branches_are_taken() -> None:
    taken = [_constants(case) for case in CASES]
    loads = {(of["Scalar"], of["vector_loads"], of["pair_loads"], of["in_channels_last"])
             for of in taken}  # fmt: skip
    for scalar in ("float", "fastconv::bfloat16"):
        for kind in ((True, False, True), (False, True, False), (False, False, True)):
            assert (scalar, *kind) in loads
    assert ("fastconv::float16", False, False, False) in loads
    assert {of["lead"] for of in taken} == {0, 1}
    assert {of["warpgroups"] for of in taken} == {2, 3}
    assert {(of["low_low_mma"], of["compensated"]) for of in taken if of["parts"] == 2} == {
        (False, False), (True, False), (False, True),
    }  # fmt: skip
    assert any(of["group_in"] > of["unit_steps"] * 64 // 4 for of in taken)  # several units


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_an_image_does_not_depend_on_its_batch(case: PassCase) -> None:
    """The number of rows that a warpgroup walks down does not matter either."""
    assert_alone_as_in_batch(case)


def _of(name: str, channels_last: bool = False) -> PassCase:
    return next(
        case
        for case in CASES
        if case.conv.name == name
        and case.channels_last == channels_last
        and case.precision == "ieee"
        and case.dtype == torch.float32
    )


# Short, ordinary and long sums.
SPLIT = [_of("short sums"), _of("short sums", True), _of("several bands"), _of("long sums")]


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_special_values_in_3xtf32(case: PassCase) -> None:
    """Infinities, their signs and NaNs are those of plain float32 arithmetic."""
    tensors = Tensors.random(case)
    count = 3 if case == SPLIT[-1] else 4  # compensated sums must not overflow
    at_corners(tensors.input, SPECIAL_VALUES[:count])
    check_special_values(case, tensors)


@pytest.mark.parametrize("mode", MODES)
def test_infinity_stays_where_it_is(mode: str) -> None:
    case = _case(input_grad, GRADIENT, mode)
    assert case in CASES
    tensors = Tensors.random(case)
    at_corners(tensors.grad_output, SPECIAL_VALUES[:3])
    check_special_values(case, tensors)
