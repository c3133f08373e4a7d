"""Keeps machine code on disk, so that a kernel is compiled once and not once per process.

Beside it lie times that were measured, for the same reason.

An entry has a kind, which says what it holds, and a key, which says of what; its file's name is
both. Any number of processes may share the folder: an entry appears whole or not at all, and one
that does not match its checksum counts as missing. So does one that others could have made or
changed (see :mod:`fastconv.jit.trust`): a checksum anyone can compute. No trouble with the folder
is an error of a process that computes: the worst it costs is compiling again.

The folder has a limit, beyond which the entries that were not used for longest are removed. A
file's time of modification is when it was last used, give or take an hour: times of access are
not kept everywhere. What a process uses is in its memory, so nobody misses what is removed.
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
"""What entries hold.

Machine code of a program; a plan, which says what of it to launch; what a part of a network took.
"""

VARIABLE = "FASTCONV_CACHE_LIMIT"

# A kernel takes 25 to 300 kB, a network's some 10 to 30 MB for a type and a memory format: dozens
# of them fit, and what earlier versions have left goes in time.
DEFAULT_LIMIT = 2 << 30

# Changes whenever an entry's layout or the making of keys does.
_MAGIC = b"fastconv entry 2"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_LENGTH_BYTES = 4  # of the description's length, which comes next
# All else in the folder belongs to others: it may be shared.
_ENTRY = re.compile(rf"[0-9a-f]{{64}}\.({'|'.join(KINDS)})")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")
_STALE_S = 3600.0
_USED_AGAIN_S = 3600.0  # spares shared disks, where thousands of processes load the same entries
_STORES_BETWEEN_SWEEPS = 64
_TROUBLE = (OSError, RuntimeError)  # the latter from Path.home() where there is none

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}

_told: set[str] = set()
_stores = itertools.count()


class Damaged(ValueError):
    """Bytes that are no entry, or not the one that they should be."""


class Size(NamedTuple):
    """How much entries are."""

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
    """How much it may hold, and what is wrong with the variable that should say so."""

    bytes: int
    trouble: str | None


class Entry(NamedTuple):
    """A file in the folder; when it was last used, in seconds since the epoch."""

    path: Path
    bytes: int
    used: float

    @property
    def kind(self) -> str:
        return self.path.suffix[1:]


def folder() -> Path:
    """Where entries lie: ``$FASTCONV_CACHE_DIR``, or the platform's place for caches."""
    if chosen := os.environ.get("FASTCONV_CACHE_DIR"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData/Local") / "fastconv" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/fastconv"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # to be ignored unless absolute
    return (base if base.is_absolute() else Path.home() / ".cache") / "fastconv"


def limit() -> Limit:
    """``$FASTCONV_CACHE_LIMIT``: bytes, or a size with a unit. Nonsense counts as not set."""
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
    """Bytes, for reading."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def key(
    text: str, headers: Mapping[str, str], options: Iterable[str], version: tuple[int, int]
) -> str:
    """Names what comes of compiling ``text`` with these headers, options and compiler."""
    digest = hashlib.sha256(_MAGIC)
    for part in (text, *(s for header in headers.items() for s in header), *options, str(version)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))  # so that parts cannot run together
        digest.update(encoded)
    return digest.hexdigest()


def load(kind: str, key: str) -> bytes | None:
    """What was stored under the key, or None. A damaged entry is removed.

    One that is not to be trusted is ignored, with a warning, once in a process.
    """
    try:
        path = _path(kind, key)
        packed = trust.read(path)
    except _TROUBLE:
        return None
    try:
        _, payload = unpack(path.name, packed)
    except Damaged:
        with suppress(OSError):
            path.unlink()
        return None
    _note_use(path)
    return payload


def store(kind: str, key: str, payload: bytes, about: Mapping[str, str]) -> None:
    """Stores the payload, or warns, once in a process, that the folder cannot be written.

    ``about`` says for people and for :mod:`fastconv.jit.archive` what it is. Nothing is written to
    a folder that is not to be trusted: it would not be used.
    """
    try:
        path = _path(kind, key)
        if words := trust.distrusted_folder(path.parent):
            trust.warn(words)
            return
        trust.make_folder(path.parent)
        try:
            replace(path, pack(path.name, payload, about), trust.FILE_MODE)
        finally:  # where the disk is full, too
            if next(_stores) % _STORES_BETWEEN_SWEEPS == 0:
                _sweep()
    except _TROUBLE as error:
        # Windows refuses to replace a file that another process is just reading: no harm.
        if load(kind, key) != payload:
            _tell(
                "folder",
                "fastconv cannot keep compiled kernels, so every process compiles them again: "
                f"{error}. Set FASTCONV_CACHE_DIR to a folder that can be written.",
            )


def add(packed: Mapping[str, bytes]) -> int:
    """Stores entries by their names, as :func:`pack` made them, unless they are there already.

    All of them are written before the first appears. Returns how many were not there.

    Raises:
        OSError: the folder cannot be written, or is not to be trusted; says why.
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
    """All that is there, of this version or of others; what was used last comes first.

    Raises:
        OSError: the folder is there, but cannot be read.
        RuntimeError: there is no home folder, and no other was chosen.
    """
    found = []
    with suppress(FileNotFoundError), os.scandir(folder()) as files:
        for file in files:
            if is_name(file.name):
                with suppress(OSError):  # removed since
                    status = file.stat()
                    if stat.S_ISREG(status.st_mode):
                        found.append(Entry(Path(file.path), status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: (-entry.used, entry.path.name))


def about(entry: Entry) -> dict[str, str]:
    """What an entry says of itself, its checksum aside.

    Nothing if it has another version's layout, is damaged, or was removed.
    """
    with suppress(OSError, Damaged), entry.path.open("rb") as file:
        if file.read(_HEADER_BYTES).startswith(_MAGIC):
            length = file.read(_LENGTH_BYTES)
            return _described(file.read(min(_number(length), entry.bytes)))
    return {}


def remove(chosen: Iterable[Entry]) -> Size:
    """Removes entries; what was there of them. Others may use the folder meanwhile.

    Raises:
        OSError: one cannot be removed.
    """
    removed = []
    for entry in chosen:
        with suppress(FileNotFoundError):  # by another process
            entry.path.unlink()
            removed.append(entry)
    return Size.of(removed)


def size() -> Size:
    """What all entries take."""
    with suppress(*_TROUBLE):
        return Size.of(entries())
    return Size.of(())


def is_name(name: str) -> bool:
    """Whether an entry's file may have that name."""
    return _ENTRY.fullmatch(name) is not None


def pack(name: str, payload: bytes, about: Mapping[str, str]) -> bytes:
    """An entry, as it is in its file."""
    described = json.dumps(dict(about), sort_keys=True).encode()
    rest = len(described).to_bytes(_LENGTH_BYTES, "little") + described + payload
    return _header(name, rest) + rest


def unpack(name: str, packed: bytes) -> tuple[dict[str, str], bytes]:
    """What an entry says of itself, and what it holds.

    Raises:
        Damaged: it is not what :func:`pack` made for that name.
    """
    rest = packed[_HEADER_BYTES:]
    if packed[:_HEADER_BYTES] != _header(name, rest):
        raise Damaged(f"{name} does not match its checksum, or is of another version")
    end = _LENGTH_BYTES + _number(rest[:_LENGTH_BYTES])
    return _described(rest[_LENGTH_BYTES:end]), rest[end:]


def _path(kind: str, key: str) -> Path:
    return folder() / f"{key}.{kind}"


def _header(name: str, rest: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(rest)
    return _MAGIC + digest.digest()


def _number(encoded: bytes) -> int:
    return int.from_bytes(encoded, "little")


def _described(encoded: bytes) -> dict[str, str]:
    try:
        found = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise Damaged("an entry's description is no JSON") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise Damaged("an entry's description is no table of texts")
    return found


def replace(path: Path, contents: bytes, mode: int = 0o666) -> None:
    """Writes the file so that readers see the old one or the new one, never a part.

    It has the bits of ``mode`` that the umask allows.
    """
    replace_all({path: contents}, mode)


def replace_all(files: Mapping[Path, bytes], mode: int) -> None:
    """Writes files as :func:`replace` does; none of them if there is no room for all."""
    # The checksum, not fsync, guards against a machine that stops before the data is on disk.
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
    with suppress(OSError):  # root's, in a container's image: it stays as it is
        # Either way: clocks of machines that share a disk differ.
        if abs(time.time() - path.stat().st_mtime) > _USED_AGAIN_S:
            os.utime(path)


def _sweep() -> None:
    """Removes what killed processes have left half written, and what is beyond the limit.

    Processes that do so at once remove the same files: all take the oldest first.
    """
    oldest = time.time() - _STALE_S  # nobody writes for so long
    with suppress(OSError):  # no need to: another process may be at it
        for path in folder().iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.stat().st_mtime < oldest:
                path.unlink()
    most, trouble = limit()
    if trouble:
        _tell("limit", trouble)
    with suppress(OSError):  # a folder that is read-only
        kept = entries()
        excess = sum(entry.bytes for entry in kept) - most
        while excess > 0:
            entry = kept.pop()
            entry.path.unlink(missing_ok=True)
            excess -= entry.bytes


def _tell(topic: str, words: str) -> None:
    """Warns, once in a process."""
    if topic not in _told:
        _told.add(topic)
        warnings.warn(words, stacklevel=3)
