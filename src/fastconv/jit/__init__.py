"""The GPU runtime: compiles kernels at first use, keeps them on disk, and launches them.

Importing this imports nothing of CUDA; what is missing is reported at first use.
"""

from fastconv.jit.compile import (
    CompilationError,
    Compiled,
    GpuUnavailable,
    build,
    compile_kernel,
    nvrtc_version,
)
from fastconv.jit.launch import LaunchError, Prepared, architecture, build_all, prepare

__all__ = [
    "CompilationError",
    "Compiled",
    "GpuUnavailable",
    "LaunchError",
    "Prepared",
    "architecture",
    "build",
    "build_all",
    "compile_kernel",
    "nvrtc_version",
    "prepare",
]
