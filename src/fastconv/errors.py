"""The errors of fastconv's own. Invalid arguments raise what PyTorch raises for them."""

from __future__ import annotations


class FastconvError(Exception):
    """The base of the errors that fastconv's functions raise of their own.

    Arguments that PyTorch would refuse raise what PyTorch raises for them, not this.

    Examples:
        >>> try:
        ...     fastconv.export("no such workload")
        ... except fastconv.FastconvError as error:
        ...     print(type(error).__name__)
        ExportError
    """


class GpuUnavailable(FastconvError, RuntimeError):
    """The GPU kernels cannot run on this machine; the message says what is missing.

    That is the package ``cuda-bindings`` (``pip install 'fastconv[cuda]'``), the compiler NVRTC, a
    driver that is new enough for both, or a GPU that kernels can be compiled for. Tensors on the
    CPU need none of them.

    Examples:
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> layer, images = fastconv.Conv2d(3, 8, 3).to(device), torch.randn(2, 3, 9, 9).to(device)
        >>> try:
        ...     output = layer(images)
        ... except fastconv.GpuUnavailable as error:
        ...     print(f"computed on the CPU: {error}")
        ...     output = layer.cpu()(images.cpu())
    """


class CompilationError(FastconvError, RuntimeError):
    """The compiler NVRTC refused a kernel; the message holds its log.

    Examples:
        >>> try:
        ...     report = fastconv.prepare(fastconv.Conv2d(3, 8, 3), torch.empty(2, 3, 9, 9))
        ... except fastconv.CompilationError as error:
        ...     print(f"please report this: {error}")
    """


class LaunchError(FastconvError, RuntimeError):
    """The CUDA driver refused to load or launch a kernel; the message has its status.

    An error of an earlier kernel in the same process may be the cause: after some of them (an
    illegal address, for example), the driver refuses everything.

    Examples:
        >>> try:
        ...     output = fastconv.Conv2d(3, 8, 3)(torch.randn(2, 3, 9, 9))
        ... except fastconv.LaunchError as error:
        ...     raise SystemExit(f"the GPU cannot go on: {error}")
    """


class ExportError(FastconvError, ValueError):
    """``fastconv.export`` or ``fastconv.bundle`` cannot write this; the message says why.

    Examples:
        >>> fastconv.export(shape="8x4x9x9 6x4x3x3 stride=0")
        Traceback (most recent call last):
        ...
        fastconv.errors.ExportError: ...
    """
