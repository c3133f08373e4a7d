"""Decides which cached files may be used: machine code from the cache runs with the user's rights.

A file may be used if it and the folder that holds it belong to the user or to root, and nobody else
can write them. Members of the file's group are others as well, even if the group is private: its
members can change.

- A sticky bit does not make up for a folder that others can write. They cannot replace files there,
  but can add them: files of their own whose ownership they give away, and hard links to the
  user's files.
- Others must not be able to replace anything on the path either, up to ``/``: each folder and each
  symbolic link belongs to the user or to root, and folders that others can write are sticky, as
  ``/tmp`` is.
- Symbolic links are followed one by one. If the file's own name is a link, both folders are
  checked: the one that holds the link, and the one that holds the file.

On Windows, which has no such permission bits, nothing is checked: folders in a user's profile
inherit permissions for the user alone. Access control lists that leave no trace in the mode
(those of macOS and NFSv4) are not seen.
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
# Others may read files, since root may have compiled them into a container's image. Others must not
# write them, whatever the umask: with a umask of 002 the group could, and the file would not be
# used.
FILE_MODE = 0o644

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # symbolic links on a path, as many as Linux follows
_HAS_OWNERS = hasattr(os, "geteuid")
_once = threading.Lock()  # the first warning acquires it and never releases it


class Distrusted(OSError):
    """The file may not be used; the message says why."""


class _Place(NamedTuple):
    """A folder, link or file that a path leads through."""

    path: str
    status: os.stat_result
    close: bool  # the file itself, or a folder that holds the file or a link to it


def distrusted(path: Path) -> str | None:
    """Why the file at ``path`` may not be used, in words; None if it may, or does not exist.

    The answer stays valid for later operations on the path, such as loading a library: if the file
    may be used, only the user and root can change the file or the path.
    """
    return _distrusted(path)


def distrusted_folder(folder: Path) -> str | None:
    """Why no file in a folder may be used; None if files may, or if there is no such folder."""
    return _distrusted(folder, os.curdir)


def read(path: Path) -> bytes:
    """The contents of a file.

    Raises:
        Distrusted: the file may not be used; a warning has been given.
        OSError: the file cannot be read.
    """
    words = distrusted(path)
    if words is None:
        with path.open("rb") as file:
            # Checks the open file, since the path may name another one by now.
            words = _trouble(_Place(str(path), os.fstat(file.fileno()), True))
            if words is None:
                return file.read()
    warn(words)
    raise Distrusted(words)


def warn(words: str) -> None:
    """Warns, once per process, that cached files are ignored, for the given reason."""
    if _once.acquire(blocking=False):
        warnings.warn(
            f"fastconv ignores cached files that others may have made or changed: {words}. Every "
            "process compiles its kernels instead. Remove the others' write permission (chmod "
            "go-w; chmod 700 for the cache's own folder), or set FASTCONV_CACHE_DIR to a folder "
            "that is yours alone.",
            stacklevel=3,
        )


def make_folder(folder: Path) -> None:
    """Makes a folder, and the parents it lacks, for the user alone; changes no existing folder."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(FOLDER_MODE, exist_ok=True)


def _distrusted(path: Path, *more: str) -> str | None:
    if not _HAS_OWNERS:
        return None
    try:
        places = _places([*path.absolute().parts[1:], *more])
        return next(filter(None, map(_trouble, places)), None)
    except (FileNotFoundError, NotADirectoryError):
        return None  # there is no file that could be used
    except OSError as error:
        return f"{error.filename or path} cannot be examined ({error.strerror})"


def _places(names: Sequence[str]) -> Iterator[_Place]:
    """All that the system visits as it resolves a path of these names, from the root folder on."""
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
    """Why a place is not safe from other users, in words; None if it is."""
    path, status, close = place
    if not _HAS_OWNERS:
        return None
    user, owner = os.geteuid(), status.st_uid
    # In some containers (user namespaces), the machine's root appears as the user "nobody". The
    # owner of the root folder controls everything, and is accepted for folders further up. It is
    # not accepted close to the file, because other users' files belong to "nobody" as well.
    if owner not in (user, 0) and (close or owner != os.lstat(os.sep).st_uid):
        return f"{path} belongs to user {owner}, neither to you (user {user}) nor to root"
    if stat.S_ISLNK(status.st_mode):
        return None  # a link has no mode; its folder decides who can replace it
    if status.st_mode & _OTHERS_WRITE and (close or not status.st_mode & stat.S_ISVTX):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
