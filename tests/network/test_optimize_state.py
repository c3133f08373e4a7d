"""``optimize`` changes the chosen layers of a model and nothing else; ``restore`` undoes that."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastconv
from fastconv.jit import cache
from fastconv.network.calls import Times
from network.helpers import (
    EXAMPLE,
    NAMES,
    Clock,
    Followed,
    ResNet,
    ours,
    report,
    times,
)

pytestmark = pytest.mark.usefixtures("clock")


def test_in_place(model: ResNet) -> None:
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    ran = []
    model.stem.register_forward_hook(lambda *_: ran.append("forward"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.eval()(EXAMPLE)
    model.train()
    assert fastconv.optimize(model, EXAMPLE, inplace=True) is model
    assert ours(model) == NAMES
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert all(modules[name] is module for name, module in model.named_modules())
    assert model.state_dict().keys() == state.keys()
    ran.clear()
    torch.testing.assert_close(model.eval()(EXAMPLE), expected)
    assert ran == ["forward"]


def test_nothing_else_changes(model: ResNet) -> None:
    """Buffers, gradients, random numbers and the example stay."""
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    state = copy.deepcopy(model.state_dict())
    example = EXAMPLE.clone()
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    fastconv.optimize(model, example, inplace=True)
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
    assert example.equal(EXAMPLE)
    for name, value in model.state_dict().items():
        assert value.equal(state[name]), name
    assert model.stem.weight.grad.equal(torch.ones_like(model.stem.weight))
    assert all(p.grad is None for p in model.parameters() if p is not model.stem.weight)
    assert not model.stem._forward_pre_hooks


def test_an_error_leaves_the_model_as_it_was(model: ResNet, clock: Clock) -> None:
    def fails(*_: Any) -> Times:
        raise RuntimeError("out of order")

    clock.model = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of order"):
        fastconv.optimize(model, EXAMPLE, inplace=True)
    assert ours(model) == []


class Remembers(nn.Module):
    """Changes attributes that are neither parameters nor buffers in every call."""

    class Meter:
        count = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)
        self.calls, self.history, self.by_size = 0, [], {}
        self.average, self.meter = torch.zeros(3), self.Meter()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.meter.count += 1
        self.history.append(x.shape)
        self.by_size[x.shape, self.calls] = x
        self.average.lerp_(x.detach().mean((0, 2, 3)), 0.1)
        self.mean = self.mean * 0.9
        self.layer.bias.data.add_(1)
        self.last = np.random.rand() + random.random()
        return self.layer(x) if x.sum().item() < 1e9 else x  # .item() makes a dry run fail

    def state(self) -> list[Any]:
        return [
            self.calls, self.meter.count, [*self.history], [*self.by_size], self.average.tolist(),
            self.mean.tolist(), self.layer.bias.tolist(), hasattr(self, "last"),
            float(np.random.get_state()[1].sum()), random.getstate(),
        ]  # fmt: skip


@pytest.mark.parametrize("inplace", [True, False])
def test_python_state_of_a_model_is_as_it_was(inplace: bool, clock: Clock) -> None:
    model = Remembers()
    model.forward(EXAMPLE)
    before = model.state()
    optimized = fastconv.optimize(model, EXAMPLE, inplace=inplace)
    assert clock.models == 1
    assert ours(optimized) == ["layer"]
    assert model.state() == optimized.state() == before

    def fails(*_: Any) -> Times:
        model(EXAMPLE)
        raise RuntimeError("out of order")

    clock.model = fails  # type: ignore[method-assign]
    fastconv.restore(model)
    cache.remove(cache.entries())
    with pytest.raises(RuntimeError, match="out of order"):
        fastconv.optimize(model, EXAMPLE, inplace=True)
    assert model.state() == before
    assert ours(model) == []


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.jit.trace(nn.BatchNorm2d(3), EXAMPLE),
        lambda: torch.jit.script(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8),
        lambda: torch.zeros(1).expand(4),
        lambda: torch.full((3,), float("nan")),
    ],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_odd_modules_and_buffers(odd: Callable[[], Any], training: bool) -> None:
    class Odd(Followed):
        def __init__(self) -> None:
            super().__init__(torch.relu, norm=True)
            self.called = nn.Identity()
            if isinstance(found := odd(), nn.Module):
                self.called = found
            else:
                self.register_buffer("odd", found)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.called(x))

    model = Odd().train(training)
    state = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    compressed = any(one.layout is torch.sparse_csr for one in model.buffers())
    inplace = training or compressed  # PyTorch cannot copy compressed tensors
    with torch.set_grad_enabled(training):
        optimized = fastconv.optimize(model, EXAMPLE, inplace=inplace)
    assert ours(optimized) == ["layer"]
    assert "fastconv_optimization" in vars(optimized)
    for name, value in state.items():
        now = model.state_dict()[name]
        assert torch.equal(*(
            torch.nan_to_num(one.dequantize() if one.is_quantized else one.to_dense(), 7.0)
            for one in (now, value)
        ))  # fmt: skip


def test_restore(model: ResNet) -> None:
    model.own = fastconv.Conv2d(3, 3, 1)
    fastconv.optimize(model, EXAMPLE, inplace=True)
    twin = pickle.loads(pickle.dumps(model))
    for one in (model, copy.deepcopy(model), twin):
        assert ours(one) == [*NAMES, "own"]
        assert fastconv.restore(one) is one
        assert ours(one) == ["own"]
        assert not hasattr(one, "fastconv_optimization")
        assert all("_fastconv" not in key for m in one.modules() for key in vars(m))
    assert fastconv.restore(model) is model


@pytest.mark.usefixtures("_inference")
def test_restore_of_a_model_with_folded_layers_alone(model: ResNet, clock: Clock) -> None:
    """All layers are PyTorch's, and a copy of the graph has no report."""
    clock.gains = lambda call: times(1, 2)
    optimized = fastconv.optimize(model.eval(), EXAMPLE)
    assert report(optimized).folded == 7
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized)),
                nn.Sequential(copy.deepcopy(optimized))):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"cannot take a fused model apart: .* part of .*layers\.0"
        ):
            fastconv.restore(one)
    assert fastconv.restore(model) is model


def test_a_second_time_changes_nothing(model: ResNet, clock: Clock) -> None:
    clock.gains = lambda call: times(2, 1) if call.weight.shape[1] == 8 else times(1, 2)
    first = fastconv.optimize(model, EXAMPLE)
    asked, found = len(clock.seen), report(first)
    clock.gains = lambda call: times(1, 2)
    assert fastconv.optimize(first, EXAMPLE, inplace=True) is first
    assert report(first) is found
    again = fastconv.optimize(first, EXAMPLE)
    assert ours(again) == ours(first)
    assert (len(clock.seen), clock.models) == (asked, 1)
    # It changes nothing as a part of another model, either.
    whole = fastconv.optimize(nn.Sequential(first, nn.ReLU()), EXAMPLE)
    assert ours(whole) == [f"0.{name}" for name in ours(first)]


def test_a_model_that_keeps_tensors_without_data_is_an_error() -> None:
    """Whatever is computed with such tensors would have no data, either."""

    class Hides(Followed):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.memory = self._remember()
            next(self.memory)

        def _remember(self) -> Any:
            kept = []
            while True:
                kept.append((yield))

        def forward(self, x: Tensor) -> Tensor:
            self.memory.send(x)
            return super().forward(x)

    model = Hides()
    with pytest.raises(RuntimeError, match=r"no data, and keeps some of them in model\.memory"):
        fastconv.optimize(model, EXAMPLE, inplace=True)
    assert ours(model) == []


def test_layers_that_are_left(clock: Clock) -> None:
    class Own(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    replaced = nn.Conv2d(3, 3, 1)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleDict({
        "plain": nn.Conv2d(3, 3, 1),
        "subclass": Own(3, 3, 1),
        "parametrized": nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1)),
        "hooked": nn.utils.spectral_norm(nn.Conv2d(3, 3, 1)),
        "ours": fastconv.Conv2d(3, 3, 1),
        "replaced": replaced,
    })  # fmt: skip
    unused = nn.Conv2d(3, 3, 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.unused = model, unused

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x

    whole = Model()
    kinds = {name: type(one) for name, one in whole.named_modules()}
    found = report(fastconv.optimize(whole, EXAMPLE, inplace=True))
    assert found.exchanged == ("layers.plain",)
    assert found.left == {
        "layers.subclass": "of another class, Own",
        "layers.parametrized": "of another class, ParametrizedConv2d",
        "layers.hooked": "with a weight that is computed",
        "layers.ours": "fastconv's already",
        "layers.replaced": "with a forward of their own",
        "unused": "not called with this example",
    }
    for name, module in whole.named_modules():
        assert (type(module) is kinds[name]) == (name != "layers.plain")
    assert "left as they are, of another class, Own: layers.subclass" in str(found)


def test_a_model_that_needs_data(clock: Clock) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() < 1e9 else x

    for context in (torch.enable_grad, torch.no_grad):
        with context():
            optimized = fastconv.optimize(Looks().eval(), EXAMPLE)
        assert ours(optimized) == ["layer"]
        assert "the model was called with data to find its layers, as it cannot be" in str(
            report(optimized)
        )
    assert "not fused: torch.fx cannot trace the model: " in str(report(optimized))
