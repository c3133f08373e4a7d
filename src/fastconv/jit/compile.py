"""Compiles kernels with NVRTC, for any architecture that it supports; this needs no GPU.

NVRTC is called through ``cuda.bindings``. cuda-core's ``Program`` makes the same calls, but it
cannot take headers from memory (see :func:`included`), and importing it takes five times as long.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastconv.errors import CompilationError, GpuUnavailable
from fastconv.jit import cache, nvrtc, processes, workers
from fastconv.kernels.family import FOLDER, Kernel

MOST_IN_PROCESS = 4
"""How many threads compile in this process before others use processes of their own."""

_SOURCE = re.compile(r"\w+(/\w+)*\.cuh")  # the path of a device source below kernels/
_OPTIONS = (
    "-std=c++17",
    "--ptxas-options=-v",  # writes registers and spills to the log
)


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code for one architecture, and the compiler's log."""

    entry: str
    cubin: bytes
    log: str

    @property
    def registers(self) -> int | None:
        """Registers that each thread uses; None if the log does not say."""
        return self._usage(r"Used (\d+) registers")

    @property
    def stack_bytes(self) -> int | None:
        """Bytes of local memory of each thread, for spilled registers and indexed arrays."""
        return self._usage(r"(\d+) bytes stack frame")

    @property
    def spill_bytes(self) -> int | None:
        """Bytes of registers that each thread spills to local memory."""
        return self._usage(r"(\d+) bytes spill stores")

    def _usage(self, pattern: str) -> int | None:
        # ptxas reports on one function after the other; each report begins with the name.
        _, _, report = self.log.partition(f"Function properties for {self.entry}\n")
        found = re.search(pattern, report)
        return int(found[1]) if found else None


def build(kernel: Kernel, arch: str) -> bytes:
    """The kernel's machine code for ``arch`` ("sm_80"), from the disk cache or compiled."""
    cubin = cached_cubin(kernel, arch)
    if cubin is None:
        with _compiling():  # also while it is stored, so that an exiting process waits for that
            cubin = compile_kernel(kernel, arch).cubin
            # The metadata names no entry point: all kernels of a program share the cache entry.
            metadata = {"source": kernel.source, "architecture": arch, "text": kernel.text}
            cache.store(cache.KERNEL, _key(kernel.text, arch), cubin, metadata)
    return cubin


def cached_cubin(kernel: Kernel, arch: str) -> bytes | None:
    """The kernel's machine code from the disk cache; None if it has to be compiled."""
    return cache.load(cache.KERNEL, _key(kernel.text, arch))


def is_current(name: str, metadata: Mapping[str, str]) -> bool:
    """Whether :func:`build` may load the cache entry of that name and metadata.

    That is so if the sources and the compiler are the ones that the entry was compiled with.

    Raises:
        GpuUnavailable: there is no compiler here.
    """
    text, arch = metadata.get("text", ""), metadata.get("architecture", "")
    # The text may come from an untrusted file: it must not make us read files of other folders.
    own = all(_SOURCE.fullmatch(header) for header in _includes(text))
    return own and is_architecture(arch) and name == f"{_key(text, arch)}.{cache.KERNEL}"


def is_architecture(text: str) -> bool:
    """Whether the text has the form of an architecture, for example "sm_90a"."""
    return re.fullmatch("sm_[0-9]{2,3}[a-z]?", text) is not None


def compile_kernel(kernel: Kernel, arch: str) -> Compiled:
    """Compiles the kernel for ``arch``, without the cache.

    Other threads run meanwhile, and may compile as well: the bindings release the GIL.

    Raises:
        CompilationError: the compiler refused the kernel.
        GpuUnavailable: there is no compiler here, or it does not support the architecture.
        SystemExit: the interpreter is shutting down.
    """
    text = kernel.text
    program = nvrtc.Program(text, f"{kernel.entry}.cu", included(text), _options(arch))
    with _compiling():
        _check_supported(arch)
        outcome = _compile(program)
    if outcome.error:
        raise CompilationError(f"{describe(kernel)} for {arch}: {outcome.error}\n{outcome.log}")
    return Compiled(kernel.entry, outcome.cubin, outcome.log)


def _compile(program: nvrtc.Program) -> nvrtc.Outcome:
    """Compiles in this process, or in a compiler process.

    A compiler process is preferred for kernels that are compiled ahead, and where many threads
    compile in this process already.
    """
    if workers.is_ahead() or workers.alive(_in_process) >= MOST_IN_PROCESS:
        outcome = processes.compile_program(program, nvrtc_version())
        if outcome is not None:
            return outcome
    _compile_empty_program()
    _in_process.add(thread := threading.current_thread())
    try:
        return nvrtc.compile_program(program, _nvrtc())
    finally:
        _in_process.discard(thread)


# The threads that compile. As a process exits, NVRTC's static data is destroyed, and a thread that
# still uses it ends the process by SIGABRT or SIGSEGV: _exit waits, since Python does not wait for
# daemon threads. Sets of threads, because a fork or an interrupt could leave a lock or a counter
# wrong for good.
_compiling_threads: set[threading.Thread] = set()
_in_process: set[threading.Thread] = set()  # those among them that compile in this process
_exiting = False


@contextmanager
def _compiling() -> Iterator[None]:
    """A context in which this thread is one of those that compile.

    Raises:
        SystemExit: the interpreter is shutting down.
    """
    thread = threading.current_thread()
    if thread in _compiling_threads:
        yield
        return
    _compiling_threads.add(thread)
    try:
        # The order matters: this thread is added before it reads _exiting, and _exit sets _exiting
        # before it reads the set.
        if _exiting:
            # SystemExit ends a daemon thread without a traceback: Python may abort if a daemon
            # thread prints during shutdown.
            raise SystemExit("cannot compile kernels: the interpreter is shutting down")
        yield
    finally:
        _compiling_threads.discard(thread)


@atexit.register
def _exit() -> None:
    """Lets no thread begin to compile, and waits for those that do."""
    global _exiting
    _exiting = True
    others = _compiling_threads - {threading.current_thread()}
    while any(thread in _compiling_threads and thread.is_alive() for thread in others):
        with suppress(KeyboardInterrupt):  # exiting at once would abort in the compiler
            time.sleep(0.01)


@functools.cache
def _compile_empty_program() -> None:
    """Compiles an empty program, in milliseconds, before the first real one.

    During a process's first program, NVRTC handles SIGINT and SIGTERM itself, and ends the process
    by a crash or with a status of its own.
    """
    nvrtc.compile_program(nvrtc.Program("", "nothing.cu", {}, ()), _nvrtc())
    if hasattr(signal, "siginterrupt"):
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                # Restores what Python sets, so that signals interrupt waiting for a lock.
                signal.siginterrupt(number, True)


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version, which is that of its CUDA release, for example (13, 0)."""
    major, minor = _nvrtc().nvrtcVersion()[1:]
    return major, minor


def included(text: str) -> dict[str, str]:
    """The contents of the files that ``text`` includes, directly or not, by the included name.

    The compiler gets these strings and no folder to search. With a folder, it would look into the
    current working directory first, and might compile other sources than the cache's key names.
    """
    found: dict[str, str] = {}
    names = [*_includes(text)]
    while names:
        name = names.pop()
        # A missing file may be one that the preprocessor skips. If not, the compiler reports it.
        if name not in found and (contents := _contents(name)) is not None:
            found[name] = contents
            names += _includes(contents)
    return dict(sorted(found.items()))


def describe(kernel: Kernel) -> str:
    """The kernel and its constants, for messages."""
    constants = ", ".join(f"{name}={value}" for name, value in kernel.constants)
    return f"{kernel.entry} of {kernel.source} ({constants})"


def binding(name: str) -> Any:
    """A module of ``cuda.bindings``, which has no type annotations.

    Raises:
        GpuUnavailable: the package is not installed.
    """
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise GpuUnavailable(_MISSING.format("cuda-bindings", _EXTRA)) from error


_MISSING = "fastconv needs {} for CUDA tensors: {}; CPU tensors work without it"
_EXTRA = "pip install 'fastconv[cuda]' beside a CUDA build of PyTorch"
_BUILD = "a CUDA build of PyTorch brings it, and so does pip install nvidia-cuda-nvrtc"


@functools.cache
def _nvrtc() -> Any:
    bindings = binding("nvrtc")
    try:
        _value(bindings.nvrtcVersion())  # this call finds and loads the library
    except RuntimeError as error:
        raise GpuUnavailable(_MISSING.format("NVRTC", _BUILD)) from error
    return bindings


def _check_supported(arch: str) -> None:
    known = _value(_nvrtc().nvrtcGetSupportedArchs())
    if int(re.sub(r"\D", "", arch)) not in known:
        major, minor = nvrtc_version()
        raise GpuUnavailable(
            f"NVRTC {major}.{minor} compiles for GPUs from sm_{min(known)} to sm_{max(known)}, "
            f"not for {arch}: install PyTorch for another CUDA version"
        )


def _key(text: str, arch: str) -> str:
    return cache.key(text, included(text), _options(arch), nvrtc_version())


def _options(arch: str) -> list[str]:
    return [*_OPTIONS, f"--gpu-architecture={arch}"]


@functools.lru_cache(256)  # holds all headers: searching them again would take milliseconds
def _includes(text: str) -> tuple[str, ...]:
    return (*re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, re.MULTILINE),)


@functools.cache
def _contents(name: str) -> str | None:
    try:
        return (FOLDER / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _value(answer: tuple[Any, ...]) -> Any:
    """The value that an NVRTC function returned beside its status, which must be success."""
    status, *values = answer
    if status:
        raise CompilationError(f"NVRTC: {status.name}")
    return values[0] if values else None
