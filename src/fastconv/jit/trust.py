"""Says which kept files may be used: what is loaded from a folder runs with the user's rights.

A file may be used if it and the folder that holds it belong to the user or to root, and nobody else
can write them. Group members are others as well, be the group private: who is in it can change.

- A sticky bit does not make up for a folder that others can write. They cannot replace files there,
  but add some: of their own, which their owner gives away, and names (links) for the user's.
- Nor may others be able to exchange what lies on the way, up to ``/``: each folder and each link
  belongs to the user or to root, and folders that others can write are sticky, as ``/tmp`` is.
- Links are followed one by one. Where the file's own name is one, both folders are checked: the
  one that holds the link, and the one that holds the file.

Windows has no such bits, and there is no check: folders in a user's profile are the user's alone
by inheritance. Nor does it see access lists that leave no trace in the mode (macOS's, NFSv4's).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER_MODE = 0o700
# Not less: what root has kept in the image of a container, others may read. Not what the umask
# leaves: where that is 002, the file would not be used.
FILE_MODE = 0o644

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as in Linux
_HAS_OWNERS = hasattr(os, "geteuid")
_once = threading.Lock()  # taken by the first warning, for good: no two threads get it


class Distrusted(OSError):
    """A file that may not be used; says why."""


class _Place(NamedTuple):
    """What is passed on the way to a file."""

    path: str
    status: os.stat_result
    close: bool  # the file itself, or a folder that holds it or a link to it


def distrusted(path: Path) -> str | None:
    """Why the file at ``path`` may not be used, in words; None if it may, or if there is none.

    The answer holds for what is done next by the path's name, such as loading a library: if the
    file may be used, nobody but the user and root can change it, or what the name stands for.
    """
    return _distrusted(path)


def distrusted_folder(folder: Path) -> str | None:
    """Why nothing in a folder may be used; None if that depends on the file. It may be missing."""
    return _distrusted(folder, os.curdir)


def read(path: Path) -> bytes:
    """What a file holds.

    Raises:
        Distrusted: it may not be used; there has been a warning.
        OSError: it cannot be read.
    """
    words = distrusted(path)
    if words is None:
        with path.open("rb") as file:
            # Of the very file that is read, whatever has its name by now.
            words = _trouble(_Place(str(path), os.fstat(file.fileno()), True))
            if words is None:
                return file.read()
    warn(words)
    raise Distrusted(words)


def warn(words: str) -> None:
    """Warns, once in a process, that something is ignored, given what is wrong with it."""
    if _once.acquire(blocking=False):
        warnings.warn(
            f"fastconv ignores kept files that others may have made or changed: {words}. Kernels "
            "are compiled by every process instead. Take others' right to write away (chmod go-w; "
            "chmod 700 for the cache's own folder), or set FASTCONV_CACHE_DIR to a folder that "
            "is yours alone.",
            stacklevel=3,
        )


def make_folder(folder: Path) -> None:
    """Makes a folder for the user alone, and its parents, whatever the umask; none is changed."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(FOLDER_MODE, exist_ok=True)


def _distrusted(path: Path, *more: str) -> str | None:
    if not _HAS_OWNERS:
        return None
    try:
        way = _way([*path.absolute().parts[1:], *more])
        return next(filter(None, map(_trouble, way)), None)
    except (FileNotFoundError, NotADirectoryError):
        return None  # what is not there harms nobody
    except OSError as error:
        return f"{error.filename or path} cannot be examined ({error.strerror})"


def _way(names: Sequence[str]) -> Iterator[_Place]:
    """All that the system passes as it looks up the names in turn, from the root folder on."""
    here, rest, links = os.sep, [*reversed(names)], 0
    while True:
        status = os.lstat(here)
        yield _Place(here, status, close=len(rest) < 2)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), here)
            target = Path(os.readlink(here))
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            here = os.sep if target.is_absolute() else os.path.dirname(here)
        elif rest:
            name = rest.pop()
            steps = {os.curdir: here, os.pardir: os.path.dirname(here)}
            here = steps.get(name) or os.path.join(here, name)
        else:
            return


def _trouble(place: _Place) -> str | None:
    """What others can do to a place, in words."""
    path, status, close = place
    if not _HAS_OWNERS:
        return None
    user, owner = os.geteuid(), status.st_uid
    # Within some containers (user namespaces), the machine's root is seen as nobody. Whoever has
    # the root folder has everything; but nobody's are the files of other users, too.
    if owner not in (user, 0) and (close or owner != os.lstat(os.sep).st_uid):
        return f"{path} belongs to user {owner}, neither to you (user {user}) nor to root"
    if stat.S_ISLNK(status.st_mode):
        return None  # it can only be replaced, and has no mode
    if status.st_mode & _OTHERS_WRITE and (close or not status.st_mode & stat.S_ISVTX):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
