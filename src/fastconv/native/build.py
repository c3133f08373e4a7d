"""From ``host.cc`` to a library in the cache folder that fits this Python and this PyTorch."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fastconv.jit import cache, trust
from fastconv.native import compiler

SOURCE = Path(__file__).with_name("host.cc")
_NAME = "fastconv_host"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++20", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden",
    f"-DTORCH_EXTENSION_NAME={_NAME}",
)  # fmt: skip
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class Unavailable(RuntimeError):
    """The native host path cannot be had here; says what is missing."""


def library() -> Path:
    """Where the library for this Python and this PyTorch lies, once it is built.

    Raises:
        Unavailable: there is no home folder, and no other was chosen.
    """
    return _folder() / f"host-{_key()}.so"


def is_built() -> bool:
    """Whether the library is there; one that cannot be looked at is not."""
    with suppress(OSError, Unavailable):
        return library().is_file()
    return False


def command() -> list[str]:
    """The compiler and its arguments, but for the file to write.

    Raises:
        Unavailable: something is missing.
    """
    include = Path(sysconfig.get_paths()["include"])
    torch_folder = Path(torch.__file__).parent
    headers = (include / "Python.h", torch_folder / "include/torch/csrc/autograd/custom_function.h")
    if sys.platform != "linux":
        raise Unavailable(f"the native host path is for Linux, and this is {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Unavailable("the native host path is for a Python that has a GIL")
    for header in headers:
        if not header.is_file():
            raise Unavailable(f"there is no {header}, which compiling the native host path needs")
    if (reason := trust.distrusted_folder(_folder())) is not None:
        raise Unavailable(f"the native host path cannot be kept: {reason}")
    return [
        *_compiler(),
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{folder}" for folder in (
            torch_folder / "include", torch_folder / "include/torch/csrc/api/include", include
        )),
        str(SOURCE),
        f"-L{torch_folder / 'lib'}",
        *(f"-l{name}" for name in _LIBRARIES),
        "-o",
    ]  # fmt: skip


def build(again: bool = False) -> bool:
    """Makes the library now, unless it is there, or in any case ``again``; says whether it had to.

    Raises:
        Unavailable: something is missing, the folder cannot be written, or the compiler failed.
    """
    try:
        arguments = command()
        trust.make_folder(_folder())
        if again:
            library().unlink(missing_ok=True)
        return compiler.compile_library(arguments, library())
    except compiler.CompilerError as error:
        raise Unavailable(f"the native host path did not compile: {error}") from error
    except OSError as error:
        raise Unavailable(f"the native host path cannot be built: {error}") from error


def start() -> subprocess.Popen[bytes]:
    """Begins to make the library, in a process of its own that outlives this one.

    Raises:
        Unavailable, OSError: it cannot be begun.
    """
    arguments = [str(library()), *command()]
    if not sys.executable:
        raise Unavailable("the native host path needs a Python program to be built in background")
    trust.make_folder(_folder())
    return subprocess.Popen(
        [sys.executable, "-I", "-S", compiler.__file__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's interrupt is for the user's program
    )


def load() -> Any:
    """The library as a Python module.

    Raises:
        Unavailable: it is not there, not to be trusted, or does not load.
    """
    path = library()
    if not is_built():
        raise Unavailable(f"there is no {path}: `fastconv build` makes it")
    if (reason := trust.distrusted(path)) is not None:
        raise Unavailable(f"{path} may not be used: {reason}")
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise Unavailable(f"{path} does not load: {error}") from error
    return module


@functools.cache
def _key() -> str:
    """Names the sources and all that the library has to fit."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    for header in sorted(SOURCE.parent.glob("*.h")):
        digest.update(header.read_bytes())
    for part in (
        torch.__version__, torch._C._GLIBCXX_USE_CXX11_ABI, sys.implementation.cache_tag,
        sysconfig.get_config_var("SOABI"), platform.machine(), *_FLAGS,
    ):  # fmt: skip
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:32]


def _folder() -> Path:
    try:
        return cache.folder()
    except RuntimeError as error:  # there is no home folder
        raise Unavailable(f"the native host path cannot be kept: {error}") from error


def _compiler() -> list[str]:
    """The compiler's path, and arguments where ``CXX`` has some."""
    chosen = os.environ.get("CXX", "")
    commands = [[chosen], chosen.split()] if chosen.strip() else [[name] for name in _COMPILERS]
    for name, *arguments in commands:
        if found := shutil.which(name):
            return [found, *arguments]
    raise Unavailable(
        "there is no C++ compiler for the native host path: looked for "
        + (f"{chosen}, which CXX names" if chosen else f"{', '.join(_COMPILERS)}; CXX may name it")
    )
