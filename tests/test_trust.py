"""Files in the cache's folder are used only if no other user can have put them there."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import threading
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastconv import cli, jit
from fastconv.commands import common
from fastconv.jit import cache, compile, trust
from fastconv.kernels import tuned
from test_jit import in_threads, scale

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners and modes")

PLANTED, COMPILED = b"planted", b"compiled"
STRANGER = 54321
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder that does not exist yet; no warning has been given."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FASTCONV_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_told", set())
    monkeypatch.setattr(cache, "_stores", itertools.count())
    monkeypatch.setattr(trust, "_once", threading.Lock())
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (13, 0))
    compiled = jit.Compiled("scale", COMPILED, "")
    monkeypatch.setattr(compile, "compile_kernel", lambda kernel, arch: compiled)
    tuned.table.cache_clear()
    yield folder
    tuned.table.cache_clear()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def give(path: Path, monkeypatch: pytest.MonkeyPatch, user: int = STRANGER) -> None:
    """Gives files to another user or, without the right to do so, makes it appear that way."""
    if IS_ROOT:
        os.chown(path, user, -1, follow_symlinks=False)
        return
    inode = os.lstat(path).st_ino

    def changed(original: Callable[..., os.stat_result], *args: Any) -> os.stat_result:
        found = original(*args)
        fields = [*found]
        fields[stat.ST_UID] = user
        return os.stat_result(fields) if found.st_ino == inode else found

    for name in ("lstat", "fstat"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, of=original: changed(of, *args))


def plant(folder: Path, name: str | None = None) -> Path:
    """An entry with the key of the kernel that is built, and a valid checksum."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    key = compile._key(scale().text, "sm_80")
    path = folder / (name or f"{key}.cubin")
    path.write_bytes(cache.pack(f"{key}.cubin", PLANTED, {}))
    path.chmod(0o644)
    return path


def build() -> tuple[bytes, list[str]]:
    """The kernel's code, built three times, and all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (cubin,) = {jit.build(scale(), "sm_80") for _ in range(3)}
    return cubin, [str(warning.message) for warning in caught]


def refused(*words: str) -> None:
    """Asserts that the planted entry is not used, and that one warning has these words."""
    cubin, (warning,) = build()
    assert cubin == COMPILED
    for part in (*words, "FASTCONV_CACHE_DIR", "chmod"):
        assert part in warning


def used() -> None:
    assert build() == (PLANTED, [])


class TestEntries:
    def test_a_folder_of_one_s_own(self, folder: Path) -> None:
        plant(folder)
        used()

    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777, 0o2770, 0o720], ids=oct)
    def test_a_folder_that_others_can_write(self, folder: Path, mode: int) -> None:
        entry = plant(folder)
        before = entry.read_bytes()
        folder.chmod(mode)
        refused(f"{folder} can be written by others (mode {mode:04o})")
        assert list(folder.iterdir()) == [entry], "nothing is written there"
        assert entry.read_bytes() == before
        assert stat.S_IMODE(folder.stat().st_mode) == mode, "nor changed"

    @pytest.mark.parametrize("mode", [0o755, 0o555, 0o500, 0o1755], ids=oct)
    def test_a_folder_that_others_can_read(self, folder: Path, mode: int) -> None:
        plant(folder)
        folder.chmod(mode)
        used()
        folder.chmod(0o700)

    @pytest.mark.parametrize("mode", [0o666, 0o664, 0o646, 0o1666], ids=oct)
    def test_a_file_that_others_can_write_is_replaced(self, folder: Path, mode: int) -> None:
        entry = plant(folder)
        entry.chmod(mode)
        refused(f"{entry} can be written by others (mode {mode:04o})")
        assert entry.read_bytes().endswith(COMPILED)
        assert not entry.stat().st_mode & 0o022
        assert trust.distrusted(entry) is None

    def test_a_file_of_another_user(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = plant(folder)
        give(entry, monkeypatch)
        refused(f"{entry} belongs to user {STRANGER}, neither to you (user {os.geteuid()})")

    def test_a_folder_of_another_user(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = plant(folder)
        give(folder, monkeypatch)
        refused(f"{folder} belongs to user {STRANGER}")
        assert entry.read_bytes().endswith(PLANTED), "nothing is written there"

    def test_what_is_ours_is_another_user_s(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The effective user counts, and trusts its own files and root's."""
        plant(folder)
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        if folder.stat().st_uid == 0:
            used()
        else:
            refused(f"neither to you (user {STRANGER})")

    @pytest.mark.skipif(not IS_ROOT, reason="only root makes files of others")
    def test_root_trusts_root_alone(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = plant(folder)
        for path in (folder, entry):
            os.chown(path, STRANGER, -1)
        refused(f"{folder} belongs to user {STRANGER}, neither to you (user 0)")
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        used()

    @pytest.mark.skipif(not IS_ROOT, reason="only root makes files of root")
    def test_an_image_that_root_has_made(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Users who cannot add entries can use them, without a warning."""
        plant(folder)
        folder.chmod(0o755)
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

        def denied(*_: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "replace", denied)
        used()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jit.build(scale(7), "sm_80")
        (warning,) = caught
        assert "cannot keep compiled kernels" in str(warning.message)

    def test_files_of_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        assert trust.distrusted(Path("/etc/passwd")) is None

    def test_what_was_exchanged_after_the_check(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file that is read is checked, not only the one that had its name before."""
        entry = plant(folder)
        entry.chmod(0o666)
        monkeypatch.setattr(trust, "distrusted", lambda path: None)
        refused(f"{entry} can be written by others")

    def test_threads_warn_once(self, folder: Path) -> None:
        plant(folder)
        folder.chmod(0o777)
        together = threading.Barrier(8)

        def work(_: int) -> None:
            together.wait()
            cache.load("cubin", "k")

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            in_threads(work, 8)
        assert len(caught) == 1


class TestPath:
    """Symbolic links, and the folders above."""

    def test_a_link_to_a_folder(self, folder: Path, tmp_path: Path) -> None:
        plant(tmp_path / "elsewhere")
        folder.symlink_to("elsewhere")
        used()
        (tmp_path / "elsewhere").chmod(0o777)
        refused(f"{tmp_path / 'elsewhere'} can be written by others (mode 0777)")

    @pytest.mark.parametrize("relative", [False, True])
    def test_a_link_to_a_file(self, folder: Path, tmp_path: Path, relative: bool) -> None:
        elsewhere, name = tmp_path / "elsewhere", plant(folder).name
        (folder / name).unlink()
        plant(elsewhere, "file")
        (folder / name).symlink_to("../elsewhere/file" if relative else elsewhere / "file")
        used()
        elsewhere.chmod(0o1777)
        refused(f"{elsewhere} can be written by others (mode 1777)")
        assert not (folder / name).is_symlink(), "replaced"
        assert (elsewhere / "file").read_bytes().endswith(PLANTED)

    def test_a_link_in_a_folder_that_others_can_write(self, folder: Path, tmp_path: Path) -> None:
        """Others can have it lead to another folder, even one of ours, with a file of theirs."""
        shared = tmp_path / "shared"
        shared.mkdir()
        plant(tmp_path / "elsewhere")
        (shared / "link").symlink_to(tmp_path / "elsewhere")
        folder.symlink_to(shared / "link")
        shared.chmod(0o777)
        refused(f"{shared} can be written by others (mode 0777)")

    def test_a_link_of_another_user(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(tmp_path / "elsewhere")
        folder.symlink_to("elsewhere")
        give(folder, monkeypatch)
        refused(f"{folder} belongs to user {STRANGER}")

    def test_links_in_a_circle(self, folder: Path) -> None:
        folder.symlink_to(folder)
        refused(f"{folder} cannot be examined")

    @pytest.mark.parametrize("there", [False, True])
    def test_a_parent_that_others_can_write(self, tmp_path: Path, there: bool) -> None:
        """They can rename what is in it, and put something else in its place."""
        parent = tmp_path / "parent"
        parent.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTCONV_CACHE_DIR", str(parent / "a/cache"))
            if there:
                plant(parent / "a/cache")
            parent.chmod(0o770)
            refused(f"{parent} can be written by others (mode 0770)")
            assert (parent / "a").exists() == there

    def test_a_sticky_parent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In /tmp, for example, others cannot rename our files; a folder of theirs is noticed."""
        parent = tmp_path / "parent"
        plant(parent / "cache")
        parent.chmod(0o1777)
        monkeypatch.setenv("FASTCONV_CACHE_DIR", str(parent / "cache"))
        used()
        give(parent / "cache", monkeypatch)
        refused(f"{parent / 'cache'} belongs to user {STRANGER}")

    def test_a_parent_of_another_user(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(tmp_path / "parent/cache")
        monkeypatch.setenv("FASTCONV_CACHE_DIR", str(tmp_path / "parent/cache"))
        give(tmp_path / "parent", monkeypatch)
        refused(f"{tmp_path / 'parent'} belongs to user {STRANGER}")

    def test_a_namespace_without_root(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The machine's root appears as nobody: trusted for parents, but not for the file."""
        nobody, strange = 65534, {"/", str(tmp_path)}
        original = os.lstat

        def lstat(path: Any) -> os.stat_result:
            fields = [*original(path)]
            fields[stat.ST_UID] = nobody if str(path) in strange else os.geteuid()
            return os.stat_result(fields)

        entry = plant(folder)
        monkeypatch.setattr(os, "lstat", lstat)
        used()
        strange.add(str(entry))
        refused(f"{entry} belongs to user {nobody}")

    @pytest.mark.parametrize("spelling", ["cache", "./x/../cache", "x/../../{}/cache"])
    def test_relative_folders(
        self, folder: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plant(folder)
        (folder.parent / "x").mkdir(0o755)
        monkeypatch.chdir(folder.parent)
        monkeypatch.setenv("FASTCONV_CACHE_DIR", spelling.format(folder.parent.name))
        used()
        folder.chmod(0o777)
        refused(f"{folder} can be written by others")

    def test_what_is_missing_is_no_trouble(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch(0o600)
        for path in ("nothing", "nothing/at/all", "file/nothing"):
            assert trust.distrusted(tmp_path / path) is None
            assert trust.distrusted_folder(tmp_path / path) is None

    def test_without_owners_and_modes(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """On Windows, for example, there is nothing to check."""
        plant(folder).chmod(0o666)
        folder.chmod(0o777)
        monkeypatch.setattr(trust, "_HAS_OWNERS", False)
        monkeypatch.delattr(os, "geteuid")
        used()

    def test_overhead(self, folder: Path, record_property: Any) -> None:
        """Records the time of a check, of which a process makes one for each kernel."""
        entry = plant(folder)
        seconds = min(timeit.repeat(lambda: trust.distrusted(entry), number=100, repeat=5)) / 100
        record_property("microseconds", seconds * 1e6)


class TestMaking:
    @pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077], ids=oct)
    def test_folders_and_files(
        self, tmp_path: Path, mask: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the umask, folders are private to the user, and entries are used again."""
        above, folder = tmp_path / "above", tmp_path / "above/below/cache"
        above.mkdir(0o755)
        monkeypatch.setenv("FASTCONV_CACHE_DIR", str(folder))
        with umask(mask):
            assert build() == (COMPILED, [])
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (above, folder.parent, folder)]
        assert modes == [0o755, 0o700, 0o700]
        (entry,) = folder.iterdir()
        assert stat.S_IMODE(entry.stat().st_mode) == 0o644 & ~mask
        monkeypatch.setattr(compile, "compile_kernel", None)
        assert build() == (COMPILED, [])

    def test_the_default_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FASTCONV_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        with umask(0):
            build()
        made = [path for path in tmp_path.rglob("*") if path.is_dir()]
        assert made
        assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


class TestTable:
    """The user's tuned table lies in the same folder."""

    def test_is_used(self, folder: Path) -> None:
        with umask(0):
            tuned.add(tuned.own(), {"layer": "plan"})
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert tuned.choice("layer") == "plan"

    @pytest.mark.parametrize("bad", ["folder", "file"])
    def test_is_ignored(self, folder: Path, bad: str) -> None:
        tuned.add(tuned.own(), {"layer": "plan"})
        path = folder if bad == "folder" else tuned.own()
        path.chmod(0o777)
        with pytest.warns(UserWarning, match=f"{path} can be written by others"):
            assert tuned.choice("layer") is None
        assert tuned.choice(next(iter(tuned.read(tuned.SHIPPED)))), "what ships is used"

    def test_is_not_added_to(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tuned.add(tuned.own(), {"layer": "plan"})
        folder.chmod(0o777)
        monkeypatch.setattr(common, "select_device", lambda name: torch.device("cuda"))
        assert cli.main(["tune", "--shape", "1x2x6x6 3x2x3x3"]) == 2
        told = capsys.readouterr().err
        assert f"tuned.json would not be used: {folder} can be written by others" in told
        assert json.loads(tuned.own().read_text(encoding="utf-8")) == {"layer": "plan"}

    def test_without_a_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        for name in ("FASTCONV_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", home)
        assert tuned.choice("layer") is None


def test_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(folder)
    assert cli.main(["info", "--device", "cpu"]) == 0
    assert "not used" not in capsys.readouterr().out
    folder.chmod(0o777)
    assert cli.main(["info", "--device", "cpu"]) == 0
    assert f"{folder} can be written by others (mode 0777)" in capsys.readouterr().out
    assert cli.main(["info", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"]["distrusted"].startswith(str(folder))


def test_each_process_warns(folder: Path) -> None:
    """One warning is printed by default."""
    plant(folder)
    folder.chmod(0o777)
    program = "from fastconv.jit import cache\nfor key in 'ab':\n    cache.load('cubin', key)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True
    )
    assert ended.stderr.count("UserWarning") == 1
    assert f"{folder} can be written by others" in ended.stderr
