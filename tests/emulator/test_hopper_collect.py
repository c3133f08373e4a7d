"""The weight gradient of few input channels on the CPU: every mode on small odd geometries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulator import precompile
from emulator.test_hopper_weight_grad import GPU, MODES, assert_gradients, put_odd_numbers
from emulator.works import Case, Tensors, Work, assert_plain
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.kernels.hopper.wgrad_few_inputs import plan as wgrad_few_inputs
from fastconv.problem import Problem


def weight_grad(problem: Problem, operands: Operands, gpu: Gpu) -> Plan:
    return wgrad_few_inputs.plan(wgrad_few_inputs.collect_of(problem, operands, gpu), gpu)


def _work(case: Case, mode: str, **options: Any) -> Work:
    dtype, precision, _ = MODES[mode]
    return Work(case, weight_grad, dtype, gpu=GPU, precision=precision, **options)


TWO_BLOCKS = Case("two blocks", (1, 5, 4, 30), (140, 5, 3, 3), padding=(1, 1, 1, 1))
ODD_WIDTH = Case("odd width", (2, 3, 6, 41), (24, 3, 3, 5))
ONE_CHANNEL = Case("one channel", (1, 1, 6, 68), (40, 1, 5, 4), padding=(2, 2, 1, 2))

WORKS = [
    *(_work(TWO_BLOCKS, mode, bias_grad=True) for mode in MODES),
    *(_work(ONE_CHANNEL, mode, bias_grad=mode == "bfloat16") for mode in MODES),
    *(_work(ODD_WIDTH, mode, bias_grad=True) for mode in ("tf32", "ieee")),
    # Channels-last: either tensor.
    *(_work(ONE_CHANNEL, mode, channels_last=True) for mode in ("tf32", "ieee")),
    _work(TWO_BLOCKS, "float16", channels_last=True, other_format=True),
    _work(TWO_BLOCKS, "tf32", other_format=True, bias_grad=True),
    _work(TWO_BLOCKS, "ieee", aligned=False),
    # Strides, dilations, and both: rows of the ring.
    _work(Case("strided", (1, 3, 13, 45), (64, 3, 5, 5), (2, 2), (2, 2, 2, 3)), "tf32"),
    _work(Case("strided", (1, 3, 14, 50), (40, 3, 4, 4), (2, 2)), "bfloat16"),
    _work(Case("stride beyond the kernel", (1, 4, 20, 39), (16, 4, 2, 3), (5, 2), (3, 4, 0, 9),
               (1, 4)), "tf32"),
    _work(Case("dilated", (2, 4, 15, 32), (40, 4, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
          "ieee"),
    _work(Case("stride and dilation", (1, 2, 31, 24), (9, 2, 3, 3), (4, 2), (3, 0, 1, 2), (6, 4)),
          "tf32"),
    _work(Case("flushed", (1, 4, 40, 10), (16, 4, 1, 2)), "ieee", bias_grad=True),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for work in WORKS for launch in work.plan.launches})


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_against_float64(work: Work) -> None:
    assert_gradients(work)


def test_works_cover_all_branches() -> None:
    taken = [dict(work.plan.launches[0].kernel.constants) for work in WORKS]
    assert {of["warpgroups"] for of in taken} == {1, 2}
    assert {of["pair_loads"] for of in taken} == {False, True}
    assert any(of["group_out"] > 128 for of in taken)
    # Sums leave for the workspace more than once.
    assert any(of["flush_steps"] < of["out_height"] for of in taken)


@pytest.mark.parametrize("where", ["input", "grad_output"])
@pytest.mark.parametrize("mode", ["tf32", "ieee"])
def test_infinity_stays_where_it_is(mode: str, where: str) -> None:
    work = _work(ODD_WIDTH, mode, bias_grad=True)
    assert work in WORKS
    tensors = Tensors.random(work)
    put_odd_numbers(getattr(tensors, where))
    if where == "input":
        tensors.input[0, 0, -1, -1] = torch.inf  # one tap sees it
    assert_plain(work, tensors)
