"""Builds kernels for the CPU and runs launches of them; see README.md."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fastconv.jit.pool import compile_jobs
from fastconv.kernels.family import (
    FOLDER,
    MAPPED_SCALARS,
    AnyMap,
    Argument,
    Kernel,
    Launch,
    TensorMap,
)

HOST = Path(__file__).parent / "host"
CACHE = Path(__file__).parents[2] / ".pytest_cache/d/emulator"
"""Compiled kernels, named by a hash of their sources. ``pytest --cache-clear`` empties it."""

COMPILER = os.environ.get("CXX", "g++")
FLAGS = [
    *("-std=c++17", "-g1", "-fno-exceptions", "-fno-rtti", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    # No contraction: the same bits on every CPU. No strict aliasing: device compilers have none.
    *("-ffp-contract=off", "-fno-strict-aliasing"),
    # Uninitialised arrays hold a pattern, not zeros that hide the fault.
    "-ftrivial-auto-var-init=pattern",
]

TIMEOUT_S = 1800
"""Limit of one launch in seconds: a kernel that polls in a loop of its own never returns."""


class EmulatorError(AssertionError):
    """A kernel did not compile, or its execution is at fault."""


def run(launches: Iterable[Launch], tensors: Mapping[str, Tensor], reverse: bool = False) -> None:
    """Execute launches in order, on CPU tensors, in place.

    Tensors may have any strides but must not overlap; a name that is not in ``tensors`` is passed
    as a null pointer. Blocks, warps, and the lanes of a warp run by ascending index, or with
    ``reverse`` by descending.
    """
    _store(tensors, _execute(launches, tensors, reverse))


def run_both_orders(launches: Sequence[Launch], tensors: Mapping[str, Tensor]) -> None:
    """Runs launches as :func:`run` does, in both orders; results that differ are an error."""
    forward = _execute(launches, tensors, reverse=False)
    reverse = _execute(launches, tensors, reverse=True)
    for name, tensor in tensors.items():
        if forward[name] != reverse[name]:
            pairs = enumerate(zip(forward[name], reverse[name], strict=True))
            first = next(i for i, (a, b) in pairs if a != b) // tensor.element_size()
            kernels = ", ".join(_title(launch.kernel) for launch in launches)
            raise EmulatorError(
                f"{kernels}: {name} depends on the order in which threads run, first at element "
                f"{first} of its memory. Is a barrier missing?"
            )
    _store(tensors, forward)


def precompile(kernels: Iterable[Kernel]) -> None:
    """Build kernels in parallel, before launches need them."""
    with ThreadPoolExecutor(compile_jobs()) as pool:
        list(pool.map(_library, dict.fromkeys(kernels)))


def _execute(
    launches: Iterable[Launch], tensors: Mapping[str, Tensor], reverse: bool
) -> dict[str, bytes]:
    """The bytes of every tensor after the launches."""
    memory = {
        name: _span(tensor).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }
    for launch in _moved_forward(launches) if reverse else launches:
        names = [name for name in launch.tensors if name in memory]
        order = "reverse" if reverse else "forward"
        command = [_runtime(), _library(launch.kernel), order]
        command += map(str, (*launch.grid, launch.block, launch.shared_bytes, int(launch.early)))
        command.append(str(dict(launch.kernel.constants).get("cluster", 1)))
        places = {name: f"{name}:{len(memory[name])}:{_offset(tensors[name])}" for name in names}
        command += (_argument(argument, places) for argument in launch.arguments)
        output = _call(_title(launch.kernel), command, b"".join(memory[name] for name in names))
        for name in names:
            size = len(memory[name])
            memory[name], output = output[:size], output[size:]
    return memory


def _moved_forward(launches: Iterable[Launch]) -> list[Launch]:
    """The launches, with those that may run beside the one before them in front of that one."""
    moved: list[Launch] = []
    for launch in launches:
        beside = launch.early and dict(launch.kernel.constants).get("beside", False)
        moved.insert(len(moved) - 1 if beside else len(moved), launch)
    return moved


def _argument(argument: Argument, places: Mapping[str, str]) -> str:
    """An argument as ``read_argument`` in host/runtime.cc parses it."""
    if isinstance(argument, int):
        return str(argument)
    if isinstance(argument, str):
        return places.get(argument, "null")
    return f"map {places.get(argument.tensor, 'null')} " + " ".join(map(str, _numbers(argument)))


def _numbers(of: AnyMap) -> tuple[int, ...]:
    """The numbers of a tensor map as ``read_tensor_map`` in host/tensor_map.h parses them."""
    tiled = isinstance(of, TensorMap)
    layout = (*of.sizes, *of.strides, *of.element_strides)
    box = of.box if tiled else (*of.lower, *of.upper, of.channels, of.pixels)
    element = (MAPPED_SCALARS[of.scalar], int(of.scalar == "tf32"))
    return int(not tiled), *element, of.swizzle, len(of.sizes), *layout, *box


def _store(tensors: Mapping[str, Tensor], memory: Mapping[str, bytes]) -> None:
    for name, tensor in tensors.items():
        if memory[name]:
            data = torch.frombuffer(bytearray(memory[name]), dtype=tensor.dtype)
            _span(tensor).copy_(data)


def _span(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.detach().as_strided((length,), (1,))


def _offset(tensor: Tensor) -> int:
    """Bytes of the tensor's address past a multiple of 256, if its storage begins at one.

    GPU allocations do.
    """
    return tensor.storage_offset() * tensor.element_size() % 256


@functools.cache
def _library(kernel: Kernel) -> Path:
    """Compiles the shared library that the runtime loads to run a kernel."""
    text = (
        f'#include "device.h"\n{kernel.text}\n'
        "void emulator_run_thread(const emulator::Argument* arguments, int count) {\n"
        f"  emulator::call(::{kernel.entry}, arguments, count);\n"
        "}\n"
    )
    # -Og compiles in a third (large kernels) to three quarters (small ones) of the time of -O1, and
    # its code is about a tenth slower. -fwhole-program drops the other kernels of the same file.
    options = ["-Og", "-fwhole-program", "-fPIC", "-shared", "-nostdlib"]
    return _compile(_title(kernel), text, options)


@functools.cache
def _runtime() -> Path:
    """Compiles the executable, which loads kernels: linking each one to sanitizers takes longer."""
    fast = ["-O3", "-fno-sanitize=all"]
    checked = ("runtime.cc", "buffers.cc", "sm90.cc", "wgmma.cc", "tensor_map.cc", "mma.cc")
    options = {**{file: ["-O1"] for file in checked}, "thread_mma.cc": fast}
    objects = [
        _compile("the emulator", f'#include "{file}"\n', ["-c", *more])
        for file, more in options.items()
    ]
    return _compile("the emulator", "", [*objects, "-rdynamic", "-ldl"])


def _compile(title: str, text: str, options: Sequence[str | Path]) -> Path:
    """Compile, unless the cache has the same text with the same includes."""
    command = [COMPILER, *FLAGS, f"-I{HOST}", f"-I{FOLDER}"]
    expanded = _call(title, [*command, "-E", "-xc++", "-"], text.encode())
    key = repr((_version(), command, options)).encode() + expanded
    target = CACHE / hashlib.sha256(key).hexdigest()
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with Path(f"{target}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other processes may compile the same
            if not target.exists():
                unfinished = Path(f"{target}.part")
                command += ["-xc++-cpp-output", "-", "-xnone", *options, "-o", unfinished]
                _call(title, command, expanded)
                unfinished.replace(target)
    return target


@functools.cache
def _version() -> bytes:
    return _call("the compiler", [COMPILER, "--version"], b"")


def _call(title: str, command: Sequence[str | Path], data: bytes) -> bytes:
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise EmulatorError(f"{title}: not finished after {TIMEOUT_S} s") from None
    if done.returncode != 0:
        report = done.stderr.decode(errors="replace").partition("Shadow bytes around")[0]
        raise EmulatorError(f"{title}:\n{report}")
    return done.stdout


def _title(kernel: Kernel) -> str:
    constants = ", ".join(f"{name}={value}" for name, value in kernel.constants)
    return f"{kernel.entry}({constants})"
