"""How the native host path's library is built: once, by whichever process, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastconv import cli, native
from fastconv.jit import trust
from fastconv.native import Unavailable, build, compiler
from native.helpers import Compiler, check_works, forget, noted_warnings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")


def builder(library: Path) -> subprocess.Popen[bytes]:
    """A process that builds a library, like those in the background."""
    trust.make_folder(library.parent)
    program = [sys.executable, "-I", "-S", compiler.__file__, str(library)]
    return subprocess.Popen([*program, *build.command()])


def commands_running() -> str:
    """The command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # The process has ended.
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(lines)


def unfinished(folder: Path) -> list[Path]:
    """Temporary folders of libraries that are being built."""
    return [path for path in folder.iterdir() if path.suffix == ".tmp"]


class TestBuilding:
    def test_made_once_and_then_found(self, folder: Path, fake: Compiler) -> None:
        path = folder / build.library().name
        assert native.make() == (path, True)
        assert native.make() == (path, False)
        (call,) = fake.calls
        assert str(build.SOURCES / "host.cc") in call
        assert native.make(again=True) == (path, True)
        assert len(fake.calls) == 2
        assert native.describe() == f"native, as soon as a call is made ({path.name})"

    def test_a_failure_leaves_the_library_that_was_there(
        self, folder: Path, fake: Compiler
    ) -> None:
        path, _ = native.make()
        before = path.read_bytes()
        fake.set(status=1)
        with pytest.raises(native.Unavailable, match="did not compile"):
            native.make(again=True)
        assert path.read_bytes() == before

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
            "a kernel's text",
            "CPU",
        ],
    )
    def test_name(self, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build._key.cache_clear()
        before = build._key()
        sources = shutil.copytree(build.SOURCES, tmp_path / "native")
        changed = sources / ("cpu/multiply.h" if part == "a kernel's text" else "host.cc")
        changed.write_bytes(changed.read_bytes() + b" ")
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
                "text": (build, "SOURCES", sources),
                "a kernel's text": (build, "SOURCES", sources),
                "CPU": (build, "cpu_features", lambda: "avx1024f"),
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
        """One process compiles, and the others read that it failed."""
        fake.set(seconds=0.5, status=1)
        for process in [build.start() for _ in range(8)]:
            process.wait()
        assert len(fake.calls) == 1
        assert "some words" in str(compiler.failure(build.library()))

    def test_killed_builder(self, folder: Path, fake: Compiler) -> None:
        """The next build removes what it leaves, also the compiler's temporary files."""
        fake.set(held=True)
        self._kill_builder(fake, build.library())
        (left,) = unfinished(folder)
        # The compiler left a part of the library, and a temporary file.
        assert len(list(left.iterdir())) == 2
        self._kill_builder(fake, build.library().with_name(f"host-{'0' * 32}.so"))
        assert left not in unfinished(folder)
        assert len(unfinished(folder)) == 1
        fake.go.touch()  # The orphaned compilers end.
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
        """A killed compiler does not keep the next attempt from being made."""
        fake.path.write_text("#!/bin/sh\nkill -9 $$\n")
        with noted_warnings() as words:
            native.start_build()
            native.finish()
        assert words == []
        assert native.describe() == "Python (the library's build was stopped)"
        forget()
        fake.set()
        native.start_build()
        native.finish()
        assert native.conv2d is native.load()

    def test_compiler_that_hangs(
        self, folder: Path, fake: Compiler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The compiler is stopped with all processes that it started, and one warning is given."""
        fake.set(held=True, words="never said")
        monkeypatch.setenv("FASTCONV_BUILD_TIMEOUT", "0.5")
        with noted_warnings() as words:
            native.start_build()
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
        assert len(fake.calls) == 2  # A second attempt was made.
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
            native.start_build()
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
        """CXX may have arguments, as in build systems, or be one path with spaces."""
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
        native.describe()  # It must not raise.
        with noted_warnings() as warned:
            native.start_build()
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


class TestCommand:
    def test_build(self, folder: Path, fake: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
        path = build.library()
        for arguments, words in (
            ([], f"built {path} in "),
            ([], f"{path} exists already; --again compiles it again"),
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
        """The compiler ends after the first report, however slow the machine is."""
        fake.set(held=True)

        def sleep(seconds: float) -> None:
            fake.go.touch()
            time.sleep(seconds)

        clock = SimpleNamespace(time=time.time, monotonic=lambda: 0.0, sleep=sleep)
        monkeypatch.setattr(compiler, "time", clock)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        for options, words in (
            (["--quiet"], ""),
            ([], "\rcompiling, 0:00\x1b[K" if terminal else "compiling, 0:00\n"),
        ):
            fake.go.unlink(missing_ok=True)
            assert cli.main(["build", "--again", *options]) == 0
            captured = capsys.readouterr()
            assert captured.err.startswith(words)
            assert bool(captured.err) == bool(words)
            assert captured.out.startswith("built ")

    def test_the_compiler_s_words_are_shown(
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
