"""A program, compiled by NVRTC: as a module in this process, as a script in one of its own.

As a script it compiles what it is sent, one program after the other, until there is nobody left to
send any (see :mod:`fastconv.jit.processes`). It imports nothing of the package, whose imports take
longer than most kernels: it is there in a sixth of a second.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


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


def _serve() -> None:
    """Compiles for another process: sent where modules are, answers with NVRTC's version."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else may print

    def answer(value: Any) -> None:
        pickle.dump(value, answers)
        answers.flush()

    sys.path[:] = pickle.load(requests)
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    answer(nvrtc.nvrtcVersion()[1:])
    while True:
        try:
            program = pickle.load(requests)
        except EOFError:
            return
        answer(tuple(compiled(Program(*program), nvrtc)))


if __name__ == "__main__":
    _serve()
