"""Compilers in processes of their own: they give what this process would, and leave nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastconv import jit
from fastconv.jit import compile, launch, nvrtc, processes
from fastconv.jit.workers import Workers
from test_jit import BODY, needs_nvrtc, scale

pytestmark = needs_nvrtc

PATIENCE_S = 60
ARCH = "sm_80"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Threads may not compile in this process if they can have another; those that were started."""
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "MOST_HERE", 0)
    started: list[Any] = []

    class Noted(processes._Compiler):
        def __init__(self, version: tuple[int, int]) -> None:
            super().__init__(version)
            started.append(self)

    monkeypatch.setattr(processes, "_Compiler", Noted)
    yield started
    assert not processes._running
    assert all(one._process.returncode is not None for one in started)


def _idle(workers: Workers) -> None:
    """Waits until no thread is left that has a process."""
    until = time.monotonic() + PATIENCE_S
    while workers._threads or processes._running:
        assert time.monotonic() < until
        time.sleep(0.001)


def _program(body: str = BODY) -> nvrtc.Program:
    text = scale(body=body).text
    return nvrtc.Program(text, "scale.cu", compile.included(text), compile._options(ARCH))


def _but_for_time(log: str) -> str:
    return re.sub(r"Compile time = .* ms", "", log)


@pytest.mark.parametrize("body", [BODY, BODY.replace("tile[threadIdx.x] *", "pile *")])
def test_the_same_comes_of_a_program(body: str, elsewhere: list[Any]) -> None:
    here = nvrtc.compiled(_program(body), compile._nvrtc())
    with processes.allowed():
        for _ in range(2):
            there = processes.compiled(_program(body), jit.nvrtc_version())
            assert there is not None
            assert (there.cubin, there.error) == (here.cubin, here.error)
            assert _but_for_time(there.log) == _but_for_time(here.log) != ""
    assert bool(here.error) == (body != BODY)
    assert len(elsewhere) == 1


def test_errors_are_those_of_the_kernel() -> None:
    kernel = scale(7, BODY.replace("tile[threadIdx.x] *", "pile[threadIdx.x] *"))
    with processes.allowed(), pytest.raises(jit.CompilationError, match='"pile" is undefined'):
        jit.compile_kernel(kernel, ARCH)


def test_threads_have_one_each_until_they_end(
    elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(processes.allowed)
    monkeypatch.setattr(launch, "_workers", workers)
    monkeypatch.setattr(launch, "compile_threads", 3)
    kernels = [scale(factor) for factor in range(9)]
    assert len(set(jit.build_all(kernels, ARCH))) == 9
    assert len(elsewhere) in range(1, 4)
    _idle(workers)


def test_what_is_compiled_ahead_is_not_in_the_way(
    elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "MOST_HERE", 4)
    workers = Workers(processes.allowed)
    workers.begin("ahead", partial(jit.compile_kernel, scale(), ARCH), 2)
    ahead = workers._pieces["ahead"].future.result(PATIENCE_S)
    _idle(workers)
    assert len(elsewhere) == 1
    asked = workers.ask("asked", partial(jit.compile_kernel, scale(), ARCH), 2)
    assert asked.result(PATIENCE_S).cubin == ahead.cubin
    _idle(workers)
    assert len(elsewhere) == 1


def test_no_more_than_there_may_be(elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST", 0)
    with processes.allowed():
        assert jit.compile_kernel(scale(), ARCH).cubin
    assert not elsewhere


def test_only_where_it_is_crowded(elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "MOST_HERE", 1)
    with processes.allowed():
        assert jit.compile_kernel(scale(), ARCH).cubin
    assert not elsewhere


def test_threads_of_others_compile_here(elsewhere: list[Any]) -> None:
    assert jit.compile_kernel(scale(), ARCH).cubin
    assert not elsewhere


def test_one_that_was_killed(elsewhere: list[Any]) -> None:
    expected = nvrtc.compiled(_program(), compile._nvrtc()).cubin
    with processes.allowed():
        for _ in range(3):
            assert jit.compile_kernel(scale(), ARCH).cubin == expected
            elsewhere[0]._process.kill()
    assert len(elsewhere) == 1  # who has lost one does without


@pytest.mark.parametrize("trouble", ["another version", "no interpreter", "a program", "no file"])
def test_where_there_can_be_none(
    trouble: str, elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if trouble == "another version":
        monkeypatch.setattr(compile, "nvrtc_version", lambda: (99, 0))
    elif trouble == "no file":
        monkeypatch.setattr(nvrtc, "__file__", str(tmp_path / "archive.zip/nvrtc.py"))
    else:
        missing = str(tmp_path / "python") if trouble == "no interpreter" else "/bin/true"
        monkeypatch.setattr(sys, "executable", missing)
    with processes.allowed():
        assert jit.compile_kernel(scale(), ARCH).cubin
    assert not elsewhere


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_none_outlives_the_process() -> None:
    program = """
from fastconv.jit import processes, compile
from test_jit import scale
import os

compile.MOST_HERE = 0
with processes.allowed():
    compile.compile_kernel(scale(), "sm_80")
    (one,) = processes._running
    print(one._process.pid, flush=True)
    os._exit(0)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, encoding="utf-8", timeout=120, check=True,
    )  # fmt: skip
    until = time.monotonic() + PATIENCE_S
    while _is_alive(int(ended.stdout)):
        assert time.monotonic() < until
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    """Zombies are not: who is left to wait for them is another's affair."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
