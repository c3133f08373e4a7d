"""What the tests of the disk cache share: a folder, entries, and the command."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fastconv import cli, jit
from fastconv.jit import cache, compile, trust
from test_jit import scale

DAY_S = 24 * 3600.0
ABOUT = {"source": "scale.cuh", "architecture": "sm_80"}

# Programs of tests import modules without the packages' __init__, which import torch.
WITHOUT_TORCH = """
import os, sys, types
for name in ("fastconv", "fastconv.jit"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].__path__ = sys.argv[1:2]
from fastconv.jit import archive, cache
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet; kernels "compile" to random bytes."""
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setattr(cache, "_told", set())
    monkeypatch.setattr(cache, "_stores", itertools.count())
    monkeypatch.setattr(trust, "_once", threading.Lock())
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(compile, "compile_kernel", compiled)
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kernels.fastconv"


def compiled(kernel: Any, arch: str) -> jit.Compiled:
    return jit.Compiled(kernel.entry, random.Random(kernel.text + arch).randbytes(5000), "")


def not_compiled(kernel: Any, arch: str) -> jit.Compiled:
    raise AssertionError("it should be in the cache")


def key_of(number: int) -> str:
    return f"{number:064x}"


def store_entry(number: int, size: int = 1000, age_s: float = 0.0) -> Path:
    """Stores an entry that was last used so long ago."""
    cache.store("cubin", key_of(number), bytes(size), ABOUT)
    path = cache.folder() / f"{key_of(number)}.cubin"
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def entry_numbers() -> list[int]:
    """The numbers of all entries, the most recently used first."""
    return [int(entry.path.stem, 16) for entry in cache.entries()]


def run_command(*arguments: str | Path) -> int:
    return cli.main(["cache", *map(str, arguments)])


def build_kernels(factors: range, arch: str = "sm_80") -> list[bytes]:
    return [jit.build(scale(factor), arch) for factor in factors]


def run_processes(program: str, *arguments: list[str]) -> None:
    """Runs a program with each list of arguments, all at once."""
    command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + program]
    modules = str(Path(cache.__file__).parent)
    begun = [subprocess.Popen([*command, modules, *each]) for each in arguments]
    assert [process.wait() for process in begun] == [0] * len(arguments)
