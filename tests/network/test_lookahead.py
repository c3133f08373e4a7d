"""Kernels of gradients and next layers, compiled in the background. A CPU stands in for a GPU."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fastconv
from effort import wait_until
from fastconv import native
from fastconv.backends import cuda
from fastconv.jit import launch, pool
from fastconv.jit.workers import Workers
from fastconv.kernels import planner
from fastconv.kernels.gpus import H200
from fastconv.network import lookahead
from fastconv.network.lookahead import compile_gradients  # conftest patches it elsewhere
from fastconv.ops import devices, entries, hooks
from fastconv.ops.schema import OPERATORS


class Passes(SimpleNamespace):
    """Passes that were begun in the background, and those that were planned at their call."""

    begun: list[cuda.Need]
    needed: list[cuda.Need]
    gradients = property(lambda self: [n for n in self.needed if n.plan is not planner.forward])
    guesses = property(lambda self: [n for n in self.begun if n.plan is planner.forward])


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    """Plans tensors of a CPU as an H200's, by Python; nothing is compiled or computed."""
    found = Passes(begun=[], needed=[])
    planned = cuda.planned

    def needed(need: cuda.Need) -> Any:
        found.needed.append(need)
        return planned(need)

    prepared = SimpleNamespace(run=lambda *_: None)
    monkeypatch.setattr(native, "conv2d", None)
    monkeypatch.setattr(native, "start_build", lambda: None)
    monkeypatch.setattr(lookahead, "compile_gradients", compile_gradients)
    monkeypatch.setattr(cuda, "before_layer", lookahead.compile_next_layers)
    monkeypatch.setattr(cuda, "planned", needed)
    monkeypatch.setattr(cuda, "gpu", lambda index: H200)
    monkeypatch.setattr(cuda, "_made", {})
    monkeypatch.setattr(launch, "load_launches", lambda *_: prepared)
    monkeypatch.setattr(pool, "run_ahead", lambda need, work: found.begun.append(need))
    for name, kernels, on in (
        ("forward", devices.forward_kernels, devices._forward_on),
        ("input_grad", devices.input_grad_kernels, devices._input_grad_on),
        ("weight_grad", devices.weight_grad_kernels, devices._weight_grad_on),
        ("transposed", devices.transposed_kernels, devices._transposed_on),
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
def test_begun_passes_are_those_that_are_needed(
    passes: Passes, format: torch.memory_format, size: int, channels: int, precision: Any
) -> None:
    """Even for sizes of 1, whose strides do not show the memory format."""
    tensors = _tensors(format, size, channels)
    output = fastconv.conv2d(*tensors, stride=2, precision=precision)
    assert len(passes.begun) == 2
    assert not passes.gradients
    output.backward(torch.empty_like(output))
    assert sorted(passes.begun, key=str) == sorted(passes.gradients, key=str)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("size", [12, 1])
@pytest.mark.parametrize("stride", [1, 2, 4])  # one kernel size, and positions without a tap
def test_gradients_of_transposed_layers(
    passes: Passes, format: torch.memory_format, size: int, stride: int
) -> None:
    _, weight, _ = _tensors(format)
    input = torch.randn(2, 32, size, size).to(memory_format=format).requires_grad_()
    bias = torch.randn(16, requires_grad=True)
    output = fastconv.conv_transpose2d(input, weight, bias, stride)
    assert [need.plan for need in passes.needed] == [planner.input_grad]
    assert len(passes.begun) == 2
    output.backward(torch.empty_like(output))
    assert sorted(passes.begun, key=str) == sorted(passes.needed[1:], key=str)
    assert {need.plan for need in passes.begun} == {planner.forward, planner.weight_grad}


@pytest.mark.parametrize("function", [fastconv.conv1d, fastconv.conv_transpose1d])
@pytest.mark.parametrize("view", [False, True])
def test_gradients_of_sequences(
    passes: Passes, function: Callable[..., Tensor], view: bool
) -> None:
    """Also of sequences that are views of (batch, length, channels)."""
    input = torch.randn((2, 40, 16)).mT if view else torch.randn((2, 16, 40))
    weight = torch.randn(16, 16, 5, requires_grad=True)
    output = function(input.requires_grad_(), weight, padding=2)
    assert len(passes.begun) == 2
    output.backward(torch.empty_like(output))
    assert sorted(passes.begun, key=str) == sorted(passes.needed[1:], key=str)


def test_an_input_gradient_begins_nothing(passes: Passes) -> None:
    """It is planned as a transposed layer is, but belongs to a backward pass."""
    tensors = _tensors()
    output = fastconv.conv2d(*tensors)
    output.backward(torch.empty_like(output))
    begun = len(passes.begun)
    fastconv.conv2d(*tensors)
    assert len(passes.begun) == begun


@pytest.mark.parametrize("wanted", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_only_recorded_gradients(passes: Passes, wanted: tuple[int, ...]) -> None:
    tensors = [one.detach().requires_grad_(i in wanted) for i, one in enumerate(_tensors())]
    output = fastconv.conv2d(*tensors)
    if wanted:
        output.backward(torch.empty_like(output))
    assert sorted(passes.begun, key=str) == sorted(passes.gradients, key=str)
    assert len(passes.begun) == (0 in wanted) + (1 in wanted)


def test_autocast_and_views(passes: Passes) -> None:
    input, weight, bias = _tensors()
    with torch.autocast("cpu", torch.bfloat16):
        output = fastconv.conv2d(input[:, :, ::2], weight, bias, padding=1)
    assert {need.dtype for need in passes.begun} == {torch.bfloat16}
    output.backward(torch.empty_like(output))
    assert sorted(passes.begun, key=str) == sorted(passes.gradients, key=str)


def test_tensors_that_are_not_aligned(passes: Passes) -> None:
    input, weight, _ = _tensors()
    at_an_offset = torch.empty(input.numel() + 1)[1:].view_as(input).requires_grad_()
    output = fastconv.conv2d(at_an_offset, weight)
    output.backward(torch.empty_like(output))
    assert sorted(passes.begun, key=str) == sorted(passes.gradients, key=str)
    assert {need.plan: need.aligned for need in passes.begun} == {
        planner.input_grad: True,
        planner.weight_grad: False,
    }


def test_once_for_a_form(passes: Passes) -> None:
    tensors = _tensors()
    for _ in range(3):
        fastconv.conv2d(*tensors)
    assert len(passes.begun) == 2
    with torch.no_grad():
        fastconv.conv2d(*_tensors(size=20))  # planned, but not recorded
    fastconv.conv2d(*tensors)
    assert len(passes.begun) == 2


def test_ready_passes_are_not_begun(passes: Passes) -> None:
    """They are ready after ``prepare``, for example."""
    tensors = _tensors()
    output = fastconv.conv2d(*tensors)
    output.backward(torch.empty_like(output))
    passes.begun.clear()
    for need in passes.gradients:
        cuda.compile_ahead(need)
    assert not passes.begun


@pytest.mark.parametrize("reason", ["a graph is captured", "forked", "torch.compile traces"])
def test_no_background_work(passes: Passes, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "forked":
        monkeypatch.setattr(native, "_forked", True)
    elif reason == "a graph is captured":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    args = (*_tensors(), (1, 1), (0, 0, 0, 0), (1, 1), 1, None)
    result = OPERATORS["forward"].describe(OPERATORS["forward"].known, *args)
    compile_gradients("forward", args, result, (True, True, True), planner.EVERY)
    assert not passes.begun


def test_nothing_is_raised(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(pool, "run_ahead", fail)
    fastconv.conv2d(*_tensors())


def test_a_compiler_after_a_call_that_is_not_recorded(passes: Passes) -> None:
    """A compiler's symbolic sizes are not compared with the pass that was planned last."""
    layer, images = fastconv.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad():
        layer(images)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = mode.from_tensor(torch.randn(3, 4, 7, 8), static_shapes=False)
    weight = mode.from_tensor(layer.weight, static_shapes=True)
    with mode:
        fastconv.conv2d(symbolic, weight)
    assert not [need for need in passes.begun if need.plan is not planner.forward]


def test_transforms(passes: Passes) -> None:
    """Transforms of torch.func wrap tensors: nothing is begun for wrappers."""
    input, weight, _ = (tensor.detach() for tensor in _tensors())
    torch.func.grad(lambda weight: fastconv.conv2d(input, weight).sum())(weight)
    assert not passes.begun


@pytest.mark.parametrize(
    "layer",
    [
        fastconv.Conv1d(16, 16, 3, padding=1),
        fastconv.ConvTranspose1d(16, 16, 4, stride=2, padding=1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_first_step_keeps_no_graph(passes: Passes, layer: Any) -> None:
    """Planning must not hold the callers' frames, with tensors in them: see ``Declined``."""

    def step() -> weakref.ref[Any]:
        def hook(*_: Any) -> None:
            pass

        torch.autograd.graph.get_gradient_edge(layer.weight).node.register_hook(hook)
        torch.autograd.grad(layer(torch.randn(4, 16, 500)).sum(), list(layer.parameters()))
        return weakref.ref(hook)

    gc.collect()
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()
    assert {need.plan for need in passes.needed} > {planner.weight_grad}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["forward", "transposed"])
def test_entries_of_the_native_host_path(
    monkeypatch: pytest.MonkeyPatch, name: str, recorded: bool
) -> None:
    begun: list[Any] = []
    entry = entries.Entry((), False, 0, launches=[()])
    monkeypatch.setattr(entries, "_entry", lambda *_: entry)
    monkeypatch.setattr(hooks, "layer_prepared", lambda *told: begun.append(told))
    input, weight, bias = _tensors()
    geometry = ((1, 1), (0, 0, 0, 0), (1, 1), 1, "tf32")
    args: tuple[Any, ...] = (input.detach(), weight, bias, *geometry)
    if name == "transposed":
        weight = weight.transpose(0, 1)
        args = (input.detach(), weight, bias, None, (0, 0), *geometry, "identity", 0.0)
    with torch.set_grad_enabled(recorded):
        assert entries.make_entry(name, *args) is entry
    result = OPERATORS[name].describe(OPERATORS[name].known, *args)
    told = [(name, args, result, [False, True, True], planner.of_process())]
    assert begun == (told if recorded else [])


@pytest.fixture
def compiled(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The programs that were "compiled", in real threads, which end before the next test."""
    found: list[str] = []

    def build(kernel: Any, arch: str) -> bytes:
        found.append(kernel.text)
        return b"cubin"

    def load_launches(launches: Any, *_: Any) -> Any:
        pool.build_all([one.kernel for one in launches], H200.architecture)
        return SimpleNamespace(run=lambda *_: None)

    def run_ahead(key: Any, work: Callable[[], Any]) -> None:
        pool._workers.submit_ahead(key, work, 4)

    monkeypatch.setattr(pool, "_workers", Workers())
    monkeypatch.setattr(pool, "run_ahead", run_ahead)
    monkeypatch.setattr(pool, "build", build)
    monkeypatch.setattr(pool, "cached_cubin", lambda *_: None)
    monkeypatch.setattr(launch, "load_launches", load_launches)
    monkeypatch.setattr(pool, "compile_threads", 4)
    yield found
    _wait_for_threads()


def _wait_for_threads() -> None:
    """Waits until nothing is planned or compiled ahead, and no task that is done is in the table.

    A thread sets the result of a task before it removes the task from the table.
    """
    wait_until(lambda: not pool._workers._threads)


def test_planned_and_compiled_once(passes: Passes, compiled: list[str]) -> None:
    """Also if the backward pass begins while kernels are being compiled."""
    model = nn.Sequential(*(fastconv.Conv2d(8 * i, 8 * i + 8, 3, padding=1) for i in range(1, 7)))
    output = model(torch.randn(2, 8, 10, 10))
    output.backward(torch.empty_like(output))
    assert len(compiled) == len(set(compiled))
    assert len(passes.needed) == len(set(passes.needed)) == 6 + 6 + 5
    _wait_for_threads()
    assert not pool._workers._tasks


def test_a_gradient_of_another_form_than_assumed(passes: Passes, compiled: list[str]) -> None:
    output = fastconv.conv2d(*_tensors())
    grad_output = torch.empty_like(output, memory_format=torch.channels_last)
    output.backward(grad_output)
    _wait_for_threads()  # nobody claims the passes of the assumed form
    assert {need.output_channels_last for need in passes.needed if need.bias_grad} == {False, True}


class Block(nn.Module):
    """A residual block, whose shortcut is defined last but called first."""

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
def test_next_layers(
    passes: Passes, format: torch.memory_format, half: bool, recorded: bool
) -> None:
    """All layers but the first are begun before their calls, and nothing else is."""
    model = _network().to(memory_format=format)
    images = torch.randn(2, 3, 45, 70)  # their format decides the output's only with the weight's
    with torch.autocast("cpu", torch.bfloat16, enabled=half), torch.set_grad_enabled(recorded):
        model(images)
    needed = [need for need in passes.needed if need.plan is planner.forward]
    assert len(needed) == 9
    assert set(passes.guesses) == set(needed[1:])
    assert {need.dtype for need in needed} == {torch.bfloat16 if half else torch.float32}


SEQUENCES = nn.Sequential(
    fastconv.Conv1d(3, 16, 7, stride=2, padding=((6, 0),)),
    nn.MaxPool1d(2),
    fastconv.Conv1d(16, 24, 3, padding="same", dilation=2),
    nn.AvgPool1d(3, 1, 1),
    fastconv.ConvTranspose1d(24, 8, 4, stride=2, padding=1, output_padding=1),
    fastconv.ConvTranspose1d(8, 12, 3, groups=4),
    fastconv.Conv1d(12, 4, 5),
)
IMAGES = nn.Sequential(
    fastconv.Conv2d(3, 16, 3, padding=1),
    nn.MaxPool2d(2),
    fastconv.ConvTranspose2d(16, 8, 2, stride=2),
    fastconv.ConvTranspose2d(8, 12, (3, 1), padding=((1, 0), (0, 0)), dilation=2),
    fastconv.Conv2d(12, 4, 5),
)


VOLUMES = nn.Sequential(
    fastconv.Conv3d(3, 16, 3, stride=(1, 2, 2), padding=((2, 0), (1, 1), (1, 1))),
    nn.MaxPool3d((1, 2, 2)),
    fastconv.Conv3d(16, 12, (3, 1, 1), padding=(1, 0, 0)),
    fastconv.Conv3d(12, 8, (2, 3, 3), padding="same", groups=2),
    fastconv.ConvTranspose3d(8, 4, 2, stride=2),
)


@pytest.mark.parametrize(("half", "recorded"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("model", "example"),
    [
        (SEQUENCES, torch.randn(2, 3, 90)),
        (SEQUENCES[4:], torch.randn(2, 90, 24).mT),
        (IMAGES, torch.randn(2, 3, 20, 30)),
        (IMAGES, torch.randn(2, 3, 20, 30).to(memory_format=torch.channels_last)),
        (VOLUMES, torch.randn(2, 3, 5, 12, 14)),
    ],
    ids=["sequences", "views", "images", "channels last", "volumes"],
)
def test_next_layers_of_other_kinds(
    passes: Passes, model: nn.Sequential, example: Tensor, half: bool, recorded: bool
) -> None:
    """All layers but the first are begun before their calls, and nothing else is."""
    model = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=half), torch.set_grad_enabled(recorded):
        model(example)
    assert len(passes.needed) == sum("Pool" not in type(one).__name__ for one in model)
    guesses = [need for need in passes.begun if need in passes.needed]
    assert set(guesses) == set(passes.needed[1:])
    if not recorded:
        assert set(passes.begun) == set(guesses)


def test_layers_along_other_axes_are_not_guessed(passes: Passes) -> None:
    model = nn.Sequential(
        fastconv.Conv2d(8, 8, 1), nn.Flatten(2), fastconv.Conv1d(8, 8, 1),
        fastconv.ConvTranspose1d(8, 8, 2),
    )  # fmt: skip
    with torch.no_grad():
        model(torch.randn(1, 8, 6, 6))
    assert passes.begun == passes.needed[2:]


def test_how_far_it_looks(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins a few passes that are not ready; the next one last, to be compiled first."""
    model = nn.Sequential(*(fastconv.Conv2d(8 * i, 8 * i + 8, 1) for i in range(1, 9)))
    model[:2](torch.randn(1, 8, 6, 6))
    passes.begun.clear()
    monkeypatch.setattr(cuda, "_made", dict.fromkeys(passes.needed))
    model(torch.randn(1, 8, 6, 6)[..., :5].contiguous())
    channels = [need.problem.in_channels for need in passes.guesses]
    assert channels[: lookahead.LAYERS] == [40, 32, 24, 16]


@pytest.mark.parametrize("other", ["channels", "copied", "class", "fused", "computed"])
def test_layers_that_cannot_be_guessed(passes: Passes, other: str) -> None:
    """Their weights are not read, either: to compute them may change buffers."""

    class Other(fastconv.Conv2d):
        pass

    layer: nn.Module = {
        "channels": lambda: fastconv.Conv2d(16, 8, 1),
        "copied": lambda: fastconv.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        "class": lambda: Other(8, 8, 1),
        "fused": lambda: fastconv.FusedConv2d(8, 8, 1),
        "computed": lambda: nn.utils.parametrizations.spectral_norm(fastconv.Conv2d(8, 8, 1)),
    }[other]()
    before = [tensor.clone() for tensor in layer.buffers()]
    model = nn.Sequential(fastconv.Conv2d(8, 8, 3), nn.Identity(), layer)
    model[:2](torch.randn(1, 8, 9, 9))
    model.forward = model[:2].forward  # type: ignore[method-assign]
    model(torch.randn(1, 8, 10, 9))
    assert not passes.guesses
    assert all(map(torch.equal, layer.buffers(), before))


def test_weights_of_copied_layers_are_computed_once(passes: Passes) -> None:
    computed = nn.utils.parametrizations.spectral_norm(fastconv.Conv2d(8, 8, 1))
    model = nn.Sequential(computed, copy.deepcopy(computed))
    twins = copy.deepcopy(model)
    model(torch.randn(1, 8, 9, 9))
    [layer.weight for layer in twins]
    for buffer, expected in zip(model.buffers(), twins.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected)


def test_replaced_forwards_see_no_tensor_without_data(passes: Passes) -> None:
    model = _network()
    seen: list[Tensor] = []
    pool = model[1].forward
    model[1].forward = lambda x: (seen.append(x), pool(x))[1]
    model(torch.randn(2, 3, 45, 70))
    assert [x.device.type for x in seen] == ["cpu"]


def test_networks_that_cannot_be_guessed(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions pool between all layers: after some misses, nothing more is begun."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(fastconv.Conv2d(8, 8, 3, padding=1) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = nn.functional.max_pool2d(layer(x), 2, 1)
            return x

    dropped: list[cuda.Need] = []
    monkeypatch.setattr(pool, "cancel_ahead", dropped.append)
    Pooling()(torch.randn(1, 8, 30, 30))
    misses = lookahead.MOST_MISSES
    assert len(passes.guesses) == misses  # one for each layer, as the layers are equal
    model = Pooling()
    for size in (40, 41, 42):
        model(torch.randn(1, 8, size, 30))
    assert len(passes.guesses) == 2 * misses


def test_wrong_guesses_are_dropped(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[cuda.Need] = []
    monkeypatch.setattr(pool, "cancel_ahead", dropped.append)
    layers = [fastconv.Conv2d(8 * i, 8 * i + 8, 1) for i in range(1, 6)]
    nn.Sequential(layers[0], nn.Upsample(scale_factor=2), *layers[1:])(torch.randn(1, 8, 6, 6))
    assert {need.problem.in_channels for need in dropped} == {24, 32, 40}
    assert {need.problem.input_size for need in dropped} == {(6, 6)}


def test_a_wrong_guess_is_no_error(passes: Passes) -> None:
    """The kernel is larger than its assumed input, which a module enlarges."""
    layers = fastconv.Conv2d(4, 4, 3), nn.Upsample(scale_factor=4), fastconv.Conv2d(4, 4, 9)
    output = nn.Sequential(*layers)(torch.randn(1, 4, 9, 9))
    assert output.shape == (1, 4, 20, 20)
    assert not passes.guesses


def test_functions_have_no_next_layer(passes: Passes) -> None:
    model = _network()
    first = model[0]
    fastconv.conv2d(torch.randn(2, 3, 45, 70), first.weight, first.bias, 2, 3)
    first.forward(torch.randn(2, 3, 46, 70))
    assert not passes.guesses


def test_guessed_passes_are_used(passes: Passes, compiled: list[str]) -> None:
    model = _network()
    with torch.no_grad():
        model(torch.randn(2, 3, 45, 70))
    assert len(compiled) == len(set(compiled))
    assert len(passes.needed) == len(set(passes.needed)) == 9
    _wait_for_threads()
    assert not pool._workers._tasks


def test_the_table_of_ready_passes_is_bounded(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as many as plans are kept, even if sizes change all the time."""
    monkeypatch.setattr(cuda, "MOST_READY", 3)
    with torch.no_grad():
        for size in range(10, 16):
            fastconv.conv2d(*_tensors(size=size))
    assert [*cuda._made] == passes.needed[-3:]
    assert all(map(cuda.is_ready, passes.needed[-3:]))
    assert not cuda.is_ready(passes.needed[0])
