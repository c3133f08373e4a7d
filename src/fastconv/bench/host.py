"""Host time of eager calls: how long the processor takes to queue them, ours and PyTorch's.

A sample is the time of a burst of calls, from an idle device until the last of them returns. A
burst of small calls makes fewer launches than a stream's queue holds, so none waits for the device;
a step of a network may make more. The contestants take turns, sample by sample. On a CPU the time
is that of computing.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import fastconv
from fastconv import timing
from fastconv.bench import contestants
from fastconv.bench.cases import reason
from fastconv.bench.results import HostRow, HostTiming

# Of the small convolution in a burst: some hundred launches, where the queue holds a thousand. On a
# CPU, where the figures say little about queueing, as many as tests have time for.
CALLS = {"cuda": 50, "cpu": 5}
NETWORK_INPUTS = {"cuda": (64, 3, 224, 224), "cpu": (2, 3, 32, 32)}
SMALL = "3x3, 16 to 16 channels, 1x16x16x16"
MOST_SAMPLES = 100  # of each contestant
WARM_UPS = 3  # samples that do not count: they compile, try algorithms out and fill the allocator
LAYERS = 20

Run = Callable[[], object]
"""Makes the calls of a sample: what is timed."""

Contestant = Callable[[], Run]
"""Prepares a sample, untimed."""


class Skipped(Exception):
    """A case that cannot be measured here, which is no failure; says why."""


@dataclass(frozen=True)
class HostCase:
    """What is called, and how often in a sample."""

    name: str  # stable: results of different versions are compared by it
    about: str
    calls: int
    contestants: Callable[[], tuple[Contestant, Contestant]]  # ours and PyTorch's


def cases(device: torch.device) -> list[HostCase]:
    """All cases, in the order of the table."""
    return [*_small_cases(device), *_network_cases(device)]


def _small_cases(device: torch.device) -> list[HostCase]:
    calls = CALLS[device.type]
    passes: list[tuple[str, str, Callable[[_Small], Run]]] = [
        ("small_forward", "forward, no_grad", _Small.forward),
        ("small_forward_recorded", "forward, recorded", _Small.recorded),
        ("small_backward", "backward, three gradients", _Small.backward),
        ("small_input_grad", "backward, the input's gradient", _Small.input_grad),
    ]
    return [
        HostCase(name, f"{SMALL}: {about}", calls, partial(_small, device, make))
        for name, about, make in passes
    ]


def _network_cases(device: torch.device) -> list[HostCase]:
    batch, _, height, width = NETWORK_INPUTS[device.type]
    resnet50 = f"ResNet-50, bfloat16 autocast, NHWC, {batch}x3x{height}x{width}"
    networks: list[tuple[str, str, Callable[[], tuple[Contestant, Contestant]]]] = [
        (
            "layers20_step", f"{LAYERS} layers {SMALL}: forward, backward",
            partial(_layers, device),
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
    """The case measured for at most about so many seconds, or why it was not."""
    try:
        with contestants.settings("tf32"):  # what PyTorch's own default for convolutions is
            ours, peer = take_turns(case.contestants(), case.calls, device, seconds)
    except Skipped as why:
        return HostRow(case.name, case.about, skipped=str(why))
    except Exception as error:  # whatever it is, the other rows are worth having
        return HostRow(case.name, case.about, error=reason(error, "the other rows need less"))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return HostRow(case.name, case.about, HostTiming.of(ours), HostTiming.of(peer))


def take_turns(
    contestants: Sequence[Contestant], calls: int, device: torch.device, seconds: float
) -> list[list[float]]:
    """Microseconds of a call, sample by sample, of each contestant."""
    for prepare in contestants:
        for _ in range(WARM_UPS):
            _sample_us(prepare, device)
    samples: list[list[float]] = [[] for _ in contestants]
    end = time.perf_counter() + seconds
    for taken in range(1, MOST_SAMPLES + 1):
        for of_one, prepare in zip(samples, contestants, strict=True):
            of_one.append(_sample_us(prepare, device) / calls)
        if taken >= timing.LEAST_SAMPLES and time.perf_counter() > end:
            break
    return samples


def with_fastconv(network: nn.Module) -> nn.Module:
    """The network with a fastconv.Conv2d for each nn.Conv2d; both have the same parameters."""
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    made = copy.deepcopy(network, shared)  # what is in there already is not copied
    for module in made.modules():
        if type(module) is nn.Conv2d:  # a subclass may compute something else
            module.__class__ = fastconv.Conv2d
    return made


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
    """A convolution of which little but the host's work remains."""

    input: Tensor
    weight: Tensor
    bias: Tensor
    grad_output: Tensor
    conv2d: Callable[..., Tensor]
    calls: int

    def recorded(self) -> Run:
        def run() -> None:
            for _ in range(self.calls):
                self._call()

        return run

    def forward(self) -> Run:
        return torch.no_grad()(self.recorded())

    def backward(self) -> Run:
        return self._gradients(self.input, self.weight, self.bias)

    def input_grad(self) -> Run:
        return self._gradients(self.input)

    def _call(self) -> Tensor:
        return self.conv2d(self.input, self.weight, self.bias, padding=1)

    def _gradients(self, *wanted: Tensor) -> Run:
        outputs = [self._call() for _ in range(self.calls)]  # backward uses a graph up

        def run() -> None:
            for output in outputs:
                torch.autograd.grad(output, wanted, self.grad_output)

        return run


def _small(device: torch.device, make: Callable[[_Small], Run]) -> tuple[Contestant, Contestant]:
    """The small convolution through either function, on the same tensors."""
    image, kernel = (1, 16, 16, 16), (16, 16, 3, 3)
    input, weight, bias = (
        torch.randn(shape, device=device, requires_grad=True) for shape in (image, kernel, (16,))
    )
    tensors, calls = (input, weight, bias, torch.randn(image, device=device)), CALLS[device.type]
    ours = _Small(*tensors, fastconv.conv2d, calls)
    peer = _Small(*tensors, functional.conv2d, calls)
    return partial(make, ours), partial(make, peer)


def _layers(device: torch.device) -> tuple[Contestant, Contestant]:
    peer = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(LAYERS))).to(device)
    image = torch.randn(1, 16, 16, 16, device=device)

    def contestant(network: nn.Module) -> Contestant:
        return _cleared(network, lambda: network(image).sum().backward())

    return contestant(with_fastconv(peer)), contestant(peer)


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
    """A training step that finds no gradients to add to."""

    def prepare() -> Run:
        network.zero_grad(set_to_none=True)
        return step

    return prepare
