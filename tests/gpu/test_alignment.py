"""Each tensor of a pass in turn begins at no multiple of 16 bytes, for every kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fastconv
from emulator import corpus
from emulator.pass_cases import PassCase, Tensors, assert_correct
from emulator.test_alignment import EVERY_LINE, case_of, moved, placements
from fastconv import jit, native
from fastconv.jit import launch
from fastconv.kernels.family import Plan
from fastconv.kernels.gpus import H200
from gpu.helpers import CUDA, is_hopper
from gpu.test_corpus import LONG_SUMS
from workspaces import workspace

WORKS = [
    work
    for work in map(case_of, EVERY_LINE)
    if is_hopper() or work.gpu.architecture != H200.architecture
]
TF32_ROUNDINGS = 2.0**13  # A rounding to TF32 is this many times one to float32.


@pytest.fixture(scope="module")
def _compiled() -> None:
    plans = [plan for work in WORKS for *_, plan in placements(work) if _runs_here(plan)]
    kernels = dict.fromkeys(launch.kernel for plan in plans for launch in plan.launches)
    jit.build_all(list(kernels), jit.architecture(CUDA))


def _runs_here(plan: Plan) -> bool:
    most = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    return all(launch.shared_bytes <= most for launch in plan.launches)


def _here(tensor: Tensor) -> Tensor:
    """A copy on the GPU, as far from an aligned address."""
    there = tensor.to(CUDA)
    return moved(there) if tensor.storage_offset() else there


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("work", WORKS, ids=corpus.line_of)
def test_any_tensor_may_begin_anywhere(work: PassCase) -> None:
    mode = next(name for name, kind in corpus.MODES.items() if kind == (work.dtype, work.precision))
    roundings = LONG_SUMS[mode] * (TF32_ROUNDINGS if mode == "tf32" else 1)
    for name, tensors, plan in placements(work):
        if not _runs_here(plan):
            pytest.skip("needs more shared memory than this GPU has")
        named = {one: _here(tensor) for one, tensor in tensors.items()}
        assert named[name].data_ptr() % 16 == work.dtype.itemsize
        named |= workspace(plan, CUDA)
        prepared = launch.load_launches(plan.launches, CUDA)
        prepared.run(*(named[one].data_ptr() if one in named else 0 for one in prepared.names))
        torch.manual_seed(0)
        given = Tensors.random(work)
        plain = replace(work, precision="ieee")
        assert_correct(plain, given, named["output"].cpu(), roundings)


# --- By both host paths ---------------------------------------------------------------------------

LAYERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "pointwise": ((256, 128, 1, 1), {}),
    "3x3": ((128, 128, 3, 3), {"padding": 1}),
    "depthwise": ((128, 1, 3, 3), {"padding": 1, "groups": 128}),
}


@pytest.mark.parametrize("by_native", [False, True], ids=["Python", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_bias_that_is_part_of_another_tensor(
    layer: str, dtype: torch.dtype, by_native: bool
) -> None:
    """The plan for an aligned bias, which is made first, must not serve a misaligned one."""
    if by_native:
        native.settle()
        if native.conv2d is None:
            pytest.skip(native.describe())
    shape, geometry = LAYERS[layer]
    input = torch.randn(4, 128, 28, 28, device=CUDA, dtype=dtype)
    input = input.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(shape, device=CUDA, dtype=dtype)
    weight = weight.contiguous(memory_format=torch.channels_last)
    flat = torch.randn(shape[0] + 1, device=CUDA, dtype=dtype)
    with mock.patch.object(native, "conv2d", native.conv2d if by_native else None):
        for activation in (None, "relu"):
            options = {**geometry, "activation": activation}
            expected = fastconv.conv2d(input, weight, flat[1:].clone(), **options)
            actual = fastconv.conv2d(input, weight, flat[1:], **options)
            torch.cuda.synchronize()
            assert actual.equal(expected)
