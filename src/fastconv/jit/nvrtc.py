"""Compiles programs with NVRTC: as a module in this process, as a script in a process of its own.

As a script it compiles the programs that it is sent, one after the other, until its input ends
(see :mod:`fastconv.jit.processes`). It imports nothing of the package, whose imports take longer
than compiling most kernels: the script starts in a sixth of a second.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

# A message is a magic, the number of bytes to come, and a pickled value.
_HEADER = struct.Struct("8sQ")
_MAGIC = b"fastconv"


class Program(NamedTuple):
    """NVRTC's input; ``headers`` are the contents of the included files, by name."""

    text: str
    name: str
    headers: Mapping[str, str]
    options: Sequence[str]


class Outcome(NamedTuple):
    """NVRTC's output; ``error`` is the name of its status unless that is success."""

    cubin: bytes
    log: str
    error: str | None = None


def compile_program(program: Program, nvrtc: Any) -> Outcome:
    """Compiles a program. ``nvrtc`` is ``cuda.bindings.nvrtc``, which releases the GIL."""
    headers = {name.encode(): contents.encode() for name, contents in program.headers.items()}
    options = [option.encode() for option in program.options]
    status, handle = nvrtc.nvrtcCreateProgram(
        program.text.encode(), program.name.encode(), len(headers), [*headers.values()], [*headers]
    )
    if status:
        return Outcome(b"", "", status.name)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        failed, log = _output(handle, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        text = log.rstrip(b"\0").decode(errors="replace")
        if status or failed:
            return Outcome(b"", text, (status or failed).name)
        failed, cubin = _output(handle, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Outcome(cubin, text, failed.name if failed else None)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _output(handle: Any, size: Any, fill: Any) -> tuple[Any, bytes]:
    """The status and bytes of one of NVRTC's outputs, given the functions that read it."""
    status, length = size(handle)
    if status:
        return status, b""
    buffer = bytearray(length)
    (status,) = fill(handle, buffer)
    return status, bytes(buffer)


def send(value: Any, to: IO[bytes]) -> None:
    """Sends a value to another process."""
    packed = pickle.dumps(value)
    to.write(_HEADER.pack(_MAGIC, len(packed)) + packed)
    to.flush()


def receive(of: IO[bytes]) -> Any:
    """Receives a value that :func:`send` has sent.

    Raises:
        EOFError: the sender has closed the pipe.
        ValueError: something else was written to the pipe.
    """
    header = of.read(_HEADER.size)
    if not header:
        raise EOFError
    magic, length = _HEADER.unpack(header) if len(header) == _HEADER.size else (header, 0)
    if magic != _MAGIC:
        raise ValueError(f"unexpected output: {header!r}")
    return pickle.loads(of.read(length))


def _serve() -> None:
    """Compiles for another process.

    The first request is that process's ``sys.path``, and the answer is NVRTC's version. Each
    further request is a program.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed to stdout would corrupt the answers
    sys.path[:] = receive(requests)
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    send(nvrtc.nvrtcVersion()[1:], answers)
    while True:
        try:
            program = receive(requests)
        except EOFError:
            return
        send(tuple(compile_program(Program(*program), nvrtc)), answers)


if __name__ == "__main__":
    _serve()
