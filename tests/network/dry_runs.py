"""Dry runs of models for tests, and whether they leave anything behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import fastconv

EXAMPLE = torch.randn(2, 3, 10, 10)


def make_layer(channels: int = 3) -> fastconv.Conv2d:
    return fastconv.Conv2d(channels, 4, 3)


def prepare_twice(model: Any, *example: Any) -> None:
    """Prepares a model with gradients, and once more without."""
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            assert fastconv.prepare(model, *(example or (EXAMPLE,))).passes


def fakes() -> list[Any]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is FakeTensor]


of_others: list[Any] = []  # fake tensors that other tests have left in compilers' caches


def no_fakes() -> None:
    known = set(map(id, of_others))
    assert not [one for one in fakes() if id(one) not in known]


def entries(model: nn.Module) -> list[tuple[str, Any]]:
    """The parameters and buffers of each module, by every name that the module has."""
    return [
        (f"{name}.{key}", value)
        for name, module in model.named_modules(remove_duplicate=False)
        for of in (module._parameters, module._buffers)
        for key, value in of.items()
    ]


def check_entries(model: nn.Module, call: Callable[[], Any]) -> None:
    """After the call, parameters and buffers are the same objects with the same data."""
    before = entries(model)
    data = [None if value is None else value.detach().clone() for _, value in before]
    call()
    for (name, value), (found_name, found), copy in zip(before, entries(model), data, strict=True):
        assert found_name == name
        assert found is value
        assert copy is None or torch.equal(value, copy)
        assert value is None or value.grad is None
    no_fakes()


class Backbone(nn.Module):
    """A model in which two modules, a parameter and a buffer have two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(make_layer(), nn.BatchNorm2d(4), make_layer(4))
        self.layer0 = nn.Sequential(self.backbone[0])
        self.norm = self.backbone[1]
        self.again = nn.Conv2d(4, 4, 3)
        self.again.weight = self.backbone[2].weight
        self.register_buffer("mean", self.norm.running_mean)
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer0(x))
        return self.again(self.backbone[2](x)) + self.mean[:, None, None]
