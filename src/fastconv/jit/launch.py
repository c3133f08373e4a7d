"""Launches loaded kernels on PyTorch's streams.

:func:`load_launches` does all that takes long. :meth:`LoadedLaunches.run` is left with packing
addresses and calling the driver, which costs about a microsecond of Python. Nothing here waits for
the GPU.
"""

from __future__ import annotations

import functools
import itertools
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastconv.errors import LaunchError
from fastconv.jit import driver, loading, maps
from fastconv.jit.compile import describe
from fastconv.jit.driver import checked, describe_status
from fastconv.kernels.family import AnyMap, Argument, Launch


def load_launches(
    launches: Sequence[Launch], device: torch.device, names: Iterable[str] | None = None
) -> LoadedLaunches:
    """Compiles and loads the kernels of the launches, unless they are on the device already.

    ``names`` are the tensors in the order in which :meth:`LoadedLaunches.run` takes their
    addresses, by default that of their first use. They may include tensors that no launch uses.

    Raises:
        CompilationError, GpuUnavailable, LaunchError: the kernels cannot be compiled or loaded.
    """
    if device.type != "cuda":
        raise ValueError(f"GPU kernels cannot run on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    loading.load([launch.kernel for launch in launches], index)
    kernels = [loading.loaded_kernel(launch.kernel, index) for launch in launches]
    for kernel, launch in zip(kernels, launches, strict=True):
        kernel.allow(launch)
    used = dict.fromkeys(name for launch in launches for name in launch.tensors)
    order = tuple(used if names is None else names)
    if unknown := used.keys() - set(order):
        raise ValueError(f"launches use tensors that are not among the names: {sorted(unknown)}")
    functions = [kernel.function for kernel in kernels]
    return LoadedLaunches(launches, functions, index, order, _tensor_maps(launches, index))


Description = tuple[int, tuple[int, int, int], int, int, bool, tuple[tuple[Any, ...], ...]]
"""A launch in plain values: see :attr:`LoadedLaunches.description`."""


class LoadedLaunches:
    """A sequence of launches on one device, complete but for the addresses of tensors."""

    __slots__ = (
        "_current_device",
        "_functions",
        "_idle",
        "_index",
        "_integers",
        "_pack_into",
        "_raw_stream",
        "_replace_address",
        "_stream",
        "_tensor_maps",
        "launches",
        "names",
    )

    def __init__(
        self,
        launches: Sequence[Launch],
        functions: Sequence[Any],
        index: int,
        names: tuple[str, ...],
        tensor_maps: dict[AnyMap, bytes],
    ) -> None:
        self.launches = tuple(launches)
        self.names = names
        self._index = index
        self._functions = functions
        self._tensor_maps = tensor_maps
        self._integers = [_integers(launch) for launch in launches]
        self._idle: list[_ArgumentBuffers] = []
        # Attributes, so that no call has to look these functions up.
        self._pack_into = struct.Struct(f"{len(names)}Q").pack_into
        self._stream = driver.bindings().CUstream
        if tensor_maps:
            self._replace_address = maps.replace_address(driver.function_address)
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        # The value of torch.cuda.current_stream(device).cuda_stream, without making an object.
        self._raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    @property
    def description(self) -> list[Description]:
        """Each launch in plain values, for the launcher in C++ (``native/``).

        These are the function's handle, the grid, the block and the bytes of shared memory, and
        whether the launch is a programmatic dependent launch (an attribute of
        ``cuLaunchKernelEx``). Then come the arguments: ``("tensor", i)`` is the address of the
        tensor ``names[i]``, ``("int", value)`` a 32-bit int, and ``("map", bytes, i)`` a tensor map
        of the tensor ``names[i]``. The launcher copies the map's 128 bytes, aligned to
        :data:`maps.ALIGNMENT`, and sets the address in the copy by the driver's
        ``cuTensorMapReplaceAddress``.
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
        return "map", self._tensor_maps[argument], self.names.index(argument.tensor)

    def run(self, *addresses: int) -> None:
        """Launches on the device's current stream, with tensors at these addresses.

        There is one address for each of :attr:`names`, 0 for an absent tensor. The tensors' memory
        must not be reused before the stream gets there, which PyTorch's allocator guarantees.
        Several threads may call this at once, and it may be captured in a CUDA graph.
        """
        if self._current_device() == self._index:
            self._run(addresses)
        else:
            with torch.cuda.device(self._index):
                self._run(addresses)

    def _run(self, addresses: tuple[int, ...]) -> None:
        # The driver copies the arguments during the call, so that buffers can be reused right
        # after it, but not by two threads at once: each takes its own (list.pop is atomic).
        try:
            buffers = self._idle.pop()
        except IndexError:
            buffers = self._new_buffers()
        self._pack_into(buffers.addresses, 0, *addresses)
        for encoded_at, tensor, of in buffers.mapped:
            status = self._replace_address(encoded_at, addresses[tensor])
            if status:
                self._replace_again(status, encoded_at, addresses[tensor], of)
        stream = self._stream(self._raw_stream(self._index))
        for start, arguments, launch in buffers.calls:
            (status,) = start(stream, arguments, 0)
            if status:
                self._launch_again(status, launch, functools.partial(start, stream, arguments, 0))
        self._idle.append(buffers)

    def _launch_again(self, status: Any, launch: Launch, start: Callable[[], tuple[Any]]) -> None:
        if self._enter_missing_context(status):
            (status,) = start()
        if status:
            raise self._launch_error(status, launch)

    def _replace_again(self, status: int, encoded_at: int, address: int, of: AnyMap) -> None:
        if self._enter_missing_context(status):
            status = self._replace_address(encoded_at, address)
        if status:
            launch = next(launch for launch in self.launches if of in launch.arguments)
            raise self._map_error(driver.bindings().CUresult(status), launch, of, address)

    def trouble(self, number: int, mapped: int, address: int, status: int, again: bool) -> None:
        """Handles an error of the launcher in C++: returns if it should try once more.

        What had the status is the launch of this number or, unless ``mapped`` is -1, setting the
        address in the tensor map that is the launch's argument of that number. ``again`` says that
        it has been tried twice.

        Raises:
            LaunchError: trying again is of no use.
        """
        failed, launch = driver.bindings().CUresult(status), self.launches[number]
        if not again and self._enter_missing_context(failed):
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
            f"{describe_status(status)}"
        )

    def _map_error(self, status: Any, launch: Launch, of: AnyMap, address: int) -> LaunchError:
        return LaunchError(
            f"mapping {of.tensor} at address {address:#x} for {describe(launch.kernel)} on "
            f"cuda:{self._index}, {of}: {describe_status(status)}"
        )

    def _enter_missing_context(self, status: Any) -> bool:
        """Enters the device's context if the status says that this thread has none.

        A thread has no context until its first call of the CUDA runtime that needs one. PyTorch may
        make none in a thread whose memory comes from the allocator's cache.
        """
        if status != driver.bindings().CUresult.CUDA_ERROR_INVALID_CONTEXT:
            return False
        answer = driver.bindings().cuCtxSetCurrent(driver.context(self._index))
        checked(answer, "entering the CUDA context")
        return True

    def _new_buffers(self) -> _ArgumentBuffers:
        addresses = array("Q", bytes(8 * len(self.names)))
        memory = maps.Memory(len(self._tensor_maps))
        for number, encoded in enumerate(self._tensor_maps.values()):
            memory[number] = encoded
        at: dict[Argument, int] = {
            **{name: _address(addresses) + 8 * i for i, name in enumerate(self.names)},
            **{of: memory.address(number) for number, of in enumerate(self._tensor_maps)},
        }
        pointers = []
        for launch, integers in zip(self.launches, self._integers, strict=True):
            integers_at = itertools.count(_address(integers), integers.itemsize)
            arguments = (
                next(integers_at) if isinstance(a, int) else at[a] for a in launch.arguments
            )
            pointers.append(array("Q", arguments))
        starts = map(_starter, self.launches, self._functions)
        calls = tuple(zip(starts, map(_address, pointers), self.launches, strict=True))
        mapped = tuple((at[of], self.names.index(of.tensor), of) for of in self._tensor_maps)
        return _ArgumentBuffers(addresses, memory, pointers, mapped, calls)


@dataclass(frozen=True, slots=True)
class _ArgumentBuffers:
    """The memory from which the driver reads the arguments of a sequence of launches.

    One thread at a time may use it. ``mapped`` are the tensor maps: where each lies, and the number
    of its tensor. ``calls`` are functions that launch, and the address of each one's pointers.
    """

    addresses: array[int]
    tensor_maps: maps.Memory
    pointers: list[array[int]]  # for each launch, the addresses of its arguments
    mapped: tuple[tuple[int, int, AnyMap], ...]
    calls: tuple[tuple[Callable[..., tuple[Any]], int, Launch], ...]


def _tensor_maps(launches: Sequence[Launch], index: int) -> dict[AnyMap, bytes]:
    """The encoded tensor maps among the arguments, complete but for the tensors' addresses."""
    wanted = {
        argument: launch
        for launch in launches
        for argument in launch.arguments
        if not isinstance(argument, str | int)
    }
    return {of: _encode_map(of, launch, index) for of, launch in wanted.items()}


def _encode_map(of: AnyMap, launch: Launch, index: int) -> bytes:
    with driver.entered(index):
        status, encoded = maps.encode(of, driver.bindings(), driver.function_address)
    action = f"describing {of.tensor} to {describe(launch.kernel)} on cuda:{index} by {of}"
    checked((driver.bindings().CUresult(status),), action)
    return encoded


def _starter(launch: Launch, function: Any) -> Callable[..., tuple[Any]]:
    """A function that launches on a stream, with arguments; for one thread at a time."""
    bindings = driver.bindings()
    if not launch.early:
        return functools.partial(
            bindings.cuLaunchKernel, function, *launch.grid, launch.block, 1, 1, launch.shared_bytes
        )
    config, launch_by = _dependent_launch_config(launch), bindings.cuLaunchKernelEx

    def start(stream: Any, arguments: int, extra: int) -> Any:
        config.hStream = stream
        return launch_by(config, function, arguments, extra)

    return start


def _dependent_launch_config(launch: Launch) -> Any:
    """The configuration of a programmatic dependent launch, without its stream."""
    bindings = driver.bindings()
    attribute, value = bindings.CUlaunchAttribute(), bindings.CUlaunchAttributeValue()
    name = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    attribute.id = getattr(bindings.CUlaunchAttributeID, name)
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    config = bindings.CUlaunchConfig()
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
