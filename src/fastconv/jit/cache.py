"""Keeps machine code on disk, so that a kernel is compiled once and not once per process.

Any number of processes may share the folder: an entry appears whole or not at all, and one that
does not match its checksum counts as missing. So does one that others could have made or changed
(see :mod:`fastconv.jit.trust`): a checksum anyone can compute. No trouble with the folder is an
error: the worst it costs is compiling again.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fastconv.jit import trust

# Changes whenever an entry's layout or the making of keys does.
_MAGIC = b"fastconv cubin 1"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_SUFFIX = ".cubin"
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")  # an entry's: the folder may be shared
_STALE_S = 3600.0
_TROUBLE = (OSError, RuntimeError)  # the latter from Path.home() where there is none

_warned = False
_cleaned = False


class Size(NamedTuple):
    """How much the cache holds."""

    bytes: int
    entries: int


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


def load(key: str) -> bytes | None:
    """What was stored under the key, or None. A damaged entry is removed.

    One that is not to be trusted is ignored, with a warning, once in a process.
    """
    try:
        path = _path(key)
        entry = trust.read(path)
    except _TROUBLE:
        return None
    payload = entry[_HEADER_BYTES:]
    if entry[:_HEADER_BYTES] == _header(key, payload):
        return payload
    with suppress(OSError):
        path.unlink()
    return None


def store(key: str, payload: bytes) -> None:
    """Stores the payload, or warns, once in a process, that the folder cannot be written.

    Nothing is written to a folder that is not to be trusted: it would not be used.
    """
    try:
        path = _path(key)
        if words := trust.distrusted_folder(path.parent):
            trust.warn(words)
            return
        trust.make_folder(path.parent)
        _clean(path.parent)
        replace(path, _header(key, payload) + payload, trust.FILE_MODE)
    except _TROUBLE as error:
        # Windows refuses to replace a file that another process is just reading: no harm.
        if load(key) != payload:
            _warn(error)


def size() -> Size:
    """What all entries take."""
    sizes = []
    with suppress(*_TROUBLE):
        for path in folder().glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # removed since
                sizes.append(path.stat().st_size)
    return Size(sum(sizes), len(sizes))


def _path(key: str) -> Path:
    return folder() / f"{key}{_SUFFIX}"


def _header(key: str, payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + payload).digest()


def replace(path: Path, contents: bytes, mode: int = 0o666) -> None:
    """Writes the file so that readers see the old one or the new one, never a part.

    It has the bits of ``mode`` that the umask allows.
    """
    # The checksum, not fsync, guards against a machine that stops before the data is on disk.
    temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(contents)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _clean(folder: Path) -> None:
    """Removes, once in a process, what killed ones have left half written."""
    global _cleaned
    if _cleaned:
        return
    _cleaned = True
    oldest = time.time() - _STALE_S  # nobody writes for so long
    with suppress(OSError):  # no need to: another process may be at it
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.stat().st_mtime < oldest:
                path.unlink()


def _warn(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"fastconv cannot keep compiled kernels, so every process compiles them again: {error}."
            " Set FASTCONV_CACHE_DIR to a folder that can be written.",
            stacklevel=2,
        )
