"""The GPU runtime: compiles kernels at first use, caches them on disk, and launches them.

Importing this package imports nothing of CUDA. What is missing is reported at first use.
"""

from fastconv.errors import CompilationError, GpuUnavailable, LaunchError
from fastconv.jit.compile import (
    Compiled,
    build,
    compile_kernel,
    nvrtc_version,
)
from fastconv.jit.launch import LoadedLaunches, load_launches
from fastconv.jit.loading import architecture
from fastconv.jit.pool import build_all

__all__ = [
    "CompilationError",
    "Compiled",
    "GpuUnavailable",
    "LaunchError",
    "LoadedLaunches",
    "architecture",
    "build",
    "build_all",
    "compile_kernel",
    "load_launches",
    "nvrtc_version",
]
