"""A dry run leaves no trace: not in weights, nor in whatever a model keeps. A CPU stands in."""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fastconv
from fastconv.network.records import Contents

pytestmark = pytest.mark.usefixtures("loads")

EXAMPLE = torch.randn(2, 3, 10, 10)


def _layer(channels: int = 3) -> fastconv.Conv2d:
    return fastconv.Conv2d(channels, 4, 3)


def _prepare(model: Any, *example: Any) -> None:
    """Once with gradients, once without: it is the same after both."""
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            assert fastconv.prepare(model, *(example or (EXAMPLE,))).passes


def _fakes() -> list[Any]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is FakeTensor]


_of_others: list[Any] = []  # fake tensors that other tests have left, in compilers' caches


@pytest.fixture(autouse=True)
def _fakes_of_others() -> Iterator[None]:
    _of_others[:] = _fakes()
    yield
    _of_others.clear()


def _no_fakes() -> None:
    known = set(map(id, _of_others))
    assert not [one for one in _fakes() if id(one) not in known]


def _entries(model: nn.Module) -> list[tuple[str, Any]]:
    """Of each module, by every name that it has."""
    return [
        (f"{name}.{key}", value)
        for name, module in model.named_modules(remove_duplicate=False)
        for of in (module._parameters, module._buffers)
        for key, value in of.items()
    ]


def _check_entries(model: nn.Module, call: Callable[[], Any]) -> None:
    """All parameters and buffers are the objects that they were, with the data that they had."""
    before = _entries(model)
    data = [None if value is None else value.detach().clone() for _, value in before]
    call()
    for (name, value), (found_name, found), copy in zip(before, _entries(model), data, strict=True):
        assert found_name == name
        assert found is value
        assert copy is None or torch.equal(value, copy)
        assert value is None or value.grad is None
    _no_fakes()


# --- Parameters and buffers -----------------------------------------------------------------------


class Backbone(nn.Module):
    """Its first layer has two names, and so have a BatchNorm, a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(_layer(), nn.BatchNorm2d(4), _layer(4))
        self.layer0 = nn.Sequential(self.backbone[0])
        self.norm = self.backbone[1]
        self.again = nn.Conv2d(4, 4, 3)
        self.again.weight = self.backbone[2].weight
        self.register_buffer("mean", self.norm.running_mean)
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer0(x))
        return self.again(self.backbone[2](x)) + self.mean[:, None, None]


def _scripted() -> nn.Module:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(4, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.register_buffer("latest", torch.zeros(2))
            self.count = 0
            self.sizes = [1]

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.sizes.append(x.size(0))
            x = self.norm(self.layer(x))
            self.latest = x
            return x

    return torch.jit.script(Scripted())


def _recurrent() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.cell = _layer(), nn.LSTM(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(self.layer(x).flatten(0, 2))[0]

    return Recurrent()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "aliased": Backbone,
    "registered twice": lambda: nn.Sequential(*([_layer()] + 2 * [nn.Conv2d(4, 4, 3)])),
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(_layer())),
    "spectral": lambda: nn.Sequential(parametrizations.spectral_norm(_layer())),
    "weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(_layer())),
    "old spectral": lambda: nn.Sequential(nn.utils.spectral_norm(_layer())),
    "scripted": lambda: nn.Sequential(_layer(), _scripted()),
    "traced": lambda: nn.Sequential(
        _layer(), torch.jit.trace(nn.Sequential(nn.BatchNorm2d(4)), torch.ones(2, 4, 8, 8))
    ),
    "recurrent": _recurrent,
    "parameter list": lambda: _OfList(),
}


class _OfList(nn.Module):
    """Has parameters beside its own dictionary of them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 3, 3, 3)) for _ in range(2)])
        self.plain = [*self.weights]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.plain
        return fastconv.conv2d(x, first) + fastconv.conv2d(x, self.weights[1]) * second.sum()


@pytest.mark.filterwarnings("ignore")  # of what is deprecated, and of tracing
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by", ["prepare", "function", "preparing"])
def test_weights_are_what_they_were(name: str, by: str) -> None:
    model = MODELS[name]()

    def call() -> None:
        if by == "prepare":
            _prepare(model)
        elif by == "function":
            _prepare(lambda x: model(x))
        else:
            with fastconv.preparing():
                model(EXAMPLE).sum().backward()

    _check_entries(model, call)
    with torch.no_grad():
        assert type(model(EXAMPLE)) is Tensor


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "of 4 bits": lambda: torch.empty(3, dtype=torch.uint4),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_another_kind(name: str) -> None:
    """Some have no fake form: they stay what they are, and nobody uses them here."""
    model = nn.Sequential(_layer())
    buffer = BUFFERS[name]()
    model.register_buffer("other", buffer)
    _prepare(model)
    assert model.other is buffer
    _no_fakes()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_an_example_without_a_fake_form() -> None:
    example = torch.quantize_per_tensor(EXAMPLE, 0.1, 0, torch.qint8)
    model = _layer()
    with pytest.raises(RuntimeError, match="cannot prepare the model, as it cannot be called with"):
        fastconv.prepare(lambda x: model(x.dequantize()), example)


def test_wrapped_models() -> None:
    """They call what they wrap in ways of their own; ``torch.func`` wraps tensors, too."""
    model = nn.Sequential(_layer())
    _check_entries(model, lambda: _prepare(nn.DataParallel(model)))

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: model(x).sum())(x)

    _check_entries(model, lambda: _prepare(gradient))


def test_tied_parameters_are_tied() -> None:
    """While it is called, too: their gradients are one."""

    class Tied(Backbone):
        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.again.weight, FakeTensor)
            assert isinstance(self.again.weight, nn.Parameter)
            assert self.again.weight is self.backbone[2].weight
            assert self.mean is self.norm.running_mean
            return super().forward(x)

    _prepare(Tied())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_whatever_happens(error: type[BaseException]) -> None:
    class Fails(Backbone):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            if self.fails:
                raise error
            return self.kept

    model = Fails()

    def call() -> None:
        with pytest.raises(RuntimeError if error is ValueError else error):
            fastconv.prepare(model, EXAMPLE)

    _check_entries(model, call)
    assert "kept" not in vars(model)


def test_an_interrupt_while_all_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for after that."""
    interrupts = [KeyboardInterrupt, KeyboardInterrupt]
    put_back = Contents.put_back

    def interrupted(note: Any) -> None:
        if interrupts:
            note._base.clear(note._of)
            raise interrupts.pop()
        put_back(note)

    monkeypatch.setattr(Contents, "put_back", interrupted)
    model = Backbone()

    def call() -> None:
        with pytest.raises(KeyboardInterrupt):
            fastconv.prepare(model, EXAMPLE)

    _check_entries(model, call)
    assert not interrupts


def test_parameters_without_sizes() -> None:
    model = nn.Sequential(_layer(), nn.LazyConv2d(4, 3))
    for of in (model, lambda x: model(x)):
        with pytest.raises(RuntimeError, match=r"no sizes yet \(LazyConv2d.weight\): call it once"):
            fastconv.prepare(of, EXAMPLE)
    assert type(model[1]) is nn.LazyConv2d
    assert model[1].has_uninitialized_params()
    assert model(EXAMPLE).shape == (2, 4, 6, 6)


def test_gradients_and_hooks_of_parameters() -> None:
    model, calls = Backbone(), []
    model(EXAMPLE).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    copies = [grad.clone() for grad in grads if grad is not None]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    fastconv.prepare(model, EXAMPLE)
    assert not calls  # an optimizer in them would have made steps
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(map(torch.equal, copies, (grad for grad in grads if grad is not None)))


def test_tensors_from_outside() -> None:
    """What a function does to them in place, or to what autograd knows of them."""
    weight, memory = torch.randn(4, 3, 3, 3, requires_grad=True), torch.zeros(2, 4, 8, 8)
    moved, kept = torch.ones(3), (weight * 2)
    kept.retain_grad()
    versions = memory.clone(), moved.clone()

    def function(x: Tensor) -> Tensor:
        memory.add_(fastconv.conv2d(x, weight))  # has a gradient from now on
        moved.data = torch.zeros(7)
        moved.requires_grad_()
        return memory * 2 + kept.sum()

    fastconv.prepare(function, EXAMPLE)
    assert not memory.requires_grad
    assert memory.grad_fn is None
    assert not moved.requires_grad
    assert torch.equal(memory, versions[0])
    assert torch.equal(moved, versions[1])
    assert kept.grad is None
    assert weight.grad is None
    _no_fakes()


def test_what_a_graph_has_saved_is_of_use() -> None:
    """To autograd it is as if nobody had written to it, and nobody has."""
    layer, scale = _layer(), torch.ones(())
    weight = torch.ones((), requires_grad=True)
    output = weight * scale
    _prepare(lambda x: layer(x) * scale.add_(1))
    output.backward()
    assert weight.grad == 1


def test_what_does_not_let_itself_be_looked_at() -> None:
    """All else is put back."""

    class Odd:
        __slots__ = ("__dict__", "x")

        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError(name)

        __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    model = Keeps()
    model.cache["odd"] = Odd()
    _check_entries(model, lambda: _prepare(model))


def test_a_graph_that_is_changed_is_an_error() -> None:
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    features = weight * 1
    with pytest.raises(RuntimeError, match=r"\[4, 3, 3, 3\].*changed in place"):
        fastconv.prepare(lambda x: fastconv.conv2d(x, features.mul_(2)), EXAMPLE)


# --- What models keep -----------------------------------------------------------------------------


class Plain:
    """An object of somebody's."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.calls = 0


class Slotted:
    __slots__ = ("latest",)


class Locked(Plain):
    """Which several threads may use."""

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
    """In whatever there is to keep something in."""

    of_class: ClassVar[dict[str, Any]] = {}
    count_of_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = _layer()
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
            self.made = _layer()
        self.keep(x)
        _to_globals(x)
        assert self.made is not None
        x = x * self.first * self.grid * _grid(x.shape[-1]) * _grids(x.shape[-1])["grid"][0]
        return self.hidden[0](self.layer(x) + self.made(x))


def _seen(model: Keeps) -> list[Any]:
    """All of that, as text and objects."""
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
        _prepare(model)
    elif by == "function":
        _prepare(lambda x: model(x).sum())
    else:
        with fastconv.preparing():
            model(EXAMPLE).sum().backward()


@pytest.mark.parametrize("by", ["prepare", "function", "preparing"])
def test_whatever_a_model_keeps(by: str) -> None:
    _grid.cache_clear()
    _grids.cache_clear()
    model = Keeps()
    before = _seen(model)
    _step(model, by)
    assert _seen(model) == before
    _no_fakes()
    assert type(model(EXAMPLE)) is Tensor
    gc.collect()


def test_a_model_that_was_called_before() -> None:
    """It has caches, of tensors with data."""
    model = Keeps().eval()
    try:
        with torch.no_grad():
            model(EXAMPLE)
        before = _seen(model)
        _prepare(model)
        assert _seen(model) == before
        assert type(_grid(10)) is type(_latest) is Tensor
        _no_fakes()
    finally:
        _forget()


def _forget() -> None:
    global _latest
    _latest = None
    _GLOBAL.clear()
    Keeps.of_class.clear()


def test_hooks() -> None:
    """They are somebody's code, which keeps what layers give."""
    model, features, seen = Backbone(), {}, []
    model.layer0.register_forward_hook(lambda m, args, out: features.update(layer=out))
    model.norm.register_forward_pre_hook(lambda m, args: seen.append(args))
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(out))
    try:
        _prepare(model)
    finally:
        handle.remove()
    assert (features, seen) == ({}, [])
    _no_fakes()


def test_arguments_that_are_objects() -> None:
    layer, cache = _layer(), Plain()

    def function(x: Tensor, cache: Plain) -> Tensor:
        cache.found["x"] = layer(x)
        return cache.found["x"]

    _prepare(function, EXAMPLE, cache)
    assert cache.found == {}


def test_parametrizations_that_are_cached() -> None:
    model = nn.Sequential(parametrizations.weight_norm(_layer()))
    with parametrize.cached():
        _prepare(model)
        assert type(model[0].weight) is Tensor
    _no_fakes()


def test_recomputed_layers() -> None:
    model, layer = Backbone(), _layer()
    _prepare(lambda x: checkpoint(model.layer0, x, use_reentrant=False) + layer(x))
    _no_fakes()


def test_random_numbers() -> None:
    layer = _layer()

    def function(x: Tensor) -> Tensor:
        random.random(), numpy.random.rand()
        torch.manual_seed(3)
        return nn.functional.dropout(layer(x + torch.rand(1)))

    def draw() -> list[float]:
        return [random.random(), numpy.random.rand(), torch.rand(1).item()]

    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    _prepare(function)
    assert draw() == expected


def test_what_other_threads_do_meanwhile() -> None:
    """It is theirs: a queue, or what has a lock, is put back only where it holds fake tensors."""

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.log = _layer(), Locked()

        def forward(self, x: Tensor) -> Tensor:
            self.log.calls += 1
            return self.layer(x)

    model = Logs()
    fastconv.prepare(model, EXAMPLE)
    assert model.log.calls == 1


# --- What cannot be put back ----------------------------------------------------------------------


class Hides(nn.Module):
    """Keeps a tensor where nobody looks for it: what a generator has is noted by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_layer(), _layer()])
        self.memory = self._remember()
        next(self.memory)

    def _remember(self) -> Any:
        kept = []
        while True:
            kept.append((yield))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.send(x)
        return self.layers[0](x)


def test_what_cannot_be_undone_is_named() -> None:
    model = Hides()
    with pytest.raises(
        RuntimeError, match=r"have no data, and keeps some of them in model\.memory"
    ):
        fastconv.prepare(model, EXAMPLE)
    assert type(model.layers[0].weight) is nn.Parameter


def test_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of things that lie too far away to be noted."""
    monkeypatch.setattr("fastconv.network.snapshot.LIMIT", 4)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.cache = _layer(), {"other": {}}

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
    assert model.layers[0].cache == {"other": {"key": []}}  # not to be met again
    assert type(model.layers[0].layer.weight) is nn.Parameter
    _no_fakes()


def test_names_of_variables() -> None:
    """Of another file than the model's, by code that nobody sees."""
    model = _layer()
    add = functools.partial(exec, "sys.modules['conftest'].kept = x")
    with pytest.raises(RuntimeError, match=r"keeps some of them in conftest\.kept, where"):
        fastconv.prepare(lambda x: (add({"x": x, "sys": __import__("sys")}), model(x))[1], EXAMPLE)
    _no_fakes()


def test_errors_of_models_that_keep_something() -> None:
    """What has failed is undone as well."""
    seen: list[Tensor] = []
    _grid.cache_clear()

    def function(x: Tensor) -> Tensor:
        seen.append(x * _grid(10))
        return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match="cannot prepare the model, as it cannot be called with"):
        fastconv.prepare(function, EXAMPLE)
    assert not seen
    assert type(_grid(10)) is Tensor
    _no_fakes()


# --- Blocks ---------------------------------------------------------------------------------------


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
    _no_fakes()


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
    _no_fakes()


def test_variables_of_a_block() -> None:
    """They are its own: what it makes, and what it notes that has data or needs none."""
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
    _no_fakes()


def test_a_block_in_a_file() -> None:
    """Whose variables are global ones, and its own all the same."""
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
    _no_fakes()


def test_a_block_keeps_no_variable_alive() -> None:
    big = Plain()
    alive = [__import__("weakref").ref(big)]
    with fastconv.preparing():
        _layer()(EXAMPLE)
    del big
    assert alive[0]() is None


def test_a_block_that_fails() -> None:
    model = Keeps()
    before = _seen(model)
    with pytest.raises(KeyError), fastconv.preparing():
        {}[model(EXAMPLE)]
    assert _seen(model) == before
    assert type(_grid(10)) is Tensor


def test_another_mode() -> None:
    """Somebody's own fake tensors are nothing that was left."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        example = torch.empty(2, 3, 10, 10)
        model = Backbone()
        fastconv.prepare(model, example)
    fastconv.prepare(model, example)
    assert all(isinstance(one, FakeTensor) for one in model.parameters())
    assert all(one.grad is None for one in model.parameters())
