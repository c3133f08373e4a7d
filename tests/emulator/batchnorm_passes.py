"""Runs the kernels of batch normalization in the emulator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchnorm_cases import EPS, Case, Tensors
from emulator.driver import run_both_orders
from fastconv.backends.batchnorm import launches
from fastconv.kernels.batchnorm import plan
from fastconv.kernels.family import Gpu, Plan
from fastconv.kernels.gpus import H200
from fastconv.ops.batchnorm_schema import (
    Arguments,
    GradArguments,
    OutputArguments,
    backward_need,
    forward_need,
    output_need,
)


class Run(NamedTuple):
    """A plan, and the tensors that its launches name."""

    plan: Plan
    tensors: dict[str, Tensor | None]

    def execute(self) -> None:
        scratch = torch.full((self.plan.scratch_bytes // 4,), torch.nan)
        named = {**self.tensors, "scratch": scratch if scratch.numel() else None}
        given = {name: tensor for name, tensor in named.items() if tensor is not None}
        run_both_orders(self.plan.launches, given)


def _sums(case: Case) -> Tensor:
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    return torch.full((case.channels,), torch.nan, dtype=dtype)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x).fill_(torch.nan)


def forward_run(
    case: Case, tensors: Tensors, gpu: Gpu = H200, batches: Tensor | None = None
) -> Run:
    """A forward pass in training; it fills y, mean, invstd, and updates running statistics."""
    y = _like(tensors.x)
    arguments = Arguments(
        tensors.x, tensors.residual, tensors.weight, tensors.bias, tensors.running_mean,
        tensors.running_var, batches, True, 0.1, EPS, case.activation, case.slope,
    )  # fmt: skip
    need = forward_need(arguments, launches.alignment_of(tensors.x, tensors.residual, y))
    made = plan.forward(need.call.planned_for, need.of.planned_for, gpu)
    given = (
        tensors.x, tensors.residual, tensors.weight, tensors.bias, tensors.running_mean,
        tensors.running_var, batches, None, _sums(case), _sums(case), y,
    )  # fmt: skip
    return Run(made, dict(zip(launches.FORWARD, given, strict=False)))


def output_run(case: Case, tensors: Tensors, forward: Run, gpu: Gpu = H200) -> Run:
    """The output of a forward pass that has been executed, again; there is no residual."""
    mean, invstd = forward.tensors["mean"], forward.tensors["invstd"]
    assert mean is not None
    assert invstd is not None
    parameters = (tensors.weight, tensors.bias, mean, invstd)
    arguments = OutputArguments(tensors.x, *parameters, case.activation, case.slope)
    need = output_need(arguments, launches.alignment_of(tensors.x))
    made = plan.output(need.call.planned_for, gpu)
    given = (tensors.x, None, *parameters, _like(tensors.x))
    return Run(made, dict(zip(launches.OUTPUT, given, strict=True)))


def backward_run(
    case: Case, tensors: Tensors, forward: Run, wanted: launches.Gradients, gpu: Gpu = H200
) -> Run:
    """The gradients of a forward pass that has been executed."""
    other = plan.beside(case.activation, case.slope, case.residual)
    beside = {None: None, "output": forward.tensors["y"], "residual": tensors.residual}[other]
    stores = wanted.residual and case.activation != "identity"
    grad_x = _like(tensors.x)
    grad_residual = _like(tensors.x) if stores else None
    arguments = GradArguments(
        tensors.grad, tensors.x, beside, tensors.weight, tensors.bias, forward.tensors["mean"],
        forward.tensors["invstd"], wanted.of_batch, case.residual, case.activation, case.slope,
        wanted.x, wanted.parameters, wanted.residual,
    )  # fmt: skip
    aligned = launches.alignment_of(tensors.x, tensors.grad, beside, grad_x, grad_residual)
    need = backward_need(arguments, aligned)
    made = plan.backward(need.call.planned_for, *need.of, gpu)
    parameters = [torch.full((case.channels,), torch.nan, dtype=case.parameter) for _ in range(2)]
    given = (
        tensors.grad, tensors.x, beside, tensors.weight, tensors.bias, forward.tensors["mean"],
        forward.tensors["invstd"], grad_x, grad_residual,
        *(parameters if wanted.parameters else (None, None)),
    )  # fmt: skip
    return Run(made, dict(zip(launches.BACKWARD, given, strict=False)))
