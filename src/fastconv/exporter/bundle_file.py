"""The file format of bundles, which ``native/bundle.h`` reads.

All numbers are signed, with 64 bits, little-endian. A list is its length and its elements, text its
length in bytes and its bytes. A bundle holds:

- the title ``fastconv bundle`` and a newline; the format's number, the bytes of all that follows
  this header, and their CRC-32;
- the version of fastconv, as text;
- a list of cubins, as text;
- a list of kernels: the index of its cubin, its name in it, and the most bytes of dynamic shared
  memory of its launches;
- a list of entries: the form's key (a list, which only C++ reads), the GPU (major and minor compute
  capability, SMs), and the members of ``Entry`` in ``native/entry.h``.

A launch is the index of its kernel, three sizes of the grid, the block's, the bytes of shared
memory, whether it is early, and a list of arguments. An argument is its kind, the integer itself or
the tensor's index, and for a tensor map the parameters of the driver's function that encodes it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fastconv._version import __version__
from fastconv.jit import driver, maps
from fastconv.kernels.family import Argument, Gpu, Kernel, Launch, Plan
from fastconv.kernels.gpus import number as architecture_number
from fastconv.ops.entries import Entry

_TITLE = b"fastconv bundle\n"
_FORMAT = 3  # changes with this layout, and with that of keys in native/entry.h
_TENSOR, _INTEGER, _MAP = range(3)  # the kinds of arguments in native/entry.h


class Planned(NamedTuple):
    """A form, planned for a GPU."""

    key: Sequence[int]  # what the native library's record_forms hands out
    gpu: Gpu
    entry: Entry
    is_filled: bool  # computed by PyTorch's elementwise operators
    plan: Plan | None  # None where there is nothing to launch
    tensors: Sequence[str]  # the names of the pass's tensors

    @property
    def launches(self) -> tuple[Launch, ...]:
        return () if self.plan is None else self.plan.launches


def encode(planned: Sequence[Planned], cubins: Mapping[tuple[str, Kernel], bytes]) -> bytes:
    """Returns the file for some forms, given the cubins of their kernels by architecture."""
    tables = _Tables(cubins)
    entries = [_entry(one, tables) for one in planned]
    rest = (
        _text(__version__.encode())
        + _list(map(_text, tables.cubins))
        + _list(
            _numbers(cubin) + _text(name.encode()) + _numbers(shared_bytes)
            for (cubin, name), shared_bytes in tables.kernels.items()
        )
        + _list(entries)
    )
    return _TITLE + _numbers(_FORMAT, len(rest), zlib.crc32(rest)) + rest


class _Tables:
    """The cubins and kernels of a file, each once, with its index as its position."""

    def __init__(self, built: Mapping[tuple[str, Kernel], bytes]) -> None:
        self._built = built
        self.cubins: dict[bytes, int] = {}
        self.kernels: dict[tuple[int, str], int] = {}  # the most shared memory, by cubin and name

    def kernel(self, launch: Launch, gpu: Gpu) -> int:
        """Returns the index of a launch's kernel."""
        cubin = self._built[gpu.architecture, launch.kernel]
        key = self.cubins.setdefault(cubin, len(self.cubins)), launch.kernel.entry
        self.kernels[key] = max(self.kernels.get(key, 0), launch.shared_bytes)
        return list(self.kernels).index(key)


def _entry(planned: Planned, tables: _Tables) -> bytes:
    entry, plan = planned.entry, planned.plan
    scratch_bytes, packs = (0, 0) if plan is None else (plan.scratch_bytes, plan.packs)
    regions = (
        entry.regions if plan is None else plan.offsets(planned.tensors[-len(entry.regions) :])
    )
    return (
        _list(map(_numbers, planned.key))
        + _numbers(*divmod(architecture_number(planned.gpu), 10), planned.gpu.sm_count)
        + _list(map(_numbers, entry.shape))
        + _numbers(entry.channels_last, entry.bias_elements, *entry.copied, scratch_bytes)
        + _numbers(*regions, packs, planned.is_filled)
        + _list(
            _launch(launch, tables.kernel(launch, planned.gpu), planned.tensors)
            for launch in planned.launches
        )
    )


def _launch(launch: Launch, kernel: int, tensors: Sequence[str]) -> bytes:
    sizes = (*launch.grid, launch.block, launch.shared_bytes)
    arguments = (_argument(argument, tensors) for argument in launch.arguments)
    return _numbers(kernel, *sizes, launch.early) + _list(arguments)


def _argument(argument: Argument, tensors: Sequence[str]) -> bytes:
    if isinstance(argument, str):
        return _numbers(_TENSOR, tensors.index(argument))
    if isinstance(argument, int):
        return _numbers(_INTEGER, argument)
    parameters = maps.parameters(argument, driver.bindings())
    encoded = (_parameter(value) for value in parameters)
    return _numbers(_MAP, tensors.index(argument.tensor)) + b"".join(encoded)


def _parameter(value: Any) -> bytes:
    return _list(map(_numbers, value)) if isinstance(value, tuple) else _numbers(value)


def _list(elements: Iterable[bytes]) -> bytes:
    all_of_them = list(elements)
    return _numbers(len(all_of_them)) + b"".join(all_of_them)


def _text(text: bytes) -> bytes:
    return _numbers(len(text)) + text


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
