"""Builds libraries in the cache folder, for this Python and this PyTorch.

``host.cc`` becomes the native host path, ``deploy.cc`` the library for programs without Python.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastconv._version import __version__
from fastconv.errors import FastconvError
from fastconv.jit import cache, processes, trust
from fastconv.native import compiler
from fastconv.native.schemas import NORM_SCHEMAS, SCHEMAS

SOURCES = Path(__file__).parent
_NAME = "fastconv_host"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++20", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden")


# Flags that compile for the CPU of this machine, with all the vector instructions that it has.
_CPU_FLAGS = {
    "x86_64": ("-march=native", "-Wno-psabi"),
    "aarch64": ("-mcpu=native", "-Wno-psabi"),
}


class Target(NamedTuple):
    """A library to build."""

    name: str  # the beginning of its file's name
    what: str  # in messages
    sources: tuple[str, ...]  # files in SOURCES
    definitions: tuple[str, ...]  # of the preprocessor
    libraries: tuple[str, ...]  # PyTorch's, which it is linked with
    for_this_cpu: bool  # whether it is compiled for this machine's CPU, and serves no other


HOST = Target(
    "host",
    "the native host path",
    ("host.cc", "cpu/kernels.cc"),
    (f"TORCH_EXTENSION_NAME={_NAME}",),
    ("c10", "torch_cpu", "torch", "torch_python"),
    for_this_cpu=True,
)
DEPLOYED = Target(
    "deploy",
    "the library for programs without Python",
    ("deploy.cc",),
    (
        f'FASTCONV_VERSION="{__version__}"',
        "FASTCONV_SCHEMAS=" + ",".join(f'"{schema}"' for schema in SCHEMAS),
        "FASTCONV_NORM_SCHEMAS=" + ",".join(f'"{schema}"' for schema in NORM_SCHEMAS),
    ),
    ("c10", "torch_cpu"),
    for_this_cpu=False,
)

# The type of an ELF program header for notes (PT_NOTE), and the beginning of the note with the
# linker's build ID: the sizes of its name and contents, its type, and its name.
_NOTES = 4
_BUILD_ID = re.compile(rb"\x04\0\0\0(.)\0\0\0\x03\0\0\0GNU\0", re.DOTALL)


class Unavailable(FastconvError, RuntimeError):
    """The native host path is not available; the message says what is missing."""


def library(target: Target = HOST) -> Path:
    """Returns the path of the library for this Python and this PyTorch, built or not.

    Raises:
        Unavailable: there is no home folder, and no other cache folder was chosen.
    """
    return _folder() / f"{target.name}-{_key(target)}.so"


def is_built() -> bool:
    """Whether the library exists; False if its folder cannot be read."""
    with suppress(OSError, Unavailable):
        return library().is_file()
    return False


def command(target: Target = HOST) -> list[str]:
    """Returns the compiler's command line, without the file to write.

    Raises:
        Unavailable: something that the build needs is missing.
    """
    include = Path(sysconfig.get_paths()["include"])
    torch_folder = Path(torch.__file__).parent
    headers = [torch_folder / "include/torch/csrc/autograd/custom_function.h"]
    if sys.platform != "linux":
        raise Unavailable(f"{target.what} is for Linux, and this is {sys.platform}")
    if target is HOST:
        headers.append(include / "Python.h")
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise Unavailable("the native host path is for a Python that has a GIL")
    for header in headers:
        if not header.is_file():
            raise Unavailable(f"there is no {header}, which compiling {target.what} needs")
    if (reason := trust.distrusted_folder(_folder())) is not None:
        raise Unavailable(f"{target.what} cannot be kept: {reason}")
    return [
        *_compiler(),
        *_FLAGS,
        *(f"-D{definition}" for definition in target.definitions),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{folder}" for folder in (
            torch_folder / "include", torch_folder / "include/torch/csrc/api/include", include
        )),
        *(_CPU_FLAGS.get(platform.machine(), ()) if target.for_this_cpu else ()),
        *(str(SOURCES / source) for source in target.sources),
        f"-L{torch_folder / 'lib'}",
        *(f"-l{name}" for name in target.libraries),
        "-o",
    ]  # fmt: skip


def build(
    again: bool = False,
    show: compiler.Show = lambda what, seconds: None,
    target: Target = HOST,
) -> bool:
    """Builds the library now, unless it is there and ``again`` is False; returns whether it did.

    Calls ``show`` several times a second with what is under way and the seconds it has taken.

    Raises:
        Unavailable: something is missing, the folder cannot be written, the compiler failed or
            exceeded its time limit, or ``FASTCONV_BUILD_TIMEOUT`` is not a number of seconds.
    """
    try:
        arguments = command(target)
        trust.make_folder(_folder())
        return compiler.compile_library(arguments, library(target), show, again)
    except compiler.CompilerError as error:
        raise Unavailable(f"{target.what} did not compile: {error}") from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"{target.what} cannot be built: {error}") from error


def start() -> subprocess.Popen[bytes]:
    """Begins to build the library, in a separate process that may outlive this one.

    Raises:
        Unavailable, OSError: the build cannot be started.
    """
    arguments = [str(library()), *command()]
    if not processes.is_python(sys.executable):
        raise Unavailable(
            "the native host path is built in the background by a Python interpreter, which "
            f"sys.executable is not: {sys.executable!r}; `fastconv build` builds it"
        )
    trust.make_folder(_folder())
    return subprocess.Popen(
        [sys.executable, "-I", "-S", compiler.__file__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl+C in a terminal does not interrupt the build
    )


def load() -> Any:
    """Loads the library as a Python module.

    Raises:
        Unavailable: it is not there, is not to be trusted, or does not load.
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
def _key(target: Target = HOST) -> str:
    """Returns a hash of the sources and of all that the library depends on."""
    digest = hashlib.sha256()
    for source in (*target.sources, *sorted(map(str, SOURCES.rglob("*.h")))):
        digest.update((SOURCES / source).read_bytes())
    for part in (
        *_torch_identity(), sys.implementation.cache_tag, sysconfig.get_config_var("SOABI"),
        platform.machine(), *_FLAGS, *target.definitions,
        cpu_features() if target.for_this_cpu else "",
    ):  # fmt: skip
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:32]


def cpu_features(file: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the names of what this machine's first CPU has; empty where Linux does not say."""
    with suppress(OSError), file.open() as lines:
        for line in lines:
            name, _, features = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return " ".join(sorted(features.split()))
    return ""


def _torch_identity() -> Iterator[object]:
    """Yields what identifies a build of PyTorch: builds of one version differ in their headers."""
    yield torch.__version__
    yield torch._C._GLIBCXX_USE_CXX11_ABI
    for name in ("git_version", "cuda", "hip", "xpu", "debug"):
        yield getattr(torch.version, name, None)
    for name in HOST.libraries:
        yield _identity(Path(torch.__file__).parent / f"lib/lib{name}.so")


def _identity(path: Path) -> str | None:
    """Returns a shared library's build ID, or its size and time if it has none."""
    try:
        return _build_id(path) or f"{path.stat().st_size} {path.stat().st_mtime_ns}"
    except OSError:  # this build of PyTorch has the library elsewhere, or not at all
        return None


def _build_id(path: Path) -> str | None:
    with path.open("rb") as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01" or len(header) < 64:  # 64-bit, little-endian
            return None
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        for number in range(count):
            file.seek(table + number * size)
            entry = file.read(size)
            if len(entry) < 40:
                break
            kind, _, place, _, _, length = struct.unpack_from("<IIQQQQ", entry)
            if kind == _NOTES:
                file.seek(place)
                notes = file.read(length)
                if found := _BUILD_ID.search(notes):
                    return notes[found.end() :][: found[1][0]].hex()
    return None


def _folder() -> Path:
    try:
        return cache.folder()
    except RuntimeError as error:  # there is no home folder
        raise Unavailable(f"the native host path cannot be kept: {error}") from error


def _compiler() -> list[str]:
    """Returns the compiler's path, and the arguments that ``CXX`` has for it."""
    chosen = os.environ.get("CXX", "")
    commands = [[chosen], chosen.split()] if chosen.strip() else [[name] for name in _COMPILERS]
    for name, *arguments in commands:
        if found := shutil.which(name):
            return [found, *arguments]
    raise Unavailable(
        "there is no C++ compiler for the native host path: looked for "
        + (f"{chosen}, which CXX names" if chosen else f"{', '.join(_COMPILERS)}; CXX may name it")
    )
