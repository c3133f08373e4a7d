"""The disk cache is bounded, and its entries can be listed, exported, imported and removed."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastconv
from fastconv import cli, jit
from fastconv.jit import archive, cache, compile, trust
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
    monkeypatch.setattr(compile, "compile_kernel", _compiled)
    return tmp_path / "cache"


def _compiled(kernel: Any, arch: str) -> jit.Compiled:
    return jit.Compiled(kernel.entry, random.Random(kernel.text + arch).randbytes(5000), "")


def _not_compiled(kernel: Any, arch: str) -> jit.Compiled:
    raise AssertionError("it should be in the cache")


def _key(number: int) -> str:
    return f"{number:064x}"


def _store(number: int, size: int = 1000, age_s: float = 0.0) -> Path:
    """Stores an entry that was last used so long ago."""
    cache.store("cubin", _key(number), bytes(size), ABOUT)
    path = cache.folder() / f"{_key(number)}.cubin"
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _kept() -> list[int]:
    """The numbers of all entries, the most recently used first."""
    return [int(entry.path.stem, 16) for entry in cache.entries()]


def _run(*arguments: str | Path) -> int:
    return cli.main(["cache", *map(str, arguments)])


def _build(factors: range, arch: str = "sm_80") -> list[bytes]:
    return [jit.build(scale(factor), arch) for factor in factors]


def _processes(program: str, *arguments: list[str]) -> None:
    """Runs a program with each list of arguments, all at once."""
    command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + program]
    modules = str(Path(cache.__file__).parent)
    begun = [subprocess.Popen([*command, modules, *each]) for each in arguments]
    assert [process.wait() for process in begun] == [0] * len(arguments)


class TestLimit:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("1000", 1000),
            ("500MB", 500 * 10**6),
            ("500MiB", 500 << 20),
            ("2gb", 2 * 10**9),
            ("1.5 kB", 1500),
            (" 3 TiB ", 3 << 40),
            ("7b", 7),
            ("", cache.DEFAULT_LIMIT),
        ],
    )
    def test_sizes(self, text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(cache.VARIABLE, text)
        assert cache.limit() == (size, None)

    @pytest.mark.parametrize(
        "text",
        ["0", "0.4", "-1", "2G", "lots", "1e9", "nan", "5XB", "GB", "9" * 5000, "²GB", "1_0"],
    )
    def test_nonsense(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(cache.VARIABLE, text)
        size, trouble = cache.limit()
        assert size == cache.DEFAULT_LIMIT
        assert trouble is not None
        for part in (cache.VARIABLE, repr(text), "500MB", "2GiB", "2.0 GiB instead"):
            assert part in trouble

    def test_nonsense_is_told_once_and_breaks_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache, "_STORES_BETWEEN_SWEEPS", 1)
        monkeypatch.setenv(cache.VARIABLE, "lots")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(3):
                _store(number)
        (warning,) = caught
        assert "'lots'" in str(warning.message)
        assert len(_kept()) == 3

    def test_info(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _store(1, size=3 << 20)
        monkeypatch.setenv(cache.VARIABLE, "5MiB")
        assert cli.main(["info", "--device", "cpu"]) == 0
        assert "cache: 1 kernels, 3.0 MiB of at most 5.0 MiB\n" in capsys.readouterr().out
        monkeypatch.setenv(cache.VARIABLE, "lots")
        assert cli.main(["info", "--device", "cpu"]) == 0
        shown = capsys.readouterr().out
        assert "3.0 MiB of at most 2.0 GiB\n" in shown
        assert "but got 'lots'" in shown
        assert cli.main(["info", "--device", "cpu", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["cache"]
        assert found["limit"] == cache.DEFAULT_LIMIT
        assert "'lots'" in found["limit_trouble"]

    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")],
    )
    def test_in_units(self, count: int, text: str) -> None:
        assert cache.in_units(count) == text
        assert cache.in_units(3000 << 40) == "3000.0 TiB"


class TestEviction:
    @pytest.fixture(autouse=True)
    def _room_for_three(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache, "_STORES_BETWEEN_SWEEPS", 1)
        monkeypatch.setenv(cache.VARIABLE, "3999")

    def test_what_was_not_used_for_longest_goes(self) -> None:
        for number, days in enumerate((2, 3, 1)):
            _store(number, age_s=days * DAY_S)
        assert _kept() == [2, 0, 1]
        _store(3)
        assert _kept() == [3, 2, 0]
        _store(4, size=2000)
        assert _kept() == [4, 3]

    def test_what_is_loaded_stays(self) -> None:
        for number, days in enumerate((2, 3, 1)):
            _store(number, age_s=days * DAY_S)
        assert cache.load("cubin", _key(1)) == bytes(1000)
        _store(3)
        assert sorted(_kept()) == [1, 2, 3]

    @pytest.mark.parametrize(
        ("age_s", "noted"), [(0, False), (1800, False), (DAY_S, True), (-DAY_S, True)]
    )
    def test_use_is_noted_once_an_hour(self, age_s: float, noted: bool) -> None:
        """A use is also recorded if another machine's clock has dated the last into the future."""
        path = _store(1, age_s=age_s)
        before = path.stat().st_mtime
        assert cache.load("cubin", _key(1)) is not None
        assert (path.stat().st_mtime != before) == noted
        assert abs(path.stat().st_mtime - time.time()) < 3600

    def test_use_that_cannot_be_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Entries of root in a container's image are read-only, for example."""

        def denied(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        _store(1, age_s=DAY_S)
        monkeypatch.setattr(os, "utime", denied)
        assert cache.load("cubin", _key(1)) == bytes(1000)

    def test_what_cannot_be_removed_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "unlink", denied)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(5):
                _store(number)
        assert len(_kept()) == 5

    def test_what_another_process_removed_meanwhile(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An entry that another process has removed counts as removed here."""
        for number in range(3):
            _store(number, age_s=(1 + number) * DAY_S)
        seen = [*cache.entries(), cache.Entry(folder / f"{_key(9)}.cubin", 1000, 0.0)]
        monkeypatch.setattr(cache, "entries", lambda: [*seen])
        monkeypatch.setenv(cache.VARIABLE, "2500")
        cache._sweep()
        assert _names(folder) == [f"{_key(number)}.cubin" for number in range(2)]

    def test_an_entry_beyond_the_limit_is_no_trouble(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.store("cubin", _key(0), bytes(5000), ABOUT)
            cache.store("cubin", _key(1), bytes(1000), ABOUT)
        assert _kept() == [1]

    def test_other_files_stay(self, folder: Path) -> None:
        others = ["tuned.json", "host-0.so", "x.cubin", f"{_key(1)}.cubin.txt", f"{_key(1)}.other"]
        folder.mkdir(0o700)
        for name in others:
            (folder / name).write_bytes(bytes(10000))
        (folder / f"{_key(9)}.cubin").mkdir()
        _store(1)
        assert _names(folder) == sorted([*others, f"{_key(1)}.cubin", f"{_key(9)}.cubin"])
        assert cache.size().entries == 1

    def test_not_at_every_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        swept = []
        monkeypatch.setattr(cache, "_STORES_BETWEEN_SWEEPS", 4)
        monkeypatch.setattr(cache, "_sweep", lambda: swept.append(next(count)))
        count = itertools.count()
        for number in range(9):
            _store(number)
            assert cache.load("cubin", _key(number)) is not None
        assert len(swept) == 3, "at the first, the fifth and the ninth"

    def test_processes_at_once(self) -> None:
        """They store more than the limit and load what others may remove, without an error.

        What is there in the end is within the limit.
        """
        program = """
cache._STORES_BETWEEN_SWEEPS = 1
for i in range(60):
    key = f"{(7 * int(sys.argv[2]) + i) % 20:064x}"
    assert cache.load("cubin", key) in (bytes(1000), None)
    cache.store("cubin", key, bytes(1000), {})
"""
        _processes(program, *([str(number)] for number in range(4)))
        assert 1 <= len(_kept()) <= 3
        assert cache.size().bytes <= 3999


class TestList:
    def test_nothing(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("list") == 0
        assert capsys.readouterr().out == f"{folder}: 0 kernels, 0 bytes of at most 2.0 GiB\n"
        assert not folder.exists()

    def test_entries(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The most recently used come first; entries of other versions have only a size."""
        jit.build(scale(), "sm_90a")
        _store(1, size=70_000, age_s=DAY_S)
        (folder / f"{_key(2)}.cubin").write_bytes(b"fastconv cubin 1, and so on")
        os.utime(folder / f"{_key(2)}.cubin", (0, DAY_S * 365))
        assert _run("list") == 0
        first, empty, *table = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{folder}: 3 kernels, ")
        assert empty == ""
        assert table[0].split() == ["source", "architecture", "size", "last", "used"]
        assert [row.split()[:2] for row in table[1:]] == [
            ["scale.cuh", "sm_90a"], ["scale.cuh", "sm_80"], ["unknown", "unknown"]
        ]  # fmt: skip
        assert "  68.5 KiB  " in table[2]
        assert "27 bytes  1971-01-0" in table[3]

    def test_json(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = _store(1, age_s=DAY_S)
        _store(2)
        assert _run("list", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["cache"]["folder"] == str(folder)
        assert (found["cache"]["entries"], found["cache"]["limit"]) == (2, 2 << 30)
        older = found["entries"][1]
        assert older.pop("used").endswith("+00:00")
        assert older == {**ABOUT, "key": _key(1), "kind": "cubin", "bytes": path.stat().st_size}

    def test_words_that_would_command_a_terminal(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cache.store("cubin", _key(1), b"", {**ABOUT, "source": "\x1b[2J"})
        folder.chmod(0o777)
        assert _run("list") == 0
        shown = capsys.readouterr().out
        assert "not used, as others could plant code" in shown
        assert r"'\x1b[2J'  sm_80" in shown

    @pytest.mark.parametrize("described", [b"no JSON", b"[]", b'{"source": 1}', b"[" * 100_000])
    def test_descriptions_that_cannot_be_read(self, folder: Path, described: bytes) -> None:
        path = _store(1)
        rest = len(described).to_bytes(4, "little") + described
        path.write_bytes(cache._header(path.name, rest) + rest)
        (entry,) = cache.entries()
        assert cache.metadata(entry) == {}
        assert cache.load("cubin", _key(1)) is None
        assert not path.exists()

    @pytest.mark.parametrize("action", [["list"], ["export", "x"], ["import", "x"], ["clear"]])
    def test_without_a_home(
        self,
        action: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("FASTCONV_CACHE_DIR", "~no-such-user/cache")
        assert _run(*action) == 2
        assert "Set FASTCONV_CACHE_DIR" in capsys.readouterr().err


class TestPlans:
    """Plans are stored beside kernels and counted, but neither listed one by one nor exported."""

    @pytest.fixture(autouse=True)
    def _entries(self, folder: Path) -> None:
        _build(range(2), "sm_80")
        for number in range(3):
            about = {"source": "forward, direct", "architecture": f"sm_{80 + number // 2}"}
            cache.store("plan", f"{number:064}", b"a plan", about)

    def test_list(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("list") == 0
        first, _, _, *kernels = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{folder}: 2 kernels and 3 plans, ")
        assert len(kernels) == 2
        assert _run("list", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["cache"]["entries"], found["cache"]["plans"]) == (5, 3)
        assert sorted(entry["kind"] for entry in found["entries"]) == ["cubin"] * 2 + ["plan"] * 3

    def test_clear(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("clear", "--architecture", "sm_80") == 0
        assert capsys.readouterr().out.startswith("removed 2 kernels and 2 plans for sm_80, ")
        assert _run("clear") == 0
        assert capsys.readouterr().out.startswith("removed 0 kernels and 1 plans, ")
        assert _names(folder) == []

    def test_export(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("export", str(file)) == 0
        told = capsys.readouterr().err
        assert told.startswith("exported 2 kernels, ")
        assert "left out" not in told

    def test_import(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A file that somebody has put plans into is refused."""
        (entry,) = (one for one in cache.entries() if one.path.stem == "0" * 64)
        file.write_bytes(archive.encode({}, {entry.path.name: entry.path.read_bytes()}))
        assert _run("import", str(file)) == 2
        assert "1 of its 1 kernels would never be used here" in capsys.readouterr().err


class TestTimes:
    """Entries with times that were measured on this machine."""

    @pytest.fixture(autouse=True)
    def _entries(self) -> None:
        _build(range(2), "sm_80")
        cache.store(cache.TIMES, _key(1), b"[1, 2]", {**ABOUT, "source": "a layer"})

    def test_list_and_clear(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cache.load(cache.TIMES, _key(1)) == b"[1, 2]"
        assert _run("list") == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"{folder}: 2 kernels and 1 measured times, ")
        assert "\na layer    sm_80  " in shown
        assert _run("list", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["cache"]["entries"], found["cache"]["times"]) == (3, 1)
        assert sorted(entry["kind"] for entry in found["entries"]) == ["cubin", "cubin", "times"]
        assert _run("clear") == 0
        assert capsys.readouterr().out.startswith("removed 2 kernels and 1 measured times, ")

    def test_they_stay_where_they_were_measured(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert _run("export", tmp_path / "file") == 0
        told = capsys.readouterr().err
        assert told.startswith("exported 2 kernels, ")
        assert "left out" not in told


class TestClear:
    @pytest.fixture(autouse=True)
    def _entries(self, folder: Path) -> None:
        _build(range(2), "sm_80")
        _build(range(3), "sm_90a")
        (folder / f"{_key(2)}.cubin").write_bytes(b"another version's")
        for name in ("tuned.json", "host-0.so", "notes.cubin"):
            (folder / name).touch()

    def test_all(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("clear") == 0
        assert capsys.readouterr().out.startswith("removed 6 kernels, ")
        assert _names(folder) == ["host-0.so", "notes.cubin", "tuned.json"]
        assert _run("clear") == 0
        assert capsys.readouterr().out == f"removed 0 kernels, 0 bytes, from {folder}\n"

    def test_an_architecture(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("clear", "--architecture", "sm_90a") == 0
        assert capsys.readouterr().out.startswith("removed 3 kernels for sm_90a, ")
        left = [cache.metadata(entry).get("architecture") for entry in cache.entries()]
        assert sorted(map(str, left)) == ["None", "sm_80", "sm_80"]

    @pytest.mark.parametrize("action", [["clear"], ["export", "file"]])
    def test_no_architecture(self, action: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            _run(*action, "--architecture", "hopper")
        assert "should be like sm_80 or sm_90a, but got 'hopper'" in capsys.readouterr().err
        assert cache.size().entries == 6

    def test_what_cannot_be_removed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def denied(path: Path) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(Path, "unlink", denied)
        assert _run("clear") == 2
        assert ".cubin: Permission denied" in capsys.readouterr().err

    def test_while_others_use_the_folder(self) -> None:
        program = """
for i in range(200):
    key = f"{i % 10:064x}"
    if sys.argv[2] == "clear":
        cache.remove(cache.entries())
        continue
    cache.store("cubin", key, bytes(1000), {})
    assert cache.load("cubin", key) in (bytes(1000), None)
"""
        _processes(program, ["clear"], ["clear"], ["use"], ["use"])


NAMES = st.integers(0, 2**256 - 1).map(lambda number: f"{_key(number)}.cubin")
PACKED = st.dictionaries(NAMES, st.binary(max_size=200), min_size=1, max_size=5).map(
    lambda payloads: {name: cache.pack(name, data, ABOUT) for name, data in payloads.items()}
)
MADE_BY = {"fastconv": "1.2.3", "nvrtc": "13.0"}


def _file(rest: bytes) -> bytes:
    """A file with the given contents and a valid checksum."""
    return archive._title() + archive._summary(rest) + rest


class TestArchive:
    @given(PACKED)
    def test_round_trip(self, packed: dict[str, bytes]) -> None:
        """The bytes do not depend on the order in which entries were found."""
        contents = archive.encode(MADE_BY, packed)
        assert contents == archive.encode(MADE_BY, dict(reversed(packed.items())))
        assert archive.decode(contents) == (MADE_BY, packed, dict.fromkeys(packed, ABOUT))

    @given(PACKED, st.data())
    def test_damage(self, packed: dict[str, bytes], data: st.DataObject) -> None:
        """Bytes may be changed, lost or added anywhere."""
        contents = archive.encode(MADE_BY, packed)
        start = data.draw(st.integers(0, len(contents)))
        end = data.draw(st.integers(start, min(start + 3, len(contents))))
        damaged = contents[:start] + data.draw(st.binary(max_size=3)) + contents[end:]
        if damaged != contents:
            with pytest.raises(archive.ArchiveError):
                archive.decode(damaged)

    @given(PACKED, st.data())
    def test_truncation(self, packed: dict[str, bytes], data: st.DataObject) -> None:
        contents = archive.encode(MADE_BY, packed)
        start = len(contents) - len(contents.split(b"\n", 2)[2])
        with pytest.raises(archive.ArchiveError, match="it is truncated: "):
            archive.decode(contents[: data.draw(st.integers(start, len(contents) - 1))])

    @pytest.mark.parametrize(
        ("contents", "words"),
        [
            (b"", "not made by `fastconv cache export`"),
            (b"PK\x03\x04", "not made by"),
            (b"fastconv kernels, format one\n", "not made by"),
            (b"fastconv kernels, format 2\nmore", "format 2, .* this one reads format 1"),
            (b"fastconv kernels, format 1", "not made by"),
            (b"fastconv kernels, format 1\n", "damaged"),
        ],
    )
    def test_other_files(self, contents: bytes, words: str) -> None:
        with pytest.raises(archive.ArchiveError, match=words):
            archive.decode(contents)

    @pytest.mark.parametrize(
        "name",
        ["../../x.cubin", "/tmp/x.cubin", f"../{_key(1)}.cubin", f"{_key(1)}.so", _key(1), "", 7,
         f"{'A' * 64}.cubin", f"{_key(1)}.cubin\n", f"{_key(1)[:-1]}.cubin", None],
    )  # fmt: skip
    def test_names_that_are_no_keys(self, name: Any) -> None:
        """Names become names of files, so that all but keys are refused."""
        entry = cache.pack(str(name), b"payload", ABOUT)
        line = archive._line({"name": name, "bytes": len(entry)})
        with pytest.raises(archive.ArchiveError):
            archive.decode(_file(archive._line(MADE_BY) + line + entry))

    @pytest.mark.parametrize(
        "rest",
        [
            b"",
            b"{}\n",
            b"[]\n",
            b"{}\n{}\n",
            b"{}\n7\n",
            b"{}\n" + b"[" * 100_000 + b"\n",
            b"{}\n" + archive._line({"name": f"{_key(1)}.cubin", "bytes": -1}),
            b"{}\n" + archive._line({"name": f"{_key(1)}.cubin", "bytes": "1"}) + b"1",
            b"{}\n" + archive._line({"name": f"{_key(1)}.cubin", "bytes": 10**9}) + b"1",
            b"{}\n" + 2 * archive._line({"name": f"{_key(1)}.cubin", "bytes": 0}),
        ],
    )
    def test_contents_that_make_no_sense(self, rest: bytes) -> None:
        with pytest.raises(archive.ArchiveError, match="does not hold what it should"):
            archive.decode(_file(rest))

    def test_an_entry_that_comes_twice(self) -> None:
        name = f"{_key(1)}.cubin"
        entry = cache.pack(name, b"payload", ABOUT)
        one = archive._line({"name": name, "bytes": len(entry)}) + entry
        assert archive.decode(_file(archive._line(MADE_BY) + one)).packed == {name: entry}
        with pytest.raises(archive.ArchiveError, match="no entry is"):
            archive.decode(_file(archive._line(MADE_BY) + 2 * one))

    def test_entries_of_another_name(self) -> None:
        """Each entry has a checksum of its own, beside that of the file."""
        names = [f"{_key(number)}.cubin" for number in range(2)]
        entry = cache.pack(names[0], b"payload", ABOUT)
        with pytest.raises(archive.ArchiveError, match=f"{names[1]} does not match its checksum"):
            archive.decode(archive.encode(MADE_BY, {names[1]: entry}))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kernels.fastconv"


@pytest.fixture
def exported(file: Path) -> Path:
    """A file with five kernels for two architectures; the cache is empty."""
    _build(range(2), "sm_80")
    _build(range(3), "sm_90a")
    assert _run("export", file) == 0
    assert _run("clear") == 0
    return file


class TestMoving:
    def test_there_and_back(
        self,
        file: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        built = _build(range(3), "sm_80") + _build(range(2), "sm_90a")
        assert _run("export", file) == 0
        assert capsys.readouterr().err.startswith("exported 5 kernels, ")
        folder.rename(folder.with_name("old"))
        assert _run("import", file) == 0
        assert capsys.readouterr().out == f"imported 5 kernels for sm_80, sm_90a into {folder}\n"
        assert folder.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr(compile, "compile_kernel", _not_compiled)
        assert _build(range(3), "sm_80") + _build(range(2), "sm_90a") == built
        assert _run("import", file) == 0
        assert "imported 0 kernels for sm_80, sm_90a" in (shown := capsys.readouterr().out)
        assert "; 5 were there already" in shown

    def test_the_same_kernels_give_the_same_bytes(
        self, exported: Path, folder: Path, tmp_path: Path
    ) -> None:
        """The file does not depend on the order and the entry points that they were made in."""
        for factor, arch in (
            (2, "sm_90a"),
            (1, "sm_90a"),
            (0, "sm_90a"),
            (1, "sm_80"),
            (0, "sm_80"),
        ):
            jit.build(dataclasses.replace(scale(factor), entry=f"other{factor}"), arch)
        for entry in cache.entries():
            os.utime(entry.path, (0, 0))
        assert _run("export", tmp_path / "again") == 0
        assert (tmp_path / "again").read_bytes() == exported.read_bytes()
        assert str(folder).encode() not in exported.read_bytes()

    def test_an_architecture(self, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("import", exported) == 0
        assert _run("export", exported, "--architecture", "sm_90a") == 0
        assert _run("clear") == 0
        capsys.readouterr()
        assert _run("import", exported) == 0
        assert capsys.readouterr().out.startswith("imported 3 kernels for sm_90a into ")
        assert _run("export", exported, "--architecture", "sm_75") == 2
        assert "no kernels for sm_75 in " in capsys.readouterr().err

    def test_through_a_pipe(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing else is printed to stdout, so that a pipe can lead to another machine."""
        built, pipe, read = _build(range(2)), tmp_path / "pipe", list[bytes]()
        os.mkfifo(pipe)
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        assert _run("export", pipe) == 0
        reader.join()
        assert _run("clear") == 0
        writer = threading.Thread(target=lambda: pipe.write_bytes(read[0]))
        writer.start()
        assert _run("import", pipe) == 0
        writer.join()
        monkeypatch.setattr(compile, "compile_kernel", _not_compiled)
        assert _build(range(2)) == built

    def test_what_nobody_would_use_is_left_out(
        self,
        file: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(compile, "nvrtc_version", lambda: (12, 8))
        _build(range(2))
        monkeypatch.setattr(compile, "nvrtc_version", lambda: (13, 0))
        assert _run("export", file) == 2
        told = capsys.readouterr().err
        assert f"no kernels in {folder} can be exported; 2 damaged or of other versions" in told
        assert not file.exists()
        _build(range(3))
        (folder / f"{_key(1)}.cubin").write_bytes(b"damaged")
        assert _run("export", file) == 0
        told = capsys.readouterr().err
        assert told.startswith("exported 3 kernels, ")
        assert "; 3 damaged or of other versions are left out" in told

    def test_kernels_of_another_compiler(
        self,
        exported: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(compile, "nvrtc_version", lambda: (12, 8))
        monkeypatch.setattr(fastconv, "__version__", "99.0")
        assert _run("import", exported) == 2
        told = capsys.readouterr().err
        for part in (
            "5 of its 5 kernels would never be used here",
            "made by fastconv 0.1.0 with NVRTC 13.0",
            "this is fastconv 99.0 with NVRTC 12.8",
        ):
            assert part in told
        assert _names(folder) == []

    def test_kernels_of_other_sources(
        self,
        exported: Path,
        folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "device").mkdir()
        (tmp_path / "device/scalar.cuh").write_text("// another one\n")
        monkeypatch.setattr(compile, "FOLDER", tmp_path)
        compile._contents.cache_clear()
        try:
            assert _run("import", exported) == 2
        finally:
            compile._contents.cache_clear()
        assert "would never be used here" in capsys.readouterr().err
        assert _names(folder) == []

    @pytest.mark.parametrize(
        "change",
        [
            {"text": '#include "/dev/zero"\n'},
            {"text": '#include "../../../etc/passwd"\n'},
            {"architecture": "\x1b[2J"},
        ],
    )
    def test_kernels_that_never_were_ours(
        self, change: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Metadata of a foreign file makes us read no file that it names."""

        def unreachable(name: str) -> None:
            raise AssertionError(f"{name} would be read")

        monkeypatch.setattr(compile, "_contents", unreachable)
        about = {**ABOUT, "text": "", **change}
        key = cache.key(about["text"], {}, compile._options(about["architecture"]), (13, 0))
        assert not compile.is_current(f"{key}.cubin", about)

    def test_without_a_compiler(
        self, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def missing() -> tuple[int, int]:
            raise jit.GpuUnavailable("there is no NVRTC")

        monkeypatch.setattr(compile, "nvrtc_version", missing)
        for action in ("export", "import"):
            assert _run(action, exported) == 2
            assert capsys.readouterr().err == "fastconv: there is no NVRTC\n"

    @pytest.mark.parametrize("place", [0, 30, 200, -1])
    def test_damaged_files(
        self, exported: Path, place: int, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        contents = bytearray(exported.read_bytes())
        contents[place] ^= 1
        exported.write_bytes(contents)
        assert _run("import", exported) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line.startswith(f"fastconv: cannot import {exported}: it ")
        assert _names(folder) == []

    def test_missing_files(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("import", file) == 2
        assert f"cannot read {file}: No such file" in capsys.readouterr().err
        _build(range(1))
        assert _run("export", file / "x") == 2
        assert f"cannot write {file / 'x'}: there is no folder" in capsys.readouterr().err

    def test_a_full_disk_adds_nothing(
        self,
        exported: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        opened, original = itertools.count(), os.open

        def full(name: Any, *arguments: Any, **others: Any) -> int:
            if str(name).endswith(".tmp") and next(opened) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(name))
            return original(name, *arguments, **others)

        monkeypatch.setattr(os, "open", full)
        assert _run("import", exported) == 2
        assert "No space left on device" in capsys.readouterr().err
        assert _names(folder) == []
        assert _run("import", exported) == 0

    def test_distrusted_folders(
        self, exported: Path, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if not hasattr(os, "geteuid"):
            pytest.skip("there are no owners and modes")
        folder.chmod(0o777)
        for action in ("import", "export"):
            assert _run(action, exported) == 2
            told = capsys.readouterr().err
            assert f"nothing in {folder} " in told
            assert "can be written by others" in told
        assert _names(folder) == []

    def test_more_than_may_be_kept(
        self,
        exported: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv(cache.VARIABLE, "10kB")
        assert _run("import", exported) == 2
        told = capsys.readouterr().err
        assert "and at most 9.8 KiB are kept; FASTCONV_CACHE_LIMIT may allow more" in told
        assert _names(folder) == []

    def test_room_is_made(self, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The least recently used entries go; imported ones count as just used."""
        for number in range(3):
            _store(number, size=10_000, age_s=(1 + number) * DAY_S)
        monkeypatch.setenv(cache.VARIABLE, "40kB")
        assert _run("import", exported) == 0
        assert len(_kept()) == 6
        assert _kept()[-1] == 0

    def test_processes_at_once(self, exported: Path, folder: Path) -> None:
        """They import the same file, while entries are removed and used."""
        program = """
with open(sys.argv[2], "rb") as file:
    found = archive.decode(file.read())
for _ in range(20):
    cache.add(found.packed)
    for name in found.packed:
        cache.load("cubin", name[:64])
    if sys.argv[3] == "clear":
        cache.remove(cache.entries())
cache.add(found.packed)
"""
        _processes(program, *([str(exported), does] for does in ("clear", "keep", "keep")))
        assert _run("import", exported) == 0
        assert len(_names(folder)) == 5
        assert all(path.suffix == ".cubin" for path in folder.iterdir())
