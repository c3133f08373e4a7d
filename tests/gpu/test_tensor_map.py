"""Tensor copies on GPUs that have them, Hopper and later, as in the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tensor_maps
from fastconv import jit
from gpu.helpers import CUDA
from tensor_maps import Case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU with tensor copies: compute capability 9.0",
)

SEEDS = range(20)
NAMES = ("tensor", "coordinates", "boxes")


def _boxes(case: Case) -> Tensor:
    return torch.full(case.boxes_shape, -1, dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("name", tensor_maps.cases(0))
def test_load(name: str) -> None:
    for seed in SEEDS:
        case = tensor_maps.cases(seed)[name]
        prepared = jit.load_launches([case.launch], CUDA, NAMES)
        tensors = [case.memory.to(CUDA), case.coordinates.to(CUDA), _boxes(case)]
        prepared.run(*(tensor.data_ptr() for tensor in tensors))
        assert torch.equal(tensors[2].cpu(), case.loaded()), (seed, case.map)


@pytest.mark.parametrize("name", tensor_maps.stores(0))
def test_store(name: str) -> None:
    for seed in SEEDS:
        case = tensor_maps.stores(seed)[name]
        boxes = torch.randn(case.boxes_shape).view(torch.int32)
        prepared = jit.load_launches([case.storing_launch], CUDA, NAMES)
        tensors = [case.memory.to(CUDA), case.coordinates.to(CUDA), boxes.to(CUDA)]
        prepared.run(*(tensor.data_ptr() for tensor in tensors))
        stored = tensors[0].cpu().view(torch.int16)
        assert torch.equal(stored, case.stored(boxes).view(torch.int16)), (seed, case.map)


def test_every_run_has_its_own_addresses() -> None:
    """Runs that are still queued keep theirs; so do graphs."""
    case = tensor_maps.cases(0)["4d swizzle 128"]
    prepared = jit.load_launches([case.launch], CUDA, NAMES)
    coordinates = case.coordinates.to(CUDA)
    inputs = [(case.memory * factor).to(CUDA) for factor in (1, 2, 4)]
    results = [_boxes(case) for _ in inputs]
    torch.cuda.synchronize()
    torch.cuda._sleep(10**8)
    for tensor, boxes in zip(inputs, results, strict=True):
        prepared.run(tensor.data_ptr(), coordinates.data_ptr(), boxes.data_ptr())
    graph, captured = torch.cuda.CUDAGraph(), _boxes(case)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        prepared.run(inputs[1].data_ptr(), coordinates.data_ptr(), captured.data_ptr())
    prepared.run(inputs[0].data_ptr(), coordinates.data_ptr(), results[0].data_ptr())
    graph.replay()
    for tensor, boxes in zip([*inputs, inputs[1]], [*results, captured], strict=True):
        expected = Case(case.map, tensor.cpu(), case.coordinates).loaded()
        assert expected.any()
        assert torch.equal(boxes.cpu(), expected)


def test_misaligned_tensor_is_refused() -> None:
    case = tensor_maps.cases(0)["2d swizzle 0"]
    prepared = jit.load_launches([case.launch], CUDA, NAMES)
    tensor, coordinates, boxes = case.memory.to(CUDA), case.coordinates.to(CUDA), _boxes(case)
    with pytest.raises(jit.LaunchError, match=r"mapping tensor at address .*INVALID_VALUE"):
        prepared.run(tensor.data_ptr() + 8, coordinates.data_ptr(), boxes.data_ptr())
