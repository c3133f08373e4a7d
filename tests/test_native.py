"""How the native host path comes about: built, found, trusted, wanted, or missing."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv
from effort import PATIENCE_S
from fastconv import cli, native
from fastconv.backends import cuda
from fastconv.jit import trust
from fastconv.kernels import planner
from fastconv.native import Unavailable, build, compiler
from fastconv.problem import Problem

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")

INPUT, WEIGHT, BIAS = (2, 4, 6, 5), (6, 4, 3, 3), (6,)


def tensors(*shapes: tuple[int, ...], requires_grad: bool = False) -> list[Tensor]:
    # In steps of a quarter: sums of products are exact.
    some = (torch.randint(-8, 8, shape) / 4 for shape in shapes)
    return [tensor.requires_grad_(requires_grad) for tensor in some]


close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def check_works() -> None:
    some = tensors(INPUT, WEIGHT, BIAS)
    close(fastconv.conv2d(*some, padding=1), F.conv2d(*some, padding=1))


def forget() -> None:
    """Leaves the package as a new process finds it."""
    if native._background is not None:
        native._background.join()
    native.conv2d, native._begun, native._background = None, False, None
    native._forked, native._reason = False, native._NOT_YET


@pytest.fixture(scope="session")
def built(_native_library: Any) -> Path:
    """The library, which is compiled once for all tests."""
    return build.library()


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder that is not there yet, in what seems to be a new process."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(folder))
    monkeypatch.delenv("FASTCONV_NATIVE", raising=False)
    for name in ("conv2d", "_begun", "_background", "_forked", "_reason"):
        monkeypatch.setattr(native, name, getattr(native, name))  # to be restored
    monkeypatch.setattr(native, "load", functools.cache(native.load.__wrapped__))
    forget()
    yield folder
    forget()


class Compiler:
    """Stands in for the compiler: says something, and copies a library or fails."""

    def __init__(self, folder: Path, built: Path) -> None:
        self._folder, self._log, self._built = folder, folder / "log", built
        self.path, self.go = folder / "compiler", folder / "go"
        self.set()

    def set(
        self, seconds: float = 0, status: int = 0, words: str = "some words", held: bool = False
    ) -> None:
        """What it does from now on; if it is ``held``, not before ``go`` exists."""
        wait = f"while ! test -e {self.go}; do sleep 0.05; done" if held else f"sleep {seconds}"
        self.path.write_text(
            # A temporary file and a part of the library are there at once.
            '#!/bin/sh\nmktemp "${TMPDIR:-/tmp}/cc.XXXXXX" > /dev/null\n'
            'for last; do :; done\n: > "$last"\n'
            f'echo "$*" >> {self._log}\n{wait}\necho {shlex.quote(words)}\n'
            f"test {status} = 0 || exit {status}\n"
            f'cp {self._built} "$last"\nchmod +rwx "$last"\n'  # as linkers do, but for the umask
        )
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def wait_for_a_call(self, before: int = 0) -> None:
        until = time.monotonic() + PATIENCE_S
        while len(self.calls) <= before:
            assert time.monotonic() < until
            time.sleep(0.01)


def builder(library: Path) -> subprocess.Popen[bytes]:
    """A process that builds a library, as those in the background do."""
    trust.make_folder(library.parent)
    program = [sys.executable, "-I", "-S", compiler.__file__, str(library)]
    return subprocess.Popen([*program, *build.command()])


def commands_running() -> str:
    """The command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(lines)


def unfinished(folder: Path) -> list[Path]:
    """What lies in the folder while a library is built."""
    return [path for path in folder.iterdir() if path.suffix == ".tmp"]


@pytest.fixture
def fake(
    folder: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Compiler]:
    (tmp_path / "tools").mkdir()
    fake = Compiler(tmp_path / "tools", built)
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


@contextlib.contextmanager
def noted_warnings() -> Iterator[list[str]]:
    words: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield words
    words += [str(warning.message) for warning in caught]


def run(program: str, **environment: str) -> list[str]:
    """The lines that a process prints; it ends well, without a warning."""
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{PREAMBLE}{program}"],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


PREAMBLE = """
import sys, time, torch, fastconv
import torch.nn.functional as F
from fastconv import cli, native

def call():
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    torch.testing.assert_close(fastconv.conv2d(x, w), F.conv2d(x, w))
    print("Python" if native.conv2d is None else "native")
"""


class TestBuilding:
    def test_made_once_and_then_found(self, folder: Path, fake: Compiler) -> None:
        path = folder / build.library().name
        assert native.make() == (path, True)
        assert native.make() == (path, False)
        (call,) = fake.calls
        assert str(build.SOURCE) in call
        assert native.make(again=True) == (path, True)
        assert len(fake.calls) == 2
        assert native.describe() == f"native from the first call on a GPU on ({path.name})"

    @pytest.mark.parametrize(
        "part",
        [
            "PyTorch",
            "its commit",
            "its CUDA",
            "debugging",
            "library",
            "ABI",
            "Python",
            "SOABI",
            "text",
        ],
    )
    def test_name(self, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build._key.cache_clear()
        before = build._key()
        (tmp_path / "host.cc").write_bytes(build.SOURCE.read_bytes() + b" ")
        monkeypatch.setattr(
            *{
                "PyTorch": (torch, "__version__", "9.9"),
                "its commit": (torch.version, "git_version", "0" * 40),
                "its CUDA": (torch.version, "cuda", "99.9"),
                "debugging": (torch.version, "debug", not torch.version.debug),
                "library": (torch, "__file__", str(tmp_path / "torch/__init__.py")),
                "ABI": (torch._C, "_GLIBCXX_USE_CXX11_ABI", not torch._C._GLIBCXX_USE_CXX11_ABI),
                "Python": (sys.implementation, "cache_tag", "cpython-999"),
                "SOABI": (sysconfig, "get_config_var", lambda name: "another"),
                "text": (build, "SOURCE", tmp_path / "host.cc"),
            }[part]
        )
        build._key.cache_clear()
        assert build._key() != before
        monkeypatch.undo()
        build._key.cache_clear()
        assert build._key() == before

    def test_identity_of_a_library(self, tmp_path: Path) -> None:
        """The build ID that the linker wrote, of whatever length, or the file's size and time."""
        source, library = tmp_path / "some.c", tmp_path / "libsome.so"
        for text, options, length in (
            ("int some;", ["-Wl,--build-id=sha1"], 40),
            ("int other;", ["-Wl,--build-id=sha1"], 40),
            ("int some;", ["-Wl,--build-id=0x0123456789abcdef"], 16),
            ("int some;", ["-Wl,--build-id=none"], None),
        ):
            source.write_text(text)
            subprocess.check_call(["cc", "-shared", *options, source, "-o", library])
            found = build._identity(library)
            assert found is not None
            status = library.stat()
            stamp = f"{status.st_size} {status.st_mtime_ns}"
            assert (found == stamp) == (length is None)
            assert length is None or len(bytes.fromhex(found)) == length // 2
        assert build._identity(source) == "9 " + str(source.stat().st_mtime_ns)
        assert build._identity(tmp_path / "missing.so") is None

    def test_processes_at_once(self, fake: Compiler) -> None:
        fake.set(seconds=0.5)
        processes = [build.start() for _ in range(8)]
        assert [process.wait() for process in processes] == [0] * 8
        assert len(fake.calls) == 1
        assert build.is_built()

    def test_processes_at_once_that_fail(self, fake: Compiler) -> None:
        """One compiles, and the others take its word."""
        fake.set(seconds=0.5, status=1)
        for process in [build.start() for _ in range(8)]:
            process.wait()
        assert len(fake.calls) == 1
        assert "some words" in str(compiler.failure(build.library()))

    def test_killed_builder(self, folder: Path, fake: Compiler) -> None:
        """What it leaves, the compiler's temporary files too, is gone after the next build."""
        fake.set(held=True)
        self._kill_builder(fake, build.library())
        (left,) = unfinished(folder)
        assert len(list(left.iterdir())) == 2  # a part of the library, and a temporary file
        self._kill_builder(fake, build.library().with_name(f"host-{'0' * 32}.so"))
        assert left not in unfinished(folder)
        assert len(unfinished(folder)) == 1
        fake.go.touch()  # what is left of the compilers ends
        assert native.make()[1]
        assert native.load()
        assert {path.suffix for path in folder.iterdir()} == {".lock", ".so"}

    def _kill_builder(self, fake: Compiler, library: Path) -> None:
        before = len(fake.calls)
        process = builder(library)
        fake.wait_for_a_call(before)
        process.kill()
        process.wait()

    def test_what_another_process_builds_is_left_alone(self, folder: Path, fake: Compiler) -> None:
        fake.set(held=True)
        process = builder(build.library().with_name(f"host-{'0' * 32}.so"))
        fake.wait_for_a_call()
        before = unfinished(folder)
        assert len(before) == 1
        assert compiler.compile_library(["cp", str(fake.path)], build.library())
        assert unfinished(folder) == before
        assert process.poll() is None
        fake.go.touch()
        assert process.wait() == 0
        assert unfinished(folder) == []

    def test_other_files_are_left_alone(self, folder: Path, fake: Compiler) -> None:
        folder.mkdir(0o700)
        names = {"host-1.tmp", f"host-{'0' * 32}.tmp", f"host-{'0' * 32}.so", "results.tmp"}
        for name in names:
            (folder / name).touch()
        native.make()
        assert names < {path.name for path in folder.iterdir()}

    def test_killed_compiler(self, fake: Compiler) -> None:
        """It says nothing of the next attempt, which is made."""
        fake.path.write_text("#!/bin/sh\nkill -9 $$\n")
        with noted_warnings() as words:
            native.begin()
            native.finish()
        assert words == []
        assert native.describe() == "Python (the library's build was stopped)"
        forget()
        fake.set()
        native.begin()
        native.finish()
        assert native.conv2d is native.load()

    def test_compiler_that_hangs(
        self, folder: Path, fake: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is stopped with all that it has started, and told of once."""
        fake.set(held=True, words="never said")
        monkeypatch.setenv("FASTCONV_BUILD_TIMEOUT", "0.5")
        with noted_warnings() as words:
            native.begin()
            native.finish()
            check_works()
        (warning,) = words
        for part in (str(fake.path), "not ended in 0.5 s", "FASTCONV_BUILD_TIMEOUT sets"):
            assert part in warning
        assert native.conv2d is None
        assert unfinished(folder) == []
        assert str(fake.path) not in commands_running()
        with pytest.raises(Unavailable, match=r"(?s)did not compile: .*not ended in 0.5 s"):
            native.make()
        assert len(fake.calls) == 2  # it was tried again
        fake.go.touch()
        monkeypatch.setenv("FASTCONV_BUILD_TIMEOUT", "0")
        assert native.make()[1]

    def test_another_process_that_hangs(
        self, fake: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake.set(held=True)
        process = builder(build.library())
        fake.wait_for_a_call()
        monkeypatch.setattr(compiler, "_LATE_S", 0.0)
        monkeypatch.setenv("FASTCONV_BUILD_TIMEOUT", "0.1")
        with pytest.raises(Unavailable, match=r"another process has held .*\.lock for more than"):
            native.make()
        assert compiler.failure(build.library()) is None
        fake.go.touch()
        assert process.wait() == 0

    @pytest.mark.parametrize("value", ["soon", "-1", "nan"])
    def test_time_that_is_none(
        self, value: str, fake: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FASTCONV_BUILD_TIMEOUT", value)
        words = f"FASTCONV_BUILD_TIMEOUT should be seconds, 0 for no limit, but got '{value}'"
        with pytest.raises(ValueError, match=words):
            native.begin()
        with pytest.raises(Unavailable, match=words):
            native.make()
        assert fake.calls == []

    def test_interrupted(self, folder: Path, fake: Compiler) -> None:
        """The compiler ends, and leaves nothing."""
        fake.set(held=True)

        def show(what: str, seconds: float) -> None:
            if fake.calls:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            native.make(show=show)
        assert unfinished(folder) == []
        assert str(fake.path) not in commands_running()

    @pytest.mark.parametrize("mask", [0o000, 0o002, 0o077], ids=oct)
    def test_mode(self, fake: Compiler, mask: int) -> None:
        old = os.umask(mask)
        try:
            native.make()
        finally:
            os.umask(old)
        assert stat.S_IMODE(build.library().stat().st_mode) == 0o644
        assert trust.distrusted(build.library()) is None

    def test_compiler_with_arguments(self, fake: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        """As build systems write it; the folder of a single name may have spaces."""
        monkeypatch.setenv("CXX", f"{fake.path} -first -second")
        native.make()
        assert fake.calls[0].startswith("-first -second -std=")
        spaced = fake.path.with_name("c ++")
        fake.path.rename(spaced)
        monkeypatch.setenv("CXX", str(spaced))
        assert build.command()[:2] == [str(spaced), build._FLAGS[0]]

    @pytest.mark.parametrize(
        ("missing", "words"),
        [
            ("folder", "Not a directory"),
            ("compiler", "no C\\+\\+ compiler .* looked for no-such-compiler"),
            ("Python.h", "there is no .*/Python.h"),
            ("home", "cannot be kept: .*home"),
            ("trust", "cannot be kept: .* can be written by others"),
        ],
    )
    def test_missing(
        self,
        missing: str,
        words: str,
        folder: Path,
        fake: Compiler,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if missing == "folder":
            (tmp_path / "file").touch()
            monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "file/cache"))
        elif missing == "compiler":
            monkeypatch.setenv("CXX", "no-such-compiler")
        elif missing == "Python.h":
            monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        elif missing == "home":
            monkeypatch.setenv("FASTCONV_CACHE_DIR", "~no-such-user/cache")
        else:
            folder.mkdir()
            folder.chmod(0o777)
        native.describe()  # raises nothing
        with noted_warnings() as warned:
            native.begin()
            native.finish()
            check_works()
        assert warned == []
        assert native.conv2d is None
        assert re.search(words, native.describe())
        with pytest.raises(Unavailable, match=words):
            native.make()
        monkeypatch.setenv("FASTCONV_NATIVE", "1")
        native.conv2d = native._require
        with pytest.raises(Unavailable, match=words):
            check_works()
        assert fake.calls == []


class TestBackground:
    def test_a_process_goes_on_meanwhile(self, fake: Compiler) -> None:
        fake.set(held=True)
        program = f"""
native.begin()
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
        assert run("call(); native.begin()") == ["Python"]
        assert not build.is_built(), "the process has not waited"
        fake.go.touch()
        start = time.monotonic()
        while not build.is_built():
            assert time.monotonic() < start + PATIENCE_S
            time.sleep(0.05)
        assert run("call(); native.begin(); call()") == ["Python", "native"]
        assert len(fake.calls) == 1

    def test_planning_for_a_gpu_begins_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Begun(Exception):
            pass

        def begin() -> None:
            raise Begun

        monkeypatch.setattr(native, "begin", begin)
        problem = Problem.of(INPUT, WEIGHT, (1, 1), (1, 1, 1, 1), (1, 1), 1)
        output, input, weight = tensors(problem.output_shape, INPUT, WEIGHT)
        with pytest.raises(Begun):
            cuda.family(planner.forward, problem, input, output, weight, None)

    def test_failure(self, fake: Compiler) -> None:
        fake.set(status=3, words="what is wrong")
        with noted_warnings() as words:
            for _ in range(2):
                native.begin()
                native.finish()
                check_works()
        (warning,) = words
        for part in (str(fake.path), "ended with status 3", "what is wrong", "FASTCONV_NATIVE=0"):
            assert part in warning
        assert "did not compile" in native.describe()
        assert native.conv2d is None

        forget()  # the next process neither tries nor warns
        assert "did not compile" in native.describe()
        with noted_warnings() as words:
            native.begin()
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
        threads = [threading.Thread(target=native.begin) for _ in range(8)]
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
        """One that embeds Python may be what sys.executable names, if need be by a link."""
        started, application = tmp_path / "started", tmp_path / "application"
        application.write_text(f"#!/bin/sh\ntouch {started}\n")
        application.chmod(0o755)
        named = tmp_path / name
        if name not in ("", "application"):
            named.symlink_to(application)
        monkeypatch.setattr(sys, "executable", str(named) if name else None)
        native.begin()
        native.finish()
        check_works()
        assert not started.exists()
        assert re.search("Python interpreter, which sys.executable is not", native.describe())
        assert native.make()[1]  # in this process
        assert fake.calls


class TestWanted:
    def test_not(self, fake: Compiler, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FASTCONV_NATIVE", "0")
        native.begin()
        native.finish()
        assert fake.calls == []
        native.make()  # by hand
        program = """
native.begin(); native.finish(); call()
assert native.conv2d is None and native.describe() == "Python (FASTCONV_NATIVE=0)"
assert "host-" not in open("/proc/self/maps").read()
"""
        assert run(program) == ["Python"]

    def test_required(self, fake: Compiler) -> None:
        """At the first call, of a CPU too."""
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
    """Where nothing may be begun; later on it is."""

    @pytest.fixture(autouse=True)
    def _afterwards(self, fake: Compiler) -> Iterator[None]:
        yield
        native.begin()
        native.finish()
        assert len(fake.calls) == 1
        assert native.conv2d is native.load()

    def _check_nothing_begins(self, fake: Compiler) -> None:
        native.begin()
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


def in_child(function: Callable[[], None]) -> None:
    """Calls the function in a forked process, which is ended if it hangs."""
    child = os.fork()
    if not child:
        signal.alarm(int(PATIENCE_S))
        try:
            function()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestTrust:
    @pytest.fixture
    def mark(self, folder: Path, tmp_path: Path) -> Path:
        """What is there once the planted library has been loaded."""
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
                    native.begin()
                    check_works()
            (warning,) = words
            assert "native host path is not used" in warning
            assert "can be written by others" in warning
            assert "can be written by others" in native.describe()
            assert native.conv2d is None
        assert not mark.exists()

    def test_one_s_own(self, mark: Path) -> None:
        """It is loaded, whence the mark, and found to be no module of Python's."""
        with noted_warnings() as words:
            native.begin()
            check_works()
        (warning,) = words
        assert "does not load" in warning
        assert mark.exists()


class TestCommand:
    def test_build(self, folder: Path, fake: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
        path = build.library()
        for arguments, words in (
            ([], f"built {path} in "),
            ([], f"{path} is there already"),
            (["--again"], f"built {path} in "),
        ):
            assert cli.main(["build", *arguments]) == 0
            assert words in capsys.readouterr().out
        assert len(fake.calls) == 2
        assert cli.main(["build", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["library"], answer["built"]) == (str(path), False)

    @pytest.mark.parametrize("terminal", [False, True])
    def test_progress(
        self,
        terminal: bool,
        fake: Compiler,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        fake.set(seconds=0.2)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        for options, words in (
            (["--quiet"], ""),
            ([], "\rcompiling, 0:00\x1b[K" if terminal else "compiling, 0:00\n"),
        ):
            assert cli.main(["build", "--again", *options]) == 0
            captured = capsys.readouterr()
            assert captured.err.startswith(words)
            assert bool(captured.err) == bool(words)
            assert captured.out.startswith("built ")

    def test_what_is_missing_is_told(
        self, folder: Path, fake: Compiler, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fake.set(status=1, words="some words\nin lines")
        assert cli.main(["build"]) == 2
        assert "some words\nin lines" in capsys.readouterr().err

    def test_info_says_which_path_and_why(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FASTCONV_NATIVE", "0")
        assert cli.main(["info", "--device", "cpu"]) == 0
        assert "Python (FASTCONV_NATIVE=0)" in capsys.readouterr().out
