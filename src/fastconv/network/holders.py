"""What still holds objects that should be gone: found, named for an error message, and emptied."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from torch._subclasses import FakeTensor

from fastconv.network.reachable import leads_to
from fastconv.network.records import ATTRIBUTE, ITEM, VARIABLE, Segment, path_text
from fastconv.network.snapshot import Snapshot, Visited

# How many objects of one cache are searched for something that must go.
_SEARCHED_IN_CACHE = 1000
# How many holders an error message names at most.
_MOST_HOLDERS = 20
# How many objects that lead to a holder are searched for a name.
_SEARCHED_FOR_NAME = 50

# Frames hold variables of running code. A function holds objects by cells and dictionaries, which
# are found by themselves.
_NO_HOLDERS = frozenset({types.FrameType, types.TracebackType, types.FunctionType, FakeTensor})
_NO_NAMES = frozenset({types.FrameType, types.TracebackType, Visited, Snapshot})


def clear_caches(must_go: Callable[[Any], bool]) -> None:
    """Clears each ``functools.lru_cache`` that holds an object that must go.

    Which of its entries are new cannot be found out, and what a cache lacks is computed again.
    """
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper and leads_to(
            gc.get_referents(one), must_go, _SEARCHED_IN_CACHE
        ):
            one.cache_clear()


def take_out(holder: Any, must_go: Callable[[Any], bool]) -> None:
    """Removes the objects that must go from a dictionary, a list or an object's attributes."""
    if isinstance(holder, list):
        list.__setitem__(holder, slice(None), [one for one in holder if not must_go(one)])
        return
    names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    if isinstance(names, dict):
        for key in [key for key, value in names.items() if must_go(value)]:
            del names[key]


def holders(
    of: list[Any], snapshot: Snapshot, named_only: bool, allowed: Any = None
) -> dict[str, Any]:
    """The objects that refer to some objects, by name; frames are not among them.

    The search for a name goes from each holder upwards, to something that has one: an object of the
    snapshot, a file, a class, a function. A holder without a name is called by its type, or left
    out.

    Args:
        of: the objects that are held.
        snapshot: gives paths of objects that it recorded.
        named_only: leaves out holders that have no name.
        allowed: an object that may hold them.
    """
    wanted = {id(one) for one in of}
    direct = [
        one
        for one in gc.get_objects()
        if type(one) not in _NO_HOLDERS
        and one is not of
        and one is not allowed
        and id(one) not in wanted
        and not wanted.isdisjoint(map(id, gc.get_referents(one)))
    ]
    found: dict[str, Any] = {}
    for one in direct[:_MOST_HOLDERS]:
        child = next(ref for ref in gc.get_referents(one) if id(ref) in wanted)
        name = _name(one, child, snapshot, {id(of), id(direct), id(found), id(allowed)})
        if name is not None or not named_only:
            found[name or path_text([(f"a {type(one).__name__}", None), *_steps(one, child)])] = one
    return found


def _name(holder: Any, child: Any, snapshot: Snapshot, ignored: set[int]) -> str | None:
    """A path to what a holder refers to, or None if nothing that has a name leads to the holder."""
    # Keys are ids, so that this dictionary alone refers to the objects: the search ignores it.
    seen = {id(holder): holder}
    ways: dict[int, list[Segment]] = {id(holder): _steps(holder, child)}
    left, ignored = deque(seen), ignored | {id(seen)}
    while left and len(seen) < _SEARCHED_FOR_NAME:
        at = left.popleft()
        root = _root(seen[at], snapshot)
        if root is not None:
            return path_text([(root, None), *ways[at]])
        ups = gc.get_referrers(seen[at])
        ignored.add(id(ups))
        for up in ups:
            is_globals = isinstance(up, types.FunctionType) and up.__globals__ is seen[at]
            if id(up) in ignored or id(up) in seen or type(up) in _NO_NAMES or is_globals:
                continue
            ways[id(up)] = [*_steps(up, seen[at]), *_within(up, seen[at], ways[at])]
            seen[id(up)] = up
            left.append(id(up))
    return None


def _within(up: Any, of: Any, way: list[Segment]) -> list[Segment]:
    """The way on from an object, as it is written behind another one that refers to the object."""
    if isinstance(up, types.FunctionType) and of is up.__closure__:
        return [(VARIABLE, up.__code__.co_freevars[way[0][1]]), *way[1:]]
    if getattr(up, "__dict__", None) is of:
        return [(ATTRIBUTE, way[0][1]), *way[1:]]
    return way


def _steps(holder: Any, child: Any) -> list[Segment]:
    """How a holder leads to something that it refers to."""
    if isinstance(holder, dict):
        return [(ITEM, key) for key, value in [*holder.items()] if value is child][:1]
    if isinstance(holder, list | tuple | deque):
        return [(ITEM, index) for index, value in enumerate(holder) if value is child][:1]
    attributes = getattr(holder, "__dict__", None)
    if isinstance(holder, types.CellType | types.FunctionType) or attributes is child:
        return []
    names = [(ATTRIBUTE, name) for name, value in (attributes or {}).items() if value is child]
    return names[:1] or [(", by a {}", type(child).__name__)]


def _root(of: Any, snapshot: Snapshot) -> str | None:
    """The name of an object, if it has one of its own."""
    path = snapshot.path(of)
    if path is not None:
        return path
    # The name of a function inside another one does not tell which object it is.
    if isinstance(of, type | types.FunctionType) and "<locals>" not in of.__qualname__:
        return f"{of.__module__}.{of.__qualname__}"
    if type(of) is types.ModuleType:
        return of.__name__
    return None
