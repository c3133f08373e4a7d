"""A program, compiled by NVRTC: as a module in this process, as a script in one of its own.

As a script it compiles what it is sent, one program after the other, until there is nobody left to
send any (see :mod:`fastconv.jit.processes`). It imports nothing of the package, whose imports take
longer than most kernels: it is there in a sixth of a second.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

_HEADER = struct.Struct("8sQ")
_MAGIC = b"fastconv"


class Program(NamedTuple):
    """What NVRTC is given; names and contents of the files that the text includes."""

    text: str
    name: str
    headers: Mapping[str, str]
    options: Sequence[str]


class Outcome(NamedTuple):
    """What NVRTC made of a program, and what it said; ``error`` is the name of its status."""

    cubin: bytes
    log: str
    error: str | None = None


def compiled(program: Program, nvrtc: Any) -> Outcome:
    """Compiles the program. ``nvrtc`` is ``cuda.bindings.nvrtc``, which releases the GIL."""
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
    """A status, and what there is if it is that of success."""
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
    """What was sent.

    Raises:
        EOFError: there is nobody left to send anything.
        ValueError: somebody else has printed something.
    """
    header = of.read(_HEADER.size)
    if not header:
        raise EOFError
    magic, length = _HEADER.unpack(header) if len(header) == _HEADER.size else (header, 0)
    if magic != _MAGIC:
        raise ValueError(f"unexpected output: {header!r}")
    return pickle.loads(of.read(length))


def _serve() -> None:
    """Compiles for another process: sent where modules are, answers with NVRTC's version."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else may print
    sys.path[:] = receive(requests)
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    send(nvrtc.nvrtcVersion()[1:], answers)
    while True:
        try:
            program = receive(requests)
        except EOFError:
            return
        send(tuple(compiled(Program(*program), nvrtc)), answers)


if __name__ == "__main__":
    _serve()
