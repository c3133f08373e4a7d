"""A dry run leaves no trace in whatever else a model keeps. A CPU stands in for the GPU."""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fastconv
from network.dry_runs import EXAMPLE, Backbone, check_entries, make_layer, no_fakes, prepare_twice

pytestmark = pytest.mark.usefixtures("loads", "fakes_of_others")


def test_an_object_that_cannot_be_read() -> None:
    """All other objects are put back."""

    class Odd:
        __slots__ = ("__dict__", "x")

        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError(name)

        __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    model = Keeps()
    model.cache["odd"] = Odd()
    check_entries(model, lambda: prepare_twice(model))


class Plain:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.calls = 0


class Slotted:
    __slots__ = ("latest",)


class Locked(Plain):
    """An object that several threads may use."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


_GLOBAL: dict[str, Any] = {}
_latest: Any = None
_calls = 0


@functools.lru_cache(maxsize=4)
def _grid(size: int) -> Tensor:
    return torch.ones(size)


@functools.cache
def _grids(size: int) -> dict[str, tuple[Tensor, int]]:
    return {"grid": (torch.ones(size), size)}


def _to_globals(x: Tensor) -> None:
    global _latest, _calls
    _latest, _calls = x, _calls + 1
    _GLOBAL["x"] = [x]


class Keeps(nn.Module):
    """Keeps tensors in every kind of place that Python has."""

    of_class: ClassVar[dict[str, Any]] = {}
    count_of_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_layer()
        self.calls = 0
        self.cache: dict[Any, Any] = {"old": EXAMPLE}
        self.nested: dict[str, Any] = {"list": [1, (2, {3})], "by": defaultdict(list)}
        self.queue: deque[Any] = deque([1, 2], maxlen=2)
        self.ordered = OrderedDict(a=1, b=2)
        self.objects = SimpleNamespace(plain=Plain(), slotted=Slotted(), locked=Locked())
        self.first: Tensor | None = None
        self.plain_tensor = torch.zeros(3)
        self.register_buffer("grid", None)
        self.hidden = [nn.BatchNorm2d(4)]
        self.made: nn.Module | None = None
        closure: list[Any] = []
        self.keep: Callable[[Any], None] = lambda x: closure.append(x)
        self.kept = closure

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        type(self).count_of_class += 1
        self.of_class[str(self.calls)] = x
        self.cache[x.shape, x.device] = self.cache["old"] = x * 2
        self.nested["list"][1][1].add(x)
        self.nested["list"].append((x,))
        self.nested["by"]["x"].append({"deep": x})
        self.queue.append(x)
        self.ordered.move_to_end("a")
        self.objects.plain.found["x"] = x
        self.objects.plain.calls += 1
        self.objects.slotted.latest = x
        self.objects.locked.found["x"] = x * 1
        self.plain_tensor += x.sum()
        self.plain_tensor = self.plain_tensor * 2
        if self.first is None:
            self.first = self.grid = torch.ones(x.shape[-1])
            self.register_buffer("other", torch.ones(2))
            self.made = make_layer()
        self.keep(x)
        _to_globals(x)
        assert self.made is not None
        x = x * self.first * self.grid * _grid(x.shape[-1]) * _grids(x.shape[-1])["grid"][0]
        return self.hidden[0](self.layer(x) + self.made(x))


def _seen(model: Keeps) -> list[Any]:
    """The state of all these places, as text."""
    tensors = {id(one): one for one in (model.plain_tensor, model.cache["old"])}
    return [
        repr({k: v for k, v in vars(model).items() if k != "keep"}),
        repr((vars(model.objects.plain), vars(model.objects.locked)["found"], model.kept)),
        hasattr(model.objects.slotted, "latest"),
        [*model._modules], [*model._buffers], [*model.ordered],
        [(at, one.clone()) for at, one in tensors.items()].__repr__(),
        repr((Keeps.of_class, Keeps.count_of_class, _GLOBAL, _latest, _calls)),
        repr(model.hidden[0].state_dict()),
    ]  # fmt: skip


def _step(model: Keeps, by: str) -> None:
    if by == "prepare":
        prepare_twice(model)
    elif by == "function":
        prepare_twice(lambda x: model(x).sum())
    else:
        with fastconv.preparing():
            model(EXAMPLE).sum().backward()


@pytest.mark.parametrize("by", ["prepare", "function", "preparing"])
def test_all_that_a_model_keeps(by: str) -> None:
    _grid.cache_clear()
    _grids.cache_clear()
    model = Keeps()
    before = _seen(model)
    _step(model, by)
    assert _seen(model) == before
    no_fakes()
    assert type(model(EXAMPLE)) is Tensor
    gc.collect()


def test_a_model_that_was_called_before() -> None:
    """Its caches hold tensors with data, which stay."""
    model = Keeps().eval()
    try:
        with torch.no_grad():
            model(EXAMPLE)
        before = _seen(model)
        prepare_twice(model)
        assert _seen(model) == before
        assert type(_grid(10)) is type(_latest) is Tensor
        no_fakes()
    finally:
        _forget()


def _forget() -> None:
    global _latest
    _latest = None
    _GLOBAL.clear()
    Keeps.of_class.clear()


def test_hooks() -> None:
    """Hooks may keep the results of layers."""
    model, features, seen = Backbone(), {}, []
    model.layer0.register_forward_hook(lambda m, args, out: features.update(layer=out))
    model.norm.register_forward_pre_hook(lambda m, args: seen.append(args))
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(out))
    try:
        prepare_twice(model)
    finally:
        handle.remove()
    assert (features, seen) == ({}, [])
    no_fakes()


def test_arguments_that_are_objects() -> None:
    layer, cache = make_layer(), Plain()

    def function(x: Tensor, cache: Plain) -> Tensor:
        cache.found["x"] = layer(x)
        return cache.found["x"]

    prepare_twice(function, EXAMPLE, cache)
    assert cache.found == {}


def test_parametrizations_that_are_cached() -> None:
    model = nn.Sequential(parametrizations.weight_norm(make_layer()))
    with parametrize.cached():
        prepare_twice(model)
        assert type(model[0].weight) is Tensor
    no_fakes()


def test_recomputed_layers() -> None:
    model, layer = Backbone(), make_layer()
    prepare_twice(lambda x: checkpoint(model.layer0, x, use_reentrant=False) + layer(x))
    no_fakes()


def test_random_numbers() -> None:
    layer = make_layer()

    def function(x: Tensor) -> Tensor:
        random.random(), numpy.random.rand()
        torch.manual_seed(3)
        return nn.functional.dropout(layer(x + torch.rand(1)))

    def draw() -> list[float]:
        return [random.random(), numpy.random.rand(), torch.rand(1).item()]

    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    prepare_twice(function)
    assert draw() == expected


def test_changes_by_other_threads() -> None:
    """Objects with a lock are put back only where they hold fake tensors."""

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.log = make_layer(), Locked()

        def forward(self, x: Tensor) -> Tensor:
            self.log.calls += 1
            return self.layer(x)

    model = Logs()
    fastconv.prepare(model, EXAMPLE)
    assert model.log.calls == 1


class Hides(nn.Module):
    """Keeps a tensor in a generator, whose variables no snapshot records."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make_layer(), make_layer()])
        self.memory = self._remember()
        next(self.memory)

    def _remember(self) -> Any:
        kept = []
        while True:
            kept.append((yield))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.send(x)
        return self.layers[0](x)


def test_an_error_names_the_holder() -> None:
    model = Hides()
    with pytest.raises(
        RuntimeError, match=r"have no data, and keeps some of them in model\.memory"
    ):
        fastconv.prepare(model, EXAMPLE)
    assert type(model.layers[0].weight) is nn.Parameter


def test_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error has the path of an object beyond the limit of a snapshot."""
    monkeypatch.setattr("fastconv.network.snapshot.LIMIT", 4)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.cache = make_layer(), {"other": {}}

        def forward(self, x: Tensor) -> Tensor:
            self.cache["other"]["key"] = [x]
            return self.layer(x)

    model = nn.Module()
    model.layers = nn.ModuleList([Inner()])  # four modules
    model.forward = model.layers[0].forward  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match=r"in model.layers\[0\].cache\['other'\]\['key'\]\[0\], "
    ):
        fastconv.prepare(model, EXAMPLE)
    assert model.layers[0].cache == {"other": {"key": []}}  # the fake tensor was taken out
    assert type(model.layers[0].layer.weight) is nn.Parameter
    no_fakes()


def test_names_of_variables() -> None:
    """An error names a variable of another file, set by code that no snapshot can see."""
    model = make_layer()
    add = functools.partial(exec, "sys.modules['conftest'].kept = x")
    with pytest.raises(RuntimeError, match=r"keeps some of them in conftest\.kept, where"):
        fastconv.prepare(lambda x: (add({"x": x, "sys": __import__("sys")}), model(x))[1], EXAMPLE)
    no_fakes()


def test_errors_of_models_that_keep_something() -> None:
    """What a call that fails has changed is undone as well."""
    seen: list[Tensor] = []
    _grid.cache_clear()

    def function(x: Tensor) -> Tensor:
        seen.append(x * _grid(10))
        return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match="cannot prepare the model, as it cannot be called with"):
        fastconv.prepare(function, EXAMPLE)
    assert not seen
    assert type(_grid(10)) is Tensor
    no_fakes()


def test_a_gradient_scaler_in_a_block() -> None:
    model = Backbone()
    scaler = torch.amp.GradScaler("cpu")
    before = dict(vars(scaler))
    with fastconv.preparing():
        scaler.scale(model(EXAMPLE).sum()).backward()
    assert vars(scaler) == before
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(EXAMPLE).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    no_fakes()


def test_an_optimizer_in_a_block() -> None:
    model = Backbone()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    weight = model.layer0[0].weight.clone()
    with fastconv.preparing():
        optimizer.zero_grad()
        model(EXAMPLE).sum().backward()
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(model.layer0[0].weight, weight)
    no_fakes()


def test_variables_of_a_block() -> None:
    """Variables that the block sets stay; fake tensors are removed from older objects."""
    model, sizes, losses, old = Backbone(), [], [], {"loss": None}
    with fastconv.preparing():
        result = {"output": model(EXAMPLE)}
        loss = result["output"].sum()
        sizes.append(loss.shape)
        losses.append(loss)
        old["loss"] = loss
    assert sizes == [()]
    assert isinstance(result["output"], FakeTensor)
    assert losses == []
    assert old == {"loss": None}
    del result, loss
    no_fakes()


def test_a_block_in_a_file() -> None:
    """Its variables are global ones, which stay as those of a function do."""
    file = types.ModuleType("test_dry_runs_file")
    lines = """
losses, cache = [], {"old": 1}
with fastconv.preparing() as step:
    result = {"output": model(example)}
    loss = result["output"].sum()
    loss.backward()
    losses.append(loss)
    cache["new"] = (loss,)
"""
    vars(file).update(fastconv=fastconv, model=Backbone(), example=EXAMPLE)
    sys.modules[file.__name__] = file
    try:
        exec(lines, vars(file))
        assert file.step.report.passes
        assert isinstance(file.loss, FakeTensor)
        assert (file.losses, file.cache) == ([], {"old": 1})
    finally:
        del sys.modules[file.__name__]
        vars(file).clear()
    no_fakes()


def test_a_block_keeps_no_variable_alive() -> None:
    big = Plain()
    alive = [__import__("weakref").ref(big)]
    with fastconv.preparing():
        make_layer()(EXAMPLE)
    del big
    assert alive[0]() is None


def test_a_block_that_fails() -> None:
    model = Keeps()
    before = _seen(model)
    with pytest.raises(KeyError), fastconv.preparing():
        {}[model(EXAMPLE)]
    assert _seen(model) == before
    assert type(_grid(10)) is Tensor
