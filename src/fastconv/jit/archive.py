"""The file format of ``fastconv cache export``: cache entries in one file, for other machines.

The first line is a title with the format's number. The second is JSON with the size and checksum of
the rest. The third is JSON with the versions of fastconv and NVRTC that made the entries. Then
each entry follows: a line of JSON with its name and size, and its bytes as they are in the cache's
folder. The entries are sorted by name and the file holds no times, so that the same entries always
give the same file.
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
    """The file cannot be imported; the message says what is wrong with it."""


class Archive(NamedTuple):
    """The contents of a file; ``packed`` and ``metadata`` are those of each entry, by its name."""

    made_by: dict[str, str]
    packed: dict[str, bytes]
    metadata: dict[str, dict[str, str]]


def encode(made_by: Mapping[str, str], packed: Mapping[str, bytes]) -> bytes:
    """The file for some entries, given the versions that made them and their bytes by name."""
    parts = [_line(made_by)]
    for name, entry in sorted(packed.items()):
        parts += [_line({"name": name, "bytes": len(entry)}), entry]
    rest = b"".join(parts)
    return _title() + _summary(rest) + rest


def decode(contents: bytes) -> Archive:
    """The entries of a file, after verifying the checksum of each.

    Raises:
        ArchiveError: the file is none that was exported, has another format, is truncated or
            damaged.
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
            packed[_checked_name(line, packed)] = rest[at : at + line["bytes"]]
            at += line["bytes"]
        if not packed:
            raise ValueError("it has no entries")
        metadata = {name: cache.unpack(name, entry)[0] for name, entry in packed.items()}
        return Archive({name: str(made_by[name]) for name in made_by}, packed, metadata)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # The checksum was right: the file was forged, or has entries of another version.
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


def _damage(summary: bytes, present: int) -> str:
    """Says what is wrong with a file whose second line does not match the rest."""
    found = re.search(rb'"bytes": ([0-9]{1,18}),', summary)
    if found and int(found[1]) > present:
        return f"it is truncated: {present} of {int(found[1])} bytes are there"
    return "it is damaged: it does not match its checksum"


def _checked_name(line: dict[str, Any], taken: Mapping[str, bytes]) -> str:
    """An entry's name, checked: a file of that name will be written to the cache's folder."""
    name, size = line["name"], line["bytes"]
    if not cache.is_name(name) or name in taken or size < 0:
        raise ValueError(f"no entry is {line}")
    return str(name)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value), sort_keys=True).encode() + b"\n"


def _read_line(contents: bytes, start: int) -> tuple[dict[str, Any], int]:
    """The value of the line that begins at ``start``, and where the next line begins."""
    end = contents.index(b"\n", start)
    value = json.loads(contents[start:end])
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not a JSON object")
    return value, end + 1
