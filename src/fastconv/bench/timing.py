"""Fair timing: contestants take turns on the same data, which is too much for the cache.

A sample is the time of a few calls, each on the next of several sets of inputs. On a GPU it lies
between two events on the stream, and the calls are queued while the GPU is kept busy, so that it
never waits for the host: the host's own time is measured apart (:func:`host_us`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from fastconv.bench import environment
from fastconv.bench.cases import Tensors
from fastconv.bench.contestants import Pass

SAMPLE_MS = 0.5  # a sample lasts at least this long, for the clock's sake
MOST_CALLS = 50  # of a sample: the stream's queue holds a thousand launches
MOST_SETS = 64
CACHES = 3  # the sets together are as large as this many last-level caches
MEMORY_SHARE = 0.25  # of the free memory, at most, for all sets
STEADY = 0.02  # a spread above this calls for more samples
UNSTEADY = 0.1  # one that stays above this is not the contestant's own: the machine is busy
LEAST_SAMPLES = 3  # however long they take
MOST_ROUNDS = 4  # of ``repeats`` samples each
WARM_UP_MS = 5.0
HOST_MS = 5.0  # of device time, for the calls whose queueing is timed
CPU_CACHE_BYTES = 32 << 20
BUSY_CYCLES_PER_US = 2000  # at about 2 GHz
MOST_BUSY_US = 20_000.0


@dataclass(frozen=True)
class Effort:
    """How long to measure a row."""

    repeats: int = 7  # samples of each contestant in a round
    seconds: float = 10.0  # no further sample is taken after this long


@dataclass(frozen=True)
class Timing:
    """What one contestant took."""

    ms: float
    spread: float  # half the interquartile range, as a share of the median
    samples: int
    first_call_ms: float  # with compiling, loading and trying out algorithms
    host_us: float | None = None
    extra_mib: float | None = None

    @property
    def unsteady(self) -> bool:
        return self.spread > UNSTEADY


def set_count(one: Tensors, device: torch.device) -> int:
    """How many sets of inputs it takes that none is in the cache when its turn comes."""
    cache, free = CPU_CACHE_BYTES, environment.free_bytes(device)
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = -(-CACHES * cache // one.bytes) + 1
    return max(1, min(wanted, MOST_SETS, int(free * MEMORY_SHARE) // one.bytes))


def first_call_ms(compute: Pass, tensors: Tensors) -> float:
    """Milliseconds of a contestant's first call, all that it prepares included."""
    synchronize(tensors.input.device)
    start = time.perf_counter()
    compute(tensors)
    synchronize(tensors.input.device)
    return (time.perf_counter() - start) * 1e3


def take_turns(
    contestants: Sequence[Pass], sets: Sequence[Tensors], effort: Effort
) -> list[list[float]]:
    """Milliseconds of a call, sample by sample, of each contestant."""
    stopwatches = [_Stopwatch(compute, sets) for compute in contestants]
    samples: list[list[float]] = [[] for _ in contestants]
    end = time.perf_counter() + effort.seconds
    for taken in range(1, MOST_ROUNDS * effort.repeats + 1):
        for of_one, stopwatch in zip(samples, stopwatches, strict=True):
            of_one.append(stopwatch.sample())
        late = taken >= LEAST_SAMPLES and time.perf_counter() > end
        round_ends = taken % effort.repeats == 0
        if late or (round_ends and all(spread(of_one) <= STEADY for of_one in samples)):
            break
    return samples


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range, as a share of the median."""
    if len(samples) < 2:
        return 0.0
    first, median, third = statistics.quantiles(samples, n=4)
    return (third - first) / 2 / median


def host_us(compute: Pass, sets: Sequence[Tensors], ms: float) -> float | None:
    """Microseconds that the host takes to queue a call; None where it computes itself.

    ``ms`` is what a call takes on the device, which long calls should not have to do often.
    """
    device = sets[0].input.device
    if device.type != "cuda":
        return None
    calls, best = min(max(round(HOST_MS / ms), 2), MOST_CALLS), float("inf")
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        for call in range(calls):
            compute(sets[call % len(sets)])
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    synchronize(device)
    return best


def extra_mib(compute: Pass, tensors: Tensors) -> float | None:
    """The most memory that a call takes beyond its results, in MiB; None on a CPU."""
    device = tensors.input.device
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = compute(tensors)  # alive while the memory is read, so that they count in both
    extra = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del results
    return extra / 2**20


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Stopwatch:
    """Takes samples of one contestant."""

    def __init__(self, compute: Pass, sets: Sequence[Tensors]) -> None:
        self._compute, self._sets = compute, sets
        self._next = count()
        self._device = sets[0].input.device
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
            self._compute(self._sets[next(self._next) % len(self._sets)])

    def _wall_ms(self) -> float:
        return _wall_us(self._run) / 1e3

    def _cuda_ms(self) -> float:
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
