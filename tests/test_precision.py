"""Which arithmetic float32 convolutions are told to use on a GPU: whose word counts, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import fastconv
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
    """PyTorch's settings may be changed, which its own testing utilities forbid, until the end."""
    before = cudnn.allow_tf32
    with torch.backends.__allow_nonbracketed_mutation():
        yield
        torch.backends.fp32_precision = cudnn.fp32_precision = "none"
        cudnn.allow_tf32 = before  # sets the newer settings of convolutions too
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
    assert _seen(lambda: fastconv.conv2d(*_tensors()).sum().backward()) == [None, None, None]


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
    if mode is not None:  # where None is the default
        with pytest.raises(ValueError, match=f"but got {mode!r}"):
            fastconv.conv2d(*_tensors(), precision=mode)
        with pytest.raises(ValueError, match=f"but got {mode!r}"):
            fastconv.Conv2d(3, 4, 3, precision=mode)


def test_cpu_results_are_the_same() -> None:
    input, weight = _tensors()
    results = [fastconv.conv2d(input, weight, precision=mode) for mode in (None, "ieee", "tf32")]
    for result in results[1:]:
        assert result.equal(results[0])
