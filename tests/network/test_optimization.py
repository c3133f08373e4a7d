"""What ``optimize`` measures, decides and changes. A CPU stands in for the GPU."""

from __future__ import annotations

import copy
import os
import pickle
import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from conftest import Loads
from fastconv import native, timing
from fastconv.jit import cache, compile
from fastconv.modules import FusedConv2d
from fastconv.network import calls, fusion, preparation
from fastconv.network.calls import Call, Times, Trial
from fastconv.network.report import Optimization
from fastconv.timing import Effort

EXAMPLE = torch.randn(2, 3, 10, 10)


def times(theirs: float, ours: float, error: float = 0.0) -> Times:
    return Times(theirs, ours, error * theirs, error * ours)


class Clock(calls.Clock):
    """Says what it is told, and notes what it was asked; both ways have to compute the same."""

    def __init__(self) -> None:
        self.gains: Callable[[Call], Times] = lambda call: times(2.0, 1.0)
        self.whole = times(10.0, 8.0)
        self.wholes: list[Times] = []  # before that
        self.seen: list[Call] = []
        self.models = 0
        self.with_host = True
        self.watch: Callable[[], Any] = lambda: None
        self.watched: list[Any] = []

    def call(self, trial: Trial) -> Times:
        self.seen.append(trial.call)
        half = trial.call.dtype.itemsize == 2
        torch.testing.assert_close(
            trial.ours(), trial.pytorchs(), rtol=1e-4, atol=0.5 if half else 1e-3
        )
        return self.gains(trial.call)

    def model(
        self, runs: Sequence[Any], before: Sequence[Any], device: torch.device, with_host: bool
    ) -> Times:
        self.models += 1
        self.with_host = with_host
        for run, prepare in zip(runs, before, strict=True):
            prepare()
            run()
            self.watched.append(self.watch())
        return self.wholes.pop(0) if self.wholes else self.whole


@pytest.fixture(autouse=True)
def clock(loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in(tmp_path / "cache", monkeypatch.setattr)
    found = Clock()
    monkeypatch.setattr(calls, "clock", found)
    return found


def stand_in(folder: Path, setattr: Callable[[Any, str, Any], None]) -> None:
    """Has the CPU be a GPU, whose times are kept in a folder of its own."""
    setattr(cache, "folder", lambda: folder)
    setattr(compile, "nvrtc_version", lambda: (13, 0))
    setattr(calls, "gpu_name", lambda device: "a GPU")
    setattr(calls, "plans", planned_once)


_plans, _planned = calls.plans, dict[Call, Any]()


def planned_once(call: Call, *rest: Any) -> Any:
    """Planning takes most of the time, and tests have the same calls."""
    if call not in _planned:
        _planned[call] = _plans(call, *rest)
    return _planned[call]


class Block(nn.Module):
    """A residual block: one ReLU used twice, and ``out += identity``."""

    def __init__(self, channels: int, width: int, stride: int = 1, inplace: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1 or channels != width:
            shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A small one, with a Dropout and buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(Block(8, 8), Block(8, 12, 2), Block(12, 12))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(F.silu(self.stem(x)))
        return self.head(self.drop(out.mean((2, 3))))


DISTINCT = 5  # of its layers
NAMES = [name for name, one in ResNet().named_modules() if type(one) is nn.Conv2d]


@pytest.fixture
def model() -> ResNet:
    made = ResNet()
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d):  # as after training
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.normal_(1)
                module.bias.normal_()
    return made


def report(model: nn.Module) -> Optimization:
    found = model.fastconv_optimization
    assert isinstance(found, Optimization)
    return found


def ours(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_modules() if isinstance(one, fastconv.Conv2d)]


# --- Choosing -------------------------------------------------------------------------------------


def test_training(model: ResNet, clock: Clock) -> None:
    optimized = fastconv.optimize(model, EXAMPLE)
    assert ours(optimized) == NAMES
    assert ours(model) == []
    assert type(optimized) is ResNet
    by_weight = {(call.weight.shape, call.input.shape): call.gradients for call in clock.seen}
    assert by_weight[(8, 3, 3, 3), (2, 3, 10, 10)] == ("weight", "bias")  # the example wants none
    assert by_weight[(8, 8, 3, 3), (2, 8, 10, 10)] == ("input", "weight")
    assert len(clock.seen) == len(set(clock.seen)) == DISTINCT
    found = report(optimized)
    assert not found.fused
    assert "not fused" not in str(found).partition("not fused: the model is in training mode")[2]
    same = [row for row in found.layers if row.call.weight.shape == (8, 8, 3, 3)]
    assert [(row.layers, row.calls, row.exchanged) for row in same] == [(2, 2, 2)]


def test_only_what_gains(model: ResNet, clock: Clock) -> None:
    clock.gains = lambda call: times(2, 1) if call.weight.shape[1] == 8 else times(1, 2)
    optimized = fastconv.optimize(model, EXAMPLE)
    for name, module in optimized.named_modules():
        if isinstance(module, nn.Conv2d):
            assert (type(module) is fastconv.Conv2d) == (module.in_channels == 8), name
    text = str(report(optimized))
    assert "takes 2.00 times as long" in text
    assert "2.00x as fast" in text
    assert "all calls: " in text


@pytest.mark.parametrize(
    ("measured", "gains"),
    [
        (times(1, 0.98), True),
        (times(1, 0.995), False),  # less than LEAST_GAIN
        (times(1, 0.9, error=0.02), True),
        (times(1, 0.9, error=0.08), False),  # both errors together are more
        (times(1, 1.1), False),
    ],
)
def test_the_rule(measured: Times, gains: bool, model: ResNet, clock: Clock) -> None:
    assert measured.gains == gains
    clock.gains = lambda call: measured
    assert bool(ours(fastconv.optimize(model, EXAMPLE))) == gains


def test_times_are_medians() -> None:
    found = Times.of([1, 2, 3, 4, 100], [1, 1, 1, 1, 50])
    assert (found.theirs, found.ours) == (3, 1)
    assert found.theirs_error > found.ours_error > 0
    more = Times.of([1, 2, 3, 4, 100] * 9, [1, 1, 1, 1, 50] * 9)
    assert more.theirs_error < found.theirs_error / 2


def test_a_model_that_is_not_faster_as_a_whole(model: ResNet, clock: Clock) -> None:
    clock.whole = times(10, 10.5)
    for inplace in (False, True):
        optimized = fastconv.optimize(model, EXAMPLE, inplace=inplace)
        assert ours(optimized) == []
        assert "the model as a whole is not faster: it was left as it was" in str(report(optimized))
        assert report(optimized).exchanged == ()


@pytest.mark.parametrize("under_way", [True, False])
def test_the_gpu_decides_while_the_native_host_path_is_built(
    under_way: bool, model: ResNet, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes half a minute to be built, and takes less of the host's time than PyTorch does."""
    waited: list[str] = []
    monkeypatch.setattr(native, "under_way", lambda: under_way)
    monkeypatch.setattr(native, "settle", lambda: waited.append("settled"))
    optimized = fastconv.optimize(model, EXAMPLE)
    assert ours(optimized) == NAMES
    assert (clock.with_host, waited) == ((False, []) if under_way else (True, ["settled"]))
    assert ("measured by the GPU's time alone" in str(report(optimized))) == under_way
    assert {"planning", "compiling", "PyTorch's first calls", "measuring layers",
            "measuring the whole model"} <= report(optimized).step_seconds.keys()  # fmt: skip
    # The other measurement is not kept for this one.
    monkeypatch.setattr(native, "under_way", lambda: not under_way)
    fastconv.optimize(model, EXAMPLE)
    assert (clock.models, clock.with_host) == (2, under_way)


def test_a_clear_choice_takes_few_samples() -> None:
    taken: list[int] = []

    def runs(theirs: float, ours: float) -> list[Callable[[], float]]:
        return [lambda: (taken.append(0), theirs)[1], lambda: (taken.append(1), ours)[1]]

    far, near = runs(2.0, 1.0), runs(1.05, 1.0)
    for run, samples in ((far, timing.LEAST_SAMPLES), (far[::-1], timing.LEAST_SAMPLES), (near, 7)):
        taken.clear()
        timing._in_turn(run, calls.CALL_EFFORT, calls.is_clear)
        assert len(taken) == 2 * samples


def test_nothing_to_exchange_is_not_measured_as_a_whole(model: ResNet, clock: Clock) -> None:
    clock.gains = lambda call: times(1, 2)
    found = report(fastconv.optimize(model, EXAMPLE))
    assert (clock.models, found.before_ms) == (0, None)


def test_the_whole_model_runs_both_ways(model: ResNet, clock: Clock) -> None:
    clock.watch = lambda: len(ours(model))
    fastconv.optimize(model, EXAMPLE, inplace=True)
    assert clock.watched == [0, len(NAMES)]


def test_a_layer_that_is_called_with_several_sizes(clock: Clock) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x)[..., ::2]) + self.layer(x)[..., ::2]

    clock.gains = lambda call: times(1, 1.2) if call.input.shape[-1] == 5 else times(1, 0.5)
    optimized = fastconv.optimize(Twice(), EXAMPLE)
    assert ours(optimized) == ["layer"]  # by the sum of its calls
    rows = report(optimized).layers
    # The first call of the layer has a gradient of the weight alone, as has the last.
    assert sorted((row.call.input.shape[-1], row.calls) for row in rows) == [(5, 1), (10, 2)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context: Any, model: ResNet, clock: Clock) -> None:
    with context():
        optimized = fastconv.optimize(model.eval(), EXAMPLE, fuse=False)
        torch.testing.assert_close(optimized(EXAMPLE), model(EXAMPLE))
    assert ours(optimized) == NAMES
    assert all(call.gradients == () for call in clock.seen)
    assert not any(parameter.is_inference() for parameter in optimized.parameters())


def test_frozen_layers(model: ResNet, clock: Clock) -> None:
    model.stem.requires_grad_(False)
    fastconv.optimize(model, EXAMPLE)
    assert {call.gradients for call in clock.seen} == {(), ("weight",), ("input", "weight")}


def test_autocast_precision_and_memory_format(model: ResNet, clock: Clock) -> None:
    model.to(memory_format=torch.channels_last)
    example = EXAMPLE.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16), fastconv.precision("ieee"):
        optimized = fastconv.optimize(model, example)
    assert {call.autocast for call in clock.seen} == {torch.bfloat16}
    assert {call.precision for call in clock.seen} == {"ieee"}
    assert all(Trial(c, model.stem, torch.device("cpu")).input.stride() == c.input.stride
               for c in clock.seen)  # fmt: skip
    assert "bfloat16 nhwc" in str(report(optimized))
    fastconv.optimize(model, example)
    assert len(clock.seen) == 2 * DISTINCT  # other types are measured apart


def test_what_is_made_again_is_random_and_alike() -> None:
    for tensor in (EXAMPLE, EXAMPLE.mT, EXAMPLE[:, :, ::2], EXAMPLE[:1].expand(4, -1, -1, -1)):
        form = calls.Form.of(tensor)
        made = form.random(torch.device("cpu"))
        assert made.shape == tensor.shape
        assert made.std() > 0.5
        assert made.stride() == tensor.stride() or 0 in tensor.stride()


# --- The clock ------------------------------------------------------------------------------------


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UP_MS", 0.0)
    for name in ("CALL_EFFORT", "MODEL_EFFORT"):
        monkeypatch.setattr(calls, name, Effort(repeats=3, seconds=0.0))


@pytest.mark.usefixtures("_hasty")
def test_a_call_is_timed() -> None:
    layer, cpu = nn.Conv2d(3, 4, 3), torch.device("cpu")
    trial = Trial(Call.of(layer, EXAMPLE), layer, cpu)
    found = calls.Clock().call(trial)
    assert min(found.theirs, found.ours) > 0
    assert layer.weight.grad is None
    assert trial.call.gradients == ("weight", "bias")
    assert len(trial.ours()) == len(trial.pytorchs()) == 2  # of gradients


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("with_host", [True, False])
def test_models_take_turns(with_host: bool) -> None:
    did: list[str] = []

    def note(*words: str) -> list[Callable[[], None]]:
        return [lambda word=word: did.append(word) for word in words]

    runs = note("before", "after")
    cpu = torch.device("cpu")
    calls.Clock().model(runs, note("as it was", "changed"), cpu, with_host)
    # A sample that is not the wall clock's is of many calls, of which the first shows.
    did = [word for at, word in enumerate(did) if at == 0 or did[at - 1] != word]
    turn = ["as it was", "before", "changed", "after"]
    ends = timing.LEAST_SAMPLES * len(turn)
    assert did[-ends:] == timing.LEAST_SAMPLES * turn
    assert len(did) == ends + (timing.WARM_UPS if with_host else 1) * len(turn)


# --- What stays -----------------------------------------------------------------------------------


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
    """Not a buffer, a gradient, a random number, nor the example."""
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
    """Changes what is neither a parameter nor a buffer, in every call."""

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
        return self.layer(x) if x.sum().item() < 1e9 else x  # so it is called for real

    def state(self) -> list[Any]:
        return [
            self.calls, self.meter.count, [*self.history], [*self.by_size], self.average.tolist(),
            self.mean.tolist(), self.layer.bias.tolist(), hasattr(self, "last"),
            float(np.random.get_state()[1].sum()), random.getstate(),
        ]  # fmt: skip


@pytest.mark.parametrize("inplace", [True, False])
def test_what_a_model_notes_is_as_it_was(inplace: bool, clock: Clock) -> None:
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
    inplace = training or compressed  # PyTorch cannot copy those
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
def test_restore_of_what_is_only_folded(model: ResNet, clock: Clock) -> None:
    """No layer's class tells, and a copy of the graph has no report."""
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
    # Nor as a part of something else.
    whole = fastconv.optimize(nn.Sequential(first, nn.ReLU()), EXAMPLE)
    assert ours(whole) == [f"0.{name}" for name in ours(first)]


def test_a_model_that_keeps_tensors_without_data_is_an_error() -> None:
    """It has to be told: whatever came of such tensors would have no data, either."""

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
        pass

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


def test_a_model_that_looks_at_data(clock: Clock) -> None:
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


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [(), (3,)])
def test_no_example(example: Any, model: ResNet) -> None:
    with pytest.raises(ValueError, match="takes a model and an example"):
        fastconv.optimize(model, *example)


def test_not_on_a_gpu(model: ResNet, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has to have data: it is on meta"):
        fastconv.optimize(model, EXAMPLE.to("meta"))
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="but the model is on cpu: there is nothing to gain there"):
        fastconv.optimize(model, EXAMPLE)


@pytest.mark.parametrize("inplace", [True, False])
def test_without_a_gpu(inplace: bool, model: ResNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same script runs there."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = model.eval()(EXAMPLE)
    optimized = fastconv.optimize(model, EXAMPLE, inplace=inplace)
    assert (optimized is model) == inplace
    assert type(optimized) is ResNet
    assert ours(optimized) == []
    assert "there is no GPU: nothing was measured, and the model is as it was" in str(
        report(optimized)
    )
    assert optimized(EXAMPLE).equal(expected)
    assert fastconv.restore(optimized) is optimized


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize("fuse", [True, False])
def test_images_without_a_batch(fuse: bool) -> None:
    model = Followed(torch.relu, norm=False).eval()
    optimized = fastconv.optimize(model, EXAMPLE[0], fuse=fuse)
    assert "3x10x10" in str(report(optimized))
    assert "float32 chw" in str(report(optimized))
    assert report(optimized).fused == fuse
    torch.testing.assert_close(optimized(EXAMPLE[0]), model(EXAMPLE[0]))


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not function"):
        fastconv.optimize(lambda x: x, EXAMPLE)  # type: ignore[arg-type]


def test_a_compiled_model(model: ResNet) -> None:
    with pytest.raises(ValueError, match=r"before torch\.compile"):
        fastconv.optimize(torch.compile(model, backend="eager"), EXAMPLE)


def test_a_model_that_cannot_be_copied(model: ResNet) -> None:
    model.odd = model.head.weight * 2
    with pytest.raises(RuntimeError, match=r"cannot copy the model: .* With inplace=True"):
        fastconv.optimize(model, EXAMPLE)


def test_a_lazy_model() -> None:
    with pytest.raises(ValueError, match="has no sizes yet: call the model once before"):
        fastconv.optimize(nn.LazyConv2d(3, 1), EXAMPLE)


def test_no_convolutions(clock: Clock) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(300, 2))
    optimized = fastconv.optimize(model, EXAMPLE, inplace=True)
    assert optimized is model
    assert "the model has no 2-D convolutions: it was left as it was" in str(report(model))


@pytest.mark.parametrize("where", ["plans", "load", "clock"])
def test_a_layer_that_fails(
    where: str, model: ResNet, clock: Clock, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays PyTorch's; the others do not wait for it."""

    def fails(call: Call) -> None:
        if call.weight.shape[1] == 3:
            raise NotImplementedError("no kernel for three\nmore words")

    if where == "clock":
        clock.gains = lambda call: fails(call) or times(2, 1)
    elif where == "plans":
        monkeypatch.setattr(
            calls, "plans", lambda call, *rest: fails(call) or planned_once(call, *rest)
        )
    else:
        load_kernels = preparation.load_kernels

        def compiles(plans: Any, show: Any = None) -> Any:
            if any(need.problem.in_channels == 3 for need in plans):
                raise NotImplementedError("no kernel for three\nmore words")
            return load_kernels(plans, show)

        monkeypatch.setattr(preparation, "load_kernels", compiles)
    optimized = fastconv.optimize(model, EXAMPLE)
    assert ours(optimized) == NAMES[1:]
    (row,) = (row for row in report(optimized).layers if row.times is None)
    assert row.why == "NotImplementedError: no kernel for three"
    assert row.why in str(report(optimized))


def test_progress(model: ResNet, capsys: pytest.CaptureFixture[str]) -> None:
    fastconv.optimize(model, EXAMPLE)
    assert capsys.readouterr().err == ""
    cache.remove(cache.entries())
    fastconv.optimize(model, EXAMPLE, progress=True)
    shown = capsys.readouterr().err
    assert "\rfastconv: measured 5 of 5 layers\n" in shown


# --- Kept choices ---------------------------------------------------------------------------------


def test_times_are_kept(model: ResNet, clock: Clock) -> None:
    clock.gains = lambda call: times(2, 1) if call.weight.shape[1] == 8 else times(1, 2)
    first = fastconv.optimize(model, EXAMPLE)
    assert len(cache.entries()) == DISTINCT + 1
    asked = len(clock.seen)
    again = fastconv.optimize(model, EXAMPLE)
    assert (len(clock.seen), clock.models) == (asked, 1)
    assert ours(again) == ours(first)
    assert report(again).layers == report(first).layers
    assert "0 distinct calls measured, 5 known from earlier" in str(report(again))
    assert "5 distinct calls measured, 0 known from earlier" in str(report(first))


class Behind(nn.Module):
    """A layer, and something behind it whose time no layer's tells."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.layer, self.behind = nn.Conv2d(3, 3, 1), behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.layer(x))


def test_another_model_of_the_same_layers_is_measured(clock: Clock) -> None:
    models = [Behind(nn.ReLU()), Behind(nn.Linear(10, 4)), Behind(nn.Linear(10, 5)),
              nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())]  # fmt: skip
    for number, model in enumerate(models, 1):
        for _ in range(2):  # the second time, it is known
            fastconv.optimize(model, EXAMPLE)
            assert clock.models == number
    assert len(clock.seen) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(calls, "gpu_name", lambda device: "another"),
        lambda patch: patch.setattr(calls, "_sources", lambda: "other sources"),
        lambda patch: patch.setattr(torch, "__version__", "9.9"),
        lambda patch: patch.setattr(torch.backends.cudnn, "version", lambda: 1),
        lambda patch: patch.setattr(calls._precision, "pytorch_setting", lambda: "other"),
        lambda patch: patch.setattr(calls.planner, "current", lambda: "direct"),
    ],
)
def test_other_circumstances_are_measured_anew(
    change: Callable[[pytest.MonkeyPatch], None],
    model: ResNet,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fastconv.optimize(model, EXAMPLE)
    change(monkeypatch)
    monkeypatch.setattr(calls, "plans", lambda *_: {})  # which the switch does not know
    fastconv.optimize(model, EXAMPLE)
    assert (len(clock.seen), clock.models) == (2 * DISTINCT, 2)


def test_what_cudnn_tries_out_is_measured_apart(model: ResNet, clock: Clock) -> None:
    fastconv.optimize(model, EXAMPLE)
    with torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark):
        fastconv.optimize(model, EXAMPLE)
    assert len(clock.seen) == 2 * DISTINCT


def test_damaged_times_are_measured_anew(model: ResNet, clock: Clock) -> None:
    fastconv.optimize(model, EXAMPLE)
    for entry in cache.entries():
        cache.store(cache.TIMES, entry.path.stem, b'["none", 1]', {})
    fastconv.optimize(model, EXAMPLE)
    assert len(clock.seen) == 2 * DISTINCT


# --- Several processes ----------------------------------------------------------------------------


def _process(rank: int, folder: Path, do: Callable[[int, Path], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    try:
        found = do(rank, folder)
    finally:
        dist.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)  # see test_distributed.py


def _in_process(rank: int, folder: Path) -> tuple[list[str], str, int, str]:
    stand_in(folder / f"cache{rank}", setattr)
    monkeypatch = pytest.MonkeyPatch()
    from conftest import loads

    for _ in loads.__wrapped__(monkeypatch):  # the fixture's own
        clock = Clock()
        # Were rank 1 to decide, it would decide otherwise.
        clock.gains = lambda call: times(2, 1) if call.groups == 1 + rank else times(1, 2)
        calls.clock = clock
        model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1, groups=2))
        optimized = fastconv.optimize(model, torch.randn(2, 2, 5, 5))

        def fails(*_: Any) -> Times:
            raise RuntimeError("out of order")

        clock.model = fails  # type: ignore[method-assign]
        try:
            fastconv.optimize(model, torch.randn(3, 2, 5, 5))
            error = ""
        except RuntimeError as caught:
            error = str(caught)
        try:
            fastconv.optimize(nn.SyncBatchNorm.convert_sync_batchnorm(model), EXAMPLE)
        except ValueError as caught:
            error += str(caught)
    return ours(optimized), str(report(optimized)), len(clock.seen), error


class Branches(nn.Module):
    """Layers that depend on the size of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.large = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.large(x).relu() if x.shape[-1] > 5 else x


def _unlike(rank: int, folder: Path) -> list[Any]:
    """Examples of another size in each process; then errors in one of them alone."""
    stand_in(folder / f"cache{rank}", setattr)
    monkeypatch = pytest.MonkeyPatch()
    from conftest import loads

    found: list[Any] = []
    for _ in loads.__wrapped__(monkeypatch):
        calls.clock = Clock()
        size = 5 + 2 * rank
        found.append(ours(fastconv.optimize(Branches(), torch.randn(2, 2, size, size))))
        model = Branches().eval()
        with torch.no_grad():
            optimized = fastconv.optimize(model, torch.randn(2, 2, size, size))
        found += [report(optimized).fused, ours(optimized)]
        models = nn.Conv2d(2, 2, 1), nn.Sequential(nn.Conv2d(2, 2, 1))
        for model, example in (
            (models[rank], torch.randn(1, 2, 5, 5)),
            (models[0], () if rank else torch.randn(1, 2, 5, 5)),
            (models[0], torch.randn(1, 2 + rank, 5, 5)),
        ):
            try:
                fastconv.optimize(model, example)
            except Exception as error:
                found.append(str(error))
    return found


@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")
def test_examples_of_other_sizes_in_each_process(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_process, (tmp_path, _unlike), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    # Rank 0, whose example is the smaller one, has not called the other layer.
    assert first[0] == second[0] == ["first"]
    assert first[1] == second[1]
    assert first[2] == second[2]
    for errors in (first[3:], second[3:]):
        assert len(errors) == 3
        assert "takes the same model in all processes, but they differ" in errors[0]
    assert "failed in rank 1: ValueError: optimize() takes a model and an example" in first[4]
    assert "takes a model and an example" in second[4]
    assert "failed in rank 1" in first[5]
    assert "expected input" in second[5]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")
def test_rank_0_decides(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_process, (tmp_path, _in_process), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert first[0] == second[0] == ["0"]
    assert (first[2], second[2]) == (2 * 2, 0)
    assert first[1].splitlines()[:-1] == second[1].splitlines()[:-1]
    assert first[3].startswith("out of order")
    assert second[3].startswith("optimize() failed in rank 0: RuntimeError: out of order")
    for _, _, _, error in (first, second):
        assert "is a SyncBatchNorm, which waits for others" in error


# --- Fusing ---------------------------------------------------------------------------------------


@pytest.fixture
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def fused(model: nn.Module, *example: Any, **named: Any) -> nn.Module:
    """The model fused, which has to compute the same."""
    model.eval()
    expected = model(*example, **named)
    with torch.no_grad():
        optimized = fastconv.optimize(model, *example, **named)
        torch.testing.assert_close(optimized(*example, **named), expected, rtol=1e-4, atol=1e-4)
    return optimized


def activations(model: nn.Module) -> dict[str, Any]:
    return {n: one.activation for n, one in model.named_modules() if isinstance(one, FusedConv2d)}


def test_a_residual_network(model: ResNet, clock: Clock) -> None:
    expected = model.eval()(EXAMPLE)
    optimized = fused(model, EXAMPLE)
    assert isinstance(optimized, torch.fx.GraphModule)
    assert type(optimized.get_submodule("layers.1.downsample.0")) is fastconv.Conv2d
    assert not any(isinstance(one, nn.BatchNorm2d) for one in optimized.modules())
    assert activations(optimized) == {
        "stem": "silu",
        "layers.0.conv1": "relu",
        "layers.0.conv2": "relu",
        "layers.1.conv1": "relu",
        "layers.1.conv2": "relu",
        "layers.2.conv1": "relu",
        "layers.2.conv2": "relu",
    }
    targets = {str(node.target) for node in optimized.graph.nodes}
    assert not {"layers.0.relu", "<built-in function iadd>"} & targets
    residuals = [call for call in clock.seen if call.residual is not None]
    assert {call.activation for call in residuals} == {"relu"}
    found = report(optimized)
    assert found.fused
    assert found.folded == 7
    assert "BatchNorm, addition, relu" in str(found)
    assert "7 BatchNorms folded into weights" in str(found)
    torch.testing.assert_close(model(EXAMPLE), expected)  # which is as it was
    assert ours(model) == []
    assert not optimized.training
    # Other batches, and again as a copy.
    other = torch.randn(5, 3, 12, 12)
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        torch.testing.assert_close(one(other), model(other), rtol=1e-4, atol=1e-4)
    for one in (optimized, copy.deepcopy(optimized)):
        with pytest.raises(ValueError, match="cannot take a fused model apart"):
            fastconv.restore(one)
    with torch.no_grad():
        again = fastconv.optimize(optimized, EXAMPLE)
    assert report(again) is found
    assert str(again.graph) == str(optimized.graph)


class Segmentation(nn.Module):
    """Results by name, as torchvision's models have them, and of a size that the input has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        features = OrderedDict(low=F.relu(self.norm(self.conv(x))))
        out = F.interpolate(self.head(features["low"]), size=x.shape[-2:])
        return OrderedDict(out=out, low=features["low"])


def test_results_by_name() -> None:
    model = Segmentation().eval()
    optimized = fused(model, EXAMPLE)
    assert report(optimized).fused, report(optimized)
    assert activations(optimized) == {"conv": "relu"}
    other = torch.randn(5, 3, 14, 10)
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        found, expected = one(other), model(other)
        assert type(found) is OrderedDict
        assert [*found] == [*expected]
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4)


def test_layers_that_are_slower_fused(model: ResNet, clock: Clock) -> None:
    """They stay PyTorch's; their BatchNorms are folded all the same."""
    clock.gains = lambda call: times(1, 2) if call.residual else times(2, 1)
    optimized = fused(model, EXAMPLE)
    assert activations(optimized).keys() == {
        "stem", "layers.0.conv1", "layers.1.conv1", "layers.2.conv1"
    }  # fmt: skip
    assert {*ours(optimized)} == {*activations(optimized), "layers.1.downsample.0"}
    assert type(optimized.get_submodule("layers.0.conv2")) is nn.Conv2d
    assert not any(isinstance(one, nn.BatchNorm2d) for one in optimized.modules())


def test_folding_alone_may_gain(model: ResNet, clock: Clock) -> None:
    clock.gains = lambda call: times(1, 2)
    optimized = fused(model, EXAMPLE)
    assert isinstance(optimized, torch.fx.GraphModule)
    assert ours(optimized) == []
    assert (report(optimized).exchanged, report(optimized).folded) == ((), 7)


def test_a_fused_model_that_is_not_faster(model: ResNet, clock: Clock) -> None:
    clock.whole = times(10, 11)
    optimized = fused(model, EXAMPLE)
    assert type(optimized) is ResNet
    assert ours(optimized) == []
    assert not report(optimized).fused


def test_a_model_that_is_faster_unfused(model: ResNet, clock: Clock) -> None:
    clock.wholes = [times(10, 11)]
    optimized = fused(model, EXAMPLE)
    assert type(optimized) is ResNet
    assert len(ours(optimized)) == 8
    found = report(optimized)
    assert (found.fused, found.folded, found.after_ms) == (False, 0, 8.0)
    assert found.notes == ("not fused: fused, the model as a whole is not faster",)


@pytest.mark.parametrize(
    ("follower", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU6(), "relu6"),
        (nn.LeakyReLU(0.2), ("leaky_relu", 0.2)),
        (nn.SiLU(inplace=True), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.Hardswish(), "hardswish"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.Tanh(), "tanh"),
        (F.relu, "relu"),
        (lambda x: F.relu(x, inplace=True), "relu"),
        (torch.relu, "relu"),
        (F.relu6, "relu6"),
        (F.leaky_relu, ("leaky_relu", 0.01)),
        (lambda x: F.leaky_relu(x, 0.3, True), ("leaky_relu", 0.3)),
        (lambda x: F.leaky_relu(x, negative_slope=0.3), ("leaky_relu", 0.3)),
        (F.silu, "silu"),
        (F.gelu, "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (F.hardswish, "hardswish"),
        (torch.sigmoid, "sigmoid"),
        (torch.tanh, "tanh"),
        (lambda x: x.relu(), "relu"),
        (lambda x: x.relu_(), "relu"),
        (lambda x: x.sigmoid(), "sigmoid"),
        (lambda x: x.tanh(), "tanh"),
        (nn.Identity(), None),
        (nn.PReLU(), None),
        (F.softplus, None),
        (lambda x: x.abs(), None),
    ],
)
def test_activations(follower: Callable[[Tensor], Tensor], name: Any) -> None:
    optimized = fused(Followed(follower), EXAMPLE)
    assert activations(optimized) == ({} if name is None else {"layer": name})


class Followed(nn.Module):
    """A layer, and what is done with its result and with its input."""

    def __init__(self, follower: Callable[..., Tensor], norm: bool = False) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect" if norm else "zeros")
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.with_norm, self.follower = norm, follower

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        out = self.norm(out) if self.with_norm else out
        return self.follower(out)


class Added(Followed):
    def forward(self, x: Tensor) -> Tensor:
        return self.follower(self.layer(x), x)


@pytest.mark.parametrize(
    ("follower", "fuses"),
    [
        (lambda out, x: out + x, True),
        (lambda out, x: x + out, True),
        (lambda out, x: torch.add(x, out), True),
        (lambda out, x: out.add(x), True),
        (lambda out, x: out.add_(x), True),
        (lambda out, x: torch.add(out, x, alpha=2), False),
        (lambda out, x: out + x.mean((2, 3), keepdim=True), False),  # of a broadcast shape
        (lambda out, x: out + 1, False),
        (lambda out, x: out + out, False),
        (lambda out, x: out + x.double(), False),
        (lambda out, x: out - x, False),
        (lambda out, x: (x * 2).add_(out), False),  # others may read what is written
        (lambda out, x: out + (x * 2).relu_(), False),  # the layer would move behind a writer
    ],
)
def test_additions(follower: Callable[..., Tensor], fuses: bool, clock: Clock) -> None:
    optimized = fused(Added(follower), EXAMPLE)
    assert (activations(optimized) == {"layer": None}) == fuses
    assert any(call.residual for call in clock.seen) == fuses


def test_two_layers_that_are_added() -> None:
    """One of them takes the addition, with the other's result, which is fused as well."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.first(x) + self.second(x))

    assert activations(fused(Both(), EXAMPLE)) == {"first.0": "relu"}


def test_what_is_read_twice_is_not_fused() -> None:
    optimized = fused(Followed(lambda out: out.relu() + out.sum()), EXAMPLE)
    assert activations(optimized) == {}
    optimized = fused(Followed(lambda out: out.relu() * out, norm=True), EXAMPLE)
    assert activations(optimized) == {}
    assert ours(optimized) == ["layer"]
    assert report(optimized).folded == 1  # the BatchNorm alone


def test_a_norm_in_training_mode_is_not_folded() -> None:
    model = Followed(torch.relu, norm=True).eval()
    model.norm.train()
    before = copy.deepcopy(model.norm.state_dict())
    with torch.no_grad():
        optimized = fastconv.optimize(model, EXAMPLE)
    assert "no convolution is followed by anything that can be fused" in str(report(optimized))
    assert ours(optimized) == ["layer"]
    assert optimized.norm.training
    for name, value in optimized.norm.state_dict().items():
        assert value.equal(before[name])


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_folding(affine: bool, dtype: torch.dtype) -> None:
    model = Followed(torch.relu, norm=True).to(dtype).eval()
    model.norm = nn.BatchNorm2d(3, affine=affine, dtype=dtype).eval()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        optimized = fastconv.optimize(model, EXAMPLE.to(dtype))
        assert activations(optimized) == {"layer": "relu"}
        expected = model(EXAMPLE.to(dtype))
        found = optimized(EXAMPLE.to(dtype))
    assert optimized.layer.weight.dtype == dtype
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]


def test_a_layer_that_is_called_twice_is_not_fused() -> None:
    class Twice(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).relu()).relu()

    optimized = fused(Twice(torch.relu), EXAMPLE)
    assert activations(optimized) == {}
    assert ours(optimized) == ["layer"]


def test_a_layer_whose_weight_is_read_is_not_fused() -> None:
    class Reads(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.layer.weight.sum()

    assert activations(fused(Reads(torch.relu, norm=True), EXAMPLE)) == {}


def test_layers_with_hooks_are_not_fused() -> None:
    ran: list[str] = []
    model = nn.Sequential(
        Followed(torch.relu), Followed(torch.relu, norm=True), Followed(torch.relu)
    )
    model[0].layer.register_forward_hook(lambda *_: ran.append("layer"))
    model[1].norm.register_forward_hook(lambda *_: ran.append("norm"))
    model[2].register_forward_hook(lambda *_: ran.append("container"))
    optimized = fused(model, EXAMPLE)
    assert activations(optimized) == {}
    model[2]._forward_hooks.clear()
    optimized = fused(model, EXAMPLE)
    assert activations(optimized) == {"2.layer": "relu"}
    assert ours(optimized) == ["0.layer", "1.layer", "2.layer"]
    ran.clear()
    optimized(EXAMPLE)
    assert ran == ["layer", "norm"]


def test_what_cannot_be_traced_is_exchanged_unfused() -> None:
    class Branches(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[0] > 0 and bool(x.shape[1] > 2) else x

    optimized = fused(Branches(torch.relu), EXAMPLE)
    assert type(optimized) is Branches
    assert ours(optimized) == ["layer"]
    assert "not fused: torch.fx cannot trace the model: " in str(report(optimized))


def test_arguments_by_name_and_default() -> None:
    class Takes(Followed):
        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
            out = super().forward(x)
            return out * scale if mask is None else out * mask

    for named in ({}, {"scale": 3.0}, {"mask": torch.rand(10, 10)}):
        optimized = fused(Takes(torch.relu), EXAMPLE, **named)
        assert activations(optimized) == {"layer": "relu"}
    optimized = fused(Takes(torch.relu), x=EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}


def test_a_graph_that_computes_something_else_is_not_taken() -> None:
    """torch.fx takes what is no tensor for a constant."""

    class Random(Followed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * random.uniform(1, 10)

    with torch.no_grad():
        optimized = fastconv.optimize(Random(torch.relu).eval(), EXAMPLE)
    assert "off those of the model" in str(report(optimized))
    assert type(optimized) is Random
    assert ours(optimized) == ["layer"]


def test_what_a_model_keeps_is_neither_fake_nor_traced() -> None:
    class Keeps(Followed):
        grid: Tensor | None = None
        seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.grid is None:
                self.grid = torch.ones(10, 10)
            self.seen = x * self.grid
            return super().forward(self.seen)

    model = Keeps(torch.relu)
    optimized = fused(model, EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}
    assert type(model.seen) is Tensor
    with torch.no_grad():
        again = fastconv.optimize(model, EXAMPLE, fuse=False)
    assert type(again.grid) is type(again.seen) is Tensor


class _First(Followed):
    """Compares with what its first call was given."""

    first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.clone()
        return super().forward(x - self.first)


class _Average(Followed):
    """Of all that it was given: of one example that comes again and again, it is that one."""

    def __init__(self, follower: Callable[..., Tensor]) -> None:
        super().__init__(follower)
        self.given: deque[Tensor] = deque(maxlen=1)
        self.given.append(EXAMPLE)

    def forward(self, x: Tensor) -> Tensor:
        mean = (self.given[0] + x) / 2
        self.given.append(x.clone())
        return super().forward(mean)


class _Counts(Followed):
    """Gives something else from its hundredth call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 100 else 2.0)


class _Grows(Followed):
    def __init__(self, follower: Callable[..., Tensor]) -> None:
        super().__init__(follower)
        self.sizes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(x.shape)
        return super().forward(x) * (1.0 if len(self.sizes) < 100 else 2.0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (_First, "called once more, with other numbers, its graph's results are"),
        (_Average, "the model's results differ from call to call"),
        (_Counts, r"each call of the model changes model\.calls"),
        (_Grows, r"each call of the model changes model\.sizes"),
    ],
)
@pytest.mark.parametrize("images", [EXAMPLE, EXAMPLE[:1], torch.zeros_like(EXAMPLE)])
def test_what_depends_on_calls_before_is_not_fused(
    kind: type[Followed], why: str, images: Tensor
) -> None:
    model = kind(torch.relu).eval()
    if isinstance(model, _Average):
        model.given.append(images)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        optimized = fastconv.optimize(model, images)
        assert type(optimized) is kind
        assert re.search(why, str(report(optimized)))
        for one in (images, images * 2 + 1):
            torch.testing.assert_close(optimized(one), twin(one), rtol=1e-4, atol=1e-4)


def test_hooks_of_all_modules_and_forwards_of_one_s_own() -> None:
    """They run for each module, so none may become part of another."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    try:
        assert "global hooks of modules are registered" in not_fused(model, EXAMPLE)
    finally:
        handle.remove()
    forward = model[2].forward
    model[2].forward = lambda x: forward(x)  # type: ignore[method-assign]
    optimized = fused(model, EXAMPLE)
    assert report(optimized).folded == 1
    assert not activations(optimized)


def test_not_fused_where_gradients_are_recorded(model: ResNet) -> None:
    optimized = fastconv.optimize(model.eval(), EXAMPLE)
    assert activations(optimized) == {}
    assert "gradients are recorded; for inference, optimize within torch.no_grad()" in str(
        report(optimized)
    )


def test_not_fused_where_only_a_norm_s_gradients_are_recorded() -> None:
    """Its parameters would be part of weights, and learn nothing."""
    model = Followed(torch.relu, norm=True).eval()
    model.layer.requires_grad_(False)
    optimized = fastconv.optimize(model, EXAMPLE)
    assert report(optimized).folded == 0
    optimized(EXAMPLE).sum().backward()
    assert optimized.norm.weight.grad is not None


@pytest.mark.usefixtures("_inference")
def test_not_fused_where_it_is_not_wanted(model: ResNet) -> None:
    model.eval()
    assert activations(fastconv.optimize(model, EXAMPLE, fuse=False)) == {}
    assert activations(fastconv.optimize(model, EXAMPLE, inplace=True)) == {}
    assert ours(model) == NAMES


def test_fused_in_inference_mode(model: ResNet) -> None:
    model.eval()
    with torch.inference_mode():
        optimized = fastconv.optimize(model, EXAMPLE)
        expected = model(EXAMPLE)
    assert len(activations(optimized)) == 7
    with torch.no_grad():  # outside, too
        torch.testing.assert_close(optimized(EXAMPLE), expected, rtol=1e-4, atol=1e-4)
    assert not any(parameter.is_inference() for parameter in optimized.parameters())


@pytest.mark.usefixtures("_inference")
def test_fused_under_autocast(model: ResNet, clock: Clock) -> None:
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        optimized = fastconv.optimize(model, EXAMPLE)
        found, expected = optimized(EXAMPLE), model(EXAMPLE)
    assert activations(optimized)["layers.0.conv2"] == "relu"
    assert {call.residual.dtype for call in clock.seen if call.residual} == {torch.bfloat16}
    assert found.dtype == expected.dtype
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_no_fake_tensor_stays_in_autocast_s_cache(model: ResNet, clock: Clock) -> None:
    """Of a context that goes on: what is cast there once, PyTorch keeps."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for _ in range(2):  # the second takes times that are known
            assert type(fastconv.optimize(model, EXAMPLE)(EXAMPLE)) is Tensor
            assert type(model(EXAMPLE)) is Tensor


class Within(Followed):
    """A layer, and another behind it that is called in a context."""

    def __init__(self, context: Callable[[], Any], all_of_it: bool = False) -> None:
        super().__init__(torch.relu)
        self.last = nn.Conv2d(3, 3, 1)
        self.context, self.all_of_it = context, all_of_it

    def forward(self, x: Tensor) -> Tensor:
        if self.all_of_it:
            with self.context():
                return self.last(super().forward(x).float()).float()
        x = super().forward(x).float()
        with self.context():
            return self.last(x).float()


@pytest.mark.usefixtures("_inference")
@pytest.mark.parametrize(
    ("context", "name"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
        (lambda: fastconv.precision("ieee"), "fastconv.precision"),
        (torch.enable_grad, "whether gradients are recorded"),
        (torch.inference_mode, "inference mode"),
        (lambda: torch.backends.cudnn.flags(enabled=False), "torch.backends.cudnn"),
        (lambda: torch.backends.mkldnn.flags(enabled=False), "torch.backends.mkldnn"),
        (fastconv.frozen_weights, "fastconv.frozen_weights"),
        (lambda: torch.device("cpu"), "a function mode"),
    ],
)
@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_model_that_sets_a_context_itself_is_not_fused(
    context: Callable[[], Any], name: str, all_of_it: bool
) -> None:
    model = Within(context, all_of_it).eval()
    optimized = fastconv.optimize(model, EXAMPLE)
    assert f"not fused: the model sets {name} itself" in str(report(optimized))
    assert ours(optimized) == ["layer", "last"]
    assert optimized(EXAMPLE).dtype == model(EXAMPLE).dtype


@pytest.mark.usefixtures("_inference")
def test_a_linear_without_autocast_is_not_fused_with_it() -> None:
    """Only what is not a convolution is in the context: how these are called does not show it."""

    class Head(Followed):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.linear = nn.Linear(10, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float())

    model = Head().eval()
    with torch.autocast("cpu", torch.bfloat16):
        optimized = fastconv.optimize(model, EXAMPLE)
        assert optimized(EXAMPLE).dtype == model(EXAMPLE).dtype == torch.float32
    assert "not fused: the model sets autocast itself" in str(report(optimized))


@pytest.mark.usefixtures("_inference")
def test_a_context_that_changes_nothing_does_not_keep_from_fusing() -> None:
    optimized = fastconv.optimize(Within(torch.no_grad, all_of_it=True).eval(), EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}


# --- Whether what is fused is right ---------------------------------------------------------------


def not_fused(model: nn.Module, *example: Any) -> str:
    """Why a model is not fused; what it has become computes what it did."""
    model.eval()
    with torch.no_grad():
        expected = model(*example)
        optimized = fastconv.optimize(model, *example)
        torch.testing.assert_close(optimized(*example), expected, equal_nan=True)
    assert type(optimized) is type(model)
    assert not report(optimized).fused
    (reason,) = (note for note in report(optimized).notes if note.startswith("not fused: "))
    return reason.removeprefix("not fused: ")


class Alias(Followed):
    """torch.fx makes ``y = y * 1.0001`` of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        y = x
        y *= 1.0001
        return super().forward(x)


class Calls(Followed):
    """torch.fx calls forward alone."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 1.0001


class CallsWithin(Followed):
    """torch.fx writes the layer down, and what it does once more."""

    class Layer(nn.Conv2d):
        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x) * 1.0001

    def __init__(self, follower: Callable[..., Tensor]) -> None:
        super().__init__(follower)
        self.first = self.Layer(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


@pytest.mark.parametrize("kind", [Alias, Calls, CallsWithin])
def test_an_error_of_tracing_is_found(kind: type[Followed]) -> None:
    assert "off those of the model" in not_fused(kind(torch.relu), EXAMPLE)


class Says(Followed):
    """Returns something beside its result that torch.fx takes for a constant."""

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


def test_nan_and_infinity_do_not_keep_from_fusing() -> None:
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
    """Both draw the same; they are no constants."""
    model = Followed(lambda out: F.dropout(torch.relu(out), 0.5, training=True)).eval()
    with torch.no_grad():
        optimized = fastconv.optimize(model, EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}


def test_a_constant_that_was_drawn_is_found() -> None:
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
        lambda self, *args: (
            wrong(forward(self, *args)) if vars(self).get("broken") else forward(self, *args)
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
    """Whose results, computed in two ways, differ by more than roundings: it makes more of them."""
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
    """Multiplies differences."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(40 * x)


# --- Who writes -----------------------------------------------------------------------------------


@torch.library.custom_op("fastconv_tests::grow", mutates_args={"x"})
def grow(x: Tensor) -> None:
    x.mul_(1.001)


@grow.register_fake
def _(x: Tensor) -> None:
    return None


@torch.fx.wrap
def grown(x: Tensor) -> Tensor:
    """A function that torch.fx does not look into."""
    x.mul_(1.001)
    return x


@torch.fx.wrap
def grown_elsewhere(x: Tensor) -> Tensor:
    made = x.clone()
    made.mul_(1.001)
    return made


class Writes(Followed):
    """The layer reads ``x`` before something writes to it; their results are added."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        out = self.layer(x)
        return out + self.follower(x)


@pytest.mark.parametrize(
    ("writer", "fuses"),
    [
        (lambda x: (torch.ops.fastconv_tests.grow(x), x)[1], False),
        (lambda x: torch.ops.aten.mul_.Tensor(x, 1.001), False),
        (lambda x: grown(x), False),
        (lambda x: torch.mul(x, 1.001, out=x), False),
        (lambda x: x.detach().mul_(1.001), False),
        (lambda x: F.hardtanh(x, -2.5, 2.5, inplace=True), False),
        (nn.ReLU(inplace=True), False),
        (lambda x: grown_elsewhere(x), True),
        (lambda x: F.interpolate(x, size=(10, 10)), True),
        (lambda x: F.pad(x, (0, 0)), True),
        (lambda x: x.amax((2, 3), True).expand(2, 3, 10, 10), True),
    ],
)
def test_a_layer_does_not_move_past_a_writer(
    writer: Callable[[Tensor], Tensor], fuses: bool
) -> None:
    """Not even by so little that comparing results with a large tolerance would not show it."""
    optimized = fused(Writes(writer), EXAMPLE)
    assert any(isinstance(one, FusedConv2d) for one in optimized.modules()) == fuses
    reason = "not fused: no convolution is followed by anything that can be fused with it"
    assert (reason in report(optimized).notes) != fuses  # it was not the comparison that told


class OwnStatistics(Followed):
    """Writes to what its BatchNorm has, in one of several ways."""

    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(torch.relu, norm=True)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.norm, x)
        return super().forward(x)


def _replace(norm: Any, x: Tensor) -> None:
    norm.running_mean = norm.running_mean.clone()


def _train(norm: Any, x: Tensor) -> None:
    F.batch_norm(x.detach(), norm.running_mean, norm.running_var, training=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda norm, x: norm.running_mean.mul_(1.0),  # which changes nothing this time
        lambda norm, x: norm.running_mean.data.copy_(norm.running_mean),
        lambda norm, x: norm.running_mean.lerp_(x.mean((0, 2, 3)), 0.0),
        lambda norm, x: norm.running_var[:1].fill_(1.0),
        _replace,
        _train,
    ],
)
def test_a_norm_that_the_model_writes_to_is_not_folded(write: Callable[..., Any]) -> None:
    model = OwnStatistics(write).eval()
    with torch.no_grad():
        optimized = fastconv.optimize(model, EXAMPLE)
        assert report(optimized).folded == 0
        for _ in range(2):
            torch.testing.assert_close(optimized(EXAMPLE), model(EXAMPLE))


def test_a_buffer_that_a_graph_would_not_write() -> None:
    class Counted(Followed):
        def __init__(self) -> None:
            super().__init__(torch.relu)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x)

    assert "its graph gives the keys" in not_fused(Counted(), EXAMPLE)


def test_constants_that_are_made_in_forward() -> None:
    class Constants(Followed):
        def forward(self, x: Tensor) -> Tensor:
            shift = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
            return super().forward(x - shift) * torch.arange(10, device=x.device)

    model = Constants(torch.relu)
    optimized = fused(model, EXAMPLE)
    assert activations(optimized) == {"layer": "relu"}
    assert not any("constant" in name for name in vars(model))
    other = torch.randn(4, 3, 10, 10)
    for one in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        torch.testing.assert_close(one(other), model(other), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_inference")
def test_a_fused_layer_says_so() -> None:
    optimized = fastconv.optimize(Followed(nn.LeakyReLU(0.2)).eval(), EXAMPLE)
    assert repr(optimized.layer).endswith("padding=(1, 1), activation=('leaky_relu', 0.2))")
