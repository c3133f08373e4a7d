"""Loads compiled kernels onto devices, where they stay for the life of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from fastconv.errors import GpuUnavailable, LaunchError
from fastconv.jit import driver, pool
from fastconv.jit.compile import describe
from fastconv.jit.driver import checked
from fastconv.kernels.family import Kernel, Launch

# Compute capabilities whose fastest instructions, for example wgmma, compile only for the
# architecture with the suffix "a". Its machine code runs on no other GPU.
_ARCHITECTURE_SPECIFIC = {(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}

# Bytes of shared memory, static and dynamic together, that a kernel may use without an attribute.
_DEFAULT_SHARED_BYTES = 48 * 1024

# CUDA's limits on the blocks along each dimension of a grid, the same on all GPUs.
_LARGEST_GRID = (2**31 - 1, 65535, 65535)


def architecture(device: torch.device) -> str:
    """The architecture to compile the device's kernels for: "sm_80" or "sm_90a", for example.

    Raises:
        GpuUnavailable: our kernels cannot run on the device.
    """
    if torch.version.hip:
        raise GpuUnavailable("fastconv's GPU kernels need an NVIDIA GPU; CPU tensors work")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        raise GpuUnavailable(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; "
            "fastconv's GPU kernels need 7.0 or newer"
        )
    return f"sm_{major}{minor}{'a' if (major, minor) in _ARCHITECTURE_SPECIFIC else ''}"


class LoadedKernel:
    """A kernel on a device; ``function`` is the driver's handle."""

    def __init__(self, kernel: Kernel, cubin: bytes, index: int) -> None:
        self._what = f"{describe(kernel)} on cuda:{index}"
        bindings, action = driver.bindings(), f"loading {self._what}"
        # cuLibraryLoadData may put off the loading until the first launch, at which a CUDA graph
        # may be captured. cuModuleLoadData loads at once. The module is never unloaded.
        module = checked(bindings.cuModuleLoadData(cubin), action)
        self.function = checked(bindings.cuModuleGetFunction(module, kernel.entry.encode()), action)
        self._most_threads = self._attribute("CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
        static_bytes = self._attribute("CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES")
        self._allowed_shared_bytes = _DEFAULT_SHARED_BYTES - static_bytes

    def allow(self, launch: Launch) -> None:
        """Has the driver allow the shared memory of a launch.

        Raises:
            LaunchError: the launch exceeds a limit of the kernel or of the device.
        """
        if launch.block > self._most_threads:
            raise LaunchError(
                f"{self._what} runs with {self._most_threads} threads in a block at most, "
                f"not with {launch.block}"
            )
        if any(size > most for size, most in zip(launch.grid, _LARGEST_GRID, strict=True)):
            raise LaunchError(
                f"{self._what}: a grid has at most {_LARGEST_GRID} blocks, not {launch.grid}"
            )
        with _lock:  # concurrent calls must not lower the limit
            if launch.shared_bytes > self._allowed_shared_bytes:
                self._allow_shared_bytes(launch.shared_bytes)
                self._allowed_shared_bytes = launch.shared_bytes

    def _allow_shared_bytes(self, shared_bytes: int) -> None:
        bindings = driver.bindings()
        attribute = bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(
            bindings.cuFuncSetAttribute(self.function, attribute, shared_bytes),
            f"giving {shared_bytes} bytes of shared memory to {self._what}",
        )

    def _attribute(self, name: str) -> int:
        bindings = driver.bindings()
        attribute = getattr(bindings.CUfunction_attribute, name)
        answer = bindings.cuFuncGetAttribute(attribute, self.function)
        return int(checked(answer, f"asking about {self._what}"))


_loaded: dict[tuple[int, Kernel], LoadedKernel] = {}  # by the device's index
_lock = threading.Lock()


def loaded_kernel(kernel: Kernel, index: int) -> LoadedKernel:
    """A kernel that :func:`load` has loaded onto the device."""
    return _loaded[index, kernel]


def load(
    kernels: Iterable[Kernel], index: int, show: Callable[[int, int], None] | None = None
) -> int:
    """Compiles and loads the kernels that are not on the device; returns how many these were.

    ``show`` is called with progress, as by :func:`pool.build_all`.
    """
    wanted = dict.fromkeys(kernels)
    if all((index, kernel) in _loaded for kernel in wanted):
        return 0
    with _lock:  # if another thread loads the same kernels, this one waits for it
        missing = [kernel for kernel in wanted if (index, kernel) not in _loaded]
        _load_missing(missing, index, show)
    return len(missing)


def _load_missing(
    kernels: list[Kernel], index: int, show: Callable[[int, int], None] | None
) -> None:
    if not kernels:
        return
    arch = architecture(torch.device("cuda", index))
    driver.check_version()
    cubins = pool.build_all(kernels, arch, show)
    with driver.entered(index):
        for kernel, cubin in zip(kernels, cubins, strict=True):
            _loaded[index, kernel] = LoadedKernel(kernel, cubin, index)


def compile_ahead(kernels: Iterable[Kernel], arch: str, index: int) -> None:
    """Compiles the kernels that are not on the device in the background, for :func:`load`.

    Raises nothing: :func:`load` reports a kernel that cannot be compiled.
    """
    missing = {kernel.text: kernel for kernel in kernels if (index, kernel) not in _loaded}
    for kernel in missing.values():
        pool.build_ahead(kernel, arch)
