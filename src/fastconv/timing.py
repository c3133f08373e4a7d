"""Fair timing: runs take turns, sample by sample, until their times are steady.

A sample of :func:`take_turns` is the time of a few calls. On a GPU it lies between two events on
the stream, and the calls are queued while the GPU is kept busy, so that it never waits for the
host. A sample of :func:`take_wall_turns` is one call by the wall clock, the host's time included.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

SAMPLE_MS = 0.5  # a sample lasts at least this long, for the clock's sake
MOST_CALLS = 50  # of a sample: the stream's queue holds a thousand launches
STEADY = 0.02  # a spread above this calls for more samples
LEAST_SAMPLES = 3  # however long they take
MOST_ROUNDS = 4  # of ``repeats`` samples each
WARM_UP_MS = 5.0
WARM_UPS = 3  # calls by the wall clock that do not count
BUSY_CYCLES_PER_US = 2000  # at about 2 GHz
MOST_BUSY_US = 100_000.0

Run = Callable[[], object]
"""Makes a call: what is timed."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    repeats: int = 7  # samples of each run in a round
    seconds: float = 10.0  # no further sample is taken after this long


Enough = Callable[[Sequence[Sequence[float]]], bool]
"""Whether the samples of the runs, :data:`LEAST_SAMPLES` of each or more, tell all that matters."""


def take_turns(
    runs: Sequence[Run],
    device: torch.device,
    effort: Effort,
    enough: Enough | None = None,
    before: Sequence[Run] | None = None,
) -> list[list[float]]:
    """Milliseconds of a call on the device, sample by sample, of each run.

    What stands at a run's place in ``before`` is called ahead of each of its samples, untimed.
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
    """Milliseconds of a call by the wall clock, until the device is done.

    What stands at a run's place in ``before`` is called ahead of each of its samples, untimed.
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
    """Keeps the garbage collector, which comes when it likes, out of what is timed."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range, as a share of the median."""
    if len(samples) < 2:
        return 0.0
    first, median, third = statistics.quantiles(samples, n=4)
    return (third - first) / 2 / median


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_turn(
    samplers: Sequence[Callable[[], float]], effort: Effort, enough: Enough | None
) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in samplers]
    end = time.perf_counter() + effort.seconds
    for taken in range(1, MOST_ROUNDS * effort.repeats + 1):
        for of_one, sampler in zip(samples, samplers, strict=True):
            of_one.append(sampler())
        late = taken >= LEAST_SAMPLES and (
            time.perf_counter() > end or (enough is not None and enough(samples))
        )
        round_ends = taken % effort.repeats == 0
        if late or (round_ends and all(spread(of_one) <= STEADY for of_one in samples)):
            break
    return samples


class _Stopwatch:
    """Takes samples of one run."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run_once, self._device = run, device
        self._calls, self._busy_us = 1, 0.0
        self._warm_up()

    def sample(self) -> float:
        """Milliseconds of a call, the mean of a sample's."""
        total = self._cuda_ms() if self._device.type == "cuda" else self._wall_ms()
        return total / self._calls

    def _warm_up(self) -> None:
        """Runs until it is warm, and finds how many calls make a sample."""
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
        # On the run's device, which need not be the current one.
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
