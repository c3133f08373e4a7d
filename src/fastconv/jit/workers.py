"""Work in threads: first what somebody waits for, then what somebody will want.

A piece of work has a key, and is done once: who asks for one that is under way waits for it. What
was begun ahead is kept until it is asked for, but neither for ever nor without limit: what nobody
has asked for within :data:`KEPT_S` is dropped, and so is the oldest where there is more than
:data:`MOST_KEPT`. Who asks for it later has it done anew. What somebody waits for is never dropped.
If what was begun ahead failed, nobody was told: it is done again for whoever asks, who is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

MOST_KEPT = 512
"""Pieces that are to be done ahead, or are done, and that nobody has asked for."""

KEPT_S = 600.0
"""For how long such a piece is kept, from when it was begun, and then from when it was done."""


class Timer(Protocol):
    """What calls something later."""

    def cancel(self) -> None: ...


def _later(seconds: float, call: Callable[[], None]) -> Timer | None:
    """None where no thread can be started: some machines and moments do not allow it."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.name = "fastconv"
    try:
        timer.start()
    except RuntimeError:
        return None
    return timer


class Workers:
    """Threads that end when there is nothing left to do.

    ``most`` of them work at once. Of these, one is left to whoever asks next by those that work
    ahead; so where there may be only one, nothing is done ahead.
    """

    def __init__(
        self,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Timer | None] = _later,
    ) -> None:
        self._around = around  # all that a thread does
        self._clock, self._later = clock, later
        self._timer: Timer | None = None  # for as long as there are pieces that may grow too old
        self._lock = threading.Lock()
        self._pieces: dict[Hashable, _Piece] = {}  # to be done, under way, or done ahead
        self._asked: deque[_Piece] = deque()
        self._ahead: list[_Piece] = []
        # No count, which an interrupt could leave as it must not be.
        self._threads: set[threading.Thread] = set()
        self._threads_ahead = 0  # those that work ahead
        self._most = 1

    def ask(self, key: Hashable, work: Callable[[], Any], most: int) -> Future[Any]:
        """What comes of the work, before all that is to be done ahead."""
        with self._lock:
            self._most = most
            piece = self._pieces.get(key)
            if piece is None:
                piece = self._pieces[key] = _Piece(key, work, self._clock())
                self._asked.append(piece)
            self._claim(piece)
        self._serve()
        return piece.future

    def claim(self, key: Hashable) -> Future[Any] | None:
        """What comes of work that was begun ahead; None if none was, or if it has failed before."""
        with self._lock:
            piece = self._pieces.get(key)
            if piece is None:
                return None
            self._claim(piece)
        self._serve()
        return piece.future

    def begin(self, key: Hashable, work: Callable[[], Any], most: int) -> None:
        """Has work done ahead."""
        with self._lock:
            self._most = most
            if most < 2 or key in self._pieces:
                return
            piece = self._pieces[key] = _Piece(key, work, self._clock())
            self._ahead.append(piece)
            self._drop_what_nobody_wants()
            if alive(self._threads) < most and self._threads_ahead < most - 1:
                self._start()  # or else whoever works next does it, or who asks for it

    def drop(self, key: Hashable) -> None:
        """Forgets what is to be done ahead, if nobody has got to it yet."""
        with self._lock:
            piece = self._pieces.get(key)
            if piece is not None and piece in self._ahead:
                self._drop(piece)

    def _drop_what_nobody_wants(self) -> None:
        """Forgets what was begun ahead and is too old, or the oldest of too much."""
        unwanted = [piece for piece in self._pieces.values() if piece.is_unwanted]
        unwanted.sort(key=lambda piece: piece.since)
        too_many, too_old = len(unwanted) - MOST_KEPT, self._clock() - KEPT_S
        for number, piece in enumerate(unwanted):
            if number < too_many or piece.since <= too_old:
                self._drop(piece)
        self._set_timer()

    def _set_timer(self) -> None:
        """Has the oldest piece looked at when it is too old, if nobody begins anything until then.

        A piece that is under way is kept from when it is done.
        """
        ahead = [piece for piece in self._pieces.values() if not piece.asked]
        if self._timer is not None or not ahead:
            return
        now = self._clock()
        since = min((piece.since for piece in ahead if piece.is_unwanted), default=now)
        self._timer = self._later(max(since + KEPT_S - now, 0.0), self._on_timer)

    def _on_timer(self) -> None:
        with self._lock:
            self._timer = None
            self._drop_what_nobody_wants()

    def _drop(self, piece: _Piece) -> None:
        if piece in self._ahead:
            self._ahead.remove(piece)
        self._forget(piece)

    def _claim(self, piece: _Piece) -> None:
        piece.asked = True
        if piece in self._ahead:
            self._ahead.remove(piece)
            self._asked.append(piece)
        elif piece.future.done():
            self._forget(piece)

    def _forget(self, piece: _Piece) -> None:
        if self._pieces.get(piece.key) is piece:
            del self._pieces[piece.key]
        if not self._pieces and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _serve(self) -> None:
        """Sees to it that somebody does what was asked for."""
        with self._lock:
            if not self._asked or alive(self._threads) >= self._most or self._start():
                return
        while piece := self._next(ahead=False):
            self._do(piece)

    def _start(self) -> bool:
        """Whether another thread could be started: some machines and moments do not allow it."""
        thread = threading.Thread(target=self._work, name="fastconv", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            return False
        return True

    def _work(self) -> None:
        with self._around():
            while piece := self._next(ahead=True):
                self._do(piece)

    def _next(self, ahead: bool) -> _Piece | None:
        with self._lock:
            if self._asked:
                return self._asked.popleft()
            if ahead and self._ahead and self._threads_ahead < self._most - 1:
                piece = self._ahead.pop()  # backward passes go from the last layer to the first
                piece.ahead = piece.under_way = True
                self._threads_ahead += 1
                return piece
            self._threads.discard(threading.current_thread())
            return None

    def _do(self, piece: _Piece) -> None:
        _now.ahead = piece.ahead
        piece.do()
        with self._lock:
            self._threads_ahead -= piece.ahead
            piece.under_way, piece.since = False, self._clock()
            if piece.asked or piece.failed:
                self._forget(piece)
            else:
                self._drop_what_nobody_wants()


def alive(threads: set[threading.Thread]) -> int:
    """How many of them there are: of those that a forked process has none of, none."""
    return sum(thread.is_alive() for thread in threads.copy())


class _Now(threading.local):
    """What a thread is doing."""

    ahead = False


_now = _Now()


def is_ahead() -> bool:
    """Whether this thread does what nobody had asked for when it was begun."""
    return _now.ahead


class _Piece:
    """Work, and what came of it."""

    def __init__(self, key: Hashable, work: Callable[[], Any], since: float) -> None:
        self.key = key
        self.since = since  # when it was begun, or done
        self.future: Future[Any] = Future()
        self.asked = False
        self.ahead = False  # nobody had asked for it when it was begun
        self.under_way = False
        self.failed = False
        self._work = work

    @property
    def is_unwanted(self) -> bool:
        """Whether it could be dropped: nobody has asked for it, and nobody is at it."""
        return not self.asked and not self.under_way

    def do(self) -> None:
        try:
            self.future.set_result(self._work())
        except BaseException as error:  # SystemExit, too: the interpreter is shutting down
            self.failed = True
            self.future.set_exception(error)
