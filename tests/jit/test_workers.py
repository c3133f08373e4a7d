"""The pool of threads: tasks run once, on request or ahead; unclaimed ones are dropped."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from effort import PATIENCE_S, wait_until
from fastconv.jit import pool
from fastconv.jit.workers import UNCLAIMED_S, Workers, is_ahead
from test_jit import in_threads


class Gate:
    """Work that reports when it begins, and ends when it is allowed to."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.may_end.wait(PATIENCE_S)
        return "through"


def _idle(workers: Workers) -> None:
    """Waits until no thread has anything left to do."""
    wait_until(lambda: not workers._threads)


def test_a_task_done_ahead_is_not_done_again() -> None:
    workers, done = Workers(), Counter[int]()
    workers.submit_ahead(1, lambda: done.update([1]) or "first", 2)
    _idle(workers)
    workers.submit_ahead(1, lambda: done.update([1]), 2)
    assert workers.submit(1, lambda: done.update([1]), 2).result(PATIENCE_S) == "first"
    _idle(workers)
    assert done == {1: 1}
    assert not workers._tasks


def test_submitting_a_task_under_way_waits_for_it() -> None:
    workers, gate = Workers(), Gate()
    workers.submit_ahead("gate", gate, 2)
    assert gate.began.wait(PATIENCE_S)
    first, second = workers.submit("gate", pytest.fail, 2), workers.claim("gate")
    assert second is first
    assert not first.done()
    gate.may_end.set()
    assert first.result(PATIENCE_S) == "through"
    _idle(workers)
    assert not workers._tasks


def test_one_thread_is_left_for_requests() -> None:
    workers, gates = Workers(), [Gate() for _ in range(4)]
    for number, gate in enumerate(gates):
        workers.submit_ahead(number, gate, 3)
    wait_until(lambda: sum(gate.began.is_set() for gate in gates) == 2)
    assert workers.submit("asked", lambda: "at once", 3).result(PATIENCE_S) == "at once"
    assert sum(gate.began.is_set() for gate in gates) == 2
    for gate in gates:
        gate.may_end.set()
    _idle(workers)
    assert all(gate.began.is_set() for gate in gates)


def test_tasks_that_have_not_started_can_be_cancelled() -> None:
    workers, gates, done = Workers(), [Gate(), Gate()], list[str]()
    futures = [workers.submit(gate, gate, 2) for gate in gates]
    for name in "abc":
        workers.submit_ahead(name, partial(done.append, name), 2)
    workers.claim("b")
    for name in ("a", "b", "unknown", gates[0]):
        workers.cancel_ahead(name)
    for gate in gates:
        gate.may_end.set()
    assert [future.result(PATIENCE_S) for future in futures] == ["through"] * 2
    _idle(workers)
    assert sorted(done) == ["b", "c"]
    assert workers.claim("a") is None


class Time:
    """A clock that tests advance, and the calls that are due by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> Any:
        self.due.append(one := (self.now + seconds, call))
        return SimpleNamespace(cancel=lambda: self.due.remove(one))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for at, call in [*self.due]:
            if at <= self.now:
                self.due.remove((at, call))
                call()

    def workers(self) -> Workers:
        return Workers(clock=lambda: self.now, later=self.later)


def test_unclaimed_tasks_are_dropped_after_a_while() -> None:
    """A timer drops them, even if the pool is not used in the meantime."""
    time = Time()
    workers = time.workers()
    workers.submit_ahead("early", lambda: "result", 2)
    _idle(workers)
    time.advance(UNCLAIMED_S / 2)
    workers.submit_ahead("late", lambda: "result", 2)
    _idle(workers)
    time.advance(UNCLAIMED_S / 2 - 1)
    assert [*workers._tasks] == ["early", "late"]
    time.advance(1)
    assert [*workers._tasks] == ["late"]
    assert workers.claim("early") is None
    time.advance(UNCLAIMED_S / 2)
    assert not workers._tasks
    assert not time.due


def test_tasks_that_have_not_started_are_dropped_as_well() -> None:
    time, gates = Time(), [Gate(), Gate()]
    workers = time.workers()
    futures = [workers.submit(gate, gate, 2) for gate in gates]
    workers.submit_ahead("never", pytest.fail, 2)
    time.advance(UNCLAIMED_S)
    assert "never" not in workers._tasks
    assert not workers._ahead
    for gate in gates:
        gate.may_end.set()
    assert [future.result(PATIENCE_S) for future in futures] == ["through"] * 2
    _idle(workers)


def test_claimed_tasks_are_not_dropped() -> None:
    """Tasks under way are not dropped, either: their age counts from their end."""
    time, gates = Time(), [Gate() for _ in range(2)]
    workers = time.workers()
    for number, gate in enumerate(gates):
        workers.submit_ahead(number, gate, 3)
        assert gate.began.wait(PATIENCE_S)
    asked = workers.claim(0)
    waiting = workers.submit("waiting", lambda: "came", 2)
    time.advance(3 * UNCLAIMED_S)
    assert {0, 1} <= {*workers._tasks}
    for gate in gates:
        gate.may_end.set()
    assert asked is not None
    assert asked.result(PATIENCE_S) == "through"
    assert waiting.result(PATIENCE_S) == "came"
    _idle(workers)
    time.advance(UNCLAIMED_S - 1)
    later = workers.claim(1)
    assert later is not None
    assert later.result(PATIENCE_S) == "through"
    assert not workers._tasks
    assert not time.due


def test_how_many_unclaimed_tasks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest ones; claimed tasks do not count."""
    monkeypatch.setattr("fastconv.jit.workers.MOST_UNCLAIMED", 3)
    time, gate = Time(), Gate()
    workers = time.workers()
    future = workers.submit("asked", gate, 2)
    assert gate.began.wait(PATIENCE_S)
    for number in range(10):
        time.now += 1
        workers.submit_ahead(number, partial(int, number), 2)
        assert len(workers._tasks) <= 5  # one is claimed, and one may be under way
        assert len(workers._ahead) <= 3
    gate.may_end.set()
    assert future.result(PATIENCE_S) == "through"
    _idle(workers)
    # The age of a task counts from its end, so that a slow one may be kept in place of another.
    kept = [*workers._tasks]
    assert len(kept) == 3
    assert kept[-1] == 9
    for number in kept:
        found = workers.claim(number)
        assert found is not None
        assert found.result(PATIENCE_S) == number
    dropped = next(number for number in range(10) if number not in kept)
    assert workers.submit(dropped, lambda: "anew", 2).result(PATIENCE_S) == "anew"
    _idle(workers)
    assert not workers._tasks


def test_a_timer_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old tasks are then dropped when the next is submitted ahead."""
    time = Time()
    workers = Workers(clock=lambda: time.now, later=lambda *_: None)
    workers.submit_ahead("early", lambda: "result", 2)
    _idle(workers)
    time.advance(2 * UNCLAIMED_S)
    workers.submit_ahead("late", lambda: "result", 2)
    assert "early" not in workers._tasks
    _idle(workers)


def test_the_timer_is_a_daemon_thread() -> None:
    """It ends when there are no tasks left, and does not keep a process alive."""
    workers = Workers()
    workers.submit_ahead("ahead", lambda: "result", 2)
    timer = workers._timer
    assert isinstance(timer, threading.Timer)
    assert timer.daemon
    _idle(workers)
    assert workers.claim("ahead") is not None
    timer.join(PATIENCE_S)
    assert not timer.is_alive()
    assert workers._timer is None


def test_a_thread_can_tell_whether_it_runs_ahead() -> None:
    workers = Workers()
    workers.submit_ahead("ahead", is_ahead, 2)
    _idle(workers)
    future = workers.claim("ahead")
    assert future is not None
    assert future.result(PATIENCE_S)
    assert not workers.submit("asked", is_ahead, 2).result(PATIENCE_S)
    assert not is_ahead()


def test_requests_come_first() -> None:
    """Tasks that were submitted ahead follow, the latest first."""
    workers, gates, order = Workers(), [Gate(), Gate()], list[str]()
    futures = [workers.submit(gate, gate, 2) for gate in gates]
    for name in "abc":
        workers.submit_ahead(name, partial(order.append, name), 2)
    workers.submit("d", partial(order.append, "d"), 2)
    workers.claim("c")
    assert gates[1].began.wait(PATIENCE_S)
    gates[0].may_end.set()
    wait_until(lambda: len(order) == 4)
    assert order == ["d", "c", "b", "a"]
    gates[1].may_end.set()
    assert [future.result(PATIENCE_S) for future in futures] == ["through"] * 2


def test_with_one_thread_nothing_runs_ahead() -> None:
    workers = Workers()
    workers.submit_ahead(1, pytest.fail, 1)
    assert workers.claim(1) is None
    assert not workers._threads


def test_a_task_that_failed_ahead_runs_again_and_reports_its_error() -> None:
    workers, tried = Workers(), list[int]()

    def fail() -> None:
        tried.append(1)
        raise ValueError("no")

    workers.submit_ahead(1, fail, 2)
    _idle(workers)
    assert workers.claim(1) is None
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            workers.submit(1, fail, 2).result(PATIENCE_S)
        _idle(workers)
    assert len(tried) == 3
    assert not workers._tasks


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    workers = Workers()
    workers.submit_ahead(1, lambda: "ahead", 4)
    workers.submit_ahead(2, lambda: "left", 4)
    assert workers.submit(3, lambda: "here", 4).result(0) == "here"
    future = workers.claim(1)
    assert future is not None
    assert future.result(0) == "ahead"
    assert list(workers._tasks) == [2]


def test_many_threads() -> None:
    """They submit and claim tasks: none runs twice at a time, nor more at once than allowed."""
    workers, most, keys = Workers(), 5, 40
    lock, under_way, at_once = threading.Lock(), Counter[Hashable](), list[int]()

    def work(key: int) -> Callable[[], int]:
        def do() -> int:
            with lock:
                assert not under_way[key]
                under_way[key] += 1
                at_once.append(under_way.total())
            time.sleep(random.random() / 2000)
            with lock:
                under_way[key] -= 1
            if key % 7 == 0:
                raise ValueError(str(key))
            return key * key

        return do

    wrong: list[Any] = []

    def use(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(600):
            key = draw.randrange(keys)
            how = draw.choice(["submit_ahead", "submit_ahead", "claim", "submit"])
            if how == "submit_ahead":
                workers.submit_ahead(key, work(key), most)
                continue
            future = workers.claim(key) if how == "claim" else workers.submit(key, work(key), most)
            if future is None:
                continue
            try:
                if future.result(PATIENCE_S) != key * key or key % 7 == 0:
                    wrong.append(key)
            except ValueError as error:
                if str(error) != str(key) or key % 7:
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)

    in_threads(use, 8)
    _idle(workers)
    assert not wrong
    assert max(at_once) <= most
    assert workers._threads_ahead == 0
    assert not workers._claimed
    assert not workers._ahead
    assert all(task.future.done() and not task.claimed for task in workers._tasks.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has neither the threads nor their tasks."""
    gate = Gate()
    monkeypatch.setattr(pool, "_workers", Workers())
    pool._workers.submit_ahead("gate", gate, 2)
    assert gate.began.wait(PATIENCE_S)
    with pool._workers._lock:  # a thread may hold it at the time of the fork
        child = os.fork()
        if not child:
            found = pool._workers.submit("gate", lambda: 7, 2).result(PATIENCE_S)
            os._exit(found)
    gate.may_end.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    _idle(pool._workers)


def test_running_ahead_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid variable is reported when a kernel is needed, not before."""
    monkeypatch.setenv(pool.JOBS_VARIABLE, "two")
    pool.run_ahead("never", pytest.fail)
    assert pool.claim("never") is None
