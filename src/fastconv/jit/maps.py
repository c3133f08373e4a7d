"""Encodes the tensor maps of Hopper's TMA through the CUDA driver.

The driver's functions are called by ctypes: ``cuda.bindings`` would have them write to Python
objects, whose addresses are not as aligned as the driver demands.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from fastconv.kernels.family import AnyMap, TensorMap

BYTES = 128
"""The size of an encoded tensor map."""

ALIGNMENT = 128
"""The alignment of an encoded tensor map in bytes.

The driver and the hardware ask for 64, but CUDA 13's own type is aligned to 128.
"""

# Stands for the tensor's address until that is known. It is aligned, and nothing is read there.
_PLACEHOLDER = 1 << 20

# The CUDA driver's names of element types, by the names in device code.
_TYPES = {
    "float": "FLOAT32",
    "tf32": "TFLOAT32",
    "double": "FLOAT64",
    "fastconv::float16": "FLOAT16",
    "fastconv::bfloat16": "BFLOAT16",
}

# PYFUNCTYPE keeps the GIL: the functions only compute, in less time than releasing it takes.
_ENCODE_TILED = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # the tensor map
    ctypes.c_int,  # the element type
    ctypes.c_uint32,  # the rank
    ctypes.c_void_p,  # the tensor's address
    ctypes.POINTER(ctypes.c_uint64),  # sizes
    ctypes.POINTER(ctypes.c_uint64),  # strides
    ctypes.POINTER(ctypes.c_uint32),  # the TMA box
    ctypes.POINTER(ctypes.c_uint32),  # element strides
    *[ctypes.c_int] * 4,  # interleave, swizzle, L2 promotion, out-of-bounds fill
)
_ENCODE_IM2COL = ctypes.PYFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_int),  # the lower corner of the bounding box
    ctypes.POINTER(ctypes.c_int),  # its upper corner
    ctypes.c_uint32,  # channels
    ctypes.c_uint32,  # pixels
    ctypes.POINTER(ctypes.c_uint32),
    *[ctypes.c_int] * 4,
)
_REPLACE_ADDRESS = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Memory:
    """Aligned memory for encoded tensor maps, which are numbered from 0."""

    def __init__(self, count: int) -> None:
        self._bytes = array("B", bytes(count * BYTES + ALIGNMENT - 1))
        self._start = -self._bytes.buffer_info()[0] % ALIGNMENT

    def address(self, number: int) -> int:
        """The address of a tensor map."""
        return self._bytes.buffer_info()[0] + self._start + number * BYTES

    def __getitem__(self, number: int) -> bytes:
        first = self._start + number * BYTES
        return self._bytes[first : first + BYTES].tobytes()

    def __setitem__(self, number: int, encoded: bytes) -> None:
        first = self._start + number * BYTES
        self._bytes[first : first + BYTES] = array("B", encoded)


class Parameters(NamedTuple):
    """A tensor map in the driver's numbers, without the tensor's address."""

    has_corners: bool  # im2col mode, where corners bound the pixels; otherwise tiled mode
    type: int
    swizzle: int
    promotion: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    element_strides: tuple[int, ...]
    box: tuple[int, ...]  # in im2col mode the channels and the pixels
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()


def parameters(of: AnyMap, driver: Any) -> Parameters:
    """Returns a tensor map in the driver's numbers; ``driver`` is ``cuda.bindings.driver``."""
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{of.swizzle}B' if of.swizzle else 'NONE'}"
    promotion = f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{of.promotion}B' if of.promotion else 'NONE'}"
    common = (
        int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[of.scalar]}")),
        int(getattr(driver.CUtensorMapSwizzle, swizzle)),
        int(getattr(driver.CUtensorMapL2promotion, promotion)),
        of.sizes,
        of.strides,
        of.element_strides,
    )
    if isinstance(of, TensorMap):
        return Parameters(False, *common, of.box)
    return Parameters(True, *common, (of.channels, of.pixels), of.lower, of.upper)


def encode(of: AnyMap, driver: Any, function_address: Callable[[str], int]) -> tuple[int, bytes]:
    """Encodes a tensor map, with a placeholder for the tensor's address.

    ``driver`` is ``cuda.bindings.driver``, and ``function_address`` finds its functions by name.
    Returns the driver's status and the bytes.
    """
    memory, map = Memory(1), parameters(of, driver)
    rank = len(map.sizes)
    tensor = (
        memory.address(0),
        map.type,
        rank,
        _PLACEHOLDER,
        (ctypes.c_uint64 * rank)(*map.sizes),
        (ctypes.c_uint64 * rank)(*map.strides),  # and a spare: the driver reads rank - 1
    )
    element_strides = (ctypes.c_uint32 * rank)(*map.element_strides)
    modes = (
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        map.swizzle,
        map.promotion,
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    if map.has_corners:
        encode_im2col = _ENCODE_IM2COL(function_address("cuTensorMapEncodeIm2col"))
        corners = ((ctypes.c_int * (rank - 2))(*corner) for corner in (map.lower, map.upper))
        status = encode_im2col(*tensor, *corners, *map.box, element_strides, *modes)
    else:
        encode_tiled = _ENCODE_TILED(function_address("cuTensorMapEncodeTiled"))
        status = encode_tiled(*tensor, (ctypes.c_uint32 * rank)(*map.box), element_strides, *modes)
    return status, memory[0]


def replace_address(function_address: Callable[[str], int]) -> Callable[[int, int], int]:
    """The driver's function that sets the tensor's address in an encoded tensor map.

    It takes the addresses of the map and of the tensor, and returns a status.
    """
    return _REPLACE_ADDRESS(function_address("cuTensorMapReplaceAddress"))
