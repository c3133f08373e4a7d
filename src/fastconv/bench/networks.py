"""``fastconv bench --networks``: whole networks, before and after ``fastconv.optimize``.

Both are measured eagerly and, on request, after ``torch.compile``. A sample is the wall-clock time
of one step, from an idle device until the device is done, so that host time counts. The contestants
are sampled in turn. Networks are built without trained weights, and everything of a row is freed
before the next.
"""

from __future__ import annotations

import gc
import importlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fastconv
from _fastconv_command.choices import MODES as MODES
from _fastconv_command.choices import NETWORKS as NETWORKS
from fastconv import timing
from fastconv.bench import contestants, models, written_networks
from fastconv.bench.cases import FORMATS, format_of, laid_out, reason
from fastconv.bench.console import MissingExtra
from fastconv.bench.network_results import COMPILE_MODES, CompiledPair, NetworkRow, Optimized
from fastconv.bench.row_timing import Timing, extra_mib, first_call_ms
from fastconv.network.dry_run import tensors_of
from fastconv.network.exchange import kind_of
from fastconv.network.report import Optimization
from fastconv.timing import Effort

# Networks of videos, and those whose outputs are images or sound, have smaller batches than
# models.BATCH.
BATCHES = {
    "deeplabv3_resnet50": 16,
    **dict.fromkeys(("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "swin3d_t"), 8),
    **{name: one.batch for name, one in written_networks.NETWORKS.items() if one.batch},
}
TRAINING, INFERENCE = MODES
GRAPHS = "reduce-overhead"  # the mode of torch.compile that replays CUDA graphs
# Steps of a compiled network before its samples: one compiles, and where there are CUDA graphs, the
# next one or two record them.
COMPILED_STEPS = 3


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
    side: int | None  # height and width of the images, or their length; None for the network's own

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
    """Measures a case, with ``compile`` also both networks after torch.compile.

    The row of a case that is skipped or fails says why.
    """
    try:
        with contestants.settings(case.configuration.precision):
            return _measured(case, device, effort, compile)
    except MissingExtra as missing:
        return case.outcome(skipped=str(missing))
    except Exception as error:  # One row must not stop the others, whatever is wrong.
        return case.outcome(error=_reason(case, error))
    finally:
        if compile:
            torch.compiler.reset()  # Compiled code and CUDA graphs keep their network alive.
        _free(device)


def _reason(case: NetworkCase, error: Exception) -> str:
    return reason(error, f"a smaller --batch than {case.batch} may fit")


def _free(device: torch.device) -> None:
    """Returns all memory that nothing uses."""
    gc.collect()  # Networks and graphs have cyclic references.
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measured(case: NetworkCase, device: torch.device, effort: Effort, compile: bool) -> NetworkRow:
    network, images = _made(case, device)
    # PyTorch's first call comes before optimize, which would try its algorithms out.
    peer = _Contestant(case, network, images)
    with case.circumstances(device):
        optimized: Any = fastconv.optimize(network, images, progress=False)
    ours = _Contestant(case, optimized, images)
    difference = None if case.mode == TRAINING else _difference(peer.run(), ours.run())
    modes = compile_modes(device) if compile else []
    compiled = [
        _compiled(case, one, images, mode) for mode in modes for one in (network, optimized)
    ]
    runs = [peer, ours, *(one.contestant for one in compiled if one.contestant)]
    timings = dict(zip(runs, _timings(runs, device, effort), strict=True))
    return case.outcome(
        images="x".join(map(str, images.shape)),
        ours=timings[ours],
        peer=timings[peer],
        compiled=_pairs(modes, compiled, timings),
        optimized=_summary(network, optimized.fastconv_optimization),
        difference=difference,
    )


def _made(case: NetworkCase, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Makes the case's network and a batch of sequences, images or volumes."""
    network: Any  # nn.Module.to is incompletely typed.
    network, (channels, *size) = models.build(case.network)
    size = models.sized(size, case.side)
    format = case.configuration.format
    images = laid_out(torch.randn(case.batch, channels, *size, device=device), format)
    network.train(case.mode == TRAINING)
    return network.to(device=device, memory_format=format_of(2 + len(size), format)), images


class _Contestant:
    """A network whose steps are timed; constructing it takes and times the first step.

    ``mode`` is that of torch.compile, None for an eager network.
    """

    def __init__(
        self, case: NetworkCase, network: Any, images: Tensor, mode: str | None = None
    ) -> None:
        self._case, self._network, self._images = case, network, images
        self.has_graphs = mode == GRAPHS
        self.first_call_ms = first_call_ms(self.run, images.device)
        self.clear()

    def run(self) -> list[Tensor]:
        """Takes a step: forward and, in training, backward from the sum of the outputs' means.

        Returns the outputs in inference, and nothing in training.
        """
        if self.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()
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


@dataclass(frozen=True)
class _Compiled:
    """A contestant that torch.compile has compiled, and what is to be said about it."""

    contestant: _Contestant | None  # None if it failed
    remark: str | None = None


def compile_modes(device: torch.device) -> list[str]:
    """The modes of torch.compile that are measured on a device: CUDA graphs need a GPU."""
    return [mode for mode in COMPILE_MODES if mode != GRAPHS or device.type == "cuda"]


def _compiled(case: NetworkCase, network: nn.Module, images: Tensor, mode: str) -> _Compiled:
    """Compiles a network and takes its first steps; one that fails must not stop the others."""
    before = _skipped_graphs()
    # Without caches on disk, so that no contestant gains from what another has compiled.
    inductor = importlib.import_module("torch._inductor.utils")
    try:
        with inductor.fresh_inductor_cache():
            # What a process does once, such as starting the compiler, is in no first step.
            torch.compile(nn.ReLU())(torch.zeros(1, device=images.device))
            made = _Contestant(case, torch.compile(network, mode=mode), images, mode)
            for _ in range(COMPILED_STEPS - 1):
                made.run()
                made.clear()
    except Exception as error:
        return _Compiled(None, f"failed: {_reason(case, error)}")
    finally:
        _free(images.device)  # CUDA graphs cannot use what PyTorch's allocator keeps for others.
    skipped = _skipped_graphs() - before
    return _Compiled(made, f"torch.compile skipped CUDA graphs ({skipped})" if skipped else None)


def _skipped_graphs() -> int:
    """How many graphs torch.compile has left without CUDA graphs in this process."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


def _pairs(
    modes: Sequence[str], compiled: Sequence[_Compiled], timings: Mapping[_Contestant, Timing]
) -> tuple[CompiledPair, ...]:
    """The times of compiled contestants, of which each mode has PyTorch's and then ours."""

    def time(one: _Compiled) -> Timing | None:
        return timings[one.contestant] if one.contestant else None

    return tuple(
        CompiledPair(mode, time(ours), time(peer), ours.remark, peer.remark)
        for mode, peer, ours in zip(modes, compiled[::2], compiled[1::2], strict=True)
    )


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
        # CUDA graphs keep their memory between steps, so that a step's peak does not show it.
        extra = None if one.has_graphs else extra_mib(one.run, device)
        median = statistics.median(taken)
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
        layers=sum(kind_of(module) is not None for module in network.modules()),
        exchanged=len(report.exchanged),
        folded=report.folded,
        fused=report.fused,
        measured=report.measured,
        seconds=report.seconds,
        before_ms=sum(layer.calls * times.theirs for layer, times in timed),
        after_ms=sum(layer.chosen_ms(times) for layer, times in timed),
        notes="; ".join(report.notes),
    )
