"""mma.sync of small matrices in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from small_mmas import CASES, Case, Rounds

from . import EmulatorError, precompile, run, run_both_orders
from .faults import Changed

ROUNDS = Rounds("float16")  # other types differ only in their MMA instruction


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    precompile([case.launch.kernel for case in (*CASES, ROUNDS)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mma(case: Case) -> None:
    tensors = case.tensors()
    run_both_orders([case.launch], tensors)
    assert torch.equal(tensors["sums"], case.expected(tensors))


def test_rounds() -> None:
    tensors = ROUNDS.tensors()
    run_both_orders([ROUNDS.launch], tensors)
    assert torch.equal(tensors["totals"], ROUNDS.expected(tensors))


FAULTY = {
    "misaligned": ("lane_row(tile, lane)", "lane_row(tile + 8, lane)", "not a multiple of 16"),
    "outside": ("lane_row(tile, lane)", "tile + (1 << 16)", "a row of 16 bytes at byte 65536"),
    "before": ("lane_row(tile, lane)", "tile - 16", "a row of 16 bytes at byte -16"),
    "some lanes": ("  mma(Config", "  if (lane < 16) mma(Config", "mma"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_faulty(name: str) -> None:
    old, new, message = FAULTY[name]
    case = Case("Float16", 0, False, warps=1)
    launch, tensors = case.launch, case.tensors()
    kernel = Changed(launch.kernel.source, launch.kernel.entry, launch.kernel.constants, old, new)
    with pytest.raises(EmulatorError, match=message):
        run([replace(launch, kernel=kernel)], tensors)
