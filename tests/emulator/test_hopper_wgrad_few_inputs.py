"""Hopper's weight gradient kernel for few input channels on the CPU: every mode, odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulator import precompile
from emulator.pass_cases import Conv, PassCase, Tensors, check_special_values
from emulator.test_hopper_wgrad_halo import GPU, MODES, assert_gradients, put_special_values
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.hopper.wgrad_few_inputs import plan as wgrad_few_inputs
from fastconv.problem import Problem


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return wgrad_few_inputs.plan(wgrad_few_inputs.layer_of(problem, operands, gpu), gpu)


def _case(conv: Conv, mode: str, **options: Any) -> PassCase:
    dtype, precision, _ = MODES[mode]
    return PassCase(conv, weight_grad, dtype, gpu=GPU, precision=precision, **options)


TWO_BLOCKS = Conv("two blocks", (1, 5, 4, 30), (140, 5, 3, 3), padding=(1, 1, 1, 1))
ODD_WIDTH = Conv("odd width", (2, 3, 6, 41), (24, 3, 3, 5))
ONE_CHANNEL = Conv("one channel", (1, 1, 6, 68), (40, 1, 5, 4), padding=(2, 2, 1, 2))

CASES = [
    *(_case(TWO_BLOCKS, mode, bias_grad=True) for mode in MODES),
    *(_case(ONE_CHANNEL, mode, bias_grad=mode == "bfloat16") for mode in MODES),
    *(_case(ODD_WIDTH, mode, bias_grad=True) for mode in ("tf32", "ieee")),
    # One or both tensors are channels-last.
    *(_case(ONE_CHANNEL, mode, channels_last=True) for mode in ("tf32", "ieee")),
    _case(TWO_BLOCKS, "float16", channels_last=True, other_format=True),
    _case(TWO_BLOCKS, "tf32", other_format=True, bias_grad=True),
    _case(TWO_BLOCKS, "ieee", aligned=False),
    # Strides, dilations, and both: they determine the rows of the ring buffer.
    _case(Conv("strided", (1, 3, 13, 45), (64, 3, 5, 5), (2, 2), (2, 2, 2, 3)), "tf32"),
    _case(Conv("strided", (1, 3, 14, 50), (40, 3, 4, 4), (2, 2)), "bfloat16"),
    _case(Conv("stride beyond the kernel", (1, 4, 20, 39), (16, 4, 2, 3), (5, 2), (3, 4, 0, 9),
               (1, 4)), "tf32"),
    _case(Conv("dilated", (2, 4, 15, 32), (40, 4, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
          "ieee"),
    _case(Conv("stride and dilation", (1, 2, 31, 24), (9, 2, 3, 3), (4, 2), (3, 0, 1, 2), (6, 4)),
          "tf32"),
    _case(Conv("flushed", (1, 4, 40, 10), (16, 4, 1, 2)), "ieee", bias_grad=True),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in CASES for launch in case.plan.launches})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: PassCase) -> None:
    assert_gradients(case)


def test_cases_cover_all_branches() -> None:
    taken = [dict(case.plan.launches[0].kernel.constants) for case in CASES]
    assert {of["warpgroups"] for of in taken} == {1, 2}
    assert {of["pair_loads"] for of in taken} == {False, True}
    assert any(of["group_out"] > 128 for of in taken)
    # Accumulators are flushed to the workspace more than once.
    assert any(of["flush_steps"] < of["out_height"] for of in taken)


@pytest.mark.parametrize("where", ["input", "grad_output"])
@pytest.mark.parametrize("mode", ["tf32", "ieee"])
def test_infinity_stays_where_it_is(mode: str, where: str) -> None:
    case = _case(ODD_WIDTH, mode, bias_grad=True)
    assert case in CASES
    tensors = Tensors.random(case)
    put_special_values(getattr(tensors, where))
    if where == "input":
        tensors.input[0, 0, -1, -1] = torch.inf  # only one tap reads it
    check_special_values(case, tensors)
