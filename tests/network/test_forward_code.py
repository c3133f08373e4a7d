"""Models whose code reads or sets what a training graph has constants of."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fastconv
from fastconv.network import training_graph
from fastconv.ops import batchnorm_schema
from network.helpers import norm_calls, report

pytestmark = pytest.mark.usefixtures("clock")

IMAGES = torch.randn(4, 3, 9, 9)


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Hides objects that were there before, through all of which a dry run looks."""
    gc.freeze()
    yield
    gc.unfreeze()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def block(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class Holder(nn.Module):
    """A module without a ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


class OfChild(Base):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.holder.factor


class ByMethodOfChild(OfChild):
    def forward(self, x: Tensor) -> Tensor:
        return self.holder.scaled(self.block(x))


class OfCalledChild(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.block(self.drop(x)), self.drop.p)


class ModeOfChild(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * (2 if self.bn.training else 1)


class Listed(Base):
    """Collections of its own and of its class, read by a property or by a method of its base."""

    SHARED: ClassVar[dict[str, float]] = {"scale": 2.0}

    def __init__(self) -> None:
        super().__init__()
        self._scales = [2.0]

    @property
    def scale(self) -> float:
        return self._scales[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.scale * self.SHARED["scale"]


class Derived(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class ByName(Listed):
    def forward(self, x: Tensor) -> Tensor:
        scales = getattr(self, "_sca" + "les")
        return self.block(x) * scales[0]


class Layers(Base):
    """A list of modules that are called, and none of which is part of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([nn.Conv2d(3, 3, 1)])

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        for one in self.more:
            out = one(out)
        return out


class Options(NamedTuple):
    scale: float


SETTINGS = {"scale": 2.0}


FUNCTIONS = {"relu": torch.relu, "scaled": F.hardtanh}


class OfFile(Base):
    def __init__(self) -> None:
        super().__init__()
        self.options, self.layers = Options(2.0), OrderedDict(conv="conv")

    def forward(self, x: Tensor) -> Tensor:
        out = FUNCTIONS["relu"](self.block(x) * SETTINGS["scale"])
        return out * self.options.scale * len(self.layers)


class Auxiliary(Base):
    """Its module may be there or not; a method that it does not call sets something."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Steps(), None

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(self.before(x))
        return out if self.after is None else self.after(out)


class Steps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def block(self) -> None:
        self.steps = 1


class Optional(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("gain", None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        return out if self.gain is None else out * self.gain


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """A function that sets an attribute, or an element, of a model's."""

    def change(model: Any) -> None:
        *owners, name = path.split(".")
        for one in owners:
            model = getattr(model, one)
        if isinstance(model, (list, dict)):
            model[int(name) if name.isdecimal() else name] = value  # type: ignore[call-overload]
        else:
            setattr(model, name, value)

    return change


CHANGES: dict[str, tuple[type[nn.Module], Callable[[Any], Any]]] = {
    "of a child": (OfChild, _set("holder.factor", 5.0)),
    "by a method of a child": (ByMethodOfChild, _set("holder.factor", 5.0)),
    "of a called child": (OfCalledChild, _set("drop.p", 1.0)),
    "mode of a child": (ModeOfChild, lambda model: model.bn.eval()),
    "by a property": (Listed, _set("_scales.0", 5.0)),
    "in the place of a method": (Derived, _set("_scales.0", 5.0)),
    "by name": (ByName, _set("_scales.0", 5.0)),
    "more modules": (Layers, lambda model: model.more.append(nn.Sigmoid())),
    "a module": (Auxiliary, _set("after", nn.Sigmoid())),
    "named tuple": (OfFile, _set("options", Options(5.0))),
    "a parameter": (Optional, _set("gain", nn.Parameter(torch.tensor(5.0)))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_later(name: str) -> None:
    kind, change = CHANGES[name]
    model = kind().train()
    optimized = fastconv.optimize(model, IMAGES)
    assert norm_calls(lambda: optimized(IMAGES))["forward"] == 1
    optimized = pickle.loads(pickle.dumps(optimized))
    model = fastconv.restore(copy.deepcopy(optimized))
    torch.testing.assert_close(optimized(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)
    for one in (optimized, model):
        change(one)
    assert norm_calls(lambda: copy.deepcopy(optimized)(IMAGES))["forward"] == 0
    torch.testing.assert_close(optimized(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of", ["class", "file"])
def test_lists_that_are_not_the_models(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimized: Any = fastconv.optimize({"class": Listed, "file": OfFile}[of]().train(), IMAGES)
    expected = 2.5 * optimized(IMAGES)
    if of == "class":
        monkeypatch.setitem(Listed.SHARED, "scale", 5.0)
    else:
        monkeypatch.setitem(SETTINGS, "scale", 5.0)
    torch.testing.assert_close(optimized(IMAGES), expected)


@pytest.mark.skipif(not training_graph.COMPILED, reason="this PyTorch traces no training graphs")
@pytest.mark.parametrize("name", CHANGES)
def test_compiled_models_compare_the_same(name: str) -> None:
    torch._dynamo.reset()
    kind, change = CHANGES[name]
    optimized: Any = fastconv.optimize(kind().train(), IMAGES)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(optimized, backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(IMAGES), optimized(IMAGES), rtol=1e-4, atol=1e-4)
    change(optimized)
    torch.testing.assert_close(compiled(IMAGES), optimized(IMAGES), rtol=1e-4, atol=1e-4)
    norms = [
        sum(node.target is batchnorm_schema.forward for node in graph.graph.nodes)
        for graph in counter.graphs
    ]
    assert norms == [1, 0]


@pytest.mark.skipif(not training_graph.COMPILED, reason="this PyTorch traces no training graphs")
def test_compiled_models_compare_variables() -> None:
    torch._dynamo.reset()
    optimized: Any = fastconv.optimize(OfFile().train(), IMAGES)
    compiled = torch.compile(optimized, backend="eager", fullgraph=True)
    before = compiled(IMAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "scale", 5.0)
        torch.testing.assert_close(compiled(IMAGES), 2.5 * before)


class Keeps(Base):
    """A loss reads what the ``forward`` keeps."""

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.conv(x)
        return torch.relu(self.bn(self.features))


class KeepsByName(Base):
    def forward(self, x: Tensor) -> Tensor:
        for name in ("features",):
            setattr(self, name, self.conv(x))
        return torch.relu(self.bn(self.features))


class Asks(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * (2 if torch.is_grad_enabled() else 1)


OBJECT = SimpleNamespace(scale=2.0)


class OfObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * OBJECT.scale


class OfOwnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self._options = SimpleNamespace(scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self._options.scale


class OfManyNumbers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = list(range(1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.numbers[2]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Keeps, "its forward sets features"),
        (KeepsByName, "its forward calls setattr"),
        (Asks, "its forward asks for a setting, is_grad_enabled"),
        (OfObject, "its forward reads the variable OBJECT"),
        (OfOwnObject, "its forward reads the attribute _options, which may change"),
        (OfManyNumbers, "its forward reads the attribute numbers, which may change"),
    ],
)
def test_what_cannot_be_compared(kind: type[nn.Module], reason: str) -> None:
    optimized: Any = fastconv.optimize(kind().train(), IMAGES)
    assert f"not fused in the model: {reason}" in report(optimized).notes
    assert norm_calls(lambda: optimized(IMAGES))["forward"] == 0
    if issubclass(kind, (Keeps, KeepsByName)):
        assert optimized.features.shape == IMAGES.shape


class FrozenLater(Base):
    """Its own mode is read, so that of its BatchNorms does not matter."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.block(x), 0.0, training=self.training)


def test_a_norm_may_be_frozen_later() -> None:
    optimized: Any = fastconv.optimize(FrozenLater().train(), IMAGES)
    optimized.bn.eval()
    assert norm_calls(lambda: optimized(IMAGES))["forward"] == 1
