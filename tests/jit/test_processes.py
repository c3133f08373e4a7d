"""Compiler processes: they give the same machine code, and none is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from effort import PATIENCE_S, wait_until
from fastconv import jit
from fastconv.jit import compile, nvrtc, pool, processes
from fastconv.jit.workers import Workers
from test_jit import BODY, needs_nvrtc, scale

pytestmark = needs_nvrtc

ARCH = "sm_80"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Has threads compile in processes of their own where they can; the processes they started."""
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "MOST_IN_PROCESS", 0)
    monkeypatch.setattr(processes, "START_S", PATIENCE_S)
    started: list[Any] = []

    class Noted(processes._Compiler):
        def __init__(self, version: tuple[int, int]) -> None:
            super().__init__(version)
            started.append(self)

    monkeypatch.setattr(processes, "_Compiler", Noted)
    monkeypatch.setattr(processes, "_start_failed", False)
    yield started
    assert not processes._owners
    assert all(one._process.returncode is not None for one in started)


def _idle(workers: Workers) -> None:
    """Waits until no thread has a compiler process."""
    wait_until(lambda: not workers._threads and not processes._owners)


def _program(body: str = BODY) -> nvrtc.Program:
    text = scale(body=body).text
    return nvrtc.Program(text, "scale.cu", compile.included(text), compile._options(ARCH))


def _but_for_time(log: str) -> str:
    return re.sub(r"Compile time = .* ms", "", log)


@pytest.mark.parametrize("body", [BODY, BODY.replace("tile[threadIdx.x] *", "pile *")])
def test_processes_give_the_same_machine_code(body: str, elsewhere: list[Any]) -> None:
    here = nvrtc.compile_program(_program(body), compile._nvrtc())
    with processes.allowed():
        for _ in range(2):
            there = processes.compile_program(_program(body), jit.nvrtc_version())
            assert there is not None
            assert (there.cubin, there.error) == (here.cubin, here.error)
            assert _but_for_time(there.log) == _but_for_time(here.log) != ""
    assert bool(here.error) == (body != BODY)
    assert len(elsewhere) == 1


def test_errors_are_those_of_the_kernel() -> None:
    kernel = scale(7, BODY.replace("tile[threadIdx.x] *", "pile[threadIdx.x] *"))
    with processes.allowed(), pytest.raises(jit.CompilationError, match='"pile" is undefined'):
        jit.compile_kernel(kernel, ARCH)


def test_each_thread_has_one_process_until_it_ends(
    elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(processes.allowed)
    monkeypatch.setattr(pool, "_workers", workers)
    monkeypatch.setattr(pool, "compile_threads", 3)
    kernels = [scale(factor) for factor in range(9)]
    assert len(set(jit.build_all(kernels, ARCH))) == 9
    assert len(elsewhere) in range(1, 4)
    _idle(workers)


def test_kernels_compiled_ahead_use_a_process(
    elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "MOST_IN_PROCESS", 4)
    workers = Workers(processes.allowed)
    workers.submit_ahead("ahead", partial(jit.compile_kernel, scale(), ARCH), 2)
    ahead = workers._tasks["ahead"].future.result(PATIENCE_S)
    _idle(workers)
    assert len(elsewhere) == 1
    asked = workers.submit("asked", partial(jit.compile_kernel, scale(), ARCH), 2)
    assert asked.result(PATIENCE_S).cubin == ahead.cubin
    _idle(workers)
    assert len(elsewhere) == 1


@pytest.mark.parametrize("limit", [0, 2])
def test_no_more_processes_than_allowed(
    limit: int, elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds however many threads start one at once, and however long that takes."""
    monkeypatch.setenv(processes.VARIABLE, str(limit))
    workers = Workers(processes.allowed)
    gate = threading.Barrier(6)

    def work(factor: int) -> bytes:
        gate.wait(PATIENCE_S)
        return jit.compile_kernel(scale(factor), ARCH).cubin

    futures = [workers.submit(n, partial(work, n), 6) for n in range(6)]
    assert len({future.result(PATIENCE_S) for future in futures}) == 6
    _idle(workers)
    assert len(elsewhere) <= limit
    assert bool(elsewhere) == bool(limit)


def test_a_limit_that_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processes.VARIABLE, "many")
    with pytest.raises(ValueError, match=r"FASTCONV_COMPILE_PROCESSES .* but got 'many'"):
        jit.compile_kernel(scale(), ARCH)


def test_the_first_threads_compile_in_this_process(
    elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "MOST_IN_PROCESS", 1)
    with processes.allowed():
        assert jit.compile_kernel(scale(), ARCH).cubin
    assert not elsewhere


def test_threads_outside_of_the_pool_compile_in_this_process(elsewhere: list[Any]) -> None:
    assert jit.compile_kernel(scale(), ARCH).cubin
    assert not elsewhere


def test_a_process_that_was_killed(elsewhere: list[Any]) -> None:
    expected = nvrtc.compile_program(_program(), compile._nvrtc()).cubin
    with processes.allowed():
        for _ in range(3):
            assert jit.compile_kernel(scale(), ARCH).cubin == expected
            elsewhere[0]._process.kill()
    assert len(elsewhere) == 1  # the thread starts no second process


PRINTS = "#!/bin/sh\necho Using the python of this cluster\nsleep 60\n"
SILENT = "#!/bin/sh\nsleep 60\n"


@pytest.mark.parametrize(
    "trouble",
    ["another version", "no interpreter", "a program", "no file", "prints", "silent"],
)
def test_processes_that_cannot_be_started(
    trouble: str, elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Starting is tried once, and given up in time."""
    if trouble == "another version":
        monkeypatch.setattr(compile, "nvrtc_version", lambda: (99, 0))
    elif trouble == "no file":
        monkeypatch.setattr(nvrtc, "__file__", str(tmp_path / "archive.zip/nvrtc.py"))
    else:
        made = tmp_path / ("python3" if trouble != "a program" else "true")
        made.touch(0o700)
        if trouble in ("prints", "silent"):
            made.write_text(PRINTS if trouble == "prints" else SILENT)
        monkeypatch.setattr(sys, "executable", str(made))
        monkeypatch.setattr(processes, "START_S", 0.3)
    for _ in range(2):
        with processes.allowed():
            assert jit.compile_kernel(scale(), ARCH).cubin
    assert not elsewhere
    assert processes._start_failed == (trouble != "a program")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("python", True),
        ("python3", True),
        ("python3.12", True),
        ("python3.13t", True),
        ("python3.11-dbg", True),
        ("Python.exe", True),
        ("pythonw.exe", True),
        ("python_d.exe", True),
        ("blender", False),
        ("uwsgi", False),
        ("pythonista", False),
        ("python-editor", False),
        ("python3-config", False),
        ("ipython", False),
    ],
)
def test_what_is_an_interpreter(
    name: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link = tmp_path / name, tmp_path / "link"
    link.symlink_to(file)
    assert not processes.is_python(str(file)), "there is none"
    file.touch(0o700)
    for path in (file, link):
        assert processes.is_python(str(path)) == expected
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not processes.is_python(str(file))


def test_missing_files_are_no_interpreters(tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    for executable in (None, "", str(tmp_path / "python")):
        assert not processes.is_python(executable)
    assert processes.is_python(sys.executable)


def test_paths_of_any_kind(elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Text(str):
        """A type that another process cannot unpickle."""

    others = [Path("/nowhere"), Text("/nowhere either"), object()]
    monkeypatch.setattr(sys, "path", [*sys.path, *others])
    with processes.allowed():
        assert jit.compile_kernel(scale(), ARCH).cubin
    assert len(elsewhere) == 1


def test_errors_that_do_not_depend_on_the_program(
    elsewhere: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a compiler process runs out of memory, for example, this process compiles."""
    trouble = nvrtc.Outcome(b"", "", "NVRTC_ERROR_OUT_OF_MEMORY")
    with processes.allowed():
        jit.compile_kernel(scale(), ARCH)
        monkeypatch.setattr(elsewhere[0], "compile", lambda program: trouble)
        assert jit.compile_kernel(scale(), ARCH).cubin


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_none_outlives_the_process() -> None:
    program = """
from fastconv.jit import processes, compile
from test_jit import scale
import os

compile.MOST_IN_PROCESS = 0
with processes.allowed():
    compile.compile_kernel(scale(), "sm_80")
    print(processes._this_thread.compiler._process.pid, flush=True)
    os._exit(0)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, encoding="utf-8", timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    wait_until(lambda: not _is_alive(int(ended.stdout)))


def _is_alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
