"""The disk cache is bounded, and its entries can be listed and removed."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from cache_helpers import (
    ABOUT,
    DAY_S,
    build_kernels,
    entry_numbers,
    file,
    file_names,
    folder,
    key_of,
    run_command,
    run_processes,
    store_entry,
)
from fastconv import cli, jit
from fastconv.jit import archive, cache
from test_jit import scale

__all__ = ["file", "folder"]  # Tests below use these fixtures by their names.


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
                store_entry(number)
        (warning,) = caught
        assert "'lots'" in str(warning.message)
        assert len(entry_numbers()) == 3

    def test_info(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_entry(1, size=3 << 20)
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

    def test_info_says_that_nothing_can_be_kept(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert cache.unwritable() is None  # it does not exist, and can be made
        folder.mkdir()
        assert cache.unwritable() is None
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
        assert cache.unwritable() == f"you may not write to {folder}"
        monkeypatch.undo()
        (folder / "file").write_text("", encoding="utf-8")
        monkeypatch.setenv(cache.FOLDER_VARIABLE, str(folder / "file" / "cache"))
        assert cli.main(["info", "--device", "cpu"]) == 0
        said = f"keeps nothing new, so each process compiles: {folder / 'file'} is not a folder\n"
        assert said in capsys.readouterr().out

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
            store_entry(number, age_s=days * DAY_S)
        assert entry_numbers() == [2, 0, 1]
        store_entry(3)
        assert entry_numbers() == [3, 2, 0]
        store_entry(4, size=2000)
        assert entry_numbers() == [4, 3]

    def test_what_is_loaded_stays(self) -> None:
        for number, days in enumerate((2, 3, 1)):
            store_entry(number, age_s=days * DAY_S)
        assert cache.load("cubin", key_of(1)) == bytes(1000)
        store_entry(3)
        assert sorted(entry_numbers()) == [1, 2, 3]

    @pytest.mark.parametrize(
        ("age_s", "noted"), [(0, False), (1800, False), (DAY_S, True), (-DAY_S, True)]
    )
    def test_use_is_noted_once_an_hour(self, age_s: float, noted: bool) -> None:
        """A use is also recorded if another machine's clock has dated the last into the future."""
        path = store_entry(1, age_s=age_s)
        before = path.stat().st_mtime
        assert cache.load("cubin", key_of(1)) is not None
        assert (path.stat().st_mtime != before) == noted
        assert abs(path.stat().st_mtime - time.time()) < 3600

    def test_use_that_cannot_be_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Entries of root in a container's image are read-only, for example."""

        def denied(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        store_entry(1, age_s=DAY_S)
        monkeypatch.setattr(os, "utime", denied)
        assert cache.load("cubin", key_of(1)) == bytes(1000)

    def test_what_cannot_be_removed_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "unlink", denied)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(5):
                store_entry(number)
        assert len(entry_numbers()) == 5

    def test_what_another_process_removed_meanwhile(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An entry that another process has removed counts as removed here."""
        for number in range(3):
            store_entry(number, age_s=(1 + number) * DAY_S)
        seen = [*cache.entries(), cache.Entry(folder / f"{key_of(9)}.cubin", 1000, 0.0)]
        monkeypatch.setattr(cache, "entries", lambda: [*seen])
        monkeypatch.setenv(cache.VARIABLE, "2500")
        cache._sweep()
        assert file_names(folder) == [f"{key_of(number)}.cubin" for number in range(2)]

    def test_an_entry_beyond_the_limit_is_no_trouble(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.store("cubin", key_of(0), bytes(5000), ABOUT)
            cache.store("cubin", key_of(1), bytes(1000), ABOUT)
        assert entry_numbers() == [1]

    def test_other_files_stay(self, folder: Path) -> None:
        others = [
            "tuned.json",
            "host-0.so",
            "x.cubin",
            f"{key_of(1)}.cubin.txt",
            f"{key_of(1)}.other",
        ]
        folder.mkdir(0o700)
        for name in others:
            (folder / name).write_bytes(bytes(10000))
        (folder / f"{key_of(9)}.cubin").mkdir()
        store_entry(1)
        assert file_names(folder) == sorted([*others, f"{key_of(1)}.cubin", f"{key_of(9)}.cubin"])
        assert cache.size().entries == 1

    def test_not_at_every_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        swept = []
        monkeypatch.setattr(cache, "_STORES_BETWEEN_SWEEPS", 4)
        monkeypatch.setattr(cache, "_sweep", lambda: swept.append(next(count)))
        count = itertools.count()
        for number in range(9):
            store_entry(number)
            assert cache.load("cubin", key_of(number)) is not None
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
        run_processes(program, *([str(number)] for number in range(4)))
        assert 1 <= len(entry_numbers()) <= 3
        assert cache.size().bytes <= 3999


class TestList:
    def test_nothing(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("list") == 0
        assert capsys.readouterr().out == f"{folder}: 0 kernels, 0 bytes of at most 2.0 GiB\n"
        assert not folder.exists()

    def test_entries(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The most recently used come first; entries of other versions have only a size."""
        jit.build(scale(), "sm_90a")
        store_entry(1, size=70_000, age_s=DAY_S)
        (folder / f"{key_of(2)}.cubin").write_bytes(b"fastconv cubin 1, and so on")
        os.utime(folder / f"{key_of(2)}.cubin", (0, DAY_S * 365))
        assert run_command("list") == 0
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
        path = store_entry(1, age_s=DAY_S)
        store_entry(2)
        assert run_command("list", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["cache"]["folder"] == str(folder)
        assert (found["cache"]["entries"], found["cache"]["limit"]) == (2, 2 << 30)
        older = found["entries"][1]
        assert older.pop("used").endswith("+00:00")
        assert older == {**ABOUT, "key": key_of(1), "kind": "cubin", "bytes": path.stat().st_size}

    def test_words_that_would_command_a_terminal(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cache.store("cubin", key_of(1), b"", {**ABOUT, "source": "\x1b[2J"})
        folder.chmod(0o777)
        assert run_command("list") == 0
        shown = capsys.readouterr().out
        assert "not used, as others could plant code" in shown
        assert r"'\x1b[2J'  sm_80" in shown

    @pytest.mark.parametrize("described", [b"no JSON", b"[]", b'{"source": 1}', b"[" * 100_000])
    def test_descriptions_that_cannot_be_read(self, folder: Path, described: bytes) -> None:
        path = store_entry(1)
        rest = len(described).to_bytes(4, "little") + described
        path.write_bytes(cache._header(path.name, rest) + rest)
        (entry,) = cache.entries()
        assert cache.metadata(entry) == {}
        assert cache.load("cubin", key_of(1)) is None
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
        assert run_command(*action) == 2
        assert "Set FASTCONV_CACHE_DIR" in capsys.readouterr().err


class TestPlans:
    """Plans are stored beside kernels and counted, but neither listed one by one nor exported."""

    @pytest.fixture(autouse=True)
    def _entries(self, folder: Path) -> None:
        build_kernels(range(2), "sm_80")
        for number in range(3):
            about = {"source": "forward, direct", "architecture": f"sm_{80 + number // 2}"}
            cache.store("plan", f"{number:064}", b"a plan", about)

    def test_list(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("list") == 0
        first, _, _, *kernels = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{folder}: 2 kernels and 3 plans, ")
        assert len(kernels) == 2
        assert run_command("list", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["cache"]["entries"], found["cache"]["plans"]) == (5, 3)
        assert sorted(entry["kind"] for entry in found["entries"]) == ["cubin"] * 2 + ["plan"] * 3

    def test_clear(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("clear", "--architecture", "sm_80") == 0
        assert capsys.readouterr().out.startswith("removed 2 kernels and 2 plans for sm_80, ")
        assert run_command("clear") == 0
        assert capsys.readouterr().out.startswith("removed 0 kernels and 1 plans, ")
        assert file_names(folder) == []

    def test_export(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("export", str(file)) == 0
        told = capsys.readouterr().err
        assert told.startswith("exported 2 kernels, ")
        assert "left out" not in told

    def test_import(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A file that somebody has put plans into is refused."""
        (entry,) = (one for one in cache.entries() if one.path.stem == "0" * 64)
        file.write_bytes(archive.encode({}, {entry.path.name: entry.path.read_bytes()}))
        assert run_command("import", str(file)) == 2
        assert "1 of its 1 kernels would never be used here" in capsys.readouterr().err


class TestTimes:
    """Entries with times that were measured on this machine."""

    @pytest.fixture(autouse=True)
    def _entries(self) -> None:
        build_kernels(range(2), "sm_80")
        cache.store(cache.TIMES, key_of(1), b"[1, 2]", {**ABOUT, "source": "a layer"})

    def test_list_and_clear(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cache.load(cache.TIMES, key_of(1)) == b"[1, 2]"
        assert run_command("list") == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"{folder}: 2 kernels and 1 measured times, ")
        assert "\na layer    sm_80  " in shown
        assert run_command("list", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["cache"]["entries"], found["cache"]["times"]) == (3, 1)
        assert sorted(entry["kind"] for entry in found["entries"]) == ["cubin", "cubin", "times"]
        assert run_command("clear") == 0
        assert capsys.readouterr().out.startswith("removed 2 kernels and 1 measured times, ")

    def test_they_stay_where_they_were_measured(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_command("export", tmp_path / "file") == 0
        told = capsys.readouterr().err
        assert told.startswith("exported 2 kernels, ")
        assert "left out" not in told


class TestClear:
    @pytest.fixture(autouse=True)
    def _entries(self, folder: Path) -> None:
        build_kernels(range(2), "sm_80")
        build_kernels(range(3), "sm_90a")
        (folder / f"{key_of(2)}.cubin").write_bytes(b"another version's")
        for name in ("tuned.json", "host-0.so", "notes.cubin"):
            (folder / name).touch()

    def test_all(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("clear") == 0
        assert capsys.readouterr().out.startswith("removed 6 kernels, ")
        assert file_names(folder) == ["host-0.so", "notes.cubin", "tuned.json"]
        assert run_command("clear") == 0
        assert capsys.readouterr().out == f"removed 0 kernels, 0 bytes, from {folder}\n"

    def test_an_architecture(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("clear", "--architecture", "sm_90a") == 0
        assert capsys.readouterr().out.startswith("removed 3 kernels for sm_90a, ")
        left = [cache.metadata(entry).get("architecture") for entry in cache.entries()]
        assert sorted(map(str, left)) == ["None", "sm_80", "sm_80"]

    @pytest.mark.parametrize("action", [["clear"], ["export", "file"]])
    def test_no_architecture(self, action: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command(*action, "--architecture", "hopper") == 2
        assert "should be like sm_80 or sm_90a, but got 'hopper'" in capsys.readouterr().err
        assert cache.size().entries == 6

    def test_what_cannot_be_removed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def denied(path: Path) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(Path, "unlink", denied)
        assert run_command("clear") == 2
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
        run_processes(program, ["clear"], ["clear"], ["use"], ["use"])
