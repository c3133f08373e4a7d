"""The portable kernels on the CPU: every pass, dtype and layout on small odd geometries."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from emulator import precompile, run_both_orders
from fastconv.kernels import direct
from fastconv.kernels.family import Gpu, Operands, Plan
from fastconv.problem import Problem

HOPPER = Gpu("sm_90a", 132, 232448, 233472)
TURING = Gpu("sm_75", 68, 65536, 65536)
# A single processor: any problem has more blocks than run at once, so weights are packed and
# pixels are not split.
TINY = Gpu("sm_75", 1, 65536, 65536)

SCALARS = {
    torch.float16: ("fastconv::float16", 2),
    torch.bfloat16: ("fastconv::bfloat16", 2),
    torch.float32: ("float", 4),
    torch.float64: ("double", 8),
}
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-14}


@dataclass(frozen=True)
class Case:
    """A small convolution that has something the others lack."""

    name: str
    input: tuple[int, int, int, int]
    weight: tuple[int, int, int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def problem(self) -> Problem:
        return Problem.of(
            self.input, self.weight, self.stride, self.padding, self.dilation, self.groups
        )


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
PASSES = {
    "forward": direct.forward,
    "input_grad": direct.input_grad,
    "weight_grad": direct.weight_grad,
}


@dataclass(frozen=True)
class Work:
    """One pass of a case on given kinds of tensors."""

    case: Case
    direction: str
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    aligned: bool = True
    gpu: Gpu = HOPPER

    @property
    def plan(self) -> Plan:
        shape = self.case.weight
        strides = torch.empty(shape).contiguous(memory_format=self.memory_format).stride()
        last = self.channels_last
        operands = Operands(*SCALARS[self.dtype], last, last, strides, self.aligned)
        return PASSES[self.direction](self.case.problem, operands, self.gpu)

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def __str__(self) -> str:
        layout = "channels-last" if self.channels_last else "contiguous"
        kind = f"{str(self.dtype).removeprefix('torch.')}-{layout}"
        alignment = "" if self.aligned else "-unaligned"
        return f"{self.case.name}-{self.direction}-{kind}{alignment}-{self.gpu.architecture}"


def _works() -> list[Work]:
    works = [Work(case, direction) for case in (*CASES, *FAR_APART) for direction in PASSES]
    for i, case in enumerate(CASES):
        for direction in PASSES:
            dtype = list(SCALARS)[i % len(SCALARS)]
            works.append(Work(case, direction, dtype, channels_last=True))
            works.append(Work(case, direction, list(SCALARS)[(i + 1) % len(SCALARS)], gpu=TINY))
    for direction in PASSES:
        works += [Work(CASES[0], direction, dtype) for dtype in SCALARS]
        works.append(Work(CASES[0], direction, aligned=False))
        works.append(Work(CASES[1], direction, torch.float16, aligned=False))
        works.append(Work(CASES[10], direction, gpu=TURING))
    return list(dict.fromkeys(works))


WORKS = _works()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    precompile({launch.kernel for work in WORKS for launch in work.plan.launches})


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_against_float64(work: Work) -> None:
    problem = work.case.problem
    input, weight, grad_output = (
        _random(shape, work)
        for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
    )
    bias = torch.randn(problem.out_channels).to(work.dtype)
    tensors = {
        "forward": {"input": input, "weight": weight, "bias": bias},
        "input_grad": {"input": grad_output, "weight": weight},
        "weight_grad": {"grad_output": grad_output, "input": input},
    }[work.direction]
    expected = _float64(work, input, weight, bias, grad_output)
    output = torch.full_like(expected, torch.nan, dtype=work.dtype).to(
        memory_format=work.memory_format
    )
    plan = work.plan
    scratch = torch.full((plan.scratch_bytes,), 255, dtype=torch.uint8)
    run_both_orders(plan.launches, {**tensors, "output": output, "scratch": scratch})
    error = (output.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCE[work.dtype], f"relative error {error:.1e}"


def test_infinity_stays_where_it_is() -> None:
    """Padding, zero weights of tiles and pixels beyond the image are not multiplied with it."""
    case = Case("infinite", (1, 2, 5, 11), (2, 2, 2, 3), stride=(2, 2))
    problem = case.problem
    input = torch.randn(problem.input_shape)
    input[0, 0, 4, 10] = torch.inf  # no output pixel but the last can see it
    weight, grad_output = torch.randn(problem.weight_shape), torch.randn(problem.output_shape)
    for direction, tensors in (
        ("forward", {"input": input, "weight": weight}),
        ("weight_grad", {"grad_output": grad_output, "input": input}),
    ):
        work = Work(case, direction)
        expected = _float64(work, input, weight, torch.zeros(2), grad_output)
        output = torch.full_like(expected, torch.nan, dtype=torch.float32)
        scratch = torch.full((work.plan.scratch_bytes,), 255, dtype=torch.uint8)
        run_both_orders(work.plan.launches, {**tensors, "output": output, "scratch": scratch})
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def _random(shape: tuple[int, ...], work: Work) -> torch.Tensor:
    tensor = torch.randn(shape).to(work.dtype).contiguous(memory_format=work.memory_format)
    if work.aligned:
        return tensor
    storage = torch.empty(tensor.numel() + 1, dtype=work.dtype)
    return storage[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def _float64(
    work: Work,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    grad_output: torch.Tensor,
) -> torch.Tensor:
    problem = work.case.problem
    top, bottom, left, right = problem.padding
    input, weight = input.double().requires_grad_(), weight.double().requires_grad_()
    padded = torch.nn.functional.pad(input, (left, right, top, bottom))
    output = torch.nn.functional.conv2d(
        padded, weight, bias.double(), problem.stride, 0, problem.dilation, problem.groups
    )
    if work.direction == "forward":
        return output.detach()
    wanted = input if work.direction == "input_grad" else weight
    (grad,) = torch.autograd.grad(output, wanted, grad_output.double())
    return grad
