"""Graphs and fused layers that compute something else are found before they are used."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from fastconv.fused import FusedConv2d
from fastconv.network import fusion
from network.helpers import (
    EXAMPLE,
    Followed,
    ResNet,
    activations,
    not_fused,
    ours,
    report,
)

pytestmark = pytest.mark.usefixtures("clock")


def test_a_graph_with_a_random_constant_is_found() -> None:
    """torch.fx records values that are no tensors as constants."""

    class Random(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * random.uniform(1, 10)

    with torch.no_grad():
        optimized = fastconv.optimize(Random(torch.relu).eval(), EXAMPLE)
    assert "off those of the model" in str(report(optimized))
    assert type(optimized) is Random
    assert ours(optimized) == ["layer"]


class Alias(Followed):
    """torch.fx records ``y *= 1.0001`` as ``y = y * 1.0001``."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        y = x
        y *= 1.0001
        return super().forward(x)


class Calls(Followed):
    """torch.fx records ``forward`` alone."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 1.0001


class CallsWithin(Followed):
    """torch.fx records the call of the layer, and what its ``__call__`` adds, twice."""

    class Layer(nn.Conv2d):
        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x) * 1.0001

    def __init__(self, follower: Callable[..., Tensor]) -> None:
        super().__init__(follower)
        self.first = self.Layer(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


@pytest.mark.parametrize("kind", [Alias, Calls, CallsWithin])
def test_a_wrong_graph_is_found(kind: type[Followed]) -> None:
    assert "off those of the model" in not_fused(kind(torch.relu), EXAMPLE)


class Says(Followed):
    """Returns its result and another value, which torch.fx records as a constant."""

    def __init__(self, says: Callable[[int], Any]) -> None:
        super().__init__(torch.relu)
        self.says, self.calls = says, 0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.says(random.randrange(1 << 40))


@pytest.mark.parametrize(
    "says",
    [
        lambda number: torch.tensor(number),
        lambda number: torch.tensor(number % 2 == 0).expand(40).clone() ^ (torch.arange(40) > 9),
        lambda number: torch.tensor([1, number]) * 1j,
        lambda number: torch.where(torch.arange(4) == number % 4, float("nan"), torch.ones(4)),
        lambda number: torch.where(torch.arange(4) == number % 4, float("inf"), torch.ones(4)),
        lambda number: number,
        lambda number: {f"{number}": 1},
    ],
)
def test_everything_in_results_is_compared(says: Callable[[int], Any]) -> None:
    random.seed(5)
    model = Says(says).eval()
    with torch.no_grad():
        optimized = fastconv.optimize(model, EXAMPLE)
    assert not report(optimized).fused
    assert "not fused: its graph" in str(report(optimized))


def test_nan_and_infinity_do_not_prevent_fusion() -> None:
    example = EXAMPLE.clone()
    example[0, 0, 2, 3], example[1, 1, 5, 5] = float("nan"), float("inf")
    model = Followed(nn.Sigmoid(), norm=True).eval()
    with torch.no_grad():
        assert activations(fastconv.optimize(model, example)) == {"layer": "sigmoid"}


def test_a_model_whose_results_differ_from_call_to_call() -> None:
    class Counts(Followed):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x) * self.count

    model = Counts(torch.relu).eval()
    with torch.no_grad():
        optimized = fastconv.optimize(model, EXAMPLE)
    assert "the model's results differ from call to call" in str(report(optimized))
    assert (model.count, optimized.count) == (0, 0)


def test_random_numbers_that_are_drawn_in_the_graph() -> None:
    """The model and its graph draw the same numbers: these are no constants."""
    model = Followed(lambda out: F.dropout(torch.relu(out), 0.5, training=True)).eval()
    with torch.no_grad():
        optimized = fastconv.optimize(model, EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}


def test_a_random_tensor_in_the_graph_is_found() -> None:
    class Draws(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(10)

    with torch.no_grad():
        optimized = fastconv.optimize(Draws(torch.relu).eval(), EXAMPLE)
    assert "off those of the model" in str(report(optimized))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda out: out * 1.01, "times what rounding can do, as a whole"),
        (lambda out: torch.where(torch.arange(10) == 3, out + 0.1, out), "times what rounding"),
        (lambda out: torch.where(torch.arange(10) == 3, float("nan"), out), "NaN instead of 0"),
        (lambda out: out[..., :9], "instead of"),
    ],
)
def test_a_fused_layer_that_is_wrong_is_found(
    wrong: Callable[[Tensor], Tensor], says: str, model: ResNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = FusedConv2d.forward
    monkeypatch.setattr(
        FusedConv2d,
        "forward",
        lambda self, *args, **named: (wrong if vars(self).get("broken") else nn.Identity())(
            forward(self, *args, **named)
        ),
    )
    fuse = fusion.fuse

    def breaking(*args: Any) -> Any:
        found = fuse(*args)
        found.compared["layers.0.conv2"].layer.broken = True
        return found

    monkeypatch.setattr(fusion, "fuse", breaking)
    reason = not_fused(model, EXAMPLE)
    assert reason.startswith("layers.0.conv2 with BatchNorm, addition, relu gives ")
    assert says in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chaotic_network_is_fused(dtype: torch.dtype) -> None:
    """Its results differ by more than rounding, as the network amplifies differences."""
    layers = []
    for _ in range(12):
        layers += [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), Sharp()]
        nn.init.normal_(layers[-2].weight, 1, 0.1)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *layers).to(dtype).eval()
    example = EXAMPLE.to(dtype)
    with torch.no_grad():
        optimized = fastconv.optimize(model, example)
        expected, found = model(example).double(), optimized(example).double()
    assert report(optimized).fused, report(optimized)
    assert report(optimized).folded == 12
    assert (found - expected).norm() > 1e-3 * expected.norm()


class Sharp(nn.Module):
    """Amplifies differences."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(40 * x)
