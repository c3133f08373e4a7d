"""Whole networks, eager, before and after ``fastconv.optimize``.

A sample is one step by the wall clock, from an idle device until the device is done, so the host's
time counts. The contestants take turns, sample by sample. A network is built without trained
weights, and everything of a row is freed before the next.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import fastconv
from fastconv import timing
from fastconv.bench import contestants, models
from fastconv.bench.cases import FORMATS, reason
from fastconv.bench.console import MissingExtra
from fastconv.bench.results import NetworkRow, Optimized
from fastconv.bench.timing import Timing, extra_mib, first_call_ms
from fastconv.network.dry_run import tensors_of
from fastconv.network.report import Optimization
from fastconv.timing import Effort

UNET = "unet"
UNET_IMAGE = (3, 256, 256)
NETWORKS = (
    "resnet50", "convnext_tiny", "efficientnet_b0", "inception_v3", "deeplabv3_resnet50", "vgg16",
    UNET,
)  # fmt: skip
BATCHES = {UNET: 16, "deeplabv3_resnet50": 16}  # whose outputs are images; of others, models.BATCH
TRAINING, INFERENCE = "training", "inference"
MODES = (TRAINING, INFERENCE)
COMPILE_MODE = "default"  # of torch.compile


@dataclass(frozen=True)
class Configuration:
    """How a network computes; its weights are float32."""

    name: str
    precision: str | None  # of float32 products; None: there are none
    autocast: torch.dtype | None
    format: torch.memory_format


CONFIGURATIONS = {
    "float32": Configuration("float32 tf32 nchw", "tf32", None, FORMATS["nchw"]),
    "bfloat16": Configuration("bfloat16 autocast nhwc", None, torch.bfloat16, FORMATS["nhwc"]),
}
"""By what ``--dtype`` calls them."""


@dataclass(frozen=True)
class NetworkCase:
    """One row before it is measured."""

    network: str
    mode: str
    configuration: Configuration
    batch: int
    side: int | None  # of the images; None: as the network has them

    @property
    def label(self) -> str:
        return self.outcome().label

    def outcome(self, **found: Any) -> NetworkRow:
        """The row, with what was found."""
        return NetworkRow(self.network, self.mode, self.configuration.name, **found)

    @contextmanager
    def circumstances(self, device: torch.device) -> Iterator[None]:
        """Those in which the network is called, and optimized."""
        dtype = self.configuration.autocast
        with (
            torch.set_grad_enabled(self.mode == TRAINING),
            torch.autocast(device.type, dtype, enabled=dtype is not None),
        ):
            yield


def cases(
    names: Sequence[str],
    modes: Sequence[str] = MODES,
    dtypes: Sequence[str] = tuple(CONFIGURATIONS),
    batch: int | None = None,
    side: int | None = None,
) -> list[NetworkCase]:
    """All rows, network by network."""
    return [
        NetworkCase(
            name, mode, CONFIGURATIONS[dtype], batch or BATCHES.get(name, models.BATCH), side
        )
        for name in dict.fromkeys(names)
        for dtype in dict.fromkeys(dtypes)
        for mode in dict.fromkeys(modes)
    ]


def row(case: NetworkCase, device: torch.device, effort: Effort, compile: bool) -> NetworkRow:
    """The case measured, with ``compile`` beside torch.compile in inference; or why it was not."""
    try:
        with contestants.settings(case.configuration.precision):
            return _measured(case, device, effort, compile and case.mode == INFERENCE)
    except MissingExtra as missing:
        return case.outcome(skipped=str(missing))
    except Exception as error:  # whatever it is, the other rows are worth having
        why = reason(error, f"a smaller --batch than {case.batch} may fit")
        return case.outcome(error=why)
    finally:
        if compile:
            torch._dynamo.reset()  # compiled code keeps what it was compiled for
        gc.collect()  # networks are cycles of references, graphs above all
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(case: NetworkCase, device: torch.device, effort: Effort, compile: bool) -> NetworkRow:
    network, images = _made(case, device)
    runs = [_Contestant(case, network, images)]  # first, before optimize tries algorithms out
    with case.circumstances(device):
        optimized: Any = fastconv.optimize(network, images, progress=False)
    runs.append(_Contestant(case, optimized, images))
    if compile:
        runs.append(_Contestant(case, torch.compile(network, mode=COMPILE_MODE), images))
    difference = None if case.mode == TRAINING else _difference(runs[0].run(), runs[1].run())
    peer, ours, *compiled = _timings(runs, device, effort)
    return case.outcome(
        images="x".join(map(str, images.shape)),
        ours=ours,
        peer=peer,
        compiled=compiled[0] if compiled else None,
        compile_mode=COMPILE_MODE if compiled else None,
        optimized=_summarised(network, optimized.fastconv_optimization),
        difference=difference,
    )


def _made(case: NetworkCase, device: torch.device) -> tuple[nn.Module, Tensor]:
    """The network and a batch of images, as the case has them."""
    network, (channels, *size) = _build(case.network)
    if case.side is not None:
        size = [case.side, case.side]
    format = case.configuration.format
    images = torch.randn(case.batch, channels, *size, device=device).to(memory_format=format)
    return network.train(case.mode == TRAINING).to(device=device, memory_format=format), images


def _build(name: str) -> tuple[Any, tuple[int, ...]]:  # Any: annotations of nn.Module.to have gaps
    return (UNet(), UNET_IMAGE) if name == UNET else models.build(name)


class _Contestant:
    """A network that takes steps; it has taken the first."""

    def __init__(self, case: NetworkCase, network: Any, images: Tensor) -> None:
        self._case, self._network, self._images = case, network, images
        self.first_call_ms = first_call_ms(self.run, images.device)
        self.clear()

    def run(self) -> list[Tensor]:
        """A step: forward, and in training backward, of the sum of the outputs' means."""
        with self._case.circumstances(self._images.device):
            results = tensors_of(self._network(self._images))
            outputs = [one for one in results if one.is_floating_point()]
        if self._case.mode == TRAINING:
            torch.stack([one.float().mean() for one in outputs]).sum().backward()
            return []
        return outputs

    def clear(self) -> None:
        self._network.zero_grad(set_to_none=True)


def _timings(runs: Sequence[_Contestant], device: torch.device, effort: Effort) -> list[Timing]:
    def clear() -> None:
        """Of all: a step should not find another's gradients in its memory."""
        for one in runs:
            one.clear()

    samples = timing.take_wall_turns(
        [one.run for one in runs], device, effort, [clear] * len(runs)
    )  # fmt: skip
    timings = []
    for one, taken in zip(runs, samples, strict=True):
        clear()
        median, extra = statistics.median(taken), extra_mib(one.run, device)
        timings.append(
            Timing(median, timing.spread(taken), len(taken), one.first_call_ms, extra_mib=extra)
        )
    return timings


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest relative difference of an output, in the Euclidean norm."""
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        norm = one.double().norm()
        relative = float((other.double() - one.double()).norm() / norm)
        if not math.isfinite(relative):
            raise ValueError(f"outputs cannot be compared: PyTorch's have the norm {norm:.3g}")
        largest = max(largest, relative)
    return largest


def _summarised(network: nn.Module, report: Optimization) -> Optimized:
    timed = [(layer, layer.times) for layer in report.layers if layer.times is not None]
    return Optimized(
        layers=sum(isinstance(module, nn.Conv2d) for module in network.modules()),
        exchanged=len(report.exchanged),
        folded=report.folded,
        fused=report.fused,
        measured=report.measured,
        seconds=report.seconds,
        before_ms=sum(layer.calls * times.theirs for layer, times in timed),
        after_ms=sum(layer.chosen_ms(times) for layer, times in timed),
        notes="; ".join(report.notes),
    )


class UNet(nn.Module):
    """The usual U-Net: 5 levels, each twice as wide as the one above, ``width`` at the top."""

    def __init__(self, width: int = 64, levels: int = 5, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        steps = list(pairwise(widths))
        self.top = _twice(UNET_IMAGE[0], width)
        self.down = nn.ModuleList(_twice(narrow, wide) for narrow, wide in steps)
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in reversed(steps)
        )
        self.up = nn.ModuleList(_twice(wide, narrow) for narrow, wide in reversed(steps))
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        passed = [self.top(images)]
        for level in self.down:
            passed.append(level(self.pool(passed[-1])))
        found = passed.pop()
        for widen, level in zip(self.widen, self.up, strict=True):
            found = level(torch.cat([passed.pop(), widen(found)], dim=1))
        classified: Tensor = self.classify(found)
        return classified


def _twice(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(
            layer
            for inputs in (channels, width)
            for layer in (
                nn.Conv2d(inputs, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            )
        )
    )
