"""Warps' products of small matrices on GPUs that have them, as in the emulator."""

from __future__ import annotations

import pytest
import torch

from fastconv import jit
from gpu.helpers import CUDA
from small_products import CASES, Case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with these products: compute capability 8.0",
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case) -> None:
    tensors = case.tensors()
    there = {name: tensor.to(CUDA) for name, tensor in tensors.items()}
    prepared = jit.prepare([case.launch], CUDA, there)
    prepared.run(*(tensor.data_ptr() for tensor in there.values()))
    assert torch.equal(there["sums"].cpu(), case.expected(tensors))
