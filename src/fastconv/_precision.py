"""Which arithmetic a float32 convolution uses on a GPU: PyTorch's setting, or the user's."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, get_args

import torch

Precision = Literal["ieee", "tf32"]


# What the innermost ``with precision(...)`` asks for; None: follow PyTorch. One for the process, as
# PyTorch's own settings are: the threads of nn.DataParallel share it, and torch.compile guards it.
_override: Precision | None = None


class precision:
    """Context manager that fixes the arithmetic of float32 convolutions on GPUs.

    ``"tf32"`` rounds input and weight to TF32's 10-bit mantissa (to nearest) and accumulates in
    float32. ``"ieee"`` computes in float32 throughout. Outside of any such context, fastconv
    follows PyTorch's own setting (``torch.backends.cudnn.conv.fp32_precision``, or
    ``torch.backends.cudnn.allow_tf32`` before PyTorch 2.9) at the time a kernel runs.

    The choice covers the gradients of the convolutions called inside, wherever backward runs. Like
    PyTorch's setting, it holds for the whole process. It has no effect on CPU tensors, which are
    always computed in full float32, nor on other dtypes.

        >>> with fastconv.precision("ieee"):
        ...     y = fastconv.conv2d(x, w)
    """

    def __init__(self, mode: Precision) -> None:
        self.mode = checked(mode)

    def __enter__(self) -> None:
        global _override
        self._outer = _override
        _override = self.mode

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _override
        _override = self._outer


def checked(mode: Precision) -> Precision:
    """``mode`` itself if it is one of ours; otherwise a ValueError that names it."""
    if mode not in get_args(Precision):
        raise ValueError(f"precision should be 'ieee' or 'tf32', but got {mode!r}")
    return mode


def override() -> Precision | None:
    """What the innermost ``with precision(...)`` asks for, if there is one."""
    return _override


def pytorch_setting() -> Precision:
    """What PyTorch itself is set to use for float32 convolutions on GPUs, now.

    Where PyTorch has the newer setting, only that is read: the older one is kept in step with it,
    but raises once both have been written.
    """
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is not None:
        return "tf32" if conv.fp32_precision == "tf32" else "ieee"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
