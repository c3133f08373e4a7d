"""Records of what can change about one object: its contents, its attributes, its variables.

A record reads its object when it is made. Later it says whether the object has changed, and puts
back what was there. Tensors have records of their own (:mod:`fastconv.network.tensor_record`).
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

Segment = tuple[str, Any]
"""A step of a path: a format, and the name, key or index to be written in it."""

ATTRIBUTE, ITEM, VARIABLE = ".{}", "[{!r}]", "'s variable {}"
Child = tuple[Segment, Any]
"""The step that leads from an object to another one, and that other object."""


def path_text(segments: Iterable[Segment]) -> str:
    """A path as Python code as far as possible: ``model.layers[2].cache``."""
    found = ""
    for style, name in segments:
        if found.endswith(("._modules", "._parameters", "._buffers")) and style == ITEM:
            found = found.rpartition(".")[0]
            style, name = (ITEM, int(name)) if str(name).isdecimal() else (ATTRIBUTE, name)
        found += style.format(name)
    return found


class Record:
    """Something that can change about an object, as it was when the record was made."""

    def children(self) -> Iterable[Child]:
        """The objects that were there, each with the step that led to it."""
        return ()

    def now(self) -> Iterable[Any]:
        """The objects that are there at the time of this call."""
        return ()

    def changed(self) -> bool:
        raise NotImplementedError

    def put_back(self) -> None:
        """Undoes all changes; after an interrupt it may be called again."""
        raise NotImplementedError


class Contents(Record):
    """The contents of a dictionary (which may hold an object's attributes), list, deque or set."""

    def __init__(self, of: Any, base: Any, style: str = ITEM) -> None:
        # Only methods of the built-in base are called: a user's subclass may override them.
        self._of, self._base, self._style = of, base, style
        self._saved = self._read()

    def _read(self) -> list[tuple[Any, Any]]:
        if issubclass(self._base, dict):
            return [*self._base.items(self._of)]
        return [*enumerate(self._base.__iter__(self._of))]

    def children(self) -> Iterable[Child]:
        return (((self._style, key), value) for key, value in self._saved)

    def now(self) -> Iterable[Any]:
        return [value for _, value in self._read()]

    def changed(self) -> bool:
        now = self._read()
        return _keys(now) != _keys(self._saved) or any(
            one is not other for (_, one), (_, other) in zip(now, self._saved, strict=True)
        )

    def put_back(self) -> None:
        if issubclass(self._base, dict):
            if _keys(self._read()) != _keys(self._saved):
                self._base.clear(self._of)
            for key, value in self._saved:
                self._base.__setitem__(self._of, key, value)
        else:
            self._base.clear(self._of)
            add = self._base.update if self._base is set else self._base.extend
            add(self._of, [value for _, value in self._saved])


def _keys(of: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Keys in a form whose comparison runs no code of the user's (``__eq__``)."""
    return [key if type(key) in (str, int) else (id(key),) for key, _ in of]


class Names(Record):
    """Some names of an object: slots, attributes of a class, a function's global variables."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        put: Callable[[str, Any], None],
        delete: Callable[[str], None],
        style: str = ATTRIBUTE,
        same: Callable[[Any, Any], bool] = operator.is_,
    ) -> None:
        self._read, self._put, self._delete, self._same = read, put, delete, same
        self._saved, self._style = read(), style

    def children(self) -> Iterable[Child]:
        return (((self._style, name), value) for name, value in self._saved.items())

    def now(self) -> Iterable[Any]:
        return self._read().values()

    def changed(self) -> bool:
        now = self._read()
        return now.keys() != self._saved.keys() or not all(
            self._same(now[name], value) for name, value in self._saved.items()
        )

    def put_back(self) -> None:
        now = self._read()
        for name in now.keys() - self._saved.keys():
            self._delete(name)
        for name, value in self._saved.items():
            if name not in now or not self._same(now[name], value):
                self._put(name, value)


def of_class(of: type) -> Record:
    """The attributes of a class, without those that Python itself sets (``__name__``)."""
    return Names(
        lambda: {name: value for name, value in vars(of).items() if not name.startswith("__")},
        functools.partial(type.__setattr__, of),
        functools.partial(type.__delattr__, of),
    )


def of_descriptors(of: Any, by: Mapping[str, Any], style: str = ATTRIBUTE) -> Record:
    """What descriptors return for an object: its slots, its class, the contents of a cell."""

    def read() -> dict[str, Any]:
        found = {}
        for name, one in by.items():
            with suppress(AttributeError, ValueError):  # an empty slot, an empty cell
                found[name] = one.__get__(of)
        return found

    return Names(
        read,
        lambda name, value: by[name].__set__(of, value),
        lambda name: by[name].__delete__(of),
        style,
    )


CLASS = {"__class__": vars(object)["__class__"]}
"""The descriptor of an object's class."""

CELL = {"cell_contents": vars(types.CellType)["cell_contents"]}
"""The descriptor of the variable in a closure's cell."""


def of_globals(used: Collection[str], names: dict[str, Any]) -> Record:
    """The global variables of a file that some code names."""

    def delete(name: str) -> None:
        if type(names[name]) is not types.ModuleType:  # modules imported meanwhile stay
            del names[name]

    return Names(
        lambda: {name: names[name] for name in used if name in names},
        names.__setitem__,
        delete,
        VARIABLE,
    )


def of_script(of: Any) -> Record:
    """The attributes of a ``ScriptModule``, which are held in C++."""
    kind: Any = torch._C.ConcreteModuleType.from_jit_type(of._type())
    names = kind.get_attributes()

    def equal(one: Any, other: Any) -> bool:
        """C++ makes a new container at each read; the tensors in it are the same objects."""
        try:
            return one is other or (not isinstance(one, Tensor) and bool(one == other))
        except Exception:  # containers with different tensors, whose comparison has no truth value
            return False

    return Names(
        lambda: {name: of.getattr(name) for name in names if of.hasattr(name)},
        of.setattr,
        lambda name: None,
        same=equal,
    )
