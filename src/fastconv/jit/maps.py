"""Has the CUDA driver make descriptors of tensors, for Hopper's tensor copies.

Its functions are called through ctypes: ``cuda.bindings`` would have them write to Python objects,
which do not lie at addresses that are as aligned as the driver demands.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Any

from fastconv.kernels.family import AnyMap, TensorMap

BYTES = 128
"""Of a descriptor."""

ALIGNMENT = 128
"""Of a descriptor: driver and kernels ask for 64 bytes, but CUDA 13's own type has 128."""

_PLACEHOLDER = 1 << 20
"""An address that is as aligned as any tensor's: nothing is read there."""

_TYPES = {
    "float": "FLOAT32",
    "tf32": "TFLOAT32",
    "double": "FLOAT64",
    "fastconv::float16": "FLOAT16",
    "fastconv::bfloat16": "BFLOAT16",
}

# The GIL is kept: they only compute, for less time than it takes to give it away.
_ENCODE_TILED = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # the descriptor
    ctypes.c_int,  # the type of elements
    ctypes.c_uint32,  # the rank
    ctypes.c_void_p,  # the tensor
    ctypes.POINTER(ctypes.c_uint64),  # sizes
    ctypes.POINTER(ctypes.c_uint64),  # strides
    ctypes.POINTER(ctypes.c_uint32),  # the box
    ctypes.POINTER(ctypes.c_uint32),  # element strides
    *[ctypes.c_int] * 4,  # interleave, swizzle, L2 promotion, what lies outside
)
_ENCODE_IM2COL = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_int),  # the lower corner
    ctypes.POINTER(ctypes.c_int),  # the upper corner
    ctypes.c_uint32,  # channels
    ctypes.c_uint32,  # pixels
    ctypes.POINTER(ctypes.c_uint32),
    *[ctypes.c_int] * 4,
)
_REPLACE_ADDRESS = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Memory:
    """Room for descriptors, aligned: that with a given number begins at :meth:`address`."""

    def __init__(self, count: int) -> None:
        self._bytes = array("B", bytes(count * BYTES + ALIGNMENT - 1))
        self._start = -self._bytes.buffer_info()[0] % ALIGNMENT

    def address(self, number: int) -> int:
        return self._bytes.buffer_info()[0] + self._start + number * BYTES

    def __getitem__(self, number: int) -> bytes:
        first = self._start + number * BYTES
        return self._bytes[first : first + BYTES].tobytes()

    def __setitem__(self, number: int, descriptor: bytes) -> None:
        first = self._start + number * BYTES
        self._bytes[first : first + BYTES] = array("B", descriptor)


def encoded(of: AnyMap, driver: Any, entry: Callable[[str], int]) -> tuple[int, bytes]:
    """The driver's status, and the descriptor with an address that is yet to be replaced.

    ``entry`` gives the address of a function of the driver.
    """
    memory = Memory(1)
    rank = len(of.sizes)
    tensor = (
        memory.address(0),
        int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[of.scalar]}")),
        rank,
        _PLACEHOLDER,
        (ctypes.c_uint64 * rank)(*of.sizes),
        (ctypes.c_uint64 * rank)(*of.strides),  # one more than is read: there are empty ones
    )
    element_strides = (ctypes.c_uint32 * rank)(*of.element_strides)
    modes = _modes(of, driver)
    if isinstance(of, TensorMap):
        encode = _ENCODE_TILED(entry("cuTensorMapEncodeTiled"))
        status = encode(*tensor, (ctypes.c_uint32 * rank)(*of.box), element_strides, *modes)
    else:
        encode = _ENCODE_IM2COL(entry("cuTensorMapEncodeIm2col"))
        corners = ((ctypes.c_int * (rank - 2))(*corner) for corner in (of.lower, of.upper))
        status = encode(*tensor, *corners, of.channels, of.pixels, element_strides, *modes)
    return status, memory[0]


def replace_address(entry: Callable[[str], int]) -> Callable[[int, int], int]:
    """A function that puts an address into the descriptor at another, and returns a status."""
    return _REPLACE_ADDRESS(entry("cuTensorMapReplaceAddress"))


def _modes(of: AnyMap, driver: Any) -> tuple[int, int, int, int]:
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{of.swizzle}B' if of.swizzle else 'NONE'}"
    promotion = f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{of.promotion}B' if of.promotion else 'NONE'}"
    return (
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(driver.CUtensorMapSwizzle, swizzle)),
        int(getattr(driver.CUtensorMapL2promotion, promotion)),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
