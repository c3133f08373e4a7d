"""The native host path: how it comes about, what it tells the driver, and how PyTorch sees it.

That it computes as Python does is seen in other files, which run with both (``host_path``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import itertools
import os
import re
import shlex
import shutil
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
import oracle
from fastconv import _precision, native
from fastconv.backends import cuda
from fastconv.jit import trust
from fastconv.kernels import planner
from fastconv.native import Unavailable, build, compiler
from fastconv.ops import entries
from fastconv.ops.entries import Entry
from fastconv.problem import Problem
from test_precision import SETTINGS, _pytorch_setting, cudnn  # noqa: F401

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")

INPUT, WEIGHT, BIAS = (2, 4, 6, 5), (6, 4, 3, 3), (6,)
NAMES = ("input", "weight", "bias")


def tensors(*shapes: tuple[int, ...], requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def check_works() -> None:
    some = tensors(INPUT, WEIGHT, BIAS)
    torch.testing.assert_close(fastconv.conv2d(*some, padding=1), F.conv2d(*some, padding=1))


def forget() -> None:
    """Leaves the package as a new process finds it."""
    if native._background is not None:
        native._background.join()
    native.conv2d, native._begun, native._background = None, False, None
    native._forked, native._reason = False, native._BEFORE


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
        self.path = folder / "compiler"
        self.set()

    def set(self, seconds: float = 0, status: int = 0, words: str = "some words") -> None:
        self.path.write_text(
            f'#!/bin/sh\necho "$*" >> {self._log}\nsleep {seconds}\necho {shlex.quote(words)}\n'
            f'for last; do :; done\ntest {status} = 0 || exit {status}\ncp {self._built} "$last"\n'
        )
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def wait_for_a_call(self) -> None:
        while not self.calls:
            time.sleep(0.01)


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
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


PREAMBLE = """
import sys, time, torch, fastconv
import torch.nn.functional as F
from fastconv import native

def call():
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    torch.testing.assert_close(fastconv.conv2d(x, w), F.conv2d(x, w))
    print(native.describe().partition(" ")[0])
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
        assert native.describe() == f"Python (built, {native._BEFORE})"

    @pytest.mark.parametrize("part", ["PyTorch", "ABI", "Python", "SOABI", "text"])
    def test_name(self, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build._key.cache_clear()
        before = build._key()
        (tmp_path / "host.cc").write_bytes(build.SOURCE.read_bytes() + b" ")
        monkeypatch.setattr(
            *{
                "PyTorch": (torch, "__version__", "9.9"),
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
        fake.set(seconds=60)
        process = build.start()
        fake.wait_for_a_call()
        (folder / f"{build.library().name}.{process.pid}.tmp").touch()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        fake.set()
        assert native.make()[1]
        assert native.load()

    def test_killed_compiler(self, fake: Compiler) -> None:
        """It says nothing of the next attempt, which is made."""
        fake.path.write_text("#!/bin/sh\nkill -9 $$\n")
        with noted_warnings() as words:
            native.begin()
            native.finish()
        assert words == []
        assert native.describe() == "Python (the library's building was stopped)"
        forget()
        fake.set()
        native.begin()
        native.finish()
        assert native.conv2d is native.load()

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
        fake.set(seconds=1.5)
        program = """
start = time.monotonic()
native.begin()
assert time.monotonic() - start < 0.5
call()
assert native.conv2d is None and "being built" in native.describe()
native.finish()
call()
assert native.conv2d is native.load()
"""
        assert run(program) == ["Python", "native"]
        assert len(fake.calls) == 1

    def test_the_build_outlives_its_process(self, fake: Compiler) -> None:
        fake.set(seconds=1.5)
        start = time.monotonic()
        assert run("call(); native.begin(); start = time.monotonic()") == ["Python"]
        assert not build.is_built(), "the process has not waited"
        while not build.is_built():
            assert time.monotonic() < start + 60
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
        with pytest.raises(Unavailable, match="(?s)did not compile: .*what is wrong"):
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
            with pytest.raises(Unavailable, match="(?s)did not compile.*some words"):
                check_works()
        assert len(fake.calls) == 1

    def test_required_in_a_capture(self, fake: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        native.conv2d = native._require
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(Unavailable, match="captured.*`fastconv build` before"):
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
    """Calls the function in a forked process, which has half a minute."""
    child = os.fork()
    if not child:
        signal.alarm(30)
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


# What follows calls a copy of the library: with a table of its own, and a `prepare` of the test's.


class Host:
    """A copy of the library, which notes what it asks of Python."""

    def __init__(self, path: Path) -> None:
        # Of two modules by the same name, pybind11 makes but one.
        name = f"of_{path.parent.name}.{build._NAME}"
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        self.module = importlib.util.module_from_spec(spec)
        loader.exec_module(self.module)
        self.conv2d = self.module.conv2d
        self.asked: list[tuple[Any, ...]] = []  # the operator, and its arguments
        self.filled: list[str] = []
        self.module.set_prepare(self._prepare)
        self.answer: Callable[..., Entry] = self._real

    def _prepare(self, operator: str, *arguments: Any) -> Entry:
        self.asked.append((operator, *arguments))
        return self.answer(operator, *arguments)

    def _real(self, operator: str, *arguments: Any) -> Entry:
        entry = entries.prepare(operator, *arguments)
        assert entry.fill is not None
        fill = entry.fill

        def noted(*arguments: Any) -> None:
            self.filled.append(operator)
            fill(*arguments)

        return entry._replace(fill=noted)

    @property
    def operators(self) -> list[str]:
        return [operator for operator, *_ in self.asked]


@pytest.fixture
def host(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    path = tmp_path / "host.so"
    shutil.copy(built, path)
    host = Host(path)
    monkeypatch.setattr(native, "conv2d", host.conv2d)
    return host


def misaligned(tensor: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    moved = torch.empty(tensor.numel() + 1)[1:].view_as(tensor)
    return moved.copy_(tensor)


class TestTable:
    def test_the_same_form_is_prepared_once(self, host: Host) -> None:
        for _ in range(3):
            check_works()
        assert host.operators == ["forward"]
        assert host.filled == ["forward"] * 3

    @pytest.mark.parametrize(
        "form",
        [
            {"input": (3, 4, 6, 5)},
            {"input": (2, 4, 5, 6)},
            {"weight": (6, 4, 2, 3)},
            {"bias": None},
            {"stride": 2},
            {"stride": (1, 2)},
            {"padding": (1, 0)},
            {"padding": ((0, 1), (1, 1))},
            {"dilation": 2},
            {"weight": (6, 2, 3, 3), "groups": 2},
            {"layout": {0: lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}},
            {"layout": {1: lambda w: w.to(memory_format=torch.channels_last)}},
            {"layout": {2: lambda b: b.repeat_interleave(2)[::2]}},
            {"layout": dict.fromkeys(range(3), torch.Tensor.double)},
            {"layout": {0: misaligned}},
            {"layout": {1: misaligned}},
        ],
        ids=str,
    )
    def test_another_form_is_another_entry(self, host: Host, form: dict[str, Any]) -> None:
        def call(form: dict[str, Any]) -> None:
            shapes = {"input": INPUT, "weight": WEIGHT, "bias": BIAS, **form}
            layout = shapes.pop("layout", {})
            some = [shape and torch.randn(shape) for shape in map(shapes.pop, NAMES)]
            some = [layout.get(i, lambda x: x)(tensor) for i, tensor in enumerate(some)]
            geometry = {"padding": 1, **shapes}
            output = fastconv.conv2d(*some, **geometry)
            torch.testing.assert_close(output, oracle.conv2d(*some, **geometry))

        for _ in range(2):
            call({})
            call(form)
        assert len(host.asked) == 2

    def test_the_alignment_of_each_tensor_counts(self, host: Host) -> None:
        """One of those that are copied does not: the other's may not be taken for it."""
        input, weight = tensors(INPUT, WEIGHT)
        fastconv.conv2d(misaligned(input), weight)
        fastconv.conv2d(input, misaligned(weight))
        assert len(host.asked) == 2

    @pytest.mark.parametrize(
        ("forms", "sides"),
        [
            ((1, (1, 1), ((1, 1), (1, 1)), "same", [1, 1], (1,)), (1, 1, 1, 1)),
            ((0, (0, 0), ((0, 0), (0, 0)), "valid", [[0, 0], [0, 0]]), (0, 0, 0, 0)),
            (((1, 2), ((1, 1), (2, 2))), (1, 1, 2, 2)),
        ],
    )
    def test_forms_of_padding(self, host: Host, forms: tuple[Any, ...], sides: Any) -> None:
        input, weight = tensors(INPUT, WEIGHT)
        for padding in forms:  # those that only Python knows do not get here
            fastconv.conv2d(input, weight, padding=padding)
        ((*_, padding, _, _, _),) = host.asked
        assert tuple(padding) == sides

    @pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (4, 4)])
    def test_same_padding_is_that_of_the_kernel(self, host: Host, kernel: Any) -> None:
        input, weight = tensors(INPUT, (6, 4, *kernel))
        for dilation in (1, 2):
            output = fastconv.conv2d(input, weight, padding="same", dilation=dilation)
            expected = F.conv2d(input, weight, padding="same", dilation=dilation)
            torch.testing.assert_close(output, expected)

    @pytest.mark.usefixtures("_pytorch_setting")
    def test_precision(self, host: Host) -> None:
        """PyTorch's setting at the time of the call, unless ours says otherwise."""
        some = tensors(INPUT, WEIGHT)

        def asked(**options: Any) -> list[str]:
            host.asked.clear()
            fastconv.conv2d(*some, **options)
            return [precision for *_, precision in host.asked]

        cudnn.allow_tf32 = False
        assert asked() == ["ieee"]
        cudnn.allow_tf32 = True
        assert asked() == ["tf32"]
        assert asked() == asked(precision="ieee") == []
        cudnn.allow_tf32 = False
        with fastconv.precision("tf32"):
            assert asked() == []
        some = [tensor.double() for tensor in some]
        assert asked() == ["ieee"]
        cudnn.allow_tf32 = True
        assert asked() == [], "of other types there is but one"

    @pytest.mark.usefixtures("_pytorch_setting")
    def test_precision_is_read_as_in_python(self, host: Host) -> None:
        """Whichever of PyTorch's settings was written last, and whichever inherits it."""

        def check(width: int) -> None:
            fastconv.conv2d(*tensors((1, 1, 1, width), (1, 1, 1, 1)))
            *_, precision = host.asked[-1]
            assert precision == _precision.pytorch_setting()

        width = itertools.count(1)
        for apply, _ in [*SETTINGS.values()] * 2:
            apply()
            check(next(width))
        if hasattr(cudnn, "conv"):
            owners = (torch.backends, cudnn, cudnn.conv)
            for values in itertools.product(("none", "ieee", "tf32"), repeat=3):
                for owner, value in zip(owners, values, strict=True):
                    owner.fp32_precision = value
                check(next(width))
        assert len(host.asked) == next(width) - 1

    def test_more_forms_than_are_kept(self, host: Host) -> None:
        host.answer = lambda operator, input, *_: Entry((1, 1, 1, input.shape[3]), False, 0)
        weight, forms = torch.ones(1, 1, 1, 1), 4096
        inputs = [torch.empty(1, 1, 1, 1).expand(1, 1, 1, size + 1) for size in range(forms)]
        for _ in range(2):
            for input in inputs:
                assert fastconv.conv2d(input, weight).shape == input.shape
        assert len(host.asked) == forms
        fastconv.conv2d(torch.empty(2, 1, 1, 1), weight)  # one too many: all are dropped
        assert fastconv.conv2d(inputs[7], weight).shape == inputs[7].shape
        assert len(host.asked) == forms + 2

    def test_threads(self, host: Host) -> None:
        """Sixteen, each with all forms in an order of its own."""
        weight = torch.randn(2, 3, 3, 3)
        inputs = [torch.randn(1, 3, h, w) for h in range(3, 9) for w in range(3, 9)]
        expected = [F.conv2d(input, weight, padding=1) for input in inputs]
        together, wrong = threading.Barrier(16), []

        def work(number: int) -> None:
            together.wait()
            for i in range(10 * len(inputs)):
                i = (i * 5 + number * 7) % len(inputs)
                output = fastconv.conv2d(inputs[i], weight, padding=1)
                if not torch.allclose(output, expected[i], atol=1e-5):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(host.filled) == 16 * 10 * len(inputs)
        before = len(host.asked)
        for input in inputs:
            fastconv.conv2d(input, weight, padding=1)
        assert len(host.asked) == before

    def test_an_error_is_not_kept(self, host: Host) -> None:
        class Special(Exception):
            pass

        def answer(*_: Any) -> Entry:
            raise Special("words")

        host.answer = answer
        some = tensors(INPUT, WEIGHT)
        for count in (1, 2, 3):
            with pytest.raises(Special, match="^words$"):
                fastconv.conv2d(*some)
            assert len(host.asked) == count
        host.answer = host._real
        torch.testing.assert_close(fastconv.conv2d(*some), F.conv2d(*some))

    def test_the_operator_s_own_error(self, host: Host) -> None:
        input, weight = tensors(INPUT, (6, 5, 3, 3))
        with pytest.raises(RuntimeError, match="5 channels|channels") as ours:
            fastconv.conv2d(input, weight)
        native.conv2d = None  # the fixture's patch is undone all the same
        with pytest.raises(RuntimeError) as pythons:
            fastconv.conv2d(input, weight)
        assert str(ours.value) == str(pythons.value)
