"""Compiles with a given NVRTC library, also of older CUDA releases, for older GPUs.

fastconv uses one NVRTC in a process, that of PyTorch's CUDA version. Tests also compile with those
that users of other PyTorch builds have. Their packages, nvidia-cuda-nvrtc-cu11 and
nvidia-cuda-nvrtc-cu12, can be installed side by side.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from fastconv import jit
from fastconv.jit import GpuUnavailable, compile, nvrtc_version
from fastconv.kernels.family import Kernel

SONAMES = {11: "libnvrtc.so.11.2", 12: "libnvrtc.so.12"}


def find(major: int) -> Path | None:
    """The path of the NVRTC of that CUDA release, if pip has installed it."""
    paths = (Path(p) / "nvidia/cuda_nvrtc/lib" / SONAMES[major] for p in sys.path)
    return next((path for path in paths if path.is_file()), None)


class Nvrtc:
    """An NVRTC library."""

    def __init__(self, path: Path) -> None:
        # cuda.bindings prefers a libnvrtc that the process has already loaded, so it must not find
        # this one.
        with contextlib.suppress(GpuUnavailable):
            nvrtc_version()
        self._library = ctypes.CDLL(str(path))

    @property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def compile(
        self, text: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> tuple[bytes, str]:
        """The cubin and the log; raises a RuntimeError with the log if compilation fails."""
        # NVRTC 11 leaves the calling thread in a locale in which files are ASCII.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._compile, text, headers, options).result()

    def _compile(
        self, text: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> tuple[bytes, str]:
        program = ctypes.c_void_p()
        status = self._library.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            b"test.cu",
            len(headers),
            _strings(headers.values()),
            _strings(headers),
        )
        self._check(status)
        try:
            status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._output(program, "ProgramLog").rstrip(b"\0").decode()
            if status:
                raise RuntimeError(log)
            return self._output(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(self._library.nvrtcGetErrorString(status).decode())


def _strings(strings: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [s.encode() for s in strings]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def compiled(kernel: Kernel, arch: str) -> jit.Compiled:
    """A kernel compiled by the newest NVRTC for the architecture; skips the test without one."""
    if arch != "sm_70":
        try:
            nvrtc_version()
        except GpuUnavailable as error:
            pytest.skip(str(error))
        return jit.compile_kernel(kernel, arch)
    nvrtc = _volta()
    if nvrtc is None:
        pytest.skip("needs NVRTC 12: pip install nvidia-cuda-nvrtc-cu12")
    headers, options = compile.included(kernel.text), compile._options(arch)
    return jit.Compiled(kernel.entry, *nvrtc.compile(kernel.text, headers, options))


@cache
def _volta() -> Nvrtc | None:
    path = find(12)
    return None if path is None else Nvrtc(path)
