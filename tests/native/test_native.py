"""When the native host path is used: built in the background, wanted, trusted, or not."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from effort import wait_until
from fastconv import native
from fastconv.backends import cuda
from fastconv.kernels import planner
from fastconv.native import Unavailable, build, compiler
from fastconv.problem import Problem
from native.helpers import (
    INPUT,
    WEIGHT,
    Compiler,
    check_works,
    forget,
    in_child,
    noted_warnings,
    run,
    tensors,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")


class TestBackground:
    def test_a_process_goes_on_meanwhile(self, fake: Compiler) -> None:
        fake.set(held=True)
        program = f"""
native.start_build()
call()
assert native.conv2d is None and "being built" in native.describe()
open({str(fake.go)!r}, "w").close()
native.finish()
call()
assert native.conv2d is native.load()
"""
        assert run(program) == ["Python", "native"]
        assert len(fake.calls) == 1

    def test_the_build_outlives_its_process(self, fake: Compiler) -> None:
        fake.set(held=True)
        assert run("call(); native.start_build()") == ["Python"]
        assert not build.is_built(), "the process has not waited"
        fake.go.touch()
        wait_until(build.is_built)
        assert run("call(); native.start_build(); call()") == ["native", "native"]
        assert len(fake.calls) == 1

    def test_planning_for_a_gpu_starts_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Started(Exception):
            pass

        def start_build() -> None:
            raise Started

        monkeypatch.setattr(native, "start_build", start_build)
        problem = Problem.of(INPUT, WEIGHT, (1, 1), (1, 1, 1, 1), (1, 1), 1)
        output, input, weight = tensors(problem.output_shape, INPUT, WEIGHT)
        with pytest.raises(Started):
            cuda.family(planner.forward, problem, input, output, weight, None)

    def test_failure(self, fake: Compiler) -> None:
        fake.set(status=3, words="what is wrong")
        with noted_warnings() as words:
            for _ in range(2):
                native.start_build()
                native.finish()
                check_works()
        (warning,) = words
        for part in (str(fake.path), "ended with status 3", "what is wrong", "FASTCONV_NATIVE=0"):
            assert part in warning
        assert "did not compile" in native.describe()
        assert native.conv2d is None

        forget()  # A later process neither tries nor warns.
        assert "did not compile" in native.describe()
        with noted_warnings() as words:
            native.start_build()
            native.finish()
            check_works()
        assert words == []
        assert len(fake.calls) == 1
        assert "did not compile" in native.describe()
        with pytest.raises(Unavailable, match=r"(?s)did not compile: .*what is wrong"):
            native.make()
        assert len(fake.calls) == 2
        fake.set()
        assert native.make()[1]
        assert not compiler.failure(build.library())

    def test_threads_that_begin(self, fake: Compiler) -> None:
        fake.set(seconds=0.2)
        threads = [threading.Thread(target=native.start_build) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        native.finish()
        assert len(fake.calls) == 1
        assert native.conv2d is native.load()

    @pytest.mark.parametrize("name", ["", "application", "python-editor", "pythons", "python3"])
    def test_no_application_is_started(
        self, name: str, fake: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An application that embeds Python may be what sys.executable names, or links to."""
        started, application = tmp_path / "started", tmp_path / "application"
        application.write_text(f"#!/bin/sh\ntouch {started}\n")
        application.chmod(0o755)
        named = tmp_path / name
        if name not in ("", "application"):
            named.symlink_to(application)
        monkeypatch.setattr(sys, "executable", str(named) if name else None)
        native.start_build()
        native.finish()
        check_works()
        assert not started.exists()
        assert re.search("Python interpreter, which sys.executable is not", native.describe())
        assert native.make()[1]  # It compiles in this process.
        assert fake.calls


class TestWanted:
    def test_not(self, fake: Compiler, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FASTCONV_NATIVE", "0")
        native.start_build()
        native.finish()
        assert fake.calls == []
        native.make()  # An explicit build is made all the same.
        program = """
native.start_build(); native.finish(); call()
assert native.conv2d is None and native.describe() == "Python (FASTCONV_NATIVE=0)"
assert "host-" not in open("/proc/self/maps").read()
"""
        assert run(program) == ["Python"]

    def test_required(self, fake: Compiler) -> None:
        """The library is built at the first call, also on a CPU."""
        program = "assert native.conv2d is native._require; call()"
        assert run(program, FASTCONV_NATIVE="1") == ["native"]
        assert len(fake.calls) == 1

    def test_required_but_it_does_not_compile(
        self, fake: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FASTCONV_NATIVE", "1")
        native.conv2d = native._require
        fake.set(status=1)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"(?s)did not compile.*some words"):
                check_works()
        assert len(fake.calls) == 1

    def test_required_in_a_capture(self, fake: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        native.conv2d = native._require
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(Unavailable, match=r"captured.*`fastconv build` first"):
            check_works()
        native.make()
        check_works()
        assert native.conv2d is native.load()

    def test_neither(self) -> None:
        program = """
try:
    call()
except ValueError as error:
    print(error)
"""
        (words,) = run(program, FASTCONV_NATIVE="banana")
        assert "FASTCONV_NATIVE should be 0 or 1" in words
        assert "'banana'" in words


class TestInTheWay:
    """Builds do not begin during captures, tracing, or in forked processes; later they do."""

    @pytest.fixture(autouse=True)
    def _afterwards(self, fake: Compiler) -> Iterator[None]:
        yield
        native.start_build()
        native.finish()
        assert len(fake.calls) == 1
        assert native.conv2d is native.load()

    def _check_nothing_begins(self, fake: Compiler) -> None:
        native.start_build()
        native.finish()
        assert native.conv2d is None
        assert not fake.calls

    def test_capture(self, fake: Compiler) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            self._check_nothing_begins(fake)

    def test_tracing(self, fake: Compiler) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            self._check_nothing_begins(fake)

    def test_fork(self, fake: Compiler) -> None:
        in_child(lambda: self._check_nothing_begins(fake))


class TestTrust:
    @pytest.fixture
    def mark(self, folder: Path, tmp_path: Path) -> Path:
        """A file that exists once the planted library has been loaded."""
        mark, source = tmp_path / "mark", tmp_path / "planted.c"
        source.write_text(
            "#include <fcntl.h>\n__attribute__((constructor)) static void load(void) "
            f'{{ open("{mark}", O_CREAT | O_WRONLY, 0600); }}\n'
        )
        folder.mkdir(0o700)
        library = build.library()
        subprocess.check_call(["cc", "-shared", "-fPIC", source, "-o", library])
        library.chmod(0o644)
        return mark

    @pytest.mark.parametrize("which", ["folder", "file"])
    @pytest.mark.parametrize("required", [False, True], ids=["", "required"])
    def test_others_can_write(
        self, mark: Path, which: str, required: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = build.library()
        (library if which == "file" else library.parent).chmod(0o777)
        if required:
            monkeypatch.setenv("FASTCONV_NATIVE", "1")
            native.conv2d = native._require
            with pytest.raises(Unavailable, match="can be written by others"):
                check_works()
        else:
            with noted_warnings() as words:
                for _ in range(2):
                    native.start_build()
                    check_works()
            (warning,) = words
            assert "native host path is not used" in warning
            assert "can be written by others" in warning
            assert "can be written by others" in native.describe()
            assert native.conv2d is None
        assert not mark.exists()

    def test_one_s_own(self, mark: Path) -> None:
        """The user's own library is loaded, which makes the mark, but is no Python module."""
        with noted_warnings() as words:
            native.start_build()
            check_works()
        (warning,) = words
        assert "does not load" in warning
        assert mark.exists()
