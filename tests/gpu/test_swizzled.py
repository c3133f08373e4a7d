"""``wgmma`` of swizzled matrices on Hopper, with the cases that the emulator runs."""

from __future__ import annotations

import pytest
import torch

import box_mmas
from box_mmas import BoxCase
from fastconv import jit
from gpu.helpers import CUDA, is_hopper
from swizzled_mmas import CASES, Case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and not is_hopper(), reason="needs the wgmma of sm_90a"
)


@pytest.mark.parametrize("case", [*CASES, *box_mmas.CASES], ids=str)
def test_wgmma(case: Case | BoxCase) -> None:
    there = {name: tensor.to(CUDA) for name, tensor in case.tensors().items()}
    prepared = jit.load_launches([case.launch], CUDA, there)
    prepared.run(*(tensor.data_ptr() for tensor in there.values()))
    assert torch.equal(there["results"].cpu(), case.expected())
