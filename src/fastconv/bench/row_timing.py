"""The figures of a row of ``fastconv bench``: device time, host time, memory, first call.

Device time is measured with a cold cache: each call (:mod:`fastconv.timing` makes the calls of a
sample) reads the next of several sets of inputs, which together exceed the last-level cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from fastconv import timing
from fastconv.bench import environment
from fastconv.bench.cases import Tensors
from fastconv.bench.contestants import Pass
from fastconv.timing import Effort, Run, synchronize

MOST_SETS = 64  # There are at most this many sets of inputs, however small they are.
CACHES = 3  # All sets together are as large as this many last-level caches.
MEMORY_SHARE = 0.25  # All sets together take at most this share of the free memory.
UNSTEADY = 0.1  # A spread that stays above this means that the machine is busy with other work.
HOST_MS = 5.0  # The calls of a host-time burst take about this much device time together.
HOST_BURSTS = 3  # Host time is that of the fastest of this many bursts.
CPU_CACHE_BYTES = 32 << 20  # The last-level cache of a CPU is assumed to be this large.


@dataclass(frozen=True)
class Timing:
    """The measured figures of one contestant."""

    ms: float  # the median of the samples
    spread: float  # half the interquartile range, relative to the median
    samples: int
    first_call_ms: float  # includes compiling, loading and trying out algorithms
    host_us: float | None = None  # time to queue a call; None if not measured
    extra_mib: float | None = None  # peak memory beyond the results; None if not measured

    @property
    def unsteady(self) -> bool:
        """Whether the samples spread so much that the median says little."""
        return self.spread > UNSTEADY


def set_count(one: Tensors, device: torch.device) -> int:
    """How many sets of inputs are needed so that none is still cached when its turn comes."""
    cache, free = CPU_CACHE_BYTES, environment.free_bytes(device)
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = -(-CACHES * cache // one.bytes) + 1
    return max(1, min(wanted, MOST_SETS, int(free * MEMORY_SHARE) // one.bytes))


def first_call_ms(run: Run, device: torch.device) -> float:
    """Milliseconds of a contestant's first call, with everything that it compiles and loads."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def take_turns(
    contestants: Sequence[Pass], sets: Sequence[Tensors], effort: Effort
) -> list[list[float]]:
    """Samples the contestants in turn; returns each one's samples, in milliseconds per call."""
    runs = [_rotating(compute, sets) for compute in contestants]
    return timing.take_turns(runs, sets[0].input.device, effort)


def _rotating(compute: Pass, sets: Sequence[Tensors]) -> Run:
    """A function whose calls compute on one set after the other, over and over."""
    following = cycle(sets)
    return lambda: compute(next(following))


def host_us(compute: Pass, sets: Sequence[Tensors], ms: float) -> float | None:
    """Microseconds that the host takes to queue a call; None on a CPU, which queues nothing.

    ``ms`` is the device time of a call: the longer it is, the fewer calls are made.
    """
    device = sets[0].input.device
    if device.type != "cuda":
        return None
    calls, best = min(max(round(HOST_MS / ms), 2), timing.MOST_CALLS), float("inf")
    for _ in range(HOST_BURSTS):
        synchronize(device)
        start = time.perf_counter()
        for call in range(calls):
            compute(sets[call % len(sets)])
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    synchronize(device)
    return best


def extra_mib(run: Run, device: torch.device) -> float | None:
    """Peak GPU memory of a call beyond its operands and results, in MiB; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = run()  # Kept alive until both figures are read, so that results cancel out.
    extra = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del results
    return extra / 2**20
