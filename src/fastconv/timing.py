"""Fair timing: several runs are sampled in turn, until their times are steady.

:func:`take_turns` measures device time: a sample is the mean of a few calls. On a GPU, it is the
time between two CUDA events. A sleep kernel keeps the GPU busy while the calls are queued, so that
the GPU never waits for the host. :func:`take_wall_turns` measures wall-clock time: a sample is one
call, host time included.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

SAMPLE_MS = 0.5  # Calls are repeated until a sample lasts this long, for clocks are coarse.
MOST_CALLS = 50  # The calls of a sample must fit the stream's queue of about a thousand launches.
STEADY = 0.02  # Another round of samples is taken while a run's spread is above this.
LEAST_SAMPLES = 3  # This many samples of each run are taken, however long they take.
MOST_ROUNDS = 4  # Runs that stay unsteady get at most this many rounds of `Effort.repeats` samples.
WARM_UP_MS = 5.0  # A run is repeated for this long before its device time is sampled.
WARM_UPS = 3  # This many calls of a run precede its wall-clock samples, unmeasured.
BUSY_CYCLES_PER_US = 2000  # Sleep is given in GPU clock cycles; this assumes about 2 GHz.
MOST_BUSY_US = 100_000.0  # The GPU sleeps no longer than this while a sample's calls are queued.

Run = Callable[[], object]
"""Makes the call that is timed."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    repeats: int = 7  # samples of each run in a round
    seconds: float = 10.0  # after which no further sample is taken


Enough = Callable[[Sequence[Sequence[float]]], bool]
"""Given the samples of each run (at least :data:`LEAST_SAMPLES`), says whether to stop early."""


def take_turns(
    runs: Sequence[Run],
    device: torch.device,
    effort: Effort,
    enough: Enough | None = None,
    before: Sequence[Run] | None = None,
) -> list[list[float]]:
    """Samples each run in turn; returns, for each run, its samples in device milliseconds per call.

    ``before`` has a function for each run, called untimed ahead of each of its samples.
    """

    def sampler(run: Run, prepare: Run) -> Callable[[], float]:
        prepare()
        stopwatch = _Stopwatch(run, device)

        def sample() -> float:
            prepare()
            return stopwatch.sample()

        return sample

    before = before or [lambda: None] * len(runs)
    return _in_turn([sampler(*one) for one in zip(runs, before, strict=True)], effort, enough)


def take_wall_turns(
    runs: Sequence[Run],
    device: torch.device,
    effort: Effort,
    before: Sequence[Run],
    enough: Enough | None = None,
) -> list[list[float]]:
    """Samples each run in turn; returns, for each run, its samples in wall-clock milliseconds.

    A sample begins with an idle device and ends when the device has finished the call. ``before``
    has a function for each run, called untimed ahead of each of its samples.
    """

    def sample(run: Run, prepare: Run) -> float:
        prepare()
        synchronize(device)
        with no_collections():
            start = time.perf_counter()
            run()
            synchronize(device)
            return (time.perf_counter() - start) * 1e3

    samplers = [
        lambda run=run, prepare=prepare: sample(run, prepare)
        for run, prepare in zip(runs, before, strict=True)
    ]
    for sampler in samplers:
        for _ in range(WARM_UPS):
            sampler()
    return _in_turn(samplers, effort, enough)


@contextmanager
def no_collections() -> Iterator[None]:
    """Disables Python's garbage collector, whose pauses would fall into arbitrary samples."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range, relative to the median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    first, median, third = statistics.quantiles(samples, n=4)
    return (third - first) / 2 / median


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle; returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_turn(
    samplers: Sequence[Callable[[], float]], effort: Effort, enough: Enough | None
) -> list[list[float]]:
    """Calls the samplers in turn until the samples are steady, enough, or took too long."""
    samples: list[list[float]] = [[] for _ in samplers]
    end = time.perf_counter() + effort.seconds
    for taken in range(1, MOST_ROUNDS * effort.repeats + 1):
        for of_run, sampler in zip(samples, samplers, strict=True):
            of_run.append(sampler())
        stop_early = taken >= LEAST_SAMPLES and (
            time.perf_counter() >= end or (enough is not None and enough(samples))
        )
        round_ends = taken % effort.repeats == 0
        if stop_early or (round_ends and all(spread(of_run) <= STEADY for of_run in samples)):
            break
    return samples


class _Stopwatch:
    """Takes device-time samples of one run."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run_once, self._device = run, device
        self._calls, self._busy_us = 1, 0.0
        self._warm_up()

    def sample(self) -> float:
        """Takes a sample: the mean time of its calls, in milliseconds."""
        total = self._cuda_ms() if self._device.type == "cuda" else self._wall_ms()
        return total / self._calls

    def _warm_up(self) -> None:
        """Warms up, and chooses how many calls make a sample and how long the GPU sleeps."""
        start = time.perf_counter()
        times = [self.sample()]
        while (time.perf_counter() - start) * 1e3 < WARM_UP_MS:
            times.append(self.sample())
        calls = SAMPLE_MS / max(min(times), 1e-6)
        self._calls = min(max(round(calls), 1), MOST_CALLS)
        if self._device.type == "cuda":
            once = _wall_us(self._run)
            synchronize(self._device)
            self._busy_us = min(1.5 * once + 20, MOST_BUSY_US)

    def _run(self) -> None:
        for _ in range(self._calls):
            self._run_once()

    def _wall_ms(self) -> float:
        return _wall_us(self._run) / 1e3

    def _cuda_ms(self) -> float:
        # Events and the sleep kernel belong to the run's device, which need not be current.
        with torch.cuda.device(self._device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if self._busy_us:
                torch.cuda._sleep(round(self._busy_us * BUSY_CYCLES_PER_US))
            start.record()
            self._run()
            end.record()
            end.synchronize()
        return start.elapsed_time(end)


def _wall_us(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
