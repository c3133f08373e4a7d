"""Reads and writes the files that commands are given.

Commands check before they begin that their outputs can be written. A file is replaced as a whole,
so that an interruption or a full disk leaves either the old contents or the new.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastconv.jit import cache, trust


class FileError(ValueError):
    """A file cannot be read or written; the message says which and why."""


def read_bytes(path: Path) -> bytes:
    """The contents of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The contents of a text file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"cannot read {path}: it is not UTF-8 text") from error


def read_json(path: Path) -> Any:
    """The value that a JSON file holds."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise FileError(f"{path} is no JSON: {error}") from error
    except RecursionError as error:
        raise FileError(f"{path} cannot be read: its JSON is nested too deeply") from error


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | str | None] = ()) -> None:
    """Raises a FileError unless all outputs can be written.

    No two outputs may be the same file, and no output may be one of the inputs. None stands for a
    file that is not requested.
    """
    taken = {Path(path).resolve(): "read" for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        _check_output(path)
        if not replaceable(path):
            continue
        if use := taken.get(path.resolve()):
            raise FileError(f"cannot write {path}: it is to be {use} as well")
        taken[path.resolve()] = "written"


def make_folder(path: Path, private: bool = False) -> None:
    """Makes a folder unless it exists; raises a FileError if files cannot be written there.

    If ``private``, the folder and the parents that are made are accessible to the user alone.
    """
    try:
        if private:
            trust.make_folder(path)
        path.mkdir(parents=True, exist_ok=True)
        _try_folder(path)
    except FileExistsError as error:
        raise FileError(f"cannot write to {path}: it is not a folder") from error
    except OSError as error:
        raise FileError(f"cannot write to {path}: {error.strerror}") from error


def write(path: Path, contents: str | bytes) -> None:
    """Replaces the contents of a file at once; a device or a pipe is written to instead.

    A symbolic link stays a link: the file that it leads to is replaced.
    """
    encoded = contents.encode() if isinstance(contents, str) else contents
    try:
        if not replaceable(path):
            path.write_bytes(encoded)
            return
        target = path.resolve()
        mode = target.stat().st_mode if target.exists() else None
        cache.replace(target, encoded)
        if mode is not None:
            target.chmod(mode)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error


def replaceable(path: Path) -> bool:
    """Whether a new file can be moved to the path, in place of a file that may be there.

    That is not so for devices and pipes, for names of open files such as ``/dev/stdout``, and in
    folders that cannot be written.
    """
    if path.absolute().parts[1:2] in (("dev",), ("proc",)):
        return False
    if not path.exists():
        return True
    return path.is_file() and os.access(path.resolve().parent, os.W_OK)


def _check_output(path: Path) -> None:
    try:
        if path.is_dir():
            raise FileError(f"cannot write {path}: it is a folder")
        parent = path.resolve().parent
        if not path.exists() and not parent.is_dir():
            raise FileError(f"cannot write {path}: there is no folder {parent}")
        if path.exists() and not os.access(path, os.W_OK):
            raise FileError(f"cannot write {path}: it is write-protected")
        if replaceable(path):
            _try_folder(parent)
    except (OSError, RuntimeError) as error:  # resolve() raises RuntimeError for a loop of links
        raise FileError(f"cannot write {path}: {getattr(error, 'strerror', error)}") from error


def _try_folder(folder: Path) -> None:
    """Raises an OSError unless files can be made in the folder."""
    with tempfile.TemporaryFile(dir=folder):
        pass
