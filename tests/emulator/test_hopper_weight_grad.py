"""The tensor cores' weight gradient on the CPU: every mode on small odd geometries."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch

from emulator import precompile, run_both_orders
from fastconv.kernels import hopper
from fastconv.kernels.family import Declined, Gpu, Operands, Plan
from fastconv.problem import Problem

# Few processors, so that blocks have several runs each.
GPU = Gpu("sm_90a", 3, 232448, 233472)
PLANNER = sys.modules[hopper.weight_grad.__module__]

MODES = {
    "tf32": (torch.float32, "float", "tf32", 5e-7),
    "ieee": (torch.float32, "float", "ieee", 3e-7),
    "bfloat16": (torch.bfloat16, "fastconv::bfloat16", "ieee", 4e-3),
    "float16": (torch.float16, "fastconv::float16", "ieee", 5e-4),
}


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
    Case("asymmetric", (2, 12, 9, 20), (70, 12, 5, 9), padding=(2, 2, 4, 4)),
    Case("dilated", (1, 17, 15, 32), (40, 17, 3, 4), padding=(2, 1, 4, 3), dilation=(2, 3)),
    Case("rows not aligned", (5, 16, 12, 38), (130, 16, 3, 3)),
    Case("columns not aligned", (1, 20, 9, 21), (64, 20, 3, 5), padding=(1, 1, 2, 2)),
    Case("strided", (2, 16, 11, 37), (30, 16, 3, 3), stride=(2, 3), padding=(1, 1, 1, 1)),
    Case("stride beyond the kernel", (1, 9, 20, 19), (16, 9, 2, 3), (5, 2), (3, 4, 0, 9), (1, 4)),
    Case("stride and dilation share a factor", (1, 8, 21, 24), (9, 8, 3, 3), (4, 2), (3, 0, 1, 2),
         (2, 4)),
    Case("pointwise", (1, 40, 9, 20), (72, 40, 1, 1)),
    Case("small images", (9, 24, 7, 7), (40, 24, 3, 3), padding=(1, 1, 1, 1)),
    Case("grouped", (1, 48, 9, 20), (32, 24, 3, 2), padding=(1, 0, 0, 1), groups=2),
    Case("high kernel", (1, 9, 30, 16), (16, 9, 17, 1), padding=(3, 2, 0, 0)),
    Case("wide kernel", (1, 8, 4, 56), (16, 8, 1, 33), padding=(0, 0, 16, 16)),
    Case("wide image", (1, 8, 5, 300), (8, 8, 3, 3), padding=(1, 1, 1, 1)),
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The weight gradient of a case in a mode."""

    case: Case
    mode: str
    channels_last: bool = False
    aligned: bool = True

    @property
    def plan(self) -> Plan:
        dtype, scalar, precision, _ = MODES[self.mode]
        strides = torch.empty(self.case.weight).contiguous(memory_format=self.format).stride()
        last = self.channels_last
        operands = Operands(scalar, dtype.itemsize, last, last, strides, self.aligned, precision)
        return hopper.weight_grad(self.case.problem, operands, GPU)

    @property
    def format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def __str__(self) -> str:
        layout = "channels-last" if self.channels_last else "contiguous"
        return f"{self.case.name}-{self.mode}-{layout}{'' if self.aligned else '-unaligned'}"


def _works() -> list[Work]:
    """Every case in every layout, with the modes taking turns."""
    modes = list(MODES)
    works = []
    for i, case in enumerate(CASES):
        works.append(Work(case, modes[i % 4]))
        works.append(Work(case, modes[(i + 1) % 4], channels_last=True))
    for mode in modes:
        works += [Work(CASES[0], mode, aligned=False), Work(CASES[2], mode)]
        works += [Work(CASES[2], mode, channels_last=True)]
    return list(dict.fromkeys(works))


WORKS = _works()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> object:
    """With kernels compiled; small problems are planned although they are not worth it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PLANNER, "_check_worth", lambda tile, gpu: None)
        precompile({launch.kernel for work in WORKS for launch in work.plan.launches})
        yield


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_against_float64(work: Work) -> None:
    problem = work.case.problem
    *_, tolerance = MODES[work.mode]
    grad_output, input = (
        _random(shape, work) for shape in (problem.output_shape, problem.input_shape)
    )
    output = torch.full(problem.weight_shape, torch.nan, dtype=input.dtype)
    output = output.contiguous(memory_format=work.format)
    plan = work.plan
    scratch = torch.full((plan.scratch_bytes,), 255, dtype=torch.uint8)
    tensors = {"grad_output": grad_output, "input": input, "output": output, "scratch": scratch}
    run_both_orders(plan.launches, tensors)
    expected = _float64(problem, *(_exact(tensor, work.mode) for tensor in (grad_output, input)))
    error = (output.double() - expected).norm() / expected.norm()
    assert error <= tolerance, f"relative error {error:.1e}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scalar": "double", "scalar_bytes": 8}, "float64"),
    ],
)
def test_declines(changes: dict[str, object], reason: str) -> None:
    kind = {
        "scalar": "float", "scalar_bytes": 4, "input_channels_last": False,
        "output_channels_last": False, "weight_strides": (1, 1, 1, 1), "aligned": True,
    }  # fmt: skip
    with pytest.raises(Declined, match=reason):
        hopper.weight_grad(CASES[0].problem, Operands(**{**kind, **changes}), GPU)  # type: ignore[arg-type]


def _random(shape: tuple[int, ...], work: Work) -> torch.Tensor:
    tensor = torch.randn(shape).to(MODES[work.mode][0]).contiguous(memory_format=work.format)
    if work.aligned:
        return tensor
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return storage[1:].as_strided(shape, tensor.stride(), 1).copy_(tensor)


def _exact(tensor: torch.Tensor, mode: str) -> torch.Tensor:
    """What is multiplied, in float64: TF32 rounds to nearest first, ties away from zero."""
    if mode == "tf32":
        bits = tensor.contiguous().view(torch.int32)
        tensor = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return tensor.double()


def _float64(problem: Problem, grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    top, bottom, left, right = problem.padding
    weight = torch.zeros(problem.weight_shape, dtype=torch.float64, requires_grad=True)
    output = torch.nn.functional.conv2d(
        torch.nn.functional.pad(input, (left, right, top, bottom)),
        weight, None, problem.stride, 0, problem.dilation, problem.groups,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(output, weight, grad_output)
    return grad
