"""Compiles kernels with NVRTC, for any architecture it knows: no GPU is needed.

NVRTC is called through ``cuda.bindings``. cuda-core's ``Program`` would make the same calls, but it
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

from fastconv.jit import cache, nvrtc, processes, workers
from fastconv.kernels.family import FOLDER, Kernel

MOST_HERE = 4  # threads that compile in this process, if others can do so elsewhere

_KIND = cache.KERNEL
_SOURCE = re.compile(r"\w+(/\w+)*\.cuh")  # as an include has it
_OPTIONS = (
    "-std=c++17",
    "--ptxas-options=-v",  # writes registers and spills to the log
)


class GpuUnavailable(RuntimeError):
    """The GPU kernels cannot run on this machine; says what would have to change."""


class CompilationError(RuntimeError):
    """The compiler refused a kernel; holds its log."""


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code for one architecture, and what the compiler said of it."""

    entry: str
    cubin: bytes
    log: str

    @property
    def registers(self) -> int | None:
        """Registers of each thread."""
        return self._usage(r"Used (\d+) registers")

    @property
    def stack_bytes(self) -> int | None:
        """Bytes of each thread's local memory, for spilled registers and indexed arrays alike."""
        return self._usage(r"(\d+) bytes stack frame")

    @property
    def spill_bytes(self) -> int | None:
        """Bytes each thread stores because registers ran out."""
        return self._usage(r"(\d+) bytes spill stores")

    def _usage(self, pattern: str) -> int | None:
        # ptxas reports on functions one by one, this one's part starting with its name.
        _, _, report = self.log.partition(f"Function properties for {self.entry}\n")
        found = re.search(pattern, report)
        return int(found[1]) if found else None


def build(kernel: Kernel, arch: str) -> bytes:
    """The kernel's machine code for ``arch`` ("sm_80", "sm_90a"), from the disk cache if there."""
    cubin = kept(kernel, arch)
    if cubin is None:
        with _compiling():  # until it is stored: threads in the background end with the process
            cubin = compile_kernel(kernel, arch).cubin
            # Not by its name: a program may have several kernels, and any is asked for first.
            about = {"source": kernel.source, "architecture": arch, "text": kernel.text}
            cache.store(_KIND, _key(kernel.text, arch), cubin, about)
    return cubin


def kept(kernel: Kernel, arch: str) -> bytes | None:
    """The same if it is on disk; None if it has to be compiled."""
    return cache.load(_KIND, _key(kernel.text, arch))


def is_current(name: str, about: Mapping[str, str]) -> bool:
    """Whether :func:`build` could ever ask for an entry of that name, by what is said of it.

    So it is if the sources and the compiler are those that it was made with.

    Raises:
        GpuUnavailable: there is no compiler here.
    """
    text, arch = about.get("text", ""), about.get("architecture", "")
    # A text from elsewhere names no other files than ours.
    own = all(_SOURCE.fullmatch(header) for header in _includes(text))
    return own and is_architecture(arch) and name == f"{_key(text, arch)}.{_KIND}"


def is_architecture(text: str) -> bool:
    """Whether a GPU's architecture is written so."""
    return re.fullmatch("sm_[0-9]{2,3}[a-z]?", text) is not None


def compile_kernel(kernel: Kernel, arch: str) -> Compiled:
    """Compiles the kernel for ``arch``, without the cache.

    Other threads may run meanwhile, and compile too: the bindings release the GIL.

    Raises:
        CompilationError: the compiler refused it.
        GpuUnavailable: there is no compiler here, or none that knows the architecture.
        SystemExit: the interpreter is shutting down.
    """
    text = kernel.text
    program = nvrtc.Program(text, f"{kernel.entry}.cu", included(text), _options(arch))
    with _compiling():
        _check_supported(arch)
        outcome = _outcome(program)
    if outcome.error:
        raise CompilationError(f"{describe(kernel)} for {arch}: {outcome.error}\n{outcome.log}")
    return Compiled(kernel.entry, outcome.cubin, outcome.log)


def _outcome(program: nvrtc.Program) -> nvrtc.Outcome:
    """Compiled in this process or, ahead and while some threads are at that, in another one."""
    if workers.is_ahead() or workers.alive(_here) >= MOST_HERE:
        outcome = processes.compiled(program, nvrtc_version())
        if outcome is not None:
            return outcome
    _compile_nothing()
    _here.add(thread := threading.current_thread())
    try:
        return nvrtc.compiled(program, _nvrtc())
    finally:
        _here.discard(thread)


# Who is in the compiler. As a process exits, the compiler's own data is destroyed, and a thread
# that still uses it ends the process by SIGABRT or SIGSEGV; Python waits for no daemon thread.
# No lock and no count: a fork or an interrupt could leave one behind as it must not be.
_compilers: set[threading.Thread] = set()
_here: set[threading.Thread] = set()  # those whose compiler is this process's
_exiting = False


@contextmanager
def _compiling() -> Iterator[None]:
    thread = threading.current_thread()
    if thread in _compilers:
        yield
        return
    _compilers.add(thread)
    try:
        if _exiting:  # looked at after adding, as _exit sets it before looking
            # No error: of a daemon thread that writes a traceback now, Python itself may abort.
            raise SystemExit("cannot compile kernels: the interpreter is shutting down")
        yield
    finally:
        _compilers.discard(thread)


@atexit.register
def _exit() -> None:
    """Waits for threads that compile; none begins to from now on."""
    global _exiting
    _exiting = True
    others = _compilers - {threading.current_thread()}
    while any(thread in _compilers and thread.is_alive() for thread in others):
        with suppress(KeyboardInterrupt):  # it would not interrupt, but abort
            time.sleep(0.01)


@functools.cache
def _compile_nothing() -> None:
    """Gets the compiler's first program over with, in milliseconds.

    For as long as that takes, SIGINT and SIGTERM are the compiler's, which ends the process by a
    crash or a status of its own, and not Python's.
    """
    nvrtc.compiled(nvrtc.Program("", "nothing.cu", {}, ()), _nvrtc())
    if hasattr(signal, "siginterrupt"):
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                signal.siginterrupt(number, True)  # as Python had it: they end a wait for a lock


def nvrtc_version() -> tuple[int, int]:
    """The compiler's version, which is that of its CUDA release: (13, 0), say."""
    major, minor = _nvrtc().nvrtcVersion()[1:]
    return major, minor


def included(text: str) -> dict[str, str]:
    """The files that ``text`` includes, directly or not: their names as written, their contents.

    The compiler gets these very strings, and no folder to search: were it given one, it would still
    look into the current working directory first, and what is compiled would not be what the
    cache's key is made of.
    """
    found: dict[str, str] = {}
    names = [*_includes(text)]
    while names:
        name = names.pop()
        # A missing file may be one that the preprocessor skips; if not, the compiler tells.
        if name not in found and (contents := _contents(name)) is not None:
            found[name] = contents
            names += _includes(contents)
    return dict(sorted(found.items()))


def describe(kernel: Kernel) -> str:
    """The kernel and its constants, for messages."""
    constants = ", ".join(f"{name}={value}" for name, value in kernel.constants)
    return f"{kernel.entry} of {kernel.source} ({constants})"


def binding(name: str) -> Any:
    """A module of ``cuda.bindings``, untyped: it has no annotations."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise GpuUnavailable(_MISSING.format("cuda-bindings")) from error


_MISSING = (
    "fastconv needs {} for CUDA tensors: pip install 'fastconv[cuda]' beside a CUDA build of "
    "PyTorch; CPU tensors work without it"
)


@functools.cache
def _nvrtc() -> Any:
    bindings = binding("nvrtc")
    try:
        _value(bindings.nvrtcVersion())  # finds and loads the library
    except RuntimeError as error:
        raise GpuUnavailable(_MISSING.format("NVRTC")) from error
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


@functools.lru_cache(256)  # more than there are headers: searching them takes milliseconds
def _includes(text: str) -> tuple[str, ...]:
    return (*re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, re.MULTILINE),)


@functools.cache
def _contents(name: str) -> str | None:
    try:
        return (FOLDER / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _value(answer: tuple[Any, ...]) -> Any:
    """What an NVRTC function returned beside its status, which is checked."""
    status, *values = answer
    if status:
        raise CompilationError(f"NVRTC: {status.name}")
    return values[0] if values else None
