"""The arithmetic of float32 convolutions on a GPU: PyTorch's setting, or the user's choice."""

from __future__ import annotations

import os
from contextvars import ContextVar
from threading import RLock, get_ident
from types import ModuleType, TracebackType
from typing import Literal, get_args

import torch

Precision = Literal["ieee", "tf32"]
"""The arithmetic of float32 convolutions on GPUs: see ``fastconv.precision``."""


class precision:
    """Context manager that fixes the arithmetic of float32 convolutions on GPUs.

    ``"tf32"`` rounds input and weight to TF32's 10-bit mantissa (to nearest) and accumulates in
    float32. ``"ieee"`` computes in float32 throughout. Outside of any such context, fastconv
    follows PyTorch's own setting (``torch.backends.cudnn.conv.fp32_precision``, or
    ``torch.backends.cudnn.allow_tf32`` before PyTorch 2.9) at the time a kernel runs.

    The choice covers the gradients of the convolutions called inside, wherever backward runs. It
    has no effect on CPU tensors, which are always computed in full float32, nor on other dtypes.

    Each thread and each asynchronous task has contexts of its own, and one object may be entered
    any number of times, in several of them at once. A thread that has entered none takes the choice
    of the context that any other thread has entered last and not left, as all threads share
    PyTorch's setting. That covers the threads of ``nn.DataParallel``, and those that recompute a
    checkpoint in backward.

    Args:
        mode: ``"ieee"`` or ``"tf32"``.

    Raises:
        ValueError: the mode is another one.

    Examples:
        >>> input, weight = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
        >>> with fastconv.precision("ieee"):
        ...     output = fastconv.conv2d(input, weight)
    """

    def __init__(self, mode: Precision) -> None:
        self.mode = checked(mode)

    def __enter__(self) -> None:
        _scope.entered = (*_scope.entered, self)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered = _scope.entered
        for place in range(len(entered) - 1, -1, -1):
            if entered[place] is self:
                _scope.entered = (*entered[:place], *entered[place + 1 :])
                return
        with _lock:  # another thread or task has entered it
            _forget(self)


_own: ContextVar[tuple[precision, ...]] = ContextVar("fastconv.precision", default=())
_everywhere: list[tuple[int, precision]] = []  # threads and contexts, in the order of entering
_lock = RLock()  # reentrant: the collection of a generator may leave its context at any point


class _Scope(ModuleType):
    """The contexts that the running code is in, as attributes of a module.

    TorchDynamo traces neither a ContextVar nor threads. But it reads and writes the attributes of a
    *module* without tracing how, guards an attribute by reading it again, and writes it for real
    wherever it stops tracing. So compiled code and eager code see the same contexts.
    """

    @property
    def entered(self) -> tuple[precision, ...]:
        """The contexts that this thread or asynchronous task has entered; the innermost is last."""
        return _own.get()

    @entered.setter
    def entered(self, contexts: tuple[precision, ...]) -> None:
        before, thread = _own.get(), get_ident()
        _own.set(contexts)
        same = 0
        while before[same : same + 1] == contexts[same : same + 1] != ():
            same += 1
        with _lock:
            for context in reversed(before[same:]):
                _forget(context, thread)
            _everywhere.extend((thread, context) for context in contexts[same:])

    @property
    def elsewhere(self) -> Precision | None:
        """The choice of the context that any other thread has entered last, and not left."""
        thread = get_ident()
        for other, context in reversed(_everywhere.copy()):
            if other != thread:
                return context.mode
        return None


_scope = _Scope("fastconv._precision.scope")


def _forget(context: precision, thread: int | None = None) -> None:
    """Removes the last record of a context: of this thread, or of any if ``thread`` is None."""
    for place in range(len(_everywhere) - 1, -1, -1):
        if _everywhere[place][1] is context and thread in (None, _everywhere[place][0]):
            del _everywhere[place]
            return


def _after_fork() -> None:
    """Removes the contexts of other threads, which do not exist in the child process."""
    global _lock
    _lock, thread = RLock(), get_ident()
    _everywhere[:] = [record for record in _everywhere if record[0] == thread]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def checked(mode: Precision) -> Precision:
    """Returns ``mode`` if it is valid, and raises a ValueError otherwise."""
    if mode not in get_args(Precision):
        raise ValueError(f"precision should be 'ieee' or 'tf32', but got {mode!r}")
    return mode


def override() -> Precision | None:
    """Returns the choice of the innermost ``with precision(...)``; None outside of any."""
    entered = _scope.entered
    return entered[-1].mode if entered else _scope.elsewhere


def override_untraced() -> Precision | None:
    """Returns the same as :func:`override`, in a fifth of the time; TorchDynamo cannot trace it."""
    if entered := _own.get():
        return entered[-1].mode
    return _scope.elsewhere if _everywhere else None


def pytorch_setting() -> Precision:
    """Returns PyTorch's current setting for float32 convolutions on GPUs.

    If PyTorch has the newer setting, only that is read: PyTorch keeps the older one equal to it,
    but raises an error when it is read after both have been written.
    """
    conv = getattr(torch.backends.cudnn, "conv", None)
    if conv is not None:
        return "tf32" if conv.fp32_precision == "tf32" else "ieee"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
