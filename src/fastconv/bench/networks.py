"""``fastconv bench --networks``: whole eager networks, before and after ``fastconv.optimize``.

A sample is the wall-clock time of one step, from an idle device until the device is done, so that
host time counts. The contestants are sampled in turn. Networks are built without trained weights,
and everything of a row is freed before the next.
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
from _fastconv_command.choices import MODES as MODES
from _fastconv_command.choices import NETWORKS as NETWORKS
from _fastconv_command.choices import UNET as UNET
from fastconv import timing
from fastconv.bench import contestants, models
from fastconv.bench.cases import FORMATS, reason
from fastconv.bench.console import MissingExtra
from fastconv.bench.results import NetworkRow, Optimized
from fastconv.bench.row_timing import Timing, extra_mib, first_call_ms
from fastconv.network.dry_run import tensors_of
from fastconv.network.report import Optimization
from fastconv.timing import Effort

UNET_IMAGE = (3, 256, 256)
# Networks whose outputs are images have smaller batches than models.BATCH.
BATCHES = {UNET: 16, "deeplabv3_resnet50": 16}
TRAINING, INFERENCE = MODES
COMPILE_MODE = "default"  # the mode of torch.compile


@dataclass(frozen=True)
class Configuration:
    """How a network computes; its weights are float32."""

    name: str
    precision: str | None  # the arithmetic of float32 convolutions; None if there are none
    autocast: torch.dtype | None
    format: torch.memory_format


CONFIGURATIONS = {
    "float32": Configuration("float32 tf32 nchw", "tf32", None, FORMATS["nchw"]),
    "bfloat16": Configuration("bfloat16 autocast nhwc", None, torch.bfloat16, FORMATS["nhwc"]),
}
"""The configurations, by their names for ``--dtype``."""


@dataclass(frozen=True)
class NetworkCase:
    """What one row measures."""

    network: str
    mode: str
    configuration: Configuration
    batch: int
    side: int | None  # height and width of the images; None for the network's own

    @property
    def label(self) -> str:
        return self.outcome().label

    def outcome(self, **found: Any) -> NetworkRow:
        """The case's row, with the given figures or reasons."""
        return NetworkRow(self.network, self.mode, self.configuration.name, **found)

    @contextmanager
    def circumstances(self, device: torch.device) -> Iterator[None]:
        """The gradient mode and autocast under which the network is optimized and called."""
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
    """All combinations of the given values, network by network."""
    return [
        NetworkCase(
            name, mode, CONFIGURATIONS[dtype], batch or BATCHES.get(name, models.BATCH), side
        )
        for name in dict.fromkeys(names)
        for dtype in dict.fromkeys(dtypes)
        for mode in dict.fromkeys(modes)
    ]


def row(case: NetworkCase, device: torch.device, effort: Effort, compile: bool) -> NetworkRow:
    """Measures a case, with ``compile`` also torch.compile in inference.

    The row of a case that is skipped or fails says why.
    """
    try:
        with contestants.settings(case.configuration.precision):
            return _measured(case, device, effort, compile and case.mode == INFERENCE)
    except MissingExtra as missing:
        return case.outcome(skipped=str(missing))
    except Exception as error:  # One row must not stop the others, whatever is wrong.
        why = reason(error, f"a smaller --batch than {case.batch} may fit")
        return case.outcome(error=why)
    finally:
        if compile:
            torch._dynamo.reset()  # Compiled code keeps its network alive.
        gc.collect()  # Networks and graphs have cyclic references.
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(case: NetworkCase, device: torch.device, effort: Effort, compile: bool) -> NetworkRow:
    network, images = _made(case, device)
    # PyTorch's first call comes before optimize, which would try its algorithms out.
    runs = [_Contestant(case, network, images)]
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
        optimized=_summary(network, optimized.fastconv_optimization),
        difference=difference,
    )


def _made(case: NetworkCase, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Makes the case's network and a batch of images."""
    network, (channels, *size) = _build(case.network)
    if case.side is not None:
        size = [case.side, case.side]
    format = case.configuration.format
    images = torch.randn(case.batch, channels, *size, device=device).to(memory_format=format)
    return network.train(case.mode == TRAINING).to(device=device, memory_format=format), images


def _build(name: str) -> tuple[Any, tuple[int, ...]]:  # Any: nn.Module.to is incompletely typed.
    return (UNet(), UNET_IMAGE) if name == UNET else models.build(name)


class _Contestant:
    """A network whose steps are timed; constructing it takes and times the first step."""

    def __init__(self, case: NetworkCase, network: Any, images: Tensor) -> None:
        self._case, self._network, self._images = case, network, images
        self.first_call_ms = first_call_ms(self.run, images.device)
        self.clear()

    def run(self) -> list[Tensor]:
        """Takes a step: forward and, in training, backward from the sum of the outputs' means.

        Returns the outputs in inference, and nothing in training.
        """
        with self._case.circumstances(self._images.device):
            results = tensors_of(self._network(self._images))
            outputs = [one for one in results if one.is_floating_point()]
        if self._case.mode == TRAINING:
            torch.stack([one.float().mean() for one in outputs]).sum().backward()
            return []
        return outputs

    def clear(self) -> None:
        """Drops all gradients."""
        self._network.zero_grad(set_to_none=True)


def _timings(runs: Sequence[_Contestant], device: torch.device, effort: Effort) -> list[Timing]:
    def clear() -> None:
        """Drops all gradients of all contestants, so that each step has the same free memory."""
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
    """The largest relative difference of any output, in the Euclidean norm."""
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        norm = one.double().norm()
        relative = float((other.double() - one.double()).norm() / norm)
        if not math.isfinite(relative):
            raise ValueError(f"outputs cannot be compared: PyTorch's have the norm {norm:.3g}")
        largest = max(largest, relative)
    return largest


def _summary(network: nn.Module, report: Optimization) -> Optimized:
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
    """The usual U-Net: each level has twice the channels of the one above, the top ``width``."""

    def __init__(self, width: int = 64, levels: int = 5, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        steps = list(pairwise(widths))
        self.top = _double_convolution(UNET_IMAGE[0], width)
        self.down = nn.ModuleList(_double_convolution(narrow, wide) for narrow, wide in steps)
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in reversed(steps)
        )
        self.up = nn.ModuleList(
            _double_convolution(wide, narrow) for narrow, wide in reversed(steps)
        )
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


def _double_convolution(channels: int, width: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with BatchNorm and ReLU."""
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
