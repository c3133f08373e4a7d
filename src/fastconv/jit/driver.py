"""The CUDA driver: its functions, their errors as exceptions, and the contexts of devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastconv.errors import GpuUnavailable, LaunchError
from fastconv.jit.compile import binding, nvrtc_version

# What drivers return for machine code of a compiler that is newer than they are.
_TOO_NEW = {
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}

# What kernels fail with while they run. The driver returns it from some later call.
_KERNEL_FAULTS = {
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
}


@functools.cache
def bindings() -> Any:
    """The driver's functions and types, as ``cuda.bindings`` has them."""
    return binding("driver")


def checked(answer: tuple[Any, ...], action: str) -> Any:
    """The value that a driver function returned beside its status.

    ``action`` says in the message what the call was for.

    Raises:
        GpuUnavailable: the driver is too old for the compiler's output.
        LaunchError: the status is any other error.
    """
    status, *values = answer
    if status:
        error = GpuUnavailable if status.name in _TOO_NEW else LaunchError
        raise error(f"{action}: {describe_status(status)}")
    return values[0] if values else None


def describe_status(status: Any) -> str:
    """A status in words, with a hint where one is known."""
    _, text = bindings().cuGetErrorString(status)
    words = f"{status.name}: {text.decode() if text else 'unknown error'}"
    if status.name in _TOO_NEW:
        words += "; the NVIDIA driver is too old for the compiler's output: update the driver"
    elif "CAPTURE" in status.name:
        words += "; call the operation once before capturing a CUDA graph, so that it is compiled"
    elif status.name in _KERNEL_FAULTS:
        words += "; the fault is that of a kernel launched earlier, ours or another"
    return words


def check_version() -> None:
    """Raises GpuUnavailable if the driver is older than the compiler's CUDA release."""
    version = checked(bindings().cuDriverGetVersion(), "asking for the driver's version")
    major, minor = nvrtc_version()
    if version // 1000 < major:
        raise GpuUnavailable(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, but the "
            f"compiler is NVRTC {major}.{minor}: update the driver, or install PyTorch and "
            f"cuda-bindings for CUDA {version // 1000}"
        )


def function_address(name: str) -> int:
    """The address of a driver function that exists since CUDA 12."""
    action = f"looking for the driver's {name}"
    address = checked(bindings().cuGetProcAddress(name.encode(), 12000, 0), action)
    if not address:
        raise GpuUnavailable(f"{action}: there is none; update the driver")
    return int(address)


@functools.cache
def context(index: int) -> Any:
    """The device's primary context, which PyTorch uses as well. It is never released."""
    driver, action = bindings(), f"looking for the CUDA context of cuda:{index}"
    device = checked(driver.cuDeviceGet(index), action)
    return checked(driver.cuDevicePrimaryCtxRetain(device), action)


@contextmanager
def entered(index: int) -> Iterator[None]:
    """Makes the device's context current, and allows loading while a CUDA graph is captured."""
    driver, action = bindings(), f"entering the CUDA context of cuda:{index}"
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    checked(driver.cuCtxPushCurrent(context(index)), action)
    try:
        # Loading is no part of a graph. The mode is this thread's: captures of other threads
        # stay protected.
        mode = checked(driver.cuThreadExchangeStreamCaptureMode(mode), action)
        try:
            yield
        finally:
            checked(driver.cuThreadExchangeStreamCaptureMode(mode), action)
    finally:
        checked(driver.cuCtxPopCurrent(), action)
