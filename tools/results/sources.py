"""The state of the sources: the commit, whether it is clean, and hashes of what figures depend on.

A file's hash is that of a Git blob, so that the hash of any commit follows from its list of files.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastconv.bench.environment import COMMIT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("src", "tests", "tools")  # All figures depend on files in these folders alone.


class DirtyError(Exception):
    """The commit of the sources is not known, or they differ from it; the message says how."""


def clean_commit(root: Path = ROOT) -> str:
    """The commit of the sources, which have not changed since; raises a DirtyError otherwise.

    A copy without history has its commit in ``FASTCONV_COMMIT``. It is believed here; in the
    repository, :func:`hash_at` shows whether the commit has the sources that were measured. Pages
    and results may have changed, for they are written between two calls.
    """
    if given := os.environ.get(COMMIT_VARIABLE):
        if "dirty" in given:
            raise DirtyError(f"{COMMIT_VARIABLE} is {given!r}: results are of a clean commit")
        return given
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    if commit is None:
        raise DirtyError(f"there is no Git history here: set {COMMIT_VARIABLE} to the commit")
    changed = _git(root, "status", "--porcelain", "--", *MEASURED)
    if changed is None or changed.strip():
        raise DirtyError(f"commit or undo these changes first:\n{changed}")
    return commit.strip()


def hash_now(patterns: Sequence[str], root: Path = ROOT) -> str:
    """The hash of the files in the working tree that the patterns select."""
    return _digest({path: _blob(root / path) for path in _files(patterns, root)})


def hash_at(commit: str, patterns: Sequence[str], root: Path = ROOT) -> str | None:
    """The hash of the same files at a commit; None if it is not in the repository."""
    listed = _git(root, "ls-tree", "-r", commit)
    if listed is None:
        return None
    entries = (line.partition("\t") for line in listed.splitlines())
    blobs = {path: head.split()[2] for head, _, path in entries}
    return _digest({path: blobs[path] for path in blobs if _is_selected(path, patterns)})


def _files(patterns: Sequence[str], root: Path) -> list[str]:
    tops = {pattern.split("/")[0] for pattern in patterns}
    paths = (path for top in tops for path in (root / top).rglob("*") if path.is_file())
    relative = (
        path.relative_to(root).as_posix() for path in paths if "__pycache__" not in path.parts
    )
    return [path for path in relative if _is_selected(path, patterns)]


def _is_selected(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern is the file itself, or a folder that it is in."""
    return any(path == pattern or path.startswith(f"{pattern}/") for pattern in patterns)


def _blob(path: Path) -> str:
    contents = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(contents) + contents).hexdigest()


def _digest(blobs: Mapping[str, str]) -> str:
    lines = "".join(f"{blobs[path]} {path}\n" for path in sorted(blobs))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _git(root: Path, *arguments: str) -> str | None:
    """What a Git command prints; None if it fails, or if there is no Git."""
    try:
        found = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout
