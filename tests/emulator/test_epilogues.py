"""Epilogues of forward passes: every way of storing outputs, with activations and residuals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from emulator import corpus, isolated, precompile
from emulator.pass_cases import (
    ALL,
    SPECIAL_VALUES,
    Conv,
    PassCase,
    Tensors,
    assert_correct,
    at_corners,
    check,
    check_special_values,
    float64,
    run,
)
from fastconv.kernels import direct, planner
from fastconv.kernels.coverage import Class
from fastconv.problem import ACTIVATIONS, Epilogue

SLOPE = 0.3

# CI has time only for these lines of the coverage corpus: for each kernel, one line for each way
# that it adds residuals.
LINES = """\
sm_75/1 forward float64 nchw/nchw: 1x1x1x2 3x1x1x1
sm_90a/1 forward float16 nchw/nhwc: 1x3x1x1 3x1x34x21 padding=16,17,23,24 groups=3
sm_90a/1 forward float16 nchw/nchw: 1x4x1x16 2x2x10x26 stride=6,6 padding=7,7,12,13 groups=2
sm_87/1 forward float16 nhwc/nhwc: 1x2x1x2 4x1x1x1 stride=2,2 groups=2
sm_80/1 forward float16 nchw/nchw: 1x2x6x14 4x1x7x13 padding=3,6 groups=2
sm_90a/1 forward float16 nhwc/nhwc: 2x8x3x1 8x1x4x37 padding=9,0,55,0 groups=8
sm_80/1 forward* bfloat16 nhwc/nhwc: 1x16x1x1 16x8x1x1 padding=1,0,2,0 groups=2
sm_121a/1 forward* tf32 nchw/nchw: 1x1x19x44 1x1x1x1
sm_90a/3 forward float16 nchw/nchw: 1x2x19x12 16x2x1x1
sm_90a/1 forward* float32 nchw/nchw: 1x4x2x201 37x4x2x1
sm_90a/1 forward tf32 nhwc/nhwc: 1x2x1x1 7x2x3x1 stride=4,4 padding=4,1 dilation=4,1
sm_90a/5 forward* bfloat16 nhwc/nhwc: 1x19x74x112 4x19x3x3 stride=2,2 padding=1,1
sm_90a/2 forward*gemm bfloat16 nhwc/nhwc plain: 1x8x1x1 72x8x1x2 stride=2,2 padding=1,1
sm_90a/1 forward*gemm1,192,1 float16 nhwc/nhwc: 1x8x1x1 384x8x1x1 padding=0,1
sm_90a/2 forward*gemm tf32 nchw/nchw: 1x40x1x64 48x40x1x1 dilation=5,5
sm_90a/1 forward*gemm tf32 nchw/nchw: 2x9x14x14 302x9x1x1 stride=2,2
sm_90a/1 forward tf32 nhwc/nhwc: 1x4x1x1 8x4x1x1
sm_90a/1 forward float16 nchw/nchw: 2x12x6x12 2x12x3x3 padding=1,1
sm_90a/2 forward bfloat16 nchw/nchw: 2x3x1x517 3x1x1x4 padding=0,0,3,0 groups=3
sm_86/1 forward float16 nhwc/nhwc: 1x34x1x70 34x1x1x4 padding=0,0,3,0 groups=34
sm_90a/1 forward bfloat16 nhwc/nhwc: 2x32x6x7 32x8x3x3 padding=1,1 groups=4
sm_90a/1 forward* bfloat16 nchw/nchw: 1x1x8x8x20 17x1x2x2x4 stride=2,2,4
"""


def _storing() -> list[PassCase]:
    """The corpus's first forward pass for each coverage class of code that stores."""
    found: dict[Class, PassCase] = {}
    for case in corpus.read_cases():
        if case.direction == "forward":
            for one in corpus.classes_of(case):
                if one[1] == "store":
                    found.setdefault(one, case)
    return list(dict.fromkeys(found.values()))


def _with_epilogues(cases: Iterable[PassCase]) -> Iterator[PassCase]:
    """Gives each test case the next activation, and three in four a residual."""
    for i, case in enumerate(cases):
        activation = ACTIVATIONS[(i + 1) % len(ACTIVATIONS)]
        residual = i % 4 < 3 or activation == "identity"
        yield replace(case, epilogue=Epilogue(activation, SLOPE, residual))


CASES = [*_with_epilogues(_storing() if ALL else map(corpus.case_of, LINES.splitlines()))]

# Float32 as scaled fp16, on both families of tensor cores. Values out of range are repaired.
REPAIRED = [
    replace(corpus.case_of(line), epilogue=Epilogue("gelu", residual=True))
    for line in (
        "sm_90a/1 forward* tf32 nchw/nchw: 1x16x2x201 40x16x2x1",
        "sm_86/1 forward* tf32 nchw/nhwc: 1x1x5x149 96x1x4x4 stride=4,4",
    )
]
# Depthwise layers on tensor cores, which recompute outputs that infinities reach.
TOEPLITZ = [
    replace(corpus.case_of(line), epilogue=Epilogue("leaky_relu", SLOPE, residual=True))
    for line in (
        "sm_90a/2 forward tf32 nchw/nchw: 1x2x61x61 2x1x2x29 padding=11,7,9,5 groups=2",
        "sm_90a/1 forward float16 nhwc/nhwc: 2x8x3x1 8x1x4x37 padding=9,0,55,0 groups=8",
    )
]
# Depthwise layers of one row approximate SiLU of 16-bit types.
APPROXIMATED = [
    replace(corpus.case_of(line), epilogue=Epilogue("silu", residual=True))
    for line in (
        "sm_90a/2 forward bfloat16 nchw/nchw: 2x3x1x517 3x1x1x4 padding=0,0,3,0 groups=3",
        "sm_75/1 forward float16 nhwc/nhwc: 1x34x1x70 34x1x1x4 padding=0,0,3,0 groups=34",
    )
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cases = (*CASES, *REPAIRED, *TOEPLITZ, *APPROXIMATED)
    precompile({launch.kernel for case in cases for launch in case.plan.launches})


@pytest.mark.parametrize("case", [*CASES, *APPROXIMATED], ids=str)
def test_against_float64(case: PassCase) -> None:
    check(case)


@pytest.mark.parametrize("case", [*CASES, *TOEPLITZ], ids=str)
def test_isolation(case: PassCase) -> None:
    """Neither a bias nor a residual of another output is added."""
    isolated.check(case)


def test_every_activation_and_kernel_is_run() -> None:
    assert {case.epilogue.activation for case in CASES} == {*ACTIVATIONS}
    storing = {source for source, anatomy in planner.ANATOMIES.items() if "store" in anatomy.parts}
    for kernel in ("kernel", "halo_kernel"):  # only weight gradients
        storing.remove(f"hopper/wgrad_implicit_gemm/{kernel}.cuh")
    storing.remove("hopper/relayout/kernel.cuh")  # no epilogue: it copies what others have stored
    assert {case.plan.launches[-1].kernel.source for case in CASES} == storing


@pytest.mark.parametrize("case", REPAIRED, ids=str)
def test_what_is_repaired_has_its_epilogue_once(case: PassCase) -> None:
    entries = [launch.kernel.entry for launch in case.plan.launches]
    assert entries == ["scale", "pack", "convolve", "pack", "convolve"]
    tensors = Tensors.random(case)
    tensors.input.mul_(2.0**-80)
    tensors.weight.mul_(2.0**80)  # beyond what scales can bring into float16's range
    assert_correct(case, tensors, run(case, tensors))


@pytest.mark.parametrize("case", TOEPLITZ, ids=str)
def test_toeplitz_infinity_has_its_epilogue(case: PassCase) -> None:
    assert "toeplitz" in case.plan.launches[-1].kernel.source
    tensors = Tensors.random(case)
    at_corners(tensors.input, SPECIAL_VALUES[:3])
    check_special_values(case, tensors)


@pytest.mark.parametrize("case", APPROXIMATED, ids=str)
def test_special_values_of_approximations(case: PassCase) -> None:
    tensors = Tensors.random(case)
    numbers = (*SPECIAL_VALUES[:3], 0.0, -0.0, 6e4, -6e4, 1e2, -1e2, 1e-7)
    tensors.input[0, 0, 0, 10 : 10 + 5 * len(numbers) : 5] = torch.tensor(numbers).to(case.dtype)
    check_special_values(case, tensors)


@pytest.mark.parametrize("activation", ACTIVATIONS if ALL else ACTIVATIONS[1::3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_special_values(activation: str, dtype: torch.dtype) -> None:
    """NaN stays NaN; infinities and large numbers give PyTorch's results."""
    numbers = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e30, -1e30, 30.0, -30.0, 1e-30, 6.5]
    conv = Conv("pointwise", (1, 1, 1, len(numbers)), (1, 1, 1, 1))
    case = PassCase(conv, direct.forward, dtype, bias=False, epilogue=Epilogue(activation, SLOPE))
    tensors = replace(
        Tensors.random(case),
        input=torch.tensor(numbers, dtype=dtype).view(conv.input),
        weight=torch.ones(conv.weight, dtype=dtype),
    )
    expected = float64(case, tensors).to(dtype)
    torch.testing.assert_close(run(case, tensors), expected, equal_nan=True, rtol=2e-6, atol=2e-6)


POINTWISE = Conv("pointwise", (1, 1, 3, 3), (1, 1, 1, 1))
REFUSED = {
    "weight gradient": (planner.weight_grad, POINTWISE, Epilogue("relu")),
    "positions without a tap": (
        planner.input_grad,
        replace(POINTWISE, stride=(2, 1)),
        Epilogue("relu"),
    ),
    "strided residual": (
        planner.input_grad,
        Conv("strided", (1, 1, 4, 4), (1, 1, 2, 2), stride=(2, 2)),
        Epilogue(residual=True),
    ),
}


@pytest.mark.parametrize(("plan", "conv", "epilogue"), REFUSED.values(), ids=REFUSED)
def test_gradients_refuse_an_epilogue(plan: planner.Pass, conv: Conv, epilogue: Epilogue) -> None:
    with pytest.raises(ValueError, match=r"gradient .*has no epilogue, but got Epilogue"):
        PassCase(conv, plan, epilogue=epilogue).plan  # noqa: B018
