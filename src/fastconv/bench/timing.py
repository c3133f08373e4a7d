"""What a row's timing is made of: contestants take turns on data that is too much for the cache.

Each call of a sample (:mod:`fastconv.timing`) is on the next of several sets of inputs. On a GPU
the host's own time is measured apart (:func:`host_us`).
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

MOST_SETS = 64
CACHES = 3  # the sets together are as large as this many last-level caches
MEMORY_SHARE = 0.25  # of the free memory, at most, for all sets
UNSTEADY = 0.1  # a spread that stays above this is not the contestant's own: the machine is busy
HOST_MS = 5.0  # of device time, for the calls whose queueing is timed
CPU_CACHE_BYTES = 32 << 20


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


def first_call_ms(run: Run, device: torch.device) -> float:
    """Milliseconds of a contestant's first call, all that it prepares included."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def take_turns(
    contestants: Sequence[Pass], sets: Sequence[Tensors], effort: Effort
) -> list[list[float]]:
    """Milliseconds of a call, sample by sample, of each contestant."""
    runs = [_rotating(compute, sets) for compute in contestants]
    return timing.take_turns(runs, sets[0].input.device, effort)


def _rotating(compute: Pass, sets: Sequence[Tensors]) -> Run:
    following = cycle(sets)
    return lambda: compute(next(following))


def host_us(compute: Pass, sets: Sequence[Tensors], ms: float) -> float | None:
    """Microseconds that the host takes to queue a call; None where it computes itself.

    ``ms`` is what a call takes on the device, which long calls should not have to do often.
    """
    device = sets[0].input.device
    if device.type != "cuda":
        return None
    calls, best = min(max(round(HOST_MS / ms), 2), timing.MOST_CALLS), float("inf")
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        for call in range(calls):
            compute(sets[call % len(sets)])
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    synchronize(device)
    return best


def extra_mib(run: Run, device: torch.device) -> float | None:
    """The most memory that a call takes beyond its results, in MiB; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = run()  # alive while the memory is read, so that they count in both
    extra = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del results
    return extra / 2**20
