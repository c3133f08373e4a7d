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
    """Where the library for this Python and this PyTorch lies, once it is built."""
    return cache.folder() / f"host-{_key()}.so"


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
    for header in headers:
        if not header.is_file():
            raise Unavailable(f"there is no {header}, which compiling the native host path needs")
    if (reason := trust.distrusted_folder(cache.folder())) is not None:
        raise Unavailable(f"the native host path cannot be kept: {reason}")
    return [
        _compiler(),
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


def build() -> bool:
    """Makes the library now, unless it is there; says whether it had to.

    Raises:
        Unavailable: something is missing, the folder cannot be written, or the compiler failed.
    """
    try:
        trust.make_folder(cache.folder())
        return compiler.compile_library(command(), library())
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
    trust.make_folder(cache.folder())
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
    if not path.is_file():
        raise Unavailable(f"there is no {path}: `fastconv build` makes it")
    if (reason := trust.distrusted(path)) is not None:
        trust.warn(reason)
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
    """Names the source and all that the library has to fit."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    for part in (
        torch.__version__, torch._C._GLIBCXX_USE_CXX11_ABI, sys.implementation.cache_tag,
        sysconfig.get_config_var("SOABI"), platform.machine(), *_FLAGS,
    ):  # fmt: skip
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:32]


def _compiler() -> str:
    names = (chosen,) if (chosen := os.environ.get("CXX")) else _COMPILERS
    for name in names:
        if found := shutil.which(name):
            return found
    raise Unavailable(
        f"there is no C++ compiler for the native host path: looked for {', '.join(names)}"
        + ("; CXX names it" if os.environ.get("CXX") else "; CXX may name another")
    )
