"""The operators in C++ on a GPU: the dispatcher's calls, compiled models, CUDA graphs, profiles."""

from __future__ import annotations

import copy
import importlib.util
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import fastconv
from fastconv import native, ops
from gpu.helpers import CUDA

needs_inductor = pytest.mark.skipif(
    not importlib.util.find_spec("triton") or not any(map(shutil.which, ("cc", "gcc"))),
    reason="Inductor needs triton and a C compiler",
)


@pytest.fixture(autouse=True)
def _by_the_library(_native_library: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library serves eager calls and operators, as it does for users."""
    monkeypatch.setattr(native, "conv2d", _native_library)
    native.serve_operators(True)
    yield
    native.serve_operators(False)


@pytest.fixture
def _poison() -> Iterator[None]:
    """Fills uninitialised tensors with NaN, so that reading one shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Layer:
    """A convolution; ``last`` is its memory format, channels-last or contiguous."""

    input: tuple[int, int, int, int]
    outputs: int
    kernel: tuple[int, int]
    dtype: torch.dtype
    last: bool = False
    stride: int = 1
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def padding(self) -> tuple[int, ...]:
        return tuple(
            step * (taps - 1) // 2 for taps, step in zip(self.kernel, self.dilation, strict=True)
        )

    def module(self) -> Any:
        made = fastconv.Conv2d(
            self.input[1], self.outputs, self.kernel, self.stride, self.padding, self.dilation,
            self.groups,
        )  # fmt: skip
        return self.placed(made.to(CUDA, self.dtype))

    def images(self) -> Tensor:
        return self.placed(torch.randn(self.input, device=CUDA, dtype=self.dtype))

    def placed(self, what: Any) -> Any:
        format = torch.channels_last if self.last else torch.contiguous_format
        return what.to(memory_format=format)


HALF = torch.bfloat16
# A layer for each kernel that the planner chooses between on Hopper, and some for all GPUs.
LAYERS = {
    "halo": Layer((3, 32, 60, 210), 64, (5, 9), torch.float32, dilation=(2, 3)),
    "halo_half": Layer((3, 32, 60, 210), 64, (5, 9), HALF),
    "implicit_gemm_nhwc": Layer((4, 128, 29, 31), 128, (3, 3), HALF, last=True),
    "pointwise_nhwc": Layer((4, 256, 28, 28), 64, (1, 1), HALF, last=True),
    "pointwise_nchw": Layer((4, 256, 28, 28), 64, (1, 1), torch.float32),
    "few_outputs": Layer((2, 64, 120, 96), 2, (3, 3), torch.float32),
    "stem": Layer((4, 3, 96, 90), 64, (7, 7), HALF, last=True, stride=2),
    "groups": Layer((4, 128, 28, 30), 128, (3, 3), HALF, last=True, groups=4),
    "depthwise": Layer((4, 96, 33, 35), 96, (7, 7), torch.float32, groups=96),
    "depthwise_nhwc": Layer((4, 96, 33, 35), 96, (3, 3), HALF, last=True, groups=96),
    "direct": Layer((2, 6, 17, 19), 8, (3, 2), torch.float64),
}
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def _step(
    run: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], images: Tensor,
    grad_output: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The output of a layer or network, and all gradients."""
    leaf = images.detach().requires_grad_()
    output = run(leaf)
    wanted = [leaf, *parameters]
    return [output.detach(), *torch.autograd.grad(output, wanted, grad_output)]


def _assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.stride() == other.stride(), index
        assert torch.equal(one, other), index


@every_layer
@pytest.mark.usefixtures("_poison")
def test_operators_are_pythons(layer: Layer) -> None:
    """The operators in C++ compute the bits that Python's compute, with the same strides."""
    module, images = layer.module(), layer.images()
    weight, bias = module.weight, module.bias
    last = (
        (layer.stride,) * 2, (layer.padding[0],) * 2 + (layer.padding[1],) * 2, layer.dilation,
        layer.groups, None,
    )  # fmt: skip
    with torch.no_grad():
        output = module(images)
    residual, grad_output = torch.randn_like(output), torch.randn_like(output)

    def results() -> list[Tensor]:
        recorded = _step(
            lambda x: ops.forward(x, weight, bias, *last), (weight, bias), images, grad_output
        )
        with torch.no_grad():
            return [
                *recorded,
                ops.forward(images, weight, bias, *last),
                ops.fused(images, weight, bias, residual, *last, "silu", 0.0),
                ops.input_grad(grad_output, weight, images.shape[2:], *last),
                *ops.weight_grad(grad_output, images, weight.shape[2:], *last, True),
                *ops.backward(grad_output, images, weight, *last, False, True),
            ]

    found = results()
    native.serve_operators(False)
    _assert_same(found, results())


@pytest.mark.usefixtures("_poison")
class TestGraphs:
    """Graphs captured by hand: replays with new data give the bits of eager calls."""

    @every_layer
    def test_training(self, layer: Layer) -> None:
        module, images = layer.module(), layer.images()
        grad_output = torch.randn_like(module(images).detach())
        run = partial(_step, module, list(module.parameters()), images, grad_output)
        run()  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(3):
            with torch.no_grad():
                for tensor in (images, grad_output, *module.parameters()):
                    tensor.copy_(torch.randn_like(tensor))
            graph.replay()
            _assert_same(captured, run())

    @every_layer
    @pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
    def test_inference(self, layer: Layer, frozen: bool) -> None:
        """Packed weights that an eager call has cached must not be what a graph reads for ever."""
        module, images = layer.module(), layer.images()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), fastconv.frozen_weights() if frozen else nullcontext():
            module(images)
            with torch.cuda.graph(graph):
                captured = module(images)
        for _ in range(3):
            with torch.no_grad():
                for tensor in (images, *module.parameters()):
                    tensor.copy_(torch.randn_like(tensor))
            graph.replay()
            with torch.no_grad():
                assert torch.equal(captured, module(images))

    def test_a_first_call_in_a_capture(self) -> None:
        """A graph may hold a form's first call: nothing that compiling does is captured."""
        layer = Layer((2, 20, 23, 37), 24, (3, 3), HALF, last=True)
        module, images, graph = layer.module(), layer.images(), torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = module(images)
        images.copy_(torch.randn_like(images))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(captured, module(images))

    def test_graphed_callables(self) -> None:
        network = _network()
        eager = copy.deepcopy(network)  # make_graphed_callables changes its module in place.
        sample = torch.randn(4, 3, 32, 40, device=CUDA, requires_grad=True)
        graphed = torch.cuda.make_graphed_callables(network, (sample,))
        eager.load_state_dict(network.state_dict())  # Capturing has changed BatchNorm's statistics.
        for _ in range(2):
            images = torch.randn_like(sample)
            grad_output = torch.randn_like(eager(images).detach())
            both = [
                _step(one, list(one.parameters()), images, grad_output) for one in (graphed, eager)
            ]
            for found, expected in zip(*both, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Network(nn.Module):
    """A residual network of a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = fastconv.Conv2d(3, 32, 3, 2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.deep = fastconv.Conv2d(32, 32, (3, 5), padding=(1, 2), groups=2)
        self.wide = fastconv.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32)
        self.last = fastconv.Conv2d(32, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        found = functional.relu(self.norm(self.stem(images)))
        found = functional.silu(self.deep(found) + found)
        output: Tensor = self.last(functional.relu(self.wide(found)))
        return output


def _network() -> Any:
    made: Any = Network()
    return made.to(CUDA, memory_format=torch.channels_last)


def _gradients(run: Callable[[Tensor], Tensor], network: nn.Module, images: Tensor) -> list[Tensor]:
    """The output and the gradients of a step, copied: CUDA graphs reuse their memory."""
    torch.compiler.cudagraph_mark_step_begin()
    output = run(images)
    grads = torch.autograd.grad(output.square().mean(), list(network.parameters()))
    return [one.detach().clone() for one in (output, *grads)]


@needs_inductor
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_compiled_network(mode: str, training: bool) -> None:
    """Compiled models compute what eager ones do, without a break, and as CUDA graphs if asked."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    network = _network().train(training)
    compiled = torch.compile(network, mode=mode, fullgraph=True)
    for _ in range(4):  # Compiled, warmed up, captured, replayed.
        images = torch.randn(4, 3, 32, 40, device=CUDA).to(memory_format=torch.channels_last)
        if training:
            found = _gradients(compiled, network, images)
            expected = _gradients(network, network, images)
        else:
            with torch.no_grad():
                torch.compiler.cudagraph_mark_step_begin()
                found, expected = [compiled(images).clone()], [network(images)]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["inductor"]["cudagraph_skips"] == 0


class Blocks(nn.Module):
    """Convolutions with batch normalization; one averages all batches, one adds a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fastconv.ConvBNAct2d(3, 32, 3, 2, padding=1)
        self.second = fastconv.ConvBNAct2d(32, 32, 3, padding=1, momentum=None, activation="silu")
        self.last = fastconv.Conv2d(32, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        found = self.first(images)
        output: Tensor = self.last(self.second(found, residual=found))
        return output


@needs_inductor
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_compiled_blocks(mode: str, last: bool) -> None:
    """Replayed graphs update running statistics and the number of batches in each step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    format = torch.channels_last if last else torch.contiguous_format
    made: Any = Blocks()
    network = made.to(CUDA, memory_format=format)
    eager = copy.deepcopy(network)
    compiled = torch.compile(network, mode=mode, fullgraph=True)
    for _ in range(5):  # Compiled, warmed up, captured, replayed twice.
        images = torch.randn(4, 3, 32, 40, device=CUDA).to(memory_format=format)
        found = _gradients(compiled, network, images)
        expected = _gradients(eager, eager, images)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(
            list(network.buffers()), list(eager.buffers()), rtol=1e-4, atol=1e-5
        )
    assert int(network.second.bn.num_batches_tracked) == 5
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.usefixtures("_poison")
def test_norm_operators_are_pythons(last: bool) -> None:
    """Bit for bit, with the same strides."""
    layer = Layer((8, 64, 28, 29), 64, (1, 1), HALF, last=last)
    x, residual, grad = (layer.images() for _ in range(3))
    weight, bias = torch.rand(2, 64, device=CUDA)

    def results() -> list[Tensor]:
        found: list[Tensor] = []
        for training, activation in ((True, "relu"), (True, "identity"), (False, "silu")):
            running = [torch.zeros(64, device=CUDA), torch.ones(64, device=CUDA)]
            options = (None, training, 0.1, 1e-5, activation, 0.0)
            y, mean, invstd = torch.ops.fastconv.batch_norm_forward(
                x, residual, weight, bias, *running, *options
            )
            beside = {"relu": y, "silu": residual}.get(activation)
            grads = torch.ops.fastconv.batch_norm_backward(
                grad, x, beside, weight, bias, mean, invstd, training, True, activation, 0.0,
                *3 * (True,),
            )  # fmt: skip
            found += [y, mean, invstd, *running, *grads]
        return found

    found = results()
    native.serve_operators(False)
    _assert_same(found, results())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_inductor)])
def test_profiler(compiled: bool) -> None:
    """Profiles have our operators by name, with shapes, and the GPU time of their kernels."""
    layer = LAYERS["implicit_gemm_nhwc"]
    module, images = layer.module(), layer.images().requires_grad_()
    run: Any = torch.compile(module, fullgraph=True) if compiled else module
    for _ in range(2):
        run(images).sum().backward()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as found:
        run(images).sum().backward()
        torch.cuda.synchronize()
    events = {event.key: event for event in found.key_averages(group_by_input_shape=True)}
    for name in ("forward", "backward"):
        event = events[f"fastconv::{name}"]
        assert event.input_shapes[0] == list(layer.input), name
        assert event.device_time_total > 0, name
