"""Reads values of JSON into dataclasses, with errors that name what is wrong."""

from __future__ import annotations

import math
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


def object_from(kind: type[Kind], entry: Any, name: str) -> Kind | None:
    """A dataclass from its JSON, after checking keys and types; None if the JSON is null."""
    if entry is None:
        return None
    expect(entry, dict[str, Any], name)
    hints = get_type_hints(kind)
    if unknown := entry.keys() - hints.keys():
        raise ValueError(f"{name} has unknown keys {sorted(unknown)}")
    for key, hint in hints.items():
        if key in entry:
            expect(entry[key], hint, f"{key} of {name}")
    try:
        return kind(**entry)
    except TypeError:
        raise ValueError(f"{name} should have {', '.join(hints)}, but has {list(entry)}") from None


def expect(value: Any, hint: Any, name: str) -> None:
    """Raises a ValueError unless the value has the type."""
    if not _is(value, hint):
        raise ValueError(f"{name} should be {_words(hint)}, but is {str(value)[:60]!r}")


def _words(hint: Any) -> str:
    """A type in the words of error messages."""
    if get_origin(hint) is UnionType:
        return " or ".join(map(_words, get_args(hint)))
    names = {
        dict: "an object", list: "a list", str: "text", int: "a whole number",
        float: "a number from 0 up", bool: "true or false", NoneType: "null",
    }  # fmt: skip
    return names[get_origin(hint) or hint]


def _is(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON has the type."""
    if hint is Any:
        return True
    if get_origin(hint) is dict:
        key, item = get_args(hint)
        if not isinstance(value, dict):
            return False
        return all(_is(k, key) and _is(v, item) for k, v in value.items())
    if get_origin(hint) is UnionType:
        return any(_is(value, one) for one in get_args(hint))
    if hint is float:  # All floats in results are times, rates and shares, none of them negative.
        return type(value) in (int, float) and 0 <= value < math.inf
    return type(value) is hint
