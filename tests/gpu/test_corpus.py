"""The coverage corpus on a GPU: problems with every coverage class that plans can have."""

from __future__ import annotations

import pytest
import torch

from emulator import corpus
from emulator.pass_cases import PassCase, Tensors, assert_correct
from fastconv import jit
from fastconv.kernels.gpus import H200
from gpu.corpus_cases import LONG_SUMS, run_on_gpu
from gpu.helpers import CUDA, is_hopper

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


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("case", CASES, ids=corpus.line_of)
def test_problem(case: PassCase) -> None:
    if not _runs_here(case):
        pytest.skip("needs more shared memory than this GPU has")
    tensors = Tensors.random(case)
    result = run_on_gpu(case, tensors)
    assert_correct(case, tensors, result, LONG_SUMS[corpus.mode_of(case)])
    assert run_on_gpu(case, tensors).equal(result)
