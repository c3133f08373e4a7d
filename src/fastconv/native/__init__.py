"""The native host path: what an eager call does between the user and the GPU, in C++.

It is a library that is compiled where there is a compiler, once, in the background; Python serves
until then, and where there is none. ``FASTCONV_NATIVE=0`` keeps to Python, ``FASTCONV_NATIVE=1``
makes the library's absence an error. Both paths compute the same, and raise the same errors.
"""

from __future__ import annotations

import functools
import os
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastconv.native import build, compiler
from fastconv.native.build import Unavailable

__all__ = [
    "Unavailable",
    "begin",
    "bypass",
    "conv2d",
    "describe",
    "finish",
    "freeze",
    "in_the_way",
    "load",
    "make",
    "settle",
    "wanted",
]

conv2d: Callable[..., Any] | None = None
"""A call's way into the library, or None: then Python serves.

``conv2d(input, weight, bias, stride, padding, dilation, groups, precision, activation, residual)``,
all by position. It answers NotImplemented, with nothing done, to whatever PyTorch's dispatcher has
to see.
"""

_VARIABLE = "FASTCONV_NATIVE"
_MOST_WORDS = 4000  # characters of a compiler's, which has more where one thing is missing
_NOT_YET = "the library is built from the first call on a GPU on, or by `fastconv build`"
_reason = _NOT_YET  # why Python serves
_begun = False
_forked = False
_frozen = False
_bypassed = False
_module: Any = None
_background: threading.Thread | None = None
_lock = threading.RLock()


def wanted() -> bool | None:
    """``FASTCONV_NATIVE``: True for 1, False for 0, None where it is not set."""
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_VARIABLE} should be 0 or 1, or not set, but got {value!r}")
    return None if value == "" else value == "1"


def describe() -> str:
    """Which host path is in use, and why."""
    if conv2d is not None and conv2d not in (_load_at_once, _require):
        return f"native ({build.library().name})"
    if wanted() is False:
        return f"Python ({_VARIABLE}=0)"
    if _reason is not _NOT_YET:
        return f"Python ({_reason})"
    if build.is_built():
        return f"native from the first call on a GPU on ({build.library().name})"
    return f"Python ({_missing() or _NOT_YET})"


def begin() -> None:
    """Takes the library if there is one, or begins to build it; called when a GPU plans.

    Does nothing where that would be in the way: as a CUDA graph is captured or PyTorch traces, or
    in a forked process. What is missing is kept for :func:`describe`, and a compiler's failure is
    told in a warning.

    Raises:
        ValueError: ``FASTCONV_NATIVE`` has neither of its values, or ``FASTCONV_BUILD_TIMEOUT`` is
            no number of seconds.
    """
    global _begun, _background, conv2d
    if _begun or conv2d is not None or wanted() is False or in_the_way():
        return
    compiler.limit_s()  # raises here what nobody would hear of from a process in the background
    with _lock:
        if _begun:
            return
        _begun = True
        try:
            if not build.is_built():
                _check_failure()
                _background = threading.Thread(target=_wait, args=(build.start(),), daemon=True)
                _set_reason("the library is being built")  # before the thread has another
                _background.start()
                return
        except (OSError, RuntimeError) as error:  # Unavailable too, and no thread to be had
            _set_reason(str(error))
            return
        conv2d = _load_at_once


def finish() -> None:
    """Waits until what :func:`begin` began to build is there, and loads it; for benchmarks."""
    if _background is not None:
        _background.join()
    if conv2d is _load_at_once:
        _load_if_possible()


def under_way() -> bool:
    """Whether the library is being built."""
    return _background is not None and _background.is_alive()


def settle() -> None:
    """Waits for the library, where there is to be one: all calls then take it, and can be timed."""
    begin()
    finish()


def make(
    again: bool = False, show: compiler.Show = lambda what, seconds: None
) -> tuple[Path, bool]:
    """Builds the library now unless it is there, or in any case ``again``: where, and whether.

    ``show`` is told what is under way and for how many seconds, several times a second.

    Raises:
        Unavailable: it cannot be built; says what is missing.
    """
    path = build.library()
    compiler.forget_failure(path)
    return path, build.build(again, show)


@functools.cache
def load() -> Callable[..., Any]:
    """The library's :data:`conv2d`.

    Raises:
        Unavailable: it is not there, not to be trusted, or does not load.
    """
    from fastconv.ops.entries import prepare  # which plans, and that begins here

    global _module
    _module = build.load()
    _module.set_prepare(prepare)
    _module.freeze(_frozen)
    _module.bypass(_bypassed)
    call: Callable[..., Any] = _module.call
    return call


def freeze(weights: bool) -> None:
    """Says whether weights stay what they are from now on: see :class:`fastconv.frozen_weights`."""
    global _frozen
    _frozen = weights
    if _module is not None:
        _module.freeze(weights)


def bypass(on: bool) -> None:
    """Says whether Python has to serve all calls from now on, forward and backward.

    The library's table knows one plan for a call; where another is asked for
    (:func:`fastconv.kernels.planner.only`), it must not be used.
    """
    global _bypassed
    _bypassed = on
    if _module is not None:
        _module.bypass(on)


def _missing() -> str | None:
    """Why the library cannot be built here, if it cannot."""
    try:
        build.command()
        _check_failure()
    except (OSError, Unavailable) as error:
        return str(error).splitlines()[0]
    return None


def _check_failure() -> None:
    if compiler.failure(build.library()) is not None:
        raise Unavailable("the library did not compile before; `fastconv build` tries again")


def _wait(process: subprocess.Popen[bytes]) -> None:
    """In the background, until the library is built; whoever calls next will load it."""
    global conv2d
    process.wait()
    failed = compiler.failure(build.library())
    if build.is_built():
        conv2d = _load_at_once  # not here: this thread may be ended at any point, and with it C++
    elif failed is not None:
        _set_reason("the library did not compile; `fastconv build` tries again")
        warnings.warn(
            "fastconv's native host path did not compile; calls work, but cost more of the "
            f"processor's time. {_VARIABLE}=0 does without it. {failed[:_MOST_WORDS]}",
            stacklevel=2,
        )
    else:
        _set_reason("the library's building was stopped")


def _load_at_once(*arguments: Any) -> Any:
    """Stands for the library until the first call, which loads it."""
    _load_if_possible()
    return NotImplemented if conv2d is None else conv2d(*arguments)


def _load_if_possible() -> None:
    global conv2d
    with _lock:
        if conv2d is _load_at_once:
            try:
                conv2d = load()
            except Unavailable as error:
                _give_up(error)


def _require(*arguments: Any) -> Any:
    """The same where the library has to be there: it is built at once, or an error is raised."""
    global conv2d
    wanted()  # raises if the variable has neither of its values
    with _lock:
        if conv2d is _require:
            if not build.is_built():
                if in_the_way():
                    raise Unavailable(
                        f"{_VARIABLE}=1 asks for the native host path, which is not built while "
                        "a CUDA graph is captured, nor in a forked process: run `fastconv build` "
                        "before"
                    )
                build.build()
            conv2d = load()
    return load()(*arguments)


def _give_up(error: Unavailable) -> None:
    global conv2d
    conv2d = None
    _set_reason(str(error))
    warnings.warn(f"fastconv's native host path is not used: {error}", stacklevel=4)


def _set_reason(reason: str) -> None:
    global _reason
    _reason = reason


def in_the_way() -> bool:
    """Whether nothing may be begun in the background now: see :func:`begin`."""
    return (
        _forked
        or torch.compiler.is_compiling()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def _after_fork() -> None:
    global _forked, _lock
    _forked, _lock = True, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
if os.environ.get(_VARIABLE, "") not in ("", "0"):
    conv2d = _require
