"""Kernels of the disk cache are exported to a file and imported from it."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastconv
from cache_helpers import (
    ABOUT,
    DAY_S,
    build_kernels,
    entry_numbers,
    file,
    file_names,
    folder,
    key_of,
    not_compiled,
    run_command,
    run_processes,
    store_entry,
)
from fastconv import jit
from fastconv.jit import archive, cache, compile
from test_jit import scale

__all__ = ["file", "folder"]  # Tests below use these fixtures by their names.

NAMES = st.integers(0, 2**256 - 1).map(lambda number: f"{key_of(number)}.cubin")
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
        ["../../x.cubin", "/tmp/x.cubin", f"../{key_of(1)}.cubin", f"{key_of(1)}.so", key_of(1), "",
         7, f"{'A' * 64}.cubin", f"{key_of(1)}.cubin\n", f"{key_of(1)[:-1]}.cubin", None],
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
            b"{}\n" + archive._line({"name": f"{key_of(1)}.cubin", "bytes": -1}),
            b"{}\n" + archive._line({"name": f"{key_of(1)}.cubin", "bytes": "1"}) + b"1",
            b"{}\n" + archive._line({"name": f"{key_of(1)}.cubin", "bytes": 10**9}) + b"1",
            b"{}\n" + 2 * archive._line({"name": f"{key_of(1)}.cubin", "bytes": 0}),
        ],
    )
    def test_contents_that_make_no_sense(self, rest: bytes) -> None:
        with pytest.raises(archive.ArchiveError, match="does not hold what it should"):
            archive.decode(_file(rest))

    def test_an_entry_that_comes_twice(self) -> None:
        name = f"{key_of(1)}.cubin"
        entry = cache.pack(name, b"payload", ABOUT)
        one = archive._line({"name": name, "bytes": len(entry)}) + entry
        assert archive.decode(_file(archive._line(MADE_BY) + one)).packed == {name: entry}
        with pytest.raises(archive.ArchiveError, match="no entry is"):
            archive.decode(_file(archive._line(MADE_BY) + 2 * one))

    def test_entries_of_another_name(self) -> None:
        """Each entry has a checksum of its own, beside that of the file."""
        names = [f"{key_of(number)}.cubin" for number in range(2)]
        entry = cache.pack(names[0], b"payload", ABOUT)
        with pytest.raises(archive.ArchiveError, match=f"{names[1]} does not match its checksum"):
            archive.decode(archive.encode(MADE_BY, {names[1]: entry}))


@pytest.fixture
def exported(file: Path) -> Path:
    """A file with five kernels for two architectures; the cache is empty."""
    build_kernels(range(2), "sm_80")
    build_kernels(range(3), "sm_90a")
    assert run_command("export", file) == 0
    assert run_command("clear") == 0
    return file


class TestMoving:
    def test_there_and_back(
        self,
        file: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        built = build_kernels(range(3), "sm_80") + build_kernels(range(2), "sm_90a")
        assert run_command("export", file) == 0
        assert capsys.readouterr().err.startswith("exported 5 kernels, ")
        folder.rename(folder.with_name("old"))
        assert run_command("import", file) == 0
        assert capsys.readouterr().out == f"imported 5 kernels for sm_80, sm_90a into {folder}\n"
        assert folder.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr(compile, "compile_kernel", not_compiled)
        assert build_kernels(range(3), "sm_80") + build_kernels(range(2), "sm_90a") == built
        assert run_command("import", file) == 0
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
        assert run_command("export", tmp_path / "again") == 0
        assert (tmp_path / "again").read_bytes() == exported.read_bytes()
        assert str(folder).encode() not in exported.read_bytes()

    def test_an_architecture(self, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("import", exported) == 0
        assert run_command("export", exported, "--architecture", "sm_90a") == 0
        assert run_command("clear") == 0
        capsys.readouterr()
        assert run_command("import", exported) == 0
        assert capsys.readouterr().out.startswith("imported 3 kernels for sm_90a into ")
        assert run_command("export", exported, "--architecture", "sm_75") == 2
        assert "no kernels for sm_75 in " in capsys.readouterr().err

    def test_through_a_pipe(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing else is printed to stdout, so that a pipe can lead to another machine."""
        built, pipe, read = build_kernels(range(2)), tmp_path / "pipe", list[bytes]()
        os.mkfifo(pipe)
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        assert run_command("export", pipe) == 0
        reader.join()
        assert run_command("clear") == 0
        writer = threading.Thread(target=lambda: pipe.write_bytes(read[0]))
        writer.start()
        assert run_command("import", pipe) == 0
        writer.join()
        monkeypatch.setattr(compile, "compile_kernel", not_compiled)
        assert build_kernels(range(2)) == built

    def test_what_nobody_would_use_is_left_out(
        self,
        file: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(compile, "nvrtc_version", lambda: (12, 8))
        build_kernels(range(2))
        monkeypatch.setattr(compile, "nvrtc_version", lambda: (13, 0))
        assert run_command("export", file) == 2
        told = capsys.readouterr().err
        assert f"no kernels in {folder} can be exported; 2 damaged or of other versions" in told
        assert not file.exists()
        build_kernels(range(3))
        (folder / f"{key_of(1)}.cubin").write_bytes(b"damaged")
        assert run_command("export", file) == 0
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
        assert run_command("import", exported) == 2
        told = capsys.readouterr().err
        for part in (
            "5 of its 5 kernels would never be used here",
            "made by fastconv 0.1.0 with NVRTC 13.0",
            "this is fastconv 99.0 with NVRTC 12.8",
        ):
            assert part in told
        assert file_names(folder) == []

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
            assert run_command("import", exported) == 2
        finally:
            compile._contents.cache_clear()
        assert "would never be used here" in capsys.readouterr().err
        assert file_names(folder) == []

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
            assert run_command(action, exported) == 2
            assert capsys.readouterr().err == "fastconv: there is no NVRTC\n"

    @pytest.mark.parametrize("place", [0, 30, 200, -1])
    def test_damaged_files(
        self, exported: Path, place: int, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        contents = bytearray(exported.read_bytes())
        contents[place] ^= 1
        exported.write_bytes(contents)
        assert run_command("import", exported) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line.startswith(f"fastconv: cannot import {exported}: it ")
        assert file_names(folder) == []

    def test_missing_files(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("import", file) == 2
        assert f"cannot read {file}: No such file" in capsys.readouterr().err
        build_kernels(range(1))
        assert run_command("export", file / "x") == 2
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
        assert run_command("import", exported) == 2
        assert "No space left on device" in capsys.readouterr().err
        assert file_names(folder) == []
        assert run_command("import", exported) == 0

    def test_distrusted_folders(
        self, exported: Path, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if not hasattr(os, "geteuid"):
            pytest.skip("there are no owners and modes")
        folder.chmod(0o777)
        for action in ("import", "export"):
            assert run_command(action, exported) == 2
            told = capsys.readouterr().err
            assert f"nothing in {folder} " in told
            assert "can be written by others" in told
        assert file_names(folder) == []

    def test_more_than_may_be_kept(
        self,
        exported: Path,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv(cache.VARIABLE, "10kB")
        assert run_command("import", exported) == 2
        told = capsys.readouterr().err
        assert "and at most 9.8 KiB are kept; FASTCONV_CACHE_LIMIT may allow more" in told
        assert file_names(folder) == []

    def test_room_is_made(self, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The least recently used entries go; imported ones count as just used."""
        for number in range(3):
            store_entry(number, size=10_000, age_s=(1 + number) * DAY_S)
        monkeypatch.setenv(cache.VARIABLE, "40kB")
        assert run_command("import", exported) == 0
        assert len(entry_numbers()) == 6
        assert entry_numbers()[-1] == 0

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
        run_processes(program, *([str(exported), does] for does in ("clear", "keep", "keep")))
        assert run_command("import", exported) == 0
        assert len(file_names(folder)) == 5
        assert all(path.suffix == ".cubin" for path in folder.iterdir())
