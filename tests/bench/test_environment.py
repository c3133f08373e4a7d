"""What benchmark results say about the sources that were measured."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fastconv.bench import environment

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="there is no Git")

IDENTITY = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *IDENTITY, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=True)
    return ended.stdout.strip()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the module in a repository, which the module takes for itself."""
    git(tmp_path, "init", "--quiet")
    copy = tmp_path / "package" / "environment.py"
    copy.parent.mkdir()
    shutil.copy(environment.__file__, copy)
    monkeypatch.setattr(environment, "__file__", str(copy))
    monkeypatch.delenv(environment.COMMIT_VARIABLE, raising=False)
    (tmp_path / "other.txt").write_text("other\n", encoding="utf-8")
    git(tmp_path, "add", "other.txt")
    git(tmp_path, "commit", "--quiet", "--message", "other")
    return copy


def test_a_repository_of_something_else(copied: Path) -> None:
    assert environment._commit() == "unknown"


def test_the_repository_of_the_sources(copied: Path) -> None:
    git(copied.parent, "add", copied.name)
    git(copied.parent, "commit", "--quiet", "--message", "sources")
    commit = git(copied.parent, "describe", "--always")
    assert environment._commit() == commit
    copied.write_text("changed\n", encoding="utf-8")
    assert environment._commit() == f"{commit}-dirty"


def test_no_repository(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(copied.parents[1] / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(copied.parents[2]))
    assert environment._commit() == "unknown"
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "0123abc")
    assert environment._commit() == "0123abc"
