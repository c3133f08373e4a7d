"""Fixtures of the tests of the native host path."""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastconv import cli, native
from fastconv.native import build
from native.deployment import FOLDER, Deployed, compile_program
from native.driver import DRIVER, LIBCUDA, Driver, loaded_driver
from native.helpers import Compiler, Host, forget


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
    blocks = ("batch_norm_act", "conv_bn_act")
    for name in ("conv2d", *blocks, "_started", "_background", "_forked", "_reason"):
        monkeypatch.setattr(native, name, getattr(native, name))  # pytest restores it afterwards.
    monkeypatch.setattr(native, "load", functools.cache(native.load.__wrapped__))
    forget()
    yield folder
    forget()


@pytest.fixture
def fake(
    folder: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Compiler]:
    (tmp_path / "tools").mkdir()
    fake = Compiler(tmp_path / "tools", built)
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


@pytest.fixture
def host(_native_library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    path = tmp_path / "host.so"
    shutil.copy(build.library(), path)
    host = Host(path)
    for name in ("conv2d", "batch_norm_act", "conv_bn_act"):
        monkeypatch.setattr(native, name, getattr(host, name))
    return host


@pytest.fixture(scope="module")
def _driver_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    if loaded_driver() is not None:
        pytest.skip("the real driver is loaded")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    soname = f"-Wl,-soname,{LIBCUDA}"
    command = ["cc", "-shared", "-fPIC", soname, "driver.c", "-o", LIBCUDA]
    subprocess.check_call(command, cwd=folder)
    yield ctypes.CDLL(str(folder / LIBCUDA))
    # Each copy of the native library has opened the driver too: close it until it is unloaded.
    while (still := loaded_driver()) is not None:
        for _ in range(2):
            _ctypes.dlclose(still._handle)


@pytest.fixture
def driver(_driver_library: ctypes.CDLL) -> Driver:
    return Driver(_driver_library)


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """The library for programs without Python, and a program, compiled once for all tests."""
    folder = tmp_path_factory.mktemp("deployed")
    assert cli.main(["build", "--deploy", str(folder), "--quiet"]) == 0
    return Deployed(folder / "libfastconv.so", compile_program(folder))


@pytest.fixture(scope="session")
def logging_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA driver for other processes, which logs what it is asked."""
    path = tmp_path_factory.mktemp("logging") / LIBCUDA
    soname = f"-Wl,-soname,{LIBCUDA}"
    source = str(FOLDER / "logging_driver.c")
    subprocess.check_call(["cc", "-shared", "-fPIC", soname, source, "-o", str(path)])
    return path
