"""The native host path: a C++ library that does what an eager call does before its launches.

The library is compiled once, in the background, where there is a compiler. Python serves calls
until the library is there, and where there is no compiler. ``FASTCONV_NATIVE=0`` keeps to Python;
``FASTCONV_NATIVE=1`` makes the library's absence an error. Both paths compute the same results and
raise the same errors.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastconv import bypass
from fastconv.native import build, compiler
from fastconv.native.build import Unavailable

__all__ = [
    "HEADER",
    "Unavailable",
    "batch_norm_act",
    "before_cpu_pass",
    "conv2d",
    "conv_bn_act",
    "decide",
    "describe",
    "finish",
    "freeze",
    "in_the_way",
    "load",
    "load_if_built",
    "make",
    "make_deployed",
    "multiply_add_rate",
    "recorded_forms",
    "register",
    "serve_operators",
    "settle",
    "start_build",
    "under_way",
    "wanted",
]

conv2d: Callable[..., Any] | None = None
"""The library's function for eager calls, or None while Python serves them.

``conv2d(input, weight, bias, stride, padding, dilation, groups, precision, activation, residual,
axes)``, all by position, computes a convolution along 1, 2 or 3 ``axes``. With one more, the output
padding, it computes a transposed convolution. It computes nothing and returns
NotImplemented for a call that PyTorch's dispatcher has to see, or in whose arguments something is
wrong.
"""

batch_norm_act: Callable[..., Any] | None = None
"""The library's function for eager calls of batch normalization, or None while Python serves them.

``batch_norm_act(input, residual, weight, bias, running_mean, running_var, num_batches_tracked,
training, momentum, eps, activation, counts)``, all by position, returns NotImplemented as
:data:`conv2d` does. ``counts`` says whether the call adds one to ``num_batches_tracked``.
"""

conv_bn_act: Callable[..., Any] | None = None
"""The library's function for eager calls of convolution and normalization in training, or None.

``conv_bn_act(input, weight, bias, stride, padding, dilation, groups, precision, residual, ...)``
goes on with the arguments of :data:`batch_norm_act`, and ends with ``recomputes``: whether an input
that is the output of either function is computed again in the backward pass, and not kept for it.
It is kept where it has a residual or was changed in place, and within
``torch.autograd.graph.saved_tensors_hooks``.
"""

_VARIABLE = "FASTCONV_NATIVE"
# Characters of the compiler's output that a warning quotes: one missing header can cause megabytes.
_QUOTED_CHARACTERS = 4000
_NOT_YET = (
    "the library is built at the first call on a GPU, after some on a CPU, or by `fastconv build`"
)
# Passes on a CPU after which the library is built: a process that makes fewer calls ends before it
# has gained anything from a build, which takes about a minute of the CPU that it computes on.
_CPU_PASSES_BEFORE_BUILD = 64
_cpu_passes = 0  # how many passes Python has computed on a CPU
_reason = _NOT_YET  # why Python serves calls
_started = False  # whether start_build() has looked for the library
_forked = False  # whether this process is a fork of one that had imported fastconv
_frozen = False  # whether frozen_weights is active
_serving = True  # whether the library computes PyTorch's calls of operators
_make_entry: Callable[..., Any] | None = None  # makes the entries of the library's table
_kernels: dict[str, tuple[Callable[..., Any], ...]] = {}  # Python's, which the library replaces
_gradients: tuple[Callable[..., Any], ...] = ()  # Python's functions for nodes of the library
_module: Any = None  # the loaded library
_background: threading.Thread | None = None  # waits for the compiler
_lock = threading.RLock()


def wanted() -> bool | None:
    """The value of ``FASTCONV_NATIVE``: True for 1, False for 0, None where it is not set."""
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{_VARIABLE} should be 0 or 1, or not set, but got {value!r}")
    return None if value == "" else value == "1"


def describe() -> str:
    """Says which host path serves eager calls, and why."""
    if conv2d is not None and conv2d not in (_load_at_once, _require):
        return f"native ({build.library().name})"
    if wanted() is False:
        return f"Python ({_VARIABLE}=0)"
    if _reason is not _NOT_YET:
        return f"Python ({_reason})"
    if build.is_built():
        return f"native, as soon as a call is made ({build.library().name})"
    return f"Python ({_missing() or _NOT_YET})"


def start_build() -> None:
    """Starts to build the library, or uses it if it is built.

    It is called as a GPU's pass is planned, and by :func:`before_cpu_pass`.

    Does nothing while a CUDA graph is captured or PyTorch traces, nor in a forked process.
    :func:`describe` says what is missing, and a warning reports a compiler's failure.

    Raises:
        ValueError: ``FASTCONV_NATIVE`` has neither of its values, or ``FASTCONV_BUILD_TIMEOUT`` is
            no number of seconds.
    """
    global _started, _background, conv2d
    if _started or conv2d is not None or wanted() is False or in_the_way():
        return
    compiler.limit_s()  # raises here: an error in the background process would go unnoticed
    with _lock:
        if _started:
            return
        _started = True
        try:
            if not build.is_built():
                _check_failure()
                _background = threading.Thread(target=_wait, args=(build.start(),), daemon=True)
                _set_reason("the library is being built")  # before the thread sets another reason
                _background.start()
                return
        except (OSError, RuntimeError) as error:  # RuntimeError: Unavailable, or no more threads
            _set_reason(str(error))
            return
        conv2d = _load_at_once


def before_cpu_pass() -> None:
    """Is called before each pass that Python computes on a CPU.

    The first call uses the library if it is built. After some more, :func:`start_build` builds it.
    """
    global _cpu_passes
    if _started or conv2d is not None:
        return
    _cpu_passes += 1
    if _cpu_passes >= _CPU_PASSES_BEFORE_BUILD or (_cpu_passes == 1 and build.is_built()):
        start_build()


def decide() -> None:
    """Has the library or Python compute all later passes on a CPU: the library, if it is built.

    Their sums have other orders, so results would have other bits if the library were built
    meanwhile.
    """
    global _cpu_passes
    if _started or conv2d is not None:
        return
    if build.is_built():
        start_build()
        load_if_built()
    else:
        _cpu_passes = -sys.maxsize  # counted up to 64, but never


def finish() -> None:
    """Waits until the library that :func:`start_build` began to build is there, and loads it."""
    if _background is not None:
        _background.join()
    load_if_built()


def under_way() -> bool:
    """Whether the library is being built."""
    return _background is not None and _background.is_alive()


def settle() -> None:
    """Builds and loads the library if that is possible, so that all calls to be timed use it."""
    start_build()
    finish()


def make(
    again: bool = False, show: compiler.Show = lambda what, seconds: None
) -> tuple[Path, bool]:
    """Builds the library now, unless it is there and ``again`` is False.

    Calls ``show`` several times a second with what is under way and the seconds it has taken.

    Returns:
        The library's path, and whether it was built by this call.

    Raises:
        Unavailable: it cannot be built; the message says what is missing.
    """
    path = build.library()
    compiler.forget_failure(path)
    return path, build.build(again, show)


def make_deployed(
    again: bool = False, show: compiler.Show = lambda what, seconds: None
) -> tuple[Path, bool]:
    """Builds the library for programs without Python, as :func:`make` builds that for Python."""
    path = build.library(build.DEPLOYED)
    compiler.forget_failure(path)
    return path, build.build(again, show, build.DEPLOYED)


HEADER = build.SOURCES / "fastconv.h"
"""The header of the library for programs without Python."""


@contextmanager
def recorded_forms(record: Callable[..., None]) -> Iterator[None]:
    """A context in which the library calls ``record`` once for each form of call.

    Its arguments are the form's key in a bundle, or None if bundles have no such operator, the
    operator's name, and the operator's arguments.
    Calls under a transform, a mode or a tracer have no form. The library is built if it is not
    there.

    Raises:
        Unavailable: the library cannot be built or loaded, or ``FASTCONV_NATIVE=0`` forbids it.
    """
    if wanted() is False:
        raise Unavailable(f"forms are recorded by the native host path: unset {_VARIABLE}=0")
    with _lock:
        make()
        _use()
    _module.record_forms(record)
    try:
        yield
    finally:
        _module.record_forms(None)


def register(
    make_entry: Callable[..., Any],
    kernels: dict[str, tuple[Callable[..., Any], ...]],
    gradients: tuple[Callable[..., Any], ...],
) -> None:
    """Hands over the functions of Python that the library calls.

    ``make_entry(operator's name, *its arguments)`` returns an object with the attributes of
    ``fastconv.ops.entries.Entry`` or, for batch normalization, of ``NormEntry`` there. The library
    calls it at the first call of each form.

    ``kernels`` are the operators' kernels in Python by the operator's name: for CPU, CUDA and
    autograd. The library takes their place in PyTorch's dispatcher, and calls them for what it does
    not serve itself.

    ``gradients`` are ``norm_gradients`` of ``fastconv.ops.batchnorm``, ``block_gradients`` of
    ``fastconv.ops.blocks`` and ``norm_output`` of the former: what nodes of batch normalization
    call where the dispatcher has to see what they compute.
    """
    global _make_entry, _kernels, _gradients
    _make_entry, _kernels, _gradients = make_entry, kernels, gradients


@functools.cache
def load() -> Callable[..., Any]:
    """Loads the library and returns its function :data:`conv2d`.

    Raises:
        Unavailable: the library is not there, is not to be trusted, or does not load.
    """
    global _module
    _module = build.load()
    _module.set_make_entry(_make_entry)
    _module.serve_norms(*_gradients)
    _module.freeze(_frozen)
    _module.bypass(bypass.is_on())
    _module.serve_operators(_serving)
    _module.register_operators(_kernels)
    call: Callable[..., Any] = _module.call
    return call


def _use() -> None:
    """Loads the library, and has it serve calls."""
    global conv2d, batch_norm_act, conv_bn_act
    conv2d = load()
    batch_norm_act, conv_bn_act = _module.batch_norm_act, _module.conv_bn_act


def load_if_built() -> None:
    """Loads the library if it is there and not loaded: Python's operators call this.

    With ``FASTCONV_NATIVE=1`` it builds the library first, unless something is in the way.
    """
    if conv2d is _load_at_once:
        _load_if_possible()
    elif conv2d is _require and (build.is_built() or not in_the_way()):
        _load_required()


def multiply_add_rate(dtype: torch.dtype, seconds: float) -> float | None:
    """Measures a CPU's multiply-adds in registers, in float32 or float64.

    The library is loaded for this if it is built, but ``fastconv``'s functions do not begin to call
    it.

    Returns:
        The operations a second of all of PyTorch's threads together, or None where the library is
        not built, does not load, or is not wanted.
    """
    if wanted() is False:
        return None
    try:
        with _lock:
            if not build.is_built():
                return None
            load()
    except (OSError, RuntimeError):  # RuntimeError: Unavailable
        return None
    rate: float = _module.multiply_add_rate(dtype is torch.float64, seconds)
    return rate


def serve_operators(on: bool) -> None:
    """Sets whether the library, once it is loaded, or Python computes PyTorch's calls of operators.

    Tests compare the two. Calls of :data:`conv2d` do not go through operators.
    """
    global _serving
    _serving = on
    if _module is not None:
        _module.serve_operators(on)


def freeze(weights: bool) -> None:
    """Sets whether weights do not change from now on: see :class:`fastconv.frozen_weights`."""
    global _frozen
    _frozen = weights
    if _module is not None:
        _module.freeze(weights)


def _bypass_library(on: bool) -> None:
    if _module is not None:
        _module.bypass(on)


def _missing() -> str | None:
    """Says why the library cannot be built here; None if it can."""
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
    """Waits in the background until the library is built; the next call loads it."""
    global conv2d
    process.wait()
    failed = compiler.failure(build.library())
    if build.is_built():
        # This daemon thread does not load it: Python may end it at any point, also within C++ code.
        conv2d = _load_at_once
    elif failed is not None:
        _set_reason("the library did not compile; `fastconv build` tries again")
        warnings.warn(
            "fastconv's native host path did not compile; calls work, but cost more of the "
            f"CPU's time. {_VARIABLE}=0 does without it. {failed[:_QUOTED_CHARACTERS]}",
            stacklevel=2,
        )
    else:
        _set_reason("the library's build was stopped")


def _load_at_once(*arguments: Any) -> Any:
    """Takes the place of :data:`conv2d` until the first call, which loads the library."""
    _load_if_possible()
    return NotImplemented if conv2d is None else conv2d(*arguments)


def _load_if_possible() -> None:
    with _lock:
        if conv2d is _load_at_once:
            try:
                _use()
            except Unavailable as error:
                _give_up(error)


def _require(*arguments: Any) -> Any:
    """Takes the place of :data:`conv2d` with ``FASTCONV_NATIVE=1``, until the first call."""
    _load_required()
    return load()(*arguments)


def _load_required() -> None:
    """Builds the library, waits for it and loads it, or raises an error."""
    wanted()  # raises if the variable's value is invalid
    with _lock:
        if conv2d is _require:
            if not build.is_built():
                if in_the_way():
                    raise Unavailable(
                        f"{_VARIABLE}=1 asks for the native host path, which is not built while "
                        "a CUDA graph is captured, nor in a forked process: run `fastconv build` "
                        "first"
                    )
                build.build()
            _use()


def _give_up(error: Unavailable) -> None:
    global conv2d
    conv2d = None
    _set_reason(str(error))
    warnings.warn(f"fastconv's native host path is not used: {error}", stacklevel=4)


def _set_reason(reason: str) -> None:
    global _reason
    _reason = reason


def in_the_way() -> bool:
    """Whether nothing may be started in the background now.

    That is while PyTorch traces or a CUDA graph is captured, and in a forked process.
    """
    return (
        _forked
        or torch.compiler.is_compiling()
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    )


def _after_fork() -> None:
    global _forked, _lock
    _forked, _lock = True, threading.RLock()


bypass.listen(_bypass_library)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
if os.environ.get(_VARIABLE, "") not in ("", "0"):
    conv2d = _require
