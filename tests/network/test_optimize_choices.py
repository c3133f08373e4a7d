"""What ``optimize`` measures, what it chooses by that, and which times it stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastconv
from fastconv import native, timing
from fastconv.jit import cache
from fastconv.network import calls
from fastconv.network.calls import Call, Times, Trial
from fastconv.timing import Effort
from network.helpers import (
    DISTINCT,
    EXAMPLE,
    NAMES,
    Clock,
    ResNet,
    ours,
    report,
    times,
)

pytestmark = pytest.mark.usefixtures("clock")


def test_training(model: ResNet, clock: Clock) -> None:
    optimized = fastconv.optimize(model, EXAMPLE)
    assert ours(optimized) == NAMES
    assert ours(model) == []
    assert type(optimized) is ResNet
    by_weight = {(call.weight.shape, call.input.shape): call.gradients for call in clock.seen}
    assert by_weight[(8, 3, 3, 3), (2, 3, 10, 10)] == (
        "weight",
        "bias",
    )  # input requires none
    assert by_weight[(8, 8, 3, 3), (2, 8, 10, 10)] == ("input", "weight")
    assert len(clock.seen) == len(set(clock.seen)) == DISTINCT
    found = report(optimized)
    assert not found.fused
    assert "not fused" not in str(found)
    same = [row for row in found.layers if row.call.weight.shape == (8, 8, 3, 3)]
    assert [(row.layers, row.calls, row.exchanged) for row in same] == [(2, 2, 2)]


def test_only_faster_layers_are_exchanged(model: ResNet, clock: Clock) -> None:
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
        (times(1, 0.9, error=0.08), False),  # less than both errors together
        (times(1, 1.1), False),
    ],
)
def test_by_how_much_a_layer_has_to_be_faster(
    measured: Times, gains: bool, model: ResNet, clock: Clock
) -> None:
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


@pytest.mark.parametrize("by_gpu", [times(9, 8), times(9, 8.95), times(9, 9.5)])
@pytest.mark.parametrize(
    "by_clock", [times(10, 9, error=0.1), times(10, 10.5, error=0.1), times(10, 10.05)]
)
def test_the_gpu_decides_where_the_clock_cannot(
    by_clock: Times, by_gpu: Times, model: ResNet, clock: Clock
) -> None:
    """A busy host's noise decides nothing, in either direction."""
    assert by_clock.undecided
    clock.wholes = [by_clock, by_gpu] * 2  # with blocks, and without
    optimized = fastconv.optimize(model, EXAMPLE)
    assert ours(optimized) == (NAMES if by_gpu.gains else [])
    assert (clock.models, clock.with_host) == (2 if by_gpu.gains else 4, False)
    assert "the GPU's time alone decided" in str(report(optimized))


@pytest.mark.parametrize("under_way", [True, False])
def test_the_gpu_decides_while_the_native_host_path_is_built(
    under_way: bool, model: ResNet, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building it takes half a minute; built, it takes less host time than PyTorch does."""
    waited: list[str] = []
    monkeypatch.setattr(native, "under_way", lambda: under_way)
    monkeypatch.setattr(native, "settle", lambda: waited.append("settled"))
    optimized = fastconv.optimize(model, EXAMPLE)
    assert ours(optimized) == NAMES
    assert (clock.with_host, waited) == ((False, []) if under_way else (True, ["settled"]))
    assert ("measured by the GPU's time alone" in str(report(optimized))) == under_way
    assert {"planning", "compiling", "PyTorch's first calls", "measuring layers",
            "measuring the whole model"} <= report(optimized).task_seconds.keys()  # fmt: skip
    # A stored time of the other kind is not used.
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
    clock.gains = clock.of_blocks = lambda call: times(1, 2)
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
    assert ours(optimized) == ["layer"]  # its calls together are faster
    rows = report(optimized).layers
    # The first and the last call of the layer have a gradient of the weight alone.
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
    assert len(clock.seen) == 2 * DISTINCT  # other types are measured separately


def test_random_tensors_of_a_form() -> None:
    for tensor in (EXAMPLE, EXAMPLE.mT, EXAMPLE[:, :, ::2], EXAMPLE[:1].expand(4, -1, -1, -1)):
        form = calls.Form.of(tensor)
        made = form.random(torch.device("cpu"))
        assert made.shape == tensor.shape
        assert made.std() > 0.5
        assert made.stride() == tensor.stride() or 0 in tensor.stride()


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
    assert len(trial.ours()) == len(trial.pytorchs()) == 2  # gradients


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("with_host", [True, False])
def test_models_take_turns(with_host: bool) -> None:
    did: list[str] = []

    def note(*words: str) -> list[Callable[[], None]]:
        return [lambda word=word: did.append(word) for word in words]

    runs = note("before", "after")
    cpu = torch.device("cpu")
    calls.Clock().model(runs, note("as it was", "changed"), cpu, with_host)
    # A sample of GPU time has many calls: repetitions are dropped here.
    did = [word for at, word in enumerate(did) if at == 0 or did[at - 1] != word]
    turn = ["as it was", "before", "changed", "after"]
    ends = timing.LEAST_SAMPLES * len(turn)
    assert did[-ends:] == timing.LEAST_SAMPLES * turn
    assert len(did) == ends + (timing.WARM_UPS if with_host else 1) * len(turn)


def test_times_are_stored(model: ResNet, clock: Clock) -> None:
    clock.gains = lambda call: times(2, 1) if call.weight.shape[1] == 8 else times(1, 2)
    first = fastconv.optimize(model, EXAMPLE)
    assert len(cache.entries()) == DISTINCT + len(clock.blocks) + 1
    asked = len(clock.seen)
    again = fastconv.optimize(model, EXAMPLE)
    assert (len(clock.seen), clock.models) == (asked, 1)
    assert ours(again) == ours(first)
    assert report(again).layers == report(first).layers
    assert report(again).blocks == report(first).blocks
    assert "0 distinct calls measured, 10 known from earlier" in str(report(again))
    assert "10 distinct calls measured, 0 known from earlier" in str(report(first))


class Behind(nn.Module):
    """A layer, and a module behind it that is not measured by itself."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.layer, self.behind = nn.Conv2d(3, 3, 1), behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.layer(x))


def test_another_model_of_the_same_layers_is_measured(clock: Clock) -> None:
    models = [Behind(nn.ReLU()), Behind(nn.Linear(10, 4)), Behind(nn.Linear(10, 5)),
              nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())]  # fmt: skip
    for number, model in enumerate(models, 1):
        for _ in range(2):  # the second time, its time is stored
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
    monkeypatch.setattr(calls, "plans", lambda *_: {})  # it would fail with the "direct" switch
    fastconv.optimize(model, EXAMPLE)
    assert (len(clock.seen), clock.models) == (2 * DISTINCT, 2)


def test_times_depend_on_cudnn_benchmark(model: ResNet, clock: Clock) -> None:
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
