"""PyTorch's machinery around the operators, on a GPU: its own test cases, autograd, compilers."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import unittest
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import fastconv
import oracle
from gpu.helpers import CUDA, FORMATS, all_passes, precompile

HALF = [torch.float16, torch.bfloat16]
FLOATING = [*HALF, torch.float32, torch.float64, torch.complex64]


@pytest.fixture(scope="module")
def opinfo() -> Any:
    """PyTorch's own description of conv2d, with samples and errors."""
    if importlib.util.find_spec("expecttest") is None:
        # PyTorch's test utilities import expecttest, but those used here do not need it.
        sys.modules["expecttest"] = SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == "nn.functional.conv2d")


def _samples(opinfo: Any, dtype: torch.dtype) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    for sample in opinfo.sample_inputs(CUDA, dtype):
        yield (
            [tensor for tensor in (sample.input, *sample.args) if tensor is not None],
            sample.kwargs,
        )


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_opinfo_samples(dtype: torch.dtype, opinfo: Any) -> None:
    samples = list(_samples(opinfo, dtype))
    precompile(
        (lambda tensors=tensors, geometry=geometry: all_passes(tensors, **geometry))
        for tensors, geometry in samples
    )
    for tensors, geometry in samples:
        oracle.assert_matches(tensors, **geometry)


def test_opinfo_errors(opinfo: Any) -> None:
    for error in opinfo.error_inputs(CUDA):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            fastconv.conv2d(sample.input, *sample.args, **sample.kwargs)


GEOMETRIES: list[dict[str, Any]] = [
    {},
    {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2)},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
def test_gradcheck(memory_format: Any, geometry: dict[str, Any]) -> None:
    tensors = [
        torch.randn(shape, dtype=torch.float64, device=CUDA)
        for shape in ((2, 4, 5, 6), (6, 2, 3, 2))
    ]
    leaves = [tensor.to(memory_format=memory_format).requires_grad_() for tensor in tensors]
    bias = torch.randn(6, dtype=torch.float64, device=CUDA, requires_grad=True)

    def function(*tensors: Tensor) -> Tensor:
        return fastconv.conv2d(*tensors, groups=2, **geometry)

    # nondet_tol=0 demands that gradients have the same bits every time.
    assert gradcheck(function, (*leaves, bias), nondet_tol=0, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, (*leaves, bias), nondet_tol=0, fast_mode=True)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("formats", list(product(FORMATS, repeat=3)), ids="-".join)
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_memory_format_is_pytorchs(
    groups: int, formats: tuple[str, str, str], dtype: torch.dtype
) -> None:
    shapes = ((2, 8, 9, 10), (16, 8 // groups, 3, 3), (2, 16, 9, 10))
    *tensors, grad_output = (
        oracle.random(shape, dtype, CUDA).to(memory_format=FORMATS[name])
        for shape, name in zip(shapes, formats, strict=True)
    )
    geometry = {"padding": 1, "groups": groups}
    expected = oracle.with_gradients(F.conv2d, tensors, grad_output, **geometry)
    actual = oracle.with_gradients(fastconv.conv2d, tensors, grad_output, **geometry)
    for name, ours, theirs in zip(("output", "input", "weight"), actual, expected, strict=True):
        assert ours.stride() == theirs.stride(), name


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_module_in_channels_last(dtype: torch.dtype) -> None:
    module = fastconv.Conv2d(8, 16, 3, padding=1).to(CUDA, dtype, memory_format=torch.channels_last)
    input = oracle.random((2, 8, 9, 10), dtype, CUDA)
    output = module(input)
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.sum().backward()
    assert module.weight.grad.stride() == module.weight.stride()


class _Network(nn.Module):
    def __init__(self, convolution: type[nn.Conv2d]) -> None:
        super().__init__()
        self.first = convolution(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = convolution(8, 4, (3, 2), stride=2, groups=4)

    def forward(self, input: Tensor) -> Tensor:
        return self.second(self.norm(self.first(input)).relu())


def _networks(*convolutions: type[nn.Conv2d]) -> Iterator[nn.Module]:
    for convolution in convolutions:
        torch.manual_seed(0)
        yield _Network(convolution).to(CUDA)


def _gradients(network: nn.Module, input: Tensor) -> list[Tensor]:
    parameters = list(network.parameters())
    return list(torch.autograd.grad(network(input).square().mean(), parameters))


def _inductor() -> Any:
    missing = not importlib.util.find_spec("triton") or not any(map(shutil.which, ("cc", "gcc")))
    skip = pytest.mark.skipif(missing, reason="inductor needs triton and a C compiler")
    return pytest.param("inductor", marks=skip)


@pytest.mark.parametrize("backend", ["aot_eager", _inductor()])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_network(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    eager, ours = _networks(nn.Conv2d, fastconv.Conv2d)
    compiled = torch.compile(ours, backend=backend, dynamic=dynamic, fullgraph=True)
    for size in ((2, 12, 11), (3, 9, 16)) if dynamic else ((2, 12, 11),):
        batch, height, width = size
        input = torch.randn(batch, 3, height, width, device=CUDA)
        torch.testing.assert_close(
            _gradients(compiled, input), _gradients(eager, input), rtol=1e-4, atol=1e-5
        )


def test_training_follows_pytorch() -> None:
    def losses(network: nn.Module) -> list[float]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
        input, target = torch.randn(8, 3, 12, 11, device=CUDA), torch.randn(8, 4, 5, 5, device=CUDA)
        history = []
        for _ in range(30):
            loss = F.mse_loss(network(input), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    ours, theirs = map(losses, _networks(fastconv.Conv2d, nn.Conv2d))
    assert theirs[-1] < theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape, device=CUDA) for shape in ((2, 3, 8, 9), (4, 3, 3, 3), (4,))]
    lower = [tensor.to(dtype) for tensor in tensors]
    with torch.autocast("cuda", dtype):
        output = fastconv.conv2d(*tensors)
    assert output.dtype == dtype
    assert output.equal(fastconv.conv2d(*lower))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    with torch.autocast("cuda", dtype):
        output = fastconv.conv2d(*leaves)
    grads = torch.autograd.grad(output.float().square().sum(), leaves)
    assert [grad.dtype for grad in grads] == [torch.float32] * 3


BATCHED: dict[str, tuple[int | None, int | None]] = {
    "input": (0, None), "weight": (None, 0), "both": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize("in_dims", BATCHED.values(), ids=BATCHED)
def test_vmap(in_dims: tuple[int | None, int | None]) -> None:
    def function(input: Tensor, weight: Tensor) -> Tensor:
        return fastconv.conv2d(input, weight, padding=1, groups=2)

    tensors = [
        torch.randn(shape, device=CUDA) if dim is None else torch.randn(5, *shape, device=CUDA)
        for shape, dim in zip(((2, 4, 6, 7), (6, 2, 3, 3)), in_dims, strict=True)
    ]
    moved = [
        t if dim is None else t.movedim(0, dim) for t, dim in zip(tensors, in_dims, strict=True)
    ]
    expected = [
        function(*(t if dim is None else t[i] for t, dim in zip(tensors, in_dims, strict=True)))
        for i in range(5)
    ]
    actual = torch.func.vmap(function, in_dims)(*moved)
    torch.testing.assert_close(actual, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_are_refused(dtype: torch.dtype) -> None:
    tensors = [oracle.random(shape, dtype, CUDA) for shape in ((1, 2, 5, 5), (3, 2, 3, 3))]
    with pytest.raises(NotImplementedError, match=str(dtype)):
        fastconv.conv2d(*tensors)


def test_devices_differ() -> None:
    input, weight = torch.randn(1, 2, 5, 5, device=CUDA), torch.randn(3, 2, 3, 3)
    with pytest.raises(
        RuntimeError, match=r"same device, but Input is on cuda:0 and weight .* cpu"
    ):
        fastconv.conv2d(input, weight)


def test_checkpoint_gives_the_same_bits() -> None:
    leaves = [torch.randn(s, device=CUDA, requires_grad=True) for s in ((2, 3, 8, 9), (4, 3, 3, 3))]
    outputs = fastconv.conv2d(*leaves), checkpoint(fastconv.conv2d, *leaves, use_reentrant=False)
    results = [torch.autograd.grad(output.square().sum(), leaves) for output in outputs]
    for plain, checkpointed in zip(*results, strict=True):
        assert plain.equal(checkpointed)
