"""A CUDA driver that records launches, and entries whose launches it records."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastconv.ops import entries
from fastconv.ops.entries import Entry
from native.helpers import Host

# C source of a driver whose functions call back into Python.
DRIVER = """
int (*on_launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                 void**, void**);
int (*on_replace)(void*, void*);
int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned bytes, void* stream, void** arguments, void** extra) {
  return on_launch(f, x, y, z, a, b, c, bytes, stream, arguments, extra);
}
struct attribute { int id, pad; union { char all[64]; int allowed; void* aligned; } value; };
struct config {
  unsigned x, y, z, a, b, c, bytes;
  void* stream;
  struct attribute* attributes;
  unsigned count;
};
int early;
int cuLaunchKernelEx(const struct config* o, void* f, void** arguments, void** extra) {
  if (o->count != 1 || o->attributes->id != 6 || o->attributes->value.allowed != 1) return 1;
  early = 1;
  int status =
      on_launch(f, o->x, o->y, o->z, o->a, o->b, o->c, o->bytes, o->stream, arguments, extra);
  early = 0;
  return status;
}
int cuTensorMapReplaceAddress(void* map, void* address) { return on_replace(map, address); }
int captured;
int cuStreamIsCapturing(void* stream, int* status) {
  *status = captured;
  return 0;
}
"""
ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
ON_REPLACE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
LIBCUDA = "libcuda.so.1"


def loaded_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(LIBCUDA, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


class Driver:
    """Records launches, and returns the statuses that a test sets."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.signatures: dict[int, str] = {}  # a letter for each parameter, by function handle
        self.launched: list[tuple[Any, ...]] = []
        self.early: list[bool] = []  # whether each launch was one with PDL
        self._early = ctypes.c_int.in_dll(library, "early")
        self.replaced: list[int] = []
        self.launch_statuses: list[int] = []
        self.replace_statuses: list[int] = []
        self.captured = ctypes.c_int.in_dll(library, "captured")
        self.captured.value = 0
        # The library holds addresses, which do not keep the callbacks alive.
        self._callbacks = (ON_LAUNCH(self._launch), ON_REPLACE(self._replace))
        for name, function in zip(("on_launch", "on_replace"), self._callbacks, strict=True):
            address = ctypes.cast(function, ctypes.c_void_p).value
            ctypes.c_void_p.in_dll(library, name).value = address

    def _launch(self, function: int, *rest: Any) -> int:
        *configuration, arguments, extra = rest
        assert extra is None
        values = [
            self._read(kind, arguments[i]) for i, kind in enumerate(self.signatures[function])
        ]
        self.launched.append((function, *configuration, values))
        self.early.append(bool(self._early.value))
        return self.launch_statuses.pop(0) if self.launch_statuses else 0

    def _read(self, kind: str, address: int) -> Any:
        if kind == "m":
            return address % 64, ctypes.string_at(address, 128)
        return {"p": ctypes.c_uint64, "i": ctypes.c_int32}[kind].from_address(address).value

    def _replace(self, map: int, address: int | None) -> int:
        status = self.replace_statuses.pop(0) if self.replace_statuses else 0
        self.replaced.append(address or 0)
        if not status:
            ctypes.c_uint64.from_address(map).value = address or 0
        return status


class Trouble(Exception):
    pass


class Launching:
    """A base of tests that make their own entries; CPU tensors have the null stream."""

    TENSORS = tuple(("tensor", i) for i in range(6))

    def _answer(
        self, host: Host, driver: Driver, *arguments: Any, early: Sequence[int] = (), **fields: Any
    ) -> list[Any]:
        """Makes calls launch functions 0xF0, 0xF1, ... with these arguments.

        ``early`` has the numbers of launches with PDL. Returns a list that gets the errors.
        """
        troubles: list[Any] = []
        launches = []
        for number, some in enumerate(arguments):
            size = ((5, 6, 7 + number), 128, 1024 * number)
            launches.append((0xF0 + number, *size, number in early, some))
            kinds = {"tensor": "p", "int": "i", "map": "m"}
            driver.signatures[0xF0 + number] = "".join(kinds[kind] for kind, *_ in some)

        def trouble(*what: Any) -> None:
            troubles.append(what)
            status, again = what[-2:]
            if status != 201 or again:
                raise Trouble(f"status {status}")

        def answer(operator: str, first: Tensor, second: Tensor, *rest: Any) -> Entry:
            shape = entries.make_entry(operator, first, second, *rest).shape
            elements = first.shape[1] if operator == "weight_grad" and rest[-2] else 0
            form = {"channels_last": False, **fields}
            return Entry(shape, bias_elements=elements, launches=launches, trouble=trouble, **form)

        host.answer = answer
        return troubles
