"""Whether eager calls bypass the native host path.

The native host path keeps one plan for each form of call. While ``planner.only`` asks for other
plans, Python has to serve all calls, forward and backward. The planner sets this flag and
``native`` passes it on to the library, so that neither has to import the other.
"""

from __future__ import annotations

from collections.abc import Callable

_is_on = False
_listeners: list[Callable[[bool], None]] = []


def is_on() -> bool:
    """Whether calls bypass the native host path."""
    return _is_on


def switch(on: bool) -> None:
    """Sets the flag and calls all listeners with it."""
    global _is_on
    _is_on = on
    for listener in _listeners:
        listener(on)


def listen(listener: Callable[[bool], None]) -> None:
    """Has ``listener`` called whenever the flag is set."""
    _listeners.append(listener)
