"""A prepared network compiles nothing in its first steps; others compile gradients ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastconv
from effort import wait_until
from fastconv.backends import cuda
from fastconv.jit import pool
from fastconv.network import lookahead
from fastconv.network.lookahead import compile_gradients  # conftest patches it elsewhere
from fastconv.ops import hooks

pytestmark = pytest.mark.gpu


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            fastconv.Conv2d(3, 32, 7, stride=2, padding=3),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            fastconv.Conv2d(32, 48, 1, bias=False),
            fastconv.Conv2d(48, 48, (3, 5), padding=(1, 2), dilation=(1, 1), groups=48),
            fastconv.Conv2d(48, 64, 3, stride=2, padding=1),
            fastconv.ConvTranspose2d(64, 16, 4, stride=2, padding=1),
            nn.Flatten(2),
            fastconv.Conv1d(16, 16, 5, padding=2),
            fastconv.ConvTranspose1d(16, 8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(-1)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_nothing_is_left_to_compile(
    monkeypatch: pytest.MonkeyPatch, channels_last: bool, half: bool
) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = Network().cuda().to(memory_format=layout)
    example = torch.randn(6, 3, 66, 50, device="cuda").to(memory_format=layout)
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        found = fastconv.prepare(model, example)
    assert torch.cuda.memory_allocated() <= before
    assert {one.name for one in found.passes} == {"forward", "input_grad", "weight_grad"}

    def fails(*_: object) -> None:
        raise AssertionError("compiled after all")

    monkeypatch.setattr(pool, "build_all", fails)
    misses = cuda._ready.cache_info().misses
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        for _ in range(2):
            model(example).sum().backward()
    assert cuda._ready.cache_info().misses == misses


@pytest.mark.parametrize("by", ["prepare", "preparing"])
def test_it_leaves_no_trace(by: str) -> None:
    """A dry run leaves the model as it was, though autograd's threads compute its gradients."""

    class Keeps(Network):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(self.layers[0])  # The layer has two names.
            self.cache: dict[object, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.cache[x.shape] = self.first(x)
            return super().forward(x) + self.cache[x.shape].mean()

    model, scaler = Keeps().cuda(), torch.amp.GradScaler("cuda")
    example = torch.randn(6, 3, 66, 50, device="cuda")
    before = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    copies = [tensor.clone() for _, tensor in before]
    random_numbers = torch.cuda.get_rng_state()
    with torch.autocast("cuda", torch.float16):
        if by == "prepare":
            fastconv.prepare(model, example)
        else:
            with fastconv.preparing():
                scaler.scale(model(example).sum()).backward()
    after = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for (_, tensor), (name, found), copy in zip(before, after, copies, strict=True):
        assert found is tensor, name
        assert torch.equal(tensor, copy), name
        assert tensor.grad is None, name
    assert model.cache == {}
    assert torch.equal(torch.cuda.get_rng_state(), random_numbers)
    with torch.autocast("cuda", torch.float16):
        scaler.scale(model(example).sum()).backward()
    assert all(type(parameter.grad) is Tensor for parameter in model.parameters())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("kind", "pytorchs"),
    [
        (fastconv.Conv2d, nn.functional.conv2d),
        (fastconv.ConvTranspose2d, nn.functional.conv_transpose2d),
    ],
    ids=["plain", "transposed"],
)
def test_backward_finds_its_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, channels_last: bool, kind: Any, pytorchs: Any
) -> None:
    """The gradients' kernels are compiled ahead, during the forward pass or after it."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "cache"))
    for place, name in ((lookahead, "compile_gradients"), (hooks, "layer_prepared")):
        monkeypatch.setattr(place, name, compile_gradients)  # whichever host path serves the call
    ours = kind(37, 59, 3, padding=1).cuda().to(memory_format=layout)
    images = torch.randn(3, 37, 29, 31, device="cuda").to(memory_format=layout).requires_grad_()
    output = ours(images)
    wait_until(lambda: not pool._workers._threads)

    def fails(*_: object) -> None:
        raise AssertionError("compiled after all")

    monkeypatch.setattr(pool, "build", fails)
    monkeypatch.setattr(pool, "cached_cubin", fails)
    monkeypatch.setattr(cuda, "planned", fails)
    grad_output = torch.randn_like(output)
    output.backward(grad_output)
    theirs = pytorchs(images, ours.weight, ours.bias, padding=1)
    expected = torch.autograd.grad(theirs, (images, ours.weight, ours.bias), grad_output)
    for found, other in zip((images.grad, ours.weight.grad, ours.bias.grad), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-3)
