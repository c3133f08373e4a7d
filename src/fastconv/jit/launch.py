"""Loads compiled kernels onto devices and launches them on PyTorch's streams.

:func:`prepare` does whatever takes long; :meth:`Prepared.run` is left with packing addresses and
calling the driver, which costs about a microsecond of Python. Nothing here waits for the GPU.
"""

from __future__ import annotations

import functools
import itertools
import os
import struct
import threading
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from fastconv.jit import maps, processes
from fastconv.jit.compile import GpuUnavailable, binding, build, describe, kept, nvrtc_version
from fastconv.jit.workers import Workers
from fastconv.kernels.family import AnyMap, Argument, Kernel, Launch

# GPUs whose fastest instructions are compiled for that very GPU alone.
_SPECIFIC = {(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}

# More shared memory than this, static and dynamic together, has to be asked for.
_DEFAULT_SHARED_BYTES = 48 * 1024

# The most blocks along each dimension of a grid, on every GPU.
_LARGEST_GRID = (2**31 - 1, 65535, 65535)


compile_threads: int | None = None
"""At once: None for what the environment says; where many share the machine, each has fewer."""

JOBS_VARIABLE = "FASTCONV_COMPILE_JOBS"


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or launch a kernel."""


def architecture(device: torch.device) -> str:
    """What kernels for the device are compiled for: "sm_80", or "sm_90a" where that gains.

    Raises:
        GpuUnavailable: the kernels cannot run on it.
    """
    if torch.version.hip:
        raise GpuUnavailable("fastconv's GPU kernels need an NVIDIA GPU; CPU tensors work")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        raise GpuUnavailable(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; "
            "fastconv's GPU kernels need 7.0 or newer"
        )
    return f"sm_{major}{minor}{'a' if (major, minor) in _SPECIFIC else ''}"


def build_all(
    kernels: Sequence[Kernel], arch: str, show: Callable[[int, int], None] | None = None
) -> list[bytes]:
    """The kernels' machine code, as :func:`build` gives it; many compile at once.

    ``show`` is called with the number of programs that are there, and how many there will be.
    """
    distinct = {kernel.text: kernel for kernel in kernels}  # several may be of one program
    asked = {text: _asked(kernel, arch) for text, kernel in distinct.items()}
    built: dict[str, bytes] = {}
    for text, cubin in asked.items():
        built[text] = cubin if isinstance(cubin, bytes) else cubin.result()
        if show is not None:
            show(len(built), len(distinct))
    return [built[kernel.text] for kernel in kernels]


def _asked(kernel: Kernel, arch: str) -> bytes | Future[bytes]:
    """The machine code if it is on disk, or what a thread is going to make of it."""
    key, work = _piece(kernel, arch)
    return _workers.claim(key) or kept(kernel, arch) or _workers.ask(key, work, _most_jobs())


def begin(kernels: Iterable[Kernel], arch: str, index: int) -> None:
    """Has kernels compiled in the background, those that are not on the device yet.

    :func:`load` finds them there. One of the processors is left alone; with
    ``FASTCONV_COMPILE_JOBS=1`` nothing is done. Raises nothing: whoever asks for a kernel that
    cannot be made is told.
    """
    missing = {kernel.text: kernel for kernel in kernels if (index, kernel) not in _loaded}
    for kernel in missing.values():
        begin_work(*_piece(kernel, arch))


def begin_work(key: Hashable, work: Callable[[], Any]) -> None:
    """Has any other work done there, for :func:`claim` to find it by its key. Raises nothing."""
    with suppress(ValueError):  # who asks for a kernel is told of a variable that is no number
        _workers.begin(key, work, _most_jobs())


def drop(key: Hashable) -> None:
    """Leaves work that was begun, if nobody has got to it yet."""
    _workers.drop(key)


def claim(key: Hashable) -> Any:
    """What comes of work that was begun; None if none was, or if it has failed before."""
    future = _workers.claim(key)
    return None if future is None else future.result()


def _piece(kernel: Kernel, arch: str) -> tuple[Hashable, Callable[[], bytes]]:
    return (kernel.text, arch), functools.partial(build, kernel, arch)


def _most_jobs() -> int:
    return compile_threads or compile_jobs() or 1


_workers = Workers(processes.allowed)


def _after_fork() -> None:
    """A forked process has none of the threads, and maybe a lock that one of them held."""
    global _workers
    _workers = Workers(processes.allowed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def compile_jobs() -> int | None:
    """How many kernels to compile at once: ``$FASTCONV_COMPILE_JOBS``, or one a processor.

    Of processors, those count that this process may use, which containers and schedulers limit.

    Raises:
        ValueError: the variable is no positive number.
    """
    if value := os.environ.get(JOBS_VARIABLE):
        if not value.isdecimal() or int(value) == 0:
            raise ValueError(f"{JOBS_VARIABLE} should be a positive number, but got {value!r}")
        return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def prepare(
    launches: Sequence[Launch], device: torch.device, names: Iterable[str] | None = None
) -> Prepared:
    """Compiles and loads the kernels the launches need, those that are not yet.

    ``names`` are the tensors in the order in which :meth:`Prepared.run` takes their addresses, by
    default that of their first use. A name that no launch uses is fine.

    Raises:
        CompilationError, GpuUnavailable, LaunchError: it cannot be done, for the reason given.
    """
    if device.type != "cuda":
        raise ValueError(f"GPU kernels cannot run on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    load([launch.kernel for launch in launches], index)
    loaded = {launch.kernel: _loaded[index, launch.kernel] for launch in launches}
    for launch in launches:
        loaded[launch.kernel].check(launch)
    used = dict.fromkeys(name for launch in launches for name in launch.tensors)
    order = tuple(used if names is None else names)
    if unknown := used.keys() - set(order):
        raise ValueError(f"launches use tensors that are not among the names: {sorted(unknown)}")
    functions = [loaded[launch.kernel].function for launch in launches]
    return Prepared(launches, functions, index, order, _descriptors(launches, index))


Description = tuple[int, tuple[int, int, int], int, int, bool, tuple[tuple[Any, ...], ...]]
"""Of a launch: see :attr:`Prepared.description`."""


class Prepared:
    """A sequence of launches on one device, complete but for the addresses of tensors."""

    __slots__ = (
        "_current_device",
        "_descriptors",
        "_functions",
        "_idle",
        "_index",
        "_integers",
        "_pack_into",
        "_raw_stream",
        "_replace_address",
        "_stream",
        "launches",
        "names",
    )

    def __init__(
        self,
        launches: Sequence[Launch],
        functions: Sequence[Any],
        index: int,
        names: tuple[str, ...],
        descriptors: dict[AnyMap, bytes],
    ) -> None:
        driver = _driver()
        self.launches = tuple(launches)
        self.names = names
        self._index = index
        self._functions = functions
        self._descriptors = descriptors
        self._integers = [_integers(launch) for launch in launches]
        self._idle: list[_Block] = []
        # Looked up here rather than in every call.
        self._pack_into = struct.Struct(f"{len(names)}Q").pack_into
        self._stream = driver.CUstream
        if descriptors:
            self._replace_address = maps.replace_address(_entry)
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        # What torch.cuda.current_stream(device).cuda_stream gives, without making an object.
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    @property
    def description(self) -> list[Description]:
        """What another launcher needs, for each launch in plain values.

        The function's handle, grid, block and bytes of shared memory, whether the launch is early
        (the driver is told by an attribute of ``cuLaunchKernelEx``); then the arguments, each of
        them ``("tensor", i)`` for the address of the tensor ``names[i]``, ``("int", value)`` for a
        32-bit int, or ``("map", bytes, i)`` for a descriptor of the tensor ``names[i]``: 128 bytes,
        in a copy of which the driver's ``cuTensorMapReplaceAddress`` has to set the address. The
        copy is aligned as :data:`maps.ALIGNMENT` says.
        """
        return [
            (
                int(function),
                launch.grid,
                launch.block,
                launch.shared_bytes,
                launch.early,
                tuple(map(self._describe, launch.arguments)),
            )
            for launch, function in zip(self.launches, self._functions, strict=True)
        ]

    def _describe(self, argument: Argument) -> tuple[Any, ...]:
        if isinstance(argument, str):
            return "tensor", self.names.index(argument)
        if isinstance(argument, int):
            return "int", argument
        return "map", self._descriptors[argument], self.names.index(argument.tensor)

    def run(self, *addresses: int) -> None:
        """Launches on the device's current stream, with tensors at these addresses.

        There is one address for each of :attr:`names`, 0 for an absent tensor. The tensors' memory
        must stay theirs until the stream gets there, as PyTorch's allocator sees to. May be called
        by several threads at once, and while a CUDA graph is captured.
        """
        if self._current_device() == self._index:
            self._run(addresses)
        else:
            with torch.cuda.device(self._index):
                self._run(addresses)

    def _run(self, addresses: tuple[int, ...]) -> None:
        # The driver reads the arguments during the call, so a block can be used again right after
        # it, but not by two threads at once: whoever runs takes one out (list.pop is atomic).
        try:
            block = self._idle.pop()
        except IndexError:
            block = self._new_block()
        self._pack_into(block.addresses, 0, *addresses)
        for descriptor, tensor, of in block.mapped:
            status = self._replace_address(descriptor, addresses[tensor])
            if status:
                self._replace_again(status, descriptor, addresses[tensor], of)
        stream = self._stream(self._raw_stream(self._index))
        for start, arguments, launch in block.calls:
            (status,) = start(stream, arguments, 0)
            if status:
                self._launch_again(status, launch, functools.partial(start, stream, arguments, 0))
        self._idle.append(block)

    def _launch_again(self, status: Any, launch: Launch, start: Callable[[], tuple[Any]]) -> None:
        if self._enter_context(status):
            (status,) = start()
        if status:
            raise self._launch_error(status, launch)

    def _replace_again(self, status: int, descriptor: int, address: int, of: AnyMap) -> None:
        if self._enter_context(status):
            status = self._replace_address(descriptor, address)
        if status:
            launch = next(launch for launch in self.launches if of in launch.arguments)
            raise self._map_error(_driver().CUresult(status), launch, of, address)

    def trouble(self, number: int, mapped: int, address: int, status: int, again: bool) -> None:
        """For another launcher: returns if what had this status is to be tried again.

        That is the launch of this number or, unless ``mapped`` is -1, replacing the address in the
        descriptor that is its argument there. ``again`` says that it has been tried twice.

        Raises:
            LaunchError: it is not.
        """
        failed, launch = _driver().CUresult(status), self.launches[number]
        if not again and self._enter_context(failed):
            return
        if mapped < 0:
            raise self._launch_error(failed, launch)
        of = launch.arguments[mapped]
        assert not isinstance(of, str | int)
        raise self._map_error(failed, launch, of, address)

    def _launch_error(self, status: Any, launch: Launch) -> LaunchError:
        return LaunchError(
            f"launching {describe(launch.kernel)} on cuda:{self._index}, grid {launch.grid}, "
            f"block {launch.block}, {launch.shared_bytes} bytes of shared memory: "
            f"{_problem(status)}"
        )

    def _map_error(self, status: Any, launch: Launch, of: AnyMap, address: int) -> LaunchError:
        return LaunchError(
            f"mapping {of.tensor} at address {address:#x} for {describe(launch.kernel)} on "
            f"cuda:{self._index}, {of}: {_problem(status)}"
        )

    def _enter_context(self, status: Any) -> bool:
        # A thread has no CUDA context until its first call of the runtime library that needs one.
        # PyTorch may not have made any there: its threads take memory from a cache.
        if status != _driver().CUresult.CUDA_ERROR_INVALID_CONTEXT:
            return False
        _value(_driver().cuCtxSetCurrent(_context(self._index)), "entering the CUDA context")
        return True

    def _new_block(self) -> _Block:
        addresses = array("Q", bytes(8 * len(self.names)))
        memory = maps.Memory(len(self._descriptors))
        for number, descriptor in enumerate(self._descriptors.values()):
            memory[number] = descriptor
        at: dict[Argument, int] = {
            **{name: _address(addresses) + 8 * i for i, name in enumerate(self.names)},
            **{of: memory.address(number) for number, of in enumerate(self._descriptors)},
        }
        pointers = []
        for launch, integers in zip(self.launches, self._integers, strict=True):
            integers_at = itertools.count(_address(integers), integers.itemsize)
            arguments = (
                next(integers_at) if isinstance(a, int) else at[a] for a in launch.arguments
            )
            pointers.append(array("Q", arguments))
        starts = map(_start, self.launches, self._functions)
        calls = tuple(zip(starts, map(_address, pointers), self.launches, strict=True))
        mapped = tuple((at[of], self.names.index(of.tensor), of) for of in self._descriptors)
        return _Block(addresses, memory, pointers, mapped, calls)


@dataclass(frozen=True, slots=True)
class _Block:
    """What one thread at a time needs for a sequence of launches.

    That is memory from which the driver reads their arguments, and functions that launch.
    """

    addresses: array[int]
    descriptors: maps.Memory
    pointers: list[array[int]]  # for each launch, the addresses of its arguments
    mapped: tuple[tuple[int, int, AnyMap], ...]  # address of each descriptor, number of its tensor
    calls: tuple[tuple[Callable[..., tuple[Any]], int, Launch], ...]


class _Loaded:
    """A kernel on a device."""

    def __init__(self, kernel: Kernel, cubin: bytes, index: int) -> None:
        self._what = f"{describe(kernel)} on cuda:{index}"
        driver, doing = _driver(), f"loading {self._what}"
        # Not cuLibraryLoadData, which may leave the loading to the first launch, and that may come
        # while a graph is captured. The module stays for the life of the process.
        module = _value(driver.cuModuleLoadData(cubin), doing)
        self.function = _value(driver.cuModuleGetFunction(module, kernel.entry.encode()), doing)
        self._most_threads = self._attribute("CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
        static_bytes = self._attribute("CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES")
        self._shared_bytes = _DEFAULT_SHARED_BYTES - static_bytes

    def check(self, launch: Launch) -> None:
        """Has the driver allow what the launch asks for, or raises LaunchError."""
        if launch.block > self._most_threads:
            raise LaunchError(
                f"{self._what} runs with {self._most_threads} threads in a block at most, "
                f"not with {launch.block}"
            )
        if any(size > most for size, most in zip(launch.grid, _LARGEST_GRID, strict=True)):
            raise LaunchError(
                f"{self._what}: a grid has at most {_LARGEST_GRID} blocks, not {launch.grid}"
            )
        with _lock:  # so that the limit never falls
            if launch.shared_bytes > self._shared_bytes:
                self._allow(launch.shared_bytes)
                self._shared_bytes = launch.shared_bytes

    def _allow(self, shared_bytes: int) -> None:
        driver = _driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _value(
            driver.cuFuncSetAttribute(self.function, attribute, shared_bytes),
            f"giving {shared_bytes} bytes of shared memory to {self._what}",
        )

    def _attribute(self, name: str) -> int:
        driver = _driver()
        attribute = getattr(driver.CUfunction_attribute, name)
        return int(
            _value(
                driver.cuFuncGetAttribute(attribute, self.function), f"asking about {self._what}"
            )
        )


_loaded: dict[tuple[int, Kernel], _Loaded] = {}
_lock = threading.Lock()


def load(
    kernels: Iterable[Kernel], index: int, show: Callable[[int, int], None] | None = None
) -> int:
    """Compiles kernels and loads them onto the device, those that are not yet; how many were not.

    ``show`` is told of progress, as by :func:`build_all`.
    """
    wanted = dict.fromkeys(kernels)
    if all((index, kernel) in _loaded for kernel in wanted):
        return 0
    with _lock:  # another thread may be at it: then this one waits
        missing = [kernel for kernel in wanted if (index, kernel) not in _loaded]
        _load_missing(missing, index, show)
    return len(missing)


def _load_missing(
    kernels: list[Kernel], index: int, show: Callable[[int, int], None] | None
) -> None:
    if not kernels:
        return
    arch = architecture(torch.device("cuda", index))
    _check_driver()
    cubins = build_all(kernels, arch, show)
    with _loading(index):
        for kernel, cubin in zip(kernels, cubins, strict=True):
            _loaded[index, kernel] = _Loaded(kernel, cubin, index)


def _check_driver() -> None:
    version = _value(_driver().cuDriverGetVersion(), "asking for the driver's version")
    major, minor = nvrtc_version()
    if version // 1000 < major:
        raise GpuUnavailable(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, but the "
            f"compiler is NVRTC {major}.{minor}: update the driver, or install PyTorch and "
            f"cuda-bindings for CUDA {version // 1000}"
        )


@contextmanager
def _loading(index: int) -> Iterator[None]:
    """Makes the device's context current, and loading allowed while a graph is captured."""
    driver, doing = _driver(), f"entering the CUDA context of cuda:{index}"
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _value(driver.cuCtxPushCurrent(_context(index)), doing)
    try:
        # Loading is no part of the graph, and other threads' captures are theirs to watch.
        mode = _value(driver.cuThreadExchangeStreamCaptureMode(mode), doing)
        try:
            yield
        finally:
            _value(driver.cuThreadExchangeStreamCaptureMode(mode), doing)
    finally:
        _value(driver.cuCtxPopCurrent(), doing)


@functools.cache
def _context(index: int) -> Any:
    """The device's primary context, which is PyTorch's; never given back."""
    driver, doing = _driver(), f"looking for the CUDA context of cuda:{index}"
    return _value(driver.cuDevicePrimaryCtxRetain(_value(driver.cuDeviceGet(index), doing)), doing)


@functools.cache
def _driver() -> Any:
    return binding("driver")


def _value(answer: tuple[Any, ...], doing: str) -> Any:
    """What a driver function returned beside its status, which is checked."""
    status, *values = answer
    if status:
        error = GpuUnavailable if status.name in _TOO_NEW else LaunchError
        raise error(f"{doing}: {_problem(status)}")
    return values[0] if values else None


# How drivers answer to machine code from a compiler newer than they are.
_TOO_NEW = {
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}

# What kernels fail with as they run, which the driver tells in answer to some later call.
_FAULTS = {
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
}


def _problem(status: Any) -> str:
    _, text = _driver().cuGetErrorString(status)
    problem = f"{status.name}: {text.decode() if text else 'unknown error'}"
    if status.name in _TOO_NEW:
        problem += "; the NVIDIA driver is too old for the compiler's output: update the driver"
    elif "CAPTURE" in status.name:
        problem += "; call the operation once before capturing a CUDA graph, so that it is compiled"
    elif status.name in _FAULTS:
        problem += "; the fault is that of a kernel launched earlier, ours or another"
    return problem


def _descriptors(launches: Sequence[Launch], index: int) -> dict[AnyMap, bytes]:
    """Of each map among the arguments, complete but for the address of its tensor."""
    wanted = {
        argument: launch
        for launch in launches
        for argument in launch.arguments
        if not isinstance(argument, str | int)
    }
    return {of: _descriptor(of, launch, index) for of, launch in wanted.items()}


def _descriptor(of: AnyMap, launch: Launch, index: int) -> bytes:
    with _loading(index):
        status, descriptor = maps.encoded(of, _driver(), _entry)
    doing = f"describing {of.tensor} to {describe(launch.kernel)} on cuda:{index} by {of}"
    _value((_driver().CUresult(status),), doing)
    return descriptor


def _entry(name: str) -> int:
    """The address of a function that the driver has since CUDA 12."""
    doing = f"looking for the driver's {name}"
    address = _value(_driver().cuGetProcAddress(name.encode(), 12000, 0), doing)
    if not address:
        raise GpuUnavailable(f"{doing}: there is none; update the driver")
    return int(address)


def _start(launch: Launch, function: Any) -> Callable[..., tuple[Any]]:
    """Has the driver launch on a stream, with arguments; for one thread at a time."""
    driver = _driver()
    if not launch.early:
        return functools.partial(
            driver.cuLaunchKernel, function, *launch.grid, launch.block, 1, 1, launch.shared_bytes
        )
    config, launch_by = _early_config(launch), driver.cuLaunchKernelEx

    def start(stream: Any, arguments: int, extra: int) -> Any:
        config.hStream = stream
        return launch_by(config, function, arguments, extra)

    return start


def _early_config(launch: Launch) -> Any:
    """All but the stream of what cuLaunchKernelEx is told."""
    driver = _driver()
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    name = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    attribute.id = getattr(driver.CUlaunchAttributeID, name)
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
    config.sharedMemBytes = launch.shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _integers(launch: Launch) -> array[int]:
    """The integers among the arguments, as the kernel reads them."""
    values = [argument for argument in launch.arguments if isinstance(argument, int)]
    try:
        return array("i", values)
    except OverflowError:
        raise LaunchError(
            f"{describe(launch.kernel)} takes 32-bit integers, but got {max(values, key=abs)}"
        ) from None


def _address(buffer: array[int]) -> int:
    return buffer.buffer_info()[0]
