"""Gradients' and next layers' kernels, compiled while others are. A CPU stands in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastconv
from fastconv import native
from fastconv.backends import cuda
from fastconv.jit import launch
from fastconv.jit.workers import Workers
from fastconv.kernels import planner
from fastconv.kernels.gpus import H200
from fastconv.modules import FusedConv2d
from fastconv.ops import ahead, devices, entries, hooks
from fastconv.ops.ahead import begin  # which other tests do without
from fastconv.ops.schema import OPERATORS


class Noted(SimpleNamespace):
    """Passes that were begun in the background, and those that were planned as they were needed."""

    begun: list[cuda.Need]
    needed: list[cuda.Need]
    gradients = property(lambda self: [n for n in self.needed if n.plan is not planner.forward])
    guesses = property(lambda self: [n for n in self.begun if n.plan is planner.forward])


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """Tensors of a CPU get the plans of an H200's, by Python; nothing is compiled or computed."""
    found = Noted(begun=[], needed=[])
    planned = cuda.planned

    def needed(need: cuda.Need) -> Any:
        found.needed.append(need)
        return planned(need)

    prepared = SimpleNamespace(run=lambda *_: None)
    monkeypatch.setattr(native, "conv2d", None)
    monkeypatch.setattr(native, "begin", lambda: None)
    monkeypatch.setattr(ahead, "begin", begin)
    monkeypatch.setattr(cuda, "before_forward", ahead.begin_layers)
    monkeypatch.setattr(cuda, "planned", needed)
    monkeypatch.setattr(cuda, "gpu", lambda index: H200)
    monkeypatch.setattr(cuda, "_made", {})
    monkeypatch.setattr(launch, "prepare", lambda *_: prepared)
    monkeypatch.setattr(launch, "begin_work", lambda need, work: found.begun.append(need))
    for name, kernels, on in (
        ("forward", devices.forward_kernels, devices._forward_on),
        ("input_grad", devices.input_grad_kernels, devices._input_grad_on),
        ("weight_grad", devices.weight_grad_kernels, devices._weight_grad_on),
    ):
        describe = partial(OPERATORS[name].describe, OPERATORS[name].known)
        monkeypatch.setitem(kernels, "cpu", on(cuda, describe))
    cuda._ready.cache_clear()
    yield found
    cuda._ready.cache_clear()
    cuda.take_latest()


def _tensors(
    format: torch.memory_format = torch.contiguous_format, size: int = 12, channels: int = 16
) -> list[Tensor]:
    shapes = ((2, channels, size, size), (32, channels, 3, 3))
    input, weight = (torch.randn(shape).to(memory_format=format) for shape in shapes)
    return [input.requires_grad_(), weight.requires_grad_(), torch.randn(32, requires_grad=True)]


@pytest.mark.parametrize("precision", ["ieee", "tf32", None])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("size", "channels"), [(12, 16), (3, 16), (13, 1)])
def test_what_is_begun_is_what_is_needed(
    noted: Noted, format: torch.memory_format, size: int, channels: int, precision: Any
) -> None:
    """Down to sizes of 1, of which strides do not tell the memory format."""
    tensors = _tensors(format, size, channels)
    output = fastconv.conv2d(*tensors, stride=2, precision=precision)
    assert len(noted.begun) == 2
    assert not noted.gradients
    output.backward(torch.empty_like(output))
    assert sorted(noted.begun, key=str) == sorted(noted.gradients, key=str)


@pytest.mark.parametrize("wanted", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_only_what_is_recorded(noted: Noted, wanted: tuple[int, ...]) -> None:
    tensors = [one.detach().requires_grad_(i in wanted) for i, one in enumerate(_tensors())]
    output = fastconv.conv2d(*tensors)
    if wanted:
        output.backward(torch.empty_like(output))
    assert sorted(noted.begun, key=str) == sorted(noted.gradients, key=str)
    assert len(noted.begun) == (0 in wanted) + (1 in wanted)


def test_autocast_and_views(noted: Noted) -> None:
    input, weight, bias = _tensors()
    with torch.autocast("cpu", torch.bfloat16):
        output = fastconv.conv2d(input[:, :, ::2], weight, bias, padding=1)
    assert {need.dtype for need in noted.begun} == {torch.bfloat16}
    output.backward(torch.empty_like(output))
    assert sorted(noted.begun, key=str) == sorted(noted.gradients, key=str)


def test_tensors_that_are_not_aligned(noted: Noted) -> None:
    input, weight, _ = _tensors()
    at_an_offset = torch.empty(input.numel() + 1)[1:].view_as(input).requires_grad_()
    output = fastconv.conv2d(at_an_offset, weight)
    output.backward(torch.empty_like(output))
    assert sorted(noted.begun, key=str) == sorted(noted.gradients, key=str)
    assert {need.plan: need.aligned for need in noted.begun} == {
        planner.input_grad: True,
        planner.weight_grad: False,
    }


def test_once_for_a_form(noted: Noted) -> None:
    tensors = _tensors()
    for _ in range(3):
        fastconv.conv2d(*tensors)
    assert len(noted.begun) == 2
    with torch.no_grad():
        fastconv.conv2d(*_tensors(size=20))  # planned, but not recorded
    fastconv.conv2d(*tensors)
    assert len(noted.begun) == 2


def test_not_what_is_ready(noted: Noted) -> None:
    """After ``prepare``, say."""
    tensors = _tensors()
    output = fastconv.conv2d(*tensors)
    output.backward(torch.empty_like(output))
    noted.begun.clear()
    for need in noted.gradients:
        cuda.begin(need)
    assert not noted.begun


@pytest.mark.parametrize("reason", ["a graph is captured", "forked", "in the midst of a trace"])
def test_in_the_way(noted: Noted, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "forked":
        monkeypatch.setattr(native, "_forked", True)
    elif reason == "a graph is captured":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    args = (*_tensors(), (1, 1), (0, 0, 0, 0), (1, 1), 1, None)
    result = OPERATORS["forward"].describe(OPERATORS["forward"].known, *args)
    begin(args, result, (True, True, True), planner.EVERY)
    assert not noted.begun


def test_nothing_is_raised(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(launch, "begin_work", fail)
    fastconv.conv2d(*_tensors())


def test_transforms(noted: Noted) -> None:
    """Levels of functorch have tensors of their own: nothing is begun for these."""
    input, weight, _ = (tensor.detach() for tensor in _tensors())
    torch.func.grad(lambda weight: fastconv.conv2d(input, weight).sum())(weight)
    assert not noted.begun


@pytest.mark.parametrize("recorded", [False, True])
def test_the_native_path_s_entries(monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    begun: list[Any] = []
    entry = entries.Entry((), False, 0, launches=[()])
    monkeypatch.setattr(entries, "_entry", lambda *_: entry)
    monkeypatch.setattr(hooks, "forward_prepared", lambda *told: begun.append(told))
    input, weight, bias = _tensors()
    args = (input.detach(), weight, bias, (1, 1), (0, 0, 0, 0), (1, 1), 1, "tf32")
    with torch.set_grad_enabled(recorded):
        assert entries.make_entry("forward", *args) is entry
    result = OPERATORS["forward"].describe(OPERATORS["forward"].known, *args)
    told = [(args, result, [False, True, True], planner.of_process())]
    assert begun == (told if recorded else [])


@pytest.fixture
def compiled(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs as they "compile", in threads for real."""
    found: list[str] = []

    def build(kernel: Any, arch: str) -> bytes:
        found.append(kernel.text)
        return b"cubin"

    def prepare(launches: Any, *_: Any) -> Any:
        launch.build_all([one.kernel for one in launches], H200.architecture)
        return SimpleNamespace(run=lambda *_: None)

    def begin_work(key: Any, work: Callable[[], Any]) -> None:
        launch._workers.begin(key, work, 4)

    monkeypatch.setattr(launch, "_workers", Workers())
    monkeypatch.setattr(launch, "begin_work", begin_work)
    monkeypatch.setattr(launch, "build", build)
    monkeypatch.setattr(launch, "kept", lambda *_: None)
    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(launch, "compile_threads", 4)
    return found


def test_planned_and_compiled_once(noted: Noted, compiled: list[str]) -> None:
    """Whether the backward pass comes after it all or amidst it."""
    model = nn.Sequential(*(fastconv.Conv2d(8 * i, 8 * i + 8, 3, padding=1) for i in range(1, 7)))
    output = model(torch.randn(2, 8, 10, 10))
    output.backward(torch.empty_like(output))
    assert len(compiled) == len(set(compiled))
    assert len(noted.needed) == len(set(noted.needed)) == 6 + 6 + 5
    assert not launch._workers._pieces


def test_another_form_than_was_thought(noted: Noted, compiled: list[str]) -> None:
    output = fastconv.conv2d(*_tensors())
    grad_output = torch.empty_like(output, memory_format=torch.channels_last)
    output.backward(grad_output)
    assert {need.output_channels_last for need in noted.needed if need.bias_grad} == {False, True}


class Block(nn.Module):
    """As in residual networks, the convolution of the shortcut is defined last."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = fastconv.Conv2d(inputs, 8, 1, bias=False)
        self.second = fastconv.Conv2d(8, 8, (3, 5), stride, padding=((0, 2), (3, 1)))
        self.third = fastconv.Conv2d(8, outputs, 1)
        self.shortcut = fastconv.Conv2d(inputs, outputs, 1, stride)

    def forward(self, input: Tensor) -> Tensor:
        shortcut = self.shortcut(input)
        return shortcut + self.third(self.second(self.first(input)))


def _network() -> nn.Sequential:
    first = fastconv.Conv2d(3, 16, 7, stride=2, padding=3)
    pools = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True)
    return nn.Sequential(first, pools[0], Block(16, 24, 1), pools[1], Block(24, 40, 2))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_next_layers(noted: Noted, format: torch.memory_format, half: bool, recorded: bool) -> None:
    """All but the first are there when they are asked for, and nothing else."""
    model = _network().to(memory_format=format)
    images = torch.randn(2, 3, 45, 70)  # whose format is the output's only if the weight's is
    with torch.autocast("cpu", torch.bfloat16, enabled=half), torch.set_grad_enabled(recorded):
        model(images)
    needed = [need for need in noted.needed if need.plan is planner.forward]
    assert len(needed) == 9
    assert set(noted.guesses) == set(needed[1:])
    assert {need.dtype for need in needed} == {torch.bfloat16 if half else torch.float32}


def test_how_far_it_looks(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """At so many passes that are not there yet; the next one is begun last, to be done first."""
    model = nn.Sequential(*(fastconv.Conv2d(8 * i, 8 * i + 8, 1) for i in range(1, 9)))
    model[:2](torch.randn(1, 8, 6, 6))
    noted.begun.clear()
    monkeypatch.setattr(cuda, "_made", dict.fromkeys(noted.needed))
    model(torch.randn(1, 8, 6, 6)[..., :5].contiguous())
    channels = [need.problem.in_channels for need in noted.guesses]
    assert channels[: ahead.LAYERS] == [40, 32, 24, 16]


@pytest.mark.parametrize("other", ["channels", "copied", "class", "fused", "computed"])
def test_layers_that_cannot_be_guessed(noted: Noted, other: str) -> None:
    """Their weights are not looked at, either: to compute them may change something."""

    class Other(fastconv.Conv2d):
        pass

    layer: nn.Module = {
        "channels": lambda: fastconv.Conv2d(16, 8, 1),
        "copied": lambda: fastconv.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        "class": lambda: Other(8, 8, 1),
        "fused": lambda: FusedConv2d(8, 8, 1),
        "computed": lambda: nn.utils.parametrizations.spectral_norm(fastconv.Conv2d(8, 8, 1)),
    }[other]()
    before = [tensor.clone() for tensor in layer.buffers()]
    model = nn.Sequential(fastconv.Conv2d(8, 8, 3), nn.Identity(), layer)
    model[:2](torch.randn(1, 8, 9, 9))
    model.forward = model[:2].forward  # type: ignore[method-assign]
    model(torch.randn(1, 8, 10, 9))
    assert not noted.guesses
    assert all(map(torch.equal, layer.buffers(), before))


def test_weights_of_copied_layers_are_computed_once(noted: Noted) -> None:
    computed = nn.utils.parametrizations.spectral_norm(fastconv.Conv2d(8, 8, 1))
    model = nn.Sequential(computed, copy.deepcopy(computed))
    twins = copy.deepcopy(model)
    model(torch.randn(1, 8, 9, 9))
    [layer.weight for layer in twins]
    for buffer, expected in zip(model.buffers(), twins.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected)


def test_forwards_of_others_see_no_tensor_without_data(noted: Noted) -> None:
    model = _network()
    seen: list[Tensor] = []
    pool = model[1].forward
    model[1].forward = lambda x: (seen.append(x), pool(x))[1]
    model(torch.randn(2, 3, 45, 70))
    assert [x.device.type for x in seen] == ["cpu"]


def test_networks_that_cannot_be_guessed(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, something pools between all layers: after some misses, nothing more is begun."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(fastconv.Conv2d(8, 8, 3, padding=1) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = nn.functional.max_pool2d(layer(x), 2, 1)
            return x

    dropped: list[cuda.Need] = []
    monkeypatch.setattr(launch, "drop", dropped.append)
    Pooling()(torch.randn(1, 8, 30, 30))
    misses = ahead.MOST_MISSES
    assert len(noted.guesses) == misses  # layers are alike: one need each
    model = Pooling()
    for size in (40, 41, 42):
        model(torch.randn(1, 8, size, 30))
    assert len(noted.guesses) == 2 * misses


def test_what_was_guessed_wrongly_is_left(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[cuda.Need] = []
    monkeypatch.setattr(launch, "drop", dropped.append)
    layers = [fastconv.Conv2d(8 * i, 8 * i + 8, 1) for i in range(1, 6)]
    nn.Sequential(layers[0], nn.Upsample(scale_factor=2), *layers[1:])(torch.randn(1, 8, 6, 6))
    assert {need.problem.in_channels for need in dropped} == {24, 32, 40}
    assert {need.problem.input_size for need in dropped} == {(6, 6)}


def test_a_wrong_guess_is_no_error(noted: Noted) -> None:
    """A kernel larger than what the input is taken to be: here, something makes it larger."""
    layers = fastconv.Conv2d(4, 4, 3), nn.Upsample(scale_factor=4), fastconv.Conv2d(4, 4, 9)
    output = nn.Sequential(*layers)(torch.randn(1, 4, 9, 9))
    assert output.shape == (1, 4, 20, 20)
    assert not noted.guesses


def test_functions_have_no_next_layer(noted: Noted) -> None:
    model = _network()
    first = model[0]
    fastconv.conv2d(torch.randn(2, 3, 45, 70), first.weight, first.bias, 2, 3)
    first.forward(torch.randn(2, 3, 46, 70))
    assert not noted.guesses


def test_what_is_guessed_is_taken(noted: Noted, compiled: list[str]) -> None:
    model = _network()
    with torch.no_grad():
        model(torch.randn(2, 3, 45, 70))
    assert len(compiled) == len(set(compiled))
    assert len(noted.needed) == len(set(noted.needed)) == 9
    assert not launch._workers._pieces


def test_how_many_passes_are_noted_as_ready(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are kept: with sizes that change all the time, the table has an end."""
    monkeypatch.setattr(cuda, "MOST_READY", 3)
    with torch.no_grad():
        for size in range(10, 16):
            fastconv.conv2d(*_tensors(size=size))
    assert [*cuda._made] == noted.needed[-3:]
    assert all(map(cuda.is_ready, noted.needed[-3:]))
    assert not cuda.is_ready(noted.needed[0])
