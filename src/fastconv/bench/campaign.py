"""Runs many verification trials in parallel processes, and summarises them.

On a GPU, most of a trial's time goes into planning and compiling, which use one core. Therefore
each process plans, compiles and runs its own trials, and all processes share the GPU. A process
that dies or hangs loses only its trial.
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

from _fastconv_command.choices import MOST_JOBS
from fastconv.bench import environment
from fastconv.bench.trials import Trial
from fastconv.bench.verify import ELEMENTS, Check
from fastconv.jit import pool, processes

TRIAL_SECONDS = 300.0  # A process that takes longer than this for a trial is taken to hang.
_PROCESS_BYTES = 3 << 30  # GPU memory reserved for each process, apart from its trial's tensors.
_COPIES = 5  # Copies of a trial's tensors that exist at once: results, changed operands, float64.

Checker = Callable[[Trial], Check]
"""Checks a trial; worker processes receive it by pickling."""


def default_jobs(device: torch.device) -> int:
    """The number of processes: one for each core, as far as each has 6 GiB of GPU memory.

    On a CPU it is 1, for no kernels are compiled there.
    """
    if device.type != "cuda" or not _can_start_processes():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    room = environment.free_bytes(device) // (2 * _PROCESS_BYTES)
    return max(1, min(MOST_JOBS, cores or 1, room))


def run(
    trials: Iterable[Trial], check: Checker, device: torch.device, jobs: int, limit_s: float
) -> Iterator[Check]:
    """Checks the trials and yields the outcomes as they arrive, in any order.

    No trial begins after ``limit_s`` seconds.

    Raises:
        ChildProcessError: ``jobs`` is above 1, but there is no Python interpreter to start.
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
            f"cannot start {jobs} processes: {spawn.get_executable()!r} is not a Python "
            "interpreter; --jobs 1 runs all trials in this process"
        )
    yield from _Pool(check, device, jobs, deadline).run(deque(trials))


def _can_start_processes() -> bool:
    executable = spawn.get_executable()  # sys.executable, unless the application has set another.
    return executable is not None and processes.is_python(os.fsdecode(executable))


class _Worker:
    """A process, and the trial that it works on."""

    def __init__(self, check: Checker, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA contexts do not survive a fork.
        self.connection, theirs = context.Pipe()
        self.trial: Trial | None = None
        self.usable = True
        self.started = 0.0  # when the trial was given, by time.monotonic()
        self.process = context.Process(target=_work, args=(theirs, check, device), daemon=True)
        self.process.start()
        theirs.close()  # Reading then ends with an EOFError when the process has died.

    def give(self, trial: Trial) -> None:
        self.trial, self.started = trial, time.monotonic()
        with suppress(OSError):  # take() reports a process that has died.
            self.connection.send(trial)

    def take(self) -> Check:
        """Reads the trial's outcome; a failed check if the process died."""
        assert self.trial is not None
        try:
            found, self.usable = self.connection.recv()
        except (EOFError, OSError):
            found = Check(self.trial, failure=f"the process died: {self._exit_status()}")
            self.usable = False
        self.trial = None
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _exit_status(self) -> str:
        self.process.join(10)
        status = self.process.exitcode
        if status is not None and status < 0:
            return signal.Signals(-status).name
        return f"exit status {status}"


class _Pool:
    """Processes that run trials; a process that has died or is stopped is replaced."""

    def __init__(self, check: Checker, device: torch.device, jobs: int, deadline: float) -> None:
        self._new_worker = lambda: _Worker(check, device)
        self._jobs, self._deadline = jobs, deadline
        self._workers: list[_Worker] = []
        self._exclusive: set[Trial] = set()  # trials that must run alone, for want of memory
        self._room_bytes = math.inf  # for the tensors of all running trials, each counted once
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
                    if self._is_retried_alone(found, len(busy)):
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
        """Gives waiting trials that fit in memory to idle workers, starting workers as needed."""
        if time.monotonic() >= self._deadline:
            waiting.clear()
        for worker in [worker for worker in self._workers if not worker.usable]:
            self._stop(worker)
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
                idle.append(self._new_worker())
                self._workers.append(idle[0])
            idle[0].give(trial)

    def _bytes(self, trial: Trial | None) -> float:
        return math.inf if trial is None or trial in self._exclusive else trial.bytes

    def _is_retried_alone(self, found: Check, running: int) -> bool:
        """Whether a trial ran out of memory beside others, and so is to be tried again alone."""
        can_retry = running > 1 and found.trial not in self._exclusive
        if not can_retry or "out of memory" not in (found.failure or ""):
            return False
        self._exclusive.add(found.trial)
        return True

    def _hanging(self) -> Iterator[Check]:
        for worker in self._busy():
            if worker.trial and time.monotonic() - worker.started > TRIAL_SECONDS:
                yield Check(worker.trial, failure=f"no result within {TRIAL_SECONDS:.0f} s")
                self._stop(worker)

    def _stop(self, worker: _Worker) -> None:
        worker.stop()
        self._workers.remove(worker)


def _work(connection: Connection, check: Checker, device: torch.device) -> None:
    """The main function of a worker process: checks trials until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The main process handles Ctrl-C.
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
    """Frees cached GPU memory; False after a kernel's fault, which leaves the process unusable."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:  # Any error here means that the CUDA context is unusable.
        return False
    return True


# --- Summary --------------------------------------------------------------------------------------

FORMAT = "fastconv verify 1"


@dataclass
class Group:
    """Trials that share a property: ``kind`` is the property, ``name`` its value."""

    kind: str
    name: str
    trials: int = 0
    wrong: int = 0
    share: float | None = None  # the largest error of an element, relative to its bound


@dataclass(frozen=True)
class Summary:
    """The counts of a run of trials, in all and by property."""

    asked: int  # trials that the run was to make
    tried: int  # trials that it made
    wrong: int
    flops: float
    seconds: float
    groups: list[Group] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(checks: Sequence[Check], asked: int, seconds: float) -> Summary:
    """Counts the checks of a run that was to make ``asked`` trials and took ``seconds``."""
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


_KINDS = ("layer", "pass", "mode", "format", "memory", "data", "work", "family", "check")


def _properties(check: Check) -> Iterator[tuple[str, str]]:
    """The properties by which a check is counted, as kinds and names."""
    trial, case = check.trial, check.trial.case
    yield "layer", case.workload.function
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
