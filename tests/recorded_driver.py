"""A stand-in for the CUDA driver that records its calls, for tests without a GPU."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from fastconv.jit import maps

Status = IntEnum(
    "Status",
    {
        "CUDA_SUCCESS": 0,
        "CUDA_ERROR_INVALID_VALUE": 1,
        "CUDA_ERROR_INVALID_CONTEXT": 201,
        "CUDA_ERROR_NO_BINARY_FOR_GPU": 209,
        "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    },
)
Attribute = IntEnum(
    "Attribute",
    {
        "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 0,
        "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 1,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
    },
)
CaptureMode = IntEnum(
    "CaptureMode", {"CU_STREAM_CAPTURE_MODE_GLOBAL": 0, "CU_STREAM_CAPTURE_MODE_RELAXED": 2}
)


# The driver's numbers for the parts of a tensor map.
MapType = IntEnum(
    "MapType",
    {
        f"CU_TENSOR_MAP_DATA_TYPE_{name}": number
        for name, number in {
            "FLOAT16": 6,
            "FLOAT32": 7,
            "FLOAT64": 8,
            "BFLOAT16": 9,
            "TFLOAT32": 11,
        }.items()
    },
)
Interleave = IntEnum("Interleave", {"CU_TENSOR_MAP_INTERLEAVE_NONE": 0})
Swizzle = IntEnum(
    "Swizzle",
    [f"CU_TENSOR_MAP_SWIZZLE_{name}" for name in ("NONE", "32B", "64B", "128B")],
    start=0,
)
Promotion = IntEnum(
    "Promotion",
    [f"CU_TENSOR_MAP_L2_PROMOTION_{name}" for name in ("NONE", "L2_64B", "L2_128B", "L2_256B")],
    start=0,
)
Fill = IntEnum("Fill", {"CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": 0})
LaunchAttribute = IntEnum(
    "LaunchAttribute", {"CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 6}
)


class Driver:
    """Stands in for ``cuda.bindings.driver``, and records its calls and launches."""

    CUresult, CUfunction_attribute, CUstreamCaptureMode = Status, Attribute, CaptureMode
    CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle = MapType, Interleave, Swizzle
    CUtensorMapL2promotion, CUtensorMapFloatOOBfill = Promotion, Fill
    CUstream = int
    CUlaunchConfig = CUlaunchAttribute = CUlaunchAttributeValue = SimpleNamespace
    CUlaunchAttributeID = LaunchAttribute

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.statuses: dict[str, list[int]] = {}  # what the next calls of a function return
        self.version = 13000
        self.signature = "ppi"
        self.launched: list[tuple[Any, ...]] = []
        self.early: list[bool] = []  # whether each launch is a programmatic dependent launch
        self.entries: dict[bytes, Any] = {}  # functions that are called by their address
        self.encoded: list[tuple[Any, ...]] = []

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def __getattr__(self, name: str) -> Any:
        answers = {
            "cuDriverGetVersion": self.version,
            "cuGetErrorString": b"in words",
            "cuFuncGetAttribute": 1024,
            "cuModuleGetFunction": 0xF,
            "cuThreadExchangeStreamCaptureMode": CaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
        }

        def function(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            statuses = self.statuses.get(name)
            return Status(statuses.pop(0) if statuses else 0), answers.get(name, name)

        return function

    def cuLaunchKernel(self, *args: Any) -> tuple[Any]:
        return self._launch(False, *args)

    def cuLaunchKernelEx(self, config: Any, function: int, *args: Any) -> tuple[Any]:
        (attribute,) = config.attrs
        assert config.numAttrs == 1
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        early = (
            attribute.id == LaunchAttribute.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        sizes = (
            *(config.gridDimX, config.gridDimY, config.gridDimZ),
            *(config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes),
        )
        return self._launch(early, function, *sizes, config.hStream, *args)

    def _launch(self, early: bool, *args: Any) -> tuple[Any]:
        *configuration, arguments, extra = args
        pointers = (ctypes.c_void_p * len(self.signature)).from_address(arguments)
        values = [
            self._read(kind, pointer)
            for kind, pointer in zip(self.signature, pointers, strict=True)
        ]
        self.launched.append((*configuration, *values, extra))
        self.early.append(early)
        statuses = self.statuses.get("cuLaunchKernel")
        return (Status(statuses.pop(0) if statuses else 0),)

    def _read(self, kind: str, pointer: int) -> Any:
        if kind == "m":  # an address and, after it, the number of the map
            assert pointer % 128 == 0
            words = (ctypes.c_uint64 * 16).from_address(pointer)
            return words[0], *words[14:]
        return {"p": ctypes.c_uint64, "i": ctypes.c_int32}[kind].from_address(pointer).value

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[Any, ...]:
        assert (version, flags) == (12000, 0)
        if name not in self.entries:
            prototype, function = {
                b"cuTensorMapEncodeTiled": (maps._ENCODE_TILED, self._encode_tiled),
                b"cuTensorMapEncodeIm2col": (maps._ENCODE_IM2COL, self._encode_im2col),
                b"cuTensorMapReplaceAddress": (maps._REPLACE_ADDRESS, self._replace_address),
            }[name]
            self.entries[name] = prototype(function)
        return Status(0), ctypes.cast(self.entries[name], ctypes.c_void_p).value, Status(0)

    def _encode(self, kind: str, map: int, *args: Any) -> int:
        assert map % 128 == 0
        self.encoded.append((kind, *args))
        words = (ctypes.c_uint64 * 16).from_address(map)
        words[0], words[14], words[15] = args[2], len(self.encoded), 0xC0DE
        statuses = self.statuses.get(f"cuTensorMapEncode{kind}")
        return statuses.pop(0) if statuses else 0

    def _encode_tiled(self, map: int, type_: int, rank: int, *args: Any) -> int:
        address, sizes, strides, box, steps, *modes = args
        values = (sizes[:rank], strides[: rank - 1], box[:rank], steps[:rank])
        return self._encode("Tiled", map, type_, rank, address, *values, *modes)

    def _encode_im2col(self, map: int, type_: int, rank: int, *args: Any) -> int:
        address, sizes, strides, lower, upper, channels, pixels, steps, *modes = args
        corners = (lower[: rank - 2], upper[: rank - 2])
        values = (sizes[:rank], strides[: rank - 1], *corners, channels, pixels, steps[:rank])
        return self._encode("Im2col", map, type_, rank, address, *values, *modes)

    def _replace_address(self, map: int, address: int | None) -> int:
        assert map % 128 == 0
        statuses = self.statuses.get("cuTensorMapReplaceAddress")
        status = statuses.pop(0) if statuses else 0
        if not status:
            ctypes.c_uint64.from_address(map).value = address or 0
        return status
