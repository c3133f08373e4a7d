"""``mma.sync`` on GPUs that have it, with the cases that the emulator runs."""

from __future__ import annotations

import pytest
import torch

from fastconv import jit
from fastconv.bench import limits, mma_rate
from gpu.helpers import CUDA
from small_mmas import CASES, ROUNDS, Case, Rounds

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with these MMAs: compute capability 8.0",
)


@pytest.mark.parametrize("case", [*CASES, *ROUNDS], ids=str)
def test_mma_sync(case: Case | Rounds) -> None:
    tensors = case.tensors()
    there = {name: tensor.to(CUDA) for name, tensor in tensors.items()}
    prepared = jit.load_launches([case.launch], CUDA, there)
    prepared.run(*(tensor.data_ptr() for tensor in there.values()))
    *_, found = there.values()
    assert torch.equal(found.cpu(), case.expected(tensors))


def test_ceilings() -> None:
    found = limits._mma_tflops(CUDA)
    assert found.keys() == mma_rate.KINDS.keys()
    assert found["tf32"] > 1
    assert found["float16"] == pytest.approx(found["bfloat16"], rel=0.2)
    assert found["float16"] == pytest.approx(2 * found["tf32"], rel=0.2)
