"""The disk cache: machine code, plans and measured times, so that each is made once per machine.

Each entry is a file, named ``KEY.KIND``. The kind says what it holds, the key is a hash of what it
was made from. Any number of processes may share the folder: an entry appears whole or not at all,
and one that does not match its checksum counts as missing. So does an entry that other users could
have written (see :mod:`fastconv.jit.trust`), since anyone can compute a checksum. Problems with
the folder never fail a computation: at worst, kernels are compiled again.

The folder has a size limit, beyond which the least recently used entries are removed. A file's
modification time records its last use to within an hour, because many file systems do not record
access times. Processes hold the entries that they use in memory, so that removing one is safe.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import sys
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from fastconv.jit import trust

KERNEL, PLAN, TIMES = KINDS = ("cubin", "plan", "times")
"""The kinds of entries: a program's machine code, the launches chosen for a problem, and measured
times of a part of a network.
"""

FOLDER_VARIABLE = "FASTCONV_CACHE_DIR"
"""The environment variable that names the cache's folder."""

VARIABLE = "FASTCONV_CACHE_LIMIT"
"""The environment variable that sets the folder's size limit."""

# Bytes of all entries together. A kernel takes 25 to 300 kB, and all kernels of a network 10 to
# 30 MB for one type and memory format: dozens of networks fit.
DEFAULT_LIMIT = 2 << 30

# Has to change whenever the layout of entries or the computation of keys does.
_MAGIC = b"fastconv entry 2"
# An entry is the magic, a SHA-256 checksum, the metadata's length, the metadata and the payload.
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_LENGTH_BYTES = 4

# The names of our files. Files with other names are left alone: the folder may be shared.
_ENTRY = re.compile(rf"[0-9a-f]{{64}}\.({'|'.join(KINDS)})")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")

# A temporary file of this age, in seconds, is one that a killed process has left behind.
_STALE_S = 3600.0
# A use within so many seconds of the recorded one is not recorded. This spares shared disks, from
# which thousands of processes may load the same entries.
_USE_RESOLUTION_S = 3600.0
_STORES_BETWEEN_SWEEPS = 64

# What goes wrong with the folder. Path.home() raises RuntimeError if the user has no home.
_FOLDER_ERRORS = (OSError, RuntimeError)

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}

_told: set[str] = set()
_stores = itertools.count()


class Damaged(ValueError):
    """The bytes are not the entry that its name says."""


class Size(NamedTuple):
    """The bytes of some entries, and how many of each kind there are."""

    bytes: int
    kernels: int
    plans: int
    times: int

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Size:
        listed = list(entries)
        kinds = Counter(entry.kind for entry in listed)
        return cls(sum(entry.bytes for entry in listed), *(kinds[kind] for kind in KINDS))

    @property
    def entries(self) -> int:
        return self.kernels + self.plans + self.times

    def __str__(self) -> str:
        plans = f" and {self.plans} plans" if self.plans else ""
        times = f" and {self.times} measured times" if self.times else ""
        return f"{self.kernels} kernels{plans}{times}"


class Limit(NamedTuple):
    """The size limit; ``trouble`` says what is wrong with the variable that sets it, or is None."""

    bytes: int
    trouble: str | None


class Entry(NamedTuple):
    """A file of the cache; ``used`` is the time of its last use in seconds since the epoch."""

    path: Path
    bytes: int
    used: float

    @property
    def kind(self) -> str:
        return self.path.suffix[1:]


def folder() -> Path:
    """The cache's folder: ``$FASTCONV_CACHE_DIR``, or the platform's place for caches.

    Raises:
        RuntimeError: the variable is not set, and the user has no home folder.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData/Local") / "fastconv" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/fastconv"
    # The XDG specification has relative paths ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "fastconv"


def unwritable() -> str | None:
    """Why nothing new can be kept, in words; None if it can, as far as permissions tell.

    A folder that does not exist yet would be made in the nearest one above it that does.
    """
    path = folder().absolute()
    place = next((one for one in (path, *path.parents) if os.path.exists(one)), path)
    if not place.is_dir():
        return f"{place} is not a folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"you may not write to {place}"
    return None


def limit() -> Limit:
    """The limit that ``$FASTCONV_CACHE_LIMIT`` sets, in bytes or with a unit, or the default."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return Limit(DEFAULT_LIMIT, None)
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)", text.lower())
    size = int(Fraction(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if size > 0:
        return Limit(size, None)
    return Limit(
        DEFAULT_LIMIT,
        f"{VARIABLE} should be a number of bytes, or a size such as 500MB or 2GiB, and more than "
        f"0, but got {text!r}; the limit is {in_units(DEFAULT_LIMIT)} instead",
    )


def in_units(count: int) -> str:
    """A number of bytes as text, in the unit that suits it."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def key(
    text: str, headers: Mapping[str, str], options: Iterable[str], version: tuple[int, int]
) -> str:
    """The key for the result of compiling ``text`` with these headers, options and compiler.

    Plans and times use the same function, with what they depend on in place of the arguments.
    """
    digest = hashlib.sha256(_MAGIC)
    for part in (text, *(s for header in headers.items() for s in header), *options, str(version)):
        encoded = part.encode()
        digest.update(
            len(encoded).to_bytes(8, "little")
        )  # no two lists of parts hash the same bytes
        digest.update(encoded)
    return digest.hexdigest()


def load(kind: str, key: str) -> bytes | None:
    """The payload that was stored under the key; None if there is none.

    A damaged entry is removed. One that other users could have written is ignored, with one
    warning per process.
    """
    try:
        path = _path(kind, key)
        packed = trust.read(path)
    except _FOLDER_ERRORS:
        return None
    try:
        _, payload = unpack(path.name, packed)
    except Damaged:
        with suppress(OSError):
            path.unlink()
        return None
    _note_use(path)
    return payload


def store(kind: str, key: str, payload: bytes, metadata: Mapping[str, str]) -> None:
    """Stores the payload; if the folder cannot be written, warns once per process.

    ``metadata`` describes the entry to ``fastconv cache list`` and ``fastconv cache import``.
    Nothing is written to a folder that other users can write, since it would not be used.
    """
    try:
        path = _path(kind, key)
        if words := trust.distrusted_folder(path.parent):
            trust.warn(words)
            return
        trust.make_folder(path.parent)
        try:
            replace(path, pack(path.name, payload, metadata), trust.FILE_MODE)
        finally:  # also if the disk is full, which a sweep may remedy
            if next(_stores) % _STORES_BETWEEN_SWEEPS == 0:
                _sweep()
    except _FOLDER_ERRORS as error:
        # Windows refuses to replace a file that another process is reading. That does no harm if
        # the file holds the same payload.
        if load(kind, key) != payload:
            _warn_once(
                "folder",
                "fastconv cannot keep compiled kernels, so every process compiles them again: "
                f"{error}. Set FASTCONV_CACHE_DIR to a folder that can be written.",
            )


def add(packed: Mapping[str, bytes]) -> int:
    """Adds entries, as :func:`pack` makes them, by name; returns how many were not there yet.

    Either all of them appear or, if the disk is full, none.

    Raises:
        OSError: the folder cannot be written, or other users can write it.
    """
    into = folder()
    if words := trust.distrusted_folder(into):
        raise trust.Distrusted(f"nothing in {into} would be used: {words}")
    trust.make_folder(into)
    missing = {
        into / name: entry
        for name, entry in packed.items()
        if load(kind=Path(name).suffix[1:], key=Path(name).stem) is None
    }
    replace_all(missing, trust.FILE_MODE)
    _sweep()
    return len(missing)


def entries() -> list[Entry]:
    """All entries, of this and other versions of fastconv, the most recently used first.

    Raises:
        OSError: the folder exists, but cannot be read.
        RuntimeError: no folder is chosen, and the user has no home folder.
    """
    found = []
    with suppress(FileNotFoundError), os.scandir(folder()) as files:
        for file in files:
            if is_name(file.name):
                with suppress(OSError):  # another process may have removed it
                    status = file.stat()
                    if stat.S_ISREG(status.st_mode):
                        found.append(Entry(Path(file.path), status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: (-entry.used, entry.path.name))


def metadata(entry: Entry) -> dict[str, str]:
    """An entry's metadata, read without verifying the checksum.

    Empty if the entry has the layout of another version, is damaged, or was removed.
    """
    with suppress(OSError, Damaged), entry.path.open("rb") as file:
        if file.read(_HEADER_BYTES).startswith(_MAGIC):
            length = file.read(_LENGTH_BYTES)
            return _parse_metadata(file.read(min(_number(length), entry.bytes)))
    return {}


def remove(chosen: Iterable[Entry]) -> Size:
    """Removes entries, and returns the size of those that were there.

    Other processes may use the folder meanwhile.

    Raises:
        OSError: an entry cannot be removed.
    """
    removed = []
    for entry in chosen:
        with suppress(FileNotFoundError):  # another process may have removed it
            entry.path.unlink()
            removed.append(entry)
    return Size.of(removed)


def size() -> Size:
    """The size of all entries; 0 if the folder cannot be read."""
    with suppress(*_FOLDER_ERRORS):
        return Size.of(entries())
    return Size.of(())


def is_name(name: str) -> bool:
    """Whether ``name`` has the form of an entry's file name."""
    return _ENTRY.fullmatch(name) is not None


def pack(name: str, payload: bytes, metadata: Mapping[str, str]) -> bytes:
    """The contents of the file of an entry."""
    encoded = json.dumps(dict(metadata), sort_keys=True).encode()
    rest = len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded + payload
    return _header(name, rest) + rest


def unpack(name: str, packed: bytes) -> tuple[dict[str, str], bytes]:
    """An entry's metadata and payload, from the contents of its file.

    Raises:
        Damaged: :func:`pack` did not make these contents for that name.
    """
    rest = packed[_HEADER_BYTES:]
    if packed[:_HEADER_BYTES] != _header(name, rest):
        raise Damaged(f"{name} does not match its checksum, or is of another version")
    end = _LENGTH_BYTES + _number(rest[:_LENGTH_BYTES])
    return _parse_metadata(rest[_LENGTH_BYTES:end]), rest[end:]


def _path(kind: str, key: str) -> Path:
    return folder() / f"{key}.{kind}"


def _header(name: str, rest: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(rest)
    return _MAGIC + digest.digest()


def _number(encoded: bytes) -> int:
    return int.from_bytes(encoded, "little")


def _parse_metadata(encoded: bytes) -> dict[str, str]:
    try:
        found = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise Damaged("an entry's metadata is not JSON") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise Damaged("an entry's metadata is not a table of strings")
    return found


def replace(path: Path, contents: bytes, mode: int = 0o666) -> None:
    """Writes a file so that readers see the old contents or the new, never a part.

    The file gets the permissions ``mode``, less those that the umask removes.
    """
    replace_all({path: contents}, mode)


def replace_all(files: Mapping[Path, bytes], mode: int) -> None:
    """Writes files as :func:`replace` does; if there is no room for all, none is replaced."""
    # There is no fsync: if the machine stops before the data is on disk, the checksum tells.
    temporaries = {path: path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp") for path in files}
    try:
        for path, temporary in temporaries.items():
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as to:
                to.write(files[path])
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
    except BaseException:
        for temporary in temporaries.values():
            with suppress(OSError):
                temporary.unlink()
        raise


def _note_use(path: Path) -> None:
    """Records in the file's modification time that an entry was used."""
    with suppress(OSError):  # the file may be read-only, as in a container's image
        # The absolute difference, since the clocks of machines that share a disk differ.
        if abs(time.time() - path.stat().st_mtime) > _USE_RESOLUTION_S:
            os.utime(path)


def _sweep() -> None:
    """Removes files that killed processes have left half written, and entries beyond the limit.

    Processes that sweep at the same time remove the same files, since all begin with the oldest.
    """
    oldest = time.time() - _STALE_S
    with suppress(OSError):  # another process may remove the same files
        for path in folder().iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.stat().st_mtime < oldest:
                path.unlink()
    most, trouble = limit()
    if trouble:
        _warn_once("limit", trouble)
    with suppress(OSError):  # the folder may be read-only
        present = entries()
        excess = sum(entry.bytes for entry in present) - most
        while excess > 0:
            entry = present.pop()
            entry.path.unlink(missing_ok=True)
            excess -= entry.bytes


def _warn_once(topic: str, words: str) -> None:
    """Warns about a topic, once per process."""
    if topic not in _told:
        _told.add(topic)
        warnings.warn(words, stacklevel=3)
