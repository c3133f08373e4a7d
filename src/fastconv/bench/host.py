"""``fastconv bench --host``: how long the CPU takes to queue calls, ours and PyTorch's.

A sample is the time of a burst of calls, from an idle device until the last call returns. A burst
of small calls makes fewer launches than a stream's queue holds, so no call waits for the device; a
step of a network may make more. The contestants are sampled in turn. On a CPU, calls compute before
they return, so that the samples are computing times.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import fastconv
from fastconv import timing
from fastconv.bench import contestants
from fastconv.bench.cases import reason
from fastconv.bench.results import HostRow, HostTiming

# Calls of the small convolution in a burst. On a GPU they make some hundred launches, and a
# stream's queue holds about a thousand. On a CPU, where the figures say little about queueing, few
# calls keep the tests short.
CALLS = {"cuda": 50, "cpu": 5}
NETWORK_INPUTS = {"cuda": (64, 3, 224, 224), "cpu": (2, 3, 32, 32)}
MOST_SAMPLES = 100  # At most this many samples are taken of each contestant.
WARM_UPS = 3  # Dropped samples, which compile, try algorithms out and fill the allocator.
LAYERS = 20  # Layers of the network of small convolutions.


class Form(NamedTuple):
    """A convolution so small that nearly all of its time is host time; it has a bias."""

    function: str  # of fastconv, and of torch.nn.functional
    about: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: dict[str, int]


SMALL = Form(
    "conv2d", "3x3, 16 to 16 channels, 1x16x16x16", (1, 16, 16, 16), (16, 16, 3, 3), {"padding": 1}
)
SEQUENCE = Form(
    "conv1d", "1-D of 3 taps, 16 to 16 channels, 1x16x256", (1, 16, 256), (16, 16, 3),
    {"padding": 1},
)  # fmt: skip
TRANSPOSED = Form(
    "conv_transpose2d", "transposed 4x4 of stride 2, 16 to 16 channels, 1x16x16x16",
    (1, 16, 16, 16), (16, 16, 4, 4), {"stride": 2, "padding": 1},
)  # fmt: skip
VOLUME = Form(
    "conv3d", "3x3x3, 16 to 16 channels, 1x16x4x8x8", (1, 16, 4, 8, 8), (16, 16, 3, 3, 3),
    {"padding": 1},
)  # fmt: skip

Run = Callable[[], object]
"""Makes the calls of a sample, which are timed."""

Contestant = Callable[[], Run]
"""Prepares a sample, untimed, and returns the function to time."""


class Skipped(Exception):
    """A case cannot be measured on this machine, which is not a failure; says why."""


@dataclass(frozen=True)
class HostCase:
    """A row of the table: what is called, and how often in a sample."""

    name: str  # the same in all versions, so that their results can be compared
    about: str
    calls: int
    contestants: Callable[[], tuple[Contestant, Contestant]]  # makes ours and PyTorch's


def cases(device: torch.device) -> list[HostCase]:
    """All cases, in the order of the table."""
    return [*_small_cases(device), *_network_cases(device)]


def _small_cases(device: torch.device) -> list[HostCase]:
    calls = CALLS[device.type]
    forward = ("forward, no_grad", _Small.forward)
    recorded = ("forward, recorded", _Small.recorded)
    passes: list[tuple[str, Form, tuple[str, Callable[[_Small], Run]]]] = [
        ("small_forward", SMALL, forward),
        ("small_forward_recorded", SMALL, recorded),
        ("small_backward", SMALL, ("backward, three gradients", _Small.backward)),
        ("small_input_grad", SMALL, ("backward, the input's gradient", _Small.input_grad)),
        ("small_conv1d", SEQUENCE, forward),
        ("small_conv1d_recorded", SEQUENCE, recorded),
        ("small_transposed", TRANSPOSED, forward),
        ("small_transposed_recorded", TRANSPOSED, recorded),
        ("small_conv3d", VOLUME, forward),
        ("small_conv3d_recorded", VOLUME, recorded),
    ]
    operator = f"{SMALL.about}: the operator, by PyTorch's dispatcher, no_grad"
    return [
        *(
            HostCase(name, f"{form.about}: {what}", calls, partial(_small, device, form, make))
            for name, form, (what, make) in passes
        ),
        HostCase("small_operator", operator, calls, partial(_operator, device)),
    ]


def _network_cases(device: torch.device) -> list[HostCase]:
    batch, _, height, width = NETWORK_INPUTS[device.type]
    layers = f"{LAYERS} layers {SMALL.about}"
    resnet50 = f"ResNet-50, bfloat16 autocast, NHWC, {batch}x3x{height}x{width}"
    networks: list[tuple[str, str, Callable[[], tuple[Contestant, Contestant]]]] = [
        (
            "layers20_step", f"{layers}: forward, backward",
            partial(_layers, device, _step),
        ),
        (
            "layers20_compiled_step", f"{layers}, compiled: forward, backward",
            partial(_compiled_layers, device, _step),
        ),
        (
            "layers20_compiled_inference", f"{layers}, compiled: forward, no_grad",
            partial(_compiled_layers, device, _forward),
        ),
        (
            "resnet50_step", f"{resnet50}: forward, loss, backward",
            partial(_resnet50, device, _training),
        ),
        (
            "resnet50_inference", f"{resnet50}: forward, no_grad",
            partial(_resnet50, device, _inference),
        ),
    ]  # fmt: skip
    return [HostCase(name, about, 1, contestants) for name, about, contestants in networks]


def row(case: HostCase, device: torch.device, seconds: float) -> HostRow:
    """Measures a case for about ``seconds`` at most; the row of a case that fails says why."""
    try:
        with contestants.settings("tf32"):  # PyTorch's default for convolutions
            ours, peer = take_turns(case.contestants(), case.calls, device, seconds)
    except Skipped as why:
        return HostRow(case.name, case.about, skipped=str(why))
    except Exception as error:  # One row must not stop the others, whatever is wrong.
        return HostRow(case.name, case.about, error=reason(error, "the other rows need less"))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return HostRow(case.name, case.about, HostTiming.of(ours), HostTiming.of(peer))


def take_turns(
    contestants: Sequence[Contestant], calls: int, device: torch.device, seconds: float
) -> list[list[float]]:
    """Samples the contestants in turn; returns each one's samples, in microseconds per call."""
    for prepare in contestants:
        for _ in range(WARM_UPS):
            _sample_us(prepare, device)
    samples: list[list[float]] = [[] for _ in contestants]
    end = time.perf_counter() + seconds
    for taken in range(1, MOST_SAMPLES + 1):
        for of_contestant, prepare in zip(samples, contestants, strict=True):
            of_contestant.append(_sample_us(prepare, device) / calls)
        if taken >= timing.LEAST_SAMPLES and time.perf_counter() >= end:
            break
    return samples


def with_fastconv(network: nn.Module) -> nn.Module:
    """A copy of the network with fastconv.Conv2d for nn.Conv2d; it shares all parameters."""
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    made = copy.deepcopy(network, shared)  # Objects in the memo, ``shared``, are not copied.
    return fastconv.convert(made, inplace=True)


def _sample_us(prepare: Contestant, device: torch.device) -> float:
    run = prepare()
    timing.synchronize(device)
    with timing.no_collections():
        start = time.perf_counter_ns()
        run()
        taken = time.perf_counter_ns() - start
    timing.synchronize(device)
    return taken / 1e3


@dataclass(frozen=True)
class _Small:
    """Calls of a small convolution by one contestant."""

    tensors: Sequence[Tensor]  # input, weight and bias
    function: Callable[..., Tensor]
    calls: int

    def recorded(self) -> Run:
        def run() -> None:
            for _ in range(self.calls):
                self.function(*self.tensors)

        return run

    def forward(self) -> Run:
        return torch.no_grad()(self.recorded())

    def backward(self) -> Run:
        return self._gradients(*self.tensors)

    def input_grad(self) -> Run:
        return self._gradients(self.tensors[0])

    def _gradients(self, *wanted: Tensor) -> Run:
        # Each graph serves one backward pass.
        outputs = [self.function(*self.tensors) for _ in range(self.calls)]
        grad_output = torch.randn_like(outputs[0])

        def run() -> None:
            for output in outputs:
                torch.autograd.grad(output, wanted, grad_output)

        return run


def _small(
    device: torch.device, form: Form, make: Callable[[_Small], Run]
) -> tuple[Contestant, Contestant]:
    """A small convolution by fastconv's function and by PyTorch's, on the same tensors."""
    shapes = (form.input, form.weight, (form.weight[1],))  # as many channels come out as go in
    tensors = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]

    def contestant(module: Any) -> Contestant:
        function = partial(getattr(module, form.function), **form.geometry)
        return partial(make, _Small(tensors, function, CALLS[device.type]))

    return contestant(fastconv), contestant(functional)


def _operator(device: torch.device) -> tuple[Contestant, Contestant]:
    """The small convolution by the operators that compiled graphs call, on the same tensors."""
    input, weight, bias = (
        torch.randn(shape, device=device) for shape in (SMALL.input, SMALL.weight, (16,))
    )

    def contestant(operator: Callable[..., Tensor], *geometry: object) -> Contestant:
        @torch.no_grad()
        def run() -> None:
            for _ in range(CALLS[device.type]):
                operator(input, weight, bias, *geometry)

        return lambda: run

    ours, peer = torch.ops.fastconv.forward.default, torch.ops.aten.convolution.default
    return (
        contestant(ours, (1, 1), (1, 1, 1, 1), (1, 1), 1, None),
        contestant(peer, (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    )


def _layers(
    device: torch.device, contestant: Callable[[nn.Module, Tensor], Contestant]
) -> tuple[Contestant, Contestant]:
    peer = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(LAYERS))).to(device)
    image = torch.randn(SMALL.input, device=device)
    return contestant(with_fastconv(peer), image), contestant(peer, image)


def _compiled_layers(
    device: torch.device, contestant: Callable[[nn.Module, Tensor], Contestant]
) -> tuple[Contestant, Contestant]:
    if device.type != "cuda":
        raise Skipped("networks are compiled on GPUs alone")

    def compiled(network: nn.Module, image: Tensor) -> Contestant:
        # Not network.compile(): PyTorch skips frames of its own nn.Sequential in that case.
        whole: Any = torch.compile(network, fullgraph=True)
        return contestant(whole, image)

    return _layers(device, compiled)


def _step(network: nn.Module, image: Tensor) -> Contestant:
    return _cleared(network, lambda: network(image).sum().backward())


def _forward(network: nn.Module, image: Tensor) -> Contestant:
    @torch.no_grad()
    def infer() -> None:
        network(image)

    return lambda: infer


def _resnet50(
    device: torch.device, contestant: Callable[[nn.Module, Tensor], Contestant]
) -> tuple[Contestant, Contestant]:
    try:
        models = importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        raise Skipped("torchvision is not installed: pip install torchvision") from error
    format = torch.channels_last
    peer = models.resnet50(weights=None).to(device=device, memory_format=format)
    images = torch.randn(NETWORK_INPUTS[device.type], device=device).to(memory_format=format)
    return contestant(with_fastconv(peer), images), contestant(peer, images)


def _training(network: nn.Module, images: Tensor) -> Contestant:
    network.train()
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = functional.cross_entropy(network(images), labels)
        loss.backward()

    return _cleared(network, step)


def _inference(network: nn.Module, images: Tensor) -> Contestant:
    network.eval()

    def infer() -> None:
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16):
            network(images)

    return lambda: infer


def _cleared(network: nn.Module, step: Run) -> Contestant:
    """A contestant whose gradients are cleared before each step, untimed."""

    def prepare() -> Run:
        network.zero_grad(set_to_none=True)
        return step

    return prepare
