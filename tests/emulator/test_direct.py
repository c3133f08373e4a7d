"""The portable kernels on the CPU: every pass, dtype and layout on small odd geometries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from emulator import precompile
from emulator.works import (
    ROUNDINGS,
    SCALARS,
    Case,
    Planner,
    Tensors,
    Work,
    check,
    float64,
    run,
)
from fastconv.kernels import direct
from fastconv.kernels.gpus import GPUS

# A single processor: any problem has more blocks than run at once, so weights are packed and
# pixels are not split.
TINY = replace(GPUS["sm_75"], processors=1)

CASES = (
    Case("asymmetric", (2, 3, 9, 20), (5, 3, 5, 9), padding=(2, 2, 4, 4), dilation=(1, 1)),
    Case("dilated", (1, 5, 15, 16), (9, 5, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
    Case("strided", (1, 4, 11, 14), (6, 4, 3, 3), stride=(2, 3), padding=(1, 1, 0, 2)),
    Case("stride and dilation share a factor", (1, 2, 13, 17), (3, 2, 3, 3), (4, 2), (3, 0, 1, 2),
         (2, 4)),
    Case("pointwise", (2, 17, 5, 7), (20, 17, 1, 1)),
    Case("strided pointwise", (1, 6, 7, 9), (4, 6, 1, 1), stride=(2, 2)),
    Case("depthwise", (1, 6, 8, 12), (6, 1, 3, 5), padding=(1, 1, 2, 2), groups=6),
    Case("multiplier", (2, 3, 7, 7), (6, 1, 2, 2), groups=3),
    Case("grouped", (1, 8, 6, 10), (12, 4, 3, 3), padding=(1, 0, 0, 1), groups=2),
    Case("long row", (1, 2, 4, 40), (2, 2, 1, 21), padding=(0, 0, 10, 10)),
    Case("many channels", (1, 20, 6, 8), (40, 20, 3, 3), padding=(1, 1, 1, 1)),
    Case("one pixel", (1, 3, 3, 3), (2, 3, 3, 3)),
)  # fmt: skip
FAR_APART = (  # more pixels between taps than shared memory, or registers, hold
    Case("far apart", (1, 1, 2, 9100), (2, 1, 1, 3), stride=(1, 500), dilation=(1, 4000)),
    Case("apart", (1, 3, 3, 230), (4, 3, 2, 3), stride=(1, 2), dilation=(1, 100)),
)
PASSES = (direct.forward, direct.input_grad, direct.weight_grad)


def _works() -> list[Work]:
    works = [Work(case, planner) for case in (*CASES, *FAR_APART) for planner in PASSES]
    for i, case in enumerate(CASES):
        for planner in PASSES:
            dtype = list(SCALARS)[i % len(SCALARS)]
            bias = planner is direct.weight_grad
            works.append(Work(case, planner, dtype, channels_last=True, bias_grad=bias))
            works.append(Work(case, planner, list(SCALARS)[(i + 1) % len(SCALARS)], gpu=TINY))
    for planner in PASSES:
        bias = planner is direct.weight_grad
        works += [Work(CASES[0], planner, dtype, bias_grad=bias) for dtype in SCALARS]
        works.append(Work(CASES[0], planner, aligned=False))
        works.append(Work(CASES[1], planner, torch.float16, aligned=False))
        works.append(Work(CASES[10], planner, gpu=GPUS["sm_75"]))
    return list(dict.fromkeys(works))


WORKS = _works()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for work in WORKS for launch in work.plan.launches})


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_against_float64(work: Work) -> None:
    check(work)


@pytest.mark.parametrize("work", [work for work in WORKS if work.bias_grad], ids=str)
def test_bias_in_the_same_pass(work: Work) -> None:
    tensors = Tensors.random(work)
    bias = torch.full((work.case.weight[0],), torch.nan, dtype=work.dtype)
    run(work, tensors, bias)
    grad_output = tensors.grad_output.double()
    expected, size = grad_output.sum((0, 2, 3)), grad_output.abs().sum((0, 2, 3))
    wide = torch.float64 if work.dtype == torch.float64 else torch.float32
    bound = ROUNDINGS * torch.finfo(wide).eps * size
    bound += torch.finfo(work.dtype).eps * expected.abs()
    assert ((bias.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("planner", [direct.forward, direct.weight_grad])
def test_infinity_stays_where_it_is(planner: Planner) -> None:
    """Padding, zero weights of tiles and pixels beyond the image are not multiplied with it."""
    work = Work(Case("infinite", (1, 2, 5, 11), (2, 2, 2, 3), stride=(2, 2)), planner)
    tensors = Tensors.random(work)
    tensors.input[0, 0, 4, 10] = torch.inf  # no output pixel but the last can see it
    actual, expected = run(work, tensors), float64(work, tensors)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
