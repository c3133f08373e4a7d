"""Problems of the coverage corpus on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from emulator.pass_cases import (
    PassCase,
    Tensors,
    memory_format,
    new_output,
    placed,
    tensors_read,
)
from fastconv.jit import launch
from gpu.helpers import CUDA
from workspaces import workspace

# Errors allowed, in roundings of the accumulation type. Tensor cores truncate accumulators.
LONG_SUMS = {"tf32": 100, "float32": 8, "float64": 4, "float16": 100, "bfloat16": 100}


def run_on_gpu(case: PassCase, tensors: Tensors) -> Tensor:
    """Runs the plan, even one for another GPU; outputs and workspace hold NaN before."""
    plan, output = case.plan, _here(new_output(case), case.aligned)
    read = tensors_read(case, tensors).items()
    named = {name: _here(tensor, case.aligned) for name, tensor in read}
    named["output"] = output
    named |= workspace(plan, CUDA)
    if case.bias_grad:
        named["bias_grad"] = output.new_full(case.conv.weight[:1], torch.nan)
    prepared = launch.load_launches(plan.launches, CUDA)
    prepared.run(*(named[name].data_ptr() if name in named else 0 for name in prepared.names))
    return output.cpu()


def _here(tensor: Tensor, aligned: bool) -> Tensor:
    """A copy on the GPU in the same memory format."""
    order = memory_format(not tensor.is_contiguous(), tensor.dim())
    return placed(tensor.to(CUDA), order, aligned)
