"""A warpgroup's products of swizzled matrices on Hopper, as in the emulator."""

from __future__ import annotations

import pytest
import torch

from fastconv import jit
from gpu.helpers import CUDA, is_hopper
from swizzled_products import CASES, Case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not is_hopper(), reason="needs the products of sm_90a"
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(case: Case) -> None:
    there = {name: tensor.to(CUDA) for name, tensor in case.tensors().items()}
    prepared = jit.load_launches([case.launch], CUDA, there)
    prepared.run(*(tensor.data_ptr() for tensor in there.values()))
    assert torch.equal(there["products"].cpu(), case.expected())
