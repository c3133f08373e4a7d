"""mypy accepts a user's script that has every public name, and refuses what is wrong in it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fastconv

SCRIPT = Path(__file__).parents[1] / "data" / "typed_use.py"
SOURCES = Path(fastconv.__file__).parents[1]


def _checked(script: Path, folder: Path) -> list[str]:
    """What mypy says of a script, as a user without any settings would run it."""
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent",
        f"--cache-dir={folder / 'cache'}", "--no-error-summary", str(script),
    ]  # fmt: skip
    environment = {**os.environ, "MYPYPATH": str(SOURCES)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_a_users_script_is_accepted(tmp_path: Path) -> None:
    assert _checked(SCRIPT, tmp_path) == []


def _used(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fastconv":
            yield node.attr


def test_the_script_has_every_name() -> None:
    used = set(_used(SCRIPT.read_text(encoding="utf-8")))
    assert used == {*fastconv.__all__, "__version__", "no_such_name"}
