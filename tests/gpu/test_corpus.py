"""The coverage corpus on a GPU: problems with every coverage class that plans can have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulator import corpus
from emulator.pass_cases import PassCase, Tensors, assert_correct, new_output, placed, tensors_read
from fastconv import jit
from fastconv.jit import launch
from fastconv.kernels.gpus import H200
from gpu.helpers import CUDA, is_hopper
from workspaces import workspace

# Errors allowed, in roundings of the accumulation type. Tensor cores truncate accumulators.
LONG_SUMS = {"tf32": 100, "float32": 8, "float64": 4, "float16": 100, "bfloat16": 100}

CASES = [
    case
    for case in corpus.read_cases()
    if is_hopper() or case.gpu.architecture != H200.architecture
]


def _runs_here(case: PassCase) -> bool:
    most = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    return all(launch.shared_bytes <= most for launch in case.plan.launches)


@pytest.fixture(scope="module")
def _compiled() -> None:
    cases = filter(_runs_here, CASES)
    kernels = dict.fromkeys(launch.kernel for case in cases for launch in case.plan.launches)
    jit.build_all(list(kernels), jit.architecture(CUDA))


def _run(case: PassCase, tensors: Tensors) -> Tensor:
    """Runs the plan, even one for another GPU; outputs and workspace hold NaN before."""

    def here(tensor: Tensor) -> Tensor:
        last = not tensor.is_contiguous()
        order = torch.channels_last if last else torch.contiguous_format
        return placed(tensor.to(CUDA), order, case.aligned)

    plan, output = case.plan, here(new_output(case))
    named = {name: here(tensor) for name, tensor in tensors_read(case, tensors).items()}
    named["output"] = output
    named |= workspace(plan, CUDA)
    if case.bias_grad:
        named["bias_grad"] = output.new_full(case.conv.weight[:1], torch.nan)
    prepared = launch.load_launches(plan.launches, CUDA)
    prepared.run(*(named[name].data_ptr() if name in named else 0 for name in prepared.names))
    return output.cpu()


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("case", CASES, ids=corpus.line_of)
def test_problem(case: PassCase) -> None:
    if not _runs_here(case):
        pytest.skip("needs more shared memory than this GPU has")
    tensors = Tensors.random(case)
    mode = next(name for name, kind in corpus.MODES.items() if kind == (case.dtype, case.precision))
    result = _run(case, tensors)
    assert_correct(case, tensors, result, LONG_SUMS[mode])
    assert _run(case, tensors).equal(result)
