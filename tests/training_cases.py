"""A small residual network, and its losses in many steps of training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv

STEPS = 200
CLASSES = 5
_BATCHES = 4  # in turn, so that there is something to learn


class Parts(nn.Module):
    """What ``fastconv.ConvBNAct2d`` computes, by PyTorch's layers of the same names."""

    def __init__(self, *args: Any, activation: str | None, **named: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(*args, **named, bias=False)
        self.bn = nn.BatchNorm2d(self.conv.out_channels)
        self.activation = activation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        output = self.bn(self.conv(input))
        output = output if residual is None else output + residual
        return output if self.activation is None else F.silu(output)


# Where a ReLU bends, the smallest rounding can choose the side, and losses jump: they would tell
# nothing about how exact steps are.
_SMOOTH = "silu"


class _Residual(nn.Module):
    def __init__(self, block: Any, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = block(channels, width, 3, stride=stride, padding=1, activation=_SMOOTH)
        self.second = block(width, width, 3, padding=1, activation=_SMOOTH)
        self.shortcut = block(channels, width, 1, stride=stride, activation=None)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(input), self.shortcut(input))
        return output


def network(block: Any, width: int) -> nn.Module:
    """The network, of ``Parts`` or of ``fastconv.ConvBNAct2d``; its weights are always the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        block(3, width, 3, padding=1, activation=_SMOOTH),
        _Residual(block, width, width, 1),
        _Residual(block, width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, CLASSES),
    )


def losses(
    model: nn.Module,
    *,
    batch: int,
    size: int,
    rate: float,
    device: str = "cpu",
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext,
    order: int | None = None,
    memory_format: Any = torch.contiguous_format,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The losses of training a copy of the model on random images.

    Args:
        model: the network.
        batch: how many images a step has.
        size: rows and columns of the images.
        rate: the learning rate.
        device: where it is trained.
        settings: the context of forward passes.
        order: in which order images are in their batch. It changes nothing but roundings.
        memory_format: that of images and weights.
        dtype: their type.
    """
    trained = copy.deepcopy(model).to(device, dtype, memory_format=memory_format).train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=rate, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    shuffle = torch.randperm(batch, generator=torch.Generator().manual_seed(order or 0))
    batches = []
    for _ in range(_BATCHES):
        images = torch.randn(batch, 3, size, size, generator=draw)
        labels = torch.randint(CLASSES, (batch,), generator=draw)
        if order is not None:
            images, labels = images[shuffle], labels[shuffle]
        images = images.to(device, dtype, memory_format=memory_format)
        batches.append((images, labels.to(device)))
    found = []
    for step in range(STEPS):
        images, labels = batches[step % _BATCHES]
        with settings():
            loss = F.cross_entropy(trained(images).to(dtype), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).double().cpu()


def check_follows(
    width: int,
    batch: int,
    size: int,
    rate: float,
    device: str = "cpu",
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext,
    memory_format: Any = torch.contiguous_format,
) -> None:
    """Raises if our losses are further from those of float64 than PyTorch's are.

    PyTorch's are taken with images in several orders: the largest distance counts, twice, as
    roundings decide on it.
    """
    sizes = {"batch": batch, "size": size, "rate": rate, "device": device}
    model = network(Parts, width)
    exact = losses(model, **sizes, dtype=torch.float64)
    assert exact[-1] < exact[0] / 2  # the network learns
    options = {**sizes, "settings": settings, "memory_format": memory_format}
    theirs = max(_apart(losses(model, **options, order=order), exact) for order in (None, 1))
    ours = _apart(losses(network(fastconv.ConvBNAct2d, width), **options), exact)
    assert ours <= 2 * theirs, f"our losses are {ours} from those of float64, PyTorch's {theirs}"


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
