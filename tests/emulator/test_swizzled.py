"""wgmma of swizzled matrices in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import box_mmas
from box_mmas import BoxCase
from fastconv.kernels.family import Launch
from swizzled_mmas import CASES, Case

from . import EmulatorError, precompile, run, run_both_orders
from .faults import Changed

K_MAJOR = Case("Float16", 24)
MN_MAJOR = Case("Float16", 72, left_mn_major=True, right_mn_major=True)

# A case, the change to its kernel, and a pattern of the error message.
FAULTY = {
    "start": (
        K_MAJOR,
        ("swizzled_matrix(tile,", "swizzled_matrix(tile + 128,"),
        "swizzled matrix from byte 128 of shared memory, .* 96 after a multiple of 1024",
    ),
    "last_bytes_of_a_row": (
        K_MAJOR,
        ("kStepBytes = 32", "kStepBytes = 48"),
        "from byte 144 of shared memory, .* 96 after",
    ),
    "start_mn_major": (
        MN_MAJOR,
        ("swizzled_matrix(tile,", "swizzled_matrix(tile + 32,"),
        "rows of 128 bytes from byte 32 of shared memory, with offsets 8192 and 1024",
    ),
    "stride": (
        K_MAJOR,
        ("kLeftBytes, kPieces * kPiece, kPiece)", "kLeftBytes, 0, 512)"),
        "with offsets 0 and 512, not multiples of 1024",
    ),
    "leading": (
        MN_MAJOR,
        ("kLeftBytes, kPieces * kPiece, kPiece)", "kLeftBytes, 64, kPiece)"),
        "rows of 128 bytes from byte 8192 of shared memory, with offsets 64 and 1024",
    ),
    "not_swizzled": (
        MN_MAJOR,
        ("right = swizzled_matrix", "right = matrix"),
        "an MN-major matrix that is not swizzled",
    ),
    "other_swizzle": (
        K_MAJOR,
        ("const Matrix right = ", "const Matrix right = 1ull << 61 | "),
        "does not describe a matrix in shared memory",
    ),
    "outside": (
        K_MAJOR,
        ("kLeftBytes, kPieces * kPiece, kPiece)", "kLeftBytes, 0, 2 * kPiece)"),
        "24 rows from byte 8192 to byte 13312 of shared memory, which has 11272",
    ),
    "outside_mn_major": (
        MN_MAJOR,
        ("kLeftBytes, kPieces * kPiece, kPiece)", "kLeftBytes, 16 * kPiece, kPiece)"),
        "72 rows from byte 8192 to byte 26624 of shared memory, which has 24584",
    ),
    "another_order_in_a_warpgroup": (
        replace(MN_MAJOR, columns=64),
        (
            "    multiply(",
            "    if (thread == 9) wgmma<kColumns>(Config::Kind{}, acc, left, right, true); else"
            "    multiply(",
        ),
        "threads 0 and 9 of a warpgroup executed different wgmma",
    ),
}


def faulty(case: Case, change: tuple[str, str]) -> Launch:
    sound = case.launch.kernel
    return replace(case.launch, kernel=Changed(sound.source, sound.entry, sound.constants, *change))


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    launches = [case.launch for case in (*CASES, *box_mmas.CASES)]
    launches += [faulty(case, change) for case, change, _ in FAULTY.values()]
    precompile(launch.kernel for launch in launches)


@pytest.mark.parametrize("case", [*CASES, *box_mmas.CASES], ids=str)
def test_wgmma(case: Case | BoxCase) -> None:
    tensors = case.tensors()
    run_both_orders([case.launch], tensors)
    assert torch.equal(tensors["results"], case.expected())


@pytest.mark.parametrize("name", FAULTY)
def test_faulty(name: str) -> None:
    case, change, message = FAULTY[name]
    with pytest.raises(EmulatorError, match=message):
        run([faulty(case, change)], case.tensors())
