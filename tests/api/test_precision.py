"""Which precision float32 convolutions have on a GPU: PyTorch's settings and fastconv's."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import fastconv
from effort import PATIENCE_S
from fastconv import _precision
from recorder import Recorder

pytestmark = pytest.mark.usefixtures("host_path")

cudnn = torch.backends.cudnn


def _tensors() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 6, 5, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)


def _seen(function: Callable[..., Any]) -> list[str | None]:
    with Recorder() as recorder:
        function()
    return [precision for _, precision in recorder.calls]


@pytest.fixture
def _pytorch_setting() -> Iterator[None]:
    """Allows a test to change PyTorch's settings, which PyTorch's testing utilities forbid."""
    before = cudnn.allow_tf32
    with torch.backends.__allow_nonbracketed_mutation():
        yield
        torch.backends.fp32_precision = cudnn.fp32_precision = "none"
        cudnn.allow_tf32 = before  # This sets the newer settings of convolutions too.
    assert cudnn.allow_tf32 == before


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


# PyTorch's settings, and what they mean for convolutions.
SETTINGS: dict[str, tuple[Callable[[], None], str]] = {
    "allow_tf32=True": (_set(cudnn, "allow_tf32", True), "tf32"),
    "allow_tf32=False": (_set(cudnn, "allow_tf32", False), "ieee"),
}
if hasattr(cudnn, "conv"):
    SETTINGS |= {
        "conv=tf32": (_set(cudnn.conv, "fp32_precision", "tf32"), "tf32"),
        "conv=ieee": (_set(cudnn.conv, "fp32_precision", "ieee"), "ieee"),
    }


@pytest.mark.usefixtures("_pytorch_setting")
@pytest.mark.parametrize("order", list(permutations(SETTINGS)), ids=",".join)
def test_follows_the_last_setting(order: tuple[str, ...]) -> None:
    for name in order:
        apply, meaning = SETTINGS[name]
        apply()
        assert _precision.pytorch_setting() == meaning


@pytest.mark.skipif(not hasattr(cudnn, "conv"), reason="PyTorch has no such settings")
@pytest.mark.usefixtures("_pytorch_setting")
@pytest.mark.parametrize("owner", [cudnn, torch.backends], ids=["cudnn", "all backends"])
@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_follows_inherited_settings(owner: Any, value: str) -> None:
    cudnn.conv.fp32_precision = "none"
    owner.fp32_precision = value
    assert _precision.pytorch_setting() == value


def test_none_arrives_without_a_choice() -> None:
    """The forward pass, and both gradients in one call."""
    assert _seen(lambda: fastconv.conv2d(*_tensors()).sum().backward()) == [None, None]


def test_contexts_nest() -> None:
    input, weight = _tensors()

    def call() -> Tensor:
        return fastconv.conv2d(input, weight)

    def nested() -> None:
        with fastconv.precision("ieee"):
            call()
            with fastconv.precision("tf32"):
                call()
            call()
        call()

    assert _seen(nested) == ["ieee", "tf32", "ieee", None]


def test_context_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), fastconv.precision("tf32"):
        raise KeyError
    assert _precision.override() is None


def test_context_can_be_entered_again() -> None:
    context = fastconv.precision("tf32")
    for _ in range(2):
        with context:
            assert _precision.override() == "tf32"
        assert _precision.override() is None


def test_context_can_be_entered_within_itself() -> None:
    ieee, tf32 = fastconv.precision("ieee"), fastconv.precision("tf32")
    with ieee:
        with tf32:
            with ieee:
                assert _precision.override() == "ieee"
            assert _precision.override() == "tf32"
            assert _in_a_thread(_precision.override) == "tf32"
            with tf32:
                assert _precision.override() == "tf32"
            assert _precision.override() == "tf32"
        assert _precision.override() == "ieee"
    assert _precision.override() is None
    assert _in_a_thread(_precision.override) is None


def _in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result(PATIENCE_S)


MODES = ["ieee", "tf32"]


@pytest.mark.parametrize("shared", [False, True], ids=["", "one object"])
def test_threads_do_not_interfere(shared: bool) -> None:
    """Two threads enter and leave contexts in turn, the first one first."""
    contexts = {mode: fastconv.precision(mode) for mode in MODES}
    turns = threading.Barrier(2, timeout=PATIENCE_S)
    seen: dict[str, list[Any]] = {mode: [] for mode in MODES}

    def work(mode: Any, first: bool) -> None:
        context = contexts["ieee" if shared else mode]
        if not first:
            turns.wait()
        with context:
            if first:
                turns.wait()
            turns.wait()  # Both threads are inside.
            with context:
                seen[mode] += _seen_here()
            seen[mode] += _seen_here()
            if not first:
                turns.wait()  # The other thread has left.
                seen[mode] += _seen_here()
        if first:
            turns.wait()

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(work, mode, mode == "ieee") for mode in MODES]:
            future.result(PATIENCE_S)
    others = "ieee" if shared else "tf32"
    assert seen == {"ieee": ["ieee"] * 2, "tf32": [others] * 3}
    assert _precision.override() is _in_a_thread(_precision.override) is None


def _seen_here() -> list[Any]:
    """A convolution's precision in this thread; a Recorder would also see other threads'."""
    chosen = _precision.override()
    assert _precision.override_untraced() == chosen
    return [chosen]


def test_asynchronous_tasks_do_not_interfere() -> None:
    """A task that begins inside a context stays inside it."""
    context, seen = fastconv.precision("ieee"), list[Any]()

    async def within(mode: Any, turns: int) -> None:
        with context if mode == "ieee" else fastconv.precision(mode):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert _seen_here() == [mode]
                seen.append(mode)

    async def without() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
            assert _seen_here() == [None]
            seen.append(None)

    async def inherits() -> None:
        with context:
            task = asyncio.ensure_future(asyncio.to_thread(_seen_here))
        assert await task == ["ieee"]

    async def all_of_them() -> None:
        several = [within("ieee", 2), within("tf32", 3), within("ieee", 4), without(), inherits()]
        await asyncio.gather(*several)

    asyncio.run(all_of_them())
    assert len(seen) == 13
    assert len(set(seen[:3])) > 1, "they took turns"
    assert _precision.override() is _in_a_thread(_precision.override) is None


def test_threads_without_a_context_take_another_thread_s() -> None:
    """Threads of nn.DataParallel, and those that recompute a checkpoint, need this."""
    with fastconv.precision("ieee"):
        assert _in_a_thread(_seen_here) == ["ieee"]
        with fastconv.precision("tf32"):
            assert _in_a_thread(_seen_here) == ["tf32"]
        assert _in_a_thread(_seen_here) == ["ieee"]
    assert _in_a_thread(_seen_here) == [None]


def test_left_by_another_thread() -> None:
    context = fastconv.precision("tf32")
    _in_a_thread(context.__enter__)
    assert _precision.override() == "tf32"
    context.__exit__(None, None, None)
    assert _precision.override() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_has_what_its_thread_has_entered() -> None:
    entered, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with fastconv.precision("tf32"):
            entered.set()
            assert may_leave.wait(PATIENCE_S)

    def in_child(expected: Any) -> bool:
        if not (child := os.fork()):
            os._exit(0 if _precision.override() == expected else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(PATIENCE_S)
    assert _precision.override() == "tf32"
    assert in_child(None)
    with fastconv.precision("ieee"):
        assert in_child("ieee")
    may_leave.set()
    thread.join()


@pytest.mark.parametrize("mode", ["ieee", "tf32"])
def test_argument_wins_over_context(mode: Any) -> None:
    input, weight = _tensors()
    module = fastconv.Conv2d(3, 4, 3, precision=mode)
    with fastconv.precision("tf32" if mode == "ieee" else "ieee"):
        assert _seen(lambda: fastconv.conv2d(input, weight, precision=mode)) == [mode]
        assert _seen(lambda: module(input)) == [mode]


def test_module_without_argument_follows_context() -> None:
    module, (input, _) = fastconv.Conv2d(3, 4, 3), _tensors()
    assert module.precision is None
    with fastconv.precision("tf32"):
        assert _seen(lambda: module(input)) == ["tf32"]


def test_backward_takes_the_choice_of_forward() -> None:
    input, weight = _tensors()
    with fastconv.precision("tf32"):
        output = fastconv.conv2d(input, weight)
    with Recorder() as recorder, fastconv.precision("ieee"):
        gradients = torch.autograd.grad(output.sum(), (input, weight), create_graph=True)
    assert recorder.calls == [("input_grad", "tf32"), ("weight_grad", "tf32")]
    with Recorder() as recorder:
        sum(gradient.square().sum() for gradient in gradients).backward()
    assert recorder.calls
    assert {precision for _, precision in recorder.calls} == {"tf32"}


@pytest.mark.parametrize("mode", ["TF32", "bf16", "highest", "", None, 32, True], ids=repr)
def test_unknown_modes(mode: Any) -> None:
    with pytest.raises(ValueError, match=f"'ieee' or 'tf32', but got {mode!r}"):
        fastconv.precision(mode)
    if mode is not None:  # None is conv2d's default.
        with pytest.raises(ValueError, match=f"but got {mode!r}"):
            fastconv.conv2d(*_tensors(), precision=mode)
        with pytest.raises(ValueError, match=f"but got {mode!r}"):
            fastconv.Conv2d(3, 4, 3, precision=mode)


def test_cpu_results_are_the_same() -> None:
    input, weight = _tensors()
    results = [fastconv.conv2d(input, weight, precision=mode) for mode in (None, "ieee", "tf32")]
    for result in results[1:]:
        assert result.equal(results[0])
