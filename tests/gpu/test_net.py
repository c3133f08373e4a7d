"""The problems of the net, one of every class of code that plans choose, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from emulator import net
from emulator.works import Tensors, Work, assert_correct, new_output, placed, tensors_read
from fastconv import jit
from fastconv.jit import launch
from fastconv.kernels.gpus import H200
from gpu.helpers import CUDA, is_hopper

# In roundings, as the tensor cores cut off what does not fit a sum.
LONG_SUMS = {"tf32": 100, "float32": 8, "float64": 4, "float16": 100, "bfloat16": 100}

WORKS = [
    work for work in net.read_works() if is_hopper() or work.gpu.architecture != H200.architecture
]


def _runs_here(work: Work) -> bool:
    most = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    return all(launch.shared_bytes <= most for launch in work.plan.launches)


@pytest.fixture(scope="module")
def _compiled() -> None:
    works = filter(_runs_here, WORKS)
    kernels = dict.fromkeys(launch.kernel for work in works for launch in work.plan.launches)
    jit.build_all(list(kernels), jit.architecture(CUDA))


def _run(work: Work, tensors: Tensors) -> Tensor:
    """The plan as it is, also if it is for another GPU; outputs and workspace hold NaN before."""

    def here(tensor: Tensor) -> Tensor:
        last = not tensor.is_contiguous()
        order = torch.channels_last if last else torch.contiguous_format
        return placed(tensor.to(CUDA), order, work.aligned)

    plan, output = work.plan, here(new_output(work))
    named = {name: here(tensor) for name, tensor in tensors_read(work, tensors).items()}
    named["output"] = output
    named["scratch"] = torch.full((plan.scratch_bytes,), 255, dtype=torch.uint8, device=CUDA)
    if work.bias_grad:
        named["bias_grad"] = output.new_full(work.case.weight[:1], torch.nan)
    prepared = launch.load_launches(plan.launches, CUDA)
    prepared.run(*(named[name].data_ptr() if name in named else 0 for name in prepared.names))
    return output.cpu()


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("work", WORKS, ids=net.line_of)
def test_problem(work: Work) -> None:
    if not _runs_here(work):
        pytest.skip("needs more shared memory than this GPU has")
    tensors = Tensors.random(work)
    mode = next(name for name, kind in net.MODES.items() if kind == (work.dtype, work.precision))
    result = _run(work, tensors)
    assert_correct(work, tensors, result, LONG_SUMS[mode])
    assert _run(work, tensors).equal(result)
