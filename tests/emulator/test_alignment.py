"""Tensors that do not begin at multiples of 16 bytes: each tensor of a pass in turn, all kernels.

Plans assume the alignment that the CUDA backend finds for its tensors (``backends/cuda.py: need``).
So the tests plan with the backend's operands, and run the plan on the same tensors. The emulator
reports every misaligned vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emulator import corpus, precompile, run_both_orders
from emulator.pass_cases import (
    ALL,
    ROUNDINGS,
    PassCase,
    Tensors,
    assert_close,
    assert_correct,
    new_output,
    tensors_read,
)
from fastconv.backends import cuda
from fastconv.kernels import planner
from fastconv.kernels.family import Declined, Plan
from fastconv.problem import Epilogue
from workspaces import workspace

FUSED = Epilogue("relu", residual=True)

# CI runs only these: kernels that read a bias or write weights in vectors of their own.
LINES = """\
sm_90a/1 forward*gemm bfloat16 nhwc/nhwc: 2x72x5x7 88x72x1x1
sm_75/1 forward bfloat16 nhwc/nhwc: 2x8x6x6 8x1x3x3 padding=1,1 groups=8
sm_90a/2 weight_grad*gemm float16 nchw/nchw: 1x8x12x12 64x8x1x1
sm_75/1 forward float16 nchw/nhwc: 2x3x4x8 8x3x3x3 padding=1,1
sm_80/1 forward* bfloat16 nhwc/nhwc: 1x16x4x8 16x16x3x3 padding=1,1
sm_90a/1 forward bfloat16 nchw/nchw: 2x3x1x520 3x1x1x4 padding=0,0,3,0 groups=3
"""
# The other kernels, with each type that a kernel reads in its own kind of vectors.
MORE_LINES = """\
sm_90a/1 forward bfloat16 nhwc/nhwc: 2x32x6x7 32x8x3x3 padding=1,1 groups=4
sm_90a/1 weight_grad bfloat16 nhwc/nhwc bias: 2x32x6x7 32x16x3x3 padding=1,1 groups=2
sm_90a/1 input_grad* float32 nhwc/nhwc: 1x7x2x1x7 5x7x1x1x3 stride=2,2,2
sm_90a/1 input_grad* bfloat16 nchw/nchw: 2x1x4x4x32 17x1x2x4x4 stride=2,4,4
sm_90a/1 forward* tf32 nchw/nchw: 2x1x4x4x32 17x1x2x4x4 stride=2,4,4
sm_75/1 forward float64 nchw/nchw: 2x3x4x8 8x3x3x3 padding=1,1
sm_75/1 forward float32 nhwc/nhwc: 2x4x4x8 8x4x3x3 padding=1,1
sm_75/1 input_grad bfloat16 nchw/nchw: 2x8x8x8 8x8x1x1 stride=2,2
sm_75/1 weight_grad float16 nchw/nchw bias: 2x4x4x8 8x4x3x3 padding=1,1
sm_75/1 weight_grad float64 nhwc/nhwc bias: 2x4x4x8 8x4x3x3 padding=1,1
sm_75/1 forward float16 nhwc/nhwc: 2x8x6x6 8x1x3x3 padding=1,1 groups=8
sm_75/1 forward float32 nhwc/nhwc: 2x8x6x6 8x1x3x3 padding=1,1 groups=8
sm_75/1 forward float64 nhwc/nhwc: 2x4x6x6 4x1x3x3 padding=1,1 groups=4
sm_75/1 forward float16 nchw/nchw: 2x8x6x8 8x1x3x3 padding=1,1 groups=8
sm_75/1 input_grad float32 nchw/nchw: 2x8x6x8 8x1x3x3 padding=1,1 groups=8
sm_75/1 weight_grad bfloat16 nhwc/nhwc bias: 2x8x6x6 8x1x3x3 padding=1,1 groups=8
sm_75/1 weight_grad float32 nchw/nchw bias: 2x8x6x8 8x1x3x3 padding=1,1 groups=8
sm_75/1 input_grad float32 nchw/nchw: 2x3x1x520 3x1x1x4 padding=0,0,3,0 groups=3
sm_75/1 forward float16 nhwc/nhwc: 2x64x1x70 64x1x1x4 padding=0,0,3,3 groups=64
sm_75/1 weight_grad bfloat16 nchw/nchw bias: 2x3x1x520 3x1x1x4 padding=0,0,3,0 groups=3
sm_75/1 weight_grad float16 nhwc/nhwc bias: 2x64x1x70 64x1x1x4 padding=0,0,3,0 groups=64
sm_90a/2 forward tf32 nchw/nchw: 1x2x61x64 2x1x3x31 padding=11,7,9,5 groups=2
sm_90a/1 forward float16 nhwc/nhwc: 2x8x3x1 8x1x4x37 padding=9,0,55,0 groups=8
sm_80/1 forward* tf32 nchw/nchw: 1x16x4x8 16x16x3x3 padding=1,1
sm_80/1 weight_grad* bfloat16 nhwc/nhwc bias: 1x16x4x8 16x16x3x3 padding=1,1
sm_80/1 weight_grad* tf32 nchw/nchw bias: 1x16x4x8 16x16x3x3 padding=1,1
sm_75/1 forward float16 nchw/nchw: 3x24x1x1 16x24x1x1
sm_75/1 input_grad float32 nchw/nchw: 3x24x1x1 16x24x1x1
sm_75/1 weight_grad bfloat16 nchw/nchw bias: 3x24x1x1 16x24x1x1
sm_90a/1 forward* tf32 nchw/nchw: 1x16x2x64 64x16x3x3 padding=1,1
sm_90a/1 forward* bfloat16 nchw/nchw: 1x32x2x64 64x32x3x3 padding=1,1
sm_90a/1 forward* bfloat16 nhwc/nhwc: 1x24x4x16 40x24x3x3 stride=2,2 padding=1,1
sm_90a/1 forward tf32 nhwc/nhwc: 1x32x4x16 64x32x3x3 padding=1,1
sm_90a/1 input_grad* float32 nchw/nchw: 1x8x8x32 64x8x4x4 stride=2,2 padding=1,1
sm_90a/3 forward float16 nchw/nchw: 1x32x20x64 2x32x3x3 padding=1,1
sm_90a/3 forward bfloat16 nhwc/nhwc: 1x32x20x64 3x32x3x3 padding=1,1
sm_90a/1 forward*gemm float16 nhwc/nhwc plain: 1x24x6x6 96x24x3x3 padding=1,1
sm_90a/1 input_grad*gemm bfloat16 nhwc/nhwc: 2x24x8x8 32x24x1x1 stride=2,2
sm_90a/2 forward*gemm tf32 nchw/nchw: 1x40x1x64 48x40x1x1
sm_90a/1 input_grad*gemm tf32 nchw/nchw: 1x16x8x8 24x16x1x1 stride=2,2
sm_90a/1 weight_grad*gemm bfloat16 nhwc/nhwc bias: 2x64x6x6 64x64x3x3 padding=1,1
sm_90a/1 weight_grad*boxes bfloat16 nhwc/nhwc bias: 2x40x5x9 24x40x3x3 padding=1,1
sm_90a/1 weight_grad*turned float16 nhwc/nhwc plain: 1x24x5x9 40x24x2x3 padding=0,1
sm_90a/1 weight_grad*gemm tf32 nchw/nchw bias: 2x16x8x8 64x16x1x1
sm_90a/4 weight_grad*gemm float32 nchw/nchw: 1x8x12x12 64x8x1x1
sm_90a/1 weight_grad* bfloat16 nchw/nchw bias: 2x16x4x16 64x16x3x3 padding=1,1
sm_90a/1 weight_grad* tf32 nhwc/nhwc bias: 2x16x4x16 64x16x3x3 padding=1,1
sm_90a/1 weight_grad*scaled tf32 nchw/nchw bias: 2x16x4x16 64x16x3x3 padding=1,1
sm_90a/1 input_grad*copies bfloat16 nchw/nchw: 2x16x4x8 24x16x3x3 stride=2,2 padding=1,1
sm_90a/2 weight_grad float16 nhwc/nchw bias: 1x2x1x52 28x2x3x5 padding=4,0,4,0
sm_90a/1 weight_grad tf32 nchw/nchw bias: 1x1x1x66 74x1x4x4 stride=1,3 padding=3,0,3,0
"""


def case_of(line: str) -> PassCase:
    """The test case of a line, with a residual if it is a forward pass."""
    case = corpus.case_of(line)
    return replace(case, epilogue=FUSED) if case.direction == "forward" else case


CASES = [case_of(line) for line in (LINES + MORE_LINES * ALL).splitlines()]


def _everything(case: PassCase) -> dict[str, Tensor]:
    """All tensors that a caller passes, by their names in launches."""
    tensors = tensors_read(case, Tensors.random(case))
    if case.bias_grad:
        tensors["bias_grad"] = torch.full(case.conv.weight[:1], torch.nan, dtype=case.dtype)
    return {**tensors, "output": new_output(case)}


def moved(tensor: Tensor) -> Tensor:
    """A copy of a tensor, one element past an aligned address."""
    around = tensor.new_full((tensor.numel() + 1,), torch.nan)
    return around.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def _plan(case: PassCase, tensors: dict[str, Tensor]) -> Plan:
    """The CUDA backend's plan for these tensors, with the kernel of the case where it applies."""
    first = "grad_output" if case.direction == "weight_grad" else "input"
    second = "input" if case.direction == "weight_grad" else "weight"
    need = cuda.need(
        getattr(planner, case.direction), case.conv.problem, tensors[first], tensors[second],
        tensors["output"], case.precision, case.bias_grad, planner.EVERY,
        tensors.get("residual"), case.epilogue, tensors.get("bias"),
    )  # fmt: skip
    assert need is not None
    operands = replace(
        cuda.operands_for(need),
        # The strides of one-pixel images do not determine their memory format.
        input_channels_last=case.channels_last,
        output_channels_last=case.output_channels_last,
    )
    for chosen in (case.planner, need.plan):
        with suppress(Declined):
            return chosen(case.conv.problem, operands, case.gpu)
    raise AssertionError("the portable kernels take everything")


EVERY_LINE = (LINES + MORE_LINES).splitlines()


def test_every_kernel_is_in_a_line() -> None:
    plans = [_plan(case, _everything(case)) for case in map(case_of, EVERY_LINE)]
    sources = {launch.kernel.source for plan in plans for launch in plan.launches}
    assert sources >= {*planner.ANATOMIES}


def test_plans_of_a_misaligned_bias_are_others() -> None:
    """Only plans that read the bias in pairs depend on its alignment."""
    for case in map(case_of, EVERY_LINE):
        if case.direction != "forward":
            continue
        tensors = _everything(case)
        before, bias = _plan(case, tensors), tensors["bias"]
        after = _plan(case, {**tensors, "bias": moved(bias)})
        told = "aligned_bias" in dict(before.launches[-1].kernel.constants)
        assert (after != before) == (told and bias.element_size() == 2)


def placements(case: PassCase) -> Iterator[tuple[str, dict[str, Tensor], Plan]]:
    for name in _everything(case):
        torch.manual_seed(0)
        tensors = _everything(case)
        tensors[name] = moved(tensors[name])
        yield name, tensors, _plan(case, tensors)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    plans = (plan for case in CASES for _, _, plan in placements(case))
    precompile({launch.kernel for plan in plans for launch in plan.launches})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_tensor_may_begin_anywhere(case: PassCase) -> None:
    for _, tensors, plan in placements(case):
        run_both_orders(plan.launches, {**tensors, **workspace(plan)})
        _check(case, tensors)


def _check(case: PassCase, tensors: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    given = Tensors.random(case)
    # The family depends on the addresses, and whether TF32 is rounded depends on the family.
    roundings = ROUNDINGS if case.precision == "ieee" else ROUNDINGS * 2.0**13
    assert_correct(replace(case, precision="ieee"), given, tensors["output"], roundings)
    if "bias_grad" in tensors:
        grad, over = given.grad_output.double(), (0, 2, 3)
        assert_close(tensors["bias_grad"], grad.sum(over), grad.abs().sum(over), ROUNDINGS)
