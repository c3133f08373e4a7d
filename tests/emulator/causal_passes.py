"""Runs the kernels of causal convolutions in the emulator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from causal_cases import Case, Tensors, placed
from emulator.driver import run_both_orders
from fastconv.backends.causal import launches
from fastconv.backends.causal.taps import Gradients, Inputs
from fastconv.kernels.causal import plan
from fastconv.kernels.family import Gpu, Plan
from fastconv.kernels.gpus import H200
from fastconv.ops.causal import new_like


class Run(NamedTuple):
    """A plan, and the tensors that its launches name."""

    plan: Plan
    tensors: dict[str, Tensor | None]

    def execute(self) -> None:
        scratch = torch.full((self.plan.scratch_bytes // 4,), torch.nan)
        named = {**self.tensors, "scratch": scratch if scratch.numel() else None}
        given = {name: tensor for name, tensor in named.items() if tensor is not None}
        run_both_orders(self.plan.launches, given)


def poisoned(x: Tensor, channels_last: bool) -> Tensor:
    """A result of the shape of x that is full of NaN."""
    return new_like(x, channels_last).fill_(torch.nan)


def forward_run(case: Case, tensors: Tensors, gpu: Gpu = H200) -> tuple[Run, Tensor]:
    y = poisoned(tensors.x, case.channels_last)
    inputs = launches.laid_out(Inputs(*tensors.arguments, case.silu), y)
    made = plan.forward(launches.Call.of(inputs, y).planned_for, gpu)
    return Run(made, dict(zip(launches.FORWARD, (*inputs[:5], y), strict=False))), y


def backward_run(
    case: Case,
    tensors: Tensors,
    grad: Tensor,
    grad_final: Tensor | None,
    gpu: Gpu = H200,
    parameters: bool = True,
) -> tuple[Run, Gradients]:
    """A backward pass; ``grad`` is placed as x is."""
    grad_x = poisoned(tensors.x, case.channels_last)
    inputs = launches.laid_out(Inputs(*tensors.arguments, case.silu), grad_x)
    grad = launches.as_rows(placed(grad, case), grad_x)
    conv = launches.Call.of(inputs, grad_x).planned_for
    layout = launches.Rows.of(grad).layout(conv.channels_last)
    made = plan.backward(conv, layout, parameters, gpu)
    weight = tensors.weight if parameters else tensors.weight[:0]
    results = Gradients(
        grad_x,
        torch.full_like(weight, torch.nan),
        torch.full_like(weight[:, 0], torch.nan),
        torch.full((case.batch, case.dim, case.width - 1), torch.nan, dtype=case.dtype),
    )
    states = results.initial_states if case.states and case.width > 1 else None
    sums = (results.weight, results.bias) if parameters else (None, None)
    given = (*inputs[:5], grad, grad_final, grad_x, states, *sums)
    return Run(made, dict(zip(launches.BACKWARD, given, strict=False))), results
