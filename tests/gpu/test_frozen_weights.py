"""``fastconv.frozen_weights`` keeps packed weights until something changes them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fastconv
from fastconv import native
from gpu.helpers import CUDA

# Operands are small integers, and layers so small that sums are exact in every type.
LAYERS = {
    "bfloat16 nhwc": (torch.bfloat16, torch.channels_last, 1),
    "bfloat16 nhwc depthwise": (torch.bfloat16, torch.channels_last, 64),
    "float16 nchw": (torch.float16, torch.contiguous_format, 1),
    "float32 nchw": (torch.float32, torch.contiguous_format, 1),
    "float64 nchw": (torch.float64, torch.contiguous_format, 1),
}
layers = pytest.mark.parametrize("layer", LAYERS)


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    native.make()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(native, "conv2d", native.load())
        yield


def _tensors(layer: str, batch: int = 2) -> tuple[Tensor, Tensor]:
    dtype, memory_format, groups = LAYERS[layer]
    shapes = ((batch, 64, 28, 28), (64, 64 // groups, 3, 3))
    input, weight = (
        torch.randint(-1, 2, shape, device=CUDA).to(dtype).to(memory_format=memory_format)
        for shape in shapes
    )
    return input, weight


def _conv2d(input: Tensor, weight: Tensor) -> Tensor:
    return fastconv.conv2d(input, weight, padding=1, groups=64 // weight.shape[1])


def _expected(input: Tensor, weight: Tensor) -> Tensor:
    groups = 64 // weight.shape[1]
    return F.conv2d(input.double(), weight.double(), padding=1, groups=groups).to(input.dtype)


@layers
def test_changes_that_counters_tell_are_seen(layer: str) -> None:
    input, weight = _tensors(layer)
    with fastconv.frozen_weights():
        for _ in range(3):
            for _ in range(2):
                assert torch.equal(_conv2d(input, weight), _expected(input, weight))
            weight.neg_()
            input.neg_()
            input[0] += 1


@pytest.mark.parametrize("layer", ["bfloat16 nhwc", "bfloat16 nhwc depthwise", "float16 nchw"])
def test_packed_weights_are_kept_within_and_dropped_at_the_end(layer: str) -> None:
    """A change through ``.data`` moves no version counter, and so shows what is kept."""
    input, weight = _tensors(layer)
    before = _expected(input, weight)
    with fastconv.frozen_weights():
        assert torch.equal(_conv2d(input, weight), before)
        weight.data.neg_()
        assert torch.equal(_conv2d(input, weight), before)
        with fastconv.frozen_weights():
            assert torch.equal(_conv2d(input, weight), before)
        assert torch.equal(_conv2d(input, weight), before)
        recorded = _recorded(input, weight)
        assert torch.equal(recorded, -before)
    assert torch.equal(_conv2d(input, weight), -before)
    with fastconv.frozen_weights():
        assert torch.equal(_conv2d(input, weight), -before)


def _recorded(input: Tensor, weight: Tensor) -> Tensor:
    with torch.enable_grad():
        return _conv2d(input, weight.detach().requires_grad_()).detach()


def test_another_tensor_at_the_same_address() -> None:
    input, weight = _tensors("bfloat16 nhwc")
    with fastconv.frozen_weights():
        for _ in range(8):
            other = weight.clone(memory_format=torch.preserve_format)
            other *= torch.randint(-1, 2, (64, 1, 1, 1), device=CUDA, dtype=other.dtype)
            assert torch.equal(_conv2d(input, other), _expected(input, other))
            del other  # The next tensor gets its memory.


def test_memory_goes_with_the_weight_and_with_the_context() -> None:
    input, weight = _tensors("bfloat16 nhwc")
    _conv2d(input, weight)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with fastconv.frozen_weights():
        for _ in range(20):
            _conv2d(input, weight.clone(memory_format=torch.preserve_format))
        assert torch.cuda.memory_allocated() - before < 4 * weight.nbytes
    assert torch.cuda.memory_allocated() <= before


def test_streams() -> None:
    input, weight = _tensors("bfloat16 nhwc", 64)
    expected = _expected(input, weight)
    streams = [torch.cuda.Stream() for _ in range(4)]
    with fastconv.frozen_weights():
        torch.cuda.synchronize()
        torch.cuda._sleep(10**8)
        results = [_conv2d(input, weight)]
        for stream in 2 * streams:  # These do not wait until the first stream has packed.
            with torch.cuda.stream(stream):
                results.append(_conv2d(input, weight))
        torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("warm", [False, True])
def test_graphs_pack_for_themselves(warm: bool) -> None:
    input, weight = _tensors("bfloat16 nhwc")
    graph, run = torch.cuda.CUDAGraph(), _conv2d
    run(input, weight)
    with fastconv.frozen_weights():
        if warm:
            run(input, weight)
        with torch.cuda.graph(graph):
            output = run(input, weight)
    for _ in range(2):
        weight.neg_()
        graph.replay()
        assert torch.equal(output, _expected(input, weight))


def test_inference_tensors() -> None:
    call: Callable[..., Tensor] = torch.inference_mode()(_conv2d)
    with torch.inference_mode():
        input, weight = _tensors("bfloat16 nhwc")
        expected = _expected(input, weight)
    with fastconv.frozen_weights():
        assert all(torch.equal(call(input, weight), expected) for _ in range(2))
