"""One file with kept entries, to take them to other machines.

The first line says what it is; the second has the size and the checksum of the rest. That begins
with a line that says who made it. Then there is, for each entry, a line with its name and size, and
its bytes, as they lie in the cache's folder. The same entries give the same bytes: they are in the
order of their names, and no time is in them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastconv.jit import cache

_TITLE = "fastconv kernels, format {}\n"
_FORMAT = 1


class ArchiveError(ValueError):
    """A file that cannot be imported; says what is wrong with it."""


class Archive(NamedTuple):
    """What such a file holds: each entry's bytes, and what it says of itself, by its name."""

    made_by: dict[str, str]
    packed: dict[str, bytes]
    about: dict[str, dict[str, str]]


def encode(made_by: Mapping[str, str], packed: Mapping[str, bytes]) -> bytes:
    """The file, given the versions that made the entries, and each entry's bytes by its name."""
    parts = [_line(made_by)]
    for name, entry in sorted(packed.items()):
        parts += [_line({"name": name, "bytes": len(entry)}), entry]
    rest = b"".join(parts)
    return _title() + _summary(rest) + rest


def decode(contents: bytes) -> Archive:
    """The entries of a file, each of them checked.

    Raises:
        ArchiveError: it is no such file, one of another format, truncated, or damaged.
    """
    _check_title(contents)
    start = contents.find(b"\n", len(_title())) + 1
    summary, rest = contents[len(_title()) : start], contents[start:]
    if summary != _summary(rest):
        raise ArchiveError(_damage(summary, len(rest)))
    try:
        made_by, at = _read_line(rest, 0)
        packed: dict[str, bytes] = {}
        while at < len(rest):
            line, at = _read_line(rest, at)
            packed[_free_name(line, packed)] = rest[at : at + line["bytes"]]
            at += line["bytes"]
        if not packed:
            raise ValueError("there is no entry in it")
        about = {name: cache.unpack(name, entry)[0] for name, entry in packed.items()}
        return Archive({name: str(made_by[name]) for name in made_by}, packed, about)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # What matches its checksum is so by intent, or another version's entries.
        raise ArchiveError(f"it does not hold what it should: {error}") from error


def _title() -> bytes:
    return _TITLE.format(_FORMAT).encode()


def _check_title(contents: bytes) -> None:
    if contents.startswith(_title()):
        return
    if found := re.match(_TITLE.format("([0-9]{1,9})").encode(), contents):
        raise ArchiveError(
            f"it has format {found[1].decode()}, of another version of fastconv; this one reads "
            f"format {_FORMAT}"
        )
    raise ArchiveError("it was not made by `fastconv cache export`")


def _summary(rest: bytes) -> bytes:
    return _line({"bytes": len(rest), "sha256": hashlib.sha256(rest).hexdigest()})


def _damage(summary: bytes, there: int) -> str:
    """What is wrong, given the line that should say how much is to come."""
    found = re.search(rb'"bytes": ([0-9]{1,18}),', summary)
    if found and int(found[1]) > there:
        return f"it is truncated: {there} of {int(found[1])} bytes are there"
    return "it is damaged: it does not match its checksum"


def _free_name(line: dict[str, Any], taken: Mapping[str, bytes]) -> str:
    """An entry's name: it becomes a file's, so it must be a key and nothing else."""
    name, size = line["name"], line["bytes"]
    if not cache.is_name(name) or name in taken or size < 0:
        raise ValueError(f"no entry is {line}")
    return str(name)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value), sort_keys=True).encode() + b"\n"


def _read_line(contents: bytes, start: int) -> tuple[dict[str, Any], int]:
    """A line's value, and where the next begins."""
    end = contents.index(b"\n", start)
    value = json.loads(contents[start:end])
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no table")
    return value, end + 1
