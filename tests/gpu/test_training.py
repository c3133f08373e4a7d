"""Small networks train as they do with PyTorch's layers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastconv
from fastconv.bench import contestants
from gpu.helpers import CUDA, FORMATS
from training_cases import check_follows

STEPS = 50
# How far apart two losses may be. Gradients that are 1e-3 off make a difference of 1e-5, because
# the learning rate is small enough for training not to be chaotic.
TOLERANCES = {"tf32": 2e-3, "ieee": 1e-4}
RATE = 0.01


def _network(convolution: type[nn.Conv2d]) -> nn.Module:
    """Layers with biases, wide enough for the tensor-core kernels."""
    torch.manual_seed(0)
    network = nn.Sequential(
        convolution(16, 32, 3, padding=1),
        nn.ReLU(),
        convolution(32, 64, (3, 5), padding=(2, 4), dilation=2),
        nn.ReLU(),
        convolution(64, 32, 3, stride=2),
        nn.ReLU(),
        convolution(32, 8, 1),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return network.to(CUDA)


def _losses(convolution: type[nn.Conv2d]) -> list[float]:
    network = _network(convolution)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
    torch.manual_seed(1)
    input = torch.randn(8, 16, 62, 61, device=CUDA)
    target = 3 * F.avg_pool2d(input[:, :8], 3, 2)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(network(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", TOLERANCES)
def test_losses_follow_pytorchs(precision: str) -> None:
    with contestants.settings(precision, benchmark=False):
        ours, theirs = _losses(fastconv.Conv2d), _losses(nn.Conv2d)
    assert theirs[-1] < theirs[0] / 2  # The network learns.
    assert ours == pytest.approx(theirs, rel=TOLERANCES[precision])


@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("mode", ["ieee", "tf32", "bfloat16", "float16"])
def test_blocks_follow_pytorchs(mode: str, memory_format: Any) -> None:
    """200 steps of a residual network, whose blocks have BatchNorms."""
    dtype = getattr(torch, mode, None)
    autocast = partial(torch.autocast, "cuda", dtype) if dtype else nullcontext
    with contestants.settings("ieee" if mode == "ieee" else "tf32", benchmark=False):
        check_follows(32, 16, 32, 0.01, str(CUDA), autocast, memory_format)
