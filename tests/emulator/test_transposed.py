"""Transposed convolutions: input gradients to which kernels add a bias, with an epilogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emulator import corpus, driver, precompile
from emulator.pass_cases import (
    ALL,
    ROUNDINGS,
    PassCase,
    Tensors,
    activated,
    assert_close,
    float64,
    new_output,
    placed,
    tensors_read,
)
from fastconv.kernels import planner
from fastconv.kernels.coverage import Class
from fastconv.kernels.family import Launch
from fastconv.problem import ACTIVATIONS, NO_EPILOGUE, Epilogue
from workspaces import workspace

SLOPE = 0.3

# CI has time only for these lines of the coverage corpus: for each kernel, one for each way that it
# stores the residues of a stride.
LINES = """\
sm_90a/3 input_grad float32 nchw/nchw: 2x3x9x7 2x3x4x3 stride=2,2 padding=1,1
sm_100a/1 input_grad bfloat16 nhwc/nhwc: 1x4x6x7 3x4x2x3 stride=1,2 padding=1,1
sm_90a/2 input_grad bfloat16 nhwc/nhwc: 1x26x1x1 13x2x2x9 stride=2,2 padding=2,4 groups=13
sm_75/5 input_grad tf32 nchw/nchw: 1x4x5x6 2x2x2x1 stride=2,1 padding=0,1,0,0 dilation=1,2 groups=2
sm_90a/3 input_grad bfloat16 nhwc/nhwc: 1x8x17x5 8x1x5x31 padding=15,15 groups=8
sm_90a/132 input_grad tf32 nchw/nchw: 1x37x1x1 37x1x31x31 padding=15,15 groups=37
sm_86/2 input_grad* tf32 nhwc/nhwc: 1x9x5x8 16x9x3x2 stride=2,1 padding=1,0
sm_103a/5 input_grad* tf32 nchw/nchw: 1x1x1x1 8x1x1x1
sm_90a/3 input_grad bfloat16 nchw/nchw unaligned: 1x3x1x1 79x3x1x1
sm_90a/2 input_grad float16 nchw/nchw unaligned: 1x7x2x16 3x7x10x1 padding=6,2,0,2
sm_90a/1 input_grad float16 nchw/nchw: 1x18x1x1 20x9x1x1 dilation=9,9 groups=2
sm_90a/1 input_grad* tf32 nchw/nchw: 1x4x1x7 4x4x1x2 stride=1,2 padding=1,0,2,2
sm_90a/1 input_grad* tf32 nchw/nchw: 1x32x2x8 1x32x3x1 stride=2,1 padding=1,0
sm_90a/3 input_grad bfloat16 nhwc/nhwc unaligned: 1x6x2x1 5x6x3x2 stride=2,2 padding=1,1
sm_90a/1 input_grad*gemm tf32 nchw/nchw: 1x8x4x9 8x8x2x3 stride=2,3 padding=1,1
sm_90a/1 input_grad*gemm float16 nhwc/nhwc: 1x16x5x4 8x16x2x2 stride=2,2
sm_90a/2 input_grad bfloat16 nchw/nchw: 2x3x1x520 3x1x1x4 padding=0,0,3,0 groups=3
sm_90a/1 input_grad float32 nhwc/nhwc: 1x34x1x70 34x1x1x4 padding=0,0,0,3 groups=34
sm_90a/2 input_grad bfloat16 nhwc/nhwc: 1x32x6x8 32x8x3x3 stride=2,2 padding=1,1 groups=4
sm_80/1 input_grad float16 nhwc/nhwc: 2x32x6x7 32x4x3x3 padding=1,1 groups=8
sm_90a/1 input_grad* float16 nchw/nchw: 1x2x2x4x64 8x2x1x2x8 stride=1,2,8
"""


def _storing() -> list[PassCase]:
    """The corpus's first input gradient with a bias for each coverage class of code that stores."""
    found: dict[Class, PassCase] = {}
    for case in corpus.read_cases():
        if case.direction == "input_grad" and case.conv.problem.reaches_every_input:
            for one in corpus.classes_of(case):
                if one[1] == "store":
                    found.setdefault(one, case)
    return list(dict.fromkeys(found.values()))


def _with_epilogues(cases: Iterable[PassCase]) -> Iterator[PassCase]:
    """Gives each test case the next activation, and those of stride 1 a residual."""
    for i, case in enumerate(cases):
        activation = ACTIVATIONS[i % len(ACTIVATIONS)]
        residual = case.conv.stride == (1, 1)
        slope = SLOPE if activation == "leaky_relu" else 0.0
        yield replace(case, epilogue=Epilogue(activation, slope, residual))


CASES = _storing() if ALL else [corpus.case_of(line) for line in LINES.splitlines()]
FUSED = [*_with_epilogues(CASES)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for case in (*CASES, *FUSED) for launch in case.plan.launches})


@pytest.mark.parametrize("case", [*CASES, *FUSED], ids=str)
def test_against_float64(case: PassCase) -> None:
    """Compares activation(gradient + bias + residual) with float64."""
    plain, problem = replace(case, epilogue=NO_EPILOGUE), case.conv.problem
    tensors = Tensors.random(plain)
    bias = torch.randn(problem.in_channels).to(case.dtype)
    read = {**tensors_read(plain, tensors), "bias": bias}
    added = bias.double().view(-1, *(1,) * len(problem.axes)).expand(problem.input_shape)
    if case.epilogue.residual:
        residual = torch.randn(problem.input_shape).to(case.dtype)
        read["residual"] = placed(residual, case.output_format, case.aligned)
        added = added + residual.double()
    sizes = Tensors(*(tensor.abs() for tensor in vars(tensors).values()))
    assert_close(
        _run(case, read),
        activated(float64(plain, tensors) + added, case.epilogue),
        # An activation grows errors by half at most, and has rounding errors of its own.
        float64(plain, sizes) + added.abs() + 1,
        2 * ROUNDINGS,
    )


def _run(case: PassCase, read: dict[str, Tensor]) -> Tensor:
    plan, output = case.plan, new_output(case)
    driver.run_both_orders(plan.launches, {**read, "output": output, **workspace(plan)})
    return output


def test_a_bias_changes_no_kernel() -> None:
    """Kernels read the bias by an address that is 0 for none: gradients have the same ones."""
    for case in CASES:
        assert all("bias" in launch.arguments for launch in case.plan.launches if _stores(launch))


def _stores(launch: Launch) -> bool:
    return launch.kernel.entry not in ("scale", "pack", "clear", "clear_planes")


def test_bias_reaches_every_position() -> None:
    assert all(case.conv.problem.reaches_every_input for case in CASES)


def test_every_kernel_is_run() -> None:
    storing = {source for source, anatomy in planner.ANATOMIES.items() if "store" in anatomy.parts}
    for kernel in ("kernel", "halo_kernel"):  # only weight gradients
        storing.remove(f"hopper/wgrad_implicit_gemm/{kernel}.cuh")
    storing.remove("hopper/relayout/kernel.cuh")  # no epilogue: it copies what others have stored
    assert {case.plan.launches[-1].kernel.source for case in CASES} == storing
