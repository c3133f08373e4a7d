"""The table of GPUs has published figures; a GPU that it lacks has those of the next older one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastconv.kernels import gpus
from fastconv.kernels.family import Gpu
from fastconv.kernels.gpus import BOARDS, GPUS

# TFLOP/s of float16 with float32 accumulators, of TF32 and of float32 on CUDA cores, from NVIDIA's
# whitepapers. GPUs whose mma.sync is slower than that are missing: sm_90a, sm_100a, sm_103a.
PUBLISHED = {
    "sm_70": (125, 0, 15.7),
    "sm_75": (65, 0, 8.1),
    "sm_80": (312, 156, 19.5),
    "sm_86": (71, 35.6, 35.6),
    "sm_87": (42.6, 21.3, 5.3),
    "sm_89": (165.2, 82.6, 82.6),
    "sm_120a": (209.5, 104.8, 104.8),
}

# KiB of shared memory of an SM, and how many of them the system keeps from a block: the CUDA C++
# Programming Guide's table "Technical Specifications per Compute Capability".
SHARED_KIB = {
    "sm_70": (96, 0), "sm_75": (64, 0), "sm_80": (164, 1), "sm_86": (100, 1), "sm_87": (164, 1),
    "sm_89": (100, 1), "sm_90a": (228, 1), "sm_100a": (228, 1), "sm_103a": (228, 1),
    "sm_120a": (100, 1), "sm_121a": (100, 1),
}  # fmt: skip


def _of(architecture: str) -> Gpu:
    return replace(gpus.H200, architecture=architecture)


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_rates_are_the_published_ones(architecture: str) -> None:
    board, rates = BOARDS[architecture], gpus.rates(GPUS[architecture])
    cycles = board.gpu.sm_count * board.clock_ghz * 1e-3
    found = (rates.mma["float16"], rates.mma["tf32"], rates.float32)
    assert [2 * rate * cycles for rate in found] == pytest.approx(PUBLISHED[architecture], rel=0.01)
    assert rates.memory_bytes * cycles == pytest.approx(board.memory_gb_s * 1e-3)


@pytest.mark.parametrize("architecture", GPUS)
def test_shared_memory_is_the_published_one(architecture: str) -> None:
    """Plans for a GPU with less would be slower or none; a launch with more would fail there."""
    gpu = GPUS[architecture]
    sm_kib, reserved_kib = SHARED_KIB[architecture]
    assert gpu.shared_bytes_per_sm == sm_kib * 1024
    assert gpu.shared_bytes_per_block == (sm_kib - reserved_kib) * 1024


@pytest.mark.parametrize("architecture", GPUS)
def test_rates_of_all_gpus(architecture: str) -> None:
    rates = gpus.rates(GPUS[architecture])
    assert rates.mma.keys() == {"tf32", "float16", "bfloat16"}
    if architecture not in ("sm_70", "sm_75"):
        assert rates.mma["tf32"] * 2 == rates.mma["float16"] == rates.mma["bfloat16"]
    assert rates.float32 >= 64
    assert 64 >= rates.l2_bytes >= 0.8 * rates.memory_bytes


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("sm_90", "sm_90a"),
        ("sm_120", "sm_120a"),
        ("sm_121f", "sm_121a"),
        ("sm_72", "sm_70"),
        ("sm_88", "sm_87"),
        ("sm_101a", "sm_100a"),
        ("sm_110a", "sm_103a"),
        ("sm_130a", "sm_121a"),
        ("sm_61", "sm_70"),
    ],
)
def test_other_gpus_have_the_rates_of_the_next_older(architecture: str, expected: str) -> None:
    assert gpus.rates(_of(architecture)) == BOARDS[expected].rates


def test_the_sm_count_of_a_live_gpu_does_not_matter() -> None:
    assert gpus.rates(replace(gpus.H200, sm_count=7)) == BOARDS["sm_90a"].rates


def test_names_with_and_without_their_suffix() -> None:
    assert gpus.named("sm_90") is gpus.named("sm_90a") is gpus.H200
    assert gpus.named("sm_87") is GPUS["sm_87"]
    known = r"known are sm_70 \(V100\), .*, sm_121a \(GB10\)"
    for unknown in ("sm_88", "sm_80a", "90", "H200", ""):
        with pytest.raises(ValueError, match=f"no GPU '{unknown}': {known}"):
            gpus.named(unknown)
