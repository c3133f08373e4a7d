"""The errors that fastconv raises of its own, beside PyTorch's for invalid arguments."""

from __future__ import annotations


class FastconvError(Exception):
    """The base of all errors of fastconv's own.

    Invalid arguments raise what PyTorch raises for them (``RuntimeError``, ``ValueError``,
    ``TypeError``), not this.

    Example:
        >>> try:
        ...     fastconv.export("no such workload")
        ... except fastconv.FastconvError as error:
        ...     print(type(error).__name__)
        ExportError
    """


class GpuUnavailable(FastconvError, RuntimeError):
    """The GPU kernels cannot run on this machine; the message says what is missing.

    That is the package ``cuda-bindings`` (``pip install 'fastconv[cuda]'``), the compiler NVRTC, or
    a driver that is new enough for both. Tensors on the CPU need none of them.

    Example:
        >>> issubclass(fastconv.GpuUnavailable, RuntimeError)
        True
    """


class CompilationError(FastconvError, RuntimeError):
    """The compiler NVRTC refused a kernel; the message holds its log.

    Example:
        >>> issubclass(fastconv.CompilationError, RuntimeError)
        True
    """


class LaunchError(FastconvError, RuntimeError):
    """The CUDA driver refused to load or launch a kernel; the message has its status.

    An error of an earlier kernel in the same process may be the cause: after some of them (an
    illegal address, for example), the driver refuses everything.

    Example:
        >>> issubclass(fastconv.LaunchError, RuntimeError)
        True
    """


class ExportError(FastconvError, ValueError):
    """:func:`fastconv.export` cannot export this; the message says what, and what can be.

    Example:
        >>> fastconv.export(shape="8x4x9x9 6x4x3x3 stride=0")
        Traceback (most recent call last):
        ...
        fastconv.errors.ExportError: ...
    """
