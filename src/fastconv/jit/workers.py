"""A pool of threads that runs tasks: those that are waited for first, then those wanted soon.

A task has a key and runs once: whoever asks for a task that is under way waits for its result.
Tasks that were submitted ahead keep their result until it is claimed, but neither for ever nor
without limit. A task that is not claimed within :data:`UNCLAIMED_S` is dropped, and so is the
oldest where there are more than :data:`MOST_UNCLAIMED`; if it is asked for later, it runs again. A
task that somebody waits for is never dropped. An error of a task that ran ahead is not reported:
the task runs again when it is asked for, and reports its error then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

MOST_UNCLAIMED = 512
"""How many tasks may be submitted ahead, done or not, without anybody claiming them."""

UNCLAIMED_S = 600.0
"""For how many seconds an unclaimed task is kept: from when it was submitted to when it starts, and
again from when it is done.
"""


class Timer(Protocol):
    """Calls a function later, unless it is cancelled."""

    def cancel(self) -> None: ...


def _start_timer(seconds: float, call: Callable[[], None]) -> Timer | None:
    """Calls a function later; None if the system refuses to start a thread."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.name = "fastconv"
    try:
        timer.start()
    except RuntimeError:
        return None
    return timer


class Workers:
    """Threads that run tasks, and end when there is none left.

    At most ``most`` of them run at once, and one fewer run tasks that were submitted ahead, so that
    a thread is free for the next task that somebody waits for. If ``most`` is 1, nothing is run
    ahead.

    Args:
        around: a context in which each thread runs all of its tasks.
        clock: the time in seconds.
        later: calls a function after some seconds; None if it cannot.
    """

    def __init__(
        self,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Timer | None] = _start_timer,
    ) -> None:
        self._around = around
        self._clock, self._later = clock, later
        self._timer: Timer | None = None  # runs while there are unclaimed tasks
        self._lock = threading.Lock()
        self._tasks: dict[Hashable, _Task] = {}  # waiting, under way, or done and unclaimed
        self._claimed: deque[_Task] = deque()  # waiting to run, first in first out
        self._ahead: list[_Task] = []  # waiting to run, last in first out
        # A set, since an interrupt between two statements could leave a counter wrong for good.
        self._threads: set[threading.Thread] = set()
        self._threads_ahead = 0  # how many threads run a task that was not claimed when it started
        self._most = 1

    def submit(self, key: Hashable, work: Callable[[], Any], most: int) -> Future[Any]:
        """Runs a task before all that are to run ahead; the future has its result."""
        with self._lock:
            self._most = most
            task = self._tasks.get(key)
            if task is None:
                task = self._tasks[key] = _Task(key, work, self._clock())
                self._claimed.append(task)
            self._claim(task)
        self._ensure_thread()
        return task.future

    def claim(self, key: Hashable) -> Future[Any] | None:
        """The result of a task that was submitted ahead; None if there is none, or if it failed."""
        with self._lock:
            task = self._tasks.get(key)
            if task is None:
                return None
            self._claim(task)
        self._ensure_thread()
        return task.future

    def submit_ahead(self, key: Hashable, work: Callable[[], Any], most: int) -> None:
        """Runs a task when a thread has nothing more urgent to do."""
        with self._lock:
            self._most = most
            if most < 2 or key in self._tasks:
                return
            task = self._tasks[key] = _Task(key, work, self._clock())
            self._ahead.append(task)
            self._drop_expired()
            # If no thread may be started, the next that is free runs the task.
            if alive(self._threads) < most and self._threads_ahead < most - 1:
                self._start_thread()

    def cancel_ahead(self, key: Hashable) -> None:
        """Drops a task that was submitted ahead, unless it has started or is claimed."""
        with self._lock:
            task = self._tasks.get(key)
            if task is not None and task in self._ahead:
                self._drop(task)

    def _drop_expired(self) -> None:
        """Drops the unclaimed tasks that are too old, and the oldest if there are too many."""
        droppable = [task for task in self._tasks.values() if task.is_droppable]
        droppable.sort(key=lambda task: task.since)
        too_many, too_old = len(droppable) - MOST_UNCLAIMED, self._clock() - UNCLAIMED_S
        for number, task in enumerate(droppable):
            if number < too_many or task.since <= too_old:
                self._drop(task)
        self._set_timer()

    def _set_timer(self) -> None:
        """Calls :meth:`_drop_expired` when the oldest unclaimed task will be too old.

        The age of a task that is under way counts from when it is done.
        """
        unclaimed = [task for task in self._tasks.values() if not task.claimed]
        if self._timer is not None or not unclaimed:
            return
        now = self._clock()
        since = min((task.since for task in unclaimed if task.is_droppable), default=now)
        self._timer = self._later(max(since + UNCLAIMED_S - now, 0.0), self._on_timer)

    def _on_timer(self) -> None:
        with self._lock:
            self._timer = None
            self._drop_expired()

    def _drop(self, task: _Task) -> None:
        if task in self._ahead:
            self._ahead.remove(task)
        self._forget(task)

    def _claim(self, task: _Task) -> None:
        task.claimed = True
        if task in self._ahead:
            self._ahead.remove(task)
            self._claimed.append(task)
        elif task.future.done():
            self._forget(task)

    def _forget(self, task: _Task) -> None:
        if self._tasks.get(task.key) is task:
            del self._tasks[task.key]
        if not self._tasks and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ensure_thread(self) -> None:
        """Runs the claimed tasks in this thread if there is no other and none can be started."""
        with self._lock:
            if not self._claimed or alive(self._threads) >= self._most or self._start_thread():
                return
        while task := self._next(ahead=False):
            self._run(task)

    def _start_thread(self) -> bool:
        """Starts another thread; False if the system refuses."""
        thread = threading.Thread(target=self._run_tasks, name="fastconv", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            return False
        return True

    def _run_tasks(self) -> None:
        with self._around():
            while task := self._next(ahead=True):
                self._run(task)

    def _next(self, ahead: bool) -> _Task | None:
        """The next task; None ends the thread. ``ahead`` allows unclaimed tasks."""
        with self._lock:
            if self._claimed:
                return self._claimed.popleft()
            if ahead and self._ahead and self._threads_ahead < self._most - 1:
                task = self._ahead.pop()  # a backward pass begins with the last layer
                task.ahead = task.under_way = True
                self._threads_ahead += 1
                return task
            self._threads.discard(threading.current_thread())
            return None

    def _run(self, task: _Task) -> None:
        _running.ahead = task.ahead
        task.run()
        with self._lock:
            self._threads_ahead -= task.ahead
            task.under_way, task.since = False, self._clock()
            if task.claimed or task.failed:
                self._forget(task)
            else:
                self._drop_expired()


def alive(threads: set[threading.Thread]) -> int:
    """How many of the threads are alive. After a fork, none of the parent's are."""
    return sum(thread.is_alive() for thread in threads.copy())


class _Running(threading.local):
    """The task that a thread runs."""

    ahead = False


_running = _Running()


def is_ahead() -> bool:
    """Whether this thread runs a task that was not claimed when it started."""
    return _running.ahead


class _Task:
    """A function to run, its state and its result."""

    def __init__(self, key: Hashable, work: Callable[[], Any], since: float) -> None:
        self.key = key
        self.since = since  # when it was submitted or, later, done
        self.future: Future[Any] = Future()
        self.claimed = False
        self.ahead = False  # it was started before it was claimed
        self.under_way = False  # set for tasks that were started before they were claimed
        self.failed = False
        self._work = work

    @property
    def is_droppable(self) -> bool:
        """Whether the task is unclaimed and does not run at the moment."""
        return not self.claimed and not self.under_way

    def run(self) -> None:
        try:
            self.future.set_result(self._work())
        except BaseException as error:  # SystemExit as well, which a shutdown raises
            self.failed = True
            self.future.set_exception(error)
