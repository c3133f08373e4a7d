"""Many trials, side by side in processes, and what they amount to.

On a GPU most of the time goes into planning and compiling, which one core does at a time: so each
process plans, compiles and runs trials of its own, and all share the GPU. A process that dies takes
nothing but its trial with it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fastconv.bench import environment
from fastconv.bench.trials import Trial
from fastconv.bench.verify import ELEMENTS, Check
from fastconv.jit import pool, processes

MOST_JOBS = 16
TRIAL_SECONDS = 300.0  # after which a process is taken to hang
_PROCESS_BYTES = 3 << 30  # of GPU memory: what each process needs whatever it runs
_COPIES = 5  # of a trial's tensors: results, what relations are tried on, and in float64

Checker = Callable[[Trial], Check]
"""Has to be a function that processes can import."""


def default_jobs(device: torch.device) -> int:
    """Processes: one for each core and for 6 GiB of a GPU's memory; on a CPU nothing compiles."""
    if device.type != "cuda" or not _can_start_processes():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    room = environment.free_bytes(device) // (2 * _PROCESS_BYTES)
    return max(1, min(MOST_JOBS, cores or 1, room))


def run(
    trials: Iterable[Trial], check: Checker, device: torch.device, jobs: int, limit_s: float
) -> Iterator[Check]:
    """What each trial gives, as it is found; no trial begins after ``limit_s`` seconds.

    Raises:
        ChildProcessError: there is no Python program that other processes could be.
    """
    deadline = time.monotonic() + limit_s
    if jobs == 1:
        for trial in trials:
            if time.monotonic() >= deadline:
                return
            yield check(trial)
        return
    if not _can_start_processes():
        raise ChildProcessError(
            f"{jobs} processes cannot be started: {spawn.get_executable()!r}, of which they would "
            "be, is no Python interpreter; with --jobs 1, all trials run in this process"
        )
    yield from _Pool(check, device, jobs, deadline).run(deque(trials))


def _can_start_processes() -> bool:
    executable = spawn.get_executable()  # sys.executable, unless an application has set another
    return executable is not None and processes.is_python(os.fsdecode(executable))


class _Worker:
    """A process, and the trial that it is at."""

    def __init__(self, check: Checker, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.trial: Trial | None = None
        self.usable = True
        self.since = 0.0
        self.process = context.Process(target=_work, args=(theirs, check, device), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of what can be read

    def give(self, trial: Trial) -> None:
        self.trial, self.since = trial, time.monotonic()
        with suppress(OSError):  # a process that has died is found out by reading
            self.connection.send(trial)

    def take(self) -> Check:
        """What was found of the trial: nothing, if the process died."""
        assert self.trial is not None
        try:
            found, self.usable = self.connection.recv()
        except (EOFError, OSError):
            found = Check(self.trial, failure=f"the process died: {self._end()}")
            self.usable = False
        self.trial = None
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _end(self) -> str:
        self.process.join(10)
        status = self.process.exitcode
        if status is not None and status < 0:
            return signal.Signals(-status).name
        return f"exit status {status}"


class _Pool:
    """Processes that run trials; those that end are replaced."""

    def __init__(self, check: Checker, device: torch.device, jobs: int, deadline: float) -> None:
        self._new = lambda: _Worker(check, device)
        self._jobs, self._deadline = jobs, deadline
        self._workers: list[_Worker] = []
        self._exclusive: set[Trial] = set()  # what did not fit in memory beside others
        self._room_bytes = math.inf
        if device.type == "cuda":
            free = environment.free_bytes(device) - jobs * _PROCESS_BYTES
            self._room_bytes = max(0, free) / _COPIES

    def run(self, waiting: deque[Trial]) -> Iterator[Check]:
        try:
            while True:
                self._hand_out(waiting)
                busy = {worker.connection: worker for worker in self._busy()}
                if not busy:
                    return
                for connection in wait(list(busy), timeout=1.0):
                    assert isinstance(connection, Connection)
                    found = busy[connection].take()
                    if self._deserves_more_room(found, len(busy)):
                        waiting.append(found.trial)
                    else:
                        yield found
                yield from self._hanging()
        finally:
            for worker in self._workers:
                worker.stop()

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.trial is not None]

    def _hand_out(self, waiting: deque[Trial]) -> None:
        """Gives what fits in memory to whoever has nothing to do."""
        if time.monotonic() >= self._deadline:
            waiting.clear()
        for worker in [worker for worker in self._workers if not worker.usable]:
            self._end(worker)
        while waiting and len(busy := self._busy()) < self._jobs:
            room = self._room_bytes - sum(self._bytes(worker.trial) for worker in busy)
            fitting = (at for at, trial in enumerate(waiting) if self._bytes(trial) <= room)
            index = next(fitting, None if busy else 0)
            if index is None:
                return
            trial = waiting[index]
            del waiting[index]
            idle = [worker for worker in self._workers if worker.trial is None]
            if not idle:
                idle.append(self._new())
                self._workers.append(idle[0])
            idle[0].give(trial)

    def _bytes(self, trial: Trial | None) -> float:
        return math.inf if trial is None or trial in self._exclusive else trial.bytes

    def _deserves_more_room(self, found: Check, beside: int) -> bool:
        """Whether a trial ran out of memory that others had; then it is tried again by itself."""
        again = beside > 1 and found.trial not in self._exclusive
        if not again or "out of memory" not in (found.failure or ""):
            return False
        self._exclusive.add(found.trial)
        return True

    def _hanging(self) -> Iterator[Check]:
        for worker in self._busy():
            if worker.trial and time.monotonic() - worker.since > TRIAL_SECONDS:
                yield Check(worker.trial, failure=f"nothing came of it in {TRIAL_SECONDS:.0f} s")
                self._end(worker)

    def _end(self, worker: _Worker) -> None:
        worker.stop()
        self._workers.remove(worker)


def _work(connection: Connection, check: Checker, device: torch.device) -> None:
    """What a process does until nobody asks any more, or its GPU is of no use to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the first process to handle
    torch.set_num_threads(1)
    pool.compile_threads = 1
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    with suppress(EOFError, OSError):
        while True:
            trial = connection.recv()
            found = check(trial)
            connection.send((found, _is_usable(device)))


def _is_usable(device: torch.device) -> bool:
    """Gives memory back; not so after a kernel's fault, of which a process never recovers."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:  # whichever it is
        return False
    return True


# --- What they amount to --------------------------------------------------------------------------

FORMAT = "fastconv verify 1"


@dataclass
class Group:
    """Trials that have something in common."""

    kind: str
    name: str
    trials: int = 0
    wrong: int = 0
    share: float | None = None  # the largest error of an element, relative to its bound


@dataclass(frozen=True)
class Summary:
    """Of a run of trials."""

    asked: int
    tried: int
    wrong: int
    flops: float
    seconds: float
    groups: list[Group] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(checks: Sequence[Check], asked: int, seconds: float) -> Summary:
    groups: dict[tuple[str, str], Group] = {}
    for check in checks:
        complaints = dict(check.complaints)
        for kind, name in _properties(check):
            group = groups.setdefault((kind, name), Group(kind, name))
            group.trials += 1
            group.wrong += name in complaints if kind == "check" else not check.passed
            if check.share is not None and (kind != "check" or name == ELEMENTS):
                group.share = max(group.share or 0.0, check.share)
    wrong = sum(not check.passed for check in checks)
    flops = float(sum(check.trial.problem.flops for check in checks))
    ordered = sorted(groups.values(), key=lambda group: (_KINDS.index(group.kind), group.name))
    return Summary(asked, len(checks), wrong, flops, seconds, ordered)


_KINDS = ("pass", "mode", "format", "memory", "data", "work", "family", "check")


def _properties(check: Check) -> Iterator[tuple[str, str]]:
    """What is counted: kinds and names."""
    trial, case = check.trial, check.trial.case
    yield "pass", case.direction
    yield "mode", case.mode
    yield "format", case.format
    yield "memory", "misaligned" if trial.misaligned else "aligned"
    yield "data", trial.data
    yield "work", f"1e{len(str(trial.problem.flops)) - 1:02} flops"
    if check.family:
        yield "family", check.family
    for name in check.checked:
        yield "check", name
